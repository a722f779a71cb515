// The held-out problems.
#pragma once
#include "rl/metrics.h"
#include "rl/session.h"

namespace pare {

// Samples every problem of session.val as rollout.val_kwargs says; val-core/<task>/reward/mean@n and the length.  The
// draws are named by `step`.
Metrics evaluate(const Session& session, Rollout& rollout, int64_t step,
                 const std::function<void(const RolloutStats&)>& progress = {});

}  // namespace pare
