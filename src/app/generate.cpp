// pare generate: text from a model, one completion a sample.
#include <cstdio>

#include "app/commands.h"
#include "base/rng.h"
#include "base/thread_pool.h"
#include "model/hf.h"
#include "rollout/rollout.h"
#include "tokenizer/tokenizer.h"

namespace pare {

namespace {

struct Options {
  std::string model, tokenizer, prompt;
  int max_new_tokens = 128, samples = 1, threads = 0;
  Sampling sampling;
  uint64_t seed = 1;
};

void run(Options& o) {
  set_threads(o.threads);
  const ModelConfig config = load_model_config(o.model);
  const auto tokenizer = make_tokenizer(o.tokenizer.empty() ? o.model : o.tokenizer);
  Device device(table_cpu);
  Arena weights("weights"), kv("kv"), scratch("scratch");
  Model model(config, device, weights, DType::f32, false);
  model.set_parameters(hf_weights(o.model, config));

  Request request{tokenizer->encode_prompt(o.prompt), {}, o.max_new_tokens};
  for (int i = 0; i < o.samples; i++) request.uids.push_back(sequence_uid(0, 0, 0, static_cast<uint64_t>(i)));
  o.sampling.key = rng_key(o.seed, RngStream::sample, 0);
  o.sampling.eos = config.eos_ids.empty() ? std::vector<int32_t>{tokenizer->eos()} : config.eos_ids;
  const int64_t context = static_cast<int64_t>(request.prompt.size()) + o.max_new_tokens;
  Rollout rollout(model, {.max_sequences = std::min(o.samples, 64), .max_batched_tokens = 512, .max_context = context},
                  kv, scratch);
  for (const Completion& c : rollout.generate({request}, o.sampling)) {
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
  c->callback([o] { run(*o); });
}

}  // namespace pare
