#include "rl/filters.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace pare {

int64_t drop_small_advantages(double threshold, std::vector<Trajectory>& samples) {
  int64_t dropped = 0;
  for (Trajectory& s : samples) {
    if (s.verdict == Ruling::rejected) continue;  // left out for another reason
    s.dropped = std::abs(s.advantage) < threshold * (1 - 1e-9);
    dropped += s.dropped;
  }
  return dropped;
}

void drop_groups_without_signal(std::span<Trajectory> samples) {
  std::set<int32_t> signal;
  for (const Trajectory& s : samples)
    if (s.advantage != 0) signal.insert(s.group);
  for (Trajectory& s : samples) s.dropped = !signal.contains(s.group);
}

bool group_is_informative(std::span<const double> scores) {
  const auto [low, high] = std::minmax_element(scores.begin(), scores.end());
  return !scores.empty() && *low != *high;
}

}  // namespace pare
