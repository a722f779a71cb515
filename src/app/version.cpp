#include "app/version.h"

#include "app/device.h"
#include "base/error.h"
#include "cpu/cpu.h"

namespace pare {

// A file of its own: it is compiled again at every commit.
std::string version() {
  constexpr const char* commit =
#include "commit.inc"  // made by the Makefile
      ;
#ifdef __clang__
  constexpr const char* compiler = "clang++ " __clang_version__;
#else
  constexpr const char* compiler = "g++ " __VERSION__;
#endif
  return cat("pare         ", commit, "\ncompiler     ", compiler, "\ninstructions ", cpu_isa(), "\ndevices      ",
             linked_devices());
}

}  // namespace pare
