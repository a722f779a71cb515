// Shared code of the ops on pages of keys and values.
#pragma once
#include <vector>

#include "ops/paged.h"
#include "ref/ref.h"

namespace pare::ref {

// The pages of one sequence: slot -> page; its place there is slot % kPageSlots.
struct SlotPages {
  View<int32_t> table;
  int64_t table_row;
  int64_t page(int64_t slot) const { return table(table_row, slot / kPageSlots); }
};

// The entries of `queries`, checked against the rows of the pass, the page table and the number of pages.
std::vector<PagedRow> read_queries(const char* op, const Tensor& queries, const Tensor& page_table, int64_t rows,
                                   int64_t pages);

}  // namespace pare::ref
