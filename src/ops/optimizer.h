// The squares of a gradient, and AdamW (roles of types and orders of sums: list.h).
#pragma once
#include <array>
#include <cstdint>

#include "ops/contract.h"
#include "ops/cost.h"
#include "ops/linear.h"

namespace pare {

// The sums whose sum is the square of a norm.  Order: row sums (list.h) of blocks of 4096 elements, which begin anew
// every `run` elements, where a vector of parameters may be cut between ranks (model/parts.h); whoever needs the norm
// adds the blocks ascending in double.
constexpr int64_t kNormBlock = 4096;
PARE_HOST_DEVICE constexpr int64_t norm_blocks(int64_t n) { return (n + kNormBlock - 1) / kNormBlock; }
inline int64_t norm_blocks(int64_t n, int64_t run) { return n / run * norm_blocks(run) + norm_blocks(n % run); }
struct SquareSums {
  Tensor sums;  // stat [norm_blocks(n, run)] out
  Tensor x;     // stat [n]
  int64_t run;
  void check(Contract& c) const {
    c.that(run >= 1, "run is ", run, ", expected 1 or more");
    c.stat("sums", sums, {norm_blocks(x.shape[0], run)});
    c.stat("x", x, {x.shape[0]});
  }
  // Elements of block b.
  struct Block {
    int64_t begin, end;
  };
  PARE_HOST_DEVICE static Block block(int64_t b, int64_t n, int64_t run) {
    const int64_t first = b / norm_blocks(run) * run, begin = first + b % norm_blocks(run) * kNormBlock;
    const int64_t last = first + run < n ? first + run : n;
    return {begin, begin + kNormBlock < last ? begin + kNormBlock : last};
  }
  Cost cost() const { return {2 * x.size(), detail::total_bytes(x), detail::total_bytes(sums)}; }
  auto outputs() const { return std::array{sums}; }
};
// AdamW (Loshchilov & Hutter 2019), `master` in place of p where there is one, with g = grad * min(1, max_norm / norm):
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   p -= lr (m c1 / (sqrt(v c2) + eps) + weight_decay p),  c1 = 1 / (1 - beta1^step), c2 = 1 / (1 - beta2^step)
//
// Moments in bf16 (beside act f32 or bf16) are computed in f32 and rounded up or down by chance, in proportion to the
// distance, so that their means are right: with beta2 = .999 a v that is rounded to nearest would never fall, since
// 1/1000 of it is less than half the distance to the next bf16.  Element e of the parameters (`first` is that of
// element 0) draws word = rng_word(key, 0, e >> 32, e mod 2^32): its low 16 bits are added to the bits of m, the high
// ones to those of v, and the low 16 bits of the sums dropped.  p moves by the moments before the rounding.
struct AdamW {
  Tensor p;        // act [n] acc; or Weight::packed, where grad, m, v and master are [O, I]; out where there is a
                   // master, whose rounding it then is
  Tensor m, v;     // stat or bf16, shape of grad, acc
  Tensor grad;     // stat [n] or [O, I]
  Tensor norm;     // stat [1]: of the whole gradient
  float max_norm;  // 0: no clipping
  float lr, beta1, beta2, eps, weight_decay;
  int64_t step;  // from 1
  uint64_t key = 0;
  int64_t first = 0;
  Tensor master{};  // stat, shape of grad, acc, or absent: the parameters that bf16 is too short for
  void check(Contract& c) const {
    const int64_t n = grad.shape[0], I = grad.shape[1];
    const bool of_weight = p.rank == 3;
    of_weight ? c.act("p", p, {weight_panels(n), I, kPanel}) : c.act("p", p, {n});
    const DType stat = p.dtype == DType::f64 ? DType::f64 : DType::f32;
    const DType moment = m.dtype == DType::bf16 ? DType::bf16 : stat;
    const auto like_grad = [&](const char* name, const Tensor& t, DType dtype) {
      of_weight ? c.tensor(name, t, dtype, {n, I}) : c.tensor(name, t, dtype, {n});
    };
    like_grad("grad", grad, stat);
    like_grad("m", m, moment);
    like_grad("v", v, moment);
    if (master) like_grad("master", master, stat);
    c.stat("norm", norm, {1});
    c.that(step >= 1, "step is ", step, ", expected 1 or more");
  }
  Cost cost() const {
    return {12 * grad.size(), detail::total_bytes(master ? master : p, m, v, grad),
            detail::total_bytes(p, m, v, master)};
  }
  auto outputs() const { return std::array{p, m, v}; }
};

}  // namespace pare
