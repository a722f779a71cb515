// Runs all tests and ends with one plain line of counts.  --jobs=N runs them in N processes at a time, each with a
// share of the tests and a temporary directory of its own.  There are more shares than processes, so that no core waits
// long for the last of them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Counts {
  int passed = 0, failed = 0, skipped = 0;
};
constexpr const char* kCounts = "%d passed, %d failed, %d skipped\n";

// Runs share `index` of `shares` and copies what it prints, line by line, but for its counts, which are returned.
Counts run_share(char** argv, int index, int shares, std::mutex& print) {
  std::string temporary = (std::filesystem::temp_directory_path() / "pare_tests_XXXXXX").string();
  int out[2];
  if (!mkdtemp(temporary.data()) || pipe2(out, O_CLOEXEC) != 0) {
    std::perror("pare_tests");
    std::exit(1);
  }
  const pid_t child = fork();
  if (child == 0) {
    dup2(out[1], 1);
    dup2(out[1], 2);
    setenv("GTEST_TOTAL_SHARDS", std::to_string(shares).c_str(), 1);
    setenv("GTEST_SHARD_INDEX", std::to_string(index).c_str(), 1);
    setenv("TEST_TMPDIR", temporary.c_str(), 1);
    execv("/proc/self/exe", argv);
    std::perror("pare_tests");
    _exit(1);
  }
  close(out[1]);
  std::FILE* lines = fdopen(out[0], "r");
  Counts counts;
  bool counted = false;
  char* line = nullptr;
  size_t size = 0;
  while (getline(&line, &size, lines) >= 0) {
    if (std::sscanf(line, kCounts, &counts.passed, &counts.failed, &counts.skipped) == 3) {
      counted = true;
      continue;
    }
    const std::lock_guard lock(print);
    std::fputs(line, stdout);
  }
  std::free(line);
  std::fclose(lines);
  int status = 0;
  waitpid(child, &status, 0);
  std::error_code ignored;
  std::filesystem::remove_all(temporary, ignored);
  if (!counted || (status != 0 && counts.failed == 0)) {
    const std::lock_guard lock(print);
    std::printf("share %d of %d of the tests ended early, with %s %d\n", index, shares,
                WIFSIGNALED(status) ? "signal" : "exit code",
                WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    counts.failed++;
  }
  return counts;
}

int run_shares(char** argv, int jobs) {
  std::mutex print;
  std::vector<Counts> counts(8 * jobs);
  std::atomic<int> next = 0;
  {
    std::vector<std::jthread> processes;
    for (int i = 0; i < jobs; i++)
      processes.emplace_back([&] {
        const int shares = static_cast<int>(counts.size());
        for (int share; (share = next++) < shares;) counts[share] = run_share(argv, share, shares, print);
      });
  }
  Counts all;
  for (const Counts& c : counts) {
    all.passed += c.passed;
    all.failed += c.failed;
    all.skipped += c.skipped;
  }
  std::printf(kCounts, all.passed, all.failed, all.skipped);
  return all.failed > 0;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; i++)
    if (int jobs = 0; std::sscanf(argv[i], "--jobs=%d", &jobs) == 1) {
      if (jobs > 1 && !std::getenv("GTEST_TOTAL_SHARDS")) return run_shares(argv, jobs);
      std::rotate(argv + i, argv + i + 1, argv + argc);  // GoogleTest does not know it
      argc--;
      argv[argc] = nullptr;
    }
  testing::GTEST_FLAG(death_test_style) = "threadsafe";  // the thread pool runs
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  const testing::UnitTest& t = *testing::UnitTest::GetInstance();
  std::printf(kCounts, t.successful_test_count(), t.failed_test_count(), t.skipped_test_count());
  return result;
}
