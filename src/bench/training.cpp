#include "bench/training.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/thread_pool.h"
#include "run/grpo_training.h"
#include "run/sft_training.h"

namespace pare {

namespace {

constexpr int kSteps = 20;

// What kSteps steps do.
template <class Step>
Ledger sum_of_steps(Session& session, Step step) {
  session.device.timed = true;
  Ledger sum;
  for (int i = 0; i < kSteps; i++) {
    step();
    for (const auto& [phase, ops] : session.ledger.phases)
      for (const auto& [op, line] : ops) {
        Ledger::Line& l = sum.phases[phase][op];
        l.calls += line.calls;
        l.seconds += line.seconds;
        l.cost.flops += line.cost.flops;
      }
  }
  return sum;
}

// Prints a phase and returns it.
nlohmann::json report_phase(const char* name, const Ledger& sum, const std::string& phase, double tokens,
                            double peak_flops) {
  const double seconds = sum.seconds(phase);
  std::vector<std::pair<double, std::string>> ops;
  // Matrix products: the linear layers, and those inside attention, which take at least their FLOPs at peak speed.
  double linear = 0, attention = 0;
  for (const auto& [op, line] : sum.phases.at(phase)) {
    ops.emplace_back(line.seconds / seconds, op);
    if (op.starts_with("linear_")) linear += line.seconds / seconds;
    if (op.starts_with("attn_")) attention += static_cast<double>(line.cost.flops) / (peak_flops * threads()) / seconds;
  }
  std::sort(ops.rbegin(), ops.rend());
  std::printf(
      "step       %-8s %d thr  %8.0f tokens/s  %6.1f GFLOP/s  matrix products %.0f %% of the time (linear %.1f %%)\n",
      name, threads(), tokens / seconds, static_cast<double>(sum.total(phase).flops) / seconds * 1e-9,
      (linear + attention) * 100, linear * 100);
  nlohmann::json r = {
      {"tokens_per_second", tokens / seconds}, {"linear_share", linear}, {"matrix_product_share", linear + attention}};
  for (const auto& [share, op] : ops) {
    const auto& line = sum.phases.at(phase).at(op);
    r["share"][op] = share;
    if (share >= 0.01)
      std::printf("             %-18s %5.1f %%  %8.1f us a call\n", op.c_str(), share * 100,
                  line.seconds / static_cast<double>(line.calls) * 1e6);
  }
  return r;
}

}  // namespace

nlohmann::json bench_training(double peak_flops) {
  const std::string on_threads = cat("trainer.threads=", threads());
  nlohmann::json report{{"threads", threads()}};
  {
    Session session(load_config({"quickstart-sft", on_threads}));
    SftTraining sft(session);
    sft.step();  // memory is touched for the first time
    double tokens = 0;
    const Ledger sum = sum_of_steps(session, [&] { tokens += sft.step().get("tokens/trained"); });
    report["warm-up"] = report_phase("warm-up", sum, "learner", tokens, peak_flops);
  }
  const Config config = load_config({"quickstart", "model.config=tiny-ssa", "data.max_prompt_length=52",
                                     "data.max_response_length=84", "algorithm.adv_filter_threshold=0", on_threads});
  Session session(config);
  GrpoTraining trainer(session);
  trainer.worst_case_step();
  const Ledger sum = sum_of_steps(session, [&] { trainer.worst_case_step(); });
  const double samples = static_cast<double>(config.data.train_batch_size * config.rollout.n);
  const double generated = samples * static_cast<double>(config.data.max_response_length);
  const double trained = samples * static_cast<double>(config.data.max_response_length - 1) +
                         static_cast<double>(config.data.train_batch_size * config.data.max_prompt_length);
  report["rollout"] = report_phase("rollout", sum, "rollout", kSteps * generated, peak_flops);
  report["learner"] = report_phase("learner", sum, "learner", kSteps * trained, peak_flops);
  return report;
}

}  // namespace pare
