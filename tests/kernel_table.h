// The table of CUDA kernels under test: `emu` in build/tests/pare_tests, `cuda` in build/cuda/pare_cuda_tests.
// PARE_KERNELS is undefined where there is neither.
#pragma once
#include "ops/ops.h"

#ifdef PARE_CUDA_TESTS
#define PARE_KERNELS

namespace pare::test {

inline const Table& table_kernels = table_cuda;

// f(): threads run in the device's order.
template <class F>
void in_all_orders(F f) {
  f();
}

}  // namespace pare::test

#elif defined(PARE_EMU)
#define PARE_KERNELS
#include "emu_orders.h"

namespace pare::test {
inline const Table& table_kernels = table_emu;
}  // namespace pare::test

#endif
