// Budgets of block-sparse rollouts that follow the acceptance rate (Sparrow, arXiv 2606.08446: training is stable while
// its 5 % quantile is 0.86 or more, for which longer contexts need more blocks).
//
// Every rollout.kv.blocks.acceptance_steps steps, of each bin of contexts in which the step drew 200 tokens or more,
// with the quantile p of these tokens:
//
//   p < acceptance_target - 0.02   blocks * 1.25, rounded up
//   p > acceptance_target + 0.02   blocks / 1.1, rounded down
//
// and then, contexts ascending, at least as many as in the bin before.  Always at least the first and last blocks that
// are read anyway, and at most all of the longest context of a bin.
#pragma once
#include <span>
#include <vector>

#include "kv/spec.h"
#include "rl/metrics.h"

namespace pare {

// rollout.kv.blocks.count for each bin (mismatch.h) up to `max_context` tokens.  (A token after exactly 64, 128, ...
// others has the blocks of the bin before: it sees no more blocks.)
BlockBudget budget_by_context(const KvSpec& kv, int64_t max_context);

// `acceptance`: the rates of the tokens of a step, by bin.
BlockBudget adapted_budget(const KvSpec& kv, const BlockBudget& budget, std::span<const std::vector<float>> acceptance);

void report_budget(const BlockBudget& budget, Metrics& metrics);  // kv/blocks/context_...

}  // namespace pare
