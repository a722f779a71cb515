#include "run/run_log.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/json.h"

namespace pare {

namespace fs = std::filesystem;

namespace {

// Sets `first` and `last` to the means of the first and the last tenth of the values that are not NaN.
void set_ends(const RunLog& log, const std::string& metric, double& first, double& last) {
  const auto it = log.series.find(metric);
  if (it == log.series.end()) return;
  std::vector<double> values;
  std::copy_if(it->second.begin(), it->second.end(), std::back_inserter(values), [](double v) { return v == v; });
  if (values.empty()) return;
  const size_t tenth = std::max<size_t>(1, values.size() / 10);
  first = last = 0;
  for (size_t i = 0; i < tenth; i++) {
    first += values[i] / static_cast<double>(tenth);
    last += values[values.size() - 1 - i] / static_cast<double>(tenth);
  }
}

}  // namespace

double RunLog::at(const std::string& metric, size_t i) const {
  const auto it = series.find(metric);
  return it == series.end() ? RunTotals::none : it->second[i];
}

double RunLog::sum(const std::string& metric) const {
  double total = 0;
  for (size_t i = 0; i < steps.size(); i++) {
    const double v = at(metric, i);
    if (!std::isnan(v)) total += v;
  }
  return total;
}

RunLog read_run_log(const std::string& directory) {
  const std::string path = (fs::path(directory) / "metrics.jsonl").string();
  std::ifstream file(path);
  if (!file) fail(path, ": cannot be opened; expected the output directory of `pare train` or `pare sft`");
  RunLog log;
  std::map<int64_t, std::map<std::string, double>> rows;
  std::string line;
  for (int number = 1; std::getline(file, line); number++) {
    const auto json = try_parse_json(line);
    if (!json.is_object()) {
      if (file.eof()) break;  // without a newline: not written to its end
      fail(path, ":", number, ": not a JSON object");
    }
    const auto step = json.find("training/global_step");
    if (step == json.end() || !step->is_number_integer())
      fail(path, ":", number, ": no whole number training/global_step");
    auto& row = rows[step->get<int64_t>()];
    for (const auto& [name, value] : json.items())
      if (value.is_number())  // the first: of older runs, and part of memory/kv
        row[name == "memory/kv_pages" ? "perf/kv_peak_bytes" : name] = value.get<double>();
    if (const auto c = json.find("certificate"); c != json.end() && c->is_string()) {
      log.certificates[step->get<int64_t>()] = c->get<std::string>();
      const auto a = json.find("arithmetic");
      log.arithmetic[step->get<int64_t>()] = a != json.end() && a->is_string() ? a->get<std::string>() : "1";
    }
  }
  if (rows.empty()) fail(path, ": no step in it yet");

  const fs::path dir = fs::path(directory).lexically_normal();
  log.path = directory;
  log.name = (dir.has_filename() ? dir : dir.parent_path()).filename().string();
  for (const auto& [step, row] : rows) {
    for (const auto& [name, value] : row)
      log.series.try_emplace(name, rows.size(), RunTotals::none).first->second[log.steps.size()] = value;
    log.steps.push_back(step);
  }
  return log;
}

RunTotals run_totals(const RunLog& log) {
  RunTotals t;
  t.steps = std::count_if(log.steps.begin(), log.steps.end(), [](int64_t s) { return s > 0; });
  set_ends(log, "critic/score/mean", t.reward_first, t.reward_last);
  set_ends(log, "train/loss", t.loss_first, t.loss_last);
  const auto val = std::find_if(log.series.begin(), log.series.end(), [](const auto& s) {
    return s.first.starts_with("val-core/") && s.first.find("/mean@") != std::string::npos;
  });
  if (val != log.series.end())
    for (size_t i = 0; i < log.steps.size(); i++) {
      const double v = val->second[i];
      if (std::isnan(v)) continue;
      if (std::isnan(t.val_first)) t.val_first = v;
      t.val_last = v;
      if (!(v <= t.val_best)) {
        t.val_best = v;
        t.val_best_step = log.steps[i];
      }
    }
  t.generated = log.sum("tokens/generated") + log.sum("rpo/init_tokens");
  t.replayed = log.sum("tokens/replayed");
  t.trained = log.sum("tokens/trained");
  t.loss_rows = log.sum("tokens/loss");
  t.flops_rollout = log.sum("flops/rollout");
  t.flops_learner = log.sum("flops/learner");
  t.flops_distill = log.sum("flops/distill");
  if (log.series.contains("kv/tokens_saved/read") && t.steps > 0)
    t.reads_saved = log.sum("kv/tokens_saved/read") / static_cast<double>(t.steps);
  for (const auto& [name, values] : log.series)
    if (name.starts_with("flops/")) t.flops += log.sum(name);
  if (const auto peaks = log.series.find("perf/max_memory_allocated_gb"); peaks != log.series.end())
    for (const double gb : peaks->second) t.peak_bytes = std::fmax(t.peak_bytes, gb * (1 << 30));
  t.seconds_rollout = log.sum("timing_s/gen");
  t.seconds_update = log.sum("timing_s/update_actor");
  t.seconds = log.sum("timing_s/step") + log.sum("timing_s/testing");
  if (log.series.contains("exact/checked_tokens")) t.checked = log.sum("exact/checked_tokens");
  if (t.checked > 0) t.mismatches = log.sum("exact/mismatch_tokens");
  return t;
}

}  // namespace pare
