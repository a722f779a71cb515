#include <atomic>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"

namespace pare {

namespace {

struct Choice {
  const Kernels* kernels;
  bool supported;
};

#if defined(__x86_64__)
const Choice* choices() {  // best first
  static const Choice list[] = {
      {&kernels_avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512cd")},
      {&kernels_avx2, true},  // the whole program is compiled for it
      {nullptr, false}};
  return list;
}
#elif defined(__aarch64__)
const Choice* choices() {
  static const Choice list[] = {{&kernels_neon, true}, {&kernels_generic, true}, {nullptr, false}};
  return list;
}
#else
const Choice* choices() {
  static const Choice list[] = {{&kernels_generic, true}, {nullptr, false}};
  return list;
}
#endif

const Kernels* find(const char* name) {
  std::string names;
  for (const Choice* c = choices(); c->kernels; c++) {
    if (c->supported && (!name || !std::strcmp(name, c->kernels->name))) return c->kernels;
    if (c->supported) names += (names.empty() ? "" : ", ") + std::string(c->kernels->name);
  }
  fail("instruction set ", name, " (PARE_ISA): not available here; expected one of ", names);
}

std::atomic<const Kernels*> current{nullptr};

}  // namespace

const Kernels& cpu_kernels() {
  const Kernels* k = current.load(std::memory_order_relaxed);
  if (!k) [[unlikely]]
    current.store(k = find(std::getenv("PARE_ISA")), std::memory_order_relaxed);
  return *k;
}

const char* cpu_isa() { return cpu_kernels().name; }
void set_cpu_isa(const char* name) { current.store(find(name), std::memory_order_relaxed); }

}  // namespace pare
