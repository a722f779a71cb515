// Block-sparse reads: what Quest and block top-k promise, and that rollout and learner agree bit by bit.
#include <algorithm>

#include "base/thread_pool.h"
#include "tests/block_cache.h"

namespace pare::test {

namespace {

class KvBlocks : public testing::TestWithParam<const Table*> {
 protected:
  const Table& table = *GetParam();
};

// ---- values

// Each block holds its two keys twice: a block has 4 slots here.  The fifth block is the current one.
TEST_P(KvBlocks, GoldenScores) {
  const std::vector<std::vector<double>> keys = {
      {1, -2, 3, 0}, {0, 1, 0, 2}, {-4, 5, 2, -5}, {1, 1, 1, 1}, {9, -9, 9, -9}};
  std::vector<double> k;
  for (const auto& pair : keys)
    for (int i = 0; i < 2; i++) k.insert(k.end(), pair.begin(), pair.end());
  for (const auto& [kind, scores, chosen] :
       {std::tuple{kMinmax, std::vector<double>{5, -1, 7, 0}, 2}, {kMean, std::vector<double>{3, -1.5, -1, 0}, 0}}) {
    Cache c(table, {1, 1, 2}, {kind, 4, 0, 1}, 1, 20);
    const Buffer rows = act(DType::f32, {20, 1, 2}, k), q = act(DType::f32, {1, 1, 2}, {1, -1});
    c.append({{0, 20}}, rows.tensor(), rows.tensor());
    const auto read = c.decode({0}, q.tensor(), {2});
    for (int i = 0; i < 4; i++) EXPECT_EQ(read.score.get(i), scores[i]) << "block " << i;
    EXPECT_EQ(ints(read.blocks), (std::vector<int32_t>{chosen, 4}));
  }
}

// The group's bound is the largest of its heads'; the mean is taken over the group first.
TEST_P(KvBlocks, GroupsShareOneScore) {
  const std::vector<double> one = {1, -2, 3, 0, 1, -2, 3, 0};
  std::vector<double> k = one;
  k.insert(k.end(), one.begin(), one.end());
  for (auto [kind, score] : {std::pair{kMinmax, 5.0}, {kMean, 2 * 0.5 - 1 * 1.0}}) {
    Cache c(table, {2, 1, 2}, {kind, 4, 0, 1}, 1, 8);
    const Buffer rows = act(DType::f32, {8, 1, 2}, k), q = act(DType::f32, {1, 2, 2}, {1, -1, 0, 3});  // bounds 5 and 0
    c.append({{0, 8}}, rows.tensor(), rows.tensor());
    EXPECT_EQ(c.decode({0}, q.tensor(), {1}).score.get(0), score);
  }
}

TEST_P(KvBlocks, BoundsAreAboveEveryProductAndCentroidsAreMeans) {
  for (const Heads& h : kHeads)
    for (int32_t block : {4, 16}) {
      const int64_t slots = 7 * 16, group = h.heads / h.kv_heads;
      for (bool one_key : {false, true}) {
        Buffer k = random_rows("k", slots, h.kv_heads, h.dim), q = random_rows("q", 1, h.heads, h.dim);
        if (one_key)  // a block holds one key, many times
          for (int64_t s = 0; s < slots; s++)
            for (int64_t i = 0; i < h.kv_heads * h.dim; i++)
              k.set(s * h.kv_heads * h.dim + i, k.get(s / block * block * h.kv_heads * h.dim + i));
        Cache quest(table, h, {kMinmax, block, 0, 1}, 1, slots), mean(table, h, {kMean, block, 0, 1}, 1, slots);
        for (Cache* c : {&quest, &mean}) c->append({{0, static_cast<int32_t>(slots)}}, k.tensor(), k.tensor());
        const auto bounds = quest.decode({0}, q.tensor(), {1}), means = mean.decode({0}, q.tensor(), {1});
        const double error = 40 * kRound * std::sqrt(double(h.dim));
        for (int64_t head = 0; head < h.kv_heads; head++)
          for (int64_t b = 0; b < slots / block - 1; b++) {
            double highest = -INFINITY, sum = 0;
            for (int64_t s = b * block; s < (b + 1) * block; s++)
              for (int64_t g = 0; g < group; g++) {
                double dot = 0;
                for (int64_t d = 0; d < h.dim; d++)
                  dot += q.get((head * group + g) * h.dim + d) * k.get((s * h.kv_heads + head) * h.dim + d);
                highest = std::max(highest, dot);
                sum += dot;
              }
            const double bound = bounds.score.get(head * bounds.score.tensor().shape[2] + b);
            EXPECT_GE(bound, highest - error);
            if (one_key) {
              EXPECT_NEAR(bound, highest, error);
            }
            EXPECT_NEAR(means.score.get(head * means.score.tensor().shape[2] + b), sum / double(block * group), error);
          }
      }
    }
}

TEST_P(KvBlocks, SummariesDoNotDependOnHowTokensCame) {
  for (const Heads& h : kHeads)
    for (const Choice& choice : kChoices) {
      const int64_t slots = 43;
      const Buffer k = random_rows("k", slots, h.kv_heads, h.dim);
      std::vector<Bytes> results;
      for (const std::vector<int32_t>& runs :
           {std::vector<int32_t>{43}, std::vector<int32_t>(43, 1), std::vector<int32_t>{5, 11, 1, 26}}) {
        Cache c(table, h, choice, 1, slots);
        int32_t row = 0;
        for (int32_t n : runs) {
          c.append({{0, n}}, k.tensor().rows(row, n), k.tensor().rows(row, n));
          row += n;
        }
        results.push_back(c.summary.element_bytes());
      }
      EXPECT_EQ(results[0], results[1]) << "token by token";
      EXPECT_EQ(results[0], results[2]) << "in runs";
      // A fork copies the keys of a partly filled page; its summaries come with the next token.
      Cache c(table, h, choice, 2, slots);
      c.append({{0, 42}}, k.tensor().rows(0, 42), k.tensor().rows(0, 42));
      for (int page = 0; page < 2; page++) c.page_table.set(3 + page, c.page_table.get(page));
      const Buffer copy =
          i32({1, 2}, {static_cast<int32_t>(c.page_table.get(2)), static_cast<int32_t>(c.page_table.get(5))});
      KvCopyPages fork{};
      fork.k_pages = c.k_pages.tensor();
      fork.v_pages = c.v_pages.tensor();
      fork.pairs = copy.tensor();
      table.kv_copy_pages(fork, {});
      c.used[1] = 42;
      c.append({{0, 1}, {1, 1}},
               act(DType::f32, {2, h.kv_heads, h.dim}, normal("new", 2 * h.kv_heads * h.dim)).tensor(),
               k.tensor().rows(0, 2));
      const int64_t original = static_cast<int64_t>(c.page_table.get(2)),
                    forked = static_cast<int64_t>(c.page_table.get(5));
      const int64_t block = 42 / choice.block % (16 / choice.block);  // the block that differs
      const Bytes a = row_bytes(c.summary, original, 1), b = row_bytes(c.summary, forked, 1);
      const size_t head = a.size() / h.kv_heads, same = head / (16 / choice.block) * block;
      for (int64_t i = 0; i < h.kv_heads; i++)
        EXPECT_TRUE(std::equal(a.begin() + i * head, a.begin() + i * head + same, b.begin() + i * head));
      EXPECT_NE(a, b);
    }
}

// ---- the choice

TEST_P(KvBlocks, ListsAreAscendingAndHoldTheReservedBlocks) {
  const Heads h = {6, 2, 20};
  for (const Choice& choice : kChoices)
    for (int64_t slots : {33, 64, 65, 127, 128, 130}) {
      Cache c(table, h, choice, 1, slots);
      fill(c, slots);
      const int32_t all = static_cast<int32_t>(blocks_of(slots, choice.block));
      for (int32_t budget = choice.first + choice.last; budget < all; budget++) {
        const Buffer q = random_rows(cat("q", budget), 1, h.heads, h.dim);
        const auto read = c.decode({0}, q.tensor(), {budget});
        const std::vector<int32_t> lists = ints(read.blocks);
        ASSERT_EQ(lists.size(), static_cast<size_t>(budget * h.kv_heads));
        for (int64_t head = 0; head < h.kv_heads; head++) {
          const std::vector<int32_t> list(lists.begin() + head * budget, lists.begin() + (head + 1) * budget);
          EXPECT_EQ(std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()), list.end());
          for (int32_t b = 0; b < choice.first; b++) EXPECT_EQ(list[b], b);
          for (int32_t b = 0; b < choice.last; b++) EXPECT_EQ(list[budget - 1 - b], all - 1 - b);
          // What was left out has no better score than what was taken.
          double worst = INFINITY, best = -INFINITY;
          for (int32_t b = choice.first; b < all - choice.last; b++) {
            const double score = read.score.get(head * read.score.tensor().shape[2] + b - choice.first);
            if (std::find(list.begin(), list.end(), b) != list.end())
              worst = std::min(worst, score);
            else
              best = std::max(best, score);
          }
          EXPECT_GE(worst, best);
        }
      }
    }
}

// Ties: the smaller block.  +0 and -0 are the same score.
TEST_P(KvBlocks, TiesGoToTheSmallerBlock) {
  const std::vector<double> per_block = {0, 1, -0.0, 1, 2, 1, 0, 2, 1, 2};
  std::vector<double> k;
  for (double x : per_block) k.insert(k.end(), 8, x);
  const Buffer rows = act(DType::f32, {40, 1, 2}, k), q = act(DType::f32, {1, 1, 2}, {1, 0});
  const std::vector<std::vector<int32_t>> lists = {{9},
                                                   {4, 9},
                                                   {4, 7, 9},
                                                   {1, 4, 7, 9},
                                                   {1, 3, 4, 7, 9},
                                                   {1, 3, 4, 5, 7, 9},
                                                   {1, 3, 4, 5, 7, 8, 9},
                                                   {0, 1, 3, 4, 5, 7, 8, 9},
                                                   {0, 1, 2, 3, 4, 5, 7, 8, 9}};
  for (BlockSummary kind : {kMinmax, kMean}) {
    Cache c(table, {1, 1, 2}, {kind, 4, 0, 1}, 1, 40);
    c.append({{0, 40}}, rows.tensor(), rows.tensor());
    for (const auto& list : lists)
      EXPECT_EQ(ints(c.decode({0}, q.tensor(), {static_cast<int32_t>(list.size())}).blocks), list);
  }
}

// ---- attention

// Reading listed blocks is dense attention over a sequence that has just these slots; a budget that covers every block
// is the dense op; nothing else of the cache is read.
TEST_P(KvBlocks, ListedBlocksAreAllThatThereIs) {
  for (const Heads& h : kHeads)
    for (const Choice& choice : kChoices)
      for (int64_t slots : {15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, 200}) {
        Cache c(table, h, choice, 1, slots);
        const Buffer k = random_rows("k", slots, h.kv_heads, h.dim), v = random_rows("v", slots, h.kv_heads, h.dim);
        const Buffer q = random_rows("q", 1, h.heads, h.dim);
        c.append({{0, static_cast<int32_t>(slots)}}, k.tensor(), v.tensor());
        const int32_t all = static_cast<int32_t>(blocks_of(slots, choice.block));
        EXPECT_EQ(c.decode({0}, q.tensor(), {all}).o.element_bytes(),
                  c.decode_densely({0}, q.tensor()).element_bytes());
        for (int32_t budget : {choice.first + choice.last, all / 2, all - 1}) {
          if (budget < choice.first + choice.last || budget >= all) continue;
          const auto read = c.decode({0}, q.tensor(), {budget});
          const std::vector<int32_t> lists = ints(read.blocks);
          const Bytes o = read.o.element_bytes();
          EXPECT_LE(read.slots, budget * choice.block);
          for (int64_t head = 0; head < h.kv_heads; head++) {  // a cache with the slots that this head reads
            Cache less(table, h, choice, 1, read.slots);
            std::vector<double> keys, values;
            std::vector<bool> listed(slots);
            for (int32_t i = 0; i < budget; i++)
              for (int64_t s = lists[head * budget + i] * choice.block;
                   s < std::min<int64_t>(slots, (lists[head * budget + i] + 1) * choice.block); s++) {
                listed[s] = true;
                for (int64_t j = 0; j < h.kv_heads * h.dim; j++) {
                  keys.push_back(k.get(s * h.kv_heads * h.dim + j));
                  values.push_back(v.get(s * h.kv_heads * h.dim + j));
                }
              }
            less.append({{0, static_cast<int32_t>(read.slots)}},
                        act(DType::f32, {read.slots, h.kv_heads, h.dim}, keys).tensor(),
                        act(DType::f32, {read.slots, h.kv_heads, h.dim}, values).tensor());
            const Bytes dense = less.decode_densely({0}, q.tensor()).element_bytes();
            const size_t part = o.size() / h.kv_heads;
            EXPECT_TRUE(
                std::equal(dense.begin() + head * part, dense.begin() + (head + 1) * part, o.begin() + head * part))
                << slots << " slots, block " << choice.block << ", budget " << budget << ", D " << h.dim;
          }
        }
      }
}

// Against dense attention with a mask, in double.
TEST(KvBlocksRef, ListsEqualAMask) {
  const Heads h = {6, 2, 20};
  for (const Choice& choice : kChoices) {
    const int64_t slots = 117, group = h.heads / h.kv_heads;
    Cache c(table_ref, h, choice, 1, slots, DType::f64);
    const Buffer k = random_rows("k", slots, h.kv_heads, h.dim, DType::f64);
    const Buffer v = random_rows("v", slots, h.kv_heads, h.dim, DType::f64);
    const Buffer q = random_rows("q", 1, h.heads, h.dim, DType::f64);
    c.append({{0, static_cast<int32_t>(slots)}}, k.tensor(), v.tensor());
    const int32_t budget = 5;
    const auto read = c.decode({0}, q.tensor(), {budget});
    const std::vector<int32_t> lists = ints(read.blocks);
    double left_out = 0;
    for (int64_t head = 0; head < h.heads; head++) {
      const int64_t kv = head / group;
      std::vector<double> p(slots);
      double sum = 0;
      for (int64_t s = 0; s < slots; s++) {
        double dot = 0;
        for (int64_t d = 0; d < h.dim; d++) dot += q.get(head * h.dim + d) * k.get((s * h.kv_heads + kv) * h.dim + d);
        const auto list = lists.begin() + kv * budget;
        const bool seen = std::find(list, list + budget, s / choice.block) != list + budget;
        const double weight = std::exp(double(static_cast<float>(1 / std::sqrt(double(h.dim)))) * dot);
        p[s] = seen ? weight : 0;
        left_out += seen ? 0 : weight;
        sum += p[s];
      }
      for (int64_t d = 0; d < h.dim; d++) {
        double o = 0;
        for (int64_t s = 0; s < slots; s++) o += p[s] / sum * v.get((s * h.kv_heads + kv) * h.dim + d);
        EXPECT_NEAR(read.o.get(head * h.dim + d), o, 1e-12);
      }
    }
    EXPECT_GT(left_out, 1);
  }
}

// A sequence alone and among others, with other pages and budgets around it.
TEST_P(KvBlocks, EntriesDoNotDependOnTheirBatch) {
  for (const Heads& h : kHeads)
    for (const Choice& choice : kChoices) {
      const std::vector<int32_t> slots = {130, 17, 64, 99, 256}, budgets = {4, 3, 7, INT32_MAX, 5};
      const std::vector<int32_t> order = {3, 0, 4, 1, 2};  // sequence of each entry
      Cache batch(table, h, choice, 5, 256);
      std::vector<Buffer> keys, queries;
      std::vector<double> all_q;
      for (int32_t i = 0; i < 5; i++) {
        keys.push_back(random_rows(cat("k", i), slots[i], h.kv_heads, h.dim));
        queries.push_back(random_rows(cat("q", i), 1, h.heads, h.dim));
        const auto q = queries.back().values();
        all_q.insert(all_q.end(), q.begin(), q.end());
        batch.append({{order[i], slots[i]}}, keys[i].tensor(), keys[i].tensor());
      }
      const Buffer q = act(DType::f32, {5, h.heads, h.dim}, all_q);
      const auto together = batch.decode(order, q.tensor(), budgets);
      for (int32_t i = 0; i < 5; i++) {
        Cache alone(table, h, choice, 1, slots[i], DType::f32, "other pages");
        alone.append({{0, slots[i]}}, keys[i].tensor(), keys[i].tensor());
        const auto read = alone.decode({0}, queries[i].tensor(), {budgets[i]});
        EXPECT_EQ(row_bytes(together.o, i, 1), read.o.element_bytes()) << i;
        if (blocks_of(slots[i], choice.block) <= budgets[i]) continue;
        const int64_t room = together.blocks.tensor().shape[2];
        for (int64_t head = 0; head < h.kv_heads; head++)
          for (int32_t j = 0; j < budgets[i]; j++)
            EXPECT_EQ(together.blocks.get((i * h.kv_heads + head) * room + j), read.blocks.get(head * budgets[i] + j));
      }
    }
}

// ---- the learner

// The rollout: the prompt in one pass, densely, then a token at a time.
TEST_P(KvBlocks, TheLearnerChoosesAndReadsWhatTheRolloutDid) {
  for (const Heads& h : kHeads)
    for (const Choice& choice : kChoices) {
      const int64_t n = 170;
      const int32_t prompt = 37, budget = 4;
      const LearnerBatch batch(h, n, prompt, choice, budget);
      const Learned learner = batch.run(table);
      Cache c(table, h, choice, 1, n);
      c.append({{0, prompt}}, batch.k.tensor().rows(0, prompt), batch.v.tensor().rows(0, prompt));
      int64_t chosen = 0;
      for (int64_t row = prompt; row < n; row++) {
        c.append({{0, 1}}, batch.k.tensor().rows(row, 1), batch.v.tensor().rows(row, 1));
        const auto read = c.decode({0}, batch.q.tensor().rows(row, 1), {budget});
        ASSERT_EQ(row_bytes(learner.o, row, 1), read.o.element_bytes()) << "row " << row << ", D " << h.dim;
        if (blocks_of(row + 1, choice.block) <= budget) continue;
        ASSERT_EQ(row_bytes(learner.blocks, row, 1), read.blocks.element_bytes()) << "row " << row;
        chosen++;
      }
      EXPECT_GT(chosen, 100);
      // Dense rows are those of the dense op; sparse ones are not.
      const Learned dense = batch.run(table, false);
      EXPECT_EQ(row_bytes(learner.o, 0, prompt), row_bytes(dense.o, 0, prompt));
      EXPECT_EQ(row_bytes(learner.lse, 0, prompt), row_bytes(dense.lse, 0, prompt));
      EXPECT_NE(row_bytes(learner.o, n - 1, 1), row_bytes(dense.o, n - 1, 1));
    }
}

TEST_P(KvBlocks, BudgetsThatCoverEverythingAreTheDenseLearner) {
  for (const Heads& h : kHeads)
    for (const Choice& choice : kChoices) {
      const LearnerBatch batch(h, 150, 37, choice, 150 / choice.block + 1);
      const Learned lists = batch.run(table), dense = batch.run(table, false);
      EXPECT_EQ(lists.o.element_bytes(), dense.o.element_bytes());
      EXPECT_EQ(lists.lse.element_bytes(), dense.lse.element_bytes());
      EXPECT_EQ(lists.dq.element_bytes(), dense.dq.element_bytes());
      EXPECT_EQ(lists.dk.element_bytes(), dense.dk.element_bytes());
      EXPECT_EQ(lists.dv.element_bytes(), dense.dv.element_bytes());
    }
}

TEST_P(KvBlocks, GradientsContinueAcrossCalls) {
  for (const Heads& h : kHeads)
    for (const Choice& choice : kChoices) {
      const LearnerBatch batch(h, 150, 37, choice, 4);
      const Learned once = batch.run(table), twice = batch.run(table, true, 1);
      EXPECT_EQ(once.dq.element_bytes(), twice.dq.element_bytes());
      EXPECT_EQ(once.dk.element_bytes(), twice.dk.element_bytes());
      EXPECT_EQ(once.dv.element_bytes(), twice.dv.element_bytes());
    }
}

TEST_P(KvBlocks, ThreadsDoNotChangeBits) {
  const Heads h = {6, 2, 64};
  const Choice choice = {kMinmax, 16, 1, 1};
  std::vector<std::vector<Bytes>> results;
  for (int threads : {1, 2, 3}) {
    set_threads(threads);
    const LearnerBatch batch(h, 700, 137, choice, 6);
    const Learned r = batch.run(table);
    results.push_back({});
    for (const Buffer* b : {&r.o, &r.lse, &r.blocks, &r.dq, &r.dk, &r.dv}) results.back().push_back(b->element_bytes());
  }
  set_threads(0);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

INSTANTIATE_TEST_SUITE_P(Tables, KvBlocks, testing::Values(&table_ref, &table_cpu),
                         [](const auto& info) { return std::string(info.param->name); });

// ---- what is refused

TEST_P(KvBlocks, RefusesBudgetsBelowTheReservedBlocksAndListsThatAreNone) {
  Cache c(table, {2, 1, 8}, {kMinmax, 4, 2, 2}, 1, 40);
  fill(c, 40);
  const Buffer q = random_rows("q", 1, 2, 8);
  EXPECT_THROW(c.decode({0}, q.tensor(), {3}), std::logic_error);
  EXPECT_NO_THROW(c.decode({0}, q.tensor(), {4}));
  for (const std::vector<int32_t>& list :
       {std::vector<int32_t>{1, 1, 9}, {2, 1, 9}, {-1, 3, 9}, {1, 2, 8}, {1, 9, 10}}) {
    const Buffer blocks = i32({1, 1, 3}, list);
    OwnRun r(table, DType::f32, c.own({{"q", q.tensor()}, {"blocks", blocks.tensor()}}));
    const auto a = c.operands<AttnPaged>(r, "attn_paged", sizes(c.choice), {{0, 1}}, {3});
    EXPECT_THROW(table.attn_paged(a, {}), std::logic_error) << list[0] << list[1] << list[2];
  }
}

}  // namespace

}  // namespace pare::test
