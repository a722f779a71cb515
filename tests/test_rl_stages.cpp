// Stages of a GRPO step that count what another stage left: corrections by update, the rate of an update with few
// accepted responses, groups that are dropped before something is computed about them.
#include <cmath>
#include <map>
#include <numeric>

#include "rl/corrections.h"
#include "rl/loss.h"
#include "rl/mismatch.h"
#include "rl/obrs.h"
#include "rl/token_plan.h"
#include "tests/rl_golden.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

// A sampler that reads a few blocks only: its policy is not the learner's.
const Keys sparse = {"rollout.kv.method=quest",   "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=2",
                     "rollout.kv.blocks.first=0", "rollout.kv.blocks.last=1", "rollout.kv.blocks.dense_layers=0",
                     "rollout.check_exact=false"};

std::string correction(const char* rest) { return cat("algorithm.rollout_correction.", rest); }

// A step of a run whose scores are a function of (request, sample).
struct Step {
  using Score = std::function<double(int request, int sample)>;
  explicit Step(
      const Keys& keys, const Score& score = [](int, int sample) { return sample % 2; })
      : run(tiny_run("qwen3", keys)), keys(run.trainer->keys()) {
    const auto scores = [score](auto, std::span<const Completion> completions) {
      std::vector<double> all;
      for (const Completion& c : completions) all.push_back(score(c.request, c.sample));
      return all;
    };
    const auto prompts = [this] {
      std::vector<Request> requests = run.trainer->next_prompts();
      for (size_t i = 0; i < requests.size(); i++)
        for (const uint64_t uid : requests[i].uids) place[uid] = static_cast<int>(i);
      return requests;
    };
    grpo = std::make_unique<Grpo>(this->keys, run.trainer->engine(),
                                  GrpoRun{.prompts = prompts, .scores = scores, .progress = {}});
    grpo->step(1, metrics);
  }
  TrainingRun run;
  GrpoKeys keys;
  std::map<uint64_t, int> place;  // of a response: the number of its prompt in the batch
  std::unique_ptr<Grpo> grpo;
  Metrics metrics;
};

// GSPO's ratio is the geometric mean over the sequence (Zheng et al. 2025, arXiv 2507.18071, eq. 7).
TEST(Stages, SequenceRatiosAreMeans) {
  std::vector<Trajectory> s = {trajectory(0, 3), trajectory(0, 2)};
  s[0].old_logprob = {-1.f, -2.f, -3.f};
  s[1].old_logprob = {-0.5f, -0.25f};
  const std::vector<TokenPlan> plans = {full_plan(3), full_plan(2)};
  Update u = make_update(ActorKeys(), 512, s, plans);
  const TokenOuts now{.offsets = {0, 3, 5}, .logprob = {-1.5, -2.25, -2.5, -1, -0.75}};
  set_sequence_ratios(u, now);
  EXPECT_EQ(u.terms.log_ratio, (std::vector<double>{-0.25 / 3, -0.25 / 3, -0.25 / 3, -0.5, -0.5}));
}

TEST(Stages, WeightsOfTheKlHaveTheirOwnCorrection) {
  std::vector<Trajectory> s = {trajectory(0, 2), trajectory(0, 2)};
  s[0].correction = {3, 0};
  s[0].kl_correction = {2, 0};
  const std::vector<TokenPlan> plans = {full_plan(2), full_plan(2)};
  const TokenTerms terms = make_update(ActorKeys(), 512, s, plans).terms;
  const double plain = terms.weight[2];
  ASSERT_GT(plain, 0);
  EXPECT_EQ(terms.weight, (std::vector<double>{3 * plain, 0, plain, plain}));
  EXPECT_EQ(terms.kl_weight, (std::vector<double>{2 * plain, 0, plain, plain}));
}

// exp sees log-ratios within +-20, of tokens and of their means.
TEST(Stages, RatiosAreClamped) {
  const double most = std::exp(20.0), least = std::exp(-20.0);
  EXPECT_EQ(raw_weights(RatioLevel::token, std::vector<float>{50, -50, 800, -800, 20, 19.5f}),
            (std::vector<double>{most, least, most, least, most, std::exp(19.5)}));
  EXPECT_EQ(raw_weights(RatioLevel::geometric, std::vector<float>{25, 35}), (std::vector<double>{most, most}));
  EXPECT_EQ(raw_weights(RatioLevel::geometric, std::vector<float>{-30, -40}), (std::vector<double>{least, least}));
}

// A response of which no token lies inside the bounds counts nothing, and no NaN.
TEST(Stages, ReleasedWeightsOfNothingAreZero) {
  RolloutCorrectionKeys k;
  k.rollout_is = RolloutIs::released;
  std::vector<Trajectory> s = {trajectory(0, 2), trajectory(0, 2)};
  s[0].old_logprob = {1.f, 2.f};
  s[1].old_logprob = {-1.f, -1.f};
  judge(k, s);
  set_corrections(k, s);
  EXPECT_EQ(s[0].correction, (std::vector<double>{0, 0}));
  EXPECT_EQ(s[0].kl_correction, (std::vector<double>{0, 0}));
  EXPECT_NEAR(s[1].correction->at(0), 1 / 1.25, 1e-12);
}

TEST(Stages, WeightsOfRejectionAreClamped) {
  std::vector<Trajectory> s = {trajectory(0, 3)};
  s[0].old_logprob = {799.f, 49.f, -1.f};
  s[0].ruling = Ruling::accepted;
  ObrsKeys k;
  k.enable = true;
  k.lambda = 1;
  k.cap = 0;
  set_obrs(k, 1, s);
  EXPECT_EQ(s[0].correction, (std::vector<double>{std::exp(20.0), std::exp(20.0), 1}));
}

TEST(Stages, MismatchOfAnythingIsFinite) {
  Mismatch mismatch;
  mismatch.add(std::vector<float>{-1, -900, -1}, std::vector<float>{-900, -1, -1}, {}, 0);
  Metrics m;
  mismatch.report(m, 1e-4);
  EXPECT_EQ(m.get("rollout_corr/xi_max"), std::exp(20.0));
  EXPECT_EQ(m.get("rollout_corr/xi_min"), std::exp(-20.0));
  EXPECT_NEAR(m.get("rollout_corr/chi2_token"), (std::exp(40.0) + std::exp(-40.0) + 1) / 3 - 1, 1);
  EXPECT_NEAR(m.get("rollout_corr/k3_kl"), (std::exp(20.0) - 900 + std::exp(-20.0) + 898) / 3, 1);
}

// Groups of an update, and those of a pass over whole responses, keep the shard of their samples.
TEST(Stages, GroupsKeepTheirShards) {
  std::vector<Trajectory> s;
  for (int group = 0; group < 4; group++)
    for (int k = 0; k < 2; k++) {
      s.push_back(trajectory(group, 3));
      s.back().shard = 3 - group;
      s.back().advantage = 1;
    }
  s[0].filtered = s[1].filtered = true;
  const std::vector<TokenPlan> plans(s.size(), full_plan(3));
  const Update u = make_update(ActorKeys(), 512, s, plans);
  const std::vector<Group> whole = response_groups(s);
  ASSERT_EQ(u.groups.size(), 3u);
  ASSERT_EQ(whole.size(), 4u);
  for (size_t i = 0; i < 3; i++) EXPECT_EQ(u.groups[i].shard, static_cast<int>(2 - i));
  for (size_t i = 0; i < 4; i++) EXPECT_EQ(whole[i].shard, static_cast<int>(3 - i));
}

// `released` divides by a mean over the update, not over the step.
TEST(Stages, CorrectionsAreNormalisedByUpdate) {
  const Step step(sparse + Keys{correction("rollout_is=released"), "actor.loss_agg_mode=seq-mean-token-mean",
                                "actor.ppo_mini_batch_size=2"});
  const std::vector<Trajectory>& samples = step.grpo->samples();
  EXPECT_EQ(step.metrics.get("actor/updates"), 3);
  std::vector<Trajectory> whole = samples;
  for (Trajectory& s : whole) {
    s.correction.reset();
    s.kl_correction.reset();
  }
  std::vector<Trajectory> parts = whole;
  for (size_t at = 0; at < parts.size(); at += 10)
    set_corrections(step.keys.algorithm.rollout_correction, std::span(parts).subspan(at, 10));
  set_corrections(step.keys.algorithm.rollout_correction, whole);
  size_t differ = 0;
  for (size_t i = 0; i < samples.size(); i++) {
    EXPECT_EQ(samples[i].correction, parts[i].correction) << i;
    EXPECT_EQ(samples[i].kl_correction, parts[i].kl_correction) << i;
    differ += samples[i].correction != whole[i].correction;
  }
  EXPECT_GT(differ, samples.size() / 2);
}

// A response keeps the shard of the prompt that it was sampled for, by whose rank its trace is held, also if prompts
// before it were dropped.
TEST(Stages, ShardsAreThoseOfThePrompts) {
  const Step step(
      Keys{"algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=4", "learner.shards=3"},
      [](int request, int sample) { return request % 3 == 0 ? 1 : sample % 2; });
  ASSERT_EQ(step.grpo->samples().size(), 30u);
  EXPECT_EQ(step.metrics.get("rollout/gen_batches"), 2);
  bool moved = false;
  for (const Trajectory& s : step.grpo->samples()) {
    EXPECT_EQ(s.shard, step.place.at(s.uid) % 3);
    moved |= s.shard != s.group % 3;
  }
  EXPECT_TRUE(moved);
}

// DeepSeek-V3.2, eq. 9: of responses with a negative advantage those that the policy has moved away from.
TEST(Stages, FarResponsesOfNegativeAdvantageAreMasked) {
  std::vector<Trajectory> s = {trajectory(0, 2), trajectory(0, 3), trajectory(0, 2), trajectory(0, 2)};
  const double advantages[] = {-1, -1, 1, -1};
  std::vector<TokenPlan> plans;
  for (size_t i = 0; i < s.size(); i++) {
    s[i].advantage = advantages[i];
    s[i].logprob.assign(s[i].tokens.size(), -1);
    plans.push_back(full_plan(std::ssize(s[i].tokens)));
  }
  s[1].logprob[2] = std::numeric_limits<float>::quiet_NaN();  // not sampled: no part of the mean
  Update u = make_update(ActorKeys(), 512, s, plans);
  const TokenTerms before = u.terms;
  // Means of log-ratios: .25; .5, .75 with the token that was not sampled; 4; exactly the threshold.
  const TokenOuts now{.offsets = {0, 2, 5, 7, 9}, .logprob = {-1, -1.5, -1.25, -1.75, -2.25, -5, -5, -1.5, -1.25}};
  EXPECT_EQ(mask_off_policy(0.375, u, now), 1);
  std::vector<double> want = before.weight;
  std::fill(want.begin() + 2, want.begin() + 5, 0);
  EXPECT_EQ(u.terms.weight, want);
  EXPECT_EQ(u.terms.kl_weight, before.kl_weight);
  want = before.advantage;  // whose product with kl_weight is the weight of centring
  std::fill(want.begin() + 2, want.begin() + 5, 0);
  EXPECT_EQ(u.terms.advantage, want);
  u.terms = before;
  EXPECT_EQ(mask_off_policy(0.24, u, now), 3);
}

// The first update of a sparse sampler's responses, and later ones of an exact sampler's, against the masks by hand.
TEST(Stages, OffPolicyMasksFollowTheParameters) {
  const Step plain(sparse + Keys{correction("acceptance=true")});
  double far = 0;  // the threshold that some exceed
  for (const Trajectory& s : plain.grpo->samples()) {
    const std::vector<float> d = log_ratios(s);
    const double apart = -std::accumulate(d.begin(), d.end(), 0.0) / static_cast<double>(d.size());
    if (s.advantage < 0) far = std::max(far, apart);
  }
  ASSERT_GT(far, 0);
  const auto masked = [](const Step& s) { return s.metrics.get("actor/off_policy_masked_fraction"); };
  const Step some(sparse + Keys{correction(cat("off_policy_mask_threshold=", far * 0.99).c_str())});
  const Step none(sparse + Keys{correction(cat("off_policy_mask_threshold=", far * 1.01).c_str())});
  EXPECT_GT(masked(some), 0);
  EXPECT_LT(masked(some), 0.5);
  EXPECT_EQ(masked(none), 0);
  EXPECT_FALSE(same_bits(some.run.parameters(), none.run.parameters()));
  EXPECT_TRUE(same_bits(none.run.parameters(), plain.run.parameters()));
  const Keys exact = {"actor.optim.lr=0.01", correction("off_policy_mask_threshold=1e-3")};
  const Step one(exact), two(exact + Keys{"actor.ppo_epochs=2"});
  EXPECT_EQ(masked(one), 0);
  EXPECT_GT(masked(two), 0);
}

TEST(Stages, TruncatedResponsesAreMasked) {
  const Step all({}), finished({"algorithm.mask_truncated_completions=true"});
  int64_t cut = 0, tokens = 0;
  for (size_t i = 0; i < all.grpo->samples().size(); i++) {
    const Trajectory &a = all.grpo->samples()[i], &s = finished.grpo->samples()[i];
    EXPECT_EQ(a.advantage, s.advantage) << "they count in the statistics";
    EXPECT_EQ(s.filtered, !s.finished);
    cut += s.filtered;
    tokens += s.filtered ? 0 : std::ssize(s.tokens);
  }
  EXPECT_GT(cut, 0);
  EXPECT_GT(tokens, 0);
  EXPECT_EQ(finished.metrics.get("tokens/loss"), static_cast<double>(tokens));
}

// Every response is right: the scores are equal, the rewards differ with the lengths.
TEST(Stages, GroupsAreFilteredByTheirRewards) {
  const auto right = [](int, int) { return 1; };
  const Keys filter = {"algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2",
                       "reward_model.length_reward.enable=true"};
  const Step by_score(filter, right), by_reward(filter + Keys{"algorithm.filter_groups.metric=reward"}, right);
  EXPECT_TRUE(by_score.grpo->samples().empty());
  ASSERT_FALSE(by_reward.grpo->samples().empty());
  std::map<int32_t, std::set<double>> rewards;
  for (const Trajectory& s : by_reward.grpo->samples()) {
    EXPECT_EQ(s.reward, s.score + s.length_reward);
    rewards[s.group].insert(s.reward);
  }
  for (const auto& [group, values] : rewards) EXPECT_GT(values.size(), 1u) << group;
}

// Statistics over the accepted judge before the filter; groups whose scores are equal are out before that.
TEST(Stages, GroupsWithoutSignalAreNotJudged) {
  const auto score = [](int request, int sample) { return request < 4 ? 1 : sample % 2; };
  const Keys all = sparse + Keys{correction("veto=0.04"), correction("group_statistics=accepted")};
  const Step filtered(all + Keys{"algorithm.adv_filter_threshold=1e-3"}, score), unfiltered(all, score);
  for (const Trajectory& s : filtered.grpo->samples()) {
    EXPECT_EQ(s.ruling == Ruling::none, s.group < 4);
    EXPECT_EQ(s.old_logprob.has_value(), s.group >= 4);
  }
  for (const Trajectory& s : unfiltered.grpo->samples()) EXPECT_NE(s.ruling, Ruling::none);
  EXPECT_EQ(count_rulings(filtered.grpo->samples()).judged, 10);
}

// The coins of OBRS are not those of URS, nor of another step or seed.
TEST(Stages, CoinsOfRejectionAndOfTokenSubsetsDiffer) {
  const Step step(sparse + Keys{"algorithm.obrs.enable=true", "algorithm.obrs.lambda=2", correction("veto=1e-9"),
                                "actor.token_subset=urs", "actor.urs_probability=0.5", "trainer.seed=7"});
  int64_t tokens = 0, kept = 0, accepted = 0, both = 0;
  double share = 0;
  for (const Trajectory& s : step.grpo->samples()) {
    ASSERT_EQ(s.ruling, Ruling::accepted);
    const std::vector<float> d = log_ratios(s);
    const TokenPlan plan =
        draw_token_plan(step.keys.actor, std::ssize(s.tokens), rng_key(7, RngStream::token_plan, 1), s.uid);
    int64_t own = 0;
    for (size_t t = 0; t < s.tokens.size(); t++) {
      const double coin = uniform_open(rng_word(rng_key(7, RngStream::obrs, 1), s.uid, static_cast<uint32_t>(t), 0));
      const bool accepts = coin < obrs_accept(step.keys.algorithm.obrs, std::exp(static_cast<double>(d[t])));
      EXPECT_EQ(s.correction->at(t) != 0, accepts);
      tokens++;
      own += plan.weight[t] != 0;
      accepted += accepts;
      both += accepts && plan.weight[t] != 0;
    }
    kept += own;
    share += static_cast<double>(own) / static_cast<double>(s.tokens.size());
  }
  const auto n = static_cast<double>(step.grpo->samples().size());
  EXPECT_NEAR(step.metrics.get("ht/kept_fraction"), share / n, 1e-12) << "of this stream";
  const double all = static_cast<double>(tokens),
               p = static_cast<double>(kept) / all * static_cast<double>(accepted) / all;
  EXPECT_NEAR(static_cast<double>(both) / all, p, 4 * std::sqrt(p / all)) << "independent";
}

}  // namespace
}  // namespace pare::test
