#include "rl/oversample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "rl/corrections.h"

namespace pare {

std::vector<size_t> best_members(std::span<const double> values, int64_t keep) {
  std::vector<size_t> members(values.size());
  std::iota(members.begin(), members.end(), size_t{0});
  if (std::ssize(members) <= keep) return members;
  std::stable_sort(members.begin(), members.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
  members.resize(static_cast<size_t>(keep));
  std::sort(members.begin(), members.end());
  return members;
}

std::vector<size_t> members_by_score(const OversampleKeys& keys, std::span<const double> scores) {
  const bool chooses = keys.keep > 0 && keys.by == OversampleBy::reward;
  return best_members(scores, chooses ? keys.keep : std::ssize(scores));
}

void keep_most_accepted(const OversampleKeys& keys, std::vector<Trajectory>& samples) {
  std::vector<Trajectory> kept;
  for (auto first = samples.begin(); first != samples.end();) {
    const auto last =
        std::find_if(first, samples.end(), [group = first->group](const Trajectory& s) { return s.group != group; });
    std::vector<double> acceptance;
    for (const Trajectory& s : std::span(first, last)) {
      const std::vector<float> d = log_ratios(s);
      const double sum = std::accumulate(d.begin(), d.end(), 0.0,
                                         [](double x, float log_xi) { return x + std::exp(std::min(log_xi, 0.0f)); });
      acceptance.push_back(sum / static_cast<double>(d.size()));
    }
    for (const size_t member : best_members(acceptance, keys.keep)) kept.push_back(std::move(first[member]));
    first = last;
  }
  samples = std::move(kept);
}

}  // namespace pare
