// Sums of squares and AdamW (ops/optimizer.h states the formulas).
//
// AdamW: p [n] act, or the panels of a weight; m, v f32 or bf16, grad and master f32 [n] or [O, I]; m, v and master (p,
// without one) are updated in place, p is then the master's rounding.  A thread takes four neighbours, by words of 16
// bytes (of bf16: 8) if rows are aligned to them.  Of a weight, 16 threads side by side take the outputs of a panel:
//
//   grad, m, v, master [O][I]    thread t: row 16 p + t, four inputs      a word of 16 bytes each
//   p, panel p [I][16]           input i: | t 0 | t 1 | ... | t 15 |      a whole sector each
//
// Squares: blocks of at most 4096 elements, each a row sum of 16 lanes.
//
// Order: AdamW has none, since every element stands alone; a block of squares is list.h's row sum.
// Bytes: AdamW 20 + 2 act-size an element, with a master 28 + act-size, with bf16 moments 8 less; squares 4.  Limited
// by memory bandwidth.
#include <cmath>

#include "linear.cuh"
#include "rng.cuh"
#include "runtime/common.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16;  // of a sum

// Computes sums[i], the sum of squares of block i of x.
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
  uint64_t key;  // of the rounding to bf16
  int64_t first, outputs, inputs;
  bool panels, vector;  // p lies in panels, else it is one row; fours of every row are aligned
};

constexpr int kTile = kThreads / kPanel * 4;  // inputs of a panel that a block updates

template <class T>
struct alignas(4 * sizeof(T)) Vec4 {
  T v[4];
};
template <class T>
__device__ __forceinline__ Vec4<T> load_four(const T* from, int count, bool vector) {
  if (vector && count == 4) return *reinterpret_cast<const Vec4<T>*>(from);
  Vec4<T> x{};
  for (int j = 0; j < 4; j++)
    if (j < count) x.v[j] = from[j];
  return x;
}
template <class T>
__device__ __forceinline__ void store_four(T* to, const Vec4<T>& x, int count, bool vector) {
  if (vector && count == 4) {
    *reinterpret_cast<Vec4<T>*>(to) = x;
    return;
  }
  for (int j = 0; j < 4; j++)
    if (j < count) to[j] = x.v[j];
}

__device__ __forceinline__ void keep(float& to, float x, uint32_t) { to = x; }
__device__ __forceinline__ void keep(bf16& to, float x, uint32_t random) {
  to = __ushort_as_bfloat16(static_cast<unsigned short>((__float_as_uint(x) + (random & 0xffffu)) >> 16));
}
__device__ __forceinline__ uint4 rounding_words(uint64_t element, uint64_t key) {  // of it and its three neighbours
  return philox({static_cast<uint32_t>(element) / 4, static_cast<uint32_t>(element >> 32), 0, 0}, key);
}

template <class T, class M>
__global__ void __launch_bounds__(kThreads)
    step(T* __restrict__ p, float* __restrict__ master, M* __restrict__ m, M* __restrict__ v,
         const float* __restrict__ grad, const float* __restrict__ norm, Step s) {
  int64_t o = 0, i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * 4;
  if (s.panels) {
    const auto tiles = static_cast<unsigned>(ceil_div(s.inputs, kTile));
    o = int64_t{blockIdx.x / tiles} * kPanel + threadIdx.x % kPanel;
    i = int64_t{blockIdx.x % tiles} * kTile + threadIdx.x / kPanel * 4;
  }
  if (o >= s.outputs || i >= s.inputs) return;
  const int count = s.inputs - i < 4 ? static_cast<int>(s.inputs - i) : 4;
  const int64_t at = o * s.inputs + i;
  const auto place = [&](int j) { return place_of_weight<T>(o, i + j, s.inputs); };
  const float scale = s.max_norm > 0 && *norm > s.max_norm ? s.max_norm / *norm : 1.f;
  const Vec4<float> g4 = load_four(grad + at, count, s.vector);
  Vec4<M> m4 = load_four(m + at, count, s.vector), v4 = load_four(v + at, count, s.vector);
  Vec4<float> now{};
  Vec4<T> p4{};
  if (master) {
    now = load_four(master + at, count, s.vector);
  } else {
    if (!s.panels) p4 = load_four(p + at, count, s.vector);
    for (int j = 0; j < 4; j++) now.v[j] = to_float(s.panels && j < count ? p[place(j)] : p4.v[j]);
  }
  const auto element = static_cast<uint64_t>(s.first + at);
  const int shift = static_cast<int>(element % 4);
  uint4 words{}, behind{};
  if (sizeof(M) == 2) {
    words = rounding_words(element, s.key);
    if (shift > 0) behind = rounding_words(element + 3, s.key);
  }
  for (int j = 0; j < 4; j++) {
    const float g = g4.v[j] * scale, old = now.v[j];
    const float m1 = fmaf(s.beta1, to_float(m4.v[j]), (1.f - s.beta1) * g),
                v1 = fmaf(s.beta2, to_float(v4.v[j]), (1.f - s.beta2) * (g * g));
    const float move = m1 * s.c1 / (sqrtf(v1 * s.c2) + s.eps);
    const uint32_t word = word_of(shift + j < 4 ? words : behind, (shift + j) % 4);
    keep(m4.v[j], m1, word);
    keep(v4.v[j], v1, word >> 16);
    now.v[j] = fmaf(-s.lr, fmaf(s.weight_decay, old, move), old);
    p4.v[j] = from_float<T>(now.v[j]);
  }
  store_four(m + at, m4, count, s.vector);
  store_four(v + at, v4, count, s.vector);
  if (master) store_four(master + at, now, count, s.vector);
  if (!s.panels) {
    store_four(p + at, p4, count, s.vector);
    return;
  }
  for (int j = 0; j < 4; j++)
    if (j < count) p[place(j)] = p4.v[j];
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
  const bool panels = a.p.rank == 3;
  const int64_t outputs = panels ? a.grad.shape[0] : 1, inputs = panels ? a.grad.shape[1] : n;
  if (n == 0) return;
  const double t = static_cast<double>(a.step);
  Step s{.max_norm = a.max_norm,
         .lr = a.lr,
         .beta1 = a.beta1,
         .beta2 = a.beta2,
         .eps = a.eps,
         .weight_decay = a.weight_decay,
         .c1 = static_cast<float>(1 / (1 - std::pow(static_cast<double>(a.beta1), t))),
         .c2 = static_cast<float>(1 / (1 - std::pow(static_cast<double>(a.beta2), t))),
         .key = a.key,
         .first = a.first,
         .outputs = outputs,
         .inputs = inputs,
         .panels = panels,
         .vector = false};
  with_act(op, a.p, [&](auto type) {
    with_act(op, a.m, [&](auto moment) {
      using T = decltype(type);
      using M = decltype(moment);
      const auto aligned = [&](const Tensor& x) {
        return reinterpret_cast<uintptr_t>(x.data) % (4 * dtype_size(x.dtype)) == 0;
      };
      s.vector = (outputs == 1 || inputs % 4 == 0) && aligned(a.m) && aligned(a.v) && aligned(a.grad) &&
                 (panels || aligned(a.p)) && (!a.master || aligned(a.master));
      const unsigned grid =
          panels ? blocks(op, weight_panels(outputs) * ceil_div(inputs, kTile), 1) : blocks(op, inputs, 4 * kThreads);
      launch(op, step<T, M>, {.grid = grid, .block = kThreads}, stream, a.p.as<T>(),
             a.master ? a.master.as<float>() : nullptr, a.m.as<M>(), a.v.as<M>(), a.grad.as<float>(),
             a.norm.as<float>(), s);
    });
  });
}

}  // namespace pare::PARE_CUDA
