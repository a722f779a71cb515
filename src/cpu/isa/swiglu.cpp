// SwiGLU.
#include "cpu/isa/math.h"
#include "cpu/kernels.h"

namespace pare::PARE_ISA {

void swiglu_fwd(float* y, const float* gate_up, int64_t width, Interval rows) {
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const float *gate = gate_up + r * 2 * width, *up = gate + width;
    for_vectors(
        width, PARE_LANES_AT(i) {
          const vf g = load(gate + i, lanes), e = exp(sub(zero(), g));
          store(y + r * width + i, mul(div(g, add(set1(1), e)), load(up + i, lanes)), lanes);
        });
  }
}

// With s = sigmoid(g): d silu / dg = s (1 + g (1 - s)).  Rows of gate and up are many short runs to the machine: the
// one after the next is fetched here.
void swiglu_bwd(float* dgate_up, const float* dy, const float* gate_up, int64_t width, Interval rows) {
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const float *gate = gate_up + r * 2 * width, *up = gate + width;
    float *dgate = dgate_up + r * 2 * width, *dup = dgate + width;
    const int64_t next = r + 2 < rows.end ? 4 * width : 0;
    for_vectors(
        width, PARE_LANES_AT(i) {
          __builtin_prefetch(gate + next + i);
          __builtin_prefetch(up + next + i);
          __builtin_prefetch(dy + r * width + next / 2 + i);
          const vf g = load(gate + i, lanes), u = load(up + i, lanes), d = load(dy + r * width + i, lanes);
          const vf s = div(set1(1), add(set1(1), exp(sub(zero(), g))));
          const vf slope = mul(s, fma(g, sub(set1(1), s), set1(1)));
          store(dgate + i, mul(mul(d, u), slope), lanes);
          store(dup + i, mul(d, mul(g, s)), lanes);
        });
  }
}

}  // namespace pare::PARE_ISA
