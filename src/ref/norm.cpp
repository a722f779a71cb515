// RMSNorm (Zhang & Sennrich 2019).
#include "ops/norm.h"

#include <cmath>

#include "ref/ref.h"

namespace pare::ref {

void rmsnorm_fwd(const RmsnormFwd& a, Stream) {
  const int64_t rows = a.x.shape[0], width = a.x.shape[1];
  dispatch("rmsnorm_fwd", a.x, [&]<class T>(T) {
    const View<T> y(a.y), x(a.x), w(a.w), rstd(a.rstd);
    for (int64_t n = 0; n < rows; n++) {
      double squares = 0;
      for (int64_t c = 0; c < width; c++) squares += double(x(n, c)) * x(n, c);
      const double r = 1 / std::sqrt(squares / width + a.eps);
      rstd(n) = static_cast<T>(r);
      for (int64_t c = 0; c < width; c++) y(n, c) = static_cast<T>(x(n, c) * r * w(c));
    }
  });
}

void rmsnorm_bwd(const RmsnormBwd& a, Stream) {
  const int64_t rows = a.x.shape[0], width = a.x.shape[1];
  dispatch("rmsnorm_bwd", a.x, [&]<class T>(T) {
    const View<T> dx(a.dx), dw(a.dw), dy(a.dy), x(a.x), w(a.w), rstd(a.rstd);
    // dw before dx: dx may overwrite dy.
    for (int64_t c = 0; a.dw && c < width; c++) {
      double sum = dw(c);
      for (int64_t n = 0; n < rows; n++) sum += double(dy(n, c)) * x(n, c) * rstd(n);
      dw(c) = static_cast<T>(sum);
    }
    for (int64_t n = 0; n < rows; n++) {
      const double r = rstd(n);
      double mean = 0;
      for (int64_t c = 0; c < width; c++) mean += double(dy(n, c)) * w(c) * x(n, c) * r / width;
      for (int64_t c = 0; c < width; c++) {
        const double d = r * (double(dy(n, c)) * w(c) - x(n, c) * r * mean);
        dx(n, c) = static_cast<T>(a.accumulate ? dx(n, c) + d : d);
      }
    }
  });
}

void norm_rows(const RowNorm& norm, const Tensor& x, Stream stream) {
  if (norm.y) rmsnorm_fwd({norm.y, norm.rstd, x, norm.w, norm.eps}, stream);
}

}  // namespace pare::ref
