// Reward shaping: what is added to a verifier's score before the advantages.
#pragma once
#include <span>
#include <vector>

#include "rl/algorithm_keys.h"
#include "rl/types.h"

namespace pare {

struct OverlongKeys {
  bool enable = false;
  int64_t len = 0;
  double penalty_factor = 1;
  bool operator==(const OverlongKeys&) const = default;
};
enum class LengthReference { all, correct };

struct LengthRewardKeys {
  bool enable = false;
  double alpha = 0.01;
  LengthReference reference = LengthReference::all;
  bool operator==(const LengthRewardKeys&) const = default;
};
struct RewardKeys {
  OverlongKeys overlong_buffer = {};
  LengthRewardKeys length_reward = {};
  bool operator==(const RewardKeys&) const = default;
};

// DAPO's soft overlong punishment as verl computes it (DAPO eq. 13, without the cap at -penalty_factor: a response is
// never longer than the limit): min(0, -(length - (max_response_length - len)) / len * penalty_factor), <= 0.
// `length` counts tokens of the response, EOS included.  Needs keys.len > 0.
double overlong_penalty(int64_t length, int64_t max_response_length, const OverlongKeys& keys);

// RPO's length-aware reward (eq. 11) of one group, r its scores: clip(r sigmoid(alpha (lref - length)), .5, 1), lref
// the mean length of all members or of those with r > 0.  A score of 0 or less stays as it is, as in RPO's code; the
// equation as printed makes .5 of it too.
std::vector<double> length_rewards(const LengthRewardKeys& keys, std::span<const double> scores,
                                   std::span<const int64_t> lengths);

// The rewards of one group before any KL: length_rewards() where that is on, plus overlong_penalty().
std::vector<double> group_rewards(const RewardKeys& keys, int64_t max_response_length, std::span<const double> scores,
                                  std::span<const int64_t> lengths);

// Sum over the tokens of the estimate of KL(policy || reference), `kind` k1, k2 or k3 of token_loss.h.  Both spans have
// one log-prob per token.
double kl_in_reward(KlLoss kind, std::span<const float> logprob, std::span<const float> ref_logprob);

// length_reward, overlong, kl_penalty and reward of every sample, from score, length and, with use_kl_in_reward,
// old_logprob and ref_logprob.  Lengths are those of whole responses; members of a group may lie anywhere.
void shape_rewards(const RewardKeys& reward_model, const AlgorithmKeys& algorithm, int64_t max_response_length,
                   std::vector<Trajectory>& samples);

}  // namespace pare
