#include "rl/training.h"

#include "rl/evaluate.h"
#include "rl/sft.h"
#include "rl/trainer.h"

namespace pare {

Training::Training(Session& s)
    : session_(s),
      config_(s.config),
      rollout_(*s.model, s.rollout_limits(), s.kv, s.activations),
      learner_(*s.model, s.gradients, s.optimizer, s.activations, s.learner_options()),
      prompts_(s.training_task().size(), s.config.data.shuffle, static_cast<uint64_t>(s.config.trainer.seed)) {}

Metrics Training::evaluate() {
  return pare::evaluate(session_, rollout_, step_, [&](const RolloutStats& s) {
    if (progress) progress("evaluation", s.finished, s.completions);
  });
}

void Training::resume(const TrainingState& state) {
  step_ = state.step;
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
  if (kind == TrainingKind::grpo) return std::make_unique<Trainer>(session);
  return std::make_unique<Sft>(session);
}

}  // namespace pare
