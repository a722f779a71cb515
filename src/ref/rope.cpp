// Rotary position embedding (Su et al. 2021); with the RMSNorm of the heads of queries and keys before it, as in Qwen3
// (Yang et al. 2025).
#include "ops/rope.h"

#include <cmath>
#include <vector>

#include "ref/paged.h"

namespace pare::ref {

// Rotates the pairs (c, c + D/2) of every head by +angle or -angle.
static void rotate(const char* op, const Tensor& tx, const Tensor& ttable, const Tensor& tpos, double sign) {
  const int64_t rows = tx.shape[0], heads = tx.shape[1], half = tx.shape[2] / 2;
  expect_index(op, "pos", tpos, ttable.shape[0]);
  dispatch(op, tx, [&]<class T>(T) {
    const View<T> x(tx), table(ttable);
    const View<int32_t> pos(tpos);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t h = 0; h < heads; h++)
        for (int64_t c = 0; c < half; c++) {
          const double cosine = table(pos(n), c), sine = sign * table(pos(n), half + c);
          const double p = x(n, h, c), q = x(n, h, half + c);
          x(n, h, c) = static_cast<T>(p * cosine - q * sine);
          x(n, h, half + c) = static_cast<T>(q * cosine + p * sine);
        }
  });
}

void rope_fwd(const RopeFwd& a, Stream) { rotate("rope_fwd", a.x, a.table, a.pos, 1); }
void rope_bwd(const RopeBwd& a, Stream) { rotate("rope_bwd", a.dx, a.table, a.pos, -1); }

void qk_norm_rope_fwd(const QkNormRopeFwd& a, Stream) {
  constexpr const char* op = "qk_norm_rope_fwd";
  const int64_t rows = a.x.shape[0], heads = a.x.shape[1], width = a.x.shape[2], half = width / 2;
  expect_index(op, "pos", a.pos, a.table.shape[0]);
  dispatch(op, a.x, [&]<class T>(T) {
    const View<T> y(a.y), rstd(a.rstd), x(a.x), q_norm(a.q_norm), k_norm(a.k_norm), table(a.table);
    const View<int32_t> pos(a.pos);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t h = 0; h < heads; h++) {
        const View<T>& w = h < a.q_heads ? q_norm : k_norm;
        double squares = 0;
        for (int64_t c = 0; c < width; c++) squares += double(x(n, h, c)) * x(n, h, c);
        const double r = 1 / std::sqrt(squares / width + a.eps);
        rstd(n, h) = static_cast<T>(r);
        for (int64_t c = 0; c < half; c++) {
          const double cosine = table(pos(n), c), sine = table(pos(n), half + c);
          const double p = x(n, h, c) * r * w(c), q = x(n, h, half + c) * r * w(half + c);
          y(n, h, c) = static_cast<T>(p * cosine - q * sine);
          y(n, h, half + c) = static_cast<T>(q * cosine + p * sine);
        }
      }
  });
}

void qk_norm_rope_bwd(const QkNormRopeBwd& a, Stream) {
  constexpr const char* op = "qk_norm_rope_bwd";
  const int64_t rows = a.x.shape[0], heads = a.x.shape[1], width = a.x.shape[2], half = width / 2;
  expect_index(op, "pos", a.pos, a.table.shape[0]);
  dispatch(op, a.x, [&]<class T>(T) {
    const View<T> dx(a.dx), dq_norm(a.dq_norm), dk_norm(a.dk_norm), dy(a.dy), x(a.x), q_norm(a.q_norm),
        k_norm(a.k_norm), rstd(a.rstd), table(a.table);
    const View<int32_t> pos(a.pos);
    const auto size = static_cast<size_t>(width);
    std::vector<double> q_sum(size), k_sum(size), d(size);  // d: of the normed head
    for (int64_t c = 0; a.dq_norm && c < width; c++) {
      q_sum[c] = dq_norm(c);
      k_sum[c] = dk_norm(c);
    }
    for (int64_t n = 0; n < rows; n++)
      for (int64_t h = 0; h < heads; h++) {
        const View<T>& w = h < a.q_heads ? q_norm : k_norm;
        std::vector<double>& sum = h < a.q_heads ? q_sum : k_sum;
        for (int64_t c = 0; c < half; c++) {
          const double cosine = table(pos(n), c), sine = table(pos(n), half + c);
          const double p = dy(n, h, c), q = dy(n, h, half + c);
          d[c] = p * cosine + q * sine;
          d[half + c] = q * cosine - p * sine;
        }
        const double r = rstd(n, h);
        double mean = 0;
        for (int64_t c = 0; c < width; c++) {
          mean += d[c] * w(c) * x(n, h, c) * r / width;
          sum[c] += d[c] * x(n, h, c) * r;
        }
        for (int64_t c = 0; c < width; c++) dx(n, h, c) = static_cast<T>(r * (d[c] * w(c) - x(n, h, c) * r * mean));
      }
    for (int64_t c = 0; a.dq_norm && c < width; c++) {
      dq_norm(c) = static_cast<T>(q_sum[c]);
      dk_norm(c) = static_cast<T>(k_sum[c]);
    }
  });
}

void kv_write(const KvWrite& a, Stream stream) {
  if (a.product.y) linear_fwd(a.product, stream);
  if (a.rotation.rope.x) rope_fwd(a.rotation.rope, stream);
  if (a.rotation.norm_rope.y) qk_norm_rope_fwd(a.rotation.norm_rope, stream);
  const int64_t rows = a.k.shape[0], kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2];
  const auto queries = read_queries("kv_write", a.queries, a.page_table, rows, a.k_pages.shape[0]);
  dispatch("kv_write", a.k, [&]<class T>(T) {
    const View<T> k_pages(a.k_pages), v_pages(a.v_pages), k(a.k), v(a.v);
    for (const PagedRow& s : queries) {
      const SlotPages pages{View<int32_t>(a.page_table), s.table_row};
      for (int64_t i = 0; i < s.rows; i++)
        for (int64_t h = 0; h < kv_heads; h++) {
          const int64_t slot = s.slots - s.rows + i, page = pages.page(slot), at = slot % kPageSlots;
          for (int64_t d = 0; d < head_dim; d++) k_pages(page, h, d, at) = k(s.row + i, h, d);
          for (int64_t d = 0; d < head_dim; d++) v_pages(page, h, at, d) = v(s.row + i, h, d);
          if (a.pos_pages) View<int32_t>(a.pos_pages)(page, h, at) = View<int32_t>(a.pos)(s.row + i);
        }
    }
  });
}

}  // namespace pare::ref
