// The page pool and the cache against an oracle that knows every slot's contents.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>

#include "base/rng.h"
#include "kv/kv_cache.h"
#include "ops/compression.h"
#include "ops/rope.h"

namespace pare::test {
namespace {

TEST(PagePool, LastInFirstOut) {
  PagePool pool(3);
  EXPECT_EQ(pool.allocate(), 0);
  EXPECT_EQ(pool.allocate(), 1);
  EXPECT_EQ(pool.allocate(), 2);
  EXPECT_THROW(pool.allocate(), std::logic_error);
  pool.release(1);
  pool.release(0);
  EXPECT_EQ(pool.free(), 2);
  EXPECT_EQ(pool.peak(), 3);
  EXPECT_EQ(pool.allocate(), 0);
  EXPECT_EQ(pool.allocate(), 1);
}

TEST(PagePool, APageIsFreedByItsLastReference) {
  PagePool pool(2);
  const int32_t page = pool.allocate();
  pool.retain(page);
  pool.retain(page);
  EXPECT_EQ(pool.references(page), 3);
  pool.release(page);
  pool.release(page);
  EXPECT_EQ(pool.used(), 1);
  pool.release(page);
  EXPECT_EQ(pool.used(), 0);
  EXPECT_THROW(pool.release(page), std::logic_error);
  EXPECT_THROW(pool.retain(page), std::logic_error);
  EXPECT_THROW(pool.release(2), std::logic_error);
}

ModelConfig small() {
  ModelConfig c;
  c.layers = 3;
  c.kv_heads = 2;
  c.head_dim = 6;
  return c;
}

// Random operations; the oracle keeps for every sequence what was written and how many pages it may still take.
class CacheWorld {
 public:
  explicit CacheWorld(uint64_t seed) : rng_(rng_key(seed, RngStream::test, 0)) {}

  void step() {
    const uint32_t what = rng_.below(12);
    if (what < 2 || live_.empty())
      open();
    else if (what < 6)
      append(any());
    else if (what < 8)
      fork(any());
    else if (what < 9)
      extend(any());
    else if (what < 11)
      cut(any());
    else
      close(any());
    check_books();
  }
  void finish() {
    while (!live_.empty()) close(live_.begin()->first);
    check_books();
    EXPECT_EQ(cache_.pool().free(), kPages);
    EXPECT_EQ(cache_.reserved(), 0);
    EXPECT_GT(forks_, 20);
    EXPECT_GT(refusals_, 5);
    EXPECT_GT(cuts_, 5);
  }
  void check_contents() {
    cache_.upload_tables();
    for (const auto& [id, s] : live_)
      for (int layer = 0; layer < config_.layers; layer++)
        for (int h = 0; h < config_.kv_heads; h++) {
          const std::vector<int32_t>& values = s.values[layer * config_.kv_heads + h];
          for (size_t slot = 0; slot < values.size(); slot++) check_slot(id, layer, h, slot, values[slot]);
        }
  }

 private:
  static constexpr int64_t kPages = 67, kSequences = 7, kSlots = 83;
  static KvSpec evicting() {
    KvSpec spec;
    spec.method = KvMethod::snapkv;
    return spec;
  }
  struct Sequence {
    int64_t limit, reservation;
    std::vector<std::vector<int32_t>> values;  // [layers * K]: of each slot
    int64_t slots() const { return static_cast<int64_t>(values[0].size()); }
  };

  int any() { return std::next(live_.begin(), rng_.below(static_cast<uint32_t>(live_.size())))->first; }
  int64_t some_slots(int64_t least) { return least + rng_.below(static_cast<uint32_t>(kSlots - least + 1)); }
  int64_t pages(int64_t slots) { return config_.layers * ((slots + kPageSlots - 1) / kPageSlots); }

  bool reserve(int64_t n) {
    int64_t reserved_pages = 0;
    for (const auto& [id, s] : live_) reserved_pages += s.reservation;
    const bool fits = used() + reserved_pages + n <= kPages;
    EXPECT_EQ(cache_.reserve(n), fits);
    refusals_ += !fits;
    return fits;
  }
  void open() {
    const int64_t limit = some_slots(1);
    if (live_.size() == kSequences || !reserve(pages(limit))) return;
    const int id = cache_.open(pages(limit));
    EXPECT_TRUE(live_
                    .emplace(id, Sequence{limit, pages(limit),
                                          std::vector<std::vector<int32_t>>(config_.layers * config_.kv_heads)})
                    .second);
  }
  void fork(int parent) {
    Sequence s = live_.at(parent);
    const int64_t n = s.slots();
    s.limit = some_slots(n);
    s.reservation = pages(s.limit) - config_.layers * (n / kPageSlots);
    if (live_.size() == kSequences || !reserve(s.reservation)) return;
    const int id = cache_.fork(parent, s.reservation);
    if (n % kPageSlots) s.reservation -= config_.layers;
    for (int layer = 0; layer < config_.layers; layer++)
      for (int64_t i = 0; i < (n + kPageSlots - 1) / kPageSlots; i++)
        EXPECT_EQ(cache_.pages(id, layer)[i] == cache_.pages(parent, layer)[i], i < n / kPageSlots);
    EXPECT_TRUE(live_.emplace(id, s).second);
    forks_++;
  }
  void extend(int id) {
    Sequence& s = live_.at(id);
    const int64_t limit = some_slots(s.limit), more = pages(limit) - pages(s.limit);
    if (!reserve(more)) return;
    cache_.extend(id, more);
    s.limit = limit;
    s.reservation += more;
  }
  void append(int id) {
    Sequence& s = live_.at(id);
    const int64_t before = s.slots();
    if (before == s.limit) return;
    const auto n = static_cast<int32_t>(1 + rng_.below(static_cast<uint32_t>(s.limit - before)));
    cache_.append(id, n);
    cache_.upload_tables();
    const int64_t K = config_.kv_heads, D = config_.head_dim;
    std::vector<float> k(n * K * D), v(n * K * D);
    PagedRow row{0, n, static_cast<int32_t>(before + n), id};
    std::vector<int32_t> values(n);
    std::iota(values.begin(), values.end(), next_);
    for (int layer = 0; layer < config_.layers; layer++) {
      for (int64_t i = 0; i < n * K * D; i++) {
        k[i] = key(next_ + static_cast<int32_t>(i / (K * D)), layer, i % (K * D));
        v[i] = -k[i];
      }
      device_.kv_write({.k_pages = cache_.k_pages,
                        .v_pages = cache_.v_pages,
                        .k = make_tensor(k.data(), DType::f32, {n, K, D}),
                        .v = make_tensor(v.data(), DType::f32, {n, K, D}),
                        .page_table = cache_.page_table(layer),
                        .queries = make_tensor(&row, DType::i32, {1, 4}),
                        .pos_pages = cache_.fields.pos,
                        .pos = make_tensor(values.data(), DType::i32, {n})});
    }
    for (int32_t i = 0; i < n; i++, next_++)
      for (auto& values : s.values) values.push_back(next_);
    s.reservation -= pages(before + n) - pages(before);
  }
  // Every layer and head keeps slots of its own choice; the sequence's reservation covers the pages that it shared.
  void cut(int id) {
    Sequence& s = live_.at(id);
    const int64_t n = s.slots();
    if (n < 2) return;
    const auto first = static_cast<int32_t>(rng_.below(static_cast<uint32_t>(n)));
    const auto keep = static_cast<int32_t>(1 + rng_.below(static_cast<uint32_t>(n - first)));
    if (!reserve(pages(first + keep))) return;
    cache_.extend(id, pages(first + keep));
    s.reservation += pages(first + keep);
    const int64_t L = config_.layers, K = config_.kv_heads, width = cache_.max_pages();
    std::vector<int32_t> src(L * width), dst(L * width), lists(L * K * keep);
    std::vector<KvCompression> compressions;
    for (int layer = 0; layer < L; layer++) {
      const std::vector<int32_t> before = cache_.pages(id, layer);
      const int64_t reserved_pages = cache_.reserved();
      std::vector<bool> shared;
      for (int32_t page : before) shared.push_back(cache_.pool().references(page) > 1);
      cache_.cut(id, layer, first, first + keep, true, src.data() + layer * width, dst.data() + layer * width);
      int64_t fresh = 0;
      for (int64_t i = 0; i < static_cast<int64_t>(before.size()); i++) {
        const bool kept = i * kPageSlots < first + keep, whole = (i + 1) * kPageSlots <= first;
        fresh += kept && !whole && shared[i];
        if (kept) {
          EXPECT_EQ(cache_.pages(id, layer)[i] != before[i], !whole && shared[i]);
        }
        if (!kept && !shared[i]) s.reservation++;
      }
      s.reservation -= fresh;
      cuts_ += fresh > 0;
      EXPECT_EQ(cache_.reserved(), reserved_pages - fresh);
      compressions.push_back({static_cast<int32_t>(n), first, 0, keep, 0});
      for (int64_t h = 0; h < K; h++) {
        std::vector<int32_t>& values = s.values[layer * K + h];
        std::vector<int32_t> slots(n - first), kept(values.begin(), values.begin() + first);
        std::iota(slots.begin(), slots.end(), first);
        while (static_cast<int32_t>(slots.size()) > keep)
          slots.erase(slots.begin() + rng_.below(static_cast<uint32_t>(slots.size())));
        std::copy(slots.begin(), slots.end(), lists.begin() + (layer * K + h) * keep);
        for (int32_t slot : slots) kept.push_back(values[slot]);
        values = kept;
      }
    }
    const ArenaScope scope(scratch_);
    cache_.copy_cut(scratch_);
    device_.kv_compact({.k_pages = cache_.k_pages,
                        .v_pages = cache_.v_pages,
                        .pos_pages = cache_.fields.pos,
                        .mass_pages = {},
                        .keep = make_tensor(lists.data(), DType::i32, {L, K, keep}),
                        .src_pages = make_tensor(src.data(), DType::i32, {L, width}),
                        .dst_pages = make_tensor(dst.data(), DType::i32, {L, width}),
                        .compressions = make_tensor(compressions.data(), DType::i32, {L, 5}),
                        .work = kv_work(compressions.data(), L)});
    cache_.drop_cut();
    s.limit = std::min(kSlots, (pages(s.slots()) + s.reservation) / config_.layers * kPageSlots);
  }
  void close(int id) {
    cache_.close(id);
    live_.erase(id);
    EXPECT_THROW(cache_.slots(id, 0), std::logic_error);
  }

  // Exact in f32 for the values of a test.
  float key(int32_t value, int layer, int64_t element) const {
    return static_cast<float>(1 + (value * config_.layers + layer) * 10 + element);
  }
  int64_t used() const {
    std::set<int32_t> distinct;
    for (const auto& [id, s] : live_)
      for (int layer = 0; layer < config_.layers; layer++)
        distinct.insert(cache_.pages(id, layer).begin(), cache_.pages(id, layer).end());
    return static_cast<int64_t>(distinct.size());
  }
  void check_books() {
    std::map<int32_t, int32_t> references;
    int64_t reserved_pages = 0;
    for (const auto& [id, s] : live_) {
      reserved_pages += s.reservation;
      for (int layer = 0; layer < config_.layers; layer++) {
        EXPECT_EQ(cache_.slots(id, layer), s.slots());
        for (int32_t page : cache_.pages(id, layer)) references[page]++;
      }
    }
    for (int32_t page = 0; page < kPages; page++) {
      if (cache_.pool().references(page) != references[page]) FAIL() << "references of page " << page;
    }
    EXPECT_EQ(cache_.pool().used(), used());
    EXPECT_EQ(cache_.reserved(), reserved_pages);
    EXPECT_LE(cache_.reserved(), cache_.pool().free());
  }
  void check_slot(int id, int layer, int h, size_t slot, int32_t value) {
    const int64_t K = config_.kv_heads, D = config_.head_dim, in_page = slot % kPageSlots;
    const int32_t page = cache_.page_table(layer).rows(id, 1).as<int32_t>()[slot / kPageSlots];
    EXPECT_EQ(page, cache_.pages(id, layer)[slot / kPageSlots]);
    const float *k = cache_.k_pages.as<float>(), *v = cache_.v_pages.as<float>();
    EXPECT_EQ(cache_.fields.pos.as<int32_t>()[(page * K + h) * kPageSlots + in_page], value);
    for (int64_t d = 0; d < D; d++) {
      const float expected = key(value, layer, h * D + d);
      if (k[((page * K + h) * D + d) * kPageSlots + in_page] != expected ||
          v[((page * K + h) * kPageSlots + in_page) * D + d] != -expected)
        FAIL() << "sequence " << id << ", layer " << layer << ", slot " << slot << ", head " << h << ", element " << d;
    }
  }

  const ModelConfig config_ = small();
  Device device_{table_ref};
  Arena arena_{"kv", host_memory, 1 << 20}, scratch_{"scratch", host_memory, 1 << 20};
  KvCache cache_{config_, evicting(), device_, arena_, DType::f32, kPages, kSequences, kSlots};
  Rng rng_;
  std::map<int, Sequence> live_;
  int32_t next_ = 0;
  int forks_ = 0, refusals_ = 0, cuts_ = 0;  // cuts_: that replaced a shared page
};

TEST(KvCache, RandomOperationsKeepBooksAndContents) {
  for (uint64_t seed = 0; seed < 3; seed++) {
    CacheWorld world(seed);
    for (int i = 0; i < 500; i++) {
      world.step();
      if (i % 10 == 0) world.check_contents();
    }
    world.finish();
    if (testing::Test::HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST(KvCache, BrokenContractsAreNoticed) {
  const ModelConfig config = small();
  Device device(table_null);
  Arena arena("kv", no_memory, 1 << 20);
  KvCache cache(config, {}, device, arena, DType::f32, 12, 2, 40);
  ASSERT_TRUE(cache.reserve(3));
  const int id = cache.open(3);
  cache.append(id, 16);
  EXPECT_THROW(cache.append(id, 1), std::logic_error) << "more pages than reserved_pages";
  EXPECT_FALSE(cache.reserve(10));
  ASSERT_TRUE(cache.reserve(9));
  const int other = cache.open(9);
  EXPECT_THROW(cache.append(other, 41), std::logic_error) << "more slots than a sequence may have";
  EXPECT_THROW(cache.open(0), std::logic_error) << "more sequences than rows";
  cache.close(id);
  EXPECT_THROW(cache.close(id), std::logic_error);
  EXPECT_THROW(cache.append(id, 1), std::logic_error);
}

TEST(KvCache, OnlyChangedTablesAreUploaded) {
  const ModelConfig config = small();
  Device device(table_null);
  Ledger ledger;
  device.ledger = &ledger;
  Arena arena("kv", no_memory, 1 << 20);
  KvCache cache(config, {}, device, arena, DType::f32, 30, 4, 40);
  ASSERT_TRUE(cache.reserve(30));
  const auto uploads_after = [&](int sequence, int64_t slots) {
    const int64_t before = ledger.phases["main"]["upload"].calls;
    cache.append(sequence, slots);
    cache.upload_tables();
    return ledger.phases["main"]["upload"].calls - before;
  };
  const int a = cache.open(9), b = cache.open(9);
  EXPECT_EQ(uploads_after(a, 15), 1);
  EXPECT_EQ(uploads_after(a, 1), 0);
  EXPECT_EQ(uploads_after(b, 16), 1);
  EXPECT_EQ(uploads_after(a, 1), 1);
}

// Tables that lie near each other go in one upload, far ones by themselves.
TEST(KvCache, NeighbouringTablesShareAnUpload) {
  ModelConfig config = small();
  config.layers = 1;
  Device device(table_cpu);
  Ledger ledger;
  device.ledger = &ledger;
  Arena arena("kv", host_memory, size_t{4} << 20);
  constexpr int64_t kPages = 1000;  // of a sequence: 4000 bytes of a table, of which 16 lie between two uploads
  KvCache cache(config, {}, device, arena, DType::f32, 200, 40, kPages * 16);
  ASSERT_TRUE(cache.reserve(200));
  std::vector<int> all;
  for (int i = 0; i < 40; i++) all.push_back(cache.open(5));
  const auto uploads_after = [&](std::initializer_list<int> sequences) {
    const int64_t before = ledger.phases["main"]["upload"].calls;
    for (const int i : sequences) cache.append(all[static_cast<size_t>(i)], 16);
    cache.upload_tables();
    const Tensor table = cache.page_table(0);
    for (const int s : all) {
      const std::vector<int32_t>& pages = cache.pages(s, 0);
      EXPECT_TRUE(std::equal(pages.begin(), pages.end(), table.rows(s, 1).as<int32_t>())) << s;
    }
    return ledger.phases["main"]["upload"].calls - before;
  };
  EXPECT_EQ(uploads_after({0, 1, 2, 3}), 1);
  EXPECT_EQ(uploads_after({5}), 1);
  EXPECT_EQ(uploads_after({3, 20}), 1) << "16 between them";
  EXPECT_EQ(uploads_after({3, 21}), 2) << "17";
  EXPECT_EQ(uploads_after({39, 1, 38}), 2);
  EXPECT_EQ(uploads_after({}), 0);
}

TEST(KvCache, MemoryIsInTheBooks) {
  const ModelConfig config = small();
  Device device(table_null);
  Arena arena("kv", no_memory, 1 << 20);
  KvCache cache(config, {}, device, arena, DType::f32, 32, 4, 64);
  // 32 pages; 4 tables of 3 layers of 4 pages; a list of 3 copies, rounded up to 64 bytes.
  EXPECT_EQ(arena.used(), 32 * KvCache::page_bytes(config, {}, DType::f32) + 4 * 3 * 4 * 4 + 64);
  EXPECT_EQ(KvCache::page_bytes(config, {}, DType::f32), 2 * 2 * 6 * 16 * 4);
}

}  // namespace
}  // namespace pare::test
