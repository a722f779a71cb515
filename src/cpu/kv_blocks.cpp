// Block-sparse reads: summaries, the choice of blocks, and what attention over pages needs to read listed ones.
#include <cstring>
#include <vector>

#include "cpu/paged.h"

namespace pare::cpu {

namespace {

void expect_block(const char* op, int32_t block) {
  if (block != 4 && block != 16)
    throw std::logic_error(cat("cpu: ", op, ": blocks of ", block, " slots; expected 4 or 16"));
}

}  // namespace

BlockLists::BlockLists(const char* op, const AttnPaged& a) : op_(op) {
  if (!a.blocks) return;
  kv_heads_ = a.k_pages.shape[1], room_ = a.blocks.shape[2], block_ = a.block;
  expect_block(op, block_);
  blocks_ = index(op, "blocks", a.blocks, {a.queries.shape[0], kv_heads_, room_});
  budget_ = index(op, "budget", a.budget, {a.queries.shape[0]});
}

std::pair<PagedArgs, PagedRow> BlockLists::gather(const PagedArgs& a, const PagedRow& q, int64_t entry, int64_t kv_head,
                                                  float* scratch) const {
  const int64_t n = budget_[entry], last = blocks_of(q.slots, block_) - 1;
  const int32_t* const list = blocks_ + (entry * kv_heads_ + kv_head) * room_;
  for (int64_t i = 0; i < n; i++)
    if (n > room_ || list[i] <= (i ? list[i - 1] : -1) || (i + 1 < n ? list[i] >= last : list[i] != last)) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op_, ": entry ", entry, ", key head ", kv_head, " lists block ", list[i],
                                 " at ", i, " of ", n, " (room for ", room_, "); expected ascending blocks, the last ",
                                 last));
  const int32_t* const table = a.page_table + q.table_row * a.table_stride;
  PagedArgs listed = a;
  PagedRow row = q;
  row.slots = static_cast<int32_t>(slots(q, entry)), row.table_row = 0;
  if (block_ == kPageSlots) {
    int32_t* const pages = reinterpret_cast<int32_t*>(scratch);
    for (int64_t i = 0; i < n; i++) pages[i] = table[list[i]];
    listed.page_table = pages;
    return {listed, row};
  }
  const int64_t width = a.width, page = width * kPageSlots, panels = blocks_of(row.slots, kPageSlots);
  float *const keys = scratch, *const values = keys + panels * page;
  for (int64_t i = 0; i < n; i++) {
    const int64_t slot = int64_t{list[i]} * block_, to = i * block_;
    const int64_t from = table[slot / kPageSlots] * a.page_step + kv_head * a.head_step;
    const float* const k = a.k_pages + from + slot % kPageSlots;
    float* const out = keys + to / kPageSlots * page + to % kPageSlots;
    for (int64_t d = 0; d < width; d++) std::memcpy(out + d * kPageSlots, k + d * kPageSlots, 4 * sizeof(float));
    std::memcpy(values + to * width, a.v_pages + from + slot % kPageSlots * width,
                static_cast<size_t>(4 * width) * sizeof(float));
  }
  listed.k_pages = keys, listed.v_pages = values, listed.page_table = nullptr;
  listed.head_step = 0, listed.page_step = page;
  return {listed, row};
}

void kv_block_summary(const KvBlockSummary& a, Stream) {
  constexpr const char* op = "kv_block_summary";
  expect_block(op, a.block);
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1], width = a.k_pages.shape[2];
  const int64_t rows = kPageSlots / a.block * summary_rows(a.kind);
  float* const summary = dense(op, "summary", a.summary, {pages, kv_heads, rows, width});
  const float* const k_pages = dense(op, "k_pages", a.k_pages, {pages, kv_heads, width, kPageSlots});
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
  parallel(static_cast<int64_t>(work.size()), 2.0 * static_cast<double>(kv_heads * width) + 5, [&](Range range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const Page& page = work[static_cast<size_t>(i)];
      for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t at = page.page * kv_heads + h;
        k.block_summary(summary + at * rows * width, k_pages + at * width * kPageSlots, width, page.slots, a.block,
                        a.kind);
      }
    }
  });
}

namespace {

// The numbers of the `n` best of the blocks [begin, end): by score, then the smaller block; ascending.
void best_blocks(int32_t* out, int64_t n, const float* score, Range blocks) {
  thread_local std::vector<uint64_t> keys;  // smaller is better
  keys.clear();
  for (int64_t b = blocks.begin; b < blocks.end; b++) {
    const float x = score[b] + 0.0f;  // no -0
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    keys.push_back(uint64_t{~ascending} << 32 | static_cast<uint64_t>(b));
  }
  if (n < static_cast<int64_t>(keys.size())) std::nth_element(keys.begin(), keys.begin() + n, keys.end());
  for (int64_t i = 0; i < n; i++) out[i] = static_cast<int32_t>(keys[static_cast<size_t>(i)]);
  std::sort(out, out + n);
}

}  // namespace

void kv_block_select(const KvBlockSelect& a, Stream) {
  constexpr const char* op = "kv_block_select";
  expect_block(op, a.block);
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], width = a.q.shape[2], entries = a.queries.shape[0];
  const int64_t pages = a.summary.shape[0], kv_heads = a.summary.shape[1];
  if (kv_heads <= 0 || heads % kv_heads)
    throw std::logic_error(cat("cpu: ", op, ": ", heads, " query heads over ", kv_heads, " key heads"));
  const int64_t page = kPageSlots / a.block * summary_rows(a.kind) * width, group = heads / kv_heads;
  const float* const q = strided(op, "q", a.q, {rows, heads, width});
  const float* const summary = dense(op, "summary", a.summary, {pages, kv_heads, page / width, width});
  const int64_t room = a.blocks.shape[2], score_room = a.score.shape[2];
  int32_t* const blocks = index(op, "blocks", a.blocks, {entries, kv_heads, room});
  float* const score = dense(op, "score", a.score, {entries, kv_heads, score_room});
  const int32_t* const budget = index(op, "budget", a.budget, {entries});
  const PagedRow* const list = paged_rows(op, a.queries, rows, a.page_table, pages);
  const int32_t* const table = static_cast<const int32_t*>(a.page_table.data);
  std::vector<int64_t> chooses;
  for (int64_t e = 0; e < entries; e++) {
    const int64_t all = blocks_of(list[e].slots, a.block);
    if (list[e].rows != 1 || all <= budget[e]) continue;
    if (a.first_blocks < 0 || a.last_blocks < 1 || budget[e] < a.first_blocks + a.last_blocks || budget[e] > room ||
        all > score_room) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op, ": entry ", e, " chooses ", budget[e], " of ", all, " blocks, ",
                                 a.first_blocks, " first and ", a.last_blocks, " last ones always; blocks is ",
                                 a.blocks.str(), ", score ", a.score.str()));
    chooses.push_back(e);
  }
  const int64_t n = static_cast<int64_t>(chooses.size()) * kv_heads;
  if (n == 0) return;
  const Kernels& k = cpu_kernels();
  const double each = static_cast<double>(a.scored * kv_heads) / static_cast<double>(n);
  parallel(n, each * static_cast<double>(group * width) * 0.2 + 100, [&](Range range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const int64_t e = chooses[static_cast<size_t>(i / kv_heads)], h = i % kv_heads;
      const PagedRow& row = list[e];
      const int64_t all = blocks_of(row.slots, a.block), at = e * kv_heads + h;
      const BlockScoreArgs args{.q = q + row.row * a.q.stride[0] + h * group * width,
                                .summary = summary + h * page,
                                .pages = table + row.table_row * a.page_table.stride[0],
                                .page_step = kv_heads * page,
                                .group = group,
                                .width = width,
                                .block = a.block,
                                .kind = a.kind};
      const Range between{a.first_blocks, all - a.last_blocks};
      k.block_scores(score + at * score_room, args, between, scratch(width + 16));
      int32_t* out = blocks + at * room;
      for (int32_t b = 0; b < a.first_blocks; b++) *out++ = b;
      const int64_t chosen = budget[e] - a.first_blocks - a.last_blocks;
      best_blocks(out, chosen, score + at * score_room, between);
      out += chosen;
      for (int64_t b = between.end; b < all; b++) *out++ = static_cast<int32_t>(b);
    }
  });
}

}  // namespace pare::cpu
