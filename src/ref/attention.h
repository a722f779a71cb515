// What the ops on segments of packed sequences share, and the lists of blocks that queries read.
#pragma once
#include <vector>

#include "ref/ref.h"

namespace pare::ref {

// The segments, checked against the rows of q and of the parents.
std::vector<SegmentRow> read_segments(const char* op, const Tensor& segments, int64_t rows, int64_t parent_rows);

// AttnFwd::lists, checked; absent if they are.
View<int32_t> read_lists(const char* op, const Tensor& lists, int64_t kv_heads, int64_t rows, int64_t parent_rows,
                         const std::vector<SegmentRow>& segments);

// The elements of one segment's slots: those of the parent's rows (listed or not), then its own.
template <class T>
struct SlotView {
  View<T> parent, own;
  SegmentRow segment;
  View<int32_t> lists{Tensor{}};
  T& operator()(int64_t slot, int64_t head, int64_t d) const {
    if (slot >= segment.parent_len) return own(segment.row + slot - segment.parent_len, head, d);
    if (!lists) return parent(segment.parent_row + slot, head, d);
    const int64_t row = lists(segment.parent_row + slot, head);
    return row >= 0 ? own(row, head, d) : parent(-1 - row, head, d);
  }
};

// Which slots a query reads of the `total` that it sees: those of its listed blocks, or, where there are no lists or
// the budget covers all blocks, every one.  A row of the lists belongs to one query row.
class BlockLists {
 public:
  BlockLists() = default;  // no lists
  BlockLists(const char* op, const Tensor& blocks, const Tensor& budget, int32_t block, int64_t rows, int64_t kv_heads);

  bool listed(int64_t row, int64_t total) const { return blocks_ && blocks_of(total, block_) > budget_(row); }
  int64_t count(int64_t row, int64_t total) const {
    return listed(row, total) ? listed_slots(total, budget_(row), block_) : total;
  }
  std::vector<int64_t> slots(int64_t row, int64_t kv_head, int64_t total) const;

 private:
  const char* op_ = nullptr;
  View<int32_t> blocks_{Tensor{}}, budget_{Tensor{}};
  int64_t room_ = 0;
  int32_t block_ = 0;
};

}  // namespace pare::ref
