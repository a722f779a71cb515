#include "rl/slots.h"

#include <algorithm>

namespace pare {

void SlotTotals::add(const Learner& learner, const std::vector<Group>& groups) {
  const auto slots = static_cast<size_t>(learner.slots());
  if (slots == 1) return;
  const std::vector<int> slot_of = learner.slots_of(groups);
  const std::vector<int64_t> flops = learner.flops_of(groups);
  std::vector<int64_t> before(slots), after(slots), work(slots);
  for (size_t g = 0; g < groups.size(); g++) {
    const auto slot = static_cast<size_t>(slot_of[g]);
    before[static_cast<size_t>(groups[g].slot)] += packed_rows(groups[g]);
    after[slot] += packed_rows(groups[g]);
    work[slot] += flops[g];
  }
  Summary per_slot;
  for (size_t s = 0; s < slots; s++) {
    sampled_.add(static_cast<double>(before[s])), balanced_.add(static_cast<double>(after[s]));
    per_slot.add(static_cast<double>(work[s]));
  }
  groups_.add(static_cast<double>(groups.size()) / static_cast<double>(slots));
  idle_.add(static_cast<double>(std::count(after.begin(), after.end(), 0)) / static_cast<double>(slots));
  imbalance_.add(per_slot.max() / per_slot.mean());
}

void SlotTotals::report(Metrics& m) const {
  if (groups_.count() == 0) return;
  m.set("global_seqlen/mean", sampled_.mean());
  m.set("global_seqlen/max", sampled_.max());
  m.set("global_seqlen/min", sampled_.min());
  m.set("global_seqlen/minmax_diff", sampled_.max() - sampled_.min());
  m.set("global_seqlen/balanced_min", balanced_.min());
  m.set("global_seqlen/balanced_max", balanced_.max());
  m.set("slots/groups", groups_.min());
  m.set("slots/idle", idle_.max());
  m.set("slots/imbalance", imbalance_.max());
}

}  // namespace pare
