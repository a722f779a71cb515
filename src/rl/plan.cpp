#include "rl/plan.h"

#include "model/hf.h"

namespace pare {

Plan plan_step(const Config& config, TrainingKind kind) {
  Session session(config, table_null);
  make_training(kind, session)->worst_case_step();
  Plan plan;
  for (const Arena* a : session.arenas()) plan.memory.push_back({a->name(), a->peak(), a->entries()});
  plan.ledger = session.ledger;
  return plan;
}

void check_run(const Config& config, TrainingKind kind, size_t memory) {
  check_response_memory(config);
  if (!config.model.path.empty()) match_weights(open_weights(config.model.path), load_model_config(config.model.path));
  size_t total = 0;
  std::string parts;
  for (const Plan::Memory& m : plan_step(config, kind).memory) {
    total += m.peak;
    parts += cat(parts.empty() ? "" : ", ", m.arena, ' ', m.peak);
  }
  if (total > memory)
    throw Error(Exit::memory, cat("a step takes ", total, " bytes (", parts, "), the machine has ", memory,
                                  "; lower rollout.max_num_seqs, actor.ppo_max_token_len or the batch"));
}

void check_memory(const ArenaLimits& l, const Table& table, const char* lower) {
  const size_t free = table.memory->free();
  if (l.total() > free)
    throw Error(Exit::memory, cat("the run takes ", l.total(), " bytes (weights ", l.weights, ", gradients ",
                                  l.gradients, ", optimizer ", l.optimizer, ", kv ", l.kv, ", activations ",
                                  l.activations, "), the device has ", free, " free; lower ", lower));
}

ArenaLimits training_limits(const Config& config, TrainingKind kind, const Table& table) {
  if (table.memory == &host_memory) return {};
  Session session(config, table_null);
  const auto training = make_training(kind, session);
  training->worst_case_step();
  training->largest_batches();
  check_memory(session.peaks(), table,
               "rollout.max_num_seqs, rollout.max_num_batched_tokens or actor.ppo_max_token_len");
  return session.peaks();
}

ArenaLimits evaluation_limits(const Config& config, const Table& table) {
  if (table.memory == &host_memory) return {};
  Session session(config, table_null, false);
  const Rollout rollout(*session.model, session.rollout_limits(), session.kv, session.activations);
  Rollout::plan(*session.model, session.rollout_limits(), session.activations);
  check_memory(session.peaks(), table, "rollout.max_num_seqs or rollout.max_num_batched_tokens");
  return session.peaks();
}

ArenaLimits rollout_memory(const ModelConfig& config, DType act, const RolloutLimits& limits, const Table& table) {
  if (table.memory == &host_memory) return {};
  Device device(table_null);
  Arena weights("weights", no_memory), kv("kv", no_memory), activations("activations", no_memory);
  const Model model(config, device, weights, act, false);
  const Rollout rollout(model, limits, kv, activations);
  Rollout::plan(model, limits, activations);
  const ArenaLimits memory{
      .weights = 0, .gradients = 0, .optimizer = 0, .kv = kv.peak(), .activations = activations.peak()};
  check_memory(memory, table, "rollout.max_num_seqs, rollout.max_num_batched_tokens or rollout.kv_cache_bytes");
  return memory;
}

}  // namespace pare
