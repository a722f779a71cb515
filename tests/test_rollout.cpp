// Generation: the schedule, the pages and the threads change no bit; the books are exact; wrong input is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "base/thread_pool.h"
#include "ops/logits.h"
#include "tests/generator.h"

namespace pare::test {
namespace {

std::vector<Completion> generate(const RolloutLimits& limits, const std::vector<Request>& requests,
                                 const Sampling& sampling) {
  Generator g(table_cpu, config(), limits);
  return g.rollout.generate(requests, sampling);
}

TEST(Rollout, TheScheduleChangesNothing) {
  const auto requests = mixed_requests();
  const auto alone = one_by_one(kAlone, requests);
  int64_t least = 0;
  for (const Request& r : requests)
    least = std::max(least, Scheduler::pages_needed(KvResidency({}, config().layers), r));
  const std::vector<RolloutLimits> all = {
      kRoomy,
      {.max_sequences = 1, .max_batched_tokens = 1, .max_context = 160},
      {.max_sequences = 2, .max_batched_tokens = 3, .max_context = 160},
      {.max_sequences = 3, .max_batched_tokens = 19, .max_context = 73},
      {.max_sequences = 7, .max_batched_tokens = 7, .max_context = 73, .kv_pages = least},
      {.max_sequences = 40, .max_batched_tokens = 400, .max_context = 160, .kv_pages = least},
      {.max_sequences = 40, .max_batched_tokens = 50, .max_context = 160, .kv_pages = least + 1},
      {.max_sequences = 5, .max_batched_tokens = 64, .max_context = 160, .kv_pages = 2 * least + 3}};
  for (const RolloutLimits& limits : all) {
    Generator g(table_cpu, config(), limits);
    expect_same(
        g.rollout.generate(requests, mixed_sampling()), alone,
        cat(limits.max_sequences, " sequences, ", limits.max_batched_tokens, " rows, ", limits.kv_pages, " pages"));
    EXPECT_LE(g.rollout.stats().peak_sequences, limits.max_sequences);
    EXPECT_EQ(g.rollout.cache().pool().used(), 0);
    EXPECT_EQ(g.scratch.used(), 0u);
  }
}

TEST(Rollout, TheOrderOfRequestsChangesNothing) {
  auto requests = mixed_requests();
  const auto before = generate(kRoomy, requests, mixed_sampling());
  std::reverse(requests.begin(), requests.end());
  auto after = generate({.max_sequences = 4, .max_batched_tokens = 11, .max_context = 160}, requests, mixed_sampling());
  for (Completion& c : after) c.request = static_cast<int>(requests.size()) - 1 - c.request;
  std::stable_sort(after.begin(), after.end(), [](const auto& a, const auto& b) { return a.request < b.request; });
  expect_same(after, before, "reversed");
}

TEST(Rollout, ThreadsChangeNothing) {
  const int threads_before = threads();
  set_threads(1);
  const auto one = generate(kRoomy, mixed_requests(), mixed_sampling());
  set_threads(2);
  const auto two = generate(kRoomy, mixed_requests(), mixed_sampling());
  set_threads(threads_before);
  expect_same(two, one, "threads");
}

TEST(Rollout, PageIdsChangeNothing) {
  Generator g(table_cpu, config(), kRoomy);
  const auto first = g.rollout.generate(mixed_requests(), mixed_sampling());
  PagePool fresh(g.rollout.cache().pool().pages()), used = g.rollout.cache().pool();
  std::vector<int32_t> ids, fresh_ids;
  for (int i = 0; i < 30; i++) {
    ids.push_back(used.allocate());
    fresh_ids.push_back(fresh.allocate());
  }
  ASSERT_NE(ids, fresh_ids) << "the first run left the free list in order: nothing is tested";
  expect_same(g.rollout.generate(mixed_requests(), mixed_sampling()), first, "scrambled free list");
}

TEST(Rollout, ASharedPromptIsComputedOnce) {
  const Request r = mixed_requests()[5];  // 40 tokens, 5 samples
  Generator shared(table_cpu, config(), kRoomy);
  const auto together = shared.rollout.generate({r}, mixed_sampling());
  expect_same(together, one_by_one(kAlone, {r}), "shared");
  EXPECT_EQ(shared.rollout.stats().prefill_tokens, 40);
  // 2 layers: 2 full pages once; the third page and, past 48 slots, a fourth one for each sample alone.
  EXPECT_LE(shared.rollout.stats().peak_pages, 2 * (2 + 5 * 2));
}

// A given beginning of the response is computed with the prompt: the same bits as if it were a part of that.
TEST(Rollout, APrefixIsComputedAsThePromptIs) {
  auto glued = mixed_requests();
  auto apart = glued;
  for (Request& r : apart) {
    const auto cut = r.prompt.begin() + static_cast<int64_t>(r.prompt.size() + 1) / 2;
    r.prefix.assign(cut, r.prompt.end());
    r.prompt.erase(cut, r.prompt.end());
  }
  for (const RolloutLimits& limits :
       {kRoomy, RolloutLimits{.max_sequences = 3, .max_batched_tokens = 19, .max_context = 73}}) {
    Generator a(table_cpu, config(), limits), b(table_cpu, config(), limits);
    expect_same(a.rollout.generate(apart, mixed_sampling()), b.rollout.generate(glued, mixed_sampling()), "prefix");
    EXPECT_EQ(a.rollout.stats().prefill_tokens, b.rollout.stats().prefill_tokens);
    EXPECT_EQ(a.rollout.stats().peak_pages, b.rollout.stats().peak_pages);
    EXPECT_EQ(a.ledger.phases, b.ledger.phases);
  }
}

TEST(Rollout, PairsAreCountedOncePerSharedPromptAndTheLastTokenIsNotFedBack) {
  const auto requests = mixed_requests();
  Generator g(table_cpu, config(), {.max_sequences = 6, .max_batched_tokens = 23, .max_context = 160});
  g.ledger.clear();
  const auto completions = g.rollout.generate(requests, mixed_sampling());
  int64_t pairs = 0, rows = 0, tokens = 0;
  for (const Request& r : requests) {
    const auto p = static_cast<int64_t>(r.prompt.size());
    pairs += p * (p + 1) / 2;
    rows += p;
  }
  for (const Completion& c : completions) {
    const auto p = static_cast<int64_t>(requests[c.request].prompt.size()), n = static_cast<int64_t>(c.tokens.size());
    for (int64_t i = 1; i < n; i++) pairs += p + i;
    rows += n - 1;
    tokens += n;
  }
  const ModelConfig c = config();
  auto& ledger = g.ledger.phases["main"];
  EXPECT_EQ(ledger["attn_paged"].cost.flops, 4 * c.heads * c.head_dim * c.layers * pairs);
  EXPECT_EQ(ledger["linear_fwd"].cost.flops,
            rows * c.layers * (2 * c.hidden * (c.q_width() + 3 * c.ffn) + 5 * c.ffn) + 2 * tokens * c.hidden * c.vocab);
  EXPECT_EQ(ledger["kv_write"].cost.flops,
            rows * c.layers * (2 * c.hidden * c.qkv_width() + (c.qk_norm ? 7 : 3) * (c.q_width() + c.kv_width())));
  EXPECT_EQ(g.rollout.stats().decoded_tokens, tokens);
  EXPECT_EQ(g.rollout.stats().finished, static_cast<int64_t>(completions.size()));
}

// The log-prob of the sampler is the learner's, bit by bit.
void expect_learner_logprobs(const Table& table, DType dtype) {
  const auto requests = mixed_requests();
  Generator g(table, config(), {.max_sequences = 5, .max_batched_tokens = 21, .max_context = 160}, dtype);
  const auto completions = g.rollout.generate(requests, mixed_sampling());
  World w(table, config(), dtype);
  w.model.set_parameters(tiny_parameters(config(), 5));
  std::vector<Group> groups;
  for (const Request& r : requests) groups.push_back({r.prompt, {}});
  for (const Completion& c : completions) groups[c.request].members.push_back({c.tokens});
  TokenTerms terms(loss_row_offsets(groups).back());
  std::fill(terms.weight.begin(), terms.weight.end(), 1);
  LossSpec spec{.policy = PolicyLoss::nll};
  spec.temperature = mixed_sampling().temperature;
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.max_rows = 100});
  const TokenOuts outs = learner.accumulate(groups, terms, spec);
  for (size_t i = 0; i < completions.size(); i++) {
    const Completion& c = completions[i];
    for (size_t t = 0; t < c.tokens.size(); t++) {
      const auto expected = static_cast<float>(outs.of(outs.logprob, i)[t]);
      EXPECT_EQ(0, std::memcmp(&expected, &c.logprobs[t], sizeof expected))
          << "request " << c.request << ", sample " << c.sample << ", token " << t;
    }
  }
}
TEST(Rollout, LogprobsAreTheLearners) { expect_learner_logprobs(table_cpu, DType::f32); }
TEST(Rollout, LogprobsAreTheLearnersInDouble) { expect_learner_logprobs(table_ref, DType::f64); }

// Every draw is named by the uid of its sample and the position in the response.
std::vector<std::array<int32_t, 3>> counters_seen;
TEST(Rollout, DrawsAreNamedByUidAndPosition) {
  counters_seen.clear();
  Table spy = table_cpu;
  spy.sample = [](const Sample& a, Stream stream) {
    const int32_t* counter = a.counter.as<int32_t>();
    for (int64_t i = 0; i < a.counter.shape[0]; i++, counter += 3)
      counters_seen.push_back({counter[0], counter[1], counter[2]});
    EXPECT_EQ(a.key, mixed_sampling().key);
    table_cpu.sample(a, stream);
  };
  Generator g(spy, config(), {.max_sequences = 3, .max_batched_tokens = 21, .max_context = 160});
  const auto requests = mixed_requests();
  std::vector<std::array<int32_t, 3>> expected;
  for (const Completion& c : g.rollout.generate(requests, mixed_sampling()))
    for (int32_t t = 0; t < static_cast<int32_t>(c.tokens.size()); t++) {
      const uint64_t uid = requests[c.request].uids[c.sample];
      expected.push_back({static_cast<int32_t>(uid & 0xffffffffu), static_cast<int32_t>(uid >> 32), t});
    }
  std::sort(expected.begin(), expected.end());
  std::sort(counters_seen.begin(), counters_seen.end());
  EXPECT_EQ(counters_seen, expected);
}

// Planning makes the passes of a few samples and of a few requests, however many there are, and counts all of them.
TEST(Rollout, PassesThatComeAgainAreCountedWithoutBeingMade) {
  const auto made = [](int64_t requests, int64_t samples) {
    const ModelConfig c = config();
    Generator g(table_null, c, {.max_sequences = 6, .max_batched_tokens = 30, .max_context = 73});
    std::vector<Request> all(static_cast<size_t>(requests), {std::vector<int32_t>(20, 1), {}, 30});
    for (Request& r : all) r.uids.resize(static_cast<size_t>(samples));
    int64_t passes = 0;
    g.rollout.generate(all, {.key = 3, .eos = {}, .planned = 2}, [&](const RolloutStats&) { passes++; });
    EXPECT_EQ(g.ledger.phases["main"]["embedding_fwd"].cost.written,
              requests * (20 + samples * 29) * (2 * c.hidden + 1) * 4);  // with norms
    return passes;
  };
  EXPECT_EQ(made(200, 3), made(400, 3));
  EXPECT_EQ(made(8, 60), made(8, 120));
}

TEST(Rollout, EndsAtEosOrAtTheLimit) {
  const auto requests = mixed_requests();
  const Sampling sampling = mixed_sampling();
  const auto is_eos = [&](int32_t t) { return std::count(sampling.eos.begin(), sampling.eos.end(), t) > 0; };
  int ends[2] = {0, 0};
  std::vector<int> by_id(config().vocab);
  for (const Completion& c : generate(kRoomy, requests, sampling)) {
    ASSERT_FALSE(c.tokens.empty());
    EXPECT_TRUE(std::none_of(c.tokens.begin(), c.tokens.end() - 1, is_eos));
    EXPECT_EQ(c.finish == Finish::eos, is_eos(c.tokens.back()));
    const auto limit = static_cast<size_t>(requests[c.request].max_new_tokens);
    EXPECT_LE(c.tokens.size(), limit);
    EXPECT_TRUE(c.finish == Finish::eos || c.tokens.size() == limit);
    ends[c.finish == Finish::length]++;
    by_id[c.tokens.back()]++;
  }
  EXPECT_GT(ends[0], 2);
  EXPECT_GT(ends[1], 2);
  for (int32_t id : sampling.eos) EXPECT_GT(by_id[id], 0) << "no sequence ended with " << id;
}

TEST(Rollout, GreedyIgnoresTheDraws) {
  Sampling a = mixed_sampling(), b = mixed_sampling();
  a.temperature = b.temperature = 0;
  b.key ^= 1234567;
  const auto requests = mixed_requests();
  const auto first = generate(kRoomy, requests, a);
  expect_same(generate(kRoomy, requests, b), first, "another key");
  for (const Completion& c : first) {
    EXPECT_TRUE(std::all_of(c.logprobs.begin(), c.logprobs.end(), [](float x) { return x == 0; }));
    EXPECT_EQ(c.tokens, std::find_if(first.begin(), first.end(), [&](const Completion& o) {
                          return o.request == c.request;
                        })->tokens);
  }
}

TEST(Rollout, SamplesOfAPromptDiffer) {
  const auto requests = mixed_requests();
  const auto all = generate(kRoomy, requests, mixed_sampling());
  Sampling other = mixed_sampling();
  other.key++;
  const auto others = generate(kRoomy, requests, other);
  int same = 0;
  for (size_t i = 0; i < all.size(); i++) same += all[i].tokens == others[i].tokens;
  EXPECT_LE(same, 4) << "the key does not matter";
  EXPECT_NE(all[0].tokens, all[1].tokens) << "the uid does not matter";
}

// What `pare plan` relies on: with no EOS the run on the null table has the books of the real one.
TEST(Rollout, PlanningHasTheSameBooks) {
  Sampling sampling = mixed_sampling();
  sampling.eos.clear();
  const RolloutLimits limits{.max_sequences = 5, .max_batched_tokens = 29, .max_context = 160, .kv_pages = 60};
  Generator real(table_cpu, config(), limits), planned(table_null, config(), limits);
  real.rollout.generate(mixed_requests(), sampling);
  const auto zeros = planned.rollout.generate(mixed_requests(), sampling);
  for (const Completion& c : zeros) {
    EXPECT_EQ(c.finish, Finish::length);
    EXPECT_TRUE(std::all_of(c.tokens.begin(), c.tokens.end(), [](int32_t t) { return t == 0; }));
  }
  EXPECT_EQ(real.ledger.phases, planned.ledger.phases);
  EXPECT_EQ(real.scratch.peak(), planned.scratch.peak());
  EXPECT_EQ(real.kv.peak(), planned.kv.peak());
  EXPECT_EQ(real.rollout.stats().peak_pages, planned.rollout.stats().peak_pages);
  EXPECT_EQ(real.rollout.stats().forward_passes, planned.rollout.stats().forward_passes);
}

TEST(Rollout, ProgressIsReportedAfterEveryPass) {
  Generator g(table_cpu, config(), {.max_sequences = 4, .max_batched_tokens = 9, .max_context = 160});
  RolloutStats last;
  g.rollout.generate(mixed_requests(), mixed_sampling(), [&](const RolloutStats& s) {
    EXPECT_GE(s.decoded_tokens, last.decoded_tokens);
    EXPECT_GE(s.finished, last.finished);
    EXPECT_EQ(s.completions, 21);
    last = s;
  });
  EXPECT_EQ(last.finished, 21);
  EXPECT_TRUE(g.rollout.generate({}, mixed_sampling()).empty());
}

TEST(Rollout, EveryTokenIsHandedOutAsItIsDrawn) {
  Generator g(table_cpu, config(), {.max_sequences = 4, .max_batched_tokens = 9, .max_context = 160});
  std::map<std::pair<int, int>, Completion> so_far;
  int64_t tokens = 0, passes = 0;
  const auto done = g.rollout.generate(
      mixed_requests(), mixed_sampling(),
      [&](const RolloutStats& s) { EXPECT_EQ(s.decoded_tokens, tokens) << "after pass " << passes++; },
      [&](const Completion& c) {
        Completion& mine = so_far[{c.request, c.sample}];
        EXPECT_EQ(mine.tokens.size() + 1, c.tokens.size());
        mine.tokens.push_back(c.tokens.back());
        mine.logprobs.push_back(c.logprobs.back());
        mine.finish = c.finish;
        tokens++;
      });
  for (const Completion& c : done) expect_same(so_far[{c.request, c.sample}], c, "handed out");
}

// A callback may end the call: the memory of the pass is given back.
TEST(Rollout, ACallbackThatThrowsEndsIt) {
  Generator g(table_cpu, config(), kRoomy);
  struct Enough {};
  int tokens = 0;
  const auto stop = [&](const Completion&) {
    if (++tokens == 25) throw Enough();
  };
  EXPECT_THROW(g.rollout.generate(mixed_requests(), mixed_sampling(), {}, stop), Enough);
  EXPECT_EQ(tokens, 25);
  EXPECT_EQ(g.scratch.used(), 0u);
}

// The message of the error, or of its absence.
std::string refusal(Exit code, const RolloutLimits& limits, const Request& request, const Sampling& sampling) {
  try {
    Generator g(table_cpu, config(), limits);
    Arena& scratch = g.scratch;
    scratch.reset_peak();
    try {
      g.rollout.generate({request}, sampling);
    } catch (...) {
      EXPECT_EQ(scratch.peak(), 0u) << "refused after the start";
      throw;
    }
  } catch (const Error& e) {
    EXPECT_EQ(e.code, code) << e.what();
    return e.what();
  }
  return "no error";
}

TEST(Rollout, APoolThatHoldsOneSequenceIsEnoughAndOnePageLessIsRefused) {
  for (const Request& r : mixed_requests()) {
    RolloutLimits limits = kRoomy;
    limits.kv_pages = Scheduler::pages_needed(KvResidency({}, config().layers), r);
    EXPECT_EQ(refusal(Exit::memory, limits, r, mixed_sampling()), "no error");
    limits.kv_pages--;
    const std::string what = refusal(Exit::memory, limits, r, mixed_sampling());
    EXPECT_NE(what.find(cat("needs ", limits.kv_pages + 1, " KV pages")), std::string::npos) << what;
    EXPECT_NE(what.find(cat("the pool has ", limits.kv_pages)), std::string::npos) << what;
  }
}

TEST(Rollout, WrongInputIsRefusedBeforeTheStart) {
  const Request good{{1, 2, 3}, {7}, 4};
  const Sampling sampling = mixed_sampling();
  const auto expect_refused = [&](const std::string& part, const RolloutLimits& limits, const Request& r,
                                  const Sampling& s) {
    const std::string what = refusal(Exit::usage, limits, r, s);
    EXPECT_NE(what.find(part), std::string::npos) << what;
  };
  const auto with = [](auto value, auto change) {
    change(value);
    return value;
  };
  ASSERT_EQ(refusal(Exit::usage, kRoomy, good, sampling), "no error");
  expect_refused("prompt is empty", kRoomy, with(good, [](Request& r) { r.prompt.clear(); }), sampling);
  expect_refused("max_new_tokens is 0", kRoomy, with(good, [](Request& r) { r.max_new_tokens = 0; }), sampling);
  expect_refused("do not fit in max_context", kRoomy, with(good, [](Request& r) { r.max_new_tokens = 158; }), sampling);
  expect_refused("outside the vocabulary of 37", kRoomy, with(good, [](Request& r) { r.prompt[1] = 37; }), sampling);
  expect_refused("outside the vocabulary of 37", kRoomy, with(good, [](Request& r) { r.prompt[2] = -1; }), sampling);
  expect_refused("temperature is -1", kRoomy, good, with(sampling, [](Sampling& s) { s.temperature = -1; }));
  expect_refused("top_k is -2", kRoomy, good, with(sampling, [](Sampling& s) { s.truncation.top_k = -2; }));
  expect_refused("top_p 0", kRoomy, good, with(sampling, [](Sampling& s) { s.truncation.top_p = 0; }));
  expect_refused("min_p 1.5", kRoomy, good, with(sampling, [](Sampling& s) { s.truncation.min_p = 1.5f; }));
  const auto limits = [&](auto change) { return with(kRoomy, change); };
  expect_refused("max_context is 161", limits([](RolloutLimits& l) { l.max_context = 161; }), good, sampling);
  expect_refused("max_sequences is 0", limits([](RolloutLimits& l) { l.max_sequences = 0; }), good, sampling);
  expect_refused("max_batched_tokens (39)", limits([](RolloutLimits& l) { l.max_batched_tokens = 39; }), good,
                 sampling);
  expect_refused("lookahead is 0", limits([](RolloutLimits& l) { l.lookahead = 0; }), good, sampling);
  expect_refused("kv_pages is -1", limits([](RolloutLimits& l) { l.kv_pages = -1; }), good, sampling);
}

// Truncated sampling: tokens outside the set are never drawn, and the log-prob is that of what was drawn from.
TEST(Rollout, TopKOfOneIsGreedyWithCertainty) {
  Sampling greedy = mixed_sampling(), one = mixed_sampling();
  greedy.temperature = 0;
  one.truncation.top_k = 1;
  expect_same(generate(kRoomy, mixed_requests(), one), generate(kRoomy, mixed_requests(), greedy), "top_k 1");
}

}  // namespace
}  // namespace pare::test
