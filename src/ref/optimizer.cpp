// Global norm and AdamW.
#include <algorithm>
#include <cmath>

#include "ref/ref.h"

namespace pare::ref {

void global_norm(const GlobalNorm& a, Stream) {
  const int64_t n = a.x.shape[0];
  expect_dense("global_norm", "norm", a.norm, {1});
  expect_dense("global_norm", "x", a.x, {n});
  dispatch("global_norm", a.x, [&]<class T>(T) {
    const View<T> norm(a.norm), x(a.x);
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += double(x(i)) * x(i);
    norm(0) = static_cast<T>(std::sqrt(squares));
  });
}

void adamw(const AdamW& a, Stream) {
  const int64_t n = a.p.shape[0];
  for (const auto& [name, t] : {std::pair{"p", &a.p}, {"m", &a.m}, {"v", &a.v}, {"grad", &a.grad}})
    expect_dense("adamw", name, *t, {n});
  expect_dense("adamw", "norm", a.norm, {1});
  if (a.master) expect_dense("adamw", "master", a.master, {n});
  expect(a.step >= 1, "ref: adamw: step ", a.step, ", expected 1 or more");
  dispatch("adamw", a.p, [&]<class T>(T) {
    const View<T> p(a.p), m(a.m), v(a.v), grad(a.grad), norm(a.norm), master(a.master ? a.master : a.p);
    const double beta1 = a.beta1, beta2 = a.beta2;
    const double clip = a.max_norm > 0 ? std::min(1.0, double(a.max_norm) / norm(0)) : 1;
    const double c1 = 1 / (1 - std::pow(beta1, a.step)), c2 = 1 / (1 - std::pow(beta2, a.step));
    for (int64_t i = 0; i < n; i++) {
      const double g = grad(i) * clip;
      const double m1 = beta1 * m(i) + (1 - beta1) * g, v1 = beta2 * v(i) + (1 - beta2) * g * g;
      m(i) = static_cast<T>(m1);
      v(i) = static_cast<T>(v1);
      const double old = master(i);
      p(i) = master(i) = static_cast<T>(old - a.lr * (m1 * c1 / (std::sqrt(v1 * c2) + a.eps) + a.weight_decay * old));
    }
  });
}

}  // namespace pare::ref
