#include "tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "base/error.h"
#include "tokenizer/nfc_table.h"

namespace pare {

std::string lossy_utf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (const char *p = bytes.data(), *end = p + bytes.size(); p < end;) {
    const Utf8Step step = next_utf8(p, end);
    step.kind == Utf8Step::character ? text.append(p, step.length) : text.append("\uFFFD");
    p += step.length;
  }
  return text;
}

size_t cut_bytes(std::string_view bytes) {
  const char* end = bytes.data() + bytes.size();
  for (size_t n = 1; n <= std::min<size_t>(3, bytes.size()); n++) {
    const auto byte = static_cast<uint8_t>(end[-static_cast<std::ptrdiff_t>(n)]);
    if (byte < 0x80) return 0;
    if (byte < 0xc0) continue;  // inside a character
    const Utf8Step step = next_utf8(end - n, end);
    return step.kind == Utf8Step::cut && step.length == n ? n : 0;
  }
  return 0;
}

const CharClass* char_classes() {
  static const std::vector<CharClass> classes = [] {
    std::vector<CharClass> all(0x110000, CharClass::other);
    const auto fill = [&](const auto& ranges, CharClass c) {
      for (const unicode::Range& r : ranges) std::fill(all.begin() + r.first, all.begin() + r.last + 1, c);
    };
    fill(unicode::kLetters, CharClass::letter);
    fill(unicode::kNumbers, CharClass::number);
    fill(unicode::kSpace, CharClass::space);
    all['\r'] = all['\n'] = CharClass::newline;
    return all;
  }();
  return classes.data();
}

namespace {

template <size_t n>
std::vector<bool> members(const unicode::Range (&ranges)[n]) {
  std::vector<bool> all(0x110000, false);
  for (const unicode::Range& r : ranges) std::fill(all.begin() + r.first, all.begin() + r.last + 1, true);
  return all;
}

// utf8proc's own pass over the order of marks is quadratic in the length of a run of them; this one sorts.
void append_composed(std::vector<utf8proc_int32_t>& decomposed, std::string& result) {
  const auto order = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
  for (auto run = decomposed.begin(); run != decomposed.end(); run++) {
    const auto begin = run;
    while (run != decomposed.end() && order(*run) != 0) run++;
    std::stable_sort(begin, run, [&](auto a, auto b) { return order(a) < order(b); });
    if (run == decomposed.end()) break;
  }
  const utf8proc_ssize_t length = utf8proc_normalize_utf32(
      decomposed.data(), std::ssize(decomposed), static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  expect(length >= 0, "utf8proc: ", utf8proc_errmsg(length));
  for (utf8proc_ssize_t i = 0; i < length; i++) {
    utf8proc_uint8_t bytes[4];
    const utf8proc_ssize_t n = utf8proc_encode_char(decomposed[static_cast<size_t>(i)], bytes);
    result.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(n));
  }
  decomposed.clear();
}

}  // namespace

bool may_need_nfc(std::string_view text) {
  static const std::vector<bool> composing = members(unicode::kComposing);
  for (const char *p = text.data(), *end = p + text.size(); p < end;) {
    const Utf8Step step = next_utf8(p, end);
    if (step.kind == Utf8Step::character && composing[step.value]) return true;
    p += step.length;
  }
  return false;
}

std::string nfc(std::string_view text) {
  static const std::vector<bool> newer = members(unicode::kNewer);
  std::string result;
  std::vector<utf8proc_int32_t> part;
  for (const char *p = text.data(), *end = p + text.size(); p < end;) {
    const Utf8Step step = next_utf8(p, end);
    if (step.kind == Utf8Step::character && !newer[step.value]) {
      utf8proc_int32_t parts[32];
      const utf8proc_ssize_t n =
          utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.value), parts, std::ssize(parts),
                                  static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE), nullptr);
      expect(n > 0 && n <= std::ssize(parts), "utf8proc: ", utf8proc_errmsg(n));
      part.insert(part.end(), parts, parts + n);
    } else {
      append_composed(part, result);
      result.append(p, step.length);
    }
    p += step.length;
  }
  append_composed(part, result);
  return result;
}

}  // namespace pare
