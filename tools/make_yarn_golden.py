#!/usr/bin/env python3
"""YaRN as Hugging Face transformers computes it, for tests/test_yarn.cpp.

    python tools/make_yarn_golden.py tests/golden/yarn.json

needs torch and transformers.  Rotary frequencies and attention factors of published and other settings, and log-probs
of two models of tests/golden (make_golden.py) whose config.json gets such a setting, in double but for transformers'
rotary table and norms.
"""
import json
import pathlib
import random
import sys
import tempfile

import torch
import transformers

SHAPE = {"vocab_size": 97, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 75, "num_hidden_layers": 1}
TABLES = [  # model type, keys
    ("qwen2", {"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 32768,  # Qwen2.5's model card
               "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}),
    ("qwen3", {"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 40960,  # Qwen3's
               "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    ("llama", {"head_dim": 14, "rope_theta": 500.0, "max_position_embeddings": 256,
               "rope_scaling": {"rope_type": "yarn", "factor": 3.5, "original_max_position_embeddings": 32,
                                "beta_fast": 4, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.3}}),
    ("mistral", {"head_dim": 12, "rope_theta": 1e4, "max_position_embeddings": 512, "sliding_window": None,
                 "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
                                  "mscale": 0.707, "mscale_all_dim": 1.5}}),
    ("llama", {"head_dim": 10, "rope_theta": 1e4, "max_position_embeddings": 128,
               "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.5}}),
    ("llama", {"head_dim": 10, "rope_theta": 1e4, "max_position_embeddings": 128,
               "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0, "beta_fast": 2,
                                   "beta_slow": 2, "original_max_position_embeddings": 128}}),
]
SCALINGS = {"qwen2": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8},
            "qwen3": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4,
                      "attention_factor": 1.25}}


def config_of(keys):
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(keys))
        return transformers.AutoConfig.from_pretrained(folder)


def rotary(model):
    return next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))


def table(kind, keys):
    keys = {"model_type": kind, **SHAPE, **keys}
    found = rotary(transformers.AutoModelForCausalLM.from_config(config_of(keys)))
    return {"config": keys, "attention_factor": found.attention_scaling, "inv_freq": found.inv_freq.double().tolist()}


def rows(name, scaling):
    folder = pathlib.Path(__file__).parent.parent / "tests/golden" / name
    config = json.loads((folder / "config.json").read_text())
    parameters = config.pop("rope_parameters", None) or {}
    config["rope_theta"] = config.get("rope_theta") or parameters["rope_theta"]
    config["rope_scaling"] = scaling
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config_of(config), dtype=torch.float64, attn_implementation="eager").eval()
    rng, sequences = random.Random(39), []
    for length in (3, 67, 130):
        ids = [rng.randrange(config["vocab_size"]) for _ in range(length)]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        logprobs = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        sequences.append({"ids": ids, "logprobs": [round(x, 9) for x in logprobs.tolist()]})
    return {"config": config, "sequences": sequences}


def main(out):
    golden = {"tables": [table(*row) for row in TABLES], "models": {n: rows(n, s) for n, s in SCALINGS.items()}}
    pathlib.Path(out).write_text(json.dumps(golden, separators=(",", ":")).replace('{"config"', '\n{"config"') + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
