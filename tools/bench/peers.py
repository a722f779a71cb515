#!/usr/bin/env python3
"""Speed of PyTorch and vLLM on the rows of tools/gpu_check.sh e, measured in the same call as ours.

    tools/bench/peers.py train CONFIG.json ROWS TOKENS [--device cuda] [--steps 4]
    tools/bench/peers.py generate MODEL ROWS.jsonl

train     next-token training by transformers on PyTorch as most people run it: bf16, scaled_dot_product_attention, eager,
          fused AdamW; ROWS rows of TOKENS random ids a step, in micro-batches of 8,192 tokens (one row if it is longer);
          a layer's activations are recomputed in the backward pass when the device's memory runs out without that
generate  prompts and numbers of new tokens as they stand in ROWS.jsonl (prompt_ids, max_tokens), all at once, by vLLM

Prints {"name", "how", "steps", "seconds" of one, "tokens" per second}; train takes the median of all steps but the first, generate the whole call
after a warm-up of one token.  Exits with 3 if a package is missing or does not see the device.
"""
import argparse
import json
import statistics
import sys
import time


def load(import_):
    try:
        return import_()
    except ImportError as e:
        print(f"peers: {e}", file=sys.stderr)
        sys.exit(3)


def train(o):
    def import_():
        import torch
        import transformers
        return torch, transformers
    torch, transformers = load(import_)
    if o.device == "cuda" and not torch.cuda.is_available():
        print("peers: PyTorch sees no GPU", file=sys.stderr)
        return 3
    config = transformers.AutoConfig.from_pretrained(o.config)
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(o.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        ids = torch.randint(0, config.vocab_size, (o.rows, o.tokens))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    micro = max(1, 8192 // o.tokens)

    def step():
        optimizer.zero_grad()
        for part in ids.split(micro):
            loss = model(input_ids=part, labels=part).loss * (len(part) / o.rows)
            loss.backward()
        optimizer.step()
        return loss.item()  # waits for the device

    how = "eager, sdpa"
    try:
        step()
    except torch.OutOfMemoryError:
        how += ", recompute"
        torch.cuda.empty_cache()
        model.gradient_checkpointing_enable()
        model.train()
        step()
    seconds = []
    for _ in range(o.steps - 1):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    report(f"torch {torch.__version__}", how, o.steps, statistics.median(seconds), o.rows * o.tokens)


def generate(o):
    def import_():
        import vllm
        return vllm
    vllm = load(import_)
    with open(o.rows) as f:
        rows = [json.loads(line) for line in f]
    longest = max(len(r["prompt_ids"]) + r["max_tokens"] for r in rows)
    llm = vllm.LLM(model=o.model, skip_tokenizer_init=True, max_model_len=longest, max_num_seqs=len(rows), seed=0)

    def run(tokens_of):
        return llm.generate([{"prompt_token_ids": r["prompt_ids"]} for r in rows],
                            [vllm.SamplingParams(temperature=0.6, ignore_eos=True, detokenize=False, max_tokens=tokens_of(r))
                             for r in rows], use_tqdm=False)
    run(lambda row: 1)
    start = time.perf_counter()
    new = sum(len(result.outputs[0].token_ids) for result in run(lambda row: row["max_tokens"]))
    report(f"vLLM {vllm.__version__}", "defaults", 1, time.perf_counter() - start, new)


def report(name, how, steps, seconds, tokens):
    print(json.dumps({"name": name, "how": how, "steps": steps, "seconds": seconds, "tokens": tokens / seconds}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    trained = commands.add_parser("train")
    trained.set_defaults(function=train)
    trained.add_argument("config")
    trained.add_argument("rows", type=int)
    trained.add_argument("tokens", type=int)
    trained.add_argument("--device", default="cuda")
    trained.add_argument("--steps", type=int, default=4)
    generated = commands.add_parser("generate")
    generated.set_defaults(function=generate)
    generated.add_argument("model")
    generated.add_argument("rows")
    o = parser.parse_args()
    return o.function(o)


if __name__ == "__main__":
    sys.exit(main())
