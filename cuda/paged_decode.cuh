// Attention over pages of rows alone in bf16, as in decoding (AttnPaged), if at most 16 heads share a key head.
//
//   o = sum_s p_s v_s / sum_s p_s,  p_s = 2^(scale log2(e) q.k_s - max)
//
// A piece of work is a cut of 1024 slots of a row and a key head, or all slots of its list:
//
//   slots of a row   | cut 0: 1024                     | cut 1                           | cut 2   |
//   a turn of a cut  |128|                             one block each; the last to arrive merges all
//
//   q.k of a turn    | warp 0: 32 slots | warp 1 | warp 2 | warp 3 |      for all query heads of the key head
//   p v of a turn    | D / 4 channels   |        |        |        |      of the outputs
//
// (A turn of a list has 64 slots.)  Of a row of several cuts each block leaves its sums in memory.  The masses of the
// slots that such a row reads are added up after its last cut, from the weights that lie in AttnPaged::weights until
// then: K is read once.
//
// Order: SharedRows16, both by cp.async and by tensor copies; cuts are merged ascending.
// Bytes: K and V once; of each cut of several 4 (D + 2) a head twice.  Limited by memory bandwidth.
#pragma once
#include "paged_tile.cuh"
#include "ptx90.cuh"

namespace pare::PARE_CUDA {

// Adds up the masses of the slots that a row alone reads.  Weights lie in memory until the maximum and the sum of the
// row are known: of each page and key head those of each head of the group, [group][16], and, in the last page of a
// block of slots, the maxima that those of the block are relative to, [group].
template <int kD>
class RowMasses {
  using Shared = typename SharedRows16<kD>::Memory;
  const PagedTile16& e_;
  const int group_, first_;

  __device__ __forceinline__ int64_t head(int slot) const {
    return e_.a.pages.head(e_.t.table_row, slot, e_.kv) * kPageSlots;
  }
  __device__ __forceinline__ float* weights_at(int slot) const { return e_.a.weights + head(slot) * (group_ + 1); }
  // Returns the maxima of a block; `slot`: any of it.
  __device__ __forceinline__ float* tops_of(int slot) const {
    return weights_at(min(slot | (kBlock16 - 1), e_.t.slots - 1)) + group_ * kPageSlots;
  }
  // Pages of protected slots alone may be those of other entries, too.
  __device__ __forceinline__ bool has_mass(int slot) const {
    return slot < e_.t.slots && slot / kPageSlots >= first_ / kPageSlots;
  }

 public:
  __device__ __forceinline__ explicit RowMasses(const PagedTile16& e)
      : e_(e), group_(e.a.group), first_(e.a.first[e.t.entry]) {}

  // Keeps the weights of the block that begins at slot `begin`, and the maxima that they are relative to.
  __device__ __forceinline__ void keep(const Shared& shared, PerRow<float> top, int begin) const {
    const int at = threadIdx.x % 32 * 4, slot = begin + at;
    if (has_mass(slot)) {
      float* const weights = weights_at(slot) + slot % kPageSlots;
#pragma unroll 1
      for (int row = threadIdx.x / 32; row < group_; row += kWarps)
        *reinterpret_cast<float4*>(weights + row * kPageSlots) =
            *reinterpret_cast<const float4*>(&shared.weights[row][at]);
    }
    if (threadIdx.x < 32 && leads_quad() && has_mass(min(begin + kBlock16, e_.t.slots) - 1)) {
      float* const tops = tops_of(begin);
      for_rows([&](LaneRow row) {
        if (row < group_) tops[row] = top[row];
      });
    }
  }
  // Adds the weights to the masses.  shared.top: of each row the maximum, and 1 / the sum.
  __device__ void add(const Shared& shared) const {
    __syncthreads();
#pragma unroll 1
    for (int slot = (first_ / 4 + static_cast<int>(threadIdx.x)) * 4; slot < e_.t.slots; slot += kThreads * 4) {
      float* const mass = e_.a.mass_pages + head(slot) + slot % kPageSlots;
      const float *const weights = weights_at(slot) + slot % kPageSlots, *const tops = tops_of(slot);
      float total[4];
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] = slot + i >= first_ && slot + i < e_.t.slots - 1 ? mass[i] : 0.f;
#pragma unroll 2
      for (int row = 0; row < group_; row++) {
        const float f = exp2_f32(tops[row] - shared.top[0][row]) * shared.top[1][row];
        const float4 w = *reinterpret_cast<const float4*>(weights + row * kPageSlots);
        total[0] = fmaf(w.x, f, total[0]);
        total[1] = fmaf(w.y, f, total[1]);
        total[2] = fmaf(w.z, f, total[2]);
        total[3] = fmaf(w.w, f, total[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (slot + i >= first_ && slot + i < e_.t.slots) mass[i] = total[i];
    }
  }
};

static_assert(kCut16 == kAttnCut);
__device__ __forceinline__ int cuts_of(int slots) { return ceil_div(slots, kCut16); }

// Merges the cuts of a row alone, a warp a row, and leaves its maximum and 1 / its sum in shared.top.
template <int kD>
__device__ void merge_cuts(const PagedTile16& e, int cuts, typename SharedRows16<kD>::Memory& shared) {
  const int head_dim = e.a.pages.head_dim, lane = threadIdx.x % 32;
  const int64_t step = int64_t{e.a.heads} * (head_dim + 2);  // between cuts
  for (int row = threadIdx.x / 32; row < e.rows; row += kWarps) {
    const float* part = e.result_of_cut(row, 0);
    float o[kD / 32] = {}, top = -INFINITY, sum = 0;
    for (int first = 0; first < cuts; first += 32) {
      // Lane i knows the factors of cut first + i and of those before: its maximum is that of all up to there.
      const bool there = first + lane < cuts;
      const float mine = there ? part[lane * step + head_dim] : -INFINITY;
      const float mine_sum = there ? part[lane * step + head_dim + 1] : 0.f;
      float next = fmaxf(top, mine);
      for (int up = 1; up < 32; up *= 2) next = fmaxf(next, __shfl_sync(kAllLanes, next, max(0, lane - up)));
      const float last = __shfl_sync(kAllLanes, next, max(0, lane - 1));
      const CutFactors f{exp2_f32((lane == 0 ? top : last) - next), exp2_f32(mine - next)};
      top = __shfl_sync(kAllLanes, next, 31);
#pragma unroll 8
      for (int i = 0; i < min(32, cuts - first); i++, part += step) {
        const CutFactors now{__shfl_sync(kAllLanes, f.before, i), __shfl_sync(kAllLanes, f.cut, i)};
        const float more = __shfl_sync(kAllLanes, mine_sum, i);
        const bool is_first = first + i == 0;
        sum = is_first ? more : sum * now.before + more * now.cut;
#pragma unroll
        for (int j = 0; j < kD / 32; j++) {
          const float x = j * 32 + lane < head_dim ? part[j * 32 + lane] : 0.f;
          o[j] = is_first ? x : o[j] * now.before + x * now.cut;
        }
      }
    }
    const float scale = 1.f / sum;
#pragma unroll
    for (int j = 0; j < kD / 32; j++)
      if (j * 32 + lane < head_dim) e.result(row)[j * 32 + lane] = from_float<bf16>(o[j] * scale);
    if (lane == 0) {
      shared.top[0][row] = top;
      shared.top[1][row] = scale;
    }
  }
}

// Ends a cut, or a list, of a row alone: writes the results of the row if there is no other, leaves them if there are,
// and merges all if it is the last.
template <int kD, bool kMass>
__device__ __forceinline__ void end_cut(const PagedTile16& e, int cut, SharedRows16<kD>& r) {
  const PagedArgs<bf16>& a = e.a;
  r.finish();
  const int cuts = e.list ? 1 : cuts_of(e.t.slots);
  if (cuts == 1) {
    r.write(
        e.rows, [&](int i) { return e.result(i); }, a.pages.head_dim);
    if constexpr (kMass) r.share_totals();
  } else {
    r.leave(
        e.rows, [&](int i) { return e.result_of_cut(i, cut); }, a.pages.head_dim);
    __shared__ bool last;
    if (!is_last_to_arrive(&a.arrivals[e.t.entry * a.pages.kv_heads + e.kv], cuts, last)) return;
    merge_cuts<kD>(e, cuts, r.shared);
  }
  if constexpr (kMass) RowMasses<kD>(e).add(r.shared);
}

// The entry and the cut of piece i.
struct EntryCut {
  PagedRow entry;
  int number, cut;
  __device__ __forceinline__ EntryCut(const PagedArgs<bf16>& a, int i) {
    const int2 piece = a.work[i];
    entry = entry_at<PagedRow>(a.pages.queries, piece.x);
    number = piece.x;
    cut = piece.y;
  }
  __device__ __forceinline__ PagedTile16 tile(const PagedArgs<bf16>& a) const { return {a, {entry, 0, number}}; }
  __device__ __forceinline__ int begin() const { return cut * kCut16; }
  __device__ __forceinline__ int end() const { return min(entry.slots, begin() + kCut16); }
};

// ---- by cp.async: on compute capability 8.0, and rows with lists

// blockIdx.x is a piece: a cut of a row alone, or its list.
template <int kD, bool kMass>
__global__ void __launch_bounds__(kThreads, 2) decode16(const PagedArgs<bf16> a) {
  __shared__ typename SlotLoader<kD>::Memory notes;
  await_kernel_before();
  const EntryCut piece(a, blockIdx.x);
  PagedTile16 e = piece.tile(a);
  const int head_dim = a.pages.head_dim;
  const PagedTiles<kD, true> s;
  SlotLoader<kD> loader(e, notes);
  const Softmax softmax{a.scale * kLog2E};
  const SharedTile<kD> v = s.template v<kD>();
  load_tile<16>(s.q(), a.q, e.rows, head_dim, a.vector, [&](int row) { return e.query(row); });
  SharedRows16<kD> r(s.shared());
  if (!kMass && e.list) {
    const auto k = s.template k<kSlots>();
    ListedTiles tiles{e.list, a.budget[e.t.table_row], a.block, e.t.slots};
    Listed of_values, of_keys, next;
    FourSlots four;
    bool left = true;
    const auto take = [&] {
      left = tiles.left();
      if (!left) return;
      const ListedTile tile = tiles.take();
      next = tile.listed;
      four = four_of(e, tile);
    };
    take();
    for_tiles([&](int) { return left; },
              [&](int) {
                of_keys = next;
                loader.note(four);
                loader.keys(k);
                take();
              },
              [&](int) {
                of_values = of_keys;
                loader.template values<kSlots>(v, 0);
              },
              [&](int) { r.score_pages(s.q(), k, softmax, of_values); },
              [&](int) { r.weigh_pages(softmax, of_values); }, [&](int) { r.add_pages(AcrossTile<kD>{v}); });
  } else {
    const auto k = s.template k<kBlock16>();
    e.slots = piece.end();
    const auto begin = [&](int i) { return piece.begin() + i * kBlock16; };
    FourSlots four = four_of(e, begin(0));
    for_tiles([&](int i) { return begin(i) < e.slots; },
              [&](int i) {
                loader.note(four);
                loader.keys(k);
                four = four_of(e, begin(i + 1));
              },
              [&](int) { loader.template values<kBlock16>(v, 0); },
              [&](int i) { r.score(s.q(), k, e.slots - begin(i), softmax); },
              [&](int i) { r.weigh(softmax, e.slots - begin(i)); },
              [&](int i) {
                r.add(AcrossTile<kD>{v}, e.slots - begin(i));
                if constexpr (kMass) RowMasses<kD>(e).keep(r.shared, r.rows.top, begin(i));
              });
  }
  end_cut<kD, kMass>(e, piece.cut, r);
}

// ---- by tensor copies, on compute capability 9.0: rows that read everything

// The keys of eight pages, as tensor copies leave them: of a page rows of 64 elements, 16 slots of four channels.
template <int kD>
struct KeyPages {
  bf16* p;
  __device__ __forceinline__ void operand_b(uint32_t (&b)[4], int slot, int channel) const {
    const SharedTile<64> page{p + slot * kD};
    load_b<Major::mn>(b, [&](int i, int j) { return page.at((channel + j) / 4, (channel + j) % 4 * kPageSlots + i); });
  }
  // Slots [first, last) become zeros: they may never have been written.
  __device__ __forceinline__ void clear(int first, int last) const {
    for (int channel = threadIdx.x; channel < kD; channel += kThreads)
      for (int slot = first; slot < last; slot++) {
        const SharedTile<64> page{p + slot / kPageSlots * kPageSlots * kD};
        page.at(channel / 4, channel % 4 * kPageSlots + slot % kPageSlots)[slot % 8] = from_float<bf16>(0);
      }
    fence_proxy_async();  // before the next copy to there
  }
};
// Their values: [channel / 64][slot][64].
template <int kD>
struct ValuePages {
  bf16* p;
  __device__ __forceinline__ SharedTile<64> panel(int channel) const { return {p + channel / 64 * (kBlock16 * 64)}; }
  __device__ __forceinline__ void operand_b(uint32_t (&b)[4], int channel, int slot) const {
    AcrossTile<64>{panel(channel)}.operand_b(b, channel % 64, slot);
  }
  // Slots [first, last) become zeros: their values must not come in, times a weight of 0.
  __device__ __forceinline__ void clear(int first, int last) const {
    for (int i = threadIdx.x; i < (last - first) * (kD / 8); i += kThreads) {
      const int channel = i % (kD / 8) * 8;
      *reinterpret_cast<uint4*>(panel(channel).at(first + i / (kD / 8), channel % 64)) = {};
    }
    fence_proxy_async();  // before the next copy to there
  }
};

struct PageMaps {
  CUtensorMap k, v;
};
// A box of k is a page of a head, one of v 64 channels of it.
inline PageMaps page_maps(const char* op, const Pages<const bf16>& pages, int64_t count) {
  const uint64_t heads = static_cast<uint64_t>(count * pages.kv_heads), d = static_cast<uint64_t>(pages.head_dim);
  return {
      tensor_map<2>(op, pages.k, {64, heads * d / 4}, {128}, {64, static_cast<uint32_t>(d / 4)}, Swizzle::bytes_128),
      tensor_map<2>(op, pages.v, {d, heads * kPageSlots}, {d * 2}, {64, kPageSlots}, Swizzle::bytes_128)};
}

// A block decodes pieces blockIdx.x, + gridDim.x, ... with tiles of 128 slots, keys and values by turns in a ring:
//
//   ring    | K 0 | V 0 | K 1 | V 1 | ...           a tile is replaced as soon as no warp needs it, also by one of the
//   time ->  score  add   score  add  ...           next piece: between pieces memory does not rest
template <int kD>
struct PageRing {
  static constexpr int kTiles = 96 * 1024 / (2 * kBlock16 * kD);
  struct alignas(1024) Shared {
    bf16 tiles[kTiles][kBlock16 * kD];
    bf16 q[16 * kD];
    typename SharedRows16<kD>::Memory rows;
    Mbarrier full[kTiles];
  };
};

// Fills the ring of a block: its first warp does, the others call it to no effect.
template <int kD>
class PageStream {
  using Ring = PageRing<kD>;
  static constexpr int kPages = kBlock16 / kPageSlots;
  const PagedArgs<bf16>& a_;
  const PageMaps& maps_;
  typename Ring::Shared& s_;
  int piece_, at_, page_ = 0;  // at_: slot of the tile; page_: that of this lane
  unsigned filled_ = 0;
  EntryCut now_, next_;

  __device__ __forceinline__ EntryCut entry_cut(int piece) const { return {a_, min(piece, a_.pieces - 1)}; }
  __device__ __forceinline__ void take_page() {
    const int slot = at_ + static_cast<int>(threadIdx.x) % kPages * kPageSlots;
    if (slot < now_.end()) page_ = a_.pages.table[now_.entry.table_row * a_.pages.table_stride + slot / kPageSlots];
  }

 public:
  __device__ PageStream(const PagedArgs<bf16>& a, const PageMaps& maps, typename Ring::Shared& s)
      : a_(a),
        maps_(maps),
        s_(s),
        piece_(threadIdx.x < 32 ? static_cast<int>(blockIdx.x) : a.pieces),
        now_(entry_cut(piece_)),
        next_(entry_cut(piece_ + gridDim.x)) {
    at_ = now_.begin();
    take_page();
    for (int i = 0; i < Ring::kTiles; i++) fill();
  }
  // Fills the tile that comes next in the ring, if one is left.
  __device__ void fill() {
    if (piece_ >= a_.pieces) return;
    const int lane = threadIdx.x % 32, page = lane % kPages, panel = lane / kPages;
    const int pages = min(kPages, ceil_div(now_.end() - at_, kPageSlots));
    const int head = page_ * a_.pages.kv_heads + static_cast<int>(blockIdx.y);
    bf16* const tile = s_.tiles[filled_ % Ring::kTiles];
    Mbarrier* const full = &s_.full[filled_ % Ring::kTiles];
    const bool values = filled_++ % 2;
    if (lane == 0) mbarrier_arrive_expect(full, pages * kPageSlots * kD * 2);
    __syncwarp();
    if (page < pages && !values && panel == 0)
      tensor_copy(tile + page * kPageSlots * kD, maps_.k, 0, head * (kD / 4), full);
    if (page < pages && values && panel < kD / 64)
      tensor_copy(tile + (panel * kBlock16 + page * kPageSlots) * 64, maps_.v, panel * 64, head * kPageSlots, full);
    if (!values) return;
    at_ += kBlock16;
    if (at_ >= now_.end()) {
      piece_ += gridDim.x;
      now_ = next_;
      next_ = entry_cut(piece_ + gridDim.x);
      at_ = now_.begin();
    }
    take_page();
  }
};

template <int kD, bool kMass>
__global__ void __launch_bounds__(kThreads, 2)
    decode_pages(const PagedArgs<bf16> a, const __grid_constant__ PageMaps maps) {
#ifdef PARE_SM90A
  using Ring = PageRing<kD>;
  auto& s = *dynamic_smem<typename Ring::Shared>();
  if (threadIdx.x == 0) {
    prefetch_map(maps.k);
    prefetch_map(maps.v);
    for (Mbarrier& full : s.full) mbarrier_init(&full, 1);
    fence_proxy_async();
  }
  __syncthreads();
  await_kernel_before();
  PageStream<kD> stream(a, maps, s);
  const Softmax softmax{a.scale * kLog2E};
  const SharedTile<kD> q{s.q};
  unsigned used = 0;
  const auto await_tile = [&] { mbarrier_wait(&s.full[used % Ring::kTiles], used / Ring::kTiles % 2); };
  for (int i = blockIdx.x; i < a.pieces; i += gridDim.x) {
    const EntryCut piece(a, i);
    PagedTile16 e = piece.tile(a);
    e.slots = piece.end();
    load_tile<16>(q, a.q, e.rows, kD, a.vector, [&](int row) { return e.query(row); });
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // the queries are there
    SharedRows16<kD> r(s.rows);
    for (int begin = piece.begin(); begin < e.slots; begin += kBlock16) {
      const int present = e.slots - begin;
      const KeyPages<kD> k{s.tiles[used % Ring::kTiles]};
      await_tile();
      if (present < kBlock16 && present % 32) {
        k.clear(present, round_up(present, 32));
        __syncthreads();  // the zeros are there
      }
      r.score(q, k, present, softmax);
      used++;
      __syncthreads();  // everyone is done with the keys
      stream.fill();
      r.weigh(softmax, present);
      const ValuePages<kD> v{s.tiles[used % Ring::kTiles]};
      await_tile();
      if (present < kBlock16 && present % kPageSlots) v.clear(present, round_up(present, kPageSlots));
      __syncthreads();  // the weights are there, and the zeros
      r.add(v, present);
      if constexpr (kMass) RowMasses<kD>(e).keep(r.shared, r.rows.top, begin);
      used++;
      __syncthreads();  // everyone is done with the values
      stream.fill();
    }
    end_cut<kD, kMass>(e, piece.cut, r);
  }
#endif
}

}  // namespace pare::PARE_CUDA
