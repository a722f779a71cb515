#include "base/json_file.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "base/progress.h"

namespace pare {

using nlohmann::json;

json read_json_file(const std::string& path) {
  const Activity reading("reading " + path);
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
  return parse_json(std::string{std::istreambuf_iterator<char>(in), {}}, path, no_key_twice);
}

}  // namespace pare
