// A run that is stopped, killed or out of disk, and resumed, ends with the bits of one that was left alone.
#include <sys/stat.h>

#include <csignal>
#include <regex>
#include <thread>

#include "base/file.h"
#include "base/json_file.h"
#include "run/checkpoint.h"
#include "tests/program.h"
#include "tests/sealed_state.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

std::vector<nlohmann::ordered_json> json_lines(const std::string& path) {
  std::vector<nlohmann::ordered_json> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::ordered_json::parse(line));
  return lines;
}

// What depends on the process and its schedule: clocks, the most memory since its start, pages in use at a time, how
// often a learner that chooses blocks sums up those of a prefix.
bool of_the_process(const std::string& metric) {
  return metric.starts_with("timing_s/") || metric.starts_with("memory/") || metric == "perf/max_memory_allocated_gb" ||
         metric == "perf/kv_peak_bytes" || metric == "flops/distill";
}

// metrics.jsonl without that.
std::string timeless(const std::string& path) {
  std::string text;
  for (auto& line : json_lines(path)) {
    for (auto it = line.begin(); it != line.end();) it = of_the_process(it.key()) ? line.erase(it) : std::next(it);
    text += line.dump() + "\n";
  }
  return text;
}

class Resume : public Program {
 protected:
  // In memory where that is possible: syncs are slow, and what the end of a process leaves does not depend on them.
  void SetUp() override {
    Program::SetUp();
    std::error_code none;
    const fs::path memory = cat("/dev/shm/pare_resume_", getpid());
    if (IsSkipped() || !fs::create_directories(memory, none)) return;
    fs::remove_all(root_);
    root_ = memory;
  }
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { fs::remove_all(tiny_folder()); }

  // `pare KIND` of the tiny run in DIR; fault: PARE_FAULT.
  Outcome pare(const std::string& kind, const std::string& dir, const Overrides& more, const std::string& fault = "") {
    std::vector<std::string> arguments = {"/usr/bin/env"};
    if (!fault.empty()) arguments.push_back("PARE_FAULT=" + fault);
    for (const std::string& a : Overrides{program_path().string(), kind, "--out", at(dir)} + tiny_run() + more)
      arguments.push_back(a);
    return run(arguments);
  }
  void expect_code(const Outcome& o, int code) {
    ASSERT_EQ(o.code, code) << o.err << o.out;
    const std::string errors = std::regex_replace(o.err, std::regex("warning  .*\n(         .*\n)*"), "");
    EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), code == 0 || code > 128 ? 0 : 1) << o.err;
  }

  // Everything that two runs promise to share.
  void expect_same(const std::string& a, const std::string& b) {
    EXPECT_EQ(timeless(at(a + "/metrics.jsonl")), timeless(at(b + "/metrics.jsonl")));
    for (const char* log : {"/rollouts.jsonl", "/certificates.jsonl"})
      EXPECT_EQ(read_text(at(a + log)), read_text(at(b + log)));
    int models = 0;
    for (const char* name :
         {"/model/model.safetensors", "/model/adapter_model.safetensors", "/model/adapter/adapter_model.safetensors"}) {
      EXPECT_TRUE(read_text(at(a + name)) == read_text(at(b + name)));
      models += fs::exists(at(a + name));
    }
    EXPECT_GE(models, 1);
    const auto last = [&](const std::string& dir) {
      std::string steps;
      for (const auto& e : fs::directory_iterator(at(dir + "/checkpoints")))
        if (steps.size() <= e.path().string().size()) steps = std::max(steps, e.path().string());
      return steps;
    };
    ASSERT_EQ(fs::path(last(a)).filename(), fs::path(last(b)).filename());
    EXPECT_TRUE(read_text(last(a) + "/optimizer.safetensors") == read_text(last(b) + "/optimizer.safetensors"));
    const auto state = [&](const std::string& dir) { return read_json_file(last(dir) + "/state.json"); };
    auto x = state(a), y = state(b);
    for (auto* s : {&x, &y}) {  // logs: of arenas that one of them has
      for (const char* log : {"metrics.jsonl", "events.out.tfevents.pare"}) (*s)["run"]["logs"].erase(log);
      s->erase("config");
      s->erase("xxh128");
    }
    EXPECT_EQ(x, y);
  }
};

// 2 N steps, and N + N with other ways to split the work in the second half.  An epoch of the data has 6 steps.
TEST_F(Resume, NAndNStepsAreTwoN) {
  const Overrides split = {"actor.ppo_max_token_len=50", "actor.logits_chunk=7", "rollout.max_num_seqs=5",
                           "trainer.threads=2", "rollout.kv_cache_bytes=60000"};
  struct Case {
    std::string kind;
    int n;
    Overrides keys;
  };
  const Overrides random = {"model.path=", cat("model.config=", tiny_folder(), "config.json"), "model.init=fan_in"};
  for (const Case& c : std::vector<Case>{
           {"train", 3, {}},
           {"train", 6, {}},
           {"train", 2, {"data.shuffle=false", "data.train_batch_size=14"}},
           {"train", 2, {"actor.optim.moments=bf16", "actor.ppo_epochs=2"}},
           {"train", 3, {"algorithm.filter_groups.enable=true", "rollout.n=2", "actor.ppo_mini_batch_size=2"}},
           {"train", 2, {"actor.use_kl_loss=true", "actor.kl_loss_type=exact", "algorithm.use_kl_in_reward=true"}},
           {"train", 2, random + Overrides{"actor.use_kl_loss=true", "actor.token_subset=urs", "actor.ppo_epochs=2"}},
           {"train", 6, {"algorithm.rpo.enable=true", "algorithm.rpo.max_cut=5"}},
           {"train",
            4,
            {"algorithm.rpo.enable=true", "algorithm.rpo.cut=half_shortest", "algorithm.filter_groups.enable=true",
             "rollout.n=2", "reward_model.length_reward.enable=true",
             cat("algorithm.rpo.cache_file=", tiny_folder(), "part.jsonl"), "algorithm.rpo.missing=lazy"}},
           {"train",
            4,
            {"algorithm.rpo.enable=true", "algorithm.rpo.cut=length", "algorithm.rpo.prefix_loss=included"}},
           {"train", 2, {"model.lora.rank=3", "model.lora.alpha=7", "actor.use_kl_loss=true"}},
           {"train", 2, {"rollout.top_k=20", "rollout.top_p=0.8", "rollout.min_p=0.05"}},
           {"train", 2, {"rollout.top_p=0.8", "actor.ppo_epochs=2"}},
           {"train",
            2,
            {"model.lora.rank=3", "distill.enable=true", "rollout.kv.method=quest", "rollout.kv.blocks.size=4",
             "rollout.kv.blocks.count=3", "rollout.kv.blocks.dense_layers=0"}},
           {"sft", 3, {}},
           {"sft", 6, random}}) {
    SCOPED_TRACE(c.kind + testing::PrintToString(c.keys));
    const Overrides keys = c.keys + Overrides{"trainer.samples_freq=1", cat("trainer.test_freq=", c.n)};
    for (const char* dir : {"whole", "parts"}) fs::remove_all(at(dir));
    expect_code(pare(c.kind, "whole", keys + Overrides{cat("trainer.total_training_steps=", 2 * c.n)}), 0);
    const auto part = [&](int steps, bool shares) {
      return keys + Overrides{cat("trainer.total_training_steps=", steps),
                              cat("rollout.free_cache_engine=", shares ? "true" : "false")};
    };
    expect_code(pare(c.kind, "parts", part(c.n, c.n != 6)), 0);
    expect_code(pare(c.kind, "parts", part(2 * c.n, c.n == 6) + split + Overrides{"--resume"}), 0);
    expect_same("whole", "parts");
    EXPECT_EQ(json_lines(at("parts/metrics.jsonl")).size(), static_cast<size_t>(2 * c.n));
  }
}

// What the acceptance rate has made of the blocks that the sampler reads is a part of the checkpoint.
TEST_F(Resume, BlocksByAcceptanceGoOn) {
  const Overrides keys = {"rollout.kv.method=quest",
                          "rollout.kv.blocks.size=4",
                          "rollout.kv.blocks.count=1",
                          "rollout.kv.blocks.first=0",
                          "rollout.kv.blocks.last=1",
                          "rollout.kv.blocks.dense_layers=0",
                          "rollout.kv.blocks.acceptance_target=0.9",
                          "rollout.kv.blocks.acceptance_steps=1",
                          "data.train_batch_size=24",
                          "trainer.samples_freq=1"};
  expect_code(pare("train", "whole", keys + Overrides{"trainer.total_training_steps=4"}), 0);
  expect_code(pare("train", "parts", keys + Overrides{"trainer.total_training_steps=2"}), 0);
  expect_code(pare("train", "parts",
                   keys + Overrides{"trainer.total_training_steps=4", "trainer.threads=2", "rollout.max_num_seqs=5",
                                    "--resume"}),
              0);
  expect_same("whole", "parts");
  const auto lines = json_lines(at("parts/metrics.jsonl"));
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0].at("kv/blocks/context_0_63"), 1);
  EXPECT_EQ(lines[2].at("kv/blocks/context_0_63"), 3) << "without it the second part would begin with 1";
}

// Killed at every call that changes the disk; a write is torn at a seeded place.
TEST_F(Resume, KilledAtAnyPoint) {
  const Overrides keys = {"trainer.save_freq=1",
                          "trainer.max_actor_ckpt_to_keep=1",
                          "trainer.samples_freq=2",
                          "trainer.test_freq=2",
                          "algorithm.rpo.enable=true",
                          "trainer.total_training_steps=3",
                          cat("data.tokenizer=", tiny_folder(), "tokenizer.bin")};
  expect_code(pare("train", "whole", keys), 0);
  int points = 0, before = 0;
  for (;; points++) {
    SCOPED_TRACE(points + 1);
    fs::remove_all(at("killed"));
    const Outcome o = pare("train", "killed", keys, cat(points + 1, ":-", SIGKILL));
    if (o.code == 0) break;
    ASSERT_EQ(o.code, 128 + SIGKILL) << o.err;
    if (!fs::exists(at("killed/config.toml"))) {  // there is no run yet
      before++;
      expect_code(pare("train", "killed", keys + Overrides{"--resume"}), static_cast<int>(Exit::usage));
      expect_code(pare("train", "killed", keys), 0);
      expect_same("whole", "killed");
      continue;
    }
    // Some are killed once more while they resume.
    if (points % 5 == 0) pare("train", "killed", keys + Overrides{"--resume"}, cat(1 + points % 37, ":-", SIGKILL));
    expect_code(pare("train", "killed", keys + Overrides{"--resume"}), 0);
    expect_same("whole", "killed");
    EXPECT_EQ(std::distance(fs::directory_iterator(at("killed/checkpoints")), fs::directory_iterator()),
              std::distance(fs::directory_iterator(at("whole/checkpoints")), fs::directory_iterator()));
    EXPECT_EQ(std::distance(fs::directory_iterator(at("killed")), fs::directory_iterator()), 7);
    if (HasFailure()) break;
  }
  EXPECT_GE(points, 50);
  EXPECT_LT(before, 9);
  RecordProperty("points", points);
}

// From the N-th change on the disk is full, or can only be read.
TEST_F(Resume, OutOfDiskAtAnyPoint) {
  const Overrides keys = {"trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1", "trainer.samples_freq=2",
                          "trainer.total_training_steps=3"};
  expect_code(pare("train", "whole", keys), 0);
  for (int n = 1;; n += 3) {
    SCOPED_TRACE(n);
    fs::remove_all(at("full"));
    const bool full = n % 2 == 0;
    const Outcome o = pare("train", "full", keys, cat(n, ":", full ? ENOSPC : EROFS));
    if (o.code == 0) {
      EXPECT_GE(n, 50);
      break;
    }
    expect_code(o, static_cast<int>(Exit::failed));
    EXPECT_TRUE(o.err.starts_with("pare: " + at("full"))) << o.err;
    EXPECT_NE(o.err.find(full ? "No space left on device" : "Read-only file system"), std::string::npos) << o.err;
    if (n > 10) {
      EXPECT_NE(o.err.find("--resume"), std::string::npos) << o.err;
    }
    const bool begun = fs::exists(at("full/config.toml"));
    std::error_code none;
    for (const auto& e : fs::directory_iterator(at("full/checkpoints"), none))
      EXPECT_TRUE(e.path().extension() == ".old" || checkpoint_damage(e.path().string()).empty()) << e.path();
    expect_code(pare("train", "full", begun ? keys + Overrides{"--resume"} : keys), 0);
    expect_same("whole", "full");
    if (HasFailure()) break;
  }
}

// A signal while the disk is changed: the step is finished and saved.  The learning rate depends on the whole run.
TEST_F(Resume, AfterAnInterrupt) {
  const Overrides keys = {"trainer.save_freq=0", "trainer.samples_freq=1", "actor.optim.lr_scheduler_type=linear",
                          "trainer.val_before_train=true"};
  for (const char* kind : {"train", "sft"}) {
    SCOPED_TRACE(kind);
    for (const char* dir : {"whole", "stopped"}) fs::remove_all(at(dir));
    expect_code(pare(kind, "whole", keys + Overrides{"trainer.save_freq=4"}), 0);
    const Outcome o = pare(kind, "stopped", keys, cat(16, ":-", SIGINT));
    expect_code(o, static_cast<int>(Exit::interrupted));
    EXPECT_NE(o.err.find(cat("continue with: pare ", kind, " ", at("stopped"), "/config.toml --resume")),
              std::string::npos)
        << o.err;
    const auto steps = json_lines(at("stopped/metrics.jsonl")).size() - 1;  // one is the validation before
    EXPECT_TRUE(0 < steps && steps < 4) << steps;
    EXPECT_EQ(checkpoint_damage(at(cat("stopped/checkpoints/step-", steps))), "");
    expect_code(run(cat(kind, " ", at("stopped"), "/config.toml --resume trainer.save_freq=4")), 0);
    expect_same("whole", "stopped");
  }
}

// In the middle of a long rollout the last finished step is saved and the process ends at once, whoever asks.
TEST_F(Resume, AfterASignalFromOutside) {
  const Overrides endless = {"trainer.total_training_steps=1000000", "trainer.save_freq=0", "trainer.samples_freq=0"};
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) {
    fs::remove_all(at("stopped"));
    fs::remove_all(at("whole"));
    std::atomic<bool> ended = false;
    std::thread sender([&] {
      while (!ended && read_text(at("stopped/metrics.jsonl")).find("\"training/global_step\":3") == std::string::npos)
        usleep(1000);
      if (!ended) send(signal);
    });
    const Outcome o = pare("train", "stopped", endless);
    ended = true;
    sender.join();
    expect_code(o, static_cast<int>(Exit::interrupted));
    const auto steps = static_cast<int64_t>(json_lines(at("stopped/metrics.jsonl")).size());
    EXPECT_GE(steps, 3);
    const Overrides end = {cat("trainer.total_training_steps=", steps + 2), "trainer.samples_freq=0"};
    expect_code(pare("train", "stopped", end + Overrides{"--resume"}), 0);
    expect_code(pare("train", "whole", end), 0);
    expect_same("whole", "stopped");
  }
}

// Slurm's warning does not kill a run that still loads: it stops before the first step that it would begin, and what
// was saved stays.
TEST_F(Resume, AfterAWarningWhileItLoads) {
  const std::string rows = read_text(tiny_folder() + "val.jsonl"), pipe = at("rows.jsonl");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const auto ignored = signal(SIGPIPE, SIG_IGN);
  // Reads the rows of the validation, which has none, from a pipe that opens once the signal is sent.
  const auto fed = [&](const std::string& dir, const Overrides& more, bool warns) {
    std::atomic<bool> ended = false;
    std::thread feeder([&, warns]() mutable {
      for (; !ended; usleep(20000)) {
        const int fd = open(pipe.c_str(), O_WRONLY | O_NONBLOCK);
        if (fd < 0) continue;  // nobody reads
        while (child_ == 0) usleep(1000);
        if (std::exchange(warns, false)) send(SIGUSR1);
        EXPECT_GE(::write(fd, rows.data(), rows.size()), -1);
        close(fd);
      }
    });
    const Outcome o = pare("train", dir, more + Overrides{"data.val_files=" + pipe, "trainer.save_freq=2"});
    ended = true;
    feeder.join();
    return o;
  };
  Outcome o = fed("stopped", {}, true);
  expect_code(o, static_cast<int>(Exit::interrupted));
  EXPECT_NE(o.err.find("interrupted before the end of the first step"), std::string::npos) << o.err;
  expect_code(fed("stopped", {"--resume", "trainer.total_training_steps=2"}, false), 0);
  o = fed("stopped", {"--resume"}, true);
  expect_code(o, static_cast<int>(Exit::interrupted));
  EXPECT_NE(o.err.find("interrupted after step 2, which is saved"), std::string::npos) << o.err;
  expect_code(fed("stopped", {"--resume"}, false), 0);
  expect_code(fed("whole", {}, false), 0);
  expect_same("whole", "stopped");
  signal(SIGPIPE, ignored);
}

// A terminal that closes may say so twice, and the system says SIGTERM beside it: the step is saved all the same.
TEST_F(Resume, AfterAHangupSaidTwice) {
  const Overrides keys = {"trainer.save_freq=0", "trainer.samples_freq=0"};
  std::atomic<bool> ended = false;
  std::thread sender([&] {
    while (!ended && read_text(at("stopped/metrics.jsonl")).find("\"training/global_step\":3") == std::string::npos)
      usleep(1000);
    if (!ended) {
      send(SIGHUP);
      send(SIGHUP);
      send(SIGTERM);
    }
  });
  const Outcome o = pare("train", "stopped", keys + Overrides{"trainer.total_training_steps=1000000"});
  ended = true;
  sender.join();
  expect_code(o, static_cast<int>(Exit::interrupted));
  const size_t steps = json_lines(at("stopped/metrics.jsonl")).size();
  EXPECT_EQ(checkpoint_damage(at(cat("stopped/checkpoints/step-", steps))), "");
}

// What a reader leaves: `pare train | head` saves, whether SIGPIPE was ignored before or not.  An ignored SIGHUP, as of
// nohup, stays ignored.
TEST_F(Resume, AfterTheReaderOfItsOutputIsGone) {
  for (const char* before : {"", "trap '' PIPE; ", "trap '' HUP; "}) {
    SCOPED_TRACE(before);
    fs::remove_all(at("run"));
    const bool hangup = std::string(before).find("HUP") != std::string::npos;
    std::string command = program_path().string() + " train --out " + at("run");
    for (const std::string& o : tiny_run() + Overrides{"trainer.save_freq=0", "trainer.samples_freq=0"})
      command += " '" + o + "'";
    command += hangup ? " trainer.total_training_steps=200" : " trainer.total_training_steps=1000000";
    const std::string script = hangup
                                   ? cat(before, command, " & pid=$!; while ! [ -s ", at("run/metrics.jsonl"),
                                         " ]; do sleep 0.01; done; kill -HUP $pid; wait $pid; echo $? > ", at("code"))
                                   : cat("{ ", before, command, "; echo $? > ", at("code"), "; } | sed '/^    3 /q'");
    std::vector<std::string> arguments = {"/bin/sh", "-c", script};
    const Outcome o = run(arguments);
    EXPECT_EQ(read_text(at("code")), hangup ? "0\n" : "75\n") << o.err;
    if (hangup) continue;
    EXPECT_NE(o.err.find("which is saved"), std::string::npos) << o.err;
    const size_t steps = json_lines(at("run/metrics.jsonl")).size();
    EXPECT_EQ(checkpoint_damage(at(cat("run/checkpoints/step-", steps))), "");
  }
}

// Numbers of files that are free are given to the next ones: what is printed must not end up there.
TEST_F(Resume, WithoutStandardStreams) {
  const Overrides keys = {"trainer.save_freq=2", "trainer.samples_freq=1", "actor.token_subset=det"};  // which warns
  ASSERT_EQ(pare("train", "whole", keys).code, 0);
  std::string command = program_path().string() + " train --out " + at("closed");
  for (const std::string& o : tiny_run() + keys) command += " '" + o + "'";
  std::vector<std::string> arguments = {"/bin/sh", "-c", command + " <&- >&- 2>&-"};
  expect_code(run(arguments), 0);
  expect_same("whole", "closed");
  for (const auto& e : fs::recursive_directory_iterator(at("closed"))) {
    if (!e.is_regular_file()) continue;
    const std::string text = read_text(e.path());
    for (const char* printed : {"done     ", "warning  ", "machine  "})
      EXPECT_EQ(text.find(printed), std::string::npos) << e.path();
  }
}

// A run of which tokens differed between sampler and learner: none has been seen, so the state of one says so.
TEST_F(Resume, AMismatchMattersToTheEnd) {
  const Overrides keys = {"trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=0", "trainer.samples_freq=0"};
  const auto differing = [&](int64_t mismatches, const Overrides& more) {
    fs::remove_all(at("run"));
    expect_code(pare("train", "run", keys + more), 0);
    for (const char* name : {"checkpoints/step-4", "model"}) fs::remove_all(at("run/" + std::string(name)));
    const std::string name = "run/checkpoints/step-2/state.json", none = "\"mismatches\": 0";
    EXPECT_GT(read_json_file(at(name))["run"]["checked"], 20);
    std::string state = read_text(at(name));
    const size_t found = state.find(none);
    EXPECT_NE(found, std::string::npos) << state;
    write(name, sealed_again(state.replace(found, none.size(), cat("\"mismatches\": ", mismatches))));
    return pare("train", "run", keys + more + Overrides{"--resume", "--quiet"});
  };
  Outcome o = differing(3, {});
  std::string err = one_line(o.err);
  EXPECT_EQ(o.code, static_cast<int>(Exit::failed)) << o.out;
  for (const char* part :
       {"warning AFTER STEP 2, 3 of ", "exit code 1", " pare: 3 of ", "rollout.on_mismatch=continue"})
    EXPECT_NE(err.find(part), std::string::npos) << part << "\n" << err;
  EXPECT_EQ(err.find("warning"), err.rfind("warning")) << "once: " << err;
  EXPECT_NE(o.out.find("model in "), std::string::npos) << o.out;
  EXPECT_TRUE(fs::exists(at("run/model/model.safetensors"))) << "the run is finished and saved";
  EXPECT_EQ(checkpoint_damage(at("run/checkpoints/step-4")), "");
  EXPECT_EQ(pare("train", "run", keys + Overrides{"--resume"}).code, static_cast<int>(Exit::failed)) << "and stays so";

  o = differing(3, {"rollout.on_mismatch=continue"});
  EXPECT_EQ(o.code, 0) << o.err;
  err = one_line(o.err);
  EXPECT_NE(err.find("warning AFTER STEP 2, 3 of "), std::string::npos) << err;
  EXPECT_EQ(err.find("exit code"), std::string::npos) << err;
  o = differing(0, {});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.err, "");
}

// "None differ" is only said of what was looked at.
TEST_F(Resume, WhatIsNotCheckedIsNotRight) {
  const Outcome o = pare("train", "run", {"rollout.check_exact=false"});
  expect_code(o, 0);
  EXPECT_NE(o.out.find("were not compared"), std::string::npos) << o.out;
  EXPECT_EQ(o.out.find("differ between"), std::string::npos) << o.out;
  for (const auto& line : json_lines(at("run/metrics.jsonl"))) {
    EXPECT_EQ(line["exact/checked_tokens"], 0);
    EXPECT_FALSE(line.contains("exact/mismatch_tokens")) << line;
  }
  const std::string compared = run("compare " + at("run")).out;
  const size_t row = compared.find("of these different");
  ASSERT_NE(row, std::string::npos);
  EXPECT_NE(compared.find("not checked", row), std::string::npos) << compared;
  ASSERT_EQ(run("report " + at("run")).code, 0);
  EXPECT_NE(read_text(at("run/report.html")).find(R"("mismatches":null,"checked":0)"), std::string::npos);
}

// The second signal waits for nothing.
TEST_F(Resume, AfterTwoSignals) {
  const Overrides keys = {"trainer.save_freq=2", "trainer.samples_freq=0"};
  std::atomic<bool> ended = false;
  std::thread sender([&] {
    while (!ended && read_text(at("stopped/metrics.jsonl")).find("\"training/global_step\":5") == std::string::npos)
      usleep(1000);
    if (!ended) {
      send(SIGTERM);
      send(SIGINT);
    }
  });
  const Outcome o = pare("train", "stopped", keys + Overrides{"trainer.total_training_steps=1000000"});
  ended = true;
  sender.join();
  EXPECT_EQ(o.code, static_cast<int>(Exit::interrupted)) << o.err;
  const std::string metrics = read_text(at("stopped/metrics.jsonl"));
  const auto steps = std::count(metrics.begin(), metrics.end(), '\n');
  const Overrides end = {cat("trainer.total_training_steps=", steps + 2)};
  expect_code(pare("train", "stopped", keys + end + Overrides{"--resume"}), 0);
  expect_code(pare("train", "whole", keys + end), 0);
  expect_same("whole", "stopped");
}

TEST_F(Resume, TheResolvedConfigurationIsTheRun) {
  for (const char* kind : {"train", "sft"}) {
    expect_code(pare(kind, cat(kind, "1"), {"trainer.samples_freq=2", "trainer.test_freq=3", "actor.optim.lr=3e-3"}),
                0);
    expect_code(run(cat(kind, " ", at(cat(kind, "1/config.toml")), " --out ", at(cat(kind, "2")))), 0);
    expect_same(cat(kind, "1"), cat(kind, "2"));
  }
}

TEST_F(Resume, ACheckpointThatIsNotWholeIsNotTaken) {
  const Overrides keys = {"trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=0", "trainer.samples_freq=1"};
  expect_code(pare("train", "whole", keys), 0);
  const auto damage = [&](int64_t step, const std::string& file, bool remove) {
    const std::string path = at(cat("run/checkpoints/step-", step, "/", file));
    if (remove)
      fs::remove(path);
    else
      fs::resize_file(path, fs::file_size(path) - 1);
    EXPECT_NE(checkpoint_damage(fs::path(path).parent_path().string()).find(file), std::string::npos);
  };
  fs::copy(at("whole"), at("run"), fs::copy_options::recursive);
  damage(4, "model.safetensors", false);
  damage(3, "state.json", true);
  fs::create_directories(at("run/checkpoints/step-9.tmp"));
  Outcome o = pare("train", "run", keys + Overrides{"--resume"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.err.find("step-4 is not whole: model.safetensors has"), std::string::npos) << o.err;
  EXPECT_NE(o.out.find("goes on after step 2"), std::string::npos) << o.out;
  expect_same("whole", "run");
  EXPECT_FALSE(fs::exists(at("run/checkpoints/step-9.tmp")));
  // A run that is at its end stays as it is.
  expect_code(pare("train", "run", keys + Overrides{"--resume"}), 0);
  expect_same("whole", "run");

  for (int64_t step = 1; step <= 4; step++) damage(step, "optimizer.safetensors", step % 2);
  o = pare("train", "run", keys + Overrides{"--resume"});
  expect_code(o, static_cast<int>(Exit::usage));
  EXPECT_NE(o.err.find("optimizer.safetensors"), std::string::npos) << o.err;
  EXPECT_EQ(json_lines(at("run/metrics.jsonl")).size(), 4u);
}

// One bit, anywhere in any file of a checkpoint; the run goes on from the one before, to the same bits.
TEST_F(Resume, ADamagedBitIsNoticed) {
  fs::copy(tiny_folder() + "trained", at("start"));
  fs::copy_file(tiny_folder() + "tokenizer.bin", at("start/tokenizer.bin"));
  const Overrides keys = {"model.path=" + at("start"), "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=0",
                          "trainer.samples_freq=1", "algorithm.rpo.enable=true"};
  expect_code(pare("train", "whole", keys), 0);
  const std::string folder = at("whole/checkpoints/step-4");
  ASSERT_EQ(checkpoint_damage(folder), "");
  const auto flip = [](const std::string& path, uint64_t bit) {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekg(static_cast<std::streamoff>(bit / 8));
    const int byte = file.get() ^ (1 << bit % 8);
    file.seekp(static_cast<std::streamoff>(bit / 8));
    file.put(static_cast<char>(byte));
  };
  Rng rng(rng_key(11, RngStream::test, 0));
  std::vector<std::string> names;
  for (const auto& e : fs::directory_iterator(folder)) names.push_back(e.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"config.json", "model.safetensors", "optimizer.safetensors",
                                             "prefix_cache.jsonl", "state.json", "tokenizer.ssa"}));
  for (const std::string& name : names) {
    const std::string path = cat(folder, "/", name);
    const auto bits = static_cast<uint32_t>(8 * fs::file_size(path));
    for (int i = 0; i < 200; i++) {
      const uint32_t bit = rng.below(bits);
      flip(path, bit);
      EXPECT_NE(checkpoint_damage(folder).find(name), std::string::npos) << name << ", bit " << bit;
      flip(path, bit);
    }
    ASSERT_EQ(checkpoint_damage(folder), "");

    fs::remove_all(at("run"));
    fs::copy(at("whole"), at("run"), fs::copy_options::recursive);
    flip(at("run/checkpoints/step-4/" + name), rng.below(bits));
    const Outcome o = pare("train", "run", keys + Overrides{"--resume"});
    EXPECT_EQ(o.code, 0) << o.err;
    const std::string said = o.out + o.err;
    EXPECT_NE(said.find("step-4 is not whole"), std::string::npos) << said;
    EXPECT_NE(said.find(name), std::string::npos) << said;
    EXPECT_NE(said.find("goes on after step 3"), std::string::npos) << said;
    expect_same("whole", "run");
  }
}

TEST_F(Resume, ACheckpointOfAnotherFormatSaysWhatToDo) {
  expect_code(pare("train", "run", {}), 0);
  const std::string path = at("run/checkpoints/step-4/state.json");
  std::string text = read_text(path);
  const size_t at_format = text.find("\"format\": ");
  ASSERT_NE(at_format, std::string::npos);
  text[at_format + 10] = '2';
  write("run/checkpoints/step-4/state.json", text);
  const Outcome o = pare("train", "run", {"--resume"});
  expect_code(o, static_cast<int>(Exit::usage));
  EXPECT_NE(o.err.find("state.json: format 2, this program reads"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("model.path=" + at("run/checkpoints/step-4")), std::string::npos) << o.err;
}

TEST_F(Resume, WhatCannotBeContinuedSaysWhy) {
  const Overrides keys = {"actor.use_kl_loss=true", "trainer.save_freq=2"};
  const auto refused = [&](const Overrides& more, const std::vector<std::string>& parts) {
    const Outcome o = pare("train", "run", keys + more + Overrides{"--resume"});
    expect_code(o, static_cast<int>(Exit::usage));
    for (const std::string& part : parts) EXPECT_NE(o.err.find(part), std::string::npos) << part << "\n" << o.err;
  };
  refused({}, {at("run"), "holds no run", "--resume"});
  EXPECT_FALSE(fs::exists(at("run")));
  fs::create_directories(at("run"));
  refused({}, {at("run"), "holds no run"});
  expect_code(pare("train", "run", keys), 0);
  const std::string metrics = read_text(at("run/metrics.jsonl"));
  refused({"actor.optim.lr=1e-3", "rollout.n=3"}, {"step-4", "actor.optim.lr", "rollout.n"});
  refused({"trainer.total_training_steps=3"}, {"trainer.total_training_steps = 3", "4 steps"});
  refused({"actor.optim.lr_scheduler_type=cosine", "trainer.total_training_steps=9"},
          {"actor.optim.lr_scheduler_type"});
  refused({"--force"}, {"--force", "--resume"});
  refused({cat("model.path=", tiny_folder(), "random")}, {"model.path"});
  {
    FolderLock lock(at("run"));
    refused({}, {"another process"});
  }
  {  // the weights of the reference are other ones now
    const std::string path = tiny_folder() + "trained", aside = path + ".aside";
    fs::rename(path, aside);
    fs::copy(tiny_folder() + "random", path);
    refused({}, {path, "reference of its KL"});
    fs::remove_all(path);
    fs::rename(aside, path);
  }
  EXPECT_EQ(read_text(at("run/metrics.jsonl")), metrics);

  // Without a checkpoint a finished run is not begun again unasked.
  expect_code(pare("train", "other", keys + Overrides{"trainer.save_freq=0"}), 0);
  const Outcome o = pare("train", "other", keys + Overrides{"--resume"});
  expect_code(o, static_cast<int>(Exit::usage));
  EXPECT_NE(o.err.find("finished run without a checkpoint"), std::string::npos) << o.err;
  // A new run in the place of an old one does not go on from the old one's checkpoints.
  for (int point = 12; fs::exists(at("run/model/model.safetensors")); point++)
    ASSERT_EQ(pare("train", "run", keys + Overrides{"--force"}, cat(point, ":-", SIGKILL)).code, 128 + SIGKILL);
  expect_code(pare("train", "run", keys + Overrides{"--resume", "actor.optim.lr=1e-3"}), 0);
}

// With a linear schedule the steps that are done depend on how many there are.
TEST_F(Resume, MoreStepsNeedAConstantRate) {
  const Overrides keys = {"actor.optim.lr_scheduler_type=linear", "trainer.save_freq=2"};
  expect_code(pare("train", "run", keys), 0);
  const Outcome o = pare("train", "run", keys + Overrides{"--resume", "trainer.total_training_steps=8"});
  expect_code(o, static_cast<int>(Exit::usage));
  EXPECT_NE(o.err.find("trainer.total_training_steps"), std::string::npos) << o.err;
}

// So do those of a teacher whose noise grows over a part of the run.
TEST_F(Resume, MoreStepsNeedNoNoiseRamp) {
  const Overrides teacher = {"data.task=ssa",        "data.train_files=[]",         "data.val_files=[]",
                             "data.reward=",         "data.max_prompt_length=64",   "data.train_rows=12",
                             "data.val_rows=12",     "data.max_response_length=80", "data.min_statements=2",
                             "data.max_statements=4"};
  for (const char* ramp : {"0", "1"}) {
    const Overrides keys = teacher + Overrides{cat("data.noise_ramp=", ramp)};
    expect_code(pare("sft", ramp, keys), 0);
    const Outcome o = pare("sft", ramp, keys + Overrides{"--resume", "trainer.total_training_steps=8"});
    expect_code(o, *ramp == '1' ? static_cast<int>(Exit::usage) : 0);
    EXPECT_EQ(o.err.find("trainer.total_training_steps") != std::string::npos, *ramp == '1') << o.err;
  }
}

// Two last ones and the best in validation, which gets worse: other answers are trained.
TEST_F(Resume, TheBestCheckpointIsKept) {
  std::string rows = read_text(tiny_folder() + "train.jsonl");
  for (size_t i; (i = rows.find(R"("answer": "a")")) != std::string::npos;) rows[i + 11] = 'b';
  const std::string file = write("b.jsonl", rows);
  expect_code(pare("train", "run",
                   {"trainer.save_freq=3", "trainer.test_freq=1", "trainer.total_training_steps=12",
                    "data.train_files=" + file, "rollout.val_kwargs.temperature=1", "rollout.val_kwargs.n=4"}),
              0);
  double best = -1;
  int64_t step = 0;
  for (const auto& line : json_lines(at("run/metrics.jsonl")))
    if (line["val-core/jsonl/reward/mean@4"] > best) {
      best = line["val-core/jsonl/reward/mean@4"];
      step = line["training/global_step"];
    }
  ASSERT_LT(step, 9) << "the run must have its best step early";
  std::vector<std::string> kept;
  for (const auto& e : fs::directory_iterator(at("run/checkpoints"))) kept.push_back(e.path().filename());
  std::sort(kept.begin(), kept.end());
  EXPECT_EQ(kept, (std::vector<std::string>{"step-12", cat("step-", step), "step-9"})) << best;
  const auto state = read_json_file(at("run/checkpoints/step-12/state.json"))["run"];
  EXPECT_EQ(state["best_step"], step);
  EXPECT_EQ(state["best_score"], best);
}

// The model has the type of the weights that the run began with, a checkpoint f32 masters: half a run from it has the
// same bits.
TEST_F(Resume, AModelIsSavedInTheTypeItCameIn) {
  const ModelConfig config = load_model_config(tiny_folder() + "trained");
  const std::vector<float> trained = load_weights(tiny_folder() + "trained", config);
  const std::map<DType, std::pair<const char*, const char*>> words = {
      {DType::f32, {"F32", "float32"}}, {DType::bf16, {"BF16", "bfloat16"}}, {DType::f16, {"F16", "float16"}}};
  const auto expect_type = [&](const std::string& folder, DType dtype) {
    SCOPED_TRACE(folder);
    const SafetensorsFile file(folder + "/model.safetensors");
    for (const SafetensorsTensor& t : file.tensors()) EXPECT_EQ(t.dtype, words.at(dtype).first) << t.name;
    EXPECT_EQ(read_json_file(folder + "/config.json")["torch_dtype"], words.at(dtype).second);
  };
  // The weights of the folder, rounded by what write_safetensors is tested for.
  const auto rounded = [&](const std::string& folder, DType dtype) {
    save_weights(at("rounded"), config, load_weights(folder, config), dtype, true);
    return load_weights(at("rounded"), config);
  };
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    save_weights(at("start"), config, trained, dtype, true);
    const Overrides keys = {"model.path=" + at("start")};
    for (const char* dir : {"whole", "parts", "other"}) fs::remove_all(at(dir));
    expect_code(pare("train", "whole", keys), 0);
    expect_code(pare("train", "parts", keys + Overrides{"trainer.total_training_steps=2"}), 0);
    expect_code(pare("train", "parts", keys + Overrides{"--resume"}), 0);
    expect_same("whole", "parts");
    const std::string checkpoint = at("whole/checkpoints/step-4");
    expect_type(at("whole/model"), dtype);
    expect_type(checkpoint, DType::f32);
    EXPECT_EQ(load_weights(at("whole/model"), config), rounded(checkpoint, dtype));
    if (dtype != DType::f32) {
      EXPECT_NE(load_weights(checkpoint, config), rounded(checkpoint, dtype)) << "training must leave the grid";
    }

    // Asked for another one, also afterwards: it changes no step.
    const DType asked = dtype == DType::bf16 ? DType::f32 : DType::bf16;
    const std::string key = dtype == DType::bf16 ? "trainer.save_dtype=f32" : "trainer.save_dtype=bf16";
    expect_code(pare("train", "parts", keys + Overrides{"--resume", key}), 0);
    expect_type(at("parts/model"), asked);
    EXPECT_EQ(load_weights(at("parts/model"), config), rounded(checkpoint, asked));
    EXPECT_TRUE(read_text(at("parts/checkpoints/step-4/model.safetensors")) ==
                read_text(checkpoint + "/model.safetensors"));
    expect_code(pare("train", "other", keys + Overrides{"trainer.save_dtype=f16"}), 0);
    expect_type(at("other/model"), DType::f16);
  }
  expect_code(pare("train", "random", {"model.path=", cat("model.config=", tiny_folder(), "config.json")}), 0);
  expect_type(at("random/model"), DType::f32);
}

// A checkpoint is a model folder that others can start from.
TEST_F(Resume, ACheckpointIsAModel) {
  expect_code(pare("sft", "first", {"trainer.save_freq=2"}), 0);
  EXPECT_TRUE(read_text(at("first/checkpoints/step-4/model.safetensors")) ==
              read_text(at("first/model/model.safetensors")));
  expect_code(pare("train", "second", {cat("model.path=", at("first/checkpoints/step-4"))}), 0);
}

}  // namespace
}  // namespace pare::test
