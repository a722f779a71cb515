#include "cpu/glue.h"

#include <cstdlib>
#include <memory>

namespace pare::cpu {

int32_t* index(const char* op, const char* name, const Tensor& t, int64_t limit) {
  int32_t* const p = t.as<int32_t>();
  for (int64_t i = 0; i < t.size(); i++)
    if (p[i] < 0 || p[i] >= limit) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op, ": ", name, " holds ", p[i], " at ", i, "; expected 0 to ", limit - 1));
  return p;
}

float* scratch(int64_t floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t size = 0;
  if (floats > size) {
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 4095) / 4096 * 4096;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (!memory) throw std::bad_alloc();
    size = static_cast<int64_t>(bytes / sizeof(float));
  }
  return memory.get();
}

}  // namespace pare::cpu
