// Compaction of pages: every way in which what is read and what is written may overlap.
#include <numeric>

#include "base/rng.h"
#include "kv_compression.h"

namespace pare::test {

namespace {

class KvCompaction : public testing::TestWithParam<On> {
 protected:
  const On on = GetParam();
};
INSTANTIATE_TEST_SUITE_P(Tables, KvCompaction, testing::ValuesIn(kRefAndCpu),
                         [](const auto& info) { return std::string(info.param.table->name); });

// Storage of a few pages, one number per element, and a compaction that copies out of place.
struct Pages {
  int64_t pages, kv_heads, dim;
  std::vector<double> k, v, mass;
  std::vector<int32_t> pos;
  Pages(int64_t pages, int64_t kv_heads, int64_t dim) : pages(pages), kv_heads(kv_heads), dim(dim) {
    const int64_t n = pages * kv_heads * 16;
    k.resize(n * dim);
    v.resize(n * dim);
    mass.resize(n);
    pos.resize(n);
    double next = 1;
    for (auto* x : {&k, &v, &mass})
      for (double& y : *x) y = next++;
    std::iota(pos.begin(), pos.end(), 1);
  }
  bool operator==(const Pages&) const = default;

  Pages compacted(const std::vector<KvCompression>& compressions, const std::vector<int32_t>& keep, int64_t max_keep,
                  const std::vector<int32_t>& src, const std::vector<int32_t>& dst, int64_t per_row) const {
    Pages after = *this;
    for (size_t i = 0; i < compressions.size(); i++)
      for (int64_t h = 0; h < kv_heads; h++)
        for (int64_t j = 0; j < compressions[i].keep; j++) {
          const int64_t from = keep[(i * kv_heads + h) * max_keep + j], to = compressions[i].first + j;
          const int64_t x = src[i * per_row + from / 16] * kv_heads + h, y = dst[i * per_row + to / 16] * kv_heads + h;
          for (int64_t d = 0; d < dim; d++) {
            after.k[(y * dim + d) * 16 + to % 16] = k[(x * dim + d) * 16 + from % 16];
            after.v[(y * 16 + to % 16) * dim + d] = v[(x * 16 + from % 16) * dim + d];
          }
          after.pos[y * 16 + to % 16] = pos[x * 16 + from % 16];
          after.mass[y * 16 + to % 16] = mass[x * 16 + from % 16];
        }
    return after;
  }

  Pages compacted_by(On on, const std::vector<KvCompression>& compressions, const std::vector<int32_t>& keep,
                     int64_t max_keep, const std::vector<int32_t>& src, const std::vector<int32_t>& dst,
                     int64_t per_row) const {
    OpRun r(*on.table, on.act);
    const int64_t n = static_cast<int64_t>(compressions.size()), rows = static_cast<int64_t>(keep.size());
    KvCompact a{};
    a.k_pages = r.inout("k", {pages, kv_heads, dim, 16}, k);
    a.v_pages = r.inout("v", {pages, kv_heads, 16, dim}, v);
    a.pos_pages = r.index_inout("pos", {pages, kv_heads, 16}, pos);
    a.mass_pages = r.inout("mass", {pages, kv_heads, 16}, mass);
    a.keep = r.index("keep", {rows / kv_heads / max_keep, kv_heads, max_keep}, keep);
    a.src_pages = r.index("src", {n, per_row}, src);
    a.dst_pages = r.index("dst", {n, per_row}, dst);
    a.compressions = r.index("compressions", {n, 5}, flat(compressions));
    a.work = kv_work(compressions.data(), n);
    r.call(&Table::kv_compact, a);
    EXPECT_TRUE(r.problems.empty()) << joined(r.problems);
    Pages after(pages, kv_heads, dim);
    after.k = r.values("k");
    after.v = r.values("v");
    after.mass = r.values("mass");
    const auto p = r.values("pos");
    after.pos.assign(p.begin(), p.end());
    return after;
  }
};

// n of [first, end), ascending.
std::vector<int32_t> choice(Rng& rng, int32_t first, int32_t end, int32_t n) {
  std::vector<int32_t> kept;
  for (int32_t s = first; s < end; s++)
    if (static_cast<int32_t>(rng.below(end - s)) < n - static_cast<int32_t>(kept.size())) kept.push_back(s);
  return kept;
}

TEST_P(KvCompaction, InPlaceIsOutOfPlace) {
  Rng rng(rng_key(3, RngStream::test, 0));
  const int64_t K = 2, per_row = 5, count = 2 * per_row;
  for (int round = 0; round < 150; round++) {
    KvCompression e{};
    e.slots = 1 + static_cast<int32_t>(rng.below(16 * per_row));
    e.first = static_cast<int32_t>(rng.below(std::min(e.slots, 40)));
    e.keep = 1 + static_cast<int32_t>(rng.below(e.slots - e.first));
    std::vector<int32_t> keep(K * e.keep, -1), src(per_row, -1), dst(per_row, -1);
    for (int64_t h = 0; h < K; h++) {
      const auto kept = choice(rng, e.first, e.slots, e.keep);
      std::copy(kept.begin(), kept.end(), keep.begin() + h * e.keep);
    }
    std::vector<int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = count - 1; i > 0; i--) std::swap(order[i], order[rng.below(static_cast<uint32_t>(i + 1))]);
    for (int64_t p = 0; p * 16 < e.slots; p++) src[p] = order[p];
    for (int64_t p = 0; p * 16 < e.first + e.keep; p++)
      dst[p] = p * 16 >= e.first && rng.below(2) ? order[per_row + p] : src[p];
    const Pages before(count, K, 3);
    EXPECT_TRUE(before.compacted_by(on, {e}, keep, e.keep, src, dst, per_row) ==
                before.compacted({e}, keep, e.keep, src, dst, per_row))
        << "slots " << e.slots << ", first " << e.first << ", keep " << e.keep;
  }
}

// Two samples of one prompt: they read the pages of the prompt, and each writes its own.
TEST_P(KvCompaction, SharedPagesAreReadByAll) {
  const int64_t K = 1, per_row = 3;
  const std::vector<KvCompression> compressions = {{37, 0, 2, 18, 0}, {40, 0, 2, 18, 0}, {33, 16, 0, 2, 0}};
  const std::vector<int32_t> src = {0, 1, 2, 0, 1, 3, 0, 4, 5}, dst = {6, 7, -1, 8, 9, -1, 0, 4, -1};
  std::vector<int32_t> keep(3 * 18, -1);
  for (int32_t i = 0; i < 18; i++) {
    keep[i] = 2 * i + 1;
    keep[18 + i] = 2 * i;
  }
  keep[36] = 20;
  keep[37] = 32;
  const Pages before(10, K, 4);
  EXPECT_TRUE(before.compacted_by(on, compressions, keep, 18, src, dst, per_row) ==
              before.compacted(compressions, keep, 18, src, dst, per_row));
}

TEST(KvCompactionContract, PagesOfOthersAreNotWritten) {
  const auto message = [](const std::vector<int32_t>& src, const std::vector<int32_t>& dst, int32_t first) {
    const std::vector<KvCompression> compressions = {{20, first, 0, 4, 0}, {20, first, 0, 4, 0}};
    try {
      Pages(6, 1, 2).compacted_by({&table_ref, DType::f64}, compressions, {16, 17, 18, 19, 16, 17, 18, 19}, 4, src, dst,
                                  2);
    } catch (const std::logic_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(message({0, 1, 2, 3}, {0, -1, 2, -1}, 0), "");
  EXPECT_EQ(message({0, 1, 0, 3}, {0, 1, 0, 3}, 16), "") << "a page of protected slots may be shared";
  // The first compression got a fresh page, so the second believes to be alone with the old one; but both read it.
  EXPECT_NE(message({0, 1, 0, 3}, {4, -1, 0, -1}, 0).find("page 0 is written by 1 compressions and read by others: 1"),
            std::string::npos);
  EXPECT_NE(message({0, 1, 2, 3}, {4, -1, 4, -1}, 0).find("page 4 is written by 2"), std::string::npos);
  EXPECT_NE(message({0, 1, 2, 3}, {1, -1, 2, -1}, 0).find("source in another place"), std::string::npos);
  EXPECT_NE(message({0, 1, 2, 3}, {4, -1, 2, -1}, 3).find("holds protected slots"), std::string::npos);
}

}  // namespace

}  // namespace pare::test
