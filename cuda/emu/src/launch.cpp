// Launches: of a kernel, and of a graph of kernels.
//
// A graph is launched as it then is: what is changed later concerns later launches only.  Nodes run one after another,
// those added last first, unless they must follow others: a dependency that is missing shows.
#include <algorithm>
#include <unordered_map>

#include "internal.h"

struct CUgraphNode_st {
  cuemu::Grid grid;
  cuemu::ThreadMain main;
  std::shared_ptr<void> call;
  std::vector<size_t> after;  // numbers of nodes of the graph
};
struct CUgraph_st {
  std::vector<std::shared_ptr<CUgraphNode_st>> nodes;
};
struct CUgraphExec_st {
  std::vector<std::weak_ptr<CUgraphNode_st>> names;  // the nodes of the graph it was made of
  std::vector<CUgraphNode_st> nodes;
};

namespace cuemu {

Calls g_calls;
const Calls& calls() { return g_calls; }

namespace {

std::unordered_map<const void*, Kernel>& kernels() {
  static auto& all = *new std::unordered_map<const void*, Kernel>;
  return all;
}

Grid grid_of(const dim3& grid, const dim3& block, size_t smem) {
  return {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, smem, 1, false};
}
// Blocks of a cluster are neighbours in y; an attribute that is not emulated leaves a grid that cannot be launched.
void set_attribute(Grid& grid, cudaLaunchAttributeID id, const cudaLaunchAttributeValue& v) {
  if (id == cudaLaunchAttributeProgrammaticStreamSerialization)
    grid.early = v.programmaticStreamSerializationAllowed;
  else
    grid.cluster =
        id == cudaLaunchAttributeClusterDimension && v.clusterDim.x == 1 && v.clusterDim.z == 1 ? v.clusterDim.y : 0;
}

// Bytes of dynamic shared memory that a launch of a kernel may take.  A device lets it have 48 KiB together with the
// static variables, whose size is not known here; no kernel has more than 32 KiB of those.
constexpr size_t kUnasked = 16 * 1024;
std::unordered_map<const void*, size_t> g_allowed;
bool allows(const void* func, size_t smem) {
  const auto it = g_allowed.find(func);
  return smem <= (it == g_allowed.end() ? kUnasked : it->second);
}

// All of a node but what it follows.
cudaError_t set(CUgraphNode_st& node, const cudaKernelNodeParams* p) {
  if (!p || !p->kernelParams || p->extra) return cudaErrorInvalidValue;
  const Kernel* kernel = find_kernel(p->func);
  if (!kernel) return cudaErrorInvalidDeviceFunction;
  Grid grid = grid_of(p->gridDim, p->blockDim, p->sharedMemBytes);
  grid.cluster = node.grid.cluster;
  grid.early = node.grid.early;
  if (!can_launch(grid) || !allows(p->func, grid.smem)) return cudaErrorInvalidValue;
  node.grid = grid;
  node.main = kernel->main;
  node.call = kernel->call(p->func, p->kernelParams);
  return cudaSuccess;
}

void run_graph(const std::vector<CUgraphNode_st>& nodes) {
  std::vector<size_t> waits(nodes.size()), ready;
  std::vector<std::vector<size_t>> before(nodes.size());
  for (size_t i = 0; i < nodes.size(); i++) {
    waits[i] = nodes[i].after.size();
    if (waits[i] == 0) ready.push_back(i);
    for (const size_t other : nodes[i].after) before[other].push_back(i);
  }
  while (!ready.empty()) {
    const size_t node = ready.back();
    ready.pop_back();
    run_grid(nodes[node].grid, nodes[node].main, nodes[node].call.get());
    for (const size_t next : before[node])
      if (--waits[next] == 0) ready.push_back(next);
    std::sort(ready.begin(), ready.end());
  }
}

}  // namespace

const void* know(const void* func, Kernel kernel) {
  kernels().try_emplace(func, kernel);
  return func;
}
const Kernel* find_kernel(const void* func) {
  const auto it = kernels().find(func);
  return it == kernels().end() ? nullptr : &it->second;
}

}  // namespace cuemu

using cuemu::g_calls;

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* func, void** args) {
  if (cuemu::g_thread) cuemu::fail({}, "a kernel launched from a kernel");
  if (cuemu::g_error) return cuemu::g_error;
  const cuemu::Kernel* kernel = cuemu::find_kernel(func);
  if (!kernel) return cuemu::g_error = cudaErrorInvalidDeviceFunction;
  cuemu::Grid grid = cuemu::grid_of(c->gridDim, c->blockDim, c->dynamicSmemBytes);
  for (unsigned i = 0; i < c->numAttrs; i++) cuemu::set_attribute(grid, c->attrs[i].id, c->attrs[i].val);
  if (!can_launch(grid) || !cuemu::allows(func, grid.smem)) return cuemu::g_error = cudaErrorInvalidConfiguration;
  g_calls.launches++;
  cuemu::queue(c->stream, [grid, main = kernel->main, call = kernel->call(func, args)] {
    cuemu::run_grid(grid, main, call.get());
  });
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* func, cudaFuncAttribute, int bytes) {
  if (!cuemu::find_kernel(func)) return cudaErrorInvalidDeviceFunction;
  if (bytes < 0 || static_cast<size_t>(bytes) > cuemu::shared_memory_limit()) return cudaErrorInvalidValue;
  cuemu::g_allowed[func] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned flags) {
  if (!graph || flags) return cudaErrorInvalidValue;
  *graph = new CUgraph_st;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after,
                                   size_t n_after, const cudaKernelNodeParams* params) {
  if (!node || !graph || (n_after && !after)) return cudaErrorInvalidValue;
  auto made = std::make_shared<CUgraphNode_st>();
  made->grid = {{}, {}, 0, 1, false};
  for (size_t i = 0; i < n_after; i++) {
    const auto it =
        std::find_if(graph->nodes.begin(), graph->nodes.end(), [&](const auto& n) { return n.get() == after[i]; });
    if (it == graph->nodes.end()) return cudaErrorInvalidValue;
    made->after.push_back(static_cast<size_t>(it - graph->nodes.begin()));
  }
  if (const cudaError_t e = cuemu::set(*made, params)) return e;
  *node = made.get();
  graph->nodes.push_back(std::move(made));
  return cudaSuccess;
}

cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t node, cudaLaunchAttributeID id,
                                            const cudaLaunchAttributeValue* value) {
  if (!node || !value) return cudaErrorInvalidValue;
  cuemu::Grid grid = node->grid;
  cuemu::set_attribute(grid, id, *value);
  if (!can_launch(grid)) return cudaErrorInvalidValue;
  node->grid = grid;
  return cudaSuccess;
}

// From a kernel's end, or, where the edge is programmatic, from some time after its begin.
cudaError_t cudaGraphAddDependencies(cudaGraph_t graph, const cudaGraphNode_t* from, const cudaGraphNode_t* to,
                                     const cudaGraphEdgeData* edges, size_t n) {
  if (!graph || !from || !to) return cudaErrorInvalidValue;
  const auto find = [&](cudaGraphNode_t node) {
    return std::find_if(graph->nodes.begin(), graph->nodes.end(), [&](const auto& x) { return x.get() == node; });
  };
  for (size_t i = 0; i < n; i++) {
    const auto a = find(from[i]), b = find(to[i]);
    if (a == graph->nodes.end() || b == graph->nodes.end()) return cudaErrorInvalidValue;
    const cudaGraphEdgeData edge = edges ? edges[i] : cudaGraphEdgeData{};
    const bool early = edge.type == cudaGraphDependencyTypeProgrammatic;
    if (edge.to_port || early != (edge.from_port == cudaGraphKernelNodePortProgrammatic)) return cudaErrorInvalidValue;
    (*b)->after.push_back(static_cast<size_t>(a - graph->nodes.begin()));
    (*b)->grid.early |= early;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  if (!exec || !graph || flags) return cudaErrorInvalidValue;
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  if (free == 0) return cudaErrorMemoryAllocation;  // it takes a little of the device's
  *exec = new CUgraphExec_st;
  for (const auto& node : graph->nodes) {
    (*exec)->names.push_back(node);
    (*exec)->nodes.push_back(*node);
  }
  g_calls.graphs_made++;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

// `node` is of the graph that `exec` was made of, which must still be there.
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* params) {
  if (!exec || !node) return cudaErrorInvalidValue;
  const auto it =
      std::find_if(exec->names.begin(), exec->names.end(), [&](const auto& n) { return n.lock().get() == node; });
  if (it == exec->names.end()) return cudaErrorInvalidValue;
  g_calls.nodes_set++;
  return cuemu::set(exec->nodes[static_cast<size_t>(it - exec->names.begin())], params);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (!exec) return cudaErrorInvalidValue;
  if (cuemu::g_error) return cuemu::g_error;
  g_calls.graph_launches++;
  g_calls.graph_nodes += exec->nodes.size();
  cuemu::queue(stream, [nodes = exec->nodes] { cuemu::run_graph(nodes); });
  return cudaSuccess;
}
