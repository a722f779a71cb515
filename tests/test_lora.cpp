// Low-rank adapters: what they add, what of them is trained, and that the model beside them is left as it is.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/thread_pool.h"
#include "model/lora.h"
#include "tests/tiny.h"

namespace pare::test {
namespace {

LossSpec ppo() { return {.policy = PolicyLoss::ppo, .entropy_coef = 0.01f}; }

constexpr LoraSpec kAll{.rank = 5, .alpha = 20};
constexpr LoraSpec kSome{.rank = 19, .alpha = 7, .targets = {true, false, true, false, false, true, true}};

// B' too is not 0, so that every gradient matters.
std::vector<float> tiny_adapters(const Adapters& adapters, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(adapters.size()));
  Rng rng(rng_key(seed, RngStream::test, 3));
  for (const Parameter& p : adapters.layout)
    for (int64_t i = 0; i < p.size; i++)
      values[p.offset + i] = static_cast<float>(rng.normal() / std::sqrt(static_cast<double>(p.shape[1])) / 2);
  return values;
}

struct AdaptedWorld : World {
  AdaptedWorld(const Table& table, const ModelConfig& c, const LoraSpec& spec, DType dtype = DType::f32)
      : World(table, c, dtype), adapters(c, spec, device, weights, dtype, true) {
    model.adapters = &adapters;
    if (device.planning()) return;
    model.set_parameters(tiny_parameters(c, 7));
    adapters.set_parameters(tiny_adapters(adapters, 7));
  }
  Adapters adapters;
};

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Result {
  std::vector<double> gradients, logprobs;
};
Result run(const Table& table, const ModelConfig& c, const LoraSpec& spec, const LearnerOptions& options,
           DType dtype = DType::f32) {
  AdaptedWorld w(table, c, spec, dtype);
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, options);
  Result r;
  const auto groups = random_groups(c, 1);
  r.logprobs = learner.accumulate(groups, random_terms(groups), ppo()).logprob;
  r.gradients = learner.gradients();
  EXPECT_EQ(w.activations.used(), 0u);
  return r;
}

class LoraOf : public testing::TestWithParam<std::string> {
 protected:
  ModelConfig config() const { return tiny_config(GetParam(), GetParam() != "llama"); }
};

TEST_P(LoraOf, FreshAdaptersChangeNoBit) {
  const ModelConfig c = config();
  const auto groups = random_groups(c, 2);
  for (const auto& [table, dtype] : {std::pair{&table_cpu, DType::f32}, {&table_emu, DType::bf16}}) {
    AdaptedWorld w(*table, c, kAll, dtype);
    const auto logprobs = [&] { return Learner::logprobs(w.model, w.activations, groups, 1, {}).logprob; };
    EXPECT_NE(logprobs().size(), 0u);
    w.adapters.set_parameters(init_adapters(c, kAll, 1));
    const auto fresh = logprobs();
    w.model.adapters = nullptr;
    EXPECT_TRUE(same_bits(fresh, logprobs())) << table->name;
  }
}

TEST_P(LoraOf, NoDivisionOfTheWorkChangesABit) {
  const ModelConfig c = config();
  for (const LoraSpec& spec : {kAll, kSome}) {
    set_threads(1);
    const Result whole = run(table_cpu, c, spec, {.max_rows = 100000});
    set_threads(2);
    for (const int64_t rows : {1, 40, 101, 150})
      for (const bool recompute : {false, true}) {
        const Result cut = run(table_cpu, c, spec, {.max_rows = rows, .logits_chunk = 7, .recompute = recompute});
        EXPECT_TRUE(same_bits(cut.gradients, whole.gradients)) << rows << ' ' << recompute;
        EXPECT_TRUE(same_bits(cut.logprobs, whole.logprobs)) << rows << ' ' << recompute;
      }
    set_threads(0);
  }
}

TEST_P(LoraOf, TablesAgree) {
  const ModelConfig c = config();
  const Result ref = run(table_ref, c, kSome, {}, DType::f64), fast = run(table_cpu, c, kSome, {}),
               emu = run(table_emu, c, kSome, {}, DType::bf16);
  EXPECT_LT(relative_l2(fast.gradients, ref.gradients), 2e-5);
  EXPECT_LT(relative_l2(emu.gradients, ref.gradients), 0.05);
}

// W + B' A in place of W, in double.
TEST_P(LoraOf, AreTheMergedModel) {
  const ModelConfig c = config();
  const auto groups = random_groups(c, 3);
  AdaptedWorld w(table_ref, c, kAll, DType::f64);
  const auto adapted = Learner::logprobs(w.model, w.activations, groups, 1, {}).logprob;
  const std::vector<float> base = tiny_parameters(c, 7), ab = tiny_adapters(w.adapters, 7);
  std::vector<double> merged(base.begin(), base.end());
  for (size_t i = 0; i < w.adapters.layout.size(); i += 2) {
    const Parameter &a = w.adapters.layout[i], &b = w.adapters.layout[i + 1];
    const std::string name = a.name.substr(0, a.name.find(".lora_A")) + ".weight";
    for (const Parameter& p : w.model.layout)
      for (int64_t e = 0; p.name == name && e < p.size; e++)
        for (int64_t k = 0; k < kAll.rank; k++)
          merged[p.offset + e] +=
              double(ab[b.offset + e / p.shape[1] * kAll.rank + k]) * ab[a.offset + k * p.shape[1] + e % p.shape[1]];
  }
  w.model.adapters = nullptr;
  const auto plain = Learner::logprobs(w.model, w.activations, groups, 1, {}).logprob;
  upload_parameters(w.model, merged);
  const auto expected = Learner::logprobs(w.model, w.activations, groups, 1, {}).logprob;
  double moved = 0;
  for (size_t i = 0; i < expected.size(); i++) {
    EXPECT_NEAR(adapted[i], expected[i], 1e-10);
    moved = std::max(moved, std::abs(plain[i] - expected[i]));
  }
  EXPECT_GT(moved, 0.1);
}

// Central differences in double, through prefixes that are shared and carried.
TEST_P(LoraOf, GradientsAreThoseOfTheLoss) {
  const ModelConfig c = config();
  auto groups = random_groups(c, 8);
  groups.resize(2);
  TokenTerms terms = random_terms(groups);
  std::fill(terms.old_logprob.begin(), terms.old_logprob.end(), -3.5);
  const LossSpec spec{.policy = PolicyLoss::ppo, .clip_low = 50, .clip_high = 50};
  AdaptedWorld w(table_ref, c, kAll, DType::f64);
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.max_rows = 30, .recompute = true});
  learner.accumulate(groups, terms, spec);
  const std::vector<double> gradient = learner.gradients();
  ASSERT_EQ(static_cast<int64_t>(gradient.size()), w.adapters.size());

  const std::vector<float> start = tiny_adapters(w.adapters, 7);
  std::vector<double> values(start.begin(), start.end());
  const auto loss = [&] {
    upload_parameters(w.adapters, values);
    const TokenOuts out = learner.accumulate(groups, terms, spec);
    double sum = 0;
    for (size_t r = 0; r < out.loss.size(); r++) sum += terms.weight[r] * out.loss[r];
    return sum;
  };
  for (const Parameter& t : w.adapters.layout)
    for (const int64_t j : {t.size / 2}) {
      const int64_t i = t.offset + j;
      const double numeric = slope(values[i], loss);
      EXPECT_NEAR(gradient[i], numeric, 1e-7 + 1e-5 * std::abs(numeric)) << t.name << '[' << j << ']';
    }
}

TEST_P(LoraOf, TheModelBesideThemIsFrozen) {
  const ModelConfig c = config();
  AdaptedWorld w(table_cpu, c, kSome);
  const std::vector<float> base = w.model.get_parameters(), before = w.adapters.get_parameters();
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, {});
  const auto groups = random_groups(c, 4);
  for (int i = 0; i < 3; i++) {
    learner.accumulate(groups, random_terms(groups), ppo());
    learner.step({.lr = 1e-2});
  }
  EXPECT_TRUE(same_bits(w.model.get_parameters(), base));
  const std::vector<float> after = w.adapters.get_parameters();
  for (const Parameter& p : w.adapters.layout)
    for (int64_t i = 0; i < p.size; i++) EXPECT_NE(after[p.offset + i], before[p.offset + i]) << p.name;
}

INSTANTIATE_TEST_SUITE_P(Models, LoraOf, testing::Values("qwen2", "qwen3", "llama"),
                         [](const auto& info) { return info.param; });

// The step of B, alpha / r times, is that of B'; of weight decay there is no more.
TEST(Lora, AlphaScalesTheStepOfB) {
  const ModelConfig c = tiny_config("qwen3", true);
  constexpr double lr = 1e-3, decay = 0.5;
  const auto moved = [&](double alpha) {
    AdaptedWorld w(table_cpu, c, {.rank = 4, .alpha = alpha});
    const std::vector<float> before = w.adapters.get_parameters();
    Learner learner(w.model, w.gradients, w.optimizer, w.activations, {});
    const auto groups = random_groups(c, 4);
    learner.accumulate(groups, random_terms(groups), ppo());
    learner.step({.lr = lr, .weight_decay = decay});
    std::vector<double> by;
    const std::vector<float> after = w.adapters.get_parameters();
    for (size_t i = 0; i < after.size(); i++) by.push_back(after[i] - before[i] * (1 - lr * decay));
    return by;
  };
  const std::vector<double> one = moved(4), eight = moved(32);
  const std::vector<Parameter> layout = adapter_parameters(c, {.rank = 4});
  for (const Parameter& p : layout)
    for (int64_t i = p.offset; i < p.offset + p.size; i++)
      EXPECT_NEAR(eight[i], one[i] * (p.name.ends_with("lora_B.weight") ? 8 : 1), 1e-6) << p.name;
}

TEST(Lora, AIsUniformAndBZero) {
  const ModelConfig c = tiny_config("qwen2", true);
  const LoraSpec spec{.rank = 300};
  const ParameterReader read = init_adapters(c, spec, 3);
  const std::vector<Parameter> layout = adapter_parameters(c, spec);
  EXPECT_EQ(layout[0].name, "model.layers.0.self_attn.q_proj.lora_A.weight");
  EXPECT_EQ(layout.back().name, "model.layers.1.mlp.down_proj.lora_B.weight");
  for (size_t i = 0; i < layout.size(); i++) {
    std::vector<float> x(static_cast<size_t>(layout[i].size));
    read(i, 0, layout[i].size, x.data());
    const bool b = i % 2 == 1;
    const double bound = b ? 0 : 1 / std::sqrt(static_cast<double>(layout[i].shape[1]));
    double sum = 0, squares = 0;
    for (const float v : x) {
      EXPECT_LE(std::abs(v), bound + 1e-7);
      sum += v;
      squares += double(v) * v;
    }
    const auto n = static_cast<double>(x.size());
    EXPECT_NEAR(squares / n, bound * bound / 3, 0.05 * bound * bound);
    EXPECT_NEAR(sum / n, 0, 0.05 * bound);
  }
}

// Rows forward, and back to their inputs, through the model; beside it, r (I + O) multiply-adds a row and adapter
// forward and twice that backward.  Of the model itself no gradient is computed, and no memory is taken for one.
TEST(Lora, FlopsAndBytesAreTheClosedForms) {
  const ModelConfig c = tiny_config("qwen3", true);
  const auto groups = random_groups(c, 1);
  int64_t rows = 0, tokens = 0;
  for (const Group& g : groups) {
    rows += packed_rows(g);
    for (const Member& m : g.members) tokens += static_cast<int64_t>(m.tokens.size()) - g.prefix.empty();
  }
  const int64_t matrices = c.layers * (c.qkv_width() * c.hidden + c.hidden * c.q_width() + 3 * c.hidden * c.ffn);
  for (const LoraSpec& spec : {kAll, kSome}) {
    AdaptedWorld w(table_null, c, spec);
    Ledger ledger;
    Learner learner(w.model, w.gradients, w.optimizer, w.activations, {});
    w.device.ledger = &ledger;
    learner.accumulate(groups, random_terms(groups), ppo());
    auto& ops = ledger.phases.at("main");
    const int64_t base = 2 * (matrices * rows + c.vocab * c.hidden * tokens), adapters = 2 * w.adapters.size() * rows;
    EXPECT_EQ(ops["linear_fwd"].cost.flops, base + adapters);
    EXPECT_EQ(ops["linear_bwd_input"].cost.flops, base + adapters);
    EXPECT_EQ(ops["linear_bwd_weight"].cost.flops, adapters);
    EXPECT_EQ(ops.count("embedding_bwd"), 0u);
    const auto taken = [](const Arena& arena) {
      size_t bytes = 0;
      for (const Arena::Entry& e : arena.entries()) bytes += e.bytes;
      return bytes;
    };
    const auto rounded = [](int64_t n) { return (static_cast<size_t>(n) * 4 + 63) / 64 * 64; };
    EXPECT_EQ(taken(w.gradients), rounded(w.adapters.size()));
    EXPECT_EQ(taken(w.optimizer), 2 * rounded(w.adapters.size()) + rounded(1));
  }
}

TEST(Lora, TheNullTableKeepsTheSameBooks) {
  const ModelConfig c = tiny_config("qwen3", true);
  const auto books = [&](const Table& table) {
    AdaptedWorld w(table, c, kSome);
    Ledger ledger;
    w.device.ledger = &ledger;
    Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.max_rows = 150, .recompute = true});
    const auto groups = random_groups(c, 1);
    learner.accumulate(groups, random_terms(groups), ppo());
    learner.step({});
    return std::tuple(ledger.phases, w.weights.peak(), w.gradients.peak(), w.optimizer.peak(), w.activations.peak());
  };
  EXPECT_TRUE(books(table_cpu) == books(table_null));
}

}  // namespace
}  // namespace pare::test
