// Events that merge what they evict.

#include "ops/merge.h"

#include <numeric>

#include "cases/events.h"

namespace pare::cases {

namespace {

Call kv_merge(Operands& o, const Dims& d) {
  if (d["kind"] > 3) fail("kv_merge: kind=", d["kind"], " is none of 0 to 3");
  const Events v(d);
  const int64_t E = v.count(), K = d["K"], D = d["D"];
  KvMerge a{};
  a.kind = std::array{KvMergeKind::cam, KvMergeKind::d2o, KvMergeKind::lookm_pivot, KvMergeKind::value}[d["kind"]];
  const bool cam = a.kind == KvMergeKind::cam;
  const bool keys = !cam && a.kind != KvMergeKind::value && !d["values_only"];
  a.compact = compact(o, d, v, v.pages.present(), 2, cam || !v.regular);
  a.keys = keys ? MergeKeys::unrotated : MergeKeys::none;
  if (keys) a.rope = o.stat_in("rope", {v.regular ? kPageSlots : 3 * v.most_slots + 3, D});
  a.links = o.stat_scratch("links", {E, K, 2, v.pages.per_row * kPageSlots});
  a.merged = o.stat_scratch("merged", {E, K, v.most_kept, 2 * D + 1});
  if (a.kind == KvMergeKind::d2o) {  // the last event's is its first
    std::vector<double> thresholds(static_cast<size_t>(E), 0.25);
    thresholds.back() = 0;
    std::vector<int32_t> rows(static_cast<size_t>(E));
    std::iota(rows.rbegin(), rows.rend(), 0);
    a.threshold = o.stat_inout("threshold", {E}, Fill(thresholds, true));
    a.threshold_row = o.index("threshold_row", {E}, rows), a.ema_old = 0.75f, a.ema_new = 0.5f;
  }
  a.uid = o.index("uid", {E, 2}, below("uid", 2 * E, 1000)), a.key = 77, a.targets = 3;
  return a;
}

}  // namespace

std::vector<OpCase> merge_cases() {
  const std::vector<Dim> dims = event_dims() + std::vector{Dim{"kind", 1, "0 CaM, 1 D2O, 2 LOOK-M, 3 by values", 0},
                                                           edge("values_only", "1: keys are left alone")};
  return {{"kv_merge", dims, with(event_sizes(), {"kind=0", "kind=1", "kind=2", "kind=2,values_only=1", "kind=3"}),
           kv_merge}};
}

}  // namespace pare::cases
