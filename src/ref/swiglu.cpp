// SwiGLU (Shazeer 2020).
#include "ops/swiglu.h"

#include <cmath>

#include "ref/ref.h"

namespace pare::ref {

void swiglu_fwd(const SwigluFwd& a, Stream) {
  const int64_t rows = a.y.shape[0], width = a.y.shape[1];
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
