// Sums of squares and AdamW (ops/optimizer.h states the formulas).
//
// AdamW: p [n] act, or the panels of a weight; m, v f32 or bf16, grad and master f32 [n] or [O, I]; m, v and master (p,
// without one) are updated in place, p is then the master's rounding.  Every element stands alone.  Bytes an element:
// 20 + 2 act-size, with a master 28 + act-size, with bf16 moments 8 less; limited by memory bandwidth, and that of p in
// panels by its scattered accesses.
// Squares: sums of blocks of at most 4096 elements, each a row sum of 16 lanes; 4 bytes an element, limited by memory
// bandwidth.
#include <cmath>

#include "common.cuh"
#include "linear.cuh"
#include "rng.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16;  // of a sum

// sums[i]: that of the squares of block i of x.
__global__ void __launch_bounds__(kThreads)
    sums_of_squares(float* __restrict__ sums, const float* __restrict__ x, int64_t n, int64_t run, int64_t blocks) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes;
  float sum = 0;
  if (i < blocks) {
    const SquareSums::Block b = SquareSums::block(i, n, run);
    if (b.end - b.begin == kNormBlock) {
#pragma unroll 16  // loads that are under way
      for (int64_t k = 0; k < kNormBlock; k += kLanes) sum = fmaf(x[b.begin + k + lane], x[b.begin + k + lane], sum);
    } else {
      for (int64_t k = b.begin + lane; k < b.end; k += kLanes) sum = fmaf(x[k], x[k], sum);
    }
  }
  for (int o = kLanes / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
  if (lane == 0 && i < blocks) sums[i] = sum;
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
  T& w = p[s.inputs ? place_of_weight<T>(i / s.inputs, i % s.inputs, s.inputs) : i];
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

void square_sums(const SquareSums& a, Stream stream) {
  const char* op = "square_sums";
  const int64_t sums = a.sums.size();
  if (sums == 0) return;
  launch(op, sums_of_squares, {.grid = blocks(op, sums, kThreads / kLanes), .block = kThreads}, stream,
         a.sums.as<float>(), a.x.as<float>(), a.x.size(), a.run, sums);
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
