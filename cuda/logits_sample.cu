// Draws from logits, and truncations (ops/logits.h: Sample, Truncate, ListKept, KeepListed).
//
// logits [R, V] act, truncated in place; per row a token and its log-prob, f32, or a list of ids, overwritten.  A block
// has a row (logits.cuh shows its tiles).  A warp draws from a tile, four ids a lane, and skips tiles that cannot win:
//
//   maximum of z of a tile   | 3.0 | 12.1 | 7.5 | -5.0 | ...     first: the tile of the largest, 12.1
//   best z + Gumbel so far   13.4                                skipped: -5.0 + 16.65 (kMostGumbel) is less
//
// Order: the log-prob of a token is that of logits.cuh.  The largest sum of z and Gumbel number, and the integers that
// top_p adds up, have no order.
//
// Bytes: with VocabSums 12 a tile, and the logits of tiles that can win; else logits once more; lists twice; 36 times
// in bf16 for each of top_k and top_p (mostly from L2).  Limited by the exponentials, with few rows by the chains of
// sums, V / 128 additions long.
#include "logits.cuh"
#include "rng.cuh"

namespace pare::PARE_CUDA {

namespace {

__device__ float gumbel(uint32_t word) { return -log_f32(-log_f32(uniform_open(word))); }

// The bar that a draw must clear, and the least random word that can, whatever the logit: most words are passed over
// without a logarithm.
struct Bar {
  float value = -INFINITY;  // that some id has reached
  uint32_t least_word = 0;

  // -log u >= 1 - u: the Gumbel number of u is at most g where 1 - u >= exp(-g).  The margins are for rounding.
  __device__ void raise(float reached, float largest_logit) {
    value = reached;
    const float g = value - largest_logit - fmaf(1e-6f, fabsf(value), 0.01f);
    if (g > 0.001f) least_word = static_cast<uint32_t>((1.f - exp_f32(-g)) * 0x1p32f) - 1024;
  }
};

// Truncates a row of logits (Truncate).  A thread reads and writes ids of its own.
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

// Lists the ids left of a row (ListKept).  A warp counts those of its run, then writes them after earlier warps' ids.
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

// Truncates a row by its list (KeepListed): each id looks itself up.
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

// Draws a token from a row (Sample).  A warp takes a tile, a lane four neighbouring ids: a block of philox has four
// words.  Every warp begins with the tile of the largest logit, so that the bar is high before it looks at others.
template <class T>
__global__ void __launch_bounds__(kThreads, 4) draw(const T* logits, int vocabulary, Choice a) {
  static_assert(kVocabTile == 32 * kEach);
  __shared__ uint64_t best[kWarps];
  __shared__ int peak;
  await_kernel_before();
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
  if (threadIdx.x == 0) {
    a.token[blockIdx.x] = id;
    a.logprob[blockIdx.x] = greedy ? 0 : d.logprob(z.at(id));
  }
}

}  // namespace

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
    launch(op, draw<T>,
           {.grid = blocks(op, rows, 1), .block = kThreads, .smem = Tiles::bytes(vocabulary), .early = true}, stream,
           a.logits.as<T>(), vocabulary, choice);
  });
}

}  // namespace pare::PARE_CUDA
