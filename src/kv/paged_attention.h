// The attention context of the rollout: keys and values live in pages.
#pragma once
#include <vector>

#include "kv/kv_cache.h"
#include "model/model.h"

namespace pare {

// Rows [row, row + rows) of a forward pass are the newest tokens of one sequence.
struct PagedRun {
  int sequence;
  int32_t row, rows;
};

// One forward pass.  Its slots were appended to the cache before; attend() writes and then reads them.
class PagedAttention : public AttentionContext {
 public:
  // Brings the page tables on the device up to date; the list of rows, i32 [layers, runs, 4], lies in `scratch` for as
  // long as the caller lets it.  To be destroyed after the device has finished the pass.
  PagedAttention(KvCache& cache, Arena& scratch, const std::vector<PagedRun>& runs, float scale);
  void attend(int layer, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o) override;

 private:
  KvCache& cache_;
  const float scale_;
  struct Work {
    int64_t pairs = 0, slots = 0;
  };
  std::vector<Work> work_;      // per layer
  std::vector<PagedRow> host_;  // [layers, runs]
  Tensor queries_;              // i32 [layers * runs, 4]
};

}  // namespace pare
