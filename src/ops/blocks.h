// The choice of blocks that a row reads, over pages and in packed sequences; AttnPaged and AttnFwd take the lists
// (roles of types and orders of sums: list.h).
#pragma once
#include <array>
#include <cstdint>

#include "ops/options.h"
#include "ops/paged.h"

namespace pare {

constexpr int64_t summary_rows(BlockSummary kind) { return kind == BlockSummary::minmax ? 2 : 1; }

namespace detail {

// [pages, K, 16 / block * summary_rows, D]
inline void check_summary(Contract& c, const Tensor& summary, int64_t kv_heads, int64_t head_dim, int32_t block,
                          BlockSummary kind) {
  check_block(c, block);
  c.act("summary", summary, {summary.shape[0], kv_heads, kPageSlots / block * summary_rows(kind), head_dim});
}
inline void check_reserved(const Contract& c, int32_t first, int32_t last) {
  c.that(first >= 0 && last >= 1, "first_blocks ", first, ", last_blocks ", last, ", expected at least 0 and 1");
}

}  // namespace detail

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
  void check(Contract& c) const {
    detail::check_summary(c, summary, k_pages.shape[1], k_pages.shape[2], block, kind);
    c.act("k_pages", k_pages, {summary.shape[0], k_pages.shape[1], k_pages.shape[2], kPageSlots});
    detail::check_queries(c, page_table, queries);
  }
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
  void check(Contract& c) const {
    const int64_t H = q.shape[1], D = q.shape[2], K = summary.shape[1];
    detail::check_summary(c, summary, K, D, block, kind);
    detail::check_reserved(c, first_blocks, last_blocks);
    c.act("q", q, {q.shape[0], H, D}, c.strided);
    detail::check_heads(c, H, K);
    detail::check_queries(c, page_table, queries);
    c.index("blocks", blocks, {page_table.shape[0], K, blocks.shape[2]});
    c.stat("score", score, {queries.shape[0], K, score.shape[2]});
    c.index("budget", budget, {page_table.shape[0]});
  }
  Cost cost() const {
    const bool minmax = kind == BlockSummary::minmax;
    const int64_t H = q.shape[1], K = summary.shape[1], D = q.shape[2], S = queries.shape[0];
    return {scored * D * (minmax ? 4 * H : 2 * K),
            detail::total_bytes(queries) +
                (S * H + scored * K * summary_rows(kind)) * D * static_cast<int64_t>(dtype_size(q.dtype)),
            scored * K * static_cast<int64_t>(dtype_size(score.dtype)) +
                S * K * blocks.shape[2] * static_cast<int64_t>(sizeof(int32_t))};
  }
  auto outputs() const { return std::array{blocks}; }
};

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
  void check(Contract& c) const {
    const int64_t N = q.shape[0], H = q.shape[1], D = q.shape[2], K = k.shape[1], S = segments.shape[0];
    c.act("q", q, {N, H, D}, c.strided);
    detail::check_heads(c, H, K);
    c.act("k", k, {N, K, D}, c.strided);
    c.act("pk", pk, {pk.shape[0], K, D}, c.strided);
    c.index("segments", segments, {S, 4});
    c.act("summary", summary, {S, K, summary.shape[2], D});
    detail::check_lists(c, blocks, budget, block, N, K);
    detail::check_reserved(c, first_blocks, last_blocks);
  }
  Cost cost() const {
    const int64_t H = q.shape[1], K = k.shape[1], D = q.shape[2], size = dtype_size(q.dtype);
    const int64_t keys = slots * K * D, rows = summary_rows(kind);
    return {scored * D * (kind == BlockSummary::minmax ? 4 * H : 2 * K) + keys * rows,
            detail::total_bytes(q, segments, budget) + keys * size + scored * K * D * rows * size,
            keys / block * rows * size + detail::total_bytes(blocks)};
  }
  auto outputs() const { return std::array{blocks}; }
};

}  // namespace pare
