// Merging of the slots that a KV cache evicts into those that it keeps (roles of types, and orders of sums that are not
// stated here: list.h).
#pragma once
#include <array>
#include <cstdint>

#include "ops/compression.h"

namespace pare {

// Destination of the evicted slots e of a compression (those of [first, slots) that `keep` does not name), head by
// head. c(e) is the kept slot with the largest s = cosine of the keys as they lie in the pages (S of KvRedundancy;
// ties: the larger slot), s_e that cosine, |v| the root of the row sum of v^2.
//
//   d2o    every e with s_e >= threshold;  x_c <- (x_c + sum of s_e x_e) / (1 + #e)    (D2O, Wan et al. 2024)
//   value  every e with s_e > 0;  v_c <- (v_c + sum of u_e v_e) / (1 + sum of u_e),
//          u_e = s_e |v_e| / (|v_e| + |v_c| + 1e-8)                                    (kvpress, MergingPress)
//
// Sums are chains from x_c (weights: from 1), e ascending, fused where there is a product.
//
// threshold (D2O): one number per sequence and layer, 0 before its first compression.  m is the mean of s_e over the
// evicted slots of all heads (row sums over slots, added over heads ascending); then threshold <- m at the first
// compression, later ema_old * threshold + ema_new * m, and this compression compares with the result.  Nothing
// evicted: it stays.
enum class KvMergeKind : int32_t { d2o, value };
// KvCompact with what is evicted merged into what stays.  A slot to which nothing comes keeps its bits.
struct KvMerge {
  KvCompact compact;
  KvMergeKind kind;
  MergeKeys keys;        // none for value, which does not touch K
  Tensor nearest;        // i32 [E, K, max_pages * 16] workspace: by slot e, the place of c(e) in `keep`
  Tensor cosines;        // stat, the same shape, workspace: s_e
  Tensor merged;         // stat [E, K, max_keep, 2 * D + 1] workspace
  Tensor rope;           // stat [positions, D], for unrotated keys, else absent
  Tensor threshold;      // stat [T] acc, for d2o, else absent
  Tensor threshold_row;  // i32 [E]: which of them is the compression's; no two share one; for d2o
  float ema_old, ema_new;
  void check(Contract& c) const {
    const int64_t E = compact.compressions.shape[0], K = compact.k_pages.shape[1], D = compact.k_pages.shape[2];
    compact.check(c);
    c.that(keys == MergeKeys::none || kind != KvMergeKind::value, "this kind of merging leaves keys alone");
    c.index("nearest", nearest, {E, K, compact.src_pages.shape[1] * kPageSlots});
    c.stat("cosines", cosines, {E, K, compact.src_pages.shape[1] * kPageSlots});
    c.stat("merged", merged, {E, K, compact.keep.shape[2], 2 * D + 1});
    if (keys == MergeKeys::unrotated) {
      c.that(D % 2 == 0, "k_pages is ", compact.k_pages, ", expected an even head dim");
      c.stat("rope", rope, {rope.shape[0], D});
    }
    if (kind == KvMergeKind::d2o) {
      c.stat("threshold", threshold, {threshold.shape[0]});
      c.index("threshold_row", threshold_row, {E});
    }
  }
  Cost cost() const {
    const KvWork& w = compact.work;
    const int64_t K = compact.k_pages.shape[1], D = compact.k_pages.shape[2], evicted = (w.slots - w.kept) * K;
    const int64_t act = static_cast<int64_t>(dtype_size(compact.k_pages.dtype));
    Cost c = compact.cost();
    c.flops += 2 * K * D * w.crossed + 2 * evicted * D * (keys == MergeKeys::none ? 1 : 2);
    c.read += evicted * 2 * D * act;
    return c;
  }
  auto outputs() const { return std::array{threshold}; }
};

}  // namespace pare
