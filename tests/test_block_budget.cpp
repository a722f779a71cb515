// Budgets that follow the acceptance rate.
#include "rl/block_budget.h"
#include "rl/mismatch.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

using Steps = std::vector<BlockBudget::Step>;

KvSpec quest(double target) {
  KvSpec kv;
  kv.method = KvMethod::quest;
  kv.blocks.size = 16;
  kv.blocks.first = 1;
  kv.blocks.last = 2;
  kv.blocks.count = 6;
  kv.blocks.acceptance_target = target;
  return kv;
}
std::vector<int64_t> blocks(const BlockBudget& budget) {
  std::vector<int64_t> all;
  for (const auto& step : budget.steps()) all.push_back(step.blocks);
  return all;
}

TEST(BlockBudget, StartsFromTheCountBinByBin) {
  const BlockBudget budget = budget_by_context(quest(0.86), 700);
  // Bins from 0, 64, 128, 256 and 512 tokens; of 64 tokens there are 4 blocks, and no more can be read there.
  EXPECT_EQ(budget.steps(), (Steps{{0, 4}, {5, 6}, {9, 6}, {17, 6}, {33, 6}}));
  EXPECT_EQ(budget_by_context(quest(0.86), 63).steps(), (Steps{{0, 4}}));
  for (int64_t bin = 0; bin < 8; bin++) {
    EXPECT_EQ(context_bin(first_context(bin)), static_cast<size_t>(bin));
    EXPECT_EQ(context_bin(first_context(bin + 1) - 1), static_cast<size_t>(bin));
  }
  EXPECT_EQ(context_name(3), "context_256_511");
}

TEST(BlockBudget, MovesBinByBin) {
  const KvSpec kv = quest(0.86);
  const BlockBudget start(Steps{{0, 4}, {5, 6}, {9, 7}, {17, 11}, {33, 40}});
  const auto rates = [](int64_t tokens, float low) {  // of which 5 % are low
    std::vector<float> all(tokens, 1.0f);
    std::fill_n(all.begin(), (tokens + 19) / 20, low);
    return all;
  };
  const auto next = [&](const std::vector<std::vector<float>>& acceptance) {
    return blocks(adapted_budget(kv, start, acceptance));
  };
  const std::vector<int64_t> same = blocks(start);
  EXPECT_EQ(next({}), same);
  EXPECT_EQ(next({rates(199, 0), rates(199, 0), {}}), same) << "too few tokens";
  EXPECT_EQ(next({rates(200, 0.85f), rates(200, 0.87f), rates(300, 0.841f), rates(200, 0.879f)}), same) << "near";
  // 1.25 times, rounded up, and at most what there is.
  EXPECT_EQ(next({rates(200, 0.8f), rates(200, 0.8f), rates(200, 0), rates(200, 0.1f), rates(200, 0.5f)}),
            (std::vector<int64_t>{4, 8, 9, 14, 50}));
  EXPECT_EQ(next({{}, {}, {}, rates(200, 0.83f)}), (std::vector<int64_t>{4, 6, 7, 14, 40}));
  // A 1.1th, rounded down, and at least first + last.
  EXPECT_EQ(next({rates(200, 0.9f), rates(200, 0.9f), rates(200, 0.9f), rates(200, 0.9f), rates(200, 1)}),
            (std::vector<int64_t>{3, 5, 6, 10, 36}));
  // A longer context never has less than a shorter one: it is lifted with it, and falls only with it.
  EXPECT_EQ(next({{}, {}, rates(200, 0.9f)}), (std::vector<int64_t>{4, 6, 6, 11, 40}));
  EXPECT_EQ(blocks(adapted_budget(kv, BlockBudget(Steps{{0, 4}, {5, 8}, {9, 8}}),
                                  std::vector{rates(1, 1), rates(1, 1), rates(200, 1)})),
            (std::vector<int64_t>{4, 8, 8}));
  EXPECT_EQ(blocks(adapted_budget(kv, BlockBudget(Steps{{0, 4}, {5, 8}, {9, 8}}),
                                  std::vector{rates(1, 1), rates(200, 1), rates(200, 1)})),
            (std::vector<int64_t>{4, 7, 7}));
  EXPECT_EQ(
      blocks(adapted_budget(kv, BlockBudget(Steps{{0, 4}, {5, 7}, {9, 7}}), std::vector{rates(1, 1), rates(200, 0)})),
      (std::vector<int64_t>{4, 8, 8}));
}

// In a run: from a budget far below the target the blocks grow until the acceptance is there, on steps of the interval,
// and the next rollout reads them.
TEST(BlockBudget, ReachesItsTargetInARun) {
  const Keys keys = {"rollout.kv.method=quest",
                     "rollout.kv.blocks.size=4",
                     "rollout.kv.blocks.count=1",
                     "rollout.kv.blocks.first=0",
                     "rollout.kv.blocks.last=1",
                     "rollout.kv.blocks.dense_layers=0",
                     "rollout.kv.blocks.acceptance_target=0.9",
                     "rollout.kv.blocks.acceptance_steps=2",
                     "actor.optim.lr=0",
                     "data.train_batch_size=12",
                     "trainer.total_training_steps=40"};
  TrainingRun run(tiny_run("qwen3", keys));
  std::vector<double> first, last, p5, read;
  for (int i = 0; i < 30; i++) {
    const Metrics m = run.step();
    first.push_back(m.get("kv/blocks/context_0_63"));
    last.push_back(m.get("kv/blocks/context_64_127"));
    p5.push_back(m.get("rollout_corr/acceptance_rate_p5/context_0_63"));
    read.push_back(m.get("kv/read_tokens/mean"));
    EXPECT_LE(first.back(), last.back());
  }
  EXPECT_EQ(first[0], 1);
  EXPECT_LT(p5[0], 0.8);
  EXPECT_GT(read.back(), 2 * read[0]);
  for (size_t i = 0; i + 1 < first.size(); i += 2) EXPECT_EQ(first[i], first[i + 1]) << "between adaptations";
  EXPECT_EQ(first[2], 2);
  EXPECT_NEAR(p5.back(), 0.9, 0.06);
  // Whatever the division of the work.
  TrainingRun other(tiny_run("qwen3", keys + Keys{"trainer.threads=2", "rollout.max_num_seqs=5",
                                                  "actor.ppo_max_token_len=70", "actor.logits_chunk=33"}));
  for (int i = 0; i < 8; i++) EXPECT_EQ(other.step().get("kv/blocks/context_0_63"), first[i]);
}

}  // namespace
}  // namespace pare::test
