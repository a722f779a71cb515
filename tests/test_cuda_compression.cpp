// Scores of compressions in bf16 (ops/compression.h) and the attention that slots receive (ops/paged.h): products of
// tensor cores, and the sums over them, against a plain statement of their order, bit for bit; and which slots stay,
// against f32.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "exponentials.h"
#include "kernel_call.h"
#include "kv_pages.h"
#include "ops/merge.h"
#include "ptx_kernels.h"

namespace pare::test {
namespace {

using kernel::Call;
using kernel::exp2_accurate;
using kernel::exp2_cubic;

using Rows = std::vector<std::vector<float>>;

// Rows that bf16 holds.
Rows vectors(const std::string& name, int64_t count, int64_t d) {
  const auto v = normal(name, count * d);
  Rows r(count, std::vector<float>(d));
  for (int64_t i = 0; i < count * d; i++) r[i / d][i % d] = from_bf16(to_bf16(static_cast<float>(v[i])));
  return r;
}

// left[i] . right[j]: a chain of steps of 16 products on tensor cores, channels ascending, those beyond the last zero.
Rows dots(const Rows& left, const Rows& right) {
  const int64_t d = std::ssize(left[0]), m = std::ssize(left), n = std::ssize(right);
  const int64_t down = (m + 15) / 16, across = (n + 7) / 8, tiles = down * across;
  Call t(table_kernels, DType::bf16);
  const Tensor a = t.act_out("a", {tiles, 16, 16}), b = t.act_out("b", {tiles, 8, 16});
  const Tensor sum = t.stat_out("sum", {tiles, 16, 8});
  Buffer& is = t["sum"];
  for (int64_t i = 0; i < is.size(); i++) is.set(i, 0);
  for (int64_t k = 0; k < d; k += 16) {
    const auto fill = [&](const char* name, const Rows& from, int64_t height, auto first_of) {
      Buffer& to = t[name];
      for (int64_t i = 0; i < to.size(); i++) {
        const int64_t row = first_of(i / (16 * height)) + i / 16 % height, c = k + i % 16;
        to.set(i, row < std::ssize(from) && c < d ? from[row][c] : 0);
      }
    };
    fill("a", left, 16, [&](int64_t tile) { return tile / across * 16; });
    fill("b", right, 8, [&](int64_t tile) { return tile % across * 8; });
    ptx::multiply(sum.as<float>(), static_cast<const uint16_t*>(a.data), static_cast<const uint16_t*>(b.data),
                  static_cast<int>(tiles));
  }
  const Buffer& sums = t["sum"];  // waits
  Rows z(m, std::vector<float>(n));
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++)
      z[i][j] = static_cast<float>(sums.get((i / 16 * across + j / 8) * 128 + i % 16 * 8 + j % 8));
  return z;
}

// dot * (1 / |left| * 1 / |right|)
Rows cosines(const Rows& left, const Rows& right) {
  const auto inverse = [](const std::vector<float>& k) {
    float sum = 0;
    for (float x : k) sum = std::fma(x, x, sum);
    return 1.f / (std::sqrt(sum) + 1e-8f);
  };
  Rows z = dots(left, right);
  for (size_t i = 0; i < left.size(); i++)
    for (size_t j = 0; j < right.size(); j++) z[i][j] *= inverse(left[i]) * inverse(right[j]);
  return z;
}

// One compression of one key head.
struct Scene {
  KvCompression compression;
  Rows keys, queries;  // [slots], [window * heads]
  int64_t heads = 1;
  KvPages pages = KvPages({compression.slots, 40});  // of the other sequence nothing is used

  int64_t d() const { return std::ssize(keys[0]); }
  int32_t window() const { return static_cast<int32_t>(std::ssize(queries) / heads); }
  KvWork work() const { return kv_work(&compression, 1); }
  Tensor compressions(Call& t) const { return t.index("compressions", {1, 5}, flat(std::vector{compression})); }
  Tensor src_pages(Call& t) const {
    return t.index("src_pages", {1, pages.per_row}, {pages.table.begin(), pages.table.begin() + pages.per_row});
  }
  Tensor k_pages(Call& t) const {
    const Tensor k = t.act_out("k_pages", {pages.count, 1, d(), 16});
    Buffer& to = t["k_pages"];
    for (int32_t s = 0; s < compression.slots; s++)
      for (int64_t c = 0; c < d(); c++) to.set((pages.page(0, s) * d() + c) * 16 + s % 16, keys[s][c]);
    return k;
  }
};

void window_scores(Call& t, const Scene& s, GqaAgg aggregate, SoftmaxSpan span, int32_t kernel, float scale) {
  KvWindowScores a{};
  a.score = t.stat_out("score", {1, 1, s.compression.slots});
  a.windows = t.act_out("windows", {s.window(), s.heads, s.d()});
  for (int64_t i = 0; i < a.windows.size(); i++) t["windows"].set(i, s.queries[i / s.d()][i % s.d()]);
  a.k_pages = s.k_pages(t);
  a.src_pages = s.src_pages(t);
  a.compressions = s.compressions(t);
  a.work = s.work();
  a.window = s.window();
  a.aggregate = aggregate;
  a.span = span;
  a.pool = Pool::max;
  a.kernel = kernel;
  a.scale = scale;
  t.table.kv_window_scores(a, {});
}

// The score that is there is changed.
void redundancy(Call& t, const Scene& s, float lambda, float threshold) {
  KvRedundancy a{};
  a.score = t["score"].tensor();
  a.k_pages = s.k_pages(t);
  a.src_pages = s.src_pages(t);
  a.compressions = s.compressions(t);
  a.work = s.work();
  a.lambda = lambda;
  a.threshold = threshold;
  a.workspace = t.stat_out("workspace", {1, 1, 4, s.pages.per_row * 16});
  t.table.kv_redundancy(a, {});
}

const std::pair<int64_t, KvCompression> kCases[] = {{20, {301, 37, 6, 160, 0}}, {64, {150, 5, 9, 20, 0}},
                                                    {80, {64, 0, 3, 3, 0}},     {128, {150, 5, 9, 90, 0}},
                                                    {128, {420, 3, 5, 130, 0}}, {256, {301, 37, 6, 160, 0}}};

TEST(CudaCompressions, RedundancyIsOfTensorCoreProductsInFourChains) {
  const float threshold = 0.12f;
  for (const auto& [d, e] : kCases) {
    const Scene s{e, vectors("keys", e.slots, d), {}};
    Call t(table_kernels, DType::bf16);
    t.stat("score", {1, 1, e.slots});
    redundancy(t, s, 0.25f, threshold);
    const Rows z = cosines(s.keys, s.keys);
    const auto similarity = [&](int i, int j) { return i == j ? 0.f : z[i][j]; };
    std::vector<float> sum(e.slots), similar(e.slots);
    std::vector<int> last(e.slots);
    int found = 0;
    for (int j = e.first; j < e.slots; j++) {
      float chain[4] = {};
      for (int i = e.first; i < e.slots; i++) {
        const float x = similarity(i, j);
        chain[i % 8 / 2] += x;
        if (x > threshold || i == e.first) {
          last[j] = i;
          similar[j] = x;
        }
      }
      sum[j] = (chain[0] + chain[1]) + (chain[2] + chain[3]);
      found += similar[j] > threshold;
    }
    EXPECT_GT(found, e.slots / 2) << "a threshold that means something";
    for (int j = e.first; j < e.slots; j++) {
      float r = sum[j];
      for (int i = e.first; i < e.slots; i++)
        if (last[i] == j) r -= similar[i];
      const auto is = [&](int row) { return static_cast<float>(t["workspace"].get(row * s.pages.per_row * 16 + j)); };
      const std::string where = cat("slot ", j, " of ", e.slots, " with ", d, " channels");
      ASSERT_EQ(is(0), sum[j]) << where;
      ASSERT_EQ(is(1), last[j]) << where;
      ASSERT_EQ(is(2), similar[j]) << where;
      ASSERT_EQ(is(3), r / static_cast<float>(e.slots - e.first)) << where;
    }
  }
}

// Logits that are chains of tensor-core products, and from there on f32: keys that are the logits themselves, of which
// each query has a channel, give the same scores.
TEST(CudaCompressions, WindowScoresAreOfTensorCoreProducts) {
  for (const auto& [d, e] : kCases)
    for (const auto& [aggregate, span] : {std::pair{GqaAgg::max_logit, SoftmaxSpan::exclude_window},
                                          {GqaAgg::mean_logit, SoftmaxSpan::include_window},
                                          {GqaAgg::mean_prob, SoftmaxSpan::include_window}}) {
      const int64_t heads = 6, queries = heads * e.recent;
      const float scale = 1 / std::sqrt(static_cast<float>(d));
      const Scene s{e, vectors("keys", e.slots, d), vectors("queries", queries, d), heads};
      Call t(table_kernels, DType::bf16);
      window_scores(t, s, aggregate, span, 5, scale);
      Rows logits = dots(s.keys, s.queries), channels(queries, std::vector<float>(queries));
      for (auto& row : logits)
        for (float& x : row) x *= scale;
      for (int64_t i = 0; i < queries; i++) channels[i][i] = 1;
      Call f32(table_cpu, DType::f32);
      window_scores(f32, {e, logits, channels, heads}, aggregate, span, 5, 1);
      ASSERT_EQ(t["score"].bits(), f32["score"].bits()) << e.slots << " slots, " << d << " channels";
    }
}

TEST(CudaCompressions, TheNearestKeptSlotIsByTensorCoreProducts) {
  for (const auto& [d, e] : kCases) {
    Scene s{e, vectors("keys", e.slots, d), {}};
    for (int i = 0; i < e.slots; i++) s.keys[i] = s.keys[i - i % 3];  // ties
    std::vector<int32_t> keep(e.slots - e.first);
    std::iota(keep.begin(), keep.end(), e.first);
    const auto rank = below(cat("keep", e.slots), e.slots, 1 << 30);
    std::stable_sort(keep.begin(), keep.end() - e.recent, [&](int i, int j) { return rank[i] < rank[j]; });
    keep.erase(keep.begin() + e.keep - e.recent, keep.end() - e.recent);
    std::sort(keep.begin(), keep.end());
    Call t(table_kernels, DType::bf16);
    KvMerge a{};
    KvCompact& c = a.compact;
    c.k_pages = s.k_pages(t);
    c.v_pages = t.act("v_pages", {s.pages.count, 1, 16, d});
    c.pos_pages = t.index("pos_pages", {s.pages.count, 1, 16}, std::vector<int32_t>(s.pages.count * 16));
    c.keep = t.index("keep", {1, 1, e.keep}, keep);
    c.src_pages = c.dst_pages = s.src_pages(t);
    c.compressions = s.compressions(t);
    c.work = s.work();
    a.kind = KvMergeKind::value;
    a.keys = MergeKeys::none;
    a.nearest = t.index_out("nearest", {1, 1, s.pages.per_row * 16});
    a.cosines = t.stat_out("cosines", {1, 1, s.pages.per_row * 16});
    a.merged = t.stat_scratch("scratch", {1, 1, e.keep, 2 * d + 1});
    t.table.kv_merge(a, {});
    const Rows z = cosines(s.keys, s.keys);
    for (int i = e.first; i < e.slots; i++) {
      if (std::binary_search(keep.begin(), keep.end(), i)) continue;
      int best = 0;
      for (int j = 0; j < e.keep; j++)
        if (z[i][keep[j]] >= z[i][keep[best]]) best = j;
      ASSERT_EQ(t["nearest"].get(i), best) << i << " of " << e.slots << " slots, " << d << " channels";
      ASSERT_EQ(static_cast<float>(t["cosines"].get(i)), z[i][keep[best]]);
    }
  }
}

// R-KV in bf16 keeps what it keeps with the same keys in f32.
TEST(CudaCompressions, KeptSetsAreThoseOfF32) {
  int same = 0, differing = 0;
  const int seeds = 40, directions = 24;
  for (int seed = 0; seed < seeds; seed++) {
    const KvCompression e{200, 0, 8, 150, 0};
    const int64_t d = 64;
    // As keys of a head are: a mean, and bunches about it.
    const Rows mean = vectors(cat("mean", seed), 1, d), bunch = vectors(cat("bunch", seed), directions, d);
    Rows keys = vectors(cat("noise", seed), e.slots, d);
    const auto which = below(cat("which", seed), e.slots, directions);
    for (int i = 0; i < e.slots; i++)
      for (int64_t c = 0; c < d; c++)
        keys[i][c] = from_bf16(to_bf16(1.2f * mean[0][c] + 0.9f * bunch[which[i]][c] + 0.6f * keys[i][c]));
    const Scene s{e, keys, vectors(cat("queries", seed), 8 * 2, d), 2};
    std::vector<int32_t> kept[2];
    for (int i = 0; i < 2; i++) {
      Call t(i ? table_kernels : table_cpu, i ? DType::bf16 : DType::f32);
      window_scores(t, s, GqaAgg::max_logit, SoftmaxSpan::exclude_window, 7, 1 / std::sqrt(static_cast<float>(d)));
      redundancy(t, s, 0.1f, seed % 2 ? 0.5f : 0.8f);
      t.table.kv_select({t.index("keep", {1, 1, e.keep}, {}), t["score"].tensor(), s.compressions(t), s.work(), false},
                        {});
      for (int k = 0; k < e.keep; k++) kept[i].push_back(static_cast<int32_t>(t["keep"].get(k)));
    }
    std::vector<int32_t> lost;
    std::set_difference(kept[0].begin(), kept[0].end(), kept[1].begin(), kept[1].end(), std::back_inserter(lost));
    same += lost.empty();
    differing += static_cast<int>(lost.size());
  }
  EXPECT_GE(same, 40) << differing << " slots differ";
}

// ---- the attention that slots receive

constexpr int64_t kHeads = 3;  // of the one key head

// Whose last `rows` slots are new.
struct Sequence {
  int32_t rows, slots, first;
  Rows keys, queries;
  Sequence(int32_t rows, int32_t slots, int32_t first, int64_t d)
      : rows(rows),
        slots(slots),
        first(first),
        keys(vectors(cat("keys of ", slots), slots, d)),
        queries(vectors(cat("queries of ", slots), rows * kHeads, d)) {}
  float before(int slot) const { return static_cast<float>(slot % 7); }  // the mass that an old slot has
};
float scale_of(const Sequence& s) { return 1.5f / std::sqrt(static_cast<float>(s.keys[0].size())); }

struct Paged {
  Call t;
  std::vector<Sequence> list;
  KvPages pages;

  Paged(const Table& table, DType act, std::vector<Sequence> l) : t(table, act), list(std::move(l)) {
    const int64_t d = std::ssize(list[0].keys[0]);
    std::vector<int32_t> slots;
    for (const Sequence& s : list) slots.push_back(s.slots);
    pages = KvPages(slots);
    t.act_out("k_pages", {pages.count, 1, d, 16});
    t.act("v_pages", {pages.count, 1, 16, d});
    t.stat_out("mass_pages", {pages.count, 1, 16});
    Buffer &k = t["k_pages"], &mass = t["mass_pages"];
    for (size_t i = 0; i < list.size(); i++)
      for (int32_t s = 0; s < list[i].slots; s++) {
        for (int64_t c = 0; c < d; c++) k.set((pages.page(i, s) * d + c) * 16 + s % 16, list[i].keys[s][c]);
        if (s >= list[i].first && s < list[i].slots - list[i].rows)
          mass.set(pages.page(i, s) * 16 + s % 16, list[i].before(s));
      }
  }
  // Attends with at most `count` rows of each sequence, from row `begin` on.
  void attend(int32_t begin = 0, int32_t count = 1 << 20) {
    const int64_t d = std::ssize(list[0].keys[0]), n = std::ssize(list);
    std::vector<PagedRow> queries;
    std::vector<int32_t> first;
    std::vector<int64_t> reads;
    Rows q;
    AttnPaged a{};
    for (const Sequence& s : list) {
      const int32_t rows = std::min(s.rows - begin, count), slots = s.slots - s.rows + begin + rows;
      queries.push_back(
          {static_cast<int32_t>(std::ssize(q) / kHeads), rows, slots, static_cast<int32_t>(first.size())});
      q.insert(q.end(), s.queries.begin() + begin * kHeads, s.queries.begin() + (begin + rows) * kHeads);
      first.push_back(s.first);
      a.pairs += int64_t{rows} * (slots - rows) + int64_t{rows} * (rows + 1) / 2;
      a.slots += slots;
      reads.push_back(slots);
    }
    const int64_t rows = std::ssize(q) / kHeads;
    a.q = t.act_out("q", {rows, kHeads, d});
    a.o = t.act_out("o", {rows, kHeads, d});
    Buffer& to = t["q"];
    for (int64_t i = 0; i < to.size(); i++) to.set(i, q[i / d][i % d]);
    a.k_pages = t["k_pages"].tensor();
    a.v_pages = t["v_pages"].tensor();
    a.page_table = t.index("page_table", {n, pages.per_row}, pages.table);
    a.queries = t.index("queries", {n, 4}, flat(queries));
    a.scale = scale_of(list[0]);
    a.mass_pages = t["mass_pages"].tensor();
    a.first = t.index("first", {n}, first);
    a.work = cases::put_work(t, "work", queries, reads);
    a.weights = t.stat_scratch("scratch", {pages.count, 1, kHeads + 1, 16});
    a.cuts = t.cuts(n, pages.per_row, kHeads, 1, d);
    t.table.attn_paged(a, {});
  }
  std::vector<double> mass(size_t i) {
    const Buffer& mass = t["mass_pages"];
    std::vector<double> v;
    for (int32_t s = list[i].first; s < list[i].slots; s++) v.push_back(mass.get(pages.page(i, s) * 16 + s % 16));
    return v;
  }
};

std::vector<double> masses(const Sequence& s) {
  const int old = s.slots - s.rows;
  const float inf = std::numeric_limits<float>::infinity(), scale = scale_of(s) * 0x1.715476p0f;
  std::vector<float> mass(s.slots);
  for (int slot = 0; slot < old; slot++) mass[slot] = s.before(slot);
  const Rows z = dots(s.queries, s.keys);
  for (int row = 0; row < std::ssize(s.queries); row++) {  // (own row, head of the group)
    const int end = old + row / static_cast<int>(kHeads) + 1;
    std::vector<float> weight(end), top;  // top: by block
    float all_top = -inf, all = 0;
    for (int cut = 0; cut < end; cut += 1024) {
      float m = -inf, lanes[4] = {};
      for (int block = cut; block < std::min(cut + 1024, end); block += 128) {
        const float before = m;
        for (int i = block; i < std::min(block + 128, end); i++) m = std::max(m, z[row][i] * scale);
        float part[4] = {};
        for (int i = block; i < std::min(block + 128, end); i++)
          part[i % 8 / 2] += weight[i] = exp2_cubic(std::fma(z[row][i], scale, -m));
        const float fix = exp2_accurate(before - m);
        for (int l = 0; l < 4; l++) lanes[l] = lanes[l] * fix + part[l];
        top.push_back(m);
      }
      const float sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]), next = std::max(all_top, m);
      all = cut == 0 ? sum : all * exp2_accurate(all_top - next) + sum * exp2_accurate(m - next);
      all_top = next;
    }
    for (int block = 0; block < end; block += 128) {
      const float worth = exp2_accurate(top[block / 128] - all_top) * (1.f / all);
      for (int i = block; i < std::min(block + 128, end); i++) mass[i] = std::fma(weight[i], worth, mass[i]);
    }
  }
  return {mass.begin() + s.first, mass.end()};
}

TEST(CudaCompressions, MassesAreTheWeightsOfAttention) {
  for (int64_t d : {20, 128}) {
    Paged p(table_kernels, DType::bf16,
            {{1, 2100, 5, d}, {7, 1028, 16, d}, {9, 129, 0, d}, {1, 1024, 0, d}, {1, 1025, 37, d}, {3, 3, 0, d}});
    p.attend();
    for (size_t i = 0; i < p.list.size(); i++)
      EXPECT_EQ(p.mass(i), masses(p.list[i])) << p.list[i].slots << " slots, " << d << " channels";
  }
}

// Against sums in double.  Each row gives 1 in all, whatever its weights are.
TEST(CudaCompressions, MassesAreThoseOfRef) {
  const std::vector<Sequence> list = {{1, 2100, 0, 64}, {23, 300, 0, 64}, {5, 5, 0, 64}};
  Paged is(table_kernels, DType::bf16, list), should(table_ref, DType::f64, list);
  is.attend();
  should.attend();
  for (size_t i = 0; i < list.size(); i++) {
    const Sequence& s = list[i];
    const std::vector<double> got = is.mass(i), exact = should.mass(i);
    double given = 0;
    for (int slot = 0; slot < s.slots; slot++) {
      const double old = slot < s.slots - s.rows ? s.before(slot) : 0;
      given += got[slot] - old;
      ASSERT_NEAR(got[slot], exact[slot], 2e-4 * (exact[slot] - old) + 1e-6 * exact[slot]) << slot << " of " << s.slots;
    }
    EXPECT_NEAR(given, static_cast<double>(s.rows * kHeads), 1e-5 * s.rows * kHeads);
  }
}

// Not of how many rows come at once, of what else does, or of where the pages lie.
TEST(CudaCompressions, MassesDependOnTheSequenceAlone) {
  const Sequence one(21, 1040, 5, 20);
  Paged together(table_kernels, DType::bf16, {{2, 40, 0, 20}, one, {30, 300, 16, 20}}),
      alone(table_kernels, DType::bf16, {one});
  together.attend();
  for (int32_t begin : {0, 1, 13}) alone.attend(begin, begin == 0 ? 1 : begin == 1 ? 12 : 8);
  EXPECT_EQ(alone.mass(0), together.mass(1));
}

}  // namespace
}  // namespace pare::test
