// Truncated sampling (ops/logits.h: Truncate): the sets that are kept, the distribution over them in sampler, log-prob
// and loss, and runs that train on it.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/json_file.h"
#include "comm/threads.h"
#include "ops/logits.h"
#include "tests/kernel_call.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

using kernel::Call;

constexpr double kOut = -INFINITY;

// Ids that are kept, by the words of Truncation, in double.
std::vector<int> kept_ids(const std::vector<double>& logits, double temperature, const Truncation& t) {
  std::vector<int> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int i, int j) { return logits[i] > logits[j]; });
  if (t.top_k > 0) ids.resize(std::min(ids.size(), static_cast<size_t>(t.top_k)));
  double total = 0, sum = 0;
  const auto share = [&](int i) { return std::exp((logits[i] - logits[ids[0]]) / temperature); };
  for (int i : ids) total += share(i);
  std::vector<int> kept;
  for (int i : ids) {
    if (t.top_p < 1 && sum >= t.top_p * total) break;
    sum += share(i);
    if (share(i) >= t.min_p) kept.push_back(i);
  }
  std::sort(kept.begin(), kept.end());
  return kept;
}

std::vector<double> row_of(Call& t, const char* name, int64_t row, int64_t vocabulary) {
  std::vector<double> values;
  for (int64_t v = 0; v < vocabulary; v++) values.push_back(t[name].get(row * vocabulary + v));
  return values;
}

void on_tables(const std::function<void(const Table&, DType)>& f) {
  f(table_ref, DType::f64);
  f(table_cpu, DType::f32);
  if (!kernels_here()) return;
  f(table_kernels, DType::f32);
  f(table_kernels, DType::bf16);
}

TEST(Truncation, KeepsTheSetThatItsWordsSay) {
  const Truncation cuts[] = {{1},        {7},           {0, 0.5f},    {0, 0.95f},      {0, 1, 0.2f},
                             {20, 0.8f}, {20, 1, 0.3f}, {0, 0.9f, 1}, {12, 0.7f, .1f}, {1000},
                             {}};
  for (const int64_t V : {1, 8, 127, 129, 1000})
    for (const Truncation& keep : cuts)
      for (const float temperature : {1.f, 0.6f})
        on_tables([&](const Table& table, DType act) {
          SCOPED_TRACE(
              cat(table.name, " V ", V, ", top_k ", keep.top_k, ", top_p ", keep.top_p, ", min_p ", keep.min_p));
          Call t(table, act);
          const Tensor logits = t.act("logits", {5, V});
          std::vector<std::vector<double>> before;
          for (int64_t r = 0; r < 5; r++) before.push_back(row_of(t, "logits", r, V));
          table.truncate({logits, temperature, keep}, {});
          for (int64_t r = 0; r < 5; r++) {
            std::vector<double> want(static_cast<size_t>(V), kOut);
            for (int id : kept_ids(before[r], temperature, keep)) want[id] = before[r][id];
            EXPECT_EQ(row_of(t, "logits", r, V), want) << "row " << r;
          }
        });
}

// Sums of integers: the two agree to the last id, in rows where half of the vocabulary lies within a rounding.
TEST(Truncation, KernelsKeepTheSetsOfTheCpu) {
  if (!kernels_here()) GTEST_SKIP() << "no CUDA emulation on this machine";
  for (const float top_p : {0.1f, 0.5f, 0.9f, 0.999f})
    for (const bool flat : {true, false}) {
      const auto kept = [&](const Table& table) {
        Call t(table, DType::f32);
        const Tensor logits = t.act("logits", {3, 5003});
        for (int64_t i = 0; flat && i < logits.size(); i++) t["logits"].set(i, 1 + 1e-7 * static_cast<double>(i % 5));
        table.truncate({logits, 0.7f, {0, top_p}}, {});
        return t["logits"].bits();
      };
      EXPECT_EQ(kept(table_kernels), kept(table_cpu)) << top_p;
    }
}

// A list has the kept ids of a row in ascending order, as many as fit; by it, other logits keep the same ids.
TEST(Truncation, ListsNameTheSet) {
  for (const int64_t V : {1, 8, 129, 1000})
    for (const Truncation& keep : {Truncation{5}, {0, 0.8f}, {0, 1, 0.3f}, {1000}})
      for (const int64_t room : {3, 1001})
        on_tables([&](const Table& table, DType act) {
          SCOPED_TRACE(cat(table.name, " V ", V, ", top_k ", keep.top_k, ", room ", room));
          Call t(table, act);
          const Tensor logits = t.act("logits", {5, V}), other = t.act("other", {5, V});
          const Tensor ids = t.index("ids", {5, 1 + room}, {});
          std::vector<std::vector<double>> before, others;
          for (int64_t r = 0; r < 5; r++) {
            before.push_back(row_of(t, "logits", r, V));
            others.push_back(row_of(t, "other", r, V));
          }
          table.truncate({logits, 1, keep}, {});
          table.list_kept({ids, logits}, {});
          for (int64_t r = 0; r < 5; r++) {
            const std::vector<int> kept = kept_ids(before[r], 1, keep);
            EXPECT_EQ(t["ids"].get(r * (1 + room)), static_cast<double>(kept.size()));
            for (int64_t i = 0; i < room; i++)
              EXPECT_EQ(t["ids"].get(r * (1 + room) + 1 + i), i < std::ssize(kept) ? kept[i] : -1) << i;
          }
          if (room < V) return;
          table.keep_listed({other, ids}, {});
          for (int64_t r = 0; r < 5; r++) {
            std::vector<double> want(static_cast<size_t>(V), kOut);
            for (int id : kept_ids(before[r], 1, keep)) want[id] = others[r][id];
            EXPECT_EQ(row_of(t, "other", r, V), want) << "row " << r;
          }
        });
}

struct Loss {
  std::vector<double> logprob, entropy, loss, kl, gradient;
};

// Runs the loss with every term that has no reference on rows of logits.
Loss loss_of(const Table& table, DType act, const std::vector<std::vector<double>>& rows,
             const std::vector<int32_t>& target, const Truncation& keep) {
  const auto R = static_cast<int64_t>(rows.size()), V = static_cast<int64_t>(rows[0].size());
  Call t(table, act);
  LogitsLoss a{};
  a.logprob = t.stat_out("logprob", {R});
  a.entropy = t.stat_out("entropy", {R});
  a.loss = t.stat_out("loss", {R});
  a.kl = t.stat_out("kl", {R});
  a.clipped = t.index("clipped", {R}, {});
  a.logits = t.act("logits", {R, V});
  a.target = t.index("target", {R}, target);
  a.weight = t.stat("weight", {R});
  a.kl_weight = t.stat("kl_weight", {R});
  a.advantage = t.stat("advantage", {R});
  a.old_logprob = t.stat("old_logprob", {R});
  a.spec = {.policy = PolicyLoss::ppo, .entropy_coef = 0.3f, .temperature = 0.8f};
  for (int64_t r = 0; r < R; r++) {
    for (int64_t v = 0; v < V; v++) t["logits"].set(r * V + v, rows[r][v]);
    t["weight"].set(r, 1.5);
    t["kl_weight"].set(r, 0.7);
    t["advantage"].set(r, r % 2 ? 1 : -2);
    t["old_logprob"].set(r, -1.2);
  }
  if (keep.on()) table.truncate({a.logits, 0.8f, keep}, {});
  table.logits_loss(a, {});
  Loss out;
  for (int64_t r = 0; r < R; r++) {
    out.logprob.push_back(t["logprob"].get(r));
    out.entropy.push_back(t["entropy"].get(r));
    out.loss.push_back(t["loss"].get(r));
    out.kl.push_back(t["kl"].get(r));
  }
  for (int64_t i = 0; i < R * V; i++) out.gradient.push_back(t["logits"].get(i));
  return out;
}

// A truncated row is the row of the kept ids alone: log-prob, entropy, loss and gradient.
TEST(Truncation, TheLossIsThatOfTheKeptIdsAlone) {
  for (const int64_t V : {8, 300})
    for (const Truncation& keep : {Truncation{3}, {0, 0.6f}, {0, 1, 0.4f}, {200, 0.9f, 0.05f}})
      on_tables([&](const Table& table, DType act) {
        const double bound = act == DType::bf16 ? 8e-3 : act == DType::f32 ? 2e-6 : 1e-13;
        std::vector<double> row(static_cast<size_t>(V));
        for (int64_t v = 0; v < V; v++) row[v] = std::round(16 * std::sin(3.0 * static_cast<double>(v + V))) / 8;
        const std::vector<int> ids = kept_ids(row, 0.8f, keep);
        std::vector<double> alone;
        for (int id : ids) alone.push_back(row[id]);
        const int32_t place = static_cast<int32_t>(ids.size() / 2);
        const Loss whole = loss_of(table, act, {row}, {ids[static_cast<size_t>(place)]}, keep);
        const Loss part = loss_of(table, act, {alone}, {place}, {});
        EXPECT_NEAR(whole.logprob[0], part.logprob[0], std::min(bound, 2e-6));
        EXPECT_NEAR(whole.entropy[0], part.entropy[0], std::min(bound, 2e-6));
        EXPECT_NEAR(whole.loss[0], part.loss[0], std::min(bound, 1e-5));
        std::vector<double> want(static_cast<size_t>(V));
        for (size_t i = 0; i < ids.size(); i++) want[ids[i]] = part.gradient[i];
        for (int64_t v = 0; v < V; v++) EXPECT_NEAR(whole.gradient[v], want[v], bound) << "id " << v;
        EXPECT_NEAR(std::accumulate(whole.gradient.begin(), whole.gradient.end(), 0.0), 0, 10 * bound);
      });
}

// Log-prob, entropy, loss and gradient by torch autograd, with the mask given (tools/make_truncated_golden.py).
TEST(Truncation, GradientsAreThoseOfTorch) {
  const nlohmann::json golden = read_json_file("tests/golden/truncated_losses.json");
  const std::vector<double> row = golden["row"];
  int kept_all = 0;
  for (const nlohmann::json& c : golden["cases"]) {
    const Truncation keep{c.value("top_k", 0), c.value("top_p", 1.f), c.value("min_p", 0.f)};
    SCOPED_TRACE(c.dump());
    EXPECT_EQ(kept_ids(row, 0.8f, keep), c["kept"].get<std::vector<int>>());
    kept_all += c["kept"].size() == row.size();
    on_tables([&](const Table& table, DType act) {
      const double bound = act == DType::bf16 ? 3e-2 : act == DType::f32 ? 3e-6 : 1e-12;
      const Loss got = loss_of(table, act, {row}, {c["target"]}, keep);
      EXPECT_NEAR(got.logprob[0], c["logprob"].get<double>(), bound);
      EXPECT_NEAR(got.entropy[0], c["entropy"].get<double>(), bound);
      EXPECT_NEAR(got.loss[0], c["loss"].get<double>(), bound);
      for (size_t v = 0; v < row.size(); v++) EXPECT_NEAR(got.gradient[v], c["gradient"][v].get<double>(), bound) << v;
    });
  }
  EXPECT_EQ(kept_all, 2);  // the untruncated row, with both targets
}

// The gradient of the truncated log-prob: the set does not change at steps so small.
TEST(Truncation, GradientsAreFiniteDifferences) {
  const std::vector<double> row = {0.3, -1.2, 1.7, 0.9, -0.4, 1.1, -2.0, 0.2};
  for (const Truncation& keep : {Truncation{4}, {0, 0.7f}, {0, 1, 0.3f}})
    for (int32_t target : {2, 5}) {
      const auto objective = [&](const std::vector<double>& z) {
        const Loss l = loss_of(table_ref, DType::f64, {z}, {target}, keep);
        return 1.5 * l.loss[0] - 0.7 * 0.3f * l.entropy[0];
      };
      const Loss at = loss_of(table_ref, DType::f64, {row}, {target}, keep);
      for (size_t v = 0; v < row.size(); v++) {
        std::vector<double> up = row, down = row;
        up[v] += 1e-5;
        down[v] -= 1e-5;
        EXPECT_NEAR(at.gradient[v], (objective(up) - objective(down)) / 2e-5, 1e-8) << "id " << v;
      }
    }
}

// Draws and their log-probs are of the kept ids, in their proportions.
TEST(Truncation, DrawsAreOfTheKeptDistribution) {
  const std::vector<double> row = {0.3, -1.2, 1.7, 0.9, -0.4, 1.1, -2.0, 0.2};
  constexpr int64_t kDraws = 4000;
  const Truncation keep{6, 0.85f, 0.2f};
  const std::vector<int> ids = kept_ids(row, 1, keep);
  ASSERT_EQ(ids.size(), 4u);
  double total = 0;
  for (int id : ids) total += std::exp(row[id]);
  on_tables([&](const Table& table, DType act) {
    if (act != DType::f32) return;
    Call t(table, act);
    const Tensor logits = t.act("logits", {kDraws, 8});
    std::vector<int32_t> counter;
    for (int32_t r = 0; r < kDraws; r++) {
      for (int64_t v = 0; v < 8; v++) t["logits"].set(r * 8 + v, row[v]);
      counter.insert(counter.end(), {r, 0, 3});
    }
    const Tensor token = t.index("token", {kDraws}, {}), logprob = t.stat_out("logprob", {kDraws});
    table.truncate({logits, 1, keep}, {});
    table.sample({token, logprob, logits, t.index("counter", {kDraws, 3}, counter), 5, 1}, {});
    std::vector<double> count(8);
    for (int64_t r = 0; r < kDraws; r++) {
      const auto id = static_cast<size_t>(t["token"].get(r));
      count[id]++;
      ASSERT_NEAR(t["logprob"].get(r), row[id] - std::log(total), 1e-6);
    }
    for (int v = 0; v < 8; v++) {
      const bool in = std::binary_search(ids.begin(), ids.end(), v);
      const double p = in ? std::exp(row[v]) / total : 0;
      EXPECT_NEAR(count[v] / kDraws, p, 4 * std::sqrt(p * (1 - p) / kDraws)) << "id " << v;
    }
  });
}

// ---- runs

const std::vector<std::vector<std::string>> kCuts = {{"rollout.top_p=0.8"},
                                                     {"rollout.top_k=9"},
                                                     {"rollout.min_p=0.3"},
                                                     {"rollout.top_k=20", "rollout.top_p=0.8", "rollout.min_p=0.05"}};

// Sampler and learner keep the same sets, step after step: of 48 ids some have probability 0.
TEST(TruncatedRuns, NoTokenDiffers) {
  for (const std::vector<std::string>& cut : kCuts)
    for (const std::vector<std::string>& more :
         {std::vector<std::string>{"actor.entropy_coeff=0.01"},
          {"rollout.temperature=0.7", "actor.token_subset=rpc", "actor.rpc_min_tokens=4"},
          {"learner.attention=replay", "rollout.kv.method=quest", "rollout.kv.blocks.size=4",
           "rollout.kv.blocks.count=4"}}) {
      TrainingRun run(tiny_run("qwen3", cut + more));
      TrainingRun full(tiny_run("qwen3", more));
      double norms = 0;
      for (int step = 0; step < 3; step++) {
        const Metrics m = run.step(), f = full.step();
        norms += m.get("actor/grad_norm");
        EXPECT_GT(m.get("exact/checked_tokens"), 0);
        EXPECT_EQ(m.get("exact/mismatch_tokens"), 0) << cut[0];
        if (step == 0) {
          EXPECT_LT(m.get("actor/entropy"), f.get("actor/entropy")) << cut[0];
        }
      }
      EXPECT_GT(norms, 0);
    }
}

// Every id is kept: the run without, bit for bit.
TEST(TruncatedRuns, ASetOfAllIsTheUntruncatedRun) {
  const std::vector<float> plain = trained(tiny_run("qwen3"), 3);
  EXPECT_TRUE(same_bits(trained(tiny_run("qwen3", {"rollout.top_k=100000"}), 3), plain));
  EXPECT_TRUE(same_bits(trained(tiny_run("qwen3", {"rollout.top_p=1", "rollout.min_p=1e-30"}), 3), plain));
  EXPECT_FALSE(same_bits(trained(tiny_run("qwen3", {"rollout.top_k=9"}), 3), plain));
}

// Recorded sets are those that the learner would find: a KL without weight, whose reference needs them, changes no bit.
TEST(TruncatedRuns, RecordedSetsAreTheLearners) {
  const Keys weightless = {"actor.use_kl_loss=true", "actor.kl_loss_coef=0"};
  for (const Keys& cut : kCuts) {
    EXPECT_EQ(kept_ids(tiny_run("qwen3", cut)), 0);
    EXPECT_GT(kept_ids(tiny_run("qwen3", cut + weightless)), 0);
    EXPECT_TRUE(same_bits(trained(tiny_run("qwen3", cut), 3), trained(tiny_run("qwen3", cut + weightless), 3)));
  }
}

// With several updates, or another policy beside the model, the set stays the sampler's.
TEST(TruncatedRuns, OtherWeightsKeepTheSamplersSets) {
  const Keys sparse = {"rollout.kv.method=quest",   "rollout.kv.blocks.size=4",
                       "rollout.kv.blocks.count=2", "rollout.kv.blocks.first=0",
                       "rollout.kv.blocks.last=1",  "rollout.kv.blocks.dense_layers=0",
                       "rollout.check_exact=false", "algorithm.rollout_correction.rollout_is=tis"};
  for (const Keys& cut : kCuts)
    for (const Keys& more : {Keys{"actor.ppo_epochs=2"},
                             {"actor.ppo_mini_batch_size=3", "actor.policy_loss.loss_mode=cispo"},
                             {"actor.use_kl_loss=true", "actor.ppo_epochs=2"},
                             {"actor.use_kl_loss=true", "actor.kl_loss_type=exact"},
                             {"algorithm.use_kl_in_reward=true"},
                             sparse + Keys{"algorithm.rollout_correction.score_centering=true"},
                             sparse + Keys{"rollout.check_exact=auto", "distill.enable=true", "model.lora.rank=2",
                                           "distill.kl_type=exact_forward"}}) {
      SCOPED_TRACE(cut[0] + " " + more.back());
      TrainingRun run(tiny_run("qwen3", cut + more + Keys{"actor.optim.lr=0.01"}));
      double norms = 0;
      for (int step = 0; step < 3; step++) {
        const Metrics m = run.step();
        norms += m.get("actor/grad_norm");
        for (const auto& [name, value] : m.all()) EXPECT_TRUE(std::isfinite(value)) << name << " in step " << step;
        // A dense learner of a sparse sampler has other log-probs; the adapters' learner has the sampler's.
        const bool compares = more[0] != sparse[0] || more.back().starts_with("distill");
        EXPECT_EQ(m.get("exact/checked_tokens") > 0, compares);
        if (compares) {
          EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
        }
        // The reference is the model until the first update.
        if (more[0] == "actor.use_kl_loss=true" && more.back() != "actor.ppo_epochs=2") {
          if (step == 0)
            EXPECT_NEAR(m.get("actor/kl_loss"), 0, 1e-7);
          else
            EXPECT_GT(m.get("actor/kl_loss"), 1e-6);
        }
        if (more[0] == sparse[0]) {
          EXPECT_GT(m.get("rollout_corr/k3_kl"), 0);
        }
      }
      EXPECT_GT(norms, 0);
    }
}

// A sampler that reads everything has the dense learner's distribution over each set.
TEST(TruncatedRuns, ASparseSamplerOfAFullBudgetHasTheLearnersLogprobs) {
  TrainingRun run(tiny_run(
      "qwen3", kCuts[0] + Keys{"rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=40",
                               "rollout.check_exact=false", "algorithm.rollout_correction.acceptance=true"}));
  const Metrics m = run.step();
  EXPECT_NEAR(m.get("rollout_corr/acceptance_rate_p5"), 1, 1e-6);
  for (const Trajectory& s : run.trainer->samples()) {
    EXPECT_EQ(*s.old_logprob, s.logprob);
    ASSERT_EQ(s.kept->ends.size(), s.tokens.size());
    for (int64_t t = 0; t < std::ssize(s.tokens); t++) {
      const std::span<const int32_t> ids = s.kept->of(t);
      EXPECT_TRUE(std::binary_search(ids.begin(), ids.end(), s.tokens[t]));
    }
  }
}

TEST(TruncatedRuns, MoreIdsThanAreRecordedAreAnError) {
  const Keys keys = {"rollout.top_p=0.99", "actor.ppo_epochs=2"};
  EXPECT_EQ(kept_ids(tiny_run("qwen3", keys)), 1024);
  EXPECT_EQ(kept_ids(tiny_run("qwen3", keys + Keys{"rollout.top_k=7"})), 7);
  TrainingRun run(tiny_run("qwen3", keys + Keys{"rollout.max_kept_ids=2"}));
  try {
    run.step();
    FAIL() << "a set of more than 2 ids was recorded";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("rollout.max_kept_ids = 2"), std::string::npos) << e.what();
  }
}

TEST(TruncatedRuns, RanksChangeNoBit) {
  std::vector<float> alone;
  for (const int ranks : {1, 2}) {
    const Config config = tiny_run("qwen3", kCuts[3] + Keys{"learner.shards=2", "actor.ppo_epochs=2"});
    std::vector<std::vector<float>> after(static_cast<size_t>(ranks));
    run_ranks(1, ranks, [&](Comm& comm) {
      Session session(config, table_cpu, true, {}, true, comm);
      session.train = std::make_unique<Rewarded>(std::move(session.train), digits);
      GrpoTraining training(session);
      for (int i = 0; i < 2; i++) EXPECT_EQ(training.step().get("exact/mismatch_tokens"), 0);
      after[static_cast<size_t>(comm.rank())] = session.model->get_parameters();
    });
    if (ranks == 1) alone = after[0];
    for (const auto& parameters : after) EXPECT_TRUE(same_bits(parameters, alone)) << ranks;
  }
}

}  // namespace
}  // namespace pare::test
