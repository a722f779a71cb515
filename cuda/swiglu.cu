// SwiGLU.  y = silu(gate) * up, silu(g) = g s(g), s(g) = 1 / (1 + exp(-g));
// dgate = dy * up * s (1 + g (1 - s)), dup = dy * silu(g).
//
// gate_up, dgate_up [N, 2F]: gate in the first F columns, up in the rest; y, dy [N, F].  Outputs are overwritten;
// dgate_up may be gate_up.
//
// Order: none, since every element stands alone.  Computed in f32, rounded once.
// Bytes: 3 elements per output forward, 5 per dy backward.  Limited by memory bandwidth.
#include "ops/swiglu.h"
#include "runtime/common.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kThreads = 256;

// A thread computes one pack; blockIdx.x is the row.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) fwd(T* __restrict__ y, const T* __restrict__ gate_up, int f) {
  const int i = (blockIdx.y * kThreads + threadIdx.x) * kPack<T>;
  if (i >= f) return;
  const T* gate = gate_up + int64_t{blockIdx.x} * 2 * f + i;
  Pack<T> g = load_pack<kVector>(gate, f - i);
  const Pack<T> u = load_pack<kVector>(gate + f, f - i);
  for (int j = 0; j < kPack<T>; j++) g.v[j] = from_float<T>(swiglu(to_float(g.v[j]), to_float(u.v[j])));
  store_pack<kVector>(y + int64_t{blockIdx.x} * f + i, g, f - i);
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) bwd(T* dgate_up, const T* __restrict__ dy, const T* gate_up, int f) {
  const int i = (blockIdx.y * kThreads + threadIdx.x) * kPack<T>;
  if (i >= f) return;
  const int64_t gate = int64_t{blockIdx.x} * 2 * f + i;
  Pack<T> g = load_pack<kVector>(gate_up + gate, f - i), u = load_pack<kVector>(gate_up + gate + f, f - i);
  const Pack<T> d = load_pack<kVector>(dy + int64_t{blockIdx.x} * f + i, f - i);
  for (int j = 0; j < kPack<T>; j++) {
    const float x = to_float(g.v[j]), s = 1.f / (1.f + exp_f32(-x)), dj = to_float(d.v[j]);
    g.v[j] = from_float<T>(dj * to_float(u.v[j]) * (s * fmaf(x, 1.f - s, 1.f)));
    u.v[j] = from_float<T>(dj * (x * s));
  }
  store_pack<kVector>(dgate_up + gate, g, f - i);
  store_pack<kVector>(dgate_up + gate + f, u, f - i);
}

// Of y or dy.
template <class T>
LaunchShape shape_for(const char* op, const Tensor& y) {
  return {.grid = dim3(blocks(op, y.shape[0], 1), blocks(op, y.shape[1], kThreads * kPack<T>)), .block = kThreads};
}

}  // namespace

void swiglu_fwd(const SwigluFwd& a, Stream stream) {
  const char* op = "swiglu_fwd";
  if (a.y.size() == 0) return;
  with_act(op, a.y, [&](auto type) {
    using T = decltype(type);
    const bool vector = aligned16(a.y, {a.y.shape[1]}) && aligned16(a.gate_up, {});
    launch(op, vector ? fwd<T, true> : fwd<T, false>, shape_for<T>(op, a.y), stream, a.y.as<T>(), a.gate_up.as<T>(),
           a.y.shape[1]);
  });
}

void swiglu_bwd(const SwigluBwd& a, Stream stream) {
  const char* op = "swiglu_bwd";
  if (a.dy.size() == 0) return;
  with_act(op, a.dy, [&](auto type) {
    using T = decltype(type);
    const bool vector = aligned16(a.dy, {a.dy.shape[1]}) && aligned16(a.gate_up, {}) && aligned16(a.dgate_up, {});
    launch(op, vector ? bwd<T, true> : bwd<T, false>, shape_for<T>(op, a.dy), stream, a.dgate_up.as<T>(), a.dy.as<T>(),
           a.gate_up.as<T>(), a.dy.shape[1]);
  });
}

}  // namespace pare::PARE_CUDA
