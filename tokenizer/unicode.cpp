#include "tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "base/error.h"
#include "tokenizer/unicode_table.h"

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

bool may_need_nfc(std::string_view text) {
  static const std::vector<bool> composing = [] {
    std::vector<bool> all(0x110000, false);
    for (const unicode::Range& r : unicode::kComposing)
      for (uint32_t c = r.first; c <= r.last; c++) all[c] = true;
    return all;
  }();
  for (const char *p = text.data(), *end = p + text.size(); p < end;) {
    const Utf8Step step = next_utf8(p, end);
    if (step.kind == Utf8Step::character && composing[step.value]) return true;
    p += step.length;
  }
  return false;
}

std::string nfc(std::string_view text) {
  std::string result;
  const char *p = text.data(), *end = p + text.size();
  while (p < end) {
    const char* valid = p;
    Utf8Step step{};
    while (p < end && (step = next_utf8(p, end)).kind == Utf8Step::character) p += step.length;
    if (p > valid) {
      utf8proc_uint8_t* composed = nullptr;
      const utf8proc_ssize_t length =
          utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(valid), p - valid, &composed,
                       static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
      if (length == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
      expect(length >= 0, "utf8proc: ", utf8proc_errmsg(length));
      const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(composed, std::free);
      result.append(reinterpret_cast<const char*>(composed), static_cast<size_t>(length));
    }
    if (p < end) result.append(p, step.length), p += step.length;
  }
  return result;
}

}  // namespace pare
