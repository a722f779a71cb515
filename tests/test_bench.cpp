// `pare bench`: every op can be called on operands of any size.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "bench/measure.h"
#include "tests/program.h"
#ifdef PARE_EMU
#include "cuda/emu/include/cuemu.h"
#endif

namespace pare::test {
namespace {

using nlohmann::json;

// Small sizes for an op; those that are not listed keep their defaults.
std::string small(const cases::OpCase& b, int64_t flags) {
  static const std::map<std::string, int64_t> sizes = {
      {"n", 70}, {"N", 21}, {"M", 3},     {"C", 18},     {"V", 50}, {"R", 5},     {"F", 9},
      {"H", 4},  {"K", 2},  {"D", 16},    {"G", 2},      {"S", 2},  {"L", 70},    {"P", 5},
      {"B", 3},  {"E", 3},  {"keep", 40}, {"window", 3}, {"T", 1},  {"block", 4}, {"budget", 3}};
  std::string s;
  for (const cases::Dim& d : b.dims) {
    const auto size = sizes.find(d.name);
    const bool flag = d.least == 0 && d.shown && size == sizes.end();
    if (!flag && size == sizes.end()) continue;
    const int64_t value = flag ? flags : flags && d.least == 0 ? 0 : size->second;  // what may be left out is, once
    s += cat(s.empty() ? "" : ",", d.name, "=", value);
  }
  return s;
}

// The operands meet the op's contract, calls can be repeated without a number that is not finite, and the cost is the
// ledger's; planned memory is what is taken.
TEST(OpBenches, CanBeCalledAgainAndAgain) {
  std::vector<const Table*> tables = {&table_cpu};
#ifdef PARE_EMU
  tables.push_back(&table_emu);
  tables.push_back(&table_emu_fast);
#endif
  for (const Table* table : tables)
    for (const cases::OpCase& b : cases::op_cases())
      for (int64_t flags : {0, 1}) {
        const cases::Dims dims(b.op, b.dims, small(b, flags));
        SCOPED_TRACE(cat(table->name, " ", b.op, " ", dims.str()));
        Device planner(table_null);
        Arena nothing("operands", no_memory);
        DeviceOperands planned(planner, DType::f32, nothing);
        make_call(planner, b, planned, dims);

        Device device(*table);
        Arena arena("operands", *table->memory, nothing.used());
        DeviceOperands operands(device, DType::f32, arena);
        const OpCall call = make_call(device, b, operands, dims);
        EXPECT_EQ(arena.used(), nothing.used());
        Ledger ledger;
        device.ledger = &ledger;
        device.check_nan = true;
        for (int i = 0; i < 3; i++) call.run();
        device.wait();
        const Ledger::Line line = ledger.phases.at("main").at(b.op);
        EXPECT_EQ(line.calls, 3);
        EXPECT_EQ(line.cost.flops, 3 * call.cost.flops);
        EXPECT_EQ(line.cost.read, 3 * call.cost.read);
        EXPECT_EQ(line.cost.written, 3 * call.cost.written);
        EXPECT_GT(call.cost.read + call.cost.written, 0);
      }
}

TEST(OpBenches, SizesAreChecked) {
  const cases::OpCase& linear = cases::op_case("linear_fwd");
  EXPECT_EQ(cases::Dims("linear_fwd", linear.dims, "K=5,M=7,bias=1").str(),
            "M=7,N=17920,K=5,bias=1,residual=0,kernel=0");
  const auto error = [&](const std::string& shape) {
    try {
      cases::Dims("linear_fwd", linear.dims, shape);
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::usage);
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(error("Q=3").find("linear_fwd has no size Q=3; it has"), std::string::npos);
  EXPECT_NE(error("Q=3").find("K=1536 (inputs"), std::string::npos);
  for (const char* shape : {"M=", "M", "M=x", "M=3x", "M=0", "M=-1", "M=3,,K=2", "bias=-1"})
    EXPECT_NE(error(shape), "") << shape;
  EXPECT_THROW(cases::op_case("linear"), Error);
}

// What does not fit, and what the op refuses, is the user's mistake.
TEST(OpBenches, ImpossibleOperandsAreRefused) {
  const auto error = [](const char* op, const std::string& shape) {
    const cases::OpCase& b = cases::op_case(op);
    try {
      measure_op(table_cpu, DType::f32, b, cases::Dims(op, b.dims, shape), {.rotate = false, .seconds = 0});
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::usage);
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(error("zero", "n=1000000000000000").find("are free"), std::string::npos);
  EXPECT_NE(error("attn_fwd", "H=5,L=3").find("5 query heads over 2 key heads"), std::string::npos);
  EXPECT_NE(error("kv_compact", "L=10,keep=11").find("must not fall"), std::string::npos);
}

TEST(OpBenches, OperandsRotatePastTheCache) {
  const cases::OpCase& b = cases::op_case("swiglu_fwd");
  const cases::Dims dims("swiglu_fwd", b.dims, "N=100,F=100");  // smaller than any last cache
  const Measured m = measure_op(table_cpu, DType::f32, b, dims, {.rotate = true, .seconds = 0});
  EXPECT_GT(m.copies, 1);
  EXPECT_EQ(m.operand_bytes, 3 * 100 * 100 * 4);
  EXPECT_EQ(m.time.samples, 3);
  EXPECT_GT(m.time.least, 0);
  EXPECT_LE(m.time.least, m.time.median);
  EXPECT_LE(m.time.median, m.time.most);
  EXPECT_EQ(measure_op(table_cpu, DType::f32, b, dims, {.rotate = false, .seconds = 0}).copies, 1);
  // The bound is the slower of the two ways.
  const Ceilings c{{1e9, "products"}, {3e9, "memory"}};
  EXPECT_DOUBLE_EQ(m.bound(c), std::max(5e4 / 1e9, 12e4 / 3e9));
  EXPECT_EQ(m.bound({{0, ""}, {3e9, ""}}), 0);
}

#ifdef PARE_EMU
// As in a run, and always the same launch: a host that sets nodes would be what is timed.
TEST(OpBenches, CallsOfASampleAreOneLaunch) {
  const cases::OpCase& b = cases::op_case("linear_fwd");
  const cases::Dims dims("linear_fwd", b.dims, "M=2,N=16,K=16");
  const cuemu::Calls before = cuemu::calls();
  const Measured m = measure_op(table_emu, DType::bf16, b, dims, {.rotate = true, .seconds = 0});
  const cuemu::Calls after = cuemu::calls();
  EXPECT_EQ(m.time.samples, 3);
  EXPECT_EQ(after.graph_launches - before.graph_launches, 4u);  // one to be warm
  EXPECT_LE(after.graphs_made - before.graphs_made, 2u);
  EXPECT_EQ(after.nodes_set, before.nodes_set);
  EXPECT_EQ(after.launches, before.launches);
}
#endif

using BenchProgram = Program;

TEST_F(BenchProgram, WritesJson) {
  const Outcome o = run("bench --op linear_fwd --shape M=3,N=20,K=10 --shape M=4,N=20,K=10 --json --threads 1");
  ASSERT_EQ(o.code, 0) << o.err;
  const json j = json::parse(o.out);
  EXPECT_GT(j["ceilings"]["flops"]["per_second"], 0);
  EXPECT_GT(j["ceilings"]["bytes"]["per_second"], 0);
  ASSERT_EQ(j["rows"].size(), 2u);
  const json& r = j["rows"][1];
  EXPECT_EQ(r["shape"]["M"], 4);
  EXPECT_EQ(r["flops"], 2 * 4 * 20 * 10);
  EXPECT_EQ(r["bytes_read"], 4 * (4 * 10 + 20 * 10));
  const double t = r["seconds"]["median"], flops = r["flops_per_second"], share = r["flops_share"];
  EXPECT_NEAR(flops * t, 1600, 1e-6);
  EXPECT_NEAR(share * double(j["ceilings"]["flops"]["per_second"]), flops, 1);
}

// Three calls take longer than a millisecond, however fast the machine: three samples, the fewest, end it.
TEST_F(BenchProgram, SecondsBoundTheSamples) {
  const Outcome o = run("bench --op linear_fwd --shape M=128,N=1024,K=1024 --json --threads 1 --seconds 0.001");
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(json::parse(o.out)["rows"][0]["samples"], 3);
}

// The time of a machine that is not here, without its program: that of a plan.
TEST_F(BenchProgram, PredictsACall) {
  const Outcome o = run("bench --predict h100 --device cuda --op attn_bwd --shape L=4096 --shape L=16384 --json");
  ASSERT_EQ(o.code, 0) << o.err;
  const json j = json::parse(o.out);
  ASSERT_EQ(j.size(), 2u);
  EXPECT_NEAR(j[0]["stretch"], 1.047, 0.005) << "half a part of 1024 rows at the end, 8 of 14 products";
  EXPECT_NEAR(double(j[0]["seconds"]) / double(j[1]["seconds"]), 1.047 / 16, 0.002);
  EXPECT_NEAR(double(j[1]["seconds"]) / 6.4072e-3, 1, 0.2) << "as an H100 took";
  EXPECT_EQ(run("bench --predict h100").code, 2);
  EXPECT_EQ(run("bench --predict no-such --op zero").code, 2);
}

TEST_F(BenchProgram, SaysWhatIsWrong) {
  Outcome o = run("bench --op linear --json");
  EXPECT_EQ(o.code, 2);
  EXPECT_NE(o.err.find("there is no op linear; there are"), std::string::npos) << o.err;
  o = run("bench --seconds 1");
  EXPECT_EQ(o.code, 2);
  EXPECT_NE(o.err.find("--seconds need --op"), std::string::npos) << o.err;
  o = run("bench --shape M=3");
  EXPECT_EQ(o.code, 2);
  EXPECT_NE(o.err.find("need --op"), std::string::npos) << o.err;
}

}  // namespace
}  // namespace pare::test
