#include "run/training.h"

#include "run/evaluate.h"
#include "run/grpo_training.h"
#include "run/sft_training.h"

namespace pare {

Training::Training(Session& s, bool samples)
    : session_(s),
      config_(s.config),
      rollout_(
          samples ? std::make_unique<Rollout>(s.sampler(), s.rollout_limits(), s.kv, s.rollout_scratch(), s.model.get())
                  : nullptr),
      learner_(*s.model, s.gradients, s.optimizer, s.activations, s.learner_options()),
      student_(s.sparse
                   ? std::make_unique<Learner>(*s.sparse, s.gradients, s.optimizer, s.activations, student_options())
                   : nullptr),
      prompts_(s.tokenizer ? s.training_task().size() : 1, s.config.data.shuffle,
               static_cast<uint64_t>(s.config.trainer.seed)) {}

// The sampler's adapters read as many blocks as the sampler, which may adapt them; a plan: all there are.
LearnerOptions Training::student_options() const {
  LearnerOptions options = session_.student_options();
  if (config_.rollout.kv.adapts())
    options.blocks->budget = [this](int64_t n) { return session_.device.planning() ? n : rollout_->block_budget()(n); };
  return options;
}

Metrics Training::evaluate() {
  expect(rollout_ != nullptr, "an evaluation of a run that never validates");
  return pare::evaluate(session_, *rollout_, step_ + drawn_, [&](const EvaluationProgress& p) {
    if (progress) progress("evaluation", p.finished, p.responses);
  });
}

TrainingState Training::state() const {
  TrainingState state{.step = step_,
                      .updates = learner_.steps(),
                      .skipped = learner_.skipped(),
                      .prompts = prompts_.cursor(),
                      .blocks = {},
                      .drawn = drawn_};
  if (student_) {
    state.student_updates = student_->steps();
    state.student_skipped = student_->skipped();
  }
  if (rollout_ && config_.rollout.kv.adapts()) state.blocks = rollout_->block_budget().steps();
  return state;
}

bool Training::at(const TrainingState& s) const {
  return learner_.steps() == s.updates && (!student_ || student_->steps() == s.student_updates);
}

void Training::resume(const TrainingState& state) {
  step_ = state.step;
  drawn_ = state.drawn;
  if (!state.blocks.empty()) rollout_->set_block_budget(BlockBudget(state.blocks));
  prompts_.seek(state.prompts);
  learner_.set_steps(state.updates, state.skipped);
  if (student_) student_->set_steps(state.student_updates, state.student_skipped);
}

void Training::begin_step() {
  Comm& comm = session_.device.comm;
  comm.step = ++step_;
  waited_ = comm.waited;
  session_.ledger.clear();
  record_ = {};
}

void Training::end_step(Metrics& metrics) {
  {
    const Timer timer(metrics, "timing_s/hash");
    const Phase phase(session_.device, "hash");
    record_.weights = weights_hash(session_);
  }
  session_.set_memory(metrics);
  Comm& comm = session_.device.comm;
  if (config_.learner.shards == 1) return;
  int64_t sent = 0;
  for (const auto& phase : session_.ledger.phases) sent += session_.ledger.total(phase.first).sent;
  metrics.set("comm/bytes", static_cast<double>(comm.sum(sent)));
  metrics.set("comm/seconds", comm.waited - waited_);
}

BatchLimits Training::batch_limits(int64_t members) const {
  return {.groups = config_.data.train_batch_size,
          .members = members,
          .prefix = config_.data.max_prompt_length,
          .tokens = config_.data.max_response_length};
}

void resolve_steps(Config& config, TrainingKind kind) {
  if (config.trainer.total_training_steps > 0) return;
  Config one = config;  // rank, each for itself
  one.trainer.n_gpus_per_node = one.trainer.nnodes = 0;
  Session session(one, table_null, true, {}, true, self());
  make_training(kind, session);  // leaves rows out
  const int64_t rows = session.training_task().size(), batch = config.data.train_batch_size;
  if (rows < batch)
    fail("trainer.total_epochs = ", config.trainer.total_epochs, ": the training set has ", rows,
         " rows, less than a batch; set data.train_batch_size to at most that, or trainer.total_training_steps");
  config.trainer.total_training_steps = config.trainer.total_epochs * (rows / batch);
}

std::unique_ptr<Training> make_training(TrainingKind kind, Session& session) {
  if (kind == TrainingKind::grpo) return std::make_unique<GrpoTraining>(session);
  return std::make_unique<SftTraining>(session);
}

}  // namespace pare
