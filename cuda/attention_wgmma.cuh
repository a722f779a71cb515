// Attention forward of packed sequences by tensor copies and wgmma, on compute capability 9.0, for head dims up to 128,
// with the bits of the mma.sync kernel of attention_fwd.cu.
//
//   o = sum_s p_s v_s / sum_s p_s,  p_s = 2^(scale log2(e) q.k_s - max)
//
// q, o [N, H, D]; k, v [N, K, D]; lse [N, H].  A block has 128 query rows of a head, a turn 128 slots:
//
//            slots, 128 a turn ->
//            +----+----+----+-...-+----+
//   64 rows  |    |    |    |     |\   |   warpgroup 0
//            |    |    |    |     | \  |
//   64 rows  |    |    |    |     |  \ |   warpgroup 1
//            +----+----+----+-...-+---\+   masks only in blocks where a row ends
//
//   time ->  0:  q.k  p v      softmax     q.k  p v      softmax
//            1:            q.k  p v     softmax     q.k  p v      the tensor cores always have work
//
// Order: that of Rows16, with its softmax.  One wgmma rounds like one mma.sync, scores and outputs are chains of them
// over the same k16 steps, and the output is scaled between the same two products.  Only the tile of query rows is
// larger: a V that is not finite reaches the earlier rows of that one.
//
// Bytes: q and o once, k and v once per tile (from L2 for the most part).  Runs of rows come by tensor copies; rows
// that a list names are gathered, a strip of 32 slots by each of four warps.  Limited by the tensor cores, 2048 clocks
// of a turn at D = 128, and by the instructions of two warps a scheduler, about 2000.
#pragma once
#include "attention_mma.cuh"
#include "ring.cuh"

namespace pare::PARE_CUDA {

// ---- shared by forward and backward (attention_bwd_wgmma.cuh)

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
// Brings a box of rows from `row` on to those from `first` on, by one thread.
template <int kPanels, int kElements>
__device__ __forceinline__ void copy_rows(bf16 (&to)[kPanels][kElements], const CUtensorMap& map, int head, int row,
                                          Mbarrier* full, int first = 0) {
  for (int p = 0; p < kPanels; p++) tensor_copy(to[p] + first * 64, map, p * 64, head, row, full);
}
// Brings `rows` rows of d channels, a multiple of 8, and zeros to the kRows rows from `first` on, by a warp: for rows
// whose successors must not come in.  row(i): address of row i; all lanes ask at once, also for rows past the last.
template <int kRows = 64, int kPanels, int kElements, class Row>
__device__ __forceinline__ void load_rows(bf16 (&to)[kPanels][kElements], unsigned first, int rows, int head_dim,
                                          Row row) {
  constexpr unsigned kChunks = kPanels * 8;
  const unsigned lane = threadIdx.x % 32, c = lane % kChunks * 8;  // its channels
  const SharedTile<64> panel{to[c / 64]};
#pragma unroll(kRows < 64 ? 2 : 1)  // as registers are few
  for (unsigned r = lane / kChunks; r < kRows; r += 32 / kChunks) {
    const bool there = static_cast<int>(r) < rows && static_cast<int>(c) < head_dim;
    cp_async_16(panel.at(first + r, c % 64), row(static_cast<int>(r)) + c, there ? 16 : 0);
  }
}

// Keys or values of kRows slots.
template <int kD, int kRows>
struct Slots {
  alignas(1024) HeadRows<kD, kRows> rows;
};
struct SlotMaps {
  CUtensorMap k, v, pk, pv;
};
inline SlotMaps slot_maps(const char* op, const Packed<bf16>& x, int64_t rows, int64_t parent_rows) {
  const auto map = [&](const Matrix<const bf16>& m, int64_t n) {
    return heads_map(op, m, n, x.kv_heads, x.head_dim, kSlots);
  };
  SlotMaps maps{map(x.k, rows), map(x.v, rows), {}, {}};
  if (parent_rows > 0) {
    maps.pk = map(x.pk, parent_rows);
    maps.pv = map(x.pv, parent_rows);
  }
  return maps;
}
// Those that the tile's slots are copied by.
__device__ __forceinline__ void prefetch_maps(const SlotMaps& maps, const Tile& t) {
  prefetch_map(maps.k);
  prefetch_map(maps.v);
  if (t.parent_len > 0) {
    prefetch_map(maps.pk);
    prefetch_map(maps.pv);
  }
}
// Brings keys or values of the slots from `begin` on, of `slots`, and zeros, by warps with a strip of 32 each, of which
// a lane knows the place of its slot.  at(place): an address.  Returns whether the warp gathers its strip by cp.async;
// else it has arrived at `full`.
template <int kPanels, int kElements, class At>
__device__ __forceinline__ bool bring_slots(bf16 (&to)[kPanels][kElements], const Packed<bf16>& x,
                                            const CUtensorMap& own, const CUtensorMap& parent, const Tile& t, int kv,
                                            int begin, int slots, int place, Mbarrier* full, At at) {
  constexpr int kAll = kElements / 64;
  const int strip = threadIdx.x / 32 % (kAll / 32) * 32, piece = strip / kSlots * kSlots, first = begin + piece;
  const bool of_parent = first + kSlots <= t.parent_len;
  if (of_parent ? !x.lists : first >= t.parent_len && first + kSlots <= t.parent_len + t.len) {
    // Rows that follow one another: the first warp of the piece copies it.
    if (threadIdx.x % 32 != 0) return false;
    if (strip == piece) {
      mbarrier_arrive_expect(full, sizeof(to) * kSlots / kAll);
      copy_rows(to, of_parent ? parent : own, kv, first + (of_parent ? t.parent_row : t.row - t.parent_len), full,
                piece);
    } else {
      mbarrier_arrive(full);
    }
    return false;
  }
  const auto mine = reinterpret_cast<uintptr_t>(at(place));
  load_rows<32>(to, strip, slots - begin - strip, x.head_dim,
                [&](int r) { return reinterpret_cast<const bf16*>(__shfl_sync(kAllLanes, mine, r)); });
  return true;
}
template <int kPanels, int kElements>
__device__ __forceinline__ bool bring_keys(bf16 (&to)[kPanels][kElements], const Packed<bf16>& x, const SlotMaps& maps,
                                           const Tile& t, int kv, int begin, int slots, int place, Mbarrier* full) {
  return bring_slots(to, x, maps.k, maps.pk, t, kv, begin, slots, place, full,
                     [&](int place) { return x.key_at(place, kv); });
}
template <int kPanels, int kElements>
__device__ __forceinline__ bool bring_values(bf16 (&to)[kPanels][kElements], const Packed<bf16>& x,
                                             const SlotMaps& maps, const Tile& t, int kv, int begin, int slots,
                                             int place, Mbarrier* full) {
  return bring_slots(to, x, maps.v, maps.pv, t, kv, begin, slots, place, full,
                     [&](int place) { return x.value_at(place, kv); });
}
// A warp waits for its cp.async copies to one stage when it has begun those to the next.
struct Gathers {
  Mbarrier* under_way = nullptr;
  // Called after the warp has begun to fill `full`: by cp.async or, without `gathers`, by tensor copies.
  __device__ __forceinline__ void begun(bool gathers, Mbarrier* full) {
    if (gathers) cp_async_commit();
    if (under_way) {
      gathers ? cp_async_wait<1>() : cp_async_wait<0>();
      fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(under_way);
    }
    under_way = gathers ? full : nullptr;
  }
  __device__ __forceinline__ void end() { begun(false, nullptr); }
};

// A tile of kRows query rows of a head, and the slots that they see.
template <int kRows>
struct QueryBlock : HeadTile<kRows> {
  using HeadTile<kRows>::HeadTile, HeadTile<kRows>::kv, Tile::parent_len, Tile::len, Tile::first;
  // That rows [0, end) of the tile see.
  __device__ int slots(int end) const { return parent_len + min(len, first + end); }
  // Warps that read keys and values; a warpgroup without rows ends.
  __device__ int readers() const { return ceil_div(min(kRows, len - first), 64) * 4; }
  __device__ int place(const Packed<bf16>& x, int s) const { return x.place(*this, kv, s); }
};

// Begins sum += a b^T for 64 rows of a, from `row` on.
template <int kN, int kPanels, int kA, int kB>
__device__ __forceinline__ void begin_dots(Accumulator<kN>& sum, const bf16 (&a)[kPanels][kA], int row,
                                           const bf16 (&b)[kPanels][kB]) {
  static_assert(kB == kN * 64);
  const uint64_t x = matrix_descriptor(a[0] + row * 64, Swizzle::bytes_128, 1024),
                 y = matrix_descriptor(b, Swizzle::bytes_128, 1024);
  constexpr int kNextX = kA / 8, kNextY = kB / 8;  // from panel to panel, in units of 16 bytes
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < kPanels * 4; c++)
    wgmma<false>(sum.registers(), further(x, c / 4 * kNextX + c % 4 * 2), further(y, c / 4 * kNextY + c % 4 * 2));
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
  for (int n = 0; n < kSteps; n++) wgmma<true>(sum.registers(), w[n], further(y, n * 128));
  wgmma_commit();
}

// Can these be copied so?  aligned: as rows_aligned16 says.  Tensor maps want whole heads between rows.
inline bool suits_tensor_copies(const Packed<bf16>& x, bool aligned) {
  for (const Matrix<const bf16>& m : {x.q, x.k, x.v, x.pk, x.pv}) aligned = aligned && m.stride % x.head_dim == 0;
  return aligned && x.head_dim <= 128;
}

// ---- forward

// A block computes query rows of a head, each warpgroup 64.  Another brings keys and values for them, and leaves them
// its registers: scores of 128 slots and 128 channels of the output alone take 128 a thread.
template <int kD>
struct WgmmaAttention {
  static constexpr int kRows = 128, kConsumers = kRows / 16, kProducers = 4, kThreads = (kConsumers + kProducers) * 32;
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  // Block i + 1 of the keys is awaited while block i of the values is used.  A warpgroup leaves its last blocks, after
  // which the tile has at most one for the others.
  static constexpr int kStages = 2;

  struct Shared {  // 112 or 224 KiB
    alignas(1024) HeadRows<kD, kRows> q;
    Ring<Slots<kD, kBlock16>, kStages> k, v;
    float2 total[kConsumers][kD / 4][32];  // of each warp: outputs of the cuts before, by pair and lane; then of all
    Mbarrier q_full;
  };
};

// o and lse as in attn_fwd; o is 16-byte aligned.
template <int kD>
__global__ void __launch_bounds__(WgmmaAttention<kD>::kThreads, 1)
    attn_wgmma(bf16* o, float* lse, const Packed<bf16> x, const __grid_constant__ CUtensorMap q,
               const __grid_constant__ SlotMaps maps) {
#ifdef PARE_SM90A
  using Block = WgmmaAttention<kD>;
  auto& s = *dynamic_smem<typename Block::Shared>();
  const QueryBlock<Block::kRows> t(x);
  if (t.len == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_map(q);
    prefetch_maps(maps, t);
    mbarrier_init(&s.q_full, 1);
    s.k.init(t.readers(), Block::kProducers);
    s.v.init(t.readers(), Block::kProducers);
    fence_proxy_async();
  }
  __syncthreads();
  const auto blocks = [&](int end) { return ceil_div(t.slots(end), kBlock16); };  // that rows [0, end) see

  if (warp >= Block::kConsumers) {
    fewer_registers<Block::kProducerRegisters>();
    if (threadIdx.x == Block::kConsumers * 32) {
      mbarrier_arrive_expect(&s.q_full, sizeof(s.q));
      copy_rows(s.q, q, t.head, t.row + t.first, &s.q_full);
    }
    Gathers gathers;
    const int n = blocks(Block::kRows), slots = t.slots(Block::kRows),
              mine = (warp - Block::kConsumers) * 32 + lane;  // of a block's slots
    int of_keys = t.place(x, mine), of_values = 0;
    for (int i = 0; i <= n; i++) {  // in the order in which stages become empty
      if (i < n) {
        Mbarrier* const full = s.k.await_empty(i);
        gathers.begun(bring_keys(s.k[i].rows, x, maps, t, t.kv, i * kBlock16, slots, of_keys, full), full);
      }
      const int next = t.place(x, (i + 1) * kBlock16 + mine);  // while the values are brought
      if (i > 0) {
        Mbarrier* const full = s.v.await_empty(i - 1);
        gathers.begun(bring_values(s.v[i - 1].rows, x, maps, t, t.kv, (i - 1) * kBlock16, slots, of_values, full),
                      full);
      }
      of_values = of_keys;
      of_keys = next;
    }
    gathers.end();
    return;
  }

  const int half = uniform(warp / 4), group = half * 64;  // of the tile's rows
  const int first = t.first + warp * 16;                  // of the segment's
  if (t.first + group >= t.len) return;
  more_registers<Block::kConsumerRegisters>();
  SoftmaxRows r;
  Accumulator<kD> acc = {};
  Accumulator<kBlock16> scores;
  PerRow<float> fix;
  uint32_t weights[kBlock16 / 16][4];
  const auto total = [&](int i) -> float2& { return s.total[warp][i][lane]; };
  const auto multiply_keys = [&](int i) {
    wgmma_clear(scores.registers());
    begin_dots(scores, s.q, group, s.k[i].rows);
  };
  const auto multiply_values = [&](int i) { begin_weighted(acc, weights, s.v[i].rows); };
  const auto softmax = [&](int i, auto masked) {
    const int before = t.parent_len + first + 1 - i * kBlock16;  // slots that row 0 of the warp sees
    fix = r.weigh<decltype(masked)::value>(scores, x.softmax(), [&](int row) { return before + row; });
  };
  // Blocks that all rows of the warpgroup see whole; all of its blocks; those of both warpgroups, of which the second
  // has more.
  const int whole = uniform((t.parent_len + t.first + group + 1) / kBlock16), n = uniform(blocks(group + 64)),
            both = uniform(t.first + 64 < t.len ? blocks(64) : 0);
  const auto await_keys = [&](int i) {
    if (i < n) s.k.await_full(i);
  };
  const auto turn = [&](int i, auto masked) {
    // Each begins its products when the other has begun its own, under which its softmax then falls.
    if (i < both) barrier_wait(1 + half, Block::kConsumers * 32);
    multiply_keys(i);
    s.v.await_full(i - 1);
    multiply_values(i - 1);
    if (i + half < both) barrier_arrive(2 - half, Block::kConsumers * 32);
    wgmma_wait<1>(scores.registers());
    if (lane == 0) s.k.release(i);
    PerRow<CutFactors> factors = {};
    if (ends_cut(i)) factors = r.end_cut();
    softmax(i, masked);  // while the values are multiplied
    // Here, as a branch must lie between: ptxas would move the wait for the values to before the softmax.
    await_keys(i + 1);
    wgmma_wait<0>(acc.registers(), weights);
    if (lane == 0) s.v.release(i - 1);
    scores.round(weights);
    if (ends_cut(i))  // with few registers in use
      r.add_outputs(factors, acc.registers(), total);
    else
      for_rows([&](LaneRow row) { acc.scale(row, fix[row]); });
  };
  if (half == 1 && both > 1) barrier_arrive(1, Block::kConsumers * 32);
  mbarrier_wait(&s.q_full, 0);
  await_keys(0);
  multiply_keys(0);
  wgmma_wait<0>(scores.registers());
  if (lane == 0) s.k.release(0);
  softmax(0, std::true_type{});
  await_keys(1);
  scores.round(weights);
  int i = 1;
  for (; i < whole; i++) turn(i, std::false_type{});
  for (; i < n; i++) turn(i, std::true_type{});
  s.v.await_full(n - 1);
  multiply_values(n - 1);
  wgmma_wait<0>(acc.registers(), weights);
  r.finish(acc.registers(), total);

  // The results leave by rows, through the warp's totals.
  const int64_t row = int64_t{t.row + first} * x.heads + t.head;  // of o and lse; the next is x.heads further on
  const int rows = t.len - first;
  for_rows([&](LaneRow i) {
    acc.scale(i, 1.f / r.whole_sum[i]);
    if (leads_quad() && i < rows) lse[row + int64_t{i} * x.heads] = r.log_sum(i);
  });
  const SharedTile<kD> results{reinterpret_cast<bf16*>(s.total[warp])};
  __syncwarp();  // the totals have been read
#pragma unroll
  for (int c = 0; c < kD; c += 16) {
    uint32_t rounded[4];
    acc.round(rounded, c);
    stmatrix_x4(results.at(lane % 16, c + lane / 16 * 8), rounded);
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * kD / 8; i += 32) {
    const int j = i / (kD / 8), c = i % (kD / 8) * 8;
    if (j < rows && c < x.head_dim)
      *reinterpret_cast<uint4*>(o + (row + int64_t{j} * x.heads) * x.head_dim + c) =
          *reinterpret_cast<const uint4*>(results.at(j, c));
  }
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
      slot_maps(op, x, rows, parent_rows));
}

}  // namespace pare::PARE_CUDA
