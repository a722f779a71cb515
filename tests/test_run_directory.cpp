// The folder of a run: what is replaced and what never, and where a run goes on that was moved.
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <thread>

#include "base/error.h"
#include "run/checkpoint.h"
#include "run/tensorboard.h"
#include "tests/program.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class RunFolder : public Program {
 protected:
  // In memory where that is possible: syncs are slow.
  void SetUp() override {
    Program::SetUp();
    std::error_code none;
    const fs::path memory = cat("/dev/shm/pare_run_folder_", getpid());
    if (IsSkipped() || !fs::create_directories(memory, none)) return;
    fs::remove_all(root_);
    root_ = memory;
  }
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

// Nor what somebody put beside the files of a model or a checkpoint: it has the same name afterwards, whatever becomes
// of them.
const std::vector<const char*> foreign = {"notes.md",
                                          "model/README.md",
                                          "model/eval.jsonl",
                                          "model/vocab_pieces.bin",
                                          "model/results.json",
                                          "model/plots/a.png",
                                          "model/adapter/notes.txt",
                                          "checkpoints/best",
                                          "checkpoints/notes.tmp",
                                          "checkpoints/mine/x.json",
                                          "checkpoints/step-1/mydata.jsonl",
                                          "checkpoints/step-2/notes.txt",
                                          "checkpoints/step-2/eval/x.bin",
                                          "checkpoints/step-3.old/notes.txt",
                                          "checkpoints/step-40/notes.txt"};

TEST_F(RunFolder, NorWhatLiesAmongTheFilesOfARun) {
  const Overrides often = {"trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1"};
  ASSERT_EQ(tiny({"trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=0", "trainer.total_training_steps=2"}).code,
            0);
  for (const char* name : foreign) write(cat("run/", name), name);
  const auto expect_all = [&] {
    for (const char* name : foreign) {
      std::string now = name;  // what a crash left is tidied up
      if (const size_t old = now.find(".old"); old != now.npos) now.erase(old, 4);
      EXPECT_EQ(read_text(at("run/" + now)), name) << now;
    }
  };
  // Resumed, with every checkpoint but the last pruned.
  EXPECT_EQ(tiny(often + Overrides{"--resume"}).code, 0);
  expect_all();
  EXPECT_FALSE(fs::exists(at("run/checkpoints/step-1/state.json")));
  EXPECT_FALSE(fs::exists(at("run/checkpoints/step-3.old")));
  EXPECT_TRUE(fs::exists(at("run/checkpoints/step-4/state.json")));
  // Replaced: also by a run that writes other files.
  for (const char* steps : {"2", "1"}) {
    const Outcome o =
        tiny(often + Overrides{"--force", cat("trainer.total_training_steps=", steps), "model.lora.rank=2"});
    EXPECT_EQ(o.code, 0) << o.err;
    expect_all();
    EXPECT_FALSE(fs::exists(at("run/model/model.safetensors")));
    EXPECT_FALSE(fs::exists(at("run/checkpoints/step-4")));
  }
  EXPECT_EQ(steps("run"), 1u);
}

// Killed at every call that changes the disk, while an old run is replaced and checkpoints are pruned: what the user
// put there is there after the next start.
TEST_F(RunFolder, NoKillLosesWhatTheUserPutThere) {
  const Overrides keys = {"trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1", "trainer.total_training_steps=2",
                          "trainer.samples_freq=0"};
  ASSERT_EQ(tiny(keys + Overrides{"trainer.max_actor_ckpt_to_keep=0"}).code, 0);
  const std::vector<const char*> some = {"model/README.md", "model/plots/a", "checkpoints/best",
                                         "checkpoints/step-1/mydata.jsonl", "checkpoints/step-2/notes.txt"};
  for (const char* name : some) write(cat("run/", name), name);
  fs::rename(at("run"), at("start"));
  int points = 0;
  for (;; points++) {
    SCOPED_TRACE(points + 1);
    fs::remove_all(at("run"));
    fs::copy(at("start"), at("run"), fs::copy_options::recursive);
    const auto started = [&](const char* how, const std::string& fault) {
      std::vector<std::string> words = {
          "/usr/bin/env", "PARE_FAULT=" + fault, program_path().string(), "train", how, "--out", at("run")};
      for (const std::string& k : tiny_run() + keys) words.push_back(k);
      return run(words);
    };
    const Outcome o = started("--force", cat(points + 1, ":-", SIGKILL));
    if (o.code == 0) break;
    ASSERT_EQ(o.code, 128 + SIGKILL) << o.err;
    if (points % 3 == 0) started(points % 2 ? "--resume" : "--force", cat(1 + points % 29, ":-", SIGKILL));
    const Outcome next = points % 2 ? started("--resume", "0:0") : started("--force", "0:0");
    if (next.code != 0) {  // not begun, or the old run's model is still there
      EXPECT_EQ(next.code, static_cast<int>(Exit::usage)) << next.err;
      EXPECT_EQ(started("--force", "0:0").code, 0);
    }
    for (const char* name : some) EXPECT_EQ(read_text(at(cat("run/", name))), name);
    for (const auto& e : fs::recursive_directory_iterator(at("run")))
      EXPECT_TRUE(e.path().extension() != ".tmp" && e.path().extension() != ".old") << e.path();
    if (HasFailure()) break;
  }
  EXPECT_GE(points, 40);
}

// An obstacle to a save is reported before the first step, and stays.
TEST_F(RunFolder, WhatWouldBlockASaveIsSaidAtTheStart) {
  ASSERT_EQ(tiny({"trainer.total_training_steps=2"}).code, 0);
  fs::create_directories(at("elsewhere"));
  const std::vector<std::pair<std::string, std::function<void(const std::string&)>>> ways = {
      {"file", [](const std::string& path) { std::ofstream(path) << "precious"; }},
      {"folder", [](const std::string& path) { fs::create_directories(path + "/x"); }},
      {"pipe", [](const std::string& path) { ASSERT_EQ(mkfifo(path.c_str(), 0600), 0); }},
      {"link", [&](const std::string& path) { fs::create_directory_symlink(at("elsewhere"), path); }}};
  for (const auto& [name, how] :
       std::vector<std::pair<std::string, std::string>>{{"model", "file"},
                                                        {"model", "link"},
                                                        {"model.tmp", "file"},
                                                        {"model.old", "link"},
                                                        {"metrics.jsonl", "folder"},
                                                        {"metrics.jsonl", "link"},
                                                        {"rollouts.jsonl", "pipe"},
                                                        {"model/config.json", "folder"},
                                                        {"model/tokenizer.ssa", "folder"},
                                                        {"model/adapter", "file"},
                                                        {"model/additional_chat_templates", "file"},
                                                        {"checkpoints/step-3", "file"},
                                                        {"checkpoints/step-3", "link"},
                                                        {"checkpoints/step-3.tmp", "file"},
                                                        {"checkpoints/step-2/state.json.tmp", "folder"}}) {
    SCOPED_TRACE(name + " " + how);
    fs::remove_all(at("aside"));
    fs::copy(at("run"), at("aside"), fs::copy_options::recursive);
    fs::remove_all(at("run/" + name));
    for (const auto& [kind, make] : ways)
      if (kind == how) make(at("run/" + name));
    const std::map<std::string, const char*> says = {
        {"file", " is no folder"}, {"folder", " is a folder"}, {"pipe", " is no file"}, {"link", " is a link"}};
    const char* const is = says.at(how);
    const auto before = files("run");
    for (const char* start : {"--resume", "--force"}) {
      refused(tiny({start, "trainer.total_training_steps=4"}), {at("run/" + name), is, "move it"});
      EXPECT_EQ(files("run"), before);
    }
    fs::remove_all(at("run"));
    fs::rename(at("aside"), at("run"));
  }
}

// Logs are worth less than the checkpoint beside them: a run takes up what is left of them.
TEST_F(RunFolder, ARunGoesOnWithoutItsLogs) {
  const Overrides first = {"trainer.total_training_steps=3", "trainer.samples_freq=1"};
  ASSERT_EQ(tiny(first).code, 0);
  fs::rename(at("run"), at("start"));
  const std::string metrics = read_text(at("start/metrics.jsonl")), rollouts = read_text(at("start/rollouts.jsonl"));
  const std::string record = read_text(at("start/certificates.jsonl"));
  const std::string events = read_text(at("start/events.out.tfevents.pare"));
  const auto lines = [](const std::string& text, size_t begin, size_t end) {
    std::istringstream in(text);
    std::string some, line;
    for (size_t i = 0; std::getline(in, line) && i < end; i++)
      if (i >= begin) some += line + "\n";
    return some;
  };
  const std::string one = lines(metrics, 0, 1), two = lines(metrics, 0, 2), last = lines(metrics, 2, 3);
  struct Case {
    const char *file, *damage;
    std::optional<std::string> text;  // none: the file is gone
    size_t left;                      // lines of steps 1 to 3
    bool said;
  };
  const char *m = "metrics.jsonl", *r = "rollouts.jsonl", *e = "events.out.tfevents.pare", *h = "certificates.jsonl";
  for (const Case& c : std::vector<Case>{
           {m, "whole", metrics, 3, false},
           {m, "gone", {}, 0, true},
           {m, "empty", "", 0, true},
           {m, "cut in a line", metrics.substr(0, metrics.size() - 20), 2, true},
           {m, "cut at its line end", metrics.substr(0, metrics.size() - 1), 2, true},
           {m, "cut by a line", two, 2, true},
           {m, "without the first", lines(metrics, 1, 3), 2, true},
           {m, "lines of later steps", metrics + "{\"training/global_step\": 4}\n{\"training/glo", 3, false},
           {m, "cut, and lines of later steps", one + last + "{\"training/global_step\": 4}\n" + metrics, 5, true},
           {m, "garbage between", one + "garbage\n" + two + last, 4, true},
           {m, "zeros at its end", two + std::string(last.size(), '\0'), 2, true},
           {m, "garbage", std::string(metrics.size(), 'x'), 0, true},
           {m, "another thing", "{\"a\": [[1]]}\n[]\n3\n", 0, true},
           {r, "gone", {}, 3, true},
           {r, "cut in a line", rollouts.substr(0, rollouts.size() / 2), 3, true},
           {r, "garbage", std::string(rollouts.size(), '\n'), 3, true},
           {h, "gone", {}, 3, true},
           {h, "cut in a line", record.substr(0, record.size() - 20), 3, true},
           {h, "without the first", lines(record, 1, 4), 3, true},
           {h, "garbage", std::string(record.size(), '\n'), 3, true},
           {e, "gone", {}, 3, true},
           {e, "empty", "", 3, true},
           {e, "cut", events.substr(0, events.size() - 5), 3, true},
           {e, "garbage", std::string(events.size(), 'x'), 3, true}}) {
    SCOPED_TRACE(cat(c.file, ": ", c.damage));
    fs::remove_all(at("run"));
    fs::copy(at("start"), at("run"), fs::copy_options::recursive);
    fs::remove(at(cat("run/", c.file)));
    if (c.text) write(cat("run/", c.file), *c.text);
    const Outcome o = train({at("run/config.toml"), "--resume", "trainer.total_training_steps=4"});
    ASSERT_EQ(o.code, 0) << o.err;
    EXPECT_NE(o.out.find("goes on after step 3"), std::string::npos) << o.out;
    EXPECT_EQ(o.err.find(c.file) != std::string::npos, c.said) << o.err;
    const char* const curves = std::string_view(c.damage) == "cut" ? "curves go on after" : "curves begin at the next";
    const std::string told = std::regex_replace(o.err, std::regex("\\s+"), " ");
    EXPECT_EQ(told.find(curves) != std::string::npos, c.file == e) << told;
    EXPECT_EQ(steps("run"), c.left + 1);
    EXPECT_EQ(run("compare " + at("run")).code, 0) << "the log reads back";
    const std::string left = read_text(at(cat("run/", e)));
    EXPECT_EQ(tensorboard_whole(left), left.size());
    EXPECT_GT(left.size(), 100u);
    EXPECT_EQ(tiny({"--resume", "trainer.samples_freq=1", "trainer.total_training_steps=5"}).err, "") << "said once";
    const Outcome audited = run(cat("audit ", at("run"), " --step 5"));
    EXPECT_EQ(audited.code, 0) << audited.err;
  }
}

// A run whose folder is gone, or elsewhere, ends with the next save, and makes no second one.
TEST_F(RunFolder, AFolderThatIsMovedOrRemovedEndsTheRun) {
  for (const bool moved : {true, false}) {
    fs::remove_all(at("run"));
    fs::remove_all(at("moved"));
    std::atomic<bool> ended = false;
    std::thread mover([&] {
      while (!ended && read_text(at("run/metrics.jsonl")).find("\"training/global_step\":3") == std::string::npos)
        usleep(1000);
      if (moved)
        fs::rename(at("run"), at("moved"));
      else
        fs::remove_all(at("run"));
    });
    const Outcome o = tiny({"trainer.save_freq=1000", "trainer.total_training_steps=1000", "trainer.samples_freq=0"});
    ended = true;
    mover.join();
    EXPECT_EQ(o.code, static_cast<int>(Exit::failed)) << o.err;
    EXPECT_NE(o.err.find(cat(at("run"), ": the run's folder was moved or removed")), std::string::npos) << o.err;
    EXPECT_EQ(o.err.find("checkpoint is kept"), std::string::npos) << o.err;
    EXPECT_FALSE(fs::exists(at("run")));
    EXPECT_EQ(fs::exists(at("moved/config.toml")), moved);
  }
}

// Leftovers of a kill go with the resume: a checkpoint that should have been pruned, damaged ones behind the last
// whole one, files that were being written.
TEST_F(RunFolder, AResumeTidiesUp) {
  const Overrides all = {"trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=0"};
  ASSERT_EQ(tiny(all).code, 0);
  const auto checkpoints = [&] {
    std::set<std::string> names;
    for (const auto& e : fs::directory_iterator(at("run/checkpoints"))) names.insert(e.path().filename());
    return names;
  };
  fs::remove(at("run/checkpoints/step-4/optimizer.safetensors"));
  fs::remove(at("run/checkpoints/step-3/state.json"));
  for (const char* name :
       {".ranks", ".ranks.tmp", "config.toml.tmp", "metrics.jsonl.tmp", "certificates.jsonl.tmp", "report.html.tmp",
        "checkpoints/step-2.tmp/model.safetensors.tmp", "model.tmp/config.json", "checkpoints/step-7.old/state.json"})
    write(cat("run/", name), "x");
  const Outcome o =
      tiny({"--resume", "trainer.save_freq=0", "trainer.total_training_steps=2", "trainer.max_actor_ckpt_to_keep=1"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(checkpoints(), (std::set<std::string>{"step-2"})) << "of which step-1 is older, step-3 and 4 are damaged";
  EXPECT_EQ(std::distance(fs::directory_iterator(at("run")), fs::directory_iterator()), 7);
  EXPECT_EQ(steps("run"), 2u);
}

// Signs that TOML and JSON escape, in values and in the name of the folder: the run resumes, and its files read back.
TEST_F(RunFolder, ControlCharactersReadBack) {
  const std::string odd = std::string("a\r\nb\x01\x1f\x7f\t\"\\'") + "\xc2\x80\xe2\x80\xa8";
  const std::string template_text = "{problem}\r\nA\t\x1b:\r\n";
  write("dos.toml", "[data]\r\nchat_template = \"\"\"\r\n{problem}\r\nA\\t\\u001b:\r\n\"\"\"\r\n");
  const std::string folder = at("run " + odd);
  Outcome o =
      train(tiny_run() + Overrides{at("dos.toml"), "model.path=", cat("model.config=", tiny_folder(), "bytes.json"),
                                   cat("data.tokenizer=", tiny_folder(), "tokenizer.json"), "data.max_prompt_length=64",
                                   "trainer.experiment_name=" + toml_quote(odd), "trainer.total_training_steps=2",
                                   "--out", folder});
  ASSERT_EQ(o.code, 0) << o.err;
  o = train({folder + "/config.toml", "--resume", "trainer.total_training_steps=4"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(checkpoint_damage(folder + "/checkpoints/step-4"), "");
  Config read;
  apply_toml(read, read_text(folder + "/config.toml"), "");
  EXPECT_EQ(read.trainer.experiment_name, odd);
  EXPECT_EQ(read.data.chat_template, template_text);
  for (const char* name : {"metrics.jsonl", "rollouts.jsonl"}) {
    std::istringstream lines(read_text(cat(folder, "/", name)));
    for (std::string line; std::getline(lines, line);) EXPECT_TRUE(nlohmann::json::parse(line).is_object());
  }
  for (const Overrides& bad : {Overrides{"--out", at("x\xff")},
                               {"trainer.experiment_name=x\xff"},
                               {"--out", at("y"), "trainer.default_local_dir=\"\xff\""}})
    refused(train(tiny_run() + bad), {"not UTF-8"});
  EXPECT_FALSE(fs::exists(at("x\xff")));
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
  write("run/checkpoints/best/config.json", "{}");  // a copy that the user made is none either
  refused(tiny({"--resume"}), {"finished run without a checkpoint"});
  fs::remove_all(at("run/model"));  // as if it had been killed before
  const Outcome o = tiny({"--resume"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("begins again"), std::string::npos) << o.out;
  EXPECT_EQ(steps("run"), 4u);
  EXPECT_TRUE(read_text(at("run/model/model.safetensors")) == model);
}

// --out names a run as well as its config.toml does.
TEST_F(RunFolder, OutAloneNamesTheRunToResume) {
  ASSERT_EQ(tiny({"trainer.total_training_steps=2"}).code, 0);
  fs::rename(at("run"), at("a=b"));
  EXPECT_EQ(train({"--out", at("a=b"), "--resume"}).code, 0);
  EXPECT_EQ(steps("a=b"), 2u);
  EXPECT_EQ(train({"trainer.total_training_steps=4", "--out", at("a=b"), "--resume"}).code, 0);
  EXPECT_EQ(steps("a=b"), 4u);
  refused(train({"--out", at("none"), "--resume"}), {at("none"), "holds no run"});
  refused(train({"--resume"}), {"which run?", "RUN/config.toml", "--out RUN"});
  refused(train({at("."), "--resume"}), {"a folder, expected a configuration file"});
  fs::rename(at("a=b"), at("run"));
  refused(train({at("run"), "--resume"}), {"a folder", at("run/config.toml")});
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
  write("mine/config.toml", "[trainer]\ndefault_local_dir = \"fourth\"\n");
  EXPECT_EQ(train(tiny_run() + Overrides{"mine/config.toml"}).code, 0);
  EXPECT_EQ(steps("fourth"), 4u);
}

}  // namespace
}  // namespace pare::test
