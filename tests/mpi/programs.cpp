// Runs of several ranks as their users start them.
#include <algorithm>
#include <csignal>
#include <thread>

#include "tests/rank_runs.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class Ranks : public RankRuns {
 protected:
  static void SetUpTestSuite() {
    RankRuns::SetUpTestSuite();
    // More ranks than cores, and by anyone: Open MPI asks.
    for (const char* name :
         {"OMPI_MCA_rmaps_base_oversubscribe", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"})
      setenv(name, "1", 1);
  }

  // A part of a job: `ranks` of the tiny run in DIR.
  Overrides part(int ranks, const std::string& dir, const Overrides& more, const Overrides& environment = {}) {
    return Overrides{"-n", cat(ranks), "/usr/bin/env"} + environment + Overrides{program_path().string()} +
           train(dir, more);
  }
  Outcome job(const Overrides& parts) {
    const char* mpirun = std::getenv("PARE_MPIRUN");
    Overrides all = Overrides{"/usr/bin/env", mpirun ? mpirun : "mpirun"} + parts;
    return run(all);
  }
};

// mpirun with one rank, a program without it, and no shards: three times the same run.
TEST_F(Ranks, OneShardIsTheRunWithoutRanks) {
  const Outcome one = job(part(1, "one", {"learner.shards=1"}));
  ASSERT_EQ(one.code, 0) << one.err;
  ASSERT_EQ(alone("alone", {"learner.shards=1"}).code, 0);
  expect_same("alone", "one", 4);
}

TEST_F(Ranks, ResumeOnAnotherNumber) {
  const auto until = [](int steps) { return cat("trainer.total_training_steps=", steps); };
  ASSERT_EQ(alone("whole", {until(5)}).code, 0);
  Outcome o = job(part(2, "moved", {until(2)}));
  ASSERT_EQ(o.code, 0) << o.err;
  o = job(part(4, "moved", {until(4), "--resume"}));
  ASSERT_EQ(o.code, 0) << o.err;
  o = alone("moved", {until(5), "--resume"});
  ASSERT_EQ(o.code, 0) << o.err;
  expect_same("whole", "moved", 5);
  o = job(part(2, "moved", {until(6), "--resume", "trainer.balance_batch=false"}));
  EXPECT_EQ(o.code, 2) << o.err;
  EXPECT_NE(o.err.find("trainer.balance_batch"), std::string::npos) << o.err;
}

// A new run from a checkpoint goes on as the run would have, on any number of ranks.
TEST_F(Ranks, StartFromACheckpointOnAnotherNumber) {
  const auto until = [](int steps) { return cat("trainer.total_training_steps=", steps); };
  const Overrides keys = {"trainer.device=emu", "data.max_response_length=6", "data.train_batch_size=2",
                          "trainer.test_freq=0", "actor.optim.moments=bf16"};
  const std::string from = at("first/checkpoints/step-1");
  ASSERT_EQ(alone("whole", keys + Overrides{until(3)}).code, 0);
  Outcome o = job(part(2, "first", keys + Overrides{until(1)}));
  ASSERT_EQ(o.code, 0) << o.err;
  o = job(part(4, "second", keys + Overrides{until(1), "--from", from}));
  ASSERT_EQ(o.code, 0) << o.err;
  o = job(part(2, "second", keys + Overrides{until(2), "--resume", "trainer.from_checkpoint=" + from}));
  ASSERT_EQ(o.code, 0) << o.err;
  for (const char* file : {"model.safetensors", "optimizer.safetensors"})
    EXPECT_TRUE(read_text(at(cat("whole/checkpoints/step-3/", file))) ==
                read_text(at(cat("second/checkpoints/step-2/", file))))
        << file;
}

// Whoever computed a step, anyone can compute it again: on the CPU, and emulated on another number of threads.
TEST_F(Ranks, AnAuditTakesAnyNumber) {
  const auto audited = [&](int ranks, const std::string& dir, const std::string& step, const Overrides& more = {}) {
    const Overrides words = Overrides{program_path().string(), "audit", at(dir), "--step", step} + more;
    Overrides by_ranks = Overrides{"-n", cat(ranks)} + words, by_one = words;
    const Outcome o = ranks > 1 ? job(by_ranks) : run(by_one);
    EXPECT_EQ(o.code, 0) << ranks << ": " << o.err;
    EXPECT_NE(o.out.find(cat("step ", step, ": ")), std::string::npos) << o.out;
    EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), 2) << "rank 0 alone prints: " << o.out;
  };
  const Overrides three = {"trainer.total_training_steps=3", "exact.full=true"};
  ASSERT_EQ(alone("alone", three).code, 0);
  ASSERT_EQ(job(part(2, "two", three)).code, 0);
  expect_same("alone", "two", 3);
  for (const char* dir : {"alone", "two"}) {
    for (const int ranks : {1, 2, 4}) audited(ranks, dir, "3");
    audited(2, dir, "1", {"trainer.threads=1"});
  }
  const Overrides emulated = {"trainer.device=emu",  "data.max_response_length=6", "data.train_batch_size=2",
                              "trainer.test_freq=0", "trainer.threads=2",          "trainer.total_training_steps=2",
                              "exact.full=true"};
  ASSERT_EQ(job(part(2, "emu", emulated)).code, 0);
  audited(1, "emu", "2", {"trainer.threads=1"});
  audited(4, "emu", "1", {"trainer.threads=3"});

  // One message names the difference.
  std::string text = read_text(at("two/config.toml"));
  write("two/config.toml", text.replace(text.find("seed = 1"), 8, "seed = 3"));
  const Outcome o = job({"-n", "2", program_path().string(), "audit", at("two"), "--step", "3"});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("config.toml was edited: trainer.seed is 3, the run had 1"), std::string::npos) << o.err;
}

// All ranks refuse to resume on other data; what is accepted goes on.
TEST_F(Ranks, ChangedFilesAreNoticed) {
  const std::string file = write("rows.jsonl", read_text(tiny_folder() + "train.jsonl"));
  const Overrides keys = {"data.train_files=" + file, "trainer.total_training_steps=1"};
  ASSERT_EQ(job(part(2, "run", keys)).code, 0);
  std::string rows = read_text(file);
  write("rows.jsonl", rows.replace(rows.find("\"a\""), 3, "\"b\""));
  const Overrides more = keys + Overrides{"--resume", "trainer.total_training_steps=2"};
  Outcome o = job(part(2, "run", more));
  EXPECT_EQ(o.code, 2) << o.err;
  EXPECT_NE(o.err.find(file + " (data.train_files: training problems) has changed"), std::string::npos) << o.err;
  o = job(part(4, "run", more + Overrides{"--accept-changed", file}));
  EXPECT_EQ(o.code, 0) << o.err;
}

// Adapters alone, and those of a sampler beside the model: weights in bf16, so that masters lie in parts.
TEST_F(Ranks, AdaptersResumeOnAnotherNumber) {
  const auto moved = [&](const std::string& name, const Overrides& keys, const Overrides& weights) {
    const auto until = [&](int steps) { return keys + Overrides{cat("trainer.total_training_steps=", steps)}; };
    Outcome o = alone(name + "-whole", until(2));
    ASSERT_EQ(o.code, 0) << o.err;
    o = job(part(2, name, until(1)));
    ASSERT_EQ(o.code, 0) << o.err;
    o = job(part(4, name, until(2) + Overrides{"--resume"}));
    ASSERT_EQ(o.code, 0) << o.err;
    expect_same(name + "-whole", name, 2, weights);
  };
  const Overrides emulated = {"trainer.device=emu", "data.max_response_length=6", "data.train_batch_size=2",
                              "trainer.test_freq=0", "model.lora.rank=3"};
  moved("adapters", emulated, {"adapter_model.safetensors"});
  moved("sampler",
        emulated + Overrides{"distill.enable=true", "rollout.kv.method=quest", "rollout.kv.blocks.size=4",
                             "rollout.kv.blocks.count=2", "rollout.kv.blocks.first=0", "rollout.kv.blocks.last=1",
                             "rollout.kv.blocks.dense_layers=0"},
        {"model.safetensors", "adapter/adapter_model.safetensors"});
}

// Devices talk by NCCL or through the host: the same run, which may change between them.
TEST_F(Ranks, TheWayBetweenDevicesChangesNoBit) {
  const auto run_by = [&](const std::string& way, const std::string& dir, int steps, const Overrides& more = {}) {
    const Outcome o =
        job(part(2, dir,
                 {"trainer.device=emu", "data.max_response_length=6", "data.train_batch_size=2", "trainer.test_freq=0",
                  cat("trainer.comm=", way), cat("trainer.total_training_steps=", steps)}) +
            more);
    ASSERT_EQ(o.code, 0) << o.err;
    EXPECT_NE(
        one_line(o.out).find(way == "nccl" ? "between ranks by NCCL 2.21.5" : "between ranks by the host's memory"),
        std::string::npos)
        << o.out;
  };
  run_by("host", "whole", 2);
  run_by("nccl", "moved", 1);
  run_by("host", "moved", 2, {"--resume"});
  expect_same("whole", "moved", 2);
}

// Rank 0 alone changes the disk.  Killed while it does, the others end too, and the run goes on with another number.
TEST_F(Ranks, KilledAtAWrite) {
  const Overrides short_run = {"trainer.total_training_steps=2"};
  ASSERT_EQ(alone("whole", short_run).code, 0);
  int resumed = 0;
  for (const int write : {12, 23, 30, 37, 45}) {
    SCOPED_TRACE(write);
    fs::remove_all(at("killed"));
    const Outcome o = job(part(1, "killed", short_run, {cat("PARE_FAULT=", write, ":-", SIGKILL)}) + Overrides{":"} +
                          part(1, "killed", short_run));
    EXPECT_NE(o.code, 0);
    if (!fs::exists(at("killed/config.toml"))) continue;
    const Outcome again = job(part(write % 2 ? 4 : 1, "killed", short_run + Overrides{"--resume"}));
    ASSERT_EQ(again.code, 0) << again.err;
    expect_same("whole", "killed", 2);
    resumed++;
  }
  EXPECT_GE(resumed, 4);
}

TEST_F(Ranks, ErrorKeepsItsExitCode) {
  Outcome o = job(part(2, "shards", {"learner.shards=3"}));
  EXPECT_EQ(o.code, 2);
  EXPECT_NE(o.err.find("learner.shards = 3 cannot be dealt to 2 ranks; 4 can, and 8"), std::string::npos) << o.err;
  o = job(part(2, "memory", {"rollout.kv_cache_bytes=1"}));
  EXPECT_EQ(o.code, 3) << o.err;
  Overrides lost = part(2, "lost", {"actor.optim.lr=1e30", "trainer.total_training_steps=9", "trainer.test_freq=0"});
  std::replace(lost.begin(), lost.end(), std::string("train"), std::string("sft"));
  o = job(lost);
  EXPECT_EQ(o.code, 4) << o.err;
  // A rank that is alone with its error names itself.
  const Overrides fault = {cat("PARE_FAULT=12:", ENOSPC)};
  o = job(part(1, "full", {}, fault) + Overrides{":"} + part(1, "full", {}));
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_NE(o.err.find("pare: rank 0: " + at("full")), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("No space left on device"), std::string::npos) << o.err;
  o = job(Overrides{"-n", "2", program_path().string(), "generate", "quickstart"});
  EXPECT_EQ(o.code, 2) << o.err;
}

TEST_F(Ranks, OtherCommandIsRefused) {
  Overrides other = part(1, "run", {});
  std::replace(other.begin(), other.end(), std::string("train"), std::string("sft"));
  const Outcome o = job(part(1, "run", {}) + Overrides{":"} + other);
  EXPECT_EQ(o.code, 2) << o.err;
  EXPECT_NE(o.err.find("rank 0 was started as pare train and rank 1 as pare sft; all ranks of a job run the same"),
            std::string::npos)
      << o.err;
  EXPECT_FALSE(fs::exists(at("run/metrics.jsonl")));
}

// One launcher or the other.
TEST_F(Ranks, RanksOfItsOwnAreRefused) {
  const Outcome o = job(part(2, "run", {"--ranks", "2"}));
  EXPECT_EQ(o.code, 2) << o.err;
  EXPECT_NE(o.err.find(" has started 2 ranks already; leave out one of the two"), std::string::npos) << o.err;
  EXPECT_FALSE(fs::exists(at("run")));
}

TEST_F(Ranks, OtherMachineIsRefused) {
  Outcome o = job(part(1, "run", {}) + Overrides{":"} + part(1, "run", {"trainer.seed=2"}));
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_NE(o.err.find("trainer.seed is 1 on rank 0 and 2 on rank 1"), std::string::npos) << o.err;
  o = job(part(1, "run", {}, {"PARE_ISA=avx2"}) + Overrides{":"} + part(1, "run", {}, {"PARE_ISA=avx512"}));
  EXPECT_NE(o.code, 0) << o.err;
  if (o.err.find("not available here") == std::string::npos) {  // else this machine has no better one
    EXPECT_NE(o.err.find("instruction set is avx2 on rank 0 and avx512 on rank 1"), std::string::npos) << o.err;
  }
}

// A copy of the data that is another one; a folder that has the same name.
TEST_F(Ranks, OtherFilesAreRefused) {
  for (const char* node : {"a/", "b/"}) {
    fs::create_directories(at(node));
    fs::copy_file(tiny_folder() + "train.jsonl", at(cat(node, "train.jsonl")));
  }
  const auto on = [&](const char* node) {
    Overrides all = part(1, "", {"data.train_files=train.jsonl"}, {"-C", at(node)});
    *std::next(std::find(all.begin(), all.end(), "--out")) = "run";
    return all;
  };
  Outcome o = job(on("a") + Overrides{":"} + on("b"));
  EXPECT_EQ(o.code, 2) << o.err;
  const std::string a = at("a/run"), b = at("b/run");
  EXPECT_NE(o.err.find(cat("rank 1 cannot read in ", b, " on ")), std::string::npos) << o.err;
  EXPECT_NE(o.err.find(cat(" what rank 0 wrote to ", a, " on ")), std::string::npos) << o.err;
  EXPECT_TRUE(fs::is_empty(at("a/run"))) << "nothing is left";
  std::ofstream(at("b/train.jsonl"), std::ios::app) << R"({"prompt": "p0?", "answer": "b"})"
                                                    << "\n";
  o = job(on("a") + Overrides{":"} + on("b"));
  EXPECT_EQ(o.code, 1) << o.err;
  EXPECT_NE(o.err.find("hash of train.jsonl is "), std::string::npos) << o.err;
  EXPECT_NE(o.err.find(" on rank 1; all ranks of a run must agree on it"), std::string::npos) << o.err;
}

// Slurm's warning, which mpirun passes on: the last finished step is saved, by all, and the run goes on.
TEST_F(Ranks, Usr1SavesAndEndsWith75) {
  const Overrides endless = {"trainer.total_training_steps=1000000", "trainer.save_freq=0", "trainer.samples_freq=0",
                             "trainer.test_freq=0"};
  std::atomic<bool> ended = false;
  std::thread sender([&] {
    while (!ended && !fs::exists(at("run/metrics.jsonl"))) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    send(SIGUSR1);
  });
  const Outcome o = job(part(2, "run", endless));
  ended = true;
  sender.join();
  EXPECT_EQ(o.code, 75) << o.err;
  EXPECT_NE(o.err.find("which is saved"), std::string::npos) << o.err;
  if (const char* mpirun = std::getenv("PARE_MPIRUN"); !mpirun || !std::string_view(mpirun).ends_with("mpich")) {
    EXPECT_EQ(o.err.find("MPI_ABORT"), std::string::npos) << "schedulers take it for a failure: " << o.err;
  }
  int checkpoints = 0;
  for (const auto& e : fs::directory_iterator(at("run/checkpoints"))) {
    EXPECT_EQ(checkpoint_damage(e.path().string()), "");
    checkpoints++;
  }
  EXPECT_EQ(checkpoints, 1);
}

// A process of the job that runs the program in DIR, found by its parent: rank `n` of those that mpirun started.
std::vector<pid_t> processes_of(const std::string& dir) {
  std::vector<pid_t> found;
  for (const auto& e : fs::directory_iterator("/proc")) {
    const std::string name = e.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string words = read_text(e.path() / "cmdline");
    if (words.starts_with(program_path().string()) && words.find(dir) != std::string::npos)
      found.push_back(static_cast<pid_t>(std::stol(name)));
  }
  return found;
}

// Two ranks, of which rank 1 gets a signal after its first step.
class StruckRank : public Ranks {
 protected:
  Outcome strike(int signal) {
    std::atomic<bool> ended = false;
    std::thread striker([&] {
      while (!ended && !fs::exists(at("run/metrics.jsonl"))) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      for (const pid_t p : processes_of(at("run")))
        if (read_text(cat("/proc/", p, "/environ")).find("PARE_TEST_STRUCK=1") != std::string::npos) kill(p, signal);
    });
    const Outcome o = job(part(1, "run", kEndless, {"PARE_SILENCE=4"}) + Overrides{":"} +
                          part(1, "run", kEndless, {"PARE_SILENCE=4", "PARE_TEST_STRUCK=1"}));
    ended = true;
    striker.join();
    EXPECT_NE(o.code, 0);
    return o;
  }
};

// mpirun sees it.
TEST_F(StruckRank, KilledRankIsNamed) {
  const Outcome o = strike(SIGKILL);
  EXPECT_NE(o.err.find("rank 1 "), std::string::npos) << o.err;
  EXPECT_TRUE(processes_of(at("run")).empty()) << "nothing is left running";
}

// SIGSTOP: mpirun never notices.
TEST_F(StruckRank, FrozenRankIsNamed) {
  const Outcome o = strike(SIGSTOP);
  EXPECT_NE(o.err.find("pare: rank 1 on "), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("has not been heard of for "), std::string::npos) << o.err;
  EXPECT_TRUE(processes_of(at("run")).empty()) << "nothing is left running";
}

// ---- ranks that stop where few messages are exchanged: the others name them

// Rank 1 stops itself in a call of MPI (tests/mpi/in_ranks.cpp).
TEST_F(StruckRank, FrozenInACallOfMpiIsNamed) {
  const std::string tests = program_path().parent_path() / "tests/in_ranks";
  for (const std::string call : {"before MPI_Init", "after MPI_Init", "before MPI_Finalize"}) {
    SCOPED_TRACE(call);
    const auto rank = [&](const Overrides& environment) {
      return Overrides{"-n", "1", "/usr/bin/env", "PARE_SILENCE=3"} + environment +
             Overrides{tests, "--gtest_filter=Comm.OtherCountsAreErrors"};
    };
    const Outcome o = job(rank({}) + Overrides{":"} + rank({"PARE_TEST_FREEZE=" + call}));
    EXPECT_NE(o.code, 0);
    EXPECT_NE(o.err.find("pare: rank 1 "), std::string::npos) << o.err;
    const bool pulse = call == "after MPI_Init";
    EXPECT_NE(o.err.find(pulse ? "has not been heard of for " : "stopped (by SIGSTOP?): the others have waited "),
              std::string::npos)
        << o.err;
  }
}

// Wherever in its start rank 1 stops.
TEST_F(StruckRank, FrozenAtItsStartIsNamed) {
  for (const int milliseconds : {0, 120, 350}) {
    SCOPED_TRACE(milliseconds);
    fs::remove_all(at("run"));
    std::atomic<bool> ended = false;
    std::thread striker([&] {
      while (!ended && processes_of(at("run")).size() < 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
      for (const pid_t p : processes_of(at("run")))
        if (read_text(cat("/proc/", p, "/environ")).find("PARE_TEST_STRUCK=1") != std::string::npos) kill(p, SIGSTOP);
    });
    const Outcome o = job(part(1, "run", kEndless, {"PARE_SILENCE=3"}) + Overrides{":"} +
                          part(1, "run", kEndless, {"PARE_SILENCE=3", "PARE_TEST_STRUCK=1"}));
    ended = true;
    striker.join();
    EXPECT_NE(o.code, 0);
    EXPECT_NE(o.err.find("pare: rank 1 "), std::string::npos) << o.err;
    EXPECT_TRUE(processes_of(at("run")).empty()) << "nothing is left running";
  }
}

// A disk that is slower than trainer.nccl_timeout is waited for, and named.
TEST_F(Ranks, SlowDiskIsWaitedFor) {
  const Overrides keys = {"trainer.nccl_timeout=1", "trainer.total_training_steps=2"};
  const Outcome o = job(part(1, "run", keys, {"PARE_FAULT=30:4500"}) + Overrides{":"} + part(1, "run", keys));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_TRUE(std::regex_search(o.err, std::regex("pare: the ranks have waited [0-9]+ s for rank 0 on [^\n]*: it is at "
                                                  "(writing|flushing) ")))
      << o.err;
}

TEST_F(Ranks, SlowGraderIsWaitedFor) {
  const std::string grader = write("grader.sh", "sleep 3.5\nwhile read -r line; do echo '{\"score\": 1}'; done\n");
  const Outcome o = job(part(2, "run",
                             {"data.reward=command:sh " + grader, "trainer.nccl_timeout=1",
                              "trainer.total_training_steps=1", "trainer.test_freq=0"}));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.err.find("it is at grading"), std::string::npos) << o.err;
}

// Rank 0 stops at a write: of the first files, of a checkpoint, of the last ones.
TEST_F(StruckRank, FrozenWhileSavingIsNamed) {
  for (const int write : {12, 45}) {
    SCOPED_TRACE(write);
    fs::remove_all(at("run"));
    const Overrides short_run = {"trainer.total_training_steps=2"}, quick = {"PARE_SILENCE=3"};
    const Outcome o = job(part(1, "run", short_run, quick + Overrides{cat("PARE_FAULT=", write, ":-", SIGSTOP)}) +
                          Overrides{":"} + part(1, "run", short_run, quick));
    EXPECT_NE(o.code, 0);
    EXPECT_NE(o.err.find("pare: rank 0 on "), std::string::npos) << o.err;
  }
}

// Evaluation is dealt as well; rank 0 alone writes.
TEST_F(Ranks, EvalIsTheSame) {
  const Overrides eval = Overrides{"eval"} + tiny_run() + Overrides{"--n", "3", "--quiet"};
  Overrides one = Overrides{program_path().string()} + eval + Overrides{"--out", at("one.jsonl")};
  ASSERT_EQ(run(one).code, 0);
  const Outcome o = job(Overrides{"-n", "3", program_path().string()} + eval + Overrides{"--out", at("three.jsonl")});
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_FALSE(read_text(at("one.jsonl")).empty());
  EXPECT_EQ(read_text(at("one.jsonl")), read_text(at("three.jsonl")));
}

}  // namespace
}  // namespace pare::test
