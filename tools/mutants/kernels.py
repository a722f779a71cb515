#!/usr/bin/env python3
"""Mutation test of the emulator's access checker: damages barriers, waits, masks and bounds of the kernels, one place at
a time, and expects the tests of the damaged kernel to fail.  `make kernel-mutants` gives it its arguments.

    tools/mutants/kernels.py [--only TEXT] DIRECTORY 'COMPILE COMMAND' 'LINK COMMAND'

The compile command lacks "-c SOURCE -o OBJECT"; the link command lacks "-o PROGRAM" and names the objects of the
program with the kernels, of which one at a time is replaced.  Exits with 1 if a mutant survives that KNOWN does not list.
"""
import argparse
import concurrent.futures
import glob
import os
import re
import shutil
import subprocess
import sys

RULES = [  # (what to damage, replacement, label)
    (r"__syncthreads\(\)", "static_cast<void>(0)", "no __syncthreads"),
    (r"__syncwarp\(\);", ";", "no __syncwarp"),
    (r"cp_async_wait<1>\(\)", "cp_async_wait<2>()", "waits for one group less"),
    (r"cp_async_wait<((?:S::)?k\w*Stages) - 2>\(\)", r"cp_async_wait<\1 - 1>()", "waits for one group less"),
    (r"cp_async_wait<0>\(\);", ";", "no wait"),
    (r"cp_async_commit\(\);", ";", "no commit"),
    (r"(PARE_CUDA::)?mbarrier_wait\(.*?\);", "(void)0;", "no wait for an mbarrier"),
    (r"mbarrier_wait\((.*?), (.*?)( PTX_SAME_LOC)?\);", r"mbarrier_wait(\1, 1 - (\2)\3);", "wrong parity"),
    (r"mbarrier_arrive\(.*?\);", "(void)0;", "no arrival"),
    (r"[\w.]*\.await_full\(.*?\);", "(void)0;", "no wait for an mbarrier"),
    (r"[\w.]*\.release\(.*?\);", "(void)0;", "no arrival"),
    (r"[\w.]*\.release_to\(.*?\);", "(void)0;", "no arrival"),
    (r"\blane < share\.blocks\b", "lane < 1", "no arrival in the other block"),
    (r"\bcluster_sync\(\)", "static_cast<void>(0)", "a block does not wait for the other"),
    (r"\(1 << s\.blocks\) - 1", "1 << s.rank", "copies to one block of the cluster"),
    (r"(const int (?:panel|first) = )s\.rank \*", r"\g<1>0 *", "both blocks copy the same share"),
    (r"fence_mbarrier_init\(\);", "(void)0;", "no fence"),
    (r"(\bmbarrier_init\([^,]*, (?!1\))[^)]*)\)", r"\1 - 1)", "one arrival less"),
    (r"(mbarrier_arrive_expect\(.*)\);", r"\1 / 2);", "expects half the bytes"),
    (r"(mbarrier_arrive_expect\(.*)\);", r"\1 * 2);", "expects twice the bytes"),
    (r"fence_proxy_async\(\);", "(void)0;", "no proxy fence"),
    (r"wgmma_fence\(\);", "(void)0;", "no wgmma fence"),
    (r"wgmma_commit\(\);", "(void)0;", "no commit"),
    (r"wgmma_wait<0>\(", "wgmma_wait<1>(", "waits for one group less"),
    (r"wgmma_wait<1>\(", "wgmma_wait<2>(", "waits for one group less"),
    (r"store_wait_read<0>\(\);", "(void)0;", "no wait for a store"),
    (r"store_wait_read<(\S+) - 1>\(\);", r"store_wait_read<\1>();", "waits for one store less"),
    (r"\bstore_commit\(\)", "(void)0", "no commit"),
    (r"\badds = false;", "adds = true;", "adds to the part before"),
    (r"\bchunk \^ r % 8", "chunk", "no swizzle"),
    (r"(Swizzle::bytes_\d+, \d+)", r"\1 * 2", "wrong stride"),
    (r"(kNext[AB] = \d+)\b", r"\1 * 2", "wrong step"),
    (r"(Swizzle::bytes_\d+, \d+, .*)\);", r"\1 / 2);", "wrong distance of panels"),
    (r"(kMnMajor[AB] = )true", r"\1false", "wrong order in memory"),
    (r"(kNext[XY] = \w+) / 8", r"\1 / 16", "wrong step"),
    (r"(further\(y, n) \* 128", r"\1 * 64", "wrong step"),
    (r"\bbarrier_wait\(.*?\);", "(void)0;", "no wait for the other warpgroup"),
    (r"\bbarrier_arrive\(.*?\);", "(void)0;", "no arrival"),
    (r"i \+ half < both", "i < both", "one arrival more"),
    (r"if \(ends_cut\(i\)\)", "if (false)", "the cut goes on"),
    (r"ended\[row\] = .*?;", "ended[row] = false;", "a cut that a row does not see is added"),
    (r"(int whole = uniform\(.*) \+ 1\)", r"\1 + 2)", "no mask in the last block"),
    (r"(kNextB = .*) \* 2;", r"\1;", "wrong step"),
    (r"\bvalid \* 2\b", "16", "no zero fill"),
    (r"\(kAllLanes, ", "(0x7fffffffu, ", "mask without lane 31"),
    (r"if \((\w+) >= ([\w.]+)\) return;", r"if (\1 > \2) return;", "bound off by one"),
    (r"if \((\w+) >= ([\w.]+)\) continue;", r"if (\1 > \2) continue;", "bound off by one"),
    (r"for \(([^;]*); (\w+) < ((?!k[A-Z])[a-z][\w.]*); (\w+)\+\+\)", r"for (\1; \2 <= \3; \4++)", "loop off by one"),
    (r"\bif \((\w+) < (\w+)\) ", r"if (\1 <= \2) ", "bound off by one"),
    (r"(await_turn\(turn, .*)\);", r"\1 + 1);", "turn off by one"),
    (r"if \(.*\) await_turn\(.*?\);", ";", "adds in order of arrival"),
    (r"\bend_turn\((turn), (.*)\);", r"atomicAdd(\1, \2);", "no fence"),
    (r"slots - begin - strip", "slots - begin", "slots behind the last"),
    (r"KeyRow key = rows\[row\]", "KeyRow key = rows[row ^ 1]", "gradients of another row"),
    (r"later != 0", "false", "the last part of a segment ends the sums"),
    (r"\batomicAdd\(&(.*?), 1\)", r"\1 += 1", "atomicAdd -> +="),
    (r"__threadfence\(\);", ";", "no fence"),
    (r"atomicInc\((.*?), (.*?) - 1\)", r"atomicInc(\1, \2)", "an arrival more"),
    (r"(== count) - 1", r"\1 - 2", "the last but one adds the parts"),
    (r"if \(!is_last_to_arrive\((.*?), (\w+), last\)\) return;", r"if (cut + 1 < \2) return;", "the last cut merges, not the last to arrive"),
    (r"(result_of_cut\(row, )0\)", r"\1cuts > 1)", "merges from the second cut on"),
    (r"(const bool is_first = first \+ i == )0", r"\g<1>1", "the second cut as it is"),
    (r"\(lane == 0 \? top : last\)", "last", "no maximum of the cuts before"),
    (r"slot \| \(kBlock16 - 1\)", "slot | (8 * kBlock16 - 1)", "blocks of a cut share their maxima"),
    (r"(int part = )0;", r"\g<1>1;", "without the first part"),
    (r"first \+ n < parts", "first + n <= parts", "a part that is none"),
    (r"(int i = )share;", r"\g<1>0;", "every block finishes the first share"),
    (r"(share = )apart \? alone : ", r"\1", "parts share what they copy"),
    (r"(kNextRows = 64 \* kWgmmaDepth \* 2) / 16", r"\1 / 32", "other rows of the stage"),
    (r"i % kStages( \* static_cast)", r"0\1", "the matrix of stage 0"),
    (r"if \(!epilogue\.has_tiles\(\)\) break;", ";", "two epilogues of a tile"),
    (r"(i % of_part\(\) \* share\.blocks) \+ share\.rank", r"\1", "both blocks of a cluster add to one tile"),
    (r"part \+ 1 == p_\.parts", "part + 2 == p_.parts", "without the last part"),
    (r"before\[i\]\.x \+ x", "x", "without the parts before"),
    (r"later > x\.last", "later < x.last", "the first similar row of four chains"),
    (r"begin > e\.first && end <= e\.slots", "true", "rows that are none"),
    (r"\(end <= first_own \|\| .*\);", "true;", "a key with itself"),
    (r"count \* 2 : 0", "16 : 0", "no zero fill"),
    (r"(z = held \+ )\(.*\);", r"\g<1>0;", "logits of a tile over those before"),
    (r"min\(kPack<T>, e\.slots - first - slot\)", "kPack<T>", "copies slots that are none"),
    (r"\(mask >> p & 1 && ", "(mask >> p & 1 && p && ", "a page of a round is left out"),
]
# Survivors that change nothing that counts: (file, text of the line, label) -> why.
KNOWN = {
    ("attention_mma.cuh", "cp_async_wait<0>();", "no wait"): "the groups that are left are empty",
    ("attention_wgmma.cuh", "barrier_wait", "no wait for the other warpgroup"): "their order is for time alone",
    ("attention_bwd_wgmma.cuh", "dv.registers(), p16", "waits for one group less"): "the wait behind it covers it",
    ("attention_bwd_wgmma.cuh", "dk.registers(), ds16", "waits for one group less"): "the wait before it covers it",
    ("attention_bwd_wgmma.cuh", "the warp's products have ended", "no __syncwarp"): "each lane has waited for them",
    ("linear_wgmma.cuh", "whole warps meet", "no __syncwarp"): "the emulator gathers the warp there",
    ("runtime/common.cuh", "the arrival before what is then read", "no fence"): "emulated threads see what is there",
    ("linear_mma.cuh", "i < steps", "loop off by one"): "a step behind the last has no products",
    ("compression.cuh", "slot >= e.slots", "bound off by one"): "a slot that is none has no norm to be stored",
    ("compression.cuh", "if (i < count) norms", "bound off by one"): "nobody reads the norm of a slot that is none",
    ("compression_scores.cu", "first_own >= e.slots", "bound off by one"): "columns behind the last are not stored",
}

# Headers that are damaged too, and the source that shows it.
COMPILED = {"attention.cuh": "attention_fwd.cu", "attention_mma.cuh": "attention_fwd.cu",
            "attention_lists.cuh": "attention_fwd.cu",
            "attention_wgmma.cuh": "attention_fwd.cu", "attention_bwd.cuh": "attention_bwd.cu",
            "attention_bwd_wgmma.cuh": "attention_bwd.cu", "fragment.cuh": "attention_fwd.cu",
            "compression.cuh": "compression_scores.cu", "linear_epilogue.cuh": "linear.cu",
            "linear_mma.cuh": "linear.cu", "linear_wgmma.cuh": "linear.cu",
            "paged_tile.cuh": "paged.cu", "paged_decode.cuh": "paged.cu",
            "ring.cuh": "linear.cu", "logits.cuh": "logits.cu", "vocab.cuh": "linear.cu",
            "rope.cuh": "linear.cu", "runtime/common.cuh": "linear.cu"}

FLAGS = dict(capture_output=True, text=True, errors="replace")


def mutants():
    for path in sorted(glob.glob("cuda/*.cu") + [f"cuda/{name}" for name in COMPILED]):
        text = open(path).read()
        for pattern, replacement, label in RULES:
            for m in re.finditer(pattern, text):
                start, end = text.rfind("\n", 0, m.start()) + 1, text.find("\n", m.start())
                if "//" in text[start : m.start()]:
                    continue
                mutant = text[: m.start()] + m.expand(replacement) + text[m.end() :]
                yield path, text.count("\n", 0, m.start()) + 1, text[start:end].strip(), label, mutant


def run(number, mutant, args):
    path, line, source, label, text = mutant
    name = os.path.relpath(path, "cuda")
    place = os.path.join(args.directory, str(number))
    os.makedirs(os.path.join(place, "runtime"), exist_ok=True)
    compiled = COMPILED.get(name, name)
    for file in glob.glob("cuda/*.cuh") + glob.glob("cuda/runtime/*.*h") + [f"cuda/{compiled}"]:
        shutil.copy(file, os.path.join(place, os.path.relpath(file, "cuda")))
    with open(os.path.join(place, name), "w") as f:
        f.write(text)
    object, program = os.path.join(place, "mutant.o"), os.path.join(place, "tests")
    done = subprocess.run(f"{args.compile} -Wno-error -iquote {place} -c {place}/{compiled} -o {object}", shell=True, **FLAGS)
    if done.returncode:
        result = "does not compile"
    else:
        link = re.sub(r"\S*/emu/cuda/" + re.escape(compiled[:-3]) + r"\.o", object, args.link)
        subprocess.run(f"{link} -o {program}", shell=True, check=True)
        ops = re.findall(r"^void (\w+)\(const \w+& a, Stream", open(f"cuda/{compiled}").read(), re.MULTILINE)
        tests = ":".join(f"*OpTest.AgreesWithRef/{op}_*" for op in ops)
        for path in [*glob.glob("tests/test_cuda_*.cpp"), "tests/test_emu_machine.cpp"]:
            test = open(path).read()
            if any(f".{op}(" in test for op in ops):
                tests += "".join(f":{suite}.*" for suite in sorted(set(re.findall(r"^TEST\((\w+),", test, re.M))))
        try:
            done = subprocess.run([program, f"--gtest_filter={tests}", "--gtest_brief=1", "--gtest_fail_fast"],
                                  timeout=300, **FLAGS)
            said = done.stdout + done.stderr
            kind = re.search(r"(race|uninitialised|out of bounds|cp\.async|TMA|async proxy|wgmma|mbarrier|"
                             r"divergent barrier|mask \w+ names|never waited for|lane \d+ calls)", said)
            result = "" if done.returncode == 0 else kind.group(1) if kind else "wrong value"
        except subprocess.TimeoutExpired:
            result = "hangs"
    shutil.rmtree(place)
    known = next((why for (file, text, what), why in KNOWN.items()
                  if file == name and text in source and what == label), None)
    return result, f"{name}:{line}", label, known, source


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants of files whose name holds this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("directory")
    parser.add_argument("compile")
    parser.add_argument("link")
    args = parser.parse_args()
    caught = equivalent = bad = broken = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(run, i, m, args) for i, m in enumerate(mutants()) if args.only in m[0]]
        for job in concurrent.futures.as_completed(jobs):
            result, place, label, known, source = job.result()
            broken += result == "does not compile"
            caught += bool(result) and result != "does not compile"
            equivalent += not result and known is not None
            bad += not result and known is None
            if not result:
                print(f"{place} {label}: survives" + (f" ({known})" if known else f"\n    {source}"), flush=True)
    print(f"{caught} mutants caught, {broken} do not compile, {equivalent} known to change nothing, {bad} survive")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
