// Where a run writes: the resolved configuration, one line of metrics a step, and the model at the end.
#pragma once
#include <fstream>
#include <string>

#include "rl/metrics.h"
#include "rl/trainer.h"

namespace pare {

class RunDirectory {
 public:
  // Creates `path`.  A directory that holds a run is an error unless `force`; then the run in it is replaced.
  RunDirectory(const std::string& path, const Config& config, bool force);
  void log(const Metrics& metrics);               // metrics.jsonl, events.out.tfevents.pare
  void log_samples(const Trainer& trainer);       // rollouts.jsonl: the responses of the last step
  void save_model(const Session& session) const;  // model/: a Hugging Face folder
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  std::ofstream metrics_, events_;
};

}  // namespace pare
