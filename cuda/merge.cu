// Compaction in which evicted slots are merged into kept ones (ops/merge.h: KvMerge, which states the formulas).
//
// Shapes of pages and keep: compression.cu.  nearest i32, cosines f32 [E, K, max_pages * 16]: for each evicted slot the
// place in `keep` of its nearest kept slot c(e), and its cosine (first: norms of keys, in bf16 1 / norm).  merged f32
// [E, K, max_keep, 2 D + 1]: rows of V and K of a kept slot after the merging, and 1 if anything was merged, else 0.
// threshold is changed in place.
//
// Launches: norms, the nearest kept slot of each evicted one, for d2o the thresholds, the merged rows, the compaction,
// and the merged rows over those that it moved.  So the pages are read before anything is moved.
//
//   nearest, bf16    keys of all slots, 64 at a time ->        merge    a warp a kept slot, evicted ones ascending
//   32 evicted keys  |k . k k . . k ...|  . evicted: NaN       kept k   e1 -> k, e4 -> k, e9 -> k
//   a warp           maximum of k.e / |k|, all in registers
//
// Order: ops/merge.h.  f32 has the bits of the `cpu` table.  In bf16 the cosines come from products on tensor cores,
// all else is in f32.  One warp owns a kept slot: no atomics.
//
// The nearest slot in bf16 uses KeyProducts, as the redundancy of R-KV does.  Evicted keys that pass by have the norm
// NaN, which no comparison takes: reading whole pages costs products, slots / kept times, and saves gathering.
//
// Bytes: K of all slots once for each tile of evicted ones (from L2), K and V of the evicted slots once, merged rows
// written and read once.  Limited by the tensor cores, 2 * K * D * evicted * slots, and five instructions on a product,
// about alike; in f32 by 64 x 128 products at a time, of the kept slots alone.
#include "compression.cuh"
#include "ops/merge.h"

namespace pare::PARE_CUDA {

namespace {

// Divides the slots of one head into those that go and those that stay: `keep` ascends from `first` on.
struct Division {
  const int32_t* keep;
  int first, slots, kept;
  __device__ __forceinline__ int evicted() const { return slots - first - kept; }
  // Returns how many entries of `keep` come first, with before(i) true; from there on it is false.
  template <class Before>
  __device__ __forceinline__ int count(Before before) const {
    int low = 0, high = kept;
    while (low < high) {
      const int middle = (low + high) / 2;
      before(middle) ? low = middle + 1 : high = middle;
    }
    return low;
  }
  __device__ __forceinline__ bool stays(int slot) const {
    const int i = count([&](int j) { return keep[j] < slot; });
    return i < kept && keep[i] == slot;
  }
  // Returns the number of kept slots before evicted slot number j, which is slot first + j + that number: keep[i] -
  // first - i evicted ones precede keep[i].
  __device__ __forceinline__ int kept_before(int j) const {
    return count([&](int i) { return keep[i] - first - i <= j; });
  }
  __device__ __forceinline__ int evicted_slot(int j) const { return first + j + kept_before(j); }
};

template <class T>
struct MergeArgs {
  T *k, *v;
  const int32_t *pos, *keep, *dst, *threshold_row;
  Compressions compressions;
  int64_t dst_stride, max_keep, row;  // row: of nearest and cosines
  int head_dim;
  int32_t* nearest_slot;
  float *cosines, *merged, *threshold;
  const float* rope;
  KvMergeKind kind;
  MergeKeys keys;
  float ema_old, ema_new;

  __device__ __forceinline__ Division division(const KvCompression& e, int64_t pair) const {
    return {keep + pair * max_keep, e.first, e.slots, e.keep};
  }
  // Of a pair (compression, head), by slot.
  __device__ __forceinline__ int32_t* nearest(int64_t pair) const { return nearest_slot + pair * row; }
  __device__ __forceinline__ float* cosine(int64_t pair) const { return cosines + pair * row; }
  __device__ __forceinline__ float* merged_row(int64_t pair, int kept) const {
    return merged + (pair * max_keep + kept) * (2 * head_dim + 1);
  }
};

// The nearest kept slot so far, slots ascending.
struct Nearest {
  float cosine = -INFINITY;
  int which = -1;
  __device__ __forceinline__ void offer(float x, int i) {
    if (x >= cosine) *this = {x, i};
  }
  // Returns the nearest one of four neighbouring lanes.
  __device__ __forceinline__ Nearest of_quad() const {
    Nearest best = *this;
    for (int o = 1; o < 4; o *= 2) {
      const float x = __shfl_xor_sync(kAllLanes, best.cosine, o);
      const int i = __shfl_xor_sync(kAllLanes, best.which, o);
      if (x > best.cosine || (x == best.cosine && i > best.which)) best = {x, i};
    }
    return best;
  }
};

// f32: finds the nearest kept slot of 64 evicted ones, a tile; 4 threads compare each of these with every kept slot.
__global__ void __launch_bounds__(kThreads, kTileBlocks) find_nearest(const MergeArgs<float> a) {
  using Tile = KeyTile<float>;
  const KvCompression e = a.compressions.get();
  const int pair = a.compressions.pair();
  const Division slots = a.division(e, pair);
  const int begin = kTileRows * a.compressions.tile(), evicted = slots.evicted();
  if (begin >= evicted || e.keep == 0) return;
  const HeadPages pages = a.compressions.head_pages();
  float* const cosine = a.cosine(pair);
  const auto key = [&](int slot) { return UnitKey<float>{key_at(a.k, pages, slot, a.head_dim), cosine[slot]}; };
  const Tile t(a.head_dim);
  t.load_rows([&](int i) { return begin + i < evicted ? key(slots.evicted_slot(begin + i)) : UnitKey<float>{}; });
  const int row = threadIdx.x / 4, part = threadIdx.x % 4;
  Nearest best;
  for (int c = 0; c < e.keep; c += Tile::kWidth) {
    t.multiply(min(kTileRows, evicted - begin), e.keep - c, 1, [&](int j) { return key(slots.keep[c + j]); });
    for (int i = part; begin + row < evicted && i < min(Tile::kWidth, e.keep - c); i += 4)
      best.offer(t.z[row * Tile::kColumnStep + i], c + i);
  }
  best = best.of_quad();
  if (part != 0 || begin + row >= evicted) return;
  // Its norm, which lay here, is read by this block only, and no more.
  const int slot = slots.evicted_slot(begin + row);
  a.nearest(pair)[slot] = best.which;
  cosine[slot] = best.cosine;
}

// bf16: that of kOwn evicted slots, a tile.
template <int kD>
__global__ void __launch_bounds__(KeyProducts<kD>::kBlock, KeyProducts<kD>::kBlocks)
    find_nearest16(const MergeArgs<bf16> a) {
  using Products = KeyProducts<kD>;
  constexpr int kTiles = Products::kTiles, kPiece = Products::kPiece, kOwn = Products::kOwn;
  const KvCompression e = a.compressions.get();
  const int pair = a.compressions.pair();
  const Division slots = a.division(e, pair);
  const int begin = kOwn * a.compressions.tile(), evicted = slots.evicted();
  if (begin >= evicted || e.keep == 0) return;
  Products products(a.compressions.head_pages(), a.k, a.head_dim, e.slots);
  float* const cosine = a.cosine(pair);
  {  // the own keys
    const int i = threadIdx.x % kOwn, stage = i / kPiece;
    const bool is = begin + i < evicted;
    const int slot = is ? slots.evicted_slot(begin + i) : e.first;
    const bf16* const from = key_at(a.k, products.pages, slot, a.head_dim);
#pragma unroll 8
    for (int d = threadIdx.x / kOwn; d < kD; d += Products::kBlock / kOwn)
      Products::keys(stage).at(d, i % kPiece)[i % 8] = is && d < a.head_dim ? from[d * kPageSlots] : bf16{};
    if (threadIdx.x < kOwn) Products::norms(stage)[i % kPiece] = is ? cosine[slot] : 0.f;
  }
  products.take_own();
  const auto fetch = [&](int stage, int first) {
    products.fetch_keys(stage, first);
    cp_async_commit();
    if (threadIdx.x >= kPiece) return;
    const int slot = first + static_cast<int>(threadIdx.x);
    Products::norms(stage)[threadIdx.x] = slots.stays(slot) ? cosine[slot] : NAN;
  };
  PerRow<Nearest> best[kTiles] = {};
  const int own = begin + Products::own();
  products.for_parts(e.first / kPageSlots * kPageSlots, own >= evicted, fetch,
                     [&](int first, auto& s, const float* norms) {
#pragma unroll
                       for (int t = 0; t < kTiles; t++)
                         s[t].for_pairs([&](LaneRow i, int c, float2 dot) {
                           const float2 two = products.cosines(t, i, dot, norms + c);
                           best[t][i].offer(two.x, first + c);
                           best[t][i].offer(two.y, first + c + 1);
                         });
                     });
#pragma unroll
  for (int t = 0; t < kTiles; t++)
    for_rows([&](LaneRow i) {
      const Nearest nearest = best[t][i].of_quad();
      if (!leads_quad() || own + 16 * t + i >= evicted) return;
      // Its norm, which lay here, is read by this block only, and no more.
      const int slot = slots.evicted_slot(own + 16 * t + i);
      a.nearest(pair)[slot] = slots.count([&](int j) { return slots.keep[j] < nearest.which; });
      cosine[slot] = nearest.cosine;
    });
}

// Updates d2o's threshold by the mean cosine.  One warp a compression, blockIdx.x; the lanes of its halves do the same.
template <class T>
__global__ void __launch_bounds__(32) next_threshold(const MergeArgs<T> a) {
  const KvCompression e = a.compressions.list[blockIdx.x];
  const int evicted = e.slots - e.first - e.keep, kv_heads = a.compressions.kv_heads;
  if (evicted == 0 || e.keep == 0) return;
  const int lane = threadIdx.x % kLanes;
  float sum = 0;
  for (int h = 0; h < kv_heads; h++) {
    const int64_t pair = int64_t{blockIdx.x} * kv_heads + h;
    const Division slots = a.division(e, pair);
    const float* const cosine = a.cosine(pair);
    float part = 0;
    for (int slot = e.first / kLanes * kLanes + lane; slot < e.slots; slot += kLanes)
      if (slot >= e.first && !slots.stays(slot)) part += cosine[slot];
    sum += lanes_sum(part);
  }
  if (threadIdx.x != 0) return;
  float* const threshold = a.threshold + a.threshold_row[blockIdx.x];
  const float mean = sum / static_cast<float>(evicted * kv_heads);
  *threshold = *threshold == 0 ? mean : a.ema_old * *threshold + a.ema_new * mean;
}

// A row of D elements in a warp: lane l has elements l + 32 j, zeros at and past D.
template <int kColumns>
struct WarpRow {
  float x[kColumns];

  template <class Get>
  __device__ __forceinline__ void load(int head_dim, Get get) {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      const int d = threadIdx.x % 32 + 32 * j;
      x[j] = d < head_dim ? get(d) : 0.f;
    }
  }
  template <class Put>
  __device__ __forceinline__ void store(int head_dim, Put put) const {
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      const int d = threadIdx.x % 32 + 32 * j;
      if (d < head_dim) put(d, x[j]);
    }
  }
  // Returns the root of the row sum of squares, in all lanes: lane i of the sum has the elements of lanes i and i + 16,
  // in turns.
  __device__ __forceinline__ float length() const {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      const float upper = __shfl_xor_sync(kAllLanes, x[j], kLanes);
      sum = fmaf(upper, upper, fmaf(x[j], x[j], sum));
    }
    return sqrtf(__shfl_sync(kAllLanes, lanes_sum(sum), 0));
  }
};

// Adds up the merged rows of a kept slot, in a warp.
template <class T, int kColumns>
struct Receiver {
  using Row = WarpRow<kColumns>;
  const MergeArgs<T>& a;
  const HeadPages pages;
  const int slot;  // the kept one
  const bool with_keys = a.keys == MergeKeys::unrotated, by_value = a.kind == KvMergeKind::value;
  Row v, k;
  float weights = 1, old_length = 0;
  bool started = false;

  __device__ Receiver(const MergeArgs<T>& a, const HeadPages& pages, int slot) : a(a), pages(pages), slot(slot) {}

  __device__ __forceinline__ void value(Row& r, int s) const {
    const T* const from = a.v + pages.at(s) * a.head_dim;
    r.load(a.head_dim, [&](int d) { return to_float(from[d]); });
  }
  // Returns the angle of a slot's position; elements d and d + D / 2 turned by it are u c - v s and v c + u s.
  __device__ __forceinline__ const float* angle(int s) const {
    return a.rope + int64_t{a.pos[pages.at(s)]} * a.head_dim;
  }
  __device__ __forceinline__ float turned(int d, const float* by, float sign, float x, float other) const {
    const int half_dim = a.head_dim / 2;
    return d < half_dim ? x * by[d] - other * (by[half_dim + d] * sign) : x * by[d - half_dim] + other * (by[d] * sign);
  }
  __device__ __forceinline__ int partner(int d) const {
    return d < a.head_dim / 2 ? d + a.head_dim / 2 : d - a.head_dim / 2;
  }
  // Loads the key of slot s, turned back to position 0.
  __device__ __forceinline__ void key(Row& r, int s) const {
    const T* const from = key_at(a.k, pages, s, a.head_dim);
    const float* const by = angle(s);
    r.load(a.head_dim, [&](int d) {
      return turned(d, by, -1, to_float(from[d * kPageSlots]), to_float(from[partner(d) * kPageSlots]));
    });
  }

  __device__ __forceinline__ void start() {
    started = true;
    value(v, slot);
    if (with_keys) key(k, slot);
    if (by_value) old_length = v.length();
  }
  __device__ __forceinline__ void add_row(Row& x, const Row& y, float w) const {
#pragma unroll
    for (int j = 0; j < kColumns; j++) x.x[j] = fmaf(w, y.x[j], x.x[j]);
  }
  // Adds an evicted slot; w: its cosine.
  __device__ __forceinline__ void add(int s, float w) {
    if (!started) start();
    Row other;
    value(other, s);
    if (by_value) {
      const float size = other.length();
      w = w * size / (size + old_length + 1e-8f);
    }
    add_row(v, other, w);
    if (with_keys) {
      key(other, s);
      add_row(k, other, w);
    }
    weights += by_value ? w : 1.f;
  }
  // Writes a row of `merged`.
  __device__ __forceinline__ void write(float* row) {
    const int head_dim = a.head_dim;
    v.store(head_dim, [&](int d, float x) { row[d] = x / weights; });
    if (threadIdx.x % 32 == 0) row[2 * head_dim] = 1;
    if (!with_keys) return;
    k.store(head_dim, [&](int d, float x) { row[head_dim + d] = x / weights; });
    __syncwarp();
    const float* const by = angle(slot);
    k.load(head_dim, [&](int d) { return turned(d, by, 1, row[head_dim + d], row[head_dim + partner(d)]); });
    __syncwarp();
    k.store(head_dim, [&](int d, float x) { row[head_dim + d] = x; });
  }
};

// Evicted slot number j as a kept slot sees it.
struct Offer {
  int slot;
  float weight;
  bool comes;
};

template <class T>
__device__ __forceinline__ Offer offer_of(const MergeArgs<T>& a, const Division& slots, int kept, float least, int j) {
  const int slot = slots.evicted_slot(j);
  const float w = a.cosine(blockIdx.x)[slot];
  const bool good = a.kind == KvMergeKind::d2o ? w >= least : w > 0;
  return {slot, w, good && a.nearest(blockIdx.x)[slot] == kept};
}

// Merges evicted slots into kept ones, a kept slot a warp; blockIdx.y counts blocks of them.
template <class T, int kColumns>
__global__ void __launch_bounds__(kThreads, 2) merge(const MergeArgs<T> a) {
  const KvCompression e = a.compressions.get();
  const int kept = blockIdx.y * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (kept >= e.keep) return;
  const HeadPages pages = a.compressions.head_pages();
  const Division slots = a.division(e, blockIdx.x);
  const float least = a.kind == KvMergeKind::d2o ? a.threshold[a.threshold_row[a.compressions.compression()]] : 0.f;
  const int evicted = slots.evicted();
  Receiver<T, kColumns> to(a, pages, slots.keep[kept]);
  for (int first = 0; first < evicted; first += 32) {
    Offer offer{};
    if (first + lane < evicted) offer = offer_of(a, slots, kept, least, first + lane);
    for (unsigned left = __ballot_sync(kAllLanes, offer.comes); left; left &= left - 1) {
      const int from = __ffs(static_cast<int>(left)) - 1;
      to.add(__shfl_sync(kAllLanes, offer.slot, from), __shfl_sync(kAllLanes, offer.weight, from));
    }
  }
  float* const row = a.merged_row(blockIdx.x, kept);
  if (to.started)
    to.write(row);
  else if (lane == 0)
    row[2 * a.head_dim] = 0;
}

// Writes the merged rows over those that compaction moved there, a kept slot a warp; blockIdx.y as in merge.
template <class T>
__global__ void __launch_bounds__(kThreads) overlay(const MergeArgs<T> a) {
  const KvCompression e = a.compressions.get();
  const int kept = blockIdx.y * kWarps + threadIdx.x / 32, head_dim = a.head_dim;
  if (kept >= e.keep) return;
  const float* const row = a.merged_row(blockIdx.x, kept);
  if (row[2 * head_dim] == 0) return;
  const HeadPages dst{a.dst + a.compressions.compression() * a.dst_stride, a.compressions.kv_heads,
                      a.compressions.head()};
  const int64_t head = dst.head(e.first + kept);
  const int place = (e.first + kept) % kPageSlots;
  for (int d = threadIdx.x % 32; d < head_dim; d += 32) {
    a.v[(head * kPageSlots + place) * head_dim + d] = from_float<T>(row[d]);
    if (a.keys == MergeKeys::unrotated)
      a.k[(head * head_dim + d) * kPageSlots + place] = from_float<T>(row[head_dim + d]);
  }
}

template <class T>
MergeArgs<T> merge_args(const KvMerge& a, const Compressions& compressions) {
  const KvCompact& c = a.compact;
  MergeArgs<T> x{};
  x.k = c.k_pages.as<T>();
  x.v = c.v_pages.as<T>();
  x.pos = c.pos_pages.as<int32_t>();
  x.keep = c.keep.as<int32_t>();
  x.compressions = compressions;
  x.dst = c.dst_pages.as<int32_t>();
  x.dst_stride = c.dst_pages.stride[0];
  x.max_keep = c.keep.shape[2];
  x.row = c.src_pages.shape[1] * kPageSlots;
  x.head_dim = static_cast<int>(c.k_pages.shape[2]);
  x.nearest_slot = a.nearest.as<int32_t>();
  x.cosines = a.cosines.as<float>();
  x.merged = a.merged.as<float>();
  if (a.keys == MergeKeys::unrotated) x.rope = a.rope.as<float>();
  if (a.kind == KvMergeKind::d2o) {
    x.threshold = a.threshold.as<float>();
    x.threshold_row = a.threshold_row.as<int32_t>();
  }
  x.kind = a.kind;
  x.keys = a.keys;
  x.ema_old = a.ema_old;
  x.ema_new = a.ema_new;
  return x;
}

}  // namespace

void kv_merge(const KvMerge& a, Stream stream) {
  const char* op = "kv_merge";
  const KvCompact& c = a.compact;
  expect_heads(op, c.k_pages.shape[2], c.k_pages.shape[1]);
  const Compressions compressions = compressions_of(c.compressions, c.src_pages, c.k_pages.shape[1]);
  const int64_t row = c.src_pages.shape[1] * kPageSlots, head_dim = c.k_pages.shape[2];
  if (compressions.count == 0 || c.keep.shape[2] == 0 || row == 0) return;
  with_act(op, c.k_pages, [&](auto type) {
    using T = decltype(type);
    const MergeArgs<T> x = merge_args<T>(a, compressions);
    const unsigned heads = blocks(op, int64_t{compressions.count} * compressions.kv_heads, 1);
    const LaunchShape rows{.grid = dim3(heads, blocks(op, x.max_keep, kWarps)), .block = kThreads};
    launch_key_norms<T>(op, compressions, c.k_pages, x.cosines, row, row, stream);
    const auto find = [&](auto kernel, int own, int threads, size_t bytes) {
      MergeArgs<T> tiles = x;
      tiles.compressions.tiles = static_cast<int>(ceil_div<int64_t>(row, own));
      launch(op, kernel,
             {.grid = blocks(op, heads * int64_t{tiles.compressions.tiles}, 1), .block = threads, .smem = bytes},
             stream, tiles);
    };
    if constexpr (sizeof(T) == 4)
      find(find_nearest, kTileRows, kThreads, KeyTile<float>::bytes(head_dim));
    else
      with_channels(head_dim, [&](auto channels) {
        using Products = KeyProducts<decltype(channels)::value>;
        find(find_nearest16<decltype(channels)::value>, Products::kOwn, Products::kBlock, Products::bytes);
      });
    if (a.kind == KvMergeKind::d2o)
      launch(op, next_threshold<T>, {.grid = static_cast<unsigned>(compressions.count), .block = 32}, stream, x);
    launch(op, head_dim <= 64 ? merge<T, 2> : head_dim <= 128 ? merge<T, 4> : merge<T, 8>, rows, stream, x);
    kv_compact(c, stream);
    launch(op, overlay<T>, rows, stream, x);
  });
}

}  // namespace pare::PARE_CUDA
