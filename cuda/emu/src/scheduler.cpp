// The scheduler: runs the clusters of a launch one after another, and the threads of their blocks as fibers.
#include <unistd.h>

#include <algorithm>
#include <cstdarg>

#include "check.h"
#include "symbols.h"

namespace cuemu {

Cluster g_cluster;
Thread* g_thread;
Block* g_block;

namespace {

Thread* g_assigned;  // the unstarted thread that the fiber being switched to is to run
ThreadMain g_entry;
void* g_ctx;
std::string g_report;
uint64_t g_rng;
uint32_t g_serial;
uint64_t g_blocks_left;  // of the launch: that have not begun

Thread* pick() {
  Cluster& c = g_cluster;
  while (c.ready.empty() && c.done < c.n && copies_in_flight()) land_copy();  // as late as can be
  if (c.ready.empty()) return nullptr;
  if (c.order == Order::random && copies_in_flight() && draw() % 8 == 0) land_copy();  // or earlier
  if (c.order == Order::random) std::swap(c.ready[draw() % c.ready.size()], c.ready.back());
  Thread* const t = c.ready.back();
  c.ready.pop_back();
  return t;
}

void set_current(Thread* t) {
  g_thread = t;
  g_block = t->block;
  t->state = State::running;
  threadIdx = t->tid;
  blockIdx = t->block->index;
}

std::string describe(const Loc& l) { return std::string(file_name(l)) + ":" + std::to_string(l.line); }

// "0-31,40"
std::string ranges(const std::vector<unsigned>& ids) {
  std::string s;
  for (size_t i = 0, j; i < ids.size(); i = j + 1) {
    for (j = i; j + 1 < ids.size() && ids[j + 1] == ids[j] + 1;) j++;
    if (!s.empty()) s += ',';
    s += std::to_string(ids[i]);
    if (j > i) {
      s += '-';
      s += std::to_string(ids[j]);
    }
  }
  return s;
}

// No thread can go on: says who waits for what.
std::string who_waits(const Block& b) {
  struct Group {
    const Thread* t;
    std::vector<unsigned> who;
  };
  std::vector<Group> groups;
  for (const Thread& t : b.threads) {
    auto same = [&](const Group& x) {
      return x.t->state == t.state &&
             (t.state == State::done || (x.t->what == t.what && x.t->mask == t.mask && x.t->loc.line == t.loc.line));
    };
    auto it = std::find_if(groups.begin(), groups.end(), same);
    if (it == groups.end())
      groups.push_back({&t, {t.linear}});
    else
      it->who.push_back(t.linear);
  }
  std::string text = "no thread of " + name_of(b) + " can go on";
  for (const Group& x : groups) {
    text += "\n    threads " + ranges(x.who);
    if (x.t->state == State::done) {
      text += " have returned";
      continue;
    }
    char mask[32] = "";
    if (x.t->state == State::at_warp_op) std::snprintf(mask, sizeof mask, " with mask %08x", x.t->mask);
    text.append(" wait in ").append(x.t->what).append(mask).append(" at ").append(describe(x.t->loc));
    if (x.t->state == State::at_mbarrier) text += mbarrier_state(*x.t);
  }
  return text;
}

// Cluster number `which` of those that have as many blocks as this one.
bool run_cluster(const Grid& grid, uint64_t which) {
  Cluster& c = g_cluster;
  c.done = c.arrived = 0;
  c.ready.clear();
  for (Block& b : c.blocks) {
    const uint64_t across = grid.grid[0], down = grid.grid[1] / grid.cluster;  // clusters
    b.index = {static_cast<unsigned>(which % across),
               static_cast<unsigned>(which / across % down * grid.cluster + b.rank),
               static_cast<unsigned>(which / (across * down))};
    b.done = 0;
    std::fill_n(b.at_op, 32, 0u);
    std::fill_n(b.returned, 32, 0u);
    std::fill_n(b.barriers, 16, Barrier{});
    std::fill_n(b.smem, b.smem_bytes, '\xff');
    for (Thread& t : b.threads) {
      t.state = State::unstarted;
      t.arrived = t.awaited = false;
      t.copies.clear();
      t.groups.clear();
      c.ready.push_back(&t);
    }
  }
  if (c.order != Order::reverse) std::reverse(c.ready.begin(), c.ready.end());
  c.serial = ++g_serial;
  g_block = &c.blocks[0];
  check::cluster_begin();
  hopper_cluster_begin();
  g_report.clear();
  g_fiber = &g_main_fiber;
  g_assigned = pick();
  switch_fiber(get_fiber());
  if (g_report.empty() && c.done != c.n)
    for (const Block& b : c.blocks)
      if (!b.has_returned()) g_report += (g_report.empty() ? "divergent barrier or wrong mask: " : "\n") + who_waits(b);
  for (const Block& b : c.blocks)
    for (const Barrier& barrier : b.barriers)
      if (g_report.empty() && barrier.arrived)
        g_report = name_of(b) + " ended before the arrival at " + describe(barrier.first->loc) + " was waited for";
  check::cluster_end();
  g_thread = nullptr;
  return g_report.empty();
}

// Static shared variables lie in the executable's thread-local segment, which this fills with NaNs before each block
// and gives back as it was at the end of the launch: the host's own thread-local variables live there too.
class StaticShared {
 public:
#ifdef CUEMU_ASAN  // they are plain statics then
  void fill_nan() {}
#else
  StaticShared() {
    const Segment s = thread_local_segment();
    p_ = s.begin;
    before_.assign(s.begin, s.begin + s.bytes);
  }
  ~StaticShared() { std::copy(before_.begin(), before_.end(), p_); }
  void fill_nan() { std::fill_n(p_, before_.size(), '\xff'); }

 private:
  char* p_ = nullptr;
  std::vector<char> before_;
#endif
};

bool run_clusters(const Grid& c) {
  const uint64_t blocks = uint64_t{c.grid[0]} * c.grid[1] * c.grid[2] / c.cluster;  // clusters of them
  const Order order = g_cluster.order;
  std::vector<uint64_t> shuffled;
  if (order == Order::random) {
    for (uint64_t i = 0; i < blocks; i++) shuffled.push_back(i);
    for (uint64_t i = blocks; i > 1; i--) std::swap(shuffled[i - 1], shuffled[draw() % i]);
  }
  StaticShared shared;
  for (uint64_t k = 0; k < blocks; k++) {
    const uint64_t i = order == Order::random ? shuffled[k] : order == Order::reverse ? blocks - 1 - k : k;
    g_blocks_left = (blocks - 1 - k) * c.cluster;
    shared.fill_nan();
    if (!run_cluster(c, i)) return false;
  }
  return true;
}

}  // namespace

std::string name_of(const Block& b) {
  return "block (" + std::to_string(b.index.x) + "," + std::to_string(b.index.y) + "," + std::to_string(b.index.z) +
         ")";
}

uint64_t draw() {  // xorshift
  g_rng ^= g_rng << 13;
  g_rng ^= g_rng >> 7;
  g_rng ^= g_rng << 17;
  return g_rng;
}

void make_ready(Thread* t) {
  t->state = State::ready;
  g_cluster.ready.push_back(t);
}

void suspend() {
  Thread* me = g_thread;
  me->fiber = g_fiber;
  Thread* next = pick();
  if (next == me) {
    // The copy that it waits for has landed.
  } else if (!next) {
    switch_fiber(&g_main_fiber);  // deadlock: never comes back
  } else if (next->state == State::unstarted) {
    g_assigned = next;
    switch_fiber(get_fiber());
  } else {
    switch_fiber(next->fiber);
  }
  set_current(me);
}

void fiber_main() {
  fiber_started();
  for (;;) {
    Thread* t = g_assigned;
    t->fiber = g_fiber;
    set_current(t);
    g_entry(g_ctx);
    t->state = State::done;
    Block& b = *t->block;
    b.returned[t->linear / kWarp] |= 1u << t->linear % kWarp;
    b.done++;
    g_cluster.done++;
    if (is_too_early()) fail({}, "early launch: the thread has returned without waiting for the kernel before");
    if (!t->copies.empty()) fail(t->copies[0].loc, "thread ended with cp.async copies that it never waited for");
    expect_nothing_in_flight(*t);
    Thread* next = pick();
    if (next && next->state == State::unstarted) {
      g_assigned = next;
      continue;  // on this fiber: a kernel that never waits runs as a plain loop
    }
    put_fiber(g_fiber);
    switch_fiber(next ? next->fiber : &g_main_fiber);
  }
}

size_t shared_memory_limit() {
  return 1024 * [] {
    switch (settings().arch) {
      case 75:
        return size_t{64};
      case 80:
        return size_t{163};
      case 86:
      case 89:
      case 120:
        return size_t{99};
      default:
        return size_t{227};
    }
  }();
}

bool can_launch(const Grid& c) {
  const uint64_t n = uint64_t{c.block[0]} * c.block[1] * c.block[2];
  return n > 0 && n <= 1024 && c.block[2] <= 64 && c.grid[0] && c.grid[1] && c.grid[2] && c.grid[1] <= 65535 &&
         c.grid[2] <= 65535 && c.smem <= shared_memory_limit() && c.cluster > 0 && c.cluster <= kMostBlocks &&
         c.grid[1] % c.cluster == 0 && (c.cluster == 1 || (settings().arch >= 90 && n % kWarp == 0));  // whole warps
}

cudaError_t run_grid(const Grid& c, ThreadMain entry, void* ctx) {
  if (g_error) return g_error;  // nothing runs after a failure
  const uint64_t n = uint64_t{c.block[0]} * c.block[1] * c.block[2];
  g_entry = entry;
  g_ctx = ctx;
  gridDim = {c.grid[0], c.grid[1], c.grid[2]};
  blockDim = {c.block[0], c.block[1], c.block[2]};
  Cluster& all = g_cluster;
  all.blocks.resize(c.cluster);
  all.n = static_cast<unsigned>(n) * c.cluster;
  for (unsigned rank = 0; rank < c.cluster; rank++) {
    Block& b = all.blocks[rank];
    b.rank = rank;
    b.n = static_cast<unsigned>(n);
    b.threads.resize(n);
    for (unsigned i = 0; i < n; i++) {
      Thread& t = b.threads[i];
      t.linear = i;
      t.id = rank * b.n + i;
      t.block = &b;
      t.tid = {i % c.block[0], i / c.block[0] % c.block[1], i / (c.block[0] * c.block[1])};
    }
    void* smem = nullptr;  // of exactly the size asked for, so that AddressSanitizer sees what goes beyond
    if (c.smem && posix_memalign(&smem, 1024, c.smem)) return g_error = cudaErrorMemoryAllocation;
    b.smem = static_cast<char*>(smem);
    b.smem_bytes = c.smem;
  }
  all.order = settings().order;
  all.early = c.early;
  g_rng = settings().seed * 0x9e3779b97f4a7c15u | 1;
  check::launch_begin();
  const bool ok = run_clusters(c);
  hopper_launch_end(ok);
  for (Block& b : all.blocks) {
#ifdef CUEMU_ASAN
    if (b.smem) __asan_unpoison_memory_region(b.smem, c.smem);  // of copies that nobody waited for
#endif
    std::free(b.smem);
    b.smem = nullptr;
    b.smem_bytes = 0;
  }
  if (!ok) {
    reset_fibers();
    g_error = cudaErrorLaunchFailure;
  }
  return g_error;
}

void await_kernel_before(Loc loc) {
  if (settings().arch < 90) fail(loc, "griddepcontrol is of compute capability 9.0");
  g_thread->awaited = true;
}
bool is_too_early() { return g_cluster.early && !g_thread->awaited; }
void expect_awaited(const char* what, Loc loc) {
  if (is_too_early()) fail(loc, "early launch: %s before the kernel before has been waited for", what);
}

bool blocks_are_left() { return g_blocks_left > 0; }
void* dynamic_smem() { return g_block->smem; }
unsigned lane_id() { return g_thread->linear % kWarp; }
Loc lane_loc(unsigned lane) { return g_block->threads[g_thread->linear / kWarp * kWarp + lane].loc; }

int read_arch(const char* text) {
  for (int arch : {75, 80, 86, 89, 90, 100, 120})
    if (text == std::to_string(arch)) return arch;
  std::fprintf(stderr, "cuemu: CUEMU_ARCH=%s: the emulated compute capabilities are 75, 80, 86, 89, 90, 100 and 120\n",
               text);
  std::_Exit(EXIT_FAILURE);
}

Settings& settings() {
  static Settings s = [] {
    Settings r;
    if (const char* o = std::getenv("CUEMU_ORDER")) {
      if (!std::strncmp(o, "reverse", 7)) r.order = Order::reverse;
      if (!std::strncmp(o, "random", 6)) {
        r.order = Order::random;
        r.seed = o[6] == ':' ? std::strtoull(o + 7, nullptr, 10) : 1;
      }
    }
    if (const char* a = std::getenv("CUEMU_ARCH")) r.arch = read_arch(a);
    if (const char* d = std::getenv("CUEMU_DEVICES")) r.devices = std::atoi(d);
    r.abort_on_error = std::getenv("CUEMU_ABORT") != nullptr;
    r.device_memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
    return r;
  }();
  return s;
}

const std::string& last_report() { return g_report; }
void set_failed(const std::string& report) {
  g_report = report;
  g_error = cudaErrorLaunchFailure;
}

const char* file_name(const Loc& l) {
  const char* slash = std::strrchr(l.file, '/');
  return slash ? slash + 1 : l.file;
}

void fail(Loc loc, const char* fmt, ...) {
  const check::Unchecked pause;
  char s[1024];
  va_list args;
  va_start(args, fmt);
  std::vsnprintf(s, sizeof s, fmt, args);
  va_end(args);
  g_report = s;
  if (loc.line) g_report += "\n    at " + describe(loc);
  const Thread* t = g_thread;
  if (t)
    g_report += "\n    in " + name_of(*t->block) + " thread (" + std::to_string(t->tid.x) + "," +
                std::to_string(t->tid.y) + "," + std::to_string(t->tid.z) + ")";
  if (!t || settings().abort_on_error) {
    std::fprintf(stderr, "cuemu: %s\n", g_report.c_str());
    std::abort();
  }
  switch_fiber(&g_main_fiber);
  __builtin_unreachable();
}

}  // namespace cuemu
