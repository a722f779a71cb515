// Pieces of work launched as CUDA graphs: no bit of a rollout and no line of its ledger changes.
#include "kernel_table.h"
#include "tests/generator.h"

namespace pare::test {
namespace {

// ---- rollouts

struct Outcome {
  std::vector<Completion> completions;
  RolloutStats stats;
  Ledger ledger;
};
Outcome generate(const KvSpec& spec, const Sampling& sampling, bool graphs, DType dtype, bool check_nan = false) {
  const std::vector<Request> requests = {
      {{3, 5, 7, 11, 13, 2, 9}, {1, 2, 3}, 40}, {{1}, {4}, 30}, {{8, 8, 6}, {5, 6}, 9}, {{4, 4}, {7, 8}, 1}};
  Generator g(table_kernels, tiny_config("qwen3", false),
              {.max_sequences = 4, .max_batched_tokens = 21, .max_context = 60, .kv = spec, .lookahead = 8}, dtype);
  g.device.graphs = graphs, g.device.check_nan = check_nan;
  g.ledger.clear();
  Outcome o{g.rollout.generate(requests, sampling), {}, {}};
  // The same graphs serve another step, with another key.
  Sampling next = sampling;
  next.key++;
  for (Completion& c : g.rollout.generate(requests, next)) o.completions.push_back(std::move(c));
  o.stats = g.rollout.stats(), o.ledger = g.ledger;
  EXPECT_EQ(g.scratch.used(), 0u);
  return o;
}

KvSpec small(KvMethod method) {
  KvSpec s;
  s.method = method, s.budget = 10, s.buffer = 5, s.window = 3, s.sinks = 2, s.pooling_kernel = 3;
  s.block = 4, s.blocks = 3, s.first_blocks = 1, s.last_blocks = 1, s.dense_layers = 1;
  return s;
}

void expect_same_with_graphs(const KvSpec& spec, const Sampling& sampling, DType dtype, int64_t least_passes) {
  SCOPED_TRACE(cat("method ", static_cast<int>(spec.method), ", temperature ", sampling.temperature));
  const Outcome without = generate(spec, sampling, false, dtype), with = generate(spec, sampling, true, dtype);
  expect_same(with.completions, without.completions, "graphs");
  EXPECT_EQ(with.ledger.phases, without.ledger.phases);
  EXPECT_EQ(with.stats.forward_passes, without.stats.forward_passes);
  EXPECT_EQ(with.stats.events, without.stats.events);
  EXPECT_EQ(without.stats.graph_passes, 0);
  EXPECT_GE(with.stats.graph_passes, least_passes);
}

TEST(CudaGraphs, ChangeNoBitOfARollout) {
  for (const KvMethod method : {KvMethod::dense, KvMethod::streaming_llm, KvMethod::h2o, KvMethod::tova,
                                KvMethod::snapkv, KvMethod::rkv, KvMethod::quest, KvMethod::block_topk})
    expect_same_with_graphs(small(method), mixed_sampling(), DType::bf16, 12);
}

TEST(CudaGraphs, ChangeNoBitOfAnyWayToDraw) {
  Sampling sampling = mixed_sampling();
  for (const float temperature : {0.f, 0.3f, 1.5f}) {
    sampling.temperature = temperature;
    expect_same_with_graphs({}, sampling, DType::f32, 12);
  }
  sampling.top_k = 5, sampling.top_p = 0.8f;
  expect_same_with_graphs(small(KvMethod::h2o), sampling, DType::f32, 12);
}

// An event before the attention of its layer uploads what it needs: such a pass is launched one by one.
TEST(CudaGraphs, PassesWithEventsInThemAreNotOneLaunch) {
  KvSpec spec = small(KvMethod::rkv);
  spec.attend = KvAttend::after;
  expect_same_with_graphs(spec, mixed_sampling(), DType::bf16, 10);
  const Outcome o = generate(spec, mixed_sampling(), true, DType::bf16);
  EXPECT_GT(o.stats.events, 0);
  EXPECT_LT(o.stats.graph_passes, o.stats.forward_passes - 5);
}

TEST(CudaGraphs, TheNanCheckGoesWithout) {
  const Outcome checked = generate({}, mixed_sampling(), true, DType::f32, true);
  EXPECT_EQ(checked.stats.graph_passes, 0);
  expect_same(checked.completions, generate({}, mixed_sampling(), true, DType::f32).completions, "NaN check");
}

// ---- pieces of work

class Together : public testing::Test {
 protected:
  Tensor vector(const std::vector<float>& values) {
    const Tensor t = arena.alloc("vector", DType::f32, {std::ssize(values)});
    device.upload({t, values.data()});
    return t;
  }
  std::vector<float> read(const Tensor& t) {
    std::vector<float> host(t.size());
    device.download({host.data(), t});
    return host;
  }
  Device device{table_kernels};
  Arena arena{"a", *table_kernels.memory, 1 << 20};
};

TEST_F(Together, RunsWhenItReturns) {
  const Tensor x = vector({1, 2, 3}), y = vector({10, 20, 30}), z = vector({0, 0, 0});
  for (int i = 0; i < 3; i++) {
    EXPECT_TRUE(device.together([&] {
      device.accumulate({y, x});
      device.accumulate({z, y});
    }));
  }
  EXPECT_EQ(read(y), (std::vector<float>{13, 26, 39}));
  EXPECT_EQ(read(z), (std::vector<float>{36, 72, 108}));
  EXPECT_TRUE(device.together([] {}));
}

// The same kernels with other addresses and sizes, and more kinds of work than graphs are kept of.
TEST_F(Together, ServesWhateverDiffers) {
  for (int round = 0; round < 2; round++)
    for (int kind = 1; kind < 12; kind++) {
      const ArenaScope scope(arena);
      const Tensor x = vector(std::vector<float>(100 * kind + round, 1)), y = vector(std::vector<float>(x.size(), 0));
      EXPECT_TRUE(device.together([&] {
        for (int i = 0; i < kind; i++) device.accumulate({y, x});
      }));
      EXPECT_EQ(read(y), std::vector<float>(x.size(), static_cast<float>(kind)));
    }
}

// What must not overtake a kernel does not.
TEST_F(Together, KeepsTheOrderOfUploadsDownloadsAndZeros) {
  const Tensor x = vector({1, 2, 3}), y = vector({0, 0, 0});
  const std::vector<float> other = {5, 6, 7};
  EXPECT_TRUE(device.together([&] {
    device.upload({x, other.data()});  // before the first kernel
    device.accumulate({y, x});
  }));
  EXPECT_EQ(read(y), other);
  EXPECT_FALSE(device.together([&] {
    device.accumulate({y, x});
    device.upload({x, std::vector<float>{1, 1, 1}.data()});
    device.accumulate({y, x});
  }));
  EXPECT_EQ(read(y), (std::vector<float>{11, 13, 15}));
  EXPECT_FALSE(device.together([&] {
    device.accumulate({y, x});
    device.zero({x});
    device.accumulate({y, x});
  }));
  EXPECT_EQ(read(y), (std::vector<float>{12, 14, 16}));
  std::vector<float> between;
  EXPECT_FALSE(device.together([&] {
    device.accumulate({x, y});
    between = read(x);
    device.accumulate({x, y});
  }));
  EXPECT_EQ(between, (std::vector<float>{12, 14, 16}));
  EXPECT_EQ(read(x), (std::vector<float>{24, 28, 32}));
}

TEST_F(Together, NothingRunsOfWhatThrows) {
  const Tensor x = vector({1, 2, 3}), y = vector({0, 0, 0});
  EXPECT_THROW(device.together([&] {
    device.accumulate({y, x});
    device.accumulate({y, x.rows(0, 2)});
  }),
               std::logic_error);
  EXPECT_EQ(read(y), (std::vector<float>{0, 0, 0}));
  EXPECT_THROW(device.together([&] { device.together([] {}); }), std::logic_error);
  EXPECT_TRUE(device.together([&] { device.accumulate({y, x}); }));
  EXPECT_EQ(read(y), read(x));
}

}  // namespace
}  // namespace pare::test
