// pare compare: runs side by side, from their metrics.jsonl, and where they part.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include "app/commands.h"
#include "app/console.h"
#include "app/run_log.h"
#include "base/error.h"
#include "base/json.h"

namespace pare {

namespace {

struct Run {
  RunLog log;
  RunTotals totals;
};

Run read(const std::string& directory) {
  RunLog log = read_run_log(directory);
  const RunTotals totals = run_totals(log);
  if (totals.steps == 0) fail(directory, ": no training step in metrics.jsonl");
  return {std::move(log), totals};
}

// The responses of a step, by uid, in the order in which they were written.
struct Responses {
  std::vector<std::string> order;
  std::map<std::string, nlohmann::json> of;
};
Responses read_responses(const RunLog& run, int64_t step) {
  Responses responses;
  std::ifstream file(std::filesystem::path(run.path) / "rollouts.jsonl");
  for (std::string line; std::getline(file, line);) {
    auto json = try_parse_json(line);
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
void print_token(const RunLog& a, const RunLog& b, int64_t step) {
  const Responses x = read_responses(a, step), y = read_responses(b, step);
  if (x.order.empty() || y.order.empty()) {
    std::printf(
        "  %s: no responses of this step in rollouts.jsonl; run again with trainer.samples_freq=1 for the token\n",
        (x.order.empty() ? a : b).path.c_str());
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
void print_parting(const RunLog& a, const RunLog& b) {
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
  std::printf("%-34s", "");
  for (const Run& r : runs) std::printf("%24s", r.log.name.c_str());
  std::printf("\n");
  // `relative`: a sum, printed short and beside its difference from the first run's.
  const auto row = [&](const char* name, auto field, bool relative) {
    std::printf("%-34s", name);
    for (const Run& r : runs) {
      const auto v = static_cast<double>(r.totals.*field), base = static_cast<double>(runs[0].totals.*field);
      std::string text = std::isnan(v) ? "-" : relative ? human(v) : format("%.3f", v);
      if (relative && &r != &runs[0] && base > 0) text += format(" (%+.0f %%)", std::round((v / base - 1) * 100) + 0.0);
      std::printf("%24s", text.c_str());
    }
    std::printf("\n");
  };
  row("steps", &RunTotals::steps, true);
  row("reward, first tenth of the run", &RunTotals::reward_first, false);
  row("reward, last tenth of the run", &RunTotals::reward_last, false);
  row("validation before", &RunTotals::val_first, false);
  row("validation at the end", &RunTotals::val_last, false);
  row("tokens generated", &RunTotals::generated, true);
  row("tokens through the learner", &RunTotals::trained, true);
  row("tokens in the loss", &RunTotals::loss_rows, true);
  row("FLOP of rollouts", &RunTotals::flops_rollout, true);
  row("FLOP of the learner", &RunTotals::flops_learner, true);
  row("seconds of rollouts", &RunTotals::seconds_rollout, false);
  row("seconds of updates", &RunTotals::seconds_update, false);
  row("log-probs checked, sampler = learner", &RunTotals::checked, true);
  row("of these different", &RunTotals::mismatches, true);
  if (runs.size() > 1) std::printf("\n");
  for (size_t i = 1; i < runs.size(); i++) print_parting(runs[0].log, runs[i].log);
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
