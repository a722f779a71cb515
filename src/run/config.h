// The configuration of a run: one typed struct, and one table of keys from which files and overrides are read, the
// resolved configuration is printed, and the reference (`config_reference`) is written.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/toml.h"
#include "kv/spec.h"
#include "model/hf/tensor_files.h"
#include "model/model.h"
#include "rl/actor_keys.h"
#include "rl/algorithm_keys.h"
#include "rl/distill.h"
#include "rl/replay.h"
#include "rl/rewards.h"

namespace pare {

enum class ValKv { dense, rollout, both };
enum class OnMismatch { fail, carry_on };
enum class ActType { automatic, f32, bf16 };
enum class DeviceKind { cpu, cuda, emu };
enum class RunCommand { any, train, sft };
constexpr const char* command_name(RunCommand command) { return command == RunCommand::sft ? "sft" : "train"; }
enum class SaveType { automatic, f32, bf16, f16 };

// A struct is a table of keys; those that a stage of src/rl reads stand with it.  A member's path is its key
// ("actor.optim.lr"), its initial value the default; config_keys_*.cpp say what each means.
struct LoraKeys {
  int64_t rank = 0;
  double alpha = 32;
  std::vector<std::string> target_modules = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                             "gate_proj", "up_proj", "down_proj"};
  std::string adapter_path;
  bool operator==(const LoraKeys&) const = default;
};
struct ModelKeys {
  std::string path, config;
  Init init = Init::config;
  ActType dtype = ActType::automatic;
  std::optional<bool> enable_gradient_checkpointing = {};  // none: auto
  LoraKeys lora;
  bool operator==(const ModelKeys&) const = default;
};

struct ChatTemplateKeys {
  bool enable_thinking = true;
  std::string date_string = "26 Jul 2024";
  bool operator==(const ChatTemplateKeys&) const = default;
};
struct DataKeys {
  std::string task = "ssa", variant = "default";
  std::vector<std::string> train_files, val_files;
  int64_t train_rows = 1024, train_seed = 4242, val_rows = 256, val_seed = 999;
  int64_t min_statements = 6, max_statements = 8, val_min_statements = 0;
  double noise = -1, noise_ramp = 0;
  std::string tokenizer, chat_template = "auto";
  ChatTemplateKeys apply_chat_template_kwargs;
  std::string reward;
  double reward_timeout = 60;
  std::string prompt_key, answer_key, system_prompt;
  int64_t train_batch_size = 64, max_prompt_length = 512, max_response_length = 512;
  bool filter_overlong_prompts = false, shuffle = true;
  bool operator==(const DataKeys&) const = default;
};

struct ExactKeys {
  bool full = false;
  bool operator==(const ExactKeys&) const = default;
};

struct ValKeys {
  int64_t n = 1;
  double temperature = 0;
  int64_t top_k = 0;
  double top_p = 1, min_p = 0;
  ValKv kv = ValKv::dense;
  bool operator==(const ValKeys&) const = default;
};

struct RolloutKeys {
  int64_t n = 8;
  double temperature = 1;
  int64_t top_k = 0;
  double top_p = 1, min_p = 0;
  int64_t max_kept_ids = 1024;
  std::vector<int64_t> stop_token_ids;
  std::vector<std::string> stop;
  int64_t max_num_seqs = 256, max_num_batched_tokens = 8192, kv_cache_bytes = 0;
  bool free_cache_engine = true;
  std::optional<bool> check_exact;  // none: auto
  OnMismatch on_mismatch = OnMismatch::fail;
  KvSpec kv;
  ValKeys val_kwargs;
  bool operator==(const RolloutKeys&) const = default;
};

struct TrainerKeys {
  RunCommand command = RunCommand::any;
  DeviceKind device = DeviceKind::cpu;
  bool exact = true;
  bool balance_batch = true;
  int64_t n_gpus_per_node = 0, nnodes = 0, nccl_timeout = 600;
  DeviceComm comm = DeviceComm::any;
  int64_t total_epochs = 0, total_training_steps = 100;  // steps 0: total_epochs gives them (resolve_steps)
  int64_t seed = 1, threads = 0, test_freq = 0;
  bool val_before_train = false, check_nan = false;
  int64_t skip_nonfinite = 0;
  std::string experiment_name, default_local_dir, from_checkpoint;
  int64_t save_freq = 50, max_actor_ckpt_to_keep = 2;
  bool save_model = true;
  SaveType save_dtype = SaveType::automatic;
  int64_t max_file_bytes = kFileBytes;
  int64_t samples_freq = 10, samples_per_step = 0;
  bool operator==(const TrainerKeys&) const = default;
};

// Choices between memory and time that keys leave open (fit_memory); no keys.  They change orders of sums at most.
struct Fitted {
  int64_t recompute = 0;        // blocks, by model.enable_gradient_checkpointing
  int64_t logits_chunk = 4096;  // rows, by actor.logits_chunk
  bool operator==(const Fitted&) const = default;
};

struct Config {
  ModelKeys model;
  DataKeys data;
  RolloutKeys rollout;
  RewardKeys reward_model;
  AlgorithmKeys algorithm;
  ActorKeys actor;
  LearnerKeys learner;
  DistillKeys distill;
  ExactKeys exact;
  TrainerKeys trainer;
  Fitted fitted;
  bool operator==(const Config&) const = default;
};

// Reads the arguments from left to right, later ones win.  An argument with '=' is an override `group.key=value`; any
// other is the name of a preset (data/presets.h) or a TOML file, so that a method is laid over a run: {"quickstart",
// "nat-rpc", "trainer.seed=2"}.  A file may start from others: base = "NAME" or [NAMES].  Throws Error(usage) for
// unknown keys and presets (naming the nearest), wrong types, values out of range and contradictions (naming both
// keys).  In the result top_k is 0 where it is off, an enabled overlong buffer has its length, validation its numbers
// of statements, and the run a name: that of its files ("quickstart-nat-rpc").
//
// Each file is a layer, and so are the overrides between two files.  Given alone, model.path takes the place of the
// model.config of an earlier layer, and model.config that of model.path; files of data make data.task jsonl where their
// layer does not say it.  The default_local_dir of a preset holds where the preset is given alone, but for
// trainer.device and trainer.exact.  Without validation files a preset's test_freq and val_before_train are off;
// `notes` gets a line for each, and for each key that the user gave another value than its default and that has no
// effect in the result ("rollout.kv.streaming_llm.sinks has no effect: rollout.kv.method is snapkv").
// A model.path or data.tokenizer OWNER/NAME that is no folder but in the cache of the Hugging Face Hub becomes its
// folder. Likewise trainer.total_epochs and trainer.total_training_steps, but given together the steps count,
// as in verl.
Config load_config(const std::vector<std::string>& files_and_overrides, std::vector<std::string>* notes = nullptr);
// The same without looking for contradictions, which are of training: for what only generates.
Config read_config(const std::vector<std::string>& files_and_overrides, std::vector<std::string>* notes = nullptr);

// The parts of load_config.  Sets the keys of a document (it has no `base`) without looking for contradictions.
void apply_toml(Config& config, const std::string& document, const std::string& where);
// The same for a document that to_toml of this program or of an older one has written: keys may have their old names.
void apply_recorded(Config& config, const std::string& document, const std::string& where);
void check_config(const Config& config);
// The type of weights and activations.
DType act_type(DeviceKind device, ActType type);
inline DType act_type(const Config& config) { return act_type(config.trainer.device, config.model.dtype); }
// Refuses what the device has not got: the cpu has no linear layers but exact ones.
void check_device(const TrainerKeys& where);
// RolloutLimits::lookahead: a device whose work is queued runs on while the host prepares, the cpu has nothing to gain.
inline int lookahead(const Config& config) { return config.trainer.device == DeviceKind::cpu ? 1 : 8; }
// The tokenizer, as make_tokenizer wants it: data.tokenizer, else that of the built-in task or of the model.
std::string tokenizer_spec(const Config& config);
// A KL to the initial model is part of the objective.
bool needs_reference(const Config& config);
template <class Keys>  // RolloutKeys, ValKeys
Truncation truncation_of(const Keys& k) {
  return {static_cast<int32_t>(k.top_k), static_cast<float>(k.top_p), static_cast<float>(k.min_p)};
}
// True if the sampler attends to less than the learner.
bool sparser_than_learner(const Config& config);
// True if every rollout is trained on once, at the weights that sampled it.
bool one_update(const Config& config);
// The sampler's distribution is, bit by bit, that of the learner: sums have one order, and nothing is left out, or both
// leave out the same.
bool exact_rollout(const Config& config);
// The sampler's log-probs are compared with those of the learner that attends as it does; in an exact run they are
// equal, bit by bit.
bool checks_exact(const Config& config);
// Members of a group that are trained on: rollout.n, or algorithm.oversample.keep of them.
int64_t kept_members(const Config& config);
// The learner computes the prefixes of responses once for a group (algorithm.rpo).
bool shares_prefixes(const Config& config);
bool exact_learner(const Config& config);
// The rollout keeps the hidden state that each token was drawn from.
bool keeps_sampler_states(const Config& config);
// The most ids of a truncated draw that the rollout records for the learner; 0: none, since its logits equal the
// sampler's bit for bit.
int64_t kept_ids(const Config& config);
// Warnings about settings that are allowed but change the objective or the estimator, one line each.
std::vector<std::string> config_warnings(const Config& config);

// Names the keys by which two configurations differ and which change a bit of the steps that a run has done: such a
// run cannot be continued.  What only moves, watches or splits the work may differ, and the number of steps where no
// earlier step depends on it; `by_content`: and the keys that say where files lie, since the files are compared.
std::vector<std::string> keys_that_part(const Config& run, const Config& resumed, bool by_content = false);

// The keys that decide on the bits of a run, with their values as TOML: none that only moves, watches or splits the
// work, says where files lie or chooses the device; the number of steps where they depend on it.
std::vector<std::pair<std::string, std::string>> keys_of_bits(const Config& config);

std::string to_toml(const Config& config);  // every key; reads back as the same configuration
// Every key with its default, type, source and meaning, grouped by section and condition: Markdown that reads well in
// a terminal too.  `group`: those below it alone ("rollout.kv"); throws Error(usage), naming the nearest, if none is.
std::string config_reference(const std::string& group = "");

// The key table.
struct KeyCondition {
  std::string key;
  std::vector<std::string> values;  // of which it has one; as TOML, without quotes; "command:*": any that begins so
  bool negated = false;             // of which it has none
  bool holds(const Config& config) const;
  bool operator==(const KeyCondition&) const = default;
};
// The meaning of a key for the bits of a run's steps.
enum class KeyDecides {
  bits,     // a run can be continued with the same value only
  nothing,  // it moves, watches or splits the work
  file,     // it says where a file lies, and the files are compared
  apart     // a run can be continued with the same value only; an audit compares what follows from it
};
struct ConfigKey {
  std::string name;             // dotted
  std::string type;             // and range, in words
  std::string unit;             // empty: none
  std::string meaning, source;  // source: whose spelling and definition it is
  KeyDecides decides;
  // True if the two values of the key give different bits; null: they do unless the key decides nothing.
  std::function<bool(const Config& run, const Config& resumed)> parts;
  std::vector<std::string> flags;                          // of commands, for the key
  std::vector<std::function<void(const Config&)>> checks;  // throw Error(usage) if another key contradicts this one
  std::vector<KeyCondition> when;                          // unless all of them hold, the key has no effect
  std::function<std::string(const Config&)> show;          // the value as TOML
  std::function<void(Config&, const TomlItem&)> assign;    // throws Error(usage), without the key's name
};
const std::vector<ConfigKey>& config_keys();
const ConfigKey& config_key(const std::string& name);  // of a key, or a flag, that exists

// The tables of the reference; a key belongs to the longest name in front of its own.
struct KeySection {
  std::string name, what;
};
const std::vector<KeySection>& config_sections();

}  // namespace pare
