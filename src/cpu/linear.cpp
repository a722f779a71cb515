// Weights and linear layers.
#include "cpu/glue.h"
#include "ops/swiglu.h"

namespace pare::cpu {

// Calls f for parts of rows [first, first + rows) of a weight that share no panel.
template <class F>
static void parallel_panels(int64_t first, int64_t rows, int64_t inputs, F f) {
  const int64_t end = first + rows, panel = first / kPanel;
  parallel(weight_panels(end) - panel, 8.0 * static_cast<double>(inputs), [&](Interval r) {
    f(Interval{std::max(first, (panel + r.begin) * kPanel), std::min(end, (panel + r.end) * kPanel)});
  });
}

void pack_weight(const PackWeight& a, Stream) {
  const int64_t rows = a.rows.shape[0], inputs = a.w.inputs();
  float* const packed = a.w.packed.as<float>();
  const float* const from = a.rows.as<float>();
  const Kernels& k = cpu_kernels();
  parallel_panels(a.first, rows, inputs,
                  [&](Interval r) { k.pack(packed, from + (r.begin - a.first) * inputs, a.w.outputs(), inputs, r); });
}

void unpack_weight(const UnpackWeight& a, Stream) {
  const int64_t rows = a.rows.shape[0], inputs = a.w.inputs();
  const float* const packed = a.w.packed.as<float>();
  float* const to = a.rows.as<float>();
  const Kernels& k = cpu_kernels();
  parallel_panels(a.first, rows, inputs,
                  [&](Interval r) { k.unpack(to + (r.begin - a.first) * inputs, packed, inputs, r); });
}

constexpr double kFlopsPerNanosecond = 80;

// Threads divide the longer side of y, so that what all of them read is the smaller operand.
static void multiply(const GemmArgs& g, int64_t rows) {
  if (rows == 0) return;
  const Kernels& k = cpu_kernels();
  const int64_t panels = weight_panels(g.outputs);
  const int64_t scratch_rows = std::clamp<int64_t>(131072 / g.depth, k.tile_rows, kMaxScratchRows);
  const double time = 2.0 * static_cast<double>(rows * g.outputs * g.depth) / kFlopsPerNanosecond;
  const auto run = [&](Interval r, Interval p) { k.gemm(g, r, p, scratch(scratch_rows * g.depth + 16), scratch_rows); };
  if (g.outputs >= rows)
    parallel_shares(panels, rows < k.tile_rows / 2 ? 4 : 2, time, [&](Interval p) { run({0, rows}, p); });
  else
    parallel_shares(rows, k.tile_rows / 2, time, [&](Interval r) { run(r, {0, panels}); });
}

void linear_fwd(const LinearFwd& a, Stream stream) {
  const int64_t rows = a.x.shape[0], outputs = a.w.outputs(), inputs = a.w.inputs();
  const GemmArgs g{.y = a.y.as<float>(),
                   .x = a.x.as<float>(),
                   .packed = a.w.packed.as<float>(),
                   .bias = a.bias.as<float>(),
                   .residual = a.residual.as<float>(),
                   .y_stride = a.y.stride[0],
                   .x_stride = a.x.stride[0],
                   .residual_stride = a.residual.stride[0],
                   .depth = inputs,
                   .outputs = outputs};
  multiply(g, rows);
  if (a.swiglu) swiglu_fwd({a.swiglu, a.y}, stream);
  norm_rows(a.norm, a.y, stream);
}

void linear_bwd_input(const LinearBwdInput& a, Stream) {
  const int64_t rows = a.dy.shape[0], outputs = a.w.outputs(), inputs = a.w.inputs();
  float* const dx = a.dx.as<float>();
  const GemmArgs g{.y = dx,
                   .x = a.dy.as<float>(),
                   .packed = a.w.packed.as<float>(),
                   .bias = nullptr,
                   .residual = a.accumulate ? dx : nullptr,
                   .y_stride = a.dx.stride[0],
                   .x_stride = a.dy.stride[0],
                   .residual_stride = a.dx.stride[0],
                   .depth = outputs,
                   .outputs = inputs};
  if (rows == 0) return;
  const Kernels& k = cpu_kernels();
  const int64_t panels = weight_panels(inputs);
  const double time = 2.0 * static_cast<double>(rows * inputs * outputs) / kFlopsPerNanosecond;
  const auto run = [&](Interval r, Interval p) {
    k.gemm_transposed(g, r, p, scratch(gemm_transposed_scratch(r.end - r.begin, p.end - p.begin)));
  };
  // Each thread transposes the part of the weight that it reads, so they divide it where that leaves enough for all.
  if (inputs >= rows || panels >= 4 * threads())
    parallel_shares(panels, 2, time, [&](Interval p) { run({0, rows}, p); });
  else
    parallel_shares(rows, k.tile_rows / 2, time, [&](Interval r) { run(r, {0, panels}); });
}

void linear_bwd_weight(const LinearBwdWeight& a, Stream) {
  const int64_t rows = a.dy.shape[0], outputs = a.dy.shape[1], inputs = a.x.shape[1];
  const GemmTArgs g{.dw = a.dw.as<float>(),
                    .dy = a.dy.as<float>(),
                    .x = a.x.as<float>(),
                    .dy_stride = a.dy.stride[0],
                    .x_stride = a.x.stride[0],
                    .rows = rows,
                    .outputs = outputs,
                    .inputs = inputs};
  float* const dbias = a.dbias.as<float>();
  if (rows == 0) return;
  const Kernels& k = cpu_kernels();
  const int64_t panels = weight_panels(inputs);
  const double time = 2.0 * static_cast<double>(rows * outputs * inputs) / kFlopsPerNanosecond;
  const auto run = [&](Interval o, Interval p) {
    constexpr int64_t kAtOnce = 64;  // panels of x: their packed block stays in the L2 cache
    for (int64_t begin = p.begin; begin < p.end; begin += kAtOnce) {
      const Interval part{begin, std::min(begin + kAtOnce, p.end)};
      k.gemm_t(g, o, part, scratch(kGemmTDepth * kPanel * (part.end - part.begin + 1)));
    }
  };
  if (outputs >= inputs)
    parallel_shares(outputs, k.tile_rows / 2, time, [&](Interval o) { run(o, {0, panels}); });
  else
    parallel_shares(panels, 2, time, [&](Interval p) { run({0, outputs}, p); });
  if (dbias)
    parallel_shares(outputs, 16, 0.1 * static_cast<double>(rows * outputs),
                    [&](Interval columns) { k.sum_rows(dbias, g.dy, g.dy_stride, rows, columns); });
}

}  // namespace pare::cpu
