#include "run/pass_at_k.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "base/error.h"

namespace pare {

double pass_at_k(int64_t n, int64_t c, int64_t k) {
  expect(0 <= c && c <= n && 1 <= k && k <= n, "pass_at_k: n = ", n, ", c = ", c, ", k = ", k);
  if (n - c < k) return 1;
  double all_wrong = 1;  // C(n - c, k) / C(n, k) as a product of c factors, none of them large
  for (int64_t i = n - c + 1; i <= n; i++) all_wrong *= 1 - static_cast<double>(k) / static_cast<double>(i);
  return 1 - all_wrong;
}

double best_at_k(std::span<const double> scores, int64_t k) {
  const auto n = static_cast<int64_t>(scores.size());
  std::vector<double> sorted(scores.begin(), scores.end());
  std::sort(sorted.begin(), sorted.end());
  // The greatest score as a staircase: the lowest, and each step up with the probability that one of k is above it.
  double best = sorted.at(0);
  for (int64_t i = 1; i < n; i++)
    if (sorted[i] > sorted[i - 1]) best += (sorted[i] - sorted[i - 1]) * pass_at_k(n, n - i, k);
  return best;
}

size_t majority(std::span<const std::optional<size_t>> votes) {
  expect(!votes.empty(), "majority: no responses");
  std::map<size_t, int64_t> count;
  for (const auto& v : votes)
    if (v) count[*v]++;
  size_t winner = 0;
  int64_t most = 0;
  for (size_t i = 0; i < votes.size(); i++)
    if (votes[i] && count[*votes[i]] > most) {
      winner = i;
      most = count[*votes[i]];
    }
  return winner;
}

Estimate estimate(std::span<const double> problems) {
  const auto count = static_cast<double>(problems.size());
  double sum = 0, squares = 0;
  for (const double x : problems) sum += x;
  const double mean = sum / count;
  for (const double x : problems) squares += (x - mean) * (x - mean);
  return {mean, std::sqrt(squares / (count * (count - 1)))};  // NaN where there are too few: 0 / 0
}

}  // namespace pare
