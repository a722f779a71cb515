#include "tools/bench/rollout.h"

#include <cstdio>
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
  const auto of = [](KvMethod method) {
    KvSpec s;  // budget 512, buffer 128; 32 blocks of 16
    s.method = method, s.dense_layers = 0;
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
  static const std::set<std::string> ops = {"kv_window_scores", "kv_redundancy",   "kv_mass",
                                            "kv_mass_scores",   "kv_select",       "kv_compact",
                                            "kv_block_summary", "kv_block_select", "copy_rows"};
  return ops.count(op) > 0;
}

}  // namespace

nlohmann::json bench_rollout() {
  ModelConfig c;
  c.model_type = "qwen3", c.qk_norm = true, c.tied = true;
  c.hidden = 128, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.head_dim = 32, c.ffn = 384, c.vocab = 512;
  c.max_position = 33280;
  constexpr int decoded = 257;  // two events of 128 tokens
  nlohmann::json report = nlohmann::json::array();
  for (const Way& way : ways()) {
    Device device(table_cpu);
    Ledger ledger;
    device.ledger = &ledger, device.timed = true;
    Arena weights("weights"), kv("kv"), scratch("scratch");
    Model model(c, device, weights, DType::f32, false);
    model.set_parameters(init_parameters(c, 1, Init::fan_in));
    Rollout rollout(model,
                    {.max_sequences = 1,
                     .max_batched_tokens = 1024,
                     .max_context = c.max_position,
                     .kv_pages = 0,
                     .max_prompt = 0,
                     .kv = way.spec},
                    kv, scratch);
    for (const int64_t length : {1024, 4096, 16384, 32768}) {
      Rng rng(rng_key(1, RngStream::data, static_cast<uint64_t>(length)));
      Request request{std::vector<int32_t>(length), {1}, decoded};
      for (int32_t& id : request.prompt) id = static_cast<int32_t>(rng.below(static_cast<uint32_t>(c.vocab)));
      rollout.generate({request}, {.key = 1, .eos = {}}, [&](const RolloutStats& s) {
        if (s.decoded_tokens == 1) ledger.clear();  // the prompt is done
      });
      double all = 0, attention = 0, choice = 0;
      for (const auto& [op, line] : ledger.phases.at("main")) {
        all += line.seconds;
        if (op == "attn_paged") attention += line.seconds;
        if (is_choice(op)) choice += line.seconds;
      }
      const double us = 1e6 / (decoded - 1);
      std::printf("rollout    %-22s context %6lld  %7.1f us a token, attention %7.1f, choosing %5.1f %%\n", way.name,
                  static_cast<long long>(length), all * us, attention * us, 100 * choice / all);
      std::fflush(stdout);
      report.push_back({{"kv", way.name},
                        {"context", length},
                        {"threads", threads()},
                        {"us_per_token", all * us},
                        {"attention_us", attention * us},
                        {"choosing_share", choice / all}});
    }
  }
  return report;
}

}  // namespace pare
