// Attention backward of packed sequences by tensor copies and wgmma, on compute capability 9.0: what key_gradients_bf16
// and query_gradients_bf16 of attention_bwd.cu compute, bit for bit, for head dims up to 128.
//
// One wgmma rounds like one mma.sync, and every sum is a chain of them over the same k16 steps.  Only the tiles are
// larger: what is not finite reaches the other rows of 128 keys, or query rows, and of the pieces that they go over.
#pragma once
#include "attention_bwd.cuh"
#include "attention_wgmma.cuh"
#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

// A block has 128 keys or query rows, each of two warpgroups 64.  A warp of a third brings what they go over, and that
// warpgroup leaves them its registers: dk and dv of 64 keys alone take 128 a thread.
constexpr int kConsumers = 8, kOwnedRows = kConsumers * 16, kWgmmaThreads = (kConsumers + 4) * 32;
constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * 168);

// dk and dv become the sums of all parts up to this one, of the lane's rows that it sees, and of the others as they
// were.  A part waits for those before it, which have lower tickets: blocks that run have taken them, and the one with
// the lowest waits for nobody.  So no wait is for ever, in whatever order blocks begin, and one block suffices.
template <int kD>
__device__ __forceinline__ void add_in_turn(const PartTurns& p, const KeyItem& item, int kv_heads, int warp,
                                            PerRow<bool> sees, Accumulator<kD>& dk, Accumulator<kD>& dv) {
  constexpr int kFours = kD / 8, kStep = PartTurns::kWarps * 32;  // of dk, and of dv; threads
  const int64_t tile = int64_t{item.number} * kv_heads + item.kv;
  int* const turn = p.turns + tile * PartTurns::kWarps + warp;
  float4* const at = reinterpret_cast<float4*>(p.sums) + tile * 2 * kFours * kStep + warp * 32 + threadIdx.x % 32;
  if (item.part > 0) await_turn(turn, item.part);
#pragma unroll
  for (int i = 0; i < 2 * kFours; i++) {
    float(&x)[4] = i < kFours ? dk.tile[i] : dv.tile[i - kFours];
    const float4 sum = item.part > 0 ? at[i * kStep] : make_float4(0, 0, 0, 0);
    x[0] = sees.v[0] ? sum.x + x[0] : sum.x, x[1] = sees.v[0] ? sum.y + x[1] : sum.y;
    x[2] = sees.v[1] ? sum.z + x[2] : sum.z, x[3] = sees.v[1] ? sum.w + x[3] : sum.w;
    if (item.part < item.last) at[i * kStep] = make_float4(x[0], x[1], x[2], x[3]);
  }
  if (item.part < item.last) end_turn(turn);
}

struct QueryMaps {
  CUtensorMap q, d_o;
};
inline QueryMaps query_maps(const char* op, const Args<bf16>& a, int box) {
  return {heads_map(op, a.x.q, a.rows, a.x.heads, a.x.head_dim, box),
          heads_map(op, a.d_o, a.rows, a.x.heads, a.x.head_dim, box)};
}

// ---- dk and dv: each warpgroup has 64 keys; the queries of an item come in pieces

template <int kD>
struct WgmmaKeyGradients {
  static constexpr int kQueries = 64;  // of a piece
  static constexpr int kStages = 4;    // with keys and values 98 or 194 KiB of shared memory

  struct Stage {
    alignas(1024) HeadRows<kD, kQueries> q;
    HeadRows<kD, kQueries> d_o;
  };
  struct Piece {
    float lse[kQueries], delta[kQueries];
  };
  struct Shared {
    alignas(1024) HeadRows<kD, kOwnedRows> k;
    HeadRows<kD, kOwnedRows> v;
    Ring<Stage, kStages> ring;
    Piece pieces[kStages];
    KeyItem items[2];  // a warp reads the end of one while the next is there
    Mbarrier keys_full, keys_empty;
  };
};

// Blocks take items by ticket, as many blocks as run at once.
template <int kD>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    key_gradients_wgmma(const Args<bf16> a, const __grid_constant__ QueryMaps queries,
                        const __grid_constant__ SlotMaps keys) {
#ifdef PARE_SM90A
  using Block = WgmmaKeyGradients<kD>;
  constexpr int kQueries = Block::kQueries, kStages = Block::kStages;
  auto& s = *dynamic_smem<typename Block::Shared>();
  const Packed<bf16>& x = a.x;
  const PartTurns parts(a);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_map(queries.q), prefetch_map(queries.d_o), prefetch_map(keys.k), prefetch_map(keys.v);
    if (!a.one && a.parent_rows > 0) prefetch_map(keys.pk), prefetch_map(keys.pv);
    mbarrier_init(&s.keys_full, 1), mbarrier_init(&s.keys_empty, kConsumers);
    s.ring.init(kConsumers);
    fence_proxy_async();
  }
  __syncthreads();

  if (warp >= kConsumers) {
    fewer_registers<kProducerRegisters>();
    if (warp > kConsumers) return;
    const KeyItems<kOwnedRows> items(a);
    bool more = true;
    for (int n = 0, i = 0; more; i++) {
      const KeyItem item = i > 0 && leaves_tickets() ? KeyItem{} : items.find(take_ticket(parts.tickets));
      const SegmentRow& g = item.segment;
      more = item.tile.rows > 0;
      mbarrier_wait(&s.keys_empty, (i + 1) % 2);
      if (lane == 0) {
        s.items[i % 2] = item;
        if (more) {
          mbarrier_arrive_expect(&s.keys_full, sizeof(s.k) + sizeof(s.v));
          copy_rows(s.k, item.tile.own ? keys.k : keys.pk, item.kv, item.tile.first, &s.keys_full);
          copy_rows(s.v, item.tile.own ? keys.v : keys.pv, item.kv, item.tile.first, &s.keys_full);
        } else {
          mbarrier_arrive(&s.keys_full);
        }
      }
      for (int begin = item.begin; begin < item.end; begin += kQueries, n++) {
        float lse[kQueries / 32] = {}, delta[kQueries / 32] = {};  // rows that are absent have q = do = 0
#pragma unroll
        for (int j = 0; j < kQueries / 32; j++)
          if (const int r = begin + lane + j * 32; r < g.len) {
            lse[j] = a.lse[int64_t{g.row + r} * x.heads + item.head];
            delta[j] = get_delta(a.dq.row(g.row + r) + item.head * x.head_dim);
          }
        auto& stage = s.ring[n];
        auto& piece = s.pieces[n % kStages];
        Mbarrier* const full = s.ring.await_empty(n);
#pragma unroll
        for (int j = 0; j < kQueries / 32; j++)
          piece.lse[lane + j * 32] = lse[j], piece.delta[lane + j * 32] = delta[j];
        __syncwarp();
        const int row = g.row + begin, rows = g.len - begin;
        if (rows >= kQueries) {
          if (lane == 0) {
            mbarrier_arrive_expect(full, sizeof(stage));
            copy_rows(stage.q, queries.q, item.head, row, full);
            copy_rows(stage.d_o, queries.d_o, item.head, row, full);
          }
        } else {
          load_rows(stage.q, 0, rows, x.head_dim, [&](int r) { return x.q.row(row + r) + item.head * x.head_dim; });
          load_rows(stage.d_o, 0, rows, x.head_dim, [&](int r) { return a.d_o.row(row + r) + item.head * x.head_dim; });
          loaded();
          if (lane == 0) mbarrier_arrive(full);
        }
      }
    }
    return;
  }

  more_registers<kConsumerRegisters>();
  const int group = warp / 4 * 64, own = warp * 16;  // of the tile's keys
  Accumulator<kD> dk, dv;
  Accumulator<kQueries> p, ds;
  uint32_t p16[kQueries / 16][4], ds16[kQueries / 16][4];
  PerRow<int> first;  // the own row of the segment that is the first to see the key
  const auto multiply_keys = [&](int n) {
    s.ring.await_full(n);
    wgmma_clear(p.registers()), wgmma_clear(ds.registers());
    begin_dots(p, s.k, group, s.ring[n].q);
  };
  // p and ds of piece n, from own row `begin` on, whose k.q is on its way; p while v.do is computed.
  const auto weigh = [&](int n, int begin, auto masked) {
    begin_dots(ds, s.v, group, s.ring[n].d_o);
    const auto& piece = s.pieces[n % kStages];
    wgmma_wait<1>(p.registers());
    dots_to_p(p, piece.lse, x.softmax(),
              [&](LaneRow row, int query) { return !decltype(masked)::value || begin + query >= first[row]; });
    wgmma_wait<0>(ds.registers());
    dots_to_ds<decltype(masked)::value>(ds, p, piece.delta);
    p.round(p16), ds.round(ds16);
  };
  const auto add = [&](int n) {
    begin_weighted(dv, p16, s.ring[n].d_o);
    begin_weighted(dk, ds16, s.ring[n].q);
  };
  const auto turn = [&](int n, int begin, auto masked) {
    add(n - 1);
    multiply_keys(n);
    wgmma_wait<1>(dv.registers(), p16), wgmma_wait<1>(dk.registers(), ds16);
    __syncwarp();  // everyone has read the piece
    if (lane == 0) s.ring.release(n - 1);
    weigh(n, begin, masked);
  };
  for (int n = 0, i = 0;; i++) {
    mbarrier_wait(&s.keys_full, i % 2);
    const KeyItem& item = s.items[i % 2];
    if (item.tile.rows == 0) return;
    for_rows([&](LaneRow row) { first[row] = first_query(item.tile, item.segment, own + row, nullptr); });
    // From here on every row of the segment sees all keys of the tile that it sees some time.
    const int whole = item.tile.own ? item.tile.first + item.tile.rows - 1 - item.segment.row : 0;
    wgmma_clear(dk.registers()), wgmma_clear(dv.registers());
    int begin = item.begin;
    multiply_keys(n);
    weigh(n++, begin, std::true_type{});
    for (begin += kQueries; begin < item.end && begin < whole; begin += kQueries) turn(n++, begin, std::true_type{});
    for (; begin < item.end; begin += kQueries) turn(n++, begin, std::false_type{});
    __syncwarp();  // everyone is done with the item before
    if (lane == 0) mbarrier_arrive(&s.keys_empty);
    add(n - 1);
    wgmma_wait<0>(dv.registers(), p16), wgmma_wait<0>(dk.registers(), ds16);
    __syncwarp();  // everyone has read the piece
    if (lane == 0) s.ring.release(n - 1);
    PerRow<bool> sees;
    for_rows([&](LaneRow row) { sees[row] = first[row] != kNobody; });
    add_in_turn(parts, item, x.kv_heads, warp, sees, dk, dv);
    if (item.part < item.last) continue;
    const unsigned seen = rows_seen(a, item.tile, own);
    for_rows([&](LaneRow row) { sees[row] = seen >> row & 1; });
    add_key_gradients(a, item.tile, item.kv, own, 0, sees, dk, dv);
  }
#else
  __trap();
#endif
}

// ---- dq: as attention forward, with do beside q and ds in place of the weights

template <int kD>
struct WgmmaQueryGradients {
  static constexpr int kStages = 4;  // with the queries 96 or 192 KiB of shared memory
  // A warpgroup awaits block i + 1 before it releases block i - 1.  It leaves its last block, behind which the tile has
  // at most one for the other.
  static_assert(kStages >= 3);

  struct Stage {  // a block of slots
    alignas(1024) HeadRows<kD, kSlots> k;
    HeadRows<kD, kSlots> v;
  };
  struct Shared {
    alignas(1024) HeadRows<kD, kOwnedRows> q;
    HeadRows<kD, kOwnedRows> d_o;
    Ring<Stage, kStages> ring;
    Mbarrier q_full;
  };
};

template <int kD>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    query_gradients_wgmma(const Args<bf16> a, const __grid_constant__ QueryMaps queries,
                          const __grid_constant__ SlotMaps keys) {
#ifdef PARE_SM90A
  using Block = WgmmaQueryGradients<kD>;
  auto& s = *dynamic_smem<typename Block::Shared>();
  const Packed<bf16>& x = a.x;
  const QueryBlock<kOwnedRows> t(x);
  if (t.len == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    prefetch_map(queries.q), prefetch_map(queries.d_o), prefetch_maps(keys, t);
    mbarrier_init(&s.q_full, 1);
    s.ring.init(t.readers(), 2);
    fence_proxy_async();
  }
  __syncthreads();
  const auto blocks = [&](int end) { return ceil_div(t.slots(end), kSlots); };  // that rows [0, end) see

  if (warp >= kConsumers) {
    fewer_registers<kProducerRegisters>();
    if (warp > kConsumers) return;
    if (lane == 0) {
      mbarrier_arrive_expect(&s.q_full, sizeof(s.q) + sizeof(s.d_o));
      copy_rows(s.q, queries.q, t.head, t.row + t.first, &s.q_full);
      copy_rows(s.d_o, queries.d_o, t.head, t.row + t.first, &s.q_full);
    }
    for (int i = 0; i < blocks(kOwnedRows); i++) {
      const int places[] = {t.place(x, i * kSlots + lane), t.place(x, i * kSlots + 32 + lane)};
      Mbarrier* const full = s.ring.await_empty(i);
      const bool gathers = t.template bring_keys<1>(s.ring[i].k, x, keys, i * kSlots, places, full);
      t.template bring_values<1>(s.ring[i].v, x, keys, i * kSlots, places, full);
      if (!gathers) continue;
      loaded();
      if (lane == 0) mbarrier_arrive(full), mbarrier_arrive(full);
    }
    return;
  }

  const int group = warp / 4 * 64, first = t.first + warp * 16;  // of the tile's rows; of the segment's
  if (t.first + group >= t.len) return;
  more_registers<kConsumerRegisters>();
  QueryTerms terms(a, t, first, t.head);
  Accumulator<kD> dq = {};
  Accumulator<kSlots> p, ds;
  uint32_t weights[kSlots / 16][4];
  const auto multiply_keys = [&](int i) {
    wgmma_clear(p.registers()), wgmma_clear(ds.registers());
    begin_dots(p, s.q, group, s.ring[i].k);
    begin_dots(ds, s.d_o, group, s.ring[i].v);
  };
  const auto add_keys = [&](int i) { begin_weighted(dq, weights, s.ring[i].k); };
  const auto dots_to_p = [&] {
    p.for_each([&](LaneRow row, int, float& z) { z = x.softmax().cubic(z, terms.lse[row]); });
  };
  const auto dots_to_ds = [&](int i, auto masked) {
    ds.for_each(p, [&](LaneRow row, int column, float& z, float weight) {
      const int slot = i * kSlots + column;
      const float w = weight * (z - terms.delta[row]);
      z = !decltype(masked)::value || slot <= t.parent_len + first + row ? w : 0.f;
    });
  };
  const int n_blocks = blocks(group + 64);
  const auto await_block = [&](int i) {
    if (i < n_blocks) s.ring.await_full(i);
  };
  const auto turn = [&](int i, auto masked) {
    multiply_keys(i);
    add_keys(i - 1);
    wgmma_wait<2>(p.registers());
    dots_to_p();
    wgmma_wait<1>(ds.registers());
    dots_to_ds(i, masked);
    await_block(i + 1);  // here, as in attn_wgmma
    wgmma_wait<0>(dq.registers(), weights);
    if (lane == 0) s.ring.release(i - 1);
    ds.round(weights);
  };
  mbarrier_wait(&s.q_full, 0);
  s.ring.await_full(0);
  multiply_keys(0);
  wgmma_wait<1>(p.registers());
  dots_to_p();
  wgmma_wait<0>(ds.registers());
  dots_to_ds(0, std::true_type{});
  ds.round(weights);
  await_block(1);
  int i = 1;
  for (const int whole = (t.parent_len + t.first + group + 1) / kSlots; i < whole; i++) turn(i, std::false_type{});
  for (; i < n_blocks; i++) turn(i, std::true_type{});
  add_keys(n_blocks - 1);
  wgmma_wait<0>(dq.registers(), weights);
  __syncwarp();  // everyone has read do.o, which lies in dq
  write_query_gradients(a, t, first, t.head, dq);
#else
  __trap();
#endif
}

// ---- host

inline bool suits_wgmma(const Args<bf16>& a) {
  return suits_tensor_copies(a.x, a.vector) && !a.x.lists && a.d_o.stride % a.x.head_dim == 0;
}

// The two kernels behind row_sums.
template <int kD>
void launch_wgmma_gradients(const char* op, const Args<bf16>& a, Stream stream) {
  using Keys = WgmmaKeyGradients<kD>;
  using Queries = WgmmaQueryGradients<kD>;
  const auto maps = [&](int box) { return slot_maps(op, a.x, a.rows, a.parent_rows, box); };
  launch(op, key_gradients_wgmma<kD>,
         {.grid = static_cast<unsigned>(machine().multiprocessors),
          .block = kWgmmaThreads,
          .smem = sizeof(typename Keys::Shared)},
         stream, a, query_maps(op, a, Keys::kQueries), maps(kOwnedRows));
  launch(op, query_gradients_wgmma<kD>,
         {.grid = tile_grid(op, a.x, a.rows, kOwnedRows),
          .block = kWgmmaThreads,
          .smem = sizeof(typename Queries::Shared)},
         stream, a, query_maps(op, a, kOwnedRows), maps(kSlots));
}

}  // namespace pare::PARE_CUDA
