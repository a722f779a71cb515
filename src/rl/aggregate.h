// Aggregation of token losses to one number: the factor of each token, fixed once per optimizer step.
#pragma once
#include <span>
#include <vector>

#include "rl/actor_keys.h"
#include "rl/types.h"

namespace pare {

// Factors f with L = sum over samples i, tokens t of f_i l_it, for all samples of one optimizer step, filtered or not.
// n_i tokens of response i, N responses with tokens, P prompts with such responses:
//   token-mean                1 / sum n
//   seq-mean-token-mean       1 / (N n_i)
//   group-token-mean          1 / (P sum of n over the group)             (DAPO eq. 8, the mean inside each group)
//   seq-mean-token-sum        1 / N
//   seq-mean-token-sum-norm   1 / (N loss_scale_factor), 0: max_response_length   (Dr. GRPO)
// LossDenominator::valid counts every sample of the step, whatever filters, vetoes or token subsets do later; kept
// leaves out dropped samples.  A dropped or empty sample has factor 0.
std::vector<double> token_factors(const ActorKeys& keys, int64_t max_response_length,
                                  std::span<const Trajectory> samples);

}  // namespace pare
