// The `cpu` table against itself: every instruction set gives the same bits; exp and log are accurate; long products,
// which the op test's small shapes do not reach, are still one chain.
#include <bit>

#include "base/thread_pool.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "op_cases.h"

namespace pare::test {

namespace {

using Bytes = std::vector<unsigned char>;

bool has_isa(const char* name) {
  try {
    set_cpu_isa(name);
    return true;
  } catch (const Error&) {
    return false;
  }
}
// The instruction sets of this machine; the best one is left in use.
std::vector<const char*> isas() {
  std::vector<const char*> list;
  for (const char* name : {"generic", "neon", "avx2", "avx512"})
    if (has_isa(name)) list.push_back(name);
  return list;
}

struct Isas : testing::Test {
  ~Isas() override { set_cpu_isa(isas().back()); }
};

// Every op, small and large shapes: the bits of every instruction set and of one, two and three threads are equal.
TEST_F(Isas, GiveTheSameBits) {
  std::vector<OpRow> rows = op_rows();
  // Depth cut into blocks, packed operands, rows in several tiles, narrow last panels.
  for (const char* size :
       {"M=67,K=517,N=83", "M=41,K=96,N=400,gap=700", "M=300,K=450,N=33,gap=9", "M=3,K=1030,N=70", "M=1,K=129,N=131"}) {
    rows.push_back({&cases::op_case("linear_fwd"), cat(size, ",bias=1,residual=1,in_place=1")});
    rows.push_back({&cases::op_case("linear_bwd_input"), cat(size, ",accumulate=1")});
    rows.push_back({&cases::op_case("linear_bwd_weight"), cat(size, ",bias=1")});
  }
  // One long segment behind a parent, in the same rows.
  for (const char* heads : {"H=6,K=2,D=32", "H=5,K=1,D=19"})
    for (const char* op : {"attn_fwd", "attn_bwd"})
      rows.push_back({&cases::op_case(op), cat("P=71,L=260,gap=3,", heads)});
  for (const OpRow& row : rows) {
    std::map<std::string, Bytes> first;
    for (const char* isa : isas())
      for (int n : {1, 3}) {
        set_cpu_isa(isa);
        set_threads(n);
        OpRun run(table_cpu, DType::f32);
        row.run(run);
        EXPECT_TRUE(run.problems.empty()) << row.op->op << " " << row.size << ", " << isa << joined(run.problems);
        for (const std::string& name : run.outputs()) {
          const Bytes bytes = run.buffer(name).element_bytes();
          EXPECT_TRUE(first.emplace(name, bytes).first->second == bytes)
              << row.op->op << " " << row.size << ": " << name << " differs, " << isa << ", " << n << " threads";
        }
      }
  }
  set_threads(0);
}

// Those that the comparison above is about: on aarch64 both that are compiled in, the better one in use.
TEST_F(Isas, AreThoseOfTheMachine) {
  std::vector<std::string> names;
  for (const char* isa : isas()) names.push_back(isa);
#if defined(__aarch64__)
  EXPECT_EQ(names, (std::vector<std::string>{"generic", "neon"}));
#elif defined(__x86_64__)
  EXPECT_EQ(names.front(), "avx2");
#endif
  set_cpu_isa(nullptr);
  EXPECT_EQ(cpu_isa(), names.back());
}

TEST_F(Isas, UnknownOnesAreRefused) {
  EXPECT_THROW(set_cpu_isa("sse9"), Error);
  EXPECT_STREQ(cpu_isa(), isas().back());
}

// The largest score of a row is found before scores are scaled.
TEST(CpuAttention, ScaleIsPositive) {
  for (float scale : {0.0f, -0.5f, NAN, 0.5f}) {
    OpRun r(table_cpu, DType::f32);
    AttnFwd a{};
    a.q = r.in("q", {1, 1, 3});
    a.k = a.pk = r.in("k", {1, 1, 3});
    a.v = a.pv = r.in("v", {1, 1, 3});
    a.o = r.out("o", {1, 1, 3});
    a.lse = r.out("lse", {1, 1});
    a.segments = r.index("segments", {1, 4}, {0, 1, 0, 0});
    a.pairs = 1;
    a.scale = scale;
    if (scale > 0)
      EXPECT_NO_THROW(r.call(&Table::attn_fwd, a));
    else
      EXPECT_THROW(r.call(&Table::attn_fwd, a), std::logic_error) << scale;
    AttnPaged p{};
    p.q = r.in("queries", {1, 1, 3});
    p.o = r.out("o of pages", {1, 1, 3});
    p.k_pages = r.in("k_pages", {1, 1, 3, 16});
    p.v_pages = r.in("v_pages", {1, 1, 16, 3});
    p.page_table = r.index("page_table", {1, 1}, {0});
    p.queries = r.index("entries", {1, 4}, {0, 1, 1, 0});
    p.pairs = p.slots = 1;
    p.scale = scale;
    if (scale > 0)
      EXPECT_NO_THROW(r.call(&Table::attn_paged, p));
    else
      EXPECT_THROW(r.call(&Table::attn_paged, p), std::logic_error) << scale;
  }
}

// Long products are the chain that list.h states, bias and residual after it.
TEST_F(Isas, LongProductsAreOneChain) {
  const int64_t rows = 30, inputs = 700, outputs = 37;
  for (const char* isa : isas()) {
    set_cpu_isa(isa);
    Buffer x(DType::f32, {rows, inputs}), w(DType::f32, {outputs, inputs}), bias(DType::f32, {outputs});
    Buffer y(DType::f32, {rows, outputs}), residual(DType::f32, {rows, outputs});
    Buffer packed(DType::f32, {weight_panels(outputs), inputs, kPanel});
    for (Buffer* b : {&x, &w, &bias, &residual}) {
      const auto values = normal("chain", b->size());
      for (int64_t i = 0; i < b->size(); i++) b->set(i, values[i]);
    }
    const Weight weight{packed.tensor(), outputs};
    table_cpu.pack_weight({weight, w.tensor(), 0}, {});
    table_cpu.linear_fwd({y.tensor(), x.tensor(), weight, bias.tensor(), residual.tensor()}, {});
    int64_t wrong = 0;
    for (int64_t n = 0; n < rows; n++)
      for (int64_t o = 0; o < outputs; o++) {
        float sum = 0;
        for (int64_t k = 0; k < inputs; k++)
          sum = std::fma(float(x.get(n * inputs + k)), float(w.get(o * inputs + k)), sum);
        sum += float(bias.get(o));
        sum += float(residual.get(n * outputs + o));
        wrong += sum != float(y.get(n * outputs + o));
      }
    EXPECT_EQ(wrong, 0) << isa;
  }
}

// ---- exp and log

// |x - exact| in units of the last place of exact in f32.
double ulps(float x, double exact) {
  const double magnitude = std::max(std::abs(exact), 0x1p-126);
  return std::abs(double(x) - exact) / std::ldexp(1.0, std::ilogb(magnitude) - 23);
}

float one(void (*f)(float*, const float*, int64_t), float x) {
  float y;
  f(&y, &x, 1);
  return y;
}

// Largest error over floats whose bits lie in [from, to], about every `step`-th.
double largest_error(void (*f)(float*, const float*, int64_t), double (*exact)(double), float from, float to) {
  constexpr uint32_t kStep = 1009;
  std::vector<float> x, y;
  for (uint32_t b = std::bit_cast<uint32_t>(from); b <= std::bit_cast<uint32_t>(to); b += kStep)
    x.push_back(std::bit_cast<float>(b));
  y.resize(x.size());
  f(y.data(), x.data(), static_cast<int64_t>(x.size()));
  double worst = 0;
  for (size_t i = 0; i < x.size(); i++) worst = std::max(worst, ulps(y[i], exact(x[i])));
  return worst;
}

TEST_F(Isas, ExpIsAccurate) {
  const float inf = INFINITY;
  for (const char* isa : isas()) {
    set_cpu_isa(isa);
    const auto f = cpu_kernels().exp;
    EXPECT_LE(largest_error(f, std::exp, 0x1p-60f, 88.7f), 2) << isa;
    EXPECT_LE(largest_error(f, std::exp, -0x1p-60f, -103.9f), 2) << isa;
    EXPECT_EQ(one(f, 0), 1.0f);
    EXPECT_EQ(one(f, -0.0f), 1.0f);
    for (float x : {-105.0f, -1e4f, -3e38f, -inf}) EXPECT_EQ(std::bit_cast<uint32_t>(one(f, x)), 0u) << x;
    for (float x : {89.0f, 1e4f, 3e38f, inf}) EXPECT_EQ(one(f, x), inf) << x;
    EXPECT_TRUE(std::isnan(one(f, NAN)));
  }
}

// ln 2 is one float, which is off by 1.9e-9 for each power of 2.
TEST_F(Isas, ExpAtMost1IsAccurate) {
  for (const char* isa : isas()) {
    set_cpu_isa(isa);
    const auto f = cpu_kernels().exp_at_most_1;
    EXPECT_LE(largest_error(f, std::exp, -0x1p-60f, -32), 3) << isa;
    EXPECT_LE(largest_error(f, std::exp, -32, -103.9f), 5) << isa;
    for (float x : {0.0f, -0.0f, -0x1p-149f, -0x1p-30f}) EXPECT_EQ(one(f, x), 1.0f) << x;
    for (float x : {-104.0f, -105.0f, -1e4f, -3e38f, -INFINITY}) EXPECT_EQ(std::bit_cast<uint32_t>(one(f, x)), 0u) << x;
    EXPECT_EQ(one(f, -103.2f), 0x1p-149f);
    EXPECT_TRUE(std::isnan(one(f, NAN)));
  }
}

TEST_F(Isas, LogIsAccurate) {
  for (const char* isa : isas()) {
    set_cpu_isa(isa);
    const auto f = cpu_kernels().log;
    EXPECT_LE(largest_error(f, std::log, 0x1p-149f, 0x1.fffffep127f), 2) << isa;
    EXPECT_LE(largest_error(f, std::log, 0.9f, 1.1f), 2) << isa;
    EXPECT_EQ(one(f, 1), 0.0f);
    EXPECT_EQ(one(f, 0), -INFINITY);
    EXPECT_EQ(one(f, INFINITY), INFINITY);
    for (float x : {-1.0f, -1e-40f, -INFINITY, NAN}) EXPECT_TRUE(std::isnan(one(f, x))) << x;
  }
}

}  // namespace

}  // namespace pare::test
