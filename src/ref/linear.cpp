// Linear layers.
#include "ref/ref.h"

namespace pare::ref {

// Panels of 16 outputs: packed[panel][input][lane] = weight(16 * panel + lane, input), 0 past the last output.
template <class T, class Weight2D>
static void pack(T* packed, int64_t outputs, int64_t inputs, Weight2D weight) {
  for (int64_t panel = 0; panel * 16 < outputs; panel++)
    for (int64_t i = 0; i < inputs; i++)
      for (int64_t lane = 0; lane < 16; lane++) {
        const int64_t o = panel * 16 + lane;
        *packed++ = o < outputs ? weight(o, i) : T(0);
      }
}

void prepare_weight(const PrepareWeight& a, Stream) {
  const int64_t outputs = a.w.outputs(), inputs = a.w.inputs();
  expect_dense("prepare_weight", "w", a.w.w, {outputs, inputs});
  expect_dense("prepare_weight", "packed", a.w.packed, {packed_size(outputs, inputs)});
  if (a.w.packed_t) expect_dense("prepare_weight", "packed_t", a.w.packed_t, {packed_size(inputs, outputs)});
  dispatch("prepare_weight", a.w.w, [&]<class T>(T) {
    const View<T> w(a.w.w);
    pack(a.w.packed.as<T>(), outputs, inputs, w);
    if (a.w.packed_t) pack(a.w.packed_t.as<T>(), inputs, outputs, [&](int64_t i, int64_t o) { return w(o, i); });
  });
}

void linear_fwd(const LinearFwd& a, Stream) {
  const int64_t rows = a.x.shape[0], outputs = a.w.outputs(), inputs = a.w.inputs();
  expect_shape("linear_fwd", "y", a.y, {rows, outputs});
  expect_shape("linear_fwd", "x", a.x, {rows, inputs});
  expect_dense("linear_fwd", "w", a.w.w, {outputs, inputs});
  if (a.bias) expect_dense("linear_fwd", "bias", a.bias, {outputs});
  if (a.residual) expect_shape("linear_fwd", "residual", a.residual, {rows, outputs});
  dispatch("linear_fwd", a.x, [&]<class T>(T) {
    const View<T> y(a.y), x(a.x), w(a.w.w), bias(a.bias), residual(a.residual);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t o = 0; o < outputs; o++) {
        double sum = 0;
        for (int64_t i = 0; i < inputs; i++) sum += double(x(n, i)) * w(o, i);
        if (bias) sum += bias(o);
        if (residual) sum += residual(n, o);
        y(n, o) = static_cast<T>(sum);
      }
  });
}

void linear_bwd_input(const LinearBwdInput& a, Stream) {
  const int64_t rows = a.dy.shape[0], outputs = a.w.outputs(), inputs = a.w.inputs();
  expect_shape("linear_bwd_input", "dx", a.dx, {rows, inputs});
  expect_shape("linear_bwd_input", "dy", a.dy, {rows, outputs});
  expect_dense("linear_bwd_input", "w", a.w.w, {outputs, inputs});
  dispatch("linear_bwd_input", a.dy, [&]<class T>(T) {
    const View<T> dx(a.dx), dy(a.dy), w(a.w.w);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t i = 0; i < inputs; i++) {
        double sum = 0;
        for (int64_t o = 0; o < outputs; o++) sum += double(dy(n, o)) * w(o, i);
        dx(n, i) = static_cast<T>(a.accumulate ? dx(n, i) + sum : sum);
      }
  });
}

void linear_bwd_weight(const LinearBwdWeight& a, Stream) {
  const int64_t rows = a.dy.shape[0], outputs = a.dy.shape[1], inputs = a.x.shape[1];
  expect_dense("linear_bwd_weight", "dw", a.dw, {outputs, inputs});
  expect_shape("linear_bwd_weight", "dy", a.dy, {rows, outputs});
  expect_shape("linear_bwd_weight", "x", a.x, {rows, inputs});
  if (a.dbias) expect_dense("linear_bwd_weight", "dbias", a.dbias, {outputs});
  dispatch("linear_bwd_weight", a.dy, [&]<class T>(T) {
    const View<T> dw(a.dw), dbias(a.dbias), dy(a.dy), x(a.x);
    for (int64_t o = 0; o < outputs; o++) {
      for (int64_t i = 0; i < inputs; i++) {
        double sum = dw(o, i);
        for (int64_t n = 0; n < rows; n++) sum += double(dy(n, o)) * x(n, i);
        dw(o, i) = static_cast<T>(sum);
      }
      if (!dbias) continue;
      double sum = dbias(o);
      for (int64_t n = 0; n < rows; n++) sum += dy(n, o);
      dbias(o) = static_cast<T>(sum);
    }
  });
}

}  // namespace pare::ref
