// gsm8k-strict and gsm8k-flexible: verl's verl/utils/reward_score/gsm8k.py.
//
// Only the last 300 characters are looked at.  A number is -?[0-9.,]+, as long as it goes.  strict: the last one after
// "#### ", without its commas.  flexible: the last one that is not a lone full stop, commas and all ("42." is not 42).
// The score is 1 where number and gold are the same characters.
#include <algorithm>

#include "data/text.h"
#include "data/verify/verify.h"

namespace pare {
namespace {

constexpr size_t kCharacters = 300;

// Where the number at `at` ends; `at` itself: there is none.
size_t number_end(std::string_view s, size_t at) {
  size_t end = at;
  if (end < s.size() && s[end] == '-') end++;
  const size_t first = end;
  while (end < s.size() && (is_digit(s[end]) || s[end] == '.' || s[end] == ',')) end++;
  return end > first ? end : at;
}

Verdict verdict(std::string extracted, std::string_view gold) {
  return {extracted == gold ? 1.0 : 0.0, extracted, extracted, true};
}

}  // namespace

Verdict grade_gsm8k_strict(std::string_view response, bool, std::string_view gold) {
  const std::string_view s = last_characters(response, kCharacters), mark = "#### ";
  for (size_t at = s.rfind(mark); at != std::string_view::npos; at = at == 0 ? at - 1 : s.rfind(mark, at - 1)) {
    const size_t begin = at + mark.size(), end = number_end(s, begin);
    if (end > begin) return verdict(replace_all(s.substr(begin, end - begin), ",", ""), gold);
  }
  return {};
}

Verdict grade_gsm8k_flexible(std::string_view response, bool, std::string_view gold) {
  const std::string_view s = last_characters(response, kCharacters);
  std::string_view last, first;
  for (size_t at = 0; at < s.size();) {
    const size_t end = number_end(s, at);
    const std::string_view number = s.substr(at, end - at);
    if (first.empty()) first = number;
    if (!number.empty() && number != ".") last = number;
    at = std::max(end, at + 1);
  }
  if (last.empty()) last = first;  // full stops only
  return last.empty() ? Verdict{} : verdict(std::string(last), gold);
}

}  // namespace pare
