// Data movement between ranks (ops/data.h): a rank copies the rows that it sends to itself; the others travel by
// Comm::link.
#include "ops/data.h"
#include "runtime/common.cuh"

namespace pare::PARE_CUDA {

namespace {

void copy(void* to, const Comm::Piece& from, Stream stream) {
  if (from.bytes == 0 || to == from.data) return;
  check_cuda(
      cudaMemcpyAsync(to, from.data, from.bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream.handle)),
      "a copy between ranks");
}

Comm::Link& link_of(const Comm& comm) {
  expect(comm.link != nullptr, "ops between ranks need a device that was opened with them");
  return *comm.link;
}

}  // namespace

void all_to_all(const AllToAll& a, Stream stream) {
  end_gathering(stream);
  const Pieces p = pieces_of(a);
  const auto own = static_cast<size_t>(a.comm->rank());
  copy(p.in[own].data, p.out[own], stream);
  if (a.comm->ranks() > 1) link_of(*a.comm).exchange(p.out, p.in, stream.handle);
}

void all_gather(const AllGather& a, Stream stream) {
  end_gathering(stream);
  if (a.comm->ranks() > 1) link_of(*a.comm).gather(pieces_of(a).in, a.comm->rank(), stream.handle);
}

}  // namespace pare::PARE_CUDA
