// Steps of the trainer where something is left out, is truncated, or cannot be.
#include <cmath>
#include <regex>
#include <set>

#include "run/plan.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

class TrainerSteps : public testing::Test {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { std::filesystem::remove_all(tiny_folder()); }
};

std::string message(const Overrides& o) {
  try {
    Session session(load_config(tiny_run() + o));
    GrpoTraining trainer(session);
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::usage);
    return e.what();
  }
  return "no error";
}

// In the first step the policy is the reference.
TEST_F(TrainerSteps, KlInRewardBeginsAtZero) {
  Session session(load_config(tiny_run() + Overrides{"algorithm.use_kl_in_reward=true"}));
  GrpoTraining trainer(session);
  EXPECT_EQ(trainer.step().get("actor/reward_kl_penalty"), 0);
  EXPECT_NE(trainer.step().get("actor/reward_kl_penalty"), 0);
}

// memory/* are the arenas and nothing else, and the report's peak is what they take together.
TEST_F(TrainerSteps, MetricsHaveThePeaksOfTheArenas) {
  for (const char* shares : {"true", "false"}) {
    SCOPED_TRACE(shares);
    Session session(load_config(tiny_run() + Overrides{cat("rollout.free_cache_engine=", shares)}));
    GrpoTraining trainer(session);
    for (int step = 0; step < 3; step++) {
      const Metrics m = trainer.step();
      double sum = 0, parts = 0;
      for (const Arena* a : session.arenas()) {
        EXPECT_EQ(m.get("memory/" + a->name()), static_cast<double>(a->peak())) << a->name();
        EXPECT_GT(a->peak(), 0u) << a->name();
        sum += static_cast<double>(a->peak());
      }
      for (const auto& [name, value] : m.all())
        if (name.starts_with("memory/")) parts += value;
      EXPECT_EQ(parts, sum);
      if (session.shared)
        sum -= std::min(m.get("memory/kv") + m.get("memory/scratch"),
                        m.get("memory/gradients") + m.get("memory/activations"));
      EXPECT_EQ(m.get("perf/max_memory_allocated_gb"), sum / (1 << 30));
      EXPECT_GT(m.get("perf/kv_peak_bytes"), 0);
      EXPECT_LE(m.get("perf/kv_peak_bytes"), m.get("memory/kv"));
    }
  }
}

// A mini-batch that is filtered away is counted, and the next one is still on-policy: its ratios are exactly 1.
TEST_F(TrainerSteps, AfterASkippedMiniBatchTheNextIsTheFirst) {
  Session session(load_config(tiny_run() + Overrides{"actor.optim.lr=0", "actor.ppo_mini_batch_size=2",
                                                     "algorithm.adv_filter_threshold=1e-3"}));
  GrpoTraining trainer(session);
  const auto scores = [](auto, std::span<const Completion> completions) {
    std::vector<double> scores;
    for (const Completion& c : completions) scores.push_back(c.request < 2 ? 1 : c.sample % 2);
    return scores;
  };
  Grpo grpo(trainer.keys(), trainer.engine(),
            {.prompts = [&] { return trainer.next_prompts(); }, .scores = scores, .progress = {}});
  Metrics m;
  grpo.step(1, m);
  int64_t tokens = 0;
  for (const Trajectory& s : grpo.samples())
    if (s.group >= 2) tokens += std::ssize(s.tokens);
  EXPECT_EQ(m.get("actor/skipped_updates"), 1);
  EXPECT_EQ(m.get("actor/updates"), 1);
  EXPECT_EQ(m.get("exact/checked_tokens"), tokens);
  EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
  EXPECT_EQ(m.get("actor/ppo_kl"), 0);
}

TEST_F(TrainerSteps, DynamicSamplingThatFindsNothingIsASkippedUpdate) {
  Session session(load_config(tiny_run() + Overrides{"data.train_files=" + tiny_folder() + "never.jsonl",
                                                     "algorithm.filter_groups.enable=true",
                                                     "algorithm.filter_groups.max_num_gen_batches=3"}));
  const auto before = session.model->get_parameters();
  GrpoTraining trainer(session);
  const Metrics m = trainer.step();
  EXPECT_EQ(m.get("rollout/gen_batches"), 3);
  EXPECT_EQ(m.get("rollout/groups"), 0);
  EXPECT_EQ(m.get("filter/zero_std_fraction"), 1);
  EXPECT_EQ(m.get("actor/skipped_updates"), 1);
  EXPECT_EQ(m.get("actor/updates"), 0);
  EXPECT_EQ(session.model->get_parameters(), before);
}

// Batches are drawn until there are enough groups with a signal; those too many are thrown away.
TEST_F(TrainerSteps, DynamicSamplingFillsTheBatchWithGroupsThatDiffer) {
  Session session(load_config(tiny_run() + Overrides{"algorithm.filter_groups.enable=true", "rollout.n=2"}));
  GrpoTraining trainer(session);
  const Metrics m = trainer.step();
  EXPECT_GT(m.get("rollout/gen_batches"), 1);
  EXPECT_EQ(m.get("rollout/groups"), 4);
  ASSERT_EQ(trainer.samples().size(), 8u);
  for (size_t i = 0; i < 8; i += 2) {
    EXPECT_EQ(trainer.samples()[i].group, static_cast<int32_t>(i / 2));
    EXPECT_NE(trainer.samples()[i].score, trainer.samples()[i + 1].score);
  }
  EXPECT_EQ(trainer.texts().size(), 8u);
}

// A problem that is given by its ids is logged as the text of its prompt.
TEST_F(TrainerSteps, TextsNameTheProblem) {
  std::string rows;
  for (int i = 0; i < 4; i++) rows += "{\"prompt_ids\": [7, 8], \"answer\": \"a\"}\n";
  write_tiny_file("ids.jsonl", rows);
  Session session(load_config(tiny_run() + Overrides{cat("data.train_files=", tiny_folder(), "ids.jsonl")}));
  GrpoTraining trainer(session);
  trainer.step();
  for (const SampleText& t : trainer.texts()) EXPECT_EQ(t.problem, session.tokenizer->decode(std::vector{7, 8}));
}

// Horvitz-Thompson weights have mean 1 over all tokens of a response, in expectation; without them they do not.
TEST_F(TrainerSteps, WeightsOfTokenSubsetsAreReported) {
  Session session(
      load_config(tiny_run() + Overrides{"actor.token_subset=urs", "actor.urs_probability=0.25", "rollout.n=64"}));
  GrpoTraining trainer(session);
  const Metrics m = trainer.step();
  EXPECT_EQ(m.get("ht/weight_max"), 4);
  EXPECT_NEAR(m.get("ht/weight_mean"), 1, 3 * std::sqrt(3.0 / m.get("tokens/generated")));
  EXPECT_NEAR(m.get("ht/ess"), m.get("ht/weight_mean") / 4, 1e-12);  // weights are 0 or 4
}

// No op is there for its own test only.
void expect_every_op_called(const Table& table, const Overrides& more) {
  // RoPE goes by itself where there is no QK-norm.
  write_tiny_file("llama.json", std::regex_replace(config_json(16), std::regex("qwen3"), "llama"));
  std::set<std::string> called;
  for (const Overrides& kv :
       {Overrides{},
        {"rollout.top_k=5"},
        {"rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=2",
         "rollout.kv.blocks.dense_layers=0", "rollout.kv.blocks.first=0", "rollout.kv.blocks.last=1",
         "learner.attention=replay"},
        {"model.path=", "model.config=" + tiny_folder() + "llama.json", "rollout.kv.method=tova",
         "rollout.kv.evict.budget=3", "rollout.kv.evict.buffer=2", "rollout.check_exact=false",
         "algorithm.rollout_correction.acceptance=true"},
        {"rollout.kv.method=h2o", "rollout.kv.evict.budget=3", "rollout.kv.evict.buffer=2", "learner.attention=replay"},
        {"rollout.kv.method=rkv", "rollout.kv.evict.budget=3", "rollout.kv.evict.buffer=2", "rollout.kv.window.size=1",
         "rollout.kv.merge.method=value", "rollout.check_exact=false", "model.dtype=f32"}}) {
    const Config config =
        load_config(tiny_run() + Overrides{"actor.use_kl_loss=true", "rollout.max_num_seqs=3"} + more + kv);
    Session session(config, table, true, training_limits(config, TrainingKind::grpo, table));
    GrpoTraining trainer(session);
    const auto add = [&] {
      for (const auto& [phase, ops] : session.ledger.phases)
        for (const auto& [op, line] : ops) called.insert(op);
    };
    add();  // what loads the model
    const double mismatches = trainer.step().get("exact/mismatch_tokens");
    EXPECT_TRUE(checks_exact(config) ? mismatches == 0 : std::isnan(mismatches)) << mismatches;
    add();
  }
  for (const char* op : {"all_to_all", "all_gather"}) {  // of several ranks: tests/mpi
    EXPECT_FALSE(called.contains(op)) << op;
    called.insert(op);
  }
#define X(op, Args) EXPECT_TRUE(called.contains(#op)) << #op;
  PARE_OPS(X)
#undef X
}
TEST_F(TrainerSteps, CallEveryOp) { expect_every_op_called(table_cpu, {}); }
#ifdef PARE_EMU
TEST_F(TrainerSteps, CallEveryOpOfTheKernels) {
  expect_every_op_called(table_emu, {"trainer.device=emu", "rollout.n=2"});
}
#endif

TEST_F(TrainerSteps, WhatCannotBeTrainedIsRefusedBeforeTheFirstStep) {
  EXPECT_NE(message({"data.reward="}).find("data.reward is empty"), std::string::npos);
  write_tiny_file("bad.jsonl", R"({"prompt": "p?", "answer": "a"}
{"ids": [1, 48], "answer": "a"}
)");
  EXPECT_NE(
      message({"data.train_files=" + tiny_folder() + "bad.jsonl"}).find("bad.jsonl:2: the prompt has the token 48"),
      std::string::npos);
  write_tiny_file("bad.jsonl", R"({"prompt": "pppppppppppppppppppppppp", "answer": "a"})");
  EXPECT_NE(message({"data.val_files=" + tiny_folder() + "bad.jsonl"}).find("data.max_prompt_length is 16"),
            std::string::npos);
  try {
    Session session(load_config(tiny_run() + Overrides{"rollout.kv_cache_bytes=3000"}));
    FAIL() << "two pages cannot hold a sequence of two layers";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::memory);
    EXPECT_NE(std::string(e.what()).find("rollout.kv_cache_bytes is 3000"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace pare::test
