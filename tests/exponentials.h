// 2^x as attention in bf16 takes it: of differences of maxima, and of weights.
#pragma once
#include <algorithm>
#include <cmath>

#include "kernel_call.h"
#include "ptx_kernels.h"

namespace pare::test::kernel {

// The one of the kernels.
inline float exp2_accurate(float x) {
  Call t(table_kernels, DType::f32);
  const Tensor y = t.stat_out("x", {1});
  t["x"].set(0, x);
  ptx::exp2_in_place(y.as<float>(), 1);
  return static_cast<float>(t["x"].get(0));
}
inline float exp2_cubic(float x) {
  x = std::max(x, -126.f);
  const float n = std::nearbyint(x), r = x - n;
  const float q = std::fma(std::fma(0x1.c2a214p-5f, r, 0x1.f00c4ep-3f), r, 0x1.62f5fap-1f);
  return std::ldexp(std::fma(q, r, 1.f), static_cast<int>(n));
}

}  // namespace pare::test::kernel
