// Sums of squares and AdamW.
#include "cpu/isa/math.h"
#include "cpu/isa/norm.h"
#include "cpu/isa/tile.h"
#include "cpu/kernels.h"

namespace pare::PARE_ISA {

float sum_squares(const float* x, int64_t n) { return sum(row_squares(x, n)); }

namespace {

// The rounding words of elements 64 g .. 64 g + 63 of the parameters (AdamW), and room for a read past them.
struct RoundingWords {
  uint32_t word[64 + 16];
  PARE_INLINE void draw(int64_t g, uint64_t key) {
    constexpr uint32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint64_t e = static_cast<uint64_t>(g) * 64;
    vi c[4] = {iadd(iset1(static_cast<uint32_t>(e) / 4), iload(kLanes)), iset1(static_cast<uint32_t>(e >> 32)),
               iset1(0), iset1(0)};
    philox(c, key);
    uint32_t words[4][16];
    PARE_UNROLL
    for (int w = 0; w < 4; w++) istore(words[w], c[w]);
    for (int i = 0; i < 64; i++) word[i] = words[i % 4][i / 4];
  }
};

// The new moments in place, and the step that they give.
PARE_INLINE vf move(const AdamWArgs& a, vf g, vf* m, vf* v) {
  *m = fma(set1(a.beta1), *m, mul(set1(1 - a.beta1), g));
  *v = fma(set1(a.beta2), *v, mul(set1(1 - a.beta2), mul(g, g)));
  return div(mul(*m, set1(a.c1)), add(sqrt(mul(*v, set1(a.c2))), set1(a.eps)));
}
PARE_INLINE vf moved(const AdamWArgs& a, vf p, vf step) {
  return fnma(set1(a.lr), fma(set1(a.weight_decay), p, step), p);
}

// p [n] with the moments and gradients from element `at` on.
void adamw_run(const AdamWArgs& a, float* p, int64_t at, int64_t n) {
  if (!a.m_bf16) {
    for_vectors(
        n, PARE_LANES_AT(i) {
          const vf g = mul(load(a.grad + at + i, lanes), set1(a.scale)), old = load(p + i, lanes);
          vf m = load(a.m + at + i, lanes), v = load(a.v + at + i, lanes);
          const vf step = move(a, g, &m, &v);
          store(a.m + at + i, m, lanes);
          store(a.v + at + i, v, lanes);
          store(p + i, moved(a, old, step), lanes);
        });
    return;
  }
  const int64_t e = a.first + at;
  for (int64_t g = e / 64; g * 64 < e + n; g++) {
    RoundingWords words;
    words.draw(g, a.key);
    const int64_t begin = max64(e, g * 64), end = min64(e + n, g * 64 + 64);
    for_vectors(
        end - begin, PARE_LANES_AT(j) {
          const int64_t i = begin - e + j;
          const vf grad = mul(load(a.grad + at + i, lanes), set1(a.scale)), old = load(p + i, lanes);
          vf m = load_upper(a.m_bf16 + at + i, lanes), v = load_upper(a.v_bf16 + at + i, lanes);
          const vf step = move(a, grad, &m, &v);
          const vi word = iload(words.word + begin - g * 64 + j);
          store_upper(a.m_bf16 + at + i, iadd(bits(m), shr<16>(shl<16>(word))), lanes);
          store_upper(a.v_bf16 + at + i, iadd(bits(v), shr<16>(word)), lanes);
          store(p + i, moved(a, old, step), lanes);
        });
  }
}

}  // namespace

void adamw(const AdamWArgs& a, Interval elements) {
  adamw_run(a, a.p + elements.begin, elements.begin, elements.end - elements.begin);
}

// A tile of p at a time is brought into the order of moments and gradients.
void adamw_weight(const AdamWArgs& a, Interval panels) {
  constexpr int64_t kColumns = 64;
  alignas(64) float tile[kPanel * kColumns];
  for (int64_t p = panels.begin; p < panels.end; p++) {
    const int64_t rows = min64(kPanel, a.rows - p * kPanel);
    for (int64_t c = 0; c < a.width; c += kColumns) {
      const int64_t columns = min64(kColumns, a.width - c);
      float* const panel = a.p + (p * a.width + c) * kPanel;
      for (int64_t i = 0; i < columns; i += 16)
        transpose_tile(tile + i, kColumns, 16, panel + i * kPanel, kPanel, min64(16, columns - i), 16);
      for (int64_t r = 0; r < rows; r++) adamw_run(a, tile + r * kColumns, (p * kPanel + r) * a.width + c, columns);
      for (int64_t i = 0; i < columns; i += 16)
        transpose_tile(panel + i * kPanel, kPanel, 16, tile + i, kColumns, 16, min64(16, columns - i));
    }
  }
}

}  // namespace pare::PARE_ISA
