// Shared code of the fuzz targets.  A target is one function for libFuzzer: whatever the bytes, it returns; a crash, a
// sanitizer's report, an exception that is no pare::Error and a property that does not hold end the process, and a slow
// input does so by libFuzzer's time limit.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.h"
#include "tools/fuzz/count.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace pare::fuzz {

inline std::string_view text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// A property of the target; expect() would be caught where an Error is.
template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", cat("property violated: ", parts...).c_str());
  std::abort();
}

// A file with these bytes that lies in no folder.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    check(fd_ >= 0 && ::write(fd_, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "no memory file");
  }
  ~MemoryFile() { ::close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return cat("/proc/self/fd/", fd_); }

 private:
  int fd_;
};

// False: it was refused, with a message.
template <class F>
bool accepted(F&& load) {
  try {
    load();
    return true;
  } catch (const Error& e) {
    check(e.what()[0] != '\0', "an error that says nothing");
    return false;
  }
}

}  // namespace pare::fuzz
