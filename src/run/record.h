// certificates.jsonl: what a run did, in hashes, so that anyone who computes a step again can tell whether it has the
// same bits, and if not, where it begins to differ.  Nothing in it depends on threads, ranks, instruction set, batches
// or clocks.
//
// A line is a JSON object.  Its last member, `chain`, is the XXH128 of the text before it, in which `previous` is the
// chain of the line before: a line cannot be changed, removed or added without every later one.  The first line is the
// start: configuration, inputs and weights; a run whose record was lost, or was never made, has another start where it
// goes on.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "rl/metrics.h"
#include "rl/types.h"
#include "rollout/scheduler.h"
#include "run/inputs.h"

namespace pare {

struct Session;

// A step by stages, as far as bits go.
struct StepRecord {
  uint64_t prompts = 0;                  // of names (uids) and tokens of the prompts, in the order in which they came
  std::vector<uint64_t> uids = {};       // of the responses, in that order
  std::vector<uint64_t> responses = {};  // response_hash() of each
  std::vector<double> scores = {};       // of each; none in next-token training
  uint64_t advantages = 0;               // of rewards and advantages of the samples
  uint64_t weights = 0;                  // weights_hash() after the step

  void add_prompt(const Request& request);
  void add_response(uint64_t uid, std::span<const int32_t> tokens, std::span<const float> logprobs);
  void set_advantages(std::span<const Trajectory> samples);
};
uint64_t response_hash(uint64_t uid, std::span<const int32_t> tokens, std::span<const float> logprobs);
// Hashes the trained parameters, adapters counted behind the model (Parameters::hash).  All ranks call it.
uint64_t weights_hash(const Session& session);

// True for a metric whose value the bits of the run decide: not clocks, memory, traffic or work done twice.
bool is_recorded(std::string_view metric);

struct RecordLine {
  std::string text, chain;  // of text: without the end of the line
};
// The start, after `step` steps; drawn: TrainingState::drawn.
RecordLine start_line(const Session& session, int64_t step, int64_t drawn, const std::vector<Input>& inputs,
                      const std::string& previous);
// The line of a logged step; a validation before the first step has no `record`.  `changed`: inputs that were
// accepted as they are now (--accept-changed) since the line before.
RecordLine step_line(const Metrics& metrics, const StepRecord* record, const std::vector<Input>& changed,
                     const std::string& previous);

// A line that was read back.
struct Recorded {
  int64_t step = 0;
  bool start = false;
  std::string chain;
  nlohmann::json values;
};
// The lines of a file from its last start on; a line without its end (a run that still goes, or was killed) is left
// out.  Throws Error(failed) naming the line at which the chain does not hold, and Error(usage) if the file is
// not there.
std::vector<Recorded> read_record(const std::string& path);

}  // namespace pare
