// Attention forward, packed and paged, through one function: blocks of 64 slots, ascending, online softmax
// (attention_ops.h states every order).  So a row computed alone from pages has the bits of the same row computed among
// others from a batch.
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

// Query rows that are computed together: their scores of four panels fill the registers.
constexpr int kQueryRows = 6;
// Panels of 16 for `rows` rows at once.
constexpr int most_panels(int rows) { return kTileVectors / rows < kTilePanels ? kTileVectors / rows : kTilePanels; }

struct QueryTile {
  int64_t rows = 0;                    // at most kQueryRows
  const float* q[kQueryRows] = {};     // [width] each
  int64_t visible[kQueryRows] = {};    // slots that each row sees, ascending, at least 1
  const float* bias = nullptr;         // of each slot, added to the scaled score; null: none
  float* o = nullptr;                  // [rows][value_width] out
  alignas(64) float max[16], sum[16];  // out: the largest scaled score, and the sum of exponentials relative to it
  // Out where not null: the weights, [rows][stride], each relative to the maximum after its block, and those maxima,
  // [blocks][16].
  float *weights = nullptr, *maxima = nullptr;
  int64_t stride = 0;
};

// s[row][16 p + j]: the dot products of the rows and kPanels panels of keys from panel `first` on.
template <int kRows, int kPanels>
PARE_INLINE void score_panels(const QueryTile& t, const Panels& k, int64_t first, int64_t width, float* s) {
  vf acc[kRows][kPanels];
  const float *q[kRows], *b[kPanels];
  PARE_UNROLL
  for (int r = 0; r < kRows; r++) {
    q[r] = t.q[r];
    PARE_UNROLL
    for (int p = 0; p < kPanels; p++) acc[r][p] = zero();
  }
  PARE_UNROLL
  for (int p = 0; p < kPanels; p++) b[p] = k.at(first + p);
  for (int64_t d = 0; d < width; d++) {
    vf keys[kPanels];
    PARE_UNROLL
    for (int p = 0; p < kPanels; p++) keys[p] = load(b[p] + d * 16), hold(keys[p]);
    PARE_UNROLL
    for (int r = 0; r < kRows; r++) {
      const vf x = set1(q[r][d]);
      PARE_UNROLL
      for (int p = 0; p < kPanels; p++) acc[r][p] = fma(x, keys[p], acc[r][p]);
    }
  }
  PARE_UNROLL
  for (int r = 0; r < kRows; r++) PARE_UNROLL
  for (int p = 0; p < kPanels; p++) store(s + r * kBlock + p * 16, acc[r][p]);
}

// o = o alpha + p v in columns [0, 16 kPanels) over the slots that each row sees in the block at `first`: one chain per
// element, slots ascending.
template <int kRows, int kPanels>
PARE_INLINE void add_values(const QueryTile& t, const float* p, const float* alpha, const Panels& v, int64_t first,
                            int64_t column, int64_t value_width) {
  vf acc[kRows][kPanels];
  float* const o = t.o + column;
  PARE_UNROLL
  for (int r = 0; r < kRows; r++) PARE_UNROLL
  for (int i = 0; i < kPanels; i++) acc[r][i] = mul(load(o + r * value_width + i * 16), set1(alpha[r]));
  const int64_t end = min64(t.visible[kRows - 1], first + kBlock), all = min64(t.visible[0], end);
  for (int64_t page = first; page < end; page += 16) {
    const float* values = v.at(page / 16) + column;
    int64_t slot = page;
    for (; slot < min64(all, page + 16); slot++, values += value_width, p++) {
      vf x[kPanels];
      PARE_UNROLL
      for (int i = 0; i < kPanels; i++) x[i] = load(values + i * 16), hold(x[i]);
      PARE_UNROLL
      for (int r = 0; r < kRows; r++) {
        const vf weight = set1(p[r * kBlock]);
        PARE_UNROLL
        for (int i = 0; i < kPanels; i++) acc[r][i] = fma(weight, x[i], acc[r][i]);
      }
    }
    for (; slot < min64(end, page + 16); slot++, values += value_width, p++) PARE_UNROLL
    for (int r = 0; r < kRows; r++)
      if (slot < t.visible[r]) {
        const vf weight = set1(p[r * kBlock]);
        PARE_UNROLL
        for (int i = 0; i < kPanels; i++) acc[r][i] = fma(weight, load(values + i * 16), acc[r][i]);
      }
  }
  PARE_UNROLL
  for (int r = 0; r < kRows; r++) PARE_UNROLL
  for (int i = 0; i < kPanels; i++) store(o + r * value_width + i * 16, acc[r][i]);
}

// Calls f(integral constant n, i) for pieces [i, i + n) of [0, count), n at most kMost.
template <int n>
struct Count {
  static constexpr int value = n;
};
template <int kMost, class F>
PARE_INLINE void for_pieces(int64_t count, F f) {
  int64_t i = 0;
  for (; i + kMost <= count; i += kMost) f(Count<kMost>{}, i);
  if constexpr (kMost > 3)
    if (count - i == 3) return f(Count<3>{}, i);
  if constexpr (kMost > 2)
    if (count - i == 2) return f(Count<2>{}, i);
  if constexpr (kMost > 1)
    if (count - i == 1) return f(Count<1>{}, i);
}

// Turns the scores of the block at `first` into weights relative to the new maximum of each row; alpha[r] is what
// sums so far of row r are worth beside them.
template <int kRows>
PARE_INLINE void weigh(QueryTile& t, float* s, float* alpha, int64_t first, float scale) {
  const vf minus_infinity = set1(-__builtin_inff());
  alignas(64) float next[16] = {};
  for (int64_t r = 0; r < kRows; r++) {
    const int64_t seen = min64(t.visible[r] - first, kBlock);
    vf highest_lanes = minus_infinity;
    for (int64_t j = 0; j < seen; j += 16) {
      float* const row = s + r * kBlock + j;
      vf z = mul(load(row), set1(scale));
      if (t.bias) z = add(z, load(t.bias + first + j));
      z = select(first_lanes(seen - j), z, minus_infinity);
      store(row, z);
      highest_lanes = max(highest_lanes, z);
    }
    const float m = highest(highest_lanes);
    next[r] = m > t.max[r] ? m : t.max[r];
  }
  if (first) store(alpha, exp(sub(load(t.max), load(next))));  // else there is nothing yet
  store(t.max, load(next));
  float* const weights = t.weights;
  if (weights) store(t.maxima + first / kBlock * 16, load(next));
  for (int64_t r = 0; r < kRows; r++) {
    vf sums = zero();
    for (int64_t j = 0; j < t.visible[r] - first && j < kBlock; j += 16) {
      float* const row = s + r * kBlock + j;
      const vf p = exp_below_89(sub(load(row), set1(next[r])));  // absent slots: exp(-infinity) is +0
      store(row, p);
      if (weights) store(weights + r * t.stride + first + j, p);
      sums = add(sums, p);
    }
    t.sum[r] = __builtin_fmaf(t.sum[r], alpha[r], sum(sums));
  }
}

// `value_width`: width rounded up to 16; rows of V are as long, so that they can be read in whole vectors.
template <int kRows>
void attend(QueryTile& t, const Panels& k, const Panels& v, int64_t width, int64_t value_width, float scale) {
  constexpr int kMost = most_panels(kRows);
  alignas(64) float scores[2][kRows * kBlock], alpha[16] = {};
  store(t.max, set1(-__builtin_inff())), store(t.sum, zero());
  for (int64_t i = 0; i < kRows * value_width; i += 16) store(t.o + i, zero());
  const int64_t slots = t.visible[kRows - 1];
  // The scores of the next block come before the values of this one: they need not wait for the exponentials.
  float *s = scores[0], *next = scores[1];
  const auto score = [&](int64_t first, float* out) __attribute__((always_inline)) {
    for_pieces<kMost>((min64(slots - first, kBlock) + 15) / 16, [&](auto n, int64_t p) __attribute__((always_inline)) {
      score_panels<kRows, n.value>(t, k, first / 16 + p, width, out + p * 16);
    });
  };
  for (int64_t first = -kBlock; first < slots; first += kBlock) {
    if (first >= 0) weigh<kRows>(t, s, alpha, first, scale);
    if (first + kBlock < slots) score(first + kBlock, next);
    if (first >= 0)
      for_pieces<kMost>(
          value_width / 16, [&](auto n, int64_t p) __attribute__((always_inline)) {
            add_values<kRows, n.value>(t, s, alpha, v, first, p * 16, value_width);
          });
    float* const swap = s;
    s = next, next = swap;
  }
}

void attend(QueryTile& t, const Panels& k, const Panels& v, int64_t width, int64_t value_width, float scale) {
  switch (t.rows) {
    case 1:
      return attend<1>(t, k, v, width, value_width, scale);
    case 2:
      return attend<2>(t, k, v, width, value_width, scale);
    case 3:
      return attend<3>(t, k, v, width, value_width, scale);
    case 4:
      return attend<4>(t, k, v, width, value_width, scale);
    case 5:
      return attend<5>(t, k, v, width, value_width, scale);
    case 6:
      return attend<6>(t, k, v, width, value_width, scale);
  }
}

PARE_INLINE void write_row(float* o, const QueryTile& t, int64_t r, int64_t width, int64_t value_width) {
  const vf l = set1(t.sum[r]);
  for_vectors(
      width, PARE_LANES_AT(d) { store(o + d, div(load(t.o + r * value_width + d), l), lanes); });
}

// Rows of one tile, of n in all.
PARE_INLINE int64_t row_share(int64_t n) {
  const int64_t tiles = (n + kQueryRows - 1) / kQueryRows;
  return (n + tiles - 1) / tiles;
}

// What AttnPagedMass adds up, for one entry and key head: slots [first, slots).
struct Mass {
  float* pages;
  const int32_t* table;
  int64_t kv_heads, kv_head, first, slots;
  // Lanes [begin, end) of x become new ones where they are slots that have mass; f(old) is what is new.
  template <class F>
  PARE_INLINE void change(int64_t slot, int64_t begin, F f) const {
    float* const at = pages + (table[slot / 16] * kv_heads + kv_head) * 16;
    const vf old = load(at), x = f(old);
    const mask low = first_lanes(max64(begin - slot, 0)), high = first_lanes(slots - slot);
    store(at, select(low, old, select(high, x, old)));
  }
};
void clear_new(const Mass& mass, int64_t old) {
  const int64_t begin = max64(mass.first, old);
  for (int64_t s = begin / 16 * 16; s < mass.slots; s += 16) mass.change(s, begin, [](vf) { return zero(); });
}
// After attend() has kept the weights of a tile.
void add_mass(const QueryTile& t, const Mass& mass) {
  const int64_t slots = t.visible[t.rows - 1], begin = mass.first / 16 * 16;
  for (int64_t block = begin / kBlock * kBlock; block < slots; block += kBlock) {
    alignas(64) float f[16];
    store(f, div(exp_below_89(sub(load(t.maxima + block / kBlock * 16), load(t.max))), load(t.sum)));
    for (int64_t s = max64(block, begin); s < min64(block + kBlock, slots); s += 16)
      mass.change(s, mass.first, [&](vf x) {
        for (int64_t r = 0; r < t.rows; r++)
          if (s < t.visible[r]) x = fma(load(t.weights + r * t.stride + s), set1(f[r]), x);
        return x;
      });
  }
}

}  // namespace

// Scratch: K across, V down, a tile of o.
void attn_fwd(const AttnArgs& a, const SegmentRow& s, int64_t kv_head, Range rows, float* scratch) {
  const int64_t slots = s.parent_len + rows.end, value_width = round16(a.width), g = a.group;
  float *keys = scratch, *values = keys + round16(slots) * a.width, *o = values + slots * value_width;
  pack_across(keys, key_slots(a, s, kv_head), slots, a.width);
  pack_down(values, value_slots(a, s, kv_head), slots, a.width);
  const Panels k{keys, nullptr, 16 * a.width}, v{values, nullptr, 16 * value_width};
  const int64_t end = rows.end * g, share = row_share(end - rows.begin * g);
  // Query rows in the order (own row, head of the group): what they see ascends.
  for (int64_t first = rows.begin * g; first < end; first += share) {
    QueryTile t;
    t.rows = min64(share, end - first), t.o = o;
    for (int64_t r = 0; r < t.rows; r++) {
      const int64_t row = (first + r) / g, head = kv_head * g + (first + r) % g;
      t.q[r] = a.q + (s.row + row) * a.q_stride + head * a.width, t.visible[r] = s.parent_len + row + 1;
    }
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
  const int64_t value_width = round16(a.width), g = a.group, head = kv_head * a.head_step;
  const int32_t* const pages = a.page_table ? a.page_table + row.table_row * a.table_stride : nullptr;
  float *o = scratch, *values = o + kQueryRows * value_width;
  const Panels k{a.k_pages + head, pages, a.page_step};
  Panels v{a.v_pages + head, pages, a.page_step};
  if (value_width != a.width) {  // vectors would run over the end of a row: copy to longer ones
    for (int64_t slot = 0; slot < row.slots; slot++)
      for (int64_t d = 0; d < a.width; d += 16)
        store(values + slot * value_width + d, load(v.at(slot / 16) + slot % 16 * a.width + d, a.width - d));
    v = {values, nullptr, 16 * value_width};
  }
  float* const bias = values + (value_width != a.width ? row.slots * value_width : 0);
  for (int64_t s = 0; a.count_pages && s < row.slots; s += 16)
    store(bias + s, log(load(a.count_pages + (pages[s / 16] * (a.heads / g) + kv_head) * 16)));
  const Mass mass{a.mass_pages, pages, a.heads / g, kv_head, a.first_mass, row.slots};
  float* const maxima = bias + (a.count_pages ? round16(row.slots) : 0);
  if (a.mass_pages) clear_new(mass, row.slots - row.rows);
  const int64_t end = row.rows * g, share = row_share(end);
  for (int64_t first = 0; first < end; first += share) {
    QueryTile t;
    t.rows = min64(share, end - first), t.o = o, t.bias = a.count_pages ? bias : nullptr;
    if (a.mass_pages)
      t.stride = round16(row.slots), t.maxima = maxima, t.weights = maxima + (row.slots + kBlock) / kBlock * 16;
    for (int64_t r = 0; r < t.rows; r++) {
      const int64_t i = (first + r) / g, head = kv_head * g + (first + r) % g;
      t.q[r] = a.q + (row.row + i) * a.q_stride + head * a.width, t.visible[r] = row.slots - row.rows + i + 1;
    }
    attend(t, k, v, a.width, value_width, a.scale);
    if (a.mass_pages) add_mass(t, mass);
    if (a.lse) {
      float lse[16];
      store(lse, add(load(t.max), log(load(t.sum))));
      for (int64_t r = 0; r < t.rows; r++)
        a.lse[(row.row + (first + r) / g) * a.heads + kv_head * g + (first + r) % g] = lse[r];
    }
    for (int64_t r = 0; r < t.rows; r++)
      write_row(a.o + ((row.row + (first + r) / g) * a.heads + kv_head * g + (first + r) % g) * a.width, t, r, a.width,
                value_width);
  }
}

}  // namespace pare::PARE_ISA
