// Global norm and AdamW (ops/optimizer.h states the formulas).
//
// AdamW: p [n] act, or the panels of a weight; m, v f32 or bf16, grad and master f32 [n] or [O, I]; m, v and master (p,
// without one) are updated in place, p is then the master's rounding.  Every element stands alone.  Bytes an element:
// 20 + 2 act-size, with a master 28 + act-size, with bf16 moments 8 less; limited by memory bandwidth, and that of p in
// panels by its scattered accesses.
// Norm: sqrt of the sum of squares, overwritten.  Order: blocks of 4096 elements, each a row sum of 16 lanes, blocks
// added ascending in double.  Two kernels: the sums of the blocks, 4 bytes an element and limited by memory bandwidth;
// their sum, by one thread, which takes a few nanoseconds for each.
#include <cmath>

#include "common.cuh"
#include "rng.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16, kElements = 4096;  // of a sum

// sums[i]: that of the squares of block i of x.
__global__ void __launch_bounds__(kThreads)
    sums_of_squares(float* __restrict__ sums, const float* __restrict__ x, int64_t n) {
  const int64_t block = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes, begin = block * kElements;
  const int lane = threadIdx.x % kLanes;
  float sum = 0;
  if (begin + kElements <= n) {
#pragma unroll 16  // loads that are under way
    for (int i = 0; i < kElements; i += kLanes) sum = fmaf(x[begin + i + lane], x[begin + i + lane], sum);
  } else {
    for (int64_t i = begin + lane; i < n; i += kLanes) sum = fmaf(x[i], x[i], sum);
  }
  for (int o = kLanes / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
  if (lane == 0 && begin < n) sums[block] = sum;
}

// One block: thread 0 adds what all bring.
__global__ void __launch_bounds__(kThreads)
    norm_of_sums(float* __restrict__ norm, const float* __restrict__ sums, int64_t n) {
  constexpr int kMany = 16 * kThreads;
  __shared__ float some[kMany];
  double total = 0;
  for (int64_t first = 0; first < n; first += kMany) {
#pragma unroll
    for (int i = 0; i < kMany; i += kThreads) {
      const int64_t at = first + i + threadIdx.x;
      some[i + threadIdx.x] = at < n ? sums[at] : 0.f;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 16
      for (int i = 0; i < kMany; i++) total += some[i];  // +0 behind the last
    }
    __syncthreads();  // before they are overwritten
  }
  if (threadIdx.x == 0) *norm = static_cast<float>(sqrt(total));
}

struct Step {
  float max_norm, lr, beta1, beta2, eps, weight_decay, c1, c2;
  uint64_t key;           // of the rounding to bf16
  int64_t first, inputs;  // inputs 0: p is a row
};

__device__ __forceinline__ void keep(float* to, float x, uint32_t) { *to = x; }
__device__ __forceinline__ void keep(bf16* to, float x, uint32_t random) {
  *to = __ushort_as_bfloat16(static_cast<unsigned short>((__float_as_uint(x) + (random & 0xffffu)) >> 16));
}
__device__ __forceinline__ uint32_t rounding_word(uint64_t element, uint64_t key) {
  const uint4 w = philox({static_cast<uint32_t>(element) / 4, static_cast<uint32_t>(element >> 32), 0, 0}, key);
  return word_of(w, static_cast<int>(element % 4));
}

template <class T, class M>
__global__ void __launch_bounds__(kThreads)
    step(T* __restrict__ p, float* __restrict__ master, M* __restrict__ m, M* __restrict__ v,
         const float* __restrict__ grad, const float* __restrict__ norm, int64_t n, Step s) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const float scale = s.max_norm > 0 && *norm > s.max_norm ? s.max_norm / *norm : 1.f, g = grad[i] * scale;
  T& w = p[s.inputs ? weight_place(i / s.inputs, i % s.inputs, s.inputs) : i];
  const float old = master ? master[i] : to_float(w);
  const float m1 = fmaf(s.beta1, to_float(m[i]), (1.f - s.beta1) * g),
              v1 = fmaf(s.beta2, to_float(v[i]), (1.f - s.beta2) * (g * g));
  const float move = m1 * s.c1 / (sqrtf(v1 * s.c2) + s.eps);
  const uint32_t word = sizeof(M) == 2 ? rounding_word(static_cast<uint64_t>(s.first + i), s.key) : 0;
  keep(m + i, m1, word), keep(v + i, v1, word >> 16);
  const float now = fmaf(-s.lr, fmaf(s.weight_decay, old, move), old);
  if (master) master[i] = now;
  w = from_float<T>(now);
}

}  // namespace

void global_norm(const GlobalNorm& a, Stream stream) {
  const char* op = "global_norm";
  const int64_t n = a.x.size(), sums = norm_blocks(n);
  if (n > 0)
    launch(op, sums_of_squares, {.grid = blocks(op, sums, kThreads / kLanes), .block = kThreads}, stream,
           a.sums.as<float>(), a.x.as<float>(), n);
  launch(op, norm_of_sums, {.grid = 1, .block = kThreads}, stream, a.norm.as<float>(), a.sums.as<float>(), sums);
}

void adamw(const AdamW& a, Stream stream) {
  const char* op = "adamw";
  const int64_t n = a.grad.size();
  const bool of_weight = a.p.rank == 3;
  if (n == 0) return;
  const double t = static_cast<double>(a.step);
  const Step s{.max_norm = a.max_norm,
               .lr = a.lr,
               .beta1 = a.beta1,
               .beta2 = a.beta2,
               .eps = a.eps,
               .weight_decay = a.weight_decay,
               .c1 = static_cast<float>(1 / (1 - std::pow(static_cast<double>(a.beta1), t))),
               .c2 = static_cast<float>(1 / (1 - std::pow(static_cast<double>(a.beta2), t))),
               .key = a.key,
               .first = a.first,
               .inputs = of_weight ? a.grad.shape[1] : 0};
  with_act(op, a.p, [&](auto type) {
    with_act(op, a.m, [&](auto moment) {
      using T = decltype(type);
      using M = decltype(moment);
      launch(op, step<T, M>, {.grid = blocks(op, n, kThreads), .block = kThreads}, stream, a.p.as<T>(),
             a.master ? a.master.as<float>() : nullptr, a.m.as<M>(), a.v.as<M>(), a.grad.as<float>(),
             a.norm.as<float>(), n, s);
    });
  });
}

}  // namespace pare::PARE_CUDA
