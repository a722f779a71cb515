// RMSNorm.
#include "ops/norm.h"

#include "cpu/glue.h"

namespace pare::cpu {

void rmsnorm_fwd(const RmsnormFwd& a, Stream) {
  const int64_t rows = a.x.shape[0], width = a.x.shape[1];
  const NormArgs n{.y = a.y.as<float>(),
                   .rstd = a.rstd.as<float>(),
                   .x = a.x.as<float>(),
                   .w = a.w.as<float>(),
                   .y_stride = a.y.stride[0],
                   .x_stride = a.x.stride[0],
                   .width = width,
                   .eps = a.eps};
  const Kernels& k = cpu_kernels();
  parallel(rows, 10 + 0.2 * static_cast<double>(width), [&](Interval r) { k.rmsnorm_fwd(n, r); });
}

void rmsnorm_bwd(const RmsnormBwd& a, Stream) {
  const int64_t rows = a.x.shape[0], width = a.x.shape[1];
  const NormBwdArgs n{.dx = a.dx.as<float>(),
                      .dw = a.dw.as<float>(),
                      .dy = a.dy.as<float>(),
                      .x = a.x.as<float>(),
                      .w = a.w.as<float>(),
                      .rstd = a.rstd.as<float>(),
                      .dx_stride = a.dx.stride[0],
                      .dy_stride = a.dy.stride[0],
                      .x_stride = a.x.stride[0],
                      .rows = rows,
                      .width = width,
                      .accumulate = a.accumulate};
  const Kernels& k = cpu_kernels();
  const double row = 10 + 0.3 * static_cast<double>(width);
  // dw first: dx may lie where dy does
  if (a.dw)
    parallel_shares(width, 16, static_cast<double>(rows) * row / 2,
                    [&](Interval columns) { k.rmsnorm_bwd_weight(n, columns); });
  parallel(rows, row, [&](Interval r) { k.rmsnorm_bwd_input(n, r); });
}

void norm_rows(const RowNorm& norm, const Tensor& x, Stream stream) {
  if (norm.y) rmsnorm_fwd({norm.y, norm.rstd, x, norm.w, norm.eps}, stream);
}

}  // namespace pare::cpu
