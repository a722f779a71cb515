// A run's directory: config.toml (resolved), logs, checkpoints/step-N/ and, at the end, model/.
#pragma once
#include <map>
#include <string>

#include "base/file.h"
#include "run/checkpoint.h"

namespace pare {

// Handling of a run that is already in the directory: it is an error, it is replaced, or it is continued.  A run
// without a checkpoint is continued from its beginning; a directory without a run is an error.  Files that a run does
// not write keep their place and name in all cases.
enum class Start { fresh, replace, resume };

// An Error if `start` does not allow a run to be written to `path`, or something there would keep it from being saved.
void check_run_directory(const std::string& path, Start start);

// The folder of the run whose config.toml this is, wherever it was moved; empty: it is no such file.
std::string folder_of_config(const std::string& path);

// The command of the run in the directory, inferred from its metrics if an older program wrote it.  any: unknown.
RunCommand command_of_run(const std::string& path);

// Steps of the run's checkpoints, ascending; what a crash left (step-3.tmp) is none, nor is a folder that holds a
// user's files alone.
std::vector<int64_t> checkpoint_steps(const std::string& path);

class RunDirectory {
 public:
  // Makes the directory, if need be, and keeps other processes out of it.  Nothing in it changes before begin() or
  // resume().
  RunDirectory(const std::string& path, Start start);

  const std::string& path() const { return path_; }
  // The last whole checkpoint, where one is to be continued; else empty.
  const std::string& checkpoint() const { return checkpoint_; }
  // Newer ones that are not whole, and why.
  const std::vector<std::string>& damaged() const { return damaged_; }

  void begin(const Config& config);  // without the run that was here before
  // Restores the directory as of the checkpoint.  Returns a note for each log that has changed since.
  std::vector<std::string> resume(const Config& config, const RunState& state);

  // Why certificates.jsonl does not go on from the line with this chain; empty: it does.
  std::string record_problem(const std::string& chain) const;
  void record(const RecordLine& line);                                 // another line of it
  void log(const Metrics& metrics);                                    // metrics.jsonl, events.out.tfevents.pare
  void log_samples(const Session& session, const Training& training);  // rollouts.jsonl: of the last step
  // The path still leads to the folder.  If not, saving is an Error.
  bool in_place() const { return lock_.in_place(); }
  // checkpoints/step-N, which knows how long the logs are now; then those that need not be kept are removed.
  void save(const Session& session, Training& training, RunState state);
  bool saved(int64_t step) const;
  void save_model(const Session& session) const;  // model/

 private:
  void open_logs(const std::map<std::string, uint64_t>& sizes);
  void remove_what_crashes_leave();
  void prune(const Config& config, const RunState& state);
  void check_in_place(const std::string& what) const;
  std::string step_path(int64_t step) const;

  const std::string path_;
  const FolderLock lock_;
  std::string checkpoint_;
  std::vector<std::string> damaged_;
  std::map<std::string, AppendFile> logs_;
};

}  // namespace pare
