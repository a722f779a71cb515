// RMSNorm of a row by a warp (norm.cu, which states the order), for kernels of more than that.
#pragma once
#include "ops/linear.h"
#include "runtime/common.cuh"

namespace pare::PARE_CUDA {

constexpr int kHeld = 8;  // packs of a row that a lane keeps in registers

// Calls f(k, i) for each pack of this lane in a row of c: that from i on is number k, if k is less than kHeld.
template <class T, class F>
__device__ __forceinline__ void for_packs(int c, F f) {
  const int first = threadIdx.x % 32 * kPack<T>;
#pragma unroll
  for (int k = 0; k < kHeld; k++)
    if (const int i = first + k * 32 * kPack<T>; i < c) f(k, i);
  for (int i = first + kHeld * 32 * kPack<T>; i < c; i += 32 * kPack<T>) f(kHeld, i);
}

// A lane's share of a row: kHeld packs in registers; the rest is read again.
template <class T, bool kVector>
struct Row {
  Pack<T> held[kHeld];
  const T* row;
  int c;
  __device__ __forceinline__ void load(const T* from, int columns) {
    row = from;
    c = columns;
    for_packs<T>(c, [&](int k, int i) {
      if (k < kHeld) held[k] = load_pack<kVector>(row + i, c - i);
    });
  }
  __device__ __forceinline__ Pack<T> pack(int k, int i) const {
    return k < kHeld ? held[k] : load_pack<kVector>(row + i, c - i);
  }
};

template <class T, bool kVector>
__device__ __forceinline__ void norm_row(T* y, float* rstd, const T* x, const T* __restrict__ w, int c, float eps) {
  Row<T, kVector> xr;
  xr.load(x, c);
  float sum = 0;
  for_packs<T>(c, [&](int k, int i) {
    const Pack<T> p = xr.pack(k, i);
    for (int j = 0; j < kPack<T>; j++) sum = fmaf(to_float(p.v[j]), to_float(p.v[j]), sum);
  });
  const float r = 1.f / sqrtf(warp_sum(sum) / static_cast<float>(c) + eps);
  if (threadIdx.x % 32 == 0) *rstd = r;
  for_packs<T>(c, [&](int k, int i) {
    Pack<T> p = xr.pack(k, i);
    const Pack<T> q = load_pack<kVector>(w + i, c - i);
    for (int j = 0; j < kPack<T>; j++) p.v[j] = from_float<T>(to_float(p.v[j]) * r * to_float(q.v[j]));
    store_pack<kVector>(y + i, p, c - i);
  });
}

// RowNorm, for rows of aligned packs.
template <class T>
struct NormOfRows {
  T* y;
  float* rstd;
  const T* w;
  int64_t stride;
  float eps;
  NormOfRows() = default;
  explicit NormOfRows(const RowNorm& a)
      : y(a.y.as<T>()), rstd(a.rstd.as<float>()), w(a.w.as<T>()), stride(a.y.stride[0]), eps(a.eps) {}
  // Norms x [c] to row number `row`, by a warp.
  __device__ __forceinline__ void operator()(int64_t row, const T* x, int c) const {
    norm_row<T, true>(y + row * stride, rstd + row, x, w, c, eps);
  }
};
// Returns true if x [N, C], contiguous or of rows with a stride, and its norm are of aligned packs.
inline bool norm_suits(const RowNorm& a, const Tensor& x) {
  return aligned16(x, {x.stride[0], x.shape[1]}) && aligned16(a.y, {a.y.stride[0]}) && aligned16(a.w, {});
}

}  // namespace pare::PARE_CUDA
