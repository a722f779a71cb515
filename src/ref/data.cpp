// Data movement and the backward of the embedding.
#include <cstring>

#include "ref/ref.h"

namespace pare::ref {

void upload(const Upload& a, Stream) {
  expect(a.dst.contiguous(), "ref: upload: dst ", a.dst.str(), " has gaps between its rows");
  if (a.dst.bytes()) std::memcpy(a.dst.data, a.src, a.dst.bytes());
}

void download(const Download& a, Stream) {
  expect(a.src.contiguous(), "ref: download: src ", a.src.str(), " has gaps between its rows");
  if (a.src.bytes()) std::memcpy(a.dst, a.src.data, a.src.bytes());
}

void zero(const Zero& a, Stream) {
  expect(a.x.contiguous(), "ref: zero: x ", a.x.str(), " has gaps between its rows");
  if (a.x.bytes()) std::memset(a.x.data, 0, a.x.bytes());
}

void accumulate(const Accumulate& a, Stream) {
  const int64_t n = a.y.shape[0];
  expect_dense("accumulate", "y", a.y, {n});
  expect_dense("accumulate", "x", a.x, {n});
  dispatch("accumulate", a.y, [&]<class T>(T) {
    const View<T> y(a.y), x(a.x);
    for (int64_t i = 0; i < n; i++) y(i) += x(i);
  });
}

// y[r] = x[index[r]], x [N, C]
static void copy_rows(const char* op, const char* index_name, const Tensor& y, const Tensor& x, const Tensor& index) {
  const int64_t rows = index.shape[0], width = x.shape[1];
  expect_dense(op, "y", y, {rows, width});
  expect_dense(op, "x", x, {x.shape[0], width});
  expect_index(op, index_name, index, rows, x.shape[0]);
  dispatch(op, y, [&]<class T>(T) {
    const View<T> to(y), from(x);
    const View<int32_t> at(index);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < width; c++) to(r, c) = from(at(r), c);
  });
}

// y[index[r]] += x[r], r ascending
static void add_rows(const char* op, const char* index_name, const Tensor& y, const Tensor& x, const Tensor& index) {
  const int64_t rows = index.shape[0], width = y.shape[1];
  expect_dense(op, "y", y, {y.shape[0], width});
  expect_dense(op, "x", x, {rows, width});
  expect_index(op, index_name, index, rows, y.shape[0]);
  dispatch(op, x, [&]<class T>(T) {
    const View<T> to(y), from(x);
    const View<int32_t> at(index);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < width; c++) to(at(r), c) += from(r, c);
  });
}

void gather_rows(const GatherRows& a, Stream) { copy_rows("gather_rows", "index", a.y, a.x, a.index); }
void scatter_add_rows(const ScatterAddRows& a, Stream) { add_rows("scatter_add_rows", "index", a.y, a.x, a.index); }
void embedding_bwd(const EmbeddingBwd& a, Stream) { add_rows("embedding_bwd", "ids", a.dtable, a.dy, a.ids); }

}  // namespace pare::ref
