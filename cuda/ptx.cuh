// The PTX instructions that kernels use and CUDA C++ has no names for.  Each is a function with two bodies: the
// instruction, and its emulation.
#pragma once
#include "runtime/common.cuh"

#ifdef CUEMU
#include "cuemu_mma.h"
#define PTX_LOC , ::cuemu::Loc loc = ::cuemu::Loc::current()
#define PTX_SAME_LOC , loc
#define PTX_ONLY_LOC ::cuemu::Loc loc = ::cuemu::Loc::current()
#else
#define PTX_LOC
#define PTX_SAME_LOC
#define PTX_ONLY_LOC
#endif

namespace pare::PARE_CUDA {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Returns x + y as additions in memory do: subnormal numbers count as zeros, also as a result.
__device__ __forceinline__ float add_flushing(float x, float y) {
#ifdef CUEMU
  return cuemu::add_flushing(x, y);
#else
  float sum;
  asm("add.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(x), "f"(y));
  return sum;
#endif
}

// Copies 16 bytes to shared memory asynchronously; only the first `valid` of them are read, the rest are zeros.
__device__ __forceinline__ void cp_async_16(void* smem, const void* gmem, int valid PTX_LOC) {
#ifdef CUEMU
  cuemu::async_copy(smem, gmem, 16, static_cast<unsigned>(valid), loc);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(smem)), "l"(gmem), "r"(valid)
               : "memory");
#endif
}
// The same with 8 bytes.
__device__ __forceinline__ void cp_async_8(void* smem, const void* gmem, int valid PTX_LOC) {
#ifdef CUEMU
  cuemu::async_copy(smem, gmem, 8, static_cast<unsigned>(valid), loc);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(smem_address(smem)), "l"(gmem), "r"(valid)
               : "memory");
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#ifdef CUEMU
  cuemu::async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most `kLeft` of this thread's committed groups are in flight.
template <int kLeft>
__device__ __forceinline__ void cp_async_wait() {
#ifdef CUEMU
  cuemu::async_wait(kLeft);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// Loads four 8x8 matrices of 16-bit elements; lane 8*i + j gives the address of row j of matrix i.  Lane l receives
// elements 2*(l%4) and 2*(l%4) + 1 of row l/4 of each matrix (kTranspose: of column l/4).
template <bool kTranspose>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row PTX_LOC) {
#ifdef CUEMU
  cuemu::ldmatrix(r, row, kTranspose, loc);
#else
  if constexpr (kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_address(row))
                 : "memory");
#endif
}

// d += a b: a 16x16 and b 16x8 of bf16, d 16x8 of float.  With g = lane/4, t = 2*(lane%4), a register holding two
// neighbours:  a = {A[g][t], A[g+8][t], A[g][t+8], A[g+8][t+8]}, b = {B[t][g], B[t+8][g]} (pairs down a column),
// d = {D[g][t], D[g][t+1], D[g+8][t], D[g+8][t+1]}.
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1 PTX_LOC) {
#ifdef CUEMU
  cuemu::mma_16816(d, a, b0, b1, loc);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

}  // namespace pare::PARE_CUDA
