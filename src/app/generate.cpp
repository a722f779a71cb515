// pare generate: text from a model, one completion a sample.
#include <cstdio>

#include "app/commands.h"
#include "app/device.h"
#include "base/rng.h"
#include "base/thread_pool.h"
#include "model/hf.h"
#include "rl/plan.h"
#include "tokenizer/tokenizer.h"

namespace pare {

namespace {

struct Options {
  std::string model, tokenizer, prompt;
  int max_new_tokens = 128, samples = 1, threads = 0;
  Sampling sampling;
  uint64_t seed = 1;
  DeviceOptions device;
};

// A model and its rollout, in memory of which the arenas may take so much.
struct Generator {
  Generator(const ModelConfig& config, DType act, const RolloutLimits& limits, const Table& table,
            const ArenaLimits& memory)
      : device(table),
        weights("weights", device.memory(), memory.weights),
        kv("kv", device.memory(), memory.kv),
        scratch("scratch", device.memory(), memory.activations),
        model(config, device, weights, act, false),
        rollout(model, limits, kv, scratch) {}

  Device device;
  Arena weights, kv, scratch;
  Model model;
  Rollout rollout;
};

ArenaLimits limits_on(const Table& table, const ModelConfig& config, DType act, const RolloutLimits& limits) {
  if (table.memory == &host_memory) return {};
  Generator g(config, act, limits, table_null, {});
  Rollout::plan(g.model, limits, g.scratch);
  const ArenaLimits memory{
      .weights = g.weights.peak(), .gradients = 0, .optimizer = 0, .kv = g.kv.peak(), .activations = g.scratch.peak()};
  check_memory(memory, table);
  return memory;
}

void run(Options& o) {
  set_threads(o.threads);
  const ModelConfig config = load_model_config(o.model);
  const auto tokenizer = make_tokenizer(o.tokenizer.empty() ? o.model : o.tokenizer);
  const Table& table = open_table(o.device.device);

  Request request{tokenizer->encode_prompt(o.prompt), {}, o.max_new_tokens};
  for (int i = 0; i < o.samples; i++) request.uids.push_back(sequence_uid(0, 0, 0, static_cast<uint64_t>(i)));
  o.sampling.key = rng_key(o.seed, RngStream::sample, 0);
  o.sampling.eos = config.eos_ids.empty() ? std::vector<int32_t>{tokenizer->eos()} : config.eos_ids;
  const int64_t context = static_cast<int64_t>(request.prompt.size()) + o.max_new_tokens;
  const RolloutLimits limits{.max_sequences = std::min(o.samples, 64),
                             .max_batched_tokens = 512,
                             .max_context = context,
                             .max_prompt = static_cast<int64_t>(request.prompt.size())};
  Generator g(config, o.device.act(), limits, table, limits_on(table, config, o.device.act(), limits));
  g.model.set_parameters(load_hf_weights(o.model, config));
  for (const Completion& c : g.rollout.generate({request}, o.sampling)) {
    std::vector<int32_t> ids = request.prompt;
    ids.insert(ids.end(), c.tokens.begin(), c.tokens.end() - (c.finish == Finish::eos));
    std::printf("%s\n", tokenizer->decode(ids).c_str());
  }
}

}  // namespace

void add_generate(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app.add_subcommand("generate", "text from a model");
  c->add_option("--model", o->model, "Hugging Face folder")->required();
  c->add_option("--tokenizer", o->tokenizer, "ssa, a tokenizer.bin or a folder; the model's folder if not given");
  c->add_option("--prompt", o->prompt, "text to continue");
  c->add_option("--max-new-tokens", o->max_new_tokens)->check(at_least(1))->capture_default_str();
  c->add_option("--samples", o->samples)->check(at_least(1))->capture_default_str();
  c->add_option("--temperature", o->sampling.temperature, "0: greedy")->check(at_least(0))->capture_default_str();
  c->add_option("--top-k", o->sampling.top_k, "0: off")->check(at_least(0))->capture_default_str();
  c->add_option("--top-p", o->sampling.top_p)->check(CLI::Range(0.0, 1.0))->capture_default_str();
  c->add_option("--seed", o->seed)->capture_default_str();
  c->add_option("--threads", o->threads, "0: one per core")->check(CLI::Range(0, 1024));
  o->device.add_to(*c);
  c->callback([o] { run(*o); });
}

}  // namespace pare
