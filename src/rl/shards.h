// Metrics of the division of updates into shards.
#pragma once
#include "model/learner.h"
#include "rl/metrics.h"

namespace pare {

class ShardTotals {
 public:
  void add(const Learner& learner, const std::vector<Group>& groups);  // of an update
  // global_seqlen/*, shards/*; nothing where all is one shard.  They depend on lengths and shards alone, not on ranks.
  void report(Metrics& metrics) const;

 private:
  Summary sampled_, balanced_;         // rows of a shard in which they were sampled, are trained
  Summary groups_, idle_, imbalance_;  // of the updates
};

}  // namespace pare
