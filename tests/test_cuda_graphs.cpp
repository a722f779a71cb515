// Decode passes as CUDA graphs: no bit of a rollout and no line of its ledger changes.
#include "kernels.h"
#include "tests/generator.h"

namespace pare::test {
namespace {

struct Outcome {
  std::vector<Completion> completions;
  RolloutStats stats;
  Ledger ledger;
};
struct Way {
  bool graphs = true, check_nan = false;
  int steps = 1;  // of training, each with a key of its own
};
Outcome generate(const KvSpec& spec, Sampling sampling, DType dtype, const Way& way) {
  const std::vector<Request> requests = {
      {{3, 5, 7, 11, 13, 2, 9}, {1, 2, 3}, 23}, {{1}, {4}, 18}, {{8, 8, 6}, {5, 6}, 9}, {{4, 4}, {7, 8}, 1}};
  Generator g(table_kernels, tiny_config("qwen3", false),
              {.max_sequences = 4, .max_batched_tokens = 21, .max_context = 60, .kv = spec, .lookahead = 8}, dtype);
  g.device.graphs = way.graphs;
  g.device.check_nan = way.check_nan;
  g.ledger.clear();
  Outcome o;
  for (int i = 0; i < way.steps; i++, sampling.key++) {
    for (Completion& c : g.rollout.generate(requests, sampling)) o.completions.push_back(std::move(c));
    o.stats.add(g.rollout.stats());
  }
  o.ledger = g.ledger;
  EXPECT_EQ(g.scratch.used(), 0u);
  return o;
}

KvSpec small(KvMethod method) {
  KvSpec s;
  s.method = method;
  s.evict.budget = 10;
  s.evict.buffer = 5;
  s.window.size = 3;
  s.streaming_llm.sinks = 2;
  s.window.pooling_kernel = 3;
  s.blocks.size = 4;
  s.blocks.count = 3;
  s.blocks.first = 1;
  s.blocks.last = 1;
  s.blocks.dense_layers = 1;
  return s;
}

void expect_same_with_graphs(const KvSpec& spec, const Sampling& sampling, DType dtype, int64_t least_passes,
                             int steps = 1) {
  SCOPED_TRACE(cat("method ", static_cast<int>(spec.method), ", temperature ", sampling.temperature));
  const Outcome without = generate(spec, sampling, dtype, {.graphs = false, .steps = steps}),
                with = generate(spec, sampling, dtype, {.steps = steps});
  expect_same(with.completions, without.completions, "graphs");
  EXPECT_EQ(with.ledger.phases, without.ledger.phases);
  EXPECT_EQ(with.stats.forward_passes, without.stats.forward_passes);
  EXPECT_EQ(with.stats.compressions, without.stats.compressions);
  EXPECT_EQ(without.stats.graph_passes, 0);
  EXPECT_GE(with.stats.graph_passes, least_passes);
}

TEST(CudaGraphs, ChangeNoBitOfARollout) {
  for (const KvMethod method :
       {KvMethod::dense, KvMethod::streaming_llm, KvMethod::h2o, KvMethod::rkv, KvMethod::quest})
    expect_same_with_graphs(small(method), mixed_sampling(), DType::bf16, 8);
}

TEST(CudaGraphs, ServeTheNextStep) { expect_same_with_graphs({}, mixed_sampling(), DType::f32, 20, 2); }

TEST(CudaGraphs, ChangeNoBitOfAnyWayToDraw) {
  Sampling sampling = mixed_sampling();
  for (const float temperature : {0.f, 1.5f}) {
    sampling.temperature = temperature;
    expect_same_with_graphs({}, sampling, DType::f32, 8);
  }
  sampling.truncation = {5, 0.8f, 0.05f};
  expect_same_with_graphs(small(KvMethod::h2o), sampling, DType::f32, 8);
}

TEST(CudaGraphs, TheNanCheckGoesWithout) {
  const Outcome checked = generate({}, mixed_sampling(), DType::f32, {.check_nan = true});
  EXPECT_EQ(checked.stats.graph_passes, 0);
  expect_same(checked.completions, generate({}, mixed_sampling(), DType::f32, {}).completions, "NaN check");
}

}  // namespace
}  // namespace pare::test
