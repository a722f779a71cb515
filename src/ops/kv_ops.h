// The ops that cut a KV cache down: scores of slots, the choice of those that stay, and their moving together.  Part of
// THE op list (ops.h says what act, stat, in, out and acc mean, and the orders of sums that are not stated here).
//
// A compression event: one (sequence, layer) whose `slots` resident slots are cut to fewer.  Slot s of event e lies in
// page src_pages[e][s / 16] before and in page dst_pages[e][s / 16] after, at s % 16.  Slots [0, first) are protected:
// never scored, never moved, in no mean and in no softmax of an event.  Slots [first, slots - recent) are the
// candidates; the last `recent` slots stay.
//
// Sources: SnapKV (Li et al. 2024), R-KV (Cai et al. 2025), H2O (Zhang et al. 2023), TOVA (Oren et al. 2024),
// StreamingLLM (Xiao et al. 2023).
//
// Order of sums: a sum over slots is a row sum whose lane is slot % 16 (absent lanes are +0), so it does not depend on
// the pages.  Everything about an event depends on that event alone.  Scores are compared as numbers (-0 equals 0);
// where two are equal the larger slot wins.  Kept slots are always stored in ascending order.
#pragma once
#include <array>
#include <cstdint>

#include "ops/cost.h"

namespace pare {

struct KvEvent {
  int32_t slots;       // resident before
  int32_t first;       // protected slots
  int32_t recent;      // newest slots that always stay
  int32_t keep;        // of [first, slots): how many stay, the recent ones included; recent <= keep <= slots - first
  int32_t keep_row;    // row of `keep` that holds its choice; events may share one
  int32_t window_row;  // first row of its window of queries
};

// Sums over a list of events, for the costs (the events themselves lie on the device).
struct KvWork {
  int64_t slots = 0;       // of slots - first
  int64_t candidates = 0;  // of slots - first - recent
  int64_t kept = 0;        // of keep
  int64_t pairs = 0;       // of (slots - first)^2
  int64_t crossed = 0;     // of (slots - first - keep) * keep
  bool operator==(const KvWork&) const = default;
};
inline KvWork kv_work(const KvEvent* events, int64_t n) {
  KvWork w;
  for (const KvEvent* e = events; e < events + n; e++) {
    const int64_t slots = e->slots - e->first;
    w.slots += slots, w.candidates += slots - e->recent, w.kept += e->keep, w.pairs += slots * slots;
    w.crossed += (slots - e->keep) * e->keep;
  }
  return w;
}

// y[dst] = x[src] for each pair.
struct CopyRows {
  Tensor y;      // act or i32 [N, C] acc: only the dst rows are written; rows may be strided
  Tensor x;      // the same type, [M, C] or [M, h, C / h]; rows may be strided; may be y
  Tensor index;  // i32 [n, 2]: (src, dst); no dst occurs twice, and none is a src if x is y
  Cost cost() const {
    const int64_t moved = index.shape[0] * y.shape[1] * static_cast<int64_t>(dtype_size(y.dtype));
    return {0, moved + detail::total_bytes(index), moved};
  }
  auto outputs() const { return std::array{y}; }
};

// How the query heads of a group become one: the largest or the mean logit before the softmax, or the mean probability.
enum class GqaAgg : int32_t { max_logit, mean_logit, mean_prob };
// What the softmax of a window's query runs over: the candidates; or every slot from `first` to the query's own.
enum class SoftmaxSpan : int32_t { exclude_window, include_window };
enum class Pool : int32_t { max, avg };

// Attention of the newest `window` tokens to the candidates (SnapKV; R-KV's importance; TOVA with window 1):
//   z[t][g][s] = (q[t][g] . k[s]) * scale;  a = max over g, or (sum over g ascending) / G;  p = softmax over the span
//   raw[s] = (sum over t, oldest first, of p[t][s]) / window          (mean_prob: p is (sum over g of p[t][g]) / G)
//   score[s] = max or (sum, s ascending) / kernel of raw over [s - kernel / 2, s + kernel / 2] within the candidates
// A softmax is exp(z - max) / sum.
struct KvWindowScores {
  Tensor score;    // stat [E, K, max_slots] out in the candidates of each event, the rest is left alone
  Tensor windows;  // act [rows, H, D], rows may be strided: the window of event e is rows [window_row, window_row +
                   // window), a ring
  Tensor window_first;  // i32 [E], each in [0, window): the oldest is row window_row + window_first; absent: 0
  Tensor k_pages;       // act [pages, K, D, 16]
  Tensor src_pages;     // i32 [E, max_pages]; rows may be strided
  Tensor events;        // i32 [E, 6]: KvEvent
  KvWork work;
  int32_t window;  // rows of a window: the queries of the last `window` slots; 1 <= window <= recent of each event
  GqaAgg aggregate;
  SoftmaxSpan span;
  Pool pool;
  int32_t kernel;  // odd; 1: no pooling
  float scale;
  Cost cost() const {
    const int64_t K = k_pages.shape[1], D = k_pages.shape[2], act = static_cast<int64_t>(dtype_size(k_pages.dtype));
    const int64_t out = work.candidates * K * static_cast<int64_t>(dtype_size(score.dtype));
    return {
        2 * window * windows.shape[1] * D * work.candidates,
        (events.shape[0] * window * windows.shape[1] * D + work.candidates * K * D) * act + detail::total_bytes(events),
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
struct KvRedundancy {
  Tensor score;              // stat [E, K, max_slots] acc: in and out in the candidates, the rest is left alone
  Tensor k_pages;            // act [pages, K, D, 16]
  Tensor src_pages, events;  // as in KvWindowScores
  KvWork work;
  float lambda, threshold;
  Tensor workspace;  // stat [E, K, 4, max_pages * 16]
  Cost cost() const {
    const int64_t K = k_pages.shape[1], D = k_pages.shape[2], stat = static_cast<int64_t>(dtype_size(score.dtype));
    return {2 * K * D * work.pairs,
            work.slots * K * D * static_cast<int64_t>(dtype_size(k_pages.dtype)) + work.candidates * K * stat +
                detail::total_bytes(events),
            work.candidates * K * stat};
  }
  auto outputs() const { return std::array{score}; }
};

// H2O: score = mass (AttnPaged), or, if normalise, mass / (number of queries that saw the slot: position - pos +
// 1).
struct KvMassScores {
  Tensor score;              // stat [E, K, max_slots] out in the candidates, the rest is left alone
  Tensor mass_pages;         // stat [pages, K, 16]
  Tensor pos_pages;          // i32 [pages, K, 16]; absent unless normalise
  Tensor src_pages, events;  // as in KvWindowScores
  Tensor position;           // i32 [E]: absolute position of the newest token; absent unless normalise
  KvWork work;
  bool normalise;
  Cost cost() const {
    const int64_t n = work.candidates * mass_pages.shape[1], stat = static_cast<int64_t>(dtype_size(score.dtype));
    return {normalise ? n : 0, n * (stat + (normalise ? 4 : 0)) + detail::total_bytes(events), n * stat};
  }
  auto outputs() const { return std::array{score}; }
};

// keep[keep_row][h] = the keep - recent candidates with the largest scores, then the last `recent` slots, ascending.
struct KvSelect {
  Tensor
      keep;  // i32 [R, K, max_keep] out: the first `keep` entries of a row are slots >= first, the rest is left alone
  Tensor score;   // stat [E, K, max_slots]; absent: every event has keep == recent
  Tensor events;  // i32 [E, 6]: KvEvent; no two share a keep_row
  KvWork work;
  bool shared_heads;  // one choice for all heads of an event, by the sum of the scores over heads ascending
  Cost cost() const {
    const int64_t K = keep.shape[1], stat = score ? static_cast<int64_t>(dtype_size(score.dtype)) : 0;
    return {0, work.candidates * K * stat + detail::total_bytes(events), work.kept * K * 4};
  }
  auto outputs() const { return std::array<Tensor, 0>{}; }
};

// Slot first + i of dst = slot keep[keep_row][h][i] of src, for K, V and whatever lies beside them.  In place where a
// dst page is the src page of its place; other dst pages are src or dst pages of nothing else.  What an event writes
// no other event reads or writes: not even where both shared the page before and one has just got a fresh one.  Pages
// wholly below `first` are not touched, and the page that holds both slot first - 1 and slot first is one in both
// lists.
//
// StreamingLLM's positions within the cache: if sinks > 0, the keys of slots [0, sinks), all protected, are turned
// forward by the number of evicted slots, slots - first - keep, as RopeFwd turns; so their distance to everything after
// them is again that of their places in the cache.  Then page 0 is written and no other event may share it.
struct KvCompact {
  Tensor k_pages, v_pages;      // act [pages, K, D, 16] and [pages, K, 16, D] acc
  Tensor pos_pages;             // i32 [pages, K, 16] acc
  Tensor mass_pages;            // stat [pages, K, 16] acc, or absent
  Tensor keep;                  // i32 [R, K, max_keep]
  Tensor src_pages, dst_pages;  // i32 [E, max_pages]; rows may be strided
  Tensor events;                // i32 [E, 6]: KvEvent
  KvWork work;
  Tensor rope;    // stat [positions, D], as in RopeFwd; absent if sinks == 0
  int32_t sinks;  // 0: positions stay absolute
  Cost cost() const {
    const int64_t K = k_pages.shape[1], D = k_pages.shape[2], act = static_cast<int64_t>(dtype_size(k_pages.dtype));
    const int64_t stat = mass_pages ? static_cast<int64_t>(dtype_size(mass_pages.dtype)) : 0;
    const int64_t moved = work.kept * K * (2 * D * act + 4 + stat), turned = events.shape[0] * K * sinks * D;
    return {3 * turned, moved + work.kept * K * 4 + turned * act + detail::total_bytes(events), moved + turned * act};
  }
  auto outputs() const { return std::array{k_pages, v_pages}; }
};

// What becomes of the evicted slots e of an event (those of [first, slots) that `keep` does not name), head by head.
// c(e) is the kept slot with the largest s = cosine of the keys as they lie in the pages (kn of KvRedundancy; ties: the
// larger slot), s_e that cosine, |v| the root of the row sum of v^2.
//
//   lookm_pivot  every e goes to c(e);  x_c <- (x_c + sum of (x_e + x_c) / 2) / (1 + #e)     (LOOK-M, Wan et al. 2024)
//   d2o          every e with s_e >= threshold;  x_c <- (x_c + sum of s_e x_e) / (1 + #e)    (D2O, Wan et al. 2024)
//   value        every e with s_e > 0;  v_c <- (v_c + sum of u_e v_e) / (1 + sum of u_e),
//                u_e = s_e |v_e| / (|v_e| + |v_c| + 1e-8)                                    (kvpress, MergingPress)
//   cam          e gives to the next `targets` kept slots after it, n_e of them there are, if its coin falls:
//                v_c <- v_c + sum of v_e / n_e over the e that give to c                     (CaM, Zhang et al. 2024)
//
// Sums are chains from x_c (weights: from 1), e ascending, fused where there is a product.
//
// The coin of e falls if mass_e > 0 and u * mean < mass_e, u = uniform_open(rng_word(key, uid, position of e, head))
// and mean that of the masses of the slots that e would give to (a chain, ascending).
//
// threshold (D2O): one number per sequence and layer, 0 before its first event.  m is the mean of s_e over the evicted
// slots of all heads (row sums over slots, added over heads ascending); then threshold <- m at the first event, later
// ema_old * threshold + ema_new * m, and this event compares with the result.  Nothing evicted: it stays.
enum class KvMergeKind : int32_t { cam, d2o, lookm_pivot, value };
// Whether x is V only, or K too: turned back to position 0 first and then to the position of c, as RopeBwd and RopeFwd
// turn.
enum class MergeKeys : int32_t { none, unrotated };

// KvCompact with what is evicted merged into what stays.  A slot to which nothing comes keeps its bits.
struct KvMerge {
  KvCompact compact;  // sinks == 0; mass_pages present for cam
  KvMergeKind kind;
  MergeKeys keys;        // none for cam and value, which do not touch K
  Tensor links;          // stat [E, K, 2, max_pages * 16] workspace
  Tensor merged;         // stat [E, K, max_keep, 2 * D + 1] workspace
  Tensor rope;           // stat [positions, D], for unrotated keys, else absent
  Tensor threshold;      // stat [T] acc, for d2o, else absent
  Tensor threshold_row;  // i32 [E]: which of them is the event's; no two share one; for d2o
  float ema_old, ema_new;
  Tensor uid;       // i32 [E, 2]: low and high word of a name of the sequence and layer; for cam
  uint64_t key;     // rng_key; for cam
  int32_t targets;  // at least 1; for cam
  Cost cost() const {
    const KvWork& w = compact.work;
    const int64_t K = compact.k_pages.shape[1], D = compact.k_pages.shape[2], evicted = (w.slots - w.kept) * K;
    const int64_t act = static_cast<int64_t>(dtype_size(compact.k_pages.dtype));
    Cost c = compact.cost();
    c.flops +=
        (kind == KvMergeKind::cam ? 0 : 2 * K * D * w.crossed) + 2 * evicted * D * (keys == MergeKeys::none ? 1 : 2);
    c.read += evicted * 2 * D * act;
    return c;
  }
  auto outputs() const { return std::array{threshold}; }
};

}  // namespace pare
