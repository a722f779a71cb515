// Shards of an update, and parts of the optimizer's state.
#include <numeric>

#include "base/rng.h"
#include "model/parts.h"
#include "rl/shards.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

int64_t largest(const std::vector<int64_t>& costs, const std::vector<int>& shard_of, int64_t shards) {
  std::vector<int64_t> load(static_cast<size_t>(shards));
  for (size_t i = 0; i < costs.size(); i++) load[static_cast<size_t>(shard_of[i])] += costs[i];
  return *std::max_element(load.begin(), load.end());
}

TEST(Shards, AreDealtByCostAloneAndNeverWorseThanInTurn) {
  EXPECT_EQ(deal({5, 9, 5, 1}, 2), (std::vector<int>{1, 0, 1, 0}));
  EXPECT_EQ(deal({7, 7, 7}, 4), (std::vector<int>{0, 1, 2})) << "ties: the lower item, the lower shard";
  EXPECT_EQ(deal({3, 2, 3, 2, 0, 2}, 2), (std::vector<int>{0, 1, 0, 1, 0, 1})) << "in turn 6, by falling cost 7";
  EXPECT_EQ(deal({}, 3), std::vector<int>());
  Rng rng(rng_key(1, RngStream::data, 0));
  for (int round = 0; round < 300; round++) {
    const int64_t shards = 1 + rng.below(9);
    std::vector<int64_t> costs(rng.below(40));
    for (int64_t& c : costs) c = 1 + rng.below(1000);
    const std::vector<int> dealt = deal(costs, shards);
    ASSERT_EQ(dealt.size(), costs.size());
    for (const int s : dealt) ASSERT_TRUE(s >= 0 && s < shards);
    std::vector<int> in_turn;
    for (size_t i = 0; i < costs.size(); i++) in_turn.push_back(static_cast<int>(static_cast<int64_t>(i) % shards));
    ASSERT_LE(largest(costs, dealt, shards), largest(costs, in_turn, shards));
  }
}

// Lengths as of responses, 128 groups of eight: what the dealing is for.
TEST(Shards, AreNearlyEqual) {
  Rng rng(rng_key(7, RngStream::data, 0));
  std::vector<int64_t> costs(128);
  for (int64_t& c : costs)
    for (int k = 0; k < 8; k++) c += static_cast<int64_t>(600 * std::exp(rng.normal()));
  const double mean = static_cast<double>(std::accumulate(costs.begin(), costs.end(), int64_t{0})) / 8;
  std::vector<int> in_turn(128);
  for (int i = 0; i < 128; i++) in_turn[static_cast<size_t>(i)] = i % 8;
  // The last group to be dealt is the smallest: by so much at most is a shard above the mean.
  const auto smallest = static_cast<double>(*std::min_element(costs.begin(), costs.end()));
  EXPECT_LE(static_cast<double>(largest(costs, deal(costs, 8), 8)), mean + smallest);
  EXPECT_GT(static_cast<double>(largest(costs, in_turn, 8)), 1.05 * mean);
}

// The closed forms are those of the books.
TEST(Shards, CostsAreThoseOfTheLedger) {
  for (const bool recompute : {false, true}) {
    TrainingRun run(tiny_run("qwen3", {cat("model.enable_gradient_checkpointing=", recompute ? "true" : "false"),
                                       "actor.token_subset=urs", "data.train_batch_size=3"}));
    Learner& learner = run.trainer->learner();
    const std::vector<int32_t> p = {1, 5, 6, 7};
    const std::vector<Group> groups = {{p, {{{3, 4, 5}}, {{6}}, {{7, 8, 9, 10}, {{true, false, false, true}}}}},
                                       {{1, 2}, {{{3, 4}}}}};
    TokenTerms terms(static_cast<size_t>(loss_row_offsets(groups).back()));
    run.session.ledger.clear();
    const Phase phase(run.session.device, "cost");
    learner.accumulate(groups, terms, {});
    int64_t flops = 0, expected = 0;
    for (const auto& [op, line] : run.session.ledger.phases["cost"])
      if (op.starts_with("linear_") || op.starts_with("attn_")) flops += line.cost.flops;
    const int64_t blocks = recompute ? run.session.model_config.layers - 1 : 0;
    for (const Group& g : groups) expected += group_flops(run.session.model_config, g, blocks);
    EXPECT_EQ(flops, expected) << recompute;
  }
}

// The sum of the shards, ascending in blocks of eight, of gradients that each shard has alone.
TEST(Shards, AreAddedInTheirOrder) {
  for (const int64_t shards : {2, 8, 11, 19})
    for (const char* type : {"qwen3", "llama"}) {
      const std::vector<std::string> keys = {cat("learner.shards=", shards), "trainer.balance_batch=false"};
      TrainingRun one(tiny_run(type)), many(tiny_run(type, keys));
      std::vector<Group> groups;
      Rng rng(rng_key(3, RngStream::data, 0));
      for (int64_t g = 0; g < 13; g++) {
        Group& group = groups.emplace_back();
        group.prefix = {1, static_cast<int32_t>(3 + g)};
        for (int m = 0; m < 2; m++) {
          Member& member = group.members.emplace_back();
          for (uint32_t t = 0; t < 1 + rng.below(9); t++)
            member.tokens.push_back(static_cast<int32_t>(3 + rng.below(40)));
        }
        group.shard = g % shards;
      }
      TokenTerms terms(static_cast<size_t>(loss_row_offsets(groups).back()));
      for (double& w : terms.weight) w = 0.01;
      const LossSpec spec{.policy = PolicyLoss::nll};
      const TokenOuts out = many.trainer->learner().accumulate(groups, terms, spec);

      Learner& learner = one.trainer->learner();
      std::vector<float> sum, block;
      const auto add = [](std::vector<float>& to, const std::vector<float>& x) {
        for (size_t i = 0; i < to.size(); i++) to[i] += x[i];
      };
      for (int64_t s = 0; s < shards; s++) {
        std::vector<Group> own;
        for (const Group& g : groups)
          if (g.shard == s) own.push_back(g);
        TokenTerms part(static_cast<size_t>(loss_row_offsets(own).back()));
        for (double& w : part.weight) w = 0.01;
        learner.accumulate(own, part, spec);
        const std::vector<double> wide = learner.gradients();
        const std::vector<float> gradient(wide.begin(), wide.end());
        learner.drop_gradients();
        if (sum.empty()) sum.resize(gradient.size());
        if (s < 8) {
          add(sum, gradient);
          continue;
        }
        if (s % 8 == 0) block.assign(gradient.size(), 0);
        add(block, gradient);
        if (s % 8 == 7 || s == shards - 1) add(sum, block);
      }
      const std::vector<double> wide = many.trainer->learner().gradients();
      EXPECT_TRUE(same_bits({wide.begin(), wide.end()}, sum)) << type << ", " << shards;
      TokenOuts whole = learner.accumulate(groups, terms, spec);
      EXPECT_EQ(out.logprob, whole.logprob);
      EXPECT_EQ(out.loss, whole.loss);
      EXPECT_EQ(out.entropy, whole.entropy);
      EXPECT_EQ(out.clipped, whole.clipped);
    }
}

// A run may be resumed with more or fewer blocks recomputed.
TEST(Shards, DoNotDependOnRecomputation) {
  TrainingRun plain(tiny_run("qwen3", {"learner.shards=4", "model.enable_gradient_checkpointing=false"})),
      again(tiny_run("qwen3", {"learner.shards=4", "model.enable_gradient_checkpointing=true"}));
  int would_differ = 0;
  const std::vector<int32_t> tokens(31, 5);
  for (size_t losses = 0; losses < 31; losses++) {  // fewer rows, but more of them with a loss
    std::vector<bool> kept(tokens.size(), false);
    std::fill_n(kept.begin(), losses, true);
    const std::vector<Group> groups = {{{1}, {{std::vector<int32_t>(30, 5)}}}, {{1}, {{tokens, kept}}}};
    const std::vector<int> shards = plain.trainer->learner().shards_of(groups);
    EXPECT_EQ(again.trainer->learner().shards_of(groups), shards) << losses;
    would_differ += deal(again.trainer->learner().flops_of(groups), 4) != shards;
  }
  EXPECT_GT(would_differ, 0);
}

// What ranks wait for, and what stays idle: of the update where that is most.
TEST(Shards, TotalsAreOfTheWorstUpdate) {
  TrainingRun run(tiny_run("qwen3", {"learner.shards=4"}));
  const Learner& learner = run.trainer->learner();
  const std::vector<Group> all = random_groups(run.session.model_config, 5);
  const std::vector<Group> six = all, five(all.begin(), all.begin() + 5), three(all.begin() + 2, all.begin() + 5);
  ShardTotals totals;
  double imbalance = 0;
  for (const auto& groups : {six, three, five}) {
    totals.add(learner, groups);
    std::vector<int64_t> work(4);
    const std::vector<int64_t> flops = learner.flops_of(groups);
    for (size_t g = 0; g < groups.size(); g++) work[static_cast<size_t>(learner.shards_of(groups)[g])] += flops[g];
    const double sum = std::accumulate(work.begin(), work.end(), 0.0);
    imbalance = std::max(imbalance, 4 * static_cast<double>(*std::max_element(work.begin(), work.end())) / sum);
  }
  Metrics m;
  totals.report(m);
  EXPECT_EQ(m.get("shards/groups"), 0.75);
  EXPECT_EQ(m.get("shards/idle"), 0.25);
  EXPECT_NEAR(m.get("shards/imbalance"), imbalance, 1e-12);
  EXPECT_GT(imbalance, 4.0 / 3);

  // Fewer groups than shards are a step like any other.
  TrainingRun idle(tiny_run("qwen3", {"learner.shards=8"}));
  const Metrics step = idle.step();
  EXPECT_EQ(step.get("shards/idle"), 0.25) << "6 groups";
  EXPECT_EQ(step.get("global_seqlen/min"), 0);
  EXPECT_EQ(step.get("global_seqlen/balanced_min"), 0);
  EXPECT_EQ(step.get("actor/updates"), 1);
  TrainingRun one(tiny_run("qwen3"));
  EXPECT_TRUE(std::isnan(one.step().get("shards/groups")));
}

// With other shards a run differs by roundings alone.
TEST(Shards, ChangeRoundingsAlone) {
  const std::vector<std::string> more = {"actor.ppo_mini_batch_size=3", "actor.use_kl_loss=true"};
  TrainingRun one(tiny_run("qwen2", more)), six(tiny_run("qwen2", {more[0], more[1], "learner.shards=6"}));
  const Metrics a = one.step(), b = six.step();
  EXPECT_GT(b.get("flops/learner"), a.get("flops/learner")) << "the additions of shards";
  EXPECT_LT(b.get("flops/learner"), 1.03 * a.get("flops/learner"));
  EXPECT_EQ(a.get("tokens/trained"), b.get("tokens/trained"));
  EXPECT_NEAR(a.get("actor/grad_norm"), b.get("actor/grad_norm"), 1e-4 * a.get("actor/grad_norm"));
  const std::vector<float> p = one.parameters(), q = six.parameters();
  EXPECT_FALSE(same_bits(p, q));
  double most = 0;
  for (size_t i = 0; i < p.size(); i++) most = std::max(most, std::fabs(double{p[i]} - q[i]));
  EXPECT_LT(most, 0.02);  // two updates of 0.01 each
}

// A rank replays what it sampled, and reads the states of its own sampler: groups stay where they were sampled.
TEST(Shards, GroupsStayWithWhatTheSamplerKept) {
  const auto balances = [](std::vector<std::string> keys) {
    keys.insert(keys.end(), {"rollout.kv.blocks.size=4", "rollout.kv.blocks.count=5", "learner.shards=3"});
    return Session(tiny_run("qwen3", keys), table_null).learner_options().balance;
  };
  EXPECT_TRUE(balances({}));
  EXPECT_FALSE(balances({"trainer.balance_batch=false"}));
  EXPECT_FALSE(balances({"rollout.kv.method=quest", "learner.attention=replay"}));
  EXPECT_FALSE(
      balances({"rollout.kv.method=quest", "rollout.check_exact=false", "algorithm.rollout_correction.rollout_is=tis",
                "algorithm.rollout_correction.acceptance=true"}));
}

TEST(Parts, CoverEveryElementOnce) {
  Rng rng(rng_key(2, RngStream::data, 0));
  for (int round = 0; round < 200; round++) {
    std::vector<ParameterBlock> blocks;
    int64_t offset = 0, place = 0;
    for (uint32_t i = 0; i < 1 + rng.below(12); i++) {
      ParameterBlock b{.offset = offset, .vector = {}, .weight = {}, .place = place};
      const int64_t n = 1 + rng.below(70), inputs = 1 + rng.below(30);
      if (rng.below(2)) {
        b.vector = make_tensor(nullptr, DType::bf16, {n});
      } else {
        b.weight = {make_tensor(nullptr, DType::bf16, {weight_panels(n), inputs, kPanel}), n};
      }
      place += (static_cast<int64_t>(b.vector ? b.vector.bytes() : b.weight.packed.bytes()) + 63) / 64 * 64;
      offset += b.size();
      blocks.push_back(b);
    }
    const int ranks = static_cast<int>(1 + rng.below(rng.below(4) ? 6 : 400));  // also more than there are panels
    const std::vector<int64_t> cuts = part_cuts(blocks, ranks);
    ASSERT_EQ(std::ssize(cuts), ranks + 1);
    int64_t at = 0, byte = 0, longest = 0;
    for (const ParameterBlock& b : blocks) longest = std::max(longest, b.run());
    for (int r = 0; r < ranks; r++) {
      ASSERT_EQ(cuts[static_cast<size_t>(r)], at);
      ASSERT_EQ(place_of(blocks, at, place), byte);
      for (const ParameterBlock& b : blocks_between(blocks, at, cuts[static_cast<size_t>(r) + 1])) {
        ASSERT_EQ(b.offset, at);
        ASSERT_GE(b.place, byte);
        at += b.size();
        byte = b.place + static_cast<int64_t>(b.vector ? b.vector.bytes() : b.weight.packed.bytes());
      }
      ASSERT_EQ(cuts[static_cast<size_t>(r) + 1], at);
      byte = at == offset ? place : place_of(blocks, at, place);
      ASSERT_LE(cuts[static_cast<size_t>(r) + 1] - cuts[static_cast<size_t>(r)], offset / ranks + longest + 1);
    }
    ASSERT_EQ(at, offset);
  }
}

}  // namespace
}  // namespace pare::test
