// 16-bit floating point, converted by bits: the same on every machine.
#pragma once
#include <bit>
#include <cstdint>

namespace pare {

constexpr float bf16_to_f32(uint16_t h) { return std::bit_cast<float>(static_cast<uint32_t>(h) << 16); }

// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN, values that are too large become infinite.
constexpr uint16_t f32_to_bf16(float f) {
  const uint32_t b = std::bit_cast<uint32_t>(f);
  if ((b & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((b >> 16) | 0x40u);
  return static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

// Rounds up in magnitude with probability (what is cut off) / 2^16, for `random` uniform over 16 bits.
constexpr uint16_t f32_to_bf16_random(float f, uint32_t random) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(f) + (random & 0xffffu)) >> 16);
}

// IEEE 754 binary16; exact, subnormals included.
constexpr float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 0x3ffu;
  if (exponent == 0) {  // fraction * 2^-24
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | (wide << 23) | (fraction << 13));
}

// Rounds to nearest, ties to even, subnormals included; a NaN stays a (quiet) NaN, too large values become infinite.
constexpr uint16_t f32_to_f16(float f) {
  const uint32_t b = std::bit_cast<uint32_t>(f), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7fffffffu;
  uint32_t h = 0;
  if (magnitude > 0x7f800000u) {
    h = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520, half way to what would follow the largest
    h = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, which is the last place of [0.5, 1)
    h = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    h = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | h);
}

}  // namespace pare
