// The emulator's tensor cores: sums that tell the rules of rounding apart, and random ones against the rules written
// down plainly.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "base/half.h"
#include "base/rng.h"
#include "cuda/emu/include/cuemu_mma.h"

namespace pare::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr uint32_t kNan = 0x7fffffff;

struct Operands {
  uint16_t a[16][16] = {}, b[8][16] = {};
  float d[16][8] = {};
};

// o.d after the product, as on compute capability `arch` / 10.
void multiply(Operands& o, int arch) {
  const int before = cuemu::settings().arch;
  cuemu::settings().arch = arch;
  cuemu::tensor_core(o.d, o.a, o.b, 16);
  cuemu::settings().arch = before;
}

struct Product {
  int k;
  float a, b;
};
// c + the products, in one of the elements.
float sum(int arch, float c, const std::vector<Product>& products) {
  Operands o;
  for (const Product& p : products) {
    o.a[3][p.k] = f32_to_bf16(p.a);
    o.b[5][p.k] = f32_to_bf16(p.b);
  }
  o.d[3][5] = c;
  multiply(o, arch);
  return o.d[3][5];
}
uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

TEST(EmuTensorCore, TermsAreCutOffBelowTheLargest) {
  // 25 bits behind the largest exponent stay, on compute capability 8.0 24.
  EXPECT_EQ(sum(90, -1, {{0, 1, 1}, {1, 0x1p-25f, 1}}), 0x1p-25f);
  EXPECT_EQ(sum(90, -1, {{0, 1, 1}, {1, 0x1p-26f, 1}}), 0);
  EXPECT_EQ(sum(80, -1, {{0, 1, 1}, {1, 0x1p-24f, 1}}), 0x1p-24f);
  EXPECT_EQ(sum(80, -1, {{0, 1, 1}, {1, 0x1p-25f, 1}}), 0);
  // Also when the largest is c, and when many small ones would add up.
  EXPECT_EQ(sum(90, 0x1p26f, {{0, -0x1p26f, 1}, {1, 1, 1}, {2, 1, 1}, {3, 2, 1}}), 2);
  // Towards zero, not down.
  EXPECT_EQ(sum(90, -1, {{0, 1, 1}, {1, -1.5f * 0x1p-25f, 1}}), -0x1p-25f);
  // The exponent of 1.5 * 1.5 is 0, though it is more than 2.
  EXPECT_EQ(sum(90, 0, {{0, 1.5f, 1.5f}, {1, -1.5f, 1.5f}, {2, 0x1p-25f, 1}}), 0x1p-25f);
}

TEST(EmuTensorCore, TheSumIsTruncated) {
  for (int arch : {80, 90}) {
    EXPECT_EQ(sum(arch, 1, {{0, 1.5f * 0x1p-23f, 1}}), 1 + 0x1p-23f);  // rounded to nearest it were 1 + 2^-22
    EXPECT_EQ(sum(arch, -1, {{0, -1.5f * 0x1p-23f, 1}}), -1 - 0x1p-23f);
    EXPECT_EQ(sum(arch, 1, {{0, -0x1p-24f, 1}}), 1 - 0x1p-24f);
  }
  // Two halves of a unit in the last place count together.
  EXPECT_EQ(sum(90, 1, {{0, 0x1p-24f, 1}, {9, 0x1p-24f, 1}}), 1 + 0x1p-23f);
  EXPECT_EQ(sum(80, 1, {{0, 0x1p-24f, 1}, {7, 0x1p-24f, 1}}), 1 + 0x1p-23f);
}

TEST(EmuTensorCore, ComputeCapability80AddsEightAtATime) {
  EXPECT_EQ(sum(90, 0, {{0, 1, 1}, {1, 0x1p-24f, 1}, {8, -1, 1}}), 0x1p-24f);
  EXPECT_EQ(sum(80, 0, {{0, 1, 1}, {1, 0x1p-24f, 1}, {8, -1, 1}}), 0);  // truncated after the first eight
  EXPECT_EQ(sum(80, 0, {{0, 1, 1}, {1, 0x1p-24f, 1}, {7, -1, 1}}), 0x1p-24f);
  EXPECT_EQ(sum(80, 1, {{0, 0x1p-24f, 1}, {8, 0x1p-24f, 1}}), 1);
}

TEST(EmuTensorCore, ZerosAndDenormals) {
  for (int arch : {80, 90}) {
    EXPECT_EQ(bits(sum(arch, -0.f, {})), 0u);
    EXPECT_EQ(bits(sum(arch, -1, {{0, 1, 1}})), 0u);
    EXPECT_EQ(bits(sum(arch, 0, {{0, -0.f, 1}})), 0u);
    EXPECT_EQ(sum(arch, 0x1p-149f, {}), 0x1p-149f);
    EXPECT_EQ(sum(arch, -0x1.8p-140f, {{0, 0x1p-100f, 0x1p-41f}}), -0x1p-140f);
    EXPECT_EQ(sum(arch, 0, {{0, 0x1p-133f, 0x1p120f}}), 0x1p-13f);  // the least number of bf16
    EXPECT_EQ(sum(arch, 0, {{0, 1.75f * 0x1p-75f, 0x1p-74f}}), 0x1p-149f);
    EXPECT_EQ(bits(sum(arch, 0, {{0, -0x1p-75f, 0x1p-75f}})), 0u);
  }
  // A denormal factor counts with the exponent of the smallest normal number, here 1 for a product of 2^-6.
  EXPECT_EQ(sum(90, 0, {{0, 0x1p-133f, 0x1p127f}, {1, 0x1p-24f, 1}}), 0x1p-6f + 0x1p-24f);
  EXPECT_EQ(sum(90, 0, {{0, 0x1p-133f, 0x1p127f}, {1, 0x1p-25f, 1}}), 0x1p-6f);
  // A zero does not count, whatever the other factor is.
  EXPECT_EQ(sum(90, 0, {{0, 0, 0x1p127f}, {1, 0x1p-25f, 1}}), 0x1p-25f);
}

TEST(EmuTensorCore, OverflowInfinityAndNan) {
  for (int arch : {80, 90}) {
    EXPECT_EQ(sum(arch, 0, {{0, 0x1p127f, 2}}), kInf);
    EXPECT_EQ(sum(arch, 0, {{0, -0x1p100f, 0x1p100f}}), -kInf);
    EXPECT_EQ(sum(arch, 0, {{0, 0x1p100f, 0x1p100f}, {1, -0x1p100f, 0x1p100f}}), 0);  // within one sum
    EXPECT_EQ(sum(arch, 0x1.fffffep127f, {{0, 0x1p100f, 1}}), 0x1.fffffep127f);       // truncated, not rounded
    EXPECT_EQ(sum(arch, 1, {{15, kInf, -2}}), -kInf);
    EXPECT_EQ(sum(arch, kInf, {{15, 1, -2}}), kInf);
    EXPECT_EQ(bits(sum(arch, -kInf, {{9, kInf, 1}})), kNan);
    EXPECT_EQ(bits(sum(arch, std::bit_cast<float>(0xffc01234u), {})), kNan);
    Operands o;
    o.a[2][4] = f32_to_bf16(kInf);
    o.b[1][4] = f32_to_bf16(1);
    o.a[3][4] = f32_to_bf16(1);
    multiply(o, arch);
    EXPECT_EQ(o.d[2][1], kInf);
    EXPECT_EQ(o.d[3][1], 1);           // the rows beside it know nothing
    EXPECT_EQ(bits(o.d[2][2]), kNan);  // infinity times zero
  }
}

// The rules, in double: every term and every sum of terms is exact there.
float plain(float c, const uint16_t* a, const uint16_t* b, int n, int kept) {
  const auto exponent = [](double x) { return x == 0 ? -512 : std::max(-126, std::ilogb(x)); };
  std::vector<double> terms{c};
  int top = std::max(exponent(c), -256);
  double ieee = c;
  for (int k = 0; k < n; k++) {
    const double x = bf16_to_f32(a[k]), y = bf16_to_f32(b[k]);
    terms.push_back(x * y);
    ieee += x * y;
    if (std::isfinite(x) && std::isfinite(y)) top = std::max(top, exponent(x) + exponent(y));
  }
  if (std::isnan(ieee)) return std::bit_cast<float>(kNan);
  if (std::isinf(ieee)) return static_cast<float>(ieee);
  int64_t total = 0;
  for (double t : terms) total += static_cast<int64_t>(std::ldexp(t, kept - top));
  const double exact = std::ldexp(static_cast<double>(total), top - kept);
  const float near = static_cast<float>(exact);
  if (std::fabs(exact) >= 0x1p128) return near;
  return (std::fabs(near) > std::fabs(exact) ? std::nextafter(near, 0.f) : near) + 0.f;
}

TEST(EmuTensorCore, RandomOperandsFollowTheRules) {
  using Draw = std::function<float(Rng&)>;
  const auto scaled = [](Rng& r, int low, int high) {  // 2^low to 2^high
    return static_cast<float>(std::ldexp(r.normal(), low + static_cast<int>(r.below(high - low + 1))));
  };
  const Draw normal = [](Rng& r) { return static_cast<float>(r.normal()); };
  const Draw zeros = [&](Rng& r) { return r.below(2) ? 0 : normal(r); };
  const Draw wide = [&](Rng& r) { return scaled(r, -20, 20); };
  const Draw widest = [&](Rng& r) { return scaled(r, -140, 126); };
  const Draw small = [&](Rng& r) { return scaled(r, -80, -50); };
  const Draw denormal = [&](Rng& r) { return r.below(2) ? scaled(r, -138, -126) : scaled(r, -12, 12); };
  const Draw any = [](Rng& r) { return std::bit_cast<float>(r.below(UINT32_MAX)); };
  Rng r(rng_key(1, RngStream::test, 0), 7);
  for (const Draw& draw : {normal, zeros, wide, widest, small, denormal, any})
    for (int arch : {80, 90})
      for (int repeat = 0; repeat < 20; repeat++) {
        Operands o;
        for (auto& row : o.a)
          for (uint16_t& x : row) x = f32_to_bf16(draw(r));
        for (auto& row : o.b)
          for (uint16_t& x : row) x = f32_to_bf16(draw(r));
        for (auto& row : o.d)
          for (float& x : row) x = repeat % 2 ? draw(r) * draw(r) : 0;
        Operands is = o;
        multiply(is, arch);
        for (int i = 0; i < 16; i++)
          for (int j = 0; j < 8; j++) {
            const uint16_t *a = o.a[i], *b = o.b[j];
            const float should =
                arch == 90 ? plain(o.d[i][j], a, b, 16, 25) : plain(plain(o.d[i][j], a, b, 8, 24), a + 8, b + 8, 8, 24);
            ASSERT_EQ(bits(is.d[i][j]), bits(should)) << is.d[i][j] << " is not " << should << ", arch " << arch;
          }
      }
}

}  // namespace
}  // namespace pare::test
