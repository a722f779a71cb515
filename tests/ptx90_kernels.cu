// See ptx_kernels.h: the wrappers of cuda/ptx90.cuh.
#include "fragment.cuh"
#include "ops/linear.h"
#include "ptx90.cuh"
#include "ptx_kernels.h"
#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

namespace {

// What copy(to, barrier) puts into shared memory, byte by byte.
template <int kBytes, class Copy>
__device__ void copy_out(unsigned char* out, Copy copy) {
#ifdef PARE_SM90A
  auto* const smem = dynamic_smem<unsigned char>();
  auto* const barrier = reinterpret_cast<Mbarrier*>(smem + kBytes);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_proxy_async();
    mbarrier_arrive_expect(barrier, kBytes);
    copy(smem, barrier);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < kBytes; i += blockDim.x) out[i] = smem[i];
#else
  __trap();
#endif
}

__global__ void boxes_2d(unsigned char* out, const __grid_constant__ CUtensorMap map, int x, int y) {
  copy_out<2048>(out, [&](void* to, Mbarrier* b) { tensor_copy(to, map, x, y, b); });
}
__global__ void boxes_3d(unsigned char* out, const __grid_constant__ CUtensorMap map, int x, int y, int z) {
  copy_out<512>(out, [&](void* to, Mbarrier* b) { tensor_copy(to, map, x, y, z, b); });
}

__global__ void wait_for(unsigned arrivals) {
#ifdef PARE_SM90A
  auto* const barrier = dynamic_smem<Mbarrier>() + 1;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, arrivals);
    for (unsigned i = blockIdx.x; i < arrivals; i++) mbarrier_arrive(barrier);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
#else
  __trap();
#endif
}

template <bool kMnMajorB, int kN>
__global__ void group_products(float* d, const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b) {
#ifdef PARE_SM90A
  constexpr int kA = 64 * 64 * 2, kB = 64 * kN * 2, kStep = (kMnMajorB ? 16 : kN) * 32;
  auto* const smem = dynamic_smem<unsigned char>();
  auto* const barrier = reinterpret_cast<Mbarrier*>(smem + kA + kB);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_proxy_async();
    mbarrier_arrive_expect(barrier, kA + kB);
    tensor_copy(smem, a, 0, 0, barrier);
    tensor_copy(smem + kA, b, 0, 0, 0, barrier);
  }
  Accumulator<kN> sum;
  const auto element = [&](int row, int column) -> float& { return d[(warp * 16 + row) * kN + column]; };
  sum.for_each([&](int row, int column, float& x) { x = element(row, column); });
  __syncthreads();
  mbarrier_wait(barrier, 0);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    wgmma<kMnMajorB>(sum.registers(), matrix_descriptor(smem + k * 32, Swizzle::bytes_128, 1024),
                     matrix_descriptor(smem + kA + k * kStep, Swizzle::bytes_32, 256, 64 * 32));
  wgmma_commit();
  wgmma_wait<0>(sum.registers());
  sum.for_each([&](int row, int column, float x) { element(row, column) = x; });
#else
  __trap();
#endif
}

// Products 64 deep by rows of 128 bytes: of attention, with a and b K-major, or a in registers and b MN-major; of the
// gradients of weights, with a and b MN-major.
enum class ByRows { scores, values, gradients };
template <ByRows kWhat, int kN>
__global__ void row_products(float* d, const uint16_t* factors, const __grid_constant__ CUtensorMap a,
                             const __grid_constant__ CUtensorMap b) {
#ifdef PARE_SM90A
  constexpr int kPanel = 64 * 64 * 2, kPanels = kN / 64;
  auto* const smem = dynamic_smem<unsigned char>();
  auto* const barrier = reinterpret_cast<Mbarrier*>(smem + (1 + kPanels) * kPanel);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_proxy_async();
    mbarrier_arrive_expect(barrier, (1 + kPanels) * kPanel);
    tensor_copy(smem, a, 0, 0, barrier);
    for (int i = 0; i < kPanels; i++) tensor_copy(smem + (1 + i) * kPanel, b, i * 64, 0, barrier);
  }
  Accumulator<kN> sum;
  const auto element = [&](int row, int column) -> float& { return d[(warp * 16 + row) * kN + column]; };
  sum.for_each([&](int row, int column, float& x) { x = element(row, column); });
  uint32_t left[4][4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++)
    make_a(left[i], [&](int row, int k) {
      return *reinterpret_cast<const uint32_t*>(&factors[(warp * 16 + row) * 64 + i * 16 + k]);
    });
  __syncthreads();
  mbarrier_wait(barrier, 0);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    if constexpr (kWhat == ByRows::scores)
      wgmma<false>(sum.registers(), matrix_descriptor(smem + k * 32, Swizzle::bytes_128, 1024),
                   matrix_descriptor(smem + kPanel + k * 32, Swizzle::bytes_128, 1024));
    else if constexpr (kWhat == ByRows::gradients)
      wgmma<true, true>(sum.registers(), matrix_descriptor(smem + k * 2048, Swizzle::bytes_128, 1024),
                        matrix_descriptor(smem + kPanel + k * 2048, Swizzle::bytes_128, 1024, kPanel));
    else
      wgmma<true>(sum.registers(), left[k],
                  matrix_descriptor(smem + kPanel + k * 2048, Swizzle::bytes_128, 1024, kPanel));
  wgmma_commit();
  wgmma_wait<0>(sum.registers(), left);
  sum.for_each([&](int row, int column, float x) { element(row, column) = x; });
#else
  __trap();
#endif
}

}  // namespace

}  // namespace pare::PARE_CUDA

namespace pare::test::ptx {

using namespace PARE_CUDA;

bool waits_for_mbarriers() { return machine().wgmma; }
void lose_arrival() { launch("lose_arrival", wait_for, {.grid = 2, .block = 32, .smem = 16}, {}, 2); }
void copy_box(unsigned char* out, const uint16_t* in, int64_t columns, int64_t rows, int64_t stride, int x, int y) {
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  launch("copy_box", boxes_2d, {.grid = 1, .block = 32, .smem = 2048 + 8}, {}, out,
         tensor_map<2>("copy_box", in, {size(columns), size(rows)}, {size(stride) * 2}, {64, 16}, Swizzle::bytes_128),
         x, y);
}
void copy_panels(unsigned char* out, const uint16_t* in, int64_t rows, int64_t panels, int x, int y, int z) {
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  launch("copy_panels", boxes_3d, {.grid = 1, .block = 32, .smem = 512 + 8}, {}, out,
         tensor_map<3>("copy_panels", in, {16, size(rows), size(panels)}, {32, size(rows) * 32}, {16, 8, 2},
                       Swizzle::bytes_32),
         x, y, z);
}
void multiply_group(float* d, const uint16_t* a, const uint16_t* b, int columns, bool mn_major) {
  const auto run = [&]<bool kMnMajor, int kN>(std::bool_constant<kMnMajor>, std::integral_constant<int, kN>) {
    constexpr uint64_t kRows = kMnMajor ? 64 : kN, kPanels = kMnMajor ? kN / 16 : 4;
    const CUtensorMap left = tensor_map<2>("multiply_group", a, {64, 64}, {128}, {64, 64}, Swizzle::bytes_128),
                      right = tensor_map<3>("multiply_group", b, {16, kRows, kPanels}, {32, kRows * 32},
                                            {16, kRows, kPanels}, Swizzle::bytes_32);
    launch("multiply_group", group_products<kMnMajor, kN>, {.grid = 1, .block = 128, .smem = (64 + kN) * 64 * 2 + 8},
           {}, d, left, right);
  };
  const auto with_columns = [&](auto major) {
    columns == 128 ? run(major, std::integral_constant<int, 128>{}) : run(major, std::integral_constant<int, 256>{});
  };
  mn_major ? with_columns(std::true_type{}) : with_columns(std::false_type{});
}

template <ByRows kWhat, int kN>
void multiply_rows(float* d, const uint16_t* a, const uint16_t* b) {
  constexpr uint64_t kWidth = kWhat == ByRows::scores ? 64 : kN;
  launch("multiply_rows", row_products<kWhat, kN>, {.grid = 1, .block = 128, .smem = (64 + kN) * 64 * 2 + 8}, {}, d, a,
         tensor_map<2>("multiply_rows", a, {64, 64}, {128}, {64, 64}, Swizzle::bytes_128),
         tensor_map<2>("multiply_rows", b, {kWidth, 64}, {kWidth * 2}, {64, 64}, Swizzle::bytes_128));
}
void multiply_scores(float* d, const uint16_t* a, const uint16_t* b) { multiply_rows<ByRows::scores, 64>(d, a, b); }
void multiply_values(float* d, const uint16_t* a, const uint16_t* b, int columns) {
  columns == 64 ? multiply_rows<ByRows::values, 64>(d, a, b) : multiply_rows<ByRows::values, 128>(d, a, b);
}
void multiply_gradients(float* d, const uint16_t* a, const uint16_t* b, int columns) {
  columns == 128 ? multiply_rows<ByRows::gradients, 128>(d, a, b) : multiply_rows<ByRows::gradients, 256>(d, a, b);
}

}  // namespace pare::test::ptx
