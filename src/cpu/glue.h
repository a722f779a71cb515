// Shared code of the `cpu` ops: checks of indices, scratch memory, division of work over threads.
#pragma once
#include <algorithm>

#include "base/thread_pool.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "ops/linear.h"

namespace pare::cpu {

#define X(op, Args) void op(const Args& a, Stream);
PARE_OPS(X)
#undef X
// Norms the rows of x, if there is a norm.
void norm_rows(const RowNorm& norm, const Tensor& x, Stream stream);

// The data of `t`, each of the elements in [0, limit), else std::logic_error naming op and tensor.
int32_t* index(const char* op, const char* name, const Tensor& t, int64_t limit);

// `floats` of this thread's own memory, 64-byte aligned, valid until the thread asks again.
float* scratch(int64_t floats);

// Work is cut so that a piece takes at least this long: handing one to another thread costs 1 to 2.
constexpr double kPieceMicroseconds = 6;

// Calls f(Interval) for ranges of [0, n), each item taking about `nanoseconds`.
template <class F>
void parallel(int64_t n, double nanoseconds, F f) {
  const int64_t grain = static_cast<int64_t>(kPieceMicroseconds * 1e3 / nanoseconds) + 1;
  parallel_for(n, grain, [&](int64_t begin, int64_t end) { f(Interval{begin, end}); });
}

// Calls f(Interval) for even shares of [0, n) in whole units, as many as suit the threads and the work (`nanoseconds`
// in all).
template <class F>
void parallel_shares(int64_t n, int64_t unit, double nanoseconds, F f) {
  const int64_t units = (n + unit - 1) / unit;
  const int64_t worth = static_cast<int64_t>(nanoseconds / (kPieceMicroseconds * 1e3));
  int64_t shares = std::min<int64_t>(threads(), worth);
  if (worth > 32 * shares && units > 16 * shares) shares *= 4;  // large: uneven progress levels out
  shares = std::clamp<int64_t>(shares, 1, units);
  const auto cut = [&](int64_t i) { return std::min(units * i / shares * unit, n); };
  parallel_for(shares, 1, [&](int64_t begin, int64_t end) { f(Interval{cut(begin), cut(end)}); });
}

}  // namespace pare::cpu
