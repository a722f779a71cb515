// The part of CUDA's host API that the project uses.
#include <algorithm>
#include <cstring>

#include "internal.h"

namespace cuemu {
std::vector<Alloc> g_allocs;
cudaError_t g_error = cudaSuccess;

namespace {

// The allocation that holds all of [p, p + n).
Alloc* find_alloc(const void* p, size_t n) {
  for (Alloc& a : g_allocs)
    if (p >= a.p && static_cast<const char*>(p) + n <= a.p + a.bytes) return &a;
  return nullptr;
}
// Does [p, p + n) run over an end of an allocation?
bool overruns(const void* p, size_t n) {
  auto* c = static_cast<const char*>(p);
  return !find_alloc(p, n) && std::any_of(g_allocs.begin(), g_allocs.end(),
                                          [&](const Alloc& a) { return c < a.p + a.bytes && c + n > a.p; });
}

// Device memory is within the host's reach while one of these lives.
class Reach {
 public:
  explicit Reach([[maybe_unused]] const Alloc* a) {
#ifdef CUEMU_ASAN
    if ((a_ = a)) __asan_unpoison_memory_region(a->p, a->bytes);
  }
  ~Reach() {
    if (a_) __asan_poison_memory_region(a_->p, a_->bytes);
  }
  Reach(const Reach&) = delete;
  Reach& operator=(const Reach&) = delete;

 private:
  const Alloc* a_;
#else
  }
#endif
};

}  // namespace
}  // namespace cuemu

using cuemu::Alloc;
using cuemu::g_allocs;

cudaError_t cudaMalloc(void** p, size_t bytes) {
  void* m = nullptr;
  if (posix_memalign(&m, 256, bytes ? bytes : 1)) return cudaErrorMemoryAllocation;
  std::memset(m, 0xff, bytes);
  g_allocs.push_back({static_cast<char*>(m), bytes});
#ifdef CUEMU_ASAN
  __asan_poison_memory_region(m, bytes);
#endif
  *p = m;
  return cudaSuccess;
}

cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  auto it = std::find_if(g_allocs.begin(), g_allocs.end(), [&](const Alloc& a) { return a.p == p; });
  if (it == g_allocs.end()) return cudaErrorInvalidValue;
#ifdef CUEMU_ASAN
  __asan_unpoison_memory_region(it->p, it->bytes);
#endif
  std::free(p);
  g_allocs.erase(it);
  return cudaSuccess;
}

// Host memory may stand where device memory is expected, but not the other way round.
cudaError_t cudaMemcpy(void* dst, const void* src, size_t n, cudaMemcpyKind kind) {
  const Alloc *to = cuemu::find_alloc(dst, n), *from = cuemu::find_alloc(src, n);
  if (n == 0) return cudaSuccess;
  if (cuemu::overruns(dst, n) || cuemu::overruns(src, n) || (kind == cudaMemcpyHostToDevice && from) ||
      (kind == cudaMemcpyDeviceToHost && to))
    return cudaErrorInvalidValue;
  cuemu::Reach a(to), b(from == to ? nullptr : from);
  std::memmove(dst, src, n);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* dst, int value, size_t n) {
  if (cuemu::overruns(dst, n)) return cudaErrorInvalidValue;
  cuemu::Reach reach(cuemu::find_alloc(dst, n));
  if (n) std::memset(dst, value, n);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(cuemu::g_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return cuemu::g_error; }

const char* cudaGetErrorString(cudaError_t e) {
  switch (e) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorLaunchFailure:
      return cuemu::last_report().c_str();
  }
  return "unknown error";
}
