#!/usr/bin/env python3
"""Does a folder that pare saved mean the same to transformers?

  tools/compare_transformers.py MODEL_DIR [--adapter DIR] [--pare build/pare] [--sequences 3] [--tokens 61] [--seed 1]

Draws sequences of random token ids, asks `pare logprobs` and transformers (float32, eager attention, on the CPU) for
the log-prob of every token, and prints the largest difference.  Exits with 1 if it is above 1e-4.
With --adapter, PEFT adds that LoRA adapter to the model, and the gradients of its A and B are compared too: the norm of
the difference, relative to that of the gradient.  Exits with 1 if that is above 1e-4.
Needs torch and transformers, and with --adapter peft and safetensors.
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
    parser.add_argument("--adapter")
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

    if args.adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, args.adapter, is_trainable=True).eval()

    rng = random.Random(args.seed)
    sequences = [[rng.randrange(model.config.vocab_size) for _ in range(args.tokens - i)]
                 for i in range(args.sequences)]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as ids, tempfile.TemporaryDirectory() as folder:
        gradients = f"{folder}/gradients.safetensors"
        adapter = ["--adapter", args.adapter, "--grads", gradients] if args.adapter else []
        for sequence in sequences:
            ids.write(json.dumps({"ids": sequence}) + "\n")
        ids.flush()
        lines = subprocess.run([args.pare, "logprobs", "--model", args.model, "--ids", ids.name] + adapter, check=True,
                               stdout=subprocess.PIPE, text=True).stdout.splitlines()
        if args.adapter:
            from safetensors.torch import load_file
            our_gradients = load_file(gradients)
    ours = [json.loads(line)["logprobs"] for line in lines]

    worst, largest, apart = 0.0, 0.0, 0.0
    predicted = sum(map(len, ours))
    for sequence, line in zip(sequences, ours, strict=True):
        x = torch.tensor([sequence])
        with torch.set_grad_enabled(bool(args.adapter)):
            p = torch.log_softmax(model(x).logits[0, :-1].double(), -1)
            theirs = p.gather(1, x[0, 1:, None])[:, 0]
        if args.adapter:
            (-theirs.sum() / predicted).backward()
        theirs = theirs.detach()
        mine = torch.tensor(line, dtype=torch.float64)
        worst = max(worst, (mine - theirs).abs().max().item())
        largest = max(largest, theirs.abs().max().item())
    print(f"{args.model}: {predicted} log-probs, the largest {largest:.2f}, differ by at most {worst:.2e}")
    if args.adapter:
        their_gradients = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}
        if their_gradients.keys() != our_gradients.keys():
            sys.exit(f"{args.adapter}: tensors {sorted(their_gradients.keys() ^ our_gradients.keys())[:4]} on one side only")
        total = sum(g.double().square().sum() for g in their_gradients.values()).sqrt()
        apart = (sum((g - our_gradients[name]).double().square().sum() for name, g in their_gradients.items()).sqrt() / total).item()
        print(f"{args.adapter}: gradients of {len(our_gradients)} tensors, of norm {total:.3g}, differ by {apart:.2e} of it")
    return worst > 1e-4 or apart > 1e-4


if __name__ == "__main__":
    sys.exit(main())
