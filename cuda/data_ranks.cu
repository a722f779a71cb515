// Data movement between ranks (ops/data.h states what goes where): what a rank sends to itself is copied, the rest
// travels by Comm::link.  Rounding to bf16 and back reads and writes every element once.
#include "common.cuh"
#include "ops/data.h"

namespace pare::PARE_CUDA {

namespace {

constexpr int kThreads = 256;

template <class Y, class X>
__global__ void __launch_bounds__(kThreads) convert(Y* __restrict__ y, const X* __restrict__ x, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) y[i] = from_float<Y>(to_float(x[i]));
}
template <class Y, class X>
void convert_all(Y* y, const void* x, int64_t n, Stream stream) {
  const char* op = "reduce_scatter";
  if (n > 0)
    launch(op, convert<Y, X>, {.grid = blocks(op, n, kThreads), .block = kThreads}, stream, y, static_cast<const X*>(x),
           n);
}

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

void reduce_scatter(const ReduceScatter& a, Stream stream) {
  end_gathering(stream);
  const std::vector<Comm::Piece> terms = terms_of(a);
  const Comm::Piece own = terms[static_cast<size_t>(a.comm->rank())];
  if (a.rounded)
    for (size_t q = 0; q < terms.size(); q++)
      convert_all<bf16, float>(static_cast<bf16*>(terms[q].data), a.x.as<float>() + a.first[q], a.counts[q], stream);
  void* const sum = a.rounded ? own.data : a.y.data;
  if (a.comm->ranks() > 1)
    link_of(*a.comm).reduce_scatter(terms, sum, a.rounded ? DType::bf16 : DType::f32, stream.handle);
  else
    copy(sum, own, stream);
  if (a.rounded) convert_all<float, bf16>(a.y.as<float>(), sum, a.y.size(), stream);
}

}  // namespace pare::PARE_CUDA
