#include "run/evaluate.h"

#include <algorithm>

namespace pare {

Evaluation::Evaluation(const Session& session, const Task& task, Rollout& rollout, int64_t step, bool dense,
                       const std::function<void(const RolloutStats&)>& progress) {
  const Config& config = session.config;
  const ValKeys& v = config.rollout.val_kwargs;
  const Phase phase(session.model->device, "val");
  std::vector<Request> requests;
  for (int64_t row = 0; row < task.size(); row++) {
    EvaluatedProblem p;
    p.problem = task.problem(row);
    requests.push_back({session.encode_prompt(p.problem), {}, static_cast<int>(config.data.max_response_length)});
    for (int64_t k = 0; k < v.n; k++)
      requests.back().uids.push_back(sequence_uid(0, static_cast<uint64_t>(row), 0, static_cast<uint64_t>(k)));
    p.prompt_tokens = static_cast<int64_t>(requests.back().prompt.size());
    problems_.push_back(std::move(p));
  }
  const Sampling sampling{
      .temperature = static_cast<float>(v.temperature),
      .top_k = static_cast<int32_t>(v.top_k),
      .top_p = static_cast<float>(v.top_p),
      .key = rng_key(static_cast<uint64_t>(config.trainer.seed), RngStream::eval, static_cast<uint64_t>(step)),
      .eos = session.eos,
      .stop = session.stop,
      .dense = dense};
  std::vector<Completion> completions = rollout.generate(requests, sampling, progress);
  std::vector<Problem> problems;
  for (const EvaluatedProblem& p : problems_) problems.push_back(p.problem);
  std::vector<Reward> rewards = session.rewards(task, problems, completions);
  for (size_t i = 0; i < completions.size(); i++) {
    Completion& c = completions[i];
    const std::string text = session.response_text(c);
    problems_[c.request].responses.push_back({std::move(c.tokens), text, std::move(rewards[i]), c.finish});
  }
  for (EvaluatedProblem& p : problems_) {
    std::vector<std::optional<std::string>> answers;
    for (const EvaluatedResponse& r : p.responses)
      answers.push_back(r.reward.parsed ? std::optional(r.reward.extracted) : std::nullopt);
    p.majority = pare::majority(answers);
  }
}

Estimate Evaluation::over_problems(const std::function<double(const EvaluatedProblem&)>& value) const {
  std::vector<double> values;
  for (const EvaluatedProblem& p : problems_) values.push_back(value(p));
  return estimate(values);
}

Estimate Evaluation::mean() const {
  return over_problems([](const EvaluatedProblem& p) {
    Summary score;
    for (const EvaluatedResponse& r : p.responses) score.add(r.reward.score);
    return score.mean();
  });
}

Estimate Evaluation::best(int64_t k) const {
  return over_problems([k](const EvaluatedProblem& p) {
    std::vector<double> scores;
    for (const EvaluatedResponse& r : p.responses) scores.push_back(r.reward.score);
    return best_at_k(scores, k);
  });
}

Estimate Evaluation::majority() const {
  return over_problems([](const EvaluatedProblem& p) { return p.responses[p.majority].reward.score; });
}

std::vector<double> Evaluation::lengths() const {
  std::vector<double> lengths;
  for (const EvaluatedProblem& p : problems_)
    for (const EvaluatedResponse& r : p.responses) lengths.push_back(static_cast<double>(r.tokens.size()));
  std::sort(lengths.begin(), lengths.end());
  return lengths;
}

int64_t Evaluation::truncated() const {
  int64_t count = 0;
  for (const EvaluatedProblem& p : problems_)
    for (const EvaluatedResponse& r : p.responses) count += !r.finished();
  return count;
}

int64_t Evaluation::unparsed() const {
  int64_t count = 0;
  for (const EvaluatedProblem& p : problems_)
    for (const EvaluatedResponse& r : p.responses) count += !r.reward.parsed;
  return count;
}

std::vector<int64_t> default_ks(int64_t n) {
  std::vector<int64_t> ks;
  for (int64_t k = 1; k < n; k *= 2) ks.push_back(k);
  ks.push_back(n);
  return ks;
}

static void evaluate(const Session& session, Rollout& rollout, int64_t step, bool dense, const std::string& task,
                     const std::function<void(const RolloutStats&)>& progress, Metrics& metrics) {
  const Evaluation e = [&] {
    const Timer timer(metrics, "timing_s/testing");
    return Evaluation(session, *session.val, rollout, step, dense, progress);
  }();
  const std::string core = cat("val-core/", task, "/reward/"), aux = cat("val-aux/", task, "/");
  const int64_t n = session.config.rollout.val_kwargs.n;
  metrics.set(cat(core, "mean@", n), e.mean().mean);
  if (n > 1) {
    metrics.set(cat(core, "best@", n, "/mean"), e.best(n).mean);
    metrics.set(cat(core, "maj@", n, "/mean"), e.majority().mean);
    for (const int64_t k : default_ks(n))
      if (k > 1 && k < n) metrics.set(cat(aux, "reward/best@", k, "/mean"), e.best(k).mean);
  }
  metrics.set(cat(aux, "reward/mean@", n, "/standard_error"), e.mean().error);
  Summary length;
  for (const double l : e.lengths()) length.add(l);
  metrics.set(cat(aux, "response_length/mean"), length.mean());
  metrics.set(cat(aux, "response_length/clip_ratio"),
              static_cast<double>(e.truncated()) / static_cast<double>(length.count()));
}

Metrics evaluate(const Session& session, Rollout& rollout, int64_t step,
                 const std::function<void(const RolloutStats&)>& progress) {
  const ValKv kv = session.config.rollout.val_kwargs.kv;
  const std::string& task = session.config.data.task;
  Metrics metrics;
  evaluate(session, rollout, step, kv != ValKv::rollout, task, progress, metrics);
  if (kv == ValKv::both) evaluate(session, rollout, step, false, task + "_kv", progress, metrics);
  return metrics;
}

}  // namespace pare
