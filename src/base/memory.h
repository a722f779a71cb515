// Memory spaces.  Each table of ops works on one of them.
#pragma once
#include <cstddef>

namespace pare {

struct Memory {
  void* (*take)(size_t bytes);          // null: out of memory
  void (*give)(void* p, size_t bytes);  // frees what `take` returned
  size_t (*free)();                     // bytes available now
  size_t (*total)();                    // bytes in all
};

extern const Memory host_memory;  // address space, backed by memory once it is touched
extern const Memory no_memory;    // for planning: unlimited, all addresses null

size_t machine_memory();  // bytes of physical memory that this process may fill (memory_limits.h)

}  // namespace pare
