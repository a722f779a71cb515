// What the ops on the pages of a forward pass share.
#pragma once
#include "cpu/glue.h"

namespace pare::cpu {

// The entries of a pass, checked against rows, page table and pages.
const PagedRow* paged_rows(const char* op, const Tensor& queries, int64_t rows, const Tensor& table, int64_t pages);

}  // namespace pare::cpu
