#!/usr/bin/env python3
"""The table of tools/experiments/sparse-rl as Markdown: means over seeds, and the number of seeds, of what is done."""
import glob
import json
import os
import re
import sys
from collections import defaultdict

root = sys.argv[1]


def steps(run):
    with open(os.path.join(run, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f if line.endswith("\n")]


def mean(xs):
    xs = [x for x in xs if x is not None]
    return sum(xs) / len(xs) if xs else None


def over(log, name):
    return mean([m.get(name) for m in log])


def row(run):
    log = steps(run)
    train = [m for m in log if m["training/global_step"] > 0]
    val = [m[k] for m in log for k in m if k.startswith("val-core/") and "/mean@" in k and k.count("/") == 3]
    last = train[-20:]
    return {
        "first": val[0] if val else None,
        "final": val[-1] if val else None,
        "sampler": over(last, "critic/score/mean"),
        "rejected": over(train, "rollout_corr/rejection_rate"),
        "kl": over(train, "rollout_corr/kl"),
        "mismatch": sum(m.get("exact/mismatch_tokens") or 0 for m in train),
        "saved": over(train, "kv/tokens_saved/mean"),
        "read": over(train, "kv/tokens_saved/read"),
        "peak": over(train, "kv/tokens_saved/peak"),
        "bytes": over(train, "perf/kv_peak_bytes"),
        "grad": over(train, "actor/grad_norm"),
    }


def show(x, form="%.3f"):
    return "-" if x is None else form % x


groups = defaultdict(list)
for folder in sorted(glob.glob(os.path.join(root, "*", "model"))):
    run = os.path.dirname(folder)
    name = re.fullmatch(r"(.*)-s(\d+)", os.path.basename(run))
    if name and name[1] != "sft":
        groups[name[1]].append(row(run))

print("| run | seeds | dense validation: first, last (each seed) | sampler's reward | rejected | KL a token | "
      "slots saved: mean, peak | reads saved | KV kB at peak | gradient norm |")
print("|---|---|---|---|---|---|---|---|---|---|")
for name, rows in groups.items():
    def m(key):
        return mean([r[key] for r in rows])
    each = ", ".join(show(r["final"], "%.2f") for r in rows)
    print(f"| {name} | {len(rows)} | {show(m('first'))}, **{show(m('final'))}** ({each}) | {show(m('sampler'))} | "
          f"{show(m('rejected'))} | {show(m('kl'), '%.4f')} | {show(m('saved'))}, {show(m('peak'))} | {show(m('read'))} | "
          f"{show(m('bytes') and m('bytes') / 1e3, '%.0f')} | {show(m('grad'))} |")

print("\n| sparse inference | model | accuracy (each seed) |\n|---|---|---|")
evals = defaultdict(list)
for path in sorted(glob.glob(os.path.join(root, "eval-*.txt"))):
    name = re.fullmatch(r"eval-(.*?-\d+)-(.*)-s\d+\.txt", os.path.basename(path))
    text = open(path).read()
    found = re.search(r"mean@1\s+([0-9.]+)", text)
    if name and found:
        evals[name[1], name[2]].append(float(found[1]))
for (policy, model), xs in sorted(evals.items()):
    print(f"| {policy} | {model} | **{mean(xs):.3f}** ({', '.join('%.2f' % x for x in xs)}) |")
