#!/usr/bin/env python3
"""One step of DistillSparse, phases A and B, by torch autograd and PEFT in double precision.

    python tools/make_golden_distill.py tests/golden/qwen3 tests/golden/distill

needs torch, transformers, peft and safetensors (any environment; nothing of it is needed to build, test or run pare).
The model is the first folder's (tools/make_golden.py).  The second gets

    adapter/             LoRA with random A and B, as PEFT saves it
    golden.json          {"hyper": {...}, "samples": [{prompt, tokens, advantage, sampler: log-probs by which they were
                         drawn, dense: those of the model alone}], "versions": ...}
    theta.safetensors    what phase A adds to the parameters of the model
    phi.safetensors      KIND.NAME: what phase B adds to the adapter's A and B, for each KL

Rows of the response read, in layers from `dense_layers` on, `blocks` blocks of `block` tokens for each key head: their
own, and those of the others with the highest bound sum_c max(q_c max k_c, q_c min k_c), the largest over the query heads
of the group (Quest).
"""
import argparse
import json
import pathlib
import shutil

import peft
import safetensors.torch
import torch
import transformers

from make_golden import make_double

HYPER = dict(block=4, blocks=3, dense_layers=1, lr=1e-2, betas=[0.9, 0.95], eps=1e-4, weight_decay=0.1, grad_clip=0.5,
             cap=2.0, veto=0.13, lr_scale_factor=0.5, student_clip=0.25, kl_coef=0.7)
KINDS = ["k2", "k3", "exact_reverse", "exact_forward"]
sparse_from = None  # first row that chooses; None: everything is read


def allowed_keys(query, key):
    """[H, T, T]: which keys a query may read; query [H, T, D], key [K, T, D] as attention sees them."""
    heads, rows, _ = query.shape
    group = heads // key.shape[0]
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    allowed = causal.expand(heads, -1, -1).clone()
    size, count = HYPER["block"], HYPER["blocks"]
    for row in range(sparse_from, rows):
        own = row // size
        if own + 1 <= count:
            continue
        for k in range(key.shape[0]):
            full = key[k, : own * size].reshape(own, size, -1)
            q = query[k * group : (k + 1) * group, row][:, None]
            bound = torch.maximum(q * full.amax(1)[None], q * full.amin(1)[None]).sum(-1).amax(0)
            best = bound.topk(count - 1).indices.tolist()
            keep = torch.zeros(rows, dtype=torch.bool)
            for b in best + [own]:
                keep[b * size : (b + 1) * size] = True
            allowed[k * group : (k + 1) * group, row] = causal[row] & keep
    return allowed


def attention(module, query, key, value, mask, scaling=None, **_):
    repeats = query.shape[1] // key.shape[1]
    if sparse_from is not None and module.layer_idx >= HYPER["dense_layers"]:
        with torch.no_grad():
            allowed = allowed_keys(query[0], key[0])
    else:
        allowed = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    weights = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


transformers.AttentionInterface.register("blocks", attention)


def distributions(model, sample, sparse):
    """Log-probs over the vocabulary at each token of the response."""
    global sparse_from
    ids, prompt = sample["prompt"] + sample["tokens"], len(sample["prompt"])
    sparse_from = prompt if sparse else None
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, prompt - 1 : -1]
    return torch.log_softmax(logits, dim=-1)


def of_tokens(distribution, sample):
    return distribution.gather(1, torch.tensor(sample["tokens"])[:, None])[:, 0]


def adamw(parameters, lr, clip, scales):
    """The first step; `scales`: of B, whose gradient counts in the norm, and meets eps, as that of scale * B."""
    norm = sum((p.grad / s).square().sum() for p, s in zip(parameters, scales)).sqrt()
    factor = min(1.0, clip / norm.item())
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad *= factor
    groups = [{"params": [p], "eps": HYPER["eps"] * s} for p, s in zip(parameters, scales)]
    torch.optim.AdamW(groups, lr=lr, betas=HYPER["betas"], weight_decay=HYPER["weight_decay"]).step()
    updates = [(p.detach() - b) for p, b in zip(parameters, before)]
    with torch.no_grad():
        for p, b in zip(parameters, before):
            p.copy_(b)
            p.grad = None
    return updates, norm.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("output", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(7)
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)

    base = transformers.AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="blocks").float().eval()
    names = [n for n, _ in base.named_parameters()]
    lora = peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    model = peft.get_peft_model(base, lora)
    adapter = {n: p for n, p in model.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for p in adapter.values():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    model.save_pretrained(args.output / "adapter")
    make_double(base)
    theta = [p for n, p in model.named_parameters() if "lora_" not in n]
    assert len(theta) == len(names)
    phi, scales = list(adapter.values()), [2.0 if "lora_B" in n else 1.0 for n in adapter]

    prompts = [torch.randint(97, (n,), generator=generator).tolist() for n in (9, 14)]
    samples = []
    for group, prompt in enumerate(prompts):
        for length, advantage in ((31, 1.2), (23, -0.7), (12, -0.4)):
            tokens = torch.randint(97, (length,), generator=generator).tolist()
            samples.append({"group": group, "prompt": prompt, "tokens": tokens, "advantage": advantage + 0.1 * group})
    for s in samples:
        with torch.no_grad():
            own = of_tokens(distributions(model, s, True), s)
            with model.disable_adapter():
                dense = distributions(model, s, False)
        s["sampler"], s["dense"] = own.float().tolist(), of_tokens(dense, s).float().tolist()
        s["teacher"] = dense
    tokens = sum(len(s["tokens"]) for s in samples)

    # Phase A: tokens weighted by min(xi, cap), responses with an xi below the veto left out of the sum.
    for p in theta:
        p.requires_grad_(True)
    loss, s_rejected = 0, 0
    with model.disable_adapter():
        for s in samples:
            xi = (torch.tensor(s["dense"]).double() - torch.tensor(s["sampler"]).double()).exp()
            s["rejected"] = bool((xi < HYPER["veto"]).any())
            s_rejected += s["rejected"]
            if not s["rejected"]:
                lp = of_tokens(distributions(model, s, False), s)
                loss = loss - (xi.clamp(max=HYPER["cap"]) * (lp - lp.detach()).exp()).sum() * s["advantage"] / tokens
    assert 0 < s_rejected < len(samples)
    loss.backward()
    updates, norm = adamw(theta, HYPER["lr"], HYPER["grad_clip"], [1.0] * len(theta))
    norms = {"theta": norm}
    safetensors.torch.save_file({n: u.float().contiguous() for n, u in zip(names, updates)}, args.output / "theta.safetensors")

    # Phase B, at the same theta.
    for p in theta:
        p.requires_grad_(False)
    for p in phi:
        p.requires_grad_(True)
    all_updates = {}
    for kind in KINDS:
        loss = 0
        for s in samples:
            student, t = distributions(model, s, True), s["teacher"]
            lp, T = of_tokens(student, s), of_tokens(t, s)
            kl = {"k2": lambda: (T - lp).square() / 2,
                  "k3": lambda: ((T - lp).exp() - (T - lp) - 1),
                  "exact_reverse": lambda: (student.exp() * (student - t)).sum(-1),
                  "exact_forward": lambda: (t.exp() * (t - student)).sum(-1)}[kind]()
            if kind == "k3":
                kl = kl.clamp(max=10)
            loss = loss + (HYPER["kl_coef"] * kl - (lp - lp.detach()).exp() * s["advantage"]).sum() / tokens
        loss.backward()
        updates, norms[kind] = adamw(phi, HYPER["lr"] * HYPER["lr_scale_factor"], HYPER["student_clip"], scales)
        for n, u in zip(adapter, updates):
            all_updates[f"{kind}.{n.replace('.default', '')}"] = u.float().contiguous()
    safetensors.torch.save_file(all_updates, args.output / "phi.safetensors")
    for s in samples:
        del s["teacher"]
    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft)}
    golden = {"versions": versions, "hyper": HYPER, "norms": norms, "samples": samples}
    (args.output / "golden.json").write_text(json.dumps(golden) + "\n")
    (args.output / "adapter" / "README.md").unlink(missing_ok=True)
    print(norms, s_rejected, "of", len(samples), "rejected")


if __name__ == "__main__":
    main()
