// Merging of evicted slots into kept ones: worked examples, and what must hold whatever the numbers.
#include <numeric>

#include "kv_compression.h"
#include "ops/merge.h"

namespace pare::test {

namespace {

class KvMerging : public testing::TestWithParam<On> {
 protected:
  const On on = GetParam();
};
INSTANTIATE_TEST_SUITE_P(Tables, KvMerging, testing::ValuesIn(kRefAndCpu),
                         [](const auto& info) { return std::string(info.param.table->name); });

// One sequence with one key head in as many pages as it needs, and one compression.
struct Merge {
  On on;
  Rows keys, values;  // by slot
  std::vector<int32_t> keep;
  KvMergeKind kind = KvMergeKind::d2o;
  MergeKeys merge_keys = MergeKeys::none;
  std::vector<double> rope = {};  // [positions][D]; slot s is at position s
  double threshold = 0;

  // After it: by slot.
  Rows k = {}, v = {};

  int64_t dim() const { return static_cast<int64_t>(keys[0].size()); }
  void run() {
    OpRun r(*on.table, on.act);
    const int64_t n = static_cast<int64_t>(keys.size()), kept = static_cast<int64_t>(keep.size()), D = dim();
    const int64_t pages = (n + 15) / 16;
    std::vector<double> kp(pages * D * 16, NAN), vp(pages * 16 * D, NAN), mp(pages * 16, 1);
    std::vector<int32_t> pos(pages * 16, -1), table(pages);
    std::iota(table.begin(), table.end(), 0);
    for (int64_t s = 0; s < n; s++) {
      for (int64_t d = 0; d < D; d++) {
        kp[(s / 16 * D + d) * 16 + s % 16] = keys[s][d];
        vp[s * D + d] = values[s][d];
      }
      pos[s] = static_cast<int32_t>(s);
    }
    const KvCompression e{int32_t(n), 0, 0, int32_t(kept), 0};
    KvMerge a{};
    a.compact.k_pages = r.inout("k", {pages, 1, D, 16}, kp);
    a.compact.v_pages = r.inout("v", {pages, 1, 16, D}, vp);
    a.compact.pos_pages = r.index_inout("pos", {pages, 1, 16}, pos);
    a.compact.mass_pages = r.inout("mass", {pages, 1, 16}, mp);
    a.compact.keep = r.index("keep", {1, 1, kept}, keep);
    a.compact.src_pages = a.compact.dst_pages = r.index("pages", {1, pages}, table);
    a.compact.compressions = r.index("compressions", {1, 5}, flat(std::vector{e}));
    a.compact.work = kv_work(&e, 1);
    a.kind = kind;
    a.keys = merge_keys;
    a.nearest = r.index_scratch("nearest", {1, 1, pages * 16});
    a.cosines = r.scratch("cosines", {1, 1, pages * 16}, {});
    a.merged = r.scratch("merged", {1, 1, kept, 2 * D + 1}, {});
    if (merge_keys == MergeKeys::unrotated) a.rope = r.in("rope", {int64_t(rope.size()) / D, D}, rope);
    a.threshold = r.inout("threshold", {1}, std::vector<double>{threshold});
    a.threshold_row = r.index("threshold_row", {1}, {0});
    a.ema_old = 0.5f;
    a.ema_new = 0.25f;
    r.call(&Table::kv_merge, a);
    EXPECT_TRUE(r.problems.empty()) << joined(r.problems);
    kp = r.values("k");
    vp = r.values("v");
    threshold = r.values("threshold")[0];
    k = v = {};
    for (int64_t s = 0; s < kept; s++) {
      k.emplace_back();
      v.emplace_back(vp.begin() + s * D, vp.begin() + (s + 1) * D);
      for (int64_t d = 0; d < D; d++) k.back().push_back(kp[(s / 16 * D + d) * 16 + s % 16]);
    }
  }
};

// Kept (1, 0): 10 and (0, 1): 20; evicted, between them, (.6, .8): 5, which is nearest to the second.
Merge example(On on, KvMergeKind kind, MergeKeys keys) {
  return {.on = on,
          .keys = {{1, 0}, {.6f, .8f}, {0, 1}},
          .values = {{10, 0}, {5, 0}, {20, 0}},
          .keep = {0, 2},
          .kind = kind,
          .merge_keys = keys,
          .rope = {1, 0, 1, 0, 1, 0}};  // every position turns by nothing
}

TEST_P(KvMerging, TheExample) {
  struct Case {
    KvMergeKind kind;
    MergeKeys keys;
    double v, k0, k1;
  };
  for (const Case& c : {Case{KvMergeKind::d2o, MergeKeys::unrotated, 12, .24, .82},
                        {KvMergeKind::d2o, MergeKeys::none, 12, 0, 1},
                        {KvMergeKind::value, MergeKeys::none, 17.931034, 0, 1}}) {
    Merge m = example(on, c.kind, c.keys);
    m.run();
    EXPECT_EQ(m.v[0][0], 10);
    EXPECT_EQ(m.k[0], (std::vector<double>{1, 0}));
    EXPECT_NEAR(m.v[1][0], c.v, 2e-6);
    EXPECT_NEAR(m.k[1][0], c.k0, 1e-6);
    EXPECT_NEAR(m.k[1][1], c.k1, 1e-6);
  }
}

// Keys that agree before they were turned to their positions still point there, at the position of the target; what
// merges a key whose cosine is below 1 makes it shorter.
TEST_P(KvMerging, UnrotatedKeysAgreeAtAllPositions) {
  const int64_t n = 20, D = 6;
  Merge m{.on = on,
          .keys = {},
          .values = normal_rows("values", n, D),
          .keep = {3, 11, 19},
          .merge_keys = MergeKeys::unrotated};
  m.rope.resize(n * D);
  for (int64_t p = 0; p < n; p++)
    for (int64_t d = 0; d < D / 2; d++) {
      const double angle = 0.1 * double(p) / double(1 + d);
      m.rope[p * D + d] = static_cast<float>(std::cos(angle));
      m.rope[p * D + D / 2 + d] = static_cast<float>(std::sin(angle));
    }
  const auto key = normal("key", D);
  for (int64_t p = 0; p < n; p++) {
    std::vector<double> x = key;
    for (int64_t d = 0; d < D / 2; d++) {
      const double c = m.rope[p * D + d], s = m.rope[p * D + D / 2 + d];
      x[d] = static_cast<float>(key[d] * c - key[d + D / 2] * s);
      x[d + D / 2] = static_cast<float>(key[d + D / 2] * c + key[d] * s);
    }
    m.keys.push_back(x);
  }
  m.run();
  double shortest = 1;
  for (size_t j = 0; j < m.keep.size(); j++) {
    const std::vector<double>& before = m.keys[m.keep[j]];
    const auto squares = [](const std::vector<double>& x) {
      return std::inner_product(x.begin(), x.end(), x.begin(), 0.0);
    };
    const double part = std::sqrt(squares(m.k[j]) / squares(before));
    shortest = std::min(shortest, part);
    for (int64_t d = 0; d < D; d++) EXPECT_NEAR(m.k[j][d], part * before[d], 2e-6);
  }
  EXPECT_LT(shortest, 0.999) << "nothing was merged";
}

// If no slot is evicted, the others keep their bits.
TEST_P(KvMerging, NothingMergedChangesNothing) {
  const int64_t n = 21, D = 8;
  for (KvMergeKind kind : {KvMergeKind::d2o, KvMergeKind::value}) {
    Merge m{.on = on, .keys = normal_rows("k", n, D), .values = normal_rows("v", n, D), .keep = {}, .kind = kind};
    m.threshold = 0.375;
    m.keep.resize(n);
    std::iota(m.keep.begin(), m.keep.end(), 0);
    m.run();
    EXPECT_EQ(m.k, m.keys);
    EXPECT_EQ(m.v, m.values);
    EXPECT_EQ(m.threshold, 0.375);
  }
}

// The evicted slot's cosine with its nearest is 1, then 0.6, then 0.8: threshold 1, then .5 + .15, then .325 + .2.
TEST_P(KvMerging, TheThresholdFollows) {
  double threshold = 0;
  struct Compression {
    double cosine, threshold;
    bool merged;
  };
  for (const Compression& e : {Compression{1, 1, true}, {.6, .65, false}, {.8, .525, true}}) {
    Merge m{.on = on,
            .keys = {{1, 0}, {e.cosine, std::sqrt(1 - e.cosine * e.cosine)}},
            .values = {{1, 0}, {9, 0}},
            .keep = {0},
            .kind = KvMergeKind::d2o};
    m.threshold = threshold;
    m.run();
    threshold = m.threshold;
    EXPECT_NEAR(threshold, e.threshold, 1e-6);
    EXPECT_NEAR(m.v[0][0], e.merged ? (1 + 9 * e.cosine) / 2 : 1, 1e-6);
  }
}

// What makes no sense together is refused.
TEST_P(KvMerging, KeysOfMethodsWithoutKeysAreRefused) {
  Merge m = example(on, KvMergeKind::value, MergeKeys::unrotated);
  m.rope.assign(6, 1);
  EXPECT_THROW(m.run(), std::logic_error);
}

}  // namespace

}  // namespace pare::test
