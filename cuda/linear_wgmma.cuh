// Products of a linear layer by tensor copies and wgmma, on compute capability 9.0: what linear_mma.cuh computes, bit
// for bit, for more rows.
//
// The sum of a part is a chain of wgmma over k16 steps, ascending from +0, and one wgmma rounds like one mma.sync.
#pragma once
#include <algorithm>
#include <utility>

#include "linear_mma.cuh"
#include "ops/linear.h"
#include "ring.cuh"

namespace pare::PARE_CUDA {

constexpr int kWgmmaDepth = 64;  // k of a stage

// What is held of the operands for kWgmmaDepth values of k, how it gets there by tensor copies, and the matrices that
// wgmma finds there: kRows rows of x and kColumns columns of a weight ...
template <int kRows, int kColumns, bool kTranspose>
struct WgmmaWeightStage {
  static constexpr bool kMnMajorA = false, kMnMajorB = !kTranspose;
  // From one k16 step to the next, in units of 16 bytes: along a row of x, to the next 16 inputs or the next panel.
  static constexpr uint64_t kNextA = 2, kNextB = (kTranspose ? kColumns : 16) * 2;

  alignas(1024) bf16 x[kRows * kWgmmaDepth];  // [row][k], by rows of 128 bytes
  bf16 w[kColumns * kWgmmaDepth];             // [output / 16][input], as in memory: by rows of 32 bytes

  template <class Product>
  static std::pair<CUtensorMap, CUtensorMap> maps(const char* op, const Product& p) {
    const uint64_t depth = p.depth, rows = p.rows, outputs = kTranspose ? depth : p.columns,
                   inputs = kTranspose ? p.columns : depth;
    const uint32_t together = 1u << log2_inputs(p);
    constexpr uint32_t kInputs = kTranspose ? kColumns : kWgmmaDepth, kOutputs = kTranspose ? kWgmmaDepth : kColumns;
    return {tensor_map<2>(op, p.x, {depth, rows}, {static_cast<uint64_t>(p.x_stride) * 2}, {kWgmmaDepth, kRows},
                          Swizzle::bytes_128),
            tensor_map<3>(op, p.packed, {kPanel * together, inputs / together, ceil_div(outputs, kPanel)},
                          {2 * kPanel * together, 2 * kPanel * inputs},
                          {kPanel * together, kInputs / together, kOutputs / kPanel}, Swizzle::none)};
  }
  // log2 of how many inputs of a panel, up to 16, are one row of the tensor copies: rows of 32 bytes bounded the
  // products.
  template <class Product>
  __host__ __device__ static int log2_inputs(const Product& p) {
    const int inputs = kTranspose ? p.columns : p.depth;
    int n = 0;
    while (n < 4 && inputs % (2 << n) == 0) n++;
    return n;
  }
  template <class Product>
  __device__ void copy(const Product& p, const CUtensorMap& map_x, const CUtensorMap& map_w, int row, int column, int k,
                       Mbarrier* full) {
    tensor_copy(x, map_x, k, row, full);
    if constexpr (kTranspose)
      tensor_copy(w, map_w, 0, column >> log2_inputs(p), k / kPanel, full);
    else
      tensor_copy(w, map_w, 0, k >> log2_inputs(p), column / kPanel, full);
  }
  __device__ uint64_t a(int row) const { return matrix_descriptor(x + row * kWgmmaDepth, Swizzle::bytes_128, 1024); }
  __device__ uint64_t b() const { return matrix_descriptor(w, Swizzle::bytes_32, 256, kWgmmaDepth * 32); }
};
// ... or kRows columns of dy and kColumns of x.
template <int kRows, int kColumns>
struct WgmmaRowStage {
  static constexpr bool kMnMajorA = true, kMnMajorB = true;
  static constexpr uint64_t kNextA = 128, kNextB = 128;  // 16 rows

  static constexpr int kPanel = kWgmmaDepth * 64;  // [k][64], by rows of 128 bytes
  alignas(1024) bf16 dy[kRows / 64][kPanel];
  bf16 x[kColumns / 64][kPanel];

  template <class Product>
  static std::pair<CUtensorMap, CUtensorMap> maps(const char* op, const Product& p) {
    const auto map = [&](const bf16* data, int width, int64_t stride) {
      return tensor_map<2>(op, data, {static_cast<uint64_t>(width), static_cast<uint64_t>(p.depth)},
                           {static_cast<uint64_t>(stride) * 2}, {64, kWgmmaDepth}, Swizzle::bytes_128);
    };
    return {map(p.dy, p.rows, p.dy_stride), map(p.x, p.columns, p.x_stride)};
  }
  template <class Product>
  __device__ void copy(const Product&, const CUtensorMap& map_dy, const CUtensorMap& map_x, int row, int column, int k,
                       Mbarrier* full) {
    for (int i = 0; i < kRows / 64; i++) tensor_copy(dy[i], map_dy, row + i * 64, k, full);
    for (int i = 0; i < kColumns / 64; i++) tensor_copy(x[i], map_x, column + i * 64, k, full);
  }
  __device__ uint64_t a(int row) const { return matrix_descriptor(dy[row / 64], Swizzle::bytes_128, 1024); }
  __device__ uint64_t b() const { return matrix_descriptor(x, Swizzle::bytes_128, 1024, kPanel * 2); }
};

// A block computes kRows rows and kColumns columns: one or two warpgroups, of kDown times 64 rows each, and a warp that
// copies for them.  kParts: it adds up several parts of k (linear_part), which doubles the registers that hold results.
// Where those are more than 128 a thread, the warpgroup of the copying warp gives up some of its own.
template <int kRows, int kColumns, bool kParts, class Product>
struct WgmmaBlock {
  using Stage = typename Product::template WgmmaStage<kRows, kColumns>;
  static constexpr int kDown = kRows > 128 ? 2 : 1, kSums = kColumns / 2 * kDown * (kParts ? 2 : 1);
  static_assert(kSums <= 192);
  static constexpr bool kGives = kSums > 128;
  static constexpr int kConsumers = kRows / kDown / 64 * 4, kThreads = kConsumers * 32 + (kGives ? 128 : 32);
  // Up to 205 KiB of shared memory, or 97 for each of the two blocks that then share a multiprocessor.
  static constexpr int kBlocks = kColumns > 64 || kParts ? 1 : 2,
                       kStages = std::min<int>(6, (kBlocks == 2 ? 96 : 204) * 1024 / sizeof(Stage));
  using Shared = Ring<Stage, kStages>;
};

// Where the block's tile begins.
template <int kRows, int kColumns>
__device__ __forceinline__ int2 first_of_tile(int rows, int columns) {
  constexpr int kRowTiles = 16;  // blocks that run side by side share these rows and their columns: L2 has them
  const int down = ceil_div(rows, kRows), across = ceil_div(columns, kColumns),
            band = blockIdx.x / (kRowTiles * across), i = blockIdx.x % (kRowTiles * across),
            in_band = min(kRowTiles, down - band * kRowTiles);
  return {(band * kRowTiles + i % in_band) * kRows, i / in_band * kColumns};
}

template <int kRows, int kColumns, bool kParts, class Product>
__global__ void __launch_bounds__(WgmmaBlock<kRows, kColumns, kParts, Product>::kThreads,
                                  WgmmaBlock<kRows, kColumns, kParts, Product>::kBlocks)
    multiply_wgmma(const Product p, const __grid_constant__ CUtensorMap map_a,
                   const __grid_constant__ CUtensorMap map_b) {
#ifdef PARE_SM90A
  using Block = WgmmaBlock<kRows, kColumns, kParts, Product>;
  using Stage = typename Block::Stage;
  auto& ring = *dynamic_smem<typename Block::Shared>();
  constexpr int kDown = Block::kDown;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int2 tile = first_of_tile<kRows, kColumns>(p.rows, p.columns);
  const int first_row = tile.x, first_column = tile.y;
  const auto [first_k, depth] = depth_of_block(p);
  if (threadIdx.x == 0) {
    prefetch_map(map_a), prefetch_map(map_b);
    ring.init(Block::kConsumers);
    fence_proxy_async();
  }
  __syncthreads();
  if (warp >= Block::kConsumers) {
    if constexpr (Block::kGives) fewer_registers<40>();
    if (lane == 0 && warp == Block::kConsumers)
      for (int i = 0; i * kWgmmaDepth < depth; i++) {
        Mbarrier* const full = ring.await_empty(i);
        mbarrier_arrive_expect(full, sizeof(Stage));
        ring[i].copy(p, map_a, map_b, first_row, first_column, first_k + i * kWgmmaDepth, full);
      }
    __syncwarp();
    if constexpr (requires { p.sum_of_part(0, 0, 0); })
      if (gridDim.z > 1) is_last_part(p, blockIdx.x);
    return;
  }
  if constexpr (Block::kGives) more_registers<232>();
  Accumulator<kColumns> sum[kDown] = {}, total[kDown] = {};
  const auto end_part = [&] {
#pragma unroll
    for (int m = 0; m < kDown; m++) total[m] += sum[m], sum[m] = {};
  };
  // Adds stage i, of which kSteps k16 steps exist: a constant, as ptxas takes products that hang on a condition one by
  // one.
  const auto add = [&]<int kSteps>(int i, std::integral_constant<int, kSteps>) {
    const Stage& stage = ring[i];
    ring.await_full(i);
    const uint64_t b = stage.b();
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < kDown; m++) {
      const uint64_t a = stage.a((warp / 4 * kDown + m) * 64);
#pragma unroll
      for (int k = 0; k < kSteps; k++)
        wgmma<Stage::kMnMajorB, Stage::kMnMajorA>(sum[m].registers(), a + k * Stage::kNextA, b + k * Stage::kNextB);
    }
    wgmma_commit();
#pragma unroll
    for (int m = 0; m < kDown; m++) wgmma_wait<0>(sum[m].registers());
    if (lane == 0) ring.release(i);
  };
  const int whole = depth / kWgmmaDepth;
  for (int i = 0, left = p.part / kWgmmaDepth; i < whole; i++) {
    add(i, std::integral_constant<int, 4>{});
    if (kParts && --left == 0) end_part(), left = p.part / kWgmmaDepth;
  }
  switch (ceil_div(depth % kWgmmaDepth, 16)) {
    case 1:
      add(whole, std::integral_constant<int, 1>{});
      break;
    case 2:
      add(whole, std::integral_constant<int, 2>{});
      break;
    case 3:
      add(whole, std::integral_constant<int, 3>{});
      break;
    case 4:
      add(whole, std::integral_constant<int, 4>{});
  }
  end_part();
  finish_tile<64>(p, total, first_row + warp / 4 * kDown * 64 + warp % 4 * 16, first_column, blockIdx.x);
#else
  __trap();
#endif
}

template <int kRows, int kColumns, bool kParts, class Product>
void launch_wgmma(const char* op, const Product& p, Stream stream) {
  using Block = WgmmaBlock<kRows, kColumns, kParts, Product>;
  const auto [a, b] = Block::Stage::maps(op, p);
  launch(op, multiply_wgmma<kRows, kColumns, kParts, Product>,
         {.grid = dim3(blocks(op, int64_t{blocks(op, p.rows, kRows)} * blocks(op, p.columns, kColumns), 1), 1,
                       std::max(1, p.apart())),
          .block = Block::kThreads,
          .smem = sizeof(typename Block::Shared)},
         stream, p, a, b);
}

}  // namespace pare::PARE_CUDA
