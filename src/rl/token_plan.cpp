#include "rl/token_plan.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/rng.h"

namespace pare {

TokenPlan full_plan(int64_t tokens) { return {tokens, std::vector<double>(static_cast<size_t>(tokens), 1.0)}; }

TokenPlan urs_plan(const std::vector<bool>& kept, double probability, bool horvitz_thompson) {
  TokenPlan plan = full_plan(static_cast<int64_t>(kept.size()));
  for (size_t t = 0; t < kept.size(); t++) plan.weight[t] = !kept[t] ? 0 : horvitz_thompson ? 1 / probability : 1;
  return plan;
}

TokenPlan rpc_plan(int64_t tokens, int64_t min_tokens, int64_t cutoff, bool horvitz_thompson) {
  const int64_t c = std::min(min_tokens, tokens);
  expect(c <= cutoff && cutoff <= tokens, "rpc_plan: cutoff ", cutoff, " outside ", c, " .. ", tokens);
  TokenPlan plan = full_plan(cutoff);
  for (int64_t t = c + 1; horvitz_thompson && t <= cutoff; t++)
    plan.weight[static_cast<size_t>(t - 1)] = static_cast<double>(tokens - c + 1) / static_cast<double>(tokens - t + 1);
  return plan;
}

TokenPlan det_plan(int64_t tokens, double fraction) {
  const auto first = static_cast<int64_t>(std::floor(fraction * static_cast<double>(tokens) + 1e-9));  // .29 * 100 = 29
  return full_plan(std::clamp<int64_t>(first, 1, tokens));
}

TokenPlan draw_token_plan(const ActorKeys& keys, int64_t tokens, uint64_t key, uint64_t uid) {
  expect(tokens > 0, "draw_token_plan: an empty response");
  switch (keys.token_subset) {
    case TokenSubset::none:
      break;
    case TokenSubset::urs: {
      std::vector<bool> kept(static_cast<size_t>(tokens));
      for (size_t t = 0; t < kept.size(); t++)
        kept[t] = uniform_open(rng_word(key, uid, static_cast<uint32_t>(t), 0)) < keys.urs_probability;
      return urs_plan(kept, keys.urs_probability, keys.token_subset_ht);
    }
    case TokenSubset::rpc: {
      const int64_t c = std::min(keys.rpc_min_tokens, tokens);
      const int64_t cutoff = c + Rng(key, uid).below(static_cast<uint32_t>(tokens - c + 1));
      return rpc_plan(tokens, keys.rpc_min_tokens, cutoff, keys.token_subset_ht);
    }
    case TokenSubset::det:
      return det_plan(tokens, keys.det_fraction);
  }
  return full_plan(tokens);
}

}  // namespace pare
