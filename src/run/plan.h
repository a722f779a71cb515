// Cost of a step before it runs: the real code on a table of ops that do nothing.
#pragma once
#include <map>

#include "run/machine.h"
#include "run/training.h"

namespace pare {

struct Plan {
  Config config;  // that was planned, which for a run has Fitted
  struct Memory {
    std::string arena;
    size_t peak;                        // bytes, in the step whose lengths are the greatest
    size_t most;                        // bytes, in any step or evaluation
    std::vector<Arena::Entry> entries;  // what stays allocated between steps
  };
  ModelConfig model;
  std::vector<Memory> memory;
  std::vector<std::string> notes;  // Session::notes, and of plan_run() fitted_text() if memory is short
  ArenaLimits longest, most;       // the same as Memory::peak and Memory::most
  Ledger ledger;  // of the step whose lengths are the greatest; its seconds are those of a machine, if one is given
  size_t peak() const { return longest.total(); }
  size_t needed() const { return most.total() + responses; }  // of the machine that is planned for

  // Set by plan_ranks() only.
  int ranks = 1;
  Ledger all_ranks;                       // of all of them, added
  std::map<std::string, double> seconds;  // of each phase on the rank that takes longest, for which the others wait
  size_t responses = 0;                   // planned_responses()
};

// The worst case of one training step: every prompt of max_prompt_length, every response of max_response_length,
// nothing filtered.  A real step of those lengths has the same peaks, to the byte, and the same FLOPs.  Shorter
// responses take fewer FLOPs, but may fill micro-batches better (up to actor.ppo_max_token_len rows): then the
// activations of a real step are larger than these, and at most `most`.  Without `limits` no memory is too small for a
// plan.  Without `data` neither tokenizer nor data files are read.
Plan plan_step(const Config& config, TrainingKind kind = TrainingKind::grpo, bool data = true,
               const std::optional<ArenaLimits>& limits = {}, const Machine* machine = nullptr, Comm& comm = world());

// Mean lengths of the steps of a run.
struct StepLengths {
  int64_t prompt, response;  // tokens
  double dropped = 0;        // part of the responses that the learner never sees: filtered groups and advantages
};
// Returns the mean lengths of the run in that directory, from its metrics.
StepLengths read_lengths(const std::string& directory);
// The ledger of a GRPO step in which every prompt and response has these lengths and is trained on, but for the lines
// of learner, old_log_prob and ref, which grow with the responses: those are cut by `dropped`.  Random subsets of
// tokens (actor.token_subset) are the mean over 256 draws or more.
Ledger plan_lengths(const Config& config, const StepLengths& lengths, const Machine* machine = nullptr,
                    Comm& comm = world());

// The ranks that a configuration asks for, and on how many nodes.
struct RankCount {
  int nodes, node_ranks;
  int all() const { return nodes * node_ranks; }
};
RankCount rank_count(const TrainerKeys& keys);  // where it leaves them open: one
// The most that a step or evaluation of the fullest of those ranks takes: Plan::most without the rest, at once.
ArenaLimits plan_most(const Config& config, TrainingKind kind = TrainingKind::grpo,
                      const std::optional<ArenaLimits>& limits = {});
// Does the fullest rank find room in `memory`, with its responses?
bool plan_fits(const Config& config, size_t memory, TrainingKind kind = TrainingKind::grpo);
// response_memory(), which lies in the memory that is planned for on the CPU alone; 0 on other devices.
size_t planned_responses(const Config& config);
// The plan of a GRPO step of so many ranks, each of which runs its own code on a thread of this process: model, memory
// and most are those of the rank whose `most` is the greatest, the ledger is that of rank 0.  With `lengths` ledgers
// and seconds are those of plan_lengths().
Plan plan_ranks(const Config& config, bool data, const StepLengths* lengths = nullptr,
                const Machine* machine = nullptr);

// Everything that can be wrong with a run on `table` and is known before its first step, without computing or writing:
// files, what is in them, the shapes of the weights, every prompt, and that memory suffices: that of the table, and
// `host` bytes for what lies on the host.  Throws what the run would throw; and where a step of the greatest lengths
// would fill more than the host has, which a run only warns of, since its responses may be shorter.  Returns the plan.
Plan check_run(const Config& config, TrainingKind kind, const Table& table, size_t host = machine_memory());

// The plan of a run on `table`, of Plan::config.  More than can be had is an Error(memory) that says what would fit
// (fit.h).  On the host, `host` bytes, that is a step whose weights, gradients and moments, or any arena alone, are
// more than all there is, or one beyond the limits of the process.
Plan plan_run(const Config& config, TrainingKind kind, const Table& table, size_t host = machine_memory());
// The settings that take less memory for more time, as what_fits() takes them.
std::vector<std::vector<std::string>> frugal_settings(const Config& config);
// Limits for the session of a run on `table`, and for that of an evaluation, which does not fit likewise.
inline ArenaLimits training_limits(const Config& config, TrainingKind kind, const Table& table) {
  return plan_run(config, kind, table).most;
}
ArenaLimits evaluation_limits(const Config& config, const Table& table);
// Bytes of kv and activations of a rollout alone, of a model with or without adapters.  Throws ArenaError if one of
// them is more than `each`.
ArenaLimits rollout_memory(const ModelConfig& model, DType act, const std::optional<LoraSpec>& adapters,
                           const RolloutLimits& limits, size_t each = SIZE_MAX);

}  // namespace pare
