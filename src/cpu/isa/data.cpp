// Sums of rows.
#include "cpu/isa/kernel_list.h"
#include "cpu/isa/vec.h"

namespace pare::PARE_ISA {

void add_all(float* y, const float* x, int64_t n) {
  for_vectors(
      n, PARE_LANES_AT(i) { store(y + i, add(load(y + i, lanes), load(x + i, lanes)), lanes); });
}

void add_rows(float* y, int64_t y_stride, const float* x, int64_t x_stride, const int32_t* index, int64_t rows,
              Range columns) {
  for (int64_t r = 0; r < rows; r++)
    add_all(y + index[r] * y_stride + columns.begin, x + r * x_stride + columns.begin, columns.end - columns.begin);
}

}  // namespace pare::PARE_ISA
