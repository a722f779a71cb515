#include "base/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "base/memory_limits.h"

namespace pare {

size_t machine_memory() {
  const size_t physical = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
  return std::min({physical, control_group_memory(), process_memory()});
}

// Uses huge pages where the system has them: rows of a matrix lie far apart, so small pages would miss the TLB.
constexpr size_t kLargePage = size_t{2} << 20;
static size_t whole_pages(size_t bytes) { return (bytes + kLargePage - 1) / kLargePage * kLargePage; }

static void* take_pages(size_t bytes) {
  if (bytes > SIZE_MAX / 2) return nullptr;
  const size_t size = whole_pages(bytes);
  void* const p =
      mmap(nullptr, size + kLargePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  // The ends outside whole huge pages are unmapped.
  char* const begin = static_cast<char*>(p);
  const size_t front = whole_pages(reinterpret_cast<uintptr_t>(p)) - reinterpret_cast<uintptr_t>(p);
  if (front > 0) munmap(begin, front);
  if (front < kLargePage) munmap(begin + front + size, kLargePage - front);
  madvise(begin + front, size, MADV_HUGEPAGE);  // a hint: small pages work too
  return begin + front;
}

constinit const Memory host_memory = {.take = take_pages,
                                      .give = [](void* p, size_t bytes) { munmap(p, whole_pages(bytes)); },
                                      .free = [] { return std::min(machine_memory(), process_memory_left()); },
                                      .total = machine_memory};

constinit const Memory no_memory = {.take = [](size_t) -> void* { return nullptr; },
                                    .give = [](void*, size_t) {},
                                    .free = []() -> size_t { return SIZE_MAX; },
                                    .total = []() -> size_t { return SIZE_MAX; }};

}  // namespace pare
