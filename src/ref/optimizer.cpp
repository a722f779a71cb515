// Sums of squares and AdamW.
#include "ops/optimizer.h"

#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "base/rng.h"
#include "ref/ref.h"

namespace pare::ref {

void square_sums(const SquareSums& a, Stream) {
  dispatch("square_sums", a.x, [&]<class T>(T) {
    const View<T> sums(a.sums), x(a.x);
    for (int64_t b = 0; b < a.sums.size(); b++) {
      double sum = 0;
      const auto [begin, end] = SquareSums::block(b, a.x.size(), a.run);
      for (int64_t i = begin; i < end; i++) sum += double(x(i)) * x(i);
      sums(b) = static_cast<T>(sum);
    }
  });
}

// Of element e of the gradient: p is the panels of a weight, or a row.
static int64_t place(const AdamW& a, int64_t e) {
  const int64_t inputs = a.grad.shape[1];
  return a.p.rank == 3 ? weight_place(e / inputs, e % inputs, inputs) : e;
}

// A moment, wide or in bf16 (AdamW says how it is rounded).
template <class T>
struct MomentView {
  explicit MomentView(const Tensor& t) : narrow(t.dtype == DType::bf16), data(t.data) {}
  double get(int64_t e) const {
    return narrow ? double(bf16_to_f32(static_cast<uint16_t*>(data)[e])) : double(static_cast<T*>(data)[e]);
  }
  void set(int64_t e, double x, uint32_t random) const {
    if (narrow)
      static_cast<uint16_t*>(data)[e] = f32_to_bf16_random(static_cast<float>(x), random);
    else
      static_cast<T*>(data)[e] = static_cast<T>(x);
  }
  bool narrow;
  void* data;
};

void adamw(const AdamW& a, Stream) {
  const Tensor& g = a.grad;
  dispatch("adamw", a.p, [&]<class T>(T) {
    const MomentView<T> m(a.m), v(a.v);
    const View<T> norm(a.norm);
    T* const p = a.p.as<T>();
    T* const master = a.master ? a.master.as<T>() : nullptr;
    const T* const grad = a.grad.as<T>();
    const double beta1 = a.beta1, beta2 = a.beta2;
    const double clip = a.max_norm > 0 ? std::min(1.0, double(a.max_norm) / norm(0)) : 1;
    const double c1 = 1 / (1 - std::pow(beta1, a.step)), c2 = 1 / (1 - std::pow(beta2, a.step));
    for (int64_t e = 0; e < g.size(); e++) {
      T& w = p[place(a, e)];
      const double x = grad[e] * clip;
      const double m1 = beta1 * m.get(e) + (1 - beta1) * x, v1 = beta2 * v.get(e) + (1 - beta2) * x * x;
      const auto at = static_cast<uint64_t>(a.first + e);
      const uint32_t word =
          m.narrow ? rng_word(a.key, 0, static_cast<uint32_t>(at >> 32), static_cast<uint32_t>(at)) : 0;
      m.set(e, m1, word);
      v.set(e, v1, word >> 16);
      const double old = master ? master[e] : w;
      w = static_cast<T>(old - a.lr * (m1 * c1 / (std::sqrt(v1 * c2) + a.eps) + a.weight_decay * old));
      if (master) master[e] = w;
    }
  });
}

}  // namespace pare::ref
