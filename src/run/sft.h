// Next-token training on completions: the warm-up before RL, or all there is.
#pragma once
#include "run/training.h"

namespace pare {

// The loss is the mean of -log p over the response tokens of a batch (EOS included).  Batches are consecutive rows of
// the training set; the teacher's noise ramps up over the first data.noise_ramp of the steps.
class Sft : public Training {
 public:
  explicit Sft(Session& session);  // fails where a completion cannot be learnt from
  Metrics step() override;
  void worst_case_step() override;
  void largest_batches() override;

 private:
  std::vector<int32_t> completion(const Problem& problem, double ramp, Rng& rng) const;
};

}  // namespace pare
