#include "run/plan.h"

#include <algorithm>
#include <cmath>

#include "base/memory_limits.h"
#include "comm/threads.h"
#include "model/hf/folder.h"
#include "run/run_log.h"

namespace pare {

static void set_machine(Session& session, const Machine* machine) {
  if (!machine) return;
  const Comm& comm = session.device.comm;
  const double abroad = comm.ranks() == 1 ? 0 : 1 - (comm.node_ranks() - 1.0) / (comm.ranks() - 1);
  session.device.estimate = [machine, act = act_type(session.config), abroad](const char* op, const Cost& cost) {
    return machine->seconds(op, cost, act, abroad);
  };
}

Plan plan_step(const Config& config, TrainingKind kind, bool data, const std::optional<ArenaLimits>& limits,
               const Machine* machine, Comm& comm) {
  Session session(config, table_null, true, limits, data, comm);
  set_machine(session, machine);
  const auto training = make_training(kind, session);
  training->worst_case_step();
  Plan plan;
  plan.notes = session.notes, plan.model = session.model_config, plan.longest = session.peaks(),
  plan.ledger = session.ledger;
  for (const Arena* a : session.arenas()) plan.memory.push_back({a->name(), a->peak(), 0, a->entries()});
  training->largest_batches();
  plan.most = session.peaks();
  for (size_t i = 0; i < plan.memory.size(); i++) plan.memory[i].most = session.arenas()[i]->peak();
  return plan;
}

StepLengths read_lengths(const std::string& directory) {
  const RunLog log = read_run_log(directory);
  const auto mean = [&](const char* metric) {
    Summary values;
    for (size_t i = 0; i < log.steps.size(); i++)
      if (const double x = log.at(metric, i); log.steps[i] > 0 && !std::isnan(x)) values.add(x);
    return values.mean();
  };
  const StepLengths lengths{.prompt = std::lround(mean("prompt_length/mean")),
                            .response = std::lround(mean("response_length/mean")),
                            .dropped = mean("filter/small_adv_fraction")};
  if (lengths.prompt < 1 || lengths.response < 1) fail(directory, ": no GRPO step in metrics.jsonl");
  return lengths;
}

Ledger plan_lengths(const Config& config, const StepLengths& lengths, const Machine* machine, Comm& comm) {
  Config mean = config;
  mean.data.max_prompt_length = lengths.prompt;
  mean.data.max_response_length = lengths.response;
  Session session(mean, table_null, true, {}, false, comm);
  set_machine(session, machine);
  const auto training = make_training(TrainingKind::grpo, session);
  const TokenSubset subset = config.actor.token_subset;
  const bool random = subset == TokenSubset::rpc || subset == TokenSubset::urs;
  const int64_t responses = config.data.train_batch_size * config.rollout.n, steps = random ? 1 + 255 / responses : 1;
  Ledger all;
  for (int64_t i = 0; i < steps; i++) {
    training->worst_case_step();  // draws are named by the step
    all.add(session.ledger);
  }
  for (auto& [phase, ops] : all.phases)
    for (auto& [op, line] : ops) {
      const bool per_response = phase != "rollout" && op != "adamw" && op != "square_sums" && op != "zero";
      line.scale((per_response ? 1 - lengths.dropped : 1) / static_cast<double>(steps));
    }
  return all;
}

RankCount rank_count(const TrainerKeys& t) {
  return {std::max(1, static_cast<int>(t.nnodes)), std::max(1, static_cast<int>(t.n_gpus_per_node))};
}

ArenaLimits plan_most(const Config& config) {
  const RankCount count = rank_count(config.trainer);
  std::vector<ArenaLimits> most(static_cast<size_t>(count.all()));
  run_ranks(count.nodes, count.node_ranks, [&](Comm& comm) {
    Session session(config, table_null, true, {}, false, comm);
    make_training(TrainingKind::grpo, session)->largest_batches();
    most[static_cast<size_t>(comm.rank())] = session.peaks();
  });
  return *std::max_element(most.begin(), most.end(),
                           [](const ArenaLimits& a, const ArenaLimits& b) { return a.total() < b.total(); });
}

Plan plan_ranks(const Config& config, bool data, const StepLengths* lengths, const Machine* machine) {
  const RankCount count = rank_count(config.trainer);
  std::vector<Plan> plans(static_cast<size_t>(count.all()));
  run_ranks(count.nodes, count.node_ranks, [&](Comm& comm) {
    Plan& plan = plans[static_cast<size_t>(comm.rank())];
    plan = plan_step(config, TrainingKind::grpo, data && comm.first(), {}, machine, comm);
    if (lengths) plan.ledger = plan_lengths(config, *lengths, machine, comm);
  });
  Ledger all;
  std::map<std::string, double> seconds;
  size_t fullest = 0;
  for (size_t r = 0; r < plans.size(); r++) {
    all.add(plans[r].ledger);
    for (const auto& [phase, ops] : plans[r].ledger.phases)
      seconds[phase] = std::max(seconds[phase], plans[r].ledger.seconds(phase));
    if (plans[r].most.total() > plans[fullest].most.total()) fullest = r;
  }
  Ledger first = std::move(plans[0].ledger);
  Plan plan = std::move(plans[fullest]);
  plan.ledger = std::move(first), plan.ranks = count.all(), plan.all_ranks = std::move(all);
  plan.seconds = std::move(seconds);
  return plan;
}

static std::string text(const ArenaLimits& l) {
  return cat(
      l.total(), " bytes (weights ", l.weights, ", gradients ", l.gradients, ", optimizer ", l.optimizer, ", kv ", l.kv,
      ", activations ", l.activations, l.states ? cat(", states ", l.states) : "",
      l.shared ? cat(", scratch ", l.scratch, "; kv and scratch share memory with gradients and activations") : "",
      ")");
}

void check_memory(const ArenaLimits& l, const Table& table, const char* lower) {
  // Of the host a run takes address space, which becomes memory as it is filled.
  const bool host = table.memory == &host_memory;
  const size_t free = host ? process_memory_left() : table.memory->free();
  if (l.total() > free)
    throw Error(Exit::memory, cat("the run takes ", text(l), ", ",
                                  host ? "the limits of the process (ulimit -v, ulimit -d) leave " : "the device has ",
                                  free, host ? "" : " free", "; lower ", lower));
}

constexpr const char* kLower = "rollout.max_num_seqs, rollout.max_num_batched_tokens or actor.ppo_max_token_len";

Plan plan_run(const Config& config, TrainingKind kind, const Table& table, size_t host) {
  check_response_memory(config, host);
  const size_t all = table.memory == &host_memory ? host : table.memory->total();
  Plan plan = plan_step(config, kind, true, ArenaLimits::each(all));
  check_memory(plan.most, table, kLower);
  return plan;
}

Plan check_run(const Config& config, TrainingKind kind, const Table& table, size_t host) {
  if (!config.model.path.empty()) match_weights(open_weights(config.model.path), load_model_config(config.model.path));
  if (!config.model.lora.adapter_path.empty())
    adapter_weights(config.model.lora.adapter_path, load_model_config(config.model.path));
  Plan plan = plan_run(config, kind, table, host);
  if (table.memory != &host_memory || plan.peak() <= host) return plan;
  throw Error(Exit::memory, cat("a step takes ", text(plan.longest), ", the machine has ", host,
                                "; lower rollout.max_num_seqs, actor.ppo_max_token_len or the batch"));
}

ArenaLimits evaluation_limits(const Config& config, const Table& table) {
  Session session(config, table_null, false, ArenaLimits::each(table.memory->total()));
  const Rollout rollout(*session.model, session.rollout_limits(), session.kv, session.rollout_scratch());
  Rollout::plan(*session.model, session.rollout_limits(), session.activations);
  check_memory(session.peaks(), table, "rollout.max_num_seqs or rollout.max_num_batched_tokens");
  return session.peaks();
}

ArenaLimits rollout_memory(const ModelConfig& config, DType act, const LoraSpec* lora, const RolloutLimits& limits,
                           const Table& table) {
  Device device(table_null);
  const size_t all = table.memory->total();
  Arena weights("weights", no_memory), kv("kv", no_memory, all), activations("activations", no_memory, all);
  Model model(config, device, weights, act, false);
  std::optional<Adapters> adapters;
  if (lora) model.adapters = &adapters.emplace(config, *lora, device, weights, act, false);
  const Rollout rollout(model, limits, kv, activations);
  Rollout::plan(model, limits, activations);
  const ArenaLimits memory{
      .weights = 0, .gradients = 0, .optimizer = 0, .kv = kv.peak(), .activations = activations.peak()};
  check_memory(memory, table, "rollout.max_num_seqs, rollout.max_num_batched_tokens or rollout.kv_cache_bytes");
  return memory;
}

}  // namespace pare
