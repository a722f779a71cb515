#include "bench/rollout.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/thread_pool.h"
#include "rollout/rollout.h"

namespace pare {

namespace {

struct Way {
  const char* name;
  KvSpec spec;
};

std::vector<Way> ways() {
  const auto of = [](KvMethod method, int64_t spans = 0) {
    KvSpec s;  // budget 512, buffer 128; 32 blocks of 16
    s.method = method, s.dense_layers = 0, s.spans = spans;
    return s;
  };
  return {{"dense", {}},
          {"streaming_llm 512+128", of(KvMethod::streaming_llm)},
          {"h2o 512+128", of(KvMethod::h2o)},
          {"snapkv 512+128", of(KvMethod::snapkv)},
          {"rkv 512+128", of(KvMethod::rkv)},
          {"quest 32 x 16", of(KvMethod::quest)},
          {"quest, 8 spans", of(KvMethod::quest, 8)},
          {"block_topk 32 x 16", of(KvMethod::block_topk)},
          {"block_topk, 8 spans", of(KvMethod::block_topk, 8)}};
}

// Ops that choose or move, beside those that every rollout has.
bool is_choice(const std::string& op) {
  static const std::set<std::string> ops = {"kv_window_scores", "kv_redundancy",    "kv_mass_scores",  "kv_select",
                                            "kv_compact",       "kv_block_summary", "kv_block_select", "copy_rows"};
  return ops.count(op) > 0;
}

struct Shape {
  const char* name;
  ModelConfig config;
  int sequences;  // decoded side by side, samples of one prompt
  int rounds;     // one after another
  std::vector<int64_t> lengths;
};

std::vector<Shape> shapes() {
  ModelConfig small;
  small.model_type = "qwen3", small.qk_norm = true, small.tied = true;
  small.hidden = 128, small.layers = 2, small.heads = 4, small.kv_heads = 2, small.head_dim = 32, small.ffn = 384;
  small.vocab = 512, small.max_position = 33280;
  // A layer of Qwen2.5-0.5B, with a small vocabulary: what is chosen is chosen per layer.
  ModelConfig layer = small;
  layer.hidden = 896, layer.layers = 1, layer.heads = 14, layer.head_dim = 64, layer.ffn = 4864;
  return {{"small", small, 1, 3, {1024, 4096, 16384, 32768}}, {"0.5B layer", layer, 16, 2, {4096}}};
}

// Seconds of a forward pass.
struct Times {
  double all = 0, attention = 0, choice = 0;
};
Times times_of(const Ledger& ledger) {
  Times t;
  for (const auto& [op, line] : ledger.phases.at("main")) {
    t.all += line.seconds;
    if (op == "attn_paged" || op == "attn_paged_mass") t.attention += line.seconds;
    if (is_choice(op)) t.choice += line.seconds;
  }
  return t;
}
double median(const std::vector<Times>& passes, double Times::*part) {
  std::vector<double> x;
  for (const Times& t : passes) x.push_back(t.*part);
  std::nth_element(x.begin(), x.begin() + std::ssize(x) / 2, x.end());
  return x[x.size() / 2];
}

constexpr int kDecoded = 257;  // two events of 128 tokens

// Of a pass: the median, since other programs interrupt some, and its share of the fastest event.
Times decode(Rollout& rollout, Ledger& ledger, const Shape& shape, int64_t length) {
  Rng rng(rng_key(1, RngStream::data, static_cast<uint64_t>(length)));
  Request request{std::vector<int32_t>(length), {}, kDecoded};
  for (int32_t& id : request.prompt) id = static_cast<int32_t>(rng.below(static_cast<uint32_t>(shape.config.vocab)));
  for (int i = 0; i < shape.sequences * shape.rounds; i++) request.uids.push_back(static_cast<uint64_t>(i));
  std::vector<Times> passes, events;
  rollout.generate({request}, {.key = 1, .eos = {}}, [&](const RolloutStats& s) {
    if (s.decoded_tokens % (kDecoded * shape.sequences) > shape.sequences) {  // neither a prompt nor the first tokens
      const bool event = ledger.phases.at("main").count("kv_compact") > 0;
      (event ? events : passes).push_back(times_of(ledger));
    }
    ledger.clear();
  });
  Times t{median(passes, &Times::all), median(passes, &Times::attention), median(passes, &Times::choice)};
  if (events.empty()) return t;
  double event = events[0].choice;
  for (const Times& e : events) event = std::min(event, e.choice);
  event *= static_cast<double>(events.size()) / static_cast<double>(events.size() + passes.size());
  t.all += event, t.choice += event;
  return t;
}

}  // namespace

nlohmann::json bench_rollout() {
  nlohmann::json report = nlohmann::json::array();
  for (const Shape& shape : shapes()) {
    std::map<int64_t, double> plain;  // attention to 512 + 128 tokens of which nothing is remembered
    for (const Way& way : ways()) {
      Device device(table_cpu);
      Ledger ledger;
      device.ledger = &ledger, device.timed = true;
      Arena weights("weights"), kv("kv"), scratch("scratch");
      Model model(shape.config, device, weights, DType::f32, false);
      model.set_parameters(init_parameters(shape.config, 1, Init::fan_in));
      Rollout rollout(model,
                      {.max_sequences = shape.sequences,
                       .max_batched_tokens = 1024,
                       .max_context = shape.lengths.back() + kDecoded,
                       .kv_pages = 0,
                       .max_prompt = 0,
                       .kv = way.spec},
                      kv, scratch);
      for (const int64_t length : shape.lengths) {
        Times t = decode(rollout, ledger, shape, length);
        if (way.spec.method == KvMethod::streaming_llm) plain[length] = t.attention;
        // H2O adds up what tokens receive inside its attention.
        if (way.spec.method == KvMethod::h2o) t.choice += std::max(0.0, t.attention - plain[length]);
        const double us = 1e6 / shape.sequences;
        std::printf("rollout    %-10s %-22s context %6lld  %7.1f us a token, attention %7.1f, choosing %5.1f %%\n",
                    shape.name, way.name, static_cast<long long>(length), t.all * us, t.attention * us,
                    100 * t.choice / t.all);
        std::fflush(stdout);
        report.push_back({{"model", shape.name},
                          {"kv", way.name},
                          {"context", length},
                          {"threads", threads()},
                          {"us_per_token", t.all * us},
                          {"attention_us", t.attention * us},
                          {"choosing_share", t.choice / t.all}});
      }
    }
  }
  return report;
}

}  // namespace pare
