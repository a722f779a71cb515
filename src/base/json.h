// Parses JSON from files and other untrusted sources.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace pare {

// Parses `text`.  Throws an Error that begins with `where` if it is not JSON, if a key occurs twice in an object (a
// parser that keeps the last value would hide the first), or if it is nested more than 100 deep: copying, comparing and
// printing a value recurse.
nlohmann::json parse_json(std::string_view text, const std::string& where);
// The same, but returns a value with is_discarded() instead of throwing.
nlohmann::json try_parse_json(std::string_view text);

// The JSON library's message without its error number, of bounded length.
std::string json_error(const nlohmann::json::exception& e);

}  // namespace pare
