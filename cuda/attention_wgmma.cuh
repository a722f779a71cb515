// Attention forward of packed sequences by tensor copies and wgmma, on compute capability 9.0: what the mma.sync kernel
// of attn_fwd.cu computes, bit for bit, for head dims up to 128.
//
// The order is that of Rows16, whose softmax this uses: one wgmma rounds like one mma.sync, scores and outputs are
// chains of them over the same k16 steps, and the output is scaled between the same two products.  Only the tile of
// query rows is larger: a V that is not finite reaches the earlier rows of that one.
#pragma once
#include "attention_mma.cuh"
#include "ptx90.cuh"

namespace pare::PARE_CUDA {

// A block computes query rows of a head, each warpgroup 64, with a warp that brings keys and values for them: as many
// as registers allow.
template <int kD>
struct WgmmaAttention {
  static constexpr int kRows = kD == 64 ? 192 : 128, kConsumers = kRows / 16, kThreads = kConsumers * 32 + 32;
  static constexpr int kPanels = kD / 64;  // of 64 channels
  static constexpr int kStages = 4;        // with the queries 88 or 160 KiB of shared memory
  // A warpgroup awaits block i + 1 before it releases block i - 1.  It does not release its last block, behind which
  // the tile has at most one for each other warpgroup.
  static_assert(kStages >= 3 && kStages >= kRows / 64);

  struct Stage {
    alignas(1024) bf16 k[kPanels][kSlots * 64];  // [slot][channel], by rows of 128 bytes
    bf16 v[kPanels][kSlots * 64];
  };
  struct Shared {
    alignas(1024) bf16 q[kPanels][kRows * 64];
    Stage stages[kStages];
    Mbarrier q_full, full[kStages], empty[kStages];
  };
  struct Maps {  // of [rows, heads, D]; boxes of 64 channels of a head, of kRows or kSlots rows
    CUtensorMap q, k, v, pk, pv;
  };
};

// An accumulator fragment as wgmma names its registers.
template <int kTiles>
__device__ __forceinline__ auto& registers(float (&d)[kTiles][4]) {
  return reinterpret_cast<float(&)[kTiles * 4]>(d);
}

// o and lse as in attn_fwd.
template <int kD>
__global__ void __launch_bounds__(WgmmaAttention<kD>::kThreads)
    attn_wgmma(bf16* o, float* lse, const Packed<bf16> x,
               const __grid_constant__ typename WgmmaAttention<kD>::Maps maps) {
#ifdef PARE_SM90A
  using Block = WgmmaAttention<kD>;
  constexpr int kRows = Block::kRows, kStages = Block::kStages, kPanels = Block::kPanels;
  auto& s = *dynamic_smem<typename Block::Shared>();
  // Backwards: the later tiles of a sequence see more slots, so they take longer.
  const Tile t = find_tile<kRows>(x.segments, x.n_segments, gridDim.x - 1 - blockIdx.x);
  if (t.len == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, kv = head / x.group;
  const auto seen = [&](int end) { return t.parent_len + min(t.len, t.first + end); };  // slots, by tile rows [0, end)
  const auto blocks_of = [](int slots) { return (slots + kSlots - 1) / kSlots; };
  if (threadIdx.x == 0) {
    const int consumers = (min(kRows, t.len - t.first) + 63) / 64 * 4;  // warps; a warpgroup without rows ends
    mbarrier_init(&s.q_full, 1);
    for (int i = 0; i < kStages; i++) mbarrier_init(&s.full[i], 1), mbarrier_init(&s.empty[i], consumers);
    fence_proxy_async();
  }
  __syncthreads();

  if (warp == Block::kConsumers) {
    if (lane == 0) {
      mbarrier_arrive_expect(&s.q_full, sizeof(s.q));
      for (int p = 0; p < kPanels; p++) tensor_copy(s.q[p], maps.q, p * 64, head, t.row + t.first, &s.q_full);
    }
    const int slots = seen(kRows);
    for (int i = 0; i < blocks_of(slots); i++) {
      const int begin = i * kSlots, end = begin + kSlots;
      auto& stage = s.stages[i % kStages];
      Mbarrier* const full = &s.full[i % kStages];
      mbarrier_wait(&s.empty[i % kStages], (i / kStages + 1) % 2);
      const bool parents = end <= t.parent_len;
      if (parents || (begin >= t.parent_len && end <= t.parent_len + t.len)) {  // rows that follow one another
        const int row = begin + (parents ? t.parent_row : t.row - t.parent_len);
        if (lane == 0) {
          mbarrier_arrive_expect(full, sizeof(stage));
          for (int p = 0; p < kPanels; p++) {
            tensor_copy(stage.k[p], parents ? maps.pk : maps.k, p * 64, kv, row, full);
            tensor_copy(stage.v[p], parents ? maps.pv : maps.v, p * 64, kv, row, full);
          }
        }
      } else {  // the end of a parent or of the sequence: row by row, as what lies behind must not come in
        const auto load = [&](bf16* to, int p, auto row) {
          load_tile<kSlots, 32>(
              SharedTile<64>{to}, x.q.p, slots - begin, x.d - p * 64, true,
              [&](int r) { return row(begin + r) + p * 64; }, lane);
        };
        for (int p = 0; p < kPanels; p++) {
          load(stage.k[p], p, [&](int slot) { return x.key(t, kv, slot); });
          load(stage.v[p], p, [&](int slot) { return x.value(t, kv, slot); });
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full);
      }
    }
    return;
  }

  const int group = warp / 4 * 64, first = t.first + warp * 16;  // of the tile's rows; of the segment's
  if (t.first + group >= t.len) return;
  Rows16<kD> r;
  float scores[kSlots / 8][4], fix[2];
  uint32_t weights[kSlots / 16][4];
  const auto await = [&](int i) { mbarrier_wait(&s.full[i % kStages], i / kStages % 2); };
  // Begins the scores of block i.
  const auto multiply_keys = [&](int i) {
    const uint64_t q = matrix_descriptor(s.q[0] + group * 64, Swizzle::bytes_128, 1024),
                   k = matrix_descriptor(s.stages[i % kStages].k, Swizzle::bytes_128, 1024);
    constexpr uint64_t kNextQ = kRows * 8, kNextK = kSlots * 8;  // from panel to panel, in units of 16 bytes
#pragma unroll
    for (auto& tile : scores)
      for (float& x : tile) x = 0;
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kD / 16; c++)
      wgmma<false>(registers(scores), q + c / 4 * kNextQ + c % 4 * 2, k + c / 4 * kNextK + c % 4 * 2);
    wgmma_commit();
  };
  // Begins to add those of the values of block i.
  const auto multiply_values = [&](int i) {
    const uint64_t v = matrix_descriptor(s.stages[i % kStages].v, Swizzle::bytes_128, 1024, kSlots * 128);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kSlots / 16; n++) wgmma<true>(registers(r.acc), weights[n], v + n * 128);
    wgmma_commit();
  };
  const auto softmax = [&](int i) {
    const int begin = i * kSlots;
#pragma unroll
    for (int h = 0; h < 2; h++)
      fix[h] = r.softmax(
          h, scores, x.scale, [&](int row) { return t.parent_len + first + row + 1 - begin; },
          [](int, float z) { return z; });
  };
  const auto take_weights = [&] {
#pragma unroll
    for (int h = 0; h < 2; h++) r.rescale(h, fix[h]);
#pragma unroll
    for (int n = 0; n < kSlots / 16; n++) pack_weights(weights[n], &scores[n * 2]);
  };
  mbarrier_wait(&s.q_full, 0);
  await(0);
  multiply_keys(0);
  wgmma_wait<0>(registers(scores));
  softmax(0);
  take_weights();
  const int n_blocks = blocks_of(seen(group + 64));
  if (n_blocks > 1) await(1);
  for (int i = 1; i < n_blocks; i++) {
    multiply_keys(i);
    multiply_values(i - 1);
    wgmma_wait<1>(registers(scores));
    softmax(i);  // while the values are multiplied
    // Here, as a branch must lie between: ptxas would move the wait for the values to before the softmax.
    if (i + 1 < n_blocks) await(i + 1);
    wgmma_wait<0>(registers(r.acc), weights);
    if (lane == 0) mbarrier_arrive(&s.empty[(i - 1) % kStages]);
    take_weights();
  }
  multiply_values(n_blocks - 1);
  wgmma_wait<0>(registers(r.acc), weights);
  r.write(
      t.len - first,
      [&](int row, float log_sum) {
        const int64_t at = int64_t{t.row + first + row} * x.heads + head;
        if (lane % 4 == 0) lse[at] = log_sum;
        return o + at * x.d;
      },
      x.d);
#else
  __trap();
#endif
}

// Can it compute this?  aligned: as rows_aligned16 says.  Tensor maps want whole heads between rows.
inline bool suits_attn_wgmma(const Packed<bf16>& x, bool aligned) {
  for (const Matrix<const bf16>& m : {x.q, x.k, x.v, x.pk, x.pv}) aligned = aligned && m.stride % x.d == 0;
  return aligned && x.d <= 128 && !x.lists;
}
template <int kD>
void launch_attn_wgmma(const char* op, bf16* o, float* lse, const Packed<bf16>& x, int64_t rows, int64_t parent_rows,
                       Stream stream) {
  using Block = WgmmaAttention<kD>;
  const auto map = [&](const Matrix<const bf16>& m, int64_t n, int heads, uint32_t box) {
    const auto size = [](int64_t i) { return static_cast<uint64_t>(i); };
    return tensor_map<3>(op, m.p, {size(x.d), size(heads), size(n)}, {size(x.d) * 2, size(m.stride) * 2}, {64, 1, box},
                         Swizzle::bytes_128);
  };
  const CUtensorMap k = map(x.k, rows, x.kv_heads, kSlots), v = map(x.v, rows, x.kv_heads, kSlots);
  typename Block::Maps maps{map(x.q, rows, x.heads, Block::kRows), k, v, k, v};
  if (parent_rows > 0)
    maps.pk = map(x.pk, parent_rows, x.kv_heads, kSlots), maps.pv = map(x.pv, parent_rows, x.kv_heads, kSlots);
  launch(
      op, attn_wgmma<kD>,
      {.grid = tile_grid(op, x, rows, Block::kRows), .block = Block::kThreads, .smem = sizeof(typename Block::Shared)},
      stream, o, lse, x, maps);
}

}  // namespace pare::PARE_CUDA
