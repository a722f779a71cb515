// Data movement and the embedding.
#include "ops/data.h"

#include <cstring>

#include "cpu/glue.h"

namespace pare::cpu {

void upload(const Upload& a, Stream) {
  if (a.dst.bytes()) std::memcpy(a.dst.data, a.src, a.dst.bytes());
}

void download(const Download& a, Stream) {
  if (a.src.bytes()) std::memcpy(a.dst, a.src.data, a.src.bytes());
}

void zero(const Zero& a, Stream) {
  char* const x = static_cast<char*>(a.x.data);
  parallel(static_cast<int64_t>(a.x.bytes()), 0.05,
           [&](Interval r) { std::memset(x + r.begin, 0, static_cast<size_t>(r.end - r.begin)); });
}

void accumulate(const Accumulate& a, Stream) {
  const int64_t n = a.y.size();
  float* const y = a.y.as<float>();
  const float* const x = a.x.as<float>();
  const Kernels& k = cpu_kernels();
  parallel(n, 0.3, [&](Interval r) { k.add(y + r.begin, x + r.begin, r.end - r.begin); });
}

void all_to_all(const AllToAll& a, Stream) { on_host(a); }
void all_gather(const AllGather& a, Stream) { on_host(a); }

void copy_rows(const CopyRows& a, Stream) {
  const int64_t rows = a.y.shape[0], width = a.y.shape[1], n = a.index.shape[0];
  const size_t bytes = static_cast<size_t>(width) * 4;                   // words, whatever they are
  const int64_t y_step = a.y.stride[0] * 4, x_step = a.x.stride[0] * 4;  // bytes
  char* const y = static_cast<char*>(a.y.data);
  const char* const x = static_cast<const char*>(a.x.data);
  const int32_t* const pairs = a.index.as<int32_t>();
  for (int64_t i = 0; i < n; i++)
    if (pairs[2 * i] < 0 || pairs[2 * i] >= a.x.shape[0] || pairs[2 * i + 1] < 0 || pairs[2 * i + 1] >= rows)
        [[unlikely]]
      throw std::logic_error(cat("cpu: copy_rows: pair ", i, " is (", pairs[2 * i], ", ", pairs[2 * i + 1], "), x ",
                                 a.x.str(), ", y ", a.y.str()));
  parallel(n, 5 + 0.2 * static_cast<double>(width), [&](Interval r) {
    for (int64_t i = r.begin; i < r.end; i++)
      std::memcpy(y + pairs[2 * i + 1] * y_step, x + pairs[2 * i] * x_step, bytes);
  });
}

void hash_runs(const HashRuns& a, Stream) {
  const int64_t n = a.x.size();
  const float* const x = a.x.as<float>();
  int32_t* const hash = a.hash.as<int32_t>();
  const Kernels& k = cpu_kernels();
  parallel(a.runs(), static_cast<double>(a.run), [&](Interval runs) {
    for (int64_t r = runs.begin; r < runs.end; r++) {
      const int64_t begin = r * a.run, end = std::min(begin + a.run, n);
      const uint64_t first = a.first + static_cast<uint64_t>(a.each ? 0 : begin);
      const uint64_t sum = k.hash_run(x + begin, end - begin, first);
      hash[2 * r] = static_cast<int32_t>(sum);
      hash[2 * r + 1] = static_cast<int32_t>(sum >> 32);
    }
  });
}

// Threads divide columns: the rows that are added to may repeat.
static void add_rows(float* y, const float* x, const int32_t* ids, int64_t rows, int64_t width) {
  const Kernels& k = cpu_kernels();
  parallel_shares(width, 16, static_cast<double>(rows) * (4 + 0.2 * static_cast<double>(width)),
                  [&](Interval c) { k.add_rows(y, width, x, width, ids, rows, c); });
}

void scatter_add_rows(const ScatterAddRows& a, Stream) {
  const int64_t rows = a.index.shape[0], width = a.y.shape[1];
  float* const y = a.y.as<float>();
  const float* const x = a.x.as<float>();
  add_rows(y, x, index("scatter_add_rows", "index", a.index, a.y.shape[0]), rows, width);
}

void embedding_fwd(const EmbeddingFwd& a, Stream stream) {
  const int64_t rows = a.ids.shape[0], width = a.table.inputs();
  float* const y = a.y.as<float>();
  const float* const packed = a.table.packed.as<float>();
  const int32_t* const ids = index("embedding_fwd", "ids", a.ids, a.table.outputs());
  parallel(rows, 5 + 2.0 * static_cast<double>(width), [&](Interval r) {
    for (int64_t i = r.begin; i < r.end; i++) {
      const float* const from = packed + weight_place(ids[i], 0, width);
      for (int64_t c = 0; c < width; c++) y[i * width + c] = from[c * kPanel];
    }
  });
  norm_rows(a.norm, a.y, stream);
}

void embedding_bwd(const EmbeddingBwd& a, Stream) {
  const int64_t rows = a.ids.shape[0], width = a.dtable.shape[1];
  float* const dtable = a.dtable.as<float>();
  const float* const dy = a.dy.as<float>();
  add_rows(dtable, dy, index("embedding_bwd", "ids", a.ids, a.dtable.shape[0]), rows, width);
}

}  // namespace pare::cpu
