// The keys that decide the bits of a run: which part two runs, which an audit compares.
#include <algorithm>

#include "ops/linear.h"
#include "run/config.h"

namespace pare {

namespace {

// Keys that change no bit of a step.
const std::vector<std::string>& free_keys() {
  static const std::vector<std::string> free = {"model.enable_gradient_checkpointing",
                                                "data.reward_timeout",
                                                "rollout.max_kept_ids",
                                                "rollout.max_num_seqs",
                                                "rollout.max_num_batched_tokens",
                                                "rollout.kv_cache_bytes",
                                                "rollout.free_cache_engine",
                                                "rollout.check_exact",
                                                "rollout.on_mismatch",
                                                "rollout.val_kwargs.kv",
                                                "exact.full",
                                                "algorithm.rollout_correction.acceptance",
                                                "actor.ppo_max_token_len",
                                                "actor.logits_chunk",
                                                "trainer.command",
                                                "trainer.n_gpus_per_node",
                                                "trainer.nnodes",
                                                "trainer.nccl_timeout",
                                                "trainer.comm",
                                                "trainer.threads",
                                                "trainer.total_epochs",
                                                "trainer.test_freq",
                                                "trainer.val_before_train",
                                                "trainer.check_nan",
                                                "trainer.skip_nonfinite",
                                                "trainer.experiment_name",
                                                "trainer.default_local_dir",
                                                "trainer.save_freq",
                                                "trainer.max_actor_ckpt_to_keep",
                                                "trainer.save_model",
                                                "trainer.save_dtype",
                                                "trainer.max_file_bytes",
                                                "trainer.samples_freq",
                                                "trainer.samples_per_step"};
  return free;
}

// Keys that say where files lie.
const std::vector<std::string>& path_keys() {
  static const std::vector<std::string> paths = {
      "model.path",     "model.config",   "model.lora.adapter_path", "data.train_files",
      "data.val_files", "data.tokenizer", "algorithm.rpo.cache_file"};
  return paths;
}

bool in(const std::vector<std::string>& list, const std::string& name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

// The number of steps shapes each of them.
bool steps_matter(const Config& c) {
  return c.actor.optim.lr_scheduler_type != LrSchedule::constant || c.data.noise_ramp > 0;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> keys_of_bits(const Config& c) {
  // The type of the model, its weights and the rows of a call are compared by themselves.
  static const std::vector<std::string> others = {"trainer.device", "model.dtype", "trainer.from_checkpoint"};
  std::vector<std::pair<std::string, std::string>> keys;
  for (const ConfigKey& k : config_keys()) {
    const bool rows = k.name == "actor.ppo_max_token_len" && act_type(c) == DType::bf16;
    if ((in(free_keys(), k.name) && !rows) || in(path_keys(), k.name) || in(others, k.name)) continue;
    if (k.name == "trainer.total_training_steps" && !steps_matter(c)) continue;
    keys.emplace_back(k.name, k.show(c));
  }
  return keys;
}

std::vector<std::string> keys_that_part(const Config& run, const Config& resumed, bool by_content) {
  // In bf16 the sum of a weight's gradient depends on the rows of each call (list.h).
  const auto rows_matter = [&](const std::string& name) {
    if (act_type(run) != DType::bf16) return false;
    const bool whole = run.actor.logits_chunk % kLinearPart == 0 && resumed.actor.logits_chunk % kLinearPart == 0;
    return name == "actor.ppo_max_token_len" || (name == "actor.logits_chunk" && !whole);
  };
  std::vector<std::string> keys;
  for (const ConfigKey& k : config_keys()) {
    if (k.show(run) == k.show(resumed) || (by_content && in(path_keys(), k.name))) continue;
    if (in(free_keys(), k.name) && !rows_matter(k.name)) continue;
    if (k.name == "trainer.total_training_steps" && !steps_matter(run)) continue;
    keys.push_back(k.name);
  }
  return keys;
}

}  // namespace pare
