#include "data/text.h"

namespace pare {

namespace {

bool continues(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

}  // namespace

size_t character_size(std::string_view s, size_t at) {
  const auto lead = static_cast<unsigned char>(s[at]);
  const size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
  size_t n = 1;
  while (n < size && at + n < s.size() && continues(s[at + n])) n++;
  return n;
}

size_t character_count(std::string_view s) {
  size_t n = 0;
  for (size_t at = 0; at < s.size(); at += character_size(s, at)) n++;
  return n;
}

std::string_view last_characters(std::string_view s, size_t n) {
  // A character has at most 4 bytes, so the beginning of a long text does not matter; start where a character does.
  if (s.size() > 4 * n + 4) {
    size_t cut = s.size() - 4 * n - 4;
    for (int i = 0; i < 3 && continues(s[cut]); i++) cut++;
    s.remove_prefix(cut);
  }
  const size_t all = character_count(s);
  size_t at = 0;
  for (size_t skip = all > n ? all - n : 0; skip > 0; skip--) at += character_size(s, at);
  return s.substr(at);
}

size_t space_size(std::string_view s, size_t at) {
  const auto c = static_cast<unsigned char>(s[at]);
  if (c == ' ' || (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x1f)) return 1;
  const size_t size = character_size(s, at);
  if (size != 2 && size != 3) return 0;
  const auto next = static_cast<unsigned char>(s[at + 1]);
  if (size == 2) return c == 0xc2 && (next == 0x85 || next == 0xa0) ? 2 : 0;
  const int code = (c & 0x0f) << 12 | (next & 0x3f) << 6 | (static_cast<unsigned char>(s[at + 2]) & 0x3f);
  const bool space = code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
                     code == 0x202f || code == 0x205f || code == 0x3000;
  return space ? 3 : 0;
}

std::string_view trim(std::string_view s) {
  size_t begin = 0, end = 0;
  while (begin < s.size() && space_size(s, begin)) begin += space_size(s, begin);
  for (size_t at = begin; at < s.size();) {
    const size_t space = space_size(s, at);
    at += space ? space : character_size(s, at);
    if (!space) end = at;
  }
  return begin < end ? s.substr(begin, end - begin) : std::string_view{};
}

std::string replace_all(std::string_view s, std::string_view from, std::string_view to) {
  std::string result;
  for (size_t at = 0;;) {
    const size_t hit = s.find(from, at);
    result += s.substr(at, hit - at);
    if (hit == std::string_view::npos) return result;
    result += to;
    at = hit + from.size();
  }
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

std::string lower(std::string_view s) {
  std::string result(s);
  for (char& c : result) c = lower(c);
  return result;
}

bool is_integer(std::string_view s) {
  if (!s.empty() && s[0] == '-') s.remove_prefix(1);
  if (s.empty()) return false;
  for (const char c : s)
    if (!is_digit(c)) return false;
  return true;
}

std::string without_leading_zeros(std::string_view integer) {
  const bool negative = integer[0] == '-';
  if (negative) integer.remove_prefix(1);
  while (integer.size() > 1 && integer[0] == '0') integer.remove_prefix(1);
  return std::string(negative ? "-" : "").append(integer);
}

bool last_braced(std::string_view s, std::string_view command, std::string_view& content) {
  const size_t at = s.rfind(std::string(command) + "{");
  if (at == std::string_view::npos) return false;
  const size_t open = at + command.size();
  int depth = 0;
  for (size_t i = open; i < s.size(); i++) {
    depth += s[i] == '{';
    depth -= s[i] == '}';
    if (depth == 0) {
      content = s.substr(open + 1, i - open - 1);
      return true;
    }
  }
  return false;
}

}  // namespace pare
