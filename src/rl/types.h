// The record that travels through a GRPO step: one response, from the rollout to the learner.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "model/replay.h"

namespace pare {

// Decision of the rollout correction (corrections.h) on a response: not judged; in the loss; out of it.
enum class Ruling { none, accepted, rejected };

struct Trajectory {
  // From the rollout and the verifier.
  int32_t group = 0;                           // prompt of the batch
  int32_t shard = 0;                           // Group::shard
  int32_t member = 0;                          // response of the prompt, from 0
  uint64_t uid = 0;                            // sequence_uid: names its random draws
  std::vector<int32_t> prompt = {};            // token ids
  std::vector<int32_t> prefix = {};            // the response begins with it and it is not trained on (prefix_cache.h)
  std::vector<int32_t> tokens = {};            // the response behind its prefix, its EOS included
  int64_t given = 0;                           // of them the first, which are trained on but were not sampled
  std::vector<float> logprob = {};             // of each token, in the distribution it was drawn from; NaN: given
  std::vector<uint64_t> hashes = {};           // Completion::hashes; 0: given
  bool finished = false;                       // ended by an EOS or a stop; otherwise cut at the length limit
  std::optional<int32_t> sampler_row = {};     // Member::sampler_row
  std::shared_ptr<const KvTraces> trace = {};  // compressions of its cache, where the learner is to replay them
  std::shared_ptr<const KeptIds> kept = {};    // Completion::kept, where the learner cannot find them
  double score = 0;                            // the verifier's, before any shaping
  // rewards.h
  double length_reward = 0;  // what the length adds to the score
  double overlong = 0;       // overlong penalty, <= 0
  double kl_penalty = 0;     // KL in reward, before its coefficient
  double reward = 0;         // score + length_reward + overlong - kl_coef * kl_penalty
  // advantages.h, filters.h
  double advantage = 0;   // the same for every token
  bool filtered = false;  // its advantage, or any of its group, teaches too little; or it is truncated
  // Log-probs of each token: of the policy that the ratio refers to, none where it is that of the learner's own pass;
  // of the reference policy, where a KL needs them.
  std::optional<std::vector<float>> old_logprob = {}, ref_logprob = {};
  // OverlapProbs of old policy (p) and sampler (q) at each token, where the states of the sampler are kept.
  std::optional<std::vector<float>> overlap = {}, mass = {};
  // corrections.h, obrs.h: factors of each token's policy loss, and of its KL and entropy terms; none: 1.
  Ruling ruling = Ruling::none;
  std::optional<std::vector<double>> correction = {}, kl_correction = {};

  // Tokens that a verifier sees; of them those that were not sampled.
  int64_t response_length() const { return static_cast<int64_t>(prefix.size() + tokens.size()); }
  int64_t replayed() const { return static_cast<int64_t>(prefix.size()) + given; }

  // Not trained on.  The denominators of the loss say whether it counts.
  bool dropped() const { return filtered || ruling == Ruling::rejected; }
};

}  // namespace pare
