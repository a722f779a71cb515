// What attention of packed and of paged sequences share: finding the rows of a block, the operands of packed sequences,
// and the arithmetic in f32, whose order ops.h states, so that both give the same bits.
#pragma once
#include <type_traits>

#include "common.cuh"

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

// Tile number `tile` of all n entries, cut into tiles of kRows query rows; an entry without rows if there are fewer.
// Each row that an entry names counts `repeat` times.
template <int kRows, class Entry = SegmentRow>
__device__ TileOf<Entry> find_tile(const int4* entries, int n, int tile, int repeat = 1) {
  // The second number of an entry says how many rows it names.
  const Piece p = find_piece(n, tile, [&](int i) { return (entries[i].y * repeat + kRows - 1) / kRows; });
  if (p.owner == n) return {};
  const int4 e = entries[p.owner];
  return {{e.x, e.y, e.z, e.w}, p.index * kRows, p.owner};
}

// Row stride of a [rows, heads, D] tensor with contiguous heads.
inline int64_t row_stride(const char* op, const char* field, const Tensor& t, int64_t heads, int64_t d) {
  expect(t.rank == 3 && t.shape[1] == heads && t.shape[2] == d && t.stride[1] == d && t.stride[2] == 1, op, ": ", field,
         " ", t.str(), " must be [rows, ", heads, ", ", d, "] with contiguous heads");
  return t.stride[0];
}

// ---- operands of packed sequences

template <class T>
struct Matrix {  // [rows, heads, D], heads contiguous
  T* p;
  int64_t stride;  // between rows, in elements
  __device__ __forceinline__ T* row(int64_t r) const { return p + r * stride; }
};

// What slots weigh.  scale: of q.k, with log2(e).
struct Softmax {
  float scale;
  __device__ __forceinline__ float score(float dot) const { return dot * scale; }
  // Relative to a slot with the score `max`.
  __device__ __forceinline__ float weight(float dot, float max) const { return exp2_f32(fmaf(dot, scale, -max)); }
};

template <class T>
struct Packed {
  Matrix<const T> q;                          // [N, H, D]
  Matrix<const T> k, v, pk, pv;               // [N, K, D], [P, K, D]
  const int4* segments;                       // [S]: SegmentRow
  const int32_t* lists;                       // [G, K], or null: parents are runs of rows
  int n_segments, heads, kv_heads, group, d;  // group: query heads of a key head
  float scale, score_scale;                   // of q.k; that with log2(e)
  __device__ __forceinline__ Softmax softmax() const { return {score_scale}; }

  // Key or value of slot s, key head `kv`, of the segment of t.
  __device__ __forceinline__ const T* key(const Tile& t, int kv, int s) const { return at(k, pk, t, kv, s); }
  __device__ __forceinline__ const T* value(const Tile& t, int kv, int s) const { return at(v, pv, t, kv, s); }

 private:
  __device__ __forceinline__ const T* at(const Matrix<const T>& own, const Matrix<const T>& parent, const Tile& t,
                                         int kv, int s) const {
    if (s >= t.parent_len) return own.row(t.row + s - t.parent_len) + kv * d;
    if (!lists) return parent.row(t.parent_row + s) + kv * d;
    const int row = lists[int64_t{t.parent_row + s} * kv_heads + kv];
    return (row >= 0 ? own.row(row) : parent.row(-1 - row)) + kv * d;
  }
};

template <class T>
Matrix<T> matrix(const char* op, const char* field, const Tensor& t, int64_t rows, int64_t heads, int64_t d) {
  expect(is_shape(t, {rows, heads, d}) && t.stride[1] == d && t.stride[2] == 1, op, ": ", field, " ", t.str(),
         " must be [", rows, ", ", heads, ", ", d, "] with contiguous heads");
  return {t.as<std::remove_const_t<T>>(), t.stride[0]};
}

// The operands that AttnFwd and AttnBwd share.
template <class T, class A>
Packed<T> packed(const char* op, const A& a) {
  expect(a.q.rank == 3 && a.k.rank == 3, op, ": q ", a.q.str(), " and k ", a.k.str(), " must be [rows, heads, D]");
  const int64_t n = a.q.shape[0], heads = a.q.shape[1], d = a.q.shape[2], kv_heads = a.k.shape[1];
  expect(d >= 1 && d <= 256, op, ": head_dim ", d, " is not in [1, 256]");
  expect(kv_heads > 0 && heads % kv_heads == 0 && heads <= 65535, op, ": ", heads, " query heads with ", kv_heads,
         " key heads");
  expect(a.scale > 0, op, ": scale ", a.scale, " is not positive");
  expect(is_shape(a.lse, {n, heads}) && a.lse.contiguous(), op, ": lse ", a.lse.str(), " for q ", a.q.str());
  expect(a.segments.rank == 2 && a.segments.shape[1] == 4 && a.segments.contiguous() &&
             reinterpret_cast<uintptr_t>(a.segments.data) % 16 == 0,
         op, ": segments ", a.segments.str(), " must be [S, 4], 16-byte aligned");
  expect(!a.lists || (is_shape(a.lists, {a.lists.shape[0], kv_heads}) && a.lists.contiguous()), op, ": lists ",
         a.lists.str(), " must be [G, ", kv_heads, "]");
  Packed<T> x{};
  x.q = matrix<const T>(op, "q", a.q, n, heads, d);
  x.k = matrix<const T>(op, "k", a.k, n, kv_heads, d), x.v = matrix<const T>(op, "v", a.v, n, kv_heads, d);
  x.pk = matrix<const T>(op, "pk", a.pk, a.pk.shape[0], kv_heads, d);
  x.pv = matrix<const T>(op, "pv", a.pv, a.pk.shape[0], kv_heads, d);
  x.segments = reinterpret_cast<const int4*>(a.segments.template as<int32_t>());
  x.lists = a.lists ? a.lists.template as<int32_t>() : nullptr;
  x.n_segments = static_cast<int>(a.segments.shape[0]);
  x.heads = static_cast<int>(heads), x.kv_heads = static_cast<int>(kv_heads);
  x.group = static_cast<int>(heads / kv_heads), x.d = static_cast<int>(d);
  x.scale = a.scale, x.score_scale = a.scale * kLog2E;
  return x;
}

// Are the rows of q, k, v 16-byte aligned, and D a multiple of 16 bytes?
template <class T, class A>
bool rows_aligned16(const A& a, const Packed<T>& x) {
  return aligned16(a.q, {x.q.stride, x.d}) && aligned16(a.k, {x.k.stride}) && aligned16(a.v, {x.v.stride}) &&
         aligned16(a.pk, {x.pk.stride}) && aligned16(a.pv, {x.pv.stride});
}

// Blocks for the tiles of `rows` query rows and the heads.  Segments are disjoint in q: together they have at most its
// n rows, and each wastes at most one tile.
template <class T>
dim3 tile_grid(const char* op, const Packed<T>& x, int64_t n, int64_t rows) {
  return dim3(blocks(op, n / rows + x.n_segments, 1), static_cast<unsigned>(x.heads));
}

// Which blocks of slots the rows of packed sequences read (AttnFwd, AttnBwd).
struct BlockLists {
  const int32_t *blocks, *budget;   // [N, K, max_blocks], [N]
  int kv_heads, max_blocks, block;  // block: slots of a block
  // Has the row, which sees `total` slots, a list?
  __device__ __forceinline__ bool listed(int64_t row, int total) const {
    return (total + block - 1) / block > budget[row];
  }
  __device__ __forceinline__ const int32_t* list(int64_t row, int kv) const {
    return blocks + (row * kv_heads + kv) * max_blocks;
  }
};
template <class A>
BlockLists block_lists(const char* op, const A& a) {
  const int64_t n = a.q.shape[0], kv_heads = a.k.shape[1];
  expect(a.block == 4 || a.block == 16, op, ": blocks of ", a.block, " slots, expected 4 or 16");
  expect(a.blocks.rank == 3 && is_shape(a.blocks, {n, kv_heads, a.blocks.shape[2]}) && a.blocks.contiguous() &&
             is_shape(a.budget, {n}) && a.budget.contiguous(),
         op, ": blocks ", a.blocks.str(), " and budget ", a.budget.str(), " for ", n, " rows, ", kv_heads,
         " key heads");
  expect(!a.lists, op, ": a parent is listed by slots or by blocks, not both");
  return {a.blocks.template as<int32_t>(), a.budget.template as<int32_t>(), static_cast<int>(kv_heads),
          static_cast<int>(a.blocks.shape[2]), a.block};
}
// attn_fwd with them (attn_blocks.cu).
void attn_fwd_listed(const AttnFwd& a, Stream stream);

// ---- f32: a warp per query row at a time, a lane per slot and then per column of V

constexpr int kRows32 = 16, kOwn32 = kRows32 / kWarps;  // query rows of a block, of a warp

struct Shared32 {
  float *q, *k,
      *v;    // [16][D]; [64][D + 1] (a lane reads a row: the odd stride keeps lanes in different banks); [64][D]
  float* p;  // [64] of this warp
};
constexpr size_t smem32(int d) {
  return sizeof(float) * (kRows32 * d + kSlots * (d + 1) + kSlots * d + kWarps * kSlots);
}
__device__ __forceinline__ Shared32 shared32(int d) {
  float *q = dynamic_smem<float>(), *k = q + kRows32 * d, *v = k + kSlots * (d + 1);
  return {q, k, v, v + kSlots * d + threadIdx.x / 32 * kSlots};
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
  __device__ __forceinline__ void add_block(const Shared32& s, int d, int rows, const Softmax& softmax,
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
          for (int c = 0; c < d; c++) dot = fmaf(s.q[row * d + c], s.k[slot * (d + 1) + c], dot);
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
        if (c >= d) continue;
        float x = acc[r][j] * alpha;
        for (int slot = 0; slot < min(kSlots, visible); slot++) x = fmaf(s.p[slot], s.v[slot * d + c], x);
        acc[r][j] = x;
      }
      __syncwarp();  // before p is overwritten
    }
  }

  // The results to where place(row, lse) says; it is called by every lane of the row's warp.
  template <class Place>
  __device__ __forceinline__ void write(int rows, Place place, int d) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kOwn32; r++) {
      const int row = threadIdx.x / 32 * kOwn32 + r;
      if (row >= rows) continue;
      auto* o = place(row, fmaf(log_f32(sum[r]), kLog2E, top[r]));
#pragma unroll
      for (int j = 0; j < kColumns; j++)
        if (lane + 32 * j < d) o[lane + 32 * j] = from_float<std::decay_t<decltype(*o)>>(acc[r][j] / sum[r]);
    }
  }
};

}  // namespace pare::PARE_CUDA
