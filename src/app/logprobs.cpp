// pare logprobs: log-probs and gradients of given token sequences, for comparison with other implementations.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "app/commands.h"
#include "app/device.h"
#include "app/shorthands.h"
#include "base/hub_cache.h"
#include "base/json.h"
#include "base/thread_pool.h"
#include "model/hf/peft.h"
#include "run/fit.h"

namespace pare {

namespace {

struct Options {
  std::string model, ids, grads;
  int64_t max_rows = 4096;
  int threads = 0;
  bool force = false;
  Shorthands keys{{{"--adapter", "LoRA adapter, a folder of PEFT; then --grads are its own"},
                   {"--device"},
                   {"--exact"},
                   {"--dtype"}}};
};

std::vector<std::vector<int32_t>> read_ids(const std::string& path, const ModelConfig& config) {
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path)) fail(path, ": cannot be read; expected a file of JSON lines");
  std::vector<std::vector<int32_t>> all;
  std::string line;
  for (int number = 1; std::getline(file, line); number++) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto json = try_parse_json(line);
    const bool ok = json.is_object() && json.contains("ids") && json["ids"].is_array() &&
                    std::all_of(json["ids"].begin(), json["ids"].end(),
                                [](const auto& v) { return v.is_number_integer() && v >= 0 && v <= INT32_MAX; });
    if (!ok) fail(path, ":", number, ": expected {\"ids\": [token ids]}");
    all.push_back(json["ids"].get<std::vector<int32_t>>());
    const std::vector<int32_t>& ids = all.back();
    if (ids.size() < 2) fail(path, ":", number, ": a sequence needs at least 2 tokens, found ", ids.size());
    if (static_cast<int64_t>(ids.size()) - 1 > config.max_position)
      fail(path, ":", number, ": a sequence of ", ids.size(), " tokens is longer than the model's ",
           config.max_position, " positions");
    const int32_t largest = *std::max_element(ids.begin(), ids.end());
    if (largest >= config.vocab)
      fail(path, ":", number, ": token id ", largest, " is outside the model's vocabulary of ", config.vocab);
  }
  if (all.empty()) fail(path, ": no sequences; expected one {\"ids\": [...]} per line");
  return all;
}

struct Result {
  TokenOuts tokens;
  std::vector<Parameter> trained;  // of the adapter where there is one, else of the model
  std::vector<float> gradients;    // of those
};

// With arenas of the sizes `memory`, which are then what was needed.  No `weights`: only that, on table_null.
Result compute(const Options& o, const ModelConfig& config, const std::string& adapter, DType act,
               const std::vector<Group>& groups, const ParameterReader& weights, const Table& table,
               ArenaLimits& memory) {
  Engine engine(table, memory);
  const std::optional<LoraSpec> lora =
      adapter.empty() ? std::nullopt : std::optional<LoraSpec>(load_adapter_config(adapter));
  engine.make(config, act, !o.grads.empty(), lora);
  if (weights) engine.model->set_parameters(weights);
  if (weights && lora) engine.adapters->set_parameters(adapter_weights(adapter, config));

  const LearnerOptions options{.max_rows = o.max_rows};
  Result result;
  if (o.grads.empty()) {
    result.tokens = Learner::logprobs(*engine.model, engine.activations, groups, 1, options);
  } else {
    TokenTerms terms(loss_row_offsets(groups).back());
    std::fill(terms.weight.begin(), terms.weight.end(), 1 / static_cast<double>(terms.weight.size()));
    Learner learner(*engine.model, engine.gradients, engine.optimizer, engine.activations, options);
    result.tokens = learner.accumulate(groups, terms, {.policy = PolicyLoss::nll});
    result.trained = learner.trained().layout;
    std::vector<double> gradients = learner.gradients();
    for (const ParameterBlock& b : learner.trained().blocks)  // of B, not of B' = rate B
      for (int64_t i = b.offset; i < b.offset + b.size(); i++) gradients[i] *= b.rate;
    result.gradients.assign(gradients.begin(), gradients.end());
  }
  memory = engine.peaks();
  return result;
}

void run(const Options& o, const Command& command) {
  set_threads(o.threads);
  check_output_file(o.grads, "--grads", o.force);
  const std::string model = in_hub_cache(o.model);
  const ModelConfig config = load_model_config(model);
  const auto sequences = read_ids(o.ids, config);
  const ParameterReader weights = hf_weights(model, config);
  const Config where = read_config(o.keys.overrides(command));
  const DType act = act_type(where);
  const std::string& adapter = where.model.lora.adapter_path;
  const Table& table = open_table(where.trainer);

  std::vector<Group> groups;
  for (const auto& ids : sequences) groups.push_back({{}, {{ids}}});

  const auto needed = [&](int64_t rows) {
    Options with = o;
    with.max_rows = rows;
    ArenaLimits all = ArenaLimits::each(SIZE_MAX / 16);
    compute(with, config, adapter, act, groups, {}, table_null, all);
    return all;
  };
  const Room room = room_on(table);
  ArenaLimits memory = needed(o.max_rows);
  if (memory.total() > room.bytes) {
    const int64_t rows = largest_that_fits(o.max_rows, [&](int64_t n) { return needed(n).total() <= room.bytes; });
    does_not_fit("it takes", memory, room,
                 rows > 0 ? std::vector<std::string>{cat("--max-rows ", rows)} : std::vector<std::string>());
  }
  const Result result = compute(o, config, adapter, act, groups, weights, table, memory);
  if (!o.grads.empty()) {
    std::vector<NamedTensor> named;
    for (const Parameter& p : result.trained)
      named.push_back(
          {adapter.empty() ? p.name : peft_name(p), p.shape, values_at(result.gradients.data() + p.offset)});
    write_safetensors(o.grads, std::move(named), DType::f32);
  }
  for (size_t i = 0; i < sequences.size(); i++) {
    const auto logprobs = result.tokens.of(result.tokens.logprob, i);
    double sum = 0;
    for (const double x : logprobs) sum -= x;
    std::cout << nlohmann::json{{"logprobs", std::vector<double>(logprobs.begin(), logprobs.end())},
                                {"loss", sum / static_cast<double>(logprobs.size())}}
              << '\n';
  }
}

}  // namespace

void add_logprobs(const Command& program) {
  auto o = std::make_shared<Options>();
  const Command c = program.command("logprobs", "log-probs (and gradients) of given token sequences");
  c.option("--model", o->model, "Hugging Face folder: config.json and safetensors").required();
  c.option("--ids", o->ids, "JSON lines {\"ids\": [...]}").required();
  c.option("--grads", o->grads,
           "output file (safetensors) of d(mean over all predicted tokens of -log p)/d(parameter)");
  c.flag("--force", o->force, "replaces an output file that exists");
  c.option("--max-rows", o->max_rows, "tokens of a micro-batch").between(1, 1e9);
  c.option("--threads", o->threads, "threads; 0: one per core").between(0, 1024);
  o->keys.add(c);
  c.action([o, c] { run(*o, c); });
}

}  // namespace pare
