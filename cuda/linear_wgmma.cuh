// Products of a linear layer by tensor copies and wgmma, on compute capability 9.0, with the bits of linear_mma.cuh:
// c = a b, of y = x wT (a = x), dx = dy w (a = dy) and dw = dyT x (a = dyT).
//
//            k, 64 a stage ->         a tile of c: up to 256 columns
//          +----+----+----+-...      +------------------+
//    a     |    |    |    |          |   warpgroup 0    |   64 rows (tiles of 256: 128)
//          +----+----+----+-...      +------------------+
//          |    |    |    |          |   warpgroup 1    |   (tiles of 64 rows: none)
//          +----+----+----+-...      +------------------+
//
//   time ->  copying warp   | stages of tile 0    | of tile 1           | of tile 2 ...
//            warpgroups          | products of tile 0 | epilogue | products of tile 1 | epilogue | ...
//
// The two blocks of a cluster compute neighbouring tiles of the same columns.  Each copies its own rows of a, and half
// of b to both: L2 supplies b once for both.  Or the blocks of a cluster compute the parts of k of one tile and leave
// them in memory (L2); each then adds up the parts of a share of the tile.  Or a tile is one part of k, part 0 of all
// tiles first; warps add theirs in turn to what the part before has left.  They await lower tiles alone, and all blocks
// run at once, so each wait ends.
//
// Order: the sum of a part is a chain of wgmma over k16 steps, ascending from +0; one wgmma rounds like one mma.sync.
//
// Bytes: a stage of a tile of R rows and C columns has 128 (R + C); so a comes once for each C columns of c, b once for
// each R rows, mostly from L2, and b once for 2 R with clusters.  Limited by the tensor cores, R C / 32 clocks a stage,
// or, for small tiles, by the way into the multiprocessor (linear_tiles.h).
#pragma once
#include <algorithm>
#include <utility>

#include "linear_epilogue.cuh"
#include "ops/linear.h"
#include "ring.cuh"
#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

constexpr int kWgmmaDepth = 64;                       // k of a stage
constexpr int kNextRows = 64 * kWgmmaDepth * 2 / 16;  // of a stage: from 64 rows of a to the next, in units of 16 bytes

template <class... At>
__device__ __forceinline__ void copy_share(Share s, void* smem, const CUtensorMap& map, At... at) {
  if (s.blocks == 1)
    tensor_copy(smem, map, at...);
  else
    tensor_copy_to((1 << s.blocks) - 1, smem, map, at...);
}

// The operands for kWgmmaDepth values of k in shared memory, the tensor copies that bring them, and the matrices that
// wgmma finds there: kRows rows of x and kColumns columns of a weight ...
template <int kRows, int kColumns, bool kTranspose>
struct WgmmaWeightStage {
  static constexpr bool kMnMajorA = false, kMnMajorB = !kTranspose, kHalves = false;
  // From one k16 step to the next, in units of 16 bytes: along a row of x, to the next 16 inputs or the next panel.
  static constexpr int kNextA = 2, kNextB = (kTranspose ? kColumns : 16) * 2;

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
  __device__ uint64_t a() const { return matrix_descriptor(x, Swizzle::bytes_128, 1024); }
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
  static constexpr int kNextA = 128, kNextB = 128;  // 16 rows

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
  __device__ uint64_t a() const { return matrix_descriptor(dy, Swizzle::bytes_128, 1024); }
  __device__ uint64_t b() const { return matrix_descriptor(x, Swizzle::bytes_128, 1024, kPanel * 2); }
};

// A block computes tiles of kRows rows and kColumns columns: one or two warpgroups, of kDown times 64 rows each, and a
// warp that copies for them.  kParts: it adds up several parts of k (linear_part), which doubles the registers that
// hold results.  Where those are more than 128 a thread, the warpgroup of the copying warp gives up some of its own.
template <int kRows, int kTileColumns, bool kParts, class Product>
struct WgmmaBlock {
  using Stage = typename Product::template WgmmaStage<kRows, kTileColumns>;
  static constexpr bool kAddsParts = kParts;
  static constexpr int kTileRows = kRows, kColumns = kTileColumns, kDown = kRows > 128 ? 2 : 1,
                       kSums = kColumns / 2 * kDown * (kParts ? 2 : 1);
  static_assert(kSums <= 192);
  static constexpr bool kGives = kSums > 128;
  static constexpr bool kRotates = requires(const Product& p) { p.rotation; };
  static constexpr bool kGated = Stage::kHalves && !kRotates;
  static constexpr int kStored = kGated ? kColumns / 2 : kColumns;  // columns of a tile of y
  static constexpr int kConsumers = kRows / kDown / 64 * 4, kThreads = kConsumers * 32 + (kGives ? 128 : 32);
  static constexpr bool kAdds = std::is_same_v<typename Product::Result, float>;  // results of twice the bytes
  static constexpr bool kHead = requires(const Product& p) { p.tiles; };
  static constexpr bool kInTurn = requires(const Product& p) { p.parts_in_turn; };
  // The results may be added to a residual.
  static constexpr bool kResidual = !Stage::kHalves && !kHead && !kInTurn && requires(const Product& p) { p.residual; };
  // The parts of k may be apart.
  static constexpr bool kApart = !kParts && !Stage::kHalves && !kHead && requires(const Product& p) {
    p.sum_of_part(0, 0, 0);
  };
  // Up to 226 KiB of shared memory, or 105 for each of the two blocks that then share a multiprocessor.
  static constexpr int kBlocks = kColumns > 64 || kParts ? 1 : 2, kStageKib = kBlocks == 2 ? 96 : (kAdds ? 168 : 204),
                       kStages = std::min<int>(6, kStageKib * 1024 / sizeof(Stage));
  // Each warp puts its results into boxes of 16 rows and kBox columns, which tensor copies store, or add to memory: as
  // many boxes at once as fit in addition to the stages.
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

struct WgmmaMaps {
  CUtensorMap a, b;  // the operands
  ResultMaps results;
};

// The tiles of a product, numbered so that up to 16 that lie one above another are computed at a time: L2 then has
// their rows and columns for all of them.  The blocks of a cluster share number i.  A tile may lie beyond the rows: its
// block copies its share like any other.  Parts in turn have all tiles each, one part after another.
template <class Block, class Product>
struct WgmmaTiles {
  static constexpr int kRows = Block::kTileRows, kColumns = Block::kColumns;
  static constexpr bool kInTurn = Block::kInTurn;
  const Product& p;
  Share share, parts;  // of a tile's blocks; of the parts of k, if those are the blocks of a cluster

  __device__ int down() const { return ceil_div(p.rows, kRows * share.blocks); }
  __device__ int across() const { return ceil_div(p.columns, kColumns); }
  __device__ int of_part() const { return down() * across(); }
  __device__ int count() const { return kInTurn ? of_part() * ceil_div(p.depth, p.part) : of_part(); }
  // Returns the first row and column of the block's tile.
  __device__ __forceinline__ int2 operator[](int i) const {
    if constexpr (kInTurn) i %= of_part();
    const int band_rows = 16 / share.blocks, band = i / (band_rows * across()), in_band = i % (band_rows * across()),
              rows_here = min(band_rows, down() - band * band_rows);
    return {((band * band_rows + in_band % rows_here) * share.blocks + share.rank) * kRows,
            in_band / rows_here * kColumns};
  }
  __device__ int part(int i) const { return kInTurn ? i / of_part() : parts.rank; }
  // Returns the number of the block's tile among those of its part.
  __device__ int place(int i) const { return i % of_part() * share.blocks + share.rank; }
  // Return the first value of k of the tile, and their number.
  __device__ int first_k(int i) const { return part(i) * p.part; }
  __device__ int depth(int i) const { return Block::kAddsParts ? p.depth : min(p.part, p.depth - first_k(i)); }

  // Returns the tiles of this block, or of its cluster; called by all of its threads.
  __device__ UnitsInTurn mine() const {
    const int block = blockIdx.x, blocks = gridDim.x;
    if constexpr (kInTurn) {
      unsigned* const next = p.arrivals + kLinearTiles - 1;
      if (threadIdx.x == 0 && share.rank == 0) p.tickets[block] = static_cast<int>(atomicInc(next, blocks - 1));
      share.blocks > 1 ? cluster_sync() : __syncthreads();
      return units_in_turn(p.tickets[block], blocks, count());
    }
    return {block, count(), blocks};
  }
};

// Adds a stage's products to the sums of a warpgroup, kDown times 64 rows; not `adds`: they begin.  a, b: descriptors.
template <class Stage, int kDown, int kColumns>
__device__ __forceinline__ void multiply_stage(Accumulator<kColumns> (&sum)[kDown], uint64_t a, uint64_t b, bool adds) {
  wgmma_fence();
#pragma unroll
  for (int m = 0; m < kDown; m++)
#pragma unroll
    for (int step = 0; step < kWgmmaDepth / 16; step++)
      wgmma<Stage::kMnMajorB, Stage::kMnMajorA>(sum[m].registers(), further(a, m * kNextRows + step * Stage::kNextA),
                                                further(b, step * Stage::kNextB), adds || step > 0);
  wgmma_commit();
#pragma unroll
  for (int m = 0; m < kDown; m++) wgmma_wait<0>(sum[m].registers());
}

// Blocks, or clusters, take every gridDim-th tile: the copying warp runs ahead into the next while the warpgroups
// finish one.  (A block has one tile if results leave from registers, or the parts of k are apart.)
template <int kRows, int kColumns, bool kParts, class Product>
__global__ void __launch_bounds__(WgmmaBlock<kRows, kColumns, kParts, Product>::kThreads,
                                  WgmmaBlock<kRows, kColumns, kParts, Product>::kBlocks)
    multiply_wgmma(const Product p, const __grid_constant__ WgmmaMaps maps) {
#ifdef PARE_SM90A
  using Block = WgmmaBlock<kRows, kColumns, kParts, Product>;
  using Stage = typename Block::Stage;
  constexpr int kDown = Block::kDown;
  auto& shared = *dynamic_smem<typename Block::Shared>();
  auto& ring = shared.ring;
  const Share cluster{static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y)}, alone{0, 1};
  const bool apart = Block::kApart && p.apart() > 0;
  const Share share = apart ? alone : cluster, parts = apart ? cluster : alone;
  const WgmmaTiles<Block, Product> tiles{p, share, parts};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Epilogue<Block, Product> epilogue(p, maps.results, shared, parts);
  if (threadIdx.x == 0) {
    prefetch_map(maps.a);
    prefetch_map(maps.b);
    ring.init(Block::kConsumers * share.blocks);
    epilogue.init();
    fence_proxy_async();
    fence_mbarrier_init();
  }
  share.blocks > 1 ? cluster_sync() : __syncthreads();  // no block is reached before its barriers are there
  await_kernel_before();
  const UnitsInTurn mine = tiles.mine();
  // If the count stayed in a register, tiles of 128 x 64 would spill.
  const auto is_mine = [&](int t) { return t < (Block::kInTurn ? mine.end : tiles.count()); };

  if (warp >= Block::kConsumers) {
    if constexpr (Block::kGives) fewer_registers<40>();
    if (lane == 0 && warp == Block::kConsumers)
      for (int filling = 0, t = mine.first; is_mine(t); t += mine.step) {
        const int2 at = tiles[t];
        const int first_k = tiles.first_k(t), end = first_k + tiles.depth(t);
        for (int k = first_k; k < end; k += kWgmmaDepth, filling++) {
          Mbarrier* const full = ring.await_empty(filling);
          mbarrier_arrive_expect(full, sizeof(Stage));
          ring[filling].copy(p, maps.a, maps.b, at.x, at.y, k, full, share);
        }
      }
    __syncwarp();  // whole warps meet, after the lane that copied
    if (apart) cluster_sync();
    norm_as_last(p, 0, shared.last);
    if (share.blocks > 1) cluster_sync();
    return;
  }

  if constexpr (Block::kGives) more_registers<232>();
  // One part is its own total: products also read sums that they do not add to, so another would take registers.
  Accumulator<kColumns> sums[kParts ? 2 : 1][kDown];
  auto &sum = sums[0], &total = sums[kParts];
  const uint64_t a = further(ring[0].a(), uniform(warp / 4) * kDown * kNextRows), b = ring[0].b();
  for (int filling = 0, t = mine.first; is_mine(t); t += mine.step) {
    epilogue.begin(tiles[t]);
    if constexpr (kParts)
#pragma unroll
      for (int m = 0; m < kDown; m++) {
        total[m] = {};
        sum[m] = {};  // so it needs no registers as a tile is finished
      }
    for (int k = 0, depth = tiles.depth(t); k < depth;) {
      const int first_of_part = k, end = kParts ? min(depth, k + p.part) : depth;
      for (; k < end; k += kWgmmaDepth, filling++) {
        ring.await_full(filling);
        multiply_stage<Stage>(sum, ring.matrix(a, filling), ring.matrix(b, filling), k > first_of_part);
        if (lane < share.blocks) ring.release_to(parts.rank + lane, filling);
      }
#pragma unroll
      for (int m = 0; m < kDown; m++)
        if constexpr (kParts)
          total[m] += sum[m];
        else
          total[m].for_each([](int, int, float& x) { x += 0.f; });  // +0 + x
    }
    if (!epilogue.has_tiles()) break;
    epilogue.finish_tile(total, tiles[t], tiles.part(t), tiles.place(t));
  }
  epilogue.end(total, tiles[mine.first]);
  norm_as_last(p, Block::kConsumers, shared.last);
  if (share.blocks > 1) cluster_sync();  // none leaves while others reach it
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
  const WgmmaMaps maps{a, b, result_maps<Block>(op, p)};
  const int64_t of_part = int64_t{blocks(op, p.rows, kRows * cluster)} * blocks(op, p.columns, kColumns);
  const unsigned tiles = blocks(op, Block::kInTurn ? of_part * ceil_div(p.depth, p.part) : of_part, 1),
                 at_once = static_cast<unsigned>(machine().multiprocessors / cluster * Block::kBlocks),
                 in_cluster = static_cast<unsigned>(std::max(cluster, p.apart()));
  launch(op, multiply_wgmma<kRows, kColumns, kParts, Product>,
         {.grid = dim3(Block::kHead || maps.results.by_boxes ? std::min(tiles, at_once) : tiles, in_cluster),
          .block = Block::kThreads,
          .smem = sizeof(typename Block::Shared),
          .cluster = in_cluster,
          .early = true},
         stream, p, maps);
}

}  // namespace pare::PARE_CUDA
