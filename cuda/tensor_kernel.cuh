// Which kernel computes what is written twice, with mma.sync and with wgmma.  On compute capability 9.0 both give the
// same bits.
#pragma once
#include "bench/probe.h"
#include "common.cuh"

namespace pare::PARE_CUDA {

// No GPU has said yet that the instructions do what the emulation does: tests/golden/ptx_sm90.json is made by the
// model. Until one has written it, a device computes with mma.sync unless a benchmark or test asks for wgmma.
constexpr bool kWgmmaConfirmed = false;

struct Machine {
  bool wgmma, chooses_wgmma;  // is there (compute capability 9.0: later ones have other instructions); is the choice
  int multiprocessors;
};
inline Machine machine() {
#ifdef CUEMU
  const bool there = cuemu::settings().arch == 90;
  return {there, there, 20};
#else
  static const Machine m = [] {
    const auto get = [](cudaDeviceAttr a) {
      int value = 0;
      check_cuda(cudaDeviceGetAttribute(&value, a, 0), "device 0");
      return value;
    };
    const bool there = get(cudaDevAttrComputeCapabilityMajor) == 9 && get(cudaDevAttrComputeCapabilityMinor) == 0;
    return Machine{there, there && kWgmmaConfirmed, get(cudaDevAttrMultiProcessorCount)};
  }();
  return m;
#endif
}

inline TensorKernel asked_for = TensorKernel::choose;  // of the probe

// Where both kernels could compute; faster: wgmma would take less time.
inline bool takes_wgmma(bool faster) {
  return asked_for == TensorKernel::choose ? machine().chooses_wgmma && faster : asked_for == TensorKernel::wgmma;
}

}  // namespace pare::PARE_CUDA
