// The chosen mutant, and the map of those that were reached: PARE_MUTANT_REACHED is a file that the program and its
// children share, one byte a mutant.
#include "tools/mutants/mutant.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

namespace pare::mutant {

static unsigned char nowhere[1 << 16];
int chosen = -1;
unsigned char* reached = nowhere;

// Before the constructors of other sources, which may hold mutants.
[[gnu::constructor(101)]] static void begin() {
  if (const char* number = std::getenv("PARE_MUTANT")) chosen = std::atoi(number);
  const char* path = std::getenv("PARE_MUTANT_REACHED");
  const int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return;
  struct stat size {};
  fstat(file, &size);
  void* map = mmap(nullptr, static_cast<size_t>(size.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (map != MAP_FAILED) reached = static_cast<unsigned char*>(map);
  close(file);
}

}  // namespace pare::mutant
