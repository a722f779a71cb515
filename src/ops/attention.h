// Attention of packed sequences, for the learner (roles of types and orders of sums: list.h).
#pragma once
#include <array>
#include <cstdint>

#include "ops/contract.h"
#include "ops/cost.h"
#include "ops/rows.h"

namespace pare {

// Selection blocks: `block` (4 or 16) consecutive slots of one sequence in one layer, the last one possibly partial.
constexpr int64_t blocks_of(int64_t slots, int64_t block) { return (slots + block - 1) / block; }
// Slots that a row reads of `slots` when it lists at most `budget` blocks, the last one among them.
constexpr int64_t listed_slots(int64_t slots, int64_t budget, int64_t block) {
  const int64_t left_out = blocks_of(slots, block) - budget;
  return left_out > 0 ? slots - left_out * block : slots;
}

namespace detail {

inline void check_heads(const Contract& c, int64_t heads, int64_t kv_heads) {
  c.that(kv_heads > 0 && heads % kv_heads == 0, heads, " query heads over ", kv_heads, " key heads");
}
inline void check_block(const Contract& c, int32_t block) {
  c.that(block == 4 || block == 16, "blocks of ", block, " slots, expected 4 or 16");
}
// Lists of blocks of `rows` rows.
inline void check_lists(Contract& c, const Tensor& blocks, const Tensor& budget, int32_t block, int64_t rows,
                        int64_t kv_heads) {
  check_block(c, block);
  c.index("blocks", blocks, {rows, kv_heads, blocks.shape[2]});
  c.index("budget", budget, {rows});
}

// Blocks that so many rows in a row read together, over those of one (kv/blocks/union: of ten 1.4 to 1.7).
inline double read_together(double rows) { return 1 + .06 * rows; }

inline double part(int64_t of, int64_t whole) {
  return whole > 0 ? std::min(1.0, static_cast<double>(of) / static_cast<double>(whole)) : 0;
}

// Checks shared by AttnFwd and AttnBwd.
template <class Args>
void check_packed(Contract& c, const Args& a) {
  const int64_t N = a.q.shape[0], H = a.q.shape[1], D = a.q.shape[2], K = a.k.shape[1], P = a.pk.shape[0];
  c.act("q", a.q, {N, H, D}, c.strided);
  check_heads(c, H, K);
  c.act("k", a.k, {N, K, D}, c.strided);
  c.act("v", a.v, {N, K, D}, c.strided);
  c.act("pk", a.pk, {P, K, D}, c.strided);
  c.act("pv", a.pv, {P, K, D}, c.strided);
  c.stat("lse", a.lse, {N, H});
  c.index("segments", a.segments, {a.segments.shape[0], 4});
  c.that(a.scale > 0, "scale is ", a.scale, ", expected more than 0");
  if (a.lists) c.index("lists", a.lists, {a.lists.shape[0], K});
  if (a.blocks) check_lists(c, a.blocks, a.budget, a.block, N, K);
  c.that(!a.lists || !a.blocks, "a parent is listed by slots or by blocks, not both");
}

}  // namespace detail

struct AttnFwd {
  Tensor o;         // act [N, H, D] out
  Tensor lse;       // stat [N, H] out: log2 of the sum of exp(scale * q.k) over visible keys
  Tensor q;         // act [N, H, D]; rows may be strided, heads contiguous (so for k, v, pk, pv)
  Tensor k, v;      // act [N, K, D]; query head h reads key head h / (H / K)
  Tensor pk, pv;    // act [P, K, D]: where parents lie; k and v themselves, or those of another batch
  Tensor segments;  // i32 [S, 4]: SegmentRow
  int64_t pairs;    // sum over segments of len * parent_len + len * (len + 1) / 2
  float scale;      // positive (so in all ops of attention)
  // Parents that are no run of rows (what a cache that evicts has kept, by key head): slot s of the parent of a segment
  // is, for key head h, row r = lists[parent_row + s][h] of k and v, or row -1 - r of pk and pv where r is negative.
  // The rows that one segment lists for one head are distinct, and none is its own.
  Tensor lists = {};  // i32 [G, K], of all segments that have a parent; or absent
  // Lists of blocks (AttnBlockSelect), not together with `lists`.  A row of more blocks than its budget sees only the
  // slots of the blocks that its key heads list: bit for bit what AttnPaged gives with the same list.  `pairs` is then
  // the sum over own rows of
  // listed_slots(parent_len + i + 1, budget[row], block).
  Tensor blocks = {};  // i32 [N, K, max_blocks]: ascending, the block of the row's own slot last; or absent
  Tensor budget = {};  // i32 [N], at least 1; present if blocks is
  int32_t block = 0;   // slots of a block: 4 or 16
  AttnExtent extent = {};
  void check(Contract& c) const {
    detail::check_packed(c, *this);
    c.act("o", o, {q.shape[0], q.shape[1], q.shape[2]});
  }
  Cost cost() const {
    return {4 * q.shape[1] * q.shape[2] * pairs, detail::total_bytes(q, k, v, segments, lists, blocks, budget),
            detail::total_bytes(o, lse)};
  }
  // A block has 128 rows of a head.  With lists of blocks it has 64 / group rows of a key head, and issues 3.4 times
  // the instructions of a pair: 1630 for 64 slots of 16 rows, beside 478.
  Stretch stretch(int multiprocessors) const {
    if (blocks) return {.flops = 3.4 * detail::read_together(64.0 / static_cast<double>(q.shape[1] / k.shape[1]))};
    return {.flops = std::max(1.0, multiprocessors * detail::part(128 * extent.longest, pairs * q.shape[1]))};
  }
  auto outputs() const { return std::array{o, lse}; }
};
// Elements of AttnBwd::work for N rows, P rows of parents that are not among them, and S segments: of each row (in
// tiles of 128) and key head the sums of dk and dv, padded, a turn, and a bit for each segment; and a counter.
constexpr int64_t attn_bwd_work(int64_t rows, int64_t parents, int64_t kv_heads, int64_t head_dim, int64_t segments) {
  const int64_t tiles = (rows + 127) / 128 + (parents + 127) / 128;
  const int64_t d = head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
  return tiles * 128 * kv_heads * (2 * d + 1 + (segments + 31) / 32) + 1;
}
// p = exp(scale*q.k) / 2^lse; dv += p do; ds = p (do.v - do.o); dq = scale * ds k; dk += scale * ds q.
// Order of the chains in f32: dq over the slots that a row sees, ascending; dk and dv over segments in list order, then
// the query heads of the group ascending, then own rows ascending, continued from what the accumulators hold.
struct AttnBwd {
  Tensor dq;                              // act [N, H, D] out; rows may be strided, heads contiguous (so for all below)
  Tensor dk, dv;                          // act [N, K, D] acc
  Tensor dpk, dpv;                        // act [P, K, D] acc: dk and dv themselves, or those of another batch
  Tensor d_o;                             // act [N, H, D]
  Tensor o;                               // act [N, H, D]
  Tensor q, k, v, pk, pv, lse, segments;  // as in AttnFwd
  int64_t pairs;
  float scale;
  Tensor lists = {}, blocks = {}, budget = {};  // as in AttnFwd; constants
  int32_t block = 0;
  AttnExtent extent = {};
  Tensor work = {};  // stat [attn_bwd_work(N, P or 0, K, D, S)] or more, scratch, in bf16; else absent
  void check(Contract& c) const {
    const int64_t N = q.shape[0], H = q.shape[1], D = q.shape[2], K = k.shape[1], P = pk.shape[0];
    detail::check_packed(c, *this);
    c.act("dq", dq, {N, H, D}, c.strided);
    c.act("dk", dk, {N, K, D}, c.strided);
    c.act("dv", dv, {N, K, D}, c.strided);
    c.act("dpk", dpk, {P, K, D}, c.strided);
    c.act("dpv", dpv, {P, K, D}, c.strided);
    c.act("d_o", d_o, {N, H, D}, c.strided);
    c.act("o", o, {N, H, D}, c.strided);
    if (q.dtype != DType::bf16) return;
    const int64_t least = attn_bwd_work(N, dpk.data == dk.data ? 0 : P, K, D, segments.shape[0]);
    c.stat("work", work, {work.shape[0]});
    c.that(work.size() >= least, "work has ", work.size(), " elements, expected ", least, " at least");
  }
  Cost cost() const {
    return {10 * q.shape[1] * q.shape[2] * pairs,
            detail::total_bytes(q, k, v, o, d_o, lse, dk, dv, segments, lists, blocks, budget),
            detail::total_bytes(dq, dk, dv)};
  }
  // The keys have 8 of the 14 products of a pair.  With wgmma a block takes parts of up to 1024 rows and 128 keys of a
  // query head, one after another, and half of one is waited for at the end; list scheduling of the parts gives that
  // within 5 %.  With mma.sync a block has 128 keys of a key head, and walks over all rows that see them: where there
  // are lists of blocks, heads are wide, or a device has no wgmma, which plans do not know.  With lists of blocks,
  // tiles of dq read together what AttnFwd's do, at 2.5 times the instructions of a pair; 64 keys meet the steps of 16
  // rows that list one of them, at 1.9 times.
  Stretch stretch(int multiprocessors) const {
    constexpr double kOfKeys = 8.0 / 14;
    const int64_t K = k.shape[1], H = q.shape[1], run = std::min<int64_t>(1024, extent.rows);
    const double chain = multiprocessors * detail::part(128 * extent.readers, extent.pairs * K),
                 part = multiprocessors * detail::part(128 * run, extent.pairs * H);
    if (blocks) {
      const double seen = static_cast<double>(extent.pairs) / static_cast<double>(pairs),
                   met = std::min(seen, detail::read_together(16) * 64 / block);
      return {.flops = (1 - kOfKeys) * 2.5 * detail::read_together(64.0 / static_cast<double>(H / K)) +
                       kOfKeys * 1.9 * met * std::max(1.0, chain)};
    }
    const double keys = q.shape[2] > 128 ? std::max(1.0, chain) : std::max(1 + part / 2, part);
    return {.flops = 1 - kOfKeys + kOfKeys * keys};
  }
  auto outputs() const { return std::array{dq, dk, dv, dpk, dpv}; }
};

}  // namespace pare
