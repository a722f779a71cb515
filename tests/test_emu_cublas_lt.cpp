// The emulator's cuBLASLt: what it computes, and that it refuses what the manual forbids.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "cuda/emu/include/cublasLt.h"
#include "cuda/runtime/library.h"

namespace pare::test {
namespace {

// D [m, n] = alpha op(A) op(B) + beta C + bias in f32, by columns, on device memory.
struct Product {
  static constexpr int kM = 3, kN = 4, kK = 5, kLd = 7;  // ld of all of them
  cublasOperation_t op_a = CUBLAS_OP_N, op_b = CUBLAS_OP_N;
  float alpha = 1, beta = 0;
  bool bias = false, in_place = false;
  int64_t c_ld = kLd;
  size_t shift = 0;        // of A, in bytes
  uint32_t promised = 4;   // alignment
  int other_columns = kN;  // of the D that the algorithm is chosen for
  cudaDataType_t d_type = CUDA_R_32F;

  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  std::vector<float> d = std::vector<float>(kLd * kLd, NAN), c = numbers(3), a = numbers(1), b = numbers(2);

  static std::vector<float> numbers(int seed) {
    std::vector<float> v(kLd * kLd);
    for (size_t i = 0; i < v.size(); i++) v[i] = static_cast<float>((i * 7 + static_cast<size_t>(seed) * 5) % 11) - 5;
    return v;
  }

  Product& run() {
    const size_t bytes = d.size() * sizeof(float);
    float* memory[5];
    const std::vector<float>* from[] = {&a, &b, &c, &d, &c};
    for (int i = 0; i < 5; i++) {
      EXPECT_EQ(cudaMalloc(&memory[i], bytes), cudaSuccess);
      EXPECT_EQ(cudaMemcpy(memory[i], from[i]->data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    }
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t what;
    cublasLtMatmulPreference_t preference;
    cublasLtMatrixLayout_t la, lb, lc, ld;
    EXPECT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulDescCreate(&what, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
      EXPECT_EQ(cublasLtMatmulDescSetAttribute(what, attribute, &value, sizeof value), CUBLAS_STATUS_SUCCESS);
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    set(CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    if (bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(memory[4]));
    }
    const auto layout = [&](cublasLtMatrixLayout_t& l, bool transposed, int rows, int columns, int64_t apart,
                            cudaDataType_t type = CUDA_R_32F) {
      if (transposed) std::swap(rows, columns);
      EXPECT_EQ(
          cublasLtMatrixLayoutCreate(&l, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), apart),
          CUBLAS_STATUS_SUCCESS);
    };
    layout(la, op_a == CUBLAS_OP_T, kM, kK, kLd);
    layout(lb, op_b == CUBLAS_OP_T, kK, kN, kLd);
    layout(lc, false, kM, kN, c_ld);
    layout(ld, false, kM, kN, kLd, d_type);
    EXPECT_EQ(cublasLtMatmulPreferenceCreate(&preference), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &promised,
                                                   sizeof promised),
              CUBLAS_STATUS_SUCCESS);
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    if (other_columns != kN) {
      cublasLtMatrixLayout_t wide, b_wide;
      layout(wide, false, kM, other_columns, kLd);
      layout(b_wide, op_b == CUBLAS_OP_T, kK, other_columns, kLd);
      EXPECT_EQ(cublasLtMatmulAlgoGetHeuristic(handle, what, la, b_wide, wide, wide, preference, 1, &result, &found),
                CUBLAS_STATUS_SUCCESS);
      cublasLtMatrixLayoutDestroy(wide);
      cublasLtMatrixLayoutDestroy(b_wide);
    } else {
      status = cublasLtMatmulAlgoGetHeuristic(handle, what, la, lb, lc, ld, preference, 1, &result, &found);
    }
    float* const to = memory[3];
    if (status == CUBLAS_STATUS_SUCCESS)
      status = cublasLtMatmul(handle, what, &alpha, reinterpret_cast<char*>(memory[0]) + shift, la, memory[1], lb,
                              &beta, in_place ? to : memory[2], lc, to, ld, &result.algo, nullptr, 0, nullptr);
    EXPECT_EQ(cudaMemcpy(d.data(), to, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    cublasLtMatmulDescDestroy(what);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtDestroy(handle);
    for (cublasLtMatrixLayout_t l : {la, lb, lc, ld}) cublasLtMatrixLayoutDestroy(l);
    for (float* p : memory) cudaFree(p);
    return *this;
  }
};

// Small whole numbers: any order of sums is exact.
TEST(EmuCublasLt, ComputesTheProduct) {
  for (const cublasOperation_t op_a : {CUBLAS_OP_N, CUBLAS_OP_T})
    for (const cublasOperation_t op_b : {CUBLAS_OP_N, CUBLAS_OP_T})
      for (const bool in_place : {false, true})
        for (const bool bias : {false, true}) {
          Product p;
          p.op_a = op_a;
          p.op_b = op_b;
          p.alpha = 2;
          p.beta = 3;
          p.bias = bias;
          p.in_place = in_place;
          if (in_place) p.d = p.c;
          p.run();
          ASSERT_EQ(p.status, CUBLAS_STATUS_SUCCESS);
          for (int j = 0; j < Product::kLd; j++)
            for (int i = 0; i < Product::kLd; i++) {
              const auto at = [](const std::vector<float>& v, int row, int column) {
                return v[static_cast<size_t>(row + column * Product::kLd)];
              };
              const float is = at(p.d, i, j);
              if (i >= Product::kM || j >= Product::kN) {  // between and behind the columns
                EXPECT_TRUE(in_place ? is == at(p.c, i, j) : std::isnan(is));
                continue;
              }
              float should = 3 * at(p.c, i, j) + (bias ? p.c[static_cast<size_t>(i)] : 0);
              for (int k = 0; k < Product::kK; k++)
                should += 2 * (op_a == CUBLAS_OP_T ? at(p.a, k, i) : at(p.a, i, k)) *
                          (op_b == CUBLAS_OP_T ? at(p.b, j, k) : at(p.b, k, j));
              EXPECT_EQ(is, should) << i << ", " << j;
            }
        }
}

TEST(EmuCublasLt, DoesNotReadCWithoutBeta) {
  Product p;
  p.c.assign(p.c.size(), NAN);
  p.run();
  EXPECT_EQ(p.status, CUBLAS_STATUS_SUCCESS);
  for (int i = 0; i < Product::kM; i++) EXPECT_TRUE(std::isfinite(p.d[static_cast<size_t>(i)]));
}

TEST(EmuCublasLt, MistakesAreRefused) {
  const auto status = [](const std::function<void(Product&)>& change) {
    Product p;
    change(p);
    return p.run().status;
  };
  EXPECT_EQ(status([](Product&) {}), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(status([](Product& p) {
              p.in_place = true;
              p.c_ld = 8;
            }),
            CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(status([](Product& p) {
              p.c_ld = 8;
              p.in_place = false;
            }),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(status([](Product& p) { p.shift = 4; }), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(status([](Product& p) {
              p.shift = 4;
              p.promised = 8;
            }),
            CUBLAS_STATUS_INVALID_VALUE)
      << "alignment";
  EXPECT_EQ(status([](Product& p) {
              p.shift = 2;
              p.promised = 2;
            }),
            CUBLAS_STATUS_INVALID_VALUE)
      << "of an element";
  EXPECT_EQ(status([](Product& p) { p.shift = Product::kLd * Product::kLd * 4 - 8; }), CUBLAS_STATUS_INVALID_VALUE)
      << "over the end of an allocation";
  EXPECT_EQ(status([](Product& p) { p.other_columns = 6; }), CUBLAS_STATUS_INVALID_VALUE) << "another's algorithm";
  EXPECT_EQ(status([](Product& p) { p.d_type = CUDA_R_16BF; }), CUBLAS_STATUS_INVALID_VALUE) << "C is f32";

  cublasLtMatrixLayout_t layout;
  EXPECT_EQ(cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 5, 2, 4), CUBLAS_STATUS_INVALID_VALUE) << "ld below rows";
  EXPECT_EQ(cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 0, 2, 4), CUBLAS_STATUS_INVALID_VALUE);
  cublasLtMatmulDesc_t what;
  EXPECT_EQ(cublasLtMatmulDescCreate(&what, CUBLAS_COMPUTE_32F, CUDA_R_16BF), CUBLAS_STATUS_INVALID_VALUE);
  ASSERT_EQ(cublasLtMatmulDescCreate(&what, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
  const cublasOperation_t op = CUBLAS_OP_T;
  EXPECT_EQ(cublasLtMatmulDescSetAttribute(what, CUBLASLT_MATMUL_DESC_TRANSA, &op, 1), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(cublasLtMatmulDescSetAttribute(what, CUBLASLT_MATMUL_DESC_TRANSA, nullptr, sizeof op),
            CUBLAS_STATUS_INVALID_VALUE);
  cublasLtMatmulDescDestroy(what);
}

// What the program looks for on a device, where the emulation has it built in.
TEST(EmuCublasLt, ALibraryIsThereOrSaysWhyNot) {
  size_t (*length)(const char*) = nullptr;
  const Library none{"libpare_no_such.so.1", "libpare_no_such.so"};
  EXPECT_FALSE(none);
  EXPECT_NE(none.why_not().find("libpare_no_such.so.1"), std::string::npos) << none.why_not();
  none.find(length, "strlen");
  EXPECT_EQ(length, nullptr);
  const Library c{"libpare_no_such.so.1", "libc.so.6"};
  ASSERT_TRUE(c);
  c.find(length, "pare_no_such");
  EXPECT_EQ(length, nullptr);
  c.find(length, "strlen");
  ASSERT_NE(length, nullptr);
  EXPECT_EQ(length("pare"), 4u);
}

}  // namespace
}  // namespace pare::test
