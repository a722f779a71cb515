// RMSNorm.  rstd = 1 / sqrt(mean(x^2) + eps), y = (x * rstd) * w; with xh = x * rstd:
// dx = rstd * (dy*w - xh * mean(dy*w*xh)), dw += sum over rows of dy*xh.
//
// x, y, dy, dx [N, C], any stride between rows; y may be x, dx may be dy.  y, rstd and dx are overwritten (dx is added
// to if `accumulate`), dw, which may be absent, is added to.  Sums are in f32.
// Order: one warp a row, lane l takes 16-byte packs l, l + 32, ... as one chain, then the tree of warp_sum: a row's
// bits depend on C only.  dw in bf16: row r belongs to strand r % 1024, and a strand is a chain over its rows ascending
// from +0; strands 8g to 8g + 7 are added up in order, the first as it is, the 128 sums of g in order from +0, and that
// once to dw.  dw in f32: the same with strands r % 128, each its own g.  The bits are the same in every run, but not
// for another split into micro-batches.
// Bytes: forward 2 passes over a row, of which the second hits the cache: 2 * act * N * C.  Backward 3 + 2 streams of
// N * C.  Limited by memory bandwidth; dw by latency where C is small (C / 32 blocks in bf16).
#include "common.cuh"
#include "ops/norm.h"

namespace pare::PARE_CUDA {

namespace {

constexpr int kWarps = 4;                 // rows of a block
constexpr int kPacks = 4, kGroups = 128;  // of dw: a block owns so many packs of columns, and groups of strands

template <class T>
struct Rows {
  T* data;
  int64_t stride;
  int c;
  __device__ T* at(int64_t r) const { return data + r * stride; }
};

template <class T, bool kVector>
__global__ void __launch_bounds__(32 * kWarps)
    fwd(Rows<T> y, float* __restrict__ rstd, Rows<const T> x, const T* __restrict__ w, int64_t rows, float eps) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32, c = x.c;
  const T* xr = x.at(row);
  T* yr = y.at(row);
  float sum = 0;
  for (int i = lane * kPack<T>; i < c; i += 32 * kPack<T>) {
    const Pack<T> p = load_pack<kVector>(xr + i, c - i);
    for (int j = 0; j < kPack<T>; j++) sum = fmaf(to_float(p.v[j]), to_float(p.v[j]), sum);
  }
  const float r = 1.f / sqrtf(warp_sum(sum) / static_cast<float>(c) + eps);
  if (lane == 0) rstd[row] = r;
  for (int i = lane * kPack<T>; i < c; i += 32 * kPack<T>) {
    Pack<T> p = load_pack<kVector>(xr + i, c - i);
    const Pack<T> q = load_pack<kVector>(w + i, c - i);
    for (int j = 0; j < kPack<T>; j++) p.v[j] = from_float<T>(to_float(p.v[j]) * r * to_float(q.v[j]));
    store_pack<kVector>(yr + i, p, c - i);
  }
}

template <class T, bool kVector>
__global__ void __launch_bounds__(32 * kWarps)
    bwd_input(Rows<T> dx, Rows<const T> dy, Rows<const T> x, const T* __restrict__ w, const float* __restrict__ rstd,
              int64_t rows, bool accumulate) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32, c = x.c;
  const T *gr = dy.at(row), *xr = x.at(row);
  T* dr = dx.at(row);
  const float r = rstd[row];
  float dot = 0;
  for (int i = lane * kPack<T>; i < c; i += 32 * kPack<T>) {
    const Pack<T> g = load_pack<kVector>(gr + i, c - i), p = load_pack<kVector>(xr + i, c - i),
                  q = load_pack<kVector>(w + i, c - i);
    for (int j = 0; j < kPack<T>; j++) dot = fmaf(to_float(g.v[j]) * to_float(q.v[j]), to_float(p.v[j]) * r, dot);
  }
  const float mean = warp_sum(dot) / static_cast<float>(c);
  for (int i = lane * kPack<T>; i < c; i += 32 * kPack<T>) {
    Pack<T> g = load_pack<kVector>(gr + i, c - i);
    const Pack<T> p = load_pack<kVector>(xr + i, c - i), q = load_pack<kVector>(w + i, c - i);
    Pack<T> old{};
    if (accumulate) old = load_pack<kVector>(static_cast<const T*>(dr + i), c - i);
    for (int j = 0; j < kPack<T>; j++) {
      const float d = r * (to_float(g.v[j]) * to_float(q.v[j]) - to_float(p.v[j]) * r * mean);
      g.v[j] = from_float<T>(accumulate ? to_float(old.v[j]) + d : d);
    }
    store_pack<kVector>(dr + i, g, c - i);
  }
}

// A thread adds up the strands of a group, whose rows are neighbours.
template <class T, bool kVector>
__global__ void __launch_bounds__(kPacks* kGroups) bwd_weight(float* __restrict__ dw, Rows<const T> dy, Rows<const T> x,
                                                              const float* __restrict__ rstd, int64_t rows) {
  constexpr int kColumns = kPacks * kPack<T>, kStrands = sizeof(T) == 2 ? 8 : 1;  // of a group
  __shared__ float part[kGroups][kColumns];
  const int group = threadIdx.y, i = blockIdx.x * kColumns + threadIdx.x * kPack<T>, c = x.c;
  float sum[kStrands][kPack<T>] = {};
  if (i < c)
    for (int64_t first = group * kStrands; first < rows; first += kGroups * kStrands)
#pragma unroll
      for (int s = 0; s < kStrands; s++)
        if (const int64_t row = first + s; row < rows) {
          const Pack<T> g = load_pack<kVector>(dy.at(row) + i, c - i), p = load_pack<kVector>(x.at(row) + i, c - i);
          const float r = rstd[row];
          for (int j = 0; j < kPack<T>; j++) sum[s][j] = fmaf(to_float(g.v[j]), to_float(p.v[j]) * r, sum[s][j]);
        }
  for (int j = 0; j < kPack<T>; j++) {
#pragma unroll
    for (int s = 1; s < kStrands; s++) sum[0][j] += sum[s][j];
    part[group][threadIdx.x * kPack<T> + j] = sum[0][j];
  }
  __syncthreads();
  const int column = group * kPacks + threadIdx.x, to = blockIdx.x * kColumns + column;
  if (column >= kColumns || to >= c) return;
  float total = 0;
  for (int g = 0; g < kGroups; g++) total += part[g][column];
  dw[to] += total;
}

template <class T, class U>
Rows<U> rows_of(const Tensor& t) {
  return {static_cast<U*>(t.as<T>()), t.stride[0], static_cast<int>(t.shape[1])};
}

}  // namespace

void rmsnorm_fwd(const RmsnormFwd& a, Stream stream) {
  const char* op = "rmsnorm_fwd";
  const int64_t rows = a.x.shape[0];
  if (rows == 0) return;
  with_act(op, a.x, [&](auto type) {
    using T = decltype(type);
    const auto y = rows_of<T, T>(a.y);
    const auto x = rows_of<T, const T>(a.x);
    const bool vector = aligned16(a.y, {y.stride, y.c}) && aligned16(a.x, {x.stride, x.c}) && aligned16(a.w, {});
    launch(op, vector ? fwd<T, true> : fwd<T, false>, {.grid = blocks(op, rows, kWarps), .block = 32 * kWarps}, stream,
           y, a.rstd.as<float>(), x, a.w.as<T>(), rows, a.eps);
  });
}

void rmsnorm_bwd(const RmsnormBwd& a, Stream stream) {
  const char* op = "rmsnorm_bwd";
  const int64_t rows = a.x.shape[0], c = a.x.shape[1];
  if (rows == 0) return;
  with_act(op, a.x, [&](auto type) {
    using T = decltype(type);
    const auto dx = rows_of<T, T>(a.dx);
    const auto dy = rows_of<T, const T>(a.dy);
    const auto x = rows_of<T, const T>(a.x);
    const bool vector = aligned16(a.dx, {dx.stride, c}) && aligned16(a.dy, {dy.stride, c}) &&
                        aligned16(a.x, {x.stride, c}) && aligned16(a.w, {});
    // First, because dx may overwrite dy.
    if (a.dw)
      launch(op, vector ? bwd_weight<T, true> : bwd_weight<T, false>,
             {.grid = blocks(op, c, kPacks * kPack<T>), .block = dim3(kPacks, kGroups)}, stream, a.dw.as<float>(), dy,
             x, a.rstd.as<float>(), rows);
    launch(op, vector ? bwd_input<T, true> : bwd_input<T, false>,
           {.grid = blocks(op, rows, kWarps), .block = 32 * kWarps}, stream, dx, dy, x, a.w.as<T>(), a.rstd.as<float>(),
           rows, a.accumulate);
  });
}

}  // namespace pare::PARE_CUDA
