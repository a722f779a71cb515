// Shared code of the ops on pages of keys and values, and of ops that read listed blocks.
#pragma once
#include "cpu/glue.h"

namespace pare::cpu {

constexpr int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

// Nanoseconds of one (query, key) pair of one head, forward.
constexpr double pair_nanoseconds(int64_t head_dim) { return 4.0 * static_cast<double>(head_dim) / 50 + 0.4; }

// The entries, checked against rows, page table and pages.
const PagedRow* paged_rows(const char* op, const Tensor& queries, int64_t rows, const Tensor& table, int64_t pages);

// Which blocks queries read: a row of the lists belongs to one query row, which sees `total` slots.
class BlockLists {
 public:
  // Lists may be absent.
  BlockLists(const char* op, const Tensor& blocks, const Tensor& budget, int32_t block);

  bool listed(int64_t row, int64_t total) const {
    return args_.blocks && blocks_of(total, args_.block) > args_.budget[row];
  }
  int64_t count(int64_t row, int64_t total) const {  // slots that are read
    return listed(row, total) ? listed_slots(total, args_.budget[row], args_.block) : total;
  }
  // Checks a list.
  const int32_t* list(int64_t row, int64_t kv_head, int64_t total) const;
  const BlockListArgs& args() const { return args_; }

 private:
  const char* op_;
  BlockListArgs args_{};
};

// One row that reads what list row `list_row` of its key head says.
void attend_listed(const PagedArgs& a, const PagedRow& q, int64_t kv_head, const BlockLists& lists, int64_t list_row,
                   float* scratch);

// Scratch, in floats, of Kernels::attn_paged and of attend_listed for so many slots.
constexpr int64_t paged_scratch(int64_t slots, int64_t head_dim) {
  const int64_t padded = round16(head_dim);
  return (kAttnRows + (padded == head_dim ? 0 : slots)) * padded;
}
constexpr int64_t mass_scratch(int64_t slots) { return 7 * (slots + 64); }  // six rows of weights, maxima of blocks
constexpr int64_t listed_scratch(int64_t slots, int64_t head_dim) {
  return paged_scratch(slots, head_dim) + (slots + kPageSlots) * (2 * head_dim + 1);
}

}  // namespace pare::cpu
