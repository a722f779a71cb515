// Attention forward, packed and paged, through one function: blocks of 64 slots, ascending, online softmax
// (list.h states every order).  So a row computed alone from pages has the bits of the same row computed among
// others from a batch.
#include "cpu/isa/attention.h"

#include "cpu/kernels.h"

namespace pare::PARE_ISA {
namespace {

// Panels of 16 slots: K across [head_dim][16], V down [16][value_dim].  Panel j lies at base + (pages ? pages[j] : j) *
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
  int64_t rows;                        // at most kQueryRows
  const float* q[kQueryRows];          // [head_dim] each
  int64_t at[kQueryRows];              // where each row lies in o and lse, in heads of a row
  int64_t visible[kQueryRows];         // slots that each row sees, ascending, at least 1
  float* o;                            // [rows][value_dim] out
  alignas(64) float max[16], sum[16];  // out: the largest scaled score, and the sum of weights relative to it
};
// What the tiles of a key head read, and what they may leave beside their outputs.
struct KeyHead {
  Panels k, v;
  int64_t slots;
  int64_t head_dim, value_dim;  // the latter rounded up to 16: rows of V are as long, to be read in whole vectors
  float scale;                  // in units of base 2
  // Out where not null, of a single tile: the weights, [rows][stride], each relative to the maximum after its block,
  // and those maxima, [blocks][16].
  float *weights = nullptr, *maxima = nullptr;
  int64_t stride = 0;
};

// s[row][16 p + j]: q.k of the rows and kPanels panels of keys from panel `first` on, -infinity where a row does not
// see the slot; highest[row]: also the maximum of them, by lane.  V: vf, or vh where the panel is one of which no row
// sees more than 8.
template <int kRows, int kPanels, class V>
PARE_INLINE void score_panels(const QueryTile& t, const KeyHead& h, int64_t first, float* s, vf* highest) {
  const int64_t head_dim = h.head_dim;
  V acc[kRows][kPanels];
  const float *q[kRows], *b[kPanels];
  PARE_UNROLL
  for (int r = 0; r < kRows; r++) {
    q[r] = t.q[r];
    PARE_UNROLL
    for (int p = 0; p < kPanels; p++) fill(acc[r][p], 0);
  }
  PARE_UNROLL
  for (int p = 0; p < kPanels; p++) b[p] = h.k.at(first + p);
  for (int64_t d = 0; d < head_dim; d++) {
    V keys[kPanels];
    PARE_UNROLL
    for (int p = 0; p < kPanels; p++) {
      fetch(keys[p], b[p] + d * 16);
      hold(keys[p]);
    }
    PARE_UNROLL
    for (int r = 0; r < kRows; r++) {
      V x;
      fill(x, q[r][d]);
      PARE_UNROLL
      for (int p = 0; p < kPanels; p++) acc[r][p] = fma(x, keys[p], acc[r][p]);
    }
  }
  const auto finish = [&](auto keep) __attribute__((always_inline)) {
    PARE_UNROLL
    for (int r = 0; r < kRows; r++) {
      vf most = set1(-__builtin_inff());
      PARE_UNROLL
      for (int p = 0; p < kPanels; p++) {
        const vf z = keep(r, p, widen(acc[r][p]));
        store(s + r * kAttnBlock + p * 16, z);
        most = p ? max(most, z) : z;
      }
      highest[r] = kPanels == kAttnBlock / 16 ? most : max(highest[r], most);
    }
  };
  if (t.visible[0] >= (first + kPanels) * 16)
    finish([](int, int, vf z) { return z; });
  else
    finish([&](int r, int p, vf z) __attribute__((always_inline)) {
      return select(first_lanes(max64(0, t.visible[r] - (first + p) * 16)), z, set1(-__builtin_inff()));
    });
}

// o = o alpha + p v in columns [0, 16 kPanels) over the slots that each row sees in the block at `first`: one chain per
// element, slots ascending.
template <int kRows, int kPanels>
PARE_INLINE void add_values(const QueryTile& t, const KeyHead& h, const float* p, const float* alpha, int64_t first,
                            int64_t column) {
  const int64_t value_dim = h.value_dim;
  vf acc[kRows][kPanels];
  float* const o = t.o + column;
  PARE_UNROLL
  for (int r = 0; r < kRows; r++) PARE_UNROLL
  for (int i = 0; i < kPanels; i++) acc[r][i] = first ? mul(load(o + r * value_dim + i * 16), set1(alpha[r])) : zero();
  const int64_t end = min64(t.visible[kRows - 1], first + kAttnBlock), all = min64(t.visible[0], end);
  for (int64_t page = first; page < end; page += 16) {
    const float* values = h.v.at(page / 16) + column;
    int64_t slot = page;
    for (; slot < min64(all, page + 16); slot++, values += value_dim, p++) {
      vf x[kPanels];
      PARE_UNROLL
      for (int i = 0; i < kPanels; i++) {
        x[i] = load(values + i * 16);
        hold(x[i]);
      }
      PARE_UNROLL
      for (int r = 0; r < kRows; r++) {
        const vf weight = set1(p[r * kAttnBlock]);
        PARE_UNROLL
        for (int i = 0; i < kPanels; i++) acc[r][i] = fma(weight, x[i], acc[r][i]);
      }
    }
    for (; slot < min64(end, page + 16); slot++, values += value_dim, p++) PARE_UNROLL
    for (int r = 0; r < kRows; r++)
      if (slot < t.visible[r]) {
        const vf weight = set1(p[r * kAttnBlock]);
        PARE_UNROLL
        for (int i = 0; i < kPanels; i++) acc[r][i] = fma(weight, load(values + i * 16), acc[r][i]);
      }
  }
  PARE_UNROLL
  for (int r = 0; r < kRows; r++) PARE_UNROLL
  for (int i = 0; i < kPanels; i++) store(o + r * value_dim + i * 16, acc[r][i]);
}

// Turns q.k of the kPanels panels of a block into weights relative to `next`, the maxima of the rows with this block;
// alpha[r] is what sums so far of row r are worth beside them.
template <int kRows, int kPanels>
PARE_INLINE void weigh(QueryTile& t, const KeyHead& h, float* s, const float* next, float* alpha, int64_t first) {
  if (first) store(alpha, exp2_below_63(sub(load(t.max), load(next))));  // else there is nothing yet
  store(t.max, load(next));
  const float scale = h.scale;
  float* const weights = h.weights;
  if (weights) store(h.maxima + first / kAttnBlock * 16, load(next));
  vf sums[16];
  PARE_UNROLL
  for (int r = 0; r < 16; r++) sums[r] = zero();
  PARE_UNROLL
  for (int r = 0; r < kRows; r++) {
    PARE_UNROLL
    for (int p = 0; p < kPanels; p++) {
      float* const at = s + r * kAttnBlock + p * 16;
      const vf weight = exp2_below_63(fma(load(at), set1(scale), set1(-next[r])));  // absent slots: 2^-infinity is +0
      store(at, weight);
      if (weights) store(weights + r * h.stride + first + p * 16, weight);
      sums[r] = p ? add(sums[r], weight) : weight;
    }
  }
  store(t.sum, fma(load(t.sum), load(alpha), reduce(sums, [](vf a, vf b) { return add(a, b); })));
}

PARE_INLINE int64_t panels_of_block(int64_t slots, int64_t first) {
  return (min64(slots - first, kAttnBlock) + 15) / 16;
}

// The scores of a block, s[row][kAttnBlock], and next[row]: the maximum of row's scaled scores up to and with it.  Not
// inlined: all registers are for its loops.
template <int kRows>
[[gnu::noinline]] void score(const QueryTile& t, const KeyHead& h, int64_t first, float* s, float* next) {
  constexpr int kMost = most_panels(kRows);
  const int64_t slots = t.visible[kRows - 1], panels = panels_of_block(slots, first);
  vf highest[16];
  PARE_UNROLL
  for (int r = 0; r < 16; r++) highest[r] = set1(-__builtin_inff());
  const int64_t whole = (min64(slots - first, kAttnBlock) + 7) / 16;
  for_pieces<kMost>(
      whole, [&](auto n, int64_t p) __attribute__((always_inline)) {
        score_panels<kRows, n.value, vf>(t, h, first / 16 + p, s + p * 16, highest);
      });
  if (whole < panels) score_panels<kRows, 1, vh>(t, h, first / 16 + whole, s + whole * 16, highest);
  const vf top = reduce(highest, [](vf a, vf b) { return max(a, b); });
  store(next, max(mul(top, set1(h.scale)), load(t.max)));
}

// `count` tiles of as many rows each, what they see ascending, block by block: the keys and values of a block stay in
// the nearest cache for all tiles.  Rows of `ahead` are fetched in between, few at a time.
template <int kRows>
void attend(QueryTile* tiles, int64_t count, const KeyHead& h, Prefetcher& ahead) {
  alignas(64) float scores[2][kRows * kAttnBlock], alpha[16] = {}, next[16];
  for (int64_t i = 0; i < count; i++) {
    store(tiles[i].max, set1(-__builtin_inff()));
    store(tiles[i].sum, zero());
  }
  const auto slots = [&](int64_t i) { return tiles[i].visible[kRows - 1]; };
  // The scores of the next tile come before the values of this one: they need not wait for the exponentials.
  int64_t tile = 0, first = 0, begin = 0;  // tiles before `begin` see nothing from slot `first` on
  score<kRows>(tiles[0], h, 0, scores[0], next);
  for (int turn = 0; begin < count; turn ^= 1) {
    QueryTile& t = tiles[tile];
    float* const s = scores[turn];
    for_pieces<kAttnBlock / 16>(
        panels_of_block(slots(tile), first), [&](auto n, int64_t) __attribute__((always_inline)) {
          weigh<kRows, n.value>(t, h, s, next, alpha, first);
        });
    const int64_t block = first;
    ahead.fetch_rows(kRows);
    if (++tile == count) {
      first += kAttnBlock;
      while (begin < count && slots(begin) <= first) begin++;
      tile = begin;
    }
    if (begin < count) score<kRows>(tiles[tile], h, first, scores[turn ^ 1], next);
    for_pieces<most_panels(kRows)>(
        h.value_dim / 16, [&](auto n, int64_t p) __attribute__((always_inline)) {
          add_values<kRows, n.value>(t, h, s, alpha, block, p * 16);
        });
  }
}

void attend(QueryTile* tiles, int64_t count, const KeyHead& h, Prefetcher& ahead) {
  switch (tiles->rows) {
    case 1:
      return attend<1>(tiles, count, h, ahead);
    case 2:
      return attend<2>(tiles, count, h, ahead);
    case 3:
      return attend<3>(tiles, count, h, ahead);
    case 4:
      return attend<4>(tiles, count, h, ahead);
    case 5:
      return attend<5>(tiles, count, h, ahead);
    case 6:
      return attend<6>(tiles, count, h, ahead);
  }
}

PARE_INLINE vf log2_sum(const QueryTile& t) { return fma(log(load(t.sum)), set1(kLog2E), load(t.max)); }
PARE_INLINE void write_row(float* o, const QueryTile& t, int64_t r, int64_t head_dim, int64_t value_dim) {
  const vf l = set1(t.sum[r]);
  for_vectors(
      head_dim, PARE_LANES_AT(d) { store(o + d, div(load(t.o + r * value_dim + d), l), lanes); });
}

// The query rows of a key head, in the order (own row, head of the group): what they see ascends.
class Queries {
 public:
  // From own row `begin` on.  Own row 0 is row `first` of q and sees `seen` slots.
  PARE_INLINE Queries(const float* q, int64_t q_stride, int64_t head_dim, int64_t heads, int64_t kv_head, int64_t group,
                      int64_t first, int64_t begin, int64_t seen)
      : q_(q + (first + begin) * q_stride + kv_head * group * head_dim),
        q_stride_(q_stride),
        width_(head_dim),
        heads_(heads),
        group_(group),
        at_((first + begin) * heads + kv_head * group),
        seen_(seen + begin) {}
  // The next `rows` of them into `t`.
  PARE_INLINE void take(QueryTile& t, int64_t rows) {
    t.rows = rows;
    for (int64_t r = 0; r < rows; r++) {
      t.q[r] = q_ + head_ * width_;
      t.at[r] = at_ + head_;
      t.visible[r] = seen_;
      if (++head_ == group_) {
        head_ = 0;
        q_ += q_stride_;
        at_ += heads_;
        seen_++;
      }
    }
  }

 private:
  const float* q_;  // of the own row and the first head of the group
  int64_t q_stride_, width_, heads_, group_, at_, seen_, head_ = 0;
};

// Rows of one tile, of n in all.
PARE_INLINE int64_t row_share(int64_t n) {
  const int64_t tiles = (n + kQueryRows - 1) / kQueryRows;
  return (n + tiles - 1) / tiles;
}

// The next `rows` rows of `queries`: to a.o, and to a.lse where that is given.  Calls then(tile) of each tile.  o: room
// for kAttnRows rows.
template <class Args, class Then>
PARE_INLINE void attend_rows(const Args& a, Queries& queries, int64_t rows, const KeyHead& h, float* o,
                             Prefetcher& ahead, Then then) {
  constexpr int64_t kNear = 6144;  // 48 KiB of keys and values: so few stay near by themselves, and o of one tile, too
  const int64_t share = row_share(rows), most = h.weights || h.slots * h.head_dim < kNear ? 1 : kAttnRows / kQueryRows;
  QueryTile tiles[kAttnRows / kQueryRows];
  for (int64_t first = 0, count; first < rows; first += count * share) {
    // All tiles of a pass have as many rows, so a last one that has fewer goes alone.
    count = max64(1, min64(most, (rows - first) / share));
    for (int64_t i = 0; i < count; i++) {
      tiles[i].o = o + i * kQueryRows * h.value_dim;
      queries.take(tiles[i], min64(share, rows - first));
    }
    attend(tiles, count, h, ahead);
    for (int64_t i = 0; i < count; i++) {
      const QueryTile& t = tiles[i];
      then(t);
      if (a.lse) {
        float lse[16];
        store(lse, log2_sum(t));
        for (int64_t r = 0; r < t.rows; r++) a.lse[t.at[r]] = lse[r];
      }
      for (int64_t r = 0; r < t.rows; r++) write_row(a.o + t.at[r] * a.head_dim, t, r, a.head_dim, h.value_dim);
    }
  }
}

// What AttnPaged adds to mass_pages, for one entry and key head: slots [first, slots).
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
void add_mass(const QueryTile& t, const KeyHead& h, const Mass& mass) {
  const int64_t slots = t.visible[t.rows - 1], begin = mass.first / 16 * 16;
  for (int64_t block = begin / kAttnBlock * kAttnBlock; block < slots; block += kAttnBlock) {
    alignas(64) float f[16];
    store(f, div(exp2_below_63(sub(load(h.maxima + block / kAttnBlock * 16), load(t.max))), load(t.sum)));
    for (int64_t s = max64(block, begin); s < min64(block + kAttnBlock, slots); s += 16)
      mass.change(s, mass.first, [&](vf x) {
        for (int64_t r = 0; r < t.rows; r++)
          if (s < t.visible[r]) x = fma(load(h.weights + r * h.stride + s), set1(f[r]), x);
        return x;
      });
  }
}

}  // namespace

// Scratch: K across, V down, o of kAttnRows.
void attn_fwd(const AttnArgs& a, const AttnTurn& turn) {
  const SegmentRow& s = *turn.piece.segment;
  const Interval rows = turn.piece.rows;
  const int64_t kv_head = turn.piece.kv_head, slots = s.parent_len + rows.end, value_dim = round16(a.head_dim),
                g = a.group;
  float *keys = turn.scratch, *values = keys + turn.room * a.head_dim, *o = values + turn.room * value_dim;
  pack_across(keys, key_slots(a, s, kv_head), turn.packed, slots, a.head_dim);
  pack_down(values + turn.packed * value_dim, value_slots(a, s, kv_head), turn.packed, slots, a.head_dim);
  Prefetcher ahead;
  if (const AttnPiece& next = turn.next; next.segment) {
    const auto add = [&](const float* matrix, int64_t stride, int64_t columns) {
      ahead.add(matrix + (next.segment->row + next.rows.begin) * stride + next.kv_head * columns, stride,
                next.rows.end - next.rows.begin, columns);
    };
    add(a.k, a.k_stride, a.head_dim);
    add(a.v, a.v_stride, a.head_dim);
    add(a.q, a.q_stride, g * a.head_dim);
  }
  const KeyHead head{.k = {keys, nullptr, 16 * a.head_dim},
                     .v = {values, nullptr, 16 * value_dim},
                     .slots = slots,
                     .head_dim = a.head_dim,
                     .value_dim = value_dim,
                     .scale = a.scale * kLog2E};
  Queries queries(a.q, a.q_stride, a.head_dim, a.heads, kv_head, g, s.row, rows.begin, s.parent_len + 1);
  attend_rows(a, queries, (rows.end - rows.begin) * g, head, o, ahead, [](const QueryTile&) {});
}

void attn_paged(const PagedArgs& a, const PagedRow& row, int64_t kv_head, float* scratch) {
  const int64_t value_dim = round16(a.head_dim), g = a.group, first = kv_head * a.head_step;
  const int32_t* const pages = a.page_table ? a.page_table + row.table_row * a.table_stride : nullptr;
  float *o = scratch, *values = o + kAttnRows * value_dim;
  KeyHead head{.k = {a.k_pages + first, pages, a.page_step},
               .v = {a.v_pages + first, pages, a.page_step},
               .slots = row.slots,
               .head_dim = a.head_dim,
               .value_dim = value_dim,
               .scale = a.scale * kLog2E};
  if (value_dim != a.head_dim) {  // vectors would run over the end of a row: copy to longer ones
    for (int64_t slot = 0; slot < row.slots; slot++)
      for (int64_t d = 0; d < a.head_dim; d += 16)
        store(values + slot * value_dim + d, load(head.v.at(slot / 16) + slot % 16 * a.head_dim + d, a.head_dim - d));
    head.v = {values, nullptr, 16 * value_dim};
  }
  const Mass mass{a.mass_pages, pages, a.heads / g, kv_head, a.first_mass, row.slots};
  float* const maxima = values + (value_dim != a.head_dim ? row.slots * value_dim : 0);
  if (a.mass_pages) {
    head.stride = round16(row.slots);
    head.maxima = maxima;
    head.weights = maxima + (row.slots + kAttnBlock) / kAttnBlock * 16;
    clear_new(mass, row.slots - row.rows);
  }
  Queries queries(a.q, a.q_stride, a.head_dim, a.heads, kv_head, g, row.row, 0, row.slots - row.rows + 1);
  Prefetcher nothing;
  attend_rows(a, queries, row.rows * g, head, o, nothing, [&](const QueryTile& t) {
    if (a.mass_pages) add_mass(t, head, mass);
  });
}

}  // namespace pare::PARE_ISA
