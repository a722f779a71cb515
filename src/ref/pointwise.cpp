// Rotary position embedding (Su et al. 2021) and SwiGLU (Shazeer 2020).
#include <cmath>

#include "ref/ref.h"

namespace pare::ref {

// Rotates the pairs (c, c + D/2) of every head by +angle or -angle.
static void rotate(const char* op, const Tensor& tx, const Tensor& ttable, const Tensor& tpos, double sign) {
  expect(tx.rank == 3 && tx.shape[2] % 2 == 0, "ref: ", op, ": ", tx.str(), ", expected [N, h, even D]");
  const int64_t rows = tx.shape[0], heads = tx.shape[1], half = tx.shape[2] / 2;
  expect_dense(op, "table", ttable, {ttable.shape[0], 2 * half});
  expect_index(op, "pos", tpos, rows, ttable.shape[0]);
  dispatch(op, tx, [&]<class T>(T) {
    const View<T> x(tx), table(ttable);
    const View<int32_t> pos(tpos);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t h = 0; h < heads; h++)
        for (int64_t c = 0; c < half; c++) {
          const double cosine = table(pos(n), c), sine = sign * table(pos(n), half + c);
          const double p = x(n, h, c), q = x(n, h, half + c);
          x(n, h, c) = static_cast<T>(p * cosine - q * sine);
          x(n, h, half + c) = static_cast<T>(q * cosine + p * sine);
        }
  });
}

void rope_fwd(const RopeFwd& a, Stream) { rotate("rope_fwd", a.x, a.table, a.pos, 1); }
void rope_bwd(const RopeBwd& a, Stream) { rotate("rope_bwd", a.dx, a.table, a.pos, -1); }

void swiglu_fwd(const SwigluFwd& a, Stream) {
  const int64_t rows = a.y.shape[0], width = a.y.shape[1];
  expect_dense("swiglu_fwd", "y", a.y, {rows, width});
  expect_dense("swiglu_fwd", "gate_up", a.gate_up, {rows, 2 * width});
  dispatch("swiglu_fwd", a.y, [&]<class T>(T) {
    const View<T> y(a.y), gate_up(a.gate_up);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t f = 0; f < width; f++) {
        const double gate = gate_up(n, f), up = gate_up(n, width + f);
        y(n, f) = static_cast<T>(gate / (1 + std::exp(-gate)) * up);
      }
  });
}

void swiglu_bwd(const SwigluBwd& a, Stream) {
  const int64_t rows = a.dy.shape[0], width = a.dy.shape[1];
  expect_dense("swiglu_bwd", "dgate_up", a.dgate_up, {rows, 2 * width});
  expect_dense("swiglu_bwd", "dy", a.dy, {rows, width});
  expect_dense("swiglu_bwd", "gate_up", a.gate_up, {rows, 2 * width});
  dispatch("swiglu_bwd", a.dy, [&]<class T>(T) {
    const View<T> dgate_up(a.dgate_up), dy(a.dy), gate_up(a.gate_up);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t f = 0; f < width; f++) {
        const double gate = gate_up(n, f), up = gate_up(n, width + f), d = dy(n, f);
        const double sigmoid = 1 / (1 + std::exp(-gate));
        dgate_up(n, f) = static_cast<T>(d * up * sigmoid * (1 + gate * (1 - sigmoid)));
        dgate_up(n, width + f) = static_cast<T>(d * gate * sigmoid);
      }
  });
}

}  // namespace pare::ref
