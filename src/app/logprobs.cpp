// pare logprobs: the door through which the model is checked against the outside.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "base/thread_pool.h"
#include "model/hf.h"
#include "model/learner.h"
#include "model/safetensors.h"

namespace pare {

namespace {

struct Options {
  std::string model, ids, grads;
  int64_t max_rows = 4096;
  int threads = 0;
};

std::vector<std::vector<int32_t>> read_ids(const std::string& path, const ModelConfig& config) {
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path)) fail(path, ": cannot be read; expected a file of JSON lines");
  std::vector<std::vector<int32_t>> all;
  std::string line;
  for (int number = 1; std::getline(file, line); number++) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto json = nlohmann::json::parse(line, nullptr, false);
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

void run(const Options& o) {
  set_threads(o.threads);
  const ModelConfig config = load_model_config(o.model);
  const auto sequences = read_ids(o.ids, config);
  const ParameterReader weights = hf_weights(o.model, config);

  Device device(table_cpu);
  Arena weight_memory("weights"), gradient_memory("gradients"), optimizer_memory("optimizer"),
      activation_memory("activations");
  Model model(config, device, weight_memory, DType::f32, !o.grads.empty());
  model.set_parameters(weights);

  int64_t predicted = 0;
  for (const auto& ids : sequences) predicted += static_cast<int64_t>(ids.size()) - 1;
  std::vector<Group> groups;
  for (const auto& ids : sequences) {
    Member m{ids, std::vector<TokenTerm>(ids.size())};
    for (auto& term : m.terms) term.weight = 1 / static_cast<double>(predicted);
    groups.push_back({{}, {std::move(m)}});
  }

  const LearnerOptions options{.max_rows = o.max_rows};
  TokenOuts out;
  if (o.grads.empty()) {
    out = Learner::logprobs(model, activation_memory, groups, 1, options);
  } else {
    Learner learner(model, gradient_memory, optimizer_memory, activation_memory, options);
    out = learner.accumulate(groups, {.policy = PolicyLoss::nll});
    const std::vector<double> gradients = learner.gradients();
    const std::vector<float> narrow(gradients.begin(), gradients.end());
    std::vector<NamedTensor> named;
    for (const Parameter& p : model.layout) named.push_back({p.name, p.shape, values_at(narrow.data() + p.offset)});
    write_safetensors(o.grads, std::move(named), DType::f32);
  }
  for (const auto& group : out) {
    std::vector<double> logprobs;
    double sum = 0;
    for (size_t t = 1; t < group[0].size(); t++) logprobs.push_back(group[0][t].logprob), sum -= logprobs.back();
    std::cout << nlohmann::json{{"logprobs", logprobs}, {"loss", sum / static_cast<double>(logprobs.size())}} << '\n';
  }
}

}  // namespace

void add_logprobs(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app.add_subcommand("logprobs", "log-probs (and gradients) of given token sequences");
  c->add_option("--model", o->model, "Hugging Face folder: config.json and safetensors")->required();
  c->add_option("--ids", o->ids, "JSONL, one {\"ids\": [...]} per line")->required();
  c->add_option("--grads", o->grads,
                "write d(mean over all predicted tokens of -log p)/d(parameter) here (safetensors)");
  c->add_option("--max-rows", o->max_rows, "tokens of a micro-batch")->check(at_least(1));
  c->add_option("--threads", o->threads, "threads; 0: one per core")->check(CLI::Range(0, 1024));
  c->callback([o] { run(*o); });
}

}  // namespace pare
