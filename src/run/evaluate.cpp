#include "run/evaluate.h"

#include <algorithm>

#include "base/thread_pool.h"

namespace pare {

namespace {

struct Stopped {};  // thrown out of a rollout

// Grades the responses of one rank as they finish, some at a time.
class Grader {
 public:
  Grader(const Session& session, const Task& task, const std::vector<Problem>& problems, int64_t n, int64_t limit)
      : session_(session), task_(task), problems_(problems), n_(n), limit_(limit) {
    done_.resize(problems.size() * static_cast<size_t>(n));
  }

  void drawn(const Completion& c) {
    if (!c.finished() && std::ssize(c.tokens) < limit_) return;
    waiting_.push_back(c);
    if (std::ssize(waiting_) >= std::max(16, threads())) grade();
  }
  void grade() {
    std::vector<EvaluatedResponse> responses(waiting_.size());
    parallel_for(std::ssize(waiting_), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const Completion& c = waiting_[static_cast<size_t>(i)];
        responses[static_cast<size_t>(i)] = {c.tokens, session_.response_text(c),
                                             session_.reward(task_, problems_[static_cast<size_t>(c.request)], c),
                                             c.finish};
      }
    });
    for (size_t i = 0; i < waiting_.size(); i++) {
      score_.add(responses[i].reward.score);
      done_[static_cast<size_t>(waiting_[i].request * n_ + waiting_[i].sample)] = std::move(responses[i]);
    }
    waiting_.clear();
  }
  double score() const { return score_.mean(); }
  std::vector<std::optional<EvaluatedResponse>>& done() { return done_; }

 private:
  const Session& session_;
  const Task& task_;
  const std::vector<Problem>& problems_;
  const int64_t n_, limit_;
  std::vector<Completion> waiting_;
  std::vector<std::optional<EvaluatedResponse>> done_;  // by (request, sample)
  Summary score_;
};

// By the votes of the responses with an answer; equal ones, as the task has it, vote together.
size_t majority_of(const Task& task, const std::vector<EvaluatedResponse>& responses) {
  std::vector<std::string> answers;
  for (const EvaluatedResponse& r : responses)
    if (r.reward.parsed) answers.push_back(r.reward.extracted);
  const std::vector<size_t> first = task.first_equal(answers);
  std::vector<std::optional<size_t>> votes;
  auto next = first.begin();
  for (const EvaluatedResponse& r : responses) votes.push_back(r.reward.parsed ? std::optional(*next++) : std::nullopt);
  return majority(votes);
}

}  // namespace

Evaluation::Evaluation(const Session& session, const Task& task, Rollout& rollout, int64_t step, bool dense,
                       const std::function<bool(const EvaluationProgress&)>& go_on) {
  const Config& config = session.config;
  const ValKeys& v = config.rollout.val_kwargs;
  const Phase phase(session.model->device, "val");
  std::vector<Request> requests;
  std::vector<Problem> problems;
  for (int64_t row = 0; row < task.size(); row++) {
    problems.push_back(task.problem(row));
    requests.push_back({session.encode_prompt(problems.back()), {}, static_cast<int>(config.data.max_response_length)});
    for (int64_t k = 0; k < v.n; k++)
      requests.back().uids.push_back(sequence_uid(0, static_cast<uint64_t>(row), 0, static_cast<uint64_t>(k)));
  }
  const Sampling sampling{
      .temperature = static_cast<float>(v.temperature),
      .truncation = truncation_of(v),
      .key = rng_key(static_cast<uint64_t>(config.trainer.seed), RngStream::eval, static_cast<uint64_t>(step)),
      .eos = session.eos,
      .stop = session.stop,
      .dense = dense};
  const bool alone = session.device.comm.ranks() == 1;
  Grader grader(session, task, problems, v.n, config.data.max_response_length);
  std::vector<std::optional<EvaluatedResponse>>& done = grader.done();
  try {
    const std::vector<Completion> completions = rollout.generate(
        requests, sampling,
        [&](const RolloutStats& s) {
          if (go_on && !go_on({s.finished, s.completions, s.decoded_tokens, grader.score()})) throw Stopped();
        },
        [&](const Completion& c) {
          if (alone) grader.drawn(c);
        });
    if (!alone) {
      std::vector<Reward> rewards = session.rewards(task, problems, completions);
      for (size_t i = 0; i < completions.size(); i++)
        done[i] = {completions[i].tokens, session.response_text(completions[i]), std::move(rewards[i]),
                   completions[i].finish};
    }
  } catch (const Stopped&) {
  }
  grader.grade();
  for (size_t p = 0; p < problems.size(); p++) {
    EvaluatedProblem of{
        .problem = problems[p], .prompt_tokens = static_cast<int64_t>(requests[p].prompt.size()), .responses = {}};
    for (size_t k = p * static_cast<size_t>(v.n); k < (p + 1) * static_cast<size_t>(v.n); k++)
      if (done[k]) of.responses.push_back(std::move(*done[k]));
    if (std::ssize(of.responses) < v.n) continue;  // stopped before
    of.majority = majority_of(task, of.responses);
    problems_.push_back(std::move(of));
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
                     const std::function<void(const EvaluationProgress&)>& progress, Metrics& metrics) {
  const Evaluation e = [&] {
    const Timer timer(metrics, "timing_s/testing");
    return Evaluation(session, *session.val, rollout, step, dense, [&](const EvaluationProgress& p) {
      if (progress) progress(p);
      return true;
    });
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
                 const std::function<void(const EvaluationProgress&)>& progress) {
  const ValKv kv = session.config.rollout.val_kwargs.kv;
  const std::string& task = session.config.data.task;
  Metrics metrics;
  evaluate(session, rollout, step, kv != ValKv::rollout, task, progress, metrics);
  if (kv == ValKv::both) evaluate(session, rollout, step, false, task + "_kv", progress, metrics);
  return metrics;
}

}  // namespace pare
