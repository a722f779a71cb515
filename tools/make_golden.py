#!/usr/bin/env python3
"""Golden values of tiny random models, computed by Hugging Face transformers in double precision.

    python tools/make_golden.py tests/golden

needs torch, transformers and safetensors (any environment; nothing of it is needed to build, test or run pare).  Each
folder NAME holds a model as transformers saves it, and

    golden.json              {"loss": mean over all predicted tokens of all sequences of -log p,
                              "sequences": [{"ids": [...], "logprobs": [log p of each token after the first]}]}
    golden_grads.safetensors d loss / d parameter, computed in double, stored as F32 under the parameters' names

The weights are float32 numbers; everything from them on is double.  transformers itself drops to float32 inside RMSNorm
and the rotary table, so those two are replaced by double versions; the unchanged float32 model must agree with them.
"""
import argparse
import hashlib
import json
import math
import pathlib
import shutil

import safetensors
import safetensors.torch
import torch
import transformers

LENGTHS = [2, 3, 17, 31, 67, 130]  # the shortest possible; around and beyond one and two blocks of 64 keys
COMMON = dict(vocab_size=97, num_hidden_layers=2, max_position_embeddings=256, bos_token_id=0)


def configs():
    """Odd sizes, one trait of each family per model."""
    yield "qwen2", transformers.Qwen2Config(
        **COMMON, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, intermediate_size=101,
        rms_norm_eps=1e-6, tie_word_embeddings=True, eos_token_id=[95, 96], **rope(1e6))
    yield "qwen3", transformers.Qwen3Config(
        **COMMON, hidden_size=50, num_attention_heads=5, num_key_value_heads=1, head_dim=14, intermediate_size=89,
        rms_norm_eps=1e-6, tie_word_embeddings=False, eos_token_id=96, **rope(1e6))
    # wavelengths of the six pairs: 6 (kept), 18 (blended), 50, 141, 396, 1114 (divided)
    yield "llama31", transformers.LlamaConfig(
        **COMMON, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=75,
        rms_norm_eps=1e-5, tie_word_embeddings=False, eos_token_id=[95, 96],
        **rope(500.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=32))


def rope(theta, **scaling):
    if int(transformers.__version__.split(".")[0]) >= 5:
        return {"rope_parameters": {"rope_theta": theta, "rope_type": "default", **scaling}}
    return {"rope_theta": theta, "rope_scaling": scaling or None}


def initialise(model, seed):
    """Large enough that every gradient matters: matrices and biases N(0, 0.2), norms 1 +- 0.2."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if "norm" in name:
                p.copy_(1 + 0.4 * (torch.rand(p.shape, generator=generator) - 0.5))
            else:
                p.copy_(0.2 * torch.randn(p.shape, generator=generator))


def inverse_frequencies(config):
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    theta = parameters.get("rope_theta") or config.rope_theta
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if parameters.get("rope_type", "default") == "default":
        return torch.tensor(frequencies, dtype=torch.float64)
    low, high, factor = (parameters[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
    for i, f in enumerate(frequencies):
        turns = parameters["original_max_position_embeddings"] * f / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0), 1)
        frequencies[i] = keep * f + (1 - keep) * f / factor
    return torch.tensor(frequencies, dtype=torch.float64)


def make_double(model):
    """The same model with all arithmetic in double."""
    model.double()
    inv_freq = inverse_frequencies(model.config)

    def rotary(x, position_ids, **_):
        angles = position_ids[:, :, None].double() * inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def rms_norm(module):
        def forward(x):
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
            return module.weight * (x * scale)
        return forward

    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            torch.testing.assert_close(module.inv_freq.double(), inv_freq, rtol=1e-6, atol=0)
            module.forward = rotary
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = rms_norm(module)
    return model


def logprobs(model, ids):
    """Log p of ids[1:], one row of length len(ids) - 1."""
    row = torch.tensor([ids])
    logits = model(input_ids=row, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1).gather(1, row[0, 1:, None])[:, 0]


def make(name, config, folder, seed):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    initialise(model, seed)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed + 1)
    sequences = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    with torch.no_grad():
        single = torch.cat([logprobs(model, ids) for ids in sequences])

    make_double(model)
    rows = [logprobs(model, ids) for ids in sequences]
    every = torch.cat(rows)
    assert every.dtype == torch.float64
    loss = -every.mean()
    loss.backward()
    difference = (single.double() - every).abs().max().item()
    assert difference < 1e-5, difference
    golden = {
        "loss": loss.item(),
        "sequences": [{"ids": ids, "logprobs": row.tolist()} for ids, row in zip(sequences, rows)],
    }
    text = json.dumps(golden, indent=1)
    (folder / "golden.json").write_text(text.replace(",\n    ", ", ").replace("[\n    ", "[").replace("\n   ]", "]") + "\n")
    gradients = {n: p.grad.float().contiguous() for n, p in model.named_parameters()}
    assert all(g.abs().max() > 0 for g in gradients.values())
    safetensors.torch.save_file(gradients, folder / "golden_grads.safetensors", metadata={"format": "pt"})
    return f"{name}: float32 transformers differs from the double values by at most {difference:.1e} in a log-prob"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    notes = []
    for seed, (name, config) in enumerate(configs()):
        shutil.rmtree(output / name, ignore_errors=True)
        notes.append(make(name, config, output / name, 100 * (seed + 1)))
    # The same weights as qwen2, rounded to BF16, in shards with an index: for the loader.
    sharded = output / "qwen2_bf16_shards"
    shutil.rmtree(sharded, ignore_errors=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(output / "qwen2")
    model.to(torch.bfloat16).save_pretrained(sharded, max_shard_size="40KB")
    write_manifest(output, notes)


def write_manifest(output, notes):
    lines = ["# Golden values of tiny random models", "",
             "Made by `python tools/make_golden.py tests/golden` (what is in the files: see there) with "
             f"transformers {transformers.__version__}, torch {torch.__version__}, safetensors {safetensors.__version__}.",
             "Computed by transformers, in double; no code of this repository took part.", ""]
    lines += [f"- {note}" for note in notes] + ["", "| file | bytes | sha256 |", "|---|---|---|"]
    for path in sorted(p for p in output.rglob("*") if p.is_file() and p.name != "MANIFEST.md"):
        data = path.read_bytes()
        lines.append(f"| {path.relative_to(output)} | {len(data)} | {hashlib.sha256(data).hexdigest()} |")
    (output / "MANIFEST.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
