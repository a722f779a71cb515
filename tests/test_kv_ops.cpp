// The ops of a cache that evicts: worked examples (computed by hand or by an fp64 script that knows none of this code),
// and what must hold whatever the numbers.
#include <set>

#include "base/thread_pool.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "kv_compression.h"
#include "ops/rope.h"

namespace pare::test {

namespace {

class KvOps : public testing::TestWithParam<On> {
 protected:
  const On on = GetParam();
};
INSTANTIATE_TEST_SUITE_P(Tables, KvOps, testing::ValuesIn(kRefAndCpu),
                         [](const auto& info) { return std::string(info.param.table->name); });

void expect_near(const std::vector<double>& is, const std::vector<double>& should, double error) {
  for (size_t i = 0; i < should.size(); i++) EXPECT_NEAR(is[i], should[i], error) << i;
}

// ---- worked examples

// SnapKV: one key head, two query heads, a window of 2, 5 of 8 slots stay.
KvScene snap(On on) {
  KvScene s{.on = on, .heads = 2, .kv_heads = 1, .dim = 2, .window = 2};
  s.add({8, 0, 2, 5, 0}, {{{2, 0}, {0, 1}, {1, 1}, {-1, 0}, {0, 2}, {1, 0}, {0, 0}, {0, 0}}},
        {{1, 0, 0, 3}, {0, 1, 0, -1}});
  return s;
}
const float kScale2 = static_cast<float>(1 / std::sqrt(2.0));

TEST_P(KvOps, WindowScoresOfTheExample) {
  struct Case {
    WindowSpec spec;
    std::vector<double> score;  // may be empty
    std::vector<int32_t> keep;
  };
  const auto max = GqaAgg::max_logit, mean = GqaAgg::mean_logit, prob = GqaAgg::mean_prob;
  const auto past = SoftmaxSpan::exclude_window, all = SoftmaxSpan::include_window;
  const std::vector<Case> cases = {
      {{max, past, Pool::max, 1}, {.066780, .135438, .135438, .050117, .556606, .055620}, {1, 2, 4, 6, 7}},
      {{max, past, Pool::max, 3}, {}, {3, 4, 5, 6, 7}},
      {{max, past, Pool::avg, 3}, {}, {3, 4, 5, 6, 7}},
      {{mean, past, Pool::max, 1}, {.135341, .157399, .188812, .101340, .297255, .119853}, {1, 2, 4, 6, 7}},
      {{mean, past, Pool::avg, 3}, {}, {1, 3, 4, 6, 7}},
      {{prob, past, Pool::max, 1}, {.180736, .121348, .145453, .095856, .324760, .131847}, {0, 2, 4, 6, 7}},
      // The original sums over the window; a mean is half of that here.
      {{prob, all, Pool::max, 1},
       {.300116 / 2, .205653 / 2, .249731 / 2, .144911 / 2, .603991 / 2, .210721 / 2},
       {0, 2, 4, 6, 7}},
      {{prob, all, Pool::avg, 3}, {}, {3, 4, 5, 6, 7}},
  };
  const KvScene s = snap(on);
  for (const Case& c : cases) {
    const auto score = s.window_scores(c.spec, kScale2);
    expect_near(score, c.score, 1e-6);
    EXPECT_TRUE(std::isnan(score[6]) && std::isnan(score[7])) << "the window has no scores";
    EXPECT_EQ(s.select(score), Keep{c.keep});
    if (c.spec.kernel == 1 && c.spec.span == past) {
      double sum = 0;
      for (int i = 0; i < 6; i++) sum += score[i];
      EXPECT_NEAR(sum, 1, 1e-6);
    }
  }
}

// R of one compression: with lambda 0 the score is -R.
std::vector<double> redundancy_of(const KvScene& s) {
  std::vector<double> r = s.redundancy(std::vector<double>(s.max_slots()), 0, 0.5f);
  for (double& x : r) x = -x;
  r.resize(s.compressions[0].slots - s.compressions[0].recent);
  return r;
}
std::vector<double> softmax(std::vector<double> x) {
  double sum = 0;
  for (double& v : x) sum += v = std::exp(v);
  for (double& v : x) v /= sum;
  return x;
}

TEST_P(KvOps, RedundancyOfTheExample) {
  const Rows keys = {{1, 0}, {0, 1}, {1, 0}, {1, 0}, {0, 1}, {-1, 0}, {0, 1}, {1, 0}};
  KvScene all{.on = on, .dim = 2};  // no recent slots: R of all is visible
  all.add({8, 0, 0, 5, 0}, {keys}, {{1, 1}});
  expect_near(redundancy_of(all), {.165747, .146272, .146272, .129084, .129084, .069094, .113916, .100531}, 1e-6);
  expect_near(redundancy_of(all), softmax({.375, .25, .25, .125, .125, -.5, 0, -.125}), 1e-6);

  KvScene s{.on = on, .dim = 2, .window = 2};
  s.add({8, 0, 2, 5, 0}, {keys}, {{1, 1}, {1, 1}});
  for (int32_t kernel : {1, 7})
    for (float lambda : {0.f, 0.1f, 1.f}) {
      const auto importance = s.window_scores({.kernel = kernel}, kScale2);
      const auto score = s.redundancy(importance, lambda, 0.5f);
      if (lambda < 1) {
        EXPECT_EQ(s.select(score), (Keep{{3, 4, 5, 6, 7}})) << lambda;
      } else if (kernel == 1) {
        EXPECT_EQ(s.select(score), (Keep{{2, 3, 4, 6, 7}}));
      }
    }
}

TEST_P(KvOps, RedundancyWithoutTies) {
  const Rows keys = {{3, 1, 0}, {2.9f, 1.1f, .1f}, {0, 2, 1}, {.1f, 2, 1.2f},
                     {1, 0, 3}, {3, 1, .2f},       {1, 1, 1}, {0, 0, 2}};
  KvScene all{.on = on, .dim = 3};
  all.add({8, 0, 0, 5, 0}, {keys}, {{0, 0, 0}});
  expect_near(redundancy_of(all), softmax({.452668, .476273, .445878, .480334, .448726, .479783, .193302, .067820}),
              1e-6);
  KvScene s{.on = on, .heads = 2, .dim = 3, .window = 2};
  s.add({8, 0, 2, 5, 0}, {keys}, {{1, 0, .5f, 0, 1, 0}, {.5f, .2f, .1f, .2f, .1f, 1.5f}});
  struct Case {
    int32_t kernel;
    float lambda;
    std::vector<int32_t> keep;
  };
  for (const Case& c :
       {Case{1, 0, {0, 2, 4, 6, 7}}, {1, .1f, {0, 4, 5, 6, 7}}, {7, .1f, {1, 2, 4, 6, 7}}, {7, 1, {3, 4, 5, 6, 7}}}) {
    const auto importance = s.window_scores({.kernel = c.kernel}, static_cast<float>(1 / std::sqrt(3.0)));
    EXPECT_EQ(s.select(s.redundancy(importance, c.lambda, 0.5f)), Keep{c.keep}) << c.kernel << " " << c.lambda;
  }
}

// Copies of one key, then keys that are like nothing: only the most recent copy is not penalised.
TEST_P(KvOps, RedundancyOfCopies) {
  const std::vector<std::vector<double>> means = {{0, 0, 0, 0}, {.4, .2, 0, 0, 0}, {.5, .5, 1. / 3, 0, 0, 0}};
  for (size_t n = 2; n <= 4; n++) {
    KvScene s{.on = on, .dim = 4};
    Rows keys(n, {1, 0, 0, 0});
    keys.push_back({0, 1, 0, 0});
    keys.push_back({0, 0, 1, 0});
    s.add({static_cast<int32_t>(keys.size()), 0, 0, 1, 0}, {keys}, {{0, 0, 0, 0}});
    expect_near(redundancy_of(s), softmax(means[n - 2]), 1e-6);
  }
}

TEST_P(KvOps, SinksAndTheNewest) {
  KvScene s{.on = on, .dim = 2};
  s.add({10, 2, 4, 4, 0}, {Rows(10, {0, 0})}, {{0, 0}});
  EXPECT_EQ(s.select({}), (Keep{{6, 7, 8, 9}}));  // and slots 0 and 1, which are protected
}

// H2O: token t arrives with the attention row `rows[t]` over what is resident; 2 heavy and 2 recent slots stay.  Keys
// are unit vectors and queries logarithms, so softmax gives the rows.
TEST_P(KvOps, HeavyHittersOfTheExample) {
  const Rows rows = {{1}, {.6, .4}, {.2, .3, .5}, {.1, .1, .2, .6}, {.05, .15, .1, .3, .4}, {.1, .1, .2, .2, .4}};
  const int64_t D = 8;
  std::vector<int32_t> resident;  // tokens by slot
  std::vector<double> k(D * 16, NAN), v(16 * D), mass(16, 77), pos(16, -1);
  double evicted = 0;
  for (size_t t = 0; t < rows.size(); t++) {
    resident.push_back(static_cast<int32_t>(t));
    const int32_t slots = static_cast<int32_t>(resident.size());
    std::vector<double> key(D), q(D, -50);
    key[t] = 1;
    for (int32_t s = 0; s < slots; s++) q[resident[s]] = std::log(rows[t][s]);
    const auto pages = [&](OpRun& r, const char* name, const Shape& shape, std::vector<double>& values) {
      return r.inout(name, shape, values);
    };
    OpRun w(*on.table, on.act);
    KvWrite write{};
    write.k_pages = pages(w, "k", {1, 1, D, 16}, k);
    write.v_pages = pages(w, "v", {1, 1, 16, D}, v);
    write.k = w.in("key", {1, 1, D}, key);
    write.v = w.in("value", {1, 1, D});
    write.page_table = w.index("table", {1, 1}, {0});
    write.queries = w.index("queries", {1, 4}, {0, 1, slots, 0});
    write.pos_pages = w.index_inout("pos", {1, 1, 16}, {pos.begin(), pos.end()});
    write.pos = w.index("token", {1}, {static_cast<int32_t>(t)});
    w.call(&Table::kv_write, write);
    k = w.values("k");
    pos = w.values("pos");

    OpRun m(*on.table, on.act);
    m.call(&Table::attn_paged, AttnPaged{.o = m.out("o", {1, 1, D}),
                                         .q = m.in("q", {1, 1, D}, q),
                                         .k_pages = m.in("k", {1, 1, D, 16}, k),
                                         .v_pages = m.in("v", {1, 1, 16, D}),
                                         .page_table = m.index("table", {1, 1}, {0}),
                                         .queries = m.index("queries", {1, 4}, {0, 1, slots, 0}),
                                         .pairs = slots,
                                         .slots = slots,
                                         .scale = 1,
                                         .mass_pages = m.inout("mass", {1, 1, 16}, mass),
                                         .first = m.index("first", {1}, {0})});
    mass = m.values("mass");
    if (slots == 5) {
      KvScene s{.on = on, .dim = D};
      s.add({slots, 0, 2, 4, 0}, {Rows(slots, std::vector<double>(D))}, {std::vector<double>(D)});
      OpRun c(*on.table, on.act);
      KvMassScores score{};
      score.score = c.out("score", {1, 1, slots});
      score.mass_pages = c.in("mass", {1, 1, 16}, mass);
      score.src_pages = c.index("src", {1, 1}, {0});
      score.compressions = c.index("compressions", {1, 5}, flat(s.compressions));
      score.work = kv_work(s.compressions.data(), 1);
      c.call(&Table::kv_mass_scores, score);
      const Keep keep = s.select(c.values("score"));
      OpRun x(*on.table, on.act);
      KvCompact compact{};
      compact.k_pages = pages(x, "k", {1, 1, D, 16}, k);
      compact.v_pages = pages(x, "v", {1, 1, 16, D}, v);
      compact.pos_pages = x.index_inout("pos", {1, 1, 16}, {pos.begin(), pos.end()});
      compact.mass_pages = pages(x, "mass", {1, 1, 16}, mass);
      compact.keep = x.index("keep", {1, 1, 4}, keep[0]);
      compact.src_pages = compact.dst_pages = score.src_pages;
      compact.compressions = score.compressions;
      compact.work = score.work;
      x.call(&Table::kv_compact, compact);
      for (int32_t i = 0; i < slots; i++)
        if (std::find(keep[0].begin(), keep[0].end(), i) == keep[0].end()) evicted += mass[i];
      k = x.values("k");
      mass = x.values("mass");
      pos = x.values("pos");
      resident.assign(pos.begin(), pos.begin() + 4);
    }
    if (t == 4) {
      EXPECT_EQ(resident, (std::vector<int32_t>{0, 1, 3, 4}));
    }
    double sum = evicted;
    for (size_t s = 0; s < resident.size(); s++) sum += mass[s];
    EXPECT_NEAR(sum, double(t + 1), 1e-6);  // every query gave away 1
  }
  EXPECT_EQ(resident, (std::vector<int32_t>{0, 3, 4, 5}));
  expect_near(mass, {2.05, 1.1, .6, .4}, 1e-6);
}

// ---- selection

TEST_P(KvOps, EqualScoresKeepTheNewer) {
  KvScene s{.on = on, .dim = 1};
  s.add({9, 1, 2, 5, 0}, {Rows(9, {0})}, {{0}});
  const double x = NAN;  // nobody reads it
  EXPECT_EQ(s.select({x, 1, 1, 1, 1, 1, 1, x, x}), (Keep{{4, 5, 6, 7, 8}}));
  EXPECT_EQ(s.select({x, 2, 1, 1, 3, 1, 1, x, x}), (Keep{{1, 4, 6, 7, 8}}));
  EXPECT_EQ(s.select({x, 0., -0., 0., -0., -1, -2, x, x}), (Keep{{2, 3, 4, 7, 8}})) << "-0 equals 0";
  EXPECT_EQ(s.select({x, -1, -2, -3, -INFINITY, -3, -4, x, x}), (Keep{{1, 2, 5, 7, 8}}));
}

TEST_P(KvOps, SharedHeadsChooseByTheSum) {
  KvScene s{.on = on, .heads = 2, .kv_heads = 2, .dim = 1};
  s.add({5, 0, 1, 3, 0}, {Rows(5, {0}), Rows(5, {0})}, {{0, 0}});
  const std::vector<double> score = {4, 1, 0, 3, NAN, 0, 1, 4.5, 2, NAN};
  EXPECT_EQ(s.select(score), (Keep{{0, 3, 4}, {2, 3, 4}}));
  EXPECT_EQ(s.select(score, true), (Keep{{2, 3, 4}, {2, 3, 4}}));  // sums 4 2 4.5 5
}

// ---- properties

// Three sequences of odd lengths and everything protected that can be.
KvScene random_scene(On on, int64_t heads, int64_t kv_heads, int64_t dim) {
  KvScene s{.on = on, .heads = heads, .kv_heads = kv_heads, .dim = dim, .window = 5};
  for (KvCompression e : {KvCompression{70, 0, 5, 33, 0}, {131, 19, 7, 60, 0}, {23, 16, 5, 6, 0}}) {
    std::vector<Rows> keys;
    for (int64_t h = 0; h < kv_heads; h++) keys.push_back(normal_rows(cat("keys", e.slots, h), e.slots, dim));
    s.add(e, keys, normal_rows(cat("queries", e.slots), s.window, heads * dim));
  }
  return s;
}
// NaN where there is no score: equal to itself.
void expect_same(const std::vector<double>& a, const std::vector<double>& b, const char* what) {
  ASSERT_EQ(a.size(), b.size());
  int64_t wrong = 0;
  for (size_t i = 0; i < a.size(); i++) wrong += !(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])));
  EXPECT_EQ(wrong, 0) << what;
}
const std::vector<WindowSpec> kSpecs = {{},
                                        {.kernel = 7},
                                        {GqaAgg::mean_logit, SoftmaxSpan::include_window, Pool::avg, 5},
                                        {GqaAgg::mean_prob, SoftmaxSpan::include_window, Pool::avg, 3},
                                        {GqaAgg::mean_prob, SoftmaxSpan::exclude_window, Pool::max, 1}};

TEST_P(KvOps, WithoutRedundancyItIsSnapKv) {
  const KvScene s = random_scene(on, 4, 2, 20);
  const auto score = s.window_scores({.kernel = 7}, 0.25f);
  expect_same(s.redundancy(score, 1, 0.5f), score, "lambda = 1");
}

TEST_P(KvOps, LengthsOfKeysDoNotMatterToRedundancy) {
  KvScene s = random_scene(on, 2, 2, 16);
  const auto before = s.redundancy(std::vector<double>(s.count() * 2 * s.max_slots()), 0, 0.4f);
  for (size_t i = 0; i < s.keys.size(); i++)
    for (size_t slot = 0; slot < s.keys[i].size(); slot++)
      for (double& x : s.keys[i][slot]) x *= slot % 3 ? 2.5f : 0.125f;
  expect_near(s.redundancy(std::vector<double>(before.size()), 0, 0.4f), before, 1e-6);
}

TEST_P(KvOps, KeysThatAreLikeNothingAreEquallyRedundant) {
  KvScene s{.on = on, .dim = 24};
  Rows keys(24, std::vector<double>(24));
  for (int i = 0; i < 24; i++) keys[i][i] = 1 + i;
  s.add({24, 0, 0, 3, 0}, {keys}, {std::vector<double>(24)});
  for (double r : redundancy_of(s)) EXPECT_NEAR(r, 1. / 24, 1e-7);
}

TEST_P(KvOps, OneQueryHeadPerKeyHeadNeedsNoAggregate) {
  const KvScene s = random_scene(on, 3, 3, 8);
  for (SoftmaxSpan span : {SoftmaxSpan::exclude_window, SoftmaxSpan::include_window}) {
    const auto max = s.window_scores({GqaAgg::max_logit, span, Pool::max, 3}, 0.3f);
    expect_same(s.window_scores({GqaAgg::mean_logit, span, Pool::max, 3}, 0.3f), max, "mean_logit");
    expect_same(s.window_scores({GqaAgg::mean_prob, span, Pool::max, 3}, 0.3f), max, "mean_prob");
  }
}

// Heads change places with their queries: so do the scores and the choices.
TEST_P(KvOps, HeadsDoNotSeeEachOther) {
  const int64_t kv_heads = 3, group = 2, dim = 8;
  const KvScene s = random_scene(on, kv_heads * group, kv_heads, dim);
  KvScene turned = s;  // head h holds what head h + 1 held
  for (int64_t i = 0; i < s.count(); i++)
    for (int64_t h = 0; h < kv_heads; h++) turned.keys[i * kv_heads + h] = s.keys[i * kv_heads + (h + 1) % kv_heads];
  const int64_t row = kv_heads * group * dim, turn = group * dim;
  for (size_t j = 0; j < s.windows.size(); j++) turned.windows[j] = s.windows[j / row * row + (j % row + turn) % row];
  const auto keep = [](const KvScene& scene) {
    return scene.select(scene.redundancy(scene.window_scores({.kernel = 3}, 0.35f), 0.5f, 0.4f));
  };
  const Keep before = keep(s), after = keep(turned);
  for (int64_t i = 0; i < s.count(); i++)
    for (int64_t h = 0; h < kv_heads; h++)
      EXPECT_EQ(after[i * kv_heads + h], before[i * kv_heads + (h + 1) % kv_heads]) << i << " " << h;
}

TEST_P(KvOps, TheRingMayStartAnywhere) {
  const KvScene s = random_scene(on, 4, 2, 8);
  const int64_t row = s.heads * s.dim;
  for (const WindowSpec& spec : kSpecs) {
    const auto score = s.window_scores(spec, 0.3f);
    for (int32_t first : {1, 4}) {
      KvScene turned = s;
      turned.oldest.assign(s.count(), first);
      for (int64_t i = 0; i < s.count(); i++)
        for (int64_t t = 0; t < s.window; t++)
          std::copy_n(s.windows.begin() + (i * s.window + t) * row, row,
                      turned.windows.begin() + (i * s.window + (first + t) % s.window) * row);
      expect_same(turned.window_scores(spec, 0.3f), score, "window_first");
    }
  }
}

// A compression alone, on other pages, has the bits that it has among others.
TEST_P(KvOps, CompressionsDoNotSeeEachOther) {
  const KvScene s = random_scene(on, 6, 2, 20);
  for (const WindowSpec& spec : kSpecs) {
    const auto all = s.redundancy(s.window_scores(spec, 0.2f), 0.3f, 0.35f);
    const Keep keep = s.select(all);
    for (int64_t i = 0; i < s.count(); i++) {
      KvScene one = s;
      one.compressions = {s.compressions[i]};
      one.keys.assign(s.keys.begin() + i * s.kv_heads, s.keys.begin() + (i + 1) * s.kv_heads);
      const int64_t part = static_cast<int64_t>(s.windows.size()) / s.count();
      one.windows.assign(s.windows.begin() + i * part, s.windows.begin() + (i + 1) * part);
      const auto alone = one.redundancy(one.window_scores(spec, 0.2f), 0.3f, 0.35f);
      for (int64_t h = 0; h < s.kv_heads; h++)
        expect_same({alone.begin() + h * one.max_slots(), alone.begin() + (h + 1) * one.max_slots()},
                    {all.begin() + (i * s.kv_heads + h) * s.max_slots(),
                     all.begin() + (i * s.kv_heads + h) * s.max_slots() + one.max_slots()},
                    "scores");
      EXPECT_EQ(one.select(alone), Keep(keep.begin() + i * s.kv_heads, keep.begin() + (i + 1) * s.kv_heads));
    }
  }
}

// Prefill in pieces, then token by token, gives the sums of one pass.
TEST_P(KvOps, MassDoesNotDependOnThePieces) {
  const int64_t H = 6, K = 2, D = 20;
  const int32_t n = 75, first = 21;
  const KvPages pages({n});
  std::vector<double> sums[2];
  for (int split : {0, 1}) {
    std::vector<double> mass(pages.count * K * 16, 5);
    std::vector<int32_t> pieces = {n};
    if (split) pieces = {1, 30, 16, 1, 1, 26};
    int32_t slots = 0;
    for (int32_t rows : pieces) {
      slots += rows;
      OpRun r(*on.table, on.act);
      const auto q = normal("q", n * H * D);
      AttnPaged a{};
      a.o = r.out("o", {rows, H, D});
      a.q = r.in("q", {rows, H, D}, std::vector(q.begin() + (slots - rows) * H * D, q.begin() + slots * H * D));
      a.k_pages = r.in("k", {pages.count, K, D, 16}, pages.keys("k", K, D));
      a.v_pages = r.in("v", {pages.count, K, 16, D});
      a.page_table = r.index("table", {1, pages.per_row}, pages.table);
      a.queries = r.index("queries", {1, 4}, {0, rows, slots, 0});
      a.pairs = int64_t(rows) * (slots - rows) + int64_t(rows) * (rows + 1) / 2;
      a.slots = slots;
      a.scale = 0.22f;
      a.mass_pages = r.inout("mass", {pages.count, K, 16}, mass);
      a.first = r.index("first", {1}, {first});
      r.call(&Table::attn_paged, a);
      OpRun plain(*on.table, on.act);
      a.o = plain.out("o", {rows, H, D});
      a.mass_pages = a.first = {};
      plain.call(&Table::attn_paged, a);
      EXPECT_EQ(plain.buffer("o").element_bytes(), r.buffer("o").element_bytes()) << "attention itself is unchanged";
      mass = r.values("mass");
    }
    sums[split] = mass;
  }
  expect_same(sums[0], sums[1], "mass");
  double total = 0;
  for (int32_t s = 0; s < n; s++)
    for (int64_t h = 0; h < K; h++) {
      const double x = sums[0][(pages.page(0, s) * K + h) * 16 + s % 16];
      if (s >= first) total += x;
      EXPECT_TRUE(s >= first || x == 5) << "protected";
    }
  EXPECT_GT(total, 0);
  EXPECT_LT(total, double(n) * H);  // the protected slots have the rest
}

// ---- the order of sums that ops/compression.h states, followed by plain loops in f32

float sum_of_lanes(const std::vector<float>& x, int64_t first_slot) {
  float lane[16] = {};
  for (size_t i = 0; i < x.size(); i++) lane[(first_slot + static_cast<int64_t>(i)) % 16] += x[i];
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) lane[i] += lane[i + n];
  return lane[0];
}
std::vector<float> softmax_f32(std::vector<float> z, int64_t first_slot) {
  const float max = *std::max_element(z.begin(), z.end());
  for (float& x : z) x -= max;
  cpu_kernels().exp_at_most_1(z.data(), z.data(), static_cast<int64_t>(z.size()));
  const float sum = sum_of_lanes(z, first_slot);
  for (float& x : z) x /= sum;
  return z;
}
float dot(const std::vector<double>& a, const std::vector<double>& b) {
  float sum = 0;
  for (size_t d = 0; d < a.size(); d++) sum = std::fma(float(a[d]), float(b[d]), sum);
  return sum;
}

TEST(KvOpsOrder, RedundancyIsTheDefinition) {
  const KvScene s = random_scene({&table_cpu, DType::f32}, 2, 2, 20);
  const float tau = 0.35f, lambda = 0.3f;
  const std::vector<double> in = normal("importance", s.count() * 2 * s.max_slots());
  const auto out = s.redundancy(in, lambda, tau);
  for (int64_t i = 0; i < s.count(); i++)
    for (int64_t h = 0; h < 2; h++) {
      const KvCompression& e = s.compressions[i];
      const int64_t n = e.slots - e.first;
      std::vector<std::vector<double>> unit;
      for (int64_t j = e.first; j < e.slots; j++) {
        unit.push_back(s.keys[i * 2 + h][j]);
        const float norm = std::sqrt(dot(unit.back(), unit.back())) + 1e-8f;
        for (double& x : unit.back()) x = float(x) / norm;
      }
      std::vector<std::vector<float>> S(n, std::vector<float>(n));
      std::vector<float> r(n);
      for (int64_t a = 0; a < n; a++)
        for (int64_t b = 0; b < n; b++) r[b] += S[a][b] = a == b ? 0 : dot(unit[a], unit[b]);
      for (int64_t a = 0; a < n; a++) {
        int64_t last = 0;
        for (int64_t b = 0; b < n; b++)
          if (S[a][b] > tau) last = b;
        r[last] -= S[a][last];
      }
      for (float& x : r) x /= static_cast<float>(n);
      r = softmax_f32(r, e.first);
      int64_t wrong = 0;
      for (int64_t j = e.first; j < e.slots - e.recent; j++) {
        const size_t at = (i * 2 + h) * s.max_slots() + j;
        wrong += float(out[at]) != lambda * float(in[at]) - (1 - lambda) * r[j - e.first];
      }
      EXPECT_EQ(wrong, 0) << "compression " << i << ", head " << h;
    }
}

TEST(KvOpsOrder, MassIsTheDefinition) {
  const int64_t D = 20, H = 3;
  const int32_t n = 150, rows = 2, first = 21;
  const KvPages pages({n});
  const std::vector<double> q = normal("q", rows * H * D), k = pages.keys("k", 1, D);
  OpRun r(table_cpu, DType::f32);
  AttnPaged a{};
  a.o = r.out("o", {rows, H, D});
  a.q = r.in("q", {rows, H, D}, q);
  a.k_pages = r.in("k", {pages.count, 1, D, 16}, k);
  a.v_pages = r.in("v", {pages.count, 1, 16, D});
  a.page_table = r.index("table", {1, pages.per_row}, pages.table);
  a.queries = r.index("queries", {1, 4}, {0, rows, n, 0});
  a.pairs = rows * (n - rows) + 3;
  a.slots = n;
  a.scale = 0.9f;
  std::vector<double> before(pages.count * 16, 0.25);
  a.mass_pages = r.inout("mass", {pages.count, 1, 16}, before);
  a.first = r.index("first", {1}, {first});
  r.call(&Table::attn_paged, a);
  std::vector<float> mass(n, 0.25f);
  mass[n - 2] = mass[n - 1] = 0;
  const float scale = a.scale * 0x1.715476p0f;
  const auto exp2 = [](float x) {  // 2^n 2^r, 2^r = 1 + r q(r)
    x = std::max(x, -150.0f);
    const float n = std::rint(x), r = x - n;
    float q = 1.55946779e-4f;
    for (float c : {1.34066439e-3f, 9.61769297e-3f, 5.55031055e-2f, 2.40226528e-1f, 6.93147215e-1f, 1.0f})
      q = std::fma(q, r, c);
    return std::ldexp(q, static_cast<int>(n));
  };
  for (int64_t row = 0; row < rows * H; row++) {
    const int32_t seen = n - rows + 1 + static_cast<int32_t>(row / H);
    const std::vector<double> query(q.begin() + row * D, q.begin() + (row + 1) * D);
    std::vector<float> p, maxima;
    float max = -INFINITY, sum = 0;
    for (int32_t s = 0; s < seen; s++) {
      std::vector<double> key;
      for (int64_t d = 0; d < D; d++) key.push_back(k[(pages.page(0, s) * D + d) * 16 + s % 16]);
      p.push_back(dot(query, key));
    }
    for (int32_t block = 0; block < seen; block += 64) {
      const auto begin = p.begin() + block, end = p.begin() + std::min(seen, block + 64);
      const float next = std::max(max, *std::max_element(begin, end) * scale);
      for (auto x = begin; x < end; x++) *x = exp2(std::fma(*x, scale, -next));
      sum = std::fma(sum, block ? exp2(max - next) : 0.0f, sum_of_lanes({begin, end}, 0));
      max = next;
      maxima.push_back(max);
    }
    for (int32_t s = 0; s < seen; s++) mass[s] = std::fma(p[s], exp2(maxima[s / 64] - max) / sum, mass[s]);
  }
  const auto out = r.values("mass");
  for (int32_t s = 0; s < n; s++)
    EXPECT_EQ(float(out[pages.page(0, s) * 16 + s % 16]), s < first ? 0.25f : mass[s]) << s;
}

TEST(KvOpsOrder, WindowScoresAreTheDefinition) {
  const KvScene s = random_scene({&table_cpu, DType::f32}, 6, 2, 20);
  const float scale = 0.21f;
  const int64_t G = 3;
  for (const WindowSpec& spec : kSpecs) {
    const auto out = s.window_scores(spec, scale);
    for (int64_t i = 0; i < s.count(); i++)
      for (int64_t h = 0; h < 2; h++) {
        const KvCompression& e = s.compressions[i];
        const int64_t n = e.slots - e.recent - e.first;
        std::vector<float> raw(n);
        for (int64_t t = 0; t < s.window; t++) {
          const int64_t end = spec.span == SoftmaxSpan::exclude_window ? n : e.slots - s.window + t + 1 - e.first;
          std::vector<float> p;
          for (int64_t g = 0; g < G; g++) {
            const auto q = s.windows.begin() + ((i * s.window + t) * 6 + h * G + g) * s.dim;
            std::vector<float> z;
            for (int64_t j = 0; j < end; j++) z.push_back(dot({q, q + s.dim}, s.keys[i * 2 + h][e.first + j]) * scale);
            if (spec.aggregate == GqaAgg::mean_prob) z = softmax_f32(z, e.first);
            if (g == 0) p = z;
            for (int64_t j = 0; g && j < end; j++)
              p[j] = spec.aggregate == GqaAgg::max_logit ? std::max(p[j], z[j]) : p[j] + z[j];
          }
          if (spec.aggregate != GqaAgg::max_logit)
            for (float& x : p) x /= static_cast<float>(G);
          if (spec.aggregate != GqaAgg::mean_prob) p = softmax_f32(p, e.first);
          for (int64_t j = 0; j < n; j++) raw[j] += p[j];
        }
        for (float& x : raw) x /= static_cast<float>(s.window);
        int64_t wrong = 0;
        for (int64_t j = 0; j < n; j++) {
          float y = spec.pool == Pool::max ? -INFINITY : 0;
          for (int64_t x = j - spec.kernel / 2; x <= j + spec.kernel / 2; x++)
            if (x >= 0 && x < n) y = spec.pool == Pool::max ? std::max(y, raw[x]) : y + raw[x];
          if (spec.pool == Pool::avg) y /= static_cast<float>(spec.kernel);
          wrong += float(out[(i * 2 + h) * s.max_slots() + e.first + j]) != y;
        }
        EXPECT_EQ(wrong, 0) << "compression " << i << ", head " << h;
      }
  }
}

}  // namespace

}  // namespace pare::test
