#include "ops/data.h"

#include <numeric>

namespace pare {

namespace {

int64_t sum(const std::vector<int64_t>& x) { return std::accumulate(x.begin(), x.end(), int64_t{0}); }

// Checks that there is a number of elements for each rank, and none below 0.
void check_counts(const Contract& c, const char* name, const std::vector<int64_t>& counts, const Comm& comm) {
  c.that(std::ssize(counts) == comm.ranks(), name, " has ", counts.size(), " numbers, expected ", comm.ranks());
  for (const int64_t n : counts) c.that(n >= 0, name, " has a ", n);
}

// Checks that x has the elements [first[q], first[q] + count[q]) of each rank q.
void check_parts(const Contract& c, const Tensor& x, const std::vector<int64_t>& first,
                 const std::vector<int64_t>& count) {
  for (size_t q = 0; q < first.size(); q++)
    c.that(first[q] + count[q] <= x.size(), "elements [", first[q], ", ", first[q] + count[q], ") of ", x);
}

// Returns `cost` with the bytes of the elements that go to other ranks.
Cost sending(Cost cost, const std::vector<int64_t>& counts, Comm& comm, DType type) {
  const auto size = static_cast<int64_t>(dtype_size(type));
  const auto own = static_cast<size_t>(comm.rank());
  for (size_t q = 0; q < counts.size(); q++) {
    if (q != own) cost.sent += counts[q] * size;
    if (comm.machines()[q] != comm.machines()[own]) cost.abroad += counts[q] * size;
  }
  return cost;
}

Comm::Piece piece(const Tensor& t, int64_t first, int64_t count) {
  const Tensor part = t.rows(first, count);
  return {part.data, part.bytes()};
}
// One behind the other.
std::vector<Comm::Piece> parts(const Tensor& t, const std::vector<int64_t>& counts) {
  std::vector<Comm::Piece> all;
  int64_t at = 0;
  for (const int64_t n : counts) {
    all.push_back(piece(t, at, n));
    at += n;
  }
  return all;
}
std::vector<Comm::Piece> parts(const Tensor& t, const std::vector<int64_t>& first, const std::vector<int64_t>& counts) {
  std::vector<Comm::Piece> all;
  for (size_t q = 0; q < counts.size(); q++) all.push_back(piece(t, first[q], counts[q]));
  return all;
}

}  // namespace

void AllToAll::check(Contract& c) const {
  check_counts(c, "first", first, *comm);
  check_counts(c, "sent", sent, *comm);
  check_counts(c, "received", received, *comm);
  c.tensor("y", y, x.dtype, {sum(received)});
  c.tensor("x", x, x.dtype, {x.shape[0]});
  check_parts(c, x, first, sent);
}
Cost AllToAll::cost() const {
  const auto size = static_cast<int64_t>(dtype_size(x.dtype));
  return sending({0, sum(sent) * size, sum(received) * size}, sent, *comm, x.dtype);
}

void AllGather::check(Contract& c) const {
  check_counts(c, "counts", counts, *comm);
  c.tensor("y", y, y.dtype, {sum(counts)});
}
Cost AllGather::cost() const {
  const auto size = static_cast<int64_t>(dtype_size(y.dtype));
  const int64_t own = counts[static_cast<size_t>(comm->rank())];
  return sending({0, own * size, (sum(counts) - own) * size}, std::vector<int64_t>(counts.size(), own), *comm, y.dtype);
}

Pieces pieces_of(const AllToAll& a) { return {parts(a.x, a.first, a.sent), parts(a.y, a.received)}; }
Pieces pieces_of(const AllGather& a) {
  std::vector<Comm::Piece> in = parts(a.y, a.counts);
  return {std::vector(in.size(), in[static_cast<size_t>(a.comm->rank())]), in};
}

void on_host(const AllToAll& a) {
  const Pieces p = pieces_of(a);
  a.comm->exchange(p.out, p.in);
}

void on_host(const AllGather& a) {
  const Pieces p = pieces_of(a);
  a.comm->exchange(p.out, p.in);
}

}  // namespace pare
