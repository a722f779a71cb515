// One pool of threads for each thread that calls: a process has one, but for ranks that are threads (comm/threads.h).
// Threads divide outputs, never a sum, so results do not depend on how many there are.
#pragma once
#include <cstdint>
#include <type_traits>

namespace pare {

// Sets the caller's number of threads, itself included; 0: one per core.  Must not be called while parallel_for runs.
void set_threads(int n);
int threads();

using RangeFn = void (*)(void* context, int64_t begin, int64_t end);
void parallel_ranges(int64_t n, int64_t grain, RangeFn fn, void* context);

// Calls fn(begin, end) for consecutive ranges that cover [0, n), each of at least `grain` (but the last), on the pool.
// Runs inline when n <= grain or when called from a pool thread.  Exceptions reach the caller.
template <class F>
void parallel_for(int64_t n, int64_t grain, F&& fn) {
  using Fn = std::remove_reference_t<F>;
  parallel_ranges(
      n, grain, [](void* c, int64_t b, int64_t e) { (*static_cast<Fn*>(c))(b, e); },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

}  // namespace pare
