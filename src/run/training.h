// Interface of GRPO and next-token training: successive steps, and the state that one leaves to the next.
#pragma once
#include <functional>
#include <memory>

#include "base/file.h"
#include "rl/metrics.h"
#include "rl/types.h"
#include "run/record.h"
#include "run/session.h"

namespace pare {

// State between two steps besides parameters, moments and files: the step names every random draw.
struct TrainingState {
  int64_t step = 0;                          // steps done
  int64_t updates = 0;                       // of the optimizer
  int64_t student_updates = 0;               // of that of the sampler's adapters
  int64_t skipped = 0, student_skipped = 0;  // updates dropped in a row, up to now (trainer.skip_nonfinite)
  PromptStream::Cursor prompts;
  std::vector<BlockBudget::Step> blocks;  // rollout.kv.blocks.acceptance_target: the budget of the next step; else none
  int64_t drawn = 0;  // steps of the runs before this one (--from): the draws of a step are those of step + drawn
  bool operator==(const TrainingState&) const = default;
};

// A response as people read it.
struct SampleText {
  const Trajectory& sample;
  std::string problem;  // the row's text, without chat format
  std::string prompt, response, extracted, answer;
};

class Training {
 public:
  virtual ~Training() = default;
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  // One step, and what happened in it.
  virtual Metrics step() = 0;
  // A step in which every prompt and response has its greatest length: what a plan runs.
  virtual void worst_case_step() = 0;
  // On the null table: the largest batches that any step or evaluation makes.
  virtual void largest_batches() = 0;
  virtual std::vector<SampleText> texts() const { return {}; }  // the responses of the last step, if it samples any
  virtual Metrics evaluate();  // run/evaluate.h; session.val is there, and the run samples or validates

  const StepRecord& record() const { return record_; }  // of the last step
  int64_t steps() const { return step_; }
  Learner& learner() { return learner_; }
  Learner* student() { return student_.get(); }  // of session.sparse; null: there is none

  // Only at the border of a step.  Parameters and moments are set at the session's model and the learner.
  TrainingState state() const;
  bool at(const TrainingState& state) const;  // parameters and moments are those of this border
  void resume(const TrainingState& state);
  // Saves and loads further files of a checkpoint's folder.
  virtual FileSums save_files(const std::string&) const { return {}; }
  virtual void load_files(const std::string&) {}

  // Reports progress: stage, done, all.  While the stage is "rollout" nothing has changed since
  // the last step but what state() says: an exception thrown from here then loses no finished step.
  std::function<void(const char* stage, int64_t done, int64_t all)> progress;

 protected:
  // `samples`: there is a rollout, and memory for it.
  Training(Session& session, bool samples);
  BatchLimits batch_limits(int64_t members) const;
  LearnerOptions student_options() const;
  void begin_step();
  void end_step(Metrics& metrics);  // hash of the weights, memory, and what ranks sent one another

  Session& session_;
  const Config& config_;
  const std::unique_ptr<Rollout> rollout_;  // absent: nothing samples
  Learner learner_;
  const std::unique_ptr<Learner> student_;
  PromptStream prompts_;
  StepRecord record_;
  int64_t step_ = 0, drawn_ = 0;
  double waited_ = 0;  // Comm::waited at its beginning
};

// The run validates, before its first step or between steps.
inline bool validates(const Config& c) { return c.trainer.test_freq > 0 || c.trainer.val_before_train; }
// Next-token training validates by the loss of data.val_files unless a verifier grades responses to them.
inline bool validates_by_loss(const Config& c) { return c.data.task == "jsonl" && c.data.reward.empty(); }

enum class TrainingKind { grpo, sft };
std::unique_ptr<Training> make_training(TrainingKind kind, Session& session);

// Sets trainer.total_training_steps if only trainer.total_epochs is given, as verl counts: epochs x floor(rows /
// batch). Batches run on into the next epoch; only rows at the end of the run are left out.
void resolve_steps(Config& config, TrainingKind kind);

}  // namespace pare
