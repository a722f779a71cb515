#include "data/ssa.h"

#include <algorithm>

#include "base/error.h"

namespace pare {
namespace {

constexpr int kLetters = 26, kModulus = 10;

char letter(int variable) { return static_cast<char>('a' + variable); }
char digit(int value) { return static_cast<char>('0' + value); }
bool is_letter(char c) { return c >= 'a' && c <= 'z'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
int below(Rng& rng, int n) { return static_cast<int>(rng.below(static_cast<uint32_t>(n))); }

int apply(char op, int left, int right) { return (op == '+' ? left + right : left - right + kModulus) % kModulus; }

SsaProgram generate(const SsaConfig& config, Rng& rng) {
  SsaProgram program;
  const int steps = config.min_statements + below(rng, config.max_statements - config.min_statements + 1);
  for (int i = 0; i < config.inits; i++) program.inits.push_back(below(rng, kModulus));
  for (int j = 0; j < steps; j++) {
    const int known = config.inits + j;
    SsaProgram::Statement s{below(rng, known), below(rng, known), '+'};
    // Every other step uses the one before it, so that programs are deep.
    if (j > 0 && rng.below(2) == 0) (rng.below(2) == 0 ? s.left : s.right) = known - 1;
    if (rng.below(2) == 1) s.op = '-';
    program.statements.push_back(s);
  }
  std::vector<int> computed;
  for (int j = 0; j < steps; j++) computed.push_back(config.inits + j);
  for (int i = 0; i < config.queries; i++) {  // a partial shuffle
    std::swap(computed[static_cast<size_t>(i)], computed[static_cast<size_t>(i + below(rng, steps - i))]);
    program.queries.push_back(computed[static_cast<size_t>(i)]);
  }
  std::sort(program.queries.begin(), program.queries.end());
  return program;
}

std::string answer_text(const std::vector<int>& queries, const std::vector<int>& values) {
  std::string text;
  for (int q : queries) {
    text += letter(q);
    text += digit(values[static_cast<size_t>(q)]);
  }
  return text;
}

}  // namespace

SsaConfig ssa_variant(const std::string& name) {
  SsaConfig config;
  if (name == "default") return config;
  if (name == "ans") {
    config.noise = 0.12;
    config.answer_noise = 0.2;
  } else if (name == "rep") {
    config.noise = 0.15;
    config.repeat = 0.2;
  } else if (name == "late") {
    config.late = true;
  } else {
    fail("variant \"", name, "\" of the task ssa does not exist; there are default, ans, rep and late");
  }
  return config;
}

std::string SsaProgram::prompt() const {
  std::string text;
  int target = 0;
  for (int value : inits) {
    text += letter(target++);
    text += digit(value);
  }
  text += ';';
  for (const Statement& s : statements) text += {letter(target++), letter(s.left), s.op, letter(s.right), ';'};
  text += '?';
  for (int q : queries) text += letter(q);
  return text + '>';
}

std::vector<int> SsaProgram::values() const {
  std::vector<int> all = inits;
  for (const Statement& s : statements)
    all.push_back(apply(s.op, all[static_cast<size_t>(s.left)], all[static_cast<size_t>(s.right)]));
  return all;
}

SsaTask::SsaTask(const SsaConfig& config, uint64_t seed, int64_t size) : config_(config), seed_(seed), size_(size) {
  const auto& c = config;
  if (c.inits < 1 || c.queries < 1 || c.min_statements < c.queries || c.max_statements < c.min_statements ||
      c.inits + c.max_statements > kLetters)
    fail("task ssa: ", c.inits, " initial values, ", c.min_statements, " to ", c.max_statements, " statements and ",
         c.queries, " queries; expected at least one of each, no more queries than statements, and no more than ",
         kLetters, " variables (initial values and statements together)");
  for (double p : {c.noise, c.answer_noise, c.repeat}) {
    if (!(p >= 0 && p <= 1)) fail("task ssa: a noise of ", p, "; expected a probability in [0, 1]");
  }
  if (c.late && c.noise > 0.5)
    fail("task ssa: late noise ", c.noise, " grows to ", 2 * c.noise, " at the last step; expected at most 0.5");
  if (size < 1) fail("task ssa: a set of ", size, " problems; expected at least 1");
}

Problem SsaTask::problem(int64_t index) const {
  expect(index >= 0 && index < size_, "problem ", index, " of a set of ", size_);
  Rng rng(rng_key(seed_, RngStream::task, 0), static_cast<uint64_t>(index));
  const SsaProgram program = generate(config_, rng);
  Problem problem;
  problem.prompt = program.prompt();
  problem.answer = answer_text(program.queries, program.values());
  problem.where = cat("ssa problem ", index, " of seed ", seed_);
  return problem;
}

SsaProgram SsaTask::parse(std::string_view prompt) {
  SsaProgram program;
  size_t at = 0;
  int target = 0;
  const auto next = [&](bool (*is)(char)) {
    if (at >= prompt.size() || !is(prompt[at])) fail("not a program of the task ssa, at position ", at, ": ", prompt);
    return prompt[at++];
  };
  const auto variable = [&](int known) {
    const int v = next(is_letter) - 'a';
    if (v >= known) fail("not a program of the task ssa, ", letter(v), " has no value yet: ", prompt);
    return v;
  };
  const auto assign = [&] {
    if (variable(target + 1) != target) fail("not a program of the task ssa, ", letter(target), " left out: ", prompt);
    target++;
  };
  const auto peek = [&](char c) { return at < prompt.size() && prompt[at] == c; };
  while (!peek(';')) {
    assign();
    program.inits.push_back(next(is_digit) - '0');
  }
  at++;
  while (!peek('?')) {
    const int known = target;
    assign();
    const int left = variable(known);
    const char op = next([](char c) { return c == '+' || c == '-'; });
    program.statements.push_back({left, variable(known), op});
    next([](char c) { return c == ';'; });
  }
  at++;
  while (!peek('>')) program.queries.push_back(variable(target));
  if (at + 1 != prompt.size()) fail("not a program of the task ssa, text after '>': ", prompt);
  return program;
}

std::string SsaTask::teach(const Problem& problem, double ramp, Rng& rng) const {
  const SsaProgram program = parse(problem.prompt);
  const int steps = static_cast<int>(program.statements.size());
  std::vector<int> values = program.inits;
  std::string text;
  for (int j = 0; j < steps; j++) {
    const SsaProgram::Statement& s = program.statements[static_cast<size_t>(j)];
    const int left = values[static_cast<size_t>(s.left)], right = values[static_cast<size_t>(s.right)];
    double noise = ramp * config_.noise;
    if (config_.late && steps > 1) noise *= 2.0 * j / (steps - 1);
    int value = 0;
    const char target = letter(static_cast<int>(values.size()));
    for (int writes = rng.uniform() < config_.repeat ? 2 : 1; writes > 0; writes--) {
      value = rng.uniform() < noise ? below(rng, kModulus) : apply(s.op, left, right);
      text += {target,       ':', letter(s.left), digit(left),  s.op, letter(s.right),
               digit(right), '=', target,         digit(value), ';'};
    }
    values.push_back(value);
  }
  for (int q : program.queries) {
    if (rng.uniform() < ramp * config_.answer_noise) values[static_cast<size_t>(q)] = below(rng, kModulus);
  }
  return text + '#' + answer_text(program.queries, values);
}

Reward SsaTask::reward(const Problem& problem, const Response& response) const {
  expect(problem.answer.has_value(), problem.where, ": no answer");
  Reward reward;
  const size_t hash = response.text.rfind('#');
  if (hash != std::string_view::npos) reward.extracted = response.text.substr(hash + 1);
  const std::string& found = reward.extracted;
  reward.parsed = response.finished && found.size() == problem.answer->size();
  for (size_t i = 0; i < found.size(); i++) reward.parsed &= i % 2 == 0 ? is_letter(found[i]) : is_digit(found[i]);
  reward.score = response.finished && found == *problem.answer ? 1 : 0;  // no answer is empty
  reward.components = {{"correct", reward.score}};
  return reward;
}

}  // namespace pare
