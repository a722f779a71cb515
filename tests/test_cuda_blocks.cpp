// CUDA kernels of block-sparse reads in bf16: ties, contexts of 32k tokens, and that a packed row chooses what the
// decode step chose.  (test_ops.cpp compares them in f32 with the bits of the `cpu` table.)
#include "kernel_call.h"
#include "ops/attention.h"
#include "ops/blocks.h"
#include "ops/rope.h"

namespace pare::test {
namespace {

using namespace kernel;

// Whole numbers from -limit to limit: with these all sums are exact, in every type, and many scores are equal.
void make_whole(Buffer& b, const std::string& name, uint32_t limit) {
  Rng rng(rng_key(2, RngStream::test, 0), std::hash<std::string>{}(name));
  for (int64_t i = 0; i < b.size(); i++) b.set(i, static_cast<double>(rng.below(2 * limit + 1)) - limit);
}

TEST(CudaBlocks, TiesAreChosenAsRefDoes) {
  for (BlockSummary kind : {BlockSummary::minmax, BlockSummary::mean})
    for (int32_t block : {4, 16}) {
      const int64_t d = block == 4 ? 20 : 32, pages = 31, rows = 16 / block * summary_rows(kind);
      const std::vector<int32_t> queries{0, 1, 240, 1, 1, 2, 38, 0, 3, 1, 161, 2}, budget{2, 7, 5};
      std::vector<int32_t> table(45, -1);
      for (int32_t i = 0; i < 15; i++) table[15 + i] = 2 * i;
      for (int32_t i = 0; i < 11; i++) table[30 + i] = 2 * i + 1;
      table[0] = 25;
      table[1] = 30;
      table[2] = 27;
      int64_t scored = 0;
      for (size_t e : {0, 2}) scored += blocks_of(queries[e * 4 + 2], block) - 3;
      check(
          [&](Call& t) {
            const Tensor k = t.act("k_pages", {pages, 2, d, 16}), q = t.act("q", {4, 4, d}, 3);
            make_whole(t["k_pages"], "k", 1);
            make_whole(t["q"], "q", 1);
            const Tensor page_table = t.index("table", {3, 15}, table), entries = t.index("queries", {3, 4}, queries);
            const Tensor summary = t.act_out("summary", {pages, 2, rows, d});
            t.table.kv_block_summary(
                {.summary = summary,
                 .k_pages = k,
                 .page_table = page_table,
                 .queries = t.index("written", {3, 4}, {0, 240, 240, 1, 240, 2, 38, 0, 242, 161, 161, 2}),
                 .pages = 27,
                 .block = block,
                 .kind = kind},
                {});
            t.table.kv_block_select({.blocks = t.index("blocks", {3, 2, 9}, {}),
                                     .score = t.stat_out("score", {3, 2, 60}),
                                     .q = q,
                                     .summary = summary,
                                     .page_table = page_table,
                                     .queries = entries,
                                     .budget = t.index("budget", {3}, budget),
                                     .scored = scored,
                                     .block = block,
                                     .first_blocks = 1,
                                     .last_blocks = 2,
                                     .kind = kind},
                                    {});
          },
          0, block == 4);
    }
}

// 32k tokens and a few; scores in a narrow range, so that digits of all sizes decide.
TEST(CudaBlocks, LongContexts) {
  for (const char* block : {"4", "16"}) {
    std::vector<std::string> lists;
    for (const Table* which : {&table_cpu, &table_kernels}) {
      Call t(*which, DType::f32);
      const auto a = arguments<KvBlockSelect>(
          t, "kv_block_select", cat("B=1,L=32789,H=1,K=1,D=8,mean=1,budget=997,first_blocks=0,block=", block));
      for (int64_t i = 0; i < a.summary.size(); i++)
        t["summary"].set(i, 1 + std::round(t["summary"].get(i) * 64) * 0x1p-16);
      t.table.kv_block_select(a, {});
      lists.push_back(t["blocks"].bits());
    }
    EXPECT_EQ(lists[0], lists[1]);
  }
}

// The summaries, scores and lists of a decode step and of the same row in a packed sequence.
TEST(CudaBlocks, PackedRowsChooseWhatDecodeChose) {
  for (BlockSummary kind : {BlockSummary::minmax, BlockSummary::mean})
    for (const int32_t block : {4, 16}) {
      const int32_t length = 150, parent = 37;
      const int64_t heads = 6, kv_heads = 2, d = 24, pages = 10;
      const int32_t budget = block == 4 ? 9 : 4, height = static_cast<int32_t>(summary_rows(kind));
      const int64_t all = length / block + 1;
      int64_t scored = 0;
      for (int32_t i = parent; i < length; i++) {
        const int64_t n = blocks_of(i + 1, block);
        if (n > budget) scored += n - 2;
      }
      std::vector<int32_t> order;
      for (int32_t i = 0; i < pages; i++) order.push_back(static_cast<int32_t>((7 * i + 3) % pages));
      Call packed(table_kernels, DType::bf16);
      const Tensor q = packed.act("q", {length, heads, d}), k = packed.act("k", {length, kv_heads, d}, 8);
      packed.act("v", {length, kv_heads, d});
      std::vector<int32_t> budgets(length, budget);
      std::fill_n(budgets.begin(), parent, INT32_MAX);
      table_kernels.attn_block_select(
          {.blocks = packed.index("blocks", {length, kv_heads, budget}, {}),
           .summary = packed.act_out("summary", {1, kv_heads, all * height, d}),
           .q = q,
           .k = k,
           .pk = k,
           .segments = packed.index("segments", {1, 4}, {parent, length - parent, 0, parent}),
           .budget = packed.index("budget", {length}, budgets),
           .scored = scored,
           .slots = length,
           .block = block,
           .first_blocks = 1,
           .last_blocks = 1,
           .kind = kind},
          {});
      Call t(table_kernels, DType::bf16);
      const Tensor table = t.index("table", {1, pages}, order);
      const Tensor k_pages = t.act_out("k_pages", {pages, kv_heads, d, 16});
      const Tensor v_pages = t.act_out("v_pages", {pages, kv_heads, 16, d});
      const Tensor summary = t.act_out("summary", {pages, kv_heads, 16 / block * height, d});
      const Tensor lists = t.index("blocks", {1, kv_heads, budget}, {});
      for (int32_t i = 1; i <= length; i++) {  // row by row, with the learner's q, k and v
        const int32_t row = i - 1;
        const Tensor entry = t.index("queries", {1, 4}, {0, 1, i, 0});
        table_kernels.kv_write({k_pages, v_pages, k.rows(row, 1), packed["v"].tensor().rows(row, 1), table, entry}, {});
        table_kernels.kv_block_summary({.summary = summary,
                                        .k_pages = k_pages,
                                        .page_table = table,
                                        .queries = entry,
                                        .pages = 1,
                                        .block = block,
                                        .kind = kind},
                                       {});
        const int64_t n = blocks_of(i, block);
        if (row < parent || n <= budget || (row % 7 && i < length)) continue;
        table_kernels.kv_block_select({.blocks = lists,
                                       .score = t.stat_out("score", {1, kv_heads, n}),
                                       .q = q.rows(row, 1),
                                       .summary = summary,
                                       .page_table = table,
                                       .queries = entry,
                                       .budget = t.index("budget", {1}, {budget}),
                                       .scored = n - 2,
                                       .block = block,
                                       .first_blocks = 1,
                                       .last_blocks = 1,
                                       .kind = kind},
                                      {});
        const int64_t width = kv_heads * budget;
        EXPECT_EQ(t["blocks"].bits(), packed["blocks"].bits(row * width, i * width)) << "row " << row;
      }
    }
}

TEST(CudaBlocks, OverlapInBf16) {
  const std::string rest = ",R=3,temperature=80,lambda=150";
  check("overlap_probs", {"V=257,top_k=20" + rest});
  check("overlap_probs", {"V=17" + rest, "V=1021" + rest, "V=1500,top_k=64" + rest}, 0, false);
}

}  // namespace
}  // namespace pare::test
