// Epilogues of the products in linear_wgmma.cuh.  A warp rounds its results, with a residual or as SwiGLU, and stores
// them by tensor copies, or adds them to memory; sums up logits; or rotates heads and writes them into the cache.
//
// total[m] holds the results of 16 rows from row + 64 m on, and of the columns from `column` on.  Each result is
// written once: by tensor copies in boxes of 16 rows, of rotated heads from registers.  A tile of kVocabTile logits
// leaves 12 bytes a row beside them.
#pragma once
#include "linear_mma.cuh"
#include "ptx90.cuh"
#include "rope.cuh"
#include "vocab.cuh"

namespace pare::PARE_CUDA {

// The boxes by which a warp's results leave.  Where they are added to a residual, its boxes come by tensor copies to
// where those of the results will be: the first as the tile begins, each other as soon as its place is free.
template <class Block>
class Boxes {
  static constexpr int kAcross = Block::kStored / Block::kBox, kBuffers = Block::kBuffers;
  typename Block::Shared& shared_;
  const CUtensorMap& residual_;
  unsigned tiles_ = 0;  // that have been added to residuals

  __device__ auto* box(int i) const { return shared_.boxes[threadIdx.x / 32][i % kBuffers]; }
  __device__ Mbarrier* full(int i) const { return &shared_.residual[threadIdx.x / 32][i % kBuffers]; }
  __device__ void bring(int i, int row, int column) const {
    mbarrier_arrive_expect(full(i), Block::kBoxBytes);
    tensor_copy(box(i), residual_, column + i % kAcross * Block::kBox, row + i / kAcross * 64, full(i));
  }

 public:
  __device__ Boxes(typename Block::Shared& shared, const CUtensorMap& residual)
      : shared_(shared), residual_(residual) {}
  // Brings the first boxes of the residual of a tile, whose results for_each is to add to it.
  __device__ void begin(int row, int column) const {
    if (threadIdx.x % 32 != 0) return;
    store_wait_read<0>();  // of the tile before
    for (int i = 0; i < kBuffers; i++) bring(i, row, column);
  }
  // Calls fill(box, m, n) for each box, of 16 rows from m 64 on and of kBox columns from n on, and send(x, y, box) when
  // it is full: x and y are where it begins, as that of m = n = 0 begins at `column` and `row`.
  template <class Fill, class Send>
  __device__ __forceinline__ void for_each(int row, int column, bool has_residual, Fill fill, Send send) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Block::kBoxes; i++) {
      const int next = i - 1 + kBuffers;  // its place is that of the box before
      if (lane == 0 && has_residual && i > 0 && next < Block::kBoxes) {
        store_wait_read<0>();
        bring(next, row, column);
      }
      if (lane == 0 && !has_residual) {
        if (i == 0)  // the boxes of the tile before have long been read
          store_wait_read<0>();
        else if (i >= kBuffers)
          store_wait_read<kBuffers - 1>();
      }
      if (has_residual) {
        const int uses = ceil_div(Block::kBoxes - i % kBuffers, kBuffers);  // of the mbarrier, by a tile
        mbarrier_wait(full(i), (uses * tiles_ + i / kBuffers) % 2);
      }
      __syncwarp();
      const int m = i / kAcross, n = i % kAcross * Block::kBox;
      fill(box(i), m, n);
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        send(column + n, row + m * 64, box(i));
        store_commit();
      }
    }
    if (has_residual) tiles_++;
  }
};

// Returns SwiGLU of two neighbours, with the roundings of the separate ops.
__device__ __forceinline__ __nv_bfloat162 gated(float2 gate, float2 up) {
  const auto rounded = [](float x) { return to_float(from_float<bf16>(x)); };
  return __floats2bfloat162_rn(swiglu(rounded(gate.x), rounded(up.x)), swiglu(rounded(gate.y), rounded(up.y)));
}

// Rounds the results of a warp and stores them by boxes: total[m] has those of 16 rows from row + m 64 on, and columns
// from `column` on; of gates and ups it has both halves, and `column` is that of y.  The last two are constants, for
// each of which this is compiled.
template <class Block, class Product, int kDown, int kColumns>
__device__ __forceinline__ void store_tile(const Product& p, const CUtensorMap& map,
                                           const Accumulator<kColumns> (&total)[kDown], Boxes<Block>& boxes, int row,
                                           int column, bool has_bias, bool has_residual) {
  constexpr int kBox = Block::kBox;
  const auto fill = [&](bf16* box, int m, int n) {
#pragma unroll
    for (int first = 0; first < kBox; first += 16) {
      const int lane = threadIdx.x % 32, r = lane % 16, chunk = first / 8 + lane / 16;
      bf16* const at = box + r * kBox + (kBox == 64 ? chunk ^ r % 8 : chunk) * 8;
      uint32_t before[4] = {}, after[4];
      if (has_residual) ldmatrix_x4<false>(before, at);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int tile = (n + first) / 8 + j / 2;
        const float* const x = &total[m].tile[tile][j % 2 * 2];
        __nv_bfloat162 y, added_to;
        memcpy(&added_to, &before[j], 4);
        if constexpr (Block::kGated) {
          const float* const up = &total[m].tile[tile + kColumns / 16][j % 2 * 2];
          y = gated(make_float2(x[0], x[1]), make_float2(up[0], up[1]));
        } else {
          y = p.rounded_pair(has_bias, has_residual, column + lane_column(tile), make_float2(x[0], x[1]), added_to);
        }
        memcpy(&after[j], &y, 4);
      }
      stmatrix_x4(at, after);
    }
  };
  boxes.for_each(row, column, has_residual, fill, [&](int x, int y, const bf16* box) { tensor_store(map, x, y, box); });
}

// Adds the results of a warp to memory by boxes of f32; total, row and column as above.
template <class Block, int kDown, int kColumns>
__device__ __forceinline__ void add_tile(const CUtensorMap& map, const Accumulator<kColumns> (&total)[kDown],
                                         Boxes<Block>& boxes, int row, int column) {
  static_assert(Block::kBox == 32);  // rows of 128 bytes
  const auto fill = [&](float* box, int m, int n) {
#pragma unroll
    for (int tile = 0; tile < Block::kBox / 8; tile++)
      for_rows([&](LaneRow r) {
        const int c = lane_column(tile);
        const float* const x = &total[m].tile[n / 8 + tile][r.i * 2];
        *reinterpret_cast<float2*>(box + r * Block::kBox + (c / 4 ^ r % 8) * 4 + c % 4) = make_float2(x[0], x[1]);
      });
  };
  boxes.for_each(row, column, false, fill, [&](int x, int y, const float* box) { tensor_add(map, x, y, box); });
}

// Sums up the tiles of the vocabulary in the results of a warp, those of store_tile, which become z; `column` is a
// multiple of kVocabTile.  A lane has a quarter of the 16 lanes of a row sum: of every 16 ids two neighbours, and the
// two that are 8 further on.
template <class Product, int kDown, int kColumns>
__device__ __forceinline__ void sum_tiles(const Product& p, Accumulator<kColumns> (&total)[kDown], int row,
                                          int column) {
  static_assert(kColumns % kVocabTile == 0);
  const int numbers = 3 * (ceil_div(p.columns, kVocabTile) + 1);  // of a row
#pragma unroll
  for (int m = 0; m < kDown; m++) {
    total[m].for_each([](int, int, float& x) { x = to_float(from_float<bf16>(x)); });
    if (p.temperature != 1) total[m].for_each([&](int, int, float& x) { x /= p.temperature; });
    if (column + kColumns > p.columns)
      total[m].for_each([&](int, int c, float& x) { x = column + c < p.columns ? x : -INFINITY; });
    for_rows([&](LaneRow r) {
      const int first_row = row + m * 64 + r;
      const bool exists = first_row < p.rows;
      float* const to = p.tiles + int64_t{first_row} * numbers;
      if (exists && p.target) {
        const int at = p.target[first_row] - column;
        if (0 <= at && at < kColumns)
          total[m].for_row(r, [&](int c, float z) {
            if (c == at) to[numbers - 3] = z;
          });
      }
#pragma unroll
      for (int v = 0; v < kColumns / kVocabTile; v++) {
        if (column + v * kVocabTile >= p.columns) break;
        const auto z = [&](int step, int lane) {  // ids of the tile: 16 step + 8 (lane / 2) + those of lane_column
          return total[m].tile[v * kVocabTile / 8 + 2 * step + lane / 2][r.i * 2 + lane % 2];
        };
        float top = -INFINITY, sum[4] = {}, weighted[4] = {};
#pragma unroll
        for (int i = 0; i < kVocabTile / 4; i++) top = fmaxf(top, z(i / 4, i % 4));
        top = quad_max(top);
        const float base = base_of_tile(top);
#pragma unroll
        for (int i = 0; i < kVocabTile / 4; i++) add_to_tile(sum[i % 4], weighted[i % 4], z(i / 4, i % 4) - base);
        const float s = tree_of_quad(sum), w = tree_of_quad(weighted);
        if (exists && leads_quad()) {
          float* const numbers_of_tile = to + 3 * (column / kVocabTile + v);
          numbers_of_tile[0] = top;
          numbers_of_tile[1] = s;
          numbers_of_tile[2] = w;
        }
      }
    });
  }
}

// Rounds, rotates and stores a warp's halves of heads, those of 16 rows from `row` on and of the pairs from `pair` on,
// which lie in one head, and writes keys and values to where `slots` says.
template <class Product, int kColumns>
__device__ __forceinline__ void rotate_tile(const Product& p, Accumulator<kColumns>& total, NewSlots& slots, int row,
                                            int pair) {
  constexpr int kTiles = kColumns / 16;  // of half a head
  const auto& r = p.rotation;
  const int half = p.half, head = pair / half, first = pair % half;
  const bool turns = head < r.turned;
  const auto column = [&](int tile) { return first + lane_column(tile); };
  // All loads come before the first store, above which the compiler cannot move them.
  for_rows([&](LaneRow i) {
    const float* const angle = r.angles.of(min(row + i, p.rows - 1), half);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
      float *const a = &total.tile[tile][i.i * 2], *const b = &total.tile[tile + kTiles][i.i * 2];
      const int c = column(tile), in_y = head * 2 * half + c;
      const auto rounded = [&](int at, const float* x) {
        const __nv_bfloat162 y = p.rounded_pair(p.bias, false, at, make_float2(x[0], x[1]), {});
        return make_float2(to_float(y.x), to_float(y.y));
      };
      const float2 u = rounded(in_y, a), v = rounded(in_y + half, b);
      float2 cos{1, 1}, sin{};
      if (turns) {
        cos = *reinterpret_cast<const float2*>(angle + c);
        sin = *reinterpret_cast<const float2*>(angle + half + c);
      }
      const float2 x = rotated(u.x, v.x, cos.x, sin.x), y = rotated(u.y, v.y, cos.y, sin.y);
      a[0] = turns ? x.x : u.x;
      a[1] = turns ? y.x : u.y;
      b[0] = turns ? x.y : v.x;
      b[1] = turns ? y.y : v.y;
    }
  });
  for_rows([&](LaneRow i) {
    if (row + i >= p.rows) return;
    const bool written = head >= r.q_heads && slots.page[i] >= 0;
    const int of_kind = turns ? head - r.q_heads : head - r.turned, slot = slots.slot[i];
    const int64_t in_page = int64_t{slots.page[i]} * r.pages.kv_heads + of_kind;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; n++) {
      const int c = n / kTiles * half + column(n % kTiles);
      const auto x = __floats2bfloat162_rn(total.tile[n][i.i * 2], total.tile[n][i.i * 2 + 1]);
      *reinterpret_cast<__nv_bfloat162*>(&p.y[(row + i) * p.y_stride + head * 2 * half + c]) = x;
      if (!written) continue;
      if (turns) {
        *r.pages.k_at(in_page, slot, c) = x.x;
        *r.pages.k_at(in_page, slot, c + 1) = x.y;
      } else {
        *reinterpret_cast<__nv_bfloat162*>(r.pages.v_at(in_page, slot, c)) = x;
      }
    }
    if (written && turns && column(0) == 0 && r.positions.pos_pages)
      r.positions.pos_pages[in_page * kPageSlots + slot % kPageSlots] = r.positions.pos[row + i];
  });
}

}  // namespace pare::PARE_CUDA
