// UTF-8, and the character classes in tokenizers' word patterns.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace pare {

// One step through bytes that should be UTF-8.
struct Utf8Step {
  enum Kind : uint8_t { character, bad, cut };
  Kind kind;       // bad: not the beginning of a character; cut: a character cut off by the end of the text
  uint8_t length;  // bytes of the character, or of the longest part of one that is there
  char32_t value;  // of a character
};

// `p` < `end`.
inline Utf8Step next_utf8(const char* p, const char* end) {
  const auto at = [&](int i) { return static_cast<uint8_t>(p[i]); };
  const uint8_t lead = at(0);
  if (lead < 0x80) return {Utf8Step::character, 1, lead};
  if (lead < 0xc2 || lead > 0xf4) return {Utf8Step::bad, 1, 0};
  const uint8_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // The second byte has a narrower range where longer forms, surrogates and what lies beyond U+10FFFF would begin.
  const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  char32_t value = lead & (0x7f >> length);
  for (uint8_t i = 1; i < length; i++) {
    if (p + i == end) return {Utf8Step::cut, i, 0};
    if (at(i) < (i == 1 ? low : 0x80) || at(i) > (i == 1 ? high : 0xbf)) return {Utf8Step::bad, i, 0};
    value = value << 6 | (at(i) & 0x3f);
  }
  return {Utf8Step::character, length, value};
}

// Each part that is not UTF-8 becomes one U+FFFD, as Rust's from_utf8_lossy and the WHATWG decoder have it.
std::string lossy_utf8(std::string_view bytes);
// Bytes at the end of the text that begin an incomplete character: 0 to 3.
size_t cut_bytes(std::string_view bytes);

// `newline` is \r or \n, which are white space too.
enum class CharClass : uint8_t { other, letter, number, space, newline };
// Classes of the code points 0 to 0x10FFFF in Unicode 16: \p{L}, \p{N}, \s (White_Space).
const CharClass* char_classes();

// Canonical composition as in the Hugging Face tokenizers library, which has the tables of Unicode 9: marks added later
// neither compose nor reorder.  Bytes that are not UTF-8 stay as they are.
std::string nfc(std::string_view text);
// False only if nfc(text) == text: no character that composition may change or join to another.
bool may_need_nfc(std::string_view text);

}  // namespace pare
