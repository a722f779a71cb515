#!/usr/bin/env python3
"""The performance goals of goals.json, measured: what tools/gpu_check.sh calls.

    tools/bench/gpu.py baselines                their NAME DIMS, for torch_baselines.py
    tools/bench/gpu.py rows DIR --pare PROGRAM [--device cuda] [--seconds 200]
                                                measures every op of the goals: DIR/rows.json, rewritten as it grows
    tools/bench/gpu.py worst DIR [--count 3]    OP SHAPE of the ops that are furthest from their bound
    tools/bench/gpu.py summary DIR              DIR/summary.json and DIR/table.md
    tools/bench/gpu.py readme                   the table of the newest committed result

A ratio is the time of the other side over ours: 1 is as fast, more is better.  The other side is
  bytes, flops   what must move, or be computed, at the ceilings that `pare bench` measured in the same run
  bound          the larger of the two, op by op
  baseline       another library, from DIR/baselines.json
  ops            our own ops, times `factor`
A call is OP SHAPE, or OP SHAPE OPTION of `pare bench`.
"""
import argparse
import glob
import json
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def load(path, default):
    try:
        with open(path) as f:
            return json.load(f)
    except (OSError, ValueError):
        return default


def save(path, data):
    with open(path + ".part", "w") as f:
        json.dump(data, f, indent=1)
    os.replace(path + ".part", path)


def goals():
    with open(os.path.join(HERE, "goals.json")) as f:
        return json.load(f)


def calls(goal):
    return goal["ours"] + goal.get("ops", [])


# ---- measuring

def measure_rows(o):
    """One process for each call: one that fails, or hangs, does not cost the others."""
    path, end = os.path.join(o.dir, "rows.json"), time.monotonic() + o.seconds
    result = {"rows": {}, "failed": {}, "ceilings": None, "device": None}
    for call in dict.fromkeys(call for goal in goals() for call in calls(goal)):
        op, shape, *options = call.split(" ")
        left = end - time.monotonic()
        if left < 5:
            result["failed"][call] = "no time was left"
            continue
        command = [o.pare, "bench", "--device", o.device, "--op", op, "--shape", shape, "--json", *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=min(left, 25))
            report = json.loads(done.stdout) if done.returncode == 0 else None
            why = done.stderr.strip() or f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            report, why = None, f"stopped after {min(left, 25):.0f} s"
        except (ValueError, OSError) as e:
            report, why = None, str(e)
        if report:
            result["device"] = result["device"] or report["device"]
            result["ceilings"] = best_ceilings(result["ceilings"], report["ceilings"])
            result["rows"][call] = report["rows"][0]
            row = report["rows"][0]
            print(f"{call}: {row['seconds']['median'] * 1e6:.1f} us, "
                  f"{100 * (row['bound_share'] or 0):.1f} % of its bound", flush=True)
        else:
            result["failed"][call] = why
            print(f"{call}: {why}", flush=True)
        save(path, result)
    save(path, result)


def best_ceilings(a, b):
    """Of several measurements in one run: the fastest."""
    if not a:
        return b
    return {k: max(a[k], b[k], key=lambda r: r["per_second"] or 0) for k in b}


# ---- ratios

def ratio(goal, rows, baselines, ceilings):
    """(ratio or None, why not)"""
    missing = [c for c in calls(goal) if c not in rows]
    if missing:
        return None, f"not measured: {missing[0]}"
    ours = [rows[c] for c in goal["ours"]]
    seconds = sum(r["seconds"]["median"] for r in ours)
    flops, bandwidth = ((ceilings or {}).get(k, {}).get("per_second") for k in ("flops", "bytes"))
    moved = [r["bytes_read"] + r["bytes_written"] for r in ours]
    against = goal["against"]
    if against == "ops":
        return sum(rows[c]["seconds"]["median"] for c in goal["ops"]) * goal.get("factor", 1) / seconds, None
    if against == "baseline":
        absent = [b for b in goal["baselines"] if not (baselines.get(b) or {}).get("seconds")]
        if absent:
            return None, (baselines.get(absent[0]) or {}).get("how") or "no baseline: no PyTorch"
        return sum(baselines[b]["seconds"]["median"] for b in goal["baselines"]) / seconds, None
    if not flops or not bandwidth:
        return None, "no ceiling was measured"
    if against == "bytes":
        return sum(moved) / bandwidth / seconds, None
    if against == "flops":
        return sum(r["flops"] for r in ours) / flops / seconds, None
    return sum(max(r["flops"] / flops, m / bandwidth) for r, m in zip(ours, moved)) / seconds, None


def results(dir_):
    measured = load(os.path.join(dir_, "rows.json"), {"rows": {}, "failed": {}, "ceilings": None, "device": None})
    baselines = load(os.path.join(dir_, "baselines.json"), {})
    out = []
    for goal in goals():
        value, why = ratio(goal, measured["rows"], baselines, measured["ceilings"])
        row = {"name": goal["name"], "against": goal["against"], "ratio": value,
               "first": goal["goals"][0], "goal": goal["goals"][1], "stretch": goal["goals"][2]}
        if why:
            failed = [measured["failed"][c] for c in calls(goal) if c in measured["failed"]]
            row["why_not"] = failed[0] if failed else why
        if value is not None:
            row["milliseconds"] = 1e3 * sum(measured["rows"][c]["seconds"]["median"] for c in goal["ours"])
        out.append(row)
    # The furthest from the goal first; what was not measured at the end.
    out.sort(key=lambda r: (r["ratio"] is None, (r["ratio"] or 0) / r["goal"]))
    return measured, baselines, out


def worst(o):
    """By share of the bound; a copy of the op's first shape each.  Of our kernels, that is of calls without options."""
    rows = load(os.path.join(o.dir, "rows.json"), {"rows": {}})["rows"]
    shares = {}
    for call, r in rows.items():
        op, _, *options = call.split(" ")
        if options:
            continue
        share = r.get("bound_share")
        share = 1 / r["seconds"]["median"] if share is None else share  # no ceiling: the slowest
        if op not in shares or share < shares[op][0]:
            shares[op] = (share, call)
    for _, call in sorted(shares.values())[:o.count]:
        print(call)


# ---- reports

def table(summary):
    lines = [f"{summary['device'] or 'no device'}; driver {summary['driver'] or '-'}; commit {summary['commit'] or '-'}; "
             f"{summary['date']}; `{summary['command']}`", ""]
    for key, name in (("flops", "products"), ("bytes", "memory")):
        rate = (summary["ceilings"] or {}).get(key) or {}
        unit = "TFLOP/s" if key == "flops" else "TB/s"
        value = f"{rate['per_second'] * 1e-12:.2f} {unit}" if rate.get("per_second") else "not measured"
        lines.append(f"- {name}: {value} ({rate.get('how', '-')})")
    lines += ["", "| stage | result | seconds |", "|---|---|---|"]
    lines += [f"| {s['name']} | {s['result']} | {s['seconds']} |" for s in summary["stages"]]
    lines += ["", "| | against | ms | ratio | first | goal | stretch | of the goal |", "|---|---|---|---|---|---|---|---|"]
    for r in summary["ratios"]:
        ends = f"{r['first']:g} | {r['goal']:g} | {r['stretch']:g}"
        if r["ratio"] is None:
            lines.append(f"| {r['name']} | {r['against']} | - | {r['why_not'][:90].replace('|', '/')} | {ends} | - |")
        else:
            lines.append(f"| {r['name']} | {r['against']} | {r['milliseconds']:.3f} | {r['ratio']:.3f} | {ends} | "
                         f"{100 * r['ratio'] / r['goal']:.0f} % |")
    return "\n".join(lines) + "\n"


def summarise(o):
    measured, baselines, ratios = results(o.dir)
    facts, stages = {}, []
    try:
        for line in open(os.path.join(o.dir, "facts.tsv")):
            key, _, value = line.rstrip("\n").partition("\t")
            facts[key] = value
        for line in open(os.path.join(o.dir, "stages.tsv")):
            name, result, seconds = line.rstrip("\n").split("\t")
            stages.append({"name": name, "result": result, "seconds": int(seconds)})
    except OSError:
        pass
    summary = {"date": facts.get("date"), "command": facts.get("command"), "commit": facts.get("commit"),
               "device": facts.get("gpu") or measured["device"], "driver": facts.get("driver"), "facts": facts,
               "stages": stages, "ceilings": measured["ceilings"], "ratios": ratios, "rows": measured["rows"],
               "failed": measured["failed"], "baselines": baselines}
    save(os.path.join(o.dir, "summary.json"), summary)
    with open(os.path.join(o.dir, "table.md"), "w") as f:
        f.write(table(summary))


def readme(_):
    newest = max(glob.glob(os.path.join(HERE, "results", "*.json")), default=None,
                 key=lambda path: load(path, {}).get("date") or "")
    print(table(load(newest, {})) if newest else "No results yet: nothing was measured on a GPU.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["baselines", "rows", "worst", "summary", "readme"])
    parser.add_argument("dir", nargs="?")
    parser.add_argument("--pare", default="build/cuda/pare")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--count", type=int, default=3)
    o = parser.parse_args()
    if o.what not in ("baselines", "readme") and not o.dir:
        parser.error("which directory?")
    if o.what == "baselines":
        names = dict.fromkeys(b for g in goals() for b in g.get("baselines", []))
        print(" ".join(names))
    else:
        {"rows": measure_rows, "worst": worst, "summary": summarise, "readme": readme}[o.what](o)


if __name__ == "__main__":
    sys.exit(main())
