// The folder of a run: what is replaced and what never, and where a run goes on that was moved.
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "tests/program.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class RunFolder : public Program {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { fs::remove_all(tiny_folder()); }

  Outcome train(const Overrides& words, const std::string& directory = ".") {
    std::vector<std::string> arguments = {"/usr/bin/env", "-C", at(directory), program_path().string(), "train"};
    for (const std::string& w : words) arguments.push_back(w);
    return run(arguments);
  }
  // The tiny run, to "run".
  Outcome tiny(const Overrides& more = {}) { return train(tiny_run() + Overrides{"--out", at("run")} + more); }
  void refused(const Outcome& o, const std::vector<std::string>& parts) {
    EXPECT_EQ(o.code, static_cast<int>(Exit::usage)) << o.out;
    EXPECT_EQ(o.out, "");
    for (const std::string& part : parts) EXPECT_NE(o.err.find(part), std::string::npos) << part << " in " << o.err;
  }
  // All files with their contents.
  std::map<std::string, std::string> files(const std::string& folder) {
    std::map<std::string, std::string> all;
    for (const auto& e : fs::recursive_directory_iterator(at(folder)))
      all[fs::relative(e.path(), at(folder))] = e.is_regular_file() ? read_text(e.path()) : "";
    return all;
  }
  size_t steps(const std::string& folder) {
    const std::string lines = read_text(at(folder + "/metrics.jsonl"));
    return static_cast<size_t>(std::count(lines.begin(), lines.end(), '\n'));
  }
};

// Whatever has a name that a run would take is left as it is, with and without --force.
TEST_F(RunFolder, WhatIsNotOfARunIsNeverReplaced) {
  for (const char* name :
       {"model/block.cpp", "model/config.json", "checkpoints/step-3/model.safetensors", "config.toml", "metrics.jsonl",
        "rollouts.jsonl", "report.html", "model.old/x", "model.tmp/x", "checkpoints.old/step-1/x"}) {
    fs::remove_all(at("run"));
    write(cat("run/", name), "precious");
    const auto before = files("run");
    const std::string top = cat("run/", fs::path(name).begin()->string());
    for (const Overrides& how : {Overrides{}, {"--force"}, {"--force", "--dry-run"}}) {
      SCOPED_TRACE(name + testing::PrintToString(how));
      refused(tiny(how), {at(top), "is not of a run"});
      EXPECT_EQ(files("run"), before);
    }
  }
  // Other files are in nobody's way.
  fs::remove_all(at("run"));
  write("run/notes.md", "precious");
  EXPECT_EQ(tiny().code, 0);
  EXPECT_EQ(tiny({"--force"}).code, 0);
  EXPECT_EQ(read_text(at("run/notes.md")), "precious");
}

// Nor what somebody put beside the files of a model or a checkpoint.
TEST_F(RunFolder, NorWhatLiesAmongTheFilesOfARun) {
  ASSERT_EQ(tiny({"trainer.save_freq=2"}).code, 0);
  for (const char* name : {"model/notes.md", "model/plots/a.png", "checkpoints/step-2/notes.md", "checkpoints/best"}) {
    SCOPED_TRACE(name);
    write(cat("run/", name), "precious");
    const auto before = files("run");
    refused(tiny({"--force"}), {at("run/"), "--force"});
    EXPECT_EQ(files("run"), before);
    fs::remove_all(at(std::string(name).starts_with("model/plots") ? "run/model/plots" : cat("run/", name)));
  }
  fs::rename(at("run/model"), at("elsewhere"));
  write("run/model", "precious");
  refused(tiny({"--force"}), {at("run/model"), "--force"});
  EXPECT_EQ(read_text(at("run/model")), "precious");
  fs::remove(at("run/model"));
  EXPECT_EQ(tiny({"--force", "trainer.total_training_steps=1"}).code, 0);
  EXPECT_EQ(steps("run"), 1u);
}

TEST_F(RunFolder, NothingToResumeIsAnError) {
  const auto nothing = [&](const std::string& folder) {
    const Outcome o = train(tiny_run() + Overrides{"--out", at(folder), "--resume"});
    refused(o, {at(folder), "holds no run", "--resume"});
  };
  nothing("none");
  EXPECT_FALSE(fs::exists(at("none")));
  fs::create_directories(at("empty"));
  nothing("empty");
  EXPECT_TRUE(fs::is_empty(at("empty")));
  write("other/config.toml", "[trainer]\nseed = 3\n");  // of a user
  nothing("other");
}

// Before its first checkpoint a run can only begin again.
TEST_F(RunFolder, ARunWithoutACheckpointBeginsAgain) {
  ASSERT_EQ(tiny({"trainer.save_freq=0"}).code, 0);
  const std::string model = read_text(at("run/model/model.safetensors"));
  refused(tiny({"--resume"}), {"finished run without a checkpoint"});
  fs::remove_all(at("run/model"));  // as if it had been killed before
  const Outcome o = tiny({"--resume"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("begins again"), std::string::npos) << o.out;
  EXPECT_EQ(steps("run"), 4u);
  EXPECT_TRUE(read_text(at("run/model/model.safetensors")) == model);
}

TEST_F(RunFolder, AMovedRunGoesOnWhereItLies) {
  ASSERT_EQ(tiny({"trainer.total_training_steps=2"}).code, 0);
  fs::rename(at("run"), at("moved"));
  const auto more = [](int n) { return cat("trainer.total_training_steps=", n); };
  EXPECT_EQ(train({at("moved/config.toml"), "--resume", more(4)}).code, 0);
  EXPECT_EQ(steps("moved"), 4u);
  EXPECT_EQ(train({"config.toml", "--resume", more(5)}, "moved").code, 0);
  EXPECT_EQ(steps("moved"), 5u);
  fs::rename(at("moved"), at("a # \"b\""));
  EXPECT_EQ(train({"a # \"b\"/config.toml", "--resume", more(6)}).code, 0);
  EXPECT_EQ(steps("a # \"b\""), 6u);
  EXPECT_FALSE(fs::exists(at("run"))) << "where it was";
  // It is not begun anew there, and elsewhere only where that is asked for.
  refused(train({"a # \"b\"/config.toml"}), {"a # \"b\" holds a run already", "--resume"});
  EXPECT_EQ(train({"a # \"b\"/config.toml", "--out", "again"}).code, 0);
  EXPECT_EQ(train({"a # \"b\"/config.toml", "trainer.default_local_dir=third"}).code, 0);
  EXPECT_EQ(steps("again"), 6u);
  EXPECT_EQ(steps("third"), 6u);
  // A copy of the configuration alone is the user's.
  write("copy/config.toml", read_text(at("again/config.toml")));
  refused(train({"copy/config.toml", "--resume", "trainer.default_local_dir=copy"}), {"copy holds no run"});
}

}  // namespace
}  // namespace pare::test
