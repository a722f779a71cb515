// Reads JSON files.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace pare {

// Fails, naming the file, if it is absent, not JSON (or nested too deeply), or has an object with a repeated key.
nlohmann::json read_json_file(const std::string& path);

}  // namespace pare
