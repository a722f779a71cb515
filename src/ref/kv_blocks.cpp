// Block-sparse reads: summaries of blocks of keys, and the choice of blocks by them.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "ref/paged.h"

namespace pare::ref {

namespace {

void expect_block(const char* op, int32_t block) {
  expect(block == 4 || block == 16, "ref: ", op, ": blocks of ", block, " slots, expected 4 or 16");
}

// Row `which` of the summary of `block` in its page.
int64_t summary_row(int64_t b, int32_t block, BlockSummary kind, int64_t which) {
  return b % (kPageSlots / block) * summary_rows(kind) + which;
}

}  // namespace

void kv_block_summary(const KvBlockSummary& a, Stream) {
  constexpr const char* op = "kv_block_summary";
  expect_block(op, a.block);
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1], dim = a.k_pages.shape[2];
  expect_dense(op, "k_pages", a.k_pages, {pages, kv_heads, dim, kPageSlots});
  expect_dense(op, "summary", a.summary, {pages, kv_heads, kPageSlots / a.block * summary_rows(a.kind), dim});
  int64_t rows = 0;  // of the pass: as many as the entries name
  for (int64_t i = 0; i < a.queries.shape[0]; i++) {
    const int32_t* entry = a.queries.as<int32_t>() + 4 * i;
    rows = std::max<int64_t>(rows, int64_t{entry[0]} + entry[1]);
  }
  const auto queries = read_queries(op, a.queries, a.page_table, rows, pages);
  int64_t refreshed = 0;
  for (const PagedRow& s : queries)
    if (s.rows) refreshed += blocks_of(s.slots, kPageSlots) - (s.slots - s.rows) / kPageSlots;
  expect(refreshed == a.pages, "ref: ", op, ": pages is ", a.pages, ", the entries wrote to ", refreshed);
  dispatch(op, a.k_pages, [&]<class T>(T) {
    const View<T> k_pages(a.k_pages), summary(a.summary);
    for (const PagedRow& s : queries) {
      if (s.rows == 0) continue;
      const SlotPages table{View<int32_t>(a.page_table), s.table_row};
      const int64_t first_page = (s.slots - s.rows) / kPageSlots;
      for (int64_t b = first_page * kPageSlots / a.block; b < blocks_of(s.slots, a.block); b++)
        for (int64_t h = 0; h < kv_heads; h++)
          for (int64_t d = 0; d < dim; d++) {
            const int64_t begin = b * a.block, end = std::min<int64_t>(begin + a.block, s.slots);
            const int64_t page = table.page(begin);
            double low = INFINITY, high = -INFINITY, sum = 0;
            for (int64_t slot = begin; slot < end; slot++) {
              const double key = k_pages(page, h, d, slot % kPageSlots);
              low = std::min(low, key), high = std::max(high, key), sum += key;
            }
            const auto put = [&](int64_t which, double x) {
              summary(page, h, summary_row(b, a.block, a.kind, which), d) = static_cast<T>(x);
            };
            if (a.kind == BlockSummary::minmax)
              put(0, low), put(1, high);
            else
              put(0, sum / static_cast<double>(end - begin));
          }
    }
  });
}

void kv_block_select(const KvBlockSelect& a, Stream) {
  constexpr const char* op = "kv_block_select";
  expect_block(op, a.block);
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], dim = a.q.shape[2];
  const int64_t pages = a.summary.shape[0], kv_heads = a.summary.shape[1], entries = a.queries.shape[0];
  expect(kv_heads > 0 && heads % kv_heads == 0, "ref: ", op, ": ", heads, " query heads over ", kv_heads, " key heads");
  expect_shape(op, "q", a.q, {rows, heads, dim});
  expect_dense(op, "summary", a.summary, {pages, kv_heads, kPageSlots / a.block * summary_rows(a.kind), dim});
  expect_dense(op, "blocks", a.blocks, {entries, kv_heads, a.blocks.shape[2]});
  expect_dense(op, "score", a.score, {entries, kv_heads, a.score.shape[2]});
  expect_dense(op, "budget", a.budget, {entries});
  expect(a.first_blocks >= 0 && a.last_blocks >= 1, "ref: ", op, ": first_blocks ", a.first_blocks, ", last_blocks ",
         a.last_blocks, ": at least 0 and 1 expected");
  const auto queries = read_queries(op, a.queries, a.page_table, rows, pages);
  const View<int32_t> budget(a.budget), blocks(a.blocks);
  int64_t scored = 0;
  for (int64_t e = 0; e < entries; e++)
    if (has_list(queries[e], budget(e), a.block)) {
      const int64_t all = blocks_of(queries[e].slots, a.block);
      expect(budget(e) >= a.first_blocks + a.last_blocks && budget(e) <= a.blocks.shape[2] && all <= a.score.shape[2],
             "ref: ", op, ": entry ", e, " chooses ", budget(e), " of ", all, " blocks, ", a.first_blocks,
             " first and ", a.last_blocks, " last ones always; blocks is ", a.blocks.str(), ", score ", a.score.str());
      scored += all - a.first_blocks - a.last_blocks;
    }
  expect(scored == a.scored, "ref: ", op, ": scored is ", a.scored, ", the entries score ", scored);
  dispatch(op, a.q, [&]<class T>(T) {
    const View<T> q(a.q), summary(a.summary), score(a.score);
    const int64_t group = heads / kv_heads;
    for (int64_t e = 0; e < entries; e++) {
      const PagedRow& s = queries[e];
      if (!has_list(s, budget(e), a.block)) continue;
      const SlotPages table{View<int32_t>(a.page_table), s.table_row};
      const int64_t all = blocks_of(s.slots, a.block), end = all - a.last_blocks;
      for (int64_t h = 0; h < kv_heads; h++) {
        for (int64_t b = a.first_blocks; b < end; b++) {
          const auto row = [&](int64_t which, int64_t d) {
            return double{summary(table.page(b * a.block), h, summary_row(b, a.block, a.kind, which), d)};
          };
          double highest = -INFINITY, sum = 0;
          for (int64_t g = 0; g < group; g++) {
            double bound = 0;
            for (int64_t d = 0; d < dim; d++) {
              const double x = q(s.row, h * group + g, d);
              if (a.kind == BlockSummary::minmax)
                bound += std::max(x * row(0, d), x * row(1, d));
              else
                sum += x * row(0, d) / static_cast<double>(group);
            }
            highest = std::max(highest, bound);
          }
          score(e, h, b) = static_cast<T>(a.kind == BlockSummary::minmax ? highest : sum);
        }
        std::vector<int32_t> list(end - a.first_blocks);
        std::iota(list.begin(), list.end(), a.first_blocks);
        std::stable_sort(list.begin(), list.end(),
                         [&](int32_t x, int32_t y) { return score(e, h, x) > score(e, h, y); });
        list.resize(budget(e) - a.first_blocks - a.last_blocks);
        for (int32_t b = 0; b < a.first_blocks; b++) list.push_back(b);
        for (int64_t b = end; b < all; b++) list.push_back(static_cast<int32_t>(b));
        std::sort(list.begin(), list.end());
        for (int32_t i = 0; i < budget(e); i++) blocks(e, h, i) = list[i];
      }
    }
  });
}

}  // namespace pare::ref
