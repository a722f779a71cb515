// Products of a linear layer by tensor copies and wgmma, on compute capability 9.0: what linear_mma.cuh computes, bit
// for bit, for more rows.
//
// The sum of a part is a chain of wgmma over k16 steps, ascending from +0, and one wgmma rounds like one mma.sync.
//
// The two blocks of a cluster compute neighbouring tiles of the same columns.  Each copies its own rows of the left
// operand and half of the right one, to both: L2 gives that away once for both.  Or the blocks of a cluster compute the
// parts of one tile and leave them in memory (L2); each then adds up the parts of a share of the tile.
#pragma once
#include <algorithm>
#include <utility>

#include "linear_epilogue.cuh"
#include "ops/linear.h"
#include "ring.cuh"
#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

constexpr int kWgmmaDepth = 64;  // k of a stage

// A block copies part `rank` of what its cluster of `blocks` shares.
struct Share {
  int rank, blocks;
};
template <class... At>
__device__ __forceinline__ void copy_share(Share s, void* smem, const CUtensorMap& map, At... at) {
  if (s.blocks == 1)
    tensor_copy(smem, map, at...);
  else
    tensor_copy_to((1 << s.blocks) - 1, smem, map, at...);
}

// What is held of the operands for kWgmmaDepth values of k, how it gets there by tensor copies, and the matrices that
// wgmma finds there: kRows rows of x and kColumns columns of a weight ...
template <int kRows, int kColumns, bool kTranspose>
struct WgmmaWeightStage {
  static constexpr bool kMnMajorA = false, kMnMajorB = !kTranspose, kHalves = false;
  // From one k16 step to the next, in units of 16 bytes: along a row of x, to the next 16 inputs or the next panel.
  static constexpr uint64_t kNextA = 2, kNextB = (kTranspose ? kColumns : 16) * 2;

  static constexpr int kInputs = kTranspose ? kColumns : kWgmmaDepth,
                       kPanels = (kTranspose ? kWgmmaDepth : kColumns) / kPanel;

  alignas(1024) bf16 x[kRows * kWgmmaDepth];  // [row][k], by rows of 128 bytes
  bf16 w[kPanels][kInputs * kPanel];          // [output / 16][input], as in memory: by rows of 32 bytes

  static constexpr bool is_shared_by(int blocks) { return kPanels % blocks == 0; }
  template <class Product>
  static std::pair<CUtensorMap, CUtensorMap> maps(const char* op, const Product& p, int blocks) {
    const uint64_t depth = p.depth, rows = p.rows, outputs = kTranspose ? depth : p.columns,
                   inputs = kTranspose ? p.columns : depth;
    const uint32_t together = 1u << log2_inputs(p);
    return {
        tensor_map<2>(op, p.x, {depth, rows}, {static_cast<uint64_t>(p.x_stride) * 2}, {kWgmmaDepth, kRows},
                      Swizzle::bytes_128),
        tensor_map<3>(op, p.packed, {kPanel * together, inputs / together, ceil_div(outputs, kPanel)},
                      {2 * kPanel * together, 2 * kPanel * inputs},
                      {kPanel * together, kInputs / together, static_cast<uint32_t>(kPanels / blocks)}, Swizzle::none)};
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
                       Mbarrier* full, Share s) {
    const int panel = s.rank * kPanels / s.blocks, input = kTranspose ? column : k, output = kTranspose ? k : column;
    tensor_copy(x, map_x, k, row, full);
    copy_share(s, w[panel], map_w, 0, input >> log2_inputs(p), output / kPanel + panel, full);
  }
  __device__ uint64_t a(int row) const { return matrix_descriptor(x + row * kWgmmaDepth, Swizzle::bytes_128, 1024); }
  __device__ uint64_t b() const { return matrix_descriptor(w, Swizzle::bytes_32, 256, kWgmmaDepth * 32); }
};
// ... or the same of a weight whose results belong together two by two, each with the one p.half further on: a gate and
// its up, or channels of the two halves of a head.  A tile has kColumns / 2 pairs.  The blocks of a cluster copy a half
// each, for both.
template <int kRows, int kColumns>
struct WgmmaHalvesStage : WgmmaWeightStage<kRows, kColumns, false> {
  using Base = WgmmaWeightStage<kRows, kColumns, false>;
  static constexpr bool kHalves = true;
  template <class Product>
  static std::pair<CUtensorMap, CUtensorMap> maps(const char* op, const Product& p, int) {
    return Base::maps(op, p, 2);
  }
  template <class Product>
  __device__ void copy(const Product& p, const CUtensorMap& map_x, const CUtensorMap& map_w, int row, int column, int k,
                       Mbarrier* full, Share s) {
    const int pair = column / 2;
    const auto copy_half = [&](int half) {
      const int first = (pair / p.half * 2 + half) * p.half + pair % p.half;
      copy_share(s, this->w[half * Base::kPanels / 2], map_w, 0, k >> Base::log2_inputs(p), first / kPanel, full);
    };
    tensor_copy(this->x, map_x, k, row, full);
    copy_half(s.rank);
    if (s.blocks == 1) copy_half(1);
  }
};
// ... or kRows columns of dy and kColumns of x.
template <int kRows, int kColumns>
struct WgmmaRowStage {
  static constexpr bool kMnMajorA = true, kMnMajorB = true, kHalves = false;
  static constexpr uint64_t kNextA = 128, kNextB = 128;  // 16 rows

  static constexpr int kPanel = kWgmmaDepth * 64;  // [k][64], by rows of 128 bytes
  alignas(1024) bf16 dy[kRows / 64][kPanel];
  bf16 x[kColumns / 64][kPanel];

  static constexpr bool is_shared_by(int blocks) { return kWgmmaDepth / 8 % blocks == 0; }
  template <class Product>
  static std::pair<CUtensorMap, CUtensorMap> maps(const char* op, const Product& p, int blocks) {
    const auto map = [&](const bf16* data, int width, int64_t stride, int shared_by) {
      return tensor_map<2>(op, data, {static_cast<uint64_t>(width), static_cast<uint64_t>(p.depth)},
                           {static_cast<uint64_t>(stride) * 2}, {64, static_cast<uint32_t>(kWgmmaDepth / shared_by)},
                           Swizzle::bytes_128);
    };
    return {map(p.dy, p.rows, p.dy_stride, 1), map(p.x, p.columns, p.x_stride, blocks)};
  }
  template <class Product>
  __device__ void copy(const Product&, const CUtensorMap& map_dy, const CUtensorMap& map_x, int row, int column, int k,
                       Mbarrier* full, Share s) {
    for (int i = 0; i < kRows / 64; i++) tensor_copy(dy[i], map_dy, row + i * 64, k, full);
    const int first = s.rank * kWgmmaDepth / s.blocks;  // of the rows
    for (int i = 0; i < kColumns / 64; i++) copy_share(s, x[i] + first * 64, map_x, column + i * 64, k + first, full);
  }
  __device__ uint64_t a(int row) const { return matrix_descriptor(dy[row / 64], Swizzle::bytes_128, 1024); }
  __device__ uint64_t b() const { return matrix_descriptor(x, Swizzle::bytes_128, 1024, kPanel * 2); }
};

// A block computes tiles of kRows rows and kColumns columns: one or two warpgroups, of kDown times 64 rows each, and a
// warp that copies for them.  kParts: it adds up several parts of k (linear_part), which doubles the registers that
// hold results.  Where those are more than 128 a thread, the warpgroup of the copying warp gives up some of its own.
template <int kRows, int kColumns, bool kParts, class Product>
struct WgmmaBlock {
  using Stage = typename Product::template WgmmaStage<kRows, kColumns>;
  static constexpr int kDown = kRows > 128 ? 2 : 1, kSums = kColumns / 2 * kDown * (kParts ? 2 : 1);
  static_assert(kSums <= 192);
  static constexpr bool kGives = kSums > 128;
  static constexpr bool kRotates = requires(const Product& p) { p.rotation; };
  static constexpr bool kGated = Stage::kHalves && !kRotates;
  static constexpr int kStored = kGated ? kColumns / 2 : kColumns;  // columns of a tile of y
  static constexpr int kConsumers = kRows / kDown / 64 * 4, kThreads = kConsumers * 32 + (kGives ? 128 : 32);
  static constexpr bool kAdds = std::is_same_v<typename Product::Result, float>;  // results of twice the bytes
  static constexpr bool kHead = requires(const Product& p) { p.tiles; };
  // The results may be added to a residual.
  static constexpr bool kResidual = !Stage::kHalves && !kHead && requires(const Product& p) { p.residual; };
  // The parts of k may be apart.
  static constexpr bool kApart = !kParts && !Stage::kHalves && !kHead && requires(const Product& p) {
    p.sum_of_part(0, 0, 0);
  };
  // Up to 226 KiB of shared memory, or 105 for each of the two blocks that then share a multiprocessor.
  static constexpr int kBlocks = kColumns > 64 || kParts ? 1 : 2, kStageKib = kBlocks == 2 ? 96 : (kAdds ? 168 : 204),
                       kStages = std::min<int>(6, kStageKib * 1024 / sizeof(Stage));
  // Each warp puts its results into boxes of 16 rows and kBox columns, which tensor copies store, or add to what is
  // there: as many boxes at once as fit beside the stages.
  static constexpr int kBox = kColumns <= 64 || kAdds ? 32
                              : kStored % 64 == 0     ? 64
                              : kStored % 48 == 0     ? 48
                                                      : kStored,
                       kBoxes = kStored / kBox * kDown, kBoxBytes = 16 * kBox * sizeof(typename Product::Result),
                       kBuffers = std::min<int>(kBoxes, ((kBlocks == 2 ? 104 : 225) * 1024 - kStages * sizeof(Stage)) /
                                                            (kConsumers * kBoxBytes));
  static_assert(kBuffers > 0 && kStored % kBox == 0);
  struct Shared {
    alignas(1024) typename Product::Result boxes[kConsumers][kBuffers][16 * kBox];
    Ring<Stage, kStages> ring;
    Mbarrier residual[kConsumers][kBuffers];  // it is in the box
    bool last;
  };
};

template <class T>
struct Results {
  T* data;
  int64_t stride;  // between rows
  int columns;
};
// Tensor maps of the operands, and, if the results leave by boxes, of them and of what they are added to.
struct WgmmaMaps {
  CUtensorMap a, b, y, residual;
  bool by_boxes;
};

// The tiles of so many rows, one below another, that clusters take.
__device__ __forceinline__ int tiles_down(int rows, int in_tile, Share s) { return ceil_div(rows, in_tile * s.blocks); }

// Where the tile of a block begins, as its cluster has number i of those that a result of so many rows and columns has.
// It may lie beyond the rows: the block then copies its share like any other.
template <int kRows, int kColumns>
__device__ __forceinline__ int2 first_of_tile(int rows, int columns, int i, Share s) {
  const int row_tiles = 16 / s.blocks;  // blocks that run side by side share these rows and their columns: L2 has them
  const int down = tiles_down(rows, kRows, s), across = ceil_div(columns, kColumns), band = i / (row_tiles * across),
            in_band = min(row_tiles, down - band * row_tiles);
  i %= row_tiles * across;
  return {((band * row_tiles + i % in_band) * s.blocks + s.rank) * kRows, i / in_band * kColumns};
}

// A block, or a cluster, computes the tiles of its number, that plus the number of those, ...: the copying warp runs
// ahead into the next while the others finish one.  It has one tile if parts are apart, or boxes cannot store y.
template <int kRows, int kColumns, bool kParts, class Product>
__global__ void __launch_bounds__(WgmmaBlock<kRows, kColumns, kParts, Product>::kThreads,
                                  WgmmaBlock<kRows, kColumns, kParts, Product>::kBlocks)
    multiply_wgmma(const Product p, const __grid_constant__ WgmmaMaps maps) {
#ifdef PARE_SM90A
  using Block = WgmmaBlock<kRows, kColumns, kParts, Product>;
  using Stage = typename Block::Stage;
  auto& shared = *dynamic_smem<typename Block::Shared>();
  auto& ring = shared.ring;
  const bool by_boxes = Block::kGated || maps.by_boxes;
  constexpr int kDown = Block::kDown;
  const Share cluster{cluster_rank(), cluster_size()};
  bool apart = false;
  if constexpr (Block::kApart) apart = p.sums;
  const Share share = apart ? Share{0, 1} : cluster;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_tile = blockIdx.x / cluster.blocks,
            next_tile = gridDim.x / cluster.blocks,
            tiles = tiles_down(p.rows, kRows, share) * ceil_div(p.columns, kColumns),
            first_k = apart ? cluster.rank * p.part : 0, depth = apart ? min(p.part, p.depth - first_k) : p.depth;
  bool adds_to_boxes = false;
  if constexpr (Block::kResidual) adds_to_boxes = by_boxes && p.residual;
  if (threadIdx.x == 0) {
    prefetch_map(maps.a);
    prefetch_map(maps.b);
    if (by_boxes) prefetch_map(maps.y);
    ring.init(Block::kConsumers * share.blocks);
    if (adds_to_boxes) {
      prefetch_map(maps.residual);
      for (auto& of_warp : shared.residual)
        for (Mbarrier& full : of_warp) mbarrier_init(&full, 1);
    }
    fence_proxy_async();
    fence_mbarrier_init();
  }
  // No block of a cluster is reached before its barriers are there, nor while it leaves; parts are read when all are
  // stored by the blocks of the cluster.
  const auto meet = [&] {
    __syncwarp();  // whole warps meet
    cluster_arrive();
    cluster_wait();
  };
  if (share.blocks > 1)
    meet();
  else
    __syncthreads();
  await_kernel_before();
  if (warp >= Block::kConsumers) {
    if constexpr (Block::kGives) fewer_registers<40>();
    if (lane == 0 && warp == Block::kConsumers)
      for (int filling = 0, t = first_tile; t < tiles; t += next_tile) {
        const int2 first = first_of_tile<kRows, kColumns>(p.rows, p.columns, t, share);
        for (int k = 0; k < depth; k += kWgmmaDepth, filling++) {
          Mbarrier* const full = ring.await_empty(filling);
          mbarrier_arrive_expect(full, sizeof(Stage));
          ring[filling].copy(p, maps.a, maps.b, first.x, first.y, first_k + k, full, share);
        }
      }
    __syncwarp();  // whole warps meet, after the lane that copied
    if (apart) meet();
    norm_as_last(p, 0, shared.last);
    if (share.blocks > 1) meet();
    return;
  }
  if constexpr (Block::kGives) more_registers<232>();
  // One part is its own total: a variable of its own would take as many registers again, since products also read sums
  // that they do not add to.
  Accumulator<kColumns> sums[kParts ? 2 : 1][kDown];
  auto &sum = sums[0], &total = sums[kParts];
  const auto first_of_warp = [&](int t) {
    int2 first = first_of_tile<kRows, kColumns>(p.rows, p.columns, t, share);
    first.x += warp / 4 * kDown * 64 + warp % 4 * 16;
    if constexpr (Block::Stage::kHalves) first.y /= 2;
    return first;
  };
  int2 first{};  // row and column of the warp
  Boxes<Block> boxes(shared, maps.residual);
  NewSlots slots;
  if constexpr (Block::kRotates) slots = NewSlots(p.rotation.pages, first_of_warp(first_tile).x, p.rows);
  for (int filling = 0, t = first_tile; t < tiles; t += next_tile) {
    if (adds_to_boxes) {
      const int2 at = first_of_warp(t);
      boxes.begin(at.x, at.y);
    }
    if constexpr (kParts)
#pragma unroll
      for (int m = 0; m < kDown; m++) {
        total[m] = {};
        sum[m] = {};  // so it needs no registers as a tile is finished
      }
    for (int k = 0; k < depth;) {
      const int first_of_part = k, end = kParts ? min(depth, k + p.part) : depth;
      for (; k < end; k += kWgmmaDepth, filling++) {
        const Stage& stage = ring[filling];
        ring.await_full(filling);
        const uint64_t b = stage.b();
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < kDown; m++) {
          const uint64_t a = stage.a((warp / 4 * kDown + m) * 64);
#pragma unroll
          for (int step = 0; step < kWgmmaDepth / 16; step++)
            wgmma<Stage::kMnMajorB, Stage::kMnMajorA>(sum[m].registers(), a + step * Stage::kNextA,
                                                      b + step * Stage::kNextB, k > first_of_part || step > 0);
        }
        wgmma_commit();
#pragma unroll
        for (int m = 0; m < kDown; m++) wgmma_wait<0>(sum[m].registers());
        if (lane < share.blocks) ring.release_to(cluster.rank - share.rank + lane, filling);
      }
#pragma unroll
      for (int m = 0; m < kDown; m++)
        if constexpr (kParts)
          total[m] += sum[m];
        else
          total[m].for_each([](int, int, float& x) { x += 0.f; });  // +0 + x
    }
    first = first_of_warp(t);
    if constexpr (Block::kHead) {
      if (p.stores) store_tile<Block>(p, maps.y, total, boxes, first.x, first.y, false, false);
      sum_tiles(p, total, first.x, first.y);
      continue;
    } else {
      if (!by_boxes) break;
    }
    if constexpr (Block::kAdds)
      add_tile<Block>(maps.y, total, boxes, first.x, first.y);
    else
      p.with_addends([&](bool has_bias, bool has_residual) {
        store_tile<Block>(p, maps.y, total, boxes, first.x, first.y, has_bias, has_residual);
      });
  }
  if (by_boxes || Block::kHead) {
    if (lane == 0) store_wait_read<0>();
  } else {
    if constexpr (Block::kApart)
      if (apart) {
        store_part<64>(p, cluster.rank, total, first.x, first.y);
        meet();
        finish_parts<64, kDown, kColumns>(p, cluster.rank, cluster.blocks, cluster.blocks, first.x, first.y);
      }
    if constexpr (Block::kRotates)
      rotate_tile(p, total[0], slots, first.x, first.y);
    else if (!apart)
      finish_results<64>(p, total, first.x, first.y);
    norm_as_last(p, Block::kConsumers, shared.last);
  }
  if (share.blocks > 1) meet();
#else
  __trap();
#endif
}

// cluster: blocks of one.
template <int kRows, int kColumns, bool kParts, class Product>
void launch_wgmma(const char* op, int cluster, const Product& p, Stream stream) {
  using Block = WgmmaBlock<kRows, kColumns, kParts, Product>;
  expect(Block::Stage::is_shared_by(cluster) && (cluster == 1 || p.apart() == 0), op, ": ", cluster,
         " blocks cannot share tiles of ", kRows, " x ", kColumns);
  const auto [a, b] = Block::Stage::maps(op, p, cluster);
  WgmmaMaps maps{.a = a, .b = b, .y = {}, .residual = {}, .by_boxes = p.apart() == 0 && p.stores_by_boxes()};
  bool one_tile = !maps.by_boxes;  // for a block
  if constexpr (requires { p.tiles; }) one_tile = false;
  if (maps.by_boxes) {
    const auto y = p.results();
    const auto map = [&](const auto* data, int64_t stride) {
      return tensor_map<2>(op, data, {static_cast<uint64_t>(y.columns), static_cast<uint64_t>(p.rows)},
                           {static_cast<uint64_t>(stride) * sizeof *data}, {Block::kBox, 16},
                           Block::kBoxBytes == 16 * 128 ? Swizzle::bytes_128 : Swizzle::none);
    };
    maps.y = map(y.data, y.stride);
    if constexpr (Block::kResidual)
      if (p.residual) maps.residual = map(p.residual, p.residual_stride);
  }
  const unsigned tiles = blocks(op, int64_t{blocks(op, p.rows, kRows * cluster)} * blocks(op, p.columns, kColumns), 1),
                 at_once = static_cast<unsigned>(machine().multiprocessors / cluster * Block::kBlocks),
                 in_cluster = static_cast<unsigned>(std::max(cluster, p.apart()));
  launch(op, multiply_wgmma<kRows, kColumns, kParts, Product>,
         {.grid = (one_tile ? tiles : std::min(tiles, at_once)) * in_cluster,
          .block = Block::kThreads,
          .smem = sizeof(typename Block::Shared),
          .cluster = in_cluster,
          .early = true},
         stream, p, maps);
}

}  // namespace pare::PARE_CUDA
