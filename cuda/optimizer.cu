// Global norm and AdamW (ops.h states the formulas).
//
// AdamW: p [n] act, m, v, grad, master [n] f32; m, v and master (p, without one) are updated in place, p is then the
// master's rounding.  Every element stands alone.  Bytes an element: 20 + 2 act-size, with a master 28 + act-size;
// limited by memory bandwidth.
// Norm: sqrt of the sum of squares, overwritten.  Order: blocks of 4096 elements, each a row sum of 16 lanes, blocks
// added ascending in double; so one thread block does it all, at a few per cent of the memory bandwidth.
#include <cmath>

#include "common.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kThreads = 256;
constexpr int kNormThreads = 1024, kLanes = 16, kGroups = kNormThreads / kLanes, kElements = 4096;

__global__ void __launch_bounds__(kNormThreads)
    norm_of(float* __restrict__ norm, const float* __restrict__ x, int64_t n) {
  __shared__ float sums[kGroups];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  double total = 0;  // of thread 0
  for (int64_t first = 0; first < n; first += kGroups * kElements) {
    const int64_t begin = first + int64_t{group} * kElements, end = min(begin + kElements, n);
    float sum = 0;
    for (int64_t i = begin + lane; i < end; i += kLanes) sum = fmaf(x[i], x[i], sum);
    for (int o = kLanes / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
    if (lane == 0) sums[group] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
      for (int g = 0; g < kGroups; g++) total += sums[g];  // 0 where nothing is left
    __syncthreads();                                       // before sums are overwritten
  }
  if (threadIdx.x == 0) *norm = static_cast<float>(sqrt(total));
}

struct Step {
  float max_norm, lr, beta1, beta2, eps, weight_decay, c1, c2;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    step(T* __restrict__ p, float* __restrict__ master, float* __restrict__ m, float* __restrict__ v,
         const float* __restrict__ grad, const float* __restrict__ norm, int64_t n, Step s) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const float scale = s.max_norm > 0 && *norm > s.max_norm ? s.max_norm / *norm : 1.f, g = grad[i] * scale;
  const float old = master ? master[i] : to_float(p[i]);
  const float m1 = fmaf(s.beta1, m[i], (1.f - s.beta1) * g), v1 = fmaf(s.beta2, v[i], (1.f - s.beta2) * (g * g));
  const float move = m1 * s.c1 / (sqrtf(v1 * s.c2) + s.eps);
  m[i] = m1, v[i] = v1;
  const float now = fmaf(-s.lr, fmaf(s.weight_decay, old, move), old);
  if (master) master[i] = now;
  p[i] = from_float<T>(now);
}

}  // namespace

void global_norm(const GlobalNorm& a, Stream stream) {
  const char* op = "global_norm";
  expect(is_shape(a.norm, {1}) && a.x.rank == 1 && a.x.contiguous(), op, ": norm ", a.norm.str(), " of x ", a.x.str());
  launch(op, norm_of, {.grid = 1, .block = kNormThreads}, stream, a.norm.as<float>(), a.x.as<float>(), a.x.size());
}

void adamw(const AdamW& a, Stream stream) {
  const char* op = "adamw";
  const int64_t n = a.p.size();
  for (const Tensor* t : {&a.p, &a.m, &a.v, &a.grad})
    expect(t->contiguous() && is_shape(*t, {n}), op, ": ", t->str(), " beside p ", a.p.str());
  expect(!a.master || (a.master.contiguous() && is_shape(a.master, {n})), op, ": master ", a.master.str(), " beside p ",
         a.p.str());
  expect(is_shape(a.norm, {1}), op, ": norm ", a.norm.str());
  expect(a.step >= 1, op, ": step ", a.step, ", expected 1 or more");
  if (n == 0) return;
  const double t = static_cast<double>(a.step);
  const Step s{.max_norm = a.max_norm,
               .lr = a.lr,
               .beta1 = a.beta1,
               .beta2 = a.beta2,
               .eps = a.eps,
               .weight_decay = a.weight_decay,
               .c1 = static_cast<float>(1 / (1 - std::pow(static_cast<double>(a.beta1), t))),
               .c2 = static_cast<float>(1 / (1 - std::pow(static_cast<double>(a.beta2), t)))};
  with_act(op, a.p, [&](auto type) {
    using T = decltype(type);
    launch(op, step<T>, {.grid = blocks(op, n, kThreads), .block = kThreads}, stream, a.p.as<T>(),
           a.master ? a.master.as<float>() : nullptr, a.m.as<float>(), a.v.as<float>(), a.grad.as<float>(),
           a.norm.as<float>(), n, s);
  });
}

}  // namespace pare::PARE_CUDA
