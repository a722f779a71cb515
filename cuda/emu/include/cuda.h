// Stand-in for CUDA's cuda.h in the emulated build: tensor maps, which describe to the copies of compute capability 9.0
// (cuemu_hopper.h) a tensor in global memory and the boxes that are copied of it.
#pragma once
#include <cstdint>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE = 0,
  CU_TENSOR_MAP_SWIZZLE_32B = 1,
  CU_TENSOR_MAP_SWIZZLE_128B = 3
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };

struct CUtensorMap {
  const char* data;
  uint64_t size[3], stride[3];  // by dimension, the innermost first; strides in bytes
  uint32_t rank, box[3];
  uint32_t element, span;  // bytes: of an element; within which the swizzle permutes 16-byte chunks, 16 without one
  bool operator==(const CUtensorMap&) const = default;
};

// Refuses what the driver's manual forbids, and what is not emulated: element strides, other swizzles and boxes that do
// not fill the swizzle's span.
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill);
