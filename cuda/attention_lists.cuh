// Tiles of rows that read the blocks of slots that they list (AttnFwd::blocks), for the kernels in bf16.
//
// Neighbouring rows list much the same.  A tile is 64 pairs of an own row and a query head of a key head's group, in
// the order (row, head), and goes over the pages that any of its rows lists, ascending; their keys and values come to
// shared memory once for all.  Bits say which slots of a page each row lists, here in blocks of 4 slots:
//
//            page 0  page 3  page 4  page 9
//     row 0   1111    0100    0000    0001
//     row 1   1111    0000    0010    0011
//     row 2   1111    0100    0000    0001
//
// Order: a slot that a row does not list has weight +0, which changes no sum, and does not raise its maximum (list.h).
// So the bits of a row depend on its own list only, whatever the tile.
//
// Bytes: keys and values of a page once for each tile that reads it, from L2.  Limited by issue slots: addresses of
// copies, and masks.  Memory: the lists of 1024 blocks at a time, a bit a block and row.
#pragma once
#include "attention_mma.cuh"

namespace pare::PARE_CUDA {

// A tile of pairs (own row, head of the group of key head blockIdx.y): `first` counts pairs.  The last tiles begin
// first, as in HeadTile.
struct GroupTile : Tile {
  int kv = blockIdx.y, group, rows, own, owns;  // rows: pairs; own rows [own, own + owns) of the segment

  template <class T>
  __device__ explicit GroupTile(const Packed<T>& x)
      : Tile(find_tile<kRows16>(x.segments, x.n_segments, gridDim.x - 1 - blockIdx.x, x.group)), group(x.group) {
    rows = min(kRows16, len * group - first);
    own = first / group;
    owns = (first + rows - 1) / group + 1 - own;
  }
  // Return the own row of pair r in the segment, its row of q, its head, and the number of slots that it sees.
  __device__ __forceinline__ int own_of(int r) const { return (first + r) / group; }
  __device__ __forceinline__ int64_t row_of(int r) const { return row + own_of(r); }
  __device__ __forceinline__ int head(int r) const { return kv * group + (first + r) % group; }
  __device__ __forceinline__ int sees(int r) const { return slots_of(own_of(r)); }
  __device__ __forceinline__ int slots_of(int i) const { return parent_len + i + 1; }  // own row i

  // Return the number of slots that pair r reads without a list, and, by a warp, the most that any pair does.
  __device__ __forceinline__ int without_list(const BlockLists& b, int r) const {
    return r < rows && !b.listed(row_of(r), sees(r)) ? sees(r) : 0;
  }
  __device__ __forceinline__ int most_without_list(const BlockLists& b) const {
    int most = 0;
    for (int r = threadIdx.x % 32; r < rows; r += 32) most = max(most, without_list(b, r));
    for (int o = 1; o < 32; o *= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, o));
    return most;
  }
};
// Blocks for them, n rows of q: each segment wastes at most one tile.
template <class T>
dim3 group_grid(const char* op, const Packed<T>& x, int64_t n) {
  return dim3(blocks(op, n * x.group / kRows16 + x.n_segments, 1), static_cast<unsigned>(x.kv_heads));
}

// Keys or values of a segment and key head by slot, the parent's first.
struct SlotRows {
  const char *own, *parent;          // where slot 0 is, or would be
  int own_bytes, parent_bytes, len;  // from slot to slot; slots of the parent
  __device__ SlotRows(const Matrix<const bf16>& x, const Matrix<const bf16>& px, const SegmentRow& g, int column)
      : own(reinterpret_cast<const char*>(x.row(g.row - g.parent_len) + column)),
        parent(g.parent_len ? reinterpret_cast<const char*>(px.row(g.parent_row) + column) : nullptr),
        own_bytes(static_cast<int>(x.stride * sizeof(bf16))),
        parent_bytes(static_cast<int>(px.stride * sizeof(bf16))),
        len(g.parent_len) {}
  __device__ __forceinline__ const bf16* operator()(int slot) const {
    const bool of_parent = slot < len;
    return reinterpret_cast<const bf16*>((of_parent ? parent : own) +
                                         int64_t{slot} * (of_parent ? parent_bytes : own_bytes));
  }
  __device__ __forceinline__ const bf16* any() const { return (*this)(len); }  // there is always an own row
};

struct ListMemory {
  static constexpr int kWords = 32, kBlocks = kWords * 32;
  unsigned listed[kRows16][kWords];  // of each own row of the tile, bit i % 32 of word i / 32: block i of the window
  uint16_t pages[kBlocks];           // the first block of each page of the window that some row lists
};

// The pages that rows of a tile list, ascending, by a block of threads.  kAll: a row without a list lists every block;
// otherwise it lists none.
template <bool kAll>
class ListedPages {
  const GroupTile& t_;
  const BlockLists& b_;
  ListMemory& m_;
  const int slots_, in_page_;          // slots that its last row sees; blocks of a page
  int window_ = -ListMemory::kBlocks;  // its first block
  int next_ = 0, n_ = 0;               // of its pages

 public:
  __device__ ListedPages(const GroupTile& t, const BlockLists& b, ListMemory& m)
      : t_(t), b_(b), m_(m), slots_(t.slots_of(t.own + t.owns - 1)), in_page_(kPageSlots / b.block) {}

  // Returns true if a page is left.  By all threads.
  __device__ __forceinline__ bool left() {
    while (next_ >= n_ && (window_ + ListMemory::kBlocks) * b_.block < slots_) open_window();
    return next_ < n_;
  }
  // Begins to load the kSlots slots of the next pages: `columns` of them, zeros beyond, and where no page is left or
  // past the last slot.  Few instructions a copy, of which there are as many as of everything else in a turn.
  template <int kSlots, int kC>
  __device__ __forceinline__ void load(SharedTile<kC> dst, const SlotRows& rows, int columns, bool vector) const {
    constexpr int kAcross = kC / 8, kDown = kThreads / kAcross;  // copies to a row, rows at a time
    const auto slot_of = [&](int page) { return page < n_ ? first_slot(page) : slots_; };
    if (!vector) {
      load_tile<kSlots>(dst, rows.any(), kSlots, columns, false, [&](int i) {
        const int slot = slot_of(next_ + i / kPageSlots) + i % kPageSlots;
        return slot < slots_ ? rows(slot) : nullptr;
      });
      return;
    }
    const int first = threadIdx.x / kAcross, c = threadIdx.x % kAcross * 8;
#pragma unroll
    for (int page = 0; page < kSlots / kPageSlots; page++) {
      const int begin = slot_of(next_ + page) + first;
#pragma unroll
      for (int i = 0; i < kPageSlots; i += kDown) {
        const bool there = begin + i < slots_ && c < columns;
        cp_async_16(dst.at(page * kPageSlots + first + i, c), there ? rows(begin + i) + c : rows.any(), there ? 16 : 0);
      }
    }
  }
  // Returns the slots, of the kSlots of the next pages, that each of the 16 rows from `first` on lists, and goes on to
  // the pages after them.  By a whole warp.
  template <int kSlots>
  __device__ __forceinline__ PerRow<Listed> take(int first) {
    constexpr int kEach = kSlots / kPageSlots / 2;  // pages of a lane, all of one row
    const int lane = threadIdx.x % 32, r = min(first + lane % 16, t_.rows - 1), page = next_ + lane / 16 * kEach;
    unsigned mine = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (page + i < n_) mine |= slots_of(r, page + i) << i * kPageSlots;
    next_ += 2 * kEach;
    PerRow<Listed> listed;
    for_rows([&](LaneRow row) {
      listed[row] = __shfl_sync(kAllLanes, mine, row) | Listed{__shfl_sync(kAllLanes, mine, row + 16)}
                                                            << kEach * kPageSlots;
    });
    return listed;
  }

 private:
  __device__ __forceinline__ int first_slot(int page) const { return (window_ + m_.pages[page]) * b_.block; }
  // Returns a bit for each slot of the page that pair r lists.
  __device__ __forceinline__ unsigned slots_of(int r, int page) const {
    const int block = m_.pages[page], behind = first_slot(page) + kPageSlots - t_.sees(r);
    const unsigned blocks = m_.listed[t_.own_of(r) - t_.own][block / 32] >> block % 32;
    const unsigned four = (blocks & 1) | (blocks & 2) << 3 | (blocks & 4) << 6 | (blocks & 8) << 9;  // bits apart
    const unsigned slots = in_page_ == 1 ? (blocks & 1) * 0xffff : four * 15;
    return slots & 0xffff >> max(0, min(kPageSlots, behind));
  }
  // A warp a row notes its list, then each lane of every warp looks at a word.
  __device__ void open_window() {
    const int lane = threadIdx.x % 32;
    window_ += ListMemory::kBlocks;
    __syncthreads();  // everyone is done with the one before
    for (int i = threadIdx.x / 32; i < t_.owns; i += kWarps) {
      const int64_t row = t_.row + t_.own + i;
      const int total = t_.slots_of(t_.own + i);
      const bool listed = b_.listed(row, total);
      // From the word's first on.
      const int all = kAll && !listed ? ceil_div(total, b_.block) - window_ - lane * 32 : 0;
      m_.listed[i][lane] = all > 0 ? ~0u >> max(0, 32 - all) : 0;
      __syncwarp();
      if (!listed) continue;
      const int32_t* const list = b_.list(row, t_.kv);
      for (int e = lane; e < b_.budget[row]; e += 32) {
        const auto block = static_cast<unsigned>(list[e] - window_);
        if (block < ListMemory::kBlocks) atomicOr(&m_.listed[i][block / 32], 1u << block % 32);
      }
    }
    __syncthreads();
    unsigned some = 0;
    for (int i = 0; i < t_.owns; i++) some |= m_.listed[i][lane];
    if (in_page_ == 4) {  // a bit a page
      some |= some >> 2;
      some = (some | some >> 1) & 0x11111111;
    }
    int end = __popc(some);
    for (int o = 1; o < 32; o *= 2) {
      const int below = __shfl_up_sync(kAllLanes, end, o);
      if (lane >= o) end += below;
    }
    next_ = 0;
    n_ = __shfl_sync(kAllLanes, end, 31);
    if (threadIdx.x < 32)
      for (int page = end - __popc(some); some; some &= some - 1)
        m_.pages[page++] = static_cast<uint16_t>(lane * 32 + __ffs(static_cast<int>(some)) - 1);
    __syncthreads();
  }
};

}  // namespace pare::PARE_CUDA
