// What the ops on pages of keys and values share.
#pragma once
#include <utility>

#include "cpu/glue.h"

namespace pare::cpu {

// The entries, checked against rows, page table and pages.
const PagedRow* paged_rows(const char* op, const Tensor& queries, int64_t rows, const Tensor& table, int64_t pages);

// The block lists of AttnPaged.
class BlockLists {
 public:
  BlockLists(const char* op, const AttnPaged& a);

  // Slots that an entry reads: fewer than it has if it has lists.
  int64_t slots(const PagedRow& q, int64_t entry) const {
    return blocks_ && q.rows == 1 ? listed_slots(q.slots, budget_[entry], block_) : q.slots;
  }

  // What the kernel is called with to read the listed blocks of one entry and key head: their pages in a row, or, where
  // blocks are smaller than pages, copies.  These lie in `scratch`.
  static int64_t scratch_floats(int64_t slots, int64_t width) { return (slots + kPageSlots) * (2 * width + 1); }
  std::pair<PagedArgs, PagedRow> gather(const PagedArgs& a, const PagedRow& q, int64_t entry, int64_t kv_head,
                                        float* scratch) const;

 private:
  const char* op_;
  const int32_t* blocks_ = nullptr;  // [S, K, room_]
  const int32_t* budget_ = nullptr;
  int64_t kv_heads_ = 0, room_ = 0;
  int32_t block_ = 0;
};

}  // namespace pare::cpu
