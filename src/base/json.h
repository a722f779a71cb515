// Parses JSON from files and other untrusted sources.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace pare {

// Parses `text`.  Throws an Error that begins with `where` if it is not JSON, or nested more than 100 deep: copying,
// comparing and printing a value recurse.  `callback`: see nlohmann::json::parse.
nlohmann::json parse_json(std::string_view text, const std::string& where,
                          const nlohmann::json::parser_callback_t& callback = nullptr);
// The same, but returns a value with is_discarded() instead of throwing.
nlohmann::json try_parse_json(std::string_view text);

// The JSON library's message without its error number, of bounded length.
std::string json_error(const std::exception& e);

}  // namespace pare
