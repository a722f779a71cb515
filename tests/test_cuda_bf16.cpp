// CUDA kernels in bf16 that test_ops.cpp runs in f32 only: values against `ref` in double from the same bf16 inputs,
// and the bits that rollout and learner must share.
#include <cstdlib>

#include "comm/comm.h"
#include "kernel_call.h"
#include "ops/data.h"
#include "ops/linear_tiles.h"
#include "ops/logits.h"
#include "ops/norm.h"
#include "ops/paged.h"
#include "ops/probe.h"
#include "ops/rope.h"
#include "ptx_kernels.h"

namespace pare::test {
namespace {

using namespace kernel;

TEST(CudaBf16, Linear) {
  const auto every_op = [](const std::vector<std::string>& sizes, bool orders) {
    check("linear_fwd", cases::with(sizes, {"", "bias=1,residual=1,in_place=1"}), 0, orders);
    check("linear_bwd_input", cases::with(sizes, {"", "accumulate=1"}), 0, orders);
    check("linear_bwd_weight", cases::with(sizes, {"bias=1"}), 0, orders);
  };
  every_op({"M=5,K=17,N=3,gap=7"}, true);
  every_op({"M=1,K=1,N=1", "M=66,K=63,N=70", "M=3,K=130,N=16,gap=8", "M=209,K=40,N=72"}, false);
}

TEST(CudaBf16, Rows) {
  const std::vector<std::string> widths = {"C=1", "C=7", "C=8", "C=136"};
  for (const char* op : {"embedding_fwd", "embedding_bwd"}) check(op, cases::with(widths, {"N=5,V=7"}));
  check("copy_rows", cases::with(widths, {"n=2,N=6,to=4,gap=3", "n=2,N=6,to=4,gap=1"}));
  check("scatter_add_rows", {"N=7,R=5,C=20"}, 3. / 64);  // sums rounded to bf16 at every addition
}

TEST(CudaBf16, PagesAreWrittenAndCopied) {
  for (const char* d : {"20", "64"}) {
    for (const char* gap : {"3", "8"})
      check(body_of("kv_write", cat("K=2,pos=1,inputs=0,D=", d, ",gap=", gap), {.sequences = {{7, 36}, {1, 9}}}));
    check("kv_copy_pages", {cat("n=2,K=2,beside=1,D=", d)});
  }
}

TEST(CudaBf16, Logprob) {
  for (const auto& row : {std::pair<int64_t, float>{1, 1.f}, {127, 0.5f}, {128, 1.f}, {129, 0.7f}, {1000, 1.3f}})
    check([&](Call& t) {
      const auto& [vocabulary, temperature] = row;
      const Tensor logits = t.act("logits", {3, vocabulary});
      const int32_t last = static_cast<int32_t>(vocabulary - 1);
      t.table.logprob({t.stat_out("logprob", {3}), t.stat_out("entropy", {3}), logits,
                       t.index("target", {3}, {0, last, last / 2}), temperature},
                      {});
    });
}

LogitsLoss logits_loss(Call& t, const LossSpec& spec) {
  LogitsLoss a{};
  a.logprob = t.stat_out("logprob", {3});
  a.entropy = t.stat_out("entropy", {3});
  a.loss = t.stat_out("loss", {3});
  a.kl = t.stat_out("kl", {3});
  a.clipped = t.index("clipped", {3}, {});
  a.logits = t.act("logits", {3, 131});
  a.target = t.index("target", {3}, {130, 0, 64});
  a.weight = t.stat("weight", {3});
  a.kl_weight = t.stat("kl_weight", {3});
  a.advantage = t.stat("advantage", {3});
  a.old_logprob = t.stat("old_logprob", {3});
  for (int i = 0; i < 3; i++) t["old_logprob"].set(i, -5.5 - i);  // the log-probs lie there
  if (spec.policy == PolicyLoss::gspo) a.log_ratio = t.stat("log_ratio", {3});
  if (spec.kl == KlLoss::k3) a.ref_logprob = t.stat("ref_logprob", {3});
  if (is_exact(spec.kl)) a.ref_logits = t.act("ref_logits", {3, 131});
  if (spec.centring.on) a.sampler_logits = t.act("sampler_logits", {3, 131});
  a.spec = spec;
  return a;
}

TEST(CudaBf16, LogitsLoss) {
  for (PolicyLoss policy : {PolicyLoss::nll, PolicyLoss::ppo, PolicyLoss::gspo, PolicyLoss::cispo})
    for (KlLoss kl : {KlLoss::none, KlLoss::k3, KlLoss::exact, KlLoss::exact_forward})
      check(
          [&](Call& t) {
            t.table.logits_loss(logits_loss(t, {.policy = policy,
                                                .kl = kl,
                                                .clip_c = 3,
                                                .kl_coef = 0.3f,
                                                .entropy_coef = 0.1f,
                                                .temperature = 0.8f}),
                                {});
          },
          0, policy == PolicyLoss::ppo);
}

TEST(CudaBf16, CentredScores) {
  for (const Centring& centring : {Centring{.on = true}, Centring{.on = true, .by_ratio = true, .cap = 1.1f}})
    check([&](Call& t) {
      LogitsLoss a = logits_loss(t, {.policy = PolicyLoss::ppo, .temperature = 0.8f, .centring = centring});
      for (int i = 0; i < 3; i++) t["old_logprob"].set(i, NAN);
      t.table.logits_loss(a, {});
    });
}

TEST(CudaBf16, Sample) {
  for (const float temperature : {1.f, 0.f, 0.7f})
    check([&](Call& t) {
      t.table.sample({t.index("token", {4}, {}), t.stat_out("logprob", {4}), t.act("logits", {4, 259}),
                      t.index("counter", {4, 3}, {1, 0, 5, 2, 0, 5, 1, 7, 6, -3, 9, 1 << 20}),
                      rng_key(3, RngStream::sample, 1), temperature},
                     {});
    });
}

TEST(CudaBf16, Truncate) {
  for (const Truncation& keep : {Truncation{9}, {0, 0.8f}, {100, 0.5f}, {0, 1, 0.1f}, {50, 0.9f, 0.02f}})
    check([&](Call& t) { t.table.truncate({t.act("logits", {4, 259}), 1.3f, keep}, {}); });
}

// left [rows][depth] times right [columns][depth], transposed, for each `part` of k: chains of products of 16 by the
// tensor cores, k ascending, from +0.
std::vector<std::vector<float>> chains(const std::vector<uint16_t>& left, const std::vector<uint16_t>& right,
                                       int64_t rows, int64_t columns, int64_t depth, int64_t part) {
  const int64_t parts = (depth + part - 1) / part, across = (columns + 7) / 8, tiles = (rows + 15) / 16 * across;
  Call t(table_kernels, DType::bf16);
  float* const d = t.stat("sum", {parts * tiles, 16, 8}).as<float>();
  auto *const a = static_cast<uint16_t*>(t.act("a", {parts * tiles, 16, 16}).data),
              *const b = static_cast<uint16_t*>(t.act("b", {parts * tiles, 8, 16}).data);
  std::fill_n(d, parts * tiles * 128, 0.f);
  for (int64_t k = 0; k < std::min(part, depth); k += 16) {
    for (int64_t p = 0; p < parts; p++)
      for (int64_t i = 0; i < tiles; i++) {
        const auto fill = [&](uint16_t* to, int64_t n, const std::vector<uint16_t>& from, int64_t first, int64_t all) {
          for (int64_t e = 0; e < n * 16; e++) {
            const int64_t r = first + e / 16, c = p * part + k + e % 16;
            to[e] = r < all && k + e % 16 < part && c < depth ? from[r * depth + c] : 0;
          }
        };
        fill(a + (p * tiles + i) * 256, 16, left, i / across * 16, rows);
        fill(b + (p * tiles + i) * 128, 8, right, i % across * 8, columns);
      }
    ptx::multiply(d, a, b, static_cast<int>(parts * tiles));
    EXPECT_EQ(kernel_error(), "");
  }
  std::vector<std::vector<float>> sums(parts, std::vector<float>(rows * columns));
  for (int64_t p = 0; p < parts; p++)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < columns; c++)
        sums[p][r * columns + c] = d[(p * tiles + r / 16 * across + c / 8) * 128 + r % 16 * 8 + c % 8];
  return sums;
}
// x + the parts, ascending.
std::vector<float> added(std::vector<float> x, const std::vector<std::vector<float>>& parts) {
  for (const std::vector<float>& p : parts)
    for (size_t e = 0; e < x.size(); e++) x[e] += p[e];
  return x;
}
std::string rounded(const std::vector<float>& x) {
  std::vector<uint16_t> y;
  for (float f : x) y.push_back(to_bf16(f));
  return {reinterpret_cast<const char*>(y.data()), y.size() * 2};
}

std::vector<uint16_t> values(Call& t, const char* name) {
  std::vector<uint16_t> v(t[name].size());
  std::memcpy(v.data(), t[name].bits().data(), v.size() * 2);
  return v;
}

TEST(CudaBf16, LinearIsChainsOfTensorCoreProducts) {
  struct Shape {
    int64_t rows, inputs, outputs, part_of_y = 4096, part_of_dx = 4096;  // at most 2048 of k are one part
  };
  for (const auto& [n, i, o, part_of_y, part_of_dx] : {Shape{1, 1, 1},      {3, 24, 17},
                                                       {66, 72, 7},         {17, 330, 24},
                                                       {2, 24, 530},        {70, 1090, 5},
                                                       {1, 2047, 9},        {1, 9, 2048},
                                                       {1, 2049, 9, 320},  // 8 parts of 257, rounded up: 7
                                                       {70, 2049, 5, 320},  {5, 7, 2049, 4096, 320},
                                                       {3, 4095, 7, 512},   {1, 4096, 7, 512},
                                                       {17, 4097, 5, 576},  {2, 5, 4097, 4096, 576},
                                                       {1, 8191, 3, 1024},  {1, 8192, 3, 1024},
                                                       {2, 8193, 3, 1088},  {1, 3, 8193, 4096, 1088},
                                                       {2, 33000, 1, 3712},  // 9 parts
                                                       {530, 9, 16},        {4095, 3, 5},
                                                       {4096, 5, 3},        {4097, 9, 16},  // 2 of dw
                                                       {8200, 3, 5}}) {
    Call t(table_kernels, DType::bf16);
    const Weight w = t.weight("w", o, i);
    const Tensor x = t.act("x", {n, i}), dy = t.act("dy", {n, o}), dw = t.stat("dw", {o, i});
    std::vector<float> dw_is;
    for (int64_t e = 0; e < o * i; e++) dw_is.push_back(static_cast<float>(t["dw"].get(e)));
    table_kernels.linear_fwd({t.act_out("y", {n, o}), x, w, {}, {}}, {});
    table_kernels.linear_bwd_input({t.act_out("dx", {n, i}), dy, w, false}, {});
    table_kernels.linear_bwd_weight({dw, {}, dy, x}, {});
    const auto across = [](const std::vector<uint16_t>& v, int64_t rows) {
      const int64_t columns = static_cast<int64_t>(v.size()) / rows;
      std::vector<uint16_t> to(v.size());
      for (int64_t e = 0; e < rows * columns; e++) to[e % columns * rows + e / columns] = v[e];
      return to;
    };
    const std::string shape = cat(n, " rows, ", i, " to ", o);
    const auto zeros = [n = n](int64_t columns) { return std::vector<float>(n * columns); };
    EXPECT_EQ(t["y"].bits(), rounded(added(zeros(o), chains(values(t, "x"), values(t, "w"), n, o, i, part_of_y))))
        << shape;
    EXPECT_EQ(t["dx"].bits(),
              rounded(added(zeros(i), chains(values(t, "dy"), across(values(t, "w"), o), n, i, o, part_of_dx))))
        << shape;
    dw_is = added(dw_is, chains(across(values(t, "dy"), n), across(values(t, "x"), n), o, i, n, 4096));
    EXPECT_EQ(t["dw"].bits(), std::string(reinterpret_cast<const char*>(dw_is.data()), dw_is.size() * 4)) << shape;
  }
}

// The shapes at which each number of parts side by side begins and ends.
TEST(CudaBf16, PartsOfLinearLayersFollowFromTheirShape) {
  struct Shape {
    int64_t columns, depth, part;
  };
  for (const Shape& s : {Shape{1, 2560, 320},  {1024, 2560, 320},   // 8
                         {1025, 2560, 384},    {1152, 2560, 384},   // 7
                         {1153, 2560, 448},    {1280, 2560, 448},   // 6
                         {1281, 2560, 512},    {1536, 2560, 512},   // 5
                         {1537, 2560, 640},    {2048, 2560, 640},   // 4
                         {2049, 2560, 896},    {2688, 2560, 896},   // 3
                         {2689, 2560, 1280},   {4096, 2560, 1280},  // 2
                         {4097, 2560, 2560},   {4096, 2048, 2048},  {4097, 4096, 4096}, {4097, 4097, 2112},
                         {1536, 8960, 1792},   {1536, 17920, 3584},   // Qwen2.5-1.5B: down, dx of gate-up
                         {1536, 151936, 4032}, {896, 4864, 640},      // dx of the head; 0.5B: down
                         {3584, 3584, 1792},   {3584, 18944, 3840}})  // 7B: o, down
    EXPECT_EQ(linear_part(s.columns, s.depth), s.part) << s.columns << " columns, " << s.depth;
}

// The last columns of results of many.
TEST(CudaBf16, PartsOfLinearLayersFollowFromTheirColumns) {
  constexpr int64_t depth = 2049, some = 9;
  ask_for(TensorKernel::mma);  // whose emulation computes 16 rows, not 64
  for (const auto& [columns, part] :
       {std::pair<int64_t, int64_t>{1536, 448}, {1537, 576}, {4096, 1088}, {4097, 4096}}) {  // 5, 4, 2 parts, and one
    Call t(table_kernels, DType::bf16);
    const Tensor packed = t.act_out("packed", {weight_panels(columns), depth, kPanel});
    std::memset(packed.data, 0, packed.bytes());
    KernelMemory::wrote(packed.data, packed.bytes());
    const Weight w{packed, columns};
    const Tensor x = t.act("x", {1, depth});
    table_kernels.pack_weight({w, t.act("rows", {some, depth}), columns - some}, {});
    table_kernels.linear_fwd({t.act_out("y", {1, columns}), x, w, {}, {}}, {});
    EXPECT_EQ(t["y"].bits(columns - some, columns),
              rounded(added(std::vector<float>(some), chains(values(t, "x"), values(t, "rows"), 1, some, depth, part))))
        << columns;
  }
  ask_for(TensorKernel::choose);
}

// 2^30 in the first part of k, -2^30 in the second, and ones in the others, which a chain with either would lose.
TEST(CudaBf16, PartsOfLinearLayersAreSumsOfTheirOwn) {
  constexpr int64_t width = 9;
  // 2^30 at k = 0, -2^30 at the second part, and ones from the third on, at both ends of each.
  const auto value = [](int64_t part, int64_t depth, int64_t k) {
    const bool edge = k % part == 0 || k % part == part - 1 || k == depth - 1;
    return k == 0 ? 0x1p30 : k == part ? -0x1p30 : k >= 2 * part && edge ? 1. : 0.;
  };
  const auto sum = [&](int64_t part, int64_t depth) {
    double sum = 0;
    for (int64_t k = 0; k < depth; k++) sum += value(part, depth, k);
    return sum;
  };
  const auto filled = [](Call& t, const Tensor& x, const char* name, auto f) {  // f(row, column)
    for (int64_t e = 0; e < t[name].size(); e++) t[name].set(e, f(e / x.shape[1], e % x.shape[1]));
    return x;
  };
  const auto one = [](int64_t, int64_t) { return 1.; };
  const auto expect_everywhere = [](Call& t, const char* name, double value) {
    for (int64_t e = 0; e < t[name].size(); e++) ASSERT_EQ(t[name].get(e), value) << name << "[" << e << "]";
  };
  struct Shape {
    int64_t rows, depth, part;
  };
  for (const auto& [n, depth, part] : {Shape{1, 2104, 320}, {17, 2104, 320}, {66, 2104, 320}, {3, 8200, 1088}})
    for (int64_t gap : {0, 1}) {  // rows that begin at multiples of 16 bytes, or anywhere
      SCOPED_TRACE(cat(n, " rows, depth ", depth, ", gap ", gap));
      Call t(table_kernels, DType::bf16);
      const auto along = [&, part = part, depth = depth](int64_t, int64_t k) { return value(part, depth, k); };
      const auto act = [&](const char* name, int64_t rows, int64_t columns) {
        return filled(t, t.act_out(name, {rows, columns}, gap), name, along);
      };
      const auto ones = [&](const char* name, int64_t outputs, int64_t inputs) {
        const Weight w = t.weight(name, outputs, inputs);
        table_kernels.pack_weight({w, filled(t, t[name].tensor(), name, one), 0}, {});
        return w;
      };
      table_kernels.linear_fwd({t.act_out("y", {n, width}), act("x", n, depth), ones("w", width, depth), {}, {}}, {});
      table_kernels.linear_bwd_input(
          {t.act_out("dx", {n, width}), act("dy", n, depth), ones("wT", depth, width), false}, {});
      expect_everywhere(t, "y", sum(part, depth));
      expect_everywhere(t, "dx", sum(part, depth));
    }
  // dw loses what it holds to the first part, as the parts are added to it one by one.
  for (const auto& [side, gap] : {std::pair<int64_t, int64_t>{72, 0}, {9, 0}, {9, 1}}) {
    SCOPED_TRACE(cat("dw, ", side, " x ", side, ", gap ", gap));
    constexpr int64_t rows = 8200;
    Call t(table_kernels, DType::bf16);
    const auto down = [&](int64_t k, int64_t) { return value(4096, rows, k); };
    const Tensor dy = filled(t, t.act_out("dy", {rows, side}, gap), "dy", down);
    const Tensor x = filled(t, t.act_out("x", {rows, side}, gap), "x", one);
    table_kernels.linear_bwd_weight({filled(t, t.stat("dw", {side, side}), "dw", one), {}, dy, x}, {});
    expect_everywhere(t, "dw", sum(4096, rows));
  }
}

// Calls that are cut at multiples of 4096 rows give dw the bits of one; another cut does not.
TEST(CudaBf16, WeightGradientsContinueAfter4096Rows) {
  const int64_t n = 8200, i = 9, o = 16;
  const auto bits = [&](std::initializer_list<int64_t> cuts) {
    Call t(table_kernels, DType::bf16);
    const Tensor dy = t.act("dy", {n, o}), x = t.act("x", {n, i}), dw = t.stat("dw", {o, i});
    int64_t first = 0;
    for (const int64_t end : cuts) {
      table_kernels.linear_bwd_weight({dw, {}, dy.rows(first, end - first), x.rows(first, end - first)}, {});
      first = end;
    }
    return t["dw"].bits();
  };
  const std::string whole = bits({n});
  EXPECT_EQ(bits({4096, n}), whole);
  EXPECT_EQ(bits({4096, 8192, n}), whole);
  EXPECT_EQ(bits({8192, n}), whole);
  EXPECT_NE(bits({4095, n}), whole);
}

// dw: 1024 strands of rows, each a chain; eight neighbours are added up, then their sums, then dw.
TEST(CudaBf16, RmsnormWeightGradientIsSumsOfStrands) {
  struct Size {
    int64_t n, c;
  };
  // Shared memory has room for the rows of eight warps, four and two.
  std::vector<Size> sizes = {{11, 2504}, {11, 5000}};
  for (const int64_t n : {1, 9, 1023, 1024, 1025, 2049, 3080})
    for (const int64_t c : {3, 40}) sizes.push_back({n, c});
  for (const auto& [n, c] : sizes) {
    Call t(table_kernels, DType::bf16);
    const Tensor x = t.act("x", {n, c}), dy = t.act("dy", {n, c}), w = t.act("w", {c}), dw = t.stat("dw", {c});
    const Tensor rstd = t.stat_out("rstd", {n});
    table_kernels.rmsnorm_fwd({t.act_out("y", {n, c}), rstd, x, w, 1e-6f}, {});
    std::vector<float> should(c);
    for (int64_t i = 0; i < c; i++) {
      std::array<float, 1024> strand = {};
      for (int64_t r = 0; r < n; r++)
        strand[r % 1024] = std::fma(static_cast<float>(t["dy"].get(r * c + i)),
                                    static_cast<float>(t["x"].get(r * c + i)) * static_cast<float>(t["rstd"].get(r)),
                                    strand[r % 1024]);
      float all = 0;
      for (size_t g = 0; g < 1024; g += 8) {
        float group = strand[g];
        for (size_t s = 1; s < 8; s++) group += strand[g + s];
        all += group;
      }
      should[i] = static_cast<float>(t["dw"].get(i)) + all;
    }
    const Tensor parts = t.stat_out("parts", {norm_strands(n, DType::bf16), c});
    table_kernels.rmsnorm_bwd({t.act_out("dx", {n, c}), dw, dy, x, w, rstd, false, parts}, {});
    for (int64_t i = 0; i < c; i++)
      EXPECT_EQ(static_cast<float>(t["dw"].get(i)), should[i]) << n << " rows, column " << i << " of " << c;
    table_kernels.rmsnorm_bwd({t.act_out("frozen", {n, c}), {}, dy, x, w, rstd, false}, {});
    EXPECT_EQ(t["frozen"].bits(), t["dx"].bits());
  }
}

TEST(CudaBf16, LinearRowsAreIndependentOfTheirNumber) {
  const int64_t n = 70, o = 67;
  for (const TensorKernel kernel : {TensorKernel::choose, TensorKernel::mma})
    for (const int64_t i : {136, 2200})
      for (const int64_t gap : {0, 1}) {
        ask_for(kernel);
        Call t(table_kernels, DType::bf16);
        const Weight w = t.weight("w", o, i);
        const Tensor x = t.act("x", {n, i}, gap), bias = t.act("bias", {o}), residual = t.act("residual", {n, o});
        table_kernels.linear_fwd({t.act_out("y", {n, o}), x, w, bias, residual}, {});
        for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {69, 1}, {3, 17}, {1, 64}, {5, 65}}) {
          table_kernels.linear_fwd(
              {t.act_out("some", {count, o}), x.rows(first, count), w, bias, residual.rows(first, count)}, {});
          EXPECT_EQ(t["some"].bits(), t["y"].bits(first * o, (first + count) * o)) << count << " rows from " << first;
        }
      }
  ask_for(TensorKernel::choose);
}

// With few rows the last block of a product norms them: by both kernels, with parts of k apart and in place.
TEST(CudaBf16, ANormBehindAProductHasTheBitsOfItsOp) {
  const auto expect_same = [](int64_t n, int64_t o, int64_t i, bool in_place) {
    SCOPED_TRACE(cat(n, " rows, ", i, " to ", o));
    Call t(table_kernels, DType::bf16);
    const Weight w = t.weight("w", o, i);
    const Tensor x = t.act("x", {n, i}), r = t.act("r", {n, o}, 8), gain = t.act("gain", {o});
    LinearParts parts = t.parts(n, o, i);
    if (!parts.arrivals) parts.arrivals = t.index("arrivals", {kLinearTiles}, std::vector<int32_t>(kLinearTiles));
    const auto norm_of = [&](const std::string& name) {
      return RowNorm{
          .y = t.act_out(name, {n, o}, 16), .rstd = t.stat_out(name + " rstd", {n}), .w = gain, .eps = 1e-6f};
    };
    const Tensor alone = t.act_out("alone", {n, o});
    table_kernels.linear_fwd({alone, x, w, {}, r, parts}, {});
    const RowNorm separate = norm_of("normed alone");
    table_kernels.rmsnorm_fwd({separate.y, separate.rstd, alone, gain, separate.eps}, {});
    LinearFwd a{in_place ? r : t.act_out("y", {n, o}, 8), x, w, {}, r, parts};
    a.norm = norm_of("normed");
    table_kernels.linear_fwd(a, {});
    EXPECT_EQ(t[in_place ? "r" : "y"].bits(), t["alone"].bits());
    EXPECT_EQ(t["normed"].bits(), t["normed alone"].bits());
    EXPECT_EQ(t["normed rstd"].bits(), t["normed alone rstd"].bits());
    for (const double count : t["arrivals"].values()) EXPECT_EQ(count, 0);
  };
  for (const TensorKernel kernel : {TensorKernel::choose, TensorKernel::mma}) {
    ask_for(kernel);
    for (const int64_t i : {72, 2056})
      for (const int64_t n : {1, 13, 16, 17}) expect_same(n, 200, i, n == 13);
    expect_same(3, 203, 72, false);  // no whole packs: two kernels
    in_all_orders([&] {
      expect_same(5, 136, 72, true);
      expect_same(5, 136, 2056, false);
    });
  }
  ask_for(TensorKernel::choose);
}

// Clusters of two blocks, the second of which has no rows in the last; EmuMachine.EveryTileHasTheBitsOfMmaSync has the
// other tiles.  A tile takes more stages than the ring has, so every block waits for the other.
TEST(CudaBf16, ClustersHaveTheBitsOfBlocksAlone) {
  if (!ask_for(TensorKernel::wgmma)) GTEST_SKIP() << "this device has one kernel";
  const auto result_of = [](WgmmaTile tile, auto product) {
    asked_tile = tile;
    Call t(table_kernels, DType::bf16);
    product(t);
    return t["result"].bits();
  };
  const auto expect_same = [&](WgmmaTile tile, auto product) {
    const std::string alone = result_of({tile.rows, tile.columns}, product);
    EXPECT_EQ(result_of(tile, product), alone);
  };
  const int64_t n = 257, columns = 200, k = 392;
  expect_same({128, 192, 2}, [&](Call& t) {
    t.table.linear_fwd({t.act_out("result", {n, columns}), t.act("x", {n, k}), t.weight("w", columns, k), {}, {}}, {});
  });
  expect_same({128, 192, 2}, [&](Call& t) {
    t.table.linear_bwd_input({t.act("result", {n, columns}), t.act("dy", {n, k}), t.weight("w", k, columns), true}, {});
  });
  expect_same({128, 192, 2}, [&](Call& t) {
    t.table.linear_bwd_weight({t.stat("result", {264, columns}), {}, t.act("dy", {k, 264}), t.act("x", {k, columns})},
                              {});
  });
  // The same kernel in graphs: a node keeps its cluster.
  const std::unique_ptr<Graphs> graphs = table_kernels.graphs();
  ASSERT_TRUE(graphs);
  const auto gathered = [&](Call& t) {
    const Stream stream{.handle = nullptr, .graphs = graphs.get()};
    const LinearFwd a{t.act_out("result", {n, columns}), t.act("x", {n, k}), t.weight("w", columns, k), {}, {}};
    graphs->begin();
    t.table.linear_fwd(a, stream);
    EXPECT_TRUE(graphs->launch(stream));
  };
  for (int i = 0; i < 2; i++) expect_same({128, 192, 2}, gathered);
  asked_tile.reset();
  ask_for(TensorKernel::choose);
}

// The products of a layer of Qwen2.5-1.5B and one of the 0.5B on 132 multiprocessors: one wave in place of two, or the
// fewest bytes, by clusters where there are several waves.
TEST(CudaBf16, TilesAreThoseOfTheModelOfTheirTime) {
  struct Product {
    int64_t rows, columns, depth;
    WgmmaTile tile;
  };
  for (const Product& p : {Product{256, 17920, 1536, {256, 144}},
                           {1024, 17920, 1536, {256, 192, 2}},
                           {4096, 17920, 1536, {128, 256, 2}},
                           {4096, 2048, 1536, {128, 256, 2}},
                           {4096, 1536, 1536, {256, 192}},
                           {16, 1536, 1536, {64, 32}},
                           {16, 17920, 1536, {128, 144}},
                           {256, 2048, 1536, {64, 64}},
                           {4096, 1152, 896, {256, 144}},
                           {256, 151936, 1536, {128, 256, 2}}}) {
    EXPECT_EQ(best_tile(kOnePartTiles, p.rows, p.columns, p.depth, 132), p.tile) << p.rows << " x " << p.columns;
    EXPECT_EQ(linear_part(p.columns, p.depth), p.depth);
  }
  for (const Product& p : {Product{16, 1536, 8960, {64, 64}},
                           {128, 1536, 8960, {128, 64}},
                           {256, 1536, 8960, {128, 128}},
                           {512, 1536, 8960, {128, 256}}})
    EXPECT_EQ(
        best_tile(kOnePartTiles, p.rows, p.columns, p.depth, 132, {linear_parts_apart(p.rows, p.columns, p.depth)}),
        p.tile)
        << p.rows << " x " << p.columns;
  for (const Product& p :
       {Product{1024, 1536, 8960, {128, 128}}, {4096, 1536, 8960, {128, 192, 2}}, {4096, 1536, 17920, {128, 192, 2}}})
    EXPECT_EQ(best_tile(kPartsTiles, p.rows, p.columns, p.depth, 132), p.tile) << p.rows << " x " << p.columns;
  for (const Product& p : {Product{17920, 1536, 4096, {128, 256, 2}}, {1536, 1536, 4096, {128, 192}}})
    EXPECT_EQ(best_tile(kGradientTiles, p.rows, p.columns, p.depth, 132), p.tile) << p.rows << " x " << p.columns;
  // dx of an LM head: in turn while its tiles are few, by clusters if there are several waves of parts.
  for (const int64_t rows : {256, 1024, 2304}) EXPECT_TRUE(linear_takes_turns(rows, 1536, 151936, 132)) << rows;
  EXPECT_EQ(linear_turn_sums(1024, 1536, 151936), 1024 * 1536 + kTurnBlocks);
  EXPECT_EQ(best_tile(kTurnTiles, 1024, 1536, 151936, 132, {38, true}), (WgmmaTile{128, 256, 2}));
  EXPECT_FALSE(linear_takes_turns(4096, 1536, 151936, 132)) << "tiles enough";
  EXPECT_FALSE(linear_takes_turns(1024, 1536, 2048, 132)) << "one part";
  EXPECT_FALSE(linear_takes_turns(16, 1536, 2056, 132)) << "short parts";
  // Measured on an H100, us (tools/bench/results/h100.md), at 1755 MHz.
  const auto us = [](const Product& p) { return tile_clocks(p.rows, p.columns, p.depth, p.tile, 132) / 1755; };
  EXPECT_NEAR(us({256, 17920, 1536, {128, 256}}), 55.7, 0.1 * 55.7);
  EXPECT_NEAR(us({256, 1536, 8960, {128, 64}}), 42.2, 0.1 * 42.2);
  EXPECT_NEAR(us({4096, 17920, 1536, {128, 256}}), 449, 0.1 * 449);
  EXPECT_NEAR(us({4096, 1536, 17920, {128, 128}}), 425, 0.1 * 425);
  EXPECT_NEAR(us({17920, 1536, 4096, {128, 128}}), 481, 0.1 * 481);
}

// The bits of a row do not depend on the kernel: mma.sync, or wgmma on compute capability 9.0.
TEST(CudaBf16, LinearHasTheSameBitsFromEveryKernel) {
  if (!ask_for(TensorKernel::wgmma)) GTEST_SKIP() << "this device has one kernel";
  const auto same_bits = [&](int64_t n, int64_t i, int64_t o, int64_t gap) {
    SCOPED_TRACE(cat(n, " rows, ", i, " to ", o, ", gap ", gap));
    std::string bits;
    for (const TensorKernel kernel : {TensorKernel::mma, TensorKernel::wgmma}) {
      ask_for(kernel);
      Call t(table_kernels, DType::bf16);
      const Weight w = t.weight("w", o, i);
      const Tensor x = t.act("x", {n, i}, gap), dy = t.act("dy", {n, o}, gap), bias = t.act("bias", {o}),
                   residual = t.act("residual", {n, o}, gap);
      table_kernels.linear_fwd({t.act_out("y", {n, o}, gap), x, w, bias, residual}, {});
      table_kernels.linear_bwd_input({t.act_out("dx", {n, i}, gap), dy, w, false}, {});
      const std::string both = t["y"].bits() + t["dx"].bits();
      if (kernel == TensorKernel::mma)
        bits = both;
      else
        EXPECT_EQ(both, bits);
      for (const char* name : {"y", "dx"}) EXPECT_TRUE(t[name].zones_intact()) << name;
    }
  };
  for (const auto& [n, i, o, gap] : {std::array<int64_t, 4>{1, 8, 24, 0},
                                     {16, 40, 8, 8},
                                     {17, 1040, 8, 0},
                                     {64, 16, 72, 0},
                                     {65, 8, 8, 0},
                                     {66, 16, 16, 8},
                                     {80, 17, 9, 7},
                                     {100, 24, 130, 0},  // rows of dy begin anywhere
                                     {127, 72, 40, 16},
                                     {128, 64, 128, 0},
                                     {200, 48, 600, 8},
                                     {257, 328, 24, 0},
                                     {300, 120, 328, 0},
                                     {66, 24, 4112, 0},  // wide y; dx of 8 parts
                                     {3, 4104, 16, 8},   // and the other way
                                     {70, 2048, 8, 0},   // one part, and 7
                                     {70, 2056, 8, 0},
                                     {65, 8, 4104, 0},
                                     {2100, 8, 264, 0}})
    same_bits(n, i, o, gap);
  if (table_kernels.probe)  // more multiprocessors take wide tiles for larger products alone
    for (const auto& [n, i, o] : {std::array<int64_t, 3>{4300, 8, 264},
                                  {4300, 8, 512},
                                  {4300, 512, 8},
                                  {130, 8, 9000},
                                  {130, 9000, 8},
                                  {130, 8, 16896},
                                  {130, 16896, 8},
                                  {4300, 2056, 200},
                                  {4300, 200, 2056},
                                  {1100, 2056, 1536},
                                  {1100, 1536, 2056}})
      same_bits(n, i, o, 0);
  in_all_orders([&] {
    same_bits(129, 136, 264, 0);
    same_bits(70, 2120, 24, 0);
  });
  ask_for(TensorKernel::choose);
}

// Nor on whether its parts are apart, in which of their blocks arrives last, nor on what the memory for them holds.
TEST(CudaBf16, PartsApartHaveTheSameBits) {
  const auto same_bits = [](int64_t n, int64_t i, int64_t o, int64_t gap) {
    SCOPED_TRACE(cat(n, " rows, ", i, " to ", o, ", gap ", gap));
    Call t(table_kernels, DType::bf16);
    const Weight w = t.weight("w", o, i);
    const Tensor x = t.act("x", {n, i}, gap), bias = t.act("bias", {o}), residual = t.act("residual", {n, o}, gap);
    const LinearParts parts = t.parts(n, o, i);
    ASSERT_TRUE(parts.sums);
    table_kernels.linear_fwd({t.act_out("y", {n, o}, gap), x, w, bias, residual}, {});
    for (const char* name : {"apart", "again"}) {  // the second finds the sums of the first
      table_kernels.linear_fwd({t.act_out(name, {n, o}, gap), x, w, bias, residual, parts}, {});
      EXPECT_EQ(t[name].bits(), t["y"].bits()) << name;
      EXPECT_TRUE(t[name].zones_intact()) << name;
    }
    for (int64_t e = 0; e < kLinearTiles; e++) ASSERT_EQ(t["arrivals"].get(e), 0) << e;
    EXPECT_TRUE(t["arrivals"].zones_intact());
  };
  for (const TensorKernel kernel : {TensorKernel::mma, TensorKernel::wgmma}) {
    if (!ask_for(kernel)) continue;
    for (const auto& [n, i, o, gap] : {std::array<int64_t, 4>{1, 2056, 24, 0},
                                       {17, 2049, 9, 7},  // rows that begin anywhere, an odd width
                                       {64, 2056, 40, 8},
                                       {65, 4104, 72, 0},
                                       {130, 2120, 70, 0}})
      same_bits(n, i, o, gap);
    in_all_orders([&] { same_bits(70, 2120, 24, 0); });
  }
  ask_for(TensorKernel::choose);
}

// Nor on whether dx's are added in turn.
TEST(CudaBf16, PartsInTurnHaveTheSameBits) {
  if (!ask_for(TensorKernel::wgmma)) GTEST_SKIP() << "this device has one kernel";
  const auto same_bits = [](int64_t n, int64_t i, int64_t o, int64_t gap) {
    SCOPED_TRACE(cat(n, " rows, ", o, " to ", i, ", gap ", gap));
    Call t(table_kernels, DType::bf16);
    const Weight w = t.weight("w", o, i);
    const Tensor dy = t.act("dy", {n, o}, gap);
    const LinearParts parts{t.stat_scratch("sums", {linear_turn_sums(n, i, o)}),
                            t.index("arrivals", {kLinearTiles}, std::vector<int32_t>(kLinearTiles))};
    t.table.linear_bwd_input({t.act_out("dx", {n, i}, gap), dy, w, false}, {});
    for (const WgmmaTile& tile : kTurnTiles) {  // the second finds the sums of the first
      asked_tile = tile;
      const std::string name = cat("by clusters of ", tile.cluster);
      t.table.linear_bwd_input({t.act_out(name, {n, i}, gap), dy, w, false, parts}, {});
      asked_tile.reset();
      EXPECT_TRUE(t[name].bits() == t["dx"].bits()) << name;
      EXPECT_TRUE(t[name].zones_intact()) << name;
      for (int64_t e = 0; e < kLinearTiles; e++) ASSERT_EQ(t["arrivals"].get(e), 0) << e;
    }
    EXPECT_TRUE(t["arrivals"].zones_intact());
    EXPECT_TRUE(t["sums"].zones_intact());
  };
  for (const auto& [n, i, o, gap] : {std::array<int64_t, 4>{1, 8, 2056, 0},
                                     {65, 264, 4104, 8},    // two tiles, the second of 8 columns
                                     {129, 72, 2056, 0},    // two tiles, the second of one row
                                     {257, 264, 2056, 0}})  // six tiles, or eight
    same_bits(n, i, o, gap);
  in_all_orders([&] { same_bits(129, 8, 2056, 0); });
  ask_for(TensorKernel::choose);
}

// So has the gradient of a weight.  Rows that begin anywhere are for mma.sync alone.
TEST(CudaBf16, WeightGradientHasTheSameBitsFromEveryKernel) {
  if (!ask_for(TensorKernel::wgmma)) GTEST_SKIP() << "this device has one kernel";
  // dw begins `offset` elements behind a multiple of 16 bytes, and holds something.
  const auto same_bits = [&](int64_t n, int64_t i, int64_t o, int64_t gap, int64_t offset, double scale = 1) {
    SCOPED_TRACE(cat(n, " rows, ", i, " to ", o, ", gap ", gap, ", offset ", offset, ", times ", scale));
    std::string bits;
    for (const TensorKernel kernel : {TensorKernel::mma, TensorKernel::wgmma}) {
      ask_for(kernel);
      const auto rest = [&](int64_t width) {
        return kernel == TensorKernel::mma ? 1 + width % 2 : gap + (8 - width % 8) % 8;
      };
      Call t(table_kernels, DType::bf16);
      const Tensor x = t.inout("x", {n, i}, cases::scaled(scale), rest(i)),
                   dy = t.inout("dy", {n, o}, cases::scaled(scale), rest(o)),
                   dw = t.stat_inout("dw", {offset + o * i + 1}, cases::scaled(scale * scale));
      table_kernels.linear_bwd_weight({make_tensor(dw.as<float>() + offset, DType::f32, {o, i}), {}, dy, x}, {});
      if (kernel == TensorKernel::mma)
        bits = t["dw"].bits();
      else
        EXPECT_EQ(t["dw"].bits(), bits);
      for (const char* name : {"x", "dy", "dw"}) EXPECT_TRUE(t[name].zones_intact()) << name;
    }
  };
  for (const auto& [n, i, o, gap, offset] : {std::array<int64_t, 5>{1, 72, 65, 0, 0},
                                             {15, 65, 130, 8, 0},
                                             {16, 66, 72, 0, 1},
                                             {17, 128, 128, 0, 2},
                                             {63, 129, 80, 16, 0},
                                             {64, 136, 66, 0, 0},
                                             {65, 300, 72, 0, 0},
                                             {127, 72, 300, 8, 0},
                                             {129, 200, 136, 0, 0},
                                             {300, 131, 67, 0, 3},
                                             {20, 8, 300, 0, 0},  // narrow: mma.sync, unless asked for the other
                                             {20, 300, 9, 0, 0},
                                             {20, 17, 24, 8, 0},
                                             {33, 136, 2120, 0, 0},
                                             {20, 192, 2560, 0, 0},
                                             {4100, 66, 67, 0, 0}})  // two parts
    same_bits(n, i, o, gap, offset);
  same_bits(65, 72, 136, 0, 0, 0x1p-64);  // subnormal sums, and what they are added to
  if (table_kernels.probe) {
    same_bits(20, 192, 8576, 0, 0);
    same_bits(100, 2048, 8576, 8, 1);
  }
  in_all_orders([&] {
    same_bits(300, 72, 136, 0, 0);
    same_bits(20, 71, 66, 0, 0);
  });
  ask_for(TensorKernel::choose);
}

// The promise: what the sampler records for a token is what the learner computes from the same hidden row, however
// many rows share the pass.
TEST(CudaBf16, TheSamplersLogprobIsTheLearners) {
  for (int64_t vocabulary : {1, 127, 128, 129, 1000, 151936}) {
    const Truncation keep = vocabulary == 1000 || vocabulary == 127 ? Truncation{40, 0.9f, 0.05f} : Truncation{};
    const int64_t n = vocabulary > 1000 ? 2 : 6, width = vocabulary > 1000 ? 16 : 40;
    const float temperature = vocabulary % 2 ? 0.7f : 1;
    Call t(table_kernels, DType::bf16);
    const Weight head = t.weight("head", vocabulary, width);
    const Tensor hidden = t.act("hidden", {n, width});
    std::vector<int32_t> tokens;
    std::string sampled;
    for (int32_t r = 0; r < n; r++) {  // the sampler: a row at a time
      const Tensor logits = t.act_out("row", {1, vocabulary});
      table_kernels.linear_fwd({logits, hidden.rows(r, 1), head, {}, {}}, {});
      if (keep.on()) table_kernels.truncate({logits, temperature, keep}, {});
      table_kernels.sample({t.index("token", {1}, {}), t.stat_out("sampled", {1}), logits,
                            t.index("counter", {1, 3}, {r, 0, 9}), rng_key(5, RngStream::sample, 2), temperature},
                           {});
      tokens.push_back(static_cast<int32_t>(t["token"].get(0)));
      sampled += t["sampled"].bits();
    }
    const Tensor logits = t.act_out("logits", {n, vocabulary}), target = t.index("target", {n}, tokens);
    table_kernels.linear_fwd({logits, hidden, head, {}, {}}, {});
    if (keep.on()) table_kernels.truncate({logits, temperature, keep}, {});
    table_kernels.logprob({t.stat_out("logprob", {n}), t.stat_out("entropy", {n}), logits, target, temperature}, {});
    EXPECT_EQ(t["logprob"].bits(), sampled);
    LogitsLoss loss{};
    loss.logprob = t.stat_out("in_loss", {n});
    loss.entropy = t.stat_out("h", {n});
    loss.loss = t.stat_out("loss", {n});
    loss.kl = t.stat_out("kl", {n});
    loss.clipped = t.index("clipped", {n}, {});
    loss.logits = logits;
    loss.target = target;
    loss.weight = t.stat("weight", {n});
    loss.kl_weight = t.stat("kl_weight", {n});
    loss.spec.temperature = temperature;
    table_kernels.logits_loss(loss, {});
    EXPECT_EQ(t["in_loss"].bits(), sampled);
  }
}

}  // namespace
}  // namespace pare::test
