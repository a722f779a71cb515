#include "rl/rewards.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "ops/token_loss.h"

namespace pare {

double overlong_penalty(int64_t length, int64_t max_response_length, const OverlongKeys& keys) {
  expect(keys.len > 0, "overlong_penalty: a buffer of ", keys.len, " tokens");
  const int64_t excess = length - (max_response_length - keys.len);
  if (excess <= 0) return 0;
  return -static_cast<double>(excess) / static_cast<double>(keys.len) * keys.penalty_factor;
}

std::vector<double> length_rewards(const LengthRewardKeys& keys, std::span<const double> scores,
                                   std::span<const int64_t> lengths) {
  expect(scores.size() == lengths.size(), scores.size(), " scores of ", lengths.size(), " responses");
  double sum = 0, count = 0;
  for (size_t i = 0; i < scores.size(); i++)
    if (keys.reference == LengthReference::all || scores[i] > 0) {
      sum += static_cast<double>(lengths[i]);
      count++;
    }
  std::vector<double> rewards(scores.begin(), scores.end());
  for (size_t i = 0; i < scores.size(); i++) {
    if (scores[i] <= 0) continue;
    const double shorter = count > 0 ? sum / count - static_cast<double>(lengths[i]) : 0;
    rewards[i] = std::clamp(scores[i] / (1 + std::exp(-keys.alpha * shorter)), 0.5, 1.0);
  }
  return rewards;
}

std::vector<double> group_rewards(const RewardKeys& keys, int64_t max_response_length, std::span<const double> scores,
                                  std::span<const int64_t> lengths) {
  std::vector<double> rewards = keys.length_reward.enable ? length_rewards(keys.length_reward, scores, lengths)
                                                          : std::vector<double>(scores.begin(), scores.end());
  for (size_t i = 0; i < rewards.size() && keys.overlong_buffer.enable; i++)
    rewards[i] += overlong_penalty(lengths[i], max_response_length, keys.overlong_buffer);
  return rewards;
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

// Sets the rewards before penalties.
static void set_length_rewards(const LengthRewardKeys& keys, std::vector<Trajectory>& samples) {
  std::map<int32_t, std::vector<Trajectory*>> groups;
  for (Trajectory& s : samples) {
    s.length_reward = 0;
    s.reward = s.score;
    groups[s.group].push_back(&s);
  }
  if (!keys.enable) return;
  for (const auto& [group, members] : groups) {
    std::vector<double> scores;
    std::vector<int64_t> lengths;
    for (const Trajectory* s : members) {
      scores.push_back(s->score);
      lengths.push_back(s->response_length());
    }
    const std::vector<double> rewards = length_rewards(keys, scores, lengths);
    for (size_t i = 0; i < members.size(); i++) {
      members[i]->length_reward = rewards[i] - scores[i];
      members[i]->reward = rewards[i];
    }
  }
}

void shape_rewards(const RewardKeys& reward_model, const AlgorithmKeys& algorithm, int64_t max_response_length,
                   std::vector<Trajectory>& samples) {
  const OverlongKeys& overlong = reward_model.overlong_buffer;
  set_length_rewards(reward_model.length_reward, samples);
  for (Trajectory& s : samples) {
    const int64_t length = s.response_length();
    s.overlong = overlong.enable ? overlong_penalty(length, max_response_length, overlong) : 0;
    s.kl_penalty = 0;
    if (algorithm.use_kl_in_reward) {
      expect(s.old_logprob && s.ref_logprob, "a KL in the reward without log-probs of policy and reference");
      s.kl_penalty = kl_in_reward(algorithm.kl_penalty, *s.old_logprob, *s.ref_logprob);
    }
    s.reward = s.reward + s.overlong - algorithm.kl_ctrl.kl_coef * s.kl_penalty;
  }
}

}  // namespace pare
