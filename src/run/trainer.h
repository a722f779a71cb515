// GRPO and its variants: a step is a row of stages, each from plain data to plain data (one file each in this folder).
//
//   prompts -> rollout -> rewards -> group advantages -> filter -> dense old log-probs -> rollout correction -> token
//   plan -> pack -> forward, fused loss, backward -> AdamW
#pragma once
#include "rl/token_plan.h"
#include "rl/types.h"
#include "run/training.h"

namespace pare {

// A response as people read it.
struct SampleText {
  std::string prompt, response, extracted, answer;
  double score, reward, advantage;
  int64_t tokens;
  bool finished;
};

class Trainer : public Training {
 public:
  explicit Trainer(Session& session);

  // One step: generates a batch, updates the parameters (once, or ppo_epochs times per mini-batch), and says what
  // happened.
  Metrics step() override;

  const std::vector<Trajectory>& samples() const { return samples_; }  // of the last step
  std::vector<SampleText> texts() const;                               // of the same

  // The stages.  Public, so that tests and the planner can run them on data of their own.
  void update(std::vector<Trajectory>& samples, Metrics& metrics);
  // A step whose prompts and responses all have their greatest length, and advantage 1: what plan_step runs.
  void worst_case_step() override;
  void largest_batches() override;

 private:
  void generate(Metrics& metrics);
  void shape(Metrics& metrics);
  void reference_logprobs(std::vector<Trajectory>& samples);
  std::optional<int32_t> sampler_row(int64_t completion) const;
  void judge_samples(std::vector<Trajectory>& samples);
  void old_logprobs(std::vector<Trajectory>& samples);
  void correct(std::vector<Trajectory>& samples, int64_t mini, Metrics& metrics);
  bool corrects() const { return corrects_rollout(config_); }

  std::unique_ptr<Model> reference_;  // the initial model, where a KL needs it
  std::vector<Problem> problems_;     // of the groups of the last step
  std::vector<Trajectory> samples_;
  std::vector<Reward> rewards_;  // of samples_
  Tensor sampler_states_;        // act [responses * max_response_length, C] of the last rollout, where they are kept
};

}  // namespace pare
