#include "base/tensor.h"

namespace pare {

const char* dtype_name(DType t) {
  switch (t) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::i64:
      return "i64";
    case DType::i32:
      return "i32";
    case DType::u8:
      return "u8";
  }
  return "?";
}

int64_t Tensor::size() const {
  if (rank == 0) return 0;
  int64_t n = 1;
  for (int i = 0; i < rank; i++) n *= shape[i];
  return n;
}

size_t Tensor::bytes() const { return static_cast<size_t>(size()) * dtype_size(dtype); }

bool Tensor::contiguous() const {
  int64_t expected = 1;
  for (int i = rank - 1; i >= 0; i--) {
    if (shape[i] != 1 && stride[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::string Tensor::str() const {
  if (rank == 0) return "absent";
  std::string s = cat(dtype_name(dtype), "[");
  for (int i = 0; i < rank; i++) s += cat(i ? ", " : "", shape[i]);
  return s + "]";
}

std::ostream& operator<<(std::ostream& stream, const Tensor& t) { return stream << t.str(); }

static void* advance(const Tensor& t, int64_t elements) {
  return t.data ? static_cast<char*>(t.data) + elements * static_cast<int64_t>(dtype_size(t.dtype)) : nullptr;
}

Tensor Tensor::rows(int64_t begin, int64_t count) const {
  expect(rank > 0 && begin >= 0 && count >= 0 && begin + count <= shape[0], "rows [", begin, ", ", begin + count,
         ") of ", *this);
  Tensor t = *this;
  t.data = advance(*this, begin * stride[0]);
  t.shape[0] = count;
  return t;
}

Tensor Tensor::columns(int64_t begin, int64_t count) const {
  expect(rank > 0 && begin >= 0 && count >= 0 && begin + count <= shape[rank - 1], "columns [", begin, ", ",
         begin + count, ") of ", *this);
  Tensor t = *this;
  t.data = advance(*this, begin);
  t.shape[rank - 1] = count;
  return t;
}

Tensor Tensor::heads(int64_t n) const {
  expect(rank == 2 && n > 0 && shape[1] % n == 0, n, " heads of ", *this);
  Tensor t = *this;
  t.rank = 3;
  t.shape = {shape[0], n, shape[1] / n};
  t.stride = {stride[0], shape[1] / n, 1};
  return t;
}

Tensor Tensor::flat() const {
  expect(contiguous(), "flat view of strided ", *this);
  Tensor t = *this;
  t.rank = 1;
  t.shape = {size()};
  t.stride = {1};
  return t;
}

Tensor Tensor::matrix(int64_t columns) const {
  expect(contiguous() && columns > 0 && size() % columns == 0, *this, " seen with ", columns, " columns");
  Tensor t = *this;
  t.rank = 2;
  t.shape = {size() / columns, columns};
  t.stride = {columns, 1};
  return t;
}

Tensor make_tensor(void* data, DType dtype, std::initializer_list<int64_t> shape) {
  expect(shape.size() >= 1 && shape.size() <= 4, "a tensor has 1 to 4 dimensions, not ", shape.size());
  Tensor t{.data = data, .dtype = dtype, .rank = static_cast<int>(shape.size())};
  int i = 0;
  for (int64_t n : shape) t.shape[i++] = n;
  int64_t step = 1;
  for (i = t.rank - 1; i >= 0; i--) {
    t.stride[i] = step;
    step *= t.shape[i];
  }
  return t;
}

}  // namespace pare
