// Speed of the `cpu` table, as ratios to what this machine can do, all measured in one run: `make bench` prints a table
// and writes build/bench.json.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/arena.h"
#include "base/rng.h"
#include "base/thread_pool.h"
#include "cpu/cpu.h"
#include "ops/ops.h"
#include "tools/bench/rollout.h"
#include "tools/bench/tokenizer.h"
#include "tools/bench/training.h"

namespace pare {
namespace {

using nlohmann::json;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Seconds of one call: the best of many, since the machine is shared.
template <class F>
double best_of(F f, double budget = 0.08) {
  f();
  double best = 1e9;
  int calls = 1;
  for (const double start = now(); now() - start < budget;) {
    const double t = now();
    for (int i = 0; i < calls; i++) f();
    const double each = (now() - t) / calls;
    best = std::min(best, each);
    calls = std::clamp(static_cast<int>(1e-3 / each), 1, 1000);
  }
  return best;
}

// ---- what the machine can do

std::atomic<float> sink;

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void fma_avx512(int64_t n) {
  __m512 a[24], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f);
  for (int i = 0; i < 24; i++) a[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t k = 0; k < n; k++)
#pragma GCC unroll 24
    for (int i = 0; i < 24; i++) a[i] = _mm512_fmadd_ps(a[i], x, y);
  __m512 sum = a[0];
  for (int i = 1; i < 24; i++) sum = _mm512_add_ps(sum, a[i]);
  float lanes[16];
  _mm512_storeu_ps(lanes, sum);
  sink = lanes[0];
}
__attribute__((target("avx2,fma"))) void fma_avx2(int64_t n) {
  __m256 a[12], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-3f);
  for (int i = 0; i < 12; i++) a[i] = _mm256_set1_ps(static_cast<float>(i));
  for (int64_t k = 0; k < n; k++)
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) a[i] = _mm256_fmadd_ps(a[i], x, y);
  __m256 sum = a[0];
  for (int i = 1; i < 12; i++) sum = _mm256_add_ps(sum, a[i]);
  float lanes[8];
  _mm256_storeu_ps(lanes, sum);
  sink = lanes[0];
}
#endif

// One core, multiply and add counted as two.
double peak_flops() {
  constexpr int64_t n = 20000;
#if defined(__x86_64__)
  if (!std::strcmp(cpu_isa(), "avx512")) return 24 * 16 * 2 * n / best_of([] { fma_avx512(n); }, 0.3);
  return 12 * 8 * 2 * n / best_of([] { fma_avx2(n); }, 0.3);
#else
  float a[16][4];
  for (auto& v : a)
    for (float& x : v) x = 1;
  const double t = best_of([&] {
    for (int64_t k = 0; k < n; k++)
      for (auto& v : a)
        for (float& x : v) x = __builtin_fmaf(x, 0.999f, 1e-3f);
    sink = a[0][0];
  });
  return 16 * 4 * 2 * n / t;
#endif
}

float sum_of(const float* x, int64_t blocks_of_64) {
#if defined(__x86_64__)
  __m256 acc[8] = {};
  for (int64_t i = 0; i < blocks_of_64; i++)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) acc[j] = _mm256_add_ps(acc[j], _mm256_loadu_ps(x + i * 64 + j * 8));
  for (int j = 1; j < 8; j++) acc[0] = _mm256_add_ps(acc[0], acc[j]);
  return _mm256_cvtss_f32(acc[0]);
#else
  float lanes[64] = {}, sum = 0;
  for (int64_t i = 0; i < blocks_of_64; i++)
    for (int j = 0; j < 64; j++) lanes[j] += x[i * 64 + j];
  for (float l : lanes) sum += l;
  return sum;
#endif
}

// Bytes per second of reading `floats` of `x` again and again, on all threads.
double read_bandwidth(const float* x, int64_t floats) {
  const int64_t blocks = floats / 64, grain = std::max<int64_t>(blocks / threads(), 1024);
  const double t = best_of([&] {
    parallel_for(blocks, grain, [&](int64_t begin, int64_t end) { sink = sum_of(x + begin * 64, end - begin); });
  });
  return static_cast<double>(floats) * 4 / t;
}

// ---- operands

class Bench {
 public:
  explicit Bench(json& report) : report_(report) {}

  void gemm();
  void rows();
  void attention();
  void logits();

 private:
  Tensor random(std::initializer_list<int64_t> shape, float scale = 1) {
    const Tensor t = arena_.alloc("t", DType::f32, shape);
    Rng rng(rng_key(7, RngStream::test, 0), arena_.used());
    for (int64_t i = 0; i < t.size(); i++) t.as<float>()[i] = scale * static_cast<float>(2 * rng.uniform() - 1);
    return t;
  }
  Tensor indices(std::initializer_list<int64_t> shape, const std::function<int32_t(int64_t)>& f) {
    const Tensor t = arena_.alloc("t", DType::i32, shape);
    for (int64_t i = 0; i < t.size(); i++) t.as<int32_t>()[i] = f(i);
    return t;
  }
  Weight weight(int64_t outputs, int64_t inputs) {
    return {random({weight_panels(outputs), inputs, 16}, 0.05f), outputs};
  }
  void gemm_shape(int64_t inputs, int64_t outputs);
  // One line: seconds per call, and the rate of `amount` (flops, bytes, tokens) against `bound`, the best possible
  // rate.
  void line(const std::string& section, const std::string& name, double seconds, double amount, const std::string& unit,
            double bound);

  json& report_;
  Arena arena_{"bench", host_memory, size_t{1} << 32};
  double peak_ = peak_flops();
};

void Bench::line(const std::string& section, const std::string& name, double seconds, double amount,
                 const std::string& unit, double bound) {
  json row{{"name", name},
           {"threads", threads()},
           {"microseconds", seconds * 1e6},
           {unit + "_per_second", amount / seconds}};
  std::printf("%-10s %-34s %d thr %10.1f us %9.2f G%s/s", section.c_str(), name.c_str(), threads(), seconds * 1e6,
              amount / seconds * 1e-9, unit.c_str());
  if (bound > 0) {
    row["ratio"] = amount / seconds / bound;
    std::printf("   %.2f of %.1f", amount / seconds / bound, bound * 1e-9);
  }
  std::printf("\n");
  std::fflush(stdout);
  report_[section].push_back(row);
}

// ---- products

// Forward at M rows against the FMA peak, M = 1 against the read bandwidth of the weights; both backward products.
void Bench::gemm_shape(int64_t inputs, int64_t outputs) {
  const ArenaScope scope(arena_);
  const Weight w = weight(outputs, inputs);
  const int64_t most = 1200;
  const Tensor x = random({most, inputs}), y = random({most, outputs}), dy = random({most, outputs});
  const Tensor dw = random({outputs, inputs});
  const double bandwidth = read_bandwidth(w.packed.as<float>(), w.packed.size());
  for (int64_t m : {1, 4, 16, 64, 256, 1200}) {
    const double flops = 2.0 * static_cast<double>(m * inputs * outputs);
    const Tensor xm = x.rows(0, m), ym = y.rows(0, m), dym = dy.rows(0, m);
    const std::string shape = cat("M ", m, " K ", inputs, " N ", outputs);
    const double t = best_of([&] { table_cpu.linear_fwd({ym, xm, w, {}, {}}, {}); });
    if (m == 1)
      line("gemv", shape, t, static_cast<double>(inputs * outputs) * 4, "byte", bandwidth);
    else
      line("gemm", shape, t, flops, "flop", peak_ * threads());
    if (m < 256) continue;
    const double td = best_of([&] { table_cpu.linear_bwd_input({xm, dym, w, false}, {}); });
    line("gemm", "dx " + shape, td, flops, "flop", peak_ * threads());
    const double tw = best_of([&] { table_cpu.linear_bwd_weight({dw, {}, dym, xm}, {}); });
    line("gemm", "dw " + shape, tw, flops, "flop", peak_ * threads());
  }
  // Rows alone have the bits of rows together.
  table_cpu.linear_fwd({y, x, w, {}, {}}, {});
  const Tensor one = random({1, outputs});
  for (int64_t r = 0; r < most; r += 37) {
    table_cpu.linear_fwd({one, x.rows(r, 1), w, {}, {}}, {});
    if (std::memcmp(one.data, y.rows(r, 1).data, one.bytes()))
      throw Error(Exit::failed, cat("row ", r, " of a product depends on the other rows"));
  }
}

void Bench::gemm() {
  gemm_shape(1024, 1024);
  for (const auto& [inputs, outputs] :
       {std::pair<int64_t, int64_t>{64, 256}, {128, 64}, {64, 384}, {192, 64}, {64, 48}})
    gemm_shape(inputs, outputs);
}

// ---- element by element and row by row

void Bench::rows() {
  const ArenaScope scope(arena_);
  const int64_t n = 1200, c = 64, f = 192, params = 126400;
  const Tensor x = random({n, c}), y = random({n, c}), w = random({c}), rstd = random({n}), dw = random({c});
  const double bandwidth = read_bandwidth(x.as<float>(), x.size());
  const auto bytes = [](std::initializer_list<Tensor> list) {
    double sum = 0;
    for (const Tensor& t : list) sum += static_cast<double>(t.bytes());
    return sum;
  };
  line("rows", "rmsnorm_fwd 1200 x 64", best_of([&] {
         table_cpu.rmsnorm_fwd({y, rstd, x, w, 1e-6f}, {});
       }),
       bytes({x, y}), "byte", bandwidth);
  const Tensor dx = random({n, c});
  line("rows", "rmsnorm_bwd 1200 x 64", best_of([&] {
         table_cpu.rmsnorm_bwd({dx, dw, y, x, w, rstd, false}, {});
       }),
       bytes({x, y, dx}), "byte", bandwidth);
  const Tensor gate_up = random({n, 2 * f}), act = random({n, f}), dgate_up = random({n, 2 * f});
  line("rows", "swiglu_fwd 1200 x 192", best_of([&] {
         table_cpu.swiglu_fwd({act, gate_up}, {});
       }),
       bytes({act, gate_up}), "byte", bandwidth);
  line("rows", "swiglu_bwd 1200 x 192", best_of([&] {
         table_cpu.swiglu_bwd({dgate_up, act, gate_up}, {});
       }),
       bytes({act, gate_up, dgate_up}), "byte", bandwidth);
  const Tensor p = random({params}), m = random({params}), v = random({params}), g = random({params}),
               norm = random({1});
  for (int64_t i = 0; i < params; i++) v.as<float>()[i] = std::abs(v.as<float>()[i]);
  line("rows", "global_norm 126400", best_of([&] {
         table_cpu.global_norm({norm, g}, {});
       }),
       bytes({g}), "byte", bandwidth);
  line("rows", "adamw 126400", best_of([&] {
         table_cpu.adamw({p, m, v, g, norm, 1, 1e-3f, 0.9f, 0.98f, 1e-8f, 0.01f, 7}, {});
       }),
       bytes({p, m, v, g, p, m, v}), "byte", bandwidth);
}

// ---- attention

void Bench::attention() {
  struct Shape {
    int64_t groups, members, prompt, response, heads, kv_heads, dim;
  };
  for (const Shape& s : {Shape{8, 8, 47, 83, 4, 2, 32}, Shape{1, 1, 0, 1024, 12, 2, 128}}) {
    const ArenaScope scope(arena_);
    std::vector<int32_t> list;
    int64_t n = 0, pairs = 0;
    for (int64_t g = 0; g < s.groups; g++) {
      const int64_t parent = n;
      n += s.prompt + s.members * s.response;
      for (int64_t i = 0; i < s.members; i++)
        for (int64_t v : {parent + s.prompt + i * s.response, s.response, parent, s.prompt})
          list.push_back(static_cast<int32_t>(v));
      if (s.prompt)
        for (int64_t v : {parent, s.prompt, int64_t{0}, int64_t{0}}) list.push_back(static_cast<int32_t>(v));
      pairs += s.members * (s.response * s.prompt + s.response * (s.response + 1) / 2) + s.prompt * (s.prompt + 1) / 2;
    }
    const Tensor q = random({n, s.heads, s.dim}), k = random({n, s.kv_heads, s.dim}),
                 v = random({n, s.kv_heads, s.dim});
    const Tensor o = random({n, s.heads, s.dim}), lse = random({n, s.heads}), d_o = random({n, s.heads, s.dim});
    const Tensor dq = random({n, s.heads, s.dim}), dk = random({n, s.kv_heads, s.dim}),
                 dv = random({n, s.kv_heads, s.dim});
    const Tensor segments = indices({static_cast<int64_t>(list.size()) / 4, 4}, [&](int64_t i) { return list[i]; });
    const float scale = 1 / std::sqrt(static_cast<float>(s.dim));
    const std::string name = cat("N ", n, " H ", s.heads, " K ", s.kv_heads, " D ", s.dim);
    const AttnFwd fwd{o, lse, q, k, v, k, v, segments, pairs, scale};
    line("attention", "fwd " + name, best_of([&] { table_cpu.attn_fwd(fwd, {}); }),
         static_cast<double>(fwd.cost().flops), "flop", peak_ * threads());
    const AttnBwd bwd{dq, dk, dv, dk, dv, d_o, o, q, k, v, k, v, lse, segments, pairs, scale};
    line("attention", "bwd " + name, best_of([&] { table_cpu.attn_bwd(bwd, {}); }),
         static_cast<double>(bwd.cost().flops), "flop", peak_ * threads());
  }
  // One step of decoding: 64 sequences of 130 slots.
  const ArenaScope scope(arena_);
  const int64_t n = 64, slots = 130, heads = 4, kv_heads = 2, dim = 32, per = (slots + 15) / 16;
  const Tensor k_pages = random({n * per, kv_heads, dim, 16}), v_pages = random({n * per, kv_heads, 16, dim});
  const Tensor q = random({n, heads, dim}), o = random({n, heads, dim});
  const Tensor pages = indices({n, per}, [](int64_t i) { return static_cast<int32_t>(i); });
  const Tensor queries = indices({n, 4}, [&](int64_t i) {
    const int64_t row[4] = {i / 4, 1, slots, i / 4};
    return static_cast<int32_t>(row[i % 4]);
  });
  const AttnPaged a{o, q, k_pages, v_pages, pages, queries, n * slots, n * slots, 0.2f};
  line("attention", "paged 64 x 130 slots, H 4 K 2 D 32", best_of([&] { table_cpu.attn_paged(a, {}); }),
       static_cast<double>(a.cost().flops), "flop", peak_ * threads());
}

// ---- logits

void Bench::logits() {
  for (const auto& [n, v] : {std::pair<int64_t, int64_t>{1200, 48}, {64, 32000}}) {
    const ArenaScope scope(arena_);
    const Tensor x = random({n, v}, 3), one = random({n}), lp = random({n}), h = random({n}), loss = random({n});
    const Tensor kl = random({n}), clipped = indices({n}, [](int64_t) { return 0; }), logits = random({n, v});
    const int64_t vocabulary = v;
    const Tensor target = indices({n}, [&](int64_t i) { return static_cast<int32_t>(i % vocabulary); });
    const Tensor counter = indices({n, 3}, [](int64_t i) { return static_cast<int32_t>(i); });
    const double bandwidth = read_bandwidth(x.as<float>(), x.size()), bytes = static_cast<double>(x.bytes());
    const std::string name = cat(n, " x ", v);
    const double copy = best_of([&] { std::memcpy(logits.data, x.data, x.bytes()); });
    LogitsLoss a{lp, h, loss, kl, clipped, logits, target, one, one, one, one, {}, {}, {}, {}};
    a.spec.policy = PolicyLoss::ppo;
    line("logits", "logprob " + name, best_of([&] {
           table_cpu.logprob({lp, h, x, target, 1}, {});
         }),
         bytes, "byte", bandwidth);
    line("logits", "logits_loss " + name, best_of([&] {
                                            std::memcpy(logits.data, x.data, x.bytes());
                                            table_cpu.logits_loss(a, {});
                                          }) - copy,
         2 * bytes, "byte", bandwidth);
    line("logits", "sample " + name, best_of([&] {
           table_cpu.sample({clipped, lp, x, counter, 5, 1, 0, 1}, {});
         }),
         bytes, "byte", bandwidth);
    line("logits", "greedy " + name, best_of([&] {
           table_cpu.sample({clipped, lp, x, counter, 5, 0, 0, 1}, {});
         }),
         bytes, "byte", bandwidth);
  }
}

}  // namespace

int run_bench() {
  json report;
  report["isa"] = cpu_isa();
  set_threads(1);
  report["peak_flops_one_core"] = peak_flops();
  std::vector<float> memory(size_t{64} << 20, 1.0f);
  for (int64_t kb : {16, 512, 8192, 262144})
    report["read_bandwidth_one_core"][cat(kb, " KB")] = read_bandwidth(memory.data(), kb * 256);
  std::printf("%s\n", report.dump(2).c_str());
  report["tokenizer"] = bench_tokenizer();
  for (int n : {1, 2}) {
    set_threads(n);
    Bench bench(report);
    bench.gemm();
    bench.rows();
    bench.attention();
    bench.logits();
    report["step"].push_back(bench_training(report["peak_flops_one_core"]));
  }
  set_threads(1);
  report["rollout"] = bench_rollout();
  std::ofstream("build/bench.json") << report.dump(2) << "\n";
  return 0;
}

}  // namespace pare

int main() {
  try {
    return pare::run_bench();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench: %s\n", e.what());
    return 1;
  }
}
