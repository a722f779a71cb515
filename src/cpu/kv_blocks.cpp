// Block-sparse reads: summaries, the choice of blocks, and what attention over pages needs to read listed ones.
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "cpu/paged.h"

namespace pare::cpu {

void expect_block(const char* op, int32_t block) {
  if (block != 4 && block != 16)
    throw std::logic_error(cat("cpu: ", op, ": blocks of ", block, " slots; expected 4 or 16"));
}

BlockLists::BlockLists(const char* op, const Tensor& blocks, const Tensor& budget, int32_t block, int64_t rows,
                       int64_t kv_heads)
    : op_(op) {
  expect_block(op, block);
  args_ = {.blocks = index(op, "blocks", blocks, {rows, kv_heads, blocks.shape[2]}),
           .budget = index(op, "budget", budget, {rows}),
           .kv_heads = kv_heads,
           .room = blocks.shape[2],
           .block = block};
}

const int32_t* BlockLists::list(int64_t row, int64_t kv_head, int64_t total) const {
  const int64_t n = args_.budget[row], last = blocks_of(total, args_.block) - 1;
  const int32_t* const list = args_.blocks + (row * args_.kv_heads + kv_head) * args_.room;
  bool ok = n >= 1 && n <= args_.room;
  for (int64_t i = 0; ok && i < n; i++)
    ok = list[i] > (i ? list[i - 1] : -1) && (i + 1 < n ? list[i] < last : list[i] == last);
  if (!ok) [[unlikely]]
    throw std::logic_error(cat("cpu: ", op_, ": the list of row ", row, ", key head ", kv_head, ", of ", n,
                               " blocks (room for ", args_.room, ") is not ascending up to block ", last));
  return list;
}

// Blocks that are whole pages make a page table; smaller ones are copied into new pages, without gaps.
void attend_listed(const PagedArgs& a, const PagedRow& q, int64_t kv_head, const BlockLists& lists, int64_t list_row,
                   float* scratch) {
  const int64_t block = lists.args().block, n = lists.args().budget[list_row], width = a.width;
  const int32_t* const list = lists.list(list_row, kv_head, q.slots);
  const int32_t* const table = a.page_table ? a.page_table + q.table_row * a.table_stride : nullptr;
  PagedArgs listed = a;
  PagedRow row = q;
  row.slots = static_cast<int32_t>(lists.count(list_row, q.slots)), row.table_row = 0;
  float* const memory = scratch + paged_scratch(row.slots, width);
  if (block == kPageSlots) {
    int32_t* const pages = reinterpret_cast<int32_t*>(memory);
    for (int64_t i = 0; i < n; i++) pages[i] = table ? table[list[i]] : list[i];
    listed.page_table = pages;
  } else {
    const int64_t page = width * kPageSlots;
    float *const keys = memory, *const values = keys + blocks_of(row.slots, kPageSlots) * page;
    for (int64_t i = 0; i < n; i++) {
      const int64_t slot = list[i] * block, to = i * block;
      const int64_t from = (table ? table[slot / kPageSlots] : slot / kPageSlots) * a.page_step + kv_head * a.head_step;
      const float* const k = a.k_pages + from + slot % kPageSlots;
      float* const out = keys + to / kPageSlots * page + to % kPageSlots;
      for (int64_t d = 0; d < width; d++) std::memcpy(out + d * kPageSlots, k + d * kPageSlots, 4 * sizeof(float));
      std::memcpy(values + to * width, a.v_pages + from + slot % kPageSlots * width,
                  static_cast<size_t>(4 * width) * sizeof(float));
    }
    listed.k_pages = keys, listed.v_pages = values, listed.page_table = nullptr;
    listed.head_step = 0, listed.page_step = page;
  }
  cpu_kernels().attn_paged(listed, row, kv_head, scratch);
}

void kv_block_summary(const KvBlockSummary& a, Stream) {
  constexpr const char* op = "kv_block_summary";
  expect_block(op, a.block);
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1], width = a.k_pages.shape[2];
  const int64_t rows = kPageSlots / a.block * summary_rows(a.kind);
  float* const summary = dense(op, "summary", a.summary, {pages, kv_heads, rows, width});
  const float* const k_pages = dense(op, "k_pages", a.k_pages, {pages, kv_heads, width, kPageSlots});
  const int64_t head_step = width * kPageSlots;
  const PagedRow* const list = paged_rows(op, a.queries, INT32_MAX, a.page_table, pages);
  const int32_t* const table = static_cast<const int32_t*>(a.page_table.data);
  struct Page {
    int32_t page, slots;
  };
  std::vector<Page> work;
  for (int64_t e = 0; e < a.queries.shape[0]; e++) {
    const PagedRow& q = list[e];
    for (int32_t p = (q.slots - q.rows) / kPageSlots; q.rows && p * kPageSlots < q.slots; p++)
      work.push_back({table[q.table_row * a.page_table.stride[0] + p], std::min(q.slots - p * kPageSlots, kPageSlots)});
  }
  const Kernels& k = cpu_kernels();
  parallel(static_cast<int64_t>(work.size()), 2.0 * static_cast<double>(kv_heads * width) + 5, [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const Page& page = work[static_cast<size_t>(i)];
      for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t at = page.page * kv_heads + h;
        k.block_summary(summary + at * rows * width, k_pages + at * head_step, width, page.slots, a.block, a.kind);
      }
    }
  });
}

namespace {

// Scores as integers in the same order; -0 is +0.
int32_t ordered(float score) {
  const int32_t bits = std::bit_cast<int32_t>(score + 0.0f);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

// A number that n of the keys reach, or more where the last of them have equals: then it is theirs.  By halving: the
// compiler counts in vectors, which a partial sort, with a branch for every key, does not come near.
int32_t least_of_best(const std::vector<int32_t>& keys, int64_t n) {
  int64_t low = INT32_MIN, high = INT32_MAX;  // n keys reach low; high + 1 is reached by fewer
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    const auto bound = static_cast<int32_t>(middle);
    int32_t reached = 0;
    for (const int32_t key : keys) reached += key >= bound;
    if (reached == n) return bound;
    (reached > n ? low : high) = reached > n ? middle : middle - 1;
  }
  return static_cast<int32_t>(low);
}

// The n best of the m blocks from `first` on, ascending; behind them.
int32_t* take_best(int32_t* out, int64_t n, int32_t first, const float* score, int64_t m) {
  if (n == 0) return out;
  thread_local std::vector<int32_t> keys;
  keys.resize(static_cast<size_t>(m));
  for (int64_t i = 0; i < m; i++) keys[static_cast<size_t>(i)] = ordered(score[i]);
  const int32_t least = least_of_best(keys, n);  // of those that score just this, the first ones are chosen
  int64_t ties = n - std::count_if(keys.begin(), keys.end(), [&](int32_t x) { return x > least; });
  for (int64_t i = 0; i < m; i++) {
    const int32_t x = keys[static_cast<size_t>(i)];
    if (x > least || (x == least && ties-- > 0)) *out++ = first + static_cast<int32_t>(i);
  }
  return out;
}

}  // namespace

void BlockChoice::expect_possible(const char* op, int64_t row, int64_t max_listed, int64_t max_scored) const {
  if (first < 0 || last < 1 || budget < first + last || budget > max_listed || scored() > max_scored) [[unlikely]]
    throw std::logic_error(cat("cpu: ", op, ": row ", row, " chooses ", budget, " of ", all, " blocks, ", first,
                               " first and ", last, " last ones always; there is room for ", max_listed, " blocks and ",
                               max_scored, " scores"));
}

void choose_blocks(int32_t* list, float* score, const BlockChoice& c, float* scratch) {
  const int32_t end = static_cast<int32_t>(c.all) - c.last;
  cpu_kernels().block_scores(score, c.blocks, c.first, c.scored(), scratch);
  for (int32_t b = 0; b < c.first; b++) *list++ = b;
  list = take_best(list, c.budget - c.first - c.last, c.first, score, c.scored());
  for (int32_t b = end; b < c.all; b++) *list++ = b;
}

void kv_block_select(const KvBlockSelect& a, Stream) {
  constexpr const char* op = "kv_block_select";
  expect_block(op, a.block);
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], width = a.q.shape[2], entries = a.queries.shape[0];
  const int64_t pages = a.summary.shape[0], kv_heads = a.summary.shape[1];
  if (kv_heads <= 0 || heads % kv_heads)
    throw std::logic_error(cat("cpu: ", op, ": ", heads, " query heads over ", kv_heads, " key heads"));
  const int64_t group = heads / kv_heads, rows_in_page = kPageSlots / a.block * summary_rows(a.kind);
  const float* const q = strided(op, "q", a.q, {rows, heads, width});
  const float* const summary = dense(op, "summary", a.summary, {pages, kv_heads, rows_in_page, width});
  const int64_t room = a.blocks.shape[2], score_room = a.score.shape[2];
  int32_t* const blocks = index(op, "blocks", a.blocks, {a.page_table.shape[0], kv_heads, room});
  float* const score = dense(op, "score", a.score, {entries, kv_heads, score_room});
  const int32_t* const budget = index(op, "budget", a.budget, {a.page_table.shape[0]});
  const PagedRow* const list = paged_rows(op, a.queries, rows, a.page_table, pages);
  const int32_t* const table = static_cast<const int32_t*>(a.page_table.data);
  const auto choice = [&](int64_t e, int64_t h) {
    const PagedRow& row = list[e];
    const int32_t* const of = table + row.table_row * a.page_table.stride[0];
    return BlockChoice{.blocks = {.q = q + row.row * a.q.stride[0] + h * group * width,
                                  .summary = summary + h * rows_in_page * width,
                                  .pages = of,
                                  .page_step = kv_heads * rows_in_page * width,
                                  .group = group,
                                  .width = width,
                                  .block = a.block,
                                  .kind = a.kind},
                       .all = blocks_of(row.slots, a.block),
                       .budget = budget[row.table_row],
                       .first = a.first_blocks,
                       .last = a.last_blocks};
  };
  std::vector<int64_t> chooses;
  for (int64_t e = 0; e < entries; e++) {
    if (list[e].rows != 1 || blocks_of(list[e].slots, a.block) <= budget[list[e].table_row]) continue;
    choice(e, 0).expect_possible(op, e, room, score_room);
    chooses.push_back(e);
  }
  const int64_t n = static_cast<int64_t>(chooses.size()) * kv_heads;
  if (n == 0) return;
  const double each = static_cast<double>(a.scored * kv_heads) / static_cast<double>(n);
  parallel(n, each * static_cast<double>(group * width) * 0.2 + 100, [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const int64_t e = chooses[static_cast<size_t>(i / kv_heads)], h = i % kv_heads;
      choose_blocks(blocks + (list[e].table_row * kv_heads + h) * room, score + (e * kv_heads + h) * score_room,
                    choice(e, h), scratch(width + 16));
    }
  });
}

}  // namespace pare::cpu
