// pare compare: runs side by side, from their metrics.jsonl.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "app/console.h"
#include "base/error.h"

namespace pare {

namespace {

struct Run {
  std::string name;
  int64_t steps = 0;
  double reward_first = NAN, reward_last = NAN, val_first = NAN, val_best = NAN, val_last = NAN;
  double generated = 0, trained = 0, loss_rows = 0, flops_rollout = 0, flops_learner = 0, gen = 0, update = 0;
  double mismatches = 0, checked = 0;
};

Run read(const std::string& directory) {
  const std::string path = (std::filesystem::path(directory) / "metrics.jsonl").string();
  std::ifstream file(path);
  if (!file) fail(path, ": cannot be opened; expected the output directory of `pare train`");
  Run r{.name = std::filesystem::path(directory).filename().string()};
  std::vector<double> rewards;
  std::string line;
  for (int number = 1; std::getline(file, line); number++) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_object()) fail(path, ":", number, ": not a JSON object");
    const auto get = [&](const char* name) {
      const auto it = json.find(name);
      return it != json.end() && it->is_number() ? it->get<double>() : NAN;
    };
    const auto add = [&](double& sum, const char* name) {
      const double v = get(name);
      if (!std::isnan(v)) sum += v;
    };
    for (const auto& [name, value] : json.items())
      if (name.starts_with("val-core/") && name.find("/mean@") != std::string::npos && value.is_number()) {
        r.val_last = value;
        if (std::isnan(r.val_first)) r.val_first = value;
        r.val_best = std::fmax(r.val_best, r.val_last);
      }
    if (!json.contains("critic/score/mean")) continue;
    r.steps++;
    rewards.push_back(get("critic/score/mean"));
    add(r.generated, "tokens/generated"), add(r.trained, "tokens/trained"), add(r.loss_rows, "tokens/loss");
    add(r.flops_rollout, "flops/rollout"), add(r.flops_learner, "flops/learner");
    add(r.gen, "timing_s/gen"), add(r.update, "timing_s/update_actor");
    add(r.mismatches, "exact/mismatch_tokens"), add(r.checked, "exact/checked_tokens");
  }
  if (rewards.empty()) fail(path, ": no training step in it");
  // Ends of the curve: means over a tenth of it.
  const size_t tenth = std::max<size_t>(1, rewards.size() / 10);
  double first = 0, last = 0;
  for (size_t i = 0; i < tenth; i++) first += rewards[i], last += rewards[rewards.size() - 1 - i];
  r.reward_first = first / static_cast<double>(tenth), r.reward_last = last / static_cast<double>(tenth);
  return r;
}

void run(const std::vector<std::string>& directories) {
  std::vector<Run> runs;
  for (const auto& d : directories) runs.push_back(read(d));
  const Run& base = runs[0];
  std::printf("%-34s", "");
  for (const Run& r : runs) std::printf("%24s", r.name.c_str());
  std::printf("\n");
  const auto row = [&](const char* name, auto value, bool relative) {
    std::printf("%-34s", name);
    for (const Run& r : runs) {
      const double v = value(r), b = value(base);
      std::string text = relative ? human(v) : format("%.3f", v);
      if (relative && &r != &base && b > 0) text += format(" (%+.0f %%)", std::round((v / b - 1) * 100) + 0.0);
      std::printf("%24s", text.c_str());
    }
    std::printf("\n");
  };
  row(
      "steps", [](const Run& r) { return static_cast<double>(r.steps); }, true);
  row(
      "reward, first tenth of the run", [](const Run& r) { return r.reward_first; }, false);
  row(
      "reward, last tenth of the run", [](const Run& r) { return r.reward_last; }, false);
  row(
      "validation before", [](const Run& r) { return r.val_first; }, false);
  row(
      "validation at the end", [](const Run& r) { return r.val_last; }, false);
  row(
      "tokens generated", [](const Run& r) { return r.generated; }, true);
  row(
      "tokens through the learner", [](const Run& r) { return r.trained; }, true);
  row(
      "tokens in the loss", [](const Run& r) { return r.loss_rows; }, true);
  row(
      "FLOP of rollouts", [](const Run& r) { return r.flops_rollout; }, true);
  row(
      "FLOP of the learner", [](const Run& r) { return r.flops_learner; }, true);
  row(
      "seconds of rollouts", [](const Run& r) { return r.gen; }, false);
  row(
      "seconds of updates", [](const Run& r) { return r.update; }, false);
  row(
      "log-probs checked, sampler = learner", [](const Run& r) { return r.checked; }, true);
  row(
      "of these different", [](const Run& r) { return r.mismatches; }, true);
}

}  // namespace

void add_compare(CLI::App& app) {
  auto directories = std::make_shared<std::vector<std::string>>();
  CLI::App* c = app.add_subcommand("compare", "what runs reached and what they cost, side by side");
  c->add_option("runs", *directories, "output directories of `pare train`")->required();
  c->callback([directories] { run(*directories); });
}

}  // namespace pare
