// SnapKV (Li et al. 2024, arXiv 2404.14469): keys are scored by the attention of an observation window of queries.
#pragma once
#include "kv/policies/policies.h"
#include "kv/policies/query_window.h"

namespace pare {

class SnapKv : public KvPolicy {
 public:
  // The attention of the last `window` queries, pooled over `kernel` neighbours.
  SnapKv(const PolicyArgs& a, int64_t window, int64_t kernel);

  void begin(const std::vector<PagedRun>& runs, Inputs& inputs) override { window_.begin(runs, inputs); }
  void observe(const KvPass& pass) override { window_.store(pass); }
  void forked(int parent, int child) override { window_.fork(parent, child); }
  int64_t forced_last(int64_t) const override { return window_.size(); }
  int32_t window() const override { return static_cast<int32_t>(window_.size()); }
  int32_t window_row(int layer, int sequence) const override { return window_.first_row(layer, sequence); }
  void score(const KvCompressions& e, const Tensor& score, Arena& scratch) override;

 protected:
  const KvSpec& spec_;
  KvCache& cache_;

 private:
  const int64_t kernel_;
  const float scale_;
  QueryWindow window_;
};

}  // namespace pare
