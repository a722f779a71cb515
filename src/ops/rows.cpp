#include "ops/rows.h"

#include <map>

namespace pare {

AttnExtent attn_extent(std::span<const SegmentRow> segments, bool apart, int64_t pairs) {
  AttnExtent e{.pairs = pairs};
  std::map<int32_t, int64_t> readers;  // of the parent at this row: rows of its members, and its own
  for (const SegmentRow& s : segments)
    if (s.parent_len) readers[s.parent_row] += s.len;
  for (const SegmentRow& s : segments) {
    e.rows = std::max<int64_t>(e.rows, s.len);
    e.longest = std::max<int64_t>(e.longest, s.parent_len + s.len);
    const auto shared = apart ? readers.end() : readers.find(s.row);
    if (shared != readers.end()) shared->second += s.len;
    e.readers = std::max<int64_t>(e.readers, s.len);
  }
  for (const auto& [row, rows] : readers) e.readers = std::max(e.readers, rows);
  return e;
}

}  // namespace pare
