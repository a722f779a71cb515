// Orders of sums of attention in bf16 (list.h), stated once more by loops over slots: the kernels have their bits. What
// a tensor core adds up is asked of one (ptx::multiply).
#include <numeric>

#include "exponentials.h"
#include "kernel_call.h"
#include "ops/attention.h"
#include "ops/paged.h"
#include "ops/rope.h"
#include "ptx_kernels.h"

namespace pare::test {
namespace {

using namespace kernel;

constexpr int64_t kD = 16;  // head dim: q.k is one step
constexpr float kScale = 0.25f;

// Steps of 16 on a tensor core.
class TensorCore {
 public:
  // sums[i] += a . b[i], i < n <= 8: 16 elements each.
  void add(float* sums, const uint16_t* a, const uint16_t* const* b, int n) {
    fill("d", [&](int64_t i) { return i < n ? sums[i] : 0.f; });  // row 0 of [16][8]
    fill("a", [&](int64_t i) { return i < 16 ? from_bf16(a[i]) : 0.f; });
    fill("b", [&](int64_t i) { return i / 16 < n ? from_bf16(b[i / 16][i % 16]) : 0.f; });
    ptx::multiply(d_.as<float>(), static_cast<const uint16_t*>(a_.data), static_cast<const uint16_t*>(b_.data), 1);
    for (int i = 0; i < n; i++) sums[i] = static_cast<float>(call_["d"].get(i));
  }

 private:
  template <class F>
  void fill(const char* name, F f) {
    for (int64_t i = 0; i < call_[name].size(); i++) call_[name].set(i, f(i));
  }
  Call call_{table_kernels, DType::bf16};
  const Tensor d_ = call_.stat("d", {16, 8}), a_ = call_.act("a", {16, 16}), b_ = call_.act("b", {8, 16});
};

// One query row, and what it attends to.
struct Row {
  const uint16_t* q;
  std::vector<const uint16_t*> k, v;  // by slot
};
struct Result {
  std::vector<uint16_t> o;
  float lse;
};

// The sums of a cut or of a row with a list.
struct Sums {
  float top = -INFINITY, lane[4] = {}, o[kD] = {};
  void scale(float by) {
    for (float& x : lane) x *= by;
    for (float& x : o) x *= by;
  }
  float sum() const { return (lane[0] + lane[1]) + (lane[2] + lane[3]); }
};

class Naive {
 public:
  explicit Naive(const Row& row) : row_(row) {
    for (size_t s = 0; s < row.k.size(); s += 8) {
      float dots[8] = {};
      core_.add(dots, row.q, &row.k[s], static_cast<int>(std::min<size_t>(8, row.k.size() - s)));
      dots_.insert(dots_.end(), dots, dots + 8);
    }
    dots_.resize(row.k.size());
  }
  float score(size_t slot) const { return dots_[slot] * (kScale * kLog2E); }

  Result dense() {
    const size_t n = dots_.size();
    float top = 0, sum = 0, o[kD];
    for (size_t cut = 0; cut < n; cut += 1024) {
      Sums s;
      for (size_t block = cut; block < std::min(n, cut + 1024); block += 128) {
        const size_t end = std::min(n, block + 128);
        float next = s.top;
        for (size_t i = block; i < end; i++) next = std::max(next, score(i));
        const float alpha = exp2_accurate(s.top - next);
        s.top = next;
        float lane[4] = {};
        for (size_t i = block; i < end; i++) lane[i % 8 / 2] += weight(i, next);
        for (int l = 0; l < 4; l++) s.lane[l] = s.lane[l] * alpha + lane[l];
        for (float& x : s.o) x *= alpha;
        for (size_t page = block; page < end; page += 16) add_page(s, page, [&](size_t i) { return i < n; });
      }
      if (cut == 0) {
        top = s.top;
        sum = s.sum();
        std::copy(s.o, s.o + kD, o);
        continue;
      }
      const float next = std::max(top, s.top), before = exp2_accurate(top - next), here = exp2_accurate(s.top - next);
      top = next;
      sum = sum * before + s.sum() * here;
      for (int c = 0; c < kD; c++) o[c] = o[c] * before + s.o[c] * here;
    }
    return result(top, sum, o);
  }

  Result listed(const std::vector<bool>& listed) {
    Sums s;
    const auto counts = [&](size_t i) { return i < listed.size() && listed[i]; };
    for (size_t page = 0; page < listed.size(); page += 16) {
      float most = -INFINITY;
      bool any = false;
      for (size_t i = page; i < page + 16; i++)
        if (counts(i)) {
          any = true;
          most = std::max(most, score(i));
        }
      if (!any) continue;
      if (most > s.top + 64) {
        s.scale(exp2_accurate(s.top - most));
        s.top = most;
        rises++;
      }
      for (size_t i = page; i < page + 16; i++) s.lane[i % 8 / 2] += counts(i) ? weight(i, s.top) : 0.f;
      add_page(s, page, counts);
    }
    return result(s.top, s.sum(), s.o);
  }
  int rises = 0;

 private:
  float weight(size_t slot, float top) const { return exp2_cubic(std::fma(dots_[slot], kScale * kLog2E, -top)); }
  template <class Counts>
  void add_page(Sums& s, size_t page, Counts counts) {
    uint16_t w[16], v[kD][16];
    const uint16_t* columns[kD];
    for (size_t i = 0; i < 16; i++) {
      w[i] = counts(page + i) ? to_bf16(weight(page + i, s.top)) : 0;
      for (int c = 0; c < kD; c++) v[c][i] = counts(page + i) ? row_.v[page + i][c] : 0;
    }
    for (int c = 0; c < kD; c++) columns[c] = v[c];
    for (int c = 0; c < kD; c += 8) core_.add(s.o + c, w, columns + c, 8);
  }
  static Result result(float top, float sum, const float* o) {
    Result r{.o = {}, .lse = 0};
    for (int c = 0; c < kD; c++) r.o.push_back(to_bf16(o[c] * (1.f / sum)));
    r.lse = top + std::log2(sum);  // (the kernels' logarithm is another)
    return r;
  }
  static constexpr float kLog2E = 0x1.715476p0f;
  const Row& row_;
  TensorCore core_;
  std::vector<float> dots_;
};

// One sequence of one head, and its last row by attn_fwd; `edit` changes values before.
struct Sequence {
  explicit Sequence(int64_t n) : n(n), call(table_kernels, DType::bf16) {
    q = call.act("q", {n, 1, kD});
    k = call.act("k", {n, 1, kD});
    v = call.act("v", {n, 1, kD});
  }
  const uint16_t* at(const Tensor& t, int64_t row) const { return static_cast<const uint16_t*>(t.data) + row * kD; }
  Row last() const {
    Row r{at(q, n - 1), {}, {}};
    for (int64_t i = 0; i < n; i++) {
      r.k.push_back(at(k, i));
      r.v.push_back(at(v, i));
    }
    return r;
  }
  // Its own row and a parent of the n - 1 before.
  AttnFwd forward() {
    AttnFwd a{};
    a.o = call.act_out("o", {n, 1, kD});
    a.lse = call.stat_out("lse", {n, 1});
    a.q = q;
    a.k = a.pk = k;
    a.v = a.pv = v;
    a.pairs = n;
    a.scale = kScale;
    a.segments = call.index("segments", {1, 4}, {static_cast<int32_t>(n - 1), 1, 0, static_cast<int32_t>(n - 1)});
    return a;
  }
  void expect(const Result& r) {
    std::string o(reinterpret_cast<const char*>(r.o.data()), r.o.size() * 2);
    EXPECT_EQ(call["o"].bits((n - 1) * kD, n * kD), o) << n << " slots";
    EXPECT_NEAR(call["lse"].get(n - 1), r.lse, 1e-5 * std::fabs(r.lse) + 1e-6) << n << " slots";
  }
  int64_t n;
  Call call;
  Tensor q, k, v;
};

TEST(CudaOrders, DenseRowsGoByBlocksAndCuts) {
  for (int64_t n : {1, 16, 127, 128, 129, 300, 1023, 1024, 1025, 2049}) {
    Sequence s(n);
    table_kernels.attn_fwd(s.forward(), {});
    const Row row = s.last();
    s.expect(Naive(row).dense());
  }
}

// Scores that rise along the sequence scale what is there at every block and cut.
TEST(CudaOrders, DenseRowsWhoseScoresRise) {
  for (float step : {0.03f, 0.3f}) {
    Sequence s(1100);
    for (int64_t i = 0; i < s.n; i++) s.call["k"].set(i * kD, step * static_cast<float>(i));
    for (int64_t c = 0; c < kD; c++) s.call["q"].set((s.n - 1) * kD + c, c == 0 ? 2 : 0.5);
    table_kernels.attn_fwd(s.forward(), {});
    const Row row = s.last();
    s.expect(Naive(row).dense());
  }
}

// Where the parent ends, and whether its rows are a run or a list of slots, changes no bit of the last row.
TEST(CudaOrders, DenseRowsDoNotDependOnTheirParent) {
  constexpr int32_t n = 1100;
  std::string bits;
  for (int32_t own : {1, 70, 140})
    for (bool list : {false, true}) {
      Sequence s(n);
      AttnFwd a = s.forward();
      a.segments = s.call.index("parts", {1, 4}, {n - own, own, 0, n - own});
      a.pairs = int64_t{own} * (n - own) + own * (own + 1) / 2;
      std::vector<int32_t> rows(n - own);
      std::iota(rows.begin(), rows.end(), 0);
      if (list) a.lists = s.call.index("lists", {n - own, 1}, rows);
      table_kernels.attn_fwd(a, {});
      const std::string is = s.call["o"].bits((n - 1) * kD, n * kD) + s.call["lse"].bits(n - 1, n);
      if (bits.empty()) bits = is;
      EXPECT_EQ(is, bits) << own << " own rows, " << (list ? "a list" : "a run");
    }
}

// Rows with a list go page by page.  step: from page to page of the only channel of the keys that counts, 0: random
// keys; a step of 1 is 0.36 in log2 units.
void expect_listed(int64_t n, int32_t block, const std::vector<int32_t>& list, float step, int rises) {
  Sequence s(n);
  for (int64_t i = 0; i < n && step != 0; i++)
    for (int64_t c = 0; c < kD; c++) s.call["k"].set(i * kD + c, c == 0 ? step * static_cast<float>(i / 16) : 0);
  for (int64_t c = 0; c < kD && step != 0; c++) s.call["q"].set((n - 1) * kD + c, c == 0 ? 1 : 0);
  std::vector<bool> listed(static_cast<size_t>(n));
  for (int32_t b : list)
    for (int64_t i = int64_t{b} * block; i < std::min(n, int64_t{b + 1} * block); i++) listed[i] = true;
  AttnFwd a = s.forward();
  const auto budget = static_cast<int32_t>(list.size());
  std::vector<int32_t> all(static_cast<size_t>(n) * list.size(), 0), budgets(static_cast<size_t>(n), 1);
  std::copy(list.begin(), list.end(), all.end() - budget);
  budgets.back() = budget;
  a.blocks = s.call.index("blocks", {n, 1, budget}, all);
  a.budget = s.call.index("budget", {n}, budgets);
  a.block = block;
  table_kernels.attn_fwd(a, {});
  const Row row = s.last();
  Naive naive(row);
  s.expect(naive.listed(listed));
  EXPECT_GE(naive.rises, rises);

  // The same row over pages.
  std::vector<int32_t> table(static_cast<size_t>(n / 16 + 1));
  std::iota(table.rbegin(), table.rend(), 0);
  const auto rows = static_cast<int32_t>(n);
  AttnPaged paged = InPages(s.call, s.k, s.v, table)
                        .read("o of pages", s.q, {{rows - 1, 1, rows, 0}}, kScale, {listed_slots(rows, budget, block)});
  paged.blocks = s.call.index("list", {1, 1, budget}, list);
  paged.budget = s.call.index("budget of pages", {1}, {budget});
  paged.block = block;
  table_kernels.attn_paged(paged, {});
  EXPECT_EQ(s.call["o of pages"].bits((n - 1) * kD, n * kD), s.call["o"].bits((n - 1) * kD, n * kD)) << n << " slots";
}

TEST(CudaOrders, ListedRowsGoByPages) {
  expect_listed(200, 16, {0, 2, 3, 7, 9, 12}, 0, 1);
  expect_listed(161, 16, {10}, 0, 1);
  expect_listed(130, 4, {0, 1, 2, 3, 5, 6, 7, 9, 10, 14, 17, 18, 21, 22, 23, 26, 28, 30, 32}, 0, 1);
  expect_listed(67, 4, {1, 8, 16}, 0, 1);
  expect_listed(1300, 4, {0, 4, 8, 12, 16, 20, 100, 101, 102, 103, 104, 319, 320, 324}, 0, 1);
}
// A page whose largest score is more than 64 above sets what weights are relative to, in the middle of a tile too.
TEST(CudaOrders, ListedRowsWhoseScoresRise) {
  expect_listed(200, 16, {0, 1, 2, 3, 4, 5, 9, 12}, 192, 8);
  expect_listed(200, 16, {0, 1, 2, 3, 4, 5, 9, 12}, 128, 5);
  expect_listed(130, 4, {0, 4, 5, 9, 12, 13, 14, 15, 16, 23, 32}, 192, 7);
  expect_listed(40, 16, {0, 2}, 80, 1);  // by 58: weights above 1
}

// Every 1024 own rows of a query head are a part of dk and dv.  To 2^24 in another part the ones are added as one sum;
// a chain would lose each of them.
TEST(CudaOrders, GradientsOfKeysAreSumsOfRuns) {
  constexpr int64_t d = 8;
  // The gap is for the kernel of mma.sync, which takes rows that begin anywhere.
  for (const auto& [n, heads, gap] : {std::array<int64_t, 3>{2100, 1, 0}, {1040, 2, 0}, {1040, 2, 3}}) {
    Call t(table_kernels, DType::bf16);
    // Every row sees one slot: what it is for the others is next to nothing.
    const Tensor q = t.act("q", {n, heads, d}, gap), k = t.act("k", {n, 1, d}), v = t.act("v", {n, 1, d});
    const Tensor pk = t.act("pk", {1, 1, d}), pv = t.act("pv", {1, 1, d}), d_o = t.act("d_o", {n, heads, d});
    const auto fill = [&](const char* name, auto f) {
      for (int64_t i = 0; i < t[name].size(); i++) t[name].set(i, f(i));
    };
    fill("q", [](int64_t i) { return i % d == 0 ? 64 : 0; });
    fill("k", [](int64_t) { return 0; });
    fill("v", [](int64_t) { return 0; });
    fill("pk", [](int64_t i) { return i == 0 ? 64 : 0; });
    fill("pv", [](int64_t) { return 0; });
    fill("d_o", [&, n = n, heads = heads](int64_t i) {
      const int64_t row = i / d / heads, head = i / d % heads;
      if (row == 1023 && head == 0) return 0x1p24;
      if (row == n - 3 && head == heads - 1) return -0x1p24;
      // Ones in the next run, or in the first one of the next head.
      return row % 16 == 3 && row / 1024 == (heads == 1) && head == heads - 1 ? 1. : 0.;
    });
    const Tensor o = t.act("o", {n, heads, d}), lse = t.stat("lse", {n, heads});
    fill("o", [](int64_t) { return 0; });
    fill("lse", [](int64_t) { return 64 * 64 * 1.4426950408889634; });
    AttnBwd a{};
    a.dq = t.act_out("dq", {n, heads, d});
    a.dk = t.act("dk", {n, 1, d});
    a.dv = t.act("dv", {n, 1, d});
    a.dpk = t.act("dpk", {1, 1, d});
    a.dpv = t.act("dpv", {1, 1, d});
    fill("dpv", [](int64_t) { return 0; });
    a.d_o = d_o;
    a.o = o;
    a.lse = lse;
    a.q = q;
    a.k = k;
    a.v = v;
    a.pk = pk;
    a.pv = pv;
    a.segments = t.index("segments", {1, 4}, {0, static_cast<int32_t>(n), 0, 1});
    a.pairs = n;
    a.scale = 1;
    a.work = t.stat_scratch("scratch", {attn_bwd_work(n, 1, 1, d, 1)});
    table_kernels.attn_bwd(a, {});
    for (int64_t c = 0; c < d; c++) EXPECT_EQ(t["dpv"].get(c), 64) << heads << " heads, gap " << gap;
  }
}

}  // namespace
}  // namespace pare::test
