// Rollout corrections (Sparse-RL, TIS, IcePop, verl's sequence variants): the sampler's policy is not the one that is
// trained, because it reads or keeps only a part of its keys and values.  With xi = pi_old / pi_sampler of each token,
// a response may be rejected, and the tokens of the others weighted.  xi is a constant outside the clip:
//
//   J = sum_i accepted_i sum_t f_it F(xi_it) min(w_it A_i, clip(w_it) A_i)       (Sparse-RL eq. 6-7)
//
// with w = pi / pi_old and f the token factors of aggregate.h, which count rejected responses too
// (actor.loss_denominator = valid).  KL and entropy terms are not weighted.
//
// Token weights correct the action at each state; the states are still the sampler's, so the gradient is
// biased in second order of the mismatch.  Only the product over the response removes that, at a variance that makes it
// unusable for long ones.
//
// Where this stands in a step: group advantages -> filter (DASH) -> dense old log-probs of what is left, over whole
// responses -> ruling -> weights -> token plan (NAT) -> pack.  Statistics over accepted samples need the ruling
// first, so then it is: groups without signal dropped where the filter is on (they stay without, whoever is rejected)
// -> old log-probs -> ruling -> advantages over the accepted -> filter.
#pragma once
#include <span>
#include <vector>

#include "ops/options.h"
#include "rl/types.h"

namespace pare {

enum class RolloutIs { none, paper, tis, icepop, released };
enum class RatioLevel { token, geometric };
enum class RolloutRs { none, token, sequence, geometric };
enum class GroupStatistics { all, accepted };

struct RolloutCorrectionKeys {
  double veto = 0;
  RolloutIs rollout_is = RolloutIs::none;
  RatioLevel rollout_is_level = RatioLevel::token;
  double rollout_is_threshold = 2;
  std::vector<double> rollout_is_bounds = {0.5, 5};
  RolloutRs rollout_rs = RolloutRs::none;
  std::vector<double> rollout_rs_threshold = {0.5, 2};
  double off_policy_mask_threshold = 0;
  bool score_centering = false;
  GroupStatistics group_statistics = GroupStatistics::all;
  double min_accepted = 0;
  bool acceptance = false;
  bool operator==(const RolloutCorrectionKeys&) const = default;
};

constexpr double kReleasedLow = 0.5, kReleasedHigh = 1.5;  // of Sparse-RL's code (mis.yaml)

// Some response may be rejected or some token weighted.
inline bool corrects(const RolloutCorrectionKeys& k) {
  return k.veto > 0 || k.rollout_is != RolloutIs::none || k.rollout_rs != RolloutRs::none;
}

// log xi of each token, in f32, unclamped; old_logprob must be there.
std::vector<float> log_ratios(const Trajectory& sample);

// False where the response is to be rejected: a raw log-ratio is less than log(veto), or the product or geometric mean
// of the ratios lies outside rollout_rs_threshold.
bool accepts(const RolloutCorrectionKeys& keys, std::span<const float> log_ratio);

// xi of each token: its own, or the geometric mean over the response.
std::vector<double> raw_weights(RatioLevel level, std::span<const float> log_ratio);

// F(xi) of each token; 0 where `rollout_rs` is token and xi of the token itself lies outside rollout_rs_threshold.  exp
// sees log-ratios clamped to +-20; xi is exactly 1 where the log-probs are equal.
//   paper    xi                    tis       min(xi, C)
//   icepop   xi inside the bounds, else 0    released  min(xi, 1.5) inside [0.5, 1.5], else 0, not yet normalised
std::vector<double> xi_weights(const RolloutCorrectionKeys& keys, std::span<const float> log_ratio);

// Returns the score centring that goes with the weights and token mask of `keys`.
Centring centring(const RolloutCorrectionKeys& keys);

// Rules on all samples that are not filtered, from their old log-probs.
void judge(const RolloutCorrectionKeys& keys, std::span<Trajectory> samples);

// correction and, with `released`, kl_correction of the accepted samples of one update.
//
// `released`, as Sparse-RL's code does it, also divides the weights by the mean of min(xi, 1.5) over all tokens of the
// judged responses, rejected ones too, and the sums of each response (KL and entropy too) by its tokens inside the
// bounds in place of all of them.  The code takes that mean over a micro-batch; here it is over the update, because how
// an update is split must change no bit.
void set_corrections(const RolloutCorrectionKeys& keys, std::span<Trajectory> update);

// Numbers of judged and accepted responses of an update.
struct Acceptance {
  int64_t judged = 0, accepted = 0;
};
Acceptance count_rulings(std::span<const Trajectory> update);
// False where min_accepted asks to skip the update.
bool enough_accepted(const RolloutCorrectionKeys& keys, const Acceptance& count);

}  // namespace pare
