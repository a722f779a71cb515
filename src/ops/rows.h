// Rows of the index tensors that name sequences: of a packed batch, of a pass over pages, of a compression.
#pragma once
#include <cstdint>
#include <span>

namespace pare {

// A segment is a run of rows of one sequence.  Its slots are first those of its parent's rows (all of them visible to
// every row), then its own (causal): own row i sees slots [0, parent_len + i].  Segments are disjoint in q; rows of q
// that lie in no segment are not touched.
struct SegmentRow {
  int32_t row, len;                // own rows [row, row + len) of q, k, v
  int32_t parent_row, parent_len;  // rows of pk, pv (or of lists), none of them its own; parent_len 0: no parent
};

// The host's knowledge of the segments of a call, for estimates of its time; zeros are taken for even work.
struct AttnExtent {
  int64_t longest = 0;  // slots before and in the longest segment
  int64_t rows = 0;     // of the longest segment
  int64_t readers = 0;  // rows that see the key which most rows see
  int64_t pairs = 0;    // visible pairs, whatever lists of blocks hide of them
};
// apart: parents lie among the rows of another batch.
AttnExtent attn_extent(std::span<const SegmentRow> segments, bool apart, int64_t pairs);

// A page holds 16 slots of all key heads of one layer.  Inside a page K lies with slots across ([D][16]: the scores of
// 16 keys are one vector chain over d) and V with slots down ([16][D]).
constexpr int kPageSlots = 16;

// Rows of one forward pass that belong to one sequence: the newest `rows` of its `slots` slots.  Row i of them is slot
// slots - rows + i and sees slots [0, slots - rows + i].
struct PagedRow {
  int32_t row, rows;  // rows [row, row + rows) of q, k, v
  int32_t slots;      // slots in use in this layer, the new ones included
  int32_t table_row;  // row of page_table; slot s lies in page page_table[table_row][s / 16], at s % 16
};

// A compression (compression.h).
struct KvCompression {
  int32_t slots;       // resident before
  int32_t first;       // protected slots
  int32_t recent;      // newest slots that always stay
  int32_t keep;        // of [first, slots): how many stay, the recent ones included; recent <= keep <= slots - first
  int32_t window_row;  // first row of its window of queries
};

// Sums over a list of compressions, for the costs (the compressions themselves lie on the device).
struct KvWork {
  int64_t slots = 0;       // of slots - first
  int64_t candidates = 0;  // of slots - first - recent
  int64_t kept = 0;        // of keep
  int64_t pairs = 0;       // of (slots - first)^2
  int64_t crossed = 0;     // of (slots - first - keep) * keep
  bool operator==(const KvWork&) const = default;
};
inline KvWork kv_work(const KvCompression* compressions, int64_t n) {
  KvWork w;
  for (const KvCompression* e = compressions; e < compressions + n; e++) {
    const int64_t slots = e->slots - e->first;
    w.slots += slots;
    w.candidates += slots - e->recent;
    w.kept += e->keep;
    w.pairs += slots * slots;
    w.crossed += (slots - e->keep) * e->keep;
  }
  return w;
}

}  // namespace pare
