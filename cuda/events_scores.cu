// Scores of the slots of a cache that evicts (KvWindowScores, KvRedundancy, KvMassScores).
//
// k_pages [pages, K, D, 16] act, D <= 256; windows [rows, H, D] act, at most 16 query heads a key head; score [E, K,
// max_slots], mass_pages [pages, K, 16] f32.  Candidates of `score` are overwritten (kv_redundancy: changed in place),
// nothing else.
// Order: ops/events.h.  f32 has the bits of the `cpu` table; in bf16 products are on tensor cores, all else in f32.
//
// Queries (kv_window_scores): a thread block has a key head of an event, 16 query rows at a time, a tile of 256 slots
// at a time.  Three passes over the keys give the maximum, the sum of exponentials and the probabilities of a row; the
// products are computed anew in each, so no logits are stored, however many slots there are.  Sums over queries are
// continued in `score`, each slot by one thread.
//
// Bytes: K three times for every 16 rows, from L2 but for the first; limited by latency, the loads of a tile and the
// work on its logits following one another.
//
// Keys (kv_redundancy): a thread block owns 64 columns of S and walks all rows, 64 x 128 products at a time; S is never
// stored.  2 * K * D * slots^2 operations; K once for each 64 columns, from L2.  Limited by the instructions of the
// sums over S in bf16, of the products in f32.
#include "events.cuh"

namespace pare::PARE_CUDA {

namespace {

// Softmax probabilities of up to 16 rows of logits over the slots [first, end(row)), where end ascends with the row.
// t.rows holds the queries of `products` rows; where these are more than `rows`, combine() makes `rows` rows of t.z of
// them.  Both it and add(slot) are called by the thread of a slot below `last`, whose column of t.z begins at
// threadIdx.x: of logits, then of probabilities.
template <class T, class End, class Combine, class Add>
__device__ __forceinline__ void softmax_rows(const QueryTile<T>& t, const T* k_pages, const HeadPages& pages, int first,
                                             int last, int products, int rows, float scale, End end_of, Combine combine,
                                             Add add) {
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int end = row < rows ? end_of(row) : 0;
  float* const z = t.z + row * QueryTile<T>::kColumnStep;
  float top = -INFINITY, sum = 0;
  for (int pass = 0; pass < 3; pass++) {
    for (int begin = first / kPageSlots * kPageSlots; begin < last; begin += kSlots) {
      t.multiply(products, last - begin, scale, [&](int j) {
        return Key<T>{key_at(k_pages, pages, begin + j, t.head_dim), 0};
      });
      const int slot = begin + static_cast<int>(threadIdx.x);
      if (rows < products) {
        if (slot < last) combine();
        __syncthreads();
      }
      for (int i = lane; i < kSlots; i += kLanes) {
        const bool seen = begin + i >= first && begin + i < end;
        if (pass == 0 && seen) top = fmaxf(top, z[i]);
        if (pass == 1 && seen) sum += exp_f32(z[i] - top);
        if (pass == 2) z[i] = seen ? exp_f32(z[i] - top) / sum : 0.f;
      }
      if (pass < 2) continue;
      __syncthreads();
      if (slot >= first && slot < last) add(slot);
    }
    if (pass == 0) top = lanes_max(top);
    if (pass == 1) sum = lanes_sum(sum);
  }
}

// ---- attention of a window of queries

template <class T>
struct WindowArgs {
  float* score;
  const T *windows, *k_pages;
  const int32_t* window_first;  // or null
  Events events;
  int64_t max_slots, window_stride;
  int head_dim, group, window, kernel;
  GqaAgg aggregate;
  SoftmaxSpan span;
  Pool pool;
  float scale;
};

// score[first, end) by its pooled self; x: room for kThreads + 2 * (kernel / 2) floats.
__device__ void pool_slots(float* score, float* room, int first, int end, Pool pool, int kernel) {
  const int side = kernel / 2, i = threadIdx.x;
  const float outside = pool == Pool::max ? -INFINITY : 0.f;
  float* const x = room + side;  // the slots from `begin`
  for (int begin = first; begin < end; begin += kThreads) {
    // Slots before `begin` are pooled already; the round before has them as they were.
    const float before = i < side && begin > first ? x[kThreads - side + i] : outside;
    __syncthreads();
    if (i < side) x[i - side] = before;
    for (int j = i; j < kThreads + side; j += kThreads) x[j] = begin + j < end ? score[begin + j] : outside;
    __syncthreads();
    if (begin + i >= end) continue;
    float v = x[i - side];
    for (int j = 1; j < kernel; j++) v = pool == Pool::max ? fmaxf(v, x[i - side + j]) : v + x[i - side + j];
    score[begin + i] = pool == Pool::avg ? v / static_cast<float>(kernel) : v;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kTileBlocks) window_scores(const WindowArgs<T> a) {
  const KvEvent e = a.events.get();
  const int candidates = e.slots - e.recent, group = a.group, h = a.events.head();
  if (e.first >= candidates) return;
  const HeadPages pages = a.events.head_pages();
  const int oldest = a.window_first ? a.window_first[a.events.event()] : 0;
  float* const score = a.score + blockIdx.x * a.max_slots;
  const QueryTile<T> t(a.head_dim);
  const bool prob = a.aggregate == GqaAgg::mean_prob, best = a.aggregate == GqaAgg::max_logit;
  const bool exclude = a.span == SoftmaxSpan::exclude_window;
  const auto aggregate = [&](float* z, int to, int from, bool largest) {  // a column: row `to` from `group` rows
    float x = z[from * QueryTile<T>::kColumnStep];
    for (int g = 1; g < group; g++) {
      const float next = z[(from + g) * QueryTile<T>::kColumnStep];
      x = largest ? fmaxf(x, next) : x + next;
    }
    z[to * QueryTile<T>::kColumnStep] = largest ? x : x / static_cast<float>(group);
  };
  for (int first_t = 0, count; first_t < a.window; first_t += count) {
    count = min(kQueries / group, a.window - first_t);  // queries at once, with all their heads
    t.load_rows([&](int i) {
      const int row = e.window_row + (oldest + first_t + i / group) % a.window;
      return Query<T>{
          i < count * group ? a.windows + row * a.window_stride + (h * group + i % group) * a.head_dim : nullptr, 0};
    });
    const auto end_of = [&](int row) {
      return exclude ? candidates : e.slots - a.window + first_t + (prob ? row / group : row) + 1;
    };
    float* const column = t.z + threadIdx.x;
    softmax_rows(
        t, a.k_pages, pages, e.first, exclude ? candidates : e.slots - a.window + first_t + count, count * group,
        prob ? count * group : count, a.scale, end_of,
        [&] {
          // Row i is written after its last reading, as i <= i * group.
          for (int i = 0; i < count; i++) aggregate(column, i, i * group, best);
        },
        [&](int slot) {
          if (slot >= candidates) return;
          float sum = first_t ? score[slot] : 0.f;
          for (int i = 0; i < count; i++) {
            if (prob) aggregate(column, i, i * group, false);
            sum += column[i * QueryTile<T>::kColumnStep];
          }
          score[slot] = first_t + count == a.window ? sum / static_cast<float>(a.window) : sum;
        });
  }
  if (a.kernel == 1) return;
  __syncthreads();
  pool_slots(score, t.z, e.first, candidates, a.pool, a.kernel);
}

// blockIdx.y is a run of slots.
__global__ void __launch_bounds__(kThreads)
    mass_scores(float* __restrict__ score, const float* __restrict__ mass_pages, Events events, int64_t max_slots) {
  const KvEvent e = events.get();
  const int slot = blockIdx.y * kThreads + threadIdx.x;
  if (slot < e.first || slot >= e.slots - e.recent) return;
  score[blockIdx.x * max_slots + slot] = mass_pages[events.head_pages().at(slot)];
}

// ---- redundancy

template <class T>
struct RedundancyArgs {
  float *score, *workspace;
  const T* k_pages;
  Events events;
  int64_t max_slots, row;  // workspace: 4 rows of so many floats, by slot
  int head_dim;
  float lambda, threshold;
  // Sums of the columns of S; the last row above the threshold, or `first`; S there; norms of keys, later r.
  __device__ __forceinline__ float* values(int i) const { return workspace + (blockIdx.x * int64_t{4} + i) * row; }
};

// The columns of S of 64 slots; blockIdx.y says which.  S is symmetric bit by bit, so the products of a column's own
// key are those of the row.
template <class T>
__global__ void __launch_bounds__(kThreads, kTileBlocks) columns_of_s(const RedundancyArgs<T> a) {
  const KvEvent e = a.events.get();
  const int base = e.first / kPageSlots * kPageSlots, begin = base + 64 * blockIdx.y;
  if (begin >= e.slots || e.first >= e.slots - e.recent) return;
  const HeadPages pages = a.events.head_pages();
  const float* norms = a.values(3);
  const KeyTile<T> t(a.head_dim);
  const auto key = [&](int slot) { return UnitKey<T>{key_at(a.k_pages, pages, slot, a.head_dim), norms[slot]}; };
  t.load_rows([&](int i) { return begin + i < e.slots ? key(begin + i) : UnitKey<T>{}; });
  constexpr int kChains = sizeof(T) == 2 ? 4 : 1;  // of a column, a thread each
  const int own = threadIdx.x / kChains, chain = threadIdx.x % kChains, column = begin + own;
  const bool mine = own < 64 && column >= e.first && column < e.slots;
  const float inverse = mine ? norms[column] : 0.f;
  float sum = 0, similar = 0;
  int last = -1;
  for (int row = base; row < e.slots; row += KeyTile<T>::kWidth) {
    t.multiply(64, e.slots - row, 1, [&](int j) { return key(row + j); });
    const int end = mine ? min(KeyTile<T>::kWidth, e.slots - row) : 0;
    for (int j = 2 * chain; j < end; j += 2 * kChains) {
      const float2 two = *reinterpret_cast<const float2*>(t.z + own * KeyTile<T>::kColumnStep + j);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int i = row + j + k;
        if (i < e.first || j + k >= end) continue;
        float s = k ? two.y : two.x;
        if (kChains == 4) s *= inverse * norms[i];
        if (i == column) s = 0;
        sum += s;
        if (s > a.threshold || i == e.first) last = i, similar = s;
      }
    }
  }
  if (kChains == 4) {
    sum = quad_sum(sum);
    for (int o = 1; o < 4; o *= 2) {
      const int later = __shfl_xor_sync(kAllLanes, last, o);
      const float there = __shfl_xor_sync(kAllLanes, similar, o);
      if (later > last) last = later, similar = there;
    }
  }
  if (!mine || chain > 0) return;
  a.values(0)[column] = sum, a.values(1)[column] = static_cast<float>(last), a.values(2)[column] = similar;
}

// r of a slot: the sum of its column without the rows to which it is the last similar one, a thread a slot.
template <class T>
__global__ void __launch_bounds__(kThreads) column_means(const RedundancyArgs<T> a) {
  const KvEvent e = a.events.get();
  const int slot = blockIdx.y * kThreads + threadIdx.x;
  if (slot < e.first || slot >= e.slots || e.first >= e.slots - e.recent) return;
  const float *last = a.values(1), *similar = a.values(2);
  float sum = a.values(0)[slot];
  for (int i = e.first; i < e.slots; i++)
    if (last[i] == static_cast<float>(slot)) sum -= similar[i];
  a.values(3)[slot] = sum / static_cast<float>(e.slots - e.first);
}

// score = lambda * score - (1 - lambda) * softmax(r)
template <class T>
__global__ void __launch_bounds__(kThreads) weigh_redundancy(const RedundancyArgs<T> a) {
  __shared__ float tops[kWarps], exps[kThreads], total;
  const KvEvent e = a.events.get();
  const int base = e.first / kPageSlots * kPageSlots, candidates = e.slots - e.recent;
  if (e.first >= candidates) return;
  const float* const r = a.values(3);
  float top = -INFINITY, sum = 0;
  for (int slot = e.first + threadIdx.x; slot < e.slots; slot += kThreads) top = fmaxf(top, r[slot]);
  top = warp_max(top);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  for (float x : tops) top = fmaxf(top, x);
  for (int begin = base; begin < e.slots; begin += kThreads) {
    const int slot = begin + static_cast<int>(threadIdx.x);
    exps[threadIdx.x] = slot >= e.first && slot < e.slots ? exp_f32(r[slot] - top) : 0.f;
    __syncthreads();
    if (threadIdx.x < kLanes)
      for (int i = threadIdx.x; i < kThreads; i += kLanes) sum += exps[i];
    __syncthreads();
  }
  if (threadIdx.x < 32) sum = lanes_sum(sum);
  if (threadIdx.x == 0) total = sum;
  __syncthreads();
  float* const score = a.score + blockIdx.x * a.max_slots;
  for (int slot = e.first + threadIdx.x; slot < candidates; slot += kThreads)
    score[slot] = a.lambda * score[slot] - (1.f - a.lambda) * (exp_f32(r[slot] - top) / total);
}

}  // namespace

void kv_window_scores(const KvWindowScores& a, Stream stream) {
  const char* op = "kv_window_scores";
  const int64_t kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2];
  expect_heads(op, head_dim, kv_heads);
  expect(a.kernel / 2 <= kThreads, op, ": kernel is ", a.kernel, ", expected at most ", 2 * kThreads + 1);
  const Events events = events_of(a.events, a.src_pages, kv_heads);
  if (events.count == 0) return;
  with_act(op, a.k_pages, [&](auto type) {
    using T = decltype(type);
    expect(sizeof(T) == 4 || aligned16(a.k_pages, {}), op, ": pages must be 16-byte aligned");
    const WindowArgs<T> args{.score = a.score.as<float>(),
                             .windows = a.windows.as<T>(),
                             .k_pages = a.k_pages.as<T>(),
                             .window_first = a.window_first ? a.window_first.as<int32_t>() : nullptr,
                             .events = events,
                             .max_slots = a.score.shape[2],
                             .window_stride = a.windows.stride[0],
                             .head_dim = static_cast<int>(head_dim),
                             .group = group_of(op, a.windows.shape[1], kv_heads),
                             .window = a.window,
                             .kernel = a.kernel,
                             .aggregate = a.aggregate,
                             .span = a.span,
                             .pool = a.pool,
                             .scale = a.scale};
    launch(op, window_scores<T>,
           {.grid = blocks(op, int64_t{events.count} * events.kv_heads, 1),
            .block = kThreads,
            .smem = QueryTile<T>::bytes(head_dim)},
           stream, args);
  });
}

void kv_mass_scores(const KvMassScores& a, Stream stream) {
  const char* op = "kv_mass_scores";
  const int64_t kv_heads = a.mass_pages.shape[1];
  const Events events = events_of(a.events, a.src_pages, kv_heads);
  if (events.count == 0) return;
  launch(op, mass_scores,
         {.grid = dim3(blocks(op, int64_t{events.count} * kv_heads, 1), blocks(op, a.score.shape[2], kThreads)),
          .block = kThreads},
         stream, a.score.as<float>(), a.mass_pages.as<float>(), events, a.score.shape[2]);
}

void kv_redundancy(const KvRedundancy& a, Stream stream) {
  const char* op = "kv_redundancy";
  const int64_t kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2], row = a.src_pages.shape[1] * kPageSlots;
  expect_heads(op, head_dim, kv_heads);
  const Events events = events_of(a.events, a.src_pages, kv_heads);
  float* const workspace = a.workspace.as<float>();
  if (events.count == 0 || row == 0) return;
  with_act(op, a.k_pages, [&](auto type) {
    using T = decltype(type);
    expect(sizeof(T) == 4 || aligned16(a.k_pages, {}), op, ": pages must be 16-byte aligned");
    const RedundancyArgs<T> args{.score = a.score.as<float>(),
                                 .workspace = workspace,
                                 .k_pages = a.k_pages.as<T>(),
                                 .events = events,
                                 .max_slots = a.score.shape[2],
                                 .row = row,
                                 .head_dim = static_cast<int>(head_dim),
                                 .lambda = a.lambda,
                                 .threshold = a.threshold};
    const unsigned heads = blocks(op, int64_t{events.count} * kv_heads, 1), runs = blocks(op, row, kThreads);
    launch(op, key_norms<T>, {.grid = dim3(heads, runs), .block = kThreads}, stream, events, args.k_pages,
           args.head_dim, workspace + 3 * row, 4 * row);
    launch(op, columns_of_s<T>,
           {.grid = dim3(heads, blocks(op, row, 64)), .block = kThreads, .smem = KeyTile<T>::bytes(head_dim)}, stream,
           args);
    launch(op, column_means<T>, {.grid = dim3(heads, runs), .block = kThreads}, stream, args);
    launch(op, weigh_redundancy<T>, {.grid = heads, .block = kThreads}, stream, args);
  });
}

}  // namespace pare::PARE_CUDA
