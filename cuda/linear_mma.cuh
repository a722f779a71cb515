// Products of a linear layer by mma.sync, in bf16: y = x wT, dx = dy w (Forward, linear.cu) and dw = dyT x
// (WeightGradient).
//
//              64 columns                                 64 columns
//             +--------+--------+                        +---+---+---+---+
//   64 rows   | warp 0 | warp 1 |     few rows: 16 rows  | 0 | 1 | 2 | 3 |     a warp: 32 x 32, or 16 x 16
//             +--------+--------+                        +---+---+---+---+
//             | warp 2 | warp 3 |
//             +--------+--------+     k: 64 a stage, of which two (few rows: four) arrive while one is used
//
// Order: k is cut into parts (linear_part).  A part is one chain of mma.sync over k16 steps, ascending from +0, and the
// sums of the parts are added in order, from +0, in f32.  That holds for every kernel and tile: the bits of a row of y
// and dx depend on the row and the weight only.  (Products of zeros, after the last k, change no bit.)  Parts bound the
// length of chains, which truncate at every step, and can be computed side by side, which decoding with a narrow layer
// needs: a block for each tile and part (blockIdx.z) stores the sums of its part in memory, and the last block of a
// tile to arrive adds all of them, ascending.  So the order of arrival changes no bit.  (On 9.0 the blocks of a tile
// are a cluster, and each adds a share of it.)
//
// Bytes: x once for each 64 columns, w once for each 64 rows (few rows: 16), mostly from L2.  Limited by the tensor
// cores, with few rows by the bytes of w.
#pragma once
#include "fragment.cuh"
#include "norm.cuh"

namespace pare::PARE_CUDA {

constexpr int kMmaTile = 64;  // rows and columns of a block, and k of a stage
constexpr int kMmaThreads = 128;

// Copies from[0, valid), then zeros, to to[0, 8); `any` is some address.  kAsync: the addresses are 16-byte aligned.
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
  // Loads from `from` on, the first element; `rows` and `columns` of the matrix are left, the rest is zeros.
  template <int kThreads, bool kAsync>
  __device__ void load(int thread, const bf16* from, int64_t stride, int rows, int columns, const bf16* any) {
#pragma unroll
    for (int j = 0; j < kRows * kMmaTile / 8 / kThreads; j++) {
      const int i = j * kThreads + thread, r = i / 8, c = i % 8 * 8;
      copy_eight<kAsync>(tile().at(r, c), from + r * stride + c, r < rows ? columns - c : 0, any);
    }
  }
};
// kMmaTile outputs and as many inputs of a weight, as in memory (place_of_weight).
struct MmaPanels {
  bf16 v[kMmaTile * kMmaTile];

  __device__ bf16* at(int output, int input) {
    return v + (output / 16 * kMmaTile + input) * 16 + ((output / 8 ^ input / 4) & 1) * 8;
  }
  template <int kThreads, bool kAsync>
  __device__ void load(int thread, const bf16* packed, int output, int input, int outputs, int inputs) {
#pragma unroll
    for (int j = 0; j < kMmaTile * kMmaTile / 8 / kThreads; j++) {
      const int i = j * kThreads + thread, o = i / (2 * kMmaTile) * 16, n = i / 2 % kMmaTile;
      copy_eight<kAsync>(v + i * 8, packed + weight_place(output + o, input + n, inputs) + i % 2 * 8,
                         output + o < outputs && input + n < inputs ? 8 : 0, packed);  // the last panel has zeros
    }
  }
};

// Holds the operands for kMmaTile values of k, and gives a warp its 16 x 16 parts of them: kRows rows of x and kMmaTile
// outputs (kTranspose: inputs) of a weight ...
template <int kRows, bool kTranspose>
struct WeightStage {
  MmaRows<kRows> x;
  MmaPanels w;

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

// Adds the products of a stage, of whose k `depth` exist, to a warp's sum: kDown times 16 rows.
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

// Norms the rows of a product with a norm, in the block that is the last to end, by its first `warps` warps.
// Called by all threads of a block that has finished a tile, or its share of one; `last`: in shared memory.
template <class Product>
__device__ __forceinline__ void norm_as_last(const Product& p, int warps, bool& last) {
  if constexpr (requires { p.norm; }) {
    if (!is_last_to_arrive(p.finished, gridDim.x * gridDim.y, last)) return;
    for (int row = threadIdx.x / 32; row < p.rows && static_cast<int>(threadIdx.x) / 32 < warps; row += warps)
      p.norm(row, p.y + row * p.y_stride, p.columns);
  }
}
// Stores a warp's sums of a part in memory: sum[m] has those of 16 rows from row + m kNext on, and columns from
// `column` on.
template <int kNext, int kDown, int kColumns, class Product>
__device__ __forceinline__ void store_part(const Product& p, int part, const Accumulator<kColumns> (&sum)[kDown],
                                           int row, int column) {
#pragma unroll
  for (int m = 0; m < kDown; m++)
    sum[m].for_pairs([&](int i, int j, float2 x) {
      const int r = row + m * kNext + i, c = column + j;
      if (r < p.rows && c < p.columns) *p.sum_of_part(part, r, c) = x;
    });
}
// Finishes the results of a warp, which lie likewise.
template <int kNext, int kDown, int kColumns, class Product>
__device__ __forceinline__ void finish_results(const Product& p, Accumulator<kColumns> (&total)[kDown], int row,
                                               int column) {
  const auto exists = [&](int r, int c) { return r < p.rows && c < p.columns; };
  // Groups of pairs load their addends before they store a sum: the compiler cannot move a load above a store.
  constexpr int kPairs = kColumns / 4, kTogether = kColumns * kDown > 256 ? 4 : kColumns * kDown > 192 ? 8 : 16;
#pragma unroll
  for (int m = 0; m < kDown; m++) {
    // f(i, row, column, pair) for the pairs i in [first, first + kTogether).
    const auto for_pairs = [&](int first, auto f) {
      int n = 0;
      total[m].for_pairs([&](int i, int j, float2 x) {
        const int r = row + m * kNext + i, c = column + j;
        if (n >= first && n < first + kTogether && exists(r, c)) f(n - first, r, c, x);
        n++;
      });
    };
#pragma unroll
    for (int first = 0; first < kPairs; first += kTogether) {
      decltype(p.before_pair(0, 0)) before[kTogether];
      for_pairs(first, [&](int i, int r, int c, float2) { before[i] = p.before_pair(r, c); });
      for_pairs(first, [&](int i, int r, int c, float2 x) { p.finish_pair(r, c, x, before[i]); });
    }
  }
}

// Adds up the parts of a share of a warp's results, every `shares`th 16 columns of 16 rows, and finishes them.  All
// warps have stored their parts by store_part.
template <int kNext, int kDown, int kColumns, class Product>
__device__ __forceinline__ void finish_parts(const Product& p, int share, int shares, int parts, int row, int column) {
  for (int i = share; i < kDown * kColumns / 16; i += shares) {
    const int first_row = row + i % kDown * kNext, first_column = column + i / kDown * 16;
    constexpr int kTogether = 4;  // parts that are loaded at once
    Accumulator<16> total[1] = {};
#pragma unroll 1
    for (int first = 0; first < parts; first += kTogether) {
      Accumulator<16> part[kTogether] = {};
#pragma unroll
      for (int n = 0; n < kTogether; n++)
        part[n].add_pairs([&](int r, int c) {
          const bool exists = first + n < parts && first_row + r < p.rows && first_column + c < p.columns;
          return exists ? *p.sum_of_part(first + n, first_row + r, first_column + c) : float2{};
        });
#pragma unroll
      for (int n = 0; n < kTogether; n++) total[0] += part[n];
    }
    finish_results<kNext>(p, total, first_row, first_column);
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
  const int first_k = static_cast<int>(blockIdx.z) * p.part,  // of the block's part, if parts are apart
      depth = gridDim.z > 1 ? min(p.part, p.depth - first_k) : p.depth;
  const int warp = threadIdx.x / 32, row = warp / Block::kAcross * kDown * 16,
            column = warp % Block::kAcross * kColumns, first_row = blockIdx.y * kRows,
            first_column = blockIdx.x * kMmaTile, steps = ceil_div(depth, kMmaTile);
  const auto load = [&, k = first_k](int i) {
    if (i < steps)
      stages[i % kStages].template load<kMmaThreads, kAsync>(threadIdx.x, p, first_row, first_column, k + i * kMmaTile);
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
      multiply_stage(sum, stages[i % kStages], row, column, depth - i * kMmaTile);
    }
#pragma unroll
    for (int m = 0; m < kDown; m++) total[m] += sum[m];
  }
  __shared__ bool last;
  if constexpr (requires { p.sum_of_part(0, 0, 0); })
    if (gridDim.z > 1) {
      store_part<16>(p, blockIdx.z, total, first_row + row, first_column + column);
      if (!is_last_to_arrive(&p.arrivals[blockIdx.y * gridDim.x + blockIdx.x], gridDim.z, last)) return;
      finish_parts<16, kDown, kColumns>(p, 0, 1, gridDim.z, first_row + row, first_column + column);
      return norm_as_last(p, kMmaThreads / 32, last);
    }
  finish_results<16>(p, total, first_row + row, first_column + column);
  norm_as_last(p, kMmaThreads / 32, last);
}

}  // namespace pare::PARE_CUDA
