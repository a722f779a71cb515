// Code shared by the ops of an evicting cache (ops/compression.h): the places of the slots of a compression, tiles of
// dot products, of which scores are made, and norms of keys.
//
// Order: list.h.  Bytes: K of the slots once for each tile, and once for their norms.  Limited by the tensor cores;
// norms by memory bandwidth.
#pragma once
#include "fragment.cuh"
#include "ops/compression.h"

namespace pare::PARE_CUDA {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLanes = 16;  // of a row sum; a slot's lane is slot % 16
static_assert(kLanes == kPageSlots && sizeof(KvCompression) == 5 * sizeof(int32_t));

// Where the slots of one head of a compression or a sequence lie.
struct HeadPages {
  const int32_t* list;
  int kv_heads, h;
  __device__ __forceinline__ int64_t head(int slot) const {  // number of (page, head)
    return int64_t{list[slot / kPageSlots]} * kv_heads + h;
  }
  __device__ __forceinline__ int64_t at(int slot) const {  // in an array [pages, K, 16]
    return head(slot) * kPageSlots + slot % kPageSlots;
  }
};

// blockIdx.x counts pairs (compression, head), heads fastest; within a pair its tiles, if there are several: so the
// blocks that run at the same time share their keys in L2.
struct Compressions {
  const KvCompression* list;
  const int32_t* pages;  // src or dst; null where an op has none
  int64_t page_stride;
  int count, kv_heads, tiles = 1;
  __device__ __forceinline__ int pair() const { return static_cast<int>(blockIdx.x) / tiles; }
  __device__ __forceinline__ int tile() const { return static_cast<int>(blockIdx.x) % tiles; }
  __device__ __forceinline__ int compression() const { return pair() / kv_heads; }
  __device__ __forceinline__ int head() const { return pair() % kv_heads; }
  __device__ __forceinline__ KvCompression get() const { return list[compression()]; }
  __device__ __forceinline__ HeadPages head_pages() const {
    return {pages + compression() * page_stride, kv_heads, head()};
  }
};

inline Compressions compressions_of(const Tensor& compressions, const Tensor& pages, int64_t kv_heads) {
  return {reinterpret_cast<const KvCompression*>(compressions.as<int32_t>()), pages ? pages.as<int32_t>() : nullptr,
          pages.stride[0], static_cast<int>(compressions.shape[0]), static_cast<int>(kv_heads)};
}

// ---- device

__device__ __forceinline__ float lanes_sum(float v) {  // the tree of a row sum, in all lanes of each half of a warp
  for (int o = kLanes / 2; o > 0; o /= 2) v += __shfl_xor_sync(kAllLanes, v, o);
  return v;
}
__device__ __forceinline__ float lanes_max(float v) {
  for (int o = kLanes / 2; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, o));
  return v;
}

// A vector of a tile: element d is x[d * kStep], divided by `norm` if kUnit; null: zeros.  Loading and converting are
// apart, so that many loads can be under way.
template <class T, int kStep, bool kUnit = false>
struct Vector {
  static constexpr bool kLine = kStep == 1;
  const T* x;
  float norm;
  __device__ __forceinline__ const T* at(int d) const { return x + int64_t{d} * kStep; }
  __device__ __forceinline__ T load(int d) const { return x ? *at(d) : T{}; }
  __device__ __forceinline__ float value(T v) const { return kUnit && x ? to_float(v) / norm : to_float(v); }
};
template <class T>
using Query = Vector<T, 1>;
template <class T>
using Key = Vector<T, kPageSlots>;
template <class T>
using UnitKey = Vector<T, kPageSlots, true>;

template <class T>
__device__ __forceinline__ const T* key_at(const T* k_pages, const HeadPages& pages, int slot, int head_dim) {
  return k_pages + pages.head(slot) * head_dim * kPageSlots + slot % kPageSlots;
}

// Calls put(i, d, vector(i)) for kRows vectors and d < depth.  Neighbouring threads have neighbours in memory.
template <int kRows, class Get, class Put>
__device__ __forceinline__ void for_elements(int depth, Get vector, Put put) {
  constexpr bool kLine = decltype(vector(0))::kLine;
  constexpr int kDown = kLine ? kWarps : kRows, kDeep = kThreads / kDown;  // threads
  const int down = kLine ? threadIdx.x / kDeep : threadIdx.x % kDown;
  for (int i = down; i < kRows; i += kDown) {
    const auto x = vector(i);
#pragma unroll 4
    for (int d = kLine ? threadIdx.x % kDeep : threadIdx.x / kDown; d < depth; d += kDeep) put(i, d, x);
  }
}

// z[i][j] = (row i . column j) * scale.  Rows stay in shared memory, columns pass through it kDepth elements at a time.
//
// f32: each product one chain of fused multiply-adds, d ascending.  A thread has 4 x 4 of them in registers, or twice
// as many.
template <class T, int kRows, int kColumns>
struct DotTile {
  static constexpr int kDepth = 32;
  static constexpr int kGroups = kRows * kColumns / (16 * kThreads);  // of four columns that a thread has
  static constexpr int kAcross = kColumns / (4 * kGroups);            // threads to a row
  static_assert(kThreads / kAcross * 4 == kRows);
  static constexpr int kRowStep = kRows + 4, kColumnStep = kColumns + 4;  // multiples of 4 in other banks
  static constexpr int kWidth = kColumns;
  static constexpr size_t bytes(int64_t head_dim) {
    return sizeof(float) * static_cast<size_t>(head_dim * kRowStep + kDepth * kColumns + kRows * kColumnStep);
  }
  float *rows, *columns, *z;  // [head_dim][kRowStep], [kDepth][kColumns], [kRows][kColumnStep]
  int head_dim;

  __device__ explicit DotTile(int head_dim) : rows(dynamic_smem<float>()), head_dim(head_dim) {
    columns = rows + head_dim * kRowStep;
    z = columns + kDepth * kColumns;
  }

  __device__ float* end() const { return z + kRows * kColumnStep; }

  // Loads the rows; vector(i) is a Vector.  (multiply ends with a barrier: the rows before have been read.)
  template <class Get>
  __device__ __forceinline__ void load_rows(Get vector) const {
    for_elements<kRows>(head_dim, vector,
                        [&](int i, int d, const auto& x) { rows[d * kRowStep + i] = x.value(x.load(d)); });
  }

  // Computes the first n_rows x n_columns products, or more.  vector(j): a Vector, for j < n_columns; those of eight
  // columns lie together, from each multiple of eight on.
  template <class Get>
  __device__ __forceinline__ void multiply(int n_rows, int n_columns, float scale, Get vector) const {
    const int row = threadIdx.x / kAcross * 4, column = threadIdx.x % kAcross * 4;
    const bool mine = row < n_rows && column < n_columns;
    const int j = threadIdx.x % kColumns, depth = threadIdx.x / kColumns;
    const auto y = j < n_columns ? vector(j) : decltype(vector(j)){};
    // The next elements of the columns, which are fetched while products are computed.
    constexpr int kNext = kDepth * kColumns / kThreads, kStep = kThreads / kColumns;
    decltype(y.load(0)) next[kNext];
    const auto fetch = [&](int first) {
#pragma unroll
      for (int i = 0; i < kNext; i++) {
        const int d = first + depth + i * kStep;
        next[i] = d < head_dim ? y.load(d) : decltype(y.load(0)){};
      }
    };
    float sum[4][4 * kGroups] = {};
    fetch(0);
    for (int first = 0; first < head_dim; first += kDepth) {
      const int n = min(kDepth, head_dim - first);
      if (first > 0) __syncthreads();  // the columns before have been read
#pragma unroll
      for (int i = 0; i < kNext; i++) columns[(depth + i * kStep) * kColumns + j] = y.value(next[i]);
      __syncthreads();
      if (first + kDepth < head_dim) fetch(first + kDepth);
      if (!mine) continue;
#pragma unroll 2
      for (int d = 0; d < n; d++) {
        const float4 a = *reinterpret_cast<const float4*>(rows + (first + d) * kRowStep + row);
        const float left[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
          const float4 b = *reinterpret_cast<const float4*>(columns + d * kColumns + g * 4 * kAcross + column);
          const float right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
          for (int i = 0; i < 16; i++)
            sum[i / 4][4 * g + i % 4] = fmaf(left[i / 4], right[i % 4], sum[i / 4][4 * g + i % 4]);
        }
      }
    }
    if (mine)
      for (int i = 0; i < 4; i++)
        for (int g = 0; g < kGroups; g++) {
          const float* const s = sum[i] + 4 * g;
          *reinterpret_cast<float4*>(z + (row + i) * kColumnStep + g * 4 * kAcross + column) = {
              s[0] * scale, s[1] * scale, s[2] * scale, s[3] * scale};
        }
    __syncthreads();
  }
};

// bf16: each product one chain of k16 steps on tensor cores, d ascending; elements past D are zeros.  A warp has 16
// rows of them.  Rows and columns lie side by side in shared memory, an element a line, as slots do in pages; eight
// elements between lines keep the eight that ldmatrix reads at once in other banks.
template <int kRows, int kColumns>
struct DotTile<bf16, kRows, kColumns> {
  static constexpr int kDepth = 8192 / kColumns, kPad = 8;
  static constexpr int kDown = kRows / 16, kAcross = kWarps / kDown;  // warps
  static constexpr int kOwn = kColumns / kAcross;                     // columns of a warp
  static constexpr int kRowStep = kRows + kPad, kLineStep = kColumns + kPad, kColumnStep = kColumns + 8;
  static constexpr int kWidth = kColumns;
  static constexpr size_t bytes(int64_t head_dim) {
    return sizeof(bf16) * static_cast<size_t>(round_up(head_dim, 16) * kRowStep + kDepth * kLineStep) +
           sizeof(float) * kRows * kColumnStep;
  }
  bf16 *rows, *columns;  // [head_dim, up to a multiple of 16][kRowStep], [kDepth][kLineStep]
  float* z;              // [kRows][kColumnStep]
  int head_dim, depth;   // depth: that multiple

  __device__ explicit DotTile(int head_dim)
      : rows(dynamic_smem<bf16>()), head_dim(head_dim), depth(round_up(head_dim, 16)) {
    columns = rows + depth * kRowStep;
    z = reinterpret_cast<float*>(columns + kDepth * kLineStep);
  }

  __device__ float* end() const { return z + kRows * kColumnStep; }

  template <class Get>
  __device__ __forceinline__ void load_rows(Get vector) const {
    for_elements<kRows>(depth, vector, [&](int i, int d, const auto& x) {
      rows[d * kRowStep + i] = d < head_dim ? x.load(d) : bf16{};
    });
  }

  template <class Get>
  __device__ __forceinline__ void multiply(int n_rows, int n_columns, float scale, Get vector) const {
    const int warp = threadIdx.x / 32, row = warp % kDown * 16, column = warp / kDown * kOwn;
    const bool mine = row < n_rows && column < n_columns;
    // Eight columns from j on of a line, which is fetched while products are computed.
    constexpr int kEights = kColumns / 8, kStep = kThreads / kEights, kNext = kDepth / kStep;
    const int j = threadIdx.x % kEights * 8, line = threadIdx.x / kEights, present = n_columns - j;
    const auto y = present > 0 ? vector(j) : decltype(vector(0)){};
    Pack<bf16> next[kNext];
    const auto fetch = [&](int first) {
#pragma unroll
      for (int i = 0; i < kNext; i++) {
        const int d = first + line + i * kStep;
        next[i] = {};
        if (d >= head_dim || present <= 0) continue;
        next[i] = present >= 8 ? load_pack<true>(y.at(d), 8) : load_pack<false>(y.at(d), present);
      }
    };
    Accumulator<kOwn> sum = {};
    fetch(0);
    for (int first = 0; first < depth; first += kDepth) {
      const int n = min(kDepth, depth - first);
      if (first > 0) __syncthreads();  // the columns before have been read
#pragma unroll
      for (int i = 0; i < kNext; i++) store_pack<true>(columns + (line + i * kStep) * kLineStep + j, next[i], 8);
      __syncthreads();
      if (first + kDepth < depth) fetch(first + kDepth);
      if (!mine) continue;
      for (int d = 0; d < n; d += 16) {
        uint32_t a[4];
        load_a<Major::mn>(a, [&](int i, int k) { return rows + (first + d + k) * kRowStep + row + i; });
#pragma unroll
        for (int c = 0; c < kOwn; c += 16) {
          uint32_t b[4];
          load_b<Major::mn>(b, [&](int i, int k) { return columns + (d + k) * kLineStep + column + c + i; });
          sum.add_product(c, a, b);
        }
      }
    }
    if (mine)
      sum.for_pairs([&](LaneRow i, int c, float2 x) {
        *reinterpret_cast<float2*>(z + (row + i) * kColumnStep + column + c) = {x.x * scale, x.y * scale};
      });
    __syncthreads();
  }
};
constexpr int kTileRows = 64, kTileSlots = 128;
template <class T>
using KeyTile = DotTile<T, kTileRows, kTileSlots>;  // keys or a window of queries with keys
template <class T>
using QueryTile = DotTile<T, 16, 256>;           // queries with keys, a slot a thread
constexpr int kQueries = 16, kSlots = kThreads;  // rows and columns of it

// bf16: products of the keys of some slots, the own ones of a block, with those of all slots of their head.  A warp
// owns 16 or 32 keys, factors that it keeps in registers.  The keys of all slots pass through a ring in shared memory,
// kPiece slots at a time, as pages lie: a channel a line.  Results stay in registers: lane l of a quad has the slots i
// with i % 8 / 2 == l.  Each product is one chain of k16 steps, d ascending.
template <int kD>
struct KeyProducts {
  static constexpr int kOwnWarps = 4, kTiles = kD <= 128 ? 2 : 1;  // tiles of 16 own keys of a warp
  static constexpr int kBlock = 32 * kOwnWarps, kWarpOwn = 16 * kTiles, kOwn = kOwnWarps * kWarpOwn;
  static constexpr int kBlocks = kD <= 128 ? 3 : 2;           // of a multiprocessor, that registers must suffice for
  static constexpr int kStages = 3, kPiece = 64, kPart = 32;  // slots of which a warp has the products at once
  static_assert(kStages * kPiece >= kOwn && kOwnWarps * kPageSlots == kPiece);
  static constexpr size_t bytes = kStages * kPiece * (kD * sizeof(bf16) + sizeof(float));
  using Part = Accumulator<kPart>[kTiles];

  const HeadPages pages;
  const bf16* const k_pages;
  const int head_dim, end;  // slots [0, end)
  uint32_t factors[kTiles][kD / 16][4];
  PerRow<float> inverse[kTiles];  // 1 / norm of own keys

  __device__ KeyProducts(const HeadPages& pages, const bf16* k_pages, int head_dim, int end)
      : pages(pages), k_pages(k_pages), head_dim(head_dim), end(end) {}

  static __device__ __forceinline__ SharedTile<kPiece> keys(int stage) {
    return {dynamic_smem<bf16>() + stage * kD * kPiece};
  }
  static __device__ __forceinline__ float* norms(int stage) {  // 1 / norm of its keys
    return reinterpret_cast<float*>(keys(kStages).p) + stage * kPiece;
  }
  // Returns the number of the warp's first key among the own ones of the block.
  static __device__ __forceinline__ int own() { return threadIdx.x / 32 * kWarpOwn; }

  // Copies the keys of slots [first, first + kPiece) to a stage, a page a warp; zeros from `end` on and beyond the last
  // channel.  Asynchronous, not yet committed.
  __device__ __forceinline__ void fetch_keys(int stage, int first) const {
    const int page = threadIdx.x / 32 * kPageSlots, eight = threadIdx.x % 2 * 8, channel = threadIdx.x % 32 / 2;
    const int count = min(8, max(0, end - first - page - eight));
    const bf16* const from = count > 0 ? key_at(k_pages, pages, first + page + eight, head_dim) : k_pages;
    const auto copy = [&](auto bytes) {
#pragma unroll
      for (int d = 0; d < kD; d += 16)
        cp_async_16(keys(stage).at(d + channel, page + eight), from + (d + channel) * kPageSlots, bytes(d + channel));
    };
    if (first + kPiece <= end && head_dim == kD)
      copy([](int) { return 16; });
    else
      copy([&](int d) { return d < head_dim ? count * 2 : 0; });
  }

  // Takes the own keys and their norms from the first stages, between two barriers.
  __device__ __forceinline__ void take_own() {
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
      const int at = own() + 16 * t, stage = at / kPiece;
#pragma unroll
      for (int k = 0; k < kD / 16; k++)
        load_a<Major::mn>(factors[t][k], [&](int i, int d) { return keys(stage).at(16 * k + d, at % kPiece + i); });
      for_rows([&](LaneRow i) { inverse[t][i] = norms(stage)[at % kPiece + i]; });
    }
    __syncthreads();
  }

  // Calls f(first, s, norms) for each kPart slots from a page's first slot `base` on, in a warp that is not idle: s[t]
  // has the products of own keys 16 t + [0, 16) with slots first + [0, kPart), and norms 1 / norm of these.
  // fetch(stage, first) fetches keys and norms of a piece, and commits.
  template <class Fetch, class F>
  __device__ __forceinline__ void for_parts(int base, bool is_idle, Fetch fetch, F f) const {
    for (int i = 0; i < kStages - 1; i++) fetch(i, base + i * kPiece);
    for (int first = base, stage = 0; first < end; first += kPiece, stage = (stage + 1) % kStages) {
      cp_async_wait<kStages - 2>();
      __syncthreads();  // the piece is there, and the one before has been read
      fetch((stage + kStages - 1) % kStages, first + (kStages - 1) * kPiece);
      if (is_idle) continue;
#pragma unroll 1
      for (int at = 0; at < kPiece; at += kPart) {
        Part s = {};
#pragma unroll
        for (int k = 0; k < kD / 16; k++)
#pragma unroll
          for (int c = 0; c < kPart; c += 16) {
            uint32_t b[4];
            load_b<Major::mn>(b, [&](int i, int d) { return keys(stage).at(16 * k + d, at + c + i); });
#pragma unroll
            for (int t = 0; t < kTiles; t++) s[t].add_product(c, factors[t][k], b);
          }
        f(first + at, s, norms(stage) + at);
      }
    }
    cp_async_wait<0>();
  }

  // Returns the cosines of own key 16 t + i with two slots: products times norms.
  __device__ __forceinline__ float2 cosines(int t, LaneRow i, float2 dot, const float* two_norms) {
    const float2 norm = *reinterpret_cast<const float2*>(two_norms);
    return make_float2(dot.x * (inverse[t][i] * norm.x), dot.y * (inverse[t][i] * norm.y));
  }
};
// Calls f with the least constant kD >= head_dim.
template <class F>
void with_channels(int64_t head_dim, F f) {
  if (head_dim <= 64)
    f(std::integral_constant<int, 64>{});
  else if (head_dim <= 128)
    f(std::integral_constant<int, 128>{});
  else
    f(std::integral_constant<int, 256>{});
}

// Query heads of a key head: a tile of queries holds them all.
inline int group_of(const char* op, int64_t heads, int64_t kv_heads) {
  expect(heads / kv_heads <= kQueries, op, ": ", heads, " query heads over ", kv_heads, " key heads; at most ",
         kQueries, " can share one");
  return static_cast<int>(heads / kv_heads);
}
// Thread blocks of a multiprocessor that registers must suffice for; for more of them ptxas would spill.
constexpr int kTileBlocks = 2;

constexpr int kNormThreads = 64;
template <class T>
constexpr int kNormSlots = sizeof(T) == 2 ? 8 : 1;  // neighbours, of which a thread has the norms

// Computes norms[x][slot] = sqrt(k . k) + 1e-8, in bf16 1 / that, for slots [first, slots) and those before them in
// their page; x counts (compression, head), and `step` is a row of it.
template <class T>
__global__ void __launch_bounds__(kNormThreads) key_norms(Compressions compressions, const T* __restrict__ k_pages,
                                                          int head_dim, float* __restrict__ norms, int64_t step) {
  constexpr int kSlots = kNormSlots<T>;
  const KvCompression e = compressions.get();
  const int slot = e.first / kPageSlots * kPageSlots + (blockIdx.y * kNormThreads + threadIdx.x) * kSlots;
  if (slot >= e.slots) return;
  const int count = min(kSlots, e.slots - slot);
  const T* k = key_at(k_pages, compressions.head_pages(), slot, head_dim);
  float sum[kSlots] = {};
  const auto add = [&](auto load) {
#pragma unroll 8
    for (int d = 0; d < head_dim; d++) {
      const auto x = load(k + d * kPageSlots);
#pragma unroll
      for (int i = 0; i < kSlots; i++) sum[i] = fmaf(to_float(x.v[i]), to_float(x.v[i]), sum[i]);
    }
  };
  if (kSlots == kPack<T> && count == kSlots)
    add([](const T* p) { return load_pack<true>(p, kSlots); });
  else
    add([&](const T* p) { return load_pack<false>(p, count); });
#pragma unroll
  for (int i = 0; i < kSlots; i++) {
    const float norm = sqrtf(sum[i]) + 1e-8f;
    if (i < count) norms[blockIdx.x * step + slot + i] = sizeof(T) == 2 ? 1.f / norm : norm;
  }
}

// Launches key_norms for compressions of up to `row` slots.
template <class T>
void launch_key_norms(const char* op, const Compressions& compressions, const Tensor& k_pages, float* norms,
                      int64_t step, int64_t row, Stream stream) {
  expect(sizeof(T) == 4 || aligned16(k_pages, {}), op, ": pages must be 16-byte aligned");
  launch(op, key_norms<T>,
         {.grid = dim3(blocks(op, int64_t{compressions.count} * compressions.kv_heads, 1),
                       blocks(op, row, kNormThreads * kNormSlots<T>)),
          .block = kNormThreads},
         stream, compressions, k_pages.as<T>(), static_cast<int>(k_pages.shape[2]), norms, step);
}

}  // namespace pare::PARE_CUDA
