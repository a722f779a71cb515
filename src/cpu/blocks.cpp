// Block-sparse reads: summaries of blocks, and the choice of blocks by them.
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "cpu/attention.h"
#include "cpu/paged.h"

namespace pare::cpu {

void kv_block_summary(const KvBlockSummary& a, Stream) {
  constexpr const char* op = "kv_block_summary";
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2];
  const int64_t rows = kPageSlots / a.block * summary_rows(a.kind);
  float* const summary = a.summary.as<float>();
  const float* const k_pages = a.k_pages.as<float>();
  const int64_t head_step = head_dim * kPageSlots;
  const PagedRow* const list = paged_rows(op, a.queries, INT32_MAX, a.page_table, pages);
  const int32_t* const table = a.page_table.as<int32_t>();
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
  parallel(static_cast<int64_t>(work.size()), 2.0 * static_cast<double>(kv_heads * head_dim) + 5, [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const Page& page = work[static_cast<size_t>(i)];
      for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t at = page.page * kv_heads + h;
        k.block_summary(summary + at * rows * head_dim, k_pages + at * head_step, head_dim, page.slots, a.block,
                        a.kind);
      }
    }
  });
}

namespace {

// How one key head of a row chooses `budget` of `all` blocks.
struct BlockChoice {
  BlockScoreArgs blocks;
  int64_t all, budget;
  int32_t first, last;  // first_blocks, last_blocks of the op
  int64_t scored() const { return all - first - last; }
  // An error if the op's operands and its rule cannot give that many; max_listed, max_scored: room of a list, of
  // scores.
  void expect_possible(const char* op, int64_t row, int64_t max_listed, int64_t max_scored) const;
};

void BlockChoice::expect_possible(const char* op, int64_t row, int64_t max_listed, int64_t max_scored) const {
  if (first < 0 || last < 1 || budget < first + last || budget > max_listed || scored() > max_scored) [[unlikely]]
    throw std::logic_error(cat("cpu: ", op, ": row ", row, " chooses ", budget, " of ", all, " blocks, ", first,
                               " first and ", last, " last ones always; there is room for ", max_listed, " blocks and ",
                               max_scored, " scores"));
}

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

// list [budget]; score [scored()], as the ops store it.  Scratch: head_dim + 16.
void choose_blocks(int32_t* list, float* score, const BlockChoice& c, float* scratch) {
  const int32_t end = static_cast<int32_t>(c.all) - c.last;
  cpu_kernels().block_scores(score, c.blocks, c.first, c.scored(), scratch);
  for (int32_t b = 0; b < c.first; b++) *list++ = b;
  list = take_best(list, c.budget - c.first - c.last, c.first, score, c.scored());
  for (int32_t b = end; b < c.all; b++) *list++ = b;
}

}  // namespace

void kv_block_select(const KvBlockSelect& a, Stream) {
  constexpr const char* op = "kv_block_select";
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], head_dim = a.q.shape[2], entries = a.queries.shape[0];
  const int64_t pages = a.summary.shape[0], kv_heads = a.summary.shape[1];
  const int64_t group = heads / kv_heads, rows_in_page = kPageSlots / a.block * summary_rows(a.kind);
  const float *const q = a.q.as<float>(), *const summary = a.summary.as<float>();
  const int64_t room = a.blocks.shape[2], score_room = a.score.shape[2];
  int32_t* const blocks = a.blocks.as<int32_t>();
  float* const score = a.score.as<float>();
  const int32_t* const budget = a.budget.as<int32_t>();
  const PagedRow* const list = paged_rows(op, a.queries, rows, a.page_table, pages);
  const int32_t* const table = a.page_table.as<int32_t>();
  const auto choice = [&](int64_t e, int64_t h) {
    const PagedRow& row = list[e];
    const int32_t* const of = table + row.table_row * a.page_table.stride[0];
    return BlockChoice{.blocks = {.q = q + row.row * a.q.stride[0] + h * group * head_dim,
                                  .summary = summary + h * rows_in_page * head_dim,
                                  .pages = of,
                                  .page_step = kv_heads * rows_in_page * head_dim,
                                  .group = group,
                                  .head_dim = head_dim,
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
  parallel(n, each * static_cast<double>(group * head_dim) * 0.2 + 100, [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const int64_t e = chooses[static_cast<size_t>(i / kv_heads)], h = i % kv_heads;
      choose_blocks(blocks + (list[e].table_row * kv_heads + h) * room, score + (e * kv_heads + h) * score_room,
                    choice(e, h), scratch(head_dim + 16));
    }
  });
}

void attn_block_select(const AttnBlockSelect& a, Stream) {
  constexpr const char* op = "attn_block_select";
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], head_dim = a.q.shape[2], kv_heads = a.k.shape[1];
  const int64_t count = a.segments.shape[0], room = a.blocks.shape[2], summary_room = a.summary.shape[2];
  AttnArgs keys{};
  keys.q = a.q.as<float>();
  keys.q_stride = a.q.stride[0];
  keys.k = a.k.as<float>();
  keys.k_stride = a.k.stride[0];
  keys.pk = a.pk.as<float>();
  keys.pk_stride = a.pk.stride[0];
  const int64_t group = heads / kv_heads;
  keys.heads = heads;
  keys.group = group;
  keys.head_dim = head_dim;
  float* const summary = a.summary.as<float>();
  int32_t* const blocks = a.blocks.as<int32_t>();
  const int32_t* const budget = a.budget.as<int32_t>();
  const SegmentRow* const s = segment_rows(op, a.segments, rows, a.pk.shape[0]);
  // Of own row r of segment i.
  const auto choice = [&](int64_t i, int64_t r, int64_t h) {
    const int64_t row = s[i].row + r, at = i * kv_heads + h;
    return BlockChoice{.blocks = {.q = keys.q + row * keys.q_stride + h * group * head_dim,
                                  .summary = summary + at * summary_room * head_dim,
                                  .pages = nullptr,
                                  .page_step = 0,
                                  .group = group,
                                  .head_dim = head_dim,
                                  .block = a.block,
                                  .kind = a.kind},
                       .all = blocks_of(s[i].parent_len + r + 1, a.block),
                       .budget = budget[row],
                       .first = a.first_blocks,
                       .last = a.last_blocks};
  };
  int64_t longest = 0, scores = 0;
  for (int64_t i = 0; i < count; i++) {
    longest = std::max<int64_t>(longest, s[i].parent_len + s[i].len);
    for (int64_t r = 0; r < s[i].len; r++) {
      const BlockChoice c = choice(i, r, 0);
      if (c.all <= c.budget) continue;
      c.expect_possible(op, s[i].row + r, room, INT64_MAX);
      scores = std::max(scores, c.scored());
    }
  }
  if (longest / a.block * summary_rows(a.kind) > summary_room)
    throw std::logic_error(cat("cpu: ", op, ": a segment of ", longest, " slots; summary is ", a.summary.str()));
  const Kernels& k = cpu_kernels();
  parallel(count * kv_heads, 0.3 * static_cast<double>(a.slots * head_dim) / static_cast<double>(count + 1) + 50,
           [&](Interval range) {
             for (int64_t i = range.begin; i < range.end; i++) {
               const SegmentRow& segment = s[i / kv_heads];
               const int64_t slots = segment.parent_len + segment.len;
               k.segment_summary(summary + i * summary_room * head_dim, keys, segment, i % kv_heads,
                                 {0, slots / a.block}, a.block, a.kind);
             }
           });
  const std::vector<AttnPiece> pieces = attn_pieces(s, count, kv_heads);
  const int64_t n = static_cast<int64_t>(pieces.size());
  if (n == 0) return;
  const double time = 0.2 * static_cast<double>(a.scored * heads * head_dim) / static_cast<double>(n);
  parallel(n, time + 50, [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const AttnPiece& p = pieces[static_cast<size_t>(i)];
      float* const memory = scratch(head_dim + 16 + scores + 16);
      for (int64_t r = p.rows.begin; r < p.rows.end; r++) {
        const BlockChoice c = choice(p.segment - s, r, p.kv_head);
        if (c.all <= c.budget) continue;
        choose_blocks(blocks + ((p.segment->row + r) * kv_heads + p.kv_head) * room, memory + head_dim + 16, c, memory);
      }
    }
  });
}

}  // namespace pare::cpu
