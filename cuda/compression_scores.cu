// Scores of the slots of a cache that evicts (KvWindowScores, KvRedundancy, KvMassScores; ops/compression.h states the
// formulas).
//
// k_pages [pages, K, D, 16] act, D <= 256; windows [rows, H, D] act, at most 16 query heads a key head; score [E, K,
// max_slots], mass_pages [pages, K, 16] f32.  Candidates of `score` are overwritten (kv_redundancy: changed in place),
// nothing else.
// Order: ops/compression.h.  f32 has the bits of the `cpu` table; in bf16 only products are on tensor cores.
//
// Queries (kv_window_scores).  A thread block has a key head of a compression, and as many queries at once as fit, with
// all their heads; tiles of 64 x 128 products (KeyTile) become logits of a query:
//
//        slots 128, a tile ->                  one row a query, all slots of the compression
//   q0 h0 |. . . . . . . .|     max or mean
//   q0 h1 |. . . . . . . .|     of the heads   q0 |. . . . . . . .|. . . . . . . .|. . .|  maximum, sum, p:
//   q1 h0 |. . . . . . . .|  ----------------> q1 |. . . . . . . .|. . . . . . . .|. . .|  16 threads a row,
//   q1 h1 |. . . . . . . .|                                                               a lane of its sum each
//
// If a round of queries fits, the logits stay in shared memory, and a round reads K once.  If not, three passes compute
// the products anew, for any number of slots.  Sums over queries are continued in `score`, each slot by one thread.
// Bytes: K, in each round or pass.  Limited by them and by the latency of a block's first loads.
//
// Keys (kv_redundancy).  S is never stored.  In bf16 a warp owns 32 columns of S (16 with more than 128 channels), a
// block 128, and the keys of all rows pass by, 64 slots at a time:
//
//   own 32 keys    x    |k(i) 64 slots|  the ring, a channel a line
//   in registers         0011223300112233 ...   the lane of four that has row i, which is its chain
//   c(j) |. . . .|  -->  sum += S, last = i and similar = S where S > threshold: all in registers
//
// 2 * K * D * slots^2 operations.  Bytes: K twice (norms, products) and once for each 128 columns, from L2.  Limited by
// the tensor cores (mma.sync) and by the six instructions on an element of S, about alike; in f32 by the products.
#include <algorithm>

#include "compression.cuh"

namespace pare::PARE_CUDA {

namespace {

// ---- attention of a window of queries

constexpr int64_t kWindowBytes = 90 * 1024;  // of shared memory, for logits; 8 KiB more for the rest

template <class T>
struct WindowArgs {
  float* score;
  const T *windows, *k_pages;
  const int32_t* window_first;  // or null
  Compressions compressions;
  int64_t max_slots, window_stride;
  int head_dim, group, window, kernel;
  int at_once;  // queries of a round
  int kept;     // slots of which a round's logits stay in shared memory; 0: the products are computed in each pass
  GqaAgg aggregate;
  SoftmaxSpan span;
  Pool pool;
  float scale;
};

// Returns the largest of `count` numbers `step` apart, or their mean.
__device__ __forceinline__ float aggregate(const float* x, int step, int count, GqaAgg how) {
  float v = x[0];
  for (int g = 1; g < count; g++) v = how == GqaAgg::max_logit ? fmaxf(v, x[g * step]) : v + x[g * step];
  return how == GqaAgg::max_logit ? v : v / static_cast<float>(count);
}

// Pools score[first, end) in place, after a barrier; room: for kThreads + 2 * (kernel / 2) floats.
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
  using Tile = KeyTile<T>;
  constexpr int kDown = kThreads / kLanes;                            // rows at once, 16 threads each
  __shared__ float tops[kTileRows][kLanes], sums[kTileRows][kLanes];  // an element a thread
  const KvCompression e = a.compressions.get();
  const int candidates = e.slots - e.recent, group = a.group, h = a.compressions.head();
  if (e.first >= candidates) return;
  const HeadPages pages = a.compressions.head_pages();
  const int oldest = a.window_first ? a.window_first[a.compressions.compression()] : 0;
  float* const score = a.score + blockIdx.x * a.max_slots;
  const Tile t(a.head_dim);
  const bool prob = a.aggregate == GqaAgg::mean_prob, exclude = a.span == SoftmaxSpan::exclude_window;
  const int logits = prob ? 1 : group, rows_each = prob ? group : 1;  // of a row, products; of a query, rows
  const int base = e.first / kPageSlots * kPageSlots, step = a.kept ? a.kept : Tile::kColumnStep;
  float* const held = a.kept ? t.end() : t.z;  // [rows][step]
  const int own = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  for (int first_t = 0, count; first_t < a.window; first_t += count) {
    count = min(a.at_once, a.window - first_t);
    const int rows = count * rows_each, newest = first_t + count - 1;
    const auto end_of = [&](int t) { return exclude ? candidates : e.slots - a.window + t + 1; };
    t.load_rows([&](int i) {
      const int row = e.window_row + (oldest + first_t + i / group) % a.window;
      return Query<T>{
          i < count * group ? a.windows + row * a.window_stride + (h * group + i % group) * a.head_dim : nullptr, 0};
    });
    for (int row = own; row < kTileRows; row += kDown) {
      tops[row][lane] = -INFINITY;
      sums[row][lane] = 0;
    }
    for (int pass = 0; pass < 3; pass++) {
      for (int begin = base; begin < end_of(newest); begin += kTileSlots) {
        float* const z = held + (a.kept ? begin - base : 0);
        const int slot = begin + static_cast<int>(threadIdx.x);
        const bool mine = threadIdx.x < kTileSlots && slot < end_of(newest);
        if (pass == 0 || !a.kept) {
          t.multiply(count * group, end_of(newest) - begin, a.scale, [&](int j) {
            return Key<T>{key_at(a.k_pages, pages, begin + j, a.head_dim), 0};
          });
          // Where they are not kept, row i is written after its last reading, as i <= i * logits.
          for (int i = 0; mine && i < rows; i++)
            z[i * step + threadIdx.x] =
                aggregate(t.z + i * logits * Tile::kColumnStep + threadIdx.x, Tile::kColumnStep, logits, a.aggregate);
          __syncthreads();
        }
#pragma unroll 1
        for (int row = own; row < rows; row += kDown) {
          const int end = end_of(first_t + row / rows_each);
          float top = tops[row][lane], sum = sums[row][lane];
          for (int i = lane; i < kTileSlots; i += kLanes) {
            float& x = z[row * step + i];
            const bool seen = begin + i >= e.first && begin + i < end;
            if (pass == 0 && seen) top = fmaxf(top, x);
            if (pass == 1 && seen) sum += exp_at_most_1(x - top);
            if (pass == 2) x = seen ? exp_at_most_1(x - top) / sum : 0.f;
          }
          tops[row][lane] = top;
          sums[row][lane] = sum;
        }
        if (pass < 2) continue;
        __syncthreads();
        if (!mine || slot < e.first || slot >= candidates) continue;
        float total = first_t ? score[slot] : 0.f;
        for (int i = 0; i < count; i++)
          total += aggregate(z + i * rows_each * step + threadIdx.x, step, rows_each, GqaAgg::mean_prob);
        score[slot] = newest + 1 == a.window ? total / static_cast<float>(a.window) : total;
      }
      for (int row = own; row < kTileRows; row += kDown)
        if (pass == 0)
          tops[row][lane] = lanes_max(tops[row][lane]);
        else if (pass == 1)
          sums[row][lane] = lanes_sum(sums[row][lane]);
    }
  }
  if (a.kernel > 1) pool_slots(score, t.z, e.first, candidates, a.pool, a.kernel);
}

// blockIdx.y is a run of slots.
__global__ void __launch_bounds__(kThreads) mass_scores(float* __restrict__ score, const float* __restrict__ mass_pages,
                                                        Compressions compressions, int64_t max_slots) {
  const KvCompression e = compressions.get();
  const int slot = blockIdx.y * kThreads + threadIdx.x;
  if (slot < e.first || slot >= e.slots - e.recent) return;
  score[blockIdx.x * max_slots + slot] = mass_pages[compressions.head_pages().at(slot)];
}

// ---- redundancy

struct RedundancyArgs {
  float *score, *workspace;
  Compressions compressions;
  int64_t max_slots, row;  // workspace: 4 rows of so many floats, by slot
  int head_dim;
  float lambda, threshold;
  // Sums of the columns of S; the last row above the threshold, or `first`; S there; norms of keys, later r.
  __device__ __forceinline__ float* values(int i) const {
    return workspace + (compressions.pair() * int64_t{4} + i) * row;
  }
};

// A part of a column of S: the sums of its rows so far, ascending.
struct Column {
  float sum = 0, similar = 0;
  int last = -1;
  __device__ __forceinline__ void add(float s, int row, bool is_similar) {
    sum += s;
    if (is_similar) {
      last = row;
      similar = s;
    }
  }
  __device__ __forceinline__ void store(const RedundancyArgs& a, const KvCompression& e, int column) const {
    if (column < e.first || column >= e.slots) return;
    a.values(0)[column] = sum;
    a.values(1)[column] = static_cast<float>(last);
    a.values(2)[column] = similar;
  }
};

// f32: the columns of the 64 slots of a tile.  S is symmetric bit by bit, so the products of a column's own
// key are those of the row.
__global__ void __launch_bounds__(kThreads, kTileBlocks)
    columns_of_s(const RedundancyArgs a, const float* __restrict__ k_pages) {
  using Tile = KeyTile<float>;
  const KvCompression e = a.compressions.get();
  const int base = e.first / kPageSlots * kPageSlots, begin = base + kTileRows * a.compressions.tile();
  if (begin >= e.slots || e.first >= e.slots - e.recent) return;
  const HeadPages pages = a.compressions.head_pages();
  const float* norms = a.values(3);
  const Tile t(a.head_dim);
  const auto key = [&](int slot) { return UnitKey<float>{key_at(k_pages, pages, slot, a.head_dim), norms[slot]}; };
  t.load_rows([&](int i) { return begin + i < e.slots ? key(begin + i) : UnitKey<float>{}; });
  const int own = threadIdx.x, column = begin + own;
  const bool mine = own < 64 && column >= e.first && column < e.slots;
  Column x;
  for (int row = base; row < e.slots; row += Tile::kWidth) {
    t.multiply(64, e.slots - row, 1, [&](int j) { return key(row + j); });
    const int end = mine ? min(Tile::kWidth, e.slots - row) : 0;
    for (int j = max(0, e.first - row); j < end; j++) {
      const int i = row + j;
      const float s = i == column ? 0 : t.z[own * Tile::kColumnStep + j];
      x.add(s, i, s > a.threshold || i == e.first);
    }
  }
  if (own < 64) x.store(a, e, column);
}

// bf16: the kOwn columns of a tile.  A lane of four has the products of rows i with i % 8 / 2 == lane, which are its
// chain.
template <int kD>
__global__ void __launch_bounds__(KeyProducts<kD>::kBlock, KeyProducts<kD>::kBlocks)
    columns_of_s16(const RedundancyArgs a, const bf16* __restrict__ k_pages) {
  using Products = KeyProducts<kD>;
  constexpr int kTiles = Products::kTiles, kPiece = Products::kPiece;
  const KvCompression e = a.compressions.get();
  const int base = e.first / kPageSlots * kPageSlots, first_key = base + Products::kOwn * a.compressions.tile();
  if (first_key >= e.slots || e.first >= e.slots - e.recent) return;
  Products products(a.compressions.head_pages(), k_pages, a.head_dim, e.slots);
  const auto fetch = [&](int stage, int first) {
    products.fetch_keys(stage, first);
    if (const int at = threadIdx.x * 4; at < kPiece) {
      const int count = min(4, max(0, e.slots - first - at));
      const float* const norms = a.values(3);
      cp_async_16(Products::norms(stage) + at, count > 0 ? norms + first + at : norms, count * 4);
    }
    cp_async_commit();
  };
  for (int i = 0; i < Products::kOwn / kPiece; i++) fetch(i, first_key + i * kPiece);
  cp_async_wait<0>();
  products.take_own();
  const int first_own = first_key + Products::own();
  PerRow<Column> column[kTiles] = {};
  products.for_parts(base, first_own >= e.slots, fetch, [&](int begin, auto& s, const float* norms) {
    const int end = begin + Products::kPart;
    const bool whole =
        begin > e.first && end <= e.slots && (end <= first_own || begin >= first_own + Products::kWarpOwn);
    const auto add_up = [&](auto edge) {
      constexpr bool masked = decltype(edge)::value;  // rows that are none, or the own ones, are among them
#pragma unroll
      for (int t = 0; t < kTiles; t++)
        s[t].for_pairs([&](LaneRow i, int c, float2 dot) {
          const float2 cosine = products.cosines(t, i, dot, norms + c);
          float two[2] = {cosine.x, cosine.y};
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const int r = begin + c + j;
            if (masked && r == first_own + 16 * t + i) two[j] = 0;
            if (masked && (r < e.first || r >= e.slots)) continue;
            column[t][i].add(two[j], r, two[j] > a.threshold || (masked && r == e.first));
          }
        });
    };
    whole ? add_up(std::false_type{}) : add_up(std::true_type{});
  });
#pragma unroll
  for (int t = 0; t < kTiles; t++)
    for_rows([&](LaneRow i) {
      Column& x = column[t][i];
      x.sum = quad_sum(x.sum);
      for (int o = 1; o < 4; o *= 2) {
        const int later = __shfl_xor_sync(kAllLanes, x.last, o);
        const float there = __shfl_xor_sync(kAllLanes, x.similar, o);
        if (later > x.last) {
          x.last = later;
          x.similar = there;
        }
      }
      if (leads_quad()) x.store(a, e, first_own + 16 * t + i);
    });
}

// Computes r of each slot: the sum of its column, less the rows to which it is the last similar one, ascending.  Few
// slots are that of any row; a warp looks for the rows of one.  r is not needed before, so it holds marks at first.  A
// thread has the slots that it has in weigh_redundancy.
__device__ __forceinline__ void column_means(const RedundancyArgs& a, const KvCompression& e, float* r) {
  const float *sums = a.values(0), *last = a.values(1), *similar = a.values(2);
  int* const marks = reinterpret_cast<int*>(r);
  for (int slot = e.first + threadIdx.x; slot < e.slots; slot += kThreads) marks[slot] = 0;
  __syncthreads();
  for (int i = e.first + threadIdx.x; i < e.slots; i += kThreads) atomicMax(marks + static_cast<int>(last[i]), 1);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int begin = e.first + threadIdx.x / 32 * 32; begin < e.slots; begin += kThreads) {
    const int slot = begin + lane;
    float sum = slot < e.slots ? sums[slot] : 0.f;
    for (unsigned marked = __ballot_sync(kAllLanes, slot < e.slots && marks[slot]); marked; marked &= marked - 1) {
      const int owner = __ffs(marked) - 1;
      float x = __shfl_sync(kAllLanes, sum, owner);
#pragma unroll 2
      for (int first = e.first; first < e.slots; first += 32) {
        const int i = first + lane;
        const bool is = i < e.slots && last[i] == static_cast<float>(begin + owner);
        const float s = is ? similar[i] : 0.f;
        for (unsigned rows = __ballot_sync(kAllLanes, is); rows; rows &= rows - 1)
          x -= __shfl_sync(kAllLanes, s, __ffs(rows) - 1);
      }
      if (lane == owner) sum = x;
    }
    if (slot < e.slots) r[slot] = sum / static_cast<float>(e.slots - e.first);
  }
}

// Computes score = lambda * score - (1 - lambda) * softmax(r).
__global__ void __launch_bounds__(kThreads) weigh_redundancy(const RedundancyArgs a) {
  __shared__ float tops[kWarps], exps[kThreads], total;
  const KvCompression e = a.compressions.get();
  const int base = e.first / kPageSlots * kPageSlots, candidates = e.slots - e.recent;
  if (e.first >= candidates) return;
  float* const r = a.values(3);
  column_means(a, e, r);
  float top = -INFINITY, sum = 0;
  for (int slot = e.first + threadIdx.x; slot < e.slots; slot += kThreads) top = fmaxf(top, r[slot]);
  top = warp_max(top);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  for (float x : tops) top = fmaxf(top, x);
  for (int begin = base; begin < e.slots; begin += kThreads) {
    const int slot = begin + static_cast<int>(threadIdx.x);
    exps[threadIdx.x] = slot >= e.first && slot < e.slots ? exp_at_most_1(r[slot] - top) : 0.f;
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
    score[slot] = a.lambda * score[slot] - (1.f - a.lambda) * (exp_at_most_1(r[slot] - top) / total);
}

}  // namespace

void kv_window_scores(const KvWindowScores& a, Stream stream) {
  const char* op = "kv_window_scores";
  const int64_t kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2];
  expect_heads(op, head_dim, kv_heads);
  expect(a.kernel / 2 <= kThreads, op, ": kernel is ", a.kernel, ", expected at most ", 2 * kThreads + 1);
  const Compressions compressions = compressions_of(a.compressions, a.src_pages, kv_heads);
  if (compressions.count == 0) return;
  with_act(op, a.k_pages, [&](auto type) {
    using T = decltype(type);
    expect(sizeof(T) == 4 || aligned16(a.k_pages, {}), op, ": pages must be 16-byte aligned");
    const int group = group_of(op, a.windows.shape[1], kv_heads), most = std::min(a.window, kTileRows / group);
    WindowArgs<T> args{.score = a.score.as<float>(),
                       .windows = a.windows.as<T>(),
                       .k_pages = a.k_pages.as<T>(),
                       .window_first = a.window_first ? a.window_first.as<int32_t>() : nullptr,
                       .compressions = compressions,
                       .max_slots = a.score.shape[2],
                       .window_stride = a.windows.stride[0],
                       .head_dim = static_cast<int>(head_dim),
                       .group = group,
                       .window = a.window,
                       .kernel = a.kernel,
                       .at_once = most,
                       .kept = 0,
                       .aggregate = a.aggregate,
                       .span = a.span,
                       .pool = a.pool,
                       .scale = a.scale};
    // Logits are kept where the keys are then read in fewer rounds than in three passes.
    size_t bytes = KeyTile<T>::bytes(head_dim);
    const int64_t slots = round_up(a.score.shape[2], kTileSlots);
    const int64_t query = slots * (a.aggregate == GqaAgg::mean_prob ? group : 1) * int64_t{sizeof(float)};
    const int64_t room = kWindowBytes - static_cast<int64_t>(bytes), fit = std::min<int64_t>(most, room / query);
    if (fit > 0 && ceil_div<int64_t>(a.window, fit) <= 3 * ceil_div<int64_t>(a.window, most)) {
      args.at_once = static_cast<int>(fit);
      args.kept = static_cast<int>(slots);
      bytes += static_cast<size_t>(fit * query);
    }
    launch(
        op, window_scores<T>,
        {.grid = blocks(op, int64_t{compressions.count} * compressions.kv_heads, 1), .block = kThreads, .smem = bytes},
        stream, args);
  });
}

void kv_mass_scores(const KvMassScores& a, Stream stream) {
  const char* op = "kv_mass_scores";
  const int64_t kv_heads = a.mass_pages.shape[1];
  const Compressions compressions = compressions_of(a.compressions, a.src_pages, kv_heads);
  if (compressions.count == 0) return;
  launch(op, mass_scores,
         {.grid = dim3(blocks(op, int64_t{compressions.count} * kv_heads, 1), blocks(op, a.score.shape[2], kThreads)),
          .block = kThreads},
         stream, a.score.as<float>(), a.mass_pages.as<float>(), compressions, a.score.shape[2]);
}

void kv_redundancy(const KvRedundancy& a, Stream stream) {
  const char* op = "kv_redundancy";
  const int64_t kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2], row = a.src_pages.shape[1] * kPageSlots;
  expect_heads(op, head_dim, kv_heads);
  const Compressions compressions = compressions_of(a.compressions, a.src_pages, kv_heads);
  if (compressions.count == 0 || row == 0) return;
  RedundancyArgs args{.score = a.score.as<float>(),
                      .workspace = a.workspace.as<float>(),
                      .compressions = compressions,
                      .max_slots = a.score.shape[2],
                      .row = row,
                      .head_dim = static_cast<int>(head_dim),
                      .lambda = a.lambda,
                      .threshold = a.threshold};
  const unsigned heads = blocks(op, int64_t{compressions.count} * kv_heads, 1);
  expect(aligned16(a.workspace, {}), op, ": the workspace must be 16-byte aligned");
  const auto with = [&](int own, auto kernel, int threads, size_t bytes, const auto* k_pages) {
    launch_key_norms<std::remove_cvref_t<decltype(*k_pages)>>(op, compressions, a.k_pages, args.workspace + 3 * row,
                                                              4 * row, row, stream);
    args.compressions.tiles = static_cast<int>(ceil_div(row, own));
    launch(op, kernel,
           {.grid = blocks(op, heads * int64_t{args.compressions.tiles}, 1), .block = threads, .smem = bytes}, stream,
           args, k_pages);
  };
  const auto with16 = [&](auto channels) {
    using Products = KeyProducts<decltype(channels)::value>;
    with(Products::kOwn, columns_of_s16<decltype(channels)::value>, Products::kBlock, Products::bytes,
         a.k_pages.as<bf16>());
  };
  if (a.k_pages.dtype == DType::f32)
    with(kTileRows, columns_of_s, kThreads, KeyTile<float>::bytes(head_dim), a.k_pages.as<float>());
  else
    with_channels(head_dim, with16);
  args.compressions.tiles = 1;
  launch(op, weigh_redundancy, {.grid = heads, .block = kThreads}, stream, args);
}

}  // namespace pare::PARE_CUDA
