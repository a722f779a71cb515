// Random draws that must differ: of seeds, steps, layers, modules and stages; and the numbers by which compressions of
// a cache find their way.  Both are read where they reach an op.
#include <map>
#include <set>

#include "model/lora.h"
#include "ops/compression.h"
#include "ops/data.h"
#include "ops/logits.h"
#include "ops/optimizer.h"
#include "rl/loss.h"
#include "rl/obrs.h"
#include "rl/token_plan.h"
#include "tests/generator.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

// Rounding of moments in bf16: the key of every call of adamw, by step, and the elements that it covers.
struct Rounding {
  std::map<int64_t, std::set<uint64_t>> keys;
  std::map<int64_t, std::map<int64_t, int64_t>> elements;  // step: first, count
};
Rounding rounding(const std::string& seed) {
  static Rounding seen;
  seen = {};
  Table spy = table_cpu;
  spy.adamw = [](const AdamW& a, Stream s) {
    seen.keys[a.step].insert(a.key);
    seen.elements[a.step][a.first] = a.grad.size();
    table_cpu.adamw(a, s);
  };
  TrainingRun run(tiny_run("qwen3", {"actor.optim.moments=bf16", "trainer.seed=" + seed}), digits, spy);
  for (int i = 0; i < 3; i++) run.step();
  return seen;
}

TEST(Draws, RoundingOfMomentsDiffersInSeedStepAndElement) {
  std::set<uint64_t> all;
  for (const char* seed : {"1", "2"}) {
    const Rounding r = rounding(seed);
    ASSERT_EQ(r.keys.size(), 3u);
    for (const auto& [step, keys] : r.keys) {
      ASSERT_EQ(keys.size(), 1u) << "one key a step";
      EXPECT_TRUE(all.insert(*keys.begin()).second) << "seed " << seed << ", step " << step;
      EXPECT_EQ(*keys.begin(), rng_key(std::stoull(seed), RngStream::moments, static_cast<uint64_t>(step)));
    }
    for (const auto& [step, blocks] : r.elements) {
      int64_t end = 0;
      for (const auto& [first, count] : blocks) {
        EXPECT_GE(first, end) << "two elements with one coin";
        end = first + count;
      }
    }
  }
  const ActorKeys actor;
  EXPECT_EQ(optimizer_options(actor, 0.1, 5).seed, 5u);
}

// Keys of sampling: of a step of training, its validation, and another step.
TEST(Draws, SamplingDiffersInStepAndFromValidation) {
  static std::set<uint64_t> keys;
  keys.clear();
  Table spy = table_cpu;
  spy.sample = [](const Sample& a, Stream s) {
    keys.insert(a.key);
    table_cpu.sample(a, s);
  };
  TrainingRun run(tiny_run("qwen3", {"rollout.val_kwargs.temperature=1"}), digits, spy);
  std::set<uint64_t> all;
  for (int step = 0; step < 3; step++)
    for (const bool training : {true, false}) {
      keys.clear();
      training ? run.step() : run.trainer->evaluate();
      ASSERT_EQ(keys.size(), 1u);
      EXPECT_TRUE(all.insert(*keys.begin()).second) << "step " << step << (training ? "" : ", validation");
    }
}

// A is drawn element by element, whatever the pieces in which it is read, and differs from module to module.
TEST(Draws, AdaptersDifferFromModuleToModule) {
  const ModelConfig c = tiny_config("qwen3", true);
  const LoraSpec spec{.rank = 300};  // more elements than a piece of work has
  const std::vector<Parameter> layout = adapter_parameters(c, spec);
  std::set<std::vector<int>> beginnings;
  for (const uint64_t seed : {3, 4}) {
    const ParameterReader read = init_adapters(c, spec, seed);
    for (size_t i = 0; i < layout.size(); i += 2) {
      const int64_t n = layout[i].size, cut = n / 2 + 1;
      ASSERT_GT(n, 5000);
      std::vector<float> whole(static_cast<size_t>(n)), pieces = whole;
      read(i, 0, n, whole.data());
      read(i, 0, cut, pieces.data());
      read(i, cut, n - cut, pieces.data() + cut);
      EXPECT_TRUE(same_bits(whole, pieces)) << layout[i].name;
      const float bound = 1 / std::sqrt(static_cast<float>(layout[i].shape[1]));
      for (const int64_t at : {int64_t{0}, int64_t{1024}, cut}) {
        std::vector<int> beginning;
        for (int64_t k = at; k < at + 8; k++)
          beginning.push_back(static_cast<int>(std::lround(whole[k] / bound * 1e4)));
        EXPECT_TRUE(beginnings.insert(beginning).second) << layout[i].name << " from " << at << ", seed " << seed;
      }
    }
  }
}

RolloutLimits with(const KvSpec& spec) {
  RolloutLimits limits = kRoomy;
  limits.kv = spec;
  return limits;
}

KvSpec small_budget(KvMethod method) {
  KvSpec s;
  s.method = method;
  s.evict.budget = 11;
  s.evict.buffer = 4;
  s.evict.prompt = KvPrompt::compress;
  s.window.size = 3;
  return s;
}

// The rows of a window are the queries in the order in which they were written, the oldest first,
// wherever the ring begins.
TEST(Compressions, WindowsBeginWithTheOldestQuery) {
  static std::map<const void*, int64_t> written;  // row of the ring: when
  static int64_t clock, windows, rotated;
  written.clear();
  clock = windows = rotated = 0;
  Table spy = table_cpu;
  spy.copy_rows = [](const CopyRows& c, Stream s) {
    const auto row = [](const Tensor& t, int64_t i) {
      return static_cast<const char*>(t.data) + static_cast<size_t>(i * t.stride[0]) * dtype_size(t.dtype);
    };
    for (int64_t i = 0; i < c.index.shape[0]; i++) {
      const int32_t from = c.index.as<int32_t>()[2 * i], to = c.index.as<int32_t>()[2 * i + 1];
      const auto copied = written.find(row(c.x, from));
      written[row(c.y, to)] = c.x.data == c.y.data && copied != written.end() ? copied->second : ++clock;
    }
    table_cpu.copy_rows(c, s);
  };
  spy.kv_window_scores = [](const KvWindowScores& a, Stream s) {
    const auto* const list = a.compressions.as<int32_t>();
    for (int64_t i = 0; i < a.compressions.shape[0]; i++, windows++) {
      const int32_t first = list[i * a.compressions.shape[1] + 4], oldest = a.window_first.as<int32_t>()[i];
      rotated += oldest != 0;
      int64_t before = 0;
      for (int32_t t = 0; t < a.window; t++) {
        const int64_t at = (first + (oldest + t) % a.window) * a.windows.stride[0];
        const int64_t when =
            written[static_cast<const char*>(a.windows.data) + static_cast<size_t>(at) * dtype_size(a.windows.dtype)];
        EXPECT_GT(when, before) << "query " << t << " of compression " << i;
        before = when;
      }
    }
    table_cpu.kv_window_scores(a, s);
  };
  for (const KvMethod method : {KvMethod::snapkv, KvMethod::rkv, KvMethod::pyramidkv}) {
    Generator g(spy, config(), with(small_budget(method)));
    Rng rng(rng_key(6, RngStream::test, 9));
    g.rollout.generate(
        {{random_ids(rng, 20, config().vocab), {5, 6}, 40}, {random_ids(rng, 7, config().vocab), {7}, 50}},
        {.key = 3, .eos = {}});
  }
  EXPECT_GT(windows, 30);
  EXPECT_GT(rotated, 10);
}

}  // namespace
}  // namespace pare::test
