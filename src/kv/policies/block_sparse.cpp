// Quest (Tang et al. 2024, arXiv 2406.10774) and block top-k: all keys and values stay, a decoded token reads the
// blocks that promise most.  Quest bounds the scores of a block by the channelwise minimum and maximum of its keys;
// block top-k takes their mean.  Both choose per key head, for the group of its query heads.
#include <algorithm>

#include "kv/policies/policies.h"
#include "ops/blocks.h"
#include "ops/inputs.h"

namespace pare {

namespace {

class BlockSparse : public KvPolicy {
 public:
  explicit BlockSparse(const PolicyArgs& a)
      : spec_(a.spec), config_(a.config), cache_(a.cache), kind_(summary_kind(a.spec)), budget_(a.spec) {
    const int64_t most = cache_.max_pages() * kPageSlots / spec_.blocks.size;
    lists_ =
        a.kv.alloc("kv.block_lists", DType::i32,
                   {cache_.max_sequences(), config_.kv_heads, spec_.adapts() ? most : std::min(budget_.most(), most)});
  }

  void begin(const std::vector<PagedRun>& runs, Inputs& inputs) override {
    host_budget_.assign(cache_.max_sequences(), INT32_MAX);
    choosing_.clear();
    scored_ = 0;
    for (const PagedRun& run : runs) {
      if (!run.decodes()) continue;  // prompts read everything
      const int64_t n = blocks_of(run.tokens, spec_.blocks.size), budget = budget_(n);
      host_budget_[run.sequence] = static_cast<int32_t>(budget);
      if (budget >= n) continue;
      choosing_.push_back({run.row, run.rows, run.tokens, run.sequence});
      scored_ += n - spec_.blocks.first - spec_.blocks.last;
    }
    budget_of_ = inputs.add("kv.block_budget", {std::ssize(host_budget_)}, host_budget_.data());
    queries_ = inputs.add("kv.choosing", {std::ssize(choosing_), 4}, choosing_.empty() ? nullptr : &choosing_[0].row);
  }

  std::vector<int64_t> reads(int layer, const std::vector<PagedRun>& runs) const override {
    std::vector<int64_t> slots;
    if (layer < spec_.blocks.dense_layers || choosing_.empty()) return slots;
    for (const PagedRun& run : runs)
      slots.push_back(listed_slots(run.tokens, host_budget_[run.sequence], spec_.blocks.size));
    return slots;
  }

  KvBlocks blocks(const KvPass& pass, Arena& scratch) override {
    if (pass.layer < spec_.blocks.dense_layers) return {};
    Device& device = cache_.device();
    KvBlocks result{.blocks = {}, .budget = budget_of_, .block = static_cast<int32_t>(spec_.blocks.size)};
    int64_t pages = 0, most = 0;
    for (const PagedRun& run : pass.runs) {
      pages += (run.tokens - 1) / kPageSlots - (run.tokens - run.rows) / kPageSlots + 1;
      most = std::max(most, blocks_of(run.tokens, spec_.blocks.size));  // more tokens never take less room
    }
    device.kv_block_summary({.summary = cache_.fields.summary,
                             .k_pages = cache_.k_pages,
                             .page_table = pass.page_table,
                             .queries = pass.queries,
                             .pages = pages,
                             .block = result.block,
                             .kind = kind_});
    if (choosing_.empty()) return {};
    result.blocks = lists_;
    const DType stat = cache_.k_pages.dtype == DType::f64 ? DType::f64 : DType::f32;
    device.kv_block_select(
        {.blocks = result.blocks,
         .score = scratch.alloc("kv.block_scores", stat, {std::ssize(choosing_), config_.kv_heads, most}),
         .q = pass.q,
         .summary = cache_.fields.summary,
         .page_table = pass.page_table,
         .queries = queries_,
         .budget = budget_of_,
         .scored = scored_,
         .block = result.block,
         .first_blocks = static_cast<int32_t>(spec_.blocks.first),
         .last_blocks = static_cast<int32_t>(spec_.blocks.last),
         .kind = kind_});
    return result;
  }

  void set_budget(const BlockBudget& budget) override { budget_ = budget; }

  double slots_read(const PagedRun& run, double resident) const override {
    const int64_t read = listed_slots(run.tokens, budget_(blocks_of(run.tokens, spec_.blocks.size)), spec_.blocks.size);
    const auto layers = static_cast<double>(config_.layers);
    const double sparse = std::max(0.0, layers - static_cast<double>(spec_.blocks.dense_layers)) / layers;
    return resident - sparse * static_cast<double>(run.tokens - read);
  }

 private:
  const KvSpec& spec_;
  const ModelConfig& config_;
  KvCache& cache_;
  const BlockSummary kind_;
  BlockBudget budget_;
  Tensor lists_;  // i32 [max_sequences, K, most]: of the layer at hand
  // Of the pass: blocks that each sequence may read; the runs that choose, and what they score.
  std::vector<int32_t> host_budget_;
  std::vector<PagedRow> choosing_;
  Tensor budget_of_, queries_;
  int64_t scored_ = 0;
};

}  // namespace

std::unique_ptr<KvPolicy> make_block_sparse(const PolicyArgs& a) { return std::make_unique<BlockSparse>(a); }

}  // namespace pare
