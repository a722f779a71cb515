// Rotary position embedding, rotate-half, in place: (a, b) = (x[c], x[c + D/2]) -> (a cos - b sin, b cos + a sin), each
// product rounded, then the sum.  Backward is the rotation by the negative angle.
//
// x [N, h, D], rows may be strided; table [positions, D]: cos, then sin, D/2 each.  Every element stands alone: its
// bits depend on nothing else.  Bytes: x read and written, and D * 4 a row of the table.  Limited by memory bandwidth.
#include "common.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kThreads = 128;

// A thread rotates one pack of pairs; blockIdx.x is the row.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) rotate(T* __restrict__ x, int64_t stride, const float* __restrict__ table,
                                                   const int32_t* __restrict__ pos, int heads, int half, float sign) {
  const int packs = (half + kPack<T> - 1) / kPack<T>, i = blockIdx.y * kThreads + threadIdx.x;
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

void rope(const char* op, const Tensor& x, const Tensor& table, const Tensor& pos, float sign, Stream stream) {
  expect(x.rank == 3 && x.shape[2] % 2 == 0 && x.shape[2] > 0 && x.stride[1] == x.shape[2] && x.stride[2] == 1, op,
         ": x ", x.str(), " must be [N, h, D] with even D and contiguous heads");
  const int64_t n = x.shape[0], half = x.shape[2] / 2;
  expect(table.rank == 2 && table.shape[1] == x.shape[2] && table.contiguous(), op, ": table ", table.str(), " for x ",
         x.str());
  expect(is_shape(pos, {n}), op, ": pos ", pos.str(), " for x ", x.str());
  if (x.size() == 0) return;
  with_act(op, x, [&](auto type) {
    using T = decltype(type);
    const bool vector = aligned16(x, {x.stride[0], half});
    const int64_t packs = x.shape[1] * ((half + kPack<T> - 1) / kPack<T>);
    launch(op, vector ? rotate<T, true> : rotate<T, false>,
           {.grid = dim3(blocks(op, n, 1), blocks(op, packs, kThreads)), .block = kThreads}, stream, x.as<T>(),
           x.stride[0], table.as<float>(), pos.as<int32_t>(), x.shape[1], half, sign);
  });
}

}  // namespace

void rope_fwd(const RopeFwd& a, Stream stream) { rope("rope_fwd", a.x, a.table, a.pos, 1, stream); }
void rope_bwd(const RopeBwd& a, Stream stream) { rope("rope_bwd", a.dx, a.table, a.pos, -1, stream); }

}  // namespace pare::PARE_CUDA
