// Cost of a token against the length of its context, under each way to keep or read keys and values.
#pragma once
#include <nlohmann/json_fwd.hpp>

namespace pare {

// Prints and returns, for a small model and contexts of 1k to 32k tokens, and for a layer of a larger one, the
// microseconds of a decoded token, those of its attention, the part that compression or selection takes, and what it
// takes where everything must come from memory.
nlohmann::json bench_rollout();

}  // namespace pare
