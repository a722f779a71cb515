#!/usr/bin/env python3
"""A Hugging Face folder of a GGUF file with the Llama architecture and byte-level BPE, for tools/get_smollm2.sh.

    python3 tools/gguf_to_hf.py MODEL.gguf DIR

needs the package gguf.  DIR gets config.json, generation_config.json, model.safetensors, tokenizer.json and
tokenizer_config.json.  Weights are dequantised and rounded to float16, which of the types with two bytes is the nearest
to the products of Q4_1 and Q8_0 (float16 scales times integers of 4 and 8 bits).  The same file gives the same bytes.
"""
import json
import pathlib
import struct
import sys

import numpy
from gguf import GGUFReader, TokenType, dequantize

LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
       "output.weight": "lm_head.weight"}
# By the name of the pre-tokenizer in GGUF.
PRE_TOKENIZERS = {"smollm": [{"type": "Digits", "individual_digits": True},
                             {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}


def name_of(tensor):
    if tensor in TOP:
        return TOP[tensor]
    block, layer, part, weight = tensor.split(".")
    if block != "blk" or weight != "weight" or part not in LAYER:
        sys.exit(f"gguf_to_hf.py: the tensor {tensor} is none of a Llama model")
    return f"model.layers.{layer}.{LAYER[part]}.weight"


def weights(reader, heads, kv_heads):
    found = {}
    for tensor in reader.tensors:
        name, values = name_of(tensor.name), dequantize(tensor.data, tensor.tensor_type)
        # GGUF has the two halves of a head's rotary pairs row by row; Hugging Face has one half after the other.
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            n = heads if "q_proj" in name else kv_heads
            rows, width = values.shape
            values = values.reshape(n, rows // n // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
        found[name] = values.astype("<f2")
        if not numpy.isfinite(found[name]).all():
            sys.exit(f"gguf_to_hf.py: {tensor.name} has values beyond float16")
    return found


def save_weights(tensors, path):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors):
        header[name] = {"dtype": "F16", "shape": tensors[name].shape, "data_offsets": [at, at + tensors[name].nbytes]}
        at += tensors[name].nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            out.write(tensors[name].tobytes())


def config(of, tied):
    heads, hidden = of("llama.attention.head_count"), of("llama.embedding_length")
    assert of("llama.rope.dimension_count") == hidden // heads, "rotary pairs of part of a head"
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": of("llama.vocab_size"),
            "hidden_size": hidden, "intermediate_size": of("llama.feed_forward_length"),
            "num_hidden_layers": of("llama.block_count"), "num_attention_heads": heads,
            "num_key_value_heads": of("llama.attention.head_count_kv"), "head_dim": hidden // heads,
            "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "max_position_embeddings": of("llama.context_length"),
            # The shortest decimal of the float32.
            "rms_norm_eps": float(str(numpy.float32(of("llama.attention.layer_norm_rms_epsilon")))),
            "rope_theta": of("llama.rope.freq_base"), "rope_scaling": None, "tie_word_embeddings": tied,
            "bos_token_id": of("tokenizer.ggml.bos_token_id"), "eos_token_id": of("tokenizer.ggml.eos_token_id"),
            "pad_token_id": of("tokenizer.ggml.padding_token_id"), "torch_dtype": "float16"}


def tokenizer(of):
    assert of("tokenizer.ggml.model") == "gpt2" and not of("tokenizer.ggml.add_bos_token")
    tokens, kinds = of("tokenizer.ggml.tokens"), of("tokenizer.ggml.token_type")
    assert set(kinds) <= {TokenType.NORMAL, TokenType.CONTROL}
    added = [{"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, kind in enumerate(kinds) if kind == TokenType.CONTROL]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[of("tokenizer.ggml.pre")]},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {token: i for i, token in enumerate(tokens)}, "merges": of("tokenizer.ggml.merges")}}


def tokenizer_config(of):
    tokens = of("tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "clean_up_tokenization_spaces": False,
            "model_max_length": of("llama.context_length"), "chat_template": of("tokenizer.chat_template"),
            **{f"{short}_token": tokens[of(f"tokenizer.ggml.{name}_token_id")] for short, name in names.items()}}


def main(model, out):
    reader, out = GGUFReader(model), pathlib.Path(out)

    def of(key):
        return reader.fields[key].contents()

    assert of("general.architecture") == "llama"
    tensors = weights(reader, of("llama.attention.head_count"), of("llama.attention.head_count_kv"))
    settings = config(of, tied="lm_head.weight" not in tensors)
    generation = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, value, indent in (("config", settings, 2), ("generation_config", generation, 2),
                                ("tokenizer", tokenizer(of), None), ("tokenizer_config", tokenizer_config(of), 2)):
        (out / f"{name}.json").write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
    save_weights(tensors, out / "model.safetensors")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
