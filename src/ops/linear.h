// Weights and linear layers (roles of types and orders of sums: list.h).
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

#include "base/host_device.h"
#include "ops/contract.h"
#include "ops/cost.h"
#include "ops/linear_tiles.h"
#include "ops/vocab_sums.h"

namespace pare {

// A weight w [O, I], in the one layout that all ops of a table read: panels of 16 outputs,
// packed[o / 16][i][o % 16] = w[o][i], zeros past the last output (but see table_cuda_fast, and place_of_weight in
// cuda/linear.cuh).
constexpr int kPanel = 16;
constexpr int64_t weight_panels(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }
// Where in `packed` w[o][i] lies.
PARE_HOST_DEVICE constexpr int64_t weight_place(int64_t o, int64_t i, int64_t inputs) {
  return (o / kPanel * inputs + i) * kPanel + o % kPanel;
}
struct Weight {
  Tensor packed;      // act [weight_panels(O), I, kPanel]
  int64_t count = 0;  // O
  int64_t outputs() const { return count; }
  int64_t inputs() const { return packed.shape[1]; }
  int64_t size() const { return outputs() * inputs(); }
  size_t bytes() const { return static_cast<size_t>(size()) * dtype_size(packed.dtype); }  // without the zeros
  void check(Contract& c, const char* name) const { c.act(name, packed, {weight_panels(outputs()), inputs(), kPanel}); }
  // `rows` are or become those of the weight from `first` on.
  void check_rows(Contract& c, const Tensor& rows, int64_t first) const {
    check(c, "w");
    c.act("rows", rows, {rows.shape[0], inputs()});
    c.that(first >= 0 && first + rows.shape[0] <= outputs(), "rows [", first, ", ", first + rows.shape[0], ") of ",
           outputs());
  }
};

// Rows [first, first + R) of w = rows; with the last row of w also the zeros behind it.
struct PackWeight {
  Weight w;     // acc: only those rows are written
  Tensor rows;  // act [R, I]
  int64_t first;
  void check(Contract& c) const { w.check_rows(c, rows, first); }
  Cost cost() const { return {0, detail::total_bytes(rows), detail::total_bytes(rows)}; }
  auto outputs() const { return std::array{w.packed}; }
};
// rows = rows [first, first + R) of w
struct UnpackWeight {
  Tensor rows;  // act [R, I] out
  Weight w;
  int64_t first;
  void check(Contract& c) const { w.check_rows(c, rows, first); }
  Cost cost() const { return {0, detail::total_bytes(rows), detail::total_bytes(rows)}; }
  auto outputs() const { return std::array{rows}; }
};

// ---- layers

// The order of sums in bf16: k is cut into parts, and each part is one chain of tensor-core products over k16 steps
// from +0.  The parts of y and dx are added up ascending from +0; those of dw, kLinearPart rows of a call each, are
// added to dw one by one, where subnormal numbers count as zeros, also as a sum.  No part is longer.
constexpr int64_t kLinearPart = 4096, kMostParts = 8;  // kMostParts: that can be apart (LinearParts), in a cluster
// Values of k in a part of y or dx with so many columns, a multiple of 64; the last part may be shorter.  Where results
// are wide or k is short there is one part; else there are as many as make 128 blocks of two rows of 128 x 128 tiles.
constexpr int64_t linear_part(int64_t columns, int64_t depth) {
  const auto parts_of = [](int64_t all, int64_t each) { return (all + each - 1) / each; };
  const int64_t side_by_side =
      columns > 4096 || depth <= 2048 ? 1 : std::clamp<int64_t>(128 / (2 * parts_of(columns, 128)), 1, kMostParts);
  return parts_of(parts_of(depth, std::max(side_by_side, parts_of(depth, kLinearPart))), 64) * 64;
}

constexpr int64_t linear_parts(int64_t columns, int64_t depth) {
  const int64_t part = linear_part(columns, depth);
  return part > 0 ? (depth + part - 1) / part : 0;
}

constexpr int64_t kLinearTiles = 1024;
// Memory in which different blocks of a kernel leave parts, which they then add up, for results with too few tiles for
// a GPU: y of few rows and a narrow layer, as in decoding, and dx of an LM head.  No bit depends on it.  Calls that may
// run at the same time, in two streams, need a LinearParts each.
struct LinearParts {
  Tensor sums;      // stat [linear_sums(N, O, I)], of dx [linear_turn_sums(N, I, O)], or more; scratch
  Tensor arrivals;  // i32 [kLinearTiles], zeros before and after each call: blocks that have arrived, by tile; of dx
                    // parts that have been added, by warp.  The last counts blocks for a norm, or for tickets.
  // Checks the memory for `least` sums.
  void check(Contract& c, int64_t least) const {
    c.stat("sums", sums, {sums.shape[0]});
    c.that(sums.size() >= least, "sums has ", sums.size(), " elements, expected ", least, " at least");
    c.index("arrivals", arrivals, {kLinearTiles});
  }
};
constexpr int64_t kApartRows = 512;  // more rows have tiles enough
// The number of parts that can be apart so: 0 where they cannot, or there is one.
constexpr int64_t linear_parts_apart(int64_t rows, int64_t columns, int64_t depth) {
  const int64_t parts = linear_parts(columns, depth);
  return rows <= kApartRows && columns <= 4096 && parts > 1 && parts <= kMostParts ? parts : 0;
}
constexpr int64_t linear_sums(int64_t rows, int64_t columns, int64_t depth) {
  return linear_parts_apart(rows, columns, depth) * rows * ((columns + 1) / 2 * 2);
}
// An LM head's dx has dozens of parts, which are added in turn: a block computes one part of a tile of 128 x 256, and
// its 8 warps add it to the sums that the part before has left.  Returns the number of sums and, after them, of
// tickets; 0: there are tiles enough, or one part.
constexpr int64_t kTurnBlocks = 512;  // that have tickets
constexpr int64_t linear_turn_sums(int64_t rows, int64_t columns, int64_t depth) {
  const int64_t results = (rows + 255) / 256 * 256 * ((columns + 255) / 256 * 256), warps = results / (128 * 256 / 8);
  return rows > 0 && linear_parts(columns, depth) > 1 && warps < kLinearTiles ? results + kTurnBlocks : 0;
}
// Returns true if parts are added in turn: if that takes less time.
inline bool linear_takes_turns(int64_t rows, int64_t columns, int64_t depth, int multiprocessors) {
  if (linear_turn_sums(rows, columns, depth) == 0) return false;
  if (asked_tile) return std::ranges::find(kTurnTiles, *asked_tile) != kTurnTiles.end();
  const PartsApart apart{linear_parts(columns, depth), true};
  return tile_stretch(kTurnTiles, rows, columns, depth, multiprocessors, apart) <
         tile_stretch(kPartsTiles, rows, columns, depth, multiprocessors);
}

// Up to so many rows of bf16, the block of a product that is the last to end norms them sooner than another kernel.
constexpr int64_t kNormedRows = 16;
// The norm of the rows that an op computes: RmsnormFwd (ops/norm.h) of them.
struct RowNorm {
  Tensor y;     // act [N, O] out, rows may be strided
  Tensor rstd;  // stat [N] out
  Tensor w;     // act [O]
  float eps;
  void check(Contract& c, int64_t N, int64_t O) const {
    c.act("norm.y", y, {N, O}, c.strided);
    c.stat("norm.rstd", rstd, {N});
    c.act("norm.w", w, {O});
  }
};

// y = x wT (+ bias) (+ residual)
struct LinearFwd {
  Tensor y;                   // act [N, O] out, rows may be strided; may be residual (in place)
  Tensor x;                   // act [N, I], rows may be strided
  Weight w;                   // [O, I]
  Tensor bias;                // act [O] or absent
  Tensor residual;            // act [N, O] or absent, rows may be strided
  LinearParts parts = {};     // or absent; read in bf16 only
  VocabSums vocab_sums = {};  // or absent: y are logits, without bias and residual
  Tensor swiglu = {};         // act [N, O / 2] out: swiglu_fwd of y, which is scratch then; or absent
  RowNorm norm = {};          // or absent; of y, for which parts.arrivals are there
  void check(Contract& c) const {
    const int64_t N = x.shape[0], O = w.outputs();
    w.check(c, "w");
    c.act("y", y, {N, O}, c.strided);
    c.act("x", x, {N, w.inputs()}, c.strided);
    if (bias) c.act("bias", bias, {O});
    if (residual) c.act("residual", residual, {N, O}, c.strided);
    if (vocab_sums.tiles) {
      vocab_sums.check(c, N, O);
      c.that(!bias && !residual && !parts.sums && y.contiguous(),
             "tiles are summed up, expected contiguous logits without bias, residual or parts");
    }
    if (swiglu) {
      c.act("swiglu", swiglu, {N, O / 2});
      c.that(O % 2 == 0 && !bias && !residual && !vocab_sums.tiles && y.contiguous(),
             "y is gates and ups, expected them contiguous without bias, residual or tiles");
    }
    if (norm.y) {
      norm.check(c, N, O);
      c.that(!vocab_sums.tiles && !swiglu, "y is normed, expected it without tiles or SwiGLU");
      c.index("arrivals", parts.arrivals, {kLinearTiles});
    }
    if (parts.sums) parts.check(c, linear_sums(N, O, w.inputs()));
  }
  Cost cost() const {
    return {2 * x.shape[0] * w.inputs() * w.outputs() + 5 * swiglu.size() + 4 * norm.y.size(),
            detail::total_bytes(x, w, bias, residual, norm.w),
            detail::total_bytes(results(), vocab_sums.tiles, swiglu, norm.y, norm.rstd)};
  }
  Stretch stretch(int multiprocessors) const {
    const int64_t N = x.shape[0], O = w.outputs(), I = w.inputs(), apart = parts.sums ? linear_parts_apart(N, O, I) : 0;
    const auto tiles = linear_parts(O, I) > 1 && !apart ? kPartsTiles
                       : vocab_sums.tiles               ? kHeadTiles
                       : swiglu                         ? kGatedTiles
                       : norm.y && N <= kNormedRows     ? kNormedTiles
                                                        : kOnePartTiles;
    return {.flops = tile_stretch(tiles, N, O, I, multiprocessors, {std::max<int64_t>(1, apart)})};
  }
  auto outputs() const { return std::array{results(), swiglu, norm.y, norm.rstd}; }

 private:
  Tensor results() const { return vocab_sums.only || swiglu ? Tensor{} : y; }  // y, if it is wanted
};
// dx = dy w: a sum over o ascending from +0, which is added once to what dx holds if accumulate
struct LinearBwdInput {
  Tensor dx;  // act [N, I] out, or acc if accumulate; rows may be strided
  Tensor dy;  // act [N, O], rows may be strided
  Weight w;   // [O, I]
  bool accumulate;
  LinearParts parts = {};  // or absent; read in bf16 only, if not accumulate
  void check(Contract& c) const {
    w.check(c, "w");
    c.act("dx", dx, {dy.shape[0], w.inputs()}, c.strided);
    c.act("dy", dy, {dy.shape[0], w.outputs()}, c.strided);
    if (parts.sums) parts.check(c, linear_turn_sums(dy.shape[0], w.inputs(), w.outputs()));
  }
  Cost cost() const {
    return {2 * dy.shape[0] * w.inputs() * w.outputs(),
            detail::total_bytes(dy, w) + (accumulate ? detail::total_bytes(dx) : 0), detail::total_bytes(dx)};
  }
  Stretch stretch(int multiprocessors) const {
    const int64_t N = dy.shape[0], O = w.outputs(), I = w.inputs(), parts_of_k = linear_parts(I, O);
    if (parts.sums && !accumulate && linear_takes_turns(N, I, O, multiprocessors))
      return {.flops = tile_stretch(kTurnTiles, N, I, O, multiprocessors, {parts_of_k, true})};
    return {.flops = tile_stretch(parts_of_k > 1 ? kPartsTiles : kOnePartTiles, N, I, O, multiprocessors)};
  }
  auto outputs() const { return std::array{dx}; }
};
// dw += dyT x; dbias += sum over rows of dy.  Chains over rows ascending, in f32 continued from what the accumulators
// hold, in bf16 of the parts above.
struct LinearBwdWeight {
  Tensor dw;     // stat [O, I] acc
  Tensor dbias;  // stat [O] acc, or absent
  Tensor dy;     // act [N, O], rows may be strided
  Tensor x;      // act [N, I], rows may be strided
  void check(Contract& c) const {
    const int64_t N = dy.shape[0], O = dy.shape[1], I = x.shape[1];
    c.stat("dw", dw, {O, I});
    if (dbias) c.stat("dbias", dbias, {O});
    c.act("dy", dy, {N, O}, c.strided);
    c.act("x", x, {N, I}, c.strided);
  }
  Cost cost() const {
    return {2 * dy.shape[0] * dy.shape[1] * x.shape[1], detail::total_bytes(dy, x, dw, dbias),
            detail::total_bytes(dw, dbias)};
  }
  Stretch stretch(int multiprocessors) const {
    return {.flops = tile_stretch(kGradientTiles, dy.shape[1], x.shape[1], dy.shape[0], multiprocessors)};
  }
  auto outputs() const { return std::array{dw, dbias}; }
};

}  // namespace pare
