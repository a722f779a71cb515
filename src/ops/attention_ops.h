// Ops of attention (see ops.h): over the packed sequences of the learner, over the pages of the rollout, and with lists
// of blocks in both.
#pragma once
#include <array>
#include <cstdint>

#include "ops/cost.h"

namespace pare {

// ---- attention of packed sequences (learner)

// A segment is a run of rows of one sequence.  Its slots are first those of its parent's rows (all of them visible to
// every row), then its own (causal): own row i sees slots [0, parent_len + i].  Segments are disjoint in q; rows of q
// that lie in no segment are not touched.
struct SegmentRow {
  int32_t row, len;                // own rows [row, row + len) of q, k, v
  int32_t parent_row, parent_len;  // rows of pk, pv (or of lists), none of them its own; parent_len 0: no parent
};

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
  // Block lists (see AttnBlockSelect), not together with `lists`.  A row of more blocks than its budget sees only the
  // slots of the blocks that its key heads list, in the order of the list, as if they were all that the sequence has:
  // bit for bit what AttnPaged gives with the same list.  `pairs` is then the sum over own rows of
  // listed_slots(parent_len + i + 1, budget[row], block).
  Tensor blocks = {};  // i32 [N, K, max_blocks]: ascending, the block of the row's own slot last; or absent
  Tensor budget = {};  // i32 [N], at least 1; present if blocks is
  int32_t block = 0;   // slots of a block: 4 or 16
  Cost cost() const {
    return {4 * q.shape[1] * q.shape[2] * pairs, detail::total_bytes(q, k, v, segments, lists, blocks, budget),
            detail::total_bytes(o, lse)};
  }
  auto outputs() const { return std::array{o, lse}; }
};
// p = exp(scale*q.k) / 2^lse; dv += p do; ds = p (do.v - do.o); dq = scale * ds k; dk += scale * ds q.
// Order of the chains: dq over the slots that a row sees, ascending; dk and dv over segments in list order, then the
// query heads of the group ascending, then own rows ascending, continued from what the accumulators hold.
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
  Cost cost() const {
    return {10 * q.shape[1] * q.shape[2] * pairs,
            detail::total_bytes(q, k, v, o, d_o, lse, dk, dv, segments, lists, blocks, budget),
            detail::total_bytes(dq, dk, dv)};
  }
  auto outputs() const { return std::array{dq, dk, dv, dpk, dpv}; }
};

// ---- attention over paged keys and values (rollout)

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

struct KvWrite {
  Tensor k_pages;     // act [pages, K, D, 16] acc: only the new slots are written
  Tensor v_pages;     // act [pages, K, 16, D] acc
  Tensor k, v;        // act [N, K, D]; rows may be strided, heads contiguous
  Tensor page_table;  // i32 [sequences, max_pages]; rows may be strided
  Tensor queries;     // i32 [S, 4]: PagedRow
  // A cache that evicts also keeps, per slot and key head, the token's position.
  Tensor pos_pages{};  // i32 [pages, K, 16] acc: pos of the row, or absent
  Tensor pos{};        // i32 [N], absent if pos_pages is
  Cost cost() const {
    const int64_t n = k.shape[0] * k.shape[1];
    return {0, detail::total_bytes(k, v, queries, pos), detail::total_bytes(k, v) + (pos_pages ? 4 * n : 0)};
  }
  auto outputs() const { return std::array{k_pages, v_pages}; }
};
struct AttnPaged {
  Tensor o;                 // act [N, H, D] out
  Tensor q;                 // act [N, H, D]; rows may be strided, heads contiguous
  Tensor k_pages, v_pages;  // as in KvWrite; slots at or past PagedRow::slots are never read
  Tensor page_table;        // i32 [sequences, max_pages]; rows may be strided
  Tensor queries;           // i32 [S, 4]: PagedRow
  int64_t pairs;            // sum over entries of rows * (slots - rows) + rows * (rows + 1) / 2; see below for lists
  int64_t slots;            // sum over entries of slots (of listed_slots): what is read of K and V
  float scale;
  // Block lists (see KvBlockSelect), by table_row.  An entry of one row and of more blocks than its budget reads as
  // many blocks as that, those that its key heads list, in the order of the list, as if their slots were all that the
  // sequence has: the blocks of 64 of the online softmax are formed over the listed slots, and its `pairs` are
  // listed_slots.
  Tensor blocks = {};  // i32 [sequences, K, max_blocks]: ascending, the block of the newest slot last; or absent
  Tensor budget = {};  // i32 [sequences], at least 1 where there is an entry; present if blocks is
  int32_t block = 0;   // slots of a block: 4 or 16
  // The attention that every slot receives (H2O), added up: mass[slot] = fma(p, f, mass[slot]), where p = 2^(score - m)
  // is the slot's weight in its block of the online softmax, m the maximum so far, and f = 2^(m - M) / sum with the
  // maximum and the sum of the whole row.  One chain over the rows of the entry ascending, then over the query heads of
  // the group ascending, continued from what the slot holds; slots that are new in this pass start from 0.  So prefill
  // in pieces gives the same sums.
  Tensor mass_pages = {};  // stat [pages, K, 16] acc, or absent; slots below `first` are neither read nor written; not
                           // together with block lists
  Tensor first = {};       // i32 [S]: protected slots, which have no mass; present if mass_pages is
  Cost cost() const {
    const int64_t size = static_cast<int64_t>(dtype_size(q.dtype)), kv_heads = k_pages.shape[1];
    const int64_t kv = slots * kv_heads * k_pages.shape[2] * 2 * size;
    const int64_t mass = mass_pages ? slots * kv_heads * static_cast<int64_t>(dtype_size(mass_pages.dtype)) : 0;
    return {(4 * q.shape[2] + (mass_pages ? 2 : 0)) * q.shape[1] * pairs,
            detail::total_bytes(q, queries, budget, first) + kv + mass, detail::total_bytes(o) + mass};
  }
  auto outputs() const { return std::array{o}; }
};

// Selection blocks: `block` (4 or 16) consecutive slots of one sequence in one layer, the last one possibly partial.
constexpr int64_t blocks_of(int64_t slots, int64_t block) { return (slots + block - 1) / block; }
// Slots that a row reads of `slots` when it lists at most `budget` blocks, the last one among them.
constexpr int64_t listed_slots(int64_t slots, int64_t budget, int64_t block) {
  const int64_t left_out = blocks_of(slots, block) - budget;
  return left_out > 0 ? slots - left_out * block : slots;
}

// What is kept of the keys of a block to choose by, and the score of a block for a key head:
//   minmax  channelwise min and max; max over the heads q of the group of sum_c max(q_c min_c, q_c max_c), which bounds
//           every q.k from above (Quest, Tang et al. 2024, section 3.2)
//   mean    of the keys; its dot product with the mean of the group's q (block top-k)
// Scores carry no softmax scale.
enum class BlockSummary : int32_t { minmax, mean };
constexpr int64_t summary_rows(BlockSummary kind) { return kind == BlockSummary::minmax ? 2 : 1; }

// After KvWrite: the summaries of every page that received slots, from the keys that are present in it (so a page that
// was copied by a fork needs nothing else).  The mean is one chain of sums over slots ascending from +0, times 1 / n.
struct KvBlockSummary {
  Tensor summary;     // act [pages, K, 16 / block * summary_rows, D] acc: rows (min, max) or (mean) of block 0, 1, ...
  Tensor k_pages;     // act [pages, K, D, 16]
  Tensor page_table;  // i32 [sequences, max_pages]; rows may be strided
  Tensor queries;     // i32 [S, 4]: PagedRow
  int64_t pages;      // sum over entries of the pages that received slots
  int32_t block;
  BlockSummary kind;
  Cost cost() const {
    const int64_t channels = k_pages.shape[1] * k_pages.shape[2], size = dtype_size(k_pages.dtype);
    const int64_t keys = pages * kPageSlots * channels;
    return {keys * summary_rows(kind), keys * size + detail::total_bytes(queries),
            pages * summary.shape[2] * channels * size};
  }
  auto outputs() const { return std::array{summary}; }
};

// Which blocks an entry reads, by key head: the first `first_blocks`, the last `last_blocks` and, of those between,
// which are scored, the best by score (ties: the smaller block), as many as its budget in all.  Only entries of one row
// and of more blocks than that choose; for the others, which read everything, nothing is written.  Sums over channels
// are row sums (fused for mean); the mean of q is one chain over heads ascending from +0, times 1 / group.
struct KvBlockSelect {
  Tensor blocks;      // i32 [sequences, K, max_blocks] out, by table_row: ascending, as many as the budget
  Tensor score;       // stat [S, K, max_scored] out: of the blocks between
  Tensor q;           // act [N, H, D]; rows may be strided, heads contiguous
  Tensor summary;     // as in KvBlockSummary
  Tensor page_table;  // i32 [sequences, max_pages]; rows may be strided
  Tensor queries;     // i32 [S, 4]: PagedRow
  Tensor budget;      // i32 [sequences], by table_row: at least first_blocks + last_blocks
  int64_t scored;     // sum over the entries that choose of their blocks without the first and the last ones
  int32_t block, first_blocks, last_blocks;  // last_blocks >= 1
  BlockSummary kind;
  Cost cost() const {
    const bool minmax = kind == BlockSummary::minmax;
    const int64_t heads = q.shape[1], kv_heads = summary.shape[1], width = q.shape[2];
    return {scored * width * (minmax ? 4 * heads : 2 * kv_heads),
            detail::total_bytes(queries) + (queries.shape[0] * heads + scored * kv_heads * summary_rows(kind)) * width *
                                               static_cast<int64_t>(dtype_size(q.dtype)),
            scored * kv_heads * static_cast<int64_t>(dtype_size(score.dtype)) +
                queries.shape[0] * kv_heads * blocks.shape[2] * static_cast<int64_t>(sizeof(int32_t))};
  }
  auto outputs() const { return std::array{blocks}; }
};
// ---- block-sparse attention of packed sequences (learner)

// For every own row of every segment, by key head, the blocks that a decode step with the same slots would choose
// (KvBlockSelect: bit for bit the same summaries, scores and lists): own row i has the slots [0, parent_len + i], the
// last of them its own, and the budget of its row.  Rows of no more than budget[row] blocks see everything, and nothing
// is written for them; a prompt, which is read densely, is given a large budget.  Only blocks before the last one are
// scored, so those of a segment's keys that a row scores are whole.  No gradient passes through the choice.
struct AttnBlockSelect {
  Tensor blocks;    // i32 [N, K, max_blocks] out
  Tensor summary;   // act [S, K, max_all_blocks * summary_rows, D] out: of the whole blocks of each segment
  Tensor q;         // act [N, H, D]; rows may be strided, heads contiguous (so for k, pk)
  Tensor k, pk;     // act [N, K, D] and [P, K, D], as in AttnFwd
  Tensor segments;  // i32 [S, 4]: SegmentRow
  Tensor budget;    // i32 [N]; rows of no segment are not read
  int64_t scored;   // sum over the rows that choose of their blocks without the first and the last ones
  int64_t slots;    // sum over segments of parent_len + len: the keys that are summarised
  int32_t block, first_blocks, last_blocks;
  BlockSummary kind;
  Cost cost() const {
    const int64_t heads = q.shape[1], kv_heads = k.shape[1], width = q.shape[2], size = dtype_size(q.dtype);
    const int64_t keys = slots * kv_heads * width, rows = summary_rows(kind);
    return {scored * width * (kind == BlockSummary::minmax ? 4 * heads : 2 * kv_heads) + keys * rows,
            detail::total_bytes(q, segments, budget) + keys * size + scored * kv_heads * width * rows * size,
            keys / block * rows * size + detail::total_bytes(blocks)};
  }
  auto outputs() const { return std::array{blocks}; }
};

// Page src[i] -> page dst[i], whole pages, K, V and what lies beside them.
struct KvCopyPages {
  Tensor k_pages, v_pages;  // acc: the dst pages are written
  Tensor pairs;             // i32 [n, 2]: (src, dst); no dst is a src or occurs twice
  Tensor pos_pages{};       // i32 [pages, K, 16] acc, or absent
  Tensor mass_pages{};      // stat [pages, K, 16] acc, or absent
  Cost cost() const {
    int64_t bytes = 0;  // of a page
    for (const Tensor& t : {k_pages, v_pages, pos_pages, mass_pages})
      if (t) bytes += t.stride[0] * static_cast<int64_t>(dtype_size(t.dtype));
    return {0, pairs.shape[0] * bytes, pairs.shape[0] * bytes};
  }
  auto outputs() const { return std::array{k_pages, v_pages}; }
};

}  // namespace pare
