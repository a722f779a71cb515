// Compressions that merge what they evict.

#include "ops/merge.h"

#include <numeric>

#include "cases/compression.h"

namespace pare::cases {

namespace {

Call kv_merge(Operands& o, const Dims& d) {
  const Compressions v(d);
  const int64_t E = v.count(), K = d["K"], D = d["D"];
  KvMerge a{};
  a.kind = d["by_value"] ? KvMergeKind::value : KvMergeKind::d2o;
  const bool keys = a.kind == KvMergeKind::d2o && !d["values_only"];
  a.compact = compact(o, d, v, v.pages.present(), 2, !v.regular);
  a.keys = keys ? MergeKeys::unrotated : MergeKeys::none;
  if (keys) a.rope = o.stat_in("rope", {v.regular ? kPageSlots : 3 * v.most_slots + 3, D});
  a.nearest = o.index_scratch("nearest", {E, K, v.pages.per_row * kPageSlots});
  a.cosines = o.stat_scratch("cosines", {E, K, v.pages.per_row * kPageSlots});
  a.merged = o.stat_scratch("merged", {E, K, v.most_kept, 2 * D + 1});
  if (a.kind == KvMergeKind::d2o) {  // the last compression's is its first
    std::vector<double> thresholds(static_cast<size_t>(E), 0.25);
    thresholds.back() = 0;
    std::vector<int32_t> rows(static_cast<size_t>(E));
    std::iota(rows.rbegin(), rows.rend(), 0);
    a.threshold = o.stat_inout("threshold", {E}, Fill(thresholds, true));
    a.threshold_row = o.index("threshold_row", {E}, rows);
    a.ema_old = 0.75f;
    a.ema_new = 0.5f;
  }
  return a;
}

}  // namespace

std::vector<OpCase> merge_cases() {
  const std::vector<Dim> dims = compression_dims() + std::vector{edge("by_value", "0 D2O, 1 by value"),
                                                                 edge("values_only", "1: keys are left alone")};
  return {{"kv_merge", dims, with(compression_sizes(), {"", "values_only=1", "by_value=1"}), kv_merge}};
}

}  // namespace pare::cases
