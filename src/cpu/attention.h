// Shared code of the ops on segments of packed sequences.
#pragma once
#include <vector>

#include "cpu/glue.h"
#include "ops/attention.h"

namespace pare::cpu {

// The segments, checked against the rows that there are.
const SegmentRow* segment_rows(const char* op, const Tensor& t, int64_t rows, int64_t parent_rows);

// The own rows of segments in pieces of work, by key head, in an order in which neighbours share many slots: the
// siblings of a parent, one key head after another.
std::vector<AttnPiece> attn_pieces(const SegmentRow* s, int64_t count, int64_t kv_heads);

}  // namespace pare::cpu
