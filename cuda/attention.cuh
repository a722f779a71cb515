// Code shared by attention of packed and of paged sequences: finding the rows of a block, the operands of packed
// sequences, and the arithmetic in f32, whose order list.h states, so that both give the same bits.
#pragma once
#include <type_traits>

#include "ops/attention.h"
#include "softmax.cuh"

namespace pare::PARE_CUDA {

constexpr int kSlots = kAttnBlock;
constexpr int kThreads = 128, kWarps = 4;

// Query rows [first, first + kRows) of an entry of a list: of a segment, or of a sequence in pages (PagedRow).
template <class Entry>
struct TileOf : Entry {
  int first, entry;  // entry: its number
};
using Tile = TileOf<SegmentRow>;

struct Piece {
  int owner, index;
};
// Owners [0, n) have count(i) pieces each: whose is piece number `piece`, and which of its?  Owner n if there are
// fewer. The host does not know the counts, so it launches an upper bound of blocks and each finds its place here.
template <class Count>
__device__ Piece find_piece(int n, int piece, Count count) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < n; base += 32) {
    const int own = base + lane < n ? count(base + lane) : 0;
    int end = own;  // pieces up to and including this lane's owner
    for (int o = 1; o < 32; o *= 2) {
      const int below = __shfl_up_sync(kAllLanes, end, o);
      if (lane >= o) end += below;
    }
    const unsigned past = __ballot_sync(kAllLanes, end > piece);
    if (past) {
      const int owner = __ffs(static_cast<int>(past)) - 1;
      return {base + owner, piece - __shfl_sync(kAllLanes, end - own, owner)};
    }
    piece -= __shfl_sync(kAllLanes, end, 31);
  }
  return {n, 0};
}

template <class Entry>
__device__ __forceinline__ Entry entry_at(const int4* entries, int i) {
  const int4 e = entries[i];
  return {e.x, e.y, e.z, e.w};
}

// Tile number `tile` of all n entries, cut into tiles of kRows query rows; an entry without rows if there are fewer.
// Each row that an entry names counts `repeat` times.
template <int kRows, class Entry = SegmentRow>
__device__ TileOf<Entry> find_tile(const int4* entries, int n, int tile, int repeat = 1) {
  // The second number of an entry says how many rows it names.
  const Piece p = find_piece(n, tile, [&](int i) { return ceil_div(entries[i].y * repeat, kRows); });
  if (p.owner == n) return {};
  return {entry_at<Entry>(entries, p.owner), p.index * kRows, p.owner};
}

// ---- operands of packed sequences

template <class T>
struct Matrix {  // [rows, heads, D], heads contiguous
  T* p;
  int64_t stride;  // between rows, in elements
  __device__ __forceinline__ T* row(int64_t r) const { return p + r * stride; }
};

template <class T>
struct Packed {
  Matrix<const T> q;                                 // [N, H, D]
  Matrix<const T> k, v, pk, pv;                      // [N, K, D], [P, K, D]
  const int4* segments;                              // [S]: SegmentRow
  const int32_t* lists;                              // [G, K], or null: parents are runs of rows
  int n_segments, heads, kv_heads, group, head_dim;  // group: query heads of a key head
  float scale, score_scale;                          // of q.k; that with log2(e)
  __device__ __forceinline__ Softmax softmax() const { return {score_scale}; }

  // Where slot s of the segment of t lies for key head `kv`: row i of k and v, or -1 - i of pk and pv.
  __device__ __forceinline__ int place(const Tile& t, int kv, int s) const {
    if (s >= t.parent_len) return t.row + s - t.parent_len;
    return lists ? lists[int64_t{t.parent_row + s} * kv_heads + kv] : -1 - (t.parent_row + s);
  }
  __device__ __forceinline__ const T* key_at(int place, int kv) const { return at(k, pk, place, kv); }
  __device__ __forceinline__ const T* value_at(int place, int kv) const { return at(v, pv, place, kv); }
  __device__ __forceinline__ const T* key(const Tile& t, int kv, int s) const { return key_at(place(t, kv, s), kv); }
  __device__ __forceinline__ const T* value(const Tile& t, int kv, int s) const {
    return value_at(place(t, kv, s), kv);
  }

 private:
  __device__ __forceinline__ const T* at(const Matrix<const T>& own, const Matrix<const T>& parent, int place,
                                         int kv) const {
    return (place >= 0 ? own.row(place) : parent.row(-1 - place)) + kv * head_dim;
  }
};

template <class T>
Matrix<T> matrix(const Tensor& t) {
  return {t.as<std::remove_const_t<T>>(), t.stride[0]};
}
// SegmentRow or PagedRow.
inline const int4* entries(const char* op, const Tensor& t) {
  expect(reinterpret_cast<uintptr_t>(t.data) % 16 == 0, op, ": a list of rows is not 16-byte aligned");
  return reinterpret_cast<const int4*>(t.as<int32_t>());
}

// The operands that AttnFwd and AttnBwd share.
template <class T, class A>
Packed<T> packed(const char* op, const A& a) {
  const int64_t heads = a.q.shape[1], head_dim = a.q.shape[2], kv_heads = a.k.shape[1];
  expect_heads(op, head_dim, heads);
  Packed<T> x{};
  x.q = matrix<const T>(a.q);
  x.k = matrix<const T>(a.k);
  x.v = matrix<const T>(a.v);
  x.pk = matrix<const T>(a.pk);
  x.pv = matrix<const T>(a.pv);
  x.segments = entries(op, a.segments);
  x.lists = a.lists ? a.lists.template as<int32_t>() : nullptr;
  x.n_segments = static_cast<int>(a.segments.shape[0]);
  x.heads = static_cast<int>(heads);
  x.kv_heads = static_cast<int>(kv_heads);
  x.group = static_cast<int>(heads / kv_heads);
  x.head_dim = static_cast<int>(head_dim);
  x.scale = a.scale;
  x.score_scale = a.scale * kLog2E;
  return x;
}

// Are the rows of q, k, v 16-byte aligned, and D a multiple of 16 bytes?
template <class T, class A>
bool rows_aligned16(const A& a, const Packed<T>& x) {
  return aligned16(a.q, {x.q.stride, x.head_dim}) && aligned16(a.k, {x.k.stride}) && aligned16(a.v, {x.v.stride}) &&
         aligned16(a.pk, {x.pk.stride}) && aligned16(a.pv, {x.pv.stride});
}

// A tile of kRows query rows of a head, blockIdx.x.  Tiles of all heads begin with the last ones of the last segment:
// these see most slots, and the longest work must not begin last.
template <int kRows>
struct HeadTile : Tile {
  int head = blockIdx.x, kv;
  template <class T>
  __device__ explicit HeadTile(const Packed<T>& x)
      : Tile(find_tile<kRows>(x.segments, x.n_segments, gridDim.y - 1 - blockIdx.y)), kv(head / x.group) {}
};
// Blocks for them.  Segments are disjoint in q: they have at most its n rows together, and waste at most a tile each.
template <class T>
dim3 tile_grid(const char* op, const Packed<T>& x, int64_t n, int64_t rows) {
  const unsigned tiles = blocks(op, n / rows + x.n_segments, 1);
  expect(tiles <= 65535, op, ": ", n, " rows in ", x.n_segments, " segments are more than one launch covers");
  return dim3(static_cast<unsigned>(x.heads), tiles);
}

// Which blocks of slots the rows of packed sequences read (AttnFwd, AttnBwd).
struct BlockLists {
  const int32_t *blocks, *budget;   // [N, K, max_blocks], [N]
  int kv_heads, max_blocks, block;  // block: slots of a block
  // Has the row, which sees `total` slots, a list?
  __device__ __forceinline__ bool listed(int64_t row, int total) const { return ceil_div(total, block) > budget[row]; }
  __device__ __forceinline__ const int32_t* list(int64_t row, int kv) const {
    return blocks + (row * kv_heads + kv) * max_blocks;
  }
};
template <class A>
BlockLists block_lists(const A& a) {
  return {a.blocks.template as<int32_t>(), a.budget.template as<int32_t>(), static_cast<int>(a.blocks.shape[1]),
          static_cast<int>(a.blocks.shape[2]), a.block};
}

// ---- f32: a warp per query row at a time, a lane per slot and then per column of V

constexpr int kRows32 = 16, kOwn32 = kRows32 / kWarps;  // query rows of a block, of a warp

struct Shared32 {
  float *q, *k,
      *v;    // [16][D]; [64][D + 1] (a lane reads a row: the odd stride keeps lanes in different banks); [64][D]
  float* p;  // [64] of this warp
};
constexpr size_t smem32(int head_dim) {
  return sizeof(float) * (kRows32 * head_dim + kSlots * (head_dim + 1) + kSlots * head_dim + kWarps * kSlots);
}
__device__ __forceinline__ Shared32 shared32(int head_dim) {
  float *q = dynamic_smem<float>(), *k = q + kRows32 * head_dim, *v = k + kSlots * (head_dim + 1);
  return {q, k, v, v + kSlots * head_dim + threadIdx.x / 32 * kSlots};
}

// The query rows of this thread's warp: warp w has the rows w * kOwn32 + [0, kOwn32) of the block.
// kColumns: ceil(D / 32), columns of V per lane.
template <int kColumns>
struct Rows32 {
  float acc[kOwn32][kColumns] = {}, top[kOwn32], sum[kOwn32] = {};

  __device__ Rows32() {
    for (float& m : top) m = -INFINITY;
  }

  // Adds a block of slots that lies in shared memory, of which row r of `rows` sees visible(r) (possibly less than 1).
  template <class Visible>
  __device__ __forceinline__ void add_block(const Shared32& s, int head_dim, int rows, const Softmax& softmax,
                                            Visible visible_of) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kOwn32; r++) {
      const int row = threadIdx.x / 32 * kOwn32 + r;
      const int visible = row < rows ? visible_of(row) : 0;
      if (visible <= 0) continue;  // the same for the whole warp
      float z[2], m = -INFINITY;
      for (int h = 0; h < 2; h++) {
        const int slot = lane + 32 * h;
        float dot = 0;
        if (slot < visible)
          for (int c = 0; c < head_dim; c++) dot = fmaf(s.q[row * head_dim + c], s.k[slot * (head_dim + 1) + c], dot);
        z[h] = dot;
        if (slot < visible) m = fmaxf(m, dot);
      }
      m = fmaxf(top[r], softmax.score(warp_max(m)));
      const float alpha = exp2_f32(top[r] - m);
      top[r] = m;
      for (int h = 0; h < 2; h++) {
        const int slot = lane + 32 * h;
        s.p[slot] = slot < visible ? softmax.weight(z[h], m) : 0.f;
      }
      __syncwarp();
      const float* p = s.p + lane % 16;  // the row sum of 64 elements
      float part = p[0] + p[16] + p[32] + p[48];
      for (int o = 8; o > 0; o /= 2) part += __shfl_xor_sync(kAllLanes, part, o);
      sum[r] = fmaf(sum[r], alpha, part);
#pragma unroll
      for (int j = 0; j < kColumns; j++) {
        const int c = lane + 32 * j;
        if (c >= head_dim) continue;
        float x = acc[r][j] * alpha;
        for (int slot = 0; slot < min(kSlots, visible); slot++) x = fmaf(s.p[slot], s.v[slot * head_dim + c], x);
        acc[r][j] = x;
      }
      __syncwarp();  // before p is overwritten
    }
  }

  // The results to where place(row, lse) says; it is called by every lane of the row's warp.
  template <class Place>
  __device__ __forceinline__ void write(int rows, Place place, int head_dim) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kOwn32; r++) {
      const int row = threadIdx.x / 32 * kOwn32 + r;
      if (row >= rows) continue;
      auto* o = place(row, fmaf(log_f32(sum[r]), kLog2E, top[r]));
#pragma unroll
      for (int j = 0; j < kColumns; j++)
        if (lane + 32 * j < head_dim) o[lane + 32 * j] = from_float<std::decay_t<decltype(*o)>>(acc[r][j] / sum[r]);
    }
  }
};

}  // namespace pare::PARE_CUDA
