// Tells the emulator's access checker (`make check`) which memory of a test the kernels may use, and what of it holds
// values.  It matters to no other build and no other table.
#pragma once
#include <vector>

#include "base/tensor.h"
#ifdef PARE_EMU
#include "cuda/emu/include/cuemu.h"
#endif

namespace pare::test {

#ifdef PARE_EMU

// The elements of a tensor, of which only the rows of the first dimension may have gaps between them.
class KernelMemory {
 public:
  explicit KernelMemory(const Tensor& t) {
    const bool gaps = t.rank > 1 && !t.contiguous();
    const int64_t rows = gaps ? t.shape[0] : 1, size = static_cast<int64_t>(dtype_size(t.dtype));
    if (t.size() == 0) return;
    for (int64_t r = 0; r < rows; r++) {
      rows_.push_back(static_cast<char*>(t.data) + (gaps ? r * t.stride[0] * size : 0));
      cuemu::device_memory(rows_.back(), static_cast<size_t>(t.size() / rows * size));
    }
  }
  ~KernelMemory() {
    for (void* p : rows_) cuemu::forget_device_memory(p);
  }
  KernelMemory(KernelMemory&&) = default;  // leaves an empty list behind
  static void wrote(const void* p, size_t bytes) { cuemu::host_wrote(p, bytes); }

 private:
  std::vector<void*> rows_;
};

#else

struct KernelMemory {
  explicit KernelMemory(const Tensor&) {}
  static void wrote(const void*, size_t) {}
};

#endif

}  // namespace pare::test
