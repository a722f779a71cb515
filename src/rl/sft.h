// Next-token training on completions: the warm-up before RL, or all there is.
#pragma once
#include "model/learner.h"
#include "rl/actor_keys.h"
#include "rl/metrics.h"

namespace pare {

// One update on the mean of -log p over the tokens of the completions, which are the members of `groups`; returns what
// their loss rows gave.
TokenOuts sft_step(Learner& learner, const std::vector<Group>& groups, const AdamWOptions& options, Metrics& metrics,
                   const BatchProgress& progress);

}  // namespace pare
