// The tables of the kernels.
#include <algorithm>

#include "linear.cuh"
#include "runtime/machine.cuh"
#ifndef CUEMU
#include <nvtx3/nvToolsExt.h>  // headers only; does nothing unless a profiler has started the program

#include "runtime/probe.cuh"
#endif

namespace pare {

namespace PARE_CUDA {

std::unique_ptr<Graphs> make_graphs();       // graph.cu
void expect_head_dim(DType act, int64_t d);  // paged.cu

namespace {

// ---- memory
void* take(size_t bytes) {
  void* p = nullptr;
  if (cudaMalloc(&p, bytes) == cudaSuccess) return p;
  cudaGetLastError();  // clears it
  return nullptr;
}
void give(void* p, size_t) { cudaFree(p); }
// Memory left to CUDA, which takes it as the work goes on, for graphs, local variables of kernels and libraries.
constexpr size_t kLeft = size_t{512} << 20;
template <bool kFree>
size_t bytes() {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "memory of the device");
  return kFree ? free - std::min(free, kLeft) : total;
}
constexpr Memory device_memory = {.take = take, .give = give, .free = bytes<true>, .total = bytes<false>};

void* take_host(size_t bytes) {
  void* p = nullptr;
  if (cudaMallocHost(&p, bytes) == cudaSuccess) return p;
  cudaGetLastError();
  return nullptr;
}
void give_host(void* p, size_t) { cudaFreeHost(p); }
constexpr Memory page_locked = {.take = take_host, .give = give_host, .free = machine_memory, .total = machine_memory};

#ifndef CUEMU
// ---- profilers
void range_begin(const char* name) { nvtxRangePushA(name); }
void range_end() { nvtxRangePop(); }
#endif

// The table with the kernels of this folder ...
constexpr Table exact(const char* name) {
  return {.name = name,
#define X(op, Args) .op = PARE_CUDA::op,
          PARE_OPS(X)
#undef X
              .memory = &device_memory,
          .staging = &page_locked,
          .graphs = make_graphs,
          .open = open,
          .describe = describe,
          .expect_head_dim = expect_head_dim,
#ifndef CUEMU
          .range_begin = range_begin,
          .range_end = range_end,
          .probe = &probe
#endif
  };
}

// ... and with the linear layers of cuBLASLt, and weights as it reads them.
constexpr Table with_cublas_lt(const char* name) {
  Table t = exact(name);
  t.pack_weight = fast::pack_weight;
  t.unpack_weight = fast::unpack_weight;
  t.embedding_fwd = fast::embedding_fwd;
  t.linear_fwd = fast::linear_fwd;
  t.kv_write = fast::kv_write;
  t.linear_bwd_input = fast::linear_bwd_input;
  t.linear_bwd_weight = fast::linear_bwd_weight;
  t.adamw = fast::adamw;
  t.open = [](Comm& comm, DeviceComm by) {
    fast::find_library();
    open(comm, by);
  };
  t.describe = [] { return cat(describe(), ", linear layers by ", fast::open_library()); };
  return t;
}

}  // namespace

}  // namespace PARE_CUDA

#ifdef CUEMU
constinit const Table table_emu = emu::exact("emu"), table_emu_fast = emu::with_cublas_lt("emu_fast");
#else
constinit const Table table_cuda = cuda::exact("cuda"), table_cuda_fast = cuda::with_cublas_lt("cuda_fast");
#endif

}  // namespace pare
