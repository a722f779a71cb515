// Whether a run is what its folder says: the chain of certificates.jsonl, and steps that are computed again.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "run/record.h"
#include "run/training.h"

namespace pare {

// A response as rollouts.jsonl has it, or as it was computed; those of a step by uid.
struct Sampled {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  double advantage = 0;
};
using SampledStep = std::map<std::string, Sampled>;

// All ranks make the same calls.  A difference is an Error(failed) that names file or stage and both values; a run that
// cannot be audited is an Error(usage).
class Audit {
 public:
  // Reads certificates.jsonl and config.toml of the folder.  `overrides` are laid over the configuration: keys that
  // change no bit, and those that say where files lie.
  Audit(const std::string& run, const std::vector<std::string>& overrides);

  const Config& config() const { return config_; }
  TrainingKind kind() const;
  Audit(const Audit&) = delete;
  int64_t first() const { return start_.step + 1; }
  int64_t last() const { return lines_.back().step; }
  const std::string& chain() const { return lines_.back().chain; }

  // Compares configuration, inputs and, up to step `last`, which must be one of the record, metrics.jsonl and
  // rollouts.jsonl with certificates.jsonl.  `complete`: metrics.jsonl must have every step.
  void compare_files(int64_t last, bool complete) const;
  // Reads all of every checkpoint, and compares it with its line.
  void compare_checkpoints() const;

  // Computes from the last whole checkpoint before `step`, or the start, up to it, and compares every step.  `say`
  // gets a line for each.
  void recompute(int64_t step, Session& session, Training& training,
                 const std::function<void(const std::string&)>& say) const;

 private:
  const Recorded& line(int64_t step) const;
  std::string checkpoint_problem(int64_t step) const;
  void check_base(const Session& session) const;
  void check_weights(const std::string& path, const Recorded& at, const Session& session) const;
  int64_t begin(int64_t step, Session& session, Training& training,
                const std::function<void(const std::string&)>& say) const;
  void compare_metrics(int64_t last, bool complete) const;
  void compare_rollouts(int64_t last) const;
  void compare_inputs(int64_t last) const;
  void compare_step(const Recorded& recorded, const SampledStep& old, const Training& training,
                    const Metrics& metrics) const;

  const std::string run_;
  const std::vector<Recorded> lines_;
  const Recorded& start_;
  Config own_;     // of config.toml
  Config config_;  // with the overrides
};

}  // namespace pare
