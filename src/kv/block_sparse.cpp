// Quest (Tang et al. 2024, arXiv 2406.10774) and block top-k: all keys and values stay, a decoded token reads the
// blocks that promise most.  Quest bounds the scores of a block by the channelwise minimum and maximum of its keys;
// block top-k takes their mean.  Both choose per key head, for the group of its query heads.  With rollout.kv.spans
// they first choose spans of 256 tokens by the same scores, and then blocks within them.
#include <algorithm>

#include "kv/policies.h"

namespace pare {

namespace {

class BlockSparse : public KvPolicy {
 public:
  explicit BlockSparse(const PolicyArgs& a)
      : spec_(a.spec), config_(a.config), cache_(a.cache), kind_(summary_kind(a.spec)), budget_(a.spec) {}

  void begin(const std::vector<PagedRun>& runs, Inputs& inputs) override {
    host_.clear();
    for (const PagedRun& run : runs) {
      const int64_t n = blocks_of(run.tokens, spec_.block);
      host_.push_back(static_cast<int32_t>(run.decodes() ? budget_(n) : n));  // prompts read everything
    }
    uploaded_ = inputs.add("kv.block_budget", {std::ssize(host_)}, host_.data());
  }

  KvBlocks blocks(const KvPass& pass, Arena& scratch) override {
    if (pass.layer < spec_.dense_layers) return {};
    Device& device = cache_.device();
    const auto runs = static_cast<int64_t>(pass.runs.size());
    KvBlocks result{.blocks = {}, .budget = uploaded_, .block = static_cast<int32_t>(spec_.block), .slots = {}};
    int64_t pages = 0, spans = 0, most = 0, chosen = 0, scored = 0;
    for (int64_t i = 0; i < runs; i++) {
      const PagedRun& run = pass.runs[i];
      const int64_t n = blocks_of(run.tokens, spec_.block);
      result.slots.push_back(listed_slots(run.tokens, host_[i], spec_.block));
      pages += (run.tokens - 1) / kPageSlots - (run.tokens - run.rows) / kPageSlots + 1;
      if (spec_.spans) spans += run.tokens / kSpanSlots - (run.tokens - run.rows) / kSpanSlots;
      most = std::max(most, n + (spec_.spans ? run.tokens / kSpanSlots : 0));  // more tokens never take less room
      if (host_[i] >= n) continue;
      chosen = std::max<int64_t>(chosen, host_[i]);
      scored += competition(n, spec_.first_blocks, spec_.last_blocks, spec_.block, spec_.spans).scored();
    }
    device.kv_block_summary({.summary = cache_.fields.summary,
                             .k_pages = cache_.k_pages,
                             .page_table = pass.page_table,
                             .queries = pass.queries,
                             .pages = pages,
                             .block = result.block,
                             .kind = kind_,
                             .span_summary = cache_.fields.span_summary,
                             .spans = spans});
    if (chosen == 0) return {};
    const DType stat = cache_.k_pages.dtype == DType::f64 ? DType::f64 : DType::f32;
    result.blocks = scratch.alloc("kv.blocks", DType::i32, {runs, config_.kv_heads, chosen});
    device.kv_block_select({.blocks = result.blocks,
                            .score = scratch.alloc("kv.block_scores", stat, {runs, config_.kv_heads, most}),
                            .q = pass.q,
                            .summary = cache_.fields.summary,
                            .page_table = pass.page_table,
                            .queries = pass.queries,
                            .budget = uploaded_,
                            .scored = scored,
                            .block = result.block,
                            .first_blocks = static_cast<int32_t>(spec_.first_blocks),
                            .last_blocks = static_cast<int32_t>(spec_.last_blocks),
                            .kind = kind_,
                            .span_summary = cache_.fields.span_summary,
                            .spans = static_cast<int32_t>(spec_.spans)});
    return result;
  }

  double slots_read(const PagedRun& run, double resident) const override {
    const int64_t read = listed_slots(run.tokens, budget_(blocks_of(run.tokens, spec_.block)), spec_.block);
    const auto layers = static_cast<double>(config_.layers);
    const double sparse = std::max(0.0, layers - static_cast<double>(spec_.dense_layers)) / layers;
    return resident - sparse * static_cast<double>(run.tokens - read);
  }

 private:
  const KvSpec& spec_;
  const ModelConfig& config_;
  KvCache& cache_;
  const BlockSummary kind_;
  const BlockBudget budget_;
  std::vector<int32_t> host_;
  Tensor uploaded_;  // i32 [runs]: blocks that each may read
};

}  // namespace

std::unique_ptr<KvPolicy> make_block_sparse(const PolicyArgs& a) { return std::make_unique<BlockSparse>(a); }

}  // namespace pare
