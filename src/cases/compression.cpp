// Compressions: scores of slots, the choice of those that stay, and their moving together.
#include "cases/compression.h"

#include "ops/compression.h"

namespace pare::cases {

namespace {

Tensor keys(Operands& o, const Dims& d, const Compressions& v) {
  return o.in("k_pages", v.pages.k(d), v.pages.present());
}

Call kv_window_scores(Operands& o, const Dims& d) {
  const Compressions v(d);
  KvWindowScores a{};
  a.score = o.stat_out("score", v.score(d));
  a.windows = o.in("windows", {v.window_rows, d["H"], d["D"]}, v.regular ? 0 : 5);
  if (v.window > 1) {
    std::vector<int32_t> oldest(v.list.size());
    for (size_t i = 0; i < oldest.size(); i++) oldest[i] = static_cast<int32_t>((i + 1) * 2 % v.window);
    a.window_first = o.index("window_first", {v.count()}, oldest);
  }
  a.k_pages = keys(o, d, v);
  a.src_pages = v.put_pages(o);
  a.compressions = v.put_compressions(o);
  a.work = v.work;
  a.window = v.window;
  a.aggregate = static_cast<GqaAgg>(d["aggregate"]);
  a.span = static_cast<SoftmaxSpan>(d["span"]);
  a.pool = static_cast<Pool>(d["pool"]);
  a.kernel = d.i32("kernel");
  a.scale = scale(d);
  return a;
}

Call kv_redundancy(Operands& o, const Dims& d) {
  const Compressions v(d);
  KvRedundancy a{};
  a.score = o.stat_inout("score", v.score(d));
  a.k_pages = keys(o, d, v);
  a.src_pages = v.put_pages(o);
  a.compressions = v.put_compressions(o);
  a.work = v.work;
  a.lambda = 0.25f;
  a.threshold = 0.31f;
  a.workspace = o.stat_scratch("workspace", {v.count(), d["K"], 4, v.pages.per_row * kPageSlots});
  return a;
}

Call kv_mass_scores(Operands& o, const Dims& d) {
  const Compressions v(d);
  KvMassScores a{};
  a.score = o.stat_out("score", v.score(d));
  a.mass_pages = o.stat_in("mass_pages", v.pages.beside(d), positive());
  a.src_pages = v.put_pages(o);
  a.compressions = v.put_compressions(o);
  a.work = v.work;
  return a;
}

// Many scores are equal, and sums over heads are exact.
Call kv_select(Operands& o, const Dims& d) {
  Compressions v(d);
  if (d["recent"])
    for (KvCompression& e : v.list) e.recent = e.keep;
  v.work = kv_work(v.list.data(), v.count());
  KvSelect a{};
  a.keep = o.index_out("keep", {v.count(), d["K"], v.most_kept});
  if (!d["recent"]) a.score = o.stat_in("score", v.score(d), rounded(1, 8));
  a.compressions = v.put_compressions(o);
  a.work = v.work;
  a.shared_heads = d["shared"];
  return a;
}

Call kv_compact(Operands& o, const Dims& d) { return compact(o, d, Compressions(d), {}, d["fresh"], d["mass"]); }

}  // namespace

KvCompact compact(Operands& o, const Dims& d, const Compressions& v, const Fill& k, int64_t fresh, bool mass) {
  KvCompact a{};
  a.k_pages = k.values ? o.inout("k_pages", v.pages.k(d), k) : o.inout("k_pages", v.pages.k(d));
  a.v_pages = o.inout("v_pages", v.pages.v(d));
  std::vector<int32_t> pos = v.pages.positions(d["K"]);
  for (size_t i = 0; v.regular && i < pos.size(); i++) pos[i] = static_cast<int32_t>(i % kPageSlots);
  a.pos_pages = o.index_inout("pos_pages", v.pages.beside(d), pos);
  if (mass) a.mass_pages = o.stat_inout("mass_pages", v.pages.beside(d), positive());
  a.keep = v.put_keep(o, d);
  a.src_pages = a.dst_pages = v.put_pages(o);
  if (!v.regular)
    a.dst_pages = o.index("dst_pages", {v.count(), v.pages.per_row}, v.pages.destinations(v.list, fresh), 1);
  a.compressions = v.put_compressions(o);
  a.work = v.work;
  return a;
}

std::vector<OpCase> compression_cases() {
  const std::vector<Dim> dims = compression_dims();
  const std::vector<std::string> sizes = compression_sizes();
  // Query heads of each key head: 1, 2, 3 or 7.
  std::vector<std::string> windows;
  for (size_t i = 0; i < sizes.size(); i++) windows.push_back(cat(sizes[i], ",H=", std::array{1, 4, 2, 6, 14}[i]));
  return {
      {"kv_window_scores",
       dims + std::vector<Dim>{kHeads,
                               {"kernel", 7, "slots of a pooling window, odd"},
                               edge("aggregate", "0 largest logit, 1 mean logit, 2 mean probability"),
                               edge("span", "1: the softmax includes the window"),
                               edge("pool", "1: mean")},
       with(windows, {"window=3,kernel=1", "window=8,kernel=7", "window=3,kernel=5,aggregate=1,span=1,pool=1",
                      "window=3,kernel=3,aggregate=2,span=1", "window=1,kernel=33,aggregate=2,pool=1"}),
       kv_window_scores},
      {"kv_redundancy", dims, sizes, kv_redundancy},
      {"kv_mass_scores", dims, sizes, kv_mass_scores},
      {"kv_select",
       dims + std::vector{edge("shared", "1: one choice for all heads"), edge("recent", "1: the newest stay")},
       with(sizes, {"", "shared=1", "recent=1"}), kv_select},
      // In place, all fresh pages (but those with protected slots), every other one fresh.
      {"kv_compact",
       dims + std::vector{edge("fresh", "pages after the compression: 0 as before, 1 new ones, 2 every other one new"),
                          edge("mass", "1: with the attention received")},
       with(with(sizes, {"fresh=0", "fresh=1", "fresh=2"}), {"", "mass=1"}), kv_compact}};
}

}  // namespace pare::cases
