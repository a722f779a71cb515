// See ptx_kernels.h.
#include "ptx.cuh"
#include "ptx_kernels.h"

namespace pare::PARE_CUDA {

namespace {

template <int kBytes>
__global__ void copy(unsigned char* out, const unsigned char* in, const int32_t* bytes) {
  __shared__ __align__(16) unsigned char s[32][kBytes];
  const int i = threadIdx.x;
  if (kBytes == 16)
    cp_async_16(s[i], in + i * kBytes, bytes[i]);
  else
    cp_async_8(s[i], in + i * kBytes, bytes[i]);
  cp_async_commit();
  cp_async_wait<0>();
  for (int b = 0; b < kBytes; b++) out[i * kBytes + b] = s[i][b];
}

__global__ void groups(uint32_t* out, const uint32_t* in) {
  __shared__ __align__(16) uint32_t s[2][128];
  const int first = threadIdx.x * 4;
  for (int g = 0; g < 2; g++) {
    cp_async_16(&s[g][first], in + g * 128 + first, 16);
    cp_async_commit();
  }
  cp_async_wait<1>();
  for (int i = 0; i < 4; i++) out[first + i] = s[0][first + i];
  cp_async_wait<0>();
  for (int i = 0; i < 4; i++) out[128 + first + i] = s[1][first + i];
}

template <bool kTranspose>
__global__ void matrices(uint32_t* out, const uint16_t* rows, const int32_t* row) {
  __shared__ __align__(16) uint16_t s[32][8];
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; i++) s[lane][i] = rows[lane * 8 + i];
  __syncwarp();
  uint32_t r[4];
  ldmatrix_x4<kTranspose>(r, s[row[lane]]);
  for (int i = 0; i < 4; i++) out[lane * 4 + i] = r[i];
}

__device__ uint32_t pair(const uint16_t* p) { return p[0] | uint32_t{p[1]} << 16; }

__global__ void products(float* d, const uint16_t* a, const uint16_t* b) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2;
  a += blockIdx.x * 256;
  b += blockIdx.x * 128;
  d += blockIdx.x * 128;
  const uint32_t x[4] = {pair(a + g * 16 + t), pair(a + (g + 8) * 16 + t), pair(a + g * 16 + t + 8),
                         pair(a + (g + 8) * 16 + t + 8)};
  float sum[4];
  for (int i = 0; i < 4; i++) sum[i] = d[(g + i / 2 * 8) * 8 + t + i % 2];
  mma_16816(sum, x, pair(b + g * 16 + t), pair(b + g * 16 + t + 8));
  for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + t + i % 2] = sum[i];
}

template <bool kBase2>
__global__ void exponentials(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = kBase2 ? exp2_f32(x[i]) : exp_at_most_1(x[i]);
}

}  // namespace

}  // namespace pare::PARE_CUDA

namespace pare::test::ptx {

using namespace PARE_CUDA;

void copy_16(unsigned char* out, const unsigned char* in, const int32_t* bytes, int n) {
  launch("copy_16", copy<16>, {.grid = 1, .block = static_cast<unsigned>(n)}, {}, out, in, bytes);
}
void copy_8(unsigned char* out, const unsigned char* in, const int32_t* bytes, int n) {
  launch("copy_8", copy<8>, {.grid = 1, .block = static_cast<unsigned>(n)}, {}, out, in, bytes);
}
void copy_groups(uint32_t* out, const uint32_t* in) {
  launch("copy_groups", groups, {.grid = 1, .block = 32}, {}, out, in);
}
void load_matrices(uint32_t* out, const uint16_t* rows, const int32_t* row, bool transposed) {
  launch("load_matrices", transposed ? matrices<true> : matrices<false>, {.grid = 1, .block = 32}, {}, out, rows, row);
}
void multiply(float* d, const uint16_t* a, const uint16_t* b, int n) {
  launch("multiply", products, {.grid = static_cast<unsigned>(n), .block = 32}, {}, d, a, b);
}

void exp2_in_place(float* x, int n) {
  launch("exp2_in_place", exponentials<true>, {.grid = blocks("exp2_in_place", n, 128), .block = 128}, {}, x, n);
}
void exp_at_most_1_in_place(float* x, int n) {
  launch("exp_at_most_1", exponentials<false>, {.grid = blocks("exp_at_most_1", n, 128), .block = 128}, {}, x, n);
}

}  // namespace pare::test::ptx
