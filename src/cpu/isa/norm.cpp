// RMSNorm, one row at a time or 16.
#include "cpu/isa/norm.h"

#include "cpu/kernels.h"

namespace pare::PARE_ISA {

void rmsnorm_fwd(const NormArgs& a, Interval rows) {
  // 16 rows at a time share their divisions and roots.
  for (int64_t first = rows.begin; first < rows.end; first += 16) {
    const int64_t n = min64(16, rows.end - first);
    const float* const x0 = a.x + first * a.x_stride;
    alignas(64) float rstd[16];
    const vf squares = sums(
        n, [&](int i) __attribute__((always_inline)) { return row_squares(x0 + i * a.x_stride, a.width); });
    store(rstd, inverse_rms(squares, a.width, a.eps));
    store(a.rstd + first, load(rstd), n);
    for (int64_t i = 0; i < n; i++) {
      const float* const x = x0 + i * a.x_stride;
      float* const y = a.y + (first + i) * a.y_stride;
      const vf s = set1(rstd[i]);
      for_vectors(
          a.width, PARE_LANES_AT(c) { store(y + c, mul(mul(load(x + c, lanes), s), load(a.w + c, lanes)), lanes); });
    }
  }
}

void rmsnorm_bwd_input(const NormBwdArgs& a, Interval rows) {
  const vf width = set1(static_cast<float>(a.width));
  // 16 rows at a time share their divisions, and none waits for its own sum.
  for (int64_t first = rows.begin; first < rows.end; first += 16) {
    const int64_t n = min64(16, rows.end - first);
    const float *const x0 = a.x + first * a.x_stride, *const dy0 = a.dy + first * a.dy_stride;
    alignas(64) float mean[16];
    const vf products = sums(
        n, [&](int r) __attribute__((always_inline)) {
          const float *const x = x0 + r * a.x_stride, *const dy = dy0 + r * a.dy_stride;
          const vf s = set1(a.rstd[first + r]);
          vf acc = zero();
          for_vectors(
              a.width, PARE_LANES_AT(i) {
                acc = fma(mul(load(dy + i, lanes), load(a.w + i, lanes)), mul(load(x + i, lanes), s), acc);
              });
          return acc;
        });
    store(mean, div(products, width));
    for (int64_t r = 0; r < n; r++) {
      const float *const x = x0 + r * a.x_stride, *const dy = dy0 + r * a.dy_stride;
      float* const dx = a.dx + (first + r) * a.dx_stride;
      const vf s = set1(a.rstd[first + r]), m = set1(mean[r]);
      for_vectors(
          a.width, PARE_LANES_AT(i) {
            const vf xh = mul(load(x + i, lanes), s), dyw = mul(load(dy + i, lanes), load(a.w + i, lanes));
            vf d = mul(s, fnma(xh, m, dyw));
            if (a.accumulate) d = add(load(dx + i, lanes), d);
            store(dx + i, d, lanes);
          });
    }
  }
}

namespace {
// Columns [c, c + 16 kVectors) of dw, side by side so that no chain waits for another; the last vector has `lanes`.
template <int kVectors>
PARE_INLINE void weight_columns(const NormBwdArgs& a, int64_t c, int64_t lanes) {
  const auto in = [&](int j) __attribute__((always_inline)) { return j + 1 < kVectors ? 16 : lanes; };
  vf acc[kVectors];
  PARE_UNROLL
  for (int j = 0; j < kVectors; j++) acc[j] = load(a.dw + c + j * 16, in(j));
  for (int64_t r = 0; r < a.rows; r++) {
    const float *x = a.x + r * a.x_stride + c, *dy = a.dy + r * a.dy_stride + c;
    const vf s = set1(a.rstd[r]);
    PARE_UNROLL
    for (int j = 0; j < kVectors; j++) acc[j] = fma(load(dy + j * 16, in(j)), mul(load(x + j * 16, in(j)), s), acc[j]);
  }
  PARE_UNROLL
  for (int j = 0; j < kVectors; j++) store(a.dw + c + j * 16, acc[j], in(j));
}
}  // namespace

void rmsnorm_bwd_weight(const NormBwdArgs& a, Interval columns) {
  int64_t c = columns.begin;
  for (; c + 64 <= columns.end; c += 64) weight_columns<4>(a, c, 16);
  for (; c + 32 <= columns.end; c += 32) weight_columns<2>(a, c, 16);
  for (; c < columns.end; c += 16) weight_columns<1>(a, c, min64(16, columns.end - c));
}

}  // namespace pare::PARE_ISA
