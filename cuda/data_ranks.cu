// Data movement between ranks (ops/data.h states what goes where): through host memory and Comm, so that ranks may
// share a device.  The host waits for the stream, twice.  Bytes: those sent and received, over the link to the host.
#include <vector>

#include "common.cuh"

namespace pare::PARE_CUDA {

namespace {

// Memory of the host in place of a tensor.
struct HostCopy {
  explicit HostCopy(const Tensor& t) : of(t), bytes(t.bytes()), tensor(t.flat()) { tensor.data = bytes.data(); }
  void read(int64_t at, const Tensor& part, Stream stream) {
    if (part.size() > 0) download({tensor.rows(at, part.size()).data, part}, stream);
  }
  void write(Stream stream) {
    if (bytes.empty()) return;
    upload({of, bytes.data()}, stream);
    check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle)), "upload");
  }
  const Tensor of;
  std::vector<char> bytes;
  Tensor tensor;
};

// The parts of x, one behind the other; `first` becomes their places.
HostCopy parts_of(const Tensor& x, std::vector<int64_t>& first, const std::vector<int64_t>& counts, Stream stream) {
  Tensor all = x;
  all.shape[0] = 0;
  for (const int64_t n : counts) all.shape[0] += n;
  HostCopy copy(all);
  int64_t at = 0;
  for (size_t q = 0; q < counts.size(); q++) {
    copy.read(at, x.rows(first[q], counts[q]), stream);
    first[q] = at, at += counts[q];
  }
  return copy;
}

}  // namespace

void all_to_all(const AllToAll& a, Stream stream) {
  AllToAll host = a;
  HostCopy x = parts_of(a.x, host.first, a.sent, stream), y(a.y);
  host.x = x.tensor, host.y = y.tensor;
  on_host(host);
  y.write(stream);
}

void all_gather(const AllGather& a, Stream stream) {
  HostCopy y(a.y);
  const auto rank = static_cast<size_t>(a.comm->rank());
  int64_t at = 0;
  for (size_t q = 0; q < rank; q++) at += a.counts[q];
  y.read(at, a.y.rows(at, a.counts[rank]), stream);
  AllGather host = a;
  host.y = y.tensor;
  on_host(host);
  y.write(stream);
}

void reduce_scatter(const ReduceScatter& a, Stream stream) {
  ReduceScatter host = a;
  HostCopy x = parts_of(a.x, host.first, a.counts, stream), y(a.y);
  host.x = x.tensor, host.y = y.tensor;
  on_host(host);
  y.write(stream);
}

}  // namespace pare::PARE_CUDA
