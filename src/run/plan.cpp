#include "run/plan.h"

#include <algorithm>
#include <cmath>

#include "base/arena_error.h"
#include "comm/threads.h"
#include "model/hf/folder.h"
#include "run/fit.h"
#include "run/run_log.h"

namespace pare {

static void set_machine(Session& session, const Machine* machine) {
  if (!machine) return;
  const Comm& comm = session.device.comm;
  const TrainerKeys& t = session.config.trainer;
  // NCCL sends weights around a ring, in which each part enters a machine once; the host sends it to every rank.
  const bool ring = t.device == DeviceKind::cuda && t.comm != DeviceComm::host;
  const int64_t others = comm.ranks() - 1, machines = comm.ranks() / comm.node_ranks();
  session.device.estimate = [=, act = act_type(session.config)](const char* op, Cost cost,
                                                                const std::function<Stretch(int)>& stretch) {
    const int n = machine->multiprocessors();
    if (ring && cost.abroad > 0 && std::string_view(op) == "all_gather")
      cost.abroad = std::min(cost.sent, cost.sent / others * machines);
    return machine->seconds(op, cost, act, n > 1 ? stretch(n) : Stretch{});
  };
}

Plan plan_step(const Config& config, TrainingKind kind, bool data, const std::optional<ArenaLimits>& limits,
               const Machine* machine, Comm& comm) {
  Session session(config, table_null, true, limits, data, comm);
  set_machine(session, machine);
  const auto training = make_training(kind, session);
  training->worst_case_step();
  Plan plan;
  plan.config = config;
  plan.notes = session.notes;
  plan.model = session.model_config;
  plan.longest = session.peaks();
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

size_t planned_responses(const Config& config) {
  return config.trainer.device == DeviceKind::cpu ? response_memory(config) : 0;
}

ArenaLimits plan_most(const Config& config, TrainingKind kind, const std::optional<ArenaLimits>& limits) {
  const RankCount count = rank_count(config.trainer);
  std::vector<ArenaLimits> most(static_cast<size_t>(count.all()));
  run_ranks(count.nodes, count.node_ranks, [&](Comm& comm) {
    Session session(config, table_null, true, limits, false, comm);
    make_training(kind, session)->largest_batches();
    most[static_cast<size_t>(comm.rank())] = session.peaks();
  });
  return *std::max_element(most.begin(), most.end(),
                           [](const ArenaLimits& a, const ArenaLimits& b) { return a.total() < b.total(); });
}

bool plan_fits(const Config& config, size_t memory, TrainingKind kind) {
  try {
    return plan_most(config, kind, ArenaLimits::each(memory)).total() + planned_responses(config) <= memory;
  } catch (const ArenaError&) {
    return false;
  }
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
  plan.ledger = std::move(first);
  plan.ranks = count.all();
  plan.all_ranks = std::move(all);
  plan.seconds = std::move(seconds);
  plan.responses = planned_responses(config);
  return plan;
}

namespace {

// A plan that needs more than this many times the memory is not carried out: its own books would be too large.
constexpr size_t kFarTooMuch = 16;

ArenaLimits each_far(size_t memory) {
  return ArenaLimits::each(memory < SIZE_MAX / 64 ? kFarTooMuch * memory : SIZE_MAX / 16);
}

const std::vector<std::string> kSamplingSizes = {"rollout.max_num_seqs", "rollout.max_num_batched_tokens",
                                                 "rollout.kv_cache_bytes"};

// True if a run by as many ranks as there are fits `memory`.
bool run_fits(Config config, TrainingKind kind, size_t memory) {
  const Comm& comm = world();
  if (comm.ranks() > 1) {
    config.trainer.n_gpus_per_node = comm.node_ranks();
    config.trainer.nnodes = comm.ranks() / std::max(1, comm.node_ranks());
  }
  return plan_fits(config, memory, kind);
}

// Returns the settings of a run that fit `memory`.
std::vector<std::string> what_fits_a_run(const Config& config, TrainingKind kind, size_t memory) {
  std::vector<std::string> sizes = {"actor.ppo_max_token_len"};
  if (kind == TrainingKind::grpo || validates(config))
    sizes.insert(sizes.begin(), kSamplingSizes.begin(), kSamplingSizes.end());
  return what_fits(config, sizes, frugal_settings(config), [&](const Config& c) { return run_fits(c, kind, memory); });
}

[[noreturn]] void far_too_large(const Room& room, const std::vector<std::string>& fits) {
  std::string text;
  for (const std::string& f : fits) text += (text.empty() ? "; with one of these it fits: " : ", ") + f;
  throw Error(Exit::memory, cat("does not fit: it takes more than ", kFarTooMuch, " times the ", room.size(), text));
}

size_t sum_of_evaluation(const Config& config, const std::optional<ArenaLimits>& limits, ArenaLimits& peaks) {
  Session session(config, table_null, false, limits);
  const Rollout rollout(*session.model, session.rollout_limits(), session.kv, session.rollout_scratch());
  Rollout::plan(*session.model, session.rollout_limits(), session.activations);
  peaks = session.peaks();
  return peaks.total();
}

}  // namespace

std::vector<std::vector<std::string>> frugal_settings(const Config& config) {
  std::vector<std::vector<std::string>> all;
  if (config.actor.optim.moments != Moments::bf16) all.push_back({"actor.optim.moments=bf16"});
  if (config.model.enable_gradient_checkpointing == false) all.push_back({"model.enable_gradient_checkpointing=true"});
  return all;
}

Plan plan_run(const Config& wanted, TrainingKind kind, const Table& table, size_t host) {
  check_response_memory(wanted, host);
  const bool on_host = table.memory == &host_memory;
  Room room = room_on(table);
  // On a device, and under a limit of the process, arenas count as a whole.  Else they take address space, which
  // becomes memory as it is filled: all of it by weights, gradients and moments, the rest by the lengths of responses.
  const bool whole = !on_host || room.bytes < std::min(host, machine_memory());
  if (!whole) room = {host, "of this machine"};
  // Ranks agree, as the bits of a run must not depend on which of them has least memory.
  const Config config =
      fit_memory(wanted, [&](const Config& c) { return world().most(run_fits(c, kind, room.bytes) ? 0 : 1) == 0; });
  Plan plan;
  try {
    plan = plan_step(config, kind, true, each_far(room.bytes));
  } catch (const ArenaError&) {
    far_too_large(room, what_fits_a_run(config, kind, room.bytes));
  }
  const ArenaLimits& most = plan.most;
  size_t needed = most.weights + most.gradients + most.optimizer + most.states;
  for (const Plan::Memory& m : plan.memory) needed = std::max(needed, m.most);
  if (whole) needed = most.total();
  if (needed > room.bytes) does_not_fit("a step can take", most, room, what_fits_a_run(config, kind, room.bytes));
  if (config.fitted != Fitted()) plan.notes.push_back(fitted_text(config, room));
  return plan;
}

Plan check_run(const Config& config, TrainingKind kind, const Table& table, size_t host) {
  if (!config.model.path.empty()) match_weights(open_weights(config.model.path), load_model_config(config.model.path));
  if (!config.model.lora.adapter_path.empty())
    adapter_weights(config.model.lora.adapter_path, load_model_config(config.model.path));
  Plan plan = plan_run(config, kind, table, host);
  if (table.memory != &host_memory || plan.peak() <= host) return plan;
  does_not_fit("a step of the longest responses takes", plan.longest, {host, "of this machine"},
               what_fits_a_run(config, kind, host));
}

ArenaLimits evaluation_limits(const Config& config, const Table& table) {
  const Room room = room_on(table);
  const auto fits = [&] {
    return what_fits(config, kSamplingSizes, {}, [&](const Config& c) {
      ArenaLimits peaks;
      return sum_of_evaluation(c, ArenaLimits::each(room.bytes), peaks) <= room.bytes;
    });
  };
  ArenaLimits peaks;
  try {
    sum_of_evaluation(config, each_far(room.bytes), peaks);
  } catch (const ArenaError&) {
    far_too_large(room, fits());
  }
  if (peaks.total() > room.bytes) does_not_fit("the evaluation takes", peaks, room, fits());
  return peaks;
}

ArenaLimits rollout_memory(const ModelConfig& config, DType act, const std::optional<LoraSpec>& lora,
                           const RolloutLimits& limits, size_t each) {
  Engine books(table_null, {.weights = no_memory.total(), .kv = each, .activations = each});
  books.make(config, act, false, lora);
  const Rollout rollout(*books.model, limits, books.kv, books.activations);
  Rollout::plan(*books.model, limits, books.activations);
  ArenaLimits peaks = books.peaks();
  peaks.weights = 0;
  return peaks;
}

}  // namespace pare
