#include "rl/obrs.h"

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "rl/corrections.h"

namespace pare {

double obrs_accept(const ObrsKeys& keys, double xi) { return std::min(1.0, xi / keys.lambda); }

double obrs_weight(const ObrsKeys& keys, double xi, double z) {
  const double w = std::max(keys.lambda, xi) * (keys.state_weight == StateWeight::z ? z : 1);
  return keys.cap > 0 ? std::min(w, keys.cap) : w;
}

void set_obrs(const ObrsKeys& keys, uint64_t key, std::span<Trajectory> samples) {
  const double same = std::min(1.0, 1 / keys.lambda);
  for (Trajectory& s : samples) {
    if (s.ruling != Ruling::accepted) continue;
    const std::vector<float> d = log_ratios(s);
    std::vector<double>& correction = s.correction.emplace(d.size(), 0.0);
    for (size_t t = 0; t < d.size(); t++) {
      const double xi = std::exp(std::clamp(static_cast<double>(d[t]), -20.0, 20.0));
      const double coin = uniform_open(rng_word(key, s.uid, static_cast<uint32_t>(t), 0));
      if (coin < obrs_accept(keys, xi)) correction[t] = obrs_weight(keys, xi, s.mass ? (*s.mass)[t] : same);
    }
  }
}

}  // namespace pare
