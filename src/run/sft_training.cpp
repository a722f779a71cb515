#include "run/sft_training.h"

#include <algorithm>

#include "rl/loss.h"
#include "rl/schedule.h"
#include "rl/sft.h"
#include "run/certificate.h"

namespace pare {

// Says how a completion is too long; empty if it is not.
static std::string excess(const Config& c, const std::vector<int32_t>& completion) {
  const int64_t most = c.data.max_response_length;
  if (std::ssize(completion) <= most) return "";
  return cat("the completion has ", completion.size(), " tokens, data.max_response_length is ", most);
}

// The same session, without the rows whose completions are too long, before anything counts rows.
static Session& with_fitting_completions(Session& s) {
  if (s.config.data.task != "jsonl") return s;  // a teacher's draws are not known before the step
  for (Task* task : {s.train.get(), validates_by_loss(s.config) ? s.val.get() : nullptr}) {
    if (!task) continue;
    Rng rng(rng_key(0, RngStream::data, 0));
    int64_t turns = 0;
    s.keep_fitting(*task, [&](const Problem& p) {
      const auto of_assistant = [](const Message& m) { return m.role == "assistant"; };
      turns += std::any_of(p.messages.begin(), p.messages.end(), of_assistant);
      return excess(s.config, s.encode_completion(p, task->teach(p, 0, rng)));
    });
    if (turns > 0 && task == s.train.get())
      s.notes.push_back(cat(turns,
                            " training rows have several turns of the assistant: the last is learnt, the others "
                            "are its context"));
  }
  return s;
}

SftTraining::SftTraining(Session& s)
    : Training(with_fitting_completions(s), validates(s.config) && !validates_by_loss(s.config)) {
  if (s.config.learner.attention == LearnerAttention::replay)
    fail("learner.attention = \"replay\" replays rollouts, next-token training has none; set learner.attention=dense");
  if (s.sparse)
    fail("distill.enable trains what samples, next-token training has no samples; set distill.enable=false");
}

// Returns a group of the problem and the teacher's completion.
Group SftTraining::group(const Task& task, const Problem& problem, double ramp, Rng& rng, int64_t shard) const {
  std::vector<int32_t> completion = session_.encode_completion(problem, task.teach(problem, ramp, rng));
  if (const std::string what = excess(config_, completion); !what.empty()) fail(problem.where, ": ", what);
  return {session_.encode_prompt(problem), {{std::move(completion)}}, shard};
}

Metrics SftTraining::evaluate() {
  if (!validates_by_loss(config_)) return Training::evaluate();
  Metrics metrics;
  const Timer timer(metrics, "timing_s/testing");
  const Phase phase(session_.device, "val");
  const Task& task = *session_.val;
  Rng rng(rng_key(0, RngStream::data, 0));  // rows of a file need no draws
  Summary loss;
  for (int64_t begin = 0; begin < task.size(); begin += config_.data.train_batch_size) {
    const int64_t end = std::min(begin + config_.data.train_batch_size, task.size());
    std::vector<Group> groups;
    for (int64_t row = begin; row < end; row++)
      groups.push_back(group(task, task.problem(row), 0, rng, row % config_.learner.shards));
    const TokenOuts out =
        Learner::logprobs(*session_.model, session_.activations, groups, 1, session_.learner_options());
    for (const double logprob : out.logprob) loss.add(-logprob);
    if (progress) progress("evaluation", end, task.size());
  }
  metrics.set("val/loss", loss.mean());
  return metrics;
}

Metrics SftTraining::step() {
  const Config& c = config_;
  Metrics metrics;
  begin_step();
  metrics.set("training/global_step", static_cast<double>(step_));
  const Phase phase(session_.device, "learner");
  const Timer timer(metrics, "timing_s/step");

  const double ramp_steps = c.data.noise_ramp * static_cast<double>(c.trainer.total_training_steps);
  const double ramp = ramp_steps > 0 ? std::min(1.0, static_cast<double>(step_) / ramp_steps) : 1.0;
  const auto seed = static_cast<uint64_t>(c.trainer.seed);
  const uint64_t key = rng_key(seed, RngStream::data, static_cast<uint64_t>(step_ + drawn_));
  std::vector<Group> groups;
  std::vector<uint64_t> uids;
  for (int64_t i = 0; i < c.data.train_batch_size; i++) {
    const auto [epoch, row] = prompts_.next();
    const Problem problem = session_.train->problem(row);
    uids.push_back(sequence_uid(static_cast<uint64_t>(epoch), static_cast<uint64_t>(row), 0, 0));
    Rng rng(key, static_cast<uint64_t>(i));
    groups.push_back(group(*session_.train, problem, ramp, rng, i % c.learner.shards));
  }
  const double lr = learning_rate(c.actor.optim, step_, c.trainer.total_training_steps);
  const TokenOuts out = sft_step(learner_, groups, optimizer_options(c.actor, lr, seed, c.trainer.skip_nonfinite),
                                 metrics, [&](size_t done, size_t all) {
                                   if (progress)
                                     progress("update", static_cast<int64_t>(done), static_cast<int64_t>(all));
                                 });
  Certificate certificate;
  for (size_t i = 0; i < uids.size(); i++) {
    const auto logprob = out.of(out.logprob, i);
    const std::vector<float> narrow(logprob.begin(), logprob.end());
    certificate.add(uids[i], narrow);
    record_.add_prompt({groups[i].prefix, {uids[i]}, 0});
    record_.add_response(uids[i], groups[i].members[0].tokens, narrow);
  }
  certificate.write(metrics);
  metrics.set("flops/learner", static_cast<double>(session_.flops("learner")));
  end_step(metrics);
  return metrics;
}

void SftTraining::worst_case_step() {
  session_.ledger.clear();
  step_++;
  const Phase phase(session_.device, "learner");
  const std::vector<int32_t> prompt(config_.data.max_prompt_length, session_.eos[0]);
  const Member m{std::vector<int32_t>(config_.data.max_response_length, session_.eos[0])};
  std::vector<Group> groups(config_.data.train_batch_size, Group{prompt, {m}});
  for (size_t i = 0; i < groups.size(); i++) groups[i].shard = static_cast<int64_t>(i) % config_.learner.shards;
  Metrics metrics;
  sft_step(learner_, groups, optimizer_options(config_.actor, config_.actor.optim.lr, 1), metrics, {});
}

void SftTraining::largest_batches() {
  learner_.plan(batch_limits(1), LossSpec());
  if (validates(config_) && validates_by_loss(config_))
    Learner::plan_logprobs(*session_.model, session_.activations, batch_limits(1), session_.learner_options());
  if (rollout_)  // of evaluations
    Rollout::plan(*session_.model, session_.rollout_limits(), session_.rollout_scratch());
}

}  // namespace pare
