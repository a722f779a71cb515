// Memory limits of this process: control groups, ulimit, physical memory.
#pragma once
#include <cstddef>
#include <string>

namespace pare {

// Returns the lowest memory limit among this process's control group and its ancestors (version 1 or 2), SIZE_MAX if
// there is none.  `root`: prefix of /proc and of mount points.
size_t control_group_memory(const std::string& root = "");

// The limits of the process (ulimit -v, ulimit -d) in bytes, and what is left of them now; SIZE_MAX if there are none.
size_t process_memory();
size_t process_memory_left();

}  // namespace pare
