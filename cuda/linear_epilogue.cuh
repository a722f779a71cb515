// Epilogues of the products in linear_wgmma.cuh.  A warp rounds its results, with a bias, a residual or as SwiGLU, and
// stores them by tensor copies; adds them to memory; sums up logits; or rotates heads and writes them into the cache.
//
//   a warp's results        columns ->
//              +------+------+-...     a box: 16 rows, 32 to 80 columns
//    16 rows   | 0    | 1    |         registers -> shared memory (stmatrix) -> memory (tensor copy)
//              +------+------+-...     a residual comes to the same place before, as soon as it is free
//    16 rows,  | n    | n + 1|
//    64 below  +------+------+-...     a warpgroup with 128 rows only
//
// Order: that of the separate ops, with their roundings.
// Bytes: each result is written once; residuals and the angles of heads are read once.  A tile of kVocabTile logits
// leaves 12 bytes a row.  Limited by shared memory and memory bandwidth, while the copying warp brings the next tile.
#pragma once
#include "linear_mma.cuh"
#include "ptx90.cuh"
#include "rope.cuh"
#include "vocab.cuh"

namespace pare::PARE_CUDA {

// The part of a block in work that the blocks of its cluster share.
struct Share {
  int rank, blocks;
};

// Tensor maps of the results and their residual, if they leave by boxes.
struct ResultMaps {
  CUtensorMap y, residual;
  bool by_boxes;
};
template <class T>
struct Results {
  T* data;
  int64_t stride;  // between rows
  int columns;
};
template <class Block, class Product>
ResultMaps result_maps(const char* op, const Product& p) {
  ResultMaps maps{.y = {}, .residual = {}, .by_boxes = p.apart() == 0 && p.stores_by_boxes()};
  if (!maps.by_boxes) return maps;
  const auto y = p.results();
  const auto map = [&](const auto* data, int64_t stride) {
    return tensor_map<2>(op, data, {static_cast<uint64_t>(y.columns), static_cast<uint64_t>(p.rows)},
                         {static_cast<uint64_t>(stride) * sizeof *data}, {Block::kBox, 16},
                         Block::kBoxBytes == 16 * 128 ? Swizzle::bytes_128 : Swizzle::none);
  };
  maps.y = map(y.data, y.stride);
  if constexpr (Block::kResidual)
    if (p.residual) maps.residual = map(p.residual, p.residual_stride);
  return maps;
}

// Rounds to numbers of bf16, by three instructions; each alone takes two.
__device__ __forceinline__ void round_pair(float& x, float& y) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  x = __uint_as_float(bits << 16);
  y = __uint_as_float(bits & 0xffff0000u);
}

// Returns SwiGLU of two neighbours, with the roundings of the separate ops.
__device__ __forceinline__ __nv_bfloat162 gated(float2 gate, float2 up) {
  const auto rounded = [](float x) { return to_float(from_float<bf16>(x)); };
  return __floats2bfloat162_rn(swiglu(rounded(gate.x), rounded(up.x)), swiglu(rounded(gate.y), rounded(up.y)));
}

// The epilogue of a warp, for tile after tile of its block.  total[m] holds the results of 16 rows from row + 64 m on,
// and of the columns from `column` on, which counts pairs of gates and ups, or of the halves of heads.
template <class Block, class Product>
class Epilogue {
  static constexpr int kDown = Block::kDown, kColumns = Block::kColumns, kBox = Block::kBox, kBoxes = Block::kBoxes,
                       kAcross = Block::kStored / kBox, kBuffers = Block::kBuffers;
  using Total = Accumulator<kColumns>[kDown];

  const Product& p_;
  const ResultMaps& maps_;
  typename Block::Shared& shared_;
  Share part_;          // of k; of one, if parts are not apart
  unsigned tiles_ = 0;  // that have been added to residuals
  NewSlots slots_;
  // For addresses of boxes, which then lie in uniform registers.  In of_warp() it would make tiles of 256 x 192 spill.
  int warp_ = uniform(threadIdx.x / 32);

 public:
  __device__ Epilogue(const Product& p, const ResultMaps& maps, typename Block::Shared& shared, Share part)
      : p_(p), maps_(maps), shared_(shared), part_(part) {}

  // By one thread of the block, before a fence of the async proxy.
  __device__ void init() {
    if (by_boxes()) prefetch_map(maps_.y);
    if (!adds_to_boxes()) return;
    prefetch_map(maps_.residual);
    for (auto& of_warp : shared_.residual)
      for (Mbarrier& full : of_warp) mbarrier_init(&full, 1);
  }
  // Begins to load the residual of a tile, or finds the slots of its rows.
  __device__ void begin(int2 tile) {
    const int2 at = of_warp(tile);
    if (adds_to_boxes() && threadIdx.x % 32 == 0) {
      store_wait_read<0>();  // of the tile before
      for (int i = 0; i < kBuffers; i++) bring(i, at.x, at.y);
    }
    if constexpr (Block::kRotates) slots_ = NewSlots(p_.rotation.pages, at.x, p_.rows);
  }
  // Returns true if results leave by boxes, or as sums of the vocabulary: then tiles follow one another.  The other
  // ways would take registers from the loop over tiles, so a block has one tile.
  __device__ bool has_tiles() const { return Block::kHead || by_boxes(); }
  // Finishes one of several tiles, of parts in turn with the last of them.  place: the tile's number in its part.
  __device__ __forceinline__ void finish_tile(Total& total, int2 tile, int part, int place) {
    const int row = of_warp(tile).x, column = of_warp(tile).y;
    if constexpr (Block::kInTurn)
      if (!add_in_turn(total[0], part, place)) return;
    if constexpr (Block::kHead) {
      if (p_.stores) store(total, row, column, false, false);
      sum_up(total, row, column);
    } else if constexpr (Block::kAdds) {
      add(total, row, column);
    } else {
      p_.with_addends([&](bool has_bias, bool has_residual) { store(total, row, column, has_bias, has_residual); });
    }
  }
  // Ends after the last of several tiles, or finishes the only one.
  __device__ __forceinline__ void end(Total& total, int2 tile) {
    const int row = of_warp(tile).x, column = of_warp(tile).y;
    if (has_tiles()) {
      if (threadIdx.x % 32 == 0) store_wait_read<0>();
    } else if constexpr (Block::kRotates) {
      rotate(total[0], row, column);
    } else if (part_.blocks == 1) {
      finish_results<64>(p_, total, row, column);
    } else if constexpr (Block::kApart) {
      store_part<64>(p_, part_.rank, total, row, column);
      cluster_sync();  // all parts are stored
      finish_parts<64, kDown, kColumns>(p_, part_.rank, part_.blocks, part_.blocks, row, column);
    }
  }

 private:
  __device__ bool by_boxes() const { return Block::kGated || Block::kInTurn || maps_.by_boxes; }
  __device__ bool adds_to_boxes() const {
    if constexpr (Block::kResidual) return by_boxes() && p_.residual;
    return false;
  }
  __device__ int2 of_warp(int2 tile) const {
    const int warp = threadIdx.x / 32;
    return {tile.x + warp / 4 * kDown * 64 + warp % 4 * 16, Block::Stage::kHalves ? tile.y / 2 : tile.y};
  }

  // Adds a part to the sums of those before it, once they are there; returns true if it is the last.
  __device__ __forceinline__ bool add_in_turn(Accumulator<kColumns>& sum, int part, int place) {
    constexpr int kFours = kColumns / 8, kTogether = 8;  // of a lane; that are loaded at once
    const int lane = threadIdx.x % 32, warp = place * Block::kConsumers + static_cast<int>(threadIdx.x / 32);
    auto* const sums = reinterpret_cast<float4*>(p_.sums) + int64_t{warp} * kFours * 32 + lane;
    int* const turn = reinterpret_cast<int*>(p_.arrivals) + warp;
    const bool complete = part + 1 == p_.parts_in_turn;
    if (part > 0) {
      if (lane == 0) await_turn(turn, part);
      __syncwarp();
#pragma unroll
      for (int first = 0; first < kFours; first += kTogether) {
        float4 before[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; i++) before[i] = sums[(first + i) * 32];
#pragma unroll
        for (int i = 0; i < kTogether; i++) {
          float(&x)[4] = sum.tile[first + i];
          x[0] = before[i].x + x[0];
          x[1] = before[i].y + x[1];
          x[2] = before[i].z + x[2];
          x[3] = before[i].w + x[3];
        }
      }
    }
    if (!complete)
#pragma unroll
      for (int i = 0; i < kFours; i++)
        sums[i * 32] = make_float4(sum.tile[i][0], sum.tile[i][1], sum.tile[i][2], sum.tile[i][3]);
    __syncwarp();
    if (lane == 0) end_turn(turn, complete ? -part : 1);
    return complete;
  }

  // ---- boxes.  Where results are added to a residual, its boxes come by tensor copies to where those of the results
  // will be: the first as the tile begins, each other as soon as its place is free.
  __device__ auto* box(int i) const { return shared_.boxes[warp_][i % kBuffers]; }
  __device__ Mbarrier* full(int i) const { return &shared_.residual[warp_][i % kBuffers]; }
  __device__ void bring(int i, int row, int column) const {
    mbarrier_arrive_expect(full(i), Block::kBoxBytes);
    tensor_copy(box(i), maps_.residual, column + i % kAcross * kBox, row + i / kAcross * 64, full(i));
  }
  // Calls fill(box, m, n) for each box, of 16 rows from m 64 on and of kBox columns from n on, and send(x, y, box) when
  // it is full: x and y are where it begins, as that of m = n = 0 begins at `column` and `row`.
  template <class Fill, class Send>
  __device__ __forceinline__ void for_boxes(int row, int column, bool has_residual, Fill fill, Send send) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBoxes; i++) {
      const int next = i - 1 + kBuffers;  // its place is that of the box before
      if (lane == 0 && has_residual && i > 0 && next < kBoxes) {
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
        const int uses = ceil_div(kBoxes - i % kBuffers, kBuffers);  // of the mbarrier, by a tile
        mbarrier_wait(full(i), (uses * tiles_ + i / kBuffers) % 2);
      }
      __syncwarp();
      const int m = i / kAcross, n = i % kAcross * kBox;
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

  // Rounds the results and stores them by boxes.  The last two are constants, for each of which this is compiled.
  __device__ __forceinline__ void store(const Total& total, int row, int column, bool has_bias, bool has_residual) {
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
            y = p_.rounded_pair(has_bias, has_residual, column + lane_column(tile), make_float2(x[0], x[1]), added_to);
          }
          memcpy(&after[j], &y, 4);
        }
        stmatrix_x4(at, after);
      }
    };
    for_boxes(row, column, has_residual, fill,
              [&](int x, int y, const bf16* box) { tensor_store(maps_.y, x, y, box); });
  }

  // Adds the results to memory by boxes of f32.
  __device__ __forceinline__ void add(const Total& total, int row, int column) {
    static_assert(kBox == 32);  // rows of 128 bytes
    const auto fill = [&](float* box, int m, int n) {
#pragma unroll
      for (int tile = 0; tile < kBox / 8; tile++)
        for_rows([&](LaneRow r) {
          const int c = lane_column(tile);
          const float* const x = &total[m].tile[n / 8 + tile][r.i * 2];
          *reinterpret_cast<float2*>(box + r * kBox + (c / 4 ^ r % 8) * 4 + c % 4) = make_float2(x[0], x[1]);
        });
    };
    for_boxes(row, column, false, fill, [&](int x, int y, const float* box) { tensor_add(maps_.y, x, y, box); });
  }

  // Sums up the tiles of the vocabulary, in the results that `store` rounds, which become z; `column` is a multiple of
  // kVocabTile.  A lane has a quarter of the 16 lanes of a row sum: of every 16 ids two neighbours, and the two that
  // are 8 further on.
  __device__ __forceinline__ void sum_up(Total& total, int row, int column) {
    static_assert(kColumns % kVocabTile == 0);
    const int numbers = 3 * (ceil_div(p_.columns, kVocabTile) + 1);  // of a row
#pragma unroll
    for (int m = 0; m < kDown; m++) {
#pragma unroll
      for (auto& x : total[m].tile) {
        round_pair(x[0], x[1]);
        round_pair(x[2], x[3]);
      }
      if (p_.temperature != 1) total[m].for_each([&](int, int, float& x) { x /= p_.temperature; });
      if (column + kColumns > p_.columns)
        total[m].for_each([&](int, int c, float& x) { x = column + c < p_.columns ? x : -INFINITY; });
      for_rows([&](LaneRow r) {
        const int first_row = row + m * 64 + r;
        const bool exists = first_row < p_.rows;
        float* const to = p_.tiles + int64_t{first_row} * numbers;
        if (exists && p_.target) {
          const int at = p_.target[first_row] - column;
          if (0 <= at && at < kColumns)
            total[m].for_row(r, [&](int c, float z) {
              if (c == at) to[numbers - 3] = z;
            });
        }
#pragma unroll
        for (int v = 0; v < kColumns / kVocabTile; v++) {
          if (column + v * kVocabTile >= p_.columns) break;
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

  // Rounds, rotates and stores halves of heads, those of pairs that lie in one head, and writes keys and values to
  // where slots_ says.
  __device__ __forceinline__ void rotate(Accumulator<kColumns>& total, int row, int pair) {
    constexpr int kTiles = kColumns / 16;  // of half a head
    const auto& r = p_.rotation;
    const int half = p_.half, head = pair / half, first = pair % half;
    const bool turns = head < r.turned;
    const auto column = [&](int tile) { return first + lane_column(tile); };
    // All loads come before the first store, above which the compiler cannot move them.
    for_rows([&](LaneRow i) {
      const float* const angle = r.angles.of(min(row + i, p_.rows - 1), half);
#pragma unroll
      for (int tile = 0; tile < kTiles; tile++) {
        float *const a = &total.tile[tile][i.i * 2], *const b = &total.tile[tile + kTiles][i.i * 2];
        const int c = column(tile), in_y = head * 2 * half + c;
        const auto rounded = [&](int at, const float* x) {
          const __nv_bfloat162 y = p_.rounded_pair(p_.bias, false, at, make_float2(x[0], x[1]), {});
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
      if (row + i >= p_.rows) return;
      const bool written = head >= r.q_heads && slots_.page[i] >= 0;
      const int of_kind = turns ? head - r.q_heads : head - r.turned, slot = slots_.slot[i];
      const int64_t in_page = int64_t{slots_.page[i]} * r.pages.kv_heads + of_kind;
#pragma unroll
      for (int n = 0; n < 2 * kTiles; n++) {
        const int c = n / kTiles * half + column(n % kTiles);
        const auto x = __floats2bfloat162_rn(total.tile[n][i.i * 2], total.tile[n][i.i * 2 + 1]);
        *reinterpret_cast<__nv_bfloat162*>(&p_.y[(row + i) * p_.y_stride + head * 2 * half + c]) = x;
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
};

}  // namespace pare::PARE_CUDA
