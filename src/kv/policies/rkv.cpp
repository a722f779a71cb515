// R-KV (Cai et al. 2025, arXiv 2505.24133): importance as in SnapKV against redundancy, the mean cosine similarity of a
// key to all others.
#include "kv/policies/snapkv.h"
#include "ops/compression.h"

namespace pare {

namespace {

class Rkv : public SnapKv {
 public:
  explicit Rkv(const PolicyArgs& a) : SnapKv(a, a.spec.window.size, a.spec.window.pooling_kernel) {}

  void score(const KvCompressions& e, const Tensor& score, Arena& scratch) override {
    SnapKv::score(e, score, scratch);
    const ArenaScope scope(scratch);
    const auto& shape = score.shape;
    cache_.device().kv_redundancy(
        {.score = score,
         .k_pages = cache_.k_pages,
         .src_pages = e.src_pages,
         .compressions = e.compressions,
         .work = e.work,
         .lambda = static_cast<float>(spec_.rkv.lambda),
         .threshold = static_cast<float>(spec_.rkv.threshold),
         .workspace = scratch.alloc("kv.redundancy", score.dtype, {shape[0], shape[1], 4, shape[2]})});
  }
};

}  // namespace

std::unique_ptr<KvPolicy> make_rkv(const PolicyArgs& a) { return std::make_unique<Rkv>(a); }

}  // namespace pare
