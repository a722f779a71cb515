// Products with a weight on tensor cores, in bf16: y = x wT and, with kTranspose, y = x w (Forward, linear.cu).
//
// Each result is one chain of mma.sync over k16 steps, k ascending from +0, whatever the tile: a row's bits depend on
// nothing but the row and the weight.  (Steps behind the last k would add products of zeros, and are left out.)
#pragma once
#include "ptx.cuh"

namespace pare::PARE_CUDA {

constexpr int kMmaTile = 64;      // rows and columns of a block, and k of a stage
constexpr int kMmaThreads = 128;  // warp (i, j) of 2 x 2 computes 32 rows and 32 columns

// Operands in shared memory, 16-byte chunks permuted so that the eight that an ldmatrix reads at once fall into
// different banks: those of x within a row; the two of an input's 16 outputs change places in every other four inputs.
struct MmaStage {
  bf16 x[kMmaTile * kMmaTile], w[kMmaTile * kMmaTile];
  __device__ bf16* x_at(int row, int k) { return x + row * kMmaTile + ((k / 8) ^ (row % 8)) * 8; }
  __device__ bf16* w_at(int output, int input) {  // panels, as in memory
    return w + (output / 16 * kMmaTile + input) * 16 + ((output / 8 ^ input / 4) & 1) * 8;
  }
};

// to[0, 8) = from[0, valid), and zeros; `any` is some address.  kAsync: the addresses are 16-byte aligned.
template <bool kAsync>
__device__ __forceinline__ void copy_eight(bf16* to, const bf16* from, int valid, const bf16* any) {
  if constexpr (kAsync) {
    cp_async_16(to, valid ? from : any, valid * 2);
  } else {
    for (int e = 0; e < 8; e++) to[e] = e < valid ? from[e] : from_float<bf16>(0.f);
  }
}

template <bool kAsync, bool kTranspose, class Product>
__device__ __forceinline__ void load_stage(MmaStage& s, const Product& p, int row, int column, int k) {
  const int outputs = kTranspose ? p.depth : p.columns, inputs = kTranspose ? p.columns : p.depth;
  const int output = kTranspose ? k : column, input = kTranspose ? column : k;
  for (int i = threadIdx.x; i < kMmaTile * kMmaTile / 8; i += kMmaThreads) {
    const int r = i / 8, c = i % 8 * 8;
    copy_eight<kAsync>(s.x_at(r, c), p.x + (row + r) * p.x_stride + k + c,
                       row + r < p.rows ? max(0, min(8, p.depth - k - c)) : 0, p.x);
    const int o = i / (2 * kMmaTile) * 16 + i % 2 * 8, n = i / 2 % kMmaTile;  // the last panel is filled up with zeros
    copy_eight<kAsync>(s.w_at(o, n), p.packed + place(output + o, input + n, inputs),
                       output + o / 16 * 16 < outputs && input + n < inputs ? 8 : 0, p.packed);
  }
}

template <bool kAsync, bool kTranspose, class Product>
__global__ void __launch_bounds__(kMmaThreads) multiply_mma(const Product p) {
  __shared__ __align__(16) MmaStage stages[2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / 2 * 32, column = warp % 2 * 32,
            first_row = blockIdx.y * kMmaTile, first_column = blockIdx.x * kMmaTile;
  float sum[2][4][4] = {};  // by 16 rows, 8 columns
  load_stage<kAsync, kTranspose>(stages[0], p, first_row, first_column, 0);
  cp_async_commit();
  for (int k = 0, turn = 0; k < p.depth; k += kMmaTile, turn ^= 1) {
    if (k + kMmaTile < p.depth)
      load_stage<kAsync, kTranspose>(stages[turn ^ 1], p, first_row, first_column, k + kMmaTile);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    MmaStage& s = stages[turn];
    for (int step = 0; step < min(kMmaTile, p.depth - k); step += 16) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; m++) ldmatrix_x4<false>(a[m], s.x_at(row + 16 * m + lane % 16, step + lane / 16 * 8));
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int c = column + 16 * n;
        uint32_t b[4];
        if constexpr (kTranspose)
          ldmatrix_x4<false>(b, s.w_at(step + lane / 8 % 2 * 8, c + lane / 16 * 8 + lane % 8));
        else
          ldmatrix_x4<true>(b, s.w_at(c + lane / 16 * 8, step + lane % 16));
#pragma unroll
        for (int m = 0; m < 2; m++) {
          mma_16816(sum[m][2 * n], a[m], b[0], b[1]);
          mma_16816(sum[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
    __syncthreads();  // everyone is done with the stage
  }
  cp_async_wait<0>();
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int r = first_row + row + 16 * m + lane / 4 + e / 2 * 8,
                  c = first_column + column + 8 * n + lane % 4 * 2 + e % 2;
        if (r < p.rows && c < p.columns) p.finish(r, c, sum[m][n][e]);
      }
}

}  // namespace pare::PARE_CUDA
