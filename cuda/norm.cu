// RMSNorm.  rstd = 1 / sqrt(mean(x^2) + eps), y = (x * rstd) * w; with xh = x * rstd:
// dx = rstd * (dy*w - xh * mean(dy*w*xh)), dw += sum over rows of dy*xh.
//
// x, y, dy, dx [N, C] or [N, h, C], any stride between the N rows; y may be x, dx may be dy.  y, rstd and dx are
// overwritten (dx is added to if `accumulate`), dw is added to.  Sums are in f32.
// Order: one warp a row, lane l takes 16-byte packs l, l + 32, ... as one chain, then the tree of warp_sum: a row's
// bits depend on C only.  dw: row r belongs to strand r % 16; strands are chains over rows ascending, added up in
// order and then to dw: the same bits in every run, but not for another split into micro-batches.
// Bytes: forward 2 passes over a row, of which the second hits the cache: 2 * act * N * C.  Backward 3 + 2 streams of
// N * C.  Limited by memory bandwidth; dw by latency where C is small (C / 32 blocks).
#include "common.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kWarps = 4;     // rows of a block
constexpr int kStrands = 16;  // of rows, in dw
constexpr int kColumns = 32;  // of dw that a block owns

// Where row r of a [N, h, C] tensor begins, for r = n * h + head.
template <class T>
struct Rows {
  T* data;
  int64_t stride;  // between values of n
  int heads, c;
  __device__ T* at(int64_t r) const { return data + r / heads * stride + r % heads * c; }
};

template <class T, bool kVector>
__global__ void __launch_bounds__(32 * kWarps)
    fwd(Rows<T> y, float* __restrict__ rstd, Rows<const T> x, const T* __restrict__ w, int64_t rows, float eps) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32, c = x.c;
  const T* xr = x.at(row);
  T* yr = y.at(row);
  float sum = 0;
  for (int i = lane * kPack<T>; i < c; i += 32 * kPack<T>) {
    const Pack<T> p = load_pack<kVector>(xr + i, c - i);
    for (int j = 0; j < kPack<T>; j++) sum = fmaf(to_float(p.v[j]), to_float(p.v[j]), sum);
  }
  const float r = 1.f / sqrtf(warp_sum(sum) / static_cast<float>(c) + eps);
  if (lane == 0) rstd[row] = r;
  for (int i = lane * kPack<T>; i < c; i += 32 * kPack<T>) {
    Pack<T> p = load_pack<kVector>(xr + i, c - i);
    const Pack<T> q = load_pack<kVector>(w + i, c - i);
    for (int j = 0; j < kPack<T>; j++) p.v[j] = from_float<T>(to_float(p.v[j]) * r * to_float(q.v[j]));
    store_pack<kVector>(yr + i, p, c - i);
  }
}

template <class T, bool kVector>
__global__ void __launch_bounds__(32 * kWarps)
    bwd_input(Rows<T> dx, Rows<const T> dy, Rows<const T> x, const T* __restrict__ w, const float* __restrict__ rstd,
              int64_t rows, bool accumulate) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32, c = x.c;
  const T *gr = dy.at(row), *xr = x.at(row);
  T* dr = dx.at(row);
  const float r = rstd[row];
  float dot = 0;
  for (int i = lane * kPack<T>; i < c; i += 32 * kPack<T>) {
    const Pack<T> g = load_pack<kVector>(gr + i, c - i), p = load_pack<kVector>(xr + i, c - i),
                  q = load_pack<kVector>(w + i, c - i);
    for (int j = 0; j < kPack<T>; j++) dot = fmaf(to_float(g.v[j]) * to_float(q.v[j]), to_float(p.v[j]) * r, dot);
  }
  const float mean = warp_sum(dot) / static_cast<float>(c);
  for (int i = lane * kPack<T>; i < c; i += 32 * kPack<T>) {
    Pack<T> g = load_pack<kVector>(gr + i, c - i);
    const Pack<T> p = load_pack<kVector>(xr + i, c - i), q = load_pack<kVector>(w + i, c - i);
    Pack<T> old{};
    if (accumulate) old = load_pack<kVector>(static_cast<const T*>(dr + i), c - i);
    for (int j = 0; j < kPack<T>; j++) {
      const float d = r * (to_float(g.v[j]) * to_float(q.v[j]) - to_float(p.v[j]) * r * mean);
      g.v[j] = from_float<T>(accumulate ? to_float(old.v[j]) + d : d);
    }
    store_pack<kVector>(dr + i, g, c - i);
  }
}

template <class T>
__global__ void __launch_bounds__(kColumns* kStrands)
    bwd_weight(float* __restrict__ dw, Rows<const T> dy, Rows<const T> x, const float* __restrict__ rstd,
               int64_t rows) {
  __shared__ float part[kStrands][kColumns];
  const int strand = threadIdx.y, c = blockIdx.x * kColumns + threadIdx.x;
  float sum = 0;
  if (c < x.c)
    for (int64_t row = strand; row < rows; row += kStrands)
      sum = fmaf(to_float(dy.at(row)[c]), to_float(x.at(row)[c]) * rstd[row], sum);
  part[strand][threadIdx.x] = sum;
  __syncthreads();
  if (strand != 0 || c >= x.c) return;
  for (int s = 1; s < kStrands; s++) sum += part[s][threadIdx.x];
  dw[c] += sum;
}

// The rows of t; checks that its heads are contiguous and that it has the shape of x.
template <class T, class U>
Rows<U> rows_of(const char* op, const char* field, const Tensor& t, const Tensor& x) {
  const bool same = t.rank == x.rank && t.shape == x.shape;
  expect(same && (t.rank == 2 || (t.rank == 3 && t.stride[1] == t.shape[2])) && t.stride[t.rank - 1] == 1, op, ": ",
         field, " ", t.str(), " must be [N, C] or [N, h, C] with contiguous heads, as x ", x.str());
  return {static_cast<U*>(t.as<T>()), t.stride[0], t.rank == 3 ? static_cast<int>(t.shape[1]) : 1,
          static_cast<int>(t.shape[t.rank - 1])};
}

int64_t count_rows(const char* op, const Tensor& x, const Tensor& w, const Tensor& rstd) {
  const int64_t c = x.shape[x.rank - 1], rows = x.size() / (c ? c : 1);
  expect(c > 0 && is_shape(w, {c}), op, ": w ", w.str(), " for x ", x.str());
  expect(is_shape(rstd, {rows}), op, ": rstd ", rstd.str(), " for x ", x.str());
  return rows;
}

}  // namespace

void rmsnorm_fwd(const RmsnormFwd& a, Stream stream) {
  const char* op = "rmsnorm_fwd";
  const int64_t rows = count_rows(op, a.x, a.w, a.rstd);
  if (rows == 0) return;
  with_act(op, a.x, [&](auto type) {
    using T = decltype(type);
    const auto y = rows_of<T, T>(op, "y", a.y, a.x);
    const auto x = rows_of<T, const T>(op, "x", a.x, a.x);
    const bool vector = aligned16(a.y, {y.stride, y.c}) && aligned16(a.x, {x.stride, x.c}) && aligned16(a.w, {});
    launch(op, vector ? fwd<T, true> : fwd<T, false>, {.grid = blocks(op, rows, kWarps), .block = 32 * kWarps}, stream,
           y, a.rstd.as<float>(), x, a.w.as<T>(), rows, a.eps);
  });
}

void rmsnorm_bwd(const RmsnormBwd& a, Stream stream) {
  const char* op = "rmsnorm_bwd";
  const int64_t rows = count_rows(op, a.x, a.w, a.rstd), c = a.w.shape[0];
  expect(is_shape(a.dw, {c}), op, ": dw ", a.dw.str(), " for x ", a.x.str());
  expect(!a.accumulate || a.dx.data != a.dy.data, op, ": dx is dy although it accumulates");
  if (rows == 0) return;
  with_act(op, a.x, [&](auto type) {
    using T = decltype(type);
    const auto dx = rows_of<T, T>(op, "dx", a.dx, a.x);
    const auto dy = rows_of<T, const T>(op, "dy", a.dy, a.x);
    const auto x = rows_of<T, const T>(op, "x", a.x, a.x);
    // First, because dx may overwrite dy.
    launch(op, bwd_weight<T>, {.grid = blocks(op, c, kColumns), .block = dim3(kColumns, kStrands)}, stream,
           a.dw.as<float>(), dy, x, a.rstd.as<float>(), rows);
    const bool vector = aligned16(a.dx, {dx.stride, c}) && aligned16(a.dy, {dy.stride, c}) &&
                        aligned16(a.x, {x.stride, c}) && aligned16(a.w, {});
    launch(op, vector ? bwd_input<T, true> : bwd_input<T, false>,
           {.grid = blocks(op, rows, kWarps), .block = 32 * kWarps}, stream, dx, dy, x, a.w.as<T>(), a.rstd.as<float>(),
           rows, a.accumulate);
  });
}

}  // namespace pare::PARE_CUDA
