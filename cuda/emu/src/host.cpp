// The part of CUDA's host API that the project uses.
#include <algorithm>
#include <cstring>

#include "check.h"

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

namespace cuemu {
namespace {

void add_alloc(Alloc a) {
  check::add(a);
  g_allocs.insert(
      std::upper_bound(g_allocs.begin(), g_allocs.end(), a.p, [](const char* p, const Alloc& x) { return p < x.p; }),
      a);
}
// False if there is none at p.
bool remove_alloc(void* p, bool lent) {
  auto it = std::find_if(g_allocs.begin(), g_allocs.end(), [&](const Alloc& a) { return a.p == p && a.lent == lent; });
  if (it == g_allocs.end()) return false;
  finish_all();
#ifdef CUEMU_ASAN
  if (!lent) __asan_unpoison_memory_region(it->p, it->bytes);
#endif
  check::remove(*it);
  g_allocs.erase(it);
  return true;
}

// What cudaMemcpy and cudaMemset refuse, they refuse at once; the rest is done when its turn comes.
// Host memory may stand where device memory is expected, but not the other way round.
cudaError_t check_copy(void* dst, const void* src, size_t n, cudaMemcpyKind kind) {
  const Alloc *to = find_alloc(dst, n), *from = find_alloc(src, n);
  if (n == 0) return cudaSuccess;
  const bool wrong = overruns(dst, n) || overruns(src, n) || (kind == cudaMemcpyHostToDevice && from) ||
                     (kind == cudaMemcpyDeviceToHost && to);
  return wrong ? cudaErrorInvalidValue : g_error;
}
void copy(void* dst, const void* src, size_t n) {
  if (g_error) return;
  const Alloc *to = find_alloc(dst, n), *from = find_alloc(src, n);
  const Reach a(to), b(from == to ? nullptr : from);
  std::memmove(dst, src, n);
  check::host_wrote(dst, n);
}

}  // namespace

#ifdef CUEMU_CHECK
void device_memory(void* p, size_t bytes) { add_alloc({.p = static_cast<char*>(p), .bytes = bytes, .lent = true}); }
void forget_device_memory(void* p) { remove_alloc(p, true); }
void host_wrote(const void* p, size_t bytes) { check::host_wrote(p, bytes); }
#else
void device_memory(void*, size_t) {}
void forget_device_memory(void*) {}
void host_wrote(const void*, size_t) {}
#endif

}  // namespace cuemu

cudaError_t cudaMalloc(void** p, size_t bytes) {
  void* m = nullptr;
  if (posix_memalign(&m, 256, bytes ? bytes : 1)) return cudaErrorMemoryAllocation;
  std::memset(m, 0xff, bytes);
  cuemu::add_alloc({.p = static_cast<char*>(m), .bytes = bytes});
#ifdef CUEMU_ASAN
  __asan_poison_memory_region(m, bytes);
#endif
  *p = m;
  return cudaSuccess;
}

// Waits for everything that is queued.
cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  if (!cuemu::remove_alloc(p, false)) return cudaErrorInvalidValue;
  std::free(p);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t n, cudaMemcpyKind kind, cudaStream_t stream) {
  if (const cudaError_t e = cuemu::check_copy(dst, src, n, kind)) return e;
  if (n) cuemu::queue(stream, [=] { cuemu::copy(dst, src, n); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* dst, const void* src, size_t n, cudaMemcpyKind kind) {
  const cudaError_t e = cudaMemcpyAsync(dst, src, n, kind);
  return e ? e : cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void* dst, int value, size_t n, cudaStream_t stream) {
  if (cuemu::overruns(dst, n)) return cudaErrorInvalidValue;
  if (n)
    cuemu::queue(stream, [=] {
      if (cuemu::g_error) return;
      const cuemu::Reach reach(cuemu::find_alloc(dst, n));
      std::memset(dst, value, n);
      cuemu::check::host_wrote(dst, n);
    });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* dst, int value, size_t n) {
  const cudaError_t e = cudaMemsetAsync(dst, value, n);
  return e ? e : cudaStreamSynchronize(nullptr);
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
