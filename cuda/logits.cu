// Ops on logits: log-probs, overlaps, losses and samples (ops/logits.h: Logprob, OverlapProbs,
// LogitsLoss, Truncate, ListKept, KeepListed, Sample).
//
// logits [R, V] act, overwritten by their gradient in logits_loss; per row a token or a log-prob, an entropy and
// losses, f32, overwritten.  A thread block works on a row.  V is 2^20 at most: the sums of all tiles of a row lie in
// shared memory.
//
// Order: list.h's of sums over the vocabulary, so the log-prob of a token has the same bits in all of them, and in f32
// those of the `cpu` table.  The product of the LM head has summed up the tiles of 128 ids (VocabSums); else half a
// warp does a tile, lane j the ids j + 16 i.  Exponentials are relative to the tile's maximum, so one pass over the
// logits gives both.  Then all threads compute the factors that make the sums of tiles relative to the maximum of the
// row, and two lanes add them up.
//
// Bytes: with VocabSums 12 a tile, to which a loss adds all logits, read once, and a draw those of tiles that can win;
// else logits once more; lists twice; 36 times in bf16 for each of top_k and top_p (from L2 for the most part).
// Limited by the exponentials, with few rows by the chains of sums, V / 128 additions long.
#include <type_traits>

#include "ops/token_loss.h"
#include "rng.cuh"
#include "runtime/common.cuh"
#include "vocab.cuh"

namespace pare::PARE_CUDA {

namespace {

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

// In every thread: op over the values of all threads.  `room` has kWarps elements.
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

struct ExpF32 {
  __device__ float operator()(float x) const { return exp_f32(x); }
};

struct Distribution {
  float max, sum, log_sum, weighted;  // weighted: sum of (z - max) exp(z - max)
  __device__ float logprob(float z) const { return z - max - log_sum; }
  __device__ float entropy() const { return log_sum - weighted / sum; }
};

// In every lane: the last step of a row sum.
__device__ __forceinline__ float tree(float lane_sum) {
  for (int o = kLanes / 2; o > 0; o /= 2) lane_sum += __shfl_xor_sync(kAllLanes, lane_sum, o);
  return lane_sum;
}

// f(tile) by half a warp each.  Whole warps call it, so one tile may lie behind the last.
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

// put(tile, largest z, sum, weighted) by one lane for each tile: what VocabSums says.
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
    for (int i = 0; i < kIds; i++) add_to_tile(sum, weighted, x[i] - base);  // +0 behind the last
    sum = tree(sum), weighted = tree(weighted);
    if (lane == 0 && tile * kVocabTile < vocabulary) put(tile, m, sum, weighted);
  });
}

// In every thread.  `sums`: the row's of VocabSums, or null.  Overwrites the numbers of tiles: `top` keeps those of
// VocabSums.  Without kEntropy there is no weighted sum.
template <bool kEntropy, class T>
__device__ Distribution distribution(const Scaled<T>& z, int vocabulary, const float* sums) {
  __shared__ float room[kWarps], totals[2];
  const Tiles tiles(vocabulary);
  float top = -INFINITY;
  const auto put = [&](int tile, float m, float sum, float weighted) {
    top = fmaxf(top, m);
    tiles.top[tile] = m, tiles.sum[tile] = sum, tiles.weighted[tile] = weighted;
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
  d.sum = totals[0], d.weighted = kEntropy ? totals[1] : 0.f;
  d.log_sum = log_f32(d.sum);
  return d;
}

// Of VocabSums, or null: the numbers of a row.
struct RowSums {
  const float* tiles;
  __device__ __forceinline__ const float* row(int64_t r, int vocabulary) const {
    return tiles ? tiles + r * 3 * (ceil_div(vocabulary, kVocabTile) + 1) : nullptr;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    sum_tiles_of_rows(float* __restrict__ tiles, const T* __restrict__ logits, const int32_t* __restrict__ target,
                      int vocabulary, float temperature) {
  const Scaled<T> z{logits + int64_t{blockIdx.x} * vocabulary, temperature};
  const int count = ceil_div(vocabulary, kVocabTile);
  float* const row = tiles + int64_t{blockIdx.x} * 3 * (count + 1);
  sum_tiles(z, vocabulary, [&](int tile, float m, float sum, float weighted) {
    row[3 * tile] = m, row[3 * tile + 1] = sum, row[3 * tile + 2] = weighted;
  });
  if (target && threadIdx.x == 0) row[3 * count] = z.at(target[blockIdx.x]);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    logprobs(float* __restrict__ logprob, float* __restrict__ entropy, const T* __restrict__ logits,
             const int32_t* __restrict__ target, const RowSums sums, int vocabulary, float temperature) {
  const Scaled<T> z{logits + int64_t{blockIdx.x} * vocabulary, temperature};
  const float* const row = sums.row(blockIdx.x, vocabulary);
  const Distribution d = distribution<true>(z, vocabulary, row);
  if (threadIdx.x) return;
  logprob[blockIdx.x] = d.logprob(row ? row[3 * ceil_div(vocabulary, kVocabTile)] : z.at(target[blockIdx.x]));
  entropy[blockIdx.x] = d.entropy();
}

// ---- losses

// In every thread: a row sum, sum = add(id, sum) being its step.
template <class Add>
__device__ __forceinline__ float sum_over_ids(int vocabulary, Add add) {
  __shared__ float total;
  const Tiles tiles(vocabulary);
  const int lane = threadIdx.x % kLanes;
  for_tiles(vocabulary, [&](int tile) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kIds; i++) {
      const int id = tile * kVocabTile + lane + kLanes * i;
      if (id >= vocabulary) break;
      sum = add(id, sum);
    }
    sum = tree(sum);
    if (lane == 0 && tile < tiles.count) tiles.sum[tile] = sum;
  });
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int t = 0; t < tiles.count; t++) sum += tiles.sum[t];
    total = sum;
  }
  __syncthreads();
  return total;
}

// KL(p || q), in every thread: the sum of p (log p - log q).
template <class T>
__device__ float kl_to(const Scaled<T>& z, const Scaled<T>& zq, const Distribution& d, const Distribution& q,
                       int vocabulary) {
  return sum_over_ids(vocabulary, [&](int id, float sum) {
    const float x = z.at(id) - d.max, ratio = x - d.log_sum - (zq.at(id) - q.max - q.log_sum);
    return x == -INFINITY ? sum : fmaf(exp_at_most_1(x) / d.sum, ratio, sum);
  });
}

// sum(c) of Centring, in every thread.
template <class T>
__device__ float centring_sum(const Centring& spec, const Scaled<T>& z, const Scaled<T>& zq, const Distribution& d,
                              const Distribution& q, int vocabulary) {
  return sum_over_ids(vocabulary, [&](int id, float sum) {
    return sum + centring_mass(spec, exp_at_most_1(z.at(id) - d.max) / d.sum, exp_at_most_1(zq.at(id) - q.max) / q.sum);
  });
}

template <class T>
struct LossArgs {
  float *logprob, *entropy, *loss, *kl;  // [R]
  int32_t* clipped;
  T* logits;
  const int32_t* target;
  const float *weight, *kl_weight, *advantage, *old_logprob, *log_ratio, *ref_logprob;  // [R] or null
  const T* other_logits;                                                                // [R, V] or null: of q
  RowSums sums;
  LossSpec spec;
  int vocabulary;
};

// d loss / d z at id i, times the temperature: with c the derivative by the target's log-prob, of
// c log p[target] + entropy_weight * -entropy + kl_weight * KL(p || q) or, forward, KL(q || p); plus that of centring.
struct Slope {
  float c, entropy_weight, kl_weight, kl;
  bool exact, forward;  // KL(p || q); KL(q || p)
  int target;
  float centre, centre_sum;  // the weight of centring, and sum(c)
};
template <bool kCentred, class T>
__device__ __forceinline__ float gradient(int i, float z, const Slope& s, const Scaled<T>& zq, const Distribution& d,
                                          const Distribution& q, const LossSpec& spec) {
  const float temperature = spec.temperature;
  const float x = z - d.max, e = exp_at_most_1(x);
  if (x == -INFINITY) return 0;
  const float p = e / d.sum, log_p = x - d.log_sum, log_q = s.exact ? zq.at(i) - q.max - q.log_sum : 0.f;
  float centred = 0;
  if (kCentred)
    centred = fmaf(-s.centre_sum, p, centring_mass(spec.centring, p, exp_at_most_1(zq.at(i) - q.max) / q.sum));
  if (i == s.target) {
    float g = s.c + p * (-s.c + s.entropy_weight * (log_p + d.entropy()));
    if (s.exact) g += p * s.kl_weight * (log_p - log_q - s.kl);
    if (s.forward) g += s.kl_weight * (p - exp_at_most_1(zq.at(i) - q.max) / q.sum);
    if (kCentred) g = fmaf(s.centre, centred, g);
    return g / temperature;
  }
  float g = fmaf(s.entropy_weight, log_p + d.entropy(), -s.c);
  if (s.exact) g = fmaf(s.kl_weight, log_p - log_q - s.kl, g);
  g = p * g;
  if (s.forward) g = fmaf(s.kl_weight, p - exp_at_most_1(zq.at(i) - q.max) / q.sum, g);
  if (kCentred) g = fmaf(s.centre, centred, g);
  return g / temperature;
}

template <class T, bool kCentred>
__global__ void __launch_bounds__(kThreads, 4) loss(const LossArgs<T> a) {
  const int64_t r = blockIdx.x;
  const LossSpec& spec = a.spec;
  const Scaled<T> z{a.logits + r * a.vocabulary, spec.temperature};
  const Distribution d = distribution<true>(z, a.vocabulary, a.sums.row(r, a.vocabulary));
  const float lp = d.logprob(z.at(a.target[r]));
  TokenLoss<float> token =
      token_loss<float>(spec, lp, a.old_logprob ? a.old_logprob[r] : 0.f, a.log_ratio ? a.log_ratio[r] : 0.f,
                        a.advantage ? a.advantage[r] : 0.f, a.ref_logprob ? a.ref_logprob[r] : 0.f, ExpF32{});
  const bool forward = spec.kl == KlLoss::exact_forward, exact = spec.kl == KlLoss::exact || forward;
  const Scaled<T> zq{exact || kCentred ? a.other_logits + r * a.vocabulary : z.logits, spec.temperature};
  Distribution q{};
  float centre_sum = 0;
  if (kCentred) {
    q = distribution<false>(zq, a.vocabulary, nullptr);
    centre_sum = centring_sum(spec.centring, z, zq, d, q, a.vocabulary);
  }
  if (exact) {
    q = distribution<false>(zq, a.vocabulary, nullptr);
    token.kl = forward ? kl_to(zq, z, q, d, a.vocabulary) : kl_to(z, zq, d, q, a.vocabulary);
  }
  if (threadIdx.x == 0) {
    a.logprob[r] = lp, a.entropy[r] = d.entropy();
    a.loss[r] = token.policy, a.kl[r] = token.kl, a.clipped[r] = token.clipped;
  }
  const float kl_weight = a.kl_weight[r] * spec.kl_coef;
  const Slope s{.c = a.weight[r] * token.d_policy + kl_weight * token.d_kl,
                .entropy_weight = a.kl_weight[r] * spec.entropy_coef,
                .kl_weight = kl_weight,
                .kl = token.kl,
                .exact = exact && !forward,
                .forward = forward,
                .target = a.target[r],
                .centre = kCentred ? a.kl_weight[r] * a.advantage[r] : 0.f,
                .centre_sum = centre_sum};
  __syncthreads();  // everyone has read the target's logit
  T* const row = a.logits + r * a.vocabulary;
  // Overwrites the row by slope(id, z) of each id.
  const auto overwrite = [&](auto slope) {
    Words<T> next = z.load(kEach * threadIdx.x, a.vocabulary);  // the next tile is loaded while one is computed
    for (int first = kEach * threadIdx.x; first < a.vocabulary; first += kStep) {
      const Some<T> x = some_of<T>(next);
      next = z.load(first + kStep, a.vocabulary);
      Some<T> g;
#pragma unroll
      for (int i = 0; i < kEach; i++)
        if (first + i < a.vocabulary) g.v[i] = from_float<T>(slope(first + i, z.scaled(to_float(x.v[i]))));
      if (at_once(row, a.vocabulary)) {
        *reinterpret_cast<Some<T>*>(row + first) = g;
      } else {
#pragma unroll
        for (int i = 0; i < kEach; i++)
          if (first + i < a.vocabulary) row[first + i] = g.v[i];
      }
    }
  };
  if (kCentred || exact || spec.entropy_coef != 0) {
    overwrite([&](int i, float zi) { return gradient<kCentred>(i, zi, s, zq, d, q, spec); });
  } else {  // of the target's log-prob alone
    const float factor = -s.c / d.sum / spec.temperature;
    overwrite([&](int i, float zi) {
      const float x = zi - d.max, e = exp_at_most_1(x);
      if (i == s.target) return x == -INFINITY ? 0.f : s.c * (1.f - e / d.sum) / spec.temperature;
      return x == -INFINITY ? 0.f : e * factor;
    });
  }
}

// ---- sampling

__device__ float gumbel(uint32_t word) { return -log_f32(-log_f32(uniform_open(word))); }

// What a draw must exceed, and which words cannot make it do so, whatever the logit: most are passed over without a
// logarithm, and their logits unread.
struct Bar {
  float value = -INFINITY;  // what some id has reached
  uint32_t least_word = 0;

  // -log u >= 1 - u: the Gumbel number of u is at most g where 1 - u >= exp(-g).  The margins are for rounding.
  __device__ void raise(float reached, float largest_logit) {
    value = reached;
    const float g = value - largest_logit - fmaf(1e-6f, fabsf(value), 0.01f);
    if (g > 0.001f) least_word = static_cast<uint32_t>((1.f - exp_f32(-g)) * 0x1p32f) - 1024;
  }
};

// The largest rank r of an element of type T for which enough(r), which is false above it and true below.
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

// The least rank of the top_k largest logits.  In every thread.
template <class T>
__device__ uint64_t least_of_largest(const T* logits, int vocabulary, int top_k) {
  __shared__ int counts[kWarps];
  return largest<T>([&](uint64_t r) {
    int n = 0;
    for (int i = threadIdx.x; i < vocabulary; i += kThreads) n += rank(to_float(logits[i]), i) >= r;
    return block_reduce(n, counts, [](int a, int b) { return a + b; }) >= top_k;
  });
}

// A thread reads and writes ids of its own.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    truncate_rows(T* __restrict__ logits, int vocabulary, float temperature, const Truncation keep) {
  __shared__ float room[kWarps];
  __shared__ uint64_t sums[kWarps];
  T* const row = logits + int64_t{blockIdx.x} * vocabulary;
  const Scaled<T> z{row, temperature};
  const auto rank_at = [&](int i) { return rank(to_float(row[i]), i); };
  float top = -INFINITY;
  for (int i = threadIdx.x; i < vocabulary; i += kThreads) top = fmaxf(top, z.at(i));
  top = block_reduce(top, room, [](float a, float b) { return fmaxf(a, b); });
  const auto share = [&](int i) { return exp_at_most_1(z.at(i) - top); };
  uint64_t least = keep.top_k > 0 && keep.top_k < vocabulary ? least_of_largest(row, vocabulary, keep.top_k) : 0;
  if (keep.top_p < 1) {
    const auto units = [&](uint64_t r) {
      uint64_t sum = 0;
      for (int i = threadIdx.x; i < vocabulary; i += kThreads)
        if (rank_at(i) >= r) sum += static_cast<uint64_t>(share(i) * 0x1p40f);
      return static_cast<double>(block_reduce(sum, sums, [](uint64_t a, uint64_t b) { return a + b; }));
    };
    const double goal = double{keep.top_p} * units(least);
    least = largest<T>([&](uint64_t r) { return r <= least || units(r) >= goal; });
  }
  for (int i = threadIdx.x; i < vocabulary; i += kThreads)
    if (rank_at(i) < least || share(i) < keep.min_p) row[i] = from_float<T>(-INFINITY);
}

// A warp has a run of ids: it counts them, then writes those that it has behind those of the warps before.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    list_rows(int32_t* __restrict__ ids, const T* __restrict__ logits, int vocabulary, int limit) {
  __shared__ int counts[kWarps];
  const T* const row = logits + int64_t{blockIdx.x} * vocabulary;
  int32_t* const list = ids + int64_t{blockIdx.x} * (1 + limit);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int run = round_up(ceil_div(vocabulary, kWarps), 32), begin = warp * run, end = min(begin + run, vocabulary);
  const auto kept = [&](int first) {
    return __ballot_sync(kAllLanes, first + lane < end && to_float(row[first + lane]) > -INFINITY);
  };
  int own = 0;
  for (int first = begin; first < end; first += 32) own += __popc(kept(first));
  if (lane == 0) counts[warp] = own;
  __syncthreads();
  int place = 0, all = 0;
  for (int w = 0; w < kWarps; w++) {
    if (w < warp) place += counts[w];
    all += counts[w];
  }
  for (int first = begin; first < end; first += 32) {
    const unsigned set = kept(first);
    const int at = place + __popc(set & ((1u << lane) - 1));
    if (set >> lane & 1 && at < limit) list[1 + at] = first + lane;
    place += __popc(set);
  }
  for (int i = all + threadIdx.x; i < limit; i += kThreads) list[1 + i] = -1;
  if (threadIdx.x == 0) list[0] = all;
}

// Each id looks itself up.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    keep_rows(T* __restrict__ logits, const int32_t* __restrict__ ids, int vocabulary, int limit) {
  T* const row = logits + int64_t{blockIdx.x} * vocabulary;
  const int32_t* const list = ids + int64_t{blockIdx.x} * (1 + limit);
  const int n = list[0];
  for (int id = threadIdx.x; id < vocabulary; id += kThreads) {
    int low = 0, high = n;  // the first that is not below it
    while (low < high) {
      const int middle = (low + high) / 2;
      if (list[1 + middle] < id)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == n || list[1 + low] != id) row[id] = from_float<T>(-INFINITY);
  }
}

struct Choice {
  int32_t* token;
  float* logprob;
  const int32_t* counter;  // [R, 3]
  RowSums sums;
  uint64_t key;
  float temperature;
};

// A warp takes a tile, a lane four neighbouring ids of it: a block of philox has four words.  The tile of the largest
// logit comes first, in every warp, so that the bar is high before the others are looked at.
template <class T>
__global__ void __launch_bounds__(kThreads, 4) draw(const T* __restrict__ logits, int vocabulary, Choice a) {
  static_assert(kVocabTile == 32 * kEach);
  __shared__ uint64_t best[kWarps];
  __shared__ int peak;
  const bool greedy = a.temperature == 0;
  const Scaled<T> z{logits + int64_t{blockIdx.x} * vocabulary, greedy ? 1.f : a.temperature};
  const int32_t* const counter = a.counter + 3 * blockIdx.x;
  const auto uid_low = static_cast<uint32_t>(counter[0]), uid_high = static_cast<uint32_t>(counter[1]);
  const auto position = static_cast<uint32_t>(counter[2]);
  const Distribution d = distribution<false>(z, vocabulary, a.sums.row(blockIdx.x, vocabulary));
  const Tiles tiles(vocabulary);
  uint64_t mine = 0;
  Bar bar;  // of the warp
  const auto take = [&](int tile) {
    const int first = tile * kVocabTile + kEach * (threadIdx.x % 32);
    const Some<T> x = some_of<T>(z.load(first, vocabulary));
    const uint4 words = philox({static_cast<uint32_t>(first / 4), position, uid_low, uid_high}, a.key);
    float reached = -INFINITY;
#pragma unroll
    for (int w = 0; w < kEach; w++) {
      const uint32_t word = word_of(words, w);
      if (first + w >= vocabulary || word < bar.least_word) continue;
      float value = z.scaled(to_float(x.v[w]));
      if (value + kMostGumbel < bar.value) continue;
      if (!greedy) value += gumbel(word);
      const uint64_t r = rank(value, first + w);
      mine = r > mine ? r : mine;
      reached = fmaxf(reached, value);
    }
    reached = warp_max(reached);
    if (reached > bar.value) bar.raise(reached, d.max);
  };
  if (threadIdx.x == 0) peak = 0;
  __syncthreads();
  for (int t = threadIdx.x; t < tiles.count; t += kThreads)
    if (tiles.top[t] == d.max) atomicMax(&peak, t);
  __syncthreads();
  const int highest = peak;
  take(highest);
  const auto wins = [&](float top) { return greedy ? top == d.max : top + kMostGumbel >= bar.value; };
  for (int begin = threadIdx.x / 32 * 32; begin < tiles.count; begin += kThreads) {
    const int own = begin + threadIdx.x % 32;
    const float top = own < tiles.count && own != highest ? tiles.top[own] : -INFINITY;
    for (unsigned left = __ballot_sync(kAllLanes, wins(top)); left; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      if (wins(__shfl_sync(kAllLanes, top, lane))) take(begin + lane);
    }
  }
  mine = block_reduce(mine, best, [](uint64_t x, uint64_t y) { return x > y ? x : y; });
  const int id = static_cast<int>(0xffffffffu - static_cast<uint32_t>(mine));
  if (threadIdx.x == 0) a.token[blockIdx.x] = id, a.logprob[blockIdx.x] = greedy ? 0 : d.logprob(z.at(id));
}

// ---- what two distributions have in common

struct Overlap {
  float *overlap, *mass;  // [R]
  float temperature, lambda;
  int vocabulary, top_k;  // top_k 0: the mass is over every id
};

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    overlap(const T* __restrict__ p_logits, const T* __restrict__ q_logits, const Overlap a) {
  constexpr int kTiles = kStep / kVocabTile;
  __shared__ float apart[kStep], lost[kStep], parts[2][kTiles];
  __shared__ uint32_t common[kStep / 32];
  const int64_t r = blockIdx.x;
  const Scaled<T> zp{p_logits + r * a.vocabulary, a.temperature}, zq{q_logits + r * a.vocabulary, a.temperature};
  const Distribution p = distribution<false>(zp, a.vocabulary, nullptr),
                     q = distribution<false>(zq, a.vocabulary, nullptr);
  uint64_t least_p = 0, least_q = 0;
  if (a.top_k) {
    least_p = least_of_largest(zp.logits, a.vocabulary, a.top_k);
    least_q = least_of_largest(zq.logits, a.vocabulary, a.top_k);
  }
  // The sums of `apart` and of `lost` in the first two threads, each of their tiles by half a warp.  With top_k a chain
  // over the ids that both have among their largest, in thread 0.
  static_assert(2 * kTiles == kThreads / kLanes);
  const int half = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, tile = half % kTiles, which = half / kTiles;
  float total = 0, chain = 0;
  for (int first = 0; first < a.vocabulary; first += kStep) {
    const int n = min(kStep, a.vocabulary - first);
    for (int i = threadIdx.x; i < kStep; i += kThreads) {  // by whole warps
      const int id = first + i;
      bool both = false;
      if (i < n) {
        const float pi = exp_at_most_1(zp.at(id) - p.max) / p.sum, qi = exp_at_most_1(zq.at(id) - q.max) / q.sum;
        const float pl = pi / a.lambda;
        both = a.top_k && rank(to_float(zp.logits[id]), id) >= least_p && rank(to_float(zq.logits[id]), id) >= least_q;
        apart[i] = qi > pi ? qi - pi : 0.f;
        lost[i] = a.top_k ? (pl < qi ? pl : qi) : (qi > pl ? qi - pl : 0.f);
      }
      const unsigned set = __ballot_sync(kAllLanes, both);
      if (threadIdx.x % 32 == 0) common[i / 32] = set;
    }
    __syncthreads();
    float sum = 0;
    for (int i = tile * kVocabTile + lane; i < min(n, (tile + 1) * kVocabTile); i += kLanes)
      sum += which ? lost[i] : apart[i];
    sum = tree(sum);
    if (lane == 0) parts[which][tile] = sum;
    if (threadIdx.x == 0 && a.top_k)
      for (int w = 0; w < kStep / 32; w++)
        for (uint32_t left = common[w]; left; left &= left - 1)
          chain += lost[w * 32 + __ffs(static_cast<int>(left)) - 1];
    __syncthreads();
    if (threadIdx.x < 2)
      for (int t = 0; t < kTiles; t++) total += parts[threadIdx.x][t];  // +0 behind the last
  }
  if (threadIdx.x == 0) a.overlap[r] = 1.f - total;
  if (threadIdx.x == (a.top_k ? 0 : 1)) a.mass[r] = a.top_k ? chain : 1.f - total;
}

// In f32 they are ignored.
template <class T>
RowSums sums_of(const Tensor& tiles) {
  return {std::is_same_v<T, bf16> && tiles ? tiles.as<float>() : nullptr};
}

int64_t rows_of(const char* op, const Tensor& logits) {
  expect(logits.shape[1] > 0 && logits.shape[1] <= kMostIds, op, ": logits ", logits, " have more than the ", kMostIds,
         " columns whose sums fit in shared memory");
  return logits.shape[0];
}

}  // namespace

void logprob(const Logprob& a, Stream stream) {
  const char* op = "logprob";
  const int64_t rows = rows_of(op, a.logits);
  if (rows == 0) return;
  with_act(op, a.logits, [&](auto type) {
    using T = decltype(type);
    launch(op, logprobs<T>, {.grid = blocks(op, rows, 1), .block = kThreads, .smem = Tiles::bytes(a.logits.shape[1])},
           stream, a.logprob.as<float>(), a.entropy.as<float>(), a.logits.as<T>(), a.target.as<int32_t>(),
           sums_of<T>(a.tiles), a.logits.shape[1], a.temperature);
  });
}

void overlap_probs(const OverlapProbs& a, Stream stream) {
  const char* op = "overlap_probs";
  const int64_t rows = rows_of(op, a.p_logits), vocabulary = a.p_logits.shape[1];
  if (rows == 0) return;
  const Overlap x{.overlap = a.overlap.as<float>(),
                  .mass = a.mass.as<float>(),
                  .temperature = a.temperature,
                  .lambda = a.lambda,
                  .vocabulary = static_cast<int>(vocabulary),
                  .top_k = a.top_k < vocabulary ? a.top_k : 0};
  with_act(op, a.p_logits, [&](auto type) {
    using T = decltype(type);
    launch(op, overlap<T>, {.grid = blocks(op, rows, 1), .block = kThreads, .smem = Tiles::bytes(vocabulary)}, stream,
           a.p_logits.as<T>(), a.q_logits.as<T>(), x);
  });
}

void logits_loss(const LogitsLoss& a, Stream stream) {
  const char* op = "logits_loss";
  const int64_t rows = rows_of(op, a.logits);
  const LossSpec& spec = a.spec;
  const bool policy = spec.policy != PolicyLoss::nll, gspo = spec.policy == PolicyLoss::gspo;
  const bool exact = is_exact(spec.kl), sampled = spec.kl != KlLoss::none && !exact;
  const auto column = [](bool used, const Tensor& t) { return used ? t.as<float>() : nullptr; };
  if (rows == 0) return;
  with_act(op, a.logits, [&](auto type) {
    using T = decltype(type);
    const LossArgs<T> args{.logprob = a.logprob.as<float>(),
                           .entropy = a.entropy.as<float>(),
                           .loss = a.loss.as<float>(),
                           .kl = a.kl.as<float>(),
                           .clipped = a.clipped.as<int32_t>(),
                           .logits = a.logits.as<T>(),
                           .target = a.target.as<int32_t>(),
                           .weight = a.weight.as<float>(),
                           .kl_weight = a.kl_weight.as<float>(),
                           .advantage = column(policy, a.advantage),
                           .old_logprob = column(policy && !gspo, a.old_logprob),
                           .log_ratio = column(gspo, a.log_ratio),
                           .ref_logprob = column(sampled, a.ref_logprob),
                           .other_logits = exact              ? a.ref_logits.as<T>()
                                           : spec.centring.on ? a.sampler_logits.as<T>()
                                                              : nullptr,
                           .sums = sums_of<T>(a.tiles),
                           .spec = spec,
                           .vocabulary = static_cast<int>(a.logits.shape[1])};
    launch(op, spec.centring.on ? loss<T, true> : loss<T, false>,
           {.grid = blocks(op, rows, 1), .block = kThreads, .smem = Tiles::bytes(a.logits.shape[1])}, stream, args);
  });
}

void truncate(const Truncate& a, Stream stream) {
  const char* op = "truncate";
  const int64_t rows = rows_of(op, a.logits), vocabulary = a.logits.shape[1];
  if (rows == 0) return;
  with_act(op, a.logits, [&](auto type) {
    using T = decltype(type);
    launch(op, truncate_rows<T>, {.grid = blocks(op, rows, 1), .block = kThreads}, stream, a.logits.as<T>(), vocabulary,
           a.temperature, a.keep);
  });
}

void list_kept(const ListKept& a, Stream stream) {
  const char* op = "list_kept";
  const int64_t rows = rows_of(op, a.logits), vocabulary = a.logits.shape[1];
  if (rows == 0) return;
  with_act(op, a.logits, [&](auto type) {
    using T = decltype(type);
    launch(op, list_rows<T>, {.grid = blocks(op, rows, 1), .block = kThreads}, stream, a.ids.as<int32_t>(),
           a.logits.as<T>(), vocabulary, a.ids.shape[1] - 1);
  });
}

void keep_listed(const KeepListed& a, Stream stream) {
  const char* op = "keep_listed";
  const int64_t rows = rows_of(op, a.logits), vocabulary = a.logits.shape[1];
  if (rows == 0) return;
  with_act(op, a.logits, [&](auto type) {
    using T = decltype(type);
    launch(op, keep_rows<T>, {.grid = blocks(op, rows, 1), .block = kThreads}, stream, a.logits.as<T>(),
           a.ids.as<int32_t>(), vocabulary, a.ids.shape[1] - 1);
  });
}

void sample(const Sample& a, Stream stream) {
  const char* op = "sample";
  const int64_t rows = rows_of(op, a.logits), vocabulary = a.logits.shape[1];
  if (rows == 0) return;
  const Choice c{.token = a.token.as<int32_t>(),
                 .logprob = a.logprob.as<float>(),
                 .counter = a.counter.as<int32_t>(),
                 .sums = {},
                 .key = a.key,
                 .temperature = a.temperature};
  with_act(op, a.logits, [&](auto type) {
    using T = decltype(type);
    Choice choice = c;
    choice.sums = sums_of<T>(a.tiles);
    launch(op, draw<T>, {.grid = blocks(op, rows, 1), .block = kThreads, .smem = Tiles::bytes(vocabulary)}, stream,
           a.logits.as<T>(), vocabulary, choice);
  });
}

void sum_vocabulary(const LinearFwd& a, Stream stream) {
  const char* op = "linear_fwd";
  const VocabSums& sums = a.vocab_sums;
  if (!sums.tiles || a.y.dtype != DType::bf16) return;
  const int64_t rows = rows_of(op, a.y);
  if (rows == 0) return;
  launch(op, sum_tiles_of_rows<bf16>, {.grid = blocks(op, rows, 1), .block = kThreads}, stream, sums.tiles.as<float>(),
         a.y.as<bf16>(), sums.target ? sums.target.as<int32_t>() : nullptr, a.y.shape[1], sums.temperature);
}

}  // namespace pare::PARE_CUDA
