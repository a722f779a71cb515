// exact, contains, starts_with: rewards that compare text.
#include "data/text.h"

#include "data/verify/verify.h"

namespace pare {
namespace {

bool in_word(char c) { return is_letter(c) || is_digit(c) || static_cast<unsigned char>(c) >= 0x80; }

// No word goes on across the border between text[at - 1] and text[at].
bool word_border(std::string_view text, size_t at) {
  return at == 0 || at == text.size() || !in_word(text[at - 1]) || !in_word(text[at]);
}

bool contains(std::string_view answer, std::string_view text) {
  const std::string word = lower(answer), all = lower(text);
  for (size_t at = all.find(word); at != std::string::npos; at = all.find(word, at + 1)) {
    if (word_border(all, at) && word_border(all, at + word.size())) return true;
  }
  return false;
}

Verdict verdict(std::string_view text, bool found, bool holds) {
  return {found && holds ? 1.0 : 0.0, std::string(text), found ? std::string(text) : "", found};
}

}  // namespace

// A response that was cut at its limit is not what the model meant to say.
Verdict grade_exact(std::string_view response, bool finished, std::string_view gold) {
  const std::string_view text = trim(response);
  return verdict(text, finished, text == trim(gold));
}

Verdict grade_contains(std::string_view response, bool, std::string_view gold) {
  const std::string_view text = trim(response);
  return verdict(text, true, contains(trim(gold), text));
}

Verdict grade_starts_with(std::string_view response, bool, std::string_view gold) {
  const std::string_view text = trim(response), word = trim(gold);
  return verdict(text, true, text.substr(0, word.size()) == word && word_border(text, word.size()));
}

}  // namespace pare
