#!/usr/bin/env python3
"""Writes tests/golden/rl_losses.json: what the stages of src/rl must give, from the formulas alone (no dependencies).

    python3 tools/make_rl_golden.py > tests/golden/rl_losses.json
"""
import itertools
import json
import math


def mean(x):
    return math.fsum(x) / len(x)


def std(x, ddof):
    m = mean(x)
    return math.sqrt(math.fsum((v - m) ** 2 for v in x) / (len(x) - ddof))


def grpo(r, ddof, eps):
    if max(r) == min(r):
        return [0.0] * len(r)
    return [(v - mean(r)) / ((std(r, ddof) if ddof is not None else 1 - eps) + eps) for v in r]


def rloo(r):
    if max(r) == min(r):
        return [0.0] * len(r)
    return [v - (math.fsum(r) - v) / (len(r) - 1) for v in r]


GROUPS = {
    "one_of_8": [1, 0, 0, 0, 0, 0, 0, 0],
    "half_of_8": [1, 1, 1, 1, 0, 0, 0, 0],
    "one_of_4": [1, 0, 0, 0],
    "pair": [1, 0],
    "all_equal_1": [1] * 8,
    "all_equal_0": [0] * 8,
    "singleton": [1],
    "seven_035_one_0": [0.35] * 7 + [0],
    "length_shaped": [1, 0.9, 0.75, 0],
}
ESTIMATORS = {
    "grpo_sample_1e-6": lambda r: grpo(r, 1, 1e-6),
    "grpo_sample_1e-4": lambda r: grpo(r, 1, 1e-4),
    "grpo_population_1e-4": lambda r: grpo(r, 0, 1e-4),
    "grpo_none": lambda r: grpo(r, None, 0),
    "rloo": rloo,
}


def aggregation(groups, losses, horizon):
    """losses: [sequence][token]; groups: the group of each sequence."""
    tokens = sum(map(len, losses))
    per_group = [[t for g, l in zip(groups, losses) if g == name for t in l] for name in sorted(set(groups))]
    return {
        "groups": groups,
        "losses": losses,
        "horizon": horizon,
        "token-mean": sum(map(sum, losses)) / tokens,
        "seq-mean-token-mean": mean([mean(l) for l in losses]),
        "group-token-mean": mean([mean(g) for g in per_group]),
        "seq-mean-token-sum": mean([sum(l) for l in losses]),
        "seq-mean-token-sum-norm": mean([sum(l) for l in losses]) / horizon,
    }


def rpc(losses, c):
    """The estimate of the mean loss for every cutoff, their mean and variance."""
    n = len(losses)
    c = min(c, n)
    p = [1 if t <= c else (n - t + 1) / (n - c + 1) for t in range(1, n + 1)]
    e = [sum(losses[t] / p[t] for t in range(cut)) / n for cut in range(c, n + 1)]
    return {"p": p, "estimates": e, "mean": mean(e), "variance": std(e, 0) ** 2}


def urs(losses, p):
    n = len(losses)
    pairs = []
    for mask in itertools.product((0, 1), repeat=n):
        k = sum(mask)
        pairs.append((p**k * (1 - p) ** (n - k), sum(m * l / p for m, l in zip(mask, losses)) / n))
    m = sum(w * e for w, e in pairs)
    return {"mean": m, "variance": sum(w * (e - m) ** 2 for w, e in pairs)}


def overlong(length, limit, buffer, factor):
    return min(-(length - (limit - buffer)) / buffer * factor, 0.0)


def k3(x):
    return min(math.exp(x) - x - 1, 10.0)  # verl's bound


out = {
    "made_by": "python3 tools/make_rl_golden.py > tests/golden/rl_losses.json",
    "advantages": {g: {"rewards": r, **{k: f(r) for k, f in ESTIMATORS.items()}} for g, r in GROUPS.items()},
    "aggregation": [
        aggregation([0, 1, 2], [[1, 1, 1, 1], [2, 2], [4]], 8),
        aggregation([0, 1], [[1] * 2, [4] * 6], 10),
        aggregation([5, 3, 5, 3, 3], [[1, -2, 3], [0.5] * 7, [2], [-1, 4], [0.25] * 5], 9),
    ],
    "overlong": [
        {"length": n, "limit": 100, "buffer": 20, "factor": f, "penalty": overlong(n, 100, 20, f)}
        for f in (1, 0.5)
        for n in (0, 1, 79, 80, 81, 90, 100, 110)
    ],
    "kl": [
        {"ref_minus_logprob": x, "k1": -y, "k2": y * y / 2, "k3": k3(y)}
        for x in (-25, -5, -1, -0.125, 0, 0.125, 1, 5, 25)
        for y in (max(-20, min(20, x)),)
    ],
    "rpc": {str(c): rpc([1, 2, 3, 4], c) for c in (1, 2, 3, 4, 5)},
    "urs_half": urs([1, 2, 3, 4], 0.5),
}
print(json.dumps(out, indent=1))
