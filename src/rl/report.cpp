#include "rl/report.h"

#include <cmath>

namespace pare {

void set_summary(Metrics& metrics, const std::string& name, const Summary& s) {
  metrics.set(name + "/mean", s.mean());
  metrics.set(name + "/max", s.max());
  metrics.set(name + "/min", s.min());
}

void report_samples(const AlgorithmKeys& a, std::span<const Trajectory> samples, Metrics& metrics) {
  Summary score, reward, kl, advantage, filtered;
  for (const Trajectory& s : samples) {
    score.add(s.score);
    reward.add(s.reward);
    advantage.add(s.advantage);
    filtered.add(s.filtered);
    kl.add(s.kl_penalty / static_cast<double>(s.tokens.size()));
  }
  if (a.oversample.keep > 0) metrics.set("oversample/kept_score", score.mean());
  set_summary(metrics, "critic/rewards", reward);
  if (a.use_kl_in_reward) metrics.set("actor/reward_kl_penalty", kl.mean());  // per token, as verl
  set_summary(metrics, "critic/advantages", advantage);
  metrics.set("filter/small_adv_fraction", samples.empty() ? 0 : filtered.mean());
}

void report_plans(std::span<const Trajectory> samples, std::span<const TokenPlan> plans, Metrics& metrics) {
  Summary kept, weight, square;  // weight: of every response token, 0 where it is left out; unbiased: its mean is 1
  for (size_t i = 0; i < samples.size(); i++) {
    const auto tokens = std::ssize(samples[i].tokens);
    int64_t n = 0;
    for (int64_t t = 0; t < tokens; t++) {
      const double w = t < plans[i].length ? plans[i].weight[t] : 0;
      n += w != 0;
      weight.add(w);
      square.add(w * w);
    }
    kept.add(static_cast<double>(n) / static_cast<double>(tokens));
  }
  metrics.set("ht/kept_fraction", kept.mean());
  metrics.set("ht/weight_mean", weight.mean());
  metrics.set("ht/weight_max", weight.max());
  metrics.set("ht/ess", weight.mean() * weight.mean() / square.mean());  // part of the tokens
}

void UpdateTotals::add(const Update& update, const TokenOuts& out) {
  const TokenTerms& terms = update.terms;
  for (size_t r = 0; r < out.logprob.size(); r++) {
    pg_loss += terms.weight[r] * out.loss[r];
    entropy.add(out.entropy[r]);
    ppo_kl.add(std::isnan(terms.old_logprob[r]) ? 0 : terms.old_logprob[r] - out.logprob[r]);
    kl.add(out.kl[r]);
    clipped.add(out.clipped[r] == 1);
    clipped_dual.add(out.clipped[r] == 2);
  }
  sharing += out.sharing;
  loss_rows += std::ssize(out.logprob);
  for (const Group& g : update.groups) rows += packed_rows(g);
}

void UpdateTotals::check(const Update& update, const TokenOuts& out) {
  for (size_t r = 0; r < out.logprob.size(); r++) {
    if (std::isnan(update.sampler_logprob[r])) continue;  // not sampled
    const bool full = update.sampler_hash.empty() || out.hash[r] == update.sampler_hash[r];
    mismatches += static_cast<float>(out.logprob[r]) != update.sampler_logprob[r] || !full;
    checked++;
  }
}

void UpdateTotals::add_norm(double norm) {
  if (!std::isfinite(norm)) {
    nonfinite++;
    return;
  }
  grad_norm.add(norm);
  updates++;
}

void UpdateTotals::report(Metrics& m) const {
  m.set("actor/pg_loss", updates ? pg_loss / static_cast<double>(updates) : 0);
  m.set("actor/pg_clipfrac", clipped.mean());
  m.set("actor/pg_clipfrac_lower", clipped_dual.mean());
  m.set("actor/ppo_kl", ppo_kl.mean());
  m.set("actor/kl_loss", kl.mean());
  m.set("actor/entropy", entropy.mean());
  m.set("actor/grad_norm", grad_norm.mean());
  m.set("actor/updates", static_cast<double>(updates));
  m.set("actor/skipped_updates", static_cast<double>(skipped));
  m.set("tokens/trained", static_cast<double>(rows));
  m.set("tokens/loss", static_cast<double>(loss_rows));
  m.set("exact/checked_tokens", static_cast<double>(checked));
  if (checked > 0) m.set("exact/mismatch_tokens", static_cast<double>(mismatches));  // else 0 would be a claim
}

void UpdateTotals::report_student(Metrics& m) const {
  m.set("distill/pg_loss", updates ? pg_loss / static_cast<double>(updates) : 0);
  m.set("distill/pg_clipfrac", clipped.mean());
  m.set("distill/kl", kl.mean());
  m.set("distill/entropy", entropy.mean());
  m.set("distill/grad_norm", grad_norm.mean());
  m.set("distill/updates", static_cast<double>(updates));
  m.set("tokens/distilled", static_cast<double>(rows));
}

void UpdateTotals::report_sharing(Metrics& m) const {
  const auto ratio = [](int64_t a, int64_t b) { return static_cast<double>(a) / static_cast<double>(b); };
  if (sharing.read > 0) m.set("kv/blocks/overlap", ratio(sharing.again, sharing.read));
  if (sharing.run_read > 0) m.set("kv/blocks/union", ratio(BlockSharing::kRun * sharing.together, sharing.run_read));
}

}  // namespace pare
