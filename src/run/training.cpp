#include "run/training.h"

#include "run/evaluate.h"
#include "run/grpo_training.h"
#include "run/sft_training.h"

namespace pare {

Training::Training(Session& s, bool samples)
    : session_(s),
      config_(s.config),
      rollout_(samples ? std::make_unique<Rollout>(*s.model, s.rollout_limits(), s.kv, s.activations) : nullptr),
      learner_(*s.model, s.gradients, s.optimizer, s.activations, s.learner_options()),
      prompts_(s.tokenizer ? s.training_task().size() : 1, s.config.data.shuffle,
               static_cast<uint64_t>(s.config.trainer.seed)) {}

Metrics Training::evaluate() {
  expect(rollout_ != nullptr, "an evaluation of a run that never validates");
  return pare::evaluate(session_, *rollout_, step_, [&](const RolloutStats& s) {
    if (progress) progress("evaluation", s.finished, s.completions);
  });
}

TrainingState Training::state() const {
  TrainingState state{step_, learner_.steps(), prompts_.cursor(), {}};
  if (rollout_ && config_.rollout.kv.adapts()) state.blocks = rollout_->block_budget().steps();
  return state;
}

void Training::resume(const TrainingState& state) {
  step_ = state.step;
  if (!state.blocks.empty()) rollout_->set_block_budget(BlockBudget(state.blocks));
  prompts_.seek(state.prompts);
  learner_.set_steps(state.updates);
}

BatchLimits Training::batch_limits(int64_t members) const {
  return {.groups = config_.data.train_batch_size,
          .members = members,
          .prefix = config_.data.max_prompt_length,
          .tokens = config_.data.max_response_length};
}

std::unique_ptr<Training> make_training(TrainingKind kind, Session& session) {
  if (kind == TrainingKind::grpo) return std::make_unique<GrpoTraining>(session);
  return std::make_unique<SftTraining>(session);
}

}  // namespace pare
