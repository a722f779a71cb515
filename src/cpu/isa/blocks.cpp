// Summaries of blocks of keys, and their scores; KvBlockSummary and KvBlockSelect state the sums.
#include "cpu/isa/attention.h"
#include "cpu/kernels.h"

namespace pare::PARE_ISA {

namespace {

// One block of n keys in 16 channels: key(i) is the i-th.
template <class Key>
PARE_INLINE void summarise(float* out, int64_t n, int64_t head_dim, int64_t lanes, BlockSummary kind, Key key) {
  if (kind == BlockSummary::minmax) {
    vf low = key(0), high = low;
    for (int64_t i = 1; i < n; i++) {
      low = min(key(i), low);
      high = max(key(i), high);
    }
    store(out, low, lanes);
    store(out + head_dim, high, lanes);
  } else {
    vf sum = zero();
    for (int64_t i = 0; i < n; i++) sum = add(sum, key(i));
    store(out, mul(sum, set1(1.0f / static_cast<float>(n))), lanes);
  }
}

// Sixteen channels of a page from channel d on: turned, its 16 slots are 16 vectors.
PARE_INLINE void load_turned(vf* key, const float* k_page, int64_t d, int64_t lanes) {
  PARE_UNROLL
  for (int i = 0; i < 16; i++) key[i] = i < lanes ? load(k_page + (d + i) * 16) : zero();
  transpose(key);
}

}  // namespace

void block_summary(float* summary, const float* k_page, int64_t head_dim, int64_t slots, int64_t block,
                   BlockSummary kind) {
  for (int64_t d = 0; d < head_dim; d += 16) {
    const int64_t lanes = min64(16, head_dim - d);
    vf key[16];
    load_turned(key, k_page, d, lanes);
    float* out = summary + d;
    for (int64_t begin = 0; begin < slots; begin += block, out += summary_rows(kind) * head_dim)
      summarise(
          out, min64(block, slots - begin), head_dim, lanes,
          kind, [&](int64_t s) __attribute__((always_inline)) { return key[begin + s]; });
  }
}

void segment_summary(float* summary, const AttnArgs& a, const SegmentRow& s, int64_t kv_head, Interval blocks,
                     int64_t block, BlockSummary kind) {
  const Slots<const float> keys = key_slots(a, s, kv_head);
  for (int64_t b = blocks.begin; b < blocks.end; b++, summary += summary_rows(kind) * a.head_dim)
    for_vectors(
        a.head_dim, PARE_LANES_AT(d) {
          summarise(
              summary + d, block, a.head_dim, lanes,
              kind, [&](int64_t i) __attribute__((always_inline)) { return load(keys.at(b * block + i) + d, lanes); });
        });
}

namespace {

// What one channel adds to a score: the larger product with an end of the range; the product with the mean.
template <BlockSummary kind>
PARE_INLINE vf add_term(vf sums, vf x, const float* summary, int64_t head_dim, int64_t lanes) {
  if constexpr (kind == BlockSummary::minmax)
    return add(sums, max(mul(x, load(summary, lanes)), mul(x, load(summary + head_dim, lanes))));
  else
    return fma(x, load(summary, lanes), sums);
}

// The canonical sums of 16 vectors of lanes at once.
PARE_INLINE vf sums16(vf* lanes) {
  transpose(lanes);
  PARE_UNROLL
  for (int n = 8; n; n /= 2) PARE_UNROLL
  for (int i = 0; i < n; i++) lanes[i] = add(lanes[i], lanes[i + n]);
  return lanes[0];
}

// The scores of 16 blocks for one query.  Four at a time: the sums of more do not fit the registers of AVX2.
template <BlockSummary kind>
PARE_INLINE vf scores16(const float* q, const float* const* summary, int64_t head_dim) {
  vf lanes[16];
  for (int first = 0; first < 16; first += 4) {
    vf sums[4] = {zero(), zero(), zero(), zero()};
    for_vectors(
        head_dim, [&](int64_t d, int64_t n) __attribute__((always_inline)) {
          const vf x = load(q + d, n);
          PARE_UNROLL
          for (int i = 0; i < 4; i++) sums[i] = add_term<kind>(sums[i], x, summary[first + i] + d, head_dim, n);
        });
    PARE_UNROLL
    for (int i = 0; i < 4; i++) lanes[first + i] = sums[i];
  }
  return sums16(lanes);
}

}  // namespace

void block_scores(float* score, const BlockScoreArgs& a, int64_t first, int64_t n, float* scratch) {
  const int64_t size = summary_rows(a.kind) * a.head_dim;
  if (a.kind == BlockSummary::mean)
    for (int64_t d = 0; d < a.head_dim; d += 16) {
      vf sum = zero();
      for (int64_t g = 0; g < a.group; g++) sum = add(sum, load(a.q + g * a.head_dim + d, a.head_dim - d));
      store(scratch + d, mul(sum, set1(1.0f / static_cast<float>(a.group))), a.head_dim - d);
    }
  for (int64_t begin = 0; begin < n; begin += 16) {
    const float* summary[16];
    for (int64_t i = 0; i < 16; i++) {
      const int64_t b = first + min64(begin + i, n - 1), slot = b * a.block;
      summary[i] = a.summary + (a.pages ? a.pages[slot / 16] * a.page_step + slot % 16 / a.block * size : b * size);
    }
    vf best;
    if (a.kind == BlockSummary::mean) {
      best = scores16<BlockSummary::mean>(scratch, summary, a.head_dim);
    } else {
      best = set1(-__builtin_inff());
      for (int64_t g = 0; g < a.group; g++)
        best = max(scores16<BlockSummary::minmax>(a.q + g * a.head_dim, summary, a.head_dim), best);
    }
    store(score + begin, best, n - begin);
  }
}

}  // namespace pare::PARE_ISA
