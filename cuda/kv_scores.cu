// Scores of the slots of a cache that evicts (ops/kv_ops.h: KvWindowScores, KvRedundancy, KvMassScores;
// attention_ops.h: mass_pages of AttnPaged).
//
// k_pages [pages, K, D, 16] act, D <= 256; windows, q [N, H, D] act, at most 16 query heads a key head; score [E, K,
// max_slots], mass_pages [pages, K, 16] f32.  Candidates of `score` are overwritten (kv_redundancy: changed in place),
// nothing else of it; the mass of slots past `first` is added to, that of new slots overwritten. Order: kv_ops.h, in
// f32 whatever the element type, so f32 has the bits of the `cpu` table.
//
// Queries (kv_window_scores, mass): a thread block has a key head of an event or entry, 16 query rows at a time, a tile
// of 256 slots at a time.  Three passes over the keys give the maximum, the sum of exponentials and the probabilities
// of a row; the products are computed anew in each, so no logits are stored, however many slots there are.  Mass needs
// two passes, after attn_paged: the online softmax of blocks of 64, then its weights.  Sums over queries are continued
// in `score` and mass_pages, each slot by one thread.
//
// Bytes: K three times (twice) for every 16 rows, from L2 but for the first; limited by fused multiply-adds, 2 * H * D
// * rows * slots a pass. The mass of a long prefill is walked by few blocks, one a key head and sequence.
//
// Keys (kv_redundancy): a thread block owns 64 columns of S and walks all rows, 64 x 64 products at a time; S is never
// stored.  2 * K * D * slots^2 operations, without tensor cores, which limit it; K once for each 64 columns, from L2.
#include "kv_event.cuh"

namespace pare::PARE_CUDA {

namespace {

using QueryTile = DotTile<16, 256>;
constexpr int kQueries = 16, kSlots = kThreads;  // rows and columns of it: a slot a thread

// Softmax probabilities of up to 16 rows of logits over the slots [first, end(row)), where end ascends with the row.
// t.rows holds the queries of `products` rows; where these are more than `rows`, combine() makes `rows` rows of t.z of
// them.  Both it and add(slot) are called by the thread of a slot below `last`, whose column of t.z begins at
// threadIdx.x: of logits, then of probabilities.
template <class T, class End, class Combine, class Add>
__device__ __forceinline__ void softmax_rows(const QueryTile& t, const T* k_pages, const HeadPages& pages, int first,
                                             int last, int products, int rows, float scale, End end_of, Combine combine,
                                             Add add) {
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int end = row < rows ? end_of(row) : 0;
  float* const z = t.z + row * QueryTile::kColumnStep;
  float top = -INFINITY, sum = 0;
  for (int pass = 0; pass < 3; pass++) {
    for (int begin = first / kPageSlots * kPageSlots; begin < last; begin += kSlots) {
      t.multiply(products, last - begin, scale, [&](int j) {
        const int slot = begin + j;
        return Key<T>{slot >= first && slot < last ? key_at(k_pages, pages, slot, t.depth) : nullptr, 0};
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
  int depth, group, window, kernel;
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
  const QueryTile t(a.depth);
  const bool prob = a.aggregate == GqaAgg::mean_prob, best = a.aggregate == GqaAgg::max_logit;
  const bool exclude = a.span == SoftmaxSpan::exclude_window;
  const auto aggregate = [&](float* z, int to, int from, bool largest) {  // a column: row `to` from `group` rows
    float x = z[from * QueryTile::kColumnStep];
    for (int g = 1; g < group; g++) {
      const float next = z[(from + g) * QueryTile::kColumnStep];
      x = largest ? fmaxf(x, next) : x + next;
    }
    z[to * QueryTile::kColumnStep] = largest ? x : x / static_cast<float>(group);
  };
  for (int first_t = 0, count; first_t < a.window; first_t += count) {
    count = min(kQueries / group, a.window - first_t);  // queries at once, with all their heads
    t.load_rows([&](int i) {
      const int row = e.window_row + (oldest + first_t + i / group) % a.window;
      return Query<T>{
          i < count * group ? a.windows + row * a.window_stride + (h * group + i % group) * a.depth : nullptr, 0};
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
            sum += column[i * QueryTile::kColumnStep];
          }
          score[slot] = first_t + count == a.window ? sum / static_cast<float>(a.window) : sum;
        });
  }
  if (a.kernel == 1) return;
  __syncthreads();
  pool_slots(score, t.z, e.first, candidates, a.pool, a.kernel);
}

// ---- accumulated attention

template <class T>
struct MassArgs {
  float* mass_pages;
  const T *q, *k_pages;
  const int32_t* page_table;
  const PagedRow* queries;
  const int32_t* first;
  int64_t q_stride, table_stride;
  int kv_heads, depth, group;
  float scale;
};

constexpr int kAttnBlock = 64;  // slots of a block of the online softmax

// The online softmax of up to 16 rows over the slots [0, end(row)), a row a half warp, in two passes: the first gives
// the maximum and the sum of the row, the second leaves the weights of a tile in t.z and what a weight is worth in
// `worth`, and calls add(slot).
template <class T, class End, class Add>
__device__ __forceinline__ void weigh_rows(const MassArgs<T>& a, const QueryTile& t, const HeadPages& pages, int count,
                                           int last, float (*worth)[kSlots / kAttnBlock], End end_of, Add add) {
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, end = row < count ? end_of(row) : 0;
  float* const z = t.z + row * QueryTile::kColumnStep;
  const float scale = a.scale * kLog2E;
  float top = -INFINITY, sum = 0;
  for (int pass = 0; pass < 2; pass++) {
    float so_far = -INFINITY;
    for (int begin = 0; begin < last; begin += kSlots) {
      t.multiply(count, last - begin, 1, [&](int j) {
        return Key<T>{begin + j < last ? key_at(a.k_pages, pages, begin + j, t.depth) : nullptr, 0};
      });
      for (int block = 0; block < kSlots && begin + block < last; block += kAttnBlock) {
        float x[kAttnBlock / kLanes], next = -INFINITY, tree = 0;
        for (int i = 0; i < kAttnBlock / kLanes; i++) {
          const int j = block + lane + i * kLanes, slot = begin + j;
          x[i] = slot < end ? z[j] : -INFINITY;
          next = fmaxf(next, x[i] * scale);
        }
        next = fmaxf(so_far, lanes_max(next));
        for (int i = 0; i < kAttnBlock / kLanes; i++) tree += x[i] = exp2_f32(fmaf(x[i], scale, -next));
        if (pass == 0) {
          tree = lanes_sum(tree);
          sum = begin + block ? fmaf(sum, exp2_f32(so_far - next), tree) : tree;
        } else {
          for (int i = 0; i < kAttnBlock / kLanes; i++) z[block + lane + i * kLanes] = x[i];
          if (lane == 0) worth[row][block / kAttnBlock] = exp2_f32(next - top) / sum;
        }
        so_far = next;
      }
      if (pass == 0) continue;
      __syncthreads();
      const int slot = begin + static_cast<int>(threadIdx.x);
      if (slot < last) add(slot);
    }
    top = so_far;
  }
}

// blockIdx.x is the entry, blockIdx.y the key head.
template <class T>
__global__ void __launch_bounds__(kThreads, kTileBlocks) add_mass(const MassArgs<T> a) {
  __shared__ float worth[kQueries][kSlots / kAttnBlock];
  const PagedRow entry = a.queries[blockIdx.x];
  const int old = entry.slots - entry.rows, group = a.group, h = blockIdx.y, first = a.first[blockIdx.x];
  const HeadPages pages{a.page_table + entry.table_row * a.table_stride, a.kv_heads, h};
  const QueryTile t(a.depth);
  for (int row = 0; row < entry.rows * group; row += kQueries) {  // in the order (own row, head of the group)
    const int count = min(kQueries, entry.rows * group - row);
    t.load_rows([&](int i) {
      const int own = entry.row + (row + i) / group;
      return Query<T>{i < count ? a.q + own * a.q_stride + (h * group + (row + i) % group) * a.depth : nullptr, 0};
    });
    const auto end_of = [&](int i) { return old + (row + i) / group + 1; };
    weigh_rows(a, t, pages, count, end_of(count - 1), worth, end_of, [&](int slot) {
      if (slot < first) return;
      const bool fresh = slot >= old && (slot - old) * group >= row;  // no row before this tile saw it
      float* const mass = a.mass_pages + pages.at(slot);
      float sum = fresh ? 0.f : *mass;
      for (int i = 0; i < count; i++)
        if (slot < end_of(i))
          sum = fmaf(t.z[i * QueryTile::kColumnStep + threadIdx.x], worth[i][threadIdx.x / kAttnBlock], sum);
      *mass = sum;
    });
  }
}

// blockIdx.y is a run of slots.
__global__ void __launch_bounds__(kThreads)
    mass_scores(float* __restrict__ score, const float* __restrict__ mass_pages, const int32_t* __restrict__ pos_pages,
                const int32_t* __restrict__ position, Events events, int64_t max_slots) {
  const KvEvent e = events.get();
  const int slot = blockIdx.y * kThreads + threadIdx.x;
  if (slot < e.first || slot >= e.slots - e.recent) return;
  const int64_t at = events.head_pages().at(slot);
  const float mass = mass_pages[at];
  score[blockIdx.x * max_slots + slot] =
      position ? mass / static_cast<float>(position[events.event()] - pos_pages[at] + 1) : mass;
}

// ---- redundancy

template <class T>
struct RedundancyArgs {
  float *score, *workspace;
  const T* k_pages;
  Events events;
  int64_t max_slots, row;  // workspace: 4 rows of so many floats, by slot
  int depth;
  float lambda, threshold;
  // Sums of the columns of S; the last row above the threshold, or `first`; S there; norms of keys, later r.
  __device__ __forceinline__ float* values(int i) const { return workspace + (blockIdx.x * int64_t{4} + i) * row; }
};

// The columns of S of 64 slots, a thread a column; blockIdx.y says which.  S is symmetric bit by bit, so the products
// of a column's own key are those of the row.
template <class T>
__global__ void __launch_bounds__(kThreads, kTileBlocks) columns_of_s(const RedundancyArgs<T> a) {
  const KvEvent e = a.events.get();
  const int base = e.first / kPageSlots * kPageSlots, begin = base + 64 * blockIdx.y;
  if (begin >= e.slots || e.first >= e.slots - e.recent) return;
  const HeadPages pages = a.events.head_pages();
  const float* norms = a.values(3);
  const KeyTile t(a.depth);
  const auto key = [&](int slot) {
    if (slot < e.first || slot >= e.slots) return UnitKey<T>{nullptr, 0};
    return UnitKey<T>{key_at(a.k_pages, pages, slot, a.depth), norms[slot]};
  };
  t.load_rows([&](int i) { return key(begin + i); });
  const int column = begin + static_cast<int>(threadIdx.x);
  const bool mine = threadIdx.x < 64 && column >= e.first && column < e.slots;
  float sum = 0, similar = 0;
  int last = e.first;
  for (int row = base; row < e.slots; row += 64) {
    t.multiply(64, e.slots - row, 1, [&](int j) { return key(row + j); });
    for (int i = row; mine && i < min(row + 64, e.slots); i++) {
      if (i < e.first) continue;
      const float s = i == column ? 0.f : t.z[threadIdx.x * KeyTile::kColumnStep + i - row];
      sum += s;
      if (s > a.threshold || i == e.first) last = i, similar = s;
    }
  }
  if (mine) a.values(0)[column] = sum, a.values(1)[column] = static_cast<float>(last), a.values(2)[column] = similar;
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

// ---- launchers

// score [E, K, max_slots]
float* event_scores(const char* op, const Tensor& t, const Events& events) {
  expect(t.rank == 3, op, ": score is ", t.str(), ", not [E, K, max_slots]");
  return dense<float>(op, "score", t, {events.count, events.kv_heads, t.shape[2]});
}

int64_t group_of(const char* op, const Tensor& q, const Tensor& k_pages) {
  const int64_t kv_heads = k_pages.shape[1], heads = q.shape[1], d = k_pages.shape[2];
  expect(q.rank == 3 && q.dtype == k_pages.dtype && q.shape[2] == d && q.stride[1] == d && q.stride[2] == 1, op,
         ": queries ", q.str(), " must be [N, H, D] with contiguous heads, k_pages ", k_pages.str());
  expect(heads % kv_heads == 0 && heads / kv_heads <= kQueries, op, ": ", heads, " query heads over ", kv_heads,
         " key heads; at most ", kQueries, " can share one");
  return heads / kv_heads;
}

}  // namespace

void kv_window_scores(const KvWindowScores& a, Stream stream) {
  const char* op = "kv_window_scores";
  expect_k_pages(op, a.k_pages);
  const int64_t group = group_of(op, a.windows, a.k_pages), d = a.k_pages.shape[2];
  const Events events = events_of(op, a.events, a.src_pages, a.k_pages.shape[1]);
  float* const score = event_scores(op, a.score, events);
  expect(a.window >= 1 && a.window <= a.windows.shape[0], op, ": a window of ", a.window, " rows, windows ",
         a.windows.str());
  expect(a.kernel >= 1 && a.kernel % 2 == 1 && a.kernel / 2 <= kThreads, op, ": kernel is ", a.kernel,
         ", expected an odd number up to ", 2 * kThreads + 1);
  const int32_t* oldest = nullptr;
  if (a.window_first) oldest = dense<int32_t>(op, "window_first", a.window_first, {events.count});
  if (events.count == 0) return;
  with_act(op, a.k_pages, [&](auto type) {
    using T = decltype(type);
    const WindowArgs<T> args{.score = score,
                             .windows = a.windows.as<T>(),
                             .k_pages = a.k_pages.as<T>(),
                             .window_first = oldest,
                             .events = events,
                             .max_slots = a.score.shape[2],
                             .window_stride = a.windows.stride[0],
                             .depth = static_cast<int>(d),
                             .group = static_cast<int>(group),
                             .window = a.window,
                             .kernel = a.kernel,
                             .aggregate = a.aggregate,
                             .span = a.span,
                             .pool = a.pool,
                             .scale = a.scale};
    launch(op, window_scores<T>,
           {.grid = blocks(op, int64_t{events.count} * events.kv_heads, 1),
            .block = kThreads,
            .smem = QueryTile::bytes(d)},
           stream, args);
  });
}

void add_attention_mass(const AttnPaged& a, Stream stream) {
  const char* op = "attn_paged";
  expect_k_pages(op, a.k_pages);
  const int64_t group = group_of(op, a.q, a.k_pages), d = a.k_pages.shape[2], kv_heads = a.k_pages.shape[1];
  const int64_t n = a.queries.shape[0];
  expect(!a.blocks, op, ": block lists of slots that have mass");
  float* const mass = dense<float>(op, "mass_pages", a.mass_pages, {a.k_pages.shape[0], kv_heads, kPageSlots});
  const int32_t* const first = dense<int32_t>(op, "first", a.first, {n});
  if (n == 0) return;
  with_act(op, a.k_pages, [&](auto type) {
    using T = decltype(type);
    const MassArgs<T> args{.mass_pages = mass,
                           .q = a.q.as<T>(),
                           .k_pages = a.k_pages.as<T>(),
                           .page_table = a.page_table.as<int32_t>(),
                           .queries = reinterpret_cast<const PagedRow*>(a.queries.as<int32_t>()),
                           .first = first,
                           .q_stride = a.q.stride[0],
                           .table_stride = a.page_table.stride[0],
                           .kv_heads = static_cast<int>(kv_heads),
                           .depth = static_cast<int>(d),
                           .group = static_cast<int>(group),
                           .scale = a.scale};
    launch(op, add_mass<T>,
           {.grid = dim3(blocks(op, n, 1), static_cast<unsigned>(kv_heads)),
            .block = kThreads,
            .smem = QueryTile::bytes(d)},
           stream, args);
  });
}

void kv_mass_scores(const KvMassScores& a, Stream stream) {
  const char* op = "kv_mass_scores";
  const int64_t pages = a.mass_pages.shape[0], kv_heads = a.mass_pages.shape[1];
  const Events events = events_of(op, a.events, a.src_pages, kv_heads);
  float* const score = event_scores(op, a.score, events);
  const float* const mass = dense<float>(op, "mass_pages", a.mass_pages, {pages, kv_heads, kPageSlots});
  const int32_t *pos = nullptr, *position = nullptr;
  if (a.normalise) {
    pos = dense<int32_t>(op, "pos_pages", a.pos_pages, {pages, kv_heads, kPageSlots});
    position = dense<int32_t>(op, "position", a.position, {events.count});
  }
  if (events.count == 0) return;
  launch(op, mass_scores,
         {.grid = dim3(blocks(op, int64_t{events.count} * kv_heads, 1), blocks(op, a.score.shape[2], kThreads)),
          .block = kThreads},
         stream, score, mass, pos, position, events, a.score.shape[2]);
}

void kv_redundancy(const KvRedundancy& a, Stream stream) {
  const char* op = "kv_redundancy";
  expect_k_pages(op, a.k_pages);
  const int64_t kv_heads = a.k_pages.shape[1], d = a.k_pages.shape[2], row = a.src_pages.shape[1] * kPageSlots;
  const Events events = events_of(op, a.events, a.src_pages, kv_heads);
  float* const score = event_scores(op, a.score, events);
  float* const workspace = dense<float>(op, "workspace", a.workspace, {events.count, kv_heads, 4, row});
  if (events.count == 0 || row == 0) return;
  with_act(op, a.k_pages, [&](auto type) {
    using T = decltype(type);
    const RedundancyArgs<T> args{.score = score,
                                 .workspace = workspace,
                                 .k_pages = a.k_pages.as<T>(),
                                 .events = events,
                                 .max_slots = a.score.shape[2],
                                 .row = row,
                                 .depth = static_cast<int>(d),
                                 .lambda = a.lambda,
                                 .threshold = a.threshold};
    const unsigned heads = blocks(op, int64_t{events.count} * kv_heads, 1), runs = blocks(op, row, kThreads);
    launch(op, key_norms<T>, {.grid = dim3(heads, runs), .block = kThreads}, stream, events, args.k_pages, args.depth,
           workspace + 3 * row, 4 * row);
    launch(op, columns_of_s<T>,
           {.grid = dim3(heads, blocks(op, row, 64)), .block = kThreads, .smem = KeyTile::bytes(d)}, stream, args);
    launch(op, column_means<T>, {.grid = dim3(heads, runs), .block = kThreads}, stream, args);
    launch(op, weigh_redundancy<T>, {.grid = heads, .block = kThreads}, stream, args);
  });
}

}  // namespace pare::PARE_CUDA
