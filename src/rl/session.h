// What a run works with: the model on its device, the task, the tokenizer.  Built from a configuration; everything that
// can be wrong with files and sizes is found here, before the first step.
#pragma once
#include <memory>

#include "data/task.h"
#include "model/learner.h"
#include "rl/config.h"
#include "rollout/rollout.h"
#include "tokenizer/tokenizer.h"

namespace pare {

struct Session {
  // On table_null nothing is computed and no memory is taken, only the books are kept.
  explicit Session(const Config& config, const Table& table = table_cpu);

  std::vector<int32_t> encode_prompt(const Problem& problem) const;
  // The reward of a response: the text without its closing EOS.
  Reward reward(const Task& task, const Problem& problem, const Completion& completion) const;
  // Of all responses, in order, in parallel; `problems` are those that the completions' requests count.
  std::vector<Reward> rewards(const Task& task, std::span<const Problem> problems,
                              std::span<const Completion> completions) const;
  LearnerOptions learner_options() const;
  RolloutLimits rollout_limits() const;
  AdamWOptions optimizer_options(double lr) const;
  std::vector<const Arena*> arenas() const;

  const Config config;
  Device device;
  Ledger ledger;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Task> train, val;  // val may be absent (jsonl without val_files)
  ModelConfig model_config;
  std::vector<int32_t> eos;  // any of them ends a response

  Arena weights, gradients, optimizer, kv, activations;
  std::unique_ptr<Model> model;

 private:
  void check_prompts() const;
};

// Rows of a data set in the order of training: epoch after epoch, each shuffled by (seed, epoch).
class PromptStream {
 public:
  PromptStream(int64_t rows, bool shuffle, uint64_t seed);
  struct Row {
    int64_t epoch, row;
  };
  Row next();

 private:
  void start_epoch();
  const int64_t rows_;
  const bool shuffle_;
  const uint64_t seed_;
  int64_t epoch_ = 0, next_ = 0;
  std::vector<int64_t> order_;
};

}  // namespace pare
