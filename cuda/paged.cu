// Attention over keys and values in pages, and copies of pages (AttnPaged, KvCopyPages).
//
// k_pages [pages, K, D, 16], v_pages [pages, K, 16, D]; page_table [sequences, max_pages] with any stride between
// rows; queries [S, 4]: PagedRow.  The rows of its entries in o [N, H, D] are overwritten.  D <= 256.
//
// Order: that of attn_fwd, with its code (attention.cuh, attention_mma.cuh), f32 and bf16, so a row has
// the bits that attn_fwd gives it in the packed sequence; f32 has those of the `cpu` table.  A tile holds the query
// rows of one key head, the heads of its group next to one another.  Slots at or past PagedRow::slots count as zeros
// and are not read.
//
// In bf16 rows alone, as in decoding, have a kernel of their own, if at most 16 heads share a key head: a block reads a
// cut of 1024 slots (of a list all slots), and its four warps share the slots.  Of a row of several cuts each block
// leaves its sums in memory, and the last to arrive merges all, ascending.  The masses of the slots that such a row
// reads are added up after its last cut, from the weights of each page, which lie in AttnPaged::weights till then: K is
// read once.  Those of other entries: paged_mass.cu.
//
// Bytes: K and V of the listed slots once for each 64 (f32: 16) query rows of a key head, and of each cut of several
// 4 (D + 2) a head twice; limited by memory bandwidth in decode.  Other tiles walk their slots alone.
#include "attention_mma.cuh"
#include "paged.cuh"
#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

namespace {

template <class T>
struct Args {
  T* o;
  const T* q;
  int64_t q_stride;
  Pages<const T> pages;
  const int32_t *blocks, *budget;  // null: everything is read
  int max_blocks, block;           // room of a list; slots of a selection block
  int heads, group;
  float scale;
  float *mass_pages, *weights;  // masses of rows alone; null: none
  const int32_t* first;
  float* results;      // of cuts: [S, cuts_of(max_pages), H, D + 2], the outputs before the division, maximum and sum
  unsigned* arrivals;  // [S, K]
  int most_cuts;
  bool vector;  // rows of q and of values are 16-byte aligned and D a multiple of 8
};

// Returns the number of blocks that the list of an entry leaves out; less than 1: it reads everything.
template <class T>
__device__ __forceinline__ int left_out(const Args<T>& a, const PagedRow& e) {
  return a.blocks && e.rows == 1 ? ceil_div(e.slots, a.block) - a.budget[e.table_row] : 0;
}

// A tile of kRows query rows of an entry, in the order (own row, head of the group), and the slots that they read.
// blockIdx.y is the key head.
template <class T, int kRows>
struct QueryTile {
  const Args<T>& a;
  const TileOf<PagedRow> t;
  const int kv;
  int rows = 0, slots = 0;
  const int32_t* list = nullptr;  // entries of one row may have one; in f32 its slots are all that there is

  __device__ __forceinline__ QueryTile(const Args<T>& args, const TileOf<PagedRow>& tile)
      : a(args), t(tile), kv(static_cast<int>(blockIdx.y)) {
    if (t.rows == 0) return;
    rows = min(kRows, t.rows * a.group - t.first);
    slots = visible(rows - 1);
    const int out = left_out(a, t);
    if (out <= 0) return;
    list = a.blocks + (int64_t{t.table_row} * a.pages.kv_heads + kv) * a.max_blocks;
    slots = t.slots - out * a.block;
  }
  // Return the number of slots that a row of the tile sees, its place in q and its place in o.
  __device__ __forceinline__ int visible(int row) const {
    return list ? slots : t.slots - t.rows + (t.first + row) / a.group + 1;
  }
  __device__ __forceinline__ const T* query(int row) const {
    return a.q + (t.row + (t.first + row) / a.group) * a.q_stride + head(row) * a.pages.head_dim;
  }
  __device__ __forceinline__ T* result(int row) const {
    return a.o + (int64_t{t.row + (t.first + row) / a.group} * a.heads + head(row)) * a.pages.head_dim;
  }
  // Returns the place where the sums of a cut of a row alone are left.
  __device__ __forceinline__ float* result_of_cut(int row, int cut) const {
    const int64_t at = int64_t{t.entry} * a.most_cuts + cut;
    return a.results + (at * a.heads + head(row)) * (a.pages.head_dim + 2);
  }
  __device__ __forceinline__ int head(int row) const { return kv * a.group + (t.first + row) % a.group; }
  // Returns the slot of the sequence that is read as the `slot`-th.
  __device__ __forceinline__ int where(int slot) const {
    return list ? list[slot / a.block] * a.block + slot % a.block : slot;
  }
};

template <int kColumns>
__global__ void __launch_bounds__(kThreads) attend32(const Args<float> a) {
  // blockIdx.x is the tile.
  const QueryTile<float, kRows32> e(
      a, find_tile<kRows32, PagedRow>(a.pages.queries, a.pages.n_queries, blockIdx.x, a.group));
  if (e.rows == 0) return;
  const int head_dim = a.pages.head_dim;
  const Shared32 s = shared32(head_dim);
  for (int i = threadIdx.x; i < e.rows * head_dim; i += kThreads) s.q[i] = e.query(i / head_dim)[i % head_dim];
  Rows32<kColumns> r;
  for (int begin = 0; begin < e.slots; begin += kSlots) {
    __syncthreads();  // everyone is done with the previous block
    for (int i = threadIdx.x; i < kSlots * head_dim; i += kThreads) {
      // Neighbouring threads: neighbouring slots of K, channels of V.
      const int k_slot = begin + i % kSlots, v_slot = begin + i / head_dim, k_c = i / kSlots, v_c = i % head_dim;
      if (k_slot < e.slots) {
        const int at = e.where(k_slot);
        s.k[i % kSlots * (head_dim + 1) + k_c] = *a.pages.k_at(a.pages.head(e.t.table_row, at, e.kv), at, k_c);
      }
      if (v_slot < e.slots) {
        const int at = e.where(v_slot);
        s.v[i] = *a.pages.v_at(a.pages.head(e.t.table_row, at, e.kv), at, v_c);
      }
    }
    __syncthreads();
    r.add_block(s, head_dim, e.rows, Softmax{a.scale * kLog2E}, [&](int row) { return e.visible(row) - begin; });
  }
  r.write(
      e.rows, [&](int row, float) { return e.result(row); }, head_dim);
}

// ---- bf16: four warps of 16 query rows, or that share 16

// The memory of a block: query rows (rows alone: 16 and what warps share), a tile of keys and one of values.
template <int kD, bool kAlone>
struct Tiles16 {
  static constexpr size_t kKeys = 2 * kBlock16 * kD,
                          kRowBytes =
                              kAlone ? 2 * 16 * kD + sizeof(typename SharedRows16<kD>::Memory) : 2 * kRows16 * kD,
                          kBytes = kRowBytes + 2 * kKeys;
  char* const p = dynamic_smem<char>();
  __device__ SharedTile<kD> q() const { return {reinterpret_cast<bf16*>(p)}; }
  __device__ auto& shared() const { return reinterpret_cast<typename SharedRows16<kD>::Memory&>(p[2 * 16 * kD]); }
  template <int kSlots>
  __device__ AcrossTile<kSlots> k() const {  // [kD][kSlots]
    return {{reinterpret_cast<bf16*>(p + kRowBytes)}};
  }
  template <int kV>
  __device__ SharedTile<kV> v() const {  // [kSlots][kV]
    return {reinterpret_cast<bf16*>(p + kRowBytes + kKeys)};
  }
};

template <int kD>
constexpr size_t kBytes16 = std::max(Tiles16<kD, false>::kBytes, Tiles16<kD, true>::kBytes);

// Four slots that a lane has of a tile: where they lie, and how many of them count.  Four that begin at a multiple of
// four always lie together.
struct FourSlots {
  int page, slot, valid;  // page: of the cache; slot: of the first, in the sequence
};
__device__ __forceinline__ FourSlots four_at(const QueryTile<bf16, kRows16>& e, int slot, int valid) {
  return {valid > 0 ? e.a.pages.table[e.t.table_row * e.a.pages.table_stride + slot / kPageSlots] : 0, slot, valid};
}
// Return a lane's four of the block from `begin` on, or of a tile of listed slots.
__device__ __forceinline__ FourSlots four_of(const QueryTile<bf16, kRows16>& e, int begin) {
  const int slot = begin + static_cast<int>(threadIdx.x) % 32 * 4;
  return four_at(e, slot, max(0, min(4, e.slots - slot)));
}
__device__ __forceinline__ FourSlots four_of(const QueryTile<bf16, kRows16>& e, const ListedTile& tile) {
  const int i = static_cast<int>(threadIdx.x) % 32 * 4;
  return i < kSlots ? four_at(e, tile.slot(i), __popc(static_cast<unsigned>(tile.listed >> i & 15))) : FourSlots{};
}

// Fills tiles with the slots of the tile, of which each lane knows four; zeros where they do not count and beyond D.
// Few instructions a copy: with few sequences, a block of slots waits for them.
template <int kD>
class Loader {
  static constexpr int kFours = kBlock16 / 4;
  // Every warp notes for its own use how many elements lie before each four, and how many of it count.
  struct Notes {
    int64_t k[kFours], v[kFours];
    int valid[kFours];
  };
  const QueryTile<bf16, kRows16>& e_;
  Notes& notes_;

 public:
  using Memory = Notes[kWarps];
  __device__ Loader(const QueryTile<bf16, kRows16>& e, Memory& m) : e_(e), notes_(m[threadIdx.x / 32]) {}

  // Notes the tile that keys() and values() load.
  __device__ __forceinline__ void note(const FourSlots& four) {
    const int head_dim = e_.a.pages.head_dim, lane = threadIdx.x % 32;
    __syncwarp();  // the last tile's are done with
    const int64_t head = (int64_t{four.page} * e_.a.pages.kv_heads + e_.kv) * head_dim * kPageSlots;
    notes_.k[lane] = head + four.slot % kPageSlots;
    notes_.v[lane] = head + four.slot % kPageSlots * head_dim;
    notes_.valid[lane] = four.valid;
    __syncwarp();
  }
  template <int kTile>
  __device__ __forceinline__ void keys(AcrossTile<kTile> to) const {
    constexpr int kDown = kThreads / (kTile / 8);  // channels at a time, each 8 slots a thread
    const Pages<const bf16>& pages = e_.a.pages;
    const int n = threadIdx.x % (kTile / 8) * 8, first = threadIdx.x / (kTile / 8);
    const int64_t low = notes_.k[n / 4], high = notes_.k[n / 4 + 1];
    const int of_low = notes_.valid[n / 4] * 2, of_high = notes_.valid[n / 4 + 1] * 2;  // bytes
    const auto copy_keys = [&](auto copy) {
#pragma unroll
      for (int i = 0; i < kD / kDown; i++) {
        const int c = i * kDown + first;
        copy(to.tile.at(c, n), c * kPageSlots, c < pages.head_dim);
      }
    };
    if (low % 8 == 0 && (of_high == 0 || (high == low + 4 && of_low == 8)))
      copy_keys([&](bf16* p, int c, bool there) { cp_async_16(p, pages.k + low + c, there ? of_low + of_high : 0); });
    else
      copy_keys([&](bf16* p, int c, bool there) {
        cp_async_8(p, pages.k + low + c, there ? of_low : 0);
        cp_async_8(p + 4, pages.k + high + c, there ? of_high : 0);
      });
  }
  // Loads channels [channel, channel + kV) of the values of kTile slots.
  template <int kTile, int kV>
  __device__ __forceinline__ void values(SharedTile<kV> to, int channel) const {
    const int head_dim = e_.a.pages.head_dim;
    const auto there = [&](int slot) { return slot % 4 < notes_.valid[slot / 4]; };
    const bf16* const all = e_.a.pages.v + channel;
    if (!e_.a.vector) {
      load_tile<kTile>(to, all, kTile, head_dim - channel, false,
                       [&](int i) { return there(i) ? all + notes_.v[i / 4] + i % 4 * head_dim : nullptr; });
      return;
    }
    constexpr int kAcross = kV / 8, kRows = kThreads / kAcross;  // copies to a row, rows at a time
    const int row = threadIdx.x / kAcross, c = threadIdx.x % kAcross * 8;
    const bf16* const v = all + row % 4 * head_dim + c;
    int64_t before[kTile / kRows];  // all before the first copy, which no load may pass
    unsigned copied = 0;
#pragma unroll
    for (int i = 0; i < kTile / kRows; i++) {
      before[i] = notes_.v[(i * kRows + row) / 4];
      copied |= unsigned{channel + c < head_dim && there(i * kRows + row)} << i;
    }
#pragma unroll
    for (int i = 0; i < kTile / kRows; i++)
      cp_async_16(to.at(i * kRows + row, c), v + before[i], copied >> i & 1 ? 16 : 0);
  }
};

// Adds up the masses of the slots that a row alone reads.  Weights lie in memory until the maximum and the sum of the
// row are known: of each page and key head those of each head of the group, [group][16], and, in the last page of a
// block of slots, the maxima that those of the block are relative to, [group].
template <int kD>
class Masses {
  using Shared = typename SharedRows16<kD>::Memory;
  const QueryTile<bf16, kRows16>& e_;
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
  __device__ __forceinline__ explicit Masses(const QueryTile<bf16, kRows16>& e)
      : e_(e), group_(e.a.group), first_(e.a.first[e.t.entry]) {}

  // Keeps the weights of the block that begins at slot `begin`, and what they are relative to.
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

// Returns true if the entry is a row alone, which decode16 takes.
__device__ __forceinline__ bool is_alone(const Args<bf16>& a, const PagedRow& e) {
  return e.rows == 1 && a.group <= 16;
}
static_assert(kCut16 == kAttnCut);
__device__ __forceinline__ int cuts_of(int slots) { return ceil_div(slots, kCut16); }

// Merges the cuts of a row alone, a warp a row, and leaves its maximum and 1 / its sum in shared.top.
template <int kD>
__device__ void merge_cuts(const QueryTile<bf16, kRows16>& e, int cuts, typename SharedRows16<kD>::Memory& shared) {
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

// Attends to one cut of a row alone, or to its list.
template <int kD, bool kMass>
__device__ __forceinline__ void decode(QueryTile<bf16, kRows16> e, int cut, typename Loader<kD>::Memory& notes) {
  const Args<bf16>& a = e.a;
  const int head_dim = a.pages.head_dim;
  const Tiles16<kD, true> s;
  Loader<kD> loader(e, notes);
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
              [&](int) { r.weigh_pages(softmax, of_values); }, [&](int) { r.add_pages(v); });
  } else {
    const auto k = s.template k<kBlock16>();
    e.slots = min(e.slots, (cut + 1) * kCut16);
    const auto begin = [&](int i) { return cut * kCut16 + i * kBlock16; };
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
                r.add(v, e.slots - begin(i));
                if constexpr (kMass) Masses<kD>(e).keep(r.shared, r.rows.top, begin(i));
              });
  }
  r.finish();
  const int cuts = e.list ? 1 : cuts_of(e.t.slots);
  if (cuts == 1) {
    r.write(
        e.rows, [&](int i) { return e.result(i); }, head_dim);
    if constexpr (kMass) r.share_totals();
  } else {
    r.leave(
        e.rows, [&](int i) { return e.result_of_cut(i, cut); }, head_dim);
    if (!is_last_to_arrive(&a.arrivals[e.t.entry * a.pages.kv_heads + e.kv], cuts)) return;
    merge_cuts<kD>(e, cuts, r.shared);
  }
  if constexpr (kMass) Masses<kD>(e).add(r.shared);
}

// blockIdx.x is a piece, a cut of a row alone or its list; the last block takes what pieces the host did not count.
template <int kD, bool kMass>
__global__ void __launch_bounds__(kThreads, 2) decode16(const Args<bf16> a) {
  __shared__ typename Loader<kD>::Memory notes;
  await_kernel_before();
  const int n = a.pages.n_queries;
  const auto entry = [&](int i) { return entry_at<PagedRow>(a.pages.queries, i); };
  for (int piece = blockIdx.x;; piece++) {
    const Piece p = find_piece(n, piece, [&](int i) {
      const PagedRow e = entry(i);
      return !is_alone(a, e) ? 0 : left_out(a, e) > 0 ? 1 : cuts_of(e.slots);
    });
    if (p.owner == n) return;
    decode<kD, kMass>({a, {entry(p.owner), 0, p.owner}}, p.index, notes);
    if (blockIdx.x + 1 < gridDim.x) return;
  }
}

// blockIdx.x is a tile of 64 query rows.
template <int kD>
__global__ void __launch_bounds__(kThreads, kD == 64 ? 2 : 1) attend16(const Args<bf16> a) {
  __shared__ typename Loader<kD>::Memory notes;
  const int n = a.pages.n_queries;
  const Piece p = find_piece(n, blockIdx.x, [&](int i) {
    const PagedRow e = entry_at<PagedRow>(a.pages.queries, i);
    return is_alone(a, e) ? 0 : ceil_div(e.rows * a.group, kRows16);
  });
  if (p.owner == n) return;
  const QueryTile<bf16, kRows16> e(a, {entry_at<PagedRow>(a.pages.queries, p.owner), p.index * kRows16, p.owner});
  constexpr int kV = kValues16<kD>;
  const int head_dim = a.pages.head_dim, first = threadIdx.x / 32 * 16, channel = blockIdx.z * kV;
  const Tiles16<kD, false> s;
  Loader<kD> loader(e, notes);
  const Softmax softmax{a.scale * kLog2E};
  const auto begin = [](int i) { return i * kBlock16; };
  const auto k = s.template k<kBlock16>();
  const SharedTile<kV> v = s.template v<kV>();
  load_tile<kRows16>(s.q(), a.q, e.rows, head_dim, a.vector, [&](int row) { return e.query(row); });
  typename Rows16<kD, kV>::Total total;
  Rows16<kD, kV> r(total);
  FourSlots four = four_of(e, 0);
  for_tiles([&](int i) { return begin(i) < e.slots; },
            [&](int i) {
              loader.note(four);
              loader.keys(k);
              four = four_of(e, begin(i + 1));
            },
            [&](int) { loader.template values<kBlock16>(v, channel); },
            [&](int i) { r.score(s.q(), first, k, e.slots - begin(i)); },
            [&](int i) {
              if (ends_cut(i)) r.end_cut();
              r.weigh(softmax, [&](int row) { return e.visible(first + row) - begin(i); });
            },
            [&](int i) { r.add(v, e.slots - begin(i)); });
  r.write(
      e.rows - first, [&](int i, float) { return e.result(first + i) + channel; }, head_dim - channel);
}

// Returns the grid of tiles of tile_rows query rows, for at most `rows` rows: each entry wastes at most one tile.
template <class T>
dim3 tiles(const Args<T>& a, int64_t rows, int64_t tile_rows) {
  return {blocks("attn_paged", rows * a.group / tile_rows + a.pages.n_queries, 1),
          static_cast<unsigned>(a.pages.kv_heads)};
}
// pieces: of rows alone, as the caller counts them.
void attend(const Args<float>& a, int64_t rows, int64_t /*pieces*/, Stream stream) {
  const int head_dim = a.pages.head_dim;
  launch("attn_paged",
         head_dim <= 64    ? attend32<2>
         : head_dim <= 128 ? attend32<4>
                           : attend32<8>,
         {.grid = tiles(a, rows, kRows32), .block = kThreads, .smem = smem32(head_dim)}, stream, a);
}
template <int kD>
void attend(const Args<bf16>& a, int64_t rows, int64_t pieces, Stream stream) {
  const char* op = "attn_paged";
  if (a.group <= 16)
    launch(op, a.mass_pages ? decode16<kD, true> : decode16<kD, false>,
           {.grid = dim3(blocks(op, std::max<int64_t>(pieces, 1), 1), static_cast<unsigned>(a.pages.kv_heads)),
            .block = kThreads,
            .smem = Tiles16<kD, true>::kBytes,
            .early = true},
           stream, a);
  if (a.group <= 16 && rows <= a.pages.n_queries) return;  // rows alone
  dim3 grid = tiles(a, rows, kRows16);
  grid.z = kD / kValues16<kD>;
  launch(op, attend16<kD>, {.grid = grid, .block = kThreads, .smem = Tiles16<kD, false>::kBytes}, stream, a);
}
void attend(const Args<bf16>& a, int64_t rows, int64_t pieces, Stream stream) {
  const int head_dim = a.pages.head_dim;
  head_dim <= 64    ? attend<64>(a, rows, pieces, stream)
  : head_dim <= 128 ? attend<128>(a, rows, pieces, stream)
                    : attend<256>(a, rows, pieces, stream);
}

// blockIdx.x is a pair (src, dst) of pages of `words` 4-byte words.
__global__ void __launch_bounds__(kThreads)
    copy_pages(uint32_t* pages, int64_t words, const int32_t* __restrict__ pairs) {
  const uint32_t* from = pages + pairs[2 * blockIdx.x] * words;
  uint32_t* to = pages + pairs[2 * blockIdx.x + 1] * words;
  for (int64_t i = threadIdx.x; i < words; i += kThreads) copy_word(to + i, from + i);
}

}  // namespace

void add_mass(const AttnPaged& a, Stream stream);  // paged_mass.cu

// For wide heads no kernel takes more shared memory than those of attn_paged.
void expect_head_dim(DType act, int64_t head_dim) {
  const Machine& m = machine();
  expect(act == DType::f32 || act == DType::bf16, "expect_head_dim: act ", dtype_name(act));
  if (head_dim > 256) fail(m.name, ": heads of ", head_dim, " channels, but the kernels are written for 256 at most");
  const size_t bytes = act == DType::f32 ? smem32(static_cast<int>(head_dim))
                       : head_dim <= 64  ? kBytes16<64>
                       : head_dim <= 128 ? kBytes16<128>
                                         : kBytes16<256>;
  if (bytes > m.shared_memory)
    fail(m.name, ": heads of ", head_dim, " channels in ", dtype_name(act), " need ", bytes,
         " bytes of shared memory for a block, which has ", m.shared_memory, "; run with --device cpu");
}

void attn_paged(const AttnPaged& a, Stream stream) {
  const char* op = "attn_paged";
  with_act(op, a.q, [&](auto type) {
    using T = decltype(type);
    Args<T> x{};
    x.pages = pages_of<const T>(op, a.k_pages, a.v_pages, a.page_table, a.queries);
    const int64_t n = a.q.shape[0], heads = a.q.shape[1];
    x.q_stride = a.q.stride[0];
    if (a.blocks) {
      x.blocks = a.blocks.as<int32_t>();
      x.budget = a.budget.as<int32_t>();
      x.max_blocks = static_cast<int>(a.blocks.shape[2]);
      x.block = a.block;
    }
    if (n == 0 || x.pages.n_queries == 0) return;
    x.o = a.o.as<T>();
    x.q = a.q.as<T>();
    x.heads = static_cast<int>(heads);
    x.group = static_cast<int>(heads / x.pages.kv_heads);
    x.scale = a.scale;
    const bool pages_aligned = aligned16(a.k_pages, {}) && aligned16(a.v_pages, {});
    expect(sizeof(T) == 4 || pages_aligned, op, ": pages must be 16-byte aligned");
    expect(sizeof(T) == 4 || x.group <= 16 || (!a.blocks && !a.mass_pages), op, ": ", x.group,
           " query heads share a key head; with lists or masses at most 16 can");
    if (sizeof(T) == 2 && a.mass_pages) {
      expect(a.weights && aligned16(a.weights, {}), op, ": masses need 16-byte aligned weights");
      x.mass_pages = a.mass_pages.as<float>();
      x.weights = a.weights.as<float>();
      x.first = a.first.as<int32_t>();
    }
    x.vector = aligned16(a.q, {x.q_stride, x.pages.head_dim});
    if (const int64_t most = paged_cuts(a.page_table.shape[1] * kPageSlots); sizeof(T) == 2 && most > 1) {
      expect(a.cuts.results && a.cuts.arrivals, op, ": rows of several cuts need memory for their results");
      x.results = a.cuts.results.as<float>();
      x.most_cuts = static_cast<int>(most);
      x.arrivals = reinterpret_cast<unsigned*>(a.cuts.arrivals.as<int32_t>());
    }
    attend(x, n, a.pieces, stream);
  });
  if (a.mass_pages) add_mass(a, stream);
}

void kv_copy_pages(const KvCopyPages& a, Stream stream) {
  const char* op = "kv_copy_pages";
  if (a.pairs.shape[0] == 0) return;
  for (const Tensor& t : {a.k_pages, a.v_pages, a.pos_pages, a.mass_pages}) {
    if (!t) continue;
    const int64_t bytes = t.stride[0] * static_cast<int64_t>(dtype_size(t.dtype));
    expect(bytes % 4 == 0, op, ": a page of ", t, " is not a whole number of words");
    launch(op, copy_pages, {.grid = blocks(op, a.pairs.shape[0], 1), .block = kThreads}, stream,
           static_cast<uint32_t*>(t.data), bytes / 4, a.pairs.as<int32_t>());
  }
}

}  // namespace pare::PARE_CUDA
