// Additions of compute capability 9.0, emulated (src/hopper.cpp): mbarriers, tensor copies (TMA) and products of
// warpgroups (wgmma).  Stricter than the hardware where noted.
#pragma once
#include "cuda.h"
#include "cuda_bf16.h"

namespace cuemu {

// ---- mbarriers
// A 64-bit object in shared memory.  A phase ends when `count` threads have arrived and the bytes that they expect have
// been copied; stricter: bytes are expected before they arrive.
void mbarrier_init(uint64_t* barrier, unsigned count, Loc loc);
void mbarrier_arrive(uint64_t* barrier, unsigned expected_bytes, Loc loc);
void mbarrier_wait(uint64_t* barrier, unsigned parity, Loc loc);  // until a phase of this parity has ended
// Lets other blocks of the cluster, and their copies, see the mbarriers that this thread has initialised.
void mbarrier_init_fence();
// Lets copies and products (the async proxy) see what was written to shared memory before.
void proxy_fence();

// ---- clusters
// The blocks of a cluster live at once, each with a shared memory of its own.
unsigned cluster_rank();  // of this block
unsigned cluster_size();
// Arrives at the mbarrier that lies in the shared memory of block `rank` where `barrier` is in that of this one.
void mbarrier_arrive_at(uint64_t* barrier, unsigned rank, Loc loc);
// Returns the address of what lies in the shared memory of block `rank` where p points in that of this one (mapa).
void* shared_of(unsigned rank, void* p, Loc loc);
// The barrier of all threads of the cluster.  Stricter: also those that return arrive, and whoever arrives waits.
void cluster_arrive(Loc loc);
void cluster_wait(Loc loc);

// ---- registers
// setmaxnreg: the threads of a warpgroup have `count` registers each from now on.  Whoever asks for more waits until
// others of the block have given up as many.  A block begins with as many as a multiprocessor has for its threads, a
// multiple of 8 each.  Stricter: as a block ends, the warps of a warpgroup have the same number.
void set_registers(unsigned count, bool more, Loc loc);

// ---- tensor copies
// Copies the box of `map` that begins at these coordinates, the innermost first, to shared memory; zeros stand for what
// lies outside the tensor.  Its bytes count for the barrier.  The target holds NaNs until the copy lands, which is when
// no thread can go on (in random order, now and then earlier).  `blocks` of the cluster, as bits, get it at the same
// place of their shared memory, each at a time of its own, and its bytes count for the barrier that lies there.
void prefetch_map(const CUtensorMap& map);
void tensor_copy(void* smem, const CUtensorMap& map, const int (&at)[3], uint64_t* barrier, unsigned blocks, Loc loc);

// The other way.  The wait that covers the store reads shared memory, which must hold the box until then; the end of
// the launch writes the target, which holds NaNs until then.  adds: to the f32 that are there, by add_flushing.
// Stricter: one launch does not add to an element twice.
void tensor_store(const CUtensorMap& map, const int (&at)[3], const void* smem, bool adds, Loc loc);
void store_commit();
void store_wait_read(unsigned groups_left);

// stmatrix.sync.aligned.m8n8.x4.shared.b16: the converse of ldmatrix (cuemu_mma.h).
void stmatrix(void* row, const uint32_t (&r)[4], Loc loc);

// ---- products of warpgroups
// The matrix descriptor's idea of an address: bytes from the start of dynamic shared memory.
uint64_t shared_address(const void* p);
// d += a b: a 64 x 16 and b 16 x `columns`, each K-major or MN-major, of bf16, in shared memory by descriptors with a
// swizzle; d in registers.  The sum is taken at the wgmma_wait that covers it, until when d holds NaNs.  adds: false
// for d = a b (scale-d of 0), whatever d holds; stricter: a wgmma_fence lies before that in any case.
void wgmma(float* d, int columns, uint64_t a, uint64_t b, bool mn_major_a, bool mn_major_b, bool adds, Loc loc);
// The same with a in registers, which that wgmma_wait must find as they were; stricter: a wgmma_fence lies between the
// last wgmma_wait and the product, whatever happened to them.
void wgmma(float* d, int columns, const uint32_t* a, uint64_t b, bool mn_major_b, Loc loc);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(unsigned groups_left, Loc loc);

}  // namespace cuemu
