// Memory of devices between ranks by NCCL, on the stream of the ops; only that stream blocks.
//
// A call of NCCL that hangs cannot be given up, and while the host waits for work of a device it asks for no error: two
// threads see to both, and end the job with a message.
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "base/text.h"
#include "comm/watch.h"
#include "runtime/library.h"
#include "runtime/machine.cuh"
#include "runtime/nccl.h"

namespace pare::PARE_CUDA {

namespace {

#define PARE_NCCL(X)   \
  X(GetVersion)        \
  X(GetErrorString)    \
  X(GetUniqueId)       \
  X(CommInitRank)      \
  X(CommDestroy)       \
  X(CommAbort)         \
  X(CommGetAsyncError) \
  X(GroupStart)        \
  X(GroupEnd)          \
  X(Send)              \
  X(Recv)              \
  X(Broadcast)

struct Functions {
#define X(name) decltype(&nccl##name) name;
  PARE_NCCL(X)
#undef X
  decltype(&ncclGetLastError) GetLastError;  // null before 2.13
} functions{};

#ifdef CUEMU
struct StandIn {
  template <class F>
  void find(F& function, const char* name) const {
    function = reinterpret_cast<F>(cuemu_nccl_symbol(name));
  }
};
#endif

const Functions& nccl() {
  if (!functions.Broadcast) {
    Functions f{};
    // A site may have set otherwise; then calls would return before they are done.
    setenv("NCCL_COMM_BLOCKING", "1", 1);
#ifdef CUEMU
    const StandIn library;
#else
    const Library library{"libnccl.so.2", "libnccl.so"};
    if (!library)
      fail("ranks compute on devices of their own, between which NCCL sends, and NCCL was not found (",
           library.why_not(),
           "): name its folder in LD_LIBRARY_PATH, often nvidia/nccl/lib of Python's packages; or install it, libnccl2 "
           "of NVIDIA's packages; or set trainer.comm=host, which goes through the host's memory and takes longer");
#endif
    library.find(f.GetLastError, "ncclGetLastError");
#define X(name)                       \
  library.find(f.name, "nccl" #name); \
  if (!f.name) fail("the NCCL that was found has no nccl" #name ": version 2.10 or later is needed");
    PARE_NCCL(X)
#undef X
    functions = f;
  }
  return functions;
}
#undef PARE_NCCL

std::string version_text(int v) {
  return v < 10000 ? cat(v / 1000, ".", v / 100 % 10, ".", v % 100) : cat(v / 10000, ".", v / 100 % 100, ".", v % 100);
}

// The version, which is that of all ranks.
int agreed_version(Comm& comm) {
  int version = 0;
  nccl().GetVersion(&version);
  if (version < 21000)
    fail("NCCL ", version_text(version), " was found, 2.10 or later is needed: install a later one, libnccl2 of ",
         "NVIDIA's packages, or set trainer.comm=host");
  const std::vector<int64_t> all = comm.gather(version);
  for (size_t r = 1; r < all.size(); r++)
    if (all[r] != all[0])
      fail("NCCL is ", version_text(static_cast<int>(all[0])), " on rank 0 and ",
           version_text(static_cast<int>(all[r])), " on rank ", r, "; all ranks need the same");
  return version;
}

int64_t free_memory() {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "memory of the device");
  return static_cast<int64_t>(free);
}

// Calls f() every 50 ms in a thread of its own, as long as it lives.
class Repeated {
 public:
  template <class F>
  explicit Repeated(F f) {
    thread_ = std::jthread([f](const std::stop_token& stop) {
      std::mutex mutex;
      std::condition_variable_any wake;
      std::unique_lock lock(mutex);
      while (!wake.wait_for(lock, stop, std::chrono::milliseconds(50), [&] { return stop.stop_requested(); })) f();
    });
  }

 private:
  std::jthread thread_;
};

class ByNccl final : public Comm::Link {
 public:
  explicit ByNccl(Comm& comm) : comm_(comm), rank_(comm.rank()), ranks_(comm.ranks()), version_(agreed_version(comm)) {
    const char* const before = comm.doing.exchange("connecting by NCCL");
    const int64_t free_before = free_memory();
    const double limit = 2 * silence_limit();
    const Repeated limited([this, limit, start = WatchClock::now()] {
      if (seconds_since(start) > limit)
        end_job(cat(name(), " has not connected the ranks for ", static_cast<int>(limit),
                    " s; NCCL_DEBUG=INFO in the environment says how far it is, NCCL_SOCKET_IFNAME chooses another "
                    "network, and trainer.comm=host goes without it"));
    });
    ncclUniqueId id{};
    if (comm.first()) check(nccl().GetUniqueId(&id), "ncclGetUniqueId");
    const std::string all = comm.broadcast({id.internal, sizeof id.internal});
    std::copy(all.begin(), all.end(), id.internal);
    check(nccl().CommInitRank(&nccl_, ranks_, id, rank_), "ncclCommInitRank");
    watcher_.emplace([this] { look_for_errors(); });
    try_out();
    memory_ = std::max<int64_t>(0, free_before - free_memory());
    comm.doing = before;
  }
  ~ByNccl() override {
    watcher_.reset();
    if (!nccl_) return;
    // An orderly end waits for all ranks, which may never come.
    if (broken_ || std::uncaught_exceptions() > 0)
      nccl().CommAbort(nccl_);
    else
      end_in_order();
  }

  std::string name() const override { return cat("NCCL ", version_text(version_)); }
  int64_t memory() const override { return memory_; }

  void exchange(std::span<const Comm::Piece> out, std::span<const Comm::Piece> in, void* stream) override {
    check(nccl().GroupStart(), "ncclGroupStart");
    for (int q = 0; q < ranks_; q++) {
      const Comm::Piece to = out[static_cast<size_t>(q)], from = in[static_cast<size_t>(q)];
      if (q == rank_) continue;
      const auto s = static_cast<cudaStream_t>(stream);
      if (to.bytes > 0) check(nccl().Send(to.data, to.bytes, ncclInt8, q, nccl_, s), "ncclSend");
      if (from.bytes > 0) check(nccl().Recv(from.data, from.bytes, ncclInt8, q, nccl_, s), "ncclRecv");
    }
    check(nccl().GroupEnd(), "ncclGroupEnd");
  }

  // On one machine every rank reaches every other directly.  Between machines that would send a part to each rank of
  // the others; along a ring it crosses once or twice.  Parts may differ in size, which ncclAllGather has not.
  void gather(std::span<const Comm::Piece> parts, int own, void* stream) override {
    if (one_machine_) return Link::gather(parts, own, stream);
    check(nccl().GroupStart(), "ncclGroupStart");
    for (int q = 0; q < ranks_; q++)
      if (const Comm::Piece& part = parts[static_cast<size_t>(q)]; part.bytes > 0)
        check(nccl().Broadcast(part.data, part.data, part.bytes, ncclInt8, q, nccl_, static_cast<cudaStream_t>(stream)),
              "ncclBroadcast");
    check(nccl().GroupEnd(), "ncclGroupEnd");
  }

  void check() override {
    ncclResult_t found = ncclSuccess;
    check(nccl().CommGetAsyncError(nccl_, &found), "ncclCommGetAsyncError");
    check(found, "the work between ranks");
  }

 private:
  std::string in_words(ncclResult_t result, const char* what) const {
    const std::string words = nccl().GetLastError ? nccl().GetLastError(nccl_) : "";
    return cat("NCCL ", version_text(version_), ", ", what, ": ", nccl().GetErrorString(result),
               words.empty() ? "" : cat(" (", printable(words), ")"), "; NCCL_DEBUG=INFO in the environment says more");
  }
  void check(ncclResult_t result, const char* what) {
    if (result == ncclSuccess) return;
    const std::lock_guard lock(speaks_);
    broken_ = true;
    throw Error(Exit::failed, in_words(result, what));
  }

  // In a thread of its own.
  void look_for_errors() {
    ncclResult_t found = ncclSuccess;
    const ncclResult_t asked = nccl().CommGetAsyncError(nccl_, &found);
    if (asked != ncclSuccess || found != ncclSuccess)
      end_job(in_words(asked != ncclSuccess ? asked : found, "the work between ranks"));
  }
  // Whoever starts the ranks names one that died, which is why the others find errors: it comes first.  Then rank 0.
  void end_job(const std::string& why) {
    std::this_thread::sleep_for(std::chrono::milliseconds(rank_ == 0 ? 1000 : 2000));
    const std::lock_guard lock(speaks_);  // the host, if it finds the error now, waits
    if (broken_) return;
    std::fprintf(stderr, "pare: rank %d: %s; it was in step %lld, at %s\n", rank_, why.c_str(),
                 static_cast<long long>(comm_.step), comm_.doing.load());
    comm_.abort(static_cast<int>(Exit::failed));
  }

  // All work is done: if the end hangs, the run is finished all the same.
  void end_in_order() {
    comm_.doing = "ending NCCL";
    struct End {
      std::mutex mutex;
      std::condition_variable wake;
      bool done = false;
      ncclResult_t result = ncclSuccess;
    };
    const auto end = std::make_shared<End>();
    std::thread([end, nccl = nccl_] {
      const ncclResult_t result = pare::PARE_CUDA::nccl().CommDestroy(nccl);
      const std::lock_guard lock(end->mutex);
      end->done = true;
      end->result = result;
      end->wake.notify_all();
    }).detach();
    std::unique_lock lock(end->mutex);
    const int limit = std::max(1, static_cast<int>(silence_limit() / 6));
    const bool done = end->wake.wait_for(lock, std::chrono::seconds(limit), [&] { return end->done; });
    comm_.hangs = comm_.hangs || !done;
    if (!done)
      std::fprintf(stderr, "pare: rank %d: ncclCommDestroy has not returned for %d s; the rank ends without it\n",
                   rank_, limit);
    else if (end->result != ncclSuccess)
      std::fprintf(stderr, "pare: rank %d: %s\n", rank_, in_words(end->result, "ncclCommDestroy").c_str());
  }

  // The first words between all ranks: NCCL connects them, and takes memory for that, when they first talk.
  void try_out() {
    const auto n = static_cast<size_t>(ranks_);
    float* memory = nullptr;
    const auto run = [](cudaError_t e) { check_cuda(e, "the first words between ranks"); };
    run(cudaMalloc(&memory, 2 * n * sizeof(float)));
    std::vector<float> words(2 * n, -1);
    std::vector<Comm::Piece> out(n), in(n);
    for (size_t q = 0; q < n; q++) {
      words[q] = static_cast<float>(rank_);
      out[q] = {memory + q, sizeof(float)};
      in[q] = {memory + n + q, sizeof(float)};
    }
    run(cudaMemcpy(memory, words.data(), words.size() * sizeof(float), cudaMemcpyHostToDevice));
    exchange(out, in, nullptr);
    in[static_cast<size_t>(rank_)] = out[static_cast<size_t>(rank_)];
    gather(in, rank_, nullptr);
    run(cudaMemcpy(words.data(), memory, words.size() * sizeof(float), cudaMemcpyDeviceToHost));
    run(cudaFree(memory));
    bool right = true;
    for (size_t q = 0; q < n; q++)
      right = right && (q == static_cast<size_t>(rank_) || words[n + q] == static_cast<float>(q));
    if (!right) throw Error(Exit::failed, cat(name(), ": the first words of the other ranks are not what they sent"));
  }

  Comm& comm_;
  const int rank_, ranks_, version_;
  const bool one_machine_ = comm_.node_ranks() == ranks_;
  ncclComm_t nccl_ = nullptr;
  int64_t memory_ = 0;
  std::mutex speaks_;    // held while an error is reported
  bool broken_ = false;  // the host does
  std::optional<Repeated> watcher_;
};

}  // namespace

bool nccl_shares_devices() {
  const char* const set = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (!set || std::string_view(set) != "1") return false;
  int version = 0;
  return nccl().GetVersion(&version) == ncclSuccess && version >= 23000;
}

std::unique_ptr<Comm::Link> make_nccl(Comm& comm) { return std::make_unique<ByNccl>(comm); }

}  // namespace pare::PARE_CUDA
