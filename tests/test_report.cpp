// pare report: the numbers and texts in the page, and what a browser makes of it.
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <regex>

#include "base/error.h"
#include "tests/program.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Report : public Program {
 protected:
  // A run of `steps` steps and an evaluation before, every 10th step; reward and costs follow `seed` and `cost`.
  std::string write_run(const std::string& name, int seed, int steps, double cost, const std::string& more = "") {
    std::string metrics = R"({"training/global_step":0,"timing_s/testing":2,"val-core/ssa/reward/mean@1":0.25})"
                          "\n";
    for (int step = 1; step <= steps; step++) {
      json m = {{"training/global_step", step},
                {"critic/score/mean", 0.5 + 0.25 * step / steps + 0.01 * seed},
                {"critic/rewards/mean", 0.5 + 0.25 * step / steps + 0.01 * seed},
                {"response_length/mean", 80 + step % 3},
                {"actor/entropy", 1.0 / step},
                {"actor/pg_clipfrac", 0},
                {"actor/ppo_kl", 0},
                {"actor/grad_norm", step == 2 ? json(nullptr) : json(0.5)},
                {"exact/checked_tokens", 1000},
                {"exact/mismatch_tokens", 0},
                {"tokens/generated", cost == 1 ? 2000 : 1200},
                {"tokens/replayed", cost == 1 ? 0 : 700},
                {"rpo/init_tokens", cost == 1 ? 0 : 300},
                {"tokens/trained", 1000 * cost},
                {"flops/rollout", 3000000000},
                {"flops/learner", 5000000000 * cost},
                {"memory/weights", 4096},
                {"memory/kv", 1000 * std::min(step, 5)},
                {"perf/max_memory_allocated_gb", (4096.0 + 1000 * std::min(step, 5)) / (1 << 30)},
                {"timing_s/gen", 0.25},
                {"timing_s/update_actor", 0.5 * cost},
                {"timing_s/step", 0.75 + 0.5 * cost}};
      if (step % 10 == 0) m["val-core/ssa/reward/mean@1"] = step == 20 ? 0.875 : 0.5;
      metrics += m.dump() + "\n";
    }
    write(name + "/metrics.jsonl", metrics + more);
    write(name + "/config.toml",
          cat("[actor]\ntoken_subset = \"", cost == 1 ? "none" : "rpc", "\"\n[trainer]\ntotal_training_steps = ", steps,
              "\nseed = ", seed, "\ndefault_local_dir = \"runs/", name, "\"\n"));
    return at(name);
  }
  // Every field that a run writes, and text that would break out of a page if it could.
  void write_samples(const std::string& name) {
    std::string lines;
    for (int i = 0; i < 6; i++)
      lines += json{{"step", i < 3 ? 10 : 20},
                    {"uid", cat("00000000000000a", i)},
                    {"group", i / 2},
                    {"member", i % 2},
                    {"prompt", "<img src=x onerror=alert(1)>?"},
                    {"replayed", 1},
                    {"length_reward", -0.25},
                    {"response", hostile_ + "$"},
                    {"prompt_ids", {1, 2}},
                    {"ids", {7, 8, 2}},
                    {"pieces", {hostile_.substr(0, 9), hostile_.substr(9), "$"}},
                    {"logprobs", {-0.125, -3.5, nullptr}},
                    {"score", i % 2},
                    {"overlong", -0.5},
                    {"kl_penalty", 0.25},
                    {"reward", i % 2 - 0.5},
                    {"advantage", i % 2 ? 1.5 : -1.5},
                    {"extracted", "e<b>"},
                    {"answer", "d3"},
                    {"finish", i % 2 ? "eos" : "length"}}
                   .dump() +
               "\n";
    write(name + "/rollouts.jsonl", lines + "{\"step\": 30, \"half");
  }
  std::string report(const std::string& words) {
    const Outcome o = run("report " + words);
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_TRUE(o.out.starts_with("report   ")) << o.out;
    return read_text(o.out.substr(9, o.out.size() - 10));
  }
  static json data(const std::string& page) {
    const std::string open = R"(<script type="application/json" id="data">)";
    const size_t begin = page.find(open) + open.size();
    return json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  }

  const std::string hostile_ = "a</script><!--<b>\x01\x1b\n\"'&\xef\xbf\xbd\xe2\x80\xa8z";
};

TEST_F(Report, SeedsMayStartFromModelsOfTheirOwnOrFromOne) {
  std::string runs;
  const auto add = [&](const std::string& name, int seed, const std::string& model) {
    runs += " " + write_run(name, seed, 20, 1);
    std::ofstream(at(name + "/config.toml"), std::ios::app) << "[model]\npath = \"" << model << "\"\n";
  };
  add("a-s1", 1, "runs/sft-s1/model");
  add("a-s2", 2, "runs/sft-s2/model");
  add("a-s12", 12, "runs/sft-s12/model");
  add("b-s1", 1, "runs/sft-s12/model");
  add("b-s2", 2, "runs/sft-s1/model");
  add("c-s1", 1, "runs/c-s1/model");
  add("c-s2", 2, "runs/c-s1/model");
  add("c-s3", 3, "runs/c-s1/model");
  const json groups = data(report(runs))["groups"];
  ASSERT_EQ(groups.size(), 4u) << groups;
  EXPECT_EQ(groups[0]["runs"], json({0, 1, 2}));
  EXPECT_EQ(groups[0]["name"], "a");
  EXPECT_EQ(groups[3]["runs"], json({5, 6, 7}));
}

TEST_F(Report, NumbersOfRunsAndGroups) {
  const std::string runs = write_run("base-seed1", 1, 40, 1) + " " + write_run("rpc-seed1", 1, 20, 0.5) + " " +
                           write_run("base-seed2", 2, 40, 1);
  const std::string page = report(runs);
  EXPECT_TRUE(fs::exists(at("base-seed1") + "/report.html"));
  const json d = data(page);
  ASSERT_EQ(d["runs"].size(), 3u);
  ASSERT_EQ(d["groups"].size(), 2u);  // seeds of one configuration are one group
  EXPECT_EQ(d["groups"][0]["name"], "base");
  EXPECT_EQ(d["groups"][0]["runs"], json({0, 2}));
  EXPECT_EQ(d["groups"][1]["name"], "rpc-seed1");
  EXPECT_EQ(d["groups"][1]["config"]["actor.token_subset"], "rpc");
  EXPECT_EQ(d["defaults"]["actor.token_subset"], "none");
  EXPECT_EQ(d["runs"][2]["seed"], "2");
  EXPECT_EQ(d["runs"][1]["planned"], 20);
  const json& series = d["runs"][0]["series"];
  EXPECT_EQ(d["runs"][0]["steps"].size(), 41u);
  EXPECT_EQ(series["critic/score/mean"].size(), 41u);
  EXPECT_EQ(series["critic/score/mean"][0], nullptr);  // before training there is only an evaluation
  EXPECT_EQ(series["actor/grad_norm"][2], nullptr);
  const json& base = d["runs"][0]["totals"];
  const json& rpc = d["runs"][1]["totals"];
  EXPECT_EQ(base["steps"], 40);
  EXPECT_NEAR(base["reward_first"], 0.51 + 0.25 * 2.5 / 40, 1e-12);  // steps 1 to 4
  EXPECT_NEAR(base["reward_last"], 0.51 + 0.25 * 38.5 / 40, 1e-12);
  EXPECT_EQ(base["val_first"], 0.25);
  EXPECT_EQ(base["val_best"], 0.875);
  EXPECT_EQ(base["val_best_step"], 20);
  EXPECT_EQ(base["val_last"], 0.5);
  EXPECT_EQ(base["generated"], 80000);
  EXPECT_EQ(base["trained"], 40000);
  EXPECT_EQ(rpc["trained"], 10000);
  EXPECT_EQ(rpc["generated"], 30000);  // with the first entries of RPO
  EXPECT_EQ(rpc["replayed"], 14000);
  EXPECT_EQ(base["replayed"], 0);
  EXPECT_EQ(base["flops"], 40 * 8e9);
  EXPECT_EQ(rpc["flops_learner"], 20 * 2.5e9);
  EXPECT_EQ(base["peak_bytes"], 9096);
  EXPECT_EQ(base["seconds"], 40 * 1.25 + 2);
  EXPECT_EQ(base["checked"], 40000);
  EXPECT_EQ(base["mismatches"], 0);
  EXPECT_EQ(base["loss_last"], nullptr);
}

TEST_F(Report, SaysWhatASparseSamplerSavesAndItsAdaptersCost) {
  write("distill/metrics.jsonl",
        R"({"training/global_step": 1, "kv/tokens_saved/read": 0.5, "flops/learner": 4e9, "flops/distill": 6e9}
{"training/global_step": 2, "kv/tokens_saved/read": 0.25, "flops/learner": 4e9, "flops/distill": 5e9}
)");
  const json distill = data(report(at("distill")))["runs"][0]["totals"];
  EXPECT_EQ(distill["reads_saved"], 0.375);
  EXPECT_EQ(distill["flops_distill"], 11e9);
  EXPECT_EQ(distill["flops"], 19e9);
  EXPECT_EQ(data(report(write_run("dense", 1, 3, 1)))["runs"][0]["totals"]["reads_saved"], nullptr);
}

// The total that the run itself logs.  Pages in use are part of the arena that they lie in, in older runs too, which
// counted them among the arenas.
TEST_F(Report, PeakMemoryCountsEveryByteOnce) {
  const Outcome trained =
      run("train model.config=tiny-ssa data.train_batch_size=2 rollout.n=2 data.max_prompt_length=64"
          " data.max_response_length=16 trainer.total_training_steps=2 --quiet --out " +
          at("real"));
  ASSERT_EQ(trained.code, 0) << trained.err;
  std::istringstream lines(read_text(at("real/metrics.jsonl")));
  json last;
  for (std::string line; std::getline(lines, line);) last = json::parse(line);
  const double total = last["perf/max_memory_allocated_gb"].get<double>() * (1 << 30);
  EXPECT_GT(total, 126400 * 16);
  const std::string older = write_run("older", 1, 3, 1, R"({"training/global_step":3,"memory/kv_pages":800})");
  const json d = data(report(at("real") + " " + older));
  EXPECT_EQ(d["runs"][0]["totals"]["peak_bytes"], total);
  EXPECT_EQ(d["runs"][1]["totals"]["peak_bytes"], 4096 + 3000);
}

TEST_F(Report, NothingFromElsewhere) {
  const std::string page = report(write_run("a", 1, 12, 1));
  EXPECT_FALSE(std::regex_search(page, std::regex(R"((src|href)="(?!data:))")));
  EXPECT_FALSE(std::regex_search(page, std::regex(R"(@import|url\(|fetch\(|XMLHttpRequest)")));
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
}

TEST_F(Report, HostileTextStaysText) {
  const std::string run = write_run("a", 1, 12, 1);
  write_samples("a");
  const std::string page = report(run);
  size_t closings = 0;
  for (size_t at = 0; (at = page.find("</script", at)) != std::string::npos; at++) closings++;
  EXPECT_EQ(closings, 2u);  // the data's and the script's own
  EXPECT_EQ(page.find("<!--"), std::string::npos);
  EXPECT_EQ(page.find("<img"), std::string::npos);
  const json samples = data(page)["runs"][0]["samples"];
  ASSERT_EQ(samples.size(), 6u);  // the half-written one is left out
  EXPECT_EQ(samples[0]["pieces"][0].get<std::string>() + samples[0]["pieces"][1].get<std::string>(), hostile_);
  EXPECT_EQ(samples[0]["logprobs"], json({-0.125, -3.5, nullptr}));
  EXPECT_EQ(samples[3]["finish"], "eos");
  EXPECT_EQ(samples[3]["replayed"], 1);
  EXPECT_EQ(samples[3]["length_reward"], -0.25);
  EXPECT_FALSE(samples[0].contains("response"));  // the pieces are the response
}

TEST_F(Report, RunsThatAreNotWhole) {
  // Still going: the line that is being written does not count yet; a later line of a step completes it.
  const std::string run = write_run("a", 1, 12, 1, "{\"training/global_step\":12,\"extra\":7}\n{\"training/gl");
  const json d = data(report(run + " --out " + at("page.html")));
  EXPECT_EQ(d["runs"][0]["steps"].size(), 13u);
  EXPECT_EQ(d["runs"][0]["series"]["extra"][12], 7);
  EXPECT_EQ(d["runs"][0]["series"]["tokens/generated"][12], 2000);
  EXPECT_FALSE(fs::exists(run + "/report.html"));
  // Without a configuration and samples.
  fs::remove(run + "/config.toml");
  EXPECT_EQ(data(report(run))["runs"][0]["planned"], nullptr);
  // A run of an older pare: no pieces, no log-probs.
  write("a/rollouts.jsonl", R"({"step":1,"prompt":"p","response":"r","score":1,"reward":1,"advantage":0})"
                            "\n");
  EXPECT_EQ(data(report(run))["runs"][0]["samples"][0]["response"], "r");
}

TEST_F(Report, WrongRunsAreOneError) {
  const auto refused = [&](const std::string& words, Exit code, const std::string& what) {
    const Outcome o = run("report " + words);
    EXPECT_EQ(o.code, static_cast<int>(code)) << words;
    EXPECT_NE(o.err.find(what), std::string::npos) << o.err;
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    EXPECT_EQ(o.out, "");
  };
  refused(at("none"), Exit::usage, at("none") + "/metrics.jsonl");
  write("b/metrics.jsonl", "");
  refused(at("b"), Exit::usage, "no step");
  write("b/metrics.jsonl", "{\"training/global_step\":1}\nnot JSON\n");
  refused(at("b"), Exit::usage, "metrics.jsonl:2");
  write("b/metrics.jsonl", "{\"step\":1}\n");
  refused(at("b"), Exit::usage, "training/global_step");
  EXPECT_FALSE(fs::exists(at("b") + "/report.html"));
  refused(write_run("a", 1, 3, 1) + " --out " + at("none/page.html"), Exit::failed, "none/page.html");
  write("a/rollouts.jsonl", "{}\n[1]\n");
  refused(at("a"), Exit::usage, "rollouts.jsonl:2");
}

// Values that a run never writes are left out, or are an error of one line.
TEST_F(Report, ValuesOfOtherTypes) {
  for (const char* seed : {"((((", "[", "a|b*", "-1", "\\"}) {
    write_run("a", 1, 3, 1);
    write_run("b", 2, 3, 1);
    for (const char* name : {"a", "b"})
      write(cat(name, "/config.toml"), cat("[trainer]\nseed = '", seed, "'\n[model]\npath = 'runs/s1/model'\n"));
    EXPECT_EQ(data(report(at("a") + " " + at("b")))["groups"].size(), 1u) << seed;
  }
  write("a/config.toml", "trainer.seed = [[1], {a = 2}]\nmodel = 1\n");
  write("a/rollouts.jsonl", R"({"step":"x","uid":[],"ids":3,"pieces":{},"logprobs":"n","response":7,"score":{}})"
                            "\n");
  EXPECT_EQ(data(report(at("a")))["runs"][0]["samples"][0]["response"], 7);
  for (const std::string metrics :
       {R"({"training/global_step":1e300})", R"({"training/global_step":"1"})", R"({"training/global_step":1.5})",
        R"({"training/global_step":99999999999999999999})", R"({"training/global_step":[1]})"}) {
    write("b/metrics.jsonl", metrics + "\n");
    for (const char* command : {"report ", "compare "}) {
      const Outcome o = run(command + at("b"));
      EXPECT_EQ(o.code, 2) << metrics << o.err;
      EXPECT_NE(o.err.find("metrics.jsonl:1: no whole number training/global_step"), std::string::npos) << o.err;
    }
  }
  // Two runs that part, and responses that say nothing usable about it.
  for (const char* name : {"a", "b"}) {
    write(cat(name, "/metrics.jsonl"), cat(R"({"training/global_step":1,"certificate":")", name, "\",\"x\":{}}\n"));
    write(cat(name, "/rollouts.jsonl"), R"({"step":1,"uid":7}
{"step":"1","uid":"u"}
{"step":1,"uid":"u","group":0,"member":0,"ids":"abc","logprobs":[1],"pieces":[]}
{"step":1,"uid":"v","group":0,"member":0,"ids":[1,2],"logprobs":[1],"pieces":["a"]}
)");
  }
  const Outcome o = run("compare " + at("a") + " " + at("b"));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(one_line(o.out).find("no responses of this step"), std::string::npos) << o.out;
}

// What headless Chromium makes of a page.
class Browser : public Report {
 protected:
  void SetUp() override {
    Report::SetUp();
    if (IsSkipped()) return;
    for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
      if (chromium_.empty() && std::system(cat("command -v ", name, " >/dev/null").c_str()) == 0) chromium_ = name;
    if (chromium_.empty()) GTEST_SKIP() << "no chromium: the page is not opened";
  }
  // The document after its script ran, at `width` pixels.
  std::string dom(const std::string& page, int width) {
    const std::string command =
        cat("timeout 100 ", chromium_,
            " --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir=", at("profile"),
            " --enable-logging=stderr --virtual-time-budget=5000 --window-size=", width, ",900 --dump-dom file://",
            page, " >", at("dom"), " 2>", at("log"));
    EXPECT_EQ(std::system(command.c_str()), 0) << read_text(at("log"));
    const std::string log = read_text(at("log"));
    EXPECT_EQ(log.find("CONSOLE"), std::string::npos) << log;  // errors, warnings and messages of the page
    const std::string dom = read_text(at("dom"));
    EXPECT_FALSE(std::regex_search(dom, std::regex("<html[^>]* data-error"))) << dom.substr(0, 400);
    return dom;
  }
  // Lines of the chart with this title: the number of points of each.
  static std::vector<size_t> points(const std::string& dom, const std::string& title,
                                    const std::string& kind = "line") {
    std::vector<size_t> counts;
    const size_t begin = dom.find("<h3>" + title + "</h3>");
    if (begin == std::string::npos) return counts;
    const std::string chart = dom.substr(begin, dom.find("</figure>", begin) - begin);
    const std::regex path("<path class=\"" + kind + "[^>]* d=\"([^\"]*)\"");
    for (auto i = std::sregex_iterator(chart.begin(), chart.end(), path); i != std::sregex_iterator(); ++i) {
      const std::string d = (*i)[1];
      EXPECT_EQ(d.find("NaN"), std::string::npos) << title;
      counts.push_back(static_cast<size_t>(std::count(d.begin(), d.end(), 'L')) + 1);
    }
    return counts;
  }

  std::string chromium_;
};

TEST_F(Browser, DrawsCurves) {
  const std::string runs = write_run("base-seed1", 1, 40, 1) + " " + write_run("rpc-seed1", 1, 20, 0.5) + " " +
                           write_run("base-seed2", 2, 40, 1);
  write_samples("rpc-seed1");
  report(runs);
  const std::string page = dom(at("base-seed1/report.html"), 1280);
  EXPECT_TRUE(std::regex_search(page, std::regex("<html[^>]* data-ready=\"[0-9]+\""))) << page.substr(0, 400);
  using Counts = std::vector<size_t>;
  EXPECT_EQ(points(page, "Reward"), (Counts{40, 20}));
  EXPECT_EQ(points(page, "Reward", "band"), Counts{80});  // two seeds: there and back
  EXPECT_EQ(points(page, "Evaluation: ssa/reward/mean@1"), (Counts{5, 3}));
  EXPECT_EQ(points(page, "Gradient norm"), (Counts{39, 19}));  // without the step that has none
  for (const char* title :
       {"Entropy", "Response length", "KL to the sampling policy", "Clip fraction", "Mismatched tokens"})
    EXPECT_EQ(points(page, title), (Counts{40, 20})) << title;
  for (const char* title : {"Tokens generated", "Tokens through the learner", "FLOPs", "Peak memory"})
    EXPECT_EQ(points(page, title).size(), 2u) << title;
  EXPECT_EQ(points(page, "Time of a step: rpc-seed1", "area").size(), 4u);  // rollout, update, evaluation, other
  EXPECT_EQ(points(page, "Loss"), Counts{});                                // nothing to draw: no chart
  EXPECT_NE(page.find(">0.756<"), std::string::npos);                       // reward reached: .7506 and .7606
  EXPECT_NE(page.find(">\u00d7&nbsp;0.25<"), std::string::npos);  // a quarter of the baseline's tokens trained
  EXPECT_NE(page.find("actor.token_subset"), std::string::npos);
  EXPECT_NE(page.find("class=\"replayed\""), std::string::npos);
  // The sample that is shown, as text.
  EXPECT_NE(page.find("&lt;img src=x onerror=alert(1)&gt;?"), std::string::npos);
  EXPECT_NE(page.find("e&lt;b&gt;"), std::string::npos);
}

// Every button pressed, every chart pointed at, everything unfolded: nothing fails, and nothing is wider than a phone.
TEST_F(Browser, EverythingCanBeUsed) {
  const std::string runs = write_run("base", 1, 70, 1) + " " + write_run("rpc", 1, 70, 0.5);
  write_samples("base");
  write_samples("rpc");
  std::string page = report(runs);
  page.insert(page.rfind("</body>"), R"(<script>
let pressed = 0, said = 0;
for (const d of document.querySelectorAll("details")) d.open = true;
const all = (what) => [...document.querySelectorAll(what)];
for (let i = 0; i < all("button").length; i++) all("button")[i].click(), pressed++;
redraw();
for (const svg of all("svg")) {
  const b = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: b.left + b.width / 2, clientY: b.top + 50 }));
  said += svg.closest("figure").querySelector("header small").textContent.startsWith("step ");
  svg.dispatchEvent(new PointerEvent("pointerleave"));
}
for (const s of all("select")) s.dispatchEvent(new Event("change"));
for (const t of all(".text span")) t.dispatchEvent(new PointerEvent("pointerenter"));
const root = document.documentElement;
parent.postMessage(`${pressed} ${said} ${all("svg").length} ${innerWidth} ${root.scrollWidth - root.clientWidth}`, "*");
</script>)");
  write("used.html", page);
  // Windows have a least width, frames have not.
  write("phone.html", R"(<!doctype html><html><body>
<script>onmessage = (e) => document.documentElement.setAttribute("data-used", e.data);</script>
<iframe src="used.html" style="border: 0; width: 390px; height: 800px"></iframe></body></html>)");
  const std::string used = dom(at("phone.html"), 800);
  std::smatch m;
  const std::regex result("data-used=\"([0-9]+) ([0-9]+) ([0-9]+) ([0-9]+) (-?[0-9]+)\"");
  ASSERT_TRUE(std::regex_search(used, m, result));
  EXPECT_GT(std::stoi(m[1]), 12) << "buttons";
  EXPECT_GT(std::stoi(m[2]), 15) << "charts that said what is under the pointer";
  EXPECT_EQ(m[2], m[3]);
  EXPECT_EQ(m[4], "390");
  EXPECT_EQ(m[5], "0") << "pixels that the page scrolls sideways";
}

TEST_F(Browser, DrawsSftAndOneStep) {
  std::string metrics;
  for (int step = 1; step <= 30; step++)
    metrics += cat(R"({"training/global_step":)", step, R"(,"timing_s/step":0.5,"train/loss":)", 3.0 / step,
                   R"(,"actor/lr":0.001,"tokens/trained":100,"flops/learner":1e9,"memory/weights":100})", "\n");
  write("sft/metrics.jsonl", metrics);
  report(at("sft"));
  const std::string sft = dom(at("sft/report.html"), 800);
  EXPECT_EQ(points(sft, "Loss"), std::vector<size_t>{30});
  EXPECT_EQ(points(sft, "Learning rate"), std::vector<size_t>{30});
  EXPECT_EQ(points(sft, "Reward"), std::vector<size_t>{});
  report(write_run("one", 1, 1, 1));
  EXPECT_EQ(points(dom(at("one/report.html"), 800), "Reward"), std::vector<size_t>{1});
}

// A mistake in the script cannot pass: the page says so in its first element.
TEST_F(Browser, AScriptErrorShows) {
  std::string page = report(write_run("a", 1, 3, 1));
  page.replace(page.find("\npage();"), 8, "\nnowhere();");
  write("broken.html", page);
  const std::string command =
      cat(chromium_, " --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir=", at("profile"),
          " --dump-dom file://", at("broken.html"), " >", at("dom"), " 2>/dev/null");
  ASSERT_EQ(std::system(command.c_str()), 0);
  const std::string dom = read_text(at("dom"));
  EXPECT_TRUE(std::regex_search(dom, std::regex("<html[^>]* data-error=\"[^\"]*nowhere"))) << dom.substr(0, 300);
}

}  // namespace
}  // namespace pare::test
