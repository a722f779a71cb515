// See one_op.h.  Apart from the program, because the check build instruments kernels and nothing else.
#include <cuda_runtime.h>

#include "one_op.h"

namespace pare {

template <bool kBarrier>
__global__ void row_rstd(float* rstd, const float* x, int c, float eps) {
  __shared__ float sum[kRowThreads];
  const int i = threadIdx.x;
  sum[i] = i < c ? x[i] * x[i] : 0;
  __syncthreads();
  for (int half = kRowThreads / 2; half > 0; half /= 2) {
    if (i < half) sum[i] += sum[i + half];
    if (kBarrier) __syncthreads();  // before the next turn reads what other threads add here
  }
  if (i == 0) *rstd = 1 / sqrtf(sum[0] / static_cast<float>(c) + eps);
}

template void row_rstd<false>(float*, const float*, int, float);
template void row_rstd<true>(float*, const float*, int, float);

}  // namespace pare
