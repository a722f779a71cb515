// Block-sparse reads: summaries of blocks of keys, and the choice of blocks by them.
#include "ops/blocks.h"

#include <algorithm>
#include <cmath>

#include "ref/attention.h"
#include "ref/paged.h"

namespace pare::ref {

namespace {

// The summary of the keys key(slot), one channel of slots [begin, end): put(row, value).
template <class Key, class Put>
void summarise(BlockSummary kind, int64_t begin, int64_t end, Key key, Put put) {
  double low = INFINITY, high = -INFINITY, sum = 0;
  for (int64_t slot = begin; slot < end; slot++) {
    const double x = key(slot);
    low = std::min(low, x);
    high = std::max(high, x);
    sum += x;
  }
  if (kind == BlockSummary::minmax) {
    put(0, low);
    put(1, high);
  } else
    put(0, sum / static_cast<double>(end - begin));
}

// The score of a block for the queries q(head of the group, channel), by its summary row(row, channel).
template <class Query, class Row>
double block_score(BlockSummary kind, int64_t group, int64_t head_dim, Query q, Row row) {
  double highest = -INFINITY, mean = 0;
  for (int64_t g = 0; g < group; g++) {
    double bound = 0;
    for (int64_t d = 0; d < head_dim; d++) {
      if (kind == BlockSummary::minmax)
        bound += std::max(q(g, d) * row(0, d), q(g, d) * row(1, d));
      else
        mean += q(g, d) * row(0, d) / static_cast<double>(group);
    }
    highest = std::max(highest, bound);
  }
  return kind == BlockSummary::minmax ? highest : mean;
}

struct Chosen {
  std::vector<int32_t> blocks;  // `budget` of `all`, ascending
  std::vector<double> score;    // of those between the first and the last ones
};
// score_of(block): as it is stored.
template <class Args, class Score>
Chosen choose(const Args& a, int64_t all, int64_t budget, Score score_of) {
  Chosen chosen;
  std::vector<int32_t> order;
  for (int64_t b = a.first_blocks; b < all - a.last_blocks; b++) {
    order.push_back(static_cast<int32_t>(b));
    chosen.score.push_back(score_of(b));
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) {
    return chosen.score[x - a.first_blocks] > chosen.score[y - a.first_blocks];
  });
  order.resize(budget - a.first_blocks - a.last_blocks);
  for (int64_t b = 0; b < all; b++)
    if (b < a.first_blocks || b >= all - a.last_blocks) order.push_back(static_cast<int32_t>(b));
  std::sort(order.begin(), order.end());
  chosen.blocks = order;
  return chosen;
}

// What a choice must be able to do.
template <class Args>
bool can_choose(const Args& a, int64_t budget) {
  return budget >= a.first_blocks + a.last_blocks && budget <= a.blocks.shape[2];
}

}  // namespace

void kv_block_summary(const KvBlockSummary& a, Stream) {
  constexpr const char* op = "kv_block_summary";
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2];
  const int64_t per_page = kPageSlots / a.block, height = summary_rows(a.kind);
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
      for (int64_t b = first_page * per_page; b < blocks_of(s.slots, a.block); b++)
        for (int64_t h = 0; h < kv_heads; h++)
          for (int64_t d = 0; d < head_dim; d++) {
            const int64_t begin = b * a.block, page = table.page(begin);
            summarise(
                a.kind, begin, std::min<int64_t>(begin + a.block, s.slots),
                [&](int64_t slot) { return k_pages(page, h, d, slot % kPageSlots); },
                [&](int64_t row, double x) { summary(page, h, b % per_page * height + row, d) = static_cast<T>(x); });
          }
    }
  });
}

void kv_block_select(const KvBlockSelect& a, Stream) {
  constexpr const char* op = "kv_block_select";
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], head_dim = a.q.shape[2];
  const int64_t pages = a.summary.shape[0], kv_heads = a.summary.shape[1], entries = a.queries.shape[0];
  const int64_t per_page = kPageSlots / a.block, height = summary_rows(a.kind);
  const auto queries = read_queries(op, a.queries, a.page_table, rows, pages);
  const View<int32_t> budgets(a.budget), blocks(a.blocks);
  const auto budget = [&](int64_t e) { return budgets(queries[e].table_row); };
  const auto chooses = [&](int64_t e) {
    return queries[e].rows == 1 && blocks_of(queries[e].slots, a.block) > budget(e);
  };
  int64_t scored = 0;
  for (int64_t e = 0; e < entries; e++) {
    if (!chooses(e)) continue;
    const int64_t all = blocks_of(queries[e].slots, a.block);
    const int64_t own = all - a.first_blocks - a.last_blocks;
    expect(can_choose(a, budget(e)) && own <= a.score.shape[2], "ref: ", op, ": entry ", e, " chooses ", budget(e),
           " of ", all, " blocks, ", a.first_blocks, " first and ", a.last_blocks, " last ones always; blocks is ",
           a.blocks.str(), ", score ", a.score.str());
    scored += own;
  }
  expect(scored == a.scored, "ref: ", op, ": scored is ", a.scored, ", the entries score ", scored);
  dispatch(op, a.q, [&]<class T>(T) {
    const View<T> q(a.q), summary(a.summary), score(a.score);
    const int64_t group = heads / kv_heads;
    for (int64_t e = 0; e < entries; e++) {
      if (!chooses(e)) continue;
      const PagedRow& s = queries[e];
      const SlotPages table{View<int32_t>(a.page_table), s.table_row};
      const int64_t all = blocks_of(s.slots, a.block);
      for (int64_t h = 0; h < kv_heads; h++) {
        const Chosen chosen = choose(a, all, budget(e), [&](int64_t b) {
          const int64_t page = table.page(b * a.block);
          return static_cast<double>(static_cast<T>(block_score(
              a.kind, group, head_dim, [&](int64_t g, int64_t d) { return double{q(s.row, h * group + g, d)}; },
              [&](int64_t row, int64_t d) { return double{summary(page, h, b % per_page * height + row, d)}; })));
        });
        for (size_t i = 0; i < chosen.score.size(); i++) score(e, h, i) = static_cast<T>(chosen.score[i]);
        for (int32_t i = 0; i < budget(e); i++) blocks(s.table_row, h, i) = chosen.blocks[i];
      }
    }
  });
}

namespace {

// One row and key head: scores, choice, list.
template <class T>
void choose_for_row(const AttnBlockSelect& a, int64_t segment, int64_t row, int64_t all, int64_t h) {
  const View<T> q(a.q), summary(a.summary);
  const View<int32_t> blocks(a.blocks);
  const int64_t group = a.q.shape[1] / a.k.shape[1], height = summary_rows(a.kind), n = View<int32_t>(a.budget)(row);
  const Chosen chosen = choose(a, all, n, [&](int64_t b) {
    return static_cast<double>(static_cast<T>(block_score(
        a.kind, group, a.q.shape[2], [&](int64_t g, int64_t d) { return double{q(row, h * group + g, d)}; },
        [&](int64_t which, int64_t d) { return double{summary(segment, h, b * height + which, d)}; })));
  });
  for (int64_t i = 0; i < n; i++) blocks(row, h, i) = chosen.blocks[i];
}

}  // namespace

void attn_block_select(const AttnBlockSelect& a, Stream) {
  constexpr const char* op = "attn_block_select";
  const int64_t rows = a.q.shape[0], head_dim = a.q.shape[2], kv_heads = a.k.shape[1];
  const int64_t height = summary_rows(a.kind), count = a.segments.shape[0];
  const auto segments = read_segments(op, a.segments, rows, a.pk.shape[0]);
  const View<int32_t> budget(a.budget);
  int64_t scored = 0, slots = 0;
  for (const SegmentRow& s : segments) {
    slots += s.parent_len + s.len;
    expect((s.parent_len + s.len) / a.block * height <= a.summary.shape[2], "ref: ", op, ": ", s.parent_len + s.len,
           " slots have more blocks than summary ", a.summary.str());
    for (int64_t i = 0; i < s.len; i++) {
      const int64_t all = blocks_of(s.parent_len + i + 1, a.block), n = budget(s.row + i);
      if (all <= n) continue;
      expect(can_choose(a, n), "ref: ", op, ": row ", s.row + i, " chooses ", n, " blocks, ", a.first_blocks,
             " first and ", a.last_blocks, " last ones always; blocks is ", a.blocks.str());
      scored += all - a.first_blocks - a.last_blocks;
    }
  }
  expect(scored == a.scored && slots == a.slots, "ref: ", op, ": scored ", a.scored, " and slots ", a.slots,
         ", the segments hold ", scored, " and ", slots);
  dispatch(op, a.q, [&]<class T>(T) {
    const View<T> summary(a.summary);
    for (int64_t i = 0; i < count; i++) {
      const SegmentRow& s = segments[i];
      const SlotView<T> k{View<T>(a.pk), View<T>(a.k), s};
      for (int64_t h = 0; h < kv_heads; h++) {
        for (int64_t b = 0; b < (s.parent_len + s.len) / a.block; b++)
          for (int64_t d = 0; d < head_dim; d++)
            summarise(
                a.kind, b * a.block, (b + 1) * a.block, [&](int64_t slot) { return k(slot, h, d); },
                [&](int64_t row, double x) { summary(i, h, b * height + row, d) = static_cast<T>(x); });
        for (int64_t r = 0; r < s.len; r++) {
          const int64_t all = blocks_of(s.parent_len + r + 1, a.block);
          if (all > budget(s.row + r)) choose_for_row<T>(a, i, s.row + r, all, h);
        }
      }
    }
  });
}

}  // namespace pare::ref
