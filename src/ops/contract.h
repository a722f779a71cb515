// Requirements of an op on its tensors: types, shapes, strides.  Every op states them once, in check(); Device runs it
// before each call, on every table.
#pragma once
#include <initializer_list>

#include "base/tensor.h"

namespace pare {

class Contract {
 public:
  enum Layout { dense, strided };  // contiguous; or its rows (the first dimension) with any stride

  // For one call.  act: the one type that the table computes in, u8 if there are several.
  explicit Contract(const char* op, DType act = DType::u8) : op_(op), act_(act), stat_(act) {}

  // Throw std::logic_error, "rmsnorm_fwd: rstd is f32[3], expected f32[4]".  All `act` of a call have one type: f32,
  // bf16 or f64; `stat` is f64 where act is, else f32.
  void act(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, Layout layout = dense);
  void stat(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, Layout layout = dense);
  void index(const char* name, const Tensor& t, std::initializer_list<int64_t> shape, Layout layout = dense) {
    tensor(name, t, DType::i32, shape, layout);
  }
  void tensor(const char* name, const Tensor& t, DType dtype, std::initializer_list<int64_t> shape,
              Layout layout = dense);
  // Requires a contiguous tensor of any type and shape.
  void bytes(const char* name, const Tensor& t) { that(t.contiguous(), name, " is ", t, ", expected it contiguous"); }

  // Anything else; `parts` say what is wrong.
  template <class... Parts>
  void that(bool holds, const Parts&... parts) const {
    expect(holds, op_, ": ", parts...);
  }

 private:
  const char* op_;
  DType act_, stat_;  // u8: none was seen
};

// a.check(), of an op called `op`.
template <class Args>
void check([[maybe_unused]] const char* op, [[maybe_unused]] const Args& a, [[maybe_unused]] DType act = DType::u8) {
  if constexpr (requires(Contract c) { a.check(c); }) {
    Contract c(op, act);
    a.check(c);
  }
}

}  // namespace pare
