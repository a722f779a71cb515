#!/usr/bin/env python3
"""Measurements of tools/gpu_check.sh, and its report.

    tools/bench/gpu.py baselines                NAME DIMS of the other libraries' calls, for torch_baselines.py
    tools/bench/gpu.py rows WORK --of goals|kernels --pare PROGRAM [--device cuda] [--seconds 180]
                                                times ops: WORK/rows.json, rewritten as it grows
    tools/bench/gpu.py predict --pare PROGRAM [--machine h100]
                                                the time that `pare plan` counts for each call of the goals, and grids
                                                whose longest part takes more than 1.15 times an even one
    tools/bench/gpu.py run WORK NAME RUN [--planned PLAN] [--used FILE] [--peer TEXT]
                                                tokens a second, FLOPs and bytes of a run directory: WORK/runs.json;
                                                what a peer has published stands beside them
    tools/bench/gpu.py generated WORK NAME LOG --peer TEXT
                                                the same of what `pare generate` wrote to standard error
    tools/bench/gpu.py peer WORK NAME FILE --of train|generate
                                                the same of what peers.py printed
    tools/bench/gpu.py goldens OURS DEVICES     which results of PTX instructions differ; exit code 1: some do
    tools/bench/gpu.py certificate CAPABILITY NAME RUN
                                                has the run's last step the certificate of tests/golden/steps.json?
    tools/bench/gpu.py summary WORK a|b|c|e OUT   OUT/summary.json and OUT/table.md
    tools/bench/gpu.py readme                   the table of the newest committed result

A ratio is the time of the other side over ours: 1 is as fast, more is better.  The other side is
  bytes, flops   what must move, or be computed, at the ceilings that `pare bench` measured in the same run
  bound          the larger of the two, op by op
  baseline       another library, from WORK/baselines.json
  ops            our own ops, times `factor`
A call is OP SHAPE, or OP SHAPE OPTION of `pare bench`.  goals.json holds the goals, predicted.json what was expected of each
before any kernel had run, from the instructions that nvcc made of it: [least, most], of both kernels of a product where
that matters.
"""
import argparse
import glob
import json
import os
import re
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))

# What is written twice, with mma.sync and with wgmma.
PRODUCTS = ["linear_fwd M=4096,N=17920,K=1536", "linear_bwd_input M=4096,N=17920,K=1536",
            "linear_bwd_weight M=4096,N=17920,K=1536", "linear_fwd M=256,N=17920,K=1536", "linear_fwd M=256,N=1536,K=8960",
            "attn_fwd L=4096", "attn_fwd L=16384", "attn_bwd L=4096", "attn_bwd L=16384"]
# Rows without a goal, for the model of cuda/linear_tiles.h: the depth tells a stage from the ends of a tile, the number of
# busy multiprocessors (72, 96, 132, 264 tiles of 128 x 128) whether L2 limits.
QUESTIONS = [f"linear_fwd M=4096,N=17920,K={k},kernel=2" for k in (768, 1536, 3072, 6144)] + \
            [f"linear_fwd M={m},N=1536,K=17920" for m in (768, 1024, 1408, 2816)]
# Sizes of a rehearsal, for the emulator: of each op its first call only.
TINY = {"linear": "M=80,N=80,K=80", "attn_fwd": "L=64", "attn_bwd": "L=64", "attn_paged": "B=2,L=64",
        "kv_block_select": "B=2,L=64,budget=2", "logits_loss": "R=2,V=64", "logprob": "R=2,V=64", "sample": "R=2,V=64",
        "adamw": "n=1024", "kv_write": "B=2,L=64", "kv_": "E=1", "rope": "N=2", "qk_norm": "N=2",
        "rmsnorm": "N=2", "swiglu": "N=2"}


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


def both_kernels(product):
    return [f"{product},kernel=1", f"{product},kernel=2"]


# ---- measuring

def split(call):
    op, shape, *options = call.split(" ")
    return op, shape, options


def bench(o, calls_, limit):
    """(report of `pare bench` or None, why not).  All calls are of one op and its options."""
    op, _, options = split(calls_[0])
    command = [o.pare, "bench", "--device", o.device, "--op", op, "--json", *options]
    for call in calls_:
        shape = split(call)[1]
        if o.device != "cuda":
            shape = next(v for k, v in TINY.items() if op.startswith(k)) + (",kernel" + shape.partition(",kernel")[2]
                                                                          if ",kernel" in shape else "")
        command += ["--shape", shape]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        return (json.loads(done.stdout), None) if done.returncode == 0 else (None, done.stderr.strip() or
                                                                             f"exit code {done.returncode}")
    except subprocess.TimeoutExpired:
        return None, f"stopped after {limit:.0f} s"
    except (ValueError, OSError) as e:
        return None, str(e)


def measure_rows(o):
    """A process for all sizes of an op, and one for each if that fails: so a size that fails does not cost the others."""
    path, end = os.path.join(o.work, "rows.json"), time.monotonic() + o.seconds
    result = {"rows": {}, "failed": {}, "ceilings": None, "device": None}
    wanted = [call for goal in goals() for call in calls(goal)] + QUESTIONS if o.of == "goals" else \
        [call for product in PRODUCTS for call in both_kernels(product)]
    if o.device != "cuda":
        wanted = list({split(call)[0] + str(split(call)[2]) + call.partition(",kernel")[2]: call for call in wanted}.values())
    groups = {}
    for call in dict.fromkeys(wanted):
        op, _, options = split(call)
        groups.setdefault((op, *options), []).append(call)
    queue = list(groups.values())
    while queue:
        group = queue.pop(0)
        left = end - time.monotonic()
        if left < 5:
            result["failed"].update({call: "no time was left" for call in group})
            continue
        report, why = bench(o, group, min(left, 10 + 15 * len(group)))
        if report:
            result["device"] = result["device"] or report["device"]
            result["ceilings"] = best_ceilings(result["ceilings"], report["ceilings"])
            for call, row in zip(group, report["rows"]):
                result["rows"][call] = row
                print(f"{call}: {row['seconds']['median'] * 1e6:.1f} us, "
                      f"{100 * (row['bound_share'] or 0):.1f} % of its bound", flush=True)
        elif len(group) > 1:
            print(f"{', '.join(group)}: {why}: one by one", flush=True)
            queue += [[call] for call in group]  # behind what has not been tried yet
        else:
            result["failed"][group[0]] = why
            print(f"{group[0]}: {why}", flush=True)
        save(path, result)
    save(path, result)
    # What this machine lacks is no failure.
    return 1 if any("compute capability 9.0" not in why and "cuBLASLt, which was not found" not in why
                    for why in result["failed"].values()) else 0


def best_ceilings(a, b):
    """Of several measurements in one run: the fastest."""
    if not a:
        return b
    return {k: max(a[k], b[k], key=lambda r: r["per_second"] or 0) for k in b}


def predict(o):
    for call in dict.fromkeys(c for g in goals() for c in calls(g)):
        op, shape, *options = call.split(" ")
        if options:  # another library's order of sums, which no machine file knows
            continue
        command = [o.pare, "bench", "--predict", o.machine, "--op", op, "--shape", shape, "--device", "cuda", "--json"]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[0]
        uneven = f"  uneven: {row['stretch']:.2f}" if row["stretch"] > 1.15 else ""
        print(f"{call:46} {1e6 * row['seconds']:10.1f} us{uneven}")


def measure_run(o):
    """The medians of all steps but the first, which makes graphs and loads kernels."""
    with open(os.path.join(o.run, "metrics.jsonl")) as f:
        steps = [s for s in map(json.loads, f) if "timing_s/step" in s]
    later = steps[1:] or steps
    sampled = "timing_s/gen" in later[0]  # next-token training samples nothing, and its steps are updates
    median = lambda top, bottom: statistics.median(s[top] / s[bottom] for s in later)
    update = "timing_s/update_actor" if sampled else "timing_s/step"
    run = {"name": o.name, "steps": len(steps), "seconds": statistics.median(s["timing_s/step"] for s in later),
           "rollout_tokens": median("tokens/generated", "timing_s/gen") if sampled else None,
           "learner_tokens": median("tokens/trained", update),
           "rollout_flops": median("flops/rollout", "timing_s/gen") if sampled else None,
           "learner_flops": median("flops/learner", update),
           "different": sum(s.get("exact/mismatch_tokens") or 0 for s in steps),
           "checked": sum(s.get("exact/checked_tokens") or 0 for s in steps),
           "arenas": max(s["perf/max_memory_allocated_gb"] for s in steps) * 2**30,
           "planned": load(o.planned, {})["memory"]["longest"] if o.planned else None, "used": None, "peer": o.peer}
    try:
        with open(o.used or "") as f:  # MiB, twice a second, of the whole device
            run["used"] = max(map(int, f)) << 20
    except (OSError, ValueError):
        pass
    add_run(o.work, run)


# A run of which only the speed is known.
NOTHING = dict.fromkeys(["rollout_tokens", "learner_tokens", "rollout_flops", "learner_flops", "planned", "used", "arenas",
                         "peer"]) | {"different": 0, "checked": 0}


def measure_generated(o):
    """New tokens a second of prefill and decoding together, as engines for serving count them."""
    with open(o.log) as f:
        parts = re.findall(r"(\d+) (prompt|new) tokens, ([\d.]+) ?([kM]?) ?tok/s", f.read())
    scale = {"": 1, "k": 1e3, "M": 1e6}
    seconds = sum(int(n) / (float(rate) * scale[unit]) for n, _, rate, unit in parts)
    new = next(int(n) for n, kind, *_ in parts if kind == "new")
    add_run(o.work, NOTHING | {"name": o.name, "steps": 1, "seconds": seconds, "rollout_tokens": new / seconds, "peer": o.peer})


def measure_peer(o):
    with open(o.file) as f:
        peer = json.loads(f.readlines()[-1])
    add_run(o.work, NOTHING | {"name": f"{peer['name']} ({peer['how']}): {o.name}", "steps": peer["steps"],
                               "seconds": peer["seconds"],
                               "learner_tokens" if o.of == "train" else "rollout_tokens": peer["tokens"]})


def add_run(work, run):
    path = os.path.join(work, "runs.json")
    save(path, load(path, []) + [run])
    print(run)


def compare_goldens(o):
    """Byte by byte.  What a NaN looks like, and infinity minus infinity, is where a device may differ without harm."""
    ours, devices = (load(path, {"results": {}}) for path in (o.ours, o.devices))
    names = sorted(ours["results"].keys() | devices["results"].keys())
    different = 0
    for name in names:
        a, b = (bytes.fromhex(side["results"].get(name, "")) for side in (ours, devices))
        if a != b:
            different += 1
            print(f"{name}: {sum(x != y for x, y in zip(a, b)) + abs(len(a) - len(b))} of {len(a)} bytes differ")
    print(f"{os.path.basename(o.ours)}: {different} of {len(names)} results of {devices.get('made_by')} are not those of "
          f"{ours.get('made_by')}")
    return 1 if different or not names else 0


def compare_certificate(o):
    with open(os.path.join(HERE, "../../tests/golden/steps.json")) as f:
        stored = json.load(f)[o.capability][o.name]
    with open(os.path.join(o.run, "metrics.jsonl")) as f:
        certificate = json.loads(f.readlines()[-1])["certificate"]
    print(f"{o.name}: certificate {certificate}, that of the emulator is {stored}")
    return certificate != stored


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


def predictions(wgmma):
    """{goal: [least, most]}"""
    kernel = "wgmma" if wgmma else "mma.sync"
    return {name: p.get("ratio") or p[kernel] for name, p in load(os.path.join(HERE, "predicted.json"), {}).items()}


def ratios(measured, baselines, predicted):
    out = []
    for goal in goals():
        value, why = ratio(goal, measured["rows"], baselines, measured["ceilings"])
        row = {"name": goal["name"], "against": goal["against"], "ratio": value, "predicted": predicted[goal["name"]],
               "first": goal["goals"][0], "goal": goal["goals"][1], "stretch": goal["goals"][2]}
        if why:
            failed = [measured["failed"][c] for c in calls(goal) if c in measured["failed"]]
            row["why_not"] = failed[0] if failed else why
        if value is not None:
            row["milliseconds"] = 1e3 * sum(measured["rows"][c]["seconds"]["median"] for c in goal["ours"])
        out.append(row)
    # The furthest from the goal first; what was not measured at the end.
    out.sort(key=lambda r: (r["ratio"] is None, (r["ratio"] or 0) / r["goal"]))
    return out


# ---- reports

def grid(head, rows):
    line = lambda cells: "| " + " | ".join(str(c).replace("|", "/") for c in cells) + " |"
    return ["", line(head), "|" + "---|" * len(head), *map(line, rows)]


def against_prediction(value, predicted):
    low, high = predicted
    text = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    # Predictions are good to a quarter.
    return text + ("" if value is None else ": less" if value < 0.75 * low else ": more" if value > 1.25 * high else "")


def goals_table(summary):
    rows = []
    for r in summary["ratios"]:
        got = ["-", r["why_not"][:90], "-"] if r["ratio"] is None else \
            [f"{r['milliseconds']:.3f}", f"{r['ratio']:.3f}", f"{100 * r['ratio'] / r['goal']:.0f} %"]
        rows.append([r["name"], r["against"], got[0], f"{r['first']:g}", f"{r['goal']:g}", f"{r['stretch']:g}",
                     against_prediction(r["ratio"], r["predicted"]), got[1], got[2]])
    return grid(["", "against", "ms", "first", "goal", "stretch", "predicted", "measured", "of the goal"], rows)


def kernels_table(rows):
    """Both kernels of each product."""
    rate = lambda call: rows[call]["flops"] / rows[call]["seconds"]["median"] * 1e-12 if call in rows else None
    show = lambda x: "-" if x is None else f"{x:.0f}"
    lines = []
    for product in PRODUCTS:
        mma, wgmma = map(rate, both_kernels(product))
        if mma or wgmma:
            lines.append([product, show(mma), show(wgmma), f"{wgmma / mma:.2f}" if mma and wgmma else "-"])
    if not lines:
        return []
    return grid(["TFLOP/s", "mma.sync", "wgmma", "ratio"], lines)


def runs_table(runs, peak):
    """Model FLOPs over the time, as a share of what the fastest product reaches."""
    share = lambda flops: f"{100 * flops / peak:.1f} %" if peak and flops is not None else "-"
    rate = lambda tokens: "-" if tokens is None else f"{tokens:.0f}"
    size = lambda n: "-" if n is None else f"{n / 2**30:.2f}"
    published = any(r.get("peer") for r in runs)
    return grid(["run", "steps", "s a step", "rollout tokens/s", "learner tokens/s", "rollout MFU", "learner MFU",
                 "planned GiB", "arenas GiB", "device GiB", "tokens that differ"] + ["published"] * published,
                [[r["name"], r["steps"], f"{r['seconds']:.2f}", rate(r["rollout_tokens"]), rate(r["learner_tokens"]),
                  share(r["rollout_flops"]), share(r["learner_flops"]), size(r["planned"]), size(r["arenas"]),
                  size(r["used"]), f"{r['different']:.0f} of {r['checked']:.0f}"] + [r.get("peer") or "-"] * published
                 for r in runs]) if runs else []


def what_next(call, stages, memcheck):
    """The decision that the stages leave, most urgent first."""
    bad = [s["name"] for s in stages if s["result"] not in ("passed", "not possible here")]
    result = {s["name"]: s["result"] for s in stages}
    of = lambda *starts: [name for name in bad if name.startswith(starts)]
    out = [f"Failed: {', '.join(bad)}; see log.txt."] if bad else []
    if of("loader"):
        return out + ["The program or the device does not work (`loader`): nothing else says anything."]
    if call == "a":
        goldens = result.get("goldens")
        if goldens == "failed (1)":
            return out + ["STOP: the device's instructions do not give what the model of them says (`goldens` in log.txt has "
                          "the names; only NaNs and infinities: harmless). Bring ptx_sm*.json home, mend "
                          "cuda/emu/src/tensor_core.cpp or the wrappers by it, and run nothing else before."]
        if goldens != "passed":
            return out + [f"There are no goldens of this device ({goldens or 'not tried'}), and without them nothing tells "
                          "wrong instructions from wrong kernels: see `PTX` and `goldens` in log.txt, and run this again."]
        kernels = of("PTX", "wgmma", "steps", "certificate", "ops", "memcheck", "racecheck", "both kernels")
        if kernels:
            out.append("The instructions are right, kernels are wrong or hang. What the sanitizer says:")
            return out + ([f"    {line}" for line in memcheck] or ["    nothing (see the values in log.txt)"])
        if bad:
            return out + ["Mend that, and run this again."]
        return ["All is right. Copy ptx_sm*.json to tests/golden, and run `tools/gpu_check.sh b`."]
    if bad:
        out.append("What is not among them stands.")
    if call == "b":
        return out + ["Commit summary.json as tools/bench/results/NAME.json, `make readme` puts its figures into tools/bench/README.md, "
                      "and run `tools/gpu_check.sh c` for what misses its goal."]
    if call == "e":
        return out + ["Commit summary.json as tools/bench/results/NAME.json; the hardware of the figures beside is named there."]
    if call == "f":
        return out + ["NCCL moves right bytes here if `bits of 4` passed; its speed only a node shows: tools/node_check.sh."]
    return out + ["Compare the counters with what predicted.json gives as causes."]


def table(summary):
    lines = [f"{summary['device'] or 'no device'}; driver {summary['driver'] or '-'}; commit {summary['commit'] or '-'}; "
             f"{summary['date']}; `{summary['command']}`"]
    if summary["ceilings"]:
        lines.append("")
    for key, name, unit in (("flops", "products", "TFLOP/s"), ("bytes", "memory", "TB/s")):
        rate = (summary["ceilings"] or {}).get(key)
        if rate:
            value = f"{rate['per_second'] * 1e-12:.2f} {unit}" if rate.get("per_second") else "not measured"
            lines.append(f"- {name}: {value} ({rate['how']})")
    lines += grid(["stage", "result", "seconds"], [[s["name"], s["result"], s["seconds"]] for s in summary["stages"]])
    if summary["call"] == "a":
        lines += kernels_table(summary["rows"])
    lines += runs_table(summary["runs"], ((summary["ceilings"] or {}).get("flops") or {}).get("per_second"))
    if summary["call"] == "b":
        lines += goals_table(summary)
    if summary["counters"]:
        lines += ["", "```", summary["counters"].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def facts_and_stages(work):
    """What tools/stages.sh noted."""
    facts, stages = {}, []
    for name, lines in (("facts.tsv", facts), ("stages.tsv", stages)):
        try:
            for line in open(os.path.join(work, name)):
                cells = line.rstrip("\n").split("\t")
                if lines is facts:
                    facts[cells[0]] = cells[1]
                else:
                    stages.append({"name": cells[0], "result": cells[1], "seconds": int(cells[2])})
        except OSError:
            pass
    return facts, stages


def summarise(o):
    facts, stages = facts_and_stages(o.work)
    measured = load(os.path.join(o.work, "rows.json"), {"rows": {}, "failed": {}, "ceilings": None, "device": None})
    baselines = load(os.path.join(o.work, "baselines.json"), {})
    text = lambda path: open(path, errors="replace").read() if os.path.exists(path) else ""
    memcheck = [line.strip() for line in text(os.path.join(o.out, "log.txt")).splitlines()
                if line.startswith("========= ") and ("Invalid" in line or "Error:" in line or "hazard" in line)]
    memcheck = list(dict.fromkeys(memcheck))[:10]
    summary = {"call": o.call, "date": facts.get("date"), "command": facts.get("command"), "commit": facts.get("commit"),
               "device": facts.get("gpu") or measured["device"], "driver": facts.get("driver"), "facts": facts,
               "stages": stages, "ceilings": measured["ceilings"],
               "ratios": ratios(measured, baselines, predictions("PARE_WGMMA=0" not in (facts.get("command") or "")))
               if o.call == "b" else [],
               "rows": measured["rows"], "failed": measured["failed"], "baselines": baselines,
               "runs": load(os.path.join(o.work, "runs.json"), []), "counters": text(os.path.join(o.work, "counters.txt")),
               "next": what_next(o.call, stages, memcheck)}
    if facts.get("on") == "emu":
        summary["next"].insert(0, "(A rehearsal by the emulator: it says nothing of a GPU.)")
    save(os.path.join(o.out, "summary.json"), summary)
    with open(os.path.join(o.out, "table.md"), "w") as f:
        f.write(table(summary) + "\nWhat next:\n\n" + "\n".join(summary["next"]) + "\n")


def readme(_):
    newest = max((path for path in glob.glob(os.path.join(HERE, "results", "*.json")) if load(path, {}).get("ratios")),
                 default=None, key=lambda path: load(path, {}).get("date") or "")
    print(table(load(newest, {})) if newest else "No results yet: nothing was measured on a GPU.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(name, function, *arguments):
        c = commands.add_parser(name)
        c.set_defaults(function=function)
        for a in arguments:
            c.add_argument(a)
        return c
    command("baselines", lambda o: print(" ".join(dict.fromkeys(b for g in goals() for b in g.get("baselines", [])))))
    rows = command("rows", measure_rows, "work")
    rows.add_argument("--of", choices=["goals", "kernels"], required=True)
    rows.add_argument("--pare", required=True)
    rows.add_argument("--device", default="cuda")
    rows.add_argument("--seconds", type=float, default=180)
    predicted = command("predict", predict)
    predicted.add_argument("--pare", default="build/pare")
    predicted.add_argument("--machine", default="h100")
    run = command("run", measure_run, "work", "name", "run")
    run.add_argument("--planned")
    run.add_argument("--used")
    generated = command("generated", measure_generated, "work", "name", "log")
    for measured in (run, generated):
        measured.add_argument("--peer")
    peer = command("peer", measure_peer, "work", "name", "file")
    peer.add_argument("--of", choices=["train", "generate"], required=True)
    command("goldens", compare_goldens, "ours", "devices")
    command("certificate", compare_certificate, "capability", "name", "run")
    command("summary", summarise, "work", "call", "out")
    command("readme", readme)
    o = parser.parse_args()
    return o.function(o)


if __name__ == "__main__":
    sys.exit(main())
