// Spans: a choice of blocks in two steps, whose cost does not follow the length of the context.
#include <algorithm>
#include <numeric>
#include <set>

#include "base/thread_pool.h"
#include "tests/block_cache.h"
#include "tests/generator.h"

namespace pare::test {

namespace {

// Block by block, as the comment on `competition` says.
TEST(Spans, TheCountsAreThoseOfTheRule) {
  for (const int64_t block : {4, 16})
    for (const int64_t first : {0, 1, 5, 70})
      for (const int64_t last : {1, 2, 17})
        for (const int64_t spans : {0, 1, 3})
          for (int64_t all = first + last; all < 400; all += 7) {
            const int64_t each = kSpanSlots / block;
            std::vector<int64_t> between;  // spans that hold no other block
            int64_t begin = -1;
            for (int64_t s = 0; (s + 1) * each <= all; s++)
              if (s * each >= first && (s + 1) * each <= all - last) {
                if (begin < 0) begin = s;
                between.push_back(s);
              }
            const auto n = std::ssize(between);
            const bool compete = spans > 0 && n > spans;
            const Competition<int64_t> c = competition(all, first, last, block, spans);
            ASSERT_EQ(c.spans, compete ? n : 0) << all << " " << first << " " << last;
            if (compete) {
              EXPECT_EQ(c.first_span, begin);
            }
            EXPECT_EQ(c.blocks, all - first - last - (compete ? (n - spans) * each : 0));
            EXPECT_EQ(c.scored(), c.spans + c.blocks);
          }
}

class KvSpans : public testing::TestWithParam<const Table*> {
 protected:
  const Table& table = *GetParam();
};

const Heads kSome[] = {{6, 2, 20}, {2, 1, 8}};
const Choice kSpanChoices[] = {
    {kMinmax, 4, 0, 1, 1}, {kMinmax, 16, 1, 2, 2}, {kMean, 4, 2, 1, 1}, {kMean, 16, 17, 1, 1}};
int32_t budget_of(const Choice& c) { return c.first + c.last + 5; }

TEST_P(KvSpans, WhereAllSpansStayTheChoiceIsThePlainOne) {
  for (const Heads& h : kSome)
    for (Choice choice : kSpanChoices)
      for (const int32_t slots : {300, 777, 1290}) {
        const int64_t n = blocks_of(slots, choice.block);
        choice.spans = 1;
        const auto competing = static_cast<int32_t>(competition(n, choice.first, choice.last, choice.block, 1).spans);
        const auto choose = [&](int32_t spans) {
          choice.spans = spans;
          Cache c(table, h, choice, 1, slots);
          fill(c, slots);
          const Buffer q = random_rows("q", 1, h.heads, h.dim);
          const auto read = c.decode({0}, q.tensor(), {budget_of(choice)});
          return std::tuple(read.blocks.element_bytes(), read.score.element_bytes(), read.o.element_bytes());
        };
        const auto plain = choose(0);
        EXPECT_EQ(choose(std::max(1, competing)), plain);
        EXPECT_EQ(choose(1000), plain);
        if (competing > 1) {
          EXPECT_NE(choose(1), plain);
        }
      }
}

// Whole keys and queries, so that every sum is exact and many scores are equal; the oracle goes through all slots.
TEST_P(KvSpans, OnlyBlocksOfTheBestSpansAreChosen) {
  const Heads h = {4, 2, 3};
  const int64_t group = h.heads / h.kv_heads;
  const int32_t slots = 1290;
  const auto whole = [&](const std::string& name, int64_t rows, int64_t heads) {
    std::vector<double> v;
    for (const int32_t x : below(name, rows * heads * h.dim, 5)) v.push_back(x - 2);
    return act(DType::f32, {rows, heads, h.dim}, v);
  };
  const Buffer k = whole("k", slots, h.kv_heads);
  for (const Choice& choice : kSpanChoices) {
    Cache c(table, h, choice, 1, slots);
    c.append({{0, slots}}, k.tensor(), k.tensor());
    const int64_t all = blocks_of(slots, choice.block), each = kSpanSlots / choice.block;
    for (int step = 0; step < 8; step++) {
      const Buffer q = whole(cat("q", step), 1, h.heads);
      const int32_t budget = budget_of(choice);
      const std::vector<int32_t> lists = ints(c.decode({0}, q.tensor(), {budget}).blocks);
      for (int64_t kv = 0; kv < h.kv_heads; kv++) {
        const auto score = [&](int64_t begin, int64_t end) {
          double best = -INFINITY, mean = 0;
          for (int64_t g = 0; g < group; g++) {
            double bound = 0;
            for (int64_t d = 0; d < h.dim; d++) {
              double low = INFINITY, high = -INFINITY, sum = 0;
              for (int64_t s = begin; s < end; s++) {
                const double x = k.get((s * h.kv_heads + kv) * h.dim + d);
                low = std::min(low, x), high = std::max(high, x), sum += x;
              }
              const double x = q.get((kv * group + g) * h.dim + d);
              bound += std::max(x * low, x * high);
              mean += x * sum / static_cast<double>((end - begin) * group);
            }
            best = std::max(best, bound);
          }
          return choice.kind == kMinmax ? best : mean;
        };
        // (-score, number): the smallest are the best, ties to the smaller number.
        std::set<std::pair<double, int64_t>> spans, blocks;
        for (int64_t s = 0; s < slots / kSpanSlots; s++)
          if (s * each >= choice.first && (s + 1) * each <= all - choice.last)
            spans.emplace(-score(s * kSpanSlots, (s + 1) * kSpanSlots), s);
        ASSERT_GT(std::ssize(spans), choice.spans);
        std::set<int64_t> left_out;
        for (auto s = std::next(spans.begin(), choice.spans); s != spans.end(); ++s) left_out.insert(s->second);
        for (int64_t b = choice.first; b < all - choice.last; b++)
          if (!left_out.contains(b / each)) blocks.emplace(-score(b * choice.block, (b + 1) * choice.block), b);
        std::vector<int32_t> expected;
        for (int32_t b = 0; b < choice.first; b++) expected.push_back(b);
        for (const auto& [s, b] : blocks)
          if (std::ssize(expected) < budget - choice.last) expected.push_back(static_cast<int32_t>(b));
        for (int64_t b = all - choice.last; b < all; b++) expected.push_back(static_cast<int32_t>(b));
        std::sort(expected.begin(), expected.end());
        EXPECT_EQ((std::vector<int32_t>(lists.begin() + kv * budget, lists.begin() + (kv + 1) * budget)), expected);
      }
    }
  }
}

// Token by token, in runs that end anywhere, and behind a fork in the middle of a span.
TEST_P(KvSpans, SummariesDoNotDependOnHowTokensCame) {
  const Heads h = {2, 2, 20};
  for (const Choice& choice : kSpanChoices) {
    const int64_t slots = 530;
    const Buffer k = random_rows("k", slots, h.kv_heads, h.dim);
    std::vector<Bytes> results;
    for (const std::vector<int32_t>& runs : {std::vector<int32_t>{530},
                                             std::vector<int32_t>(530, 1),
                                             std::vector<int32_t>{250, 6, 1, 255, 18},
                                             {200, 57, 255, 18}}) {
      Cache c(table, h, choice, 1, slots);
      int32_t row = 0;
      for (int32_t n : runs) {
        c.append({{0, n}}, k.tensor().rows(row, n), k.tensor().rows(row, n));
        row += n;
      }
      results.push_back(c.span_summary.element_bytes());
    }
    for (size_t i = 1; i < results.size(); i++) EXPECT_EQ(results[0], results[i]) << i;

    Cache c(table, h, choice, 2, slots);
    const auto page = [&](int64_t sequence, int64_t slot) {
      return static_cast<int32_t>(c.page_table.get(sequence * c.per_sequence + slot / 16));
    };
    c.append({{0, 250}}, k.tensor().rows(0, 250), k.tensor().rows(0, 250));
    for (int64_t p = 0; p < 15; p++) c.page_table.set(c.per_sequence + p, page(0, p * 16));
    const Buffer copy = i32({1, 2}, {page(0, 240), page(1, 240)});
    KvCopyPages fork{};
    fork.k_pages = c.k_pages.tensor(), fork.v_pages = c.v_pages.tensor(), fork.pairs = copy.tensor();
    table.kv_copy_pages(fork, {});
    c.used[1] = 250;
    c.append({{0, 280}, {1, 280}},
             act(DType::f32, {560, h.kv_heads, h.dim},
                 [&] {
                   std::vector<double> twice = k.values();
                   twice.erase(twice.begin(), twice.begin() + 250 * h.kv_heads * h.dim);
                   const size_t n = twice.size();
                   twice.resize(2 * n);
                   std::copy_n(twice.begin(), n, twice.begin() + static_cast<int64_t>(n));
                   return twice;
                 }())
                 .tensor(),
             act(DType::f32, {560, h.kv_heads, h.dim}, normal("v", 560 * h.kv_heads * h.dim)).tensor());
    for (const int64_t end : {255, 511})
      EXPECT_EQ(row_bytes(c.span_summary, page(0, end), 1), row_bytes(c.span_summary, page(1, end), 1));
    EXPECT_NE(page(0, 255), page(1, 255));
    EXPECT_NE(row_bytes(c.span_summary, page(0, 255), 1), row_bytes(c.span_summary, page(0, 511), 1));
  }
}

// A response behind a prompt, every row of it as the decode step of the same length.
TEST_P(KvSpans, TheLearnerChoosesWhatTheRolloutDid) {
  const Heads h = {4, 2, 12};
  for (const Choice& choice : kSpanChoices) {
    const int64_t n = 1290;
    const int32_t prompt = 517, budget = budget_of(choice);
    const LearnerBatch batch(h, n, prompt, choice, budget);
    const Learned learner = batch.run(table);
    Cache c(table, h, choice, 1, n);
    c.append({{0, prompt}}, batch.k.tensor().rows(0, prompt), batch.v.tensor().rows(0, prompt));
    int64_t competed = 0;
    for (int64_t row = prompt; row < n; row++) {
      c.append({{0, 1}}, batch.k.tensor().rows(row, 1), batch.v.tensor().rows(row, 1));
      if (row % 5 && (row + 1) % kSpanSlots > 20) continue;
      const auto read = c.decode({0}, batch.q.tensor().rows(row, 1), {budget});
      ASSERT_EQ(row_bytes(learner.o, row, 1), read.o.element_bytes()) << "row " << row;
      ASSERT_EQ(row_bytes(learner.blocks, row, 1), read.blocks.element_bytes()) << "row " << row;
      competed +=
          competition(blocks_of(row + 1, choice.block), choice.first, choice.last, choice.block, choice.spans).spans >
          0;
    }
    EXPECT_GT(competed, 50);
  }
}

TEST_P(KvSpans, RefusesSpansThatCannotSupplyTheBudget) {
  for (const auto& [spans, budget, ok] : {std::tuple{1, 17, true}, {1, 18, false}, {2, 18, true}}) {
    Cache c(table, {1, 1, 8}, {kMean, 16, 0, 1, spans}, 1, 1300);
    fill(c, 1300);
    const Buffer q = random_rows("q", 1, 1, 8);
    if (ok)
      EXPECT_NO_THROW(c.decode({0}, q.tensor(), {budget}));
    else
      EXPECT_THROW(c.decode({0}, q.tensor(), {budget}), std::logic_error);
  }
}

INSTANTIATE_TEST_SUITE_P(Tables, KvSpans, testing::Values(&table_ref, &table_cpu),
                         [](const auto& info) { return std::string(info.param->name); });

// ---- rollouts

ModelConfig long_config() {
  ModelConfig c = tiny_config("qwen3", false);
  c.max_position = 1100;
  return c;
}
KvSpec spec_of(KvMethod method, int64_t spans, KvChoose choose = KvChoose::token) {
  KvSpec s;
  s.method = method, s.spans = spans, s.choose = choose;
  s.block = method == KvMethod::quest ? 4 : 16, s.blocks = 5, s.first_blocks = 1, s.last_blocks = 1, s.dense_layers = 1;
  return s;
}
RolloutLimits limits(const KvSpec& spec, int sequences = 8, int batched = 700) {
  return {.max_sequences = sequences, .max_batched_tokens = batched, .max_context = 1100, .kv = spec};
}
// Prompts that end in a span, with it, and before it; groups share theirs.
std::vector<Request> long_requests() {
  Rng rng(rng_key(3, RngStream::test, 6));
  std::vector<Request> requests;
  for (const auto& [prompt, samples, max_new] :
       {std::array{765, 3, 30}, std::array{1024, 1, 40}, std::array{1000, 2, 60}, std::array{250, 1, 20}}) {
    Request r{random_ids(rng, prompt, long_config().vocab), {}, max_new};
    for (int s = 0; s < samples; s++) r.uids.push_back(sequence_uid(1, std::ssize(requests), 0, s));
    requests.push_back(r);
  }
  return requests;
}
Sampling endless() { return {.temperature = 0.9f, .key = rng_key(1, RngStream::sample, 4), .eos = {}}; }

const KvMethod kMethods[] = {KvMethod::quest, KvMethod::block_topk};
const std::pair<KvMethod, KvChoose> kWays[] = {{KvMethod::quest, KvChoose::token},
                                               {KvMethod::quest, KvChoose::block},
                                               {KvMethod::block_topk, KvChoose::token},
                                               {KvMethod::block_topk, KvChoose::block}};

std::vector<Completion> generate(const RolloutLimits& l, const std::vector<Request>& requests) {
  Generator g(table_cpu, long_config(), l);
  return g.rollout.generate(requests, endless());
}

TEST(KvSpansPolicy, TheScheduleChangesNothing) {
  const auto requests = long_requests();
  const int before = threads();
  for (const auto& [method, choose] : kWays) {
    const KvSpec spec = spec_of(method, 1, choose);
    const auto together = generate(limits(spec), requests);
    std::vector<Completion> alone;
    Generator g(table_cpu, long_config(), limits(spec, 1, 1100));
    for (size_t r = 0; r < requests.size(); r++)
      for (size_t s = 0; s < requests[r].uids.size(); s++) {
        alone.push_back(g.rollout.generate({{requests[r].prompt, {requests[r].uids[s]}, requests[r].max_new_tokens}},
                                           endless())[0]);
        alone.back().request = static_cast<int>(r), alone.back().sample = static_cast<int>(s);
      }
    expect_same(together, alone, "alone");
    RolloutLimits pieces = limits(spec, 3, 71);
    pieces.lookahead = 5;
    set_threads(2);
    expect_same(generate(pieces, requests), alone, "in pieces");
    set_threads(before);
  }
}

TEST(KvSpansPolicy, SpansThatAllStayAreThePlainRolloutBitwise) {
  const auto requests = long_requests();
  for (const KvMethod method : kMethods) {
    const auto plain = generate(limits(spec_of(method, 0)), requests);
    expect_same(generate(limits(spec_of(method, 4)), requests), plain, "four spans");
    const auto one = generate(limits(spec_of(method, 1)), requests);
    size_t different = 0;
    for (size_t i = 0; i < plain.size(); i++) different += one[i].logprobs != plain[i].logprobs;
    EXPECT_GE(different, 4u);
  }
}

// The log-probs of a learner that chooses again are those of the rollout, bit by bit.
TEST(KvSpansPolicy, ReplayIsTheRollout) {
  const auto requests = long_requests();
  for (const auto& [method, choose] : kWays) {
    const KvSpec spec = spec_of(method, 1, choose);
    Generator g(table_cpu, long_config(), limits(spec));
    const auto done = g.rollout.generate(requests, endless());
    std::vector<Group> groups;
    for (const Request& r : requests) groups.push_back({r.prompt, {}});
    for (const Completion& c : done) groups[c.request].members.push_back({.tokens = c.tokens, .terms = {}});
    const auto mismatches = [&](int32_t spans, KvChoose choice) {
      KvSpec other = spec;
      other.choose = choice;
      LearnerOptions options{.max_rows = 5000};
      options.blocks =
          BlockReads{.kind = summary_kind(spec),
                     .block = static_cast<int32_t>(spec.block),
                     .first_blocks = 1,
                     .last_blocks = 1,
                     .spans = spans,
                     .dense_layers = spec.dense_layers,
                     .budget = BlockBudget(spec),
                     .chooses = [&](int64_t before, bool first) { return chooses_blocks(other, before, first); }};
      const TokenOuts out = Learner::logprobs(g.model, g.scratch, groups, 0.9, options);
      int64_t n = 0;
      for (const Completion& c : done)
        for (size_t t = 0; t < c.logprobs.size(); t++)
          n += static_cast<float>(out[c.request][c.sample][t].logprob) != c.logprobs[t];
      return n;
    };
    EXPECT_EQ(mismatches(1, choose), 0);
    EXPECT_GT(mismatches(0, choose), 50);
    EXPECT_GT(mismatches(1, choose == KvChoose::token ? KvChoose::block : KvChoose::token), 50);
  }
}

// Books by the counts: `null`, which computes nothing, keeps the same; memory grows with the context and never falls.
TEST(KvSpansPolicy, TheLedgerIsThatOfTheCounts) {
  const ModelConfig c = long_config();
  for (const auto& [method, choose] : kWays) {
    const KvSpec spec = spec_of(method, 1, choose);
    const Request request = long_requests()[2];
    const auto books = [&](const Table& table, const KvSpec& s, const Request& r) {
      Generator g(table, c, limits(s));
      g.rollout.generate({r}, endless());
      return std::pair(g.ledger.phases.at("main"), std::pair(g.kv.peak(), g.scratch.peak()));
    };
    const auto [real, bytes] = books(table_cpu, spec, request);
    const auto [planned, planned_bytes] = books(table_null, spec, request);
    EXPECT_EQ(real, planned);
    EXPECT_EQ(bytes, planned_bytes);
    const int64_t prompt = std::ssize(request.prompt), samples = std::ssize(request.uids);
    int64_t scored = 0, pages = blocks_of(prompt, 16), spans = prompt / 256;
    // Prompts of more than 700 rows come in two pieces, which share a page unless 700 is a multiple of 16.
    pages += prompt > 700;
    for (int64_t tokens = prompt + 1; tokens < prompt + request.max_new_tokens; tokens++) {
      if (choose == KvChoose::token || tokens == prompt + 1 || tokens % spec.block == 1)
        scored += samples * competition(blocks_of(tokens, spec.block), 1, 1, spec.block, 1).scored();
      pages += samples, spans += samples * (tokens % 256 == 0);
    }
    EXPECT_GT(spans, prompt / 256);
    const bool minmax = method == KvMethod::quest;
    const int64_t rows = minmax ? 2 : 1, sparse = c.layers - 1;
    EXPECT_EQ(real.at("kv_block_select").cost.flops,
              sparse * scored * c.head_dim * (minmax ? 4 * c.heads : 2 * c.kv_heads));
    EXPECT_EQ(real.at("kv_block_summary").cost.flops,
              sparse * (pages * 16 + spans * 256) * c.kv_heads * c.head_dim * rows);
    const auto plain = books(table_null, spec_of(method, 0, choose), request);
    EXPECT_GT(4 * plain.first.at("kv_block_select").cost.flops, 5 * real.at("kv_block_select").cost.flops);
    EXPECT_EQ(plain.first.at("kv_block_summary").cost.flops, sparse * pages * 16 * c.kv_heads * c.head_dim * rows);
    // A page is larger by a row of a summary, and nothing else is.
    EXPECT_EQ(KvCache::page_bytes(c, spec, DType::f32) - KvCache::page_bytes(c, spec_of(method, 0), DType::f32),
              rows * c.kv_heads * c.head_dim * 4);
    EXPECT_GT(bytes.first, plain.second.first);
    size_t before = 0;
    for (int32_t n = 500; n < 1090; n += 9) {
      const size_t peak = books(table_null, spec, {std::vector<int32_t>(n), {1}, 3}).second.second;
      EXPECT_GE(peak, before) << n;
      before = peak;
    }
  }
}

TEST(KvSpansPolicy, ContradictionsAreRefused) {
  KvSpec spec = spec_of(KvMethod::block_topk, 1);
  spec.blocks = 18;  // 16 blocks beside the first and the last
  EXPECT_NO_THROW(check_kv(spec));
  const auto refused = [&](const std::string& part) {
    try {
      check_kv(spec);
      ADD_FAILURE() << "accepted: " << part;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  spec.blocks = 19;
  refused("expected at least 2");
  spec.block_schedule = {"0:18", "9:50"};
  refused("cannot supply the 48");
  spec.spans = 3;
  EXPECT_NO_THROW(check_kv(spec));
  spec.spans = -1;
  refused("rollout.kv.spans = -1");
}

}  // namespace

}  // namespace pare::test
