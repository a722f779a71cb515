// The schedule alone: no model runs, tokens are invented.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/rng.h"
#include "rollout/scheduler.h"

namespace pare::test {
namespace {

ModelConfig small() {
  ModelConfig c;
  c.layers = 3;
  c.kv_heads = 1;
  c.head_dim = 2;
  return c;
}

TEST(Scheduler, PagesOfTheWorstCase) {
  const auto needed = [](int64_t prompt, size_t samples, int max_new) {
    return Scheduler::pages_needed(KvResidency({}, small().layers),
                                   {std::vector<int32_t>(prompt), std::vector<uint64_t>(samples), max_new}) /
           small().layers;
  };
  EXPECT_EQ(needed(16, 1, 1), 1);
  EXPECT_EQ(needed(17, 1, 16), 2) << "the last token takes no slot";
  EXPECT_EQ(needed(17, 1, 17), 3);
  EXPECT_EQ(needed(33, 4, 1), 3) << "samples of one token stay in the prompt";
  EXPECT_EQ(needed(32, 4, 17), 3) << "full pages are shared";
  EXPECT_EQ(needed(40, 5, 12), 5) << "2 shared pages; the third twice, and a fourth";
  EXPECT_EQ(needed(40, 1, 12), 4) << "a single sample continues its prompt";
}

// Drives a scheduler through random requests and checks what it promises.  Batches are made ahead of their tokens.
class Drive {
 public:
  explicit Drive(uint64_t seed) : rng_(rng_key(seed, RngStream::test, 3)) {
    const auto n = static_cast<int>(1 + rng_.below(12));
    for (int r = 0; r < n; r++) {
      Request request;
      for (uint32_t i = 0, size = 1 + rng_.below(40); i < size; i++)
        request.prompt.push_back(static_cast<int32_t>(100 + rng_.below(50)));
      for (uint32_t s = 0, size = 1 + rng_.below(5); s < size; s++)
        request.uids.push_back(sequence_uid(0, static_cast<uint64_t>(r), 0, s));
      request.max_new_tokens = static_cast<int>(1 + rng_.below(25));
      least_ = std::max(least_, Scheduler::pages_needed(residency_, request));
      requests_.push_back(request);
    }
    limits_.max_sequences = static_cast<int>(1 + rng_.below(6));
    limits_.max_batched_tokens = limits_.max_sequences + static_cast<int>(rng_.below(30));
    limits_.max_context = 70;
    limits_.kv_pages = least_ + rng_.below(30);
    limits_.lookahead = static_cast<int>(1 + seed % 5);
  }

  void run() {
    Arena arena("kv", no_memory, size_t{1} << 30);
    KvCache cache(config_, {}, device_, arena, DType::f32, limits_.kv_pages, Scheduler::cache_sequences(limits_), 70);
    Scheduler scheduler(residency_, requests_, eos_, limits_, cache);
    while (!scheduler.done()) {
      std::vector<Batch> batches;
      std::vector<std::vector<int32_t>> tokens;
      do {
        const Batch& batch = batches.emplace_back(scheduler.next());
        ASSERT_GT(batch.ids.size() + batch.draws.size(), 0u) << "no progress";
        EXPECT_LE(batch.ids.size(), static_cast<size_t>(limits_.max_batched_tokens));
        EXPECT_LE(scheduler.in_flight(), limits_.max_sequences);
        EXPECT_LE(cache.reserved(), cache.pool().free());
        check_rows(batch, cache);
        check_fed(batches, tokens);
        tokens.emplace_back();
        for (const Batch::Draw& d : batch.draws) {
          check_draw(d);
          tokens.back().push_back(static_cast<int32_t>(rng_.below(8)));  // 0 and 5 end
          drawn_[d.completion].push_back(tokens.back().back());
        }
        scheduler.advance(batch);
      } while (static_cast<int>(batches.size()) < limits_.lookahead && !scheduler.idle());
      for (size_t b = 0; b < batches.size(); b++) {
        std::vector<float> logprobs;
        for (const int32_t token : tokens[b]) logprobs.push_back(-static_cast<float>(token));
        const std::vector<bool> kept = scheduler.settle(batches[b], tokens[b].data(), logprobs.data());
        ASSERT_EQ(kept.size(), tokens[b].size());
        for (size_t i = 0; i < kept.size(); i++) {
          std::vector<int32_t>& mine = settled_[batches[b].draws[i].completion];
          EXPECT_EQ(kept[i], mine.empty() || (mine.back() != 0 && mine.back() != 5));
          if (kept[i]) mine.push_back(tokens[b][i]);
        }
      }
      drawn_ = settled_;
    }
    EXPECT_EQ(cache.pool().used(), 0);
    EXPECT_EQ(cache.reserved(), 0);
    check_completions(scheduler.take_completions());
  }

 private:
  // A row of a prompt or the last token of a response, at its place; the newest slots of its sequence.
  void check_rows(const Batch& batch, const KvCache& cache) {
    size_t rows = 0;
    for (const PagedRun& run : batch.runs) {
      EXPECT_EQ(static_cast<size_t>(run.row), rows);
      rows += run.rows;
      for (int layer = 0; layer < cache.layers(); layer++)
        EXPECT_EQ(cache.slots(run.sequence, layer), batch.positions[run.row + run.rows - 1] + 1);
      for (int32_t i = 1; i < run.rows; i++)
        EXPECT_EQ(batch.positions[run.row + i], batch.positions[run.row + i - 1] + 1);
    }
    EXPECT_EQ(rows, batch.ids.size());
    EXPECT_EQ(batch.ids.size(), batch.positions.size());
    EXPECT_EQ(batch.prefill, std::count_if(batch.ids.begin(), batch.ids.end(), [](int32_t id) { return id >= 100; }));
  }
  // A row is fed by the last token of its sequence, which was drawn in the batch before.
  void check_fed(const std::vector<Batch>& batches, const std::vector<std::vector<int32_t>>& tokens) {
    const Batch& batch = batches.back();
    EXPECT_TRUE(batches.size() > 1 || batch.fed.empty());
    std::vector<int32_t> ids = batch.ids;
    for (size_t i = 0; i < batch.fed.size(); i += 2) ids[batch.fed[i + 1]] = tokens.back()[batch.fed[i]];
    for (size_t i = 0; i < batch.runs.size() && batch.runs[i].decodes(); i++) {
      EXPECT_EQ(ids[batch.draws[i].row], drawn_[batch.draws[i].completion].back());
    }
  }
  void check_draw(const Batch::Draw& d) {
    const auto [request, sample] = name(d.completion);
    EXPECT_EQ(d.uid, requests_[request].uids[sample]);
    EXPECT_EQ(d.position, static_cast<int32_t>(drawn_[d.completion].size()));
    if (d.position > 0) return;
    EXPECT_EQ(d.completion, started_++) << "first tokens in the order of admission";
  }
  std::pair<int, int> name(int completion) const {
    int r = 0;
    for (; completion >= static_cast<int>(requests_[r].uids.size()); r++)
      completion -= static_cast<int>(requests_[r].uids.size());
    return {r, completion};
  }
  void check_completions(const std::vector<Completion>& all) {
    EXPECT_EQ(static_cast<int>(all.size()), started_);
    for (int i = 0; i < static_cast<int>(all.size()); i++) {
      const Completion& c = all[i];
      EXPECT_EQ(std::make_pair(c.request, c.sample), name(i));
      EXPECT_EQ(c.tokens, drawn_[i]);
      for (size_t t = 0; t < c.tokens.size(); t++) EXPECT_EQ(c.logprobs[t], -static_cast<float>(c.tokens[t]));
      const auto is_eos = [&](int32_t t) { return t == 0 || t == 5; };
      EXPECT_TRUE(std::none_of(c.tokens.begin(), c.tokens.end() - 1, is_eos));
      EXPECT_EQ(c.finish == Finish::eos, is_eos(c.tokens.back()));
      EXPECT_TRUE(c.finish == Finish::eos || static_cast<int>(c.tokens.size()) == requests_[c.request].max_new_tokens);
    }
  }

  const ModelConfig config_ = small();
  const KvResidency residency_{{}, config_.layers};
  const std::vector<int32_t> eos_{5, 0};
  Device device_{table_null};
  Rng rng_;
  std::vector<Request> requests_;
  RolloutLimits limits_{};
  int64_t least_ = 0;
  std::map<int, std::vector<int32_t>> drawn_, settled_;  // by completion
  int started_ = 0;
};

TEST(Scheduler, RandomRequestsKeepItsPromises) {
  for (uint64_t seed = 0; seed < 300; seed++) {
    Drive(seed).run();
    if (testing::Test::HasFailure()) FAIL() << "seed " << seed;
  }
}

// Nobody overtakes: a small request behind a large one waits although the pool could hold it.
TEST(Scheduler, AdmissionIsStrictlyInOrder) {
  const ModelConfig config = small();
  Device device(table_null);
  Arena arena("kv", no_memory, size_t{1} << 20);
  const RolloutLimits limits{.max_sequences = 8, .max_batched_tokens = 100, .max_context = 64, .kv_pages = 3 * 5};
  KvCache cache(config, {}, device, arena, DType::f32, limits.kv_pages, Scheduler::cache_sequences(limits), 64);
  const std::vector<Request> requests = {{std::vector<int32_t>(20), {1}, 20},  // 3 pages a layer
                                         {std::vector<int32_t>(30), {2}, 20},  // 4
                                         {std::vector<int32_t>(1), {3}, 2}};   // 1
  const std::vector<int32_t> eos{9};
  const KvResidency dense({}, config.layers);
  Scheduler scheduler(dense, requests, eos, limits, cache);
  std::vector<int> starts;
  while (!scheduler.done()) {
    const Batch batch = scheduler.next();
    for (const Batch::Draw& d : batch.draws)
      if (d.position == 0) starts.push_back(d.completion);
    const bool stop = starts.size() == 1 && batch.draws[0].position == 5;
    scheduler.advance(batch);
    scheduler.settle(batch, std::vector<int32_t>(batch.draws.size(), stop ? 9 : 1).data(),
                     std::vector<float>(batch.draws.size()).data());
    if (starts.size() == 1) {
      EXPECT_EQ(scheduler.in_flight(), stop ? 0 : 1);
    }
  }
  EXPECT_EQ(starts, (std::vector<int>{0, 1, 2}));
}

}  // namespace
}  // namespace pare::test
