#include "run/unknown_key.h"

#include <algorithm>
#include <map>

#include "base/nearest.h"
#include "run/config.h"

namespace pare {

const std::map<std::string, std::string>& foreign_keys() {
  static const std::map<std::string, std::string> keys = {
      // verl, without actor_rollout_ref
      {"actor.clip_ratio", "is actor.clip_ratio_low and actor.clip_ratio_high here"},
      {"actor.ppo_max_token_len_per_gpu", "actor.ppo_max_token_len"},
      {"actor.ppo_micro_batch_size", "actor.ppo_max_token_len"},
      {"actor.ppo_micro_batch_size_per_gpu",
       "is not needed: micro-batches are filled up to actor.ppo_max_token_len tokens"},
      {"actor.use_dynamic_bsz", "is not needed: micro-batches are always filled up to actor.ppo_max_token_len tokens"},
      {"actor.ulysses_sequence_parallel_size", "does not exist here: there is no sequence parallelism"},
      {"actor.strategy", "does not exist here: ranks share the optimizer (ZeRO stage 1)"},
      {"actor.optim.lr_warmup_steps_ratio", "is given in steps here: actor.optim.lr_warmup_steps"},
      {"actor.optim.warmup_style", "actor.optim.lr_scheduler_type"},
      {"actor.optim.total_training_steps", "trainer.total_training_steps"},
      {"actor.policy_loss.clip_cov_ratio",
       "does not exist here: actor.policy_loss.loss_mode is vanilla, gspo or cispo"},
      {"actor.shuffle", "does not exist here: mini-batches keep the order of the prompts"},
      {"actor.use_torch_compile", "is not needed: kernels are compiled ahead of time"},
      {"actor.fsdp_config.model_dtype", "model.dtype"},
      {"actor.fsdp_config.param_offload", "does not exist here: nothing is offloaded"},
      {"actor.fsdp_config.optimizer_offload", "does not exist here: nothing is offloaded"},
      {"model.use_remove_padding", "is not needed: batches are always packed without padding"},
      {"model.lora_rank", "model.lora.rank"},
      {"model.lora_alpha", "model.lora.alpha"},
      {"model.target_modules", "model.lora.target_modules"},
      {"model.lora_adapter_path", "model.lora.adapter_path"},
      {"model.partial_pretrain", "model.path"},
      {"model.custom_chat_template", "data.chat_template"},
      {"model.trust_remote_code", "does not exist here: model folders hold no code that is run"},
      {"model.enable_activation_offload", "does not exist here; model.enable_gradient_checkpointing saves activations"},
      {"model.use_liger", "does not exist here: kernels are pare's own"},
      {"rollout.name", "does not exist here: pare samples with its own engine"},
      {"rollout.mode", "does not exist here: sampling and training take turns"},
      {"rollout.tensor_model_parallel_size", "does not exist here: every rank holds the whole model"},
      {"rollout.gpu_memory_utilization",
       "does not exist here: the memory is planned; rollout.kv_cache_bytes limits keys and values"},
      {"rollout.response_length", "data.max_response_length"},
      {"rollout.prompt_length", "data.max_prompt_length"},
      {"rollout.max_model_len", "is data.max_prompt_length + data.max_response_length here"},
      {"rollout.log_prob_micro_batch_size", "actor.ppo_max_token_len"},
      {"rollout.log_prob_micro_batch_size_per_gpu", "actor.ppo_max_token_len"},
      {"rollout.log_prob_max_token_len_per_gpu", "actor.ppo_max_token_len"},
      {"rollout.do_sample",
       "does not exist here: rollouts are sampled; rollout.val_kwargs.temperature=0 decodes greedily"},
      {"rollout.val_kwargs.do_sample", "is rollout.val_kwargs.temperature here: 0 decodes greedily"},
      {"rollout.dtype", "model.dtype"},
      {"rollout.allow_truncated_sampling", "is not needed: the learner is of the distribution that is sampled"},
      {"rollout.enforce_eager", "is the environment variable PARE_GRAPHS=0 here"},
      {"rollout.ignore_eos", "does not exist here: a response ends with an EOS"},
      {"learner.slots", "learner.shards"},  // its name until November 2026
      {"ref.log_prob_micro_batch_size_per_gpu", "actor.ppo_max_token_len"},
      {"ref.fsdp_config.param_offload", "does not exist here: nothing is offloaded"},
      {"nccl_timeout", "trainer.nccl_timeout"},
      {"hybrid_engine", "is not needed: sampler and learner are always one model"},
      {"data.reward_fn_key", "does not exist here: data.reward grades all rows"},
      {"data.truncation", "does not exist here: a long row is an error, or data.filter_overlong_prompts leaves it out"},
      {"data.max_length", "is data.max_prompt_length and data.max_response_length here"},
      {"data.response_key", "does not exist here: name the field \"completion\" (`pare help data`)"},
      {"data.multiturn.enable", "is not needed: rows with \"messages\" are conversations (`pare help data`)"},
      {"data.multiturn.messages_key", "data.prompt_key"},
      {"data.val_batch_size", "is not needed: validation fills the sampler (rollout.max_num_seqs)"},
      {"data.gen_batch_size", "data.train_batch_size"},
      {"data.seed", "trainer.seed"},
      {"data.return_raw_chat", "is not needed: rows may hold text or messages"},
      {"data.custom_cls.path", "does not exist here: write the rows as JSON lines (`pare help data`)"},
      {"optim.lr_scheduler", "actor.optim.lr_scheduler_type"},
      {"optim.warmup_steps_ratio", "is given in steps here: actor.optim.lr_warmup_steps"},
      {"optim.clip_grad", "actor.grad_clip"},
      {"algorithm.gamma",
       "does not exist here: advantages are those of whole responses (GRPO, RLOO), without a critic"},
      {"algorithm.lam", "does not exist here: advantages are those of whole responses (GRPO, RLOO), without a critic"},
      {"algorithm.kl_ctrl.type", "does not exist here: the coefficient of the KL is fixed"},
      {"critic", "does not exist here: advantages come from groups of responses, without a critic"},
      {"reward_model.enable", "does not exist here: data.reward is a verifier or a program of your own"},
      {"reward_model.model.path", "does not exist here: data.reward is a verifier or a program of your own"},
      {"reward_model.reward_manager", "data.reward"},
      {"reward_model.overlong_buffer_cfg.enable", "reward_model.overlong_buffer.enable"},
      {"reward_model.overlong_buffer_cfg.len", "reward_model.overlong_buffer.len"},
      {"custom_reward_function.path", "is a program of your own here: data.reward=command:PROGRAM"},
      {"custom_reward_function.name", "is a program of your own here: data.reward=command:PROGRAM"},
      {"trainer.logger", "is not needed: every run writes metrics.jsonl and a file for TensorBoard"},
      {"trainer.project_name", "trainer.experiment_name"},
      {"trainer.resume_mode", "is the option --resume here"},
      {"trainer.resume_from_path", "is the option --resume here, with the config.toml of the run"},
      {"trainer.resume_path", "is the option --resume here, with the config.toml of the run"},
      {"trainer.val_only", "is `pare eval` here"},
      {"trainer.max_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep"},
      {"trainer.critic_warmup", "does not exist here: there is no critic"},
      {"trainer.log_val_generations", "is `pare eval --out FILE` here"},
      {"trainer.rollout_data_dir", "is rollouts.jsonl of the run here (trainer.samples_freq)"},
      {"trainer.default_hdfs_dir", "does not exist here"},
      // TRL and transformers
      {"model_name_or_path", "model.path"},
      {"dataset_name", "is data.train_files here, files of JSON lines (`pare help data`)"},
      {"output_dir", "is the option --out here (trainer.default_local_dir)"},
      {"run_name", "trainer.experiment_name"},
      {"learning_rate", "actor.optim.lr"},
      {"weight_decay", "actor.optim.weight_decay"},
      {"adam_beta1", "is the first of actor.optim.betas here"},
      {"adam_beta2", "is the second of actor.optim.betas here"},
      {"adam_epsilon", "actor.optim.eps"},
      {"max_grad_norm", "actor.grad_clip"},
      {"lr_scheduler_type", "actor.optim.lr_scheduler_type"},
      {"warmup_steps", "actor.optim.lr_warmup_steps"},
      {"warmup_ratio", "is given in steps here: actor.optim.lr_warmup_steps"},
      {"num_train_epochs", "trainer.total_epochs"},
      {"max_steps", "trainer.total_training_steps"},
      {"save_steps", "trainer.save_freq"},
      {"save_total_limit", "trainer.max_actor_ckpt_to_keep"},
      {"eval_steps", "trainer.test_freq"},
      {"eval_strategy", "is trainer.test_freq here, a number of steps"},
      {"eval_on_start", "trainer.val_before_train"},
      {"logging_steps", "is not needed: every step is logged"},
      {"report_to", "is not needed: every run writes metrics.jsonl and a file for TensorBoard"},
      {"seed", "trainer.seed"},
      {"bf16", "is model.dtype=bf16 here"},
      {"fp16", "does not exist here: model.dtype is f32 or bf16"},
      {"gradient_checkpointing", "model.enable_gradient_checkpointing"},
      {"gradient_accumulation_steps",
       "is not needed: data.train_batch_size prompts are a step, in micro-batches of actor.ppo_max_token_len tokens"},
      {"per_device_train_batch_size",
       "is data.train_batch_size here, prompts of a step on all devices; actor.ppo_max_token_len bounds a micro-batch"},
      {"per_device_eval_batch_size", "is not needed: validation fills the sampler (rollout.max_num_seqs)"},
      {"generation_batch_size", "data.train_batch_size"},
      {"num_generations", "rollout.n"},
      {"max_prompt_length", "data.max_prompt_length"},
      {"max_completion_length", "data.max_response_length"},
      {"max_length", "is data.max_prompt_length and data.max_response_length here"},
      {"max_seq_length", "is data.max_prompt_length and data.max_response_length here"},
      {"n", "rollout.n"},
      {"temperature", "rollout.temperature"},
      {"top_p", "rollout.top_p"},
      {"top_k", "rollout.top_k"},
      {"min_p", "rollout.min_p"},
      {"beta", "is the weight of the KL: actor.use_kl_loss=true actor.kl_loss_coef=BETA"},
      {"epsilon", "is actor.clip_ratio_low and actor.clip_ratio_high here"},
      {"epsilon_high", "actor.clip_ratio_high"},
      {"delta", "actor.clip_ratio_c"},
      {"num_iterations", "actor.ppo_epochs"},
      {"loss_type",
       "is actor.loss_agg_mode here (grpo: seq-mean-token-mean, dapo: token-mean, dr_grpo: seq-mean-token-sum-norm; "
       "the presets of these names set the rest)"},
      {"scale_rewards", "algorithm.norm_adv_by_std_in_grpo"},
      {"importance_sampling_level", "is actor.policy_loss.loss_mode=gspo here for sequences"},
      {"mask_truncated_completions", "algorithm.mask_truncated_completions"},
      {"off_policy_mask_threshold", "algorithm.rollout_correction.off_policy_mask_threshold"},
      {"reward_funcs", "data.reward"},
      {"reward_weights", "does not exist here: a program of your own (data.reward=command:PROGRAM) adds up rewards"},
      {"use_vllm", "does not exist here: pare samples with its own engine"},
      {"vllm_mode", "does not exist here: pare samples with its own engine"},
      {"vllm_gpu_memory_utilization",
       "does not exist here: the memory is planned; rollout.kv_cache_bytes limits keys and values"},
      {"vllm_importance_sampling_correction", "algorithm.rollout_correction.rollout_is"},
      {"vllm_importance_sampling_cap", "algorithm.rollout_correction.rollout_is_threshold"},
      {"sync_ref_model", "does not exist here: the reference is the initial model"},
      {"shuffle_dataset", "data.shuffle"},
      {"log_completions", "trainer.samples_freq"},
      {"num_completions_to_print", "trainer.samples_per_step"},
      {"use_peft", "is model.lora.rank here, above 0"},
      {"lora_r", "model.lora.rank"},
      {"lora_alpha", "model.lora.alpha"},
      {"lora_target_modules", "model.lora.target_modules"},
      {"lora_dropout", "does not exist here: adapters have no dropout"},
      {"assistant_only_loss", "is not needed: completions alone are learnt (`pare help data`)"},
      {"completion_only_loss", "is not needed: completions alone are learnt (`pare help data`)"},
      {"packing", "is not needed: batches are always packed without padding"},
      {"chat_template_path", "data.chat_template"},
      {"system_prompt", "data.system_prompt"},
      // OpenRLHF
      {"pretrain", "model.path"},
      {"prompt_data", "data.train_files"},
      {"eval_dataset", "data.val_files"},
      {"input_key", "data.prompt_key"},
      {"label_key", "data.answer_key"},
      {"apply_chat_template", "is data.chat_template here: auto takes the one in the model's folder"},
      {"input_template", "is data.chat_template here, a text with {problem}"},
      {"remote_rm_url", "is a program of your own here: data.reward=command:PROGRAM"},
      {"reward_pretrain", "does not exist here: data.reward is a verifier or a program of your own"},
      {"actor_learning_rate", "actor.optim.lr"},
      {"init_kl_coef", "is actor.kl_loss_coef here, with actor.use_kl_loss=true"},
      {"kl_estimator", "actor.kl_loss_type"},
      {"advantage_estimator", "algorithm.adv_estimator"},
      {"n_samples_per_prompt", "rollout.n"},
      {"rollout_batch_size", "data.train_batch_size"},
      {"train_batch_size", "data.train_batch_size"},
      {"micro_train_batch_size", "actor.ppo_max_token_len"},
      {"micro_rollout_batch_size", "rollout.max_num_seqs"},
      {"prompt_max_len", "data.max_prompt_length"},
      {"generate_max_len", "data.max_response_length"},
      {"num_episodes", "trainer.total_epochs"},
      {"max_epochs", "is trainer.total_epochs here; updates of one batch are actor.ppo_epochs"},
      {"eps_clip", "is actor.clip_ratio_low and actor.clip_ratio_high here"},
      {"eps_clip_low_high", "is actor.clip_ratio_low and actor.clip_ratio_high here"},
      {"max_norm", "actor.grad_clip"},
      {"l2", "actor.optim.weight_decay"},
      {"save_path", "is the option --out here (trainer.default_local_dir)"},
      {"ckpt_path", "is the option --out here (trainer.default_local_dir)"},
      {"zero_stage", "is not needed: ranks share the optimizer (ZeRO stage 1)"},
      {"dynamic_filtering", "algorithm.filter_groups.enable"},
  };
  return keys;
}

namespace {

std::string foreign_key(const std::string& name) {
  std::string key = name;
  key.erase(0, std::min(key.find_first_not_of("+~"), key.size()));  // Hydra's marks
  if (const std::string prefix = "actor_rollout_ref."; key.starts_with(prefix)) key.erase(0, prefix.size());
  const auto it = foreign_keys().find(key.starts_with("critic.") ? "critic" : key);
  if (it == foreign_keys().end()) return "";
  return it->second.find(' ') == std::string::npos ? cat("is ", it->second, " here") : it->second;
}

std::string last_part(const std::string& key) { return key.substr(key.rfind('.') + 1); }

// Flat spellings of keys below rollout.kv whose last part is another.
const std::map<std::string, std::string> flat_kv_keys = {
    {"window", "window.size"},          {"rkv_lambda", "rkv.lambda"}, {"rkv_threshold", "rkv.threshold"},
    {"pyramid_beta", "pyramidkv.beta"}, {"merge", "merge.method"},    {"merge_keys", "merge.keys"},
    {"block", "blocks.size"},           {"blocks", "blocks.count"},   {"first_blocks", "blocks.first"},
    {"last_blocks", "blocks.last"},
};

std::string top(const std::string& key) { return key.substr(0, key.find('.')); }

// The key that `name` is a misspelling or another path of; empty: none is close enough, or several are.  A key of
// another group would change something else: for it the whole name must be close.
std::string close_key(const std::string& name) {
  const std::string kv = "rollout.kv.", last = last_part(name);
  if (name.starts_with(kv))
    if (const auto flat = flat_kv_keys.find(name.substr(kv.size())); flat != flat_kv_keys.end())
      return kv + flat->second;
  const size_t most = std::clamp<size_t>((last.size() + 2) / 4, 1, 3);
  std::string best;
  size_t best_distance = std::string::npos;
  bool several = false;
  for (const ConfigKey& k : config_keys()) {
    if (name.ends_with("." + k.name)) return k.name;  // verl's actor_rollout_ref
    const size_t whole = edit_distance(name, k.name), part = edit_distance(last, last_part(k.name));
    const bool bare = last == name;
    if (part > most || !(bare || top(name) == top(k.name) || whole <= 2)) continue;
    const size_t distance = bare ? part : whole + (part == 0 ? 0 : 1000);
    if (distance < best_distance) {
      best = k.name;
      best_distance = distance;
      several = false;
    } else
      several = several || (bare && distance == best_distance);
  }
  return several ? "" : best;
}

}  // namespace

std::string about_unknown_key(const std::string& name) {
  if (const std::string here = foreign_key(name); !here.empty()) return ", which " + here;
  if (const std::string close = close_key(name); !close.empty()) return "; the nearest is " + close;
  const auto& sections = config_sections();
  const bool group = std::any_of(sections.begin(), sections.end(), [&](const auto& s) { return s.name == top(name); });
  return group ? cat("; `pare train --keys ", top(name), "` lists the keys of that group")
               : "; `pare train --keys` lists the keys";
}

}  // namespace pare
