#include "kv/paged_attention.h"

#include "ops/inputs.h"
#include "ops/rope.h"

namespace pare {

PagedAttention::PagedAttention(KvCache& cache, KvPolicy* policy, Arena& scratch, Inputs& inputs,
                               const std::vector<PagedRun>& runs, const Tensor& positions, const PagedCuts& cuts,
                               float scale)
    : cache_(cache),
      policy_(policy),
      scratch_(scratch),
      runs_(runs),
      positions_(positions),
      cuts_(cuts),
      scale_(scale) {
  for (int layer = 0; layer < cache.layers(); layer++)
    for (const PagedRun& run : runs)
      host_.push_back({run.row, run.rows, static_cast<int32_t>(cache.slots(run.sequence, layer)), run.sequence});
  static_assert(sizeof(PagedRow) == 4 * sizeof(int32_t));
  queries_ = inputs.add("kv.queries", {std::ssize(host_), 4}, reinterpret_cast<const int32_t*>(host_.data()));
  cache.upload_tables();
  if (policy_) policy_->begin(runs, inputs);
  for (int layer = 0; layer < cache.layers(); layer++) {
    const std::vector<int64_t> listed = policy_ ? policy_->reads(layer, runs) : std::vector<int64_t>();
    for (size_t i = 0; i < runs.size(); i++) reads_.push_back(listed.empty() ? host_[reads_.size()].slots : listed[i]);
  }
  if (cache.k_pages.dtype == DType::bf16) work_ = DecodeWork(inputs, cache.layers(), host_, reads_);
}

void PagedAttention::attend(int layer, const LinearFwd& qkv, const Rotation& rotation, const Tensor& q, const Tensor& k,
                            const Tensor& v, const Tensor& o) {
  const auto runs = static_cast<int64_t>(runs_.size());
  const Tensor queries = queries_.rows(layer * runs, runs), table = cache_.page_table(layer);
  Device& device = cache_.device();
  device.kv_write({.k_pages = cache_.k_pages,
                   .v_pages = cache_.v_pages,
                   .k = k,
                   .v = v,
                   .page_table = table,
                   .queries = queries,
                   .pos_pages = cache_.fields.pos,
                   .pos = cache_.fields.pos ? positions_ : Tensor{},
                   .rotation = rotation,
                   .product = qkv});
  const ArenaScope scope(scratch_);
  const KvPass pass{layer, q, table, queries, runs_, scale_};
  if (policy_) policy_->observe(pass);
  const KvBlocks blocks = policy_ ? policy_->blocks(pass, scratch_) : KvBlocks{};
  AttnPaged args{.o = o,
                 .q = q,
                 .k_pages = cache_.k_pages,
                 .v_pages = cache_.v_pages,
                 .page_table = table,
                 .queries = queries,
                 .pairs = 0,
                 .slots = 0,
                 .scale = scale_,
                 .blocks = blocks.blocks,
                 .budget = blocks.budget,
                 .block = blocks.block,
                 .work = work_.of(layer),
                 .cuts = cuts_};
  if (const Tensor first = policy_ ? policy_->mass_first() : Tensor{}; first) {
    const Tensor& mass = cache_.fields.mass;
    args.mass_pages = mass;
    args.first = first;
    if (q.dtype == DType::bf16)
      args.weights = scratch_.alloc("kv.weights", mass.dtype,
                                    {mass.shape[0], k.shape[1], q.shape[1] / k.shape[1] + 1, kPageSlots});
  }
  for (int64_t i = 0; i < runs; i++) {
    const PagedRow& row = host_[layer * runs + i];
    const int64_t slots = reads_[layer * runs + i], rows = row.rows;
    args.pairs += rows * (slots - rows) + rows * (rows + 1) / 2;
    args.slots += slots;
    args.most_pairs =
        std::max(args.most_pairs, paged_block_pairs(rows, slots, q.shape[1] / k.shape[1], slots < row.slots));
  }
  device.attn_paged(args);
}

}  // namespace pare
