// The device's decorators (ledger, NaN check, phases) and the null table.
#include <cmath>

#include "op_harness.h"
#include "ops/attention.h"
#include "ops/device.h"
#include "ops/norm.h"

namespace pare::test {

namespace {

Tensor f32(std::vector<float>& v, std::initializer_list<int64_t> shape) {
  return make_tensor(v.data(), DType::f32, shape);
}

// y [N, O] = x [N, I] wT, all ones.
struct Layer {
  static constexpr int64_t I = 5, O = 3;
  std::vector<float> x = std::vector<float>(7 * I, 1), w = std::vector<float>(16 * I, 1), y = std::vector<float>(7 * O);
  LinearFwd forward(int64_t rows) { return {f32(y, {rows, O}), f32(x, {rows, I}), {f32(w, {1, I, 16}), O}, {}, {}}; }
};

TEST(Device, CallsTheTable) {
  Device device(table_ref);
  Layer layer;
  device.linear_fwd(layer.forward(7));
  EXPECT_EQ(layer.y, std::vector<float>(7 * Layer::O, 5));
  EXPECT_STREQ(device.name(), "ref");
  EXPECT_FALSE(device.planning());
}

TEST(Device, LedgerCountsCallsAndCosts) {
  Device device(table_ref);
  Ledger ledger;
  device.ledger = &ledger;
  Layer layer;
  device.linear_fwd(layer.forward(7));
  device.linear_fwd(layer.forward(2));
  device.zero({f32(layer.y, {7 * Layer::O})});
  const auto& lines = ledger.phases.at("main");
  ASSERT_EQ(lines.size(), 2u);
  const Ledger::Line linear = lines.at("linear_fwd"), zero = lines.at("zero");
  EXPECT_EQ(linear.calls, 2);
  EXPECT_EQ(linear.cost.flops, 2 * (7 + 2) * 5 * 3);
  EXPECT_EQ(linear.cost.read, 4 * ((7 + 2) * 5 + 2 * 5 * 3));
  EXPECT_EQ(linear.cost.written, 4 * (7 + 2) * 3);
  EXPECT_EQ(linear.min_rows, 2);
  EXPECT_EQ(zero.calls, 1);
  EXPECT_EQ(zero.cost.flops, 0);
  EXPECT_EQ(zero.cost.written, 4 * 7 * 3);
  EXPECT_EQ(zero.min_rows, 0);
  EXPECT_EQ(ledger.total("main").flops, linear.cost.flops);
  EXPECT_EQ(ledger.total("main").written, linear.cost.written + zero.cost.written);
  EXPECT_EQ(ledger.total("rollout").flops, 0);
  ledger.clear();
  EXPECT_TRUE(ledger.phases.empty());
}

std::vector<std::string> ranges;
void range_begin(const char* name) { ranges.push_back(name); }
void range_end() { ranges.push_back("end"); }

TEST(Device, RangesNestForAProfiler) {
  Table table = table_ref;
  table.range_begin = range_begin;
  table.range_end = range_end;
  ranges.clear();
  Device device(table);
  Layer layer;
  {
    Phase phase(device, "learner");
    Range range(device, "layer", 3);
    device.linear_fwd(layer.forward(1));
    Layer wrong;
    LinearFwd bad = wrong.forward(1);
    bad.y = f32(wrong.y, {1, 2});
    EXPECT_THROW(device.linear_fwd(bad), std::logic_error);
  }
  EXPECT_EQ(ranges,
            (std::vector<std::string>{"learner", "layer 3", "linear_fwd", "end", "linear_fwd", "end", "end", "end"}));
}

TEST(Device, PhasesNest) {
  Device device(table_null);
  Ledger ledger;
  device.ledger = &ledger;
  Layer layer;
  {
    Phase outer(device, "rollout");
    device.linear_fwd(layer.forward(1));
    {
      Phase inner(device, "learner");
      device.linear_fwd(layer.forward(2));
    }
    device.linear_fwd(layer.forward(3));
  }
  device.linear_fwd(layer.forward(4));
  EXPECT_EQ(ledger.phases.at("rollout").at("linear_fwd").calls, 2);
  EXPECT_EQ(ledger.total("rollout").flops, 2 * 4 * 5 * 3);
  EXPECT_EQ(ledger.total("learner").flops, 2 * 2 * 5 * 3);
  EXPECT_EQ(ledger.total("main").flops, 2 * 4 * 5 * 3);
}

TEST(Device, TimesOnlyWhenAsked) {
  Device device(table_ref);
  Ledger ledger;
  device.ledger = &ledger;
  Layer layer;
  device.linear_fwd(layer.forward(7));
  EXPECT_EQ(ledger.seconds("main"), 0);
  device.timed = true;
  for (int i = 0; i < 1000; i++) device.linear_fwd(layer.forward(7));
  EXPECT_GT(ledger.seconds("main"), 0);
}

TEST(Device, NanCheckNamesOpOutputAndElement) {
  Device device(table_ref);
  Layer layer;
  layer.x[4 * Layer::I + 2] = INFINITY;
  device.linear_fwd(layer.forward(7));  // off at first
  device.check_nan = true;
  try {
    device.linear_fwd(layer.forward(7));
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::non_finite);
    EXPECT_STREQ(e.what(), "linear_fwd: output 0 f32[7, 3] holds inf at row 4, column 0");
  }
  device.linear_fwd(layer.forward(4));  // the rows before it are finite
}

TEST(Device, NanCheckFollowsStridesAndSecondOutputs) {
  Device device(table_ref);
  device.check_nan = true;
  const int64_t N = 3, C = 4;
  std::vector<float> dx(N * (C + 1), NAN), dw = {0, 0, NAN, 0}, dy(N * C, 1), x(N * C, 1), w(C, 1), rstd(N, 1);
  std::vector<float> parts(N * C);
  const RmsnormBwd a{f32(dx, {N, C + 1}).columns(0, C),
                     f32(dw, {C}),
                     f32(dy, {N, C}),
                     f32(x, {N, C}),
                     f32(w, {C}),
                     f32(rstd, {N}),
                     false,
                     f32(parts, {N, C})};
  try {
    device.rmsnorm_bwd(a);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("rmsnorm_bwd: output 1 f32[4] holds nan"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("column 2"), std::string::npos) << e.what();
  }
  dw[2] = 0;
  device.rmsnorm_bwd(a);  // the NaN between the rows of dx is nobody's output
}

// A copy writes some rows of a tensor; what lies in the others, and what moves within it, was there before.
TEST(Device, NanCheckLooksAtTheRowsThatAreCopied) {
  Device device(table_ref);
  device.check_nan = true;
  const int64_t C = 3;
  std::vector<float> y(5 * (C + 1), NAN), x(4 * C, 1);
  std::vector<int32_t> pairs = {2, 4, 0, 1};
  const Tensor to = f32(y, {5, C + 1}).columns(0, C), index = make_tensor(pairs.data(), DType::i32, {2, 2});
  const Tensor from = f32(x, {4, C});
  x[1 * C] = NAN;  // a row that is left where it is
  device.copy_rows({to, from, index});
  x[2 * C + 1] = INFINITY;
  try {
    device.copy_rows({to, from, index});
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::non_finite);
    EXPECT_STREQ(e.what(), "copy_rows: output 0 f32[5, 3] holds inf at row 4, column 1");
  }
  device.copy_rows({to, from, index.rows(1, 1)});
  pairs = {0, 2, 3, 1};
  device.copy_rows({to, to, index});
}

TEST(Device, NanCheckReadsF64) {
  Device device(table_ref);
  device.check_nan = true;
  std::vector<double> y = {1, NAN}, x = {1, 1};
  EXPECT_THROW(device.accumulate({make_tensor(y.data(), DType::f64, {2}), make_tensor(x.data(), DType::f64, {2})}),
               Error);
}

TEST(NullTable, DoesNothingAndCostsTheSame) {
  Device real(table_ref), null(table_null);
  Ledger a, b;
  real.ledger = &a;
  null.ledger = &b;
  null.check_nan = true;  // there is nothing to check
  EXPECT_TRUE(null.planning());
  Layer computed, planned;
  real.linear_fwd(computed.forward(7));
  null.linear_fwd(planned.forward(7));
  EXPECT_EQ(planned.y, std::vector<float>(7 * Layer::O, 0));
  EXPECT_EQ(a.phases, b.phases);
}

TEST(NullTable, NeedsNoMemory) {
  Device null(table_null);
  Ledger ledger;
  null.ledger = &ledger;
  const Tensor x = make_tensor(nullptr, DType::f32, {1000000, 4096}),
               packed = make_tensor(nullptr, DType::f32, {256, 4096, 16});
  null.linear_fwd({x, x, {packed, 4096}, {}, {}});
  EXPECT_EQ(ledger.total("main").flops, 2 * int64_t(1000000) * 4096 * 4096);
}

TEST(NullTable, DownloadWritesZeros) {
  Device null(table_null);
  std::vector<float> host(3, 7);
  null.download({host.data(), make_tensor(nullptr, DType::f32, {3})});
  EXPECT_EQ(host, std::vector<float>(3, 0));
}

TEST(NullTable, ImplementsEveryOp) {
#define X(op, Args) EXPECT_NE(table_null.op, nullptr) << #op;
  PARE_OPS(X)
#undef X
}

// ---- what `ref` refuses

template <class F>
std::string refusal(F f) {
  try {
    f();
  } catch (const std::logic_error& e) {
    return e.what();
  }
  return "no error";
}

TEST(RefTable, RefusesOtherTypes) {
  std::vector<int32_t> v(4);
  const Tensor x = make_tensor(v.data(), DType::i32, {4}), half = make_tensor(v.data(), DType::bf16, {4});
  EXPECT_EQ(refusal([&] { table_ref.accumulate({x, x}, {}); }), "ref: accumulate: tensor i32[4]: f64 or f32 expected");
  EXPECT_EQ(refusal([&] {
              table_ref.accumulate({half, half}, {});
            }),
            "ref: accumulate: tensor bf16[4]: f64 or f32 expected");
}

TEST(RefTable, RefusesIndicesOutOfRange) {
  std::vector<float> y(4), table(32);
  for (int32_t bad : {-1, 3}) {
    std::vector<int32_t> ids = {0, bad};
    EXPECT_EQ(refusal([&] {
                table_ref.embedding_fwd(
                    {f32(y, {2, 2}), Weight{f32(table, {1, 2, 16}), 3}, make_tensor(ids.data(), DType::i32, {2})}, {});
              }),
              cat("ref: embedding_fwd: ids[1] is ", bad, ", outside [0, 3)"));
  }
}

TEST(RefTable, RefusesWrongBooksAndOverlaps) {
  std::vector<float> v(5 * 8);
  const Tensor x = f32(v, {5, 1, 8});
  std::vector<float> lse(5);
  auto attend = [&](std::vector<int32_t> segments, int64_t pairs) {
    return refusal([&] {
      table_ref.attn_fwd({x, f32(lse, {5, 1}), x, x, x, x, x,
                          make_tensor(segments.data(), DType::i32, {int64_t(segments.size()) / 4, 4}), pairs, 1},
                         {});
    });
  };
  EXPECT_EQ(attend({0, 5, 0, 0}, 14), "ref: attn_fwd: pairs is 14, the segments hold 15");
  EXPECT_EQ(attend({0, 3, 0, 0, 2, 2, 0, 0}, 9), "ref: attn_fwd: row 2 lies in two segments");
  EXPECT_EQ(attend({2, 4, 0, 0}, 10), "ref: attn_fwd: segment 0 has rows [2, 6) of 5");
  EXPECT_EQ(attend({0, 1, 3, 3}, 4), "ref: attn_fwd: segment 0 has parent rows [3, 6) of 5");
}

}  // namespace

}  // namespace pare::test
