// Oversampling: which responses of a group stay, and that the others leave no trace.
#include <cmath>
#include <map>

#include "rl/advantages.h"
#include "rl/filters.h"
#include "rl/oversample.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

using Members = std::vector<size_t>;

const Keys sparse = {"rollout.kv.method=quest",   "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=2",
                     "rollout.kv.blocks.first=0", "rollout.kv.blocks.last=1", "rollout.kv.blocks.dense_layers=0"};

std::map<int32_t, std::vector<Trajectory>> groups(const std::vector<Trajectory>& samples) {
  std::map<int32_t, std::vector<Trajectory>> of;
  for (const Trajectory& s : samples) of[s.group].push_back(s);
  return of;
}
std::vector<double> scores(const std::vector<Trajectory>& group) {
  std::vector<double> all;
  for (const Trajectory& s : group) all.push_back(s.score);
  return all;
}

TEST(Oversample, KeepsTheBestAndOfEqualOnesTheFirst) {
  const double rewards[] = {0, 1, 1, 0, 1, 0};
  EXPECT_EQ(best_members(rewards, 3), (Members{1, 2, 4}));
  EXPECT_EQ(best_members(rewards, 4), (Members{0, 1, 2, 4}));
  EXPECT_EQ(best_members(rewards, 2), (Members{1, 2}));
  for (const int64_t n : {6, 7}) EXPECT_EQ(best_members(rewards, n), (Members{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(best_members(std::vector<double>(5, 0.5), 2), (Members{0, 1}));
  EXPECT_EQ(best_members(std::vector<double>{-3, -1, -2, -0.0, 0.0}, 2), (Members{3, 4}));

  EXPECT_EQ(members_by_score({.keep = 3}, rewards), (Members{1, 2, 4}));
  EXPECT_EQ(members_by_score({.keep = 0}, rewards).size(), 6u);
  EXPECT_EQ(members_by_score({.keep = 3, .by = OversampleBy::acceptance}, rewards).size(), 6u) << "not by score";
}

TEST(Oversample, AllOfThemIsNoOversampling) {
  for (const Keys& method : {Keys{"actor.use_kl_loss=true", "actor.ppo_mini_batch_size=3"}, sparse}) {
    const Keys by = method == sparse ? Keys{"algorithm.oversample.by=acceptance"} : Keys{};
    EXPECT_TRUE(same_bits(trained(tiny_run("qwen3", method), 2),
                          trained(tiny_run("qwen3", method + by + Keys{"algorithm.oversample.keep=5"}), 2)));
  }
}

// The same rollouts with and without: what stays is what best_members says, its advantages are those of the smaller
// group, and all that the learner sees are the rows of the kept.
TEST(Oversample, TheRestLeavesNoTrace) {
  TrainingRun all(tiny_run("qwen3"), early_digit),
      some(tiny_run("qwen3", {"algorithm.oversample.keep=3"}), early_digit);
  const Metrics a = all.step(), b = some.step();
  EXPECT_EQ(a.get("critic/score/mean"), b.get("critic/score/mean"));
  EXPECT_EQ(a.get("tokens/generated"), b.get("tokens/generated"));
  EXPECT_GT(b.get("oversample/kept_score"), b.get("critic/score/mean"));
  const auto before = groups(all.trainer->samples()), after = groups(some.trainer->samples());
  ASSERT_EQ(before.size(), after.size());
  int64_t rows = 0, tokens = 0;
  Summary kept;
  int zero = 0, changed = 0;
  for (const auto& [g, group] : after) {
    std::vector<Trajectory> expected;
    for (const size_t k : best_members(scores(before.at(g)), 3)) expected.push_back(before.at(g)[k]);
    ASSERT_EQ(group.size(), 3u);
    AlgorithmKeys keys;
    const std::vector<double> advantages = group_advantages(keys, scores(expected));
    rows += std::ssize(group[0].prompt);
    for (size_t k = 0; k < 3; k++) {
      EXPECT_EQ(group[k].uid, expected[k].uid);
      EXPECT_EQ(group[k].member, expected[k].member);
      EXPECT_EQ(group[k].advantage, advantages[k]);
      changed += group[k].advantage != expected[k].advantage;
      kept.add(group[k].score);
      tokens += std::ssize(group[k].tokens);
      rows += std::ssize(group[k].tokens) - 1;
    }
    zero += scores(group) == std::vector<double>(3, scores(group)[0]);
  }
  EXPECT_GT(changed, 0);
  EXPECT_EQ(b.get("oversample/kept_score"), kept.mean());
  EXPECT_EQ(b.get("filter/zero_std_fraction"), zero / static_cast<double>(after.size()));
  EXPECT_EQ(b.get("tokens/loss"), static_cast<double>(tokens));
  EXPECT_EQ(b.get("tokens/trained"), static_cast<double>(rows));
}

// A group whose kept scores are equal is replaced, whatever the others' were.
TEST(Oversample, DynamicSamplingLooksAtTheKept) {
  const Keys dapo = {"algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=4",
                     "algorithm.oversample.keep=2"};
  TrainingRun plain(tiny_run("qwen3"), early_digit), run(tiny_run("qwen3", dapo), early_digit);
  plain.step();
  int differ = 0, kept_differ = 0;
  for (const auto& [g, group] : groups(plain.trainer->samples())) {
    std::vector<double> kept;
    for (const size_t k : best_members(scores(group), 2)) kept.push_back(group[k].score);
    differ += group_is_informative(scores(group));
    kept_differ += group_is_informative(kept);
  }
  EXPECT_GT(differ, kept_differ) << "the test's rewards make no difference";
  const Metrics m = run.step();
  EXPECT_GT(m.get("rollout/gen_batches"), 1);
  EXPECT_GT(run.trainer->samples().size(), 0u);
  for (const auto& [g, group] : groups(run.trainer->samples())) {
    EXPECT_EQ(group.size(), 2u);
    EXPECT_TRUE(group_is_informative(scores(group)));
  }
}

TEST(Oversample, ByAcceptanceTheClosestToTheLearnerStay) {
  const Keys keep = {"algorithm.oversample.keep=2", "algorithm.oversample.by=acceptance"};
  const Keys corrected = sparse + Keys{"algorithm.rollout_correction.rollout_is=tis"};
  TrainingRun all(tiny_run("qwen3", corrected)), some(tiny_run("qwen3", corrected + keep));
  all.step();
  const Metrics m = some.step();
  const auto before = groups(all.trainer->samples()), after = groups(some.trainer->samples());
  ASSERT_EQ(before.size(), after.size());
  int not_first = 0;
  for (const auto& [g, group] : after) {
    std::vector<double> acceptance;
    for (const Trajectory& s : before.at(g)) {
      double sum = 0;
      for (size_t t = 0; t < s.tokens.size(); t++)
        sum += std::min(1.0, std::exp(static_cast<double>(s.old_logprob->at(t) - s.logprob[t])));
      acceptance.push_back(sum / static_cast<double>(s.tokens.size()));
    }
    ASSERT_EQ(group.size(), 2u);
    const Members expected = best_members(acceptance, 2);
    for (size_t k = 0; k < 2; k++) EXPECT_EQ(group[k].member, static_cast<int32_t>(expected[k]));
    not_first += expected != Members{0, 1};
  }
  EXPECT_GT(not_first, 0);
  EXPECT_EQ(m.get("rollout_corr/judged_fraction"), 1);
  EXPECT_GT(m.get("actor/grad_norm"), 0);
}

}  // namespace
}  // namespace pare::test
