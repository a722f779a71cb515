// Rotary position embedding, rotate-half: (a, b) = (x[c], x[c + D/2]) -> (a cos - b sin, b cos + a sin), each product
// rounded, then the sum.  Backward is the rotation by the negative angle.
//
// rope: x [N, h, D] in place, rows may be strided; table [positions, D]: cos, then sin, D/2 each.  Every element stands
// alone: its bits depend on nothing else.  Bytes: x read and written, and D * 4 a row of the table.  Limited by memory
// bandwidth.
//
// qk_norm_rope: every head of queries and keys is normed as in norm.cu and rotated; backward, it is rotated back first.
// x, y, dy, dx [N, H+K, D], any stride between the N rows, heads contiguous; rstd [N, H+K]; dx may be dy.  y, rstd and
// dx are overwritten, dq_norm and dk_norm [D] added to.  What lies between the norm and the rotation is in f32.
// Order: a group of lanes a head, as many (a power of two, at most 32) as it has 16-byte packs of pairs; lane l takes
// packs l, l + lanes, ... of both halves as one chain, then a tree over the lanes: the bits of a head depend on D only.
// dq_norm and dk_norm: row n belongs to strand n % 256; strands are chains over their rows and heads ascending, added
// up in order: the same bits in every run, but not for another split into micro-batches.
// Bytes: forward 2, backward 3 + 2 streams of N * (H+K) * D; what is read twice by one head hits the cache the second
// time.  Limited by memory bandwidth; the weights by latency, for they have few columns.
#include <algorithm>
#include <bit>

#include "common.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kThreads = 128;

// A thread rotates one pack of pairs; blockIdx.x is the row.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) rotate(T* __restrict__ x, int64_t stride, const float* __restrict__ table,
                                                   const int32_t* __restrict__ pos, int heads, int half, float sign) {
  const int packs = ceil_div(half, kPack<T>), i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= heads * packs) return;
  const int c = i % packs * kPack<T>, left = half - c;
  T* p = x + int64_t{blockIdx.x} * stride + int64_t{i / packs} * 2 * half + c;
  const float* angle = table + int64_t{pos[blockIdx.x]} * 2 * half + c;
  Pack<T> a = load_pack<kVector>(static_cast<const T*>(p), left);
  Pack<T> b = load_pack<kVector>(static_cast<const T*>(p + half), left);
  for (int j = 0; j < kPack<T>; j++) {
    if (!kVector && j >= left) break;
    const float cos = angle[j], sin = sign * angle[half + j], u = to_float(a.v[j]), v = to_float(b.v[j]);
    a.v[j] = from_float<T>(u * cos - v * sin);
    b.v[j] = from_float<T>(v * cos + u * sin);
  }
  store_pack<kVector>(p, a, left);
  store_pack<kVector>(p + half, b, left);
}

// ---- behind the norm of queries and keys

constexpr int kColumns = 2, kStrands = 256;  // of the weights: packs of pairs that a block owns; see above

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
struct Angles {
  const float* table;
  const int32_t* pos;
  __device__ const float* of(int64_t n, int half) const { return table + int64_t{pos[n]} * 2 * half; }
};

// The head of this thread, and its lane there.  Behind the last head only the sums over lanes are computed, of nothing;
// reading the last head once more would meet the writes of those whose it is.
struct Place {
  int64_t head, n;
  int h, lane;
  bool live;
  __device__ explicit Place(const Shape& s) {
    const int64_t own = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / s.lanes, last = s.rows * s.heads - 1;
    live = own <= last;
    head = live ? own : last;
    n = head / s.heads, h = static_cast<int>(head % s.heads), lane = threadIdx.x % s.lanes;
  }
};

__device__ __forceinline__ float group_sum(float v, int lanes) {
  for (int o = lanes / 2; o > 0; o /= 2) v += __shfl_xor_sync(kAllLanes, v, o);
  return v;
}

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

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads)
    qk_fwd(Heads<T> y, float* __restrict__ rstd, Heads<const T> x, const T* __restrict__ q_norm,
           const T* __restrict__ k_norm, Angles angles, Shape s, float eps) {
  const Place p(s);
  const T* xh = x.at(p.n, p.h, s.half);
  float sum = 0;
  for (int i = p.lane * kPack<T>; p.live && i < s.half; i += s.lanes * kPack<T>) {
    const Pairs<T> v = load_pairs<kVector>(xh, s.half, i);
    for (int j = 0; j < kPack<T>; j++) sum = fmaf(to_float(v.a.v[j]), to_float(v.a.v[j]), sum);
    for (int j = 0; j < kPack<T>; j++) sum = fmaf(to_float(v.b.v[j]), to_float(v.b.v[j]), sum);
  }
  const float r = 1.f / sqrtf(group_sum(sum, s.lanes) / static_cast<float>(2 * s.half) + eps);
  if (!p.live) return;
  if (p.lane == 0) rstd[p.head] = r;
  const T* w = p.h < s.q_heads ? q_norm : k_norm;
  const float* angle = angles.of(p.n, s.half);
  T* yh = y.at(p.n, p.h, s.half);
  for (int i = p.lane * kPack<T>; i < s.half; i += s.lanes * kPack<T>) {
    Pairs<T> v = load_pairs<kVector>(xh, s.half, i);
    const Pairs<T> q = load_pairs<kVector>(w, s.half, i);
    for (int j = 0; j < kPack<T>; j++) {
      if (!kVector && i + j >= s.half) break;
      const float cos = angle[i + j], sin = angle[s.half + i + j];
      const float a = to_float(v.a.v[j]) * r * to_float(q.a.v[j]), b = to_float(v.b.v[j]) * r * to_float(q.b.v[j]);
      v.a.v[j] = from_float<T>(a * cos - b * sin);
      v.b.v[j] = from_float<T>(b * cos + a * sin);
    }
    store_pairs<kVector>(yh, v, s.half, i);
  }
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads)
    qk_bwd_input(Heads<T> dx, Heads<const T> dy, Heads<const T> x, const T* __restrict__ q_norm,
                 const T* __restrict__ k_norm, const float* __restrict__ rstd, Angles angles, Shape s) {
  const Place p(s);
  const T *gh = dy.at(p.n, p.h, s.half), *xh = x.at(p.n, p.h, s.half), *w = p.h < s.q_heads ? q_norm : k_norm;
  const float* angle = angles.of(p.n, s.half);
  const float r = rstd[p.head];
  // f(j, x, dy, w) for the pairs of pack i, with x normed, dy rotated back and multiplied by w
  const auto for_pairs = [&](int i, auto f) {
    const Pairs<T> g = load_pairs<kVector>(gh, s.half, i), v = load_pairs<kVector>(xh, s.half, i),
                   q = load_pairs<kVector>(w, s.half, i);
    for (int j = 0; j < kPack<T>; j++) {
      if (!kVector && i + j >= s.half) break;
      const float cos = angle[i + j], sin = angle[s.half + i + j];
      const float a = to_float(g.a.v[j]), b = to_float(g.b.v[j]);
      f(j, to_float(v.a.v[j]) * r, (a * cos + b * sin) * to_float(q.a.v[j]), to_float(v.b.v[j]) * r,
        (b * cos - a * sin) * to_float(q.b.v[j]));
    }
  };
  float dot = 0;
  for (int i = p.lane * kPack<T>; p.live && i < s.half; i += s.lanes * kPack<T>)
    for_pairs(i, [&](int, float xa, float ga, float xb, float gb) { dot = fmaf(gb, xb, fmaf(ga, xa, dot)); });
  const float mean = group_sum(dot, s.lanes) / static_cast<float>(2 * s.half);
  if (!p.live) return;
  T* dh = dx.at(p.n, p.h, s.half);
  for (int i = p.lane * kPack<T>; i < s.half; i += s.lanes * kPack<T>) {
    Pairs<T> d{};
    for_pairs(i, [&](int j, float xa, float ga, float xb, float gb) {
      d.a.v[j] = from_float<T>(r * (ga - xa * mean));
      d.b.v[j] = from_float<T>(r * (gb - xb * mean));
    });
    store_pairs<kVector>(dh, d, s.half, i);
  }
}

// blockIdx.y 0: dq_norm, 1: dk_norm
template <class T, bool kVector>
__global__ void __launch_bounds__(kColumns* kStrands)
    qk_bwd_weight(float* __restrict__ dq_norm, float* __restrict__ dk_norm, Heads<const T> dy, Heads<const T> x,
                  const float* __restrict__ rstd, Angles angles, Shape s) {
  constexpr int kWidth = 2 * kColumns * kPack<T>;  // columns of the block: those of the first halves, then the others
  __shared__ float part[kStrands][kWidth];
  const int strand = threadIdx.y, i = (blockIdx.x * kColumns + threadIdx.x) * kPack<T>;
  const int first = blockIdx.y ? s.q_heads : 0, end = blockIdx.y ? s.heads : s.q_heads;
  float a[kPack<T>] = {}, b[kPack<T>] = {};
  if (i < s.half)
    for (int64_t n = strand; n < s.rows; n += kStrands) {
      const float* angle = angles.of(n, s.half) + i;
      float cos[kPack<T>], sin[kPack<T>];
      for (int j = 0; j < kPack<T>; j++) {
        const bool in = kVector || i + j < s.half;
        cos[j] = in ? angle[j] : 0, sin[j] = in ? angle[s.half + j] : 0;
      }
      for (int h = first; h < end; h++) {
        const Pairs<T> g = load_pairs<kVector>(dy.at(n, h, s.half), s.half, i);
        const Pairs<T> v = load_pairs<kVector>(x.at(n, h, s.half), s.half, i);
        const float r = rstd[n * s.heads + h];
        for (int j = 0; j < kPack<T>; j++) {
          const float ga = to_float(g.a.v[j]), gb = to_float(g.b.v[j]);
          a[j] = fmaf(ga * cos[j] + gb * sin[j], to_float(v.a.v[j]) * r, a[j]);
          b[j] = fmaf(gb * cos[j] - ga * sin[j], to_float(v.b.v[j]) * r, b[j]);
        }
      }
    }
  for (int j = 0; j < kPack<T>; j++) {
    part[strand][threadIdx.x * kPack<T> + j] = a[j];
    part[strand][kWidth / 2 + threadIdx.x * kPack<T> + j] = b[j];
  }
  __syncthreads();
  const int column = strand * kColumns + threadIdx.x;
  if (column >= kWidth) return;
  const int c = blockIdx.x * (kWidth / 2) + column % (kWidth / 2);
  if (c >= s.half) return;
  float sum = 0;
  for (int k = 0; k < kStrands; k++) sum += part[k][column];
  float* const dw = blockIdx.y ? dk_norm : dq_norm;
  dw[column < kWidth / 2 ? c : s.half + c] += sum;
}

// `lanes` for packs of `pack` elements.
Shape shape_of(const Tensor& x, int64_t q_heads, int64_t pack) {
  const int64_t packs = ceil_div(x.shape[2] / 2, pack);
  return {x.shape[0], static_cast<int>(x.shape[1]), static_cast<int>(q_heads), static_cast<int>(x.shape[2] / 2),
          static_cast<int>(std::min<uint64_t>(32, std::bit_ceil(static_cast<uint64_t>(packs))))};
}

template <class T, class U>
Heads<U> heads_of(const Tensor& t) {
  return {static_cast<U*>(t.as<T>()), t.stride[0]};
}

void rope(const char* op, const Tensor& x, const Tensor& table, const Tensor& pos, float sign, Stream stream) {
  const int64_t n = x.shape[0], half = x.shape[2] / 2;
  if (x.size() == 0) return;
  with_act(op, x, [&](auto type) {
    using T = decltype(type);
    const bool vector = aligned16(x, {x.stride[0], half});
    const int64_t packs = x.shape[1] * ceil_div(half, kPack<T>);
    launch(op, vector ? rotate<T, true> : rotate<T, false>,
           {.grid = dim3(blocks(op, n, 1), blocks(op, packs, kThreads)), .block = kThreads}, stream, x.as<T>(),
           x.stride[0], table.as<float>(), pos.as<int32_t>(), x.shape[1], half, sign);
  });
}

}  // namespace

void rope_fwd(const RopeFwd& a, Stream stream) { rope("rope_fwd", a.x, a.table, a.pos, 1, stream); }
void rope_bwd(const RopeBwd& a, Stream stream) { rope("rope_bwd", a.dx, a.table, a.pos, -1, stream); }

void qk_norm_rope_fwd(const QkNormRopeFwd& a, Stream stream) {
  const char* op = "qk_norm_rope_fwd";
  with_act(op, a.x, [&](auto type) {
    using T = decltype(type);
    const Shape s = shape_of(a.x, a.q_heads, kPack<T>);
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
    const Shape s = shape_of(a.x, a.q_heads, kPack<T>);
    const auto dx = heads_of<T, T>(a.dx);
    const auto dy = heads_of<T, const T>(a.dy);
    const auto x = heads_of<T, const T>(a.x);
    if (a.x.size() == 0) return;
    const bool vector = aligned16(a.dx, {dx.stride, s.half}) && aligned16(a.dy, {dy.stride, s.half}) &&
                        aligned16(a.x, {x.stride, s.half}) && aligned16(a.q_norm, {}) && aligned16(a.k_norm, {});
    const Angles angles{a.table.as<float>(), a.pos.as<int32_t>()};
    // First, because dx may overwrite dy.
    if (a.dq_norm)
      launch(op, vector ? qk_bwd_weight<T, true> : qk_bwd_weight<T, false>,
             {.grid = dim3(blocks(op, s.half, kColumns * kPack<T>), 2), .block = dim3(kColumns, kStrands)}, stream,
             a.dq_norm.as<float>(), a.dk_norm.as<float>(), dy, x, a.rstd.as<float>(), angles, s);
    launch(op, vector ? qk_bwd_input<T, true> : qk_bwd_input<T, false>,
           {.grid = blocks(op, s.rows * s.heads * s.lanes, kThreads), .block = kThreads}, stream, dx, dy, x,
           a.q_norm.as<T>(), a.k_norm.as<T>(), a.rstd.as<float>(), angles, s);
  });
}

}  // namespace pare::PARE_CUDA
