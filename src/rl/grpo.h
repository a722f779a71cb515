// Group Relative Policy Optimization (GRPO; DeepSeekMath, algorithm 1) and its variants: one step.
//
//   prompts q, responses o_1 .. o_G to each and their scores -> rewards R -> advantages A -> filter -> log-probs under
//   pi_old -> rollout correction -> token plan -> updates: forward, loss, backward, AdamW; with distillation, of the
//   sampler's own parameters too (distill.h)
//
// Each stage is a file of this folder.  Where prompts and scores come from is not the algorithm's.
#pragma once
#include <functional>
#include <memory>

#include "base/rng.h"
#include "model/learner.h"
#include "rl/actor_keys.h"
#include "rl/algorithm_keys.h"
#include "rl/distill.h"
#include "rl/loss.h"
#include "rl/metrics.h"
#include "rl/replay.h"
#include "rl/rewards.h"
#include "rl/token_plan.h"
#include "rl/types.h"
#include "rollout/rollout.h"

namespace pare {

struct GrpoKeys {
  AlgorithmKeys algorithm;
  RewardKeys reward_model;
  ActorKeys actor;
  LearnerKeys learner;
  DistillKeys distill;
  KvSpec kv;  // of the sampler
  float temperature = 1;
  Truncation truncation = {};
  std::vector<int32_t> eos;  // any of them ends a response, as does `stop`; none: only its length does
  Stop stop = {};
  int64_t max_response_length = 0, total_training_steps = 0;
  uint64_t seed = 0;
  int64_t skip_nonfinite = 0;  // AdamWOptions
  bool exact = false;          // the sampler's log-probs are the policy's, bit by bit
  bool full = false;           // so is the whole distribution of every token (exact.full)
  bool checks = false;         // they are compared with those of the learner that attends as the sampler does
};

// Components of the engine; they must outlive Grpo.
struct GrpoEngine {
  const Model& model;      // the policy
  const Model* reference;  // the initial one, where a KL needs it; else null
  Rollout& rollout;
  Learner& learner;
  Learner* student;  // of the adapters that the sampler has and the policy has not (distill.h); else null
  Arena& activations;
  LearnerOptions options;
  Tensor sampler_states;  // act [responses of a batch * max_response_length, C], or absent: nothing needs them
};

// Callbacks of the algorithm.
struct GrpoRun {
  std::function<std::vector<Request>()> prompts;  // the next batch; as many uids each as a group has members
  // Returns the verifier's score, before shaping, of each response: the request's prefix and the completion.
  std::function<std::vector<double>(std::span<const Request>, std::span<const Completion>)> scores;
  // Reports progress: stage, done, all.  While the stage is "rollout" no parameter has changed.
  std::function<void(const char* stage, int64_t done, int64_t all)> progress;
  // RPO: the entries that prefixes are taken from, changed at the end of a step only, and the rows of the last prompts.
  // Null: prompts come with the prefixes they are to have.
  PrefixCache* cache = nullptr;
  std::function<std::vector<PromptRow>()> rows = {};
  int64_t planned = 0;  // Sampling::planned; these alone are trained on
};

class Grpo {
 public:
  Grpo(GrpoKeys keys, const GrpoEngine& engine, GrpoRun run);

  // Step 1, 2, ...; every random draw is named by step + drawn.  Changes the parameters; what happened is in `metrics`.
  void step(int64_t step, Metrics& metrics, int64_t drawn = 0);
  const std::vector<Trajectory>& samples() const { return samples_; }  // of the last step, by groups

 private:
  std::vector<Trajectory> generate(int64_t step, Metrics& metrics);
  void set_prefixes(int64_t step, const Sampling& sampling, std::vector<Request>& requests);
  void update_cache(int64_t step, Metrics& metrics);
  void set_reference_logprobs(Metrics& metrics);
  void set_old_logprobs(Metrics& metrics);
  bool adapts_blocks() const;
  void adapt_blocks(int64_t step, Metrics& metrics);
  std::vector<std::span<Trajectory>> mini_batches();
  void update(int64_t step, std::span<const std::span<Trajectory>> batches, std::span<const TokenPlan> plans,
              bool on_policy, Metrics& metrics);
  TokenOuts accumulate(Learner& learner, const Update& update, const LossSpec& spec, const Model* reference);
  std::function<void(const RolloutStats&)> rollout_progress() const;
  uint64_t key(RngStream stream, int64_t step) const;

  const GrpoKeys keys_;
  const GrpoEngine engine_;
  const GrpoRun run_;
  std::vector<Trajectory> samples_;
  int64_t drawn_ = 0;  // of the step
  // State of a step of RPO.
  std::vector<PrefixVisit> visits_;
  std::vector<Trajectory> dropped_;  // of groups that dynamic sampling dropped
  PrefixCache first_;                // entries of rows that had none
};

}  // namespace pare
