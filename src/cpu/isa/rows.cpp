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

namespace {
// Where the heads of consecutive rows lie, without a division for each.
struct HeadRows {
  int64_t heads, width, n, h;
  HeadRows(int64_t first, int64_t heads, int64_t width)
      : heads(heads), width(width), n(first / heads), h(first % heads) {}
  PARE_INLINE int64_t at(int64_t stride) const { return n * stride + h * width; }
  PARE_INLINE void next() {
    if (++h == heads) h = 0, n++;
  }
};
}  // namespace

void rmsnorm_fwd(const NormArgs& a, Range rows) {
  const vf width = set1(static_cast<float>(a.width)), eps = set1(a.eps);
  HeadRows row(rows.begin, a.heads, a.width);
  // 16 rows at a time share their divisions and roots.
  for (int64_t first = rows.begin; first < rows.end; first += 16) {
    const int64_t n = min64(16, rows.end - first);
    alignas(64) float rstd[16];
    HeadRows again = row;
    const vf squares = sums(
        n, [&](int) __attribute__((always_inline)) {
          const float* const x = a.x + row.at(a.x_stride);
          row.next();
          return row_squares(x, a.width);
        });
    store(rstd, div(set1(1), sqrt(add(div(squares, width), eps))));
    store(a.rstd + first, load(rstd), n);
    for (int64_t i = 0; i < n; i++, again.next()) {
      const float* const x = a.x + again.at(a.x_stride);
      float* const y = a.y + again.at(a.y_stride);
      const vf s = set1(rstd[i]);
      for_vectors(
          a.width, PARE_LANES_AT(c) { store(y + c, mul(mul(load(x + c, lanes), s), load(a.w + c, lanes)), lanes); });
    }
  }
}

void rmsnorm_bwd_input(const NormBwdArgs& a, Range rows) {
  const vf width = set1(static_cast<float>(a.width));
  HeadRows row(rows.begin, a.heads, a.width);
  // 16 rows at a time share their divisions, and none waits for its own sum.
  for (int64_t first = rows.begin; first < rows.end; first += 16) {
    const int64_t n = min64(16, rows.end - first);
    alignas(64) float mean[16];
    HeadRows again = row;
    const vf products = sums(
        n, [&](int r) __attribute__((always_inline)) {
          const float *const x = a.x + row.at(a.x_stride), *const dy = a.dy + row.at(a.dy_stride);
          const vf s = set1(a.rstd[first + r]);
          vf acc = zero();
          for_vectors(
              a.width, PARE_LANES_AT(i) {
                acc = fma(mul(load(dy + i, lanes), load(a.w + i, lanes)), mul(load(x + i, lanes), s), acc);
              });
          row.next();
          return acc;
        });
    store(mean, div(products, width));
    for (int64_t r = 0; r < n; r++, again.next()) {
      const float *const x = a.x + again.at(a.x_stride), *const dy = a.dy + again.at(a.dy_stride);
      float* const dx = a.dx + again.at(a.dx_stride);
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
  for (int64_t n = 0, r = 0; n < a.rows; n++) {
    const float *x = a.x + n * a.x_stride + c, *dy = a.dy + n * a.dy_stride + c;
    for (int64_t h = 0; h < a.heads; h++, r++, x += a.width, dy += a.width) {
      const vf s = set1(a.rstd[r]);
      PARE_UNROLL
      for (int j = 0; j < kVectors; j++)
        acc[j] = fma(load(dy + j * 16, in(j)), mul(load(x + j * 16, in(j)), s), acc[j]);
    }
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
            const vf u = load(x, lanes), v = load(x + half, lanes);
            store(x, sub(mul(u, c), mul(v, s)), lanes);
            store(x + half, add(mul(v, c), mul(u, s)), lanes);
          }
        });
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
