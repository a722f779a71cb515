#pragma once
#include <nlohmann/json_fwd.hpp>

namespace pare {

// Grading and normal form of text that repeats itself, as a policy in a loop writes it, on one core, in MB/s.
nlohmann::json bench_text();

}  // namespace pare
