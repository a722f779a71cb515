// The PTX instructions of compute capability 9.0a that kernels use, in the manner of ptx.cuh: mbarriers, tensor copies
// (TMA) and products of warpgroups (wgmma).  Kernels use them where PARE_SM90A is defined; elsewhere they have no body.
#pragma once
#include "ptx.cuh"

#ifdef CUEMU
#include "cuemu_hopper.h"
#else
#include <cuda.h>

#include "runtime/watchdog.h"
#endif
#if defined(CUEMU) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PARE_SM90A
#endif

namespace pare::PARE_CUDA {

// ---- mbarriers, in shared memory
// A phase ends when `count` threads have arrived and the bytes that they expect have been copied.
using Mbarrier = uint64_t;

__device__ __forceinline__ void mbarrier_init(Mbarrier* b, unsigned count PTX_LOC) {
#ifdef CUEMU
  cuemu::mbarrier_init(b, count, loc);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(b)), "r"(count) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* b PTX_LOC) {
#ifdef CUEMU
  cuemu::mbarrier_arrive(b, 0, loc);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(b)) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier* b, unsigned bytes PTX_LOC) {
#ifdef CUEMU
  cuemu::mbarrier_arrive(b, bytes, loc);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(b)), "r"(bytes) : "memory");
#endif
}
// Lets the other blocks of the cluster use the mbarriers that this thread has initialised, after the next barrier of
// the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
#ifdef CUEMU
  cuemu::mbarrier_init_fence();
#else
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
#ifndef CUEMU
namespace {
__device__ LostArrival* lost_arrival;  // memory of the host
[[maybe_unused]] const bool watched = (watched_files().push_back(&lost_arrival), true);
}  // namespace
// Ends the kernel, whose context can then be used no more.  (A printf would make ptxas wait for each wgmma.)
__device__ __forceinline__ void give_up(uint32_t byte, unsigned parity) {
  LostArrival& l = *lost_arrival;
  l.byte = byte;
  l.parity = parity;
  l.thread = threadIdx.x;
  l.block[0] = blockIdx.x;
  l.block[1] = blockIdx.y;
  l.block[2] = blockIdx.z;
  __threadfence_system();
  l.is = 1;
  __threadfence_system();
  asm volatile("trap;\nexit;");  // after exit no register is live: ptxas needs no more for this
  __builtin_unreachable();
}
// Returns the time in units of 4.3 s; one register.
__device__ __forceinline__ uint32_t clock_now() {
  uint32_t t;
  asm volatile("mov.u32 %0, %globaltimer_hi;" : "=r"(t));
  return t;
}
// May wait a while for it.
__device__ __forceinline__ bool mbarrier_ended(const Mbarrier* b, unsigned parity) {
  uint32_t ended;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(ended)
               : "r"(smem_address(b)), "r"(parity)
               : "memory");
  return ended;
}
#endif
// Waits for the end of phase 0, 2, ... (parity 0) or 1, 3, ...; the phase before the first has ended.
__device__ __forceinline__ void mbarrier_wait(Mbarrier* b, unsigned parity PTX_LOC) {
#ifdef CUEMU
  cuemu::mbarrier_wait(b, parity, loc);
#else
  if (mbarrier_ended(b, parity)) return;
  const uint32_t start = clock_now();
  while (!mbarrier_ended(b, parity))
    if (clock_now() - start > kPatience) give_up(smem_address(b), parity);
#endif
}
// Makes this thread's writes to shared memory, mbarriers too, visible to tensor copies and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
#ifdef CUEMU
  cuemu::proxy_fence();
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- clusters: blocks that run at the same time and reach each other's shared memory, neighbours in y (LaunchShape)
// The barrier of all threads of a cluster, in two halves: writes before the arrival are visible after the wait.  By
// whole warps.
__device__ __forceinline__ void cluster_arrive(PTX_ONLY_LOC) {
#ifdef CUEMU
  cuemu::cluster_arrive(loc);
#else
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait(PTX_ONLY_LOC) {
#ifdef CUEMU
  cuemu::cluster_wait(loc);
#else
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Both halves.
__device__ __forceinline__ void cluster_sync(PTX_ONLY_LOC) {
#ifdef CUEMU
  cuemu::cluster_arrive(loc);
  cuemu::cluster_wait(loc);
#else
  cluster_arrive();
  cluster_wait();
#endif
}
// Arrives at the mbarrier that lies in the shared memory of block `rank` of the cluster where b is in that of this one.
// (With .release.cluster it would wait, each time, for all that the thread has in flight to memory.  A stage is
// released after reads by wgmma, which have ended.)
__device__ __forceinline__ void mbarrier_arrive_at(Mbarrier* b, int rank PTX_LOC) {
#ifdef CUEMU
  cuemu::mbarrier_arrive_at(b, static_cast<unsigned>(rank), loc);
#else
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(smem_address(b)),
      "r"(rank)
      : "memory");
#endif
}

// ---- turns: blocks work on the same memory one after another

// Waits until `turn` counts `mine`; writes before that are then visible.  By one thread.  A block that runs must raise
// it: the emulation, which runs one block at a time, reports a wait.
__device__ __forceinline__ void await_turn(int* turn, int mine PTX_LOC) {
#ifdef CUEMU
  if (const int is = atomicAdd(turn, 0, loc); is != mine)
    cuemu::fail(loc, "turn %d waits for ever: it is that of %d", mine, is);
#else
  const auto counts = [&] {
    int is;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(is) : "l"(turn) : "memory");
    return is;
  };
  if (counts() == mine) return;
  const uint32_t start = clock_now();
  while (counts() != mine)
    if (clock_now() - start > kPatience) give_up(kLostTurn, mine);
#endif
}
// Ends this turn, so that the next is `further` on, after the writes of this thread and of those that it has met since.
__device__ __forceinline__ void end_turn(int* turn, int further) {
  __threadfence();
  atomicAdd(turn, further);
}
// Returns the number of those who have asked before, in every lane of a warp.
__device__ __forceinline__ int take_ticket(int* tickets) {
  return __shfl_sync(kAllLanes, threadIdx.x % 32 == 0 ? atomicAdd(tickets, 1) : 0, 0);
}
// The units of the block with a ticket; each may await the turn of any before it.  On a GPU all blocks run at once. The
// emulation runs one after another, so there a block takes units that follow one another.
struct UnitsInTurn {
  int first, end, step;
};
__device__ __forceinline__ UnitsInTurn units_in_turn(int ticket, int blocks, int units) {
#ifdef CUEMU
  return {units * ticket / blocks, units * (ticket + 1) / blocks, 1};
#else
  return {ticket, units, blocks};
#endif
}
// Returns true if a block that takes tickets until there are none is to stop: in the emulation it leaves some to the
// blocks after it, so that turns are between blocks.
__device__ __forceinline__ bool leaves_tickets() {
#ifdef CUEMU
  return cuemu::blocks_are_left();
#else
  return false;
#endif
}

// ---- barriers of `threads` threads, in whole warps: number 1 to 15, as 0 is that of __syncthreads
// Waits until as many have arrived, itself among them.
__device__ __forceinline__ void barrier_wait(int number, int threads PTX_LOC) {
#ifdef CUEMU
  cuemu::block_barrier(number, static_cast<unsigned>(threads), true, "bar.sync", loc);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(int number, int threads PTX_LOC) {
#ifdef CUEMU
  cuemu::block_barrier(number, static_cast<unsigned>(threads), false, "bar.arrive", loc);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
#endif
}

// ---- tensor copies
// Prefetches the map for copies to come.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
#ifdef CUEMU
  cuemu::prefetch_map(map);
#else
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}
// Copies the box of `map` that begins at element (x, y) or (x, y, z), x innermost, to shared memory; zeros for
// elements outside the tensor.  Its bytes count for the mbarrier.
__device__ __forceinline__ void tensor_copy(void* smem, const CUtensorMap& map, int x, int y, Mbarrier* b PTX_LOC) {
#ifdef CUEMU
  cuemu::tensor_copy(smem, map, {x, y, 0}, b, 1u << cuemu::cluster_rank(), loc);
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(smem_address(smem)),
      "l"(&map), "r"(x), "r"(y), "r"(smem_address(b))
      : "memory");
#endif
}
__device__ __forceinline__ void tensor_copy(void* smem, const CUtensorMap& map, int x, int y, int z,
                                            Mbarrier* b PTX_LOC) {
#ifdef CUEMU
  cuemu::tensor_copy(smem, map, {x, y, z}, b, 1u << cuemu::cluster_rank(), loc);
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(smem_address(smem)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(smem_address(b))
      : "memory");
#endif
}

// Copies a box to several blocks of the cluster, as bits: to where smem is in their shared memory, and for the mbarrier
// that lies there.
__device__ __forceinline__ void tensor_copy_to(uint16_t blocks, void* smem, const CUtensorMap& map, int x, int y,
                                               Mbarrier* b PTX_LOC) {
#ifdef CUEMU
  cuemu::tensor_copy(smem, map, {x, y, 0}, b, blocks, loc);
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3}], [%4], %5;" ::"r"(smem_address(smem)),
      "l"(&map), "r"(x), "r"(y), "r"(smem_address(b)), "h"(blocks)
      : "memory");
#endif
}
__device__ __forceinline__ void tensor_copy_to(uint16_t blocks, void* smem, const CUtensorMap& map, int x, int y, int z,
                                               Mbarrier* b PTX_LOC) {
#ifdef CUEMU
  cuemu::tensor_copy(smem, map, {x, y, z}, b, blocks, loc);
#else
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4}], [%5], %6;" ::"r"(smem_address(smem)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(smem_address(b)), "h"(blocks)
      : "memory");
#endif
}

// Stores the box of `map` that begins at (x, y) from shared memory, but for elements outside of the tensor; part of
// this thread's next group.
__device__ __forceinline__ void tensor_store(const CUtensorMap& map, int x, int y, const void* smem PTX_LOC) {
#ifdef CUEMU
  cuemu::tensor_store(map, {x, y, 0}, smem, false, loc);
#else
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x),
               "r"(y), "r"(smem_address(smem))
               : "memory");
#endif
}
// Adds the box, of f32, to memory: each element once, as add_flushing does.
__device__ __forceinline__ void tensor_add(const CUtensorMap& map, int x, int y, const void* smem PTX_LOC) {
#ifdef CUEMU
  cuemu::tensor_store(map, {x, y, 0}, smem, true, loc);
#else
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x),
      "r"(y), "r"(smem_address(smem))
      : "memory");
#endif
}
__device__ __forceinline__ void store_commit() {
#ifdef CUEMU
  cuemu::store_commit();
#else
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Waits until at most `kLeft` of this thread's committed groups of stores have still to read shared memory.  Their
// results are there for the next kernel.
template <int kLeft>
__device__ __forceinline__ void store_wait_read() {
#ifdef CUEMU
  cuemu::store_wait_read(kLeft);
#else
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
#endif
}

// Stores four 8x8 matrices of 16-bit elements as ldmatrix_x4 loads them; lane 8*i + j gives the address of row j of
// matrix i.
__device__ __forceinline__ void stmatrix_x4(void* row, const uint32_t (&r)[4] PTX_LOC) {
#ifdef CUEMU
  cuemu::stmatrix(row, r, loc);
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

// ---- products of warpgroups (128 threads from a multiple of 128)
// Operands lie in shared memory as tensor copies with a swizzle put them: in rows of 32 or 128 bytes, every eight of
// which form a block that begins at a multiple of 256 or 1024 bytes.
// K-major: a row of the matrix is a row of those; its blocks follow each other at `stride`, `leading` does not count.
// MN-major: a k is a row, and its 16 (64) elements are neighbours in m or n; blocks of eight k follow each other at
// `stride`, and the next 16 (64) m or n at `leading`.
enum class Swizzle : uint64_t { none = 0, bytes_32 = 3, bytes_128 = 1 };

__device__ __forceinline__ uint64_t matrix_descriptor(const void* smem, Swizzle swizzle, uint64_t stride,
                                                      uint64_t leading = 16) {
#ifdef CUEMU
  const uint64_t address = cuemu::shared_address(smem);
#else
  const uint64_t address = smem_address(smem);
#endif
  return (address & 0x3ffff) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | static_cast<uint64_t>(swizzle) << 62;
}

// Returns the matrix `units` times 16 bytes further on.  Addresses have 14 bits, so the high word gets no carry.
__device__ __forceinline__ uint64_t further(uint64_t descriptor, int units) {
  return (descriptor & ~uint64_t{0xffffffff}) | static_cast<uint32_t>(descriptor + units);
}

// Returns x, the same in every lane of a warp, in a way that ptxas sees: descriptors made of it lie in uniform
// registers, from which wgmma takes them.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kAllLanes, x, 0); }

// Sets d to 0, here: were it done between products, ptxas would wait for those that are in flight.
template <int kN>
__device__ __forceinline__ void wgmma_clear(float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; i++) {
    d[i] = 0;
#ifndef CUEMU
    asm volatile("" : "+f"(d[i])::"memory");
#endif
  }
}
// Orders the threads' accesses to registers before the products that use them.
__device__ __forceinline__ void wgmma_fence() {
#ifdef CUEMU
  cuemu::wgmma_fence();
#else
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#ifdef CUEMU
  cuemu::wgmma_commit();
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most `kLeft` committed groups of products are in flight; d may be used if none of those adds to it.
template <int kLeft, int kN>
__device__ __forceinline__ void wgmma_wait(float (&d)[kN] PTX_LOC) {
#ifdef CUEMU
  (void)d;
  cuemu::wgmma_wait(kLeft, loc);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
#pragma unroll
  for (int i = 0; i < kN; i++) asm volatile("" : "+f"(d[i])::"memory");  // no use of d moves to before the wait
#endif
}
// The same for products whose left factors are the registers a, which hold nothing else before.
template <int kLeft, int kN, int kSteps>
__device__ __forceinline__ void wgmma_wait(float (&d)[kN], uint32_t (&a)[kSteps][4] PTX_LOC) {
#ifdef CUEMU
  (void)a;
  wgmma_wait<kLeft>(d, loc);
#else
  wgmma_wait<kLeft>(d);
#pragma unroll
  for (int i = 0; i < kSteps * 4; i++) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
#endif
}

// d += a b: a 64x16 and b 16xkN of bf16; without `adds`, d = a b, whatever d holds.  b lies in shared memory, MN-major
// or K-major; so does a, or it is in registers.  Register i of thread t of the warpgroup is element (t / 32 * 16 + t %
// 32 / 4 + i / 2 % 2 * 8, i / 4 * 8 + t % 4 * 2 + i % 2) of d; a[i] has element (t / 32 * 16 + t % 32 / 4 + i % 2 * 8,
// i / 2 * 8 + t % 4 * 2) of a and the next in k.  So each of four warps has 16 rows, laid out as mma_16816 has them.
#define WGMMA_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D32 WGMMA_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D48 WGMMA_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D64 WGMMA_D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D72 WGMMA_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_D80 WGMMA_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_D96 WGMMA_D80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D128                                                                                 \
  WGMMA_D96                                                                                        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA(n, d, adds, factors)                                                                                 \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " adds ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" d \
  "}, " factors ";\n}"
#define D8(i)                                                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)

#define WGMMA_OF_SHARED(n, d, add, factors, ...) \
  asm volatile(WGMMA(n, d, add, factors)         \
               : __VA_ARGS__                     \
               : "l"(a), "l"(b), "n"(int{kMnMajorA}), "n"(int{kMnMajorB}), "r"(int{adds}))

template <bool kMnMajorB, bool kMnMajorA = false, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b, bool adds = true PTX_LOC) {
  constexpr int kN = 2 * kRegisters;
  static_assert(kN == 32 || kN == 64 || kN == 96 || kN == 128 || kN == 144 || kN == 160 || kN == 192 || kN == 256);
#ifdef CUEMU
  cuemu::wgmma(d, kN, a, b, kMnMajorA, kMnMajorB, adds, loc);
#else
  if constexpr (kN == 32)
    WGMMA_OF_SHARED("32", WGMMA_D16, "%20", "%16, %17, add, 1, 1, %18, %19", D8(0), D8(8));
  else if constexpr (kN == 64)
    WGMMA_OF_SHARED("64", WGMMA_D32, "%36", "%32, %33, add, 1, 1, %34, %35", D32(0));
  else if constexpr (kN == 96)
    WGMMA_OF_SHARED("96", WGMMA_D48, "%52", "%48, %49, add, 1, 1, %50, %51", D32(0), D8(32), D8(40));
  else if constexpr (kN == 128)
    WGMMA_OF_SHARED("128", WGMMA_D64, "%68", "%64, %65, add, 1, 1, %66, %67", D32(0), D32(32));
  else if constexpr (kN == 144)
    WGMMA_OF_SHARED("144", WGMMA_D72, "%76", "%72, %73, add, 1, 1, %74, %75", D32(0), D32(32), D8(64));
  else if constexpr (kN == 160)
    WGMMA_OF_SHARED("160", WGMMA_D80, "%84", "%80, %81, add, 1, 1, %82, %83", D32(0), D32(32), D8(64), D8(72));
  else if constexpr (kN == 192)
    WGMMA_OF_SHARED("192", WGMMA_D96, "%100", "%96, %97, add, 1, 1, %98, %99", D32(0), D32(32), D32(64));
  else
    WGMMA_OF_SHARED("256", WGMMA_D128, "%132", "%128, %129, add, 1, 1, %130, %131", D32(0), D32(32), D32(64), D32(96));
#endif
}
template <bool kMnMajorB, int kRegisters>
__device__ __forceinline__ void wgmma(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b PTX_LOC) {
  constexpr int kN = 2 * kRegisters;
  static_assert(kN == 64 || kN == 128);
#ifdef CUEMU
  cuemu::wgmma(d, kN, a, b, kMnMajorB, loc);
#else
  if constexpr (kN == 64)
    asm volatile(WGMMA("64", WGMMA_D32, "1", "{%32, %33, %34, %35}, %36, add, 1, 1, %37")
                 : D32(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kMnMajorB}));
  else
    asm volatile(WGMMA("128", WGMMA_D64, "1", "{%64, %65, %66, %67}, %68, add, 1, 1, %69")
                 : D32(0), D32(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kMnMajorB}));
#endif
}
#undef WGMMA_OF_SHARED
#undef D32
#undef D8
#undef WGMMA
#undef WGMMA_D128
#undef WGMMA_D96
#undef WGMMA_D80
#undef WGMMA_D72
#undef WGMMA_D64
#undef WGMMA_D48
#undef WGMMA_D32
#undef WGMMA_D16

// A warpgroup gives up registers, or waits until others have given up as many as it takes: kCount for each thread, a
// multiple of 8.  A block has those that its kernel was compiled for, 168 with three warpgroups.
template <int kCount>
__device__ __forceinline__ void fewer_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount < 256);
#ifdef CUEMU
  cuemu::set_registers(kCount, false, cuemu::Loc::current());
#else
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void more_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount < 256);
#ifdef CUEMU
  cuemu::set_registers(kCount, true, cuemu::Loc::current());
#else
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// ---- host
// Returns the map of a tensor of bf16 or f32, dimensions innermost first, with the box that a copy takes of it, whose
// innermost dimension fills the swizzle, if there is one.  `strides`: bytes between neighbours in the dimensions but
// the innermost, multiples of 16, as is `data`, and each of the one before.
template <size_t kRank, class T>
CUtensorMap tensor_map(const char* op, const T* data, const uint64_t (&sizes)[kRank],
                       const uint64_t (&strides)[kRank - 1], const uint32_t (&box)[kRank], Swizzle swizzle) {
#ifdef CUEMU
  const auto encode = cuTensorMapEncodeTiled;
#else
  static const auto encode = [&] {  // of the driver, with which the program is not linked
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found), op);
    if (!f) fail(op, ": the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
  }();
#endif
  CUtensorMap map;
  cuuint64_t size[kRank], stride[kRank - 1];
  cuuint32_t steps[kRank];
  for (size_t i = 0; i < kRank; i++) {
    size[i] = sizes[i];
    steps[i] = 1;
  }
  for (size_t i = 0; i + 1 < kRank; i++) stride[i] = strides[i];
  const CUresult e = encode(&map, sizeof(T) == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                            kRank, const_cast<T*>(data), size, stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            swizzle == Swizzle::none       ? CU_TENSOR_MAP_SWIZZLE_NONE
                            : swizzle == Swizzle::bytes_32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                           : CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  expect(e == CUDA_SUCCESS, op, ": cuTensorMapEncodeTiled gives error ", static_cast<int>(e));
  return map;
}

}  // namespace pare::PARE_CUDA
