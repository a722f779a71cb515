// From samples to what the learner packs: every per-token factor becomes one coefficient in the order
// filter, token plan, denominators, loss.
#pragma once
#include <functional>
#include <span>

#include "model/learner.h"
#include "rl/token_plan.h"
#include "rl/types.h"

namespace pare {

LossSpec loss_spec(const ActorKeys& actor, double temperature);
AdamWOptions optimizer_options(const ActorKeys& actor, double lr, uint64_t seed, int64_t skip_nonfinite = 0);

// The samples of one optimizer step, packed by group: dropped samples and tokens that their plan cuts are left out, and
// groups of which nothing is left.  `samples` are all those of the step (denominators count them, dropped or not), the
// members of a group next to one another.  The ratio of sample i refers to samples[i].old_logprob; where there is none,
// to the log-prob of the learner's own pass (ratio exactly 1).
struct Update {
  std::vector<Group> groups;
  TokenTerms terms;                    // [R], of the loss rows
  std::vector<float> sampler_logprob;  // [R], Trajectory::logprob
  std::vector<uint64_t> sampler_hash;  // [R], Trajectory::hashes, or none
  std::vector<size_t> sample_of;       // [M]: of each member its index in `samples`
};
Update make_update(const ActorKeys& actor, int64_t max_response_length, std::span<const Trajectory> samples,
                   std::span<const TokenPlan> plans);

// Gives every token of a gspo update its sequence's mean log-ratio; `now`: log-probs under the present parameters.
void set_sequence_ratios(Update& update, const TokenOuts& now);

// Off-policy sequence masking (DeepSeek-V3.2, eq. 9): takes the policy loss of a response out whose advantage is
// negative and whose log-ratio of sampler to policy, the mean over its sampled tokens in the loss, exceeds `threshold`.
// Its KL and entropy terms stay, and the denominators.  `now`: log-probs under the present parameters.  Returns the
// number of responses that are masked.
int64_t mask_off_policy(double threshold, Update& update, const TokenOuts& now);

// Whole responses as groups without loss terms, for log-probs: all, or those that are `wanted`.
std::vector<Group> response_groups(std::span<const Trajectory> samples,
                                   const std::function<bool(const Trajectory&)>& wanted = {});

}  // namespace pare
