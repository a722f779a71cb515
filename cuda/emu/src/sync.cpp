// Barriers, warp collectives and asynchronous copies: what the threads of a block wait for.
#include <cstring>

#include "check.h"

namespace cuemu {

void warp_memory_order(void**, uint32_t) {}

void warp_collective(uint32_t mask, WarpOp op, void* arg, const char* what, Loc loc) {
  Block& b = *g_block;
  Thread* me = g_thread;
  const unsigned lane = me->linear % kWarp, base = me->linear - lane, w = me->linear / kWarp;
  if (!(mask >> lane & 1)) fail(loc, "%s: lane %u calls it with mask %08x, which leaves itself out", what, lane, mask);
  me->mask = mask;
  me->op = op;
  me->arg = arg;
  me->what = what;
  me->loc = loc;
  me->state = State::at_warp_op;
  if (base + kWarp > b.n && mask >> (b.n - base))
    fail(loc, "%s: mask %08x names lanes that do not exist: the warp has %u", what, mask, b.n - base);
  if (mask & b.returned[w])
    fail(loc, "%s: mask %08x names lanes %08x, which have returned", what, mask, mask & b.returned[w]);
  b.at_op[w] |= 1u << lane;
  if ((b.at_op[w] & mask) != mask) return suspend();
  void* args[kWarp];
  Thread* who[kWarp];
  unsigned n = 0;
  for (unsigned l = 0; l < kWarp; l++) {
    if (!(mask >> l & 1)) continue;
    Thread& t = b.threads[base + l];
    if (t.mask != mask) return suspend();  // it waits for others first
    if (t.op != op)
      fail(loc, "warp function mismatch: lane %u calls %s, lane %u calls %s at %s:%d", lane, what, l, t.what,
           file_name(t.loc), t.loc.line);
    args[l] = t.arg;
    who[n++] = &t;
  }
  b.at_op[w] &= ~mask;
  check::meet(me->id, me->id);
  if (op == warp_memory_order) {
    uint16_t ids[kWarp];
    for (unsigned i = 0; i < n; i++) ids[i] = static_cast<uint16_t>(who[i]->id);
    check::sync_threads(ids, n);
  } else {
    const check::Unchecked pause;
    op(args, mask);
  }
  for (unsigned i = 0; i < n; i++) {
    Thread* t = who[g_cluster.order == Order::reverse ? i : n - 1 - i];
    if (t != me) make_ready(t);
  }
  me->state = State::running;
}

void block_barrier(int id, unsigned count, bool wait, const char* what, Loc loc) {
  Block& block = *g_block;
  Thread* me = g_thread;
  Barrier& b = block.barriers[id];
  const unsigned expected = count ? count : block.n;
  if (expected % kWarp && expected != block.n)
    fail(loc, "%s: the thread count %u is not a multiple of the warp size", what, expected);
  if (b.arrived && b.expected != expected)
    fail(loc, "%s %d: expects %u threads here, %u elsewhere", what, id, expected, b.expected);
  b.expected = expected;
  me->what = what;
  me->loc = loc;
  me->barrier = id;
  me->mask = 0;
  if (b.arrived++ == 0)
    b.first = me;
  else if (loc.line != b.first->loc.line)
    b.odd = me;
  if (expected != block.n) b.who.push_back(static_cast<uint16_t>(me->id));
  if (wait) me->state = State::at_barrier;
  if (b.arrived < expected) {
    if (wait) suspend();
    return;
  }
  if (id == 0 && b.odd) {  // named barriers may meet from different places; __syncthreads may not
    const Thread* other = me->loc.line == b.odd->loc.line ? b.first : b.odd;
    fail(loc, "divergent barrier: thread %u waits in the %s at %s:%d", other->linear, other->what,
         file_name(other->loc), other->loc.line);
  }
  if (expected == block.n) {
    check::sync_block();
    check::meet(block.threads.front().id, block.threads.back().id);
  } else
    check::sync_threads(b.who.data(), static_cast<unsigned>(b.who.size()));
  me->state = State::running;
  for (unsigned i = 0; i < block.n; i++) {
    Thread& t = block.threads[g_cluster.order == Order::reverse ? i : block.n - 1 - i];
    if (t.state == State::at_barrier && t.barrier == id) make_ready(&t);
  }
  b = Barrier{};
}

void check_aligned(const void* p, size_t align, const char* what, Loc loc) {
  if (reinterpret_cast<uintptr_t>(p) % align) fail(loc, "%s: address %p is not %zu-byte aligned", what, p, align);
}

void async_copy(void* smem, const void* gmem, unsigned bytes, unsigned src_bytes, Loc loc) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail(loc, "cp.async: %u bytes", bytes);
  check_aligned(smem, bytes, "cp.async", loc);
  check_aligned(gmem, bytes, "cp.async", loc);
  expect_awaited("cp.async", loc);
  const AsyncCopy copy{smem, gmem, bytes, src_bytes, loc};
  check::async_issue(copy);
  std::memset(smem, 0xff, bytes);  // NaNs until it lands
#ifdef CUEMU_ASAN
  char probe[16];
  std::memcpy(probe, gmem, src_bytes);  // out of bounds now rather than when it lands
  __asan_poison_memory_region(smem, bytes);
#endif
  g_thread->copies.push_back(copy);
}

void complete_copies(Thread* t, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const AsyncCopy& c = t->copies[i];
#ifdef CUEMU_ASAN
    __asan_unpoison_memory_region(c.dst, c.bytes);
#endif
    check::async_done(c);
    if (c.src_bytes) std::memcpy(c.dst, c.src, c.src_bytes);
    std::memset(static_cast<char*>(c.dst) + c.src_bytes, 0, c.bytes - c.src_bytes);
  }
  t->copies.erase(t->copies.begin(), t->copies.begin() + static_cast<ptrdiff_t>(n));
}

void note_access(const void* p, size_t bytes, bool write, bool atomic, Loc loc) {
  check::access(p, bytes, write, atomic, loc);
}
void note_fence() { check::fence(); }
void copy_as_is(void* to, const void* from, size_t bytes, Loc loc) {
  check::copy(to, from, bytes, loc);
  std::memcpy(to, from, bytes);
}

void async_commit() { g_thread->groups.push_back(g_thread->copies.size()); }

void async_wait(unsigned left) {
  Thread* t = g_thread;
  if (t->groups.size() <= left) return;
  const size_t k = t->groups.size() - left, n = t->groups[k - 1];
  complete_copies(t, n);
  t->groups.erase(t->groups.begin(), t->groups.begin() + static_cast<ptrdiff_t>(k));
  for (size_t& x : t->groups) x -= n;
}

}  // namespace cuemu
