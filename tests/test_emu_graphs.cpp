// Graphs of the emulator's host API: what a program gets wrong must show.
#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <vector>

#include "emu_kernels.h"

namespace pare::test::emu {
namespace {

// Device memory of kN floats, which are never written unless `value` is given: then value, value + 1, ...
struct Row {
  float* p = nullptr;
  explicit Row(std::optional<float> value = {}) {
    EXPECT_EQ(cudaMalloc(&p, kN * sizeof(float)), cudaSuccess);
    if (value) write(*value);
  }
  ~Row() { cudaFree(p); }
  void write(float value) {
    std::vector<float> host(kN);
    std::iota(host.begin(), host.end(), value);
    EXPECT_EQ(cudaMemcpy(p, host.data(), kN * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
  }
  float first() const {
    float x = 0;
    EXPECT_EQ(cudaMemcpy(&x, p, sizeof x, cudaMemcpyDeviceToHost), cudaSuccess);
    return x;
  }
};

// Parameters of a node that reverses `in` into `out`.  Those of the kernel are gone as soon as it is: `f` may use them.
template <class F>
cudaError_t with_reverse(float* out, const float* in, F f) {
  void* args[] = {&out, &in};
  cudaKernelNodeParams p{};
  p.func = const_cast<void*>(cuemu::symbol(reverse<true>));
  p.gridDim = 1;
  p.blockDim = kN;
  p.sharedMemBytes = kN * sizeof(float);
  p.kernelParams = args;
  const cudaError_t e = f(p);
  out = nullptr;
  in = nullptr;
  return e;
}

struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  std::vector<cudaGraphNode_t> nodes;
  Graph() { EXPECT_EQ(cudaGraphCreate(&graph, 0), cudaSuccess); }
  ~Graph() {
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
  cudaError_t add(float* out, const float* in, std::vector<cudaGraphNode_t> after = {}) {
    return with_reverse(out, in, [&](const cudaKernelNodeParams& p) {
      return cudaGraphAddKernelNode(&nodes.emplace_back(), graph, after.data(), after.size(), &p);
    });
  }
  cudaError_t set(size_t node, float* out, const float* in) {
    return with_reverse(out, in, [&](const cudaKernelNodeParams& p) {
      return cudaGraphExecKernelNodeSetParams(exec, nodes[node], &p);
    });
  }
  void instantiate() { ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess); }
  void launch() { ASSERT_EQ(cudaGraphLaunch(exec, nullptr), cudaSuccess); }
};

// Each node follows those that it was told to follow; without that its input is not there yet.
TEST(EmuGraph, NodesRunInTheOrderOfTheirDependencies) {
  for (const bool chained : {true, false}) {
    const Row a(1), b, c;
    Graph g;
    ASSERT_EQ(g.add(b.p, a.p), cudaSuccess);
    ASSERT_EQ(g.add(c.p, b.p, chained ? g.nodes : std::vector<cudaGraphNode_t>{}), cudaSuccess);
    g.instantiate();
    g.launch();
    const cudaError_t e = cudaDeviceSynchronize();
    if (chained)
      EXPECT_EQ(c.first(), 1);
    else if (cuemu::kChecker)
      EXPECT_EQ(e, cudaErrorLaunchFailure);
    else
      EXPECT_TRUE(std::isnan(c.first()));
    cudaGetLastError();
  }
}

TEST(EmuGraph, ALaunchIsQueued) {
  Row a(1);
  const Row b(50);
  const uint64_t launches = cuemu::calls().launches, graphs = cuemu::calls().graph_launches;
  {
    Graph g;
    ASSERT_EQ(g.add(b.p, a.p), cudaSuccess);
    g.instantiate();
    g.launch();
  }  // a graph may go before its launch is done
  cudaStream_t other;
  ASSERT_EQ(cudaStreamCreate(&other), cudaSuccess);
  float x = 0;
  ASSERT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(&x, b.p, sizeof x, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(x, 0);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(x, kN);
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
  EXPECT_EQ(cuemu::calls().graph_launches - graphs, 1u);
  EXPECT_EQ(cuemu::calls().launches, launches);
}

// What a node is set to concerns the launches that follow.
TEST(EmuGraph, NodesAreSetForLaterLaunches) {
  const Row a(1), b(1000), c, d(0);
  Graph g;
  ASSERT_EQ(g.add(c.p, a.p), cudaSuccess);
  g.instantiate();
  g.launch();
  ASSERT_EQ(g.set(0, d.p, b.p), cudaSuccess);
  EXPECT_EQ(d.first(), 0);
  EXPECT_EQ(c.first(), kN);
  g.launch();
  EXPECT_EQ(d.first(), 1000 + kN - 1);
  // The graph itself is what it was.
  Graph again;
  std::swap(again.graph, g.graph);
  again.instantiate();
  EXPECT_EQ(cudaMemset(c.p, 0, kN * sizeof(float)), cudaSuccess);
  again.launch();
  EXPECT_EQ(c.first(), kN);
}

TEST(EmuGraph, MistakesAreRefused) {
  const Row a(1), b;
  Graph g, other;
  ASSERT_EQ(g.add(b.p, a.p), cudaSuccess);
  EXPECT_EQ(other.add(b.p, a.p, g.nodes), cudaErrorInvalidValue) << "a node of another graph";
  other.nodes.clear();
  ASSERT_EQ(other.add(b.p, a.p), cudaSuccess);
  g.instantiate();
  cudaGraphNode_t mine = std::exchange(g.nodes[0], other.nodes[0]);
  EXPECT_EQ(g.set(0, b.p, a.p), cudaErrorInvalidValue) << "a node of another graph";
  g.nodes[0] = mine;
  const auto set = [&](auto change) {
    return with_reverse(b.p, a.p, [&](cudaKernelNodeParams& p) {
      change(p);
      return cudaGraphExecKernelNodeSetParams(g.exec, g.nodes[0], &p);
    });
  };
  EXPECT_EQ(set([](auto&) {}), cudaSuccess);
  EXPECT_EQ(set([](auto& p) { p.gridDim = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(set([](auto& p) { p.blockDim = 1025; }), cudaErrorInvalidValue);
  EXPECT_EQ(set([](auto& p) { p.sharedMemBytes = 1 << 20; }), cudaErrorInvalidValue);
  EXPECT_EQ(set([](auto& p) { p.kernelParams = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(set([&](auto& p) { p.func = a.p; }), cudaErrorInvalidDeviceFunction);
  cudaGraphDestroy(std::exchange(g.graph, nullptr));
  EXPECT_EQ(g.set(0, b.p, a.p), cudaErrorInvalidValue) << "its graph is gone";
  EXPECT_EQ(cudaGraphLaunch(nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);

  const size_t before = cuemu::settings().device_memory;
  cuemu::settings().device_memory = 0;
  EXPECT_EQ(cudaGraphInstantiate(&other.exec, other.graph, 0), cudaErrorMemoryAllocation);
  cuemu::settings().device_memory = before;
}

// An edge from a kernel's begin launches the next early, which then has to wait itself.
TEST(EmuGraph, AnEarlyNodeWaitsForTheOneBefore) {
  const auto run = [](const void* kernel, cudaGraphEdgeData edge, cudaError_t refused = cudaSuccess) {
    const Row a(1), b, c;
    Graph g;
    EXPECT_EQ(g.add(b.p, a.p), cudaSuccess);
    float* out = c.p;
    const float* in = b.p;
    void* args[] = {&out, &in};
    cudaKernelNodeParams p{};
    p.func = const_cast<void*>(kernel);
    p.gridDim = 1;
    p.blockDim = kN;
    p.sharedMemBytes = kN * sizeof(float);
    p.kernelParams = args;
    EXPECT_EQ(cudaGraphAddKernelNode(&g.nodes.emplace_back(), g.graph, nullptr, 0, &p), cudaSuccess);
    EXPECT_EQ(cudaGraphAddDependencies(g.graph, &g.nodes[0], &g.nodes[1], &edge, 1), refused);
    if (refused) return cudaSuccess;
    g.instantiate();
    g.launch();
    const cudaError_t e = cudaDeviceSynchronize();
    cudaGetLastError();
    EXPECT_TRUE(e || c.first() == kN + 1) << c.first();
    return e;
  };
  const cudaGraphEdgeData end{}, begin{cudaGraphKernelNodePortProgrammatic, 0, cudaGraphDependencyTypeProgrammatic, {}};
  const void *right = cuemu::symbol(early<EarlyBug::none>), *wrong = cuemu::symbol(early<EarlyBug::one_returns>);
  EXPECT_EQ(run(right, end), cudaSuccess);
  EXPECT_EQ(run(right, begin), cudaSuccess);
  EXPECT_EQ(run(wrong, end), cudaSuccess);
  EXPECT_EQ(run(wrong, begin), cudaErrorLaunchFailure);
  run(right, {cudaGraphKernelNodePortProgrammatic, 0, cudaGraphDependencyTypeDefault, {}}, cudaErrorInvalidValue);
  run(right, {cudaGraphKernelNodePortDefault, 0, cudaGraphDependencyTypeProgrammatic, {}}, cudaErrorInvalidValue);
}

// Nothing runs behind the node that fails; the next wait says so.
TEST(EmuGraph, AnErrorOfANodeShowsAtTheNextWait) {
  const Row a(1), b, c(0);
  Graph g;
  float* out = b.p;
  const float* in = a.p;
  void* args[] = {&out, &in};
  cudaKernelNodeParams p{};
  p.func = const_cast<void*>(cuemu::symbol(barrier_skipped));
  p.gridDim = 1;
  p.blockDim = kN;
  p.kernelParams = args;
  ASSERT_EQ(cudaGraphAddKernelNode(&g.nodes.emplace_back(), g.graph, nullptr, 0, &p), cudaSuccess);
  ASSERT_EQ(g.add(c.p, a.p, g.nodes), cudaSuccess);
  g.instantiate();
  g.launch();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  EXPECT_EQ(c.first(), 0);
}

// A parameter that names memory which is gone.
TEST(EmuGraph, AStaleAddressIsReported) {
  if (!cuemu::kChecker) GTEST_SKIP() << "the access checker's: make check";
  const Row b;
  Graph g;
  {
    const Row a(1);
    ASSERT_EQ(g.add(b.p, a.p), cudaSuccess);
    g.instantiate();
  }
  g.launch();
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
}

}  // namespace
}  // namespace pare::test::emu
