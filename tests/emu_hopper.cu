// Kernels for compute capability 9.0 of the tests of the emulator, right and with one mistake each: see emu_kernels.h.
#include "emu_kernels.h"
#include "ptx90.cuh"

namespace pare::test::emu {

using namespace pare::emu;

namespace {

__device__ bf16* elements(unsigned char* p, int offset) { return reinterpret_cast<bf16*>(p + offset); }
__device__ const bf16* as_bf16(const float* p) { return reinterpret_cast<const bf16*>(p); }
// Bytes from the start of rows of 32 bytes to element `column` of a row, as the swizzle puts it.
__device__ int place_32(int row, int column) { return row * 32 + (column / 8 ^ row / 4 % 2) * 16 + column % 8 * 2; }

__device__ float left_factor(int m, int k) { return static_cast<float>((m * 7 + k * 3) % 11 - 5); }
__device__ float right_factor(int k, int n) { return static_cast<float>((k * 5 + n) % 7 - 3); }

}  // namespace

// A warp copies `in` by fours of 32 floats (rows of 64 bf16) into a ring of two stages; the three others add them up.
template <CopyBug kBug>
__global__ void copy_ring(float* out, const float* in) {
  constexpr unsigned kConsumers = 96, kBytes = 512;
  constexpr int kSteps = 4;
  const CUtensorMap map = tensor_map<2>("copy_ring", as_bf16(in), {64, 16}, {128}, {64, 4}, Swizzle::bytes_128);
  auto* const smem = dynamic_smem<unsigned char>();  // two stages of 1 KiB
  auto* const full = reinterpret_cast<Mbarrier*>(smem + 2048);
  Mbarrier* const empty = full + 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      if (kBug != CopyBug::no_init) mbarrier_init(full + i, 1);
      mbarrier_init(empty + i, kConsumers - (kBug == CopyBug::small_count));
    }
    if (kBug != CopyBug::no_proxy_fence) fence_proxy_async();
  }
  __syncthreads();
  float sum = 0;
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0)
      for (int i = 0; i < kSteps; i++) {
        const int s = i % 2;
        if (kBug != CopyBug::no_empty_wait) mbarrier_wait(empty + s, (i / 2 + 1) % 2);
        mbarrier_arrive_expect(full + s, kBug == CopyBug::few_bytes    ? kBytes / 2
                                         : kBug == CopyBug::many_bytes ? kBytes * 2
                                                                       : kBytes);
        tensor_copy(smem + s * 1024, map, kBug == CopyBug::within_16_bytes ? 4 : 0, i * 4, full + s);
      }
  } else if (kBug != CopyBug::not_awaited) {
    for (int i = 0; i < kSteps; i++) {
      const int s = i % 2;
      if (kBug != CopyBug::no_full_wait) mbarrier_wait(full + s, (i / 2 + (kBug == CopyBug::wrong_parity)) % 2);
      if (kBug == CopyBug::early_arrival) mbarrier_arrive(empty + s);
      for (unsigned f = threadIdx.x - 32; f < 128; f += kConsumers) {
        const unsigned row = f / 32, chunk = f % 32 / 4;
        sum += reinterpret_cast<const float*>(smem + s * 1024)[row * 32 + (chunk ^ row) * 4 + f % 4];
      }
      if (kBug != CopyBug::early_arrival) mbarrier_arrive(empty + s);
    }
  }
  out[threadIdx.x] = sum;
}

// Two warpgroups take the registers that a third gives up.
template <RegisterBug kBug>
__global__ void move_registers(float* out, const float* in) {
  const unsigned warp = threadIdx.x / 32;
  if (warp >= 8) {
    if (kBug == RegisterBug::gives_more)
      fewer_registers<176>();
    else if (kBug != RegisterBug::nobody_gives && (kBug != RegisterBug::one_warp_keeps || warp > 8) &&
             (kBug != RegisterBug::one_lane || threadIdx.x % 32 == 0))
      fewer_registers<40>();
  } else {
    more_registers<kBug == RegisterBug::too_many ? 240 : kBug == RegisterBug::one_warp_keeps ? 208 : 232>();
  }
  out[threadIdx.x] = in[threadIdx.x];
}

// The same by two blocks.  Of every four rows each copies two for itself, and of all four, two for both.
template <ClusterBug kBug>
__global__ void cluster_ring(float* out, const float* in) {
  constexpr unsigned kConsumers = 96, kBytes = 768, kTwoRows = 256;
  constexpr int kSteps = 4;
  const CUtensorMap map = tensor_map<2>("cluster_ring", as_bf16(in), {64, 16}, {128}, {64, 2}, Swizzle::none);
  auto* const smem = dynamic_smem<unsigned char>();  // two stages
  auto* const full = reinterpret_cast<Mbarrier*>(smem + 2 * kBytes);
  Mbarrier* const empty = full + 2;
  const int rank = blockIdx.y, blocks = gridDim.y,
            to = kBug == ClusterBug::copies_to_own     ? 1 << rank
                 : kBug == ClusterBug::copies_to_three ? 7
                                                       : 3;
  constexpr bool kOwn = kBug == ClusterBug::awaits_own;  // no wait for the other block's consumers
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      mbarrier_init(full + i, 1);
      mbarrier_init(empty + i, kOwn ? 96 : kConsumers * blocks);
    }
    fence_proxy_async();
    if (kBug != ClusterBug::no_init_fence) fence_mbarrier_init();
  }
  __syncthreads();
  if (kBug == ClusterBug::arrives_twice) cluster_arrive();
  if (kBug != ClusterBug::no_first_barrier) {
    cluster_arrive();
    cluster_wait();
  }
  if (kBug == ClusterBug::returns_early && rank == 1) return;
  float sum = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSteps; i++) {
      const int s = i % 2;
      unsigned char* const stage = smem + s * kBytes;
      mbarrier_wait(empty + s, (i / 2 + 1) % 2);
      if (kBug == ClusterBug::expects_in_one && rank == 1)
        mbarrier_arrive(full + s);
      else
        mbarrier_arrive_expect(full + s, kBytes);
      tensor_copy(stage, map, 0, i * 4 + rank * 2, full + s);
      tensor_copy_to(static_cast<uint16_t>(to), stage + kTwoRows * (1 + rank), map, 0, i * 4 + rank * 2, full + s);
    }
  } else if (threadIdx.x >= 32) {
    for (int i = 0; i < kSteps; i++) {
      const int s = i % 2;
      mbarrier_wait(full + s, i / 2 % 2);
      for (unsigned f = threadIdx.x - 32; f < kBytes / 4; f += kConsumers)
        sum += reinterpret_cast<const float*>(smem + s * kBytes)[f];
      for (int b = 0; b < blocks; b++)
        if (b == rank || !(kOwn || kBug == ClusterBug::releases_own)) mbarrier_arrive_at(empty + s, b);
    }
  }
  out[rank * kN + static_cast<int>(threadIdx.x)] = sum;
  __syncwarp();
  if (kBug != ClusterBug::no_last_barrier) cluster_arrive();
  if (kBug != ClusterBug::no_last_barrier && kBug != ClusterBug::no_last_wait) cluster_wait();
}
// Each block reads what the other has in its shared memory, from the last to the first.
template <SharedBug kBug>
__global__ void cluster_shared(float* out, const float* in) {
  float* const own = dynamic_smem<float>();
  const int rank = blockIdx.y, t = threadIdx.x;
  own[t] = in[rank * kN + t];
  if (kBug != SharedBug::no_first_barrier) {
    cluster_arrive();
    cluster_wait();
  }
  const unsigned from = kBug == SharedBug::third_block ? 2 : 1 - rank;
  const auto* const there = static_cast<float*>(cuemu::shared_of(from, own, cuemu::Loc::current()));
  out[rank * kN + t] = there[kN - (kBug == SharedBug::behind_the_end ? 0 : 1) - t];
  if (kBug != SharedBug::no_last_barrier) {
    cluster_arrive();
    cluster_wait();
  }
}

// The blocks of a cluster add up what each has left in device memory, a share each; the last block of all adds up the
// clusters' sums.
template <PartsBug kBug>
__global__ void cluster_parts(float* out, const float*) {
  bool& last = *dynamic_smem<bool>();
  float *const parts = out + kN, *const sums = out + 5 * kN;
  const int block = blockIdx.y, rank = block % 2, first = block - rank, t = threadIdx.x;
  parts[block * kN + t] = static_cast<float>(block + 1);
  if (kBug != PartsBug::no_barrier) {
    cluster_arrive();
    cluster_wait();
  }
  if (t / (kN / 2) == rank) sums[first / 2 * kN + t] = parts[first * kN + t] + parts[(first + 1) * kN + t];
  if (kBug != PartsBug::no_fence) __threadfence();
  if (kBug != PartsBug::no_block_barrier) __syncthreads();
  if (t == 0) last = atomicInc(reinterpret_cast<unsigned*>(out + kZeros), gridDim.y - 1) == gridDim.y - 1;
  __syncthreads();
  if (last) out[t] = sums[t] + sums[kN + t];
}

// Its first thread copies, waits and adds up while no other is left.
template <Source kSource>
__global__ void copy_alone(float* out, const float* in) {
  const bf16* const from = as_bf16(kSource == Source::written ? in : out + 4 * kN);
  const CUtensorMap map = tensor_map<2>("copy_alone", from, {64, 16}, {128}, {64, 1}, Swizzle::bytes_128);
  auto* const smem = dynamic_smem<unsigned char>();
  auto* const barrier = reinterpret_cast<Mbarrier*>(smem + 1024);
  float sum = 0;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_proxy_async();
    for (int i = 0; i < 3; i++) {
      mbarrier_arrive_expect(barrier, 128);
      tensor_copy(smem, map, 0, i, barrier);
      mbarrier_wait(barrier, i % 2);
      if (kSource == Source::unwritten) continue;
      for (int f = 0; f < 32; f++) sum += reinterpret_cast<const float*>(smem)[f];
    }
  }
  out[threadIdx.x] = sum;
}

// The product of a 64 x 32 and a 32 x 128 matrix by two products in a group each; out: how many elements of each thread
// are not what they should be.
template <bool kMnMajorA, bool kMnMajorB, ProductBug kBug>
__global__ void group_product(float* out, const float*) {
  constexpr int kRight = 4096, kK = 32, kStep = kMnMajorB ? 16 * 32 : 128 * 32;
  auto* const smem = dynamic_smem<unsigned char>();
  const int t = static_cast<int>(threadIdx.x);
  for (int i = t; i < 64 * kK; i += kN) {  // [m / 16][k][16] or [k / 16][m][16]
    const int m = i / kK, k = i % kK;
    *elements(smem, kMnMajorA ? m / 16 * (kK * 32) + place_32(k, m % 16) : k / 16 * 2048 + place_32(m, k % 16)) =
        __float2bfloat16(left_factor(m, k));
  }
  for (int i = t; i < kK * 128; i += kN) {  // [n / 16][k][16] or [k / 16][n][16]
    const int k = i / 128, n = i % 128;
    *elements(smem, kRight + (kMnMajorB ? n / 16 * (kK * 32) + place_32(k, n % 16)
                                        : k / 16 * 4096 + place_32(n, k % 16))) = __float2bfloat16(right_factor(k, n));
  }
  if (kBug != ProductBug::no_proxy_fence) fence_proxy_async();
  if (kBug != ProductBug::no_barrier) __syncthreads();
  float d[64] = {};
  if (kBug != ProductBug::no_fence) wgmma_fence();
  for (int i = 0; i < 2; i++) {
    const int other = kBug == ProductBug::different_matrices && threadIdx.x >= 64 ? -256 : 0;
    const uint64_t a = matrix_descriptor(smem + i * (kMnMajorA ? 512 : 2048), Swizzle::bytes_32, 256, kK * 32),
                   b = matrix_descriptor(smem + kRight + i * kStep + other, Swizzle::bytes_32,
                                         kBug == ProductBug::wrong_stride ? 512 : 256, kMnMajorB ? kK * 32 : 16);
    wgmma<kMnMajorB, kMnMajorA>(d, a, b);
    wgmma_commit();
  }
  if (kBug == ProductBug::waits_for_one) wgmma_wait<1>(d);
  if (kBug == ProductBug::overwritten) *elements(smem, t * 2) = __float2bfloat16(0);
  if (kBug != ProductBug::waits_for_one && kBug != ProductBug::no_wait) wgmma_wait<0>(d);
  int wrong = 0;
  for (int i = 0; i < 64; i++) {
    const int m = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + t % 4 * 2 + i % 2;
    float sum = 0;
    for (int k = 0; k < kK; k++) sum += left_factor(m, k) * right_factor(k, n);
    wrong += !(d[i] == sum);
  }
  out[threadIdx.x] = static_cast<float>(wrong);
  if (kBug == ProductBug::waits_for_one) wgmma_wait<0>(d);
  if (kBug == ProductBug::no_fence_again) {  // behind what was done to registers
    d[5] = 0;
    wgmma<kMnMajorB>(d, matrix_descriptor(smem, Swizzle::bytes_32, 256),
                     matrix_descriptor(smem + kRight, Swizzle::bytes_32, 256));
    wgmma_commit();
    wgmma_wait<0>(d);
  }
}

// The product of a 64 x 16 matrix in registers and a 16 x 128 one; out as above.
template <LeftBug kBug>
__global__ void left_in_registers(float* out, const float*) {
  auto* const smem = dynamic_smem<unsigned char>();
  const int t = static_cast<int>(threadIdx.x);
  for (int i = t; i < 16 * 128; i += kN)  // [n / 16][k][16]
    *elements(smem, i % 128 / 16 * 512 + place_32(i / 128, i % 16)) = __float2bfloat16(right_factor(i / 128, i % 128));
  fence_proxy_async();
  __syncthreads();
  uint32_t left[1][4];
  for (int i = 0; i < 8; i++) {
    const bf16 x =
        __float2bfloat16(left_factor(t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, i / 4 * 8 + t % 4 * 2 + i % 2));
    std::memcpy(reinterpret_cast<char*>(left) + i * 2, &x, 2);
  }
  float d[64] = {};
  if (kBug != LeftBug::no_fence) wgmma_fence();
  wgmma<true>(d, left[0], matrix_descriptor(smem, Swizzle::bytes_32, 256, 512));
  wgmma_commit();
  if (kBug == LeftBug::overwritten && t == 77) left[0][3] = 0;
  wgmma_wait<0>(d, left);
  int wrong = 0;
  for (int i = 0; i < 64; i++) {
    float sum = 0;
    for (int k = 0; k < 16; k++)
      sum += left_factor(t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, k) * right_factor(k, i / 4 * 8 + t % 4 * 2 + i % 2);
    wrong += !(d[i] == sum);
  }
  out[threadIdx.x] = static_cast<float>(wrong);
}

// Computes the product of a 64 x 16 and a 16 x 64 matrix twice, in sums that begin afresh; out as above, of the second.
template <FreshBug kBug>
__global__ void fresh_sums(float* out, const float*) {
  auto* const smem = dynamic_smem<unsigned char>();
  const int t = static_cast<int>(threadIdx.x);
  for (int i = t; i < 64 * 16; i += kN) {  // rows of 16 k, of a and of b
    *elements(smem, place_32(i / 16, i % 16)) = __float2bfloat16(left_factor(i / 16, i % 16));
    *elements(smem, 2048 + place_32(i / 16, i % 16)) = __float2bfloat16(right_factor(i % 16, i / 16));
  }
  fence_proxy_async();
  __syncthreads();
  float d[32];
  for (int i = 0; i < 2; i++) {
    if (kBug != FreshBug::no_fence || i == 0) wgmma_fence();
    wgmma<false>(d, matrix_descriptor(smem, Swizzle::bytes_32, 256),
                 matrix_descriptor(smem + 2048, Swizzle::bytes_32, 256),
                 (kBug == FreshBug::adds && i == 1) || kBug == FreshBug::never_begun);
    wgmma_commit();
    wgmma_wait<0>(d);
  }
  int wrong = 0;
  for (int i = 0; i < 32; i++) {
    float sum = 0;
    for (int k = 0; k < 16; k++)
      sum += left_factor(t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, k) * right_factor(k, i / 4 * 8 + t % 4 * 2 + i % 2);
    wrong += !(d[i] == sum);
  }
  out[threadIdx.x] = static_cast<float>(wrong);
}

// Fills a tensor of 28 rows of 64 bf16, each its number, by two boxes of 16 rows from the same 2 KiB of shared memory.
template <StoreBug kBug>
__global__ void store_boxes(float* out, const float*) {
  const CUtensorMap map = tensor_map<2>("store_boxes", as_bf16(out), {64, 28}, {128}, {64, 16}, Swizzle::bytes_128);
  auto* const smem = dynamic_smem<unsigned char>();
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int box = 0; box < 2; box++) {
    if (box > 0) {
      if (threadIdx.x == 0 && kBug == StoreBug::waits_for_one) store_wait_read<1>();
      if (threadIdx.x == 0 && kBug != StoreBug::no_read_wait && kBug != StoreBug::waits_for_one) store_wait_read<0>();
      __syncthreads();
    }
    uint32_t pairs[4];  // of row lane / 4 + i % 2 * 8, at column warp * 16 + i / 2 * 8 + lane % 4 * 2
    for (unsigned i = 0; i < 4; i++) {
      const float first =
          static_cast<float>((box * 16 + lane / 4 + i % 2 * 8) * 64 + warp * 16 + i / 2 * 8 + lane % 4 * 2);
      const bf16 pair[2] = {__float2bfloat16(first), __float2bfloat16(first + 1)};
      std::memcpy(&pairs[i], pair, 4);
    }
    const unsigned row = lane % 16, chunk = warp * 2 + lane / 16;
    unsigned char* const to = smem + row * 128 + (chunk ^ row % 8) * 16;
    if (kBug != StoreBug::divergent || lane < 31) stmatrix_x4(to + (kBug == StoreBug::misaligned ? 8 : 0), pairs);
    if (kBug != StoreBug::no_proxy_fence) fence_proxy_async();
    if (kBug != StoreBug::no_barrier) __syncthreads();
    if (threadIdx.x == 0) tensor_store(map, 0, box * 16, smem);
    if (threadIdx.x == 0 && kBug != StoreBug::no_commit) store_commit();
  }
  if (threadIdx.x == 0 && kBug != StoreBug::no_last_wait) store_wait_read<0>();
  if (threadIdx.x == 0 && kBug == StoreBug::reads_target) out[kZeros] = out[5];
}

// Adds 0, 1, ... to the 4 rows of 32 zeros, but to the first the least number above 0.
template <AddBug kBug>
__global__ void add_box(float* out, const float*) {
  const CUtensorMap map = tensor_map<2>("add_box", out + kZeros, {32, 4}, {128}, {32, 4}, Swizzle::bytes_128);
  auto* const box = dynamic_smem<float>();
  const unsigned row = threadIdx.x / 32, column = threadIdx.x % 32;
  box[row * 32 + (column / 4 ^ row) * 4 + column % 4] = threadIdx.x ? static_cast<float>(threadIdx.x) : 1e-45f;
  if (kBug != AddBug::no_proxy_fence) fence_proxy_async();
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 0; i < (kBug == AddBug::twice ? 2 : 1); i++) {
    tensor_add(map, 0, 0, box);
    store_commit();
  }
  store_wait_read<0>();
  if (kBug == AddBug::reads_target) out[5] = out[kZeros + 5];
}

#define INSTANTIATE(...) template void __VA_ARGS__(float*, const float*);
#define X(bug) INSTANTIATE(copy_ring<CopyBug::bug>)
EMU_COPY_BUGS(X)
#undef X
#define X(bug) INSTANTIATE(cluster_ring<ClusterBug::bug>)
EMU_CLUSTER_BUGS(X)
#undef X
INSTANTIATE(copy_alone<Source::written>)
INSTANTIATE(cluster_shared<SharedBug::none>)
INSTANTIATE(cluster_shared<SharedBug::no_first_barrier>)
INSTANTIATE(cluster_shared<SharedBug::no_last_barrier>)
INSTANTIATE(cluster_shared<SharedBug::third_block>)
INSTANTIATE(cluster_shared<SharedBug::behind_the_end>)
INSTANTIATE(cluster_parts<PartsBug::none>)
INSTANTIATE(cluster_parts<PartsBug::no_barrier>)
INSTANTIATE(cluster_parts<PartsBug::no_fence>)
INSTANTIATE(cluster_parts<PartsBug::no_block_barrier>)
INSTANTIATE(copy_alone<Source::unwritten>)
INSTANTIATE(copy_alone<Source::unwritten_used>)
INSTANTIATE(add_box<AddBug::none>)
INSTANTIATE(add_box<AddBug::twice>)
INSTANTIATE(add_box<AddBug::reads_target>)
INSTANTIATE(add_box<AddBug::no_proxy_fence>)
#define X(bug) INSTANTIATE(store_boxes<StoreBug::bug>)
EMU_STORE_BUGS(X)
#undef X
#define X(bug) INSTANTIATE(group_product<false, true, ProductBug::bug>)
EMU_PRODUCT_BUGS(X)
#undef X
INSTANTIATE(group_product<false, false, ProductBug::none>)
INSTANTIATE(group_product<true, true, ProductBug::none>)
INSTANTIATE(group_product<true, false, ProductBug::none>)
INSTANTIATE(move_registers<RegisterBug::none>)
INSTANTIATE(move_registers<RegisterBug::too_many>)
INSTANTIATE(move_registers<RegisterBug::nobody_gives>)
INSTANTIATE(move_registers<RegisterBug::one_warp_keeps>)
INSTANTIATE(move_registers<RegisterBug::gives_more>)
INSTANTIATE(move_registers<RegisterBug::one_lane>)
INSTANTIATE(left_in_registers<LeftBug::none>)
INSTANTIATE(left_in_registers<LeftBug::no_fence>)
INSTANTIATE(left_in_registers<LeftBug::overwritten>)
INSTANTIATE(fresh_sums<FreshBug::none>)
INSTANTIATE(fresh_sums<FreshBug::no_fence>)
INSTANTIATE(fresh_sums<FreshBug::adds>)
INSTANTIATE(fresh_sums<FreshBug::never_begun>)

}  // namespace pare::test::emu
