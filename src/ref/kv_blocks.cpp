// Block-sparse reads: summaries of blocks of keys, and the choice of blocks by them.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "ref/attention.h"
#include "ref/paged.h"

namespace pare::ref {

namespace {

void expect_block(const char* op, int32_t block) {
  expect(block == 4 || block == 16, "ref: ", op, ": blocks of ", block, " slots, expected 4 or 16");
}
void expect_reserved(const char* op, int32_t first, int32_t last) {
  expect(first >= 0 && last >= 1, "ref: ", op, ": first_blocks ", first, ", last_blocks ", last,
         ": at least 0 and 1 expected");
}

// The summary of the keys key(slot), one channel of slots [begin, end): put(row, value).
template <class Key, class Put>
void summarise(BlockSummary kind, int64_t begin, int64_t end, Key key, Put put) {
  double low = INFINITY, high = -INFINITY, sum = 0;
  for (int64_t slot = begin; slot < end; slot++) {
    const double x = key(slot);
    low = std::min(low, x), high = std::max(high, x), sum += x;
  }
  if (kind == BlockSummary::minmax)
    put(0, low), put(1, high);
  else
    put(0, sum / static_cast<double>(end - begin));
}

// The score of a block for the queries q(head of the group, channel), by its summary row(row, channel).
template <class Query, class Row>
double block_score(BlockSummary kind, int64_t group, int64_t dim, Query q, Row row) {
  double highest = -INFINITY, mean = 0;
  for (int64_t g = 0; g < group; g++) {
    double bound = 0;
    for (int64_t d = 0; d < dim; d++) {
      if (kind == BlockSummary::minmax)
        bound += std::max(q(g, d) * row(0, d), q(g, d) * row(1, d));
      else
        mean += q(g, d) * row(0, d) / static_cast<double>(group);
    }
    highest = std::max(highest, bound);
  }
  return kind == BlockSummary::minmax ? highest : mean;
}

// The n best of `numbers`, which ascend, by score[i] of the i-th: ascending.
std::vector<int32_t> best(int64_t n, const std::vector<int32_t>& numbers, const std::vector<double>& score) {
  std::vector<size_t> order(numbers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return score[x] > score[y]; });
  std::vector<int32_t> list;
  for (int64_t i = 0; i < n; i++) list.push_back(numbers[order[i]]);
  std::sort(list.begin(), list.end());
  return list;
}

struct Chosen {
  std::vector<int32_t> blocks;  // `budget` of `all`, ascending
  std::vector<double> score;    // of spans, then of blocks, in the order of their numbers
};
// score_block(number), score_span(number): scores as they are stored.
template <class Args, class ScoreBlock, class ScoreSpan>
Chosen choose(const Args& a, int64_t all, int64_t budget, ScoreBlock score_block, ScoreSpan score_span) {
  const auto c = competition(all, a.first_blocks, a.last_blocks, a.block, a.spans);
  const int64_t each = kSpanSlots / a.block;
  Chosen chosen;
  std::vector<int32_t> spans(c.spans), kept;
  if (c.spans) {
    std::iota(spans.begin(), spans.end(), static_cast<int32_t>(c.first_span));
    for (int32_t s : spans) chosen.score.push_back(score_span(s));
    kept = best(a.spans, spans, chosen.score);
  }
  std::vector<int32_t> between;
  std::vector<double> score;
  for (int64_t b = a.first_blocks; b < all - a.last_blocks; b++) {
    const int64_t span = b / each;
    const bool competes = span >= c.first_span && span < c.first_span + c.spans;
    if (competes && !std::binary_search(kept.begin(), kept.end(), span)) continue;
    between.push_back(static_cast<int32_t>(b)), score.push_back(score_block(b));
  }
  chosen.blocks = best(budget - a.first_blocks - a.last_blocks, between, score);
  for (int64_t b = 0; b < all; b++)
    if (b < a.first_blocks || b >= all - a.last_blocks) chosen.blocks.push_back(static_cast<int32_t>(b));
  std::sort(chosen.blocks.begin(), chosen.blocks.end());
  chosen.score.insert(chosen.score.end(), score.begin(), score.end());
  return chosen;
}

// What a choice must be able to do.
template <class Args>
bool can_choose(const Args& a, int64_t budget) {
  const int64_t reserved = a.first_blocks + a.last_blocks;
  return budget >= reserved && budget <= a.blocks.shape[2] &&
         (a.spans == 0 || a.spans * (kSpanSlots / a.block) >= budget - reserved);
}

}  // namespace

void kv_block_summary(const KvBlockSummary& a, Stream) {
  constexpr const char* op = "kv_block_summary";
  expect_block(op, a.block);
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1], dim = a.k_pages.shape[2];
  const int64_t per_page = kPageSlots / a.block, height = summary_rows(a.kind);
  expect_dense(op, "k_pages", a.k_pages, {pages, kv_heads, dim, kPageSlots});
  expect_dense(op, "summary", a.summary, {pages, kv_heads, per_page * height, dim});
  int64_t rows = 0;  // of the pass: as many as the entries name
  for (int64_t i = 0; i < a.queries.shape[0]; i++) {
    const int32_t* entry = a.queries.as<int32_t>() + 4 * i;
    rows = std::max<int64_t>(rows, int64_t{entry[0]} + entry[1]);
  }
  const auto queries = read_queries(op, a.queries, a.page_table, rows, pages);
  int64_t refreshed = 0, spans = 0;
  for (const PagedRow& s : queries) {
    if (s.rows) refreshed += blocks_of(s.slots, kPageSlots) - (s.slots - s.rows) / kPageSlots;
    if (a.span_summary) spans += s.slots / kSpanSlots - (s.slots - s.rows) / kSpanSlots;
  }
  expect(refreshed == a.pages, "ref: ", op, ": pages is ", a.pages, ", the entries wrote to ", refreshed);
  expect(spans == a.spans, "ref: ", op, ": spans is ", a.spans, ", the entries fill ", spans);
  if (a.span_summary) expect_dense(op, "span_summary", a.span_summary, {pages, kv_heads, height, dim});
  dispatch(op, a.k_pages, [&]<class T>(T) {
    const View<T> k_pages(a.k_pages), summary(a.summary), span_summary(a.span_summary);
    for (const PagedRow& s : queries) {
      if (s.rows == 0) continue;
      const SlotPages table{View<int32_t>(a.page_table), s.table_row};
      const int64_t first_page = (s.slots - s.rows) / kPageSlots;
      for (int64_t b = first_page * per_page; b < blocks_of(s.slots, a.block); b++)
        for (int64_t h = 0; h < kv_heads; h++)
          for (int64_t d = 0; d < dim; d++) {
            const int64_t begin = b * a.block, page = table.page(begin);
            summarise(
                a.kind, begin, std::min<int64_t>(begin + a.block, s.slots),
                [&](int64_t slot) { return k_pages(page, h, d, slot % kPageSlots); },
                [&](int64_t row, double x) { summary(page, h, b % per_page * height + row, d) = static_cast<T>(x); });
          }
      if (!a.span_summary) continue;
      for (int64_t span = (s.slots - s.rows) / kSpanSlots; span < s.slots / kSpanSlots; span++)
        for (int64_t h = 0; h < kv_heads; h++)
          for (int64_t d = 0; d < dim; d++) {
            const int64_t begin = span * kSpanSlots, end = begin + kSpanSlots;
            summarise(
                a.kind, begin, end, [&](int64_t slot) { return k_pages(table.page(slot), h, d, slot % kPageSlots); },
                [&](int64_t row, double x) { span_summary(table.page(end - 1), h, row, d) = static_cast<T>(x); });
          }
    }
  });
}

void kv_block_select(const KvBlockSelect& a, Stream) {
  constexpr const char* op = "kv_block_select";
  expect_block(op, a.block), expect_reserved(op, a.first_blocks, a.last_blocks);
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], dim = a.q.shape[2];
  const int64_t pages = a.summary.shape[0], kv_heads = a.summary.shape[1], entries = a.queries.shape[0];
  const int64_t per_page = kPageSlots / a.block, height = summary_rows(a.kind);
  expect(kv_heads > 0 && heads % kv_heads == 0, "ref: ", op, ": ", heads, " query heads over ", kv_heads, " key heads");
  expect_shape(op, "q", a.q, {rows, heads, dim});
  expect_dense(op, "summary", a.summary, {pages, kv_heads, per_page * height, dim});
  expect_dense(op, "blocks", a.blocks, {a.page_table.shape[0], kv_heads, a.blocks.shape[2]});
  expect_dense(op, "score", a.score, {entries, kv_heads, a.score.shape[2]});
  expect_dense(op, "budget", a.budget, {a.page_table.shape[0]});
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
    const int64_t own = competition(all, a.first_blocks, a.last_blocks, a.block, a.spans).scored();
    expect(can_choose(a, budget(e)) && own <= a.score.shape[2], "ref: ", op, ": entry ", e, " chooses ", budget(e),
           " of ", all, " blocks, ", a.first_blocks, " first and ", a.last_blocks, " last ones always, from ", a.spans,
           " spans; blocks is ", a.blocks.str(), ", score ", a.score.str());
    scored += own;
  }
  if (a.spans) expect_dense(op, "span_summary", a.span_summary, {pages, kv_heads, height, dim});
  expect(scored == a.scored, "ref: ", op, ": scored is ", a.scored, ", the entries score ", scored);
  dispatch(op, a.q, [&]<class T>(T) {
    const View<T> q(a.q), summary(a.summary), span_summary(a.span_summary), score(a.score);
    const int64_t group = heads / kv_heads;
    for (int64_t e = 0; e < entries; e++) {
      if (!chooses(e)) continue;
      const PagedRow& s = queries[e];
      const SlotPages table{View<int32_t>(a.page_table), s.table_row};
      const int64_t all = blocks_of(s.slots, a.block);
      for (int64_t h = 0; h < kv_heads; h++) {
        const auto scored = [&](auto row) {
          const auto query = [&](int64_t g, int64_t d) { return double{q(s.row, h * group + g, d)}; };
          return static_cast<double>(static_cast<T>(block_score(a.kind, group, dim, query, row)));
        };
        const Chosen chosen = choose(
            a, all, budget(e),
            [&](int64_t b) {
              const int64_t page = table.page(b * a.block);
              return scored([&](int64_t row, int64_t d) { return summary(page, h, b % per_page * height + row, d); });
            },
            [&](int64_t span) {
              const int64_t page = table.page((span + 1) * kSpanSlots - 1);
              return scored([&](int64_t row, int64_t d) { return span_summary(page, h, row, d); });
            });
        for (size_t i = 0; i < chosen.score.size(); i++) score(e, h, i) = static_cast<T>(chosen.score[i]);
        for (int32_t i = 0; i < budget(e); i++) blocks(s.table_row, h, i) = chosen.blocks[i];
      }
    }
  });
}

namespace {

int32_t rows_held(const AttnBlockSelect& a, int64_t row) { return a.holds ? View<int32_t>(a.holds)(row) : 1; }

// One row and key head: scores, choice, list.
template <class T>
void choose_for_row(const AttnBlockSelect& a, int64_t segment, int64_t row, int64_t all, int64_t h) {
  const View<T> q(a.q), summary(a.summary), span_summary(a.span_summary);
  const View<int32_t> blocks(a.blocks);
  const int64_t group = a.q.shape[1] / a.k.shape[1], height = summary_rows(a.kind), n = View<int32_t>(a.budget)(row);
  const auto scored = [&](const View<T>& of, int64_t number) {
    return static_cast<double>(static_cast<T>(block_score(
        a.kind, group, a.q.shape[2], [&](int64_t g, int64_t d) { return double{q(row, h * group + g, d)}; },
        [&](int64_t which, int64_t d) { return double{of(segment, h, number * height + which, d)}; })));
  };
  const Chosen chosen = choose(
      a, all, n, [&](int64_t b) { return scored(summary, b); }, [&](int64_t s) { return scored(span_summary, s); });
  for (int64_t r = row; r < row + rows_held(a, row); r++)
    for (int64_t i = 0; i < n; i++) blocks(r, h, i) = chosen.blocks[i];
}

}  // namespace

void attn_block_select(const AttnBlockSelect& a, Stream) {
  constexpr const char* op = "attn_block_select";
  expect_block(op, a.block), expect_reserved(op, a.first_blocks, a.last_blocks);
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], dim = a.q.shape[2], kv_heads = a.k.shape[1];
  const int64_t height = summary_rows(a.kind), count = a.segments.shape[0];
  expect(kv_heads > 0 && heads % kv_heads == 0, "ref: ", op, ": ", heads, " query heads over ", kv_heads, " key heads");
  expect_shape(op, "q", a.q, {rows, heads, dim});
  expect_shape(op, "k", a.k, {rows, kv_heads, dim});
  expect_shape(op, "pk", a.pk, {a.pk.shape[0], kv_heads, dim});
  expect_dense(op, "blocks", a.blocks, {rows, kv_heads, a.blocks.shape[2]});
  expect_dense(op, "summary", a.summary, {count, kv_heads, a.summary.shape[2], dim});
  if (a.spans) expect_dense(op, "span_summary", a.span_summary, {count, kv_heads, a.span_summary.shape[2], dim});
  expect_dense(op, "budget", a.budget, {rows});
  if (a.holds) expect_dense(op, "holds", a.holds, {rows});
  const auto segments = read_segments(op, a.segments, rows, a.pk.shape[0]);
  const View<int32_t> budget(a.budget);
  int64_t scored = 0, slots = 0;
  for (const SegmentRow& s : segments) {
    slots += s.parent_len + s.len;
    expect((s.parent_len + s.len) / a.block * height <= a.summary.shape[2], "ref: ", op, ": ", s.parent_len + s.len,
           " slots have more blocks than summary ", a.summary.str());
    expect(a.spans == 0 || (s.parent_len + s.len) / kSpanSlots * height <= a.span_summary.shape[2], "ref: ", op, ": ",
           s.parent_len + s.len, " slots have more spans than span_summary ", a.span_summary.str());
    for (int64_t i = 0; i < s.len; i++) {
      const int64_t all = blocks_of(s.parent_len + i + 1, a.block), n = budget(s.row + i);
      if (all <= n || rows_held(a, s.row + i) == 0) continue;
      const int64_t last = i + rows_held(a, s.row + i) - 1;
      expect(last < s.len && blocks_of(s.parent_len + last + 1, a.block) == all, "ref: ", op, ": row ", s.row + i,
             " chooses for ", last - i + 1, " rows, not all of its segment and of ", all, " blocks");
      for (int64_t j = i + 1; j <= last; j++)
        expect(budget(s.row + j) == n && rows_held(a, s.row + j) == 0, "ref: ", op, ": row ", s.row + j,
               " has the choice of row ", s.row + i, " and another budget or its own");
      expect(can_choose(a, n), "ref: ", op, ": row ", s.row + i, " chooses ", n, " blocks, ", a.first_blocks,
             " first and ", a.last_blocks, " last ones always, from ", a.spans, " spans; blocks is ", a.blocks.str());
      scored += competition(all, a.first_blocks, a.last_blocks, a.block, a.spans).scored();
    }
  }
  expect(scored == a.scored && slots == a.slots, "ref: ", op, ": scored ", a.scored, " and slots ", a.slots,
         ", the segments hold ", scored, " and ", slots);
  dispatch(op, a.q, [&]<class T>(T) {
    for (int64_t i = 0; i < count; i++) {
      const SegmentRow& s = segments[i];
      const SlotView<T> k{View<T>(a.pk), View<T>(a.k), s};
      const auto summarise_all = [&](const Tensor& t, int64_t h, int64_t size) {  // the whole blocks of so many slots
        const View<T> summary(t);
        for (int64_t b = 0; b < (s.parent_len + s.len) / size; b++)
          for (int64_t d = 0; d < dim; d++)
            summarise(
                a.kind, b * size, (b + 1) * size, [&](int64_t slot) { return k(slot, h, d); },
                [&](int64_t row, double x) { summary(i, h, b * height + row, d) = static_cast<T>(x); });
      };
      for (int64_t h = 0; h < kv_heads; h++) {
        summarise_all(a.summary, h, a.block);
        if (a.spans) summarise_all(a.span_summary, h, kSpanSlots);
        for (int64_t r = 0; r < s.len; r++) {
          const int64_t all = blocks_of(s.parent_len + r + 1, a.block);
          if (all > budget(s.row + r) && rows_held(a, s.row + r) > 0) choose_for_row<T>(a, i, s.row + r, all, h);
        }
      }
    }
  });
}

}  // namespace pare::ref
