// Transport of device memory between ranks: the choice, and the way through the host.
#include <algorithm>
#include <map>

#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

namespace {

// Device, page-locked memory, Comm, and back, in pieces: for ranks that share a device.  The host waits for the stream.
class ByHost final : public Comm::Link {
 public:
  explicit ByHost(Comm& comm) : comm_(comm) {
    void* memory = nullptr;
    check_cuda(cudaMallocHost(&memory, 2 * kHalf), "page-locked memory between ranks");
    out_ = static_cast<char*>(memory);
    in_ = out_ + kHalf;
  }
  ~ByHost() override { cudaFreeHost(out_); }

  std::string name() const override { return "the host's memory"; }

  void exchange(std::span<const Comm::Piece> out, std::span<const Comm::Piece> in, void* stream) override {
    const auto n = out.size(), own = static_cast<size_t>(comm_.rank());
    size_t longest = 0;
    for (size_t q = 0; q < n; q++)
      if (q != own) longest = std::max({longest, out[q].bytes, in[q].bytes});
    longest = static_cast<size_t>(comm_.most(static_cast<int64_t>(longest)));  // so many turns on all of them
    const size_t most = kHalf / (n - 1) / 256 * 256;
    for (size_t at = 0; at < longest; at += most) {
      const auto staged = [&](std::span<const Comm::Piece> pieces, char* memory) {
        std::vector<Comm::Piece> all(n);
        for (size_t q = 0; q < n; q++)
          if (q != own) {
            all[q] = {memory, std::min(most, pieces[q].bytes - std::min(at, pieces[q].bytes))};
            memory += most;
          }
        return all;
      };
      const std::vector<Comm::Piece> to = staged(out, out_), from = staged(in, in_);
      for (size_t q = 0; q < n; q++) download(to[q], out[q].data, at, stream);
      wait(stream);
      comm_.exchange(to, from);
      for (size_t q = 0; q < n; q++) upload(in[q].data, at, from[q], stream);
    }
  }

 private:
  static constexpr size_t kHalf = 16 << 20;  // bytes that leave at a time, and that come

  // Copies from `at` bytes after `from`, or to there.
  static void download(const Comm::Piece& to, const void* from, size_t at, void* stream) {
    if (to.bytes > 0) copy(to.data, static_cast<const char*>(from) + at, to.bytes, cudaMemcpyDeviceToHost, stream);
  }
  static void upload(void* to, size_t at, const Comm::Piece& from, void* stream) {
    if (from.bytes > 0) copy(static_cast<char*>(to) + at, from.data, from.bytes, cudaMemcpyHostToDevice, stream);
  }
  static void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, void* stream) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, kind, static_cast<cudaStream_t>(stream)), "a copy between ranks");
  }
  // Waits for the bytes that are to leave, and for those that came before, whose place is then free.
  static void wait(void* stream) {
    check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "a copy between ranks");
  }

  Comm& comm_;
  char *out_ = nullptr, *in_ = nullptr;
};

// "host has 2 devices: 0 NVIDIA H100, 1 NVIDIA H100"
std::string list_devices(const Comm& comm, int count) {
  std::string all = cat(comm.host(), " has ", count, count == 1 ? " device: " : " devices: ");
  for (int i = 0; i < count; i++) {
    cudaDeviceProp p;
    check_cuda(cudaGetDeviceProperties(&p, i), "the devices");
    all += cat(i ? ", " : "", i, " ", p.name);
  }
  return all;
}

// Ranks with one device between them.
struct Sharing {
  std::string what;          // two of them; "": there are none
  bool with_others = false;  // which do not see that device alone
};
Sharing find_sharing(Comm& comm) {
  int count = 0, device = 0;
  cudaDeviceProp p;
  check_cuda(cudaGetDeviceCount(&count), "the devices");
  check_cuda(cudaGetDevice(&device), "the devices");
  check_cuda(cudaGetDeviceProperties(&p, device), "the devices");
  Packed own;
  own.put_all(cat(comm.host(), " ", std::string_view(p.uuid.bytes, sizeof p.uuid.bytes)));
  own.put(count);
  own.put_all(list_devices(comm, count));
  std::map<std::string, int> ranks;  // the first that has it
  Sharing s;
  int rank = 0;
  for (std::string& bytes : comm.gather(own.bytes())) {
    Packed other(std::move(bytes));
    const auto [it, is_new] = ranks.emplace(other.take_all<std::string>(), rank);
    const bool alone = other.take<int>() == 1;
    if (!is_new && (s.what.empty() || (!alone && !s.with_others)))
      s = {cat("ranks ", it->second, " and ", rank, " have one device between them; ", other.take_all<std::string>()),
           !alone};
    rank++;
  }
  return s;
}

}  // namespace

void connect(Comm& comm, DeviceComm by) {
  comm.link.reset();
  const Sharing sharing = find_sharing(comm);
  const bool host = by == DeviceComm::any ? !sharing.what.empty() && !sharing.with_others : by == DeviceComm::host;
  if (!host && !sharing.what.empty() && !nccl_shares_devices())
    fail(sharing.what, "; NCCL needs one for each rank: start fewer, or set trainer.comm=host, by which ranks share (",
         "to test NCCL 2.30 or later, NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment lets it share, too)");
  comm.link = host ? std::make_unique<ByHost>(comm) : make_nccl(comm);
}

}  // namespace pare::PARE_CUDA
