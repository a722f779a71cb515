#pragma once
#include <nlohmann/json_fwd.hpp>

namespace pare {

// `peak_flops`: of one core.  Where the time of a GRPO step goes: prints and returns tokens per second of rollout and
// learner, and the share of each op.  The quickstart's model (random weights) and batch; prompts of the longest,
// responses of the mean length of the task.
nlohmann::json bench_training(double peak_flops);

}  // namespace pare
