#!/usr/bin/env python3
"""Registers and spills of each kernel on each architecture, by the `ptxas -v` output that `make cuda` keeps beside the objects, against
the committed baseline.  `make registers` and `make registers-update` call it.

    tools/registers.py [--update] BASELINE NVCC_RELEASE FILE.ptxas...

Fails when a kernel takes more registers, spill, stack or static shared memory than the baseline says, when kernels have
come or gone, and when ptxas could not leave wgmma asynchronous.  Architectures of which nothing was built are left out;
another release of nvcc allocates otherwise, and then nothing is compared.
"""
import argparse
import os
import re
import subprocess
import sys

STATIC_SMEM = 32 * 1024  # 48 KiB less kSmemUnasked of cuda/runtime/common.cuh
COLUMNS = ("registers", "spill stores", "spill loads", "stack", "shared")  # registers a thread; the others in bytes


def short_name(name):
    """matmul<bf16, true> of void pare::cuda::(anonymous namespace)::matmul<__nv_bfloat16, true>(float*, ...)"""
    for long, short in (("(anonymous namespace)::", ""), ("<unnamed>::", ""), ("pare::cuda::", ""), ("pare::", ""),
                        ("__nv_bfloat16", "bf16")):
        name = name.replace(long, short)
    name = name.removeprefix("void ")
    depth = 0
    for i, c in enumerate(name):  # up to the parameters: casts like (Kind)1 stand inside <>
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return name[:i]
    return name


def read_ptxas(path):
    """{(mangled kernel, architecture): values in the order of COLUMNS}"""
    kernels, key = {}, None
    for line in open(path):
        if m := re.search(r"Compiling entry function '(\S+)' for 'sm_(\w+)'", line):
            key = m.groups()
            kernels[key] = dict.fromkeys(COLUMNS, 0)
        elif "instructions are serialized" in line:  # wgmma waits for each product then
            sys.exit(f"registers: {path}: {line.strip()}")
        elif key and (m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)):
            if kernels[key]["registers"] == 0:  # of the kernel; functions that it calls come after its registers
                kernels[key].update(zip(("stack", "spill stores", "spill loads"), map(int, m.groups())))
        elif key and (m := re.search(r"Used (\d+) registers", line)):
            kernels[key]["registers"] = int(m[1])
            if m := re.search(r"(\d+) bytes smem", line):
                kernels[key]["shared"] = int(m[1])
                if int(m[1]) > STATIC_SMEM:
                    sys.exit(f"registers: {path}: {key[0]} has {m[1]} bytes of static shared memory; kSmemUnasked of "
                             f"cuda/runtime/common.cuh is for {STATIC_SMEM} at most")
    return {k: tuple(v[c] for c in COLUMNS) for k, v in kernels.items()}


def built(paths):
    """{(source, kernel, architecture): values}"""
    table = {}
    for path in paths:
        if not os.path.exists(path):
            sys.exit(f"registers: no {path}: run `make cuda`")
        kernels = read_ptxas(path)
        names = sorted({mangled for mangled, _ in kernels})
        demangled = subprocess.run(["c++filt"], input="\n".join(names), text=True, capture_output=True, check=True).stdout
        short = dict(zip(names, map(short_name, demangled.splitlines())))
        source = os.path.basename(path).replace(".ptxas", ".cu")
        for (mangled, arch), values in kernels.items():
            if short[mangled] == "of_this_file":  # in every file, and never launched (cuda/runtime/common.cuh)
                continue
            key = (source, short[mangled], arch)
            if key in table:
                sys.exit(f"registers: two kernels are called {short[mangled]} in {source}")
            table[key] = values
    return table


def render(table, release):
    out = [f"# nvcc {release}; written by `make registers-update`, checked by `make registers`.",
           "# Registers a thread; bytes of spill stores and loads, stack and static shared memory.",
           f"# {'kernel':58} {'sm':>4} {'registers':>9} {'stores':>7} {'loads':>7} {'stack':>6} {'shared':>7}"]
    source = None
    for (file, kernel, arch), v in sorted(table.items()):
        if file != source:
            out += ["", file]
            source = file
        out.append(f"  {kernel:58} {arch:>4} {v[0]:9} {v[1]:7} {v[2]:7} {v[3]:6} {v[4]:7}")
    return "\n".join(out) + "\n"


def read_baseline(path):
    table, release, source = {}, None, None
    for line in open(path):
        if m := re.match(r"# nvcc (\S+);", line):
            release = m[1]
        elif line.startswith("  "):
            *kernel, arch, r, stores, loads, stack, shared = line.split()
            table[source, " ".join(kernel), arch] = tuple(map(int, (r, stores, loads, stack, shared)))
        elif line.strip() and not line.startswith("#"):
            source = line.strip()
    return table, release


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the baseline instead")
    parser.add_argument("baseline")
    parser.add_argument("release", help="of nvcc, such as 13.0")
    parser.add_argument("ptxas", nargs="+")
    o = parser.parse_args()
    now = built(o.ptxas)
    if not now:
        sys.exit("registers: no kernel in these files: did nvcc run with -Xptxas -v?")
    archs = {arch for _, _, arch in now}
    before, release = read_baseline(o.baseline) if os.path.exists(o.baseline) else ({}, o.release)
    if o.update:
        kept = {k: v for k, v in before.items() if k[2] not in archs} if release == o.release else {}
        with open(o.baseline, "w") as f:
            f.write(render(now | kept, o.release))
        print(f"{o.baseline}: {len(now)} kernels of sm_{', sm_'.join(sorted(archs))}")
        return
    if release != o.release:
        print(f"note: {o.baseline} is of nvcc {release}, this is {o.release}: registers are not compared")
        return
    before = {k: v for k, v in before.items() if k[2] in archs}
    worse, better = [], 0
    for key in sorted(now.keys() | before.keys()):
        where = f"{key[0]}: {key[1]} sm_{key[2]}"
        if key not in before:
            worse.append(f"{where}: not in the baseline: " +
                         ", ".join(f"{c} {x}" for c, x in zip(COLUMNS, now[key]) if x or c == "registers"))
        elif key not in now:
            worse.append(f"{where}: in the baseline, but no longer a kernel")
        else:
            more = [f"{c} {a} -> {b}" for c, a, b in zip(COLUMNS, before[key], now[key]) if b > a]
            if more:
                worse.append(f"{where}: {', '.join(more)}")
            elif now[key] != before[key]:
                better += 1
    for line in worse:
        print(line)
    if worse:
        sys.exit(f"registers: {len(worse)} differences from {o.baseline}; if they are meant: make registers-update")
    spilling = sum(v[1] + v[2] > 0 for v in now.values())
    print(f"registers: {len(now)} kernels as in {o.baseline}, of which {spilling} spill" +
          (f"; {better} take less than it says: make registers-update" if better else ""))


if __name__ == "__main__":
    main()
