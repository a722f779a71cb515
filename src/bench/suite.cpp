#include "bench/suite.h"

#include <cstdio>
#include <fstream>

#include "base/thread_pool.h"
#include "bench/measure.h"
#include "bench/rollout.h"
#include "bench/text.h"
#include "bench/tokenizer.h"
#include "bench/training.h"
#include "cpu/cpu.h"

namespace pare {

namespace {

using nlohmann::json;

// What a line is compared with.
enum class Bound {
  peak,     // fused multiply-adds from registers
  operands  // reading as many bytes as the op moves, from the cache that they fit
};

class Suite {
 public:
  explicit Suite(json& report) : report_(report) {}

  void gemm();
  void rows();
  void attention();
  void logits();

 private:
  // Operands stay in the cache, as they do in a step of a small model; the best of many calls, since the machine is
  // shared.
  void line(const char* section, const char* op, const std::string& shape, Bound bound);

  json& report_;
  const double peak_ = peak_flops_one_core();
};

void Suite::line(const char* section, const char* op, const std::string& shape, Bound bound) {
  const cases::OpCase& c = cases::op_case(op);
  const cases::Dims dims(op, c.dims, shape);
  const Measured m = measure_op(table_cpu, DType::f32, c, dims, {.rotate = false, .seconds = 0.08});
  const bool flops = bound == Bound::peak;
  const double amount = flops ? static_cast<double>(m.cost.flops) : m.bytes();
  const double best = flops ? peak_ * threads() : read_bandwidth(m.cost.read + m.cost.written);
  const double rate = amount / m.time.least;
  std::printf("%-10s %-18s %-40s %d thr %10.1f us %9.2f G%s/s   %.2f of %.1f\n", section, op, shape.c_str(), threads(),
              m.time.least * 1e6, rate * 1e-9, flops ? "flop" : "byte", rate / best, best * 1e-9);
  std::fflush(stdout);
  report_[section].push_back({{"name", cat(op, " ", shape)},
                              {"threads", threads()},
                              {"microseconds", m.time.least * 1e6},
                              {flops ? "flop_per_second" : "byte_per_second", rate},
                              {"ratio", rate / best}});
}

// Forward at M rows against the FMA peak, M = 1 against the read bandwidth; both backward products.
void Suite::gemm() {
  for (const auto& [k, n] : {std::pair{1024, 1024}, {64, 256}, {128, 64}, {64, 384}, {192, 64}, {64, 48}}) {
    const std::string weight = cat(",N=", n, ",K=", k);
    line("gemv", "linear_fwd", cat("M=1", weight), Bound::operands);
    for (int m : {4, 16, 64, 256, 1200}) line("gemm", "linear_fwd", cat("M=", m, weight), Bound::peak);
    for (int m : {256, 1200})
      for (const char* op : {"linear_bwd_input", "linear_bwd_weight"})
        line("gemm", op, cat("M=", m, weight), Bound::peak);
  }
}

void Suite::rows() {
  for (const char* op : {"rmsnorm_fwd", "rmsnorm_bwd"}) line("rows", op, "N=1200,C=64", Bound::operands);
  for (const char* op : {"qk_norm_rope_fwd", "qk_norm_rope_bwd"})
    line("rows", op, "N=1200,H=4,K=2,D=32", Bound::operands);
  for (const char* op : {"swiglu_fwd", "swiglu_bwd"}) line("rows", op, "N=1200,F=192", Bound::operands);
  for (const char* op : {"square_sums", "adamw"}) line("rows", op, "n=126400", Bound::operands);
}

// The quickstart's groups, and one long sequence.
void Suite::attention() {
  for (const char* shape : {"G=8,S=8,P=47,L=83,H=4,K=2,D=32", "L=1024"})
    for (const char* op : {"attn_fwd", "attn_bwd"}) line("attention", op, shape, Bound::peak);
  line("attention", "attn_paged", "B=64,L=130,H=4,K=2,D=32", Bound::peak);
}

void Suite::logits() {
  for (const char* shape : {"R=1200,V=48", "R=64,V=32000"}) {
    for (const char* op : {"logprob", "logits_loss", "sample"}) line("logits", op, shape, Bound::operands);
    line("logits", "sample", cat(shape, ",greedy=1"), Bound::operands);
    for (const char* cut : {",top_k=20", ",top_p=90", ",min_p=5"})
      line("logits", "truncate", cat(shape, cut), Bound::operands);
  }
}

}  // namespace

void bench_suite() {
  json report;
  report["isa"] = cpu_isa();
  set_threads(1);
  report["peak_flops_one_core"] = peak_flops_one_core();
  for (int64_t kb : {16, 512, 8192, 262144})
    report["read_bandwidth_one_core"][cat(kb, " KB")] = read_bandwidth(kb << 10);
  std::printf("%s\n", report.dump(2).c_str());
  report["tokenizer"] = bench_tokenizer();
  report["text"] = bench_text();
  for (int n : {1, 2}) {
    set_threads(n);
    Suite suite(report);
    suite.gemm();
    suite.rows();
    suite.attention();
    suite.logits();
    report["step"].push_back(bench_training(report["peak_flops_one_core"]));
  }
  set_threads(1);
  report["rollout"] = bench_rollout();
  std::ofstream("build/bench.json") << report.dump(2) << "\n";
}

}  // namespace pare
