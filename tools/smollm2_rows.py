#!/usr/bin/env python3
"""Rows for the tasks of SmolLM2: smollm2_rows.py TASK DIR writes DIR/train.jsonl, DIR/val.jsonl and, for `columns`,
DIR/sft.jsonl.

sums     "38 + 27 =" behind three sums that are answered; the response is a number
columns  the sum of two numbers of four digits, a column at a time from the right, each with its carry, then the answer:
         about 50 tokens, each of which needs two digits of the prompt; sft.jsonl holds solutions

No problem is in two files, nor among the examples of another one.
"""
import json
import os
import random
import sys


def sums(draw):
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    draw.shuffle(problems)
    val, train, shown = problems[:128], problems[128:640], problems[640:]

    def row(a, b):
        examples = "".join(f"{x} + {y} = {x + y}\n" for x, y in draw.sample(shown, 3))
        return {"prompt": f"{examples}{a} + {b} =", "answer": str(a + b)}
    return {"val": [row(*p) for p in val], "train": [row(*p) for p in train]}


def columns(draw):
    def solution(a, b):
        steps, carry = [], 0
        for x, y in zip(reversed(str(a)), reversed(str(b))):
            steps.append(f"{x}+{y}+{carry}={int(x) + int(y) + carry}")
            carry = (int(x) + int(y) + carry) // 10
        return f" {', '.join(steps)}: {a + b}\n"

    def row(a, b, solved=False):
        prompt = f"{a} + {b}:"
        return {"prompt": prompt, "completion": solution(a, b)} if solved else {"prompt": prompt, "answer": str(a + b)}
    numbers = draw.sample(range(10**3, 10**4), 2 * (128 + 1024 + 1024))
    pairs = list(zip(numbers[::2], numbers[1::2]))
    return {"val": [row(*p) for p in pairs[:128]], "train": [row(*p) for p in pairs[128:1152]],
            "sft": [row(*p, solved=True) for p in pairs[1152:]]}


def main():
    tasks = {"sums": sums, "columns": columns}
    if len(sys.argv) != 3 or sys.argv[1] not in tasks:
        sys.exit(__doc__)
    os.makedirs(sys.argv[2], exist_ok=True)
    for name, rows in tasks[sys.argv[1]](random.Random(1)).items():
        with open(os.path.join(sys.argv[2], f"{name}.jsonl"), "w") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
