#include "rl/rewards.h"
#include "rl_golden.h"

namespace pare {
namespace {

TEST(Overlong, Golden) {
  for (const auto& row : rl_golden("overlong")) {
    const OverlongKeys keys{true, row.at("buffer"), row.at("factor")};
    EXPECT_DOUBLE_EQ(overlong_penalty(row.at("length"), row.at("limit"), keys), row.at("penalty").get<double>()) << row;
  }
}

TEST(Overlong, BufferAsLongAsTheLimit) {
  const OverlongKeys keys{true, 7, 1};
  EXPECT_EQ(overlong_penalty(0, 7, keys), 0);
  EXPECT_DOUBLE_EQ(overlong_penalty(1, 7, keys), -1. / 7);
  EXPECT_EQ(overlong_penalty(7, 7, keys), -1);
}

TEST(KlInReward, GoldenPerTokenWithClampedInput) {
  for (const auto& row : rl_golden("kl")) {
    const float lp[] = {-1.5f}, ref[] = {-1.5f + row.at("ref_minus_logprob").get<float>()};
    EXPECT_NEAR(kl_in_reward(KlLoss::k1, lp, ref), row.at("k1").get<double>(), 1e-12) << row;
    EXPECT_NEAR(kl_in_reward(KlLoss::k2, lp, ref), row.at("k2").get<double>(), 1e-12) << row;
    const double k3 = row.at("k3");
    EXPECT_NEAR(kl_in_reward(KlLoss::k3, lp, ref), k3, 1e-12 * std::max(1.0, k3)) << row;
  }
}

TEST(KlInReward, SumsOverTokens) {
  const float lp[] = {-1, -2, -3}, ref[] = {-1.5f, -2, -2.5f};
  EXPECT_DOUBLE_EQ(kl_in_reward(KlLoss::k1, lp, ref), 0);
  EXPECT_DOUBLE_EQ(kl_in_reward(KlLoss::k2, lp, ref), .25);
  EXPECT_EQ(kl_in_reward(KlLoss::k1, {}, {}), 0);
  EXPECT_THROW(kl_in_reward(KlLoss::k1, lp, {}), std::logic_error);
  EXPECT_THROW(kl_in_reward(KlLoss::exact, lp, ref), std::logic_error);
}

TEST(ShapeRewards, OffLeavesTheScore) {
  std::vector<Trajectory> batch = {trajectory(0, 512, 0.3), trajectory(0, 0, 1)};
  batch[0].overlong = batch[0].kl_penalty = batch[0].reward = 99;
  shape_rewards({}, {}, 512, batch);
  EXPECT_EQ(batch[0].reward, 0.3);
  EXPECT_EQ(batch[0].overlong, 0);
  EXPECT_EQ(batch[0].kl_penalty, 0);
  EXPECT_EQ(batch[1].reward, 1);
}

TEST(ShapeRewards, OverlongAndKl) {
  AlgorithmKeys keys;
  keys.use_kl_in_reward = true;
  keys.kl_penalty = KlLoss::k1;
  keys.kl_ctrl.kl_coef = 0.25;
  std::vector<Trajectory> batch = {trajectory(0, 9, 1), trajectory(0, 5, 0)};
  batch[0].old_logprob = batch[0].logprob;
  batch[0].ref_logprob.emplace(9, -1.5f);  // k1 = .5 a token
  batch[1].old_logprob.emplace(5, -0.5f);
  batch[1].ref_logprob.emplace(5, -1.f);  // it is not the sampler's that counts
  shape_rewards({.overlong_buffer = {true, 4, 0.5}}, keys, 10, batch);
  EXPECT_DOUBLE_EQ(batch[0].overlong, -0.375);
  EXPECT_DOUBLE_EQ(batch[0].kl_penalty, 4.5);
  EXPECT_DOUBLE_EQ(batch[0].reward, 1 - 0.375 - 0.25 * 4.5);
  EXPECT_EQ(batch[1].overlong, 0);
  EXPECT_DOUBLE_EQ(batch[1].reward, -0.25 * 2.5);
  EXPECT_EQ(batch[1].score, 0);
}

// RPO eq. 11; what is not right is paid nothing for its length.
TEST(LengthReward, Golden) {
  LengthRewardKeys keys{.enable = true, .alpha = 0.01};
  const int64_t lengths[] = {100, 200, 300};
  const auto rewards = [&](std::vector<double> scores) { return length_rewards(keys, scores, lengths); };
  const std::vector<double> right = rewards({1, 1, 1});
  EXPECT_NEAR(right[0], 0.731059, 1e-6);
  EXPECT_EQ(right[1], 0.5);
  EXPECT_EQ(right[2], 0.5);
  EXPECT_EQ(rewards({0, 0, -1}), (std::vector<double>{0, 0, -1}));
  EXPECT_NEAR(rewards({1, 0, 0})[0], 0.731059, 1e-6);  // the mean is that of all
  EXPECT_EQ(rewards({0, 3, 0})[1], 1);                 // 3 sigmoid(0), clipped
  keys.reference = LengthReference::correct;
  EXPECT_EQ(rewards({1, 0, 0})[0], 0.5);
  EXPECT_NEAR(rewards({1, 1, 0})[0], 1 / (1 + std::exp(-0.5)), 1e-12);
  EXPECT_EQ(rewards({0, 0, 0}), (std::vector<double>{0, 0, 0}));
  keys = {.enable = true, .alpha = 0};
  EXPECT_EQ(rewards({1, 1, 1}), (std::vector<double>{0.5, 0.5, 0.5}));
}

// Equal rewards stay equal to the bit, whatever the scores were: they must leave no advantage.  The length is that of
// the whole response.
TEST(ShapeRewards, LengthOfTheWholeResponse) {
  std::vector<Trajectory> batch = {trajectory(0, 30, 0.7), trajectory(1, 5, 1), trajectory(0, 30, 0.3)};
  batch[1].prefix.assign(6, 3);
  batch[2].prefix.assign(40, 3);
  const RewardKeys keys{.overlong_buffer = {true, 4, 1}, .length_reward = {.enable = true, .alpha = 0.01}};
  shape_rewards(keys, {}, 72, batch);
  EXPECT_EQ(batch[0].reward, 0.5);
  EXPECT_DOUBLE_EQ(batch[0].length_reward, -0.2);
  EXPECT_EQ(batch[1].reward, 0.5);
  EXPECT_EQ(batch[1].overlong, 0);
  EXPECT_EQ(batch[2].overlong, -0.5);  // 70 tokens, of which 68 are free
  EXPECT_EQ(batch[2].reward, 0.5 - 0.5);
  shape_rewards({.length_reward = keys.length_reward}, {}, 72, batch);
  EXPECT_EQ(batch[0].reward, batch[2].reward);
}

}  // namespace
}  // namespace pare
