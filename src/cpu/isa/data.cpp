// Sums of rows.
#include "cpu/isa/vec.h"
#include "cpu/kernels.h"

namespace pare::PARE_ISA {

void add(float* y, const float* x, int64_t n) {
  for_vectors(
      n, PARE_LANES_AT(i) { store(y + i, add(load(y + i, lanes), load(x + i, lanes)), lanes); });
}

void add_rows(float* y, int64_t y_stride, const float* x, int64_t x_stride, const int32_t* index, int64_t rows,
              Interval columns) {
  for (int64_t r = 0; r < rows; r++)
    add(y + index[r] * y_stride + columns.begin, x + r * x_stride + columns.begin, columns.end - columns.begin);
}

}  // namespace pare::PARE_ISA
