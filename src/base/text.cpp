#include "base/text.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "base/error.h"

namespace pare {

std::string format(const char* pattern, ...) {
  va_list args, again;
  va_start(args, pattern);
  va_copy(again, args);
  std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, pattern, args)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(args);
  va_end(again);
  return text;
}

std::string number_text(double x) { return cat(std::isnan(x) ? std::abs(x) : x); }

std::string human(double count) {
  const char* unit[] = {"", "k", "M", "G", "T", "P", "E"};
  int i = 0;
  while (std::abs(count) >= 999.5 && i < 6) {
    count /= 1000;
    i++;
  }
  return i == 0 ? format("%.0f", count)
                : format(std::abs(count) < 9.995   ? "%.2f%s"
                         : std::abs(count) < 99.95 ? "%.1f%s"
                                                   : "%.0f%s",
                         count, unit[i]);
}

std::string duration(double seconds) {
  if (seconds < 60) return format("%.1f s", seconds);
  const auto s = static_cast<long long>(seconds + 0.5);
  if (s < 3600) return format("%lld min %02lld s", s / 60, s % 60);
  return format("%lld h %02lld min", s / 3600, s % 3600 / 60);
}

std::string clock(double seconds) {
  const auto s = static_cast<long long>(seconds + 0.5);
  if (s < 3600) return format("%lld:%02lld", s / 60, s % 60);
  return format("%lld:%02lld:%02lld", s / 3600, s % 3600 / 60, s % 60);
}

namespace {

struct Character {
  size_t bytes;   // 1 where this is not UTF-8
  uint32_t code;  // U+FFFD there
  bool valid;
};

// The character that begins at text[at]; no surrogates or overlong forms (RFC 3629).
Character character(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const uint32_t first = byte(at);
  const size_t length = first < 0x80   ? 1
                        : first < 0xC2 ? 0
                        : first < 0xE0 ? 2
                        : first < 0xF0 ? 3
                        : first < 0xF5 ? 4
                                       : 0;
  uint32_t code = length <= 1 ? first : first & (0xFFu >> (length + 1));
  for (size_t i = 1; i < length; i++) {
    if ((byte(at + i) & 0xC0) != 0x80) return {1, 0xFFFD, false};
    code = code << 6 | (byte(at + i) & 0x3F);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  if (length == 0 || overlong || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return {1, 0xFFFD, false};
  return {length, code, true};
}

struct Range {
  uint32_t first, last;
};
bool among(uint32_t code, std::initializer_list<Range> ranges) {
  return std::any_of(ranges.begin(), ranges.end(), [&](Range r) { return code >= r.first && code <= r.last; });
}

size_t columns(uint32_t code) {
  // Combining marks, zero-width spaces and joiners, variation selectors.
  if (among(code, {{0x300, 0x36F}, {0x200B, 0x200F}, {0x20D0, 0x20F0}, {0xFE00, 0xFE0F}, {0xFE20, 0xFE2F}})) return 0;
  // Unicode Standard Annex 11, east-asian-width W and F, in blocks.
  if (among(code, {{0x1100, 0x115F},
                   {0x2E80, 0x303E},
                   {0x3041, 0xA4CF},
                   {0xA960, 0xA97C},
                   {0xAC00, 0xD7A3},
                   {0xF900, 0xFAFF},
                   {0xFE30, 0xFE6F},
                   {0xFF00, 0xFF60},
                   {0xFFE0, 0xFFE6},
                   {0x1F300, 0x1F64F},
                   {0x1F680, 0x1F6FF},
                   {0x1F900, 0x1F9FF},
                   {0x20000, 0x3FFFD}}))
    return 2;
  return 1;
}

// Bytes of the longest beginning of at most `width` columns, and of the longest end.
size_t head_bytes(const std::string& text, size_t width) {
  size_t at = 0, used = 0;
  while (at < text.size()) {
    const Character c = character(text, at);
    if (used + columns(c.code) > width) break;
    used += columns(c.code);
    at += c.bytes;
  }
  return at;
}
size_t tail_bytes(const std::string& text, size_t width) {
  size_t at = 0, left = display_width(text);
  while (left > width) {
    const Character c = character(text, at);
    left -= columns(c.code);
    at += c.bytes;
  }
  while (at < text.size() && columns(character(text, at).code) == 0) at += character(text, at).bytes;  // of a lost base
  return text.size() - at;
}

}  // namespace

size_t utf8_bytes(const std::string& text) {
  size_t at = 0;
  for (; at < text.size(); at += character(text, at).bytes)
    if (!character(text, at).valid) break;
  return at;
}

size_t display_width(const std::string& text) {
  size_t width = 0;
  for (size_t at = 0; at < text.size();) {
    const Character c = character(text, at);
    width += columns(c.code);
    at += c.bytes;
  }
  return width;
}

static std::string escaped(const std::string& text, bool lines) {
  std::string s;
  for (size_t at = 0; at < text.size();) {
    const Character c = character(text, at);
    if (lines && (c.code == '\n' || c.code == '\t'))
      s += text[at];
    else if (!c.valid)
      s += format("\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(text[at])));
    else if (c.code == '\n' || c.code == '\t' || c.code == '\r')
      s += c.code == '\n' ? "\\n" : c.code == '\t' ? "\\t" : "\\r";
    else if (c.code < 0x20 || c.code == 0x7F)
      s += format("\\x%02x", c.code);
    else if (among(c.code, {{0x80, 0x9F}, {0x200E, 0x200F}, {0x2028, 0x202E}, {0x2066, 0x2069}}))
      s += format("\\u{%x}", c.code);
    else
      s += text.substr(at, c.bytes);
    at += c.bytes;
  }
  return s;
}

std::string printable(const std::string& text) { return escaped(text, false); }
std::string printable_lines(const std::string& text) { return escaped(text, true); }

std::string shortened(const std::string& text, size_t width) {
  if (display_width(text) <= width) return text;
  const size_t kept = width - 3, head = kept - kept / 2;
  return text.substr(0, head_bytes(text, head)) + " … " + text.substr(text.size() - tail_bytes(text, kept / 2));
}

std::string cut(const std::string& text, size_t width) { return text.substr(0, head_bytes(text, width)); }

std::string pad_left(const std::string& text, size_t width) {
  return std::string(width - std::min(width, display_width(text)), ' ') + text;
}
std::string pad_right(const std::string& text, size_t width) {
  return text + std::string(width - std::min(width, display_width(text)), ' ');
}

std::string wrapped(const std::string& text, size_t width, const std::string& indent) {
  std::string s, line;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (!line.empty() && display_width(indent + line) + 1 + display_width(word) > width) {
      s += indent + line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
    begin = end + 1;
  }
  return line.empty() ? s : s + indent + line + "\n";
}

TextTable::TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {
  for (Column& c : columns_) c.width = std::max(c.width, display_width(c.title));
}

std::string TextTable::header() const {
  std::vector<std::string> titles;
  for (const Column& c : columns_) titles.push_back(c.title);
  return row(titles);
}

std::string TextTable::row(const std::vector<std::string>& cells) const {
  expect(cells.size() == columns_.size(), "a row of ", cells.size(), " cells for ", columns_.size(), " columns");
  std::string line;
  for (size_t i = 0; i < cells.size(); i++) line += (i ? " " : "") + pad_left(cells[i], columns_[i].width);
  return line;
}

}  // namespace pare
