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
  std::vector<KvCompression> compressions = {};
  std::vector<Rows> keys = {};       // per (compression, kv head): [slots][dim]
  std::vector<double> windows = {};  // [compressions * window, heads, dim], oldest first unless rotated
  std::vector<double> oldest = {};   // window_first, or empty

  // One more compression.  queries: [window][heads * dim].
  void add(const KvCompression& e, const std::vector<Rows>& head_keys, const Rows& queries) {
    compressions.push_back(e);
    keys.insert(keys.end(), head_keys.begin(), head_keys.end());
    for (const auto& q : queries) windows.insert(windows.end(), q.begin(), q.end());
  }

  int64_t count() const { return std::ssize(compressions); }
  int64_t max_slots() const {
    int64_t n = 0;
    for (const KvCompression& e : compressions) n = std::max<int64_t>(n, e.slots);
    return n;
  }

  // Scores [compressions, kv_heads, max_slots]; NaN where there are none.
  std::vector<double> window_scores(const WindowSpec& spec, float scale) const {
    OpRun r(*on.table, on.act);
    auto a = operands<KvWindowScores>(
        r, "kv_window_scores",
        cat(",H=", heads, ",window=", window, ",kernel=", spec.kernel, ",aggregate=", static_cast<int>(spec.aggregate),
            ",span=", static_cast<int>(spec.span), ",pool=", static_cast<int>(spec.pool)));
    std::vector<double> rows = r.values("windows");
    const int64_t row = heads * dim;
    for (int64_t i = 0; i < count(); i++)
      std::copy_n(windows.begin() + i * window * row, window * row,
                  rows.begin() + static_cast<int64_t>(r.values("compressions")[i * 5 + 4]) * row);
    r.set("windows", rows);
    if (window > 1) r.set("window_first", oldest.empty() ? std::vector<double>(count()) : oldest);
    a.scale = scale;
    r.call(&Table::kv_window_scores, a);
    return result(r);
  }
  std::vector<double> redundancy(const std::vector<double>& score, float lambda, float threshold) const {
    OpRun r(*on.table, on.act);
    auto a = operands<KvRedundancy>(r, "kv_redundancy", "");
    r.set("score", resized(score, a.score.shape[2]));
    a.lambda = lambda;
    a.threshold = threshold;
    r.call(&Table::kv_redundancy, a);
    return result(r);
  }
  // No score: the newest.
  Keep select(const std::vector<double>& score, bool shared_heads = false) const {
    OpRun r(*on.table, on.act);
    const auto a = operands<KvSelect>(r, "kv_select", cat(",shared=", shared_heads, ",recent=", score.empty()));
    if (!score.empty()) r.set("score", resized(score, a.score.shape[2]));
    r.call(&Table::kv_select, a);
    EXPECT_TRUE(r.problems.empty()) << joined(r.problems);
    const auto all = r.values("keep");
    Keep keep;
    for (int64_t i = 0; i < count() * kv_heads; i++) {
      const auto row = all.begin() + i * a.keep.shape[2];
      keep.emplace_back(row, row + compressions[i / kv_heads].keep);
    }
    return keep;
  }

 private:
  // Of a case of src/cases, with these keys.
  template <class Args>
  Args operands(OpRun& r, const char* op, const std::string& size) const {
    const Args a = arguments<Args>(r, op, cat("K=", kv_heads, ",D=", dim, size), {.compressions = compressions});
    if (!r.has("k_pages")) return a;
    std::vector<int32_t> slots;
    for (const KvCompression& e : compressions) slots.push_back(e.slots);
    const KvPages p(slots);
    std::vector<double> k = r.values("k_pages");
    for (int64_t i = 0; i < count(); i++)
      for (int64_t h = 0; h < kv_heads; h++)
        for (int32_t s = 0; s < compressions[i].slots; s++)
          for (int64_t d = 0; d < dim; d++)
            k[((p.page(i, s) * kv_heads + h) * dim + d) * 16 + s % 16] = keys[i * kv_heads + h][s][d];
    r.set("k_pages", k);
    return a;
  }
  // Rows of another length: NaN behind.
  std::vector<double> resized(const std::vector<double>& rows, int64_t length) const {
    const int64_t n = count() * kv_heads, had = std::ssize(rows) / n;
    std::vector<double> v(n * length, NAN);
    for (int64_t i = 0; i < n; i++) std::copy_n(rows.begin() + i * had, std::min(had, length), v.begin() + i * length);
    return v;
  }
  std::vector<double> result(const OpRun& r) const {
    EXPECT_TRUE(r.problems.empty()) << joined(r.problems);
    return resized(r.values("score"), max_slots());
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
