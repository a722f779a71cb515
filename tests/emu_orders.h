// Runs a test in several orders of the emulator's threads and blocks.
#pragma once
#include <gtest/gtest.h>

#include "cuda/emu/include/cuemu.h"

namespace pare::test {

// f() in forward, reverse and three random orders.
template <class F>
void in_all_orders(F f) {
  cuemu::Settings& s = cuemu::settings();
  const cuemu::Settings before = s;
  for (int i = 0; i < 5; i++) {
    s.order = i == 0 ? cuemu::Order::forward : i == 1 ? cuemu::Order::reverse : cuemu::Order::random;
    s.seed = static_cast<uint64_t>(i);
    SCOPED_TRACE(i == 0 ? "forward" : i == 1 ? "reverse" : "random");
    f();
  }
  s = before;
}

}  // namespace pare::test
