#include "data/presets.h"

#include <algorithm>

#include "base/error.h"

namespace pare {
namespace {

struct File {
  std::string_view name, text;
};
constexpr File files[] = {
#include "data/presets.inc"  // made by the Makefile
};

}  // namespace

std::optional<std::string_view> preset_text(const std::string& name, std::string_view ending) {
  for (const File& f : files)
    if (f.name == cat(name, ".", ending)) return f.text;
  return std::nullopt;
}

std::vector<std::string> preset_names(std::string_view ending) {
  std::vector<std::string> names;
  for (const File& f : files)
    if (const size_t dot = f.name.rfind('.'); f.name.substr(dot + 1) == ending)
      names.emplace_back(f.name.substr(0, dot));
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace pare
