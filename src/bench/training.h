#pragma once
#include <nlohmann/json_fwd.hpp>

namespace pare {

// `peak_flops`: of one core.  Where the time of a training step of the quickstart goes: prints and returns tokens per
// second and the share of each op, of a step of the warm-up and of rollout and learner of GRPO (random weights; prompts
// of the longest, responses of the mean length of the task).
nlohmann::json bench_training(double peak_flops);

}  // namespace pare
