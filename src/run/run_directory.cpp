#include "run/run_directory.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "run/certificate.h"
#include "run/tensorboard.h"

namespace pare {

namespace fs = std::filesystem;

namespace {

// The append-only files.  A checkpoint holds their sizes, and a resumed run cuts them to these.
constexpr const char* metrics_log = "metrics.jsonl";
constexpr const char* rollouts_log = "rollouts.jsonl";
constexpr const char* events_log = "events.out.tfevents.pare";
// The first is the first thing that a run writes: it marks the directory as that of a run.
constexpr const char* logs[] = {events_log, metrics_log, rollouts_log};
constexpr const char* config_file = "config.toml";
constexpr const char* report_file = "report.html";

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Steps of the checkpoints, ascending; what a crash left (step-3.tmp) is none.
std::vector<int64_t> checkpoint_steps(const std::string& path) {
  std::vector<int64_t> steps;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(fs::path(path) / "checkpoints", none)) {
    const std::string name = entry.path().filename().string();
    int64_t step = 0;
    const char *begin = name.data() + 5, *end = name.data() + name.size();
    if (name.starts_with("step-") && std::from_chars(begin, end, step).ptr == end) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

bool exists(const std::string& path, const char* name) {
  std::error_code none;
  return fs::exists(fs::path(path) / name, none);
}

std::string make_directory(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (!error) return path;
  const bool wrong_path = error == std::errc::not_a_directory || error == std::errc::no_such_file_or_directory ||
                          error == std::errc::file_exists;
  throw Error(wrong_path ? Exit::usage : Exit::failed, cat(path, ": cannot be created: ", error.message()));
}

// What lies in `folder` that a run does not write: models and checkpoints are files of a few kinds; empty: nothing.
std::string stranger(const fs::path& folder) {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder, none)) {
    const std::string kind = entry.path().extension().string();
    if (entry.is_directory() && entry.path().filename() == "adapter") {
      if (const std::string found = stranger(entry.path()); !found.empty()) return found;
      continue;
    }
    if (!entry.is_regular_file() || (kind != ".safetensors" && kind != ".json" && kind != ".bin" && kind != ".jinja" &&
                                     kind != ".jsonl" && kind != ".txt" && kind != ".tmp" && kind != ".ssa"))
      return entry.path().string();
  }
  return "";
}

void check_replaceable(const std::string& path) {
  const fs::path model = fs::path(path) / "model", checkpoints = fs::path(path) / "checkpoints";
  std::string found = stranger(model);
  for (const fs::path& folder : {model, checkpoints})
    if (fs::exists(folder) && !fs::is_directory(folder)) found = folder.string();
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(checkpoints, none)) {
    const bool checkpoint = entry.is_directory() && entry.path().filename().string().starts_with("step-");
    if (found.empty()) found = checkpoint ? stranger(entry.path()) : entry.path().string();
  }
  if (!found.empty()) fail(found, " is not of a run, so --force does not remove it; move it, or choose another --out");
}

}  // namespace

void check_run_directory(const std::string& path, Start start) {
  const bool marked = exists(path, events_log), begun = marked && exists(path, config_file);
  const bool checkpoints = !checkpoint_steps(path).empty();
  if (start == Start::resume) {
    if (!checkpoints && !begun)
      fail(path, " holds no run: there is nothing to resume; leave out --resume to begin one there");
    if (!checkpoints && exists(path, "model"))
      fail(path, " holds a finished run without a checkpoint: there is nothing to resume; --force replaces it");
    return;
  }
  for (const char* name : {config_file, metrics_log, rollouts_log, report_file, "checkpoints", "model"})
    for (const char* suffix : {"", ".tmp", ".old"})
      if (const std::string file = cat(name, suffix); !marked && exists(path, file.c_str()))
        fail(path, "/", file, " is not of a run (there is no ", events_log,
             "), so it is not replaced; move it, or choose another --out");
  if (start == Start::replace) return check_replaceable(path);
  for (const char* name : {config_file, "model"})
    if (checkpoints || exists(path, name))
      fail(path, " holds a run already (", checkpoints ? "checkpoints" : name,
           "); choose another --out, --resume to continue it, or --force to replace it");
}

std::string folder_of_config(const std::string& path) {
  if (fs::path(path).filename() != config_file) return "";
  const std::string folder = fs::path(path).parent_path().string();
  return exists(folder, events_log) ? folder.empty() ? "." : folder : "";
}

RunDirectory::RunDirectory(const std::string& path, Start start)
    : path_((check_run_directory(path, start), make_directory(path))), lock_(path) {
  if (start != Start::resume) return;
  const std::vector<int64_t> steps = checkpoint_steps(path_);
  for (auto step = steps.rbegin(); step != steps.rend() && checkpoint_.empty(); ++step) {
    const std::string damage = checkpoint_damage(step_path(*step));
    if (damage.empty())
      checkpoint_ = step_path(*step);
    else
      damaged_.push_back(cat(step_path(*step), " is not whole: ", damage));
  }
  if (checkpoint_.empty() && !damaged_.empty())
    fail(damaged_[0], "; no checkpoint of the run is: there is nothing to resume; --force starts again");
}

void RunDirectory::begin(const Config& config) {
  for (const char* name : {"checkpoints", "model"}) {
    remove_folder((fs::path(path_) / name).string());
    remove_leftovers((fs::path(path_) / name).string());
  }
  std::error_code none;
  fs::remove(fs::path(path_) / report_file, none);  // of another run
  open_logs({});
  fs::create_directories(fs::path(path_) / "checkpoints");
  write_file((fs::path(path_) / config_file).string(), to_toml(config));
}

void RunDirectory::resume(const Config& config, const RunState& state) {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(fs::path(path_) / "checkpoints", none))
    if (const fs::path name = entry.path(); name.extension() == ".tmp" || name.extension() == ".old")
      fs::remove_all(name, none);
  for (const int64_t step : checkpoint_steps(path_))
    if (step > state.training.step) remove_folder(step_path(step));  // not whole
  remove_leftovers((fs::path(path_) / "model").string());
  open_logs(state.logs);
  write_file((fs::path(path_) / config_file).string(), to_toml(config));
}

void RunDirectory::open_logs(const std::map<std::string, uint64_t>& sizes) {
  for (const char* name : logs) {
    const auto size = sizes.find(name);
    logs_.try_emplace(name, (fs::path(path_) / name).string(), size == sizes.end() ? 0 : size->second);
  }
  AppendFile& events = logs_.at(events_log);
  if (events.size() == 0) events.append(tensorboard_header(unix_time()));
}

void RunDirectory::log(const Metrics& metrics) {
  logs_.at(metrics_log).append(metrics.json() + "\n");
  const auto step = static_cast<int64_t>(metrics.get("training/global_step"));
  logs_.at(events_log).append(tensorboard_event(step, unix_time(), metrics));
}

static const char* finish_of(const Session& session, const Trajectory& s) {
  if (!s.finished) return finish_name(Finish::length);
  return finish_name(*end_of(session.eos, session.stop, s.prefix, s.tokens));
}

void RunDirectory::log_samples(const Session& session, const Training& training) {
  const std::vector<SampleText> texts = training.texts();
  const auto limit = static_cast<size_t>(session.config.trainer.samples_per_step);
  std::string lines;
  for (size_t i = 0; i < texts.size() && (limit == 0 || i < limit); i++) {
    const Trajectory& s = texts[i].sample;
    std::vector<std::string> pieces;
    std::vector<int32_t> ids = s.prefix;
    ids.insert(ids.end(), s.tokens.begin(), s.tokens.end());
    for (const int32_t id : ids) pieces.push_back(session.tokenizer->decode({&id, 1}));
    std::vector<float> logprobs(s.prefix.size(), std::numeric_limits<float>::quiet_NaN());
    logprobs.insert(logprobs.end(), s.logprob.begin(), s.logprob.end());
    nlohmann::ordered_json line = {{"step", training.steps()},   {"uid", hex16(s.uid)},
                                   {"group", s.group},           {"member", s.member},
                                   {"prompt", texts[i].prompt},  {"response", texts[i].response},
                                   {"prompt_ids", s.prompt},     {"ids", ids},
                                   {"pieces", pieces},           {"logprobs", logprobs},
                                   {"score", s.score},           {"overlong", s.overlong},
                                   {"kl_penalty", s.kl_penalty}, {"reward", s.reward},
                                   {"advantage", s.advantage},   {"extracted", texts[i].extracted},
                                   {"answer", texts[i].answer},  {"finish", finish_of(session, s)}};
    if (s.replayed() > 0) line["replayed"] = s.replayed();
    if (s.length_reward != 0) line["length_reward"] = s.length_reward;
    // A response cut inside a character is not UTF-8.
    lines += line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + '\n';
  }
  logs_.at(rollouts_log).append(lines);
}

std::string RunDirectory::step_path(int64_t step) const { return cat(path_, "/checkpoints/step-", step); }

bool RunDirectory::saved(int64_t step) const { return exists(path_, cat("checkpoints/step-", step).c_str()); }

void RunDirectory::save(const Session& session, Training& training, RunState state) {
  for (auto& [name, log] : logs_) {
    log.sync();
    state.logs[name] = log.size();
  }
  save_checkpoint(step_path(state.training.step), session, training, state);
  const auto keep = static_cast<size_t>(session.config.trainer.max_actor_ckpt_to_keep);
  const std::vector<int64_t> steps = checkpoint_steps(path_);
  for (size_t i = 0; keep > 0 && i + keep < steps.size(); i++)
    if (steps[i] != state.best_step) remove_folder(step_path(steps[i]));
}

void RunDirectory::save_model(const Session& session) const {
  pare::save_model((fs::path(path_) / "model").string(), session);
}

}  // namespace pare
