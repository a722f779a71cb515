// One vector type for every instruction set: `vf`, 16 floats.  AVX-512: one register; AVX2: two; NEON: four; elsewhere
// a struct that the compiler vectorises.  Every operation is IEEE (or bitwise), so the same kernel gives the same bits
// on all of them.
//
// Files of this directory are compiled once per instruction set, with PARE_ISA naming it.  Nothing in them may become a
// symbol that the linker could share between those builds (an AVX-512 copy of an inline function would then run on an
// AVX2 machine): functions have internal linkage or live in namespace pare::PARE_ISA, and no std template is used.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
// gcc 12 on its own avx512fintrin.h (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(PARE_NEON)
#include <arm_neon.h>
#endif
#include <cstdint>
#include <cstring>

#define PARE_INLINE [[gnu::always_inline]] inline
#if defined(__clang__)
#define PARE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define PARE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace pare::PARE_ISA {
namespace {

PARE_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
PARE_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

#if defined(__AVX512F__)

using vf = __m512;
using vi = __m512i;
using mask = __mmask16;

PARE_INLINE mask first_lanes(int64_t n) { return static_cast<mask>(n >= 16 ? 0xffff : (1u << n) - 1); }  // lanes < n
PARE_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
PARE_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
PARE_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
PARE_INLINE vf load_part(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
PARE_INLINE void store_part(float* p, vf x, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
PARE_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
PARE_INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
PARE_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
PARE_INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
PARE_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
PARE_INLINE vf fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
PARE_INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }               // a > b ? a : b
PARE_INLINE vf min(vf a, vf b) { return _mm512_min_ps(a, b); }               // a < b ? a : b
PARE_INLINE vf sqrt(vf a) { return _mm512_sqrt_ps(a); }
PARE_INLINE mask less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
PARE_INLINE mask equal(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
PARE_INLINE vf select(mask m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }  // m ? a : b
PARE_INLINE vi select(mask m, vi a, vi b) { return _mm512_mask_blend_epi32(m, b, a); }
PARE_INLINE vi iset1(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
PARE_INLINE vi iload(const void* p) { return _mm512_loadu_si512(p); }
PARE_INLINE void istore(void* p, vi x) { _mm512_storeu_si512(p, x); }
PARE_INLINE vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
PARE_INLINE vi isub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
PARE_INLINE vi ixor(vi a, vi b) { return _mm512_xor_si512(a, b); }
template <int N>
PARE_INLINE vi shl(vi a) {
  return _mm512_slli_epi32(a, N);
}
template <int N>
PARE_INLINE vi shr(vi a) {
  return _mm512_srli_epi32(a, N);
}
template <int N>
PARE_INLINE vi sar(vi a) {
  return _mm512_srai_epi32(a, N);
}
PARE_INLINE vi bits(vf a) { return _mm512_castps_si512(a); }
PARE_INLINE vf from_bits(vi a) { return _mm512_castsi512_ps(a); }
PARE_INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
// 32 x 32 -> 64 bits
PARE_INLINE void mul_wide(vi a, vi b, vi* low, vi* high) {
  const vi even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
  *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}
// The nearest integer, of two the even one
PARE_INLINE vf round(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x 2^n for integral n, rounded once
PARE_INLINE vf scale(vf x, vf n) { return _mm512_scalef_ps(x, n); }
// Two bytes each, the upper half of a float: bf16.
PARE_INLINE vf load_upper(const uint16_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
PARE_INLINE void store_upper(uint16_t* p, vi x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
}
PARE_INLINE __m256 halves(vf a, bool high) { return high ? _mm512_extractf32x8_ps(a, 1) : _mm512_castps512_ps256(a); }

#elif defined(__AVX2__)

struct vf {
  __m256 a, b;
};
struct vi {
  __m256i a, b;
};
struct mask {
  __m256 a, b;
};

constexpr int32_t kFirst[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
PARE_INLINE vi first_bits(int64_t n) {
  const int32_t* p = kFirst + 16 - (n > 16 ? 16 : n);
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
PARE_INLINE vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PARE_INLINE vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PARE_INLINE vf load_part(const float* p, int64_t n) {
  const vi m = first_bits(n);
  return {_mm256_maskload_ps(p, m.a), _mm256_maskload_ps(p + 8, m.b)};
}
PARE_INLINE void store(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
PARE_INLINE void store_part(float* p, vf x, int64_t n) {
  const vi m = first_bits(n);
  _mm256_maskstore_ps(p, m.a, x.a);
  _mm256_maskstore_ps(p + 8, m.b, x.b);
}
PARE_INLINE vf add(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
PARE_INLINE vf sub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
PARE_INLINE vf mul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
PARE_INLINE vf div(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
PARE_INLINE vf fma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
PARE_INLINE vf fnma(vf x, vf y, vf z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
PARE_INLINE vf max(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
PARE_INLINE vf min(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
PARE_INLINE vf sqrt(vf x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
PARE_INLINE mask first_lanes(int64_t n) {
  const vi m = first_bits(n);
  return {_mm256_castsi256_ps(m.a), _mm256_castsi256_ps(m.b)};
}
PARE_INLINE mask less(vf x, vf y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
PARE_INLINE mask equal(vf x, vf y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)};
}
PARE_INLINE vf select(mask m, vf x, vf y) { return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)}; }
PARE_INLINE vi bits(vf x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
PARE_INLINE vf from_bits(vi x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
PARE_INLINE vi select(mask m, vi x, vi y) { return bits(select(m, from_bits(x), from_bits(y))); }
PARE_INLINE vi iset1(uint32_t x) {
  return {_mm256_set1_epi32(static_cast<int>(x)), _mm256_set1_epi32(static_cast<int>(x))};
}
PARE_INLINE vi iload(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
PARE_INLINE void istore(void* p, vi x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
PARE_INLINE vi iadd(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
PARE_INLINE vi isub(vi x, vi y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
PARE_INLINE vi ixor(vi x, vi y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N>
PARE_INLINE vi shl(vi x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
PARE_INLINE vi shr(vi x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
PARE_INLINE vi sar(vi x) {
  return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
PARE_INLINE vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
PARE_INLINE void mul_wide8(__m256i a, __m256i b, __m256i* low, __m256i* high) {
  const __m256i even = _mm256_mul_epu32(a, b),
                odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
  *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
PARE_INLINE void mul_wide(vi x, vi y, vi* low, vi* high) {
  mul_wide8(x.a, y.a, &low->a, &high->a);
  mul_wide8(x.b, y.b, &low->b, &high->b);
}
PARE_INLINE vf load_upper(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16))};
}
PARE_INLINE void store_upper(uint16_t* p, vi x) {
  const __m256i pairs = _mm256_packus_epi32(_mm256_srli_epi32(x.a, 16), _mm256_srli_epi32(x.b, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(pairs, 0xd8));
}
PARE_INLINE __m256 halves(vf x, bool high) { return high ? x.b : x.a; }

#else

// Parts that operators work on: a float, or with NEON four.  What NEON has other names for comes first.
#if defined(PARE_NEON)
#define PARE_EACH_PART PARE_UNROLL for (int i = 0; i < kParts; i++)
using part = float32x4_t;
using words = uint32x4_t;
using integers = int32x4_t;  // a comparison gives these
using truths = integers;
PARE_INLINE part same(float x) { return vdupq_n_f32(x); }
PARE_INLINE words same(uint32_t x) { return vdupq_n_u32(x); }
PARE_INLINE part get(const float* p) { return vld1q_f32(p); }
PARE_INLINE words get(const uint32_t* p) { return vld1q_u32(p); }
PARE_INLINE void put(float* p, part x) { vst1q_f32(p, x); }
PARE_INLINE void put(uint32_t* p, words x) { vst1q_u32(p, x); }
PARE_INLINE part fma(part x, part y, part z) { return vfmaq_f32(z, x, y); }
PARE_INLINE part sqrt(part x) { return vsqrtq_f32(x); }
PARE_INLINE part convert(integers x) { return vcvtq_f32_s32(x); }
PARE_INLINE void mul_wide(words x, words y, words* low, words* high) {
  const words a = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), vget_low_u32(y)));
  const words b = vreinterpretq_u32_u64(vmull_high_u32(x, y));
  *low = vuzp1q_u32(a, b);
  *high = vuzp2q_u32(a, b);
}
PARE_INLINE words get_upper(const uint16_t* p) { return vshll_n_u16(vld1_u16(p), 16); }
PARE_INLINE void put_upper(uint16_t* p, words x) { vst1_u16(p, vshrn_n_u32(x, 16)); }
PARE_INLINE float first(part x) { return x[0]; }
template <class F>
PARE_INLINE float across(part x, F f) {  // lanes i and i + 2, then i + 1
  return f(f(x[0], x[2]), f(x[1], x[3]));
}
#else
#define PARE_EACH_PART for (int i = 0; i < kParts; i++)
using part = float;
using words = uint32_t;
using integers = int32_t;
using truths = bool;
PARE_INLINE part same(float x) { return x; }
PARE_INLINE words same(uint32_t x) { return x; }
PARE_INLINE part get(const float* p) { return *p; }
PARE_INLINE words get(const uint32_t* p) { return *p; }
PARE_INLINE void put(float* p, part x) { *p = x; }
PARE_INLINE void put(uint32_t* p, words x) { *p = x; }
PARE_INLINE part fma(part x, part y, part z) { return __builtin_fmaf(x, y, z); }
PARE_INLINE part sqrt(part x) { return __builtin_sqrtf(x); }
PARE_INLINE part convert(integers x) { return static_cast<float>(x); }
PARE_INLINE void mul_wide(words x, words y, words* low, words* high) {
  const uint64_t p = static_cast<uint64_t>(x) * y;
  *low = static_cast<uint32_t>(p);
  *high = static_cast<uint32_t>(p >> 32);
}
PARE_INLINE words get_upper(const uint16_t* p) { return static_cast<uint32_t>(*p) << 16; }
PARE_INLINE void put_upper(uint16_t* p, words x) { *p = static_cast<uint16_t>(x >> 16); }
PARE_INLINE float first(part x) { return x; }
template <class F>
PARE_INLINE float across(part x, F) {
  return x;
}
#endif
constexpr int kLanes = sizeof(part) / sizeof(float), kParts = 16 / kLanes;

struct vf {
  part v[kParts];
};
struct vi {
  words v[kParts];
};
struct mask {
  truths v[kParts];
};

#define PARE_PARTS(result, expression)  \
  result r;                             \
  PARE_EACH_PART r.v[i] = (expression); \
  return r
#define PARE_BINARY(type, result, name, expression) \
  PARE_INLINE result name(type x, type y) { PARE_PARTS(result, expression); }
PARE_BINARY(vf, vf, add, x.v[i] + y.v[i])
PARE_BINARY(vf, vf, sub, x.v[i] - y.v[i])
PARE_BINARY(vf, vf, mul, x.v[i] * y.v[i])
PARE_BINARY(vf, vf, div, x.v[i] / y.v[i])
PARE_BINARY(vf, vf, max, x.v[i] > y.v[i] ? x.v[i] : y.v[i])
PARE_BINARY(vf, vf, min, x.v[i] < y.v[i] ? x.v[i] : y.v[i])
PARE_BINARY(vf, mask, less, x.v[i] < y.v[i])
PARE_BINARY(vf, mask, equal, x.v[i] == y.v[i])
PARE_BINARY(vi, vi, iadd, x.v[i] + y.v[i])
PARE_BINARY(vi, vi, isub, x.v[i] - y.v[i])
PARE_BINARY(vi, vi, ixor, x.v[i] ^ y.v[i])
#undef PARE_BINARY
PARE_INLINE vf fma(vf x, vf y, vf z) { PARE_PARTS(vf, fma(x.v[i], y.v[i], z.v[i])); }
PARE_INLINE vf fnma(vf x, vf y, vf z) { PARE_PARTS(vf, fma(-x.v[i], y.v[i], z.v[i])); }
PARE_INLINE vf sqrt(vf x) { PARE_PARTS(vf, sqrt(x.v[i])); }
PARE_INLINE vf set1(float x) { PARE_PARTS(vf, same(x)); }
PARE_INLINE vf load(const float* p) { PARE_PARTS(vf, get(p + i * kLanes)); }
PARE_INLINE void store(float* p, vf x) { PARE_EACH_PART put(p + i * kLanes, x.v[i]); }
PARE_INLINE vf load_part(const float* p, int64_t n) {
  float lanes[16] = {};
  for (int64_t i = 0; i < min64(n, 16); i++) lanes[i] = p[i];
  return load(lanes);
}
PARE_INLINE void store_part(float* p, vf x, int64_t n) {
  float lanes[16];
  store(lanes, x);
  for (int64_t i = 0; i < min64(n, 16); i++) p[i] = lanes[i];
}
PARE_INLINE vf select(mask m, vf x, vf y) { PARE_PARTS(vf, m.v[i] ? x.v[i] : y.v[i]); }
PARE_INLINE vi select(mask m, vi x, vi y) { PARE_PARTS(vi, m.v[i] ? x.v[i] : y.v[i]); }
PARE_INLINE vi iset1(uint32_t x) { PARE_PARTS(vi, same(x)); }
PARE_INLINE vi iload(const void* p) { PARE_PARTS(vi, get(static_cast<const uint32_t*>(p) + i * kLanes)); }
PARE_INLINE void istore(void* p, vi x) { PARE_EACH_PART put(static_cast<uint32_t*>(p) + i * kLanes, x.v[i]); }
template <int N>
PARE_INLINE vi shl(vi x) {
  PARE_PARTS(vi, x.v[i] << N);
}
template <int N>
PARE_INLINE vi shr(vi x) {
  PARE_PARTS(vi, x.v[i] >> N);
}
template <int N>
PARE_INLINE vi sar(vi x) {
  PARE_PARTS(vi, words(integers(x.v[i]) >> N));
}
PARE_INLINE vi bits(vf x) { PARE_PARTS(vi, __builtin_bit_cast(words, x.v[i])); }
PARE_INLINE vf from_bits(vi x) { PARE_PARTS(vf, __builtin_bit_cast(part, x.v[i])); }
PARE_INLINE vf to_float(vi x) { PARE_PARTS(vf, convert(integers(x.v[i]))); }
PARE_INLINE void mul_wide(vi x, vi y, vi* low, vi* high) {
  PARE_EACH_PART mul_wide(x.v[i], y.v[i], &low->v[i], &high->v[i]);
}
constexpr float kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
PARE_INLINE mask first_lanes(int64_t n) { return less(load(kLane), set1(static_cast<float>(n))); }
PARE_INLINE vf load_upper(const uint16_t* p) { PARE_PARTS(vf, __builtin_bit_cast(part, get_upper(p + i * kLanes))); }
PARE_INLINE void store_upper(uint16_t* p, vi x) { PARE_EACH_PART put_upper(p + i * kLanes, x.v[i]); }
#undef PARE_PARTS
#undef PARE_EACH_PART

#endif

PARE_INLINE vf zero() { return set1(0); }
// Keeps x in a register; gcc would load it again for each use.
PARE_INLINE void hold([[maybe_unused]] vf& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
}

// Eight lanes, for tiles that need no more; elsewhere they are 16.  What is to work on either uses these names.
#if defined(__AVX2__)
using vh = __m256;
PARE_INLINE void fill(vh& y, float x) { y = _mm256_set1_ps(x); }
PARE_INLINE void fetch(vh& y, const float* p) { y = _mm256_loadu_ps(p); }
PARE_INLINE vh fma(vh a, vh b, vh c) { return _mm256_fmadd_ps(a, b, c); }
PARE_INLINE void hold(vh& x) { asm("" : "+x"(x)); }
#if defined(__AVX512F__)
PARE_INLINE vf widen(vh x) { return _mm512_castps256_ps512(x); }  // further lanes: anything
#else
PARE_INLINE vf widen(vh x) { return {x, x}; }
#endif
#else
using vh = vf;
#endif
PARE_INLINE void fill(vf& y, float x) { y = set1(x); }
PARE_INLINE void fetch(vf& y, const float* p) { y = load(p); }
PARE_INLINE vf widen(vf x) { return x; }

// The first n lanes (all where n >= 16); absent ones read as +0 and are not written.
PARE_INLINE vf load(const float* p, int64_t n) {
  return __builtin_constant_p(n) && n == 16 ? load(p) : load_part(p, n);
}
PARE_INLINE void store(float* p, vf x, int64_t n) {
  if (__builtin_constant_p(n) && n == 16)
    store(p, x);
  else
    store_part(p, x, n);
}

PARE_INLINE vf load_upper(const uint16_t* p, int64_t n) {
  if (__builtin_constant_p(n) && n == 16) return load_upper(p);
  uint16_t part[16] = {};
  __builtin_memcpy(part, p, 2 * static_cast<size_t>(n));
  return load_upper(part);
}
PARE_INLINE void store_upper(uint16_t* p, vi x, int64_t n) {
  if (__builtin_constant_p(n) && n == 16) return store_upper(p, x);
  uint16_t part[16];
  store_upper(part, x);
  __builtin_memcpy(p, part, 2 * static_cast<size_t>(n));
}

// The canonical sum of 16 lanes: lanes i and i + 8, then i + 4, i + 2, i + 1.
PARE_INLINE float sum(vf x) {
#if defined(__AVX2__)
  const __m256 r8 = _mm256_add_ps(halves(x, false), halves(x, true));
  const __m128 r4 = _mm_add_ps(_mm256_castps256_ps128(r8), _mm256_extractf128_ps(r8, 1));
  const __m128 r2 = _mm_add_ps(r4, _mm_movehl_ps(r4, r4));
  return _mm_cvtss_f32(_mm_add_ss(r2, _mm_shuffle_ps(r2, r2, 1)));
#else
  for (int n = kParts / 2; n; n /= 2)
    for (int i = 0; i < n; i++) x.v[i] += x.v[i + n];
  return across(x.v[0], [](float a, float b) { return a + b; });
#endif
}
PARE_INLINE float highest(vf x) {
#if defined(__AVX2__)
  const __m256 r8 = _mm256_max_ps(halves(x, false), halves(x, true));
  const __m128 r4 = _mm_max_ps(_mm256_castps256_ps128(r8), _mm256_extractf128_ps(r8, 1));
  const __m128 r2 = _mm_max_ps(r4, _mm_movehl_ps(r4, r4));
  return _mm_cvtss_f32(_mm_max_ss(r2, _mm_shuffle_ps(r2, r2, 1)));
#else
  for (int n = kParts / 2; n; n /= 2)
    for (int i = 0; i < n; i++) x.v[i] = x.v[i] > x.v[i + n] ? x.v[i] : x.v[i + n];
  return across(x.v[0], [](float a, float b) { return a > b ? a : b; });
#endif
}
PARE_INLINE float first_lane(vf x) {
#if defined(__AVX2__)
  return _mm256_cvtss_f32(halves(x, false));
#else
  return first(x.v[0]);
#endif
}

// Calls f(i, lanes) for each 16 elements of [0, n), the last with the rest: for_vectors(n, PARE_LANES_AT(i) { ... }).
#define PARE_LANES_AT(i) [&](int64_t i, int64_t lanes) __attribute__((always_inline))
template <class F>
PARE_INLINE void for_vectors(int64_t n, F f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f(i, 16);
  if (i < n) f(i, n - i);
}

// An integer that the compiler knows.
template <int n>
struct Count {
  static constexpr int value = n;
};
// Calls f(Count<n>, i) for pieces [i, i + n) of [0, count): as many as possible with n = kMost, then one with the rest.
template <int kMost, class F>
PARE_INLINE void for_rest(int64_t rest, int64_t i, F f) {
  if constexpr (kMost > 0) {
    if (rest == kMost)
      f(Count<kMost>{}, i);
    else
      for_rest<kMost - 1>(rest, i, f);
  }
}
template <int kMost, class F>
PARE_INLINE void for_pieces(int64_t count, F f) {
  int64_t i = 0;
  for (; i + kMost <= count; i += kMost) f(Count<kMost>{}, i);
  for_rest<kMost - 1>(count - i, i, f);
}

}  // namespace
}  // namespace pare::PARE_ISA
