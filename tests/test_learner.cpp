// The learner's identities: packing, sharing, splitting and recomputation change nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/half.h"
#include "base/thread_pool.h"
#include "ops/optimizer.h"
#include "tests/tiny.h"

namespace pare::test {
namespace {

LossSpec ppo() { return {.policy = PolicyLoss::ppo, .entropy_coef = 0.01f}; }

struct Result {
  std::vector<double> gradients;
  TokenOuts out;
  size_t peak = 0;  // of activations, bytes
};

Result run(const Table& table, const ModelConfig& c, const std::vector<Group>& groups, const LearnerOptions& options,
           DType dtype = DType::f32, const LossSpec& spec = ppo()) {
  World w(table, c, dtype);
  w.model.set_parameters(tiny_parameters(c, 7));
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, options);
  Result r;
  r.out = learner.accumulate(groups, random_terms(groups), spec);
  r.gradients = learner.gradients();
  r.peak = w.activations.peak();
  EXPECT_EQ(w.activations.used(), 0u);
  return r;
}

void expect_same_bits(const Result& a, const Result& b, const char* what) {
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  EXPECT_EQ(0, std::memcmp(a.gradients.data(), b.gradients.data(), a.gradients.size() * sizeof(double))) << what;
  EXPECT_EQ(a.out.offsets, b.out.offsets) << what;
  EXPECT_EQ(a.out.logprob, b.out.logprob) << what;
  EXPECT_EQ(a.out.loss, b.out.loss) << what;
}

// plan() takes what the largest micro-batches take, and hardly more.  If prefix and member share a length, a cut group
// does not fill both of its batches at once.
TEST(Learner, ThePlannedBatchesAreTheLargest) {
  ModelConfig c = tiny_config("qwen3", true);
  c.layers = 4;
  const BlockReads reads{
      .kind = {}, .block = 4, .first_blocks = 0, .last_blocks = 1, .dense_layers = 0, .budget = [](int64_t n) {
        return std::min<int64_t>(n, 2);
      }};
  const auto tokens = [](int64_t n) { return std::vector<int32_t>(static_cast<size_t>(n)); };
  for (LearnerOptions options : std::vector<LearnerOptions>{{}, {.recompute = 3}, {.blocks = reads}})
    for (const int64_t sequence : {0, 12})
      for (const int64_t max_rows : {5, 14, 300})
        for (const int64_t members : {1, 2, 4}) {
          const BatchLimits limits{
              .groups = 3, .members = members, .prefix = sequence ? 11 : 9, .tokens = 7, .sequence = sequence};
          World w(table_null, c);
          options.max_rows = max_rows;
          options.logits_chunk = 4;
          Learner learner(w.model, w.gradients, w.optimizer, w.activations, options);
          learner.plan(limits, ppo());
          const size_t planned = w.activations.peak();
          w.activations.reset_peak();
          for (const size_t groups : {1u, 3u})
            for (int64_t of = 1; of <= members; of++)
              for (int64_t prefix = 1; prefix <= limits.prefix; prefix++)
                for (int64_t n = 1; n <= (sequence ? std::min<int64_t>(7, sequence - prefix) : 7); n++)
                  for (int64_t last = 1; last <= n; last++) {
                    std::vector<Group> all(groups,
                                           {tokens(prefix), std::vector<Member>(static_cast<size_t>(of), {tokens(n)})});
                    all.back().members.back().tokens.resize(static_cast<size_t>(last));
                    learner.accumulate(all, TokenTerms(loss_row_offsets(all).back()), ppo());
                    learner.drop_gradients();
                  }
          const size_t largest = w.activations.peak();
          SCOPED_TRACE(cat("sequences of ", sequence, ", ", max_rows, " rows, ", members, " members"));
          EXPECT_LE(largest, planned);
          EXPECT_LE(planned, largest + largest / (sequence && max_rows < 300 ? 8 : 100));
        }
}

// The last token of a sequence is never fed: one token more than there are positions is the most.
TEST(Learner, TakesSequencesUpToTheLastPosition) {
  const ModelConfig c = tiny_config("qwen3", true);
  Rng rng(rng_key(3, RngStream::test, 9));
  const auto of_length = [&](int64_t length) {
    const int64_t prefix = length / 3;
    return std::vector<Group>{{random_ids(rng, static_cast<int>(prefix), c.vocab),
                               {{random_ids(rng, static_cast<int>(length - prefix), c.vocab)}}}};
  };
  const Result longest = run(table_cpu, c, of_length(c.max_position + 1), {.max_rows = 400});
  EXPECT_TRUE(std::all_of(longest.out.logprob.begin(), longest.out.logprob.end(), [](double x) { return x < 0; }));
  try {
    run(table_cpu, c, of_length(c.max_position + 2), {.max_rows = 400});
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::usage);
    EXPECT_NE(std::string(e.what()).find(cat("a sequence of ", c.max_position + 2, " tokens")), std::string::npos);
  }
}

class LearnerOf : public testing::TestWithParam<std::string> {
 protected:
  ModelConfig config() const { return tiny_config(GetParam(), GetParam() != "llama"); }
};

TEST_P(LearnerOf, AnySplitIntoMicroBatchesGivesTheSameBits) {
  const ModelConfig c = config();
  const auto groups = random_groups(c, 1);
  const Result whole = run(table_cpu, c, groups, {.max_rows = 100000});
  double norm = 0;
  for (double g : whole.gradients) norm += g * g;
  EXPECT_GT(norm, 1e-8);
  for (int64_t rows : {1, 40, 70, 101, 150, 260})
    expect_same_bits(run(table_cpu, c, groups, {.max_rows = rows}), whole, "split");
  expect_same_bits(run(table_cpu, c, groups, {.max_rows = 101, .logits_chunk = 7}), whole, "chunks of logits");
}

TEST_P(LearnerOf, RecomputationGivesTheSameBits) {
  ModelConfig c = config();
  c.layers = 4;
  const auto groups = random_groups(c, 2);
  const Result plain = run(table_cpu, c, groups, {.max_rows = 101});
  size_t peak = plain.peak;
  for (const int64_t blocks : {1, 2, 3}) {
    const Result again = run(table_cpu, c, groups, {.max_rows = 101, .recompute = blocks});
    expect_same_bits(again, plain, "recompute");
    EXPECT_LT(again.peak, peak) << blocks;
    peak = again.peak;
  }
}

TEST_P(LearnerOf, ThreadsDoNotChangeBits) {
  const ModelConfig c = config();
  const auto groups = random_groups(c, 3);
  set_threads(1);
  const Result one = run(table_cpu, c, groups, {.max_rows = 150});
  set_threads(2);
  expect_same_bits(run(table_cpu, c, groups, {.max_rows = 150}), one, "two threads");
  set_threads(0);
}

// Every member alone, with the prefix in front of it: the prefix's gradients are the sum over members.
TEST_P(LearnerOf, SharedPrefixEqualsRepeatedPrefix) {
  const ModelConfig c = config();
  const auto groups = random_groups(c, 4);
  std::vector<Group> alone;
  for (const Group& g : groups)
    for (const Member& m : g.members) alone.push_back({g.prefix, {m}});
  const Result shared = run(table_cpu, c, groups, {}), repeated = run(table_cpu, c, alone, {});
  EXPECT_LT(relative_l2(shared.gradients, repeated.gradients), 1e-5);
  // The log-probs are the same bits, not merely close.
  EXPECT_EQ(shared.out.offsets, repeated.out.offsets);
  EXPECT_EQ(shared.out.logprob, repeated.out.logprob);
}

// The last token of a sequence is only predicted: it takes no position.
TEST(Learner, SequencesUpToTheLastPositionAndIdsOfTheVocabulary) {
  const ModelConfig c = tiny_config("qwen2", true);
  World w(table_cpu, c);
  w.model.set_parameters(tiny_parameters(c, 7));
  const auto logprobs = [&](int64_t tokens, int32_t first, int32_t last) {
    std::vector<int32_t> response(static_cast<size_t>(tokens - 1), 3);
    response.back() = last;
    return Learner::logprobs(w.model, w.activations, {{{first}, {{response}}}}, 1, {}).logprob.size();
  };
  EXPECT_EQ(logprobs(c.max_position + 1, 0, 36), 160u);
  EXPECT_THROW(logprobs(c.max_position + 2, 0, 0), Error);
  for (const int32_t id : {-1, 37}) {
    EXPECT_THROW(logprobs(5, id, 0), Error) << id;
    EXPECT_THROW(logprobs(5, 0, id), Error) << id;
  }
}

// Moments are read and written in pieces; those behind the first piece are as they were saved.
TEST(Learner, MomentsOfMoreThanOnePieceComeBack) {
  ModelConfig c = tiny_config("qwen2", true);
  c.vocab = 9001;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    World w(table_cpu, c);
    Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.moments = dtype});
    const int64_t first = 5, count = c.vocab * c.hidden;                       // 1.2 pieces
    const auto value = [](int64_t i) { return static_cast<float>(i % 251); };  // a number of bf16
    learner.set_moment(Moment::v, first, count, [&](int64_t begin, int64_t n, float* out) {
      for (int64_t i = 0; i < n; i++) out[i] = value(begin + i);
    });
    std::vector<float> found(static_cast<size_t>(count));
    learner.get_moment(Moment::v, first, count, found.data());
    int64_t others = 0;
    for (int64_t i = 0; i < count; i++) others += found[static_cast<size_t>(i)] != value(i);
    EXPECT_EQ(others, 0);
  }
}

TEST_P(LearnerOf, LogprobsAloneEqualThoseOfTheLoss) {
  const ModelConfig c = config();
  const auto groups = random_groups(c, 5);
  const Result r = run(table_cpu, c, groups, {});
  World w(table_cpu, c);
  w.model.set_parameters(tiny_parameters(c, 7));
  for (int64_t rows : {50, 100000}) {
    const TokenOuts out = Learner::logprobs(w.model, w.activations, groups, 1, {.max_rows = rows});
    EXPECT_EQ(out.logprob, r.out.logprob);
    EXPECT_EQ(out.entropy, r.out.entropy);
  }
}

TEST_P(LearnerOf, TheFastTableAgreesWithTheReference) {
  const ModelConfig c = config();
  const auto groups = random_groups(c, 6);
  const Result fast = run(table_cpu, c, groups, {}), ref = run(table_ref, c, groups, {}, DType::f64);
  EXPECT_LT(relative_l2(fast.gradients, ref.gradients), 2e-5);
}

// Central differences of the whole loss, KL and entropy included, in double; the ratio refers to fixed old log-probs.
TEST_P(LearnerOf, GradientsAreThoseOfTheLoss) {
  const ModelConfig c = config();
  auto groups = random_groups(c, 8);
  groups.resize(2);
  Rng rng(rng_key(3, RngStream::test, 2));
  TokenTerms terms = random_terms(groups);
  for (size_t r = 0; r < terms.weight.size(); r++) {
    terms.old_logprob[r] = -3.5 + 0.2 * rng.normal();
    terms.ref_logprob[r] = -3.6 + 0.2 * rng.normal();
  }
  const LossSpec spec{.policy = PolicyLoss::ppo,
                      .kl = KlLoss::k3,
                      .clip_low = 5,
                      .clip_high = 50,
                      .kl_coef = 0.5f,
                      .entropy_coef = 0.3f,
                      .temperature = 0.7f};
  World w(table_ref, c, DType::f64);
  std::vector<float> p = tiny_parameters(c, 9);
  w.model.set_parameters(p);
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.max_rows = 30});
  learner.accumulate(groups, terms, spec);
  const std::vector<double> gradient = learner.gradients();

  std::vector<double> values(p.begin(), p.end());
  const auto loss = [&] {
    upload_parameters(w.model, values);
    const TokenOuts out = learner.accumulate(groups, terms, spec);
    learner.drop_gradients();
    double sum = 0;
    for (size_t r = 0; r < out.loss.size(); r++)
      sum += terms.weight[r] * out.loss[r] +
             terms.kl_weight[r] * (double(spec.kl_coef) * out.kl[r] - double(spec.entropy_coef) * out.entropy[r]);
    return sum;
  };
  // A few elements of every parameter tensor.
  for (const Parameter& t : parameters(c))
    for (int64_t j : {int64_t{0}, t.size / 2, t.size - 1}) {
      const int64_t i = t.offset + j;
      const double numeric = slope(values[i], loss);
      EXPECT_NEAR(gradient[i], numeric, 1e-7 + 1e-5 * std::abs(numeric)) << t.name << '[' << j << ']';
    }
}

INSTANTIATE_TEST_SUITE_P(Models, LearnerOf, testing::Values("qwen2", "qwen3", "llama"),
                         [](const auto& info) { return info.param; });

TEST(PackedBatch, RowsPairsAndOrder) {
  const std::vector<Group> groups = {{{1, 2, 3}, {{{4, 5, 6}, {}}, {{7}, {}}, {{8, 9}, {}}}}};
  const PackedBatch b = pack_groups(groups, 0, 1);
  EXPECT_EQ(b.ids, (std::vector<int32_t>{4, 5, 8, 1, 2, 3}));
  EXPECT_EQ(b.pos, (std::vector<int32_t>{3, 4, 3, 0, 1, 2}));
  EXPECT_EQ(packed_rows(groups[0]), 6);
  // Pairs: member one 2*3 + 3, member three 1*3 + 1, prefix 6.
  EXPECT_EQ(b.pairs, 6 + 3 + 3 + 1 + 6);
  std::vector<int32_t> rows;
  for (const auto& r : b.loss_rows) rows.push_back(r.row);
  EXPECT_EQ(rows, (std::vector<int32_t>{5, 0, 1, 5, 5, 2}));
}

TEST(PackedBatch, TokensThatAreNotKeptHaveNoLossRow) {
  const std::vector<Group> groups = {{{1}, {{{4, 5, 6}, std::vector<bool>{true, false, true}}}}, {{}, {{{7, 8}}}}};
  const PackedBatch b = pack_groups(groups, 0, 1);
  ASSERT_EQ(b.loss_rows.size(), 2u);
  EXPECT_EQ(b.loss_rows[1].token, 2);
  EXPECT_EQ(b.rows(), 3);
  EXPECT_EQ(loss_row_offsets(groups), (std::vector<int64_t>{0, 2, 3}));
}

TEST(Learner, TheNullTableKeepsTheSameBooks) {
  const ModelConfig c = tiny_config("qwen3", true);
  const auto groups = random_groups(c, 1);
  const auto books = [&](const Table& table) {
    World w(table, c);
    if (!w.device.planning()) w.model.set_parameters(tiny_parameters(c, 7));
    Ledger ledger;
    w.device.ledger = &ledger;
    Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.max_rows = 150});
    learner.accumulate(groups, random_terms(groups), ppo());
    learner.step({});
    return std::tuple(ledger.phases, w.weights.peak(), w.gradients.peak(), w.optimizer.peak(), w.activations.peak());
  };
  EXPECT_TRUE(books(table_cpu) == books(table_null));
}

TEST(Learner, FlopsAreTheClosedForms) {
  const ModelConfig c = tiny_config("qwen2", false);
  const auto groups = random_groups(c, 1);
  int64_t rows = 0, pairs = 0, tokens = 0;
  for (const Group& g : groups) {
    const int64_t p = static_cast<int64_t>(g.prefix.size());
    rows += p;
    pairs += p * (p + 1) / 2;
    for (const Member& m : g.members) {
      const int64_t n = static_cast<int64_t>(m.tokens.size()) - 1;
      rows += n;
      pairs += n * p + n * (n + 1) / 2;
      tokens += n + (p > 0 ? 1 : 0);
    }
  }
  const int64_t matrices = c.layers * (c.qkv_width() * c.hidden + c.hidden * c.q_width() + 3 * c.hidden * c.ffn);
  for (int64_t max_rows : {40, 100000}) {  // groups that are cut run their prefix once, too
    World w(table_null, c);
    Ledger ledger;
    Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.max_rows = max_rows});
    w.device.ledger = &ledger;
    learner.accumulate(groups, random_terms(groups), ppo());
    auto& ops = ledger.phases.at("main");
    EXPECT_EQ(ops["linear_fwd"].cost.flops, 2 * (matrices * rows + c.vocab * c.hidden * tokens));
    EXPECT_EQ(ops["linear_bwd_input"].cost.flops, 2 * (matrices * rows + c.vocab * c.hidden * tokens));
    EXPECT_EQ(ops["linear_bwd_weight"].cost.flops, 2 * (matrices * rows + c.vocab * c.hidden * tokens));
    EXPECT_EQ(ops["attn_fwd"].cost.flops, 4 * c.layers * c.q_width() * pairs);
    EXPECT_EQ(ops["attn_bwd"].cost.flops, 10 * c.layers * c.q_width() * pairs);
  }
}

// With constant gradients the moments have closed forms: m = g (1 - beta1^t), v = g^2 (1 - beta2^t), and without any
// gradient they decay.  Rounded at random, moments in bf16 follow them in the mean; rounded to nearest, v would stay
// where it is from its 255th part on, and never fall.
TEST(Bf16Moments, FollowTheirClosedForms) {
  constexpr int64_t n = 4096;
  constexpr float beta1 = 0.9f, beta2 = 0.999f, g = 0.75f;
  std::vector<float> p(n), grad(n, g), norm(1);
  std::vector<uint16_t> m(n), v(n), start;
  const auto step = [&](int64_t t) {
    table_cpu.adamw({.p = make_tensor(p.data(), DType::f32, {n}),
                     .m = make_tensor(m.data(), DType::bf16, {n}),
                     .v = make_tensor(v.data(), DType::bf16, {n}),
                     .grad = make_tensor(grad.data(), DType::f32, {n}),
                     .norm = make_tensor(norm.data(), DType::f32, {1}),
                     .max_norm = 0,
                     .lr = 1e-3f,
                     .beta1 = beta1,
                     .beta2 = beta2,
                     .eps = 1e-8f,
                     .weight_decay = 0,
                     .step = t,
                     .key = rng_key(1, RngStream::moments, static_cast<uint64_t>(t))},
                    {});
  };
  const auto mean = [](const std::vector<uint16_t>& x) {
    double sum = 0;
    for (uint16_t h : x) sum += bf16_to_f32(h);
    return sum / static_cast<double>(x.size());
  };
  constexpr int64_t up = 1500, down = 700;
  for (int64_t t = 1; t <= up; t++) step(t);
  const double top = g * g * (1 - std::pow(double(beta2), up));
  EXPECT_NEAR(mean(v) / top, 1, 2e-3);  // the standard error is about 5e-4
  EXPECT_NEAR(mean(m) / g, 1, 1e-3);
  grad.assign(n, 0);
  for (int64_t t = up + 1; t <= up + down; t++) step(t);
  EXPECT_NEAR(mean(v) / (top * std::pow(double(beta2), down)), 1, 3e-3);
  EXPECT_LT(mean(m), 1e-6);
}

}  // namespace
}  // namespace pare::test
