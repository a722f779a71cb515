#include "run/run_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/json.h"
#include "run/certificate.h"
#include "run/resumed_logs.h"
#include "run/run_log.h"
#include "run/tensorboard.h"

namespace pare {

namespace fs = std::filesystem;

namespace {

// The append-only files.  A checkpoint holds their sizes, and a resumed run cuts them to these.
constexpr const char* metrics_log = "metrics.jsonl";
constexpr const char* rollouts_log = "rollouts.jsonl";
constexpr const char* record_log = "certificates.jsonl";
constexpr const char* events_log = "events.out.tfevents.pare";
// The first is the first thing that a run writes: it marks the directory as that of a run.
constexpr const char* logs[] = {events_log, metrics_log, rollouts_log, record_log};
constexpr const char* config_file = "config.toml";
constexpr const char* report_file = "report.html";

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// True if the folder has a file that the program writes there.
bool holds_saved_files(const fs::path& folder) {
  std::error_code none;
  const fs::directory_iterator entries(folder, none);
  return std::any_of(begin(entries), end(entries), [](const fs::directory_entry& entry) {
    return entry.is_regular_file() && is_saved_file(entry.path().filename().string());
  });
}

// Returns the step of the name step-N; none for other names.
std::optional<int64_t> step_of(const std::string& name) {
  int64_t step = 0;
  if (name.size() <= 5) return std::nullopt;
  const char *first = name.data() + 5, *last = name.data() + name.size();
  if (!name.starts_with("step-") || std::from_chars(first, last, step).ptr != last) return std::nullopt;
  return name == cat("step-", step) ? std::optional(step) : std::nullopt;
}

}  // namespace

std::vector<int64_t> checkpoint_steps(const std::string& path) {
  std::vector<int64_t> steps;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(fs::path(path) / "checkpoints", none))
    if (const auto step = step_of(entry.path().filename().string()); step && holds_saved_files(entry.path()))
      steps.push_back(*step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

namespace {

// Returns the name without the mark of the leftovers of a crash.
std::string without_suffix(const std::string& name) {
  return name.ends_with(".tmp") || name.ends_with(".old") ? name.substr(0, name.size() - 4) : name;
}

// Owned (base/file.h), of checkpoints/.
bool is_checkpoint_file(const std::string& path) {
  const size_t slash = path.find('/');
  if (slash == path.npos || !step_of(without_suffix(path.substr(0, slash)))) return false;
  return slash + 1 == path.size() || is_saved_file(path.substr(slash + 1));
}

bool exists(const std::string& path, const char* name) {
  std::error_code none;
  return fs::exists(fs::path(path) / name, none);
}

// Returns `path`, a directory in which a run may start so.
std::string make_directory(const std::string& path, Start start) {
  check_run_directory(path, start);
  std::error_code error;
  fs::create_directories(path, error);
  if (!error) return path;
  const bool wrong_path = error == std::errc::not_a_directory || error == std::errc::no_such_file_or_directory ||
                          error == std::errc::file_exists;
  throw Error(wrong_path ? Exit::usage : Exit::failed, cat(path, ": cannot be created: ", error.message()));
}

// A folder in the place of a file, or the other way round, would be in the way of the file.
void check_names(const fs::path& folder, const std::string& path) {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder / path, none)) {
    const std::string name = path + entry.path().filename().string();
    const bool inside = entry.is_directory() && !entry.is_symlink();
    if (is_saved_file(name + (inside ? "" : "/")))
      fail(entry.path().string(), " is ", inside ? "a folder" : "no folder",
           ", and a run writes another thing of this name; move it, or choose another --out");
    if (inside && is_saved_file(name + "/")) check_names(folder, name + "/");
  }
}

// Throws before the run if a save would fail: a save replaces folders by renaming them, and writes beside them.
void check_folder(const fs::path& folder, const fs::path& parent) {
  const fs::file_status status = fs::symlink_status(folder);
  if (!fs::exists(status)) return;
  if (!fs::is_directory(status))
    fail(folder.string(), " is ", fs::is_symlink(status) ? "a link" : "no folder",
         ", so a run cannot write its own there; move it, or choose another --out");
  struct stat inside, outside;
  if (::stat(folder.c_str(), &inside) != 0 || ::stat(parent.c_str(), &outside) != 0 ||
      inside.st_dev != outside.st_dev || ::access(folder.c_str(), R_OK | W_OK | X_OK) != 0)
    fail(folder.string(), " is on another disk than ", parent.string(),
         " or not writable, so a run cannot replace it; move it, or choose another --out");
}

// Nor is a log written through a link, and a pipe would be waited for.
void check_file(const fs::path& file) {
  const fs::file_status status = fs::symlink_status(file);
  if (fs::exists(status) && !fs::is_regular_file(status))
    fail(file.string(), " is ",
         fs::is_symlink(status)     ? "a link"
         : fs::is_directory(status) ? "a folder"
                                    : "no file",
         ", so a run cannot write its own there; move it, or choose another --out");
}

void check_folders(const fs::path& path, Start start) {
  const std::string model = path / "model", checkpoints = path / "checkpoints";
  for (const char* name : logs) check_file(path / name);
  for (const char* suffix : {"", ".tmp", ".old"}) check_folder(model + suffix, path);
  if (start == Start::replace)
    for (const char* suffix : {"", ".old"}) check_folder(checkpoints + suffix, path);
  else if (fs::exists(checkpoints) && !fs::is_directory(checkpoints))
    fail(checkpoints, " is no folder; move it, or choose another --out");
  check_names(model, "");
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(checkpoints, none))
    if (step_of(without_suffix(entry.path().filename().string()))) {
      check_folder(entry.path(), checkpoints);
      check_names(entry.path(), "");
    }
}

// True if the directory is that of a run, which may have lost a file.
bool is_run(const std::string& path) {
  const std::vector<int64_t> steps = checkpoint_steps(path);
  const auto has_state = [&](int64_t step) {
    return exists(path, cat("checkpoints/step-", step, "/state.json").c_str());
  };
  return exists(path, events_log) || (exists(path, config_file) && std::any_of(steps.begin(), steps.end(), has_state));
}

}  // namespace

void check_run_directory(const std::string& path, Start start) {
  const bool marked = is_run(path), begun = marked && exists(path, config_file);
  const bool checkpoints = !checkpoint_steps(path).empty();
  if (start == Start::resume) {
    if (!checkpoints && !begun)
      fail(path, " holds no run: there is nothing to resume; leave out --resume to begin one there");
    if (!checkpoints && holds_saved_files(fs::path(path) / "model"))
      fail(path, " holds a finished run without a checkpoint: there is nothing to resume; --force replaces it");
    return check_folders(path, start);
  }
  for (const char* name : {config_file, metrics_log, rollouts_log, record_log, report_file, "checkpoints", "model"})
    for (const char* suffix : {"", ".tmp", ".old"})
      if (const std::string file = cat(name, suffix); !marked && exists(path, file.c_str()))
        fail(path, "/", file, " is not of a run (there is no ", events_log,
             "), so it is not replaced; move it, or choose another --out");
  for (const char* name : {config_file, "model"})
    if (start == Start::fresh && (checkpoints || exists(path, name)))
      fail(path, " holds a run already (", checkpoints ? "checkpoints" : name,
           "); choose another --out, --resume to continue it, or --force to replace it");
  check_folders(path, start);
}

std::string folder_of_config(const std::string& path) {
  if (fs::path(path).filename() != config_file) return "";
  const std::string folder = fs::path(path).parent_path().string();
  return is_run(folder) ? folder.empty() ? "." : folder : "";
}

RunCommand command_of_run(const std::string& path) {
  try {
    std::ifstream in(fs::path(path) / config_file, std::ios::binary);
    Config config;
    apply_recorded(config, std::string(std::istreambuf_iterator<char>(in), {}), config_file);
    if (config.trainer.command != RunCommand::any) return config.trainer.command;
    const RunLog log = read_run_log(path);
    if (log.series.contains("train/loss")) return RunCommand::sft;
    return log.series.contains("critic/score/mean") ? RunCommand::train : RunCommand::any;
  } catch (const Error&) {  // who reads the files names what is wrong with them
    return RunCommand::any;
  }
}

RunDirectory::RunDirectory(const std::string& path, Start start) : path_(make_directory(path, start)), lock_(path) {
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
  const std::string checkpoints = cat(path_, "/checkpoints"), model = cat(path_, "/model");
  remove_folder(checkpoints, is_checkpoint_file);
  remove_folder(model, is_saved_file);
  remove_what_crashes_leave();
  std::error_code none;
  fs::remove(fs::path(path_) / report_file, none);  // of another run
  open_logs({});
  fs::create_directories(checkpoints);
  write_file((fs::path(path_) / config_file).string(), to_toml(config));
}

std::vector<std::string> RunDirectory::resume(const Config& config, const RunState& state) {
  remove_what_crashes_leave();
  for (const int64_t step : checkpoint_steps(path_))
    if (step > state.training.step) remove_folder(step_path(step), is_saved_file);  // not whole
  prune(config, state);
  std::vector<std::string> notes;
  std::map<std::string, uint64_t> sizes;
  for (const char* name : logs) {
    const auto size = state.logs.find(name);
    const uint64_t expected = size == state.logs.end() ? 0 : size->second;
    const std::string file = (fs::path(path_) / name).string();
    const ResumedLog log =
        name == events_log
            ? resume_events(file, expected)
            : resume_lines(file, name == metrics_log ? "training/global_step" : "step", expected, state.training.step);
    sizes[name] = log.bytes;
    if (!log.note.empty()) notes.push_back(log.note);
  }
  open_logs(sizes);
  write_file((fs::path(path_) / config_file).string(), to_toml(config));
  return notes;
}

void RunDirectory::remove_what_crashes_leave() {
  remove_leftovers(cat(path_, "/checkpoints"), is_checkpoint_file);
  remove_leftovers(cat(path_, "/model"), is_saved_file);
  std::error_code none;
  for (const char* name : {"/.ranks", "/.ranks.tmp"}) fs::remove(path_ + name, none);
  for (const char* name : {config_file, metrics_log, rollouts_log, record_log, report_file})
    fs::remove(cat(path_, "/", name, ".tmp"), none);
  std::set<int64_t> steps;
  for (const auto& entry : fs::directory_iterator(fs::path(path_) / "checkpoints", none)) {
    const std::string name = entry.path().filename().string();
    if (const auto step = step_of(without_suffix(name)); step && !step_of(name)) steps.insert(*step);
  }
  for (const int64_t step : steps) remove_leftovers(step_path(step), is_saved_file);
}

void RunDirectory::open_logs(const std::map<std::string, uint64_t>& sizes) {
  for (const char* name : logs) {
    const auto size = sizes.find(name);
    logs_.try_emplace(name, (fs::path(path_) / name).string(), size == sizes.end() ? 0 : size->second);
  }
  AppendFile& events = logs_.at(events_log);
  if (events.size() == 0) events.append(tensorboard_header(unix_time()));
}

std::string RunDirectory::record_problem(const std::string& chain) const {
  const std::string path = (fs::path(path_) / record_log).string();
  try {
    return read_record(path).back().chain == chain ? "" : cat(path, " does not end at the checkpoint");
  } catch (const Error& e) {
    return e.what();
  } catch (const nlohmann::json::exception& e) {
    return cat(path, ": ", json_error(e));
  }
}

void RunDirectory::record(const RecordLine& line) { logs_.at(record_log).append(line.text + "\n"); }

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
    for (const int32_t id : ids) pieces.push_back(session.tokenizer->piece(id));
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

bool RunDirectory::saved(int64_t step) const {
  const std::vector<int64_t> steps = checkpoint_steps(path_);
  return std::find(steps.begin(), steps.end(), step) != steps.end();
}

void RunDirectory::check_in_place(const std::string& what) const {
  if (!in_place())
    throw Error(Exit::failed, cat(path_, ": the run's folder was moved or removed during the run, so ", what,
                                  " cannot be saved; if it was moved, `pare ... FOLDER/config.toml --resume` continues "
                                  "from its last checkpoint"));
}

void RunDirectory::save(const Session& session, Training& training, RunState state) {
  check_in_place(cat("step ", state.training.step));
  for (auto& [name, log] : logs_) {
    log.sync();
    state.logs[name] = log.size();
  }
  save_checkpoint(step_path(state.training.step), session, training, state);
  prune(session.config, state);
}

void RunDirectory::prune(const Config& config, const RunState& state) {
  const auto keep = static_cast<size_t>(config.trainer.max_actor_ckpt_to_keep);
  const std::vector<int64_t> steps = checkpoint_steps(path_);
  for (size_t i = 0; keep > 0 && i + keep < steps.size(); i++)
    if (steps[i] != state.best_step) remove_folder(step_path(steps[i]), is_saved_file);
}

void RunDirectory::save_model(const Session& session) const {
  check_in_place("the model");
  pare::save_model((fs::path(path_) / "model").string(), session);
}

}  // namespace pare
