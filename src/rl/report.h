// Metrics of a step of GRPO, counted over its samples and updates.
#pragma once
#include <span>
#include <string>

#include "rl/algorithm_keys.h"
#include "rl/loss.h"
#include "rl/metrics.h"
#include "rl/token_plan.h"
#include "rl/types.h"

namespace pare {

void set_summary(Metrics& metrics, const std::string& name, const Summary& summary);  // NAME/mean, /max, /min
// Rewards and advantages of the samples that updates are made of: critic/*, filter/*.
void report_samples(const AlgorithmKeys& keys, std::span<const Trajectory> samples, Metrics& metrics);
// The weights of their tokens (NAT): ht/*.
void report_plans(std::span<const Trajectory> samples, std::span<const TokenPlan> plans, Metrics& metrics);

// Sums over the updates of a step.
struct UpdateTotals {
  Summary entropy, ppo_kl, kl, clipped, clipped_dual, grad_norm;
  double pg_loss = 0;
  int64_t updates = 0, skipped = 0, nonfinite = 0, rows = 0, loss_rows = 0, checked = 0, mismatches = 0;
  int64_t responses = 0, masked = 0;  // of mask_off_policy()
  BlockSharing sharing;

  void add(const Update& update, const TokenOuts& out);
  // The promise: what the sampler logged is, bit by bit, what the learner computes (trainer.exact = false: near that).
  void check(const Update& update, const TokenOuts& out);
  void add_norm(double norm);  // of Learner::step

  void report(Metrics& m) const;          // actor/*, tokens/*, exact/*
  void report_sharing(Metrics& m) const;  // kv/blocks/{overlap,union}
  void report_student(Metrics& m) const;  // distill/*: of phase B, whose check report() has
};

}  // namespace pare
