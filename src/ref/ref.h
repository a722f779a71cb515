// The table `ref`: the definition of every op, written to be read.  Sums are in double; nothing is fast.
//
// An op checks what the data must hold (index ranges, page tables, the stated `pairs`), so running a program on `ref`
// checks the program too.  act is f64 (then stat is f64) or f32 (then stat is f32): both are T below.
#pragma once
#include <initializer_list>

#include "ops/linear.h"
#include "ops/list.h"

namespace pare::ref {

#define X(op, Args) void op(const Args& a, Stream);
PARE_OPS(X)
#undef X
// Norms the rows of x, if there is a norm.
void norm_rows(const RowNorm& norm, const Tensor& x, Stream stream);

// Calls f(T{}) with the C++ type of an op's activations.
template <class F>
void dispatch(const char* op, const Tensor& act, F f) {
  if (act.dtype == DType::f64)
    f(double{});
  else if (act.dtype == DType::f32)
    f(float{});
  else
    throw std::logic_error(cat("ref: ", op, ": tensor ", act.str(), ": f64 or f32 expected"));
}

// w[o][i]
template <class T>
T& element(const Weight& w, int64_t o, int64_t i) {
  return w.packed.as<T>()[weight_place(o, i, w.inputs())];
}

// A tensor as a function of its indices.
template <class T>
class View {
 public:
  explicit View(const Tensor& t) : p_(t ? t.as<T>() : nullptr), stride_(t.stride) {}
  explicit operator bool() const { return p_ != nullptr; }
  T& operator()(int64_t i) const { return p_[i * stride_[0]]; }
  T& operator()(int64_t i, int64_t j) const { return p_[i * stride_[0] + j * stride_[1]]; }
  T& operator()(int64_t i, int64_t j, int64_t k) const { return p_[i * stride_[0] + j * stride_[1] + k * stride_[2]]; }
  T& operator()(int64_t i, int64_t j, int64_t k, int64_t l) const {
    return p_[i * stride_[0] + j * stride_[1] + k * stride_[2] + l * stride_[3]];
  }

 private:
  T* p_;
  std::array<int64_t, 4> stride_;
};

// Each element in [0, limit); throws std::logic_error naming op and tensor.
void expect_index(const char* op, const char* name, const Tensor& index, int64_t limit);

}  // namespace pare::ref
