// Products of attention on tensor cores: rows of bf16 in shared memory, 16 rows of results a warp, f32 accumulators.
//
// A product's k-steps are 16 long and ascend; a term that is 0 leaves a sum as it is, so hidden pairs change no bit.
// Attention forward, packed and paged (Rows16): q k^T over channels, those beyond D zero; times scale, plus a bias;
// online softmax over blocks of 64 slots ascending, in f32, in which each of a row's four lanes adds up its own columns
// over all blocks and the four are added at the end; weights rounded to bf16, times V.  So a row's bits depend on the
// slots that it sees, not on where in a tile it lies, nor on other rows.
#pragma once
#include "attention.cuh"
#include "ptx.cuh"

namespace pare::PARE_CUDA {

// Rows of kD bf16 in shared memory.  16-byte chunks are permuted within a row, so that the eight rows that an ldmatrix
// reads at once fall into different banks.
template <int kD>
struct SharedTile {
  bf16* p;
  __device__ bf16* at(int row, int col) const { return p + row * kD + ((col / 8) ^ (row % 8)) * 8; }
  // b of mma_16816 for columns c + [0, 16) of rows n + [0, 16).
  __device__ __forceinline__ void operand(uint32_t (&b)[4], int c, int n) const {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4<false>(b, at(n + lane / 16 * 8 + lane % 8, c + lane / 8 % 2 * 8));
  }
};
// The same rows lying across: [kD][kSlots].
struct AcrossTile {
  SharedTile<kSlots> tile;
  __device__ __forceinline__ void operand(uint32_t (&b)[4], int c, int n) const {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4<true>(b, tile.at(c + lane % 16, n + lane / 16 * 8));
  }
};

// Fills kRows rows of dst with `rows` rows of d columns, row(i) giving the address of row i, and zeros; called by
// kCount threads from a multiple of kCount.  vector: rows are 16-byte aligned and d is a multiple of 8.
template <int kRows, int kCount = kThreads, int kD, class Row>
__device__ __forceinline__ void load_tile(SharedTile<kD> dst, const bf16* any, int rows, int d, bool vector, Row row,
                                          int thread = threadIdx.x) {
  for (int i = thread; i < kRows * kD / 8; i += kCount) {
    const int r = i / (kD / 8), c = i % (kD / 8) * 8, valid = r < rows ? max(0, min(8, d - c)) : 0;
    const bf16* src = valid ? row(r) + c : any;
    if (vector)
      cp_async_16(dst.at(r, c), src, valid * 2);
    else
      for (int e = 0; e < 8; e++) dst.at(r, c)[e] = e < valid ? src[e] : from_float<bf16>(0);
  }
}

__device__ __forceinline__ uint32_t pack2(float x, float y) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}

// Accumulator fragments of 16 rows: lane l holds rows l / 4 (elements 0, 1) and l / 4 + 8 (elements 2, 3), in tile n of
// 8 columns the columns 8 n + 2 (l % 4) and the next.

// sum[i][j] += a[row + i] . b[j] for 16 rows of a and kN rows of b, a SharedTile or an AcrossTile.
template <int kN, int kD, class B>
__device__ __forceinline__ void add_dots(float (&sum)[kN / 8][4], SharedTile<kD> a, int row, B b) {
  const int lane = threadIdx.x % 32;
#pragma unroll 4  // all of D = 128 at once spills registers in the backward kernels
  for (int c = 0; c < kD; c += 16) {
    uint32_t x[4];
    ldmatrix_x4<false>(x, a.at(row + lane % 16, c + lane / 16 * 8));
#pragma unroll
    for (int n = 0; n < kN; n += 16) {
      uint32_t y[4];
      b.operand(y, c, n);
      mma_16816(sum[n / 8], x, y[0], y[1]);
      mma_16816(sum[n / 8 + 1], x, y[2], y[3]);
    }
  }
}

// 16 weights of a row each, w and the next tile of 8, rounded to bf16: an accumulator fragment is the operand fragment
// that the product with the values needs.
__device__ __forceinline__ void pack_weights(uint32_t (&x)[4], const float (*w)[4]) {
  for (int i = 0; i < 4; i++) x[i] = pack2(w[i / 2][i % 2 * 2], w[i / 2][i % 2 * 2 + 1]);
}

// sum[i][c] += sum over n of w[i][n] b[n][column + c] for 16 rows of weights.
template <int kN, int kC, int kD>
__device__ __forceinline__ void add_weighted(float (&sum)[kC / 8][4], const float (&w)[kN / 8][4], SharedTile<kD> b,
                                             int column = 0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kN; n += 16) {
    uint32_t x[4];
    pack_weights(x, &w[n / 8]);
#pragma unroll
    for (int c = 0; c < kC; c += 16) {
      uint32_t y[4];
      ldmatrix_x4<true>(y, b.at(n + lane % 16, column + c + lane / 16 * 8));
      mma_16816(sum[c / 8], x, y[0], y[1]);
      mma_16816(sum[c / 8 + 1], x, y[2], y[3]);
    }
  }
}

// The online softmax of a warp's 16 query rows.
template <int kD>
struct Rows16 {
  float acc[kD / 8][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};

  // Adds a block of slots; q holds the rows of the warp from `row` on.  Row i of the 16 sees the first visible_of(i)
  // slots of the block (possibly less than 1).
  template <class Keys, class Visible, class Bias>
  __device__ __forceinline__ void add_block(SharedTile<kD> q, int row, Keys k, SharedTile<kD> v,
                                            const Softmax<Bias>& softmax, Visible visible_of) {
    float s[kSlots / 8][4] = {};
    add_dots<kSlots>(s, q, row, k);
#pragma unroll
    for (int i = 0; i < 2; i++) rescale(i, weigh(i, s, softmax, visible_of));
    add_weighted<kSlots, kD>(acc, s, v);
  }

  // Of each lane's row i (0 or 1): q.k to weights.  What acc has to be scaled by before they are added.
  template <class Visible, class Bias>
  __device__ __forceinline__ float weigh(int i, float (&s)[kSlots / 8][4], const Softmax<Bias>& softmax,
                                         Visible visible_of) {
    const int lane = threadIdx.x % 32, visible = visible_of(lane / 4 + 8 * i);
    float m = -INFINITY;
#pragma unroll
    for (int n = 0; n < kSlots / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = s[n][i * 2 + e];
        const int slot = n * 8 + lane % 4 * 2 + e;
        if (slot >= visible) x = -INFINITY;
        m = fmaxf(m, softmax.rank(slot, x));
      }
    m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
    m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
    m = fmaxf(top[i], softmax.score(m));
    const float fix = exp2_f32(top[i] - m);
    top[i] = m;
    float part = 0;
#pragma unroll
    for (int n = 0; n < kSlots / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = s[n][i * 2 + e];
        part += x = softmax.weight(n * 8 + lane % 4 * 2 + e, x, m);
      }
    sum[i] = sum[i] * fix + part;
    return fix;
  }
  __device__ __forceinline__ void rescale(int i, float fix) {
#pragma unroll
    for (int n = 0; n < kD / 8; n++) acc[n][i * 2] *= fix, acc[n][i * 2 + 1] *= fix;
  }

  // The results of the first `rows` rows to where place(row, lse) says.
  template <class Place>
  __device__ __forceinline__ void write(int rows, Place place, int d) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float total = sum[i];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      const int row = lane / 4 + 8 * i;
      if (row >= rows) continue;
      bf16* o = place(row, fmaf(log_f32(total), kLog2E, top[i]));
#pragma unroll
      for (int n = 0; n < kD / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int c = n * 8 + lane % 4 * 2 + e;
          if (c < d) o[c] = from_float<bf16>(acc[n][i * 2 + e] / total);
        }
    }
  }
};

// The same for 16 rows that four warps share, as in decoding: of a block each warp takes 16 slots of the scores and
// weights and a fourth of the channels of the values.  The same sums in the same order, so the same bits.
template <int kD>
struct SharedRows16 {
  static constexpr int kStride = kSlots + 8;  // of weights: no bank conflicts
  struct Memory {
    float weights[16][kStride], top[kWarps][16];
  };
  static constexpr int kColumns = kD / kWarps;
  Memory& shared;
  float acc[kColumns / 8][4] = {};
  float top[2] = {-INFINITY, -INFINITY};
  float sum = 0;  // lanes below 16: of row 4 * warp + lane / 4, what its lane % 4 adds up

  __device__ explicit SharedRows16(Memory& m) : shared(m) {}

  // The keys of a warp.
  template <class B>
  struct Mine {
    B b;
    __device__ __forceinline__ void operand(uint32_t (&x)[4], int c, int n) const {
      b.operand(x, c, static_cast<int>(threadIdx.x) / 32 * 16 + n);
    }
  };

  // Called by all warps; the arguments are those of Rows16::add_block.
  template <class Keys, class Visible, class Bias>
  __device__ __forceinline__ void add_block(SharedTile<kD> q, Keys k, SharedTile<kD> v, const Softmax<Bias>& softmax,
                                            Visible visible_of) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = lane % 4 * 2;
    float s[2][4] = {};
    add_dots<16>(s, q, 0, Mine<Keys>{k});
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = lane / 4 + 8 * i, visible = visible_of(row);
      float m = -INFINITY;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = s[n][i * 2 + e];
          const int slot = warp * 16 + n * 8 + pair + e;
          if (slot >= visible) x = -INFINITY;
          m = fmaxf(m, softmax.rank(slot, x));
        }
      m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
      m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
      if (pair == 0) shared.top[warp][row] = m;
    }
    __syncthreads();
    float fix[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = lane / 4 + 8 * i;
      float m = -INFINITY;
      for (int w = 0; w < kWarps; w++) m = fmaxf(m, shared.top[w][row]);
      m = fmaxf(top[i], softmax.score(m));
      fix[i] = exp2_f32(top[i] - m);
      top[i] = m;
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int slot = warp * 16 + n * 8 + pair;
        *reinterpret_cast<float2*>(&shared.weights[row][slot]) =
            make_float2(softmax.weight(slot, s[n][i * 2], m), softmax.weight(slot + 1, s[n][i * 2 + 1], m));
      }
    }
    __syncthreads();
    const float mine = __shfl_sync(kAllLanes, warp < 2 ? fix[0] : fix[1], (warp % 2 * 4 + lane / 4) % 8 * 4);
    if (lane < 16) {
      float part = 0;
#pragma unroll
      for (int n = 0; n < kSlots / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) part += shared.weights[warp * 4 + lane / 4][n * 8 + pair + e];
      sum = sum * mine + part;
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[n][e] *= fix[e / 2];
#pragma unroll
    for (int n = 0; n < kSlots; n += 16) {
      const auto weights = [&](int row, int column) {
        const float2 w = *reinterpret_cast<const float2*>(&shared.weights[row][n + column + pair]);
        return pack2(w.x, w.y);
      };
      const uint32_t x[4] = {weights(lane / 4, 0), weights(lane / 4 + 8, 0), weights(lane / 4, 8),
                             weights(lane / 4 + 8, 8)};
#pragma unroll
      for (int c = 0; c < kColumns; c += 16) {
        uint32_t y[4];
        ldmatrix_x4<true>(y, v.at(n + lane % 16, warp * kColumns + c + lane / 16 * 8));
        mma_16816(acc[c / 8], x, y[0], y[1]);
        mma_16816(acc[c / 8 + 1], x, y[2], y[3]);
      }
    }
  }

  // The results of the first `rows` rows to where place(row) says.
  template <class Place>
  __device__ __forceinline__ void write(int rows, Place place, int d) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float total = sum;
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    if (lane < 16 && lane % 4 == 0) shared.top[0][warp * 4 + lane / 4] = total;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = lane / 4 + 8 * i;
      if (row >= rows) continue;
      bf16* const o = place(row);
#pragma unroll
      for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int c = warp * kColumns + n * 8 + lane % 4 * 2 + e;
          if (c < d) o[c] = from_float<bf16>(acc[n][i * 2 + e] / shared.top[0][row]);
        }
    }
  }
};

}  // namespace pare::PARE_CUDA
