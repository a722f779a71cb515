// Memory limits of this process: control groups, ulimit, physical memory.
#pragma once
#include <cstddef>
#include <string>

namespace pare {

// The least of the memory limits of this process's control group and of those above it, version 1 or 2; SIZE_MAX
// without any.  `root`: where /proc lies and mount points begin.
size_t control_group_memory(const std::string& root = "");

// The limits of the process (ulimit -v, ulimit -d), and what they leave now, in bytes; SIZE_MAX without any.
size_t process_memory();
size_t process_memory_left();

}  // namespace pare
