#include "base/memory.h"

#include <sys/mman.h>
#include <unistd.h>

namespace pare {

size_t machine_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
}

// In large pages where the system has them: rows of a matrix lie far apart, and small pages are looked up for each.
static void* take_pages(size_t bytes) {
  void* const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  madvise(p, bytes, MADV_HUGEPAGE);  // a wish: small pages do as well
  return p;
}

constinit const Memory host_memory = {.take = take_pages,
                                      .give = [](void* p, size_t bytes) { munmap(p, bytes); },
                                      .free = machine_memory,
                                      .total = machine_memory};

constinit const Memory no_memory = {.take = [](size_t) -> void* { return nullptr; },
                                    .give = [](void*, size_t) {},
                                    .free = machine_memory,
                                    .total = machine_memory};

}  // namespace pare
