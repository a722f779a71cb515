#!/usr/bin/env python3
"""Tables of an experiment's runs as Markdown: means over seeds, of the runs that are done.

table.py OUT COLUMNS... [--more A B]...

OUT holds runs NAME-sSEED; COLUMNS are `sparse`, `cost` and `short`.  Accuracy is the mean of the last two validations.
--more A B: is A more accurate than B?  The difference, paired by seed, and its 95 % interval (Student's t); "holds" and
"the contrary" where the interval has no 0 in it, else "cannot be seen".
"""
import argparse
import glob
import json
import os
import re
from collections import defaultdict

# 97.5 % quantiles of Student's t for 1 .. 9 degrees of freedom.
T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]


def steps(run):
    with open(os.path.join(run, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


def mean(xs):
    xs = [x for x in xs if x is not None]
    return sum(xs) / len(xs) if xs else None


def deviation(xs):
    m = mean(xs)
    return (sum((x - m) ** 2 for x in xs) / (len(xs) - 1)) ** 0.5 if len(xs) > 1 else 0


def row(run):
    log = steps(run)
    train = [m for m in log if m["training/global_step"] > 0]
    val = [m[k] for m in log for k in m if re.fullmatch(r"val-core/[a-z]+/reward/mean@\d+", k)]

    def over(name, part=train):
        return mean([m.get(name) for m in part])

    def total(*names):
        return sum(m.get(name) or 0 for m in train for name in names)

    return {
        "first": val[0], "last": val[-1], "accuracy": mean(val[-2:]),
        "sparse": mean([m[k] for m in log for k in m if re.fullmatch(r"val-core/[a-z]+_kv/reward/mean@\d+", k)][-2:]),
        "sampler": over("critic/score/mean", train[-20:]),
        "rejected": over("rollout_corr/rejection_rate"),
        "kl": over("rollout_corr/kl"),
        "mismatch": total("exact/mismatch_tokens"),
        "saved": over("kv/tokens_saved/mean"),
        "peak": over("kv/tokens_saved/peak"),
        "read": over("kv/tokens_saved/read"),
        "kv": over("perf/kv_peak_bytes"),
        "grad": over("actor/grad_norm"),
        "length": over("response_length/mean", train[-20:]),
        "zero": over("filter/zero_std_fraction"),
        "generated": total("tokens/generated"), "trained": total("tokens/trained"), "loss": total("tokens/loss"),
        "rollout": total("flops/rollout"), "learner": total("flops/learner", "flops/distill", "flops/old_log_prob", "flops/ref"),
        "gen_s": total("timing_s/gen"),
        "learn_s": total("timing_s/update_actor", "timing_s/update_student", "timing_s/old_log_prob", "timing_s/ref"),
    }


# Header, key, scale, form.
COLUMNS = {
    "short": [
        ("sampler's reward", "sampler", 1, "%.2f"), ("rejected", "rejected", 1, "%.2f"), ("KL a token", "kl", 1, "%.3f"),
        ("slots saved at the peak", "peak", 1, "%.2f"), ("groups without signal", "zero", 1, "%.2f"),
        ("gradient norm", "grad", 1, "%.2f"), ("generated tokens, k", "generated", 1e-3, "%.0f"),
        ("rollout, TFLOP", "rollout", 1e-12, "%.1f"), ("learner, TFLOP", "learner", 1e-12, "%.1f"),
    ],
    "sparse": [
        ("sparse validation", "sparse", 1, "%.3f"), ("sampler's reward", "sampler", 1, "%.3f"), ("rejected", "rejected", 1, "%.3f"),
        ("KL a token", "kl", 1, "%.4f"), ("slots saved: mean", "saved", 1, "%.3f"), ("at the peak", "peak", 1, "%.3f"),
        ("reads saved", "read", 1, "%.3f"), ("KV kB at peak", "kv", 1e-3, "%.0f"), ("gradient norm", "grad", 1, "%.3f"),
        ("length", "length", 1, "%.0f"),
    ],
    "cost": [
        ("generated tokens, M", "generated", 1e-6, "%.3f"), ("rows of the learner, M", "trained", 1e-6, "%.3f"),
        ("tokens in the loss, M", "loss", 1e-6, "%.3f"), ("rollout, TFLOP", "rollout", 1e-12, "%.3f"),
        ("learner, TFLOP", "learner", 1e-12, "%.3f"), ("rollout, s", "gen_s", 1, "%.1f"),
        ("learner, s", "learn_s", 1, "%.1f"), ("groups without signal", "zero", 1, "%.2f"),
        ("gradient norm", "grad", 1, "%.3f"), ("length", "length", 1, "%.0f"),
    ],
}


def show(x, scale, form):
    return "-" if x is None else form % (x * scale)


def compare(runs, a, b):
    pairs = [runs[a][s]["accuracy"] - runs[b][s]["accuracy"] for s in sorted(runs[a].keys() & runs[b].keys())]
    if len(pairs) < 2:
        return f"| {a} > {b} | {len(pairs)} | - | - |"
    m = mean(pairs)
    half = T[min(len(pairs) - 1, len(T)) - 1] * deviation(pairs) / len(pairs) ** 0.5
    verdict = "holds" if m - half > 0 else "the contrary" if m + half < 0 else "cannot be seen"
    return f"| {a} > {b} | {len(pairs)} | {m:+.3f} ± {half:.3f} | {verdict} |"


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out")
parser.add_argument("columns", nargs="+", choices=COLUMNS)
parser.add_argument("--more", nargs=2, action="append", default=[], metavar=("A", "B"))
options = parser.parse_args()

runs = defaultdict(dict)
for folder in sorted(glob.glob(os.path.join(options.out, "*", "model"))):
    run = os.path.dirname(folder)
    name = re.fullmatch(r"(.*)-s(\d+)", os.path.basename(run))
    if name and name[1] != "sft":
        runs[name[1]][int(name[2])] = row(run)

columns = [c for group in options.columns for c in COLUMNS[group]]
print("| run | seeds | accuracy: first, last two (last of each seed) | " + " | ".join(c[0] for c in columns) + " |")
print("|---" * (3 + len(columns)) + "|")
for name, seeds in runs.items():
    rows = [seeds[s] for s in sorted(seeds)]
    accuracy = [r["accuracy"] for r in rows]
    cells = [show(mean([r[key] for r in rows]), scale, form) for _, key, scale, form in columns]
    each = ", ".join("%.2f" % r["last"] for r in rows)
    print(f"| {name} | {len(rows)} | {mean([r['first'] for r in rows]):.3f}, **{mean(accuracy):.3f}** ± "
          f"{deviation(accuracy):.3f} ({each}) | " + " | ".join(cells) + " |")

if options.more:
    print("\n| claim | seeds | difference, 95 % interval | |\n|---|---|---|---|")
    for a, b in options.more:
        print(compare(runs, a, b))

evals = defaultdict(list)
for path in sorted(glob.glob(os.path.join(options.out, "eval-*.txt"))):
    name = re.fullmatch(r"eval-(.*?-\d+)-(.*)-s\d+\.txt", os.path.basename(path))
    with open(path) as f:
        found = re.search(r"mean@1\s+([0-9.]+)", f.read())
    if name and found:
        evals[name[1], name[2]].append(float(found[1]))
if evals:
    print("\n| sparse inference | model | accuracy (each seed) |\n|---|---|---|")
for (policy, model), xs in sorted(evals.items()):
    print(f"| {policy} | {model} | **{mean(xs):.3f}** ({', '.join('%.2f' % x for x in xs)}) |")
