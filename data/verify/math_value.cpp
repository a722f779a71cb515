// math-value: the value of the final answer is the value of the gold (data/math_value/).
//
// Rationals and decimals are compared exactly, so 0.333 is not 1/3; roots, pi, logarithms and expressions of variables
// at fixed points with 256 bits.  10% is 1/10.  Only a finished response has a final answer.
#include <mpfr.h>

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

}  // namespace

Verdict grade_math_value(std::string_view response, bool finished, std::string_view gold) {
  static thread_local ConstantCache cache;
  (void)cache;
  if (!finished) return {};
  const std::optional<std::string> answer = math_value::extract(response);
  if (!answer) return {};
  const bool right = math_value::same_text(math_value::boxed_gold(gold), *answer);
  return {right ? 1.0 : 0.0, *answer, math_value::describe(math_value::read_answer(*answer)), true};
}

}  // namespace pare
