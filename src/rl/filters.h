// Which groups and samples are worth training on.
#pragma once
#include <span>
#include <vector>

#include "rl/types.h"

namespace pare {

struct FilterGroupsKeys {
  bool enable = false;
  int64_t max_num_gen_batches = 10;
  bool operator==(const FilterGroupsKeys&) const = default;
};

// DASH's gradient filter: sets Trajectory::dropped where |A| < threshold; an advantage within 1e-9 relative of the
// threshold equals it and stays, so that 1 / G is not decided by rounding.  threshold 0 drops nothing.  Dropping only
// A = 0 leaves the policy gradient unchanged (with LossDenominator::valid); a KL or entropy term changes.  Rejected
// samples (corrections.h) stay as they are.  Returns how many are dropped.
int64_t drop_small_advantages(double threshold, std::vector<Trajectory>& samples);

// Sets Trajectory::dropped for the members of groups in which all advantages are 0: those of any part of such a group
// are 0 too.
void drop_groups_without_signal(std::span<Trajectory> samples);

// DAPO's dynamic sampling keeps a group if its scores (before any shaping) are not all equal.
bool group_is_informative(std::span<const double> scores);

}  // namespace pare
