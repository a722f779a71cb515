#include "kv/paged_attention.h"

namespace pare {

PagedAttention::PagedAttention(KvCache& cache, Arena& scratch, const std::vector<PagedRun>& runs, float scale)
    : cache_(cache), scale_(scale), work_(cache.layers()) {
  for (int layer = 0; layer < cache.layers(); layer++)
    for (const PagedRun& run : runs) {
      const int64_t slots = cache.slots(run.sequence, layer), rows = run.rows;
      host_.push_back({run.row, run.rows, static_cast<int32_t>(slots), run.sequence});
      work_[layer].pairs += rows * (slots - rows) + rows * (rows + 1) / 2;
      work_[layer].slots += slots;
    }
  queries_ = scratch.alloc("kv.queries", DType::i32, {static_cast<int64_t>(host_.size()), 4});
  cache.upload_tables();
  cache.device().upload({.dst = queries_, .src = host_.data()});
}

void PagedAttention::attend(int layer, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o) {
  const int64_t runs = queries_.shape[0] / cache_.layers();
  const Tensor queries = queries_.rows(layer * runs, runs), table = cache_.page_table(layer);
  Device& device = cache_.device();
  device.kv_write(
      {.k_pages = cache_.k_pages, .v_pages = cache_.v_pages, .k = k, .v = v, .page_table = table, .queries = queries});
  device.attn_paged({.o = o,
                     .q = q,
                     .k_pages = cache_.k_pages,
                     .v_pages = cache_.v_pages,
                     .page_table = table,
                     .queries = queries,
                     .pairs = work_[layer].pairs,
                     .slots = work_[layer].slots,
                     .scale = scale_});
}

}  // namespace pare
