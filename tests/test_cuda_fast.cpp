// The CUDA table with linear layers by cuBLASLt: the ops in which it differs, against `ref`.
#include <set>

#include "kernel_call.h"
#include "op_cases.h"

namespace pare::test {
namespace {

namespace k = kernel;

// ---- f32: every case of the ops that it replaces

std::vector<OpRow> rows() {
  return op_rows({"pack_weight", "unpack_weight", "embedding_fwd", "linear_fwd", "linear_bwd_input",
                  "linear_bwd_weight", "kv_write", "adamw"});
}

class FastOps : public testing::TestWithParam<OpRow> {};

TEST_P(FastOps, AgreeWithRef) {
  OpRun reference(table_ref, DType::f64), run(table_kernels_fast, DType::f32);
  GetParam().run(reference);
  GetParam().run(run);
  const auto wrong = differences(run, reference);
  EXPECT_TRUE(wrong.empty()) << joined(wrong);
}

// Where nothing is summed, what lies in another order is the same.
TEST_P(FastOps, HaveTheValuesOfTheExactTableButInProducts) {
  if (std::string(GetParam().op->op).starts_with("linear_") || GetParam().shape().find("inputs40") != std::string::npos)
    return;
  OpRun exact(table_kernels, DType::f32), run(table_kernels_fast, DType::f32);
  GetParam().run(exact);
  GetParam().run(run);
  for (const std::string& name : exact.outputs()) EXPECT_EQ(run.values(name), exact.values(name)) << name;
}

INSTANTIATE_TEST_SUITE_P(Ops, FastOps, testing::ValuesIn(rows()),
                         [](const auto& info) { return cat(info.param.op->op, "_", info.param.shape()); });

TEST(FastOpsList, IsWhatTheTablesDifferIn) {
  std::set<std::string> tested, different;
  for (const OpRow& row : rows()) tested.insert(row.op->op);
#define X(op, Args) \
  if (table_kernels.op != table_kernels_fast.op) different.insert(#op);
  PARE_OPS(X)
#undef X
  EXPECT_EQ(tested, different);
}

// ---- both types, through pack_weight

// cuBLASLt may round a product, here below 32, to bf16 before it adds something; the emulator's rounds once.
double rounded() { return on_gpu() ? 1. / 16 : 0; }

TEST(CudaFast, Linear) {
  const std::vector<std::string> sizes = {"M=1,K=1,N=1",          "M=5,K=17,N=3,gap=7",    "M=66,K=63,N=70",
                                          "M=3,K=130,N=16,gap=8", "M=80,K=40,N=72,gap=16", "M=1,K=8,N=40,gap=24"};
  const auto check = [](const char* op, const std::vector<std::string>& texts, double inner = 0) {
    k::check(op, texts, inner, false, table_kernels_fast);
  };
  check("linear_fwd", cases::with(sizes, {"", "bias=1"}));
  check("linear_bwd_input", sizes);
  check("linear_bwd_weight", cases::with(sizes, {"", "bias=1"}));
  check("linear_fwd", cases::with(sizes, {"bias=1,residual=1", "bias=1,residual=1,in_place=1"}), rounded());
  check("linear_bwd_input", cases::with(sizes, {"accumulate=1"}), rounded());
  const std::vector<std::string> weights = {"1,C=1", "3,C=17", "70,C=63", "16,C=130", "72,C=40", "40,C=8"};
  for (const std::string& w : weights) check("embedding_fwd", {"N=3,V=" + w});
}

// The same shapes at other addresses: what was chosen for aligned operands is not taken for others.
TEST(CudaFast, LinearOfRowsThatBeginAnywhere) {
  for (const int64_t at : {0, 1, 2, 8})
    k::check(
        [&, at](k::Call& t) {
          const auto part = [&](const char* name, int64_t columns) {
            return t.act(name, {7, 64}).columns(at, columns);
          };
          const Tensor x = part("x", 24), dy = part("dy", 40), w_bias = t.act("bias", {56}).rows(at, 40);
          const Weight w = t.weight("w", 40, 24);
          t.table.linear_fwd({part("y", 40), x, w, w_bias, part("residual", 40)}, {});
          t.table.linear_bwd_input({part("dx", 24), dy, w, true}, {});
          t.table.linear_bwd_weight({t.stat("dw", {40, 24}), t.stat("dbias", {40}), dy, x}, {});
        },
        rounded(), false, table_kernels_fast);
}

// A sum of nothing is 0; of nothing, nothing is written.
TEST(CudaFast, LinearOfNoRowsOutputsOrInputs) {
  for (const auto& [n, i, o] : std::vector<std::array<int64_t, 3>>{{0, 5, 3}, {4, 0, 3}, {4, 5, 0}, {0, 0, 0}})
    k::check(
        [&, n = n, i = i, o = o](k::Call& t) {
          const Tensor x = t.act("x", {n, i}), dy = t.act("dy", {n, o});
          const Weight w = t.weight("w", o, i);
          t.table.linear_fwd({t.act_out("y", {n, o}), x, w, t.act("bias", {o}), t.act("residual", {n, o})}, {});
          t.table.linear_bwd_input({t.act_out("dx", {n, i}), dy, w, false}, {});
          t.table.linear_bwd_input({t.act("sum", {n, i}), dy, w, true}, {});
          t.table.linear_bwd_weight({t.stat("dw", {o, i}), t.stat("dbias", {o}), dy, x}, {});
        },
        0, false, table_kernels_fast);
}

}  // namespace
}  // namespace pare::test
