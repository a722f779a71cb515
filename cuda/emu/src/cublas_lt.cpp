// The functions of cuBLASLt that the project calls.
#include <cublasLt.h>

#include <array>
#include <bit>
#include <vector>

#include "base/half.h"
#include "check.h"

struct cublasLtContext {};
struct cublasLtMatmulDescOpaque_t {
  cublasOperation_t op_a = CUBLAS_OP_N, op_b = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
};
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType_t type;
  uint64_t rows, columns;
  int64_t ld;
  bool operator==(const cublasLtMatrixLayoutOpaque_t&) const = default;
};
struct cublasLtMatmulPreferenceOpaque_t {
  std::array<uint32_t, 4> alignment{256, 256, 256, 256};  // of A, B, C, D
};

namespace cuemu {
namespace {

using Layout = cublasLtMatrixLayoutOpaque_t;

size_t element(cudaDataType_t type) { return type == CUDA_R_16BF ? 2 : 4; }

// A matrix in memory.
struct Matrix {
  char* p;
  Layout l;
  char* at(uint64_t row, uint64_t column) const {
    return p + (row + column * static_cast<uint64_t>(l.ld)) * element(l.type);
  }
  float get(uint64_t row, uint64_t column) const {
    if (l.type == CUDA_R_32F) return *reinterpret_cast<const float*>(at(row, column));
    return pare::bf16_to_f32(*reinterpret_cast<const uint16_t*>(at(row, column)));
  }
  void set(uint64_t row, uint64_t column, float x) const {
    if (l.type == CUDA_R_32F)
      *reinterpret_cast<float*>(at(row, column)) = x;
    else
      *reinterpret_cast<uint16_t*>(at(row, column)) = pare::f32_to_bf16(x);
    check::host_wrote(at(row, column), element(l.type));
  }
  bool in_device_memory() const {
    for (uint64_t c = 0; c < l.columns; c++)
      if (!usable(at(0, c), l.rows * element(l.type))) return false;
    return true;
  }
  bool aligned(uint64_t bytes) const { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }
};

struct Sizes {
  uint64_t m, n, k;
};
// The product's, where the layouts fit one another; else m is 0.
Sizes sizes(const cublasLtMatmulDescOpaque_t& what, const Layout& a, const Layout& b, const Layout& c,
            const Layout& d) {
  const bool ta = what.op_a == CUBLAS_OP_T, tb = what.op_b == CUBLAS_OP_T;
  const Sizes s{d.rows, d.columns, ta ? a.rows : a.columns};
  const bool fit = (ta ? a.columns : a.rows) == s.m && (tb ? b.columns : b.rows) == s.k &&
                   (tb ? b.rows : b.columns) == s.n && c.rows == s.m && c.columns == s.n;
  const bool types = a.type == b.type && c.type == d.type && (d.type == a.type || d.type == CUDA_R_32F);
  return fit && types ? s : Sizes{};
}

// What an algorithm was chosen for: layouts and operations, in a word.
uint64_t problem(const cublasLtMatmulDescOpaque_t& what, const Layout& a, const Layout& b, const Layout& c,
                 const Layout& d) {
  uint64_t h = 0;
  const auto mix = [&](uint64_t x) {
    h = (h ^ x) * 0x9e3779b97f4a7c15ull;
    h ^= h >> 29;
  };
  for (const Layout* l : {&a, &b, &c, &d}) {
    mix(l->type);
    mix(l->rows);
    mix(l->columns);
    mix(static_cast<uint64_t>(l->ld));
  }
  mix(what.op_a);
  mix(what.op_b);
  mix(what.epilogue);
  return h;
}

template <class T>
cublasStatus_t create(T** to, T value) {
  *to = new T(value);
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t destroy(T* p) {
  delete p;
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t set(T& to, const void* value, size_t bytes) {
  if (!value || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, value, sizeof(T));
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace
}  // namespace cuemu

using cuemu::Matrix;

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return cuemu::create(handle, cublasLtContext{}); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return cuemu::destroy(handle); }
size_t cublasLtGetVersion() { return 130000; }
const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "the operation completed successfully";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "the functionality requested is not supported";
  }
  return "unknown";
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute, cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_INVALID_VALUE;
  return cuemu::create(desc, cublasLtMatmulDescOpaque_t{});
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return cuemu::set(desc->op_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return cuemu::set(desc->op_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return cuemu::set(desc->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return cuemu::set(desc->bias, value, bytes);
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { return cuemu::destroy(desc); }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
  if (rows == 0 || columns == 0 || ld < static_cast<int64_t>(rows)) return CUBLAS_STATUS_INVALID_VALUE;
  return cuemu::create(layout, cublasLtMatrixLayoutOpaque_t{type, rows, columns, ld});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return cuemu::destroy(layout); }

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return cuemu::create(preference, cublasLtMatmulPreferenceOpaque_t{});
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
  const int i = attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES;
  if (i < 0 || i > 3) return CUBLAS_STATUS_INVALID_VALUE;
  return cuemu::set(preference->alignment[static_cast<size_t>(i)], value, bytes);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return cuemu::destroy(preference);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t what, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int wanted, cublasLtMatmulHeuristicResult_t* results, int* found) {
  *found = 0;
  if (wanted < 1 || cuemu::sizes(*what, *a, *b, *c, *d).m == 0) return CUBLAS_STATUS_INVALID_VALUE;
  auto& data = results[0].algo.data;
  data[0] = cuemu::problem(*what, *a, *b, *c, *d);
  for (size_t i = 0; i < 4; i++) data[1 + i] = preference->alignment[i];
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t what, const void* alpha, const void* a_data,
                              cublasLtMatrixLayout_t a_layout, const void* b_data, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c_data, cublasLtMatrixLayout_t c_layout, void* d_data,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo, void*, size_t,
                              cudaStream_t stream) {
  if (!alpha || !beta || !algo) return CUBLAS_STATUS_INVALID_VALUE;
  const float scale = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
  const auto matrix = [](const void* p, const cublasLtMatrixLayout_t& l) {
    return Matrix{static_cast<char*>(const_cast<void*>(p)), *l};
  };
  const Matrix a = matrix(a_data, a_layout), b = matrix(b_data, b_layout), c = matrix(c_data, c_layout),
               d = matrix(d_data, d_layout);
  const cuemu::Sizes s = cuemu::sizes(*what, a.l, b.l, c.l, d.l);
  const bool with_bias = what->epilogue == CUBLASLT_EPILOGUE_BIAS;
  const Matrix bias{static_cast<char*>(const_cast<void*>(what->bias)), {d.l.type, s.m, 1, static_cast<int64_t>(s.m)}};
  bool fine = s.m > 0 && algo->data[0] == cuemu::problem(*what, a.l, b.l, c.l, d.l) && (c.p != d.p || c.l == d.l) &&
              (!with_bias || (bias.p && bias.in_device_memory()));
  const std::array<const Matrix*, 4> all = {&a, &b, &c, &d};
  for (size_t i = 0; i < 4 && fine; i++)
    fine = all[i]->p && all[i]->aligned(algo->data[1 + i]) && all[i]->aligned(cuemu::element(all[i]->l.type)) &&
           all[i]->in_device_memory();
  if (!fine) return CUBLAS_STATUS_INVALID_VALUE;
  cuemu::g_calls.launches++;
  cuemu::queue(stream, [=, ta = what->op_a == CUBLAS_OP_T, tb = what->op_b == CUBLAS_OP_T] {
    if (cuemu::g_error) return;
    // Each of every so many products, the last first: one order for all numbers of rows of about a size.
    std::vector<float> sums(1 + static_cast<size_t>(std::bit_width(s.n)));
    for (uint64_t j = 0; j < s.n; j++)
      for (uint64_t i = 0; i < s.m; i++) {
        std::fill(sums.begin(), sums.end(), 0.f);
        for (uint64_t k = s.k; k-- > 0;) {
          float& sum = sums[k % sums.size()];
          sum = std::fma(ta ? a.get(k, i) : a.get(i, k), tb ? b.get(j, k) : b.get(k, j), sum);
        }
        float x = 0;
        for (const float sum : sums) x += sum;
        x *= scale;
        if (keep != 0) x += keep * c.get(i, j);
        if (with_bias) x += bias.get(i, 0);
        d.set(i, j, x);
      }
  });
  return CUBLAS_STATUS_SUCCESS;
}
