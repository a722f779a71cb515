// Rows of logits for the ops on them (logits.cu, logits_sample.cu): distribution, by the tiles of list.h, and order by
// size.  A block works on a row.  V is 2^20 at most: the sums of all tiles of a row lie in shared memory.
//
//   row     | tile 0: 128 ids | tile 1          | tile 2          | ...
//   lane j of half a warp: ids j, j + 16, .., j + 112     -> maximum, sum, weighted sum of each tile
//   all threads: factors exp(maximum of the tile - maximum of the row); two lanes: the sums of the row, tiles ascending
//
// The product of the LM head may have made the sums of the tiles (VocabSums).  Exponentials are relative to the tile's
// maximum, so one pass over the logits gives maxima and sums.
#pragma once
#include <type_traits>

#include "ops/logits.h"
#include "runtime/common.cuh"
#include "vocab.cuh"

namespace pare::PARE_CUDA {

constexpr int kThreads = 256, kWarps = kThreads / 32, kLanes = 16;
constexpr int kEach = 4, kStep = kEach * kThreads;  // elements of a thread, side by side, and of all
constexpr int kIds = kVocabTile / kLanes;           // of a tile in a lane
constexpr int kTilesAtATime = kThreads / kLanes;
constexpr int64_t kMostIds = 1 << 20;

// Numbers that are larger for larger x, and among equal ones for smaller ids; -0 counts as 0.
__device__ __forceinline__ uint64_t rank(float x, int id) {
  return uint64_t{ordered(x)} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

// kEach elements of a row, to or from memory at once.
template <class T>
struct alignas(kEach * sizeof(T)) Some {
  T v[kEach];
};
template <class T>
using Words = std::conditional_t<sizeof(T) == 2, uint2, uint4>;
template <class T>
__device__ __forceinline__ Words<T> words_of(const Some<T>& x) {
  Words<T> w;
  memcpy(&w, &x, sizeof w);
  return w;
}
template <class T>
__device__ __forceinline__ Some<T> some_of(const Words<T>& w) {
  Some<T> x;
  memcpy(&x, &w, sizeof x);
  return x;
}
template <class T>
__device__ __forceinline__ bool at_once(const T* row, int size) {
  return reinterpret_cast<uintptr_t>(row) % sizeof(Some<T>) == 0 && size % kEach == 0;
}

// z = logits / temperature
template <class T>
struct Scaled {
  const T* logits;
  float temperature;
  __device__ __forceinline__ float at(int i) const { return scaled(to_float(logits[i])); }
  __device__ __forceinline__ float scaled(float x) const { return temperature == 1 ? x : x / temperature; }
  // The logits from `first` on, as they lie: taken apart at the load, they would be waited for there.
  __device__ __forceinline__ Words<T> load(int first, int size) const {
    if (first < size && at_once(logits, size)) return *reinterpret_cast<const Words<T>*>(logits + first);
    Some<T> x{};
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (first + e < size) x.v[e] = logits[first + e];
    return words_of(x);
  }
};

// Returns, in every thread, op over the values of all threads.  `room` has kWarps elements.
template <class V, class Op>
__device__ V block_reduce(V v, V* room, Op op) {
  for (int o = 16; o > 0; o /= 2) v = op(v, __shfl_xor_sync(kAllLanes, v, o));
  __syncthreads();  // the values of the last call have been read
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  v = room[0];
  for (int w = 1; w < kWarps; w++) v = op(v, room[w]);
  return v;
}

struct Distribution {
  float max, sum, log_sum, weighted;  // weighted: sum of (z - max) exp(z - max)
  __device__ float logprob(float z) const { return z - max - log_sum; }
  __device__ float entropy() const { return log_sum - weighted / sum; }
};

// Returns, in every lane, a row sum from its lanes: the last step of it.
__device__ __forceinline__ float tree(float lane_sum) {
  for (int o = kLanes / 2; o > 0; o /= 2) lane_sum += __shfl_xor_sync(kAllLanes, lane_sum, o);
  return lane_sum;
}

// Calls f(tile) for each tile by half a warp.  Whole warps call it, so one tile may lie past the last.
template <class F>
__device__ __forceinline__ void for_tiles(int vocabulary, F f) {
  const int count = ceil_div(vocabulary, kVocabTile);
  for (int begin = threadIdx.x / 32 * 2; begin < count; begin += kTilesAtATime) f(begin + threadIdx.x % 32 / kLanes);
}

// Three numbers of each tile of the vocabulary, in dynamic shared memory.
struct Tiles {
  int count;
  float *top, *sum, *weighted;  // [count]
  __device__ explicit Tiles(int vocabulary)
      : count(ceil_div(vocabulary, kVocabTile)), top(dynamic_smem<float>()), sum(top + count), weighted(sum + count) {}
  static size_t bytes(int64_t vocabulary) { return 3 * sizeof(float) * vocab_tiles(vocabulary); }
};

// Calls put(tile, largest z, sum, weighted) in one lane for each tile, with the numbers of VocabSums.
template <class T, class Put>
__device__ __forceinline__ void sum_tiles(const Scaled<T>& z, int vocabulary, Put put) {
  const int lane = threadIdx.x % kLanes;
  T next[kIds];  // of the tile that comes next: loaded while one is computed
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < kIds; i++) {
      const int id = tile * kVocabTile + lane + kLanes * i;
      next[i] = id < vocabulary ? z.logits[id] : from_float<T>(-INFINITY);
    }
  };
  load(threadIdx.x / kLanes);
  for_tiles(vocabulary, [&](int tile) {
    float x[kIds], m = -INFINITY;
#pragma unroll
    for (int i = 0; i < kIds; i++) {
      x[i] = z.scaled(to_float(next[i]));
      m = fmaxf(m, x[i]);
    }
    load(tile + kTilesAtATime);
    for (int o = kLanes / 2; o > 0; o /= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, o));
    const float base = base_of_tile(m);
    float sum = 0, weighted = 0;
#pragma unroll
    for (int i = 0; i < kIds; i++) add_to_tile(sum, weighted, x[i] - base);  // +0 after the last
    sum = tree(sum);
    weighted = tree(weighted);
    if (lane == 0 && tile * kVocabTile < vocabulary) put(tile, m, sum, weighted);
  });
}

// Returns a row's Distribution in every thread and overwrites the numbers of tiles.  `sums`: the row's of VocabSums, or
// null.  Without kEntropy there is no weighted sum, and `top` keeps the maximum of each tile.
template <bool kEntropy, class T>
__device__ Distribution distribution(const Scaled<T>& z, int vocabulary, const float* sums) {
  __shared__ float room[kWarps], totals[2];
  const Tiles tiles(vocabulary);
  float top = -INFINITY;
  const auto put = [&](int tile, float m, float sum, float weighted) {
    top = fmaxf(top, m);
    tiles.top[tile] = m;
    tiles.sum[tile] = sum;
    tiles.weighted[tile] = weighted;
  };
  if (sums)
    for (int t = threadIdx.x; t < tiles.count; t += kThreads) put(t, sums[3 * t], sums[3 * t + 1], sums[3 * t + 2]);
  else
    sum_tiles(z, vocabulary, put);
  Distribution d{};
  d.max = block_reduce(top, room, [](float a, float b) { return fmaxf(a, b); });
  float* const factor = kEntropy ? tiles.top : tiles.weighted;
  for (int t = threadIdx.x; t < tiles.count; t += kThreads) {
    const float below = tiles.top[t] - d.max;
    if (kEntropy && tiles.sum[t] > 0) tiles.weighted[t] = fmaf(below, tiles.sum[t], tiles.weighted[t]);
    factor[t] = exp_at_most_1(below);
  }
  __syncthreads();
  if (threadIdx.x < (kEntropy ? 2 : 1)) {
    const float* const parts = threadIdx.x ? tiles.weighted : tiles.sum;
    float total = 0;
#pragma unroll 8
    for (int t = 0; t < tiles.count; t++) total = fmaf(parts[t], factor[t], total);
    totals[threadIdx.x] = total;
  }
  __syncthreads();
  d.sum = totals[0];
  d.weighted = kEntropy ? totals[1] : 0.f;
  d.log_sum = log_f32(d.sum);
  return d;
}

// The rows of VocabSums; null: the ops sum up the tiles themselves.
struct RowSums {
  const float* tiles;
  __device__ __forceinline__ const float* row(int64_t r, int vocabulary) const {
    return tiles ? tiles + r * 3 * (ceil_div(vocabulary, kVocabTile) + 1) : nullptr;
  }
};

// Returns the largest rank r of an element of type T with enough(r), which is true up to there and false beyond.
template <class T, class Enough>
__device__ uint64_t largest(Enough enough) {
  uint64_t r = 0;
  const auto search = [&](int last, int first) {
    for (int bit = last; bit >= first; bit--) {
      const uint64_t next = r | uint64_t{1} << bit;
      if (enough(next)) r = next;
    }
  };
  search(63, 64 - 8 * static_cast<int>(sizeof(T)));
  if (sizeof(T) == 2 && !(r >> 63)) r |= uint64_t{0xffff} << 32;  // the rest of a negative number
  r |= ~static_cast<uint32_t>(kMostIds - 1);                      // of any id
  search(19, 0);
  return r;
}
static_assert(kMostIds == 1 << 20);

// Returns, in every thread, the least rank of the top_k largest logits.
template <class T>
__device__ uint64_t least_of_largest(const T* logits, int vocabulary, int top_k) {
  __shared__ int counts[kWarps];
  return largest<T>([&](uint64_t r) {
    int n = 0;
    for (int i = threadIdx.x; i < vocabulary; i += kThreads) n += rank(to_float(logits[i]), i) >= r;
    return block_reduce(n, counts, [](int a, int b) { return a + b; }) >= top_k;
  });
}

// Returns VocabSums for kernels of type T; f32 ignores them.
template <class T>
RowSums sums_of(const Tensor& tiles) {
  return {std::is_same_v<T, bf16> && tiles ? tiles.as<float>() : nullptr};
}

inline int64_t rows_of(const char* op, const Tensor& logits) {
  expect(logits.shape[1] > 0 && logits.shape[1] <= kMostIds, op, ": logits ", logits, " have more than the ", kMostIds,
         " columns whose sums fit in shared memory");
  return logits.shape[0];
}

}  // namespace pare::PARE_CUDA
