// The CUDA kernels of a cache that evicts: values against `ref` in double, in f32 and bf16; and
// bits.  In f32 they have those of `cpu`.  Where nothing is multiplied, bf16 pages that hold the same numbers give the
// same ones; of products by tensor cores test_cuda_compression.cpp states the bits.
//
// (test_ops.cpp runs the same kernels in f32 on small shapes; these have more slots than a tile.)
#include <algorithm>
#include <limits>
#include <numeric>

#include "kernel_call.h"
#include "kv_pages.h"
#include "ops/merge.h"

namespace pare::test {
namespace {

using kernel::Body;
using kernel::Call;
using kernel::check;
using kernel::from_bf16;
using kernel::refusal;
using kernel::to_bf16;

float rounded(double x) { return from_bf16(to_bf16(static_cast<float>(x))); }

// In f32 the bits of `cpu`.
void check_f32_bits(const Body& body) {
  Call cpu(table_cpu, DType::f32), f32(table_kernels, DType::f32);
  body(cpu), body(f32);
  for (const auto& [name, is] : f32.all()) EXPECT_EQ(is->bits(), cpu[name].bits()) << name;
}
// And in bf16 those of f32, activations rounded.
void check_bits(const Body& body) {
  check_f32_bits(body);
  Call f32(table_kernels, DType::f32), bf16(table_kernels, DType::bf16);
  body(f32), body(bf16);
  for (const auto& [name, is] : f32.all()) {
    if (is->tensor().dtype == bf16[name].tensor().dtype) {
      EXPECT_EQ(is->bits(), bf16[name].bits()) << name << " of bf16 pages";
      continue;
    }
    for (int64_t i = 0; i < is->size(); i++) {
      const double should = is->get(i), got = bf16[name].get(i);
      if (std::isnan(should) && std::isnan(got)) continue;  // left alone
      ASSERT_EQ(got, rounded(should)) << name << "[" << i << "] of bf16 pages";
    }
  }
}

struct Scene {
  int64_t heads, kv_heads, d;
  std::vector<KvCompression> compressions;  // window_row: set by the constructor
  int32_t window;
  KvPages pages{};
  KvWork work{};
  int64_t max_slots = 0, max_keep = 0;

  Scene(int64_t heads, int64_t kv_heads, int64_t d, std::vector<KvCompression> list, int32_t window = 1)
      : heads(heads), kv_heads(kv_heads), d(d), compressions(std::move(list)), window(window) {
    std::vector<int32_t> slots;
    for (KvCompression& e : compressions) {
      e.window_row = static_cast<int32_t>(slots.size()) * window;
      slots.push_back(e.slots);
      max_slots = std::max<int64_t>(max_slots, e.slots), max_keep = std::max<int64_t>(max_keep, e.keep);
    }
    pages = KvPages(slots);
    work = kv_work(compressions.data(), count());
  }
  int64_t count() const { return static_cast<int64_t>(compressions.size()); }
  float scale() const { return 1 / std::sqrt(static_cast<float>(d)); }

  // Pages of which the slots in use have values that bf16 holds, functions of (compression, slot), and the rest none.
  // at(page, head, place, c): index of element c.
  template <class At>
  void fill(Call& t, const std::string& name, int64_t width, At at) const {
    auto& buffer = t[name];
    for (int64_t i = 0; i < count(); i++)
      for (int32_t s = 0; s < compressions[i].slots; s++) {
        const auto v = normal(cat(name, i, "_", s), kv_heads * width);
        for (int64_t h = 0; h < kv_heads; h++)
          for (int64_t c = 0; c < width; c++) buffer.set(at(pages.page(i, s), h, s % 16, c), rounded(v[h * width + c]));
      }
  }
  Tensor k_pages(Call& t) const {
    const Tensor k = t.act_out("k_pages", {pages.count, kv_heads, d, 16});
    fill(t, "k_pages", d,
         [&](int64_t p, int64_t h, int64_t s, int64_t c) { return ((p * kv_heads + h) * d + c) * 16 + s; });
    return k;
  }
  Tensor v_pages(Call& t) const {
    const Tensor v = t.act_out("v_pages", {pages.count, kv_heads, 16, d});
    fill(t, "v_pages", d,
         [&](int64_t p, int64_t h, int64_t s, int64_t c) { return ((p * kv_heads + h) * 16 + s) * d + c; });
    return v;
  }
  // A positive number a slot.
  Tensor slot_array(Call& t, const std::string& name) const {
    const Tensor x = t.stat_out(name, {pages.count, kv_heads, 16});
    fill(t, name, 1, [&](int64_t p, int64_t h, int64_t s, int64_t) { return (p * kv_heads + h) * 16 + s; });
    for (int64_t i = 0; i < t[name].size(); i++)
      if (const double v = t[name].get(i); !std::isnan(v)) t[name].set(i, std::fabs(v) + 0.5);
    return x;
  }
  Tensor pos_pages(Call& t) const {
    return t.index("pos_pages", {pages.count, kv_heads, 16}, pages.positions(kv_heads));
  }
  Tensor src_pages(Call& t) const { return t.index("src_pages", {count(), pages.per_row}, pages.table); }
  Tensor dst_pages(Call& t, int fresh) const {
    return t.index("dst_pages", {count(), pages.per_row}, pages.destinations(compressions, fresh));
  }
  Tensor compression_list(Call& t) const { return t.index("compressions", {count(), 5}, flat(compressions)); }
  // Scores of the candidates, functions of (compression, head, slot).
  Tensor scores(Call& t) const {
    const Tensor x = t.stat_out("score", {count(), kv_heads, max_slots});
    auto& buffer = t["score"];
    for (int64_t i = 0; i < count() * kv_heads; i++) {
      const KvCompression& e = compressions[i / kv_heads];
      const auto v = normal(cat("score", i), e.slots);
      for (int32_t s = e.first; s < e.slots - e.recent; s++) buffer.set(i * max_slots + s, v[s]);
    }
    return x;
  }
  // Ascending slots of [first, slots), the recent ones among them: another choice for each head.
  Tensor keep(Call& t) const {
    std::vector<int32_t> keep(count() * kv_heads * max_keep, -1);
    for (int64_t i = 0; i < count(); i++)
      for (int64_t h = 0; h < kv_heads; h++) {
        const KvCompression& e = compressions[i];
        std::vector<int32_t> slots(e.slots - e.first);
        std::iota(slots.begin(), slots.end(), e.first);
        const auto swap =
            below(cat("keep", h, e.slots), static_cast<int64_t>(slots.size()), e.slots - e.first - e.recent);
        for (size_t s = 0; s + e.recent < slots.size(); s++) std::swap(slots[s], slots[swap[s]]);
        slots.erase(slots.begin() + e.keep - e.recent, slots.end() - e.recent);
        std::sort(slots.begin(), slots.end());
        std::copy(slots.begin(), slots.end(), keep.begin() + (i * kv_heads + h) * max_keep);
      }
    return t.index("keep", {count(), kv_heads, max_keep}, keep);
  }
};

// ---- scores

struct WindowSpec {
  GqaAgg aggregate;
  SoftmaxSpan span;
  Pool pool;
  int32_t kernel;
};
void window_scores(Call& t, const Scene& s, const WindowSpec& w) {
  KvWindowScores a{};
  a.score = t.stat_out("score", {s.count(), s.kv_heads, s.max_slots});
  a.windows = t.act("windows", {s.count() * s.window, s.heads, s.d}, 3);
  if (s.window > 1)
    a.window_first = t.index("window_first", {s.count()}, std::vector<int32_t>(s.count(), s.window - 1));
  a.k_pages = s.k_pages(t), a.src_pages = s.src_pages(t), a.compressions = s.compression_list(t), a.work = s.work;
  a.window = s.window, a.aggregate = w.aggregate, a.span = w.span, a.pool = w.pool, a.kernel = w.kernel;
  a.scale = s.scale();
  t.table.kv_window_scores(a, {});
}

TEST(CudaKv, WindowScores) {
  const auto max = GqaAgg::max_logit, mean = GqaAgg::mean_logit, prob = GqaAgg::mean_prob;
  const auto exclude = SoftmaxSpan::exclude_window, include = SoftmaxSpan::include_window;
  const Scene small(6, 2, 24, {{45, 3, 9, 12, 0}, {16, 0, 9, 9, 0}, {33, 17, 9, 10, 0}}, 9);
  for (const WindowSpec& w :
       {WindowSpec{max, exclude, Pool::max, 7}, {mean, include, Pool::avg, 5}, {prob, include, Pool::max, 1}})
    check([&](Call& t) { window_scores(t, small, w); }, 0, w.kernel == 7);
  // Several tiles of 256 slots; as many heads a key head as can be; pools wider than a tile.
  const Scene large(16, 1, 40, {{601, 37, 6, 12, 0}, {258, 0, 3, 3, 0}}, 3);
  for (const WindowSpec& w :
       {WindowSpec{max, exclude, Pool::max, 513}, {mean, include, Pool::max, 1}, {prob, include, Pool::avg, 301}}) {
    check([&](Call& t) { window_scores(t, large, w); }, 0, false);
    check_f32_bits([&](Call& t) { window_scores(t, large, w); });
  }
}

void redundancy(Call& t, const Scene& s) {
  KvRedundancy a{};
  a.score = s.scores(t), a.k_pages = s.k_pages(t), a.src_pages = s.src_pages(t), a.compressions = s.compression_list(t);
  a.work = s.work, a.lambda = 0.25f, a.threshold = 0.31f;
  a.workspace = t.stat_scratch({s.count(), s.kv_heads, 4, s.pages.per_row * 16});
  t.table.kv_redundancy(a, {});
}

TEST(CudaKv, Redundancy) {
  const Scene small(1, 2, 24, {{45, 3, 9, 12, 0}, {16, 16, 0, 0, 0}, {65, 17, 0, 10, 0}});
  const Scene large(1, 1, 40, {{301, 37, 6, 12, 0}});
  check([&](Call& t) { redundancy(t, small); });
  check([&](Call& t) { redundancy(t, large); }, 0, false);
  check_f32_bits([&](Call& t) { redundancy(t, large); });
}

// entries: (new rows, slots, first).
void mass(Call& t, int64_t heads, int64_t kv_heads, int64_t d, const std::vector<std::array<int32_t, 3>>& entries) {
  std::vector<KvCompression> slots;
  std::vector<int32_t> queries, first;
  int64_t rows = 0, pairs = 0, all = 0;
  for (auto [r, n, f] : entries) {
    queries.insert(queries.end(), {int32_t(rows), r, n, int32_t(slots.size())});
    slots.push_back({n, 0, 0, 0, 0}), first.push_back(f);
    rows += r, all += n, pairs += int64_t(r) * (n - r) + int64_t(r) * (r + 1) / 2;
  }
  const Scene s(heads, kv_heads, d, slots);
  AttnPaged a{};
  a.mass_pages = s.slot_array(t, "mass_pages"), a.first = t.index("first", {s.count()}, first);
  a.o = t.act_out("o", {rows, heads, d}), a.q = t.act("q", {rows, heads, d}, 8);
  a.k_pages = s.k_pages(t), a.v_pages = s.v_pages(t), a.page_table = s.src_pages(t);
  a.queries = t.index("queries", {s.count(), 4}, queries);
  a.weights = t.stat_scratch({a.mass_pages.shape[0], kv_heads, heads / kv_heads + 1, 16});
  a.pairs = pairs, a.slots = all, a.scale = s.scale();
  t.table.attn_paged(a, {});
}

// In bf16 the weights are within 1.02e-4 of theirs.
TEST(CudaKv, Mass) {
  for (const Body& body : {Body([](Call& t) {
                             mass(t, 6, 2, 24, {{1, 40, 17}, {9, 20, 3}, {5, 5, 0}, {1, 1, 0}});
                           }),
                           Body([](Call& t) {
                             mass(t, 3, 1, 20, {{1, 530, 5}, {23, 300, 16}});
                           })}) {
    check_f32_bits(body);
    Call ref(table_ref, DType::f64);
    body(ref);
    const kernel::Buffer& should = ref["mass_pages"];
    std::string first;
    in_all_orders([&] {
      Call bf16(table_kernels, DType::bf16);
      body(bf16);
      const kernel::Buffer& is = bf16["mass_pages"];
      EXPECT_TRUE(bf16.zones_intact());
      if (first.empty()) first = is.bits();
      EXPECT_EQ(is.bits(), first);
      for (int64_t i = 0; i < is.size(); i++)
        if (!std::isnan(is.get(i)) || !std::isnan(should.get(i))) {
          ASSERT_NEAR(is.get(i), should.get(i), 2e-4 * should.get(i)) << i;
        }
    });
  }
}

TEST(CudaKv, MassScores) {
  const Scene s(1, 3, 8, {{300, 5, 9, 12, 0}, {16, 16, 0, 0, 0}});
  const Body body = [&](Call& t) {
    KvMassScores a{};
    a.score = t.stat_out("score", {s.count(), s.kv_heads, s.max_slots}), a.mass_pages = s.slot_array(t, "mass_pages");
    a.src_pages = s.src_pages(t), a.compressions = s.compression_list(t), a.work = s.work;
    t.table.kv_mass_scores(a, {});
  };
  check(body, 0, false);
  check_bits(body);
}

// ---- choice

// Many slots and many that are equal.
TEST(CudaKv, SelectAmongManyTies) {
  const float inf = std::numeric_limits<float>::infinity(), tiny = std::numeric_limits<float>::denorm_min();
  const std::vector<std::vector<float>> values = {{0.f},
                                                  {0.f, -0.f},
                                                  {1.f, -1.f},
                                                  {tiny, -tiny, 0.f, -0.f},
                                                  {inf, -inf, 2.f, 3.f, -2.f},
                                                  {1.f, 1.0000001f, 1.0000002f}};
  const Scene s(1, 2, 8, {{2500, 3, 5, 700, 0}, {300, 0, 0, 299, 0}, {270, 4, 8, 9, 0}, {260, 1, 2, 259, 0}});
  for (size_t which = 0; which < values.size(); which++)
    for (bool shared : {false, true}) {
      const Body body = [&](Call& t) {
        const Tensor score = s.scores(t);
        auto& buffer = t["score"];
        const auto pick = below(cat("pick", which), buffer.size(), static_cast<int64_t>(values[which].size()));
        for (int64_t i = 0; i < buffer.size(); i++)
          if (!std::isnan(buffer.get(i))) buffer.set(i, values[which][pick[i]]);
        t.table.kv_select({.keep = t.index("keep", {4, 2, s.max_keep + 1}, {}),
                           .score = score,
                           .compressions = s.compression_list(t),
                           .work = s.work,
                           .shared_heads = shared},
                          {});
      };
      if (!shared || which != 4) check_bits(body);  // a sum of infinities is NaN
      if (!shared && which == 3) check(body);
    }
}

TEST(CudaKv, SelectAmongManyThousands) {
  const Scene s(1, 1, 8, {{20011, 17, 8, 4096, 0}});
  check(
      [&](Call& t) {
        t.table.kv_select({.keep = t.index("keep", {1, 1, s.max_keep}, {}),
                           .score = s.scores(t),
                           .compressions = s.compression_list(t),
                           .work = s.work,
                           .shared_heads = false},
                          {});
      },
      0, false);
}

// ---- compaction

void compact(Call& t, const Scene& s, int fresh) {
  KvCompact a{};
  a.k_pages = s.k_pages(t), a.v_pages = s.v_pages(t), a.pos_pages = s.pos_pages(t);
  a.mass_pages = s.slot_array(t, "mass_pages");
  a.keep = s.keep(t), a.src_pages = s.src_pages(t), a.dst_pages = s.dst_pages(t, fresh);
  a.compressions = s.compression_list(t), a.work = s.work;
  t.table.kv_compact(a, {});
}

// In place over many rounds of 64 slots, most of them moving a little or not at all; V in packs and in elements.
TEST(CudaKv, CompactMovesBits) {
  for (int64_t d : {32, 20})
    for (int32_t kept : {290, 150, 7}) {
      const Scene s(1, 1, d, {{311, 5, 6, kept, 0}, {80, 0, 3, 7, 0}});
      for (int fresh : {0, 2}) check_bits([&](Call& t) { compact(t, s, fresh); });
    }
}

// ---- merging

void merge(Call& t, const Scene& s, KvMergeKind kind, MergeKeys keys) {
  KvMerge a{};
  KvCompact& c = a.compact;
  c.k_pages = s.k_pages(t), c.v_pages = s.v_pages(t), c.pos_pages = s.pos_pages(t);
  c.mass_pages = s.slot_array(t, "mass_pages");
  c.keep = s.keep(t), c.src_pages = s.src_pages(t), c.dst_pages = s.dst_pages(t, 2);
  c.compressions = s.compression_list(t), c.work = s.work;
  a.kind = kind, a.keys = keys;
  a.links = t.stat_scratch({s.count(), s.kv_heads, 2, s.pages.per_row * 16});
  a.merged = t.stat_scratch({s.count(), s.kv_heads, s.max_keep, 2 * s.d + 1});
  if (keys == MergeKeys::unrotated) a.rope = t.stat("rope", {3 * s.max_slots + 3, s.d});
  if (kind == KvMergeKind::d2o) {
    a.threshold = t.stat_out("threshold", {s.count()});
    for (int64_t i = 0; i < s.count(); i++)
      t["threshold"].set(i, i % 2 ? 0.125 : 0);  // the first compression; a later one
    std::vector<int32_t> rows(s.count());
    std::iota(rows.rbegin(), rows.rend(), 0);
    a.threshold_row = t.index("threshold_row", {s.count()}, rows), a.ema_old = 0.75f, a.ema_new = 0.25f;
  }
  t.table.kv_merge(a, {});
}

TEST(CudaKv, Merge) {
  struct Kind {
    KvMergeKind kind;
    MergeKeys keys;
  };
  // Nothing is evicted from the second one; more than 64 slots go from the last one, and more than 64 stay.
  const Scene s(1, 2, 24, {{50, 3, 4, 17, 0}, {30, 7, 2, 23, 0}, {20, 0, 0, 1, 0}});
  const Scene large(1, 1, 70, {{211, 5, 8, 97, 0}});
  for (const Kind& m : {Kind{KvMergeKind::d2o, MergeKeys::unrotated},
                        {KvMergeKind::d2o, MergeKeys::none},
                        {KvMergeKind::value, MergeKeys::none}}) {
    check([&](Call& t) { merge(t, s, m.kind, m.keys); }, 0, m.kind == KvMergeKind::d2o);
    check_f32_bits([&](Call& t) { merge(t, s, m.kind, m.keys); });
    check([&](Call& t) { merge(t, large, m.kind, m.keys); }, 0, false);
    check_f32_bits([&](Call& t) { merge(t, large, m.kind, m.keys); });
  }
}

// ---- independence

// Everything about a compression depends on that compression alone: scores, choice and what lies in the slots
// afterwards are the same whatever the other compressions and the pages are.
TEST(CudaKv, CompressionsAreIndependent) {
  const KvCompression one{90, 5, 6, 40, 0};
  for (DType act : {DType::f32, DType::bf16}) {
    std::string first;
    for (const std::vector<KvCompression>& compressions :
         {std::vector<KvCompression>{one}, {one, {33, 16, 8, 9, 0}, {300, 0, 9, 20, 0}}}) {
      const Scene s(4, 2, 24, compressions, 6);
      Call t(table_kernels, act), r(table_kernels, act), c(table_kernels, act);
      window_scores(t, s, {GqaAgg::max_logit, SoftmaxSpan::exclude_window, Pool::max, 7});
      redundancy(r, s);
      compact(c, s, 0);
      std::string bits;
      for (int64_t h = 0; h < 2; h++)
        for (Call* x : {&t, &r}) bits += (*x)["score"].bits(h * s.max_slots, h * s.max_slots + one.slots);
      for (int32_t slot = 0; slot < one.first + one.keep; slot++)
        for (int64_t h = 0; h < 2; h++) {
          const int64_t at = (s.pages.page(0, slot) * 2 + h) * 16 + slot % 16;
          bits += c["v_pages"].bits(at * s.d, (at + 1) * s.d) + c["pos_pages"].bits(at, at + 1);
        }
      if (first.empty()) first = bits;
      EXPECT_EQ(bits, first);
    }
  }
}

TEST(CudaKv, UnsupportedArgumentsAreNamed) {
  const KvCompression compression{20, 0, 2, 9, 0};
  const WindowSpec spec{GqaAgg::max_logit, SoftmaxSpan::exclude_window, Pool::max, 1};
  WindowSpec far = spec;
  far.kernel = 515;
  EXPECT_EQ(refusal(DType::f32, [&](Call& t) { window_scores(t, Scene(4, 2, 8, {compression}, 2), far); }),
            "kv_window_scores: kernel is 515, expected at most 513");
  EXPECT_EQ(refusal(DType::f32, [&](Call& t) { window_scores(t, Scene(34, 2, 8, {compression}), spec); }),
            "kv_window_scores: 34 query heads over 2 key heads; at most 16 can share one");
  EXPECT_EQ(refusal(DType::f32, [&](Call& t) { redundancy(t, Scene(1, 1, 257, {compression})); }),
            "kv_redundancy: head_dim 257 is not in [1, 256]");
}

}  // namespace
}  // namespace pare::test
