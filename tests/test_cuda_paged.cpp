// CUDA attention over pages has the bits of CUDA attention of packed sequences: rollout and learner read the same log-
// probs.  In both types, for any division of a sequence into passes, any pages, batches and groups.
#include <numeric>
#include <set>

#include "base/text.h"
#include "kernel_call.h"
#include "ops/attention.h"
#include "ops/decode_work.h"
#include "ops/paged.h"
#include "ops/rope.h"

namespace pare::test {
namespace {

using namespace kernel;

struct PagedShape {
  int64_t group, kv_heads, d, gap;
  int64_t heads() const { return group * kv_heads; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(d)); }
};

// Elements of rows [from, from + n) of one buffer to those of another from `to` on.
void copy_rows(const Buffer& source, int64_t from, Buffer& target, int64_t to, int64_t n) {
  const int64_t width = source.size() / source.tensor().shape[0];
  for (int64_t i = 0; i < n * width; i++) target.set(to * width + i, source.get(from * width + i));
}

// Whole sequences, and what attn_fwd makes of them.
class Learner {
 public:
  Learner(DType act, const PagedShape& s, std::vector<int32_t> lengths) : call_(table_kernels, act) {
    std::vector<int32_t> segments;
    int32_t n = 0;
    for (int32_t len : lengths) {
      first_.push_back(n);
      segments.insert(segments.end(), {n, len, 0, 0});
      n += len;
    }
    const Tensor k = call_.act("k", {n, s.kv_heads, s.d}), v = call_.act("v", {n, s.kv_heads, s.d});
    table_kernels.attn_fwd({call_.act_out("o", {n, s.heads(), s.d}), call_.stat_out("lse", {n, s.heads()}),
                            call_.act("q", {n, s.heads(), s.d}), k, v, k, v,
                            call_.index("segments", {static_cast<int64_t>(lengths.size()), 4}, segments), 1, s.scale()},
                           {});
  }
  const Buffer& operator[](const char* name) { return call_[name]; }
  int64_t first(size_t sequence) const { return first_[sequence]; }

 private:
  Call call_;
  std::vector<int64_t> first_;
};

// The same sequences in a cache that grows pass by pass.  Pages are handed out in a scattered order; slots that hold no
// token yet are NaN.
class Rollout {
 public:
  Rollout(DType act, const PagedShape& s, Learner& learner, size_t sequences, int64_t most)
      : s_(s), learner_(learner), call_(table_kernels, act), act_(act), per_sequence_((most + 15) / 16 + 1) {
    slots_.assign(sequences, 0);
    table_.assign(sequences * per_sequence_, -1);
    const int64_t pages = static_cast<int64_t>(table_.size()) + 3;
    k_pages_ = call_.act_out("k_pages", {pages, s.kv_heads, s.d, 16});
    v_pages_ = call_.act_out("v_pages", {pages, s.kv_heads, 16, s.d});
    for (int32_t p = 0; p < pages; p++) free_.push_back(p);
    Rng rng(rng_key(1, RngStream::test, 0), 5);
    for (size_t i = free_.size() - 1; i; i--) std::swap(free_[i], free_[rng.below(static_cast<uint32_t>(i + 1))]);
  }

  // rows[i] new rows of sequence i; their results are those of the learner.
  void pass(const std::vector<int32_t>& rows) {
    Call t(table_kernels, act_);
    std::vector<PagedRow> list;
    std::vector<int64_t> reads;
    int32_t n = 1;  // row 0 belongs to no sequence
    for (size_t i = rows.size(); i--;) {
      if (rows[i] == 0) continue;
      slots_[i] += rows[i];
      for (int64_t p = 0; p * 16 < slots_[i]; p++)
        if (int32_t& page = table_[i * per_sequence_ + p]; page < 0) {
          page = free_.back();
          free_.pop_back();
        }
      list.push_back({n, rows[i], slots_[i], static_cast<int32_t>(i)});
      reads.push_back(slots_[i]);
      n += rows[i];
    }
    const std::vector<int32_t> queries = cases::flat(list);
    const int64_t entries = std::ssize(list);
    const Tensor q = t.act("q", {n, s_.heads(), s_.d}, s_.gap), k = t.act("k", {n, s_.kv_heads, s_.d}, s_.gap);
    const Tensor v = t.act("v", {n, s_.kv_heads, s_.d}, s_.gap), o = t.act_out("o", {n, s_.heads(), s_.d});
    const Tensor table = t.index("table", {static_cast<int64_t>(rows.size()), per_sequence_}, table_);
    const Tensor entry = t.index("queries", {entries, 4}, queries);
    for (int64_t e = 0; e < entries; e++)
      for (const char* name : {"q", "k", "v"})
        copy_rows(learner_[name], from(queries, e), t[name], queries[e * 4], queries[e * 4 + 1]);
    table_kernels.kv_write({k_pages_, v_pages_, k, v, table, entry}, {});
    table_kernels.attn_paged({.o = o,
                              .q = q,
                              .k_pages = k_pages_,
                              .v_pages = v_pages_,
                              .page_table = table,
                              .queries = entry,
                              .pairs = 0,
                              .slots = 0,
                              .scale = s_.scale(),
                              .work = cases::put_work(t, "work", list, reads)},
                             {});
    const int64_t width = s_.heads() * s_.d;
    for (int64_t e = 0; e < entries; e++) {
      const int64_t row = queries[e * 4], count = queries[e * 4 + 1], first = from(queries, e);
      EXPECT_EQ(t["o"].bits(row * width, (row + count) * width),
                learner_["o"].bits(first * width, (first + count) * width))
          << "sequence " << queries[e * 4 + 3] << " of " << queries[e * 4 + 2] << " slots, " << count << " new, group "
          << s_.group << ", D " << s_.d;
    }
    EXPECT_TRUE(t["o"].zones_intact());
    EXPECT_EQ(t["o"].bits(0, width), std::string(width * dtype_size(act_), '\xff')) << "a row of no sequence";
  }

 private:
  int64_t from(const std::vector<int32_t>& queries, int64_t e) const {
    return learner_.first(queries[e * 4 + 3]) + queries[e * 4 + 2] - queries[e * 4 + 1];
  }
  PagedShape s_;
  Learner& learner_;
  Call call_;
  DType act_;
  int64_t per_sequence_;
  Tensor k_pages_, v_pages_;
  std::vector<int32_t> slots_, table_, free_;
};

TEST(CudaPaged, EveryPassHasTheBitsOfTheWholeSequence) {
  // Prefill whole and in pieces, decode, both at once; across blocks of 64 and tiles of 64 query rows.
  const std::vector<std::vector<int32_t>> passes = {{17, 0, 5}, {1, 30, 1}, {45, 1, 1}, {1, 33, 1},
                                                    {1, 1, 70}, {66, 1, 0}, {1, 1, 1}};
  std::vector<int32_t> lengths(3);
  for (const auto& rows : passes)
    for (size_t i = 0; i < 3; i++) lengths[i] += rows[i];
  for (DType act : {DType::bf16, DType::f32})
    for (const PagedShape& s : {PagedShape{1, 2, 32, 0},
                                {2, 1, 64, 8},
                                {3, 1, 80, 0},
                                {7, 1, 64, 3},
                                {8, 1, 128, 0},
                                {2, 1, 160, 0},
                                {2, 1, 20, 0}}) {
      if (act == DType::f32 && s.d != 20) continue;  // test_ops.cpp compares f32 with the `cpu` table
      Learner learner(act, s, lengths);
      Rollout rollout(act, s, learner, 3, 140);
      for (const auto& rows : passes) rollout.pass(rows);
    }
}

TEST(CudaPaged, OneRowAtATimeHasTheBitsOfTheWholeSequence) {
  const PagedShape s{3, 2, 32, 0};
  Learner learner(DType::bf16, s, {133});
  Rollout rollout(DType::bf16, s, learner, 1, 133);
  for (int i = 0; i < 133; i++) rollout.pass({1});
}

TEST(CudaPaged, BitsDoNotDependOnTheOrderOfThreads) {
  const PagedShape s{7, 1, 40, 0};
  in_all_orders([&] {
    Learner learner(DType::bf16, s, {80});
    Rollout rollout(DType::bf16, s, learner, 1, 80);
    for (int32_t rows : {13, 1, 65, 1}) rollout.pass({rows});
  });
}

// A row with a list has the bits that attn_fwd gives it with the same list.
TEST(CudaPaged, ListedBlocksHaveTheBitsOfTheLearner) {
  struct Case {
    PagedShape s;
    int32_t block, slots;
    std::vector<int32_t> list;  // of every key head h: shifted by h, but for the last block
  };
  for (const Case& c : {Case{{2, 2, 64, 0}, 16, 200, {0, 2, 3, 7, 9, 12}},
                        {{7, 1, 32, 0}, 16, 161, {10}},
                        {{3, 2, 80, 0}, 4, 130, {0, 1, 2, 3, 5, 6, 7, 9, 10, 14, 17, 18, 21, 22, 23, 26, 28, 30, 32}},
                        {{2, 1, 200, 0}, 4, 70, {0, 3, 4, 9, 17}},
                        {{1, 2, 24, 0}, 4, 67, {1, 8, 16}}})
    for (DType act : {DType::bf16, DType::f32}) {
      const PagedShape& s = c.s;
      const int64_t pages = c.slots / 16 + 1, budget = std::ssize(c.list);
      Call t(table_kernels, act);
      const Tensor q = t.act("q", {c.slots, s.heads(), s.d});
      const Tensor k = t.act("k", {c.slots, s.kv_heads, s.d}), v = t.act("v", {c.slots, s.kv_heads, s.d});
      std::vector<int32_t> table(pages), list;
      std::iota(table.rbegin(), table.rend(), 0);
      for (int32_t h = 0; h < s.kv_heads; h++)
        for (int32_t b : c.list) list.push_back(b == c.list.back() ? b : b + h);
      AttnPaged paged = InPages(t, k, v, table)
                            .read("o", q, {{c.slots - 1, 1, c.slots, 0}}, s.scale(),
                                  {listed_slots(c.slots, static_cast<int32_t>(budget), c.block)});
      paged.blocks = t.index("list", {1, s.kv_heads, budget}, list);
      paged.budget = t.index("budget", {1}, {static_cast<int32_t>(budget)});
      paged.block = c.block;
      table_kernels.attn_paged(paged, {});
      AttnFwd a{};
      a.o = t.act_out("o of rows", {c.slots, s.heads(), s.d});
      a.lse = t.stat_out("lse", {c.slots, s.heads()});
      a.q = q;
      a.k = a.pk = k;
      a.v = a.pv = v;
      a.pairs = 1;
      a.scale = s.scale();
      a.segments = t.index("segments", {1, 4}, {c.slots - 1, 1, 0, c.slots - 1});
      std::vector<int32_t> lists(c.slots * list.size(), -1), budgets(c.slots, static_cast<int32_t>(budget));
      std::copy(list.begin(), list.end(), lists.end() - std::ssize(list));
      a.blocks = t.index("lists", {c.slots, s.kv_heads, budget}, lists);
      a.budget = t.index("budgets", {c.slots}, budgets);
      a.block = c.block;
      table_kernels.attn_fwd(a, {});
      const int64_t width = s.heads() * s.d, last = (c.slots - 1) * width;
      EXPECT_EQ(t["o"].bits(last, last + width), t["o of rows"].bits(last, last + width))
          << "block " << c.block << ", " << c.slots << " slots, D " << s.d;
    }
}

// The lists of neighbouring rows: the same blocks, most of those of the row before, none of them.
enum class Overlap { all, some, none };
// For a row that sees `all` blocks; the last is its own.
std::vector<int32_t> neighbour_list(Overlap overlap, int64_t row, int64_t kv_head, int64_t budget, int64_t all) {
  std::set<int32_t> list = {static_cast<int32_t>(all - 1)};
  const int64_t first = overlap == Overlap::all ? 1 : overlap == Overlap::some ? row : row * (budget - 1);
  for (int64_t i = 0; std::ssize(list) < budget; i++)
    list.insert(static_cast<int32_t>((first + kv_head + i * (overlap == Overlap::some ? 3 : 1)) % (all - 1)));
  return {list.begin(), list.end()};
}

// Rows of one tile have the bits that each has in decoding, whatever its neighbours list, and however the rows are
// divided into segments.  Every fifth row reads everything; of every third one scores rise by more than 64.
TEST(CudaPaged, ListsOfNeighboursChangeNothing) {
  struct Case {
    PagedShape s;
    int32_t block, slots, rows, budget;
  };
  for (const Case& c :
       {Case{{6, 2, 128, 0}, 16, 403, 23, 5}, Case{{7, 1, 64, 0}, 4, 203, 21, 9}, Case{{1, 2, 64, 0}, 16, 389, 70, 4},
        Case{{2, 1, 200, 8}, 4, 130, 33, 6}, Case{{70, 1, 24, 0}, 4, 90, 4, 3}, Case{{3, 1, 20, 0}, 4, 4291, 11, 30}})
    for (Overlap overlap : {Overlap::all, Overlap::some, Overlap::none}) {
      const PagedShape& s = c.s;
      const int32_t first = c.slots - c.rows;
      const int64_t pages = c.slots / 16 + 1, width = s.heads() * s.d;
      Call t(table_kernels, DType::bf16);
      const Tensor q = t.act("q", {c.slots, s.heads(), s.d}, s.gap);
      for (int64_t i = 0; i < t["q"].size(); i++)
        if (i / (t["q"].size() / c.slots) % 3 == 0) t["q"].set(i, t["q"].get(i) * 64);
      const Tensor k = t.act("k", {c.slots, s.kv_heads, s.d}), v = t.act("v", {c.slots, s.kv_heads, s.d});
      const Tensor pk = t.act("pk", {first, s.kv_heads, s.d}), pv = t.act("pv", {first, s.kv_heads, s.d});
      copy_rows(t["k"], 0, t["pk"], 0, first);
      copy_rows(t["v"], 0, t["pv"], 0, first);
      std::vector<int32_t> table(pages), lists(c.slots * s.kv_heads * c.budget, -1), budgets(c.slots, c.budget);
      std::iota(table.rbegin(), table.rend(), 0);
      const InPages in_pages(t, k, v, table);
      std::string decoded;
      for (int32_t row = first; row < c.slots; row++) {
        if (row % 5 == 0) budgets[row] = INT32_MAX;
        std::vector<int32_t> list;
        for (int64_t h = 0; h < s.kv_heads; h++)
          for (int32_t b : neighbour_list(overlap, row, h, c.budget, blocks_of(row + 1, c.block))) list.push_back(b);
        std::copy(list.begin(), list.end(), lists.begin() + row * std::ssize(list));
        const std::string name = cat("row ", row);
        AttnPaged paged =
            in_pages.read(name, q, {{row, 1, row + 1, 0}}, s.scale(), {listed_slots(row + 1, budgets[row], c.block)});
        paged.blocks = t.index("list of " + name, {1, s.kv_heads, c.budget}, list);
        paged.budget = t.index("budget of " + name, {1}, {budgets[row]});
        paged.block = c.block;
        if (s.group <= 16) table_kernels.attn_paged(paged, {});
        decoded += t[name].bits(row * width, (row + 1) * width);
      }
      const Tensor all_lists = t.index("lists", {c.slots, s.kv_heads, c.budget}, lists);
      const Tensor all_budgets = t.index("budgets", {c.slots}, budgets);
      std::string alone, lse_alone;
      for (int32_t tile : {1, 5, 10, c.rows, 0}) {  // 0: behind a parent of another batch
        std::vector<int32_t> segments;
        for (int32_t i = first; i < c.slots; i += tile ? tile : c.rows)
          segments.insert(segments.end(), {i, std::min(tile ? tile : c.rows, c.slots - i), 0, i});
        const std::string name = cat("tiles of ", tile);
        AttnFwd a{};
        a.o = t.act_out(name, {c.slots, s.heads(), s.d});
        a.lse = t.stat_out(name + ", lse", {c.slots, s.heads()});
        a.q = q;
        a.k = k;
        a.v = v;
        a.pk = tile ? k : pk;
        a.pv = tile ? v : pv;
        a.pairs = 1;
        a.scale = s.scale();
        a.segments = t.index(name + ", segments", {std::ssize(segments) / 4, 4}, segments);
        a.blocks = all_lists;
        a.budget = all_budgets;
        a.block = c.block;
        table_kernels.attn_fwd(a, {});
        const std::string o = t[name].bits(first * width, c.slots * width);
        const std::string lse = t[name + ", lse"].bits(first * s.heads(), c.slots * s.heads());
        const std::string what = cat("group ", s.group, ", D ", s.d, ", ", c.block, " slots a block, overlap ",
                                     static_cast<int>(overlap), ", ", name);
        if (tile == 1) {
          alone = o;
          lse_alone = lse;
        }
        EXPECT_EQ(o, s.group <= 16 ? decoded : alone) << what;
        EXPECT_EQ(lse, lse_alone) << what;
      }
    }
}

// Around the ends of blocks of 128 slots and of cuts of 1024, rows alone, some together, and in the packed sequence.
TEST(CudaPaged, EndsOfBlocksAndCuts) {
  const PagedShape s{3, 2, 40, 0};
  for (int32_t border : {128, 1024, 2048}) {
    constexpr int32_t kRows = 4;  // that see border - 1 to border + 2 slots
    const int32_t n = border + 2, first = n - kRows, pages = n / 16 + 1;
    Call t(table_kernels, DType::bf16);
    const Tensor q = t.act("q", {n, s.heads(), s.d});
    const Tensor k = t.act("k", {n, s.kv_heads, s.d}), v = t.act("v", {n, s.kv_heads, s.d});
    table_kernels.attn_fwd({t.act_out("o", {n, s.heads(), s.d}), t.stat_out("lse", {n, s.heads()}), q, k, v, k, v,
                            t.index("segments", {1, 4}, {first, kRows, 0, first}), 1, s.scale()},
                           {});
    std::vector<int32_t> table(pages);
    for (int32_t p = 0; p < pages; p++) table[p] = (p * 5 + 3) % pages;
    if (pages % 5 == 0) std::iota(table.begin(), table.end(), 0);
    const InPages in_pages(t, k, v, table);
    const auto paged = [&](const char* name, const std::vector<PagedRow>& queries) {
      table_kernels.attn_paged(in_pages.read(name, q, queries, s.scale()), {});
      const int64_t width = s.heads() * s.d;
      for (int64_t row = first; row < n; row++)
        EXPECT_EQ(t[name].bits(row * width, (row + 1) * width), t["o"].bits(row * width, (row + 1) * width))
            << name << ", " << row + 1 << " slots";
    };
    std::vector<PagedRow> alone;
    for (int32_t i = first; i < n; i++) alone.push_back({i, 1, i + 1, 0});
    paged("alone", alone);
    paged("together", {{first, kRows, n, 0}});
    paged("prefill", {{n - 20, 20, n, 0}});  // more than 16 rows of a key head
  }
}

// Rows alone that see such numbers of slots of one sequence have the bits of the packed sequence, in a second call too.
void expect_bits_of_rows(const std::vector<int32_t>& seen, int64_t d = 8) {
  const PagedShape s{2, 1, d, 0};
  const int32_t n = *std::max_element(seen.begin(), seen.end()), pages = n / 16 + 1;
  const int64_t entries = std::ssize(seen), width = s.heads() * s.d;
  Call t(table_kernels, DType::bf16);
  const Tensor q = t.act("q", {n, s.heads(), s.d});
  const Tensor k = t.act("k", {n, s.kv_heads, s.d}), v = t.act("v", {n, s.kv_heads, s.d});
  for (int64_t i = (n - 5) * s.d; i < n * s.d; i++) t["k"].set(i, 8 * t["k"].get(i));  // the last cut has the maximum
  std::vector<SegmentRow> segments;
  std::vector<PagedRow> queries;
  std::vector<int32_t> table(pages);
  for (int32_t slots : seen) {
    segments.push_back({slots - 1, 1, 0, slots - 1});
    queries.push_back({slots - 1, 1, slots, 0});
  }
  table_kernels.attn_fwd({t.act_out("o", {n, s.heads(), s.d}), t.stat_out("lse", {n, s.heads()}), q, k, v, k, v,
                          t.index("segments", {entries, 4}, cases::flat(segments)), 1, s.scale()},
                         {});
  std::iota(table.rbegin(), table.rend(), 0);
  AttnPaged paged = InPages(t, k, v, table).read("first", q, queries, s.scale());
  for (const char* name : {"first", "second"}) {
    paged.o = t.act_out(name, {n, s.heads(), s.d});
    table_kernels.attn_paged(paged, {});
    for (int32_t slots : seen) {
      const int64_t first = (slots - 1) * width;
      ASSERT_EQ(t[name].bits(first, first + width), t["o"].bits(first, first + width)) << name << ", " << slots;
    }
    for (int64_t i = 0; i < entries * s.kv_heads; i++) ASSERT_EQ(t["cut arrivals"].get(i), 0) << i;
  }
}

TEST(CudaPaged, CutsArriveInAnyOrder) {
  in_all_orders([] { expect_bits_of_rows({2049, 1, 1025, 1024}); });
}

TEST(CudaPaged, MoreCutsThanLanes) { expect_bits_of_rows({32 * 1024 + 5}); }

// A block of tensor copies goes from piece to piece, whose pages it brings ahead.
TEST(CudaPaged, MorePiecesThanBlocks) {
  std::vector<int32_t> seen;
  const int32_t entries = 2 * (table_kernels.probe ? table_kernels.probe->multiprocessors() : 1) + 11;
  for (int32_t i = 0; i < entries; i++) seen.push_back(i % 7 == 0 ? 1100 - i : i % 3 == 0 ? 1 + i : 128 + 9 * i % 140);
  for (int64_t d : {64, 128}) expect_bits_of_rows(seen, d);
}

TEST(PagedWork, IsEachCutOrListOnceLongestFirst) {
  const std::vector<PagedRow> entries = {
      {0, 1, 5, 0}, {1, 1, 2500, 1}, {2, 3, 4000, 2}, {5, 1, 3000, 3}, {6, 1, 1024, 4}};
  const std::vector<int64_t> reads = {5, 2500, 4000, 640, 1024};
  std::vector<std::pair<int, int>> work;
  for (const PagedPiece& p : paged_work(entries, reads)) work.emplace_back(p.entry, p.cut);
  EXPECT_EQ(work, (std::vector<std::pair<int, int>>{{1, 0}, {1, 1}, {4, 0}, {3, 0}, {1, 2}, {0, 0}}));
}

// A rotation in front of the write has the bits of its own op, and what is written those of a write alone; a row that
// no entry names is rotated.  More entries than a warp looks at once, not in the order of rows.
TEST(CudaPaged, WritingBehindARotationHasTheBitsOfBoth) {
  struct Size {
    int64_t heads, kv_heads, d, gap;
  };
  for (const DType act : {DType::f32, DType::bf16})
    for (const auto& [H, K, d, gap] : {Size{3, 2, 16, 8}, {0, 1, 2, 3}, {5, 1, 34, 1}, {12, 2, 128, 8}, {1, 1, 250, 0}})
      for (const bool norm : {false, true})
        for (const bool decoding : {false, true}) {
          const int64_t n = 40, h = H + K, pages = 3 * n;
          std::vector<int32_t> queries, table(pages), pos(n);
          for (int32_t i = 0; i < pages; i++) table[i] = (i * 7 + 3) % static_cast<int32_t>(pages);
          for (int32_t i = 0; i < n; i++) pos[i] = i * 5 % 9;
          // Row 0 to 4 in one entry, the others from the last on; or each in the entry of its number.
          if (!decoding) queries = {0, 5, 18, 0};
          for (int32_t i = decoding ? 0 : 6; i < n; i++) {
            const int32_t row = decoding ? i : static_cast<int32_t>(n) + 5 - i;
            queries.insert(queries.end(), {row, 1, 1 + i % 40, i});
          }
          const auto call = [&, H = H, K = K, d = d, gap = gap](Call& t, bool together) {
            const Tensor x = t.act("x", {n, h, d}, gap), q_norm = t.act("q_norm", {d}), k_norm = t.act("k_norm", {d});
            const Tensor angles = t.stat("angles", {9, d}), at = t.index("at", {n}, pos);
            KvWrite w{};
            w.k_pages = t.act("k_pages", {pages, K, d, 16});
            w.v_pages = t.act("v_pages", {pages, K, 16, d});
            if (norm)
              w.rotation.norm_rope = {
                  t.act_out("y", {n, h, d}, gap), t.stat_out("rstd", {n, h}), x, q_norm, k_norm, angles, at, H, 1e-6f};
            else
              w.rotation.rope = {x, angles, at};
            w.k = w.rotation.last_heads(K);
            w.v = t.act("v", {n, K, d}, gap);
            w.page_table = t.index("table", {n, 3}, table);
            w.queries = t.index("queries", {std::ssize(queries) / 4, 4}, queries);
            w.pos_pages = t.index("pos_pages", {pages, K, 16}, std::vector<int32_t>(pages * K * 16));
            w.pos = at;
            if (!together) {
              norm ? table_kernels.qk_norm_rope_fwd(w.rotation.norm_rope, {})
                   : table_kernels.rope_fwd(w.rotation.rope, {});
              w.rotation = {};
            }
            table_kernels.kv_write(w, {});
            EXPECT_TRUE(t.zones_intact());
          };
          Call one(table_kernels, act), two(table_kernels, act);
          call(one, true);
          call(two, false);
          for (const auto& [name, buffer] : two.all())
            EXPECT_EQ(one[name].bits(), buffer->bits()) << name << ", heads of " << d << ", norm " << norm;
        }
}

// By each of its tiles, a product rotates and writes what it and the other ops do one after another.
TEST(CudaPaged, AProductThatWritesHasTheBitsOfItsOps) {
  struct Size {
    int H, K, d;
  };
  const auto expect_same = [](int64_t n, const Size& size, bool bias, bool decoding) {
    const auto& [H, K, d] = size;
    SCOPED_TRACE(cat(n, " rows, ", H, " and ", K, " heads of ", d, decoding ? ", decoded" : ""));
    const int64_t columns = (H + 2 * K) * d, inputs = 72, most = decoding ? n : 3;
    // An entry for each row; or the last rows, before some of the first, and rows that none names between them.
    std::vector<int32_t> queries, table, pos(n);
    if (!decoding)
      queries = {int32_t(n - n / 2), int32_t(n / 2), int32_t(n / 2 + 5), 2, 0, int32_t(n / 3), 37 + int32_t(n), 0};
    for (int32_t i = 0; i < n && decoding; i++)
      queries.insert(queries.end(), {i, 1, 1 + i * 5 % 40, int32_t(n) - 1 - i});
    const int64_t per_row = (n + 40) / 16 + 1, pages = most * per_row;
    for (int32_t i = 0; i < pages; i++) table.push_back(int32_t(pages) - 1 - i);
    for (int32_t i = 0; i < n; i++) pos[i] = i * 5 % 9;
    const auto call = [&, H = H, K = K, d = d](Call& t, bool together) {
      LinearFwd a{t.act_out("y", {n, columns}, 8),
                  t.act("x", {n, inputs}),
                  t.weight("w", columns, inputs),
                  bias ? t.act("bias", {columns}) : Tensor{},
                  {}};
      KvWrite w{};
      w.k_pages = t.act("k_pages", {pages, K, d, 16});
      w.v_pages = t.act("v_pages", {pages, K, 16, d});
      w.rotation.rope = {a.y.columns(0, (H + K) * d).heads(H + K), t.stat("angles", {9, d}), t.index("at", {n}, pos)};
      w.k = w.rotation.last_heads(K);
      w.v = a.y.columns((H + K) * d, K * d).heads(K);
      w.page_table = t.index("table", {most, per_row}, table);
      w.queries = t.index("queries", {std::ssize(queries) / 4, 4}, queries);
      if (bias) {
        w.pos_pages = t.index("pos_pages", {pages, K, 16}, std::vector<int32_t>(pages * K * 16));
        w.pos = w.rotation.rope.pos;
      }
      if (together)
        w.product = a;
      else
        t.table.linear_fwd(a, {});
      t.table.kv_write(w, {});
      EXPECT_TRUE(t.zones_intact());
    };
    Call one(table_kernels, DType::bf16), two(table_kernels, DType::bf16);
    call(one, true);
    call(two, false);
    for (const auto& [name, buffer] : two.all()) EXPECT_EQ(one[name].bits(), buffer->bits()) << name;
  };
  for (const WgmmaTile& tile : kRotatedTiles) {
    SCOPED_TRACE(cat(tile.rows, " x ", tile.columns));
    asked_tile = tile;
    for (const bool decoding : {true, false})
      for (const int64_t n : {1, 15, 70, 131})
        for (const Size& size : {Size{3, 1, 64}, {1, 2, 128}, {2, 1, 192}}) expect_same(n, size, n % 2, decoding);
  }
  asked_tile.reset();
  expect_same(13, {2, 1, 40}, true, true);  // heads of no whole tiles: two kernels
  expect_same(13, {0, 1, 64}, true, true);  // no queries
}

}  // namespace
}  // namespace pare::test
