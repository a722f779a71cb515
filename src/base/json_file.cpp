#include "base/json_file.h"

#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "base/foreign_file.h"
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
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (const std::string pointer = lfs_pointer(path, text); !pointer.empty()) fail(path, ": ", pointer);
  return parse_json(text, path);
}

}  // namespace pare
