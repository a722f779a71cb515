// The CUDA kernels under test: emulated in build/tests/pare_tests, on a GPU in build/cuda/pare_cuda_tests.  Tests are
// compiled once for both: only kernels.cpp and test_ptx.cpp know which it is.
#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "ops/list.h"

namespace pare::test {

extern const Table& table_kernels;
extern const Table& table_kernels_fast;  // with linear layers by cuBLASLt
const Table* kernels_here();             // null where the machine has no emulation
bool on_gpu();
// Blocks until all launched kernels are done; what went wrong, or nothing.
std::string kernel_error();

// f() in forward, reverse and three random orders of the emulator's threads and blocks; once on a GPU.
void in_all_orders(const std::function<void()>& f);

// ---- memory of the host that kernels can use: any, but page-locked on a GPU

void* kernel_memory(size_t bytes);
void free_kernel_memory(void* p);

template <class T>
struct KernelAllocator {
  using value_type = T;
  T* allocate(size_t n) { return static_cast<T*>(kernel_memory(n * sizeof(T))); }
  void deallocate(T* p, size_t) { free_kernel_memory(p); }
  bool operator==(const KernelAllocator&) const = default;
};
template <class T>
using KernelVector = std::vector<T, KernelAllocator<T>>;

// For the emulator's access checker (`make check`): the elements of a tensor, of which only the rows of the first
// dimension may have gaps between them.
class KernelMemory {
 public:
  explicit KernelMemory(const Tensor& t);
  ~KernelMemory();
  KernelMemory(KernelMemory&&) = default;  // leaves an empty list behind
  static void wrote(const void* p, size_t bytes);

 private:
  std::vector<void*> rows_;
};

}  // namespace pare::test
