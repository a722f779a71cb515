// State shared by the parts of the emulator: the running block and its threads, fibers, and cudaMalloc'd memory.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "cuda.h"
#include "cuda_runtime.h"

#ifdef CUEMU_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace cuemu {

// ---- fibers (fiber.cpp)
struct Fiber {
  void* sp = nullptr;
  char* stack = nullptr;
  size_t size = 0;
  void* fake = nullptr;  // AddressSanitizer's bookkeeping
};
extern Fiber* g_fiber;      // the running one
extern Fiber g_main_fiber;  // the caller of run_grid
void switch_fiber(Fiber* to);
Fiber* get_fiber();               // one that is ready to start in fiber_main()
void put_fiber(Fiber* finished);  // for reuse: the fiber stands in a switch_fiber call of fiber_main()
void reset_fibers();              // after a failure: abandons all fibers where they stand
void fiber_started();             // the first call of fiber_main()
void fiber_main();                // what fibers run (scheduler.cpp)

// ---- the running blocks (scheduler.cpp)
enum class State : uint8_t {
  unstarted,
  ready,
  running,
  at_barrier,
  at_warp_op,
  at_mbarrier,
  at_cluster,
  at_registers,
  done
};

struct AsyncCopy {
  void* dst;
  const void* src;
  unsigned bytes, src_bytes;
  Loc loc;
};

struct Thread {
  uint3 tid;
  unsigned linear;  // in its block
  unsigned id;      // in the cluster
  struct Block* block;
  State state;
  Fiber* fiber;
  // The event that it waits for.
  const char* what;
  Loc loc;
  uint32_t mask;
  WarpOp op;
  void* arg;
  int barrier;
  const uint64_t* mbarrier;
  bool awaited;           // the kernel before
  bool arrived;           // at the barrier of the cluster, and has not waited for it
  uint32_t cluster_turn;  // how often that barrier had been passed then
  // cp.async: copies in flight, and the number of them at the end of each committed group.
  std::vector<AsyncCopy> copies;
  std::vector<size_t> groups;
};

struct Barrier {
  unsigned expected = 0, arrived = 0;
  const Thread* first = nullptr;  // to arrive
  const Thread* odd = nullptr;    // one that arrived from another place in the source
  std::vector<uint16_t> who{};    // arrived, where the barrier is not for the whole block
};

struct Block {
  uint3 index;
  unsigned rank;  // in the cluster
  std::vector<Thread> threads;
  uint32_t at_op[32], returned[32];  // per warp: lanes at a collective, lanes that have returned
  Barrier barriers[16];
  unsigned n = 0, done = 0;
  char* smem = nullptr;
  size_t smem_bytes = 0;
  bool has_returned() const { return done == n; }
  bool holds(const void* p) const { return smem && p >= smem && p < smem + smem_bytes; }
};
// The blocks that live at once: one, or those of a cluster.
constexpr unsigned kMostBlocks = 8;
struct Cluster {
  std::vector<Block> blocks;
  std::vector<Thread*> ready;  // a stack: the next thread to run is on top
  unsigned n = 0, done = 0;    // threads
  unsigned arrived = 0;        // at the barrier of the cluster
  uint32_t turn = 0;           // how often that has been passed
  uint32_t serial = 0;         // of all clusters of all launches
  Order order = Order::forward;
  bool early = false;             // the kernel may have begun before the one before has ended
  Block* holder(const void* p) {  // whose shared memory p is in; or null
    for (Block& b : blocks)
      if (b.holds(p)) return &b;
    return nullptr;
  }
};
extern Cluster g_cluster;
extern Thread* g_thread;  // the running one; null: none
extern Block* g_block;    // the one it is of

void make_ready(Thread* t);
std::string name_of(const Block&);  // "block (0,0,0)"
bool is_too_early();                // an access of the running thread to device memory
void expect_awaited(const char* what, Loc);
void suspend();                     // the current thread, until something makes it ready again
const char* file_name(const Loc&);  // without directories
uint64_t draw();                    // a random number

// ---- compute capability 9.0 (hopper.cpp)
struct TensorCopy {
  char* smem;
  CUtensorMap map;
  int at[3];
  uint64_t* barrier;   // null: to global memory
  const Block* block;  // whose shared memory that is
  bool from_other;     // block of the cluster
  Loc loc;
};
void hopper_cluster_begin();
void hopper_launch_end(bool ok);  // stores arrive
bool copies_in_flight();
bool copies_in_flight(const Block& to);
void land_copy();                              // one of them
std::string mbarrier_state(const Thread&);     // what the phase that it waits for lacks
void expect_nothing_in_flight(const Thread&);  // the thread returns

bool can_launch(const Grid&);                              // within the limits of a launch
size_t shared_memory_limit();                              // bytes that a block can have
cudaError_t run_grid(const Grid&, ThreadMain, void* ctx);  // the launch; to be queued
const Kernel* find_kernel(const void* func);               // null: of none that is known

// ---- streams (stream.cpp)
struct Task;
void queue(cudaStream_t, std::function<void()> run);
void note_wait();  // for host_waits()
extern Calls g_calls;
void finish_all();

// ---- device memory and the sticky error (host.cpp)
struct Alloc {
  char* p;
  size_t bytes;
  bool lent = false;              // the host's own, see device_memory()
  struct Cell* shadow = nullptr;  // of the access checker
};
extern std::vector<Alloc> g_allocs;        // by address
bool usable(const void* p, size_t bytes);  // by what runs on the device
bool in_device_memory(const void* p, size_t bytes);
// Makes memory of cudaMalloc accessible to the host during its lifetime; otherwise an access aborts.
struct DeviceMemoryOpen {
  DeviceMemoryOpen();
  ~DeviceMemoryOpen();
};
extern cudaError_t g_error;
void set_failed(const std::string& report);  // of work that is no kernel: nothing runs after it

}  // namespace cuemu
