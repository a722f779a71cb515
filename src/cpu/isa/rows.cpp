// Everything that goes element by element or row by row: norms, RoPE, SwiGLU, row additions, AdamW.
#include "cpu/isa/kernel_list.h"
#include "cpu/isa/math.h"
#include "cpu/isa/tile.h"

namespace pare::PARE_ISA {

void exp_all(float* y, const float* x, int64_t n) {
  for_vectors(
      n, PARE_LANES_AT(i) { store(y + i, exp(load(x + i, lanes)), lanes); });
}

void log_all(float* y, const float* x, int64_t n) {
  for_vectors(
      n, PARE_LANES_AT(i) { store(y + i, log(load(x + i, lanes)), lanes); });
}

void add_all(float* y, const float* x, int64_t n) {
  for_vectors(
      n, PARE_LANES_AT(i) { store(y + i, add(load(y + i, lanes), load(x + i, lanes)), lanes); });
}

void add_rows(float* y, int64_t y_stride, const float* x, int64_t x_stride, const int32_t* index, int64_t rows,
              Range columns) {
  for (int64_t r = 0; r < rows; r++)
    add_all(y + index[r] * y_stride + columns.begin, x + r * x_stride + columns.begin, columns.end - columns.begin);
}

void sum_rows(float* y, const float* x, int64_t x_stride, int64_t rows, Range columns) {
  for_vectors(
      columns.end - columns.begin, PARE_LANES_AT(i) {
        const int64_t c = columns.begin + i;
        vf acc = load(y + c, lanes);
        for (int64_t r = 0; r < rows; r++) acc = add(acc, load(x + r * x_stride + c, lanes));
        store(y + c, acc, lanes);
      });
}

// By lane.
PARE_INLINE static vf row_squares(const float* x, int64_t n) {
  vf acc = zero();
  for_vectors(
      n, PARE_LANES_AT(i) {
        const vf v = load(x + i, lanes);
        acc = fma(v, v, acc);
      });
  return acc;
}
float sum_squares(const float* x, int64_t n) { return sum(row_squares(x, n)); }

// By lane: 1 / sqrt(squares / width + eps)
PARE_INLINE static vf inverse_rms(vf squares, int64_t width, float eps) {
  return div(set1(1), sqrt(add(div(squares, set1(static_cast<float>(width))), set1(eps))));
}

void rmsnorm_fwd(const NormArgs& a, Range rows) {
  // 16 rows at a time share their divisions and roots.
  for (int64_t first = rows.begin; first < rows.end; first += 16) {
    const int64_t n = min64(16, rows.end - first);
    const float* const x0 = a.x + first * a.x_stride;
    alignas(64) float rstd[16];
    const vf squares = sums(
        n, [&](int i) __attribute__((always_inline)) { return row_squares(x0 + i * a.x_stride, a.width); });
    store(rstd, inverse_rms(squares, a.width, a.eps));
    store(a.rstd + first, load(rstd), n);
    for (int64_t i = 0; i < n; i++) {
      const float* const x = x0 + i * a.x_stride;
      float* const y = a.y + (first + i) * a.y_stride;
      const vf s = set1(rstd[i]);
      for_vectors(
          a.width, PARE_LANES_AT(c) { store(y + c, mul(mul(load(x + c, lanes), s), load(a.w + c, lanes)), lanes); });
    }
  }
}

void rmsnorm_bwd_input(const NormBwdArgs& a, Range rows) {
  const vf width = set1(static_cast<float>(a.width));
  // 16 rows at a time share their divisions, and none waits for its own sum.
  for (int64_t first = rows.begin; first < rows.end; first += 16) {
    const int64_t n = min64(16, rows.end - first);
    const float *const x0 = a.x + first * a.x_stride, *const dy0 = a.dy + first * a.dy_stride;
    alignas(64) float mean[16];
    const vf products = sums(
        n, [&](int r) __attribute__((always_inline)) {
          const float *const x = x0 + r * a.x_stride, *const dy = dy0 + r * a.dy_stride;
          const vf s = set1(a.rstd[first + r]);
          vf acc = zero();
          for_vectors(
              a.width, PARE_LANES_AT(i) {
                acc = fma(mul(load(dy + i, lanes), load(a.w + i, lanes)), mul(load(x + i, lanes), s), acc);
              });
          return acc;
        });
    store(mean, div(products, width));
    for (int64_t r = 0; r < n; r++) {
      const float *const x = x0 + r * a.x_stride, *const dy = dy0 + r * a.dy_stride;
      float* const dx = a.dx + (first + r) * a.dx_stride;
      const vf s = set1(a.rstd[first + r]), m = set1(mean[r]);
      for_vectors(
          a.width, PARE_LANES_AT(i) {
            const vf xh = mul(load(x + i, lanes), s), dyw = mul(load(dy + i, lanes), load(a.w + i, lanes));
            vf d = mul(s, fnma(xh, m, dyw));
            if (a.accumulate) d = add(load(dx + i, lanes), d);
            store(dx + i, d, lanes);
          });
    }
  }
}

namespace {
// Columns [c, c + 16 kVectors) of dw, side by side so that no chain waits for another; the last vector has `lanes`.
template <int kVectors>
PARE_INLINE void weight_columns(const NormBwdArgs& a, int64_t c, int64_t lanes) {
  const auto in = [&](int j) __attribute__((always_inline)) { return j + 1 < kVectors ? 16 : lanes; };
  vf acc[kVectors];
  PARE_UNROLL
  for (int j = 0; j < kVectors; j++) acc[j] = load(a.dw + c + j * 16, in(j));
  for (int64_t r = 0; r < a.rows; r++) {
    const float *x = a.x + r * a.x_stride + c, *dy = a.dy + r * a.dy_stride + c;
    const vf s = set1(a.rstd[r]);
    PARE_UNROLL
    for (int j = 0; j < kVectors; j++) acc[j] = fma(load(dy + j * 16, in(j)), mul(load(x + j * 16, in(j)), s), acc[j]);
  }
  PARE_UNROLL
  for (int j = 0; j < kVectors; j++) store(a.dw + c + j * 16, acc[j], in(j));
}
}  // namespace

void rmsnorm_bwd_weight(const NormBwdArgs& a, Range columns) {
  int64_t c = columns.begin;
  for (; c + 64 <= columns.end; c += 64) weight_columns<4>(a, c, 16);
  for (; c + 32 <= columns.end; c += 32) weight_columns<2>(a, c, 16);
  for (; c < columns.end; c += 16) weight_columns<1>(a, c, min64(16, columns.end - c));
}

namespace {
// The elements c and c + D/2 of a head, or of 16 neighbours c.
struct Pair {
  vf a, b;
};
PARE_INLINE Pair rotate(Pair x, vf cosine, vf sine) {
  return {sub(mul(x.a, cosine), mul(x.b, sine)), add(mul(x.b, cosine), mul(x.a, sine))};
}
PARE_INLINE Pair rotate_back(Pair x, vf cosine, vf sine) {
  return {add(mul(x.a, cosine), mul(x.b, sine)), sub(mul(x.b, cosine), mul(x.a, sine))};
}

// Heads of consecutive rows, one after the other, without a division for each.
struct Heads {
  int64_t heads, width, n, h;
  Heads(int64_t first, int64_t heads, int64_t width) : heads(heads), width(width), n(first / heads), h(first % heads) {}
  PARE_INLINE int64_t at(int64_t stride) const { return n * stride + h * width; }
  PARE_INLINE void next() {
    if (++h == heads) h = 0, n++;
  }
};
}  // namespace

void rope(const RopeArgs& a, Range rows) {
  const int64_t half = a.width / 2;
  const vf sign = set1(a.sign);
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const float* angles = a.table + a.pos[r] * a.width;
    for_vectors(
        half, PARE_LANES_AT(i) {
          const vf c = load(angles + i, lanes), s = mul(load(angles + half + i, lanes), sign);
          float* x = a.x + r * a.x_stride + i;
          for (int64_t h = 0; h < a.heads; h++, x += a.width) {
            const Pair y = rotate({load(x, lanes), load(x + half, lanes)}, c, s);
            store(x, y.a, lanes);
            store(x + half, y.b, lanes);
          }
        });
  }
}

void qk_norm_rope_fwd(const QkNormRopeArgs& a, Range heads) {
  const int64_t half = a.width / 2;
  Heads head(heads.begin, a.heads, a.width);
  // As in rmsnorm_fwd, 16 at a time.
  for (int64_t first = heads.begin; first < heads.end; first += 16) {
    const int64_t n = min64(16, heads.end - first);
    alignas(64) float rstd[16];
    Heads again = head;
    const vf squares = sums(
        n, [&](int) __attribute__((always_inline)) {
          const float* const x = a.x + head.at(a.x_stride);
          head.next();
          return row_squares(x, a.width);
        });
    store(rstd, inverse_rms(squares, a.width, a.eps));
    store(a.rstd + first, load(rstd), n);
    for (int64_t i = 0; i < n; i++, again.next()) {
      const float *const x = a.x + again.at(a.x_stride), *const w = again.h < a.q_heads ? a.q_norm : a.k_norm;
      const float* const angles = a.table + a.pos[again.n] * a.width;
      float* const y = a.y + again.at(a.y_stride);
      const vf s = set1(rstd[i]);
      for_vectors(
          half, PARE_LANES_AT(c) {
            const auto normed = [&](int64_t c) __attribute__((always_inline)) {
              return mul(mul(load(x + c, lanes), s), load(w + c, lanes));
            };
            const Pair p =
                rotate({normed(c), normed(half + c)}, load(angles + c, lanes), load(angles + half + c, lanes));
            store(y + c, p.a, lanes);
            store(y + half + c, p.b, lanes);
          });
    }
  }
}

void qk_norm_rope_bwd(const QkNormRopeBwdArgs& a, Range heads, bool weights, float* room) {
  const int64_t half = a.width / 2;
  const vf width = set1(static_cast<float>(a.width));
  float *const d_normed = room, *const normed = room + 16 * a.width;  // of 16 heads; `normed` before the weight
  Heads head(heads.begin, a.heads, a.width);
  // As in rmsnorm_bwd_input, 16 at a time.
  for (int64_t first = heads.begin; first < heads.end; first += 16) {
    const int64_t n = min64(16, heads.end - first);
    alignas(64) float mean[16];
    Heads again = head;
    const vf products = sums(
        n, [&](int i) __attribute__((always_inline)) {
          const float *const x = a.x + head.at(a.x_stride), *const dy = a.dy + head.at(a.dy_stride);
          const float* const angles = a.table + a.pos[head.n] * a.width;
          const bool of_query = head.h < a.q_heads;
          const float* const w = of_query ? a.q_norm : a.k_norm;
          float* const dw = of_query ? a.dq_norm : a.dk_norm;
          float *const d = d_normed + i * a.width, *const xh = normed + i * a.width;
          const vf s = set1(a.rstd[first + i]);
          for_vectors(
              half, PARE_LANES_AT(c) {
                const Pair p = rotate_back({load(dy + c, lanes), load(dy + half + c, lanes)}, load(angles + c, lanes),
                                           load(angles + half + c, lanes));
                store(d + c, p.a, lanes);
                store(d + half + c, p.b, lanes);
              });
          vf acc = zero();
          for_vectors(
              a.width, PARE_LANES_AT(c) {
                const vf g = load(d + c, lanes), v = mul(load(x + c, lanes), s), gw = mul(g, load(w + c, lanes));
                if (weights) store(dw + c, fma(g, v, load(dw + c, lanes)), lanes);
                acc = fma(gw, v, acc);
                store(d + c, gw, lanes);
                store(xh + c, v, lanes);
              });
          head.next();
          return acc;
        });
    store(mean, div(products, width));
    for (int64_t i = 0; i < n; i++, again.next()) {
      const float *const d = d_normed + i * a.width, *const xh = normed + i * a.width;
      float* const dx = a.dx + again.at(a.dx_stride);
      const vf s = set1(a.rstd[first + i]), m = set1(mean[i]);
      for_vectors(
          a.width,
          PARE_LANES_AT(c) { store(dx + c, mul(s, fnma(load(xh + c, lanes), m, load(d + c, lanes))), lanes); });
    }
  }
}

void qk_norm_rope_bwd_weight(const QkNormRopeBwdArgs& a, Range pairs) {
  const int64_t half = a.width / 2;
  const auto add_pairs = [&](float* dw, int64_t first_head, int64_t end_head, int64_t c, int64_t lanes)
      __attribute__((always_inline)) {
    Pair acc{load(dw + c, lanes), load(dw + half + c, lanes)};
    for (int64_t n = 0; n < a.rows; n++) {
      const float* const angles = a.table + a.pos[n] * a.width + c;
      const vf cosine = load(angles, lanes), sine = load(angles + half, lanes);
      for (int64_t h = first_head; h < end_head; h++) {
        const float* const x = a.x + n * a.x_stride + h * a.width + c;
        const float* const dy = a.dy + n * a.dy_stride + h * a.width + c;
        const vf s = set1(a.rstd[n * a.heads + h]);
        const Pair g = rotate_back({load(dy, lanes), load(dy + half, lanes)}, cosine, sine);
        acc.a = fma(g.a, mul(load(x, lanes), s), acc.a);
        acc.b = fma(g.b, mul(load(x + half, lanes), s), acc.b);
      }
    }
    store(dw + c, acc.a, lanes);
    store(dw + half + c, acc.b, lanes);
  };
  for (int64_t i = pairs.begin; i < pairs.end;) {
    const bool of_query = i < half;
    const int64_t c = of_query ? i : i - half;
    const int64_t lanes = min64(16, min64(pairs.end - i, half - c));
    if (of_query)
      add_pairs(a.dq_norm, 0, a.q_heads, c, lanes);
    else
      add_pairs(a.dk_norm, a.q_heads, a.heads, c, lanes);
    i += lanes;
  }
}

void swiglu_fwd(float* y, const float* gate_up, int64_t width, Range rows) {
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const float *gate = gate_up + r * 2 * width, *up = gate + width;
    for_vectors(
        width, PARE_LANES_AT(i) {
          const vf g = load(gate + i, lanes), e = exp(sub(zero(), g));
          store(y + r * width + i, mul(div(g, add(set1(1), e)), load(up + i, lanes)), lanes);
        });
  }
}

// With s = sigmoid(g): d silu / dg = s (1 + g (1 - s)).  Rows of gate and up are many short runs to the machine: the
// one after the next is fetched here.
void swiglu_bwd(float* dgate_up, const float* dy, const float* gate_up, int64_t width, Range rows) {
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const float *gate = gate_up + r * 2 * width, *up = gate + width;
    float *dgate = dgate_up + r * 2 * width, *dup = dgate + width;
    const int64_t next = r + 2 < rows.end ? 4 * width : 0;
    for_vectors(
        width, PARE_LANES_AT(i) {
          __builtin_prefetch(gate + next + i), __builtin_prefetch(up + next + i);
          __builtin_prefetch(dy + r * width + next / 2 + i);
          const vf g = load(gate + i, lanes), u = load(up + i, lanes), d = load(dy + r * width + i, lanes);
          const vf s = div(set1(1), add(set1(1), exp(sub(zero(), g))));
          const vf slope = mul(s, fma(g, sub(set1(1), s), set1(1)));
          store(dgate + i, mul(mul(d, u), slope), lanes);
          store(dup + i, mul(d, mul(g, s)), lanes);
        });
  }
}

namespace {

// The rounding words of elements 64 g .. 64 g + 63 of the parameters (AdamW in ops.h), and room for a read past them.
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

void adamw(const AdamWArgs& a, Range elements) {
  adamw_run(a, a.p + elements.begin, elements.begin, elements.end - elements.begin);
}

// A tile of p at a time is brought into the order of moments and gradients.
void adamw_weight(const AdamWArgs& a, Range panels) {
  constexpr int64_t kColumns = 64;
  alignas(64) float tile[16 * kColumns];
  for (int64_t p = panels.begin; p < panels.end; p++) {
    const int64_t rows = min64(16, a.rows - p * 16);
    for (int64_t c = 0; c < a.width; c += kColumns) {
      const int64_t columns = min64(kColumns, a.width - c);
      float* const panel = a.p + (p * a.width + c) * 16;
      for (int64_t i = 0; i < columns; i += 16)
        transpose_tile(tile + i, kColumns, 16, panel + i * 16, 16, min64(16, columns - i), 16);
      for (int64_t r = 0; r < rows; r++) adamw_run(a, tile + r * kColumns, (p * 16 + r) * a.width + c, columns);
      for (int64_t i = 0; i < columns; i += 16)
        transpose_tile(panel + i * 16, 16, 16, tile + i, kColumns, 16, min64(16, columns - i));
    }
  }
}

}  // namespace pare::PARE_ISA
