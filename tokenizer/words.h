// Pretokenisation: a text is cut into words by the pattern of its tokenizer before byte-level BPE merges within
// each.  A pattern is a regular expression in tokenizer.json; those of the known families are scanners here, recognised
// by their exact text.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

#include "tokenizer/unicode.h"

namespace pare {

enum class WordPattern {
  gpt2,    // GPT-2, and ByteLevel with use_regex
  qwen2,   // Qwen2, 2.5, 3 and the DeepSeek distills of them: digits one by one
  llama3,  // Llama-3: digits by threes
};

// The pattern whose regular expression this is.
std::optional<WordPattern> find_word_pattern(std::string_view regex);

// The end of the first word of [p, end), p < end.  Bytes that are not UTF-8 count as characters that are neither
// letters, numbers nor white space.  The words of a text are found in time proportional to its length.
const char* word_end(WordPattern pattern, const char* p, const char* end);

}  // namespace pare
