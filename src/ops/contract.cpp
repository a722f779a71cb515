#include "ops/contract.h"

namespace pare {

namespace {

bool has_shape(const Tensor& t, std::initializer_list<int64_t> shape) {
  if (t.rank != static_cast<int>(shape.size())) return false;
  const int64_t* n = t.shape.data();
  for (const int64_t s : shape)
    if (*n++ != s) return false;
  return true;
}

// A stride counts only where there is a second element to reach.
bool has_layout(const Tensor& t, Contract::Layout layout) {
  int64_t step = 1;
  for (int i = t.rank - 1; i >= (layout == Contract::strided ? 1 : 0); i--) {
    if (t.shape[i] > 1 && t.stride[i] != step) return false;
    step *= t.shape[i];
  }
  return true;
}

[[noreturn, gnu::cold]] void refuse(const char* op, const char* name, const Tensor& t, DType dtype,
                                    std::initializer_list<int64_t> shape, Contract::Layout layout) {
  std::string found = t.str(), want = cat(dtype_name(dtype), "[");
  for (const int64_t n : shape) want += cat(want.back() == '[' ? "" : ", ", n);
  want += "]";
  if (found == want) {  // it is the strides
    for (int i = 0; i < t.rank; i++) found += cat(i ? ", " : " with strides (", t.stride[i]);
    found += ")";
    want = layout == Contract::strided ? "contiguous rows" : "it contiguous";
  }
  throw std::logic_error(cat(op, ": ", name, " is ", found, ", expected ", want));
}

}  // namespace

void Contract::act(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, Layout layout) {
  if (act_ == DType::u8) {
    const bool wide = stat_ == DType::u8 ? t.dtype == DType::f64 : stat_ == DType::f64;
    act_ = wide ? DType::f64 : t.dtype == DType::bf16 ? DType::bf16 : DType::f32;
    stat_ = wide ? DType::f64 : DType::f32;
  }
  tensor(name, t, act_, shape, layout);
}

void Contract::stat(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, Layout layout) {
  if (stat_ == DType::u8) stat_ = t.dtype == DType::f64 ? DType::f64 : DType::f32;
  tensor(name, t, stat_, shape, layout);
}

void Contract::tensor(const char* name, const Tensor& t, DType dtype, std::initializer_list<int64_t> shape,
                      Layout layout) {
  if (t.dtype != dtype || !has_shape(t, shape) || !has_layout(t, layout)) [[unlikely]]
    refuse(op_, name, t, dtype, shape, layout);
}

}  // namespace pare
