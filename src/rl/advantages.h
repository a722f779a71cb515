// Group advantages: how much better a response was than the others of its prompt.
#pragma once
#include <span>
#include <vector>

#include "rl/algorithm_keys.h"
#include "rl/types.h"

namespace pare {

// Advantages of one group, R its rewards, mu their mean, in double and two passes:
//   grpo   (R - mu) / (std + adv_eps), std with n - 1 or n (adv_std), at least adv_std_floor; no division if
//          norm_adv_by_std_in_grpo is off   (GRPO: DeepSeekMath eq. 3; Dr. GRPO)
//   rloo   R - mean of the others = (R - mu) n / (n - 1)   (Ahmadian et al. 2024)
// Exactly 0 for all when all rewards are equal, so for a group of one too: rounding in mu would otherwise be blown up
// by 1 / adv_eps.  Equal scores with different shaped rewards (length, KL) do have advantages, as in verl and TRL.
// Error(non_finite) names the member whose reward is not finite.
std::vector<double> group_advantages(const AlgorithmKeys& keys, std::span<const double> rewards);

// Trajectory::advantage of a batch, from its rewards.  Members of a group may lie anywhere; rejected samples
// (corrections.h) count in none and get 0.
void set_advantages(const AlgorithmKeys& keys, std::vector<Trajectory>& samples);

}  // namespace pare
