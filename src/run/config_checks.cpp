// Facts that follow from several keys, and warnings.
#include <algorithm>

#include "run/config.h"

namespace pare {

DType act_type(DeviceKind device, ActType type) {
  if (device == DeviceKind::cpu && type == ActType::bf16)
    fail("the cpu computes in f32 only, bf16 is for cuda and emu; set model.dtype=f32, or another trainer.device");
  return type == ActType::f32 || device == DeviceKind::cpu ? DType::f32 : DType::bf16;
}

void check_device(const TrainerKeys& where) {
  if (where.device == DeviceKind::cpu && !where.exact)
    fail(
        "trainer.exact = false (--exact=off) takes the linear layers of cuBLASLt, and the cpu has only exact ones; "
        "leave it out, or set trainer.device=cuda");
}

void check_config(const Config& config) {
  for (const ConfigKey& k : config_keys())
    for (const auto& check : k.checks) check(config);
}

bool sparser_than_learner(const Config& c) {
  return c.rollout.kv.method != KvMethod::dense && c.learner.attention == LearnerAttention::dense;
}

bool one_update(const Config& c) {
  const ActorKeys& a = c.actor;
  return a.ppo_epochs == 1 && (a.ppo_mini_batch_size == 0 || a.ppo_mini_batch_size >= c.data.train_batch_size);
}

bool exact_rollout(const Config& c) { return c.trainer.exact && !sparser_than_learner(c); }

// True if the adapters are trained at the weights that they sampled with.
static bool distills_exactly(const Config& c) { return c.distill.enable && c.distill.order == DistillOrder::before; }

bool exact_learner(const Config& c) { return exact_rollout(c) || (c.trainer.exact && distills_exactly(c)); }

bool checks_exact(const Config& c) {
  return c.rollout.check_exact.value_or(!sparser_than_learner(c) || distills_exactly(c));
}

int64_t kept_members(const Config& c) {
  const int64_t keep = c.algorithm.oversample.keep;
  return keep > 0 ? std::min(keep, c.rollout.n) : c.rollout.n;
}

bool shares_prefixes(const Config& c) {
  return c.algorithm.rpo.enable && c.algorithm.rpo.prefix_loss == PrefixLoss::masked;
}

bool keeps_sampler_states(const Config& c) {
  const RolloutCorrectionKeys& r = c.algorithm.rollout_correction;
  const ObrsKeys& o = c.algorithm.obrs;
  return sparser_than_learner(c) &&
         (r.acceptance || r.score_centering || c.rollout.kv.adapts() || (o.enable && o.state_weight == StateWeight::z));
}

int64_t kept_ids(const Config& c) {
  const RolloutKeys& r = c.rollout;
  const bool finds = exact_rollout(c) && one_update(c) && !needs_reference(c) && !c.distill.enable;
  if (!truncation_of(r).on() || finds) return 0;
  return r.top_k > 0 ? std::min(r.top_k, r.max_kept_ids) : r.max_kept_ids;
}

std::string tokenizer_spec(const Config& c) {
  return !c.data.tokenizer.empty() ? c.data.tokenizer : c.data.task == "ssa" ? "ssa" : c.model.path;
}

bool needs_reference(const Config& c) { return c.actor.use_kl_loss || c.algorithm.use_kl_in_reward; }

std::vector<std::string> config_warnings(const Config& c) {
  std::vector<std::string> lines;
  const char* extra = c.actor.use_kl_loss         ? "actor.use_kl_loss"
                      : c.actor.entropy_coeff > 0 ? "actor.entropy_coeff"
                      : c.distill.enable          ? "distill.enable"
                                                  : nullptr;
  if (c.algorithm.adv_filter_threshold > 0 && extra)
    lines.push_back(cat("algorithm.adv_filter_threshold also takes the dropped samples out of the KL or entropy of ",
                        extra, ": the objective changes"));
  if (c.actor.use_kl_loss && c.actor.kl_loss_type == KlLoss::k1 && !c.actor.use_bias_correction_kl)
    lines.push_back(
        "actor.kl_loss_type = k1 is biased as a loss: its expected gradient is 0, so that it adds noise and does not "
        "hold the policy to the reference; take k2, k3 or exact, or k1 in the reward (algorithm.use_kl_in_reward)");
  if (c.actor.use_kl_loss && c.algorithm.use_kl_in_reward)
    lines.push_back("actor.use_kl_loss and algorithm.use_kl_in_reward are both on: the KL counts twice");
  if (!c.trainer.exact)
    lines.push_back(
        "trainer.exact = false: the sampler's log-probs are the learner's but for roundings, and mismatches are "
        "expected");
  if (c.learner.attention == LearnerAttention::replay && c.rollout.kv.method == KvMethod::dense)
    lines.push_back(
        "learner.attention = replay changes nothing: rollout.kv.method = dense, so the sampler attends to everything");
  const RolloutCorrectionKeys& r = c.algorithm.rollout_correction;
  if (sparser_than_learner(c) && !corrects(c.algorithm) && !r.score_centering && r.off_policy_mask_threshold == 0)
    lines.push_back(
        "rollout.kv.method samples from another policy than the one that is trained, and nothing corrects "
        "for it (algorithm.rollout_correction)");
  if (r.off_policy_mask_threshold > 0 && exact_rollout(c) && one_update(c))
    lines.push_back(
        "algorithm.rollout_correction.off_policy_mask_threshold masks nothing: the only update is of the policy that "
        "was sampled, and their log-probs are equal");
  if (r.rollout_is == RolloutIs::paper && r.rollout_is_level != RatioLevel::geometric)
    lines.push_back("algorithm.rollout_correction.rollout_is = paper bounds no weight: one token can outweigh a batch");
  const bool token_weights =
      c.algorithm.obrs.enable || (r.rollout_is != RolloutIs::none && r.rollout_is_level == RatioLevel::token);
  if (c.actor.policy_loss.loss_mode == PolicyLoss::gspo && token_weights)
    lines.push_back(
        cat(c.algorithm.obrs.enable ? "algorithm.obrs" : "algorithm.rollout_correction.rollout_is_level = token",
            " weights tokens, but actor.policy_loss.loss_mode = gspo has one ratio for a sequence: set "
            "rollout_is_level=geometric"));
  if (c.algorithm.obrs.enable && c.algorithm.obrs.state_weight == StateWeight::z && c.algorithm.obrs.top_k > 0)
    lines.push_back("algorithm.obrs.top_k bounds Z from below");
  if (c.algorithm.oversample.keep > 0 && c.algorithm.oversample.keep < c.rollout.n)
    lines.push_back(
        "algorithm.oversample.keep: nothing corrects for the choice, which the paper's successor found not to restore "
        "training (arXiv 2606.08446, appendix A)");
  const LengthRewardKeys& length = c.reward_model.length_reward;
  if (length.enable && c.algorithm.adv_estimator == AdvEstimator::grpo && c.algorithm.norm_adv_by_std_in_grpo &&
      c.algorithm.adv_std_floor == 0)
    lines.push_back(
        "reward_model.length_reward with algorithm.norm_adv_by_std_in_grpo: in a group of right answers one token more "
        "or less becomes a full advantage, whatever alpha is; turn the division off, or set algorithm.adv_std_floor");
  if (length.enable && c.algorithm.adv_filter_threshold > 0)
    lines.push_back(
        "reward_model.length_reward gives equally scored responses different rewards: "
        "algorithm.adv_filter_threshold finds hardly any group without a signal");
  const RpoKeys& rpo = c.algorithm.rpo;
  if (rpo.enable && rpo.cut == RpoCut::fixed && rpo.max_cut > c.data.max_response_length)
    lines.push_back(cat("algorithm.rpo.max_cut = ", rpo.max_cut, " is more than data.max_response_length = ",
                        c.data.max_response_length, ": most cuts leave nothing of a cached response"));
  const TokenSubset subset = c.actor.token_subset;
  if (subset == TokenSubset::det || (subset != TokenSubset::none && !c.actor.token_subset_ht))
    lines.push_back(cat(subset == TokenSubset::det ? "actor.token_subset = det" : "actor.token_subset_ht = false",
                        " gives a biased gradient"));
  return lines;
}

}  // namespace pare
