// What an op costs.
#pragma once
#include <cstdint>

#include "base/tensor.h"

namespace pare {

struct Cost {
  int64_t flops = 0, read = 0, written = 0, sent = 0;  // multiply-adds x 2; bytes; bytes; bytes to other ranks
  Cost& operator+=(const Cost& o) {
    flops += o.flops, read += o.read, written += o.written, sent += o.sent;
    return *this;
  }
  bool operator==(const Cost&) const = default;
};

namespace detail {
template <class... T>
int64_t total_bytes(const T&... t) {
  return (static_cast<int64_t>(t.bytes()) + ... + 0);
}
}  // namespace detail

}  // namespace pare
