// The learning rate of a training step.
#pragma once
#include <cstdint>

#include "rl/config.h"

namespace pare {

// Rate of step 1 .. total; all updates of a step share it.  Warm-up: lr * step / lr_warmup_steps, which reaches lr at
// that step.  Then lr, until linear and cosine fall from lr to min_lr_ratio * lr, which the last step has.  The fall
// starts after step (1 - decay_fraction) * total or after the warm-up, whichever is later.
double learning_rate(const OptimKeys& keys, int64_t step, int64_t total);

}  // namespace pare
