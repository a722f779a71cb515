// RMSNorm (Zhang & Sennrich 2019).
#include <cmath>

#include "ref/ref.h"

namespace pare::ref {

// [N, C] seen as [N, 1, C]; [N, h, C] as it is.
static Tensor with_heads(const char* op, const char* name, const Tensor& t) {
  expect(t.rank == 2 || t.rank == 3, "ref: ", op, ": ", name, " is ", t.str(), ", expected [N, C] or [N, h, C]");
  return t.rank == 2 ? t.heads(1) : t;
}

void rmsnorm_fwd(const RmsnormFwd& a, Stream) {
  const Tensor ty = with_heads("rmsnorm_fwd", "y", a.y), tx = with_heads("rmsnorm_fwd", "x", a.x);
  const int64_t rows = tx.shape[0], heads = tx.shape[1], width = tx.shape[2];
  expect_shape("rmsnorm_fwd", "y", ty, {rows, heads, width});
  expect_dense("rmsnorm_fwd", "rstd", a.rstd, {rows * heads});
  expect_dense("rmsnorm_fwd", "w", a.w, {width});
  dispatch("rmsnorm_fwd", a.x, [&]<class T>(T) {
    const View<T> y(ty), x(tx), w(a.w), rstd(a.rstd);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t h = 0; h < heads; h++) {
        double squares = 0;
        for (int64_t c = 0; c < width; c++) squares += double(x(n, h, c)) * x(n, h, c);
        const double r = 1 / std::sqrt(squares / width + a.eps);
        rstd(n * heads + h) = static_cast<T>(r);
        for (int64_t c = 0; c < width; c++) y(n, h, c) = static_cast<T>(x(n, h, c) * r * w(c));
      }
  });
}

void rmsnorm_bwd(const RmsnormBwd& a, Stream) {
  const Tensor tdx = with_heads("rmsnorm_bwd", "dx", a.dx), tdy = with_heads("rmsnorm_bwd", "dy", a.dy),
               tx = with_heads("rmsnorm_bwd", "x", a.x);
  const int64_t rows = tx.shape[0], heads = tx.shape[1], width = tx.shape[2];
  expect_shape("rmsnorm_bwd", "dx", tdx, {rows, heads, width});
  expect_shape("rmsnorm_bwd", "dy", tdy, {rows, heads, width});
  expect_dense("rmsnorm_bwd", "rstd", a.rstd, {rows * heads});
  expect_dense("rmsnorm_bwd", "w", a.w, {width});
  expect_dense("rmsnorm_bwd", "dw", a.dw, {width});
  dispatch("rmsnorm_bwd", a.x, [&]<class T>(T) {
    const View<T> dx(tdx), dw(a.dw), dy(tdy), x(tx), w(a.w), rstd(a.rstd);
    // dw before dx: dx may overwrite dy.
    for (int64_t c = 0; c < width; c++) {
      double sum = dw(c);
      for (int64_t n = 0; n < rows; n++)
        for (int64_t h = 0; h < heads; h++) sum += double(dy(n, h, c)) * x(n, h, c) * rstd(n * heads + h);
      dw(c) = static_cast<T>(sum);
    }
    for (int64_t n = 0; n < rows; n++)
      for (int64_t h = 0; h < heads; h++) {
        const double r = rstd(n * heads + h);
        double mean = 0;
        for (int64_t c = 0; c < width; c++) mean += double(dy(n, h, c)) * w(c) * x(n, h, c) * r / width;
        for (int64_t c = 0; c < width; c++) {
          const double d = r * (double(dy(n, h, c)) * w(c) - x(n, h, c) * r * mean);
          dx(n, h, c) = static_cast<T>(a.accumulate ? dx(n, h, c) + d : d);
        }
      }
  });
}

}  // namespace pare::ref
