// Causal attention of packed sequences, forward.  For own row i of a segment and its visible slots s in
// [0, parent_len + i]:  o = sum_s p_s v_s / sum_s p_s,  p_s = exp(scale * q.k_s - max),  lse = max + log(sum_s p_s).
//
// q, o [N, H, D]; k, v [N, K, D]; pk, pv [P, K, D]; lists [G, K]; lse [N, H].  o and lse are overwritten in the rows of
// segments; other rows are not touched.  D <= 256.
// Order: slots in blocks of 64 aligned to slot 0 (parent first), blocks ascending, online softmax.  A block that is
// hidden from a row leaves it exactly as it was.  So a row's bits depend on its sequence only, not on where its rows
// lie, what else is in the batch, or where the parent ends.
// f32: as ops.h states it, bit for bit the `cpu` table; bf16: tensor cores, as attention_mma.cuh states it.  There a
// hidden slot of a visible tile enters with weight 0, so a V that is not finite reaches earlier rows of its tile.
// Bytes: q and o once, k and v once per tile of query rows (from L2 for the most part).  Limited by the tensor cores
// and, in this version, by exponentials that do not overlap them; f32 by shared-memory bandwidth (for tests).
#include "attention_mma.cuh"

namespace pare::PARE_CUDA {

namespace {

template <class T>
struct Args {
  T* o;                                                        // [N, H, D]
  float* lse;                                                  // [N, H]
  const T* q;                                                  // [N, H, D]
  const T *k, *v;                                              // [N, K, D]
  const T *pk, *pv;                                            // [P, K, D]
  int64_t q_stride, k_stride, v_stride, pk_stride, pv_stride;  // between rows, in elements
  const int4* segments;                                        // [S]: SegmentRow
  const int32_t* lists;                                        // [G, K], or null: parents are runs of rows
  int n_segments, heads, group, d;                             // group: query heads of a key head
  float scale;
  bool vector;  // q, k, v rows are 16-byte aligned and D a multiple of 8
};

// Row of slot `s` in k (or v) for key head `kv_head`, given where own and parent rows lie.
template <class T>
__device__ __forceinline__ const T* slot_row(const Args<T>& a, const Tile& t, int kv_head, const T* own,
                                             int64_t own_stride, const T* parent, int64_t parent_stride, int s) {
  if (s >= t.parent_len) return own + int64_t{t.row + s - t.parent_len} * own_stride;
  if (!a.lists) return parent + int64_t{t.parent_row + s} * parent_stride;
  const int row = a.lists[int64_t{t.parent_row + s} * (a.heads / a.group) + kv_head];
  return row >= 0 ? own + int64_t{row} * own_stride : parent + int64_t{-1 - row} * parent_stride;
}

// ---- f32

// kColumns: ceil(D / 32), columns of V per lane.
template <int kColumns>
__global__ void __launch_bounds__(kThreads) attn_f32(const Args<float> a) {
  const Tile t = find_tile<kRows32>(a.segments, a.n_segments, blockIdx.x);
  if (t.len == 0) return;
  const int d = a.d, head = blockIdx.y, kv = head / a.group * d;
  const int rows = min(kRows32, t.len - t.first), slots = t.parent_len + t.first + rows;
  const Shared32 s = shared32(d);
  for (int i = threadIdx.x; i < rows * d; i += kThreads)
    s.q[i] = a.q[int64_t{t.row + t.first + i / d} * a.q_stride + head * d + i % d];
  Rows32<kColumns> r;
  for (int begin = 0; begin < slots; begin += kSlots) {
    __syncthreads();  // everyone is done with the previous block
    for (int i = threadIdx.x; i < min(kSlots, slots - begin) * d; i += kThreads) {
      const int slot = i / d, c = i % d;
      s.k[slot * (d + 1) + c] = slot_row(a, t, kv / d, a.k, a.k_stride, a.pk, a.pk_stride, begin + slot)[kv + c];
      s.v[i] = slot_row(a, t, kv / d, a.v, a.v_stride, a.pv, a.pv_stride, begin + slot)[kv + c];
    }
    __syncthreads();
    r.add_block(
        s, d, rows, a.scale, [&](int row) { return t.parent_len + t.first + row + 1 - begin; },
        [](int, float z) { return z; });
  }
  r.write(
      rows,
      [&](int row, float lse) {
        const int64_t at = int64_t{t.row + t.first + row} * a.heads + head;
        if (threadIdx.x % 32 == 0) a.lse[at] = lse;
        return a.o + at * d;
      },
      d);
}

// ---- bf16: four warps of 16 query rows, two stages of K and V

constexpr int kRows16 = 64;

template <int kD>
__global__ void __launch_bounds__(kThreads) attn_bf16(const Args<bf16> a) {
  const Tile t = find_tile<kRows16>(a.segments, a.n_segments, blockIdx.x);
  if (t.len == 0) return;
  const int warp_row = threadIdx.x / 32 * 16, d = a.d, head = blockIdx.y, kv = head / a.group * d;
  const int rows = min(kRows16, t.len - t.first), slots = t.parent_len + t.first + rows;
  bf16* smem = dynamic_smem<bf16>();
  const SharedTile<kD> sq{smem};
  auto stage = [&](int i) { return SharedTile<kD>{smem + (1 + i) * 64 * kD}; };  // k: 0, 1; v: 2, 3
  load_tile(sq, rows, d, a.vector, [&](int r) { return a.q + int64_t{t.row + t.first + r} * a.q_stride + head * d; });
  Rows16<kD> r;
  for_blocks((slots + kSlots - 1) / kSlots,
             [&](int block) {
               const int begin = block * kSlots;
               load_tile(stage(block % 2), slots - begin, d, a.vector, [&](int i) {
                 return slot_row(a, t, kv / d, a.k, a.k_stride, a.pk, a.pk_stride, begin + i) + kv;
               });
               load_tile(stage(2 + block % 2), slots - begin, d, a.vector, [&](int i) {
                 return slot_row(a, t, kv / d, a.v, a.v_stride, a.pv, a.pv_stride, begin + i) + kv;
               });
             },
             [&](int block) {
               r.add_block(
                   sq, warp_row, Down<kD>{stage(block % 2)}, stage(2 + block % 2), a.scale,
                   [&](int i) { return t.parent_len + t.first + warp_row + i + 1 - block * kSlots; },
                   [](int, float z) { return z; });
             });
  r.write(
      rows - warp_row,
      [&](int i, float lse) {
        const int64_t at = int64_t{t.row + t.first + warp_row + i} * a.heads + head;
        if (threadIdx.x % 4 == 0) a.lse[at] = lse;
        return a.o + at * d;
      },
      d);
}

// ---- launchers

void run(const Args<float>& a, dim3 grid, Stream stream) {
  launch("attn_fwd",
         a.d <= 64    ? attn_f32<2>
         : a.d <= 128 ? attn_f32<4>
                      : attn_f32<8>,
         {.grid = grid, .block = kThreads, .smem = smem32(a.d)}, stream, a);
}

void run(const Args<bf16>& a, dim3 grid, Stream stream) {
  const int d = a.d <= 64 ? 64 : a.d <= 128 ? 128 : 256;
  launch("attn_fwd",
         d == 64    ? attn_bf16<64>
         : d == 128 ? attn_bf16<128>
                    : attn_bf16<256>,
         {.grid = grid, .block = kThreads, .smem = 5 * 64 * d * sizeof(bf16)}, stream, a);
}

}  // namespace

void attn_fwd(const AttnFwd& a, Stream stream) {
  const char* op = "attn_fwd";
  expect(a.q.rank == 3 && a.k.rank == 3, op, ": q ", a.q.str(), " and k ", a.k.str(), " must be [rows, heads, D]");
  const int64_t n = a.q.shape[0], heads = a.q.shape[1], d = a.q.shape[2], kv_heads = a.k.shape[1];
  expect(d >= 1 && d <= 256, op, ": head_dim ", d, " is not in [1, 256]");
  expect(kv_heads > 0 && heads % kv_heads == 0 && heads <= 65535, op, ": ", heads, " query heads with ", kv_heads,
         " key heads");
  expect(is_shape(a.o, {n, heads, d}) && a.o.contiguous(), op, ": o ", a.o.str(), " for q ", a.q.str());
  expect(is_shape(a.lse, {n, heads}) && a.lse.contiguous(), op, ": lse ", a.lse.str(), " for q ", a.q.str());
  expect(a.segments.rank == 2 && a.segments.shape[1] == 4 && a.segments.contiguous() &&
             reinterpret_cast<uintptr_t>(a.segments.data) % 16 == 0,
         op, ": segments ", a.segments.str(), " must be [S, 4], 16-byte aligned");
  expect(!a.lists || (is_shape(a.lists, {a.lists.shape[0], kv_heads}) && a.lists.contiguous()), op, ": lists ",
         a.lists.str(), " must be [G, ", kv_heads, "]");
  if (n == 0 || heads == 0 || a.segments.shape[0] == 0) return;
  with_act(op, a.q, [&](auto type) {
    using T = decltype(type);
    Args<T> x{};
    x.o = a.o.as<T>(), x.lse = a.lse.as<float>(), x.q = a.q.as<T>();
    x.k = a.k.as<T>(), x.v = a.v.as<T>(), x.pk = a.pk.as<T>(), x.pv = a.pv.as<T>();
    x.q_stride = row_stride(op, "q", a.q, heads, d);
    x.k_stride = row_stride(op, "k", a.k, kv_heads, d), x.v_stride = row_stride(op, "v", a.v, kv_heads, d);
    x.pk_stride = row_stride(op, "pk", a.pk, kv_heads, d), x.pv_stride = row_stride(op, "pv", a.pv, kv_heads, d);
    x.segments = reinterpret_cast<const int4*>(a.segments.as<int32_t>());
    x.lists = a.lists ? a.lists.as<int32_t>() : nullptr;
    x.n_segments = static_cast<int>(a.segments.shape[0]);
    x.heads = static_cast<int>(heads), x.group = static_cast<int>(heads / kv_heads), x.d = static_cast<int>(d);
    x.scale = a.scale;
    x.vector = aligned16(a.q, {x.q_stride, d}) && aligned16(a.k, {x.k_stride}) && aligned16(a.v, {x.v_stride}) &&
               aligned16(a.pk, {x.pk_stride}) && aligned16(a.pv, {x.pv_stride});
    // Segments are disjoint in q: together they have at most n rows, and each wastes at most one tile.
    const int64_t tiles = n / (sizeof(T) == 2 ? kRows16 : kRows32) + a.segments.shape[0];
    run(x, dim3(blocks(op, tiles, 1), static_cast<unsigned>(heads)), stream);
  });
}

}  // namespace pare::PARE_CUDA
