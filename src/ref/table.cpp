#include "ref/ref.h"

namespace pare {

namespace ref {

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
