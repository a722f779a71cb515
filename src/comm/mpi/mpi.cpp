// Ranks by MPI: Open MPI or MPICH, version 4.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/text.h"
#include "comm/shared.h"
#include "comm/watch.h"

namespace pare {

namespace {

constexpr size_t kMost = size_t{1} << 30;  // bytes of a message: MPI counts in int
constexpr int kData = 0, kPulse = 1;       // tags of messages

using Clock = WatchClock;

// Ranks of this job on this machine that are stopped, such as by SIGSTOP: " 1 2".
std::string stopped_ranks() {
  namespace fs = std::filesystem;
  const auto value = [](const std::string& environment, const std::string& name) -> std::string {
    const size_t at = ('\0' + environment).find('\0' + name + '=');
    return at == std::string::npos ? "" : environment.c_str() + at + name.size() + 1;
  };
  const auto read = [](const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    std::ostringstream text;  // which, unlike an iterator, does not throw when the process ends meanwhile
    text << in.rdbuf();
    return text.str();
  };
  const auto job = [&](const std::string& environment, const std::string& parent) {
    const std::string space = value(environment, "PMIX_NAMESPACE");
    return space.empty() ? parent : space;  // MPICH: the children of one launcher
  };
  const std::string own = job(read("/proc/self/environ"), cat(getppid()));
  std::string ranks;
  std::error_code gone;
  for (fs::directory_iterator process("/proc", gone), end; !gone && process != end; process.increment(gone)) {
    if (!std::isdigit(static_cast<unsigned char>(process->path().filename().string()[0]))) continue;
    const std::string stat = read(process->path() / "stat");
    char state = 0;
    int parent = 0;
    const size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos || std::sscanf(stat.c_str() + name_end, ") %c %d", &state, &parent) != 2)
      continue;
    if (state != 'T') continue;
    const std::string environment = read(process->path() / "environ");
    if (job(environment, cat(parent)) != own) continue;
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
      if (const std::string rank = value(environment, name); !rank.empty()) {
        ranks += " " + rank;
        break;
      }
  }
  return ranks;
}

// Ends this process, and by that the job, if a call in which all ranks meet does not return: before MPI_Init and after
// MPI_Finalize they cannot tell each other how they are.
class FrozenGuard {
 public:
  explicit FrozenGuard(const char* call) : thread_([call](const std::stop_token& stop) { watch(stop, call); }) {}

 private:
  static void watch(const std::stop_token& stop, const char* call) {
    const double silence = silence_limit();
    auto begin = Clock::now(), last = begin, good = begin;  // good: when no rank was seen stopped
    std::mutex mutex;
    std::condition_variable_any wake;
    std::unique_lock lock(mutex);
    const auto ended = [&] { return stop.stop_requested(); };
    while (!wake.wait_for(lock, stop, std::chrono::milliseconds(500), ended)) {
      if (seconds_since(last) > silence / 2) begin = good = Clock::now();  // this process itself stood still
      last = Clock::now();
      const std::string stopped = seconds_since(begin) < silence / 2 ? "" : stopped_ranks();
      if (stopped.empty()) good = Clock::now();
      const bool frozen = seconds_since(good) > silence / 2;
      if (!frozen && seconds_since(begin) <= 10 * silence) continue;
      char host[256] = {};
      gethostname(host, sizeof host - 1);
      const auto waited = static_cast<int>(seconds_since(begin));
      const std::string what =
          frozen ? cat(stopped.find(' ', 1) == std::string::npos ? "rank" : "ranks", stopped, " on ", printable(host),
                       " stopped (by SIGSTOP?): the others have waited ", waited, " s in ", call)
                 : cat(call, " on ", printable(host), " has not returned for ", waited,
                       " s: a rank on another machine is frozen or cannot be reached");
      std::fprintf(stderr, "pare: %s\n", what.c_str());
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // mpirun passes it on
      _exit(static_cast<int>(Exit::failed));
    }
  }
  std::jthread thread_;
};

class Mpi final : public Comm {
 public:
  Mpi() {
    int level = 0;
    {
      const FrozenGuard guard("MPI_Init");
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    }
    if (level < MPI_THREAD_MULTIPLE) fail("this MPI has no MPI_THREAD_MULTIPLE");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
    watcher_ = std::jthread([this](std::stop_token stop) { watch(stop); });
    MPI_Comm node;
    check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node), "MPI_Comm_split_type");
    MPI_Comm_rank(node, &node_rank_);
    MPI_Comm_size(node, &node_ranks_);
    MPI_Comm_free(&node);
    hosts_ = gather(host());
    hosts_known_ = true;
  }
  ~Mpi() override {
    meet_at_end(*this);
    watcher_ = {};
    const FrozenGuard guard("MPI_Finalize");
    MPI_Finalize();
  }

  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  int node_rank() const override { return node_rank_; }
  int node_ranks() const override { return node_ranks_; }
  std::string host() const override {
    char name[MPI_MAX_PROCESSOR_NAME];
    int n = 0;
    MPI_Get_processor_name(name, &n);
    return {name, static_cast<size_t>(n)};
  }

  void exchange(std::span<const Piece> out, std::span<const Piece> in) override {
    const auto n = static_cast<size_t>(ranks_), own = static_cast<size_t>(rank_);
    expect(out.size() == n && in.size() == n, "an exchange of ", out.size(), " and ", in.size(), " pieces, of ", n,
           " ranks");
    if (link) link->check();
    const auto start = Clock::now();
    const std::vector<Sizes> own_sizes = sizes_of(out, in);
    std::vector<Sizes> sizes(n);
    std::vector<MPI_Request> requests(1);
    check(MPI_Ialltoall(own_sizes.data(), 2, MPI_UINT64_T, sizes.data(), 2, MPI_UINT64_T, MPI_COMM_WORLD, &requests[0]),
          "MPI_Ialltoall");
    wait(requests);
    expect_sizes(rank_, own_sizes, sizes);
    requests.clear();
    for (size_t k = 1; k < n; k++) {
      const size_t from = (own + n - k) % n, to = (own + k) % n;
      each_message(in[from], [&](char* data, int bytes) {
        check(MPI_Irecv(data, bytes, MPI_BYTE, static_cast<int>(from), kData, MPI_COMM_WORLD, &requests.emplace_back()),
              "MPI_Irecv");
      });
      each_message(out[to], [&](char* data, int bytes) {
        check(MPI_Isend(data, bytes, MPI_BYTE, static_cast<int>(to), kData, MPI_COMM_WORLD, &requests.emplace_back()),
              "MPI_Isend");
      });
    }
    if (in[own].bytes && in[own].data != out[own].data) std::memmove(in[own].data, out[own].data, in[own].bytes);
    wait(requests);
    calls++;
    waited += seconds_since(start);
  }

  [[noreturn]] void abort(int code) override {
#ifndef MPICH_VERSION  // whose mpirun then exits with 0 in about half of the cases
    if (code == static_cast<int>(Exit::interrupted)) {
      this->~Mpi();
      _exit(code);
    }
#endif
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // mpirun passes on what was said before it kills
    MPI_Abort(MPI_COMM_WORLD, code);
    _exit(code);
  }

 private:
  static void check(int code, const char* call) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING];
    int n = 0;
    MPI_Error_string(code, text, &n);
    throw Error(Exit::failed, cat(call, ": ", std::string(text, static_cast<size_t>(n))));
  }

  template <class F>
  static void each_message(const Piece& p, F f) {
    for (size_t at = 0; at < p.bytes; at += kMost)
      f(static_cast<char*>(p.data) + at, static_cast<int>(std::min(kMost, p.bytes - at)));
  }

  // MPI waits by turning in a circle: whoever has no core of its own would keep another rank from its work.
  void wait(std::vector<MPI_Request>& requests) {
    waits_ = true;
    for (int done = 0, turns = 0; !done; turns++) {
      check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE), "MPI_Testall");
      if (done || turns < 100) continue;
      turns < 1000 ? std::this_thread::yield() : std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    waits_ = false;
  }

  struct Other {
    Pulse in{}, out{};
    MPI_Request receive = MPI_REQUEST_NULL, send = MPI_REQUEST_NULL;
  };
  void listen(int r, Other& o) { MPI_Irecv(&o.in, sizeof o.in, MPI_BYTE, r, kPulse, MPI_COMM_WORLD, &o.receive); }
  void send(int r, Other& o, const Pulse& pulse) {
    o.out = pulse;
    MPI_Isend(&o.out, sizeof o.out, MPI_BYTE, r, kPulse, MPI_COMM_WORLD, &o.send);
  }
  // Takes the pulse that has come, if any.
  void hear(int r, Other& o, Watch& watch) {
    int done = 0;
    if (!o.in.last) MPI_Test(&o.receive, &done, MPI_STATUS_IGNORE);
    if (!done) return;
    watch.hear(r, o.in);
    if (!o.in.last) listen(r, o);
  }

  // A thread of its own: mpirun sees a process end, but not one that is frozen, or a machine that cannot be reached.
  void watch(const std::stop_token& stop) {
    Watch watch(ranks_, rank_, [this](int r) { return name(r); });
    std::vector<Other> others(static_cast<size_t>(ranks_));
    const auto each = [&](auto f) {
      for (int r = 0; r < ranks_; r++)
        if (r != rank_) f(r, others[static_cast<size_t>(r)]);
    };
    each([&](int r, Other& o) { listen(r, o); });
    for (auto sent = Clock::time_point{}; !stop.stop_requested();) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const Pulse now = pulse_of(*this, waits_);
      watch.hear(rank_, now);
      const bool due = seconds_since(sent) > pulse_period(timeout);
      if (due) sent = Clock::now();
      each([&](int r, Other& o) {
        hear(r, o, watch);
        int done = 0;
        if (due) MPI_Test(&o.send, &done, MPI_STATUS_IGNORE);
        if (done) send(r, o, now);
      });
      if (const std::string why = watch.judge(); !why.empty()) end_job(why);
    }
    // Every message is taken before a rank ends: MPI_Finalize of MPICH waits for that.
    const auto until = [&](int r, auto done) {
      for (const auto begin = Clock::now(); !done();) {
        if (seconds_since(begin) > silence_limit() + 2 * rank_)
          end_job(watch.describe(r, cat("has not ended for ", static_cast<int>(seconds_since(begin)), " s")));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    const auto is_sent = [](Other& o) {
      int done = 0;
      MPI_Test(&o.send, &done, MPI_STATUS_IGNORE);
      return done != 0;
    };
    each([&](int r, Other& o) {
      until(r, [&] { return is_sent(o); });
      Pulse last = pulse_of(*this, waits_);
      last.last = true;
      send(r, o, last);
    });
    each([&](int r, Other& o) {
      until(r, [&] { return hear(r, o, watch), o.in.last; });
      until(r, [&] { return is_sent(o); });
    });
  }

  std::string name(int rank) const {
    return cat("rank ", rank, hosts_known_ ? " on " + printable(hosts_[static_cast<size_t>(rank)]) : "");
  }

  [[noreturn]] void end_job(const std::string& why) {
    std::fprintf(stderr, "pare: %s\n", why.c_str());
    abort(static_cast<int>(Exit::failed));
  }

  int rank_ = 0, ranks_ = 1, node_rank_ = 0, node_ranks_ = 1;
  std::vector<std::string> hosts_;  // read by the watcher once it is known
  std::atomic<bool> hosts_known_ = false, waits_ = false;
  std::jthread watcher_;
};

}  // namespace

std::unique_ptr<Comm> make_mpi_comm();
std::unique_ptr<Comm> make_mpi_comm() { return std::make_unique<Mpi>(); }

}  // namespace pare
