// For programs that carry their C++ library with them (`make cuda STATIC=1`).  That of a machine with glibc 2.36 asks
// for arc4random, in std::random_device, which nothing here uses; with it the program would not start on a machine with
// an older glibc, Ubuntu 22.04 for one.
#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

extern "C" uint32_t arc4random() noexcept {
  uint32_t value = 0;
  if (getrandom(&value, sizeof value, 0) != sizeof value) std::abort();
  return value;
}
