// The results pages show what the records of the runs say, with the statistics that they name.
#include <array>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "tests/program.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class Experiments : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    if (IsSkipped()) return;
    if (shell("python3 -c 'import json'").code != 0) GTEST_SKIP() << "no python3";
    // A copy: tests change it.
    fs::create_directories(at("experiments"));
    for (const auto& entry : fs::directory_iterator("tools/experiments"))
      if (entry.path().extension() == ".py" || entry.is_directory())
        fs::copy(entry.path(), at("experiments") / entry.path().filename(), fs::copy_options::recursive);
  }
  Outcome shell(const std::string& command) const {
    const int status = std::system(("{ " + command + "; } >" + at(".out") + " 2>" + at(".err")).c_str());
    return {WEXITSTATUS(status), read_text(at(".out")), read_text(at(".err"))};
  }
  Outcome table(const std::string& arguments) const {
    return shell("python3 -B " + at("experiments/table.py ") + arguments);
  }
  // What Python prints of an expression, by the functions of paired.py.
  std::vector<double> statistics(const std::string& values) const {
    const std::string script =
        "import sys; sys.path.insert(0, 'tools/experiments'); from paired import *; print(*" + values + ")";
    const Outcome o = shell("python3 -B -c \"" + script + "\"");
    EXPECT_EQ(o.code, 0) << o.err;
    std::stringstream s(o.out);
    return {std::istream_iterator<double>(s), {}};
  }
};

void near(const std::vector<double>& found, const std::vector<double>& expected, double error) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); i++) EXPECT_NEAR(found[i], expected[i], error) << i;
}

TEST_F(Experiments, PagesShowTheRecords) {
  const Outcome o = table("--check");
  EXPECT_EQ(o.code, 0) << o.err << "tools/experiments/table.py writes them";
}

// A run of a script stands on a page: none is left out for what it showed.
TEST_F(Experiments, EveryPlannedRunIsOnAPage) {
  const Outcome named = shell("cd " + at("experiments") +
                              " && python3 -B -c 'import glob, table; [print(n) for p in glob.glob(\"results/*.md\") "
                              "for n in table.Page(p).used]'");
  ASSERT_EQ(named.code, 0) << named.err;
  std::stringstream names(named.out);
  const std::set<std::string> shown{std::istream_iterator<std::string>(names), {}};
  size_t planned = 0;
  for (const auto& entry : fs::directory_iterator("tools/experiments")) {
    const std::string script = entry.path().string(), text = entry.is_regular_file() ? read_text(script) : "";
    if (!text.starts_with("#!/usr/bin/env bash") || text.find("run_all") == std::string::npos) continue;
    const Outcome o = shell("PLAN=1 SEEDS=1 STORIES=DIR OUT=" + at("plan") + " " + script);
    ASSERT_EQ(o.code, 0) << script << ": " << o.err;
    std::stringstream lines(o.out);
    for (std::string line; std::getline(lines, line); planned++) {
      const std::string name = line.substr(0, line.find("-s1 "));
      EXPECT_TRUE(shown.count(name)) << script << " runs " << name;
    }
  }
  EXPECT_GT(planned, 100u);
}

// A figure of a record, a cell, a row that is gone: each is noticed by page, and table.py mends it.
TEST_F(Experiments, AnotherFigureIsNoticed) {
  const std::string page = read_text(at("experiments/results/rpo.md")),
                    record = read_text(at("experiments/results/rpo.jsonl"));
  const size_t cell = page.find("| GRPO |"), line = record.find('\n') + 1;
  ASSERT_NE(cell, std::string::npos);
  const std::string changed = page.substr(0, cell) + "| grpo |" + page.substr(cell + 8);
  for (const auto& [name, text] : {std::array{std::string("rpo.md"), changed}, {"rpo.jsonl", record.substr(line)}}) {
    write("experiments/results/" + name, text);
    const Outcome o = table("--check");
    EXPECT_EQ(o.code, 1);
    EXPECT_NE(o.err.find("rpo.md"), std::string::npos) << o.err;
    write("experiments/results/rpo.jsonl", record);
    EXPECT_EQ(table("").code, 0);
    EXPECT_EQ(read_text(at("experiments/results/rpo.md")), page);
  }
}

TEST_F(Experiments, APageNamesOnlyRunsThatThereAre) {
  write("experiments/results/rpo.md",
        "<!-- runs rpo -->\n<!-- end -->\n<!-- table accuracy\nnone-such: label\n-->\n<!-- end -->\n");
  Outcome o = table("--check");
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("rpo.md: no runs of none-such"), std::string::npos) << o.err;
  write("experiments/results/rpo.md", "<!-- runs rpo -->\n<!-- end -->\n<!-- claims\ngrpo > half\n-->\n<!-- end -->\n");
  o = table("--check");
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("rpo.md: no claim: grpo > half"), std::string::npos) << o.err;
}

// Quantiles and tails: scipy.stats.t.ppf(.975, n) and 2 * scipy.stats.t.sf(t, n).
TEST_F(Experiments, IntervalsAreStudents) {
  near(statistics("[quantile(n) for n in (1, 2, 3, 7, 8, 30)]"),
       {12.7062047362, 4.3026527297, 3.1824463053, 2.3646242516, 2.3060041352, 2.0422724563}, 1e-9);
  near(statistics("[1 - inside(t, n) for t, n in ((0, 5), (1, 1), (2.5, 2), (2.5, 7), (4, 8), (-2, 3))]"),
       {1, 0.5, 0.1296117203, 0.0409922186, 0.0039497736, 1.8606740314}, 1e-9);
  // scipy.stats.ttest_rel of these pairs, and its confidence interval.
  near(statistics("interval([.05, -.02, .11, .04, .08, .03, -.01, .06])"), {0.0425, 0.0362352283, 0.0275569272}, 1e-9);
  near(statistics("interval([.25, .25, .25])"), {0.25, 0, 0}, 0);
}

// statsmodels.stats.multitest.multipletests(p, method="holm").
TEST_F(Experiments, CorrectionIsHolms) {
  near(statistics("holm([.01, .04, .03, .005])"), {0.03, 0.06, 0.06, 0.02}, 1e-12);
  near(statistics("holm([.9, .001, .5, .013, .013])"), {1, 0.005, 1, 0.052, 0.052}, 1e-12);
}

// The row of a run: its costs are sums, its figures means over the steps, its accuracy the mean of the last two
// validations; the curve has costs up to each validation and means since the one before.
TEST_F(Experiments, ARowIsTheRun) {
  std::string log = R"({"training/global_step":0,"val-core/ssa/reward/mean@1":0.25})"
                    "\n";
  for (int step = 1; step <= 6; step++) {
    nlohmann::json m = {{"training/global_step", step},  {"tokens/generated", 10 * step},
                        {"flops/learner", 2e9},          {"flops/ref", 1e9},
                        {"rollout_corr/kl", 0.5 * step}, {"actor/grad_norm", nullptr}};
    if (step % 2 == 0) {
      m["val-core/ssa/reward/mean@1"] = step == 6 ? 0.25 : 0.125 * step;
      m["val-core/ssa_kv/reward/mean@1"] = 0.0625 * step;
    }
    if (step == 4) m["actor/grad_norm"] = 3;
    log += m.dump() + "\n";
  }
  for (const char* seed : {"3", "12"}) {
    write(std::string("runs/some-name-s") + seed + "/metrics.jsonl", log);
    fs::create_directories(at(std::string("runs/some-name-s") + seed + "/model"));
  }
  write("runs/unfinished-s1/metrics.jsonl", log);
  write("runs/eval-policy-24-s7.txt", "pare\nmean@4   0.3125 ± 0.02\n");
  write("runs/eval-some-name-s12.txt", "mean@4   0.5 ± 0.02\n");
  const Outcome o = shell("tools/experiments/rows.py " + at("runs") + " trial abc1234");
  ASSERT_EQ(o.code, 0) << o.err;
  std::vector<nlohmann::json> rows;
  std::stringstream lines(o.out);
  for (std::string line; std::getline(lines, line);) rows.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(rows.size(), 3u) << o.out;
  EXPECT_EQ(rows[0]["name"], "eval-policy-24");
  EXPECT_EQ(rows[0]["seed"], 7);
  EXPECT_EQ(rows[0]["accuracy"], 0.3125);
  const nlohmann::json& row = rows[1];
  EXPECT_EQ(row["seed"], 3);
  EXPECT_EQ(row["commit"], "abc1234");
  EXPECT_EQ(row["command"], "SEEDS=3 ONLY='some-name-s*' tools/experiments/trial");
  EXPECT_EQ(row["first"], 0.25);
  EXPECT_EQ(row["accuracy"], 0.375);
  EXPECT_EQ(row["drop"], 0.25);
  EXPECT_EQ(row["sparse"], 0.3125);
  EXPECT_EQ(row["generated"], 210);
  EXPECT_EQ(row["learner"], 18);
  EXPECT_EQ(row["kl"], 1.75);
  EXPECT_EQ(row["grad"], 3);
  EXPECT_FALSE(row.contains("rejected"));
  EXPECT_EQ(row["curve"]["step"], nlohmann::json({0, 2, 4, 6}));
  EXPECT_EQ(row["curve"]["generated"], nlohmann::json({0, 30, 100, 210}));
  EXPECT_EQ(row["curve"]["kl"], nlohmann::json({nullptr, 0.75, 1.75, 2.75}));
  EXPECT_EQ(rows[2]["accuracy"], 0.5);
}

// One run costs 10 a validation, the other 20.  At equal costs the dearer one is read where the cheaper one validated.
TEST_F(Experiments, EqualCostsAreThoseOfTheCheaperRun) {
  const auto row = [](const char* name, int seed, const std::vector<double>& cost,
                      const std::vector<double>& accuracy) {
    return nlohmann::json{{"experiment", "trial"},
                          {"name", name},
                          {"seed", seed},
                          {"commit", "abc1234"},
                          {"accuracy", accuracy.back()},
                          {"curve", {{"step", cost}, {"generated", cost}, {"accuracy", accuracy}}}}
               .dump() +
           "\n";
  };
  std::string record;
  for (int seed : {1, 2})
    record +=
        row("cheap", seed, {0, 10, 20}, {0, 0.5, 0.6}) + row("dear", seed, {0, 20, 40}, {0, seed == 1 ? 0.8 : 0.92, 1});
  // At 10 and 20 the dear one has .4 and .8 (.46 and .92), .6 and .69 in the mean; the cheap one .55.
  const std::string page = write("page.md", "<!-- claims\ndear - cheap at generated\n-->\n<!-- end -->\n");
  const Outcome o = table("--rows " + write("trial.jsonl", record) + " " + page);
  EXPECT_EQ(o.code, 0) << o.err;
  // Differences .05 and .14: mean .095, and 12.706 x .045.
  EXPECT_NE(
      o.out.find(
          "| dear − cheap, at equal generated tokens | 2 | +0.095 ± 0.572 | .282 | .282 | no significant difference |"),
      std::string::npos)
      << o.out;
}

// Intervals of a text as they stand in prose: without sign and leading zero.
std::set<std::string> intervals(const std::string& text) {
  std::set<std::string> found;
  const std::regex interval(R"(0?(\.[0-9]+) ± 0?(\.[0-9]+))");
  for (auto it = std::sregex_iterator(text.begin(), text.end(), interval); it != std::sregex_iterator(); ++it)
    found.insert((*it)[1].str() + " ± " + (*it)[2].str());
  return found;
}

// Every interval in prose stands in a table: of the same page, or, for the presets and their page, of any page.
TEST_F(Experiments, ProseQuotesTheTables) {
  std::set<std::string> all;
  size_t quoted = 0;
  const auto expect = [&](const fs::path& path, const std::string& prose, const std::set<std::string>& tables) {
    for (const std::string& interval : intervals(prose)) {
      EXPECT_TRUE(tables.count(interval)) << path << ": " << interval;
      quoted++;
    }
  };
  for (const auto& entry : fs::directory_iterator("tools/experiments/results")) {
    if (entry.path().extension() != ".md") continue;
    std::string prose, tables;
    std::stringstream lines(read_text(entry.path()));
    for (std::string line; std::getline(lines, line);) (line.starts_with("|") ? tables : prose) += line + " ";
    expect(entry.path(), prose, intervals(tables));
    all.merge(intervals(tables));
  }
  for (const auto& entry : fs::directory_iterator("data/presets"))
    if (entry.path().extension() == ".toml" || entry.path().extension() == ".md")
      expect(entry.path(), read_text(entry.path()), all);
  EXPECT_GT(quoted, 50u);
}

// Accuracies of the README at step 200: means over the seeds of the quickstart and of its difference to RPC.
TEST_F(Experiments, TheReadmeQuotesTheRecords) {
  const std::string script =
      "import json, sys\n"
      "sys.path.insert(0, 'tools/experiments')\n"
      "from paired import interval\n"
      "ends = {'quickstart': {}, 'quickstart-rpc': {}}\n"
      "for row in map(json.loads, open('tools/experiments/results/quickstart.jsonl')):\n"
      "  ends[row['name']][row['seed']] = row['curve']['accuracy'][row['curve']['step'].index(200)]\n"
      "all, rpc = ([runs[seed] for seed in range(1, 9)] for runs in ends.values())\n"
      "for values in all, rpc, [x - y for x, y in zip(all, rpc)]:\n"
      "  print(' ± '.join(('%.3f' % x)[1:] for x in interval(values)[:2]))\n";
  const Outcome o = shell("python3 -B " + write("quickstart.py", script));
  ASSERT_EQ(o.code, 0) << o.err;
  std::stringstream lines(o.out);
  std::array<std::string, 3> values;
  for (std::string& value : values) std::getline(lines, value);
  std::string readme = read_text("README.md");
  std::replace(readme.begin(), readme.end(), '\n', ' ');
  const std::string sentence = "GRPO on all tokens reaches " + values[0] +
                               ", GRPO on random prefixes of the responses (RPC) " + values[1] +
                               "; their difference is " + values[2];
  EXPECT_NE(readme.find(sentence), std::string::npos) << sentence;
}

// Percentages of the table of methods, from the records: differences over the baseline's mean, or means of a run.
TEST_F(Experiments, TheMethodsPageQuotesTheRecords) {
  struct Figure {
    std::string row, percent, run, baseline, column;
  };
  const std::vector<Figure> figures = {
      {"Quest 14, dynamic sampling |", "of the sampler's reads", "sparse-rl/quest-14-dapo-sparse-rl", "", "read"},
      {"Quest 14, dynamic sampling |", "are rejected", "sparse-rl/quest-14-dapo-sparse-rl", "", "rejected"},
      {"without a correction", "more gradient norm", "sparse-rl/quest-14-dapo-naive", "sparse-rl/dense-dapo", "grad"},
      {"[Score centring]", "of the sampler's reads", "sparse-rl/quest-14-score-centring", "", "read"},
      {"[Score centring]", "more learner FLOPs", "sparse-rl/quest-14-score-centring", "distill-sparse/quest-14-naive",
       "learner"},
      {"| Replay", "of the sampler's reads", "sparse-rl/quest-14-dapo-replay", "", "read"},
      {"[DistillSparse]", "of the KL", "distill-sparse/quest-14-distill-sparse-rl", "distill-sparse/quest-14-sparse-rl",
       "kl"},
      {"[DistillSparse]", "more learner FLOPs", "distill-sparse/quest-14-distill-sparse-rl",
       "distill-sparse/quest-14-sparse-rl", "learner"},
      {"with Jackpot", "of the KL", "distill-sparse/quest-14-distill-jackpot", "distill-sparse/quest-14-jackpot", "kl"},
      {"with Jackpot", "more learner FLOPs", "distill-sparse/quest-14-distill-jackpot",
       "distill-sparse/quest-14-jackpot", "learner"},
      {"Oversampling", "of the learner's FLOPs", "distill-sparse/quest-14-oversample", "distill-sparse/quest-14-naive",
       "learner"},
      {"Oversampling", "more generated tokens", "distill-sparse/quest-14-oversample", "distill-sparse/quest-14-naive",
       "generated"},
      {"Oversampling", "of the groups", "distill-sparse/quest-14-oversample", "", "zero"},
      {"[RPO]", "of the generated tokens", "rpo/half", "rpo/grpo", "generated"},
      {"[RPO]", "of the groups", "rpo/half", "", "zero"},
      {"RPO, cuts up to the whole", "of the generated tokens", "rpo/whole", "rpo/grpo", "generated"},
      {"RPO, cuts up to the whole", "of the groups", "rpo/whole", "", "zero"},
      {"RPO's length reward", "of the generated tokens", "rpo/whole-length", "rpo/whole", "generated"},
      {"filter .1", "of the learner's FLOPs", "dash/pg-filter-0.1", "dash/pg-filter-0", "learner"},
      {"filter .5", "of the learner's FLOPs", "dash/pg-filter-0.5", "dash/pg-filter-0", "learner"},
      {"`dash-sft`", "more learner FLOPs", "sft-m/round-1+sft-m/round-2+sft-m/round-3+sft-m/round-4",
       "dash/pg-filter-0.1", "learner"},
      {"[NAT]", "of the learner's FLOPs", "nat/rpc", "nat/all", "learner"},
      {"[NAT]", "more gradient norm", "nat/rpc", "nat/all", "grad"},
      {"NAT, URS", "more gradient norm", "nat/urs", "nat/all", "grad"},
      {"NAT, fixed truncation", "of the learner's FLOPs", "nat/det", "nat/all", "learner"}};
  std::string script =
      "import glob, json, sys\n"
      "sys.path.insert(0, 'tools/experiments')\n"
      "from paired import interval, mean\n"
      "runs = {}\n"
      "for path in glob.glob('tools/experiments/results/*.jsonl'):\n"
      "  for row in map(json.loads, open(path)): runs.setdefault(row['experiment'] + '/' + row['name'], "
      "{})[row['seed']] = row\n"
      "def percent(names, baseline, column):\n"
      "  values = [sum(runs[name][seed][column] for name in names.split('+')) for seed in range(1, 9)]\n"
      "  base = [runs[baseline][seed][column] if baseline else 0 for seed in range(1, 9)]\n"
      "  m, half, _ = interval([(x - y) / (mean(base) or 1) for x, y in zip(values, base)])\n"
      "  print('%.0f ± %.0f %%' % (abs(100 * m), 100 * half))\n";
  for (const Figure& f : figures) script += "percent('" + f.run + "', '" + f.baseline + "', '" + f.column + "')\n";
  const Outcome o = shell("python3 -B " + write("percent.py", script));
  ASSERT_EQ(o.code, 0) << o.err;
  std::stringstream values(o.out), page(read_text("data/presets/README.md"));
  std::vector<std::string> rows;
  for (std::string line; std::getline(page, line);)
    if (line.starts_with("| ")) rows.push_back(line);
  const std::regex percent("± [0-9]+ %");
  int64_t shown = 0;
  for (const std::string& row : rows)
    shown += std::distance(std::sregex_iterator(row.begin(), row.end(), percent), std::sregex_iterator());
  EXPECT_EQ(shown, std::ssize(figures));
  for (const Figure& f : figures) {
    std::string value;
    std::getline(values, value);
    const auto row = std::find_if(rows.begin(), rows.end(), [&](const std::string& r) {
      return r.find(" ± ") != std::string::npos && r.find(f.row) < r.find(" ± ");
    });
    ASSERT_NE(row, rows.end()) << f.row;
    EXPECT_NE(row->find(value + " " + f.percent), std::string::npos) << value << " " << f.percent << ": " << *row;
  }
}

}  // namespace
}  // namespace pare::test
