// cuemu: runs CUDA kernels on the CPU, one fiber per CUDA thread.
//
// This is the contract between the headers that stand in for CUDA's (cuda_runtime.h, cuda_bf16.h), the project's PTX
// wrappers (ptx.cuh, ptx90.cuh) and the scheduler in src/.  Kernels never include it; tests do, for settings
// and reports.
//
// Model: one block runs at a time, or the blocks of one cluster, on the calling OS thread; the threads are fibers that
// run until they must wait (barrier, warp collective) and are resumed in an order that is a setting.  So kernels that
// wait for a block of another cluster hang.  Launches and copies are queued on their stream and run as late as CUDA
// allows (stream.cpp): when the host waits for them.  Launches from two OS threads at once are not supported.
//
// Device memory is ordinary memory: kernels accept host pointers, and the copies of the host API do so too.  What
// cudaMalloc gives is filled with 0xFF (NaN in every float format), and out of the host's reach but while queued work
// runs: a host that touches it ends with a message.  Shared memory is 0xFF at the start of each block (static arrays:
// not under AddressSanitizer).
//
// The check build has an access checker (check.cpp): races, reads of memory that was never written, bounds, cp.async
// targets touched too early, and the same of tensor copies and wgmma.  There kernels may use no host memory but what
// device_memory() names.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

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

// Waits for the end of the kernel before (griddepcontrol.wait).  No thread of a kernel that is launched early touches
// device memory before, which the checker reports, and every build of asynchronous copies; nor does it return before:
// such a kernel could end first, and the next one waits for it alone.
void await_kernel_before(Loc loc);

// ---- asynchronous copies (cp.async)
// The destination holds NaNs until the wait that covers the copy, which is when the data arrive: as late as allowed.
void async_copy(void* smem, const void* gmem, unsigned bytes, unsigned src_bytes, Loc loc);
void async_commit();
void async_wait(unsigned groups_left);

// ---- memory
void* dynamic_smem();
void check_aligned(const void* p, size_t align, const char* what, Loc loc);
// An access, and a __threadfence, that the compiler does not show to the access checker.
void note_access(const void* p, size_t bytes, bool write, bool atomic, Loc loc);
void note_fence();
// to[0, bytes) = from[0, bytes), which may hold what was never written: then so does the destination.
void copy_as_is(void* to, const void* from, size_t bytes, Loc loc);

// For tests whose buffers are the host's: kernels may use [p, p + bytes) as if cudaMalloc had given it, until it is
// forgotten; nothing in it counts as written until the host says that it wrote it.  Without the checker these do
// nothing, as kernels may then use any memory.
void device_memory(void* p, size_t bytes);
void forget_device_memory(void* p);
void host_wrote(const void* p, size_t bytes);

// Are there blocks of the launch that have not begun?
bool blocks_are_left();

// ---- arithmetic
// Returns x + y as memory adds, and add.ftz: subnormal numbers count as zeros, also as a result.
float add_flushing(float x, float y);

// ---- launching
struct Grid {
  unsigned grid[3], block[3];
  size_t smem;
  unsigned cluster;  // blocks, neighbours in y
  bool early;        // it may begin before the kernel before it has ended
};
using ThreadMain = void (*)(void* ctx);

// ---- reports and settings
// Ends the launch with an error.  The fiber is abandoned where it stands: its locals are not destroyed.
[[noreturn, gnu::format(printf, 2, 3)]] void fail(Loc loc, const char* fmt, ...);
const std::string& last_report();  // text of the last failure, "" if none

enum class Order { forward, reverse, random };
struct Settings {
  Order order = Order::forward;  // of threads and blocks; environment: CUEMU_ORDER=forward|reverse|random[:seed]
  uint64_t seed = 1;             // of Order::random; the same seed gives the same schedule
  int arch = 90;                 // the device, by its compute capability: 75, 80, 86, 89, 90, 100 or 120; CUEMU_ARCH=89
  int code = 90;             // what it runs on 9.0: the code of 9.0a or, as of a program that has no other, that of 8.0
  int devices = 8;           // of the machine; CUEMU_DEVICES=1
  int multiprocessors = 20;  // of a device
  size_t device_memory = 0;  // bytes that cudaMalloc gives at most; at first those of the machine
  bool abort_on_error = false;  // CUEMU_ABORT=1: stop where the mistake is, for a debugger
  bool profile = false;         // keep the access profile of each launch; the check build only
};
Settings& settings();             // may be changed between launches
int read_arch(const char* text);  // ends the program with a message if it is none of them

// Returns the number of times that the host has waited for queued work, or might have: it synchronised with unfinished
// work, or copied to the device from memory that cudaMallocHost did not give.
uint64_t host_waits();

// Counts the host's calls so far, each of which costs microseconds on a device.
struct Calls {
  uint64_t launches = 0, graph_launches = 0, graph_nodes = 0, graphs_made = 0, nodes_set = 0, copies = 0;
  uint64_t tensor_copies = 0, cold_copies = 0;  // by kernels; of them, those of a map that the block did not prefetch
};
const Calls& calls();

// The access profile of the last launch: how each load and store of the source uses the memory system, as far as
// addresses decide it.  The n-th execution of an instruction by each lane of a warp, between two points at which the
// lanes meet, counts as one request.
struct ProfileLine {
  std::string place;  // "norm.cu:43"
  bool write = false, shared = false;
  uint64_t requests = 0;
  uint64_t bytes = 0;  // moved by all lanes
  // Global memory: 32-byte sectors touched, and the fewest that hold so many bytes.  Shared memory: wavefronts, and the
  // fewest; the excess are bank conflicts.
  uint64_t used = 0, ideal = 0;
};
std::vector<ProfileLine> profile_lines();

#ifdef CUEMU_CHECK
constexpr bool kChecker = true;
#else
constexpr bool kChecker = false;
#endif

inline constexpr unsigned kWarp = 32;
unsigned lane_id();
Loc lane_loc(unsigned lane);  // where a lane of the current warp waits

}  // namespace cuemu
