// Memory limits of a process, and runs under them.
#include <sys/resource.h>

#include <cstdint>
#include <functional>

#include "base/arena.h"
#include "base/memory.h"
#include "base/memory_limits.h"
#include "tests/program.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class MemoryLimits : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
#ifdef __SANITIZE_ADDRESS__
    GTEST_SKIP() << "AddressSanitizer needs the address space";
#endif
  }
};

// ---- control groups, as containers and services have them

class ControlGroups : public Program {
 protected:
  void mounts(const std::string& text) const { write("proc/self/mountinfo", text); }
  void group(const std::string& text) const { write("proc/self/cgroup", text); }
  size_t limit() const { return control_group_memory(root_.string()); }
};

TEST_F(ControlGroups, NoneIsNoLimit) {
  EXPECT_EQ(limit(), SIZE_MAX);
  mounts("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n");
  group("0::/\n");
  EXPECT_EQ(limit(), SIZE_MAX);
}

// The least of the group and of those above it.
TEST_F(ControlGroups, Version2) {
  mounts(
      "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
      "30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  group("0::/system.slice/run.service\n");
  write("sys/fs/cgroup/system.slice/run.service/memory.max", "max\n");
  EXPECT_EQ(limit(), SIZE_MAX);
  write("sys/fs/cgroup/system.slice/memory.max", "4000000000\n");
  EXPECT_EQ(limit(), 4000000000u);
  write("sys/fs/cgroup/system.slice/run.service/memory.max", "3000000000\n");
  EXPECT_EQ(limit(), 3000000000u);
  write("sys/fs/cgroup/system.slice/run.service/memory.max", "5000000000\n");
  EXPECT_EQ(limit(), 4000000000u);
}

// A container sees its own group as the root of the mount, whatever the path says.
TEST_F(ControlGroups, Version2InAContainer) {
  mounts("30 22 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n");
  write("sys/fs/cgroup/memory.max", "2000000000\n");
  for (const char* path : {"0::/docker/abc\n", "0::/\n", "0::/../elsewhere\n"}) {
    group(path);
    EXPECT_EQ(limit(), 2000000000u) << path;
  }
}

TEST_F(ControlGroups, Version1) {
  mounts(
      "40 22 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
      "41 22 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
      "42 22 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  group("5:cpu,cpuacct:/other\n4:memory:/user/job\n0::/user\n");
  write("sys/fs/cgroup/memory/user/job/memory.stat", "cache 5\nhierarchical_memory_limit 1500000000\ntotal_rss 7\n");
  EXPECT_EQ(limit(), 1500000000u);
  mounts(
      "41 22 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
      "43 22 0:31 / /host/memory rw - cgroup cgroup rw,memory\n");
  write("host/memory/user/job/memory.stat", "hierarchical_memory_limit 9223372036854771712\n");
  EXPECT_EQ(limit(), 1500000000u) << "the least of all mounts";
  // Unlimited, as the kernel writes it, is more than any machine has.
  write("sys/fs/cgroup/memory/user/job/memory.stat", "hierarchical_memory_limit 9223372036854771712\n");
  EXPECT_GT(limit(), size_t{1} << 60);
}

// ---- limits of the process

int in_child(int resource, size_t limit, const std::function<bool()>& holds) {
  const pid_t pid = fork();
  if (pid == 0) {
    const rlimit both{limit, limit};
    if (setrlimit(static_cast<__rlimit_resource>(resource), &both) != 0) _exit(2);
    _exit(holds() ? 0 : 1);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(MemoryLimits, AddressSpaceCounts) {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const size_t machine = machine_memory(), limit = pages * sysconf(_SC_PAGE_SIZE) + (size_t{1} << 30);
  const auto holds = [&] {
    const size_t before = process_memory_left(), bytes = size_t{64} << 20;
    const Arena arena("a", host_memory, bytes);
    const size_t after = process_memory_left();
    return machine_memory() == std::min(machine, limit) && before < limit && before - after >= bytes &&
           before - after < bytes + (size_t{4} << 20) && host_memory.free() == std::min(machine, after);
  };
  EXPECT_EQ(in_child(RLIMIT_AS, limit, holds), 0);
  EXPECT_EQ(in_child(RLIMIT_DATA, limit, holds), 0);
}

// Address space begins and ends where large pages do, and all of it can be written.
TEST(HostMemory, TakesWholeLargePages) {
  for (const size_t bytes : {size_t{1}, size_t{3} << 20, (size_t{2} << 20) + 1}) {
    auto* const p = static_cast<char*>(host_memory.take(bytes));
    ASSERT_NE(p, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % (2 << 20), 0u);
    p[0] = p[bytes - 1] = 1;
    host_memory.give(p, bytes);
  }
  EXPECT_EQ(host_memory.take(SIZE_MAX - 5), nullptr);
}

// ---- runs

class RunUnderLimit : public MemoryLimits {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { fs::remove_all(tiny_folder()); }
  // `limit` in KiB, as of ulimit -v.
  Outcome pare(int64_t limit, const std::string& command, const Overrides& more) {
    std::string line = cat("ulimit -v ", limit, "; exec ", program_path().string(), " ", command);
    for (const std::string& a : more) line += cat(" '", a, "'");
    std::vector<std::string> arguments = {"/bin/sh", "-c", line};
    return run(arguments);
  }
};

// A gibibyte holds the program and its plan; arenas as large as the machine it would not.
TEST_F(RunUnderLimit, ArenasTakeWhatIsPlanned) {
  const Overrides keys = tiny_run() + Overrides{"trainer.total_training_steps=2", "trainer.test_freq=1"};
  for (const char* command : {"train", "sft"}) {
    const Outcome o = pare(1 << 20, cat(command, " --out ", at(command)), keys);
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_NE(o.out.find("1.07GB of memory"), std::string::npos) << o.out;
  }
  const std::string model = at("train/model");
  EXPECT_EQ(pare(1 << 20, "eval --model " + model, tiny_jsonl() + tiny_sizes).code, 0);
  EXPECT_EQ(pare(1 << 20, "generate --model " + model + " --prompt p", {"data.tokenizer=ssa"}).code, 0);
}

// One arena alone is too large, or all together are.
TEST_F(RunUnderLimit, WhatDoesNotFitIsRefusedBeforeTheStart) {
  const Overrides keys = {"model.config=qwen3-0.6b", "data.train_batch_size=1",    "rollout.n=2",
                          "rollout.max_num_seqs=2",  "data.max_response_length=8", "rollout.max_num_batched_tokens=64",
                          "actor.optim.moments=bf16"};
  for (const auto& [limit, what] : {std::pair{int64_t{1} << 20, "that ulimit leaves"}, {3'222'656, "ulimit"}})
    for (const char* more : {"", " --dry-run"}) {
      const Outcome o = pare(limit, cat("train --out ", at("run"), more), keys);
      EXPECT_EQ(o.code, 3) << o.err;
      EXPECT_NE(o.err.find(what), std::string::npos) << o.err;
      EXPECT_FALSE(fs::exists(at("run")));
    }
}

}  // namespace
}  // namespace pare::test
