// RMSNorm (roles of types and orders of sums: list.h).
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

#include "ops/contract.h"
#include "ops/cost.h"

namespace pare {

// rstd = 1 / sqrt(mean(x^2) + eps); y = (x * rstd) * w, row by row.
struct RmsnormFwd {
  Tensor y;     // act [N, C] out, rows may be strided; may be x (in place)
  Tensor rstd;  // stat [N] out
  Tensor x;     // act [N, C], rows may be strided
  Tensor w;     // act [C]
  float eps;
  void check(Contract& c) const {
    const int64_t N = x.shape[0], C = x.shape[1];
    c.act("x", x, {N, C}, c.strided);
    c.that(C > 0, "x is ", x, ", expected columns");
    c.act("y", y, {N, C}, c.strided);
    c.stat("rstd", rstd, {N});
    c.act("w", w, {C});
  }
  Cost cost() const { return {4 * x.size(), detail::total_bytes(x, w), detail::total_bytes(y, rstd)}; }
  auto outputs() const { return std::array{y, rstd}; }
};
// Strands of dw (list.h) that so many rows have.
constexpr int64_t norm_strands(int64_t rows, DType act) {
  return std::min<int64_t>(rows, act == DType::bf16 ? 1024 : 128);
}
// With xh = x * rstd: dx = rstd * (dy*w - xh * mean(dy*w*xh)); dw[c] += dy*xh over rows ascending.
struct RmsnormBwd {
  Tensor dx;    // act [N, C], acc if accumulate, else out; rows may be strided; may be dy (in place) if not accumulate
  Tensor dw;    // stat [C] acc, or absent
  Tensor dy;    // act [N, C], rows may be strided
  Tensor x;     // act [N, C], rows may be strided
  Tensor w;     // act [C]
  Tensor rstd;  // stat [N]
  bool accumulate;
  Tensor parts{};  // stat [norm_strands(N, act), C] scratch, or absent as dw is
  void check(Contract& c) const {
    const int64_t N = x.shape[0], C = x.shape[1];
    c.act("x", x, {N, C}, c.strided);
    c.that(C > 0, "x is ", x, ", expected columns");
    c.act("dx", dx, {N, C}, c.strided);
    if (dw) {
      c.stat("dw", dw, {C});
      c.stat("parts", parts, {norm_strands(N, x.dtype), C});
    }
    c.act("dy", dy, {N, C}, c.strided);
    c.act("w", w, {C});
    c.stat("rstd", rstd, {N});
    c.that(!accumulate || !dx.data || dx.size() == 0 || dx.data != dy.data, "dx is dy although it accumulates");
  }
  Cost cost() const {
    return {(dw ? 10 : 8) * x.size(), detail::total_bytes(dy, x, w, rstd, dw), detail::total_bytes(dx, dw)};
  }
  auto outputs() const { return std::array{dx, dw}; }
};

}  // namespace pare
