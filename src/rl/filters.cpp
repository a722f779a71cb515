#include "rl/filters.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace pare {

void drop_small_advantages(double threshold, std::span<Trajectory> samples) {
  for (Trajectory& s : samples)
    if (s.ruling != Ruling::rejected && std::abs(s.advantage) < threshold * (1 - 1e-9)) s.filtered = true;
}

void drop_groups_without_signal(std::span<Trajectory> samples) {
  std::map<int32_t, std::vector<double>> rewards;
  for (const Trajectory& s : samples) rewards[s.group].push_back(s.reward);
  for (Trajectory& s : samples)
    if (!group_is_informative(rewards.at(s.group))) s.filtered = true;
}

void drop_truncated(std::span<Trajectory> samples) {
  for (Trajectory& s : samples) s.filtered |= !s.finished;
}

bool group_is_informative(std::span<const double> values) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  return !values.empty() && *low != *high;
}

}  // namespace pare
