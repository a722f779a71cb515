// Rotary position embedding, alone and behind the norm of queries and keys.
#include "ops/rope.h"

#include <cstring>

#include "cpu/paged.h"

namespace pare::cpu {

static void rotate(const char* op, const Tensor& x, const Tensor& table, const Tensor& pos, float sign) {
  const int64_t rows = x.shape[0], heads = x.shape[1], head_dim = x.shape[2];
  const RopeArgs r{.x = x.as<float>(),
                   .table = table.as<float>(),
                   .pos = index(op, "pos", pos, table.shape[0]),
                   .x_stride = x.stride[0],
                   .heads = heads,
                   .head_dim = head_dim,
                   .sign = sign};
  const Kernels& k = cpu_kernels();
  parallel(rows, 5 + 0.2 * static_cast<double>(heads * head_dim), [&](Interval range) { k.rope(r, range); });
}

void rope_fwd(const RopeFwd& a, Stream) { rotate("rope_fwd", a.x, a.table, a.pos, 1); }
void rope_bwd(const RopeBwd& a, Stream) { rotate("rope_bwd", a.dx, a.table, a.pos, -1); }

void qk_norm_rope_fwd(const QkNormRopeFwd& a, Stream) {
  constexpr const char* op = "qk_norm_rope_fwd";
  const int64_t rows = a.x.shape[0], heads = a.x.shape[1], head_dim = a.x.shape[2];
  const QkNormRopeArgs n{.y = a.y.as<float>(),
                         .rstd = a.rstd.as<float>(),
                         .x = a.x.as<float>(),
                         .q_norm = a.q_norm.as<float>(),
                         .k_norm = a.k_norm.as<float>(),
                         .table = a.table.as<float>(),
                         .pos = index(op, "pos", a.pos, a.table.shape[0]),
                         .y_stride = a.y.stride[0],
                         .x_stride = a.x.stride[0],
                         .heads = heads,
                         .q_heads = a.q_heads,
                         .head_dim = head_dim,
                         .eps = a.eps};
  const Kernels& k = cpu_kernels();
  parallel(rows * heads, 10 + 0.3 * static_cast<double>(head_dim), [&](Interval r) { k.qk_norm_rope_fwd(n, r); });
}

void qk_norm_rope_bwd(const QkNormRopeBwd& a, Stream) {
  constexpr const char* op = "qk_norm_rope_bwd";
  const int64_t rows = a.x.shape[0], heads = a.x.shape[1], head_dim = a.x.shape[2];
  const QkNormRopeBwdArgs n{.dx = a.dx.as<float>(),
                            .dq_norm = a.dq_norm.as<float>(),
                            .dk_norm = a.dk_norm.as<float>(),
                            .dy = a.dy.as<float>(),
                            .x = a.x.as<float>(),
                            .q_norm = a.q_norm.as<float>(),
                            .k_norm = a.k_norm.as<float>(),
                            .rstd = a.rstd.as<float>(),
                            .table = a.table.as<float>(),
                            .pos = index(op, "pos", a.pos, a.table.shape[0]),
                            .dx_stride = a.dx.stride[0],
                            .dy_stride = a.dy.stride[0],
                            .x_stride = a.x.stride[0],
                            .rows = rows,
                            .heads = heads,
                            .q_heads = a.q_heads,
                            .head_dim = head_dim};
  const Kernels& k = cpu_kernels();
  const double head = 10 + 0.5 * static_cast<double>(head_dim);
  // One thread computes all in one pass.  Several divide the columns of the weights first: dx may lie where dy does.
  const bool weights = bool{a.dq_norm}, one_pass = weights && threads() == 1;
  if (weights && !one_pass)
    parallel_shares(head_dim, 16, static_cast<double>(rows * heads) * head / 2,
                    [&](Interval pairs) { k.qk_norm_rope_bwd_weight(n, pairs); });
  parallel(rows * heads, head, [&](Interval r) { k.qk_norm_rope_bwd(n, r, one_pass, scratch(32 * head_dim)); });
}

void kv_write(const KvWrite& a, Stream stream) {
  if (a.product.y) linear_fwd(a.product, stream);
  if (a.rotation.rope.x) rope_fwd(a.rotation.rope, stream);
  if (a.rotation.norm_rope.y) qk_norm_rope_fwd(a.rotation.norm_rope, stream);
  constexpr const char* op = "kv_write";
  const int64_t rows = a.k.shape[0], kv_heads = a.k.shape[1], head_dim = a.k.shape[2], pages = a.k_pages.shape[0];
  float *const k_pages = a.k_pages.as<float>(), *const v_pages = a.v_pages.as<float>();
  const float *const k = a.k.as<float>(), *const v = a.v.as<float>();
  const PagedRow* const list = paged_rows(op, a.queries, rows, a.page_table, pages);
  const int32_t* const table = a.page_table.as<int32_t>();
  int32_t* const pos_pages = a.pos_pages ? a.pos_pages.as<int32_t>() : nullptr;
  const int32_t* const pos = pos_pages ? a.pos.as<int32_t>() : nullptr;
  const int64_t n = a.queries.shape[0];
  parallel(n, static_cast<double>(rows * kv_heads * head_dim) / static_cast<double>(std::max<int64_t>(n, 1)) + 5,
           [&](Interval range) {
             for (int64_t i = range.begin; i < range.end; i++)
               for (int64_t r = 0; r < list[i].rows; r++) {
                 const int64_t slot = list[i].slots - list[i].rows + r, row = list[i].row + r;
                 const int64_t page = table[list[i].table_row * a.page_table.stride[0] + slot / kPageSlots];
                 for (int64_t h = 0; h < kv_heads; h++) {
                   const int64_t at = (page * kv_heads + h) * head_dim * kPageSlots, s = slot % kPageSlots;
                   const float* const key = k + row * a.k.stride[0] + h * head_dim;
                   for (int64_t d = 0; d < head_dim; d++) k_pages[at + d * kPageSlots + s] = key[d];
                   std::memcpy(v_pages + at + s * head_dim, v + row * a.v.stride[0] + h * head_dim,
                               static_cast<size_t>(head_dim) * sizeof(float));
                   if (pos_pages) pos_pages[(page * kv_heads + h) * kPageSlots + s] = pos[row];
                 }
               }
           });
}

}  // namespace pare::cpu
