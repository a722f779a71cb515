#include "app/report/data.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <regex>

#include "base/error.h"
#include "base/json.h"
#include "run/config.h"
#include "run/run_log.h"

namespace pare {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

namespace {

// Bytes of rollouts.jsonl that go into a page, over all runs: browsers open a page of this size at once.
constexpr uintmax_t samples_budget = 12'000'000;

// Six digits are more than a curve shows.
Json number(double v) {
  if (!std::isfinite(v)) return nullptr;
  if (v == std::floor(v) && std::abs(v) < 9e15) return static_cast<int64_t>(v);
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", v);
  return std::strtod(text, nullptr);
}

Json exact(double v) { return std::isfinite(v) ? Json(v) : Json(nullptr); }

Json totals_json(const RunTotals& t) {
  return {{"steps", t.steps},
          {"reward_first", exact(t.reward_first)},
          {"reward_last", exact(t.reward_last)},
          {"loss_first", exact(t.loss_first)},
          {"loss_last", exact(t.loss_last)},
          {"val_first", exact(t.val_first)},
          {"val_best", exact(t.val_best)},
          {"val_best_step", t.val_best_step},
          {"val_last", exact(t.val_last)},
          {"generated", t.generated},
          {"replayed", t.replayed},
          {"trained", t.trained},
          {"loss_rows", t.loss_rows},
          {"flops_rollout", t.flops_rollout},
          {"flops_learner", t.flops_learner},
          {"flops_distill", t.flops_distill},
          {"reads_saved", exact(t.reads_saved)},
          {"flops", t.flops},
          {"peak_bytes", exact(t.peak_bytes)},
          {"seconds", t.seconds},
          {"seconds_rollout", t.seconds_rollout},
          {"seconds_update", t.seconds_update},
          {"mismatches", exact(t.mismatches)},
          {"checked", exact(t.checked)}};
}

// Every `every`-th response of rollouts.jsonl; empty where a run wrote none.  Fields are optional: runs of an older
// pare have fewer.
Json read_samples(const std::string& path, int64_t every) {
  Json samples = Json::array();
  std::ifstream file(path);
  std::string line;
  for (int64_t number_of_line = 0; std::getline(file, line); number_of_line++) {
    if (number_of_line % every != 0) continue;
    const auto json = try_parse_json(line);
    if (!json.is_object()) {
      if (file.eof()) break;  // not written to its end
      fail(path, ":", number_of_line + 1, ": not a JSON object");
    }
    Json sample;
    for (const char* name :
         {"step", "uid", "group", "member", "prompt", "replayed", "score", "length_reward", "overlong", "kl_penalty",
          "reward", "advantage", "extracted", "answer", "finish", "finished", "tokens", "ids"})
      if (const auto it = json.find(name); it != json.end()) sample[name] = *it;
    const auto pieces = json.find("pieces"), logprobs = json.find("logprobs");
    if (pieces != json.end() && pieces->is_array())
      sample["pieces"] = *pieces;  // their concatenation is the response
    else
      sample["response"] = json.contains("response") ? json["response"] : nlohmann::json("");
    if (logprobs != json.end() && logprobs->is_array()) {
      Json& column = sample["logprobs"] = Json::array();
      for (const auto& v : *logprobs) column.push_back(v.is_number() ? number(v.get<double>()) : Json(nullptr));
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}

// {key: value} of a config.toml, values as they read; empty without the file.
Json read_config(const std::string& path) {
  Json config = Json::object();
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  for (const TomlItem& item : parse_toml(text, path)) {
    std::string value;
    for (const TomlValue& v : item.values) value += (value.empty() ? "" : ", ") + v.text;
    config[item.key] = item.array ? "[" + value + "]" : value;
  }
  return config;
}

// All but what two seeds of one experiment differ in: where they write, what they draw, and, if `own_models`, a model
// of each seed's own (model.path = "runs/sft-s1/model" of seed 1).
Json experiment(Json config, bool own_models) {
  const std::string seed = config.value("trainer.seed", "");
  if (own_models && !seed.empty() && seed.find_first_not_of("0123456789") == std::string::npos)
    config["model.path"] =
        std::regex_replace(config.value("model.path", ""), std::regex(cat("(s|seed)[-_.]?", seed, "(?![0-9])")), "$1");
  for (const char* key : {"trainer.seed", "trainer.default_local_dir"}) config.erase(key);
  return config;
}

// What the names of a group's runs have in common: "dapo" of dapo-seed1 and dapo-seed2.
std::string common_name(const std::vector<std::string>& names) {
  std::string name = names[0];
  if (names.size() == 1) return name;
  for (const std::string& other : names)
    name.resize(
        static_cast<size_t>(std::mismatch(name.begin(), name.end(), other.begin(), other.end()).first - name.begin()));
  name = std::regex_replace(name, std::regex("[-_.]*((seed|s)[-_.]?)?$"), "", std::regex_constants::format_first_only);
  return name.empty() ? names[0] : name;
}

}  // namespace

std::string report_data(const std::vector<std::string>& directories) {
  Json runs = Json::array(), groups = Json::array();
  std::vector<Json> configs;
  uintmax_t bytes = 0;
  for (const std::string& d : directories) {
    std::error_code absent;
    const uintmax_t size = fs::file_size(fs::path(d) / "rollouts.jsonl", absent);
    if (!absent) bytes += size;
  }
  const auto every = static_cast<int64_t>((bytes + samples_budget - 1) / samples_budget) | 1;  // odd: groups are even
  for (const std::string& d : directories) {
    const RunLog log = read_run_log(d);
    const Json config = read_config((fs::path(d) / "config.toml").string());
    Json series = Json::object();
    for (const auto& [metric, values] : log.series) {
      Json& column = series[metric] = Json::array();
      for (const double v : values) column.push_back(number(v));
    }
    const auto is_seed_of = [&](const Json& group, bool own_models) {
      return std::all_of(group["runs"].begin(), group["runs"].end(), [&](const Json& i) {
        return experiment(configs[i.get<size_t>()], own_models) == experiment(config, own_models);
      });
    };
    const auto same = std::find_if(groups.begin(), groups.end(),
                                   [&](const Json& g) { return is_seed_of(g, false) || is_seed_of(g, true); });
    if (same == groups.end())
      groups.push_back({{"name", ""}, {"runs", {runs.size()}}, {"config", config}});
    else
      (*same)["runs"].push_back(runs.size());
    configs.push_back(config);
    const std::string planned = config.value("trainer.total_training_steps", "");
    runs.push_back({{"name", log.name},
                    {"path", log.path},
                    {"seed", config.value("trainer.seed", "")},
                    {"planned", planned.empty() ? Json(nullptr) : Json(std::atoll(planned.c_str()))},
                    {"steps", log.steps},
                    {"series", std::move(series)},
                    {"totals", totals_json(run_totals(log))},
                    {"samples", read_samples((fs::path(d) / "rollouts.jsonl").string(), every)}});
  }
  for (Json& group : groups) {
    std::vector<std::string> names;
    for (const auto& i : group["runs"]) names.push_back(runs[i.get<size_t>()]["name"]);
    group["name"] = common_name(names);
  }
  for (size_t i = 0; i < groups.size(); i++)  // two groups must not read the same
    for (size_t j = 0; j < i; j++)
      if (groups[i]["name"] == groups[j]["name"]) {
        groups[i]["name"] = runs[groups[i]["runs"][0].get<size_t>()]["path"];
        groups[j]["name"] = runs[groups[j]["runs"][0].get<size_t>()]["path"];
      }
  Json keys = Json::array();
  for (const Json& group : groups)
    for (const auto& [key, value] : group["config"].items())
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  Json defaults = Json::object();
  for (const TomlItem& item : parse_toml(to_toml(Config{}), "defaults")) {
    std::string value;
    for (const TomlValue& v : item.values) value += (value.empty() ? "" : ", ") + v.text;
    defaults[item.key] = item.array ? "[" + value + "]" : value;
  }
  const Json document = {
      {"sampled", every}, {"groups", groups}, {"runs", runs}, {"keys", keys}, {"defaults", defaults}};
  std::string text = document.dump(-1, ' ', true, Json::error_handler_t::replace), safe;
  for (const char c : text)  // no </script> and no <!-- ends the element that holds it
    if (c == '<')
      safe += "\\u003c";
    else
      safe += c;
  return safe;
}

}  // namespace pare
