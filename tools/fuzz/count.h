// Counts what the readers of strangers' text do (data/verify/verify.h, tokenizer/), in steps: a branch of theirs, 16
// bytes that the C library compares, searches or copies for them.  For one file of a program whose objects of data/ and
// tokenizer/ are compiled with -fsanitize-coverage=trace-pc and which is linked with --wrap for each function below.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pare::fuzz {
inline thread_local uint64_t steps = 0;
}

extern "C" {
void* __real_memchr(const void* s, int c, size_t n);
int __real_memcmp(const void* a, const void* b, size_t n);
void* __real_memcpy(void* to, const void* from, size_t n);
void* __real_memmove(void* to, const void* from, size_t n);
void __wrap___sanitizer_cov_trace_pc() { pare::fuzz::steps++; }
void* __wrap_memchr(const void* s, int c, size_t n) {
  void* hit = __real_memchr(s, c, n);
  pare::fuzz::steps += (hit ? static_cast<size_t>(static_cast<char*>(hit) - static_cast<const char*>(s)) : n) / 16;
  return hit;
}
int __wrap_memcmp(const void* a, const void* b, size_t n) {
  pare::fuzz::steps += n / 16;
  return __real_memcmp(a, b, n);
}
void* __wrap_memcpy(void* to, const void* from, size_t n) {
  pare::fuzz::steps += n / 16;
  return __real_memcpy(to, from, n);
}
void* __wrap_memmove(void* to, const void* from, size_t n) {
  pare::fuzz::steps += n / 16;
  return __real_memmove(to, from, n);
}
}
