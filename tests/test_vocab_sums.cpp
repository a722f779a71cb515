// The order of sums over the vocabulary, which list.h states, as naive loops: log-probs, entropies, KL divergences,
// overlaps and draws have their bits, on the CPU and by the CUDA kernels in both types.
#include <array>
#include <numeric>

#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "kernel_call.h"
#include "ops/logits.h"

namespace pare::test {
namespace {

using namespace kernel;
using Row = std::vector<float>;

float exp_of(float x) {
  cpu_kernels().exp_at_most_1(&x, &x, 1);
  return x;
}
float log_of(float x) {
  cpu_kernels().log(&x, &x, 1);
  return x;
}

float tree(std::array<float, 16> lane) {
  for (size_t half : {8, 4, 2, 1})
    for (size_t i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}
// A row sum of 16 lanes: each is a chain of add(sum, id) over its own ids in [begin, end).
template <class Add>
float row_sum(size_t begin, size_t end, Add add) {
  std::array<float, 16> lane{};
  for (size_t id = begin; id < end; id++) lane[id % 16] = add(lane[id % 16], id);
  return tree(lane);
}
// Row sums of tiles, one after the other.
template <class Add>
float sum_of_tiles(size_t vocabulary, Add add) {
  float sum = 0;
  for (size_t begin = 0; begin < vocabulary; begin += 128)
    sum += row_sum(begin, std::min(begin + 128, vocabulary), add);
  return sum;
}

struct Distribution {
  float max = -INFINITY, sum = 0, weighted = 0;
  float logprob(float z) const { return z - max - log_of(sum); }
  float entropy() const { return log_of(sum) - weighted / sum; }
};
Distribution tile_of(const Row& z, size_t begin) {
  const size_t end = std::min(begin + 128, z.size());
  const float m = *std::max_element(z.begin() + begin, z.begin() + end);
  return {m, row_sum(begin, end, [&](float s, size_t id) { return s + exp_of(z[id] - m); }),
          row_sum(begin, end, [&](float s, size_t id) { return std::fma(z[id] - m, exp_of(z[id] - m), s); })};
}
Distribution by_tiles(const Row& z) {
  std::vector<Distribution> tiles;
  Distribution d;
  for (size_t begin = 0; begin < z.size(); begin += 128) {
    if (std::all_of(z.begin() + begin, z.begin() + std::min(begin + 128, z.size()),
                    [](float x) { return x == -INFINITY; }))
      continue;
    tiles.push_back(tile_of(z, begin));
    d.max = std::max(d.max, tiles.back().max);
  }
  for (const Distribution& t : tiles) {
    const float below = t.max - d.max, factor = exp_of(below);
    d.sum = std::fma(t.sum, factor, d.sum);
    d.weighted = std::fma(std::fma(below, t.sum, t.weighted), factor, d.weighted);
  }
  return d;
}
// Arithmetic 1: as if the vocabulary were one tile.
Distribution by_row(const Row& z) {
  Distribution d;
  d.max = *std::max_element(z.begin(), z.end());
  d.sum = row_sum(0, z.size(), [&](float s, size_t id) { return s + exp_of(z[id] - d.max); });
  d.weighted =
      row_sum(0, z.size(), [&](float s, size_t id) { return std::fma(z[id] - d.max, exp_of(z[id] - d.max), s); });
  return d;
}

// Logits that bf16 holds exactly.  The largest of a row: anywhere, in the first, middle or last tile; or neighbouring
// tiles lie 200 apart.
constexpr int kRowKinds = 5;
Row logits_of(const std::string& name, int64_t vocabulary, int kind) {
  Rng rng(rng_key(1, RngStream::test, 0), std::hash<std::string>{}(name) + static_cast<uint64_t>(kind));
  Row row(static_cast<size_t>(vocabulary));
  for (float& x : row) x = from_bf16(to_bf16(static_cast<float>(3 * rng.normal())));
  const size_t last = row.size() - 1, peak[] = {0, last / 3, last / 2, last};
  if (kind >= 1 && kind <= 3) row[peak[kind]] = 21;
  if (kind == 4)
    for (size_t id = 0; id < row.size(); id++) row[id] += id / 128 % 2 ? -100 : 100;
  for (float& x : row) x = from_bf16(to_bf16(x));
  return row;
}

// Rows of logits, the same for every table.
struct Rows {
  int64_t count, vocabulary;
  std::vector<Row> p, q;  // logits
  Rows(int64_t vocabulary, int64_t count) : count(count), vocabulary(vocabulary) {
    for (int kind = kRowKinds - static_cast<int>(count); kind < kRowKinds; kind++) {
      p.push_back(logits_of("p", vocabulary, kind));
      q.push_back(logits_of("q", vocabulary, (kind + 1) % kRowKinds));
    }
  }
  static Tensor put(Call& t, const char* name, const std::vector<Row>& rows) {
    const Shape shape{static_cast<int64_t>(rows.size()), static_cast<int64_t>(rows[0].size())};
    const Tensor logits = t.act_out(name, shape);
    for (size_t r = 0; r < rows.size(); r++)
      for (size_t i = 0; i < rows[r].size(); i++) t[name].set(static_cast<int64_t>(r * rows[r].size() + i), rows[r][i]);
    return logits;
  }
};
Row scaled(Row z, float temperature) {
  for (float& x : z) x /= temperature;
  return z;
}
uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
uint32_t bits(Call& t, const char* name, int64_t i) { return bits(static_cast<float>(t[name].get(i))); }

// body(table, type of logits) for all tables but ref.
void on_tables(const std::function<void(const Table& table, DType act)>& body) {
  body(table_cpu, DType::f32);
  if (const Table* kernels = kernels_here())
    for (DType act : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(act == DType::f32 ? "kernels, f32" : "kernels, bf16");
      body(*kernels, act);
    }
}
// body(rows, temperature): vocabularies below, at and above a tile; of a model, with two rows, as that takes time.
constexpr int64_t kModel = 151936;
void for_vocabularies(const std::function<void(const Rows&, float)>& body) {
  for (int64_t vocabulary : std::initializer_list<int64_t>{1, 17, 127, 128, 129, 1000, 2100, kModel})
    for (float temperature : {1.f, 0.7f}) {
      if (vocabulary == kModel && temperature == 1) continue;
      SCOPED_TRACE(cat("V ", vocabulary, ", temperature ", temperature));
      body(Rows(vocabulary, vocabulary == kModel ? 2 : kRowKinds), temperature);
    }
}

TEST(VocabSums, LogprobAndEntropy) {
  for_vocabularies([](const Rows& rows, float temperature) {
    std::vector<int32_t> target;
    for (int64_t r = 0; r < rows.count; r++) target.push_back(static_cast<int32_t>(r * 31 % rows.vocabulary));
    std::vector<Distribution> expected;
    for (const Row& row : rows.p) expected.push_back(by_tiles(scaled(row, temperature)));
    on_tables([&](const Table& table, DType act) {
      Call t(table, act);
      const Tensor logits = Rows::put(t, "logits", rows.p);
      table.logprob({t.stat_out("logprob", {rows.count}), t.stat_out("entropy", {rows.count}), logits,
                     t.index("target", {rows.count}, target), temperature},
                    {});
      for (int64_t r = 0; r < rows.count; r++) {
        const float z = rows.p[r][target[r]] / temperature;
        EXPECT_EQ(bits(t, "logprob", r), bits(expected[r].logprob(z))) << "row " << r;
        EXPECT_EQ(bits(t, "entropy", r), bits(expected[r].entropy())) << "row " << r;
        if (rows.vocabulary > 128) continue;
        const Distribution before = by_row(scaled(rows.p[r], temperature));
        EXPECT_EQ(bits(t, "logprob", r), bits(before.logprob(z))) << "row " << r;
        EXPECT_EQ(bits(t, "entropy", r), bits(before.entropy())) << "row " << r;
      }
    });
  });
}

TEST(VocabSums, Kl) {
  for_vocabularies([](const Rows& rows, float temperature) {
    for (KlLoss kl : {KlLoss::exact, KlLoss::exact_forward}) {
      std::vector<float> expected;
      for (int64_t r = 0; r < rows.count; r++) {
        Row a = scaled(rows.p[r], temperature), b = scaled(rows.q[r], temperature);
        if (kl == KlLoss::exact_forward) std::swap(a, b);
        const Distribution p = by_tiles(a), q = by_tiles(b);
        const float log_p = log_of(p.sum), log_q = log_of(q.sum);
        expected.push_back(sum_of_tiles(a.size(), [&](float sum, size_t id) {
          const float x = a[id] - p.max;
          return std::fma(exp_of(x) / p.sum, x - log_p - (b[id] - q.max - log_q), sum);
        }));
      }
      on_tables([&](const Table& table, DType act) {
        Call t(table, act);
        const Shape one{rows.count};
        LogitsLoss a{};
        a.logprob = t.stat_out("logprob", one);
        a.entropy = t.stat_out("entropy", one);
        a.loss = t.stat_out("loss", one);
        a.kl = t.stat_out("kl", one);
        a.clipped = t.index("clipped", one, {});
        a.logits = Rows::put(t, "logits", rows.p);
        a.ref_logits = Rows::put(t, "ref_logits", rows.q);
        a.target = t.index("target", one, std::vector<int32_t>(rows.count));
        a.weight = t.stat("weight", one);
        a.kl_weight = t.stat("kl_weight", one);
        a.spec = {.policy = PolicyLoss::nll, .kl = kl, .kl_coef = 0.3f, .temperature = temperature};
        table.logits_loss(a, {});
        for (int64_t r = 0; r < rows.count; r++) EXPECT_EQ(bits(t, "kl", r), bits(expected[r])) << "row " << r;
      });
    }
  });
}

// Ids of the k largest.
std::vector<size_t> largest(const Row& row, size_t k) {
  std::vector<size_t> ids(row.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](size_t i, size_t j) { return row[i] > row[j]; });
  ids.resize(std::min(k, ids.size()));
  std::sort(ids.begin(), ids.end());
  return ids;
}

TEST(VocabSums, Overlap) {
  for_vocabularies([](const Rows& rows, float temperature) {
    const float lambda = 1.5f;
    for (int32_t top_k : {0, 20}) {
      if (top_k > 0 && (rows.vocabulary == kModel || temperature == 1)) continue;
      std::vector<float> overlap, mass;
      for (int64_t r = 0; r < rows.count; r++) {
        const Row a = scaled(rows.p[r], temperature), b = scaled(rows.q[r], temperature);
        const Distribution dp = by_tiles(a), dq = by_tiles(b);
        const auto p = [&](size_t id) { return exp_of(a[id] - dp.max) / dp.sum; };
        const auto q = [&](size_t id) { return exp_of(b[id] - dq.max) / dq.sum; };
        overlap.push_back(
            1 - sum_of_tiles(a.size(), [&](float s, size_t id) { return s + std::fmax(q(id) - p(id), 0.f); }));
        if (top_k == 0 || top_k >= rows.vocabulary) {
          mass.push_back(1 - sum_of_tiles(a.size(), [&](float s, size_t id) {
                           return s + std::fmax(q(id) - p(id) / lambda, 0.f);
                         }));
          continue;
        }
        float chain = 0;
        const auto of_p = largest(rows.p[r], top_k), of_q = largest(rows.q[r], top_k);
        for (size_t id : of_p)
          if (std::binary_search(of_q.begin(), of_q.end(), id)) chain += std::fmin(q(id), p(id) / lambda);
        mass.push_back(chain);
      }
      on_tables([&](const Table& table, DType act) {
        Call t(table, act);
        const Tensor p = Rows::put(t, "p", rows.p), q = Rows::put(t, "q", rows.q);
        table.overlap_probs(
            {t.stat_out("overlap", {rows.count}), t.stat_out("mass", {rows.count}), p, q, temperature, lambda, top_k},
            {});
        for (int64_t r = 0; r < rows.count; r++) {
          EXPECT_EQ(bits(t, "overlap", r), bits(overlap[r])) << "row " << r << ", top_k " << top_k;
          EXPECT_EQ(bits(t, "mass", r), bits(mass[r])) << "row " << r << ", top_k " << top_k;
        }
      });
    }
  });
}

// The id with the largest sum of z and its Gumbel number, though most are passed over, and its log-prob; with top_k
// that of the rest, whose tiles may be empty.
TEST(VocabSums, Draws) {
  for_vocabularies([](const Rows& rows, float temperature) {
    for (int32_t top_k : {0, 3}) {
      if (top_k > 0 && (rows.vocabulary == kModel || temperature == 1)) continue;
      std::vector<Row> kept;
      for (const Row& row : rows.p) {
        Row z = scaled(row, temperature);
        if (top_k > 0) {
          std::fill(z.begin(), z.end(), -INFINITY);
          for (size_t id : largest(row, static_cast<size_t>(top_k))) z[id] = row[id] / temperature;
        }
        kept.push_back(std::move(z));
      }
      const uint64_t key = rng_key(3, RngStream::sample, 1);
      std::vector<size_t> expected;
      for (size_t r = 0; r < kept.size(); r++) {
        size_t best = 0;
        float most = -INFINITY;
        for (size_t id = 0; id < kept[r].size(); id++) {
          if (kept[r][id] == -INFINITY) continue;
          const float u = uniform_open(rng_word(key, r, 7, static_cast<uint32_t>(id)));
          const float sum = kept[r][id] + -log_of(-log_of(u));
          if (sum > most) {
            most = sum;
            best = id;
          }
        }
        expected.push_back(best);
      }
      on_tables([&](const Table& table, DType act) {
        Call t(table, act);
        std::vector<int32_t> counter;
        for (int32_t r = 0; r < rows.count; r++) counter.insert(counter.end(), {r, 0, 7});
        const Tensor logits = Rows::put(t, "logits", rows.p);
        if (top_k > 0) table.truncate({logits, temperature, {top_k}}, {});
        table.sample({t.index("token", {rows.count}, {}), t.stat_out("logprob", {rows.count}), logits,
                      t.index("counter", {rows.count, 3}, counter), key, temperature},
                     {});
        for (int64_t r = 0; r < rows.count; r++) {
          const auto token = static_cast<size_t>(t["token"].get(r));
          ASSERT_EQ(token, expected[r]) << "row " << r << ", top_k " << top_k;
          EXPECT_EQ(bits(t, "logprob", r), bits(by_tiles(kept[r]).logprob(kept[r][token])))
              << "row " << r << ", top_k " << top_k;
        }
      });
    }
  });
}

// The lowest id wins if the largest logit stands in several tiles.
TEST(VocabSums, GreedyTakesTheLowestId) {
  Row row = logits_of("p", 1000, 0);
  for (size_t id : {5, 131, 200, 700, 999}) row[id] = 21;
  on_tables([&](const Table& table, DType act) {
    Call t(table, act);
    table.sample({t.index("token", {1}, {}), t.stat_out("logprob", {1}), Rows::put(t, "logits", {row}),
                  t.index("counter", {1, 3}, {0, 0, 7}), 1, 0},
                 {});
    EXPECT_EQ(t["token"].get(0), 5);
  });
}

// A tile of NaNs has no maximum, and is not left out.
TEST(VocabSums, ATileOfNansIsNoticed) {
  Row row = logits_of("p", 300, 0);
  std::fill(row.begin() + 128, row.begin() + 256, NAN);
  on_tables([&](const Table& table, DType act) {
    Call t(table, act);
    table.logprob({t.stat_out("logprob", {1}), t.stat_out("entropy", {1}), Rows::put(t, "logits", {row}),
                   t.index("target", {1}, {3}), 1},
                  {});
    EXPECT_TRUE(std::isnan(t["logprob"].get(0)));
    EXPECT_TRUE(std::isnan(t["entropy"].get(0)));
  });
}

// The product of the LM head sums up its own tiles: the numbers are those above, the logits those of the plain product,
// and log-probs, losses and draws have the bits that they have without the sums.
TEST(VocabSums, TheHeadSumsItsTiles) {
  if (!kernels_here()) GTEST_SKIP() << "no CUDA emulation on this machine";
  const auto same_bits = [](int64_t n, int64_t depth, int64_t V, float temperature, int64_t gap) {
    SCOPED_TRACE(cat(n, " rows, ", depth, " to ", V, ", temperature ", temperature, ", gap ", gap));
    Call t(table_kernels, DType::bf16);
    const Weight head = t.weight("head", V, depth);
    const Tensor x = t.act("x", {n, depth}, gap);
    std::vector<int32_t> ids, counters;
    for (int32_t r = 0; r < n; r++) {
      ids.push_back(static_cast<int32_t>((V - 1 + 37 * r) % V));
      counters.insert(counters.end(), {r, 0, 5});
    }
    const Tensor target = t.index("target", {n}, ids), counter = t.index("counter", {n, 3}, counters);
    const Shape sums{n, vocab_tiles(V) + 1, 3};
    const auto product = [&](const char* y, const VocabSums& vocab_sums) {
      LinearFwd a{t.act_out(y, {n, V}), x, head, {}, {}};
      a.vocab_sums = vocab_sums;
      table_kernels.linear_fwd(a, {});
      return a.y;
    };
    const Tensor plain = product("plain", {}),
                 logits = product("logits", {t.stat_out("tiles", sums), target, temperature});
    product("scratch", {t.stat_out("tiles only", sums), target, temperature, true});
    EXPECT_EQ(t["logits"].bits(), t["plain"].bits());
    EXPECT_EQ(t["tiles only"].bits(), t["tiles"].bits());
    const Tensor tiles = t["tiles"].tensor();
    for (int64_t r = 0; r < n; r++) {
      Row z;
      for (int64_t v = 0; v < V; v++) z.push_back(static_cast<float>(t["plain"].get(r * V + v)) / temperature);
      const int64_t first = r * sums[1] * 3;
      for (int64_t i = 0; i < vocab_tiles(V); i++) {
        const Distribution d = tile_of(z, static_cast<size_t>(i * 128));
        ASSERT_EQ(bits(t, "tiles", first + 3 * i), bits(d.max)) << "row " << r << ", tile " << i;
        ASSERT_EQ(bits(t, "tiles", first + 3 * i + 1), bits(d.sum)) << "row " << r << ", tile " << i;
        ASSERT_EQ(bits(t, "tiles", first + 3 * i + 2), bits(d.weighted)) << "row " << r << ", tile " << i;
      }
      ASSERT_EQ(bits(t, "tiles", first + 3 * vocab_tiles(V)), bits(z[ids[r]])) << "row " << r;
    }
    const auto results = [&](const std::string& with, const Tensor& sums_of_tiles) {
      const auto out = [&](const char* name) { return t.stat_out(name + with, {n}); };
      table_kernels.logprob({out("logprob"), out("entropy"), logits, target, temperature, sums_of_tiles}, {});
      table_kernels.sample({t.index("token" + with, {n}, {}), out("drawn"), logits, counter,
                            rng_key(3, RngStream::sample, 1), temperature, sums_of_tiles},
                           {});
      LogitsLoss a{};
      a.logprob = out("lp");
      a.entropy = out("h");
      a.loss = out("loss");
      a.kl = out("kl");
      a.clipped = t.index("clipped" + with, {n}, {});
      a.logits = t.act_out("gradient" + with, {n, V});
      std::memcpy(a.logits.data, plain.data, plain.bytes());
      KernelMemory::wrote(a.logits.data, a.logits.bytes());
      a.target = target;
      a.weight = t.stat("weight", {n});
      a.kl_weight = t.stat("kl_weight", {n});
      a.spec.entropy_coef = 0.1f;
      a.spec.temperature = temperature;
      a.tiles = sums_of_tiles;
      table_kernels.logits_loss(a, {});
    };
    results("", {});
    results(" by sums", tiles);
    table_kernels.logprob({t.stat_out("logprob of sums alone", {n}), t.stat_out("entropy of sums alone", {n}),
                           t.act_out("logits that nobody wrote", {n, V}), target, temperature, tiles},
                          {});
    EXPECT_EQ(t["logprob of sums alone"].bits(), t["logprob"].bits());
    EXPECT_EQ(t["entropy of sums alone"].bits(), t["entropy"].bits());
    for (const char* name : {"logprob", "entropy", "token", "drawn", "lp", "h", "loss", "gradient"})
      EXPECT_EQ(t[cat(name, " by sums")].bits(), t[name].bits()) << name;
    EXPECT_TRUE(t.zones_intact());
  };
  for (const TensorKernel kernel : {TensorKernel::mma, TensorKernel::wgmma}) {
    if (!ask_for(kernel)) continue;
    SCOPED_TRACE(kernel == TensorKernel::mma ? "mma.sync" : "wgmma");
    for (const auto& [n, depth, V, gap] : {std::array<int64_t, 4>{1, 8, 1, 0},
                                           {3, 40, 8, 0},
                                           {2, 16, 129, 0},  // an odd width: nothing is stored by boxes
                                           {5, 24, 136, 7},  // rows of x that begin anywhere
                                           {17, 72, 1000, 8},
                                           {65, 40, 392, 0},
                                           {131, 24, 264, 0},
                                           {3, 2056, 256, 0}})  // parts of k
      for (const float temperature : {1.f, 0.7f}) same_bits(n, depth, V, temperature, gap);
    if (table_kernels.probe) {
      same_bits(200, 64, 40000, 1, 0);
      same_bits(300, 64, 151936, 0.7f, 0);
    }
    in_all_orders([&] { same_bits(66, 24, 264, 0.7f, 0); });
  }
  ask_for(TensorKernel::choose);
}

// The sums of all tiles lie in the shared memory of a block.
TEST(VocabSums, TheKernelsHaveALargestVocabulary) {
  if (!kernels_here()) GTEST_SKIP() << "no CUDA emulation on this machine";
  const auto of = [](int64_t vocabulary) {
    return [=](Call& t) {
      const Tensor logits = t.act_out("logits", {1, vocabulary});
      std::memset(logits.data, 0, logits.bytes());
      KernelMemory::wrote(logits.data, logits.bytes());
      t.table.logprob({t.stat_out("logprob", {1}), t.stat_out("entropy", {1}), logits, t.index("target", {1}, {3}), 1},
                      {});
      EXPECT_EQ(bits(t, "logprob", 0), bits(-log_of(0x1p20f)));
    };
  };
  EXPECT_EQ(refusal(DType::bf16, of(1 << 20)), "no error");
  const std::string message = refusal(DType::bf16, of((1 << 20) + 1));
  EXPECT_NE(message.find("more than the 1048576 columns whose sums fit in shared memory"), std::string::npos)
      << message;
}

}  // namespace
}  // namespace pare::test
