// Parses JSON from files and other untrusted sources.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace pare {

// The value that `text` is.  An Error that begins with `where` if it is not JSON or is nested deeper than 100: whoever
// copies, compares or prints a value recurses.  `callback`: of nlohmann::json::parse.
nlohmann::json parse_json(std::string_view text, const std::string& where,
                          const nlohmann::json::parser_callback_t& callback = nullptr);
// The same with a value that is_discarded(), and so none of a kind, instead of an Error.
nlohmann::json try_parse_json(std::string_view text);

// What the JSON library found wrong, without its own numbering and of bounded length.
std::string json_error(const std::exception& e);

}  // namespace pare
