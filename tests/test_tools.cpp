// The scripts that read what nvcc, ncu and `pare bench` write, on samples in their formats.  Those of ncu are made up
// by its documentation: no device has shown them yet.
#include <nlohmann/json.hpp>
#include <regex>

#include "tests/program.h"

namespace pare::test {
namespace {

using nlohmann::json;

class Tools : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    if (!IsSkipped() && std::system("python3 --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no python3";
  }
  Outcome python(const std::string& arguments) const {
    const int status = std::system(("python3 " + arguments + " >" + at(".out") + " 2>" + at(".err")).c_str());
    return {WEXITSTATUS(status), read_text(at(".out")), read_text(at(".err"))};
  }
};

const char* const kKernel =
    "void pare::cuda::(anonymous namespace)::rows<__nv_bfloat16, (pare::Kind)1>(const float *, int)";

// A line for each metric, and ncu's messages between.
std::string by_lines() {
  std::string s =
      "==PROF== Connected to process 4711\n"
      "\"ID\",\"Process ID\",\"Kernel Name\",\"Section Name\",\"Metric Name\",\"Metric Unit\",\"Metric Value\"\n";
  const auto line = [&](int id, const char* kernel, const char* metric, const char* unit, const char* value) {
    s += "\"" + std::to_string(id) + "\",\"4711\",\"" + kernel + "\",\"Command line profiler metrics\",\"" + metric +
         "\",\"" + unit + "\",\"" + value + "\"\n";
  };
  for (const auto& [id, ns] : {std::pair{0, "20,000"}, {1, "24,000"}, {2, "22,000"}}) {
    line(id, kKernel, "gpu__time_duration.sum", "ns", ns);
    line(id, kKernel, "dram__bytes_read.sum", "byte", "30,000,000");
    line(id, kKernel, "dram__bytes_write.sum", "Mbyte", "14");
    line(id, kKernel, "launch__registers_per_thread", "register/thread", "40");
  }
  for (int id : {3, 4, 5}) {
    line(id, "finish(float *)", "gpu__time_duration.sum", "us", "3.0");
    line(id, "finish(float *)", "dram__bytes_read.sum", "byte", "n/a");
  }
  return s + "==PROF== Disconnected\n";
}

TEST_F(Tools, NcuTableReadsBothLayouts) {
  Outcome o = python("tools/ncu_table.py " + write("lines.csv", by_lines()));
  EXPECT_EQ(o.code, 0) << o.err;
  // Medians: 22 us, 44 MB, 2 TB/s.
  EXPECT_NE(o.out.find("rows<bf16, (Kind)1>                                 3      22.00     44.00     2000"),
            std::string::npos)
      << o.out;
  EXPECT_NE(o.out.find("finish                                              3       3.00         -        -"),
            std::string::npos)
      << o.out;

  o = python(
      "tools/ncu_table.py " +
      write("columns.csv",
            "\"ID\",\"Kernel Name\",\"dram__bytes_read.sum\",\"dram__bytes_write.sum\",\"gpu__time_duration.sum\"\n"
            "\"\",\"\",\"Mbyte\",\"Mbyte\",\"usecond\"\n"
            "\"0\",\"add(int)\",\"6\",\"2\",\"4\"\n"));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("add                                                 1       4.00      8.00     2000"),
            std::string::npos)
      << o.out;

  o = python("tools/ncu_table.py " + write("none.csv", "==ERROR== no access to counters\n"));
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("holds no kernel"), std::string::npos) << o.err;
}

TEST_F(Tools, NcuTableComparesWithTheLedger) {
  const json bench = {{"rows",
                       {{{"op", "rmsnorm_fwd"},
                         {"bytes_read", 30000000},
                         {"bytes_written", 10000000},
                         {"bound_seconds", 10e-6},
                         {"seconds", {{"median", 26e-6}}}}}}};
  const Outcome o =
      python("tools/ncu_table.py --bench " + write("bench.json", bench.dump()) + " " + write("lines.csv", by_lines()));
  EXPECT_NE(o.out.find("a call of rmsnorm_fwd: 25.00 us in kernels, 26.00 us in pare bench"), std::string::npos)
      << o.out << o.err;
  EXPECT_NE(o.out.find("40.0 % of its bound, 10.00 us"), std::string::npos) << o.out;
}

TEST_F(Tools, RegistersAreComparedWithTheBaseline) {
  const auto ptxas = [](int registers, int spill) {
    return "ptxas info    : 0 bytes gmem\n"
           "ptxas info    : Compiling entry function '_ZN4pare4cuda3addIfEEvPT_' for 'sm_90a'\n"
           "ptxas info    : Function properties for _ZN4pare4cuda3addIfEEvPT_\n"
           "    8 bytes stack frame, " +
           std::to_string(spill) + " bytes spill stores, 0 bytes spill loads\nptxas info    : Used " +
           std::to_string(registers) + " registers, used 1 barriers, 2048 bytes smem, 396 bytes cmem[0]\n";
  };
  if (std::system("c++filt --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no c++filt";
  const std::string baseline = at("registers.txt"), file = at("add.ptxas");
  const auto run = [&](const std::string& text, const char* options) {
    write("add.ptxas", text);
    return python("tools/registers.py " + std::string(options) + " " + baseline + " 13.0 " + file);
  };
  EXPECT_EQ(run(ptxas(40, 0), "--update").code, 0);
  EXPECT_NE(read_text(baseline).find("\nadd.cu\n  add<float>"), std::string::npos) << read_text(baseline);
  EXPECT_EQ(run(ptxas(40, 0), "").code, 0);
  Outcome o = run(ptxas(38, 0), "");
  EXPECT_EQ(o.code, 0);
  EXPECT_NE(o.out.find("1 take less"), std::string::npos) << o.out;
  o = run(ptxas(41, 16), "");
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.out, "add.cu: add<float> sm_90a: registers 40 -> 41, spill stores 0 -> 16\n");
  EXPECT_NE(o.err.find("make registers-update"), std::string::npos) << o.err;
  o = run("", "");
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("no kernel in these files"), std::string::npos) << o.err;
  EXPECT_EQ(python("tools/registers.py " + baseline + " 12.4 " + write("add.ptxas", ptxas(90, 0))).code, 0);
}

// Ratios by hand: goals of memory, of products, and those without what they need.
TEST_F(Tools, GoalsAreRatios) {
  const auto row = [](double seconds, double flops, double bytes) {
    return json{{"seconds", {{"median", seconds}}},
                {"flops", flops},
                {"bytes_read", bytes},
                {"bytes_written", 0.0},
                {"bound_share", 0.5}};
  };
  const json rows = {
      {"device", "a device"},
      {"ceilings", {{"flops", {{"per_second", 1e14}, {"how", "x"}}}, {"bytes", {{"per_second", 1e12}, {"how", "y"}}}}},
      {"failed", {{"adamw n=134217728", "out of memory"}}},
      {"rows",
       {{"attn_paged B=256,L=4096", row(2e-3, 1e9, 1e9)},
        {"linear_fwd M=1024,N=151936,K=1536", row(8e-3, 5e11, 1e9)},
        {"logprob R=1024", row(2e-3, 1e9, 1e9)},
        {"attn_fwd L=4096", row(4e-3, 1e11, 1e9)},
        {"linear_bwd_weight M=16,N=17920,K=1536", row(5e-3, 1e11, 1e9)},
        {"linear_bwd_weight M=16,N=17920,K=1536 --exact=off", row(4e-3, 1e11, 1e9)}}}};
  write("rows.json", rows.dump());
  write("baselines.json", R"({"sdpa_fwd S=4096,H=12,K=2,D=128": {"seconds": {"median": 1e-3}, "how": "z"}})");
  write("stages.tsv", "build\tpassed\t12\nop tests\tfailed (1)\t3\n");
  write("facts.tsv", "date\t2026-01-01T00:00:00Z\ncommand\ttools/gpu_check.sh\ncommit\tabc\n");
  ASSERT_EQ(python("tools/bench/gpu.py summary " + at("")).code, 0) << read_text(at(".err"));
  const json summary = json::parse(read_text(at("summary.json")));
  std::map<std::string, json> of;
  std::vector<double> measured;
  for (const json& r : summary["ratios"]) {
    of[r["name"]] = r;
    if (!r["ratio"].is_null()) measured.push_back(double(r["ratio"]) / double(r["goal"]));
  }
  EXPECT_DOUBLE_EQ(of["decode attention, 256 x 4096"]["ratio"], 0.5);
  EXPECT_DOUBLE_EQ(of["LM head and log-prob"]["ratio"], 5.01e11 / 1e14 / 10e-3);
  EXPECT_DOUBLE_EQ(of["attention forward, S=4096"]["ratio"], 0.25);
  EXPECT_EQ(of["AdamW, 134 M parameters"]["why_not"], "out of memory");
  EXPECT_DOUBLE_EQ(of["linear backward dW, M=16, exact over --exact=off"]["ratio"], 0.8);
  EXPECT_EQ(of["linear backward dW, M=256, exact over --exact=off"]["why_not"],
            "not measured: linear_bwd_weight M=256,N=17920,K=1536");
  EXPECT_EQ(measured.size(), 4u);
  EXPECT_TRUE(std::is_sorted(measured.begin(), measured.end()));
  const std::string table = read_text(at("table.md"));
  EXPECT_NE(table.find("| op tests | failed (1) | 3 |"), std::string::npos) << table;
  EXPECT_LT(table.find("attention forward, S=4096"), table.find("decode attention, 256 x 4096")) << table;
  EXPECT_LT(table.find("decode attention, 256 x 4096"), table.find("AdamW")) << table;
}

// `make cuda ARCH=native` asks the driver, which here is a script.
TEST_F(Tools, ArchitecturesOfThisMachine) {
  const auto make = [&](const std::string& arch, const std::string& answer) {
    write("bin/nvidia-smi", "#!/bin/sh\n" + answer + "\n");
    std::filesystem::permissions(at("bin/nvidia-smi"), std::filesystem::perms::owner_all);
    const int status =
        std::system(("env -u MAKEFLAGS -u MAKELEVEL PATH=" + at("bin") + ":$PATH make -n V=1 BUILD=" + at("build") +
                     " 'ARCH=" + arch + "' " + at("build/cuda/cuda/table.o") + " >" + at(".out") + " 2>" + at(".err"))
                        .c_str());
    std::string out = read_text(at(".out")), codes;
    const std::regex code("-gencode arch=compute_(\\w+),code=(\\w+)");
    for (std::sregex_iterator i(out.begin(), out.end(), code), end; i != end; ++i)
      codes += (codes.empty() ? "" : " ") + i->str(2);
    return Outcome{WEXITSTATUS(status), codes, read_text(at(".err"))};
  };
  EXPECT_EQ(make("80 90a", "exit 1").out, "sm_80 sm_90a compute_80");
  EXPECT_EQ(make("90", "exit 1").out, "sm_90a compute_80");
  EXPECT_EQ(make("native", "echo 8.9").out, "sm_89 compute_80");
  EXPECT_EQ(make("native", "echo 9.0; echo 12.0; echo 9.0").out, "sm_120 sm_90a compute_80");
  for (const char* none :
       {"exit 9", "echo NVIDIA-SMI has failed because it could not communicate with the driver. 8.9"}) {
    const Outcome o = make("native", none);
    EXPECT_EQ(o.code, 2) << none;
    EXPECT_NE(o.err.find("ARCH=native: nvidia-smi finds no GPU with a driver here; name the architectures, as in "
                         "ARCH=\"80 90a\""),
              std::string::npos)
        << o.err;
  }
  EXPECT_NE(make("native", "echo 7.5").err.find("ARCH=75: 80 at least is needed, for bfloat16"), std::string::npos);
}

}  // namespace
}  // namespace pare::test
