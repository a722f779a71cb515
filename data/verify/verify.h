// Verifiers: named rule sets that find the answer in a response and compare it with the gold.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pare {

struct Verdict {
  double score = 0;
  std::string extracted;  // the answer as it stands in the response
  std::string parsed;     // the form of it that was compared; empty where there was nothing to compare
  bool found = false;     // an answer was found where the rule set looks for it
};

struct Verifier {
  // Conversion of a data set's answer before the comparison.
  enum class Gold {
    text,      // left as it is
    math,      // the answer proper: after "####", in the last \boxed{}, an integer without leading zeros
    countdown  // {"target": 24, "numbers": [1, 2, 3, 4]}
  };

  const char* name;
  Gold gold_kind;
  bool accepts_empty_gold;
  // Text prepended to a response for rules that were written for prompt and response together.
  const char* lead;

  // `response` is without EOS; `finished`: it ended with one instead of being cut at a limit.  The same arguments give
  // the same verdict, always: effort is bounded by counts, not by time.  A countdown gold that cannot be read is an
  // Error; no response is.
  Verdict (*grade)(std::string_view response, bool finished, std::string_view gold);

  // Task::first_equal for answers that this rule set extracted; null: the same text.
  std::vector<size_t> (*first_equal)(std::span<const std::string> answers) = nullptr;
};

// exact           the finished text is the gold, white space around both aside
// contains        the gold occurs as whole words, in upper or lower case (ASCII), in the text so far
// starts_with     the text begins with the gold as whole words, in the same case, white space before it aside
// gsm8k-strict    verl's GSM8K score: "#### number"
// gsm8k-flexible  the same, looking for the last number
// math-string     Hendrycks et al.'s comparison of normalised strings, as in verl: \boxed{}
// dapo            DAPO's (Minerva's) comparison after "Answer:"; right 1, wrong -1
// countdown       TinyZero's: an equation in <answer></answer> that makes the target; 1, wrong 0.1, none 0
// math-value      the values are equal (data/math_value/); a response that was cut gets 0
// The first three take words to end where no letter, digit or byte of a non-ASCII character follows.  An unknown name
// is an Error that gives the nearest and lists all.
const Verifier& find_verifier(const std::string& name);

struct Answered {
  std::string_view response;
  bool finished;
  std::string_view gold;
};
// One verdict for each, in order, on all threads; independent of their number.
std::vector<Verdict> grade_all(const Verifier& verifier, std::span<const Answered> batch);

// The rule sets, a file each.
Verdict grade_exact(std::string_view response, bool finished, std::string_view gold);
Verdict grade_contains(std::string_view response, bool finished, std::string_view gold);
Verdict grade_starts_with(std::string_view response, bool finished, std::string_view gold);
Verdict grade_gsm8k_strict(std::string_view response, bool finished, std::string_view gold);
Verdict grade_gsm8k_flexible(std::string_view response, bool finished, std::string_view gold);
Verdict grade_math_string(std::string_view response, bool finished, std::string_view gold);
Verdict grade_dapo(std::string_view response, bool finished, std::string_view gold);
Verdict grade_countdown(std::string_view response, bool finished, std::string_view gold);
Verdict grade_math_value(std::string_view response, bool finished, std::string_view gold);

std::vector<size_t> first_equal_math_string(std::span<const std::string> answers);  // once normalised
std::vector<size_t> first_equal_math_value(std::span<const std::string> answers);   // by value

}  // namespace pare
