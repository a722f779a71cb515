// Verdicts, weights of tokens, what they do to the loss, and the numbers that are logged about them.
#include <cmath>

#include "ops/token_loss.h"
#include "rl/advantages.h"
#include "rl/corrections.h"
#include "rl/filters.h"
#include "rl/loss.h"
#include "rl/mismatch.h"
#include "tests/rl_golden.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

using Keys = RolloutCorrectionKeys;

Keys weighted(RolloutIs form, RatioLevel level = RatioLevel::token) {
  Keys k;
  k.rollout_is = form;
  k.rollout_is_level = level;
  return k;
}

std::vector<float> logs(const std::vector<double>& xi) {
  std::vector<float> d;
  for (const double x : xi) d.push_back(static_cast<float>(std::log(x)));
  return d;
}

// A sample whose tokens have these ratios.
Trajectory sample(const std::vector<float>& log_ratio, int group = 0) {
  Trajectory t = trajectory(group, log_ratio.size());
  t.old_logprob.emplace();
  for (const float d : log_ratio) t.old_logprob->push_back(-1 + d);
  return t;
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); i++)
    EXPECT_NEAR(found[i], expected[i], 1e-6 * (1 + expected[i])) << "token " << i;
}

const std::vector<double> kXi = {1, 0.4, 0.6, 1.4, 1.6, 3, 8e-5};

TEST(Corrections, TokenWeights) {
  const auto d = logs(kXi);
  expect_near(xi_weights(weighted(RolloutIs::none), d), std::vector<double>(7, 1.0));
  expect_near(xi_weights(weighted(RolloutIs::paper), d), kXi);
  expect_near(xi_weights(weighted(RolloutIs::tis), d), {1, 0.4, 0.6, 1.4, 1.6, 2, 8e-5});
  expect_near(xi_weights(weighted(RolloutIs::icepop), d), {1, 0, 0.6, 1.4, 1.6, 3, 0});
  expect_near(xi_weights(weighted(RolloutIs::released), d), {1, 0, 0.6, 1.4, 0, 0, 0});
  Keys tighter = weighted(RolloutIs::tis);
  tighter.rollout_is_threshold = 1.5;
  expect_near(xi_weights(tighter, d), {1, 0.4, 0.6, 1.4, 1.5, 1.5, 8e-5});
  Keys narrow = weighted(RolloutIs::icepop);
  narrow.rollout_is_bounds = {0.5, 1.5};
  expect_near(xi_weights(narrow, d), {1, 0, 0.6, 1.4, 0, 0, 0});
}

// verl's rollout_rs = token: a mask, with or without the weights of another level.
TEST(Corrections, TokensOutsideTheThresholdsAreMasked) {
  const auto d = logs(kXi);
  Keys mask = weighted(RolloutIs::none);
  mask.rollout_rs = RolloutRs::token;
  mask.rollout_rs_threshold = {0.5, 1.5};
  EXPECT_TRUE(corrects(mask));
  EXPECT_TRUE(accepts(mask, d));
  expect_near(xi_weights(mask, d), {1, 0, 1, 1, 0, 0, 0});
  mask.rollout_is = RolloutIs::tis;
  expect_near(xi_weights(mask, d), {1, 0, 0.6, 1.4, 0, 0, 0});
  mask.rollout_is = RolloutIs::paper;
  mask.rollout_is_level = RatioLevel::geometric;
  const double mean = raw_weights(RatioLevel::geometric, d)[0];
  expect_near(xi_weights(mask, d), {mean, 0, mean, mean, 0, 0, 0});

  mask = weighted(RolloutIs::none);
  mask.rollout_rs = RolloutRs::token;
  mask.rollout_rs_threshold = {0.5, 1.5};
  std::vector<Trajectory> samples = {sample(d)};
  judge(mask, samples);
  set_corrections(mask, samples);
  ASSERT_TRUE(samples[0].correction);
  expect_near(*samples[0].correction, {1, 0, 1, 1, 0, 0, 0});
}

// The bound is f32's: a token at exactly ln(1e-4) stays, the next smaller number does not.
TEST(Corrections, VetoIsStrictAndOnRawRatios) {
  Keys k;
  k.veto = 1e-4;
  const float bound = static_cast<float>(std::log(1e-4));
  EXPECT_TRUE(accepts(k, std::vector<float>{0, bound, 0}));
  EXPECT_FALSE(accepts(k, std::vector<float>{0, std::nextafter(bound, -100.0f), 0}));
  EXPECT_FALSE(accepts(k, logs(kXi)));
  EXPECT_TRUE(accepts(k, std::vector<float>{-9.21f}));
  EXPECT_FALSE(accepts(k, std::vector<float>{-9.2104f}));
  EXPECT_FALSE(accepts(k, std::vector<float>{80, -80}));  // not hidden by its neighbour, as in a product
  k.veto = 1e-9;
  EXPECT_FALSE(accepts(k, std::vector<float>{-25}));  // beyond the clamp of exp
  k.veto = 0;
  EXPECT_TRUE(accepts(k, std::vector<float>{-1e30f}));
}

TEST(Corrections, GoldenRatios) {
  std::ifstream file("tests/golden/losses.json");
  ASSERT_TRUE(file) << "run the tests in the root of the repository";
  const nlohmann::json cases = nlohmann::json::parse(file).at("rollout_correction");
  EXPECT_EQ(cases.size(), 6u);
  for (const auto& item : cases.items()) {
    SCOPED_TRACE(item.key());
    const nlohmann::json& c = item.value();
    const auto& given = c.at("log_ratio");
    std::vector<float> d(100, 0.012f);  // "100x0.012"
    if (given.is_array()) d = given.get<std::vector<float>>();
    const auto tokens = [&](const char* key, RolloutIs form) {
      std::vector<double> w = xi_weights(weighted(form), d);
      w.resize(c.at(key).size());
      expect_near(w, c.at(key).get<std::vector<double>>());
    };
    tokens("verl_token_tis_2", RolloutIs::tis);
    tokens("verl_token_icepop_05_5", RolloutIs::icepop);
    const auto whole = [&](Keys k) { return xi_weights(k, d)[0]; };
    const auto near = [&](double x, const char* key) {
      EXPECT_NEAR(x, c.at(key).get<double>(), 1e-5 * (1 + c.at(key).get<double>())) << key;
    };
    near(whole(weighted(RolloutIs::paper, RatioLevel::geometric)), "geo_mean");
    Keys keep;
    keep.rollout_rs = RolloutRs::geometric;
    keep.rollout_rs_threshold = {0.999, 1.002};
    EXPECT_EQ(accepts(keep, d), c.at("seq_mask_tis_keep_0999_1002").get<bool>());
    Keys veto;
    veto.veto = 1e-4;
    EXPECT_EQ(!accepts(veto, d), c.at("sparse_rl_or_slime_veto_1e4_reject").get<bool>());
  }
}

// Two binary actions.  Token weights keep the sampler's distribution of first actions when they weigh the second:
// the product over the sequence gives the true gradient, token weights do not, and nobody should "fix" that.
TEST(Corrections, TokenWeightsAreBiasedAndTheProductIsNot) {
  const double d1 = 0.6, d2[2] = {0.3, 0.7}, s1 = 0.5, s2[2] = {0.6, 0.4};
  const auto p = [](double one, int action) { return action ? one : 1 - one; };
  double truth = 0, token = 0, sequence = 0;
  for (int a = 0; a < 2; a++)
    for (int b = 0; b < 2; b++) {
      const double reward = a == b, g1 = a - d1, g2 = b - d2[a];
      const double dense = p(d1, a) * p(d2[a], b), sparse = p(s1, a) * p(s2[a], b);
      const std::vector<float> d = logs({p(d1, a) / p(s1, a), p(d2[a], b) / p(s2[a], b)});
      const auto t = xi_weights(weighted(RolloutIs::paper), d);
      truth += dense * reward * (g1 + g2);
      token += sparse * reward * (t[0] * g1 + t[1] * g2);
      sequence += sparse * reward * t[0] * t[1] * (g1 + g2);
    }
  EXPECT_NEAR(truth, 0.042, 1e-9);
  EXPECT_NEAR(sequence, 0.042, 1e-6);
  EXPECT_NEAR(token, 0, 1e-6);
}

// Sparse-RL, eq. 16-17: away from the clip, xi * d(-min(w A, ..))/dlp is -(pi_theta / pi_sparse) A.
TEST(Corrections, GradientIsThatOfTheRatioToTheSampler) {
  const LossSpec spec{.policy = PolicyLoss::ppo, .clip_low = 1e9f, .clip_high = 1e9f};
  for (const double sampler : {-0.3, -2.0, -7.5})
    for (const double old : {-0.5, -3.0})
      for (const double now : {-0.4, -1.0, -3.1})
        for (const double A : {1.5, -0.7}) {
          const auto xi = xi_weights(weighted(RolloutIs::paper), std::vector<float>{static_cast<float>(old - sampler)});
          const auto t = token_loss<double>(spec, now, old, 0, A, 0, [](double x) { return std::exp(x); });
          const double expected = -std::exp(now - sampler) * A;
          EXPECT_NEAR(xi[0] * t.d_policy, expected, 1e-5 * std::abs(expected));
        }
}

TEST(Corrections, EqualLogprobsHaveWeightExactlyOne) {
  const std::vector<float> d(9, 0.0f);
  for (const RolloutIs form : {RolloutIs::paper, RolloutIs::tis, RolloutIs::icepop, RolloutIs::released})
    for (const RatioLevel level : {RatioLevel::token, RatioLevel::geometric})
      EXPECT_EQ(xi_weights(weighted(form, level), d), std::vector<double>(9, 1.0));
  std::vector<Trajectory> update = {sample(d), sample(d)};
  for (Trajectory& t : update) t.ruling = Ruling::accepted;
  set_corrections(weighted(RolloutIs::released), update);
  for (const Trajectory& t : update) EXPECT_EQ(t.correction, std::vector<double>(9, 1.0));
}

// What Sparse-RL's code computes, by hand: weights min(xi, 1.5) over their mean on all tokens of the update, rejected
// responses too; tokens outside [.5, 1.5] left out; each response over the tokens that it has left.
TEST(Corrections, Released) {
  Keys k = weighted(RolloutIs::released);
  k.veto = 1e-4;
  std::vector<Trajectory> update = {sample(logs({1, 0.4, 0.6, 1.4})), sample(logs({1.6, 3, 8e-5})),
                                    sample(logs({1.6, 0.9})), sample(logs({2}))};
  update[3].filtered = true;  // by the filter: never judged
  judge(k, update);
  EXPECT_EQ(update[1].ruling, Ruling::rejected);
  EXPECT_TRUE(update[1].dropped());
  EXPECT_EQ(update[3].ruling, Ruling::none);
  set_corrections(k, update);
  const double mean = (1 + 0.4 + 0.6 + 1.4 + 1.5 + 1.5 + 8e-5 + 1.5 + 0.9) / 9;
  expect_near(*update[0].correction, {4 / 3.0 / mean, 0, 0.6 * 4 / 3 / mean, 1.4 * 4 / 3 / mean});
  expect_near(*update[0].kl_correction, {4 / 3.0, 0, 4 / 3.0, 4 / 3.0});
  expect_near(*update[2].correction, {0, 0.9 * 2 / mean});
  EXPECT_FALSE(update[1].correction);

  ActorKeys c;
  c.loss_agg_mode = LossAgg::seq_mean_token_mean;
  const std::vector<TokenPlan> plans = {full_plan(4), full_plan(3), full_plan(2), full_plan(1)};
  const Update u = make_update(c, 512, update, plans);
  ASSERT_EQ(u.groups.size(), 1u);
  ASSERT_EQ(u.groups[0].members.size(), 2u);
  EXPECT_NEAR(u.terms.weight[2], 0.6 / mean / 3 / 4, 1e-7);  // 3 tokens left, 4 responses
  EXPECT_NEAR(u.terms.kl_weight[2], 1.0 / 3 / 4, 1e-7);
  EXPECT_EQ(u.terms.kl_weight[4], 0);  // the first token of the other
}

// Rejected responses leave what the others count unchanged: sequences and tokens (valid), or not (kept).
TEST(Corrections, DenominatorsOfRejectedResponses) {
  const double losses[2] = {1, 4};
  for (const auto& [mode, denominator, expected] :
       {std::tuple{LossAgg::seq_mean_token_mean, LossDenominator::valid, 0.5},
        {LossAgg::seq_mean_token_mean, LossDenominator::kept, 1.0},
        {LossAgg::token_mean, LossDenominator::kept, 1.0},
        {LossAgg::token_mean, LossDenominator::valid, 0.25}}) {
    std::vector<Trajectory> s = {sample({0, 0}), sample({0, 0, 0, 0, 0, -10})};
    Keys k;
    k.veto = 1e-4;
    judge(k, s);
    ActorKeys c;
    c.loss_agg_mode = mode;
    c.loss_denominator = denominator;
    const Update u = make_update(c, 512, s, std::vector<TokenPlan>{full_plan(2), full_plan(6)});
    double loss = 0;
    const std::vector<int64_t> offsets = loss_row_offsets(u.groups);
    for (size_t m = 0; m < u.sample_of.size(); m++)
      for (int64_t r = offsets[m]; r < offsets[m + 1]; r++) loss += u.terms.weight[r] * losses[u.sample_of[m]];
    EXPECT_DOUBLE_EQ(loss, expected);
  }
}

// The veto sees tokens that the plan cuts; weights and plan multiply.
TEST(Corrections, ComposeWithTokenSubsets) {
  Keys k = weighted(RolloutIs::tis);
  k.veto = 1e-4;
  std::vector<Trajectory> s = {sample(logs({0.5, 1, 3, 1})), sample(logs({1, 1, 1, 8e-5}))};
  judge(k, s);
  set_corrections(k, s);
  ActorKeys c;
  c.loss_agg_mode = LossAgg::seq_mean_token_mean;
  const Update u = make_update(c, 512, s, std::vector<TokenPlan>{rpc_plan(4, 1, 3, true), rpc_plan(4, 1, 2, true)});
  ASSERT_EQ(u.groups[0].members.size(), 1u);
  const TokenTerms& terms = u.terms;
  ASSERT_EQ(terms.weight.size(), 3u);
  EXPECT_NEAR(terms.weight[0], 0.5 / 8, 1e-7);         // 1 / (2 responses x 4 tokens)
  EXPECT_NEAR(terms.weight[1], 1 / 0.75 / 8, 1e-7);    // p = 3/4
  EXPECT_NEAR(terms.weight[2], 2 / 0.5 / 8, 1e-7);     // p = 2/4, cap 2
  EXPECT_NEAR(terms.kl_weight[2], 1 / 0.5 / 8, 1e-7);  // the cap and the ratio are the policy term's alone
}

// The gradient of the accepted is, bit by bit, what it is when the rejected one is there with an advantage of 0.
TEST(Corrections, VetoLeavesTheOthersGradientsBitwiseUnchanged) {
  const ModelConfig config = tiny_config("qwen3", true);
  World w(table_cpu, config);
  w.model.set_parameters(tiny_parameters(config, 7));
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.max_rows = 50});
  Rng rng(rng_key(3, RngStream::test, 1));
  std::vector<Trajectory> samples;
  std::vector<TokenPlan> plans;
  for (int i = 0; i < 6; i++) {
    Trajectory t = sample(std::vector<float>(static_cast<size_t>(5 + 3 * i), 0.01f * static_cast<float>(i)), i / 3);
    t.prompt = {1, 5, 9};
    t.tokens = random_ids(rng, static_cast<int>(t.tokens.size()), config.vocab);
    t.advantage = i % 2 ? 1 : -0.5;
    plans.push_back(full_plan(static_cast<int64_t>(t.tokens.size())));
    samples.push_back(std::move(t));
  }
  samples[4].old_logprob->at(6) -= 12;
  ActorKeys c;
  const auto gradient = [&](const std::vector<Trajectory>& s) {
    const Update u = make_update(c, 512, s, plans);
    learner.accumulate(u.groups, u.terms, loss_spec(c, 1));
    const auto g = learner.gradients();
    learner.drop_gradients();
    return g;
  };
  std::vector<Trajectory> vetoed = samples, silent = samples;
  Keys k;
  k.veto = 1e-4;
  judge(k, vetoed);
  for (int i = 0; i < 6; i++) EXPECT_EQ(vetoed[i].dropped(), i == 4);
  silent[4].advantage = 0;
  const auto without = gradient(vetoed), with = gradient(samples);
  EXPECT_EQ(without, gradient(silent));
  EXPECT_NE(without, with);
}

TEST(Corrections, GroupStatisticsOverTheAccepted) {
  AlgorithmKeys keys;
  keys.norm_adv_by_std_in_grpo = false;
  std::vector<Trajectory> s = {trajectory(0, 2, 1), trajectory(0, 2, 0), trajectory(0, 2, 0), trajectory(0, 2, 1),
                               trajectory(1, 2, 1), trajectory(1, 2, 0), trajectory(2, 2, 0), trajectory(2, 2, 0)};
  drop_groups_without_signal(s);
  for (const Trajectory& t : s) EXPECT_EQ(t.filtered, t.group == 2);
  s[2].ruling = Ruling::rejected;
  s[5].ruling = Ruling::rejected;
  set_advantages(keys, s);
  EXPECT_DOUBLE_EQ(s[0].advantage, 1 / 3.0);
  EXPECT_DOUBLE_EQ(s[1].advantage, -2 / 3.0);
  EXPECT_EQ(s[2].advantage, 0);
  EXPECT_EQ(s[4].advantage, 0);  // alone: nothing to compare with
  drop_small_advantages(0.1, s);
  for (int i = 0; i < 8; i++) EXPECT_EQ(s[i].filtered, i == 4 || i >= 6) << i;  // 2 and 5 are out for another reason
}

TEST(Corrections, TooFewAccepted) {
  Keys k;
  EXPECT_TRUE(enough_accepted(k, {10, 0}));
  EXPECT_TRUE(enough_accepted(k, {}));
  k.min_accepted = 0.5;
  EXPECT_TRUE(enough_accepted(k, {10, 5}));
  EXPECT_FALSE(enough_accepted(k, {10, 4}));
  EXPECT_TRUE(enough_accepted(k, {}));
}

// ---- what is logged

TEST(MismatchMetrics, AreVerlsOnAnExample) {
  Mismatch m;
  m.add(std::vector<float>{-1, -2}, std::vector<float>{-1.5f, -1}, std::vector<float>{0.5f, 0.75f}, 62);
  m.add(std::vector<float>{-12, -1, -1}, std::vector<float>{-2, -1, -1}, std::vector<float>{0.25f, 1, 1}, 63);
  Metrics r;
  m.report(r, 1e-4);
  const auto get = [&](const char* name) { return r.get(cat("rollout_corr/", name)); };
  EXPECT_NEAR(get("kl"), (-0.5 + 1 + 10) / 5, 1e-6);
  EXPECT_NEAR(get("k3_kl"), (std::exp(0.5) - 1.5 + std::exp(-1) + std::exp(-10) - 1 + 10) / 5, 1e-6);
  EXPECT_NEAR(get("training_ppl"), (std::exp(1.5) + std::exp(14 / 3.0)) / 2, 1e-4);
  EXPECT_NEAR(get("rollout_ppl"), (std::exp(1.25) + std::exp(4 / 3.0)) / 2, 1e-6);
  EXPECT_NEAR(get("log_ppl_diff"), (0.25 + 10 / 3.0) / 2, 1e-6);
  EXPECT_NEAR(get("log_ppl_abs_diff"), (0.25 + 10 / 3.0) / 2, 1e-6);
  EXPECT_NEAR(get("ppl_ratio"), (std::exp(0.25) + std::exp(10 / 3.0)) / 2, 1e-6);
  EXPECT_NEAR(get("chi2_token"), (std::exp(1) + std::exp(-2) + std::exp(-20) + 2) / 5 - 1, 1e-6);
  EXPECT_NEAR(get("xi_min"), std::exp(-10), 1e-9);
  EXPECT_NEAR(get("xi_max"), std::exp(0.5), 1e-6);
  EXPECT_EQ(get("xi_p50"), 1);
  EXPECT_DOUBLE_EQ(get("catastrophic_token_fraction"), 0.2);
  EXPECT_DOUBLE_EQ(get("catastrophic_seq_fraction"), 0.5);
  EXPECT_DOUBLE_EQ(get("acceptance_rate"), 0.7);
  EXPECT_DOUBLE_EQ(get("acceptance_rate_p5/context_0_63"), 0.25);
  EXPECT_DOUBLE_EQ(get("acceptance_rate_p5/context_64_127"), 1);
}

// verl's compute_is_metrics on two responses of two tokens: it sees all of them, before anything is capped or rejected.
TEST(MismatchMetrics, WeightsUnderVerlsNamesAreVerls) {
  Keys keys;
  keys.rollout_is = RolloutIs::tis;
  keys.rollout_is_threshold = 2;
  keys.veto = 0.2;
  std::vector<Trajectory> s = {trajectory(0, 2, 1), trajectory(0, 2, 0)};
  const auto set = [](Trajectory& t, double first, double second) {
    t.logprob = {-1, -1};
    t.old_logprob = std::vector{static_cast<float>(std::log(first) - 1), static_cast<float>(std::log(second) - 1)};
  };
  set(s[0], 4, 1);
  set(s[1], 0.1, 1.5);
  judge(keys, s);
  set_corrections(keys, s);
  Metrics m;
  report_corrections(keys, s, m);
  const auto get = [&](const char* name) { return m.get(cat("rollout_corr/", name)); };
  EXPECT_EQ(get("rejection_rate"), 0.5);
  EXPECT_NEAR(get("rollout_is_mean"), (4 + 1 + 0.1 + 1.5) / 4, 1e-6);
  EXPECT_NEAR(get("rollout_is_min"), 0.1, 1e-6);
  EXPECT_NEAR(get("rollout_is_max"), 4, 1e-6);
  EXPECT_NEAR(get("rollout_is_std"), std::sqrt(1.875 - 1.5625), 1e-6);  // of 2, 1, 0.5, 1.5
  EXPECT_NEAR(get("rollout_is_eff_sample_size"), 1.5625 / 1.875, 1e-6);
  EXPECT_NEAR(get("weight_mean"), 1.5, 1e-6);  // of 2, 1: what the loss applies
  EXPECT_NEAR(get("weight_min"), 1, 1e-6);
  EXPECT_NEAR(get("weight_max"), 2, 1e-6);
  EXPECT_NEAR(get("weight_eff_sample_size"), 2.25 / 2.5, 1e-6);
}

// Tokens saved both ways, by the residency of budget 512 and buffer 128 after a prompt of 100.
TEST(MismatchMetrics, TokensSavedBothWays) {
  for (const auto& [n, mean, peak] : {std::tuple{512, 0.0, 0.0}, {4096, 0.7445, 0.8475}}) {
    RolloutStats s;
    int64_t slots = 100;
    for (int t = 0; t < n; t++) {
      slots++;
      s.resident += static_cast<double>(slots);
      s.dense += 101 + t;
      s.decode_rows++;
      s.peak_resident = std::max(s.peak_resident, static_cast<double>(slots));
      if (slots == 640) {
        slots = 512;
        s.compressions++;
      }
    }
    s.peak_dense = 100 + n;
    s.read = s.resident;
    s.peak_pages = 40;
    Metrics m;
    report_kv(s, 1024, m);
    EXPECT_NEAR(m.get("kv/tokens_saved/mean"), mean, 5e-5);
    EXPECT_NEAR(m.get("kv/tokens_saved/peak"), peak, 5e-5);
    EXPECT_EQ(m.get("perf/kv_peak_bytes"), 40960);
  }
}

}  // namespace
}  // namespace pare::test
