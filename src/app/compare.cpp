// pare compare: runs side by side, from their metrics.jsonl, and where they part.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "app/console.h"
#include "base/error.h"

namespace pare {

namespace {

struct Run {
  std::string name, directory;
  std::map<int64_t, std::string> certificates = {};  // by step
  int64_t steps = 0;
  double reward_first = NAN, reward_last = NAN, val_first = NAN, val_best = NAN, val_last = NAN;
  double generated = 0, trained = 0, loss_rows = 0, flops_rollout = 0, flops_learner = 0, gen = 0, update = 0;
  double mismatches = 0, checked = 0;
};

Run read(const std::string& directory) {
  const std::string path = (std::filesystem::path(directory) / "metrics.jsonl").string();
  std::ifstream file(path);
  if (!file) fail(path, ": cannot be opened; expected the output directory of `pare train`");
  const auto folder = std::filesystem::path(directory) / "";  // without the last part where that is empty
  Run r{.name = folder.parent_path().filename().string(), .directory = directory};
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
    if (!json.contains("critic/score/mean") && !json.contains("train/loss")) continue;
    r.steps++;
    if (json.contains("certificate"))
      r.certificates[static_cast<int64_t>(get("training/global_step"))] = json["certificate"].get<std::string>();
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

// The responses of a step, by uid, in the order in which they were written.
struct Responses {
  std::vector<std::string> order;
  std::map<std::string, nlohmann::json> of;
};
Responses read_responses(const Run& run, int64_t step) {
  Responses responses;
  std::ifstream file(std::filesystem::path(run.directory) / "rollouts.jsonl");
  for (std::string line; std::getline(file, line);) {
    auto json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_object() || json.value("step", int64_t{0}) != step || !json.contains("uid")) continue;
    const std::string uid = json["uid"];
    responses.order.push_back(uid);
    responses.of[uid] = std::move(json);
  }
  return responses;
}

// The first token in which two responses differ; -1: in none.
int64_t first_difference(const nlohmann::json& a, const nlohmann::json& b) {
  const auto &x = a.at("ids"), &y = b.at("ids"), &p = a.at("logprobs"), &q = b.at("logprobs");
  const size_t n = std::min(x.size(), y.size());
  for (size_t t = 0; t < n; t++)
    if (x[t] != y[t] || p[t] != q[t]) return static_cast<int64_t>(t);
  return x.size() == y.size() ? -1 : static_cast<int64_t>(n);
}

std::string token_text(const nlohmann::json& response, int64_t t) {
  const auto i = static_cast<size_t>(t);
  if (i >= response.at("ids").size()) return "no token";
  return cat(response["pieces"][i].dump(), " (id ", response["ids"][i].dump(), ", log-prob ",
             response["logprobs"][i].dump(), ")");
}

// Which token of which response, if both runs wrote the responses of the step.
void print_token(const Run& a, const Run& b, int64_t step) {
  const Responses x = read_responses(a, step), y = read_responses(b, step);
  if (x.order.empty() || y.order.empty()) {
    std::printf(
        "  %s: no responses of this step in rollouts.jsonl; run again with trainer.samples_freq=1 for the token\n",
        (x.order.empty() ? a : b).directory.c_str());
    return;
  }
  std::string first;
  int64_t common = 0, different = 0;
  for (const std::string& uid : x.order) {
    const auto other = y.of.find(uid);
    if (other == y.of.end()) continue;
    common++;
    const nlohmann::json& response = x.of.at(uid);
    const int64_t t = first_difference(response, other->second);
    if (t < 0) continue;
    if (different++ == 0)
      first =
          cat("  response ", uid, " (group ", response.at("group").dump(), ", member ", response.at("member").dump(),
              "), token ", t, ": ", token_text(response, t), " and ", token_text(other->second, t));
  }
  if (common == 0)
    std::printf("  they have no sequence in common there: other prompts or another order\n");
  else if (different == 0)
    std::printf("  the %lld responses of it that both wrote are the same: others differ (trainer.samples_per_step)\n",
                static_cast<long long>(common));
  else
    std::printf("%s\n  %lld of the %lld responses that both wrote differ\n", first.c_str(),
                static_cast<long long>(different), static_cast<long long>(common));
}

// Where two runs part, by the certificates of the steps that both have.
void print_parting(const Run& a, const Run& b) {
  int64_t common = 0;
  for (const auto& [step, certificate] : a.certificates) {
    const auto other = b.certificates.find(step);
    if (other == b.certificates.end()) continue;
    common++;
    if (certificate == other->second) continue;
    std::printf("%s and %s part at step %lld: certificates %s and %s\n", a.name.c_str(), b.name.c_str(),
                static_cast<long long>(step), certificate.c_str(), other->second.c_str());
    return print_token(a, b, step);
  }
  if (common == 0)
    std::printf("%s and %s have no step with a certificate in common\n", a.name.c_str(), b.name.c_str());
  else
    std::printf("%s and %s have the same log-probs, bit for bit, in all %lld steps that both have\n", a.name.c_str(),
                b.name.c_str(), static_cast<long long>(common));
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
  if (runs.size() > 1) std::printf("\n");
  for (size_t i = 1; i < runs.size(); i++) print_parting(base, runs[i]);
}

}  // namespace

void add_compare(CLI::App& app) {
  auto directories = std::make_shared<std::vector<std::string>>();
  CLI::App* c =
      app.add_subcommand("compare", "what runs reached and what they cost, side by side, and where they part");
  c->add_option("runs", *directories, "run directories of `pare train` or `pare sft`")->required();
  c->callback([directories] { run(*directories); });
}

}  // namespace pare
