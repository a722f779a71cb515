// The task ssa: its problems, its teacher, its verifier.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "base/error.h"
#include "data/ssa.h"
#include "tokenizer/tokenizer.h"

namespace pare {
namespace {

const char* const kVariants[] = {"default", "ans", "rep", "late"};
constexpr const char* kPrompt = "a4b9c2;dc-b;ed+a;fe+c;gb-d;hg-d;ih+c;jc+g;kj-g;?df>";
constexpr const char* kResponse =
    "d:c2-b9=d3;e:d3+a4=e7;f:e7+c2=f9;g:b9-d3=g6;h:g6-d3=h3;i:h3+c2=i5;j:c2+g6=j8;k:j8-g6=k2;#d3f9";

Problem golden_problem() {
  Problem problem;
  problem.prompt = kPrompt;
  problem.answer = "d3f9";
  return problem;
}

SsaTask small_task() { return SsaTask({}, 1); }

double score(std::string_view text, bool finished = true) {
  return small_task().reward(golden_problem(), {text, finished}).score;
}

Rng test_rng(uint64_t uid) { return Rng(rng_key(5, RngStream::test, 0), uid); }

// One step "d:c2-b9=d3;" as its text says it.
struct Step {
  char target, left, op, right;
  int a, b, result;
  bool right_sum() const { return result == (op == '+' ? a + b : a - b + 10) % 10; }
};

std::vector<Step> steps_of(const std::string& response) {
  std::vector<Step> steps;
  for (size_t i = 0; response.at(i) != '#'; i += 11) {
    const char* t = response.c_str() + i;
    EXPECT_TRUE(t[1] == ':' && t[7] == '=' && t[8] == t[0] && t[10] == ';') << response;
    steps.push_back({t[0], t[2], t[4], t[5], t[3] - '0', t[6] - '0', t[9] - '0'});
  }
  return steps;
}

// True with a probability below 1e-6 if `hits` of `n` came from probability p (normal approximation, two-sided).
void expect_rate(int64_t hits, int64_t n, double p, const char* what) {
  EXPECT_NEAR(static_cast<double>(hits), p * static_cast<double>(n), 5 * std::sqrt(p * (1 - p) * n)) << what;
}

// Pearson's statistic against equal or given probabilities; fails with a probability below 1e-6 (Wilson-Hilferty).
void expect_distribution(const std::vector<int64_t>& counts, const std::vector<double>& p, const char* what) {
  double n = 0, chi2 = 0;
  for (int64_t c : counts) n += static_cast<double>(c);
  for (size_t i = 0; i < counts.size(); i++)
    chi2 += (static_cast<double>(counts[i]) - n * p[i]) * (static_cast<double>(counts[i]) - n * p[i]) / (n * p[i]);
  const double df = static_cast<double>(counts.size()) - 1, v = 2 / (9 * df);
  EXPECT_LT(chi2, df * std::pow(1 - v + 4.9 * std::sqrt(v), 3)) << what;
}

std::vector<double> uniform(size_t n) { return std::vector<double>(n, 1.0 / static_cast<double>(n)); }

TEST(Ssa, GoldenExample) {
  EXPECT_EQ(score(kResponse), 1);
  Rng rng = test_rng(0);
  EXPECT_EQ(small_task().teach(golden_problem(), 0, rng), kResponse);
  EXPECT_EQ(SsaTask::parse(kPrompt).prompt(), kPrompt);
  EXPECT_EQ(SsaTask::parse(kPrompt).values(), (std::vector<int>{4, 9, 2, 3, 7, 9, 6, 3, 5, 8, 2}));
  const auto tokenizer = make_tokenizer("ssa");
  EXPECT_EQ(tokenizer->encode_prompt(kPrompt), tokenizer->encode(std::string("^") + kPrompt));
}

TEST(Ssa, VerifierIsExact) {
  EXPECT_EQ(score("#d3f9"), 1) << "the steps are not checked";
  EXPECT_EQ(score("#d0f0;#d3f9"), 1) << "the last # counts";
  for (const char* text : {"", "d3f9", "#", "#d3f8", "#d4f9", "#f9d3", "#d3f9;", "#d3f9$", "#d3f9#", "#d3f", "# d3f9",
                           "#d3f9 ", "#d3f9f9", "#d3g9", "#d3f9;#d0f0", "#D3F9"})
    EXPECT_EQ(score(text), 0) << text;
  EXPECT_EQ(score(kResponse, false), 0) << "cut before EOS";
}

TEST(Ssa, RewardSaysWhatItFound) {
  const auto reward = [](std::string_view text, bool finished) {
    return small_task().reward(golden_problem(), {text, finished});
  };
  EXPECT_EQ(reward("x#d3f9", true).extracted, "d3f9");
  EXPECT_TRUE(reward("#d0f0", true).parsed) << "wrong, but in the right form";
  EXPECT_EQ(reward("#d0f0", true).score, 0);
  EXPECT_FALSE(reward("#d0f0", false).parsed);
  EXPECT_FALSE(reward("#d0ff", true).parsed);
  EXPECT_FALSE(reward("d0f0", true).parsed);
  EXPECT_FALSE(reward("#d3f9d3", true).parsed);
  const Reward right = reward("#d3f9", true);
  ASSERT_EQ(right.components.size(), 1u);
  EXPECT_EQ(right.components[0].first, "correct");
  EXPECT_EQ(right.components[0].second, 1);
}

TEST(Ssa, ProblemsAreWellFormed) {
  const SsaTask task({}, 17);
  const auto tokenizer = make_tokenizer("ssa");
  for (int64_t i = 0; i < 500; i++) {
    const Problem problem = task.problem(i);
    const SsaProgram program = SsaTask::parse(problem.prompt);
    ASSERT_EQ(program.prompt(), problem.prompt);
    const int steps = static_cast<int>(program.statements.size());
    ASSERT_TRUE(steps >= 6 && steps <= 8) << problem.prompt;
    ASSERT_EQ(program.inits.size(), 3u);
    ASSERT_EQ(program.queries.size(), 2u);
    EXPECT_TRUE(3 <= program.queries[0] && program.queries[0] < program.queries[1] && program.queries[1] < 3 + steps);
    EXPECT_EQ(tokenizer->encode_prompt(problem.prompt).size(), static_cast<size_t>(12 + 5 * steps));
    // The answer, worked out from the text alone.
    std::map<char, int> value;
    const std::string& p = problem.prompt;
    for (int v = 0; v < 3; v++) value[p[static_cast<size_t>(2 * v)]] = p[static_cast<size_t>(2 * v + 1)] - '0';
    size_t at = 7;
    for (; p[at] != '?'; at += 5)
      value[p[at]] = (p[at + 2] == '+' ? value.at(p[at + 1]) + value.at(p[at + 3])
                                       : value.at(p[at + 1]) - value.at(p[at + 3]) + 10) %
                     10;
    EXPECT_EQ(*problem.answer, cat(p[at + 1], value.at(p[at + 1]), p[at + 2], value.at(p[at + 2])));
  }
}

TEST(Ssa, ProblemIsAFunctionOfSeedAndIndex) {
  const SsaTask task({}, 4242, 1024), again({}, 4242), other({}, 999);
  EXPECT_EQ(task.size(), 1024);
  std::set<std::string> prompts;
  for (int64_t i = 299; i >= 0; i--) {
    EXPECT_EQ(task.problem(i).prompt, again.problem(i).prompt);
    EXPECT_NE(task.problem(i).prompt, other.problem(i).prompt);
    prompts.insert(task.problem(i).prompt);
    prompts.insert(other.problem(i).prompt);
  }
  EXPECT_EQ(prompts.size(), 600u);
  // Pinned: a saved run goes on with the same problems.
  EXPECT_EQ(task.problem(0).prompt, "a0b3c9;dc-a;ea+b;fe-e;gf+e;he-c;ic+h;jh+i;kg+j;?df>");
  EXPECT_EQ(task.problem(1023).prompt, "a8b4c5;dc+c;ea+d;fe+e;gb+d;he+g;ie+e;je-h;?eg>");
  EXPECT_THROW(task.problem(1024), std::logic_error);
  EXPECT_THROW(task.problem(-1), std::logic_error);
}

TEST(Ssa, DrawsAreDistributedAsStated) {
  constexpr int kProblems = 20000, kSteps = 8;
  SsaConfig config;
  config.min_statements = config.max_statements = kSteps;
  const SsaTask task(config, 3);
  std::vector<int64_t> inits(10), ops(2), queries(kSteps * kSteps);
  std::vector<std::vector<int64_t>> left(kSteps), right(kSteps);
  int64_t both_previous = 0;
  for (int j = 0; j < kSteps; j++) {
    left[j].resize(3 + j);
    right[j].resize(3 + j);
  }
  for (int64_t i = 0; i < kProblems; i++) {
    const SsaProgram program = SsaTask::parse(task.problem(i).prompt);
    for (int v : program.inits) inits[v]++;
    for (int j = 0; j < kSteps; j++) {
      const auto& s = program.statements[j];
      left[j][s.left]++;
      right[j][s.right]++;
      ops[s.op == '-']++;
      both_previous += j == 1 && s.left == 3 && s.right == 3;
    }
    queries[(program.queries[0] - 3) * kSteps + program.queries[1] - 3]++;
  }
  expect_distribution(inits, uniform(10), "initial values");
  expect_distribution(ops, uniform(2), "operators");
  for (int j = 0; j < kSteps; j++) {
    // Replaced by the previous variable with probability 1/2 * 1/2, but in the first statement.
    const double forced = j > 0 ? 0.25 : 0;
    std::vector<double> p(3 + j, (1 - forced) / (3 + j));
    p.back() += forced;
    expect_distribution(left[j], p, "left operand");
    expect_distribution(right[j], p, "right operand");
  }
  // Never both at once by replacement: 1/2 * 1/4 (one replaced, the other falls on it) + 1/2 * 1/16.
  expect_rate(both_previous, kProblems, 0.5 / 4 + 0.5 / 16, "both operands the previous variable");
  std::vector<int64_t> pairs;
  for (int a = 0; a < kSteps; a++) {
    for (int b = a + 1; b < kSteps; b++) pairs.push_back(queries[a * kSteps + b]);
  }
  expect_distribution(pairs, uniform(pairs.size()), "pairs of queries");

  const SsaTask mixed({}, 3);
  std::vector<int64_t> lengths(3);
  for (int64_t i = 0; i < kProblems; i++) lengths[SsaTask::parse(mixed.problem(i).prompt).statements.size() - 6]++;
  expect_distribution(lengths, uniform(3), "number of statements");
}

TEST(Ssa, TeacherWithoutNoiseIsAlwaysRight) {
  const auto tokenizer = make_tokenizer("ssa");
  for (const char* variant : kVariants) {
    const SsaTask task(ssa_variant(variant), 8);
    for (int64_t i = 0; i < 200; i++) {
      Rng rng = test_rng(i);
      const Problem problem = task.problem(i);
      const std::string text = task.teach(problem, 0, rng);
      EXPECT_EQ(task.reward(problem, {text, true}).score, 1) << variant << " " << text;
      EXPECT_EQ(task.reward(problem, {text, false}).score, 0);
      EXPECT_EQ(tokenizer->encode(text).size(), text.size());
      if (std::string(variant) != "rep") {
        EXPECT_EQ(text.size() + 1, 11 * SsaTask::parse(problem.prompt).statements.size() + 6);  // with EOS
      }
    }
  }
}

TEST(Ssa, TeacherIsAFunctionOfItsDraws) {
  for (const char* variant : kVariants) {
    const SsaTask task(ssa_variant(variant), 8);
    Rng a = test_rng(1), b = test_rng(1), c = test_rng(2);
    std::string first, second, third;
    for (int64_t i = 0; i < 20; i++) {
      first += task.teach(task.problem(i), 1, a);
      second += task.teach(task.problem(i), 1, b);
      third += task.teach(task.problem(i), 1, c);
    }
    EXPECT_EQ(first, second);
    EXPECT_NE(first, third);
  }
}

struct Rates {
  int64_t responses = 0, steps = 0, wrong_steps = 0, repeats = 0, answers = 0, wrong_answers = 0, correct = 0;
  std::vector<int64_t> wrong_at = std::vector<int64_t>(8);
};

// What the teacher does over many problems, read from its text.
Rates measure(const char* variant, double ramp) {
  SsaConfig config = ssa_variant(variant);
  config.min_statements = config.max_statements = 8;
  const SsaTask task(config, 21);
  Rates rates;
  for (int64_t i = 0; i < 6000; i++) {
    Rng rng = test_rng(i);
    const Problem problem = task.problem(i);
    const std::string text = task.teach(problem, ramp, rng);
    std::map<char, int> value;
    for (int v = 0; v < 3; v++) value[static_cast<char>('a' + v)] = SsaTask::parse(problem.prompt).inits[v];
    for (const Step& s : steps_of(text)) {
      EXPECT_EQ(s.a, value.at(s.left)) << "errors are carried through: " << text;
      EXPECT_EQ(s.b, value.at(s.right)) << text;
      rates.steps++;
      rates.repeats += value.count(s.target);
      rates.wrong_steps += !s.right_sum();
      rates.wrong_at[s.target - 'd'] += !s.right_sum();
      value[s.target] = s.result;
    }
    const std::string answer = text.substr(text.find('#') + 1);
    for (size_t k = 0; k < answer.size(); k += 2) {
      rates.answers++;
      rates.wrong_answers += value.at(answer[k]) != answer[k + 1] - '0';
    }
    rates.responses++;
    rates.correct += task.reward(problem, {text, true}).score > 0;
  }
  return rates;
}

// A replaced digit is the right one again one time in ten.
TEST(Ssa, DefaultTeacherErrsAtItsRate) {
  const Rates full = measure("default", 1), half = measure("default", 0.5);
  expect_rate(full.wrong_steps, full.steps, 0.2 * 0.9, "steps");
  expect_rate(half.wrong_steps, half.steps, 0.1 * 0.9, "steps at half ramp");
  EXPECT_EQ(full.wrong_answers, 0);
  EXPECT_EQ(full.repeats, 0);
  for (int j = 0; j < 8; j++) expect_rate(full.wrong_at[j], full.responses, 0.2 * 0.9, "each step alike");
  const double accuracy = static_cast<double>(full.correct) / static_cast<double>(full.responses);
  EXPECT_GT(accuracy, 0.3);
  EXPECT_LT(accuracy, 0.5);
}

TEST(Ssa, AnsTeacherErrsInTheAnswer) {
  const Rates full = measure("ans", 1), half = measure("ans", 0.5);
  expect_rate(full.wrong_steps, full.steps, 0.12 * 0.9, "steps");
  expect_rate(full.wrong_answers, full.answers, 0.2 * 0.9, "answers");
  expect_rate(half.wrong_answers, half.answers, 0.1 * 0.9, "answers at half ramp");
}

TEST(Ssa, RepTeacherWritesStepsTwice) {
  for (double ramp : {0.0, 1.0}) {
    const Rates r = measure("rep", ramp);
    expect_rate(r.repeats, r.responses * 8, 0.2, "repeats do not depend on the ramp");
    if (ramp == 0)
      EXPECT_EQ(r.wrong_steps, 0);
    else
      expect_rate(r.wrong_steps, r.steps, 0.15 * 0.9, "steps");
  }
}

TEST(Ssa, LateTeacherErrsMoreAndMore) {
  const Rates r = measure("late", 1);
  EXPECT_EQ(r.wrong_at[0], 0);
  for (int j = 1; j < 8; j++) expect_rate(r.wrong_at[j], r.responses, 2 * 0.2 * j / 7 * 0.9, "step");
}

TEST(Ssa, GuessingSucceedsOnceInAHundred) {
  const SsaTask task({}, 30);
  int64_t right = 0;
  constexpr int kGuesses = 20000;
  for (int64_t i = 0; i < kGuesses; i++) {
    const Problem problem = task.problem(i);
    const size_t queries = problem.prompt.find('?') + 1;
    Rng rng = test_rng(i);
    const std::string text =
        cat('#', problem.prompt[queries], rng.below(10), problem.prompt[queries + 1], rng.below(10));
    right += task.reward(problem, {text, true}).score > 0;
  }
  expect_rate(right, kGuesses, 0.01, "guesses");
}

TEST(Ssa, OtherSizes) {
  SsaConfig config;
  config.inits = 1;
  config.queries = 1;
  config.min_statements = 1;
  config.max_statements = 1;
  Rng rng = test_rng(0);
  config.late = true;
  const SsaTask one(config, 2);
  EXPECT_EQ(one.problem(5).prompt.size(), std::string("a1;ba+a;?b>").size());
  EXPECT_EQ(one.teach(one.problem(5), 0, rng).size(), std::string("b:a1+a1=b2;#b2").size());

  config = {};
  config.min_statements = config.max_statements = 23;
  const SsaTask longest(config, 2);
  const Problem problem = longest.problem(0);
  EXPECT_NE(problem.prompt.find(";z"), std::string::npos);
  EXPECT_EQ(longest.reward(problem, {longest.teach(problem, 0, rng), true}).score, 1);
  config.max_statements = 24;
  EXPECT_THROW(SsaTask(config, 2), Error) << "no letter is left";
}

TEST(Ssa, WrongSettingsAreErrors) {
  const auto with = [](auto change) {
    SsaConfig config;
    change(config);
    SsaTask task(config, 1);
  };
  EXPECT_NO_THROW(with([](SsaConfig&) {}));
  EXPECT_THROW(with([](SsaConfig& c) { c.max_statements = 5; }), Error);
  EXPECT_THROW(with([](SsaConfig& c) { c.queries = 7; }), Error);
  EXPECT_THROW(with([](SsaConfig& c) { c.queries = 0; }), Error);
  EXPECT_THROW(with([](SsaConfig& c) { c.inits = 0; }), Error);
  EXPECT_THROW(with([](SsaConfig& c) { c.noise = 1.1; }), Error);
  EXPECT_THROW(with([](SsaConfig& c) { c.repeat = -0.1; }), Error);
  EXPECT_THROW(with([](SsaConfig& c) { c.answer_noise = std::nan(""); }), Error);
  EXPECT_THROW(with([](SsaConfig& c) {
                 c.late = true;
                 c.noise = 0.6;
               }),
               Error);
  EXPECT_THROW(SsaTask({}, 1, 0), Error);
  EXPECT_THROW(ssa_variant("lat"), Error);
}

TEST(Ssa, TextThatIsNoProgramIsAnError) {
  for (const char* prompt :
       {"", ";", ";?>x", "a", "a4", "a4;", "a4;ba+a", "a4;ba+a;", "a4;ba+a;?", "a4;ba+a;?b", "a4;ba+a;?c>",
        "a4;ba+a;?b>>", "b4;?b>", "a4;ca+a;?a>", "a4;bb+a;?b>", "a4;ba*a;?b>", "a4;ba+a?b>", "A4;?A>", "aa;?a>"})
    EXPECT_THROW(SsaTask::parse(prompt), Error) << prompt;
  // 27 variables: one letter too many.
  std::string prompt;
  for (char c = 'a'; c <= 'z'; c++) prompt += {c, '1'};
  EXPECT_NO_THROW(SsaTask::parse(prompt + ";?z>"));
  EXPECT_THROW(SsaTask::parse(prompt + "{1;?z>"), Error);
}

}  // namespace
}  // namespace pare
