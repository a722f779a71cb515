#include "run/tensorboard.h"

#include <array>
#include <cmath>
#include <cstring>

namespace pare {

namespace {

constexpr std::array<uint32_t, 256> crc_table = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; i++) {
    table[i] = i;
    for (int bit = 0; bit < 8; bit++) table[i] = (table[i] >> 1) ^ (table[i] & 1 ? 0x82F63B78u : 0);
  }
  return table;
}();

// TFRecord stores CRCs rotated and shifted, so that the CRC of bytes that contain one is not trivial.
uint32_t masked_crc(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

template <class T>
std::string little_endian(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof value; i++) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}
std::string fixed(double v) {
  uint64_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return little_endian(bits);
}
std::string fixed(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return little_endian(bits);
}

// Protocol buffers: a field is its key (number * 8 + wire type) and its value.
enum Wire : uint32_t { varint_type = 0, fixed64_type = 1, bytes_type = 2, fixed32_type = 5 };
std::string varint(uint64_t v) {
  std::string bytes;
  for (; v >= 128; v >>= 7) bytes += static_cast<char>((v & 127) | 128);
  return bytes += static_cast<char>(v);
}
std::string key(uint32_t number, Wire type) { return varint(number << 3 | type); }
std::string message(uint32_t number, std::string_view bytes) {
  return key(number, bytes_type) + varint(bytes.size()) + std::string(bytes);
}

// Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
std::string event(double wall_time) { return key(1, fixed64_type) + fixed(wall_time); }

std::string record(const std::string& bytes) {
  const std::string length = little_endian(static_cast<uint64_t>(bytes.size()));
  return length + little_endian(masked_crc(length)) + bytes + little_endian(masked_crc(bytes));
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = (crc >> 8) ^ crc_table[(crc ^ static_cast<uint8_t>(c)) & 255];
  return ~crc;
}

size_t tensorboard_whole(std::string_view bytes) {
  const auto number = [&]<class T>(size_t at, T) {
    T value = 0;
    for (size_t i = 0; i < sizeof value; i++) value |= static_cast<T>(static_cast<uint8_t>(bytes[at + i])) << (8 * i);
    return value;
  };
  constexpr size_t head = 12, tail = 4;  // length and its CRC; CRC
  size_t whole = 0;
  while (bytes.size() - whole >= head + tail) {
    const auto length = number(whole, uint64_t{});
    if (number(whole + 8, uint32_t{}) != masked_crc(bytes.substr(whole, 8)) ||
        length > bytes.size() - whole - head - tail ||
        number(whole + head + length, uint32_t{}) != masked_crc(bytes.substr(whole + head, length)))
      break;
    whole += head + length + tail;
  }
  return whole;
}

std::string tensorboard_header(double wall_time) { return record(event(wall_time) + message(3, "brain.Event:2")); }

std::string tensorboard_event(int64_t step, double wall_time, const Metrics& metrics) {
  // Summary { repeated Value value = 1; }, Value { string tag = 1; float simple_value = 2; }
  std::string summary;
  for (const auto& [name, value] : metrics.all())
    if (std::isfinite(value))
      summary += message(1, message(1, name) + key(2, fixed32_type) + fixed(static_cast<float>(value)));
  // proto3 leaves out zeros.
  const std::string at = step == 0 ? "" : key(2, varint_type) + varint(static_cast<uint64_t>(step));
  return record(event(wall_time) + at + message(5, summary));
}

}  // namespace pare
