// cuemu: runs CUDA kernels on the CPU, one fiber per CUDA thread.
//
// This is the contract between the headers that stand in for CUDA's (cuda_runtime.h, cuda_bf16.h), the project's PTX
// wrappers (ptx.cuh) and the scheduler in src/.  Kernels never include it; tests do, for settings and reports.
//
// Model: one block runs at a time, on the calling OS thread; its threads are fibers that run until they must wait
// (barrier, warp collective) and are resumed in an order that is a setting.  So kernels that wait for another block
// hang, and a launch is over when the call returns.  Launches from two OS threads at once are not supported.
//
// Device memory is ordinary memory: kernels accept host pointers, and the copies of the host API do so too.  What
// cudaMalloc gives is filled with 0xFF (NaN in every float format), and under AddressSanitizer out of the host's reach
// between launches.  Shared memory is 0xFF at the start of each block (static arrays: not under AddressSanitizer).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace cuemu {

// A place in the source; as a default argument, the caller's.  (std::source_location, which clang 14 has not.)
struct Loc {
  const char* file = "";
  int line = 0;
  static constexpr Loc current(const char* f = __builtin_FILE(), int l = __builtin_LINE()) { return {f, l}; }
};

// ---- synchronisation
// A warp collective: every lane named in `mask` calls it; when the last one arrives, `run(args, mask)` executes once,
// args[lane] pointing at each lane's argument block (on that lane's own stack), and all lanes go on.
using WarpOp = void (*)(void** args, uint32_t mask);
void warp_collective(uint32_t mask, WarpOp run, void* arg, const char* what, Loc loc);
void warp_memory_order(void** args, uint32_t mask);  // the WarpOp of __syncwarp: orders memory, moves no data

// Barrier `id` of the block, for `count` threads (0: all of them).  With wait == false it only arrives.
void block_barrier(int id, unsigned count, bool wait, const char* what, Loc loc);

// ---- asynchronous copies (cp.async)
// The destination holds NaNs until the wait that covers the copy, which is when the data arrive: as late as allowed.
void async_copy(void* smem, const void* gmem, unsigned bytes, unsigned src_bytes, Loc loc);
void async_commit();
void async_wait(unsigned groups_left);

// ---- memory
void* dynamic_smem();
void check_aligned(const void* p, size_t align, const char* what, Loc loc);

// ---- launching
struct Grid {
  unsigned grid[3], block[3];
  size_t smem;
};
using ThreadMain = void (*)(void* ctx);
int run_grid(const Grid&, ThreadMain, void* ctx);  // 0, or a cudaError_t

// ---- reports and settings
// Ends the launch with an error.  The fiber is abandoned where it stands: its locals are not destroyed.
[[noreturn, gnu::format(printf, 2, 3)]] void fail(Loc loc, const char* fmt, ...);
const std::string& last_report();  // text of the last failure, "" if none

enum class Order { forward, reverse, random };
struct Settings {
  Order order = Order::forward;  // of threads and blocks; environment: CUEMU_ORDER=forward|reverse|random[:seed]
  uint64_t seed = 1;             // of Order::random; the same seed gives the same schedule
  bool abort_on_error = false;   // CUEMU_ABORT=1: stop where the mistake is, for a debugger
};
Settings& settings();  // may be changed between launches

inline constexpr unsigned kWarp = 32;
unsigned lane_id();
Loc lane_loc(unsigned lane);  // where a lane of the current warp waits

}  // namespace cuemu
