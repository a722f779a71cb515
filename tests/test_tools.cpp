// The scripts that read what nvcc, ncu and `pare bench` write, on samples in their formats.  Those of ncu are made up
// by its documentation: no device has shown them yet.
#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "base/error.h"
#include "tests/program.h"

namespace pare::test {
namespace {

using nlohmann::json;

class Tools : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    if (IsSkipped()) return;
    // The interpreter itself: what chooses one of several (pyenv) takes longer than most scripts.
    const Outcome o = shell("python3 -c 'import os, sys; print(os.path.dirname(sys.executable), end=\"\")'");
    if (o.code != 0) GTEST_SKIP() << "no python3";
    if (const std::string path = std::getenv("PATH"); !path.starts_with(o.out + ":"))
      setenv("PATH", (o.out + ":" + path).c_str(), 1);
  }
  Outcome shell(const std::string& command) const {
    const int status = std::system(("{ " + command + "; } >" + at(".out") + " 2>" + at(".err")).c_str());
    return {WEXITSTATUS(status), read_text(at(".out")), read_text(at(".err"))};
  }
  Outcome python(const std::string& arguments) const { return shell("python3 " + arguments); }
};

// Where there is no apt the names of the system's own packages are printed: every package has them.
TEST_F(Tools, DepsNameThePackagesOfOtherSystems) {
  const std::string makefile = read_text("Makefile"), mark = "\nPACKAGES := ";
  const size_t begin = makefile.find(mark) + mark.size();
  std::string packages = makefile.substr(begin, makefile.find("\n#", begin) - begin) + " g++-12";
  std::erase(packages, '\\');
  std::replace(packages.begin(), packages.end(), '\n', ' ');
  const auto count = [](std::string text) {
    std::stringstream words(text);
    return std::distance(std::istream_iterator<std::string>(words), {});
  };
  ASSERT_GT(count(packages), 8);
  for (const auto& [manager, command, name] : {std::array{"dnf", "    sudo dnf install ", "json-devel"},
                                               {"pacman", "    sudo pacman -S --needed ", "gtest"},
                                               {"brew", "    brew install ", "googletest"},
                                               {"none", "    (Debian's names) ", "libgtest-dev"}}) {
    // A system that has what the script needs, and this.
    write(std::string(manager) + "/" + manager, "#!/bin/sh\n");
    std::filesystem::permissions(at(std::string(manager) + "/" + manager), std::filesystem::perms::owner_all);
    const std::string tools = at(manager);
    ASSERT_EQ(std::system(("for t in sh id tr; do ln -s $(command -v $t) " + tools + "; done").c_str()), 0);
    const int status =
        std::system(("env -i PATH=" + tools + " sh tools/deps.sh " + packages + " 2>" + at(".err")).c_str());
    EXPECT_EQ(WEXITSTATUS(status), 1);
    const std::string text = read_text(at(".err"));
    const size_t line = text.find(command);
    ASSERT_NE(line, std::string::npos) << text;
    const std::string names =
        text.substr(line + std::strlen(command), text.find('\n', line) - line - std::strlen(command));
    EXPECT_EQ(count(names), count(packages)) << names;
    EXPECT_NE((" " + names).find(std::string(" ") + name), std::string::npos) << names;
  }
}

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
    line(id, kKernel, "lts__t_requests_srcunit_tex.sum", "request", "1,000");
    line(id, kKernel, "lts__t_sectors_srcunit_tex.sum", "sector", "1,250");
    line(id, kKernel, "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "%", "61.5");
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
  EXPECT_NE(o.out.find("        40        -     61.5      40.0\n"), std::string::npos) << o.out;
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
  std::string much = ptxas(38, 0);
  much.replace(much.find("2048"), 4, "32772");
  o = run(much, "");
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("has 32772 bytes of static shared memory"), std::string::npos) << o.err;
  o = run("", "");
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("no kernel in these files"), std::string::npos) << o.err;
  EXPECT_EQ(python("tools/registers.py " + baseline + " 12.4 " + write("add.ptxas", ptxas(90, 0))).code, 0);
}

// The kernel's turn has a branch around a part of it, an inner loop, and cold code behind its end.
TEST_F(Tools, TurnsOfHotLoopsAreComparedWithTheBaseline) {
  const auto listing = [](bool longer) {
    std::string out = "\t\tFunction : _ZN4pare4cuda3addEv\n";
    int address = 0;
    const auto put = [&](const std::string& text) {
      char line[80];
      std::snprintf(line, sizeof line, "        /*%04x*/                   %s ;\n", address, text.c_str());
      out += line;
      address += 16;
    };
    put("MOV R1, c[0x0][0x28]");                       // 00
    put("BAR.SYNC.DEFER_BLOCKING 0x0");                // 10: the turn
    put("@P1 BRA 0xa0");                               // 20: rarely
    put("HMMA.16816.F32.BF16 R4, R8, R12, R4");        // 30: an inner loop
    put("@P0 BRA 0x30");                               // 40
    put(longer ? "FADD R2, R2, R2" : "@P2 BRA 0x10");  // 50
    put(longer ? "@P2 BRA 0x10" : "EXIT");             // 60
    put(longer ? "EXIT" : "NOP");                      // 70
    put("NOP");
    put("NOP");              // 80, 90
    put("FMUL R3, R3, R3");  // a0: cold
    put("BRA 0x30");         // b0
    put("BRA 0xc0");         // c0: no product
    return out;
  };
  if (std::system("c++filt --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no c++filt";
  write("add.o", "");
  const std::string baseline = write("budgets.txt", "# nvcc 13.0; x\nadd.cu  add  7\n");
  const auto run = [&](bool longer, const std::string& options) {
    const std::string tool = write("cuobjdump", "#!/bin/sh\ncat <<'end'\n" + listing(longer) + "end\n");
    std::filesystem::permissions(tool, std::filesystem::perms::owner_all);
    setenv("CUOBJDUMP", tool.c_str(), 1);
    const Outcome o = python("tools/sass.py " + options + " " + baseline + " 13.0 " + at(""));
    unsetenv("CUOBJDUMP");
    return o;
  };
  Outcome o = run(false, "");
  EXPECT_EQ(o.code, 0) << o.out << o.err;
  o = run(true, "");
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.out, "add.cu: add: instructions of a turn [7] -> [8]\n");
  EXPECT_NE(o.err.find("make sass-update"), std::string::npos) << o.err;
  EXPECT_EQ(run(true, "--update").code, 0);
  EXPECT_NE(read_text(baseline).find(" 8\n"), std::string::npos) << read_text(baseline);
  EXPECT_EQ(run(true, "").code, 0);
  write("budgets.txt", "# nvcc 13.0; x\nadd.cu  subtract  7\n");
  EXPECT_NE(run(false, "").err.find("no kernel subtract"), std::string::npos);
}

// Ratios by hand: goals of memory, of products, and those without what they need; beside what was predicted.
TEST_F(Tools, GoalsAreRatiosBesideTheirPredictions) {
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
  write("stages.tsv", "baselines\tpassed\t12\ngoals\tfailed (1)\t3\n");
  write("facts.tsv", "date\t2026-01-01T00:00:00Z\ncommand\ttools/gpu_check.sh b, PARE_WGMMA=1\ncommit\tabc\n");
  ASSERT_EQ(python("tools/bench/gpu.py summary " + at("") + " b " + at("")).code, 0) << read_text(at(".err"));
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
  std::string table = read_text(at("table.md"));
  EXPECT_NE(table.find("| goals | failed (1) | 3 |"), std::string::npos) << table;
  EXPECT_LT(table.find("attention forward, S=4096"), table.find("decode attention, 256 x 4096")) << table;
  EXPECT_LT(table.find("decode attention, 256 x 4096"), table.find("AdamW")) << table;
  // goal, prediction, measured; of wgmma, which the run asked for
  EXPECT_NE(table.find("| 0.65 | 0.85 | 0.97 | 0.7 to 0.85: less | 0.250 | 29 % |"), std::string::npos) << table;
  EXPECT_NE(table.find("| 0.65 | 0.85 | 0.93 | 0.88 to 0.94: less | 0.500 | 59 % |"), std::string::npos) << table;
  EXPECT_NE(table.find("| 0.7 | 0.85 | 0.92 | 0.8 | out of memory | - |"), std::string::npos) << table;
  write("facts.tsv", "command\ttools/gpu_check.sh b, PARE_WGMMA=0\n");
  ASSERT_EQ(python("tools/bench/gpu.py summary " + at("") + " b " + at("")).code, 0) << read_text(at(".err"));
  table = read_text(at("table.md"));
  EXPECT_NE(table.find("| 0.65 | 0.85 | 0.97 | 0.25 | 0.250 | 29 % |"), std::string::npos) << table;
}

// A size that fails costs no other size of its op.
TEST_F(Tools, BothKernelsOfEachProductAreTimed) {
  const std::string pare = write("pare", R"(#!/usr/bin/env python3
import json, sys
shapes = [sys.argv[i + 1] for i, a in enumerate(sys.argv) if a == "--shape"]
if any("L=16384" in s for s in shapes): sys.exit("too long")
gradient = "linear_bwd_weight" in sys.argv
rows = [{"seconds": {"median": (1 if "kernel=2" in s else 4) * (1e-3 if gradient else 2e-3)}, "flops": 4e11,
         "bytes_read": 1, "bytes_written": 1, "bound_share": None} for s in shapes]
rate = {"per_second": 1e15, "how": "x"}
print(json.dumps({"device": "a device", "ceilings": {"flops": rate, "bytes": rate}, "rows": rows}))
)");
  std::filesystem::permissions(pare, std::filesystem::perms::owner_all);
  EXPECT_EQ(python("tools/bench/gpu.py rows " + at("") + " --of kernels --pare " + pare).code, 1);
  const json all = json::parse(read_text(at("rows.json")));
  EXPECT_EQ(all["rows"].size(), 14u);
  EXPECT_EQ(all["failed"].size(), 4u);
  EXPECT_EQ(all["failed"]["attn_bwd L=16384,kernel=2"], "too long");
  ASSERT_EQ(python("tools/bench/gpu.py summary " + at("") + " a " + at("")).code, 0) << read_text(at(".err"));
  const std::string table = read_text(at("table.md"));
  EXPECT_NE(table.find("| linear_bwd_weight M=4096,N=17920,K=1536 | 100 | 400 | 4.00 |"), std::string::npos) << table;
}

// Of a run: medians of all steps but the first.
TEST_F(Tools, RunsAreTokensAndFlopsASecond) {
  std::string steps = "{\"val-core/x\": 1}\n";
  for (const double seconds : {50.0, 2.0, 4.0, 2.0})
    steps += json{{"timing_s/gen", seconds},      {"timing_s/update_actor", 2 * seconds},
                  {"timing_s/step", 4 * seconds}, {"tokens/generated", 1000},
                  {"tokens/trained", 2000},       {"flops/rollout", 1e14},
                  {"flops/learner", 4e14},        {"exact/mismatch_tokens", 1},
                  {"exact/checked_tokens", 10},   {"perf/max_memory_allocated_gb", 1.5}}
                 .dump() +
             "\n";
  write("run/metrics.jsonl", steps);
  write("used", "100\n5120\n2048\n");
  write("plan.json", R"({"memory": {"longest": 2147483648}})");
  ASSERT_EQ(python("tools/bench/gpu.py run " + at("") + " 1.5B " + at("run") + " --planned " + at("plan.json") +
                   " --used " + at("used"))
                .code,
            0)
      << read_text(at(".err"));
  write("rows.json", R"({"rows": {}, "failed": {}, "device": null, "ceilings":
        {"flops": {"per_second": 1e15, "how": "x"}, "bytes": {"per_second": null, "how": "y"}}})");
  ASSERT_EQ(python("tools/bench/gpu.py summary " + at("") + " b " + at("")).code, 0) << read_text(at(".err"));
  const std::string table = read_text(at("table.md"));
  EXPECT_NE(table.find("| 1.5B | 4 | 8.00 | 500 | 500 | 5.0 % | 10.0 % | 2.00 | 1.50 | 5.00 | 4 of 40 |"),
            std::string::npos)
      << table;
  // Next-token training samples nothing.
  const json step = {
      {"timing_s/step", 2.0}, {"tokens/trained", 3000}, {"flops/learner", 4e14}, {"perf/max_memory_allocated_gb", 1}};
  write("sft/metrics.jsonl", step.dump() + "\n");
  ASSERT_EQ(python("tools/bench/gpu.py run " + at("") + " tokens " + at("sft") + " --peer 'x 1 tokens/s'").code, 0);
  write("peer.out", R"({"name": "torch 2", "how": "eager", "steps": 4, "seconds": 2.5, "tokens": 70.4})");
  ASSERT_EQ(python("tools/bench/gpu.py peer " + at("") + " rows " + at("peer.out") + " --of train").code, 0);
  ASSERT_EQ(python("tools/bench/gpu.py summary " + at("") + " c " + at("")).code, 0) << read_text(at(".err"));
  EXPECT_NE(
      read_text(at("table.md")).find("| torch 2 (eager): rows | 4 | 2.50 | - | 70 | - | - | - | - | - | 0 of 0 | - |"),
      std::string::npos)
      << read_text(at("table.md"));
  EXPECT_NE(read_text(at("table.md"))
                .find("| tokens | 1 | 2.00 | - | 1500 | - | 20.0 % | - | 1.00 | - | 0 of 0 | x 1 tokens/s |"),
            std::string::npos)
      << read_text(at("table.md"));
}

TEST_F(Tools, EveryGoalHasAPrediction) {
  std::set<std::string> goals, predicted;
  for (const json& g : json::parse(read_text("tools/bench/goals.json"))) goals.insert(g["name"]);
  const json all = json::parse(read_text("tools/bench/predicted.json"));
  for (const auto& [name, p] : all.items()) {
    predicted.insert(name);
    EXPECT_NE(p.contains("ratio"), p.contains("mma.sync") && p.contains("wgmma")) << name;
    for (const char* kernel : {"ratio", "mma.sync", "wgmma"})
      if (p.contains(kernel)) {
        EXPECT_LE(p[kernel].at(0), p[kernel].at(1)) << name;
        EXPECT_GT(p[kernel].at(0), 0) << name;
      }
  }
  EXPECT_EQ(goals, predicted);
  EXPECT_GT(goals.size(), 40u);
}

// ---- tools/gpu_check.sh and tools/node_check.sh, by programs that do nothing

class Check : public Tools {
 protected:
  explicit Check(std::string script) : script_(std::move(script)) {}
  void program(const std::string& name, const std::string& text) const {
    std::filesystem::permissions(write(name, text), std::filesystem::perms::owner_all);
  }
  // `environment`: "A=b C=d".
  Outcome check(const std::string& environment, const std::string& arguments) const {
    return shell(environment + " " + script_ + " -b " + at("build") + " -o " + at("out") + " " + arguments);
  }
  std::vector<std::string> stages(const std::string& call) const {
    std::vector<std::string> names;
    std::stringstream lines(shell(script_ + " -d emu -n " + call).out);
    for (std::string line; std::getline(lines, line) && line.find("seconds at most") == std::string::npos;)
      names.push_back(line.substr(6));
    return names;
  }
  json summary() const { return json::parse(read_text(at("out/summary.json"))); }
  std::map<std::string, std::string> results() const {
    std::map<std::string, std::string> of;
    const json all = summary();
    for (const json& s : all["stages"]) of[s["name"]] = s["result"];
    return of;
  }
  // Every stage has its whole limit, and a call ends within nine minutes though each of them is stopped, two seconds
  // later.
  void expect_nine_minutes(const std::string& call) const {
    const Outcome o = shell(script_ + " -n " + call);
    std::stringstream lines(o.out);
    int total = 0, sum = 0, n = 0;
    for (std::string line; std::getline(lines, line); n++)
      (line.find("seconds at most") != std::string::npos ? total : sum) += std::stoi(line);
    EXPECT_GT(total, 0) << o.out << o.err;
    EXPECT_LE(total, 510) << o.out;
    EXPECT_LE(total, sum) << o.out;
    EXPECT_GT(n, 5) << o.out;
  }
  // Whatever fails, what comes behind it runs, and the summary names it.
  void expect_every_failure_is_named(const std::string& call) const {
    const Outcome o = check("PARE_CHECK_FAIL='*'", "-d emu " + call);
    EXPECT_EQ(o.code, 1) << o.err;
    const auto of = results();
    const auto names = stages(call);
    EXPECT_EQ(of.size(), names.size());
    for (const std::string& name : names) {
      EXPECT_EQ(of.at(name), "failed (9)") << name;
      EXPECT_NE(o.out.find("| " + name + " | failed (9) |"), std::string::npos) << o.out;
    }
    EXPECT_NE(read_text(at("out/log.txt")).find("a planted failure"), std::string::npos);
    const auto files = std::filesystem::directory_iterator(at("out"));
    EXPECT_LE(std::distance(begin(files), end(files)), 8);
  }

 private:
  const std::string script_;
};

class GpuCheck : public Check {
 protected:
  GpuCheck() : Check("tools/gpu_check.sh") {}
  void SetUp() override {
    Check::SetUp();
    if (IsSkipped()) return;
    for (const char* name : {"build/emu/pare", "build/tests/pare_tests"}) program(name, "#!/bin/sh\necho 1 passed\n");
  }
};

TEST_F(GpuCheck, TheLimitsOfACallAreNineMinutes) {
  for (const char* call : {"a", "b", "c", "d", "e", "f"}) expect_nine_minutes(call);
}

TEST_F(GpuCheck, AStageThatFailsCostsNoOther) {
  for (const char* call : {"a", "b", "c", "d", "e", "f"}) expect_every_failure_is_named(call);
}

TEST_F(GpuCheck, AStageThatHangsIsStopped) {
  const Outcome o = check("PARE_CHECK_HANG='counters: d*' PARE_CHECK_FAIL=timeline", "-d emu c");
  EXPECT_EQ(o.code, 1) << o.err;
  const auto of = results();
  EXPECT_EQ(of.at("counters: attention forward"), "not possible here");  // the emulator has no counters
  EXPECT_EQ(of.at("counters: decode"), "stopped after 1 s");
  EXPECT_EQ(of.at("counters: loss"), "not possible here");
  EXPECT_EQ(of.at("timeline"), "failed (9)");
  EXPECT_NE(o.out.find("Failed: counters: decode, counters: decode tail, timeline; see log.txt"), std::string::npos)
      << o.out;
}

// The ways that no rehearsal goes: of a device, by stand-ins for all that is on such a machine.
TEST_F(GpuCheck, OnADeviceEveryStageRuns) {
  program("build/cuda/pare", R"(#!/usr/bin/env python3
import json, os, sys
command, words = sys.argv[1], sys.argv[2:]
after = lambda flag: [words[i + 1] for i, w in enumerate(words) if w == flag]
if command == "bench":
    row = {"op": "x", "seconds": {"median": 1e-3}, "flops": 1e11, "bytes_read": 1e6, "bytes_written": 0, "bound_share": 0.5,
           "bound_seconds": 5e-4}
    rate = {"per_second": 1e15, "how": "x"}
    print(json.dumps({"device": "x", "ceilings": {"flops": rate, "bytes": rate}, "rows": [row for _ in after("--shape")]}))
elif command == "plan":
    assert words[-1] == "--json", words
    print(json.dumps({"memory": {"longest": 3221225472}}))
elif command == "compare":
    print("validation at the end   0.912\nlog-probs checked   10   10\nof these different   0   0 (+0 %)\n"
          "a and b have the same log-probs, bit for bit, in all 3 steps that both have")
elif command == "generate":
    print("10 prompt tokens, 5.00 tok/s; 600 new tokens, 0.20 ktok/s; KV 1 kB at most", file=sys.stderr)
elif command in ("train", "sft"):
    assert after("--device") == ["cuda"], words
    os.makedirs(after("--out")[0], exist_ok=True)
    step = {k: 1 for k in ("timing_s/gen", "timing_s/update_actor", "timing_s/step", "tokens/generated", "tokens/trained",
                           "flops/rollout", "flops/learner", "exact/mismatch_tokens", "exact/checked_tokens",
                           "perf/max_memory_allocated_gb")}
    name = os.path.basename(after("--out")[0]).removeprefix("certificate-")
    step["certificate"] = json.load(open("tests/golden/steps.json"))["9.0"].get(name)
    open(after("--out")[0] + "/metrics.jsonl", "w").write((json.dumps(step) + "\n") * 3)
    if "model.config=data/presets/qwen2.5-1.5b.json" in words: os.system("sleep 1.2")  # until the memory is looked at
)");
  program("build/cuda/pare_cuda_tests",
          "#!/bin/sh\n[ -z \"$PARE_WRITE_GOLDENS\" ] || sed 's/\"made_by\": \".*\"/\"made_by\": \"GPU\"/' " +
              (std::filesystem::current_path() / "tests/golden/ptx_sm90.json").string() +
              " >tests/golden/ptx_sm90.json\necho '5 passed, 0 failed, 0 skipped'\n");
  program("bin/nvidia-smi",
          "#!/bin/sh\ncase $* in *used*) echo 4096 ;; *cap*) echo 9.0 ;; *name*) echo NVIDIA H200 ;; *) echo 580.1 ;; "
          "esac\n");
  program("bin/compute-sanitizer",
          "#!/bin/sh\necho \"$@\" >>" + at("sanitized") + "\necho '========= ERROR SUMMARY: 0 errors'\n");
  program("bin/ncu", R"sh(#!/bin/bash
while [ $# -gt 0 ]; do [ "$1" = --log-file ] && file=$2; shift; done
line='"0","a(int)","gpu__time_duration.sum","us","3"'
[ -z "$file" ] || printf '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n%s\n' "$line" >$file
)sh");
  program("bin/nsys", R"sh(#!/bin/bash
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo report >$2.nsys-rep; shift; done
)sh");
  write("python/torch.py", "raise ImportError('not in this test')\n");
  write("python/vllm.py", R"(
import types
__version__ = "0"
SamplingParams = types.SimpleNamespace
class LLM:
    def __init__(self, model, **options): assert options["skip_tokenizer_init"], options
    def generate(self, prompts, parameters, use_tqdm):
        assert all(p["prompt_token_ids"] for p in prompts)
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[7] * p.max_tokens)]) for p in parameters]
)");
  const std::string environment = "PATH=" + at("bin") + ":$PATH PYTHONPATH=" + at("python");
  const auto expect_passed = [&](const std::string& call) {
    const Outcome o = check(environment, "-d cuda " + call);
    EXPECT_EQ(o.code, 0) << o.out << o.err << read_text(at("out/log.txt"));
    for (const auto& [name, result] : results())
      EXPECT_TRUE(result == "passed" || name == "baselines" || name == "exact and fast" || name == "PyTorch 1.5B")
          << name << "\n"
          << o.out;
    EXPECT_EQ(summary()["device"], "NVIDIA H200") << call;
    const auto files = std::filesystem::directory_iterator(at("out"));
    EXPECT_LE(std::distance(begin(files), end(files)), 8);
    return o.out;
  };
  std::string out = expect_passed("a");
  EXPECT_NE(out.find("All is right. Copy ptx_sm*.json to tests/golden"), std::string::npos) << out;
  EXPECT_EQ(json::parse(read_text(at("out/ptx_sm90.json")))["made_by"], "GPU");
  EXPECT_NE(read_text(at("sanitized")).find("--tool racecheck"), std::string::npos);
  out = expect_passed("b");
  EXPECT_NE(out.find("| 1.5B | 3 | 1.00 | 1 | 1 | 0.0 % | 0.0 % | 3.00 | 1.00 | 4.00 | 3 of 3 |"), std::string::npos)
      << out;
  EXPECT_EQ(results()["baselines"], "not possible here");
  out = expect_passed("c");
  EXPECT_NE(out.find("attn_paged B=8,L=16384"), std::string::npos) << out;
  EXPECT_EQ(read_text(at("out/profile.nsys-rep")), "report\n");
  out = expect_passed("e");
  EXPECT_NE(out.find("| nano-vllm's rows, qwen2.5-0.5b | 1 | 5.00 | 120 |"), std::string::npos) << out;
  EXPECT_NE(out.find("prime-rl 10100 tokens/s"), std::string::npos) << out;
  EXPECT_NE(out.find("| vLLM 0 (defaults): nano-vllm's rows, 0.5B | 1 |"), std::string::npos) << out;
  EXPECT_EQ(results()["PyTorch 1.5B"], "not possible here");
  // What the kernels were asked to be stands with the figures.
  out = check(environment + " PARE_WGMMA=0", "-d cuda c").out;
  EXPECT_NE(out.find("PARE_WGMMA=0"), std::string::npos) << out;
  // The device is lost: what there is says so, and all is stopped.
  program("bin/nvidia-smi", "#!/bin/sh\nexit 9\n");
  program("build/cuda/pare", "#!/bin/sh\n[ \"$1\" = --help ]\n");
  const Outcome o = check(environment, "-d cuda a");
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(results().size(), 2u);
  EXPECT_NE(o.out.find("loader: failed (94)"), std::string::npos) << o.out;
}

// The decision after the first call, from what its stages say.
TEST_F(GpuCheck, SaysWhatIsNext) {
  const auto next = [&](const std::string& stages, const std::string& log = "") {
    write("stages.tsv", stages);
    write("log.txt", log);
    EXPECT_EQ(python("tools/bench/gpu.py summary " + at("") + " a " + at("")).code, 0) << read_text(at(".err"));
    const std::string table = read_text(at("table.md"));
    return table.substr(table.find("What next:"));
  };
  const std::string start = "driver\tpassed\t1\nloader\tpassed\t1\n";
  std::string s = next(start + "PTX\tfailed (1)\t1\ngoldens\tfailed (1)\t1\nwgmma A.B\tfailed (1)\t1\n");
  EXPECT_NE(s.find("STOP"), std::string::npos) << s;
  s = next(
      start + "PTX\tpassed\t1\ngoldens\tpassed\t1\nwgmma A.B\tstopped after 45 s\t45\nmemcheck A.B\tfailed (7)\t9\n",
      "==== memcheck A.B\n========= Invalid __global__ write of size 2 bytes\n=========     at pare::x\n");
  EXPECT_NE(s.find("Failed: wgmma A.B, memcheck A.B"), std::string::npos) << s;
  EXPECT_NE(s.find("kernels are wrong or hang"), std::string::npos) << s;
  EXPECT_NE(s.find("Invalid __global__ write of size 2 bytes"), std::string::npos) << s;
  s = next(start + "PTX\tpassed\t1\ngoldens\tpassed\t1\nwgmma A.B\tpassed\t45\nmemcheck A.B\tnot possible here\t9\n");
  EXPECT_NE(s.find("All is right. Copy ptx_sm*.json to tests/golden"), std::string::npos) << s;
  s = next(start + "PTX\tstopped after 45 s\t45\ngoldens\tstopped after 30 s\t30\n");
  EXPECT_NE(s.find("There are no goldens of this device (stopped after 30 s)"), std::string::npos) << s;
  s = next("driver\tpassed\t1\nloader\tfailed (1)\t1\nPTX\tfailed (1)\t1\n");
  EXPECT_NE(s.find("The program or the device does not work (`loader`)"), std::string::npos) << s;
}

TEST_F(GpuCheck, SaysWhichResultsOfADeviceDiffer) {
  const std::string ours = write("ours.json", R"({"made_by": "model", "results": {"mma": "00ff01", "cp": "07"}})");
  const std::string same = write("same.json", R"({"made_by": "H", "results": {"mma": "00ff01", "cp": "07"}})");
  const std::string other = write("other.json", R"({"made_by": "H", "results": {"mma": "00fe02", "cp": "07"}})");
  EXPECT_EQ(python("tools/bench/gpu.py goldens " + ours + " " + same).code, 0);
  const Outcome o = python("tools/bench/gpu.py goldens " + ours + " " + other);
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.out, "mma: 2 of 3 bytes differ\nours.json: 1 of 2 results of H are not those of model\n");
  EXPECT_EQ(python("tools/bench/gpu.py goldens " + ours + " " + at("none.json")).code, 1);
}

// Before anything runs, with the command that mends it.
TEST_F(GpuCheck, APackOfOtherSourcesIsRefused) {
  ASSERT_EQ(shell("mkdir -p " + at("build/pare-gpu") + " && echo other >" + at("build/pare-gpu/sources") +
                  " && tar -C " + at("build") + " -czf " + at("build/pare-gpu.tar.gz") + " pare-gpu")
                .code,
            0);
  const Outcome o = check("", "-d cuda a");
  EXPECT_EQ(o.code, 2);
  EXPECT_NE(o.err.find("was made of other sources than those here"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("make pack"), std::string::npos) << o.err;
  EXPECT_FALSE(std::filesystem::exists(at("out")));
}

// What `make pack` packs, of programs that do nothing: unpacked anywhere, it is all that the check needs.
TEST_F(GpuCheck, ThePackRunsInAnEmptyFolder) {
  for (const char* program : {"pare", "pare_cuda_tests"})
    ASSERT_EQ(
        shell("mkdir -p " + at("build/cuda/static") + " && cp /bin/true " + at("build/cuda/static/") + program).code,
        0);
  Outcome o = shell("NCCL=" + write("nccl.so.2.30.7", "a library") + " tools/pack.sh " + at("build"));
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(shell("tar -xzOf " + at("build/pare-gpu.tar.gz") + " --occurrence=1 pare-gpu/sources").out,
            shell("tools/sources.sh").out);
  ASSERT_EQ(
      shell("mkdir " + at("elsewhere") + " && tar -C " + at("elsewhere") + " -xzf " + at("build/pare-gpu.tar.gz")).code,
      0);
  o = shell("cd " + at("elsewhere") + " && PARE_CHECK_FAIL='*' pare-gpu/tools/gpu_check.sh -o " + at("out") + " c");
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_EQ(results().at("timeline"), "failed (9)");
  EXPECT_EQ(read_text(at("elsewhere/pare-gpu/nccl/libnccl.so.2")), "a library");
  EXPECT_EQ(shell("cat " + at("elsewhere/pare-gpu/commit")).out, std::string(summary()["commit"]) + "\n");
}

// A node of GPUs by stand-ins: one process says how many ranks there would be.
class NodeCheck : public Check {
 protected:
  NodeCheck() : Check("tools/node_check.sh") {}
  void SetUp() override {
    Check::SetUp();
    if (IsSkipped()) return;
    program("bin/nvidia-smi",
            "#!/bin/sh\ncase $* in *name*) for i in 1 2 3 4 5 6 7 8; do echo NVIDIA H200; done ;; "
            "*) echo 580.1 ;; esac\n");
    for (const char* rank : {"bin/pare rank 0", "bin/pare rank 1"}) program(rank, "#!/bin/sh\nsleep 3\n");
    for (const char* folder : {"build/emu", "build/cuda"}) {
      // ODD: ranks with another certificate; HEAVY: ranks with other weights; EXIT: "KEY CODE;...", how runs end;
      // DEAF: a rank that outlives the other; NAMED: the rank that the message names.
      program(cat(folder, "/pare"), R"sh(#!/bin/bash
after() { local all=" $all "; all=${all#* $1 }; echo ${all%% *}; }
command=$1 all=$*
if [ $command = plan ]; then
  [ $(after --machine) != none ] || { echo pare: none is no machine >&2; exit 2; }
  fits=true phase='{"seconds": 1, "ops": {"x": {"seconds": 0.5, "sent": 8e8}, "y": {"seconds": 1, "sent": 0}}}'
  case $all in *qwen2.5-7b*) fits=false ;; esac
  ranks=${all#*n_gpus_per_node=}
  echo '{"ranks": '${ranks%% *}', "seconds": 2, "memory": {"most": 9e9}, "fits": '$fits', "available": 1e10,
    "phases": {"rollout": '$phase', "learner": '$phase'}, "all_ranks": {"rollout": {"sent": 4e9}, "learner": {"sent": 4e9}},
    "machine": {"name": "H", "figures": {"link": {"value": 4.5e11, "source": "published"}}}}'
elif [ $command = bench ]; then
  for op in 'all_to_all 9e10' 'all_gather 3e10'; do
    echo '{"op": "'${op% *}'", "type": "f32", "way": "NCCL 2", "ranks": '$(after --ranks)', "bytes": 1048576, "sent": 9e5,' \
      '"seconds": 1e-5, "bytes_per_second": '${op#* }'}'
  done
else
  IFS=';'
  for end in $EXIT; do case $all in *${end% *}*) exit ${end#* } ;; esac; done
  unset IFS
  out=$(after --out) update=2 certificate=even RANKS=$(after --ranks)
  mkdir -p $out/model $out/checkpoints/step-1
  head -c 2000000 /dev/zero >$out/checkpoints/step-1/weights
  [ "$ODD" != $RANKS ] || certificate=odd
  for seconds in 99 4 4; do
    echo '{"timing_s/step": '$seconds', "timing_s/update_actor": '$update', "timing_s/gen": 1, "timing_s/gen_wait": 1,' \
      '"tokens/generated": 1, "exact/mismatch_tokens": 1, "comm/seconds": 1, "comm/bytes": 7.2e9,' \
      '"certificate": "'$certificate'"}'
  done >$out/metrics.jsonl
  [ "$HEAVY" = $RANKS ] && echo heavy >$out/model/model.safetensors || echo light >$out/model/model.safetensors
  case $all in *total_training_steps=100000*)
    "pare rank 1" --out $out &
    while grep -qs '^State:.[RSD]' /proc/$!/status; do sleep 0.02; done
    kill -9 $!
    [ -z "$DEAF" ] || "pare rank 0" --out $out &
    echo "pare: rank ${NAMED:-1} is silent"
    exit 1 ;;
  esac
fi
)sh");
    }
  }
  Outcome on_node(const std::string& environment, const std::string& arguments) const {
    return check("PATH=" + at("bin") + ":$PATH " + environment, arguments);
  }
};

TEST_F(NodeCheck, TheLimitsAreNineMinutes) { expect_nine_minutes(""); }

TEST_F(NodeCheck, AStageThatFailsCostsNoOther) { expect_every_failure_is_named(""); }

TEST_F(NodeCheck, AStageThatHangsIsStopped) {
  const Outcome o = on_node("PARE_CHECK_HANG=links", "-d emu");
  EXPECT_EQ(o.code, 1) << o.err;
  auto of = results();
  EXPECT_EQ(of.at("machine"), "not possible here");
  EXPECT_EQ(of.at("links"), "stopped after 1 s");
  EXPECT_EQ(of.at("bits of 2"), "passed");
  EXPECT_EQ(of.count("bits of 4"), 0u);
  EXPECT_EQ(summary()["links"].size(), 0u);
  EXPECT_NE(o.out.find("Left out: machine (not possible here); links (stopped after 1 s)"), std::string::npos) << o.out;
}

TEST_F(NodeCheck, OnEightGpusEveryStageRuns) {
  const Outcome o = on_node("", "");
  EXPECT_EQ(o.code, 0) << o.out << o.err << read_text(at("out/log.txt"));
  for (const auto& [name, result] : results())  // a 7B does not fit the stand-in
    EXPECT_EQ(result, name.starts_with("7B") ? "not possible here" : "passed") << name << "\n"
                                                                               << read_text(at("out/log.txt"));
  EXPECT_EQ(summary()["machine"]["name"], "H");
  for (const char* part : {"8 x NVIDIA H200; driver 580.1", "tools/node_check.sh -d cuda -m h200", "8 ranks by NCCL 2",
                           "| all_to_all | f32 | 1 | 10.0 | 90.00 | 20.0 % |", "Ranks with the same bits: 1, 2, 4, 8.",
                           // 7.2 GB of 8 ranks at 90 GB/s are 10 ms of 4 s; medians without the first step.
                           "| 1.5B, 256 responses | 8 | 3 | 2 / 4 = 0.50 | 1 / 1 = 1.00 | 1 / 2 = 0.50 | 0 | 25.00 % | "
                           "8000.0 / 7200.0 | 25.00 % | 0.25 % | 25.00 % |",
                           "7B, 256 responses (not possible here)", "Commit summary.json"})
    EXPECT_NE(o.out.find(part), std::string::npos) << part << "\n" << o.out;
  const auto files = std::filesystem::directory_iterator(at("out"));
  EXPECT_EQ(std::distance(begin(files), end(files)), 3);
}

TEST_F(NodeCheck, OtherBitsShow) {
  const Outcome o = on_node("ODD=4 HEAVY=8 PARE_CHECK_FAIL='[^br]*'", "");
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(results().at("bits of 2"), "passed");
  EXPECT_EQ(results().at("bits of 4"), "failed (1)");
  EXPECT_EQ(results().at("bits of 8"), "failed (1)");
  const std::string log = read_text(at("out/log.txt"));
  const size_t four = log.find("==== bits of 4"), eight = log.find("==== bits of 8");
  EXPECT_NE(log.substr(four, eight - four).find("the certificates differ"), std::string::npos) << log;
  EXPECT_EQ(log.find("the certificates differ", eight), std::string::npos) << log;
  EXPECT_NE(log.find("model.safetensors differ", eight), std::string::npos) << log;
  EXPECT_NE(o.out.find("Ranks with the same bits: 1, 2. (4: failed (1); 8: failed (1))"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("STOP: the number of ranks changes bits"), std::string::npos) << o.out;
}

// A job whose rank is struck names it, and nothing of it stays.
TEST_F(NodeCheck, AJobThatEndsBadlyIsAFailure) {
  Outcome o = on_node("NAMED=2 PARE_CHECK_FAIL='[^mrk]*'", "-m h200");
  EXPECT_EQ(results().at("killed"), "failed (1)");
  EXPECT_NE(o.out.find(": the message names another rank"), std::string::npos) << o.out;
  o = on_node("DEAF=1 PARE_CHECK_FAIL='[^mrk]*'", "-m h200");
  EXPECT_NE(o.out.find(": these still run"), std::string::npos) << o.out;
  o = on_node("PARE_CHECK_FAIL='[^mrkf]*'", "-m h200");
  EXPECT_EQ(results().at("killed"), "passed") << o.out;
  EXPECT_EQ(results().at("frozen"), "passed") << o.out;
}

// The codes of a run are its own: memory (3) is no stage that is not possible, a NaN (4) no lost device.
TEST_F(NodeCheck, ARunThatFailsIsAFailure) {
  const Outcome o = on_node("EXIT='bits-1 3;1.5B 4'", "-d emu");
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(results().at("bits of 1"), "failed (3)");
  EXPECT_EQ(results().at("1.5B, 256 responses"), "failed (4)");
  EXPECT_EQ(results().at("7B, 256 responses"), "passed") << "it goes on";
}

TEST_F(NodeCheck, SaysWhatItNeeds) {
  Outcome o = on_node("", "-m none");
  EXPECT_EQ(o.code, 2);
  EXPECT_NE(o.err.find("none is no machine"), std::string::npos) << o.err;
  EXPECT_FALSE(std::filesystem::exists(at("out")));
  program("bin/nvidia-smi", "#!/bin/sh\ncase $* in *name*) echo NVIDIA H100 NVL; echo NVIDIA H100 NVL ;; esac\n");
  o = on_node("", "");
  EXPECT_EQ(o.code, 2);
  EXPECT_NE(o.err.find("-m MACHINE"), std::string::npos) << o.err;
  on_node("PARE_CHECK_FAIL='[^br]*'", "-m h100");
  EXPECT_EQ(results().at("bits of 4"), "not possible here");
  program("bin/nvidia-smi", "#!/bin/sh\necho NVIDIA H100 80GB HBM3\n");
  o = on_node("", "");
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(results().size(), 2u);
  for (const char* part : {"ranks connect: failed (94), ", " s: GPUs here: 1; this needs two at least"})
    EXPECT_NE(o.out.find(part), std::string::npos) << o.out;
  std::filesystem::remove(at("build/cuda/pare"));
  EXPECT_NE(on_node("", "").err.find("pare:  make cuda"), std::string::npos);
}

// ---- the scripts of src/comm/README.md for schedulers, which here start nothing

class Schedulers : public Tools {
 protected:
  void SetUp() override {
    Tools::SetUp();
    if (IsSkipped()) return;
    const std::string page = read_text("src/comm/README.md");
    for (size_t at = 0; (at = page.find("\n```", at)) != std::string::npos;) {
      const size_t begin = page.find('\n', at + 1) + 1, end = page.find("\n```", begin);
      blocks_[page.substr(at + 4, begin - at - 5)].push_back(page.substr(begin, end + 1 - begin));
      at = end + 4;
    }
    // They start what follows their options, which prints its arguments and ends with $CODE.
    for (const char* starter : {"srun", "mpirun"})
      program(
          starter,
          "while case $1 in -n|--bind-to) shift ;; -*) ;; *) false ;; esac; do shift; done\necho \"$@\"\nexit $CODE\n");
    program("scontrol", "echo scontrol \"$@\"\n");
    program("docker", "echo docker \"$@\"\n");
  }
  void program(const std::string& name, const std::string& text) const {
    std::filesystem::permissions(write("bin/" + name, "#!/bin/bash\n" + text), std::filesystem::perms::owner_all);
  }
  // In a folder with or without a run to go on with.
  std::string ran(const std::string& script, int code) const {
    write("script", script);
    const std::string set = cat("cd ", at(""), "; CODE=", code, " SLURM_JOB_ID=7 PATH=", at("bin"), ":$PATH bash ");
    EXPECT_EQ(shell(set + "-n script").err, "") << script;
    return shell(set + "script").out;
  }
  std::map<std::string, std::vector<std::string>> blocks_;  // of code, by their language
};

TEST_F(Schedulers, SlurmResumesAndRequeues) {
  ASSERT_EQ(blocks_["bash"].size(), 2u);
  const std::string& script = blocks_["bash"][0];
  const std::string
      start = "build/mpi-cuda/pare train gsm8k-qwen2.5-1.5b --device cuda learner.shards=16 --out runs/mine\n",
      resume = "build/mpi-cuda/pare train runs/mine/config.toml --resume\n";
  EXPECT_EQ(ran(script, 0), start);
  EXPECT_EQ(ran(script, 75), start + "scontrol requeue 7\n");
  write("runs/mine/config.toml", "");
  EXPECT_EQ(ran(script, 1), resume);
  EXPECT_EQ(ran(script, 75), resume + "scontrol requeue 7\n");
}

TEST_F(Schedulers, DockerStartsRanks) {
  const std::string out = ran(blocks_["bash"].at(1), 0);
  EXPECT_NE(out.find("REGISTRY/pare pare train gsm8k-qwen2.5-1.5b --device cuda learner.shards=8 --ranks 8"),
            std::string::npos)
      << out;
}

TEST_F(Schedulers, KubernetesResumes) {
  ASSERT_EQ(blocks_["yaml"].size(), 1u);
  write("job.yaml", blocks_["yaml"][0]);
  const Outcome o = shell("python3 -c 'import yaml'");
  if (o.code != 0) GTEST_SKIP() << "python3 has no yaml";
  const Outcome script =
      python("-c 'import yaml; j = yaml.safe_load(open(\"" + at("job.yaml") +
             "\")); t = {k: v[\"template\"][\"spec\"] for k, v in j[\"spec\"][\"mpiReplicaSpecs\"].items()}; "
             "slots = j[\"spec\"][\"slotsPerWorker\"]; c = t[\"Launcher\"][\"containers\"][0]; "
             "assert slots == t[\"Worker\"][\"containers\"][0][\"resources\"][\"limits\"][\"nvidia.com/gpu\"]; "
             "[s[\"volumes\"] for s in t.values()]; assert c[\"command\"][:2] == [\"bash\", \"-c\"]; "
             "print(c[\"command\"][2].replace(\"/runs\", \"runs\"))'");
  ASSERT_EQ(script.code, 0) << script.err;
  EXPECT_EQ(ran(script.out, 0), "/opt/pare train gsm8k-qwen2.5-1.5b --device cuda learner.shards=16 --out runs/mine\n");
  write("runs/mine/config.toml", "");
  EXPECT_EQ(ran(script.out, 0), "/opt/pare train runs/mine/config.toml --resume\n");
}

// `make cuda ARCH=native` asks the driver, which here is a script.
TEST_F(Tools, ArchitecturesOfThisMachine) {
  const auto make = [&](const std::string& arch, const std::string& answer) {
    write("bin/nvidia-smi", "#!/bin/sh\n" + answer + "\n");
    std::filesystem::permissions(at("bin/nvidia-smi"), std::filesystem::perms::owner_all);
    const int status = std::system(("env -u MAKEFLAGS -u MAKELEVEL PATH=" + at("bin") +
                                    ":$PATH make -n V=1 BUILD=" + at("build") + " 'ARCH=" + arch + "' " +
                                    at("build/cuda/cuda/runtime/table.o") + " >" + at(".out") + " 2>" + at(".err"))
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
    EXPECT_NE(o.err.find("ARCH=native: nvidia-smi finds no GPU with a driver here; name architectures, as in "
                         "ARCH=\"80 90a\""),
              std::string::npos)
        << o.err;
  }
  EXPECT_NE(make("native", "echo 7.5").err.find("ARCH=75: 80 at least is needed, for bfloat16"), std::string::npos);
}

}  // namespace
}  // namespace pare::test
