// Rows of the op test: block-sparse reads, over pages and of packed segments.
#include "op_cases.h"
#include "paged_layout.h"

namespace pare::test {

namespace {

// Random lists of the blocks that rows read: list r has budget[r] of blocks_of(total[r], block) blocks, the last one
// among them; lists of rows that read everything are all -1.
std::vector<int32_t> random_lists(const std::vector<int64_t>& total, const std::vector<int32_t>& budget,
                                  int64_t kv_heads, int64_t room, int32_t block) {
  std::vector<int32_t> lists(total.size() * kv_heads * room, -1);
  for (size_t r = 0; r < total.size(); r++)
    for (int64_t h = 0; h < kv_heads; h++) {
      const int64_t all = blocks_of(total[r], block);
      if (all <= budget[r]) continue;
      const std::vector<double> score = normal(cat("list", r, "_", h), all - 1);
      std::vector<int32_t> list(all - 1);
      std::iota(list.begin(), list.end(), 0);
      std::sort(list.begin(), list.end(), [&](int32_t x, int32_t y) { return score[x] > score[y]; });
      list.resize(budget[r] - 1);
      list.push_back(static_cast<int32_t>(all - 1));
      std::sort(list.begin(), list.end());
      std::copy(list.begin(), list.end(), lists.begin() + (r * kv_heads + h) * room);
    }
  return lists;
}

// ---- over pages

struct Budgets {
  int32_t block, first, last;
  std::vector<int32_t> budget;  // per entry
};
struct PagedBlocks {
  Paged pages;
  Budgets b;
};
const std::vector<PagedBlocks> kPagedBlocks = {
    {{"quest", 2, 1, 8, {{1, 5}, {1, 77}, {1, 64}}, 0}, {4, 0, 1, {2, 7, 3}}},
    {{"decode", 6, 2, 20, {{1, 130}, {1, 17}, {1, 33}, {1, 256}, {3, 90}}, 7}, {16, 1, 2, {4, 4, 3, 9, 3}}},
    {{"small", 4, 4, 32, {{1, 66}, {1, 15}, {16, 16}, {1, 67}}, 5}, {4, 1, 1, {16, 2, 2, 9}}},
    {{"gqa7", 14, 2, 64, {{1, 1}, {1, 161}}, 0}, {16, 0, 1, {1, 1}}},
    {{"long", 4, 2, 32, {{1, 1044}, {270, 1030}, {1, 513}}, 0}, {4, 0, 1, {20, 20, 7}}},
};

// What is given for each entry, as lay_out() lays sequences out.
template <class T>
std::vector<T> by_table_row(const std::vector<T>& x) {
  return {x.rbegin(), x.rend()};
}

void add_paged(std::vector<OpCase>& cases, const PagedBlocks& c, BlockSummary kind) {
  const Paged& s = c.pages;
  const Budgets& b = c.b;
  const Pages p = lay_out(s);
  const int64_t n = static_cast<int64_t>(s.sequences.size()), rows = 16 / b.block * summary_rows(kind);
  const std::string shape = cat(s.name, kind == BlockSummary::mean ? "_mean" : "_minmax", "_b", b.block, "_H", s.heads,
                                "_K", s.kv_heads, "_D", s.dim);
  const Shape summary{p.count, s.kv_heads, rows, s.dim};
  int64_t refreshed = 0, scored = 0, room = 0, all = 0;
  for (int64_t e = 0; e < n; e++) {
    const auto [count, slots] = s.sequences[e];
    refreshed += blocks_of(slots, 16) - (slots - count) / 16;
    room = std::max<int64_t>(room, b.budget[e] + 1), all = std::max<int64_t>(all, blocks_of(slots, b.block) + 1);
    if (count == 1 && blocks_of(slots, b.block) > b.budget[e]) scored += blocks_of(slots, b.block) - b.first - b.last;
  }
  cases.push_back({"kv_block_summary", shape, [=](OpRun& r) {
                     KvBlockSummary a{};
                     a.summary = r.inout("summary", summary);
                     a.k_pages = r.in("k_pages", {p.count, s.kv_heads, s.dim, 16}, fill_pages(s, p).k);
                     a.page_table = r.index("page_table", {n, p.per_sequence}, p.table, s.gap);
                     a.queries = r.index("queries", {n, 4}, p.queries);
                     a.pages = refreshed, a.block = b.block, a.kind = kind;
                     r.call(&Table::kv_block_summary, a);
                     r.bound("summary", kind == BlockSummary::minmax ? 0 : chain(16) * 5);
                   }});
  cases.push_back({"kv_block_select", shape, [=](OpRun& r) {
                     KvBlockSelect a{};
                     a.blocks = r.index_out("blocks", {n, s.kv_heads, room});
                     a.score = r.out("score", {n, s.kv_heads, all});
                     a.q = r.in("q", {p.rows, s.heads, s.dim}, s.gap);
                     a.summary = r.in("summary", summary);
                     a.page_table = r.index("page_table", {n, p.per_sequence}, p.table, s.gap);
                     a.queries = r.index("queries", {n, 4}, p.queries);
                     a.budget = r.index("budget", {n}, by_table_row(b.budget));
                     a.scored = scored, a.block = b.block, a.first_blocks = b.first, a.last_blocks = b.last;
                     a.kind = kind;
                     r.call(&Table::kv_block_select, a);
                     r.bound("score", lanes(s.dim) * 2 * static_cast<double>(s.dim));
                   }});
}

void add_attention(std::vector<OpCase>& cases, const PagedBlocks& c) {
  const Paged& s = c.pages;
  const Budgets& b = c.b;
  const Pages p = lay_out(s);
  const int64_t n = static_cast<int64_t>(s.sequences.size());
  std::vector<int64_t> total;
  int64_t pairs = 0, slots = 0, room = 0;
  for (int64_t e = 0; e < n; e++) {
    const int64_t rows = s.sequences[e].first, all = s.sequences[e].second;
    total.push_back(rows == 1 ? all : 0);
    const int64_t read = rows == 1 ? listed_slots(all, b.budget[e], b.block) : all;
    pairs += rows == 1 ? read : rows * (all - rows) + rows * (rows + 1) / 2;
    slots += read, room = std::max<int64_t>(room, b.budget[e]);
  }
  const std::vector<int32_t> budgets = by_table_row(b.budget),
                             lists = random_lists(by_table_row(total), budgets, s.kv_heads, room, b.block);
  cases.push_back(
      {"attn_paged", cat("lists_", s.name, "_b", b.block, "_H", s.heads, "_K", s.kv_heads, "_D", s.dim), [=](OpRun& r) {
         const auto [k, v] = fill_pages(s, p);
         AttnPaged a{};
         a.o = r.out("o", {p.rows, s.heads, s.dim}), a.q = r.in("q", {p.rows, s.heads, s.dim}, s.gap);
         a.k_pages = r.in("k_pages", {p.count, s.kv_heads, s.dim, 16}, k);
         a.v_pages = r.in("v_pages", {p.count, s.kv_heads, 16, s.dim}, v);
         a.page_table = r.index("page_table", {n, p.per_sequence}, p.table, s.gap);
         a.queries = r.index("queries", {n, 4}, p.queries);
         a.blocks = r.index("blocks", {n, s.kv_heads, room}, lists);
         a.budget = r.index("budget", {n}, budgets);
         a.block = b.block, a.pairs = pairs, a.slots = slots;
         a.scale = static_cast<float>(1 / std::sqrt(double(s.dim)));
         r.call(&Table::attn_paged, a);
         r.bound("o", softmax_error(s.dim, p.slots) * 5);  // |v| < 5
       }});
}

// ---- packed segments

struct PackedBlocks {
  std::string name;
  int64_t rows, heads, kv_heads, dim;
  std::vector<SegmentRow> segments;
  int64_t parent_rows;  // 0: parents lie among the rows themselves
  int64_t gap;
  int32_t block, first, last;
  std::vector<int32_t> budget;  // of the rows of each segment; their first third reads everything
};
const std::vector<PackedBlocks> kPackedBlocks = {
    {"one", 30, 2, 1, 8, {{0, 30, 0, 0}}, 0, 0, 4, 1, 1, {3}},
    {"group",
     62,
     4,
     2,
     20,
     {{19, 13, 0, 19}, {32, 1, 0, 19}, {33, 29, 0, 19}, {0, 19, 0, 0}},
     0,
     3,
     4,
     0,
     2,
     {4, 2, 5, 99}},
    {"pages", 150, 6, 2, 32, {{70, 80, 0, 69}, {0, 70, 0, 0}}, 0, 0, 16, 1, 1, {3, 2}},
    {"other_batch", 31, 7, 1, 64, {{0, 11, 3, 137}, {12, 19, 0, 65}}, 141, 5, 16, 0, 1, {4, 2}},
    {"other_batch4", 41, 3, 3, 64, {{0, 11, 3, 37}, {12, 29, 0, 5}}, 41, 9, 4, 1, 1, {7, 5}},
    {"long", 33, 2, 1, 20, {{0, 17, 2, 765}, {17, 15, 0, 1020}}, 1024, 3, 4, 1, 1, {9, 12}},
};
std::string name(const PackedBlocks& s) {
  return cat(s.name, "_b", s.block, "_N", s.rows, "_H", s.heads, "_K", s.kv_heads, "_D", s.dim);
}

// What the rows see: their slots (0 for rows of no segment) and budgets, and the sums over them.
struct Rows {
  std::vector<int64_t> total;
  std::vector<int32_t> budget;
  int64_t pairs = 0, scored = 0, slots = 0, room = 0, blocks = 0;
};
Rows rows_of(const PackedBlocks& s) {
  Rows r;
  r.total.resize(s.rows), r.budget.assign(s.rows, 0);
  for (size_t i = 0; i < s.segments.size(); i++) {
    const SegmentRow& g = s.segments[i];
    r.slots += g.parent_len + g.len, r.room = std::max<int64_t>(r.room, s.budget[i]);
    r.blocks = std::max<int64_t>(r.blocks, (g.parent_len + g.len) / s.block + 1);
    for (int32_t j = 0; j < g.len; j++) {
      const int64_t total = r.total[g.row + j] = g.parent_len + j + 1;
      const int32_t budget = r.budget[g.row + j] = j < g.len / 3 ? INT32_MAX : s.budget[i];
      r.pairs += listed_slots(total, budget, s.block);
      if (blocks_of(total, s.block) > budget) r.scored += blocks_of(total, s.block) - s.first - s.last;
    }
  }
  return r;
}
std::vector<int32_t> flat(const std::vector<SegmentRow>& segments) {
  std::vector<int32_t> v;
  for (const SegmentRow& g : segments) v.insert(v.end(), {g.row, g.len, g.parent_row, g.parent_len});
  return v;
}

template <class Args>
void set_inputs(OpRun& r, const PackedBlocks& s, const Rows& rows, Args& a) {
  a.q = r.in("q", {s.rows, s.heads, s.dim}, s.gap);
  a.k = r.in("k", {s.rows, s.kv_heads, s.dim}, s.gap), a.v = r.in("v", {s.rows, s.kv_heads, s.dim}, s.gap);
  a.pk = s.parent_rows ? r.in("pk", {s.parent_rows, s.kv_heads, s.dim}, s.gap) : a.k;
  a.pv = s.parent_rows ? r.in("pv", {s.parent_rows, s.kv_heads, s.dim}, s.gap) : a.v;
  a.segments = r.index("segments", {int64_t(s.segments.size()), 4}, flat(s.segments));
  a.pairs = rows.pairs, a.scale = static_cast<float>(1 / std::sqrt(double(s.dim)));
}
template <class Args>
void set_lists(OpRun& r, const PackedBlocks& s, const Rows& rows, Args& a) {
  a.blocks = r.index("blocks", {s.rows, s.kv_heads, rows.room},
                     random_lists(rows.total, rows.budget, s.kv_heads, rows.room, s.block));
  a.budget = r.index("budget", {s.rows}, rows.budget), a.block = s.block;
}

void attn_block_select(OpRun& r, const PackedBlocks& s, BlockSummary kind) {
  const Rows rows = rows_of(s);
  AttnBlockSelect a{};
  const int64_t n = static_cast<int64_t>(s.segments.size());
  a.blocks = r.index_out("blocks", {s.rows, s.kv_heads, rows.room});
  a.summary = r.out("summary", {n, s.kv_heads, rows.blocks * summary_rows(kind), s.dim});
  a.q = r.in("q", {s.rows, s.heads, s.dim}, s.gap), a.k = r.in("k", {s.rows, s.kv_heads, s.dim}, s.gap);
  a.pk = s.parent_rows ? r.in("pk", {s.parent_rows, s.kv_heads, s.dim}, s.gap) : a.k;
  a.segments = r.index("segments", {n, 4}, flat(s.segments));
  a.budget = r.index("budget", {s.rows}, rows.budget);
  a.scored = rows.scored, a.slots = rows.slots, a.block = s.block, a.first_blocks = s.first, a.last_blocks = s.last;
  a.kind = kind;
  r.call(&Table::attn_block_select, a);
  r.bound("summary", kind == BlockSummary::minmax ? 0 : chain(16) * 5);
}

void listed_attn_fwd(OpRun& r, const PackedBlocks& s) {
  const Rows rows = rows_of(s);
  AttnFwd a{};
  set_inputs(r, s, rows, a), set_lists(r, s, rows, a);
  a.o = r.out("o", {s.rows, s.heads, s.dim}), a.lse = r.out("lse", {s.rows, s.heads});
  r.call(&Table::attn_fwd, a);
  r.bound("o", softmax_error(s.dim, s.rows + s.parent_rows) * r.max_abs("v"));
  r.bound("lse", softmax_error(s.dim, s.rows + s.parent_rows) + 4 * kRound * 16);
}

void listed_attn_bwd(OpRun& r, const PackedBlocks& s) {
  OpRun forward(table_ref, DType::f64);
  listed_attn_fwd(forward, s);
  const Rows rows = rows_of(s);
  AttnBwd a{};
  set_inputs(r, s, rows, a), set_lists(r, s, rows, a);
  a.o = r.in("o", {s.rows, s.heads, s.dim}, rounded_to_f32(forward.values("o")));
  a.lse = r.in("lse", {s.rows, s.heads}, rounded_to_f32(forward.values("lse")));
  a.d_o = r.in("d_o", {s.rows, s.heads, s.dim}, s.gap);
  a.dq = r.out("dq", {s.rows, s.heads, s.dim}, s.gap);
  a.dk = r.inout("dk", {s.rows, s.kv_heads, s.dim}, s.gap), a.dv = r.inout("dv", {s.rows, s.kv_heads, s.dim}, s.gap);
  a.dpk = s.parent_rows ? r.inout("dpk", {s.parent_rows, s.kv_heads, s.dim}, s.gap) : a.dk;
  a.dpv = s.parent_rows ? r.inout("dpv", {s.parent_rows, s.kv_heads, s.dim}, s.gap) : a.dv;
  r.call(&Table::attn_bwd, a);
  for (const char* out : {"dq", "dk", "dv", "dpk", "dpv"})
    if (s.parent_rows || out[1] != 'p')
      r.bound(out, 4 * softmax_error(s.dim, s.rows + s.parent_rows) * (1 + r.max_abs(out)));
}

}  // namespace

void add_block_cases(std::vector<OpCase>& cases) {
  for (const PagedBlocks& c : kPagedBlocks) {
    for (BlockSummary kind : {BlockSummary::minmax, BlockSummary::mean}) add_paged(cases, c, kind);
    add_attention(cases, c);
  }
  for (const PackedBlocks& s : kPackedBlocks) {
    cases.push_back(
        {"attn_block_select", "minmax_" + name(s), [s](OpRun& r) { attn_block_select(r, s, BlockSummary::minmax); }});
    cases.push_back(
        {"attn_block_select", "mean_" + name(s), [s](OpRun& r) { attn_block_select(r, s, BlockSummary::mean); }});
    cases.push_back({"attn_fwd", "blocks_" + name(s), [s](OpRun& r) { listed_attn_fwd(r, s); }});
    cases.push_back({"attn_bwd", "blocks_" + name(s), [s](OpRun& r) { listed_attn_bwd(r, s); }});
  }
}

}  // namespace pare::test
