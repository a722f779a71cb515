#include "rl/aggregate.h"
#include "rl/schedule.h"
#include "rl_golden.h"

namespace pare {
namespace {

const std::vector<std::pair<const char*, LossAgg>> modes = {
    {"token-mean", LossAgg::token_mean},
    {"seq-mean-token-mean", LossAgg::seq_mean_token_mean},
    {"group-token-mean", LossAgg::group_token_mean},
    {"seq-mean-token-sum", LossAgg::seq_mean_token_sum},
    {"seq-mean-token-sum-norm", LossAgg::seq_mean_token_sum_norm},
};

double loss(const std::vector<double>& factors, const std::vector<std::vector<double>>& losses) {
  double sum = 0;
  for (size_t i = 0; i < losses.size(); i++)
    for (const double l : losses[i]) sum += factors[i] * l;
  return sum;
}

std::vector<Trajectory> batch_of(const std::vector<int>& groups, const std::vector<std::vector<double>>& losses) {
  std::vector<Trajectory> batch;
  for (size_t i = 0; i < losses.size(); i++) batch.push_back(trajectory(groups[i], losses[i].size()));
  return batch;
}

TEST(Aggregate, Golden) {
  for (const auto& c : rl_golden("aggregation")) {
    const auto losses = c.at("losses").get<std::vector<std::vector<double>>>();
    const auto batch = batch_of(c.at("groups").get<std::vector<int>>(), losses);
    const int64_t horizon = c.at("horizon");
    for (const auto& [name, mode] : modes) {
      ActorKeys keys;
      keys.loss_agg_mode = mode;
      EXPECT_NEAR(loss(token_factors(keys, horizon, batch), losses), c.at(name).get<double>(), 1e-13) << name;
      keys.loss_scale_factor = horizon;  // given: wins over the response limit
      EXPECT_NEAR(loss(token_factors(keys, 1, batch), losses), c.at(name).get<double>(), 1e-13) << name;
    }
  }
}

// Lengths 2 and 6, token losses 1 and 4, the second sequence dropped.
TEST(Aggregate, DenominatorAfterDropping) {
  const std::vector<std::vector<double>> losses = {{1, 1}, {4, 4, 4, 4, 4, 4}};
  auto batch = batch_of({0, 1}, losses);
  batch[1].filtered = true;
  const auto value = [&](LossAgg mode, LossDenominator denominator) {
    ActorKeys keys;
    keys.loss_agg_mode = mode;
    keys.loss_denominator = denominator;
    return loss(token_factors(keys, 10, batch), losses);
  };
  using enum LossAgg;
  using enum LossDenominator;
  EXPECT_DOUBLE_EQ(value(seq_mean_token_mean, valid), .5);
  EXPECT_DOUBLE_EQ(value(seq_mean_token_mean, kept), 1);
  EXPECT_DOUBLE_EQ(value(token_mean, valid), .25);
  EXPECT_DOUBLE_EQ(value(token_mean, kept), 1);
  EXPECT_DOUBLE_EQ(value(group_token_mean, valid), .5);
  EXPECT_DOUBLE_EQ(value(group_token_mean, kept), 1);
  EXPECT_DOUBLE_EQ(value(seq_mean_token_sum, valid), 1);
  EXPECT_DOUBLE_EQ(value(seq_mean_token_sum, kept), 2);
  EXPECT_DOUBLE_EQ(value(seq_mean_token_sum_norm, valid), .1);
  EXPECT_DOUBLE_EQ(value(seq_mean_token_sum_norm, kept), .2);
}

TEST(Aggregate, ValidFactorsOfTheKeptDoNotDependOnTheFilter) {
  auto batch = batch_of({0, 0, 1, 1}, {{1, 1, 1}, {1}, {1, 1}, {1, 1, 1, 1, 1}});
  for (const auto& [name, mode] : modes) {
    ActorKeys keys;
    keys.loss_agg_mode = mode;
    for (auto& t : batch) t.filtered = false;
    const auto before = token_factors(keys, 9, batch);
    batch[0].filtered = batch[3].filtered = true;
    const auto after = token_factors(keys, 9, batch);
    EXPECT_EQ(after, (std::vector<double>{0, before[1], before[2], 0})) << name;
  }
}

TEST(Aggregate, EmptyResponsesDoNotCount) {
  const auto with = batch_of({0, 0, 1, 2}, {{1, 2, 3}, {}, {5}, {}}), without = batch_of({0, 1}, {{1, 2, 3}, {5}});
  for (const auto& [name, mode] : modes) {
    ActorKeys keys;
    keys.loss_agg_mode = mode;
    const auto f = token_factors(keys, 9, with), g = token_factors(keys, 9, without);
    EXPECT_EQ(f, (std::vector<double>{g[0], 0, g[1], 0})) << name;
  }
}

TEST(Aggregate, NothingLeft) {
  auto batch = batch_of({0, 0}, {{1, 1}, {1}});
  for (auto& t : batch) t.filtered = true;
  for (const auto& [name, mode] : modes) {
    for (const auto denominator : {LossDenominator::valid, LossDenominator::kept}) {
      ActorKeys keys;
      keys.loss_agg_mode = mode;
      keys.loss_denominator = denominator;
      EXPECT_EQ(token_factors(keys, 9, batch), (std::vector<double>{0, 0})) << name;
      EXPECT_TRUE(token_factors(keys, 9, {}).empty());
    }
  }
}

// ---- learning rate -------------------------------------------------------------------------------------------------

TEST(Schedule, WarmUpThenConstant) {
  OptimKeys keys;
  keys.lr = 1;
  EXPECT_EQ(learning_rate(keys, 1, 10), 1);
  keys.lr_warmup_steps = 4;
  const double expected[] = {.25, .5, .75, 1, 1, 1};
  for (int s = 1; s <= 6; s++) EXPECT_DOUBLE_EQ(learning_rate(keys, s, 6), expected[s - 1]) << s;
  EXPECT_DOUBLE_EQ(learning_rate(keys, 2, 2), .5);  // a run shorter than its warm-up
}

TEST(Schedule, LinearOverTheEnd) {
  OptimKeys keys;
  keys.lr = 2;
  keys.lr_warmup_steps = 2;
  keys.lr_scheduler_type = LrSchedule::linear;
  keys.min_lr_ratio = 0.1;
  keys.decay_fraction = 0.4;
  EXPECT_DOUBLE_EQ(learning_rate(keys, 1, 10), 1);
  for (int s = 2; s <= 6; s++) EXPECT_DOUBLE_EQ(learning_rate(keys, s, 10), 2) << s;
  EXPECT_DOUBLE_EQ(learning_rate(keys, 8, 10), 2 * 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(keys, 10, 10), 0.2);
  keys.decay_fraction = 1;  // from the warm-up on
  EXPECT_DOUBLE_EQ(learning_rate(keys, 6, 10), 2 * 0.55);
}

TEST(Schedule, Cosine) {
  OptimKeys keys;
  keys.lr = 1;
  keys.lr_scheduler_type = LrSchedule::cosine;
  keys.min_lr_ratio = 0.2;
  EXPECT_NEAR(learning_rate(keys, 3, 12), 0.2 + 0.8 * 0.5 * (1 + std::sqrt(0.5)), 1e-12);
  EXPECT_NEAR(learning_rate(keys, 6, 12), 0.6, 1e-12);
  EXPECT_NEAR(learning_rate(keys, 12, 12), 0.2, 1e-12);
  EXPECT_THROW(learning_rate(keys, 13, 12), std::logic_error);
  EXPECT_THROW(learning_rate(keys, 0, 12), std::logic_error);
}

}  // namespace
}  // namespace pare
