// A ring of stages in shared memory: a producer warp fills them by tensor copies, consumer warps read them.  Producers
// of a cluster may fill each other's stages: then the consumers of all its blocks release a stage to each of them.
#pragma once
#include "ptx90.cuh"

namespace pare::PARE_CUDA {

// Filling i, from 0 on, lies in stage i % kStages.
template <class Stage, int kStages>
struct Ring {
  Stage stages[kStages];
  Mbarrier full[kStages], empty[kStages];

  // By one thread, before a fence of the async proxy.  consumers: warps that release each filling; arrivals: that say
  // that a stage is full.
  __device__ void init(int consumers, int arrivals = 1) {
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(&full[i], arrivals);
      mbarrier_init(&empty[i], consumers);
    }
  }
  __device__ Stage& operator[](unsigned i) { return stages[i % kStages]; }
  // Returns the descriptor of filling i's matrix that lies where that of `first` does in stage 0.
  __device__ uint64_t matrix(uint64_t first, unsigned i) const {
    return further(first, i % kStages * static_cast<int>(sizeof(Stage) / 16));
  }

  // Producer: waits until the stage of filling i is empty.  The barrier takes the arrivals that say it is full.
  __device__ Mbarrier* await_empty(unsigned i PTX_LOC) {
    PARE_CUDA::mbarrier_wait(&empty[i % kStages], (i / kStages + 1) % 2 PTX_SAME_LOC);
    return &full[i % kStages];
  }
  // Consumers: wait for filling i; one lane of each warp then releases it, to block `rank` of the cluster.
  __device__ void await_full(unsigned i PTX_LOC) {
    PARE_CUDA::mbarrier_wait(&full[i % kStages], i / kStages % 2 PTX_SAME_LOC);
  }
  __device__ void release(unsigned i PTX_LOC) { mbarrier_arrive(&empty[i % kStages] PTX_SAME_LOC); }
  __device__ void release_to(int rank, unsigned i PTX_LOC) {
    mbarrier_arrive_at(&empty[i % kStages], rank PTX_SAME_LOC);
  }
};

}  // namespace pare::PARE_CUDA
