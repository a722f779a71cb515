// For the CUDA program only: the emulation has no clock and no peak rates.
#pragma once
#include "ops/probe.h"

namespace pare::cuda {
extern const Probe probe;
}  // namespace pare::cuda
