// Merging of evicted slots into kept ones: where each goes, the merged rows in the workspace, the compaction, and the
// merged rows over what it moved.
#include "ops/merge.h"

#include <cmath>
#include <vector>

#include "cpu/compression.h"

namespace pare::cpu {

namespace {

// One compression and head.
struct Head {
  const KvMerge& a;
  const KvCompression& e;
  int64_t compression, h;
  int64_t kv_heads, head_dim;
  const int32_t *src, *keep;
  int32_t* nearest;  // by slot
  float* cosine;
  float* merged;  // [keep][2 head_dim + 1]: V, K, whether anything came (1 or 0)

  int64_t at(int64_t slot) const { return (src[slot / kPageSlots] * kv_heads + h) * kPageSlots + slot % kPageSlots; }
  const float* value(int64_t slot) const { return a.compact.v_pages.as<float>() + at(slot) * head_dim; }
  // Turned back to position 0.
  void key(float* k, int64_t slot) const {
    const float* from = a.compact.k_pages.as<float>() + (src[slot / kPageSlots] * kv_heads + h) * head_dim * kPageSlots;
    for (int64_t d = 0; d < head_dim; d++) k[d] = from[d * kPageSlots + slot % kPageSlots];
    turn(k, slot, -1);
  }
  // k turned by the angle of the position of `slot`, forward (sign 1) or back.
  void turn(float* k, int64_t slot, float sign) const {
    const float* angle = a.rope.as<float>() + a.compact.pos_pages.as<int32_t>()[at(slot)] * head_dim;
    for (int64_t d = 0, half = head_dim / 2; d < half; d++) {
      const float u = k[d], v = k[d + half], s = angle[half + d] * sign;
      k[d] = u * angle[d] - v * s;
      k[d + half] = v * angle[d] + u * s;
    }
  }
  float* row(int64_t kept) const { return merged + kept * (2 * head_dim + 1); }
  // Calls f(slot) for the evicted slots, ascending.
  template <class F>
  void evicted(F f) const {
    int64_t next = 0;
    for (int64_t s = e.first; s < e.slots; s++)
      if (next < e.keep && keep[next] == s)
        next++;
      else
        f(s);
  }
  // The row of a kept slot that something comes to.
  float* started(int64_t kept) const {
    float* const r = row(kept);
    if (r[2 * head_dim] == 0) {
      std::copy_n(value(keep[kept]), head_dim, r);
      if (a.keys == MergeKeys::unrotated) key(r + head_dim, keep[kept]);
      r[2 * head_dim] = 1;
    }
    return r;
  }
};

float length(const float* x, int64_t n) { return std::sqrt(cpu_kernels().sum_squares(x, n)); }

void merge_nearest(const Head& m, float threshold) {
  const int64_t D = m.head_dim;
  const bool by_value = m.a.kind == KvMergeKind::value, keys = m.a.keys == MergeKeys::unrotated;
  std::vector<float> weights(static_cast<size_t>(m.e.keep), 1.0f), other(static_cast<size_t>(D));
  const auto add = [&](float* x, const float* y, float w) {
    for (int64_t d = 0; d < D; d++) x[d] = std::fma(w, y[d], x[d]);
  };
  m.evicted([&](int64_t s) {
    float w = m.cosine[s];
    if (by_value ? !(w > 0) : !(w >= threshold)) return;
    const int64_t c = m.nearest[s];
    const float* const from = m.value(s);
    float* const r = m.started(c);
    if (by_value) {
      const float size = length(from, D);
      w = w * size / (size + length(m.value(m.keep[c]), D) + 1e-8f);
    }
    add(r, from, w);
    if (keys) {
      m.key(other.data(), s);
      add(r + D, other.data(), w);
    }
    weights[static_cast<size_t>(c)] += by_value ? w : 1;
  });
  for (int64_t c = 0; c < m.e.keep; c++) {
    float* const r = m.row(c);
    if (r[2 * D] == 0) continue;
    for (int64_t d = 0; d < (keys ? 2 * D : D); d++) r[d] /= weights[static_cast<size_t>(c)];
    if (keys) m.turn(r + D, m.keep[c], 1);
  }
}

// threshold <- its next value, from the cosines of all heads of the compression.
void next_threshold(const KvMerge& a, float* threshold, const Head* heads, int64_t count) {
  const KvCompression& e = heads[0].e;
  const int64_t evicted = e.slots - slots_after(e);
  if (evicted == 0) return;
  float sum = 0;
  for (int64_t h = 0; h < count; h++) {
    float lane[16] = {};
    heads[h].evicted([&](int64_t s) { lane[s % 16] += heads[h].cosine[s]; });
    for (int n = 8; n; n /= 2)
      for (int i = 0; i < n; i++) lane[i] += lane[i + n];
    sum += lane[0];
  }
  const float mean = sum / static_cast<float>(evicted * count);
  *threshold = *threshold == 0 ? mean : a.ema_old * *threshold + a.ema_new * mean;
}

// The merged row of each slot that something came to, over what compaction moved there.
void overlay(const Head& m, const int32_t* dst) {
  const int64_t D = m.head_dim;
  const KvCompact& c = m.a.compact;
  for (int64_t j = 0; j < m.e.keep; j++) {
    const float* const r = m.row(j);
    if (r[2 * D] == 0) continue;
    const int64_t slot = m.e.first + j, head = dst[slot / kPageSlots] * m.kv_heads + m.h, s = slot % kPageSlots;
    std::copy_n(r, D, c.v_pages.as<float>() + (head * kPageSlots + s) * D);
    float* const k = c.k_pages.as<float>() + head * D * kPageSlots + s;
    for (int64_t d = 0; m.a.keys == MergeKeys::unrotated && d < D; d++) k[d * kPageSlots] = r[D + d];
  }
}

}  // namespace

void kv_merge(const KvMerge& a, Stream stream) {
  constexpr const char* op = "kv_merge";
  const KvCompact& c = a.compact;
  const int64_t n = c.compressions.shape[0], pages = c.k_pages.shape[0], K = c.k_pages.shape[1], D = c.k_pages.shape[2];
  const int64_t max_keep = c.keep.shape[2], row = c.src_pages.shape[1] * kPageSlots;
  const float* const k_pages = c.k_pages.as<float>();
  const KvCompression* const compressions = read_compressions(op, c.compressions);
  const int32_t* const src = pages_before(op, c.src_pages, compressions, n, pages);
  const int32_t* const dst = pages_after(op, c.dst_pages, compressions, n, pages);
  const int32_t* const keep = c.keep.as<int32_t>();
  float* const merged = a.merged.as<float>();
  const bool d2o = a.kind == KvMergeKind::d2o;
  float* const threshold = d2o ? a.threshold.as<float>() : nullptr;
  const int32_t* const state = d2o ? index(op, "threshold_row", a.threshold_row, a.threshold.shape[0]) : nullptr;

  std::vector<Head> heads;
  for (int64_t i = 0; i < n * K; i++) {
    const KvCompression& e = compressions[i / K];
    if (e.keep > max_keep) [[unlikely]]
      throw std::logic_error(
          cat("cpu: ", op, ": compression ", i / K, " keeps ", e.keep, " slots, keep is ", c.keep.str()));
    heads.push_back({.a = a,
                     .e = e,
                     .compression = i / K,
                     .h = i % K,
                     .kv_heads = K,
                     .head_dim = D,
                     .src = src + i / K * c.src_pages.stride[0],
                     .keep = keep + i * max_keep,
                     .nearest = a.nearest.as<int32_t>() + i * row,
                     .cosine = a.cosines.as<float>() + i * row,
                     .merged = merged + i * max_keep * (2 * D + 1)});
  }
  const int64_t pieces = n * K;
  if (pieces == 0) return;
  const Kernels& kernels = cpu_kernels();
  const double slots = static_cast<double>(c.work.slots) / static_cast<double>(n);
  parallel(pieces, slots * slots * (0.05 * static_cast<double>(D) + 1), [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const Head& m = heads[static_cast<size_t>(i)];
      if (m.e.keep == 0) continue;
      const KvNearestArgs args{.k_pages = k_pages + m.h * D * kPageSlots,
                               .pages = m.src,
                               .keep = m.keep,
                               .page_stride = K * D * kPageSlots,
                               .head_dim = D,
                               .nearest = m.nearest,
                               .cosine = m.cosine};
      kernels.kv_nearest(args, m.e, scratch((D + 17) * round16(m.e.slots) + 16 * D));
    }
  });
  for (int64_t i = 0; d2o && i < n; i++)
    if (compressions[i].keep) next_threshold(a, threshold + state[i], heads.data() + i * K, K);
  parallel(pieces, slots * static_cast<double>(D), [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const Head& m = heads[static_cast<size_t>(i)];
      for (int64_t j = 0; j < m.e.keep; j++) m.row(j)[2 * D] = 0;
      if (m.e.keep) merge_nearest(m, d2o ? threshold[state[m.compression]] : 0);
    }
  });
  kv_compact(c, stream);
  parallel(pieces, slots * static_cast<double>(D), [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const Head& m = heads[static_cast<size_t>(i)];
      overlay(m, dst + m.compression * c.dst_pages.stride[0]);
    }
  });
}

}  // namespace pare::cpu
