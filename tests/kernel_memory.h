// Memory of tests that kernels use, and what the emulator's access checker (`make check`) must know of it: which memory
// that is, and what of it holds values.  That matters to no other build and no other table.
#pragma once
#include <memory>
#include <new>
#include <vector>

#include "base/tensor.h"
#ifdef PARE_CUDA_TESTS
#include <cuda_runtime.h>

#include <map>

#include "base/error.h"
#elif defined(PARE_EMU)
#include "cuda/emu/include/cuda_runtime.h"
#endif

namespace pare::test {

// ---- memory of the host that kernels can use: any, but on a GPU what is page-locked
#ifdef PARE_CUDA_TESTS
// One block of it, taken at the first use and for good: locking pages is slow.  What is taken lies behind all else that
// is in use.
class PageLocked {
 public:
  static PageLocked& get() {
    static PageLocked& all = *new PageLocked;
    return all;
  }
  char* take(size_t bytes) {
    const size_t begin = used_.empty() ? 0 : used_.rbegin()->second;
    expect(begin + bytes <= kBytes, "a test takes more than ", kBytes, " bytes of page-locked memory: PageLocked");
    used_[begin] = begin + (bytes + kAlign) / kAlign * kAlign;  // never empty
    return base_ + begin;
  }
  void give(void* p) { used_.erase(static_cast<size_t>(static_cast<char*>(p) - base_)); }

 private:
  PageLocked() {
    if (cudaMallocHost(&base_, kBytes + kAlign) != cudaSuccess)
      fail(kBytes, " bytes of page-locked memory: ", cudaGetErrorString(cudaGetLastError()));
  }
  static constexpr size_t kBytes = size_t{256} << 20, kAlign = 256;
  char* base_ = nullptr;
  std::map<size_t, size_t> used_;  // from here to there
};
template <class T>
struct PageLockedMemory {
  using value_type = T;
  T* allocate(size_t n) { return reinterpret_cast<T*>(PageLocked::get().take(n * sizeof(T))); }
  void deallocate(T* p, size_t) { PageLocked::get().give(p); }
  bool operator==(const PageLockedMemory&) const = default;
};
template <class T>
using KernelVector = std::vector<T, PageLockedMemory<T>>;
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
