// Token subsets through a model: which estimates of the gradient are unbiased, and what is really not computed.
#include <cmath>

#include "rl/loss.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

using Gradient = std::vector<double>;

ModelConfig model() { return tiny_config("qwen3", true); }

constexpr int64_t kMaxTokens = 9;

// Off-policy, with a KL and an entropy term, so that every kind of term is weighted.
ActorKeys objective(LossAgg mode) {
  ActorKeys c;
  c.loss_agg_mode = mode;
  c.use_kl_loss = true;
  c.kl_loss_coef = 0.2;
  c.entropy_coeff = 0.05;
  c.clip_ratio_high = 0.1;
  return c;
}

std::vector<Trajectory> responses(const std::vector<int>& lengths, uint64_t seed = 1) {
  Rng rng(rng_key(seed, RngStream::test, 5));
  const std::vector<int32_t> prompt = random_ids(rng, 7, model().vocab);
  std::vector<Trajectory> all;
  for (int n : lengths) {
    Trajectory t;
    t.member = static_cast<int32_t>(all.size());
    t.uid = sequence_uid(seed, 0, 0, all.size());
    t.prompt = prompt;
    t.tokens = random_ids(rng, n, model().vocab);
    t.advantage = rng.normal();
    t.logprob.assign(n, -3.6f);
    std::vector<float>&old = t.old_logprob.emplace(), &ref = t.ref_logprob.emplace();
    for (int i = 0; i < n; i++) {
      old.push_back(static_cast<float>(-3.6 + 0.3 * rng.normal()));
      ref.push_back(static_cast<float>(-3.6 + 0.3 * rng.normal()));
    }
    all.push_back(std::move(t));
  }
  return all;
}

// Gradients in double of updates with given token plans.
class Gradients {
 public:
  explicit Gradients(const ActorKeys& keys)
      : keys_(keys),
        world_(table_ref, model(), DType::f64),
        learner_(world_.model, world_.gradients, world_.optimizer, world_.activations, {}) {
    world_.model.set_parameters(tiny_parameters(model(), 7));
  }
  Gradient of(const std::vector<Trajectory>& samples, const std::vector<TokenPlan>& plans) {
    const Update u = make_update(keys_, kMaxTokens, samples, plans);
    learner_.accumulate(u.groups, u.terms, loss_spec(keys_, 1));
    Gradient g = learner_.gradients();
    learner_.drop_gradients();
    return g;
  }

 private:
  ActorKeys keys_;
  World world_;
  Learner learner_;
};

// The plans that a response may get, with their probabilities.
struct Choice {
  double probability;
  TokenPlan plan;
};
using Choices = std::vector<Choice>;

Choices all_cuts(int64_t tokens, int64_t min_tokens, bool horvitz_thompson) {
  Choices all;
  for (int64_t cut = std::min(min_tokens, tokens); cut <= tokens; cut++)
    all.push_back({0, rpc_plan(tokens, min_tokens, cut, horvitz_thompson)});
  for (Choice& c : all) c.probability = 1 / static_cast<double>(all.size());
  return all;
}

Choices all_masks(int64_t tokens, double probability, bool horvitz_thompson) {
  Choices all;
  for (uint32_t bits = 0; bits < 1u << tokens; bits++) {
    std::vector<bool> kept;
    double p = 1;
    for (int64_t t = 0; t < tokens; t++) {
      kept.push_back(bits >> t & 1);
      p *= kept.back() ? probability : 1 - probability;
    }
    all.push_back({p, urs_plan(kept, probability, horvitz_thompson)});
  }
  return all;
}

// Expected gradient over all combinations of choices.
Gradient mean_gradient(Gradients& gradients, const std::vector<Trajectory>& samples,
                       const std::vector<Choices>& choices) {
  Gradient mean;
  std::vector<size_t> pick(choices.size(), 0);
  for (double total = 0;;) {
    double p = 1;
    std::vector<TokenPlan> plans;
    for (size_t i = 0; i < pick.size(); i++) {
      p *= choices[i][pick[i]].probability;
      plans.push_back(choices[i][pick[i]].plan);
    }
    total += p;
    const Gradient g = gradients.of(samples, plans);
    mean.resize(g.size());
    for (size_t j = 0; j < g.size(); j++) mean[j] += p * g[j];
    size_t i = 0;
    while (i < pick.size() && ++pick[i] == choices[i].size()) pick[i++] = 0;
    if (i < pick.size()) continue;
    EXPECT_NEAR(total, 1, 1e-12);
    return mean;
  }
}

Gradient full_gradient(Gradients& gradients, const std::vector<Trajectory>& samples) {
  std::vector<TokenPlan> plans;
  for (const Trajectory& t : samples) plans.push_back(full_plan(static_cast<int64_t>(t.tokens.size())));
  return gradients.of(samples, plans);
}

class NatOf : public testing::TestWithParam<LossAgg> {};

// Breaks if the denominators count what is left instead of the whole response, if the weights are those of another
// distribution of the cut, or if a cut changed what the tokens before it see.
TEST_P(NatOf, PrefixCutsAreUnbiasedWithHorvitzThompsonOnly) {
  Gradients gradients(objective(GetParam()));
  const auto samples = responses({6, 3, 1, 4});
  const Gradient full = full_gradient(gradients, samples);
  const auto error = [&](bool horvitz_thompson) {
    std::vector<Choices> choices;
    for (const Trajectory& t : samples)
      choices.push_back(all_cuts(static_cast<int64_t>(t.tokens.size()), 2, horvitz_thompson));
    EXPECT_EQ(choices[0].size() * choices[1].size() * choices[2].size() * choices[3].size(), 5u * 2 * 1 * 3);
    return relative_l2(mean_gradient(gradients, samples, choices), full);
  };
  EXPECT_LT(error(true), 1e-5);
  EXPECT_GT(error(false), 0.05);
}

// The mask that keeps nothing has a place in the average too: a trunk without LM head.
TEST_P(NatOf, RandomSubsetsAreUnbiasedWithHorvitzThompsonOnly) {
  Gradients gradients(objective(GetParam()));
  const auto samples = responses({6, 2});
  const Gradient full = full_gradient(gradients, samples);
  const auto error = [&](bool horvitz_thompson) {
    const std::vector<Choices> choices = {all_masks(6, 0.3, horvitz_thompson), {{1, full_plan(2)}}};
    EXPECT_EQ(choices[0].size(), 64u);
    return relative_l2(mean_gradient(gradients, samples, choices), full);
  };
  EXPECT_LT(error(true), 1e-5);
  EXPECT_GT(error(false), 0.05);
}

// Deterministic truncation never sees the last tokens: no average over its draws could be right.
TEST_P(NatOf, DeterministicTruncationIsBiased) {
  Gradients gradients(objective(GetParam()));
  const auto samples = responses({6, 3, 1, 4});
  std::vector<Choices> choices;
  for (const Trajectory& t : samples) choices.push_back({{1, det_plan(static_cast<int64_t>(t.tokens.size()), 0.5)}});
  EXPECT_GT(relative_l2(mean_gradient(gradients, samples, choices), full_gradient(gradients, samples)), 0.05);
}

INSTANTIATE_TEST_SUITE_P(Denominators, NatOf,
                         testing::Values(LossAgg::token_mean, LossAgg::seq_mean_token_mean, LossAgg::group_token_mean,
                                         LossAgg::seq_mean_token_sum_norm),
                         [](const auto& info) { return cat("mode", static_cast<int>(info.param)); });

// Tokens that are left out change nothing for those that are kept.  Breaks if a kernel's sums depend on the number of
// rows, or if a kept token saw one that was cut.
TEST(Nat, KeptTokensHaveTheLogprobsOfTheFullForward) {
  const auto samples = responses({41, 1, 17, 30, 5}, 3);
  World w(table_cpu, model());
  w.model.set_parameters(tiny_parameters(model(), 7));
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.max_rows = 60});
  const TokenOuts full = Learner::logprobs(w.model, w.activations, response_groups(samples), 1, {});
  for (const TokenSubset subset : {TokenSubset::rpc, TokenSubset::urs, TokenSubset::det})
    for (uint64_t key = 0; key < 8; key++) {
      ActorKeys keys = objective(LossAgg::token_mean);
      keys.token_subset = subset;
      keys.rpc_min_tokens = 3;
      keys.urs_probability = 0.4;
      std::vector<TokenPlan> plans;
      for (const Trajectory& t : samples)
        plans.push_back(draw_token_plan(keys, static_cast<int64_t>(t.tokens.size()), key, t.uid));
      const Update update = make_update(keys, kMaxTokens, samples, plans);
      const TokenOuts out = learner.accumulate(update.groups, update.terms, loss_spec(keys, 1));
      int kept = 0, left_out = 0;
      for (size_t m = 0; m < update.sample_of.size(); m++) {
        const size_t i = update.sample_of[m];
        ASSERT_EQ(std::ssize(update.groups[0].members[m].tokens), plans[i].length);
        std::vector<double> expected;
        for (int64_t t = 0; t < plans[i].length; t++)
          if (plans[i].weight[t] != 0) expected.push_back(full.of(full.logprob, i)[t]);
        const auto logprob = out.of(out.logprob, m);
        EXPECT_EQ(std::vector<double>(logprob.begin(), logprob.end()), expected) << "member " << i;
        kept += static_cast<int>(expected.size());
        left_out += static_cast<int>(samples[i].tokens.size() - expected.size());
      }
      EXPECT_GT(kept, 5);
      EXPECT_GT(left_out, 0);
    }
}

// Breaks if cut tokens are packed after all, or if the LM head runs for tokens that are not kept.
TEST(Nat, TheLedgerShowsWhatIsNotComputed) {
  Work full;
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{},
        {"actor.token_subset=rpc", "actor.rpc_min_tokens=5"},
        {"actor.token_subset=urs", "actor.urs_probability=0.3"},
        {"actor.token_subset=det", "actor.det_fraction=0.4"},
        {"actor.token_subset=rpc", "actor.rpc_min_tokens=5", "algorithm.adv_filter_threshold=1e-3"}}) {
    TrainingRun run(tiny_run("qwen2", keys), early_digit);
    const Metrics m = run.step();
    const Config& config = run.session.config;
    Work work;
    int32_t group = -1;
    for (const Trajectory& s : run.trainer->samples()) {
      if (s.dropped()) continue;
      const auto prompt = static_cast<int64_t>(s.prompt.size());
      if (s.group != group) work.add_prefix(prompt);
      group = s.group;
      const TokenPlan plan =
          draw_token_plan(config.actor, static_cast<int64_t>(s.tokens.size()),
                          rng_key(static_cast<uint64_t>(config.trainer.seed), RngStream::token_plan, 1), s.uid);
      work.add_response(prompt, plan.length,
                        std::count_if(plan.weight.begin(), plan.weight.end(), [](double w) { return w != 0; }));
    }
    SCOPED_TRACE(testing::PrintToString(keys));
    expect_learner_flops(run.session.ledger, run.session.model_config, work);
    EXPECT_EQ(m.get("tokens/trained"), work.rows);
    EXPECT_EQ(m.get("tokens/loss"), work.tokens);
    EXPECT_EQ(m.get("exact/checked_tokens"), work.tokens);
    EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
    if (keys.empty()) {
      full = work;
    } else {
      EXPECT_EQ(work.rows == full.rows, config.actor.token_subset == TokenSubset::urs);
      EXPECT_LT(work.rows, full.rows + 1);
      EXPECT_LT(static_cast<double>(work.tokens), 0.8 * static_cast<double>(full.tokens));
    }
  }
}

}  // namespace
}  // namespace pare::test
