// The processes of a run, its ranks, and host memory between them.  One runs alone; mpirun, srun and their like start
// several.  All ranks make the same calls in the same order; nothing here adds floating-point numbers.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/tensor.h"

namespace pare {

// Transport of device memory between ranks (trainer.comm).  any: through the host if the ranks of a machine share its
// only device, else NCCL.
enum class DeviceComm { any, nccl, host };

class Comm {
 public:
  struct Piece {
    void* data = nullptr;
    size_t bytes = 0;
  };

  // Primitives of the ops between ranks of a device.  All work is in the order of `stream`, a cudaStream_t.
  class Link {
   public:
    virtual ~Link() = default;
    virtual std::string name() const = 0;  // "NCCL 2.21.5"
    // Comm::exchange for memory of the device; pieces of the rank itself are ignored.
    virtual void exchange(std::span<const Piece> out, std::span<const Piece> in, void* stream) = 0;
    // Sends the part of this rank, in its place, to all others and receives theirs; parts[q] is rank q's.
    virtual void gather(std::span<const Piece> parts, int own, void* stream) {
      exchange(std::vector<Piece>(parts.size(), parts[static_cast<size_t>(own)]), parts, stream);
    }
    virtual void check() {}                       // throws Error(failed): the link is broken
    virtual int64_t memory() const { return 0; }  // bytes of the device that the library took as it connected
  };
  std::unique_ptr<Link> link;  // made with the device of this rank (Table::open); null: one rank, or no such device

  virtual ~Comm() = default;
  virtual int rank() const = 0, ranks() const = 0;
  virtual int node_rank() const = 0, node_ranks() const = 0;  // among those on this machine
  virtual std::string host() const = 0;                       // the machine's name

  // Sends out[q] to rank q and receives in[q] from it, [ranks] each, of any size.  Where one sends what the other does
  // not expect both throw std::logic_error, before anything is sent.
  virtual void exchange(std::span<const Piece> out, std::span<const Piece> in) = 0;
  // Ends all ranks at once, with this exit code.  Exit::interrupted, on which all have agreed: each ends in order if
  // the launcher keeps its code, since an abort looks like a failure to schedulers.
  [[noreturn]] virtual void abort(int code) = 0;

  // Progress of this rank, set by its ops and steps, for ranks that wait for it; and its own time waiting for others.
  // The job ends if no rank makes progress for `timeout` seconds.
  std::atomic<const char*> doing = "starting";
  std::atomic<uint64_t> calls = 0;
  std::atomic<int64_t> step = 0;
  std::atomic<double> timeout = 600;
  double waited = 0;   // seconds, in exchange()
  bool hangs = false;  // a thread is in a call of a library that does not return: the process ends by _exit()

  // Made of the above.
  bool first() const { return rank() == 0; }
  std::vector<std::string> gather(std::string_view own);        // what each rank gives, on all of them
  std::string broadcast(std::string_view bytes, int root = 0);  // that of the root, on all of them
  std::vector<int64_t> gather(int64_t own);                     // the same of one number
  int64_t sum(int64_t own), most(int64_t own);                  // over ranks
  // [ranks]: the machine of each rank, as the lowest rank on it.  All ranks make the first call.
  const std::vector<int>& machines();

 private:
  std::vector<int> machines_;
};

Comm& self();  // of one rank alone
// Returns the Comm of all processes that were started together.  Throws Error(usage) if there are several and this
// program was built without MPI: they would be independent runs in one folder.
Comm& world();

// Values one after the other, as bytes for another rank, which runs the same program.
class Packed {
 public:
  Packed() = default;
  explicit Packed(std::string bytes) : bytes_(std::move(bytes)) {}

  template <class T>
  void put(const T& x) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&x), sizeof x);
  }
  template <class C>
  void put_all(const C& items) {  // a string, or a vector or span of plain values
    put(static_cast<uint64_t>(items.size()));
    bytes_.append(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(*items.data()));
  }
  template <class T>
  T take() {
    T x;
    take_bytes(&x, sizeof x);
    return x;
  }
  template <class C>
  C take_all() {
    C items(take<uint64_t>(), {});
    take_bytes(items.data(), items.size() * sizeof(*items.data()));
    return items;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void take_bytes(void* to, size_t n) {
    expect(n <= bytes_.size() - at_, "a rank sent less than was expected");
    if (n) std::memcpy(to, bytes_.data() + at_, n);
    at_ += n;
  }
  std::string bytes_;
  size_t at_ = 0;
};

}  // namespace pare
