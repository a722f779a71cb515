#include "bench/rollout.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/rng.h"
#include "base/thread_pool.h"
#include "rollout/rollout.h"

namespace pare {

namespace {

struct Way {
  const char* name;
  KvSpec spec;
};

std::vector<Way> ways() {
  const auto of = [](KvMethod method) {
    KvSpec s;  // budget 512, buffer 128; 32 blocks of 16
    s.method = method;
    s.blocks.dense_layers = 0;
    return s;
  };
  return {{"dense", {}},
          {"streaming_llm 512+128", of(KvMethod::streaming_llm)},
          {"h2o 512+128", of(KvMethod::h2o)},
          {"snapkv 512+128", of(KvMethod::snapkv)},
          {"rkv 512+128", of(KvMethod::rkv)},
          {"quest 32 x 16", of(KvMethod::quest)},
          {"block_topk 32 x 16", of(KvMethod::block_topk)}};
}

// Ops that choose or move, beside those that every rollout has.
bool is_choice(const std::string& op) {
  static const std::set<std::string> ops = {"kv_window_scores", "kv_redundancy",    "kv_mass_scores", "kv_select",
                                            "kv_compact",       "kv_block_summary", "kv_block_select"};
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
  small.model_type = "qwen3";
  small.qk_norm = true;
  small.tied = true;
  small.hidden = 128;
  small.layers = 2;
  small.heads = 4;
  small.kv_heads = 2;
  small.head_dim = 32;
  small.ffn = 384;
  small.vocab = 512;
  small.max_position = 33280;
  // A layer of Qwen2.5-0.5B, with a small vocabulary: what is chosen is chosen per layer.
  ModelConfig layer = small;
  layer.hidden = 896;
  layer.layers = 1;
  layer.heads = 14;
  layer.head_dim = 64;
  layer.ffn = 4864;
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
    if (op == "attn_paged") t.attention += line.seconds;
    if (is_choice(op)) t.choice += line.seconds;
  }
  return t;
}
// Of each part, over passes that are alike.
Times median(const std::vector<Times>& passes) {
  const auto of = [&](double Times::*part) {
    std::vector<double> x;
    for (const Times& t : passes) x.push_back(t.*part);
    std::nth_element(x.begin(), x.begin() + std::ssize(x) / 2, x.end());
    return x[x.size() / 2];
  };
  return {of(&Times::all), of(&Times::attention), of(&Times::choice)};
}

// Leaves nothing of what a pass has read in the caches.
void sweep() {
  static const std::vector<int64_t> memory(size_t{6} << 20, 1);  // 48 MB
  parallel_for(threads(), 1, [](int64_t, int64_t) {
    volatile int64_t sum = 0;
    for (size_t i = 0; i < memory.size(); i += 8) sum = sum + memory[i];
  });
}

constexpr int kDecoded = 257;  // two compressions of 128 tokens

// Passes of one kind each: a compression, a choice of blocks, neither.
struct Passes {
  std::vector<Times> compressions, chosen, others;
};
// A pass and its share of the rare ones: medians, since other programs interrupt some, and the fastest compression.
Times mean_pass(const Passes& p) {
  Times mean;
  const size_t ordinary = p.chosen.size() + p.others.size();
  const auto add = [&](const Times& t, size_t n, size_t of) {
    const double share = static_cast<double>(n) / static_cast<double>(of);
    mean.all += share * t.all;
    mean.attention += share * t.attention;
    mean.choice += share * t.choice;
  };
  for (const auto* kind : {&p.chosen, &p.others})
    if (!kind->empty()) add(median(*kind), kind->size(), ordinary);
  if (!p.compressions.empty()) {
    const double compression = std::ranges::min_element(p.compressions, {}, &Times::choice)->choice;
    add({compression, 0, compression}, p.compressions.size(), ordinary + p.compressions.size());
  }
  return mean;
}

// cold: nothing that a pass reads is in a cache when it begins.
struct Decoded {
  Times warm, cold;
};
Decoded decode(Rollout& rollout, Ledger& ledger, const Shape& shape, int64_t length) {
  Rng rng(rng_key(1, RngStream::data, static_cast<uint64_t>(length)));
  Request request{std::vector<int32_t>(length), {}, kDecoded};
  for (int32_t& id : request.prompt) id = static_cast<int32_t>(rng.below(static_cast<uint32_t>(shape.config.vocab)));
  for (int i = 0; i < shape.sequences * shape.rounds; i++) request.uids.push_back(static_cast<uint64_t>(i));
  Passes warm, cold;
  bool swept = false;
  rollout.generate({request}, {.key = 1, .eos = {}}, [&](const RolloutStats& s) {
    const int64_t round = int64_t{kDecoded} * shape.sequences;
    if (s.decoded_tokens % round > shape.sequences) {  // neither a prompt nor the first tokens
      const auto& ops = ledger.phases.at("main");
      Passes& p = swept ? cold : warm;
      (ops.contains("kv_compact")        ? p.compressions
       : ops.contains("kv_block_select") ? p.chosen
                                         : p.others)
          .push_back(times_of(ledger));
    }
    ledger.clear();
    swept = s.decoded_tokens >= (shape.rounds - 1) * round;  // the last round
    if (swept) sweep();
  });
  return {mean_pass(warm), mean_pass(cold)};
}

}  // namespace

nlohmann::json bench_rollout() {
  nlohmann::json report = nlohmann::json::array();
  for (const Shape& shape : shapes()) {
    std::map<int64_t, double> plain;  // attention to 512 + 128 tokens of which nothing is remembered
    for (const Way& way : ways()) {
      Device device(table_cpu);
      Ledger ledger;
      device.ledger = &ledger;
      device.timed = true;
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
        auto [t, cold] = decode(rollout, ledger, shape, length);
        if (way.spec.method == KvMethod::streaming_llm) plain[length] = t.attention;
        // H2O adds up what tokens receive inside its attention.
        if (way.spec.method == KvMethod::h2o) t.choice += std::max(0.0, t.attention - plain[length]);
        const double us = 1e6 / shape.sequences;
        std::printf(
            "rollout    %-10s %-22s context %6lld  %7.1f us a token, attention %7.1f, choosing %5.1f %%; caches cold "
            "%7.1f\n",
            shape.name, way.name, static_cast<long long>(length), t.all * us, t.attention * us, 100 * t.choice / t.all,
            cold.all * us);
        std::fflush(stdout);
        report.push_back({{"model", shape.name},
                          {"kv", way.name},
                          {"context", length},
                          {"threads", threads()},
                          {"us_per_token", t.all * us},
                          {"attention_us", t.attention * us},
                          {"choosing_share", t.choice / t.all},
                          {"us_per_token_cold", cold.all * us}});
      }
    }
  }
  return report;
}

}  // namespace pare
