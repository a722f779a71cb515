#include "rl/rewards.h"

#include <cmath>

#include "ops/token_loss.h"

namespace pare {

double overlong_penalty(int64_t length, int64_t max_response_length, const OverlongKeys& keys) {
  expect(keys.len > 0, "overlong_penalty: a buffer of ", keys.len, " tokens");
  const int64_t excess = length - (max_response_length - keys.len);
  if (excess <= 0) return 0;
  return -static_cast<double>(excess) / static_cast<double>(keys.len) * keys.penalty_factor;
}

double kl_in_reward(KlLoss kind, std::span<const float> logprob, std::span<const float> ref_logprob) {
  expect(kind == KlLoss::k1 || kind == KlLoss::k2 || kind == KlLoss::k3, "kl_in_reward: not a sampled estimator");
  expect(logprob.size() == ref_logprob.size(), "kl_in_reward: ", logprob.size(), " log-probs, ", ref_logprob.size(),
         " of the reference");
  LossSpec spec;
  spec.kl = kind;
  double sum = 0;
  for (size_t t = 0; t < logprob.size(); t++) {
    const double lp = logprob[t];
    sum += token_loss<double>(spec, lp, lp, 0, 0, ref_logprob[t], [](double x) { return std::exp(x); }).kl;
  }
  return sum;
}

void shape_rewards(const RewardKeys& reward_model, const AlgorithmKeys& algorithm, int64_t max_response_length,
                   std::vector<Trajectory>& samples) {
  const OverlongKeys& overlong = reward_model.overlong_buffer;
  for (Trajectory& s : samples) {
    const auto length = static_cast<int64_t>(s.tokens.size());
    s.overlong = overlong.enable ? overlong_penalty(length, max_response_length, overlong) : 0;
    s.kl_penalty = 0;
    if (algorithm.use_kl_in_reward) {
      expect(s.old_logprob && s.ref_logprob, "a KL in the reward without log-probs of policy and reference");
      s.kl_penalty = kl_in_reward(algorithm.kl_penalty, *s.old_logprob, *s.ref_logprob);
    }
    s.reward = s.score + s.overlong - algorithm.kl_ctrl.kl_coef * s.kl_penalty;
  }
}

}  // namespace pare
