// A cache of one layer and a sequence of the learner, for tests of block-sparse reads.
#pragma once
#include <algorithm>
#include <memory>

#include "op_harness.h"
#include "ops/attention.h"
#include "ops/blocks.h"
#include "ops/rope.h"

namespace pare::test {

using Bytes = std::vector<unsigned char>;

constexpr BlockSummary kMinmax = BlockSummary::minmax, kMean = BlockSummary::mean;

inline Buffer act(DType type, const Shape& shape, const std::vector<double>& v = {}) {
  Buffer b(type, shape);
  for (size_t i = 0; i < v.size(); i++) b.set(static_cast<int64_t>(i), v[i]);
  return b;
}
inline Buffer i32(const Shape& shape, const std::vector<int32_t>& v = {}) {
  return act(DType::i32, shape, {v.begin(), v.end()});
}
inline std::vector<int32_t> ints(const Buffer& b) {
  std::vector<int32_t> v;
  for (double x : b.values()) v.push_back(static_cast<int32_t>(x));
  return v;
}
inline Bytes row_bytes(const Buffer& b, int64_t begin, int64_t count) {
  const Bytes all = b.element_bytes();
  const int64_t row = static_cast<int64_t>(all.size()) / b.tensor().shape[0];
  return {all.begin() + begin * row, all.begin() + (begin + count) * row};
}

struct Heads {
  int64_t heads, kv_heads, dim;
};
const Heads kHeads[] = {{1, 1, 8}, {6, 2, 20}, {7, 1, 32}, {2, 2, 64}};

struct Choice {  // how blocks are chosen
  BlockSummary kind;
  int32_t block, first, last;
};
const Choice kChoices[] = {{kMinmax, 4, 0, 1}, {kMinmax, 16, 1, 2}, {kMean, 4, 2, 1}, {kMean, 16, 1, 1}};

// Makes the operands of a case, some of which are the test's own.
struct OwnRun : OpRun {
  using Own = std::map<std::string, Tensor>;
  OwnRun(const Table& table, DType type, Own own) : OpRun(table, type), own(std::move(own)) {}
  const Own own;
  void compute(const cases::Call&) override {}  // they hold it

 protected:
  Tensor make(const std::string& name, Use use, DType dtype, const Shape& shape, int64_t gap,
              const cases::Fill& fill) override {
    return own.count(name) ? own.at(name) : OpRun::make(name, use, dtype, shape, gap, fill);
  }
  Tensor make_index(const std::string& name, Use use, const Shape& shape, int64_t gap,
                    const std::vector<int32_t>& v) override {
    return own.count(name) ? own.at(name) : OpRun::make_index(name, use, shape, gap, v);
  }
};

inline std::string sizes(const Heads& h) { return cat("H=", h.heads, ",K=", h.kv_heads, ",D=", h.dim); }
inline std::string sizes(const Choice& c) {
  return cat(",block=", c.block, ",first_blocks=", c.first, ",last_blocks=", c.last);
}
inline std::string mean(const Choice& c) { return c.kind == kMean ? ",mean=1" : ",mean=0"; }

// A cache of one layer.  Tensors start as all ones: NaN, so that reading what was never written shows.
class Cache {
 public:
  using Runs = std::vector<std::pair<int32_t, int32_t>>;  // (sequence, new rows)

  Cache(const Table& table, const Heads& h, const Choice& choice, int64_t sequences, int64_t max_slots,
        DType type = DType::f32, const std::string& shuffle = "pages")
      : table(table),
        heads(h),
        choice(choice),
        type(type),
        per_sequence(blocks_of(max_slots, 16)),
        pages(sequences * per_sequence + 2),
        page_table(i32({sequences, per_sequence})),
        k_pages(act(type, {pages, h.kv_heads, h.dim, 16})),
        v_pages(act(type, {pages, h.kv_heads, 16, h.dim})),
        summary(act(type, {pages, h.kv_heads, 16 / choice.block * summary_rows(choice.kind), h.dim})),
        used(sequences) {
    std::vector<int32_t> order(pages), swap = below(shuffle, pages, pages);
    for (int32_t i = 0; i < pages; i++) order[i] = i;
    for (int64_t i = 0; i < pages; i++) std::swap(order[i], order[swap[i]]);
    for (int64_t i = 0; i < sequences * per_sequence; i++) page_table.set(i, order[i]);
  }

  // New rows of k and v (all rows of the tensors, sequence by sequence) behind what the sequences have.
  void append(const Runs& runs, const Tensor& k, const Tensor& v) {
    for (auto [sequence, rows] : runs) used[sequence] += rows;
    OwnRun write(table, type, own({{"k", k}, {"v", v}})), sum(table, type, own({}));
    run(write, &Table::kv_write, "kv_write", ",inputs=0", runs);
    run(sum, &Table::kv_block_summary, "kv_block_summary", sizes(choice) + mean(choice), runs);
  }

  struct Read {
    std::shared_ptr<OwnRun> select, attn;
    const Buffer &o, &score;
    Buffer blocks;
    int64_t slots;
  };
  // One decode step of the sequences: chooses blocks by q [sequences, H, D] and reads them.  Read::blocks: in order.
  Read decode(const std::vector<int32_t>& sequences, const Tensor& q, const std::vector<int32_t>& budgets) {
    const Runs runs = single(sequences);
    const auto select = std::make_shared<OwnRun>(table, type, own({{"q", q}}));
    const std::string size = sizes(choice) + mean(choice);
    const Tensor lists = run(*select, &Table::kv_block_select, "kv_block_select", size, runs, budgets).blocks;
    const auto attn = std::make_shared<OwnRun>(table, type, own({{"q", q}, {"blocks", lists}}));
    const int64_t slots = run(*attn, &Table::attn_paged, "attn_paged", sizes(choice), runs, budgets).slots;
    // The case has its table in the opposite order, and an entry of no block behind each list.
    const int64_t n = std::ssize(sequences), K = heads.kv_heads, room = lists.shape[2] - 1;
    Buffer blocks = i32({n, K, room});
    for (int64_t i = 0; i < n * K * room; i++) {
      const int64_t list = i / room, row = n - 1 - list / K;
      blocks.set(i, select->buffer("blocks").get((row * K + list % K) * (room + 1) + i % room));
    }
    return {select, attn, attn->buffer("o"), select->buffer("score"), std::move(blocks), slots};
  }
  // The same step without lists.
  Buffer decode_densely(const std::vector<int32_t>& sequences, const Tensor& q) {
    OwnRun r(table, type, own({{"q", q}}));
    run(r, &Table::attn_paged, "attn_paged", "", single(sequences));
    return act(type, {std::ssize(sequences), heads.heads, heads.dim}, r.values("o"));
  }

  OwnRun::Own own(OwnRun::Own more) const {
    more.insert({{"k_pages", k_pages.tensor()}, {"v_pages", v_pages.tensor()}, {"summary", summary.tensor()}});
    return more;
  }
  // Operands of a case for these sequences.
  template <class Args>
  Args operands(OwnRun& r, const char* op, const std::string& size, const Runs& runs,
                const std::vector<int32_t>& budgets = {}) const {
    cases::Layout layout{.budget = budgets};
    for (auto [sequence, rows] : runs) layout.sequences.push_back({rows, used[sequence]});
    const Args a = arguments<Args>(r, op, sizes(heads) + size, layout);
    const int64_t width = a.page_table.shape[1];
    std::vector<double> rows(runs.size() * width, -1);  // in the opposite order
    for (size_t i = 0; i < runs.size(); i++)
      for (int64_t p = 0; p < std::min(width, per_sequence); p++)
        rows[(runs.size() - 1 - i) * width + p] = page_table.get(runs[i].first * per_sequence + p);
    r.set("page_table", rows);
    return a;
  }
  template <class Args>
  Args run(OwnRun& r, void (*Table::*op)(const Args&, Stream), const char* name, const std::string& size,
           const Runs& runs, const std::vector<int32_t>& budgets = {}) const {
    const Args a = operands<Args>(r, name, size, runs, budgets);
    r.call(op, a);
    EXPECT_TRUE(r.problems.empty()) << joined(r.problems);
    return a;
  }
  static Runs single(const std::vector<int32_t>& sequences) {
    Runs runs;
    for (int32_t s : sequences) runs.push_back({s, 1});
    return runs;
  }

  const Table& table;
  const Heads heads;
  const Choice choice;
  const DType type;
  const int64_t per_sequence, pages;
  Buffer page_table, k_pages, v_pages, summary;
  std::vector<int32_t> used;  // slots of each sequence
};

inline Buffer random_rows(const std::string& name, int64_t n, int64_t h, int64_t dim, DType type = DType::f32) {
  return act(type, {n, h, dim}, normal(name, n * h * dim));
}

// Fills sequence 0 with `slots` random rows.
inline void fill(Cache& c, int64_t slots, const std::string& name = "") {
  const Buffer k = random_rows(name + "k", slots, c.heads.kv_heads, c.heads.dim, c.type);
  const Buffer v = random_rows(name + "v", slots, c.heads.kv_heads, c.heads.dim, c.type);
  c.append({{0, static_cast<int32_t>(slots)}}, k.tensor(), v.tensor());
}

struct Learned {
  Buffer o, lse, blocks, dq, dk, dv;
};
// Rows of one sequence as a batch: a segment of the first `prompt` rows and one of the others behind it.
struct LearnerBatch {
  LearnerBatch(const Heads& h, int64_t n, int32_t prompt, const Choice& choice, int32_t budget)
      : h(h),
        choice(choice),
        n(n),
        room(budget),
        q(random_rows("q", n, h.heads, h.dim)),
        k(random_rows("k", n, h.kv_heads, h.dim)),
        v(random_rows("v", n, h.kv_heads, h.dim)),
        segments({{prompt, static_cast<int32_t>(n) - prompt, 0, prompt}, {0, prompt, 0, 0}}),
        budgets(n, INT32_MAX) {
    std::fill(budgets.begin() + prompt, budgets.end(), budget);
  }

  // dk and dv start from random values; the segments from `cut` on are a second call.
  Learned run(const Table& table, bool lists = true, size_t cut = 0) const {
    Learned r{random_rows("", n, h.heads, h.dim),
              act(DType::f32, {n, h.heads}),
              i32({n, h.kv_heads, room}),
              random_rows("", n, h.heads, h.dim),
              random_rows("dk", n, h.kv_heads, h.dim),
              random_rows("dv", n, h.kv_heads, h.dim)};
    const auto call = [&]<class Args>(void (*Table::*op)(const Args&, Stream), const char* name,
                                      const std::string& size, const std::vector<SegmentRow>& some) {
      OwnRun t(table, DType::f32,
               {{"q", q.tensor()},
                {"k", k.tensor()},
                {"v", v.tensor()},
                {"o", r.o.tensor()},
                {"lse", r.lse.tensor()},
                {"blocks", r.blocks.tensor()},
                {"dq", r.dq.tensor()},
                {"dk", r.dk.tensor()},
                {"dv", r.dv.tensor()}});
      t.call(op, arguments<Args>(t, name, sizes(h) + sizes(choice) + size,
                                 {.segments = some, .rows = n, .budget = lists ? budgets : std::vector<int32_t>()}));
      EXPECT_TRUE(t.problems.empty()) << joined(t.problems);
    };
    if (lists) call(&Table::attn_block_select, "attn_block_select", mean(choice), segments);
    call(&Table::attn_fwd, "attn_fwd", "", segments);
    const auto middle = segments.begin() + static_cast<int64_t>(cut);
    for (const auto& part : {std::vector(segments.begin(), middle), std::vector(middle, segments.end())})
      if (!part.empty()) call(&Table::attn_bwd, "attn_bwd", "", part);
    return r;
  }

  Heads h;
  Choice choice;
  int64_t n, room;
  Buffer q, k, v;
  std::vector<SegmentRow> segments;
  std::vector<int32_t> budgets;
};

}  // namespace pare::test
