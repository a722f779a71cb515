// The arithmetic of tensor cores on bf16, by the model of Xie et al., "MMA-Sim" (arXiv 2511.10909), which they found to
// agree with the hardware bit for bit; so does an H100 with this (tests/golden/ptx_sm90.json).
//
// Of c and the products, each exact, the largest exponent counts; a product's is the sum of its factors' (it is not
// normalised), that of a denormal the smallest of its type; zeros do not count (seen on the H100, taken over for 8.x).
// Every term is truncated to a multiple of 2^(largest - F), the terms are added exactly, and the sum is truncated to a
// float.  On compute capability 9.0 and later that is one sum of 16 products and c with F = 25, for mma.sync and wgmma
// alike; before it is one of k = 0..7 and c and then one of k = 8..15 and the result, with F = 24.  Infinities and NaN
// follow IEEE 754, a NaN result is 0x7fffffff, what is too large for a float is an infinity, and a sum of zero is +0.
#include <array>
#include <bit>

#include "cuemu_mma.h"

namespace cuemu {

namespace {

constexpr int kWide = 8;  // numbers at a time: the columns of d
using Floats = float __attribute__((vector_size(4 * kWide)));
using Ints = int32_t __attribute__((vector_size(4 * kWide)));

// Floats (or bf16, their upper halves) as significand * 2^(exponent - 23), the significand a whole number.
constexpr int kFraction = 23, kBias = 127, kNotFinite = 255 - kBias;
constexpr int kLeast = -2 * kBias,
              kZero = 512;  // below every product's exponent; how far the exponents of zeros are lower
struct Numbers {
  Floats significand;
  Ints exponent;
};
inline Numbers split(const Ints& bits) {
  const Ints field = bits >> kFraction & 255, denormal = field == 0;
  const Ints digits = (bits & ((1 << kFraction) - 1)) | (~denormal & (1 << kFraction));
  const Ints magnitude = std::bit_cast<Ints>(__builtin_convertvector(digits, Floats));
  return {std::bit_cast<Floats>(magnitude | (bits & INT32_MIN)), field - kBias - denormal - ((digits == 0) & kZero)};
}
inline Numbers split(const uint16_t* bf16, int step) {
  int32_t bits[kWide];
  for (int i = 0; i < kWide; i++) bits[i] = static_cast<int32_t>(uint32_t{bf16[i * step]} << 16);
  return split(std::bit_cast<Ints>(bits));
}

// x * 2^shift, truncated; 0 if shift is below -126.
inline Ints truncated(const Floats& x, const Ints& shift) {
  const Ints field = shift + kBias, power = (field & (field > 0)) << kFraction;
  return __builtin_convertvector(x * std::bit_cast<Floats>(power), Ints);
}

// sum * 2^exponent.
inline double scaled(double sum, int exponent) {
  return sum * std::bit_cast<double>(static_cast<uint64_t>(static_cast<int64_t>(exponent + 1023)) << 52);
}
// v truncated to a float, if that is not denormal.
inline float truncated(double v) {
  return static_cast<float>(std::bit_cast<double>(std::bit_cast<uint64_t>(v) & ~((uint64_t{1} << 29) - 1)));
}
float truncated_denormal(double v) { return static_cast<float>(static_cast<int32_t>(v * 0x1p149)) * 0x1p-149f; }

float with_special(float c, const uint16_t* a, const uint16_t* b, int n) {
  const auto value = [](uint16_t bf16) { return double{std::bit_cast<float>(uint32_t{bf16} << 16)}; };
  double sum = double{c};
  for (int k = 0; k < n; k++) sum += value(a[k]) * value(b[k]);
  return std::isnan(sum) ? std::bit_cast<float>(0x7fffffffu) : static_cast<float>(sum);
}

// The operands of eight sums: a row of a, and the columns of b by k.
struct Operands {
  const uint16_t* a;
  const uint16_t (*b)[16];
  alignas(Floats) float significand[16];  // of a
  alignas(Ints) int32_t exponent[16];
  Numbers columns[16];
};

// d += the products from k = first on, kTerms of them, in one sum.
template <int kTerms, int kKept>
inline void add_products(float* d, const Operands& o, int first) {
  Ints bits;
  std::memcpy(&bits, d, sizeof bits);
  const Numbers c = split(bits);
  Ints top = c.exponent > kLeast ? c.exponent : Ints{} + kLeast, special = c.exponent == kNotFinite;
  for (int k = first; k < first + kTerms; k++) {
    const Numbers& b = o.columns[k];
    const Ints e = b.exponent + o.exponent[k];
    top = e > top ? e : top;
    special |= (b.exponent == kNotFinite) | (o.exponent[k] == kNotFinite ? -1 : 0);
  }
  Ints sum = {};  // 16 terms of less than 2^27
  for (int k = first; k < first + kTerms; k++) {
    const Numbers& b = o.columns[k];
    sum += truncated(b.significand * o.significand[k], b.exponent - top + (o.exponent[k] + kKept - 2 * kFraction));
  }
  const Ints rest = truncated(c.significand, c.exponent - top + (kKept - kFraction));
  const auto total = [&](int j) {
    return scaled(static_cast<double>(sum[j]) + static_cast<double>(rest[j]), top[j] - kKept);
  };
  float before[kWide];
  std::memcpy(before, d, sizeof before);
  for (int j = 0; j < kWide; j++) d[j] = truncated(total(j));
  const Ints denormal = (top < kKept - 126) & ((sum | rest) != 0);  // perhaps
  const auto unusual = std::bit_cast<std::array<uint64_t, kWide / 2>>(special | denormal);
  if (!(unusual[0] | unusual[1] | unusual[2] | unusual[3])) return;
  for (int j = 0; j < kWide; j++) {
    const double v = total(j);
    if (special[j])
      d[j] = with_special(before[j], o.a + first, o.b[j] + first, kTerms);
    else if (std::fabs(v) < 0x1p-126)
      d[j] = truncated_denormal(v);
  }
}

}  // namespace

void tensor_core(float (*d)[8], const uint16_t (*a)[16], const uint16_t (*b)[16], int rows) {
  Operands o;
  o.b = b;
  for (int k = 0; k < 16; k++) o.columns[k] = split(&b[0][k], 16);
  for (int i = 0; i < rows; i++) {
    o.a = a[i];
    for (int k = 0; k < 16; k += kWide) {
      const Numbers n = split(a[i] + k, 1);
      std::memcpy(o.significand + k, &n.significand, sizeof n.significand);
      std::memcpy(o.exponent + k, &n.exponent, sizeof n.exponent);
    }
    if (settings().arch >= 90) {  // nothing is known of later ones
      add_products<16, 25>(d[i], o, 0);
    } else {
      add_products<8, 24>(d[i], o, 0);
      add_products<8, 24>(d[i], o, 8);
    }
  }
}

}  // namespace cuemu
