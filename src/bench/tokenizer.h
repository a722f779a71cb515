#pragma once
#include <nlohmann/json_fwd.hpp>

namespace pare {

// Encoding of English text on one core, in MB/s: PARE_TOKENIZER names a tokenizer.json (or its folder), PARE_TEXT a
// text file (README.md if not set).  Where python3 has the package `tokenizers`, its speed on the same text beside it.
// Without PARE_TOKENIZER it says so and returns null.
nlohmann::json bench_tokenizer();

}  // namespace pare
