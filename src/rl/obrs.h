// Rejection sampling with a budget (OBRS; Jackpot): of the tokens that the sampler drew from q, some are left out of
// the loss at random so that the rest is closer to the distribution p of the learner's old policy.
//
//   accept with probability a = min(1, xi / lambda), xi = p / q; weight of the accepted max(lambda, xi), capped
//
// min(1, xi / lambda) max(lambda, xi) = xi: without a cap the estimate is that of p at every state, exactly, with no
// normaliser.  state_weight = z multiplies it by Z = sum_v min(q_v, p_v / lambda), the part of the draws that are
// accepted at that state, as the paper's p / q' does: states where the two agree count more.
#pragma once
#include <span>

#include "rl/types.h"

namespace pare {

enum class StateWeight { none, z };

struct ObrsKeys {
  bool enable = false;
  double lambda = 1, cap = 3;
  StateWeight state_weight = StateWeight::none;
  int64_t top_k = 0;
  bool operator==(const ObrsKeys&) const = default;
};

// The probability to accept a token, and its weight then, given xi and Z of its state.
double obrs_accept(const ObrsKeys& keys, double xi);
double obrs_weight(const ObrsKeys& keys, double xi, double z);

// Writes the correction of all accepted samples (corrections.h), one coin a token, once per rollout batch: the coin of
// a token is a function of `key` = rng_key(seed, RngStream::obrs, step), the sample's uid and the position.  Z is
// Trajectory::mass; without it, for a rollout whose sampler is the old policy, min(1, 1 / lambda).
void set_obrs(const ObrsKeys& keys, uint64_t key, std::span<Trajectory> samples);

}  // namespace pare
