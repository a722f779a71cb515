// Keys and values in pages, and attention over them, for the rollout (roles of types and orders of sums: list.h).
#pragma once
#include <array>
#include <cstdint>

#include "ops/attention.h"

namespace pare {

namespace detail {

inline void check_k_pages(Contract& c, const Tensor& k_pages) {
  c.act("k_pages", k_pages, {k_pages.shape[0], k_pages.shape[1], k_pages.shape[2], kPageSlots});
}
inline void check_pages(Contract& c, const Tensor& k_pages, const Tensor& v_pages) {
  check_k_pages(c, k_pages);
  c.act("v_pages", v_pages, {k_pages.shape[0], k_pages.shape[1], kPageSlots, k_pages.shape[2]});
}
inline void check_queries(Contract& c, const Tensor& page_table, const Tensor& queries) {
  c.index("page_table", page_table, {page_table.shape[0], page_table.shape[1]}, c.strided);
  c.index("queries", queries, {queries.shape[0], 4});
}

}  // namespace detail

// Cuts of attention in bf16 (list.h) of so many slots.
constexpr int64_t kAttnCut = 1024;
constexpr int64_t paged_cuts(int64_t slots) { return (slots + kAttnCut - 1) / kAttnCut; }
// Memory in which blocks of the CUDA kernel leave the results of cuts, which the last of a row merges: a few long rows
// have too few key heads for a GPU.  No bit depends on it.  Calls that may run at the same time, in two streams, need a
// PagedCuts each.
struct PagedCuts {
  Tensor results;   // stat [paged_cut_results(S, max_pages, H, D)] or more, scratch
  Tensor arrivals;  // i32 [S * K] or more, zeros before and after each call: blocks that have arrived
};
constexpr int64_t paged_cut_results(int64_t entries, int64_t max_pages, int64_t heads, int64_t head_dim) {
  const int64_t cuts = paged_cuts(max_pages * kPageSlots);
  return cuts > 1 ? entries * cuts * heads * (head_dim + 2) : 0;
}
// The pairs of one block of the CUDA kernels for an entry of so many rows that reads so many slots, by a list or
// without one: up to 64 (row, query head) that read a key head.
constexpr int64_t paged_block_pairs(int64_t rows, int64_t slots, int64_t group, bool listed) {
  return std::min<int64_t>(64, rows * group) * (rows > 1 || listed ? slots : std::min(slots, kAttnCut));
}
struct AttnPaged {
  Tensor o;                 // act [N, H, D] out
  Tensor q;                 // act [N, H, D]; rows may be strided, heads contiguous
  Tensor k_pages, v_pages;  // as in KvWrite; slots at or past PagedRow::slots change nothing
  Tensor page_table;        // i32 [sequences, max_pages]; rows may be strided
  Tensor queries;           // i32 [S, 4]: PagedRow, of one row at least
  int64_t pairs;            // sum over entries of rows * (slots - rows) + rows * (rows + 1) / 2; see below for lists
  int64_t slots;            // sum over entries of slots (of listed_slots): what is read of K and V
  float scale;
  // Lists of blocks (KvBlockSelect), by table_row.  An entry of one row and of more blocks than its budget reads as
  // many blocks as that, those that its key heads list, and its `pairs` are listed_slots.
  Tensor blocks = {};      // i32 [sequences, K, max_blocks]: ascending, the block of the newest slot last; or absent
  Tensor budget = {};      // i32 [sequences], at least 1 where there is an entry; present if blocks is
  int32_t block = 0;       // slots of a block: 4 or 16
  int64_t most_pairs = 0;  // of a block of the kernel (paged_block_pairs), the one that has most; 0: even work
  Tensor work = {};     // i32 [pieces, 2], in bf16: paged_work (decode_work.h); absent if every entry has several rows
  PagedCuts cuts = {};  // in bf16 where rows of page_table have room for more than a cut; else absent
  // The attention that every slot receives (H2O), added up: mass[slot] = fma(p, f, mass[slot]), where p = 2^(score - m)
  // is the slot's weight in its block of the online softmax, m the maximum so far, and f = 2^(m - M) / sum with the
  // maximum and the sum of the whole row.  In bf16, p is the weight before it is rounded, m the maximum so far in the
  // cut, and f = 2^(m - M) * (1 / sum).  One chain over the rows of the entry ascending, then over the query heads of
  // the group ascending, continued from what the slot holds; slots that are new in this pass start from 0.  So prefill
  // in pieces gives the same sums.  Not together with lists of blocks.
  Tensor mass_pages = {};  // stat [pages, K, 16] acc, or absent; slots below `first` are neither read nor written
  Tensor first = {};       // i32 [S]: protected slots, which have no mass; present if mass_pages is
  Tensor weights = {};     // stat [pages, K, H / K + 1, 16] scratch, in bf16 with mass_pages; else absent
  void check(Contract& c) const {
    const int64_t N = q.shape[0], H = q.shape[1], K = k_pages.shape[1], D = k_pages.shape[2];
    detail::check_pages(c, k_pages, v_pages);
    c.act("q", q, {N, H, D}, c.strided);
    detail::check_heads(c, H, K);
    c.act("o", o, {N, H, D});
    detail::check_queries(c, page_table, queries);
    c.that(scale > 0, "scale is ", scale, ", expected more than 0");
    if (blocks) detail::check_lists(c, blocks, budget, block, page_table.shape[0], K);
    const int64_t S = queries.shape[0];
    if (work) c.index("work", work, {work.shape[0], 2});
    c.that(work || q.dtype != DType::bf16 || N >= 2 * S, "entries of one row, but no work");
    const int64_t least = paged_cut_results(S, page_table.shape[1], H, D);
    if (q.dtype == DType::bf16 && least > 0) {
      c.stat("results", cuts.results, {cuts.results.shape[0]});
      c.that(cuts.results.size() >= least, "results has ", cuts.results.size(), " elements, expected ", least,
             " at least");
      c.index("arrivals", cuts.arrivals, {cuts.arrivals.shape[0]});
      c.that(cuts.arrivals.size() >= S * K, "arrivals has ", cuts.arrivals.size(), " elements, expected ", S * K,
             " at least");
    }
    if (!mass_pages) return;
    c.stat("mass_pages", mass_pages, {k_pages.shape[0], K, kPageSlots});
    c.index("first", first, {queries.shape[0]});
    c.that(!blocks, "lists of blocks of slots that have mass");
    if (q.dtype == DType::bf16) c.stat("weights", weights, {k_pages.shape[0], K, H / K + 1, kPageSlots});
  }
  Cost cost() const {
    const int64_t size = static_cast<int64_t>(dtype_size(q.dtype)), K = k_pages.shape[1];
    const int64_t kv = slots * K * k_pages.shape[2] * 2 * size;
    const int64_t mass = mass_pages ? slots * K * static_cast<int64_t>(dtype_size(mass_pages.dtype)) : 0;
    return {(4 * q.shape[2] + (mass_pages ? 2 : 0)) * q.shape[1] * pairs,
            detail::total_bytes(q, queries, budget, first, work) + kv + mass, detail::total_bytes(o) + mass};
  }
  Stretch stretch(int multiprocessors) const {
    const double longest = std::max(1.0, multiprocessors * detail::part(most_pairs, pairs * q.shape[1]));
    return {.flops = longest, .bytes = longest};
  }
  auto outputs() const { return std::array{o}; }
};

// Page src[i] -> page dst[i], whole pages, K, V and what lies beside them.
struct KvCopyPages {
  Tensor k_pages, v_pages;  // acc: the dst pages are written
  Tensor pairs;             // i32 [n, 2]: (src, dst); no dst is a src or occurs twice
  Tensor pos_pages{};       // i32 [pages, K, 16] acc, or absent
  Tensor mass_pages{};      // stat [pages, K, 16] acc, or absent
  void check(Contract& c) const {
    detail::check_pages(c, k_pages, v_pages);
    c.index("pairs", pairs, {pairs.shape[0], 2});
    if (pos_pages) c.index("pos_pages", pos_pages, {k_pages.shape[0], k_pages.shape[1], kPageSlots});
    if (mass_pages) c.stat("mass_pages", mass_pages, {k_pages.shape[0], k_pages.shape[1], kPageSlots});
  }
  Cost cost() const {
    int64_t bytes = 0;  // of a page
    for (const Tensor& t : {k_pages, v_pages, pos_pages, mass_pages})
      if (t) bytes += t.stride[0] * static_cast<int64_t>(dtype_size(t.dtype));
    return {0, pairs.shape[0] * bytes, pairs.shape[0] * bytes};
  }
  auto outputs() const { return std::array{k_pages, v_pages}; }
};

}  // namespace pare
