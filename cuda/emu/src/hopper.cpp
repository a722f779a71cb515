// See cuemu_hopper.h.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <map>
#include <optional>

#include "check.h"
#include "cuemu_hopper.h"
#include "cuemu_mma.h"

// ---- tensor maps

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank < 2 || rank > 3 || reinterpret_cast<uintptr_t>(data) % 16) return CUDA_ERROR_INVALID_VALUE;
  const uint32_t element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  *map = {.data = static_cast<const char*>(data),
          .size = {1, 1, 1},
          .stride = {element, 0, 0},
          .rank = rank,
          .box = {1, 1, 1},
          .element = element,
          .span = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE  ? 16u
                  : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32u
                                                         : 128u};
  for (unsigned i = 0; i < rank; i++) {
    map->size[i] = sizes[i];
    map->box[i] = box[i];
    if (i > 0) map->stride[i] = strides[i - 1];
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32 || box[i] == 0 || box[i] > 256 || element_strides[i] != 1 ||
        (i > 0 && (map->stride[i] % 16 || map->stride[i] >= uint64_t{1} << 40)) ||
        (i > 1 && map->stride[i] % map->stride[i - 1]))
      return CUDA_ERROR_INVALID_VALUE;
  }
  const bool fits = map->span == 16 ? box[0] * element % 16 == 0 : box[0] * element == map->span;
  return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

namespace cuemu {
namespace {

void expect_arch(const char* what, Loc loc) {
  if (settings().arch != 90 || settings().code != 90) fail(loc, "%s needs the code of compute capability 9.0a", what);
}

// An offset in shared memory at which the swizzle puts a 16-byte chunk.
size_t swizzled(size_t offset, unsigned span) { return offset ^ (offset >> 7 & (span / 16 - 1)) << 4; }

// ---- mbarriers

struct Mbarrier {  // the 64 bits
  int64_t bytes : 22;
  uint64_t arrived : 13, count : 13, phase : 1, magic : 15;
};
static_assert(sizeof(Mbarrier) == 8);
constexpr unsigned kMagic = 0x5a3b;

Mbarrier load(const uint64_t* barrier, const char* what, Loc loc) {
  Mbarrier m;
  std::memcpy(&m, barrier, sizeof m);
  if (m.magic != kMagic) fail(loc, "%s: not an initialised mbarrier", what);
  return m;
}
void store(uint64_t* barrier, Mbarrier m) {
  if (m.arrived == m.count && m.bytes == 0) {
    m.arrived = 0;
    m.phase = !m.phase;
    check::mbarrier_phase(barrier);
    for (Thread& t : g_cluster.holder(barrier)->threads)
      if (t.state == State::at_mbarrier && t.mbarrier == barrier) make_ready(&t);
  }
  std::memcpy(barrier, &m, sizeof m);
}

// ---- tensor copies

std::vector<TensorCopy> g_copies;  // in flight

struct TensorStore {
  TensorCopy copy;
  std::vector<char> box;  // what it adds to, then what it writes
};
// The stores of a thread that have not read shared memory, and the number of them at the end of each group.
struct Stores {
  std::vector<TensorStore> stores;
  std::vector<size_t> groups;
};
std::vector<TensorStore> g_sent;  // by the launch: to be written at its end

size_t box_bytes(const CUtensorMap& m) { return size_t{m.box[0]} * m.box[1] * m.box[2] * m.element; }

// Fails unless the box lies in shared memory and begins where one may.
void expect_box(const TensorCopy& c, const char* what) {
  const size_t bytes = box_bytes(c.map);
  if (!c.block->holds(c.smem) || c.smem + bytes > c.block->smem + c.block->smem_bytes)
    fail(c.loc, "TMA: the %s of %zu bytes is not in dynamic shared memory", what, bytes);
  check_aligned(c.smem, 8 * c.map.span, "TMA, shared memory of a copy", c.loc);
  if (c.at[0] * static_cast<int>(c.map.element) % 16)
    fail(c.loc, "TMA: a box begins at element %d of a row, within 16 bytes: an illegal instruction", c.at[0]);
}

// f(offset in shared memory, before, global address, bytes that exist) for each innermost row of the box; those begin
// `before` bytes behind the row's start.
template <class F>
void for_rows(const TensorCopy& c, F f) {
  const CUtensorMap& m = c.map;
  const auto inside = [&](int i, int64_t at) { return at >= 0 && at < static_cast<int64_t>(m.size[i]); };
  for (uint32_t z = 0; z < m.box[2]; z++)
    for (uint32_t y = 0; y < m.box[1]; y++) {
      const int64_t row = int64_t{c.at[1]} + y, plane = int64_t{c.at[2]} + z;
      const int64_t first = std::max<int64_t>(c.at[0], 0),
                    end = std::min<int64_t>(int64_t{c.at[0]} + m.box[0], static_cast<int64_t>(m.size[0]));
      const bool some = inside(1, row) && inside(2, plane) && first < end;
      f((size_t{z} * m.box[1] + y) * m.box[0] * m.element, static_cast<size_t>(some ? first - c.at[0] : 0) * m.element,
        m.data + (some ? plane * static_cast<int64_t>(m.stride[2]) + row * static_cast<int64_t>(m.stride[1]) +
                             first * int64_t{m.element}
                       : 0),
        static_cast<size_t>(some ? end - first : 0) * m.element);
    }
}

// ---- products

// The registers of a warp that hold its rows of a, and what was in them when the product was issued.
struct LeftRegisters {
  const uint32_t* at[kWarp];
  uint32_t value[kWarp][4];
};
// One warp's share of a 64 x columns product; b has 16 rows.
struct Product {
  uint64_t a, b;  // a: 0 if it is in registers
  int columns;
  bool mn_major_a, mn_major_b, adds;
  float* sum;  // that of its first lane
  Loc loc;
  std::optional<LeftRegisters> left;
};
// The registers that a warp adds to: 16 rows.
struct Sum {
  float* registers[kWarp];
  std::vector<float> value, given;  // of the products so far; what was in the registers when the warp last got them
  unsigned pending = 0;             // products
};
struct Warp {
  std::vector<Product> products;
  std::vector<size_t> groups;  // the number of products at the end of each
  std::map<float*, Sum> sums;
  size_t issued = 0;
  bool fenced = false;  // since the warp last got registers
};
struct BlockState {
  Warp warps[32];
  std::vector<std::pair<uint64_t, uint64_t>> operands[8];  // of the products of each warpgroup
  unsigned registers[32] = {};                             // of each thread, by warp; 0: as the block began
  unsigned free_registers = 0;
  std::vector<CUtensorMap> prefetched;
  std::map<unsigned, Stores> stores;  // by thread
};
BlockState g_states[kMostBlocks];

unsigned warp_id() { return g_thread->linear / kWarp; }
BlockState& state() { return g_states[g_block->rank]; }
Warp& warp() { return state().warps[warp_id()]; }
Stores& stores() { return state().stores[g_thread->linear]; }

// Register i of a lane holds this element of the warp's 16 rows.
float& element(std::vector<float>& value, int columns, unsigned lane, int i) {
  return value[(lane / 4 + static_cast<unsigned>(i) / 2 % 2 * 8) * static_cast<unsigned>(columns) +
               static_cast<unsigned>(i) / 4 * 8 + lane % 4 * 2 + static_cast<unsigned>(i) % 2];
}

// Where a descriptor (PTX ISA, "Matrix Descriptor Format") puts elements.
struct Matrix {
  size_t start, leading, stride;
  unsigned span;
  bool mn_major;
  Matrix(uint64_t d, bool mn_major, Loc loc)
      : start((d & 0x3fff) << 4),
        leading((d >> 16 & 0x3fff) << 4),
        stride((d >> 32 & 0x3fff) << 4),
        span(d >> 62 == 1   ? 128
             : d >> 62 == 2 ? 64
                            : 32),
        mn_major(mn_major) {
    if (d >> 62 == 0) fail(loc, "wgmma: matrices without a swizzle are not emulated");
    if (d >> 49 & 7 || start >> 7 & (span / 16 - 1))
      fail(loc, "wgmma: a matrix with a swizzle of %u bytes begins at byte %zu: within the pattern", span, start);
  }
  // Of 16 bytes: 8 elements along k, from k on (K-major), or along m or n, from `row` on.
  size_t chunk(unsigned row, unsigned k) const {
    const size_t at = mn_major ? start + row * 2 / span * leading + k / 8 * stride + k % 8 * span + row * 2 % span
                               : start + row / 8 * stride + row % 8 * span + k * 2;
    return swizzled(at, span);
  }
};

// f(row, k, offset in shared memory) for the chunks of rows [first, first + rows) of 16 columns.
template <class F>
void for_chunks(const Matrix& m, unsigned first, unsigned rows, F f) {
  for (unsigned r = first; r < first + rows; r += m.mn_major ? 8 : 1)
    for (unsigned k = 0; k < 16; k += m.mn_major ? 1 : 8) f(r - first, k, m.chunk(r, k));
}

// What the running warp's share of a product reads, for the access checker.
void note_operands(const Product& p, bool left_in_registers) {
  const auto note = [&](const Matrix& m, unsigned first, unsigned rows) {
    for_chunks(m, first, rows, [&](unsigned, unsigned, size_t at) {
      if (at + 16 > g_block->smem_bytes) fail(p.loc, "wgmma: byte %zu is behind dynamic shared memory", at);
      check::async_access(g_block->smem + at, 16, false, p.loc);
    });
  };
  if (!left_in_registers) note({p.a, p.mn_major_a, p.loc}, warp_id() % 4 * 16, 16);
  note({p.b, p.mn_major_b, p.loc}, 0, static_cast<unsigned>(p.columns));
}

void multiply(const Product& p, std::vector<float>& sum) {
  const auto read = [&](const Matrix& m, unsigned first, unsigned rows, uint16_t(*to)[16]) {
    for_chunks(m, first, rows, [&](unsigned r, unsigned k, size_t at) {
      uint16_t x[8];
      std::memcpy(x, g_block->smem + at, 16);
      for (unsigned e = 0; e < 8; e++) (m.mn_major ? to[r + e][k] : to[r][k + e]) = x[e];
    });
  };
  uint16_t a[16][16], b[256][16];
  if (!p.adds) std::fill(sum.begin(), sum.end(), 0.f);
  if (p.left) {
    for (unsigned l = 0; l < kWarp; l++)
      for (unsigned i = 0; i < 4; i++)
        std::memcpy(&a[l / 4 + i % 2 * 8][i / 2 * 8 + l % 4 * 2], &p.left->value[l][i], 4);
  } else {
    read({p.a, p.mn_major_a, p.loc}, warp_id() % 4 * 16, 16, a);
  }
  read({p.b, p.mn_major_b, p.loc}, 0, static_cast<unsigned>(p.columns), b);
  for (int first = 0; first < p.columns; first += 8) {
    float d[16][8];
    for (int r = 0; r < 16; r++) std::memcpy(d[r], &sum[static_cast<size_t>(r * p.columns + first)], 32);
    tensor_core(d, a, b + first, 16);
    for (int r = 0; r < 16; r++) std::memcpy(&sum[static_cast<size_t>(r * p.columns + first)], d[r], 32);
  }
}

// A variable without an initialiser, as -ftrivial-auto-var-init=pattern of g++ fills it.
bool never_written(float x) { return __float_as_uint(x) == 0xfefefefe; }

struct WgmmaArg {
  float* d;
  const uint32_t* a;  // or null: in shared memory
  Product product;
};
void issue(void** args, uint32_t) {
  const auto lane = [&](unsigned l) { return static_cast<WgmmaArg*>(args[l]); };
  const Product& p = lane(0)->product;
  Warp& w = warp();
  auto& operands = state().operands[warp_id() / 4];
  for (unsigned l = 1; l < kWarp; l++)
    if (lane(l)->product.a != p.a || lane(l)->product.b != p.b)
      fail(p.loc, "wgmma: lane %u names other matrices than lane 0", l);
  if (w.issued == operands.size()) operands.emplace_back(p.a, p.b);
  if (operands[w.issued++] != std::pair{p.a, p.b})
    fail(p.loc, "wgmma: the warps of a warpgroup name different matrices");
  w.products.push_back(p);
  if (lane(0)->a) {
    if (!w.fenced) fail(p.loc, "wgmma: a factor in registers without a wgmma.fence before");
    LeftRegisters& left = w.products.back().left.emplace();
    for (unsigned l = 0; l < kWarp; l++) {
      left.at[l] = lane(l)->a;
      std::memcpy(left.value[l], left.at[l], sizeof left.value[l]);
    }
  }
  Sum& s = w.sums[p.sum];
  if (!p.adds && !w.fenced) fail(p.loc, "wgmma: sums begin afresh without a wgmma.fence before");
  if (s.pending++ == 0) {
    s.value.resize(static_cast<size_t>(16 * p.columns));
    for (unsigned l = 0; l < kWarp; l++) {
      s.registers[l] = lane(l)->d;
      for (int i = 0; i < p.columns / 2; i++) {
        element(s.value, p.columns, l, i) = s.registers[l][i];
        s.registers[l][i] = __uint_as_float(~0u);
      }
    }
    if (p.adds && std::all_of(s.value.begin(), s.value.end(), never_written))
      fail(p.loc, "wgmma: adds to registers that nothing was written to");
    if (!w.fenced &&
        (s.given.size() != s.value.size() || std::memcmp(s.given.data(), s.value.data(), 4 * s.value.size())))
      fail(p.loc, "wgmma: its registers were written without a wgmma.fence behind");
  }
}
void issue_product(WgmmaArg x) {
  const Loc& loc = x.product.loc;
  expect_arch("wgmma", loc);
  if (g_block->n < (warp_id() / 4 + 1) * 4 * kWarp) fail(loc, "wgmma: the warpgroup has less than four warps");
  if (lane_id() == 0) note_operands(x.product, x.a != nullptr);
  warp_collective(~0u, issue, &x, "wgmma.mma_async", loc);
}
void complete(void** args, uint32_t) {
  Warp& w = warp();
  const unsigned left = *static_cast<unsigned*>(args[0]);
  w.fenced = false;
  if (w.groups.size() <= left) return;
  const size_t k = w.groups.size() - left, n = w.groups[k - 1];
  for (size_t i = 0; i < n; i++) {
    const Product& p = w.products[i];
    for (unsigned l = 0; p.left && l < kWarp; l++)
      if (std::memcmp(p.left->at[l], p.left->value[l], sizeof p.left->value[l]))
        fail(p.loc, "wgmma: the registers of a factor were written before the wait for the product");
    Sum& s = w.sums[p.sum];
    multiply(p, s.value);
    if (--s.pending) continue;
    for (unsigned l = 0; l < kWarp; l++)
      for (int r = 0; r < p.columns / 2; r++) s.registers[l][r] = element(s.value, p.columns, l, r);
    s.given = s.value;
  }
  w.products.erase(w.products.begin(), w.products.begin() + static_cast<ptrdiff_t>(n));
  w.groups.erase(w.groups.begin(), w.groups.begin() + static_cast<ptrdiff_t>(k));
  for (size_t& g : w.groups) g -= n;
  check::products_done(g_thread->id / kWarp);
}

}  // namespace

void mbarrier_init(uint64_t* barrier, unsigned count, Loc loc) {
  expect_arch("mbarrier", loc);  // (8.0 has it, but no kernel for 8.0 uses it)
  check_aligned(barrier, 8, "mbarrier.init", loc);
  if (count == 0 || count > 1024) fail(loc, "mbarrier.init: %u arrivals", count);
  note_access(barrier, 8, true, false, loc);
  check::mbarrier_init(barrier);
  const Mbarrier m{.bytes = 0, .arrived = 0, .count = count, .phase = 0, .magic = kMagic};
  std::memcpy(barrier, &m, sizeof m);
}

unsigned cluster_rank() { return g_block->rank; }
unsigned cluster_size() { return static_cast<unsigned>(g_cluster.blocks.size()); }

// Returns the place in the shared memory of block `rank` of the cluster that p is in that of this one.
template <class T>
static T* in_block(T* p, unsigned rank, const char* what, Loc loc) {
  if (rank >= cluster_size()) fail(loc, "%s: block %u of a cluster that has %u", what, rank, cluster_size());
  const Block& to = g_cluster.blocks[rank];
  if (to.has_returned()) fail(loc, "%s: the memory of %s, which has returned", what, name_of(to).c_str());
  return reinterpret_cast<T*>(to.smem + shared_address(p));
}

void mbarrier_arrive_at(uint64_t* barrier, unsigned rank, Loc loc) {
  mbarrier_arrive(in_block(barrier, rank, "mbarrier.arrive", loc), 0, loc);
}
void* shared_of(unsigned rank, void* p, Loc loc) {
  expect_arch("mapa", loc);
  return in_block(static_cast<char*>(p), rank, "mapa", loc);
}
void mbarrier_arrive(uint64_t* barrier, unsigned expected_bytes, Loc loc) {
  check::mbarrier_reached(barrier, loc);
  note_access(barrier, 8, true, true, loc);
  Mbarrier m = load(barrier, "mbarrier.arrive", loc);
  if (m.arrived == m.count)
    fail(loc, "mbarrier.arrive: more than the %u arrivals of a phase", static_cast<unsigned>(m.count));
  if (m.bytes + int64_t{expected_bytes} >= 1 << 20) fail(loc, "mbarrier.arrive: a phase expects less than 2^20 bytes");
  m.bytes += int64_t{expected_bytes};
  m.arrived++;
  check::mbarrier_arrive(barrier);
  store(barrier, m);
}

void mbarrier_wait(uint64_t* barrier, unsigned parity, Loc loc) {
  note_access(barrier, 8, false, true, loc);
  Thread* me = g_thread;
  while (load(barrier, "mbarrier.try_wait", loc).phase == parity) {
    me->what = "mbarrier.try_wait";
    me->loc = loc;
    me->mask = parity;
    me->mbarrier = barrier;
    me->state = State::at_mbarrier;
    suspend();
  }
  check::mbarrier_passed(barrier);
}

std::string mbarrier_state(const Thread& t) {
  const Mbarrier m = load(t.mbarrier, "mbarrier", {});
  const auto byte = reinterpret_cast<const char*>(t.mbarrier) - t.block->smem;
  return ", for the mbarrier at byte " + std::to_string(byte) + ": " + std::to_string(m.count - m.arrived) +
         " more arrivals and " +
         (m.bytes < 0 ? std::to_string(-m.bytes) + " bytes that it did not expect"
                      : std::to_string(m.bytes) + " more bytes");
}

void proxy_fence() { check::proxy_fence(); }
void mbarrier_init_fence() { check::mbarrier_init_fence(); }

void cluster_arrive(Loc loc) {
  expect_arch("barrier.cluster", loc);
  Cluster& c = g_cluster;
  if (g_thread->arrived) fail(loc, "barrier.cluster.arrive: the thread has not waited for the barrier before");
  g_thread->arrived = true;
  g_thread->cluster_turn = c.turn;
  check::cluster_arrive();
  if (++c.arrived < c.n) return;
  c.arrived = 0;
  c.turn++;
  check::cluster_met();
  for (Block& b : c.blocks)
    for (Thread& t : b.threads)
      if (t.state == State::at_cluster) make_ready(&t);
}
void cluster_wait(Loc loc) {
  Thread* const me = g_thread;
  if (!me->arrived) fail(loc, "barrier.cluster.wait: the thread has not arrived");
  while (g_cluster.turn == me->cluster_turn) {
    me->what = "barrier.cluster.wait";
    me->loc = loc;
    me->mask = 0;
    me->state = State::at_cluster;
    suspend();
  }
  me->arrived = false;
  check::cluster_passed();
}

void set_registers(unsigned count, bool more, Loc loc) {
  const char* const what = more ? "setmaxnreg.inc" : "setmaxnreg.dec";
  expect_arch(what, loc);
  constexpr unsigned kAll = 65536;  // of a multiprocessor
  const unsigned at_first = std::min(kAll / g_block->n, 255u) / 8 * 8;
  BlockState& s = state();
  Thread* const me = g_thread;
  unsigned& mine = s.registers[warp_id()];
  if (count % 8 || count < 24 || count > 256) fail(loc, "%s: %u registers", what, count);
  warp_collective(
      ~0u, [](void**, uint32_t) {}, nullptr, what, loc);
  if (mine == count) return;  // another lane has taken or given them
  if (mine == 0) mine = at_first;
  if (more ? count < mine : count > mine) fail(loc, "%s: from %u to %u registers", what, mine, count);
  const auto needed = [&] { return mine < count ? (count - mine) * kWarp : 0; };
  while (s.free_registers < needed()) {
    me->what = what;
    me->loc = loc;
    me->mask = 0;
    me->state = State::at_registers;
    suspend();
  }
  s.free_registers += mine * kWarp - count * kWarp;
  mine = count;
  for (Thread& t : g_block->threads)
    if (t.state == State::at_registers) make_ready(&t);
}

void prefetch_map(const CUtensorMap& map) {
  if (map.rank < 2 || map.rank > 3) fail({}, "prefetch.tensormap: not a tensor map");
  state().prefetched.push_back(map);  // (a parameter of the kernel: each thread has a copy)
}

void tensor_copy(void* smem, const CUtensorMap& map, const int (&at)[3], uint64_t* barrier, unsigned blocks, Loc loc) {
  expect_arch("TMA", loc);
  expect_awaited("a tensor copy", loc);
  if (blocks == 0 || blocks >> cluster_size())
    fail(loc, "TMA: a copy to blocks %04x of a cluster that has %u", blocks, cluster_size());
  const size_t bytes = box_bytes(map);
  for (unsigned rank = 0; rank < cluster_size(); rank++) {
    if (!(blocks >> rank & 1)) continue;
    const TensorCopy c{in_block(static_cast<char*>(smem), rank, "TMA", loc),
                       map,
                       {at[0], at[1], at[2]},
                       in_block(barrier, rank, "TMA", loc),
                       &g_cluster.blocks[rank],
                       rank != g_block->rank,
                       loc};
    load(c.barrier, "TMA", loc);
    expect_box(c, "target");
    for_rows(c, [&](size_t, size_t, const char* from, size_t valid) {
      if (valid) check::tensor_source(from, valid, loc);
    });
    check::tensor_issue(c, bytes);
    std::memset(c.smem, 0xff, bytes);
#ifdef CUEMU_ASAN
    __asan_poison_memory_region(c.smem, bytes);
#endif
    g_copies.push_back(c);
  }
  g_calls.tensor_copies++;
  const auto& warm = state().prefetched;
  g_calls.cold_copies += std::find(warm.begin(), warm.end(), map) == warm.end();
}

bool copies_in_flight() { return !g_copies.empty(); }
bool copies_in_flight(const Block& to) {
  return std::any_of(g_copies.begin(), g_copies.end(), [&](const TensorCopy& c) { return c.block == &to; });
}

void land_copy() {
  const size_t i = g_cluster.order == Order::random ? draw() % g_copies.size() : 0;
  const TensorCopy c = g_copies[i];
  g_copies.erase(g_copies.begin() + static_cast<ptrdiff_t>(i));
  const check::Unchecked pause;
  const size_t bytes = box_bytes(c.map);
#ifdef CUEMU_ASAN
  __asan_unpoison_memory_region(c.smem, bytes);
#endif
  Mbarrier m = load(c.barrier, "TMA", c.loc);
  if (m.bytes < static_cast<int64_t>(bytes) && !c.from_other)  // its block cannot know whether the other expects it yet
    fail(c.loc, "TMA: a copy of %zu bytes for an mbarrier that expects %d more", bytes, static_cast<int>(m.bytes));
  check::tensor_done(c, bytes);
  const auto target = static_cast<size_t>(c.smem - c.block->smem);
  for_rows(c, [&](size_t row, size_t before, const char* from, size_t valid) {
    char line[1024] = {};
    if (valid) std::memcpy(line + before, from, valid);
    for (unsigned b = 0; b < c.map.box[0] * c.map.element; b += 16) {
      char* const to = c.block->smem + swizzled(target + row + b, c.map.span);
      std::memcpy(to, line + b, 16);
      for (unsigned i = b; i < b + 16; i += 2)
        if (i >= before && i < before + valid) check::tensor_landed(to + (i - b), from + (i - before), c.loc);
    }
  });
  m.bytes -= static_cast<int64_t>(bytes);
  store(c.barrier, m);
}

float add_flushing(float x, float y) {
  const auto flushed = [](float v) { return std::fabs(v) < FLT_MIN ? std::copysign(0.f, v) : v; };
  return flushed(flushed(x) + flushed(y));
}

void tensor_store(const CUtensorMap& map, const int (&at)[3], const void* smem, bool adds, Loc loc) {
  expect_arch("TMA", loc);
  expect_awaited("a tensor store", loc);
  char* const from = static_cast<char*>(const_cast<void*>(smem));
  const TensorCopy c{from, map, {at[0], at[1], at[2]}, nullptr, g_block, false, loc};
  expect_box(c, "source");
  check::store_reads(c, box_bytes(map), false);
  TensorStore s{c, std::vector<char>(adds ? box_bytes(map) : 0)};
  for_rows(c, [&](size_t row, size_t before, const char* to, size_t bytes) {
    if (bytes) {
      check::store_writes(c, to, bytes, false);
      if (adds) std::memcpy(&s.box[row + before], to, bytes);
      std::memset(const_cast<char*>(to), 0xff, bytes);
    }
  });
  stores().stores.push_back(std::move(s));
}

void store_commit() {
  Stores& s = stores();
  s.groups.push_back(s.stores.size());
}

void store_wait_read(unsigned left) {
  Stores& s = stores();
  if (s.groups.size() <= left) return;
  const size_t k = s.groups.size() - left, n = s.groups[k - 1];
  for (size_t i = 0; i < n; i++) {
    const auto& [c, old] = s.stores[i];
    std::vector<char> box(box_bytes(c.map));
    check::store_reads(c, box.size(), true);
    const auto from = static_cast<size_t>(c.smem - g_block->smem);
    for (size_t b = 0; b < box.size(); b += 16)
      std::memcpy(&box[b], g_block->smem + swizzled(from + b, c.map.span), 16);
    for (size_t b = 0; b < old.size(); b += sizeof(float)) {
      float x, y;
      std::memcpy(&x, &old[b], sizeof x);
      std::memcpy(&y, &box[b], sizeof y);
      x = add_flushing(x, y);
      std::memcpy(&box[b], &x, sizeof x);
    }
    g_sent.push_back({c, std::move(box)});
  }
  s.stores.erase(s.stores.begin(), s.stores.begin() + static_cast<ptrdiff_t>(n));
  s.groups.erase(s.groups.begin(), s.groups.begin() + static_cast<ptrdiff_t>(k));
  for (size_t& g : s.groups) g -= n;
}

void hopper_launch_end(bool ok) {
  if (!ok) g_sent.clear();
  for (const TensorStore& x : g_sent)
    for_rows(x.copy, [&](size_t row, size_t before, const char* to, size_t bytes) {
      if (bytes) std::memcpy(const_cast<char*>(to), &x.box[row + before], bytes);
      if (bytes) check::store_writes(x.copy, to, bytes, true);
    });
  g_sent.clear();
}

struct StmatrixArg {
  void* row;
  const uint32_t* r;
};
static void stmatrix_run(void** args, uint32_t) {
  const auto lane = [&](unsigned l) { return static_cast<StmatrixArg*>(args[l]); };
  for (unsigned i = 0; i < 4; i++)
    for (unsigned j = 0; j < 8; j++)
      for (unsigned e = 0; e < 4; e++)
        std::memcpy(static_cast<char*>(lane(8 * i + j)->row) + 4 * e, &lane(4 * j + e)->r[i], 4);
}
void stmatrix(void* row, const uint32_t (&r)[4], Loc loc) {
  expect_arch("stmatrix", loc);
  check_aligned(row, 16, "stmatrix", loc);
  note_access(row, 16, true, false, loc);
  StmatrixArg a{row, r};
  warp_collective(~0u, stmatrix_run, &a, "stmatrix", loc);
}

uint64_t shared_address(const void* p) { return static_cast<uint64_t>(static_cast<const char*>(p) - g_block->smem); }

void wgmma(float* d, int columns, uint64_t a, uint64_t b, bool mn_major_a, bool mn_major_b, bool adds, Loc loc) {
  issue_product({d, nullptr, {a, b, columns, mn_major_a, mn_major_b, adds, d, loc, {}}});
}
void wgmma(float* d, int columns, const uint32_t* a, uint64_t b, bool mn_major_b, Loc loc) {
  issue_product({d, a, {0, b, columns, false, mn_major_b, true, d, loc, {}}});
}

// These are executed by warps: the first lane counts.
void wgmma_fence() {
  if (lane_id() == 0) warp().fenced = true;
}
void wgmma_commit() {
  Warp& w = warp();
  if (lane_id() == 0) w.groups.push_back(w.products.size());
}
void wgmma_wait(unsigned left, Loc loc) {
  const Warp& w = warp();
  if (lane_id() == 0 && w.groups.size() > left)  // the operands may have been read as late as now
    for (size_t i = 0; i < w.groups[w.groups.size() - 1 - left]; i++)
      note_operands(w.products[i], w.products[i].left.has_value());
  warp_collective(~0u, complete, &left, "wgmma.wait_group", loc);
}

void hopper_cluster_begin() {
  g_copies.clear();
  for (unsigned rank = 0; rank < cluster_size(); rank++) g_states[rank] = BlockState{};
}

void expect_nothing_in_flight(const Thread& t) {
  const BlockState& state = g_states[t.block->rank];
  if (const auto s = state.stores.find(t.linear); s != state.stores.end() && !s->second.stores.empty())
    fail(s->second.stores[0].copy.loc, "thread ended with a tensor store that may yet have to read shared memory");
  const auto& products = state.warps[t.linear / kWarp].products;
  if (!products.empty()) fail(products[0].loc, "thread ended with wgmma products that it never waited for");
  if (t.arrived) fail({}, "thread ended without a wait for the barrier of the cluster at which it arrived");
  if (!t.block->has_returned()) return;
  for (unsigned w = 0; w < t.block->n / kWarp; w++)
    if (state.registers[w] != state.registers[w / 4 * 4])
      fail({}, "setmaxnreg: warps %u and %u of a warpgroup have another number of registers", w / 4 * 4, w);
  check::block_returned();
  if (copies_in_flight(*t.block))
    fail({}, "TMA: %s ended before its copies landed: nobody waited for them", name_of(*t.block).c_str());
}

}  // namespace cuemu
