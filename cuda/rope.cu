// Rotary position embedding, rotate-half: (a, b) = (x[c], x[c + D/2]) -> (a cos - b sin, b cos + a sin), each product
// rounded, then the sum.  Backward is the rotation by the negative angle.
//
//   a head    | pack 0 | pack 1 | ...      | pack 0 | pack 1 | ...      |     lane l of its group: pack l of both
//             | a: channels [0, D/2)       | b: channels [D/2, D)       |     halves, 16 bytes each
//
// rope: x [N, h, D] in place, rows may be strided; table [positions, D]: cos, then sin, D/2 each.
// qk_norm_rope: every head of queries and keys is normed as in norm.cu and rotated; backward, it is rotated back first.
// x, y, dy, dx [N, H+K, D], any stride between the N rows, heads contiguous; rstd [N, H+K]; dx may be dy.  y, rstd and
// dx are overwritten, dq_norm and dk_norm [D] added to.  Values are in f32 between the norm and the rotation.
// D <= 256, as in attention.
// kv_write: k_pages [pages, K, D, 16], v_pages [pages, K, 16, D]; page_table [sequences, max_pages] with any stride
// between rows; queries [S, 4]: PagedRow.  The new slots are overwritten, and the outputs of its rotation, which has
// the bits of the op alone: in decoding one kernel does both, or the product before does (Rotated, linear.cu).  A row
// that no entry names is rotated and not written.
//
// Order: rotations have none.  A norm is a group of lanes a head, as many (a power of two, at most 32) as it has packs
// of pairs; lane l takes pack l of both halves as one chain, then a tree over the lanes: the bits of a head depend on D
// only.  dq_norm and dk_norm: head u, counted over rows, belongs to group u % (kNormParts * groups of a block), whose
// chain ascends; the groups of a warp by a tree, the warps of a block in order, blocks in eight strands, those in
// order: the same bits in every run, but not for another split into micro-batches.
//
// Bytes: rope reads and writes x, and reads D * 4 a row of the table.  qk_norm_rope: forward 2, backward 3 streams of
// N * (H+K) * D.  kv_write: the rotation, v read, the new slots written, those of K by scattered stores of an element.
// Limited by memory bandwidth; kv_write by latency: 256 rows are 3 MB.
#include <algorithm>
#include <bit>

#include "linear.cuh"
#include "ops/rope.h"
#include "rope.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kMostChannels = 256;

// The heads of N rows.
template <class T>
struct Heads {
  T* data;
  int64_t stride;  // from row to row
  __device__ T* at(int64_t n, int h, int half) const { return data + n * stride + h * 2 * half; }
};
struct Shape {
  int64_t rows;
  int heads, q_heads, half, lanes;  // lanes: of a head
};

// A pack of a head's first half, and that of its second half which is rotated with it.
template <class T>
struct Pairs {
  Pack<T> a, b;
};
template <bool kVector, class T>
__device__ __forceinline__ Pairs<T> load_pairs(const T* p, int half, int i) {
  return {load_pack<kVector>(p + i, half - i), load_pack<kVector>(p + half + i, half - i)};
}
template <bool kVector, class T>
__device__ __forceinline__ void store_pairs(T* p, const Pairs<T>& x, int half, int i) {
  store_pack<kVector>(p + i, x.a, half - i);
  store_pack<kVector>(p + half + i, x.b, half - i);
}

// Head `head` of all, and the pairs of it that this thread has: those from i on, if `live`.  After the last head only
// sums over lanes are computed, of zeros.
struct Place {
  int64_t n;
  int h, i;
  bool live;
  __device__ __forceinline__ Place(const Shape& s, int64_t head, int pack) {
    n = head / s.heads;
    h = static_cast<int>(head % s.heads);
    i = static_cast<int>(threadIdx.x) % s.lanes * pack;
    live = n < s.rows && i < s.half;
  }
};

__device__ __forceinline__ float group_sum(float v, int lanes) {
  for (int o = lanes / 2; o > 0; o /= 2) v += __shfl_xor_sync(kAllLanes, v, o);
  return v;
}

// Returns 1 / sqrt(mean(x^2) + eps) of the head of a group of lanes.
template <class T>
__device__ __forceinline__ float rstd_of(const Pairs<T>& x, const Shape& s, float eps) {
  float sum = 0;
  for (int j = 0; j < kPack<T>; j++) sum = fmaf(to_float(x.a.v[j]), to_float(x.a.v[j]), sum);
  for (int j = 0; j < kPack<T>; j++) sum = fmaf(to_float(x.b.v[j]), to_float(x.b.v[j]), sum);
  return 1.f / sqrtf(group_sum(sum, s.lanes) / static_cast<float>(2 * s.half) + eps);
}

// Rotates the pairs from i on, whose elements are a(j) and b(j).
template <bool kVector, class T, class A, class B>
__device__ __forceinline__ void rotate_pairs(Pairs<T>& x, const float* angle, int half, int i, float sign, A a, B b) {
  angle += i;
  for (int j = 0; j < kPack<T>; j++) {
    if (!kVector && i + j >= half) break;
    const float2 y = rotated(a(j), b(j), angle[j], sign * angle[half + j]);
    x.a.v[j] = from_float<T>(y.x);
    x.b.v[j] = from_float<T>(y.y);
  }
}
template <bool kVector, class T>
__device__ __forceinline__ void rotate(Pairs<T>& x, const float* angle, int half, int i, float sign) {
  rotate_pairs<kVector>(
      x, angle, half, i, sign, [&](int j) { return to_float(x.a.v[j]); }, [&](int j) { return to_float(x.b.v[j]); });
}
// Rotates the pairs after the norm with weights w.
template <bool kVector, class T>
__device__ __forceinline__ void norm_and_rotate(Pairs<T>& x, float rstd, const Pairs<T>& w, const float* angle,
                                                int half, int i) {
  rotate_pairs<kVector>(
      x, angle, half, i, 1, [&](int j) { return to_float(x.a.v[j]) * rstd * to_float(w.a.v[j]); },
      [&](int j) { return to_float(x.b.v[j]) * rstd * to_float(w.b.v[j]); });
}

// A thread rotates one pack of pairs; blockIdx.x is the row.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) rotate_heads(Heads<T> x, Angles angles, int heads, int half, float sign) {
  const int packs = ceil_div(half, kPack<T>), i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= heads * packs) return;
  const int c = i % packs * kPack<T>;
  T* head = x.at(blockIdx.x, i / packs, half);
  Pairs<T> v = load_pairs<kVector>(static_cast<const T*>(head), half, c);
  rotate<kVector>(v, angles.of(blockIdx.x, half), half, c, sign);
  store_pairs<kVector>(head, v, half, c);
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads)
    qk_fwd(Heads<T> y, float* __restrict__ rstd, Heads<const T> x, const T* __restrict__ q_norm,
           const T* __restrict__ k_norm, Angles angles, Shape s, float eps) {
  const int64_t head = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / s.lanes;
  const Place p(s, head, kPack<T>);
  Pairs<T> v{};
  if (p.live) v = load_pairs<kVector>(x.at(p.n, p.h, s.half), s.half, p.i);
  const float r = rstd_of(v, s, eps);
  if (!p.live) return;
  if (p.i == 0) rstd[head] = r;
  const Pairs<T> w = load_pairs<kVector>(p.h < s.q_heads ? q_norm : k_norm, s.half, p.i);
  norm_and_rotate<kVector>(v, r, w, angles.of(p.n, s.half), s.half, p.i);
  store_pairs<kVector>(y.at(p.n, p.h, s.half), v, s.half, p.i);
}

constexpr int kBwdThreads = 256, kBwdWarps = kBwdThreads / 32;
static_assert(norm_parts(kBwdWarps) == 1 && norm_parts(kBwdWarps + 1) == 2);  // a block has a group a warp, at least

// The sums that a thread's pairs add to the gradient of a weight.
template <class T>
struct PairSums {
  float a[kPack<T>] = {}, b[kPack<T>] = {};
};

// Computes dx, and in parts [gridDim.x, 2, D] the terms of a block in dq_norm and dk_norm.
template <class T, bool kVector, bool kWeights>
__global__ void __launch_bounds__(kBwdThreads, 2)
    qk_bwd(Heads<T> dx, float* __restrict__ parts, Heads<const T> dy, Heads<const T> x, const T* __restrict__ q_norm,
           const T* __restrict__ k_norm, const float* __restrict__ rstd, Angles angles, Shape s) {
  const int groups = kBwdThreads / s.lanes;
  PairSums<T> q_sums, k_sums;
  for (int64_t first = int64_t{blockIdx.x} * groups; first < s.rows * s.heads; first += int64_t{gridDim.x} * groups) {
    const int64_t head = first + threadIdx.x / s.lanes;
    const Place p(s, head, kPack<T>);
    const bool query = p.h < s.q_heads;
    Pairs<T> g{}, v{}, w{};
    float cos[kPack<T>] = {}, sin[kPack<T>] = {}, r = 0;
    if (p.live) {
      g = load_pairs<kVector>(dy.at(p.n, p.h, s.half), s.half, p.i);
      v = load_pairs<kVector>(x.at(p.n, p.h, s.half), s.half, p.i);
      w = load_pairs<kVector>(query ? q_norm : k_norm, s.half, p.i);
      r = rstd[head];
      const float* angle = angles.of(p.n, s.half) + p.i;
      for (int j = 0; j < kPack<T>; j++)
        if (kVector || p.i + j < s.half) {
          cos[j] = angle[j];
          sin[j] = angle[s.half + j];
        }
    }
    // x normed; dy rotated back, for the weights and then multiplied by them
    float xa[kPack<T>], xb[kPack<T>], ga[kPack<T>], gb[kPack<T>], dot = 0;
    for (int j = 0; j < kPack<T>; j++) {
      const float a = to_float(g.a.v[j]), b = to_float(g.b.v[j]);
      xa[j] = to_float(v.a.v[j]) * r;
      xb[j] = to_float(v.b.v[j]) * r;
      ga[j] = a * cos[j] + b * sin[j];
      gb[j] = b * cos[j] - a * sin[j];
    }
    for (int j = 0; kWeights && j < kPack<T>; j++) {
      if (query) {
        q_sums.a[j] = fmaf(ga[j], xa[j], q_sums.a[j]);
        q_sums.b[j] = fmaf(gb[j], xb[j], q_sums.b[j]);
      } else {
        k_sums.a[j] = fmaf(ga[j], xa[j], k_sums.a[j]);
        k_sums.b[j] = fmaf(gb[j], xb[j], k_sums.b[j]);
      }
    }
    for (int j = 0; j < kPack<T>; j++) {
      ga[j] *= to_float(w.a.v[j]);
      gb[j] *= to_float(w.b.v[j]);
      dot = fmaf(gb[j], xb[j], fmaf(ga[j], xa[j], dot));
    }
    const float mean = group_sum(dot, s.lanes) / static_cast<float>(2 * s.half);
    if (!p.live) continue;
    for (int j = 0; j < kPack<T>; j++) {
      g.a.v[j] = from_float<T>(r * (ga[j] - xa[j] * mean));
      g.b.v[j] = from_float<T>(r * (gb[j] - xb[j] * mean));
    }
    store_pairs<kVector>(dx.at(p.n, p.h, s.half), g, s.half, p.i);
  }
  if (!kWeights) return;
  __shared__ float warps[kBwdWarps][2 * kMostChannels];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = lane % s.lanes * kPack<T>, dim = 2 * s.half;
  for (int j = 0; j < kPack<T>; j++) {
    const bool there = i + j < s.half;
    for (int kind = 0; kind < 2; kind++) {
      float a = kind ? k_sums.a[j] : q_sums.a[j], b = kind ? k_sums.b[j] : q_sums.b[j];
      for (int o = s.lanes; o < 32; o *= 2) {
        a += __shfl_xor_sync(kAllLanes, a, o);
        b += __shfl_xor_sync(kAllLanes, b, o);
      }
      if (lane < s.lanes && there) {
        warps[warp][kind * dim + i + j] = a;
        warps[warp][kind * dim + s.half + i + j] = b;
      }
    }
  }
  __syncthreads();
  for (int c = threadIdx.x; c < 2 * dim; c += kBwdThreads) {
    float sum = 0;
    for (int w = 0; w < kBwdWarps; w++) sum += warps[w][c];
    parts[int64_t{blockIdx.x} * 2 * dim + c] = sum;
  }
}

// Adds the parts of all blocks to dq_norm and dk_norm.  threadIdx.x: a column of one, then the other; .y: a strand.
constexpr int kColumns = 32, kStrands = 8;
__global__ void __launch_bounds__(kColumns* kStrands)
    add_parts(float* __restrict__ dq_norm, float* __restrict__ dk_norm, const float* __restrict__ parts, int count,
              int dim) {
  __shared__ float strands[kStrands][kColumns];
  const int c = blockIdx.x * kColumns + threadIdx.x;
  float sum = 0;
  if (c < 2 * dim)
    for (int i = threadIdx.y; i < count; i += kStrands) sum += parts[int64_t{i} * 2 * dim + c];
  strands[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= 2 * dim) return;
  for (int y = 1; y < kStrands; y++) sum += strands[y][threadIdx.x];
  (c < dim ? dq_norm[c] : dk_norm[c - dim]) += sum;
}

// ---- into the cache

// The work of write_rows before it writes (Rotation).
template <class T>
struct Rotate {
  Heads<const T> from;
  Heads<T> to;               // from == to unless there is a norm
  float* rstd;               // null: no norm
  const T *q_norm, *k_norm;  // as rstd
  Angles angles;             // without table: no rotation, all heads are keys
  Shape s;
  float eps;
};

// blockIdx.x is a row.  A group of lanes has a head; the group of a key head also writes the value head.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads)
    write_rows(Pages<T> pages, Rotate<T> x, Heads<const T> values, Positions positions) {
  await_kernel_before();
  const Shape& s = x.s;
  const int row = static_cast<int>(blockIdx.x), own = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) / s.lanes;
  const PagedRow entry = entry_of_row(pages.queries, pages.n_queries, row);
  const Place p(s, own < s.heads ? int64_t{row} * s.heads + own : s.rows * s.heads, kPack<T>);
  Pairs<T> k{};
  if (p.live) k = load_pairs<kVector>(x.from.at(row, p.h, s.half), s.half, p.i);
  const float r = x.rstd ? rstd_of(k, s, x.eps) : 0;
  if (!p.live) return;
  if (x.angles.table) {
    const float* angle = x.angles.of(row, s.half);
    if (x.rstd) {
      if (p.i == 0) x.rstd[int64_t{row} * s.heads + p.h] = r;
      const Pairs<T> w = load_pairs<kVector>(p.h < s.q_heads ? x.q_norm : x.k_norm, s.half, p.i);
      norm_and_rotate<kVector>(k, r, w, angle, s.half, p.i);
    } else {
      rotate<kVector>(k, angle, s.half, p.i, 1);
    }
    store_pairs<kVector>(x.to.at(row, p.h, s.half), k, s.half, p.i);
  }
  if (p.h < s.q_heads || entry.rows == 0) return;
  const int slot = slot_of_row(entry, row), h = p.h - s.q_heads;
  const int64_t head = pages.head(entry.table_row, slot, h);
  for (int j = 0; j < kPack<T>; j++) {
    if (!kVector && p.i + j >= s.half) break;
    *pages.k_at(head, slot, p.i + j) = k.a.v[j];
    *pages.k_at(head, slot, s.half + p.i + j) = k.b.v[j];
  }
  const Pairs<T> v = load_pairs<kVector>(values.at(row, h, s.half), s.half, p.i);
  store_pairs<kVector>(pages.v_at(head, slot, 0), v, s.half, p.i);
  if (p.i == 0 && positions.pos_pages) positions.pos_pages[head * kPageSlots + slot % kPageSlots] = positions.pos[row];
}

// ---- host

template <class T, class U>
Heads<U> heads_of(const Tensor& t) {
  return {static_cast<U*>(t.as<T>()), t.stride[0]};
}

// Returns the shape whose `lanes` are for packs of `pack` elements.
Shape shape_of(const char* op, const Tensor& x, int64_t q_heads, int64_t pack) {
  const int64_t packs = ceil_div(x.shape[2] / 2, pack);
  expect(x.shape[2] <= kMostChannels, op, ": heads of ", x.shape[2], " channels; at most ", kMostChannels);
  return {x.shape[0], static_cast<int>(x.shape[1]), static_cast<int>(q_heads), static_cast<int>(x.shape[2] / 2),
          static_cast<int>(std::min<uint64_t>(32, std::bit_ceil(static_cast<uint64_t>(packs))))};
}

void rope(const char* op, const Tensor& x, const Tensor& table, const Tensor& pos, float sign, Stream stream) {
  const int64_t n = x.shape[0], half = x.shape[2] / 2;
  if (x.size() == 0) return;
  with_act(op, x, [&](auto type) {
    using T = decltype(type);
    const bool vector = aligned16(x, {x.stride[0], half});
    const int64_t packs = x.shape[1] * ceil_div(half, kPack<T>);
    launch(op, vector ? rotate_heads<T, true> : rotate_heads<T, false>,
           {.grid = dim3(blocks(op, n, 1), blocks(op, packs, kThreads)), .block = kThreads}, stream, heads_of<T, T>(x),
           Angles{table.as<float>(), pos.as<int32_t>()}, x.shape[1], half, sign);
  });
}

}  // namespace

void rope_fwd(const RopeFwd& a, Stream stream) { rope("rope_fwd", a.x, a.table, a.pos, 1, stream); }
void rope_bwd(const RopeBwd& a, Stream stream) { rope("rope_bwd", a.dx, a.table, a.pos, -1, stream); }

void qk_norm_rope_fwd(const QkNormRopeFwd& a, Stream stream) {
  const char* op = "qk_norm_rope_fwd";
  with_act(op, a.x, [&](auto type) {
    using T = decltype(type);
    const Shape s = shape_of(op, a.x, a.q_heads, kPack<T>);
    const auto y = heads_of<T, T>(a.y);
    const auto x = heads_of<T, const T>(a.x);
    if (a.x.size() == 0) return;
    const bool vector = aligned16(a.y, {y.stride, s.half}) && aligned16(a.x, {x.stride, s.half}) &&
                        aligned16(a.q_norm, {}) && aligned16(a.k_norm, {});
    launch(op, vector ? qk_fwd<T, true> : qk_fwd<T, false>,
           {.grid = blocks(op, s.rows * s.heads * s.lanes, kThreads), .block = kThreads}, stream, y, a.rstd.as<float>(),
           x, a.q_norm.as<T>(), a.k_norm.as<T>(), Angles{a.table.as<float>(), a.pos.as<int32_t>()}, s, a.eps);
  });
}

void qk_norm_rope_bwd(const QkNormRopeBwd& a, Stream stream) {
  const char* op = "qk_norm_rope_bwd";
  with_act(op, a.x, [&](auto type) {
    using T = decltype(type);
    const Shape s = shape_of(op, a.x, a.q_heads, kPack<T>);
    const auto dx = heads_of<T, T>(a.dx);
    const auto dy = heads_of<T, const T>(a.dy);
    const auto x = heads_of<T, const T>(a.x);
    if (a.x.size() == 0) return;
    const bool vector = aligned16(a.dx, {dx.stride, s.half}) && aligned16(a.dy, {dy.stride, s.half}) &&
                        aligned16(a.x, {x.stride, s.half}) && aligned16(a.q_norm, {}) && aligned16(a.k_norm, {});
    const Angles angles{a.table.as<float>(), a.pos.as<int32_t>()};
    const unsigned parts =
        std::min(blocks(op, s.rows * s.heads * s.lanes, kBwdThreads), static_cast<unsigned>(kNormParts));
    const auto kernel = vector ? (a.dq_norm ? qk_bwd<T, true, true> : qk_bwd<T, true, false>)
                               : (a.dq_norm ? qk_bwd<T, false, true> : qk_bwd<T, false, false>);
    launch(op, kernel, {.grid = parts, .block = kBwdThreads}, stream, dx, a.dq_norm ? a.parts.as<float>() : nullptr, dy,
           x, a.q_norm.as<T>(), a.k_norm.as<T>(), a.rstd.as<float>(), angles, s);
    if (a.dq_norm)
      launch(op, add_parts, {.grid = blocks(op, 4 * s.half, kColumns), .block = dim3(kColumns, kStrands)}, stream,
             a.dq_norm.as<float>(), a.dk_norm.as<float>(), a.parts.as<float>(), parts, 2 * s.half);
  });
}

void kv_write(const KvWrite& a, Stream stream) {
  const char* op = "kv_write";
  if (a.product.y) {
    if (multiply_and_write(a, stream)) return;
    linear_fwd(a.product, stream);
  }
  with_act(op, a.k, [&](auto type) {
    using T = decltype(type);
    const auto pages = pages_of<T>(op, a.k_pages, a.v_pages, a.page_table, a.queries);
    const int64_t rows = a.k.shape[0];
    if (rows == 0) return;
    const Positions positions{a.pos_pages ? a.pos_pages.as<int32_t>() : nullptr,
                              a.pos_pages ? a.pos.as<int32_t>() : nullptr};
    const auto& [rope, norm] = a.rotation;
    const Tensor& to = a.rotation ? a.rotation.result() : a.k;
    const Tensor& from = norm.y ? norm.x : to;
    Rotate<T> x{};
    x.from = heads_of<T, const T>(from);
    x.to = heads_of<T, T>(to);
    x.s = shape_of(op, to, to.shape[1] - a.k.shape[1], kPack<T>);
    if (rope.x) x.angles = {rope.table.as<float>(), rope.pos.as<int32_t>()};
    if (norm.y) {
      x.angles = {norm.table.as<float>(), norm.pos.as<int32_t>()};
      x.rstd = norm.rstd.as<float>();
      x.q_norm = norm.q_norm.as<T>();
      x.k_norm = norm.k_norm.as<T>();
      x.eps = norm.eps;
    }
    const auto values = heads_of<T, const T>(a.v);
    const bool vector = aligned16(from, {x.from.stride, x.s.half}) && aligned16(to, {x.to.stride, x.s.half}) &&
                        aligned16(a.v, {values.stride, x.s.half}) && aligned16(a.v_pages, {}) &&
                        (!norm.y || (aligned16(norm.q_norm, {}) && aligned16(norm.k_norm, {})));
    launch(op, vector ? write_rows<T, true> : write_rows<T, false>,
           {.grid = dim3(blocks(op, rows, 1), blocks(op, int64_t{x.s.heads} * x.s.lanes, kThreads)),
            .block = kThreads,
            .early = true},
           stream, pages, x, values, positions);
  });
}

}  // namespace pare::PARE_CUDA
