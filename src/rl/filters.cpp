#include "rl/filters.h"

#include <algorithm>
#include <cmath>

namespace pare {

int64_t drop_small_advantages(double threshold, std::vector<Trajectory>& samples) {
  int64_t dropped = 0;
  for (Trajectory& s : samples) {
    s.dropped = std::abs(s.advantage) < threshold * (1 - 1e-9);
    dropped += s.dropped;
  }
  return dropped;
}

bool group_is_informative(std::span<const double> scores) {
  const auto [low, high] = std::minmax_element(scores.begin(), scores.end());
  return !scores.empty() && *low != *high;
}

}  // namespace pare
