#include "run/session.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <filesystem>

#include "base/json_file.h"
#include "base/nearest.h"
#include "base/progress.h"
#include "base/thread_pool.h"
#include "data/presets.h"
#include "model/hf/folder.h"
#include "rl/replay.h"
#include "run/ranks.h"

namespace pare {

ModelConfig read_model_config(const ModelKeys& m) {
  if (!m.path.empty()) {
    const std::filesystem::path path(m.path);
    const std::string run = path.parent_path().filename().string();
    if (!std::filesystem::exists(path) && path == std::filesystem::path("runs") / run / "model" &&
        preset_text(run, "toml"))
      fail(m.path, ": no such directory; first make it: pare ", run.ends_with("-sft") ? "sft " : "train ", run);
    return load_model_config(m.path);
  }
  if (m.config.empty()) fail("model.path (a Hugging Face folder) or model.config (a config.json) is needed");
  return read_shape(m.config);
}

ModelConfig read_shape(const std::string& file_or_name) {
  if (const auto shape = preset_text(file_or_name, "json"))
    return parse_model_config(nlohmann::json::parse(*shape), file_or_name);
  if (file_or_name.find('/') == std::string::npos && !std::filesystem::exists(file_or_name))
    fail("model.config = ", file_or_name, ": no such file; the nearest shape that has a name is ",
         nearest(file_or_name, preset_names("json")));
  return parse_model_config(read_json_file(file_or_name), file_or_name);
}

std::optional<LoraSpec> lora_spec(const LoraKeys& keys) {
  if (!keys.adapter_path.empty()) return load_adapter_config(keys.adapter_path);
  if (keys.rank == 0) return std::nullopt;
  LoraSpec spec{.rank = keys.rank, .alpha = keys.alpha, .targets = {}};
  for (int p = 0; p < kProjections; p++)
    spec.targets[p] = std::find(keys.target_modules.begin(), keys.target_modules.end(), projection_name(p)) !=
                      keys.target_modules.end();
  return spec;
}

static SharedMemory::Side* side(const std::unique_ptr<SharedMemory>& shared, int which) {
  return shared ? &shared->sides[which] : nullptr;
}

Engine::Engine(const Table& table, const ArenaLimits& limits, Comm& comm)
    : device(table, {}, comm),
      shared(limits.shared
                 ? std::make_unique<SharedMemory>(device.memory(), std::max(limits.sampling(), limits.training()))
                 : nullptr),
      weights("weights", device.memory(), limits.weights),
      gradients("gradients", device.memory(), limits.gradients, side(shared, 0)),
      optimizer("optimizer", device.memory(), limits.optimizer),
      kv("kv", device.memory(), limits.kv, side(shared, 1)),
      activations("activations", device.memory(), limits.activations, side(shared, 0)),
      states("states", device.memory(), limits.states),
      scratch("scratch", device.memory(), shared ? limits.scratch : 0, side(shared, 1)) {}

void Engine::make(const ModelConfig& config, DType act, bool trainable, const std::optional<LoraSpec>& lora,
                  bool distills) {
  model = std::make_unique<Model>(config, device, weights, act, trainable && (!lora || distills));
  if (!lora) return;
  adapters = std::make_unique<Adapters>(config, *lora, device, weights, act, trainable);
  if (distills) sparse = std::make_unique<Model>(*model);
  (distills ? sparse : model)->adapters = adapters.get();
}

ArenaLimits Engine::peaks() const {
  return {.weights = weights.peak(),
          .gradients = gradients.peak(),
          .optimizer = optimizer.peak(),
          .kv = kv.peak(),
          .activations = activations.peak(),
          .states = states.peak(),
          .scratch = scratch.peak(),
          .shared = shared != nullptr};
}

// Returns the limits of a session's arenas; without `most` each may take all memory of the table.
static ArenaLimits limits_of(const Config& c, const Table& table, bool trainable,
                             const std::optional<ArenaLimits>& most) {
  ArenaLimits limits = most.value_or(ArenaLimits::each(table.memory->total()));
  limits.shared = trainable && c.rollout.free_cache_engine;
  if (!keeps_sampler_states(c)) limits.states = 0;
  return limits;
}

Session::Session(const Config& c, const Table& table, bool trainable, const std::optional<ArenaLimits>& most, bool data,
                 Comm& comm)
    : Engine(table, limits_of(c, table, trainable, most), comm), config(c) {
  check_ranks(c, comm, trainable);
  comm.timeout = static_cast<double>(c.trainer.nccl_timeout);
  set_threads(c.trainer.threads == 0 ? shared_threads(comm) : static_cast<int>(c.trainer.threads));
  device.ledger = &ledger;
  device.check_nan = c.trainer.check_nan;
  expect(data || device.planning(), "a session without data can only plan");
  model_config = read_model_config(c.model);  // first: a folder that is not there is no wrong tokenizer
  if (data) {
    const Activity reading("reading tokenizer and data");
    read(c, model_config);
  } else {
    eos = model_config.eos_ids.empty() ? std::vector<int32_t>{0}
                                       : model_config.eos_ids;  // a plan asks for none in particular
  }
  const int64_t longest = c.data.max_prompt_length + c.data.max_response_length;
  if (longest > model_config.max_position)
    fail("data.max_prompt_length + data.max_response_length = ", longest, " is more than the model's ",
         model_config.max_position, " positions; lower one of them");
  if (!device.planning()) check_response_memory(c);

  const LoraKeys& l = c.model.lora;
  std::optional<LoraSpec> lora = lora_spec(l);
  if (!trainable && l.adapter_path.empty()) lora.reset();
  const bool distills = trainable && c.distill.enable;
  if (lora && trainable && !distills && data && c.model.path.empty())
    fail(
        "model.lora trains adapters of a model that is saved elsewhere, model.config starts from random weights, which "
        "are not; give model.path");
  make(model_config, act_type(c), trainable, lora, distills);
  check_prompts();
  if (!device.planning()) {
    if (!c.model.path.empty()) weights_dtype = hf_dtype(c.model.path, model_config);
    const bool drawn = c.model.path.empty();
    const ParameterReader initial =
        drawn ? init_parameters(model_config, static_cast<uint64_t>(c.trainer.seed), c.model.init)
              : hf_weights(c.model.path, model_config);
    std::atomic<uint64_t> hash = 0;  // a sum: the same for any order, and of parts
    const auto set = [&](Parameters& parameters, const ParameterReader& read, int64_t before, bool in_parts) {
      const auto read_hashed = [&](size_t parameter, int64_t begin, int64_t count, float* out) {
        read(parameter, begin, count, out);
        const auto first = static_cast<uint64_t>(before + parameters.layout[parameter].offset + begin);
        parallel_for(count, 1 << 14, [&](int64_t b, int64_t e) {
          uint64_t sum = 0;
          for (int64_t i = b; i < e; i++)
            sum += mix64((first + static_cast<uint64_t>(i)) << 32 ^ std::bit_cast<uint32_t>(out[i]));
          hash += sum;
        });
      };
      parameters.set_parameters(read_hashed, in_parts);
      if (!in_parts) return;
      const std::vector<int64_t> parts = comm.gather(static_cast<int64_t>(hash.load()));
      hash = 0;
      for (const int64_t part : parts) hash += static_cast<uint64_t>(part);
    };
    set(*model, initial, 0, drawn);
    base_weights = hash;
    if (adapters)
      set(*adapters,
          l.adapter_path.empty() ? init_adapters(model_config, *lora, static_cast<uint64_t>(c.trainer.seed))
                                 : adapter_weights(l.adapter_path, model_config),
          model->size(), false);
    initial_weights = hash;
  }
}

// Returns the number of responses of a step; `pare sft` has a completion a row.
static double responses_of(const Config& c) {
  const int64_t each = c.trainer.command == RunCommand::sft ? 1 : c.rollout.n;
  return static_cast<double>(c.data.train_batch_size) * static_cast<double>(each);
}

size_t response_memory(const Config& c) {
  // A token of a response: 8 bytes as it is sampled, which may have grown to 16; 32 of log-probs and corrections, 8 of
  // its weight, 8 as it is packed, 48 of loss terms, 36 of what they gave.  Ranks copy terms and
  // results of their shards.  A recorded id of a truncated draw: 4, which may have grown to 8.
  const double token = (c.learner.shards == 1 ? 160 : 256) + 8.0 * static_cast<double>(kept_ids(c)), response = 640;
  const auto prompt = static_cast<double>(8 * c.data.max_prompt_length);
  const double bytes = responses_of(c) * (response + prompt + token * static_cast<double>(c.data.max_response_length));
  return bytes < 9e18 ? static_cast<size_t>(bytes) : SIZE_MAX / 4;
}

void check_response_memory(const Config& c, size_t memory) {
  const double responses = responses_of(c);
  const size_t bytes = response_memory(c);
  const bool sft = c.trainer.command == RunCommand::sft;
  if (bytes > memory)
    throw Error(Exit::memory, cat("does not fit: data.train_batch_size", sft ? "" : " * rollout.n", " = ", responses,
                                  sft ? " completions of " : " responses of ", c.data.max_response_length,
                                  " tokens take ", bytes, " bytes, the machine has ", memory, "; ",
                                  std::floor(static_cast<double>(memory) * responses / bytes), " of them fit"));
}

// Checks every prompt, and that the page pool can hold it with its response.
void Session::check_prompts() {
  const Activity checking("checking the prompts");
  const RolloutLimits limits = rollout_limits();
  const KvResidency sparse(limits.kv, model_config.layers), dense({}, model_config.layers);
  const auto check_pages = [&](const Problem& problem, std::vector<int32_t> prompt, bool training) {
    const auto samples = static_cast<size_t>(training ? config.rollout.n : config.rollout.val_kwargs.n);
    Request request{std::move(prompt), std::vector<uint64_t>(samples),
                    static_cast<int>(config.data.max_response_length)};
    // A prefix adds at most the copies of a page that is not full.
    if (training && config.algorithm.rpo.enable && request.prompt.size() % kPageSlots == 0 &&
        request.max_new_tokens > 1) {
      request.prefix = {0};
      request.max_new_tokens--;
    }
    const bool all_kept = !training && config.rollout.val_kwargs.kv != ValKv::rollout;
    const int64_t needed = Scheduler::pages_needed(all_kept ? dense : sparse, request);
    if (limits.kv_pages > 0 && needed > limits.kv_pages)
      throw Error(Exit::memory,
                  cat("does not fit: ", problem.where, ": the prompt and a response of data.max_response_length need ",
                      needed * KvCache::page_bytes(model_config, config.rollout.kv, model->dtype),
                      " bytes of keys and values, rollout.kv_cache_bytes is ", config.rollout.kv_cache_bytes,
                      "; raise it to that, or lower data.max_response_length"));
  };
  for (Task* task : {train.get(), val.get()})
    if (task)
      keep_fitting(*task, [&](const Problem& problem) {
        std::vector<int32_t> ids = prompt_of_any_length(problem);
        if (const auto size = static_cast<int64_t>(ids.size()); size > config.data.max_prompt_length)
          return cat("the prompt has ", size, " tokens, data.max_prompt_length is ", config.data.max_prompt_length);
        check_pages(problem, std::move(ids), task == train.get());
        return std::string();
      });
}

std::vector<Reward> Session::rewards(const Task& task, std::span<const Problem> problems,
                                     std::span<const Completion> completions) const {
  std::vector<Reward> rewards(completions.size());
  Comm& comm = device.comm;
  const auto rank_of = [&](size_t i) { return completions[i].request % comm.ranks(); };
  auto grading = std::make_unique<const Activity>("grading");
  parallel_for(static_cast<int64_t>(completions.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Completion& c = completions[static_cast<size_t>(i)];
      expect(static_cast<size_t>(c.request) < problems.size(), "response ", i, " answers problem ", c.request, " of ",
             problems.size());
      if (rank_of(static_cast<size_t>(i)) == comm.rank())
        rewards[static_cast<size_t>(i)] = reward(task, problems[static_cast<size_t>(c.request)], c);
    }
  });
  grading.reset();  // before the ranks wait for one another
  if (comm.ranks() == 1) return rewards;
  Packed own;
  for (size_t i = 0; i < rewards.size(); i++) {
    if (rank_of(i) != comm.rank()) continue;
    own.put(rewards[i].score);
    own.put(rewards[i].parsed);
    own.put_all(rewards[i].extracted);
    own.put(rewards[i].components.size());
    for (const auto& [name, value] : rewards[i].components) {
      own.put_all(std::string_view(name));
      own.put(value);
    }
  }
  std::vector<Packed> all;
  for (std::string& bytes : comm.gather(own.bytes())) all.emplace_back(std::move(bytes));
  for (size_t i = 0; i < rewards.size(); i++) {
    Packed& from = all[static_cast<size_t>(rank_of(i))];
    Reward r;
    r.score = from.take<double>();
    r.parsed = from.take<bool>();
    r.extracted = from.take_all<std::string>();
    for (auto n = from.take<size_t>(); n > 0; n--) {
      const auto name = from.take_all<std::string>();
      r.components.emplace_back(name, from.take<double>());
    }
    rewards[i] = std::move(r);
  }
  return rewards;
}

LearnerOptions Session::learner_options() const {
  const std::optional<bool>& checkpointing = config.model.enable_gradient_checkpointing;
  return {.max_rows = config.actor.ppo_max_token_len,
          .logits_chunk = config.actor.logits_chunk > 0 ? config.actor.logits_chunk : config.fitted.logits_chunk,
          .moments = config.actor.optim.moments == Moments::bf16 ? DType::bf16 : DType::f32,
          .recompute = !checkpointing   ? config.fitted.recompute
                       : *checkpointing ? model_config.layers - 1
                                        : 0,
          .blocks = replayed_blocks(config.learner, config.rollout.kv),
          .shards = config.learner.shards,
          // States that the sampler kept tie a group to its rank.
          .balance = config.trainer.balance_batch && config.learner.attention == LearnerAttention::dense &&
                     !keeps_sampler_states(config),
          .truncation = truncation_of(config.rollout),
          .kept_ids = kept_ids(config),
          .hashes = config.exact.full};
}

LearnerOptions Session::student_options() const {
  LearnerOptions options = learner_options();
  options.blocks = block_reads(config.rollout.kv);
  options.dense_reference = true;
  return options;
}

RolloutLimits Session::rollout_limits() const {
  const RolloutKeys& r = config.rollout;
  RolloutLimits limits{.max_sequences = static_cast<int>(r.max_num_seqs),
                       .max_batched_tokens = static_cast<int>(std::max(r.max_num_batched_tokens, r.max_num_seqs)),
                       .max_context = config.data.max_prompt_length + config.data.max_response_length,
                       .kv_pages = 0,
                       .max_prompt = config.data.max_prompt_length +
                                     (config.algorithm.rpo.enable ? config.data.max_response_length - 1 : 0),
                       .kv = r.kv,
                       .lookahead = lookahead(config)};
  if (r.kv_cache_bytes > 0) {
    const int64_t page = KvCache::page_bytes(model_config, config.rollout.kv, model->dtype);
    limits.kv_pages = r.kv_cache_bytes / page;
    if (limits.kv_pages == 0)
      throw Error(Exit::memory,
                  cat("does not fit: rollout.kv_cache_bytes = ", r.kv_cache_bytes,
                      " holds no page of keys and values, of which one takes ", page, " bytes; raise it"));
  }
  return limits;
}

std::vector<const Arena*> Session::arenas() const {
  std::vector<const Arena*> all = {&weights, &gradients, &optimizer, &kv, &activations};
  if (shared) all.push_back(&scratch);
  if (keeps_sampler_states(config)) all.push_back(&states);
  return all;
}

int64_t Session::flops(const std::string& phase) const { return device.comm.sum(ledger.total(phase).flops); }

void Session::set_memory(Metrics& metrics) const {
  const auto most = [&](size_t bytes) { return static_cast<double>(device.comm.most(static_cast<int64_t>(bytes))); };
  for (const Arena* arena : arenas()) metrics.set("memory/" + arena->name(), most(arena->peak()));
  metrics.set("perf/max_memory_allocated_gb", most(peaks().total()) / (1 << 30));
}

}  // namespace pare
