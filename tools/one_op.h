// Kernels of `make one-op`: what cuda/norm.cu does by one warp, by a block; without `kBarrier` one barrier is missing.
#pragma once

namespace pare {

constexpr int kRowThreads = 64;
// rstd[0] = 1 / sqrt(mean(x^2) + eps) of a row of c values, c <= kRowThreads
template <bool kBarrier>
void row_rstd(float* rstd, const float* x, int c, float eps);

}  // namespace pare
