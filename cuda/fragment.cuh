// Fragments of tensor-core instructions: the elements that a lane holds of the 16 rows of a warp.  mma_16816 defines
// the layout, and wgmma gives it to each of its four warps.
#pragma once
#include "ptx.cuh"

namespace pare::PARE_CUDA {

// One of the two rows of which a lane holds elements: its number in [0, 16), and its index in PerRow.
struct LaneRow {
  int i;  // 0 or 1
  __device__ __forceinline__ operator int() const { return threadIdx.x % 32 / 4 + 8 * i; }
};
// A value for each row of a lane, the same in the four lanes that share the row (a quad), or their part of it.
template <class T>
struct PerRow {
  T v[2];
  __device__ __forceinline__ T& operator[](LaneRow row) { return v[row.i]; }
};
template <class F>
__device__ __forceinline__ void for_rows(F f) {
#pragma unroll
  for (int i = 0; i < 2; i++) f(LaneRow{i});
}
// The first of the two neighbouring columns that a lane holds in tile n of eight columns.
__device__ __forceinline__ int lane_column(int n) { return n * 8 + threadIdx.x % 4 * 2; }

// Returns x by an address that the compiler cannot see through, so that x stays in memory, not in registers.
template <class T, int kN>
__device__ __forceinline__ T* in_memory(T (&x)[kN]) {
  T* p = x;
#ifndef CUEMU
  asm volatile("" : "+l"(p));
#endif
  return p;
}

__device__ __forceinline__ uint32_t pack2(float x, float y) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}

// Returns true in one lane of each quad.
__device__ __forceinline__ bool leads_quad() { return threadIdx.x % 4 == 0; }
// Return the sum and the maximum over a quad, in each of its lanes.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// Sums of products, in f32: 16 rows and kColumns columns.
template <int kColumns>
struct Accumulator {
  static constexpr int kTiles = kColumns / 8;
  float tile[kTiles][4];  // two columns of the lane's first row, the same of its second

  // Calls f(row, column, x) for each element of this lane, which f may change.
  template <class F>
  __device__ __forceinline__ void for_each(F f) {
    for_places([&](LaneRow row, int column, int n, int e) { f(row, column, tile[n][e]); });
  }
  // Calls f(row, column, x, y) for each element: y is the one of `other` at the same place.
  template <class F>
  __device__ __forceinline__ void for_each(const Accumulator& other, F f) {
    for_places([&](LaneRow row, int column, int n, int e) { f(row, column, tile[n][e], other.tile[n][e]); });
  }
  // Calls f(column, x) for the lane's elements of one row, columns ascending.
  template <class F>
  __device__ __forceinline__ void for_row(LaneRow row, F f) {
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) f(lane_column(n) + e, tile[n][row.i * 2 + e]);
  }
  // Calls f(row, column, pair) for each two neighbours: the elements at `column`, which is even, and the next.
  template <class F>
  __device__ __forceinline__ void for_pairs(F f) const {
#pragma unroll
    for (int n = 0; n < kTiles; n++)
      for_rows([&](LaneRow row) { f(row, lane_column(n), make_float2(tile[n][row.i * 2], tile[n][row.i * 2 + 1])); });
  }
  // Adds f(row, column) to each such pair.
  template <class F>
  __device__ __forceinline__ void add_pairs(F f) {
#pragma unroll
    for (int n = 0; n < kTiles; n++)
      for_rows([&](LaneRow row) {
        const float2 x = f(row, lane_column(n));
        tile[n][row.i * 2] += x.x;
        tile[n][row.i * 2 + 1] += x.y;
      });
  }

  __device__ __forceinline__ void scale(LaneRow row, float factor) {
    for_row(row, [&](int, float& x) { x *= factor; });
  }
  __device__ __forceinline__ void operator+=(const Accumulator& other) {
    for_each(other, [](LaneRow, int, float& x, float y) { x += y; });
  }
  // Adds the product a b to columns column + [0, 16).
  __device__ __forceinline__ void add_product(int column, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    mma_16816(tile[column / 8], a, b[0], b[1]);
    mma_16816(tile[column / 8 + 1], a, b[2], b[3]);
  }
  // Rounds columns column + [0, 16) to bf16, as a of mma_16816: sums and factors lie the same way.
  __device__ __forceinline__ void round(uint32_t (&a)[4], int column) const {
    for (int i = 0; i < 4; i++) {
      const float* pair = &tile[column / 8 + i / 2][i % 2 * 2];
      a[i] = pack2(pair[0], pair[1]);
    }
  }
  __device__ __forceinline__ void round(uint32_t (&a)[kColumns / 16][4]) const {
#pragma unroll
    for (int i = 0; i < kColumns / 16; i++) round(a[i], i * 16);
  }
  // Returns half i of the columns: kColumns / 2 of them, from i kColumns / 2 on.
  __device__ __forceinline__ Accumulator<kColumns / 2>& half(int i) {
    return reinterpret_cast<Accumulator<kColumns / 2>&>(tile[i * (kTiles / 2)]);
  }
  // Returns the elements as wgmma takes them.
  __device__ __forceinline__ float (&registers())[kTiles * 4] { return reinterpret_cast<float(&)[kTiles * 4]>(tile); }

 private:
  template <class F>
  static __device__ __forceinline__ void for_places(F f) {
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) f(LaneRow{e / 2}, lane_column(n) + e % 2, n, e);
  }
};

// Factors of 16 x 16 products, from shared memory, where eight neighbours in k, or in m or n, lie together.
enum class Major { k, mn };
// Loads a of mma_16816.  at(row, k) is the address of an element.
template <Major kMajor, class At>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], At at PTX_LOC) {
  const int lane = threadIdx.x % 32;
  if constexpr (kMajor == Major::k)
    ldmatrix_x4<false>(a, at(lane % 16, lane / 16 * 8) PTX_SAME_LOC);
  else
    ldmatrix_x4<true>(a, at(lane / 8 % 2 * 8, lane / 16 * 8 + lane % 8) PTX_SAME_LOC);
}
// Makes a of mma_16816 from elsewhere: pair(row, k) holds the elements at k, which is even, and k + 1.
template <class F>
__device__ __forceinline__ void make_a(uint32_t (&a)[4], F pair) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = pair(LaneRow{i % 2}, lane_column(i / 2));
}
// Loads b of two mma_16816, for columns [0, 8) and [8, 16).  at(column, k) is the address of an element.
template <Major kMajor, class At>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], At at PTX_LOC) {
  const int lane = threadIdx.x % 32;
  if constexpr (kMajor == Major::k)
    ldmatrix_x4<false>(b, at(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8) PTX_SAME_LOC);
  else
    ldmatrix_x4<true>(b, at(lane / 16 * 8, lane % 16) PTX_SAME_LOC);
}

// Rows of kD bf16 in shared memory.  16-byte chunks are permuted within a row, so that the eight rows that an ldmatrix
// reads at once fall into different banks.
template <int kD>
struct SharedTile {
  bf16* p;
  __device__ bf16* at(unsigned row, unsigned col) const { return p + (row * kD + ((col / 8) ^ (row % 8)) * 8); }
  // Loads factors of products over columns: rows row + [0, 16), columns k + [0, 16).
  __device__ __forceinline__ void operand_a(uint32_t (&a)[4], int row, int k) const {
    load_a<Major::k>(a, [&](int i, int j) { return at(row + i, k + j); });
  }
  __device__ __forceinline__ void operand_b(uint32_t (&b)[4], int row, int k) const {
    load_b<Major::k>(b, [&](int i, int j) { return at(row + i, k + j); });
  }
};
// The same for products over rows.
template <int kD>
struct AcrossTile {
  SharedTile<kD> tile;
  __device__ __forceinline__ void operand_b(uint32_t (&b)[4], int column, int k) const {
    load_b<Major::mn>(b, [&](int i, int j) { return tile.at(k + j, column + i); });
  }
};

}  // namespace pare::PARE_CUDA
