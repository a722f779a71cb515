#include "kv/policies/snapkv.h"

#include <cmath>

#include "ops/compression.h"

namespace pare {

SnapKv::SnapKv(const PolicyArgs& a, int64_t window, int64_t kernel)
    : spec_(a.spec),
      cache_(a.cache),
      kernel_(kernel),
      scale_(1 / std::sqrt(static_cast<float>(a.config.head_dim))),
      window_(a.config, a.cache, a.kv, window) {}

void SnapKv::score(const KvCompressions& e, const Tensor& score, Arena&) {
  cache_.device().kv_window_scores({.score = score,
                                    .windows = window_.rows(),
                                    .window_first = e.oldest,
                                    .k_pages = cache_.k_pages,
                                    .src_pages = e.src_pages,
                                    .compressions = e.compressions,
                                    .work = e.work,
                                    .window = window(),
                                    .aggregate = spec_.window.gqa_aggregation,
                                    .span = spec_.window.softmax_span,
                                    .pool = spec_.window.pooling,
                                    .kernel = static_cast<int32_t>(kernel_),
                                    .scale = scale_});
}

std::unique_ptr<KvPolicy> make_snapkv(const PolicyArgs& a) {
  return std::make_unique<SnapKv>(a, a.spec.window.size, a.spec.window.pooling_kernel);
}

// TOVA (Oren et al. 2024, arXiv 2401.06104) per key head: the attention of the newest query alone.
std::unique_ptr<KvPolicy> make_tova(const PolicyArgs& a) { return std::make_unique<SnapKv>(a, 1, 1); }

}  // namespace pare
