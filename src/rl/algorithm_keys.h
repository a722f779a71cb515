// The keys of [algorithm], which the stages between the rollout and the advantages share.
#pragma once
#include "ops/options.h"
#include "rl/corrections.h"
#include "rl/filters.h"
#include "rl/obrs.h"
#include "rl/oversample.h"
#include "rl/prefix_cache.h"

namespace pare {

enum class AdvEstimator { grpo, rloo };
enum class AdvStd { sample, population };

struct KlCtrlKeys {
  double kl_coef = 1e-3;
  bool operator==(const KlCtrlKeys&) const = default;
};
struct AlgorithmKeys {
  AdvEstimator adv_estimator = AdvEstimator::grpo;
  bool norm_adv_by_std_in_grpo = true;
  AdvStd adv_std = AdvStd::sample;
  double adv_std_floor = 0, adv_eps = 1e-6, adv_filter_threshold = 0;
  bool mask_truncated_completions = false;
  bool use_kl_in_reward = false;
  KlLoss kl_penalty = KlLoss::k1;
  KlCtrlKeys kl_ctrl;
  FilterGroupsKeys filter_groups;
  RolloutCorrectionKeys rollout_correction;
  ObrsKeys obrs;
  OversampleKeys oversample;
  RpoKeys rpo;
  bool operator==(const AlgorithmKeys&) const = default;
};

// Samples are judged or weighted by what the old policy thinks of their tokens (corrections.h, obrs.h).
inline bool corrects(const AlgorithmKeys& keys) { return corrects(keys.rollout_correction) || keys.obrs.enable; }

}  // namespace pare
