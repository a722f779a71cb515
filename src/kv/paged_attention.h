// Attention of the rollout, over keys and values in pages.
#pragma once
#include <vector>

#include "kv/kv_cache.h"
#include "kv/policy.h"
#include "model/model.h"
#include "ops/decode_work.h"

namespace pare {

struct PagedCuts;  // ops/paged.h

// One forward pass.  Its slots were appended to the cache before; attend() writes and then reads them.
class PagedAttention : public AttentionContext {
 public:
  // Brings the page tables on the device up to date; adds to `inputs` the list of rows, i32 [layers, runs, 4], the work
  // on those that decode, and what the policy needs, all to be uploaded before the first attend().  positions: i32 [N],
  // of the rows of the pass, on the device.  policy: null for a dense cache.  cuts: as AttnPaged wants them; it must
  // outlive this.
  PagedAttention(KvCache& cache, KvPolicy* policy, Arena& scratch, Inputs& inputs, const std::vector<PagedRun>& runs,
                 const Tensor& positions, const PagedCuts& cuts, float scale);
  void attend(int layer, const LinearFwd& qkv, const Rotation& rotation, const Tensor& q, const Tensor& k,
              const Tensor& v, const Tensor& o) override;

 private:
  KvCache& cache_;
  KvPolicy* const policy_;
  Arena& scratch_;
  const std::vector<PagedRun>& runs_;
  const Tensor positions_;
  const PagedCuts& cuts_;
  const float scale_;
  std::vector<PagedRow> host_;  // [layers, runs]
  std::vector<int64_t> reads_;  // slots, [layers, runs]
  Tensor queries_;              // i32 [layers * runs, 4]
  DecodeWork work_;
};

}  // namespace pare
