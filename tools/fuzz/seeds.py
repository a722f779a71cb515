#!/usr/bin/env python3
"""seeds.py TARGET FOLDER: what a fuzz target starts from, out of the strings in tests and sources.

Writes FOLDER/seeds, a file an input, and FOLDER/dictionary, the words that the code itself looks for.
"""
import json, pathlib, re, struct, sys

# Target: files whose strings become inputs, files whose strings become words.
FILES = {
    "bpe": ("tests/test_bpe.cpp tests/test_tokenizer.cpp tests/test_text.cpp", "tests/test_bpe.cpp"),
    "tokenizer_file": ("tests/test_bpe.cpp", "tokenizer/tokenizer_json.cpp tests/tiny_tokenizer.h"),
    "steps": ("tests/test_steps.cpp", "data/verify/*.cpp data/math_value/*.cpp"),
    "verify": ("tests/test_verify.cpp", "data/verify/*.cpp data/math_value/*.cpp"),
    "safetensors": ("tests/test_safetensors.cpp", "model/hf/safetensors.cpp"),
    "toml": ("tests/test_rl_config.cpp data/presets/*.toml", "src/run/config_keys*.cpp src/run/config_table.h"),
}
LITERAL = re.compile(rb'R"\((.*?)\)"|"((?:[^"\\\n]|\\.)*)"', re.S)


def value(match):
    """The bytes of a C++ string literal."""
    if match[1] is not None:
        return match[1]
    text = re.sub(rb"\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})",
                  lambda m: chr(int(m[1] or m[2], 16)).encode("utf-8", "replace"), match[2])
    simple = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"f": b"\f", b"v": b"\v"}
    def escape(m):
        if m[1]:
            return bytes([int(m[1], 16) & 255])
        return bytes([int(m[2], 8) & 255]) if m[2] else simple.get(m[3], m[3])
    return re.sub(rb"\\(?:x([0-9a-fA-F]{1,2})|([0-7]{1,3})|(.))", escape, text)


def literals(text):
    return [value(m) for m in LITERAL.finditer(text)]


def read(patterns):
    files = [sorted(pathlib.Path().glob(pattern)) for pattern in patterns.split()]
    if not all(files):
        sys.exit(f"seeds.py: of {patterns} some name no file")
    return [p.read_bytes() for some in files for p in some]


def vocabulary():
    """A vocab_pieces.json and a tokenizer.bin."""
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", " ", "a", "b", "ab", " ab", "é"]
    rows = [{"id": i, "score": -float(i), "piece": p} for i, p in enumerate(pieces)]
    data = [p.encode() for p in pieces]
    return [json.dumps(rows).encode(),
            struct.pack("<i", 9) + b"".join(struct.pack("<fi", -i, len(p)) + p for i, p in enumerate(data))]


def patches(source):
    """The changes of a tokenizer.json that tests make with("/place", value)."""
    for place, text in re.findall(rb'with\("(/[^"]+)", ("[^"]*"|[\w.-]+)\)', source):
        try:
            change = json.loads(text.replace(b"nullptr", b"null"))
        except ValueError:
            continue
        yield json.dumps([{"op": "add", "path": place.decode(), "value": change}]).encode()


def inputs(target, sources):
    if target == "toml":
        for source in sources:
            yield from [source] if b'#include' not in source else literals(source)
    elif target == "safetensors":
        for text in literals(b"".join(sources)):
            if text.lstrip().startswith(b"{"):
                header = b" " + text
                yield bytes([4]) + header
                yield struct.pack("<Q", len(header)) + header + bytes(4)
    elif target == "verify":
        for line in b"".join(sources).split(b"\n"):
            found = literals(line)
            for text in found:
                yield text + b"\n\\boxed{" + text + b"}"
            for response, gold in zip(found, found[1:]):
                yield gold + b"\n" + response
    elif target == "steps":
        # An input takes a quarter of a second, and `make steps` counts all of these: some, to go on from.
        for text in literals(b"".join(sources))[::8]:
            yield from (b"\n" + text + b"\n", b"\\boxed{\n" + text + b"\n}")
    elif target == "tokenizer_file":
        yield b"[]"
        yield from vocabulary()
        for source in sources:
            yield from patches(source)
    else:
        for source in sources:
            yield from literals(source)


target, folder = sys.argv[1], pathlib.Path(sys.argv[2])
tests, code = FILES[target]
(folder / "seeds").mkdir(parents=True, exist_ok=True)
for i, seed in enumerate(sorted(set(inputs(target, read(tests))))):
    (folder / "seeds" / str(i)).write_bytes(seed)
words = {w for source in read(code) for w in literals(source) if 2 <= len(w) <= 32}
with open(folder / "dictionary", "w") as out:
    for word in sorted(words):
        out.write('"' + "".join(f"\\x{b:02x}" for b in word) + '"\n')
