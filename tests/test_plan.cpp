// The books of a step: what is planned without computing is what a real step takes, and both are the closed forms.
#include <array>

#include "run/fit.h"
#include "run/plan.h"
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
        {"actor.ppo_epochs=2"},
        {"rollout.top_k=5", "rollout.top_p=0.9", "rollout.min_p=0.1"},
        {"rollout.top_p=0.9", "actor.use_kl_loss=true", "actor.kl_loss_type=exact"},
        {"rollout.max_num_seqs=3", "rollout.max_num_batched_tokens=17", "rollout.kv_cache_bytes=90000",
         "actor.optim.moments=bf16"},
        {"rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=6",
         "rollout.check_exact=false", "algorithm.rollout_correction.rollout_is=tis",
         "algorithm.rollout_correction.score_centering=true", "actor.ppo_max_token_len=150"},
        {"algorithm.oversample.keep=2", "actor.ppo_epochs=2"},
        {"rollout.kv.method=block_topk", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=6",
         "algorithm.oversample.keep=3", "algorithm.oversample.by=acceptance",
         "rollout.kv.blocks.acceptance_target=0.86"},
        {"learner.attention=replay", "rollout.kv.method=pyramidkv", "rollout.kv.evict.budget=12",
         "rollout.kv.evict.buffer=7", "rollout.kv.pyramidkv.beta=3", "actor.ppo_max_token_len=180"},
        {"learner.attention=replay", "rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=5",
         "rollout.kv.blocks.dense_layers=1", "model.enable_gradient_checkpointing=true"},
        {"algorithm.rpo.enable=true", "actor.ppo_max_token_len=150"},
        {"algorithm.rpo.enable=true", "algorithm.rpo.max_cut=20", "algorithm.rpo.suffix_cap=removed"},
        {"algorithm.rpo.enable=true", "algorithm.rpo.cut=half_shortest", "algorithm.rpo.suffix_cap=removed",
         "algorithm.rpo.prefix_loss=included", "rollout.max_num_seqs=3", "rollout.max_num_batched_tokens=17"}})
    for (const char* type : {"qwen2", "llama"}) {  // tied and not
      const Config config = tiny_run(type, keys);
      const Plan plan = plan_step(config);
      Session session(config);
      GrpoTraining trainer(session);
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

// The plan makes few of many identical groups and counts all of them.
TEST(Plan, FewGroupsTellOfAll) {
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{"actor.ppo_max_token_len=400"},
        {"actor.ppo_max_token_len=90", "rollout.max_num_seqs=4", "rollout.max_num_batched_tokens=40"},
        {"actor.ppo_mini_batch_size=3", "actor.ppo_epochs=2", "actor.use_kl_loss=true"},
        {"rollout.n=7", "rollout.max_num_seqs=5", "rollout.max_num_batched_tokens=19", "rollout.kv_cache_bytes=90000"},
        {"rollout.n=23", "rollout.max_num_seqs=4", "rollout.max_num_batched_tokens=31"},
        {"learner.shards=4", "actor.ppo_max_token_len=200", "actor.use_kl_loss=true", "actor.kl_loss_type=exact"},
        {"learner.shards=2", "trainer.balance_batch=false"},
        {"rollout.kv.method=snapkv", "rollout.check_exact=false", "rollout.kv.evict.budget=20",
         "rollout.kv.evict.buffer=3", "rollout.kv.window.size=8", "rollout.max_num_seqs=6"},
        {"learner.attention=replay", "rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=5",
         "rollout.kv.blocks.dense_layers=1"},
        {"algorithm.oversample.keep=2", "actor.ppo_epochs=2"},
        {"algorithm.rpo.enable=true", "algorithm.rpo.prefix_loss=included", "algorithm.rpo.cut=half_shortest",
         "algorithm.rpo.suffix_cap=removed"}}) {
    SCOPED_TRACE(testing::PrintToString(keys));
    std::vector<std::string> all = keys;
    all.push_back("data.train_batch_size=27");
    const Config config = tiny_run("qwen3", all);
    Session few(config, table_null), whole(config);
    GrpoTraining(few).worst_case_step();
    GrpoTraining(whole).worst_case_step();
    EXPECT_EQ(few.ledger.phases, whole.ledger.phases);
    const auto a = few.arenas(), b = whole.arenas();
    for (size_t i = 0; i < a.size(); i++) EXPECT_EQ(a[i]->peak(), b[i]->peak()) << a[i]->name();
  }
}

// A batch of more prompts adds to the ledger what each of them takes, and to the memory of no arena.
TEST(Plan, ManyPromptsAddTheSameEach) {
  const auto flops = [](int64_t prompts) {
    const Plan plan = plan_step(tiny_run("qwen3", {cat("data.train_batch_size=", prompts), "rollout.n=16",
                                                   "rollout.max_num_seqs=16", "actor.ppo_max_token_len=128"}));
    return std::pair(plan.most.total(),
                     std::array{plan.ledger.total("rollout").flops, plan.ledger.total("learner").read});
  };
  const auto [bytes, few] = flops(1000);
  const auto [same, more] = flops(2000);
  const auto [again, most] = flops(3000);
  EXPECT_EQ(bytes, same);
  EXPECT_EQ(bytes, again);
  for (size_t i = 0; i < few.size(); i++) EXPECT_EQ(most[i] - more[i], more[i] - few[i]) << i;
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
         "rollout.check_exact=false", "rollout.kv.evict.budget=20", "rollout.kv.evict.buffer=1",
         "rollout.kv.window.size=8"},
        {"rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=6",
         "rollout.check_exact=false", "algorithm.rollout_correction.rollout_is=tis",
         "algorithm.rollout_correction.acceptance=true"},
        {"algorithm.oversample.keep=2", "actor.ppo_max_token_len=150", "actor.use_kl_loss=true"},
        {"rollout.kv.method=block_topk", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=6",
         "algorithm.oversample.keep=3", "algorithm.oversample.by=acceptance",
         "rollout.kv.blocks.acceptance_target=0.86"},
        {"learner.attention=replay", "rollout.kv.method=pyramidkv", "rollout.kv.evict.budget=12",
         "rollout.kv.evict.buffer=7", "rollout.kv.pyramidkv.beta=3", "actor.ppo_max_token_len=100"},
        {"learner.attention=replay", "rollout.kv.method=rkv", "rollout.kv.evict.budget=9", "rollout.kv.evict.buffer=3",
         "rollout.max_num_seqs=30", "rollout.max_num_batched_tokens=31"},
        {"learner.attention=replay", "rollout.kv.method=block_topk", "rollout.kv.blocks.size=4",
         "rollout.kv.blocks.count=5", "rollout.kv.blocks.dense_layers=1"},
        {"actor.token_subset=det", "actor.det_fraction=0.3", "actor.ppo_max_token_len=120"},
        {"actor.token_subset=det", "actor.det_fraction=0.5", "actor.ppo_max_token_len=16", "algorithm.rpo.enable=true",
         "actor.use_kl_loss=true", "actor.kl_loss_type=exact"},
        {"actor.token_subset=det", "learner.attention=replay", "rollout.kv.method=rkv", "rollout.kv.evict.budget=9",
         "rollout.kv.evict.buffer=3"},
        {"algorithm.rpo.enable=true", "actor.ppo_max_token_len=300"},
        {"algorithm.rpo.enable=true", "actor.ppo_max_token_len=70", "actor.use_kl_loss=true",
         "actor.kl_loss_type=exact"},
        {"algorithm.rpo.enable=true", "actor.ppo_max_token_len=16", "model.enable_gradient_checkpointing=true",
         "rollout.max_num_seqs=30", "rollout.max_num_batched_tokens=31"},
        {"algorithm.rpo.enable=true", "learner.attention=replay", "rollout.kv.method=quest", "rollout.kv.blocks.size=4",
         "rollout.kv.blocks.count=5", "actor.ppo_max_token_len=60"}}) {
    SCOPED_TRACE(testing::PrintToString(keys));
    const Config config = tiny_run("qwen3", keys);
    const ArenaLimits limits = training_limits(config, TrainingKind::grpo, table_null);
    size_t largest = 0;
    double dropped = 0;
    for (int i = 0; i < 12; i++) {
      Session session(config, table_null);
      GrpoTraining trainer(session);
      trainer.worst_case_step();
      const bool long_ones = i % 3 == 0, short_ones = i % 3 == 1;  // else of every length
      const auto length = [&](int64_t n) { return long_ones ? n : short_ones ? up_to(3) : up_to(n); };
      const auto prompts = [&] {
        std::vector<Request> requests;
        for (int64_t g = 0; g < config.data.train_batch_size; g++) {
          const std::vector<int32_t> prompt(length(config.data.max_prompt_length));
          const int64_t response = length(config.data.max_response_length);
          // With RPO a part of it is given, now and then all but a token.
          const int64_t sampled = !config.algorithm.rpo.enable ? response : i % 2 ? 1 : up_to(response);
          requests.push_back(
              {prompt, {}, static_cast<int>(sampled), std::vector<int32_t>(static_cast<size_t>(response - sampled))});
          for (int64_t k = 0; k < config.rollout.n; k++) requests.back().uids.push_back(sequence_uid(0, g, 0, k));
        }
        return requests;
      };
      const auto scores = [&](auto, std::span<const Completion> completions) {
        std::vector<double> scores(completions.size());
        for (double& s : scores) s = static_cast<double>(up_to(3));
        return scores;
      };
      GrpoKeys some = trainer.keys();
      some.eos.clear();
      some.algorithm.adv_filter_threshold = 0.7;
      Metrics metrics;
      Grpo(some, trainer.engine(), {.prompts = prompts, .scores = scores, .progress = {}}).step(1, metrics);
      dropped += metrics.get("filter/small_adv_fraction") / 12;
      const ArenaLimits peaks = session.peaks();
      EXPECT_LE(peaks.weights, limits.weights);
      EXPECT_LE(peaks.kv, limits.kv);
      EXPECT_LE(peaks.activations, limits.activations) << "update " << i;
      largest = std::max(largest, peaks.activations);
    }
    EXPECT_GT(2 * largest, limits.activations) << "twice what is ever taken";
    EXPECT_GT(dropped, 0.1);
    EXPECT_LT(dropped, 0.9);
  }
}

// Linear layers 2 x parameters x rows (in a rollout with SwiGLU, 5 an element), the LM head where a log-prob is asked,
// attention 4 H D per visible pair; three times that for a forward and a backward, 3.5 times for attention.  A prompt
// counts once per group.
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
      rollout.add_prefix(prompt);
      learner.add_prefix(prompt);
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
    // The products of queries, keys and values are of kv_write, and gates and ups make SwiGLU.
    const int64_t qkv = 2 * rollout.rows * model.layers * model.hidden * model.qkv_width(),
                  swiglu = 5 * rollout.rows * model.ffn * model.layers;
    EXPECT_EQ(ops["linear_fwd"].cost.flops, rollout.linear(model) - qkv + swiglu);
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
  const std::vector<std::string> keys = {"model.config=qwen2.5-1.5b", "data.train_batch_size=1",
                                         "data.max_response_length=64", "actor.optim.moments=bf16"};
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

// The config.json of Qwen2.5-14B, as far as it is read; returns its path.
std::string fourteen_billion() {
  const auto path = std::filesystem::path(testing::TempDir()) / cat("pare_14b_", getpid(), ".json");
  std::ofstream(path) << R"({"model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8, "intermediate_size": 13824, "vocab_size": 152064,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": false})";
  return path.string();
}

// Whatever this machine has: no machine that runs this holds 14 billion parameters with gradients and moments, or half
// a terabyte of keys and values.
TEST(Plan, NeedsNoMemoryOfItsOwn) {
  const double parameters = 14'770'033'664;
  const Config large = load_config({"model.config=" + fourteen_billion(), "trainer.device=cuda",
                                    "data.train_batch_size=2", "data.max_response_length=64"});
  const Plan plan = plan_step(large, TrainingKind::grpo, false);
  EXPECT_EQ(plan.model.layers, 48);
  const auto within = [](size_t bytes, double expected) {
    EXPECT_GE(static_cast<double>(bytes), expected);
    EXPECT_LT(static_cast<double>(bytes), 1.01 * expected);
  };
  within(peak_of(plan, "weights"), (2 + 4) * parameters);  // bf16 and their masters
  within(peak_of(plan, "gradients"), 4 * parameters);
  within(peak_of(plan, "optimizer"), 2 * 4 * parameters);

  const Config wide = load_config({"model.config=llama-3.1-8b", "data.train_batch_size=1", "rollout.n=2",
                                   "data.max_response_length=512", "rollout.max_num_seqs=2048"});
  EXPECT_GT(static_cast<double>(plan_step(wide).most.kv), 2048.0 * 1024 * 2 * 32 * 8 * 128 * 4);
}

size_t taken_bytes = 0;
constexpr Memory kCounted = {.take =
                                 [](size_t n) {
                                   taken_bytes += n;
                                   return host_memory.take(n);
                                 },
                             .give =
                                 [](void* p, size_t n) {
                                   taken_bytes -= n;
                                   host_memory.give(p, n);
                                 },
                             .free = [] { return host_memory.free(); },
                             .total = [] { return host_memory.total(); }};

// Of keys, values and the sampler's scratch on one side, gradients and activations on the other, a run plans and takes
// the larger.
TEST(Plan, SharedMemoryIsTheLarger) {
  Table counted = table_cpu;
  counted.memory = &kCounted;
  int sampling = 0, training = 0;
  for (const std::vector<std::string>& keys : std::vector<std::vector<std::string>>{
           {"rollout.max_num_seqs=3", "rollout.max_num_batched_tokens=17"},
           {"rollout.max_num_seqs=200", "actor.ppo_max_token_len=90"},
           {"rollout.max_num_seqs=60", "rollout.kv.method=quest", "rollout.kv.blocks.size=4",
            "rollout.kv.blocks.count=6", "rollout.check_exact=false", "algorithm.rollout_correction.rollout_is=tis",
            "algorithm.rollout_correction.acceptance=true"},
           {"model.lora.rank=2", "distill.enable=true", "rollout.kv.method=quest", "rollout.kv.blocks.size=4",
            "rollout.kv.blocks.count=3", "rollout.kv.blocks.dense_layers=0"}})
    for (const TrainingKind kind : {TrainingKind::grpo, TrainingKind::sft}) {
      if (kind == TrainingKind::sft && keys.size() > 2) continue;
      SCOPED_TRACE(testing::PrintToString(keys));
      std::vector<std::string> all = keys;
      all.insert(all.end(), {"trainer.test_freq=1", "rollout.free_cache_engine=false"});
      const Plan apart = plan_step(tiny_run("qwen3", all), kind);
      all.back() = "rollout.free_cache_engine=true";
      const Config config = tiny_run("qwen3", all);
      const Plan plan = plan_step(config, kind);
      for (const auto& [a, b] : {std::pair{&apart.most, &plan.most}, {&apart.longest, &plan.longest}}) {
        EXPECT_EQ(a->total(), a->weights + a->gradients + a->optimizer + a->states + a->kv + a->activations);
        EXPECT_EQ(b->total(),
                  b->weights + b->optimizer + b->states + std::max(b->kv + b->scratch, b->gradients + b->activations));
        EXPECT_EQ(a->kv, b->kv);
        EXPECT_EQ(a->gradients, b->gradients);
        EXPECT_EQ(a->activations, std::max(b->activations, b->scratch));
        EXPECT_LT(b->total(), a->total());
      }
      (plan.most.sampling() > plan.most.training() ? sampling : training)++;
      EXPECT_EQ(plan.ledger.phases, apart.ledger.phases);

      Session session(config, counted, true, plan.most);
      EXPECT_EQ(taken_bytes, plan.most.total());
      const auto trainer = make_training(kind, session);
      trainer->worst_case_step();
      EXPECT_EQ(session.peaks().total(), plan.peak());
      const auto arenas = session.arenas();
      ASSERT_EQ(plan.memory.size(), arenas.size());
      for (size_t i = 0; i < arenas.size(); i++) {
        EXPECT_EQ(plan.memory[i].arena, arenas[i]->name());
        EXPECT_EQ(plan.memory[i].peak, arenas[i]->peak()) << arenas[i]->name();
      }
      trainer->evaluate();
      EXPECT_EQ(taken_bytes, plan.most.total()) << "and nothing later";
    }
  EXPECT_EQ(taken_bytes, 0u);
  EXPECT_GE(sampling, 2);
  EXPECT_GE(training, 2);
}

size_t free_bytes = 0;
constexpr Memory kPretended = {.take = [](size_t) -> void* { return nullptr; },
                               .give = [](void*, size_t) {},
                               .free = [] { return free_bytes; },
                               .total = [] { return free_bytes; }};

// What lies on the device is compared with the device, what lies on the host with the host.
TEST(Plan, DryRunAsksTheDevice) {
  Table device = table_null;
  device.memory = &kPretended;
  const auto error = [&](const Config& config, TrainingKind kind, size_t host) -> std::string {
    try {
      check_run(config, kind, device, host);
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::memory);
      return e.what();
    }
    return "";
  };
  const Config config = tiny_run("qwen3", {"model.enable_gradient_checkpointing=false"});
  for (const TrainingKind kind : {TrainingKind::grpo, TrainingKind::sft}) {
    const size_t most = plan_step(config, kind).most.total();
    EXPECT_EQ(training_limits(config, kind, table_cpu).total(), most) << "the host's arenas too";
    free_bytes = most;
    EXPECT_EQ(error(config, kind, most / 4), "") << "the host need not hold it";
    free_bytes = most - 1;
    EXPECT_NE(error(config, kind, machine_memory()).find(cat("(", most - 1, ") free on this device")),
              std::string::npos);
    free_bytes = 2 * most;
    EXPECT_NE(error(config, kind, 1000).find("the machine has 1000"), std::string::npos) << "the responses";
  }
  const size_t responses = planned_responses(config);
  EXPECT_NO_THROW(check_response_memory(config, responses)) << "to the byte";
  EXPECT_THROW(check_response_memory(config, responses - 1), Error);
  const Keys recorded = {"rollout.top_k=7", "actor.ppo_epochs=2"};
  EXPECT_EQ(planned_responses(tiny_run("qwen3", recorded)) - responses,
            8 * 7 * config.data.train_batch_size * config.rollout.n * config.data.max_response_length)
      << "the sets of the draws";
  Config sft = config;
  sft.trainer.command = RunCommand::sft;
  EXPECT_EQ(planned_responses(sft) * static_cast<size_t>(config.rollout.n), responses) << "a completion a row";
  const Config large = load_config({"model.config=" + fourteen_billion(), "data.train_batch_size=2",
                                    "data.max_response_length=64", "trainer.device=cuda"});
  free_bytes = size_t{400} << 30;
  EXPECT_EQ(error(large, TrainingKind::grpo, machine_memory()), "");
  free_bytes = size_t{150} << 30;
  EXPECT_NE(error(large, TrainingKind::grpo, machine_memory()).find("free on this device"), std::string::npos);
}

TEST(Plan, RecomputesAsFewBlocksAsMemoryNeeds) {
  const Config config = load_config({"grpo", "model.config=qwen2.5-0.5b", "data.train_batch_size=2", "rollout.n=2",
                                     "rollout.max_num_seqs=2", "rollout.max_num_batched_tokens=64",
                                     "rollout.free_cache_engine=false", "trainer.device=cuda"});
  const auto taken = [&](int64_t blocks) {
    Config c = config;
    c.fitted.recompute = blocks;
    return plan_most(c).total();
  };
  const auto fitted = [&](size_t memory) {
    return fit_memory(config, [&](const Config& c) { return plan_fits(c, memory); }).fitted.recompute;
  };
  EXPECT_EQ(fitted(taken(0)), 0);
  EXPECT_EQ(fitted(taken(0) - 1), 1);
  EXPECT_EQ(fitted(taken(17)), 17);
  EXPECT_EQ(fitted(taken(17) - 1), 18);
  EXPECT_EQ(fitted(taken(23)), 23) << "of 24";
  EXPECT_EQ(fitted(1000), 23);
  Config all = config;
  all.model.enable_gradient_checkpointing = true;
  EXPECT_EQ(plan_most(all).total(), taken(23));
  EXPECT_EQ(fit_memory(config).fitted, (Fitted{.recompute = 23, .logits_chunk = 256}));
  // Fewer rows of logits only then; a key that states one of them leaves the other.
  const auto rows = [&](Config c, size_t memory) {
    return fit_memory(c, [&](const Config& with) { return plan_fits(with, memory); }).fitted;
  };
  EXPECT_EQ(rows(config, taken(23) - 1), (Fitted{.recompute = 23, .logits_chunk = 1024})) << "there are 2048 rows";
  EXPECT_EQ(rows(all, taken(23) - 1), (Fitted{.recompute = 0, .logits_chunk = 1024}));
  Config some = config;
  some.actor.logits_chunk = 100;
  EXPECT_EQ(rows(some, 1000), (Fitted{.recompute = 23}));
  some.model.enable_gradient_checkpointing = false;
  EXPECT_EQ(rows(some, 1000), Fitted());
  EXPECT_EQ(
      fitted_text(fit_memory(config), {1000, "of --memory"}),
      "the learner recomputes 23 of 24 blocks and computes 256 rows of logits at a time to fit the 1.00kB (1000) of "
      "--memory");
  EXPECT_EQ(fitted_text(all, {1000, "of --memory"}), "");
}

// A run has the choice of its plan.
TEST(Plan, ARunRecomputesWhatItsPlanDoes) {
  Table device = table_null;
  device.memory = &kPretended;
  const Config config = tiny_run("qwen3", {"rollout.free_cache_engine=false", "trainer.device=cuda"});
  for (const TrainingKind kind : {TrainingKind::grpo, TrainingKind::sft}) {
    const size_t most = plan_step(config, kind).most.total();
    free_bytes = most;
    EXPECT_EQ(plan_run(config, kind, device).config.fitted.recompute, 0);
    free_bytes = most - 1;
    const Plan plan = plan_run(config, kind, device);
    EXPECT_EQ(plan.config.fitted.recompute, 1);
    EXPECT_LT(plan.most.total(), most);
    EXPECT_NE(plan.notes.back().find("recomputes 1 of 2 blocks to fit"), std::string::npos) << plan.notes.back();
    EXPECT_EQ(Session(plan.config, table_null, true, plan.most).learner_options().recompute, 1);
  }
}

// What no machine of that size can fill, whatever the lengths.
TEST(Plan, AnArenaLargerThanTheHostIsRefused) {
  const Config config = tiny_run("qwen3", {"model.enable_gradient_checkpointing=false", "actor.logits_chunk=1024"});
  size_t largest = 0;
  for (const Plan::Memory& m : plan_step(config).memory) largest = std::max(largest, m.most);
  EXPECT_GT(plan_run(config, TrainingKind::grpo, table_cpu, largest).most.total(), largest);
  try {
    plan_run(config, TrainingKind::grpo, table_cpu, largest - 1);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::memory);
    EXPECT_NE(std::string(e.what()).find(cat("(", largest - 1, ") of this machine")), std::string::npos) << e.what();
  }
}

// Both read the same books; only the checks of prompts are left out.
TEST(Plan, NeedsNoTokenizerAndNoData) {
  for (const TrainingKind kind : {TrainingKind::grpo, TrainingKind::sft}) {
    const Config config = tiny_run("llama", {"trainer.test_freq=1"});
    const Plan with = plan_step(config, kind), without = plan_step(config, kind, false);
    for (size_t i = 0; i < with.memory.size(); i++) {
      EXPECT_EQ(with.memory[i].peak, without.memory[i].peak) << with.memory[i].arena;
      EXPECT_EQ(with.memory[i].most, without.memory[i].most) << with.memory[i].arena;
    }
    EXPECT_EQ(with.ledger.phases, without.ledger.phases);
  }
  const Config nothing =
      load_config({"model.config=qwen3-0.6b", "data.task=jsonl", "data.train_files=no/such.jsonl",
                   "data.tokenizer=no/such", "data.train_batch_size=1", "data.max_response_length=8"});
  EXPECT_THROW(plan_step(nothing), Error);
  EXPECT_GT(plan_step(nothing, TrainingKind::grpo, false).peak(), size_t{596'049'920} * 16);
}

// Lengths that leave half of a micro-batch empty: shorter sequences fill it.
TEST(Plan, TheMostIsMoreThanTheLongestSequencesTake) {
  const Config config = tiny_run("qwen3", {"data.max_prompt_length=40", "data.max_response_length=60", "rollout.n=2",
                                           "actor.ppo_max_token_len=300"});
  const Plan plan = plan_step(config);
  for (const Plan::Memory& m : plan.memory) EXPECT_GE(m.most, m.peak) << m.arena;
  EXPECT_GT(plan.most.activations, 5 * peak_of(plan, "activations") / 4);
}

// NAT's fixed truncation: what is cut never takes memory in the learner.
TEST(Plan, TheMostIsOfTheTokensThatAreTrainedOn) {
  const auto most = [](const std::vector<std::string>& subset) {
    return plan_step(tiny_run("qwen3", std::vector<std::string>{"actor.ppo_max_token_len=16"} + subset))
        .most.activations;
  };
  EXPECT_LT(most({"actor.token_subset=det", "actor.det_fraction=0.3"}), most({"actor.token_subset=det"}));
  EXPECT_LT(most({"actor.token_subset=det"}), most({}));
  EXPECT_EQ(most({"actor.token_subset=rpc"}), most({})) << "a draw may keep everything";
}

// If groups, or parts of them, fill micro-batches, no lengths take more than the longest.  The bound on replayed
// compressions is a little too high.
TEST(Plan, TheMostIsTheLongestWhereBatchesAreFull) {
  const auto replay = [](const char* method, const char* rows) {
    return std::vector<std::string>{"learner.attention=replay",    cat("rollout.kv.method=", method),
                                    "rollout.kv.evict.budget=12",  "rollout.kv.evict.buffer=7",
                                    "rollout.kv.pyramidkv.beta=3", cat("actor.ppo_max_token_len=", rows)};
  };
  for (std::vector<std::string> keys : {std::vector<std::string>{"actor.ppo_max_token_len=98"},  // 2 of 5 members
                                        {"actor.ppo_max_token_len=285"},                         // a group
                                        replay("pyramidkv", "98"),
                                        replay("pyramidkv", "285"),
                                        replay("rkv", "98")}) {
    SCOPED_TRACE(testing::PrintToString(keys));
    const bool replays = keys.size() > 1;
    keys.insert(keys.end(), {"rollout.max_num_seqs=4", "rollout.max_num_batched_tokens=8"});
    const Plan plan = plan_step(tiny_run("qwen3", keys));
    const size_t most = plan.most.activations, longest = plan.longest.activations;
    EXPECT_LE(longest, most);
    EXPECT_LE(most, longest + longest / (replays ? 20 : 1000));
  }
}

// An evaluation may take all that the device has.
TEST(Plan, AnEvaluationFitsToTheByte) {
  Table device = table_null;
  device.memory = &kPretended;
  const Config config = tiny_run("qwen3");
  free_bytes = size_t{1} << 40;
  const size_t all = evaluation_limits(config, device).total();
  free_bytes = all;
  EXPECT_EQ(evaluation_limits(config, device).total(), all);
  free_bytes = all - 1;
  EXPECT_THROW(evaluation_limits(config, device), Error);
}

// Next-token training samples for validations only.
TEST(Plan, SftWithoutValidationHasNoKvCache) {
  for (const char* validation : {"trainer.test_freq=0", "trainer.test_freq=2", "trainer.val_before_train=true"}) {
    const Config config = tiny_run("qwen3", {validation});
    const bool validates = std::string(validation) != "trainer.test_freq=0";
    const Plan plan = plan_step(config, TrainingKind::sft);
    EXPECT_EQ(plan.most.kv > 0, validates) << validation;
    Session session(config, table_cpu, true, plan.most);
    const auto training = make_training(TrainingKind::sft, session);
    Metrics m = training->step();
    if (validates) m.add(training->evaluate());
    EXPECT_EQ(session.kv.peak() > 0, validates) << validation;
    EXPECT_EQ(m.get("memory/kv") > 0, validates) << validation;
  }
}

}  // namespace
}  // namespace pare::test
