// Products of attention on tensor cores: rows of bf16 in shared memory, 16 rows of results a warp, f32 accumulators.
//
// A product's k-steps are 16 long and ascend; a term that is 0 leaves a sum as it is, so hidden pairs change no bit.
// Attention forward, packed and paged (Rows16): q k^T over channels, those beyond D zero; times scale; online
// softmax over blocks of 64 slots ascending, in f32, in which each of a row's four lanes adds up its own columns over
// all blocks and the four are added at the end; weights rounded to bf16, times V.  So a row's bits depend on the slots
// that it sees, not on where in a tile it lies, nor on other rows.
#pragma once
#include "attention.cuh"
#include "fragment.cuh"

namespace pare::PARE_CUDA {

// Fills kRows rows of dst with `rows` rows of d columns, row(i) giving the address of row i, and zeros; called by
// kCount threads from a multiple of kCount.  vector: rows are 16-byte aligned and d is a multiple of 8.
template <int kRows, int kCount = kThreads, int kD, class Row>
__device__ __forceinline__ void load_tile(SharedTile<kD> dst, const bf16* any, int rows, int head_dim, bool vector,
                                          Row row, int thread = threadIdx.x) {
  for (int i = thread; i < kRows * kD / 8; i += kCount) {
    const int r = i / (kD / 8), c = i % (kD / 8) * 8, valid = r < rows ? max(0, min(8, head_dim - c)) : 0;
    const bf16* src = valid ? row(r) + c : any;
    if (vector)
      cp_async_16(dst.at(r, c), src, valid * 2);
    else
      for (int e = 0; e < 8; e++) dst.at(r, c)[e] = e < valid ? src[e] : from_float<bf16>(0);
  }
}

// sum[i][j] += a[row + i] . b[j] for 16 rows of a and kN rows of b, a SharedTile or an AcrossTile.
template <int kN, int kD, class B>
__device__ __forceinline__ void add_dots(Accumulator<kN>& sum, SharedTile<kD> a, int row, B b) {
#pragma unroll 4  // all of D = 128 at once spills registers in the backward kernels
  for (int k = 0; k < kD; k += 16) {
    uint32_t x[4];
    a.operand_a(x, row, k);
#pragma unroll
    for (int n = 0; n < kN; n += 16) {
      uint32_t y[4];
      b.operand_b(y, n, k);
      sum.add_product(n, x, y);
    }
  }
}

// sum[i][c] += sum over k of w[i][k] b[k][column + c] for 16 rows of weights, which are rounded to bf16.
template <int kN, int kC, int kD>
__device__ __forceinline__ void add_weighted(Accumulator<kC>& sum, const Accumulator<kN>& w, SharedTile<kD> b,
                                             int column = 0) {
#pragma unroll
  for (int k = 0; k < kN; k += 16) {
    uint32_t x[4];
    w.round(x, k);
#pragma unroll
    for (int c = 0; c < kC; c += 16) {
      uint32_t y[4];
      AcrossTile<kD>{b}.operand_b(y, column + c, k);
      sum.add_product(c, x, y);
    }
  }
}

// Hides from a row the slots from `visible` on; the greatest q.k of the others.  s: q.k of the slots from `begin` on.
template <int kN>
__device__ __forceinline__ float mask_row(Accumulator<kN>& s, LaneRow row, int begin, int visible) {
  float m = -INFINITY;
  s.for_row(row, [&](int column, float& x) {
    if (begin + column >= visible) x = -INFINITY;
    m = fmaxf(m, x);
  });
  return quad_max(m);
}

// The online softmax of a warp's 16 query rows.
template <int kD>
struct Rows16 {
  Accumulator<kD> acc = {};
  PerRow<float> top = {-INFINITY, -INFINITY}, sum = {};

  // Adds a block of slots; q holds the rows of the warp from `row` on.  Row i of the 16 sees the first visible_of(i)
  // slots of the block (possibly less than 1).
  template <class Keys, class Visible>
  __device__ __forceinline__ void add_block(SharedTile<kD> q, int row, Keys k, SharedTile<kD> v, const Softmax& softmax,
                                            Visible visible_of) {
    Accumulator<kSlots> s = {};
    add_dots(s, q, row, k);
    for_rows([&](LaneRow r) { acc.scale(r, weigh(r, s, softmax, visible_of(r))); });
    add_weighted(acc, s, v);
  }

  // Of a row, which sees `visible` slots: q.k to weights.  What acc has to be scaled by before they are added.
  __device__ __forceinline__ float weigh(LaneRow row, Accumulator<kSlots>& s, const Softmax& softmax, int visible) {
    const float m = fmaxf(top[row], softmax.score(mask_row(s, row, 0, visible)));
    const float fix = exp2_f32(top[row] - m);
    top[row] = m;
    float part = 0;
    s.for_row(row, [&](int, float& x) { part += x = softmax.weight(x, m); });
    sum[row] = sum[row] * fix + part;
    return fix;
  }

  // The results of the first `rows` rows to where place(row, lse) says.
  template <class Place>
  __device__ __forceinline__ void write(int rows, Place place, int head_dim) {
    for_rows([&](LaneRow row) {
      const float total = quad_sum(sum[row]);
      if (row >= rows) return;
      bf16* o = place(row, fmaf(log_f32(total), kLog2E, top[row]));
      acc.for_row(row, [&](int c, float x) {
        if (c < head_dim) o[c] = from_float<bf16>(x / total);
      });
    });
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
  Accumulator<kColumns> acc = {};
  PerRow<float> top = {-INFINITY, -INFINITY};
  float sum = 0;  // lanes below 16: of row 4 * warp + lane / 4, what its lane % 4 adds up

  __device__ explicit SharedRows16(Memory& m) : shared(m) {}

  // The keys of a warp.
  template <class B>
  struct Mine {
    B b;
    __device__ __forceinline__ void operand_b(uint32_t (&x)[4], int n, int k) const {
      b.operand_b(x, static_cast<int>(threadIdx.x) / 32 * 16 + n, k);
    }
  };

  // Called by all warps; the arguments are those of Rows16::add_block.
  template <class Keys, class Visible>
  __device__ __forceinline__ void add_block(SharedTile<kD> q, Keys k, SharedTile<kD> v, const Softmax& softmax,
                                            Visible visible_of) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, begin = warp * 16;
    Accumulator<16> s = {};
    add_dots(s, q, 0, Mine<Keys>{k});
    for_rows([&](LaneRow row) {
      const float m = mask_row(s, row, begin, visible_of(row));
      if (leads_quad()) shared.top[warp][row] = m;
    });
    __syncthreads();
    PerRow<float> fix;
    for_rows([&](LaneRow row) {
      float m = -INFINITY;
      for (int w = 0; w < kWarps; w++) m = fmaxf(m, shared.top[w][row]);
      m = fmaxf(top[row], softmax.score(m));
      fix[row] = exp2_f32(top[row] - m);
      top[row] = m;
    });
    s.for_pairs([&](LaneRow row, int column, float2 x) {
      *reinterpret_cast<float2*>(&shared.weights[row][begin + column]) =
          make_float2(softmax.weight(x.x, top[row]), softmax.weight(x.y, top[row]));
    });
    __syncthreads();
    const float mine = __shfl_sync(kAllLanes, warp < 2 ? fix.v[0] : fix.v[1], (warp % 2 * 4 + lane / 4) % 8 * 4);
    if (lane < 16) {
      float part = 0;
#pragma unroll
      for (int n = 0; n < kSlots / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) part += shared.weights[warp * 4 + lane / 4][lane_column(n) + e];
      sum = sum * mine + part;
    }
    for_rows([&](LaneRow row) { acc.scale(row, fix[row]); });
#pragma unroll
    for (int k = 0; k < kSlots; k += 16) {
      uint32_t x[4];
      make_a(x, [&](int row, int slot) {
        const float2 w = *reinterpret_cast<const float2*>(&shared.weights[row][k + slot]);
        return pack2(w.x, w.y);
      });
#pragma unroll
      for (int c = 0; c < kColumns; c += 16) {
        uint32_t y[4];
        AcrossTile<kD>{v}.operand_b(y, warp * kColumns + c, k);
        acc.add_product(c, x, y);
      }
    }
  }

  // The results of the first `rows` rows to where place(row) says.
  template <class Place>
  __device__ __forceinline__ void write(int rows, Place place, int head_dim) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float total = quad_sum(sum);
    if (lane < 16 && leads_quad()) shared.top[0][warp * 4 + lane / 4] = total;
    __syncthreads();
    for_rows([&](LaneRow row) {
      if (row >= rows) return;
      bf16* const o = place(row);
      acc.for_row(row, [&](int column, float x) {
        const int c = warp * kColumns + column;
        if (c < head_dim) o[c] = from_float<bf16>(x / shared.top[0][row]);
      });
    });
  }
};

}  // namespace pare::PARE_CUDA
