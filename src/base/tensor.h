// A tensor is a view: a pointer, an element type, a shape and strides.  It owns nothing; memory belongs to arenas.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace pare {

enum class DType : uint8_t { f64, f32, bf16, f16, i64, i32, u8 };

constexpr size_t dtype_size(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::u8:
      return 1;
  }
  return 0;
}
const char* dtype_name(DType t);

template <class T>
constexpr DType dtype_of = DType::u8;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<float> = DType::f32;
template <>
inline constexpr DType dtype_of<int64_t> = DType::i64;
template <>
inline constexpr DType dtype_of<int32_t> = DType::i32;

struct Tensor {
  void* data = nullptr;  // device memory of the table in use; null while only planning
  DType dtype = DType::f32;
  int rank = 0;  // 0: absent (an optional argument that is not given)
  std::array<int64_t, 4> shape{};
  std::array<int64_t, 4> stride{};  // in elements; the last dimension is contiguous (stride 1)

  explicit operator bool() const { return rank > 0; }
  int64_t size() const;     // elements
  size_t bytes() const;     // size() * dtype_size
  bool contiguous() const;  // rows follow one another without gaps
  std::string str() const;  // "f32[3, 64]", for messages

  template <class T>
  T* as() const {
    expect(dtype == dtype_of<T>, "tensor ", *this, " read as another type");
    return static_cast<T*>(data);
  }

  Tensor rows(int64_t begin, int64_t count) const;     // [begin, begin+count) of the first dimension
  Tensor columns(int64_t begin, int64_t count) const;  // [begin, begin+count) of the last dimension
  Tensor heads(int64_t n) const;                       // [N, n*D] seen as [N, n, D]
  Tensor flat() const;                                 // contiguous: seen as one row [size]
  Tensor matrix(int64_t columns) const;                // contiguous: seen as [size / columns, columns]
};

// Prints str().  Contracts are checked on every call, so the text is only made when one is broken.
std::ostream& operator<<(std::ostream& stream, const Tensor& t);

// A contiguous view of `data`.
Tensor make_tensor(void* data, DType dtype, std::initializer_list<int64_t> shape);

}  // namespace pare
