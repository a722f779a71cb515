// What a step will cost, before it runs: the real code on a table of ops that do nothing.
#pragma once
#include "rl/training.h"

namespace pare {

struct Plan {
  struct Memory {
    std::string arena;
    size_t peak;                        // bytes
    std::vector<Arena::Entry> entries;  // what stays allocated between steps
  };
  std::vector<Memory> memory;
  Ledger ledger;  // of one step
};

// The worst case of one training step: every prompt of max_prompt_length, every response of max_response_length,
// nothing filtered.  A real step of those lengths has the same peaks, to the byte, and the same FLOPs.  Shorter
// responses take fewer FLOPs, but may fill micro-batches better (up to actor.ppo_max_token_len rows): then the
// activations of a real step are larger than these, and at most those of training_limits.
Plan plan_step(const Config& config, TrainingKind kind = TrainingKind::grpo);

// Everything that can be wrong with a run and is known before its first step, without computing or writing: files, what
// is in them, the shapes of the weights, every prompt, and that `memory` bytes hold a worst-case step.  Throws what the
// run would throw.
void check_run(const Config& config, TrainingKind kind, size_t memory = machine_memory());

// What a session on `table` is to be given: the default on the host, elsewhere the most that a step of any lengths or
// an evaluation needs.  More than can be had is an Error(Exit::memory).
ArenaLimits training_limits(const Config& config, TrainingKind kind, const Table& table);
ArenaLimits evaluation_limits(const Config& config, const Table& table);
// The same of a rollout alone: kv and activations.
ArenaLimits rollout_memory(const ModelConfig& model, DType act, const RolloutLimits& limits, const Table& table);
// Throws it; `lower` says what would make the run smaller.
void check_memory(const ArenaLimits& limits, const Table& table, const char* lower);

}  // namespace pare
