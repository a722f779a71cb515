// Next-token training as a run.
#pragma once
#include "run/training.h"

namespace pare {

// Batches are consecutive rows of the training set; the teacher's noise ramps up over the first data.noise_ramp of the
// steps.
class SftTraining : public Training {
 public:
  explicit SftTraining(Session& session);  // fails where a completion cannot be learnt from
  Metrics step() override;
  void worst_case_step() override;
  void largest_batches() override;

 private:
  std::vector<int32_t> completion(const Problem& problem, double ramp, Rng& rng) const;
};

}  // namespace pare
