#include "rl/shards.h"

#include <algorithm>

namespace pare {

void ShardTotals::add(const Learner& learner, const std::vector<Group>& groups) {
  const auto shards = static_cast<size_t>(learner.shards());
  if (shards == 1) return;
  const std::vector<int> shard_of = learner.shards_of(groups);
  const std::vector<int64_t> flops = learner.flops_of(groups);
  std::vector<int64_t> before(shards), after(shards), work(shards);
  for (size_t g = 0; g < groups.size(); g++) {
    const auto shard = static_cast<size_t>(shard_of[g]);
    before[static_cast<size_t>(groups[g].shard)] += packed_rows(groups[g]);
    after[shard] += packed_rows(groups[g]);
    work[shard] += flops[g];
  }
  Summary per_shard;
  for (size_t s = 0; s < shards; s++) {
    sampled_.add(static_cast<double>(before[s]));
    balanced_.add(static_cast<double>(after[s]));
    per_shard.add(static_cast<double>(work[s]));
  }
  groups_.add(static_cast<double>(groups.size()) / static_cast<double>(shards));
  idle_.add(static_cast<double>(std::count(after.begin(), after.end(), 0)) / static_cast<double>(shards));
  imbalance_.add(per_shard.max() / per_shard.mean());
}

void ShardTotals::report(Metrics& m) const {
  if (groups_.count() == 0) return;
  m.set("global_seqlen/mean", sampled_.mean());
  m.set("global_seqlen/max", sampled_.max());
  m.set("global_seqlen/min", sampled_.min());
  m.set("global_seqlen/minmax_diff", sampled_.max() - sampled_.min());
  m.set("global_seqlen/balanced_min", balanced_.min());
  m.set("global_seqlen/balanced_max", balanced_.max());
  m.set("shards/groups", groups_.min());
  m.set("shards/idle", idle_.max());
  m.set("shards/imbalance", imbalance_.max());
}

}  // namespace pare
