// Linear layers, twice: by kernels of ours, whose sums have one order whatever else is in a batch (linear.cu), and by
// cuBLASLt, for `--exact=off` (linear_lt.cu).  What both ask of their arguments, and what one takes from the other.
#pragma once
#include "common.cuh"

namespace pare::PARE_CUDA {

// t is [rows, columns] with any stride between rows.
inline int64_t matrix_stride(const char* op, const char* field, const Tensor& t, int64_t rows, int64_t columns) {
  expect(is_shape(t, {rows, columns}) && t.stride[1] == 1, op, ": ", field, " ", t.str(), " must be [", rows, ", ",
         columns, "]");
  return t.stride[0];
}
inline void expect_weight(const char* op, const Weight& w, int64_t outputs, int64_t inputs) {
  expect(w.outputs() == outputs && is_shape(w.packed, {weight_panels(outputs), inputs, 16}) && w.packed.contiguous(),
         op, ": packed weight ", w.packed.str(), " of ", w.outputs(), " outputs for ", outputs, " outputs of ", inputs,
         " inputs");
}
// `rows` are or become those of w from `first` on.
inline void expect_rows_of(const char* op, const Weight& w, const Tensor& rows, int64_t first) {
  const int64_t n = rows.shape[0], inputs = w.inputs();
  expect_weight(op, w, w.outputs(), inputs);
  expect(is_shape(rows, {n, inputs}) && rows.contiguous() && first >= 0 && first + n <= w.outputs(), op, ": rows ",
         rows.str(), " from ", first, " of ", w.outputs(), " outputs of ", inputs, " inputs");
}
inline void expect_weight_gradient(const char* op, const LinearBwdWeight& a) {
  const int64_t outputs = a.dy.shape[1], inputs = a.x.shape[1];
  expect(is_shape(a.dw, {outputs, inputs}) && a.dw.contiguous(), op, ": dw ", a.dw.str());
  expect(!a.dbias || (is_shape(a.dbias, {outputs}) && a.dbias.contiguous()), op, ": dbias ", a.dbias.str());
}

// dbias += sum over rows of dy, as linear_bwd_weight does it; nothing where there is no dbias.
void add_bias_gradient(const char* op, const Tensor& dbias, const Tensor& dy, Stream stream);

// The ops to which it matters how a weight lies, with weights row by row, and the products by cuBLASLt.
namespace fast {
void pack_weight(const PackWeight& a, Stream stream);
void unpack_weight(const UnpackWeight& a, Stream stream);
void embedding_fwd(const EmbeddingFwd& a, Stream stream);
void linear_fwd(const LinearFwd& a, Stream stream);
void linear_bwd_input(const LinearBwdInput& a, Stream stream);
void linear_bwd_weight(const LinearBwdWeight& a, Stream stream);
void adamw(const AdamW& a, Stream stream);
void find_library();         // an Error where there is none
std::string open_library();  // for this device; its name, "cuBLASLt 13.0"
}  // namespace fast

}  // namespace pare::PARE_CUDA
