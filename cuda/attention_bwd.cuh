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
  dq[0] = half[0];
  dq[1] = half[1];
}
__device__ __forceinline__ float get_delta(const bf16* dq) {
  const bf16 half[2] = {dq[0], dq[1]};
  float x;
  memcpy(&x, half, sizeof x);
  return x;
}

// ---- the rows that see a key

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

// A part of list.h: own rows [begin, end) of a segment and a query head, for the slots from `first` on that it sees.
// `part` counts those of the segment, tile and key head in the order in which they are added, of `parts`; len 0: there
// is no item any more.
struct KeyItem : Tile {
  int kv, head, begin, end, part, parts;
};

// Items are numbered by segment, head of the group, run, key head and tile.  So those of a row and key head ascend with
// their parts, those that begin together are about as long, and the last ones are short.
template <int kKeys>
struct KeyItems {
  const Packed<bf16>& x;

  // Tiles of slots that rows up to the end of run r see.
  __device__ int seen(const SegmentRow& g, int r) const {
    return ceil_div(g.parent_len + min(g.len, (r + 1) * kRun), kKeys);
  }
  __device__ int items_of(const SegmentRow& g) const {
    int n = 0;
    for (int r = 0; r * kRun < g.len; r++) n += seen(g, r);
    return n * x.heads;
  }
  // By a warp.
  __device__ KeyItem find(int ticket) const {
    const Piece p =
        find_piece(x.n_segments, ticket, [&](int i) { return items_of(entry_at<SegmentRow>(x.segments, i)); });
    KeyItem item{};
    if (p.owner == x.n_segments) return item;
    static_cast<SegmentRow&>(item) = entry_at<SegmentRow>(x.segments, p.owner);
    const int of_head = items_of(item) / x.group, head = p.index / of_head;
    int r = 0, i = p.index % of_head;
    for (int n; i >= (n = seen(item, r) * x.kv_heads); r++) i -= n;
    item.entry = p.owner;
    item.first = i % seen(item, r) * kKeys;
    item.kv = i / seen(item, r);
    item.head = item.kv * x.group + head;
    const int before = max(0, item.first - item.parent_len);  // own rows that do not see it
    item.begin = max(r * kRun, before / 64 * 64);
    item.end = min(item.len, (r + 1) * kRun);
    const int runs = ceil_div(item.len, kRun) - before / kRun;
    item.part = head * runs + r - before / kRun;
    item.parts = x.group * runs;
    return item;
  }
};

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
  return (t.own ? of_run(g.row, i + 1, g.parent_len) : 0) | (t.parents ? of_run(g.parent_row, g.parent_len, 0) : 0);
}

// The pieces that a tile of keys goes over: kQueries own rows of a segment each, all of one part, in the order of
// list.h.  These are all rows ...
template <int kQueries>
class AllPieces {
  const int begin_, tiles_, pieces_;
  int next_ = 0;

 public:
  struct Memory {};
  struct Piece {
    int head, part, first;  // head: of the group; part: its number in the segment
    __device__ __forceinline__ int own(int i) const { return first + i; }
  };
  __device__ AllPieces(const Args<bf16>& a, const KeyTile&, const SegmentRow& g, int, int begin, Memory&)
      : begin_(begin), tiles_(ceil_div(g.len - begin, kQueries)), pieces_(a.x.group * tiles_) {}
  __device__ __forceinline__ bool take(Piece& p) {
    if (next_ >= pieces_) return false;
    p.head = next_ / tiles_;
    p.first = begin_ + next_ % tiles_ * kQueries;
    p.part = p.head * tiles_ + p.first / kRun;
    next_++;
    return true;
  }
};
// ... and these the steps of 16 rows, some of which list a slot of the tile.  Whole steps of products are left out, so
// that the others have the same sums.
template <int kQueries>
class ListedPieces {
  static constexpr int kHeld = 32, kSteps = kRun / 16;  // runs of which the steps are known; steps of a run
  const Args<bf16>& a_;
  const KeyTile& t_;
  const SegmentRow& g_;
  const int kv_, begin_, runs_;
  uint8_t* const listed_;
  int head_ = -1, run_, held_ = -1;  // held_: the first of the runs in memory
  uint64_t left_ = 0;                // steps of the run

 public:
  struct Memory {
    uint8_t listed[kHeld * kSteps];
  };
  struct Piece {
    int head, part, run;
    unsigned steps;  // of the run, a byte each; those after the last are none
    __device__ __forceinline__ int own(int i) const {
      const unsigned step = steps >> i / 16 * 8 & 0xff;
      return step < kSteps ? run * kRun + static_cast<int>(step) * 16 + i % 16 : INT_MAX / 2;
    }
  };
  __device__ ListedPieces(const Args<bf16>& a, const KeyTile& t, const SegmentRow& g, int kv, int begin, Memory& m)
      : a_(a), t_(t), g_(g), kv_(kv), begin_(begin), runs_(ceil_div(g.len, kRun)), listed_(m.listed), run_(runs_) {}

  // Takes the next piece, or returns false.  By all threads.
  __device__ __forceinline__ bool take(Piece& p) {
    while (!left_) {
      if (++run_ >= runs_) {
        run_ = begin_ / kRun;
        if (++head_ == a_.x.group) return false;
      }
      if (run_ / kHeld * kHeld != held_) hold(run_ / kHeld * kHeld);
      const uint8_t* const of_run = listed_ + (run_ - held_) * kSteps + threadIdx.x % 32;
      left_ = __ballot_sync(kAllLanes, of_run[0]) | uint64_t{__ballot_sync(kAllLanes, of_run[32])} << 32;
    }
    p = {head_, head_ * runs_ + run_, run_, 0};
#pragma unroll
    for (int i = 0; i < kQueries / 16; i++) {
      p.steps |= (left_ ? static_cast<unsigned>(__ffsll(static_cast<long long>(left_))) - 1 : kSteps) << i * 8;
      left_ &= left_ - 1;
    }
    return true;
  }

 private:
  __device__ void hold(int run) {
    __syncthreads();  // everyone is done with those before
    held_ = run;
    for (int i = threadIdx.x; i < min(kHeld, runs_ - run) * kRun; i += kThreads) {
      const int own = run * kRun + i;
      const bool lists = own >= begin_ && own < g_.len && keys_read(a_.blocks, t_, g_, kv_, own);
      const unsigned rows = __ballot_sync(kAllLanes, lists);
      if (threadIdx.x % 16 == 0) listed_[i / 16] = (rows >> threadIdx.x % 32 & 0xffff) != 0;
    }
    __syncthreads();
  }
};

// masks[i] = of(i) for i < kCount; is any of them not 0?
template <int kCount, class F>
__device__ __forceinline__ bool fill_masks(uint64_t* masks, F of) {
  __syncthreads();  // everyone is done with the masks before
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
// v.do to ds / scale.  delta: [queries].  kMasked: p is 0 in hidden pairs.
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
  // Called after each part but the last: takes in a part, and the next one begins with 0.
  __device__ __forceinline__ void end_part(Accumulator<kColumns>& dk, Accumulator<kColumns>& dv) {
    add(dk, dv);
#pragma unroll
    for (int i = 0; i < 2 * kEach; i++) {
      float& x = i < kEach ? dk.registers()[i] : dv.registers()[i - kEach];
      work_[i * kThreads] = x;
      x = 0;
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

// The same where blocks compute the parts, and add them in turn to f32 sums in `work`: those of dk and dv of each row
// and key head.  After them lie the tickets of the launch and, of each row and key head, a turn and a bit for each
// segment that sees it.
struct PartTurns {
  float* sums;
  int *tickets, *turns;
  unsigned* seen;
  int64_t count;                       // words from `tickets` on
  int words, own_rows, padded, heads;  // words of bits; rows that are no parents; channels; key heads
  bool one;
  __device__ explicit PartTurns(const Args<bf16>& a)
      : words(ceil_div(a.x.n_segments, 32)),
        own_rows(ceil_div(a.rows, 128) * 128),
        padded(a.x.head_dim <= 64    ? 64
               : a.x.head_dim <= 128 ? 128
                                     : 256),
        heads(a.x.kv_heads),
        one(a.one) {
    const int64_t all = int64_t{own_rows + (one ? 0 : ceil_div(a.parent_rows, 128) * 128)} * heads;
    sums = a.work;
    tickets = reinterpret_cast<int*>(sums + all * 2 * padded);
    turns = tickets + 1;
    seen = reinterpret_cast<unsigned*>(turns + all);
    count = 1 + all + all * words;
  }
  // Which row and key head the key at a place (Packed) is.
  __device__ __forceinline__ int64_t key(int place, int kv) const {
    const int row = place >= 0 ? place : -1 - place + (one ? 0 : own_rows);
    return int64_t{row} * heads + kv;
  }
};
// Where sums of a row go; null: nowhere.
struct KeyGradients {
  bf16 *k, *v;
};
// own: of dk and dv.
__device__ __forceinline__ KeyGradients gradients_of(const Args<bf16>& a, bool own, int row, int kv) {
  const int c = kv * a.x.head_dim;
  return {(own ? a.dk : a.dpk).row(row) + c, (own ? a.dv : a.dpv).row(row) + c};
}
// Adds the sums of columns [column, column + kC).
template <int kC>
__device__ __forceinline__ void add_key_gradients(const Args<bf16>& a, PerRow<KeyGradients> to, int column,
                                                  Accumulator<kC>& dk, const Accumulator<kC>& dv) {
  dk.for_each(dv, [&](LaneRow i, int j, float sum_k, float sum_v) {
    const int c = column + j;
    if (!to[i].k || c >= a.x.head_dim) return;
    bf16 *at_k = to[i].k + c, *at_v = to[i].v + c;
    *at_k = from_float<bf16>(to_float(*at_k) + sum_k * a.x.scale);
    *at_v = from_float<bf16>(to_float(*at_v) + sum_v);
  });
}

// ---- bf16: a warp's 16 query rows

// Row `row` of q and a head; row -1: none.
struct QueryAt {
  int64_t row;
  int head;
};
// Own rows from `first` on.
__device__ __forceinline__ auto own_rows(const Tile& t, int first, int head) {
  return [&t, first, head](int i) { return QueryAt{first + i < t.len ? t.row + first + i : -1, head}; };
}

// The terms that rows bring to p and ds, zeros where there is none.  at(i): QueryAt.
struct QueryTerms {
  PerRow<float> lse = {}, delta = {};
  template <class At>
  __device__ QueryTerms(const Args<bf16>& a, At at) {
    for_rows([&](LaneRow i) {
      const QueryAt q = at(i);
      if (q.row < 0) return;
      lse[i] = a.lse[q.row * a.x.heads + q.head];
      delta[i] = get_delta(a.dq.row(q.row) + q.head * a.x.head_dim);
    });
  }
};
template <int kD, class At>
__device__ __forceinline__ void write_query_gradients(const Args<bf16>& a, At at, Accumulator<kD>& dq) {
  for_rows([&](LaneRow i) {
    const QueryAt q = at(i);
    if (q.row < 0) return;
    bf16* const to = a.dq.row(q.row) + q.head * a.x.head_dim;
    dq.for_row(i, [&](int c, float sum) {
      if (c < a.x.head_dim) to[c] = from_float<bf16>(sum * a.x.scale);
    });
  });
}

}  // namespace

}  // namespace pare::PARE_CUDA
