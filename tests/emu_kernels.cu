// See emu_kernels.h.  Apart from the tests, because the check build instruments kernels and nothing else.
#include <cuda_bf16.h>

#include "cuemu_mma.h"
#include "emu_kernels.h"

namespace pare::test::emu {

#define HERE ::cuemu::Loc loc = ::cuemu::Loc::current()
void copy_16(void* smem, const void* gmem, HERE) { cuemu::async_copy(smem, gmem, 16, 16, loc); }
void named_barrier(int id, unsigned count, HERE) { cuemu::block_barrier(id, count, true, "bar.sync", loc); }
void named_arrive(int id, unsigned count, HERE) { cuemu::block_barrier(id, count, false, "bar.arrive", loc); }
void copy_float(float* to, const float* from, HERE) { cuemu::copy_as_is(to, from, sizeof(*to), loc); }
float* dynamic_floats() { return static_cast<float*>(cuemu::dynamic_smem()); }

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
// Copies what was written, and what was not to where something was.
template <bool kUse>
__global__ void copied(float* out, const float* in) {
  copy_float(out + threadIdx.x, in + threadIdx.x);
  out[kN + threadIdx.x] = 1.f;
  copy_float(out + kN + threadIdx.x, out + 2 * kN + threadIdx.x);
  if (kUse) out[threadIdx.x] += out[kN + threadIdx.x];
}

template <EarlyBug kBug>
__global__ void early(float* out, const float* in) {
  float* s = dynamic_floats();
  s[threadIdx.x] = 1;  // shared memory is its own
  if (kBug == EarlyBug::reads) s[threadIdx.x] = in[threadIdx.x];
  if (kBug == EarlyBug::writes) out[threadIdx.x] = 0;
  if (kBug == EarlyBug::copies) {
    __syncthreads();
    if (threadIdx.x % 4 == 0) copy_16(s + threadIdx.x, in + threadIdx.x);
  }
  if (kBug == EarlyBug::one_returns && threadIdx.x == kN - 1) return;
  cuemu::await_kernel_before(cuemu::Loc::current());
  cuemu::async_commit();
  cuemu::async_wait(0);
  if (kBug == EarlyBug::copies) __syncthreads();
  out[threadIdx.x] = in[threadIdx.x] + s[threadIdx.x];
}

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
// The other threads' copies, too, must have been waited for: a barrier is needed behind the wait.
__global__ void async_no_barrier(float* out, const float* in) {
  __shared__ __align__(16) float s[kN * 4];
  copy_16(&s[threadIdx.x * 4], in + threadIdx.x * 4);
  cuemu::async_commit();
  cuemu::async_wait(0);
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void oob_local(float* out, const float* in) {
  float x[8];
  for (int i = 0; i <= static_cast<int>(in[8]); i++) x[i] = static_cast<float>(i);
  out[threadIdx.x] = x[threadIdx.x % 8];
}
// in: the host's memory.
__global__ void reads_memory(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x]; }

// ---- several blocks
__global__ void add_plain(float* out, const float*) { out[kZeros + threadIdx.x] += 1; }
__global__ void add_atomic(float* out, const float*) { atomicAdd(&out[kZeros + threadIdx.x], 1.f); }
// The last block to finish adds up the others' results.
template <bool kFence>
__global__ void last_block(float* out, const float*) {
  __shared__ bool last;
  float* const part = out + kN;
  auto* const count = reinterpret_cast<unsigned*>(out + kZeros);
  part[blockIdx.x * kN + threadIdx.x] = 1.f;
  if (kFence) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(count, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  float sum = 0;
  for (unsigned b = 0; b < gridDim.x; b++) sum += part[b * kN + threadIdx.x];
  out[threadIdx.x] = sum;
}

// ---- for the access profile: rows of 32 floats read down a column, and every other element read
template <int kPitch>
__global__ void transpose_32(float* out, const float* in) {
  __shared__ float s[32 * kPitch];
  const int x = threadIdx.x % 32;
  for (int y = threadIdx.x / 32; y < 4; y += kN / 32) s[y * kPitch + x] = in[y * 32 + x];
  for (int y = threadIdx.x / 32 + 4; y < 32; y += kN / 32) s[y * kPitch + x] = 0;
  __syncthreads();
  out[threadIdx.x] = s[x * kPitch + threadIdx.x / 32];
}
template <int kStep>
__global__ void every_other(float* out, const float* in) {
  out[threadIdx.x] = in[threadIdx.x * kStep];
}

// ---- wrong collectives
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
__global__ void barrier_unmet(float* out, const float*) {
  if (threadIdx.x < 64) named_arrive(1, 128);
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

// d = a b through fragments loaded by ldmatrix, a row-major [16][16], b [16][8] (stored row-major, read transposed).
__global__ void one_mma(float* out, const __nv_bfloat16* a, const __nv_bfloat16* b) {
  __shared__ __align__(16) __nv_bfloat16 sa[16][16], sb[16][16];
  const unsigned lane = threadIdx.x;
  for (unsigned i = lane; i < 256; i += 32) {
    sa[i / 16][i % 16] = a[i];
    sb[i / 16][i % 16] = b[i / 16 * 8 + i % 8];
  }
  __syncwarp();
  uint32_t fa[4], fb[4];
  cuemu::ldmatrix(fa, &sa[lane % 16][lane / 16 * 8], false, cuemu::Loc::current());
  cuemu::ldmatrix(fb, &sb[lane % 16][lane / 16 * 8], true, cuemu::Loc::current());
  float d[4] = {};
  cuemu::mma_16816(d, fa, fb[0], fb[1], cuemu::Loc::current());
  for (unsigned e = 0; e < 4; e++) out[(lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2] = d[e];
}

#define INSTANTIATE(kernel) template void kernel(float*, const float*);
INSTANTIATE(copied<false>)
INSTANTIATE(copied<true>)
template void early<EarlyBug::none>(float*, const float*);
template void early<EarlyBug::reads>(float*, const float*);
template void early<EarlyBug::writes>(float*, const float*);
template void early<EarlyBug::copies>(float*, const float*);
template void early<EarlyBug::one_returns>(float*, const float*);
INSTANTIATE(reverse<true>)
INSTANTIATE(reverse<false>)
INSTANTIATE(rotate<true>)
INSTANTIATE(rotate<false>)
INSTANTIATE(swap_pairs<true>)
INSTANTIATE(swap_pairs<false>)
template void async_copies<0, true>(float*, const float*);
template void async_copies<1, true>(float*, const float*);
template void async_copies<-1, true>(float*, const float*);
INSTANTIATE(ring<true>)
INSTANTIATE(ring<false>)
INSTANTIATE(last_block<true>)
INSTANTIATE(last_block<false>)
INSTANTIATE(transpose_32<32>)
INSTANTIATE(transpose_32<33>)
INSTANTIATE(every_other<1>)
INSTANTIATE(every_other<2>)

}  // namespace pare::test::emu
