// Which groups and samples are worth training on.
#pragma once
#include <span>
#include <vector>

#include "rl/types.h"

namespace pare {

enum class FilterMetric { score, reward };  // of the verifier; that with shaping by length, before any KL

struct FilterGroupsKeys {
  bool enable = false;
  FilterMetric metric = FilterMetric::score;
  int64_t max_num_gen_batches = 10;
  bool operator==(const FilterGroupsKeys&) const = default;
};

// DASH's gradient filter: filters samples with |A| < threshold.  An advantage within 1e-9 relative of the threshold
// equals it and stays, so that 1 / G is not decided by rounding; threshold 0 filters nothing.  Filtering only A = 0
// leaves the policy gradient unchanged (with LossDenominator::valid); a KL or entropy term changes.  Rejected samples
// (corrections.h) are out for another reason.
void drop_small_advantages(double threshold, std::span<Trajectory> samples);

// Filters the members of groups whose rewards are all equal: the advantages of any part of such a group are 0.
void drop_groups_without_signal(std::span<Trajectory> samples);

// TRL's mask_truncated_completions, DAPO's overlong filtering: filters the responses that neither an EOS nor a stop
// ended.  Their rewards still count in the advantages of their group.
void drop_truncated(std::span<Trajectory> samples);

// DAPO's dynamic sampling keeps a group whose values of FilterGroupsKeys::metric are not all equal.
bool group_is_informative(std::span<const double> values);

}  // namespace pare
