// Functions shared by the two kinds of linear layers: our kernels, whose sums have one order in any batch (linear.cu),
// and cuBLASLt, for `--exact=off` (linear_lt.cu).
#pragma once
#include "ops/data.h"
#include "ops/optimizer.h"
#include "runtime/common.cuh"

namespace pare {
struct KvWrite;  // ops/rope.h
}

namespace pare::PARE_CUDA {

// Where in the memory of a weight w[o][i] lies.  f32: as Weight says.  bf16: so, but that the two halves of a panel's
// 16 outputs change places in every other four inputs, which is how shared memory wants them (the 32-byte swizzle of
// wgmma; no bank conflicts of ldmatrix), so that they are copied as they lie, in long rows.
template <class T>
__host__ __device__ constexpr int64_t place_of_weight(int64_t o, int64_t i, int64_t inputs) {
  const int64_t place = weight_place(o, i, inputs);
  return sizeof(T) == 2 ? place ^ (i / 4 % 2 * (kPanel / 2)) : place;
}

// dbias += sum over rows of dy, as linear_bwd_weight does it; no effect without dbias.
void add_bias_gradient(const char* op, const Tensor& dbias, const Tensor& dy, Stream stream);

// Norms the rows of x, if there is a norm.
void norm_rows(const RowNorm& norm, const Tensor& x, Stream stream);

// embedding_fwd from a table in panels, or row by row.
void take_embeddings(const EmbeddingFwd& a, bool panels, Stream stream);

// Computes the product of `a`, rotates and writes its heads by one kernel; returns false if these shapes have none.
bool multiply_and_write(const KvWrite& a, Stream stream);

// The ops to which it matters how a weight lies, with weights row by row, and the products by cuBLASLt.
namespace fast {
void pack_weight(const PackWeight& a, Stream stream);
void unpack_weight(const UnpackWeight& a, Stream stream);
void embedding_fwd(const EmbeddingFwd& a, Stream stream);
void linear_fwd(const LinearFwd& a, Stream stream);
void kv_write(const KvWrite& a, Stream stream);
void linear_bwd_input(const LinearBwdInput& a, Stream stream);
void linear_bwd_weight(const LinearBwdWeight& a, Stream stream);
void adamw(const AdamW& a, Stream stream);
void find_library();         // an Error where there is none
std::string open_library();  // for this device; its name, "cuBLASLt 13.0"
}  // namespace fast

}  // namespace pare::PARE_CUDA
