// Cost of an op.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/tensor.h"

namespace pare {

struct Cost {
  int64_t flops = 0, read = 0, written = 0;  // multiply-adds x 2; bytes; bytes
  int64_t sent = 0, abroad = 0;              // bytes to other ranks; of these, bytes to ranks of other machines
  Cost& operator+=(const Cost& o) {
    flops += o.flops;
    read += o.read;
    written += o.written;
    sent += o.sent;
    abroad += o.abroad;
    return *this;
  }
  bool operator==(const Cost&) const = default;
};

// The time of a call's FLOPs and of its bytes on so many multiprocessors, over that of work which is divided evenly:
// the CUDA kernels give each block a tile, and the longest tile, or the last of several waves, is waited for.
struct Stretch {
  double flops = 1, bytes = 1;
};
// The stretch of a call with these arguments.
template <class Args>
Stretch stretch_of(const Args& a, int multiprocessors) {
  if constexpr (requires { a.stretch(multiprocessors); })
    return a.stretch(multiprocessors);
  else
    return {};
}

namespace detail {
template <class... T>
int64_t total_bytes(const T&... t) {
  return (static_cast<int64_t>(t.bytes()) + ... + 0);
}
}  // namespace detail

}  // namespace pare
