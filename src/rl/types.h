// The record that travels through a GRPO step: one response, from the rollout to the learner.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "model/replay.h"

namespace pare {

// What the rollout correction (corrections.h) says of a response: not judged; in; out of the loss.
enum class Ruling { none, accepted, rejected };

struct Trajectory {
  // From the rollout.
  int32_t group = 0;                      // prompt of the batch
  int32_t member = 0;                     // response of the prompt, from 0
  uint64_t uid = 0;                       // sequence_uid: names its random draws
  std::vector<int32_t> prompt;            // token ids
  std::vector<int32_t> tokens;            // the response, its EOS included
  std::vector<float> logprob;             // of each token of the response, under the distribution it was drawn from
  bool finished = false;                  // ended by an EOS; otherwise cut at the length limit
  std::optional<int32_t> sampler_row;     // Member::sampler_row
  std::shared_ptr<const KvTraces> trace;  // events of its cache, where the learner is to replay them
  // From the stages, each written by one of them.
  double score = 0;                // the verifier's, before any shaping
  double overlong = 0;             // overlong penalty, <= 0
  double kl_penalty = 0;           // KL in reward, before its coefficient
  double reward = 0;               // score + overlong - kl_coef * kl_penalty
  double advantage = 0;            // the same for every token
  bool dropped = false;            // not trained on; the denominators say whether it counts
  std::vector<float> old_logprob;  // of the policy that the ratio refers to; empty: the pass's own
  std::vector<float> ref_logprob;  // of the reference policy; empty: no KL
  Ruling verdict = Ruling::none;
  std::vector<double> correction;     // factor of each token's policy loss; empty: 1
  std::vector<double> kl_correction;  // of its KL and entropy terms; empty: 1
  std::vector<float> overlap, mass;   // OverlapProbs of old policy (p) and sampler (q) at each token; empty: unknown
};

}  // namespace pare
