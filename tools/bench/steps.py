#!/usr/bin/env python3
"""Seconds of steps on this machine, as Markdown: against what `pare plan` predicts, and of ranks, shards and their balance.

    tools/bench/steps.py plan [--pare build/pare] [--threads N] [--machine FILE] [--steps 5] [--only SHAPE]
    tools/bench/steps.py ranks [--pare build/mpi/pare] [--mpirun mpirun] [--pairs 5] [--steps 5] [--only SHAPE]

plan    predicted over measured seconds of a phase, at the mean lengths of the run that was measured; the medians of all
        steps but the first, which touches memory.  Without --machine the machine is measured first (a minute).
ranks   A over B, in pairs that are run one after the other, the first of them first in every other pair; the median of
        the pairs, and the least and the most.  A machine that others use too changes the seconds, and the ratios less.

Weights are random, but those of quickstart, which are trained first.  Nothing is downloaded.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile

# Of stories260K (data/presets/stories.toml).
STORIES = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 8,
           "num_key_value_heads": 4, "intermediate_size": 172, "vocab_size": 512, "max_position_embeddings": 512,
           "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}
SHAPES = {
    "quickstart": ["model.path={work}/sft/model"],
    "stories": ["model.config={work}/stories.json", "data.train_batch_size=16", "data.max_response_length=64",
                "rollout.max_num_seqs=128", "actor.ppo_max_token_len=2048"],
    "0.5b": ["model.config=qwen2.5-0.5b", "data.train_batch_size=4", "rollout.n=4", "data.max_response_length=24",
             "rollout.max_num_seqs=16", "actor.logits_chunk=128", "actor.optim.moments=bf16"],
}
# Random weights earn nothing: a filter of groups without signal would leave nothing to learn from.
COMMON = ["algorithm.adv_filter_threshold=0", "trainer.val_before_train=false", "trainer.test_freq=0",
          "trainer.save_freq=0", "trainer.samples_freq=0"]


def pare(o, command, *arguments, ranks=1):
    start = [*o.mpirun.split(), "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run([*start, o.pare, command, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"pare {command} {' '.join(arguments)}: exit code {done.returncode}")
    return done.stdout


def prepare(o, shape):
    if shape == "quickstart" and not os.path.exists(f"{o.work}/sft/model"):
        pare(o, "sft", "quickstart-sft", "--out", f"{o.work}/sft", "--quiet")
    with open(f"{o.work}/stories.json", "w", encoding="utf-8") as file:
        json.dump(STORIES, file)
    return ["quickstart", *(k.format(work=o.work) for k in SHAPES[shape]), *COMMON]


def steps(o, keys, ranks=1):
    """A run's folder, and the median of each metric over its steps but the first."""
    out = tempfile.mkdtemp(dir=o.work)
    pare(o, "train", *keys, f"trainer.total_training_steps={o.steps + 1}", "--out", out, "--quiet", ranks=ranks)
    with open(f"{out}/metrics.jsonl", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row["training/global_step"] > 1 and "timing_s/step" in row]
    return out, {k: statistics.median(r[k] for r in rows) for k in rows[0] if k.startswith("timing_s/")}


def plan(o):
    threads = f"trainer.threads={o.threads}"
    if not o.machine:
        o.machine = f"{o.work}/machine.toml"
        pare(o, "bench", "--machine", o.machine, "--threads", str(o.threads))
    print("| shape | phase | predicted, s | measured, s | predicted / measured |\n|---|---|---|---|---|")
    for shape in o.shapes:
        keys = [*prepare(o, shape), threads]
        out, measured = steps(o, keys)
        books = json.loads(pare(o, "plan", *keys, "--machine", o.machine, "--lengths", out, "--json"))["phases"]
        for phase, metric in ("rollout", "timing_s/gen"), ("learner", "timing_s/update_actor"):
            predicted = books[phase]["seconds"]
            print(f"| {shape} | {phase} | {predicted:.4g} | {measured[metric]:.4g} | "
                  f"{predicted / measured[metric]:.2f} |", flush=True)


def ranks(o):
    cores = len(os.sched_getaffinity(0))
    two, half = f"trainer.threads={cores}", f"trainer.threads={max(1, cores // 2)}"
    comparisons = [  # name, shapes, A, B: keys and ranks
        (f"1 rank x {cores} threads / 2 ranks x {max(1, cores // 2)}", o.shapes, (["learner.shards=2", two], 1),
         (["learner.shards=2", half], 2)),
        ("8 shards / 1, on one rank", o.shapes, (["learner.shards=8", two], 1), (["learner.shards=1", two], 1)),
        ("dealt by cost / in turn, on 2 ranks", [s for s in o.shapes if s == "quickstart"],
         (["learner.shards=2", half], 2), (["learner.shards=2", half, "trainer.balance_batch=false"], 2)),
    ]
    print("| A / B | shape | seconds of a step: A, B | step: A / B | rollout | update |\n|---|---|---|---|---|---|")
    for name, shapes, a, b in comparisons:
        for shape in shapes:
            keys, pairs = prepare(o, shape), []
            for i in range(o.pairs):
                pair = {}
                for side in (a, b) if i % 2 == 0 else (b, a):
                    pair[side is a] = steps(o, keys + side[0], side[1])[1]
                pairs.append((pair[True], pair[False]))

            def ratio(metric):
                all_ = sorted(x[metric] / y[metric] for x, y in pairs)
                return f"{statistics.median(all_):.3f} ({all_[0]:.3f} to {all_[-1]:.3f})"

            seconds = [statistics.median(p[i]["timing_s/step"] for p in pairs) for i in (0, 1)]
            print(f"| {name} | {shape} | {seconds[0]:.4g}, {seconds[1]:.4g} | {ratio('timing_s/step')} | "
                  f"{ratio('timing_s/gen')} | {ratio('timing_s/update_actor')} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function, program in ("plan", plan, "build/pare"), ("ranks", ranks, "build/mpi/pare"):
        c = commands.add_parser(name)
        c.set_defaults(function=function)
        c.add_argument("--pare", default=program)
        c.add_argument("--mpirun", default="mpirun")
        c.add_argument("--steps", type=int, default=5, help="of a run that are measured")
        c.add_argument("--pairs", type=int, default=5)
        c.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
        c.add_argument("--machine", help="a file of `pare bench --machine`, of as many threads")
        c.add_argument("--only", choices=SHAPES, help="one shape")
    o = parser.parse_args()
    o.shapes = [o.only] if o.only else list(SHAPES)
    with tempfile.TemporaryDirectory() as o.work:
        o.function(o)


if __name__ == "__main__":
    main()
