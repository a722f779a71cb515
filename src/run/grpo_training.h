// GRPO as a run: prompts of the training set, scores of its verifier.
#pragma once
#include <map>

#include "rl/grpo.h"
#include "run/certificate.h"
#include "run/training.h"

namespace pare {

class GrpoTraining : public Training {
 public:
  explicit GrpoTraining(Session& session);

  Metrics step() override;
  // On the null table the groups, which are all alike, are not all there: few give the ledger of all, exactly.
  void worst_case_step() override;
  void largest_batches() override;
  std::vector<SampleText> texts() const override;
  FileSums save_files(const std::string& folder) const override;
  void load_files(const std::string& folder) override;
  const std::vector<Trajectory>& samples() const { return grpo_.samples(); }  // of the last step

  PrefixCache& prefix_cache() { return cache_; }

  // For an algorithm with other prompts or scores.
  GrpoKeys keys() const;
  GrpoEngine engine();
  std::vector<Request> next_prompts();

 private:
  int64_t plan_period() const;
  void worst_case_step(int64_t groups, int64_t planned);  // of so many groups; planned: GrpoRun::planned
  std::vector<double> scores(std::span<const Request> requests, std::span<const Completion> completions);

  std::unique_ptr<Adapters> reference_adapters_;  // where the initial model has some that are not 0
  const std::unique_ptr<Model> reference_;        // the initial model, where a KL needs it
  const Tensor sampler_states_;                   // GrpoEngine::sampler_states
  PrefixCache cache_;                             // empty: RPO is off, or no row was visited
  Grpo grpo_;
  std::vector<Problem> problems_;  // of the last prompts
  std::vector<PromptRow> rows_;    // of the same
  struct Grade {
    std::string extracted, answer, problem;
  };
  std::map<uint64_t, Grade> grades_;  // of the responses of the last step, by uid
  Certificate certificate_;           // of the same
  int64_t counted_restarts_ = 0;      // of the reward command, in metrics so far
};

}  // namespace pare
