// pare compare: runs side by side, from their metrics.jsonl, and the token at which they part.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>

#include "app/commands.h"
#include "base/error.h"
#include "base/json.h"
#include "base/text.h"
#include "run/run_log.h"

namespace pare {

namespace {

constexpr size_t columns = 80;  // of any terminal

// A line, or where it is longer several, under `indent`.
void say(const std::string& text, const char* indent = "  ") {
  std::printf("%s", wrapped(printable(text), columns, indent).c_str());
}

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
bool is_response(const nlohmann::json& j) {
  for (const char* name : {"uid", "group", "member", "ids", "logprobs", "pieces"})
    if (!j.contains(name)) return false;
  const size_t tokens = j["ids"].size();
  return j["uid"].is_string() && j["ids"].is_array() && j["logprobs"].is_array() && j["pieces"].is_array() &&
         j["logprobs"].size() == tokens && j["pieces"].size() >= tokens;
}
Responses read_responses(const RunLog& run, int64_t step) {
  Responses responses;
  std::ifstream file(std::filesystem::path(run.path) / "rollouts.jsonl");
  for (std::string line; std::getline(file, line);) {
    auto json = try_parse_json(line);
    const bool whole = json.is_object() && json.contains("step") && json["step"] == step && is_response(json);
    if (!whole) continue;
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
  if (x.order.empty() || y.order.empty())
    return say(cat((x.order.empty() ? a : b).path,
                   ": no responses of this step in rollouts.jsonl; run again with trainer.samples_freq=1 for the "
                   "token"));
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
      first = cat("response ", uid, " (group ", response.at("group").dump(), ", member ", response.at("member").dump(),
                  "), token ", t, ": ", token_text(response, t), " and ", token_text(other->second, t));
  }
  if (common == 0) return say("they have no sequence in common there: other prompts or another order");
  if (different == 0)
    return say(
        cat("the ", common, " responses of it that both wrote are the same: others differ (trainer.samples_per_step)"));
  say(first);
  say(cat(different, " of the ", common, " responses that both wrote differ"));
}

// Where two runs part, by the certificates of the steps that both have.
void print_parting(const RunLog& a, const RunLog& b) {
  int64_t common = 0;
  for (const auto& [step, certificate] : a.certificates) {
    const auto other = b.certificates.find(step);
    if (other == b.certificates.end()) continue;
    common++;
    if (certificate == other->second) continue;
    say(cat(a.name, " and ", b.name, " part at step ", step, ": certificates ", certificate, " and ", other->second),
        "");
    if (const std::string& x = a.arithmetic.at(step), &y = b.arithmetic.at(step); x != y)
      say(cat("they were computed with arithmetic ", x, " and ", y, ", whose sums or functions differ"));
    return print_token(a, b, step);
  }
  say(common == 0 ? cat(a.name, " and ", b.name, " have no step with a certificate in common")
                  : cat(a.name, " and ", b.name, " have the same log-probs, bit for bit, in all ", common,
                        " steps that both have"),
      "");
}

// The cells of a run, with the differences of its sums from those of the first one.
struct Row {
  const char* name;
  std::function<double(const RunTotals&)> value;
  bool sum;  // printed short and beside its difference
};
constexpr const char* kDistillation = "FLOP of distillation";
const std::vector<Row> kRows = {
    {"steps", [](const RunTotals& t) { return static_cast<double>(t.steps); }, true},
    {"reward, first tenth of the run", [](const RunTotals& t) { return t.reward_first; }, false},
    {"reward, last tenth of the run", [](const RunTotals& t) { return t.reward_last; }, false},
    {"validation before", [](const RunTotals& t) { return t.val_first; }, false},
    {"validation at the end", [](const RunTotals& t) { return t.val_last; }, false},
    {"tokens generated", [](const RunTotals& t) { return t.generated; }, true},
    {"tokens through the learner", [](const RunTotals& t) { return t.trained; }, true},
    {"tokens in the loss", [](const RunTotals& t) { return t.loss_rows; }, true},
    {"FLOP of rollouts", [](const RunTotals& t) { return t.flops_rollout; }, true},
    {"FLOP of the learner", [](const RunTotals& t) { return t.flops_learner; }, true},
    {kDistillation, [](const RunTotals& t) { return t.flops_distill; }, true},
    {"seconds of rollouts", [](const RunTotals& t) { return t.seconds_rollout; }, false},
    {"seconds of updates", [](const RunTotals& t) { return t.seconds_update; }, false},
    {"log-probs checked", [](const RunTotals& t) { return t.checked; }, true},
    {"of these different", [](const RunTotals& t) { return t.mismatches; }, true}};
std::string cell(const Row& row, const RunTotals& run, const RunTotals& first) {
  const double v = row.value(run), base = row.value(first);
  if (std::isnan(v)) return run.checked == 0 && row.name == kRows.back().name ? "not checked" : "-";
  if (!row.sum) return format("%.3f", v);
  return human(v) +
         (&run != &first && base > 0 ? format(" (%+.0f %%)", std::round((v / base - 1) * 100) + 0.0) : std::string());
}

// As many runs beside one another as fit, the others below.
void print_table(const std::vector<Run>& runs) {
  constexpr size_t titles = 30, longest_name = 22;
  std::vector<Row> rows = kRows;
  if (std::none_of(runs.begin(), runs.end(), [](const Run& r) { return r.totals.flops_distill > 0; }))
    std::erase_if(rows, [](const Row& row) { return row.name == kDistillation; });
  for (size_t begin = 0, end = 0; begin < runs.size(); begin = end) {
    std::vector<std::string> lines(1 + rows.size());
    size_t used = titles;
    for (; end < runs.size(); end++) {
      std::vector<std::string> cells = {shortened(printable(runs[end].log.name), longest_name)};
      for (const Row& row : rows) cells.push_back(cell(row, runs[end].totals, runs[0].totals));
      size_t width = 0;
      for (const std::string& c : cells) width = std::max(width, display_width(c) + 2);
      if (end > begin && used + width > columns) break;
      used += width;
      for (size_t i = 0; i < cells.size(); i++) lines[i] += pad_left(cells[i], width);
    }
    if (begin > 0) std::printf("\n");
    for (size_t i = 0; i < lines.size(); i++)
      std::printf("%-*s%s\n", static_cast<int>(titles), i ? rows[i - 1].name : "", lines[i].c_str());
  }
}

void run(const std::vector<std::string>& directories) {
  std::vector<Run> runs;
  for (const auto& d : directories) runs.push_back(read(d));
  print_table(runs);
  if (runs.size() > 1) std::printf("\n");
  for (size_t i = 1; i < runs.size(); i++) print_parting(runs[0].log, runs[i].log);
}

}  // namespace

void add_compare(const Command& program) {
  auto directories = std::make_shared<std::vector<std::string>>();
  const Command c = program.command("compare", "results and costs of runs side by side, and where they diverge");
  c.option("runs", *directories, "run directories of `pare train` or `pare sft`").required();
  c.action([directories] { run(*directories); });
}

}  // namespace pare
