// Scores of slots: queries against keys in pages, softmax over slots, redundancy of keys.
#include "cpu/isa/compression.h"

#include "cpu/isa/math.h"

namespace pare::PARE_ISA {
namespace {

// z[begin, end) becomes its softmax, what else its pages hold +0; `begin` lies in the first page.
PARE_INLINE void softmax(float* z, int64_t begin, int64_t end) {
  if (begin >= end) return;
  const int64_t n = round16(end);
  for (int64_t s = 0; s < begin; s++) z[s] = -__builtin_inff();
  for (int64_t s = end; s < n; s++) z[s] = -__builtin_inff();
  vf highest_lanes = load(z), sums = zero();
  for (int64_t s = 16; s < n; s += 16) highest_lanes = max(highest_lanes, load(z + s));
  const vf m = set1(highest(highest_lanes));
  for (int64_t s = 0; s < n; s += 16) {
    const vf p = exp_at_most_1(sub(load(z + s), m));
    store(z + s, p);
    sums = add(sums, p);
  }
  const vf total = set1(sum(sums));
  for (int64_t s = 0; s < n; s += 16) store(z + s, div(load(z + s), total));
}

// y[i] (n of them) = pooled x over [i - kernel / 2, i + kernel / 2]; kernel / 2 floats before and after x are free.
void pool_slots(float* y, float* x, int64_t n, Pool pool, int64_t kernel) {
  const int64_t side = kernel / 2;
  const float outside = pool == Pool::max ? -__builtin_inff() : 0;
  for (int64_t i = 0; i < side; i++) x[-1 - i] = x[n + i] = outside;
  for_vectors(
      n, PARE_LANES_AT(i) {
        vf v = load(x + i - side, lanes);
        for (int64_t j = 1; j < kernel; j++) {
          const vf next = load(x + i - side + j, lanes);
          v = pool == Pool::max ? max(v, next) : add(v, next);
        }
        if (pool == Pool::avg) v = div(v, set1(static_cast<float>(kernel)));
        store(y + i, v, lanes);
      });
}

// The probabilities of one query's group, whose logits are z [group][stride]: they end in z[0].
void group_probability(float* z, int64_t stride, const KvWindowArgs& a, int64_t begin, int64_t end) {
  const vf scale = set1(a.scale), count = set1(static_cast<float>(a.group));
  const bool prob = a.aggregate == GqaAgg::mean_prob, best = a.aggregate == GqaAgg::max_logit;
  for (int64_t g = 0; g < a.group; g++) {
    for (int64_t s = 0; s < end; s += 16) store(z + g * stride + s, mul(load(z + g * stride + s), scale));
    if (prob) softmax(z + g * stride, begin, end);
  }
  for (int64_t s = 0; s < end; s += 16) {
    vf x = load(z + s);
    for (int64_t g = 1; g < a.group; g++) {
      const vf next = load(z + g * stride + s);
      x = best ? max(x, next) : add(x, next);
    }
    store(z + s, best ? x : div(x, count));
  }
  if (!prob) softmax(z, begin, end);
}

}  // namespace

void kv_window_scores(const KvWindowArgs& a, const KvCompression& e, float* scratch) {
  const int64_t base = e.first / 16 * 16, begin = e.first - base, candidates = e.slots - e.recent - base;
  if (begin >= candidates) return;
  const int64_t rows = a.window * a.group, side = round16(a.kernel / 2);
  const int64_t last = a.span == SoftmaxSpan::exclude_window ? candidates : e.slots - base, stride = round16(last);
  float *q = scratch, *z = q + round16(rows * a.head_dim), *raw = z + rows * stride + side;
  for (int64_t t = 0; t < a.window; t++) {
    const float* from = a.windows + (a.window_first + t) % a.window * a.window_stride;
    for_vectors(
        a.group * a.head_dim,
        PARE_LANES_AT(i) { store(q + t * a.group * a.head_dim + i, load(from + i, lanes), lanes); });
  }
  multiply({.c = z,
            .c_stride = stride,
            .a = q,
            .a_stride = a.head_dim,
            .by_columns = false,
            .base = a.k_pages,
            .pages = a.pages + base / 16,
            .step = a.page_stride,
            .width = a.head_dim},
           rows, stride / 16);
  for (int64_t s = 0; s < candidates; s += 16) store(raw + s, zero());
  for (int64_t t = 0; t < a.window; t++) {
    float* const p = z + t * a.group * stride;
    group_probability(p, stride, a, begin,
                      a.span == SoftmaxSpan::exclude_window ? candidates : e.slots - base - a.window + t + 1);
    for (int64_t s = 0; s < candidates; s += 16) store(raw + s, add(load(raw + s), load(p + s)));
  }
  const vf window = set1(static_cast<float>(a.window));
  for (int64_t s = 0; s < candidates; s += 16) store(raw + s, div(load(raw + s), window));
  pool_slots(a.score + e.first, raw + begin, candidates - begin, a.pool, a.kernel);
}

namespace {

// What is known of the columns of S so far: lanes are columns.
struct Columns {
  float *sum, *last, *similar;  // sum of S; the last row above the threshold, or `first`; S there
  vf threshold;
  int64_t first;
};
// Adds rows [row, row + n) of S, at s with `stride`, to the 16 columns at `column`.
PARE_INLINE void add_rows_of_s(const Columns& c, int64_t column, const float* s, int64_t stride, int64_t row,
                               int64_t n) {
  vf total = load(c.sum + column), last = load(c.last + column), similar = load(c.similar + column);
  if (row == c.first) similar = load(s);
  for (int64_t i = 0; i < n; i++) {
    const vf x = load(s + i * stride);
    const mask alike = less(c.threshold, x);
    total = add(total, x);
    last = select(alike, set1(static_cast<float>(row + i)), last);
    similar = select(alike, x, similar);
  }
  store(c.sum + column, total);
  store(c.last + column, last);
  store(c.similar + column, similar);
}

}  // namespace

// S is symmetric bit by bit (its elements are chains of commuting products), so a block of 16 x 16 is computed once:
// block (J, I) with I <= J is 16 rows for the columns of I, and transposed 16 rows for the columns of J.  With J, then
// I ascending every column still sees its rows ascending.
void kv_redundancy(const KvRedundancyArgs& a, const KvCompression& e, float* scratch) {
  const int64_t base = e.first / 16 * 16, begin = e.first - base, end = e.slots - base, panels = round16(end) / 16;
  const int64_t candidates = e.slots - e.recent - e.first;
  if (candidates <= 0) return;
  constexpr int64_t kGroup = 4;  // blocks that are computed at once
  float *unit = scratch, *s = unit + panels * a.head_dim * 16, *across = s + 16 * kGroup * 16;
  unit_keys(unit, a, a.pages + base / 16, begin, end);
  const Columns c{.sum = a.workspace,
                  .last = a.workspace + a.row,
                  .similar = a.workspace + 2 * a.row,
                  .threshold = set1(a.threshold),
                  .first = begin};
  for (int64_t i = 0; i < panels * 16; i += 16) {
    store(c.sum + i, zero());
    store(c.similar + i, zero());
    store(c.last + i, set1(static_cast<float>(begin)));
  }
  // Rows of S that a panel holds.
  const auto low = [&](int64_t panel) { return panel ? 0 : begin; };
  const auto count = [&](int64_t panel) { return min64(end - panel * 16, 16) - low(panel); };
  for (int64_t j = 0; j < panels; j++)
    for (int64_t group = 0; group <= j; group += kGroup) {
      const int64_t n = min64(kGroup, j + 1 - group);
      multiply({.c = s,
                .c_stride = 16 * kGroup,
                .a = unit + j * a.head_dim * 16,
                .a_stride = 0,
                .by_columns = true,
                .base = unit + group * a.head_dim * 16,
                .pages = nullptr,
                .step = a.head_dim * 16,
                .width = a.head_dim},
               16, n);
      for (int64_t p = 0; p < n; p++) {
        const int64_t i = group + p;
        float* const block = s + 16 * p;
        if (i == j)
          for (int64_t d = 0; d < 16; d++) block[d * 16 * kGroup + d] = 0;
        add_rows_of_s(c, i * 16, block + low(j) * 16 * kGroup, 16 * kGroup, j * 16 + low(j), count(j));
        if (i == j) continue;
        vf r[16];
        PARE_UNROLL
        for (int d = 0; d < 16; d++) r[d] = load(block + d * 16 * kGroup);
        transpose(r);
        PARE_UNROLL
        for (int d = 0; d < 16; d++) store(across + d * 16, r[d]);
        add_rows_of_s(c, j * 16, across + low(i) * 16, 16, i * 16 + low(i), count(i));
      }
    }
  for (int64_t i = begin; i < end; i++) c.sum[static_cast<int64_t>(c.last[i])] -= c.similar[i];
  float* const r = a.workspace + 3 * a.row;
  const vf n = set1(static_cast<float>(end - begin)), lambda = set1(a.lambda), rest = set1(1 - a.lambda);
  for (int64_t i = 0; i < end; i += 16) store(r + i, div(load(c.sum + i), n));
  softmax(r, begin, end);
  float* const score = a.score + e.first;
  for_vectors(
      candidates, PARE_LANES_AT(i) {
        store(score + i, sub(mul(lambda, load(score + i, lanes)), mul(rest, load(r + begin + i, lanes))), lanes);
      });
}

}  // namespace pare::PARE_ISA
