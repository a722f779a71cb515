// Attention forward, packed and paged, through one function: blocks of 64 slots, ascending, online softmax (ops.h
// states every order).  So a row computed alone from pages has the bits of the same row computed among others from a
// batch.
#include "cpu/isa/attention.h"

#include "cpu/isa/kernel_list.h"

namespace pare::PARE_ISA {
namespace {

// Panels of 16 slots: K across [width][16], V down [16][value_width].  Panel j lies at base + (pages ? pages[j] : j) *
// step.
struct Panels {
  const float* base;
  const int32_t* pages;
  int64_t step;
  PARE_INLINE const float* at(int64_t j) const { return base + (pages ? pages[j] : j) * step; }
};

struct QueryTile {
  int64_t rows = 0;
  const float* q = nullptr;  // (row, d): q[d * rows + row], or q[row * width + d] if in_place
  bool in_place = false;
  const int64_t* visible = nullptr;  // [rows] slots that each row sees, ascending, at least 1
  float* o = nullptr;                // [rows][value_width] out
  float max[16] = {}, sum[16] = {};  // out: the largest scaled score, and the sum of exponentials relative to it
};

// o += p v over the slots that each row sees in the block at `first`: one chain per element, slots ascending.  Rows see
// ever more slots, so the tile shrinks from above.
void add_values(QueryTile& t, const float* p, const Panels& v, int64_t first, int64_t value_width) {
  int64_t begin = first, r = 0;
  while (r < t.rows) {
    const int64_t end = min64(t.visible[r], first + kBlock);
    while (begin < end) {
      const int64_t panel = begin / 16, in_panel = begin % 16;
      const float* values = v.at(panel);
      int64_t stop = (panel + 1) * 16;
      while (stop < end && v.at(stop / 16) == values + (stop - panel * 16) * value_width) stop += 16;
      stop = min64(stop, end);
      multiply_add(tile_by_rows, t.rows - r, stop - begin, p + r * kBlock + begin - first, kBlock,
                   values + in_panel * value_width, t.o + r * value_width, value_width);
      begin = stop;
    }
    while (r < t.rows && min64(t.visible[r], first + kBlock) <= end) r++;
  }
}

// `value_width`: width rounded up to 16; rows of V are as long, so that they can be read in whole vectors.
void attend(QueryTile& t, const Panels& k, const Panels& v, int64_t width, int64_t value_width, float scale) {
  alignas(64) float s[kTileRows * kBlock], next[16], alpha[16];
  const vf minus_infinity = set1(-__builtin_inff());
  store(t.max, minus_infinity), store(t.sum, zero()), store(next, zero());
  for (int64_t i = 0; i < t.rows * value_width; i += 16) store(t.o + i, zero());
  const int64_t slots = t.visible[t.rows - 1];
  for (int64_t first = 0; first < slots; first += kBlock) {
    const int64_t panels = (min64(slots - first, kBlock) + 15) / 16;
    for (int64_t p = 0, np; p < panels; p += np) {
      np = tile_panels(t.rows, panels - p);
      Tile score{.depth = width, .a = t.q, .as = t.in_place ? width : t.rows, .c = s + p * 16, .cs = kBlock};
      for (int64_t i = 0; i < np; i++) score.b[i] = k.at(first / 16 + p + i);
      (t.in_place ? tile_by_rows : tile_by_columns)(t.rows, np)(score);
    }
    for (int64_t r = 0; r < t.rows; r++) {
      const int64_t seen = min64(t.visible[r] - first, kBlock);
      vf highest_lanes = minus_infinity;
      for (int64_t j = 0; j < seen; j += 16) {
        float* const row = s + r * kBlock + j;
        const vf z = select(first_lanes(seen - j), mul(load(row), set1(scale)), minus_infinity);
        store(row, z);
        highest_lanes = max(highest_lanes, z);
      }
      const float m = highest(highest_lanes);
      next[r] = m > t.max[r] ? m : t.max[r];
    }
    store(alpha, exp(sub(load(t.max), load(next))));
    store(t.max, load(next));
    for (int64_t r = 0; r < t.rows; r++) {
      vf sums = zero();
      for (int64_t j = 0; j < t.visible[r] - first && j < kBlock; j += 16) {
        float* const row = s + r * kBlock + j;
        const vf p = exp(sub(load(row), set1(next[r])));  // absent slots: exp(-infinity) is +0
        store(row, p);
        sums = add(sums, p);
      }
      t.sum[r] = __builtin_fmaf(t.sum[r], alpha[r], sum(sums));
      if (alpha[r] != 1)
        for (int64_t d = 0; d < value_width; d += 16) {
          float* const o = t.o + r * value_width + d;
          store(o, mul(load(o), set1(alpha[r])));
        }
    }
    add_values(t, s, v, first, value_width);
  }
}

PARE_INLINE void write_row(float* o, const QueryTile& t, int64_t r, int64_t width, int64_t value_width) {
  const vf l = set1(t.sum[r]);
  for_vectors(
      width, PARE_LANES_AT(d) { store(o + d, div(load(t.o + r * value_width + d), l), lanes); });
}

// Copies rows of q, [rows][width] at `q(row)`, to columns.
template <class Row>
PARE_INLINE void pack_queries(float* out, Row q, int64_t rows, int64_t width) {
  for (int64_t d = 0; d < width; d += 16) {
    const int64_t dn = min64(16, width - d);
    vf r[16];
    PARE_UNROLL
    for (int i = 0; i < 16; i++) r[i] = i < rows ? load(q(i) + d, dn) : zero();
    transpose(r);
    for (int64_t i = 0; i < dn; i++) store(out + (d + i) * rows, r[i]);
  }
}

}  // namespace

// Scratch: K across, V down, a tile of o and one of q.
void attn_fwd(const AttnArgs& a, const SegmentRow& s, int64_t kv_head, Range rows, float* scratch) {
  const int64_t slots = s.parent_len + rows.end, value_width = round16(a.width), g = a.group;
  float *keys = scratch, *values = keys + round16(slots) * a.width, *o = values + slots * value_width,
        *q = o + 16 * value_width;
  pack_across(keys, key_slots(a, s, kv_head), slots, a.width);
  pack_down(values, value_slots(a, s, kv_head), slots, a.width);
  const Panels k{keys, nullptr, 16 * a.width}, v{values, nullptr, 16 * value_width};
  const int64_t end = rows.end * g, share = even_rows(end - rows.begin * g);
  // Query rows in the order (own row, head of the group): what they see ascends.
  for (int64_t first = rows.begin * g; first < end; first += share) {
    int64_t visible[16];
    QueryTile t{.rows = min64(share, end - first), .q = q, .visible = visible, .o = o};
    for (int64_t r = 0; r < t.rows; r++) visible[r] = s.parent_len + (first + r) / g + 1;
    const auto query = [&](int64_t r) {
      return a.q + (s.row + (first + r) / g) * a.q_stride + (kv_head * g + (first + r) % g) * a.width;
    };
    pack_queries(q, query, t.rows, a.width);
    attend(t, k, v, a.width, value_width, a.scale);
    float lse[16];
    store(lse, add(load(t.max), log(load(t.sum))));
    for (int64_t r = 0; r < t.rows; r++) {
      const int64_t at = (s.row + (first + r) / g) * a.heads + kv_head * g + (first + r) % g;
      write_row(a.o + at * a.width, t, r, a.width, value_width);
      a.lse[at] = lse[r];
    }
  }
}

void attn_paged(const PagedArgs& a, const PagedRow& row, int64_t kv_head, float* scratch) {
  const int64_t value_width = round16(a.width), g = a.group, page = 16 * a.width, kv_heads = a.heads / g;
  const int32_t* const pages = a.page_table + row.table_row * a.table_stride;
  float *o = scratch, *q = o + 16 * value_width, *values = q + 16 * a.width + 16;
  const Panels k{a.k_pages + kv_head * page, pages, kv_heads * page};
  Panels v{a.v_pages + kv_head * page, pages, kv_heads * page};
  if (value_width != a.width) {  // vectors would run over the end of a row: copy to longer ones
    for (int64_t slot = 0; slot < row.slots; slot++)
      for (int64_t d = 0; d < a.width; d += 16)
        store(values + slot * value_width + d, load(v.at(slot / 16) + slot % 16 * a.width + d, a.width - d));
    v = {values, nullptr, 16 * value_width};
  }
  const int64_t end = row.rows * g, share = even_rows(end);
  for (int64_t first = 0; first < end; first += share) {
    int64_t visible[16];
    QueryTile t{.rows = min64(share, end - first), .in_place = row.rows == 1, .visible = visible, .o = o};
    for (int64_t r = 0; r < t.rows; r++) visible[r] = row.slots - row.rows + (first + r) / g + 1;
    const auto query = [&](int64_t r) {
      return a.q + (row.row + (first + r) / g) * a.q_stride + (kv_head * g + (first + r) % g) * a.width;
    };
    t.q = t.in_place ? query(0) : q;
    if (!t.in_place) pack_queries(q, query, t.rows, a.width);
    attend(t, k, v, a.width, value_width, a.scale);
    for (int64_t r = 0; r < t.rows; r++)
      write_row(a.o + ((row.row + (first + r) / g) * a.heads + kv_head * g + (first + r) % g) * a.width, t, r, a.width,
                value_width);
  }
}

}  // namespace pare::PARE_ISA
