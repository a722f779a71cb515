// Attention backward of one segment and one key head; AttnBwd states the order of the chains.  Blocks
// of up to 96 rows by 64 slots: weights and gradients of scores lie on the stack, made by a tile of its own; all other
// products go through the register tile.
// Terms of slots that a row does not see enter the chains as products with +0.
#include "cpu/isa/attention.h"
#include "cpu/kernels.h"

namespace pare::PARE_ISA {
namespace {

constexpr int64_t kRowBlock = kAttnBwdRows;

template <class T>
struct Rows {
  T* first;
  int64_t stride;
  PARE_INLINE Rows from(int64_t row) const { return {first + row * stride, stride}; }
};

// c[rows][width] = start + a b over `depth` for a row tile of any width (a multiple of 16).  Start: c, or
// (`fresh`) +0.
template <class Choose>
PARE_INLINE void multiply_add(Choose choose, int64_t rows, int64_t depth, const float* a, int64_t as,
                              Rows<const float> b, Rows<float> c, int64_t width, bool fresh = false) {
  for (int64_t d = 0, np; d < width; d += np * 16) {
    np = tile_panels(rows, (width - d) / 16);
    Tile t;
    t.depth = depth;
    t.a = a;
    t.as = as;
    t.bs = b.stride;
    t.c = c.first + d;
    t.cs = c.stride;
    t.start = fresh ? nullptr : t.c;
    t.ss = t.cs;
    for (int64_t p = 0; p < np; p++) t.b[p] = b.first + d + p * 16;
    choose(rows, np)(t);
  }
}

// Operands of one segment and key head.  `padded`: head_dim rounded up to 16.  What is only read is copied, for rows
// that lie a power of two apart compete for a few sets of the L1 cache; sums are added to in place where rows are as
// wide as that (`whole`), else by way of scratch.
struct Operands {
  float *k_across, *v_across;                // scratch: [slots / 16][head_dim][16]
  float* k;                                  // scratch: [slots][padded]
  float *q_room, *do_room, *dq_room, *room;  // scratch: [kRowBlock][padded], `room` [kAttnBwdSlots][padded]
  Slots<float> dk, dv;
  Rows<const float> q, d_o;  // of a block of rows
  Rows<float> dq;
  int64_t head_dim, padded;
  bool whole;
  Prefetcher ahead;  // what the next segment reads and writes
};

// Rows and slots go in groups of 8, so that what a chain leaves out (the rows above its slots, the slots behind its
// rows) does not depend on the height of a tile.
constexpr int64_t kGroup = 8;
static_assert(kTileRows <= kAttnBwdSlots);

// Calls f(begin, count) for tiles of rows [begin, end).
template <class F>
PARE_INLINE void for_tiles(int64_t begin, int64_t end, F f) {
  for (int64_t r = begin; r < end; r += kTileRows) f(r, min64(kTileRows, end - r));
}
// The same, each tile inside of one group; begin is a multiple of kGroup.
template <class F>
PARE_INLINE void for_tiles_of_groups(int64_t begin, int64_t end, F f) {
  for (int64_t g = begin; g < end; g += kGroup) for_tiles(g, min64(end, g + kGroup), f);
}
PARE_INLINE int64_t whole_groups(int64_t n) { return (n + kGroup - 1) / kGroup * kGroup; }

// Rows and panels of 16 slots whose scores fill the registers together.
#if defined(__AVX512F__)
constexpr int kScoreRows = 6, kScorePanels = 4;
#else
constexpr int kScoreRows = 6, kScorePanels = 1;
#endif

// What is made of the scores of a block, and what of its rows that takes.
struct ScoreTiles {
  float *p, *ds;  // [rows][kAttnBlock]: weights, and gradients of scores
  const float *minus_lse, *delta;
  float scale;
};

// sums[i][j] = rows i of `rows` times panels j of `across`; V: vf or vh.
template <int kRows, int kPanels, class V>
PARE_INLINE void products(V (&sums)[kRows][kPanels], Rows<const float> rows, const float* across, int64_t head_dim) {
  PARE_UNROLL
  for (int i = 0; i < kRows; i++) PARE_UNROLL
  for (int j = 0; j < kPanels; j++) fill(sums[i][j], 0);
  const int64_t stride = rows.stride;
  // Three rows to a pointer, at 0, 1 and 2 strides; gcc would make one of each row, more than stay in registers, but
  // for the asm below.
  const float *x = rows.first, *y = rows.from(3).first;
  for (int64_t d = 0; d < head_dim; d++, across += 16) {
    V b[kPanels];
    PARE_UNROLL
    for (int j = 0; j < kPanels; j++) {
      fetch(b[j], across + j * 16 * head_dim);
      hold(b[j]);
    }
    PARE_UNROLL
    for (int i = 0; i < kRows; i++) {
      // Not in one expression: with -fsanitize=shift gcc 12 then computes the index in one case only.
      const float* const row = i < 3 ? x : y;
      V a;
      fill(a, row[i % 3 * stride]);
      PARE_UNROLL
      for (int j = 0; j < kPanels; j++) sums[i][j] = fma(a, b[j], sums[i][j]);
    }
    x++;
    y++;
    asm("" : "+r"(x), "+r"(y));
  }
}

// Rows [r, r + kRows) and panels [panel, panel + kPanels) of the block at slot `first`.  Row r sees `visible` slots
// from there on, each further row one more: p and ds are +0 for what a row does not see, and anything behind the last
// slot.  V: vf, or vh where the tile is one panel of which no row sees more than 8.
template <int kRows, int kPanels, class V>
[[gnu::noinline]] void score_tile(const ScoreTiles& out, const Operands& x, int64_t r, int64_t panel, int64_t first,
                                  int64_t visible) {
  const int64_t head_dim = x.head_dim, slot = first + panel * 16;
  // Not by way of `out`: gcc would read these again after every store.
  float *const p = out.p + r * kAttnBlock + panel * 16, *const ds = out.ds + r * kAttnBlock + panel * 16;
  const float *const minus_lse = out.minus_lse + r, *const delta = out.delta + r;
  const vf scale = set1(out.scale), score_scale = set1(out.scale * kLog2E);
  // What a row sees has at most the weight 1.
  const auto weight = [&](int i, vf score) __attribute__((always_inline)) {
    return exp2_below_63(fma(score, score_scale, set1(minus_lse[i])));
  };
  const auto gradient = [&](vf weight, int i, vf d) __attribute__((always_inline)) {
    return mul(mul(weight, sub(d, set1(delta[i]))), scale);
  };
  V sums[kRows][kPanels];
  products<kRows, kPanels>(sums, x.q.from(r), x.k_across + slot * head_dim, head_dim);
  const auto each = [&](auto f) __attribute__((always_inline)) {
    PARE_UNROLL
    for (int i = 0; i < kRows; i++) PARE_UNROLL
    for (int j = 0; j < kPanels; j++) f(i, j, i * kAttnBlock + j * 16);
  };
  const bool all = visible >= (panel + kPanels) * 16;
  if (all)
    each([&](int i, int j, int64_t at) __attribute__((always_inline)) { store(p + at, weight(i, widen(sums[i][j]))); });
  else
    each([&](int i, int j, int64_t at) __attribute__((always_inline)) {
      const mask seen = first_lanes(max64(0, visible + i - (panel + j) * 16));
      store(p + at, select(seen, weight(i, widen(sums[i][j])), zero()));
    });
  products<kRows, kPanels>(sums, x.d_o.from(r), x.v_across + slot * head_dim, head_dim);
  if (all)
    each([&](int i, int j, int64_t at)
             __attribute__((always_inline)) { store(ds + at, gradient(load(p + at), i, widen(sums[i][j]))); });
  else
    each([&](int i, int j, int64_t at) __attribute__((always_inline)) {
      const mask seen = first_lanes(max64(0, visible + i - (panel + j) * 16));
      store(ds + at, select(seen, gradient(load(p + at), i, widen(sums[i][j])), zero()));
    });
}

// sums of slots [slot, slot + n) += a^T b over `depth` rows; a: [depth][kAttnBlock].
PARE_INLINE void add_to_slots(const Operands& x, const Slots<float>& sums, int64_t slot, int64_t n, int64_t depth,
                              const float* a, Rows<const float> b) {
  const bool in_place = x.whole && sums.even(slot, n);
  const Rows<float> c = in_place ? Rows<float>{sums.at(slot), sums.stride(slot)} : Rows<float>{x.room, x.padded};
  if (!in_place) pack_down(x.room, sums, slot, slot + n, x.head_dim);
  multiply_add(tile_by_columns, n, depth, a, kAttnBlock, b, c, x.padded);
  if (!in_place) unpack(sums, x.room, slot, slot + n, x.head_dim);
}

// One block: row r sees `seen` + r slots of the `slots` from `first` on.
void block(Operands& x, int64_t rows, int64_t first, int64_t slots, int64_t seen, float scale, const float* minus_lse,
           const float* delta) {
  alignas(64) float p[kRowBlock * kAttnBlock], ds[kRowBlock * kAttnBlock];
  const ScoreTiles tiles{p, ds, minus_lse, delta, scale};
  // The slots that some row of the group of r sees
  const auto reach = [&](int64_t r) { return max64(0, min64(slots, seen + r / kGroup * kGroup + kGroup - 1)); };
  for_pieces<kScoreRows>(
      rows, [&](auto row_count, int64_t r) __attribute__((always_inline)) {
        const int64_t reached = max64(0, min64(slots, seen + r + row_count.value - 1));
        const int64_t panels = (reached + 15) / 16, whole = (reached + 7) / 16;
        for_pieces<kScorePanels>(
            whole, [&](auto panel_count, int64_t panel) __attribute__((always_inline)) {
              score_tile<row_count.value, panel_count.value, vf>(tiles, x, r, panel, first, seen + r);
            });
        if (whole < panels) score_tile<row_count.value, 1, vh>(tiles, x, r, whole, first, seen + r);
        for (int64_t i = r; i < r + row_count.value; i++)
          for (int64_t j = panels * 16; j < reach(i); j += 16) store(ds + i * kAttnBlock + j, zero());
      });
  const auto slot_tile = [&](int64_t s, int64_t n, int64_t begin) {  // rows from `begin` on
    const int64_t depth = rows - begin, at = begin * kAttnBlock + s;
    add_to_slots(x, x.dv, first + s, n, depth, p + at, x.d_o.from(begin));
    add_to_slots(x, x.dk, first + s, n, depth, ds + at, x.q.from(begin));
    x.ahead.fetch_rows(24);
  };
  // Groups of slots of which every row sees one; of the others each has a first row that does.
  const int64_t seen_by_all = min64(slots, whole_groups(max64(0, seen)));
  for_tiles(0, seen_by_all, [&](int64_t s, int64_t n) { slot_tile(s, n, 0); });
  for_tiles_of_groups(seen_by_all, slots, [&](int64_t s, int64_t n) {
    const int64_t begin = s / kGroup * kGroup - seen + 1;
    if (begin < rows) slot_tile(s, n, begin);
  });
  const auto row_tile = [&](int64_t r, int64_t n) {
    multiply_add(tile_by_rows, n, reach(r), ds + r * kAttnBlock, kAttnBlock,
                 Rows<const float>{x.k + first * x.padded, x.padded}, x.dq.from(r), x.padded, first == 0);
  };
  // Groups of rows that do not reach the last slot, and those that do.
  const int64_t partial = min64(rows, whole_groups(max64(0, slots - seen - (kGroup - 1))));
  for_tiles_of_groups(0, partial, row_tile);
  for_tiles(partial, rows, row_tile);
}

// Rows [begin, begin + rows) of the segment, query head `head`.
void row_block(const AttnBwdArgs& a, const SegmentRow& s, Operands& x, int64_t head, int64_t begin, int64_t rows) {
  const AttnArgs& f = a.fwd;
  const int64_t row = s.row + begin, column = head * f.head_dim;
  const auto operand = [&](const float* matrix, int64_t stride, float* room) {
    const float* const in = matrix + row * stride + column;
    pack_down(room, Slots<const float>{nullptr, in, 0, stride, 0}, 0, rows, f.head_dim);
    return Rows<const float>{room, x.padded};
  };
  float minus_lse[kRowBlock], delta[kRowBlock];
  x.d_o = operand(a.d_o, a.do_stride, x.do_room);
  for (int64_t r = 0; r < rows; r += 16) {
    const float *d_o = x.d_o.from(r).first, *o = f.o + (row + r) * a.o_stride + column;
    const vf products = sums(
        rows - r, [&](int i) __attribute__((always_inline)) {
          return lane_products(d_o + i * x.padded, o + i * a.o_stride, f.head_dim);
        });
    store(delta + r, products);
  }
  x.q = operand(f.q, f.q_stride, x.q_room);
  float* const dq = a.dq + row * a.dq_stride + column;
  x.dq = x.whole ? Rows<float>{dq, a.dq_stride} : Rows<float>{x.dq_room, x.padded};
  for (int64_t r = 0; r < rows; r++) minus_lse[r] = -f.lse[(row + r) * f.heads + head];
  const int64_t seen = s.parent_len + begin + 1, end = seen + rows - 1;  // by the first row; by the last
  for (int64_t first = 0; first < end; first += kAttnBlock)
    block(x, rows, first, min64(kAttnBlock, end - first), seen - first, f.scale, minus_lse, delta);
  if (!x.whole) unpack(Slots<float>{nullptr, dq, 0, a.dq_stride, 0}, x.dq_room, 0, rows, f.head_dim);
}

}  // namespace

// All rows that are the segment's own.
PARE_INLINE static void add_rows(Prefetcher& ahead, const AttnBwdArgs& a, const SegmentRow& s, int64_t kv_head) {
  const int64_t head_dim = a.fwd.head_dim, group = a.fwd.group * head_dim;
  const auto add = [&](const float* matrix, int64_t stride, int64_t columns) {
    ahead.add(matrix + s.row * stride + kv_head * columns, stride, s.len, columns);
  };
  add(a.fwd.k, a.fwd.k_stride, head_dim);
  add(a.fwd.v, a.fwd.v_stride, head_dim);
  add(a.dk, a.dk_stride, head_dim);
  add(a.dv, a.dv_stride, head_dim);
  add(a.d_o, a.do_stride, group);
  add(a.fwd.o, a.o_stride, group);
  add(a.fwd.q, a.fwd.q_stride, group);
  add(a.dq, a.dq_stride, group);
}

void attn_bwd(const AttnBwdArgs& a, const AttnTurn& turn) {
  const SegmentRow& s = *turn.piece.segment;
  const int64_t kv_head = turn.piece.kv_head, slots = s.parent_len + s.len, head_dim = a.fwd.head_dim,
                padded = round16(head_dim);
  Operands x{};
  x.head_dim = head_dim;
  x.padded = padded;
  x.whole = head_dim == padded;
  if (turn.next.segment) add_rows(x.ahead, a, *turn.next.segment, turn.next.kv_head);
  float* free = turn.scratch;
  const auto take = [&](int64_t n) { return std::exchange(free, free + n); };
  x.k_across = take(turn.room * head_dim);
  x.v_across = take(turn.room * head_dim);
  x.k = take(turn.room * padded);
  x.q_room = take(kRowBlock * padded);
  x.do_room = take(kRowBlock * padded);
  x.dq_room = take(kRowBlock * padded);
  x.room = take(kAttnBwdSlots * padded);
  x.dk = segment_slots(a.fwd, s, kv_head, a.dpk, a.dpk_stride, a.dk, a.dk_stride);
  x.dv = segment_slots(a.fwd, s, kv_head, a.dpv, a.dpv_stride, a.dv, a.dv_stride);
  pack_across(x.k_across, key_slots(a.fwd, s, kv_head), turn.packed, slots, head_dim);
  pack_across(x.v_across, value_slots(a.fwd, s, kv_head), turn.packed, slots, head_dim);
  pack_down(x.k + turn.packed * padded, key_slots(a.fwd, s, kv_head), turn.packed, slots, head_dim);
  // Row blocks of even size: the products with few rows cost more than their share.
  const int64_t blocks = (s.len + kRowBlock - 1) / kRowBlock;
  const int64_t rows = ((s.len + blocks - 1) / blocks + kGroup - 1) / kGroup * kGroup;
  for (int64_t g = 0; g < a.fwd.group; g++)
    for (int64_t begin = 0; begin < s.len; begin += rows)
      row_block(a, s, x, kv_head * a.fwd.group + g, begin, min64(rows, s.len - begin));
}

}  // namespace pare::PARE_ISA
