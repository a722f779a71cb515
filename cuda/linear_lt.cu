// Linear layers by cuBLASLt, for `--exact=off`, in the library's order of sums.  The library picks a kernel by the
// shape, so the bits of a row of y depend on the number of rows, and log-probs of sampler and learner differ by
// roundings.  For the same shapes, device and version of the library, the bits are the same in every run.
//
// A weight lies row by row, [16 ceil(O / 16)][I], in the memory that its panels would take (Weight); the rows after the
// last output are zeros.  So adamw updates one array, a row of the embedding is a row of a matrix, and no kernel is
// needed besides those of the other files.
//
// cuBLASLt is column-major: our rows [N, C], `stride` apart, are its C x N matrix with that leading dimension, and
// y = x wT is its yT = w xT.  Sums are in f32; the library may round them to bf16 before it adds a bias or a residual
// (seen on an H100 with few rows, and with unaligned rows).
//
// There is no workspace: it would have to be planned besides the arenas, and without it no sum is split among blocks
// (split-K), neither in a second pass nor by taking turns.  Rows may have any alignment; its speed is cuBLASLt's.
#include <cublasLt.h>

#include <array>
#include <map>

#include "linear.cuh"
#include "ops/rope.h"
#include "ops/swiglu.h"
#include "runtime/library.h"
#include "runtime/machine.cuh"
#include "vocab.cuh"

namespace pare::PARE_CUDA::fast {

namespace {

#define PARE_LT(X)                \
  X(Create)                       \
  X(GetVersion)                   \
  X(GetStatusString)              \
  X(MatmulDescCreate)             \
  X(MatmulDescSetAttribute)       \
  X(MatmulDescDestroy)            \
  X(MatrixLayoutCreate)           \
  X(MatrixLayoutDestroy)          \
  X(MatmulPreferenceCreate)       \
  X(MatmulPreferenceSetAttribute) \
  X(MatmulPreferenceDestroy)      \
  X(MatmulAlgoGetHeuristic)       \
  X(Matmul)

// The functions of the library, from the first call of lt() on.
struct Lt {
#define X(name) decltype(&cublasLt##name) name;
  PARE_LT(X)
#undef X
} functions{};

const Lt& lt() {
  if (!functions.Matmul) {
    Lt f{};
#ifdef CUEMU
#define X(name) f.name = cublasLt##name;
#else
    const Library library{"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};
    if (!library)
      fail(
          "--exact=off computes with cuBLASLt, which was not found (", library.why_not(),
          "): name its folder in LD_LIBRARY_PATH, often /usr/local/cuda/lib64 or nvidia/cu13/lib of Python's packages; "
          "or install it, libcublas-13-0 of NVIDIA's packages; or run without --exact=off");
#define X(name)                           \
  library.find(f.name, "cublasLt" #name); \
  if (!f.name) fail("--exact=off: the cuBLASLt that was found has no cublasLt" #name ": version 12 or 13 is needed");
#endif
    PARE_LT(X)
#undef X
    functions = f;
  }
  return functions;
}
#undef PARE_LT

template <class... What>
void check(cublasStatus_t status, const char* op, const What&... what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(Exit::failed, cat(op, " by cuBLASLt: ", lt().GetStatusString(status), ": ", what...));
}

cublasLtHandle_t opened = nullptr;  // by the first call of handle()
cublasLtHandle_t handle() {
  if (!opened) check(lt().Create(&opened), "linear layers", "the library cannot be used on this device");
  return opened;
}

// d = a b (+ c) (+ bias), matrices of rows: a and b as they are or transposed; c, [rows of d, columns of d], may be d
// itself, and bias is [columns of d]; either may be absent.
struct Product {
  const char* op;
  Tensor d, a, b, c, bias;
  bool a_transposed, b_transposed;

  const Tensor& added() const { return c ? c : d; }
};
std::ostream& operator<<(std::ostream& s, const Product& p) {
  return s << p.d << " from " << p.a << (p.a_transposed ? " transposed" : "") << " and " << p.b
           << (p.b_transposed ? " transposed" : "");
}

cudaDataType_t type_of(const Tensor& t) { return t.dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }
// Returns the elements from one row to the next; a single row has none.
int64_t leading(const Tensor& t) { return t.shape[0] > 1 ? t.stride[0] : t.shape[1]; }
// Returns the alignment of the first element, in bytes, as far as it matters to the library.
uint32_t alignment(const Tensor& t) {
  const auto address = reinterpret_cast<uintptr_t>(t.data) | 256;
  return static_cast<uint32_t>(address & -address);
}

// The product to cuBLASLt, for one call: dT = bT aT (+ cT), so that its A is our b.
struct Descriptors {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;

  explicit Descriptors(const Product& p) {
    const auto create = [&](cublasLtMatrixLayout_t& layout, const Tensor& t) {
      const auto columns = static_cast<uint64_t>(t.shape[0]), rows = static_cast<uint64_t>(t.shape[1]);
      check(lt().MatrixLayoutCreate(&layout, type_of(t), rows, columns, leading(t)), p.op, t);
    };
    create(a, p.b);
    create(b, p.a);
    create(c, p.added());
    create(d, p.d);
    check(lt().MatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), p.op, p);
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
      check(lt().MatmulDescSetAttribute(product, attribute, &value, sizeof value), p.op, p);
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (!p.bias) return;
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias.data);
  }
  Descriptors(const Descriptors&) = delete;
  ~Descriptors() {
    if (product) lt().MatmulDescDestroy(product);
    for (const cublasLtMatrixLayout_t layout : {a, b, c, d})
      if (layout) lt().MatrixLayoutDestroy(layout);
  }
};

// Returns the kernel that the library thinks fastest.
cublasLtMatmulAlgo_t choose(const Product& p, const Descriptors& x) {
  struct Preference {
    cublasLtMatmulPreference_t p = nullptr;
    ~Preference() {
      if (p) lt().MatmulPreferenceDestroy(p);
    }
  } preference;  // for a workspace: none, the default
  check(lt().MatmulPreferenceCreate(&preference.p), p.op, p);
  for (const auto& [attribute, t] : {std::pair(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &p.b),
                                     {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &p.a},
                                     {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &p.added()},
                                     {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &p.d}}) {
    const uint32_t bytes = alignment(*t);
    check(lt().MatmulPreferenceSetAttribute(preference.p, attribute, &bytes, sizeof bytes), p.op, p);
  }
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const cublasStatus_t status =
      lt().MatmulAlgoGetHeuristic(handle(), x.product, x.a, x.b, x.c, x.d, preference.p, 1, &result, &found);
  check(status == CUBLAS_STATUS_SUCCESS && found == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : status, p.op, p,
        ": it has no kernel for this; run without --exact=off");
  return result.algo;
}

// The same, once for all that the choice depends on.
using Key = std::array<int64_t, 19>;
std::map<Key, cublasLtMatmulAlgo_t> chosen;
constexpr size_t kMost = 4096;  // every number of rows is a shape of its own
const cublasLtMatmulAlgo_t& algorithm(const Product& p, const Descriptors& x) {
  Key key{};
  size_t i = 0;
  for (const Tensor* t : {&p.d, &p.a, &p.b, &p.added()})
    for (const int64_t n : {t->shape[0], t->shape[1], leading(*t), int64_t{alignment(*t)}}) key[i++] = n;
  key[i++] = p.a_transposed + 2 * p.b_transposed;
  key[i++] = type_of(p.a) + 256 * type_of(p.d);
  key[i++] = p.bias ? alignment(p.bias) : 0;
  if (const auto it = chosen.find(key); it != chosen.end()) return it->second;
  if (chosen.size() == kMost) chosen.clear();
  return chosen.emplace(key, choose(p, x)).first->second;
}

// The library's kernels cannot be gathered (graph.cu): they are launched at once, after the kernels gathered so far.
void multiply(const Product& p, Stream stream) {
  if (p.d.size() == 0) return;
  with_act(p.op, p.a, [](auto) {});
  if (asked_for != TensorKernel::choose) fail(p.op, ": with --exact=off the kernel is cuBLASLt's choice: kernel=0");
  end_gathering(stream);
  const Descriptors x(p);
  const float one = 1, keep = p.c ? 1 : 0;
  check(lt().Matmul(handle(), x.product, &one, p.b.data, x.a, p.a.data, x.b, &keep, p.added().data, x.c, p.d.data, x.d,
                    &algorithm(p, x), nullptr, 0, static_cast<cudaStream_t>(stream.handle)),
        p.op, p);
}

// Returns every row of a weight, without the zeros after the last.
Tensor rows_of(const Weight& w) { return make_tensor(w.packed.data, w.packed.dtype, {w.outputs(), w.inputs()}); }

void copy(const char* op, const Tensor& to, const Tensor& from, Stream stream) {
  end_gathering(stream);
  check_cuda(cudaMemcpyAsync(to.data, from.data, from.bytes(), cudaMemcpyDeviceToDevice,
                             static_cast<cudaStream_t>(stream.handle)),
             op);
}

}  // namespace

void find_library() { lt(); }
std::string open_library() {
  handle();
  const size_t version = lt().GetVersion();  // 130100 is 13.1
  return cat("cuBLASLt ", version / 10000, ".", version / 100 % 100);
}

void pack_weight(const PackWeight& a, Stream stream) {
  const char* op = "pack_weight";
  const int64_t end = a.first + a.rows.shape[0];
  copy(op, rows_of(a.w).rows(a.first, a.rows.shape[0]), a.rows, stream);
  if (end == a.w.outputs()) {
    const Tensor all = a.w.packed.flat(), zeros = all.rows(end * a.w.inputs(), all.size() - end * a.w.inputs());
    zero({zeros}, stream);
  }
}
void unpack_weight(const UnpackWeight& a, Stream stream) {
  copy("unpack_weight", a.rows, rows_of(a.w).rows(a.first, a.rows.shape[0]), stream);
}

void embedding_fwd(const EmbeddingFwd& a, Stream stream) { take_embeddings(a, false, stream); }

void linear_fwd(const LinearFwd& a, Stream stream) {
  if (a.w.inputs() == 0) return PARE_CUDA::linear_fwd(a, stream);  // no weight: no product
  multiply({.op = "linear_fwd",
            .d = a.y,
            .a = a.x,
            .b = rows_of(a.w),
            .c = a.residual,
            .bias = a.bias,
            .a_transposed = false,
            .b_transposed = true},
           stream);
  sum_vocabulary(a, stream);
  if (a.swiglu) swiglu_fwd({a.swiglu, a.y}, stream);
  norm_rows(a.norm, a.y, stream);
}

void kv_write(const KvWrite& a, Stream stream) {
  KvWrite rest = a;
  if (a.product.y) linear_fwd(std::exchange(rest.product, {}), stream);
  PARE_CUDA::kv_write(rest, stream);
}

void linear_bwd_input(const LinearBwdInput& a, Stream stream) {
  if (a.w.outputs() == 0) return PARE_CUDA::linear_bwd_input(a, stream);
  multiply({.op = "linear_bwd_input",
            .d = a.dx,
            .a = a.dy,
            .b = rows_of(a.w),
            .c = a.accumulate ? a.dx : Tensor{},
            .bias = {},
            .a_transposed = false,
            .b_transposed = false},
           stream);
}

void linear_bwd_weight(const LinearBwdWeight& a, Stream stream) {
  const char* op = "linear_bwd_weight";
  const int64_t rows = a.dy.shape[0];
  if (rows == 0) return;
  multiply(
      {.op = op, .d = a.dw, .a = a.dy, .b = a.x, .c = a.dw, .bias = {}, .a_transposed = true, .b_transposed = false},
      stream);
  add_bias_gradient(op, a.dbias, a.dy, stream);
}

void adamw(const AdamW& a, Stream stream) {
  AdamW b = a;
  if (a.p.rank == 3) {
    b.p = a.p.flat().rows(0, a.grad.size());
    b.grad = a.grad.flat();
    b.m = a.m.flat();
    b.v = a.v.flat();
    if (a.master) b.master = a.master.flat();
  }
  PARE_CUDA::adamw(b, stream);
}

}  // namespace pare::PARE_CUDA::fast
