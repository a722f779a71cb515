#include "base/json.h"

#include <unordered_set>
#include <vector>

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

// Parses text that is not too deep; `twice` becomes a key that occurs twice in one object.
nlohmann::json parse(std::string_view text, bool throws, std::string& twice) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::unordered_set<std::string>> open;  // keys seen in each object that is not closed yet
  const auto see = [&](int, Event event, nlohmann::json& value) {
    if (event == Event::object_start) open.emplace_back();
    if (event == Event::object_end) open.pop_back();
    if (event == Event::key && !open.back().insert(value.get_ref<const std::string&>()).second) twice = value.dump();
    return true;
  };
  return nlohmann::json::parse(text, see, throws);
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& where) {
  if (too_deep(text)) fail(where, ": JSON nested deeper than ", max_depth);
  std::string twice;
  nlohmann::json value;
  try {
    value = parse(text, true, twice);
  } catch (const nlohmann::json::exception& e) {
    fail(where, ": not JSON: ", json_error(e));
  }
  if (!twice.empty()) fail(where, ": key ", twice, " occurs twice in one object");
  return value;
}

nlohmann::json try_parse_json(std::string_view text) {
  const nlohmann::json none(nlohmann::json::value_t::discarded);
  if (too_deep(text)) return none;
  std::string twice;
  nlohmann::json value = parse(text, false, twice);
  return twice.empty() ? value : none;
}

std::string json_error(const nlohmann::json::exception& e) {
  const std::string text = e.what();  // "[json.exception.parse_error.101] ..."
  return text.substr(text.find("] ") + 2, 200);
}

}  // namespace pare
