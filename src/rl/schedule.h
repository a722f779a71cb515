// The learning rate of a training step.
#pragma once
#include <cstdint>
#include <vector>

namespace pare {

enum class LrSchedule { constant, linear, cosine };
enum class Moments { f32, bf16 };

struct OptimKeys {
  double lr = 1e-6;
  std::vector<double> betas = {0.9, 0.999};
  double eps = 1e-8, weight_decay = 0.01;
  Moments moments = Moments::f32;
  int64_t lr_warmup_steps = 0;
  LrSchedule lr_scheduler_type = LrSchedule::constant;
  double min_lr_ratio = 0, decay_fraction = 1;
  bool operator==(const OptimKeys&) const = default;
};

// Rate of step 1 .. total; all updates of a step share it.  Warm-up: lr * step / lr_warmup_steps, which reaches lr at
// that step.  Then lr, until linear and cosine fall from lr to min_lr_ratio * lr, which the last step has.  The fall
// starts after step (1 - decay_fraction) * total or after the warm-up, whichever is later.
double learning_rate(const OptimKeys& keys, int64_t step, int64_t total);

}  // namespace pare
