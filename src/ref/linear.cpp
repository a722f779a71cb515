// Weights: packing, embedding, linear layers.
#include "ref/ref.h"

namespace pare::ref {

// w(o, i)
template <class T>
static T& at(const Weight& w, int64_t o, int64_t i) {
  return w.packed.as<T>()[(o / 16 * w.inputs() + i) * 16 + o % 16];
}
static void expect_weight(const char* op, const Weight& w, int64_t outputs, int64_t inputs) {
  expect(w.outputs() == outputs, "ref: ", op, ": a weight of ", w.outputs(), " outputs, expected ", outputs);
  expect_dense(op, "packed", w.packed, {weight_panels(outputs), inputs, 16});
}

void pack_weight(const PackWeight& a, Stream) {
  const int64_t rows = a.rows.shape[0], inputs = a.w.inputs();
  expect_weight("pack_weight", a.w, a.w.outputs(), inputs);
  expect_dense("pack_weight", "rows", a.rows, {rows, inputs});
  expect(a.first >= 0 && a.first + rows <= a.w.outputs(), "ref: pack_weight: rows ", a.first, " to ", a.first + rows,
         " of ", a.w.outputs());
  const int64_t end = a.first + rows, padded = end == a.w.outputs() ? weight_panels(end) * 16 : end;
  dispatch("pack_weight", a.rows, [&]<class T>(T) {
    const View<T> from(a.rows);
    for (int64_t o = a.first; o < padded; o++)
      for (int64_t i = 0; i < inputs; i++) at<T>(a.w, o, i) = o < end ? from(o - a.first, i) : T(0);
  });
}

void unpack_weight(const UnpackWeight& a, Stream) {
  const int64_t rows = a.rows.shape[0], inputs = a.w.inputs();
  expect_weight("unpack_weight", a.w, a.w.outputs(), inputs);
  expect_dense("unpack_weight", "rows", a.rows, {rows, inputs});
  expect(a.first >= 0 && a.first + rows <= a.w.outputs(), "ref: unpack_weight: rows ", a.first, " to ", a.first + rows,
         " of ", a.w.outputs());
  dispatch("unpack_weight", a.rows, [&]<class T>(T) {
    const View<T> to(a.rows);
    for (int64_t o = 0; o < rows; o++)
      for (int64_t i = 0; i < inputs; i++) to(o, i) = at<T>(a.w, a.first + o, i);
  });
}

void embedding_fwd(const EmbeddingFwd& a, Stream) {
  const int64_t rows = a.ids.shape[0], width = a.table.inputs();
  expect_weight("embedding_fwd", a.table, a.table.outputs(), width);
  expect_dense("embedding_fwd", "y", a.y, {rows, width});
  expect_index("embedding_fwd", "ids", a.ids, rows, a.table.outputs());
  dispatch("embedding_fwd", a.y, [&]<class T>(T) {
    const View<T> y(a.y);
    const View<int32_t> ids(a.ids);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < width; c++) y(r, c) = at<T>(a.table, ids(r), c);
  });
}

void linear_fwd(const LinearFwd& a, Stream) {
  const int64_t rows = a.x.shape[0], outputs = a.w.outputs(), inputs = a.w.inputs();
  expect_shape("linear_fwd", "y", a.y, {rows, outputs});
  expect_shape("linear_fwd", "x", a.x, {rows, inputs});
  expect_weight("linear_fwd", a.w, outputs, inputs);
  if (a.bias) expect_dense("linear_fwd", "bias", a.bias, {outputs});
  if (a.residual) expect_shape("linear_fwd", "residual", a.residual, {rows, outputs});
  dispatch("linear_fwd", a.x, [&]<class T>(T) {
    const View<T> y(a.y), x(a.x), bias(a.bias), residual(a.residual);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t o = 0; o < outputs; o++) {
        double sum = 0;
        for (int64_t i = 0; i < inputs; i++) sum += double(x(n, i)) * at<T>(a.w, o, i);
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
  expect_weight("linear_bwd_input", a.w, outputs, inputs);
  dispatch("linear_bwd_input", a.dy, [&]<class T>(T) {
    const View<T> dx(a.dx), dy(a.dy);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t i = 0; i < inputs; i++) {
        double sum = 0;
        for (int64_t o = 0; o < outputs; o++) sum += double(dy(n, o)) * at<T>(a.w, o, i);
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
