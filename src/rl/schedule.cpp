#include "rl/schedule.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace pare {

double learning_rate(const OptimKeys& keys, int64_t step, int64_t total) {
  expect(1 <= step && step <= total, "learning_rate: step ", step, " of ", total);
  const auto s = static_cast<double>(step), n = static_cast<double>(total);
  const auto warmup = static_cast<double>(keys.lr_warmup_steps);
  if (s < warmup) return keys.lr * s / warmup;
  const double start = std::max(warmup, (1 - keys.decay_fraction) * n);
  if (keys.lr_scheduler_type == LrSchedule::constant || s <= start) return keys.lr;
  const double done = (s - start) / (n - start);  // (0, 1]
  const double left = keys.lr_scheduler_type == LrSchedule::linear ? 1 - done : 0.5 * (1 + std::cos(M_PI * done));
  return keys.lr * (keys.min_lr_ratio + (1 - keys.min_lr_ratio) * left);
}

}  // namespace pare
