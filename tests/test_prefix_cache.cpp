// RPO: cuts and entries have the distributions that they should have, prefixes cost what they should cost, and what
// does not depend on them keeps its bits.
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "rl/loss.h"
#include "rl/prefix_cache.h"
#include "run/prefix_cache_file.h"
#include "tests/rl_golden.h"
#include "tests/runs.h"

namespace pare::test {
namespace {
const Keys rpo = {"algorithm.rpo.enable=true", "algorithm.rpo.cut=length"};

CachedResponse entry(int64_t tokens, int64_t shortest) {
  return {std::vector<int32_t>(static_cast<size_t>(tokens), 5), true, 1, 1, 0, shortest};
}

double chi_square(const std::vector<int64_t>& counts, const std::vector<double>& p) {
  const auto n = static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  double sum = 0;
  for (size_t i = 0; i < counts.size(); i++) {
    const double d = static_cast<double>(counts[i]) - n * p[i];
    sum += d * d / (n * p[i]);
  }
  return sum;
}

// ---- draws ---------------------------------------------------------------------------------------------------------

// m is uniform over {0 .. L} and then at least 1 and at most the length.
TEST(Rpo, CutsAreUniformWithTwiceTheWeightOnOne) {
  RpoKeys keys;
  keys.max_cut = 9;
  for (const int64_t length : {40, 6}) {
    std::vector<int64_t> counts(static_cast<size_t>(std::min<int64_t>(length, 9)));
    for (uint64_t i = 0; i < 20000; i++)
      counts.at(
          static_cast<size_t>(draw_cut(keys, entry(length, 3), rng_key(1, RngStream::rpo_cut, 7), mix64(i)) - 1))++;
    std::vector<double> p(counts.size(), 0.1);
    p.front() = 0.2;
    if (length == 6) p.back() = 0.4;                   // 6, 7, 8 and 9
    EXPECT_LT(chi_square(counts, p), 26.1) << length;  // 8 degrees of freedom: .001
  }
}

TEST(Rpo, TheLimitOfACut) {
  RpoKeys keys;
  keys.max_cut = 30;
  const CachedResponse e = entry(21, 13);
  EXPECT_EQ(cut_limit(keys, e), 30);
  keys.cut = RpoCut::half_shortest;
  EXPECT_EQ(cut_limit(keys, e), 6);
  keys.cut = RpoCut::length;
  EXPECT_EQ(cut_limit(keys, e), 21);
  keys.cut = RpoCut::half_shortest;
  for (uint64_t i = 0; i < 20; i++) {  // something is always cut
    EXPECT_EQ(draw_cut(keys, entry(21, 1), 1, i), 1);
    EXPECT_EQ(draw_cut(keys, entry(1, 1), 1, i), 1);
  }
  EXPECT_EQ(suffix_limit(keys, 50, 20, 7), 30);
  EXPECT_EQ(longest_suffix(keys, 50), 50);
  keys.enable = true;
  keys.suffix_cap = SuffixCap::removed;
  EXPECT_EQ(suffix_limit(keys, 50, 20, 7), 7);
  EXPECT_EQ(longest_suffix(keys, 50), 25);
  EXPECT_EQ(longest_suffix(keys, 3), 1);
  EXPECT_EQ(longest_suffix(keys, 1), 1);
  keys.cut = RpoCut::fixed;
  EXPECT_EQ(longest_suffix(keys, 50), 30);
  EXPECT_EQ(longest_suffix(keys, 20), 20);
}

TEST(Rpo, TheEntryIsTheBestOrAny) {
  // Members 1, 3 and 4 have the largest reward; 3 and 4 are the shortest of these.
  std::vector<Trajectory> group = {trajectory(0, 2, 0), trajectory(0, 9, 1), trajectory(0, 1, 0), trajectory(0, 3, 1),
                                   trajectory(0, 7, 1)};
  group[3].prefix.assign(4, 3);
  const auto draws = [&](double epsilon) {
    RpoKeys keys;
    keys.epsilon = epsilon;
    std::vector<int64_t> counts(group.size());
    int64_t best = 0;
    for (uint64_t i = 0; i < 10000; i++) {
      const Choice c = draw_entry(keys, group, rng_key(1, RngStream::rpo_update, 7), mix64(i));
      counts[c.member]++;
      best += c.best;
      EXPECT_TRUE(!c.best || c.member == 3);
    }
    return std::pair(counts, best);
  };
  EXPECT_EQ(draws(1).first, (std::vector<int64_t>{0, 0, 0, 10000, 0}));
  const auto [any, none] = draws(0);
  EXPECT_EQ(none, 0);
  EXPECT_LT(chi_square(any, std::vector<double>(5, 0.2)), 18.5);  // 4 degrees of freedom: .001
  EXPECT_NEAR(static_cast<double>(draws(0.1).second), 1000, 4 * std::sqrt(900));
  std::set<size_t> of_steps, of_rows;
  RpoKeys keys;
  keys.epsilon = 0;
  for (uint64_t i = 0; i < 40; i++) {
    of_steps.insert(draw_entry(keys, group, rng_key(1, RngStream::rpo_update, i), 3).member);
    of_rows.insert(draw_entry(keys, group, rng_key(1, RngStream::rpo_update, 7), i).member);
  }
  EXPECT_EQ(of_steps.size(), 5u);
  EXPECT_EQ(of_rows.size(), 5u);
  const CachedResponse e = cached(group, 3, 12);
  EXPECT_EQ(e.ids, std::vector<int32_t>(7, 3));
  EXPECT_EQ(e.shortest, 1);
  EXPECT_EQ(e.step, 12);
  EXPECT_EQ(e.reward, 1);
}

// ---- steps ---------------------------------------------------------------------------------------------------------

// The row of a group, by the uid of its first sample.
std::map<uint64_t, int64_t> rows_by_uid(int64_t rows) {
  std::map<uint64_t, int64_t> map;
  for (uint64_t epoch = 0; epoch < 20; epoch++)
    for (int64_t row = 0; row < rows; row++) map[sequence_uid(epoch, static_cast<uint64_t>(row), 0, 0)] = row;
  return map;
}
std::vector<int32_t> response(const Trajectory& s) {
  std::vector<int32_t> ids = s.prefix;
  ids.insert(ids.end(), s.tokens.begin(), s.tokens.end());
  return ids;
}
std::vector<std::span<const Trajectory>> groups_of(const std::vector<Trajectory>& samples, size_t n) {
  std::vector<std::span<const Trajectory>> groups;
  for (size_t i = 0; i < samples.size(); i += n) groups.push_back(std::span(samples).subspan(i, n));
  return groups;
}

// Against a cache that is kept here, by hand.  With 4 rows and 6 prompts a row comes twice in a step.
TEST(Rpo, PrefixesAreTheBeginningsOfTheEntriesBeforeTheStep) {
  for (const Keys& more : {Keys{"data.train_rows=16"}, Keys{"data.train_rows=4"},
                           Keys{"data.train_rows=4", "algorithm.rpo.suffix_cap=removed"},
                           Keys{"data.train_rows=7", "algorithm.rpo.cut=half_shortest"},
                           Keys{"algorithm.rpo.cut=fixed", "algorithm.rpo.max_cut=3"}}) {
    SCOPED_TRACE(testing::PrintToString(more));
    TrainingRun run(tiny_run("qwen3", rpo + more));
    const RpoKeys& keys = run.session.config.algorithm.rpo;
    const auto row_of = rows_by_uid(run.session.train->size());
    PrefixCache before;
    int64_t prefixes = 0, twice = 0, hits = 0;
    for (int step = 1; step <= 6; step++) {
      const Metrics m = run.step();
      int64_t generated = 0, replayed = 0, hit = 0;
      std::map<int64_t, std::span<const Trajectory>> last;  // of each row the group that wrote last
      for (const auto group : groups_of(run.trainer->samples(), 5)) {
        const int64_t row = row_of.at(group[0].uid);
        twice += last.contains(row);
        last[row] = group;
        const auto found = before.find(row);
        hit += found != before.end();
        for (const Trajectory& s : group) {
          EXPECT_EQ(s.prefix, group[0].prefix);
          EXPECT_EQ(s.logprob.size(), s.tokens.size());
          EXPECT_GE(s.tokens.size(), 1u);
          EXPECT_LE(s.response_length(), 50);
          EXPECT_EQ(s.finished, s.tokens.back() == 2);
          EXPECT_EQ(std::count(s.prefix.begin(), s.prefix.end(), 2), 0) << "an EOS in the middle";
          generated += std::ssize(s.tokens);
          replayed += std::ssize(s.prefix);
          if (found == before.end()) continue;
          const std::vector<int32_t>& ids = found->second.ids;
          ASSERT_LT(s.prefix.size(), ids.size());
          EXPECT_TRUE(std::equal(s.prefix.begin(), s.prefix.end(), ids.begin()));
          const auto cut = std::ssize(ids) - std::ssize(s.prefix);
          EXPECT_LE(cut, std::max<int64_t>(cut_limit(keys, found->second), 1));
          EXPECT_TRUE(keys.suffix_cap == SuffixCap::max_len || std::ssize(s.tokens) <= cut);
        }
        prefixes += !group[0].prefix.empty();
      }
      const PrefixCache& after = run.trainer->prefix_cache();
      for (const auto& [row, group] : last) {
        const CachedResponse& e = after.at(row);
        EXPECT_EQ(e.step, step);
        int64_t same = 0, shortest = 1000;
        for (const Trajectory& s : group) {
          same += response(s) == e.ids && s.finished == e.finished && s.reward == e.reward && s.score == e.score;
          shortest = std::min(shortest, s.response_length());
        }
        EXPECT_GE(same, 1);
        EXPECT_EQ(e.shortest, shortest);
      }
      EXPECT_EQ(after.size(), before.size() + static_cast<size_t>(std::count_if(last.begin(), last.end(), [&](auto& g) {
                                return !before.contains(g.first);
                              })));
      EXPECT_EQ(m.get("tokens/generated"), generated);
      EXPECT_EQ(m.get("tokens/replayed"), replayed);
      EXPECT_DOUBLE_EQ(m.get("rpo/hit_rate"), static_cast<double>(hit) / 6);
      EXPECT_NEAR(m.get("rpo/prefix_share"), static_cast<double>(replayed) / static_cast<double>(generated + replayed),
                  1e-12);
      EXPECT_NEAR(
          m.get("rpo/saved"),
          1 - (static_cast<double>(generated) + m.get("rpo/init_tokens")) / static_cast<double>(generated + replayed),
          1e-12);
      EXPECT_NEAR(m.get("response_length/mean"), static_cast<double>(generated + replayed) / 30, 1e-9);
      EXPECT_EQ(m.get("rpo/init_tokens") == 0, hit == 6);
      EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
      before = after;
      hits += hit;
    }
    EXPECT_GT(prefixes, 10);
    EXPECT_GT(hits, 10);
    EXPECT_TRUE(twice > 0 || run.session.train->size() > 4);
  }
}

// The paper's ablation: every row keeps its first entry, sampled from the policy of its first visit.
TEST(Rpo, WithoutUpdatesTheFirstEntriesStay) {
  TrainingRun run(tiny_run("qwen3", rpo + Keys{"data.train_rows=7", "algorithm.rpo.update=false"}));
  PrefixCache before;
  int64_t kept = 0, prefixes = 0;
  for (int step = 1; step <= 4; step++) {
    const Metrics m = run.step();
    EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
    const PrefixCache& after = run.trainer->prefix_cache();
    EXPECT_EQ(after.size() > before.size(), m.get("rpo/init_tokens") > 0);
    for (const auto& [row, entry] : after) {
      const auto found = before.find(row);
      if (found == before.end()) {
        EXPECT_EQ(entry.step, step);
        continue;
      }
      EXPECT_EQ(entry.ids, found->second.ids);
      EXPECT_EQ(entry.step, found->second.step);
      kept++;
    }
    for (const Trajectory& s : run.trainer->samples()) prefixes += !s.prefix.empty();
    before = after;
  }
  EXPECT_EQ(before.size(), 7u);
  EXPECT_GT(kept, 10);
  EXPECT_GT(prefixes, 10);
}

// An entry of one token leaves no prefix, and the group is that of a run without RPO, bit by bit.
TEST(Rpo, ACutOfTheWholeEntryIsTheDenseRollout) {
  for (const Keys& more : {Keys{}, Keys{"algorithm.rpo.prefix_loss=included"}, Keys{"algorithm.rpo.cut=fixed"}}) {
    TrainingRun dense(tiny_run("qwen3", {"reward_model.length_reward.enable=true"})),
        cut(tiny_run("qwen3", rpo + more + Keys{"reward_model.length_reward.enable=true"}));
    for (int i = 0; i < 3; i++) {
      for (int64_t row = 0; row < 16; row++)
        cut.trainer->prefix_cache()[row] = {std::vector<int32_t>{7}, false, 0, 0, 0, 1};
      const Metrics a = dense.step(), b = cut.step();
      EXPECT_EQ(a.text("certificate"), b.text("certificate"));
      EXPECT_EQ(b.get("rpo/saved"), 0);
      for (const auto& [name, value] : a.all())
        if (!name.starts_with("timing_s/") && !name.starts_with("memory/") && !name.starts_with("perf/")) {
          EXPECT_EQ(value, b.get(name)) << name;
        }
    }
    EXPECT_TRUE(same_bits(dense.parameters(), cut.parameters()));
  }
}

// Sampler and learner agree to the bit behind a prefix, and no division of the work changes one.
TEST(Rpo, IsExact) {
  const Keys blocks = {"learner.attention=replay", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=3",
                       "rollout.kv.blocks.last=1", "rollout.kv.blocks.dense_layers=0"};
  for (const Keys& more :
       {Keys{}, Keys{"algorithm.rpo.prefix_loss=included"}, blocks + Keys{"rollout.kv.method=quest"},
        blocks + Keys{"rollout.kv.method=block_topk", "algorithm.rollout_correction.rollout_is=tis"},
        Keys{"actor.token_subset=rpc", "actor.rpc_min_tokens=3"}, Keys{"actor.token_subset=urs"},
        Keys{"algorithm.rpo.prefix_loss=included", "actor.token_subset=urs", "actor.use_kl_loss=true"},
        Keys{"actor.ppo_epochs=2", "actor.ppo_mini_batch_size=2", "actor.use_kl_loss=true"}}) {
    SCOPED_TRACE(testing::PrintToString(more));
    const Keys split = {"trainer.threads=2",          "rollout.max_num_seqs=5", "rollout.max_num_batched_tokens=23",
                        "actor.ppo_max_token_len=70", "actor.logits_chunk=33",  "rollout.kv_cache_bytes=90000"};
    TrainingRun one(tiny_run("qwen3", rpo + more)), other(tiny_run("qwen3", rpo + more + split));
    double replayed = 0;
    for (int i = 0; i < 4; i++) {
      const Metrics m = one.step(), n = other.step();
      EXPECT_GT(m.get("exact/checked_tokens"), 30);
      EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
      EXPECT_EQ(n.get("exact/mismatch_tokens"), 0);
      EXPECT_EQ(m.text("certificate"), n.text("certificate"));
      replayed += m.get("tokens/replayed");
    }
    EXPECT_GT(replayed, 500);
    EXPECT_TRUE(same_bits(one.parameters(), other.parameters()));
  }
}

// The smallest pool of pages that is accepted holds every prompt with every prefix.
TEST(Rpo, TheSmallestPoolSuffices) {
  for (const char* task : {"data.train_seed=4242", "data.train_seed=7"}) {
    const Keys keys = rpo + Keys{task};
    const Session roomy(tiny_run("qwen3", keys), table_null);
    const int64_t page = KvCache::page_bytes(roomy.model_config, {}, DType::f32);
    const auto accepted = [&](int64_t pages) {
      try {
        const Session session(tiny_run("qwen3", keys + Keys{cat("rollout.kv_cache_bytes=", pages * page)}), table_null);
        return true;
      } catch (const Error& e) {
        EXPECT_EQ(e.code, Exit::memory);
        return false;
      }
    };
    int64_t pages = 1;
    while (!accepted(pages)) pages++;
    ASSERT_GT(pages, 8);
    TrainingRun run(tiny_run("qwen3", keys + Keys{cat("rollout.kv_cache_bytes=", pages * page)}));
    for (int i = 0; i < 6; i++) EXPECT_EQ(run.step().get("exact/mismatch_tokens"), 0);
  }
}

// A group of the learner is |prompt| + |prefix| + sum(|suffix| - 1) rows; each prefix is computed once.
TEST(Rpo, TheLearnerComputesAPrefixOnce) {
  TrainingRun run(tiny_run("qwen3", rpo));
  run.step();
  run.step();
  const Metrics m = run.step();
  Work work, copies;
  for (const auto group : groups_of(run.trainer->samples(), 5)) {
    const auto shared = std::ssize(group[0].prompt) + std::ssize(group[0].prefix);
    work.add_prefix(shared);
    for (const Trajectory& s : group) {
      work.add_response(shared, std::ssize(s.tokens), std::ssize(s.tokens));
      copies.add_prefix(shared);
      copies.add_response(shared, std::ssize(s.tokens), std::ssize(s.tokens));
    }
  }
  EXPECT_EQ(m.get("tokens/trained"), work.rows);
  EXPECT_LT(2 * work.rows, copies.rows);
  expect_learner_flops(run.session.ledger, run.session.model_config, work);
}

// In the loss, the prefix lies in every member: rows as of whole responses behind the prompt.
TEST(Rpo, AnIncludedPrefixIsAPartOfTheResponse) {
  TrainingRun run(tiny_run("qwen3", rpo + Keys{"algorithm.rpo.prefix_loss=included"}));
  run.step();
  run.step();
  const Metrics m = run.step();
  Work work;
  double replayed = 0;
  for (const auto group : groups_of(run.trainer->samples(), 5)) {
    work.add_prefix(std::ssize(group[0].prompt));
    for (const Trajectory& s : group) {
      EXPECT_TRUE(s.prefix.empty());
      for (int64_t t = 0; t < std::ssize(s.tokens); t++) EXPECT_EQ(std::isnan(s.logprob[t]), t < s.given);
      work.add_response(std::ssize(s.prompt), std::ssize(s.tokens), std::ssize(s.tokens));
      replayed += static_cast<double>(s.replayed());
    }
  }
  EXPECT_GT(replayed, 50);
  EXPECT_EQ(m.get("tokens/replayed"), replayed);
  EXPECT_EQ(m.get("tokens/loss"), m.get("tokens/generated") + replayed);
  EXPECT_EQ(m.get("exact/checked_tokens"), m.get("tokens/generated"));
  expect_learner_flops(run.session.ledger, run.session.model_config, work);
}

// Groups that dynamic sampling drops write their entries too.
TEST(Rpo, DroppedGroupsUpdateTheCache) {
  TrainingRun run(tiny_run("qwen3", rpo + Keys{"algorithm.filter_groups.enable=true", "rollout.n=2",
                                               "algorithm.use_kl_in_reward=true", "data.train_rows=400"}),
                  early_digit);
  int64_t groups = 0, batches = 0;
  for (int i = 0; i < 2; i++) {
    const Metrics m = run.step();
    groups += static_cast<int64_t>(m.get("rollout/groups"));
    batches += static_cast<int64_t>(m.get("rollout/gen_batches"));
    EXPECT_EQ(run.trainer->prefix_cache().size(), static_cast<size_t>(6 * batches));
  }
  EXPECT_GT(6 * batches, groups);
  for (const auto& [row, e] : run.trainer->prefix_cache()) EXPECT_FALSE(e.ids.empty());
}

// Entries of a file have no score until their rows were sampled.  The stream of the step decides which response
// follows each.
TEST(Rpo, TheCacheScoresWhatWasSampled) {
  TrainingRun run(tiny_run("qwen3", rpo + Keys{"algorithm.rpo.epsilon=0.5", "trainer.seed=3"}));
  PrefixCache& cache = run.trainer->prefix_cache();
  for (int64_t row = 0; row < 16; row++) cache[row] = {{7}, false, NAN, NAN, 0, 1};
  const Metrics m = run.step();
  const auto row_of = rows_by_uid(16);
  Summary score, best;
  for (const auto group : groups_of(run.trainer->samples(), 5)) {
    const uint64_t uid = group[0].uid;
    const Choice choice =
        draw_entry(run.session.config.algorithm.rpo, group, rng_key(3, RngStream::rpo_update, 1), uid);
    EXPECT_EQ(cache.at(row_of.at(uid)).ids, response(group[choice.member]));
    score.add(group[choice.member].score);
    best.add(choice.best);
  }
  EXPECT_GT(best.mean() * (1 - best.mean()), 0) << "both kinds";
  EXPECT_EQ(m.get("rpo/argmax_rate"), best.mean());
  EXPECT_NEAR(m.get("rpo/cache_score"), score.mean(), 1e-12);
}

// The reward of an entry is that of a response among its own group's, also if dynamic sampling drops all groups.
TEST(Rpo, DroppedGroupsHaveLengthRewardsOfTheirOwn) {
  TrainingRun run(tiny_run(
      "qwen3", rpo + Keys{"algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=1",
                          "reward_model.length_reward.enable=true"}));
  PrefixCache cache;
  std::map<int64_t, std::map<std::vector<int32_t>, double>> rewards;  // by row and response
  const auto scores = [&](std::span<const Request> requests, std::span<const Completion> completions) {
    for (size_t i = 0; i < requests.size(); i++) {
      std::vector<std::vector<int32_t>> group;
      std::vector<int64_t> lengths;
      for (const Completion& c : completions.subspan(5 * i, 5)) {
        group.push_back(requests[i].prefix);
        group.back().insert(group.back().end(), c.tokens.begin(), c.tokens.end());
        lengths.push_back(std::ssize(group.back()));
      }
      const std::vector<double> all =
          length_rewards(run.session.config.reward_model.length_reward, std::vector<double>(5, 1), lengths);
      for (size_t k = 0; k < 5; k++) rewards[static_cast<int64_t>(i)][group[k]] = all[k];
    }
    return std::vector<double>(completions.size(), 1);
  };
  const auto rows = [] {
    std::vector<PromptRow> rows;
    for (int64_t i = 0; i < 6; i++) rows.push_back({i, 1000 + static_cast<uint64_t>(i)});
    return rows;
  };
  Grpo grpo(run.trainer->keys(), run.trainer->engine(),
            {.prompts = [&] { return run.trainer->next_prompts(); },
             .scores = scores,
             .progress = {},
             .cache = &cache,
             .rows = rows});
  Metrics m;
  grpo.step(1, m);
  EXPECT_EQ(m.get("rollout/groups"), 0);
  ASSERT_EQ(cache.size(), 6u);
  for (const auto& [row, e] : cache) {
    ASSERT_TRUE(rewards[row].contains(e.ids)) << row;
    EXPECT_EQ(e.reward, rewards[row][e.ids]) << row;
  }
}

// What corrects the sampler's policy, and NAT's plan, see the suffix; lengths and rewards the whole.
TEST(Rpo, CorrectionsAndPlansSeeTheSuffix) {
  const Keys sparse = {"rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=3",
                       "rollout.kv.blocks.last=1", "rollout.kv.blocks.dense_layers=0"};
  const Keys sparse_rl = {"algorithm.rollout_correction.veto=1e-4", "algorithm.rollout_correction.rollout_is=tis",
                          "algorithm.rollout_correction.acceptance=true"};
  TrainingRun run(
      tiny_run("qwen3", rpo + sparse + sparse_rl + Keys{"actor.token_subset=rpc", "actor.rpc_min_tokens=2"}));
  run.step();
  const Metrics m = run.step();
  int64_t tokens = 0;
  for (const Trajectory& s : run.trainer->samples()) {
    ASSERT_EQ(s.old_logprob->size(), s.tokens.size());
    ASSERT_EQ(s.overlap->size(), s.tokens.size());
    tokens += std::ssize(s.tokens);
  }
  EXPECT_GT(m.get("tokens/replayed"), 100);
  EXPECT_LT(m.get("tokens/loss"), tokens);
  EXPECT_NE(m.get("rollout_corr/kl"), 0);
  // The context of a token counts the prefix: prompts and suffixes alone stay below 64 tokens.
  TrainingRun small(tiny_run(
      "qwen3", rpo + sparse + sparse_rl +
                   Keys{"algorithm.rpo.cut=fixed", "algorithm.rpo.max_cut=3", "algorithm.rpo.suffix_cap=removed"}));
  const Metrics far = small.step();
  int64_t most = 0;
  for (const Trajectory& s : small.trainer->samples()) {
    EXPECT_LT(s.prompt.size() + s.tokens.size(), 64u);
    most = std::max(most, std::ssize(s.prompt) + s.response_length());
  }
  EXPECT_GT(most, 64);
  EXPECT_FALSE(std::isnan(far.get("rollout_corr/acceptance_rate_p5/context_64_127")));
  const Metrics naive =
      TrainingRun(tiny_run("qwen3", rpo + sparse + Keys{"algorithm.rpo.prefix_loss=included"})).step();
  EXPECT_GT(naive.get("rollout_corr/k3_kl"), 0);  // of sampled tokens alone
  EXPECT_TRUE(std::isfinite(naive.get("rollout_corr/kl")));
}

TEST(Rpo, RunsWithDapoAndDash) {
  for (const char* method : {"dapo", "dash", "nat-rpc", "dr-grpo"})
    for (const char* form : {"rpo", "rpo-length", "rpo-paper", "rpo-released", "rpo-whole"}) {
      SCOPED_TRACE(cat(method, ' ', form));
      // Whatever the prefix is, half of what follows it is right.
      TrainingRun run(tiny_run("qwen3", {method, form}),
                      [](const Problem&, const Response& r) { return static_cast<double>(r.text.size() % 2); });
      double updates = 0;
      for (int i = 0; i < 4; i++) {
        const Metrics m = run.step();
        updates += m.get("actor/updates");
        EXPECT_TRUE(m.get("exact/checked_tokens") == 0 || m.get("exact/mismatch_tokens") == 0);
      }
      EXPECT_GT(updates, 0);
    }
}

// ---- the prefix in the loss ----------------------------------------------------------------------------------------

// A group of two responses behind a prefix, as the two forms have it.
std::vector<Trajectory> pair_of(bool included, const std::vector<int64_t>& lengths, int64_t prefix) {
  Rng rng(rng_key(3, RngStream::test, 8));
  const std::vector<int32_t> prompt = random_ids(rng, 5, 37), given = random_ids(rng, prefix, 37);
  std::vector<Trajectory> group;
  for (size_t i = 0; i < lengths.size(); i++) {
    Trajectory& s = group.emplace_back();
    s.prompt = prompt;
    s.tokens = random_ids(rng, lengths[i] - prefix, 37);
    s.advantage = i == 0 ? 1 : -1;
    if (included) {
      s.tokens.insert(s.tokens.begin(), given.begin(), given.end());
      s.given = prefix;
    } else
      s.prefix = given;
    s.logprob.assign(s.tokens.size(), 0.f);
  }
  return group;
}

std::vector<double> gradient(const std::vector<Group>& groups, const TokenTerms& terms) {
  const ModelConfig c = tiny_config("qwen3", true);
  World w(table_ref, c, DType::f64);
  const std::vector<float> p = tiny_parameters(c, 7);
  std::vector<double> wide(p.begin(), p.end());
  upload_parameters(w.model, wide);
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, {});
  learner.accumulate(groups, terms, loss_spec({}, 1));
  return learner.gradients();
}
std::vector<double> gradient(const ActorKeys& keys, const std::vector<Trajectory>& samples) {
  std::vector<TokenPlan> plans;
  for (const Trajectory& s : samples) plans.push_back(full_plan(std::ssize(s.tokens)));
  const Update u = make_update(keys, 50, samples, plans);
  return gradient(u.groups, u.terms);
}
double norm(const std::vector<double>& x) { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); }
std::vector<double> minus(std::vector<double> a, const std::vector<double>& b, double factor = 1) {
  for (size_t i = 0; i < a.size(); i++) a[i] -= factor * b[i];
  return a;
}

// Advantages that sum to 0 take the prefix out of the gradient where the group has one denominator; 1 / |o_i| leaves
// sum_i A_i / (N |o_i|) = (1/10 - 1/20) / 2 = .025 of the gradient of its log-probability.
TEST(Rpo, APrefixInTheLossIsNothingOrAnArtefactOfLengths) {
  const std::vector<int64_t> lengths = {10, 20};
  ActorKeys keys;
  keys.loss_agg_mode = LossAgg::seq_mean_token_sum_norm;
  const auto masked = gradient(keys, pair_of(false, lengths, 4)), included = gradient(keys, pair_of(true, lengths, 4));
  EXPECT_GT(norm(masked), 1e-3);
  EXPECT_LT(norm(minus(included, masked)), 1e-6 * norm(masked));

  keys.loss_agg_mode = LossAgg::seq_mean_token_mean;
  const std::vector<Trajectory> whole = pair_of(true, lengths, 4);
  // The same without the terms of the prefix ...
  Update rest = make_update(keys, 50, whole, std::vector<TokenPlan>{full_plan(10), full_plan(20)});
  int64_t row = 0;
  for (const Trajectory& s : whole)
    for (int64_t t = 0; t < std::ssize(s.tokens); t++, row++)
      if (t < s.given) rest.terms.weight[row] = 0;
  const auto artefact = minus(gradient(keys, whole), gradient(rest.groups, rest.terms));
  // ... and those alone: the loss is -log p.
  TokenTerms terms(4);
  std::fill(terms.weight.begin(), terms.weight.end(), 1.0);
  std::fill(terms.advantage.begin(), terms.advantage.end(), 1.0);
  const auto prefix = gradient(
      {{whole[0].prompt, {{std::vector<int32_t>(whole[0].tokens.begin(), whole[0].tokens.begin() + 4)}}}}, terms);
  EXPECT_GT(norm(prefix), 1e-3);
  EXPECT_LT(norm(minus(artefact, prefix, 0.025)), 1e-9 * norm(prefix));
}

// ---- files ---------------------------------------------------------------------------------------------------------

std::string temporary(const std::string& name, const std::string& text) {
  const std::string path = cat(testing::TempDir(), "pare_", getpid(), "_", name);
  std::ofstream(path) << text;
  return path;
}

std::string repeated(const std::string& text, int n) {
  std::string all;
  for (int i = 0; i < n; i++) all += text;
  return all;
}

TEST(PrefixCacheFile, WhatIsWrittenIsReadBack) {
  const Session session(tiny_run("qwen3", rpo), table_null);
  PrefixCache cache;
  cache[3] = {{5, 9, 2}, true, 1, 0.1 + 0.2, 7, 2};
  cache[12] = {{8}, false, NAN, NAN, 0, 1};
  const std::string path = temporary("cache.jsonl", "");
  write_prefix_cache(path, cache);
  const PrefixCache read = read_prefix_cache(path, session);
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read.at(3).ids, cache[3].ids);
  EXPECT_TRUE(read.at(3).finished);
  EXPECT_EQ(read.at(3).score, 1);
  EXPECT_EQ(read.at(3).reward, 0.1 + 0.2);
  EXPECT_EQ(read.at(3).step, 7);
  EXPECT_EQ(read.at(3).shortest, 2);
  EXPECT_TRUE(std::isnan(read.at(12).score));
  EXPECT_FALSE(read.at(12).finished);
}

TEST(PrefixCacheFile, OfAnotherModel) {
  const auto read = [](const std::string& text, const std::string& missing = "lazy") {
    const std::string path = temporary("given.jsonl", text);
    const Session session(tiny_run("qwen3", rpo + Keys{cat("algorithm.rpo.cache_file=", path),
                                                       cat("algorithm.rpo.missing=", missing), "data.train_rows=3"}),
                          table_null);
    return read_cache_file(path, session);
  };
  const auto error = [&](const std::string& text, const std::string& missing = "lazy") -> std::string {
    try {
      read(text, missing);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  // As `pare generate --jsonl` writes it, with tokens of whatever tokenizer; as ids; longer than a response may be.
  const PrefixCache cache =
      read(R"({"prompt": "x", "row": 1, "sample": 0, "text": "d3", "tokens": [900], "finish": "eos"})"
           "\n\n"
           R"({"row": 0, "ids": [7, 8], "finished": false})"
           "\n" +
           cat(R"({"row": 2, "finished": true, "ids": [7)", repeated(",7", 59), ",2]}\n") +
           R"({"row": 9, "ids": [7], "finished": false})");
  ASSERT_EQ(cache.size(), 3u);
  EXPECT_EQ(cache.at(1).ids.size(), 3u);
  EXPECT_EQ(cache.at(1).ids.back(), 2);
  EXPECT_TRUE(cache.at(1).finished);
  EXPECT_EQ(cache.at(1).shortest, 3);
  EXPECT_EQ(cache.at(0).ids, (std::vector<int32_t>{7, 8}));
  EXPECT_EQ(cache.at(2).ids, std::vector<int32_t>(50, 7));
  EXPECT_FALSE(cache.at(2).finished);
  EXPECT_TRUE(std::isnan(cache.at(2).score));

  const std::string all = R"({"row":0,"ids":[7],"finished":false})"
                          "\n"
                          R"({"row":1,"ids":[7],"finished":false})"
                          "\n";
  EXPECT_NE(error(all, "fail").find("no response to row 2"), std::string::npos);
  EXPECT_NE(error(all + R"({"row":3,"ids":[7],"finished":false})", "fail").find(":3: row 3"), std::string::npos);
  EXPECT_EQ(error(all), "no error");
  EXPECT_NE(error(all + all).find("a second response to row 0"), std::string::npos);
  EXPECT_NE(error(R"({"row":0,"ids":[48],"finished":false})").find("vocabulary"), std::string::npos);
  EXPECT_NE(error(R"({"row":0,"ids":[7],"finished":true})").find("no EOS"), std::string::npos);
  EXPECT_NE(error(R"({"row":0,"ids":[2, 7],"finished":false})").find("an EOS"), std::string::npos);
  EXPECT_NE(error(R"({"row":0,"ids":[],"finished":false})").find("without a token"), std::string::npos);
  EXPECT_NE(error(R"({"row":0,"ids":[7]})").find(":1: "), std::string::npos);
  EXPECT_NE(error(R"({"ids":[7],"finished":false})").find("row"), std::string::npos);
  EXPECT_NE(error("[]").find(":1: "), std::string::npos);
  // A number that does not fit is refused, neither cut off nor wrapped.
  for (const char* row : {"0.9", "0.0", "-1", "\"0\"", "18446744073709551616", "18446744073709551615", "true", "null"})
    EXPECT_NE(error(cat(R"({"row":)", row, R"(,"ids":[7],"finished":false})")).find(":1: \"row\" is "),
              std::string::npos)
        << row << ": " << error(cat(R"({"row":)", row, R"(,"ids":[7],"finished":false})"));
  for (const char* id : {"7.5", "-1", "4294967303", "18446744073709551615", "2147483648", "\"7\"", "true"})
    EXPECT_NE(error(cat(R"({"row":0,"ids":[)", id, R"(],"finished":false})")).find(":1: a token of \"ids\" is "),
              std::string::npos)
        << id;
  EXPECT_NE(error(R"({"row":0,"row":1,"ids":[7],"finished":false})").find("occurs twice"), std::string::npos);
  for (const char* finish : {R"("cut")", R"("")", "1", "null", "true"})
    EXPECT_NE(error(cat(R"({"row":0,"text":"d3","finish":)", finish, "}")).find(":1: \"finish\" is "),
              std::string::npos)
        << finish;
  EXPECT_NE(error(R"({"row":0,"ids":[7]})").find("finished"), std::string::npos);
  EXPECT_NE(error("[7]").find(":1: is of type array"), std::string::npos);
}

// A run begins with the responses of the file.
TEST(PrefixCacheFile, IsWhatARunBeginsWith) {
  std::string lines;
  for (int row = 0; row < 16; row++) lines += cat(R"({"row":)", row, R"(,"ids":[9,10,11,12],"finished":false})", "\n");
  const std::string path = temporary("begin.jsonl", lines);
  TrainingRun run(tiny_run("qwen3", rpo + Keys{cat("algorithm.rpo.cache_file=", path), "algorithm.rpo.cut=fixed",
                                               "algorithm.rpo.max_cut=1"}));
  const Metrics m = run.step();
  EXPECT_EQ(m.get("rpo/hit_rate"), 1);
  EXPECT_EQ(m.get("rpo/init_tokens"), 0);
  EXPECT_EQ(m.get("rpo/age"), 1);
  for (const Trajectory& s : run.trainer->samples()) EXPECT_EQ(s.prefix, (std::vector<int32_t>{9, 10, 11}));
}

}  // namespace
}  // namespace pare::test
