// Compressions: layers whose slots have reached budget + buffer are cut to the budget, after a pass.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "kv/policy.h"
#include "model/model.h"
#include "model/replay.h"

namespace pare {

class Compressor {
 public:
  // `kv` holds what merging remembers.
  Compressor(const Model& model, const KvSpec& spec, KvCache& cache, KvPolicy& policy, Arena& kv);

  // After a pass: compresses what is due among its sequences.
  void compress(const std::vector<PagedRun>& runs, Arena& scratch);
  void forked(int parent, int child);

  // Called for each compression, if set: a layer of `run` gives up `evicted` slots.
  std::function<void(const PagedRun& run, int64_t evicted)> counted;
  // Called with the choice of each compression, if set.  Waits for the device: the keep lists are read back.
  std::function<void(const PagedRun& run, KvTrace)> trace;

 private:
  struct Due {
    const PagedRun* run;
    int layer;
  };
  void compress_some(std::span<const Due> due, Arena& scratch);
  void move(const KvCompact& compact, std::span<const Due> due, Arena& scratch);
  Tensor thresholds(int sequence) const { return threshold_.rows(sequence * cache_.layers(), cache_.layers()); }

  const Model& model_;
  const KvSpec& spec_;
  KvCache& cache_;
  KvPolicy& policy_;
  const KvResidency residency_;
  Tensor threshold_;  // stat [sequences * layers]: D2O's, 0 before the first compression
};

}  // namespace pare
