// Rows of the op test: data movement, embedding, optimizer.
#include <numeric>

#include "op_cases.h"

namespace pare::test {

namespace {

void add_movement(std::vector<OpCase>& cases) {
  for (int64_t n : {1, 15, 16, 17, 67}) {
    const std::string shape = cat("n", n);
    cases.push_back({"upload", shape, [n](OpRun& r) {
                       const auto v = below("host", n, 1000);
                       r.call(&Table::upload, Upload{r.index_out("dst", {n}), v.data()});
                     }});
    cases.push_back({"download", shape, [n](OpRun& r) {
                       const auto v = below("device", n, 1000);
                       std::vector<int32_t> host(n, -1);
                       r.call(&Table::download, Download{host.data(), r.index("src", {n}, v)});
                       if (!r.skipped && host != v) r.problems.push_back("host: not the bytes of src");
                     }});
    cases.push_back({"zero", shape, [n](OpRun& r) { r.call(&Table::zero, Zero{r.inout("x", {n})}); }});
    // One rounding of each sum.
    cases.push_back({"accumulate", shape, [n](OpRun& r) {
                       const Tensor y = r.inout("y", {n});
                       r.call(&Table::accumulate, Accumulate{y, r.in("x", {n})});
                       r.bound("y", r.max_abs("y") * kRound);
                     }});
  }
}

void add_rows(std::vector<OpCase>& cases) {
  struct Rows {
    int64_t rows, of, width;
  };
  for (const Rows& s : {Rows{1, 1, 1}, {5, 3, 17}, {13, 7, 64}, {3, 11, 33}}) {
    const int64_t R = s.rows, N = s.of, C = s.width;
    const std::string shape = cat("R", R, "_N", N, "_C", C);
    cases.push_back({"copy_rows", shape, [=](OpRun& r) {
                       const Tensor y = r.out("y", {R, C}), x = r.in("x", {N, C});
                       std::vector<int32_t> pairs;
                       for (int32_t src : below("index", R, N))
                         pairs.insert(pairs.end(), {src, static_cast<int32_t>(pairs.size() / 2)});
                       r.call(&Table::copy_rows, CopyRows{y, x, r.index("index", {R, 2}, pairs)});
                     }});
    cases.push_back({"embedding_fwd", shape, [=](OpRun& r) {
                       const Tensor y = r.out("y", {R, C});
                       const Weight table = r.weight("table", N, C);
                       r.call(&Table::embedding_fwd, EmbeddingFwd{y, table, r.index("ids", {R}, below("ids", R, N))});
                     }});
    // At most R additions to one element; partial sums of R + 1 normals stay below 6 sqrt(R + 1).
    const double bound = chain(double(R)) * 6 * std::sqrt(double(R + 1));
    cases.push_back(
        {"scatter_add_rows", shape, [=](OpRun& r) {
           const Tensor y = r.inout("y", {N, C}), x = r.in("x", {R, C});
           r.call(&Table::scatter_add_rows, ScatterAddRows{y, x, r.index("index", {R}, below("index", R, N))});
           r.bound("y", bound);
         }});
    cases.push_back({"embedding_bwd", shape, [=](OpRun& r) {
                       const Tensor d = r.inout("dtable", {N, C}), dy = r.in("dy", {R, C});
                       r.call(&Table::embedding_bwd, EmbeddingBwd{d, dy, r.index("ids", {R}, below("ids", R, N))});
                       r.bound("dtable", bound);
                     }});
  }
}

void add_optimizer(std::vector<OpCase>& cases) {
  for (int64_t n : {1, 17, 4095, 4096, 4097, 9001, 270001}) {
    cases.push_back({"global_norm", cat("n", n), [n](OpRun& r) {
                       const Tensor norm = r.out("norm", {1}), sums = r.out("sums", {norm_blocks(n)});
                       r.call(&Table::global_norm, GlobalNorm{norm, sums, r.in("x", {n})});
                       for (const char* out : {"norm", "sums"})
                         r.bound(out, r.max_abs(out) * lanes(4096));  // squares: no cancellation
                     }});
  }
  // outputs 0: a vector of n; else a weight [outputs, n].
  struct Step {
    int64_t outputs, n, step;
    float norm, max_norm, decay;
    int64_t first;  // of the elements, where moments are in bf16; -1: they are in act's type
  };
  for (const Step& s : {Step{0, 1, 1, 2, 0, 0, -1},
                        {0, 17, 1, 4, 1, 0.01f, -1},
                        {0, 67, 3, 0.5f, 1, 0.1f, -1},
                        {0, 129, 1000, 0, 1, 0, -1},
                        {1, 1, 1, 2, 0, 0, -1},
                        {35, 67, 3, 4, 1, 0.1f, -1},
                        {16, 130, 2, 4, 1, 0.1f, -1},
                        {0, 67, 3, 4, 1, 0.1f, 0},
                        {0, 200, 3, 4, 1, 0.1f, 0xffffffc3},
                        {35, 67, 1, 4, 1, 0.1f, 5},
                        {16, 128, 9, 0, 0, 0, 64}}) {
    const bool bf16 = s.first >= 0;
    const std::string shape =
        cat(s.outputs ? cat("O", s.outputs, "_I") : "n", s.n, "_step", s.step, bf16 ? cat("_bf16_", s.first) : "");
    cases.push_back({"adamw", shape, [s, bf16](OpRun& r) {
                       const Shape shape = s.outputs ? Shape{s.outputs, s.n} : Shape{s.n};
                       std::vector<double> m = normal("m", elements(shape)), v = normal("v", elements(shape), 0.1);
                       for (double& x : v) x = static_cast<float>(x * x);
                       AdamW a{};
                       a.p = s.outputs ? r.inout_weight("p", s.outputs, s.n).packed : r.inout("p", shape);
                       a.m = bf16 ? r.inout_bf16("m", shape, m) : r.inout("m", shape, m);
                       a.v = bf16 ? r.inout_bf16("v", shape, v) : r.inout("v", shape, v);
                       a.grad = r.in("grad", shape), a.norm = r.in("norm", {1}, std::vector<double>{s.norm});
                       a.max_norm = s.max_norm, a.weight_decay = s.decay, a.step = s.step;
                       a.lr = 1e-2f, a.beta1 = 0.9f, a.beta2 = 0.999f, a.eps = 1e-8f;
                       a.key = 0x123456789abcdef, a.first = s.first;
                       r.call(&Table::adamw, a);
                       // A dozen roundings of sums of two terms of size m, v and lr * update (c1 <= 10, |update| <
                       // 100).  In bf16, where the last of them falls otherwise, the neighbour.
                       const auto bound = [&](const char* name, double all) {
                         std::vector<double> b = r.values(name);
                         for (double& x : b) x = all + (bf16 ? std::fabs(x) * 0x1p-7 : 0);
                         r.bound(name, b);
                       };
                       bound("m", 12 * kRound * 4);
                       bound("v", 12 * kRound);
                       r.bound("p", kRound * 4 + 16 * kRound * a.lr * 1000);
                     }});
  }
}

}  // namespace

void add_data_cases(std::vector<OpCase>& cases) {
  add_movement(cases);
  add_rows(cases);
  add_optimizer(cases);
}

}  // namespace pare::test
