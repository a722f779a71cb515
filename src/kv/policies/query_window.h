// A ring of the newest queries of every sequence, by which SnapKV and R-KV score keys.
#pragma once
#include <vector>

#include "kv/policy.h"

namespace pare {

class QueryWindow {
 public:
  // Allocates kv.queries from `kv`: act [layers * sequences * window, H D].
  QueryWindow(const ModelConfig& config, KvCache& cache, Arena& kv, int64_t window);

  void begin(const std::vector<PagedRun>& runs, Inputs& inputs);  // which rows of the pass go where
  void store(const KvPass& pass);
  void fork(int parent, int child);

  int64_t size() const { return window_; }
  Tensor rows() const { return ring_.heads(heads_); }
  // The ring of a sequence in a layer; the query of position p lies at p % size().
  int32_t first_row(int layer, int sequence) const {
    return static_cast<int32_t>((layer * sequences_ + sequence) * window_);
  }

 private:
  Tensor layer_rows(int layer) const { return ring_.rows(layer * sequences_ * window_, sequences_ * window_); }

  KvCache& cache_;
  const int64_t heads_, window_, sequences_;
  Tensor ring_;
  Tensor index_;       // i32 [n, 2]: (row of the pass, row of a layer's ring)
  Tensor fork_index_;  // i32 [layers * window, 2]: rows of the ring, from and to
};

}  // namespace pare
