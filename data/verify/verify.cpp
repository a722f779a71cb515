#include "data/verify/verify.h"

#include "base/error.h"
#include "base/nearest.h"
#include "base/thread_pool.h"

namespace pare {
namespace {

using Gold = Verifier::Gold;
constexpr Verifier kVerifiers[] = {
    {"exact", Gold::text, true, "", grade_exact},
    {"contains", Gold::text, false, "", grade_contains},
    {"starts_with", Gold::text, false, "", grade_starts_with},
    {"gsm8k-strict", Gold::math, false, "", grade_gsm8k_strict},
    {"gsm8k-flexible", Gold::math, false, "", grade_gsm8k_flexible},
    {"math-string", Gold::math, false, "", grade_math_string, first_equal_math_string},
    {"dapo", Gold::math, false, "", grade_dapo},
    {"countdown", Gold::countdown, false, "Assistant:", grade_countdown},
    {"math-value", Gold::math, false, "", grade_math_value, first_equal_math_value},
};

}  // namespace

const Verifier& find_verifier(const std::string& name) {
  std::vector<std::string> names;
  for (const Verifier& v : kVerifiers) {
    if (name == v.name) return v;
    names.push_back(v.name);
  }
  std::string list;
  for (const std::string& n : names) list += (list.empty() ? "" : ", ") + n;
  fail("verifier \"", name, "\" does not exist; the nearest is ", nearest(name, names), "; there are ", list,
       ", and command:PROGRAM for one of your own");
}

std::vector<Verdict> grade_all(const Verifier& verifier, std::span<const Answered> batch) {
  std::vector<Verdict> verdicts(batch.size());
  parallel_for(static_cast<int64_t>(batch.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Answered& a = batch[static_cast<size_t>(i)];
      verdicts[static_cast<size_t>(i)] = verifier.grade(a.response, a.finished, a.gold);
    }
  });
  return verdicts;
}

}  // namespace pare
