// Summaries of blocks of keys, and their scores; ops.h (KvBlockSummary, KvBlockSelect) states the sums.
#include "cpu/isa/kernel_list.h"
#include "cpu/isa/tile.h"

namespace pare::PARE_ISA {

// Sixteen channels at a time: turned, the 16 slots of a page are 16 vectors.
void block_summary(float* summary, const float* k_page, int64_t width, int64_t slots, int64_t block,
                   BlockSummary kind) {
  for (int64_t d = 0; d < width; d += 16) {
    const int64_t lanes = min64(16, width - d);
    vf key[16];
    PARE_UNROLL
    for (int i = 0; i < 16; i++) key[i] = i < lanes ? load(k_page + (d + i) * 16) : zero();
    transpose(key);
    float* out = summary + d;
    for (int64_t begin = 0; begin < slots; begin += block) {
      const int64_t end = min64(begin + block, slots);
      if (kind == BlockSummary::minmax) {
        vf low = key[begin], high = low;
        for (int64_t s = begin + 1; s < end; s++) low = min(key[s], low), high = max(key[s], high);
        store(out, low, lanes), store(out + width, high, lanes);
        out += 2 * width;
      } else {
        vf sum = zero();
        for (int64_t s = begin; s < end; s++) sum = add(sum, key[s]);
        store(out, mul(sum, set1(1.0f / static_cast<float>(end - begin))), lanes);
        out += width;
      }
    }
  }
}

namespace {

struct Bound {  // q.k is at most the row sum of these
  const float *q, *low, *high;
  PARE_INLINE vf operator()(vf sums, int64_t d, int64_t lanes) const {
    const vf x = load(q + d, lanes);
    return add(sums, max(mul(x, load(low + d, lanes)), mul(x, load(high + d, lanes))));
  }
};
struct Product {
  const float *q, *mean;
  PARE_INLINE vf operator()(vf sums, int64_t d, int64_t lanes) const {
    return fma(load(q + d, lanes), load(mean + d, lanes), sums);
  }
};

template <class Terms>
PARE_INLINE vf lane_sums(int64_t width, const Terms& terms) {
  vf sums = zero();
  for_vectors(
      width, PARE_LANES_AT(d) { sums = terms(sums, d, lanes); });
  return sums;
}

// The canonical sums of 16 vectors of lanes at once.
PARE_INLINE vf sums16(vf* lanes) {
  transpose(lanes);
  PARE_UNROLL
  for (int n = 8; n; n /= 2) PARE_UNROLL
  for (int i = 0; i < n; i++) lanes[i] = add(lanes[i], lanes[i + n]);
  return lanes[0];
}

}  // namespace

void block_scores(float* score, const BlockScoreArgs& a, Range blocks, float* scratch) {
  const int64_t per_page = 16 / a.block, rows = a.kind == BlockSummary::minmax ? 2 : 1;
  if (a.kind == BlockSummary::mean)
    for (int64_t d = 0; d < a.width; d += 16) {
      vf sum = zero();
      for (int64_t g = 0; g < a.group; g++) sum = add(sum, load(a.q + g * a.width + d, a.width - d));
      store(scratch + d, mul(sum, set1(1.0f / static_cast<float>(a.group))), a.width - d);
    }
  for (int64_t first = blocks.begin; first < blocks.end; first += 16) {
    const int64_t n = min64(16, blocks.end - first);
    const float* summary[16];
    for (int64_t i = 0; i < n; i++) {
      const int64_t b = first + i;
      summary[i] = a.summary + a.pages[b / per_page] * a.page_step + b % per_page * rows * a.width;
    }
    vf lanes[16], best;
    for (int64_t i = n; i < 16; i++) summary[i] = summary[0];
    if (a.kind == BlockSummary::mean) {
      for (int i = 0; i < 16; i++) lanes[i] = lane_sums(a.width, Product{scratch, summary[i]});
      best = sums16(lanes);
    } else {
      best = set1(-__builtin_inff());
      for (int64_t g = 0; g < a.group; g++) {
        for (int i = 0; i < 16; i++)
          lanes[i] = lane_sums(a.width, Bound{a.q + g * a.width, summary[i], summary[i] + a.width});
        best = max(sums16(lanes), best);
      }
    }
    store(score + first, best, n);
  }
}

}  // namespace pare::PARE_ISA
