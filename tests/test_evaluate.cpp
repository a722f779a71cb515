// Evaluation of a model: what the statistics are made of, and that training reports the same.
#include <map>
#include <numeric>

#include "data/verify/verify.h"
#include "run/evaluate.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

// Eight problems; the score and the extracted answer follow from the text.
class LastCharacter : public Task {
 public:
  explicit LastCharacter(std::unique_ptr<Task> inner) : inner_(std::move(inner)) {}
  int64_t size() const override { return 8; }
  Problem problem(int64_t index) const override { return inner_->problem(index); }
  std::string teach(const Problem& problem, double ramp, Rng& rng) const override {
    return inner_->teach(problem, ramp, rng);
  }
  Reward reward(const Problem&, const Response& r) const override {
    Reward reward;
    reward.parsed = !r.text.empty() && r.text.size() % 3 != 0;
    if (reward.parsed) reward.extracted = std::string(1, r.text.back() % 4 + '0');
    reward.score = reward.extracted == "1" ? 1 : reward.extracted == "2" ? 0.25 : 0;
    return reward;
  }

 private:
  std::unique_ptr<Task> inner_;
};

struct Sampled {
  explicit Sampled(const std::vector<std::string>& more = {})
      : session(tiny_run("qwen3", more)),
        rollout(*session.model, session.rollout_limits(), session.kv, session.rollout_scratch()) {
    session.val = std::make_unique<LastCharacter>(std::move(session.val));
  }
  Session session;
  Rollout rollout;
};

const std::vector<std::string> kSampled = {"rollout.val_kwargs.n=5", "rollout.val_kwargs.temperature=1"};

TEST(Evaluation, NumbersAreThoseOfTheResponses) {
  Sampled s(kSampled);
  const Evaluation e(s.session, *s.session.val, s.rollout, 0, true);
  ASSERT_EQ(e.problems().size(), 8u);
  double mean = 0, best3 = 0, majority = 0;
  int64_t cut = 0, unparsed = 0, tokens = 0, with_votes = 0;
  for (const EvaluatedProblem& p : e.problems()) {
    ASSERT_EQ(p.responses.size(), 5u);
    std::map<std::string, int> votes;
    std::vector<double> scores;
    for (const EvaluatedResponse& r : p.responses) {
      scores.push_back(r.reward.score);
      mean += r.reward.score / 40;
      cut += !r.finished();
      unparsed += !r.reward.parsed;
      tokens += static_cast<int64_t>(r.tokens.size());
      EXPECT_EQ(r.finished(), r.tokens.back() == 2);
      if (r.reward.parsed) votes[r.reward.extracted]++;
    }
    best3 += best_at_k(scores, 3) / 8;
    majority += p.responses[p.majority].reward.score / 8;
    for (const auto& [answer, count] : votes)
      EXPECT_LE(count, votes[p.responses[p.majority].reward.extracted]) << answer;
    with_votes += !votes.empty();
  }
  EXPECT_GT(with_votes, 4);
  EXPECT_GT(mean, 0);
  EXPECT_NEAR(e.mean().mean, mean, 1e-12);
  EXPECT_GT(e.mean().error, 0);
  EXPECT_NEAR(e.best(1).mean, mean, 1e-12);
  EXPECT_NEAR(e.best(3).mean, best3, 1e-12);
  EXPECT_GT(best3, mean);
  EXPECT_NEAR(e.majority().mean, majority, 1e-12);
  EXPECT_EQ(e.truncated(), cut);
  EXPECT_EQ(e.unparsed(), unparsed);
  EXPECT_GT(unparsed, 0);
  const auto lengths = e.lengths();
  EXPECT_TRUE(std::is_sorted(lengths.begin(), lengths.end()));
  EXPECT_EQ(std::accumulate(lengths.begin(), lengths.end(), 0.0), static_cast<double>(tokens));
}

// Answers that the verifier takes for equal vote together, and the first of them speaks.
class Halves : public LastCharacter {
 public:
  using LastCharacter::LastCharacter;
  Reward reward(const Problem& p, const Response& r) const override {
    Reward reward = LastCharacter::reward(p, r);
    const int kind = std::accumulate(r.text.begin(), r.text.end(), 0) % 10;
    reward.extracted = kind < 4 ? "3" : kind < 7 ? "0.5" : "1/2";
    reward.parsed = true;
    reward.score = kind >= 4;
    return reward;
  }
  std::vector<size_t> first_equal(std::span<const std::string> answers) const override {
    return find_verifier("math-value").first_equal(answers);
  }
};

TEST(Evaluation, EqualAnswersVoteTogether) {
  Sampled s({"rollout.val_kwargs.n=20", "rollout.val_kwargs.temperature=1"});
  s.session.val = std::make_unique<Halves>(std::move(s.session.val));
  const Evaluation e(s.session, *s.session.val, s.rollout, 0, true);
  int apart = 0;
  for (const EvaluatedProblem& p : e.problems()) {
    std::map<std::string, int> votes;
    for (const EvaluatedResponse& r : p.responses) votes[r.reward.extracted]++;
    const int halves = votes["0.5"] + votes["1/2"];
    if (halves == votes["3"]) continue;
    EXPECT_EQ(p.responses[p.majority].reward.score, halves > votes["3"]);
    apart += halves > votes["3"] && std::max(votes["0.5"], votes["1/2"]) < votes["3"];
    for (size_t i = 0; i < p.majority; i++)
      EXPECT_NE(p.responses[i].reward.score, p.responses[p.majority].reward.score) << "not the first";
  }
  EXPECT_GT(apart, 0) << "no problem in which it matters";
}

TEST(Evaluation, MetricsOfTrainingAreTheSameNumbers) {
  Sampled s(kSampled);
  const Metrics m = evaluate(s.session, s.rollout, 3);
  const Evaluation e(s.session, *s.session.val, s.rollout, 3, true);
  EXPECT_EQ(m.get("val-core/ssa/reward/mean@5"), e.mean().mean);
  EXPECT_EQ(m.get("val-core/ssa/reward/best@5/mean"), e.best(5).mean);
  EXPECT_EQ(m.get("val-core/ssa/reward/maj@5/mean"), e.majority().mean);
  EXPECT_EQ(m.get("val-aux/ssa/reward/best@2/mean"), e.best(2).mean);
  EXPECT_EQ(m.get("val-aux/ssa/reward/best@4/mean"), e.best(4).mean);
  EXPECT_EQ(m.get("val-aux/ssa/reward/mean@5/standard_error"), e.mean().error);
  EXPECT_EQ(m.get("val-aux/ssa/response_length/clip_ratio"), static_cast<double>(e.truncated()) / 40);
  EXPECT_GT(m.get("timing_s/testing"), 0);
  EXPECT_GE(e.best(5).mean, e.best(2).mean);
  // One response has no majority, and its best is its mean.
  Sampled one;
  const Metrics single = evaluate(one.session, one.rollout, 0);
  for (const auto& [name, value] : single.all()) {
    EXPECT_EQ(name.find("best@"), std::string::npos) << name;
    EXPECT_EQ(name.find("maj@"), std::string::npos) << name;
  }
  EXPECT_FALSE(std::isnan(single.get("val-core/ssa/reward/mean@1")));
}

// What a problem's responses have in common is not counted as certainty: greedy copies leave the error as it is.
TEST(Evaluation, CopiesOfAResponseDoNotNarrowTheInterval) {
  Sampled once, copies({"rollout.val_kwargs.n=7"});
  const Evaluation a(once.session, *once.session.val, once.rollout, 0, true);
  const Evaluation b(copies.session, *copies.session.val, copies.rollout, 0, true);
  EXPECT_GT(a.mean().error, 0);
  EXPECT_NEAR(a.mean().error, b.mean().error, 1e-15);
  EXPECT_NEAR(b.best(7).mean, a.mean().mean, 1e-15);
}

TEST(Evaluation, DrawsAreNamedByTheStep) {
  Sampled s(kSampled);
  const auto texts = [&](int64_t step) {
    std::vector<std::string> all;
    const Evaluation e(s.session, *s.session.val, s.rollout, step, true);
    for (const EvaluatedProblem& p : e.problems())
      for (const EvaluatedResponse& r : p.responses) all.push_back(r.text);
    return all;
  };
  EXPECT_EQ(texts(1), texts(1));
  EXPECT_NE(texts(1), texts(2));
}

TEST(Evaluation, DefaultKs) {
  EXPECT_EQ(default_ks(1), (std::vector<int64_t>{1}));
  EXPECT_EQ(default_ks(8), (std::vector<int64_t>{1, 2, 4, 8}));
  EXPECT_EQ(default_ks(5), (std::vector<int64_t>{1, 2, 4, 5}));
}

}  // namespace
}  // namespace pare::test
