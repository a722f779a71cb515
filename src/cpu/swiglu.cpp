// SwiGLU.
#include "ops/swiglu.h"

#include "cpu/glue.h"

namespace pare::cpu {

void swiglu_fwd(const SwigluFwd& a, Stream) {
  const int64_t rows = a.y.shape[0], width = a.y.shape[1];
  float* const y = a.y.as<float>();
  const float* const gate_up = a.gate_up.as<float>();
  const Kernels& k = cpu_kernels();
  parallel(rows, 5 + 0.6 * static_cast<double>(width), [&](Interval r) { k.swiglu_fwd(y, gate_up, width, r); });
}

void swiglu_bwd(const SwigluBwd& a, Stream) {
  const int64_t rows = a.dy.shape[0], width = a.dy.shape[1];
  float* const dgate_up = a.dgate_up.as<float>();
  const float* const dy = a.dy.as<float>();
  const float* const gate_up = a.gate_up.as<float>();
  const Kernels& k = cpu_kernels();
  parallel(rows, 5 + 0.8 * static_cast<double>(width),
           [&](Interval r) { k.swiglu_bwd(dgate_up, dy, gate_up, width, r); });
}

}  // namespace pare::cpu
