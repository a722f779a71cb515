// Products of a linear layer on tensor cores, in bf16: y = x wT, dx = dy w (Forward, linear.cu) and dw = dyT x
// (WeightGradient).
//
// Each result: k is cut into chunks (linear_chunk), each chunk is one chain of mma.sync over k16 steps, ascending from
// +0, and the sums of the chunks are added up in order in f32.  That holds whatever the kernel and its tile: the bits
// of a row of y and dx depend on nothing but the row and the weight.  (Steps behind the last k would add products of
// zeros, and are left out.)  Chunks can be computed side by side, which decoding with a narrow layer needs; and they
// keep chains short, which truncate at every step.
#pragma once
#include "fragment.cuh"

namespace pare::PARE_CUDA {

constexpr int kMmaChunk = 512;
// Values of k in a chunk, for results of so many columns: where they are wide, all.
constexpr int kNarrow = 4096;
inline int linear_chunk(int columns) { return columns <= kNarrow ? kMmaChunk : 1 << 30; }
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

// Some threads that load together: this one's number, and how many they are.
struct Loaders {
  int thread, threads;
};

// A part of a matrix in shared memory.
template <int kRows>
struct MmaRows {
  bf16 v[kRows * kMmaTile];

  __device__ SharedTile<kMmaTile> tile() { return {v}; }
  // `from` is the first element; `rows` and `columns` of the matrix are left, the rest is zeros.
  template <bool kAsync>
  __device__ void load(Loaders l, const bf16* from, int64_t stride, int rows, int columns, const bf16* any) {
    for (int i = l.thread; i < kRows * kMmaTile / 8; i += l.threads) {
      const int r = i / 8, c = i % 8 * 8;
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
  template <bool kAsync>
  __device__ void load(Loaders l, const bf16* packed, int output, int input, int outputs, int inputs) {
    for (int i = l.thread; i < kOutputs * kMmaTile / 8; i += l.threads) {
      const int o = i / (2 * kMmaTile) * 16, n = i / 2 % kMmaTile;  // the last panel is filled with zeros
      copy_eight<kAsync>(v + i * 8, packed + weight_place(output + o, input + n, inputs) + i % 2 * 8,
                         output + o < outputs && input + n < inputs ? 8 : 0, packed);
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

  template <bool kAsync, class Product>
  __device__ void load(Loaders l, const Product& p, int row, int column, int k) {
    x.template load<kAsync>(l, p.x + row * p.x_stride + k, p.x_stride, p.rows - row, p.depth - k, p.x);
    w.template load<kAsync>(l, p.packed, kTranspose ? k : column, kTranspose ? column : k,
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

  template <bool kAsync, class Product>
  __device__ void load(Loaders l, const Product& p, int row, int column, int k) {
    dy.load<kAsync>(l, p.dy + k * p.dy_stride + row, p.dy_stride, p.depth - k, p.rows - row, p.dy);
    x.load<kAsync>(l, p.x + k * p.x_stride + column, p.x_stride, p.depth - k, p.columns - column, p.x);
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

// A block computes 64 x 64 results, a warp 32 x 32 of them.
constexpr int kBlockStages = 3;
template <bool kAsync, class Product>
__global__ void __launch_bounds__(kMmaThreads) multiply_mma(const Product p) {
  constexpr int kDown = 2;
  auto* const stages = dynamic_smem<typename Product::Stage>();
  const int warp = threadIdx.x / 32, row = warp / 2 * 32, column = warp % 2 * 32, first_row = blockIdx.y * kMmaTile,
            first_column = blockIdx.x * kMmaTile, steps = ceil_div(p.depth, kMmaTile);
  const auto load = [&](int i) {
    if (i < steps)
      stages[i % kBlockStages].template load<kAsync>({int(threadIdx.x), kMmaThreads}, p, first_row, first_column,
                                                     i * kMmaTile);
    cp_async_commit();
  };
  Accumulator<32> total[kDown] = {}, sum[kDown] = {};
  for (int i = 0; i < kBlockStages - 1; i++) load(i);
  for (int i = 0; i < steps; i++) {
    cp_async_wait<kBlockStages - 2>();
    __syncthreads();  // stage i is there, and everyone is done with the one before
    load(i + kBlockStages - 1);
    multiply_stage(sum, stages[i % kBlockStages], row, column, p.depth - i * kMmaTile);
    if (i + 1 == steps || (i + 1) * kMmaTile % p.chunk == 0)
#pragma unroll
      for (int m = 0; m < kDown; m++) total[m] += sum[m], sum[m] = {};
  }
#pragma unroll
  for (int m = 0; m < kDown; m++)
    total[m].for_each([&](int i, int j, float x) {
      const int r = first_row + row + 16 * m + i, c = first_column + column + j;
      if (r < p.rows && c < p.columns) p.finish(r, c, x);
    });
}

// For few rows, as in decoding, where the weight's bytes limit: a warp computes 16 rows and 32 columns, with stages of
// its own.  kChunks: the warps of a block take a chunk each of the same columns, else all k of columns side by side.
constexpr int kFewRows = 16, kFewColumns = 32, kFewWarps = kMmaThreads / 32, kFewStages = 4;
struct FewShared {
  WeightStage<kFewRows, kFewColumns, false> stages[kFewWarps][kFewStages];

  // The warp's sums of a chunk lie in the last of its stages, where no copy is under way between two chunks: so all
  // of it fits devices that have 99 KiB.
  using Sums = float[kFewRows][kFewColumns + 8];
  static_assert(kMmaChunk / kMmaTile % kFewStages == 0 && sizeof(Sums) <= sizeof(stages[0][0]));
  __device__ Sums& sums(int warp) { return reinterpret_cast<Sums&>(stages[warp][kFewStages - 1]); }
};
static_assert(sizeof(FewShared) <= 99 * 1024);
template <bool kChunks, bool kAsync, class Product>
__global__ void __launch_bounds__(kMmaThreads) multiply_few(const Product p) {
  constexpr int kSteps = kMmaChunk / kMmaTile, kMine = kFewRows * kFewColumns / kMmaThreads;
  auto& shared = *dynamic_smem<FewShared>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = blockIdx.y * kFewRows,
            first_column = (kChunks ? blockIdx.x : blockIdx.x * kFewWarps + warp) * kFewColumns;
  auto& stages = shared.stages[warp];
  // Step i of this warp.
  const auto first_k = [&](int i) {
    return kChunks ? (i / kSteps * kFewWarps + warp) * kMmaChunk + i % kSteps * kMmaTile : i * kMmaTile;
  };
  const auto load = [&](int i) {
    if (first_k(i) < p.depth)
      stages[i % kFewStages].template load<kAsync>({lane, 32}, p, first_row, first_column, first_k(i));
    cp_async_commit();
  };
  const auto step = [&](Accumulator<kFewColumns>(&sum)[1], int i) {
    cp_async_wait<kFewStages - 2>();
    __syncwarp();  // stage i is there, and the warp is done with the one before
    load(i + kFewStages - 1);
    multiply_stage(sum, stages[i % kFewStages], 0, 0, p.depth - first_k(i));
  };
  const auto finish = [&](int r, int c, float x) {
    if (first_row + r < p.rows && first_column + c < p.columns) p.finish(first_row + r, first_column + c, x);
  };
  for (int i = 0; i < kFewStages - 1; i++) load(i);
  if constexpr (kChunks) {
    float total[kMine] = {};  // results threadIdx.x + j kMmaThreads of the block
    for (int i = 0, first = 0; first < p.depth; first += kFewWarps * kMmaChunk) {
      Accumulator<kFewColumns> sum[1] = {};
      for (const int end = i + kSteps; i < end; i++) step(sum, i);
      __syncwarp();  // everyone has read the last stage
      sum[0].for_pairs([&](int r, int c, float2 x) { *reinterpret_cast<float2*>(&shared.sums(warp)[r][c]) = x; });
      __syncthreads();
      for (int w = 0; w < kFewWarps && first + w * kMmaChunk < p.depth; w++)
#pragma unroll
        for (int j = 0; j < kMine; j++) {
          const int e = threadIdx.x + j * kMmaThreads;
          total[j] += shared.sums(w)[e / kFewColumns][e % kFewColumns];
        }
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < kMine; j++)
      finish((threadIdx.x + j * kMmaThreads) / kFewColumns, threadIdx.x % kFewColumns, total[j]);
  } else {
    Accumulator<kFewColumns> sum[1] = {};
    for (int i = 0; i * kMmaTile < p.depth; i++) step(sum, i);
    sum[0].for_each([&](int r, int c, float x) { finish(r, c, 0.f + x); });  // the sum of one chunk
  }
}

}  // namespace pare::PARE_CUDA
