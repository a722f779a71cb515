// Runs the program as its users do.
#pragma once
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace pare::test {

// The program built beside this test binary: BUILD/pare of BUILD/tests/pare_tests.
inline std::filesystem::path program_path() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / "pare";
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;  // which, unlike an iterator, does not throw when a process of /proc ends meanwhile
  text << in.rdbuf();
  return text.str();
}

// Returns text of the log as one line: where lines wrap depends on the names of the machine.
inline std::string one_line(const std::string& text) { return std::regex_replace(text, std::regex("\\s+"), " "); }

// Returns the output of a program as the indented block that `make readme` writes; empty if it is not built.
inline std::string printed_block(const std::filesystem::path& program) {
  if (!std::filesystem::exists(program)) return "";
  FILE* const pipe = popen(program.c_str(), "r");
  std::string block = "\n";
  bool begins = true;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) {
    if (begins && c != '\n') block += "    ";
    block += static_cast<char>(c);
    begins = c == '\n';
  }
  EXPECT_EQ(pclose(pipe), 0);
  return block + "\n";
}

// The part of a page that is generated between two marks.
inline std::string generated_block(const std::string& page, const std::string& mark) {
  const std::string text = read_text(page);
  const size_t begin = text.find('\n', text.find("<!-- " + mark)) + 1, end = text.find("<!-- end of " + mark);
  return end == std::string::npos ? "" : text.substr(begin, end - begin);
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
    std::vector<std::string> arguments = split(words);
    return run(arguments);
  }
  Outcome run(std::vector<std::string>& arguments) const {
    const std::string out = at(".stdout"), err = at(".stderr");
    const int code = wait(spawn(arguments, out, err));
    return {code, read_text(out), read_text(err)};
  }
  // A bare container may have no pseudo-terminals.
  static bool has_terminals() {
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    close(terminal);
    return terminal >= 0;
  }
  // The same on a terminal of `columns`; `out` is all that was written to it, its line ends "\r\n".
  Outcome run_on_terminal(const std::string& words, int columns) const {
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    EXPECT_TRUE(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0);
    const winsize size{.ws_row = 24, .ws_col = static_cast<unsigned short>(columns), .ws_xpixel = 0, .ws_ypixel = 0};
    EXPECT_EQ(ioctl(terminal, TIOCSWINSZ, &size), 0);
    const std::string name = ptsname(terminal), err = at(".stderr");
    const int held = open(name.c_str(), O_RDWR | O_NOCTTY);  // until the program has it open
    std::vector<std::string> arguments = split(words);
    const pid_t pid = spawn(arguments, name, err);
    close(held);
    std::string out;
    char buffer[4096];
    for (ssize_t n; (n = read(terminal, buffer, sizeof buffer)) > 0;) out.append(buffer, static_cast<size_t>(n));
    close(terminal);
    const int code = wait(pid);
    return {code, out, read_text(err)};
  }

  // Sends the program a signal, if it runs: kill(0, ...) would reach the tests themselves, and the number of a program
  // that has ended another process.
  void send(int signal) const {
    const std::lock_guard lock(child_mutex_);
    if (child_ > 0) kill(child_, signal);
  }

  std::filesystem::path root_;
  std::string input_ = "/dev/null";       // what the program reads from standard input
  mutable std::atomic<pid_t> child_ = 0;  // the program, while it runs; 0: none
  mutable std::mutex child_mutex_;        // held from its start, and its end, until child_ says so

 private:
  static std::vector<std::string> split(const std::string& words) {
    std::vector<std::string> arguments = {program_path().string()};
    for (size_t begin = 0; begin <= words.size();) {
      const size_t end = std::min(words.find(' ', begin), words.size());
      if (end > begin) arguments.push_back(words.substr(begin, end - begin));
      begin = end + 1;
    }
    return arguments;
  }
  pid_t spawn(std::vector<std::string>& arguments, const std::string& out, const std::string& err) const {
    std::vector<char*> argv;
    for (std::string& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, input_.c_str(), O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOCTTY, 0600);
    posix_spawn_file_actions_addopen(&files, STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    // As a shell starts it, also where the tests run under nohup.
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t defaults;
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGHUP);
    sigaddset(&defaults, SIGPIPE);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    pid_t pid = 0;
    const std::lock_guard lock(child_mutex_);
    const int failed = posix_spawn(&pid, argv[0], &files, &attributes, argv.data(), environ);
    child_ = failed == 0 ? pid : 0;
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    EXPECT_EQ(failed, 0) << argv[0];
    return pid;
  }
  int wait(pid_t pid) const {
    int status = 0;
    siginfo_t end = {};
    EXPECT_EQ(waitid(P_PID, static_cast<id_t>(pid), &end, WEXITED | WNOWAIT), 0);
    const std::lock_guard lock(child_mutex_);
    child_ = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
};

}  // namespace pare::test
