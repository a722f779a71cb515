// What the ops on pages of keys and values share.
#pragma once
#include "cpu/glue.h"

namespace pare::cpu {

// The entries, checked against rows, page table and pages.
const PagedRow* paged_rows(const char* op, const Tensor& queries, int64_t rows, const Tensor& table, int64_t pages);

void expect_block(const char* op, int32_t block);

// Which blocks queries read: a row of the lists belongs to one query row, which sees `total` slots.
class BlockLists {
 public:
  BlockLists() = default;  // no lists
  BlockLists(const char* op, const Tensor& blocks, const Tensor& budget, int32_t block, int64_t rows, int64_t kv_heads);

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
  const char* op_ = nullptr;
  BlockListArgs args_{};
};

// How one key head of a row chooses `budget` of `all` blocks.
struct BlockChoice {
  BlockScoreArgs blocks;
  int64_t all, budget;
  int32_t first, last;  // first_blocks, last_blocks of the op
  int64_t scored() const { return all - first - last; }
  // An error if the op's operands and its rule cannot give that many; max_listed, max_scored: room of a list, of
  // scores.
  void expect_possible(const char* op, int64_t row, int64_t max_listed, int64_t max_scored) const;
};
// list [budget]; score [scored()], as the ops store it.  Scratch: width + 16.
void choose_blocks(int32_t* list, float* score, const BlockChoice& c, float* scratch);

// One row that reads what list row `list_row` of its key head says.
void attend_listed(const PagedArgs& a, const PagedRow& q, int64_t kv_head, const BlockLists& lists, int64_t list_row,
                   float* scratch);

// Scratch, in floats, of Kernels::attn_paged and of attend_listed for so many slots.
constexpr int64_t paged_scratch(int64_t slots, int64_t width) {
  const int64_t padded = (width + 15) / 16 * 16;
  return (kAttnRows + (padded == width ? 0 : slots)) * padded;
}
constexpr int64_t mass_scratch(int64_t slots) { return 7 * (slots + 64); }  // six rows of weights, maxima of blocks
constexpr int64_t listed_scratch(int64_t slots, int64_t width) {
  return paged_scratch(slots, width) + (slots + kPageSlots) * (2 * width + 1);
}

}  // namespace pare::cpu
