// Metrics of the distance between the sampler's policy and the learner's.
#pragma once
#include <span>

#include "rl/corrections.h"
#include "rl/loss.h"
#include "rl/metrics.h"
#include "rl/types.h"
#include "rollout/rollout.h"

namespace pare {

// Bins of the tokens before a token: 0 to 63, 64 to 127, 128 to 255, ...
size_t context_bin(int64_t context);
int64_t first_context(size_t bin);
std::string context_name(size_t bin);  // "context_64_127"

class Mismatch {
 public:
  // The tokens of one response: log-probs under the learner's policy and under the sampler's, and where known
  // OverlapProbs::overlap.  `context`: tokens before the first.
  void add(std::span<const float> learner, std::span<const float> sampler, std::span<const float> overlap = {},
           int64_t context = 0);

  // Under verl's names (rollout_corr/...): kl, k3_kl, training_ppl, rollout_ppl, log_ppl_diff, log_ppl_abs_diff,
  // ppl_ratio, chi2_token.  xi_{mean,min,max} and quantiles; the parts of tokens and responses with an xi below
  // `catastrophic`; acceptance_rate, its 5 % quantile, and that of the tokens of each bin of contexts.
  // Sets no metric without responses.
  void report(Metrics& metrics, double catastrophic) const;

  const std::vector<std::vector<float>>& acceptance() const { return acceptance_; }  // overlaps, by bin of context

 private:
  Summary kl_, k3_, square_, learner_log_ppl_, rollout_log_ppl_, learner_ppl_, rollout_ppl_, difference_,
      abs_difference_, ppl_ratio_;
  std::vector<float> log_ratio_, least_;        // of every token; the smallest of every response
  std::vector<std::vector<float>> acceptance_;  // by bin of context
};

// Acceptance rates of the tokens of samples, by bin of context.
std::vector<std::vector<float>> acceptance_by_context(std::span<const Trajectory> samples);

// Reports on the samples that have old log-probs, or on the tokens of a first update, whose old log-probs come from its
// own pass.
void report_mismatch(const RolloutCorrectionKeys& keys, std::span<const Trajectory> samples, Metrics& metrics);
void report_mismatch(const RolloutCorrectionKeys& keys, const Update& update, const TokenOuts& out, Metrics& metrics);

// Reports on judged samples: rejection_rate, and the parts outside of the weight's bounds and left out of the loss.
// rollout_is_{mean,min,max,std,eff_sample_size}, where rollout_is is on: verl's, of xi at rollout_is_level before it is
// capped, over the tokens of all judged responses; std and eff_sample_size of xi within [1 / C, C], C =
// rollout_is_threshold.  weight_{...}: of the weights that the loss applies, over the tokens of accepted responses.
void report_corrections(const RolloutCorrectionKeys& keys, std::span<const Trajectory> samples, Metrics& metrics);

// kv/...: tokens resident and read per decoded token, what that saves of a dense cache on the mean and at the peak,
// compressions and evicted slots.  perf/kv_peak_bytes: bytes of the pages in use at the peak, which depends on how many
// sequences run together.
void report_kv(const RolloutStats& stats, int64_t page_bytes, Metrics& metrics);

// The q-quantile (nearest rank) of `x`, which is not empty; reorders it.
double quantile(std::vector<float>& x, double q);

}  // namespace pare
