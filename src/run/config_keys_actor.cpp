// Rows of the key table: the loss, the optimizer, the learner.
#include "ops/linear.h"
#include "run/config_table.h"

namespace pare::config_table {

Groups actor_keys() {
  return {
      {{},
       {KEY(actor.policy_loss.loss_mode, any, "",
            "vanilla: PPO's clipped ratio per token; gspo: one ratio per sequence; cispo: clipped, detached ratio",
            "verl",
            REFUSE_IF(v == PolicyLoss::gspo && c.actor.loss_agg_mode != LossAgg::seq_mean_token_mean,
                      " = \"gspo\" has one loss per sequence; set actor.loss_agg_mode=seq-mean-token-mean"),
            REFUSE_IF(v == PolicyLoss::gspo && c.actor.token_subset != TokenSubset::none,
                      " = \"gspo\" needs the log-ratios of all tokens of a sequence, which actor.token_subset leaves "
                      "out; set actor.token_subset=none")),
        KEY(actor.clip_ratio_low, at_least(0), "", "clip range below 1: the ratio is at least 1 minus this", "verl"),
        KEY(actor.clip_ratio_high, at_least(0), "", "clip range above 1: the ratio is at most 1 plus this",
            "verl, DAPO clip-higher")}},
      {{is("actor.policy_loss.loss_mode", {"vanilla", "gspo"})},
       {KEY(actor.clip_ratio_c, at_least(0), "",
            "dual clip: bound, above 1, of the ratio at negative advantages; 0: off", "verl",
            REFUSE_IF(v != 0 && v <= 1, " = ", v, " bounds the ratio from above: expected 0 (off) or more than 1"))}},
      {{},
       {KEY(actor.loss_agg_mode, any, "", "aggregation of token losses into one number",
            "verl; group-token-mean: DAPO"),
        KEY(actor.loss_denominator, any, "",
            "sequences and tokens in the denominator: all (valid), or without dropped samples (kept)", "pare")}},
      {{is("actor.loss_agg_mode", {"seq-mean-token-sum-norm"})},
       {KEY(actor.loss_scale_factor, at_least(0), "tokens", "divisor of the sum; 0: data.max_response_length",
            "verl, Dr. GRPO")}},
      {{}, {KEY(actor.use_kl_loss, any, "", "adds the KL to the reference policy to the loss", "verl")}},
      {{is("actor.use_kl_loss", {"true"})},
       {KEY(actor.kl_loss_coef, at_least(0), "", "coefficient of the KL in the loss", "verl"),
        KEY(actor.kl_loss_type, any, "",
            "estimator of the KL in the loss; k1: biased, since its expected gradient is 0, so that nothing holds the "
            "policy to the reference; exact: sum over the vocabulary",
            "verl, Schulman 2020")}},
      {{is("actor.use_kl_loss", {"true"}), is("actor.kl_loss_type", {"k1", "k2", "k3"})},
       {KEY(actor.use_bias_correction_kl, any, "",
            "multiplies the estimate by the policy's ratio and differentiates the product, so that k1 and k3 have the "
            "gradient of the KL",
            "TRL; DeepSeek-V3.2 eq. 7")}},
      {{},
       {KEY(actor.entropy_coeff, at_least(0), "", "coefficient of the entropy bonus", "verl"),
        KEY(actor.ppo_epochs, at_least(1), "", "passes over the rollouts of a step", "verl; DASH PPO-Multi"),
        KEY(actor.ppo_mini_batch_size, at_least(0), "prompts", "prompts per optimizer update; 0: all of the step",
            "verl; DASH PPO-Mini",
            REFUSE_IF(v > 0 && c.data.train_batch_size % v != 0, " = ", v,
                      " does not divide data.train_batch_size = ", c.data.train_batch_size)),
        KEY(actor.ppo_max_token_len, at_least(1), "tokens",
            "most rows of a micro-batch; a longer sequence has one of its own. In bf16 the bits of a run depend on it",
            "verl: ppo_max_token_len_per_gpu",
            // In bf16 the sum of a weight's gradient depends on the rows of each call (list.h).
            PartsIf{[](const Config& run, const Config&) { return act_type(run) == DType::bf16; }}),
        FREE(actor.logits_chunk, at_least(0), "tokens",
             "rows of logits that are computed at a time. 0: 4096, fewer if memory needs it after recomputation. In "
             "bf16 the bits of a run depend on it, but multiples of 4096 give the same",
             "slime: log_probs_chunk_size", PartsIf{[](const Config& run, const Config& resumed) {
               const int64_t rest = run.actor.logits_chunk % kLinearPart + resumed.actor.logits_chunk % kLinearPart;
               return act_type(run) == DType::bf16 && rest != 0;
             }}),
        KEY(actor.grad_clip, at_least(0), "", "largest norm of the gradient; 0: off", "verl"),
        KEY(actor.token_subset, any, "",
            "response tokens that are trained on. none: all; urs: each with a fixed probability; rpc: those before a "
            "random cut; det: a fixed first part",
            "NAT")}},
      {{is("actor.token_subset", {"urs"})},
       {KEY(actor.urs_probability, above_to(0, 1), "probability", "probability that a token is kept", "NAT")}},
      {{is("actor.token_subset", {"rpc"})},
       {KEY(actor.rpc_min_tokens, at_least(1), "tokens",
            "earliest cut; the cut is uniform between this and the length of the response", "NAT: C")}},
      {{is("actor.token_subset", {"det"})},
       {KEY(actor.det_fraction, above_to(0, 1), "fraction of the response", "fraction of the response that is kept",
            "NAT: beta")}},
      {{is("actor.token_subset", {"urs", "rpc"})},
       {KEY(actor.token_subset_ht, any, "", "weights kept tokens by 1 / probability, which removes the bias",
            "NAT, Horvitz-Thompson 1952")}},

      {{},
       {KEY(actor.optim.lr, at_least(0), "", "learning rate of AdamW", "verl"),
        KEY(actor.optim.betas, from_below(0, 1), "", "decay of the two moments", "verl"),
        KEY(actor.optim.eps, above(0), "", "term added to the root of the second moment", "TRL: adam_epsilon"),
        KEY(actor.optim.weight_decay, at_least(0), "", "decoupled weight decay", "verl"),
        KEY(actor.optim.moments, any, "",
            "type of the two moments; bf16: half the memory, with unbiased stochastic rounding", "pare"),
        KEY(actor.optim.lr_warmup_steps, at_least(0), "steps", "length of the linear warm-up", "verl"),
        KEY(actor.optim.lr_scheduler_type, any, "", "learning-rate schedule after the warm-up", "verl")}},
      {{is("actor.optim.lr_scheduler_type", {"linear", "cosine"})},
       {KEY(actor.optim.min_lr_ratio, within(0, 1), "fraction of lr", "learning rate of the last step", "verl"),
        KEY(actor.optim.decay_fraction, above_to(0, 1), "fraction of the run",
            "final part over which the rate decays; 1: everything after the warm-up", "pare")}},

      {{is_not("rollout.kv.method", "dense")},
       {KEY(learner.attention, any, "",
            "attention of the learner, forward and backward. dense: to all tokens; replay: to those that the sampler "
            "attended to, so that their log-probs agree bit by bit",
            "pare",
            REFUSE_IF(v == LearnerAttention::replay && c.rollout.kv.merges(),
                      " = \"replay\" replays which tokens were kept, rollout.kv.merge.method also changes their keys "
                      "and values; set rollout.kv.merge.method=none"))}},
      {{},
       {KEY(learner.shards, within(1, 4096), "",
            "parts of an update, whose gradients are added in a fixed order, so that the number of ranks changes no "
            "bit; a multiple of the number of ranks",
            "pare")}},
  };
}

Groups distill_keys() {
  const KeyCondition on = is("distill.enable", {"true"});
  return {
      {{is("rollout.kv.method", {"quest", "block_topk"})},
       {KEY(distill.enable, any, "",
            "samples from the trained model with adapters (model.lora). They learn the policy loss and a KL to the "
            "dense policy, through block-sparse attention; dense validation leaves them out",
            "DistillSparse",
            REFUSE_IF(v && c.model.lora.rank == 0 && c.model.lora.adapter_path.empty(),
                      " trains adapters of the sampler, and model.lora.rank = 0 gives it none; set model.lora.rank=32"),
            REFUSE_IF(v && !c.rollout.kv.sparse_reads(),
                      " needs a learner that attends as the sampler does, by blocks; set rollout.kv.method=quest or "
                      "block_topk"),
            REFUSE_IF(v && c.learner.attention == LearnerAttention::replay,
                      " has a dense learner beside the sparse one, learner.attention = \"replay\" has none; set "
                      "learner.attention=dense"),
            REFUSE_IF(v && !c.trainer.exact && c.rollout.check_exact.value_or(false),
                      " compares the sampler with the sparse learner, whose sums trainer.exact = false orders "
                      "otherwise; set rollout.check_exact=auto"),
            REFUSE_IF(v && c.actor.policy_loss.loss_mode == PolicyLoss::gspo,
                      " has a ratio for each token, actor.policy_loss.loss_mode = \"gspo\" one for a sequence; set "
                      "actor.policy_loss.loss_mode=vanilla"))}},
      {{on},
       {KEY(distill.order, any, "",
            "weights at which the adapters' gradient is taken. before: those of the teacher; after: the updated ones, "
            "as released",
            "pare",
            REFUSE_IF(c.distill.enable && v == DistillOrder::after && c.rollout.check_exact.value_or(false),
                      " = \"after\" takes the sparse learner to weights that the sampler had not, which "
                      "rollout.check_exact forbids; set rollout.check_exact=auto, or distill.order=before"),
            REFUSE_IF(
                c.distill.enable && v == DistillOrder::after &&
                    (c.distill.kl_type == DistillKl::exact_reverse || c.distill.kl_type == DistillKl::exact_forward),
                " = \"after\" compares with theta before its step, of which an exact distill.kl_type would need "
                "a copy; set distill.order=before, or distill.kl_type=k2 or k3")),
        KEY(distill.kl_type, any, "",
            "KL to the dense policy. k2, k3: estimates from the sampled token, whose expected gradients are those of "
            "KL(sparse || dense) and KL(dense || sparse); exact_reverse, exact_forward: the same two, summed over the "
            "vocabulary",
            "Sparrow: sparse_kl_loss_type"),
        KEY(distill.lambda, at_least(0), "", "weight of that KL", "DistillSparse"),
        KEY(distill.lr_scale_factor, above(0), "", "learning rate of the adapters, as a multiple of the model's",
            "Sparrow: lr_scale_factor"),
        KEY(distill.grad_clip, at_least(0), "", "bound on the norm of the adapters' gradient; 0: off", "pare")}},
  };
}

}  // namespace pare::config_table
