// Stand-in for CUDA's cuda_runtime.h in the emulated build: the subset this project uses; it
// grows with the kernels, and the nvcc build keeps the names honest.  Every arithmetic function is correctly rounded or
// the host's; the approximate intrinsics of CUDA have no stand-in, as no kernel uses them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuemu.h"

#define CUEMU 1

// ---- declaration keywords
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#if defined(__SANITIZE_ADDRESS__)
#define CUEMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUEMU_ASAN 1
#endif
#endif
// One block runs at a time, so shared variables are static; kernels of clusters have none.  thread_local puts them in a
// segment whose extent the runtime can find; AddressSanitizer guards only plain statics, so its build does without.
#ifdef CUEMU_ASAN
#define __shared__ static
#else
#define __shared__ static thread_local
#endif
// Marks code of a fiber that is not a kernel; the access checker ignores it.
#define CUEMU_UNCHECKED __attribute__((no_sanitize("thread")))

// ---- built-in types and variables
#define CUEMU_VEC(T, N, A2, A4)                                \
  struct alignas(A2) N##2 {                                    \
    T x, y;                                                    \
  };                                                           \
  struct N##3 {                                                \
    T x, y, z;                                                 \
  };                                                           \
  struct alignas(A4) N##4 {                                    \
    T x, y, z, w;                                              \
  };                                                           \
  inline N##2 make_##N##2(T x, T y) { return {x, y}; }         \
  inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; } \
  inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUEMU_VEC(float, float, 8, 16)
CUEMU_VEC(int, int, 8, 16)
CUEMU_VEC(unsigned, uint, 8, 16)
CUEMU_VEC(unsigned short, ushort, 4, 8)
#undef CUEMU_VEC

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint3 threadIdx, blockIdx;  // the scheduler keeps them up to date
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

// ---- host API
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorLaunchFailure = 719,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
union cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
// Graphs are built node by node; there is no capture.
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
enum { cudaGraphKernelNodePortDefault = 0, cudaGraphKernelNodePortProgrammatic = 1 };
enum { cudaGraphDependencyTypeDefault = 0, cudaGraphDependencyTypeProgrammatic = 1 };
struct cudaGraphEdgeData {
  unsigned char from_port, to_port, type, reserved[5];
};
struct cudaKernelNodeParams {
  void* func;
  dim3 gridDim, blockDim;
  unsigned sharedMemBytes;
  void** kernelParams;
  void** extra;  // null
};

struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  size_t sharedMemPerBlockOptin;
  int major, minor, multiProcessorCount;
};
cudaError_t cudaGetDeviceCount(int*);
// A process has the memory of one device, whatever its number.
cudaError_t cudaSetDevice(int);
cudaError_t cudaGetDevice(int*);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int device);  // those of cuemu::settings().arch
cudaError_t cudaMalloc(void** p, size_t bytes);
cudaError_t cudaFree(void* p);
cudaError_t cudaMallocHost(void** p, size_t bytes);
cudaError_t cudaFreeHost(void* p);
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind);
cudaError_t cudaMemset(void* dst, int value, size_t bytes);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorString(cudaError_t);
template <class T>
cudaError_t cudaMalloc(T** p, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(p), bytes);
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind, cudaStream_t = nullptr);
cudaError_t cudaMemsetAsync(void* dst, int value, size_t bytes, cudaStream_t = nullptr);
cudaError_t cudaStreamCreate(cudaStream_t*);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t*);
cudaError_t cudaEventDestroy(cudaEvent_t);
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* func, void** args);
cudaError_t cudaGraphCreate(cudaGraph_t*, unsigned flags);
cudaError_t cudaGraphDestroy(cudaGraph_t);
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t* after, size_t n_after,
                                   const cudaKernelNodeParams*);
cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t, cudaLaunchAttributeID, const cudaLaunchAttributeValue*);
cudaError_t cudaGraphAddDependencies(cudaGraph_t, const cudaGraphNode_t* from, const cudaGraphNode_t* to,
                                     const cudaGraphEdgeData*, size_t n);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long flags = 0);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t);
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t, cudaGraphNode_t, const cudaKernelNodeParams*);
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t);
cudaError_t cudaFuncSetAttribute(const void* func, cudaFuncAttribute, int bytes);

namespace cuemu {
// A kernel by the name that the host API has for it, its address.  nvcc's programs register their kernels before main;
// here those are known that symbol() has seen.
struct Kernel {
  std::shared_ptr<void> (*call)(const void* func, void** args);  // with copies of the parameters that args point to
  ThreadMain main;
};
const void* know(const void* func, Kernel);  // func

template <class... P>
struct Call {
  void (*kernel)(P...);
  std::tuple<P...> params;
  template <size_t... I>
  Call(const void* func, void** args, std::index_sequence<I...>)
      : kernel(reinterpret_cast<void (*)(P...)>(const_cast<void*>(func))), params(*static_cast<P*>(args[I])...) {}
  template <size_t... I>
  CUEMU_UNCHECKED void call(std::index_sequence<I...>) {
    kernel(std::get<I>(params)...);
  }
  CUEMU_UNCHECKED static void main(void* self) { static_cast<Call*>(self)->call(std::index_sequence_for<P...>()); }
  static std::shared_ptr<void> make(const void* func, void** args) {
    return std::make_shared<Call>(func, args, std::index_sequence_for<P...>());
  }
};
template <class... P>
const void* symbol(void (*kernel)(P...)) {
  return know(reinterpret_cast<const void*>(kernel), {Call<P...>::make, Call<P...>::main});
}
}  // namespace cuemu

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(P...), A&&... args) {
  std::tuple<P...> params(std::forward<A>(args)...);
  return std::apply(
      [&](auto&... p) {
        void* pointers[] = {&p...};
        return cudaLaunchKernelExC(c, cuemu::symbol(kernel), pointers);
      },
      params);
}

// ---- barriers and fences
#define CUEMU_LOC ::cuemu::Loc loc = ::cuemu::Loc::current()

inline void __syncthreads(CUEMU_LOC) { cuemu::block_barrier(0, 0, true, "__syncthreads", loc); }
inline void __syncwarp(unsigned mask = ~0u, CUEMU_LOC) {
  cuemu::warp_collective(mask, cuemu::warp_memory_order, nullptr, "__syncwarp", loc);
}
inline void __threadfence() { cuemu::note_fence(); }

// ---- warp functions
namespace cuemu {
template <class T>
struct ShflArg {
  T v, out;
  int src;
};
template <class T>
CUEMU_UNCHECKED void shfl_run(void** args, uint32_t mask) {
  for (unsigned l = 0; l < kWarp; l++) {
    if (!(mask >> l & 1)) continue;
    auto* a = static_cast<ShflArg<T>*>(args[l]);
    if (!(mask >> a->src & 1))
      fail(lane_loc(l), "shuffle: lane %u reads lane %d, which is not in mask %08x", l, a->src, mask);
    a->out = static_cast<ShflArg<T>*>(args[a->src])->v;
  }
}
template <class T>
T shfl(uint32_t mask, T v, int src, const char* what, Loc loc) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) <= 8));
  ShflArg<T> a{v, v, src};
  warp_collective(mask, shfl_run<T>, &a, what, loc);
  return a.out;
}
struct VoteArg {
  uint32_t v;
  uint32_t out;
};
CUEMU_UNCHECKED inline void ballot_run(void** args, uint32_t mask) {
  uint32_t r = 0;
  for (unsigned l = 0; l < kWarp; l++)
    if (mask >> l & 1) r |= uint32_t{static_cast<VoteArg*>(args[l])->v != 0} << l;
  for (unsigned l = 0; l < kWarp; l++)
    if (mask >> l & 1) static_cast<VoteArg*>(args[l])->out = r;
}
inline uint32_t vote(uint32_t mask, uint32_t v, WarpOp op, const char* what, Loc loc) {
  VoteArg a{v, 0};
  warp_collective(mask, op, &a, what, loc);
  return a.out;
}
}  // namespace cuemu

template <class T>
T __shfl_sync(unsigned mask, T v, int src, int width = 32, CUEMU_LOC) {
  int l = cuemu::lane_id();
  return cuemu::shfl(mask, v, (l & ~(width - 1)) | (src & (width - 1)), "__shfl_sync", loc);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned d, int width = 32, CUEMU_LOC) {
  int l = cuemu::lane_id(), s = l - int(d);
  return cuemu::shfl(mask, v, s < (l & ~(width - 1)) ? l : s, "__shfl_up_sync", loc);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned d, int width = 32, CUEMU_LOC) {
  int l = cuemu::lane_id(), s = l + int(d);
  return cuemu::shfl(mask, v, s > (l | (width - 1)) ? l : s, "__shfl_down_sync", loc);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int x, int width = 32, CUEMU_LOC) {
  int l = cuemu::lane_id(), s = l ^ x;
  return cuemu::shfl(mask, v, s > (l | (width - 1)) ? l : s, "__shfl_xor_sync", loc);
}
inline unsigned __ballot_sync(unsigned mask, int p, CUEMU_LOC) {
  return cuemu::vote(mask, p != 0, cuemu::ballot_run, "__ballot_sync", loc);
}
inline int __any_sync(unsigned mask, int p, CUEMU_LOC) {
  return cuemu::vote(mask, p != 0, cuemu::ballot_run, "__any_sync", loc) != 0;
}
inline int __all_sync(unsigned mask, int p, CUEMU_LOC) {
  return cuemu::vote(mask, p != 0, cuemu::ballot_run, "__all_sync", loc) == mask;
}

// ---- atomics
// One CUDA thread runs at a time and is never preempted inside one, so plain code is atomic.
#define CUEMU_ATOMIC(name, expr)                                       \
  template <class T>                                                   \
  CUEMU_UNCHECKED T name(T* p, std::type_identity_t<T> v, CUEMU_LOC) { \
    cuemu::note_access(p, sizeof(T), true, true, loc);                 \
    T old = *p;                                                        \
    *p = static_cast<T>(expr);                                         \
    return old;                                                        \
  }
CUEMU_ATOMIC(atomicAdd, old + v)
CUEMU_ATOMIC(atomicMax, old < v ? v : old)
CUEMU_ATOMIC(atomicOr, old | v)
CUEMU_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
#undef CUEMU_ATOMIC

// ---- bit casts, arithmetic
namespace cuemu {
template <class To, class From>
To bits(From f) {
  static_assert(sizeof(To) == sizeof(From));
  To t;
  std::memcpy(&t, &f, sizeof t);
  return t;
}
}  // namespace cuemu
inline unsigned __float_as_uint(float f) { return cuemu::bits<unsigned>(f); }
inline float __uint_as_float(unsigned u) { return cuemu::bits<float>(u); }
inline int __float_as_int(float f) { return cuemu::bits<int>(f); }
inline float __int_as_float(int u) { return cuemu::bits<float>(u); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
inline size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }
