// Attention backward of packed sequences by tensor copies and wgmma, on compute capability 9.0, for head dims up to
// 128: formulas and bits are those of key_gradients_bf16 and query_gradients_bf16 (attention_bwd.cu).
//
//   key_gradients_wgmma                               query_gradients_wgmma
//              rows, 64 a turn ->                                 slots, 64 a turn ->
//             +----+----+----+-...                               +----+----+----+-...-+----+
//   64 keys   |    |    |    |     warpgroup 0        64 rows    |    |    |    |     |\   |   warpgroup 0
//             +----+----+----+-...                               +----+----+----+-...-+----+
//   64 keys   |    |    |    |     warpgroup 1        64 rows    |    |    |    |     | \  |   warpgroup 1
//             +----+----+----+-...                               +----+----+----+-...-+----+
//
//   time ->   k.q   v.do        | p do   ds q   k.q   v.do        |     products of a turn of keys
//                   p      ds   |                     p      ds   |     the weights, meanwhile
//
// A third warpgroup brings rows or slots, up to four turns ahead.
//
// Order: one wgmma rounds like one mma.sync, and every sum is a chain of them over the same k16 steps.  Only the tiles
// are larger: values that are not finite reach the other rows of 128 keys, or query rows, and of their turns.
//
// Bytes: q and d_o once for each 128 keys, k and v once for each 128 query rows, mostly from L2.  Limited by the tensor
// cores and the exponentials.
#pragma once
#include "attention_bwd.cuh"
#include "attention_wgmma.cuh"
#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

// A block has 128 keys or query rows, each of two warpgroups 64.  A third copies for them, and leaves them its
// registers: dk and dv of 64 keys alone take 128 a thread.
constexpr int kConsumers = 8, kOwnedRows = kConsumers * 16, kProducers = 4,
              kWgmmaThreads = (kConsumers + kProducers) * 32;
constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * 168);

// A key of an item: its place (Packed), the turn in which the part is added to its sums (0: there are none yet; -1: no
// row of the segment sees it), whether a later segment sees it.
struct KeyRow {
  int place, turn, later;
};
// A turn has the number of a segment, and below it one of its parts; the last is followed by part 0 of the next.
constexpr int kPartBits = 16;
__device__ __forceinline__ int turn_behind(const KeyItem& item) {
  const bool ends = item.part + 1 == item.parts;
  return (item.entry + ends) << kPartBits | (ends ? 0 : item.part + 1);
}
// The key of the item's segment that lies at a place.
__device__ __forceinline__ KeyRow key_row(const PartTurns& p, const KeyItem& item, int place) {
  const unsigned* const seen = p.seen + p.key(place, item.kv) * p.words;
  const unsigned bit = 1u << item.entry % 32;
  int turn = item.entry << kPartBits | item.part, w = item.entry / 32;
  if (item.part == 0) {  // the first one after all parts of the segment before that sees the key
    unsigned before = seen[w] & (bit - 1);
    while (before == 0 && w > 0) before = seen[--w];
    turn = before == 0 ? 0 : (w * 32 + 32 - __clz(static_cast<int>(before))) << kPartBits;
  }
  w = item.entry / 32;
  unsigned later = seen[w] & ~(bit | (bit - 1));
  while (later == 0 && w + 1 < p.words) later = seen[++w];
  return {place, turn, later != 0};
}

// Adds a part to the sums of a warp's 16 keys, which go to dk and dv with the last one.  It waits for the parts of a
// key before it, which have lower tickets: blocks that run have taken them, and the one with the lowest does not
// wait.  So every wait ends, in whatever order blocks begin, and one block suffices.
template <int kD>
__device__ __forceinline__ void add_in_turn(const PartTurns& p, const Args<bf16>& a, const KeyItem& item,
                                            const KeyRow* rows, Accumulator<kD>& dk, Accumulator<kD>& dv) {
  constexpr int kFours = kD / 16;  // of a lane in a row of dk, and of dv
  const int lane = threadIdx.x % 32;
  const auto is_last = [&](const KeyRow& row) { return item.part + 1 == item.parts && !row.later; };
  const KeyRow own = rows[lane % 16];
  int* const turn = p.turns + p.key(own.place, item.kv);
  if (lane < 16 && own.turn > 0) await_turn(turn, own.turn);
  __syncwarp();  // the other lanes have waited for their keys
  PerRow<KeyGradients> to = {};
  for_rows([&](LaneRow row) {
    const KeyRow key = rows[row];
    if (key.turn < 0) return;
    float4* const at = reinterpret_cast<float4*>(p.sums) + p.key(key.place, item.kv) * (2 * kD / 4) + lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * kFours; i++) {
      float(*pairs)[4] = i < kFours ? &dk.tile[2 * i] : &dv.tile[2 * (i - kFours)];
      float &x = pairs[0][row.i * 2], &y = pairs[0][row.i * 2 + 1], &z = pairs[1][row.i * 2],
            &w = pairs[1][row.i * 2 + 1];
      const float4 sum = key.turn > 0 ? at[i * 4] : make_float4(0, 0, 0, 0);
      x = sum.x + x;
      y = sum.y + y;
      z = sum.z + z;
      w = sum.w + w;
      if (!is_last(key)) at[i * 4] = make_float4(x, y, z, w);
    }
    if (is_last(key)) to[row] = gradients_of(a, key.place >= 0, key.place >= 0 ? key.place : -1 - key.place, item.kv);
  });
  if (item.part + 1 == item.parts) add_key_gradients(a, to, 0, dk, dv);
  __syncwarp();
  if (lane < 16 && own.turn >= 0 && !is_last(own)) end_turn(turn, turn_behind(item) - own.turn);
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
    struct Item : KeyItem {
      KeyRow rows[kOwnedRows];
    } items[3];  // a warp reads the end of one while the next is there, and the one after it is made
    Mbarrier keys_full, keys_empty;
  };
};

// seen: which segments see a key.
__global__ void __launch_bounds__(kThreads) mark_keys(const Args<bf16> a) {
  const Tile t{entry_at<SegmentRow>(a.x.segments, blockIdx.x), 0, static_cast<int>(blockIdx.x)};
  const PartTurns p(a);
  if (t.len == 0) return;
  for (int s = blockIdx.z * kThreads + threadIdx.x; s < t.parent_len + t.len; s += gridDim.z * kThreads) {
    const int64_t key = p.key(a.x.place(t, blockIdx.y, s), blockIdx.y);
    atomicAdd(p.seen + key * p.words + t.entry / 32, 1u << t.entry % 32);  // a bit that is not set yet
  }
}

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
    prefetch_map(queries.q);
    prefetch_map(queries.d_o);
    prefetch_map(keys.k);
    prefetch_map(keys.v);
    if (a.parent_rows > 0) {
      prefetch_map(keys.pk);
      prefetch_map(keys.pv);
    }
    mbarrier_init(&s.keys_full, 2 * kProducers);
    mbarrier_init(&s.keys_empty, kConsumers);
    s.ring.init(kConsumers);
    fence_proxy_async();
  }
  __syncthreads();

  if (warp >= kConsumers) {
    fewer_registers<kProducerRegisters>();
    const KeyItems<kOwnedRows> all{x};
    const bool leads = warp == kConsumers;  // brings the queries
    const int mine = (warp - kConsumers) * 32 + lane;
    Gathers gathers;
    for (int n = 0, i = 0;; i++) {
      auto& item = s.items[i % 3];
      if (leads) {
        const KeyItem found = i > 0 && leaves_tickets() ? KeyItem{} : all.find(take_ticket(parts.tickets));
        if (lane == 0) static_cast<KeyItem&>(item) = found;
      }
      barrier_wait(1, kProducers * 32);
      const int slot = item.first + mine, slots = item.parent_len + item.len, place = x.place(item, item.kv, slot);
      item.rows[mine] = slot < slots ? key_row(parts, item, place) : KeyRow{0, -1, 0};
      __syncwarp();  // before lane 0 arrives
      mbarrier_wait(&s.keys_empty, (i + 1) % 2);
      if (item.len == 0) {
        if (lane == 0) {
          mbarrier_arrive(&s.keys_full);
          mbarrier_arrive(&s.keys_full);
        }
        return;
      }
      gathers.begun(bring_keys(s.k, x, keys, item, item.kv, item.first, slots, place, &s.keys_full), &s.keys_full);
      gathers.begun(bring_values(s.v, x, keys, item, item.kv, item.first, slots, place, &s.keys_full), &s.keys_full);
      for (int begin = item.begin; leads && begin < item.end; begin += kQueries, n++) {
        float lse[kQueries / 32] = {}, delta[kQueries / 32] = {};  // rows that are absent have q = do = 0
#pragma unroll
        for (int j = 0; j < kQueries / 32; j++)
          if (const int r = begin + lane + j * 32; r < item.len) {
            lse[j] = a.lse[int64_t{item.row + r} * x.heads + item.head];
            delta[j] = get_delta(a.dq.row(item.row + r) + item.head * x.head_dim);
          }
        auto& stage = s.ring[n];
        auto& piece = s.pieces[n % kStages];
        Mbarrier* const full = s.ring.await_empty(n);
#pragma unroll
        for (int j = 0; j < kQueries / 32; j++) {
          piece.lse[lane + j * 32] = lse[j];
          piece.delta[lane + j * 32] = delta[j];
        }
        __syncwarp();
        const int row = item.row + begin, rows = item.len - begin;
        if (rows >= kQueries) {
          if (lane == 0) {
            mbarrier_arrive_expect(full, sizeof(stage));
            copy_rows(stage.q, queries.q, item.head, row, full);
            copy_rows(stage.d_o, queries.d_o, item.head, row, full);
          }
        } else {
          load_rows(stage.q, 0, rows, x.head_dim, [&](int r) { return x.q.row(row + r) + item.head * x.head_dim; });
          load_rows(stage.d_o, 0, rows, x.head_dim, [&](int r) { return a.d_o.row(row + r) + item.head * x.head_dim; });
        }
        gathers.begun(rows < kQueries, full);
      }
      gathers.end();
    }
  }

  more_registers<kConsumerRegisters>();
  const int group = warp / 4 * 64, own = warp * 16;  // of the tile's keys
  Accumulator<kD> dk, dv;
  Accumulator<kQueries> p, ds;
  uint32_t p16[kQueries / 16][4], ds16[kQueries / 16][4];
  PerRow<int> first;  // the own row of the segment that is the first to see the key
  const auto multiply_keys = [&](int n) {
    s.ring.await_full(n);
    wgmma_clear(p.registers());
    wgmma_clear(ds.registers());
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
    p.round(p16);
    ds.round(ds16);
  };
  const auto add = [&](int n) {
    begin_weighted(dv, p16, s.ring[n].d_o);
    begin_weighted(dk, ds16, s.ring[n].q);
  };
  const auto turn = [&](int n, int begin, auto masked) {
    add(n - 1);
    multiply_keys(n);
    wgmma_wait<1>(dv.registers(), p16);
    wgmma_wait<1>(dk.registers(), ds16);
    __syncwarp();  // everyone has read the piece
    if (lane == 0) s.ring.release(n - 1);
    weigh(n, begin, masked);
  };
  for (int n = 0, i = 0;; i++) {
    mbarrier_wait(&s.keys_full, i % 2);
    const auto& item = s.items[i % 3];
    if (item.len == 0) return;
    for_rows([&](LaneRow row) { first[row] = item.first + own + row - item.parent_len; });
    // From here on every row of the segment sees all keys of the tile that it sees some time.
    const int whole = min(item.first + kOwnedRows - 1 - item.parent_len, item.len - 1);
    wgmma_clear(dk.registers());
    wgmma_clear(dv.registers());
    int begin = item.begin;
    multiply_keys(n);
    weigh(n++, begin, std::true_type{});
    for (begin += kQueries; begin < item.end && begin < whole; begin += kQueries) turn(n++, begin, std::true_type{});
    for (; begin < item.end; begin += kQueries) turn(n++, begin, std::false_type{});
    __syncwarp();  // everyone is done with the item before
    if (lane == 0) mbarrier_arrive(&s.keys_empty);
    add(n - 1);
    wgmma_wait<0>(dv.registers(), p16);
    wgmma_wait<0>(dk.registers(), ds16);
    __syncwarp();  // the warp's products have ended
    if (lane == 0) s.ring.release(n - 1);
    add_in_turn(parts, a, item, item.rows + own, dk, dv);
  }
#else
  __trap();
#endif
}

// ---- dq: as attention forward, with do in addition to q, and ds in place of the weights

template <int kD>
struct WgmmaQueryGradients {
  static constexpr int kStages = 4;  // with the queries 96 or 192 KiB of shared memory
  // A warpgroup awaits block i + 1 before it releases block i - 1.  It leaves its last block, after which the tile has
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
    prefetch_map(queries.q);
    prefetch_map(queries.d_o);
    prefetch_maps(keys, t);
    mbarrier_init(&s.q_full, 1);
    s.ring.init(t.readers(), kProducers);
    fence_proxy_async();
  }
  __syncthreads();
  const auto blocks = [&](int end) { return ceil_div(t.slots(end), kSlots); };  // that rows [0, end) see

  if (warp >= kConsumers) {
    fewer_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumers * 32) {
      mbarrier_arrive_expect(&s.q_full, sizeof(s.q) + sizeof(s.d_o));
      copy_rows(s.q, queries.q, t.head, t.row + t.first, &s.q_full);
      copy_rows(s.d_o, queries.d_o, t.head, t.row + t.first, &s.q_full);
    }
    // Two warps bring keys, two values.
    const int n = blocks(kOwnedRows), slots = t.slots(kOwnedRows), mine = warp % 2 * 32 + lane;  // of a block's slots
    int place = t.place(x, mine);
    Gathers gathers;
    for (int i = 0; i < n; i++) {
      Mbarrier* const full = s.ring.await_empty(i);
      auto& stage = s.ring[i];
      gathers.begun(warp < kConsumers + 2 ? bring_keys(stage.k, x, keys, t, t.kv, i * kSlots, slots, place, full)
                                          : bring_values(stage.v, x, keys, t, t.kv, i * kSlots, slots, place, full),
                    full);
      place = t.place(x, (i + 1) * kSlots + mine);
    }
    gathers.end();
    return;
  }

  const int group = warp / 4 * 64, first = t.first + warp * 16;  // of the tile's rows; of the segment's
  if (t.first + group >= t.len) return;
  more_registers<kConsumerRegisters>();
  QueryTerms terms(a, own_rows(t, first, t.head));
  Accumulator<kD> dq = {};
  Accumulator<kSlots> p, ds;
  uint32_t weights[kSlots / 16][4];
  const auto multiply_keys = [&](int i) {
    wgmma_clear(p.registers());
    wgmma_clear(ds.registers());
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
  write_query_gradients(a, own_rows(t, first, t.head), dq);
#else
  __trap();
#endif
}

// ---- host

inline bool suits_wgmma(const Args<bf16>& a) {
  // Turns are numbers of 31 bits.
  return suits_tensor_copies(a.x, a.vector) && a.d_o.stride % a.x.head_dim == 0 &&
         a.x.n_segments < 1 << (31 - kPartBits) && a.x.group * ceil_div(a.rows, kRun) < 1 << kPartBits;
}

// Launches the kernels after row_sums.
template <int kD>
void launch_wgmma_gradients(const char* op, const Args<bf16>& a, Stream stream) {
  using Keys = WgmmaKeyGradients<kD>;
  using Queries = WgmmaQueryGradients<kD>;
  const SlotMaps maps = slot_maps(op, a.x, a.rows, a.parent_rows);
  launch(op, mark_keys,
         {.grid = dim3(a.x.n_segments, a.x.kv_heads, ceil_div(a.rows, a.x.n_segments * kThreads)), .block = kThreads},
         stream, a);
  launch(op, key_gradients_wgmma<kD>,
         {.grid = static_cast<unsigned>(machine().multiprocessors),
          .block = kWgmmaThreads,
          .smem = sizeof(typename Keys::Shared)},
         stream, a, query_maps(op, a, Keys::kQueries), maps);
  launch(op, query_gradients_wgmma<kD>,
         {.grid = tile_grid(op, a.x, a.rows, kOwnedRows),
          .block = kWgmmaThreads,
          .smem = sizeof(typename Queries::Shared)},
         stream, a, query_maps(op, a, kOwnedRows), maps);
}

}  // namespace pare::PARE_CUDA
