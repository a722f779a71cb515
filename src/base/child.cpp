#include "base/child.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <thread>
#include <utility>

#include "base/error.h"

namespace pare {

namespace {

constexpr size_t kErrors = 2000;  // at least so many bytes of standard error are kept

// A variable in the environment of a child, by which its descendants are found.
constexpr std::string_view kMark = "PARE_CHILD=";

// The guard reads the session of the program from a pipe whose only writer is this process.  When the pipe closes, at
// the latest with the end of this process, it kills the processes of that session, and those that have the mark in
// their environment, in whatever session: until there are none.
constexpr const char* kGuard = R"(mark=$1
read -r session
read -r _
for round in 1 2 3 4 5 6 7 8 9 10; do
  found=
  for stat in /proc/[0-9]*/stat; do
    { read -r line < "$stat"; } 2>/dev/null || continue
    set -- ${line##*) }
    [ "$4" = "$session" ] && [ "$1" != Z ] || continue
    pid=${stat#/proc/}
    kill -9 "${pid%/stat}" && found=1
  done
  for file in $(grep -lszxF -e "$mark" /proc/[0-9]*/environ); do
    pid=${file#/proc/}
    kill -9 "${pid%/environ}" && found=1
  done
  [ "$found" ] || break
done)";

std::string new_mark() {
  static std::atomic<uint64_t> count = 0;
  return cat(kMark, getpid(), '-', Child::Clock::now().time_since_epoch().count(), '-', count++);
}

void close_end(int& fd) {
  if (fd >= 0) close(fd);
  fd = -1;
}

// Child processes inherit neither end, except as file descriptor 0, 1 or 2.
struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    std::array<int, 2> ends;
    if (pipe2(ends.data(), O_CLOEXEC) != 0) throw Error(Exit::failed, cat("no pipe: ", std::strerror(errno)));
    read = ends[0];
    write = ends[1];
  }
  ~Pipe() {
    close_end(read);
    close_end(write);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
};

int own_end(int& fd) {
  fcntl(fd, F_SETFL, O_NONBLOCK);
  return std::exchange(fd, -1);
}

// Starts a program in a session of its own, with `mark` added to the environment unless it is empty.  Returns errno.
int spawn(pid_t& pid, const std::string& program, const std::vector<std::string>& words, const std::string& mark,
          int in, int out, int err) {
  std::vector<char*> argv, environment;
  for (const std::string& w : words) argv.push_back(const_cast<char*>(w.c_str()));
  argv.push_back(nullptr);
  for (char** variable = environ; variable && *variable; variable++)
    if (!std::string_view(*variable).starts_with(kMark)) environment.push_back(*variable);
  if (!mark.empty()) environment.push_back(const_cast<char*>(mark.c_str()));
  environment.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&files, err, STDERR_FILENO);
  posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  sigset_t signals;
  sigemptyset(&signals);
  posix_spawnattr_setsigmask(&attributes, &signals);
  sigaddset(&signals, SIGPIPE);
  posix_spawnattr_setsigdefault(&attributes, &signals);
  const int failed = posix_spawn(&pid, program.c_str(), &files, &attributes, argv.data(), environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  return failed;
}

// Writing to a pipe without a reader raises SIGPIPE, which in this process means that nobody reads its own output.
ssize_t write_quietly(int fd, const char* data, size_t size) {
  sigset_t pipe, before, pending;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  sigpending(&pending);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  const ssize_t n = write(fd, data, size);
  const int error = errno;
  if (n < 0 && error == EPIPE && !sigismember(&pending, SIGPIPE)) {
    const timespec now = {};
    while (sigtimedwait(&pipe, nullptr, &now) < 0 && errno == EINTR) {
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = error;
  return n;
}

// Reads what is available.  False: end of file.
bool read_into(int fd, std::string& text) {
  std::array<char, 1 << 14> buffer;
  const ssize_t n = read(fd, buffer.data(), buffer.size());
  if (n > 0) text.append(buffer.data(), static_cast<size_t>(n));
  return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

std::string end_text(int status) {
  if (WIFSIGNALED(status)) return cat("was ended by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  return cat("exited with code ", WEXITSTATUS(status));
}

}  // namespace

std::string find_program(const std::string& word) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const auto good = [&](const std::string& path) {
    return fs::is_regular_file(path, ignored) && access(path.c_str(), X_OK) == 0;
  };
  if (word.find('/') == std::string::npos) {
    const char* path = std::getenv("PATH");
    std::string folders = path ? path : "/usr/bin:/bin";
    for (size_t begin = 0, end; begin <= folders.size(); begin = end + 1) {
      end = std::min(folders.find(':', begin), folders.size());
      const std::string folder = folders.substr(begin, end - begin),
                        file = (folder.empty() ? "." : folder) + "/" + word;
      if (good(file)) return file;
    }
    fail(word, ": there is no such program in the folders of PATH",
         fs::exists(word, ignored) ? cat("; for the one in this folder write ./", word) : "");
  }
  if (good(word)) return word;
  if (!fs::exists(word, ignored)) fail(word, ": no such file");
  if (!fs::is_regular_file(word, ignored)) fail(word, ": not a program");
  fail(word, ": not executable; chmod +x ", word);
}

Child::Child(const std::string& program, const std::vector<std::string>& words) {
  Pipe alive, in, out, err;
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  const std::string mark = new_mark();
  int failed = spawn(guard_, "/bin/sh", {"sh", "-c", kGuard, "sh", mark}, "", alive.read, null, null);
  if (null >= 0) close(null);
  if (failed) throw Error(Exit::failed, cat("/bin/sh cannot be started: ", std::strerror(failed)));
  alive_ = own_end(alive.write);
  failed = spawn(program_, program, words, mark, in.read, out.write, err.write);
  if (failed) {
    end_guard();
    throw Error(Exit::failed, cat(program, " cannot be started: ", std::strerror(failed),
                                  failed == ENOEXEC  ? "; a script begins with a line such as #!/usr/bin/env python3"
                                  : failed == ENOENT ? "; does the interpreter named in its first line exist?"
                                                     : ""));
  }
  const std::string session = cat(program_, '\n');
  write_quietly(alive_, session.data(), session.size());  // without it the guard has the mark
  in_ = own_end(in.write);
  out_ = own_end(out.read);
  err_ = own_end(err.read);
}

Child::~Child() {
  if (end_.empty()) kill(program_, SIGKILL);
  ended_by(Clock::time_point::max());
  end_guard();
  for (int* fd : {&in_, &out_, &err_}) close_end(*fd);
}

void Child::end_guard() {
  close_end(alive_);
  while (waitpid(guard_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

bool Child::read_output() { return read_into(out_, answers_); }

void Child::read_errors() {
  if (!read_into(err_, errors_)) close_end(err_);
  if (errors_.size() > 16 * kErrors) errors_.erase(0, errors_.size() - kErrors);
}

Child::Reply Child::ask(const std::string& line, double seconds, std::string& answer) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  if (!read_output()) return Reply::ended;
  if (!answers_.empty()) {
    answer = answers_;
    return Reply::unasked;
  }
  const std::string sent = line + "\n";
  size_t written = 0;
  for (;;) {
    // All three at once, so that neither side blocks on the other.  poll() skips negative descriptors.
    pollfd fds[] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}, {written < sent.size() ? in_ : -1, POLLOUT, 0}};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const int ready = poll(fds, std::size(fds), static_cast<int>(std::clamp<int64_t>(left, 0, 60'000)));
    if (ready == 0 && Clock::now() >= deadline) return Reply::late;
    if (ready <= 0) continue;
    if (fds[2].revents) {
      const ssize_t n = write_quietly(in_, sent.data() + written, sent.size() - written);
      if (n > 0) written += static_cast<size_t>(n);
      if (n < 0 && errno != EAGAIN && errno != EINTR)
        written = sent.size();  // it has stopped reading but may still answer
    }
    if (fds[1].revents) read_errors();
    if (!fds[0].revents) continue;
    const bool more = read_output();
    const size_t end = answers_.find('\n');
    if (end != std::string::npos && written == sent.size()) {
      const bool one = end + 1 == answers_.size();
      answer = one ? answers_.substr(0, end) : answers_;
      answers_.clear();
      return one ? Reply::line : Reply::unasked;
    }
    if (!more) return Reply::ended;
    if (answers_.size() > kLongest) return Reply::too_long;
  }
}

void Child::hang_up() { close_end(in_); }

std::string Child::ended_by(Clock::time_point deadline) {
  using namespace std::chrono_literals;
  while (end_.empty()) {
    int status = 0;
    const pid_t pid = waitpid(program_, &status, deadline == Clock::time_point::max() ? 0 : WNOHANG);
    if (pid > 0) end_ = end_text(status);
    if (pid < 0 && errno != EINTR) end_ = "ended";  // this process inherited an ignored SIGCHLD
    if (pid == 0 && Clock::now() >= deadline) break;
    if (pid == 0) std::this_thread::sleep_for(1ms);
  }
  return end_;
}

std::string Child::last_errors() {
  // Only what is in the pipe now: the writer may never stop.
  pollfd more = {err_, POLLIN, 0};
  for (int i = 0; i < 64 && err_ >= 0 && poll(&more, 1, 0) > 0; i++) read_errors();
  if (errors_.size() <= kErrors) return errors_;
  const size_t begin = errors_.size() - kErrors, line = errors_.find('\n', begin);
  return errors_.substr(line + 1 < errors_.size() ? line + 1 : begin);
}

}  // namespace pare
