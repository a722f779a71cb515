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
                  "linear_bwd_weight", "adamw"});
}

class FastOps : public testing::TestWithParam<OpRow> {};

TEST_P(FastOps, AgreeWithRef) {
  OpRun reference(table_ref, DType::f64), run(table_kernels_fast, DType::f32, true);
  GetParam().run(reference), GetParam().run(run);
  const auto wrong = differences(run, reference);
  EXPECT_TRUE(wrong.empty()) << joined(wrong);
}

// Where nothing is summed, what lies in another order is the same.
TEST_P(FastOps, HaveTheValuesOfTheExactTableButInProducts) {
  if (std::string(GetParam().op->op).starts_with("linear_")) return;
  OpRun exact(table_kernels, DType::f32), run(table_kernels_fast, DType::f32, true);
  GetParam().run(exact), GetParam().run(run);
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
  for (const auto& [n, i, o, gap] : std::vector<std::array<int64_t, 4>>{
           {1, 1, 1, 0}, {5, 17, 3, 7}, {66, 63, 70, 0}, {3, 130, 16, 8}, {80, 40, 72, 16}, {1, 8, 40, 24}}) {
    k::check(
        [&, n = n, i = i, o = o, gap = gap](k::Call& t) {
          const Tensor x = t.act("x", {n, i}, gap), dy = t.act("dy", {n, o}, gap), bias = t.act("bias", {o});
          const Weight w = t.weight("w", o, i);
          t.table.linear_fwd({t.act_out("y", {n, o}, gap), x, w, {}, {}}, {});
          t.table.linear_fwd({t.act_out("biased", {n, o}), x, w, bias, {}}, {});
          t.table.linear_bwd_input({t.act_out("dx", {n, i}, gap), dy, w, false}, {});
          t.table.linear_bwd_weight({t.stat("dw", {o, i}), t.stat("dbias", {o}), dy, x}, {});
          t.table.linear_bwd_weight({t.stat("dw alone", {o, i}), {}, dy, x}, {});
          t.table.embedding_fwd(
              {t.act_out("embedded", {3, i}), w, t.index("ids", {3}, {static_cast<int>(o) - 1, 0, 0})}, {});
        },
        0, false, table_kernels_fast);
    k::check(
        [&, n = n, i = i, o = o, gap = gap](k::Call& t) {
          const Tensor x = t.act("x", {n, i}, gap), dy = t.act("dy", {n, o}, gap), bias = t.act("bias", {o});
          const Weight w = t.weight("w", o, i);
          t.table.linear_fwd({t.act_out("added", {n, o}, gap), x, w, bias, t.act("other", {n, o}, gap + 1)}, {});
          const Tensor residual = t.act("residual", {n, o}, gap);
          t.table.linear_fwd({residual, x, w, bias, residual}, {});  // in place
          t.table.linear_bwd_input({t.act("sum", {n, i}, gap), dy, w, true}, {});
        },
        rounded(), false, table_kernels_fast);
  }
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
