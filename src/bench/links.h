// Speed of the ops between ranks (src/ops/data.h).
#pragma once
#include <functional>
#include <string>

#include "ops/device.h"

namespace pare {

struct LinkRate {
  std::string op;
  DType type;
  std::string way;  // what carries the bytes: Comm::Link::name(), or the host
  int64_t ranks, bytes;
  int64_t sent;    // bytes that this rank sends in a call
  double seconds;  // of a call on the slowest rank, the median of five samples
};

// Measures all_to_all and all_gather (bf16) of a tensor of `bytes` bytes of f32, of which each rank has or receives an
// equal part, rounded down to whole elements.  Called by all ranks; reports each op to `row` on all of them.  Throws
// Error(failed) if a result is wrong, Error(usage) if a part is empty.
void measure_links(Device& device, int64_t bytes, const std::function<void(const LinkRate&)>& row);

}  // namespace pare
