// Runs the program as its users do.
#pragma once
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace pare::test {

// The program built beside this test binary: BUILD/pare of BUILD/tests/pare_tests.
inline std::filesystem::path program_path() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / "pare";
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Outcome {
  int code = -1;  // exit code; 128 + signal where one ended it
  std::string out, err;
};

// A directory of its own for every test, gone afterwards.
class Program : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(program_path())) GTEST_SKIP() << program_path() << " is not built: run `make`";
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::path(testing::TempDir()) / (std::string("pare_program_") + info->name());
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  void TearDown() override {
    if (!root_.empty()) std::filesystem::remove_all(root_);
  }

  // A path in the directory of the test.
  std::string at(const std::string& name) const { return (root_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::binary) << text;
    return at(name);
  }

  // `words`: arguments, separated by single blanks.
  Outcome run(const std::string& words) const {
    std::vector<std::string> arguments = {program_path().string()};
    for (size_t begin = 0; begin <= words.size();) {
      const size_t end = std::min(words.find(' ', begin), words.size());
      if (end > begin) arguments.push_back(words.substr(begin, end - begin));
      begin = end + 1;
    }
    return run(arguments);
  }
  Outcome run(std::vector<std::string>& arguments) const {
    std::vector<char*> argv;
    for (std::string& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    const std::string out = at(".stdout"), err = at(".stderr");
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, input_.c_str(), O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&files, STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    pid_t pid = 0;
    const int failed = posix_spawn(&pid, argv[0], &files, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    EXPECT_EQ(failed, 0) << argv[0];
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_text(out), read_text(err)};
  }

  std::filesystem::path root_;
  std::string input_ = "/dev/null";  // what the program reads from standard input
};

}  // namespace pare::test
