// Summaries of blocks, and the choice of those that are read.

#include "ops/blocks.h"

#include "cases/layouts.h"

namespace pare::cases {

namespace {

const Dim kMean{"mean", 1, "1: blocks by their mean (block top-k), 0: by minimum and maximum (Quest)", 0};
const Dim kBudget{"budget", 32, "blocks that a row reads", 2};
BlockSummary kind(const Dims& d) { return d["mean"] ? BlockSummary::mean : BlockSummary::minmax; }
Shape summary(const Pages& p, const Dims& d) {
  return {p.count, d["K"], kPageSlots / d["block"] * summary_rows(kind(d)), d["D"]};
}
int64_t always(const Dims& d) { return d["first_blocks"] + d["last_blocks"]; }

Call kv_block_summary(Operands& o, const Dims& d) {
  const Sequences s(d, d["T"]);
  KvBlockSummary a{};
  a.summary = o.inout("summary", summary(s.pages, d));
  a.k_pages = o.in("k_pages", s.pages.k(d), s.pages.present());
  a.page_table = s.put_table(o, d);
  a.queries = s.put_queries(o);
  for (const PagedRow& e : s.list) a.pages += blocks_of(e.slots, kPageSlots) - (e.slots - e.rows) / kPageSlots;
  a.block = d.i32("block");
  a.kind = kind(d);
  return a;
}

// Only rows alone choose.
Call kv_block_select(Operands& o, const Dims& d) {
  const Sequences s(d, 1);
  const bool regular = s.budget.empty();
  std::vector<int32_t> budget = s.budget;
  if (regular) budget.assign(s.list.size(), d.i32("budget"));
  KvBlockSelect a{};
  int64_t most = 1;
  for (const PagedRow& e : s.list) {
    const int64_t all = blocks_of(e.slots, d["block"]), scored = all - always(d);
    most = std::max(most, regular ? scored : all + 1);
    if (e.rows == 1 && all > budget[e.table_row]) a.scored += scored;
  }
  const int64_t room = s.room(budget, d["block"]) + !regular;
  a.blocks = o.index_out("blocks", {s.count(), d["K"], room});
  a.score = o.stat_out("score", {s.count(), d["K"], most});
  a.q = o.in("q", {s.rows, d["H"], d["D"]}, d["gap"]);
  a.summary = o.in("summary", summary(s.pages, d));
  a.page_table = s.put_table(o, d);
  a.queries = s.put_queries(o);
  a.budget = o.index("budget", {s.count()}, budget);
  a.block = d.i32("block");
  a.first_blocks = d.i32("first_blocks");
  a.last_blocks = d.i32("last_blocks");
  a.kind = kind(d);
  return a;
}

Call attn_block_select(Operands& o, const Dims& d) {
  const Packed p(d);
  const int64_t S = std::ssize(p.segments), K = d["K"], D = d["D"], gap = d["gap"];
  const int64_t most = blocks_of(p.most_slots, d["block"]) + 1;
  AttnBlockSelect a{};
  a.blocks = o.index_out("blocks", {p.rows, K, p.room});
  a.summary = o.out("summary", {S, K, most * summary_rows(kind(d)), D});
  a.q = o.in("q", {p.rows, d["H"], D}, gap);
  a.k = o.in("k", {p.rows, K, D}, gap);
  a.pk = p.parent_rows ? o.in("pk", {p.parent_rows, K, D}, gap) : a.k;
  a.segments = p.put_segments(o);
  a.budget = p.put_budget(o);
  a.scored = p.chosen - p.choosers * always(d);
  a.slots = p.slots;
  a.block = d.i32("block");
  a.first_blocks = d.i32("first_blocks");
  a.last_blocks = d.i32("last_blocks");
  a.kind = kind(d);
  return a;
}

}  // namespace

std::vector<OpCase> block_cases() {
  const std::vector<std::string> kinds = {"mean=0", "mean=1"};
  const std::vector<Dim> summary = paged_dims() + std::vector{kBlock, kMean, kFirstBlocks, kLastBlocks};
  std::vector<Dim> select = summary + std::vector{kBudget};
  select.erase(select.begin() + 2);  // T
  const std::vector<Dim> packed = packed_dims() + std::vector{kBlock, kBudget, kMean, kFirstBlocks, kLastBlocks};
  return {{"kv_block_summary", summary, with(listed_sizes(), kinds), kv_block_summary},
          {"kv_block_select", select, with(listed_sizes(), kinds), kv_block_select},
          {"attn_block_select", packed, with(packed_sizes(true), kinds), attn_block_select}};
}

}  // namespace pare::cases
