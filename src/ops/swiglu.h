// SwiGLU (roles of types and orders of sums: list.h).
#pragma once
#include <array>
#include <cstdint>

#include "ops/contract.h"
#include "ops/cost.h"

namespace pare {

// y = silu(gate) * up, silu(g) = g / (1 + exp(-g))
struct SwigluFwd {
  Tensor y;        // act [N, F] out
  Tensor gate_up;  // act [N, 2F]: gate in the first F columns, up in the rest
  void check(Contract& c) const {
    const int64_t N = y.shape[0], F = y.shape[1];
    c.act("y", y, {N, F});
    c.act("gate_up", gate_up, {N, 2 * F});
  }
  Cost cost() const { return {5 * y.size(), detail::total_bytes(gate_up), detail::total_bytes(y)}; }
  auto outputs() const { return std::array{y}; }
};
struct SwigluBwd {
  Tensor dgate_up;  // act [N, 2F] out; may be gate_up (in place)
  Tensor dy;        // act [N, F]
  Tensor gate_up;   // act [N, 2F]
  void check(Contract& c) const {
    const int64_t N = dy.shape[0], F = dy.shape[1];
    c.act("dgate_up", dgate_up, {N, 2 * F});
    c.act("dy", dy, {N, F});
    c.act("gate_up", gate_up, {N, 2 * F});
  }
  Cost cost() const { return {12 * dy.size(), detail::total_bytes(dy, gate_up), detail::total_bytes(dgate_up)}; }
  auto outputs() const { return std::array{dgate_up}; }
};

}  // namespace pare
