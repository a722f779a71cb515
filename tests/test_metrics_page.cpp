// src/run/METRICS.md defines what runs log, all of it and nothing else.
#include <regex>
#include <set>

#include "run/sft_training.h"
#include "tests/program.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

// The names in the first column, `a/{b,c}` as two.
std::vector<std::string> defined() {
  std::vector<std::string> names;
  std::istringstream page(read_text("src/run/METRICS.md"));
  for (std::string line; std::getline(page, line);) {
    if (!line.starts_with("| `")) continue;
    const std::string name = line.substr(3, line.find('`', 3) - 3);
    const size_t open = name.find('{'), close = name.find('}');
    if (open == std::string::npos) {
      names.push_back(name);
      continue;
    }
    std::istringstream parts(name.substr(open + 1, close - open - 1));
    for (std::string part; std::getline(parts, part, ',');)
      names.push_back(name.substr(0, open) + part + name.substr(close + 1));
  }
  return names;
}

std::regex pattern(const std::string& name) {
  std::string p = std::regex_replace(name, std::regex(R"([.])"), "\\.");
  p = std::regex_replace(p, std::regex("TASK"), "[a-z_]+");
  p = std::regex_replace(p, std::regex("@[NK]"), "@[0-9]+");
  return std::regex(std::regex_replace(p, std::regex("_A_B"), "_[0-9]+_[0-9]+"));
}

void collect(const Metrics& m, std::set<std::string>& names) {
  const nlohmann::json line = nlohmann::json::parse(m.json());  // texts too
  for (const auto& [name, value] : line.items()) names.insert(name);
}

// Runs that log everything that can be logged.
std::set<std::string> logged() {
  std::set<std::string> names;
  const std::string rows = testing::TempDir() + "pare_metrics_rows.jsonl";
  std::ofstream(rows) << "{\"prompt\": \"a4b9;?a>\"}\n";
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{"rollout.val_kwargs.n=4", "rollout.val_kwargs.temperature=1"},
        {"algorithm.use_kl_in_reward=true", "actor.ppo_epochs=2", "algorithm.oversample.keep=3", "learner.shards=3"},
        {"algorithm.rpo.enable=true"},
        {"data.train_files=" + rows, "data.val_files=" + rows, "data.tokenizer=ssa",
         "data.reward=command:sh -c 'while read -r line; do echo \"{\\\"score\\\": 1}\"; done'"},
        {"rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=6",
         "rollout.check_exact=false", "algorithm.rollout_correction.rollout_is=icepop",
         "algorithm.rollout_correction.acceptance=true", "rollout.val_kwargs.kv=both",
         "algorithm.rollout_correction.off_policy_mask_threshold=0.1", "rollout.kv.blocks.acceptance_target=0.86"},
        {"rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=3",
         "rollout.kv.blocks.dense_layers=0", "distill.enable=true", "model.lora.rank=2", "trainer.skip_nonfinite=1"}}) {
    TrainingRun run(tiny_run("qwen3", keys));
    collect(run.step(), names);
    collect(run.trainer->evaluate(), names);
  }
  const auto examples = std::filesystem::path(testing::TempDir()) / cat("pare_metrics_examples_", getpid(), ".jsonl");
  std::ofstream(examples) << R"({"prompt": "a", "completion": "b"})";
  Session held_out(
      tiny_run("qwen3", {cat("data.train_files=", examples.string()), cat("data.val_files=", examples.string()),
                         "data.tokenizer=ssa", "trainer.test_freq=1"}));
  collect(SftTraining(held_out).evaluate(), names);
  std::filesystem::remove(examples);
  Session session(tiny_run("qwen3", {}));
  SftTraining sft(session);
  collect(sft.step(), names);
  names.insert("accepted_changes");  // of `pare train`: ResumeInputs.AcceptedChangesAreWrittenDown
  names.insert("chain");             // likewise: Audits.TheChainIsOfTheBitsAlone
  return names;
}

TEST(MetricsPage, DefinesWhatIsLoggedAndNothingElse) {
  const std::set<std::string> names = logged();
  const std::vector<std::string> page = defined();
  EXPECT_EQ(std::set<std::string>(page.begin(), page.end()).size(), page.size()) << "a name twice";
  std::set<std::string> explained;
  for (const std::string& entry : page) {
    const std::regex p = pattern(entry);
    const size_t before = explained.size();
    bool found = false;
    for (const std::string& name : names)
      if (std::regex_match(name, p)) {
        explained.insert(name);
        found = true;
      }
    EXPECT_TRUE(found) << entry << " is on the page, and no run logs it";
    EXPECT_TRUE(!found || explained.size() > before) << entry << " is on the page twice";
  }
  for (const std::string& name : names)
    EXPECT_TRUE(explained.contains(name)) << name << " is logged, and not on the page";
}

}  // namespace
}  // namespace pare::test
