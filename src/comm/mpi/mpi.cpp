// Ranks by MPI: Open MPI or MPICH, version 4.
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "base/half.h"
#include "comm/comm.h"

namespace pare {

namespace {

constexpr size_t kMost = size_t{1} << 30;  // bytes of a message: MPI counts in int

class Mpi final : public Comm {
 public:
  Mpi() {
    int level = 0;
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    if (level < MPI_THREAD_MULTIPLE) fail("this MPI has no MPI_THREAD_MULTIPLE");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_), MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
    MPI_Comm node;
    check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node), "MPI_Comm_split_type");
    MPI_Comm_rank(node, &node_rank_), MPI_Comm_size(node, &node_ranks_);
    MPI_Comm_free(&node);
    check(MPI_Comm_dup(MPI_COMM_WORLD, &pulse_), "MPI_Comm_dup");
    check(MPI_Op_create(add_bf16, 1, &sum_bf16_), "MPI_Op_create");
    hosts_ = gather(host());
    watcher_ = std::jthread([this](std::stop_token stop) { watch(stop); });
  }
  ~Mpi() override {
    exchange(std::vector<Piece>(hosts_.size()), std::vector<Piece>(hosts_.size()));  // nobody is missed who has ended
    watcher_ = {};
    MPI_Comm_free(&pulse_);
    MPI_Op_free(&sum_bf16_);
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
    const auto start = std::chrono::steady_clock::now();
    struct Sizes {
      uint64_t sent, expected;
    };
    std::vector<Sizes> own_sizes(n), sizes(n);  // by the other rank; of it
    for (size_t q = 0; q < n; q++) own_sizes[q] = {out[q].bytes, in[q].bytes};
    std::vector<MPI_Request> requests(1);
    check(MPI_Ialltoall(own_sizes.data(), 2, MPI_UINT64_T, sizes.data(), 2, MPI_UINT64_T, MPI_COMM_WORLD, &requests[0]),
          "MPI_Ialltoall");
    wait(requests);
    for (size_t q = 0; q < n; q++) {
      expect(sizes[q].sent == in[q].bytes, "rank ", q, " sends ", sizes[q].sent, " bytes to rank ", rank_,
             ", which expects ", in[q].bytes);
      expect(sizes[q].expected == out[q].bytes, "rank ", rank_, " sends ", out[q].bytes, " bytes to rank ", q,
             ", which expects ", sizes[q].expected);
    }
    requests.clear();
    for (size_t k = 1; k < n; k++) {
      const size_t from = (own + n - k) % n, to = (own + k) % n;
      each_message(in[from], [&](char* data, int bytes) {
        check(MPI_Irecv(data, bytes, MPI_BYTE, static_cast<int>(from), 0, MPI_COMM_WORLD, &requests.emplace_back()),
              "MPI_Irecv");
      });
      each_message(out[to], [&](char* data, int bytes) {
        check(MPI_Isend(data, bytes, MPI_BYTE, static_cast<int>(to), 0, MPI_COMM_WORLD, &requests.emplace_back()),
              "MPI_Isend");
      });
    }
    if (in[own].bytes && in[own].data != out[own].data) std::memmove(in[own].data, out[own].data, in[own].bytes);
    wait(requests);
    calls++;
    waited += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  void reduce(const Piece& x, void* y, DType type, int root) override {
    const bool f32 = type == DType::f32;
    size_t at = 0;
    std::vector<char> own;  // not MPI_IN_PLACE: of a long message MPICH 4.0 crashes in it, but on rank 0
    each_message(x, [&](char* data, int bytes) {
      const auto count = bytes / static_cast<int>(dtype_size(type));
      if (x.data == y) own.assign(data, data + bytes);
      check(MPI_Reduce(x.data == y ? own.data() : data, y ? static_cast<char*>(y) + at : nullptr, count,
                       f32 ? MPI_FLOAT : MPI_UINT16_T, f32 ? MPI_SUM : sum_bf16_, root, MPI_COMM_WORLD),
            "MPI_Reduce");
      at += static_cast<size_t>(bytes);
    });
  }

  [[noreturn]] void abort(int code) override {
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

  static void add_bf16(void* x, void* y, int* n, MPI_Datatype*) {
    for (int i = 0; i < *n; i++) {
      uint16_t& sum = static_cast<uint16_t*>(y)[i];
      sum = f32_to_bf16(bf16_to_f32(static_cast<const uint16_t*>(x)[i]) + bf16_to_f32(sum));
    }
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

  // What a rank tells the others every few seconds.
  struct Pulse {
    uint64_t calls;
    int64_t step;
    char doing[32];
    bool waits;  // for others
    bool last;   // nothing follows
  };
  Pulse own_pulse() const {
    Pulse p{calls, step, {}, waits_, false};
    std::snprintf(p.doing, sizeof p.doing, "%s", doing.load());
    return p;
  }

  // A thread of its own: mpirun sees a process end, but not one that is frozen, or a machine that cannot be reached.
  void watch(const std::stop_token& stop) {
    using Clock = std::chrono::steady_clock;
    const auto seconds = [](Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); };
    // Test hook: a rank that is silent for so long is lost.
    const char* const limit = std::getenv("PARE_SILENCE");
    const double silence = limit ? std::atof(limit) : 60;
    struct Other {
      Pulse pulse{}, in{}, out{};
      MPI_Request receive = MPI_REQUEST_NULL, send = MPI_REQUEST_NULL;
      Clock::time_point heard = Clock::now(), moved = heard;  // heard of, and of its progress
    };
    std::vector<Other> others(static_cast<size_t>(ranks_));
    const auto each = [&](auto f) {
      for (int r = 0; r < ranks_; r++)
        if (r != rank_) f(r, others[static_cast<size_t>(r)]);
    };
    const auto listen = [&](int r, Other& o) { MPI_Irecv(&o.in, sizeof o.in, MPI_BYTE, r, 0, pulse_, &o.receive); };
    each(listen);
    Other& own = others[static_cast<size_t>(rank_)];
    for (auto sent = Clock::time_point{}; !stop.stop_requested();) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const Pulse now = own_pulse();
      if (seconds(own.heard) > silence / 2)  // it was this rank that stood still, as all do in a job that is suspended
        for (Other& o : others) o.heard = o.moved = Clock::now();
      own.heard = Clock::now();
      if (now.calls != own.pulse.calls) own.moved = own.heard;
      own.pulse = now;
      const bool due = seconds(sent) > silence / 12;
      if (due) sent = Clock::now();
      each([&](int r, Other& o) {
        int done = 0;
        if (!o.in.last) MPI_Test(&o.receive, &done, MPI_STATUS_IGNORE);
        if (done) {
          o.heard = Clock::now();
          if (o.in.calls != o.pulse.calls) o.moved = o.heard;
          o.pulse = o.in;
          if (!o.in.last) listen(r, o);
        }
        if (!due) return;
        MPI_Test(&o.send, &done, MPI_STATUS_IGNORE);
        if (!done) return;
        o.out = now;
        MPI_Isend(&o.out, sizeof o.out, MPI_BYTE, r, 0, pulse_, &o.send);
      });
      // The lowest rank that is heard of speaks; the others leave it two seconds.
      int speaker = 0;
      while (seconds(others[static_cast<size_t>(speaker)].heard) > silence) speaker++;
      const double later = speaker == rank_ ? 0 : 2;
      // A rank that stands still stops all of them before long: it is the one that does not wait.
      bool moves = false, all_wait = true;
      for (const Other& o : others)
        moves = moves || seconds(o.moved) <= timeout + later, all_wait = all_wait && o.pulse.waits;
      for (int r = 0; r < ranks_; r++) {
        const Other& o = others[static_cast<size_t>(r)];
        if (seconds(o.heard) > silence + later)
          lost(r, o.pulse, cat("has not been heard of for ", static_cast<int>(seconds(o.heard)), " s"), now);
        if (!moves && (!o.pulse.waits || all_wait))
          lost(r, o.pulse, cat("has made no progress for ", static_cast<int>(seconds(o.moved)), " s"), now);
      }
    }
    // Every message is taken before a rank ends: MPI_Finalize of MPICH waits for that.
    each([&](int r, Other& o) {
      MPI_Wait(&o.send, MPI_STATUS_IGNORE);
      o.out = own_pulse(), o.out.last = true;
      MPI_Isend(&o.out, sizeof o.out, MPI_BYTE, r, 0, pulse_, &o.send);
    });
    each([&](int r, Other& o) {
      while (!o.in.last) {
        MPI_Wait(&o.receive, MPI_STATUS_IGNORE);
        if (!o.in.last) listen(r, o);
      }
      MPI_Wait(&o.send, MPI_STATUS_IGNORE);
    });
  }

  [[noreturn]] void lost(int rank, const Pulse& last, const std::string& what, const Pulse& now) {
    std::fprintf(stderr, "pare: rank %d on %s %s: it was in step %lld, at %s; rank %d is in step %lld, at %s\n", rank,
                 hosts_[static_cast<size_t>(rank)].c_str(), what.c_str(), static_cast<long long>(last.step), last.doing,
                 rank_, static_cast<long long>(now.step), now.doing);
    abort(static_cast<int>(Exit::failed));
  }

  int rank_ = 0, ranks_ = 1, node_rank_ = 0, node_ranks_ = 1;
  MPI_Comm pulse_ = MPI_COMM_NULL;
  MPI_Op sum_bf16_ = MPI_OP_NULL;
  std::vector<std::string> hosts_;
  std::atomic<bool> waits_ = false;
  std::jthread watcher_;
};

}  // namespace

std::unique_ptr<Comm> make_mpi_comm();
std::unique_ptr<Comm> make_mpi_comm() { return std::make_unique<Mpi>(); }

}  // namespace pare
