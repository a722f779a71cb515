// Sums of squares and AdamW.
#include "ops/optimizer.h"

#include <cmath>

#include "cpu/glue.h"

namespace pare::cpu {

void square_sums(const SquareSums& a, Stream) {
  float* const sums = a.sums.as<float>();
  const float* const x = a.x.as<float>();
  const Kernels& k = cpu_kernels();
  parallel(a.sums.size(), 400, [&](Interval r) {
    for (int64_t b = r.begin; b < r.end; b++) {
      const auto [begin, end] = SquareSums::block(b, a.x.size(), a.run);
      sums[b] = k.sum_squares(x + begin, end - begin);
    }
  });
}

void adamw(const AdamW& a, Stream) {
  expect(!a.master, "cpu: adamw: a master beside f32 parameters");
  const bool of_weight = a.p.rank == 3, bf16 = a.m.dtype == DType::bf16;
  const int64_t rows = of_weight ? a.grad.shape[0] : 1, width = of_weight ? a.grad.shape[1] : a.grad.shape[0];
  const float norm = *a.norm.as<float>();
  const double step = static_cast<double>(a.step);
  const AdamWArgs args{.p = a.p.as<float>(),
                       .m = bf16 ? nullptr : a.m.as<float>(),
                       .v = bf16 ? nullptr : a.v.as<float>(),
                       .m_bf16 = bf16 ? static_cast<uint16_t*>(a.m.data) : nullptr,
                       .v_bf16 = bf16 ? static_cast<uint16_t*>(a.v.data) : nullptr,
                       .grad = a.grad.as<float>(),
                       .scale = a.max_norm > 0 && norm > a.max_norm ? a.max_norm / norm : 1,
                       .lr = a.lr,
                       .beta1 = a.beta1,
                       .beta2 = a.beta2,
                       .eps = a.eps,
                       .weight_decay = a.weight_decay,
                       .c1 = static_cast<float>(1 / (1 - std::pow(static_cast<double>(a.beta1), step))),
                       .c2 = static_cast<float>(1 / (1 - std::pow(static_cast<double>(a.beta2), step))),
                       .key = a.key,
                       .first = a.first,
                       .rows = rows,
                       .width = width};
  const Kernels& k = cpu_kernels();
  if (of_weight)
    parallel(weight_panels(rows), 20.0 * static_cast<double>(width), [&](Interval p) { k.adamw_weight(args, p); });
  else
    parallel(width, 1, [&](Interval r) { k.adamw(args, r); });
}

}  // namespace pare::cpu
