// PARE_CUDA_TESTS: for a GPU; else PARE_EMU: emulated; else there are no kernels, and tests leave them out.
#include "kernels.h"

#include <gtest/gtest.h>

#include <new>

#ifdef PARE_CUDA_TESTS
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <map>

#include "base/error.h"
#elif defined(PARE_EMU)
#include "cuda/emu/include/cuda_runtime.h"
#endif

namespace pare::test {

#ifdef PARE_CUDA_TESTS

const Table& table_kernels = table_cuda;
const Table& table_kernels_fast = table_cuda_fast;
const Table* kernels_here() { return &table_kernels; }
bool on_gpu() { return true; }
void in_all_orders(const std::function<void()>& f) { f(); }

namespace {

class OpenTheDevice : public testing::Environment {
  void SetUp() override {
    try {
      table_cuda.open(self(), DeviceComm::any);
      std::printf("on %s\n", table_cuda.describe().c_str());
    } catch (const Error& e) {
      std::fprintf(stderr, "no test was run: %s\n", e.what());
      std::exit(1);
    }
  }
};
[[maybe_unused]] const testing::Environment* const device = testing::AddGlobalTestEnvironment(new OpenTheDevice);

// One block, taken at the first use and for good: locking pages is slow.  What is taken lies behind all else that is in
// use.
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

}  // namespace

void* kernel_memory(size_t bytes) { return PageLocked::get().take(bytes); }
void free_kernel_memory(void* p) { PageLocked::get().give(p); }

#else

#ifdef PARE_EMU
const Table& table_kernels = table_emu;
const Table& table_kernels_fast = table_emu_fast;
const Table* kernels_here() { return &table_kernels; }

void in_all_orders(const std::function<void()>& f) {
  cuemu::Settings& s = cuemu::settings();
  const cuemu::Settings before = s;
  for (int i = 0; i < 5; i++) {
    s.order = i == 0 ? cuemu::Order::forward : i == 1 ? cuemu::Order::reverse : cuemu::Order::random;
    s.seed = static_cast<uint64_t>(i);
    SCOPED_TRACE(i == 0 ? "forward" : i == 1 ? "reverse" : "random");
    f();
  }
  s = before;
}
#else
const Table* kernels_here() { return nullptr; }
void in_all_orders(const std::function<void()>& f) { f(); }
#endif

bool on_gpu() { return false; }
void* kernel_memory(size_t bytes) { return ::operator new(bytes); }
void free_kernel_memory(void* p) { ::operator delete(p); }

#endif

#if defined(PARE_EMU) || defined(PARE_CUDA_TESTS)
std::string kernel_error() { return cudaDeviceSynchronize() ? cudaGetErrorString(cudaGetLastError()) : ""; }
#else
std::string kernel_error() { return ""; }
#endif

#if defined(PARE_EMU) && !defined(PARE_CUDA_TESTS)
KernelMemory::KernelMemory(const Tensor& t) {
  const bool gaps = t.rank > 1 && !t.contiguous();
  const int64_t rows = gaps ? t.shape[0] : 1, size = static_cast<int64_t>(dtype_size(t.dtype));
  if (t.size() == 0) return;
  for (int64_t r = 0; r < rows; r++) {
    rows_.push_back(static_cast<char*>(t.data) + (gaps ? r * t.stride[0] * size : 0));
    cuemu::device_memory(rows_.back(), static_cast<size_t>(t.size() / rows * size));
  }
}
KernelMemory::~KernelMemory() {
  for (void* p : rows_) cuemu::forget_device_memory(p);
}
void KernelMemory::wrote(const void* p, size_t bytes) { cuemu::host_wrote(p, bytes); }
#else
KernelMemory::KernelMemory(const Tensor&) {}
KernelMemory::~KernelMemory() = default;
void KernelMemory::wrote(const void*, size_t) {}
#endif

}  // namespace pare::test
