#include <cmath>
#include <set>

#include "base/rng.h"
#include "rl/token_plan.h"
#include "rl_golden.h"

namespace pare {
namespace {

const std::vector<double> four = {1, 2, 3, 4};

// (1 / T) sum of weight * loss: NAT's estimate of the mean loss, over the whole length.
double estimate(const TokenPlan& plan, const std::vector<double>& losses) {
  EXPECT_EQ(static_cast<size_t>(plan.length), plan.weight.size());
  EXPECT_LE(plan.weight.size(), losses.size());
  double sum = 0;
  for (size_t t = 0; t < plan.weight.size(); t++) sum += plan.weight[t] * losses[t];
  return sum / static_cast<double>(losses.size());
}

double mean_loss(const std::vector<double>& losses) {
  return estimate(full_plan(static_cast<int64_t>(losses.size())), losses);
}

std::vector<double> irregular(size_t n) {
  std::vector<double> losses;
  for (size_t t = 0; t < n; t++) losses.push_back(std::sin(3.0 * static_cast<double>(t) + 1) + 0.3);
  return losses;
}

// Over all 2^T masks with their probabilities.
double expected_urs(const std::vector<double>& losses, double p, bool horvitz_thompson, double* variance = nullptr) {
  const size_t n = losses.size();
  double mean = 0, square = 0;
  for (uint32_t bits = 0; bits < (1u << n); bits++) {
    std::vector<bool> mask(n);
    double probability = 1;
    for (size_t t = 0; t < n; t++) {
      mask[t] = bits >> t & 1;
      probability *= mask[t] ? p : 1 - p;
    }
    const double e = estimate(urs_plan(mask, p, horvitz_thompson), losses);
    mean += probability * e;
    square += probability * e * e;
  }
  if (variance) *variance = square - mean * mean;
  return mean;
}

// Over all cutoffs, which are equally likely.
double expected_rpc(const std::vector<double>& losses, int64_t c, bool horvitz_thompson) {
  const auto n = static_cast<int64_t>(losses.size()), first = std::min(c, n);
  double sum = 0;
  for (int64_t cut = first; cut <= n; cut++) sum += estimate(rpc_plan(n, c, cut, horvitz_thompson), losses);
  return sum / static_cast<double>(n - first + 1);
}

// The minima of tests/golden (tools/make_rl_golden.py).
TEST(TokenPlan, GoldenRpc) {
  const auto minima = rl_golden("rpc");
  for (const auto& [c, golden] : minima.items()) {
    const int64_t minimum = std::stoll(c), first = std::min<int64_t>(minimum, 4);
    const auto estimates = golden.at("estimates").get<std::vector<double>>();
    ASSERT_EQ(estimates.size(), static_cast<size_t>(4 - first + 1));
    for (int64_t cut = first; cut <= 4; cut++) {
      const TokenPlan plan = rpc_plan(4, minimum, cut, true);
      EXPECT_EQ(plan.length, cut);
      EXPECT_DOUBLE_EQ(estimate(plan, four), estimates[static_cast<size_t>(cut - first)]);
      for (size_t t = 0; t < plan.weight.size(); t++)
        EXPECT_DOUBLE_EQ(plan.weight[t], 1 / golden.at("p").at(t).get<double>());
    }
    EXPECT_DOUBLE_EQ(expected_rpc(four, minimum, true), 2.5);
  }
}

TEST(TokenPlan, GoldenUrs) {
  double variance;
  EXPECT_DOUBLE_EQ(expected_urs(four, 0.5, true, &variance), rl_golden("urs_half").at("mean").get<double>());
  EXPECT_NEAR(variance, rl_golden("urs_half").at("variance").get<double>(), 1e-13);
}

TEST(TokenPlan, HorvitzThompsonIsUnbiased) {
  for (const size_t n : {1, 2, 5, 9}) {
    const auto losses = irregular(n);
    for (int64_t c = 1; c <= static_cast<int64_t>(n) + 2; c++)
      EXPECT_NEAR(expected_rpc(losses, c, true), mean_loss(losses), 1e-13) << n << " tokens, C = " << c;
    for (const double p : {0.1, 0.5, 0.75, 1.0})
      EXPECT_NEAR(expected_urs(losses, p, true), mean_loss(losses), 1e-13) << n << " tokens, p = " << p;
  }
}

TEST(TokenPlan, WithoutWeightsAndDetAreBiased) {
  const auto losses = irregular(9);
  EXPECT_GT(std::abs(expected_rpc(losses, 2, false) - mean_loss(losses)), 0.01);
  EXPECT_GT(std::abs(expected_urs(losses, 0.5, false) - mean_loss(losses)), 0.01);
  EXPECT_GT(std::abs(estimate(det_plan(9, 0.5), losses) - mean_loss(losses)), 0.01);
  EXPECT_DOUBLE_EQ(estimate(det_plan(4, 0.5), four), 0.75);
}

TEST(TokenPlan, Det) {
  EXPECT_EQ(det_plan(7, 0.5).length, 3);
  EXPECT_EQ(det_plan(1, 0.5).length, 1);
  EXPECT_EQ(det_plan(7, 1).length, 7);
  EXPECT_EQ(det_plan(100, 0.29).length, 29);  // 0.29 * 100 < 29 in double
  EXPECT_EQ(det_plan(3, 1).weight, (std::vector<double>{1, 1, 1}));
}

TEST(TokenPlan, RpcCutoffOutsideItsRangeIsAFault) {
  EXPECT_THROW(rpc_plan(9, 4, 3, true), std::logic_error);
  EXPECT_THROW(rpc_plan(9, 4, 10, true), std::logic_error);
  EXPECT_EQ(rpc_plan(3, 4, 3, true).weight, (std::vector<double>{1, 1, 1}));
}

// ---- draws ---------------------------------------------------------------------------------------------------------

ActorKeys subset(TokenSubset kind) {
  ActorKeys keys;
  keys.token_subset = kind;
  keys.rpc_min_tokens = 5;
  return keys;
}

TEST(TokenPlan, DrawsDependOnKeyAndUidOnly) {
  for (const auto kind : {TokenSubset::urs, TokenSubset::rpc}) {
    const ActorKeys keys = subset(kind);
    const uint64_t key = rng_key(1, RngStream::token_plan, 3), other = rng_key(1, RngStream::token_plan, 4);
    const TokenPlan a = draw_token_plan(keys, 83, key, 11), again = draw_token_plan(keys, 83, key, 11);
    EXPECT_EQ(a.weight, again.weight);
    EXPECT_NE(a.weight, draw_token_plan(keys, 83, key, 12).weight);
    EXPECT_NE(a.weight, draw_token_plan(keys, 83, other, 11).weight);
  }
  // A position keeps its coin however long the response is.
  const TokenPlan longer = draw_token_plan(subset(TokenSubset::urs), 97, 7, 11);
  const TokenPlan shorter = draw_token_plan(subset(TokenSubset::urs), 50, 7, 11);
  EXPECT_TRUE(std::equal(shorter.weight.begin(), shorter.weight.end(), longer.weight.begin()));
}

TEST(TokenPlan, NoneAndDetDrawNothing) {
  EXPECT_EQ(draw_token_plan(subset(TokenSubset::none), 7, 1, 2).weight, std::vector<double>(7, 1.0));
  EXPECT_EQ(draw_token_plan(subset(TokenSubset::det), 7, 1, 2).weight, std::vector<double>(3, 1.0));
  EXPECT_THROW(draw_token_plan(subset(TokenSubset::none), 0, 1, 2), std::logic_error);
}

TEST(TokenPlan, CutoffsAreUniform) {
  const ActorKeys keys = subset(TokenSubset::rpc);
  constexpr int draws = 8000, tokens = 20, cells = tokens - 5 + 1;
  std::vector<int> count(tokens + 1);
  for (int i = 0; i < draws; i++) {
    const TokenPlan plan = draw_token_plan(keys, tokens, 42, mix64(i));
    ASSERT_GE(plan.length, 5);
    ASSERT_LE(plan.length, tokens);
    count[static_cast<size_t>(plan.length)]++;
  }
  double chi2 = 0;
  for (int l = 5; l <= tokens; l++) {
    const double expected = static_cast<double>(draws) / cells;
    chi2 += (count[static_cast<size_t>(l)] - expected) * (count[static_cast<size_t>(l)] - expected) / expected;
  }
  EXPECT_LT(chi2, 37.7);  // 15 degrees of freedom, p = .001
  for (const int64_t n : {1, 4, 5})
    EXPECT_EQ(draw_token_plan(keys, n, 42, 1).weight, std::vector<double>(static_cast<size_t>(n), 1.0));
}

TEST(TokenPlan, CoinsHaveTheirProbability) {
  ActorKeys keys = subset(TokenSubset::urs);
  for (const double p : {0.2, 0.5, 1.0}) {
    keys.urs_probability = p;
    int kept = 0, pairs = 0;
    constexpr int responses = 400, tokens = 50;
    for (int i = 0; i < responses; i++) {
      const TokenPlan plan = draw_token_plan(keys, tokens, 9, mix64(i));
      ASSERT_EQ(plan.length, tokens);
      for (size_t t = 0; t < plan.weight.size(); t++) {
        const bool k = plan.weight[t] != 0;
        EXPECT_DOUBLE_EQ(plan.weight[t], k ? 1 / p : 0);
        kept += k;
        pairs += k && t > 0 && plan.weight[t - 1] != 0;
      }
    }
    constexpr double n = responses * tokens, m = responses * (tokens - 1);
    EXPECT_NEAR(kept / n, p, 4 * std::sqrt(p * (1 - p) / n) + 1e-12);
    EXPECT_NEAR(pairs / m, p * p, 6 * std::sqrt(p * p / m) * (p < 1) + 1e-12);  // neighbours are independent
  }
}

}  // namespace
}  // namespace pare
