#!/usr/bin/env python3
"""Does a folder that pare saved mean the same to transformers?

  tools/compare_transformers.py MODEL_DIR [--pare build/pare] [--sequences 3] [--tokens 61] [--seed 1]

Draws sequences of random token ids, asks `pare logprobs` and transformers (float32, eager attention, on the CPU) for
the log-prob of every token, and prints the largest difference.  Exits with 1 if it is above 1e-4.
Needs torch and transformers.
"""
import argparse
import json
import random
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pare", default="build/pare")
    parser.add_argument("--sequences", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=61)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.disable_progress_bar()

    model, info = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    # lm_head.weight is not in the file where it is the embedding.
    missing = [key for key in info["missing_keys"] if not (model.config.tie_word_embeddings and key == "lm_head.weight")]
    if missing or info["unexpected_keys"] or info["mismatched_keys"]:
        sys.exit(f"{args.model}: missing {missing}, unexpected {info['unexpected_keys']}, "
                 f"of other shape {info['mismatched_keys']}")

    rng = random.Random(args.seed)
    sequences = [[rng.randrange(model.config.vocab_size) for _ in range(args.tokens - i)]
                 for i in range(args.sequences)]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as ids:
        for sequence in sequences:
            ids.write(json.dumps({"ids": sequence}) + "\n")
        ids.flush()
        lines = subprocess.run([args.pare, "logprobs", "--model", args.model, "--ids", ids.name], check=True,
                               stdout=subprocess.PIPE, text=True).stdout.splitlines()
    ours = [json.loads(line)["logprobs"] for line in lines]

    worst, largest = 0.0, 0.0
    for sequence, line in zip(sequences, ours, strict=True):
        x = torch.tensor([sequence])
        with torch.no_grad():
            p = torch.log_softmax(model(x).logits[0, :-1].double(), -1)
        theirs = p.gather(1, x[0, 1:, None])[:, 0]
        mine = torch.tensor(line, dtype=torch.float64)
        worst = max(worst, (mine - theirs).abs().max().item())
        largest = max(largest, theirs.abs().max().item())
    print(f"{args.model}: {sum(map(len, ours))} log-probs, the largest {largest:.2f}, differ by at most {worst:.2e}")
    return worst > 1e-4


if __name__ == "__main__":
    sys.exit(main())
