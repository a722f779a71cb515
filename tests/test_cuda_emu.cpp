// The CUDA kernels, in f32 and bf16: values against `ref` in double, bits against the promises of
// each kernel file.  (test_ops.cpp runs the same kernels in f32 through the test that every table passes.)
#include "kernel_call.h"
#include "ops/attention.h"
#include "ops/data.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace pare::test {
namespace {

using namespace kernel;

TEST(CudaEmu, RmsnormForward) {
  const auto sizes = cases::with({"N=5,C=1", "N=5,C=7", "N=5,C=8", "N=5,C=31", "N=5,C=64", "N=5,C=257",
                                  "N=5,C=2312"},  // of 2312 registers hold a part
                                 {"gap=0", "gap=3", "gap=8"});
  check("rmsnorm_fwd", cases::with(sizes, {"", "in_place=1"}));
}

// dx is a difference, which is compared on the scale of dy.
TEST(CudaEmu, RmsnormBackward) {
  // 133: more rows than the strands of dw in f32
  check("rmsnorm_bwd",
        cases::with({"N=133,C=1,gap=3", "N=133,C=8,gap=8", "N=133,C=33,gap=3", "N=133,C=72,gap=8", "N=9,C=264,gap=8"},
                    {"accumulate=1", "in_place=1"}),
        1. / 128);
}

// More blocks of 4096 elements than one block of threads takes, and runs that end within one.
TEST(CudaEmu, SquareSumsHaveTheBitsOfTheCpu) {
  struct Size {
    int64_t n, run;
  };
  for (const auto& [n, run] : {Size{0, 1}, {1, 1}, {4096, 4096}, {70001, 70001}, {70001, 9000}, {100, 7}, {5, 8}}) {
    KernelVector<float> x(n), sums(norm_blocks(n, run));
    uint64_t state = 1;
    for (float& v : x) v = static_cast<float>(static_cast<int32_t>((state = mix64(state)) >> 32)) * 0x1p-31f;
    const SquareSums a{make_tensor(sums.data(), DType::f32, {static_cast<int64_t>(sums.size())}),
                       make_tensor(x.data(), DType::f32, {n}), run};
    table_cpu.square_sums(a, {});
    const std::vector<float> expected(sums.begin(), sums.end());
    std::fill(sums.begin(), sums.end(), NAN);
    {
      [[maybe_unused]] const KernelMemory memory[] = {KernelMemory(a.sums), KernelMemory(a.x)};
      KernelMemory::wrote(a.x.data, a.x.bytes());
      table_kernels.square_sums(a, {});
      ASSERT_EQ(kernel_error(), "");
    }
    EXPECT_TRUE(std::equal(sums.begin(), sums.end(), expected.begin())) << n << ", " << run;
    for (const float sum : expected) EXPECT_GT(sum, 0);
  }
}

// The master moves, whatever p held, and p is its rounding.
TEST(CudaEmu, AdamWWithAMaster) {
  check([](Call& t) {
    const Tensor v = t.stat("v", {37});
    for (int64_t i = 0; i < 37; i++) t["v"].set(i, t["v"].get(i) * t["v"].get(i));
    AdamW a{};
    a.p = t.act_out("p", {37});
    a.m = t.stat("m", {37});
    a.v = v;
    a.master = t.stat("master", {37});
    a.grad = t.stat("grad", {37});
    a.norm = t.stat("norm", {1});
    a.max_norm = 0.5f;
    a.weight_decay = 0.1f;
    a.step = 3;
    a.lr = 1e-2f;
    a.beta1 = 0.9f;
    a.beta2 = 0.999f;
    a.eps = 1e-8f;
    t["norm"].set(0, 2);
    t.table.adamw(a, {});
  });
}

// In fours and alone, in panels and in a row, with words of rounding that begin anywhere.
TEST(CudaEmu, AdamWHasTheBitsOfTheCpu) {
  struct Size {
    int64_t outputs, inputs, first;  // outputs 0: a vector
  };
  struct Result {
    std::string m, v, master, p;
    std::vector<double> values;
  };
  const auto step = [](const Table& table, DType act, DType moments, const Size& s, bool with_master) {
    const Shape shape = s.outputs ? Shape{s.outputs, s.inputs} : Shape{s.inputs};
    Call t(table, act);
    Buffer m(moments, shape, 0), v(moments, shape, 0);
    const Tensor grad = t.stat("grad", shape), norm = t.stat("norm", {1});
    t["norm"].set(0, 2);
    for (int64_t i = 0; i < grad.size(); i++) {
      const double x = t["grad"].get((i + 1) % grad.size());
      m.set(i, x / 4);
      v.set(i, x * x / 16);
    }
    const char* name = with_master ? "p" : "master";  // what moves begins with the same values
    AdamW a{.p = s.outputs ? t.weight(name, s.outputs, s.inputs).packed : t.act(name, shape),
            .m = m.tensor(),
            .v = v.tensor(),
            .grad = grad,
            .norm = norm,
            .max_norm = 0.5f,
            .lr = 1e-2f,
            .beta1 = 0.9f,
            .beta2 = 0.999f,
            .eps = 1e-8f,
            .weight_decay = 0.1f,
            .step = 3,
            .key = 0x123456789abcdef,
            .first = s.first};
    if (with_master) a.master = t.stat("master", shape);
    table.adamw(a, {});
    if (s.outputs) table.unpack_weight({t.act_out("now", shape), {a.p, s.outputs}, 0}, {});
    const Buffer& p = t[s.outputs ? "now" : name];
    Result r{m.bits(), v.bits(), with_master ? t["master"].bits() : "", p.bits(), {}};
    for (int64_t i = 0; i < p.size(); i++) r.values.push_back(p.get(i));
    EXPECT_TRUE(t.zones_intact() && m.zones_intact() && v.zones_intact());
    return r;
  };
  for (const Size& s : {Size{0, 1, 0}, {0, 1030, 0}, {0, 67, 5}, {19, 68, 4294967294}, {19, 67, 3}, {33, 132, 0}})
    for (const DType moments : {DType::f32, DType::bf16}) {
      const Result cpu = step(table_cpu, DType::f32, moments, s, false),
                   f32 = step(table_kernels, DType::f32, moments, s, false);
      const std::string what = cat(s.outputs, " x ", s.inputs, " from ", s.first);
      EXPECT_TRUE(f32.m == cpu.m && f32.v == cpu.v && f32.p == cpu.p) << what;
      for (const DType act : {DType::f32, DType::bf16}) {
        const Result is = step(table_kernels, act, moments, s, true);
        EXPECT_TRUE(is.m == cpu.m && is.v == cpu.v && is.master == cpu.p) << what;
        for (size_t i = 0; i < cpu.values.size(); i++) {
          const auto now = static_cast<float>(cpu.values[i]);
          ASSERT_EQ(is.values[i], act == DType::bf16 ? from_bf16(to_bf16(now)) : now) << what << ", " << i;
        }
      }
    }
}

TEST(CudaEmu, Rope) {
  const auto sizes = cases::with({"D=2", "D=6", "D=16", "D=34", "D=64"}, {"gap=0", "gap=5", "gap=8"});
  for (const char* op : {"rope_fwd", "rope_bwd"}) check(op, cases::with(sizes, {"N=7,H=3,positions=9"}));
}

// Rows, heads of queries and keys, head dim, gap.  More rows than dq_norm has strands once.
constexpr int64_t kQkNormRope[][5] = {{1, 1, 1, 2, 0},   {7, 2, 1, 6, 5},   {5, 3, 2, 16, 8},
                                      {3, 0, 2, 34, 0},  {2, 4, 2, 64, 8},  {3, 2, 1, 128, 8},
                                      {2, 1, 0, 256, 3}, {1, 2, 1, 250, 0}, {260, 2, 1, 32, 8}};
std::vector<int32_t> positions(int64_t rows) {
  std::vector<int32_t> pos(rows);
  for (int64_t i = 0; i < rows; i++) pos[i] = static_cast<int32_t>(i * 5 % 9);
  return pos;
}

// dy is 0 but in each row number i * every.
void qk_norm_rope(Call& t, int64_t n, int64_t H, int64_t K, int64_t d, int64_t gap, bool in_place, int64_t every = 1) {
  const int64_t h = H + K;
  const Tensor x = t.act("x", {n, h, d}, gap), q = t.act("q_norm", {d}), k = t.act("k_norm", {d});
  const Tensor table = t.stat("table", {9, d}), pos = t.index("pos", {n}, positions(n));
  const Tensor rstd = t.stat_out("rstd", {n, h});
  t.table.qk_norm_rope_fwd({t.act_out("y", {n, h, d}), rstd, x, q, k, table, pos, H, 1e-2f}, {});
  const Tensor dx = t.act("dx", {n, h, d}, gap), dy = in_place ? dx : t.act("dy", {n, h, d}, 8);
  auto& values = t[in_place ? "dx" : "dy"];
  for (int64_t i = 0; i < values.size(); i++)
    if (i / (h * d) % every) values.set(i, 0);
  t.table.qk_norm_rope_bwd({dx, t.stat("dq_norm", {d}), t.stat("dk_norm", {d}),
                            t.stat_scratch("scratch", {norm_parts(n * h), 2, d}), dy, x, q, k, rstd, table, pos, H},
                           {});
}
constexpr double kNormInner = 1. / 128;  // as of rmsnorm_bwd

TEST(CudaEmu, QkNormRope) {
  for (const auto& [n, H, K, d, gap] : kQkNormRope)
    for (const bool in_place : {false, true})
      check([&, n = n, H = H, K = K, d = d, gap = gap](Call& t) { qk_norm_rope(t, n, H, K, d, gap, in_place); },
            kNormInner);
}

// More heads than all blocks together have groups for: these go on from head to head, in f32 and, twice as many, bf16.
// Rows far apart add to the gradients of the weights, so that few are added up and each would be missed.
TEST(CudaEmu, QkNormRopeOfManyHeads) {
  check([](Call& t) { qk_norm_rope(t, 1381, 2, 1, 250, 0, true, 97); }, kNormInner, false);
}

TEST(CudaEmu, QkNormRopeOfARowIsIndependentOfTheBatch) {
  for (DType act : {DType::f32, DType::bf16}) {
    Call t(table_kernels, act);
    const Tensor x = t.act("x", {9, 5, 48}, 8), q = t.act("q_norm", {48}), k = t.act("k_norm", {48});
    const Tensor table = t.stat("table", {9, 48}), pos = t.index("pos", {9}, positions(9));
    const auto forward = [&](const Tensor& y, const Tensor& rstd, int64_t row, int64_t n) {
      table_kernels.qk_norm_rope_fwd({y, rstd, x.rows(row, n), q, k, table, pos.rows(row, n), 3, 1e-6f}, {});
    };
    forward(t.act_out("y", {9, 5, 48}), t.stat_out("rstd", {9, 5}), 0, 9);
    for (int64_t i = 0; i < 9; i++) {
      forward(t.act_out("one", {1, 5, 48}), t.stat_out("r", {1, 5}), i, 1);
      EXPECT_EQ(t["one"].bits(), t["y"].bits(i * 240, (i + 1) * 240)) << "row " << i;
    }
  }
}

TEST(CudaEmu, Swiglu) {
  for (int64_t f : {1, 7, 8, 63, 130, 2056})
    check([&](Call& t) {
      const Tensor gate_up = t.act("gate_up", {3, 2 * f});
      t["gate_up"].set(0, 200);
      t["gate_up"].set(2 * f, -200);  // exp overflows; silu(-200) is 0
      t.table.swiglu_fwd({t.act_out("y", {3, f}), gate_up}, {});
      t.table.swiglu_bwd({t.act_out("dgate_up", {3, 2 * f}), t.act("dy", {3, f}), gate_up}, {});
      t.table.swiglu_bwd({gate_up, t.act("dy", {3, f}), gate_up}, {});  // in place
    });
}

TEST(CudaEmu, UploadZeroDownload) {
  check([&](Call& t) {
    const std::vector<int32_t> from{1, -2, 3};
    std::vector<int32_t> to(3);
    const Tensor x = t.index("x", {3}, {}), y = t.index("y", {3}, {});
    t.table.upload({x, from.data()}, {});
    t.table.download({to.data(), x}, {});
    EXPECT_EQ(to, from);
    t.table.zero({y}, {});
  });
}

struct AttnShape {
  int64_t heads, kv_heads, d, gap;
};
// Attention over `segments` of rows of q, k, v [n], parents lying in the same k and v.
void attention(Call& t, int64_t n, const std::vector<SegmentRow>& segments, const AttnShape& s) {
  std::vector<int32_t> rows;
  int64_t pairs = 0;
  for (const SegmentRow& r : segments) {
    rows.insert(rows.end(), {r.row, r.len, r.parent_row, r.parent_len});
    pairs += int64_t{r.len} * r.parent_len + int64_t{r.len} * (r.len + 1) / 2;
  }
  const Tensor k = t.act("k", {n, s.kv_heads, s.d}, s.gap), v = t.act("v", {n, s.kv_heads, s.d}, s.gap);
  t.table.attn_fwd(
      {t.act_out("o", {n, s.heads, s.d}), t.stat_out("lse", {n, s.heads}), t.act("q", {n, s.heads, s.d}, s.gap), k, v,
       k, v, t.index("segments", {static_cast<int64_t>(segments.size()), 4}, rows), pairs,
       1 / std::sqrt(static_cast<float>(s.d))},
      {});
}

TEST(CudaEmu, AttentionForward) {
  // Weights are rounded to bf16 before the product with V: 2^-8 of max |v|, which is below 5.
  const double inner = 5. / 256;
  const std::vector<SegmentRow> segments{{0, 65, 0, 0}, {66, 1, 0, 65}, {67, 20, 3, 62}, {90, 17, 0, 64}};
  check([&](Call& t) { attention(t, 110, segments, {4, 2, 24, 8}); }, inner);
  for (const AttnShape& s : {AttnShape{1, 1, 1, 0}, {3, 1, 40, 3}, {2, 2, 64, 0}, {2, 1, 72, 16}})
    check([&](Call& t) { attention(t, 110, segments, s); }, inner, false);
  check([&](Call& t) { attention(t, 20, {{1, 19, 0, 0}}, {1, 1, 256, 0}); }, inner, false);
  std::vector<SegmentRow> many;  // more segments than a warp looks at in one go
  for (int32_t i = 0; i < 35; i++) many.push_back({2 * i, 1 + i % 2, 0, i % 3});
  check([&](Call& t) { attention(t, 70, many, {1, 1, 8, 0}); }, inner, false);
}

// The bits of a row do not depend on where its rows lie, what else is in the batch, or where a parent ends.
TEST(CudaEmu, AttentionRowsAreIndependentOfPacking) {
  const AttnShape s{4, 2, 24, 0};
  const int32_t len = 150;
  for (DType act : {DType::f32, DType::bf16}) {
    Call alone(table_kernels, act);
    attention(alone, len, {{0, len, 0, 0}}, s);
    for (int32_t parent : {0, 1, 63, 64, 65, 130}) {
      // The sequence, its first `parent` rows somewhere else, behind another segment.
      const int32_t other = 21, n = other + len;
      Call packed(table_kernels, act);
      attention(packed, n, {}, s);  // only for the tensors; no segment, nothing is computed
      auto copy = [&](const std::string& name, int64_t from, int64_t to, int64_t count) {
        const int64_t width = packed[name].size() / n;
        for (int64_t i = 0; i < count * width; i++) packed[name].set(to * width + i, alone[name].get(from * width + i));
      };
      for (const char* name : {"q", "k", "v"}) {  // own rows first, then the other segment, then the parent
        copy(name, parent, 0, len - parent);
        copy(name, 0, len - parent + other, parent);
      }
      const std::vector<int32_t> rows{len - parent,
                                      other,
                                      0,
                                      0,  // the other segment
                                      len - parent + other,
                                      parent,
                                      0,
                                      0,  // the parent itself
                                      0,
                                      len - parent,
                                      len - parent + other,
                                      parent};
      const Tensor k = packed["k"].tensor(), v = packed["v"].tensor();
      table_kernels.attn_fwd({packed["o"].tensor(), packed["lse"].tensor(), packed["q"].tensor(), k, v, k, v,
                              packed.index("segments", {3, 4}, rows), 1, 1 / std::sqrt(24.f)},
                             {});
      for (const char* name : {"o", "lse"}) {
        const int64_t width = packed[name].size() / n;
        EXPECT_EQ(packed[name].bits(0, (len - parent) * width), alone[name].bits(parent * width, len * width))
            << name << ", parent of " << parent;
        EXPECT_EQ(packed[name].bits((len - parent + other) * width, n * width), alone[name].bits(0, parent * width))
            << name << ", parent of " << parent;
      }
    }
  }
}

TEST(CudaEmu, RmsnormRowsAreIndependentOfTheBatch) {
  for (DType act : {DType::f32, DType::bf16}) {
    Call t(table_kernels, act);
    const Tensor x = t.act("x", {9, 72}, 5), w = t.act("w", {72});
    table_kernels.rmsnorm_fwd({t.act_out("y", {9, 72}), t.stat_out("rstd", {9}), x, w, 1e-6f}, {});
    for (int64_t i = 0; i < 9; i++) {
      const Tensor y = t.act_out("one", {1, 72});
      table_kernels.rmsnorm_fwd({y, t.stat_out("r", {1}), x.rows(i, 1), w, 1e-6f}, {});
      EXPECT_EQ(t["one"].bits(), t["y"].bits(i * 72, (i + 1) * 72)) << "row " << i;
    }
  }
}

TEST(CudaEmu, UnsupportedArgumentsAreNamed) {
  EXPECT_EQ(refusal(DType::f32,
                    [](Call& t) {
                      attention(t, 2, {{0, 2, 0, 0}}, {1, 1, 257, 0});
                    }),
            "attn_fwd: head_dim 257 is not in [1, 256]");
  EXPECT_EQ(refusal(DType::f32,
                    [](Call& t) {
                      const Tensor x = t.index("x", {3, 4}, {});
                      t.table.rmsnorm_fwd({x, t.stat("rstd", {3}), x, t.act("w", {4}), 1e-6f}, {});
                    }),
            "rmsnorm_fwd: act is bf16 or f32, not i32[3, 4]");
  EXPECT_EQ(refusal(DType::f32, [](Call& t) { qk_norm_rope(t, 1, 1, 1, 258, 0, true); }),
            "qk_norm_rope_fwd: heads of 258 channels; at most 256");
}

}  // namespace
}  // namespace pare::test
