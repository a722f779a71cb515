// Products of attention on tensor cores: rows of bf16 in shared memory, 16 rows of results a warp, f32 accumulators.
//
// The order of sums is that of bf16 in list.h.  A product's k-steps are 16 long and ascend, over channels (zeros beyond
// D) and over slots, which are steps of whole pages.  A term that is 0 leaves a sum as it is, so hidden pairs change no
// bit: the bits of a row depend on the slots that it sees, not on its place in a tile, nor on other rows.
#pragma once
#include "attention.cuh"
#include "fragment.cuh"

namespace pare::PARE_CUDA {

constexpr int kRows16 = 64;  // query rows of a block: 16 a warp

// Fills kRows rows of dst with `rows` rows of d columns, row(i) giving the address of row i or null, and zeros; by a
// block of threads.  vector: rows are 16-byte aligned and d is a multiple of 8.
template <int kRows, int kD, class Row>
__device__ __forceinline__ void load_tile(SharedTile<kD> dst, const bf16* any, int rows, int head_dim, bool vector,
                                          Row row) {
  for (int i = threadIdx.x; i < kRows * kD / 8; i += kThreads) {
    const int r = i / (kD / 8), c = i % (kD / 8) * 8;
    const bf16* const from = r < rows ? row(r) : nullptr;
    const int valid = from ? max(0, min(8, head_dim - c)) : 0;
    const bf16* const src = valid ? from + c : any;
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

// The largest score of a page becomes the base of the weights if it exceeds that base by more than this, in log2 units.
constexpr float kRise = 64;
// `largest`: the largest score of the next listed page of a row.  Returns the factor of the sums so far.
__device__ __forceinline__ float rise(float& top, float largest) {
  if (!(largest > top + kRise)) return 1;
  const float fix = exp2_f32(top - largest);
  top = largest;
  return fix;
}

// Keys from `first` on, as a factor of products.
template <class Keys>
struct From {
  Keys k;
  int first;
  __device__ __forceinline__ void operand_b(uint32_t (&x)[4], int n, int c) const { k.operand_b(x, first + n, c); }
};

// Which of a tile of 64 listed slots count: bit i for slot i.
using Listed = uint64_t;
template <class Bits>
__device__ __forceinline__ bool counts(Bits listed, int slot) {
  return listed >> slot & 1;
}

// Four pages that hold slots of a row's list, fewer at its end.
struct ListedTile {
  int page[kSlots / kPageSlots];
  Listed listed;
  // Where slot i of the tile lies in the sequence.
  __device__ __forceinline__ int slot(int i) const {
    const int low = i < 16 ? page[0] : page[1], high = i < 48 ? page[2] : page[3];
    return (i < 32 ? low : high) * kPageSlots + i % kPageSlots;
  }
};
// The pages that a list of blocks names, ascending.
struct ListedTiles {
  const int32_t* list;
  int n, block, total;  // entries; slots of a block; slots that the row sees
  int next = 0;         // entry
  __device__ __forceinline__ bool left() const { return next < n; }
  // By a warp, a lane an entry.
  __device__ ListedTile take() {
    constexpr int kPages = kSlots / kPageSlots;
    const int lane = threadIdx.x % 32, in_page = kPageSlots / block;
    const bool there = lane < kSlots / 4 && next + lane < n;
    const int entry = there ? list[next + lane] : 0, page = entry / in_page;
    const bool same = __shfl_up_sync(kAllLanes, page, 1) == page && lane > 0;
    unsigned firsts = __ballot_sync(kAllLanes, there && !same);
    const int place = __popc(firsts & ((2u << lane) - 1)) - 1;
    const bool mine = there && place < kPages;
    ListedTile t{};
    if (mine)
      t.listed = ~Listed{0} >> (64 - min(block, total - entry * block))
                                   << (place * kPageSlots + entry % in_page * block);
    for (int o = 1; o < 32; o *= 2) t.listed |= __shfl_xor_sync(kAllLanes, t.listed, o);
    for (int& p : t.page) {
      p = __shfl_sync(kAllLanes, page, max(0, __ffs(static_cast<int>(firsts)) - 1));
      firsts &= firsts - 1;
    }
    next += __popc(__ballot_sync(kAllLanes, mine));
    return t;
  }
};

// The online softmax of a warp's 16 query rows, without their outputs.
struct SoftmaxRows {
  PerRow<float> top = {-INFINITY, -INFINITY}, sum = {};  // of this cut; of its sum the lane's part
  PerRow<float> whole_top, whole_sum;                    // of the cuts before, then of all
  bool cuts = false;                                     // is there one before?

  // q.k of a block to weights; row r of the warp sees the first visible(r) slots of it (possibly less than 1; kMasked:
  // or not all).  Returns the factor of the outputs before the block is added.
  template <bool kMasked, class Visible>
  __device__ __forceinline__ PerRow<float> weigh(Accumulator<kBlock16>& s, const Softmax& softmax, Visible visible) {
    PerRow<int> sees;
    PerRow<float> m, fix, part = {};
    for_rows([&](LaneRow row) {
      sees[row] = kMasked ? visible(row) : 0;
      m[row] = -INFINITY;
    });
    s.for_each([&](LaneRow row, int slot, float x) {
      if (!kMasked || slot < sees[row]) m[row] = fmaxf(m[row], x);
    });
    for_rows([&](LaneRow row) {
      m[row] = fmaxf(top[row], softmax.score(quad_max(m[row])));
      fix[row] = kMasked && sees[row] <= 0 ? 1.f : exp2_f32(top[row] - m[row]);
      top[row] = m[row];
    });
    s.for_each([&](LaneRow row, int slot, float& x) {
      const float weight = softmax.cubic(x, m[row]);
      part[row] += x = !kMasked || slot < sees[row] ? weight : 0.f;
    });
    for_rows([&](LaneRow row) { sum[row] = sum[row] * fix[row] + part[row]; });
    return fix;
  }

  // Ends a cut of which every row sees a slot.  Returns the factors for add_outputs().
  __device__ __forceinline__ PerRow<CutFactors> end_cut() {
    PerRow<CutFactors> f = {};
    for_rows([&](LaneRow row) {
      f[row] = add_cut(row, quad_sum(sum[row]));
      top[row] = -INFINITY;
      sum[row] = 0;
    });
    return f;
  }
  // Adds o, the outputs of that cut, to those of the cuts before: total(i) for pair i of o, which is 0 afterwards.
  template <int kN, class Total>
  __device__ __forceinline__ void add_outputs(const PerRow<CutFactors>& f, float (&o)[kN], Total total) {
    if (cuts)
      for_pairs<kN>([&](int i) { total(i) = add(f.v[i % 2], total(i), o + i * 2); });
    else
      for_pairs<kN>([&](int i) { total(i) = make_float2(o[i * 2], o[i * 2 + 1]); });
#pragma unroll
    for (int i = 0; i < kN; i++) o[i] = 0;
    cuts = true;
  }
  // After the last block: o becomes the outputs of all cuts, before the division.
  template <int kN, class Total>
  __device__ __forceinline__ void finish(float (&o)[kN], Total total) {
    PerRow<CutFactors> f = {};
    PerRow<bool> ended;
    for_rows([&](LaneRow row) {
      const float all = quad_sum(sum[row]);
      ended[row] = all == 0;  // in the cut before
      if (!ended[row]) f[row] = add_cut(row, all);
    });
    if (cuts)
      for_pairs<kN>([&](int i) {
        const float2 before = total(i), x = ended.v[i % 2] ? before : add(f.v[i % 2], before, o + i * 2);
        o[i * 2] = x.x;
        o[i * 2 + 1] = x.y;
      });
  }
  __device__ __forceinline__ float log_sum(LaneRow row) const {
    return fmaf(log_f32(whole_sum.v[row.i]), kLog2E, whole_top.v[row.i]);
  }

 private:
  // The sums of a row's cut go into those of the cuts before.
  __device__ __forceinline__ CutFactors add_cut(LaneRow row, float cut_sum) {
    if (cuts) return merge_cut(whole_top[row], whole_sum[row], top[row], cut_sum);
    whole_top[row] = top[row];
    whole_sum[row] = cut_sum;
    return {};
  }
  static __device__ __forceinline__ float2 add(CutFactors f, float2 before, const float* o) {
    return make_float2(before.x * f.before + o[0] * f.cut, before.y * f.before + o[1] * f.cut);
  }
  template <int kN, class F>
  static __device__ __forceinline__ void for_pairs(F f) {
#pragma unroll
    for (int i = 0; i < kN / 2; i++) f(i);
  }
};

// The results of the first `n` of the 16 rows to where place(row, lse) says.
template <int kV, class Place>
__device__ __forceinline__ void write_rows(Accumulator<kV>& acc, SoftmaxRows& rows, int n, Place place, int channels) {
  for_rows([&](LaneRow row) {
    if (row >= n) return;
    bf16* const o = place(row, rows.log_sum(row));
    const float part = 1.f / rows.whole_sum[row];
    acc.for_row(row, [&](int c, float x) {
      if (c < channels) o[c] = from_float<bf16>(x * part);
    });
  });
}

// A warp's 16 query rows.  kV: channels of V, from `channel` on, that it computes.
template <int kD, int kV = kD>
struct Rows16 {
  Accumulator<kV> acc = {};
  // Outputs of the cuts before, by pairs.  They lie in memory: registers would be missed elsewhere.
  using Total = float2[kV / 4];
  float2* const total;
  Accumulator<kBlock16> s;
  SoftmaxRows rows;

  __device__ __forceinline__ explicit Rows16(Total& t) : total(in_memory(t)) {}

  // A block of slots, of which `present` exist: score(), weigh(), add().  q holds the rows of the warp from `row` on.
  template <class Keys>
  __device__ __forceinline__ void score(SharedTile<kD> q, int row, Keys k, int present) {
    s = {};
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (h * kSlots < present) add_dots(s.half(h), q, row, From<Keys>{k, h * kSlots});
  }
  // Row i of the 16 sees the first visible_of(i) slots of the block (possibly less than 1).
  template <class Visible>
  __device__ __forceinline__ void weigh(const Softmax& softmax, Visible visible_of) {
    PerRow<float> fix = rows.weigh<true>(s, softmax, visible_of);
    for_rows([&](LaneRow row) { acc.scale(row, fix[row]); });
  }
  __device__ __forceinline__ void add(SharedTile<kV> v, int present) {
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (h * kSlots < present) add_weighted(acc, s.half(h), SharedTile<kV>{v.p + h * kSlots * kV});
  }
  __device__ __forceinline__ void end_cut() {
    rows.add_outputs(rows.end_cut(), acc.registers(), [&](int i) -> float2& { return total[i]; });
  }

  // The same for four pages, of which each row has the slots `listed`: score_pages(), add_pages().
  template <class Keys>
  __device__ __forceinline__ void score_pages(SharedTile<kD> q, int row, Keys k) {
    s.half(0) = {};
    add_dots(s.half(0), q, row, k);
  }
  __device__ __forceinline__ void add_pages(SharedTile<kV> v, const Softmax& softmax, PerRow<Listed> listed) {
#pragma unroll
    for (int page = 0; page < kSlots / kPageSlots; page++) {
      Accumulator<kPageSlots>& x = reinterpret_cast<Accumulator<kPageSlots>&>(s.tile[page * 2]);
      PerRow<unsigned> mine;
      for_rows([&](LaneRow row) { mine[row] = static_cast<unsigned>(listed[row] >> page * kPageSlots) & 0xffff; });
      if (!__any_sync(kAllLanes, (mine.v[0] | mine.v[1]) != 0)) continue;  // no row of the warp
      PerRow<float> fix;
      for_rows([&](LaneRow row) {
        float m = -INFINITY;
        x.for_row(row, [&](int slot, float z) {
          if (counts(mine[row], slot)) m = fmaxf(m, z);
        });
        fix[row] = rise(rows.top[row], softmax.score(quad_max(m)));
      });
      if (__any_sync(kAllLanes, fix.v[0] != 1 || fix.v[1] != 1))
        for_rows([&](LaneRow row) {
          acc.scale(row, fix[row]);
          rows.sum[row] *= fix[row];
        });
      for_rows([&](LaneRow row) {
        x.for_row(row, [&](int slot, float& z) {
          const float weight = softmax.cubic(z, rows.top[row]);
          rows.sum[row] += z = counts(mine[row], slot) ? weight : 0.f;
        });
      });
      add_weighted(acc, x, SharedTile<kV>{v.p + page * kPageSlots * kV});
    }
  }

  // The results of the first `n` rows to where place(row, lse) says.
  template <class Place>
  __device__ __forceinline__ void write(int n, Place place, int channels) {
    rows.finish(acc.registers(), [&](int i) -> float2& { return total[i]; });
    write_rows(acc, rows, n, place, channels);
  }
};

// The same for 16 rows that four warps share, as in decoding: of the scores and weights each warp takes a fourth of the
// slots, of the values a fourth of the channels.  The same sums in the same order, so the same bits.  All warps call
// these together, with a __syncthreads() between score() and weigh(), weigh() and add(), add() and score().
template <int kD>
struct SharedRows16 {
  static constexpr int kColumns = kD / kWarps, kMine = kBlock16 / kWarps;
  struct Memory {
    float weights[16][kBlock16 + 8];  // (the stride: no bank conflicts)
    float top[kWarps][16], sum[16];   // the largest score of each warp's slots; sums of the rows
  };
  Memory& shared;
  Accumulator<kColumns> acc = {};
  Accumulator<kMine> s;
  SoftmaxRows rows;
  PerRow<float> fix;
  float sum = 0;  // lanes below 16: of row 4 * warp + lane / 4, the part of lane % 4

  __device__ explicit SharedRows16(Memory& m) : shared(m) {}

  template <class Keys>
  __device__ __forceinline__ void score(SharedTile<kD> q, Keys k, int present, const Softmax& softmax) {
    const int begin = warp() * kMine;
    s = {};
    if (begin < present) add_dots(s, q, 0, From<Keys>{k, begin});
    share_tops(s, softmax, [&](LaneRow, int slot) { return begin + slot < present; });
  }
  __device__ __forceinline__ void weigh(const Softmax& softmax, int present) {
    for_rows([&](LaneRow row) {
      float m = rows.top[row];
      for (int w = 0; w < kWarps; w++) m = fmaxf(m, shared.top[w][row]);
      fix[row] = exp2_f32(rows.top[row] - m);
      rows.top[row] = m;
    });
    share_weights(s, softmax, rows.top, [&](LaneRow, int slot) { return slot < present; });
  }
  template <class Values>
  __device__ __forceinline__ void add(Values v, int present) {
    const float mine = of_my_sum(fix);
    float part = 0;
    add_weights<kBlock16>(part, 0);
    sum = sum * mine + part;
    for_rows([&](LaneRow row) { acc.scale(row, fix[row]); });
#pragma unroll
    for (int k = 0; k < kBlock16; k += kPageSlots)
      if (k < present) add_page(v, k);
  }

  template <class Keys>
  __device__ __forceinline__ void score_pages(SharedTile<kD> q, Keys k, const Softmax& softmax, Listed listed) {
    s.half(0) = {};
    add_dots(s.half(0), q, 0, From<Keys>{k, warp() * kPageSlots});
    share_tops(s.half(0), softmax, [&](LaneRow, int slot) { return counts(listed, warp() * kPageSlots + slot); });
  }
  __device__ __forceinline__ void weigh_pages(const Softmax& softmax, Listed listed) {
    PerRow<float> m;  // of this warp's page
    for_rows([&](LaneRow row) {
      m[row] = rows.top[row];
      for (int page = 0; page <= warp(); page++) rise(m[row], shared.top[page][row]);
    });
    share_weights(s.half(0), softmax, m, [&](LaneRow, int slot) { return counts(listed, slot); });
  }
  template <class Values>
  __device__ __forceinline__ void add_pages(Values v) {
    float m = of_my_sum(rows.top);
    for (int page = 0; page < kWarps; page++) {
      if (threadIdx.x % 32 < 16) sum *= rise(m, shared.top[page][my_row()]);
      add_weights<kPageSlots>(sum, page * kPageSlots);
    }
#pragma unroll
    for (int page = 0; page < kWarps; page++) {
      for_rows([&](LaneRow row) { fix[row] = rise(rows.top[row], shared.top[page][row]); });
      if (__any_sync(kAllLanes, fix.v[0] != 1 || fix.v[1] != 1))
        for_rows([&](LaneRow row) { acc.scale(row, fix[row]); });
      add_page(v, page * kPageSlots);
    }
  }

  // Called after the last block; then one of the two below.
  __device__ __forceinline__ void finish() {
    rows.whole_top = rows.top;
    rows.whole_sum = take_sums();
  }
  // The outputs of the first `n` rows before the division, their maximum and their sum to where place(row) says.
  template <class Place>
  __device__ __forceinline__ void leave(int n, Place place, int channels) {
    const int first = warp() * kColumns;
    for_rows([&](LaneRow row) {
      if (row >= n) return;
      float* const to = place(row);
      acc.for_row(row, [&](int c, float x) {
        if (first + c < channels) to[first + c] = x;
      });
      if (first == 0 && leads_quad()) {
        to[channels] = rows.whole_top[row];
        to[channels + 1] = rows.whole_sum[row];
      }
    });
  }
  // The maximum of each row, and 1 / its sum.
  __device__ __forceinline__ void share_totals() {
    for_rows([&](LaneRow row) {
      if (warp() == 0 && leads_quad()) {
        shared.top[0][row] = rows.whole_top[row];
        shared.top[1][row] = 1.f / rows.whole_sum[row];
      }
    });
  }
  // The results of the first `n` rows to where place(row) says.
  template <class Place>
  __device__ __forceinline__ void write(int n, Place place, int channels) {
    const int first = warp() * kColumns;
    write_rows(
        acc, rows, n, [&](int row, float) { return place(row) + first; }, channels - first);
  }

 private:
  static_assert(kWarps * kPageSlots == kSlots);
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int my_row() { return warp() * 4 + threadIdx.x % 32 / 4; }  // of lanes below 16

  template <int kN, class Sees>
  __device__ __forceinline__ void share_tops(Accumulator<kN>& x, const Softmax& softmax, Sees sees) {
    for_rows([&](LaneRow row) {
      float m = -INFINITY;
      x.for_row(row, [&](int slot, float z) {
        if (sees(row, slot)) m = fmaxf(m, z);
      });
      m = quad_max(m);
      if (leads_quad()) shared.top[warp()][row] = softmax.score(m);
    });
  }
  // sees(row, slot): slots of the tile.
  template <int kN, class Sees>
  __device__ __forceinline__ void share_weights(const Accumulator<kN>& x, const Softmax& softmax, PerRow<float> m,
                                                Sees sees) {
    x.for_pairs([&](LaneRow row, int column, float2 z) {
      const int slot = warp() * kN + column;
      const float2 w = make_float2(softmax.cubic(z.x, m[row]), softmax.cubic(z.y, m[row]));
      *reinterpret_cast<float2*>(&shared.weights[row][slot]) =
          make_float2(sees(row, slot) ? w.x : 0.f, sees(row, slot + 1) ? w.y : 0.f);
    });
  }
  // to += the weights of kN slots from `first` on that this lane adds up.
  template <int kN>
  __device__ __forceinline__ void add_weights(float& to, int first) {
    if (threadIdx.x % 32 >= 16) return;
#pragma unroll
    for (int n = 0; n < kN / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) to += shared.weights[my_row()][first + lane_column(n) + e];
  }
  // acc += the weights of the page at slot `k` of the tile, times its values.
  template <class Values>
  __device__ __forceinline__ void add_page(Values v, int k) {
    uint32_t x[4];
    make_a(x, [&](int row, int slot) {
      const float2 w = *reinterpret_cast<const float2*>(&shared.weights[row][k + slot]);
      return pack2(w.x, w.y);
    });
#pragma unroll
    for (int c = 0; c < kColumns; c += 16) {
      uint32_t y[4];
      v.operand_b(y, warp() * kColumns + c, k);
      acc.add_product(c, x, y);
    }
  }
  // In lanes below 16: that of their row.
  __device__ __forceinline__ float of_my_sum(PerRow<float> x) const {
    return __shfl_sync(kAllLanes, warp() < 2 ? x.v[0] : x.v[1], my_row() % 8 * 4);
  }
  // The sums of the rows, in every thread for its own.
  __device__ __forceinline__ PerRow<float> take_sums() {
    const float all = quad_sum(sum);
    if (threadIdx.x % 32 < 16 && leads_quad()) shared.sum[my_row()] = all;
    __syncthreads();
    PerRow<float> sums;
    for_rows([&](LaneRow row) { sums[row] = shared.sum[row]; });
    return sums;
  }
};

// Channels of V that a block computes of 16 rows a warp: of heads of 256, blocks side by side take half of them each.
template <int kD>
constexpr int kValues16 = kD <= 128 ? kD : 128;

// Computes tiles of slots, 0 and those that follow while more(i); keys and values of all lie in one place each: while
// one of the two is used, the other arrives.  load_keys(i) and load_values(i) begin to load; score(i) reads the keys,
// add(i) the values.
template <class More, class LoadKeys, class LoadValues, class Score, class Weigh, class Add>
__device__ __forceinline__ void for_tiles(More more, LoadKeys load_keys, LoadValues load_values, Score score,
                                          Weigh weigh, Add add) {
  load_keys(0);
  cp_async_commit();
  bool go = true;
  for (int i = 0; go; i++) {
    load_values(i);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();  // the keys are there
    score(i);
    __syncthreads();  // everyone is done with them
    go = more(i + 1);
    if (go) load_keys(i + 1);
    cp_async_commit();
    weigh(i);
    cp_async_wait<1>();
    __syncthreads();  // the values are there
    add(i);
    __syncthreads();  // everyone is done with them
  }
  cp_async_wait<0>();
}

}  // namespace pare::PARE_CUDA
