// src/ref/step.cpp, which is there to be read, against the engine on `ref` in double: the rollout, the stages, the
// learner.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "ref/step.h"
#include "rl/advantages.h"
#include "rl/loss.h"
#include "rollout/rollout.h"
#include "tests/tiny.h"

namespace pare::test {
namespace {

ModelConfig one_layer() {
  ModelConfig c;
  c.model_type = "llama", c.layers = 1;
  c.hidden = 12, c.heads = 6, c.kv_heads = 2, c.head_dim = 4, c.ffn = 17, c.vocab = 19, c.max_position = 40;
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

TEST(Step, IsTheRealStep) {
  const ModelConfig c = one_layer();
  const std::vector<float> start = tiny_parameters(c, 7);
  const ref::StepShape shape{c.vocab, c.hidden, c.heads, c.kv_heads, c.head_dim, c.ffn, c.rope_theta, c.rms_eps};
  ref::StepWeights weights(shape);
  int64_t at = 0;
  for (ref::Matrix* part : weights.all())
    for (double& x : part->data) x = start[at++];
  ASSERT_EQ(at, std::ssize(start));

  ref::StepOptions o{.prompt = {5, 11, 2, 7, 7},
                     .uids = {},
                     .sample_key = rng_key(3, RngStream::sample, 1),
                     .max_tokens = 9,
                     .eos = 4,
                     .reward = reward,
                     .lr = 0.01f,
                     .max_norm = 0.5f};
  for (uint64_t k = 0; k < 5; k++) o.uids.push_back(sequence_uid(0, 8, 0, k));
  const ref::StepResult step = ref::grpo_step(shape, o, weights);

  // The rollout, with its pages and its scheduler.
  World w(table_ref, c, DType::f64);
  w.model.set_parameters(start);
  Arena kv("kv", *table_ref.memory, roomy(table_ref));
  Rollout rollout(w.model, {.max_sequences = 3, .max_batched_tokens = 7, .max_context = 20}, kv, w.activations);
  const auto completions = rollout.generate({{o.prompt, o.uids, static_cast<int>(o.max_tokens)}},
                                            {.temperature = 1, .key = o.sample_key, .eos = {o.eos}});
  std::vector<Trajectory> samples;
  std::set<size_t> lengths;
  for (size_t k = 0; k < completions.size(); k++) {
    Trajectory s;
    s.member = static_cast<int32_t>(k), s.uid = o.uids[k], s.prompt = o.prompt;
    s.tokens = completions[k].tokens, s.logprob = completions[k].logprobs;
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
  at = 0;
  for (size_t k = 0; k < samples.size(); k++)
    for (size_t t = 0; t < samples[k].tokens.size(); t++, at++) {
      const double logprob = step.responses[k].logprob[t];
      EXPECT_EQ(out.logprob[at], logprob) << "response " << k << ", token " << t;
      EXPECT_EQ(static_cast<float>(logprob), samples[k].logprob[t]);
    }
  std::vector<double> gradient, parameters;
  ref::StepWeights of_step = step.gradient;
  for (const auto* part : of_step.all()) gradient.insert(gradient.end(), part->data.begin(), part->data.end());
  expect_equal(learner.gradients(), gradient, "gradient");
  const double norm = learner.step({.lr = o.lr,
                                    .beta1 = o.beta1,
                                    .beta2 = o.beta2,
                                    .eps = o.adam_eps,
                                    .weight_decay = o.weight_decay,
                                    .max_norm = o.max_norm});
  EXPECT_EQ(norm, step.norm);
  EXPECT_GT(norm, o.max_norm) << "nothing was clipped";
  at = 0;
  for (const ParameterBlock& b : w.model.blocks) {
    std::vector<double> block(b.size());
    if (b.vector)
      w.device.download({block.data(), b.vector});
    else
      w.device.unpack_weight(
          {make_tensor(block.data(), DType::f64, {b.weight.outputs(), b.weight.inputs()}), b.weight, 0});
    parameters.insert(parameters.end(), block.begin(), block.end());
  }
  std::vector<double> after;
  for (const auto* part : weights.all()) after.insert(after.end(), part->data.begin(), part->data.end());
  expect_equal(parameters, after, "parameters");
}

}  // namespace
}  // namespace pare::test
