// Products with a weight by tensor copies and wgmma, on compute capability 9.0: what linear_mma.cuh computes, bit for
// bit, for more rows.
//
// The sums of a chunk are a chain of wgmma over k16 steps, ascending from +0, and one wgmma rounds like one mma.sync.
#pragma once
#include "linear_mma.cuh"
#include "ptx90.cuh"

namespace pare::PARE_CUDA {

// A block computes 128 rows and kColumns columns: two warpgroups 64 rows each, and a warp that copies for them.
// kChunks: results that are sums of chunks, which doubles the registers that hold them.
template <int kColumns, bool kChunks>
struct WgmmaBlock {
  static_assert(!kChunks || kColumns == 128);
  static constexpr int kRows = 128, kDepth = 64, kConsumers = kRows / 64 * 4, kThreads = kConsumers * 32 + 32;
  // Shared memory: 193 KiB, or 97 KiB for each of the two blocks that then share a multiprocessor.
  static constexpr int kBlocks = kColumns == 256 || kChunks ? 1 : 2, kStages = kColumns == 256 ? 4 : kChunks ? 6 : 3;
  static constexpr int kRowTiles = 16;  // blocks that run side by side share these rows and their weights: L2 has them

  struct Stage {
    alignas(1024) bf16 x[kRows * kDepth];  // [row][k], by rows of 128 bytes
    bf16 w[kColumns * kDepth];             // [output / 16][input][output % 16], by rows of 32 bytes
  };
  struct Shared {
    Stage stages[kStages];
    Mbarrier full[kStages], empty[kStages];
  };
};

// Where the block's tile begins.
template <class Block, int kColumns>
__device__ __forceinline__ int2 first_of_tile(int rows, int columns) {
  const int down = (rows + Block::kRows - 1) / Block::kRows, across = (columns + kColumns - 1) / kColumns,
            band = blockIdx.x / (Block::kRowTiles * across), i = blockIdx.x % (Block::kRowTiles * across),
            in_band = min(Block::kRowTiles, down - band * Block::kRowTiles);
  return {(band * Block::kRowTiles + i % in_band) * Block::kRows, i / in_band * kColumns};
}

template <int kColumns, bool kChunks, bool kTranspose, class Product>
__global__ void __launch_bounds__(WgmmaBlock<kColumns, kChunks>::kThreads, WgmmaBlock<kColumns, kChunks>::kBlocks)
    multiply_wgmma(const Product p, const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w) {
#ifdef PARE_SM90A
  using Block = WgmmaBlock<kColumns, kChunks>;
  constexpr int kStages = Block::kStages, kDepth = Block::kDepth;
  auto& s = *dynamic_smem<typename Block::Shared>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = (p.depth + kDepth - 1) / kDepth;
  const auto [first_row, first_column] = first_of_tile<Block, kColumns>(p.rows, p.columns);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) mbarrier_init(&s.full[i], 1), mbarrier_init(&s.empty[i], Block::kConsumers);
    fence_proxy_async();
  }
  __syncthreads();
  if (warp == Block::kConsumers) {
    if (lane == 0)
      for (int i = 0; i < steps; i++) {
        auto& stage = s.stages[i % kStages];
        Mbarrier* const full = &s.full[i % kStages];
        mbarrier_wait(&s.empty[i % kStages], (i / kStages + 1) % 2);
        mbarrier_arrive_expect(full, sizeof(stage));
        tensor_copy(stage.x, x, i * kDepth, first_row, full);
        if constexpr (kTranspose)
          tensor_copy(stage.w, w, 0, first_column, i * kDepth / 16, full);
        else
          tensor_copy(stage.w, w, 0, i * kDepth, first_column / 16, full);
      }
    return;
  }
  float sum[kColumns / 2] = {}, total[kColumns / 2] = {};
  const auto end_chunk = [&] {
#pragma unroll
    for (int e = 0; e < kColumns / 2; e++) total[e] += sum[e], sum[e] = 0;
  };
  // Adds stage i, of which kSteps k16 steps exist: a constant, as ptxas takes products that hang on a condition one by
  // one.
  const auto add = [&]<int kSteps>(int i, std::integral_constant<int, kSteps>) {
    auto& stage = s.stages[i % kStages];
    mbarrier_wait(&s.full[i % kStages], i / kStages % 2);
    const uint64_t a = matrix_descriptor(stage.x + warp / 4 * 64 * kDepth, Swizzle::bytes_128, 1024),
                   b = matrix_descriptor(stage.w, Swizzle::bytes_32, 256, kDepth * 32);
    // From one k16 step to the next, in units of 16 bytes: along a row of x, to the next 16 inputs or the next panel.
    constexpr uint64_t kNextA = 2, kNextB = (kTranspose ? kColumns : 16) * 2;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; k++) wgmma<!kTranspose>(sum, a + k * kNextA, b + k * kNextB);
    wgmma_commit();
    wgmma_wait<0>(sum);
    if (lane == 0) mbarrier_arrive(&s.empty[i % kStages]);
  };
  const int whole = p.depth / kDepth;
  for (int i = 0; i < whole; i++) {
    add(i, std::integral_constant<int, 4>{});
    if (kChunks && (i + 1) % (kMmaChunk / kDepth) == 0) end_chunk();
  }
  switch ((p.depth % kDepth + 15) / 16) {
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
  end_chunk();
#pragma unroll
  for (int e = 0; e < kColumns / 2; e += 2) {
    const int r = first_row + warp * 16 + lane / 4 + e / 2 % 2 * 8, c = first_column + e / 4 * 8 + lane % 4 * 2;
    if (r < p.rows && c < p.columns) p.finish_pair(r, c, make_float2(total[e], total[e + 1]));
  }
#else
  __trap();
#endif
}

template <int kColumns, bool kChunks, bool kTranspose, class Product>
void launch_wgmma(const char* op, const Product& p, Stream stream) {
  using Block = WgmmaBlock<kColumns, kChunks>;
  const uint64_t depth = p.depth, rows = p.rows, outputs = kTranspose ? depth : p.columns,
                 inputs = kTranspose ? p.columns : depth;
  const CUtensorMap x = tensor_map<2>(op, p.x, {depth, rows}, {static_cast<uint64_t>(p.x_stride) * 2},
                                      {Block::kDepth, Block::kRows}, Swizzle::bytes_128);
  const CUtensorMap w = tensor_map<3>(
      op, p.packed, {16, inputs, (outputs + 15) / 16}, {32, inputs * 32},
      {16, kTranspose ? kColumns : Block::kDepth, (kTranspose ? Block::kDepth : kColumns) / 16}, Swizzle::bytes_32);
  launch(op, multiply_wgmma<kColumns, kChunks, kTranspose, Product>,
         {.grid = blocks(op, int64_t{blocks(op, p.rows, Block::kRows)} * blocks(op, p.columns, kColumns), 1),
          .block = Block::kThreads,
          .smem = sizeof(typename Block::Shared)},
         stream, p, x, w);
}

}  // namespace pare::PARE_CUDA
