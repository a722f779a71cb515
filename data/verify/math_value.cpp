// math-value: the value of the final answer is the value of the gold (data/math_value/).
//
// Rationals and decimals are compared exactly, so 0.333 is not 1/3; roots, pi, logarithms and expressions of variables
// at fixed points with 256 bits.  10% is 1/10.  Only a finished response has a final answer.
#include <mpfr.h>

#include <algorithm>
#include <map>

#include "data/math_value/answer.h"
#include "data/math_value/extract.h"
#include "data/text.h"
#include "data/verify/verify.h"

namespace pare {
namespace {

// MPFR keeps constants per thread; they go with the thread.
struct ConstantCache {
  ~ConstantCache() { mpfr_free_cache(); }
};

thread_local ConstantCache cache;

}  // namespace

Verdict grade_math_value(std::string_view response, bool finished, std::string_view gold) {
  (void)cache;
  if (!finished) return {};
  const std::optional<std::string> answer = math_value::extract(response);
  if (!answer) return {};
  const bool right = math_value::same_text(math_value::boxed_gold(gold), *answer);
  return {right ? 1.0 : 0.0, *answer, math_value::describe(math_value::read_answer(*answer)), true};
}

// Equality is not transitive (5 is 5 cm and 5 m), so an answer joins the first of the answers that stand for others.
std::vector<size_t> first_equal_math_value(std::span<const std::string> answers) {
  (void)cache;
  std::map<std::string_view, size_t> seen;
  std::vector<std::pair<size_t, math_value::Answer>> stand;
  std::vector<size_t> first;
  for (size_t i = 0; i < answers.size(); i++) {
    const auto [text, is_new] = seen.emplace(answers[i], i);
    if (is_new) {
      math_value::Answer a = math_value::read_answer(answers[i]);
      const auto other = std::find_if(stand.begin(), stand.end(), [&](const auto& s) {
        return math_value::same(s.second, a) || math_value::same(a, s.second);
      });
      if (other != stand.end())
        text->second = other->first;
      else
        stand.emplace_back(i, std::move(a));
    }
    first.push_back(text->second);
  }
  return first;
}

}  // namespace pare
