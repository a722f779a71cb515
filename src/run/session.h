// Components of a run: the model on its device, the task, the tokenizer.  Built from a configuration; everything that
// can be wrong with files and sizes is found here, before the first step.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>

#include "data/reward_command.h"
#include "data/task.h"
#include "model/hf/peft.h"
#include "model/learner.h"
#include "rl/metrics.h"
#include "rollout/rollout.h"
#include "run/config.h"
#include "run/stop.h"
#include "tokenizer/chat.h"

namespace pare {

// The most that the arenas of an engine may hold, in bytes, which is what they take (plan.h).  On the host what they do
// not touch costs address space only.
struct ArenaLimits {
  size_t weights = 0, gradients = 0, optimizer = 0, kv = 0, activations = 0;
  size_t states = 0;    // of the sampler, that training needs too
  size_t scratch = 0;   // of the sampler; where nothing is shared it has the activations
  bool shared = false;  // kv and scratch lie in the memory of gradients and activations
  static ArenaLimits each(size_t bytes) { return {bytes, bytes, bytes, bytes, bytes, bytes, bytes}; }
  size_t sampling() const { return kv + scratch; }
  size_t training() const { return gradients + activations; }
  size_t saved() const { return shared ? std::min(sampling(), training()) : 0; }
  size_t total() const { return weights + optimizer + states + sampling() + training() - saved(); }
};

// A model on its device, with its adapters, and the memory that it computes in.
struct Engine {
  // On table_null nothing is computed and no memory is taken, only the books are kept.
  Engine(const Table& table, const ArenaLimits& limits, Comm& comm = world());
  // Makes the model and, with a `lora`, adapters.  What is `trainable` are these or, without any, the model; with
  // `distills` both, and the adapters are those of a second model, which shares the weights.
  void make(const ModelConfig& config, DType act, bool trainable, const std::optional<LoraSpec>& lora,
            bool distills = false);

  const Model& sampler() const { return sparse ? *sparse : *model; }
  bool frozen() const { return adapters && !sparse; }  // the model is what it started from
  Arena& rollout_scratch() { return shared ? scratch : activations; }
  ArenaLimits peaks() const;

  Device device;
  const std::unique_ptr<SharedMemory> shared;  // of what trains, by `limits`; else absent
  Arena weights, gradients, optimizer, kv, activations, states, scratch;
  std::unique_ptr<Model> model;
  std::unique_ptr<Adapters> adapters;  // of the model, which is frozen, or of `sparse`; absent: there are none
  std::unique_ptr<Model> sparse;       // of distillation; absent: there is none
};

// The format of text prompts; plain of the task ssa.
ChatFormat chat_format(const Config& config);

struct Session : Engine {
  // A model that is not `trainable` takes less memory.  Without limits each arena may take all that the table's memory
  // has.  Without `data` there are neither tokenizer nor problems: for plans, on table_null.  All ranks of `comm` make
  // the same sessions.
  explicit Session(const Config& config, const Table& table = table_cpu, bool trainable = true,
                   const std::optional<ArenaLimits>& limits = {}, bool data = true, Comm& comm = world());

  const Task& training_task() const;  // train; an Error naming data.train_files where there is none

  // Returns the ids of the problem, or of its conversation in the chat format of the run.  Throws an Error if they are
  // more than data.max_prompt_length.
  std::vector<int32_t> encode_prompt(const Problem& problem) const;
  // Returns the ids that the problem's row teaches: its completion as it stands, or its reply as the chat format
  // renders that after the prompt, and EOS.
  std::vector<int32_t> encode_completion(const Problem& problem, const std::string& text) const;
  // Keeps the rows of `task` that fit.  `excess` returns how a row is too long ("the prompt has 7 tokens, data.max_...
  // is 5"), or an empty text.  Throws at the first such row; with data.filter_overlong_prompts it is left out, and
  // `notes` has their number.
  void keep_fitting(Task& task, const std::function<std::string(const Problem&)>& excess);
  std::string response_text(const Completion& completion) const;  // of text_tokens()
  Reward reward(const Task& task, const Problem& problem, const Completion& completion) const;
  // Grades all responses, in order, in parallel; the completions' requests index `problems`.  Ranks share
  // the work, as they do that of Rollout::generate; all get the rewards.
  std::vector<Reward> rewards(const Task& task, std::span<const Problem> problems,
                              std::span<const Completion> completions) const;
  LearnerOptions learner_options() const;
  LearnerOptions student_options() const;  // of `sparse`: it attends as the sampler does, its teacher to everything
  RolloutLimits rollout_limits() const;
  std::vector<const Arena*> arenas() const;       // those that there are
  int64_t flops(const std::string& phase) const;  // in the ledgers of all ranks
  // memory/<arena>: the peak so far, in bytes, and nothing else; and what they take together under verl's name, in GiB.
  // Sets the memory of the rank that has most.
  void set_memory(Metrics& metrics) const;

  const Config config;
  Ledger ledger;
  std::unique_ptr<Tokenizer> tokenizer;           // absent: without data
  ChatFormat chat;                                // of text prompts
  std::shared_ptr<RewardCommand> reward_command;  // of data.reward = "command:..."; absent: another one
  std::unique_ptr<Task> train, val;               // absent: without data; jsonl without train_files, without val_files
  int64_t left_out = 0;                           // rows of train_files, by data.filter_overlong_prompts
  std::vector<std::string> notes;                 // on the data and how responses end, for the user
  ModelConfig model_config;
  std::vector<int32_t> eos;  // any of them ends a response; the first is the tokenizer's, where it is one of them

  Stop stop;         // other ends of a response
  int32_t end = -1;  // ends a completion that is given as a text: eos[0], or the end of a turn if it is a stop token

  DType weights_dtype = DType::f32;  // of the files that the run starts from; f32: random weights, several types
  uint64_t initial_weights = 0;      // a hash of the parameters that the run starts from; 0 while planning
  uint64_t base_weights = 0;         // the same of those of the model, without adapters

 private:
  void read_data();
  std::string reply_text(const Problem& problem) const;
  std::vector<int32_t> prompt_of_any_length(const Problem& problem) const;
  void check_prompts();
};

// The adapters of model.lora; none: off.
std::optional<LoraSpec> lora_spec(const LoraKeys& keys);

// The model of model.config: a config.json, or the name of a shape of data/presets.
ModelConfig read_shape(const std::string& file_or_name);
// The model of model.path, or else of model.config.
ModelConfig read_model_config(const ModelKeys& keys);

// Bytes that a rank holds on the host at most, outside of arenas, for the responses of a step: tokens, log-probs, and
// the columns of the loss.  An upper bound.
size_t response_memory(const Config& config);
// Throws Error(memory) if `memory` is less.
void check_response_memory(const Config& config, size_t memory = machine_memory());

// Rows of a data set in the order of training: epoch after epoch, each shuffled by (seed, epoch).
class PromptStream {
 public:
  PromptStream(int64_t rows, bool shuffle, uint64_t seed);
  struct Row {
    int64_t epoch, row;
  };
  Row next();

  struct Cursor {
    int64_t epoch = 0, next = 0;  // next: rows of the epoch that were given out
    bool operator==(const Cursor&) const = default;
  };
  Cursor cursor() const { return {epoch_, next_}; }
  void seek(const Cursor& cursor);

 private:
  void start_epoch();
  const int64_t rows_;
  const bool shuffle_;
  const uint64_t seed_;
  int64_t epoch_ = 0, next_ = 0;
  std::vector<int64_t> order_;
};

}  // namespace pare
