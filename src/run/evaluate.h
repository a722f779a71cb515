// Sampling a set of problems and what that says, for `pare eval` and for the validation of a run: the same engine, the
// same numbers.
#pragma once
#include "rl/metrics.h"
#include "run/pass_at_k.h"
#include "run/session.h"

namespace pare {

struct EvaluatedResponse {
  std::vector<int32_t> tokens;  // EOS included
  std::string text;             // without the closing EOS
  Reward reward;
  Finish finish = Finish::length;  // length: cut at data.max_response_length
  bool finished() const { return finish != Finish::length; }
};

struct EvaluatedProblem {
  Problem problem;
  int64_t prompt_tokens = 0;
  std::vector<EvaluatedResponse> responses;
  size_t majority = 0;  // the response that speaks for the majority (pass_at_k.h), by Task::first_equal
};

// Progress of an evaluation.
struct EvaluationProgress {
  int64_t finished = 0, responses = 0;  // responses: all of them
  int64_t tokens = 0;                   // sampled
  double score = 0;                     // mean over the responses that were graded; NaN: none yet
};

class Evaluation {
 public:
  // Samples every problem of `task` as rollout.val_kwargs of the session's configuration says, with all keys and values
  // (`dense`) or as rollout.kv has it.  The draws are named by (trainer.seed, step, problem, response).  One rank
  // grades responses as they finish.  If `go_on` returns false, only the problems are kept whose responses are all
  // finished; one rank alone may be stopped, and its `rollout` must not be used again.
  Evaluation(const Session& session, const Task& task, Rollout& rollout, int64_t step, bool dense,
             const std::function<bool(const EvaluationProgress&)>& go_on = {});

  const std::vector<EvaluatedProblem>& problems() const { return problems_; }
  Estimate mean() const;                        // mean@n
  Estimate best(int64_t k) const;               // best@k; of scores 0 and 1: pass@k
  Estimate majority() const;                    // maj@n: the score of the response that speaks for the majority
  std::vector<double> lengths() const;          // tokens of all responses, ascending
  int64_t truncated() const, unparsed() const;  // responses cut at the limit; without an answer where one is expected

 private:
  Estimate over_problems(const std::function<double(const EvaluatedProblem&)>& value) const;
  std::vector<EvaluatedProblem> problems_;
};

// The k for which the best of k of n is shown unless told otherwise: powers of 2 below n, and n.
std::vector<int64_t> default_ks(int64_t n);

// The evaluation of session.val as metrics under verl's names: val-core/<task>/reward/mean@n and, with more than one
// response, best@n/mean and maj@n/mean; val-aux/<task>/...: best@k/mean for smaller k, the standard error of mean@n,
// lengths and the part of responses that was cut.  With rollout.val_kwargs.kv = both, <task> is dense and <task>_kv is
// as rollout.kv has it.
Metrics evaluate(const Session& session, Rollout& rollout, int64_t step,
                 const std::function<void(const EvaluationProgress&)>& progress = {});

}  // namespace pare
