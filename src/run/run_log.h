// Reads a run's directory back: metrics.jsonl as columns, and their totals.
#pragma once
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace pare {

struct RunLog {
  std::string path, name;                             // the directory, and its last part
  std::vector<int64_t> steps;                         // ascending; an evaluation before the first step is step 0
  std::map<std::string, std::vector<double>> series;  // metric -> a value for each of `steps`, NaN where it has none
  std::map<int64_t, std::string> certificates;        // of the steps that have one
  std::map<int64_t, std::string> arithmetic;          // of the same; 1 where an older program did not record it

  double at(const std::string& metric, size_t i) const;  // NaN if absent
  double sum(const std::string& metric) const;           // of the values there are, 0 without any
};

// Reads DIRECTORY/metrics.jsonl.  A last line without its end (a run that still goes, or was killed) is left out; lines
// of the same step complete one another.  Fails where there is no file, a line is not an object, or no line has a step.
RunLog read_run_log(const std::string& directory);

// Ends of a curve are means over a tenth of the steps that have a value.  NaN where the run has no such metric.
struct RunTotals {
  static constexpr double none = std::numeric_limits<double>::quiet_NaN();
  int64_t steps = 0;  // of training
  double reward_first = none, reward_last = none, loss_first = none, loss_last = none;
  double val_first = none, val_best = none, val_last = none;  // of the first val-core/*/mean@n
  int64_t val_best_step = 0;
  double generated = 0, trained = 0, loss_rows = 0;  // tokens; generated: of RPO's first entries too
  double replayed = 0;                               // tokens of responses that were not generated
  double flops_rollout = 0, flops_learner = 0, flops_distill = 0, flops = 0;  // flops: of every phase
  double reads_saved = none;                                    // part of a dense cache's reads, mean over steps
  double peak_bytes = none;                                     // of all arenas
  double seconds = 0, seconds_rollout = 0, seconds_update = 0;  // seconds: of steps and evaluations
  double mismatches = none, checked = none;  // tokens; of those that no step checked there are no mismatches
};

RunTotals run_totals(const RunLog& log);

}  // namespace pare
