#include "rl/mismatch.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "rl/corrections.h"

namespace pare {

namespace {

constexpr int64_t kFirstBin = 64;

double ratio(double log_ratio) { return std::exp(std::clamp(log_ratio, -20.0, 20.0)); }

struct Spread {
  Summary values, squares;
  void add(double x) {
    values.add(x);
    squares.add(x * x);
  }
  double deviation() const { return std::sqrt(std::max(0.0, squares.mean() - values.mean() * values.mean())); }
  double effective() const { return values.mean() * values.mean() / squares.mean(); }  // part of the sample
};

double part(int64_t count, int64_t all) { return static_cast<double>(count) / static_cast<double>(all); }

}  // namespace

size_t context_bin(int64_t context) { return std::bit_width(static_cast<uint64_t>(context / kFirstBin)); }
int64_t first_context(size_t bin) { return bin == 0 ? 0 : kFirstBin << (bin - 1); }
std::string context_name(size_t bin) { return cat("context_", first_context(bin), "_", first_context(bin + 1) - 1); }

double quantile(std::vector<float>& x, double q) {
  const auto rank = static_cast<int64_t>(std::ceil(q * static_cast<double>(x.size())));
  const auto i = std::clamp<int64_t>(rank - 1, 0, static_cast<int64_t>(x.size()) - 1);
  std::nth_element(x.begin(), x.begin() + i, x.end());
  return x[static_cast<size_t>(i)];
}

void Mismatch::add(std::span<const float> learner, std::span<const float> sampler, std::span<const float> overlap,
                   int64_t context) {
  expect(learner.size() == sampler.size() && (overlap.empty() || overlap.size() == learner.size()), learner.size(),
         " log-probs of the learner, ", sampler.size(), " of the sampler");
  if (learner.empty()) return;
  Summary l, s;
  float least = 0;
  for (size_t t = 0; t < learner.size(); t++) {
    const float d = learner[t] - sampler[t];
    l.add(learner[t]);
    s.add(sampler[t]);
    kl_.add(-static_cast<double>(d));
    k3_.add(ratio(d) - 1 - static_cast<double>(d));
    square_.add(ratio(d) * ratio(d));
    log_ratio_.push_back(d);
    least = t == 0 ? d : std::min(least, d);
  }
  least_.push_back(least);
  learner_log_ppl_.add(-l.mean());
  rollout_log_ppl_.add(-s.mean());
  learner_ppl_.add(std::exp(-l.mean()));
  rollout_ppl_.add(std::exp(-s.mean()));
  difference_.add(s.mean() - l.mean());
  abs_difference_.add(std::abs(s.mean() - l.mean()));
  ppl_ratio_.add(std::exp(s.mean() - l.mean()));
  for (size_t t = 0; t < overlap.size(); t++) {
    const size_t bin = context_bin(context + static_cast<int64_t>(t));
    if (acceptance_.size() <= bin) acceptance_.resize(bin + 1);
    acceptance_[bin].push_back(overlap[t]);
  }
}

void Mismatch::report(Metrics& m, double catastrophic) const {
  if (least_.empty()) return;
  const std::string name = "rollout_corr/";
  m.set(name + "kl", kl_.mean());
  m.set(name + "k3_kl", k3_.mean());
  m.set(name + "training_ppl", learner_ppl_.mean());
  m.set(name + "training_log_ppl", learner_log_ppl_.mean());
  m.set(name + "rollout_ppl", rollout_ppl_.mean());
  m.set(name + "rollout_log_ppl", rollout_log_ppl_.mean());
  m.set(name + "log_ppl_diff", difference_.mean());
  m.set(name + "log_ppl_abs_diff", abs_difference_.mean());
  m.set(name + "ppl_ratio", ppl_ratio_.mean());
  m.set(name + "chi2_token", square_.mean() - 1);

  std::vector<float> d = log_ratio_;
  Summary xi;
  for (const float x : d) xi.add(ratio(x));
  m.set(name + "xi_mean", xi.mean());
  m.set(name + "xi_min", xi.min());
  for (const auto& [label, q] :
       {std::pair{"xi_p0.1", 0.001}, {"xi_p1", 0.01}, {"xi_p50", 0.5}, {"xi_p99", 0.99}, {"xi_p99.9", 0.999}})
    m.set(name + label, ratio(quantile(d, q)));
  m.set(name + "xi_max", xi.max());

  const auto low = static_cast<float>(std::log(catastrophic));
  const auto below = [low](const std::vector<float>& x) {
    return part(std::count_if(x.begin(), x.end(), [low](float y) { return y < low; }), static_cast<int64_t>(x.size()));
  };
  m.set(name + "catastrophic_token_fraction", below(log_ratio_));
  m.set(name + "catastrophic_seq_fraction", below(least_));

  std::vector<float> all;
  for (const auto& bin : acceptance_) all.insert(all.end(), bin.begin(), bin.end());
  if (all.empty()) return;
  Summary rate;
  for (const float x : all) rate.add(x);
  m.set(name + "acceptance_rate", rate.mean());
  m.set(name + "acceptance_rate_p5", quantile(all, 0.05));
  for (size_t i = 0; i < acceptance_.size(); i++) {
    std::vector<float> bin = acceptance_[i];
    if (!bin.empty()) m.set(cat(name, "acceptance_rate_p5/", context_name(i)), quantile(bin, 0.05));
  }
}

// Returns the ratio below which a token and its response count as catastrophic, rejected or not.
static double catastrophic(const RolloutCorrectionKeys& keys) { return keys.veto > 0 ? keys.veto : 1e-4; }

static Mismatch mismatch_of(std::span<const Trajectory> samples) {
  Mismatch mismatch;
  for (const Trajectory& s : samples)
    if (s.old_logprob)
      mismatch.add(*s.old_logprob, s.logprob, s.overlap ? std::span<const float>(*s.overlap) : std::span<const float>(),
                   std::ssize(s.prompt) + std::ssize(s.prefix));
  return mismatch;
}

std::vector<std::vector<float>> acceptance_by_context(std::span<const Trajectory> samples) {
  return mismatch_of(samples).acceptance();
}

void report_mismatch(const RolloutCorrectionKeys& keys, std::span<const Trajectory> samples, Metrics& metrics) {
  mismatch_of(samples).report(metrics, catastrophic(keys));
}

void report_mismatch(const RolloutCorrectionKeys& keys, const Update& update, const TokenOuts& out, Metrics& metrics) {
  Mismatch mismatch;
  const std::vector<float> learner(out.logprob.begin(), out.logprob.end());
  for (size_t m = 0; m + 1 < out.offsets.size(); m++) {
    auto first = static_cast<size_t>(out.offsets[m]);
    const auto end = static_cast<size_t>(out.offsets[m + 1]);
    while (first < end && std::isnan(update.sampler_logprob[first])) first++;  // not sampled
    const size_t count = end - first;
    mismatch.add(std::span(learner).subspan(first, count), std::span(update.sampler_logprob).subspan(first, count));
  }
  mismatch.report(metrics, catastrophic(keys));
}

void report_corrections(const RolloutCorrectionKeys& keys, std::span<const Trajectory> samples, Metrics& m) {
  const Acceptance count = count_rulings(samples);
  const std::string name = "rollout_corr/";
  m.set(name + "judged_fraction", samples.empty() ? 0 : part(count.judged, static_cast<int64_t>(samples.size())));
  if (count.judged == 0) return;
  const double rejected = part(count.judged - count.accepted, count.judged);
  m.set(name + "rejection_rate", rejected);
  m.set(name + "rollout_rs_seq_masked_fraction", rejected);

  Summary raw, weight;
  Spread bounded_raw, applied;
  const double most = keys.rollout_is_threshold;
  int64_t tokens = 0, masked = 0, high = 0, low = 0;
  const bool icepop = keys.rollout_is == RolloutIs::icepop, released = keys.rollout_is == RolloutIs::released;
  const bool tokens_weighted = keys.rollout_is_level == RatioLevel::token;
  const bool bounded = tokens_weighted && (icepop || released);
  const bool capped = bounded || (tokens_weighted && keys.rollout_is == RolloutIs::tis);
  const double top = icepop ? keys.rollout_is_bounds[1] : released ? kReleasedHigh : keys.rollout_is_threshold;
  const double bottom = icepop ? keys.rollout_is_bounds[0] : kReleasedLow;
  for (const Trajectory& s : samples) {
    if (s.ruling == Ruling::none) continue;
    const auto n = static_cast<int64_t>(s.tokens.size());
    tokens += n;
    if (s.ruling == Ruling::rejected) masked += n;
    const std::vector<float> d = log_ratios(s);
    for (const float x : d) {
      high += ratio(x) > top;
      low += ratio(x) < bottom;
    }
    for (const double xi : raw_weights(keys.rollout_is_level, d)) {
      raw.add(xi);
      bounded_raw.add(std::clamp(xi, 1 / most, most));
    }
    if (s.correction)
      for (const double w : *s.correction) {
        masked += w == 0;
        weight.add(w);
        applied.add(w);
      }
  }
  m.set(name + "rollout_rs_masked_fraction", part(masked, tokens));
  if (capped) m.set(name + "rollout_is_ratio_fraction_high", part(high, tokens));
  if (bounded) m.set(name + "rollout_is_ratio_fraction_low", part(low, tokens));
  const auto report = [&m](const std::string& of, const Summary& w, const Spread& spread) {
    if (w.count() == 0) return;
    m.set(of + "mean", w.mean());
    m.set(of + "min", w.min());
    m.set(of + "max", w.max());
    m.set(of + "std", spread.deviation());
    if (spread.squares.sum() > 0) m.set(of + "eff_sample_size", spread.effective());
  };
  if (keys.rollout_is != RolloutIs::none) report(name + "rollout_is_", raw, bounded_raw);
  report(name + "weight_", weight, applied);
}

void report_kv(const RolloutStats& s, int64_t page_bytes, Metrics& m) {
  const auto fed = static_cast<double>(s.decode_rows);
  if (s.decode_rows > 0) {
    m.set("kv/resident_tokens/mean", s.resident / fed);
    m.set("kv/resident_tokens/max", s.peak_resident);
    m.set("kv/read_tokens/mean", s.read / fed);
    m.set("kv/tokens_saved/mean", 1 - s.resident / s.dense);
    m.set("kv/tokens_saved/peak", 1 - s.peak_resident / s.peak_dense);
    m.set("kv/tokens_saved/read", 1 - s.read / s.dense);
  }
  m.set("kv/compressions", static_cast<double>(s.compressions));
  m.set("kv/evicted_tokens", static_cast<double>(s.evicted));
  m.set("perf/kv_peak_bytes", static_cast<double>(s.peak_pages * page_bytes));
}

}  // namespace pare
