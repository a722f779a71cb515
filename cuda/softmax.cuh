// Weights of slots in attention (list.h), for its kernels and the one of masses.
#pragma once
#include "runtime/common.cuh"

namespace pare::PARE_CUDA {

constexpr int kBlock16 = 128, kCut16 = 1024;  // slots of a block and of a cut of dense rows in bf16
// Does a cut end before block i?
__device__ __forceinline__ bool ends_cut(int i) { return i > 0 && i % (kCut16 / kBlock16) == 0; }

// scale: of q.k, with log2(e).
struct Softmax {
  float scale;
  __device__ __forceinline__ float score(float dot) const { return dot * scale; }
  // Returns a slot's weight, relative to a slot with the score `max`.
  __device__ __forceinline__ float weight(float dot, float max) const { return exp2_f32(fmaf(dot, scale, -max)); }
  // The same in bf16.
  __device__ __forceinline__ float cubic(float dot, float max) const { return exp2_cubic(fmaf(dot, scale, -max)); }
};

// Factors of the sums so far and of those of a cut, when the cut is merged.
struct CutFactors {
  float before, cut;
};
// Merges a cut into top and sum, which are of the cuts so far.
__device__ __forceinline__ CutFactors merge_cut(float& top, float& sum, float cut_top, float cut_sum) {
  const float next = fmaxf(top, cut_top);
  const CutFactors f{exp2_f32(top - next), exp2_f32(cut_top - next)};
  top = next;
  sum = sum * f.before + cut_sum * f.cut;
  return f;
}

}  // namespace pare::PARE_CUDA
