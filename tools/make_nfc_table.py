#!/usr/bin/env python3
"""Writes tokenizer/nfc_table.h: which code points take part in composition (NFC) in the Hugging Face tokenizers library,
and which ones in Unicode 18 but not there; with `golden` tests/golden/nfc.txt: what the library makes of all code points.

The library has the tables of Unicode 9 (its crate unicode-normalization-alignments), so it is asked itself.

    pip install tokenizers==0.23.3 unicodedata2==18.0.0
    python3 tools/make_nfc_table.py > tokenizer/nfc_table.h
    python3 tools/make_nfc_table.py golden > tests/golden/nfc.txt
"""
import sys

import tokenizers
import unicodedata2 as unicodedata

assert unicodedata.unidata_version == "18.0.0", unicodedata.unidata_version
nfc = tokenizers.normalizers.NFC().normalize_str
LAST, BLOCK = 0x110000, 0x1000


def characters(first=0, last=LAST):
    return [chr(c) for c in range(first, last) if not 0xD800 <= c < 0xE000]


def ranges(code_points):
    found = []
    for c in sorted(code_points):
        if found and found[-1][1] == c - 1:
            found[-1][1] = c
        else:
            found.append([c, c])
    return found


def table():
    known, composing, newer = set(), set(), set()
    composing |= {chr(c) for c in [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]}  # Hangul vowels, final consonants
    for c in characters():
        if nfc(c) != c:
            composing.add(c)
        order = unicodedata.combining(c)
        if order:  # known: changes places with a mark of another class
            text = "e\u0345" + c if order < 240 else "e" + c + "\u0334"
            (newer if nfc(text) == text else composing).add(c)
        parts = unicodedata.decomposition(c).split()
        if not parts or "<" in parts[0] or "\uac00" <= c <= "\ud7a3":  # none, of compatibility, Hangul
            continue
        parts = [chr(int(p, 16)) for p in parts]
        if len(parts) == 2 and nfc("".join(parts)) == c:
            known |= {c, *parts}
            composing.add(parts[1])
        else:
            newer |= {c, *parts}
    # Nor what decompositions that are excluded from composition are made of.
    known |= {p for c in composing for p in unicodedata.normalize("NFD", c)}
    newer -= known | composing
    out = ["// Code points in ranges, first and last, of which composition (NFC) in the Hugging Face tokenizers library",
           "// " + tokenizers.__version__ + " takes account, and those that Unicode 18 gives a part in it and the library"
           " does not.  Generated:",
           "//   pip install tokenizers==" + tokenizers.__version__ + " unicodedata2==18.0.0",
           "//   python3 tools/make_nfc_table.py > tokenizer/nfc_table.h",
           "// clang-format off", "#pragma once", '#include "tokenizer/unicode_table.h"', "", "namespace pare::unicode {"]
    for name, comment, found in [
            ("kComposing", "not both NFC_Quick_Check=Yes and Canonical_Combining_Class=0", composing),
            ("kNewer", "of a later version: in the library they stay, and nothing passes them", newer)]:
        out += ["", f"inline constexpr Range {name}[] = {{  // {comment}"]
        line = "   "
        for first, last in ranges(map(ord, found)):
            item = f" {{0x{first:X}, 0x{last:X}}},"
            if len(line) + len(item) > 120:
                out.append(line)
                line = "   "
            line += item
        out += [line, "};"]
    return "\n".join(out + ["", "}  // namespace pare::unicode"])


def golden():
    """For each 4096 code points FNV-1a of what becomes of them alone and beside marks."""
    for first in range(0, LAST, BLOCK):
        text = "".join(f"{c}\ne\u0345{c}\u0334\n{c}\u0301\u0323\n\U00011935{c}\n" for c in characters(first, first + BLOCK))
        value = 0xCBF29CE484222325
        for byte in nfc(text).encode():
            value = (value ^ byte) * 0x100000001B3 % 2**64
        yield f"{value:016x}"


print("\n".join(golden()) if sys.argv[1:] == ["golden"] else table())
