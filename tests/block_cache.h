// A cache of one layer and a sequence of the learner, for tests of block-sparse reads.
#pragma once
#include <algorithm>

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
  int64_t scored(int64_t slots) const { return blocks_of(slots, block) - first - last; }
};
const Choice kChoices[] = {{kMinmax, 4, 0, 1}, {kMinmax, 16, 1, 2}, {kMean, 4, 2, 1}, {kMean, 16, 1, 1}};

// A cache of one layer.  Tensors start as all ones: NaN, so that reading what was never written shows.
class Cache {
 public:
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
  void append(const std::vector<std::pair<int32_t, int32_t>>& runs, const Tensor& k, const Tensor& v) {
    std::vector<int32_t> entries;
    int32_t row = 0;
    int64_t refreshed = 0;
    for (auto [sequence, rows] : runs) {
      refreshed += blocks_of(used[sequence] + rows, 16) - used[sequence] / 16;
      used[sequence] += rows;
      entries.insert(entries.end(), {row, rows, used[sequence], sequence});
      row += rows;
    }
    const Buffer queries = i32({static_cast<int64_t>(runs.size()), 4}, entries);
    KvWrite write{};
    write.k_pages = k_pages.tensor(), write.v_pages = v_pages.tensor(), write.k = k, write.v = v;
    write.page_table = page_table.tensor(), write.queries = queries.tensor();
    table.kv_write(write, {});
    table.kv_block_summary({.summary = summary.tensor(),
                            .k_pages = k_pages.tensor(),
                            .page_table = page_table.tensor(),
                            .queries = queries.tensor(),
                            .pages = refreshed,
                            .block = choice.block,
                            .kind = choice.kind},
                           {});
  }

  struct Read {
    Buffer o, blocks, score;
    int64_t slots;
  };
  // One decode step of the sequences: chooses blocks by q [sequences, H, D] and reads them.  Read::blocks: in order.
  Read decode(const std::vector<int32_t>& sequences, const Tensor& q, const std::vector<int32_t>& budgets) {
    const int64_t n = static_cast<int64_t>(sequences.size());
    std::vector<int32_t> entries;
    int64_t scored = 0, slots = 0, room = 1, most = 1;
    for (int32_t e = 0; e < n; e++) {
      const int32_t have = used[sequences[e]], budget = budgets[e];
      entries.insert(entries.end(), {e, 1, have, sequences[e]});
      slots += listed_slots(have, budget, choice.block);
      room = std::max<int64_t>(room, std::min<int64_t>(budget, blocks_of(have, choice.block)));
      if (blocks_of(have, choice.block) <= budget) continue;
      scored += choice.scored(have), most = std::max(most, choice.scored(have));
    }
    const Buffer queries = i32({n, 4}, entries), lists = i32({std::ssize(used), heads.kv_heads, room});
    Buffer budget = i32({std::ssize(used)});
    for (int64_t e = 0; e < n; e++) budget.set(sequences[e], budgets[e]);
    Read r{act(type, {n, heads.heads, heads.dim}), i32({n, heads.kv_heads, room}), act(type, {n, heads.kv_heads, most}),
           slots};
    KvBlockSelect select{};
    select.blocks = lists.tensor(), select.score = r.score.tensor(), select.q = q;
    select.summary = summary.tensor(), select.page_table = page_table.tensor(), select.queries = queries.tensor();
    select.budget = budget.tensor(), select.scored = scored, select.block = choice.block;
    select.first_blocks = choice.first, select.last_blocks = choice.last, select.kind = choice.kind;
    table.kv_block_select(select, {});
    AttnPaged attn = dense(r.o.tensor(), q, queries.tensor(), slots);
    attn.blocks = lists.tensor(), attn.budget = budget.tensor(), attn.block = choice.block;
    table.attn_paged(attn, {});
    const int64_t size = heads.kv_heads * room;
    for (int64_t i = 0; i < n * size; i++) r.blocks.set(i, lists.get(sequences[i / size] * size + i % size));
    return r;
  }
  // The same step without lists.
  Buffer decode_densely(const std::vector<int32_t>& sequences, const Tensor& q) {
    std::vector<int32_t> entries;
    int64_t slots = 0;
    for (size_t e = 0; e < sequences.size(); e++) {
      entries.insert(entries.end(), {static_cast<int32_t>(e), 1, used[sequences[e]], sequences[e]});
      slots += used[sequences[e]];
    }
    const Buffer queries = i32({static_cast<int64_t>(sequences.size()), 4}, entries);
    Buffer o = act(type, {static_cast<int64_t>(sequences.size()), heads.heads, heads.dim});
    table.attn_paged(dense(o.tensor(), q, queries.tensor(), slots), {});
    return o;
  }

  const Table& table;
  const Heads heads;
  const Choice choice;
  const DType type;
  const int64_t per_sequence, pages;
  Buffer page_table, k_pages, v_pages, summary;
  std::vector<int32_t> used;  // slots of each sequence

  float scale() const { return static_cast<float>(1 / std::sqrt(double(heads.dim))); }

 private:
  AttnPaged dense(const Tensor& o, const Tensor& q, const Tensor& queries, int64_t slots) const {
    AttnPaged a{};
    a.o = o, a.q = q, a.k_pages = k_pages.tensor(), a.v_pages = v_pages.tensor();
    a.page_table = page_table.tensor(), a.queries = queries, a.pairs = a.slots = slots, a.scale = scale();
    return a;
  }
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
        q(random_rows("q", n, h.heads, h.dim)),
        k(random_rows("k", n, h.kv_heads, h.dim)),
        v(random_rows("v", n, h.kv_heads, h.dim)),
        segments({prompt, static_cast<int32_t>(n) - prompt, 0, prompt, 0, prompt, 0, 0}),
        budgets(n, INT32_MAX) {
    std::fill(budgets.begin() + prompt, budgets.end(), budget);
  }
  template <class F>
  int64_t sum_rows(const std::vector<int32_t>& list, F f) const {
    int64_t sum = 0;
    for (size_t i = 0; i < list.size(); i += 4)
      for (int32_t r = 0; r < list[i + 1]; r++) sum += f(list[i + 3] + r + 1, budgets[list[i] + r]);
    return sum;
  }
  template <class Args>
  void set(Args& a, const Buffer& list, const std::vector<int32_t>& entries, bool lists) const {
    a.q = q.tensor(), a.k = a.pk = k.tensor(), a.v = a.pv = v.tensor();
    a.segments = list.tensor(), a.scale = static_cast<float>(1 / std::sqrt(double(h.dim)));
    a.pairs = sum_rows(entries,
                       [&](int64_t total, int64_t b) { return lists ? listed_slots(total, b, choice.block) : total; });
  }

  // dk and dv start from random values; the segments from `cut` on are a second call.
  Learned run(const Table& table, bool lists = true, size_t cut = 0) const {
    const int64_t room = std::max<int64_t>(
        1, std::min<int64_t>(*std::min_element(budgets.begin(), budgets.end()), blocks_of(n, choice.block)));
    const int64_t height = summary_rows(choice.kind), all = n / choice.block + 1;
    Learned r{random_rows("", n, h.heads, h.dim),
              act(DType::f32, {n, h.heads}),
              i32({n, h.kv_heads, room}),
              random_rows("", n, h.heads, h.dim),
              random_rows("dk", n, h.kv_heads, h.dim),
              random_rows("dv", n, h.kv_heads, h.dim)};
    const Buffer budget = i32({n}, budgets), list = i32({2, 4}, segments);
    const Buffer summary = act(DType::f32, {2, h.kv_heads, all * height, h.dim});
    AttnBlockSelect select{};
    select.blocks = r.blocks.tensor(), select.summary = summary.tensor(), select.q = q.tensor();
    select.k = select.pk = k.tensor(), select.segments = list.tensor(), select.budget = budget.tensor();
    select.scored = sum_rows(segments, [&](int64_t total, int64_t b) {
      return blocks_of(total, choice.block) > b ? choice.scored(total) : 0;
    });
    select.slots = n + segments[3], select.block = choice.block, select.kind = choice.kind;
    select.first_blocks = choice.first, select.last_blocks = choice.last;
    if (lists) table.attn_block_select(select, {});
    AttnFwd f{};
    set(f, list, segments, lists);
    f.o = r.o.tensor(), f.lse = r.lse.tensor();
    if (lists) f.blocks = r.blocks.tensor(), f.budget = budget.tensor(), f.block = choice.block;
    table.attn_fwd(f, {});
    const Buffer d_o = random_rows("d_o", n, h.heads, h.dim);
    for (const auto& part : {std::vector<int32_t>(segments.begin(), segments.begin() + cut),
                             std::vector<int32_t>(segments.begin() + cut, segments.end())}) {
      if (part.empty()) continue;
      const Buffer some = i32({static_cast<int64_t>(part.size()) / 4, 4}, part);
      AttnBwd b{};
      set(b, some, part, lists);
      b.dq = r.dq.tensor(), b.dk = b.dpk = r.dk.tensor(), b.dv = b.dpv = r.dv.tensor(), b.d_o = d_o.tensor();
      b.o = r.o.tensor(), b.lse = r.lse.tensor();
      if (lists) b.blocks = r.blocks.tensor(), b.budget = budget.tensor(), b.block = choice.block;
      table.attn_bwd(b, {});
    }
    return r;
  }

  Heads h;
  Choice choice;
  int64_t n;
  Buffer q, k, v;
  std::vector<int32_t> segments, budgets;
};

}  // namespace pare::test
