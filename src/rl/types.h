// The record that travels through a GRPO step: one response, from the rollout to the learner.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "model/replay.h"

namespace pare {

struct Trajectory {
  // From the rollout.
  int32_t group = 0;                      // prompt of the batch
  int32_t member = 0;                     // response of the prompt, from 0
  uint64_t uid = 0;                       // sequence_uid: names its random draws
  std::vector<int32_t> prompt;            // token ids
  std::vector<int32_t> tokens;            // the response, its EOS included
  std::vector<float> logprob;             // of each token of the response, under the distribution it was drawn from
  bool finished = false;                  // ended by an EOS; otherwise cut at the length limit
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
};

}  // namespace pare
