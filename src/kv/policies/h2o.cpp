// H2O (Zhang et al. 2023, arXiv 2306.14048): heavy hitters, the tokens with the largest attention received so far, and
// as many recent ones.
#include "kv/policies/policies.h"
#include "ops/compression.h"
#include "ops/inputs.h"

namespace pare {

namespace {

class H2o : public KvPolicy {
 public:
  explicit H2o(const PolicyArgs& a) : cache_(a.cache), residency_(a.spec, a.config.layers) {}

  void begin(const std::vector<PagedRun>& runs, Inputs& inputs) override {
    std::vector<int32_t> first;
    for (const PagedRun& run : runs) first.push_back(static_cast<int32_t>(residency_.protected_slots(run.prompt)));
    first_ = inputs.add("kv.first", {std::ssize(first)}, first.data());
  }
  Tensor mass_first() const override { return first_; }
  int64_t forced_last(int64_t budget) const override { return budget - budget / 2; }
  void score(const KvCompressions& e, const Tensor& score, Arena&) override {
    cache_.device().kv_mass_scores({.score = score,
                                    .mass_pages = cache_.fields.mass,
                                    .src_pages = e.src_pages,
                                    .compressions = e.compressions,
                                    .work = e.work});
  }

 private:
  KvCache& cache_;
  const KvResidency residency_;
  Tensor first_;  // i32 [runs]: protected slots
};

}  // namespace

std::unique_ptr<KvPolicy> make_h2o(const PolicyArgs& a) { return std::make_unique<H2o>(a); }

}  // namespace pare
