// Pretokenisation: a text is cut into words by the patterns of its tokenizer before BPE merges within each.  A pattern
// is a regular expression or a text in tokenizer.json; the regular expressions of the known families are scanners here,
// recognised by their exact text.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/unicode.h"

namespace pare {

enum class WordPattern {
  gpt2,     // GPT-2, and ByteLevel with use_regex
  qwen2,    // Qwen2, 2.5, 3 and the DeepSeek distills of them: digits one by one
  llama3,   // Llama-3: digits by threes
  number,   // one \p{N}
  numbers,  // all that stand together
  three,    // up to three
  digit,    // one character of Digits, which has 13 numbers of Unicode 17 beside \p{N}
  digits,   // all that stand together
  literal,  // a text
};

// The pattern whose regular expression this is.
std::optional<WordPattern> find_word_pattern(std::string_view regex);

// Whether matches of the pattern leave nothing between them.
inline bool matches_everything(WordPattern pattern) { return pattern <= WordPattern::llama3; }

// The end of the first word of [p, end), p < end, of a pattern that matches everything.  Bytes that are not UTF-8 count
// as characters that are neither letters, numbers nor white space.  The words of a text are found in time proportional
// to its length.
const char* word_end(WordPattern pattern, const char* p, const char* end);

// A step that cuts texts: Split of the Hugging Face tokenizers library, and Digits.
struct WordSplit {
  // Meaning of each match: a word; no word; the end of the text between it and the match before; the beginning of the
  // text behind it; a word together with the matches around it, as is the text between.
  enum class Behavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };
  WordPattern pattern;
  Behavior behavior = Behavior::isolated;
  bool invert = false;       // matches are the text between, and the reverse
  std::string literal = {};  // not empty for WordPattern::literal
};

// The words of `text`, in order.
std::vector<std::string_view> split_words(const WordSplit& split, std::string_view text);

}  // namespace pare
