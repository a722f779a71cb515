// Short training runs that tests share: configurations, small models, and rewards of a test's own.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/thread_pool.h"
#include "run/grpo_training.h"
#include "run/plan.h"
#include "tests/keys.h"
#include "tests/tiny.h"

namespace pare::test {

// A config.json of tiny_config with the vocabulary of the task; returns its path.
inline std::string tiny_model_file(const std::string& type) {
  ModelConfig c = tiny_config(type, type != "llama");
  c.vocab = 48;
  c.bos_id = 1;
  c.eos_ids = {2};
  c.pad_id = 0;
  const auto path = std::filesystem::path(testing::TempDir()) / cat("pare_", type, '_', getpid(), ".json");
  std::ofstream(path) << to_json(c);
  return path.string();
}

// A GRPO run of a few prompts on a tiny model; `more` are overrides.
inline Config tiny_run(const std::string& type, const std::vector<std::string>& more = {}) {
  std::vector<std::string> all = {"model.config=" + tiny_model_file(type),
                                  "model.init=fan_in",
                                  "data.min_statements=2",
                                  "data.max_statements=4",
                                  "data.val_min_statements=0",
                                  "data.train_rows=16",
                                  "data.val_rows=16",
                                  "data.train_batch_size=6",
                                  "data.max_prompt_length=40",
                                  "data.max_response_length=50",
                                  "rollout.n=5",
                                  "rollout.max_num_seqs=16",
                                  "rollout.max_num_batched_tokens=200",
                                  "actor.ppo_max_token_len=400",
                                  "actor.optim.lr=0.01",
                                  "trainer.threads=1"};
  all.insert(all.end(), more.begin(), more.end());
  return load_config(all);
}

// A task with the problems and the teacher of another one and a reward of the test's own.
class Rewarded : public Task {
 public:
  using Score = std::function<double(const Problem&, const Response&)>;
  Rewarded(std::unique_ptr<Task> inner, Score score) : inner_(std::move(inner)), score_(std::move(score)) {}

  int64_t size() const override { return inner_->size(); }
  Problem problem(int64_t index) const override { return inner_->problem(index); }
  std::string teach(const Problem& problem, double ramp, Rng& rng) const override {
    return inner_->teach(problem, ramp, rng);
  }
  Reward reward(const Problem& problem, const Response& response) const override {
    return {.score = score_(problem, response), .components = {}, .extracted = "", .parsed = true};
  }

 private:
  std::unique_ptr<Task> inner_;
  Score score_;
};

// A random model never solves the task: it is paid for writing digits (a graded score) ...
inline double digits(const Problem&, const Response& r) {
  return static_cast<double>(std::count_if(r.text.begin(), r.text.end(), [](char c) { return c >= '0' && c <= '9'; })) /
         static_cast<double>(r.text.size() + 1);
}
// ... or all or nothing for an early digit, which leaves some groups with equal scores.
inline double early_digit(const Problem&, const Response& r) { return digits({}, {r.text.substr(0, 2), true}) > 0; }

// A session and its trainer; without a score the reward is the task's own.
struct TrainingRun {
  explicit TrainingRun(const Config& config, Rewarded::Score score = digits, const Table& table = table_cpu)
      : session(config, table, true, training_limits(config, TrainingKind::grpo, table)) {
    if (score) session.train = std::make_unique<Rewarded>(std::move(session.train), std::move(score));
    trainer = std::make_unique<GrpoTraining>(session);
  }
  Metrics step() { return trainer->step(); }
  std::vector<float> parameters() const { return session.model->get_parameters(); }

  Session session;
  std::unique_ptr<GrpoTraining> trainer;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The parameters after `steps` steps.
inline std::vector<float> trained(const Config& config, int steps, Rewarded::Score score = digits) {
  TrainingRun run(config, std::move(score));
  for (int i = 0; i < steps; i++) run.step();
  return run.parameters();
}

// What the closed forms count.
struct Work {
  int64_t rows = 0, pairs = 0, tokens = 0;  // rows of the trunk, visible (query, key) pairs, rows of the LM head

  void add_prefix(int64_t p) {
    rows += p;
    pairs += p * (p + 1) / 2;
  }
  // n tokens after a prefix of p: the last one is never fed; of `kept` of them the log-prob is asked.
  void add_response(int64_t p, int64_t n, int64_t kept) {
    rows += n - 1;
    pairs += (n - 1) * p + (n - 1) * n / 2;
    tokens += kept;
  }
  int64_t linear(const ModelConfig& c) const {
    return 2 * rows * c.layers * (c.qkv_width() * c.hidden + c.hidden * c.q_width() + 3 * c.hidden * c.ffn) +
           2 * tokens * c.hidden * c.vocab;
  }
  int64_t attention(const ModelConfig& c) const { return 4 * c.layers * c.q_width() * pairs; }
};

// The FLOPs of a learner that has gone forward and backward over `work`.
inline void expect_learner_flops(Ledger& ledger, const ModelConfig& c, const Work& work) {
  auto& ops = ledger.phases["learner"];
  for (const char* op : {"linear_fwd", "linear_bwd_input", "linear_bwd_weight"})
    EXPECT_EQ(ops[op].cost.flops, work.linear(c)) << op;
  EXPECT_EQ(ops["attn_fwd"].cost.flops, work.attention(c));
  EXPECT_EQ(2 * ops["attn_bwd"].cost.flops, 5 * work.attention(c));
  EXPECT_EQ(ops["embedding_fwd"].cost.written, work.rows * c.hidden * 4);
  EXPECT_EQ(ops["logits_loss"].cost.flops, 10 * work.tokens * c.vocab);
}

}  // namespace pare::test
