#include "rl/advantages.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/text.h"

namespace pare {

std::vector<double> group_advantages(const AlgorithmKeys& keys, std::span<const double> rewards) {
  const size_t n = rewards.size();
  for (size_t i = 0; i < n; i++)
    if (!std::isfinite(rewards[i]))
      throw Error(Exit::non_finite,
                  cat("the reward of member ", i, " of a group is not finite: ", number_text(rewards[i])));
  std::vector<double> a(n, 0.0);
  const auto [low, high] = std::minmax_element(rewards.begin(), rewards.end());
  if (n == 0 || *low == *high) return a;

  const double count = static_cast<double>(n), mean = std::accumulate(rewards.begin(), rewards.end(), 0.0) / count;
  for (size_t i = 0; i < n; i++) a[i] = rewards[i] - mean;
  double scale = 1;
  if (keys.adv_estimator == AdvEstimator::rloo) {
    scale = count / (count - 1);
  } else if (keys.norm_adv_by_std_in_grpo) {
    const double squares = std::inner_product(a.begin(), a.end(), a.begin(), 0.0);
    const double variance = squares / (keys.adv_std == AdvStd::sample ? count - 1 : count);
    scale = 1 / (std::max(std::sqrt(variance), keys.adv_std_floor) + keys.adv_eps);
  }
  for (double& x : a) x *= scale;
  return a;
}

void set_advantages(const AlgorithmKeys& keys, std::vector<Trajectory>& samples) {
  std::map<int32_t, std::vector<Trajectory*>> groups;
  for (Trajectory& s : samples) {
    s.advantage = 0;
    if (s.ruling != Ruling::rejected) groups[s.group].push_back(&s);
  }
  for (auto& [group, members] : groups) {
    std::vector<double> rewards;
    for (const Trajectory* s : members) rewards.push_back(s->reward);
    const std::vector<double> a = group_advantages(keys, rewards);
    for (size_t i = 0; i < members.size(); i++) members[i]->advantage = a[i];
  }
}

}  // namespace pare
