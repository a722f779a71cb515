// Values of metrics, computed again from the samples of a step and from models that other runs have trained.
#include <cmath>

#include "comm/threads.h"
#include "rl/corrections.h"
#include "rl/loss.h"
#include "rl/mismatch.h"
#include "rl/token_plan.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

// Log-probs and entropies of the samples under the model of a run, one after another.
TokenOuts under(TrainingRun& run, const std::vector<Trajectory>& samples) {
  return Learner::logprobs(*run.session.model, run.session.activations, response_groups(samples), 1,
                           run.session.learner_options());
}

struct Expected {
  const char* metric;
  double value;
  double error = 1e-5;
};
void expect_metrics(const Metrics& m, const std::vector<Expected>& expected) {
  for (const Expected& e : expected)
    EXPECT_NEAR(m.get(e.metric), e.value, e.error * std::max(1.0, std::abs(e.value))) << e.metric;
}

const std::vector<std::string> kTwoEpochs = {"actor.use_kl_loss=true", "actor.kl_loss_type=k2",
                                             "actor.loss_agg_mode=token-mean", "actor.clip_ratio_c=1.5"};

// Two updates on the same samples: the second finds the model that a run of one epoch ends with.
TEST(MetricValues, OfTwoUpdates) {
  std::vector<std::string> two = kTwoEpochs;
  two.push_back("actor.ppo_epochs=2");
  TrainingRun run(tiny_run("qwen3", two)), before(tiny_run("qwen3", kTwoEpochs)), after(tiny_run("qwen3", kTwoEpochs));
  const Metrics m = run.step();
  after.step();
  const std::vector<Trajectory>& samples = run.trainer->samples();
  const TokenOuts first = under(before, samples), second = under(after, samples);
  const ActorKeys& keys = run.session.config.actor;
  double entropy = 0, moved = 0, kl = 0, loss = 0, clipped = 0, clipped_dual = 0;
  int64_t tokens = 0, rows = 0;
  for (size_t i = 0; i < samples.size(); i++) {
    const double a = samples[i].advantage;
    const auto old = first.of(first.logprob, i), now = second.of(second.logprob, i);
    for (size_t t = 0; t < old.size(); t++) {
      const double r = std::exp(now[t] - old[t]);
      const double free = -a * r, bound = -a * std::clamp(r, 1 - keys.clip_ratio_low, 1 + keys.clip_ratio_high);
      const double worse = std::max(free, bound), dual = a < 0 ? std::min(worse, -a * keys.clip_ratio_c) : worse;
      entropy += first.of(first.entropy, i)[t] + second.of(second.entropy, i)[t];
      moved += old[t] - now[t];
      kl += (now[t] - old[t]) * (now[t] - old[t]) / 2;
      loss += -a + dual;
      clipped_dual += dual < worse;
      clipped += bound > free && dual == worse;
    }
    tokens += std::ssize(samples[i].tokens);
    rows += std::ssize(samples[i].tokens) - 1;
    if (samples[i].member == 0) rows += std::ssize(samples[i].prompt);
  }
  const auto n = static_cast<double>(tokens);
  ASSERT_EQ(std::ssize(first.logprob), tokens);
  EXPECT_GT(std::abs(moved / n), 1e-3) << "a wrong sign would not be seen";
  EXPECT_GT(clipped, 0);
  EXPECT_GT(clipped_dual, 0);
  expect_metrics(m, {{"actor/entropy", entropy / (2 * n)},
                     {"actor/ppo_kl", moved / (2 * n)},
                     {"actor/kl_loss", kl / (2 * n)},
                     {"actor/pg_loss", loss / (2 * n)},
                     {"actor/pg_clipfrac", clipped / (2 * n), 0.01},
                     {"actor/pg_clipfrac_lower", clipped_dual / (2 * n), 0.01},
                     {"actor/updates", 2},
                     {"actor/skipped_updates", 0},
                     {"actor/lr", 0.01},
                     {"tokens/loss", 2 * n},
                     {"tokens/trained", 2.0 * static_cast<double>(rows)},
                     {"exact/checked_tokens", n},
                     {"exact/mismatch_tokens", 0}});
}

// Without a change of the weights the gradients of two mini-batches are those of their samples.
TEST(MetricValues, GradNormIsTheMeanOverMiniBatches) {
  TrainingRun run(tiny_run("qwen3", {"actor.ppo_mini_batch_size=3", "actor.optim.lr=1e-30"}));
  TrainingRun still(tiny_run("qwen3"));
  const Metrics m = run.step();
  const std::vector<Trajectory>& samples = run.trainer->samples();
  const ActorKeys& keys = run.session.config.actor;
  std::vector<double> norms;
  for (size_t begin = 0; begin < samples.size(); begin += 15) {
    const std::span<const Trajectory> half = std::span(samples).subspan(begin, 15);
    std::vector<TokenPlan> plans;
    for (const Trajectory& s : half) plans.push_back(full_plan(std::ssize(s.tokens)));
    const Update u = make_update(keys, run.session.config.data.max_response_length, half, plans);
    Learner& learner = still.trainer->learner();
    learner.accumulate(u.groups, u.terms, loss_spec(keys, 1));
    double squares = 0;
    for (const double g : learner.gradients()) squares += g * g;
    learner.drop_gradients();
    norms.push_back(std::sqrt(squares));
  }
  ASSERT_EQ(norms.size(), 2u);
  EXPECT_GT(std::abs(norms[0] - norms[1]), 0.01 * norms[0]);
  expect_metrics(m, {{"actor/grad_norm", (norms[0] + norms[1]) / 2}, {"actor/updates", 2}});
}

// Every step counts its own samples.
TEST(MetricValues, OfTheSamplesOfEachStep) {
  TrainingRun run(tiny_run("qwen3", {"algorithm.adv_filter_threshold=0.5", "algorithm.norm_adv_by_std_in_grpo=false"}),
                  early_digit);
  for (int step = 1; step <= 3; step++) {
    SCOPED_TRACE(step);
    const Metrics m = run.step();
    Summary score, reward, advantage, length, prompt, cut, small, resident, equal, right;
    double generated = 0, loss_tokens = 0;
    const std::vector<Trajectory>& samples = run.trainer->samples();
    ASSERT_EQ(samples.size(), 30u);
    for (size_t i = 0; i < samples.size(); i++) {
      const Trajectory& s = samples[i];
      const auto n = static_cast<double>(s.tokens.size()), p = static_cast<double>(s.prompt.size());
      score.add(s.score);
      reward.add(s.score);
      length.add(n);
      prompt.add(p);
      cut.add(!s.finished);
      generated += n;
      for (double t = 1; t < n; t++) resident.add(p + t);
      if (i % 5 > 0) continue;
      Summary group;
      for (size_t k = i; k < i + 5; k++) group.add(samples[k].score);
      for (size_t k = i; k < i + 5; k++) {
        const double a = samples[k].score - group.mean();
        advantage.add(a);
        small.add(std::abs(a) < 0.5);
        if (std::abs(a) >= 0.5) loss_tokens += static_cast<double>(samples[k].tokens.size());
      }
      equal.add(group.min() == group.max());
      right.add(group.min() == group.max() && group.min() > 0);
    }
    expect_metrics(m, {{"training/global_step", static_cast<double>(step)},
                       {"critic/score/mean", score.mean()},
                       {"critic/score/max", score.max()},
                       {"critic/score/min", score.min()},
                       {"critic/rewards/mean", reward.mean()},
                       {"critic/rewards/max", reward.max()},
                       {"critic/rewards/min", reward.min()},
                       {"critic/advantages/mean", advantage.mean()},
                       {"critic/advantages/max", advantage.max()},
                       {"critic/advantages/min", advantage.min()},
                       {"response_length/mean", length.mean()},
                       {"response_length/max", length.max()},
                       {"response_length/min", length.min()},
                       {"response_length/clip_ratio", cut.mean()},
                       {"prompt_length/mean", prompt.mean()},
                       {"prompt_length/max", prompt.max()},
                       {"prompt_length/min", prompt.min()},
                       {"filter/zero_std_fraction", equal.mean()},
                       {"filter/all_right_fraction", right.mean()},
                       {"filter/small_adv_fraction", small.mean()},
                       {"rollout/gen_batches", 1},
                       {"rollout/groups", 6},
                       {"tokens/generated", generated},
                       {"tokens/loss", loss_tokens},
                       {"kv/resident_tokens/mean", resident.mean()},
                       {"kv/resident_tokens/max", resident.max()},
                       {"kv/read_tokens/mean", resident.mean()},
                       {"kv/tokens_saved/mean", 0},
                       {"kv/compressions", 0},
                       {"kv/evicted_tokens", 0},
                       {"perf/graph_share", 0}});
    double parts = 0;
    for (const char* part : {"gen", "ref", "update_actor"}) parts += m.get(cat("timing_s/", part));
    EXPECT_LE(parts, m.get("timing_s/step")) << "seconds of this step alone";
  }
}

// The mean over samples of the mean over their tokens, whatever their lengths.
TEST(MetricValues, KlInTheRewardIsPerToken) {
  TrainingRun run(tiny_run("qwen3", {"algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.25"})),
      start(tiny_run("qwen3"));
  run.step();
  const Metrics m = run.step();
  const std::vector<Trajectory>& samples = run.trainer->samples();
  const TokenOuts reference = under(start, samples);
  Summary per_token, reward;
  for (size_t i = 0; i < samples.size(); i++) {
    double sum = 0;
    for (size_t t = 0; t < samples[i].tokens.size(); t++)
      sum += samples[i].logprob[t] - reference.of(reference.logprob, i)[t];
    per_token.add(sum / static_cast<double>(samples[i].tokens.size()));
    reward.add(samples[i].score - 0.25 * sum);
  }
  EXPECT_GT(std::abs(per_token.mean()), 1e-4);
  expect_metrics(m, {{"actor/reward_kl_penalty", per_token.mean()}, {"critic/rewards/mean", reward.mean(), 1e-4}});
}

Trajectory with_ratios(const std::vector<double>& ratios) {
  Trajectory t;
  t.prompt = {1, 4};
  for (const double xi : ratios) {
    t.tokens.push_back(5);
    t.logprob.push_back(-1);
    if (!t.old_logprob) t.old_logprob.emplace();
    t.old_logprob->push_back(static_cast<float>(std::log(xi) - 1));
  }
  return t;
}

// Tokens that are not in the loss: all of a rejected sample, and those of weight 0 of the others.
TEST(MetricValues, MaskedFractionCountsRejectedTokens) {
  RolloutCorrectionKeys keys;
  keys.rollout_is = RolloutIs::icepop;
  keys.rollout_is_bounds = {0.5, 2};
  keys.veto = 0.1;
  std::vector<Trajectory> s = {with_ratios({1, 0.01, 1}), with_ratios({1, 3, 1, 1}), with_ratios({1})};
  judge(keys, s);
  set_corrections(keys, s);
  Metrics m;
  report_corrections(keys, s, m);
  expect_metrics(m, {{"rollout_corr/judged_fraction", 1},
                     {"rollout_corr/rejection_rate", 1 / 3.0},
                     {"rollout_corr/rollout_rs_seq_masked_fraction", 1 / 3.0},
                     {"rollout_corr/rollout_rs_masked_fraction", (3 + 1) / 8.0},
                     {"rollout_corr/rollout_is_ratio_fraction_high", 1 / 8.0},
                     {"rollout_corr/rollout_is_ratio_fraction_low", 1 / 8.0},
                     {"rollout_corr/weight_mean", 4 / 5.0}});
}

// A ratio at a bound is neither above nor below it.
TEST(MetricValues, FractionsOutsideTheBounds) {
  RolloutCorrectionKeys keys;
  keys.rollout_is_threshold = 1;
  keys.rollout_is_bounds = {1, 1};
  for (const RolloutIs form : {RolloutIs::tis, RolloutIs::icepop}) {
    keys.rollout_is = form;
    std::vector<Trajectory> s = {with_ratios({1, 2, 1, 0.5}), with_ratios({3})};
    judge(keys, s);
    set_corrections(keys, s);
    Metrics m;
    report_corrections(keys, s, m);
    EXPECT_EQ(m.get("rollout_corr/rollout_is_ratio_fraction_high"), 2 / 5.0);
    if (form == RolloutIs::tis) continue;
    EXPECT_EQ(m.get("rollout_corr/rollout_is_ratio_fraction_low"), 1 / 5.0);
    EXPECT_EQ(m.get("rollout_corr/rollout_rs_masked_fraction"), 3 / 5.0);
  }
}

TEST(MetricValues, CatastrophicIsBelowTheVeto) {
  const std::vector<Trajectory> s = {with_ratios({1, 0.4, 0.3}), with_ratios({0.6, 1}), with_ratios({1e-5, 1, 1})};
  for (const auto& [veto, tokens, sequences] : {std::tuple{0.5, 3 / 8.0, 2 / 3.0}, {0.0, 1 / 8.0, 1 / 3.0}}) {
    RolloutCorrectionKeys keys;
    keys.veto = veto;
    Metrics m;
    report_mismatch(keys, s, m);
    expect_metrics(m, {{"rollout_corr/catastrophic_token_fraction", tokens},
                       {"rollout_corr/catastrophic_seq_fraction", sequences}});
  }
}

// Counts are written as integers, other numbers and counts too large to be exact as decimals.
TEST(MetricValues, AreWrittenInFull) {
  Metrics m;
  m.set("flops", 123456789012345);
  m.set("half", 0.5);
  m.set("huge", 1e300);
  m.set("low", -1e18);
  m.set("none", NAN);
  EXPECT_EQ(m.json(), R"({"flops":123456789012345,"half":0.5,"huge":1e+300,"low":-1e+18,"none":null})");
}

// The wait of one generate(), not of all of them so far: the first is delayed on one rank.
TEST(MetricValues, WaitForRanksIsOfOneRollout) {
  const Config config = tiny_run("qwen3", {"learner.shards=2"});
  run_ranks(1, 2, [&](Comm& comm) {
    Session session(config, table_cpu, false, {}, true, comm);
    Rollout rollout(*session.model, session.rollout_limits(), session.kv, session.rollout_scratch());
    for (int i = 0; i < 2; i++) {
      std::vector<Request> requests;
      for (uint64_t r = 0; r < 2; r++) requests.push_back({{1, 5, 6}, {r}, 8});
      bool slow = i == 0 && comm.rank() == 1;
      const auto start = std::chrono::steady_clock::now();
      Sampling sampling;
      sampling.key = 3;
      rollout.generate(requests, sampling, {}, [&](const Completion&) {
        if (std::exchange(slow, false)) std::this_thread::sleep_for(std::chrono::milliseconds(400));
      });
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      const double waited = rollout.stats().waited / comm.ranks();
      EXPECT_LE(waited, seconds) << i;
      if (i == 0) {
        EXPECT_GT(waited, 0.1);
      }
    }
  });
}

}  // namespace
}  // namespace pare::test
