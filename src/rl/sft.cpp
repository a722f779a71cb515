#include "rl/sft.h"

#include <algorithm>
#include <cmath>

#include "ops/data.h"
#include "rl/shards.h"

namespace pare {

TokenOuts sft_step(Learner& learner, const std::vector<Group>& groups, const AdamWOptions& options, Metrics& metrics,
                   const BatchProgress& progress) {
  TokenTerms terms(loss_row_offsets(groups).back());
  const auto tokens = static_cast<double>(terms.weight.size());
  std::fill(terms.weight.begin(), terms.weight.end(), 1 / tokens);
  TokenOuts out = learner.accumulate(groups, terms, {.policy = PolicyLoss::nll}, {}, progress);
  Summary loss, entropy;
  for (size_t r = 0; r < out.loss.size(); r++) {
    loss.add(out.loss[r]);
    entropy.add(out.entropy[r]);
  }
  int64_t rows = 0;
  for (const Group& g : groups) rows += packed_rows(g);
  metrics.set("train/loss", loss.mean());
  metrics.set("actor/entropy", entropy.mean());
  ShardTotals shards;
  shards.add(learner, groups);
  shards.report(metrics);
  const double norm = learner.step(options);
  metrics.set("actor/grad_norm", norm);
  if (options.skip_nonfinite > 0) metrics.set("actor/nonfinite_updates", !std::isfinite(norm));
  metrics.set("actor/lr", options.lr);
  metrics.set("tokens/trained", static_cast<double>(rows));
  metrics.set("tokens/loss", tokens);
  return out;
}

}  // namespace pare
