#include "rl/loss.h"

#include <algorithm>

#include "rl/aggregate.h"

namespace pare {

LossSpec loss_spec(const ActorKeys& a, double temperature) {
  return {.policy = a.policy_loss.loss_mode,
          .kl = a.use_kl_loss ? a.kl_loss_type : KlLoss::none,
          .clip_low = static_cast<float>(a.clip_ratio_low),
          .clip_high = static_cast<float>(a.clip_ratio_high),
          .clip_c = static_cast<float>(a.clip_ratio_c),
          .kl_coef = static_cast<float>(a.kl_loss_coef),
          .entropy_coef = static_cast<float>(a.entropy_coeff),
          .temperature = static_cast<float>(temperature)};
}

Update make_update(const ActorKeys& actor, int64_t max_response_length, std::span<const Trajectory> samples,
                   std::span<const TokenPlan> plans) {
  const std::vector<double> factors = token_factors(actor, max_response_length, samples);
  Update update;
  int32_t group = -1;
  for (size_t i = 0; i < samples.size(); i++) {
    const Trajectory& s = samples[i];
    const TokenPlan& plan = plans[i];
    if (s.dropped || plan.length == 0) continue;
    if (update.groups.empty() || s.group != group) {
      update.groups.push_back({s.prompt, {}});
      update.sample_of.emplace_back();
      group = s.group;
    }
    Member m{{s.tokens.begin(), s.tokens.begin() + plan.length}, std::vector<TokenTerm>(plan.length), s.sampler_row};
    m.trace = s.trace;
    for (int64_t t = 0; t < plan.length; t++) {
      TokenTerm& term = m.terms[t];
      term.kept = plan.weight[t] != 0;
      term.weight = term.kl_weight = factors[i] * plan.weight[t];
      if (!s.correction.empty()) term.weight *= s.correction[t];
      if (!s.kl_correction.empty()) term.kl_weight *= s.kl_correction[t];
      term.advantage = s.advantage;
      if (!s.old_logprob.empty()) term.old_logprob = s.old_logprob[t];
      if (!s.ref_logprob.empty()) term.ref_logprob = s.ref_logprob[t];
    }
    update.groups.back().members.push_back(std::move(m));
    update.sample_of.back().push_back(i);
  }
  return update;
}

void set_sequence_ratios(Update& update, const TokenOuts& now) {
  for (size_t g = 0; g < update.groups.size(); g++)
    for (size_t m = 0; m < update.groups[g].members.size(); m++) {
      auto& terms = update.groups[g].members[m].terms;
      double sum = 0;
      int64_t n = 0;
      for (size_t t = 0; t < terms.size(); t++)
        if (terms[t].kept) sum += now[g][m][t].logprob - terms[t].old_logprob, n++;
      for (TokenTerm& term : terms) term.log_ratio = n ? sum / static_cast<double>(n) : 0;
    }
}

std::vector<Group> response_groups(std::span<const Trajectory> samples,
                                   const std::function<bool(const Trajectory&)>& wanted) {
  std::vector<Group> groups;
  int32_t group = -1;
  for (const Trajectory& s : samples) {
    if (wanted && !wanted(s)) continue;
    if (groups.empty() || s.group != group) groups.push_back({s.prompt, {}});
    group = s.group;
    groups.back().members.push_back({s.tokens, {}, s.sampler_row, s.trace});
  }
  return groups;
}

}  // namespace pare
