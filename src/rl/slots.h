// Metrics of the division of updates into slots.
#pragma once
#include "model/learner.h"
#include "rl/metrics.h"

namespace pare {

class SlotTotals {
 public:
  void add(const Learner& learner, const std::vector<Group>& groups);  // of an update
  // global_seqlen/*, slots/*; nothing where all is one slot.  They depend on lengths and slots alone, not on ranks.
  void report(Metrics& metrics) const;

 private:
  Summary sampled_, balanced_;         // rows of a slot in which they were sampled, are trained
  Summary groups_, idle_, imbalance_;  // of the updates
};

}  // namespace pare
