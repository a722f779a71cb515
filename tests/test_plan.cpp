// The books of a step: what is planned without computing is what a real step takes, and both are the closed forms.
#include "rl/plan.h"
#include "rl/replay.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

// Breaks if any allocation or op depends on values, or is made on one table only.
TEST(Plan, IsTheRealWorstStepToTheByte) {
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{},
        {"actor.use_kl_loss=true", "actor.kl_loss_type=exact"},
        {"actor.use_kl_loss=true", "actor.ppo_epochs=2", "actor.ppo_mini_batch_size=3"},
        {"actor.token_subset=rpc", "actor.rpc_min_tokens=9", "actor.ppo_max_token_len=120"},
        {"actor.token_subset=urs", "model.enable_gradient_checkpointing=true", "actor.logits_chunk=31"},
        {"rollout.top_k=5", "rollout.allow_truncated_sampling=true", "rollout.check_exact=false", "actor.ppo_epochs=2"},
        {"rollout.max_num_seqs=3", "rollout.max_num_batched_tokens=17", "rollout.kv_cache_bytes=90000",
         "actor.optim.moments=bf16"},
        {"rollout.kv.method=quest", "rollout.kv.block=4", "rollout.kv.blocks=6", "rollout.check_exact=false",
         "algorithm.rollout_correction.rollout_is=tis", "algorithm.rollout_correction.acceptance=true",
         "actor.ppo_max_token_len=150"},
        {"learner.attention=replay", "rollout.kv.method=pyramidkv", "rollout.kv.budget=12", "rollout.kv.buffer=7",
         "rollout.kv.pyramid_beta=3", "actor.ppo_max_token_len=180"},
        {"learner.attention=replay", "rollout.kv.method=quest", "rollout.kv.block=4", "rollout.kv.blocks=5",
         "rollout.kv.dense_layers=1", "rollout.kv.spans=1", "model.enable_gradient_checkpointing=true"}})
    for (const char* type : {"qwen2", "llama"}) {  // tied and not
      const Config config = tiny_run(type, keys);
      const Plan plan = plan_step(config);
      Session session(config);
      Trainer trainer(session);
      trainer.worst_case_step();
      SCOPED_TRACE(cat(type, ' ', testing::PrintToString(keys)));
      const auto arenas = session.arenas();
      ASSERT_EQ(plan.memory.size(), arenas.size());
      for (size_t i = 0; i < arenas.size(); i++) {
        EXPECT_EQ(plan.memory[i].arena, arenas[i]->name());
        EXPECT_EQ(plan.memory[i].peak, arenas[i]->peak()) << arenas[i]->name();
        EXPECT_GT(plan.memory[i].peak, 0u) << arenas[i]->name();
        ASSERT_EQ(plan.memory[i].entries.size(), arenas[i]->entries().size());
        size_t held = 0;
        for (const Arena::Entry& e : plan.memory[i].entries) held += e.bytes;
        EXPECT_EQ(held, arenas[i]->used()) << arenas[i]->name();
      }
      EXPECT_EQ(plan.ledger.phases, session.ledger.phases);
      EXPECT_GT(plan.ledger.total("rollout").flops, 0);
    }
}

// What a device is given: prompts and responses of any lengths, responses dropped, groups cut, and rollouts with any
// mixture of them stay within it.
TEST(Plan, NoStepPassesTheMost) {
  Rng rng(rng_key(1, RngStream::test, 5));
  const auto up_to = [&](int64_t n) { return 1 + static_cast<int64_t>(rng.below(static_cast<uint32_t>(n))); };
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{"actor.ppo_max_token_len=300", "actor.logits_chunk=23"},
        {"actor.use_kl_loss=true", "actor.kl_loss_type=exact", "actor.ppo_max_token_len=120"},
        {"actor.ppo_max_token_len=16", "model.enable_gradient_checkpointing=true", "rollout.kv.method=snapkv",
         "rollout.check_exact=false", "rollout.kv.budget=20", "rollout.kv.buffer=1", "rollout.kv.window=8"},
        {"rollout.kv.method=quest", "rollout.kv.block=4", "rollout.kv.blocks=6", "rollout.check_exact=false",
         "algorithm.rollout_correction.rollout_is=tis", "algorithm.rollout_correction.acceptance=true"},
        {"learner.attention=replay", "rollout.kv.method=pyramidkv", "rollout.kv.budget=12", "rollout.kv.buffer=7",
         "rollout.kv.pyramid_beta=3", "actor.ppo_max_token_len=100"},
        {"learner.attention=replay", "rollout.kv.method=rkv", "rollout.kv.budget=9", "rollout.kv.buffer=3",
         "rollout.max_num_seqs=30", "rollout.max_num_batched_tokens=31"},
        {"learner.attention=replay", "rollout.kv.method=block_topk", "rollout.kv.block=4", "rollout.kv.blocks=5",
         "rollout.kv.dense_layers=1", "rollout.kv.block_schedule=[\"0:9\", \"12:4\"]", "rollout.kv.spans=1"}}) {
    SCOPED_TRACE(testing::PrintToString(keys));
    const Config config = tiny_run("qwen3", keys);
    const ArenaLimits limits = training_limits(config, TrainingKind::grpo, table_null);
    size_t largest = 0;
    for (int i = 0; i < 12; i++) {
      Session session(config, table_null);
      Trainer trainer(session);
      trainer.worst_case_step();
      const bool long_ones = i % 3 == 0, short_ones = i % 3 == 1;  // else of every length
      const auto length = [&](int64_t n) { return long_ones ? n : short_ones ? up_to(3) : up_to(n); };
      std::vector<Request> requests;
      for (int64_t g = 0; g < config.data.train_batch_size; g++) {
        const std::vector<int32_t> prompt(length(config.data.max_prompt_length));
        requests.push_back({prompt, {}, static_cast<int>(length(config.data.max_response_length))});
        for (int64_t k = 0; k < config.rollout.n; k++) requests.back().uids.push_back(sequence_uid(0, g, 0, k));
      }
      Arena kv("kv", no_memory);
      Rollout rollout(*session.model, session.rollout_limits(), kv, session.activations);
      TraceRecorder traces;
      std::vector<Trajectory> samples;
      for (const Completion& c : rollout.generate(requests, {.eos = {}, .trace = traces.recorder(config)})) {
        Trajectory s;
        s.group = c.request, s.member = c.sample, s.prompt = requests[c.request].prompt;
        s.tokens = c.tokens, s.logprob = c.logprobs;
        s.sampler_row = keeps_sampler_states(config) ? 0 : -1;
        s.trace = traces.take(requests[c.request], c.sample);
        s.advantage = 1;
        s.dropped = up_to(4) == 1;
        samples.push_back(std::move(s));
      }
      Metrics metrics;
      trainer.update(samples, metrics);
      const ArenaLimits peaks = session.peaks();
      EXPECT_LE(peaks.weights, limits.weights);
      EXPECT_LE(peaks.kv, limits.kv);
      EXPECT_LE(peaks.activations, limits.activations) << "update " << i;
      largest = std::max(largest, peaks.activations);
    }
    EXPECT_GT(2 * largest, limits.activations) << "twice what is ever taken";
  }
}

// Linear layers 2 x parameters x rows, the LM head where a log-prob is asked, attention 4 H D per visible pair; three
// times that for a forward and a backward, 3.5 times for attention.  A prompt counts once per group.
TEST(Plan, FlopsAreTheClosedForms) {
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{},
        {"actor.token_subset=rpc", "actor.rpc_min_tokens=9", "actor.ppo_max_token_len=100"},
        {"rollout.max_num_seqs=3", "rollout.max_num_batched_tokens=17", "actor.use_kl_loss=true"}}) {
    const Config config = tiny_run("qwen3", keys);
    Plan plan = plan_step(config);
    const ModelConfig model = Session(config, table_null).model_config;
    const int64_t prompt = config.data.max_prompt_length, tokens = config.data.max_response_length;
    const uint64_t key = rng_key(static_cast<uint64_t>(config.trainer.seed), RngStream::token_plan, 1);
    Work rollout, learner;
    for (int64_t i = 0; i < config.data.train_batch_size; i++) {
      rollout.add_prefix(prompt), learner.add_prefix(prompt);
      for (int64_t k = 0; k < config.rollout.n; k++) {
        rollout.add_response(prompt, tokens, tokens);
        const int64_t cut = draw_token_plan(config.actor, tokens, key,
                                            sequence_uid(0, static_cast<uint64_t>(i), 0, static_cast<uint64_t>(k)))
                                .length;
        learner.add_response(prompt, cut, cut);
      }
    }
    SCOPED_TRACE(testing::PrintToString(keys));
    expect_learner_flops(plan.ledger, model, learner);
    auto& ops = plan.ledger.phases["rollout"];
    EXPECT_EQ(ops["linear_fwd"].cost.flops, rollout.linear(model));
    EXPECT_EQ(ops["attn_paged"].cost.flops, rollout.attention(model));
    if (config.actor.use_kl_loss) {
      EXPECT_EQ(plan.ledger.phases["ref"]["linear_fwd"].cost.flops, rollout.linear(model));
    } else {
      EXPECT_EQ(plan.ledger.phases.count("ref"), 0u);
    }
    EXPECT_EQ(learner.rows < rollout.rows, config.actor.token_subset == TokenSubset::rpc);
  }
}

size_t peak_of(const Plan& plan, const std::string& arena) {
  for (const Plan::Memory& m : plan.memory)
    if (m.arena == arena) return m.peak;
  return 0;
}

// A model of true shapes, planned on its config.json alone: weights lie in memory once, gradients once (and those of a
// tied head twice), moments in two bytes.
TEST(Plan, OfARealModelHoldsEveryParameterOnce) {
  const std::vector<std::string> keys = {"gsm8k-qwen2.5-1.5b",
                                         "model.path=",
                                         "model.config=data/presets/qwen2.5-1.5b.json",
                                         "data.task=ssa",
                                         "data.train_files=[]",
                                         "data.val_files=[]",
                                         "data.reward=",
                                         "data.train_batch_size=1",
                                         "data.max_response_length=64"};
  const Plan plan = plan_step(load_config(keys));
  const double parameters = 1'543'714'304, head = 151'936.0 * 1536;
  const auto within = [](double bytes, double expected) {
    EXPECT_GE(bytes, expected);
    EXPECT_LT(bytes, 1.01 * expected);
  };
  within(static_cast<double>(peak_of(plan, "weights")), 4 * parameters);
  within(static_cast<double>(peak_of(plan, "gradients")), 4 * (parameters + head));
  within(static_cast<double>(peak_of(plan, "optimizer")), 2 * 2 * parameters);
  std::vector<std::string> wide = keys;
  wide.push_back("actor.optim.moments=f32");
  within(static_cast<double>(peak_of(plan_step(load_config(wide)), "optimizer")), 2 * 4 * parameters);
}

}  // namespace
}  // namespace pare::test
