#include "rl/aggregate.h"

#include <map>

namespace pare {

std::vector<double> token_factors(const ActorKeys& keys, int64_t max_response_length,
                                  std::span<const Trajectory> samples) {
  int64_t sequences = 0, tokens = 0;
  std::map<int32_t, int64_t> group_tokens;
  for (const Trajectory& s : samples) {
    if (s.tokens.empty() || (keys.loss_denominator == LossDenominator::kept && s.dropped())) continue;
    const auto n = static_cast<int64_t>(s.tokens.size());
    sequences++;
    tokens += n;
    group_tokens[s.group] += n;
  }
  const auto n_sequences = static_cast<double>(sequences), n_groups = static_cast<double>(group_tokens.size());
  const auto scale = static_cast<double>(keys.loss_scale_factor > 0 ? keys.loss_scale_factor : max_response_length);

  std::vector<double> factors(samples.size(), 0.0);
  for (size_t i = 0; i < samples.size(); i++) {
    const Trajectory& s = samples[i];
    if (s.dropped() || s.tokens.empty()) continue;
    switch (keys.loss_agg_mode) {
      case LossAgg::token_mean:
        factors[i] = 1 / static_cast<double>(tokens);
        break;
      case LossAgg::seq_mean_token_mean:
        factors[i] = 1 / (n_sequences * static_cast<double>(s.tokens.size()));
        break;
      case LossAgg::group_token_mean:
        factors[i] = 1 / (n_groups * static_cast<double>(group_tokens.at(s.group)));
        break;
      case LossAgg::seq_mean_token_sum:
        factors[i] = 1 / n_sequences;
        break;
      case LossAgg::seq_mean_token_sum_norm:
        factors[i] = 1 / (n_sequences * scale);
        break;
    }
  }
  return factors;
}

}  // namespace pare
