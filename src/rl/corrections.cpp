#include "rl/corrections.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace pare {

namespace {

double ratio(double log_ratio) { return std::exp(std::clamp(log_ratio, -20.0, 20.0)); }
double sum(std::span<const float> x) { return std::accumulate(x.begin(), x.end(), 0.0); }
double mean(std::span<const float> x) { return x.empty() ? 0 : sum(x) / static_cast<double>(x.size()); }
bool inside(double x, double low, double high) { return x >= low && x <= high; }

double weight(const RolloutCorrectionKeys& keys, double xi) {
  switch (keys.rollout_is) {
    case RolloutIs::none:
      return 1;
    case RolloutIs::paper:
      return xi;
    case RolloutIs::tis:
      return std::min(xi, keys.rollout_is_threshold);
    case RolloutIs::icepop:
      return inside(xi, keys.rollout_is_bounds[0], keys.rollout_is_bounds[1]) ? xi : 0;
    case RolloutIs::released:
      return inside(xi, kReleasedLow, kReleasedHigh) ? xi : 0;
  }
  return 1;
}

// Ends `released`, which needs the weights of all samples.
void finish_released(std::span<Trajectory> update) {
  double total = 0;
  int64_t tokens = 0;
  for (const Trajectory& s : update) {
    if (s.ruling == Ruling::none) continue;
    for (const float d : log_ratios(s)) {
      total += std::min(ratio(d), kReleasedHigh);
      tokens++;
    }
  }
  const double normaliser = total / static_cast<double>(tokens);
  for (Trajectory& s : update) {
    if (!s.correction) continue;
    const auto kept = std::count_if(s.correction->begin(), s.correction->end(), [](double w) { return w != 0; });
    const double denominator = static_cast<double>(s.tokens.size()) / static_cast<double>(std::max<int64_t>(kept, 1));
    s.kl_correction.emplace();
    for (double& w : *s.correction) {
      s.kl_correction->push_back(w != 0 ? denominator : 0);
      w = w / normaliser * denominator;
    }
  }
}

}  // namespace

std::vector<float> log_ratios(const Trajectory& s) {
  expect(s.old_logprob && s.old_logprob->size() == s.logprob.size(), "a response without old log-probs of its ",
         s.logprob.size(), " tokens");
  std::vector<float> d(s.logprob.size());
  for (size_t t = 0; t < d.size(); t++) d[t] = (*s.old_logprob)[t] - s.logprob[t];
  return d;
}

bool accepts(const RolloutCorrectionKeys& keys, std::span<const float> log_ratio) {
  if (keys.veto > 0) {
    const auto least = static_cast<float>(std::log(keys.veto));
    if (std::any_of(log_ratio.begin(), log_ratio.end(), [&](float d) { return d < least; })) return false;
  }
  if (keys.rollout_rs == RolloutRs::none || keys.rollout_rs == RolloutRs::token) return true;
  const double log_value = keys.rollout_rs == RolloutRs::sequence ? sum(log_ratio) : mean(log_ratio);
  return inside(ratio(log_value), keys.rollout_rs_threshold[0], keys.rollout_rs_threshold[1]);
}

std::vector<double> raw_weights(RatioLevel level, std::span<const float> log_ratio) {
  std::vector<double> xi(log_ratio.size());
  if (level == RatioLevel::token)
    std::transform(log_ratio.begin(), log_ratio.end(), xi.begin(), ratio);
  else
    std::fill(xi.begin(), xi.end(), ratio(mean(log_ratio)));
  return xi;
}

std::vector<double> xi_weights(const RolloutCorrectionKeys& keys, std::span<const float> log_ratio) {
  std::vector<double> w = raw_weights(keys.rollout_is_level, log_ratio);
  for (double& x : w) x = weight(keys, x);
  if (keys.rollout_rs == RolloutRs::token)
    for (size_t t = 0; t < w.size(); t++)
      if (!inside(ratio(log_ratio[t]), keys.rollout_rs_threshold[0], keys.rollout_rs_threshold[1])) w[t] = 0;
  return w;
}

Centring centring(const RolloutCorrectionKeys& keys) {
  Centring c{.on = keys.score_centering, .by_ratio = keys.rollout_is != RolloutIs::none};
  const auto within = [&](const std::vector<double>& bounds) {
    c.low = std::max(c.low, static_cast<float>(bounds[0]));
    c.high = std::min(c.high, static_cast<float>(bounds[1]));
  };
  if (keys.rollout_is == RolloutIs::tis) c.cap = static_cast<float>(keys.rollout_is_threshold);
  if (keys.rollout_is == RolloutIs::icepop) within(keys.rollout_is_bounds);
  if (keys.rollout_rs == RolloutRs::token) within(keys.rollout_rs_threshold);
  return c;
}

void judge(const RolloutCorrectionKeys& keys, std::span<Trajectory> samples) {
  for (Trajectory& s : samples)
    if (!s.filtered) s.ruling = accepts(keys, log_ratios(s)) ? Ruling::accepted : Ruling::rejected;
}

void set_corrections(const RolloutCorrectionKeys& keys, std::span<Trajectory> update) {
  if (keys.rollout_is == RolloutIs::none && keys.rollout_rs != RolloutRs::token) return;
  for (Trajectory& s : update)
    if (s.ruling == Ruling::accepted) s.correction = xi_weights(keys, log_ratios(s));
  if (keys.rollout_is == RolloutIs::released) finish_released(update);
}

Acceptance count_rulings(std::span<const Trajectory> update) {
  Acceptance count;
  for (const Trajectory& s : update) {
    count.judged += s.ruling != Ruling::none;
    count.accepted += s.ruling == Ruling::accepted;
  }
  return count;
}

bool enough_accepted(const RolloutCorrectionKeys& keys, const Acceptance& count) {
  return static_cast<double>(count.accepted) >= keys.min_accepted * static_cast<double>(count.judged);
}

}  // namespace pare
