// The keys of [actor], which the stages between the advantages and the update share.
#pragma once
#include "ops/options.h"
#include "rl/schedule.h"

namespace pare {

enum class LossAgg { seq_mean_token_mean, token_mean, group_token_mean, seq_mean_token_sum, seq_mean_token_sum_norm };
enum class LossDenominator { valid, kept };
enum class TokenSubset { none, urs, rpc, det };

struct PolicyLossKeys {
  PolicyLoss loss_mode = PolicyLoss::ppo;
  bool operator==(const PolicyLossKeys&) const = default;
};
struct ActorKeys {
  PolicyLossKeys policy_loss;
  double clip_ratio_low = 0.2, clip_ratio_high = 0.2, clip_ratio_c = 0;
  LossAgg loss_agg_mode = LossAgg::token_mean;
  int64_t loss_scale_factor = 0;
  LossDenominator loss_denominator = LossDenominator::valid;
  bool use_kl_loss = false;
  double kl_loss_coef = 1e-3;
  KlLoss kl_loss_type = KlLoss::k3;
  bool use_bias_correction_kl = false;
  double entropy_coeff = 0;
  int64_t ppo_epochs = 1, ppo_mini_batch_size = 0, ppo_max_token_len = 16384, logits_chunk = 0;
  double grad_clip = 1;
  TokenSubset token_subset = TokenSubset::none;
  double urs_probability = 0.5;
  int64_t rpc_min_tokens = 100;
  double det_fraction = 0.5;
  bool token_subset_ht = true;
  OptimKeys optim;
  bool operator==(const ActorKeys&) const = default;
};

}  // namespace pare
