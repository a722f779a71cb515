#!/usr/bin/env python3
"""Writes the tables of the results pages from the records of their runs.

table.py [--check]              tables of all pages of results by the records beside them
table.py --rows FILE PAGE       prints the tables of a page for the runs of another record, as far as it has them

A mark on a page defines what follows it, up to `<!-- end -->`:

<!-- runs NAME NAME...                  which records, NAME.jsonl; numbers of runs and claims, commits
<!-- table COLUMN, COLUMN...            a line a row: `NAME: label`
<!-- grid NAME.COLUMN, NAME.COLUMN...   a line a row: `PREFIX: label`; a cell is of the runs PREFIX-NAME
<!-- claims                             a line a claim: `A - B`, `A - B at COST` or `[COLUMN] A - B`, then perhaps `: label`;
                                        `*-A - *-B`: of the means over the rows of the page's first grid;
                                        `A@I`: the value of A's curve at place I
<!-- figure FILE.svg Y, Y... against X  a line a curve: `NAME: label`

A claim is about the mean over seeds of the difference of two runs that began with the same model; `at COST`: of both at
the costs at which the cheaper one had its last two validations.  Intervals are Student's t, 95 %; p is corrected by
Holm's method over all claims of a page.
"""
import argparse
import glob
import json
import os
import re
import sys

from figure import figure
from paired import deviation, holm, interval, mean

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")
MARK = re.compile(r"(<!-- (runs|table|grid|claims|figure)\b(.*?)-->\n)(.*?)(<!-- end -->)", re.S)
CLAIM = re.compile(r"(?:\[(?P<key>\w+)\] )?(?P<a>\S+) - (?P<b>[^\s:]+)(?: at (?P<cost>\w+))?(?:: (?P<label>.*))?")
# Column: header, scale, form.
COLUMNS = {
    "accuracy": ("accuracy", 1, "%.3f"), "first": ("accuracy before", 1, "%.3f"),
    "drop": ("largest drop of accuracy", 1, "%.3f"),
    "sparse": ("accuracy of the sparse sampler", 1, "%.3f"), "sampler": ("sampler's reward", 1, "%.3f"),
    "rejected": ("rejected", 1, "%.3f"), "kl": ("KL, nats a token", 1, "%.4f"), "saved": ("slots saved, mean", 1, "%.3f"),
    "peak": ("slots saved at the peak", 1, "%.3f"), "read": ("reads saved", 1, "%.3f"), "kv": ("KV at the peak, MB", 1e-6, "%.2f"),
    "grad": ("gradient norm", 1, "%.3f"), "grad_max": ("largest gradient norm", 1, "%.2f"),
    "entropy": ("entropy, nats a token", 1, "%.4f"), "moved": ("KL to the old policy, nats a token", 1, "%.5f"),
    "clipped": ("clipped tokens", 1, "%.4f"), "length": ("length", 1, "%.0f"), "zero": ("groups without a signal", 1, "%.2f"),
    "generated": ("generated tokens, M", 1e-6, "%.3f"), "trained": ("rows of the learner, M", 1e-6, "%.3f"),
    "loss": ("tokens in the loss, M", 1e-6, "%.3f"), "rollout": ("rollout, TFLOP", 1e-3, "%.3f"),
    "learner": ("learner, TFLOP", 1e-3, "%.3f"), "step": ("step", 1, "%.0f"),
    "mismatch": ("tokens with another log-prob", 1, "%.0f"),
    "kept": ("fraction of the response that is replayed", 1, "%.1f"),
}
COSTS = {"generated": "generated tokens", "learner": "learner FLOPs"}


def table(header, body):
    return ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"] + ["| " + " | ".join(row) + " |" for row in body]


def pairs(body):
    """Name and label of each line after the first."""
    return [[part.strip() for part in line.split(":", 1)] for line in body.strip().split("\n")[1:]]


def columns_of(body):
    """Name and column of each cell in a row of a grid."""
    return [column.rsplit(".", 1) for column in body.strip().split("\n")[0].split(", ")]


def accuracy_at(curve, cost, place):
    """The accuracy between two validations, as far as its cost is between theirs."""
    known, accuracy = curve[cost], curve["accuracy"]
    for i in range(1, len(known)):
        if place <= known[i]:
            return accuracy[i - 1] + (accuracy[i] - accuracy[i - 1]) * (place - known[i - 1]) / (known[i] - known[i - 1])
    return accuracy[-1]


def accuracies_at(cost, a, b):
    """Of two runs, where the cheaper one had its last two validations."""
    cheaper = min((a["curve"], b["curve"]), key=lambda curve: curve[cost][-1])
    return [mean([accuracy_at(run["curve"], cost, place) for place in cheaper[cost][-2:]]) for run in (a, b)]


class Page:
    """A page with its runs; `record` replaces the records beside it."""

    def __init__(self, path, record=None):
        self.path, self.runs, self.figures, self.partial = path, {}, {}, record is not None
        with open(path) as f:
            self.text = f.read()
        marks = [(kind, body) for _, kind, body, _, _ in MARK.findall(self.text)]
        names = [name for kind, body in marks if kind == "runs" for name in body.split()]
        for record in [record] if record else [os.path.join(os.path.dirname(path), name + ".jsonl") for name in names]:
            with open(record) as f:
                for row in map(json.loads, f):
                    self.runs.setdefault(row["name"], {})[row["seed"]] = row
        self.labels = {name: label for kind, body in marks if kind in ("figure", "table") for name, label in pairs(body)}
        self.used = {f"{name}-{column}" for kind, body in marks if kind == "grid" for name, _ in pairs(body)
                     for column, _ in columns_of(body)} | self.labels.keys()
        self.grid = next(([prefix for prefix, _ in pairs(body)] for kind, body in marks if kind == "grid"), [])
        claims = {line: self.claim(line) for kind, body in marks if kind == "claims" for line in body.strip().split("\n")}
        self.claims = {line: claim for line, claim in claims.items() if claim["interval"]}
        for claim, p in zip(self.claims.values(), holm([claim["interval"][2] for claim in self.claims.values()])):
            claim["corrected"] = p

    def known(self, name):
        """Are there runs of this name?  A page must have them."""
        if name not in self.runs and not self.partial:
            sys.exit(f"{self.path}: no runs of {name}")
        return name in self.runs

    def cell(self, name, key):
        values = [row[key] for row in self.runs.get(name, {}).values() if key in row]
        if not values:
            return "-"
        _, scale, form = COLUMNS[key]
        text = form % (mean(values) * scale)
        return f"**{text}** ± {form % deviation(values)}" if key == "accuracy" else re.sub("^-(?=[0.]+$)", "", text)

    def runs_of(self, name, key):
        """The runs of a name by their seed; `*` stands for every row of the first grid, whose mean they are."""
        name, _, place = name.partition("@")
        if place:
            return {seed: {key: run["curve"][key][int(place)]} for seed, run in self.runs_of(name, key).items()}
        if not name.startswith("*"):
            self.used.add(name)
            return self.runs[name] if self.known(name) else {}
        all_of = [self.runs_of(prefix + name[1:], key) for prefix in self.grid]
        seeds = set.intersection(*(set(runs) for runs in all_of))
        return {seed: {key: mean([runs[seed][key] for runs in all_of])} for seed in seeds}

    def claim(self, line):
        found = CLAIM.fullmatch(line)
        if not found:
            sys.exit(f"{self.path}: no claim: {line}")
        key, a, b, cost = found["key"] or "accuracy", found["a"], found["b"], found["cost"]
        of_a, of_b = self.runs_of(a, key), self.runs_of(b, key)
        both = [(of_a[seed], of_b[seed]) for seed in sorted(of_a.keys() & of_b.keys())]
        if any(("curve" if cost else key) not in run for runs in both for run in runs):
            sys.exit(f"{self.path}: runs without {key}: {line}")
        values = [accuracies_at(cost, *runs) if cost else [run[key] for run in runs] for runs in both]
        label = found["label"] or f"{self.labels.get(a, a)} − {self.labels.get(b, b)}"
        label = (f"{COLUMNS[key][0]}: " if key != "accuracy" else "") + label + (f", at equal {COSTS[cost]}" if cost else "")
        return {"label": label, "form": COLUMNS[key][2], "seeds": len(values), "interval": interval([x - y for x, y in values])}

    def claim_row(self, claim):
        (m, half, p), form = claim["interval"], claim["form"]
        shown = ["< .001" if x < 0.001 else ("%.3f" % x)[1:] if x < 0.9995 else "1" for x in (p, claim["corrected"])]
        verdict = "significant" if claim["corrected"] < 0.05 else "suggestive" if p < 0.05 else "no significant difference"
        return [claim["label"], str(claim["seeds"]), f"{form.replace('%', '%+') % m} ± {form % half}", *shown, verdict]

    def row(self, label, cells):
        """`cells`: names of runs and columns."""
        seeds = sorted({len(self.runs[name]) for name, _ in cells if name in self.runs})
        return [label, " or ".join(map(str, seeds))] + [self.cell(name, key) for name, key in cells]

    def runs_line(self):
        of = {}
        for row in (row for name in sorted(self.used & self.runs.keys()) for row in self.runs[name].values()):
            of.setdefault(row["experiment"], []).append(row["commit"])
        text = "; ".join(f"{len(commits)} of `tools/experiments/{name}` at {', '.join(sorted(set(commits)))}" for name, commits in of.items())
        return f"Runs: {text}. p is corrected by Holm's method over the {len(self.claims)} claims of this page."

    def between(self, kind, body):
        """Lines of a mark."""
        head = body.strip().split("\n")[0]
        if kind == "runs":
            return [self.runs_line()]
        if kind == "table":
            keys = head.split(", ")
            return table(["run", "seeds"] + [COLUMNS[key][0] for key in keys],
                         [self.row(label, [(name, key) for key in keys]) for name, label in pairs(body) if self.known(name)])
        if kind == "grid":
            rows = [self.row(label, [(f"{prefix}-{name}", key) for name, key in columns_of(body)]) for prefix, label in pairs(body)]
            return table(["", "seeds"] + [f"{name}: {COLUMNS[key][0]}" for name, key in columns_of(body)], [row for row in rows if row[1]])
        if kind == "claims":
            return table(["difference", "seeds", "mean, 95 % interval", "p", "p, Holm", ""],
                         [self.claim_row(self.claims[line]) for line in body.strip().split("\n") if line in self.claims])
        name, ys, x = re.fullmatch(r"(\S+) (.+) against (\w+)", head).groups()
        curves = [(label, list(self.runs[name].values())) for name, label in pairs(body) if self.known(name)]
        self.figures[name] = figure(curves, x, ys.split(", "), lambda key: COLUMNS[key][:2])
        return [f"![{ys} against {COLUMNS[x][0]}]({name})"]

    def written(self):
        return MARK.sub(lambda m: m[1] + "\n" + "\n".join(self.between(m[2], m[3])) + "\n\n" + m[5], self.text)

    def tables(self):
        every = [self.between(kind, body) for _, kind, body, _, _ in MARK.findall(self.text) if kind != "figure"]
        return ["\n".join(lines) for lines in every if len(lines) != 2]  # 2: a table of which there are no runs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="writes nothing; names the files that would change")
    parser.add_argument("--rows", nargs=2, metavar=("FILE", "PAGE"))
    options = parser.parse_args()
    if options.rows:
        print("\n\n".join(Page(options.rows[1], options.rows[0]).tables()))
        return
    changed = []
    for path in sorted(glob.glob(os.path.join(RESULTS, "*.md"))):
        page = Page(path)
        files = {path: page.written()}
        files.update({os.path.join(RESULTS, name): text for name, text in page.figures.items()})
        for path, text in files.items():
            if os.path.exists(path) and open(path).read() == text:
                continue
            changed.append(path)
            if not options.check:
                with open(path, "w") as f:
                    f.write(text)
    if changed and options.check:
        sys.exit("not what table.py writes: " + ", ".join(os.path.relpath(path) for path in changed))


if __name__ == "__main__":
    main()
