// Contradictions between keys, facts that follow from them, and warnings.
#include <algorithm>

#include "run/config.h"

namespace pare {

namespace {

// True if the sampler attends to less than the learner.
bool sparser_than_learner(const Config& c) {
  return c.rollout.kv.method != KvMethod::dense && c.learner.attention == LearnerAttention::dense;
}

void check_data(const Config& c) {
  const DataKeys& d = c.data;
  if (c.model.path.empty() == c.model.config.empty())
    fail("model.path and model.config: ", c.model.path.empty() ? "neither is given" : "both are given",
         "; set model.path to start from weights, or model.config to start from random ones");
  if (c.model.lora.rank > 0 && !c.model.lora.adapter_path.empty())
    fail("model.lora.rank and model.lora.adapter_path are both given; leave one out: an adapter has its own rank");
  if (c.model.lora.target_modules.empty()) fail("model.lora.target_modules is empty: no layer would have an adapter");
  if (d.min_statements > d.max_statements)
    fail("data.min_statements = ", d.min_statements, " is more than data.max_statements = ", d.max_statements);
  if (d.val_min_statements > d.max_statements)
    fail("data.val_min_statements = ", d.val_min_statements, " is more than data.max_statements = ", d.max_statements);
  if (d.task == "jsonl") {
    if (d.train_files.empty() && d.val_files.empty())
      fail("data.task = \"jsonl\" needs data.train_files, which is empty");
    if (d.val_files.empty() && (c.trainer.test_freq > 0 || c.trainer.val_before_train))
      fail(c.trainer.test_freq > 0 ? "trainer.test_freq" : "trainer.val_before_train",
           " turns validation on but data.val_files is empty; set it, or turn validation off");
  } else if (!d.train_files.empty() || !d.val_files.empty()) {
    fail(d.train_files.empty() ? "data.val_files" : "data.train_files", " is set but data.task = \"", d.task,
         "\" generates its data; set data.task=jsonl");
  }
}

// The learner finds the set that a token was drawn from in its own logits, which must be those of the sampler: of the
// same weights, the same attention, the same sums.
void check_truncation(const Config& c) {
  const RolloutKeys& r = c.rollout;
  if (!truncation_of(r).on()) return;
  if (c.algorithm.rpo.enable && c.algorithm.rpo.prefix_loss == PrefixLoss::included)
    fail(r.top_k > 0   ? cat("rollout.top_k = ", r.top_k)
         : r.top_p < 1 ? cat("rollout.top_p = ", r.top_p)
                       : cat("rollout.min_p = ", r.min_p),
         " draws from a set of tokens, and algorithm.rpo.prefix_loss = \"included\" trains on tokens of earlier steps, "
         "whose sets are not kept; set algorithm.rpo.prefix_loss=masked");
}

void check_rollout(const Config& c) {
  const RolloutKeys& r = c.rollout;
  check_truncation(c);
  const bool check = r.check_exact.value_or(false);  // auto gives way
  const bool replay = c.learner.attention == LearnerAttention::replay;
  if (r.kv.method != KvMethod::dense && check && !replay && !c.distill.enable)
    fail(
        "rollout.kv.method samples from another distribution than the dense learner's, which rollout.check_exact "
        "forbids; set rollout.check_exact=auto, or learner.attention=replay");
  if (replay && r.kv.merges())
    fail(
        "learner.attention = \"replay\" replays which tokens were kept, rollout.kv.merge.method also changes their "
        "keys and values; set rollout.kv.merge.method=none");
  if (r.n == 1)
    fail(
        "rollout.n = 1 gives groups of one, where algorithm.adv_estimator makes every advantage 0: nothing is learned");
  if (r.max_num_seqs > r.max_num_batched_tokens)
    fail("rollout.max_num_seqs = ", r.max_num_seqs,
         " sequences cannot decode together in rollout.max_num_batched_tokens = ", r.max_num_batched_tokens, " rows");
  check_kv(r.kv);
  const OverlongKeys& o = c.reward_model.overlong_buffer;
  if (o.enable && (o.len < 1 || o.len > c.data.max_response_length))
    fail("reward_model.overlong_buffer.len = ", o.len,
         " is not between 1 and data.max_response_length = ", c.data.max_response_length);
}

// True if every rollout is trained on once, at the weights that sampled it.
bool one_update(const Config& c) {
  const ActorKeys& a = c.actor;
  return a.ppo_epochs == 1 && (a.ppo_mini_batch_size == 0 || a.ppo_mini_batch_size >= c.data.train_batch_size);
}

void check_centring(const Config& c) {
  const RolloutCorrectionKeys& r = c.algorithm.rollout_correction;
  if (!r.score_centering || exact_rollout(c)) return;
  const auto refuse = [](const std::string& what, const char* instead) {
    fail("algorithm.rollout_correction.score_centering ", what, "; set ", instead);
  };
  const std::string is =
      cat("algorithm.rollout_correction.rollout_is = ", config_key("algorithm.rollout_correction.rollout_is").show(c));
  if (r.rollout_is == RolloutIs::paper)
    refuse(cat("subtracts a mean, which ", is, " makes 0"), "rollout_is to none, tis or icepop, or turn it off");
  if (r.rollout_is == RolloutIs::released)
    refuse(cat("needs the weight of every id, and ", is, " normalises those of the sampled tokens"),
           "rollout_is to none, tis or icepop");
  if (r.rollout_is != RolloutIs::none && r.rollout_is_level != RatioLevel::token)
    refuse("needs a weight for each token", "algorithm.rollout_correction.rollout_is_level=token");
  if (c.algorithm.obrs.enable)
    refuse("needs the weight of every id, and algorithm.obrs draws those of the sampled tokens",
           "algorithm.obrs.enable=false");
  if (c.actor.policy_loss.loss_mode == PolicyLoss::gspo)
    refuse("centres the score of a token, and actor.policy_loss.loss_mode = \"gspo\" has one ratio for a sequence",
           "actor.policy_loss.loss_mode=vanilla");
  if (!one_update(c))
    refuse("compares the sampler with the weights it sampled at, and a second update of a rollout has changed them",
           "actor.ppo_epochs=1 and actor.ppo_mini_batch_size=0");
  if (c.actor.use_kl_loss && is_exact(c.actor.kl_loss_type))
    refuse("and actor.kl_loss_type = \"exact\" each compare whole distributions, and the loss has room for one",
           "actor.kl_loss_type=k3");
}

void check_corrections(const Config& c) {
  const RolloutCorrectionKeys& r = c.algorithm.rollout_correction;
  const ObrsKeys& o = c.algorithm.obrs;
  for (const auto& [name, bounds] :
       {std::pair{"rollout_is_bounds", &r.rollout_is_bounds}, {"rollout_rs_threshold", &r.rollout_rs_threshold}})
    if ((*bounds)[0] > (*bounds)[1])
      fail("algorithm.rollout_correction.", name, " = [", (*bounds)[0], ", ", (*bounds)[1],
           "] is empty; the lower bound comes first");
  if (r.rollout_is == RolloutIs::released) {
    if (r.rollout_is_level != RatioLevel::token)
      fail(
          "algorithm.rollout_correction.rollout_is = \"released\" weights tokens; set "
          "algorithm.rollout_correction.rollout_is_level=token");
    if (r.rollout_rs == RolloutRs::token)
      fail(
          "algorithm.rollout_correction.rollout_is = \"released\" has bounds of its own on tokens; set "
          "algorithm.rollout_correction.rollout_rs=none");
    if (c.actor.loss_agg_mode != LossAgg::seq_mean_token_mean)
      fail(
          "algorithm.rollout_correction.rollout_is = \"released\" divides by the tokens of a response that are left; "
          "set actor.loss_agg_mode=seq-mean-token-mean");
  }
  check_centring(c);
  const bool weights = r.rollout_is != RolloutIs::none;
  if (o.enable && (weights || r.rollout_rs == RolloutRs::token))
    fail("algorithm.obrs.enable and algorithm.rollout_correction.", weights ? "rollout_is" : "rollout_rs",
         " both weight tokens by the ratio to the sampler; turn one of them off");
  if (o.enable && o.cap > 0 && o.cap < o.lambda)
    fail("algorithm.obrs.cap = ", o.cap, " cuts every weight, which are at least algorithm.obrs.lambda = ", o.lambda,
         "; raise it, or set it to 0 (off)");
  if (keeps_sampler_states(c) && c.algorithm.filter_groups.enable)
    fail(r.acceptance            ? "algorithm.rollout_correction.acceptance"
         : r.score_centering     ? "algorithm.rollout_correction.score_centering"
         : c.rollout.kv.adapts() ? "rollout.kv.blocks.acceptance_target"
                                 : "algorithm.obrs.state_weight = \"z\"",
         " keeps the hidden states of one generation batch, algorithm.filter_groups.enable makes several; turn one of "
         "them off");
}

void check_oversampling(const Config& c) {
  const OversampleKeys& o = c.algorithm.oversample;
  const std::string keep = cat("algorithm.oversample.keep = ", o.keep);
  if (o.keep > c.rollout.n)
    fail(keep, " is more than rollout.n = ", c.rollout.n, ", the responses of which it keeps some");
  if (o.keep == 0 || o.keep == c.rollout.n) return;
  if (o.keep == 1) fail(keep, " leaves groups of one, where algorithm.adv_estimator makes every advantage 0");
  if (c.algorithm.adv_estimator == AdvEstimator::rloo)
    fail(keep,
         " leaves responses that are not independent, which the baseline of algorithm.adv_estimator = \"rloo\" "
         "assumes; set algorithm.adv_estimator=grpo");
  if (o.by != OversampleBy::acceptance) return;
  const std::string by = "algorithm.oversample.by = \"acceptance\"";
  if (exact_rollout(c))
    fail(by,
         " ranks by the ratio of learner and sampler, which is 1 where both attend to the same tokens "
         "(rollout.kv.method, learner.attention); set algorithm.oversample.by=reward");
  if (c.algorithm.filter_groups.enable)
    fail(by, " chooses after the groups of algorithm.filter_groups.enable; turn one of them off");
}

void check_rpo(const Config& c) {
  const RpoKeys& rpo = c.algorithm.rpo;
  if (!rpo.enable) return;
  if (c.rollout.kv.evicts())
    fail("algorithm.rpo.enable begins responses with tokens of earlier ones, which rollout.kv.method = ",
         config_key("rollout.kv.method").show(c),
         " would take for a part of the prompt when it evicts; set rollout.kv.method to dense, quest or block_topk");
  if (kept_members(c) < c.rollout.n)
    fail(
        "algorithm.rpo.enable draws the next entry from all responses of a group, algorithm.oversample.keep drops "
        "some; turn one of them off");
  if (rpo.prefix_loss != PrefixLoss::included) return;
  const auto refuse = [](const std::string& what, const std::string& instead) {
    fail("algorithm.rpo.prefix_loss = \"included\" trains on tokens that the sampler gave no log-prob, which ", what,
         " needs; set algorithm.rpo.prefix_loss=masked, or ", instead);
  };
  const ActorKeys& a = c.actor;
  if (a.ppo_epochs > 1) refuse(cat("actor.ppo_epochs = ", a.ppo_epochs), "actor.ppo_epochs=1");
  if (a.ppo_mini_batch_size > 0 && a.ppo_mini_batch_size < c.data.train_batch_size)
    refuse(cat("actor.ppo_mini_batch_size = ", a.ppo_mini_batch_size), "actor.ppo_mini_batch_size=0");
  if (c.algorithm.obrs.enable) refuse("algorithm.obrs", "algorithm.obrs.enable=false");
  if (corrects(c.algorithm.rollout_correction))
    refuse("algorithm.rollout_correction", "turn its veto, rollout_is and rollout_rs off");
  if (c.algorithm.rollout_correction.acceptance) refuse("algorithm.rollout_correction.acceptance", "turn that off");
  if (c.algorithm.rollout_correction.score_centering)
    refuse("algorithm.rollout_correction.score_centering", "turn that off");
  if (c.algorithm.use_kl_in_reward) refuse("algorithm.use_kl_in_reward", "algorithm.use_kl_in_reward=false");
  if (c.learner.attention == LearnerAttention::replay && c.rollout.kv.sparse_reads())
    fail(
        "algorithm.rpo.prefix_loss = \"included\" makes the prefix a part of the response, which learner.attention = "
        "\"replay\" reads in blocks, but the sampler read all of it; set algorithm.rpo.prefix_loss=masked");
}

void check_distill(const Config& c) {
  const DistillKeys& d = c.distill;
  if (!d.enable) return;
  if (c.model.lora.rank == 0 && c.model.lora.adapter_path.empty())
    fail(
        "distill.enable trains adapters of the sampler, and model.lora.rank = 0 gives it none; set model.lora.rank=32");
  if (!c.rollout.kv.sparse_reads())
    fail(
        "distill.enable needs a learner that attends as the sampler does, by blocks; set rollout.kv.method=quest or "
        "block_topk");
  if (c.learner.attention == LearnerAttention::replay)
    fail(
        "distill.enable has a dense learner beside the sparse one, learner.attention = \"replay\" has none; set "
        "learner.attention=dense");
  if (d.order == DistillOrder::after && c.rollout.check_exact.value_or(false))
    fail(
        "distill.order = \"after\" takes the sparse learner to weights that the sampler had not, which "
        "rollout.check_exact forbids; set rollout.check_exact=auto, or distill.order=before");
  if (!c.trainer.exact && c.rollout.check_exact.value_or(false))
    fail(
        "distill.enable compares the sampler with the sparse learner, whose sums trainer.exact = false orders "
        "otherwise; set rollout.check_exact=auto");
  if (c.actor.policy_loss.loss_mode == PolicyLoss::gspo)
    fail(
        "distill.enable has a ratio for each token, actor.policy_loss.loss_mode = \"gspo\" one for a sequence; set "
        "actor.policy_loss.loss_mode=vanilla");
  if (d.order == DistillOrder::after &&
      (d.kl_type == DistillKl::exact_reverse || d.kl_type == DistillKl::exact_forward))
    fail(
        "distill.order = \"after\" compares with theta before its step, of which an exact distill.kl_type would need a "
        "copy; set distill.order=before, or distill.kl_type=k2 or k3");
}

void check_actor(const Config& c) {
  const ActorKeys& a = c.actor;
  if (a.clip_ratio_c != 0 && a.clip_ratio_c <= 1)
    fail("actor.clip_ratio_c = ", a.clip_ratio_c, " bounds the ratio from above: expected 0 (off) or more than 1");
  if (a.ppo_mini_batch_size > 0 && c.data.train_batch_size % a.ppo_mini_batch_size != 0)
    fail("actor.ppo_mini_batch_size = ", a.ppo_mini_batch_size,
         " does not divide data.train_batch_size = ", c.data.train_batch_size);
  if (a.policy_loss.loss_mode == PolicyLoss::gspo) {
    if (a.loss_agg_mode != LossAgg::seq_mean_token_mean)
      fail(
          "actor.policy_loss.loss_mode = \"gspo\" has one loss per sequence; set "
          "actor.loss_agg_mode=seq-mean-token-mean");
    if (a.token_subset != TokenSubset::none)
      fail(
          "actor.policy_loss.loss_mode = \"gspo\" needs the log-ratios of all tokens of a sequence, which "
          "actor.token_subset leaves out; set actor.token_subset=none");
  }
}

}  // namespace

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
  act_type(config);
  check_device(config.trainer);
  if (config.trainer.total_training_steps == 0 && config.trainer.total_epochs == 0)
    fail("neither trainer.total_training_steps nor trainer.total_epochs is given; set one of them");
  check_data(config);
  check_rollout(config);
  check_corrections(config);
  check_oversampling(config);
  check_actor(config);
  check_rpo(config);
  check_distill(config);
  if (config.exact.full && !(exact_learner(config) && checks_exact(config)))
    fail("exact.full compares the sampler's distributions with the learner's, which this run does not hold equal (",
         !config.trainer.exact                        ? "trainer.exact = false"
         : !config.rollout.check_exact.value_or(true) ? "rollout.check_exact = false"
                                                      : "rollout.kv.method, without learner.attention = \"replay\"",
         "); set exact.full=false");
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
