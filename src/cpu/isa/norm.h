// Shared code of the norms of rows.
#pragma once
#include "cpu/isa/tile.h"

namespace pare::PARE_ISA {

namespace {

// The squares of x, added up by lane.
PARE_INLINE vf row_squares(const float* x, int64_t n) {
  vf acc = zero();
  for_vectors(
      n, PARE_LANES_AT(i) {
        const vf v = load(x + i, lanes);
        acc = fma(v, v, acc);
      });
  return acc;
}

// By lane: 1 / sqrt(squares / width + eps)
PARE_INLINE vf inverse_rms(vf squares, int64_t width, float eps) {
  return div(set1(1), sqrt(add(div(squares, set1(static_cast<float>(width))), set1(eps))));
}

}  // namespace

}  // namespace pare::PARE_ISA
