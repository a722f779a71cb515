// Code that every .cu file uses: the namespace of the table, element types, launching, small device functions.
//
// The same sources give two tables: nvcc compiles pare::cuda (table_cuda), g++ or clang with the headers of emu/include
// in front pare::emu (table_emu).  Both are compiled without contraction of a * b + c, and kernels use no approximate
// function: fmaf is written where it is meant.  So a kernel without tensor-core instructions or libm calls gives the
// same bits on the device and in the emulation.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/list.h"

#ifdef CUEMU
#define PARE_CUDA emu
#else
#define PARE_CUDA cuda
#endif

#include "math.cuh"
#ifndef CUEMU
#include "runtime/watchdog.h"
#endif

namespace pare {
template <>
inline constexpr DType dtype_of<__nv_bfloat16> = DType::bf16;
}  // namespace pare

namespace pare::PARE_CUDA {

using bf16 = __nv_bfloat16;

// The launchers; each check throws std::logic_error naming op, field and value.
#define X(op, Args) void op(const Args&, Stream);
PARE_OPS(X)
#undef X

// ---- host
struct LaunchShape {
  dim3 grid, block;
  size_t smem = 0;       // dynamic shared memory, bytes
  unsigned cluster = 1;  // blocks of a cluster, neighbours in y; more only on compute capability 9.0
  bool early = false;    // the kernel calls await_kernel_before(): it may begin before the one before it has ended
};

inline void check_cuda(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::string message = cudaGetErrorString(e);
  cudaGetLastError();  // clears it
#ifndef CUEMU
  if (const std::string why = lost_arrival_report(); !why.empty()) message += "; " + why;
#endif
  throw Error(Exit::failed, cat(what, ": ", message));
}

#ifdef CUEMU
using cuemu::symbol;
#else
// The address by which the host API knows a kernel.
template <class... P>
const void* symbol(void (*kernel)(P...)) {
  return reinterpret_cast<const void*>(kernel);
}
#endif

// So that equal parameters have equal bytes; clang before 20 cannot do it.
template <class T>
void clear_padding([[maybe_unused]] T& x) {
#if __has_builtin(__builtin_clear_padding)
  __builtin_clear_padding(&x);
#endif
}

#ifndef CUEMU
// A kernel of each .cu file, by which open() finds the others.
std::vector<const void*>& source_files();  // machine.cu
namespace {
__global__ void of_this_file() {}
[[maybe_unused]] const bool listed = (source_files().push_back(symbol(of_this_file)), true);
}  // namespace
#endif

struct ParamType {
  size_t size, align;
};
// machine.cu.  A launch of the kernel may take so much dynamic shared memory from now on: also one that was gathered
// before, as this is only ever raised.
void allow_shared_memory(const char* op, const void* kernel, size_t bytes);
// graph.cu.  Launches a kernel, whose parameters `args` point to; where the stream has Graphs it is gathered instead.
void submit(const char* op, const void* kernel, const LaunchShape&, void** args, std::span<const ParamType>, Stream);
// Called before anything else is queued: launches the gathered kernels, and gathers none of those that follow.
void end_gathering(Stream);

// Dynamic shared memory that a launch may take without asking: 48 KiB less the static variables, which are 32 KiB at
// most (tools/registers.py).
constexpr size_t kSmemUnasked = 16 * 1024;

// kernel<<<grid, block, smem, stream>>>(args...) as a function that a host compiler can parse: the arguments are
// converted to the kernel's parameter types, errors are thrown, and more than kSmemUnasked is asked for.
template <class... P, class... A>
void launch(const char* op, void (*kernel)(P...), const LaunchShape& l, Stream stream, A&&... args) {
  if (l.smem > kSmemUnasked) allow_shared_memory(op, symbol(kernel), l.smem);
  static constexpr ParamType types[] = {{sizeof(P), alignof(P)}...};
  std::tuple<P...> params(static_cast<P>(std::forward<A>(args))...);
  std::apply(
      [&](P&... p) {
        (clear_padding(p), ...);
        void* pointers[] = {&p...};
        submit(op, symbol(kernel), l, pointers, types, stream);
      },
      params);
}

// f(T{}) with T the element type of an `act` tensor.
template <class F>
void with_act(const char* op, const Tensor& act, F f) {
  expect(act.dtype == DType::bf16 || act.dtype == DType::f32, op, ": act is bf16 or f32, not ", act.str());
  act.dtype == DType::bf16 ? f(bf16{}) : f(float{});
}

template <class N>
__host__ __device__ constexpr N ceil_div(N n, std::type_identity_t<N> per) {
  return (n + per - 1) / per;
}
// The next multiple of `per`.
template <class N>
__host__ __device__ constexpr N round_up(N n, std::type_identity_t<N> per) {
  return ceil_div(n, per) * per;
}

// Returns the number of blocks of `per` items that cover n; an Error if a grid has no room for them.
inline unsigned blocks(const char* op, int64_t n, int64_t per) {
  const int64_t count = ceil_div(n, per);
  expect(count <= 0x7fffffff, op, ": ", n, " items are more than one launch covers");
  return static_cast<unsigned>(count);
}

// Throws unless kernels of attention and of caches have room for such heads.
inline void expect_heads(const char* op, int64_t head_dim, int64_t heads) {
  expect(head_dim >= 1 && head_dim <= 256, op, ": head_dim ", head_dim, " is not in [1, 256]");
  expect(heads <= 65535, op, ": ", heads, " heads are more than one launch covers");
}

inline bool is_shape(const Tensor& t, std::initializer_list<int64_t> shape) {
  if (t.rank != static_cast<int>(shape.size())) return false;
  int i = 0;
  for (int64_t n : shape)
    if (t.shape[i++] != n) return false;
  return true;
}

// May elements be moved 16 bytes at a time?  `strides`: distances (in elements) at which rows begin.
inline bool aligned16(const Tensor& t, std::initializer_list<int64_t> strides) {
  const int64_t size = static_cast<int64_t>(dtype_size(t.dtype));
  bool ok = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (int64_t s : strides) ok = ok && s * size % 16 == 0;
  return ok;
}

// ---- device
constexpr unsigned kAllLanes = 0xffffffffu;

template <class T>
__device__ __forceinline__ T* dynamic_smem() {
#ifdef CUEMU
  return static_cast<T*>(cuemu::dynamic_smem());
#else
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  return reinterpret_cast<T*>(smem_bytes);
#endif
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 2)
    return __float2bfloat16(x);
  else
    return x;
}

// Waits until the kernel before has ended, and lets the next begin.  A kernel that is launched `early` must call this
// before it uses device memory.  It must not read results of the kernel before through a __restrict__ pointer to const,
// which the compiler takes for memory that does not change while the kernel runs, and may read earlier.
__device__ __forceinline__ void await_kernel_before() {
#ifdef CUEMU
  if (cuemu::settings().arch >= 90) cuemu::await_kernel_before(cuemu::Loc::current());
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// *to = *from; the emulation's access checker allows unwritten words, and remembers them in *to.
__device__ __forceinline__ void copy_word(uint32_t* to, const uint32_t* from) {
#ifdef CUEMU
  cuemu::copy_as_is(to, from, sizeof(*to), cuemu::Loc::current());
#else
  *to = *from;
#endif
}

// In every lane: the sum by the tree ((v0 + v16) + (v8 + v24)) ..., and the maximum.
__device__ __forceinline__ float warp_sum(float v) {
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(kAllLanes, v, o);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
  for (int o = 16; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, o));
  return v;
}

// `count` blocks call this after stores that others read.  Returns true in the last to arrive, whose threads then see
// the stores of every block.  Called by all threads of a block; *arrivals is 0 before and afterwards.  `last`:
// in shared memory.
__device__ __forceinline__ bool is_last_to_arrive(unsigned* arrivals, unsigned count, bool& last) {
  __threadfence();  // the stores come before the arrival
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicInc(arrivals, count - 1) == count - 1;  // the last one sets it back to 0
    __threadfence();                                     // and the arrival before the reads that follow
  }
  __syncthreads();
  return last;
}

// Larger for larger x; -0 is +0.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t u = __float_as_uint(x == 0 ? 0.f : x);
  return u >> 31 ? ~u : u | 0x80000000u;
}

// kPack<T> elements: 16 bytes.
template <class T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));
template <class T>
struct alignas(16) Pack {
  T v[kPack<T>];
};

// Element i of p for i in [0, min(n, kPack)), then zeros.  kVector: p is 16-byte aligned and n a multiple of kPack.
template <bool kVector, class T>
__device__ __forceinline__ Pack<T> load_pack(const T* p, int64_t n) {
  Pack<T> r;
  if constexpr (kVector) {
    r = *reinterpret_cast<const Pack<T>*>(p);
  } else {
    for (int i = 0; i < kPack<T>; i++) r.v[i] = i < n ? p[i] : from_float<T>(0.f);
  }
  return r;
}
template <bool kVector, class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T>& x, int64_t n) {
  if constexpr (kVector) {
    *reinterpret_cast<Pack<T>*>(p) = x;
  } else {
    for (int i = 0; i < kPack<T>; i++)
      if (i < n) p[i] = x.v[i];
  }
}

}  // namespace pare::PARE_CUDA
