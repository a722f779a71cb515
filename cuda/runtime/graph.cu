// Pieces of work as CUDA graphs: one launch for the kernels of a decode step, whose gaps would else be as long as its
// shortest kernels.
//
// A graph is a chain of kernels in the order of the calls, and stands for every piece of work with that sequence of
// kernels.  Grids, shared memory and parameters of each node are those of the last launch; where the new ones differ,
// bit by bit, the node is set anew (cudaGraphExecKernelNodeSetParams), which concerns later launches only.  So
// anything may change from pass to pass: number of rows, addresses, the key of the draws, grids by length.  In steady
// decoding the addresses of tokens change; when a sequence has ended, most nodes do, at about the cost of their
// launches.  A graph for each number of rows would take a millisecond or so to make, and would hardly ever be launched
// again: the number falls from round to round, and the key of the draws changes with every step of training.  Of batch
// buckets there remain the sizes at which a linear layer takes another kernel.
//
// On compute capability 9.0 kernels that wait for the one before themselves (LaunchShape::early) follow it by a
// programmatic edge: their launch, and their work before the wait, hide behind its last blocks.
//
// Only kernels of ours are gathered.  Those of cuBLASLt (linear_lt.cu) are not ours to name as nodes: a call of the
// library ends the gathering as a copy does, so that with --exact=off a pass is launched kernel by kernel.
//
// Bytes may also differ without a reason, by padding that the compiler cannot clear; the node is then set for nothing.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

namespace {

// Kernels with their parameters, in the order of the calls.
class Work {
 public:
  void clear() {
    kernels_.clear();
    args_.clear();
    lines_ = 0;
  }
  size_t size() const { return kernels_.size(); }

  void add(const char* op, const void* func, const LaunchShape& l, void** args, std::span<const ParamType> types) {
    Kernel k{op, func, l, args_.size(), types.size(), lines_, 0};
    for (size_t i = 0; i < types.size(); i++) {
      k.bytes = round_up(k.bytes, types[i].align);
      args_.push_back(k.bytes);
      k.bytes += types[i].size;
    }
    lines_ += ceil_div(k.bytes, sizeof(Line));
    if (memory_.size() < lines_) memory_.resize(2 * lines_);
    std::memset(at(k), 0, k.bytes);  // between parameters
    for (size_t i = 0; i < types.size(); i++) std::memcpy(at(k) + args_[k.first_arg + i], args[i], types[i].size);
    kernels_.push_back(k);
  }

  bool same_kernels(const Work& other) const {
    return std::equal(kernels_.begin(), kernels_.end(), other.kernels_.begin(), other.kernels_.end(),
                      [](const Kernel& a, const Kernel& b) {
                        return a.func == b.func && a.shape.cluster == b.shape.cluster &&
                               a.shape.early == b.shape.early;  // which no node can change
                      });
  }
  bool same_node(size_t i, Work& other) {
    const Kernel &a = kernels_[i], &b = other.kernels_[i];
    const auto same = [](const dim3& x, const dim3& y) { return x.x == y.x && x.y == y.y && x.z == y.z; };
    return same(a.shape.grid, b.shape.grid) && same(a.shape.block, b.shape.block) && a.shape.smem == b.shape.smem &&
           std::memcmp(at(a), other.at(b), a.bytes) == 0;
  }

  const char* op(size_t i) const { return kernels_[i].op; }
  const LaunchShape& shape(size_t i) const { return kernels_[i].shape; }
  // f(parameters of node i), which are valid until f returns.
  template <class F>
  void with_node(size_t i, F f) {
    const Kernel& k = kernels_[i];
    pointers_.clear();
    for (const size_t offset : std::span(args_).subspan(k.first_arg, k.n_args)) pointers_.push_back(at(k) + offset);
    cudaKernelNodeParams p{};
    p.func = const_cast<void*>(k.func);
    p.gridDim = k.shape.grid;
    p.blockDim = k.shape.block;
    p.sharedMemBytes = static_cast<unsigned>(k.shape.smem);
    p.kernelParams = pointers_.data();
    f(p);
  }

 private:
  struct Kernel {
    const char* op;
    const void* func;
    LaunchShape shape;
    size_t first_arg, n_args;  // in args_
    size_t line, bytes;        // in memory_
  };
  struct alignas(64) Line {  // as a tensor map wants it
    char bytes[64];
  };
  char* at(const Kernel& k) { return memory_[k.line].bytes; }

  std::vector<Kernel> kernels_;
  std::vector<size_t> args_;  // where each lies in the bytes of its kernel
  std::vector<Line> memory_;
  size_t lines_ = 0;  // in use
  std::vector<void*> pointers_;
};

cudaLaunchAttributeValue cluster_of(const LaunchShape& l) { return {.clusterDim = {1, l.cluster, 1}}; }
// `node` comes after `before`: early, once all blocks of that have called await_kernel_before() or have ended.
void follow(cudaGraph_t graph, cudaGraphNode_t before, cudaGraphNode_t node, bool early, const char* op) {
  cudaGraphEdgeData edge{};
  if (early) {
    edge.from_port = cudaGraphKernelNodePortProgrammatic;
    edge.type = cudaGraphDependencyTypeProgrammatic;
  }
#if defined(CUDART_VERSION) && CUDART_VERSION < 13000
  check_cuda(cudaGraphAddDependencies_v2(graph, &before, &node, &edge, 1), op);
#else
  check_cuda(cudaGraphAddDependencies(graph, &before, &node, &edge, 1), op);
#endif
}
void launch_now(const char* op, const void* kernel, const LaunchShape& l, void** args, Stream stream) {
  cudaLaunchConfig_t c{};
  c.gridDim = l.grid;
  c.blockDim = l.block;
  c.dynamicSmemBytes = l.smem;
  cudaLaunchAttribute attributes[2] = {};
  c.attrs = attributes;
  if (l.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[c.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val = cluster_of(l);
  }
  if (l.early && machine().launches_early) {
    cudaLaunchAttribute& early = attributes[c.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  c.stream = static_cast<cudaStream_t>(stream.handle);
  check_cuda(cudaLaunchKernelExC(&c, kernel, args), op);
}

class Cache final : public Graphs {
 public:
  void begin() override { gathers_ = true; }
  void drop() override {
    work_.clear();
    gathers_ = false;
  }
  bool gathers() const { return gathers_; }
  Work& work() { return work_; }

  void one_by_one(Stream stream) {
    if (work_.size() == 0) return;  // before the first kernel all is in order anyway
    gathers_ = false;
    for (size_t i = 0; i < work_.size(); i++)
      work_.with_node(i, [&](const cudaKernelNodeParams& p) {
        launch_now(work_.op(i), p.func, work_.shape(i), p.kernelParams, stream);
      });
    work_.clear();
  }

  bool launch(Stream stream) override {
    const bool all = gathers_;
    if (all && work_.size() > 0) {
      std::unique_ptr<Graph> g = take();
      if (g)
        set(*g);
      else
        g = make();
      if (!g) {
        one_by_one(stream);
        return false;
      }
      check_cuda(cudaGraphLaunch(g->exec, static_cast<cudaStream_t>(stream.handle)), "launch of a graph");
      graphs_.insert(graphs_.begin(), std::move(g));
      if (graphs_.size() > kMost) graphs_.pop_back();
    }
    drop();
    return all;
  }

 private:
  struct Graph {
    cudaGraph_t graph = nullptr;  // names the nodes
    cudaGraphExec_t exec = nullptr;
    std::vector<cudaGraphNode_t> nodes;
    Work work;  // that of the last launch
    ~Graph() {
      if (exec) cudaGraphExecDestroy(exec);
      if (graph) cudaGraphDestroy(graph);
    }
  };
  static constexpr size_t kMost = 8;  // rows in order or not, two or three sizes, greedy or not

  // The graph of these kernels, no longer among the others; null: there is none.
  std::unique_ptr<Graph> take() {
    const auto it =
        std::find_if(graphs_.begin(), graphs_.end(), [&](const auto& g) { return g->work.same_kernels(work_); });
    if (it == graphs_.end()) return nullptr;
    std::unique_ptr<Graph> g = std::move(*it);
    graphs_.erase(it);
    return g;
  }

  // Null: the device has no memory left for it.
  std::unique_ptr<Graph> make() {
    if (full_) return nullptr;
    auto g = std::make_unique<Graph>();
    check_cuda(cudaGraphCreate(&g->graph, 0), "a graph");
    for (size_t i = 0; i < work_.size(); i++)
      work_.with_node(i, [&](const cudaKernelNodeParams& p) {
        cudaGraphNode_t node = nullptr;
        check_cuda(cudaGraphAddKernelNode(&node, g->graph, nullptr, 0, &p), work_.op(i));
        if (i) follow(g->graph, g->nodes.back(), node, work_.shape(i).early && machine().launches_early, work_.op(i));
        const cudaLaunchAttributeValue cluster = cluster_of(work_.shape(i));
        if (work_.shape(i).cluster > 1)
          check_cuda(cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributeClusterDimension, &cluster), work_.op(i));
        g->nodes.push_back(node);
      });
    const cudaError_t e = cudaGraphInstantiate(&g->exec, g->graph, 0);
    if (e == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // clears it
      full_ = true;
      return nullptr;
    }
    check_cuda(e, "a graph");
    std::swap(g->work, work_);
    return g;
  }

  void set(Graph& g) {
    for (size_t i = 0; i < work_.size(); i++)
      if (!work_.same_node(i, g.work))
        work_.with_node(i, [&](const cudaKernelNodeParams& p) {
          check_cuda(cudaGraphExecKernelNodeSetParams(g.exec, g.nodes[i], &p), work_.op(i));
        });
    std::swap(g.work, work_);
  }

  Work work_;
  bool gathers_ = false, full_ = false;
  std::vector<std::unique_ptr<Graph>> graphs_;  // the last that was launched first
};

}  // namespace

void submit(const char* op, const void* kernel, const LaunchShape& l, void** args, std::span<const ParamType> types,
            Stream stream) {
  auto* graphs = static_cast<Cache*>(stream.graphs);
  if (graphs && graphs->gathers())
    graphs->work().add(op, kernel, l, args, types);
  else
    launch_now(op, kernel, l, args, stream);
}

void end_gathering(Stream stream) {
  if (stream.graphs) static_cast<Cache*>(stream.graphs)->one_by_one(stream);
}

// PARE_GRAPHS=0 in the environment: for profilers, to which a graph is one piece of work of no op.
std::unique_ptr<Graphs> make_graphs() {
  const char* set = std::getenv("PARE_GRAPHS");
  if (set && std::strcmp(set, "0") == 0) return nullptr;
  return std::make_unique<Cache>();
}

}  // namespace pare::PARE_CUDA
