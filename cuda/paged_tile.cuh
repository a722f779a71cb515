// The shared parts of the kernels of attention over pages (paged.cu, paged_decode.cuh): their operands, the query rows
// of a tile and the slots that they read, and the copies of keys and values to shared memory.
#pragma once
#include "attention_mma.cuh"
#include "paged.cuh"

namespace pare::PARE_CUDA {

template <class T>
struct PagedArgs {
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
  const int2* work;  // (entry, cut): PagedPiece
  int pieces;
  float* results;      // of cuts: [S, cuts_of(max_pages), H, D + 2], the outputs before the division, maximum and sum
  unsigned* arrivals;  // [S, K]
  int most_cuts;
  bool vector;  // rows of q and of values are 16-byte aligned and D a multiple of 8
};

// Returns the number of blocks that the list of an entry leaves out; less than 1: it reads everything.
template <class T>
__device__ __forceinline__ int left_out(const PagedArgs<T>& a, const PagedRow& e) {
  return a.blocks && e.rows == 1 ? ceil_div(e.slots, a.block) - a.budget[e.table_row] : 0;
}

// A tile of kRows query rows of an entry, in the order (own row, head of the group), and the slots that they read.
// blockIdx.y is the key head.
template <class T, int kRows>
struct PagedTile {
  const PagedArgs<T>& a;
  const TileOf<PagedRow> t;
  const int kv;
  int rows = 0, slots = 0;
  const int32_t* list = nullptr;  // entries of one row may have one; in f32 its slots are all that there is

  __device__ __forceinline__ PagedTile(const PagedArgs<T>& args, const TileOf<PagedRow>& tile)
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

// ---- bf16: four warps of 16 query rows, or that share 16

using PagedTile16 = PagedTile<bf16, kRows16>;

// The memory of a block: query rows (rows alone: 16, and the memory of their warps), a tile of keys, one of values.
template <int kD, bool kAlone>
struct PagedTiles {
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
constexpr size_t kPagedBytes = std::max(PagedTiles<kD, false>::kBytes, PagedTiles<kD, true>::kBytes);

// Four slots that a lane has of a tile: where they lie, and how many of them count.  Four that begin at a multiple of
// four always lie together.
struct FourSlots {
  int page, slot, valid;  // page: of the cache; slot: of the first, in the sequence
};
__device__ __forceinline__ FourSlots four_at(const PagedTile16& e, int slot, int valid) {
  return {valid > 0 ? e.a.pages.table[e.t.table_row * e.a.pages.table_stride + slot / kPageSlots] : 0, slot, valid};
}
// Return a lane's four of the block from `begin` on, or of a tile of listed slots.
__device__ __forceinline__ FourSlots four_of(const PagedTile16& e, int begin) {
  const int slot = begin + static_cast<int>(threadIdx.x) % 32 * 4;
  return four_at(e, slot, max(0, min(4, e.slots - slot)));
}
__device__ __forceinline__ FourSlots four_of(const PagedTile16& e, const ListedTile& tile) {
  const int i = static_cast<int>(threadIdx.x) % 32 * 4;
  return i < kSlots ? four_at(e, tile.slot(i), __popc(static_cast<unsigned>(tile.listed >> i & 15))) : FourSlots{};
}

// Fills tiles with the slots of the tile, of which each lane knows four; zeros where they do not count and beyond D.
// Few instructions a copy: with few sequences, a block of slots waits for them.
template <int kD>
class SlotLoader {
  static constexpr int kFours = kBlock16 / 4;
  // Every warp notes for its own use how many elements lie before each four, and how many of it count.
  struct Notes {
    int64_t k[kFours], v[kFours];
    int valid[kFours];
  };
  const PagedTile16& e_;
  Notes& notes_;

 public:
  using Memory = Notes[kWarps];
  __device__ SlotLoader(const PagedTile16& e, Memory& m) : e_(e), notes_(m[threadIdx.x / 32]) {}

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

}  // namespace pare::PARE_CUDA
