// Sums over a tile of the vocabulary (list.h; VocabSums), for the product of the LM head and the ops on logits.
#pragma once
#include "ops/linear.h"
#include "runtime/common.cuh"

namespace pare::PARE_CUDA {

// Exponentials of a tile whose largest z is m are relative to this: exp(-infinity - 0) is +0, so a tile of -infinity
// adds nothing.
__device__ __forceinline__ float base_of_tile(float m) { return m == -INFINITY ? 0.f : m; }
// Adds an id to both sums.  `below`, z less the base, is 0 at most.  It is floored, so that -infinity adds 0, not NaN.
__device__ __forceinline__ void add_to_tile(float& sum, float& weighted, float below) {
  below = floored(below);
  const float e = exp_of_floored(below);
  sum += e;
  weighted = fmaf(below, e, weighted);
}

// Returns a row sum of which a lane of a quad has four lanes: 2q, 2q + 1, 2q + 8, 2q + 9.
__device__ __forceinline__ float tree_of_quad(const float (&lane)[4]) {
  float even = lane[0] + lane[2], odd = lane[1] + lane[3];
  for (int o = 2; o > 0; o /= 2) {
    even += __shfl_xor_sync(kAllLanes, even, o);
    odd += __shfl_xor_sync(kAllLanes, odd, o);
  }
  return even + odd;
}

// Computes a.vocab_sums of the logits a.y, which have been written.
void sum_vocabulary(const LinearFwd& a, Stream stream);

}  // namespace pare::PARE_CUDA
