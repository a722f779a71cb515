// Every op of every table against `ref` in f64.  The rows are those of src/cases.
#include <set>

#include "base/thread_pool.h"
#include "kernels.h"
#include "op_cases.h"
#include "ops/data.h"
#include "ops/norm.h"
#include "ops/swiglu.h"

namespace pare::test {

namespace {

// f() once; on the emulator once for each order of its threads and blocks.
void in_orders_of(const Table* table, const std::function<void()>& f) {
  table == kernels_here() ? in_all_orders(f) : f();
}

class OpTest : public testing::TestWithParam<OpRow> {};

TEST_P(OpTest, AgreesWithRef) {
  OpRun reference(table_ref, DType::f64);
  GetParam().run(reference);
  ASSERT_TRUE(reference.problems.empty()) << "ref in f64:" << joined(reference.problems);
  for (const Table* table : {&table_ref, &table_cpu, kernels_here()}) {
    if (!table) continue;
    std::map<std::string, std::vector<unsigned char>> first;
    in_orders_of(table, [&] {
      OpRun run(*table, DType::f32);
      GetParam().run(run);
      if (run.skipped) return;
      const auto wrong = differences(run, reference);
      EXPECT_TRUE(wrong.empty()) << "table " << table->name << joined(wrong);
      for (const std::string& name : run.outputs()) {
        const auto bytes = run.buffer(name).element_bytes();
        EXPECT_EQ(first.emplace(name, bytes).first->second, bytes) << name << " depends on the order of threads";
      }
    });
  }
}

// Threads divide outputs: the bits are those of one thread.
TEST_P(OpTest, ThreadsDoNotChangeBits) {
  for (const Table* table : {&table_ref, &table_cpu}) {
    std::map<std::string, std::vector<unsigned char>> first;
    for (int n : {1, 2, 3}) {
      set_threads(n);
      OpRun run(*table, DType::f32);
      GetParam().run(run);
      for (const std::string& name : run.skipped ? std::vector<std::string>{} : run.outputs()) {
        const auto bytes = run.buffer(name).element_bytes();
        EXPECT_EQ(first.emplace(name, bytes).first->second, bytes) << table->name << ", " << n << " threads: " << name;
      }
    }
    set_threads(0);
  }
}

// list.h states the order of sums, and the CUDA kernels follow it: in f32 they have the bits of `cpu`.
TEST_P(OpTest, CudaKernelsHaveTheBitsOfCpu) {
  if (!kernels_here()) GTEST_SKIP() << "no CUDA emulation on this machine";
  // Their order is their own (norm.cu, rope.cu).
  if (std::set<std::string>{"rmsnorm_fwd", "rmsnorm_bwd", "qk_norm_rope_fwd", "qk_norm_rope_bwd"}.count(
          GetParam().op->op))
    return;
  OpRun cpu(table_cpu, DType::f32), kernels(*kernels_here(), DType::f32);
  GetParam().run(kernels);
  if (kernels.skipped) return;
  GetParam().run(cpu);
  for (const std::string& name : cpu.outputs()) {
    if (name == "normed" || name == "rstd") continue;  // of the norm behind a product
    EXPECT_EQ(kernels.buffer(name).element_bytes(), cpu.buffer(name).element_bytes()) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, OpTest, testing::ValuesIn(op_rows()),
                         [](const auto& info) { return cat(info.param.op->op, "_", info.param.shape()); });

TEST(OpTestList, CoversEveryOp) {
  std::multiset<std::string> tested;
  for (const cases::OpCase& c : cases::op_cases()) {
    tested.insert(c.op);
    EXPECT_FALSE(c.odd.empty()) << c.op;
  }
#define X(op, Args) EXPECT_EQ(tested.count(#op), 1u) << "cases of op " #op;
  PARE_OPS(X)
#undef X
}

// The harness itself: a table that breaks its promises is found out.
void writes_too_much(const Zero& a, Stream) { std::memset(a.x.data, 0, a.x.bytes() + 1); }
void writes_gap(const RmsnormFwd& a, Stream s) {
  table_ref.rmsnorm_fwd(a, s);
  a.y.as<float>()[a.y.shape[1]] = 0;
}
void changes_input(const Accumulate& a, Stream s) {
  table_ref.accumulate(a, s);
  a.x.as<float>()[0] += 1;
}
void slightly_wrong(const SwigluFwd& a, Stream s) {
  table_ref.swiglu_fwd(a, s);
  a.y.as<float>()[0] *= 1.00001f;
}
void forgets_last(const EmbeddingFwd& a, Stream s) {
  EmbeddingFwd less = a;
  less.y = a.y.rows(0, a.y.shape[0] - 1);
  less.ids = a.ids.rows(0, a.ids.shape[0] - 1);
  table_ref.embedding_fwd(less, s);
}

TEST(OpTestList, FindsBrokenTables) {
  Table broken = table_ref;
  broken.zero = writes_too_much;
  broken.rmsnorm_fwd = writes_gap;
  broken.accumulate = changes_input;
  broken.swiglu_fwd = slightly_wrong;
  broken.embedding_fwd = forgets_last;
  std::map<std::string, std::string> found;
  for (const OpRow& row : op_rows({"zero", "rmsnorm_fwd", "accumulate", "swiglu_fwd", "embedding_fwd"})) {
    const std::string op = row.op->op;
    if (op == "rmsnorm_fwd" && row.size != "N=5,C=64,gap=3") continue;
    OpRun reference(table_ref, DType::f64), run(broken, DType::f32);
    row.run(reference);
    row.run(run);
    EXPECT_FALSE(differences(run, reference).empty()) << op << " " << row.size;
    found[op] = joined(differences(run, reference));
  }
  EXPECT_NE(found["zero"].find("x: written outside"), std::string::npos) << found["zero"];
  EXPECT_NE(found["rmsnorm_fwd"].find("y: written outside"), std::string::npos) << found["rmsnorm_fwd"];
  EXPECT_NE(found["accumulate"].find("x: an input was changed"), std::string::npos) << found["accumulate"];
  EXPECT_NE(found["swiglu_fwd"].find("y[0] is"), std::string::npos) << found["swiglu_fwd"];
  EXPECT_NE(found["embedding_fwd"].find("nan, ref"), std::string::npos) << found["embedding_fwd"];
}

}  // namespace

}  // namespace pare::test
