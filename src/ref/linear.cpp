// Weights and linear layers.
#include "ops/swiglu.h"
#include "ref/ref.h"

namespace pare::ref {

void pack_weight(const PackWeight& a, Stream) {
  const int64_t rows = a.rows.shape[0], inputs = a.w.inputs();
  const int64_t end = a.first + rows, padded = end == a.w.outputs() ? weight_panels(end) * kPanel : end;
  dispatch("pack_weight", a.rows, [&]<class T>(T) {
    const View<T> from(a.rows);
    for (int64_t o = a.first; o < padded; o++)
      for (int64_t i = 0; i < inputs; i++) element<T>(a.w, o, i) = o < end ? from(o - a.first, i) : T(0);
  });
}

void unpack_weight(const UnpackWeight& a, Stream) {
  const int64_t rows = a.rows.shape[0], inputs = a.w.inputs();
  dispatch("unpack_weight", a.rows, [&]<class T>(T) {
    const View<T> to(a.rows);
    for (int64_t o = 0; o < rows; o++)
      for (int64_t i = 0; i < inputs; i++) to(o, i) = element<T>(a.w, a.first + o, i);
  });
}

void linear_fwd(const LinearFwd& a, Stream stream) {
  const int64_t rows = a.x.shape[0], outputs = a.w.outputs(), inputs = a.w.inputs();
  dispatch("linear_fwd", a.x, [&]<class T>(T) {
    const View<T> y(a.y), x(a.x), bias(a.bias), residual(a.residual);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t o = 0; o < outputs; o++) {
        double sum = 0;
        for (int64_t i = 0; i < inputs; i++) sum += double(x(n, i)) * element<T>(a.w, o, i);
        if (bias) sum += bias(o);
        if (residual) sum += residual(n, o);
        y(n, o) = static_cast<T>(sum);
      }
  });
  if (a.swiglu) swiglu_fwd({a.swiglu, a.y}, stream);
  norm_rows(a.norm, a.y, stream);
}

void linear_bwd_input(const LinearBwdInput& a, Stream) {
  const int64_t rows = a.dy.shape[0], outputs = a.w.outputs(), inputs = a.w.inputs();
  dispatch("linear_bwd_input", a.dy, [&]<class T>(T) {
    const View<T> dx(a.dx), dy(a.dy);
    for (int64_t n = 0; n < rows; n++)
      for (int64_t i = 0; i < inputs; i++) {
        double sum = 0;
        for (int64_t o = 0; o < outputs; o++) sum += double(dy(n, o)) * element<T>(a.w, o, i);
        dx(n, i) = static_cast<T>(a.accumulate ? dx(n, i) + sum : sum);
      }
  });
}

void linear_bwd_weight(const LinearBwdWeight& a, Stream) {
  const int64_t rows = a.dy.shape[0], outputs = a.dy.shape[1], inputs = a.x.shape[1];
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
