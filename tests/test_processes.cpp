// Runs of several ranks that the program starts itself: --ranks.
#include <sched.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "tests/rank_runs.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class Processes : public RankRuns {
 protected:
  // The tiny run in DIR on this number of ranks, or another program and variables of the environment before it.
  Outcome job(int ranks, const std::string& dir, const Overrides& more, const Overrides& environment = {}) const {
    Overrides all = Overrides{"/usr/bin/env"} + environment + Overrides{program_.string()} +
                    train(dir, Overrides{"--ranks", cat(ranks)} + more);
    return run(all);
  }
  // The same, and f() in a thread of its own once its first step is done.
  template <class F>
  Outcome struck(int ranks, const Overrides& more, const Overrides& environment, F f) const {
    std::atomic<bool> ended = false;
    std::thread striker([&] {
      while (!ended && read_text(at("run/metrics.jsonl")).empty())
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (!ended) f();
    });
    const Outcome o = job(ranks, "run", more, environment);
    ended = true;
    striker.join();
    return o;
  }
  // Processes of the tiny run in DIR, by their names: "pare rank 1".
  std::map<std::string, pid_t> processes() const {
    std::map<std::string, pid_t> found;
    for (const auto& e : fs::directory_iterator("/proc")) {
      const std::string name = e.path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      std::string program = read_text(e.path() / "comm");
      if (read_text(e.path() / "cmdline").find(at("run")) == std::string::npos || program.empty()) continue;
      program.pop_back();
      found[program] = static_cast<pid_t>(std::stol(name));
    }
    return found;
  }
  // One message, which names the rank.
  static void expect_named(const Outcome& o, const std::string& rank, const std::string& what) {
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    EXPECT_TRUE(std::regex_search(o.err, std::regex(cat("^pare: ", rank, " \\(process [0-9]+\\) ", what,
                                                        ": it was in step [0-9]+, at [^;]+; rank [0-9] is in step"))))
        << o.err;
  }

  fs::path program_ = program_path();
};

TEST_F(Processes, AnyNumberHasTheBitsOfOne) {
  const Overrides keys = {"learner.shards=12", "trainer.total_training_steps=2"};
  ASSERT_EQ(alone("one", keys).code, 0);
  for (const int ranks : {1, 2, 3, 4}) {
    SCOPED_TRACE(ranks);
    const std::string dir = cat("by", ranks);
    const Outcome o = job(ranks, dir, keys);
    ASSERT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(o.err, "");
    EXPECT_EQ(one_line(o.out).find("GRPO"), one_line(o.out).rfind("GRPO")) << "rank 0 alone prints";
    expect_same("one", dir, 2);
  }
}

TEST_F(Processes, ResumeOnAnotherNumber) {
  const auto until = [](int steps) {
    return Overrides{"learner.shards=6", "trainer.test_freq=1", cat("trainer.total_training_steps=", steps)};
  };
  ASSERT_EQ(alone("whole", until(4)).code, 0);
  for (const auto& [ranks, steps] : {std::pair{2, 1}, {3, 2}, {1, 3}, {6, 4}}) {
    const Outcome o = job(ranks, "moved", until(steps) + Overrides(steps > 1 ? 1 : 0, "--resume"));
    ASSERT_EQ(o.code, 0) << o.err;
  }
  expect_same("whole", "moved", 4);
}

// Neither the number of ranks nor the size of the files, which may change, is in the bits of a checkpoint.
TEST_F(Processes, CheckpointsInSeveralFiles) {
  const Overrides keys = {"learner.shards=6", "trainer.test_freq=1", "trainer.max_file_bytes=3000"};
  ASSERT_EQ(alone("whole", keys + Overrides{"trainer.total_training_steps=3"}).code, 0);
  for (const auto& [ranks, steps, most] : {std::tuple{3, 1, 3000}, {2, 2, 9000}, {3, 3, 3000}}) {
    const Outcome o =
        job(ranks, "moved",
            keys + Overrides{cat("trainer.max_file_bytes=", most), cat("trainer.total_training_steps=", steps)} +
                Overrides(steps > 1 ? 1 : 0, "--resume"),
            {"PARE_NODE_RANKS=2"});
    ASSERT_EQ(o.code, 0) << o.err;
  }
  EXPECT_EQ(timeless(at("whole/metrics.jsonl")), timeless(at("moved/metrics.jsonl")));
  int parts = 0;
  for (const char* folder : {"/model", "/checkpoints/step-3"})
    for (const auto& e : fs::directory_iterator(at(cat("whole", folder)))) {
      const std::string name = e.path().filename();
      if (name == "state.json") continue;
      parts += name.find("-of-") != name.npos;
      EXPECT_TRUE(read_text(e.path()) == read_text(at(cat("moved", folder, "/", name)))) << folder << "/" << name;
    }
  EXPECT_GE(parts, 8);
  EXPECT_EQ(checkpoint_damage(at("moved/checkpoints/step-3")), "");
  for (const auto& e : fs::directory_iterator(at("moved/checkpoints/step-3")))
    if (const std::string name = e.path().filename(); name.starts_with("optimizer-00002-of-")) {
      fs::resize_file(e.path(), 500);
      EXPECT_EQ(checkpoint_damage(at("moved/checkpoints/step-3")).find(name), 0u);
      parts = 0;
    }
  EXPECT_EQ(parts, 0);
}

// The two commands of the README, on the CPU and emulated, by both ways between devices.
TEST_F(Processes, TheQuickstart) {
  const auto pare = [&](const fs::path& program, const std::string& words) {
    Overrides all = {program.string()};
    std::istringstream in(words);
    for (std::string word; in >> word;) all.push_back(word);
    const Outcome o = run(all);
    ASSERT_EQ(o.code, 0) << words << ": " << o.err;
  };
  const std::string steps =
      " trainer.total_training_steps=2 trainer.test_freq=0 trainer.val_before_train=false --quiet ";
  pare(program_path(), cat("sft quickstart-sft", steps, "--out ", at("sft")));
  const auto compare = [&](const fs::path& program, const std::string& keys, const Overrides& ways) {
    const std::string words = cat("train quickstart model.path=", at("sft"),
                                  "/model data.train_batch_size=3 rollout.n=2 ", "learner.shards=6 ", keys, steps);
    pare(program, cat(words, "--out ", at("one")));
    for (const std::string& way : ways) {
      pare(program, cat(words, way, " --out ", at("several")));
      EXPECT_EQ(read_text(at("one/certificates.jsonl")), read_text(at("several/certificates.jsonl"))) << way;
      EXPECT_TRUE(read_text(at("one/model/model.safetensors")) == read_text(at("several/model/model.safetensors")));
      fs::remove_all(at("several"));
    }
    fs::remove_all(at("one"));
  };
  compare(program_path(), "", {"--ranks 2", "--ranks 3"});
  const fs::path emulated = program_path().parent_path() / "emu/pare";
  if (!fs::exists(emulated)) GTEST_SKIP() << emulated << " is not built: run `make emu`";
  compare(emulated, "--device emu data.max_response_length=12 trainer.total_training_steps=1",
          {"--ranks 2 trainer.comm=host", "--ranks 3 trainer.comm=nccl"});
}

// As mpirun binds them.
TEST_F(Processes, RanksBoundToACoreEachSaySo) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  const int64_t cores = sysconf(_SC_NPROCESSORS_ONLN);
  if (cores < 2) GTEST_SKIP() << "this machine has one core";
  CPU_ZERO(&one);
  for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
    if (CPU_ISSET(i, &before)) CPU_SET(i, &one);
  const std::string note = cat("to 1 of its ", cores, " cores, so that each has one thread; mpirun --bind-to none");
  const Overrides keys = {"trainer.threads=0", "trainer.total_training_steps=1"};
  sched_setaffinity(0, sizeof one, &one);
  const Outcome bound = job(2, "bound", keys), alone = job(1, "alone", keys);
  sched_setaffinity(0, sizeof before, &before);
  EXPECT_EQ(bound.code, 0) << bound.err;
  EXPECT_NE(one_line(bound.out + bound.err).find(note), std::string::npos) << bound.err;
  EXPECT_EQ(one_line(alone.out + alone.err).find("so that each has"), std::string::npos) << alone.err;
}

// The emulator has eight devices.
TEST_F(Processes, MoreRanksThanDevicesAreRefused) {
  program_ = program_path().parent_path() / "emu/pare";
  if (!fs::exists(program_)) GTEST_SKIP() << program_ << " is not built: run `make emu`";
  const Outcome o = job(9, "run", {"learner.shards=9", "trainer.device=emu"});
  EXPECT_EQ(o.code, 2);
  EXPECT_EQ(o.err.find("pare: rank 0: ranks 0 and 8 have one device between them; "), 0) << o.err;
  EXPECT_NE(o.err.find("start fewer, or set trainer.comm=host"), std::string::npos) << o.err;
  EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
}

// ---- NCCL, by its stand-in

class Nccl : public Processes {
 protected:
  void SetUp() override {
    Processes::SetUp();
    program_ = program_path().parent_path() / "emu/pare";
    if (!fs::exists(program_)) GTEST_SKIP() << program_ << " is not built: run `make emu`";
  }
  const Overrides keys_ = {"trainer.device=emu",  "data.max_response_length=6", "data.train_batch_size=2",
                           "trainer.test_freq=0", "trainer.comm=nccl",          "trainer.total_training_steps=1"};
};

// The network fails while all hosts wait for their devices.
TEST_F(Nccl, AnErrorIsToldWhileTheHostWaits) {
  for (const int rank : {0, 1}) {
    fs::remove_all(at("run"));
    const Outcome o = job(2, "run", keys_, {cat("CUEMU_NCCL_FAULT=", rank, ":4")});
    EXPECT_EQ(o.code, 1);
    EXPECT_TRUE(
        std::regex_search(o.err, std::regex(cat("^pare: rank ", rank,
                                                ": NCCL 2.21.5, the work between ranks: unhandled system error \\(the "
                                                "network of rank ",
                                                rank,
                                                " failed\\); NCCL_DEBUG=INFO in the environment says more; it "
                                                "was in step [0-9]+, at [a-z_]+\n$"))))
        << o.err;
  }
}

// A rank that never calls ncclCommInitRank.
TEST_F(Nccl, ConnectingHasALimit) {
  const Outcome o = job(2, "run", keys_, {"CUEMU_NCCL_FAULT=1:init", "PARE_SILENCE=1"});
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.err.find("pare: rank 0: NCCL 2.21.5 has not connected the ranks for 2 s; "), 0) << o.err;
  EXPECT_NE(o.err.find("; it was in step 0, at connecting by NCCL"), std::string::npos) << o.err;
}

// The run is complete, and its exit code says so.
TEST_F(Nccl, ADestroyThatHangsIsNoFailure) {
  ASSERT_EQ(job(2, "whole", keys_).code, 0);
  const Outcome o = job(2, "run", keys_, {"CUEMU_NCCL_FAULT=1:destroy", "PARE_SILENCE=6"});
  EXPECT_EQ(o.code, 0) << o.err;
  for (const int rank : {0, 1})
    EXPECT_NE(o.err.find(cat("rank ", rank, ": ncclCommDestroy has not returned for 1 s; the rank ends without it\n")),
              std::string::npos)
        << o.err;
  expect_same("whole", "run", 1);
}

TEST_F(Nccl, ADestroyThatHangsKeepsTheCodeOfAnInterrupt) {
  const Overrides fault = {"CUEMU_NCCL_FAULT=1:destroy", "PARE_SILENCE=6"};
  const Outcome o = struck(2, keys_ + kEndless, fault, [&] { send(SIGUSR1); });
  EXPECT_EQ(o.code, 75) << o.err;
  EXPECT_NE(o.err.find("which is saved; continue with"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("ncclCommDestroy has not returned for 1 s"), std::string::npos) << o.err;
}

// Work with the others never ends, and NCCL has an error; but the launcher knows what has happened.
TEST_F(Nccl, KilledRankIsNamed) {
  const Outcome o = struck(2, keys_ + kEndless, {}, [&] { kill(processes().at("pare rank 1"), SIGKILL); });
  EXPECT_EQ(o.code, 1);
  expect_named(o, "rank 1", "was ended by signal 9 \\(Killed\\), which the kernel sends if memory runs out");
  EXPECT_TRUE(processes().empty()) << "nothing is left running";
}

// Delays between ranks, a site's NCCL_COMM_BLOCKING=0, a library before 2.13, and two machines change no bit.
TEST_F(Nccl, NothingOfItsSurroundingsChangesABit) {
  const Overrides two_nodes = {"trainer.n_gpus_per_node=2", "trainer.nnodes=2"};
  ASSERT_EQ(job(1, "whole", keys_).code, 0);
  for (const auto& [environment, more] :
       {std::pair{Overrides{"CUEMU_NCCL_DELAY=20"}, Overrides{}},
        {{"NCCL_COMM_BLOCKING=0", "CUEMU_NCCL_VERSION=21202", "CUEMU_NCCL_WITHOUT=ncclGetLastError"}, {}},
        {{"PARE_NODE_RANKS=2", "CUEMU_NCCL_DELAY=5"}, two_nodes}}) {
    SCOPED_TRACE(environment[0]);
    fs::remove_all(at("run"));
    const Outcome o = job(4, "run", keys_ + more, environment);
    ASSERT_EQ(o.code, 0) << o.err;
    expect_same("whole", "run", 1);
  }
}

// An error of the network is told without its words, too.
TEST_F(Nccl, LibrariesThatLackSomething) {
  const auto expect = [&](const Overrides& environment, int code, const std::string& message) {
    const Outcome o = job(2, "run", keys_, environment);
    EXPECT_EQ(o.code, code) << o.err;
    EXPECT_EQ(o.err.find("pare: rank 0: " + message), 0) << o.err;
    fs::remove_all(at("run"));
  };
  expect({"CUEMU_NCCL_VERSION=2902"}, 2, "NCCL 2.9.2 was found, 2.10 or later is needed");
  expect({"CUEMU_NCCL_WITHOUT=ncclBroadcast"}, 2,
         "the NCCL that was found has no ncclBroadcast: version 2.10 or later");
  expect({"CUEMU_NCCL_WITHOUT=ncclGetLastError", "CUEMU_NCCL_FAULT=0:4"}, 1,
         "NCCL 2.21.5, the work between ranks: unhandled system error; NCCL_DEBUG=INFO");
}

// NCCL 2.30 lets ranks share a device if it is told to; others do not, and say how to.
TEST_F(Nccl, RanksShareADeviceFromVersion230On) {
  const auto one_device = [&](const std::string& version, const std::string& enable) {
    fs::remove_all(at("run"));
    return job(2, "run", keys_,
               {"CUEMU_DEVICES=1", "CUEMU_NCCL_VERSION=" + version, "NCCL_MULTI_RANK_GPU_ENABLE=" + enable});
  };
  ASSERT_EQ(job(1, "whole", keys_).code, 0);
  Outcome o = one_device("23007", "1");
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_NE(one_line(o.out).find("between ranks by NCCL 2.30.7, which has taken 5.77MB"), std::string::npos) << o.out;
  expect_same("whole", "run", 1);
  for (const auto& [version, enable] : {std::pair{"22907", "1"}, {"23007", "0"}}) {
    o = one_device(version, enable);
    EXPECT_EQ(o.code, 2);
    EXPECT_NE(o.err.find("NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment lets it share"), std::string::npos) << o.err;
  }
}

TEST_F(Processes, KilledRankIsNamed) {
  for (const int rank : {0, 1}) {
    fs::remove_all(at("run"));
    const Outcome o = struck(3, kEndless + Overrides{"learner.shards=3"}, {},
                             [&] { kill(processes().at(cat("pare rank ", rank)), SIGKILL); });
    EXPECT_EQ(o.code, 1);
    expect_named(o, cat("rank ", rank),
                 "was ended by signal 9 \\(Killed\\), which the kernel sends if memory runs out");
    EXPECT_TRUE(processes().empty()) << "nothing is left running";
  }
}

TEST_F(Processes, FrozenRankIsNamed) {
  const Outcome o = struck(2, kEndless, {"PARE_SILENCE=3"}, [&] { kill(processes().at("pare rank 1"), SIGSTOP); });
  EXPECT_EQ(o.code, 1);
  expect_named(o, "rank 1", "has not been heard of for [0-9]+ s");
  EXPECT_TRUE(processes().empty()) << "nothing is left running";
}

// All processes of the job stand still, and go on.
TEST_F(Processes, SuspendedJobGoesOn) {
  const Outcome o = struck(2, kEndless, {"PARE_SILENCE=3"}, [&] {
    for (const auto& [name, process] : processes()) kill(process, SIGSTOP);
    std::this_thread::sleep_for(std::chrono::milliseconds(3500));
    for (const auto& [name, process] : processes()) kill(process, SIGCONT);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    send(SIGTERM);
  });
  EXPECT_EQ(o.code, 75) << o.err;
}

TEST_F(Processes, NoRankOutlivesTheLauncher) {
  const Outcome o = struck(2, kEndless, {}, [&] { send(SIGKILL); });
  EXPECT_EQ(o.code, 128 + SIGKILL);
  for (int i = 0; i < 500 && !processes().empty(); i++) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_TRUE(processes().empty());
}

// Whether the launcher alone gets the signal or, from a terminal or a scheduler, all processes of the job.
TEST_F(Processes, SignalsSaveAndEndWith75) {
  std::signal(SIGINT, SIG_DFL);  // nohup's are inherited, and obeyed
  std::signal(SIGHUP, SIG_DFL);
  for (const int signal : {SIGUSR1, SIGTERM, SIGINT, SIGHUP})
    for (const bool all : {false, true}) {
      SCOPED_TRACE(cat("signal ", signal, all ? " to all" : ""));
      fs::remove_all(at("run"));
      const Outcome o = struck(2, kEndless, {}, [&] {
        for (const auto& [name, process] : processes())
          if (all && process != child_) kill(process, signal);
        send(signal);
      });
      EXPECT_EQ(o.code, 75) << o.err;
      EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
      EXPECT_NE(o.err.find("which is saved; continue with"), std::string::npos) << o.err;
      int checkpoints = 0;
      for (const auto& e : fs::directory_iterator(at("run/checkpoints"))) {
        EXPECT_EQ(checkpoint_damage(e.path().string()), "");
        checkpoints++;
      }
      EXPECT_EQ(checkpoints, 1);
    }
}

// A scheduler's own signal is pending to a rank when the launcher passes its on: the kernel merges the two.
TEST_F(Processes, MergedSignalsAreNotLost) {
  const Outcome o = struck(2, kEndless, {}, [&] {
    const std::map<std::string, pid_t> all = processes();
    for (const char* rank : {"pare rank 0", "pare rank 1"}) {
      kill(all.at(rank), SIGSTOP);
      while (read_text(cat("/proc/", all.at(rank), "/stat")).find(") T ") == std::string::npos)
        std::this_thread::yield();
      kill(all.at(rank), SIGTERM);
    }
    send(SIGTERM);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    for (const char* rank : {"pare rank 0", "pare rank 1"}) kill(all.at(rank), SIGCONT);
  });
  EXPECT_EQ(o.code, 75) << o.err;
}

// The first waits for the step, in which the grader takes a minute.
TEST_F(Processes, ASecondSignalEndsAtOnce) {
  const std::string grader =
      write("grader.sh", cat("mkdir -p ", at("run"), "; echo >", at("run/metrics.jsonl"), "; sleep 60\n"));
  const Outcome o = struck(2, {"data.reward=command:sh " + grader, "trainer.test_freq=0"}, {}, [&] {
    send(SIGTERM);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    send(SIGTERM);
  });
  EXPECT_EQ(o.code, 75) << o.err;
  EXPECT_EQ(o.err, "");
  EXPECT_TRUE(processes().empty());
}

// While it starts and loads a signal ends it as it ends a program without ranks, with nothing left behind.
TEST_F(Processes, SignalsAtTheStart) {
  for (int milliseconds = 0; milliseconds < 60; milliseconds += 3) {
    SCOPED_TRACE(milliseconds);
    fs::remove_all(at("run"));
    std::thread striker([&] {
      while (child_ == 0) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
      send(SIGTERM);
    });
    const Outcome o = job(2, "run", kEndless);
    striker.join();
    EXPECT_TRUE(o.code == 128 + SIGTERM || o.code == 75) << o.code << ": " << o.err;
    EXPECT_TRUE(o.code == 75 || o.err == "") << o.err;
    EXPECT_TRUE(processes().empty());
  }
}

// One message, whether all ranks find the error or one of them.
TEST_F(Processes, ErrorKeepsItsExitCode) {
  const auto expect = [&](const Outcome& o, int code, const std::string& message) {
    EXPECT_EQ(o.code, code) << o.err;
    EXPECT_EQ(o.err.find("pare: rank 0: "), 0) << o.err;
    EXPECT_NE(o.err.find(message), std::string::npos) << o.err;
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
  };
  expect(job(2, "shards", {"learner.shards=3"}), 2, "learner.shards = 3 cannot be dealt to 2 ranks; 4 can, and 8");
  expect(job(2, "memory", {"rollout.kv_cache_bytes=1"}), 3, "");
  expect(job(2, "full", {}, {cat("PARE_FAULT=12:", ENOSPC)}), 1, "No space left on device");
  expect(job(2, "model", {"model.path=nowhere"}), 2, "nowhere");
  Overrides lost = Overrides{program_.string()} +
                   train("lost", {"--ranks", "2", "actor.optim.lr=1e30", "trainer.total_training_steps=9"});
  lost[1] = "sft";
  expect(run(lost), 4, "not finite");
}

// Each rank starts a grader; one of these fails.
TEST_F(Processes, ErrorOfOneRankIsNamed) {
  const std::string grader =
      write("grader.sh", cat("mkdir ", at("lock"), " || exit 3\nwhile read -r line; do echo '{\"score\": 1}'; done\n"));
  const Outcome o = job(2, "run", {"data.reward=command:sh " + grader, "trainer.test_freq=0"});
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_TRUE(std::regex_search(o.err, std::regex("^pare: rank [01]: .*exited with code 3"))) << o.err;
  EXPECT_EQ(o.err.find("pare: "), o.err.rfind("pare: ")) << o.err;
}

TEST_F(Processes, KilledAtAWrite) {
  const Overrides keys = {"trainer.total_training_steps=2"};
  ASSERT_EQ(alone("whole", keys).code, 0);
  const Outcome o = job(2, "run", keys, {cat("PARE_FAULT=30:-", SIGKILL)});
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_NE(o.err.find("pare: rank 0 "), std::string::npos) << o.err;
  ASSERT_EQ(job(4, "run", keys + Overrides{"--resume"}).code, 0);
  expect_same("whole", "run", 2);
}

TEST_F(Processes, SlowGraderIsWaitedFor) {
  const std::string grader = write("grader.sh", "sleep 3\nwhile read -r line; do echo '{\"score\": 1}'; done\n");
  const Outcome o = job(2, "run",
                        {"data.reward=command:sh " + grader, "trainer.nccl_timeout=1", "trainer.total_training_steps=1",
                         "trainer.test_freq=0"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.err.find("it is at grading"), std::string::npos) << o.err;
}

// Evaluation and audits are dealt as well.
TEST_F(Processes, EvalAndAudit) {
  const Overrides eval = Overrides{program_.string(), "eval"} + tiny_run() + Overrides{"--n", "3", "--quiet"};
  Overrides one = eval + Overrides{"--out", at("one.jsonl")},
            three = eval + Overrides{"--ranks", "3", "--out", at("three.jsonl")};
  ASSERT_EQ(run(one).code, 0);
  ASSERT_EQ(run(three).code, 0);
  EXPECT_FALSE(read_text(at("one.jsonl")).empty());
  EXPECT_EQ(read_text(at("one.jsonl")), read_text(at("three.jsonl")));
  ASSERT_EQ(job(2, "run", {"trainer.total_training_steps=2"}).code, 0);
  const Outcome audit = run(cat("audit ", at("run"), " --step 2 --ranks 4"));
  EXPECT_EQ(audit.code, 0) << audit.err;
  EXPECT_EQ(std::count(audit.out.begin(), audit.out.end(), '\n'), 2) << "rank 0 alone prints: " << audit.out;
}

// Each op between ranks, with the bytes that a rank sends of a tensor of this size.
TEST_F(Processes, LinksAreMeasured) {
  Outcome o = run("bench --links 4104,70001 --ranks 3 --json --threads 1");
  ASSERT_EQ(o.code, 0) << o.err;
  std::stringstream lines(o.out);
  std::vector<std::string> ops;
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json row = nlohmann::json::parse(line);
    ops.push_back(row["op"]);
    const int64_t part = int64_t{row["bytes"]} / 12, size = row["type"] == "f32" ? 4 : 2;
    EXPECT_EQ(row["sent"], 2 * part * size) << line;
    EXPECT_DOUBLE_EQ(row["bytes_per_second"], double(row["sent"]) / double(row["seconds"])) << line;
  }
  const std::vector<std::string> once = {"all_to_all", "all_gather"};
  EXPECT_EQ(ops.size(), 4u);
  EXPECT_TRUE(std::equal(once.begin(), once.end(), ops.begin()));
  for (const auto& [words, why] : {std::pair{"--links 4 --ranks 3", "so few bytes cannot be shared by 3 ranks"},
                                   {"--links 4096", "--links needs several ranks"},
                                   {"--ranks 2", "with --links alone"},
                                   {"--links 4096 --ranks 2 --seconds 1", "and --seconds out"},
                                   {"--links 4096,x --ranks 2", "--links"}}) {
    o = run(std::string("bench ") + words);
    EXPECT_EQ(o.code, 2) << words;
    EXPECT_NE(o.err.find(why), std::string::npos) << words << ": " << o.err;
  }
}

TEST_F(Processes, WrongNumbersAreRefused) {
  for (const char* number : {"0", "x", "99999", "-1", "1.5", ""}) {
    Overrides words = Overrides{program_.string()} + train("run", {"--ranks", number});
    const Outcome o = run(words);
    EXPECT_EQ(o.code, 2) << number;
    EXPECT_NE(o.err.find("--ranks"), std::string::npos) << o.err;
  }
  EXPECT_FALSE(fs::exists(at("run")));
  Outcome o = job(3, "run", {"trainer.n_gpus_per_node=2", "learner.shards=3"});
  EXPECT_EQ(o.code, 2);
  EXPECT_NE(o.err.find("trainer.n_gpus_per_node = 2, but 3 ranks were started"), std::string::npos) << o.err;
  o = alone("run", {"trainer.n_gpus_per_node=2"});
  EXPECT_NE(o.err.find("but 1 ranks were started on "), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("; --ranks 2 starts as many"), std::string::npos) << o.err;
  // One launcher is enough.
  o = job(2, "run", {}, {"OMPI_COMM_WORLD_SIZE=2"});
  EXPECT_EQ(o.code, 2);
  EXPECT_NE(o.err.find("mpirun of Open MPI started this program as one of 2 ranks"), std::string::npos) << o.err;
}

}  // namespace
}  // namespace pare::test
