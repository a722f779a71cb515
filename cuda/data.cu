// Data movement and the embedding: copies of rows by pairs, additions y[index[r]] += x[r], rows of a weight, hashes.
//
// x, y [rows, C]; index i32.  The copies overwrite the rows that they name.
// Order: the additions to an element of y go r ascending, each rounded to y's type, without atomics: an element belongs
// to one thread, which walks the list.
// Bytes: 2 C elements a row, and the list once for each of the kParts blocks of a column of the additions.  Copies are
// limited by memory bandwidth, additions by the walk; they are a small part of a step.
#include "linear.cuh"
#include "norm.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kThreads = 128;
constexpr int kParts = 32;  // of the rows of y, by index % kParts

// blockIdx.x is the pair (src, dst).
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads)
    copy(T* y, int64_t y_stride, const T* x, int64_t x_stride, const int32_t* __restrict__ pairs, int width) {
  const int i = (blockIdx.y * kThreads + threadIdx.x) * kPack<T>;
  if (i >= width) return;
  const int64_t n = blockIdx.x, src = pairs[2 * n], dst = pairs[2 * n + 1];
  store_pack<kVector>(y + dst * y_stride + i, load_pack<kVector>(x + src * x_stride + i, width - i), width - i);
}

// Adds x[r] to y[index[r]], r ascending.  blockIdx.y is the part of y: rows dst with dst % kParts == blockIdx.y.
template <class Y, class T>
__global__ void __launch_bounds__(kThreads)
    add(Y* __restrict__ y, const T* __restrict__ x, const int32_t* __restrict__ index, int rows, int width) {
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= width) return;
  for (int r = 0; r < rows; r++) {
    const int64_t dst = index[r];
    if (dst % kParts != blockIdx.y) continue;
    y[dst * width + c] = from_float<Y>(to_float(y[dst * width + c]) + to_float(x[int64_t{r} * width + c]));
  }
}

// Copies row ids[n] of the table, which lies in panels or row by row, to y[n], and norms it if there is a norm.
// blockIdx.x is n.
template <class T, bool kPanels>
__global__ void __launch_bounds__(kThreads)
    take(T* y, const T* __restrict__ table, const int32_t* ids, int width, NormOfRows<T> norm) {
  await_kernel_before();
  const int64_t id = ids[blockIdx.x];
  T* const row = y + int64_t{blockIdx.x} * width;
  for (int c = threadIdx.x; c < width; c += kThreads)
    row[c] = table[kPanels ? place_of_weight<T>(id, c, width) : id * width + c];
  if (!norm.y) return;
  __syncthreads();
  if (threadIdx.x < 32) norm(blockIdx.x, row, width);
}

__global__ void __launch_bounds__(kThreads) add_all(float* __restrict__ y, const float* __restrict__ x, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) y[i] += x[i];
}

// Hashes run r in block r, whose threads take every kThreads-th number; sums of integers have no order.
template <class T>
__global__ void __launch_bounds__(kThreads)
    hash(uint2* __restrict__ hashes, const T* __restrict__ x, int64_t n, int64_t run, uint64_t first, bool each) {
  const int64_t begin = blockIdx.x * run, end = min(begin + run, n);
  if (!each) first += begin;
  uint64_t sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads)
    sum += HashRuns::element(first + (i - begin), __float_as_uint(to_float(x[i])));
  __shared__ uint2 sums[kThreads];
  sums[threadIdx.x] = make_uint2(static_cast<unsigned>(sum), static_cast<unsigned>(sum >> 32));
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int t = 1; t < kThreads; t++) sum += uint64_t{sums[t].y} << 32 | sums[t].x;
  hashes[blockIdx.x] = make_uint2(static_cast<unsigned>(sum), static_cast<unsigned>(sum >> 32));
}

template <class Y, class T>
void add_rows(const char* op, const Tensor& y, const Tensor& x, const Tensor& index, Stream stream) {
  const int64_t rows = x.shape[0], width = y.shape[1];
  if (rows == 0 || width == 0) return;
  launch(op, add<Y, T>, {.grid = dim3(blocks(op, width, kThreads), kParts), .block = kThreads}, stream, y.as<Y>(),
         x.as<T>(), index.as<int32_t>(), rows, width);
}

}  // namespace

// Copies are queued on the stream.
void upload(const Upload& a, Stream stream) {
  end_gathering(stream);
  check_cuda(cudaMemcpyAsync(a.dst.data, a.src, a.dst.bytes(), cudaMemcpyHostToDevice,
                             static_cast<cudaStream_t>(stream.handle)),
             "upload");
}

// The one op that waits: the host is about to read.
void download(const Download& a, Stream stream) {
  end_gathering(stream);
  const auto s = static_cast<cudaStream_t>(stream.handle);
  check_cuda(cudaMemcpyAsync(a.dst, a.src.data, a.src.bytes(), cudaMemcpyDeviceToHost, s), "download");
  check_cuda(cudaStreamSynchronize(s), "download");
}

void zero(const Zero& a, Stream stream) {
  end_gathering(stream);
  check_cuda(cudaMemsetAsync(a.x.data, 0, a.x.bytes(), static_cast<cudaStream_t>(stream.handle)), "zero");
}

void hash_runs(const HashRuns& a, Stream stream) {
  const char* op = "hash_runs";
  if (a.runs() == 0) return;
  with_act(op, a.x, [&](auto type) {
    using T = decltype(type);
    launch(op, hash<T>, {.grid = blocks(op, a.runs(), 1), .block = kThreads}, stream,
           reinterpret_cast<uint2*>(a.hash.as<int32_t>()), a.x.as<T>(), a.x.size(), a.run, a.first, a.each);
  });
}

void accumulate(const Accumulate& a, Stream stream) {
  const char* op = "accumulate";
  const int64_t n = a.y.size();
  if (n == 0) return;
  launch(op, add_all, {.grid = blocks(op, n, kThreads), .block = kThreads}, stream, a.y.as<float>(), a.x.as<float>(),
         n);
}

void scatter_add_rows(const ScatterAddRows& a, Stream stream) {
  with_act("scatter_add_rows", a.x, [&](auto type) {
    using T = decltype(type);
    add_rows<T, T>("scatter_add_rows", a.y, a.x, a.index, stream);
  });
}
void take_embeddings(const EmbeddingFwd& a, bool panels, Stream stream) {
  const char* op = "embedding_fwd";
  const int64_t rows = a.ids.shape[0], width = a.table.inputs();
  if (rows == 0 || width == 0) return;
  with_act(op, a.y, [&](auto type) {
    using T = decltype(type);
    const bool joins = a.norm.y && norm_suits(a.norm, a.y);
    launch(op, panels ? take<T, true> : take<T, false>, {.grid = blocks(op, rows, 1), .block = kThreads, .early = true},
           stream, a.y.as<T>(), a.table.packed.as<T>(), a.ids.as<int32_t>(), width,
           joins ? NormOfRows<T>(a.norm) : NormOfRows<T>{});
    if (!joins) norm_rows(a.norm, a.y, stream);
  });
}
void embedding_fwd(const EmbeddingFwd& a, Stream stream) { take_embeddings(a, true, stream); }
void embedding_bwd(const EmbeddingBwd& a, Stream stream) {
  with_act("embedding_bwd", a.dy,
           [&](auto type) { add_rows<float, decltype(type)>("embedding_bwd", a.dtable, a.dy, a.ids, stream); });
}

void copy_rows(const CopyRows& a, Stream stream) {
  const char* op = "copy_rows";
  Tensor y = a.y, x = a.x;
  if (y.dtype == DType::i32 && x.dtype == DType::i32) y.dtype = x.dtype = DType::f32;  // words are words
  const int64_t width = y.shape[1];
  if (a.index.shape[0] == 0 || width == 0) return;
  with_act(op, y, [&](auto type) {
    using T = decltype(type);
    const bool vector = aligned16(y, {y.stride[0], width}) && aligned16(x, {x.stride[0]});
    launch(op, vector ? copy<T, true> : copy<T, false>,
           {.grid = dim3(blocks(op, a.index.shape[0], 1), blocks(op, width, kThreads * kPack<T>)), .block = kThreads},
           stream, y.as<T>(), y.stride[0], x.as<T>(), x.stride[0], a.index.as<int32_t>(), width);
  });
}

}  // namespace pare::PARE_CUDA
