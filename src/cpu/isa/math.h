// exp and log of 16 lanes, within 1 or 2 ulp; polynomials fitted by the Remez exchange to the relative error.
#pragma once
#include "cpu/isa/vec.h"

namespace pare::PARE_ISA {
namespace {

// Added to a small x it rounds that to an integer n; the low 9 bits of the sum are n + 254.
constexpr float kWhole = 0x1.8p23f + 254;
// 2^(n - 127), n in the low 9 bits and in [1, 254].
PARE_INLINE vf power(vi n) { return from_bits(shl<23>(n)); }

// exp(x) = 2^n exp(r), n the integer next to x / ln 2, |r| <= ln 2 / 2, exp(r) = 1 + r + r^2 q(r).
// exp(0) is 1; below -104 the result is +0, above 88.73 infinite; NaN stays NaN.
PARE_INLINE vf exp(vf x) {
  x = max(set1(-104.0f), min(set1(89.0f), x));  // in this order a NaN stays
  const vf whole = fma(x, set1(0x1.715476p0f), set1(kWhole)), n = sub(whole, set1(kWhole));
  const vf r = fnma(n, set1(-0x1.05c61p-29f), fnma(n, set1(0x1.62e43p-1f), x));  // ln 2 in two parts
  vf q = set1(1.38145986467e-3f);
  q = fma(q, r, set1(8.36871687973e-3f));
  q = fma(q, r, set1(4.16683880453e-2f));
  q = fma(q, r, set1(1.66665206317e-1f));
  q = fma(q, r, set1(4.99999934478e-1f));
  const vf y = add(set1(1), fma(mul(r, r), q, r));
#if defined(__AVX512F__)
  return scale(y, n);
#else
  const vi twice = bits(whole), half = shr<1>(twice);  // rounded once, by the second factor
  return mul(mul(y, power(half)), power(isub(twice, half)));
#endif
}

// exp(x) for x <= 0 by fewer instructions: ln 2 is in one part, the polynomial a chain.  Within 3 units in the last
// place from -32 on, within 5 below.  exp(0) is 1; from -104 down the result is +0; NaN stays NaN.
PARE_INLINE vf exp_at_most_1(vf x) {
  x = max(set1(-104.0f), x);
  const vf whole = fma(x, set1(0x1.715476p0f), set1(kWhole - 63)),
           r = fnma(sub(whole, set1(kWhole - 63)), set1(0x1.62e43p-1f), x);
  vf y = set1(0x1.0fa852p-71f);  // the sum is exp(r) 2^-64
  y = fma(y, r, set1(0x1.573aeep-69f));
  y = fma(y, r, set1(0x1.555a74p-67f));
  y = fma(y, r, set1(0x1.fffdc4p-66f));
  y = fma(y, r, set1(0x1.fffff6p-65f));
  y = fma(y, r, set1(0x1p-64f));
  return mul(y, power(bits(whole)));  // rounded once
}

// 2^x = 2^n 2^r for x < 63, n the integer next to x, 2^r = 1 + r q(r): the exponential of attention, whose scores have
// log2(e) in their scale.  2^0 is 1; from -150 down the result is +0; NaN stays NaN.  Of larger x: anything.
PARE_INLINE vf exp2_below_63(vf x) {
  x = max(set1(-150.0f), x);
#if defined(__AVX512F__)
  const vf n = round(x);
#else
  const vf whole = add(x, set1(kWhole - 102)), n = sub(whole, set1(kWhole - 102));
#endif
  const vf r = sub(x, n);
  vf q = set1(1.55946779e-4f);
  q = fma(q, r, set1(1.34066439e-3f));
  q = fma(q, r, set1(9.61769297e-3f));
  q = fma(q, r, set1(5.55031055e-2f));
  q = fma(q, r, set1(2.40226528e-1f));
  q = fma(q, r, set1(6.93147215e-1f));
  const vf y = fma(q, r, set1(1));
#if defined(__AVX512F__)
  return scale(y, n);
#else
  return mul(mul(y, power(bits(whole))), set1(0x1p-25f));  // rounded once, by the last factor
#endif
}
constexpr float kLog2E = 0x1.715476p0f;

// log(x) = e ln 2 + log(1 + f), x = 2^e (1 + f), 1 + f in [sqrt(1/2), sqrt(2)), log(1 + f) = f - f^2 / 2 + f^3 q(f).
// log(0) is -infinity, of negative numbers NaN.
PARE_INLINE vf log(vf x) {
  const mask tiny = less(x, set1(0x1p-126f));
  const vf normal = select(tiny, mul(x, set1(0x1p23f)), x);
  const vi whole = bits(normal), exponent = sar<23>(isub(whole, iset1(0x3f3504f3)));
  const vf e = sub(to_float(exponent), select(tiny, set1(23), zero()));
  const vf f = sub(from_bits(isub(whole, shl<23>(exponent))), set1(1)), square = mul(f, f);
  vf q = set1(-7.63450292016e-2f);
  q = fma(q, f, set1(1.27615773485e-1f));
  q = fma(q, f, set1(-1.31601804621e-1f));
  q = fma(q, f, set1(1.42017579979e-1f));
  q = fma(q, f, set1(-1.66233575354e-1f));
  q = fma(q, f, set1(2.00012268731e-1f));
  q = fma(q, f, set1(-2.50008210285e-1f));
  q = fma(q, f, set1(3.33333317078e-1f));
  const vf low = fnma(set1(0.5f), square, fma(mul(f, square), q, mul(e, set1(-0x1.05c61p-29f))));
  const vf y = fma(e, set1(0x1.62e43p-1f), add(f, low));
  const vf infinity = set1(__builtin_inff()), nan = set1(__builtin_nanf(""));
  return select(less(zero(), x), select(less(x, infinity), y, infinity),
                select(equal(x, zero()), set1(-__builtin_inff()), nan));
}

// The same functions of one number.
PARE_INLINE float exp1(float x) { return first_lane(exp(set1(x))); }
PARE_INLINE float exp_at_most_1(float x) { return first_lane(exp_at_most_1(set1(x))); }
PARE_INLINE float log1(float x) { return first_lane(log(set1(x))); }

// Philox (base/rng.h) of 16 counters; word w of the results is c[w].
PARE_INLINE void philox(vi* c, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; round++) {
    vi low0, high0, low1, high1;
    mul_wide(c[0], iset1(0xD2511F53u), &low0, &high0);
    mul_wide(c[2], iset1(0xCD9E8D57u), &low1, &high1);
    c[0] = ixor(ixor(high1, c[1]), iset1(k0));
    c[1] = low1;
    c[2] = ixor(ixor(high0, c[3]), iset1(k1));
    c[3] = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

}  // namespace
}  // namespace pare::PARE_ISA
