// Lines that training and evaluation print.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "app/console.h"
#include "base/progress.h"
#include "run/hints.h"
#include "run/plan.h"

namespace pare {

// ---- before the first step
void show_machine(Console& console, const Table& table);
// "qwen2, 494M parameters: 24 layers, ...; with adapters of rank 32: 8.8M parameters"
std::string model_text(const ModelConfig& config, const std::optional<LoraSpec>& lora);
void show_model(Console& console, const Session& session);
void show_plan(Console& console, const Session& session, const Plan& plan);  // the memory of a step, and what fits
// Prints the settings of the run and its directory.
void show_train(Console& console, const Session& session, const std::string& path);
void show_sft(Console& console, const Session& session, const std::string& path);
// "12 of 80 responses, 1.2k tok/s, ETA 0:35".
std::string rollout_note(const ProgressLine& work, int64_t finished, int64_t responses, int64_t tokens);
std::string sampling_text(const ValKeys& keys);  // "greedy", "temperature 0.6, top-p 0.95"

// ---- at every step
// A reward command that ended or was late and was started again, on any rank, since the last call; all ranks call it.
void warn_of_restarts(Console& console, const Session& session);
// A column of the table of steps; the cell of a metric that is absent is "-".
struct StepColumn {
  TextTable::Column column;
  std::function<std::string(const Metrics&)> cell;
};
std::vector<StepColumn> train_columns(const Config& config);
std::vector<StepColumn> sft_columns();

// Score of a validation, higher is better: mean@n, or minus the held-out loss; NaN where there was none.
double val_score(const Config& config, const Metrics& metrics);

// The lines of a run: a row per step between its number and the time that is left, with the last validation reward, and
// what the row calls for.  Titles come again after every 20 rows.
class StepLines {
 public:
  // `done`: steps made before this process.
  StepLines(Console& console, const Config& config, std::vector<StepColumn> columns, int64_t done);
  void step(const Metrics& metrics);                   // of a step, with those of a validation where there was one
  void samples(const std::vector<SampleText>& texts);  // the best, the worst and the longest response of the last step
  void progress(const char* stage, int64_t done, int64_t all);  // within the step after the last one

 private:
  using Clock = std::chrono::steady_clock;
  Console& console_;
  const Config config_;
  const std::vector<StepColumn> columns_;
  const TextTable table_;
  Hints hints_;
  Clock::time_point start_ = Clock::now();  // of the first step
  int64_t rows_ = 0;                        // since the titles
  const int64_t before_;
  int64_t step_;  // the last one
  double validation_;
};

// ---- at the end
void show_memory(Console& console, const Session& session);  // what the arenas held at most

}  // namespace pare
