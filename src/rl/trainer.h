// GRPO and its variants: a step is a row of stages, each from plain data to plain data (one file each in this folder).
//
//   prompts -> rollout -> rewards -> group advantages -> filter -> token plan -> pack -> forward, fused loss, backward
//   -> AdamW
#pragma once
#include <functional>

#include "rl/metrics.h"
#include "rl/session.h"
#include "rl/token_plan.h"
#include "rl/types.h"

namespace pare {

// A response as people read it.
struct SampleText {
  std::string prompt, response, extracted, answer;
  double score, reward, advantage;
  int64_t tokens;
  bool finished;
};

class Trainer {
 public:
  explicit Trainer(Session& session);

  // One step: generates a batch, updates the parameters (once, or ppo_epochs times per mini-batch), and says what
  // happened.
  Metrics step();
  Metrics evaluate();  // rl/evaluate.h

  int64_t steps() const { return step_; }
  const std::vector<Trajectory>& samples() const { return samples_; }  // of the last step
  std::vector<SampleText> texts() const;                               // of the same

  // What is being done, for a progress line: stage, done, all.
  std::function<void(const char* stage, int64_t done, int64_t all)> progress;

  // The stages.  Public, so that tests and the planner can run them on data of their own.
  void update(std::vector<Trajectory>& samples, Metrics& metrics);
  // A step whose prompts and responses all have their greatest length, and advantage 1: what plan_step runs.
  void worst_case_step();

 private:
  void generate(Metrics& metrics);
  void shape(Metrics& metrics);
  void reference_logprobs(std::vector<Trajectory>& samples);
  void old_logprobs(std::vector<Trajectory>& samples);
  bool truncated_sampling() const;

  Session& session_;
  const Config& config_;
  std::unique_ptr<Model> reference_;  // the initial model, where a KL needs it
  Rollout rollout_;
  Learner learner_;
  PromptStream prompts_;
  int64_t step_ = 0;
  std::vector<Problem> problems_;  // of the groups of the last step
  std::vector<Trajectory> samples_;
  std::vector<Reward> rewards_;  // of samples_
};

}  // namespace pare
