// Rows of the key table: rewards, advantages, filters, corrections.
#include "run/config_table.h"

namespace pare::config_table {

namespace {

constexpr const char* kBothWeight = " both weight tokens by the ratio to the sampler; turn one of them off";
constexpr const char* kEmpty = "] is empty; the lower bound comes first";

bool is_released(const Config& c) { return c.algorithm.rollout_correction.rollout_is == RolloutIs::released; }
bool centres(const Config& c) { return c.algorithm.rollout_correction.score_centering && !exact_rollout(c); }

// The states of one generation batch are kept, and algorithm.filter_groups.enable makes several.
void check_states(const Config& c) {
  const RolloutCorrectionKeys& r = c.algorithm.rollout_correction;
  if (keeps_sampler_states(c) && c.algorithm.filter_groups.enable)
    fail(r.acceptance            ? "algorithm.rollout_correction.acceptance"
         : r.score_centering     ? "algorithm.rollout_correction.score_centering"
         : c.rollout.kv.adapts() ? "rollout.kv.blocks.acceptance_target"
                                 : "algorithm.obrs.state_weight = \"z\"",
         " keeps the hidden states of one generation batch, algorithm.filter_groups.enable makes several; turn one of "
         "them off");
}

void check_included(const Config& c) {
  if (!trains_on_prefixes(c)) return;
  const auto refuse = [](const std::string& what, const std::string& instead) {
    fail("algorithm.rpo.prefix_loss = \"included\" trains on tokens that the sampler gave no log-prob, which ", what,
         " needs; set algorithm.rpo.prefix_loss=masked, or ", instead);
  };
  const ActorKeys& a = c.actor;
  const RolloutCorrectionKeys& r = c.algorithm.rollout_correction;
  if (a.ppo_epochs > 1) refuse(cat("actor.ppo_epochs = ", a.ppo_epochs), "actor.ppo_epochs=1");
  if (!one_update(c)) refuse(cat("actor.ppo_mini_batch_size = ", a.ppo_mini_batch_size), "actor.ppo_mini_batch_size=0");
  if (c.algorithm.obrs.enable) refuse("algorithm.obrs", "algorithm.obrs.enable=false");
  if (corrects(r)) refuse("algorithm.rollout_correction", "turn its veto, rollout_is and rollout_rs off");
  if (r.acceptance) refuse("algorithm.rollout_correction.acceptance", "turn that off");
  if (r.score_centering) refuse("algorithm.rollout_correction.score_centering", "turn that off");
  if (c.algorithm.use_kl_in_reward) refuse("algorithm.use_kl_in_reward", "algorithm.use_kl_in_reward=false");
}

}  // namespace

Groups algorithm_keys() {
  const KeyCondition grpo = is("algorithm.adv_estimator", {"grpo"});
  return {
      {{},
       {KEY(reward_model.overlong_buffer.enable, any, "", "penalises responses that end close to the limit",
            "verl, DAPO")}},
      {{is("reward_model.overlong_buffer.enable", {"true"})},
       {KEY(reward_model.overlong_buffer.len, at_least(0), "tokens",
            "tokens before data.max_response_length over which the penalty grows linearly; 0: a fifth of that length",
            "verl, DAPO eq. 13",
            REFUSE_IF(c.reward_model.overlong_buffer.enable && (v < 1 || v > c.data.max_response_length), " = ", v,
                      " is not between 1 and data.max_response_length = ", c.data.max_response_length)),
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
            "dynamic sampling: replaces groups whose scores (metric) are all equal by new prompts", "verl, DAPO",
            check_states),
        KEY(algorithm.oversample.keep, at_least(0), "samples",
            "responses kept of each group of rollout.n; 0: all, no oversampling", "DistillSparse eq. 4: 8 of 12 or 16",
            REFUSE_IF(v > c.rollout.n, " = ", v, " is more than rollout.n = ", c.rollout.n,
                      ", the responses of which it keeps some"),
            REFUSE_IF(v == 1, " = 1 leaves groups of one, where algorithm.adv_estimator makes every advantage 0"),
            REFUSE_IF(kept_members(c) < c.rollout.n && c.algorithm.adv_estimator == AdvEstimator::rloo, " = ", v,
                      " leaves responses that are not independent, which the baseline of algorithm.adv_estimator = "
                      "\"rloo\" assumes; set algorithm.adv_estimator=grpo"))}},
      {{is_not("algorithm.oversample.keep", "0")},
       {KEY(
           algorithm.oversample.by, any, "",
           "criterion for keeping a response. reward: largest score, before any shaping; acceptance: largest mean of "
           "min(1, xi)",
           "DistillSparse",
           REFUSE_IF(v == OversampleBy::acceptance && kept_members(c) < c.rollout.n && exact_rollout(c),
                     " = \"acceptance\" ranks by the ratio of learner and sampler, which is 1 where both attend to the "
                     "same tokens (rollout.kv.method, learner.attention); set algorithm.oversample.by=reward"),
           REFUSE_IF(
               v == OversampleBy::acceptance && kept_members(c) < c.rollout.n && c.algorithm.filter_groups.enable,
               " = \"acceptance\" chooses after the groups of algorithm.filter_groups.enable; turn one of them off"))}},
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
            "Sparse-RL; verl",
            REFUSE_IF(is_released(c) && c.algorithm.rollout_correction.rollout_is_level != RatioLevel::token,
                      " = \"released\" weights tokens; set algorithm.rollout_correction.rollout_is_level=token"),
            REFUSE_IF(is_released(c) && c.algorithm.rollout_correction.rollout_rs == RolloutRs::token,
                      " = \"released\" has bounds of its own on tokens; set "
                      "algorithm.rollout_correction.rollout_rs=none"),
            REFUSE_IF(is_released(c) && c.actor.loss_agg_mode != LossAgg::seq_mean_token_mean,
                      " = \"released\" divides by the tokens of a response that are left; set "
                      "actor.loss_agg_mode=seq-mean-token-mean")),
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
            "smallest and largest xi of tokens that count", "IcePop; verl: 0.5_5.0",
            REFUSE_IF(v[0] > v[1], " = [", v[0], ", ", v[1], kEmpty))}},
      {{is_not("algorithm.rollout_correction.rollout_rs", "none")},
       {KEY(algorithm.rollout_correction.rollout_rs_threshold, at_least(0), "ratio",
            "smallest and largest xi of an accepted response, or of a token (verl's k1: the inverse)", "verl",
            REFUSE_IF(v[0] > v[1], " = [", v[0], ", ", v[1], kEmpty))}},
      {{is_not("rollout.kv.method", "dense"), is("learner.attention", {"dense"})},
       {FREE(algorithm.rollout_correction.acceptance, any, "",
             "logs the exact acceptance rate, the sum over the vocabulary of the smaller of the learner's and the "
             "sampler's probability; the rollout keeps the hidden state of every token",
             "DistillSparse"),
        KEY(algorithm.rollout_correction.score_centering, any, "",
            "subtracts from the gradient of each sampled token's weighted log-prob its mean under the sampler's "
            "distribution, summed over the whole vocabulary; the rollout keeps the hidden state of every token",
            "arXiv 2609.20807; NeMo-RL, from its top-k",
            REFUSE_IF(centres(c) && c.algorithm.rollout_correction.rollout_is == RolloutIs::paper,
                      " subtracts a mean, which algorithm.rollout_correction.rollout_is = \"paper\" makes 0; set "
                      "rollout_is to none, tis or icepop, or turn it off"),
            REFUSE_IF(centres(c) && is_released(c),
                      " needs the weight of every id, and algorithm.rollout_correction.rollout_is = \"released\" "
                      "normalises those of the sampled tokens; set rollout_is to none, tis or icepop"),
            REFUSE_IF(centres(c) && c.algorithm.rollout_correction.rollout_is != RolloutIs::none &&
                          c.algorithm.rollout_correction.rollout_is_level != RatioLevel::token,
                      " needs a weight for each token; set algorithm.rollout_correction.rollout_is_level=token"),
            REFUSE_IF(centres(c) && c.algorithm.obrs.enable,
                      " needs the weight of every id, and algorithm.obrs draws those of the sampled tokens; set "
                      "algorithm.obrs.enable=false"),
            REFUSE_IF(centres(c) && c.actor.policy_loss.loss_mode == PolicyLoss::gspo,
                      " centres the score of a token, and actor.policy_loss.loss_mode = \"gspo\" has one ratio for a "
                      "sequence; set actor.policy_loss.loss_mode=vanilla"),
            REFUSE_IF(centres(c) && !one_update(c),
                      " compares the sampler with the weights it sampled at, and a second update of a rollout has "
                      "changed them; set actor.ppo_epochs=1 and actor.ppo_mini_batch_size=0"),
            REFUSE_IF(centres(c) && c.actor.use_kl_loss && is_exact(c.actor.kl_loss_type),
                      " and actor.kl_loss_type = \"exact\" each compare whole distributions, and the loss has room for "
                      "one; set actor.kl_loss_type=k3"))}},
      {{},
       {KEY(algorithm.obrs.enable, any, "",
            "budgeted rejection sampling: a token stays in the loss with probability min(1, xi / lambda)",
            "OBRS, Jackpot",
            REFUSE_IF(v && c.algorithm.rollout_correction.rollout_is != RolloutIs::none,
                      " and algorithm.rollout_correction.rollout_is", kBothWeight),
            REFUSE_IF(v && c.algorithm.rollout_correction.rollout_rs == RolloutRs::token,
                      " and algorithm.rollout_correction.rollout_rs", kBothWeight))}},
      {{obrs},
       {KEY(algorithm.obrs.lambda, above(0), "ratio",
            "rejection strength: a larger value keeps fewer tokens, closer to the learner's distribution",
            "Jackpot: 1"),
        KEY(algorithm.obrs.cap, at_least(0), "ratio", "largest weight of a kept token; 0: off", "Jackpot: 3",
            REFUSE_IF(c.algorithm.obrs.enable && v > 0 && v < c.algorithm.obrs.lambda, " = ", v,
                      " cuts every weight, which are at least algorithm.obrs.lambda = ", c.algorithm.obrs.lambda,
                      "; raise it, or set it to 0 (off)")),
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
            "RPO",
            REFUSE_IF(v && c.rollout.kv.evicts(),
                      " begins responses with tokens of earlier ones, which rollout.kv.method = ",
                      config_key("rollout.kv.method").show(c),
                      " would take for a part of the prompt when it evicts; set rollout.kv.method to dense, quest or "
                      "block_topk"),
            REFUSE_IF(v && kept_members(c) < c.rollout.n,
                      " draws the next entry from all responses of a group, algorithm.oversample.keep drops some; turn "
                      "one of them off"))}},
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
            "pare: masked; RPO: included", check_included,
            REFUSE_IF(
                trains_on_prefixes(c) && c.learner.attention == LearnerAttention::replay && c.rollout.kv.sparse_reads(),
                " = \"included\" makes the prefix a part of the response, which learner.attention = \"replay\" "
                "reads in blocks, but the sampler read all of it; set algorithm.rpo.prefix_loss=masked")),
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
