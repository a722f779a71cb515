#include "model/json_file.h"

#include <filesystem>
#include <fstream>
#include <set>
#include <vector>

#include "base/error.h"

namespace pare {

using nlohmann::json;

std::string json_error(const std::exception& e) {
  const std::string text = e.what();
  const size_t prefix = text.find("] ");  // "[json.exception.parse_error.101] "
  return text.substr(prefix == std::string::npos ? 0 : prefix + 2, 200);
}

json read_json_file(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) fail(path, ": no such file");
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(path, ": cannot be opened for reading");
  std::vector<std::set<std::string>> open;  // keys seen in each object that is not closed yet
  auto no_key_twice = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) open.emplace_back();
    if (event == json::parse_event_t::object_end) open.pop_back();
    if (event == json::parse_event_t::key && !open.back().insert(value.get<std::string>()).second)
      fail(path, ": key ", value.dump(), " occurs twice in one object");
    return true;
  };
  try {
    return json::parse(in, no_key_twice);
  } catch (const json::parse_error& e) {
    fail(path, ": not valid JSON: ", json_error(e));
  }
}

}  // namespace pare
