// Training on sparse rollouts: presets, what is computed and when, and what must not change a bit.
#include <cmath>

#include "tests/runs.h"

namespace pare::test {
namespace {

const Keys quest = {"rollout.kv.method=quest",   "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=2",
                    "rollout.kv.blocks.first=0", "rollout.kv.blocks.last=1", "rollout.kv.blocks.dense_layers=0",
                    "rollout.check_exact=false"};
const Keys rkv = {"rollout.kv.method=rkv",           "rollout.kv.evict.budget=4", "rollout.kv.evict.buffer=2",
                  "rollout.kv.evict.prompt=protect", "rollout.kv.window.size=2",  "rollout.check_exact=false"};

std::string correction(const char* rest) { return cat("algorithm.rollout_correction.", rest); }

// The test's model, with a preset laid under the keys of the test.
Config with_preset(const std::string& preset, const Keys& keys) {
  const Config run = tiny_run("qwen3", keys);
  const std::string path = testing::TempDir() + cat("pare_sparse_", getpid(), ".toml");
  std::ofstream(path) << to_toml(run);
  return load_config(Keys{path, preset} + keys);
}

class Sparse : public testing::TestWithParam<std::tuple<const char*, const char*>> {};

TEST_P(Sparse, PresetsTrain) {
  const auto [preset, method] = GetParam();
  // The veto is set so that it finds some of a random model's responses and not all.
  Keys keys = std::string(method) == "quest" ? quest : rkv;
  const bool vetoes = std::string(preset).starts_with("sparse-rl");
  if (vetoes) keys.push_back(correction(std::string(method) == "quest" ? "veto=0.04" : "veto=0.2"));
  keys.push_back(correction("acceptance=true"));
  TrainingRun run(with_preset(preset, keys));
  const std::vector<float> before = run.parameters();
  for (int i = 0; i < 3; i++) {
    const Metrics m = run.step();
    for (const auto& [name, value] : m.all()) EXPECT_TRUE(std::isfinite(value)) << name << " in step " << i;
    EXPECT_GT(m.get("actor/grad_norm"), 0);
    EXPECT_GT(m.get("rollout_corr/k3_kl"), 0);
    EXPECT_LT(m.get("rollout_corr/xi_p1"), 1);
    EXPECT_GT(m.get("rollout_corr/xi_p99"), 1);
    EXPECT_GT(m.get("rollout_corr/acceptance_rate"), m.get("rollout_corr/acceptance_rate_p5"));
    EXPECT_LT(m.get("rollout_corr/acceptance_rate"), 1);
    EXPECT_GT(m.get("kv/tokens_saved/read"), 0);
    EXPECT_EQ(m.get("kv/compressions") > 0, std::string(method) == "rkv");
    EXPECT_EQ(m.get("kv/tokens_saved/mean") > 0, std::string(method) == "rkv");
    EXPECT_GT(m.get("perf/kv_peak_bytes"), 0);
    if (vetoes) {
      EXPECT_GT(m.get("rollout_corr/rejection_rate"), 0);
      EXPECT_LT(m.get("rollout_corr/rejection_rate"), 1);
      EXPECT_GT(m.get("rollout_corr/weight_max"), 0);
    }
  }
  EXPECT_FALSE(same_bits(run.parameters(), before));
}

INSTANTIATE_TEST_SUITE_P(
    Presets, Sparse,
    testing::Combine(testing::Values("sparse-rl", "sparse-rl-paper", "sparse-rl-released", "naive-sparse", "jackpot",
                                     "score-centring", "off-policy-mask", "token-mask", "sequence-mask", "unbiased-kl"),
                     testing::Values("quest", "rkv")),
    [](const auto& info) {
      std::string name = cat(std::get<0>(info.param), "_", std::get<1>(info.param));
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

TEST(SparseRl, TheReplayPresetIsExact) {
  for (const Keys& keys : {quest, rkv}) {
    TrainingRun run(with_preset("replay", keys + Keys{"rollout.check_exact=auto"}));
    for (int i = 0; i < 2; i++) {
      const Metrics m = run.step();
      EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
      EXPECT_GT(m.get("exact/checked_tokens"), 100);
      EXPECT_GT(m.get("kv/tokens_saved/read"), 0);
    }
  }
}

// The presets of policies as published, on 4 tokens: SnapKV compresses the prompt once, TOVA at every token.
TEST(SparseRl, PublishedPoliciesTrain) {
  for (const char* preset : {"kv-snapkv", "kv-tova"}) {
    SCOPED_TRACE(preset);
    const Keys small = {"rollout.kv.evict.budget=4", "rollout.kv.window.size=2", correction("rollout_is=tis")};
    TrainingRun run(with_preset(preset, small));
    const Metrics m = run.step();
    const auto responses = static_cast<double>(run.trainer->samples().size());
    EXPECT_GT(m.get("kv/evicted_tokens"), 0);
    if (std::string(preset) == "kv-snapkv")
      EXPECT_LE(m.get("kv/compressions"), responses * 2);  // at most one a layer and sequence
    else
      EXPECT_GT(m.get("kv/compressions"), responses * 2);
    EXPECT_GT(m.get("actor/grad_norm"), 0);
    EXPECT_LT(m.get("rollout_corr/xi_p1"), 1);
  }
}

const Keys all_corrections[] = {
    {correction("veto=1e-4"), correction("rollout_is=paper")},
    {correction("veto=0.99"), correction("rollout_is=tis"), correction("group_statistics=accepted"),
     correction("min_accepted=1")},
    {correction("rollout_is=icepop"), correction("rollout_rs=geometric")},
    {correction("rollout_is=released"), correction("rollout_rs=sequence"), "actor.loss_agg_mode=seq-mean-token-mean"},
    {"algorithm.obrs.enable=true", "algorithm.obrs.state_weight=z"},
};

// A dense sampler, and one whose budget takes everything: xi is exactly 1 and every bit stays.
TEST(SparseRl, CorrectionsOfWhatNeedsNoneChangeNoBit) {
  const Keys wide_rkv = {"rollout.kv.method=rkv", "rollout.check_exact=false"};
  const Keys wide_quest = {"rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=40",
                           "rollout.kv.blocks.dense_layers=0", "rollout.check_exact=false"};
  for (const Keys& correct : all_corrections)
    for (const Keys& updates : {Keys{}, Keys{"actor.ppo_mini_batch_size=2", "actor.ppo_epochs=2"}}) {
      const Keys plain = updates + Keys{"actor.loss_agg_mode=seq-mean-token-mean"};
      const auto expected = trained(tiny_run("qwen3", plain), 2);
      for (const Keys& kv : {Keys{}, wide_rkv, wide_quest}) {
        SCOPED_TRACE(testing::PrintToString(kv + correct));
        TrainingRun run(tiny_run("qwen3", plain + kv + correct));
        for (int i = 0; i < 2; i++) {
          const Metrics m = run.step();
          EXPECT_EQ(m.get("rollout_corr/rejection_rate"), 0);
          EXPECT_EQ(m.get("rollout_corr/xi_min"), 1);
          EXPECT_EQ(m.get("rollout_corr/xi_max"), 1);
          EXPECT_EQ(m.get("rollout_corr/kl"), 0);
          EXPECT_EQ(m.get("rollout_corr/weight_min"), 1);
          EXPECT_EQ(m.get("rollout_corr/weight_max"), 1);
          EXPECT_EQ(m.get("flops/old_log_prob") > 0, !kv.empty());  // a dense rollout has logged them
        }
        EXPECT_TRUE(same_bits(run.parameters(), expected));
      }
    }
}

// Old log-probs are those of the learner, over the whole response, and only of what the filter left.
TEST(SparseRl, OldLogprobsAreComputedWhereTheyAreNeeded) {
  const Keys rpc = {"actor.token_subset=rpc", "actor.rpc_min_tokens=3"};
  const Keys filter = {"algorithm.adv_filter_threshold=1e-3"};
  for (const Keys& statistics : {Keys{}, Keys{correction("group_statistics=accepted")}}) {
    TrainingRun run(tiny_run("qwen3", quest + rpc + filter + statistics +
                                          Keys{correction("veto=1e-4"), correction("rollout_is=tis")}),
                    early_digit);
    const Metrics m = run.step();
    int64_t judged = 0, tokens = 0, dropped = 0;
    Work work;
    int32_t group = -1;
    for (const Trajectory& s : run.trainer->samples()) {
      dropped += s.dropped();
      EXPECT_EQ(s.ruling == Ruling::none, !s.old_logprob);
      if (s.ruling == Ruling::none) continue;
      judged++;
      tokens += static_cast<int64_t>(s.tokens.size());
      EXPECT_EQ(s.old_logprob->size(), s.tokens.size());
      if (s.group != group) work.add_prefix(static_cast<int64_t>(s.prompt.size()));
      group = s.group;
      const auto n = static_cast<int64_t>(s.tokens.size());
      work.add_response(static_cast<int64_t>(s.prompt.size()), n, n);
    }
    EXPECT_GT(dropped, 0);
    EXPECT_GT(judged, 0);
    const auto& c = run.session.model_config;
    EXPECT_EQ(run.session.ledger.phases["old_log_prob"]["linear_fwd"].cost.flops, work.linear(c));
    EXPECT_LT(m.get("tokens/loss"), tokens);
  }
  TrainingRun naive(tiny_run("qwen3", quest));
  const Metrics m = naive.step();
  EXPECT_EQ(m.get("flops/old_log_prob"), 0);
  EXPECT_GT(m.get("rollout_corr/k3_kl"), 0);  // from the update's own pass
  EXPECT_TRUE(std::isnan(m.get("rollout_corr/rejection_rate")));
  TrainingRun twice(tiny_run("qwen3", quest + Keys{"actor.ppo_epochs=2"}));
  EXPECT_GT(twice.step().get("flops/old_log_prob"), 0);
}

// A rejected response is never packed: its tokens are neither trained on nor computed.
TEST(SparseRl, RejectedResponsesAreNotPacked) {
  TrainingRun run(tiny_run("qwen3", quest + Keys{correction("veto=0.55")}));
  const Metrics m = run.step();
  int64_t rejected = 0;
  Work work;
  int32_t group = -1;
  for (const Trajectory& s : run.trainer->samples()) {
    rejected += s.ruling == Ruling::rejected;
    if (s.dropped()) continue;
    if (s.group != group) work.add_prefix(static_cast<int64_t>(s.prompt.size()));
    group = s.group;
    const auto n = static_cast<int64_t>(s.tokens.size());
    work.add_response(static_cast<int64_t>(s.prompt.size()), n, n);
  }
  EXPECT_GT(rejected, 0);
  EXPECT_DOUBLE_EQ(m.get("rollout_corr/rejection_rate"), static_cast<double>(rejected) / 30);
  expect_learner_flops(run.session.ledger, run.session.model_config, work);
}

// The learner's own pass gives, bit by bit, what the pass without a gradient gave: the first ratio is exactly 1.
TEST(SparseRl, OldLogprobsAreTheLearnersBitByBit) {
  TrainingRun run(
      tiny_run("qwen3", rkv + Keys{correction("rollout_is=paper"), "actor.ppo_epochs=2", "actor.optim.lr=0"}));
  const Metrics m = run.step();
  EXPECT_EQ(m.get("actor/updates"), 2);
  EXPECT_EQ(m.get("actor/ppo_kl"), 0);
  EXPECT_NE(m.get("rollout_corr/kl"), 0);
}

// Threads, micro-batches and the schedule of the rollout: the same bits.
TEST(SparseRl, NoDivisionChangesABit) {
  const Keys z = {"algorithm.obrs.enable=true", "algorithm.obrs.state_weight=z", correction("veto=0.3")};
  const Keys released = {correction("rollout_is=released"), correction("veto=0.3"),
                         "actor.loss_agg_mode=seq-mean-token-mean", "actor.ppo_mini_batch_size=3",
                         "actor.use_kl_loss=true"};
  for (const Keys& method : {quest, rkv})
    for (const Keys& variant : {z, released}) {
      const auto first = trained(tiny_run("qwen3", method + variant), 2);
      EXPECT_TRUE(
          same_bits(first, trained(tiny_run("qwen3", method + variant +
                                                         Keys{"trainer.threads=2", "rollout.max_num_seqs=5",
                                                              "actor.ppo_max_token_len=70", "actor.logits_chunk=33"}),
                                   2)));
    }
}

// Overlaps come from the hidden states that the sampler kept: equal policies overlap wholly, and the sampler's own
// probability of a drawn token follows from its state.
TEST(SparseRl, AcceptanceOfAFullBudgetIsOne) {
  for (const char* blocks : {"rollout.kv.blocks.count=40", "rollout.kv.blocks.count=2"}) {
    TrainingRun run(tiny_run("qwen3", quest + Keys{correction("acceptance=true"), blocks, "rollout.max_num_seqs=7"}));
    const Metrics m = run.step();
    if (std::string(blocks).ends_with("40"))
      EXPECT_NEAR(m.get("rollout_corr/acceptance_rate_p5"), 1, 1e-6);
    else
      EXPECT_LT(m.get("rollout_corr/acceptance_rate_p5"), 0.99);
    for (const Trajectory& s : run.trainer->samples()) {
      ASSERT_EQ(s.overlap->size(), s.tokens.size());
      for (size_t t = 0; t < s.tokens.size(); t++) {
        EXPECT_EQ(s.overlap->at(t), s.mass->at(t));  // lambda is 1
        // No token can differ by more than the part that the two do not have in common.
        const double difference = std::abs(std::exp(s.logprob[t]) - std::exp(s.old_logprob->at(t)));
        EXPECT_LE(difference, 1 - s.overlap->at(t) + 1e-5);
      }
    }
  }
}

// Where the sampler reads everything, its distributions are the learner's and nothing is left to centre; where it reads
// two blocks, the gradient changes.
TEST(SparseRl, CentringOfAFullBudgetIsNothing) {
  for (const char* blocks : {"rollout.kv.blocks.count=40", "rollout.kv.blocks.count=2"}) {
    const auto norm = [&](const Keys& keys) {
      return TrainingRun(tiny_run("qwen3", quest + Keys{blocks} + keys)).step().get("actor/grad_norm");
    };
    const double without = norm({}), with = norm({correction("score_centering=true")});
    if (std::string(blocks).ends_with("40"))
      EXPECT_NEAR(with, without, 1e-5 * without);
    else
      EXPECT_GT(std::abs(with - without), 1e-3 * without);
  }
}

// An update with too little accepted is skipped, or made smaller.
TEST(SparseRl, UpdatesWithTooFewAccepted) {
  const Keys all = quest + Keys{correction("veto=0.999"), correction("min_accepted=0.9")};
  TrainingRun skip(tiny_run("qwen3", all));
  const auto before = skip.parameters();
  EXPECT_EQ(skip.step().get("actor/skipped_updates"), 1);
  EXPECT_TRUE(same_bits(skip.parameters(), before));
}

TEST(SparseRl, ValidationIsDenseUnlessAskedFor) {
  const Keys sampled = {"rollout.val_kwargs.temperature=1", "rollout.val_kwargs.n=2"};
  const auto validate = [&](const Keys& keys) {
    return TrainingRun(tiny_run("qwen3", keys + sampled)).trainer->evaluate();
  };
  const char* name = "val-aux/ssa/response_length/mean";
  const Metrics dense = validate({}), sparse = validate(quest),
                policy = validate(quest + Keys{"rollout.val_kwargs.kv=rollout"}),
                both = validate(quest + Keys{"rollout.val_kwargs.kv=both"});
  EXPECT_EQ(sparse.get(name), dense.get(name));
  EXPECT_NE(policy.get(name), dense.get(name));
  EXPECT_EQ(both.get(name), dense.get(name));
  EXPECT_EQ(both.get("val-aux/ssa_kv/response_length/mean"), policy.get(name));
}

}  // namespace
}  // namespace pare::test
