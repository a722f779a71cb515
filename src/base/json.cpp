#include "base/json.h"

#include "base/error.h"

namespace pare {
namespace {

constexpr int max_depth = 100;

// More than max_depth brackets are open at once, not counting those in strings.
bool too_deep(std::string_view text) {
  int depth = 0;
  bool string = false;
  for (size_t i = 0; i < text.size(); i++) {
    const char c = text[i];
    if (c == '"') string = !string;
    if (string && c == '\\') i++;
    if (string) continue;
    if ((c == '[' || c == '{') && ++depth > max_depth) return true;
    depth -= c == ']' || c == '}';
  }
  return false;
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& where,
                          const nlohmann::json::parser_callback_t& callback) {
  if (too_deep(text)) fail(where, ": JSON nested deeper than ", max_depth);
  try {
    return nlohmann::json::parse(text, callback);
  } catch (const nlohmann::json::exception& e) {
    fail(where, ": not JSON: ", json_error(e));
  }
}

nlohmann::json try_parse_json(std::string_view text) {
  return too_deep(text) ? nlohmann::json(nlohmann::json::value_t::discarded)
                        : nlohmann::json::parse(text, nullptr, false);
}

std::string json_error(const std::exception& e) {
  const std::string text = e.what();
  const size_t prefix = text.find("] ");  // "[json.exception.parse_error.101] "
  return text.substr(prefix == std::string::npos ? 0 : prefix + 2, 200);
}

}  // namespace pare
