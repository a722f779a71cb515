// CUDA kernels in bf16 that test_ops.cpp runs in f32 only: values against `ref` in double from the same bf16 inputs,
// and the bits that rollout and learner must share.
#include <set>

#include "cuda/linear_tiles.h"
#include "kernel_call.h"
#include "ops/data.h"
#include "ops/logits.h"
#include "ops/paged.h"
#include "ops/probe.h"
#include "ptx_kernels.h"

namespace pare::test {
namespace {

using namespace kernel;

TEST(CudaBf16, Linear) {
  for (const auto& shape :
       {std::array<int64_t, 4>{1, 1, 1, 0}, {5, 17, 3, 7}, {66, 63, 70, 0}, {3, 130, 16, 8}, {209, 40, 72, 0}})
    check(
        [&](Call& t) {
          const auto& [n, i, o, gap] = shape;
          const Tensor x = t.act("x", {n, i}, gap), dy = t.act("dy", {n, o}, gap), bias = t.act("bias", {o});
          const Weight w = t.weight("w", o, i);
          t.table.linear_fwd({t.act_out("y", {n, o}, gap), x, w, {}, {}}, {});
          const Tensor residual = t.act("residual", {n, o}, gap);
          t.table.linear_fwd({residual, x, w, bias, residual}, {});  // in place
          t.table.linear_bwd_input({t.act_out("dx", {n, i}, gap), dy, w, false}, {});
          t.table.linear_bwd_input({t.act("sum", {n, i}, gap), dy, w, true}, {});
          t.table.linear_bwd_weight({t.stat("dw", {o, i}), t.stat("dbias", {o}), dy, x}, {});
        },
        0, shape[0] == 5);
}

TEST(CudaBf16, Rows) {
  for (int64_t c : {1, 7, 8, 136})
    check([&](Call& t) {
      const Tensor ids = t.index("ids", {5}, {3, 0, 3, 6, 1});
      const Tensor x = t.act("x", {5, c});
      t.table.embedding_fwd({t.act_out("embedded", {5, c}), t.weight("tokens", 7, c), ids}, {});
      t.table.embedding_bwd({t.stat("dtable", {7, c}), x, ids}, {});
      t.table.copy_rows({t.act("to", {4, c}, 3), t.act("from", {6, c}, 8), t.index("pairs", {2, 2}, {5, 0, 1, 3})}, {});
    });
  // Sums rounded to bf16 at every addition.
  check(
      [&](Call& t) {
        t.table.scatter_add_rows({t.act("y", {7, 20}), t.act("x", {5, 20}), t.index("index", {5}, {3, 0, 3, 6, 3})},
                                 {});
      },
      3. / 64);
}

TEST(CudaBf16, PagesAreWrittenAndCopied) {
  for (int64_t d : {20, 64})
    check([&](Call& t) {
      const Tensor k_pages = t.act("k_pages", {6, 2, d, 16}), v_pages = t.act("v_pages", {6, 2, 16, d});
      const Tensor mass = t.stat("mass", {6, 2, 16}), pos = t.index("pos_pages", {6, 2, 16}, std::vector<int32_t>(192));
      KvWrite write{};
      write.k_pages = k_pages, write.v_pages = v_pages;
      write.k = t.act("k", {8, 2, d}, 3), write.v = t.act("v", {8, 2, d}, 8);
      write.page_table = t.index("table", {2, 3}, {4, 0, 2, 3, -1, -1});
      write.queries = t.index("queries", {2, 4}, {7, 1, 9, 1, 0, 7, 36, 0});
      write.pos_pages = pos;
      write.pos = t.index("pos", {8}, {40, 41, 42, 43, 44, 45, 46, 8});
      t.table.kv_write(write, {});
      KvCopyPages copy{k_pages, v_pages, t.index("pairs", {2, 2}, {0, 5, 2, 1})};
      copy.pos_pages = pos, copy.mass_pages = mass;
      t.table.kv_copy_pages(copy, {});
    });
}

TEST(CudaBf16, Logprob) {
  for (const auto& row : {std::pair<int64_t, float>{1, 1.f}, {127, 0.5f}, {128, 1.f}, {129, 0.7f}, {1000, 1.3f}})
    check([&](Call& t) {
      const auto& [vocabulary, temperature] = row;
      const Tensor logits = t.act("logits", {3, vocabulary});
      const int32_t last = static_cast<int32_t>(vocabulary - 1);
      t.table.logprob({t.stat_out("logprob", {3}), t.stat_out("entropy", {3}), logits,
                       t.index("target", {3}, {0, last, last / 2}), temperature},
                      {});
    });
}

TEST(CudaBf16, LogitsLoss) {
  for (PolicyLoss policy : {PolicyLoss::nll, PolicyLoss::ppo, PolicyLoss::gspo, PolicyLoss::cispo})
    for (KlLoss kl : {KlLoss::none, KlLoss::k3, KlLoss::exact, KlLoss::exact_forward})
      check(
          [&](Call& t) {
            LogitsLoss a{};
            a.logprob = t.stat_out("logprob", {3}), a.entropy = t.stat_out("entropy", {3});
            a.loss = t.stat_out("loss", {3}), a.kl = t.stat_out("kl", {3}), a.clipped = t.index("clipped", {3}, {});
            a.logits = t.act("logits", {3, 131}), a.target = t.index("target", {3}, {130, 0, 64});
            a.weight = t.stat("weight", {3}), a.kl_weight = t.stat("kl_weight", {3});
            a.advantage = t.stat("advantage", {3}), a.old_logprob = t.stat("old_logprob", {3});
            for (int i = 0; i < 3; i++) t["old_logprob"].set(i, -5.5 - i);  // the log-probs lie there
            if (policy == PolicyLoss::gspo) a.log_ratio = t.stat("log_ratio", {3});
            if (kl == KlLoss::k3) a.ref_logprob = t.stat("ref_logprob", {3});
            if (is_exact(kl)) a.ref_logits = t.act("ref_logits", {3, 131});
            a.spec = {
                .policy = policy, .kl = kl, .clip_c = 3, .kl_coef = 0.3f, .entropy_coef = 0.1f, .temperature = 0.8f};
            t.table.logits_loss(a, {});
          },
          0, policy == PolicyLoss::ppo);
}

TEST(CudaBf16, Sample) {
  struct Case {
    float temperature;
    int32_t top_k;
    float top_p;
  };
  for (const Case& c : {Case{1, 0, 1}, {0, 0, 1}, {0.7f, 9, 1}, {1.3f, 0, 0.8f}, {1, 100, 0.5f}})
    check(
        [&](Call& t) {
          const Tensor logits = t.act("logits", {4, 259});
          std::vector<double> before(logits.size());
          for (size_t i = 0; i < before.size(); i++) before[i] = t["logits"].get(static_cast<int64_t>(i));
          t.table.sample({t.index("token", {4}, {}), t.stat_out("logprob", {4}), logits,
                          t.index("counter", {4, 3}, {1, 0, 5, 2, 0, 5, 1, 7, 6, -3, 9, 1 << 20}),
                          rng_key(3, RngStream::sample, 1), c.temperature, c.top_k, c.top_p},
                         {});
          for (size_t i = 0; i < before.size(); i++) t["logits"].set(static_cast<int64_t>(i), before[i]);  // scratch
        },
        0, c.top_k == 9);
}

// left [rows][depth] times right [columns][depth], transposed: for each result and `chunk` of k one chain of products
// of 16 by the tensor cores, k ascending; the chains added up in order.
std::vector<float> chains(const std::vector<uint16_t>& left, const std::vector<uint16_t>& right, int64_t rows,
                          int64_t columns, int64_t depth, int64_t chunk = 512) {
  std::vector<float> y(static_cast<size_t>(rows * columns));
  Call t(table_kernels, DType::bf16);
  float* const d = t.stat("sum", {16, 8}).as<float>();
  const Tensor a = t.act("a", {16, 16}), b = t.act("b", {8, 16});
  for (int64_t i = 0; i < rows; i += 16)
    for (int64_t j = 0; j < columns; j += 8)
      for (int64_t k = 0; k < depth; k += 16) {
        const auto fill = [&](const char* name, const std::vector<uint16_t>& from, int64_t first, int64_t n) {
          Buffer& to = t[name];
          for (int64_t e = 0; e < to.size(); e++) {
            const int64_t r = first + e / 16, c = k + e % 16;
            to.set(e, r < n && c < depth ? from_bf16(from[r * depth + c]) : 0.f);
          }
        };
        fill("a", left, i, rows), fill("b", right, j, columns);
        if (k % chunk == 0)
          for (int e = 0; e < 128; e++) t["sum"].set(e, 0);
        ptx::multiply(d, static_cast<const uint16_t*>(a.data), static_cast<const uint16_t*>(b.data), 1);
        if (k % chunk == chunk - 16 || k + 16 >= depth)
          for (int64_t e = 0; e < 128; e++)
            if (i + e / 8 < rows && j + e % 8 < columns)
              y[(i + e / 8) * columns + j + e % 8] += static_cast<float>(t["sum"].get(e));
      }
  return y;
}
std::string rounded(const std::vector<float>& x) {
  std::vector<uint16_t> y;
  for (float f : x) y.push_back(to_bf16(f));
  return {reinterpret_cast<const char*>(y.data()), y.size() * 2};
}

TEST(CudaBf16, LinearIsChainsOfTensorCoreProducts) {
  for (const auto& [n, i, o] : {std::array<int64_t, 3>{1, 1, 1},
                                {3, 24, 17},
                                {66, 72, 7},
                                {17, 330, 24},
                                {2, 24, 530},
                                {1, 2600, 9},
                                {70, 1090, 5},
                                {530, 9, 16}}) {
    Call t(table_kernels, DType::bf16);
    const Weight w = t.weight("w", o, i);
    const Tensor x = t.act("x", {n, i}), dy = t.act("dy", {n, o}), dw = t.stat("dw", {o, i});
    std::vector<float> dw_is;
    for (int64_t e = 0; e < o * i; e++) dw_is.push_back(static_cast<float>(t["dw"].get(e)));
    table_kernels.linear_fwd({t.act_out("y", {n, o}), x, w, {}, {}}, {});
    table_kernels.linear_bwd_input({t.act_out("dx", {n, i}), dy, w, false}, {});
    table_kernels.linear_bwd_weight({dw, {}, dy, x}, {});
    const auto values = [&](const char* name) {
      std::vector<uint16_t> v(t[name].size());
      std::memcpy(v.data(), t[name].bits().data(), v.size() * 2);
      return v;
    };
    const auto across = [](const std::vector<uint16_t>& v, int64_t rows) {
      const int64_t columns = static_cast<int64_t>(v.size()) / rows;
      std::vector<uint16_t> to(v.size());
      for (int64_t e = 0; e < rows * columns; e++) to[e % columns * rows + e / columns] = v[e];
      return to;
    };
    const std::string shape = cat(n, " rows, ", i, " to ", o);
    EXPECT_EQ(t["y"].bits(), rounded(chains(values("x"), values("w"), n, o, i))) << shape;
    EXPECT_EQ(t["dx"].bits(), rounded(chains(values("dy"), across(values("w"), o), n, i, o))) << shape;
    const std::vector<float> added = chains(across(values("dy"), n), across(values("x"), n), o, i, n);
    for (size_t e = 0; e < dw_is.size(); e++) dw_is[e] += added[e];
    EXPECT_EQ(t["dw"].bits(), std::string(reinterpret_cast<const char*>(dw_is.data()), dw_is.size() * 4)) << shape;
  }
}

// 2^30 in the first chunk of k, -2^30 in the second, and ones in the others, which a chain with either would lose.
TEST(CudaBf16, ChunksOfLinearLayersAreSumsOfTheirOwn) {
  constexpr int64_t width = 9, side = 72;  // of y and dx, and of dw
  for (const auto& [n, depth] : {std::pair<int64_t, int64_t>{1, 2104}, {17, 2104}, {66, 1096}})
    for (int64_t gap : {0, 1}) {  // rows that begin at multiples of 16 bytes, or anywhere
      const auto value = [last = depth - 1](int64_t k) {
        const bool edge = k % 512 == 0 || k % 512 == 511 || k == last;
        return k == 0 ? 0x1p30 : k == 512 ? -0x1p30 : k >= 1024 && edge ? 1. : 0.;
      };
      double sum = 0;
      for (int64_t k = 0; k < depth; k++) sum += value(k);
      Call t(table_kernels, DType::bf16);
      const auto filled = [&](const Tensor& x, const char* name, auto f) {  // f(row, column)
        for (int64_t e = 0; e < t[name].size(); e++) t[name].set(e, f(e / x.shape[1], e % x.shape[1]));
        return x;
      };
      const auto one = [](int64_t, int64_t) { return 1.; };
      const auto along = [&](int64_t, int64_t k) { return value(k); };
      const auto down = [&](int64_t k, int64_t) { return value(k); };
      const auto act = [&](const char* name, int64_t rows, int64_t columns, auto f) {
        return filled(t.act_out(name, {rows, columns}, gap), name, f);
      };
      const auto ones = [&](const char* name, int64_t outputs, int64_t inputs) {
        const Weight w = t.weight(name, outputs, inputs);
        table_kernels.pack_weight({w, filled(t[name].tensor(), name, one), 0}, {});
        return w;
      };
      table_kernels.linear_fwd({t.act_out("y", {n, width}), act("x", n, depth, along), ones("w", width, depth), {}, {}},
                               {});
      table_kernels.linear_bwd_input(
          {t.act_out("dx", {n, width}), act("dy", n, depth, along), ones("wT", depth, width), false}, {});
      const auto expect_everywhere = [&, n = n](const char* name, double value) {
        for (int64_t e = 0; e < t[name].size(); e++)
          ASSERT_EQ(t[name].get(e), value) << name << "[" << e << "], " << n << " rows, gap " << gap;
      };
      expect_everywhere("y", sum), expect_everywhere("dx", sum);
      if (n <= 64) continue;
      table_kernels.linear_bwd_weight({filled(t.stat("dw", {side, side}), "dw", one),
                                       {},
                                       act("rows of dy", depth, side, down),
                                       act("rows of x", depth, side, one)},
                                      {});
      expect_everywhere("dw", 1 + sum);
    }
}

// Beyond 4096 columns k is one chunk.
TEST(CudaBf16, WideLinearIsOneChain) {
  const int64_t n = 17, i = 530, o = 4097;
  Call t(table_kernels, DType::bf16);
  const Weight w = t.weight("w", o, i);
  const Tensor x = t.act("x", {n, i});
  table_kernels.linear_fwd({t.act_out("y", {n, o}), x, w, {}, {}}, {});
  for (int64_t r : {0, 16}) {
    table_kernels.linear_fwd({t.act_out("row", {1, o}), x.rows(r, 1), w, {}, {}}, {});
    EXPECT_EQ(t["row"].bits(), t["y"].bits(r * o, (r + 1) * o));
  }
  const auto some = [&](const char* name, int64_t begin, int64_t end) {
    std::vector<uint16_t> v(static_cast<size_t>(end - begin));
    std::memcpy(v.data(), t[name].bits(begin, end).data(), v.size() * 2);
    return v;
  };
  const int64_t from = 4080;  // columns
  EXPECT_EQ(t["y"].bits(from, o),
            rounded(chains(some("x", 0, i), some("w", from * i, o * i), 1, o - from, i, 1 << 30)));
}

TEST(CudaBf16, LinearRowsAreIndependentOfTheirNumber) {
  const int64_t n = 70, i = 1130, o = 67;
  Call t(table_kernels, DType::bf16);
  const Weight w = t.weight("w", o, i);
  const Tensor x = t.act("x", {n, i}), bias = t.act("bias", {o}), residual = t.act("residual", {n, o});
  table_kernels.linear_fwd({t.act_out("y", {n, o}), x, w, bias, residual}, {});
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {69, 1}, {3, 17}, {1, 64}, {5, 65}}) {
    table_kernels.linear_fwd(
        {t.act_out("some", {count, o}), x.rows(first, count), w, bias, residual.rows(first, count)}, {});
    EXPECT_EQ(t["some"].bits(), t["y"].bits(first * o, (first + count) * o)) << count << " rows from " << first;
  }
}

constexpr int kEmulated = 20;  // multiprocessors of the emulated device

WgmmaTile tile_of(int64_t rows, int64_t columns, int64_t depth, int multiprocessors) {
  return best_tile(columns > 4096 ? kWideTiles : kNarrowTiles, rows, columns, depth, multiprocessors);
}

// The products of a layer of Qwen2.5-1.5B on 132 multiprocessors: one wave in place of two, or the fewest bytes.
TEST(CudaBf16, TilesAreThoseOfTheModelOfTheirTime) {
  struct Product {
    int64_t rows, columns, depth;
    WgmmaTile tile;
  };
  for (const Product& p : {Product{256, 17920, 1536, {128, 144}},
                           {1024, 17920, 1536, {128, 256}},
                           {4096, 17920, 1536, {128, 256}},
                           {256, 1536, 8960, {64, 64}},
                           {1024, 1536, 8960, {128, 128}},
                           {4096, 1536, 8960, {128, 192}},
                           {4096, 1536, 17920, {128, 192}},
                           {256, 151936, 1536, {128, 256}}})
    EXPECT_EQ(tile_of(p.rows, p.columns, p.depth, 132), p.tile) << p.rows << " x " << p.columns;
  // Measured on an H100, us (tools/bench/results/h100.md), at 1755 MHz.
  const auto us = [](const Product& p) { return tile_clocks(p.rows, p.columns, p.depth, p.tile, 132) / 1755; };
  EXPECT_NEAR(us({256, 17920, 1536, {128, 256}}), 55.7, 0.1 * 55.7);
  EXPECT_NEAR(us({256, 1536, 8960, {128, 64}}), 42.2, 0.1 * 42.2);
  EXPECT_NEAR(us({4096, 17920, 1536, {128, 256}}), 449, 0.1 * 449);
  EXPECT_NEAR(us({4096, 1536, 17920, {128, 128}}), 425, 0.1 * 425);
  EXPECT_NEAR(us({17920, 1536, 4096, {128, 128}}), 481, 0.1 * 481);
}

// With more than 64 rows another kernel may multiply (wgmma on compute capability 9.0): each row has the bits that it
// has among 64.  On a device that kernel is asked for, whatever the device would choose.
TEST(CudaBf16, LinearHasTheSameBitsFromEveryKernel) {
  const Probe* const probe = table_kernels.probe;
  const auto ask_for = [&](TensorKernel kernel) { return !probe || probe->tensor_kernel(kernel); };
  if (!ask_for(TensorKernel::wgmma)) GTEST_SKIP() << "this device has one kernel";
  std::set<std::array<int, 3>> tiles;  // wide, rows, columns: those that the emulator takes
  const auto same_bits = [&](int64_t n, int64_t i, int64_t o, int64_t gap) {
    SCOPED_TRACE(cat(n, " rows, ", i, " to ", o, ", gap ", gap));
    for (const auto& [columns, depth] : {std::pair{o, i}, {i, o}})
      if (n > 64) {
        const WgmmaTile tile = tile_of(n, columns, depth, kEmulated);
        tiles.insert({columns > 4096, tile.rows, tile.columns});
      }
    Call t(table_kernels, DType::bf16);
    const Weight w = t.weight("w", o, i);
    const Tensor x = t.act("x", {n, i}, gap), dy = t.act("dy", {n, o}, gap), bias = t.act("bias", {o}),
                 residual = t.act("residual", {n, o}, gap);
    std::string y, dx;
    ask_for(TensorKernel::mma);
    for (int64_t first = 0; first < n; first += 64) {
      const int64_t count = std::min<int64_t>(64, n - first);
      table_kernels.linear_fwd(
          {t.act_out("some y", {count, o}), x.rows(first, count), w, bias, residual.rows(first, count)}, {});
      table_kernels.linear_bwd_input({t.act_out("some dx", {count, i}), dy.rows(first, count), w, false}, {});
      y += t["some y"].bits(), dx += t["some dx"].bits();
    }
    ask_for(TensorKernel::wgmma);
    table_kernels.linear_fwd({t.act_out("y", {n, o}, gap), x, w, bias, residual}, {});
    table_kernels.linear_bwd_input({t.act_out("dx", {n, i}, gap), dy, w, false}, {});
    EXPECT_EQ(t["y"].bits(), y);
    EXPECT_EQ(t["dx"].bits(), dx);
    for (const char* name : {"y", "dx"}) EXPECT_TRUE(t[name].zones_intact()) << name;
  };
  for (const auto& [n, i, o, gap] : {std::array<int64_t, 4>{65, 8, 8, 0},
                                     {66, 16, 16, 8},
                                     {80, 17, 9, 7},
                                     {100, 24, 130, 0},  // rows of dy begin anywhere
                                     {127, 72, 40, 16},
                                     {128, 64, 128, 0},
                                     {200, 48, 600, 8},
                                     {257, 328, 24, 0},
                                     {300, 120, 328, 0},
                                     {67, 1090, 24, 0},   // chunks of k
                                     {66, 24, 4112, 0},   // wide: one chunk, forward
                                     {130, 4104, 16, 0},  // and backward
                                     {130, 16, 4112, 8},
                                     {66, 4112, 24, 0},
                                     {260, 8, 4112, 0},
                                     {2100, 8, 264, 0},
                                     {1290, 8, 384, 0},
                                     {1200, 8, 384, 0},
                                     {1200, 384, 8, 0}})
    same_bits(n, i, o, gap);
  if (probe)  // more multiprocessors take wide tiles for larger products alone
    for (const auto& [n, i, o] : {std::array<int64_t, 3>{4300, 8, 264},
                                  {4300, 8, 512},
                                  {4300, 512, 8},
                                  {130, 8, 9000},
                                  {130, 9000, 8},
                                  {130, 8, 16896},
                                  {130, 16896, 8}})
      same_bits(n, i, o, 0);
  in_all_orders([&] { same_bits(129, 136, 264, 0); });
  const std::set<std::array<int, 3>> all = {{0, 64, 64},   {0, 128, 64},  {0, 128, 128}, {0, 128, 192},
                                            {1, 128, 128}, {1, 128, 144}, {1, 128, 256}};
  EXPECT_EQ(tiles, all);
  ask_for(TensorKernel::choose);
}

// So has the gradient of a weight.  Rows that begin anywhere are for mma.sync alone, in the emulation too, where no
// kernel can be asked for.
TEST(CudaBf16, WeightGradientHasTheSameBitsFromEveryKernel) {
  const Probe* const probe = table_kernels.probe;
  const auto ask_for = [&](TensorKernel kernel) { return !probe || probe->tensor_kernel(kernel); };
  if (!ask_for(TensorKernel::wgmma)) GTEST_SKIP() << "this device has one kernel";
  // dw begins `offset` elements behind a multiple of 16 bytes, and holds something.
  const auto same_bits = [&](int64_t n, int64_t i, int64_t o, int64_t gap, int64_t offset) {
    SCOPED_TRACE(cat(n, " rows, ", i, " to ", o, ", gap ", gap, ", offset ", offset));
    std::string bits;
    for (const TensorKernel kernel : {TensorKernel::mma, TensorKernel::wgmma}) {
      ask_for(kernel);
      const auto rest = [&](int64_t width) {
        return kernel == TensorKernel::mma ? 1 + width % 2 : gap + (8 - width % 8) % 8;
      };
      Call t(table_kernels, DType::bf16);
      const Tensor x = t.act("x", {n, i}, rest(i)), dy = t.act("dy", {n, o}, rest(o)),
                   dw = t.stat("dw", {offset + o * i + 1});
      table_kernels.linear_bwd_weight({make_tensor(dw.as<float>() + offset, DType::f32, {o, i}), {}, dy, x}, {});
      if (kernel == TensorKernel::mma)
        bits = t["dw"].bits();
      else
        EXPECT_EQ(t["dw"].bits(), bits);
      for (const char* name : {"x", "dy", "dw"}) EXPECT_TRUE(t[name].zones_intact()) << name;
    }
  };
  for (const auto& [n, i, o, gap, offset] : {std::array<int64_t, 5>{1, 72, 65, 0, 0},
                                             {15, 65, 130, 8, 0},
                                             {16, 66, 72, 0, 1},
                                             {17, 128, 128, 0, 2},
                                             {63, 129, 80, 16, 0},
                                             {64, 136, 66, 0, 0},
                                             {65, 300, 72, 0, 0},
                                             {127, 72, 300, 8, 0},
                                             {129, 200, 136, 0, 0},
                                             {300, 131, 67, 0, 3},
                                             {512, 72, 72, 0, 0},  // chunks of n
                                             {530, 80, 70, 8, 0},
                                             {1100, 66, 67, 0, 0},
                                             {20, 8, 300, 0, 0},  // narrow: in the emulation by mma.sync
                                             {20, 300, 9, 0, 0},
                                             {20, 17, 24, 8, 0},
                                             {33, 136, 2120, 0, 0},
                                             {530, 136, 2120, 8, 1},
                                             {20, 192, 2560, 0, 0}})
    same_bits(n, i, o, gap, offset);
  for (const int64_t i : {136, 192}) EXPECT_EQ(best_tile(kGradientTiles, 2120, i, 20, kEmulated).columns, 192);
  if (probe) same_bits(20, 192, 8576, 0, 0);
  in_all_orders([&] { same_bits(500, 72, 136, 0, 0), same_bits(20, 71, 66, 0, 0); });
  ask_for(TensorKernel::choose);
}

// The promise: what the sampler records for a token is what the learner computes from the same hidden row, however
// many rows share the pass.
TEST(CudaBf16, TheSamplersLogprobIsTheLearners) {
  for (int64_t vocabulary : {1, 127, 128, 129, 1000, 151936}) {
    const int64_t n = vocabulary > 1000 ? 2 : 6, width = vocabulary > 1000 ? 16 : 40;
    const float temperature = vocabulary % 2 ? 0.7f : 1;
    Call t(table_kernels, DType::bf16);
    const Weight head = t.weight("head", vocabulary, width);
    const Tensor hidden = t.act("hidden", {n, width});
    std::vector<int32_t> tokens;
    std::string sampled;
    for (int32_t r = 0; r < n; r++) {  // the sampler: a row at a time
      const Tensor logits = t.act_out("row", {1, vocabulary});
      table_kernels.linear_fwd({logits, hidden.rows(r, 1), head, {}, {}}, {});
      table_kernels.sample({t.index("token", {1}, {}), t.stat_out("sampled", {1}), logits,
                            t.index("counter", {1, 3}, {r, 0, 9}), rng_key(5, RngStream::sample, 2), temperature, 0, 1},
                           {});
      tokens.push_back(static_cast<int32_t>(t["token"].get(0)));
      sampled += t["sampled"].bits();
    }
    const Tensor logits = t.act_out("logits", {n, vocabulary}), target = t.index("target", {n}, tokens);
    table_kernels.linear_fwd({logits, hidden, head, {}, {}}, {});
    table_kernels.logprob({t.stat_out("logprob", {n}), t.stat_out("entropy", {n}), logits, target, temperature}, {});
    EXPECT_EQ(t["logprob"].bits(), sampled);
    LogitsLoss loss{};
    loss.logprob = t.stat_out("in_loss", {n}), loss.entropy = t.stat_out("h", {n}), loss.loss = t.stat_out("loss", {n});
    loss.kl = t.stat_out("kl", {n}), loss.clipped = t.index("clipped", {n}, {}), loss.logits = logits;
    loss.target = target, loss.weight = t.stat("weight", {n}), loss.kl_weight = t.stat("kl_weight", {n});
    loss.spec.temperature = temperature;
    table_kernels.logits_loss(loss, {});
    EXPECT_EQ(t["in_loss"].bits(), sampled);
  }
}

}  // namespace
}  // namespace pare::test
