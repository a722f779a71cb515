// A compression of one or more sequences, op by op, on any table: what the tests of the eviction ops are written with.
#pragma once
#include "kv_pages.h"
#include "ops/compression.h"

namespace pare::test {

using Keep = std::vector<std::vector<int32_t>>;  // per (compression, head): slots
using Rows = std::vector<std::vector<double>>;   // keys of one head by slot, or queries

struct On {  // a table and its element type
  const Table* table;
  DType act;
};
inline void PrintTo(const On& on, std::ostream* out) { *out << on.table->name; }
inline const On kRefAndCpu[] = {{&table_ref, DType::f64}, {&table_cpu, DType::f32}};

struct WindowSpec {
  GqaAgg aggregate = GqaAgg::max_logit;
  SoftmaxSpan span = SoftmaxSpan::exclude_window;
  Pool pool = Pool::max;
  int32_t kernel = 1;
};

struct KvScene {
  On on;
  int64_t heads = 1, kv_heads = 1, dim = 0;
  int32_t window = 1;
  std::vector<KvCompression> compressions = {};  // window_row: set by add()
  std::vector<Rows> keys = {};                   // per (compression, kv head): [slots][dim]
  std::vector<double> windows = {};              // [compressions * window, heads, dim], oldest first unless rotated
  std::vector<int32_t> oldest = {};              // window_first, or empty

  // One more compression.  queries: [window][heads * dim].
  void add(KvCompression e, const std::vector<Rows>& head_keys, const Rows& queries) {
    e.window_row = static_cast<int32_t>(compressions.size()) * window;
    compressions.push_back(e);
    keys.insert(keys.end(), head_keys.begin(), head_keys.end());
    for (const auto& q : queries) windows.insert(windows.end(), q.begin(), q.end());
  }

  int64_t count() const { return static_cast<int64_t>(compressions.size()); }
  KvPages pages() const {
    std::vector<int32_t> slots;
    for (const KvCompression& e : compressions) slots.push_back(e.slots);
    return KvPages(slots);
  }
  int64_t max_slots() const {
    int64_t n = 0;
    for (const KvCompression& e : compressions) n = std::max<int64_t>(n, e.slots);
    return n;
  }
  KvWork work() const { return kv_work(compressions.data(), count()); }
  std::vector<double> key_pages(const KvPages& p) const {
    std::vector<double> k(p.count * kv_heads * dim * 16, NAN);
    for (int64_t i = 0; i < count(); i++)
      for (int64_t h = 0; h < kv_heads; h++)
        for (int32_t s = 0; s < compressions[i].slots; s++)
          for (int64_t d = 0; d < dim; d++)
            k[((p.page(i, s) * kv_heads + h) * dim + d) * 16 + s % 16] = keys[i * kv_heads + h][s][d];
    return k;
  }

  // Scores [compressions, kv_heads, max_slots]; NaN where there are none.
  std::vector<double> window_scores(const WindowSpec& spec, float scale) const {
    OpRun r(*on.table, on.act);
    const KvPages p = pages();
    KvWindowScores a{};
    a.score = r.out("score", {count(), kv_heads, max_slots()});
    a.windows = r.in("windows", {count() * window, heads, dim}, windows);
    if (!oldest.empty()) a.window_first = r.index("window_first", {count()}, oldest);
    a.k_pages = r.in("k_pages", {p.count, kv_heads, dim, 16}, key_pages(p));
    a.src_pages = r.index("src_pages", {count(), p.per_row}, p.table);
    a.compressions = r.index("compressions", {count(), 5}, flat(compressions)), a.work = work(), a.window = window;
    a.aggregate = spec.aggregate, a.span = spec.span, a.pool = spec.pool, a.kernel = spec.kernel, a.scale = scale;
    r.call(&Table::kv_window_scores, a);
    EXPECT_TRUE(r.problems.empty()) << joined(r.problems);
    return r.values("score");
  }
  std::vector<double> redundancy(std::vector<double> score, float lambda, float threshold) const {
    OpRun r(*on.table, on.act);
    const KvPages p = pages();
    KvRedundancy a{};
    a.score = r.inout("score", {count(), kv_heads, max_slots()}, score);
    a.k_pages = r.in("k_pages", {p.count, kv_heads, dim, 16}, key_pages(p));
    a.src_pages = r.index("src_pages", {count(), p.per_row}, p.table);
    a.compressions = r.index("compressions", {count(), 5}, flat(compressions)), a.work = work();
    a.lambda = lambda, a.threshold = threshold;
    a.workspace = r.scratch("workspace", {count(), kv_heads, 4, p.per_row * 16}, {});
    r.call(&Table::kv_redundancy, a);
    EXPECT_TRUE(r.problems.empty()) << joined(r.problems);
    return r.values("score");
  }
  Keep select(const std::vector<double>& score, bool shared_heads = false) const {
    OpRun r(*on.table, on.act);
    KvSelect a{};
    a.keep = r.index_out("keep", {count(), kv_heads, max_slots()});
    if (!score.empty()) a.score = r.in("score", {count(), kv_heads, max_slots()}, score);
    a.compressions = r.index("compressions", {count(), 5}, flat(compressions)), a.work = work(),
    a.shared_heads = shared_heads;
    r.call(&Table::kv_select, a);
    EXPECT_TRUE(r.problems.empty()) << joined(r.problems);
    const auto all = r.values("keep");
    Keep keep;
    for (int64_t i = 0; i < count(); i++)
      for (int64_t h = 0; h < kv_heads; h++) {
        const auto row = all.begin() + (i * kv_heads + h) * max_slots();
        keep.emplace_back(row, row + compressions[i].keep);
      }
    return keep;
  }
};

// `count` rows of `dim` normals.
inline Rows normal_rows(const std::string& name, int64_t count, int64_t dim) {
  const auto v = normal(name, count * dim);
  Rows rows;
  for (int64_t i = 0; i < count; i++) rows.emplace_back(v.begin() + i * dim, v.begin() + (i + 1) * dim);
  return rows;
}

}  // namespace pare::test
