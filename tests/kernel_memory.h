// Memory of tests that kernels use, and what the emulator's access checker (`make check`) must know of it: which memory
// that is, and what of it holds values.  That matters to no other build and no other table.
#pragma once
#include <memory>
#include <new>
#include <vector>

#include "base/tensor.h"
#ifdef PARE_CUDA_TESTS
#include <cuda_runtime.h>
#elif defined(PARE_EMU)
#include "cuda/emu/include/cuda_runtime.h"
#endif

namespace pare::test {

// ---- memory of the host that kernels can use: any, but on a GPU what CUDA manages
#ifdef PARE_CUDA_TESTS
template <class T>
struct ManagedMemory {
  using value_type = T;
  T* allocate(size_t n) {
    void* p = nullptr;
    if (cudaMallocManaged(&p, n * sizeof(T)) != cudaSuccess) throw std::bad_alloc();
    return static_cast<T*>(p);
  }
  void deallocate(T* p, size_t) { cudaFree(p); }
  bool operator==(const ManagedMemory&) const = default;
};
template <class T>
using KernelVector = std::vector<T, ManagedMemory<T>>;
#else
template <class T>
using KernelVector = std::vector<T>;
#endif

// ---- for the access checker
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
