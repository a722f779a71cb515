// The emulator itself: kernels with one mistake each must be caught, correct ones must give the right values in every
// order of threads, and the host API must behave.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cuda/emu/include/cuda_bf16.h"
#include "cuda/emu/include/cuemu_mma.h"
#include "emu_orders.h"

namespace {

using pare::test::in_all_orders;

#ifdef CUEMU_ASAN
constexpr bool kAsan = true;
#else
constexpr bool kAsan = false;
#endif
constexpr int kN = 128;  // threads of a block

#define HERE ::cuemu::Loc loc = ::cuemu::Loc::current()
void copy_16(void* smem, const void* gmem, HERE) { cuemu::async_copy(smem, gmem, 16, 16, loc); }
void named_barrier(int id, unsigned count, HERE) { cuemu::block_barrier(id, count, true, "bar.sync", loc); }
void named_arrive(int id, unsigned count, HERE) { cuemu::block_barrier(id, count, false, "bar.arrive", loc); }
float* dynamic_floats() { return static_cast<float*>(cuemu::dynamic_smem()); }

// ---- kernels: out [kN], in [4 * kN]
using Kernel = void(float* out, const float* in);

__global__ void oob_static(float* out, const float* in) {
  __shared__ float s[kN];
  s[threadIdx.x + static_cast<int>(in[1])] = 1.f;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void oob_dynamic(float* out, const float*) {
  float* s = dynamic_floats();
  s[threadIdx.x + 1] = 1.f;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void oob_global(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x + 3 * kN + 1]; }
__global__ void misaligned(float* out, const float* in) {
  const float4 v = *reinterpret_cast<const float4*>(in + 1);
  out[threadIdx.x] = v.x + v.w;
}
__global__ void uninit_shared(float* out, const float*) {
  __shared__ float s[kN];
  if (threadIdx.x < kN / 2) s[threadIdx.x] = 1.f;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void uninit_dynamic(float* out, const float*) {
  float* s = dynamic_floats();
  if (threadIdx.x < kN / 2) s[threadIdx.x] = 1.f;
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void uninit_global(float* out, const float*) { out[threadIdx.x] = out[threadIdx.x] + 1; }

template <bool kSync>
__global__ void reverse(float* out, const float* in) {
  float* s = dynamic_floats();
  s[threadIdx.x] = in[threadIdx.x];
  if (kSync) __syncthreads();
  out[threadIdx.x] = s[kN - 1 - threadIdx.x];
}
// Sums a ring of values; the second barrier keeps fast threads from overwriting what slow ones still read.
template <bool kSync>
__global__ void rotate(float* out, const float*) {
  __shared__ float s[kN];
  float v = 0;
  for (int i = 0; i < 4; i++) {
    s[threadIdx.x] = static_cast<float>(i);
    __syncthreads();
    v += s[(threadIdx.x + 32) % kN];
    if (kSync) __syncthreads();
  }
  out[threadIdx.x] = v;
}
template <bool kSync>
__global__ void swap_pairs(float* out, const float*) {
  __shared__ float s[kN];
  s[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (kSync) __syncwarp();
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}
__global__ void barrier_skipped(float* out, const float*) {
  if (threadIdx.x < 40) __syncthreads();
  out[threadIdx.x] = 0;
}
__global__ void barrier_two_places(float* out, const float*) {
  if (threadIdx.x < 64) {
    out[threadIdx.x] = 0;
    __syncthreads();
  } else {
    out[threadIdx.x] = 1;
    __syncthreads();
  }
}
__global__ void barrier_counts(float* out, const float*) {
  named_barrier(1, threadIdx.x < 64 ? 64 : 128);
  out[threadIdx.x] = 0;
}
__global__ void shuffle_divergent(float* out, const float*) {
  float v = 1;
  if (threadIdx.x % 32 < 16) v += __shfl_xor_sync(0xffffffffu, v, 1);
  __syncthreads();
  out[threadIdx.x] = v;
}
__global__ void shuffle_self_out(float* out, const float*) { out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.f, 1); }
__global__ void shuffle_from_outside(float* out, const float*) {
  float v = 1;
  if (threadIdx.x % 32 < 16) v = __shfl_down_sync(0xffffu, v, 8);  // lanes 8..15 read 16..23
  out[threadIdx.x] = v;
}
__global__ void shuffle_returned(float* out, const float*) {
  if (threadIdx.x >= 100) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.f, 16);
}
__global__ void shuffle_half_warps(float* out, const float*) {
  float v = static_cast<float>(threadIdx.x);
  if (threadIdx.x % 32 < 16)
    v += __shfl_xor_sync(0x0000ffffu, v, 1);
  else
    v += __shfl_xor_sync(0xffff0000u, v, 2);
  out[threadIdx.x] = v;
}
// Warp sums by shuffles, block sum by atomics, and a vote.
__global__ void warp_functions(float* out, const float*) {
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  int v = static_cast<int>(threadIdx.x);
  for (int o = 16; o > 0; o /= 2) v += __shfl_down_sync(0xffffffffu, v, o);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, v);
  __syncthreads();
  const unsigned odd = __ballot_sync(0xffffffffu, threadIdx.x & 1);
  const bool sane = __all_sync(0xffffffffu, odd == 0xaaaaaaaau) && !__any_sync(0xffffffffu, __popc(odd) != 16);
  out[threadIdx.x] = static_cast<float>(sane ? total : -1);
}
// 4 copied floats per thread; kWait: groups that may be left, -1 for no wait at all.
template <int kWait, bool kBarrier>
__global__ void async_copies(float* out, const float* in) {
  __shared__ __align__(16) float s[2][kN * 4];
  for (int i = 0; i < 2; i++) {
    copy_16(&s[i][threadIdx.x * 4], in + threadIdx.x * 4);
    cuemu::async_commit();
  }
  if (kWait >= 0) cuemu::async_wait(kWait);
  if (kBarrier) __syncthreads();
  out[threadIdx.x] = s[0][threadIdx.x] + s[1][threadIdx.x];
  cuemu::async_wait(0);
}
__global__ void async_at_exit(float*, const float* in) {
  __shared__ __align__(16) float s[kN * 4];
  copy_16(&s[threadIdx.x * 4], in + threadIdx.x * 4);
  cuemu::async_commit();
}
// One producer warp, three consumers, a ring of two stages; without `kEmpty` the producer runs ahead.
template <bool kEmpty>
__global__ void ring(float* out, const float*) {
  __shared__ float stage[2][96];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = 6;
  float sum = 0;
  for (int i = 0; i < steps; i++) {
    if (warp == 0) {
      if (i >= 2 && kEmpty) named_barrier(3 + i % 2, 128);
      for (int j = lane; j < 96; j += 32) stage[i % 2][j] = static_cast<float>(i + j);
      named_arrive(1 + i % 2, 128);
    } else {
      named_barrier(1 + i % 2, 128);
      sum += stage[i % 2][threadIdx.x - 32];
      if (i + 2 < steps && kEmpty) named_arrive(3 + i % 2, 128);
    }
  }
  out[threadIdx.x] = warp == 0 ? 0 : sum;
}

// ---- running them

// Device memory that is given back.
struct Floats {
  float* p = nullptr;
  explicit Floats(size_t n) { EXPECT_EQ(cudaMalloc(&p, n * sizeof(float)), cudaSuccess); }
  ~Floats() { cudaFree(p); }
};

struct Run {
  cudaError_t error;
  std::string report;
  std::vector<float> out;
};

Run run(Kernel* kernel, unsigned threads = kN) {
  std::vector<float> host(4 * kN);
  for (size_t i = 0; i < host.size(); i++) host[i] = static_cast<float>(i);
  Floats in(host.size()), out(kN);
  EXPECT_EQ(cudaMemcpy(in.p, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
  cudaLaunchConfig_t c{};
  c.gridDim = 2, c.blockDim = threads, c.dynamicSmemBytes = kN * sizeof(float);
  Run r{cudaLaunchKernelEx(&c, kernel, out.p, static_cast<const float*>(in.p)), "", std::vector<float>(kN)};
  if (r.error) r.report = cudaGetErrorString(r.error);
  cudaGetLastError();
  EXPECT_EQ(cudaMemcpy(r.out.data(), out.p, kN * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
  return r;
}

template <class F>
void expect_values(Kernel* kernel, F value) {
  in_all_orders([&] {
    const Run r = run(kernel);
    ASSERT_EQ(r.error, cudaSuccess) << r.report;
    for (int i = 0; i < kN; i++) ASSERT_EQ(r.out[i], value(i)) << "thread " << i;
  });
}

// The launch fails in every order, and says why and where.
void expect_report(Kernel* kernel, const std::string& text) {
  in_all_orders([&] {
    const Run r = run(kernel);
    EXPECT_EQ(r.error, cudaErrorLaunchFailure);
    EXPECT_NE(r.report.find(text), std::string::npos) << r.report;
    EXPECT_NE(r.report.find("test_emu.cpp:"), std::string::npos) << r.report;
  });
}

// Reads of what was never written give NaN.
void expect_nan(Kernel* kernel) {
  in_all_orders([&] {
    const Run r = run(kernel);
    EXPECT_EQ(r.error, cudaSuccess) << r.report;
    EXPECT_TRUE(std::any_of(r.out.begin(), r.out.end(), [](float x) { return std::isnan(x); }));
  });
}

// A missing barrier: some order shows a value that the correct kernel does not give.
void expect_order_matters(Kernel* wrong, Kernel* right) {
  const Run good = run(right);
  int differ = 0;
  in_all_orders([&] { differ += run(wrong).out != good.out; });
  EXPECT_GT(differ, 0);
}

// ---- tests

TEST(Emu, CorrectKernelsInEveryOrder) {
  expect_values(reverse<true>, [](int i) { return static_cast<float>(kN - 1 - i); });
  expect_values(rotate<true>, [](int) { return 6.f; });
  expect_values(swap_pairs<true>, [](int i) { return static_cast<float>(i ^ 1); });
  expect_values(shuffle_half_warps, [](int i) { return static_cast<float>(i + (i ^ (i % 32 < 16 ? 1 : 2))); });
  expect_values(warp_functions, [](int) { return static_cast<float>(kN * (kN - 1) / 2); });
  expect_values(async_copies<0, true>, [](int i) { return 2.f * static_cast<float>(i); });
  expect_values(ring<true>, [](int i) { return i < 32 ? 0.f : static_cast<float>(6 * (i - 32) + 15); });
}

TEST(Emu, MissingSynchronisationShows) {
  expect_order_matters(rotate<false>, rotate<true>);
  expect_order_matters(ring<false>, ring<true>);
  expect_nan(reverse<false>);
  if (!kAsan) expect_nan(swap_pairs<false>);  // static shared memory is not filled with NaN there
}

TEST(Emu, UninitialisedMemoryIsNan) {
  expect_nan(uninit_dynamic);
  expect_nan(uninit_global);
  if (!kAsan) expect_nan(uninit_shared);
}

TEST(Emu, WrongCollectivesAreReported) {
  expect_report(barrier_skipped, "threads 0-39 wait in __syncthreads");
  expect_report(barrier_skipped, "threads 40-127 have returned");
  expect_report(barrier_two_places, "divergent barrier");
  expect_report(barrier_counts, "bar.sync");
  expect_report(shuffle_divergent, "divergent barrier or wrong mask");
  expect_report(shuffle_self_out, "leaves itself out");
  expect_report(shuffle_from_outside, "which is not in mask 0000ffff");
  EXPECT_NE(run(swap_pairs<true>, 48).report.find("lanes that do not exist"), std::string::npos);
}

TEST(Emu, ReturnedLanesInMask) {  // who notices depends on the order; that somebody does, not
  in_all_orders([] { EXPECT_EQ(run(shuffle_returned).error, cudaErrorLaunchFailure); });
}

TEST(Emu, AsynchronousCopies) {
  expect_report(async_at_exit, "never waited for");
  if (kAsan) {
    EXPECT_DEATH(run(async_copies<-1, true>), "use-after-poison");
    EXPECT_DEATH(run(async_copies<1, true>), "use-after-poison");
  } else {
    expect_nan(async_copies<-1, true>);
    expect_nan(async_copies<1, true>);
  }
}

TEST(Emu, AddressSanitizerGuardsEveryMemory) {
  if (!kAsan) GTEST_SKIP() << "in the asan build only";
  EXPECT_DEATH(run(oob_static), "buffer-overflow|out of bounds");
  EXPECT_DEATH(run(oob_dynamic), "heap-buffer-overflow");
  EXPECT_DEATH(run(oob_global), "heap-buffer-overflow");
  EXPECT_DEATH(run(misaligned), "misaligned address");
  Floats device(1);
  EXPECT_DEATH(std::printf("%f", static_cast<double>(*device.p)), "use-after-poison");
}

TEST(Emu, AnErrorSticksUntilItIsRead) {
  Floats out(kN);
  cudaLaunchConfig_t c{};
  c.gridDim = 1, c.blockDim = 2000;
  EXPECT_EQ(cudaLaunchKernelEx(&c, rotate<true>, out.p, static_cast<const float*>(out.p)),
            cudaErrorInvalidConfiguration);
  c.blockDim = kN;
  EXPECT_EQ(cudaLaunchKernelEx(&c, rotate<true>, out.p, static_cast<const float*>(out.p)),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaLaunchKernelEx(&c, rotate<true>, out.p, static_cast<const float*>(out.p)), cudaSuccess);
}

TEST(Emu, CopiesCheckDirectionAndBounds) {
  std::vector<float> host(8, 3.f);
  Floats device(8);
  EXPECT_EQ(cudaMemcpy(host.data(), device.p, 32, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device.p, host.data(), 32, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device.p + 1, host.data(), 32, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(device.p + 1, 0, 32), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device.p, host.data(), 32, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemset(device.p, 0, 16), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(host.data(), device.p, 32, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(host, (std::vector<float>{0, 0, 0, 0, 3, 3, 3, 3}));
}

thread_local int host_variable = 42;
TEST(Emu, HostThreadLocalsSurviveALaunch) {
  EXPECT_EQ(run(rotate<true>).error, cudaSuccess);
  EXPECT_EQ(host_variable, 42);
}

TEST(Emu, Bf16RoundsToNearestEven) {
  EXPECT_EQ(__float2bfloat16(1.f + 0x1p-8f).x, 0x3f80);             // tie: to even, down
  EXPECT_EQ(__float2bfloat16(1.f + 3 * 0x1p-8f).x, 0x3f82);         // tie: to even, up
  EXPECT_EQ(__float2bfloat16(1.f + 0x1p-8f + 0x1p-20f).x, 0x3f81);  // past the tie
  EXPECT_EQ(__float2bfloat16(3.4e38f).x, 0x7f80);                   // rounds to infinity
  EXPECT_EQ(__float2bfloat16(NAN).x, 0x7fff);
  EXPECT_EQ(__bfloat162float({0xc2c8}), -100.f);
}

// d = a b through fragments loaded by ldmatrix, a row-major [16][16], b [16][8] (stored row-major, read transposed).
__global__ void one_mma(float* out, const __nv_bfloat16* a, const __nv_bfloat16* b) {
  __shared__ __align__(16) __nv_bfloat16 sa[16][16], sb[16][16];
  const unsigned lane = threadIdx.x;
  for (unsigned i = lane; i < 256; i += 32) sa[i / 16][i % 16] = a[i], sb[i / 16][i % 16] = b[i / 16 * 8 + i % 8];
  __syncwarp();
  uint32_t fa[4], fb[4];
  cuemu::ldmatrix(fa, &sa[lane % 16][lane / 16 * 8], false, cuemu::Loc::current());
  cuemu::ldmatrix(fb, &sb[lane % 16][lane / 16 * 8], true, cuemu::Loc::current());
  float d[4] = {};
  cuemu::mma_16816(d, fa, fb[0], fb[1], cuemu::Loc::current());
  for (unsigned e = 0; e < 4; e++) out[(lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2] = d[e];
}
TEST(Emu, MatrixProduct) {
  std::vector<__nv_bfloat16> a(256), b(128);
  std::vector<float> out(128);
  for (int i = 0; i < 256; i++) a[i] = __float2bfloat16(static_cast<float>(i * 7 % 23 - 11));  // small integers: exact
  for (int i = 0; i < 128; i++) b[i] = __float2bfloat16(static_cast<float>(i * 5 % 19 - 9));
  cudaLaunchConfig_t c{};
  c.blockDim = 32;
  ASSERT_EQ(cudaLaunchKernelEx(&c, one_mma, out.data(), a.data(), b.data()), cudaSuccess);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 8; j++) {
      float sum = 0;
      for (int k = 0; k < 16; k++) sum += __bfloat162float(a[i * 16 + k]) * __bfloat162float(b[k * 8 + j]);
      EXPECT_EQ(out[i * 8 + j], sum) << i << ", " << j;
    }
}

}  // namespace
