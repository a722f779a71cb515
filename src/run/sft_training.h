// Next-token training as a run.
#pragma once
#include "run/training.h"

namespace pare {

// Batches are consecutive rows of the training set; the teacher's noise ramps up over the fraction data.noise_ramp of
// the steps at the beginning.
class SftTraining : public Training {
 public:
  explicit SftTraining(Session& session);  // fails where a completion cannot be learnt from
  Metrics step() override;
  // With validates_by_loss(): val/loss, the mean of -log p over all tokens of the completions of session.val.
  Metrics evaluate() override;
  void worst_case_step() override;
  void largest_batches() override;

 private:
  Group group(const Task& task, const Problem& problem, double ramp, Rng& rng, int64_t shard) const;
};

}  // namespace pare
