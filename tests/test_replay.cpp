// learner.attention=replay: sparse rollouts whose log-probs are, bit by bit, the learner's, and whose gradients are
// those of what was computed.
#include <cmath>
#include <set>

#include "rl/loss.h"
#include "rl/replay.h"
#include "run/sft_training.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

const std::vector<std::string> kEvicting = {"streaming_llm", "h2o", "tova", "snapkv", "rkv", "pyramidkv"};

// Small enough that prompts and responses both have compressions, or that a row leaves out most of its blocks.
Keys sparse(const std::string& method) {
  return {"learner.attention=replay",           "rollout.kv.method=" + method, "rollout.kv.evict.budget=9",
          "rollout.kv.evict.buffer=4",          "rollout.kv.window.size=3",    "rollout.kv.streaming_llm.sinks=2",
          "rollout.kv.window.pooling_kernel=3", "rollout.kv.pyramidkv.beta=3", "rollout.kv.blocks.size=4",
          "rollout.kv.blocks.count=3",          "rollout.kv.blocks.last=1",    "rollout.kv.blocks.dense_layers=1"};
}

struct Seen {
  double checked = 0, mismatches = 0;
  int64_t compressions = 0, at_prompts = 0;
  std::vector<std::vector<float>> log_probs;
};
Seen steps(const Config& config, int n = 1) {
  TrainingRun run(config);
  Seen seen;
  for (int i = 0; i < n; i++) {
    const Metrics m = run.step();
    seen.checked += m.get("exact/checked_tokens");
    seen.mismatches += m.get("exact/mismatch_tokens");
    for (const Trajectory& s : run.trainer->samples()) {
      seen.log_probs.push_back(s.logprob);
      if (s.trace)
        for (const KvTrace& t : *s.trace) {
          seen.compressions++;
          seen.at_prompts += t.tokens == std::ssize(s.prompt);
        }
    }
  }
  return seen;
}

TEST(Replay, EvictingRolloutsAreExact) {
  for (const std::string& method : kEvicting)
    for (const char* prompt : {"protect", "compress"})
      for (const char* scope : {"per_head", "per_layer"}) {
        SCOPED_TRACE(cat(method, ' ', prompt, ' ', scope));
        const Seen s = steps(tiny_run("qwen3", sparse(method) + Keys{cat("rollout.kv.evict.prompt=", prompt),
                                                                     cat("rollout.kv.evict.scope=", scope)}));
        EXPECT_EQ(s.mismatches, 0);
        EXPECT_GT(s.checked, 300);
        EXPECT_GT(s.compressions, 60);
        EXPECT_EQ(s.at_prompts > 0, std::string(prompt) != "protect");
      }
}

TEST(Replay, ModelsTriggersAndPartsOfResponsesAreExact) {
  for (const char* type : {"qwen2", "llama"})
    for (const Keys& keys :
         {Keys{"rollout.kv.evict.trigger=prefill_once", "rollout.kv.evict.prompt=compress"},
          Keys{"rollout.kv.evict.buffer=0"},
          Keys{"actor.token_subset=rpc", "actor.rpc_min_tokens=9", "rollout.kv.evict.prompt=compress"},
          Keys{"actor.token_subset=urs", "algorithm.adv_filter_threshold=1e-3"},
          Keys{"model.enable_gradient_checkpointing=true", "actor.ppo_max_token_len=90"}}) {
      SCOPED_TRACE(cat(type, ' ', testing::PrintToString(keys)));
      const Seen s = steps(tiny_run(type, sparse("snapkv") + keys), 2);
      EXPECT_EQ(s.mismatches, 0);
      EXPECT_GT(s.checked, 100);
      EXPECT_GT(s.compressions, 60);
    }
}

TEST(Replay, BlockSparseRolloutsAreExact) {
  for (const char* method : {"quest", "block_topk"})
    for (const Keys& keys :
         {Keys{}, Keys{"rollout.kv.blocks.size=16"},
          Keys{"rollout.kv.blocks.dense_layers=0", "actor.ppo_max_token_len=1"}, Keys{"actor.token_subset=rpc"}}) {
      SCOPED_TRACE(cat(method, ' ', testing::PrintToString(keys)));
      const Seen s = steps(tiny_run("qwen3", sparse(method) + keys), 2);
      EXPECT_EQ(s.mismatches, 0);
      EXPECT_GT(s.checked, 300);
    }
}

// Where only the first block and the last two are read, lists follow from lengths.
TEST(Replay, SharedBlocksAreCounted) {
  const Keys keys = {"rollout.kv.blocks.first=1", "rollout.kv.blocks.last=2", "trainer.total_training_steps=1"};
  for (const char* shards : {"1", "3"}) {
    TrainingRun run(tiny_run("qwen3", sparse("quest") + keys + Keys{cat("learner.shards=", shards)}));
    const Metrics m = run.step();
    double read = 0, again = 0, run_read = 0, together = 0;
    for (const Trajectory& s : run.trainer->samples()) {
      std::set<int64_t> different;
      int64_t before = 0, rows = 0;
      for (auto p = std::ssize(s.prompt); p + 1 < std::ssize(s.prompt) + std::ssize(s.tokens); p++) {
        const int64_t n = p / 4 + 1;  // blocks
        if (n <= 3) continue;
        if (before > 0) {
          read += 3;
          again += n == before ? 3 : 2;  // {0, n - 3, n - 2} and {0, n - 2, n - 1}
        }
        before = n;
        different.insert({0, n - 2, n - 1});
        if (++rows % 10 != 0) continue;
        run_read += 30;
        together += static_cast<double>(different.size());
        different.clear();
      }
    }
    ASSERT_GT(run_read, 0);
    EXPECT_DOUBLE_EQ(m.get("kv/blocks/overlap"), again / read);
    EXPECT_DOUBLE_EQ(m.get("kv/blocks/union"), 10 * together / run_read);
  }
  TrainingRun all(tiny_run("qwen3", sparse("quest") + keys + Keys{"rollout.kv.blocks.count=100"}));
  EXPECT_TRUE(std::isnan(all.step().get("kv/blocks/overlap")));  // absent
}

// Kept sets and lists of more than the 64 slots that the online softmax takes at a time.
TEST(Replay, LongCachesAreExact) {
  for (const std::string& method : {std::string("rkv"), std::string("pyramidkv"), std::string("quest")}) {
    const Keys keys = {"data.max_response_length=118", "rollout.kv.evict.budget=70",
                       "rollout.kv.evict.buffer=9",    "rollout.kv.pyramidkv.beta=2",
                       "rollout.kv.blocks.count=20",   "rollout.kv.evict.prompt=compress"};
    const Seen s = steps(tiny_run("qwen3", sparse(method) + keys), 2);
    EXPECT_EQ(s.mismatches, 0) << method;
    EXPECT_EQ(s.compressions > 0, method != "quest");
  }
}

// What makes the tests above tests: without the trace, or without the block lists, the log-probs are others.
TEST(Replay, ADenseLearnerDisagrees) {
  for (const std::string& method : {std::string("streaming_llm"), std::string("rkv"), std::string("quest")}) {
    TrainingRun run(tiny_run("qwen3", sparse(method) + Keys{"actor.optim.lr=0"}));
    ASSERT_EQ(run.step().get("exact/mismatch_tokens"), 0);
    std::vector<Trajectory> samples = run.trainer->samples();
    for (Trajectory& s : samples) s.trace = nullptr;
    LearnerOptions options = run.session.learner_options();
    options.blocks.reset();
    const TokenOuts out =
        Learner::logprobs(*run.session.model, run.session.activations, response_groups(samples), 1, options);
    int64_t different = 0, all = 0;
    for (size_t i = 0; i < samples.size(); i++)
      for (size_t t = 0; t < samples[i].tokens.size(); t++, all++)
        different += static_cast<float>(out.of(out.logprob, i)[t]) != samples[i].logprob[t];
    EXPECT_GT(different, all / 4) << method;
  }
}

TEST(Replay, SplitsThreadsAndRecomputationChangeNothing) {
  for (const Keys& keys :
       {Keys{"rollout.kv.evict.prompt=compress"}, Keys{"rollout.kv.method=rkv"},
        Keys{"rollout.kv.method=pyramidkv", "rollout.kv.evict.prompt=protect"}, Keys{"rollout.kv.method=quest"},
        Keys{"rollout.kv.method=block_topk", "rollout.kv.blocks.size=16"}}) {
    SCOPED_TRACE(testing::PrintToString(keys));
    const auto run = [&](const Keys& more) { return trained(tiny_run("qwen3", sparse("snapkv") + keys + more), 2); };
    const auto plain = run({"actor.ppo_max_token_len=100000"});
    for (const Keys& more : {Keys{"actor.ppo_max_token_len=1"},
                             Keys{"actor.ppo_max_token_len=77", "actor.logits_chunk=13", "trainer.threads=2"},
                             Keys{"actor.ppo_max_token_len=150", "model.enable_gradient_checkpointing=true"},
                             Keys{"rollout.max_num_seqs=7", "rollout.max_num_batched_tokens=7"}})
      EXPECT_TRUE(same_bits(run(more), plain)) << testing::PrintToString(more);
  }
}

TEST(Replay, NothingLeftOutIsTheDenseLearner) {
  const auto dense = trained(tiny_run("qwen3"), 2);
  for (const char* method : {"h2o", "snapkv", "quest"}) {
    const Keys roomy = sparse(method) + Keys{"rollout.kv.evict.budget=1000", "rollout.kv.blocks.count=100"};
    EXPECT_TRUE(same_bits(trained(tiny_run("qwen3", roomy), 2), dense)) << method;
  }
  EXPECT_TRUE(same_bits(trained(tiny_run("qwen3", {"learner.attention=replay"}), 2), dense));
  EXPECT_FALSE(same_bits(trained(tiny_run("qwen3", sparse("snapkv")), 2), dense));
}

// The reference model sees the same: before the first update its KL to the policy is exactly 0, by every way to it.
TEST(Replay, TheReferenceReplaysToo) {
  for (const char* method : {"snapkv", "quest"})
    for (const char* type : {"k3", "exact"}) {
      const Keys kl = {"actor.use_kl_loss=true", cat("actor.kl_loss_type=", type), "actor.ppo_max_token_len=90",
                       "rollout.kv.evict.prompt=compress"};
      TrainingRun run(tiny_run("qwen3", sparse(method) + kl));
      EXPECT_EQ(run.step().get("actor/kl_loss"), 0) << method << ' ' << type;
      EXPECT_GT(run.step().get("actor/kl_loss"), 0) << method << ' ' << type;
    }
}

TEST(Replay, RefusesWhatItCannotReplay) {
  const auto message = [](const Keys& keys) -> std::string {
    try {
      tiny_run("qwen3", keys);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_EQ(message(sparse("streaming_llm")), "");
  EXPECT_TRUE(
      has(message(sparse("snapkv") + Keys{"rollout.kv.merge.method=value"}), "set rollout.kv.merge.method=none"));
  EXPECT_TRUE(has(message(sparse("snapkv") + Keys{"learner.attention=dense", "rollout.check_exact=true"}),
                  "learner.attention=replay"));
  Session session(tiny_run("qwen3", sparse("snapkv")));
  EXPECT_THROW(SftTraining{session}, Error);
}

// ---- the learner with traces of its own ----------------------------------------------------------------------------

// Members of the groups get compressions of random choice, other ones in every layer and head.
void add_traces(std::vector<Group>& groups, const ModelConfig& c, bool compress_prompt) {
  Rng rng(rng_key(5, RngStream::test, 4));
  for (Group& g : groups)
    for (Member& m : g.members) {
      KvTraces traces;
      const auto prompt = static_cast<int32_t>(g.prefix.size()), first = compress_prompt ? 2 : prompt;
      for (int32_t layer = 0; layer < c.layers; layer++) {
        const int32_t keep = 5 + 2 * layer, limit = keep + 4;
        int32_t slots = prompt;
        for (int32_t tokens = prompt; tokens < prompt + std::ssize(m.tokens); tokens++, slots++) {
          if (slots < first + limit) continue;
          KvTrace t{layer, tokens, slots, first, std::vector<bool>(c.kv_heads * (slots - first))};
          for (int64_t h = 0; h < c.kv_heads; h++)
            for (int32_t n = 0; n < keep;) {
              std::vector<bool>::reference bit =
                  t.keep[h * (slots - first) + rng.below(static_cast<uint32_t>(slots - first))];
              n += !bit;
              bit = true;
            }
          traces.push_back(std::move(t));
          slots = first + keep;
        }
      }
      m.trace = std::make_shared<const KvTraces>(std::move(traces));
    }
}

struct Learned {
  std::vector<double> gradients, logprobs;
};
Learned learn(const Table& table, DType dtype, const ModelConfig& c, const std::vector<Group>& groups,
              const LearnerOptions& options) {
  World w(table, c, dtype);
  w.model.set_parameters(tiny_parameters(c, 7));
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, options);
  Learned r;
  r.logprobs =
      learner.accumulate(groups, random_terms(groups), {.policy = PolicyLoss::ppo, .entropy_coef = 0.01f}).logprob;
  r.gradients = learner.gradients();
  EXPECT_EQ(w.activations.used(), 0u);
  return r;
}
const BlockReads kQuest{.kind = BlockSummary::minmax,
                        .block = 4,
                        .first_blocks = 1,
                        .last_blocks = 1,
                        .dense_layers = 1,
                        .budget = [](int64_t n) { return std::max<int64_t>(3, n / 3); }};

TEST(ReplayLearner, SplitsAndRecomputationChangeNothing) {
  const ModelConfig c = tiny_config("qwen3", true);
  for (const bool compress : {false, true})
    for (const bool quest : {false, true}) {
      std::vector<Group> groups = random_groups(c, 2);
      if (!quest) add_traces(groups, c, compress);
      const auto with = [&](LearnerOptions o) {
        if (quest) o.blocks = kQuest;
        return learn(table_cpu, DType::f32, c, groups, o);
      };
      const Learned whole = with({.max_rows = 100000}),
                    dense = learn(table_cpu, DType::f32, c, random_groups(c, 2), {});
      EXPECT_NE(whole.logprobs, dense.logprobs);
      EXPECT_GT(relative_l2(whole.gradients, dense.gradients), 1e-3);
      for (const LearnerOptions& o : std::vector<LearnerOptions>{{.max_rows = 1},
                                                                 {.max_rows = 70, .logits_chunk = 7},
                                                                 {.max_rows = 101, .recompute = true},
                                                                 {.max_rows = 150}}) {
        const Learned split = with(o);
        EXPECT_EQ(split.gradients, whole.gradients) << o.max_rows;
        EXPECT_EQ(split.logprobs, whole.logprobs) << o.max_rows;
      }
    }
}

TEST(ReplayLearner, TheFastTableAgreesWithTheReference) {
  const ModelConfig c = tiny_config("qwen2", true);
  std::vector<Group> groups = random_groups(c, 6);
  add_traces(groups, c, true);
  EXPECT_LT(relative_l2(learn(table_cpu, DType::f32, c, groups, {}).gradients,
                        learn(table_ref, DType::f64, c, groups, {}).gradients),
            2e-5);
}

// Every member alone behind its own copy of the prefix: the same log-probs, bit by bit.
TEST(ReplayLearner, SharedPrefixEqualsRepeatedPrefix) {
  const ModelConfig c = tiny_config("qwen3", false);
  std::vector<Group> groups = random_groups(c, 4), alone;
  add_traces(groups, c, true);
  for (const Group& g : groups)
    for (const Member& m : g.members) alone.push_back({g.prefix, {m}});
  const Learned shared = learn(table_cpu, DType::f32, c, groups, {}),
                repeated = learn(table_cpu, DType::f32, c, alone, {});
  EXPECT_EQ(shared.logprobs, repeated.logprobs);
  EXPECT_LT(relative_l2(shared.gradients, repeated.gradients), 1e-5);
}

// Central differences in double, the traces (and for quest, by continuity, the lists) being constants.
TEST(ReplayLearner, GradientsAreThoseOfTheLoss) {
  const ModelConfig c = tiny_config("qwen3", true);
  for (const bool quest : {false, true}) {
    std::vector<Group> groups = random_groups(c, 8);
    groups.resize(1);
    TokenTerms terms = random_terms(groups);
    terms.old_logprob.assign(terms.old_logprob.size(), -3.5);
    LearnerOptions options{.max_rows = 30};
    if (quest)
      options.blocks = kQuest;
    else
      add_traces(groups, c, true);
    const LossSpec spec{.policy = PolicyLoss::ppo, .clip_low = 5, .clip_high = 50};
    World w(table_ref, c, DType::f64);
    const std::vector<float> p = tiny_parameters(c, 9);
    w.model.set_parameters(p);
    Learner learner(w.model, w.gradients, w.optimizer, w.activations, options);
    learner.accumulate(groups, terms, spec);
    const std::vector<double> gradient = learner.gradients();
    std::vector<double> values(p.begin(), p.end());
    const auto loss = [&] {
      upload_parameters(w.model, values);
      const TokenOuts out = learner.accumulate(groups, terms, spec);
      learner.drop_gradients();
      double sum = 0;
      for (size_t r = 0; r < out.loss.size(); r++) sum += terms.weight[r] * out.loss[r];
      return sum;
    };
    for (const Parameter& t : parameters(c))
      for (int64_t j : {int64_t{0}, t.size / 2, t.size - 1}) {
        const int64_t i = t.offset + j;
        const double numeric = slope(values[i], loss);
        EXPECT_NEAR(gradient[i], numeric, 1e-7 + 1e-5 * std::abs(numeric))
            << t.name << '[' << j << "], quest " << quest;
      }
  }
}

// By hand: a prompt of 3 tokens, 5 of a response of 6 fed; after token 5 slots 0, 2 and 4 stay for head 0, 1, 3 and 4
// for head 1; after token 7 of the then 5 slots the last three.
TEST(ReplayAttention, EpochsListWhatTheCacheHeld) {
  const auto bits = [](const std::string& s) {
    std::vector<bool> b;
    for (char x : s) b.push_back(x == '1');
    return b;
  };
  const auto trace = std::make_shared<const KvTraces>(
      KvTraces{{0, 5, 5, 0, bits("1010101011")}, {0, 7, 5, 1, bits("01110111")}, {0, 8, 5, 0, bits("1111111111")}});
  const Group group{{1, 2, 3}, {{.tokens = {4, 5, 6, 7, 8, 9}, .trace = trace}, {.tokens = {4, 5}}}};
  const PackedBatch b = pack_groups({group}, 0, 1);  // rows: 0 to 4, 5, and the prompt 6 to 8
  const ReplayAttention r = replay_attention(b, 0);
  ASSERT_EQ(r.segments.size(), 5u);
  const auto is = [&](size_t i, const SegmentRow& s) {
    const SegmentRow& x = r.segments[i];
    return x.row == s.row && x.len == s.len && x.parent_row == s.parent_row && x.parent_len == s.parent_len;
  };
  EXPECT_TRUE(is(0, {0, 2, 0, 3}));
  EXPECT_TRUE(is(1, {2, 2, 3, 3}));
  EXPECT_TRUE(is(2, {4, 1, 6, 4}));
  EXPECT_TRUE(is(3, {5, 1, 10, 3}));
  EXPECT_TRUE(is(4, {6, 3, 0, 0}));
  EXPECT_EQ(r.lists, (std::vector<int32_t>{6,      6, 7, 7, 8, 8, /**/ 6, 7, 8, 0, 1, 1, /**/ 6, 7, 1, 1, 2, 2, 3, 3,
                                           /**/ 6, 6, 7, 7, 8, 8}));
  EXPECT_EQ(r.pairs, 2 * 3 + 3 + 2 * 3 + 3 + 4 + 1 + 3 + 1 + 6);
  EXPECT_TRUE(replay_attention(b, 1).lists.empty());
  const ReplayAttention carried = replay_attention(pack_members({group}, 0, 0, 1), 0);
  EXPECT_EQ((std::vector<int32_t>(carried.lists.begin() + 6, carried.lists.begin() + 12)),
            (std::vector<int32_t>{-1, -2, -3, 0, 1, 1}));
}

}  // namespace
}  // namespace pare::test
