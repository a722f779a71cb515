#include "comm/processes.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <thread>

#include "comm/shared.h"
#include "comm/watch.h"

namespace pare {

namespace {

// The two ends, which programs that a rank starts do not inherit.
std::array<int, 2> socket_pair(int type) {
  std::array<int, 2> ends;
  if (socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends.data()) != 0)
    throw Error(Exit::failed, cat("no socket between ranks: ", std::strerror(errno)));
  constexpr int bytes = 1 << 20;  // as far as net.core.wmem_max allows
  for (const int end : ends) setsockopt(end, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  return ends;
}

class SocketComm final : public Comm {
 public:
  SocketComm(int rank, std::vector<int> sockets, int pulses)
      : rank_(rank), sockets_(std::move(sockets)), pulses_(pulses) {
    if (pulses_ < 0) return;
    watched_ = std::jthread([this](const std::stop_token& stop) { beat(stop); });
  }
  ~SocketComm() override {
    meet_at_end(*this);
    watched_ = {};
    tell(true);
    for (const int socket : sockets_) close(socket);
    close(pulses_);
  }

  int rank() const override { return rank_; }
  int ranks() const override { return static_cast<int>(sockets_.size()); }
  int node_rank() const override { return rank_ % node_; }
  int node_ranks() const override { return node_; }
  std::string host() const override {
    return node_ == ranks() ? self().host() : cat(self().host(), "-", rank_ / node_);
  }

  void exchange(std::span<const Piece> out, std::span<const Piece> in) override {
    const size_t n = sockets_.size(), own = static_cast<size_t>(rank_);
    expect(out.size() == n && in.size() == n, "an exchange of ", out.size(), " and ", in.size(), " pieces, of ", n,
           " ranks");
    if (link) link->check();
    const auto start = WatchClock::now();
    std::vector<Sizes> own_sizes = sizes_of(out, in), sizes = own_sizes;
    std::vector<Piece> told, heard;
    for (size_t q = 0; q < n; q++) {
      told.push_back({&own_sizes[q], sizeof(Sizes)});
      heard.push_back({&sizes[q], sizeof(Sizes)});
    }
    transfer(told, heard);
    expect_sizes(rank_, own_sizes, sizes);
    transfer({out.begin(), out.end()}, {in.begin(), in.end()});
    if (in[own].bytes && in[own].data != out[own].data) std::memmove(in[own].data, out[own].data, in[own].bytes);
    calls++;
    waited += seconds_since(start);
  }

  [[noreturn]] void abort(int code) override {
    tell(true);  // this rank has said why
    _exit(code);
  }

 private:
  // Moves pieces to and from all other ranks at the same time.
  void transfer(std::vector<Piece> out, std::vector<Piece> in) {
    waits_ = true;
    for (std::vector<pollfd> open;; open.clear()) {
      for (size_t q = 0; q < sockets_.size(); q++) {
        if (sockets_[q] < 0) continue;
        advance(in[q], [&](const Piece& p) { return recv(sockets_[q], p.data, p.bytes, MSG_DONTWAIT); });
        advance(out[q],
                [&](const Piece& p) { return send(sockets_[q], p.data, p.bytes, MSG_DONTWAIT | MSG_NOSIGNAL); });
        const int events = (in[q].bytes ? POLLIN : 0) | (out[q].bytes ? POLLOUT : 0);
        if (events) open.push_back({sockets_[q], static_cast<short>(events), 0});
      }
      if (open.empty()) break;
      poll(open.data(), open.size(), -1);
    }
    waits_ = false;
  }
  template <class F>
  static void advance(Piece& rest, F call) {
    if (!rest.bytes) return;
    constexpr size_t kMost = 1 << 20;  // so that others get their turn
    const ssize_t n = call({rest.data, std::min(rest.bytes, kMost)});
    if (n > 0) {
      rest.data = static_cast<char*>(rest.data) + n;
      rest.bytes -= static_cast<size_t>(n);
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR))
      other_has_ended();
  }
  // The launcher knows how, says it, and ends this rank as well.
  [[noreturn]] static void other_has_ended() {
    std::this_thread::sleep_for(std::chrono::seconds(10));
    _exit(static_cast<int>(Exit::failed));
  }

  // A thread of its own: a process that is frozen does not end.
  void beat(const std::stop_token& stop) {
    for (auto told = WatchClock::time_point{}; !stop.stop_requested();) {
      if (seconds_since(told) > pulse_period(timeout)) {
        tell(false);
        told = WatchClock::now();
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  void tell(bool last) {
    if (pulses_ < 0) return;
    Pulse pulse = pulse_of(*this, waits_);
    pulse.last = last;
    // A pulse for which there is no room follows another that is as good.
    if (send(pulses_, &pulse, sizeof pulse, MSG_NOSIGNAL | (last ? 0 : MSG_DONTWAIT)) < 0 && errno != EAGAIN)
      _exit(static_cast<int>(Exit::failed));  // the launcher has been killed
  }

  const int rank_;
  const std::vector<int> sockets_;
  const int pulses_;
  const int node_ = [this] {  // PARE_NODE_RANKS, for tests: as if each so many had a machine of their own
    const char* const set = std::getenv("PARE_NODE_RANKS");
    const int n = set ? std::atoi(set) : ranks();
    return n > 0 && ranks() % n == 0 ? n : ranks();
  }();
  std::atomic<bool> waits_ = false;
  std::jthread watched_;
};

// ---- the process that started them

constexpr std::array kPassedOn = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};

sigset_t launcher_signals() {
  sigset_t all;
  sigemptyset(&all);
  for (const int signal : kPassedOn) sigaddset(&all, signal);
  sigaddset(&all, SIGCHLD);
  return all;
}

class Launcher {
 public:
  explicit Launcher(size_t ranks) : ranks_(ranks) {}
  void add(int rank, pid_t process, int pulses) { ranks_[static_cast<size_t>(rank)] = {process, pulses, false, false}; }
  void close_all() {
    for (const Rank& r : ranks_)
      if (r.pulses >= 0) close(r.pulses);
  }

  // Until all have ended.  Returns the exit code.
  int wait() {
    const sigset_t signals = launcher_signals();
    Watch watch(static_cast<int>(ranks_.size()), -1, [this](int r) { return name(r); });
    while (std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return !r.ended; })) {
      constexpr timespec turn{0, 100'000'000};
      if (const int signal = sigtimedwait(&signals, nullptr, &turn); signal > 0 && signal != SIGCHLD) receive(signal);
      pass_on();
      for (int r = 0; r < static_cast<int>(ranks_.size()); r++)
        if (const int code = look_at(r, watch); code != 0) return code;
      if (const std::string why = watch.judge(); !why.empty()) return end_all(why, static_cast<int>(Exit::failed));
    }
    return code_;
  }

 private:
  struct Rank {
    pid_t process = -1;
    int pulses = -1;
    bool last = false, ended = false;  // its last pulse was heard; it is no more
  };
  std::string name(int r) const { return cat("rank ", r, " (process ", ranks_[static_cast<size_t>(r)].process, ")"); }

  // Takes the pulses of a rank, and its end.  Returns the exit code of a job that has ended with it, else 0.
  int look_at(int rank, Watch& watch) {
    Rank& r = ranks_[static_cast<size_t>(rank)];
    if (r.ended) return 0;
    int status = 0;
    const bool ended = waitpid(r.process, &status, WNOHANG) == r.process;  // before the pulses: none comes later
    for (Pulse pulse; recv(r.pulses, &pulse, sizeof pulse, MSG_DONTWAIT) == sizeof pulse; r.last = pulse.last)
      watch.hear(rank, pulse);
    if (!ended) return 0;
    r.ended = true;
    if (WIFSIGNALED(status)) {
      const int signal = WTERMSIG(status);
      if (signal == passed_on_) end_as_by(signal);
      return end_all(watch.describe(rank, cat("was ended by signal ", signal, " (", strsignal(signal), ")",
                                              signal == SIGKILL ? ", which the kernel sends if memory runs out" : "")),
                     static_cast<int>(Exit::failed));
    }
    const int code = WEXITSTATUS(status);
    watch.has_ended(rank);
    const bool interrupted = code == static_cast<int>(Exit::interrupted);
    if (interrupted && r.last) code_ = code;  // all ranks end so
    if ((code == 0 || interrupted) && r.last) return 0;
    const bool at_once = interrupted && passed_on_ != 0;  // at a second signal
    return end_all(r.last || at_once ? "" : watch.describe(rank, cat("exited with code ", code, " before the others")),
                   code == 0 ? static_cast<int>(Exit::failed) : code);
  }

  void receive(int signal) {
    const bool ends = signal == SIGINT || signal == SIGTERM;
    if (ends) received_++;
    if (ends || received_ == 0) passed_on_ = signal;
  }
  // In every turn: a rank to which the same signal of another sender is still pending never sees ours.
  void pass_on() const {
    for (const Rank& r : ranks_)
      if (passed_on_ != 0 && !r.ended) sigqueue(r.process, passed_on_, {.sival_int = received_});
  }
  int end_all(const std::string& why, int code) {
    if (!why.empty()) std::fprintf(stderr, "pare: %s\n", why.c_str());
    for (Rank& r : ranks_)
      if (!r.ended) kill(r.process, SIGKILL);
    for (Rank& r : ranks_)
      if (!r.ended) waitpid(r.process, nullptr, 0);
    return code;
  }
  // As a program without ranks that is still loading.
  [[noreturn]] void end_as_by(int signal) {
    end_all("", 0);
    std::signal(signal, SIG_DFL);
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, signal);
    raise(signal);
    sigprocmask(SIG_UNBLOCK, &one, nullptr);
    _exit(128 + signal);
  }

  std::vector<Rank> ranks_;
  int passed_on_ = 0;  // the last signal
  int received_ = 0;   // of SIGINT and SIGTERM
  int code_ = 0;       // that ranks which ended in order have agreed on
};

pid_t parent = 0;  // the launcher, in the process of a rank

// The process of a rank ends with its launcher.
void bind_to(pid_t launcher, int rank) {
  parent = launcher;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(static_cast<int>(Exit::failed));
  prctl(PR_SET_NAME, cat("pare rank ", rank).c_str());  // in ps and top
}

}  // namespace

pid_t launcher_of_ranks() { return parent; }

std::vector<std::vector<int>> connect_sockets(int ranks) {
  const auto n = static_cast<size_t>(ranks);
  std::vector<std::vector<int>> sockets(n, std::vector<int>(n, -1));
  for (size_t r = 0; r < n; r++)
    for (size_t q = 0; q < r; q++) {
      const auto ends = socket_pair(SOCK_STREAM);
      sockets[r][q] = ends[0];
      sockets[q][r] = ends[1];
    }
  return sockets;
}

std::unique_ptr<Comm> make_socket_comm(int rank, std::vector<int> sockets, int launcher) {
  return std::make_unique<SocketComm>(rank, std::move(sockets), launcher);
}

void start_ranks(int ranks) {
  if (ranks == 1) return;
  check_not_launched(ranks);
  const pid_t launcher = getpid();
  std::fflush(nullptr);
  std::signal(SIGCHLD, SIG_DFL);  // ignored, it would hide how ranks end
  sigset_t before;
  const sigset_t signals = launcher_signals();
  sigprocmask(SIG_BLOCK, &signals, &before);
  std::vector<std::vector<int>> sockets = connect_sockets(ranks);
  Launcher processes(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; rank++) {
    const auto pulses = socket_pair(SOCK_SEQPACKET);
    const pid_t process = fork();
    if (process < 0) throw Error(Exit::failed, cat("no process for rank ", rank, ": ", std::strerror(errno)));
    if (process == 0) {
      bind_to(launcher, rank);
      processes.close_all();
      close(pulses[0]);
      for (int r = 0; r < ranks; r++)
        for (const int socket : sockets[static_cast<size_t>(r)])
          if (r != rank && socket >= 0) close(socket);
      sigprocmask(SIG_SETMASK, &before, nullptr);
      return set_world(make_socket_comm(rank, std::move(sockets[static_cast<size_t>(rank)]), pulses[1]));
    }
    close(pulses[1]);
    processes.add(rank, process, pulses[0]);
  }
  for (const std::vector<int>& ends : sockets)
    for (const int socket : ends)
      if (socket >= 0) close(socket);
  std::signal(SIGPIPE, SIG_IGN);  // nobody reads its messages: the ranks still need it
  _exit(processes.wait());
}

}  // namespace pare
