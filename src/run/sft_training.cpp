#include "run/sft_training.h"

#include <algorithm>

#include "rl/loss.h"
#include "rl/schedule.h"
#include "rl/sft.h"
#include "run/certificate.h"

namespace pare {

SftTraining::SftTraining(Session& s) : Training(s, (s.val || !s.tokenizer) && validates(s.config)) {
  if (s.config.learner.attention == LearnerAttention::replay)
    fail("learner.attention = \"replay\" replays rollouts, next-token training has none; set learner.attention=dense");
  if (s.sparse)
    fail("distill.enable trains what samples, next-token training has no samples; set distill.enable=false");
  if (!s.train || s.config.data.task != "jsonl") return;  // a teacher's draws are not known before the step
  Rng rng(rng_key(0, RngStream::data, 0));
  for (int64_t row = 0; row < s.train->size(); row++) completion(s.train->problem(row), 0, rng);
}

// What the teacher writes, and its end (Session::end).
std::vector<int32_t> SftTraining::completion(const Problem& problem, double ramp, Rng& rng) const {
  const std::string text = session_.train->teach(problem, ramp, rng);
  std::vector<int32_t> ids;
  try {
    ids = session_.tokenizer->encode(text);
  } catch (const Error& e) {
    fail(problem.where, ": ", e.what());
  }
  ids.push_back(session_.end);
  if (static_cast<int64_t>(ids.size()) > config_.data.max_response_length)
    fail(problem.where, ": the completion has ", ids.size(), " tokens, data.max_response_length is ",
         config_.data.max_response_length);
  return ids;
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
  const uint64_t key = rng_key(seed, RngStream::data, static_cast<uint64_t>(step_));
  std::vector<Group> groups;
  std::vector<uint64_t> uids;
  for (int64_t i = 0; i < c.data.train_batch_size; i++) {
    const auto [epoch, row] = prompts_.next();
    const Problem problem = session_.train->problem(row);
    uids.push_back(sequence_uid(static_cast<uint64_t>(epoch), static_cast<uint64_t>(row), 0, 0));
    Rng rng(key, static_cast<uint64_t>(i));
    groups.push_back({session_.encode_prompt(problem), {{completion(problem, ramp, rng)}}, i % c.learner.slots});
  }
  const double lr = learning_rate(c.actor.optim, step_, c.trainer.total_training_steps);
  const TokenOuts out =
      sft_step(learner_, groups, optimizer_options(c.actor, lr, seed), metrics, [&](size_t done, size_t all) {
        if (progress) progress("update", static_cast<int64_t>(done), static_cast<int64_t>(all));
      });
  Certificate certificate;
  for (size_t i = 0; i < uids.size(); i++) {
    const auto logprob = out.of(out.logprob, i);
    certificate.add(uids[i], std::vector<float>(logprob.begin(), logprob.end()));
  }
  metrics.set_text("certificate", certificate.text());
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
  for (size_t i = 0; i < groups.size(); i++) groups[i].slot = static_cast<int64_t>(i) % config_.learner.slots;
  Metrics metrics;
  sft_step(learner_, groups, optimizer_options(config_.actor, config_.actor.optim.lr, 1), metrics, {});
}

void SftTraining::largest_batches() {
  learner_.plan(batch_limits(1), {.policy = PolicyLoss::nll});
  if (rollout_)  // of evaluations
    Rollout::plan(*session_.model, session_.rollout_limits(), session_.rollout_scratch());
}

}  // namespace pare
