// Linear layers: y = x wT (+ bias) (+ residual), dx = dy w, dw += dyT x; and packing of weights.
//
// x, y, dx, dy may have strided rows; a weight lies in panels (place_of_weight).  The tiles of bf16 are shown in
// linear_mma.cuh and linear_wgmma.cuh.  In f32 a block of 16 x 16 threads has 64 x 64 results, and a thread every 16th
// of both sides:
//
//              columns ->
//              +----+----+----+----+
//   rows   16  |*   |*   |*   |*   |     *: results of thread (0, 0)
//          16  |*   |*   |*   |*   |
//          16  |*   |*   |*   |*   |     the operands pass through shared memory, 16 values of k at a time
//          16  |*   |*   |*   |*   |
//              +----+----+----+----+
//
// Order: in f32 each result is one chain of fused multiply-adds, k ascending, with the bits of the `cpu` table.  bf16
// uses tensor cores, in parts of k (linear_part).  The bits of a row of y or dx depend on the row and the weight only.
// dw is added to in parts of 4096 rows, one launch each, ascending; on compute capability 9.0 memory adds (tensor_add),
// and the other kernels round as it does.  So calls that are cut at multiples of 4096 rows give the same bits; other
// splits into micro-batches do not.  The sums of a call are added to dbias once.
//
// Bytes: each operand once for each 64 rows or columns of the result (few rows: 16; wgmma: 128 rows, up to 256
// columns), mostly from L2.  Limited by the tensor cores, with few rows by the bytes of the weight, in f32 by the
// multiply-adds of the CUDA cores.
#include "linear.cuh"
#include "linear_wgmma.cuh"
#include "ops/linear_tiles.h"
#include "ops/rope.h"
#include "ops/swiglu.h"
#include "runtime/machine.cuh"
#include "vocab.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kSide = 16, kEach = 4, kTile = kSide * kEach;  // threads of a side, results of each, of a block
constexpr int kDepth = 16;                                   // values of k in shared memory
constexpr int kThreads = kSide * kSide;

// y = x wT (+ bias) (+ residual): sums over k of x[row][k] and w[column][k]; with kTranspose y = x w (+ residual), the
// sums over k of x[row][k] and w[k][column].
template <class T, bool kTranspose>
struct Forward {
  template <int kRows>
  using Stage = WeightStage<kRows, kTranspose>;
  template <int kRows, int kColumns>
  using WgmmaStage = WgmmaWeightStage<kRows, kColumns, kTranspose>;
  using Result = T;

  T* y;
  const T *x, *packed, *bias, *residual;  // bias and residual may be null; residual may be y
  int64_t y_stride, x_stride, residual_stride;
  int rows, columns, depth, part;  // values of k in a part
  bool pairs;                      // y and residual have 4-byte words in even columns
  // From LinearParts, if parts of k have blocks of their own; else null.
  float* sums;
  unsigned* arrivals;

  Results<T> results() const { return {y, y_stride, columns}; }
  // Returns true if tensor copies can store y, and read the residual.
  bool stores_by_boxes() const {
    const auto suits = [](const T* p, int64_t stride) {
      return stride % 8 == 0 && reinterpret_cast<uintptr_t>(p) % 16 == 0;
    };
    return pairs && columns % 2 == 0 && suits(y, y_stride) && (!residual || suits(residual, residual_stride));
  }
  // The number of such parts, or 0.
  __host__ __device__ int apart() const { return !kTranspose && sums ? ceil_div(depth, part) : 0; }
  PartsApart parts_apart() const { return {std::max(1, apart())}; }
  // Returns the place of a part's sums at an even column and the next.
  __device__ float2* sum_of_part(int part, int row, int column) const requires(!kTranspose) {
    return reinterpret_cast<float2*>(sums + (int64_t{part} * rows + row) * round_up(columns, 2) + column);
  }
  __device__ float a(int k, int row) const { return to_float(x[row * x_stride + k]); }
  __device__ float b(int k, int column) const {
    return to_float(packed[kTranspose ? place_of_weight<T>(k, column, columns) : place_of_weight<T>(column, k, depth)]);
  }
  __device__ float start(int, int) const { return 0; }
  __device__ void finish(int row, int column, float sum) const {
    if (bias) sum += to_float(bias[column]);
    if (residual) sum += to_float(residual[row * residual_stride + column]);
    y[row * y_stride + column] = from_float<T>(sum);
  }
  // The same for an even column and the next, if there is one; the sums are added to `before`, by before_pair.
  __device__ void finish_pair(int row, int column, float2 sum, __nv_bfloat162 before) const {
    if (!is_pair(column)) {
      finish(row, column, sum.x);
      if (column + 1 < columns) finish(row, column + 1, sum.y);
      return;
    }
    *reinterpret_cast<__nv_bfloat162*>(&y[row * y_stride + column]) = rounded_pair(bias, residual, column, sum, before);
  }
  __device__ __nv_bfloat162 rounded_pair(bool has_bias, bool has_residual, int column, float2 sum,
                                         __nv_bfloat162 before) const {
    if (has_bias && column < columns) {
      sum.x += to_float(bias[column]);
      sum.y += to_float(bias[column + 1]);
    }
    if (has_residual) {
      sum.x += to_float(before.x);
      sum.y += to_float(before.y);
    }
    return __floats2bfloat162_rn(sum.x, sum.y);
  }
  __device__ __nv_bfloat162 before_pair(int row, int column) const {
    if (!residual || !is_pair(column)) return {};
    return *reinterpret_cast<const __nv_bfloat162*>(&residual[row * residual_stride + column]);
  }
  // Calls f(has_bias, has_residual) with constants.  No model here has both a bias and a residual.
  template <class F>
  __device__ void with_addends(F f) const {
    if (residual)
      f(!kTranspose && bias, true);
    else if (!kTranspose && bias)
      f(true, false);
    else
      f(false, false);
  }

 private:
  __device__ bool is_pair(int column) const { return pairs && column + 1 < columns; }
};

// The LM head: y are logits, and the tiles of the vocabulary are summed up.
struct Head : Forward<bf16, false> {
  float* tiles;           // [rows, vocab_tiles(columns) + 1, 3]
  const int32_t* target;  // [rows], or null
  float temperature;
  bool stores;  // the logits

  template <class F>
  __device__ void with_addends(F f) const {
    f(false, false);
  }
};

// Gates and ups, `columns` together: y are their SwiGLU.
struct Gated : Forward<bf16, false> {
  template <int kRows, int kColumns>
  using WgmmaStage = WgmmaHalvesStage<kRows, kColumns>;

  int half;  // the number of gates

  Results<bf16> results() const { return {y, y_stride, half}; }
};

// Queries, keys and values: y are rotated heads, and those of the values; keys and values go into the cache, too.
struct Rotated : Forward<bf16, false> {
  template <int kRows, int kColumns>
  using WgmmaStage = WgmmaHalvesStage<kRows, kColumns>;

  int half;  // channels of half a head
  struct {
    Pages<bf16> pages;
    Positions positions;
    Angles angles;
    int turned, q_heads;  // heads that are rotated, of which so many are of queries
  } rotation;

  static constexpr bool stores_by_boxes() { return false; }  // keys lie across
};

// y, and the norms of its rows, of which there are few.
struct Normed : Forward<bf16, false> {
  NormOfRows<bf16> norm;
  unsigned* finished;  // blocks that have finished a tile

  static constexpr bool stores_by_boxes() { return false; }  // the last block reads y
};

// dx, whose parts are added in turn.
struct InTurn : Forward<bf16, true> {
  int parts_in_turn;
  int* tickets;  // of the blocks

  PartsApart parts_apart() const { return {parts_in_turn, true}; }
  template <class F>
  __device__ void with_addends(F f) const {
    f(false, false);
  }
};

// dw[o][i] += sum over rows n of dy[n][o] and x[n][i]; in f32 the chain begins with dw[o][i].
template <class T>
struct WeightGradient {
  template <int kRows>
  using Stage = RowStage;
  template <int kRows, int kColumns>
  using WgmmaStage = WgmmaRowStage<kRows, kColumns>;
  using Result = float;
  static constexpr bool kContinues = std::is_same_v<T, float>;

  float* dw;
  const T *dy, *x;
  int64_t dy_stride, x_stride;
  int rows, columns, depth;                 // outputs, inputs, rows of x
  static constexpr int part = kLinearPart;  // a launch in bf16 has no more rows
  bool pairs;                               // dw has 8-byte words in even columns

  __host__ __device__ static constexpr int apart() { return 0; }
  static constexpr PartsApart parts_apart() { return {}; }
  Results<float> results() const { return {dw, columns, columns}; }
  // Returns true if tensor copies can add to dw.
  bool stores_by_boxes() const { return columns % 4 == 0 && reinterpret_cast<uintptr_t>(dw) % 16 == 0; }
  __device__ float a(int k, int row) const { return to_float(dy[k * dy_stride + row]); }
  __device__ float b(int k, int column) const { return to_float(x[k * x_stride + column]); }
  __device__ float start(int row, int column) const { return dw[int64_t{row} * columns + column]; }
  __device__ void finish(int row, int column, float sum) const {
    float& to = dw[int64_t{row} * columns + column];
    to = kContinues ? sum : add_flushing(to, sum);
  }
  __device__ void finish_pair(int row, int column, float2 sum, float2 before) const {
    if (pairs) {
      const float2 after = {add_flushing(before.x, sum.x), add_flushing(before.y, sum.y)};
      *reinterpret_cast<float2*>(&dw[int64_t{row} * columns + column]) = after;
    } else {
      finish(row, column, sum.x);
      if (column + 1 < columns) finish(row, column + 1, sum.y);
    }
  }
  __device__ float2 before_pair(int row, int column) const {
    return pairs ? *reinterpret_cast<const float2*>(&dw[int64_t{row} * columns + column]) : float2{};
  }
};

// A block computes a tile of 64 x 64 results, thread (x, y) those at rows y + 16 i and columns x + 16 j of it.
// kAlongDepth: in p.a, neighbours in k lie side by side, and neighbouring threads load them.
template <bool kAlongDepth, class Product>
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
      const int k = kAlongDepth ? i % kDepth : i / kTile, row = kAlongDepth ? i / kDepth : i % kTile;
      a[k][row] = k < depth && row < rows ? p.a(first + k, first_row + row) : 0.f;
      const int column = i % kTile;
      b[i / kTile][column] =
          i / kTile < depth && column < columns ? p.b(first + i / kTile, first_column + column) : 0.f;
    }
    __syncthreads();
    for (int k = 0; k < depth; k++) {
      float u[kEach], v[kEach];
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        u[i] = a[k][y + kSide * i];
        v[i] = b[k][x + kSide * i];
      }
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

// Adds the sum over rows of x[r][c] to y[c]: kStrands chains, of rows r % kStrands ascending, added up in order; the
// first begins with y[c].
constexpr int kColumns = 32;
template <class T, int kStrands>
__global__ void __launch_bounds__(kColumns* kStrands)
    sum_rows(float* __restrict__ y, const T* __restrict__ x, int64_t stride, int rows, int columns) {
  __shared__ float part[kStrands][kColumns];
  const int c = blockIdx.x * kColumns + threadIdx.x, strand = threadIdx.y;
  float sum = strand == 0 && c < columns ? y[c] : 0;
  for (int r = strand; r < rows && c < columns; r += kStrands) sum += to_float(x[r * stride + c]);
  part[strand][threadIdx.x] = sum;
  __syncthreads();
  if (strand > 0 || c >= columns) return;
  for (int i = 1; i < kStrands; i++) sum += part[i][threadIdx.x];
  y[c] = sum;
}

// Packs rows [first, first + size / inputs) of a weight from rows that follow one another, or unpacks them; `zeros`
// more rows are cleared.
template <class T, bool kUnpack>
__global__ void __launch_bounds__(kThreads)
    move_rows(T* __restrict__ packed, T* __restrict__ rows, int64_t first, int inputs, int64_t size, int64_t zeros) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size + zeros * inputs) return;
  T& at = packed[place_of_weight<T>(first + i / inputs, i % inputs, inputs)];
  if (kUnpack)
    rows[i] = at;
  else
    at = i < size ? rows[i] : from_float<T>(0.f);
}

// Launches a kernel whose block computes `tile`, columns and rows; `block` is its launch but for the grid.
template <class Product>
void multiply_all(const char* op, void (*kernel)(Product), LaunchShape block, dim3 tile, const Product& p,
                  Stream stream) {
  const unsigned rows = blocks(op, p.rows, tile.y);
  expect(rows <= 65535, op, ": ", p.rows, " rows are more than one launch covers");
  block.grid = dim3(blocks(op, p.columns, tile.x), rows, std::max(1, p.apart()));
  launch(op, kernel, block, stream, p);
}
template <bool kAlongDepth, class Product>
void multiply_on_cuda_cores(const char* op, const Product& p, Stream stream) {
  multiply_all(op, multiply<kAlongDepth, Product>, {.grid = {}, .block = kThreads}, dim3(kTile, kTile), p, stream);
}
// kAsync: rows of the operands begin at multiples of 16 bytes.
template <int kRows, bool kAsync, class Product>
void launch_mma(const char* op, const Product& p, Stream stream) {
  multiply_all(op, multiply_mma<kRows, kAsync, Product>,
               {.grid = {},
                .block = kMmaThreads,
                .smem = MmaBlock<kRows>::kStages * sizeof(typename Product::template Stage<kRows>)},
               dim3(kMmaTile, kRows), p, stream);
}
template <bool kAsync, bool kTranspose>
void multiply_by_mma(const char* op, const Forward<bf16, kTranspose>& p, Stream stream) {
  if constexpr (!kTranspose) {
    // Blocks of 64 x 64 would leave most of a GPU idle where both sides are short.
    const int blocks_of_64_rows = ceil_div(p.columns, kMmaTile) * std::max(1, p.apart());
    if (p.rows <= kFewRows || (p.rows <= kMmaTile && blocks_of_64_rows < machine().multiprocessors))
      return launch_mma<kFewRows, kAsync>(op, p, stream);
  }
  launch_mma<kMmaTile, kAsync>(op, p, stream);
}

// ---- which kernel multiplies in bf16 (on compute capability 9.0 the bits are the same)
template <bool kParts, const std::initializer_list<WgmmaTile>& kTiles, class Product>
void multiply_by_wgmma(const char* op, const Product& p, Stream stream) {
  const WgmmaTile tile = best_tile(kTiles, p.rows, p.columns, p.depth, machine().multiprocessors, p.parts_apart());
  const auto try_tile = [&]<size_t i>(std::integral_constant<size_t, i>) {
    constexpr WgmmaTile t = kTiles.begin()[i];
    if (tile.rows != t.rows || tile.columns != t.columns) return false;
    launch_wgmma<t.rows, t.columns, kParts>(op, tile.cluster, p, stream);
    return true;
  };
  const auto try_all = [&]<size_t... i>(std::index_sequence<i...>) {
    return (... || try_tile(std::integral_constant<size_t, i>{}));
  };
  expect(try_all(std::make_index_sequence<kTiles.size()>{}), op, ": no kernel has tiles of ", tile.rows, " x ",
         tile.columns);
}
// aligned: rows of x and of the weight begin at multiples of 16 bytes.
template <bool kTranspose>
void multiply_by_weight(const char* op, bool aligned, const Forward<bf16, kTranspose>& p, Stream stream) {
  if (!takes_wgmma(true) || !aligned || p.depth == 0)
    aligned ? multiply_by_mma<true>(op, p, stream) : multiply_by_mma<false>(op, p, stream);
  else if (p.part < p.depth && !p.apart())
    multiply_by_wgmma<true, kPartsTiles>(op, p, stream);
  else
    multiply_by_wgmma<false, kOnePartTiles>(op, p, stream);
}
// aligned: rows of dy and x do.
void multiply_rows(const char* op, bool aligned, const WeightGradient<bf16>& p, Stream stream) {
  if (takes_wgmma(p.rows > 64 && p.columns > 64) && aligned)
    multiply_by_wgmma<false, kGradientTiles>(op, p, stream);
  else
    aligned ? launch_mma<kMmaTile, true>(op, p, stream) : launch_mma<kMmaTile, false>(op, p, stream);
}

// y [rows, columns] = x [rows, depth] times w or its transpose.
template <class T, bool kTranspose>
Forward<T, kTranspose> forward_product(const Tensor& y, const Tensor& x, const Weight& w, const Tensor& bias,
                                       const Tensor& residual, const LinearParts& parts) {
  const int64_t rows = y.shape[0], columns = y.shape[1], depth = x.shape[1];
  Forward<T, kTranspose> p{};
  p.y = y.as<T>();
  p.x = x.as<T>();
  p.packed = w.packed.as<T>();
  p.bias = bias ? bias.as<T>() : nullptr;
  p.residual = residual ? residual.as<T>() : nullptr;
  p.y_stride = y.stride[0];
  p.x_stride = x.stride[0];
  p.residual_stride = residual.stride[0];
  p.rows = static_cast<int>(rows);
  p.columns = static_cast<int>(columns);
  p.depth = static_cast<int>(depth);
  p.part = static_cast<int>(linear_part(columns, depth));
  if (const int64_t n = linear_parts_apart(rows, columns, depth); parts.sums && n > 0) {
    p.sums = parts.sums.as<float>();
    p.arrivals = reinterpret_cast<unsigned*>(parts.arrivals.as<int32_t>());
  }
  const auto even = [](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.data) % 4 == 0 && t.stride[0] % 2 == 0;
  };
  p.pairs = even(y) && (!residual || even(residual));
  return p;
}
bool takes_tensor_copies(const Tensor& x, const Weight& w) {
  return aligned16(x, {x.stride[0]}) && aligned16(w.packed, {});
}
template <class T, bool kTranspose>
void multiply_forward(const char* op, const Forward<T, kTranspose>& p, const Tensor& x, const Weight& w,
                      Stream stream) {
  if (p.rows == 0 || p.columns == 0) return;
  if constexpr (std::is_same_v<T, bf16>)
    multiply_by_weight(op, takes_tensor_copies(x, w), p, stream);
  else
    multiply_on_cuda_cores<true>(op, p, stream);
}
// Computes the norm of y by the kernel of its product; returns false if these shapes have none.
bool multiply_and_norm(const char* op, const Forward<bf16, false>& p, const LinearFwd& a, Stream stream) {
  static_assert(kNormedRows <= kFewRows);
  if (p.rows == 0 || p.rows > kNormedRows || !takes_tensor_copies(a.x, a.w) || !norm_suits(a.norm, a.y) ||
      p.depth == 0 || (p.part < p.depth && !p.apart()))
    return false;
  const Normed normed{p, NormOfRows<bf16>(a.norm),
                      reinterpret_cast<unsigned*>(a.parts.arrivals.as<int32_t>()) + kLinearTiles - 1};
  if (takes_wgmma(true))
    multiply_by_wgmma<false, kNormedTiles>(op, normed, stream);
  else
    launch_mma<kFewRows, true>(op, normed, stream);
  return true;
}
// Returns true if wgmma computes the product, of one part.
bool is_one_part_by_wgmma(const Forward<bf16, false>& p, const LinearFwd& a) {
  return takes_wgmma(true) && takes_tensor_copies(a.x, a.w) && p.depth > 0 && p.part >= p.depth;
}
// Computes SwiGLU by the kernel of its product; returns false if these shapes have none.
bool multiply_and_gate(const char* op, const Forward<bf16, false>& p, const LinearFwd& a, Stream stream) {
  if (!is_one_part_by_wgmma(p, a)) return false;
  Gated gated{p, p.columns / 2};
  gated.y = a.swiglu.as<bf16>();
  gated.y_stride = gated.half;
  if (p.columns % (2 * kPanel) != 0 || !gated.stores_by_boxes()) return false;
  if (p.rows > 0) multiply_by_wgmma<false, kGatedTiles>(op, gated, stream);
  return true;
}
// Computes dx by parts in turn; returns false if these shapes have none, or are sooner computed otherwise.
bool multiply_in_turn(const char* op, const Forward<bf16, true>& p, const LinearBwdInput& a, Stream stream) {
  if (a.accumulate || !takes_wgmma(true) || !takes_tensor_copies(a.dy, a.w) || !p.stores_by_boxes() ||
      !linear_takes_turns(p.rows, p.columns, p.depth, machine().multiprocessors))
    return false;
  InTurn turns{p, ceil_div(p.depth, p.part), {}};
  turns.sums = a.parts.sums.as<float>();
  turns.tickets = reinterpret_cast<int*>(turns.sums + linear_turn_sums(p.rows, p.columns, p.depth) - kTurnBlocks);
  turns.arrivals = reinterpret_cast<unsigned*>(a.parts.arrivals.as<int32_t>());
  expect(machine().multiprocessors <= kTurnBlocks, op, ": ", machine().multiprocessors, " blocks at once");
  multiply_by_wgmma<false, kTurnTiles>(op, turns, stream);
  return true;
}
// Computes logits and the sums of their tiles by one kernel; returns false if these shapes have none.
bool multiply_and_sum(const char* op, const Forward<bf16, false>& p, const LinearFwd& a, Stream stream) {
  const VocabSums& sums = a.vocab_sums;
  const bool stores = !sums.only;
  if (!is_one_part_by_wgmma(p, a) || (stores && !p.stores_by_boxes())) return false;
  const Head head{p, sums.tiles.as<float>(), sums.target ? sums.target.as<int32_t>() : nullptr, sums.temperature,
                  stores};
  if (p.rows > 0) multiply_by_wgmma<false, kHeadTiles>(op, head, stream);
  return true;
}

template <bool kUnpack>
void move(const char* op, const Weight& w, const Tensor& rows, int64_t first, Stream stream) {
  const int64_t n = rows.shape[0], inputs = w.inputs(), end = first + n;
  const int64_t zeros = !kUnpack && end == w.outputs() ? weight_panels(end) * kPanel - end : 0;
  if ((n + zeros) * inputs == 0) return;
  with_act(op, rows, [&](auto type) {
    using T = decltype(type);
    launch(op, move_rows<T, kUnpack>, {.grid = blocks(op, (n + zeros) * inputs, kThreads), .block = kThreads}, stream,
           w.packed.as<T>(), rows.as<T>(), first, inputs, n * inputs, zeros);
  });
}

}  // namespace

void pack_weight(const PackWeight& a, Stream stream) { move<false>("pack_weight", a.w, a.rows, a.first, stream); }
void unpack_weight(const UnpackWeight& a, Stream stream) { move<true>("unpack_weight", a.w, a.rows, a.first, stream); }

void linear_fwd(const LinearFwd& a, Stream stream) {
  const char* op = "linear_fwd";
  with_act(op, a.x, [&](auto type) {
    using T = decltype(type);
    const auto p = forward_product<T, false>(a.y, a.x, a.w, a.bias, a.residual, a.parts);
    if constexpr (std::is_same_v<T, bf16>) {
      if (a.norm.y && multiply_and_norm(op, p, a, stream)) return;
      if (a.vocab_sums.tiles && multiply_and_sum(op, p, a, stream)) return;
      if (a.swiglu && multiply_and_gate(op, p, a, stream)) return;
    }
    multiply_forward(op, p, a.x, a.w, stream);
    sum_vocabulary(a, stream);
    if (a.swiglu) swiglu_fwd({a.swiglu, a.y}, stream);
    norm_rows(a.norm, a.y, stream);
  });
}

bool multiply_and_write(const KvWrite& a, Stream stream) {
  const char* op = "kv_write";
  const LinearFwd& l = a.product;
  const RopeFwd& rope = a.rotation.rope;
  if (a.k.dtype != DType::bf16 || l.y.shape[0] == 0 || l.residual || !a.joins() || !aligned16(rope.table, {}) ||
      !aligned16(a.v_pages, {}))
    return false;
  const auto p = forward_product<bf16, false>(l.y, l.x, l.w, l.bias, l.residual, {});
  if (!is_one_part_by_wgmma(p, l) || !p.pairs) return false;
  const auto pages = pages_of<bf16>(op, a.k_pages, a.v_pages, a.page_table, a.queries);
  Positions positions{};
  if (a.pos_pages) positions = {a.pos_pages.as<int32_t>(), a.pos.as<int32_t>()};
  const auto turned = static_cast<int>(rope.x.shape[1]);
  const Angles angles{rope.table.as<float>(), rope.pos.as<int32_t>()};
  const Rotated rotated{p, pages.head_dim / 2, {pages, positions, angles, turned, turned - pages.kv_heads}};
  multiply_by_wgmma<false, kRotatedTiles>(op, rotated, stream);
  return true;
}

void linear_bwd_input(const LinearBwdInput& a, Stream stream) {
  with_act("linear_bwd_input", a.dy, [&](auto type) {
    const auto p = forward_product<decltype(type), true>(a.dx, a.dy, a.w, {}, a.accumulate ? a.dx : Tensor{}, {});
    if constexpr (std::is_same_v<decltype(type), bf16>)
      if (a.parts.sums && multiply_in_turn("linear_bwd_input", p, a, stream)) return;
    multiply_forward("linear_bwd_input", p, a.dy, a.w, stream);
  });
}

void linear_bwd_weight(const LinearBwdWeight& a, Stream stream) {
  const char* op = "linear_bwd_weight";
  const int64_t rows = a.dy.shape[0], outputs = a.dy.shape[1], inputs = a.x.shape[1];
  if (rows == 0) return;
  with_act(op, a.dy, [&](auto type) {
    using T = decltype(type);
    if (outputs == 0 || inputs == 0) return;
    WeightGradient<T> p{};
    p.dw = a.dw.as<float>();
    p.dy_stride = a.dy.stride[0];
    p.x_stride = a.x.stride[0];
    p.rows = static_cast<int>(outputs);
    p.columns = static_cast<int>(inputs);
    p.pairs = reinterpret_cast<uintptr_t>(p.dw) % 8 == 0 && inputs % 2 == 0;
    const int64_t most = p.kContinues ? rows : p.part;
    for (int64_t first = 0; first < rows; first += most) {
      const int64_t n = std::min(most, rows - first);
      const Tensor dy = a.dy.rows(first, n), x = a.x.rows(first, n);
      p.dy = dy.as<T>();
      p.x = x.as<T>();
      p.depth = static_cast<int>(n);
      if constexpr (std::is_same_v<T, bf16>) {
        multiply_rows(op, aligned16(dy, {p.dy_stride}) && aligned16(x, {p.x_stride}), p, stream);
      } else {
        multiply_on_cuda_cores<false>(op, p, stream);
      }
    }
  });
  add_bias_gradient(op, a.dbias, a.dy, stream);
}

void add_bias_gradient(const char* op, const Tensor& dbias, const Tensor& dy, Stream stream) {
  const int64_t rows = dy.shape[0], outputs = dy.shape[1];
  if (!dbias || outputs == 0) return;
  with_act(op, dy, [&](auto type) {
    using T = decltype(type);
    constexpr int kStrands = std::is_same_v<T, bf16> ? 16 : 1;
    launch(op, sum_rows<T, kStrands>, {.grid = blocks(op, outputs, kColumns), .block = dim3(kColumns, kStrands)},
           stream, dbias.as<float>(), dy.as<T>(), dy.stride[0], rows, outputs);
  });
}

}  // namespace pare::PARE_CUDA
