// The CUDA kernels of a cache that evicts: values against `ref` in double, in f32 and bf16; and
// bits.  In f32 they have those of `cpu`.  Where nothing is multiplied, bf16 pages that hold the same numbers give the
// same ones; of products by tensor cores test_cuda_compression.cpp states the bits.
//
// (test_ops.cpp runs the same kernels in f32 on small shapes; these have more slots than a tile.)
#include <algorithm>
#include <limits>
#include <numeric>

#include "kernel_call.h"
#include "kv_pages.h"
#include "ops/merge.h"

namespace pare::test {
namespace {

using namespace kernel;

// In f32 the bits of `cpu`.
void check_f32_bits(const Body& body) {
  Call cpu(table_cpu, DType::f32), f32(table_kernels, DType::f32);
  body(cpu);
  body(f32);
  for (const auto& [name, is] : f32.all()) EXPECT_EQ(is->bits(), cpu[name].bits()) << name;
}
// And in bf16 those of f32, activations rounded.
void check_bits(const Body& body) {
  check_f32_bits(body);
  Call f32(table_kernels, DType::f32), bf16(table_kernels, DType::bf16);
  body(f32);
  body(bf16);
  for (const auto& [name, is] : f32.all()) {
    if (is->tensor().dtype == bf16[name].tensor().dtype) {
      EXPECT_EQ(is->bits(), bf16[name].bits()) << name << " of bf16 pages";
      continue;
    }
    for (int64_t i = 0; i < is->size(); i++) {
      const double should = is->get(i), got = bf16[name].get(i);
      if (std::isnan(should) && std::isnan(got)) continue;  // left alone
      ASSERT_EQ(got, from_bf16(to_bf16(should))) << name << "[" << i << "] of bf16 pages";
    }
  }
}

// ---- scores

const cases::Layout kThree{.compressions = {{45, 3, 9, 12, 0}, {16, 0, 9, 9, 0}, {33, 17, 9, 10, 0}}};
// More slots than a tile of 256 has.
const cases::Layout kTiles{.compressions = {{601, 37, 6, 12, 0}, {258, 0, 3, 3, 0}}};

TEST(CudaKv, WindowScores) {
  const std::string small = "H=6,K=2,D=24,window=9,";
  check(body_of("kv_window_scores", small + "kernel=7", kThree));
  for (const char* more : {"aggregate=1,span=1,pool=1,kernel=5", "aggregate=2,span=1,kernel=1"})
    check(body_of("kv_window_scores", small + more, kThree), 0, false);
  // As many heads a key head as can be; pools wider than a tile.
  for (const char* more : {"kernel=513", "aggregate=1,span=1,kernel=1", "aggregate=2,span=1,pool=1,kernel=301"}) {
    const Body body = body_of("kv_window_scores", cat("H=16,K=1,D=40,window=3,", more), kTiles);
    check(body, 0, false);
    check_f32_bits(body);
  }
}

TEST(CudaKv, Redundancy) {
  check(body_of("kv_redundancy", "K=2,D=24",
                {.compressions = {{45, 3, 9, 12, 0}, {16, 16, 0, 0, 0}, {65, 17, 0, 10, 0}}}));
  const Body large = body_of("kv_redundancy", "K=1,D=40", {.compressions = {{301, 37, 6, 12, 0}}});
  check(large, 0, false);
  check_f32_bits(large);
}

// In bf16 the weights are within 1.02e-4 of theirs.
TEST(CudaKv, Mass) {
  for (const Body& body :
       {body_of("attn_paged", "H=6,K=2,D=24,gap=8,mass=1",
                {.sequences = {{1, 40}, {9, 20}, {5, 5}, {1, 1}}, .first = {17, 3, 0, 0}}),
        body_of("attn_paged", "H=3,K=1,D=20,gap=8,mass=1", {.sequences = {{1, 530}, {23, 300}}, .first = {5, 16}})}) {
    check_f32_bits(body);
    Call ref(table_ref, DType::f64);
    body(ref);
    const std::vector<double> should = ref.values("mass_pages");
    std::string first;
    in_all_orders([&] {
      Call bf16(table_kernels, DType::bf16);
      body(bf16);
      const Buffer& is = bf16["mass_pages"];
      EXPECT_TRUE(bf16.zones_intact());
      if (first.empty()) first = is.bits();
      EXPECT_EQ(is.bits(), first);
      for (int64_t i = 0; i < is.size(); i++) ASSERT_NEAR(is.get(i), should[i], 2e-4 * should[i]) << i;
    });
  }
}

TEST(CudaKv, MassScores) {
  const Body body = body_of("kv_mass_scores", "K=3,D=8", {.compressions = {{300, 5, 9, 12, 0}, {16, 16, 0, 0, 0}}});
  check(body, 0, false);
  check_bits(body);
}

// ---- choice

// Many slots and many that are equal.
TEST(CudaKv, SelectAmongManyTies) {
  const float inf = std::numeric_limits<float>::infinity(), tiny = std::numeric_limits<float>::denorm_min();
  const std::vector<std::vector<float>> values = {{0.f},
                                                  {0.f, -0.f},
                                                  {1.f, -1.f},
                                                  {tiny, -tiny, 0.f, -0.f},
                                                  {inf, -inf, 2.f, 3.f, -2.f},
                                                  {1.f, 1.0000001f, 1.0000002f}};
  const cases::Layout layout{
      .compressions = {{2500, 3, 5, 700, 0}, {300, 0, 0, 299, 0}, {270, 4, 8, 9, 0}, {260, 1, 2, 259, 0}}};
  for (size_t which = 0; which < values.size(); which++)
    for (bool shared : {false, true}) {
      const Body body = [&](Call& t) {
        const auto a = arguments<KvSelect>(t, "kv_select", shared ? "K=2,D=8,shared=1" : "K=2,D=8", layout);
        Buffer& buffer = t["score"];
        const auto pick = below(cat("pick", which), buffer.size(), static_cast<int64_t>(values[which].size()));
        for (int64_t i = 0; i < buffer.size(); i++) buffer.set(i, values[which][pick[i]]);
        t.table.kv_select(a, {});
      };
      if (!shared || which != 4) check_bits(body);  // a sum of infinities is NaN
      if (!shared && which == 3) check(body);
    }
}

TEST(CudaKv, SelectAmongManyThousands) {
  check(body_of("kv_select", "K=1,D=8", {.compressions = {{20011, 17, 8, 4096, 0}}}), 0, false);
}

// ---- compaction

// In place over many rounds of 64 slots, most of them moving a little or not at all; V in packs and in elements.
TEST(CudaKv, CompactMovesBits) {
  for (const char* d : {"32", "20"})
    for (int32_t kept : {290, 150, 7})
      for (const char* fresh : {"0", "2"})
        check_bits(body_of("kv_compact", cat("K=1,mass=1,D=", d, ",fresh=", fresh),
                           {.compressions = {{311, 5, 6, kept, 0}, {80, 0, 3, 7, 0}}}));
}

// ---- merging

TEST(CudaKv, Merge) {
  // Nothing is evicted from the second one; more than 64 slots go from the last one, and more than 64 stay.
  const cases::Layout small{.compressions = {{50, 3, 4, 17, 0}, {30, 7, 2, 23, 0}, {20, 0, 0, 1, 0}}},
      large{.compressions = {{211, 5, 8, 97, 0}}};
  for (const char* kind : {"", ",values_only=1", ",by_value=1"}) {
    const Body some = body_of("kv_merge", cat("K=2,D=24", kind), small),
               many = body_of("kv_merge", cat("K=1,D=70", kind), large);
    check(some, 0, std::string(kind) != ",by_value=1");
    check_f32_bits(some);
    check(many, 0, false);
    check_f32_bits(many);
  }
}

// ---- independence

// Everything about a compression depends on that compression alone: scores, choice and what lies in the slots
// afterwards are the same whatever the other compressions and the pages are.
TEST(CudaKv, CompressionsAreIndependent) {
  const KvCompression one{90, 5, 6, 40, 0};
  const int64_t K = 2, d = 24;
  for (DType act : {DType::f32, DType::bf16}) {
    std::string first;
    for (const std::vector<KvCompression>& list :
         {std::vector<KvCompression>{one}, {one, {33, 16, 8, 9, 0}, {300, 0, 9, 20, 0}}}) {
      const cases::Layout layout{.compressions = list};
      std::vector<int32_t> slots;
      for (const KvCompression& e : list) slots.push_back(e.slots);
      const KvPages pages(slots);  // as Compressions has them
      // Keys and values are functions of (compression, slot), scores of (compression, head, slot).
      const auto place = [&](Call& t, std::initializer_list<const char*> names) {
        for (const char* name : names)
          for (size_t i = 0; i < slots.size(); i++)
            for (int32_t s = 0; s < slots[i]; s++) {
              const auto v = normal(cat(name, i, "_", s), K * d);
              for (int64_t e = 0; e < K * d; e++) {
                const int64_t head = pages.page(i, s) * K + e / d;
                const bool k = name[0] == 'k';
                t[name].set(k ? (head * d + e % d) * 16 + s % 16 : (head * 16 + s % 16) * d + e % d,
                            from_bf16(to_bf16(v[e])));
              }
            }
      };
      Call t(table_kernels, act), r(table_kernels, act), c(table_kernels, act);
      const std::string size = cat("K=", K, ",D=", d);
      const auto windows = arguments<KvWindowScores>(t, "kv_window_scores", size + ",H=4,window=6", layout);
      const auto redundancy = arguments<KvRedundancy>(r, "kv_redundancy", size, layout);
      const auto compact = arguments<KvCompact>(c, "kv_compact", size + ",fresh=0,mass=1", layout);
      place(t, {"k_pages"});
      place(r, {"k_pages"});
      place(c, {"k_pages", "v_pages"});
      const int64_t most = windows.score.shape[2];
      for (int64_t h = 0; h < K; h++)
        for (int32_t s = 0; s < one.slots; s++) r["score"].set(h * most + s, std::sin(h * 1000 + s));
      table_kernels.kv_window_scores(windows, {});
      table_kernels.kv_redundancy(redundancy, {});
      table_kernels.kv_compact(compact, {});
      std::string bits;
      for (int64_t h = 0; h < K; h++)
        for (Call* x : {&t, &r}) bits += (*x)["score"].bits(h * most, h * most + one.slots);
      for (int32_t slot = 0; slot < one.first + one.keep; slot++)
        for (int64_t h = 0; h < K; h++) {
          const int64_t at = (pages.page(0, slot) * K + h) * 16 + slot % 16;
          bits += c["v_pages"].bits(at * d, (at + 1) * d) + c["pos_pages"].bits(at, at + 1);
        }
      if (first.empty()) first = bits;
      EXPECT_EQ(bits, first);
    }
  }
}

TEST(CudaKv, UnsupportedArgumentsAreNamed) {
  const cases::Layout layout{.compressions = {{20, 0, 2, 9, 0}}};
  EXPECT_EQ(refusal(DType::f32, body_of("kv_window_scores", "H=4,K=2,D=8,window=2,kernel=515", layout)),
            "kv_window_scores: kernel is 515, expected at most 513");
  EXPECT_EQ(refusal(DType::f32, body_of("kv_window_scores", "H=34,K=2,D=8,window=1,kernel=1", layout)),
            "kv_window_scores: 34 query heads over 2 key heads; at most 16 can share one");
  EXPECT_EQ(refusal(DType::f32, body_of("kv_redundancy", "K=1,D=257", layout)),
            "kv_redundancy: head_dim 257 is not in [1, 256]");
}

}  // namespace
}  // namespace pare::test
