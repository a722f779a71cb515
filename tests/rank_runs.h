// Runs of several ranks, as their users start them, against those of one.
#pragma once
#include "base/json_file.h"
#include "run/checkpoint.h"
#include "tests/program.h"
#include "tests/tiny_run.h"

namespace pare::test {

// metrics.jsonl without what depends on how the work is spread.
inline std::string timeless(const std::string& path) {
  std::string text;
  std::ifstream in(path);
  for (std::string row; std::getline(in, row);) {
    auto line = nlohmann::ordered_json::parse(row);
    for (auto it = line.begin(); it != line.end();) {
      const bool spread = it.key().starts_with("timing_s/") || it.key().starts_with("memory/") ||
                          it.key().starts_with("comm/") || it.key().starts_with("perf/");
      it = spread ? line.erase(it) : std::next(it);
    }
    text += line.dump() + "\n";
  }
  return text;
}

class RankRuns : public Program {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { std::filesystem::remove_all(tiny_folder()); }

  // The words that follow the program: the tiny run in DIR, of which every step is saved and one can be cut into four.
  Overrides train(const std::string& dir, const Overrides& more) const {
    return Overrides{"train", "--out", at(dir)} + tiny_run() +
           Overrides{"learner.shards=4", "trainer.samples_freq=1", "trainer.test_freq=2", "trainer.save_freq=1"} + more;
  }
  Outcome alone(const std::string& dir, const Overrides& more) const {
    Overrides all = Overrides{program_path().string()} + train(dir, more);
    return run(all);
  }

  void expect_same(const std::string& a, const std::string& b, int step,
                   const Overrides& weights = {"model.safetensors"}) const {
    EXPECT_EQ(timeless(at(a + "/metrics.jsonl")), timeless(at(b + "/metrics.jsonl")));
    for (const char* log : {"/rollouts.jsonl", "/certificates.jsonl"})
      EXPECT_EQ(read_text(at(a + log)), read_text(at(b + log)));
    const std::string checkpoint = cat("/checkpoints/step-", step, "/");
    Overrides files = {checkpoint + "optimizer.safetensors"};
    for (const std::string& name : weights) files = files + Overrides{"/model/" + name, checkpoint + name};
    for (const std::string& file : files) {
      EXPECT_FALSE(read_text(at(a + file)).empty()) << file;
      EXPECT_TRUE(read_text(at(a + file)) == read_text(at(b + file))) << file;
    }
    EXPECT_EQ(checkpoint_damage(at(cat(b, "/checkpoints/step-", step))), "");
  }
};

inline const Overrides kEndless = {"trainer.total_training_steps=60000", "trainer.save_freq=0",
                                   "trainer.samples_freq=0", "trainer.test_freq=0"};

}  // namespace pare::test
