// Rows of the op test: the ops of a cache that evicts.
#include <algorithm>
#include <numeric>

#include "kv_pages.h"
#include "op_cases.h"
#include "paged_layout.h"

namespace pare::test {

namespace {

struct Eviction {
  std::string name;
  int64_t heads, kv_heads, dim;
  std::vector<KvEvent> events;  // keep_row: the place in the list; window_row: set below
};
// Protected slots, candidates and recent ones end inside, at and beyond page borders; one page, many, all kept.
const std::vector<Eviction> kEvictions = {
    {"one", 1, 1, 8, {{5, 0, 1, 3, 0, 0}}},
    {"pages", 4, 2, 32, {{40, 0, 3, 17, 1, 0}, {16, 0, 4, 15, 0, 0}, {65, 17, 4, 30, 2, 0}}},
    {"all_stay", 2, 1, 20, {{33, 3, 5, 30, 0, 0}, {21, 16, 5, 5, 1, 0}}},
    {"long", 6, 2, 20, {{163, 5, 8, 96, 0, 0}, {17, 1, 4, 9, 1, 0}}},
    {"gqa7", 14, 2, 64, {{80, 32, 8, 24, 0, 0}, {47, 0, 16, 31, 1, 0}}},
};
constexpr int kMostWindow = 3;

struct Layout {
  KvPages pages;
  int64_t max_slots = 0, max_keep = 0, windows = 0;
  std::vector<KvEvent> events;
  std::vector<int32_t> oldest;  // window_first
  KvWork work;
};
Layout lay_out(const Eviction& s, int32_t window) {
  Layout l;
  std::vector<int32_t> slots;
  for (KvEvent e : s.events) {
    e.window_row = static_cast<int32_t>(2 + l.windows);  // two rows of nobody
    l.windows += window + 1;                             // and one behind each window
    l.events.push_back(e), slots.push_back(e.slots);
    l.oldest.push_back(static_cast<int32_t>((l.events.size() * 2) % window));
    l.max_slots = std::max<int64_t>(l.max_slots, e.slots + 3), l.max_keep = std::max<int64_t>(l.max_keep, e.keep + 1);
  }
  l.windows += 2;
  l.pages = KvPages(slots);
  l.work = kv_work(l.events.data(), static_cast<int64_t>(l.events.size()));
  return l;
}
std::string name(const Eviction& s) { return cat(s.name, "_H", s.heads, "_K", s.kv_heads, "_D", s.dim); }
int64_t count(const Eviction& s) { return static_cast<int64_t>(s.events.size()); }
int32_t least_recent(const Eviction& s) {
  int32_t n = INT32_MAX;
  for (const KvEvent& e : s.events) n = std::min(n, e.recent);
  return n;
}

// The tensors that ops share.
struct Tensors {
  Tensors(OpRun& r, const Eviction& s, const Layout& l) : r(r), s(s), l(l) {}
  Tensor k_pages() {
    return r.in("k_pages", {l.pages.count, s.kv_heads, s.dim, 16}, l.pages.keys("k", s.kv_heads, s.dim));
  }
  Tensor src() { return r.index("src_pages", {count(s), l.pages.per_row}, l.pages.table, 3); }
  Tensor events() { return r.index("events", {count(s), 6}, flat(l.events)); }
  Shape score() { return {count(s), s.kv_heads, l.max_slots}; }
  OpRun& r;
  const Eviction& s;
  const Layout& l;
};

// A softmax of logits that are chains over dim of products of normals, scaled to variance 1: values below 6.
double probability_error(int64_t dim, int64_t slots) { return 12 * chain(double(dim)) + lanes(double(slots)); }

void add_window_scores(std::vector<OpCase>& cases, const Eviction& s) {
  const auto add = [&](const char* what, int32_t window, GqaAgg aggregate, SoftmaxSpan span, Pool pool,
                       int32_t kernel) {
    window = std::min(window, least_recent(s));
    const Layout l = lay_out(s, window);
    cases.push_back({"kv_window_scores", cat(name(s), "_", what, "_w", window, "_kernel", kernel), [=](OpRun& r) {
                       Tensors t{r, s, l};
                       KvWindowScores a{};
                       a.score = r.out("score", t.score());
                       a.windows = r.in("windows", {l.windows, s.heads, s.dim}, 5);
                       if (window > 1) a.window_first = r.index("window_first", {count(s)}, l.oldest);
                       a.k_pages = t.k_pages(), a.src_pages = t.src(), a.events = t.events(), a.work = l.work;
                       a.window = window, a.aggregate = aggregate, a.span = span, a.pool = pool, a.kernel = kernel;
                       a.scale = static_cast<float>(1 / std::sqrt(double(s.dim)));
                       r.call(&Table::kv_window_scores, a);
                       r.bound("score", probability_error(s.dim, l.max_slots) + chain(window + kernel));
                     }});
  };
  add("max", kMostWindow, GqaAgg::max_logit, SoftmaxSpan::exclude_window, Pool::max, 1);
  add("max", 8, GqaAgg::max_logit, SoftmaxSpan::exclude_window, Pool::max, 7);
  add("mean", kMostWindow, GqaAgg::mean_logit, SoftmaxSpan::include_window, Pool::avg, 5);
  add("prob", kMostWindow, GqaAgg::mean_prob, SoftmaxSpan::include_window, Pool::max, 3);
  add("prob", 1, GqaAgg::mean_prob, SoftmaxSpan::exclude_window, Pool::avg, 33);
}

void add_redundancy(std::vector<OpCase>& cases, const Eviction& s) {
  const Layout l = lay_out(s, 1);
  cases.push_back({"kv_redundancy", name(s), [=](OpRun& r) {
                     Tensors t{r, s, l};
                     KvRedundancy a{};
                     a.score = r.inout("score", t.score());
                     a.k_pages = t.k_pages(), a.src_pages = t.src(), a.events = t.events(), a.work = l.work;
                     a.lambda = 0.25f, a.threshold = 0.31f;
                     a.workspace = r.scratch("workspace", {count(s), s.kv_heads, 4, l.pages.per_row * 16}, {});
                     r.call(&Table::kv_redundancy, a);
                     // R is at most 1; its relative error is that of r, a mean of cosines, and of a softmax.
                     const double error = 4 * chain(double(s.dim)) + chain(double(l.max_slots));
                     r.bound("score", error + 4 * kRound * r.max_abs("score"));
                   }});
}

void add_mass_scores(std::vector<OpCase>& cases, const Eviction& s) {
  for (bool normalise : {false, true}) {
    const Layout l = lay_out(s, 1);
    cases.push_back(
        {"kv_mass_scores", cat(name(s), normalise ? "_mean" : "_sum"), [=](OpRun& r) {
           Tensors t{r, s, l};
           KvMassScores a{};
           a.score = r.out("score", t.score());
           a.mass_pages = r.in("mass_pages", {l.pages.count, s.kv_heads, 16});
           if (normalise) {
             a.pos_pages = r.index("pos_pages", {l.pages.count, s.kv_heads, 16}, l.pages.positions(s.kv_heads));
             a.position = r.index("position", {count(s)}, std::vector<int32_t>(count(s), 1000));
           }
           a.src_pages = t.src(), a.events = t.events(), a.work = l.work, a.normalise = normalise;
           r.call(&Table::kv_mass_scores, a);
           if (normalise) r.bound("score", 5 * kRound);
         }});
  }
}

void add_select(std::vector<OpCase>& cases, const Eviction& s) {
  for (bool shared : {false, true}) {
    const Layout l = lay_out(s, 1);
    // Eighths below 2: many are equal, and sums over heads are exact.
    std::vector<double> score(count(s) * s.kv_heads * l.max_slots);
    const auto eighths = below("score", static_cast<int64_t>(score.size()), 31);
    for (size_t i = 0; i < score.size(); i++) score[i] = (eighths[i] - 15) / 8.0;
    cases.push_back({"kv_select", cat(name(s), shared ? "_shared" : "_heads"), [=](OpRun& r) {
                       Tensors t{r, s, l};
                       KvSelect a{};
                       a.keep = r.index_out("keep", {count(s), s.kv_heads, l.max_keep});
                       a.score = r.in("score", t.score(), score), a.events = t.events(), a.work = l.work;
                       a.shared_heads = shared;
                       r.call(&Table::kv_select, a);
                     }});
  }
  Eviction recent = s;  // the newest only, without scores
  for (KvEvent& e : recent.events) e.recent = e.keep;
  const Layout l = lay_out(recent, 1);
  cases.push_back({"kv_select", name(s) + "_recent", [=](OpRun& r) {
                     Tensors t{r, recent, l};
                     KvSelect a{};
                     a.keep = r.index_out("keep", {count(s), s.kv_heads, l.max_keep});
                     a.events = t.events(), a.work = l.work;
                     r.call(&Table::kv_select, a);
                   }});
}

// Ascending slots of [first, slots), the recent ones among them: another choice for each head.
std::vector<int32_t> random_keep(const Eviction& s, const Layout& l) {
  std::vector<int32_t> keep(count(s) * s.kv_heads * l.max_keep, -1);
  for (const KvEvent& e : l.events)
    for (int64_t h = 0; h < s.kv_heads; h++) {
      const int32_t end = e.slots - e.recent;
      std::vector<int32_t> order(end - e.first), chosen;
      std::iota(order.begin(), order.end(), e.first);
      const auto swap = below(cat("keep", h, e.slots), end - e.first, end - e.first);
      for (size_t i = 0; i < order.size(); i++) std::swap(order[i], order[swap[i]]);
      order.resize(e.keep - e.recent);
      std::sort(order.begin(), order.end());
      for (int32_t i = end; i < e.slots; i++) order.push_back(i);
      std::copy(order.begin(), order.end(), keep.begin() + (e.keep_row * s.kv_heads + h) * l.max_keep);
    }
  return keep;
}

void add_compact(std::vector<OpCase>& cases, const Eviction& s) {
  // In place, all fresh pages (but those with protected slots), every other one fresh; with all that lies beside K, V.
  for (int fresh : {0, 1, 2})
    for (bool whole : {false, true}) {
      const Layout l = lay_out(s, 1);
      const std::vector<int32_t> dst = l.pages.destinations(l.events, fresh);
      const int32_t sinks =
          whole && std::all_of(s.events.begin(), s.events.end(), [](auto& e) { return e.first > 2; }) ? 3 : 0;
      cases.push_back({"kv_compact", cat(name(s), "_fresh", fresh, whole ? "_whole" : ""), [=](OpRun& r) {
                         Tensors t{r, s, l};
                         const int64_t n = l.pages.count, K = s.kv_heads, D = s.dim;
                         KvCompact a{};
                         a.k_pages = r.inout("k_pages", {n, K, D, 16}), a.v_pages = r.inout("v_pages", {n, K, 16, D});
                         a.pos_pages = r.index_inout("pos_pages", {n, K, 16}, l.pages.positions(K));
                         if (whole) a.mass_pages = r.inout("mass_pages", {n, K, 16});
                         a.keep = r.index("keep", {count(s), K, l.max_keep}, random_keep(s, l));
                         a.src_pages = t.src();
                         a.dst_pages = r.index("dst_pages", {count(s), l.pages.per_row}, dst, 1);
                         a.events = t.events(), a.work = l.work, a.sinks = sinks;
                         if (sinks) a.rope = r.in("rope", {l.max_slots, D});
                         r.call(&Table::kv_compact, a);
                         if (sinks) r.bound("k_pages", 4 * kRound * r.max_abs("k_pages"));
                       }});
    }
}

void add_merge(std::vector<OpCase>& cases, const Eviction& s) {
  struct Kind {
    const char* name;
    KvMergeKind kind;
    MergeKeys keys;
  };
  for (const Kind& m : {Kind{"cam", KvMergeKind::cam, MergeKeys::none},
                        {"d2o", KvMergeKind::d2o, MergeKeys::unrotated},
                        {"pivot", KvMergeKind::lookm_pivot, MergeKeys::unrotated},
                        {"pivot_values", KvMergeKind::lookm_pivot, MergeKeys::none},
                        {"value", KvMergeKind::value, MergeKeys::none}}) {
    const Layout l = lay_out(s, 1);
    const std::vector<int32_t> dst = l.pages.destinations(l.events, 2);
    cases.push_back({"kv_merge", cat(name(s), "_", m.name), [=](OpRun& r) {
                       Tensors t{r, s, l};
                       const int64_t n = l.pages.count, K = s.kv_heads, D = s.dim, E = count(s);
                       KvMerge a{};
                       a.compact.k_pages = r.inout("k_pages", {n, K, D, 16}, l.pages.keys("k", K, D));
                       a.compact.v_pages = r.inout("v_pages", {n, K, 16, D});
                       a.compact.pos_pages = r.index_inout("pos_pages", {n, K, 16}, l.pages.positions(K));
                       std::vector<double> mass = normal("mass", n * K * 16);
                       for (double& x : mass) x = std::fabs(x);
                       a.compact.mass_pages = r.inout("mass_pages", {n, K, 16}, mass);
                       a.compact.keep = r.index("keep", {E, K, l.max_keep}, random_keep(s, l));
                       a.compact.src_pages = t.src();
                       a.compact.dst_pages = r.index("dst_pages", {E, l.pages.per_row}, dst);
                       a.compact.events = t.events(), a.compact.work = l.work;
                       a.kind = m.kind, a.keys = m.keys;
                       a.links = r.scratch("links", {E, K, 2, l.pages.per_row * 16}, {});
                       a.merged = r.scratch("merged", {E, K, l.max_keep, 2 * D + 1}, {});
                       if (m.keys == MergeKeys::unrotated) a.rope = r.in("rope", {3 * l.max_slots + 3, D});
                       if (m.kind == KvMergeKind::d2o) {
                         std::vector<double> thresholds(E + 2, 0.25);
                         thresholds[E] = 0;
                         std::vector<int32_t> rows(E);
                         std::iota(rows.rbegin(), rows.rend(), 1);
                         a.threshold = r.inout("threshold", {E + 2}, thresholds);
                         a.threshold_row = r.index("threshold_row", {E}, rows), a.ema_old = 0.75f, a.ema_new = 0.5f;
                         r.bound("threshold", 4 * chain(double(D)));
                       }
                       a.uid = r.index("uid", {E, 2}, below("uid", 2 * E, 1000)), a.key = 77, a.targets = 3;
                       r.call(&Table::kv_merge, a);
                       // Averages, or sums of at most max_slots values of size 5; the weights are cosines.
                       const double error = 20 * chain(double(D)) + chain(double(l.max_slots)) * 20;
                       r.bound("v_pages", error * (1 + r.max_abs("v_pages")));
                       if (m.keys != MergeKeys::none) r.bound("k_pages", error * 60);
                     }});
  }
}

void add_mass(std::vector<OpCase>& cases) {
  struct Pass {
    std::string name;
    int64_t heads, kv_heads, dim;
    std::vector<std::array<int32_t, 3>> entries;  // new rows, slots, first
  };
  for (const Pass& s : {Pass{"first", 1, 1, 8, {{1, 1, 0}}},
                        {"decode", 4, 2, 32, {{1, 15, 0}, {1, 17, 5}, {1, 64, 20}, {1, 65, 64}}},
                        {"prefill", 2, 2, 64, {{33, 33, 0}, {17, 17, 16}}},
                        {"chunk", 14, 2, 20, {{5, 20, 3}, {0, 8, 0}, {33, 70, 40}}},
                        {"long", 2, 1, 64, {{19, 103, 40}}}}) {
    std::vector<int32_t> slots, queries, first;
    int64_t rows = 0, pairs = 0, all = 0;
    for (auto [r, n, f] : s.entries) {
      queries.insert(queries.end(), {int32_t(rows), r, n, int32_t(slots.size())});
      slots.push_back(n), first.push_back(f);
      rows += r, all += n, pairs += int64_t(r) * (n - r) + int64_t(r) * (r + 1) / 2;
    }
    const KvPages pages(slots);
    cases.push_back(
        {"attn_paged", cat("mass_", s.name, "_H", s.heads, "_K", s.kv_heads, "_D", s.dim), [=](OpRun& r) {
           const int64_t n = static_cast<int64_t>(s.entries.size());
           AttnPaged a{};
           a.o = r.out("o", {rows, s.heads, s.dim}), a.q = r.in("q", {rows, s.heads, s.dim}, 7);
           a.k_pages = r.in("k_pages", {pages.count, s.kv_heads, s.dim, 16}, pages.keys("k", s.kv_heads, s.dim));
           a.v_pages = r.in("v_pages", {pages.count, s.kv_heads, 16, s.dim});
           a.page_table = r.index("page_table", {n, pages.per_row}, pages.table, 2);
           a.queries = r.index("queries", {n, 4}, queries);
           a.pairs = pairs, a.slots = all, a.scale = static_cast<float>(1 / std::sqrt(double(s.dim)));
           a.mass_pages = r.inout("mass_pages", {pages.count, s.kv_heads, 16}), a.first = r.index("first", {n}, first);
           r.call(&Table::attn_paged, a);
           r.bound("o", softmax_error(s.dim, all) * 5);  // |v| < 5
           // At most one per row and head, on top of what was there.
           const double terms = double(rows * s.heads / s.kv_heads);
           r.bound("mass_pages", terms * probability_error(s.dim, all) + chain(terms) * (5 + terms));
         }});
  }
}

void add_copy_rows(std::vector<OpCase>& cases) {
  cases.push_back({"copy_rows", "C21", [](OpRun& r) {
                     const Tensor y = r.inout("y", {5, 21}, 2), x = r.in("x", {4, 21}, 9);
                     r.call(&Table::copy_rows, CopyRows{y, x, r.index("index", {3, 2}, {3, 0, 0, 4, 3, 2})});
                   }});
  cases.push_back({"copy_rows", "heads", [](OpRun& r) {
                     const Tensor y = r.inout("y", {3, 24}), x = r.in("x", {7, 3, 8}, 5);
                     r.call(&Table::copy_rows, CopyRows{y, x, r.index("index", {1, 2}, {6, 1})});
                   }});
  cases.push_back({"copy_rows", "in_place", [](OpRun& r) {
                     const Tensor y = r.inout("y", {6, 33}, 1);
                     r.call(&Table::copy_rows, CopyRows{y, y, r.index("index", {2, 2}, {1, 5, 3, 0})});
                   }});
  cases.push_back({"copy_rows", "tokens", [](OpRun& r) {
                     // Ids that are NaNs or denormal as floats keep their bits.
                     const Tensor y = r.index_inout("y", {5, 1}, {7, 8, 0x7f812345, 10, 11});
                     const Tensor x = r.index("x", {3, 1}, {-1, 5, 0x7fa00001});
                     r.call(&Table::copy_rows, CopyRows{y, x, r.index("index", {3, 2}, {2, 0, 0, 4, 1, 3})});
                   }});
}

}  // namespace

void add_kv_cases(std::vector<OpCase>& cases) {
  add_copy_rows(cases);
  add_mass(cases);
  for (const Eviction& s : kEvictions)
    for (auto add : {add_window_scores, add_redundancy, add_mass_scores, add_select, add_compact, add_merge})
      add(cases, s);
}

}  // namespace pare::test
