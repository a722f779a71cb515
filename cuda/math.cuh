// exp and log in f32: the functions of src/cpu/isa/math.h, operation by operation, so that both give the same bits.
#pragma once
#include <cuda_runtime.h>

namespace pare::PARE_CUDA {

// e^x within 2 units in the last place, subnormal results included.  exp(0) is 1; NaN stays.
// x = n ln 2 + r, exp(r) = 1 + r + r^2 q(r).
__device__ __forceinline__ float exp_f32(float x) {
  x = x > 89.f ? 89.f : x < -104.f ? -104.f : x;  // beyond: infinity, 0
  // Added to a small x it rounds that to an integer n; the low 9 bits of the sum are n + 254.
  const float magic = 0x1.8p23f + 254, shifted = fmaf(x, 0x1.715476p0f, magic), n = shifted - magic;
  const float r = fmaf(-n, -0x1.05c61p-29f, fmaf(-n, 0x1.62e43p-1f, x));  // ln 2 in two parts
  float q = 1.38145986467e-3f;
  q = fmaf(q, r, 8.36871687973e-3f);
  q = fmaf(q, r, 4.16683880453e-2f);
  q = fmaf(q, r, 1.66665206317e-1f);
  q = fmaf(q, r, 4.99999934478e-1f);
  const uint32_t twice = __float_as_uint(shifted), half = twice >> 1;  // rounded once, by the second factor
  const float y = 1.f + fmaf(r * r, q, r);
  return y * __uint_as_float(half << 23) * __uint_as_float((twice - half) << 23);
}

// x, but at least -104, of which exp_at_most_1 is +0.  NaN stays.
__device__ __forceinline__ float floored(float x) {
#ifdef CUEMU
  return x < -104.f ? -104.f : x;
#else
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(-104.f));
  return y;
#endif
}
// exp_at_most_1(x) of a floored x.
__device__ __forceinline__ float exp_of_floored(float x) {
  const float magic = 0x1.8p23f + 191, shifted = fmaf(x, 0x1.715476p0f, magic), n = shifted - magic;
  const float r = fmaf(-n, 0x1.62e43p-1f, x);
  // The sum is exp(r) 2^-64.  The low 8 bits of `shifted` are n + 64 + 127, and bit 8 is 0.
  float y = 0x1.0fa852p-71f;
  y = fmaf(y, r, 0x1.573aeep-69f);
  y = fmaf(y, r, 0x1.555a74p-67f);
  y = fmaf(y, r, 0x1.fffdc4p-66f);
  y = fmaf(y, r, 0x1.fffff6p-65f);
  y = fmaf(y, r, 0x1p-64f);
  return y * __uint_as_float(__float_as_uint(shifted) << 23);
}
// e^x for x <= 0 in 11 instructions: within 3 units in the last place from -32 on, within 5 below, subnormal results
// included.  exp(0) is 1; from -104 down the result is +0; NaN stays.
__device__ __forceinline__ float exp_at_most_1(float x) { return exp_of_floored(floored(x)); }

// 2^x for x < 63 within 1.02 units in the last place: the exponential of attention, whose scores have log2(e) in their
// scale.  2^0 is 1; from -150 down the result is 0; NaN stays.  Of larger x: anything.
// x = n + r, 2^r = 1 + r q(r).
__device__ __forceinline__ float exp2_f32(float x) {
  x = x < -150.f ? -150.f : x;
  const float magic = 0x1.8p23f, shifted = x + magic, r = x - (shifted - magic);  // n = shifted - magic
  float q = 1.55946779e-4f;
  q = fmaf(q, r, 1.34066439e-3f);
  q = fmaf(q, r, 9.61769297e-3f);
  q = fmaf(q, r, 5.55031055e-2f);
  q = fmaf(q, r, 2.40226528e-1f);
  q = fmaf(q, r, 6.93147215e-1f);
  // The last bits of `shifted` are those of n.  y 2^(n + 64) is exact, so there is one rounding.
  return fmaf(q, r, 1.f) * __uint_as_float((__float_as_uint(shifted) << 23) + ((64u + 127u) << 23)) * 0x1p-64f;
}
// silu(gate) * up, rounded once more when it is stored.
__device__ __forceinline__ float swiglu(float gate, float up) { return gate / (1.f + exp_f32(-gate)) * up; }

constexpr float kLog2E = 0x1.715476p0f;

// 2^x for x < 127 within 1.02e-4 of it: the weights of attention in bf16, which are rounded to 2^-9 anyway.  2^0 is 1:
// a constant term that is not would be multiplied in at every block.  Below -126 the result is 2^-126; of NaN it is
// nothing that bf16 rounds to a finite number.  x = n + r, 2^r = 1 + r q(r).
__device__ __forceinline__ float exp2_cubic(float x) {
  x = x < -126.f ? -126.f : x;
  const float magic = 0x1.8p23f, shifted = x + magic, r = x - (shifted - magic);
  float q = 0x1.c2a214p-5f;
  q = fmaf(q, r, 0x1.f00c4ep-3f);
  q = fmaf(q, r, 0x1.62f5fap-1f);
  return __uint_as_float((__float_as_uint(shifted) << 23) + __float_as_uint(fmaf(q, r, 1.f)));
}

// log(x) = e ln 2 + log(1 + f), 1 + f in [sqrt(1/2), sqrt(2)), log(1 + f) = f - f^2 / 2 + f^3 q(f).
// log(0) is -infinity, of negative numbers NaN.
__device__ __forceinline__ float log_f32(float x) {
  const bool tiny = x < 0x1p-126f;
  const int whole = __float_as_int(tiny ? x * 0x1p23f : x), exponent = (whole - 0x3f3504f3) >> 23;
  const float e = static_cast<float>(exponent) - (tiny ? 23.f : 0.f);
  const float f = __int_as_float(whole - exponent * (1 << 23)) - 1.f, square = f * f;
  float q = -7.63450292016e-2f;
  q = fmaf(q, f, 1.27615773485e-1f);
  q = fmaf(q, f, -1.31601804621e-1f);
  q = fmaf(q, f, 1.42017579979e-1f);
  q = fmaf(q, f, -1.66233575354e-1f);
  q = fmaf(q, f, 2.00012268731e-1f);
  q = fmaf(q, f, -2.50008210285e-1f);
  q = fmaf(q, f, 3.33333317078e-1f);
  const float low = fmaf(-0.5f, square, fmaf(f * square, q, e * -0x1.05c61p-29f));
  const float y = fmaf(e, 0x1.62e43p-1f, f + low);
  if (x > 0) return x < INFINITY ? y : INFINITY;
  return x == 0 ? -INFINITY : NAN;
}

}  // namespace pare::PARE_CUDA
