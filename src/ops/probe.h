// Services of a device for benchmarks, besides its ops.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

namespace pare {

struct Rate {
  double per_second = 0;  // 0: not measured
  std::string how;        // what was run, or why nothing was
};

// Kernels of linear layers and packed attention in bf16: the device's choice, always mma.sync, or wgmma where rows
// begin at multiples of 16 bytes.
enum class TensorKernel { choose, mma, wgmma };

struct Probe {
  int (*multiprocessors)();                               // blocks of a kernel run on them side by side
  int64_t (*cache_bytes)();                               // of the last cache before the memory
  double (*seconds)(const std::function<void()>& queue);  // of what `queue` queues, by the device's own clock
  Rate (*flops)();                                        // the fastest matrix product there is: bf16
  Rate (*bytes)();                                        // a large copy: bytes read plus bytes written
  bool (*tensor_kernel)(TensorKernel);                    // of all calls from now on; false: the device has not got it
};

}  // namespace pare
