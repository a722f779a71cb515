// Rotary position embedding, alone and behind the norm of queries and keys.
#include "cpu/isa/norm.h"
#include "cpu/kernels.h"

namespace pare::PARE_ISA {

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
  int64_t heads, head_dim, n, h;
  Heads(int64_t first, int64_t heads, int64_t head_dim)
      : heads(heads), head_dim(head_dim), n(first / heads), h(first % heads) {}
  PARE_INLINE int64_t at(int64_t stride) const { return n * stride + h * head_dim; }
  PARE_INLINE void next() {
    if (++h == heads) {
      h = 0;
      n++;
    }
  }
};
}  // namespace

void rope(const RopeArgs& a, Interval rows) {
  const int64_t half = a.head_dim / 2;
  const vf sign = set1(a.sign);
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const float* angles = a.table + a.pos[r] * a.head_dim;
    for_vectors(
        half, PARE_LANES_AT(i) {
          const vf c = load(angles + i, lanes), s = mul(load(angles + half + i, lanes), sign);
          float* x = a.x + r * a.x_stride + i;
          for (int64_t h = 0; h < a.heads; h++, x += a.head_dim) {
            const Pair y = rotate({load(x, lanes), load(x + half, lanes)}, c, s);
            store(x, y.a, lanes);
            store(x + half, y.b, lanes);
          }
        });
  }
}

void qk_norm_rope_fwd(const QkNormRopeArgs& a, Interval heads) {
  const int64_t half = a.head_dim / 2;
  Heads head(heads.begin, a.heads, a.head_dim);
  // As in rmsnorm_fwd, 16 at a time.
  for (int64_t first = heads.begin; first < heads.end; first += 16) {
    const int64_t n = min64(16, heads.end - first);
    alignas(64) float rstd[16];
    Heads again = head;
    const vf squares = sums(
        n, [&](int) __attribute__((always_inline)) {
          const float* const x = a.x + head.at(a.x_stride);
          head.next();
          return row_squares(x, a.head_dim);
        });
    store(rstd, inverse_rms(squares, a.head_dim, a.eps));
    store(a.rstd + first, load(rstd), n);
    for (int64_t i = 0; i < n; i++, again.next()) {
      const float *const x = a.x + again.at(a.x_stride), *const w = again.h < a.q_heads ? a.q_norm : a.k_norm;
      const float* const angles = a.table + a.pos[again.n] * a.head_dim;
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

void qk_norm_rope_bwd(const QkNormRopeBwdArgs& a, Interval heads, bool weights, float* room) {
  const int64_t half = a.head_dim / 2;
  const vf head_dim = set1(static_cast<float>(a.head_dim));
  float *const d_normed = room, *const normed = room + 16 * a.head_dim;  // of 16 heads; `normed` before the weight
  Heads head(heads.begin, a.heads, a.head_dim);
  // As in rmsnorm_bwd_input, 16 at a time.
  for (int64_t first = heads.begin; first < heads.end; first += 16) {
    const int64_t n = min64(16, heads.end - first);
    alignas(64) float mean[16];
    Heads again = head;
    const vf products = sums(
        n, [&](int i) __attribute__((always_inline)) {
          const float *const x = a.x + head.at(a.x_stride), *const dy = a.dy + head.at(a.dy_stride);
          const float* const angles = a.table + a.pos[head.n] * a.head_dim;
          const bool of_query = head.h < a.q_heads;
          const float* const w = of_query ? a.q_norm : a.k_norm;
          float* const dw = of_query ? a.dq_norm : a.dk_norm;
          float *const d = d_normed + i * a.head_dim, *const xh = normed + i * a.head_dim;
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
              a.head_dim, PARE_LANES_AT(c) {
                const vf g = load(d + c, lanes), v = mul(load(x + c, lanes), s), gw = mul(g, load(w + c, lanes));
                if (weights) store(dw + c, fma(g, v, load(dw + c, lanes)), lanes);
                acc = fma(gw, v, acc);
                store(d + c, gw, lanes);
                store(xh + c, v, lanes);
              });
          head.next();
          return acc;
        });
    store(mean, div(products, head_dim));
    for (int64_t i = 0; i < n; i++, again.next()) {
      const float *const d = d_normed + i * a.head_dim, *const xh = normed + i * a.head_dim;
      float* const dx = a.dx + again.at(a.dx_stride);
      const vf s = set1(a.rstd[first + i]), m = set1(mean[i]);
      for_vectors(
          a.head_dim,
          PARE_LANES_AT(c) { store(dx + c, mul(s, fnma(load(xh + c, lanes), m, load(d + c, lanes))), lanes); });
    }
  }
}

void qk_norm_rope_bwd_weight(const QkNormRopeBwdArgs& a, Interval pairs) {
  const int64_t half = a.head_dim / 2;
  const auto add_pairs = [&](float* dw, int64_t first_head, int64_t end_head, int64_t c, int64_t lanes)
      __attribute__((always_inline)) {
    Pair acc{load(dw + c, lanes), load(dw + half + c, lanes)};
    for (int64_t n = 0; n < a.rows; n++) {
      const float* const angles = a.table + a.pos[n] * a.head_dim + c;
      const vf cosine = load(angles, lanes), sine = load(angles + half, lanes);
      for (int64_t h = first_head; h < end_head; h++) {
        const float* const x = a.x + n * a.x_stride + h * a.head_dim + c;
        const float* const dy = a.dy + n * a.dy_stride + h * a.head_dim + c;
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

}  // namespace pare::PARE_ISA
