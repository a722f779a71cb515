// The cache manager under its policies: what is promised about memory, bits and books.
#include <algorithm>
#include <map>
#include <optional>

#include "base/thread_pool.h"
#include "ops/attention.h"
#include "tests/generator.h"

namespace pare::test {
namespace {

KvSpec spec_of(KvMethod method) {
  KvSpec s;
  s.method = method;
  s.evict.budget = 11;
  s.evict.buffer = 5;
  s.window.size = 3;
  s.streaming_llm.sinks = 2;
  s.window.pooling_kernel = 3;
  s.pyramidkv.beta = 3;
  s.evict.prompt = KvPrompt::protect;
  s.blocks.size = 4;
  s.blocks.count = 4;
  s.blocks.first = 1;
  s.blocks.last = 1;
  s.blocks.dense_layers = 1;
  return s;
}
const std::vector<KvMethod> kEvicting = {KvMethod::streaming_llm, KvMethod::h2o, KvMethod::tova,
                                         KvMethod::snapkv,        KvMethod::rkv, KvMethod::pyramidkv};
std::vector<KvMethod> all_methods() {
  std::vector<KvMethod> all = kEvicting;
  all.insert(all.end(), {KvMethod::quest, KvMethod::block_topk});
  return all;
}

RolloutLimits with(RolloutLimits limits, const KvSpec& spec) {
  limits.kv = spec;
  return limits;
}

std::vector<Completion> generate(const RolloutLimits& limits, const std::vector<Request>& requests,
                                 const Sampling& sampling) {
  Generator g(table_cpu, config(), limits);
  return g.rollout.generate(requests, sampling);
}

// One sequence: its prompt, then tokens one by one; the numbers of response tokens at which compressions happen.
struct Life {
  std::vector<int64_t> compressions;
  int64_t slots = 0, peak = 0;
  bool at_prefill = false;
};
Life live(const KvResidency& r, int64_t prompt, int64_t fed, int64_t layer = 0) {
  Life life;
  life.slots = prompt;
  const auto compression = [&](int64_t tokens) {
    if (!r.due(layer, prompt, life.slots, tokens)) return false;
    life.slots = r.protected_slots(prompt) + r.budget(layer, prompt);
    return true;
  };
  life.at_prefill = compression(prompt);
  EXPECT_EQ(life.slots, r.after_prefill(layer, prompt));
  life.peak = life.slots;
  for (int64_t t = 1; t <= fed; t++) {
    life.slots++;
    life.peak = std::max(life.peak, life.slots);
    if (compression(prompt + t)) life.compressions.push_back(t);
  }
  return life;
}

TEST(KvResidency, CompressionsComeWhenTheBufferIsFull) {
  KvSpec spec;
  spec.method = KvMethod::rkv;
  spec.evict.budget = 512;
  spec.evict.buffer = 128;
  const KvResidency r(spec, 1);
  const Life a = live(r, 100, 4096);
  EXPECT_EQ(a.compressions.size(), 28u);
  EXPECT_EQ((std::vector<int64_t>(a.compressions.begin(), a.compressions.begin() + 3)),
            (std::vector<int64_t>{540, 668, 796}));
  EXPECT_EQ(a.slots, 612);
  EXPECT_EQ(a.peak, 640);
  const Life b = live(r, 600, 4096);
  EXPECT_FALSE(b.at_prefill);
  EXPECT_EQ(b.compressions.size(), 32u);
  EXPECT_EQ(b.compressions[0], 40);
  EXPECT_EQ(b.slots, 600);
  const Life c = live(r, 700, 4096);
  EXPECT_TRUE(c.at_prefill);
  EXPECT_EQ(c.compressions.size(), 32u);
  EXPECT_EQ(c.compressions[0], 128);
  EXPECT_EQ(c.slots, 512);
  const Life d = live(r, 100, 500);
  EXPECT_TRUE(d.compressions.empty());
  EXPECT_EQ(d.slots, 600);
}

// What admission relies on, against a life lived token by token, for every rule about prompts.
TEST(KvResidency, PeaksAreThoseOfALife) {
  for (const KvPrompt prompt : {KvPrompt::compress, KvPrompt::protect})
    for (const KvTrigger trigger : {KvTrigger::buffer_full, KvTrigger::prefill_once})
      for (const int64_t buffer : {0, 1, 7}) {
        KvSpec spec = spec_of(KvMethod::snapkv);
        spec.evict.prompt = prompt;
        spec.evict.trigger = trigger;
        spec.evict.buffer = buffer;
        for (const KvMethod method : {KvMethod::snapkv, KvMethod::pyramidkv}) {
          spec.method = method;
          const KvResidency r(spec, 4);
          for (int64_t layer = 0; layer < 4; layer++)
            for (const int64_t n : {1, 8, 9, 10, 17, 18, 40})
              for (const int64_t fed : {0, 1, 5, 16, 50}) {
                EXPECT_EQ(r.peak(layer, n, fed), live(r, n, fed, layer).peak)
                    << layer << " " << n << " " << fed << " " << buffer;
                EXPECT_LE(r.peak(layer, n, fed), r.peak(0, n, fed)) << "what plans rely on";
              }
        }
      }
}

TEST(KvResidency, PyramidsHaveTheMeanBudget) {
  KvSpec spec;
  spec.method = KvMethod::pyramidkv;
  spec.evict.budget = 108;
  spec.window.size = 8;
  spec.pyramidkv.beta = 20;
  const KvResidency r(spec, 5);  // 100 past tokens: least 5, most 195, step 47
  for (const auto& [layer, budget] : std::vector<std::pair<int, int>>{{0, 203}, {1, 156}, {2, 109}, {3, 62}, {4, 15}})
    EXPECT_EQ(r.budget(layer, 1000), budget);
}

// The lengths that the published code (KVCache-Factory, pyramidkv_utils.py) keeps of a prompt, layer by layer.
TEST(KvResidency, PyramidsOfAPromptArePublished) {
  KvSpec spec;
  spec.method = KvMethod::pyramidkv;
  spec.evict.budget = 108;
  spec.window.size = 8;
  spec.pyramidkv.beta = 20;
  spec.evict.trigger = KvTrigger::prefill_once;
  const KvResidency r(spec, 5);
  for (const auto& [prompt, kept] : std::map<int64_t, std::vector<int64_t>>{{14, {14, 14, 14, 14, 14}},
                                                                            {107, {107, 107, 107, 107, 107}},
                                                                            {108, {108, 108, 108, 108, 108}},
                                                                            {109, {108, 108, 108, 108, 108}},
                                                                            {199, {108, 108, 108, 108, 108}},
                                                                            {200, {200, 154, 108, 62, 16}},
                                                                            {202, {202, 155, 108, 61, 14}},
                                                                            {203, {203, 156, 109, 62, 15}},
                                                                            {5000, {203, 156, 109, 62, 15}}})
    for (int64_t l = 0; l < 5; l++) EXPECT_EQ(r.after_prefill(l, prompt), kept[l]) << prompt << " layer " << l;
}

// A prompt that fits the mean budget is left alone, although the last layers hold less: the run is the dense one.
TEST(KvPolicy, PyramidsLeaveAloneWhatFits) {
  Rng rng(rng_key(7, RngStream::test, 9));
  const Request request{random_ids(rng, 40, config().vocab), {5}, 30};
  const Sampling greedy{.temperature = 0, .key = 3, .eos = {}};
  const auto dense = generate(kRoomy, {request}, greedy);
  for (const KvTrigger trigger : {KvTrigger::prefill_once, KvTrigger::buffer_full})
    for (const int64_t budget : {69, 70, 400}) {
      KvSpec spec = spec_of(KvMethod::pyramidkv);
      spec.evict.prompt = KvPrompt::compress;
      spec.evict.trigger = trigger;
      spec.evict.budget = budget;
      EXPECT_LT(KvResidency(spec, config().layers).budget(config().layers - 1, 1000), budget);
      Generator g(table_cpu, config(), with(kRoomy, spec));
      expect_same(g.rollout.generate({request}, greedy), dense, cat("budget ", budget));
      EXPECT_EQ(g.rollout.stats().compressions, 0);
    }
}

TEST(BlockBudget, FollowsItsSteps) {
  const BlockBudget budget({{0, 4}, {10, 7}, {30, 20}});
  EXPECT_EQ(budget(9), 4);
  EXPECT_EQ(budget(10), 7);
  EXPECT_EQ(budget(29), 7);
  EXPECT_EQ(budget(1000), 20);
  EXPECT_EQ(BlockBudget({{0, 9}, {20, 4}}).most(), 9) << "lists of blocks have room for the largest, wherever it is";
}

TEST(KvPolicy, NothingToLeaveOutIsTheDenseRunBitwise) {
  const auto dense = generate(kRoomy, mixed_requests(), mixed_sampling());
  for (const KvMethod method : all_methods())
    for (const KvPrompt prompt : {KvPrompt::compress, KvPrompt::protect}) {
      KvSpec spec = spec_of(method);
      spec.evict.budget = 1000;
      spec.blocks.count = 40;
      spec.evict.prompt = prompt;
      Generator g(table_cpu, config(), with(kRoomy, spec));
      expect_same(g.rollout.generate(mixed_requests(), mixed_sampling()), dense,
                  cat("method ", static_cast<int>(method)));
      EXPECT_EQ(g.rollout.stats().compressions, 0);
      EXPECT_EQ(g.rollout.stats().resident, g.rollout.stats().dense);
      EXPECT_EQ(g.rollout.stats().read, g.rollout.stats().dense);
      EXPECT_FALSE(g.ledger.phases.at("main").contains("kv_block_select")) << "there is nothing to choose from";
    }
}

TEST(KvPolicy, ADenseCallIsDenseWhateverThePolicy) {
  const auto dense = generate(kRoomy, mixed_requests(), mixed_sampling());
  for (const KvMethod method : all_methods()) {
    Generator g(table_cpu, config(), with(kRoomy, spec_of(method)));
    const auto sparse = g.rollout.generate(mixed_requests(), mixed_sampling());
    size_t different = 0;
    for (size_t i = 0; i < dense.size(); i++) different += sparse[i].logprobs != dense[i].logprobs;
    EXPECT_GE(different, 4u) << "method " << static_cast<int>(method);
    Sampling sampling = mixed_sampling();
    sampling.dense = true;
    expect_same(g.rollout.generate(mixed_requests(), sampling), dense, "dense call");
    expect_same(g.rollout.generate(mixed_requests(), mixed_sampling()), sparse, "after a dense call");
  }
}

// A sequence alone, in any batch, with others joining and leaving, with a pool that is just large enough: the same.
TEST(KvPolicy, TheScheduleChangesNothing) {
  const auto requests = mixed_requests();
  for (const KvMethod method : all_methods())
    for (const KvPrompt prompt : {KvPrompt::protect, KvPrompt::compress}) {
      if (method == KvMethod::quest && prompt == KvPrompt::compress) continue;  // prompts do not concern it
      KvSpec spec = spec_of(method);
      spec.evict.prompt = prompt;
      const KvResidency residency(spec, config().layers);
      int64_t least = 0;
      for (const Request& r : requests) least = std::max(least, Scheduler::pages_needed(residency, r));
      const auto alone = one_by_one(with(kAlone, spec), requests);
      for (const RolloutLimits& limits : std::vector<RolloutLimits>{
               kRoomy,
               {.max_sequences = 2, .max_batched_tokens = 3, .max_context = 160},
               {.max_sequences = 7, .max_batched_tokens = 7, .max_context = 73, .kv_pages = least},
               {.max_sequences = 40, .max_batched_tokens = 50, .max_context = 160, .kv_pages = 2 * least + 3}}) {
        Generator g(table_cpu, config(), with(limits, spec));
        expect_same(g.rollout.generate(requests, mixed_sampling()), alone,
                    cat("method ", static_cast<int>(method), ", ", limits.max_sequences, " sequences"));
        EXPECT_EQ(g.rollout.cache().pool().used(), 0);
        EXPECT_EQ(g.rollout.stats().compressions > 0, spec.evicts());
      }
    }
}

// Samples that share the pages of a prompt which may be evicted, and do evict it: each has a state of its own.
TEST(KvPolicy, SharedPromptsAreChangedByNobodyElse) {
  const auto requests = mixed_requests();  // one has 5 samples of a prompt of 40 tokens
  for (const KvMethod method : kEvicting) {
    KvSpec spec = spec_of(method);
    spec.evict.prompt = KvPrompt::compress;
    spec.evict.budget = 42;
    spec.evict.buffer = 2;
    const auto alone = one_by_one(with(kAlone, spec), requests);
    const KvResidency residency(spec, config().layers);
    int64_t least = 0;
    for (const Request& r : requests) least = std::max(least, Scheduler::pages_needed(residency, r));
    for (const int64_t pages : {int64_t{0}, 2 * least}) {
      RolloutLimits limits = with(kRoomy, spec);
      limits.kv_pages = pages;
      Generator g(table_cpu, config(), limits);
      expect_same(g.rollout.generate(requests, mixed_sampling()), alone, cat("method ", static_cast<int>(method)));
      EXPECT_GT(g.rollout.stats().compressions, 0);
    }
  }
}

// A pool of the default size holds every prompt that is allowed.
TEST(KvPolicy, TheDefaultPoolHoldsTheWorstPrompt) {
  KvSpec spec = spec_of(KvMethod::streaming_llm);
  spec.evict.prompt = KvPrompt::compress;
  spec.evict.trigger = KvTrigger::prefill_once;
  spec.evict.budget = 20;
  RolloutLimits limits = with({.max_sequences = 3, .max_batched_tokens = 9, .max_context = 90}, spec);
  limits.max_prompt = 34;
  Generator g(table_cpu, config(), limits);
  const KvResidency r(spec, config().layers);
  int64_t most = 0;
  for (int64_t prompt = 1; prompt <= 34; prompt++) most = std::max(most, r.peak(0, prompt, 90 - prompt));
  EXPECT_GT(most, r.peak(0, 34, 90 - 34)) << "the longest prompt is not the worst";
  EXPECT_EQ(g.rollout.cache().pool().pages(), 4 * config().layers * ((most + 15) / 16));
}

// Merging, likewise; also groups that share a prompt whose thresholds they inherit.
TEST(KvPolicy, MergingDoesNotDependOnTheSchedule) {
  const auto requests = mixed_requests();
  const auto evicted = generate(with(kRoomy, spec_of(KvMethod::h2o)), requests, mixed_sampling());
  for (const KvMergeMethod merge : {KvMergeMethod::d2o, KvMergeMethod::value}) {
    KvSpec spec = spec_of(KvMethod::h2o);
    spec.merge.method = merge;
    spec.evict.prompt = merge == KvMergeMethod::d2o ? KvPrompt::compress : KvPrompt::protect;
    if (merge == KvMergeMethod::d2o) spec.merge.keys = MergeKeys::unrotated;
    const auto alone = one_by_one(with(kAlone, spec), requests);
    expect_same(generate(with(kRoomy, spec), requests, mixed_sampling()), alone, "together");
    expect_same(generate(with({.max_sequences = 3, .max_batched_tokens = 19, .max_context = 73}, spec), requests,
                         mixed_sampling()),
                alone, "a few at a time");
    size_t different = 0;
    for (size_t i = 0; i < alone.size(); i++) different += alone[i].logprobs != evicted[i].logprobs;
    EXPECT_GE(different, 4u);
    spec.evict.budget = 1000;
    expect_same(generate(with(kRoomy, spec), requests, mixed_sampling()), generate(kRoomy, requests, mixed_sampling()),
                "nothing evicted");
  }
}

TEST(KvPolicy, ThreadsChangeNothing) {
  const int before = threads();
  for (const KvMethod method : all_methods()) {
    set_threads(1);
    const auto one = generate(with(kRoomy, spec_of(method)), mixed_requests(), mixed_sampling());
    set_threads(2);
    expect_same(generate(with(kRoomy, spec_of(method)), mixed_requests(), mixed_sampling()), one, "threads");
  }
  set_threads(before);
}

// A single long response: the pool's free pages after every pass, and what is resident, are as predicted.
TEST(KvPolicy, CompressionsFreePages) {
  for (const KvMethod method : kEvicting)
    for (const KvPrompt prompt : {KvPrompt::protect, KvPrompt::compress}) {
      KvSpec spec = spec_of(method);
      spec.evict.prompt = prompt;
      spec.evict.budget = 20;
      spec.evict.buffer = 29;
      Generator g(table_cpu, config(), with(kRoomy, spec));
      const KvResidency r(spec, config().layers);
      Rng rng(rng_key(1, RngStream::test, 9));
      const Request request{random_ids(rng, 37, config().vocab), {7}, 100};
      std::vector<int64_t> slots(config().layers, 37);
      int64_t tokens = 36, compressions = 0;
      Sampling sampling = mixed_sampling();
      sampling.eos = {};
      double resident = 0, dense = 0;
      const int64_t all = g.rollout.cache().pool().pages();
      g.rollout.generate({request}, sampling, [&](const RolloutStats& stats) {
        tokens++;
        int64_t pages = 0;
        for (int l = 0; l < config().layers; l++) {
          if (tokens > 37) slots[l]++;
          if (tokens > 37) resident += static_cast<double>(slots[l]) / config().layers;
          if (r.due(l, 37, slots[l], tokens)) {
            slots[l] = r.protected_slots(37) + r.budget(l, 37);
            compressions++;
          }
          pages += (slots[l] + kPageSlots - 1) / kPageSlots;
        }
        if (tokens > 37) dense += static_cast<double>(tokens);
        if (stats.finished == 0) {
          EXPECT_EQ(g.rollout.cache().pool().free(), all - pages) << tokens;
        }
        EXPECT_EQ(stats.compressions, compressions);
        EXPECT_LE(stats.peak_resident, static_cast<double>(r.protected_slots(37) + 20 + 29));
        EXPECT_NEAR(stats.resident, resident, 1e-6);
        EXPECT_EQ(stats.dense, dense);
      });
      EXPECT_EQ(tokens, 136);
      EXPECT_GE(compressions, 4);
    }
}

// In bytes: a pool that holds two dense sequences holds the predicted number of compressed ones.
TEST(KvPolicy, MoreSequencesFitUnderABudget) {
  Rng rng(rng_key(2, RngStream::test, 9));
  std::vector<Request> requests;
  for (uint64_t i = 0; i < 12; i++) requests.push_back({random_ids(rng, 16, config().vocab), {i}, 129});
  const KvResidency dense({}, config().layers);
  const int64_t pool = 2 * Scheduler::pages_needed(dense, requests[0]);
  const RolloutLimits limits{.max_sequences = 12, .max_batched_tokens = 400, .max_context = 160, .kv_pages = pool};
  Sampling sampling = mixed_sampling();
  sampling.eos = {};
  Generator plain(table_cpu, config(), limits);
  plain.rollout.generate(requests, sampling);
  EXPECT_EQ(plain.rollout.stats().peak_sequences, 2);
  KvSpec spec = spec_of(KvMethod::rkv);
  spec.evict.budget = 24;
  spec.evict.buffer = 8;
  const KvResidency r(spec, config().layers);
  Generator sparse(table_cpu, config(), with(limits, spec));
  sparse.rollout.generate(requests, sampling);
  EXPECT_EQ(sparse.rollout.stats().peak_sequences, pool / Scheduler::pages_needed(r, requests[0]));
  EXPECT_GE(sparse.rollout.stats().peak_sequences, 6);
  EXPECT_LE(sparse.rollout.stats().peak_pages, pool);
}

// FLOPs and bytes of attention follow what is resident or read, to the FLOP; `null` keeps the same books.
TEST(KvPolicy, TheLedgerFalls) {
  Rng rng(rng_key(4, RngStream::test, 9));
  const Request request{random_ids(rng, 21, config().vocab), {5}, 90};
  const ModelConfig c = config();
  const auto books = [&](const Table& table, const KvSpec& spec) {
    Generator g(table, c, with(kRoomy, spec));
    g.rollout.generate({request}, {.key = 3, .eos = {}});
    return std::pair(g.ledger.phases.at("main"), g.kv.peak());
  };
  const int64_t dense = books(table_cpu, {}).first.at("attn_paged").cost.flops;
  for (const KvMethod method : all_methods()) {
    const KvSpec spec = spec_of(method);
    const auto [real, bytes] = books(table_cpu, spec);
    const auto [planned, planned_bytes] = books(table_null, spec);
    EXPECT_EQ(bytes, planned_bytes);
    ASSERT_EQ(real.size(), planned.size());
    for (const auto& [op, line] : real) {
      EXPECT_EQ(line.calls, planned.at(op).calls) << op;
      EXPECT_EQ(line.cost.flops, planned.at(op).cost.flops) << op;
      EXPECT_EQ(line.cost.read, planned.at(op).cost.read) << op;
      EXPECT_EQ(line.cost.written, planned.at(op).cost.written) << op;
    }
    const KvResidency r(spec, c.layers);
    const BlockBudget budget(spec);
    int64_t pairs = c.layers * 21 * 22 / 2, compared = 0;
    for (int64_t l = 0; l < c.layers; l++) {
      int64_t slots = r.after_prefill(l, 21);
      for (int64_t tokens = 22; tokens <= 21 + 89; tokens++) {
        slots++;
        pairs += spec.sparse_reads() && l >= spec.blocks.dense_layers
                     ? listed_slots(tokens, budget(blocks_of(tokens, spec.blocks.size)), spec.blocks.size)
                     : slots;
        if (!r.due(l, 21, slots, tokens)) continue;
        compared += (slots - 21) * (slots - 21);
        slots = 21 + r.budget(l, 21);
      }
    }
    const bool mass = method == KvMethod::h2o;
    const int64_t flops = real.at("attn_paged").cost.flops;
    EXPECT_EQ(flops, (4 * c.head_dim + (mass ? 2 : 0)) * c.heads * pairs) << static_cast<int>(method);
    EXPECT_LT(flops, dense * 3 / 4) << static_cast<int>(method);
    if (method == KvMethod::rkv) {
      EXPECT_EQ(real.at("kv_redundancy").cost.flops, 2 * c.kv_heads * c.head_dim * compared);
    }
    if (!spec.sparse_reads()) continue;
    int64_t scored = 0, pages = 2;  // of the prompt, and one for each token
    for (int64_t tokens = 22; tokens <= 21 + 89; tokens++) {
      const int64_t n = blocks_of(tokens, spec.blocks.size);
      if (n > budget(n)) scored += n - spec.blocks.first - spec.blocks.last;
      pages++;
    }
    const bool minmax = method == KvMethod::quest;
    const int64_t sparse = c.layers - spec.blocks.dense_layers;
    EXPECT_EQ(real.at("kv_block_select").cost.flops,
              sparse * scored * c.head_dim * (minmax ? 4 * c.heads : 2 * c.kv_heads));
    EXPECT_EQ(real.at("kv_block_summary").cost.flops, sparse * pages * 16 * c.kv_heads * c.head_dim * (minmax ? 2 : 1));
  }
}

// A choice that is shared is the same for all heads.
TEST(KvPolicy, ScopesShareTheirChoice) {
  Rng rng(rng_key(6, RngStream::test, 9));
  const Request request{random_ids(rng, 9, config().vocab), {5}, 60};
  const auto traces = [&](KvScope scope) {
    KvSpec spec = spec_of(KvMethod::rkv);
    spec.evict.scope = scope;
    Generator g(table_cpu, config(), with(kRoomy, spec));
    std::map<int, std::vector<KvTrace>> by_tokens;
    Sampling sampling{.key = 3, .eos = {}};
    sampling.trace = [&](const PagedRun& run, KvTrace t) { by_tokens[run.tokens].push_back(std::move(t)); };
    g.rollout.generate({request}, sampling);
    return by_tokens;
  };
  const auto head = [](const KvTrace& t, int64_t h) {
    const std::vector<int32_t> kept = t.kept(h);
    return std::vector<int32_t>(kept.begin() + t.first, kept.end());
  };
  bool heads_differ = false, layers_differ = false;
  for (const auto& [tokens, compressions] : traces(KvScope::per_head)) {
    ASSERT_EQ(static_cast<int64_t>(compressions.size()), config().layers);
    for (const KvTrace& t : compressions) {
      heads_differ |= head(t, 0) != head(t, 1);
      for (int64_t h = 0; h < config().kv_heads; h++) {
        const std::vector<int32_t> kept = head(t, h);
        ASSERT_EQ(kept.size(), 11u);
        EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end(), std::less_equal<>()));
        EXPECT_EQ((std::vector<int32_t>(kept.end() - 3, kept.end())), (std::vector<int32_t>{22, 23, 24})) << tokens;
        EXPECT_GE(kept[0], 9);
      }
    }
  }
  for (const auto& [tokens, compressions] : traces(KvScope::per_layer))
    for (const KvTrace& t : compressions) {
      EXPECT_EQ(head(t, 0), head(t, 1));
      layers_differ |= t.keep != compressions[0].keep;
    }
  EXPECT_TRUE(heads_differ);
  EXPECT_TRUE(layers_differ);
}

// Lists of blocks have room for the budget, and for no more blocks than a sequence has.
TEST(KvPolicy, BlockListsHoldTheBudgetOrTheSequence) {
  const auto bytes = [](int64_t count) {
    KvSpec spec = spec_of(KvMethod::quest);
    spec.blocks.count = count;
    return Generator(table_null, config(), with(kRoomy, spec)).kv.peak();
  };
  EXPECT_LT(bytes(4), bytes(40));
  EXPECT_EQ(bytes(40), bytes(1000)) << "160 tokens are 40 blocks of 4";
}

// A compressor on a cache of its own, with sequences that are prompts and nothing else.
struct Compression {
  explicit Compression(KvPrompt prompt) : spec(spec_of(KvMethod::snapkv)) {
    spec.evict.prompt = prompt;
    world.device.ledger = &ledger;
    cache.emplace(world.model.config, spec, world.device, kv, DType::f32, 1000, 80, 160);
    policy = make_kv_policy(spec, world.model.config, *cache, kv);
    compressor.emplace(world.model, spec, *cache, *policy, kv);
    cache->reserve(1000);
  }
  // A sequence of so many tokens, all of the prompt.
  PagedRun open(int32_t tokens) {
    const int sequence = cache->open(12);
    cache->append(sequence, tokens);
    return {sequence, 0, tokens, tokens, tokens, 0};
  }
  KvSpec spec;
  Ledger ledger;
  World world{table_cpu, config()};
  Arena kv{"kv", *table_cpu.memory, roomy(table_cpu)}, scratch{"scratch", *table_cpu.memory, roomy(table_cpu)};
  std::optional<KvCache> cache;
  std::unique_ptr<KvPolicy> policy;
  std::optional<Compressor> compressor;
};

// The scratch memory of a pass is bounded, however many sequences are due together.
TEST(KvCompressor, ManyCompressionsTakeTheMemoryOfAFew) {
  Compression few(KvPrompt::compress), many(KvPrompt::compress);
  std::vector<PagedRun> runs;
  for (int i = 0; i < 80; i++) runs.push_back(many.open(33));
  many.compressor->compress(runs, many.scratch);
  runs.resize(32);
  for (PagedRun& run : runs) run = few.open(33);
  few.compressor->compress(runs, few.scratch);
  EXPECT_EQ(many.scratch.peak(), few.scratch.peak());
  for (int i = 0; i < 80; i++) EXPECT_EQ(many.cache->slots(i, 1), 11);
}

// Pages that siblings still read are replaced.  Their slots are copied only if they stay where they are.
TEST(KvCompressor, SharedPagesAreCopiedForProtectedSlotsAlone) {
  for (const KvPrompt prompt : {KvPrompt::compress, KvPrompt::protect}) {
    Compression c(prompt);
    const PagedRun parent = c.open(48);
    PagedRun child = parent;
    child.sequence = c.cache->fork(parent.sequence, 12, 48);
    child.prompt = 5;
    c.compressor->compress({child}, c.scratch);
    EXPECT_EQ(c.ledger.phases.at("main").contains("kv_copy_pages"), prompt == KvPrompt::protect);
    EXPECT_EQ(c.cache->slots(child.sequence, 0), prompt == KvPrompt::compress ? 11 : 16);
    EXPECT_EQ(c.cache->slots(parent.sequence, 0), 48);
  }
}

// plan() finds the most that any generate() takes, and hardly more: compressions may come at other lengths, and in
// bf16 fewer sequences may decode in the pass with most rows.
TEST(KvPolicy, ThePlannedPassIsTheLargest) {
  std::vector<KvSpec> specs = {{}};
  for (const KvMethod method : {KvMethod::h2o, KvMethod::rkv, KvMethod::pyramidkv, KvMethod::quest})
    for (const KvPrompt prompt : {KvPrompt::protect, KvPrompt::compress}) {
      specs.push_back(spec_of(method));
      specs.back().evict.prompt = prompt;
    }
  for (const KvSpec& spec : specs)
    for (const auto& [sequences, rows, lookahead, act, pages] : {std::tuple{5, 29, 1, DType::f32, 0},
                                                                 {5, 29, 8, DType::f32, 0},
                                                                 {3, 3, 8, DType::f32, 0},
                                                                 {5, 29, 8, DType::bf16, 0},
                                                                 {3, 3, 1, DType::bf16, 0},
                                                                 {3, 3, 1, DType::bf16, 500}}) {
      RolloutLimits limits{.max_sequences = sequences,
                           .max_batched_tokens = rows,
                           .max_context = 73,
                           .kv_pages = pages,
                           .max_prompt = 40,
                           .lookahead = lookahead};
      limits.kv = spec;
      Device device(table_null);
      Arena weights("weights", no_memory), most("most", no_memory);
      Rollout::plan(Model(config(), device, weights, act, false), limits, most);
      size_t largest = 0;
      for (const size_t prompt : {13u, 17u, 33u, 40u})
        for (const uint64_t samples : {1u, 8u}) {
          Generator g(table_null, config(), limits, act);
          std::vector<Request> requests(9, {std::vector<int32_t>(prompt, 1), {}, 73 - static_cast<int>(prompt)});
          for (Request& r : requests)
            for (uint64_t k = 0; k < samples; k++) r.uids.push_back(k);
          g.rollout.generate(requests, {.key = 3, .eos = {}});
          largest = std::max(largest, g.scratch.peak());
        }
      SCOPED_TRACE(cat("method ", static_cast<int>(spec.method), ", prompts ", static_cast<int>(spec.evict.prompt),
                       ", ", sequences, " sequences, ", rows, " rows, lookahead ", lookahead, ", ", dtype_name(act),
                       ", ", pages, " pages"));
      EXPECT_LE(largest, most.peak());
      const size_t more = spec.method != KvMethod::dense ? largest / 64 : act == DType::bf16 ? 64 : 0;
      EXPECT_LE(most.peak(), largest + more);
    }
}

TEST(KvPolicy, ContradictionsAreRefused) {
  const auto refused = [](const std::string& part, KvMethod method, void (*change)(KvSpec&)) {
    KvSpec spec = spec_of(method);
    EXPECT_NO_THROW(check_kv(spec));
    change(spec);
    try {
      check_kv(spec);
      ADD_FAILURE() << "accepted: " << part;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  refused("rollout.kv.window.size = 11", KvMethod::snapkv, [](KvSpec& s) { s.window.size = 11; });
  refused("rollout.kv.window.size = 0", KvMethod::snapkv, [](KvSpec& s) { s.window.size = 0; });
  refused("rollout.kv.streaming_llm.sinks = 11", KvMethod::streaming_llm,
          [](KvSpec& s) { s.streaming_llm.sinks = 11; });
  refused("pooling_kernel = 4", KvMethod::rkv, [](KvSpec& s) { s.window.pooling_kernel = 4; });
  refused("prefill_once", KvMethod::snapkv, [](KvSpec& s) { s.evict.trigger = KvTrigger::prefill_once; });
  refused("values only", KvMethod::snapkv, [](KvSpec& s) {
    s.merge.method = KvMergeMethod::value;
    s.merge.keys = MergeKeys::unrotated;
  });
  refused("evicts none", KvMethod::quest, [](KvSpec& s) { s.merge.method = KvMergeMethod::d2o; });
  refused("rollout.kv.blocks.size = 8", KvMethod::quest, [](KvSpec& s) { s.blocks.size = 8; });
  refused("rollout.kv.blocks.count = 1", KvMethod::quest, [](KvSpec& s) { s.blocks.count = 1; });
  refused("blocks.last = 0", KvMethod::block_topk, [](KvSpec& s) { s.blocks.last = 0; });
}

}  // namespace
}  // namespace pare::test
