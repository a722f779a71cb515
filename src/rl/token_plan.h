// Token subsets (NAT): which tokens of a response are trained on, and with what weight.
#pragma once
#include <cstdint>
#include <vector>

#include "rl/actor_keys.h"

namespace pare {

// Tokens [0, length) of the response are packed and go through the forward; token t of them adds weight[t] * its loss
// (0: not selected, no row of logits).  Denominators always count the whole response.
struct TokenPlan {
  int64_t length = 0;
  std::vector<double> weight;  // [length]
};

// Every token, weight 1.
TokenPlan full_plan(int64_t tokens);
// Uniform random subset: kept[t] was drawn with `probability`; weight 1 / probability, or 1 without Horvitz-Thompson.
TokenPlan urs_plan(const std::vector<bool>& kept, double probability, bool horvitz_thompson);
// Random prefix cut: tokens up to `cutoff`, which was drawn uniformly from {C .. tokens}, C = min(min_tokens, tokens).
// Token t (from 1) is kept with p = 1 for t <= C, else (tokens - t + 1) / (tokens - C + 1); weight 1 / p, or 1.
TokenPlan rpc_plan(int64_t tokens, int64_t min_tokens, int64_t cutoff, bool horvitz_thompson);
// Deterministic truncation: the first floor(fraction * tokens), at least one, weight 1.  Biased.
TokenPlan det_plan(int64_t tokens, double fraction);

// The plan of a response of `tokens` > 0 tokens.  key = rng_key(seed, RngStream::token_plan, step), uid of the sample;
// once per rollout batch.
TokenPlan draw_token_plan(const ActorKeys& keys, int64_t tokens, uint64_t key, uint64_t uid);

}  // namespace pare
