// Stand-in for CUDA's cuda_bf16.h: the subset this project uses.
#pragma once
#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t x;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 b) { return __uint_as_float(unsigned{b.x} << 16); }
// Rounds to nearest, ties to even; NaN becomes the canonical one, as on the device.
inline __nv_bfloat16 __float2bfloat16(float f) {
  const unsigned u = __float_as_uint(f);
  return {(u & 0x7fffffff) > 0x7f800000 ? uint16_t{0x7fff} : static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__float2bfloat16(a), __float2bfloat16(b)}; }
