// Attention forward of packed sequences by tensor copies and wgmma, on compute capability 9.0: what the mma.sync kernel
// of attention_fwd.cu computes, bit for bit, for head dims up to 128.
//
// The order is that of Rows16, whose softmax this uses: one wgmma rounds like one mma.sync, scores and outputs are
// chains of them over the same k16 steps, and the output is scaled between the same two products.  Only the tile of
// query rows is larger: a V that is not finite reaches the earlier rows of that one.
#pragma once
#include "attention_mma.cuh"
#include "ring.cuh"

namespace pare::PARE_CUDA {

// ---- what forward and backward (attention_bwd_wgmma.cuh) share

// Rows of a head in shared memory: [row][channel] by panels of 64 channels, rows of 128 bytes.
template <int kD, int kRows>
using HeadRows = bf16[kD / 64][kRows * 64];

// The map of [rows, heads, D], whose boxes are `box` rows of 64 channels of a head.
inline CUtensorMap heads_map(const char* op, const Matrix<const bf16>& m, int64_t rows, int heads, int head_dim,
                             int box) {
  const auto size = [](int64_t i) { return static_cast<uint64_t>(i); };
  return tensor_map<3>(op, m.p, {size(head_dim), size(heads), size(rows)}, {size(head_dim) * 2, size(m.stride) * 2},
                       {64, 1, static_cast<uint32_t>(box)}, Swizzle::bytes_128);
}
// Brings the rows from `row` on, by one thread.
template <int kPanels, int kElements>
__device__ __forceinline__ void copy_rows(bf16 (&to)[kPanels][kElements], const CUtensorMap& map, int head, int row,
                                          Mbarrier* full) {
  for (int p = 0; p < kPanels; p++) tensor_copy(to[p], map, p * 64, head, row, full);
}
// Brings `rows` rows of d channels and zeros, by a warp: where what lies behind must not come in.  row(i): address of
// row i.
template <int kPanels, int kElements, class Row>
__device__ __forceinline__ void load_rows(bf16 (&to)[kPanels][kElements], const bf16* any, int rows, int head_dim,
                                          Row row) {
  for (int p = 0; p < kPanels; p++)
    load_tile<kElements / 64, 32>(
        SharedTile<64>{to[p]}, any, rows, head_dim - p * 64, true, [&](int r) { return row(r) + p * 64; },
        threadIdx.x % 32);
}
// Behind load_rows: all of it lies there, for wgmma too.
__device__ __forceinline__ void loaded(Mbarrier* full) {
  cp_async_commit();
  cp_async_wait<0>();
  fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
}

// A block of keys and values.
template <int kD>
struct SlotStage {
  alignas(1024) HeadRows<kD, kSlots> k;
  HeadRows<kD, kSlots> v;
};
struct SlotMaps {
  CUtensorMap k, v, pk, pv;
};
inline SlotMaps slot_maps(const char* op, const Packed<bf16>& x, int64_t rows, int64_t parent_rows, int box) {
  const auto map = [&](const Matrix<const bf16>& m, int64_t n) {
    return heads_map(op, m, n, x.kv_heads, x.head_dim, box);
  };
  SlotMaps maps{map(x.k, rows), map(x.v, rows), {}, {}};
  if (parent_rows > 0) maps.pk = map(x.pk, parent_rows), maps.pv = map(x.pv, parent_rows);
  return maps;
}
// Those that the tile's slots are copied by.
__device__ __forceinline__ void prefetch_maps(const SlotMaps& maps, const Tile& t) {
  prefetch_map(maps.k), prefetch_map(maps.v);
  if (t.parent_len > 0) prefetch_map(maps.pk), prefetch_map(maps.pv);
}
// Brings the block of slots from `begin` on, of `slots` slots, by a warp.
template <int kD>
__device__ __forceinline__ void bring_slots(SlotStage<kD>& stage, const Packed<bf16>& x, const SlotMaps& maps,
                                            const Tile& t, int kv, int begin, int slots, Mbarrier* full) {
  const int end = begin + kSlots;
  const bool parents = end <= t.parent_len;
  if (parents || (begin >= t.parent_len && end <= t.parent_len + t.len)) {  // rows that follow one another
    const int row = begin + (parents ? t.parent_row : t.row - t.parent_len);
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive_expect(full, sizeof(stage));
      copy_rows(stage.k, parents ? maps.pk : maps.k, kv, row, full);
      copy_rows(stage.v, parents ? maps.pv : maps.v, kv, row, full);
    }
  } else {  // the end of a parent or of the sequence
    load_rows(stage.k, x.k.p, slots - begin, x.head_dim, [&](int r) { return x.key(t, kv, begin + r); });
    load_rows(stage.v, x.k.p, slots - begin, x.head_dim, [&](int r) { return x.value(t, kv, begin + r); });
    loaded(full);
  }
}

// What a block that owns kRows query rows of a head computes with: the slots that they see, in blocks of kSlots.
template <int kRows>
struct QueryBlock : HeadTile<kRows> {
  using HeadTile<kRows>::HeadTile, HeadTile<kRows>::kv, Tile::parent_len, Tile::len, Tile::first;
  // That rows [0, end) of the tile see.
  __device__ int slots(int end) const { return parent_len + min(len, first + end); }
  __device__ int blocks(int end) const { return ceil_div(slots(end), kSlots); }

  // By one thread: the barriers, of the rows and of the slots.
  template <class Slots>
  __device__ void init(Mbarrier* rows_full, Slots& ring) const {
    mbarrier_init(rows_full, 1);
    ring.init(ceil_div(min(kRows, len - first), 64) * 4);  // warps; a warpgroup without rows ends
    fence_proxy_async();
  }
  // By a warp: brings the slots.
  template <class Slots>
  __device__ void bring(Slots& ring, const Packed<bf16>& x, const SlotMaps& maps) const {
    for (int i = 0; i < blocks(kRows); i++) {
      Mbarrier* const full = ring.await_empty(i);
      bring_slots(ring[i], x, maps, *this, kv, i * kSlots, slots(kRows), full);
    }
  }
};

// Begins sum += a b^T for 64 rows of a, from `row` on.
template <int kN, int kPanels, int kA, int kB>
__device__ __forceinline__ void begin_dots(Accumulator<kN>& sum, const bf16 (&a)[kPanels][kA], int row,
                                           const bf16 (&b)[kPanels][kB]) {
  static_assert(kB == kN * 64);
  const uint64_t x = matrix_descriptor(a[0] + row * 64, Swizzle::bytes_128, 1024),
                 y = matrix_descriptor(b, Swizzle::bytes_128, 1024);
  constexpr uint64_t kNextX = kA / 8, kNextY = kB / 8;  // from panel to panel, in units of 16 bytes
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < kPanels * 4; c++)
    wgmma<false>(sum.registers(), x + c / 4 * kNextX + c % 4 * 2, y + c / 4 * kNextY + c % 4 * 2);
  wgmma_commit();
}
// Begins sum += w b: weights of 64 rows, which stay in their registers until the wait, times all rows of b.
template <int kC, int kSteps, int kPanels, int kB>
__device__ __forceinline__ void begin_weighted(Accumulator<kC>& sum, const uint32_t (&w)[kSteps][4],
                                               const bf16 (&b)[kPanels][kB]) {
  static_assert(kPanels == kC / 64 && kB == kSteps * 16 * 64);
  const uint64_t y = matrix_descriptor(b, Swizzle::bytes_128, 1024, kB * 2);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < kSteps; n++) wgmma<true>(sum.registers(), w[n], y + n * 128);
  wgmma_commit();
}

// Can these be copied so?  aligned: as rows_aligned16 says.  Tensor maps want whole heads between rows.
inline bool suits_tensor_copies(const Packed<bf16>& x, bool aligned) {
  for (const Matrix<const bf16>& m : {x.q, x.k, x.v, x.pk, x.pv}) aligned = aligned && m.stride % x.head_dim == 0;
  return aligned && x.head_dim <= 128 && !x.lists;
}

// ---- forward

// A block computes query rows of a head, each warpgroup 64, with a warp that brings keys and values for them: as many
// as registers allow.
template <int kD>
struct WgmmaAttention {
  static constexpr int kRows = kD == 64 ? 192 : 128, kConsumers = kRows / 16, kThreads = kConsumers * 32 + 32;
  static constexpr int kStages = 4;  // with the queries 88 or 160 KiB of shared memory
  // A warpgroup awaits block i + 1 before it releases block i - 1.  It does not release its last block, behind which
  // the tile has at most one for each other warpgroup.
  static_assert(kStages >= 3 && kStages >= kRows / 64);

  struct Shared {
    alignas(1024) HeadRows<kD, kRows> q;
    Ring<SlotStage<kD>, kStages> ring;
    Mbarrier q_full;
  };
};

// o and lse as in attn_fwd.
template <int kD>
__global__ void __launch_bounds__(WgmmaAttention<kD>::kThreads)
    attn_wgmma(bf16* o, float* lse, const Packed<bf16> x, const __grid_constant__ CUtensorMap q,
               const __grid_constant__ SlotMaps maps) {
#ifdef PARE_SM90A
  using Block = WgmmaAttention<kD>;
  auto& s = *dynamic_smem<typename Block::Shared>();
  const QueryBlock<Block::kRows> t(x);
  if (t.len == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_map(q), prefetch_maps(maps, t);
    t.init(&s.q_full, s.ring);
  }
  __syncthreads();

  if (warp == Block::kConsumers) {
    if (lane == 0) {
      mbarrier_arrive_expect(&s.q_full, sizeof(s.q));
      copy_rows(s.q, q, t.head, t.row + t.first, &s.q_full);
    }
    t.bring(s.ring, x, maps);
    return;
  }

  const int group = warp / 4 * 64, first = t.first + warp * 16;  // of the tile's rows; of the segment's
  if (t.first + group >= t.len) return;
  Rows16<kD> r;
  Accumulator<kSlots> scores;
  PerRow<float> fix;
  uint32_t weights[kSlots / 16][4];
  const auto multiply_keys = [&](int i) {
    wgmma_clear(scores.registers());
    begin_dots(scores, s.q, group, s.ring[i].k);
  };
  const auto multiply_values = [&](int i) { begin_weighted(r.acc, weights, s.ring[i].v); };
  const auto softmax = [&](int i) {
    const int before = t.parent_len + first + 1 - i * kSlots;  // slots that row 0 of the warp sees
    for_rows([&](LaneRow row) { fix[row] = r.weigh(row, scores, x.softmax(), before + row); });
  };
  const auto take_weights = [&] {
    for_rows([&](LaneRow row) { r.acc.scale(row, fix[row]); });
    scores.round(weights);
  };
  mbarrier_wait(&s.q_full, 0);
  s.ring.await_full(0);
  multiply_keys(0);
  wgmma_wait<0>(scores.registers());
  softmax(0);
  take_weights();
  const int n_blocks = t.blocks(group + 64);
  if (n_blocks > 1) s.ring.await_full(1);
  for (int i = 1; i < n_blocks; i++) {
    multiply_keys(i);
    multiply_values(i - 1);
    wgmma_wait<1>(scores.registers());
    softmax(i);  // while the values are multiplied
    // Here, as a branch must lie between: ptxas would move the wait for the values to before the softmax.
    if (i + 1 < n_blocks) s.ring.await_full(i + 1);
    wgmma_wait<0>(r.acc.registers(), weights);
    if (lane == 0) s.ring.release(i - 1);
    take_weights();
  }
  multiply_values(n_blocks - 1);
  wgmma_wait<0>(r.acc.registers(), weights);
  r.write(
      t.len - first,
      [&](int row, float log_sum) {
        const int64_t at = int64_t{t.row + first + row} * x.heads + t.head;
        if (leads_quad()) lse[at] = log_sum;
        return o + at * x.head_dim;
      },
      x.head_dim);
#else
  __trap();
#endif
}

template <int kD>
void launch_attn_wgmma(const char* op, bf16* o, float* lse, const Packed<bf16>& x, int64_t rows, int64_t parent_rows,
                       Stream stream) {
  using Block = WgmmaAttention<kD>;
  launch(
      op, attn_wgmma<kD>,
      {.grid = tile_grid(op, x, rows, Block::kRows), .block = Block::kThreads, .smem = sizeof(typename Block::Shared)},
      stream, o, lse, x, heads_map(op, x.q, rows, x.heads, x.head_dim, Block::kRows),
      slot_maps(op, x, rows, parent_rows, kSlots));
}

}  // namespace pare::PARE_CUDA
