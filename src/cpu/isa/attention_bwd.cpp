// Attention backward of one segment and one key head; attention_ops.h (AttnBwd) states the order of the chains.  Blocks
// of 64 rows by 64 slots: scores and their gradients as tiles on the stack, every product through the register tile.
// Terms of slots that a row does not see enter the chains as products with +0.
#include "cpu/isa/attention.h"
#include "cpu/isa/kernel_list.h"

namespace pare::PARE_ISA {
namespace {

constexpr int64_t kRowBlock = 64;

// c[rows][width] += a b over `depth` for a row tile of any width (a multiple of 16), c and b with rows `width` apart.
template <class Choose>
PARE_INLINE void multiply_add(Choose choose, int64_t rows, int64_t depth, const float* a, int64_t as, const float* b,
                              float* c, int64_t width) {
  for (int64_t d = 0, np; d < width; d += np * 16) {
    np = tile_panels(rows, (width - d) / 16);
    Tile t{.depth = depth, .a = a, .as = as, .bs = width, .c = c + d, .cs = width, .start = c + d, .ss = width};
    for (int64_t p = 0; p < np; p++) t.b[p] = b + d + p * 16;
    choose(rows, np)(t);
  }
}

// Rows that will be needed soon, fetched a few at a time while products run: they lie too far apart for the machine to
// foresee them.
class Ahead {
 public:
  PARE_INLINE void add(const float* rows, int64_t stride, int64_t count, int64_t width) {
    if (count) parts_[added_++] = {rows, stride, count, width};
  }
  PARE_INLINE void fetch_rows(int64_t n) {
    for (; n > 0 && now_ < added_; n--) {
      Part& p = parts_[now_];
      for (int64_t i = 0; i < p.width; i += 16) __builtin_prefetch(p.row + i, 0, 2);  // to the L2 cache
      p.row += p.stride;
      if (--p.count == 0) now_++;
    }
  }

 private:
  struct Part {
    const float* row;
    int64_t stride, count, width;
  };
  Part parts_[8];
  int added_ = 0, now_ = 0;
};

// Operands of one segment and key head in scratch memory.  `width` is padded to 16 in matrices that lie down.
struct Operands {
  float *k_across, *v_across;  // [slots / 16][width][16]
  float *k, *dk, *dv;          // [slots][padded]
  float *q, *d_o, *dq;         // [kRowBlock][padded]
  int64_t width, padded;
  Ahead ahead;  // what the next segment reads and writes
};

// Rows and slots go in groups of 8, so that what a chain leaves out (the rows above its slots, the slots behind its
// rows) does not depend on the height of a tile.
constexpr int64_t kGroup = 8;

// Calls f(begin, count) for tiles of rows [0, n), each inside of one group.
template <class F>
PARE_INLINE void for_tiles(int64_t n, F f) {
  for (int64_t g = 0; g < n; g += kGroup) {
    const int64_t rows = min64(kGroup, n - g), share = even_rows(rows);
    for (int64_t r = 0; r < rows; r += share) f(g + r, min64(share, rows - r));
  }
}

// out[rows][kBlock] = a bT: rows of a [rows][padded] times the panels across that row r sees, `seen` + r slots.
void scores(float* out, const float* a, const float* across, int64_t rows, int64_t slots, int64_t seen,
            const Operands& x) {
  constexpr int64_t share = 6;  // with four panels; fewer rows compute less that they do not see
  for (int64_t r = 0; r < rows; r += share) {
    const int64_t n = min64(share, rows - r), panels = (min64(slots, seen + r + n - 1) + 15) / 16;
    for (int64_t p = 0, np; p < panels; p += np) {
      np = tile_panels(n, panels - p);
      Tile t{.depth = x.width, .a = a + r * x.padded, .as = x.padded, .c = out + r * kBlock + p * 16, .cs = kBlock};
      for (int64_t i = 0; i < np; i++) t.b[i] = across + (p + i) * 16 * x.width;
      tile_by_rows(n, np)(t);
    }
  }
}

// One block: row r sees `seen` + r slots of the `slots` from `first` on.
void block(Operands& x, int64_t rows, int64_t first, int64_t slots, int64_t seen, float scale, const float* lse,
           const float* delta) {
  alignas(64) float p[kRowBlock * kBlock], ds[kRowBlock * kBlock];
  scores(p, x.q, x.k_across + first * x.width, rows, slots, seen, x);
  scores(ds, x.d_o, x.v_across + first * x.width, rows, slots, seen, x);
  // The slots that some row of the group of r sees
  const auto reach = [&](int64_t r) { return max64(0, min64(slots, seen + r / kGroup * kGroup + kGroup - 1)); };
  for (int64_t r = 0; r < rows; r++) {
    const vf l = set1(lse[r]), sub_delta = set1(delta[r]);
    const int64_t visible = min64(slots, seen + r);
    for (int64_t j = 0; j < visible; j += 16) {
      float *const pr = p + r * kBlock + j, *const dr = ds + r * kBlock + j;
      const mask seen_lanes = first_lanes(visible - j);
      // What a row sees has at most the weight 1.
      const vf weight = select(seen_lanes, exp_below_89(sub(mul(load(pr), set1(scale)), l)), zero());
      store(pr, weight);
      store(dr, select(seen_lanes, mul(mul(weight, sub(load(dr), sub_delta)), set1(scale)), zero()));
    }
    for (int64_t j = max64(0, (visible + 15) / 16 * 16); j < reach(r); j += 16) store(ds + r * kBlock + j, zero());
  }
  for_tiles(slots, [&](int64_t s, int64_t n) {
    // From the first row that sees a slot of this group on
    const int64_t begin = max64(0, s / kGroup * kGroup - seen + 1);
    if (begin >= rows) return;
    const float *const weights = p + begin * kBlock + s, *const gradients = ds + begin * kBlock + s;
    multiply_add(tile_by_columns, n, rows - begin, weights, kBlock, x.d_o + begin * x.padded,
                 x.dv + (first + s) * x.padded, x.padded);
    multiply_add(tile_by_columns, n, rows - begin, gradients, kBlock, x.q + begin * x.padded,
                 x.dk + (first + s) * x.padded, x.padded);
    x.ahead.fetch_rows(12);
  });
  for_tiles(rows, [&](int64_t r, int64_t n) {
    multiply_add(tile_by_rows, n, reach(r), ds + r * kBlock, kBlock, x.k + first * x.padded, x.dq + r * x.padded,
                 x.padded);
  });
}

PARE_INLINE void unpack(const Slots<float>& slots, const float* from, int64_t n, int64_t width) {
  for (int64_t s = 0; s < n; s++) {
    float* const row = slots.at(s);
    for_vectors(
        width, PARE_LANES_AT(d) { store(row + d, load(from), lanes), from += 16; });
  }
}

// out[r] = a[r] . b[r] for up to 16 rows, each as one chain over the columns like a score: where a row sees a single
// slot, do . o is then bitwise do . v, and its ds exactly 0.
void row_products(float* out, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t rows,
                  int64_t width) {
  alignas(64) float columns[16 * 16];  // both matrices at once would not fit the registers
  vf acc = zero();
  for_vectors(
      width, PARE_LANES_AT(d) {
        vf x[16];
        PARE_UNROLL
        for (int i = 0; i < 16; i++) x[i] = load(a + min64(i, rows - 1) * a_stride + d, lanes);
        transpose(x);
        PARE_UNROLL
        for (int i = 0; i < 16; i++) store(columns + i * 16, x[i]);
        PARE_UNROLL
        for (int i = 0; i < 16; i++) x[i] = load(b + min64(i, rows - 1) * b_stride + d, lanes);
        transpose(x);
        PARE_UNROLL
        for (int i = 0; i < 16; i++) acc = fma(load(columns + i * 16), x[i], acc);
      });
  store(out, acc, rows);
}

// Rows [begin, begin + rows) of the segment, query head `head`.
void row_block(const AttnBwdArgs& a, const SegmentRow& s, Operands& x, int64_t head, int64_t begin, int64_t rows) {
  const AttnArgs& f = a.fwd;
  const int64_t row = s.row + begin, column = head * f.width;
  const auto pack = [&](float* out, const float* in, int64_t stride) {
    pack_down(out, Slots<const float>{nullptr, in + row * stride + column, 0, stride, 0}, rows, f.width);
  };
  float lse[kRowBlock], delta[kRowBlock];
  pack(x.d_o, a.d_o, a.do_stride);
  for (int64_t r = 0; r < rows; r += 16)
    row_products(delta + r, a.d_o + (row + r) * a.do_stride + column, a.do_stride,
                 f.o + (row + r) * a.o_stride + column, a.o_stride, min64(16, rows - r), f.width);
  pack(x.q, f.q, f.q_stride);
  for (int64_t i = 0; i < rows * x.padded; i += 16) store(x.dq + i, zero());
  for (int64_t r = 0; r < rows; r++) lse[r] = f.lse[(row + r) * f.heads + head];
  const int64_t seen = s.parent_len + begin + 1, end = seen + rows - 1;  // by the first row; by the last
  for (int64_t first = 0; first < end; first += kBlock)
    block(x, rows, first, min64(kBlock, end - first), seen - first, f.scale, lse, delta);
  unpack(Slots<float>{nullptr, a.dq + row * a.dq_stride + column, 0, a.dq_stride, 0}, x.dq, rows, f.width);
}

}  // namespace

// All rows that are the segment's own.
PARE_INLINE static void add_rows(Ahead& ahead, const AttnBwdArgs& a, const SegmentRow& s, int64_t kv_head) {
  const int64_t width = a.fwd.width, group = a.fwd.group * width;
  const auto add = [&](const float* matrix, int64_t stride, int64_t columns) {
    ahead.add(matrix + s.row * stride + kv_head * columns, stride, s.len, columns);
  };
  add(a.fwd.k, a.fwd.k_stride, width), add(a.fwd.v, a.fwd.v_stride, width);
  add(a.dk, a.dk_stride, width), add(a.dv, a.dv_stride, width);
  add(a.d_o, a.do_stride, group), add(a.fwd.o, a.o_stride, group);
  add(a.fwd.q, a.fwd.q_stride, group), add(a.dq, a.dq_stride, group);
}

void attn_bwd(const AttnBwdArgs& a, const SegmentRow& s, int64_t kv_head, SegmentHead next, float* scratch) {
  const int64_t slots = s.parent_len + s.len, width = a.fwd.width, padded = round16(width);
  Operands x{};
  x.width = width, x.padded = padded;
  if (next.segment) add_rows(x.ahead, a, *next.segment, next.kv_head);
  float* room = scratch;
  const auto take = [&](int64_t n) { return room += n, room - n; };
  x.k_across = take(round16(slots) * width), x.v_across = take(round16(slots) * width);
  x.k = take(slots * padded), x.dk = take(slots * padded), x.dv = take(slots * padded);
  x.q = take(kRowBlock * padded), x.d_o = take(kRowBlock * padded), x.dq = take(kRowBlock * padded);
  const Slots<float> dk = segment_slots(a.fwd, s, kv_head, a.dpk, a.dpk_stride, a.dk, a.dk_stride);
  const Slots<float> dv = segment_slots(a.fwd, s, kv_head, a.dpv, a.dpv_stride, a.dv, a.dv_stride);
  pack_across(x.k_across, key_slots(a.fwd, s, kv_head), slots, width);
  pack_across(x.v_across, value_slots(a.fwd, s, kv_head), slots, width);
  pack_down(x.k, key_slots(a.fwd, s, kv_head), slots, width);
  pack_down(x.dk, dk, slots, width);
  pack_down(x.dv, dv, slots, width);
  for (int64_t g = 0; g < a.fwd.group; g++)
    for (int64_t begin = 0; begin < s.len; begin += kRowBlock)
      row_block(a, s, x, kv_head * a.fwd.group + g, begin, min64(kRowBlock, s.len - begin));
  unpack(dk, x.dk, slots, width);
  unpack(dv, x.dv, slots, width);
}

}  // namespace pare::PARE_ISA
