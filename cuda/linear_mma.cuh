// Products of a linear layer on tensor cores, in bf16: y = x wT, dx = dy w (Forward, linear.cu) and dw = dyT x
// (WeightGradient).
//
// Each result: k is cut into parts (linear_part), each part is one chain of mma.sync over k16 steps, ascending from +0,
// and the sums of the parts are added up in order, from +0, in f32.  That holds whatever the kernel and its tile: the
// bits of a row of y and dx depend on nothing but the row and the weight.  (Steps behind the last k would add products
// of zeros, and are left out.)  Parts can be computed side by side, which decoding with a narrow layer needs, and they
// bound the length of chains, which truncate at every step.
#pragma once
#include "fragment.cuh"

namespace pare::PARE_CUDA {

constexpr int kMmaTile = 64;  // rows and columns of a block, and k of a stage
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

// Parts of matrices in shared memory, which kThreads threads load together.
template <int kRows>
struct MmaRows {
  bf16 v[kRows * kMmaTile];

  __device__ SharedTile<kMmaTile> tile() { return {v}; }
  // `from` is the first element; `rows` and `columns` of the matrix are left, the rest is zeros.
  template <int kThreads, bool kAsync>
  __device__ void load(int thread, const bf16* from, int64_t stride, int rows, int columns, const bf16* any) {
#pragma unroll
    for (int j = 0; j < kRows * kMmaTile / 8 / kThreads; j++) {
      const int i = j * kThreads + thread, r = i / 8, c = i % 8 * 8;
      copy_eight<kAsync>(tile().at(r, c), from + r * stride + c, r < rows ? columns - c : 0, any);
    }
  }
};
// kOutputs outputs and kMmaTile inputs of a weight, as in memory (place_of_weight).
template <int kOutputs>
struct MmaPanels {
  bf16 v[kOutputs * kMmaTile];

  __device__ bf16* at(int output, int input) {
    return v + (output / 16 * kMmaTile + input) * 16 + ((output / 8 ^ input / 4) & 1) * 8;
  }
  template <int kThreads, bool kAsync>
  __device__ void load(int thread, const bf16* packed, int output, int input, int outputs, int inputs) {
#pragma unroll
    for (int j = 0; j < kOutputs * kMmaTile / 8 / kThreads; j++) {
      const int i = j * kThreads + thread, o = i / (2 * kMmaTile) * 16, n = i / 2 % kMmaTile;
      copy_eight<kAsync>(v + i * 8, packed + weight_place(output + o, input + n, inputs) + i % 2 * 8,
                         output + o < outputs && input + n < inputs ? 8 : 0, packed);  // the last panel has zeros
    }
  }
};

// What is held of the operands for kMmaTile values of k, and how a warp takes its 16 x 16 parts from there: kRows rows
// of x and kColumns outputs (kTranspose: inputs, as many as a stage has) of a weight ...
template <int kRows, int kColumns, bool kTranspose>
struct WeightStage {
  static_assert(!kTranspose || kColumns == kMmaTile);
  MmaRows<kRows> x;
  MmaPanels<kColumns> w;

  template <int kThreads, bool kAsync, class Product>
  __device__ void load(int thread, const Product& p, int row, int column, int k) {
    x.template load<kThreads, kAsync>(thread, p.x + row * p.x_stride + k, p.x_stride, p.rows - row, p.depth - k, p.x);
    w.template load<kThreads, kAsync>(thread, p.packed, kTranspose ? k : column, kTranspose ? column : k,
                                      kTranspose ? p.depth : p.columns, kTranspose ? p.columns : p.depth);
  }
  __device__ void a(uint32_t (&a)[4], int row, int k) { x.tile().operand_a(a, row, k); }
  __device__ void b(uint32_t (&b)[4], int column, int k) {
    if constexpr (kTranspose)
      load_b<Major::k>(b, [&](int n, int i) { return w.at(k + i, column + n); });
    else
      load_b<Major::mn>(b, [&](int n, int i) { return w.at(column + n, k + i); });
  }
};
// ... or rows of dy and x, which are k.
struct RowStage {
  MmaRows<kMmaTile> dy, x;

  template <int kThreads, bool kAsync, class Product>
  __device__ void load(int thread, const Product& p, int row, int column, int k) {
    dy.load<kThreads, kAsync>(thread, p.dy + k * p.dy_stride + row, p.dy_stride, p.depth - k, p.rows - row, p.dy);
    x.load<kThreads, kAsync>(thread, p.x + k * p.x_stride + column, p.x_stride, p.depth - k, p.columns - column, p.x);
  }
  __device__ void a(uint32_t (&a)[4], int row, int k) {
    load_a<Major::mn>(a, [&](int m, int i) { return dy.tile().at(k + i, row + m); });
  }
  __device__ void b(uint32_t (&b)[4], int column, int k) {
    load_b<Major::mn>(b, [&](int n, int i) { return x.tile().at(k + i, column + n); });
  }
};

// sum += the products of a stage, of whose k `depth` exist, for a warp: kDown times 16 rows.
template <int kDown, int kColumns, class Stage>
__device__ __forceinline__ void multiply_stage(Accumulator<kColumns> (&sum)[kDown], Stage& s, int row, int column,
                                               int depth) {
  for (int k = 0; k < min(kMmaTile, depth); k += 16) {
    uint32_t a[kDown][4];
#pragma unroll
    for (int m = 0; m < kDown; m++) s.a(a[m], row + 16 * m, k);
#pragma unroll
    for (int n = 0; n < kColumns; n += 16) {
      uint32_t b[4];
      s.b(b, column + n, k);
#pragma unroll
      for (int m = 0; m < kDown; m++) sum[m].add_product(n, a[m], b);
    }
  }
}

// A block computes kRows x 64 results: 64 rows by warps of 32 x 32, or, for few rows as in decoding, where the weight's
// bytes limit, 16 by warps of 16 x 16.
constexpr int kFewRows = 16;
template <int kRows>
struct MmaBlock {
  static_assert(kRows == kMmaTile || kRows == kFewRows);
  static constexpr int kAcross = kRows == kFewRows ? 4 : 2;                               // warps side by side
  static constexpr int kDown = kRows == kFewRows ? 1 : 2, kColumns = kMmaTile / kAcross;  // of a warp: kDown * 16 rows
  static constexpr int kStages = kRows == kFewRows ? 5 : 3;  // about 50 KB: three blocks share 164
};
template <int kRows, bool kAsync, class Product>
__global__ void __launch_bounds__(kMmaThreads, 3) multiply_mma(const Product p) {
  using Block = MmaBlock<kRows>;
  constexpr int kDown = Block::kDown, kColumns = Block::kColumns, kStages = Block::kStages;
  auto* const stages = dynamic_smem<typename Product::template Stage<kRows>>();
  const int warp = threadIdx.x / 32, row = warp / Block::kAcross * kDown * 16,
            column = warp % Block::kAcross * kColumns, first_row = blockIdx.y * kRows,
            first_column = blockIdx.x * kMmaTile, steps = ceil_div(p.depth, kMmaTile);
  const auto load = [&](int i) {
    if (i < steps)
      stages[i % kStages].template load<kMmaThreads, kAsync>(threadIdx.x, p, first_row, first_column, i * kMmaTile);
    cp_async_commit();
  };
  Accumulator<kColumns> total[kDown] = {};
  for (int i = 0; i < kStages - 1; i++) load(i);
  for (int i = 0; i < steps;) {
    Accumulator<kColumns> sum[kDown] = {};
    for (const int end = min(steps, i + p.part / kMmaTile); i < end; i++) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // stage i is there, and everyone is done with the one before
      load(i + kStages - 1);
      multiply_stage(sum, stages[i % kStages], row, column, p.depth - i * kMmaTile);
    }
#pragma unroll
    for (int m = 0; m < kDown; m++) total[m] += sum[m];
  }
#pragma unroll
  for (int m = 0; m < kDown; m++)
    total[m].for_each([&](int i, int j, float x) {
      const int r = first_row + row + 16 * m + i, c = first_column + column + j;
      if (r < p.rows && c < p.columns) p.finish(r, c, x);
    });
}

// For few rows and several parts: a block computes 16 rows and 16 columns, its warps a part each, with stages of their
// own, in rounds where the parts are more than the warps.
constexpr int kFewColumns = 16, kFewWarps = 8, kFewStages = 3;
struct FewWarp {
  WeightStage<kFewRows, kFewColumns, false> stages[kFewStages];

  // The sums of a part lie in the first stage, when no copy is under way.
  using Sums = float[kFewRows][kFewColumns];
  static_assert(sizeof(Sums) <= sizeof(stages[0]));
  __device__ Sums& sums() { return reinterpret_cast<Sums&>(stages[0]); }
};
static_assert(kFewWarps * sizeof(FewWarp) <= 99 * 1024, "devices of 8.6 have no more");
template <bool kAsync, class Product>
__global__ void __launch_bounds__(32 * kFewWarps) multiply_few(const Product p) {
  auto* const shared = dynamic_smem<FewWarp>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32,
            first_row = blockIdx.y * kFewRows, first_column = blockIdx.x * kFewColumns;
  auto& stages = shared[warp].stages;
  const int r = threadIdx.x / 4, c = threadIdx.x % 4 * 4;  // the first 64 threads add up four results each, from here
  float total[4] = {};
  for (int first = 0; first < p.depth; first += warps * p.part) {
    const int begin = first + warp * p.part, depth = min(p.part, p.depth - begin), steps = ceil_div(depth, kMmaTile);
    const auto load = [&](int i) {
      if (i < steps)
        stages[i % kFewStages].template load<32, kAsync>(lane, p, first_row, first_column, begin + i * kMmaTile);
      cp_async_commit();
    };
    Accumulator<kFewColumns> sum[1] = {};
    for (int i = 0; i < kFewStages - 1; i++) load(i);
    for (int i = 0; i < steps; i++) {
      cp_async_wait<kFewStages - 2>();
      __syncwarp();  // stage i is there, and the warp is done with the one before
      load(i + kFewStages - 1);
      multiply_stage(sum, stages[i % kFewStages], 0, 0, depth - i * kMmaTile);
    }
    __syncwarp();  // everyone has read the last stages
    sum[0].for_pairs([&](int i, int j, float2 x) { *reinterpret_cast<float2*>(&shared[warp].sums()[i][j]) = x; });
    __syncthreads();
    for (int w = 0; r < kFewRows && w < warps && first + w * p.part < p.depth; w++)
#pragma unroll
      for (int j = 0; j < 4; j++) total[j] += shared[w].sums()[r][c + j];
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (r < kFewRows && first_row + r < p.rows && first_column + c + j < p.columns)
      p.finish(first_row + r, first_column + c + j, total[j]);
}

}  // namespace pare::PARE_CUDA
