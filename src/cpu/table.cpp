// The table `cpu`: fast f32.  Every op checks its tensors, cuts its outputs into ranges for the threads and calls the
// kernels of the instruction set in use (kernels.h).
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/glue.h"

namespace pare {

namespace cpu {

// ---- data movement

void upload(const Upload& a, Stream) {
  expect(a.dst.contiguous(), "cpu: upload: dst is not contiguous");
  if (a.dst.bytes()) std::memcpy(a.dst.data, a.src, a.dst.bytes());
}

void download(const Download& a, Stream) {
  expect(a.src.contiguous(), "cpu: download: src is not contiguous");
  if (a.src.bytes()) std::memcpy(a.dst, a.src.data, a.src.bytes());
}

void zero(const Zero& a, Stream) {
  expect(a.x.contiguous(), "cpu: zero: x is not contiguous");
  char* const x = static_cast<char*>(a.x.data);
  parallel(static_cast<int64_t>(a.x.bytes()), 0.05,
           [&](Range r) { std::memset(x + r.begin, 0, static_cast<size_t>(r.end - r.begin)); });
}

void accumulate(const Accumulate& a, Stream) {
  const int64_t n = a.y.size();
  float* const y = dense("accumulate", "y", a.y, {n});
  const float* const x = dense("accumulate", "x", a.x, {n});
  const Kernels& k = cpu_kernels();
  parallel(n, 0.3, [&](Range r) { k.add(y + r.begin, x + r.begin, r.end - r.begin); });
}

// The panels of a weight.
static float* weight(const char* op, const Weight& w, int64_t outputs, int64_t inputs) {
  expect(w.outputs() == outputs, "cpu: ", op, ": a weight of ", w.outputs(), " outputs, expected ", outputs);
  return dense(op, "packed", w.packed, {weight_panels(outputs), inputs, 16});
}
static void check_rows(const char* op, const Weight& w, int64_t first, int64_t rows) {
  expect(first >= 0 && first + rows <= w.outputs(), "cpu: ", op, ": rows ", first, " to ", first + rows, " of ",
         w.outputs());
}
// Calls f for parts of rows [first, first + rows) of a weight that share no panel.
template <class F>
static void parallel_panels(int64_t first, int64_t rows, int64_t inputs, F f) {
  const int64_t end = first + rows, panel = first / 16;
  parallel(weight_panels(end) - panel, 8.0 * static_cast<double>(inputs), [&](Range r) {
    f(Range{std::max(first, (panel + r.begin) * 16), std::min(end, (panel + r.end) * 16)});
  });
}

static void copy_rows(float* y, const float* x, const int32_t* ids, int64_t rows, int64_t width) {
  parallel(rows, 5 + 0.2 * static_cast<double>(width), [&](Range r) {
    for (int64_t i = r.begin; i < r.end; i++)
      std::memcpy(y + i * width, x + ids[i] * width, static_cast<size_t>(width) * sizeof(float));
  });
}

// Threads divide columns: the rows that are added to may repeat.
static void add_rows(float* y, const float* x, const int32_t* ids, int64_t rows, int64_t width) {
  const Kernels& k = cpu_kernels();
  parallel_shares(width, 16, static_cast<double>(rows) * (4 + 0.2 * static_cast<double>(width)),
                  [&](Range c) { k.add_rows(y, width, x, width, ids, rows, c); });
}

void gather_rows(const GatherRows& a, Stream) {
  const int64_t rows = a.index.shape[0], width = a.x.shape[1];
  float* const y = dense("gather_rows", "y", a.y, {rows, width});
  const float* const x = dense("gather_rows", "x", a.x, {a.x.shape[0], width});
  copy_rows(y, x, index("gather_rows", "index", a.index, {rows}, a.x.shape[0]), rows, width);
}

void scatter_add_rows(const ScatterAddRows& a, Stream) {
  const int64_t rows = a.index.shape[0], width = a.y.shape[1];
  float* const y = dense("scatter_add_rows", "y", a.y, {a.y.shape[0], width});
  const float* const x = dense("scatter_add_rows", "x", a.x, {rows, width});
  add_rows(y, x, index("scatter_add_rows", "index", a.index, {rows}, a.y.shape[0]), rows, width);
}

void embedding_fwd(const EmbeddingFwd& a, Stream) {
  const int64_t rows = a.ids.shape[0], width = a.table.inputs();
  float* const y = dense("embedding_fwd", "y", a.y, {rows, width});
  const float* const packed = weight("embedding_fwd", a.table, a.table.outputs(), width);
  const int32_t* const ids = index("embedding_fwd", "ids", a.ids, {rows}, a.table.outputs());
  parallel(rows, 5 + 2.0 * static_cast<double>(width), [&](Range r) {
    for (int64_t i = r.begin; i < r.end; i++) {
      const float* const from = packed + ids[i] / 16 * width * 16 + ids[i] % 16;
      for (int64_t c = 0; c < width; c++) y[i * width + c] = from[c * 16];
    }
  });
}

void embedding_bwd(const EmbeddingBwd& a, Stream) {
  const int64_t rows = a.ids.shape[0], width = a.dtable.shape[1];
  float* const dtable = dense("embedding_bwd", "dtable", a.dtable, {a.dtable.shape[0], width});
  const float* const dy = dense("embedding_bwd", "dy", a.dy, {rows, width});
  add_rows(dtable, dy, index("embedding_bwd", "ids", a.ids, {rows}, a.dtable.shape[0]), rows, width);
}

// ---- RMSNorm

void rmsnorm_fwd(const RmsnormFwd& a, Stream) {
  constexpr const char* op = "rmsnorm_fwd";
  const int64_t rows = a.x.shape[0], width = a.x.shape[1];
  const NormArgs n{.y = strided(op, "y", a.y, {rows, width}),
                   .rstd = dense(op, "rstd", a.rstd, {rows}),
                   .x = strided(op, "x", a.x, {rows, width}),
                   .w = dense(op, "w", a.w, {width}),
                   .y_stride = a.y.stride[0],
                   .x_stride = a.x.stride[0],
                   .width = width,
                   .eps = a.eps};
  const Kernels& k = cpu_kernels();
  parallel(rows, 10 + 0.2 * static_cast<double>(width), [&](Range r) { k.rmsnorm_fwd(n, r); });
}

void rmsnorm_bwd(const RmsnormBwd& a, Stream) {
  constexpr const char* op = "rmsnorm_bwd";
  const int64_t rows = a.x.shape[0], width = a.x.shape[1];
  const NormBwdArgs n{.dx = strided(op, "dx", a.dx, {rows, width}),
                      .dw = dense(op, "dw", a.dw, {width}),
                      .dy = strided(op, "dy", a.dy, {rows, width}),
                      .x = strided(op, "x", a.x, {rows, width}),
                      .w = dense(op, "w", a.w, {width}),
                      .rstd = dense(op, "rstd", a.rstd, {rows}),
                      .dx_stride = a.dx.stride[0],
                      .dy_stride = a.dy.stride[0],
                      .x_stride = a.x.stride[0],
                      .rows = rows,
                      .width = width,
                      .accumulate = a.accumulate};
  const Kernels& k = cpu_kernels();
  const double row = 10 + 0.3 * static_cast<double>(width);
  // dw first: dx may lie where dy does
  parallel_shares(width, 16, static_cast<double>(rows) * row / 2,
                  [&](Range columns) { k.rmsnorm_bwd_weight(n, columns); });
  parallel(rows, row, [&](Range r) { k.rmsnorm_bwd_input(n, r); });
}

// ---- linear

void pack_weight(const PackWeight& a, Stream) {
  const int64_t rows = a.rows.shape[0], inputs = a.w.inputs();
  float* const packed = weight("pack_weight", a.w, a.w.outputs(), inputs);
  const float* const from = dense("pack_weight", "rows", a.rows, {rows, inputs});
  check_rows("pack_weight", a.w, a.first, rows);
  const Kernels& k = cpu_kernels();
  parallel_panels(a.first, rows, inputs,
                  [&](Range r) { k.pack(packed, from + (r.begin - a.first) * inputs, a.w.outputs(), inputs, r); });
}

void unpack_weight(const UnpackWeight& a, Stream) {
  const int64_t rows = a.rows.shape[0], inputs = a.w.inputs();
  const float* const packed = weight("unpack_weight", a.w, a.w.outputs(), inputs);
  float* const to = dense("unpack_weight", "rows", a.rows, {rows, inputs});
  check_rows("unpack_weight", a.w, a.first, rows);
  const Kernels& k = cpu_kernels();
  parallel_panels(a.first, rows, inputs,
                  [&](Range r) { k.unpack(to + (r.begin - a.first) * inputs, packed, inputs, r); });
}

constexpr double kFlopsPerNanosecond = 80;

// Threads divide the longer side of y, so that what all of them read is the smaller operand.
static void multiply(const GemmArgs& g, int64_t rows) {
  if (rows == 0) return;
  const Kernels& k = cpu_kernels();
  const int64_t panels = (g.outputs + 15) / 16;
  const int64_t scratch_rows = std::clamp<int64_t>(131072 / g.depth, k.tile_rows, kMaxScratchRows);
  const double time = 2.0 * static_cast<double>(rows * g.outputs * g.depth) / kFlopsPerNanosecond;
  const auto run = [&](Range r, Range p) { k.gemm(g, r, p, scratch(scratch_rows * g.depth + 16), scratch_rows); };
  if (g.outputs >= rows)
    parallel_shares(panels, rows < k.tile_rows / 2 ? 4 : 2, time, [&](Range p) { run({0, rows}, p); });
  else
    parallel_shares(rows, k.tile_rows / 2, time, [&](Range r) { run(r, {0, panels}); });
}

void linear_fwd(const LinearFwd& a, Stream) {
  constexpr const char* op = "linear_fwd";
  const int64_t rows = a.x.shape[0], outputs = a.w.outputs(), inputs = a.w.inputs();
  const GemmArgs g{.y = strided(op, "y", a.y, {rows, outputs}),
                   .x = strided(op, "x", a.x, {rows, inputs}),
                   .packed = weight(op, a.w, outputs, inputs),
                   .bias = a.bias ? dense(op, "bias", a.bias, {outputs}) : nullptr,
                   .residual = a.residual ? strided(op, "residual", a.residual, {rows, outputs}) : nullptr,
                   .y_stride = a.y.stride[0],
                   .x_stride = a.x.stride[0],
                   .residual_stride = a.residual.stride[0],
                   .depth = inputs,
                   .outputs = outputs};
  multiply(g, rows);
}

void linear_bwd_input(const LinearBwdInput& a, Stream) {
  constexpr const char* op = "linear_bwd_input";
  const int64_t rows = a.dy.shape[0], outputs = a.w.outputs(), inputs = a.w.inputs();
  float* const dx = strided(op, "dx", a.dx, {rows, inputs});
  const GemmArgs g{.y = dx,
                   .x = strided(op, "dy", a.dy, {rows, outputs}),
                   .packed = weight(op, a.w, outputs, inputs),
                   .bias = nullptr,
                   .residual = a.accumulate ? dx : nullptr,
                   .y_stride = a.dx.stride[0],
                   .x_stride = a.dy.stride[0],
                   .residual_stride = a.dx.stride[0],
                   .depth = outputs,
                   .outputs = inputs};
  if (rows == 0) return;
  const Kernels& k = cpu_kernels();
  const int64_t panels = (inputs + 15) / 16;
  const double time = 2.0 * static_cast<double>(rows * inputs * outputs) / kFlopsPerNanosecond;
  const auto run = [&](Range r, Range p) {
    k.gemm_transposed(g, r, p, scratch(gemm_transposed_scratch(r.end - r.begin, p.end - p.begin)));
  };
  // Each thread transposes the part of the weight that it reads, so they divide it where that leaves enough for all.
  if (inputs >= rows || panels >= 4 * threads())
    parallel_shares(panels, 2, time, [&](Range p) { run({0, rows}, p); });
  else
    parallel_shares(rows, k.tile_rows / 2, time, [&](Range r) { run(r, {0, panels}); });
}

void linear_bwd_weight(const LinearBwdWeight& a, Stream) {
  constexpr const char* op = "linear_bwd_weight";
  const int64_t rows = a.dy.shape[0], outputs = a.dy.shape[1], inputs = a.x.shape[1];
  const GemmTArgs g{.dw = dense(op, "dw", a.dw, {outputs, inputs}),
                    .dy = strided(op, "dy", a.dy, {rows, outputs}),
                    .x = strided(op, "x", a.x, {rows, inputs}),
                    .dy_stride = a.dy.stride[0],
                    .x_stride = a.x.stride[0],
                    .rows = rows,
                    .outputs = outputs,
                    .inputs = inputs};
  float* const dbias = a.dbias ? dense(op, "dbias", a.dbias, {outputs}) : nullptr;
  if (rows == 0) return;
  const Kernels& k = cpu_kernels();
  const int64_t panels = (inputs + 15) / 16;
  const double time = 2.0 * static_cast<double>(rows * outputs * inputs) / kFlopsPerNanosecond;
  const auto run = [&](Range o, Range p) {
    constexpr int64_t kAtOnce = 64;  // panels of x: their packed block stays in the L2 cache
    for (int64_t begin = p.begin; begin < p.end; begin += kAtOnce) {
      const Range part{begin, std::min(begin + kAtOnce, p.end)};
      k.gemm_t(g, o, part, scratch(kGemmTDepth * 16 * (part.end - part.begin + 1)));
    }
  };
  if (outputs >= inputs)
    parallel_shares(outputs, k.tile_rows / 2, time, [&](Range o) { run(o, {0, panels}); });
  else
    parallel_shares(panels, 2, time, [&](Range p) { run({0, outputs}, p); });
  if (dbias)
    parallel_shares(outputs, 16, 0.1 * static_cast<double>(rows * outputs),
                    [&](Range columns) { k.sum_rows(dbias, g.dy, g.dy_stride, rows, columns); });
}

// ---- rotary position embedding, QK-norm, SwiGLU

static void rotate(const char* op, const Tensor& x, const Tensor& table, const Tensor& pos, float sign) {
  const int64_t rows = x.shape[0], heads = x.shape[1], width = x.shape[2];
  if (width % 2) throw std::logic_error(cat("cpu: ", op, ": head dim ", width, " is odd"));
  const RopeArgs r{.x = strided(op, "x", x, {rows, heads, width}),
                   .table = dense(op, "table", table, {table.shape[0], width}),
                   .pos = index(op, "pos", pos, {rows}, table.shape[0]),
                   .x_stride = x.stride[0],
                   .heads = heads,
                   .width = width,
                   .sign = sign};
  const Kernels& k = cpu_kernels();
  parallel(rows, 5 + 0.2 * static_cast<double>(heads * width), [&](Range range) { k.rope(r, range); });
}

void rope_fwd(const RopeFwd& a, Stream) { rotate("rope_fwd", a.x, a.table, a.pos, 1); }
void rope_bwd(const RopeBwd& a, Stream) { rotate("rope_bwd", a.dx, a.table, a.pos, -1); }

static void check_qk_heads(const char* op, const Tensor& x, int64_t q_heads) {
  expect(x.rank == 3 && x.shape[2] % 2 == 0 && 0 <= q_heads && q_heads <= x.shape[1], "cpu: ", op, ": x ", x.str(),
         " with ", q_heads, " heads of queries, expected [N, H+K, even D]");
}

void qk_norm_rope_fwd(const QkNormRopeFwd& a, Stream) {
  constexpr const char* op = "qk_norm_rope_fwd";
  check_qk_heads(op, a.x, a.q_heads);
  const int64_t rows = a.x.shape[0], heads = a.x.shape[1], width = a.x.shape[2];
  const QkNormRopeArgs n{.y = strided(op, "y", a.y, {rows, heads, width}),
                         .rstd = dense(op, "rstd", a.rstd, {rows, heads}),
                         .x = strided(op, "x", a.x, {rows, heads, width}),
                         .q_norm = dense(op, "q_norm", a.q_norm, {width}),
                         .k_norm = dense(op, "k_norm", a.k_norm, {width}),
                         .table = dense(op, "table", a.table, {a.table.shape[0], width}),
                         .pos = index(op, "pos", a.pos, {rows}, a.table.shape[0]),
                         .y_stride = a.y.stride[0],
                         .x_stride = a.x.stride[0],
                         .heads = heads,
                         .q_heads = a.q_heads,
                         .width = width,
                         .eps = a.eps};
  const Kernels& k = cpu_kernels();
  parallel(rows * heads, 10 + 0.3 * static_cast<double>(width), [&](Range r) { k.qk_norm_rope_fwd(n, r); });
}

void qk_norm_rope_bwd(const QkNormRopeBwd& a, Stream) {
  constexpr const char* op = "qk_norm_rope_bwd";
  check_qk_heads(op, a.x, a.q_heads);
  const int64_t rows = a.x.shape[0], heads = a.x.shape[1], width = a.x.shape[2];
  const QkNormRopeBwdArgs n{.dx = strided(op, "dx", a.dx, {rows, heads, width}),
                            .dq_norm = dense(op, "dq_norm", a.dq_norm, {width}),
                            .dk_norm = dense(op, "dk_norm", a.dk_norm, {width}),
                            .dy = strided(op, "dy", a.dy, {rows, heads, width}),
                            .x = strided(op, "x", a.x, {rows, heads, width}),
                            .q_norm = dense(op, "q_norm", a.q_norm, {width}),
                            .k_norm = dense(op, "k_norm", a.k_norm, {width}),
                            .rstd = dense(op, "rstd", a.rstd, {rows, heads}),
                            .table = dense(op, "table", a.table, {a.table.shape[0], width}),
                            .pos = index(op, "pos", a.pos, {rows}, a.table.shape[0]),
                            .dx_stride = a.dx.stride[0],
                            .dy_stride = a.dy.stride[0],
                            .x_stride = a.x.stride[0],
                            .rows = rows,
                            .heads = heads,
                            .q_heads = a.q_heads,
                            .width = width};
  const Kernels& k = cpu_kernels();
  const double head = 10 + 0.5 * static_cast<double>(width);
  // One thread computes all in one pass.  Several divide the columns of the weights first: dx may lie where dy does.
  const bool one_pass = threads() == 1;
  if (!one_pass)
    parallel_shares(width, 16, static_cast<double>(rows * heads) * head / 2,
                    [&](Range pairs) { k.qk_norm_rope_bwd_weight(n, pairs); });
  parallel(rows * heads, head, [&](Range r) { k.qk_norm_rope_bwd(n, r, one_pass, scratch(32 * width)); });
}

void swiglu_fwd(const SwigluFwd& a, Stream) {
  const int64_t rows = a.y.shape[0], width = a.y.shape[1];
  float* const y = dense("swiglu_fwd", "y", a.y, {rows, width});
  const float* const gate_up = dense("swiglu_fwd", "gate_up", a.gate_up, {rows, 2 * width});
  const Kernels& k = cpu_kernels();
  parallel(rows, 5 + 0.6 * static_cast<double>(width), [&](Range r) { k.swiglu_fwd(y, gate_up, width, r); });
}

void swiglu_bwd(const SwigluBwd& a, Stream) {
  const int64_t rows = a.dy.shape[0], width = a.dy.shape[1];
  float* const dgate_up = dense("swiglu_bwd", "dgate_up", a.dgate_up, {rows, 2 * width});
  const float* const dy = dense("swiglu_bwd", "dy", a.dy, {rows, width});
  const float* const gate_up = dense("swiglu_bwd", "gate_up", a.gate_up, {rows, 2 * width});
  const Kernels& k = cpu_kernels();
  parallel(rows, 5 + 0.8 * static_cast<double>(width), [&](Range r) { k.swiglu_bwd(dgate_up, dy, gate_up, width, r); });
}

// ---- optimizer

void global_norm(const GlobalNorm& a, Stream) {
  constexpr int64_t kBlock = 4096;
  const int64_t n = a.x.size(), blocks = norm_blocks(n);
  float* const norm = dense("global_norm", "norm", a.norm, {1});
  float* const sums = dense("global_norm", "sums", a.sums, {blocks});
  const float* const x = dense("global_norm", "x", a.x, {n});
  const Kernels& k = cpu_kernels();
  parallel(blocks, 400, [&](Range r) {
    for (int64_t b = r.begin; b < r.end; b++) sums[b] = k.sum_squares(x + b * kBlock, std::min(kBlock, n - b * kBlock));
  });
  double total = 0;
  for (int64_t b = 0; b < blocks; b++) total += sums[b];
  *norm = static_cast<float>(std::sqrt(total));
}

void adamw(const AdamW& a, Stream) {
  constexpr const char* op = "adamw";
  const bool of_weight = a.p.rank == 3;
  const int64_t rows = of_weight ? a.grad.shape[0] : 1, width = of_weight ? a.grad.shape[1] : a.grad.shape[0];
  const auto like_grad = [&](const char* name, const Tensor& t) {
    return of_weight ? dense(op, name, t, {rows, width}) : dense(op, name, t, {width});
  };
  const auto narrow = [&](const char* name, const Tensor& t) {
    expect(t.dtype == DType::bf16 && t.rank == a.grad.rank && t.shape == a.grad.shape && t.contiguous(),
           "cpu: adamw: ", name, " ", t, " beside ", a.grad);
    return static_cast<uint16_t*>(t.data);
  };
  const bool bf16 = a.m.dtype == DType::bf16;
  expect(!a.master, "cpu: adamw: a master beside f32 parameters");
  const float norm = *dense(op, "norm", a.norm, {1});
  const double step = static_cast<double>(a.step);
  const AdamWArgs args{.p = of_weight ? dense(op, "p", a.p, {weight_panels(rows), width, 16}) : like_grad("p", a.p),
                       .m = bf16 ? nullptr : like_grad("m", a.m),
                       .v = bf16 ? nullptr : like_grad("v", a.v),
                       .m_bf16 = bf16 ? narrow("m", a.m) : nullptr,
                       .v_bf16 = bf16 ? narrow("v", a.v) : nullptr,
                       .grad = like_grad("grad", a.grad),
                       .scale = a.max_norm > 0 && norm > a.max_norm ? a.max_norm / norm : 1,
                       .lr = a.lr,
                       .beta1 = a.beta1,
                       .beta2 = a.beta2,
                       .eps = a.eps,
                       .weight_decay = a.weight_decay,
                       .c1 = static_cast<float>(1 / (1 - std::pow(static_cast<double>(a.beta1), step))),
                       .c2 = static_cast<float>(1 / (1 - std::pow(static_cast<double>(a.beta2), step))),
                       .key = a.key,
                       .first = a.first,
                       .rows = rows,
                       .width = width};
  const Kernels& k = cpu_kernels();
  if (of_weight)
    parallel(weight_panels(rows), 20.0 * static_cast<double>(width), [&](Range p) { k.adamw_weight(args, p); });
  else
    parallel(width, 1, [&](Range r) { k.adamw(args, r); });
}

}  // namespace cpu

const Table table_cpu = {"cpu",
#define X(op, Args) cpu::op,
                         PARE_OPS(X)
#undef X
};

}  // namespace pare
