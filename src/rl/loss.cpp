#include "rl/loss.h"

#include <algorithm>
#include <cmath>

#include "rl/aggregate.h"
#include "rl/metrics.h"

namespace pare {

// Returns the tokens that the members of a group share.
static std::vector<int32_t> shared_tokens(const Trajectory& s) {
  std::vector<int32_t> ids = s.prompt;
  ids.insert(ids.end(), s.prefix.begin(), s.prefix.end());
  return ids;
}

LossSpec loss_spec(const ActorKeys& a, double temperature) {
  return {.policy = a.policy_loss.loss_mode,
          .kl = a.use_kl_loss ? a.kl_loss_type : KlLoss::none,
          .clip_low = static_cast<float>(a.clip_ratio_low),
          .clip_high = static_cast<float>(a.clip_ratio_high),
          .clip_c = static_cast<float>(a.clip_ratio_c),
          .kl_coef = static_cast<float>(a.kl_loss_coef),
          .entropy_coef = static_cast<float>(a.entropy_coeff),
          .temperature = static_cast<float>(temperature),
          .kl_ratio = a.use_bias_correction_kl};
}

AdamWOptions optimizer_options(const ActorKeys& actor, double lr, uint64_t seed, int64_t skip_nonfinite) {
  const OptimKeys& o = actor.optim;
  return {.lr = lr,
          .beta1 = o.betas[0],
          .beta2 = o.betas[1],
          .eps = o.eps,
          .weight_decay = o.weight_decay,
          .max_norm = actor.grad_clip,
          .seed = seed,
          .skip_nonfinite = skip_nonfinite};
}

Update make_update(const ActorKeys& actor, int64_t max_response_length, std::span<const Trajectory> samples,
                   std::span<const TokenPlan> plans) {
  const std::vector<double> factors = token_factors(actor, max_response_length, samples);
  Update update;
  TokenTerms& terms = update.terms;
  int32_t group = -1;
  for (size_t i = 0; i < samples.size(); i++) {
    const Trajectory& s = samples[i];
    const TokenPlan& plan = plans[i];
    if (s.dropped() || plan.length == 0) continue;
    expect(!s.prompt.empty(), "a response without a prompt");
    if (update.groups.empty() || s.group != group) update.groups.push_back({shared_tokens(s), {}, s.shard});
    group = s.group;
    std::vector<bool> kept(plan.length);
    for (int64_t t = 0; t < plan.length; t++) {
      kept[t] = plan.weight[t] != 0;
      if (!kept[t]) continue;
      const double weight = factors[i] * plan.weight[t];
      terms.weight.push_back(s.correction ? weight * (*s.correction)[t] : weight);
      terms.kl_weight.push_back(s.kl_correction ? weight * (*s.kl_correction)[t] : weight);
      terms.advantage.push_back(s.advantage);
      terms.old_logprob.push_back(s.old_logprob ? (*s.old_logprob)[t] : std::numeric_limits<double>::quiet_NaN());
      terms.log_ratio.push_back(0);
      terms.ref_logprob.push_back(s.ref_logprob ? (*s.ref_logprob)[t] : 0);
      update.sampler_logprob.push_back(s.logprob[t]);
      if (!s.hashes.empty()) update.sampler_hash.push_back(s.hashes[t]);
    }
    update.groups.back().members.push_back(
        {{s.tokens.begin(), s.tokens.begin() + plan.length}, std::move(kept), s.sampler_row, s.trace, s.kept});
    update.sample_of.push_back(i);
  }
  return update;
}

void set_sequence_ratios(Update& update, const TokenOuts& now) {
  const std::vector<double>& old = update.terms.old_logprob;
  for (size_t m = 0; m < update.sample_of.size(); m++) {
    const int64_t begin = now.offsets[m], end = now.offsets[m + 1];
    double sum = 0;
    for (int64_t r = begin; r < end; r++) sum += now.logprob[r] - old[r];
    std::fill(update.terms.log_ratio.begin() + begin, update.terms.log_ratio.begin() + end,
              sum / static_cast<double>(end - begin));
  }
}

int64_t mask_off_policy(double threshold, Update& update, const TokenOuts& now) {
  TokenTerms& terms = update.terms;
  int64_t masked = 0;
  for (size_t m = 0; m < update.sample_of.size(); m++) {
    const int64_t begin = now.offsets[m], end = now.offsets[m + 1];
    if (begin == end || terms.advantage[begin] >= 0) continue;
    Summary apart;
    for (int64_t r = begin; r < end; r++)
      if (const float sampler = update.sampler_logprob[r]; !std::isnan(sampler)) apart.add(sampler - now.logprob[r]);
    if (apart.mean() <= threshold) continue;
    for (auto* column : {&terms.weight, &terms.advantage})  // the latter is centring's
      std::fill(column->begin() + begin, column->begin() + end, 0);
    masked++;
  }
  return masked;
}

std::vector<Group> response_groups(std::span<const Trajectory> samples,
                                   const std::function<bool(const Trajectory&)>& wanted) {
  std::vector<Group> groups;
  int32_t group = -1;
  for (const Trajectory& s : samples) {
    if (wanted && !wanted(s)) continue;
    if (groups.empty() || s.group != group) groups.push_back({shared_tokens(s), {}, s.shard});
    group = s.group;
    groups.back().members.push_back({s.tokens, {}, s.sampler_row, s.trace, s.kept});
  }
  return groups;
}

}  // namespace pare
