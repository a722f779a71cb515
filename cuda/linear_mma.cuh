// Products of a linear layer on tensor cores, in bf16: y = x wT, dx = dy w (Forward, linear.cu) and dw = dyT x
// (WeightGradient).
//
// Each result is one chain of mma.sync over k16 steps, k ascending from +0, whatever the tile: the bits of a row of y
// and dx depend on nothing but the row and the weight.  (Steps behind the last k would add products of zeros, and are
// left out.)
#pragma once
#include "ptx.cuh"

namespace pare::PARE_CUDA {

constexpr int kMmaTile = 64;  // columns of a block, and k of a stage
constexpr int kMmaThreads = 128;

// to[0, 8) = from[0, valid), and zeros; `any` is some address.  kAsync: the addresses are 16-byte aligned.
template <bool kAsync>
__device__ __forceinline__ void copy_eight(bf16* to, const bf16* from, int valid, const bf16* any) {
  if constexpr (kAsync) {
    cp_async_16(to, valid > 0 ? from : any, max(0, min(8, valid)) * 2);
  } else {
    for (int e = 0; e < 8; e++) to[e] = e < valid ? from[e] : from_float<bf16>(0.f);
  }
}

// A part of a matrix in shared memory: kRows rows of kMmaTile elements.  16-byte chunks are permuted within a row, so
// that the eight that an ldmatrix reads at once fall into different banks.
template <int kRows>
struct MmaTile {
  bf16 v[kRows * kMmaTile];

  __device__ bf16* at(int row, int column) { return v + row * kMmaTile + ((column / 8) ^ (row % 8)) * 8; }
  // `from` is the first element; `rows` and `columns` of the matrix are left, the rest is zeros.
  template <bool kAsync>
  __device__ void load(const bf16* from, int64_t stride, int rows, int columns, const bf16* any) {
    for (int i = threadIdx.x; i < kRows * kMmaTile / 8; i += kMmaThreads) {
      const int r = i / 8, c = i % 8 * 8;
      copy_eight<kAsync>(at(r, c), from + r * stride + c, r < rows ? columns - c : 0, any);
    }
  }
};

// What a block holds of the operands for 64 values of k, and how a warp takes its 16 x 16 parts from there: kRows rows
// of x and 64 outputs (kTranspose: inputs) of a weight, in panels as in memory ...
template <int kRows, bool kTranspose>
struct WeightStage {
  MmaTile<kRows> x;
  bf16 w[kMmaTile * kMmaTile];

  // The two chunks of an input's 16 outputs change places in every other four inputs (banks, as above).
  __device__ bf16* w_at(int output, int input) {
    return w + (output / 16 * kMmaTile + input) * 16 + ((output / 8 ^ input / 4) & 1) * 8;
  }
  template <bool kAsync, class Product>
  __device__ void load(const Product& p, int row, int column, int k) {
    x.template load<kAsync>(p.x + row * p.x_stride + k, p.x_stride, p.rows - row, p.depth - k, p.x);
    const int outputs = kTranspose ? p.depth : p.columns, inputs = kTranspose ? p.columns : p.depth;
    const int output = kTranspose ? k : column, input = kTranspose ? column : k;
    for (int i = threadIdx.x; i < kMmaTile * kMmaTile / 8; i += kMmaThreads) {
      const int o = i / (2 * kMmaTile) * 16 + i % 2 * 8, n = i / 2 % kMmaTile;  // the last panel is filled with zeros
      copy_eight<kAsync>(w_at(o, n), p.packed + place(output + o, input + n, inputs),
                         output + o / 16 * 16 < outputs && input + n < inputs ? 8 : 0, p.packed);
    }
  }
  __device__ void a(uint32_t (&a)[4], int row, int k, int lane) {
    ldmatrix_x4<false>(a, x.at(row + lane % 16, k + lane / 16 * 8));
  }
  __device__ void b(uint32_t (&b)[4], int column, int k, int lane) {
    if constexpr (kTranspose)
      ldmatrix_x4<false>(b, w_at(k + lane / 8 % 2 * 8, column + lane / 16 * 8 + lane % 8));
    else
      ldmatrix_x4<true>(b, w_at(column + lane / 16 * 8, k + lane % 16));
  }
};
// ... or 64 rows of dy and x, which are k.
struct RowStage {
  MmaTile<kMmaTile> dy, x;

  template <bool kAsync, class Product>
  __device__ void load(const Product& p, int row, int column, int k) {
    dy.load<kAsync>(p.dy + k * p.dy_stride + row, p.dy_stride, p.depth - k, p.rows - row, p.dy);
    x.load<kAsync>(p.x + k * p.x_stride + column, p.x_stride, p.depth - k, p.columns - column, p.x);
  }
  __device__ void a(uint32_t (&a)[4], int row, int k, int lane) {
    ldmatrix_x4<true>(a, dy.at(k + lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8));
  }
  __device__ void b(uint32_t (&b)[4], int column, int k, int lane) {
    ldmatrix_x4<true>(b, x.at(k + lane % 16, column + lane / 16 * 8));
  }
};

// A block computes kRows rows: 64, or 16 where there are no more.  Warps side by side, and what each computes: kDown
// times 16 rows, kAcross times 16 columns.
template <int kRows>
struct MmaBlock {
  static constexpr int kStages = kRows == 64 ? 3 : 4;
  static constexpr int kWarps = kRows == 64 ? 2 : 4, kDown = kRows == 64 ? 2 : 1, kAcross = kMmaTile / kWarps / 16;
};

template <int kRows, bool kAsync, class Product>
__global__ void __launch_bounds__(kMmaThreads) multiply_mma(const Product p) {
  using Block = MmaBlock<kRows>;
  constexpr int kStages = Block::kStages, kDown = Block::kDown, kAcross = Block::kAcross;
  auto* const stages = dynamic_smem<typename Product::template Stage<kRows>>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp / Block::kWarps * kDown * 16,
            column = warp % Block::kWarps * kAcross * 16, first_row = blockIdx.y * kRows,
            first_column = blockIdx.x * kMmaTile, steps = (p.depth + kMmaTile - 1) / kMmaTile;
  const auto load = [&](int i) {
    if (i < steps) stages[i % kStages].template load<kAsync>(p, first_row, first_column, i * kMmaTile);
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
      for (int m = 0; m < kDown; m++) s.a(a[m], row + 16 * m, k, lane);
#pragma unroll
      for (int n = 0; n < kAcross; n++) {
        uint32_t b[4];
        s.b(b, column + 16 * n, k, lane);
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
