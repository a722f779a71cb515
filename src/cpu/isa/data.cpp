// Sums of rows, and hashes.
#include "ops/data.h"

#include <bit>

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

uint64_t hash_run(const float* x, int64_t n, uint64_t first) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; i++)
    sum += HashRuns::element(first + static_cast<uint64_t>(i), std::bit_cast<uint32_t>(x[i]));
  return sum;
}

}  // namespace pare::PARE_ISA
