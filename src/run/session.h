// Components of a run: an engine (the model on its device) and its data, built from a configuration.  Everything that
// can be wrong with files and sizes is found here, before the first step.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>

#include "model/hf/peft.h"
#include "model/learner.h"
#include "rl/metrics.h"
#include "rollout/rollout.h"
#include "run/data.h"

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

struct Session : Engine, Data {
  // A model that is not `trainable` takes less memory.  Without limits each arena may take all that the table's memory
  // has.  Without `data` there are neither tokenizer nor problems: for plans, on table_null.  All ranks of `comm` make
  // the same sessions.
  explicit Session(const Config& config, const Table& table = table_cpu, bool trainable = true,
                   const std::optional<ArenaLimits>& limits = {}, bool data = true, Comm& comm = world());

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
  ModelConfig model_config;
  DType weights_dtype = DType::f32;  // of the files that the run starts from; f32: random weights, several types
  uint64_t initial_weights = 0;      // a hash of the parameters that the run starts from; 0 while planning
  uint64_t base_weights = 0;         // the same of those of the model, without adapters

 private:
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

}  // namespace pare
