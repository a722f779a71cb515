// Rotates a pair and finds the slots of new rows, for the kernels of rope.cu and for products.
#pragma once
#include "fragment.cuh"
#include "paged.cuh"

namespace pare::PARE_CUDA {

struct Angles {
  const float* table;
  const int32_t* pos;
  __device__ const float* of(int64_t n, int half) const { return table + int64_t{pos[n]} * 2 * half; }
};
__device__ __forceinline__ float2 rotated(float a, float b, float cos, float sin) {
  return {a * cos - b * sin, b * cos + a * sin};
}

struct Positions {  // absent: null
  int32_t* pos_pages;
  const int32_t* pos;
};

__device__ __forceinline__ bool names(const int4* entries, int n, int i, int row) {
  return i < n && row >= entries[i].x && row - entries[i].x < entries[i].y;
}
// Returns the entry that names `row`, or one without rows.  In decoding it is most often number `row`.
__device__ inline PagedRow entry_of_row(const int4* entries, int n, int row) {
  if (names(entries, n, row, row)) return entry_at<PagedRow>(entries, row);
  for (int base = 0; base < n; base += 32)
    if (const unsigned found =
            __ballot_sync(kAllLanes, names(entries, n, base + static_cast<int>(threadIdx.x) % 32, row)))
      return entry_at<PagedRow>(entries, base + __ffs(static_cast<int>(found)) - 1);
  return {};
}
// Returns the slot of a row that an entry names.
__device__ __forceinline__ int slot_of_row(const PagedRow& entry, int row) {
  return entry.slots - entry.rows + row - entry.row;
}

// The slots of the two rows that a lane has (LaneRow), of the 16 rows of a warp from `row` on; a row with page -1 is
// not written.  Whole warps construct it.
struct NewSlots {
  PerRow<int> page, slot;
  NewSlots() = default;
  template <class T>
  __device__ NewSlots(const Pages<T>& pages, int row, int rows) {
    const int lane = threadIdx.x % 32, own = row + lane % 16;  // each lane looks one row up
    PagedRow entry{};
    if (own < rows && names(pages.queries, pages.n_queries, own, own)) entry = entry_at<PagedRow>(pages.queries, own);
    for (unsigned left = __ballot_sync(kAllLanes, own < rows && entry.rows == 0) & 0xffff; left; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const PagedRow found = entry_of_row(pages.queries, pages.n_queries, row + i);
      if (lane % 16 == i) entry = found;
    }
    const int own_slot = entry.rows ? slot_of_row(entry, own) : 0;
    const int own_page = entry.rows ? pages.page(entry.table_row, own_slot) : -1;
    for_rows([&](LaneRow r) {
      page[r] = __shfl_sync(kAllLanes, own_page, r);
      slot[r] = __shfl_sync(kAllLanes, own_slot, r);
    });
  }
};

}  // namespace pare::PARE_CUDA
