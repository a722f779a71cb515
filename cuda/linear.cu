// Linear layers: y = x wT (+ bias) (+ residual), dx = dy w, dw += dyT x, and the packing of weights.
//
// x, y, dx, dy may have strided rows; a packed weight is [ceil(outputs / 16)][inputs][16] (ops.h).
// Order: one chain of fused multiply-adds per element of the result, k ascending, in f32 whatever the element type: a
// row's bits depend on nothing but the row and the weight, and f32 has the bits of the `cpu` table.
// Bytes: every operand once for each 64 rows or columns of the result, from L2 for the most part.  Limited by the
// multiply-adds of the CUDA cores: this is the simple version, without tensor cores.
#include "common.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kSide = 16, kEach = 4, kTile = kSide * kEach;  // threads of a side, results of each, of a block
constexpr int kDepth = 16;                                   // of what lies in shared memory
constexpr int kThreads = kSide * kSide;

// y = x packed (+ bias) (+ residual): sums over k of x[row][k] and the packed operand's [k][column].
template <class T>
struct Forward {
  T* y;
  const T *x, *packed, *bias, *residual;  // bias and residual may be null; residual may be y
  int64_t y_stride, x_stride, residual_stride;
  int rows, columns, depth;

  static constexpr bool kAlongDepth = true;  // x: neighbouring threads load neighbouring k
  __device__ float a(int k, int row) const { return to_float(x[row * x_stride + k]); }
  __device__ float b(int k, int column) const {
    return to_float(packed[(int64_t{column / 16} * depth + k) * 16 + column % 16]);
  }
  __device__ float start(int, int) const { return 0; }
  __device__ void finish(int row, int column, float sum) const {
    if (bias) sum += to_float(bias[column]);
    if (residual) sum += to_float(residual[row * residual_stride + column]);
    y[row * y_stride + column] = from_float<T>(sum);
  }
};

// dw[o][i] += sum over rows n of dy[n][o] and x[n][i], continuing what is there.
template <class T>
struct WeightGradient {
  float* dw;
  const T *dy, *x;
  int64_t dy_stride, x_stride;
  int rows, columns, depth;  // outputs, inputs, rows of x

  static constexpr bool kAlongDepth = false;
  __device__ float a(int k, int row) const { return to_float(dy[k * dy_stride + row]); }
  __device__ float b(int k, int column) const { return to_float(x[k * x_stride + column]); }
  __device__ float start(int row, int column) const { return dw[int64_t{row} * columns + column]; }
  __device__ void finish(int row, int column, float sum) const { dw[int64_t{row} * columns + column] = sum; }
};

// A block computes a tile of 64 x 64 results, thread (x, y) those at rows y + 16 i and columns x + 16 j of it.
template <class Product>
__global__ void __launch_bounds__(kThreads) multiply(const Product p) {
  __shared__ float a[kDepth][kTile + 1], b[kDepth][kTile];
  const int x = threadIdx.x % kSide, y = threadIdx.x / kSide, first_row = blockIdx.y * kTile,
            first_column = blockIdx.x * kTile;
  const int rows = min(kTile, p.rows - first_row), columns = min(kTile, p.columns - first_column);
  float sum[kEach][kEach] = {};
#pragma unroll
  for (int i = 0; i < kEach; i++)
#pragma unroll
    for (int j = 0; j < kEach; j++)
      if (y + kSide * i < rows && x + kSide * j < columns)
        sum[i][j] = p.start(first_row + y + kSide * i, first_column + x + kSide * j);
  for (int first = 0; first < p.depth; first += kDepth) {
    const int depth = min(kDepth, p.depth - first);
    __syncthreads();  // everyone is done with the previous piece
    for (int i = threadIdx.x; i < kDepth * kTile; i += kThreads) {
      const int k = Product::kAlongDepth ? i % kDepth : i / kTile, row = Product::kAlongDepth ? i / kDepth : i % kTile;
      a[k][row] = k < depth && row < rows ? p.a(first + k, first_row + row) : 0.f;
      const int column = i % kTile;
      b[i / kTile][column] =
          i / kTile < depth && column < columns ? p.b(first + i / kTile, first_column + column) : 0.f;
    }
    __syncthreads();
    for (int k = 0; k < depth; k++) {
      float u[kEach], v[kEach];
#pragma unroll
      for (int i = 0; i < kEach; i++) u[i] = a[k][y + kSide * i], v[i] = b[k][x + kSide * i];
#pragma unroll
      for (int i = 0; i < kEach; i++)
#pragma unroll
        for (int j = 0; j < kEach; j++) sum[i][j] = fmaf(u[i], v[j], sum[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; i++)
#pragma unroll
    for (int j = 0; j < kEach; j++)
      if (y + kSide * i < rows && x + kSide * j < columns)
        p.finish(first_row + y + kSide * i, first_column + x + kSide * j, sum[i][j]);
}

// y[c] += sum over rows of x[r][c], a chain that continues what is there.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_rows(float* __restrict__ y, const T* __restrict__ x, int64_t stride, int rows, int columns) {
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= columns) return;
  float sum = y[c];
  for (int r = 0; r < rows; r++) sum += to_float(x[r * stride + c]);
  y[c] = sum;
}

// Panels of 16 outputs of w [outputs, inputs] or, with kTranspose, of wT.
template <class T, bool kTranspose>
__global__ void __launch_bounds__(kThreads)
    pack(T* __restrict__ packed, const T* __restrict__ w, int outputs, int inputs, int64_t size) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size) return;
  const int depth = kTranspose ? outputs : inputs, across = kTranspose ? inputs : outputs;
  const int64_t column = i / (16 * int64_t{depth}) * 16 + i % 16, k = i / 16 % depth;
  packed[i] = column >= across ? from_float<T>(0.f) : kTranspose ? w[k * inputs + column] : w[column * inputs + k];
}

template <class Product>
void multiply_all(const char* op, const Product& p, Stream stream) {
  if (p.rows == 0 || p.columns == 0) return;
  const unsigned rows = blocks(op, p.rows, kTile);
  expect(rows <= 65535, op, ": ", p.rows, " rows are more than one launch covers");
  launch(op, multiply<Product>, {.grid = dim3(blocks(op, p.columns, kTile), rows), .block = kThreads}, stream, p);
}

// t is [rows, columns] with any stride between rows.
int64_t row_stride(const char* op, const char* field, const Tensor& t, int64_t rows, int64_t columns) {
  expect(is_shape(t, {rows, columns}) && t.stride[1] == 1, op, ": ", field, " ", t.str(), " must be [", rows, ", ",
         columns, "]");
  return t.stride[0];
}
void expect_packed(const char* op, const Tensor& packed, int64_t outputs, int64_t inputs) {
  expect(is_shape(packed, {packed_size(outputs, inputs)}) && packed.contiguous(), op, ": packed weight ", packed.str(),
         " for ", outputs, " outputs of ", inputs, " inputs");
}

template <class T>
void forward(const char* op, const Tensor& y, const Tensor& x, const Tensor& packed, const Tensor& bias,
             const Tensor& residual, Stream stream) {
  const int64_t rows = y.shape[0], outputs = y.shape[1], inputs = x.shape[1];
  expect_packed(op, packed, outputs, inputs);
  expect(!bias || (is_shape(bias, {outputs}) && bias.contiguous()), op, ": bias ", bias.str());
  Forward<T> p{};
  p.y = y.as<T>(), p.x = x.as<T>(), p.packed = packed.as<T>();
  p.y_stride = row_stride(op, "result", y, rows, outputs), p.x_stride = row_stride(op, "input", x, rows, inputs);
  if (bias) p.bias = bias.as<T>();
  if (residual) p.residual = residual.as<T>(), p.residual_stride = row_stride(op, "residual", residual, rows, outputs);
  p.rows = static_cast<int>(rows), p.columns = static_cast<int>(outputs), p.depth = static_cast<int>(inputs);
  multiply_all(op, p, stream);
}

}  // namespace

void prepare_weight(const PrepareWeight& a, Stream stream) {
  const char* op = "prepare_weight";
  const int64_t outputs = a.w.outputs(), inputs = a.w.inputs();
  expect(a.w.w.rank == 2 && a.w.w.contiguous(), op, ": w ", a.w.w.str());
  expect_packed(op, a.w.packed, outputs, inputs);
  if (a.w.packed_t) expect_packed(op, a.w.packed_t, inputs, outputs);
  if (a.w.w.size() == 0) return;
  with_act(op, a.w.w, [&](auto type) {
    using T = decltype(type);
    const auto run = [&](auto kernel, const Tensor& packed) {
      launch(op, kernel, {.grid = blocks(op, packed.size(), kThreads), .block = kThreads}, stream, packed.as<T>(),
             a.w.w.as<T>(), outputs, inputs, packed.size());
    };
    run(pack<T, false>, a.w.packed);
    if (a.w.packed_t) run(pack<T, true>, a.w.packed_t);
  });
}

void linear_fwd(const LinearFwd& a, Stream stream) {
  with_act("linear_fwd", a.x,
           [&](auto type) { forward<decltype(type)>("linear_fwd", a.y, a.x, a.w.packed, a.bias, a.residual, stream); });
}

void linear_bwd_input(const LinearBwdInput& a, Stream stream) {
  with_act("linear_bwd_input", a.dy, [&](auto type) {
    forward<decltype(type)>("linear_bwd_input", a.dx, a.dy, a.w.packed_t, {}, a.accumulate ? a.dx : Tensor{}, stream);
  });
}

void linear_bwd_weight(const LinearBwdWeight& a, Stream stream) {
  const char* op = "linear_bwd_weight";
  const int64_t rows = a.dy.shape[0], outputs = a.dy.shape[1], inputs = a.x.shape[1];
  expect(is_shape(a.dw, {outputs, inputs}) && a.dw.contiguous(), op, ": dw ", a.dw.str());
  expect(!a.dbias || (is_shape(a.dbias, {outputs}) && a.dbias.contiguous()), op, ": dbias ", a.dbias.str());
  if (rows == 0) return;
  with_act(op, a.dy, [&](auto type) {
    using T = decltype(type);
    WeightGradient<T> p{};
    p.dw = a.dw.as<float>(), p.dy = a.dy.as<T>(), p.x = a.x.as<T>();
    p.dy_stride = row_stride(op, "dy", a.dy, rows, outputs), p.x_stride = row_stride(op, "x", a.x, rows, inputs);
    p.rows = static_cast<int>(outputs), p.columns = static_cast<int>(inputs), p.depth = static_cast<int>(rows);
    multiply_all(op, p, stream);
    if (a.dbias && outputs)
      launch(op, sum_rows<T>, {.grid = blocks(op, outputs, kThreads), .block = kThreads}, stream, a.dbias.as<float>(),
             p.dy, p.dy_stride, rows, outputs);
  });
}

}  // namespace pare::PARE_CUDA
