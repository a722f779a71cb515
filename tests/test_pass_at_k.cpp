// Estimators of evaluation against enumeration.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "run/pass_at_k.h"

namespace pare::test {
namespace {

// The mean over all subsets of k of the greatest score.
double enumerated(const std::vector<double>& scores, int k) {
  double sum = 0, count = 0;
  for (unsigned subset = 0; subset < 1u << scores.size(); subset++) {
    if (std::popcount(subset) != k) continue;
    double best = -INFINITY;
    for (size_t i = 0; i < scores.size(); i++)
      if (subset >> i & 1) best = std::max(best, scores[i]);
    sum += best;
    count++;
  }
  return sum / count;
}

TEST(PassAtK, IsTheMeanOverAllSubsets) {
  for (int n = 1; n <= 9; n++)
    for (int c = 0; c <= n; c++) {
      std::vector<double> scores(n, 0.0);
      std::fill(scores.begin(), scores.begin() + c, 1.0);
      for (int k = 1; k <= n; k++) {
        const double expected = enumerated(scores, k);
        EXPECT_NEAR(pass_at_k(n, c, k), expected, 1e-14) << n << ' ' << c << ' ' << k;
        EXPECT_EQ(best_at_k(scores, k), pass_at_k(n, c, k)) << n << ' ' << c << ' ' << k;
      }
    }
}

TEST(PassAtK, Borders) {
  EXPECT_EQ(pass_at_k(8, 0, 8), 0);
  EXPECT_EQ(pass_at_k(8, 1, 8), 1);
  EXPECT_EQ(pass_at_k(8, 8, 1), 1);
  EXPECT_NEAR(pass_at_k(8, 3, 1), 3.0 / 8, 1e-15);
  EXPECT_THROW(pass_at_k(8, 3, 9), std::logic_error);
  EXPECT_THROW(pass_at_k(8, 9, 1), std::logic_error);
  EXPECT_THROW(pass_at_k(8, 3, 0), std::logic_error);
}

// C(100000, 50000) has thirty thousand digits.
TEST(PassAtK, NeedsNoLargeNumbers) {
  EXPECT_NEAR(pass_at_k(100000, 1, 50000), 0.5, 1e-12);
  EXPECT_NEAR(pass_at_k(100000, 2, 50000), 1 - 0.5 * 49999 / 99999, 1e-12);
  EXPECT_NEAR(pass_at_k(100000, 50000, 1), 0.5, 1e-9);
  double all_wrong = 1;
  for (int i = 0; i < 100; i++) all_wrong *= (197.0 - i) / (200.0 - i);  // draws one after another
  EXPECT_NEAR(pass_at_k(200, 3, 100), 1 - all_wrong, 1e-12);
}

TEST(BestAtK, OfScoresOfAnySize) {
  const std::vector<std::vector<double>> cases = {{0.5}, {-1, -1, 2}, {0.25, 0, 1, 0.25, 0.7}, {3, 1, 2, 2, 1, 3, -5}};
  for (const auto& scores : cases)
    for (int k = 1; k <= static_cast<int>(scores.size()); k++)
      EXPECT_NEAR(best_at_k(scores, k), enumerated(scores, k), 1e-14) << scores.size() << ' ' << k;
}

size_t vote(const std::vector<const char*>& answers) {
  std::vector<std::string> seen;
  std::vector<std::optional<size_t>> votes;
  for (const char* a : answers) {
    if (a) seen.push_back(a);
    votes.push_back(a ? std::optional<size_t>(std::find(seen.begin(), seen.end(), a) - seen.begin()) : std::nullopt);
  }
  return majority(votes);
}

TEST(Majority, MostFrequentThenFirst) {
  EXPECT_EQ(vote({"7"}), 0u);
  EXPECT_EQ(vote({"5", "7", "7"}), 1u);
  EXPECT_EQ(vote({"5", "7", "7", "5"}), 0u);  // a tie goes to the one that came first
  EXPECT_EQ(vote({"3", "9", "2", "9", "2", "3", "1"}), 0u);
  EXPECT_EQ(vote({"1", "9", "2", "2", "9"}), 1u);         // in a tie of some
  EXPECT_EQ(vote({nullptr, nullptr, nullptr, "8"}), 3u);  // no answer, no vote
  EXPECT_EQ(vote({nullptr, "4", "8", "8"}), 2u);
  EXPECT_EQ(vote({nullptr, nullptr}), 0u);
  EXPECT_EQ(vote({"", "", "1"}), 0u);  // an empty answer is an answer
  EXPECT_THROW(majority({}), std::logic_error);
}

TEST(Estimate, ErrorOverProblems) {
  // Standard deviation of 1, 2, 3, 4 with n - 1: sqrt(5 / 3); of their mean: half of that.
  const Estimate e = estimate(std::vector<double>{1, 2, 3, 4});
  EXPECT_EQ(e.mean, 2.5);
  EXPECT_NEAR(e.error, std::sqrt(5.0 / 3) / 2, 1e-15);
  EXPECT_NEAR(e.half_width(), 1.96 * std::sqrt(5.0 / 12), 1e-14);
  // Single responses, 30 of 100 right: the binomial error with n - 1.
  std::vector<double> coins(100, 0.0);
  std::fill(coins.begin(), coins.begin() + 30, 1.0);
  EXPECT_NEAR(estimate(coins).error, std::sqrt(0.3 * 0.7 / 99), 1e-15);
  EXPECT_EQ(estimate(std::vector<double>(5, 0.25)).error, 0);
  EXPECT_EQ(estimate(std::vector<double>{0.5}).mean, 0.5);
  EXPECT_TRUE(std::isnan(estimate(std::vector<double>{0.5}).error));
  EXPECT_TRUE(std::isnan(estimate({}).mean));
}

}  // namespace
}  // namespace pare::test
