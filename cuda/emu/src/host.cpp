// The part of CUDA's host API that the project uses.
#include <sys/mman.h>

#include <algorithm>
#include <csignal>
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

#ifdef CUEMU_ASAN  // its red zones guard the ends, and it reports what the host touches
char* map(size_t bytes) {
  void* p = nullptr;
  return posix_memalign(&p, 256, bytes) ? nullptr : static_cast<char*>(p);
}
void unmap(const Alloc& a) { std::free(a.p); }
void set_reach(const Alloc& a, bool host) {
  host ? __asan_unpoison_memory_region(a.p, a.bytes) : __asan_poison_memory_region(a.p, a.bytes);
}
#else
constexpr size_t kPage = 4096;
size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
char* map(size_t bytes) {
  void* p = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
}
void unmap(const Alloc& a) { munmap(a.p, pages(a.bytes)); }
void set_reach(const Alloc& a, bool host) {
  if (mprotect(a.p, pages(a.bytes), host ? PROT_READ | PROT_WRITE : PROT_NONE)) std::abort();
}

// Says what was touched; the access is then made again, and ends the program.
void on_fault(int signal, siginfo_t* info, void*) {
  std::signal(signal, SIG_DFL);
  for (const Alloc& a : g_allocs) {
    const auto* p = static_cast<const char*>(info->si_addr);
    if (a.lent || p < a.p || p >= a.p + pages(a.bytes)) continue;
    std::fprintf(stderr, "cuemu: the host touched byte %td of an allocation of %zu bytes of device memory\n", p - a.p,
                 a.bytes);
  }
}
void catch_faults() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  [[maybe_unused]] static const int once = sigaction(SIGSEGV, &action, nullptr);
}
#endif

}  // namespace

bool in_device_memory(const void* p, size_t bytes) { return find_alloc(p, bytes) != nullptr; }
bool usable(const void* p, size_t bytes) { return kChecker ? find_alloc(p, bytes) != nullptr : !overruns(p, bytes); }

namespace {

size_t device_bytes() {
  size_t sum = 0;
  for (const Alloc& a : g_allocs) sum += a.lent ? 0 : a.bytes;
  return sum;
}

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
  check::remove(*it);
  if (!lent) {
    set_reach(*it, true);
    unmap(*it);
  }
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
std::vector<Alloc>& page_locked() {
  static auto& all = *new std::vector<Alloc>;  // never destroyed, as the streams
  return all;
}
// A copy to the device, that is from memory of the host that is not page-locked?
bool may_wait(const void* dst, const void* src, size_t n) {
  const auto* p = static_cast<const char*>(src);
  const auto holds = [&](const Alloc& a) { return p >= a.p && p + n <= a.p + a.bytes; };
  return find_alloc(dst, n) && !find_alloc(src, n) && std::none_of(page_locked().begin(), page_locked().end(), holds);
}
void move(void* dst, const void* src, size_t n) {
  if (g_error) return;
  std::memmove(dst, src, n);
  check::host_wrote(dst, n);
}

}  // namespace

DeviceMemoryOpen::DeviceMemoryOpen() {
  for (const Alloc& a : g_allocs)
    if (!a.lent) set_reach(a, true);
}
DeviceMemoryOpen::~DeviceMemoryOpen() {
  for (const Alloc& a : g_allocs)
    if (!a.lent) set_reach(a, false);
}

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

static int g_device = 0;
cudaError_t cudaGetDeviceCount(int* count) {
  *count = cuemu::settings().devices;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= cuemu::settings().devices) return cudaErrorInvalidValue;
  g_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = g_device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= cuemu::settings().devices) return cudaErrorInvalidValue;
  const int arch = cuemu::settings().arch;
  *p = {.name = "the CUDA kernels, emulated on the CPU",
        .uuid = {{'c', 'u', 'e', 'm', 'u', ' ', static_cast<char>(device)}},
        .sharedMemPerBlockOptin = cuemu::shared_memory_limit(),
        .major = arch / 10,
        .minor = arch % 10,
        .multiProcessorCount = cuemu::settings().multiprocessors};
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t bytes) {
  const size_t size = bytes ? bytes : 1;
  if (cuemu::device_bytes() + size > cuemu::settings().device_memory) return cudaErrorMemoryAllocation;
  char* m = cuemu::map(size);
  if (!m) return cudaErrorMemoryAllocation;
  std::memset(m, 0xff, size);
  const Alloc a{.p = m, .bytes = size};
  cuemu::add_alloc(a);
  cuemu::set_reach(a, false);
#ifndef CUEMU_ASAN
  cuemu::catch_faults();
#endif
  *p = m;
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** p, size_t bytes) {
  *p = std::malloc(bytes ? bytes : 1);
  if (!*p) return cudaErrorMemoryAllocation;
  cuemu::page_locked().push_back({.p = static_cast<char*>(*p), .bytes = bytes});
  return cudaSuccess;
}
// Waits for everything that is queued.
cudaError_t cudaFreeHost(void* p) {
  auto& all = cuemu::page_locked();
  const auto it = std::find_if(all.begin(), all.end(), [&](const Alloc& a) { return a.p == p; });
  if (it == all.end()) return cudaErrorInvalidValue;
  cuemu::finish_all();
  all.erase(it);
  std::free(p);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = cuemu::settings().device_memory;
  *free = *total - std::min(*total, cuemu::device_bytes());
  return cudaSuccess;
}

// Waits for everything that is queued.
cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  return cuemu::remove_alloc(p, false) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t n, cudaMemcpyKind kind, cudaStream_t stream) {
  if (const cudaError_t e = cuemu::check_copy(dst, src, n, kind)) return e;
  if (n && cuemu::may_wait(dst, src, n)) cuemu::note_wait();
  cuemu::g_calls.copies++;
  if (n) cuemu::queue(stream, [=] { cuemu::move(dst, src, n); });
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
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    case cudaErrorLaunchFailure:
      return cuemu::last_report().c_str();
  }
  return "unknown error";
}
