#!/usr/bin/env python3
"""Instructions of a turn of each hot loop, by the machine code that nvcc made, against the committed baseline.
`make sass` and `make sass-update` call it.

    tools/sass.py [--update] BASELINE NVCC_RELEASE FOLDER

A turn is the innermost loop that multiplies on tensor cores and waits for data.  All its instructions count, whether or
not a turn executes them; a loop inside it counts once.  The baseline names the kernels, of compute capability 9.0 (9.0a).
Fails when a turn has become longer, and when a kernel has another number of such loops; also when a kernel that waits for
the one before (await_kernel_before) may touch device memory above that wait, where a compiler can move loads.

Needs cuobjdump of the CUDA Toolkit, in the PATH or named by CUOBJDUMP; without one it says so, and another release of nvcc
is not compared.
"""
import argparse
import glob
import os
import re
import shutil
import subprocess
import sys

from registers import short_name

PRODUCT = re.compile(r"H?G?MMA")
WAIT = re.compile(r"\bBAR\b|SYNCS|DEPBAR")
KERNEL_BEFORE = re.compile(r"ACQBULK")
MEMORY = re.compile(r"\b(LDG|STG|RED|ATOM|ATOMG|LDGSTS|UTMALDG|UTMASTG|UTMAREDG|UBLKCP)\b")


class Function:
    """The instructions of a kernel, and for each those that may follow it."""

    def __init__(self, listing):
        found = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,6})\*/\s+(.+?);", listing)]
        self.text = [text for _, text in found]
        at = {address: i for i, (address, _) in enumerate(found)}
        self.next = [[] for _ in found]
        joins = {}  # where the threads meet that a barrier register lets apart
        for i, text in enumerate(self.text):
            target = (m := re.search(r"(0x[0-9a-f]+)\s*$", text)) and at.get(int(m[1], 16))
            op = re.sub(r"^@\S+\s+", "", text)
            if m := re.match(r"BSSY\S*\s+(B\d+)", op):
                joins[m[1]] = target
            goes_on = not re.match(r"(EXIT|RET|BRX|BRA|BSYNC)\b", op) or text.startswith("@") or "," in op
            if op.startswith("BRA") and target is not None:
                self.next[i].append(target)
            if (m := re.match(r"BSYNC\S*\s+(B\d+)", op)) and joins.get(m[1]) is not None:
                self.next[i].append(joins[m[1]])
            if goes_on and i + 1 < len(found):
                self.next[i].append(i + 1)

    def loops(self):
        """Sets of instructions, of loops with one entry; those of one entry are one loop."""
        before = [[] for _ in self.text]
        for i, after in enumerate(self.next):
            for j in after:
                before[j].append(i)
        order, seen, stack = [], {0}, [(0, iter(self.next[0]))]
        while stack:  # depth first, without recursion
            i, rest = stack[-1]
            j = next((j for j in rest if j not in seen), None)
            if j is None:
                order.append(stack.pop()[0])
            else:
                seen.add(j)
                stack.append((j, iter(self.next[j])))
        rank = {i: n for n, i in enumerate(reversed(order))}
        dominator = {0: 0}  # Cooper, Harvey, Kennedy 2001

        def meet(a, b):
            while a != b:
                while rank[a] > rank[b]:
                    a = dominator[a]
                while rank[b] > rank[a]:
                    b = dominator[b]
            return a

        changed = True
        while changed:
            changed = False
            for i in list(reversed(order))[1:]:
                known = [p for p in before[i] if p in dominator]
                new = known[0]
                for p in known[1:]:
                    new = meet(new, p)
                if dominator.get(i) != new:
                    dominator[i], changed = new, True
        bodies = {}
        for i in order:
            for head in self.next[i]:
                a = i
                while rank[a] > rank[head]:
                    a = dominator[a]
                if a != head:
                    continue
                body, todo = bodies.setdefault(head, {head}), [i]
                while todo:
                    j = todo.pop()
                    if j not in body:
                        body.add(j)
                        todo += [p for p in before[j] if p in rank]
        return list(bodies.values())

    def turns(self):
        """Lengths of the hot loops, ascending."""
        def has(body, pattern):
            return any(pattern.search(self.text[i]) for i in body)
        hot = [b for b in self.loops() if has(b, PRODUCT) and has(b, WAIT)]
        return sorted(len(b) for b in hot if not any(c < b for c in hot))

    def too_early(self):
        """An access to device memory on some way to the wait for the kernel before, if there is such a wait."""
        if not any(KERNEL_BEFORE.search(t) for t in self.text):
            return None
        seen, todo = set(), [0]
        while todo:
            i = todo.pop()
            if i in seen or KERNEL_BEFORE.search(self.text[i]):
                continue
            seen.add(i)
            todo += self.next[i]
        return next((self.text[i] for i in sorted(seen) if MEMORY.search(self.text[i])), None)


def functions(cuobjdump, path):
    """{kernel: its listing}"""
    out = subprocess.run([cuobjdump, "-sass", "-arch", "sm_90a", path], text=True, capture_output=True, check=True).stdout
    parts = [part.split("\n", 1) for part in out.split("Function : ")[1:]]
    names = subprocess.run(["c++filt"], input="\n".join(name for name, _ in parts), text=True, capture_output=True,
                           check=True).stdout
    return {short_name(name): rest for name, (_, rest) in zip(names.splitlines(), parts)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the figures of the baseline's kernels anew")
    parser.add_argument("baseline")
    parser.add_argument("release", help="of nvcc, such as 13.0")
    parser.add_argument("folder", help="of the objects")
    o = parser.parse_args()
    cuobjdump = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")
    if not cuobjdump:
        print("note: no cuobjdump (it comes with the CUDA Toolkit): the hot loops are not counted")
        return
    lines = open(o.baseline).read().splitlines()
    release = next((m[1] for line in lines if (m := re.match(r"# nvcc (\S+);", line))), None)
    if release != o.release and not o.update:
        print(f"note: {o.baseline} is of nvcc {release}, this is {o.release}: the hot loops are not compared")
        return
    worse, new, objects = [], [], {}
    for line in lines:
        if line.startswith("#") or not line.strip():
            new.append(re.sub(r"^# nvcc \S+;", f"# nvcc {o.release};", line))
            continue
        source, kernel, *before = re.split(r"\s{2,}", line.strip())
        before = [int(n) for n in " ".join(before).split()]
        if source not in objects:
            path = os.path.join(o.folder, source.replace(".cu", ".o"))
            if not os.path.exists(path):
                sys.exit(f"sass: no {path}: run `make cuda`")
            objects[source] = functions(cuobjdump, path)
        if kernel not in objects[source]:
            sys.exit(f"sass: {path}: no kernel {kernel}; {o.baseline} names it")
        now = Function(objects[source][kernel]).turns()
        new.append(f"{source:22}  {kernel:52}  {' '.join(map(str, now))}")
        if len(now) != len(before) or any(a > b for a, b in zip(now, before)):
            worse.append(f"{source}: {kernel}: instructions of a turn {before} -> {now}")
    early = 0
    for path in sorted(glob.glob(os.path.join(o.folder, "*.o"))):
        for kernel, listing in functions(cuobjdump, path).items():
            early += bool(KERNEL_BEFORE.search(listing))
            if access := KERNEL_BEFORE.search(listing) and Function(listing).too_early():
                sys.exit(f"sass: {path}: {kernel} waits for the kernel before behind {access}")
    if o.update:
        open(o.baseline, "w").write("\n".join(new) + "\n")
    elif worse:
        print("\n".join(worse))
        sys.exit(f"sass: {len(worse)} differences from {o.baseline}; if they are meant: make sass-update")
    print(f"sass: hot loops of {sum(not n.startswith('#') for n in new)} kernels as in {o.baseline}; "
          f"{early} kernels wait for the one before")


if __name__ == "__main__":
    main()
