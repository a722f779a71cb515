#include "data/verify.h"

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
    {"math-string", Gold::math, false, "", grade_math_string},
    {"dapo", Gold::math, false, "", grade_dapo},
    {"countdown", Gold::countdown, false, "Assistant:", grade_countdown},
    {"math-value", Gold::math, false, "", grade_math_value},
};

}  // namespace

std::string verifier_names() {
  std::string names;
  for (const Verifier& v : kVerifiers) names += cat(names.empty() ? "" : ", ", v.name);
  return names;
}

const Verifier& find_verifier(const std::string& name) {
  const Verifier* nearest = nullptr;
  size_t least = 0;
  for (const Verifier& v : kVerifiers) {
    const size_t distance = edit_distance(name, v.name);
    if (distance == 0) return v;
    if (!nearest || distance < least) nearest = &v, least = distance;
  }
  fail("verifier \"", name, "\" does not exist; the nearest is ", nearest->name, "; there are ", verifier_names());
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
