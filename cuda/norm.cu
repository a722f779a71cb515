// RMSNorm.  rstd = 1 / sqrt(mean(x^2) + eps), y = (x * rstd) * w; with xh = x * rstd:
// dx = rstd * (dy*w - xh * mean(dy*w*xh)), dw += sum over rows of dy*xh.
//
// x, y, dy, dx [N, C], any stride between rows; y may be x, dx may be dy.  y, rstd and dx are overwritten (dx is added
// to if `accumulate`), dw, which may be absent, is added to.  Sums are in f32.
//
//   row of a warp, in 16-byte packs   | lane 0 | lane 1 | ... | lane 31 | lane 0 | lane 1 | ...
//
// Forward, a warp keeps the first 256 packs of its row in registers.  Backward, it computes a strand of rows: one row
// arrives in shared memory while it computes the one before, and the sums of dw stay there.  A lane reads only its own
// copies, so it waits for no others.
//
// Order: lane l takes packs l, l + 32, ... as one chain, then the tree of warp_sum: a row's bits depend on C only.  dw
// in bf16: row r belongs to strand r % 1024, and a strand is a chain over its rows ascending from +0; strands 8g to
// 8g + 7 are added up in order, the first as it is, the 128 sums of g in order from +0, and that once to dw.  dw in
// f32: the same with strands r % 128, each its own g.  The bits are the same in every run, but not for another split
// into micro-batches.
//
// Bytes: forward 2, backward 3 (or 4) streams of N * C, and the sums of strands twice.  Limited by memory bandwidth.
#include "norm.cuh"
#include "ops/norm.h"
#include "ptx.cuh"
#include "runtime/common.cuh"
#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kWarps = 4;      // rows of a block, forward
constexpr int kMostWarps = 8;  // of a block, backward
constexpr int kColumns = 8, kGroups = 128;

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
  await_kernel_before();
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  norm_row<T, kVector>(y.at(row), rstd + row, x.at(row), w, x.c, eps);
}

// Shared memory of a warp, backward: sums of dw, then two stages of rows of dy, of x and, if it adds to dx, of dx.
template <class T>
struct Strand {
  float* sums;
  int padded;  // columns, to whole packs of a warp
  bool adds, sums_dw;
  __host__ __device__ Strand(int c, bool adds, bool sums_dw)
      : sums(nullptr), padded(round_up(c, 32 * kPack<T>)), adds(adds), sums_dw(sums_dw) {}
  __host__ __device__ int bytes() const {
    return padded * static_cast<int>((sums_dw ? sizeof(float) : 0) + 2 * (adds ? 3 : 2) * sizeof(T));
  }
  __device__ T* row(int stage, int stream) const {
    return reinterpret_cast<T*>(sums + (sums_dw ? padded : 0)) + (stage * (adds ? 3 : 2) + stream) * padded;
  }
  // Returns the sums of columns i + j to i + j + 3, where neighbouring lanes have neighbouring words.
  __device__ Pack<float>& four(int i, int j) const {
    const int lane = threadIdx.x % 32;
    return *reinterpret_cast<Pack<float>*>(sums + i - lane * kPack<T> + j * 32 + lane * 4);
  }
};

template <bool kVector, class T>
__device__ __forceinline__ void fetch_pack(T* to, const T* from, int left) {
  if constexpr (kVector)
    cp_async_16(to, from, 16);
  else
    store_pack<true>(to, load_pack<false>(from, left), kPack<T>);
}

// A warp a strand: rows r, r + strands, ...  parts [strands, C], or null: the sums of dw.
template <class T, bool kVector>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    bwd(Rows<T> dx, float* __restrict__ parts, Rows<const T> dy, Rows<const T> x, const T* __restrict__ w,
        const float* __restrict__ rstd, int64_t rows, int64_t strands, bool accumulate) {
  constexpr int kStep = 32 * kPack<T>;
  const int warp = threadIdx.x / 32, first = threadIdx.x % 32 * kPack<T>, c = x.c;
  const int64_t strand = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  if (strand >= strands) return;
  Strand<T> s(c, accumulate, parts != nullptr);
  s.sums = reinterpret_cast<float*>(dynamic_smem<char>() + warp * s.bytes());
  for (int i = first; parts && i < c; i += kStep)
    for (int j = 0; j < kPack<T>; j += 4) s.four(i, j) = {};
  const auto fetch = [&](int stage, int64_t row) {
    for (int i = first; row < rows && i < c; i += kStep) {
      fetch_pack<kVector>(s.row(stage, 0) + i, dy.at(row) + i, c - i);
      fetch_pack<kVector>(s.row(stage, 1) + i, x.at(row) + i, c - i);
      if (accumulate) fetch_pack<kVector>(s.row(stage, 2) + i, static_cast<const T*>(dx.at(row)) + i, c - i);
    }
    cp_async_commit();
  };
  fetch(0, strand);
  int stage = 0;
  for (int64_t row = strand; row < rows; row += strands, stage ^= 1) {
    fetch(stage ^ 1, row + strands);
    const float r = rstd[row];
    const T *gr = s.row(stage, 0), *xr = s.row(stage, 1), *old = s.row(stage, 2);
    T* dr = dx.at(row);
    cp_async_wait<1>();
    float dot = 0;
#pragma unroll 2
    for (int i = first; i < c; i += kStep) {
      const Pack<T> g = load_pack<true>(gr + i, kPack<T>), p = load_pack<true>(xr + i, kPack<T>),
                    q = load_pack<kVector>(w + i, c - i);
      for (int j = 0; j < kPack<T>; j++) dot = fmaf(to_float(g.v[j]) * to_float(q.v[j]), to_float(p.v[j]) * r, dot);
    }
    const float mean = warp_sum(dot) / static_cast<float>(c);
#pragma unroll 1  // unrolled, nvcc 13 stores in pieces
    for (int i = first; i < c; i += kStep) {
      Pack<T> d, before{};
      const Pack<T> g = load_pack<true>(gr + i, kPack<T>), p = load_pack<true>(xr + i, kPack<T>),
                    q = load_pack<kVector>(w + i, c - i);
      if (accumulate) before = load_pack<true>(old + i, kPack<T>);
      for (int j = 0; parts && j < kPack<T>; j += 4) {
        Pack<float> sum = s.four(i, j);
        for (int e = 0; e < 4; e++) sum.v[e] = fmaf(to_float(g.v[j + e]), to_float(p.v[j + e]) * r, sum.v[e]);
        s.four(i, j) = sum;
      }
      for (int j = 0; j < kPack<T>; j++) {
        const float there = accumulate ? to_float(before.v[j]) : -0.f;  // -0 + d is d, also where that is -0
        d.v[j] = from_float<T>(there + r * (to_float(g.v[j]) * to_float(q.v[j]) - to_float(p.v[j]) * r * mean));
      }
      if constexpr (kVector)  // as one word, or nvcc 13 stores elements
        *reinterpret_cast<uint4*>(dr + i) = __builtin_bit_cast(uint4, d);
      else
        store_pack<false>(dr + i, d, c - i);
    }
  }
  for (int i = first; parts && i < c; i += kStep)
    for (int j = 0; j < kPack<T>; j += 4)
      store_pack<kVector>(parts + strand * c + i + j, s.four(i, j), int64_t{c} - i - j);
}

// Adds parts to dw: threadIdx.x is a column, threadIdx.y a group of kTogether strands.
template <int kTogether>
__global__ void __launch_bounds__(kColumns* kGroups)
    add_strands(float* __restrict__ dw, const float* __restrict__ parts, int64_t strands, int c) {
  __shared__ float groups[kGroups][kColumns];
  const int column = blockIdx.x * kColumns + threadIdx.x, first = threadIdx.y * kTogether;
  float sum = 0;
  if (column < c) {
#pragma unroll
    for (int s = 0; s < kTogether; s++)
      if (first + s < strands) {
        const float strand = parts[int64_t{first + s} * c + column];
        sum = s == 0 ? strand : sum + strand;
      }
  }
  groups[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= c) return;
  float total = 0;
  for (int g = 0; g < kGroups; g++) total += groups[g][threadIdx.x];
  dw[column] += total;
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
    launch(op, vector ? fwd<T, true> : fwd<T, false>,
           {.grid = blocks(op, rows, kWarps), .block = 32 * kWarps, .early = true}, stream, y, a.rstd.as<float>(), x,
           a.w.as<T>(), rows, a.eps);
  });
}

void rmsnorm_bwd(const RmsnormBwd& a, Stream stream) {
  const char* op = "rmsnorm_bwd";
  const int64_t rows = a.x.shape[0], c = a.x.shape[1];
  if (rows == 0) return;
  with_act(op, a.x, [&](auto type) {
    using T = decltype(type);
    constexpr int kTogether = sizeof(T) == 2 ? 8 : 1;
    const auto dx = rows_of<T, T>(a.dx);
    const auto dy = rows_of<T, const T>(a.dy);
    const auto x = rows_of<T, const T>(a.x);
    const bool vector = aligned16(a.dx, {dx.stride, c}) && aligned16(a.dy, {dy.stride, c}) &&
                        aligned16(a.x, {x.stride, c}) && aligned16(a.w, {}) && (!a.dw || aligned16(a.parts, {}));
    const int64_t strands = norm_strands(rows, a.x.dtype);
    const auto bytes = static_cast<size_t>(Strand<T>(x.c, a.accumulate, !!a.dw).bytes());
    const size_t room = machine().shared_memory;
    expect(bytes <= room, op, ": rows of ", c, " columns need more shared memory than a block has");
    unsigned warps = sizeof(T) == 2 ? kMostWarps : 1;
    while (warps * bytes > room) warps /= 2;
    launch(op, vector ? bwd<T, true> : bwd<T, false>,
           {.grid = blocks(op, strands, warps), .block = 32 * warps, .smem = warps * bytes}, stream, dx,
           a.dw ? a.parts.as<float>() : nullptr, dy, x, a.w.as<T>(), a.rstd.as<float>(), rows, strands, a.accumulate);
    if (a.dw)
      launch(op, add_strands<kTogether>, {.grid = blocks(op, c, kColumns), .block = dim3(kColumns, kGroups)}, stream,
             a.dw.as<float>(), a.parts.as<float>(), strands, c);
  });
}

void norm_rows(const RowNorm& norm, const Tensor& x, Stream stream) {
  if (norm.y) rmsnorm_fwd({norm.y, norm.rstd, x, norm.w, norm.eps}, stream);
}

}  // namespace pare::PARE_CUDA
