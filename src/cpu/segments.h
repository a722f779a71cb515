// What the ops on segments of packed sequences share.
#pragma once
#include <vector>

#include "cpu/glue.h"

namespace pare::cpu {

constexpr int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

// Nanoseconds of one (query, key) pair of one head, forward.
constexpr double pair_nanoseconds(int64_t width) { return 4.0 * static_cast<double>(width) / 50 + 0.4; }

// The segments, checked against the rows that there are.
const SegmentRow* segment_rows(const char* op, const Tensor& t, int64_t rows, int64_t parent_rows);

// AttnFwd::lists, checked; null if absent.
const int32_t* parent_lists(const char* op, const Tensor& lists, int64_t kv_heads, int64_t rows, int64_t parent_rows);

// Checks q, k, v, pk, pv and lists of AttnFwd or AttnBwd (o and lse are left to the caller).
template <class Args>
AttnArgs attn_args(const char* op, const Args& a) {
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], width = a.q.shape[2], kv_heads = a.k.shape[1];
  if (kv_heads <= 0 || heads % kv_heads)
    throw std::logic_error(cat("cpu: ", op, ": ", heads, " query heads over ", kv_heads, " key heads"));
  if (!(a.scale > 0)) throw std::logic_error(cat("cpu: ", op, ": scale ", a.scale, " is not positive"));
  const Tensor &pk = a.pk ? a.pk : a.k, &pv = a.pv ? a.pv : a.v;
  return {.o = nullptr,
          .lse = dense(op, "lse", a.lse, {rows, heads}),
          .q = strided(op, "q", a.q, {rows, heads, width}),
          .k = strided(op, "k", a.k, {rows, kv_heads, width}),
          .v = strided(op, "v", a.v, {rows, kv_heads, width}),
          .pk = strided(op, "pk", pk, {pk.shape[0], kv_heads, width}),
          .pv = strided(op, "pv", pv, {pk.shape[0], kv_heads, width}),
          .lists = parent_lists(op, a.lists, kv_heads, rows, pk.shape[0]),
          .q_stride = a.q.stride[0],
          .k_stride = a.k.stride[0],
          .v_stride = a.v.stride[0],
          .pk_stride = pk.stride[0],
          .pv_stride = pv.stride[0],
          .heads = heads,
          .group = heads / kv_heads,
          .width = width,
          .scale = a.scale};
}
AttnBwdArgs attn_bwd_args(const char* op, const AttnBwd& a);

// Segments that add to common rows of dk and dv must follow one another; all others are independent.
struct SegmentChains {
  const SegmentRow* segments;
  std::vector<int64_t> order, starts;  // chain c: the segments order[starts[c] .. starts[c + 1]), all of some rows
};
SegmentChains segment_chains(const char* op, const AttnBwd& a, const AttnBwdArgs& args);

// attn_fwd and attn_bwd of rows that have lists of blocks.
void attn_fwd_listed(const AttnFwd& a);
void attn_bwd_listed(const AttnBwd& a, const AttnBwdArgs& args, const SegmentChains& c);

// The slots of the longest segment, rounded up to 16.
int64_t longest(const SegmentRow* s, int64_t count);

// First slots that two pieces have in common: those of one segment, or the parent of siblings.
int64_t shared_slots(const AttnPiece& a, const AttnPiece& b);

// Turns the pieces of a thread into turns: calls f(turn) for each piece that was added, when the next one is known; an
// empty piece ends them.  Room and scratch are left to f.
class Turns {
 public:
  template <class F>
  void add(const AttnPiece& next, F f) {
    if (piece_.segment)
      f(AttnTurn{
          .piece = piece_, .next = next, .packed = shared_slots(before_, piece_), .room = 0, .scratch = nullptr});
    before_ = piece_, piece_ = next;
  }

 private:
  AttnPiece before_{}, piece_{};
};

// Calls f(turn) for every segment and key head, those of one chain in list order.  Nanoseconds: of all.
template <class F>
void for_chains(const SegmentChains& c, int64_t kv_heads, double nanoseconds, F f) {
  const int64_t n = (static_cast<int64_t>(c.starts.size()) - 1) * kv_heads;
  if (n == 0) return;
  parallel(n, nanoseconds / static_cast<double>(n), [&](Interval range) {
    Turns turns;
    for (int64_t i = range.begin; i < range.end; i++)
      for (int64_t j = c.starts[i / kv_heads]; j < c.starts[i / kv_heads + 1]; j++) {
        const SegmentRow* const s = c.segments + c.order[j];
        turns.add({s, i % kv_heads, {0, s->len}}, f);
      }
    turns.add({}, f);
  });
}

}  // namespace pare::cpu
