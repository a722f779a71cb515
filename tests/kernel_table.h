// The table of CUDA kernels under test: `emu` in build/tests/pare_tests, `cuda` in build/cuda/pare_cuda_tests; and the
// one with linear layers by cuBLASLt.
// PARE_KERNELS is undefined where there is neither.
#pragma once
#include "ops/list.h"

#ifdef PARE_CUDA_TESTS
#define PARE_KERNELS

namespace pare::test {

inline const Table& table_kernels = table_cuda;
inline const Table& table_kernels_fast = table_cuda_fast;

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
inline const Table& table_kernels_fast = table_emu_fast;
}  // namespace pare::test

#endif
