// Block-sparse reads (KvBlockSummary, KvBlockSelect, AttnBlockSelect): summaries of the keys of each block, and the
// choice of blocks by them, for decode steps over pages and, with the same bits, for the rows of packed sequences.
//
//   score(block) = sum_c q[c] mean[c], q the mean of the queries of a group, or
//                  max over these queries of sum_c max(q[c] min[c], q[c] max[c])
//
//   blocks of a row    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |
//   read               |###|     ###             ###   |###|    the first, the best by score, the last
//
// k_pages [pages, K, D, 16]; summary [pages, K, 16 / block * rows, D] or [S, K, max_blocks * rows, D], rows 1 (mean) or
// 2 (min, max); score [S, K, max_scored], f32; blocks [sequences or N, K, max_listed].  Overwritten, and
// nothing else: the summaries of blocks that the entries name, the scores that are computed, the lists of the entries
// or rows that choose.
//
// Order: list.h.  Sums are in f32 for every element type, so f32 has the bits of the `cpu` table; a mean is rounded
// once.  Of equal scores the smaller block is taken.
//
// Bytes: summaries read every key once and write 1 / block of it (min, max: twice that).  The choice reads the
// summaries of all blocks of a row: min, max once for each query head, mostly from L1.  Limited by memory bandwidth in
// decode; for packed rows, each of which reads the summaries before it, by L2.
#include "attention.cuh"
#include "ops/blocks.h"

namespace pare::PARE_CUDA {

namespace {

constexpr int kSide = 16;  // logical lanes of a row sum

// ---- summaries

constexpr __device__ int height(BlockSummary kind) { return kind == BlockSummary::minmax ? 2 : 1; }  // summary_rows

// One channel of n keys, key(i) being the i-th: put(row, value).
template <class Key, class Put>
__device__ __forceinline__ void summarise(BlockSummary kind, int n, Key key, Put put) {
  float low = key(0), high = low, sum = 0.f + low;
  for (int i = 1; i < n; i++) {
    const float x = key(i);
    low = x < low ? x : low;
    high = x > high ? x : high;
    sum += x;
  }
  if (kind == BlockSummary::minmax) {
    put(0, low);
    put(1, high);
  } else
    put(0, sum * (1.f / static_cast<float>(n)));
}

// Pages of a sequence: that of slot s is table[table_row][s / 16].
struct PageTable {
  const int32_t* table;
  int64_t stride;
  const int4* queries;  // [S]: PagedRow
  int n_queries, kv_heads, head_dim, block;
  BlockSummary kind;
  __device__ __forceinline__ int64_t head(int table_row, int page, int kv) const {  // number of (page, head)
    return int64_t{table[table_row * stride + page]} * kv_heads + kv;
  }
};

// blockIdx.x is a page that received slots, blockIdx.y the key head.
template <class T>
__global__ void __launch_bounds__(kThreads)
    summarise_pages(T* __restrict__ summary, const T* __restrict__ k_pages, const PageTable p) {
  const Piece piece = find_piece(p.n_queries, blockIdx.x, [&](int i) {
    const auto q = entry_at<PagedRow>(p.queries, i);
    return q.rows ? ceil_div(q.slots, kPageSlots) - (q.slots - q.rows) / kPageSlots : 0;
  });
  if (piece.owner == p.n_queries) return;
  const auto q = entry_at<PagedRow>(p.queries, piece.owner);
  const int page = (q.slots - q.rows) / kPageSlots + piece.index,
            present = min(kPageSlots, q.slots - page * kPageSlots);
  const int64_t head = p.head(q.table_row, page, blockIdx.y), size = kPageSlots / p.block * height(p.kind) * p.head_dim;
  for (int c = threadIdx.x; c < p.head_dim; c += kThreads) {
    const T* key = k_pages + (head * p.head_dim + c) * kPageSlots;
    T* out = summary + head * size + c;
    for (int begin = 0; begin < present; begin += p.block, out += height(p.kind) * p.head_dim)
      summarise(
          p.kind, min(p.block, present - begin), [&](int i) { return to_float(key[begin + i]); },
          [&](int row, float x) { out[row * p.head_dim] = from_float<T>(x); });
  }
}

// How a row chooses: the first and the last blocks, and the best of those between.
struct Rule {
  int first, last, block;
};
template <class T>
struct OfSegments {
  T* summary;  // [S, K, room, D]
  int room;
  BlockSummary kind;
  const T *q, *k, *pk;
  int64_t q_stride, k_stride, pk_stride;
  const int4* segments;
  int n_segments, heads, kv_heads, head_dim;
  Rule rule;
  const int32_t* budget;
  int32_t* blocks;  // [N, K, max_listed]
  int max_listed, max_scored;
  bool vector;
  // Of block b of a segment.
  __device__ __forceinline__ T* summary_of(int segment, int kv, int b) const {
    return summary + ((int64_t{segment} * kv_heads + kv) * room + b * height(kind)) * head_dim;
  }
};

// blockIdx.x is a whole block of a segment, blockIdx.y the key head.
template <class T>
__global__ void __launch_bounds__(kThreads) summarise_segments(const OfSegments<T> a) {
  const int block = a.rule.block;
  const Piece b = find_piece(a.n_segments, blockIdx.x, [&](int i) {
    const auto s = entry_at<SegmentRow>(a.segments, i);
    return (s.len + s.parent_len) / block;
  });
  if (b.owner == a.n_segments) return;
  const auto s = entry_at<SegmentRow>(a.segments, b.owner);
  const int kv = blockIdx.y;
  T* out = a.summary_of(b.owner, kv, b.index);
  for (int c = threadIdx.x; c < a.head_dim; c += kThreads)
    summarise(
        a.kind, block,
        [&](int i) {
          const int64_t slot = b.index * block + i;
          const T* row = slot < s.parent_len ? a.pk + (s.parent_row + slot) * a.pk_stride
                                             : a.k + (s.row + slot - s.parent_len) * a.k_stride;
          return to_float(row[kv * a.head_dim + c]);
        },
        [&](int row, float x) { out[row * a.head_dim + c] = from_float<T>(x); });
}

// ---- scores

// The queries of a key head in shared memory, rows of D rounded up to 16 with zeros at the end; one row, their mean,
// for `mean`.
template <BlockSummary kKind, class T>
__device__ void load_queries(float* to, const T* q, int group, int head_dim) {
  const int padded = round_up(head_dim, kSide), rows = kKind == BlockSummary::mean ? 1 : group;
  for (int i = threadIdx.x; i < rows * padded; i += kThreads) {
    const int g = i / padded, c = i % padded;
    float x = 0;
    if (c < head_dim && kKind == BlockSummary::minmax) x = to_float(q[g * head_dim + c]);
    if (c < head_dim && kKind == BlockSummary::mean) {
      for (int h = 0; h < group; h++) x += to_float(q[h * head_dim + c]);
      x *= 1.f / static_cast<float>(group);
    }
    to[i] = x;
  }
}

// The row sum over channels for one query, in every thread of the kSide / kPack<T> that share a block: thread `part`
// has the lanes part * kPack + [0, kPack), 16 bytes of a summary.
template <BlockSummary kKind, bool kVector, class T>
__device__ __forceinline__ float score_of(const float* q, const T* summary, int part, int head_dim) {
  constexpr int n = kPack<T>;
  float lanes[n] = {};
  for (int c = part * n; c < head_dim; c += kSide) {
    const Pack<T> low = load_pack<kVector>(summary + c, head_dim - c);
    Pack<T> high = low;
    if constexpr (kKind == BlockSummary::minmax) high = load_pack<kVector>(summary + head_dim + c, head_dim - c);
#pragma unroll
    for (int e = 0; e < n; e++) {
      const float x = q[c + e], x_low = x * to_float(low.v[e]), x_high = x * to_float(high.v[e]);
      if constexpr (kKind == BlockSummary::minmax)
        lanes[e] += x_low > x_high ? x_low : x_high;
      else
        lanes[e] = fmaf(x, to_float(low.v[e]), lanes[e]);
    }
  }
#pragma unroll
  for (int o = kSide / n / 2; o > 0; o /= 2)
#pragma unroll
    for (int e = 0; e < n; e++) lanes[e] += __shfl_xor_sync(kAllLanes, lanes[e], o);
#pragma unroll
  for (int o = n / 2; o > 0; o /= 2)
#pragma unroll
    for (int e = 0; e < o; e++) lanes[e] += lanes[e + o];
  return lanes[0];
}

// score[i] for i < n; q: load_queries; summary_of(i): the rows of the i-th block.
template <BlockSummary kKind, bool kVector, class Summary>
__device__ void score_blocks(float* score, const float* q, int group, int head_dim, int n, Summary summary_of) {
  using T = std::remove_cvref_t<decltype(*summary_of(0))>;
  constexpr int kParts = kSide / kPack<T>;
  const int padded = round_up(head_dim, kSide), part = threadIdx.x % kParts;
  for (int begin = 0; begin < n; begin += kThreads / kParts) {  // whole warps: their lanes add up
    const int i = begin + threadIdx.x / kParts;
    const T* summary = summary_of(min(i, n - 1));
    float best = kKind == BlockSummary::mean ? score_of<kKind, kVector>(q, summary, part, head_dim) : -INFINITY;
    for (int g = 0; kKind == BlockSummary::minmax && g < group; g++) {
      const float x = score_of<kKind, kVector>(q + g * padded, summary, part, head_dim);
      best = x > best ? x : best;
    }
    if (i < n && part == 0) score[i] = best;
  }
}

// ---- the choice

struct Least {
  uint32_t key;
  int ties;  // of the blocks that have just this key, the first so many are chosen
};

// The n-th largest of m ordered scores, n >= 1, in every thread: eight bits at a time, from the top.
__device__ Least nth_largest(const float* score, int m, int n) {
  constexpr int kDigits = 256, kEach = kDigits / 32;
  __shared__ int counts[kDigits];
  __shared__ Least found;
  Least least{0, n};
  uint32_t known = 0;  // the bits of the key that are known
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kDigits; i += kThreads) counts[i] = 0;
    __syncthreads();
    for (int b = threadIdx.x; b < m; b += kThreads) {
      const uint32_t x = ordered(score[b]);
      if ((x & known) == least.key) atomicAdd(&counts[x >> shift & (kDigits - 1)], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // lane 0 has the largest digits
      const int lane = threadIdx.x, top = kDigits - 1 - lane * kEach;
      int own = 0;
      for (int i = 0; i < kEach; i++) own += counts[top - i];
      int upto = own;
      for (int o = 1; o < 32; o *= 2) {
        const int before = __shfl_up_sync(kAllLanes, upto, o);
        if (lane >= o) upto += before;
      }
      int left = least.ties - (upto - own);
      if (left > 0 && left <= own) {  // the n-th is among this lane's
        int digit = top;
        for (; left > counts[digit]; digit--) left -= counts[digit];
        found = {least.key | static_cast<uint32_t>(digit) << shift, left};
      }
    }
    __syncthreads();
    least = found;
    known |= static_cast<uint32_t>(kDigits - 1) << shift;
  }
  return least;
}

// list: the n best of the m blocks from `first` on, by score[i], ascending.
__device__ void take_best(int32_t* list, int n, int first, const float* score, int m) {
  __shared__ int2 sums[kWarps];
  if (n <= 0) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Least least = nth_largest(score, m, n);
  // A thread takes a run of scores; how many before it are above the least, how many equal to it?
  const int each = ceil_div(m, kThreads);
  const int begin = min(m, static_cast<int>(threadIdx.x) * each), stop = min(m, begin + each);
  int2 own{0, 0};
  for (int i = begin; i < stop; i++) {
    const uint32_t x = ordered(score[i]);
    own.x += x > least.key;
    own.y += x == least.key;
  }
  int2 upto = own;
  for (int o = 1; o < 32; o *= 2) {
    const int above = __shfl_up_sync(kAllLanes, upto.x, o), equal = __shfl_up_sync(kAllLanes, upto.y, o);
    if (lane >= o) {
      upto.x += above;
      upto.y += equal;
    }
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  int above = upto.x - own.x, equal = upto.y - own.y;
  for (int w = 0; w < warp; w++) {
    above += sums[w].x;
    equal += sums[w].y;
  }
  int32_t* to = list + above + min(equal, least.ties);
  for (int i = begin; i < stop; i++) {
    const uint32_t x = ordered(score[i]);
    if (x > least.key || (x == least.key && equal++ < least.ties)) *to++ = first + i;
  }
}

// list: `budget` of `all` blocks.  q: load_queries; score: room for those between; summary_of(b): the rows of a block.
template <BlockSummary kKind, bool kVector, class Summary>
__device__ void choose(int32_t* list, float* score, const float* q, int group, int head_dim, const Rule& rule, int all,
                       int budget, Summary summary_of) {
  const int between = all - rule.first - rule.last, n = budget - rule.first - rule.last;
  score_blocks<kKind, kVector>(score, q, group, head_dim, between, [&](int i) { return summary_of(rule.first + i); });
  __syncthreads();
  for (int i = threadIdx.x; i < rule.first; i += kThreads) list[i] = i;
  for (int i = threadIdx.x; i < rule.last; i += kThreads) list[rule.first + n + i] = all - rule.last + i;
  take_best(list + rule.first, n, rule.first, score, between);
}

template <class T>
struct OfPages {
  PageTable p;
  const T *q, *summary;
  int64_t q_stride;
  const int32_t* budget;
  float* score;     // [S, K, max_scored]
  int32_t* blocks;  // [sequences, K, max_listed]
  int max_scored, max_listed, heads;
  Rule rule;
  bool vector;
};

// blockIdx.x is an entry, blockIdx.y the key head.
template <BlockSummary kKind, bool kVector, class T>
__global__ void __launch_bounds__(kThreads, 6) select_paged(const OfPages<T> a) {
  const PageTable& p = a.p;
  const auto entry = entry_at<PagedRow>(p.queries, blockIdx.x);
  const int all = ceil_div(entry.slots, p.block), budget = a.budget[entry.table_row], kv = blockIdx.y;
  if (entry.rows != 1 || all <= budget) return;
  const int group = a.heads / p.kv_heads, per_page = kPageSlots / p.block, rows = height(kKind);
  float* q = dynamic_smem<float>();
  load_queries<kKind>(q, a.q + entry.row * a.q_stride + kv * group * p.head_dim, group, p.head_dim);
  __syncthreads();
  choose<kKind, kVector>(a.blocks + (int64_t{entry.table_row} * p.kv_heads + kv) * a.max_listed,
                         a.score + (int64_t{blockIdx.x} * p.kv_heads + kv) * a.max_scored, q, group, p.head_dim, a.rule,
                         all, budget, [&](int b) {
                           return a.summary + (p.head(entry.table_row, b / per_page, kv) * per_page + b % per_page) *
                                                  rows * p.head_dim;
                         });
}

// blockIdx.x is an own row, blockIdx.y the key head.
template <BlockSummary kKind, bool kVector, class T>
__global__ void __launch_bounds__(kThreads, 6) select_packed(const OfSegments<T> a) {
  const Tile t = find_tile<1>(a.segments, a.n_segments, blockIdx.x);
  if (t.len == 0) return;
  const int64_t row = t.row + t.first;
  const int all = (t.parent_len + t.first + a.rule.block) / a.rule.block, budget = a.budget[row], kv = blockIdx.y;
  if (all <= budget) return;
  const int group = a.heads / a.kv_heads;
  float* score = dynamic_smem<float>();
  float* q = score + a.max_scored;
  load_queries<kKind>(q, a.q + row * a.q_stride + kv * group * a.head_dim, group, a.head_dim);
  __syncthreads();
  choose<kKind, kVector>(a.blocks + (row * a.kv_heads + kv) * a.max_listed, score, q, group, a.head_dim, a.rule, all,
                         budget, [&](int b) { return static_cast<const T*>(a.summary_of(t.entry, kv, b)); });
}

// ---- launchers

constexpr size_t kSmem = 160 * 1024;

size_t query_bytes(BlockSummary kind, int64_t group, int64_t head_dim) {
  return sizeof(float) * (kind == BlockSummary::mean ? 1 : group) * round_up(head_dim, kSide);
}
template <class A>
Rule rule_of(const A& a) {
  return {a.first_blocks, a.last_blocks, a.block};
}
template <class A>
PageTable page_table(const char* op, const A& a) {
  return {.table = a.page_table.template as<int32_t>(),
          .stride = a.page_table.stride[0],
          .queries = entries(op, a.queries),
          .n_queries = static_cast<int>(a.queries.shape[0]),
          .kv_heads = static_cast<int>(a.summary.shape[1]),
          .head_dim = static_cast<int>(a.summary.shape[3]),
          .block = a.block,
          .kind = a.kind};
}

template <class Args>
void select(const char* op, BlockSummary kind, const LaunchShape& shape, Stream stream, const Args& a,
            void (*mean)(Args), void (*mean_vector)(Args), void (*minmax)(Args), void (*minmax_vector)(Args)) {
  launch(op,
         kind == BlockSummary::mean ? a.vector ? mean_vector : mean
         : a.vector                 ? minmax_vector
                                    : minmax,
         shape, stream, a);
}

}  // namespace

void kv_block_summary(const KvBlockSummary& a, Stream stream) {
  const char* op = "kv_block_summary";
  const int64_t kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2];
  const PageTable p = page_table(op, a);
  expect_heads(op, head_dim, kv_heads);
  if (a.pages == 0 || kv_heads == 0 || head_dim == 0) return;
  with_act(op, a.k_pages, [&](auto type) {
    using T = decltype(type);
    launch(op, summarise_pages<T>,
           {.grid = dim3(blocks(op, a.pages, 1), static_cast<unsigned>(kv_heads)), .block = kThreads}, stream,
           a.summary.as<T>(), a.k_pages.as<T>(), p);
  });
}

void kv_block_select(const KvBlockSelect& a, Stream stream) {
  const char* op = "kv_block_select";
  const int64_t rows = a.queries.shape[0], heads = a.q.shape[1], head_dim = a.q.shape[2], kv_heads = a.summary.shape[1];
  expect_heads(op, head_dim, heads);
  with_act(op, a.q, [&](auto type) {
    using T = decltype(type);
    OfPages<T> x{};
    x.p = page_table(op, a);
    x.rule = rule_of(a);
    x.q = a.q.as<T>();
    x.summary = a.summary.as<T>();
    x.q_stride = a.q.stride[0];
    x.budget = a.budget.as<int32_t>();
    x.score = a.score.as<float>();
    x.blocks = a.blocks.as<int32_t>();
    x.max_scored = static_cast<int>(a.score.shape[2]);
    x.max_listed = static_cast<int>(a.blocks.shape[2]);
    x.heads = static_cast<int>(heads);
    x.vector = aligned16(a.summary, {head_dim});
    if (rows == 0 || a.scored == 0) return;
    const size_t smem = query_bytes(a.kind, heads / kv_heads, head_dim);
    expect(smem <= kSmem, op, ": q ", a.q.str(), " does not fit in shared memory");
    using B = BlockSummary;
    select(op, a.kind,
           {.grid = dim3(blocks(op, rows, 1), static_cast<unsigned>(kv_heads)), .block = kThreads, .smem = smem},
           stream, x, select_paged<B::mean, false, T>, select_paged<B::mean, true, T>,
           select_paged<B::minmax, false, T>, select_paged<B::minmax, true, T>);
  });
}

void attn_block_select(const AttnBlockSelect& a, Stream stream) {
  const char* op = "attn_block_select";
  const int64_t n = a.q.shape[0], heads = a.q.shape[1], head_dim = a.q.shape[2], kv_heads = a.k.shape[1];
  expect_heads(op, head_dim, heads);
  const int64_t most_blocks = a.summary.shape[2] / summary_rows(a.kind);
  const size_t smem =
      sizeof(float) * static_cast<size_t>(most_blocks) + query_bytes(a.kind, heads / kv_heads, head_dim);
  expect(smem <= kSmem, op, ": the scores of ", most_blocks, " blocks do not fit in shared memory");
  with_act(op, a.q, [&](auto type) {
    using T = decltype(type);
    OfSegments<T> x{};
    x.summary = a.summary.as<T>();
    x.room = static_cast<int>(a.summary.shape[2]);
    x.kind = a.kind;
    x.q = a.q.as<T>();
    x.k = a.k.as<T>();
    x.pk = a.pk.as<T>();
    x.q_stride = a.q.stride[0];
    x.k_stride = a.k.stride[0];
    x.pk_stride = a.pk.stride[0];
    x.segments = entries(op, a.segments);
    x.n_segments = static_cast<int>(a.segments.shape[0]);
    x.heads = static_cast<int>(heads);
    x.kv_heads = static_cast<int>(kv_heads);
    x.head_dim = static_cast<int>(head_dim);
    x.rule = rule_of(a);
    x.budget = a.budget.as<int32_t>();
    x.blocks = a.blocks.as<int32_t>();
    x.max_listed = static_cast<int>(a.blocks.shape[2]);
    x.max_scored = static_cast<int>(most_blocks);
    x.vector = aligned16(a.summary, {head_dim});
    // A segment has a summary for each whole block.
    if (const int64_t most = a.slots / a.block; most && kv_heads)
      launch(op, summarise_segments<T>,
             {.grid = dim3(blocks(op, most, 1), static_cast<unsigned>(kv_heads)), .block = kThreads}, stream, x);
    if (n == 0 || a.scored == 0) return;
    using B = BlockSummary;
    select(op, a.kind,
           {.grid = dim3(blocks(op, n, 1), static_cast<unsigned>(kv_heads)), .block = kThreads, .smem = smem}, stream,
           x, select_packed<B::mean, false, T>, select_packed<B::mean, true, T>, select_packed<B::minmax, false, T>,
           select_packed<B::minmax, true, T>);
  });
}

}  // namespace pare::PARE_CUDA
