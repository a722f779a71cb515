#include "base/hub_cache.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/foreign_file.h"

namespace pare {

namespace fs = std::filesystem;

// The value of a variable as a path; empty: it is not set.
static std::string path_in(const char* variable) {
  const char* value = std::getenv(variable);
  const std::string path = value ? value : "";
  const char* home = std::getenv("HOME");
  return home && (path == "~" || path.starts_with("~/")) ? home + path.substr(1) : path;
}

std::string hub_cache() {
  for (const char* variable : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
    if (const std::string path = path_in(variable); !path.empty()) return path;
  if (const std::string home = path_in("HF_HOME"); !home.empty()) return home + "/hub";
  const std::string cache = path_in("XDG_CACHE_HOME");
  return (cache.empty() ? path_in("HOME") + "/.cache" : cache) + "/huggingface/hub";
}

std::string in_hub_cache(const std::string& model) {
  std::error_code ignored;
  std::string name = hub_name(model);
  if (name.empty() || fs::exists(model, ignored)) return model;
  name.replace(name.find('/'), 1, "--");
  const fs::path folder = fs::path(hub_cache()) / ("models--" + name);
  std::string commit;
  std::ifstream(folder / "refs/main") >> commit;
  if (commit.empty() || commit.find_first_not_of("0123456789abcdef") != std::string::npos) return model;
  const fs::path snapshot = folder / "snapshots" / commit;
  return fs::is_directory(snapshot, ignored) ? snapshot.string() : model;
}

std::string how_to_download(const std::string& model) {
  const std::string name = hub_name(model);
  std::error_code ignored;
  if (name.empty() || fs::exists(model, ignored) || fs::is_directory(fs::path(name).parent_path(), ignored)) return "";
  return cat("no such folder, and no such model in ", hub_cache(), "; download it with\n  hf download ", name,
             " --local-dir ", fs::path(name).filename().string(), "\nand give that folder");
}

}  // namespace pare
