// The verifiers, every rule set: the first line is the gold, the rest a response.
#include "data/verify/verify.h"

#include <vector>

#include "base/thread_pool.h"
#include "data/math_value/extract.h"
#include "data/text.h"
#include "tools/fuzz/fuzz.h"

namespace pare::fuzz {
namespace {

struct Case {
  const Verifier* verifier;
  Answered answered;
  Verdict verdict;
};

Verdict grade(const Case& c) { return c.verifier->grade(c.answered.response, c.answered.finished, c.answered.gold); }

bool equal(const Verdict& a, const Verdict& b) {
  return a.score == b.score && a.extracted == b.extracted && a.parsed == b.parsed && a.found == b.found;
}

void check_verdict(const Case& c) {
  const Verdict& v = c.verdict;
  const bool dapo = c.verifier->grade == grade_dapo, countdown = c.verifier->grade == grade_countdown;
  const bool known = v.score == 0 || v.score == 1 || (v.score == -1 && dapo) || (v.score == 0.1 && countdown);
  check(known, c.verifier->name, ": the score ", v.score);
  // (DAPO compares what it does not find too, as "[INVALID]".)
  check(v.found || v.score <= 0 || dapo, c.verifier->name, ": a score without an answer");
}

void verify(std::string_view gold, const std::string& response) {
  std::vector<Case> cases;
  const auto add = [&](const char* mode, const std::string& text, std::string_view right) {
    for (const bool finished : {true, false}) {
      Case c{&find_verifier(mode), {text, finished, right}, {}};
      c.verdict = grade(c);
      check_verdict(c);
      cases.push_back(std::move(c));
    }
  };
  for (const char* mode :
       {"exact", "contains", "starts_with", "gsm8k-strict", "gsm8k-flexible", "math-string", "dapo", "math-value"})
    add(mode, response, gold);
  const std::string to_countdown = find_verifier("countdown").lead + response;
  add("countdown", to_countdown, R"({"target": 15, "numbers": [3, 5, 7]})");
  accepted([&] { add("countdown", to_countdown, gold); });
  parallel_for(static_cast<int64_t>(cases.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Case& c = cases[static_cast<size_t>(i)];
      check(equal(c.verdict, grade(c)), c.verifier->name, ": another verdict the second time, on another thread");
    }
  });
}

// An answer is right where it is the gold itself.
void verify_itself(const std::string& gold) {
  const std::string response = "\\boxed{" + gold + "}";
  const auto found = math_value::extract(response);
  const bool same = found && !trim(*found).empty() && *found == math_value::boxed_gold(gold);
  check(!same || grade_math_value(response, true, gold).score == 1, "a gold is not itself");
}

}  // namespace
}  // namespace pare::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pare;
  [[maybe_unused]] static const bool once = [] {
    set_threads(2);
    return true;
  }();
  const std::string_view text = fuzz::text_of(data, size);
  const size_t line = text.find('\n');
  const std::string gold(text.substr(0, line));
  fuzz::verify(gold, line == text.npos ? "" : std::string(text.substr(line + 1)));
  fuzz::verify_itself(gold);
  return 0;
}
