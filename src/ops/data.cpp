#include "ops/data.h"

#include <numeric>

namespace pare {

namespace {

int64_t sum(const std::vector<int64_t>& x) { return std::accumulate(x.begin(), x.end(), int64_t{0}); }

// One number of elements for each rank, and none below 0.
void check_counts(const Contract& c, const char* name, const std::vector<int64_t>& counts, const Comm& comm) {
  c.that(std::ssize(counts) == comm.ranks(), name, " has ", counts.size(), " numbers, expected ", comm.ranks());
  for (const int64_t n : counts) c.that(n >= 0, name, " has a ", n);
}

// Elements [first[q], first[q] + count[q]) of x.
void check_parts(const Contract& c, const Tensor& x, const std::vector<int64_t>& first,
                 const std::vector<int64_t>& count) {
  for (size_t q = 0; q < first.size(); q++)
    c.that(first[q] + count[q] <= x.size(), "elements [", first[q], ", ", first[q] + count[q], ") of ", x);
}

// Bytes of all parts but that of the rank.
int64_t others(const std::vector<int64_t>& counts, const Comm& comm, DType type) {
  return (sum(counts) - counts[static_cast<size_t>(comm.rank())]) * static_cast<int64_t>(dtype_size(type));
}

Comm::Piece piece(const Tensor& t, int64_t first, int64_t count) {
  const Tensor part = t.rows(first, count);
  return {part.data, part.bytes()};
}

}  // namespace

void AllToAll::check(Contract& c) const {
  check_counts(c, "first", first, *comm), check_counts(c, "sent", sent, *comm);
  check_counts(c, "received", received, *comm);
  c.tensor("y", y, x.dtype, {sum(received)});
  c.tensor("x", x, x.dtype, {x.shape[0]});
  check_parts(c, x, first, sent);
}
Cost AllToAll::cost() const {
  const auto size = static_cast<int64_t>(dtype_size(x.dtype));
  return {0, sum(sent) * size, sum(received) * size, others(sent, *comm, x.dtype)};
}

void AllGather::check(Contract& c) const {
  check_counts(c, "counts", counts, *comm);
  c.tensor("y", y, y.dtype, {sum(counts)});
}
Cost AllGather::cost() const {
  const int64_t own = counts[static_cast<size_t>(comm->rank())] * static_cast<int64_t>(dtype_size(y.dtype));
  return {0, own, others(counts, *comm, y.dtype), own * (comm->ranks() - 1)};
}

void ReduceScatter::check(Contract& c) const {
  check_counts(c, "first", first, *comm), check_counts(c, "counts", counts, *comm);
  c.stat("y", y, {counts[static_cast<size_t>(comm->rank())]});
  c.stat("x", x, {x.shape[0]});
  check_parts(c, x, first, counts);
}
Cost ReduceScatter::cost() const {
  const auto size = static_cast<int64_t>(dtype_size(x.dtype));
  return {y.size() * (comm->ranks() - 1), sum(counts) * size, y.size() * size, others(counts, *comm, x.dtype)};
}

void on_host(const AllToAll& a) {
  std::vector<Comm::Piece> out, in;
  int64_t at = 0;
  for (size_t q = 0; q < a.sent.size(); at += a.received[q], q++) {
    out.push_back(piece(a.x, a.first[q], a.sent[q]));
    in.push_back(piece(a.y, at, a.received[q]));
  }
  a.comm->exchange(out, in);
}

void on_host(const AllGather& a) {
  std::vector<Comm::Piece> in;
  int64_t at = 0;
  for (const int64_t n : a.counts) in.push_back(piece(a.y, at, n)), at += n;
  a.comm->exchange(std::vector(in.size(), in[static_cast<size_t>(a.comm->rank())]), in);
}

void on_host(const ReduceScatter& a) {
  if (a.comm->ranks() == 1) {  // of any type
    const Comm::Piece out = piece(a.x, a.first[0], a.counts[0]), in = piece(a.y, 0, a.counts[0]);
    return a.comm->exchange({&out, 1}, {&in, 1});
  }
  for (int q = 0; q < a.comm->ranks(); q++)
    a.comm->reduce(a.x.rows(a.first[q], a.counts[q]).as<float>(), a.comm->rank() == q ? a.y.as<float>() : nullptr,
                   a.counts[q], q);
}

}  // namespace pare
