// The device: its limits, and the choice between kernels by mma.sync and by wgmma.  On compute capability 9.0 both give
// the same bits.
#pragma once
#include <string>

#include "ops/probe.h"
#include "runtime/common.cuh"

namespace pare::PARE_CUDA {

struct Machine {
  std::string name;      // and compute capability
  size_t shared_memory;  // bytes that a block can have
  int multiprocessors;
  bool wgmma;           // it has wgmma (compute capability 9.0: later ones have other instructions), as has the code
                        // that was loaded for it
  bool launches_early;  // kernels may begin before the one before them has ended (LaunchShape): 9.0 and its code, too
  bool chooses_wgmma;   // where both kernels can compute and wgmma takes less time
};
const Machine& machine();  // as open() found it

// Opens the device of this rank, among those that CUDA_VISIBLE_DEVICES leaves that of its number on the machine, loads
// all kernels, reads PARE_WGMMA, and connects several ranks.  Error(Exit::usage): it cannot be used.
void open(Comm& comm, DeviceComm by);
std::string describe();

// link.cu.  Makes comm.link of devices that are open.  Error(Exit::usage): devices are shared that must not be, or
// there is no NCCL.
void connect(Comm& comm, DeviceComm by);
std::unique_ptr<Comm::Link> make_nccl(Comm& comm);  // nccl.cu
bool nccl_shares_devices();  // is NCCL 2.30 or later told by NCCL_MULTI_RANK_GPU_ENABLE=1 that ranks share a device?

inline TensorKernel asked_for = TensorKernel::choose;  // of the probe

// Where both kernels could compute; faster: wgmma would take less time.
inline bool takes_wgmma(bool faster) {
  return asked_for == TensorKernel::choose ? machine().chooses_wgmma && faster : asked_for == TensorKernel::wgmma;
}

}  // namespace pare::PARE_CUDA
