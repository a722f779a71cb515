// The task `ssa`: run a straight-line program with single assignments, step by step.
//
//   prompt    a4b9c2;dc-b;ed+a;?de>           initial values; statements; the queried variables in ascending order
//   response  d:c2-b9=d3;e:d3+a4=e7;#d3e7     one step per statement, then the values of the queried variables
//
// Arithmetic is modulo 10.  The reward is 1 for a finished response whose text after the last `#` is exactly the
// answer ("d3e7"), else 0; the steps are not checked.  Guessing the digits of two queries succeeds once in a hundred.
#pragma once
#include <array>

#include "data/task.h"

namespace pare {

struct SsaConfig {
  int min_statements = 6, max_statements = 8;  // of a problem, uniform
  int inits = 3, queries = 2;

  // The teacher's errors, at ramp 1.  An error is carried through the later steps.
  double noise = 0.2;       // probability that a step's result is replaced by a uniform digit
  double answer_noise = 0;  // the same for each digit of the answer
  double repeat = 0;        // probability that a step is written twice (its result drawn anew); not ramped
  bool late = false;        // noise grows with the step: 2 noise j / (M - 1) for step j of M
};

// "default"; "ans": noise .12, answer_noise .2; "rep": noise .15, repeat .2; "late": late.
SsaConfig ssa_variant(const std::string& name);

struct SsaProgram {
  struct Statement {
    int left, right;  // variables, counted from 0 = 'a'; the target is the first one that has no value yet
    char op;          // '+' or '-'
  };
  std::vector<int> inits;
  std::vector<Statement> statements;
  std::vector<int> queries;

  std::string prompt() const;
  std::vector<int> values() const;  // of all variables
};

class SsaTask : public Task {
 public:
  // Problem i is a function of (config, seed, i) only.
  SsaTask(const SsaConfig& config, uint64_t seed, int64_t size = INT64_MAX);

  int64_t size() const override { return size_; }
  Problem problem(int64_t index) const override;
  std::string teach(const Problem& problem, double ramp, Rng& rng) const override;
  Reward reward(const Problem& problem, const Response& response) const override;

  // The program of a prompt; any number of initial values and statements.
  static SsaProgram parse(std::string_view prompt);

 private:
  SsaConfig config_;
  uint64_t seed_;
  int64_t size_;
};

}  // namespace pare
