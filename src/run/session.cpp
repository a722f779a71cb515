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
#include "data/jsonl.h"
#include "data/presets.h"
#include "data/ssa.h"
#include "model/hf/folder.h"
#include "rl/replay.h"
#include "run/ranks.h"

namespace pare {

namespace {

std::unique_ptr<Task> make_ssa(const DataKeys& d, bool val) {
  SsaConfig c = ssa_variant(d.variant);
  c.min_statements = static_cast<int>(val ? d.val_min_statements : d.min_statements);
  c.max_statements = static_cast<int>(d.max_statements);
  if (d.noise >= 0) c.noise = d.noise;
  return std::make_unique<SsaTask>(c, static_cast<uint64_t>(val ? d.val_seed : d.train_seed),
                                   val ? d.val_rows : d.train_rows);
}

}  // namespace

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

ChatFormat chat_format(const Config& c) {
  const DataKeys& d = c.data;
  ChatFormat chat = find_chat_format(d.task == "ssa" ? "plain" : d.chat_template, tokenizer_spec(c));
  chat.thinking = d.apply_chat_template_kwargs.enable_thinking;
  chat.date = d.apply_chat_template_kwargs.date_string;
  return chat;
}

void Session::read_data() {
  const DataKeys& d = config.data;
  const std::string spec = tokenizer_spec(config);
  tokenizer = make_tokenizer(spec);
  chat = chat_format(config);
  if (d.task == "ssa") {
    train = make_ssa(d, false);
    val = make_ssa(d, true);
  } else {
    if (RewardCommand::is_one(d.reward)) reward_command = std::make_shared<RewardCommand>(d.reward, d.reward_timeout);
    const auto read = [&](const std::vector<std::string>& files) -> std::unique_ptr<Task> {
      if (files.empty()) return nullptr;
      return std::make_unique<JsonlTask>(files, d.reward, RowKeys{d.prompt_key, d.answer_key, d.system_prompt},
                                         reward_command);
    };
    train = read(d.train_files);
    val = read(d.val_files);
  }
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

// The limits of a session's arenas; without `most` each may take all that the memory of the table has.
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
    read_data();
  }

  if (data && tokenizer->vocab_size() > model_config.vocab)
    fail("the tokenizer has ", tokenizer->vocab_size(), " tokens, the model's vocabulary only ", model_config.vocab);
  const int64_t longest = c.data.max_prompt_length + c.data.max_response_length;
  if (longest > model_config.max_position)
    fail("data.max_prompt_length + data.max_response_length = ", longest, " is more than the model's ",
         model_config.max_position, " positions; lower one of them");
  if (!device.planning()) check_response_memory(c);
  eos = model_config.eos_ids;
  if (eos.empty() && !data) eos.push_back(0);  // a plan asks for none in particular
  if (eos.empty() && tokenizer->eos() >= 0) eos.push_back(tokenizer->eos());
  if (eos.empty())
    fail(
        "no end-of-sequence token: set eos_token_id in the model's config.json, or eos_token in the "
        "tokenizer's tokenizer_config.json");
  if (data) {
    const auto own = std::find(eos.begin(), eos.end(), tokenizer->eos());
    if (own != eos.end()) std::rotate(eos.begin(), own, own + 1);
    stop = make_stop(c.rollout, tokenizer.get(), model_config.vocab);
    end = eos[0];
    if (const auto turn = turn_end(chat, *tokenizer);
        turn && std::find(stop.token_ids.begin(), stop.token_ids.end(), *turn) != stop.token_ids.end())
      end = *turn;
    if (const std::string note = turn_end_note(chat, *tokenizer, eos, stop); !note.empty()) notes.push_back(note);
  }

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

// The number of responses of a step; `pare sft` has a completion a row.
static double responses_of(const Config& c) {
  const int64_t each = c.trainer.command == RunCommand::sft ? 1 : c.rollout.n;
  return static_cast<double>(c.data.train_batch_size) * static_cast<double>(each);
}

size_t response_memory(const Config& c) {
  // A token of a response: 8 bytes as it is sampled, which may have grown to 16; 32 of log-probs and corrections, 8 of
  // its weight, 8 as it is packed, 48 of loss terms, 36 of what they gave.  Ranks copy terms and
  // results of their shards.
  const double token = c.learner.shards == 1 ? 160 : 256, response = 640;
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

const Task& Session::training_task() const {
  if (!train) fail("data.task = \"jsonl\" needs data.train_files to train on, which is empty");
  return *train;
}

void Session::keep_fitting(Task& task, const std::function<std::string(const Problem&)>& excess) {
  const int64_t rows = task.size();
  std::vector<int64_t> kept;
  std::string first, where;
  for (int64_t row = 0; row < rows; row++) {
    const Problem problem = task.problem(row);
    const std::string what = excess(problem);
    if (what.empty()) kept.push_back(row);
    if (!what.empty() && first.empty()) first = what, where = problem.where;
  }
  if (first.empty()) return;
  const int64_t out = rows - static_cast<int64_t>(kept.size());
  if (config.data.task != "jsonl") fail(first);
  const std::string set = &task == val.get() ? "validation" : "training";
  if (!config.data.filter_overlong_prompts)
    fail(where, ": ", first, out > 1 ? cat(" (", out, " of ", rows, " ", set, " rows are too long)") : std::string(),
         "; raise it, or leave such rows out with data.filter_overlong_prompts=true");
  if (kept.empty()) fail(where, ": ", first, "; data.filter_overlong_prompts leaves out all ", rows, " ", set, " rows");
  notes.push_back(cat("data.filter_overlong_prompts leaves out ", out, " of ", rows, " ", set,
                      " rows; the first: ", where, ": ", first));
  if (&task == train.get()) left_out += out;
  task.keep(kept);
}

// Every prompt, and that the page pool can hold it with its response.
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
        request.max_new_tokens > 1)
      request.prefix = {0}, request.max_new_tokens--;
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

std::vector<int32_t> Session::prompt_of_any_length(const Problem& problem) const {
  std::vector<int32_t> ids = problem.prompt_ids;
  try {
    if (ids.empty()) ids = encode_chat(chat, *tokenizer, conversation(problem));
  } catch (const Error& e) {
    fail(problem.where, ": ", e.what());
  }
  for (const int32_t id : ids)
    if (id < 0 || id >= model_config.vocab)
      fail(problem.where, ": the prompt has the token ", id, ", the model's vocabulary is ", model_config.vocab);
  return ids;
}

std::vector<int32_t> Session::encode_prompt(const Problem& problem) const {
  std::vector<int32_t> ids = prompt_of_any_length(problem);
  if (static_cast<int64_t>(ids.size()) > config.data.max_prompt_length)
    fail(problem.where, ": the prompt has ", ids.size(), " tokens, data.max_prompt_length is ",
         config.data.max_prompt_length);
  return ids;
}

// A template may write more than the text (qwen3: an empty thought).  Where what it writes does not go on from its own
// prompt (deepseek-r1 drops the thought that its prompt opens), the text stands as it is.
std::string Session::reply_text(const Problem& problem) const {
  const std::string& content = problem.reply->content;
  if (chat.kind == ChatFormat::Kind::plain || chat.kind == ChatFormat::Kind::problem) return content;
  std::vector<Message> messages = conversation(problem);
  const std::string prompt = render_chat(chat, messages), thought = "<think>\n";
  messages.push_back(*problem.reply);
  const std::string whole = render_chat(chat, messages, false);
  if (whole.starts_with(prompt))
    for (const int32_t id : eos) {
      const std::string end = tokenizer->piece(id);
      const size_t at = whole.rfind(end);
      if (at != std::string::npos && at >= prompt.size() &&
          whole.find_first_not_of(" \n", at + end.size()) == std::string::npos)
        return whole.substr(prompt.size(), at - prompt.size());
    }
  return prompt.ends_with(thought) && content.starts_with(thought) ? content.substr(thought.size()) : content;
}

std::vector<int32_t> Session::encode_completion(const Problem& problem, const std::string& text) const {
  std::vector<int32_t> ids;
  try {
    ids = tokenizer->encode(problem.reply ? reply_text(problem) : text);
  } catch (const Error& e) {
    fail(problem.where, ": ", e.what());
  }
  ids.push_back(end);
  return ids;
}

std::string Session::response_text(const Completion& completion) const {
  return tokenizer->decode(std::span(completion.tokens).first(text_tokens(completion, stop, *tokenizer)));
}

Reward Session::reward(const Task& task, const Problem& problem, const Completion& completion) const {
  return task.reward(
      problem, {response_text(completion), completion.finished(), static_cast<int64_t>(completion.tokens.size())});
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
    own.put(rewards[i].score), own.put(rewards[i].parsed), own.put_all(rewards[i].extracted);
    own.put(rewards[i].components.size());
    for (const auto& [name, value] : rewards[i].components) own.put_all(std::string_view(name)), own.put(value);
  }
  std::vector<Packed> all;
  for (std::string& bytes : comm.gather(own.bytes())) all.emplace_back(std::move(bytes));
  for (size_t i = 0; i < rewards.size(); i++) {
    Packed& from = all[static_cast<size_t>(rank_of(i))];
    Reward r;
    r.score = from.take<double>(), r.parsed = from.take<bool>(), r.extracted = from.take_all<std::string>();
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
          // What a sampler kept ties a group to its rank.
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

PromptStream::PromptStream(int64_t rows, bool shuffle, uint64_t seed) : rows_(rows), shuffle_(shuffle), seed_(seed) {
  start_epoch();
}

void PromptStream::start_epoch() {
  next_ = 0;
  if (!shuffle_) return;
  order_.resize(rows_);
  for (int64_t i = 0; i < rows_; i++) order_[i] = i;
  Rng rng(rng_key(seed_, RngStream::shuffle, static_cast<uint64_t>(epoch_)));
  for (int64_t i = rows_ - 1; i > 0; i--) std::swap(order_[i], order_[rng.below(static_cast<uint32_t>(i + 1))]);
}

void PromptStream::seek(const Cursor& cursor) {
  epoch_ = cursor.epoch;
  start_epoch();
  next_ = cursor.next;
}

PromptStream::Row PromptStream::next() {
  if (next_ == rows_) epoch_++, start_epoch();
  const int64_t i = next_++;
  return {epoch_, shuffle_ ? order_[i] : i};
}

}  // namespace pare
