#include "cpu/glue.h"

#include <cstdlib>
#include <memory>

namespace pare::cpu {

namespace {

[[noreturn]] void refuse(const char* op, const char* name, const Tensor& t, DType dtype,
                         std::initializer_list<int64_t> shape, const char* layout) {
  std::string want = cat(dtype_name(dtype), "[");
  for (int64_t n : shape) want += cat(want.back() == '[' ? "" : ", ", n);
  std::string strides;
  for (int i = 0; i < t.rank; i++) strides += cat(i ? ", " : "", t.stride[i]);
  throw std::logic_error(
      cat("cpu: ", op, ": ", name, " is ", t.str(), " with strides (", strides, "); expected ", want, "], ", layout));
}

// Dimensions after the first lie without gaps; so does the first if `whole`.
bool fits(const Tensor& t, DType dtype, std::initializer_list<int64_t> shape, bool whole) {
  if (t.dtype != dtype || t.rank != static_cast<int>(shape.size())) return false;
  int64_t step = 1;
  for (int i = t.rank - 1; i >= 0; i--) {
    const int64_t n = shape.begin()[i];
    if (t.shape[i] != n) return false;
    if (t.stride[i] != step && n > 1 && (whole || i > 0)) return false;
    step *= n;
  }
  return true;
}

}  // namespace

float* dense(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  if (!fits(t, DType::f32, shape, true)) [[unlikely]]
    refuse(op, name, t, DType::f32, shape, "contiguous");
  return static_cast<float*>(t.data);
}

float* strided(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  if (!fits(t, DType::f32, shape, false)) [[unlikely]]
    refuse(op, name, t, DType::f32, shape, "contiguous within a row");
  return static_cast<float*>(t.data);
}

int32_t* index(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape, int64_t limit) {
  if (!fits(t, DType::i32, shape, true)) [[unlikely]]
    refuse(op, name, t, DType::i32, shape, "contiguous");
  return limit >= 0 ? index(op, name, t, limit) : static_cast<int32_t*>(t.data);
}

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
