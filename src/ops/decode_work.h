// The work of the CUDA kernels of attn_paged on entries of one row, in bf16: the host lists it (AttnPaged::work), so
// that no block searches for its own, and the longest come first.  No bit depends on the order.
#pragma once
#include <span>
#include <vector>

#include "base/tensor.h"
#include "ops/rows.h"

namespace pare {

class Inputs;  // ops/inputs.h

// One cut of the slots of an entry, or 0, its list.
struct PagedPiece {
  int32_t entry, cut;
};
// The pieces of the entries of one row, longest first; entry i reads reads[i] slots, fewer than it has if by a list.
std::vector<PagedPiece> paged_work(std::span<const PagedRow> entries, std::span<const int64_t> reads);

// The pieces of all layers of a pass, which one upload brings to the device.
class DecodeWork {
 public:
  DecodeWork() = default;  // none
  // entries, reads: [layers, runs].  Takes as much memory of `inputs` as if no entry read by a list.
  DecodeWork(Inputs& inputs, int64_t layers, std::span<const PagedRow> entries, std::span<const int64_t> reads);
  // i32 [pieces, 2], of entries that are numbered within the layer.
  Tensor of(int64_t layer) const { return all_ ? all_.rows(ends_[layer], ends_[layer + 1] - ends_[layer]) : Tensor{}; }

 private:
  Tensor all_;
  std::vector<int64_t> ends_;  // 0, then where the pieces of each layer end
};

}  // namespace pare
