// Memory spaces.  A table of ops names the one it works on.
#pragma once
#include <cstddef>

namespace pare {

struct Memory {
  void* (*take)(size_t bytes);          // null where it is refused
  void (*give)(void* p, size_t bytes);  // what take gave
  size_t (*free)();                     // bytes that can be taken now
  size_t (*total)();                    // bytes that there are
};

extern const Memory host_memory;  // address space, which becomes real memory when it is first touched
extern const Memory no_memory;    // for planning: without end, addresses are null, only the books are kept

size_t machine_memory();  // bytes of physical memory that this process may fill (memory_limits.h)

}  // namespace pare
