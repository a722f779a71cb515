// Products with a weight on tensor cores, in bf16: y = x wT and, with kTranspose, y = x w (Forward, linear.cu).
//
// Each result is one chain of mma.sync over k16 steps, k ascending from +0, whatever the tile: a row's bits depend on
// nothing but the row and the weight.  (Steps behind the last k would add products of zeros, and are left out.)
#pragma once
#include "ptx.cuh"

namespace pare::PARE_CUDA {

constexpr int kMmaTile = 64;  // columns of a block, and k of a stage
constexpr int kMmaThreads = 128;

// A block computes kRows rows: 64, or 16 where there are no more.
template <int kRows>
struct MmaBlock {
  static constexpr int kStages = kRows == 64 ? 3 : 4;
  // Warps side by side, and what each computes: kDown times 16 rows, kAcross times 16 columns.
  static constexpr int kWarps = kRows == 64 ? 2 : 4, kDown = kRows == 64 ? 2 : 1, kAcross = kMmaTile / kWarps / 16;

  // Operands in shared memory, 16-byte chunks permuted so that the eight that an ldmatrix reads at once fall into
  // different banks: those of x within a row; the two of an input's 16 outputs change places in every other four
  // inputs.
  struct Stage {
    bf16 x[kRows * kMmaTile], w[kMmaTile * kMmaTile];
    __device__ bf16* x_at(int row, int k) { return x + row * kMmaTile + ((k / 8) ^ (row % 8)) * 8; }
    __device__ bf16* w_at(int output, int input) {  // panels, as in memory
      return w + (output / 16 * kMmaTile + input) * 16 + ((output / 8 ^ input / 4) & 1) * 8;
    }
  };
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

template <int kRows, bool kAsync, bool kTranspose, class Product>
__device__ __forceinline__ void load_stage(typename MmaBlock<kRows>::Stage& s, const Product& p, int row, int column,
                                           int k) {
  const int outputs = kTranspose ? p.depth : p.columns, inputs = kTranspose ? p.columns : p.depth;
  const int output = kTranspose ? k : column, input = kTranspose ? column : k;
  for (int i = threadIdx.x; i < kRows * kMmaTile / 8; i += kMmaThreads) {
    const int r = i / 8, c = i % 8 * 8;
    copy_eight<kAsync>(s.x_at(r, c), p.x + (row + r) * p.x_stride + k + c,
                       row + r < p.rows ? max(0, min(8, p.depth - k - c)) : 0, p.x);
  }
  for (int i = threadIdx.x; i < kMmaTile * kMmaTile / 8; i += kMmaThreads) {
    const int o = i / (2 * kMmaTile) * 16 + i % 2 * 8, n = i / 2 % kMmaTile;  // the last panel is filled up with zeros
    copy_eight<kAsync>(s.w_at(o, n), p.packed + place(output + o, input + n, inputs),
                       output + o / 16 * 16 < outputs && input + n < inputs ? 8 : 0, p.packed);
  }
}

template <int kRows, bool kAsync, bool kTranspose, class Product>
__global__ void __launch_bounds__(kMmaThreads) multiply_mma(const Product p) {
  using Block = MmaBlock<kRows>;
  constexpr int kStages = Block::kStages, kDown = Block::kDown, kAcross = Block::kAcross;
  auto* const stages = dynamic_smem<typename Block::Stage>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / Block::kWarps * kDown * 16,
            column = warp % Block::kWarps * kAcross * 16, first_row = blockIdx.y * kRows,
            first_column = blockIdx.x * kMmaTile, steps = (p.depth + kMmaTile - 1) / kMmaTile;
  const auto load = [&](int i) {
    if (i < steps) load_stage<kRows, kAsync, kTranspose>(stages[i % kStages], p, first_row, first_column, i * kMmaTile);
    cp_async_commit();
  };
  float sum[kDown][2 * kAcross][4] = {};  // by 16 rows, 8 columns
  for (int i = 0; i < kStages - 1; i++) load(i);
  for (int i = 0; i < steps; i++) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // stage i is there, and everyone is done with the one before
    load(i + kStages - 1);
    auto& s = stages[i % kStages];
    for (int k = 0; k < min(kMmaTile, p.depth - i * kMmaTile); k += 16) {
      uint32_t a[kDown][4];
#pragma unroll
      for (int m = 0; m < kDown; m++) ldmatrix_x4<false>(a[m], s.x_at(row + 16 * m + lane % 16, k + lane / 16 * 8));
#pragma unroll
      for (int n = 0; n < kAcross; n++) {
        const int c = column + 16 * n;
        uint32_t b[4];
        if constexpr (kTranspose)
          ldmatrix_x4<false>(b, s.w_at(k + lane / 8 % 2 * 8, c + lane / 16 * 8 + lane % 8));
        else
          ldmatrix_x4<true>(b, s.w_at(c + lane / 16 * 8, k + lane % 16));
#pragma unroll
        for (int m = 0; m < kDown; m++) {
          mma_16816(sum[m][2 * n], a[m], b[0], b[1]);
          mma_16816(sum[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kDown; m++)
#pragma unroll
    for (int n = 0; n < 2 * kAcross; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int r = first_row + row + 16 * m + lane / 4 + e / 2 * 8,
                  c = first_column + column + 8 * n + lane % 4 * 2 + e % 2;
        if (r < p.rows && c < p.columns) p.finish(r, c, sum[m][n][e]);
      }
}

}  // namespace pare::PARE_CUDA
