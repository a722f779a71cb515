// src/ref/step.cpp, which is there to be read, against the engine on `ref` in double: the rollout, the stages, the
// learner.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "ref/step.h"
#include "rl/advantages.h"
#include "rl/grpo.h"
#include "tests/program.h"
#include "tests/tiny.h"

namespace pare::test {
namespace {

ModelConfig one_layer() {
  ModelConfig c;
  c.model_type = "llama";
  c.layers = 1;
  c.hidden = 12;
  c.heads = 6;
  c.kv_heads = 2;
  c.head_dim = 4;
  c.ffn = 17;
  c.vocab = 19;
  c.max_position = 40;
  return c;
}

// Rewards that differ within the group, also for responses of one length.
double reward(const std::vector<int32_t>& response) {
  return static_cast<double>(std::count_if(response.begin(), response.end(), [](int32_t t) { return t % 3 == 1; }));
}

void expect_equal(const std::vector<double>& a, const std::vector<double>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); i++) ASSERT_EQ(a[i], b[i]) << what << ", element " << i << " of " << a.size();
}

ref::StepShape shape_of(const ModelConfig& c) {
  return {c.vocab, c.hidden, c.heads, c.kv_heads, c.head_dim, c.ffn, c.rope_theta, c.rms_eps};
}

ref::StepWeights weights_of(const ModelConfig& c, const std::vector<float>& start) {
  ref::StepWeights weights(shape_of(c));
  int64_t at = 0;
  for (ref::Matrix* part : weights.all())
    for (double& x : part->data) x = start[at++];
  EXPECT_EQ(at, std::ssize(start));
  return weights;
}

ref::StepOptions five_responses() {
  ref::StepOptions o{.prompt = {5, 11, 2, 7, 7},
                     .uids = {},
                     .seed = 3,
                     .step = 1,
                     .max_tokens = 9,
                     .eos = 4,
                     .reward = reward,
                     .lr = 0.01f,
                     .max_norm = 0.5f};
  for (uint64_t k = 0; k < 5; k++) o.uids.push_back(sequence_uid(0, 8, 0, k));
  return o;
}

template <class Parts>
std::vector<double> flat_parts(Parts parts) {
  std::vector<double> all;
  for (const auto* part : parts.all()) all.insert(all.end(), part->data.begin(), part->data.end());
  return all;
}

std::vector<double> flat(const ref::StepWeights& weights) { return flat_parts(weights); }
std::vector<double> flat(const ref::StepAdapter& adapter) { return flat_parts(adapter); }

std::vector<double> flat(const Parameters& parameters) {
  std::vector<double> all;
  for (const ParameterBlock& b : parameters.blocks) {
    std::vector<double> block(b.size());
    if (b.vector)
      parameters.device.download({block.data(), b.vector});
    else
      parameters.device.unpack_weight(
          {make_tensor(block.data(), DType::f64, {b.weight.outputs(), b.weight.inputs()}), b.weight, 0});
    all.insert(all.end(), block.begin(), block.end());
  }
  return all;
}

TEST(Step, IsTheRealStep) {
  const ModelConfig c = one_layer();
  const std::vector<float> start = tiny_parameters(c, 7);
  ref::StepWeights weights = weights_of(c, start);
  const ref::StepOptions o = five_responses();
  const ref::StepResult step = ref::grpo_step(o, weights);
  const ref::StepUpdate& first = step.updates[0];

  // The rollout, with its pages and its scheduler.
  World w(table_ref, c, DType::f64);
  w.model.set_parameters(start);
  Arena kv("kv", *table_ref.memory, roomy(table_ref));
  Rollout rollout(w.model, {.max_sequences = 3, .max_batched_tokens = 7, .max_context = 20}, kv, w.activations);
  const auto completions =
      rollout.generate({{o.prompt, o.uids, static_cast<int>(o.max_tokens)}},
                       {.temperature = 1, .key = rng_key(o.seed, RngStream::sample, o.step), .eos = {o.eos}});
  std::vector<Trajectory> samples;
  std::set<size_t> lengths;
  for (size_t k = 0; k < completions.size(); k++) {
    Trajectory s;
    s.member = static_cast<int32_t>(k);
    s.uid = o.uids[k];
    s.prompt = o.prompt;
    s.tokens = completions[k].tokens;
    s.logprob = completions[k].logprobs;
    s.score = s.reward = reward(s.tokens);
    lengths.insert(s.tokens.size());
    EXPECT_EQ(s.tokens, step.responses[k].tokens) << k;
    EXPECT_EQ(s.logprob, step.responses[k].sampled) << k;
    samples.push_back(s);
  }
  EXPECT_GT(lengths.size(), 1u) << "responses of one length show less";

  // The stages.
  ActorKeys actor;
  actor.loss_agg_mode = LossAgg::seq_mean_token_mean;
  set_advantages({}, samples);
  std::vector<TokenPlan> plans;
  for (const Trajectory& s : samples) {
    EXPECT_EQ(s.advantage, step.responses[s.member].advantage);
    plans.push_back(full_plan(std::ssize(s.tokens)));
  }
  EXPECT_NE(step.responses[0].advantage, step.responses[1].advantage);
  const Update update = make_update(actor, o.max_tokens, samples, plans);

  // The learner, on micro-batches that cut the group.
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.max_rows = 11, .logits_chunk = 3});
  const TokenOuts out = learner.accumulate(update.groups, update.terms, loss_spec(actor, 1));
  int64_t at = 0;
  for (size_t k = 0; k < samples.size(); k++)
    for (size_t t = 0; t < samples[k].tokens.size(); t++, at++) {
      const double logprob = first.logprobs[k][t];
      EXPECT_EQ(out.logprob[at], logprob) << "response " << k << ", token " << t;
      EXPECT_EQ(static_cast<float>(logprob), samples[k].logprob[t]);
    }
  expect_equal(learner.gradients(), flat(first.gradient), "gradient");
  const double norm = learner.step({.lr = o.lr,
                                    .beta1 = o.beta1,
                                    .beta2 = o.beta2,
                                    .eps = o.adam_eps,
                                    .weight_decay = o.weight_decay,
                                    .max_norm = o.max_norm});
  EXPECT_EQ(norm, first.norm);
  EXPECT_GT(norm, o.max_norm) << "nothing was clipped";
  expect_equal(flat(w.model), flat(weights), "parameters");
}

// The engine's step, on `ref` in double, with the keys of a run.
class Engine {
 public:
  Engine(const ModelConfig& c, const std::vector<float>& start, const ref::StepOptions& o)
      : world_(table_ref, c, DType::f64), o_(o) {
    world_.model.set_parameters(start);
    keys.actor.loss_agg_mode = LossAgg::seq_mean_token_mean;
    keys.actor.optim.lr = o.lr;
    keys.actor.grad_clip = o.max_norm;
    keys.actor.ppo_epochs = o.updates;
    keys.eos = {o.eos};
    keys.max_response_length = o.max_tokens;
    keys.total_training_steps = 9;
    keys.seed = o.seed;
    keys.exact = keys.checks = true;
  }

  void step() {
    Arena kv("kv", *table_ref.memory, roomy(table_ref));
    World& w = world_;
    const RolloutLimits limits{.max_sequences = 3, .max_batched_tokens = 7, .max_context = 20, .kv = keys.kv};
    LearnerOptions options{.max_rows = 11, .logits_chunk = 3};
    Model sparse(w.model);
    std::unique_ptr<Adapters> adapters;
    std::unique_ptr<Learner> student;
    if (keys.distill.enable) {
      const LoraSpec lora{
          .rank = o_.rank, .alpha = static_cast<double>(o_.rank), .targets = {false, false, false, true}};
      adapters = std::make_unique<Adapters>(w.model.config, lora, w.device, w.weights, DType::f64, true);
      upload_parameters(*adapters, adapter);
      sparse.adapters = adapters.get();
      LearnerOptions attends = options;
      attends.blocks = block_reads(keys.kv);
      attends.dense_reference = true;
      student = std::make_unique<Learner>(sparse, w.gradients, w.optimizer, w.activations, attends);
    }
    Rollout rollout(sparse, limits, kv, w.activations, &w.model);
    Learner learner(w.model, w.gradients, w.optimizer, w.activations, options);
    const GrpoEngine engine{w.model, nullptr, rollout, learner, student.get(), w.activations, options, {}};
    const std::vector<Request> requests = {{o_.prompt, o_.uids, static_cast<int>(o_.max_tokens)}};
    Grpo grpo(keys, engine,
              {.prompts = [&] { return requests; },
               .scores = [&](auto asked, auto completions) { return scores(asked, completions); },
               .progress = {},
               .cache = keys.algorithm.rpo.enable ? &cache : nullptr,
               .rows = [] { return std::vector<PromptRow>{{.row = 0, .uid = 0}}; }});
    grpo.step(static_cast<int64_t>(o_.step), metrics);
    samples = grpo.samples();
    parameters = flat(w.model);
    if (adapters) adapter = flat(*adapters);
  }

  GrpoKeys keys;
  PrefixCache cache;
  Metrics metrics;
  std::vector<Trajectory> samples;
  std::vector<double> parameters, adapter;

 private:
  std::vector<double> scores(std::span<const Request> requests, std::span<const Completion> completions) const {
    std::vector<double> scores;
    for (const Completion& c : completions) {
      std::vector<int32_t> whole = requests[c.request].prefix;
      whole.insert(whole.end(), c.tokens.begin(), c.tokens.end());
      scores.push_back(o_.reward(whole));
    }
    return scores;
  }

  World world_;
  const ref::StepOptions o_;
};

// A step by src/ref/step.cpp and by the engine, which have everything in common.
struct Both {
  Both(const ref::StepOptions& o, const std::function<void(Engine&)>& set, ref::StepAdapter* adapter = nullptr)
      : start(tiny_parameters(one_layer(), 7)),
        weights(weights_of(one_layer(), start)),
        step(ref::grpo_step(o, weights, adapter)),
        engine(one_layer(), start, o) {
    set(engine);
    engine.step();
    EXPECT_EQ(engine.samples.size(), step.responses.size());
    for (size_t k = 0; k < step.responses.size(); k++) {
      const Trajectory& s = engine.samples[k];
      const ref::StepResponse& r = step.responses[k];
      EXPECT_EQ(s.prefix, step.prefix) << k;
      EXPECT_EQ(s.tokens, r.tokens) << k;
      EXPECT_EQ(s.logprob, r.sampled) << k;
      EXPECT_EQ(s.reward, r.reward) << k;
      EXPECT_EQ(s.advantage, r.advantage) << k;
      EXPECT_EQ(s.dropped(), r.weight.empty()) << k;
    }
    double norms = 0, clipped = 0, rows = 0;
    for (const ref::StepUpdate& u : step.updates) {
      norms += u.norm;
      clipped += static_cast<double>(u.clipped);
      for (const auto& logprobs : u.logprobs) rows += static_cast<double>(logprobs.size());
    }
    EXPECT_EQ(metric("actor/grad_norm"), norms / static_cast<double>(step.updates.size()));
    EXPECT_EQ(metric("actor/pg_clipfrac"), clipped / rows);
    EXPECT_EQ(metric("tokens/loss"), rows);
    expect_equal(engine.parameters, flat(weights), "parameters");
  }

  double metric(const std::string& name) const { return engine.metrics.get(name); }

  const std::vector<float> start;
  ref::StepWeights weights;
  const ref::StepResult step;
  Engine engine;
};

void nothing(Engine&) {}

// The second one has old log-probs, and clips.
TEST(Step, UpdatesAreTheEngines) {
  ref::StepOptions o = five_responses();
  o.updates = 3;
  o.lr = 0.05f;
  const Both both(o, nothing);
  EXPECT_EQ(both.step.updates[0].clipped, 0);
  EXPECT_GT(both.step.updates[1].clipped, 0) << "the clip does nothing";
  EXPECT_EQ(both.metric("exact/mismatch_tokens"), 0);
}

TEST(Step, DashIsTheEngines) {
  for (const int updates : {1, 2}) {
    ref::StepOptions o = five_responses();
    o.updates = updates;
    o.dash_threshold = 0.7;
    const Both both(o, [&](Engine& e) { e.keys.algorithm.adv_filter_threshold = o.dash_threshold; });
    const double filtered = both.metric("filter/small_adv_fraction");
    EXPECT_GT(filtered, 0);
    EXPECT_LT(filtered, 1);
  }
}

TEST(Step, NatIsTheEngines) {
  for (const int updates : {1, 2}) {
    ref::StepOptions o = five_responses();
    o.updates = updates;
    o.nat_tokens = 2;
    const Both both(o, [&](Engine& e) {
      e.keys.actor.token_subset = TokenSubset::rpc;
      e.keys.actor.rpc_min_tokens = o.nat_tokens;
    });
    EXPECT_GT(both.metric("ht/weight_max"), 1);
    EXPECT_LT(both.metric("ht/kept_fraction"), 1);
  }
}

void set_rpo(Engine& e, const ref::StepOptions& o) {
  RpoKeys& rpo = e.keys.algorithm.rpo;
  rpo.enable = true;
  rpo.cut = RpoCut::fixed;
  rpo.max_cut = o.rpo_max_cut;
  e.cache[0] = {.ids = o.rpo_earlier, .score = 0, .reward = 0, .step = 0, .shortest = 6};
}

TEST(Step, RpoIsTheEngines) {
  std::set<size_t> lengths;
  for (const uint64_t at : {1, 2, 3}) {
    ref::StepOptions o = five_responses();
    o.step = at;
    o.updates = 2;
    o.rpo_earlier = {9, 1, 16, 12, 3, 8};
    o.rpo_max_cut = 5;
    const Both both(o, [&](Engine& e) { set_rpo(e, o); });
    EXPECT_EQ(both.metric("rpo/hit_rate"), 1);
    lengths.insert(both.step.prefix.size());
  }
  EXPECT_GT(lengths.size(), 1u);
  EXPECT_GT(*lengths.rbegin(), 0u);
}

// Block top-k, xi and the veto.
void set_sparse(Engine& e, const ref::StepOptions& o) {
  e.keys.kv.method = KvMethod::block_topk;
  e.keys.kv.blocks.size = 4;
  e.keys.kv.blocks.count = o.blocks;
  e.keys.kv.blocks.dense_layers = 0;
  e.keys.kv.blocks.first = 0;
  e.keys.kv.blocks.last = 1;
  e.keys.algorithm.rollout_correction.veto = o.veto;
  e.keys.algorithm.rollout_correction.rollout_is = RolloutIs::paper;
  e.keys.exact = e.keys.checks = false;
}

TEST(Step, SparseRlIsTheEngines) {
  for (const int updates : {1, 2})
    for (const double veto : {1e-4, 0.6}) {
      ref::StepOptions o = five_responses();
      o.prompt = {5, 11, 2, 7, 7, 1, 18, 3, 8, 10};
      o.updates = updates;
      o.blocks = 2;
      o.veto = veto;
      const Both both(o, [&](Engine& e) { set_sparse(e, o); });
      EXPECT_GT(both.metric("rollout_corr/xi_max"), 1.1);
      EXPECT_EQ(both.metric("rollout_corr/rejection_rate") > 0, veto == 0.6);
      EXPECT_LT(both.metric("rollout_corr/rejection_rate"), 1);
      for (size_t k = 0; k < both.step.responses.size(); k++)
        EXPECT_EQ(*both.engine.samples[k].old_logprob, both.step.responses[k].old) << k;
    }
}

void set_distill(Engine& e, const ref::StepOptions& o) {
  e.keys.distill = {.enable = true,
                    .kl_type = DistillKl::k3,
                    .lambda = o.distill_lambda,
                    .lr_scale_factor = 1,
                    .grad_clip = o.max_norm};
  e.keys.checks = true;
}

ref::StepAdapter random_adapter(int64_t rank, uint64_t seed) {
  ref::StepAdapter adapter(shape_of(one_layer()), rank);
  Rng rng(rng_key(seed, RngStream::test, 9));
  for (ref::Matrix* part : adapter.all())
    for (double& x : part->data) x = 0.1 * rng.normal();
  return adapter;
}

// Phase A with xi and a veto, phase B with what it rejects.
TEST(Step, DistillSparseIsTheEngines) {
  for (const double veto : {1e-4, 0.6}) {
    ref::StepOptions o = five_responses();
    o.prompt = {5, 11, 2, 7, 7, 1, 18, 3, 8, 10};
    o.blocks = 2;
    o.veto = veto;
    o.rank = 3;
    o.distill_lambda = 0.4f;
    ref::StepAdapter adapter = random_adapter(o.rank, 3);
    const std::vector<double> start = flat(adapter);
    const Both both(
        o,
        [&](Engine& e) {
          set_sparse(e, o);
          set_distill(e, o);
          e.adapter = start;
        },
        &adapter);
    EXPECT_GT(both.metric("exact/checked_tokens"), 0);
    EXPECT_EQ(both.metric("exact/mismatch_tokens"), 0);
    EXPECT_EQ(both.metric("rollout_corr/rejection_rate") > 0, veto == 0.6);
    EXPECT_LT(both.metric("rollout_corr/rejection_rate"), 1);
    EXPECT_EQ(both.metric("distill/grad_norm"), both.step.sampler_updates[0].norm);
    EXPECT_GT(both.metric("distill/kl"), 0);
    expect_equal(both.engine.adapter, flat(adapter), "adapter");
    EXPECT_NE(start, flat(adapter));
  }
}

// The order of the stages shows where papers meet: a cut of what is weighted by xi, a prefix before sparse rows.
// Several responses must be left: the engine packs one alone without a parent, which is another order of sums.
TEST(Step, PapersTogetherAreTheEngines) {
  ref::StepOptions o = five_responses();
  for (uint64_t k = 5; k < 9; k++) o.uids.push_back(sequence_uid(0, 8, 0, k));
  o.dash_threshold = 0.5;
  o.nat_tokens = 3;
  o.rpo_earlier = {9, 1, 16, 12, 3, 8};
  o.rpo_max_cut = 5;
  o.prompt = {5, 11, 2, 7, 7, 1, 18, 3, 8, 10};
  o.max_tokens = 10;
  o.blocks = 2;
  o.veto = 0.5;
  o.rank = 2;
  o.distill_lambda = 0.4f;
  ref::StepAdapter adapter = random_adapter(o.rank, 4);
  const std::vector<double> start = flat(adapter);
  const Both both(
      o,
      [&](Engine& e) {
        set_sparse(e, o);
        set_rpo(e, o);
        set_distill(e, o);
        e.keys.algorithm.adv_filter_threshold = o.dash_threshold;
        e.keys.actor.token_subset = TokenSubset::rpc;
        e.keys.actor.rpc_min_tokens = o.nat_tokens;
        e.adapter = start;
      },
      &adapter);
  EXPECT_GT(both.metric("rollout_corr/rejection_rate"), 0);
  EXPECT_GT(both.metric("filter/small_adv_fraction"), 0);
  const auto& logprobs = both.step.updates[0].logprobs;
  EXPECT_GT(std::count_if(logprobs.begin(), logprobs.end(), [](const auto& x) { return !x.empty(); }), 1);
  EXPECT_LT(both.metric("ht/kept_fraction"), 1);
  EXPECT_GT(both.step.prefix.size(), 0u);
  expect_equal(both.engine.adapter, flat(adapter), "adapter");
}

// What `make step` prints stands in the page, indented.
TEST(Step, ThePageHasTheNumbers) {
  const std::string printed = printed_block(program_path().parent_path() / "step");
  if (printed.empty()) GTEST_SKIP() << "build/step is not built: run `make step`";
  EXPECT_EQ(generated_block("src/ref/README.md", "one step"), printed) << "run `make readme`";
}

}  // namespace
}  // namespace pare::test
