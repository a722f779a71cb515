#!/usr/bin/env python3
"""Python part of tools/node_check.sh: whether two runs have the same bits, figures of a run, the summary."""
import argparse
import json
import os
import statistics
import sys

sys.dont_write_bytecode = True  # tools/ is sources alone
from gpu import facts_and_stages, grid, load, save


def steps_of(run):
    with open(os.path.join(run, "metrics.jsonl")) as f:
        return [s for s in map(json.loads, f) if "timing_s/step" in s]


def same(o):
    """Log-probs of all tokens, by the certificate of each step."""
    a, b = ([s["certificate"] for s in steps_of(run)] for run in (o.a, o.b))
    print(*a), print(*b)
    if not a or a != b:
        print("the certificates differ")
    return 0 if a and a == b else 1


def saved(o):
    """The last checkpoint of a run: from the line of its step to the last byte."""
    steps = os.path.join(o.run, "checkpoints")
    folder = os.path.join(steps, max(os.listdir(steps), key=lambda name: int(name.split("-")[1])))
    files = [os.stat(os.path.join(folder, name)) for name in os.listdir(folder)]
    size, end = sum(f.st_size for f in files), max(f.st_mtime for f in files)
    seconds = max(end - os.stat(os.path.join(o.run, "metrics.jsonl")).st_mtime, 1e-3)
    print(f"{size / 1e6:.1f} MB in {seconds:.2f} s, {size / 1e6 / seconds:.0f} MB/s")
    return 0


def fits(o):
    plan = load(o.plan, {})
    needed, available = plan["memory"]["most"], plan["available"]
    print(f"{needed / 1e9:.1f} GB of the {available / 1e9:.1f} GB of {plan['machine']['name']}")
    return 0 if plan["fits"] else int(os.environ["not_here"])


def measure_run(o):
    """The medians of all steps but the first, which connects ranks, makes graphs and loads kernels."""
    steps, plan = steps_of(o.run), load(o.plan, {})
    later = steps[1:] or steps
    median = lambda metric: statistics.median(s[metric] for s in later)
    run = {"name": o.name, "steps": len(steps), "ranks": plan["ranks"],
           "seconds": median("timing_s/step"), "rollout": median("timing_s/gen"), "update": median("timing_s/update_actor"),
           "wait": median("timing_s/gen_wait"), "sent": median("comm/bytes"), "host": median("comm/seconds"),
           "tokens": statistics.median(s["tokens/generated"] / s["timing_s/step"] for s in later),
           "different": sum(s.get("exact/mismatch_tokens") or 0 for s in steps),
           "planned": {"seconds": plan["seconds"], "rollout": plan["phases"]["rollout"]["seconds"],
                       "update": plan["phases"]["learner"]["seconds"],
                       "between": sum(op["seconds"] for phase in plan["phases"].values()
                                      for op in phase["ops"].values() if op["sent"]),
                       "sent": sum(phase["sent"] for phase in plan["all_ranks"].values())}}
    path = os.path.join(o.work, "runs.json")
    save(path, load(path, []) + [run])
    print(run)


def links_table(links, machine):
    """Of what a GPU sends, as a share of the figure `link` of the machine that is planned for."""
    if not links:
        return []
    peak = machine["figures"]["link"]
    lines = [[r["op"], r["type"], f"{r['bytes'] / 2**20:g}", f"{1e6 * r['seconds']:.1f}", f"{r['bytes_per_second'] / 1e9:.2f}",
              f"{100 * r['bytes_per_second'] / peak['value']:.1f} %"] for r in links]
    return ["", f"{links[0]['ranks']} ranks by {links[0]['way']}; the link: {peak['value'] / 1e9:g} GB/s that a GPU sends, "
                f"{peak['source']}, of {machine['name']}."] + \
        grid(["op", "type", "MiB", "us", "GB/s a GPU sends", "of the link"], lines)


def bits(stages):
    of = [(s["name"][len("bits of "):], s["result"]) for s in stages if s["name"].startswith("bits of ")]
    passed = [n for n, result in of if result == "passed"]
    if not of:
        return []
    other = [f"{n}: {result}" for n, result in of if result != "passed"]
    first = f"Ranks with the same bits: {', '.join(passed)}." if len(passed) > 1 else "Bits of ranks: not compared."
    return ["", first + (f" ({'; '.join(other)})" if other else "")]


def runs_table(runs, links):
    """A share is of the step.  NCCL's seconds are the device's: what was sent, at the pace of the largest all-to-all."""
    if not runs:
        return []
    paces = [r for r in links if r["op"] == "all_to_all"]
    pace = max(paces, key=lambda r: r["bytes"])["bytes_per_second"] if paces else None
    ratio = lambda r, what: f"{r['planned'][what]:.3g} / {r[what]:.3g} = {r['planned'][what] / r[what]:.2f}"
    share = lambda r, seconds: f"{100 * seconds / r['seconds']:.2f} %"
    return grid(["run", "ranks", "steps", "step, s: planned / measured", "rollout", "update", "tokens/s", "wait for the slowest",
                 "MB sent by all: planned / measured", "sending: planned", "sending at the pace of links", "host waits"],
                [[r["name"], r["ranks"], r["steps"], ratio(r, "seconds"), ratio(r, "rollout"),
                  ratio(r, "update"), f"{r['tokens']:.0f}", share(r, r["wait"]),
                  f"{r['planned']['sent'] / 1e6:.1f} / {r['sent'] / 1e6:.1f}", share(r, r["planned"]["between"]),
                  share(r, r["sent"] / r["ranks"] / pace) if pace else "-", share(r, r["host"])] for r in runs])


# Facts that stages note, in their order.
FACTS = ["cores", "memlock", "shm", "connections", "memory of NCCL", "saved", "resumed", "rank 1 gets SIGKILL", "rank 1 gets SIGSTOP"]


def table(s):
    machine = s["machine"]
    lines = [f"{s['facts'].get('gpus')} x {s['device']}; driver {s['driver'] or '-'}; commit {s['commit'] or '-'}; "
             f"{s['date']}; `{s['command']}`; {s['facts'].get('host')}"]
    lines += grid(["stage", "result", "seconds"], [[x["name"], x["result"], x["seconds"]] for x in s["stages"]])
    seen = [[name, s["facts"][name]] for name in FACTS if name in s["facts"]]
    lines += ([""] + grid(["what", "seen"], seen) if seen else []) + links_table(s["links"], machine) + bits(s["stages"]) + runs_table(s["runs"], s["links"])
    if s["runs"]:
        by = lambda source: ", ".join(k for k, f in machine["figures"].items() if f["source"] == source) or "nothing"
        lines += ["", f"Planned for {machine['name']} at the lengths of the run; measured: {by('measured')}; published: "
                      f"{by('published')}; assumed: {by('assumed')}. Measured: the medians of all steps but the first."]
    out = [f"{x['name']} ({x['result']})" for x in s["stages"] if x["result"] != "passed"]
    lines += ["", f"Left out: {'; '.join(out) or 'no stage'}; longer responses, trained weights, several nodes."]
    return "\n".join(lines) + "\n"


def what_next(stages, facts):
    bad = [s["name"] for s in stages if s["result"] not in ("passed", "not possible here")]
    out = [f"Failed: {', '.join(bad)}; see log.txt."] if bad else []
    if "ranks connect" in bad:
        out += ["Ranks do not start or do not reach one another (`ranks connect`): nothing else can be run."]
    elif any(name.startswith(("bits of", "0.5B")) for name in bad):
        out += ["STOP: the number of ranks changes bits, or some numbers do not run. Mend that first; what else there is stands "
                "as times alone."]
    elif bad:
        out += ["What is not among them stands."]
    elif facts.get("on") == "emu":
        out += ["A rehearsal by the emulator, whose times say nothing."]
    else:
        out += ["Commit summary.json as tools/bench/results/node-NAME.json."]
    return out


def summarise(o):
    facts, stages = facts_and_stages(o.work)
    runs, links = load(os.path.join(o.work, "runs.json"), []), []
    try:
        with open(os.path.join(o.work, "links.jsonl")) as f:
            links = [json.loads(line) for line in f if line.startswith("{")]
    except OSError:
        pass
    summary = {"date": facts.get("date"), "command": facts.get("command"), "commit": facts.get("commit"),
               "device": facts.get("gpu", "an emulated GPU" if facts.get("on") == "emu" else "no GPU"), "driver": facts.get("driver"), "facts": facts,
               "machine": load(os.path.join(o.work, "machine.json"), {})["machine"], "stages": stages, "links": links,
               "runs": runs, "next": what_next(stages, facts)}
    save(os.path.join(o.out, "summary.json"), summary)
    with open(os.path.join(o.out, "table.md"), "w") as f:
        f.write(table(summary) + "\nWhat next:\n\n" + "\n".join(summary["next"]) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, function, arguments in (("same", same, "a b"), ("saved", saved, "run"), ("fits", fits, "plan"), ("run", measure_run, "work name run plan"),
                                      ("summary", summarise, "work out")):
        c = commands.add_parser(name)
        c.set_defaults(function=function)
        for a in arguments.split():
            c.add_argument(a)
    o = parser.parse_args()
    return o.function(o)


if __name__ == "__main__":
    sys.exit(main())
