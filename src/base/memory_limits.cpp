#include "base/memory_limits.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

namespace pare {

namespace fs = std::filesystem;

namespace {

// The number in a file; SIZE_MAX if there is none ("max").
size_t number_in(const fs::path& path) {
  size_t n = 0;
  return std::ifstream(path) >> n ? n : SIZE_MAX;
}

// From memory.stat of version 1, which includes ancestors, even those hidden from this process.
size_t hierarchical_limit(const fs::path& group) {
  std::ifstream stat(group / "memory.stat");
  std::string name;
  size_t n = 0;
  while (stat >> name >> n)
    if (name == "hierarchical_memory_limit") return n;
  return SIZE_MAX;
}

// A mounted hierarchy of control groups: group `top` appears at `point`.
struct GroupMount {
  bool v1;
  std::string top, point;
};

// Hierarchies that limit memory, from /proc/self/mountinfo: "ID PARENT DEVICE TOP POINT OPTIONS ... - TYPE SOURCE
// OPTIONS".
std::vector<GroupMount> group_mounts(const std::string& root) {
  std::vector<GroupMount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream front(line), back(line.substr(dash + 3));
    std::string skipped, top, point, type, options;
    front >> skipped >> skipped >> skipped >> top >> point;
    back >> type >> skipped >> options;
    const bool v1 = type == "cgroup" && ("," + options + ",").find(",memory,") != std::string::npos;
    if (v1 || type == "cgroup2") mounts.push_back({v1, top, point});
  }
  return mounts;
}

// The group of this process in a hierarchy, from /proc/self/cgroup: "0::PATH", in version 1 "ID:CONTROLLERS:PATH".
std::string group_path(const std::string& root, bool v1) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (v1 ? ("," + controllers + ",").find(",memory,") != std::string::npos : controllers.empty())
      return line.substr(second + 1);
  }
  return "/";
}

}  // namespace

size_t control_group_memory(const std::string& root) {
  size_t least = SIZE_MAX;
  for (const GroupMount& mount : group_mounts(root)) {
    const fs::path point(root + mount.point);
    std::string path = group_path(root, mount.v1);
    if (mount.top != "/" && path.starts_with(mount.top)) path.erase(0, mount.top.size());  // a container without names
    fs::path group = point / fs::path(path).relative_path();                               // of its own
    std::error_code none;
    if (!fs::is_directory(group, none)) group = point;
    if (mount.v1) {
      least = std::min(least, hierarchical_limit(group));
      continue;
    }
    for (;; group = group.parent_path()) {
      least = std::min(least, number_in(group / "memory.max"));
      if (group == point || group == group.parent_path()) break;
    }
  }
  return least;
}

// Private memory counts towards both limits.
static size_t soft_limit(int resource) {
  rlimit limit{};
  return getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY
             ? SIZE_MAX
             : static_cast<size_t>(limit.rlim_cur);
}

size_t process_memory() { return std::min(soft_limit(RLIMIT_AS), soft_limit(RLIMIT_DATA)); }

size_t process_memory_left() {
  size_t space = 0, data = 0, skipped = 0;  // pages: size resident shared text library data
  std::ifstream("/proc/self/statm") >> space >> skipped >> skipped >> skipped >> skipped >> data;
  const auto left = [](size_t limit, size_t pages) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
    return limit == SIZE_MAX ? limit : limit - std::min(limit, pages * page);
  };
  return std::min(left(soft_limit(RLIMIT_AS), space), left(soft_limit(RLIMIT_DATA), data));
}

}  // namespace pare
