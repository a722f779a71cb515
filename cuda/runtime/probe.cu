// Services of a GPU for benchmarks: times between events, and peak rates.  Empty in the emulation.
#include "runtime/common.cuh"

#ifndef CUEMU
#include <library_types.h>

#include <algorithm>
#include <vector>

#include "base/half.h"
#include "base/rng.h"
#include "runtime/library.h"
#include "runtime/machine.cuh"
#include "runtime/probe.cuh"

namespace pare::cuda {

namespace {

int64_t cache_bytes() {
  int bytes = 0;
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, 0), "size of the L2 cache");
  return bytes;
}

double seconds(const std::function<void()>& queue) {
  struct Events {
    cudaEvent_t begin = nullptr, end = nullptr;
    Events() {
      check_cuda(cudaEventCreate(&begin), "event");
      check_cuda(cudaEventCreate(&end), "event");
    }
    ~Events() {
      cudaEventDestroy(begin);
      cudaEventDestroy(end);
    }
  };
  static const Events events;
  check_cuda(cudaEventRecord(events.begin, nullptr), "event");
  queue();
  check_cuda(cudaEventRecord(events.end, nullptr), "event");
  check_cuda(cudaEventSynchronize(events.end), "a measured call");
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, events.begin, events.end), "event");
  return milliseconds * 1e-3;
}

double median_seconds(const std::function<void()>& queue) {
  for (int i = 0; i < 3; i++) seconds(queue);
  std::vector<double> t(20);
  for (double& x : t) x = seconds(queue);
  std::sort(t.begin(), t.end());
  return t[t.size() / 2];
}

// Device memory; null if there is too little.
struct Scratch {
  char* data = nullptr;
  explicit Scratch(size_t bytes) {
    if (cudaMalloc(&data, bytes) != cudaSuccess) {
      cudaGetLastError();
      data = nullptr;
    }
  }
  ~Scratch() { cudaFree(data); }
};

Rate bytes() {
  constexpr size_t size = size_t{2} << 30;
  const Scratch s(2 * size);
  if (!s.data) return {0, "4 GiB of device memory are not free"};
  check_cuda(cudaMemset(s.data, 1, 2 * size), "copy");
  const double t = median_seconds(
      [&] { check_cuda(cudaMemcpyAsync(s.data + size, s.data, size, cudaMemcpyDeviceToDevice, nullptr), "copy"); });
  return {2 * static_cast<double>(size) / t, "copy of 2 GiB"};
}

class Cublas {
 public:
  Cublas() {
    library_.find(create_, "cublasCreate_v2");
    library_.find(destroy_, "cublasDestroy_v2");
    library_.find(gemm_, "cublasGemmEx");
    if (create_ && destroy_ && gemm_ && create_(&handle_) != 0) handle_ = nullptr;
  }
  ~Cublas() {
    if (handle_) destroy_(handle_);
  }
  explicit operator bool() const { return handle_ != nullptr; }
  // C = AT B, n x n, bf16 with f32 accumulation.
  bool multiply(int n, const void* a, const void* b, void* c) const {
    constexpr int none = 0, transposed = 1, compute_32f = 68, standard = -1;  // of cublas_api.h
    const float one = 1, zero = 0;
    return gemm_(handle_, transposed, none, n, n, n, &one, a, CUDA_R_16BF, n, b, CUDA_R_16BF, n, &zero, c, CUDA_R_16BF,
                 n, compute_32f, standard) == 0;
  }

 private:
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                       const void*, void*, int, int, int, int);
  const Library library_{"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
  void* handle_ = nullptr;
  int (*create_)(void**) = nullptr;
  int (*destroy_)(void*) = nullptr;
  Gemm gemm_ = nullptr;
};

Rate flops() {
  const Cublas cublas;
  if (!cublas) return {0, "no cuBLAS was found (libcublas.so.13 or .12; see LD_LIBRARY_PATH)"};
  constexpr int n = 8192;
  constexpr size_t size = size_t{2} * n * n;
  const Scratch s(3 * size);
  if (!s.data) return {0, "400 MB of device memory are not free"};
  Rng rng(rng_key(1, RngStream::test, 0));
  std::vector<uint16_t> random(size_t{1} << 20);
  for (uint16_t& x : random) x = f32_to_bf16(2 * uniform_open(rng.next()) - 1);
  for (size_t at = 0; at < 2 * size; at += 2 * random.size())
    check_cuda(cudaMemcpy(s.data + at, random.data(), 2 * random.size(), cudaMemcpyHostToDevice), "operands");
  bool fine = true;
  const double t = median_seconds([&] { fine &= cublas.multiply(n, s.data, s.data + size, s.data + 2 * size); });
  if (!fine) return {0, "cublasGemmEx failed"};
  return {2.0 * n * n * n / t, "cuBLAS, bf16, 8192 x 8192 x 8192, random data"};
}

bool ask_for(TensorKernel kernel) {
  if (kernel == TensorKernel::wgmma && !machine().wgmma) return false;
  asked_for = kernel;
  return true;
}

int multiprocessors() { return machine().multiprocessors; }

}  // namespace

const Probe probe = {.multiprocessors = multiprocessors,
                     .cache_bytes = cache_bytes,
                     .seconds = seconds,
                     .flops = flops,
                     .bytes = bytes,
                     .tensor_kernel = ask_for};

}  // namespace pare::cuda
#endif
