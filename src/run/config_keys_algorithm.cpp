// Rows of the key table: rewards, advantages, filters, corrections.
#include "run/config_table.h"

namespace pare::config_table {

Groups algorithm_keys() {
  const KeyCondition grpo = is("algorithm.adv_estimator", {"grpo"});
  return {
      {{},
       {KEY(reward_model.overlong_buffer.enable, any, "", "penalises responses that end close to the limit",
            "verl, DAPO")}},
      {{is("reward_model.overlong_buffer.enable", {"true"})},
       {KEY(reward_model.overlong_buffer.len, at_least(0), "tokens",
            "tokens before data.max_response_length over which the penalty grows linearly; 0: a fifth of that length",
            "verl, DAPO eq. 13"),
        KEY(reward_model.overlong_buffer.penalty_factor, at_least(0), "reward", "penalty at the limit", "verl")}},
      {{},
       {KEY(reward_model.length_reward.enable, any, "",
            "rewards short right answers: the score times sigmoid(alpha * (mean length of the group - length)), "
            "clipped to .5 and 1, over whole responses",
            "RPO eq. 11")}},
      {{is("reward_model.length_reward.enable", {"true"})},
       {KEY(reward_model.length_reward.alpha, at_least(0), "1 / token", "steepness of the sigmoid",
            "RPO: 0.01; its code: 0.1, in words"),
        KEY(reward_model.length_reward.reference, any, "", "responses of the group whose mean length is the reference",
            "RPO: all; its code: correct")}},

      {{},
       {KEY(algorithm.adv_estimator, any, "",
            "baseline of the advantage. grpo: mean of the group; rloo: mean of the other responses", "verl"),
        KEY(algorithm.adv_filter_threshold, at_least(0), "advantage",
            "absolute advantage below which samples are dropped before the learner's forward pass; 0: off", "DASH"),
        KEY(algorithm.mask_truncated_completions, any, "",
            "leaves responses cut at data.max_response_length out of the loss; their rewards count in the group's "
            "advantages",
            "TRL; DAPO's overlong filtering"),
        KEY(algorithm.use_kl_in_reward, any, "", "subtracts the KL to the reference policy from the reward", "verl"),
        KEY(algorithm.filter_groups.enable, any, "",
            "dynamic sampling: replaces groups whose scores (metric) are all equal by new prompts", "verl, DAPO"),
        KEY(algorithm.oversample.keep, at_least(0), "samples",
            "responses kept of each group of rollout.n; 0: all, no oversampling",
            "DistillSparse eq. 4: 8 of 12 or 16")}},
      {{is_not("algorithm.oversample.keep", "0")},
       {KEY(algorithm.oversample.by, any, "",
            "criterion for keeping a response. reward: largest score, before any shaping; acceptance: largest mean of "
            "min(1, xi)",
            "DistillSparse")}},
      {{grpo},
       {KEY(algorithm.norm_adv_by_std_in_grpo, any, "", "divides the advantage by the group's standard deviation",
            "verl, Dr. GRPO")}},
      {{grpo, is("algorithm.norm_adv_by_std_in_grpo", {"true"})},
       {KEY(algorithm.adv_std, any, "", "standard deviation with n minus 1 (sample) or n (population)", "verl: sample"),
        KEY(algorithm.adv_std_floor, at_least(0), "reward",
            "lower bound of the standard deviation in the division, so that tiny differences in reward stay small; 0: "
            "off",
            "pare"),
        KEY(algorithm.adv_eps, at_least(0), "reward", "term added to the standard deviation", "verl 1e-6, TRL 1e-4")}},
      {{is("algorithm.use_kl_in_reward", {"true"})},
       {KEY(algorithm.kl_penalty, one_of({"k1", "k2", "k3"}), "", "estimator of the KL in the reward",
            "verl, Schulman 2020"),
        KEY(algorithm.kl_ctrl.kl_coef, at_least(0), "", "coefficient of the KL in the reward", "verl")}},
      {{is("algorithm.filter_groups.enable", {"true"})},
       {KEY(algorithm.filter_groups.metric, any, "",
            "value that is to differ in a group. score: the verifier's; reward: that with length_reward and "
            "overlong_buffer, before any KL",
            "verl"),
        KEY(algorithm.filter_groups.max_num_gen_batches, at_least(1), "batches",
            "most generation batches of a step, which then uses the groups that it has", "verl")}},
  };
}

Groups correction_keys() {
  const KeyCondition obrs = is("algorithm.obrs.enable", {"true"});
  return {
      {{},
       {KEY(algorithm.rollout_correction.veto, from_below(0, 1), "ratio",
            "rejects a response if xi of any token, the learner's probability over the sampler's, is below this; 0: "
            "off",
            "Sparse-RL: 1e-4; verl: rollout_token_veto_threshold"),
        KEY(algorithm.rollout_correction.rollout_is, any, "",
            "importance weight of a token, a function of xi, the probability under the learner's old policy over the "
            "sampler's. paper: xi; tis: at most rollout_is_threshold; icepop: 0 outside rollout_is_bounds; released: "
            "as in Sparse-RL's code",
            "Sparse-RL; verl"),
        KEY(algorithm.rollout_correction.rollout_rs, any, "",
            "rejection sampling: rejects responses whose product (sequence), or geometric mean, of xi lies outside "
            "rollout_rs_threshold; token: masks tokens whose own xi does",
            "verl"),
        KEY(algorithm.rollout_correction.off_policy_mask_threshold, at_least(0), "nats per token",
            "takes the policy loss of a response of negative advantage out of an update if its log-ratio of sampler to "
            "policy, the mean over its tokens, exceeds this; 0: off",
            "DeepSeek-V3.2 eq. 9; TRL"),
        KEY(algorithm.rollout_correction.group_statistics, any, "",
            "responses that count in the mean and standard deviation of a group: all, or those not rejected",
            "Sparse-RL: all"),
        KEY(algorithm.rollout_correction.min_accepted, within(0, 1), "fraction of the judged responses",
            "accepted fraction below which an update is skipped, since AdamW's steps do not shrink with the gradient; "
            "0: off",
            "pare")}},
      {{is_not("algorithm.rollout_correction.rollout_is", "none")},
       {KEY(algorithm.rollout_correction.rollout_is_level, any, "",
            "level of xi: of the token, or the geometric mean over the response, which gspo needs", "verl: rollout_is"),
        KEY(algorithm.rollout_correction.rollout_is_threshold, above(0), "ratio",
            "largest weight of tis; the logged spread of xi clamps it to [1 / this, this] for every rollout_is",
            "verl: 2")}},
      {{is("algorithm.rollout_correction.rollout_is", {"icepop"})},
       {KEY(algorithm.rollout_correction.rollout_is_bounds, at_least(0), "ratio",
            "smallest and largest xi of tokens that count", "IcePop; verl: 0.5_5.0")}},
      {{is_not("algorithm.rollout_correction.rollout_rs", "none")},
       {KEY(algorithm.rollout_correction.rollout_rs_threshold, at_least(0), "ratio",
            "smallest and largest xi of an accepted response, or of a token (verl's k1: the inverse)", "verl")}},
      {{is_not("rollout.kv.method", "dense"), is("learner.attention", {"dense"})},
       {FREE(algorithm.rollout_correction.acceptance, any, "",
             "logs the exact acceptance rate, the sum over the vocabulary of the smaller of the learner's and the "
             "sampler's probability; the rollout keeps the hidden state of every token",
             "DistillSparse"),
        KEY(algorithm.rollout_correction.score_centering, any, "",
            "subtracts from the gradient of each sampled token's weighted log-prob its mean under the sampler's "
            "distribution, summed over the whole vocabulary; the rollout keeps the hidden state of every token",
            "arXiv 2609.20807; NeMo-RL, from its top-k")}},
      {{},
       {KEY(algorithm.obrs.enable, any, "",
            "budgeted rejection sampling: a token stays in the loss with probability min(1, xi / lambda)",
            "OBRS, Jackpot")}},
      {{obrs},
       {KEY(algorithm.obrs.lambda, above(0), "ratio",
            "rejection strength: a larger value keeps fewer tokens, closer to the learner's distribution",
            "Jackpot: 1"),
        KEY(algorithm.obrs.cap, at_least(0), "ratio", "largest weight of a kept token; 0: off", "Jackpot: 3"),
        KEY(algorithm.obrs.state_weight, any, "",
            "weight of a kept token: max(lambda, xi), unbiased at each state; z: times the acceptance probability of "
            "its state",
            "Jackpot: z")}},
      {{obrs, is("algorithm.obrs.state_weight", {"z"})},
       {KEY(algorithm.obrs.top_k, count(0), "tokens",
            "most probable tokens of learner and sampler over which the acceptance probability is summed; 0: the whole "
            "vocabulary, exact",
            "Jackpot: 20")}},
  };
}

Groups rpo_keys() {
  const KeyCondition on = is("algorithm.rpo.enable", {"true"});
  return {
      {{},
       {KEY(algorithm.rpo.enable, any, "",
            "each group continues the beginning of an earlier response to its prompt, so that only the rest is "
            "sampled; one response is kept per row of the data",
            "RPO")}},
      {{on},
       {KEY(algorithm.rpo.cut, any, "",
            "upper bound of the number of tokens cut off the end of the kept response. The number is drawn uniformly "
            "from 0 to this bound for each prompt, and at least 1 is cut. fixed: max_cut; half_shortest: half of the "
            "shortest response of the prompt's last group; length: the whole response",
            "RPO: fixed or half_shortest")}},
      {{on, is("algorithm.rpo.cut", {"fixed"})},
       {KEY(algorithm.rpo.max_cut, count(1), "tokens", "that bound", "RPO: 300, 500, 800")}},
      {{on},
       {KEY(algorithm.rpo.suffix_cap, any, "",
            "limit on sampled tokens. max_len: what the beginning leaves of data.max_response_length; removed: as many "
            "as were cut",
            "RPO: max_len; its code: removed"),
        KEY(algorithm.rpo.update, any, "",
            "replaces the kept response of a row by one of the group after each step; false: the first one stays",
            "RPO; false: its ablation")}},
      {{on, is("algorithm.rpo.update", {"true"})},
       {KEY(algorithm.rpo.epsilon, within(0, 1), "probability",
            "probability that the group's response of largest reward replaces the kept one; otherwise a uniformly "
            "drawn one does",
            "RPO: 0.1")}},
      {{on},
       {KEY(algorithm.rpo.prefix_loss, any, "",
            "masked: the beginning is not trained on, and denominators count sampled tokens only; included: it is "
            "trained on, with a ratio of 1",
            "pare: masked; RPO: included"),
        PATH(
            algorithm.rpo.cache_file, any, "",
            "initial responses: JSON lines with row, ids or text, and finished, as `pare generate` writes them; empty: "
            "a response is sampled at a row's first visit",
            "RPO")}},
      {{on, is_not("algorithm.rpo.cache_file", "")},
       {KEY(algorithm.rpo.missing, any, "",
            "rows that only the data or only the file has. fail: an error; lazy: a response is sampled at the first "
            "visit, and surplus rows are ignored",
            "pare")}},
  };
}

}  // namespace pare::config_table
