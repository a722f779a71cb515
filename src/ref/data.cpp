// Data movement and the embedding.
#include "ops/data.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>

#include "ref/ref.h"

namespace pare::ref {

void upload(const Upload& a, Stream) {
  if (a.dst.bytes()) std::memcpy(a.dst.data, a.src, a.dst.bytes());
}

void download(const Download& a, Stream) {
  if (a.src.bytes()) std::memcpy(a.dst, a.src.data, a.src.bytes());
}

void zero(const Zero& a, Stream) {
  if (a.x.bytes()) std::memset(a.x.data, 0, a.x.bytes());
}

void accumulate(const Accumulate& a, Stream) {
  dispatch("accumulate", a.y, [&]<class T>(T) {
    const View<T> y(a.y), x(a.x);
    for (int64_t i = 0; i < a.y.shape[0]; i++) y(i) += x(i);
  });
}

void all_to_all(const AllToAll& a, Stream) { on_host(a); }
void all_gather(const AllGather& a, Stream) { on_host(a); }

void copy_rows(const CopyRows& a, Stream) {
  constexpr const char* op = "copy_rows";
  const int64_t rows = a.y.shape[0], width = a.y.shape[1], n = a.index.shape[0];
  const View<int32_t> index(a.index);
  std::set<int32_t> written;
  for (int64_t i = 0; i < n; i++) {
    expect(index(i, 0) >= 0 && index(i, 0) < a.x.shape[0] && index(i, 1) >= 0 && index(i, 1) < rows, "ref: ", op,
           ": pair ", i, " is (", index(i, 0), ", ", index(i, 1), "), x is ", a.x.str(), ", y ", a.y.str());
    expect(written.insert(index(i, 1)).second, "ref: ", op, ": row ", index(i, 1), " is written twice");
  }
  if (a.x.data == a.y.data)
    for (int64_t i = 0; i < n; i++)
      expect(!written.count(index(i, 0)), "ref: ", op, ": row ", index(i, 0), " is read and written");
  const auto copy = [&]<class T>(T) {
    for (int64_t i = 0; i < n; i++) {
      const T* from = a.x.as<T>() + index(i, 0) * a.x.stride[0];
      std::copy(from, from + width, a.y.as<T>() + index(i, 1) * a.y.stride[0]);
    }
  };
  a.y.dtype == DType::i32 ? copy(int32_t{}) : dispatch(op, a.y, copy);
}

void hash_runs(const HashRuns& a, Stream) {
  dispatch("hash_runs", a.x, [&]<class T>(T) {
    const View<T> x(a.x);
    const View<int32_t> hash(a.hash);
    for (int64_t r = 0; r < a.runs(); r++) {
      uint64_t sum = 0;
      for (int64_t i = r * a.run; i < std::min((r + 1) * a.run, a.x.shape[0]); i++)
        sum += HashRuns::element(a.first + static_cast<uint64_t>(a.each ? i - r * a.run : i),
                                 std::bit_cast<uint32_t>(static_cast<float>(x(i))));
      hash(r, 0) = static_cast<int32_t>(sum);
      hash(r, 1) = static_cast<int32_t>(sum >> 32);
    }
  });
}

// y[index[r]] += x[r], r ascending
static void add_rows(const char* op, const char* index_name, const Tensor& y, const Tensor& x, const Tensor& index) {
  const int64_t rows = index.shape[0], width = y.shape[1];
  expect_index(op, index_name, index, y.shape[0]);
  dispatch(op, x, [&]<class T>(T) {
    const View<T> to(y), from(x);
    const View<int32_t> at(index);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < width; c++) to(at(r), c) += from(r, c);
  });
}

void scatter_add_rows(const ScatterAddRows& a, Stream) { add_rows("scatter_add_rows", "index", a.y, a.x, a.index); }

void embedding_fwd(const EmbeddingFwd& a, Stream stream) {
  const int64_t rows = a.ids.shape[0], width = a.table.inputs();
  expect_index("embedding_fwd", "ids", a.ids, a.table.outputs());
  dispatch("embedding_fwd", a.y, [&]<class T>(T) {
    const View<T> y(a.y);
    const View<int32_t> ids(a.ids);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < width; c++) y(r, c) = element<T>(a.table, ids(r), c);
  });
  norm_rows(a.norm, a.y, stream);
}
void embedding_bwd(const EmbeddingBwd& a, Stream) { add_rows("embedding_bwd", "ids", a.dtable, a.dy, a.ids); }

}  // namespace pare::ref
