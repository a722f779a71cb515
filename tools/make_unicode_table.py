#!/usr/bin/env python3
"""Writes tokenizer/unicode_table.h: which code points are letters, numbers and white space in Unicode 16.

    pip install unicodedata2==16.0.0
    python3 tools/make_unicode_table.py > tokenizer/unicode_table.h
"""
import sys
import unicodedata

VERSION = "16.0.0"
if unicodedata.unidata_version != VERSION:
    import unicodedata2 as unicodedata
assert unicodedata.unidata_version == VERSION, unicodedata.unidata_version

# The property White_Space, which has not changed since Unicode 6.3 and is no general category.
SPACE = {*range(0x9, 0xE), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


def ranges(holds):
    found = []
    for c in filter(holds, range(0x110000)):
        if found and found[-1][1] == c - 1:
            found[-1][1] = c
        else:
            found.append([c, c])
    return found


def category(first_letter):
    return lambda c: unicodedata.category(chr(c))[0] == first_letter


out = ["// Code points of Unicode " + VERSION + " in ranges, first and last.  Generated:",
       "//   pip install unicodedata2==" + VERSION,
       "//   python3 tools/make_unicode_table.py > tokenizer/unicode_table.h",
       "// clang-format off", "#pragma once", "#include <cstdint>", "", "namespace pare::unicode {", "",
       "struct Range {", "  uint32_t first, last;", "};"]
for name, comment, holds in [("kLetters", "general categories L*", category("L")),
                             ("kNumbers", "general categories N*", category("N")),
                             ("kSpace", "White_Space", SPACE.__contains__)]:
    out += ["", f"inline constexpr Range {name}[] = {{  // {comment}"]
    line = "   "
    for first, last in ranges(holds):
        item = f" {{0x{first:X}, 0x{last:X}}},"
        if len(line) + len(item) > 120:
            out.append(line)
            line = "   "
        line += item
    out += [line, "};"]
sys.stdout.write("\n".join(out + ["", "}  // namespace pare::unicode"]) + "\n")
