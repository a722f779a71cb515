#!/usr/bin/env python3
"""Mutation test of the host program: some hundred small changes, compiled in at once and chosen at run time, each of
which a test should notice.  `make mutants` gives it its arguments.

    tools/mutants/program.py [--only TEXT] [--share X] [--survivors] [--sample] DIRECTORY COMPILE TESTS PROGRAM

COMPILE lacks "-c SOURCE -o OBJECT"; TESTS and PROGRAM, which link the tests and the program that some of them start, lack
"-o FILE".  Every test runs once to record the mutants that it reaches; a mutant then meets only these, fastest first.
Results are kept in DIRECTORY/results.json.  Exits with 1 if a mutant survives that tools/mutants/listed.py does not list.
"""
import argparse
import concurrent.futures
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import listed
import rules

ROOMS = ["src/base", "src/kv", "src/kv/policies", "src/rollout", "src/rl", "src/run", "model", "model/hf", "tokenizer",
         "data", "data/verify", "data/math_value"]
PAGE = "tests/README.md"
# They end processes: a mutant could end others than its own.
LEFT_OUT = {"src/base/child.cpp"}
# Tests of ops, kernels and the emulator see nothing of these rooms that others do not; two of the page take minutes.
TESTS_LEFT_OUT = re.compile(r"AgreesWithRef|FastOps|BitsOfCpu|OpBits|^(Cuda|Emu|Ptx|Tables/Kv)|GpuCheck|NodeCheck|House|"
                            r"IsInstalled|AsThePagesPrintThem")


def sources():
    return [f for room in ROOMS for f in sorted(glob.glob(f"{room}/*.cpp")) if f not in LEFT_OUT]


def called(command, **more):
    return subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace", **more)


def stale(object, source):
    """Is the object older than a file that it was compiled from?"""
    try:
        inputs = open(object[:-2] + ".d").read().replace("\\\n", " ").split(":")[1].split()
        return any(os.path.getmtime(i) > os.path.getmtime(object) for i in inputs + [source])
    except OSError:
        return True


def compile_file(file, numbered, args):
    """Compiles the file with its mutants, less those that do not compile; returns the numbers of the latter."""
    source, bad = os.path.join(args.directory, file), set()
    object, text = source[:-4] + ".o", open(file).read()
    os.makedirs(os.path.dirname(source), exist_ok=True)
    remembered = object + ".bad"  # of the same text: what did not compile
    whole = rules.write(text, numbered)
    if os.path.exists(remembered) and not stale(object, file):
        kept, *numbers = open(remembered).read().split("\n", 1)[0].split()
        if kept == rules.hashlib.sha256(whole.encode()).hexdigest():
            return set(map(int, numbers))
    while True:
        mutated = rules.write(text, [(n, m) for n, m in numbered if n not in bad])
        with open(source, "w") as f:
            f.write(mutated)
        done = called(f"{args.compile} -MMD -c {source} -o {object}")
        if done.returncode == 0:
            break
        lines = mutated.split("\n")[2:]
        numbers = set()
        for line, column in re.findall(rf"{re.escape(file)}:(\d+):(\d+)", done.stderr) + re.findall(
                rf"{re.escape(source)}:(\d+):(\d+)", done.stderr):
            for near in (range(int(line) - 1, int(line)), range(int(line) - 4, int(line) + 3)):
                found = {int(n) for l in near if 0 <= l < len(lines)
                         for n in re.findall(r"pare::mutant::(?:on\(|zeroed\(|\w+\{)(\d+)", lines[l])} - bad
                if found:
                    break
            numbers |= found
        if not numbers:
            sys.exit(f"{source} does not compile:\n{done.stderr[:4000]}")
        bad |= numbers
    with open(remembered, "w") as f:
        print(rules.hashlib.sha256(whole.encode()).hexdigest(), *bad, file=f)
    return bad


def build(mutants, args):
    """Compiles and links; returns the mutants that compile by their numbers, which last as long as the folder, and
    those that do not."""
    by_file, bad, path = {}, set(), f"{args.directory}/numbers.json"
    os.makedirs(f"{args.directory}/tests", exist_ok=True)
    numbers = json.load(open(path)) if os.path.exists(path) else {}
    numbered = {numbers.setdefault(m.key(), len(numbers)): m for m in mutants}
    json.dump(numbers, open(path, "w"))
    for n, m in numbered.items():
        by_file.setdefault(m.file, []).append((n, m))
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for numbers in pool.map(lambda file: compile_file(file, by_file[file], args), by_file):
            bad |= numbers
    for n in bad:
        if numbered[n].label not in rules.RATES:
            sys.exit(f"{numbered[n].file}: '{numbered[n].label}' of tools/mutants/listed.py does not compile")
    for name, command in (("tests/pare_tests", args.tests), ("pare", args.program)):
        for file in by_file:
            command = re.sub(rf"(?<= )\w+/{re.escape(file[:-4])}\.o(?= )", f"{args.directory}/{file[:-4]}.o", command)
        extra = []
        for runtime in ["mutant"] + ["listener"] * (name != "pare"):
            extra.append(f"{args.directory}/{runtime}.o")
            if stale(extra[-1], f"tools/mutants/{runtime}.cpp"):
                subprocess.run(f"{args.compile} -MMD -c tools/mutants/{runtime}.cpp -o {extra[-1]}", shell=True, check=True)
        subprocess.run(f"{command} {' '.join(extra)} -o {args.directory}/{name}", shell=True, check=True)
    return {n: m for n, m in numbered.items() if n not in bad}, [numbered[n] for n in bad]


def run_tests(args, names, limit, **environment):
    """Runs the tests; returns the exit status, None where the time was up, and what they print."""
    temporary = tempfile.mkdtemp(prefix="pare_mutant_")
    program = f"{args.directory}/tests/pare_tests"
    command = ["nice", program, "--gtest_brief=1", "--gtest_fail_fast"]
    if names:
        with open(f"{temporary}/flags", "w") as f:
            f.write(f"--gtest_filter={':'.join(names)}\n")
        command.append(f"--gtest_flagfile={temporary}/flags")
    with open(f"{temporary}/said", "w+", errors="replace") as said:
        job = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True,
                               env=os.environ | {"TEST_TMPDIR": temporary} | environment)
        try:
            code = job.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(job.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        job.wait()
        said.seek(0)
        text = said.read()
    shutil.rmtree(temporary, ignore_errors=True)
    return code, text


def record(mutants, args):
    """Runs every test once; returns of each its milliseconds and the mutants that it reaches."""
    path = f"{args.directory}/reached.json"
    numbers = {n: m.key() for n, m in mutants.items()}
    try:
        known = json.load(open(path))
    except OSError:
        known = {}
    listing = called(f"{args.directory}/tests/pare_tests --gtest_list_tests").stdout
    names, suite = [], ""
    for line in listing.split("\n"):
        word = line.split("#")[0].strip()
        if not line.startswith(" "):
            suite = word
        elif word and "DISABLED_" not in suite + word and not TESTS_LEFT_OUT.search(suite + word):
            names.append(suite + word)
    if known.get("numbers") != {str(n): k for n, k in numbers.items()}:
        known = {"numbers": {str(n): k for n, k in numbers.items()}, "tests": {}}
    new = [n for n in names if n not in known["tests"]]
    size, shares = max(numbers, default=0) + 1, 8 * args.jobs

    def share(i):
        part = new[i::shares]
        if not part:
            return []
        bytes, lines = f"{args.directory}/bytes{i}", f"{args.directory}/lines{i}"
        with open(bytes, "wb") as f:
            f.write(b"\0" * size)
        open(lines, "w").close()
        names = list(part)
        while names:  # a failed test ends its share: the others run on without it
            run_tests(args, names, 1800, PARE_MUTANT_REACHED=os.path.abspath(bytes), PARE_MUTANT_TESTS=lines)
            done = {l.split()[0] for l in open(lines)}
            left = [n for n in names if n not in done]
            names = left if len(left) < len(names) else left[1:]
        return [l.split() for l in open(lines)]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(share, range(shares)):
            for name, passed, milliseconds, *reached in found:
                known["tests"][name] = [passed == "P", int(milliseconds), list(map(int, reached))]
    known["tests"] = {n: t for n, t in known["tests"].items() if n in set(names)}
    json.dump(known, open(path, "w"))
    for name, (passed, _, _) in known["tests"].items():
        if not passed:
            print(f"note: {name} fails without a mutant: it is left out")
    tests = {n: (ms, set(reached)) for n, (passed, ms, reached) in known["tests"].items() if passed}
    for n, m in mutants.items():  # evaluated before the first test: by whom else sees the file
        if m.label == "named constant":
            beside = {k for k, other in mutants.items() if other.file == m.file and k != n}
            for _, reached in tests.values():
                if reached & beside:
                    reached.add(n)
    return tests


def judge(n, m, tests, args):
    """Returns the test that notices the mutant, or None."""
    reaching = sorted((ms, name) for name, (ms, reached) in tests.items() if n in reached)
    patience = 1000 * args.patience
    while reaching and patience > 0:
        batch, budget = [], 3 * sum(ms for ms, _ in reaching[:1]) + 1500
        while reaching and (not batch or budget > 0):
            batch.append(reaching.pop(0))
            budget -= batch[-1][0]
        milliseconds = sum(ms for ms, _ in batch)
        patience -= milliseconds
        code, said = run_tests(args, [name for _, name in batch], 30 + 8 * milliseconds / 1000, PARE_MUTANT=str(n))
        if code != 0:
            failed = re.search(r"\[  FAILED  \] (\S+?),? ", said)
            return failed.group(1) if failed else "hangs" if code is None else "ends early"
    return None


def known(m):
    return next((why for (file, text, label), why in listed.KNOWN.items()
                 if file == m.file and text in m.text and label == m.label), None)


def table(results):
    """By room: mutants, noticed, known to change nothing."""
    rows = ["| room | mutants | noticed | known to change nothing | unnoticed |", "| --- | ---: | ---: | ---: | ---: |"]
    sums = [0] * 4
    for room in ROOMS:
        of = [r for key, r in results.items() if r and os.path.dirname(key.split("|")[0]) == room]
        row = [len(of), sum(bool(r["by"]) for r in of), sum(not r["by"] and bool(r["known"]) for r in of)]
        row.append(row[0] - row[1] - row[2])
        sums = [a + b for a, b in zip(sums, row)]
        rows.append(f"| `{room}` | " + " | ".join(map(str, row)) + " |")
    return "\n".join(rows + ["| all | " + " | ".join(map(str, sums)) + " |"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants of files whose path holds this text")
    parser.add_argument("--share", type=float, default=1, help="part of the usual number: 20 takes nearly all there are")
    parser.add_argument("--survivors", action="store_true", help="only those that survived the last run")
    parser.add_argument("--sample", action="store_true", help="the ten of listed.py, each with the tests named there")
    parser.add_argument("--patience", type=float, default=60, help="seconds of tests that a mutant meets")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("directory")
    parser.add_argument("compile")
    parser.add_argument("tests")
    parser.add_argument("program")
    args = parser.parse_args()
    args.directory += "/sample" * args.sample
    every = [m for f in sources() for m in rules.mutants(f, listed.LISTED.get(f, []))]
    if args.sample:
        named = {(f, text, label): tests for f, text, label, tests in listed.SAMPLE}
        chosen = {k: next(m for m in every if m.file == k[0] and k[1] in m.text and m.label == k[2]) for k in named}
        mutants, without = build(list(chosen.values()), args)
        number = {m.key(): n for n, m in mutants.items()}
        tests = {t: (0, {number[chosen[k].key()] for k in named if named[k] == t}) for t in named.values()}
    else:
        mutants, without = build([m for m in every if args.only in m.file and m.taken(args.share)], args)
        tests = record(mutants, args)
    path, results = f"{args.directory}/results.json", {}
    if os.path.exists(path) and not args.sample:
        results = {k: r for k, r in json.load(open(path)).items() if k in {m.key() for m in every}}
    results |= {m.key(): {} for m in without}
    if args.survivors:
        mutants = {n: m for n, m in mutants.items() if not results.get(m.key(), {"by": None})["by"]}
    unknown = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = {pool.submit(judge, n, m, tests, args): (n, m) for n, m in mutants.items()}
        for job in concurrent.futures.as_completed(jobs):
            n, m = jobs[job]
            by, why = job.result(), known(m)
            results[m.key()] = {"by": by, "known": why, "number": n, "line": m.line}
            if not by:
                reached = sum(n in reached for _, reached in tests.values())
                print(f"{m.file}:{m.line} {m.label}: survives, reached by {reached} tests" +
                      (f" ({why})" if why else f"; PARE_MUTANT={n}\n    {m.text}"), flush=True)
                unknown += not why
            json.dump(results, open(path, "w"), indent=0)
    usual = [m.key() for m in every if m.taken(1)]
    print(f"{len(mutants) - unknown} of {len(mutants)} mutants noticed" if args.sample else table(results))
    if args.share == 1 and all(key in results for key in usual):  # nothing is missing: for the page
        page = re.split(r"(?<=mutants by room -->\n)", open(PAGE).read())
        commit = called("git describe --always --dirty --abbrev=7 --exclude='*'").stdout.strip()
        page[1] = f"\nAt commit {commit}:\n\n{table(results)}\n\n<!-- end of mutants by room -->\n"
        with open(PAGE, "w") as f:
            f.write("".join(page))
    return unknown > 0


if __name__ == "__main__":
    sys.exit(main())
