#include "rl/block_budget.h"

#include <algorithm>

#include "rl/mismatch.h"

namespace pare {

namespace {

constexpr int64_t kLeastTokens = 200;
constexpr double kMargin = 0.02;

// Returns the blocks of the longest context of a bin: no token of the bin can read more.
int64_t most_blocks(const KvSpec& kv, size_t bin) {
  return std::max(kv.blocks.first + kv.blocks.last, first_context(bin + 1) / kv.blocks.size);
}

}  // namespace

BlockBudget budget_by_context(const KvSpec& kv, int64_t max_context) {
  std::vector<BlockBudget::Step> steps;
  for (size_t bin = 0; bin <= context_bin(max_context); bin++) {
    const int64_t from = bin == 0 ? 0 : first_context(bin) / kv.blocks.size + 1;
    steps.push_back({from, std::min(kv.blocks.count, most_blocks(kv, bin))});
  }
  return BlockBudget(std::move(steps));
}

BlockBudget adapted_budget(const KvSpec& kv, const BlockBudget& budget,
                           std::span<const std::vector<float>> acceptance) {
  std::vector<BlockBudget::Step> steps = budget.steps();
  int64_t least = kv.blocks.first + kv.blocks.last;
  for (size_t bin = 0; bin < steps.size(); bin++) {
    int64_t& blocks = steps[bin].blocks;
    if (bin < acceptance.size() && std::ssize(acceptance[bin]) >= kLeastTokens) {
      std::vector<float> rates = acceptance[bin];
      const double p = quantile(rates, 0.05);
      if (p < kv.blocks.acceptance_target - kMargin) blocks = std::min((5 * blocks + 3) / 4, most_blocks(kv, bin));
      if (p > kv.blocks.acceptance_target + kMargin) blocks = 10 * blocks / 11;
    }
    least = blocks = std::max(blocks, least);
  }
  return BlockBudget(std::move(steps));
}

void report_budget(const BlockBudget& budget, Metrics& metrics) {
  for (size_t bin = 0; bin < budget.steps().size(); bin++)
    metrics.set(cat("kv/blocks/", context_name(bin)), static_cast<double>(budget.steps()[bin].blocks));
}

}  // namespace pare
