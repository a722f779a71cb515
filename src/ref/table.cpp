#include "ref/ref.h"

namespace pare {

namespace ref {

static std::string shape_str(std::initializer_list<int64_t> shape) {
  std::string s = "[";
  for (int64_t n : shape) s += cat(s.size() > 1 ? ", " : "", n);
  return s + "]";
}

void expect_shape(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  bool same = t.rank == static_cast<int>(shape.size());
  int i = 0;
  for (int64_t n : shape) same = same && t.shape[i++] == n;
  expect(same, "ref: ", op, ": ", name, " is ", t.str(), ", expected ", shape_str(shape));
}

void expect_dense(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  expect_shape(op, name, t, shape);
  expect(t.contiguous(), "ref: ", op, ": ", name, " ", t.str(), " has gaps between its rows");
}

void expect_index(const char* op, const char* name, const Tensor& index, int64_t limit) {
  const int32_t* v = index.as<int32_t>();
  for (int64_t i = 0; i < index.size(); i++)
    expect(v[i] >= 0 && v[i] < limit, "ref: ", op, ": ", name, "[", i, "] is ", v[i], ", outside [0, ", limit, ")");
}

}  // namespace ref

constinit const Table table_ref = {.name = "ref",
#define X(op, Args) .op = ref::op,
                                   PARE_OPS(X)
#undef X
};

}  // namespace pare
