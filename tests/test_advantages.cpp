#include <algorithm>
#include <cmath>

#include "rl/advantages.h"
#include "rl/filters.h"
#include "rl_golden.h"

namespace pare {
namespace {

std::vector<double> advantages(const AlgorithmKeys& keys, const std::vector<double>& rewards) {
  return group_advantages(keys, rewards);
}

AlgorithmKeys estimator(const std::string& name) {
  AlgorithmKeys keys;
  if (name == "rloo") keys.adv_estimator = AdvEstimator::rloo;
  if (name == "grpo_none") keys.norm_adv_by_std_in_grpo = false;
  if (name.find("population") != std::string::npos) keys.adv_std = AdvStd::population;
  if (name.ends_with("1e-4")) keys.adv_eps = 1e-4;
  return keys;
}

TEST(Advantages, Golden) {
  const auto golden = rl_golden("advantages");
  for (const auto& [group, cases] : golden.items()) {
    const auto rewards = cases.at("rewards").get<std::vector<double>>();
    for (const auto& [name, expected] : cases.items()) {
      if (name == "rewards") continue;
      const auto a = advantages(estimator(name), rewards);
      for (size_t i = 0; i < rewards.size(); i++)
        EXPECT_NEAR(a[i], expected.at(i).get<double>(), 1e-13) << group << ", " << name << ", member " << i;
    }
  }
}

// G = 4, one success.
TEST(Advantages, OneOfFour) {
  const std::vector<double> r = {0, 1, 0, 0};
  EXPECT_EQ(advantages(estimator("grpo_none"), r), (std::vector<double>{-.25, .75, -.25, -.25}));
  const auto sample = advantages(estimator("grpo_sample_1e-4"), r);
  EXPECT_NEAR(sample[1], 1.4997, 5e-5);
  EXPECT_NEAR(sample[0], -.4999, 5e-5);
  const auto population = advantages(estimator("grpo_population_1e-4"), r);
  EXPECT_NEAR(population[1], 1.73165, 5e-6);
  EXPECT_NEAR(population[0], -.57722, 5e-6);
}

// The mean of equal numbers is not always that number, and a tiny deviation divided by eps is not tiny.
TEST(Advantages, ExactlyZeroWithoutVariance) {
  AlgorithmKeys keys;
  keys.adv_eps = 1e-300;
  int inexact = 0;
  for (const double value : {0.1, 0.2, 0.3, 0.7, -1.0 / 3, 1e-300}) {
    for (size_t n = 1; n <= 16; n++) {
      const std::vector<double> r(n, value);
      double sum = 0;
      for (const double x : r) sum += x;
      inexact += sum / static_cast<double>(n) != value;
      for (const auto e : {AdvEstimator::grpo, AdvEstimator::rloo}) {
        keys.adv_estimator = e;
        for (const double a : advantages(keys, r)) EXPECT_EQ(a, 0) << value << " x " << n;
      }
    }
  }
  EXPECT_GT(inexact, 0) << "no case would have shown the fault";
}

// All answers right, but of different lengths: a shaped reward is a signal.  Scores that differ under equal rewards are
// none.
TEST(Advantages, OnlyTheShapedRewardCounts) {
  std::vector<Trajectory> batch;
  for (const auto& [score, reward] : {std::pair{1., 1.}, {1., .5}, {1., .9}, {1., 1.}}) {
    batch.push_back(trajectory(0, 1, score));
    batch.back().reward = reward;
  }
  for (const double score : {0., 1., .5}) {
    batch.push_back(trajectory(1, 1, score));
    batch.back().reward = 0.1;  // the mean of three is not 0.1 in double
  }
  AlgorithmKeys keys;
  keys.adv_eps = 1e-300;
  set_advantages(keys, batch);
  const std::vector<double> expected = group_advantages(keys, std::vector<double>{1, .5, .9, 1});
  for (size_t i = 0; i < 4; i++) EXPECT_EQ(batch[i].advantage, expected[i]) << i;
  EXPECT_GT(expected[0], 0);
  EXPECT_LT(expected[1], 0);
  for (size_t i = 4; i < 7; i++) EXPECT_EQ(batch[i].advantage, 0) << i;
}

TEST(Advantages, SingletonAndEmptyGroups) {
  for (const auto e : {AdvEstimator::grpo, AdvEstimator::rloo}) {
    AlgorithmKeys keys;
    keys.adv_estimator = e;
    EXPECT_EQ(advantages(keys, {1}), std::vector<double>{0});
    EXPECT_TRUE(advantages(keys, {}).empty());
  }
}

TEST(Advantages, RewardsThatAreNotFiniteAreRefused) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    try {
      advantages({}, {0, bad, 1});
      ADD_FAILURE() << bad << " went through";
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::non_finite);
      EXPECT_NE(std::string(e.what()).find("member 1"), std::string::npos) << e.what();
    }
  }
}

TEST(Advantages, MembersOfAGroupMayLieAnywhere) {
  std::vector<Trajectory> batch = {trajectory(7, 1, 1), trajectory(2, 1, 0), trajectory(7, 1, 0),
                                   trajectory(2, 1, 1), trajectory(2, 1, 0), trajectory(0, 1, 1)};
  AlgorithmKeys keys;
  keys.norm_adv_by_std_in_grpo = false;
  set_advantages(keys, batch);
  const double expected[] = {.5, -1. / 3, -.5, 2. / 3, -1. / 3, 0};
  for (size_t i = 0; i < batch.size(); i++) EXPECT_DOUBLE_EQ(batch[i].advantage, expected[i]) << i;
}

// ---- filters -------------------------------------------------------------------------------------------------------

// Rows kept of one group of 0/1 rewards.
int64_t kept(int n, int successes, double threshold, bool norm_by_std) {
  std::vector<Trajectory> group;
  for (int i = 0; i < n; i++) group.push_back(trajectory(0, 1, i < successes));
  AlgorithmKeys keys;
  keys.norm_adv_by_std_in_grpo = norm_by_std;
  set_advantages(keys, group);
  drop_small_advantages(threshold, group);
  const auto dropped = std::count_if(group.begin(), group.end(), [](const auto& t) { return t.dropped(); });
  return n - dropped;
}

TEST(AdvantageFilter, UpToNineMembersOnlyGroupsWithoutVarianceGo) {
  for (int n = 1; n <= 9; n++)
    for (int s = 0; s <= n; s++) EXPECT_EQ(kept(n, s, 0.1, false), s == 0 || s == n ? 0 : n) << s << " of " << n;
}

// |A| = 1 / G at the threshold stays ("drop below"), on both sides, although 1 - 0.9 < 0.1 in double.
TEST(AdvantageFilter, TheThresholdItselfStays) {
  EXPECT_EQ(kept(10, 1, 0.1, false), 10);
  EXPECT_EQ(kept(10, 9, 0.1, false), 10);
  EXPECT_EQ(kept(11, 1, 0.1, false), 1);
  EXPECT_EQ(kept(16, 1, 0.1, false), 1);
  EXPECT_EQ(kept(16, 15, 0.1, false), 1);
  EXPECT_EQ(kept(16, 1, 0.1, true), 16);  // divided by the standard deviation |A| is at least 1 / sqrt(G)
}

TEST(AdvantageFilter, ZeroIsOff) {
  EXPECT_EQ(kept(8, 8, 0, false), 8);
  EXPECT_EQ(kept(8, 8, 1e-12, false), 0);
}

TEST(DynamicSampling, GroupsNeedTwoDifferentScores) {
  using V = std::vector<double>;
  EXPECT_FALSE(group_is_informative(V{}));
  EXPECT_FALSE(group_is_informative(V{1}));
  EXPECT_FALSE(group_is_informative(V(7, 0.1)));
  EXPECT_TRUE(group_is_informative(V{0, 0, 1}));
  EXPECT_TRUE(group_is_informative(V{0.1, 0.1 + 1e-16, 0.1}));
}

// A deviation below the floor is divided by the floor; one above it as ever, to the bit.
TEST(Advantages, StdFloor) {
  AlgorithmKeys keys;
  keys.adv_eps = 0;
  const std::vector<double> close = {0.5, 0.5, 0.5, 0.501}, far = {0, 1, 0, 0};
  const auto before = group_advantages(keys, far);
  EXPECT_NEAR(group_advantages(keys, close)[3], 1.5, 1e-9);
  keys.adv_std_floor = 0.1;
  EXPECT_NEAR(group_advantages(keys, close)[3], 0.0075, 1e-12);
  EXPECT_EQ(group_advantages(keys, far), before);
}

}  // namespace
}  // namespace pare
