// Compressions of a KV cache that evicts: scores of slots, the choice of those that stay, and their moving together
// (roles of types, and orders of sums that are not stated here: list.h).
//
// A compression: one (sequence, layer) whose `slots` resident slots are cut to fewer.  Slot s of compression e lies in
// page src_pages[e][s / 16] before and in page dst_pages[e][s / 16] after, at s % 16.  Slots [0, first) are protected:
// never scored, never moved, in no mean and in no softmax of a compression.  Slots [first, slots - recent) are the
// candidates; the last `recent` slots stay.
//
// Sources: SnapKV (Li et al. 2024), R-KV (Cai et al. 2025), H2O (Zhang et al. 2023), TOVA (Oren et al. 2024),
// StreamingLLM (Xiao et al. 2023).
//
// Order of sums: products of queries and keys, and of keys, are those of attention.  A sum over slots is a row sum
// whose lane is slot % 16 (absent lanes are +0), so it does not depend on the pages.  Everything about a compression
// depends on that compression alone.  Scores are compared as numbers (-0 equals 0); where two are equal the larger slot
// wins.  Kept slots are always stored in ascending order.
#pragma once
#include <array>
#include <cstdint>

#include "ops/options.h"
#include "ops/paged.h"

namespace pare {

namespace detail {

inline void check_compressions(Contract& c, const Tensor& compressions) {
  c.index("compressions", compressions, {compressions.shape[0], 5});
}
inline void check_compression_pages(Contract& c, const char* name, const Tensor& pages, const Tensor& compressions) {
  c.index(name, pages, {compressions.shape[0], pages.shape[1]}, c.strided);
}
inline void check_score(Contract& c, const Tensor& score, const Tensor& compressions, int64_t kv_heads) {
  c.stat("score", score, {compressions.shape[0], kv_heads, score.shape[2]});
}
inline void check_keep(Contract& c, const Tensor& keep, const Tensor& compressions, int64_t kv_heads) {
  c.index("keep", keep, {compressions.shape[0], kv_heads, keep.shape[2]});
}

}  // namespace detail

// Attention of the newest `window` tokens to the candidates (SnapKV; R-KV's importance; TOVA with window 1):
//   z[t][g][s] = (q[t][g] . k[s]) * scale;  a = max over g, or (sum over g ascending) / G;  p = softmax over the span
//   raw[s] = (sum over t, oldest first, of p[t][s]) / window          (mean_prob: p is (sum over g of p[t][g]) / G)
//   score[s] = max or (sum, s ascending) / kernel of raw over [s - kernel / 2, s + kernel / 2] within the candidates
// A softmax is exp(z - max) / sum.
struct KvWindowScores {
  Tensor score;    // stat [E, K, max_slots] out in the candidates of each compression, the rest is left alone
  Tensor windows;  // act [rows, H, D], rows may be strided: the window of compression e is rows [window_row, window_row
                   // + window), a ring
  Tensor window_first;  // i32 [E], each in [0, window): the oldest is row window_row + window_first; absent: 0
  Tensor k_pages;       // act [pages, K, D, 16]
  Tensor src_pages;     // i32 [E, max_pages]; rows may be strided
  Tensor compressions;  // i32 [E, 5]: KvCompression
  KvWork work;
  // Rows of a window: the queries of the last `window` slots; 1 <= window <= recent of each compression.
  int32_t window;
  GqaAgg aggregate;
  SoftmaxSpan span;
  Pool pool;
  int32_t kernel;  // odd; 1: no pooling
  float scale;
  void check(Contract& c) const {
    const int64_t E = compressions.shape[0], K = k_pages.shape[1], D = k_pages.shape[2], H = windows.shape[1];
    detail::check_k_pages(c, k_pages);
    c.act("windows", windows, {windows.shape[0], H, D}, c.strided);
    detail::check_heads(c, H, K);
    if (window_first) c.index("window_first", window_first, {E});
    detail::check_compression_pages(c, "src_pages", src_pages, compressions);
    detail::check_compressions(c, compressions);
    detail::check_score(c, score, compressions, K);
    c.that(window >= 1 && kernel >= 1 && kernel % 2 == 1, "window and kernel are ", window, " and ", kernel,
           ", expected 1 or more, the kernel odd");
  }
  Cost cost() const {
    const int64_t K = k_pages.shape[1], D = k_pages.shape[2], act = static_cast<int64_t>(dtype_size(k_pages.dtype));
    const int64_t out = work.candidates * K * static_cast<int64_t>(dtype_size(score.dtype));
    return {2 * window * windows.shape[1] * D * work.candidates,
            (compressions.shape[0] * window * windows.shape[1] * D + work.candidates * K * D) * act +
                detail::total_bytes(compressions),
            out};
  }
  auto outputs() const { return std::array{score}; }
};

// R-KV: score = lambda * score - (1 - lambda) * R, where R says how much a slot is like the others.  Over i, j in
// [first, slots), n of them:
//   kn[i] = k[i] / (sqrt(k[i] . k[i]) + 1e-8);  S[i][j] = kn[i] . kn[j], S[i][i] = 0
//   last[i] = the largest j with S[i][j] > threshold; `first` where there is none, as in the released code
//   r[j] = (sum over i of S[i][j] - sum over i with last[i] == j of S[i][j]) / n;  R = softmax of r
// Both sums over i are chains, i ascending; the second one goes on from the first.
// In bf16, S[i][j] = (k[i] . k[j]) * (c[i] * c[j]), where c[i] = 1 / (sqrt(k[i] . k[i]) + 1e-8) and the sum under the
// root is a chain of fused multiply-adds.  The first sum over i has four chains, i belongs to chain i % 8 / 2, and they
// are added (l0 + l1) + (l2 + l3).
struct KvRedundancy {
  Tensor score;                    // stat [E, K, max_slots] acc: in and out in the candidates, the rest is left alone
  Tensor k_pages;                  // act [pages, K, D, 16]
  Tensor src_pages, compressions;  // as in KvWindowScores
  KvWork work;
  float lambda, threshold;
  Tensor workspace;  // stat [E, K, 4, max_pages * 16]
  void check(Contract& c) const {
    const int64_t K = k_pages.shape[1];
    detail::check_k_pages(c, k_pages);
    detail::check_compression_pages(c, "src_pages", src_pages, compressions);
    detail::check_compressions(c, compressions);
    detail::check_score(c, score, compressions, K);
    c.stat("workspace", workspace, {compressions.shape[0], K, 4, src_pages.shape[1] * kPageSlots});
  }
  Cost cost() const {
    const int64_t K = k_pages.shape[1], D = k_pages.shape[2], stat = static_cast<int64_t>(dtype_size(score.dtype));
    return {2 * K * D * work.pairs,
            work.slots * K * D * static_cast<int64_t>(dtype_size(k_pages.dtype)) + work.candidates * K * stat +
                detail::total_bytes(compressions),
            work.candidates * K * stat};
  }
  auto outputs() const { return std::array{score}; }
};

// H2O: score = mass (AttnPaged).
struct KvMassScores {
  Tensor score;                    // stat [E, K, max_slots] out in the candidates, the rest is left alone
  Tensor mass_pages;               // stat [pages, K, 16]
  Tensor src_pages, compressions;  // as in KvWindowScores
  KvWork work;
  void check(Contract& c) const {
    const int64_t pages = mass_pages.shape[0], K = mass_pages.shape[1];
    c.stat("mass_pages", mass_pages, {pages, K, kPageSlots});
    detail::check_compression_pages(c, "src_pages", src_pages, compressions);
    detail::check_compressions(c, compressions);
    detail::check_score(c, score, compressions, K);
  }
  Cost cost() const {
    const int64_t n = work.candidates * mass_pages.shape[1], stat = static_cast<int64_t>(dtype_size(score.dtype));
    return {0, n * stat + detail::total_bytes(compressions), n * stat};
  }
  auto outputs() const { return std::array{score}; }
};

// keep[e][h] = the keep - recent candidates with the largest scores, then the last `recent` slots, ascending.
struct KvSelect {
  Tensor keep;   // i32 [E, K, max_keep] out: the first `keep` entries of a row, slots >= first; the rest is left alone
  Tensor score;  // stat [E, K, max_slots]; absent: every compression has keep == recent
  Tensor compressions;  // i32 [E, 5]: KvCompression
  KvWork work;
  bool shared_heads;  // one choice for all heads of a compression, by the sum of the scores over heads ascending
  void check(Contract& c) const {
    detail::check_compressions(c, compressions);
    detail::check_keep(c, keep, compressions, keep.shape[1]);
    if (score) detail::check_score(c, score, compressions, keep.shape[1]);
    const int64_t recent = work.slots - work.candidates;
    c.that(score || work.kept == recent, work.kept, " slots stay, of which only ", recent,
           " are recent, but there are no scores");
  }
  Cost cost() const {
    const int64_t K = keep.shape[1], stat = score ? static_cast<int64_t>(dtype_size(score.dtype)) : 0;
    return {0, work.candidates * K * stat + detail::total_bytes(compressions), work.kept * K * 4};
  }
  auto outputs() const { return std::array<Tensor, 0>{}; }
};

// Slot first + i of dst = slot keep[e][h][i] of src, for K, V and whatever lies beside them.  In place where a
// dst page is the src page of its place; other dst pages are src or dst pages of nothing else.  What a compression
// writes no other compression reads or writes: not even where both shared the page before and one has just got a fresh
// one.  Pages wholly below `first` are not touched; a page with both slot first - 1 and slot first is in both lists.
struct KvCompact {
  Tensor k_pages, v_pages;      // act [pages, K, D, 16] and [pages, K, 16, D] acc
  Tensor pos_pages;             // i32 [pages, K, 16] acc
  Tensor mass_pages;            // stat [pages, K, 16] acc, or absent
  Tensor keep;                  // i32 [E, K, max_keep]
  Tensor src_pages, dst_pages;  // i32 [E, max_pages]; rows may be strided
  Tensor compressions;          // i32 [E, 5]: KvCompression
  KvWork work;
  void check(Contract& c) const {
    const int64_t pages = k_pages.shape[0], K = k_pages.shape[1];
    detail::check_pages(c, k_pages, v_pages);
    c.index("pos_pages", pos_pages, {pages, K, kPageSlots});
    if (mass_pages) c.stat("mass_pages", mass_pages, {pages, K, kPageSlots});
    detail::check_keep(c, keep, compressions, K);
    detail::check_compression_pages(c, "src_pages", src_pages, compressions);
    detail::check_compression_pages(c, "dst_pages", dst_pages, compressions);
    detail::check_compressions(c, compressions);
  }
  Cost cost() const {
    const int64_t K = k_pages.shape[1], D = k_pages.shape[2], act = static_cast<int64_t>(dtype_size(k_pages.dtype));
    const int64_t stat = mass_pages ? static_cast<int64_t>(dtype_size(mass_pages.dtype)) : 0;
    const int64_t moved = work.kept * K * (2 * D * act + 4 + stat);
    return {0, moved + work.kept * K * 4 + detail::total_bytes(compressions), moved};
  }
  auto outputs() const { return std::array{k_pages, v_pages}; }
};

}  // namespace pare
