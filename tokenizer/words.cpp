#include "tokenizer/words.h"

#include <algorithm>

namespace pare {
namespace {

struct Char {
  CharClass kind;
  uint8_t length;
};

class Scanner {
 public:
  explicit Scanner(const char* end) : end_(end) {}

  Char at(const char* p) const {
    if (static_cast<uint8_t>(*p) < 0x80) return {classes_[static_cast<uint8_t>(*p)], 1};
    const Utf8Step step = next_utf8(p, end_);
    return {step.kind == Utf8Step::character ? classes_[step.value] : CharClass::other, step.length};
  }
  bool is(CharClass kind, const char* p) const { return p < end_ && at(p).kind == kind; }
  // Past at most `most` characters of the class.
  const char* skip(CharClass kind, const char* p, size_t most = SIZE_MAX) const {
    for (; most > 0 && p < end_; most--) {
      const Char c = at(p);
      if (c.kind != kind) break;
      p += c.length;
    }
    return p;
  }

  // 's 't 're 've 'm 'll 'd: bytes after the apostrophe, 0: none.
  size_t contraction(const char* p, bool any_case) const {
    const auto letter = [&](size_t i) {
      if (static_cast<size_t>(end_ - p) <= i) return '\0';
      return any_case && p[i] >= 'A' && p[i] <= 'Z' ? static_cast<char>(p[i] - 'A' + 'a') : p[i];
    };
    switch (letter(0)) {
      case 's':
      case 't':
      case 'm':
      case 'd':
        return 1;
      case 'r':
      case 'v':
        return letter(1) == 'e' ? 2 : 0;
      case 'l':
        return letter(1) == 'l' ? 2 : 0;
      // U+017F, the long s, is the one character beyond ASCII that case folding makes equal to one of these letters.
      case '\xc5':
        return any_case && letter(1) == '\xbf' ? 2 : 0;
      default:
        return 0;
    }
  }

  // A run of white space: `\s*[\r\n]+` if asked for, then `\s+(?!\S)`, then `\s+`.
  const char* blanks(const char* p, bool lines) const {
    const char *start = p, *last = p, *after_newline = nullptr;
    while (p < end_) {
      const Char c = at(p);
      if (c.kind != CharClass::space && c.kind != CharClass::newline) break;
      last = p;
      p += c.length;
      if (c.kind == CharClass::newline) after_newline = p;
    }
    if (lines && after_newline) return after_newline;
    return p == end_ || last == start ? p : last;  // a word that follows gets the last blank
  }

 private:
  const CharClass* classes_ = char_classes();
  const char* end_;
};

const char* gpt2_word(const Scanner& s, const char* p, const char* end) {
  if (*p == '\'')
    if (const size_t n = s.contraction(p + 1, false)) return p + 1 + n;
  const char* q = *p == ' ' && p + 1 < end ? p + 1 : p;  // ` ?`
  const CharClass kind = s.at(q).kind;
  if (kind != CharClass::space && kind != CharClass::newline) return s.skip(kind, q);
  return s.blanks(p, false);
}

const char* qwen_word(const Scanner& s, const char* p, size_t digits) {
  if (*p == '\'')
    if (const size_t n = s.contraction(p + 1, true)) return p + 1 + n;
  const Char c = s.at(p);
  const char* next = p + c.length;
  if (c.kind == CharClass::letter) return s.skip(CharClass::letter, next);
  if (c.kind == CharClass::number) return s.skip(CharClass::number, next, digits - 1);
  if (c.kind != CharClass::newline && s.is(CharClass::letter, next)) return s.skip(CharClass::letter, next);
  const char* marks = *p == ' ' ? next : p;  // ` ?[^\s\p{L}\p{N}]+[\r\n]*`
  if (s.is(CharClass::other, marks)) return s.skip(CharClass::newline, s.skip(CharClass::other, marks));
  return s.blanks(p, true);
}

constexpr std::string_view kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// Numbers of Unicode 17 that char::is_numeric of the Rust in tokenizers 0.23.3 knows, but its regular expressions do
// not know.
bool is_newer_number(char32_t c) { return (c >= 0x11de0 && c <= 0x11de9) || (c >= 0x16ff4 && c <= 0x16ff6); }

// In characters, of a pattern of numbers.
size_t longest_match(WordPattern pattern) {
  if (pattern == WordPattern::number || pattern == WordPattern::digit) return 1;
  return pattern == WordPattern::three ? 3 : SIZE_MAX;
}

// The first match in [p, end), p < end; empty, at `end`: there is none.
std::string_view find_match(const WordSplit& split, const char* p, const char* end) {
  if (matches_everything(split.pattern)) return {p, static_cast<size_t>(word_end(split.pattern, p, end) - p)};
  if (split.pattern == WordPattern::literal) {
    const char* at = std::search(p, end, split.literal.begin(), split.literal.end());
    return {at, at == end ? 0 : split.literal.size()};
  }
  const bool rust = split.pattern == WordPattern::digit || split.pattern == WordPattern::digits;
  const auto is_number = [&](const Utf8Step& c) {
    return char_classes()[c.value] == CharClass::number || (rust && is_newer_number(c.value));
  };
  while (p < end && !is_number(next_utf8(p, end))) p += next_utf8(p, end).length;
  const char* q = p;
  for (size_t most = longest_match(split.pattern); most > 0 && q < end && is_number(next_utf8(q, end)); most--)
    q += next_utf8(q, end).length;
  return {p, static_cast<size_t>(q - p)};
}

struct Part {
  std::string_view text;
  bool match;
};

// Matches and the texts between them, in order.
std::vector<Part> parts_of(const WordSplit& split, std::string_view text) {
  std::vector<Part> parts;
  for (const char *p = text.data(), *end = p + text.size(); p < end;) {
    const std::string_view match = find_match(split, p, end);
    if (match.data() > p) parts.push_back({{p, static_cast<size_t>(match.data() - p)}, split.invert});
    if (!match.empty()) parts.push_back({match, !split.invert});
    p = match.data() + match.size();
  }
  return parts;
}

}  // namespace

std::optional<WordPattern> find_word_pattern(std::string_view regex) {
  if (regex == kGpt2) return WordPattern::gpt2;
  if (regex == kQwen2) return WordPattern::qwen2;
  if (regex == kLlama3) return WordPattern::llama3;
  if (regex == R"(\p{N})") return WordPattern::number;
  if (regex == R"(\p{N}+)") return WordPattern::numbers;
  if (regex == R"(\p{N}{1,3})") return WordPattern::three;
  return std::nullopt;
}

std::vector<std::string_view> split_words(const WordSplit& split, std::string_view text) {
  using enum WordSplit::Behavior;
  std::vector<std::string_view> words;
  bool before = false;  // the part before is a match
  for (const Part& part : parts_of(split, text)) {
    const bool joined = split.behavior == merged_with_previous ? part.match && !before
                        : split.behavior == merged_with_next   ? !part.match && before
                                                               : split.behavior == contiguous && part.match == before;
    before = part.match;
    if (part.match && split.behavior == removed) continue;
    if (joined && !words.empty())
      words.back() = {words.back().data(), words.back().size() + part.text.size()};
    else
      words.push_back(part.text);
  }
  return words;
}

const char* word_end(WordPattern pattern, const char* p, const char* end) {
  const Scanner s(end);
  if (pattern == WordPattern::gpt2) return gpt2_word(s, p, end);
  return qwen_word(s, p, pattern == WordPattern::qwen2 ? 1 : 3);
}

}  // namespace pare
