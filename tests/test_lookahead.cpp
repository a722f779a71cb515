// Passes that are queued ahead of the tokens that feed them: no bit of a rollout, no count of its statistics changes,
// and the host waits once for all of them.
#include <algorithm>
#include <map>

#include "tests/generator.h"

namespace pare::test {
namespace {

RolloutLimits ahead(RolloutLimits limits, int lookahead, const KvSpec& kv = {}) {
  limits.lookahead = lookahead;
  limits.kv = kv;
  return limits;
}

KvSpec spec_of(KvMethod method) {
  KvSpec s;
  s.method = method;
  s.evict.budget = 11;
  s.evict.buffer = 5;
  s.window.size = 3;
  s.streaming_llm.sinks = 2;
  s.window.pooling_kernel = 3;
  s.pyramidkv.beta = 3;
  s.blocks.size = 4;
  s.blocks.count = 4;
  s.blocks.first = 1;
  s.blocks.last = 1;
  s.blocks.dense_layers = 1;
  return s;
}

// Every method, and every way in which a compression may come about.
std::vector<KvSpec> all_specs() {
  std::vector<KvSpec> all = {{}};
  for (const KvMethod method : {KvMethod::streaming_llm, KvMethod::h2o, KvMethod::tova, KvMethod::snapkv, KvMethod::rkv,
                                KvMethod::pyramidkv, KvMethod::quest, KvMethod::block_topk})
    all.push_back(spec_of(method));
  KvSpec s = spec_of(KvMethod::rkv);
  s.evict.scope = KvScope::per_layer;
  s.evict.prompt = KvPrompt::protect;
  all.push_back(s);
  s = spec_of(KvMethod::snapkv);
  s.evict.trigger = KvTrigger::prefill_once;
  all.push_back(s);
  s = spec_of(KvMethod::h2o);
  s.merge.method = KvMergeMethod::d2o;
  s.merge.keys = MergeKeys::unrotated;
  all.push_back(s);
  s = spec_of(KvMethod::h2o);
  s.merge.method = KvMergeMethod::value;
  s.evict.prompt = KvPrompt::protect;
  all.push_back(s);
  return all;
}

std::string name(const KvSpec& s) {
  return cat("method ", static_cast<int>(s.method), ", merge ", static_cast<int>(s.merge.method), ", trigger ",
             static_cast<int>(s.evict.trigger));
}

void expect_same_statistics(const RolloutStats& a, const RolloutStats& b) {
  EXPECT_EQ(a.prefill_tokens, b.prefill_tokens);
  EXPECT_EQ(a.decoded_tokens, b.decoded_tokens);
  EXPECT_EQ(a.decode_rows, b.decode_rows);
  EXPECT_EQ(a.finished, b.finished);
  EXPECT_EQ(a.compressions, b.compressions);
  EXPECT_EQ(a.evicted, b.evicted);
  EXPECT_EQ(a.dense, b.dense);
  EXPECT_NEAR(a.resident, b.resident, 1e-9 * a.resident);  // sums in the order of the passes
  EXPECT_NEAR(a.read, b.read, 1e-9 * a.read);
  EXPECT_EQ(a.peak_resident, b.peak_resident);
  EXPECT_EQ(a.peak_dense, b.peak_dense);
}

TEST(Lookahead, ChangesNoBitAndNoStatistic) {
  const auto requests = mixed_requests();
  for (const KvSpec& spec : all_specs()) {
    SCOPED_TRACE(name(spec));
    const KvResidency residency(spec, config().layers);
    int64_t least = 0;
    for (const Request& r : requests) least = std::max(least, Scheduler::pages_needed(residency, r));
    Generator one(table_cpu, config(), ahead(kRoomy, 1, spec));
    const auto expected = one.rollout.generate(requests, mixed_sampling());
    EXPECT_EQ(one.rollout.stats().discarded_tokens, 0);
    for (const int lookahead : {2, 8, 100})
      for (const RolloutLimits& limits :
           {kRoomy, RolloutLimits{.max_sequences = 3, .max_batched_tokens = 19, .max_context = 73},
            RolloutLimits{.max_sequences = 7, .max_batched_tokens = 7, .max_context = 73, .kv_pages = least}}) {
        SCOPED_TRACE(cat("lookahead ", lookahead, ", ", limits.max_sequences, " sequences"));
        Generator g(table_cpu, config(), ahead(limits, lookahead, spec));
        expect_same(g.rollout.generate(requests, mixed_sampling()), expected, name(spec));
        expect_same_statistics(one.rollout.stats(), g.rollout.stats());
        EXPECT_GT(g.rollout.stats().discarded_tokens, 0);
        EXPECT_EQ(g.scratch.used(), 0u);
      }
  }
}

// What was computed is in the ledger, whether it was of use or not.
TEST(Lookahead, TheLedgerHasTheDiscardedTokens) {
  const auto requests = mixed_requests();
  const ModelConfig c = config();
  for (const int lookahead : {1, 5}) {
    Generator g(table_cpu, c, ahead({.max_sequences = 6, .max_batched_tokens = 23, .max_context = 160}, lookahead));
    g.ledger.clear();
    int64_t tokens = 0, rows = 0;
    for (const Request& r : requests) rows += std::ssize(r.prompt);
    for (const Completion& done : g.rollout.generate(requests, mixed_sampling())) {
      tokens += std::ssize(done.tokens);
      rows += std::ssize(done.tokens) - 1;
    }
    const int64_t discarded = g.rollout.stats().discarded_tokens;
    EXPECT_EQ(discarded > 0, lookahead > 1);
    EXPECT_EQ(g.rollout.stats().decoded_tokens, tokens);
    EXPECT_EQ(g.ledger.phases["main"]["linear_fwd"].cost.flops,
              (rows + discarded) * c.layers * (2 * c.hidden * (c.q_width() + 3 * c.ffn) + 5 * c.ffn) +
                  2 * (tokens + discarded) * c.hidden * c.vocab);
  }
}

// With no EOS nothing is computed in vain, and planning has the books of the real run.
TEST(Lookahead, PlanningHasTheSameBooks) {
  Sampling sampling = mixed_sampling();
  sampling.eos.clear();
  for (const KvSpec& spec : all_specs()) {
    SCOPED_TRACE(name(spec));
    const RolloutLimits limits = ahead(
        {.max_sequences = 5, .max_batched_tokens = 29, .max_context = 73, .kv_pages = 60, .max_prompt = 40}, 8, spec);
    Generator real(table_cpu, config(), limits), planned(table_null, config(), limits);
    real.rollout.generate(mixed_requests(), sampling);
    planned.rollout.generate(mixed_requests(), sampling);
    EXPECT_EQ(real.rollout.stats().discarded_tokens, 0);
    EXPECT_EQ(real.ledger.phases, planned.ledger.phases);
    EXPECT_EQ(real.scratch.peak(), planned.scratch.peak());
    EXPECT_EQ(real.kv.peak(), planned.kv.peak());
    Arena most("most", no_memory);
    Device device(table_null);
    Arena weights("weights", no_memory);
    const Model model(config(), device, weights, DType::f32, false);
    Rollout::plan(model, limits, most);
    EXPECT_LE(real.scratch.peak(), most.peak());
  }
}

// One download for as many passes as are queued.
TEST(Lookahead, TheHostReadsOnceForAllThatIsQueued) {
  const Request request{{1, 2, 3}, {7, 8}, 41};
  for (const int lookahead : {1, 8, 16}) {
    Generator g(table_cpu, config(), ahead(kRoomy, lookahead));
    g.rollout.generate({request}, {.key = 3, .eos = {}});
    EXPECT_EQ(g.rollout.stats().forward_passes, 41);
    EXPECT_EQ(g.ledger.phases["main"]["download"].calls, (41 + lookahead - 1) / lookahead);
  }
}

// Compressions that are read back are waited for; they are those of the responses, and of nothing behind them.
TEST(Lookahead, TracesAreThoseOfTheResponses) {
  const auto requests = mixed_requests();
  const auto run = [&](int lookahead) {
    std::map<uint64_t, std::vector<std::vector<bool>>> compressions;
    Sampling sampling = mixed_sampling();
    sampling.trace = [&](const PagedRun& run, const KvTrace& t) { compressions[run.uid].push_back(t.keep); };
    Generator g(table_cpu, config(), ahead(kRoomy, lookahead, spec_of(KvMethod::snapkv)));
    g.rollout.generate(requests, sampling);
    EXPECT_EQ(g.rollout.stats().discarded_tokens, 0);
    return compressions;
  };
  const auto one = run(1);
  EXPECT_GT(one.size(), 4u);
  EXPECT_EQ(one, run(8));
}

TEST(Lookahead, StatesThatAreKeptAreThoseOfTheTokens) {
  const auto requests = mixed_requests();
  constexpr int64_t kRoom = 60;
  const auto run = [&](int lookahead) {
    Generator g(table_cpu, config(), ahead(kRoomy, lookahead));
    Arena arena("states");
    Sampling sampling = mixed_sampling();
    sampling.hidden = arena.alloc("states", DType::f32, {21 * kRoom, config().hidden});
    std::vector<std::vector<float>> states;
    const auto all = g.rollout.generate(requests, sampling);
    for (size_t i = 0; i < all.size(); i++) {
      const float* row = sampling.hidden.as<float>() + static_cast<int64_t>(i) * kRoom * config().hidden;
      states.emplace_back(row, row + std::ssize(all[i].tokens) * config().hidden);
    }
    return states;
  };
  EXPECT_EQ(run(1), run(8));
}

// Tokens are handed out one by one, those of a sequence in order and none behind its end.
TEST(Lookahead, HandsOutWhatIsKept) {
  Generator g(table_cpu, config(), ahead({.max_sequences = 4, .max_batched_tokens = 9, .max_context = 160}, 8));
  std::map<std::pair<int, int>, Completion> so_far;
  int64_t tokens = 0;
  const auto done = g.rollout.generate(
      mixed_requests(), mixed_sampling(), [&](const RolloutStats& s) { EXPECT_EQ(s.decoded_tokens, tokens); },
      [&](const Completion& c) {
        Completion& mine = so_far[{c.request, c.sample}];
        EXPECT_EQ(mine.tokens.size() + 1, c.tokens.size());
        mine = c;
        tokens++;
      });
  for (const Completion& c : done) expect_same(so_far[{c.request, c.sample}], c, "handed out");
}

}  // namespace
}  // namespace pare::test
