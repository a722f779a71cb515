// Estimates from n responses to a problem: pass@k, the best of k, the majority, and their standard errors.
#pragma once
#include <cstdint>
#include <optional>
#include <span>

namespace pare {

// The unbiased estimate of pass@k from n responses of which c are right: 1 - C(n - c, k) / C(n, k), the probability
// that k of them drawn without replacement include a right one (Chen et al. 2021, "Evaluating large language models
// trained on code", eq. 1).  0 <= c <= n, 1 <= k <= n.
double pass_at_k(int64_t n, int64_t c, int64_t k);

// The same for scores of any size: the mean of the greatest score over all subsets of k.  Of scores 0 and 1 it is
// pass_at_k.  1 <= k <= scores.size().
double best_at_k(std::span<const double> scores, int64_t k);

// The response that speaks for the majority: the first one with the answer that occurs most often.  A vote is the
// number of an answer, equal for equal answers.  Of answers that occur equally often the one that came first wins.
// Responses without an answer have no vote; if none has one, the result is 0.  Needs at least one response.
size_t majority(std::span<const std::optional<size_t>> votes);

// The mean over problems and its standard error.  A problem's value is made of all its responses: they are one cluster,
// however many there are, so that what they have in common is not counted as certainty.
struct Estimate {
  double mean;   // NaN without problems
  double error;  // sqrt(sum (x - mean)^2 / (P (P - 1))) of P problems; NaN for fewer than two, 0 where all agree
  double half_width() const { return 1.96 * error; }  // of the 95 % interval of a normal distribution
};
Estimate estimate(std::span<const double> problems);

}  // namespace pare
