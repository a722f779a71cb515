#!/usr/bin/env python3
"""The record of an experiment: a JSON line for each finished run.

rows.py OUT EXPERIMENT COMMIT

OUT holds runs NAME-sSEED and evaluations eval-NAME-sSEED.txt.  `accuracy` is the mean of the last two validations, or
the evaluation's; `drop` is the largest loss from a validation to a later one.  Figures of training are means over the
steps, costs are sums.  `curve` has a value for each validation: costs up to there, means since the one before.  Of a
run without validations that replays beginnings of responses (RPO), `curve` is over the fraction of a response that is
replayed, in fifths.
"""
import glob
import json
import os
import re
import sys

from paired import mean

REWARD = re.compile(r"val-core/[a-z]+/reward/mean@\d+")
SPARSE = re.compile(r"val-core/[a-z]+_kv/reward/mean@\d+")
# Metrics whose mean over the steps is recorded.
MEANS = {
    "rejected": "rollout_corr/rejection_rate", "kl": "rollout_corr/kl", "saved": "kv/tokens_saved/mean",
    "peak": "kv/tokens_saved/peak", "read": "kv/tokens_saved/read", "grad": "actor/grad_norm", "entropy": "actor/entropy",
    "moved": "actor/ppo_kl", "clipped": "actor/pg_clipfrac", "zero": "filter/zero_std_fraction",
}
# Costs: sums over the steps, of tokens or GFLOP.
SUMS = {
    "generated": ["tokens/generated"], "trained": ["tokens/trained"], "loss": ["tokens/loss"], "rollout": ["flops/rollout"],
    "learner": ["flops/learner", "flops/distill", "flops/old_log_prob", "flops/ref"],
    "mismatch": ["exact/mismatch_tokens"],
}
CURVE = ["generated", "learner", "kl", "rejected", "entropy", "grad", "zero"]


def figures(steps):
    """Means and sums over steps; a metric that no step has is left out."""
    found = {key: mean([m.get(name) for m in steps]) for key, name in MEANS.items()}
    for key, names in SUMS.items():
        if any(name in m for m in steps for name in names):
            unit = 1e9 if names[0].startswith("flops/") else 1
            found[key] = sum(m.get(name) or 0 for m in steps for name in names) / unit
    return {key: value for key, value in found.items() if value is not None}


def short(value):
    """Five digits of each fraction; numbers of tokens stay whole."""
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [short(v) for v in value]
    if not isinstance(value, float):
        return value
    return int(value) if value == int(value) else float("%.5g" % value)


def by_replayed(run):
    """Of groups by the fraction of a response that is replayed: mean score, and the fraction whose scores are all equal."""
    groups, fifths = {}, [[] for _ in range(5)]
    with open(os.path.join(run, "rollouts.jsonl")) as f:
        for sample in map(json.loads, f):
            groups.setdefault((sample["step"], sample["group"]), []).append(sample)
    for group in groups.values():
        scores = [sample["score"] for sample in group]
        kept = group[0].get("replayed", 0) / mean([len(sample["ids"]) for sample in group])
        fifths[min(4, int(5 * kept))].append((mean(scores), float(len(set(scores)) == 1)))
    return {"kept": [0.1, 0.3, 0.5, 0.7, 0.9], "accuracy": [mean([a for a, _ in fifth]) for fifth in fifths],
            "zero": [mean([z for _, z in fifth]) for fifth in fifths]}


def record(run):
    with open(os.path.join(run, "metrics.jsonl")) as f:
        log = [json.loads(line) for line in f if line.endswith("\n")]
    train = [m for m in log if m["training/global_step"] > 0]
    found = figures(train)
    found["sampler"] = mean([m.get("critic/score/mean") for m in train[-20:]])
    found["length"] = mean([m.get("response_length/mean") for m in train[-20:]])
    found["grad_max"] = max((m["actor/grad_norm"] for m in train if m.get("actor/grad_norm") is not None), default=None)
    found["kv"] = mean([m.get("perf/kv_peak_bytes") for m in train])
    found["sparse"] = mean([m[k] for m in log for k in m if SPARSE.fullmatch(k)][-2:])
    curve = {"step": [], "accuracy": [], **{key: [] for key in CURVE}}
    for i, m in enumerate(log):
        for reward in [m[k] for k in m if REWARD.fullmatch(k)]:
            step, since = m["training/global_step"], curve["step"][-1] if curve["step"] else -1
            window = figures([s for s in train if since < s["training/global_step"] <= step])
            until = figures([s for s in train if s["training/global_step"] <= step])
            curve["step"].append(step)
            curve["accuracy"].append(reward)
            for key in CURVE:
                curve[key].append(until.get(key, 0) if key in SUMS else window.get(key))
    if curve["step"]:
        scores = curve["accuracy"]
        found["first"], found["accuracy"] = scores[0], mean(scores[-2:])
        found["drop"] = max(max(scores[:i + 1]) - score for i, score in enumerate(scores))
        found["curve"] = {key: values for key, values in curve.items() if any(v is not None for v in values)}
    elif any("rpo/saved" in m for m in train):
        found["curve"] = by_replayed(run)
    return {key: value for key, value in found.items() if value is not None}


def rows(out):
    """(name, seed) -> figures."""
    found = {}
    for model in glob.glob(os.path.join(glob.escape(out), "*", "model")):
        run = os.path.dirname(model)
        name = re.fullmatch(r"(.*)-s(\d+)", os.path.basename(run))
        if name and name[1] != "sft":
            found[name[1], int(name[2])] = record(run)
    for path in glob.glob(os.path.join(glob.escape(out), "eval-*.txt")):
        name = re.fullmatch(r"eval-(.*)-s(\d+)\.txt", os.path.basename(path))
        with open(path) as f:
            score = re.search(r"^mean@\d+\s+([0-9.]+)", f.read(), re.M)
        if name and score:  # of a run without validations, or of a model under another policy
            key = (name[1], int(name[2]))
            found.setdefault(key if key in found else ("eval-" + name[1], key[1]), {})["accuracy"] = float(score[1])
    return found


def main():
    out, experiment, commit = sys.argv[1:]
    for (name, seed), found in sorted(rows(out).items()):
        command = f"SEEDS={seed} ONLY='{name}-s*' tools/experiments/{experiment}"
        row = {"experiment": experiment, "name": name, "seed": seed, "commit": commit, "command": command, **short(found)}
        print(json.dumps(row, separators=(",", ":")))


if __name__ == "__main__":
    main()
