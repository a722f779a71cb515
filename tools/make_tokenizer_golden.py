#!/usr/bin/env python3
"""Words and ids of the Hugging Face tokenizers library, for tests/test_tokenizer_json.cpp.

    pip install tokenizers==0.23.3
    python3 tools/make_tokenizer_golden.py tests/golden/tokenizers.json
"""
import json
import random
import sys

from tokenizers import Tokenizer

PATTERNS = [{"String": "ab"}, {"String": " "}, {"Regex": r"\p{N}"}, {"Regex": r"\p{N}+"}, {"Regex": r"\p{N}{1,3}"},
            {"Regex": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"}]
BEHAVIORS = ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
SPLIT_TEXTS = ["abab 12345 x٣²ab  ab", "7ab", "é 12ababab34 ½ \U00011de9"]
PARTS = ["a", "b", "ab", "abc", " ", "  ", "\n", "é", "e\u0301", "\u6f22", "\U0001f600", "\u2581", "<s>", "</s>", "<0x41>",
         "x", " a", "1", "23"]


def splits():
    kinds = [{"type": "Digits", "individual_digits": one} for one in (False, True)]
    kinds += [{"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}
              for pattern in PATTERNS for behavior in BEHAVIORS for invert in (False, True)]
    for kind in kinds:
        if "'s|" in str(kind) and kind["behavior"] == "Removed" and not kind["invert"]:
            continue  # removes everything, which pare refuses
        model = {"type": "BPE", "vocab": {}, "merges": []}
        tokenizer = Tokenizer.from_str(json.dumps({"pre_tokenizer": kind, "model": model}))
        yield {"split": kind, "words": [[word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
                                        for text in SPLIT_TEXTS]}


def added(normalized):
    return [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": normalized, "special": True} for i, text in enumerate(["<unk>", "<s>", "</s>"])]


def llama2(normalized):
    """As the files of Llama-2 and TinyLlama, with few merges."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    merges = ["\u2581 a", "a b", "\u2581 \u2581", "\u2581a b", "ab c", "\u2581\u2581 a", "\u00e9 x", "< s", "\u2581 <"]
    tokens += ["\u2581", "a", "b", "c", "x", "<", "s", "\u00e9", "\u6f22"]
    tokens += [merge.replace(" ", "") for merge in merges]
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    unmark = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = [{"Sequence": {"id": which, "type_id": 0}} for which in "AB"]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added(normalized),
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, mark]},
            "pre_tokenizer": None,
            "post_processor": {"type": "TemplateProcessing", "single": [bos, text[0]], "pair": [bos, *text],
                               "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
            "decoder": {"type": "Sequence", "decoders": [unmark, {"type": "ByteFallback"}, {"type": "Fuse"},
                                                         {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                      "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}}


def texts(rng, count):
    return ["".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 9))) for _ in range(count)]


def llama2_rows(rng, count=40):
    """Ids of texts; the added tokens are matched before or after the spaces are marked."""
    for normalized in (False, True):
        tokenizer = Tokenizer.from_str(json.dumps(llama2(normalized)))
        for text in texts(rng, count):
            yield {"text": text, "normalized": normalized, "ids": tokenizer.encode(text).ids}


def main(out):
    golden = {"texts": SPLIT_TEXTS, "splits": list(splits()), "llama2": llama2(False),
              "llama2_rows": list(llama2_rows(random.Random(39)))}
    text = json.dumps(golden, separators=(",", ":"))
    with open(out, "w") as f:
        f.write(text.replace('{"split"', '\n{"split"').replace('{"text"', '\n{"text"') + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
