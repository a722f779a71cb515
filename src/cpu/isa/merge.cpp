// The kept slot that is nearest to each evicted one.
#include "cpu/isa/compression.h"

namespace pare::PARE_ISA {

void kv_nearest(const KvNearestArgs& a, const KvCompression& e, float* scratch) {
  constexpr int64_t kRows = 16;  // evicted slots that are compared at once
  const int64_t base = e.first / 16 * 16, begin = e.first - base, end = e.slots - base, stride = round16(end);
  float *unit = scratch, *s = unit + stride * a.head_dim, *place = s + kRows * stride;  // place in keep, or -1
  float* const rows = place + stride;                                                   // [kRows][head_dim]
  unit_keys(unit, a, a.pages + base / 16, begin, end);
  for (int64_t i = 0; i < stride; i += 16) store(place + i, set1(-1));
  for (int64_t j = 0; j < e.keep; j++) place[a.keep[j] - base] = static_cast<float>(j);
  for (int64_t slot = begin; slot < end;) {
    int64_t evicted[kRows], n = 0;
    for (; slot < end && n < kRows; slot++) {
      if (place[slot] >= 0) continue;
      const float* const from = unit + slot / 16 * 16 * a.head_dim + slot % 16;
      for (int64_t d = 0; d < a.head_dim; d++) rows[n * a.head_dim + d] = from[d * 16];
      evicted[n++] = slot;
    }
    if (n == 0) return;
    multiply({.c = s,
              .c_stride = stride,
              .a = rows,
              .a_stride = a.head_dim,
              .by_columns = false,
              .base = unit,
              .pages = nullptr,
              .step = a.head_dim * 16,
              .width = a.head_dim},
             n, stride / 16);
    for (int64_t r = 0; r < n; r++) {
      vf best = set1(-__builtin_inff()), which = set1(-1);
      for (int64_t i = 0; i < stride; i += 16) {
        const vf x = load(s + r * stride + i), at = load(place + i);
        const mask worse = less(x, best), absent = less(at, zero());
        best = select(absent, best, select(worse, best, x));
        which = select(absent, which, select(worse, which, at));
      }
      float cosine[16], kept[16];
      store(cosine, best);
      store(kept, which);
      int64_t lane = 0;
      for (int64_t i = 1; i < 16; i++)
        if (cosine[i] > cosine[lane] || (cosine[i] == cosine[lane] && kept[i] > kept[lane])) lane = i;
      a.cosine[base + evicted[r]] = cosine[lane];
      a.nearest[base + evicted[r]] = static_cast<int32_t>(kept[lane]);
    }
  }
}

}  // namespace pare::PARE_ISA
