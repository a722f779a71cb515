// Data movement, sums of rows and the embedding (roles of types and orders of sums: list.h).
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "base/rng.h"
#include "comm/comm.h"
#include "ops/contract.h"
#include "ops/cost.h"
#include "ops/linear.h"

namespace pare {

// Host to device.  The source must stay valid until the stream has passed this point (Device sees to it), and should be
// of Table::staging.
struct Upload {
  Tensor dst;       // any, contiguous, out
  const void* src;  // host, dst.bytes() bytes
  void check(Contract& c) const { c.bytes("dst", dst); }
  Cost cost() const { return {0, detail::total_bytes(dst), detail::total_bytes(dst)}; }
  auto outputs() const { return std::array{dst}; }
};
// Device to host; the data are there when the call returns.  `null` writes zeros.
struct Download {
  void* dst;   // host, src.bytes() bytes
  Tensor src;  // any, contiguous
  void check(Contract& c) const { c.bytes("src", src); }
  Cost cost() const { return {0, detail::total_bytes(src), detail::total_bytes(src)}; }
  auto outputs() const { return std::array<Tensor, 0>{}; }
};
// Sets every byte to zero.
struct Zero {
  Tensor x;  // any, contiguous, out
  void check(Contract& c) const { c.bytes("x", x); }
  Cost cost() const { return {0, 0, detail::total_bytes(x)}; }
  auto outputs() const { return std::array{x}; }
};
// y += x
struct Accumulate {
  Tensor y;  // stat [n], acc
  Tensor x;  // stat [n]
  void check(Contract& c) const {
    c.stat("y", y, {y.shape[0]});
    c.stat("x", x, {y.shape[0]});
  }
  Cost cost() const { return {y.size(), detail::total_bytes(y, x), detail::total_bytes(y)}; }
  auto outputs() const { return std::array{y}; }
};
// y[dst] = x[src] for each pair.
struct CopyRows {
  Tensor y;      // act or i32 [N, C] acc: only the dst rows are written; rows may be strided
  Tensor x;      // the same type, [M, C] or [M, h, C / h]; rows may be strided; may be y
  Tensor index;  // i32 [n, 2]: (src, dst); no dst occurs twice, and none is a src if x is y
  void check(Contract& c) const {
    const int64_t C = y.shape[1];
    const auto rows = [&](const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
      y.dtype == DType::i32 ? c.index(name, t, shape, c.strided) : c.act(name, t, shape, c.strided);
    };
    rows("y", y, {y.shape[0], C});
    if (x.rank == 3) {
      rows("x", x, {x.shape[0], x.shape[1], x.shape[2]});
      c.that(x.shape[1] * x.shape[2] == C, "x is ", x, ", expected rows of ", C);
    } else {
      rows("x", x, {x.shape[0], C});
    }
    c.index("index", index, {index.shape[0], 2});
  }
  Cost cost() const {
    const int64_t moved = index.shape[0] * y.shape[1] * static_cast<int64_t>(dtype_size(y.dtype));
    return {0, moved + detail::total_bytes(index), moved};
  }
  auto outputs() const { return std::array{y}; }
};
// y[index[r]] += x[r], r ascending
struct ScatterAddRows {
  Tensor y;      // act [N, C] acc
  Tensor x;      // act [R, C]
  Tensor index;  // i32 [R], each in [0, N); repeats allowed
  void check(Contract& c) const {
    const int64_t R = index.shape[0], C = y.shape[1];
    c.act("y", y, {y.shape[0], C});
    c.act("x", x, {R, C});
    c.index("index", index, {R});
  }
  Cost cost() const { return {x.size(), detail::total_bytes(x, x, index), detail::total_bytes(x)}; }
  auto outputs() const { return std::array{y}; }
};
// Hashes of the bits of runs of numbers: the sum modulo 2^64 of element(i, x) over the numbers x of a run, so that
// parts of a run may be added in any order.  i counts from `first`, or in each run from 0.
struct HashRuns {
  Tensor hash;         // i32 [runs(), 2] out: the low and the high word of each run
  Tensor x;            // act or f32 [n]; bf16 and f64 count as the f32 that they become
  int64_t run;         // numbers of a run; the last may have fewer
  uint64_t first = 0;  // i of x[0]
  bool each = false;   // i begins anew in every run
  PARE_HOST_DEVICE static constexpr uint64_t element(uint64_t i, uint32_t bits) { return mix64(i << 32 ^ bits); }
  int64_t runs() const { return (x.shape[0] + run - 1) / run; }
  void check(Contract& c) const {
    c.that(run >= 1, "run is ", run, ", expected 1 or more");
    c.act("x", x, {x.shape[0]});
    c.index("hash", hash, {runs(), 2});
  }
  Cost cost() const { return {0, detail::total_bytes(x), detail::total_bytes(hash)}; }  // of integers, no FLOPs
  auto outputs() const { return std::array{hash}; }
};

// ---- embedding

struct EmbeddingFwd {
  Tensor y;           // act [N, C] out
  Weight table;       // [V, C]
  Tensor ids;         // i32 [N], each in [0, V)
  RowNorm norm = {};  // or absent; of y
  void check(Contract& c) const {
    const int64_t N = ids.shape[0], C = table.inputs();
    table.check(c, "table");
    c.act("y", y, {N, C});
    c.index("ids", ids, {N});
    if (norm.y) norm.check(c, N, C);
  }
  Cost cost() const {
    return {4 * norm.y.size(), detail::total_bytes(y, ids, norm.w), detail::total_bytes(y, norm.y, norm.rstd)};
  }
  auto outputs() const { return std::array{y, norm.y, norm.rstd}; }
};
struct EmbeddingBwd {
  Tensor dtable;  // stat [V, C] acc, rows of dy ascending
  Tensor dy;      // act [N, C]
  Tensor ids;     // i32 [N]
  void check(Contract& c) const {
    c.stat("dtable", dtable, {dtable.shape[0], dtable.shape[1]});
    c.act("dy", dy, {ids.shape[0], dtable.shape[1]});
    c.index("ids", ids, {ids.shape[0]});
  }
  Cost cost() const { return {dy.size(), detail::total_bytes(dy, dy, ids), detail::total_bytes(dy)}; }
  auto outputs() const { return std::array{dtable}; }
};

// ---- between ranks, which all call them in the same order

// Gathers the parts that each rank sends to this one, ranks ascending: rank q gets elements [first[q], first[q] +
// sent[q]) of x.
struct AllToAll {
  Tensor y;                                    // any type [sum of received] out
  Tensor x;                                    // the same type [n]
  std::vector<int64_t> first, sent, received;  // [ranks]
  Comm* comm;
  void check(Contract& c) const;
  Cost cost() const;
  auto outputs() const { return std::array{y}; }
};
// The parts of all ranks.
struct AllGather {
  Tensor y;                     // any type [sum of counts], acc: the part of this rank, in its place, is read
  std::vector<int64_t> counts;  // [ranks]: elements of each part, ranks ascending
  Comm* comm;
  void check(Contract& c) const;
  Cost cost() const;
  auto outputs() const { return std::array{y}; }
};
// Memory that a rank sends to and receives from each rank, inside the tensors.
struct Pieces {
  std::vector<Comm::Piece> out, in;
};
Pieces pieces_of(const AllToAll& a);
Pieces pieces_of(const AllGather& a);

// The same for tensors whose memory is the host's.
void on_host(const AllToAll& a);
void on_host(const AllGather& a);

}  // namespace pare
