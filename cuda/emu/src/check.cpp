// The access checker.  Kernels compiled with -fsanitize=thread call __tsan_read4(p) and the like before every access to
// memory; linking this file instead of libtsan gives those calls a CUDA meaning.  For each pair of bytes of shared and
// of device memory it remembers the last write and two reads since (by which thread, at which of its logical times,
// from which instruction) and reports
//   - data races: two accesses, one of them a write, not ordered by a barrier, __syncwarp, a fence with an atomic, or
//     the end of a launch (shuffles order nothing, as CUDA says);
//   - reads of shared or device memory that nobody has written;
//   - accesses outside every variable and allocation, and to host memory;
//   - accesses to the target of a cp.async that its thread has not waited for, or of a tensor copy that has not landed;
//   - writes to the source of a tensor store that has not read it, and accesses to its target in the same launch;
//   - tensor copies and wgmma (the async proxy) that touch what was written without a fence.proxy.async.
// (Linux's KCSAN uses the compiler's instrumentation in the same way.)  Compiled without -fsanitize.
#ifdef CUEMU_CHECK

#include "check.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>

#include "profile.h"
#include "symbols.h"

extern "C" char __executable_start, _end;

namespace cuemu {

// An access to the two bytes of a cell.
struct Slot {
  uint32_t block = 0;  // serial of the block; 0: none
  uint32_t clock = 0;
  uint32_t place = 0;  // see symbols.h
  uint16_t thread = 0;
  uint8_t bytes = 0;  // which of the two, as bits
  bool atomic : 1 = false;
  bool async : 1 = false;  // by the async proxy
};
enum class Store : uint8_t { none, source, target };  // of a tensor store in flight
struct Cell {
  Slot write, reads[2];
  uint32_t block = 0;       // shared memory: the block that the rest is about
  uint16_t pending = 0;     // 1 + the thread whose copy is to land here
  uint8_t initialised = 0;  // bytes that have been written, as bits
  Store store = Store::none;
};

namespace {

// What a block had done and seen when one of its threads performed an atomic after a fence.
struct Release {
  uint32_t block;
  std::vector<uint32_t> clock;
};

int g_pause = 1;          // accesses count only while 0
uint32_t g_launch_first;  // serial of the launch's first block
// Thread u of the cluster is at time g_own[u], which grows when it synchronises; g_base[u] is the time of u that
// everyone has seen (at the last barrier of a block that is alone), seen(t, u) what t has seen since.  The copies that
// land with an mbarrier count as one more thread, behind those of the cluster.
constexpr unsigned kMbarriers = 48;  // of a block
std::vector<uint32_t> g_own, g_base, g_seen;
unsigned most_mbarriers() { return kMbarriers * static_cast<unsigned>(g_cluster.blocks.size()); }
unsigned clocks() { return g_cluster.n + most_mbarriers(); }
unsigned me() { return g_thread->id; }
uint32_t& seen(size_t t, unsigned u) { return g_seen[t * clocks() + u]; }
struct Mbarrier {
  uint16_t copies;  // the thread that its copies count as
  uint16_t by;      // who initialised it, and when
  uint32_t at;
  std::vector<uint32_t> arrived, ended;  // what is known to those who arrive in this phase, and at the end of the last
  std::vector<uint32_t> from_others;     // when threads of other blocks arrived last
  bool fenced = false;                   // for other blocks of the cluster
};
std::map<const void*, Mbarrier> g_mbarriers;
std::vector<uint32_t> g_proxy;           // up to when the async proxy sees what a thread has written
std::vector<uint32_t> g_arrived, g_met;  // at the barrier of the cluster: what is known to those who arrive, to all
bool g_partial;  // a barrier of part of the block has been used: threads have seen those of other warps
enum class Fenced : uint8_t { no, yes };
std::vector<Fenced> g_fenced;
std::map<const void*, std::deque<Release>> g_released;  // by atomics on this address
std::vector<std::vector<const Release*>> g_acquired;    // by each thread
std::vector<const Release*> g_block_acquired;           // by the whole block, at a barrier
size_t cells_for(size_t bytes) { return bytes / 2 + 1; }
Segment g_static;
std::vector<Cell> g_static_cells, g_dynamic_cells;

bool ordered(const Slot& s) {
  if (s.block < g_launch_first) return true;
  const unsigned t = me();
  if (s.block == g_cluster.serial) return s.thread == t || s.clock <= g_base[s.thread] || s.clock <= seen(t, s.thread);
  auto covers = [&](const Release* r) {
    return r->block == s.block && s.thread < r->clock.size() && s.clock <= r->clock[s.thread];
  };
  return std::any_of(g_acquired[t].begin(), g_acquired[t].end(), covers) ||
         std::any_of(g_block_acquired.begin(), g_block_acquired.end(), covers);
}

// One access of the running thread.
struct Access {
  const char* p;
  size_t bytes;
  bool write, atomic;
  uint32_t place;
  bool copy = false;   // reads what was never written, as it is
  bool async = false;  // by the async proxy
};

[[noreturn]] void report(const Access& a, const char* kind, const std::string& what, const std::string& more) {
  g_pause++;
  fail({}, "%s: %s\n    by thread %u at %s%s", kind, what.c_str(), g_thread->linear, place_name(a.place).c_str(),
       more.c_str());
}
std::string thread_name(unsigned t) {
  if (t >= g_cluster.n) return "a tensor copy";
  const Block& b = g_cluster.blocks[t / g_block->n];
  return "thread " + std::to_string(t % g_block->n) + (&b == g_block ? "" : " of " + name_of(b));
}
[[noreturn]] void report_race(const Access& a, const char* kind, const Slot& s) {
  report(a, "race", std::string(kind) + " " + std::to_string(a.bytes) + " bytes at " + memory_name(a.p),
         "\n    and by " +
             (s.block == g_cluster.serial ? thread_name(s.thread) + " of the block at "
                                          : "thread " + std::to_string(s.thread) + " of another block at ") +
             place_name(s.place));
}
[[noreturn]] void report_proxy(const Access& a, const std::string& what, unsigned thread, const std::string& place) {
  report(a, "async proxy", what + " was written without a fence.proxy.async behind",
         "\n    by " + thread_name(thread) + place);
}
[[noreturn]] void report_bounds(const Access& a) {
  std::string near = " (host memory?)";
  ptrdiff_t best = 65536;
  auto consider = [&](const char* what, const char* first, size_t n) {
    const ptrdiff_t past = a.p - first - static_cast<ptrdiff_t>(n), before = first - a.p,
                    reach = static_cast<ptrdiff_t>(a.bytes);
    const bool after = past >= -reach;
    const ptrdiff_t distance = after ? past : before;
    if (distance < -reach || distance >= best) return;
    best = distance;
    near = ", " + std::to_string(std::max<ptrdiff_t>(distance, 0)) + " bytes " + (after ? "past " : "before ") + what +
           " of " + std::to_string(n);
  };
  for (const Alloc& m : g_allocs) consider("device memory", m.p, m.bytes);
  if (g_block->smem) consider("dynamic shared memory", g_block->smem, g_block->smem_bytes);
  const char* in_static = a.p;
  if (in_static >= g_static.begin && in_static < g_static.begin + g_static.bytes) near = ", " + memory_name(a.p);
  char address[32];
  std::snprintf(address, sizeof address, "%p", static_cast<const void*>(a.p));
  report(a, "out of bounds", std::to_string(a.bytes) + " bytes at " + address + near, "");
}

// The cells of static shared memory for an offset in it; null for what is not a shared variable.
Cell* static_cells(const Access& a) {
  if (g_cluster.blocks.size() > 1) report(a, "cluster", "shared variables are emulated for one block at a time", "");
  const size_t offset = static_cast<size_t>(a.p - g_static.begin);
  static const Symbol* last = nullptr;
  if (!last || offset < last->offset || offset >= last->offset + last->size) {
    const auto& all = shared_variables();
    auto it = std::upper_bound(all.begin(), all.end(), offset, [](size_t o, const Symbol& s) { return o < s.offset; });
    if (it == all.begin()) report_bounds(a);
    last = &*--it;
  }
  if (offset + a.bytes > last->offset + last->size) report_bounds(a);
  if (last->name.starts_with("_ZGV")) return nullptr;  // the compiler's "is it initialised" flag
  return &g_static_cells[offset / 2];
}

// Null for the thread's own variables, constants and built-in variables.
Cell* cells_of(const Access& a, bool* shared) {
  const char* const end = a.p + a.bytes;
  if (a.p >= g_fiber->stack && a.p < g_fiber->stack + g_fiber->size) return nullptr;
  if (a.p >= &__executable_start && a.p < &_end) return nullptr;
  *shared = true;
  if (const Block* b = g_cluster.holder(a.p)) {
    if (end > b->smem + b->smem_bytes) report_bounds(a);
    if (b->has_returned()) report(a, "cluster", "shared memory of a block that has returned", "");
    return &g_dynamic_cells[b->rank * cells_for(b->smem_bytes) + static_cast<size_t>(a.p - b->smem) / 2];
  }
  if (a.p >= g_static.begin && a.p < g_static.begin + g_static.bytes) return static_cells(a);
  *shared = false;
  static size_t last = 0;
  if (last >= g_allocs.size() || a.p < g_allocs[last].p || end > g_allocs[last].p + g_allocs[last].bytes) {
    auto it =
        std::upper_bound(g_allocs.begin(), g_allocs.end(), a.p, [](const char* p, const Alloc& m) { return p < m.p; });
    if (it == g_allocs.begin() || end > (it - 1)->p + (it - 1)->bytes) report_bounds(a);
    last = static_cast<size_t>(it - 1 - g_allocs.begin());
  }
  return &g_allocs[last].shadow[static_cast<size_t>(a.p - g_allocs[last].p) / 2];
}

void check_cell(Cell& x, const Access& a, const Slot& now) {
  if (x.pending)
    report(a, x.pending <= g_cluster.n ? "cp.async" : "TMA",
           (a.write ? "write of " : "read of ") + memory_name(a.p) + " before the copy was waited for",
           "\n    copied by " + thread_name(x.pending - 1u));
  if (x.store == Store::target || (x.store == Store::source && a.write))
    report(a, "TMA", (a.write ? "write of " : "read of ") + memory_name(a.p) + " before a tensor store of it is done",
           "");
  auto conflicts = [&](const Slot& s) {
    return s.block && (s.bytes & now.bytes) && !(s.atomic && a.atomic) && !ordered(s);
  };
  if (conflicts(x.write)) report_race(a, a.write ? "two writes of" : "a read and a write of", x.write);
  if (a.async && x.write.block == g_cluster.serial && !x.write.async && x.write.clock > g_proxy[x.write.thread])
    report_proxy(a, memory_name(a.p), x.write.thread, " at " + place_name(x.write.place));
  if ((!a.write || a.atomic) && !a.copy && (x.initialised & now.bytes) != now.bytes)
    report(a, "uninitialised", "read of " + memory_name(a.p), "");
  if (a.write) {
    for (Slot& r : x.reads) {
      if (conflicts(r)) report_race(a, "a write and a read of", r);
      r.block = 0;
    }
    x.write = now;
    x.initialised |= now.bytes;
  } else {
    const bool first = !x.reads[0].block || (x.reads[0].block == now.block && x.reads[0].thread == now.thread);
    x.reads[first ? 0 : 1] = now;
  }
}

// The time of u of which t knows.
uint32_t known(unsigned t, unsigned u) { return u == t ? g_own[u] : std::max(g_base[u], seen(t, u)); }

// An atomic on device memory after a fence publishes what its thread has done or seen.
void synchronise_by_atomic(const void* p) {
  const unsigned t = me(), n = g_cluster.n;
  auto& releases = g_released[p];
  for (const Release& r : releases)
    if (r.block != g_cluster.serial) {
      g_acquired[t].push_back(&r);
    } else if (g_cluster.blocks.size() > 1) {
      for (unsigned u = 0; u < n; u++) seen(t, u) = std::max(seen(t, u), r.clock[u]);
      g_partial = true;
    }
  if (g_fenced[t] == Fenced::no) return;
  Release r{g_cluster.serial, std::vector<uint32_t>(n)};
  for (unsigned u = 0; u < n; u++) r.clock[u] = known(t, u);
  releases.push_back(std::move(r));
  g_own[t]++;
}

void touch(const Access& a) {
  bool shared = false;
  Cell* c = cells_of(a, &shared);
  if (!c) return;
  if (!shared && !a.async && is_too_early())
    report(a, "early launch",
           (a.write ? "write of " : "read of ") + memory_name(a.p) + " before the kernel before has been waited for",
           "");
  const unsigned t = me();
  if (!a.atomic && !a.async) profile::access(a.place, a.p, a.bytes, a.write, shared, t);
  Slot now{g_cluster.serial, g_own[t], a.place, static_cast<uint16_t>(t), 0, a.atomic, a.async};
  size_t odd = reinterpret_cast<uintptr_t>(a.p) & 1;
  for (size_t left = a.bytes; left; c++) {
    const size_t here = std::min<size_t>(2 - odd, left);
    now.bytes = static_cast<uint8_t>(((1u << here) - 1) << odd);
    odd = 0;
    left -= here;
    if (shared && c->block != g_cluster.serial) {  // it starts afresh
      *c = Cell{};
      c->block = g_cluster.serial;
    }
    check_cell(*c, a, now);
  }
  if (a.atomic && !shared) synchronise_by_atomic(a.p);
}

}  // namespace

namespace check {

Unchecked::Unchecked() { g_pause++; }
Unchecked::~Unchecked() { g_pause--; }

void launch_begin() {
  if (!g_static.begin) {
    g_static = thread_local_segment();
    g_static_cells.resize(cells_for(g_static.bytes));
  }
  const size_t n = g_cluster.n, blocks = g_cluster.blocks.size();
  g_dynamic_cells.assign(blocks * cells_for(g_cluster.blocks[0].smem_bytes), Cell{});
  g_own.resize(clocks());
  g_base.resize(clocks());
  g_seen.resize(n * clocks());
  g_proxy.resize(n);
  g_acquired.resize(n);
  g_fenced.resize(n);
  g_released.clear();
  g_launch_first = 0;
  profile::launch_begin();
}

void cluster_begin() {
  if (!g_launch_first) g_launch_first = g_cluster.serial;
  std::fill(g_own.begin(), g_own.end(), 1u);
  std::fill(g_base.begin(), g_base.end(), 0u);
  std::fill(g_seen.begin(), g_seen.end(), 0u);
  std::fill(g_proxy.begin(), g_proxy.end(), 0u);
  g_mbarriers.clear();
  g_arrived.assign(clocks(), 0);
  for (auto& a : g_acquired) a.clear();
  g_block_acquired.clear();
  std::fill(g_fenced.begin(), g_fenced.end(), Fenced::no);
  g_partial = false;
  g_pause = 0;
}

void cluster_end() {
  g_pause = 1;
  meet(0, g_cluster.n - 1);
}
// Its memory must not go while another block may still arrive at a barrier in it.
void block_returned() {
  for (const auto& [p, m] : g_mbarriers) {
    if (!g_block->holds(p)) continue;
    for (unsigned u = 0; u < g_cluster.n; u++) {
      const uint32_t arrival = m.from_others[u];
      const auto knows = [&](const Thread& t) { return known(t.id, u) >= arrival; };
      if (std::none_of(g_block->threads.begin(), g_block->threads.end(), knows))
        fail({}, "cluster: %s has returned without knowing that %s had arrived", name_of(*g_block).c_str(),
             thread_name(u).c_str());
    }
  }
}

void meet(unsigned first, unsigned last) {
  for (unsigned w = first / kWarp; w <= last / kWarp; w++) profile::meet(w);
}

void sync_block() {
  if (g_cluster.blocks.size() > 1) {
    std::vector<uint16_t> who;
    std::set<const Release*> acquired;
    Fenced fenced = Fenced::yes;
    for (const Thread& t : g_block->threads) {
      who.push_back(static_cast<uint16_t>(t.id));
      acquired.insert(g_acquired[t.id].begin(), g_acquired[t.id].end());
      fenced = std::min(fenced, g_fenced[t.id]);
    }
    for (const uint16_t t : who) {
      g_acquired[t].assign(acquired.begin(), acquired.end());
      g_fenced[t] = fenced;
    }
    return sync_threads(who.data(), g_block->n);
  }
  for (unsigned u = 0; u < g_cluster.n; u++) g_base[u] = g_own[u]++;
  for (const auto& [_, m] : g_mbarriers)
    for (unsigned t = 0; t < g_cluster.n; t++) g_base[m.copies] = std::max(g_base[m.copies], seen(t, m.copies));
  for (auto& acquired : g_acquired) {
    g_block_acquired.insert(g_block_acquired.end(), acquired.begin(), acquired.end());
    acquired.clear();
  }
  // A fence by every thread before the barrier serves an atomic after it, whoever performs that.
  if (std::count(g_fenced.begin(), g_fenced.end(), Fenced::no)) std::fill(g_fenced.begin(), g_fenced.end(), Fenced::no);
}

void sync_threads(const uint16_t* who, unsigned n) {
  const unsigned all = clocks();
  if (n > kWarp) g_partial = true;
  // Times that a thread of another warp can appear in only after a barrier of part of the block.
  const unsigned low = g_partial ? 0 : who[0] / kWarp * kWarp, high = g_partial ? all : std::min(all, low + kWarp);
  for (unsigned u = low; u < high; u++) {
    uint32_t newest = 0;
    for (unsigned i = 0; i < n; i++) newest = std::max(newest, who[i] == u ? g_own[u] : seen(who[i], u));
    for (unsigned i = 0; i < n; i++) seen(who[i], u) = newest;
  }
  for (unsigned i = 0; i < n; i++) g_own[who[i]]++;
  std::vector<const Release*> acquired;  // by any of them, then by all
  for (unsigned i = 0; i < n; i++)
    acquired.insert(acquired.end(), g_acquired[who[i]].begin(), g_acquired[who[i]].end());
  if (acquired.empty()) return;
  std::sort(acquired.begin(), acquired.end());
  acquired.erase(std::unique(acquired.begin(), acquired.end()), acquired.end());
  for (unsigned i = 0; i < n; i++) g_acquired[who[i]] = acquired;
}

void fence() {
  if (g_thread) g_fenced[me()] = Fenced::yes;
}

void access(const void* p, size_t bytes, bool write, bool atomic, const Loc& loc) {
  if (g_pause) return;
  const Unchecked pause;
  touch({static_cast<const char*>(p), bytes, write, atomic, place_of(loc)});
}

void copy(void* to, const void* from, size_t bytes, const Loc& loc) {
  if (g_pause) return;
  const Unchecked pause;
  const Access read{static_cast<const char*>(from), bytes, false, false, place_of(loc), true};
  const Access write{static_cast<const char*>(to), bytes, true, false, place_of(loc), true};
  bool shared = false;
  const Cell* const source = cells_of(read, &shared);
  touch(read);
  touch(write);
  Cell* const target = cells_of(write, &shared);
  if (source && target)
    for (size_t i = 0; i < bytes / 2; i++) target[i].initialised = source[i].initialised;
}

static void instrumented(const void* p, size_t bytes, bool write, bool atomic, uintptr_t pc) {
  if (g_pause || !bytes) return;
  const Unchecked pause;
  touch({static_cast<const char*>(p), bytes, write, atomic, place_of(pc)});
}

static Cell* target_cells(const char* what, const void* dst, size_t bytes, const Loc& loc) {
  bool shared = false;
  Cell* const cells = cells_of({static_cast<const char*>(dst), bytes, true, false, place_of(loc)}, &shared);
  if (!cells || !shared) fail(loc, "%s: the destination is not in shared memory", what);
  return cells;
}

void async_issue(const AsyncCopy& c) {
  const Unchecked pause;
  touch({static_cast<const char*>(c.dst), c.bytes, true, false, place_of(c.loc)});
  if (c.src_bytes) touch({static_cast<const char*>(c.src), c.src_bytes, false, false, place_of(c.loc)});
  Cell* const cells = target_cells("cp.async", c.dst, c.bytes, c.loc);
  for (unsigned i = 0; i < c.bytes / 2; i++) cells[i].pending = static_cast<uint16_t>(me() + 1);
}

void async_done(const AsyncCopy& c) {
  const Unchecked pause;
  Cell* const cells = target_cells("cp.async", c.dst, c.bytes, c.loc);
  for (unsigned i = 0; i < c.bytes / 2; i++) {
    cells[i].pending = 0;
    cells[i].write.clock = g_own[me()];
  }
}

void mbarrier_init(const uint64_t* p) {
  if (g_mbarriers.size() == most_mbarriers() && !g_mbarriers.contains(p))
    fail({}, "more than %u mbarriers", most_mbarriers());
  const unsigned t = me();
  const auto copies = static_cast<uint16_t>(g_cluster.n + g_mbarriers.size());
  Mbarrier& m = g_mbarriers.try_emplace(p, Mbarrier{copies, 0, 0, {}, {}, {}}).first->second;
  m.by = static_cast<uint16_t>(t);
  m.at = g_own[t];
  m.fenced = false;
  m.arrived.assign(clocks(), 0);
  m.ended.assign(clocks(), 0);
  m.from_others.assign(g_cluster.n, 0);
}
void mbarrier_arrive(const uint64_t* p) {
  Mbarrier& m = g_mbarriers.at(p);
  const unsigned t = me();
  for (unsigned u = 0; u < clocks(); u++) m.arrived[u] = std::max(m.arrived[u], known(t, u));
  if (!g_block->holds(p)) m.from_others[t] = g_own[t];
  g_own[t]++;
}
void mbarrier_init_fence() {
  for (auto& [_, m] : g_mbarriers) m.fenced |= m.by == me();
}
// From another block: it must be known to be initialised.
static void expect_reachable(const uint64_t* p, const Access& a) {
  const auto m = g_mbarriers.find(p);
  if (g_block->holds(p) || m == g_mbarriers.end()) return;
  if (!m->second.fenced || known(me(), m->second.by) < m->second.at)
    report(a, "cluster",
           "the mbarrier was initialised without a fence.mbarrier_init and a barrier of the cluster behind",
           "\n    by " + thread_name(m->second.by));
}
void mbarrier_reached(const uint64_t* p, const Loc& loc) {
  const Unchecked pause;
  expect_reachable(p, {reinterpret_cast<const char*>(p), 8, true, true, place_of(loc)});
}
void mbarrier_phase(const uint64_t* p) {
  Mbarrier& m = g_mbarriers.at(p);
  m.ended = m.arrived;
  std::fill(m.arrived.begin(), m.arrived.end(), 0u);
}
void mbarrier_passed(const uint64_t* p) {
  const Mbarrier& m = g_mbarriers.at(p);
  for (unsigned u = 0; u < clocks(); u++) seen(me(), u) = std::max(seen(me(), u), m.ended[u]);
  g_partial = true;
}

void proxy_fence() {
  const unsigned t = me();
  for (unsigned u = 0; u < g_cluster.n; u++) g_proxy[u] = std::max(g_proxy[u], known(t, u));
  g_own[t]++;
}
void cluster_arrive() {
  const unsigned t = me();
  for (unsigned u = 0; u < clocks(); u++) g_arrived[u] = std::max(g_arrived[u], known(t, u));
  g_own[t]++;
}
void cluster_met() {
  g_met = g_arrived;
  std::fill(g_arrived.begin(), g_arrived.end(), 0u);
}
void cluster_passed() {
  for (unsigned u = 0; u < clocks(); u++) seen(me(), u) = std::max(seen(me(), u), g_met[u]);
  g_partial = true;
}
void async_access(const void* p, size_t bytes, bool write, const Loc& loc) {
  const Unchecked pause;
  touch({static_cast<const char*>(p), bytes, write, false, place_of(loc), false, true});
}
void tensor_source(const void* p, size_t bytes, const Loc& loc) {
  const Unchecked pause;
  touch({static_cast<const char*>(p), bytes, false, false, place_of(loc), true, true});
}
void tensor_landed(const void* to, const void* from, const Loc& loc) {
  bool shared = false;
  const Cell* const source = cells_of({static_cast<const char*>(from), 2, false, false, place_of(loc)}, &shared);
  target_cells("TMA", to, 2, loc)->initialised = source->initialised;
}
void tensor_issue(const TensorCopy& c, size_t bytes) {
  const Mbarrier& m = g_mbarriers.at(c.barrier);
  const Access barrier{reinterpret_cast<const char*>(c.barrier), 8, true, true, place_of(c.loc), false, true};
  expect_reachable(c.barrier, barrier);
  if (m.at > g_proxy[m.by]) report_proxy(barrier, "the mbarrier", m.by, "");
  async_access(c.smem, bytes, true, c.loc);
  Cell* const cells = target_cells("TMA", c.smem, bytes, c.loc);
  for (size_t i = 0; i < bytes / 2; i++) cells[i].pending = static_cast<uint16_t>(m.copies + 1);
}
void tensor_done(const TensorCopy& c, size_t bytes) {
  Mbarrier& m = g_mbarriers.at(c.barrier);
  const Slot landed{g_cluster.serial, g_own[m.copies], place_of(c.loc), m.copies, 3, false, true};
  Cell* const cells = target_cells("TMA", c.smem, bytes, c.loc);
  for (size_t i = 0; i < bytes / 2; i++) {
    cells[i].pending = 0;
    cells[i].write = landed;
  }
  m.arrived[m.copies] = g_own[m.copies]++;
}
void store_reads(const TensorCopy& c, size_t bytes, bool done) {
  async_access(c.smem, bytes, false, c.loc);
  Cell* const cells = target_cells("TMA", c.smem, bytes, c.loc);
  for (size_t i = 0; i < bytes / 2; i++) cells[i].store = done ? Store::none : Store::source;
}
void store_writes(const TensorCopy& c, const void* to, size_t bytes, bool done) {
  if (!done) async_access(to, bytes, true, c.loc);
  bool shared = false;
  const Unchecked pause;
  Cell* const cells = cells_of({static_cast<const char*>(to), bytes, true, false, place_of(c.loc)}, &shared);
  if (!cells || shared) fail(c.loc, "TMA: the target of a store is not in device memory");
  for (size_t i = 0; i < bytes / 2; i++) cells[i].store = done ? Store::none : Store::target;
}
// Every lane knows that the operands have been read, which counts as done by the first.
void products_done(unsigned warp) {
  const unsigned first = warp * kWarp;
  for (unsigned t = first + 1; t < first + kWarp; t++) seen(t, first) = g_own[first];
  g_own[first]++;
}

void add(Alloc& a) { a.shadow = static_cast<Cell*>(std::calloc(cells_for(a.bytes), sizeof(Cell))); }
void remove(Alloc& a) { std::free(a.shadow); }

void host_wrote(const void* p, size_t bytes) {
  const auto* c = static_cast<const char*>(p);
  auto it =
      std::upper_bound(g_allocs.begin(), g_allocs.end(), c, [](const char* q, const Alloc& a) { return q < a.p; });
  if (it == g_allocs.begin() || c >= (--it)->p + it->bytes) return;
  for (size_t i = static_cast<size_t>(c - it->p), end = std::min(i + bytes, it->bytes); i < end; i++) {
    Cell& x = it->shadow[i / 2];
    x.write.block = x.reads[0].block = x.reads[1].block = 0;
    x.initialised |= static_cast<uint8_t>(1u << i % 2);
  }
}

}  // namespace check
}  // namespace cuemu

// ---- what -fsanitize=thread calls
#define PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define HOOK(name, n, write, atomic) \
  extern "C" void __tsan_##name##n(void* p) { cuemu::check::instrumented(p, n, write, atomic, PC); }
#define HOOKS(n)                        \
  HOOK(read, n, false, false)           \
  HOOK(write, n, true, false)           \
  HOOK(unaligned_read, n, false, false) \
  HOOK(unaligned_write, n, true, false) \
  HOOK(volatile_read, n, false, true)   \
  HOOK(volatile_write, n, true, true)
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16) extern "C" void __tsan_read_range(void* p, size_t n) {
  cuemu::check::instrumented(p, n, false, false, PC);
}
extern "C" void __tsan_write_range(void* p, size_t n) { cuemu::check::instrumented(p, n, true, false, PC); }
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t n) {  // clang's copies
  cuemu::check::instrumented(from, n, false, false, PC);
  cuemu::check::instrumented(to, n, true, false, PC);
  return std::memcpy(to, from, n);
}
extern "C" void* __tsan_memset(void* to, int value, size_t n) {
  cuemu::check::instrumented(to, n, true, false, PC);
  return std::memset(to, value, n);
}
// Atomics of launchers (reference counts); those of kernels are functions of cuda_runtime.h.
extern "C" int __tsan_atomic32_fetch_add(volatile int* p, int v, int) {
  return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}

#endif
