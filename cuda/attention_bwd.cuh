// Code shared by the kernels of attention backward (attention_bwd.cu, attention_bwd_wgmma.cuh): their operands, masks,
// and the arithmetic of pairs in bf16.
#pragma once
#include "attention_mma.cuh"

namespace pare::PARE_CUDA {

namespace {

template <class T>
struct Args {
  Packed<T> x;
  Matrix<const T> d_o, o;          // [N, H, D]
  const float* lse;                // [N, H]
  Matrix<T> dq, dk, dv, dpk, dpv;  // [N, H, D], [N, K, D], [P, K, D]
  BlockLists blocks;               // where rows have lists of blocks
  int rows, parent_rows;           // N, P
  bool one;                        // dpk and dpv are dk and dv
  bool vector;                     // rows of q, o, d_o, k, v are 16-byte aligned and D is a multiple of 8
  float* work;                     // AttnBwd::work
};

// delta = do.o of a row, in the first bytes of its row of dq.
__device__ __forceinline__ void put_delta(float* dq, float x) { *dq = x; }
__device__ __forceinline__ float get_delta(const float* dq) { return *dq; }
__device__ __forceinline__ void put_delta(bf16* dq, float x) {
  bf16 half[2];
  memcpy(half, &x, sizeof x);
  dq[0] = half[0], dq[1] = half[1];
}
__device__ __forceinline__ float get_delta(const bf16* dq) {
  const bf16 half[2] = {dq[0], dq[1]};
  float x;
  memcpy(&x, half, sizeof x);
  return x;
}

// ---- who sees what

constexpr int kNobody = INT_MAX;

// Rows [first, first + rows) of dk (`own`: own rows of segments may lie there) or of dpk (`parents`: parents may).
struct KeyTile {
  int first, rows;
  bool own, parents;
  __device__ bool meets(int begin, int count) const { return begin < first + rows && begin + count > first; }
};
template <int kKeys, class T>
__device__ KeyTile key_tile(const Args<T>& a, int tile) {
  const int parent_tiles = a.one ? 0 : ceil_div(a.parent_rows, kKeys);
  if (tile < parent_tiles) return {tile * kKeys, min(kKeys, a.parent_rows - tile * kKeys), false, true};
  const int first = (tile - parent_tiles) * kKeys;
  return {first, min(kKeys, a.rows - first), true, a.one};
}

// The first own row of segment g that sees row `key` of the tile.  listed: [kKeys], where parents are lists.
__device__ __forceinline__ int first_query(const KeyTile& t, const SegmentRow& g, int key, const int* listed) {
  const int row = t.first + key;
  if (t.own && row >= g.row && row < g.row + g.len) return row - g.row;
  const bool parent = listed ? listed[key] : t.parents && row >= g.parent_row && row < g.parent_row + g.parent_len;
  return parent && key < t.rows ? 0 : kNobody;
}

// listed[key] = 1 for the rows of the tile that the segment lists for key head kv; are there any?
template <int kKeys>
__device__ bool mark_listed(int* listed, const int32_t* lists, int kv_heads, const KeyTile& t, const SegmentRow& g,
                            int kv) {
  __syncthreads();  // everyone is done with the previous segment
  if (threadIdx.x < kKeys) listed[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < g.parent_len; i += kThreads) {
    const int entry = lists[int64_t{g.parent_row + i} * kv_heads + kv];
    const int key = (entry >= 0 ? entry : -1 - entry) - t.first;
    if ((entry >= 0 ? t.own : t.parents) && key >= 0 && key < t.rows) listed[key] = 1;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return __any_sync(kAllLanes, listed[lane] | listed[kKeys - 32 + lane]);
}

// The own row of segment g at which the pieces of kQueries queries begin, of which none lies in two runs.
constexpr int kRun = 1024;  // own rows of a part of dk and dv (list.h)
template <int kQueries>
__device__ __forceinline__ int first_piece(const KeyTile& t, const SegmentRow& g, bool parents) {
  static_assert(kRun % kQueries == 0);
  return parents ? 0 : max(0, t.first - g.row) / kQueries * kQueries;
}

// Calls f(segment, parents) for the segments that see the tile, in list order; parents: may the tile hold rows of its
// parent?
template <int kKeys, class T, class F>
__device__ __forceinline__ void for_segments(const Args<T>& a, const KeyTile& t, int* listed, F f) {
  const Packed<T>& x = a.x;
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < x.n_segments; base += 32) {
    const SegmentRow s =
        base + lane < x.n_segments ? entry_at<SegmentRow>(x.segments, base + lane) : SegmentRow{0, 0, 0, 0};
    const auto own = [&](const SegmentRow& g) { return t.own && t.meets(g.row, g.len); };
    const auto parents = [&](const SegmentRow& g) {
      return g.parent_len > 0 && (x.lists || (t.parents && t.meets(g.parent_row, g.parent_len)));
    };
    for (unsigned left = __ballot_sync(kAllLanes, s.len > 0 && (own(s) || parents(s))); left; left &= left - 1) {
      const auto segment = entry_at<SegmentRow>(x.segments, base + __ffs(static_cast<int>(left)) - 1);
      bool sees = parents(segment);
      if (x.lists) sees = mark_listed<kKeys>(listed, x.lists, x.kv_heads, t, segment, blockIdx.y);
      if (sees || own(segment)) f(segment, sees);
    }
  }
}

// ---- parts of dk and dv as work for blocks (key_gradients_wgmma)

// A part of list.h: rows [begin, end) of a segment and a query head, for the keys of a tile.  `part` counts those of
// the tile and key head in the order in which they are added, `last` is none behind it; rows 0: there is no item any
// more.
struct KeyItem {
  SegmentRow segment;
  KeyTile tile;
  int number, kv, head;  // of the tile among all; of its key head; query head
  int begin, end, part, last;
};

// Items are numbered by segment, head of the group, run, key head and tile.  So those of a tile and key head ascend
// with their parts, those that begin together are about as long, and the last ones are short.
template <int kKeys>
struct KeyItems {
  const Args<bf16>& a;
  int parent_tiles;
  __device__ explicit KeyItems(const Args<bf16>& args)
      : a(args), parent_tiles(a.one ? 0 : ceil_div(a.parent_rows, kKeys)) {}

  // Tiles that a segment sees: [parent, parent + parents) with rows of its parent, [own, own_end) only with its own.
  struct Tiles {
    int parent, parents, own, own_end;
  };
  __device__ Tiles tiles_of(const SegmentRow& g) const {
    Tiles t{0, 0, g.row / kKeys, ceil_div(g.row + g.len, kKeys)};
    if (g.parent_len > 0) {
      t.parent = g.parent_row / kKeys, t.parents = ceil_div(g.parent_row + g.parent_len, kKeys) - t.parent;
      if (a.one) {  // the rows do not overlap: at most one tile is both
        t.own += t.own >= t.parent && t.own < t.parent + t.parents;
        t.own_end -= t.own < t.own_end && t.own_end > t.parent && t.own_end <= t.parent + t.parents;
      }
    }
    t.own += parent_tiles, t.own_end += parent_tiles;
    if (a.one) t.parent += parent_tiles;
    return t;
  }
  // The number of tiles with rows of its own that rows up to the end of run r see.
  __device__ int seen(const SegmentRow& g, const Tiles& t, int r) const {
    const int last = (g.row + min(g.len, (r + 1) * kRun) - 1) / kKeys + parent_tiles;
    return max(0, min(t.own_end, last + 1) - t.own);
  }
  // The first run that sees tile `number`; the number of runs where none does.
  __device__ int first_run(const SegmentRow& g, int number) const {
    const Tiles t = tiles_of(g);
    if (number >= t.parent && number < t.parent + t.parents) return 0;
    const bool own = number >= t.own && number < t.own_end;
    return own ? max(0, (number - parent_tiles) * kKeys - g.row) / kRun : ceil_div(g.len, kRun);
  }
  __device__ int items_of(const SegmentRow& g) const {
    if (g.len <= 0) return 0;
    const Tiles t = tiles_of(g);
    int n = 0;
    for (int r = 0; r * kRun < g.len; r++) n += t.parents + seen(g, t, r);
    return n * a.x.heads;
  }

  // By a warp.
  __device__ KeyItem find(int ticket) const {
    const Packed<bf16>& x = a.x;
    const Piece p =
        find_piece(x.n_segments, ticket, [&](int i) { return items_of(entry_at<SegmentRow>(x.segments, i)); });
    KeyItem item{};
    if (p.owner == x.n_segments) return item;
    const SegmentRow g = entry_at<SegmentRow>(x.segments, p.owner);
    const Tiles t = tiles_of(g);
    const int of_head = items_of(g) / x.group, head = p.index / of_head;
    int r = 0, i = p.index % of_head;
    for (int n; i >= (n = (t.parents + seen(g, t, r)) * x.kv_heads); r++) i -= n;
    const int n = t.parents + seen(g, t, r), tile = i % n;
    const bool parents = tile < t.parents;
    item.segment = g, item.kv = i / n, item.head = item.kv * x.group + head;
    item.number = parents ? t.parent + tile : t.own + tile - t.parents;
    item.tile = key_tile<kKeys>(a, item.number);
    item.begin = max(r * kRun, first_piece<64>(item.tile, g, parents)), item.end = min(g.len, (r + 1) * kRun);

    const int lane = threadIdx.x % 32;
    int before = 0, all = 0;  // parts of the tile: of the segments before, of all
    for (int base = 0; base < x.n_segments; base += 32) {
      const int s = base + lane;
      if (s >= x.n_segments) break;
      const SegmentRow other = entry_at<SegmentRow>(x.segments, s);
      const int parts = other.len > 0 ? x.group * (ceil_div(other.len, kRun) - first_run(other, item.number)) : 0;
      all += parts, before += s < p.owner ? parts : 0;
    }
    __syncwarp();
    for (int o = 16; o > 0; o /= 2)
      all += __shfl_xor_sync(kAllLanes, all, o), before += __shfl_xor_sync(kAllLanes, before, o);
    const int first = first_run(g, item.number), runs = ceil_div(g.len, kRun) - first;
    item.part = before + head * runs + r - first, item.last = all - 1;
    return item;
  }
};

// Bit i: some segment sees row row + i of 16 rows of a tile.  By a warp.
__device__ __forceinline__ unsigned rows_seen(const Args<bf16>& a, const KeyTile& t, int row) {
  unsigned seen = 0;
  for (int s = threadIdx.x % 32; s < a.x.n_segments; s += 32) {
    const SegmentRow g = entry_at<SegmentRow>(a.x.segments, s);
    for (int i = 0; i < 16; i++) seen |= unsigned{first_query(t, g, row + i, nullptr) != kNobody && g.len > 0} << i;
  }
  __syncwarp();
  for (int o = 16; o > 0; o /= 2) seen |= __shfl_xor_sync(kAllLanes, seen, o);
  return seen;
}

// Bit i for each i in [begin, end) for which slot `slot` + i lies in a block that a row reads; it sees `total` slots.
__device__ uint64_t slots_read(const BlockLists& b, int64_t row, int kv, int total, int slot, int begin, int end) {
  const auto bits = [](int from, int to) { return ~uint64_t{0} >> (64 - (to - from)) << from; };
  if (begin >= end) return 0;
  if (!b.listed(row, total)) return bits(begin, end);
  const int32_t* list = b.list(row, kv);
  const int n = b.budget[row], first = (slot + begin) / b.block;
  int i = 0;
  for (int behind = n; i < behind;) {  // the first entry from block `first` on
    const int middle = (i + behind) / 2;
    list[middle] < first ? i = middle + 1 : behind = middle;
  }
  uint64_t read = 0;
  for (; i < n && list[i] * b.block < slot + end; i++) {
    const int at = list[i] * b.block - slot;
    read |= bits(max(begin, at), min(end, at + b.block));
  }
  return read;
}
// The same for own row i of segment g and the rows of a tile.
__device__ uint64_t keys_read(const BlockLists& b, const KeyTile& t, const SegmentRow& g, int kv, int i) {
  const auto of_run = [&](int row, int len, int slot) {  // rows whose first is slot `slot`
    return slots_read(b, g.row + i, kv, g.parent_len + i + 1, slot + t.first - row, max(0, row - t.first),
                      min(t.rows, row + len - t.first));
  };
  return (t.own ? of_run(g.row, g.len, g.parent_len) : 0) | (t.parents ? of_run(g.parent_row, g.parent_len, 0) : 0);
}

// masks[i] = of(i) for i < kCount; is any of them not 0?
template <int kCount, class F>
__device__ __forceinline__ bool fill_masks(uint64_t* masks, F of) {
  __syncthreads();  // everyone is done with what is there
  for (int i = threadIdx.x; i < kCount; i += kThreads) masks[i] = of(i);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return __any_sync(kAllLanes, lane < kCount && (masks[lane] | masks[max(kCount, 32) - 32 + lane]) != 0);
}

// ---- bf16: a warp's 16 keys (rows) and some queries (columns)

// k.q to p, 0 where hidden.  visible(row, query); lse: [queries].
template <int kN, class Visible>
__device__ __forceinline__ void dots_to_p(Accumulator<kN>& p, const float* lse, const Softmax& softmax,
                                          Visible visible) {
  p.for_each([&](LaneRow row, int query, float& x) {
    const float w = softmax.cubic(x, lse[query]);
    x = visible(row, query) ? w : 0.f;
  });
}
// v.do to ds / scale.  delta: [queries].  kMasked: some p are 0, as what is seen has none.
template <bool kMasked = true, int kN>
__device__ __forceinline__ void dots_to_ds(Accumulator<kN>& ds, const Accumulator<kN>& p, const float* delta) {
  ds.for_each(p, [&](LaneRow, int query, float& x, float w) {
    const float difference = x - delta[query];
    x = !kMasked || w != 0 ? w * difference : 0.f;  // a hidden v may hold anything
  });
}

// Sums of the parts of dk and dv before the one that registers hold.  kThreads threads of a block have some.
template <int kColumns, int kThreads>
class PartSums {
  static constexpr int kEach = kColumns / 2;  // registers of dk, and of dv
  float* const work_;
  bool any_ = false;

 public:
  // block: its number; thread: among those that have sums.
  __device__ PartSums(float* work, int64_t block, int thread) : work_(work + block * 2 * kEach * kThreads + thread) {}
  // Behind the last part but one: takes in a part, and the next one begins with 0.
  __device__ __forceinline__ void end_part(Accumulator<kColumns>& dk, Accumulator<kColumns>& dv) {
    add(dk, dv);
#pragma unroll
    for (int i = 0; i < 2 * kEach; i++) {
      float& x = i < kEach ? dk.registers()[i] : dv.registers()[i - kEach];
      work_[i * kThreads] = x, x = 0;
    }
    any_ = true;
  }
  // dk and dv become the sums of all parts.
  __device__ __forceinline__ void add(Accumulator<kColumns>& dk, Accumulator<kColumns>& dv) const {
    if (!any_) return;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      dk.registers()[i] = work_[i * kThreads] + dk.registers()[i];
      dv.registers()[i] = work_[(kEach + i) * kThreads] + dv.registers()[i];
    }
  }
};

// The same where blocks compute the parts: the warp that has a part of 16 keys adds it in turn to f32 sums in `work`.
// Behind the sums of 128 keys each, of tiles and their key heads, lie the tickets of the launch and the turns of warps.
struct PartTurns {
  static constexpr int kWarps = 8;  // of a tile
  float* sums;
  int *tickets, *turns;
  int64_t count;  // ints
  __device__ explicit PartTurns(const Args<bf16>& a) {
    const int d = a.x.head_dim, padded = d <= 64 ? 64 : d <= 128 ? 128 : 256;
    const int64_t tiles = int64_t{ceil_div(a.rows, 128) + (a.one ? 0 : ceil_div(a.parent_rows, 128))} * a.x.kv_heads;
    sums = a.work, tickets = reinterpret_cast<int*>(a.work + tiles * 2 * 128 * padded), turns = tickets + 1;
    count = 1 + tiles * kWarps;
  }
};
// Adds the sums of columns [column, column + kC) to the warp's 16 rows of the tile from `own` on that are touched.
template <int kC>
__device__ __forceinline__ void add_key_gradients(const Args<bf16>& a, const KeyTile& t, int kv, int own, int column,
                                                  PerRow<bool> touched, Accumulator<kC>& dk,
                                                  const Accumulator<kC>& dv) {
  const int head_dim = a.x.head_dim;
  dk.for_each(dv, [&](LaneRow i, int j, float sum_k, float sum_v) {
    const int row = t.first + own + i, c = column + j;
    if (!touched[i] || c >= head_dim) return;
    bf16 *at_k = (t.own ? a.dk : a.dpk).row(row) + kv * head_dim + c,
         *at_v = (t.own ? a.dv : a.dpv).row(row) + kv * head_dim + c;
    *at_k = from_float<bf16>(to_float(*at_k) + sum_k * a.x.scale);
    *at_v = from_float<bf16>(to_float(*at_v) + sum_v);
  });
}

// ---- bf16: a warp's 16 query rows, of which `first` of the segment is the first

// What each brings to p and ds; nothing behind the segment's last.
struct QueryTerms {
  PerRow<float> lse = {}, delta = {};
  __device__ QueryTerms(const Args<bf16>& a, const Tile& t, int first, int head) {
    for_rows([&](LaneRow i) {
      if (first + i >= t.len) return;
      const int row = t.row + first + i;
      lse[i] = a.lse[int64_t{row} * a.x.heads + head];
      delta[i] = get_delta(a.dq.row(row) + head * a.x.head_dim);
    });
  }
};
template <int kD>
__device__ __forceinline__ void write_query_gradients(const Args<bf16>& a, const Tile& t, int first, int head,
                                                      Accumulator<kD>& dq) {
  dq.for_each([&](LaneRow i, int c, float sum) {
    const int row = first + i;
    if (row < t.len && c < a.x.head_dim)
      a.dq.row(t.row + row)[head * a.x.head_dim + c] = from_float<bf16>(sum * a.x.scale);
  });
}

}  // namespace

}  // namespace pare::PARE_CUDA
