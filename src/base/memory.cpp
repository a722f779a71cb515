#include "base/memory.h"

#include <sys/mman.h>
#include <unistd.h>

namespace pare {

size_t machine_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
}

constinit const Memory host_memory = {.take =
                                          [](size_t bytes) {
                                            void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
                                            return p == MAP_FAILED ? nullptr : p;
                                          },
                                      .give = [](void* p, size_t bytes) { munmap(p, bytes); },
                                      .free = machine_memory,
                                      .total = machine_memory};

constinit const Memory no_memory = {.take = [](size_t) -> void* { return nullptr; },
                                    .give = [](void*, size_t) {},
                                    .free = machine_memory,
                                    .total = machine_memory};

}  // namespace pare
