// DistillSparse: two learners on the samples of one step, the dense policy and the block-sparse one with adapters.
#include "base/json_file.h"
#include "model/hf/peft.h"
#include "rl/corrections.h"
#include "rl/distill.h"
#include "run/checkpoint.h"
#include "run/sft_training.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

// Rows read fewer blocks than there are, in the second layer.
const Keys kDistill = {"distill.enable=true",        "model.lora.rank=3",         "model.lora.alpha=6",
                       "rollout.kv.method=quest",    "rollout.kv.blocks.size=4",  "rollout.kv.blocks.count=3",
                       "rollout.kv.blocks.last=1",   "rollout.kv.blocks.first=0", "rollout.kv.blocks.dense_layers=1",
                       "actor.optim.weight_decay=0", "distill.lambda=0.1",        "distill.lr_scale_factor=1"};
const Keys kRoomy = {"rollout.kv.blocks.count=100"};
// About half of the responses is rejected: theta is far from the sampler.
const Keys kVeto = {"algorithm.rollout_correction.veto=0.5", "algorithm.rollout_correction.rollout_is=tis"};

Config distill_run(const Keys& more = {}) { return tiny_run("qwen3", kDistill + more); }

// Everything of a run that a step changes.
struct Weights {
  explicit Weights(const TrainingRun& run)
      : theta(run.session.model->get_parameters()), phi(run.session.adapters->get_parameters()) {}
  std::vector<float> theta, phi;
};

Weights trained_both(const Config& config, int steps) {
  TrainingRun run(config);
  for (int i = 0; i < steps; i++) run.step();
  return Weights(run);
}

TEST(Distill, TheSamplerIsTheSparseLearner) {
  for (const char* method : {"quest", "block_topk"})
    for (const Keys& keys : {Keys{}, Keys{"rollout.kv.blocks.dense_layers=0", "actor.ppo_max_token_len=1"}, kVeto,
                             Keys{"actor.token_subset=rpc", "actor.rpc_min_tokens=9"},
                             Keys{"algorithm.obrs.enable=true", "algorithm.obrs.state_weight=z"},
                             Keys{"model.enable_gradient_checkpointing=true"}}) {
      SCOPED_TRACE(cat(method, ' ', testing::PrintToString(keys)));
      TrainingRun run(distill_run(Keys{cat("rollout.kv.method=", method)} + keys));
      for (int i = 0; i < 3; i++) {  // phi is 0 in the first
        const Metrics m = run.step();
        EXPECT_GT(m.get("exact/checked_tokens"), 100);
        EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
        EXPECT_EQ(m.get("distill/pg_clipfrac"), 0);
        EXPECT_GT(m.get("distill/grad_norm"), 0);
      }
    }
}

// What makes the test above one: neither the dense learner nor the sparse one without adapters agrees.
TEST(Distill, OtherLearnersDisagree) {
  TrainingRun run(distill_run());
  run.step();
  run.step();
  const Weights before(run);
  run.step();
  run.session.model->set_parameters(before.theta);
  run.session.adapters->set_parameters(before.phi);
  const auto differ = [&](const Model& model, const LearnerOptions& options) {
    const std::vector<Trajectory>& samples = run.trainer->samples();
    const TokenOuts out = Learner::logprobs(model, run.session.activations, response_groups(samples), 1, options);
    int64_t different = 0;
    for (size_t i = 0; i < samples.size(); i++)
      for (size_t t = 0; t < samples[i].tokens.size(); t++)
        different += static_cast<float>(out.of(out.logprob, i)[t]) != samples[i].logprob[t];
    return different;
  };
  EXPECT_EQ(differ(*run.session.sparse, run.session.student_options()), 0);
  EXPECT_GT(differ(*run.session.sparse, run.session.learner_options()), 300);
  EXPECT_GT(differ(*run.session.model, run.session.student_options()), 300);
}

TEST(Distill, TheSamplerIsTheSparseLearnerOnEmu) {
  const Config c = distill_run({"trainer.device=emu", "data.train_batch_size=2", "rollout.n=3",
                                "data.max_response_length=30", "distill.kl_type=exact_forward"});
  TrainingRun run(c, digits, table_emu);
  for (int i = 0; i < 2; i++) {
    const Metrics m = run.step();
    EXPECT_GT(m.get("exact/checked_tokens"), 50);
    EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
    EXPECT_GT(m.get("distill/kl"), 0);
  }
}

// Both learners add their gradients shard by shard.
TEST(Distill, ShardsChangeRoundingsAlone) {
  TrainingRun one(distill_run()), three(distill_run({"learner.shards=3"}));
  const Metrics a = one.step(), b = three.step();
  for (const char* norm : {"actor/grad_norm", "distill/grad_norm"}) {
    EXPECT_GT(a.get(norm), 0) << norm;
    EXPECT_NEAR(a.get(norm), b.get(norm), 1e-4 * a.get(norm)) << norm;
  }
  for (const char* name : {"tokens/trained", "tokens/distilled", "exact/checked_tokens"})
    EXPECT_EQ(a.get(name), b.get(name)) << name;
  EXPECT_EQ(b.get("exact/mismatch_tokens"), 0);
  const Weights p(one), q(three);
  EXPECT_FALSE(same_bits(p.theta, q.theta));
  EXPECT_FALSE(same_bits(p.phi, q.phi));
}

// The preset, with a correction for theta.
TEST(Distill, ThePresetTrains) {
  const std::string path = testing::TempDir() + cat("pare_distill_", getpid(), ".toml");
  std::ofstream(path) << to_toml(tiny_run("qwen3", {kDistill.begin() + 3, kDistill.begin() + 9}));
  for (const char* correction : {"sparse-rl", "jackpot", "naive-sparse"}) {
    TrainingRun run(load_config({path, "distill-sparse", correction, "algorithm.rollout_correction.veto=0.04"}));
    EXPECT_EQ(run.session.adapters->spec.rank, 32);
    for (int i = 0; i < 2; i++) {
      const Metrics m = run.step();
      for (const auto& [name, value] : m.all()) EXPECT_TRUE(std::isfinite(value)) << name << " in step " << i;
      EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
      EXPECT_GT(m.get("distill/kl"), 0);
      EXPECT_GT(m.get("flops/distill"), m.get("flops/learner"));
    }
  }
  fs::remove(path);
}

// Fresh adapters are none: the first rollout is that of the model alone, and what theta does with it too.
TEST(Distill, FreshAdaptersChangeNoBit) {
  TrainingRun with(distill_run());
  const Config plain = tiny_run("qwen3", kDistill + Keys{"distill.enable=false", "model.lora.rank=0"});
  TrainingRun without(plain);
  const Metrics a = with.step(), b = without.step();
  EXPECT_EQ(a.text("certificate"), b.text("certificate"));
  EXPECT_TRUE(same_bits(with.parameters(), without.parameters()));
  for (const char* name : {"actor/grad_norm", "actor/pg_loss", "rollout_corr/kl"}) EXPECT_EQ(a.get(name), b.get(name));
  EXPECT_EQ(a.get("flops/rollout") > b.get("flops/rollout"), true);
}

// A never sees phi, nor B theta: with no rate of its own the other stays as it is.
TEST(Distill, EachPhaseLeavesTheOtherAlone) {
  for (const char* order : {"before", "after"}) {
    const Weights start{TrainingRun(distill_run())};
    // Phase B alone: no sample has an advantage, the KL has a gradient.
    TrainingRun b(distill_run({cat("distill.order=", order)}), [](const Problem&, const Response&) { return 1.0; });
    b.step();
    const Weights after_b(b);
    EXPECT_TRUE(same_bits(after_b.theta, start.theta)) << order;
    EXPECT_FALSE(same_bits(after_b.phi, start.phi)) << order;
    // Phase A alone: whatever B is told.
    const Weights one(trained_both(distill_run({cat("distill.order=", order)}), 1)),
        other(trained_both(distill_run({cat("distill.order=", order), "distill.lambda=3", "distill.lr_scale_factor=7",
                                        "distill.grad_clip=0.01"}),
                           1));
    EXPECT_TRUE(same_bits(one.theta, other.theta)) << order;
    EXPECT_FALSE(same_bits(one.phi, other.phi)) << order;
    EXPECT_FALSE(same_bits(one.theta, start.theta)) << order;
  }
}

// After theta's step phi's gradient is another; theta's is the same, and sampler and student are not to be compared.
TEST(Distill, TheOrderIsThatOfTheStudentsGradient) {
  const Weights before = trained_both(distill_run({"distill.order=before"}), 1),
                after = trained_both(distill_run({"distill.order=after"}), 1);
  EXPECT_TRUE(same_bits(before.theta, after.theta));
  EXPECT_FALSE(same_bits(before.phi, after.phi));
  TrainingRun run(distill_run({"distill.order=after"}));
  const Metrics m = run.step();
  EXPECT_EQ(m.get("exact/checked_tokens"), 0);
  EXPECT_GT(m.get("distill/pg_clipfrac"), 0);
}

// Where the sampler reads everything and phi is 0, student and teacher are one.
TEST(Distill, WithinTheBudgetTheKlIsZero) {
  for (const char* kl : {"k2", "k3", "exact_reverse", "exact_forward"}) {
    TrainingRun run(distill_run(kRoomy + Keys{cat("distill.kl_type=", kl)}),
                    [](const Problem&, const Response&) { return 1.0; });  // no advantage
    const Weights start(run);
    const Metrics m = run.step();
    EXPECT_EQ(m.get("distill/kl"), 0) << kl;
    EXPECT_EQ(m.get("distill/grad_norm"), 0) << kl;
    EXPECT_GT(m.get("exact/checked_tokens"), 0) << kl;
    EXPECT_TRUE(same_bits(Weights(run).phi, start.phi)) << kl;
    TrainingRun sparse(distill_run({cat("distill.kl_type=", kl)}), [](const Problem&, const Response&) { return 1.0; });
    const Metrics s = sparse.step();
    EXPECT_GT(s.get("distill/kl"), 0) << kl;
    EXPECT_GT(s.get("distill/grad_norm"), 0) << kl;
  }
}

// Without lambda phi's loss is the policy loss of its own samples, rejected ones too, and its ratios are 1.
TEST(Distill, TheStudentTakesWhatTheTeacherRejects) {
  const Config config = distill_run(kVeto);
  TrainingRun run(config);
  run.step();  // phi is not 0
  const Weights before(run);
  const Metrics m = run.step();
  const std::vector<Trajectory> samples = run.trainer->samples();
  int64_t rejected = 0, tokens = 0, kept = 0;
  for (const Trajectory& s : samples) {
    rejected += s.ruling == Ruling::rejected;
    tokens += std::ssize(s.tokens);
    kept += s.dropped() ? 0 : std::ssize(s.tokens);
  }
  ASSERT_GT(rejected, 0);
  ASSERT_GT(kept, 0);
  EXPECT_EQ(m.get("tokens/loss"), static_cast<double>(kept));
  EXPECT_EQ(m.get("exact/checked_tokens"), static_cast<double>(tokens));

  // T of all of them is the dense policy's before the step, whether A trained on a sample or not.
  Session& s = run.session;
  s.model->set_parameters(before.theta);
  s.adapters->set_parameters(before.phi);
  std::vector<TokenPlan> plans;
  for (const Trajectory& t : samples) plans.push_back(full_plan(std::ssize(t.tokens)));
  const auto logprobs = [&](const std::vector<Group>& groups) {
    return Learner::logprobs(*s.model, s.activations, groups, 1, s.learner_options());
  };
  const Update dense = make_update(config.actor, 50, samples, plans);
  const TokenOuts teacher = logprobs(dense.groups), all = logprobs(response_groups(samples));
  for (const bool first : {true, false}) {
    int64_t asked = 0;
    const Update u = student_update(config.actor, config.distill, 50, samples, plans, dense, teacher, first,
                                    [&](const std::vector<Group>& groups) {
                                      for (const Group& g : groups) asked += std::ssize(g.members);
                                      return logprobs(groups);
                                    });
    EXPECT_EQ(asked, first ? 0 : rejected);
    ASSERT_EQ(std::ssize(u.terms.weight), tokens);
    for (size_t r = 0; r < u.terms.weight.size(); r++) {
      EXPECT_EQ(u.terms.ref_logprob[r], all.logprob[r]) << r;
      EXPECT_EQ(u.terms.old_logprob[r], u.sampler_logprob[r]);
      EXPECT_EQ(u.terms.weight[r], u.terms.kl_weight[r]);
      EXPECT_NEAR(u.terms.weight[r], 1 / static_cast<double>(tokens), 1e-12);  // token-mean, over all
    }
  }
  // The loss computes a KL of whole distributions itself.
  for (const DistillKl kl : {DistillKl::exact_reverse, DistillKl::exact_forward}) {
    DistillKeys exact = config.distill;
    exact.kl_type = kl;
    student_update(config.actor, exact, 50, samples, plans, dense, teacher, false,
                   [](const std::vector<Group>&) -> TokenOuts { throw std::logic_error("T is not needed"); });
  }
}

// The gradient of each KL by phi, through the sparse student, by central differences in double: theta and T stay.
TEST(Distill, GradientsAreThoseOfTheLoss) {
  const ModelConfig c = tiny_config("qwen3", true);
  const LoraSpec lora{.rank = 3, .alpha = 6};
  auto groups = random_groups(c, 8);
  groups.resize(1);
  const BlockReads reads = block_reads(distill_run().rollout.kv);
  World w(table_ref, c, DType::f64);
  Adapters adapters(c, lora, w.device, w.weights, DType::f64, true);
  w.model.set_parameters(tiny_parameters(c, 7));
  Model sparse(w.model);
  sparse.adapters = &adapters;
  std::vector<double> values(static_cast<size_t>(adapters.size()));
  Rng rng(rng_key(3, RngStream::test, 9));
  for (double& v : values) v = 0.2 * rng.normal();
  upload_parameters(adapters, values);
  Learner learner(sparse, w.gradients, w.optimizer, w.activations,
                  {.max_rows = 30, .blocks = reads, .dense_reference = true});
  const TokenOuts dense = Learner::logprobs(w.model, w.activations, groups, 1, {}),
                  own = Learner::logprobs(sparse, w.activations, groups, 1, {.blocks = reads});
  TokenTerms terms = random_terms(groups);
  terms.ref_logprob = dense.logprob;
  terms.old_logprob = own.logprob;
  ActorKeys actor;
  actor.clip_ratio_low = actor.clip_ratio_high = 50;
  for (const DistillKl type : {DistillKl::k2, DistillKl::k3, DistillKl::exact_reverse, DistillKl::exact_forward}) {
    const LossSpec spec = student_loss_spec(actor, {.kl_type = type, .lambda = 0.7}, 1);
    const Model* const teacher = is_exact(spec.kl) ? &w.model : nullptr;
    learner.drop_gradients();
    learner.accumulate(groups, terms, spec, {teacher});
    const std::vector<double> gradient = learner.gradients();
    const auto loss = [&] {
      upload_parameters(adapters, values);
      const TokenOuts out = learner.accumulate(groups, terms, spec, {teacher});
      double sum = 0;
      for (size_t r = 0; r < out.loss.size(); r++)
        sum += terms.weight[r] * out.loss[r] + terms.kl_weight[r] * double(spec.kl_coef) * out.kl[r];
      return sum;
    };
    double largest = 0;
    for (const Parameter& t : adapters.layout)
      for (const int64_t i : {t.offset + t.size / 2}) {
        const double numeric = slope(values[i], loss);
        EXPECT_NEAR(gradient[i], numeric, 1e-7 + 1e-5 * std::abs(numeric)) << t.name << ' ' << static_cast<int>(type);
        largest = std::max(largest, std::abs(numeric));
      }
    EXPECT_GT(largest, 1e-3) << static_cast<int>(type);
    upload_parameters(adapters, values);
  }
}

// A whole step, A and B, by torch autograd and PEFT in double (tools/make_golden_distill.py): theta's update by its own
// samples, phi's by all of them, for each KL; to a thousandth of what the update moves.
TEST(Distill, AStepIsThatOfTorchAndPeft) {
  const std::string folder = "tests/golden/distill/";
  const nlohmann::json golden = read_json_file(folder + "golden.json"), h = golden["hyper"];
  const ModelConfig c = load_model_config("tests/golden/qwen3");
  Config config = distill_run({cat("rollout.kv.blocks.size=", h["block"]), cat("rollout.kv.blocks.count=", h["blocks"]),
                               cat("rollout.kv.blocks.dense_layers=", h["dense_layers"])});
  ActorKeys& actor = config.actor;
  actor.optim.betas = h["betas"].get<std::vector<double>>();
  actor.optim.eps = h["eps"];
  actor.optim.weight_decay = h["weight_decay"];
  actor.grad_clip = h["grad_clip"];
  RolloutCorrectionKeys correction;
  correction.veto = h["veto"];
  correction.rollout_is = RolloutIs::tis;
  correction.rollout_is_threshold = h["cap"];

  std::vector<Trajectory> samples;
  std::vector<TokenPlan> plans;
  for (const auto& j : golden["samples"]) {
    Trajectory& s = samples.emplace_back();
    s.group = j["group"];
    s.advantage = j["advantage"];
    s.prompt = j["prompt"].get<std::vector<int32_t>>();
    s.tokens = j["tokens"].get<std::vector<int32_t>>();
    s.logprob = j["sampler"].get<std::vector<float>>();
    s.old_logprob = j["dense"].get<std::vector<float>>();
    plans.push_back(full_plan(std::ssize(s.tokens)));
  }
  judge(correction, samples);
  set_corrections(correction, samples);
  for (size_t i = 0; i < samples.size(); i++)
    EXPECT_EQ(samples[i].ruling == Ruling::rejected, golden["samples"][i]["rejected"].get<bool>());

  const auto relative = [](const std::vector<float>& now, const std::vector<float>& before, const SafetensorsFile& file,
                           const std::string& name, int64_t offset, double scale) {
    const SafetensorsTensor* t = file.find(name);
    EXPECT_NE(t, nullptr) << name;
    if (!t) return;
    std::vector<float> want(static_cast<size_t>(t->size()));
    file.read_f32(*t, want.data(), 0, t->size());
    double apart = 0, norm = 0;
    for (size_t i = 0; i < want.size(); i++) {
      const double got = (double(now[offset + i]) - before[offset + i]) / scale;
      apart += (got - want[i]) * (got - want[i]);
      norm += double(want[i]) * want[i];
    }
    EXPECT_GT(norm, 0) << name;
    EXPECT_LT(std::sqrt(apart), 1e-3 * std::sqrt(norm)) << name;
  };
  const SafetensorsFile theta_file(folder + "theta.safetensors"), phi_file(folder + "phi.safetensors");
  const std::pair<DistillKl, std::string> kinds[] = {{DistillKl::k2, "k2"},
                                                     {DistillKl::k3, "k3"},
                                                     {DistillKl::exact_reverse, "exact_reverse"},
                                                     {DistillKl::exact_forward, "exact_forward"}};
  for (const auto& [kl_type, kl_name] : kinds) {
    DistillKeys d{.enable = true, .kl_type = kl_type, .lambda = h["kl_coef"], .grad_clip = h["student_clip"]};
    d.lr_scale_factor = h["lr_scale_factor"];
    World w(table_cpu, c);
    w.model.set_parameters(load_weights("tests/golden/qwen3", c));
    const LoraSpec spec = load_adapter_config(folder + "adapter");
    Adapters adapters(c, spec, w.device, w.weights, DType::f32, true);
    adapters.set_parameters(adapter_weights(folder + "adapter", c));
    Model sparse(w.model);
    sparse.adapters = &adapters;
    LearnerOptions reads{.max_rows = 60, .blocks = block_reads(config.rollout.kv), .dense_reference = true};
    Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.max_rows = 60}),
        student(sparse, w.gradients, w.optimizer, w.activations, reads);
    const std::vector<float> theta = w.model.get_parameters(), phi = adapters.get_parameters();

    Update u = make_update(actor, 50, samples, plans);
    u.terms.old_logprob.assign(u.terms.old_logprob.size(), std::numeric_limits<double>::quiet_NaN());
    const TokenOuts out = learner.accumulate(u.groups, u.terms, loss_spec(actor, 1));
    const Update v = student_update(actor, d, 50, samples, plans, u, out, true, {});
    const LossSpec student_spec = student_loss_spec(actor, d, 1);
    const TokenOuts own =
        student.accumulate(v.groups, v.terms, student_spec, {is_exact(student_spec.kl) ? &w.model : nullptr});
    for (size_t r = 0; r < own.logprob.size(); r++) EXPECT_NEAR(own.logprob[r], v.sampler_logprob[r], 2e-5) << r;
    const double lr = h["lr"];
    EXPECT_NEAR(learner.step(optimizer_options(actor, lr, 1)), golden["norms"]["theta"].get<double>(), 1e-4);
    AdamWOptions options = optimizer_options(actor, lr * d.lr_scale_factor, 1);
    options.max_norm = d.grad_clip;
    EXPECT_NEAR(student.step(options), golden["norms"][kl_name].get<double>(), 1e-4) << kl_name;

    const std::vector<float> theta_now = w.model.get_parameters(), phi_now = adapters.get_parameters();
    for (const Parameter& p : w.model.layout) relative(theta_now, theta, theta_file, p.name, p.offset, 1);
    for (const Parameter& p : adapters.layout)
      relative(phi_now, phi, phi_file, kl_name + "." + peft_name(p), p.offset,
               p.name.ends_with("lora_B.weight") ? spec.scale() : 1);
  }
}

// The exact KLs are of the sparse student to the dense teacher, whatever it reads itself.
TEST(Distill, TheTeacherReadsEverything) {
  const ModelConfig c = tiny_config("qwen3", true);
  auto groups = random_groups(c, 8);
  const BlockReads reads = block_reads(distill_run().rollout.kv);
  World w(table_cpu, c);
  w.model.set_parameters(tiny_parameters(c, 7));
  const auto kl = [&](bool dense) {
    Learner learner(w.model, w.gradients, w.optimizer, w.activations,
                    {.max_rows = 90, .blocks = reads, .dense_reference = dense});
    double sum = 0;
    const LossSpec spec{.policy = PolicyLoss::ppo, .kl = KlLoss::exact, .kl_coef = 1};
    for (const double x : learner.accumulate(groups, random_terms(groups), spec, {&w.model}).kl) sum += x;
    return sum;
  };
  EXPECT_EQ(kl(false), 0);
  EXPECT_GT(kl(true), 0.01);
}

TEST(Distill, SplitsThreadsAndRecomputationChangeNothing) {
  for (const Keys& keys : {kVeto + Keys{"actor.ppo_mini_batch_size=3"}, Keys{"distill.kl_type=exact_reverse"},
                           Keys{"distill.order=after", "actor.token_subset=rpc"}}) {
    SCOPED_TRACE(testing::PrintToString(keys));
    const auto run = [&](const Keys& more) { return trained_both(distill_run(keys + more), 2); };
    const Weights plain = run({"actor.ppo_max_token_len=100000"});
    for (const Keys& more : {Keys{"actor.ppo_max_token_len=1"},
                             Keys{"actor.ppo_max_token_len=77", "actor.logits_chunk=13", "trainer.threads=2"},
                             Keys{"actor.ppo_max_token_len=150", "model.enable_gradient_checkpointing=true"},
                             Keys{"rollout.max_num_seqs=7", "rollout.max_num_batched_tokens=7"}}) {
      const Weights other = run(more);
      EXPECT_TRUE(same_bits(other.theta, plain.theta)) << testing::PrintToString(more);
      EXPECT_TRUE(same_bits(other.phi, plain.phi)) << testing::PrintToString(more);
    }
  }
}

TEST(Distill, NAndNStepsAreTwoN) {
  const std::string folder = cat(testing::TempDir(), "pare_distill_", getpid());
  for (const Keys& keys : {kVeto, Keys{"actor.optim.moments=bf16", "actor.use_kl_loss=true", "distill.order=after"}}) {
    const Config config = distill_run(keys);
    const Weights whole = trained_both(config, 4);
    TrainingRun half(config);
    half.step();
    half.step();
    RunState state;
    state.training = half.trainer->state();
    EXPECT_EQ(state.training.student_updates, 2);
    save_checkpoint(folder, half.session, *half.trainer, state);
    EXPECT_EQ(checkpoint_damage(folder), "");
    TrainingRun resumed(config);
    const RunState found = load_checkpoint(folder, resumed.session, *resumed.trainer);
    EXPECT_EQ(found.training, state.training);
    resumed.step();
    resumed.step();
    EXPECT_TRUE(same_bits(Weights(resumed).theta, whole.theta));
    EXPECT_TRUE(same_bits(Weights(resumed).phi, whole.phi));
    // One flipped bit of the adapters is noticed.
    const std::string file = folder + "/adapter/adapter_model.safetensors";
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(-1, std::ios::end);
    const char last = static_cast<char>(bytes.get());
    bytes.seekp(-1, std::ios::end);
    bytes.put(static_cast<char>(last ^ 4));
    bytes.close();
    EXPECT_NE(checkpoint_damage(folder).find("adapter_model.safetensors is damaged"), std::string::npos);
    fs::remove_all(folder);
  }
}

// model/ is theta, and model/adapter/ what made a sampler of it.
TEST(Distill, TheModelIsSavedWithItsSampler) {
  const std::string folder = cat(testing::TempDir(), "pare_distill_model_", getpid());
  TrainingRun run(distill_run());
  run.step();
  run.step();
  for (int i = 0; i < 2; i++) save_model(folder, run.session);  // in place of itself too
  const ModelConfig& c = run.session.model_config;
  const Config config = load_config({"model.path=" + folder, "model.lora.adapter_path=" + folder + "/adapter",
                                     "data.max_prompt_length=90", "data.max_response_length=50"});
  Session again(config, table_cpu, false);
  EXPECT_TRUE(same_bits(again.model->get_parameters(), run.parameters()));
  const std::vector<float> a = again.adapters->get_parameters(), b = run.session.adapters->get_parameters();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); i++) EXPECT_NEAR(a[i], b[i], 2e-7 * std::abs(b[i]));

  // Merged, it samples as theta and phi do but for roundings.
  const std::vector<Group> groups = response_groups(run.trainer->samples());
  const auto logprobs = [&](const Model& model) {
    return Learner::logprobs(model, run.session.activations, groups, 1, run.session.student_options()).logprob;
  };
  const auto separate = logprobs(*run.session.sparse), theta_only = logprobs(*run.session.model);
  Arena memory("merged", host_memory);
  Model merged(c, run.session.device, memory, DType::f32, false);
  merged.set_parameters(merged_weights(hf_weights(folder, c), folder + "/adapter", c));
  const auto together = logprobs(merged);
  double moved = 0;
  for (size_t i = 0; i < separate.size(); i++) {
    EXPECT_NEAR(together[i], separate[i], 2e-4);
    moved = std::max(moved, std::abs(theta_only[i] - separate[i]));
  }
  EXPECT_GT(moved, 1e-2);
  fs::remove_all(folder);
}

TEST(Distill, APlanIsTheWorstStepToTheByte) {
  for (const Keys& keys :
       {Keys{}, Keys{"distill.kl_type=exact_reverse", "actor.ppo_max_token_len=90"},
        Keys{"distill.kl_type=exact_forward", "distill.lambda=0", "actor.use_kl_loss=true", "actor.kl_loss_type=exact"},
        Keys{"model.enable_gradient_checkpointing=true", "actor.optim.moments=bf16", "actor.ppo_mini_batch_size=2"}}) {
    const Config c = distill_run(keys);
    const Plan plan = plan_step(c);
    Session session(c);
    GrpoTraining training(session);
    training.worst_case_step();
    SCOPED_TRACE(testing::PrintToString(keys));
    const auto arenas = session.arenas();
    for (size_t i = 0; i < arenas.size(); i++) EXPECT_EQ(plan.memory[i].peak, arenas[i]->peak()) << arenas[i]->name();
    EXPECT_EQ(plan.ledger.phases, session.ledger.phases);
    EXPECT_GT(plan.ledger.phases.at("distill").at("linear_bwd_weight").cost.flops, 0);
  }
}

// Of the adapters alone weights have gradients: two thirds of the FLOPs of the policy's backward, and what they add.
TEST(Distill, TheFrozenModelHasNoGradients) {
  const Config c = distill_run({"algorithm.rollout_correction.veto=0"});
  TrainingRun run(c);
  run.step();
  auto& phases = run.session.ledger.phases;
  auto &dense = phases.at("learner"), &student = phases.at("distill");
  EXPECT_LT(student["linear_bwd_weight"].cost.flops, dense["linear_bwd_weight"].cost.flops / 2);
  EXPECT_GT(student["linear_bwd_input"].cost.flops, dense["linear_bwd_input"].cost.flops);
  EXPECT_EQ(student.count("embedding_bwd"), 0u);
}

// Validation without blocks is of theta alone.
TEST(Distill, DenseValidationIsWithoutAdapters) {
  TrainingRun run(distill_run({"rollout.val_kwargs.kv=both", "rollout.val_kwargs.temperature=1"}));
  run.step();
  run.step();
  std::vector<Request> requests = {{{5, 6, 7, 8, 9, 10, 11, 12, 13}, {1, 2}, 30}};
  const auto draw = [&](const Model& model, const Model* dense, bool as_dense) {
    Arena kv("kv", host_memory);
    Rollout rollout(model, run.session.rollout_limits(), kv, run.session.activations, dense);
    Sampling sampling;
    sampling.dense = as_dense;
    return rollout.generate(requests, sampling)[0].logprobs;
  };
  const Model &theta = *run.session.model, &both = *run.session.sparse;
  EXPECT_EQ(draw(both, &theta, true), draw(theta, nullptr, true));
  EXPECT_EQ(draw(both, &theta, false), draw(both, nullptr, false));
  EXPECT_NE(draw(both, &theta, true), draw(both, nullptr, true));
}

TEST(Distill, RefusesWhatItCannotDo) {
  const auto message = [](const Keys& keys) -> std::string {
    try {
      distill_run(keys);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  const auto refused = [&](const Keys& keys, const std::string& part) {
    EXPECT_NE(message(keys).find(part), std::string::npos) << message(keys);
  };
  EXPECT_EQ(message({}), "");
  EXPECT_EQ(message({"rollout.check_exact=true"}), "");
  refused({"model.lora.rank=0"}, "set model.lora.rank");
  refused({"distill.order=after", "rollout.check_exact=true"}, "set rollout.check_exact=auto");
  refused({"rollout.kv.method=snapkv"}, "set rollout.kv.method=quest");
  refused({"rollout.kv.method=dense"}, "set rollout.kv.method=quest");
  refused({"learner.attention=replay"}, "set learner.attention=dense");
  refused({"distill.order=after", "distill.kl_type=exact_reverse"}, "set distill.order=before");
  refused({"trainer.device=cuda", "trainer.exact=false", "rollout.check_exact=true"}, "set rollout.check_exact=auto");
  refused({"actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean"}, "loss_mode=vanilla");
  Session session(distill_run());
  EXPECT_THROW(SftTraining{session}, Error);
}

}  // namespace
}  // namespace pare::test
