// Whole training steps: the sampler's log-probs are the learner's, no setting that divides the work changes a bit,
// every op is used, and the run-time check sees a wrong order of sums.
#include <cmath>
#include <set>

#include "ops/norm.h"
#include "ops/paged.h"
#include "rl/loss.h"
#include "run/sft_training.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

struct Outcome {
  std::vector<float> parameters;
  double shortest = 1e9, longest = 0;  // response
};

// Every step must check every token of every response, and find none different.
Outcome exact_steps(const Config& config, int steps) {
  TrainingRun run(config);
  Outcome o;
  for (int i = 0; i < steps; i++) {
    const Metrics m = run.step();
    double tokens = 0;
    for (const Trajectory& s : run.trainer->samples()) tokens += static_cast<double>(s.tokens.size());
    EXPECT_EQ(m.get("exact/mismatch_tokens"), 0) << "step " << i;
    EXPECT_EQ(m.get("exact/checked_tokens"), tokens) << "step " << i;
    EXPECT_EQ(m.get("tokens/loss"), tokens) << "step " << i;
    EXPECT_GT(m.get("actor/grad_norm"), 1e-3) << "nothing to learn in step " << i;
    o.shortest = std::min(o.shortest, m.get("response_length/min"));
    o.longest = std::max(o.longest, m.get("response_length/max"));
  }
  o.parameters = run.parameters();
  return o;
}

int64_t page_bytes(const std::string& type) { return KvCache::page_bytes(tiny_config(type, true), {}, DType::f32); }

class TrainingOf : public testing::TestWithParam<std::string> {};

// How the work is divided: each row must give the bits of the first.
std::vector<std::vector<std::string>> divisions(const std::string& type) {
  const auto pages = [&](int64_t n) { return cat("rollout.kv_cache_bytes=", n * page_bytes(type)); };
  return {{},
          {"trainer.threads=2"},
          {"rollout.max_num_seqs=1", "rollout.max_num_batched_tokens=1"},
          {"rollout.max_num_seqs=3", "rollout.max_num_batched_tokens=11", pages(14)},
          {"rollout.max_num_seqs=64", "rollout.max_num_batched_tokens=4096", pages(31), "trainer.threads=2"},
          {"actor.ppo_max_token_len=1"},
          {"actor.ppo_max_token_len=77", "actor.logits_chunk=13", "trainer.threads=2"},
          {"actor.ppo_max_token_len=100000", "model.enable_gradient_checkpointing=true"},
          {"rollout.max_num_seqs=7", "rollout.max_num_batched_tokens=7", "actor.ppo_max_token_len=150"}};
}

// Breaks if any op's sums depend on how many rows, pages or threads there are, if a micro-batch changes the order of
// the gradient's chains, or if a draw depends on the schedule.
TEST_P(TrainingOf, NoDivisionOfTheWorkChangesABit) {
  constexpr int steps = 3;
  Outcome first;
  for (const auto& division : divisions(GetParam())) {
    const Outcome o = exact_steps(tiny_run(GetParam(), division), steps);
    if (first.parameters.empty()) {
      first = o;
      EXPECT_LT(first.shortest, 25);
      EXPECT_EQ(first.longest, 50);
      EXPECT_FALSE(same_bits(first.parameters, TrainingRun(tiny_run(GetParam())).parameters()))
          << "nothing was learned";
    }
    EXPECT_TRUE(same_bits(o.parameters, first.parameters)) << testing::PrintToString(division);
  }
  EXPECT_TRUE(same_bits(exact_steps(tiny_run(GetParam()), steps).parameters, first.parameters)) << "run twice";
  EXPECT_FALSE(same_bits(exact_steps(tiny_run(GetParam(), {"trainer.seed=2"}), steps).parameters, first.parameters))
      << "the seed changes nothing";
}

// The learner divides by the temperature too, in the same way.
TEST_P(TrainingOf, TemperatureIsExactToo) {
  for (const char* t : {"0.7", "1.3"}) {
    const std::string key = cat("rollout.temperature=", t);
    const Outcome a = exact_steps(tiny_run(GetParam(), {key}), 2);
    const Outcome b =
        exact_steps(tiny_run(GetParam(), {key, "rollout.max_num_seqs=2", "actor.ppo_max_token_len=90"}), 2);
    EXPECT_TRUE(same_bits(a.parameters, b.parameters));
    EXPECT_FALSE(same_bits(a.parameters, exact_steps(tiny_run(GetParam()), 2).parameters));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, TrainingOf, testing::Values("qwen2", "qwen3", "llama"),
                         [](const auto& info) { return info.param; });

// The same with several updates per batch, a reference model, an entropy bonus and token subsets.
TEST(Training, NoDivisionChangesTheVariants) {
  const std::vector<std::vector<std::string>> variants = {
      {"actor.ppo_epochs=2", "actor.ppo_mini_batch_size=2", "actor.use_kl_loss=true", "actor.kl_loss_coef=0.1",
       "actor.entropy_coeff=0.01"},
      {"actor.use_kl_loss=true", "actor.kl_loss_type=exact", "actor.kl_loss_coef=0.1"},
      {"actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean", "actor.ppo_epochs=2"},
      {"actor.token_subset=rpc", "actor.rpc_min_tokens=4", "algorithm.use_kl_in_reward=true"},
      {"actor.token_subset=urs", "algorithm.filter_groups.enable=true", "actor.policy_loss.loss_mode=cispo"}};
  for (const auto& variant : variants) {
    std::vector<float> first;
    for (const auto& division :
         {std::vector<std::string>{},
          {"trainer.threads=2", "rollout.max_num_seqs=5", "actor.ppo_max_token_len=70", "actor.logits_chunk=33"},
          {"actor.ppo_max_token_len=1", "model.enable_gradient_checkpointing=true"}}) {
      auto keys = variant;
      keys.insert(keys.end(), division.begin(), division.end());
      TrainingRun run(tiny_run("qwen3", keys), early_digit);
      for (int i = 0; i < 2; i++) {
        const Metrics m = run.step();
        EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
        EXPECT_GT(m.get("exact/checked_tokens"), 50);
      }
      if (first.empty()) first = run.parameters();
      EXPECT_TRUE(same_bits(run.parameters(), first)) << testing::PrintToString(keys);
    }
  }
}

// ---- filters and numbers of updates --------------------------------------------------------------------------------

// Breaks if dropped rows count in no denominator, or if a row of advantage 0 leaves anything but zeros.
TEST(Training, DroppingRowsWithoutAdvantageChangesNoBit) {
  const auto run = [](std::vector<std::string> keys, bool filter, double* dropped = nullptr) {
    if (filter) keys.push_back("algorithm.adv_filter_threshold=1e-3");
    TrainingRun r(tiny_run("qwen3", keys), early_digit);
    double sum = 0;
    for (int i = 0; i < 3; i++) sum += r.step().get("filter/small_adv_fraction");
    if (dropped) *dropped = sum / 3;
    return r.parameters();
  };
  for (const char* mode : {"token-mean", "seq-mean-token-mean", "group-token-mean", "seq-mean-token-sum-norm"}) {
    const std::string key = cat("actor.loss_agg_mode=", mode);
    double dropped;
    const auto without = run({key}, false, &dropped);
    EXPECT_EQ(dropped, 0);
    EXPECT_TRUE(same_bits(run({key}, true, &dropped), without)) << mode;
    EXPECT_GT(dropped, 0.1);
    EXPECT_LT(dropped, 0.9);
  }
  // What has a gradient at advantage 0, and what counts kept samples only, does change.
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{"actor.use_kl_loss=true", "actor.kl_loss_coef=0.1"},
        {"actor.entropy_coeff=0.01"},
        {"actor.loss_denominator=kept", "actor.grad_clip=0"}})
    EXPECT_FALSE(same_bits(run(keys, true), run(keys, false))) << testing::PrintToString(keys);
}

TEST(Training, OneEpochOfOneMiniBatchIsThePolicyGradient) {
  const auto run = [](std::vector<std::string> keys) { return trained(tiny_run("qwen2", keys), 3); };
  const auto pg = run({});
  EXPECT_TRUE(same_bits(run({"actor.ppo_epochs=1"}), pg));
  EXPECT_TRUE(same_bits(run({"actor.ppo_mini_batch_size=6"}), pg));
  // Without a second update there is nothing to clip: no clip key matters.
  EXPECT_TRUE(same_bits(run({"actor.clip_ratio_low=0", "actor.clip_ratio_high=0"}), pg));
  const auto multi = run({"actor.ppo_epochs=2"}), mini = run({"actor.ppo_mini_batch_size=2"});
  EXPECT_FALSE(same_bits(multi, pg));
  EXPECT_FALSE(same_bits(mini, pg));
  EXPECT_FALSE(same_bits(mini, multi));
}

// "The ratio is 1 by definition" and "the ratio is computed from what the sampler logged" are the same gradient, since
// the log-probs are the same bits.  Breaks if one of them were off by a rounding.
TEST(Training, TheSamplersLogprobsGiveARatioOfOne) {
  TrainingRun run(tiny_run("qwen2", {"actor.optim.lr=0", "actor.clip_ratio_low=0", "actor.clip_ratio_high=0"}));
  run.step();
  Session& s = run.session;
  std::vector<Trajectory> samples = run.trainer->samples();
  std::vector<TokenPlan> plans;
  for (const Trajectory& t : samples) plans.push_back(full_plan(static_cast<int64_t>(t.tokens.size())));
  Arena own("a second learner's gradients", host_memory, 1 << 20), moments("its moments", host_memory, 1 << 20);
  Learner learner(*s.model, own, moments, s.activations, s.learner_options());
  const auto gradients = [&] {
    const Update u = make_update(s.config.actor, s.config.data.max_response_length, samples, plans);
    learner.accumulate(u.groups, u.terms, loss_spec(s.config.actor, s.config.rollout.temperature));
    const auto g = learner.gradients();
    learner.drop_gradients();
    return g;
  };
  for (Trajectory& t : samples) t.old_logprob.reset();
  const auto defined = gradients();
  for (Trajectory& t : samples) t.old_logprob = t.logprob;
  EXPECT_EQ(gradients(), defined);
  float& first = samples[0].old_logprob->front();
  first = std::nextafter(first, 0.f);
  EXPECT_NE(gradients(), defined) << "one last bit of one log-prob does not matter: nothing is tested";
}

TEST(Training, SftCallsTheOpsOfTheLearner) {
  Session session(tiny_run("qwen2"));
  SftTraining sft(session);
  sft.step();
  std::set<std::string> called;
  for (const auto& [op, line] : session.ledger.phases.at("learner")) called.insert(op);
  for (const char* op : {"attn_bwd", "adamw", "logits_loss", "embedding_bwd"}) EXPECT_TRUE(called.count(op)) << op;
}

// ---- the check is honest -------------------------------------------------------------------------------------------

// At the sizes of the quickstart the learner's products have many rows where decoding has few: equal bits are not those
// of one and the same call.  Breaks if the learner is fed a sequence or a short run at a time.
TEST(Training, TheLearnersProductsHaveManyRows) {
  const Config config =
      load_config({"quickstart", "model.path=", "model.config=data/presets/tiny-ssa.json",
                   "algorithm.adv_filter_threshold=0", "data.max_response_length=60", "rollout.max_num_seqs=12"});
  TrainingRun run(config);
  const Metrics m = run.step();
  EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
  EXPECT_GT(m.get("exact/checked_tokens"), 500);
  for (const char* op : {"linear_fwd", "linear_bwd_input", "linear_bwd_weight"})
    EXPECT_GE(run.session.ledger.phases.at("learner").at(op).min_rows, 64) << op;
  EXPECT_LT(run.session.ledger.phases.at("rollout").at("linear_fwd").min_rows, 16);
}

// One op with another order of sums, for calls with few rows only.

void linear_descending(const LinearFwd& a, Stream s) {
  table_cpu.linear_fwd(a, s);
  if (a.x.shape[0] > 8 || a.bias || a.residual) return;
  std::vector<float> w(static_cast<size_t>(a.w.size()));
  table_cpu.unpack_weight({make_tensor(w.data(), DType::f32, {a.w.outputs(), a.w.inputs()}), a.w, 0}, s);
  for (int64_t n = 0; n < a.x.shape[0]; n++)
    for (int64_t o = 0; o < a.w.outputs(); o++) {
      float sum = 0;
      for (int64_t k = a.w.inputs() - 1; k >= 0; k--)
        sum = std::fma(a.x.as<float>()[n * a.x.stride[0] + k], w[o * a.w.inputs() + k], sum);
      a.y.as<float>()[n * a.y.stride[0] + o] = sum;
    }
}

void rmsnorm_in_one_chain(const RmsnormFwd& a, Stream s) {
  if (a.x.shape[0] > 8) return table_cpu.rmsnorm_fwd(a, s);
  const int64_t width = a.x.shape[1];
  for (int64_t n = 0; n < a.x.shape[0]; n++) {
    const float* x = a.x.as<float>() + n * a.x.stride[0];
    float sum = 0;
    for (int64_t c = 0; c < width; c++) sum = std::fma(x[c], x[c], sum);
    const float rstd = 1 / std::sqrt(sum / static_cast<float>(width) + a.eps);
    a.rstd.as<float>()[n] = rstd;
    for (int64_t c = 0; c < width; c++) a.y.as<float>()[n * a.y.stride[0] + c] = x[c] * rstd * a.w.as<float>()[c];
  }
}

// Slots in descending order, two passes, for decoding rows.
void attention_descending(const AttnPaged& a, Stream stream) {
  table_cpu.attn_paged(a, stream);
  const int64_t H = a.q.shape[1], D = a.q.shape[2], K = a.k_pages.shape[1];
  for (int64_t i = 0; i < a.queries.shape[0]; i++) {
    const auto* run = a.queries.as<int32_t>() + 4 * i;
    if (run[1] != 1) continue;
    const int32_t* pages = a.page_table.as<int32_t>() + run[3] * a.page_table.stride[0];
    for (int64_t h = 0; h < H; h++) {
      const float* q = a.q.as<float>() + run[0] * a.q.stride[0] + h * D;
      std::vector<float> p(run[2]), o(D);
      float sum = 0, top = -INFINITY;
      for (int32_t s = 0; s < run[2]; s++) {
        const float* k = a.k_pages.as<float>() + (pages[s / 16] * K + h / (H / K)) * D * 16 + s % 16;
        for (int64_t d = 0; d < D; d++) p[s] = std::fma(q[d], k[d * 16], p[s]);
        top = std::max(top, p[s] *= a.scale);
      }
      for (int32_t s = run[2] - 1; s >= 0; s--) sum += p[s] = std::exp(p[s] - top);
      for (int32_t s = run[2] - 1; s >= 0; s--) {
        const float* v = a.v_pages.as<float>() + ((pages[s / 16] * K + h / (H / K)) * 16 + s % 16) * D;
        for (int64_t d = 0; d < D; d++) o[d] = std::fma(p[s], v[d], o[d]);
      }
      for (int64_t d = 0; d < D; d++) a.o.as<float>()[run[0] * a.o.stride[0] + h * D + d] = o[d] / sum;
    }
  }
}

TEST(Training, TheCheckSeesAnotherOrderOfSums) {
  const auto mismatches = [](const Table& table) {
    TrainingRun run(tiny_run("qwen3", {"rollout.max_num_seqs=4"}), digits, table);
    const Metrics m = run.step();
    EXPECT_GT(m.get("exact/checked_tokens"), 300);
    for (const Trajectory& s : run.trainer->samples())
      for (float lp : s.logprob) EXPECT_TRUE(lp <= 0 && lp > -20) << "a mutant is no summation order but an error";
    return m.get("exact/mismatch_tokens");
  };
  Table linear = table_cpu, norm = table_cpu, attention = table_cpu;
  EXPECT_EQ(mismatches(linear), 0);
  linear.linear_fwd = linear_descending;
  norm.rmsnorm_fwd = rmsnorm_in_one_chain;
  attention.attn_paged = attention_descending;
  EXPECT_GT(mismatches(linear), 0);
  EXPECT_GT(mismatches(norm), 0);
  EXPECT_GT(mismatches(attention), 0);
}

// A logit of a token that is hardly ever drawn has another bit, where a pass is one of the sampler's.
void linear_with_another_logit(const LinearFwd& a, Stream stream) {
  table_cpu.linear_fwd(a, stream);
  const bool logits = a.w.outputs() == 48, sampler = a.y.shape[0] <= 4;  // rollout.max_num_seqs
  if (!logits || !sampler) return;
  for (int64_t r = 0; r < a.y.shape[0]; r++) {
    float* const row = a.y.as<float>() + r * a.y.stride[0];
    *std::min_element(row, row + 48) *= 1 + 0x1p-23f;
  }
}

// The log-prob of the token that was drawn says little about the others.
TEST(Training, TheFullCheckSeesEveryLogit) {
  const auto share = [](const Table& table, bool full) {
    const Config config = tiny_run("qwen3", {"rollout.max_num_seqs=4", cat("exact.full=", full ? "true" : "false")});
    TrainingRun run(config, digits, table);
    const Metrics m = run.step();
    EXPECT_GT(m.get("exact/checked_tokens"), 300);
    return m.get("exact/mismatch_tokens") / m.get("exact/checked_tokens");
  };
  Table other = table_cpu;
  other.linear_fwd = linear_with_another_logit;
  EXPECT_EQ(share(table_cpu, true), 0);
  EXPECT_EQ(share(other, true), 1);
  EXPECT_LT(share(other, false), 0.5);
}

}  // namespace
}  // namespace pare::test
