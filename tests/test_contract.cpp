// The requirements of a call on its tensors are checked before any table sees them, also when planning.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/device.h"
#include "ops/families.h"

namespace pare::test {
namespace {

Tensor of(DType dtype, std::initializer_list<int64_t> shape) { return make_tensor(nullptr, dtype, shape); }
Tensor f32(std::initializer_list<int64_t> shape) { return of(DType::f32, shape); }

template <class Args>
std::string refusal(void (Device::*op)(const Args&), const Args& a, const Table& table = table_null) {
  Device device(table);
  try {
    (device.*op)(a);
  } catch (const std::logic_error& e) {
    return e.what();
  }
  return "";
}

RmsnormFwd norm(DType act, DType stat) {
  return {.y = of(act, {4, 3}), .rstd = of(stat, {4}), .x = of(act, {4, 3}), .w = of(act, {3}), .eps = 0};
}
std::string refusal(const RmsnormFwd& a) { return refusal(&Device::rmsnorm_fwd, a); }

TEST(Contract, NamesWhatIsWrong) {
  RmsnormFwd a = norm(DType::f32, DType::f32);
  EXPECT_EQ(refusal(a), "");
  a.rstd = f32({3});
  EXPECT_EQ(refusal(a), "rmsnorm_fwd: rstd is f32[3], expected f32[4]");
  a.rstd = f32({4, 1});
  EXPECT_EQ(refusal(a), "rmsnorm_fwd: rstd is f32[4, 1], expected f32[4]");
  a.rstd = {};
  EXPECT_EQ(refusal(a), "rmsnorm_fwd: rstd is absent, expected f32[4]");
  a = norm(DType::f32, DType::f32);
  a.x = f32({4, 0});
  EXPECT_EQ(refusal(a), "rmsnorm_fwd: x is f32[4, 0], expected columns");
}

TEST(Contract, RolesHaveOneTypeEach) {
  const DType wide = DType::f64, narrow = DType::bf16, plain = DType::f32;
  for (const auto& [act, stat] : {std::pair{plain, plain}, {narrow, plain}, {wide, wide}})
    EXPECT_EQ(refusal(norm(act, stat)), "") << dtype_name(act);
  EXPECT_EQ(refusal(norm(wide, plain)), "rmsnorm_fwd: rstd is f32[4], expected f64[4]");
  EXPECT_EQ(refusal(norm(narrow, narrow)), "rmsnorm_fwd: rstd is bf16[4], expected f32[4]");
  EXPECT_EQ(refusal(norm(DType::i32, plain)), "rmsnorm_fwd: x is i32[4, 3], expected f32[4, 3]");
  RmsnormFwd mixed = norm(narrow, plain);
  mixed.w = f32({3});
  EXPECT_EQ(refusal(mixed), "rmsnorm_fwd: w is f32[3], expected bf16[3]");
  // Where a stat comes first.
  EXPECT_EQ(refusal(&Device::embedding_bwd, {of(wide, {5, 2}), f32({3, 2}), of(DType::i32, {3})}),
            "embedding_bwd: dy is f32[3, 2], expected f64[3, 2]");
  EXPECT_EQ(refusal(&Device::embedding_bwd, {f32({5, 2}), of(narrow, {3, 2}), of(DType::i32, {3})}), "");
  EXPECT_EQ(refusal(&Device::embedding_bwd, {f32({5, 2}), f32({3, 2}), f32({3})}),
            "embedding_bwd: ids is f32[3], expected i32[3]");
  EXPECT_EQ(refusal(&Device::accumulate, {of(wide, {3}), f32({3})}), "accumulate: x is f32[3], expected f64[3]");
}

// The cpu computes in f32 alone.
TEST(Contract, ATableMayHaveOneType) {
  for (const DType other : {DType::f64, DType::bf16})
    EXPECT_EQ(refusal(&Device::swiglu_fwd, {of(other, {4, 3}), of(other, {4, 6})}, table_cpu),
              cat("swiglu_fwd: y is ", of(other, {4, 3}), ", expected f32[4, 3]"));
  EXPECT_EQ(refusal(&Device::accumulate, {of(DType::f64, {3}), of(DType::f64, {3})}, table_cpu),
            "accumulate: y is f64[3], expected f32[3]");
}

// Memory for parts: as many sums as the shape needs, or more, and an arrival for each tile.
TEST(Contract, PartsOfAProductHaveTheirMemory) {
  const int64_t rows = 3, inputs = 4104, outputs = 5, least = linear_sums(rows, outputs, inputs);
  ASSERT_EQ(least, linear_parts(outputs, inputs) * 3 * 6);
  LinearFwd a{.y = of(DType::bf16, {rows, outputs}),
              .x = of(DType::bf16, {rows, inputs}),
              .w = {of(DType::bf16, {weight_panels(outputs), inputs, kPanel}), outputs},
              .bias = {},
              .residual = {},
              .parts = {f32({least}), of(DType::i32, {kLinearTiles})}};
  EXPECT_EQ(refusal(&Device::linear_fwd, a), "");
  a.parts.sums = f32({least - 1});
  EXPECT_EQ(refusal(&Device::linear_fwd, a),
            cat("linear_fwd: sums has ", least - 1, " elements, expected ", least, " at least"));
  a.parts = {f32({least}), of(DType::i32, {7})};
  EXPECT_EQ(refusal(&Device::linear_fwd, a), cat("linear_fwd: arrivals is i32[7], expected i32[", kLinearTiles, "]"));
}

// Likewise for parts that are added in turn.
TEST(Contract, PartsInTurnHaveTheirMemory) {
  const int64_t rows = 3, inputs = 5, outputs = 4104, least = linear_turn_sums(rows, inputs, outputs);
  ASSERT_EQ(least, 256 * 256 + kTurnBlocks);
  LinearBwdInput a{.dx = of(DType::bf16, {rows, inputs}),
                   .dy = of(DType::bf16, {rows, outputs}),
                   .w = {of(DType::bf16, {weight_panels(outputs), inputs, kPanel}), outputs},
                   .accumulate = false,
                   .parts = {f32({least}), of(DType::i32, {kLinearTiles})}};
  EXPECT_EQ(refusal(&Device::linear_bwd_input, a), "");
  a.parts.sums = f32({least - 1});
  EXPECT_EQ(refusal(&Device::linear_bwd_input, a),
            cat("linear_bwd_input: sums has ", least - 1, " elements, expected ", least, " at least"));
}

TEST(Contract, RowsMayBeStridedWhereTheOpSaysSo) {
  RmsnormFwd a = norm(DType::f32, DType::f32);
  a.x = f32({4, 8}).columns(2, 3);
  a.y = f32({4, 5}).columns(0, 3);
  EXPECT_EQ(refusal(a), "");
  a.x.stride[1] = 2;
  EXPECT_EQ(refusal(a), "rmsnorm_fwd: x is f32[4, 3] with strides (8, 2), expected contiguous rows");
  const Tensor rows = f32({4, 8}).columns(0, 6);
  EXPECT_EQ(refusal(&Device::swiglu_fwd, {f32({4, 3}), rows}),
            "swiglu_fwd: gate_up is f32[4, 6] with strides (8, 1), expected it contiguous");
  EXPECT_EQ(refusal(&Device::swiglu_fwd, {f32({1, 3}), rows.rows(2, 1)}), "") << "one row has no gap behind it";
  EXPECT_EQ(refusal(&Device::zero, {rows}), "zero: x is f32[4, 6], expected it contiguous");
}

TEST(Contract, WeightsAreWholePanels) {
  const Tensor x = f32({7, 5});
  const auto forward = [&](const Tensor& packed, int64_t outputs, int64_t columns) {
    return refusal(&Device::linear_fwd, {f32({7, columns}), x, Weight{packed, outputs}, {}, {}});
  };
  EXPECT_EQ(forward(f32({2, 5, 16}), 17, 17), "");
  EXPECT_EQ(forward(f32({2, 5, 16}), 16, 16), "linear_fwd: w is f32[2, 5, 16], expected f32[1, 5, 16]");
  EXPECT_EQ(forward(f32({2, 5, 16}), 17, 16), "linear_fwd: y is f32[7, 16], expected f32[7, 17]");
  EXPECT_EQ(forward(f32({2, 6, 16}), 17, 17), "linear_fwd: x is f32[7, 5], expected f32[7, 6]");
  EXPECT_EQ(refusal(&Device::pack_weight, {Weight{f32({2, 5, 16}), 17}, x, 11}), "pack_weight: rows [11, 18) of 17");
}

TEST(Contract, HeadsArePairsOfChannels) {
  QkNormRopeFwd a{};
  a.x = a.y = f32({3, 2, 4});
  a.q_norm = a.k_norm = f32({4});
  a.rstd = f32({3, 2});
  a.table = f32({9, 4});
  a.pos = of(DType::i32, {3});
  a.q_heads = 2;
  EXPECT_EQ(refusal(&Device::qk_norm_rope_fwd, a), "");
  a.q_heads = 3;
  EXPECT_EQ(refusal(&Device::qk_norm_rope_fwd, a), "qk_norm_rope_fwd: q_heads is 3, expected 0 to 2");
  EXPECT_EQ(refusal(&Device::rope_bwd, {f32({3, 2, 5}), f32({9, 5}), a.pos}),
            "rope_bwd: dx is f32[3, 2, 5], expected an even head dim");
}

// Moments may be narrow; both are then.
TEST(Contract, OfAdamW) {
  AdamW a{};
  a.p = f32({2, 5, 16});
  a.grad = f32({17, 5});
  a.norm = f32({1});
  a.step = 1;
  a.m = a.v = of(DType::bf16, {17, 5});
  EXPECT_EQ(refusal(&Device::adamw, a), "");
  a.v = f32({17, 5});
  EXPECT_EQ(refusal(&Device::adamw, a), "adamw: v is f32[17, 5], expected bf16[17, 5]");
  a.m = f32({17, 5});
  a.master = f32({17});
  EXPECT_EQ(refusal(&Device::adamw, a), "adamw: master is f32[17], expected f32[17, 5]");
  a.master = {};
  a.step = 0;
  EXPECT_EQ(refusal(&Device::adamw, a), "adamw: step is 0, expected 1 or more");
}

// Only what the loss reads must be there.
TEST(Contract, OfALoss) {
  LogitsLoss a{};
  for (Tensor* t : {&a.logprob, &a.entropy, &a.loss, &a.kl, &a.weight, &a.kl_weight}) *t = f32({2});
  a.clipped = a.target = of(DType::i32, {2});
  a.logits = f32({2, 9});
  const auto refused = [&] { return refusal(&Device::logits_loss, a); };
  EXPECT_EQ(refused(), "");
  a.spec.policy = PolicyLoss::gspo;
  EXPECT_EQ(refused(), "logits_loss: advantage is absent, expected f32[2]");
  a.advantage = f32({2});
  EXPECT_EQ(refused(), "logits_loss: log_ratio is absent, expected f32[2]");
  a.spec.policy = PolicyLoss::ppo;
  EXPECT_EQ(refused(), "logits_loss: old_logprob is absent, expected f32[2]");
  a.old_logprob = f32({2});
  EXPECT_EQ(refused(), "");
  a.spec.kl = KlLoss::exact;
  EXPECT_EQ(refused(), "logits_loss: ref_logits is absent, expected f32[2, 9]");
  a.spec.kl = KlLoss::k2;
  EXPECT_EQ(refused(), "logits_loss: ref_logprob is absent, expected f32[2]");
  a.ref_logprob = f32({2});
  a.spec.temperature = 0;
  EXPECT_EQ(refused(), "logits_loss: temperature is 0, expected more than 0");
}

// Parents may lie in another batch; they are listed by slots or by blocks.
TEST(Contract, OfAttention) {
  const auto i32 = [](std::initializer_list<int64_t> shape) { return of(DType::i32, shape); };
  AttnBwd a{};
  a.q = a.o = a.d_o = a.dq = f32({5, 4, 8});
  a.k = a.v = a.dk = a.dv = f32({5, 2, 8});
  a.pk = a.pv = a.dpk = a.dpv = f32({3, 2, 8});
  a.lse = f32({5, 4});
  a.segments = i32({1, 4});
  a.scale = 1;
  const auto refused = [](AttnBwd b, auto change) {
    change(b);
    return refusal(&Device::attn_bwd, b);
  };
  EXPECT_EQ(refused(a, [](AttnBwd&) {}), "");
  EXPECT_EQ(refused(a, [](AttnBwd& b) { b.k = f32({5, 3, 8}); }), "attn_bwd: 4 query heads over 3 key heads");
  EXPECT_EQ(refused(a, [](AttnBwd& b) { b.pv = b.pv.rows(1, 2); }),
            "attn_bwd: pv is f32[2, 2, 8], expected f32[3, 2, 8]");
  EXPECT_EQ(refused(a, [](AttnBwd& b) { b.dpv = b.dv; }), "attn_bwd: dpv is f32[5, 2, 8], expected f32[3, 2, 8]");
  EXPECT_EQ(refused(a, [](AttnBwd& b) { b.o = f32({5, 8, 4}); }), "attn_bwd: o is f32[5, 8, 4], expected f32[5, 4, 8]");
  for (const float scale : {0.0f, -1.0f, NAN})
    EXPECT_EQ(refused(a, [&](AttnBwd& b) { b.scale = scale; }),
              cat("attn_bwd: scale is ", scale, ", expected more than 0"));
  a.blocks = i32({5, 2, 3});
  a.block = 4;
  EXPECT_EQ(refused(a, [](AttnBwd&) {}), "attn_bwd: budget is absent, expected i32[5]");
  a.budget = i32({5});
  EXPECT_EQ(refused(a, [](AttnBwd&) {}), "");
  EXPECT_EQ(refused(a, [](AttnBwd& b) { b.block = 8; }), "attn_bwd: blocks of 8 slots, expected 4 or 16");
  EXPECT_EQ(refused(a,
                    [&](AttnBwd& b) {
                      b.lists = i32({3, 2});
                    }),
            "attn_bwd: a parent is listed by slots or by blocks, not both");
}

TEST(Contract, OfPages) {
  const auto i32 = [](std::initializer_list<int64_t> shape) { return of(DType::i32, shape); };
  AttnPaged a{};
  a.o = a.q = f32({5, 4, 8});
  a.k_pages = f32({9, 2, 8, 16});
  a.v_pages = f32({9, 2, 16, 8});
  a.scale = 1;
  a.page_table = i32({6, 7}).columns(0, 4);
  a.queries = i32({3, 4});
  EXPECT_EQ(refusal(&Device::attn_paged, a), "") << "rows of a page table may be strided";
  a.mass_pages = f32({9, 2, 16});
  EXPECT_EQ(refusal(&Device::attn_paged, a), "attn_paged: first is absent, expected i32[3]");
  a.first = i32({3});
  EXPECT_EQ(refusal(&Device::attn_paged, a), "");
  a.blocks = i32({6, 2, 3});
  a.budget = i32({6});
  a.block = 16;
  EXPECT_EQ(refusal(&Device::attn_paged, a), "attn_paged: lists of blocks of slots that have mass");
  AttnPaged b{};
  b.o = b.q = of(DType::bf16, {5, 4, 8});
  b.k_pages = of(DType::bf16, {9, 2, 8, 16});
  b.scale = 1;
  b.v_pages = of(DType::bf16, {9, 2, 16, 8});
  b.page_table = i32({6, 64});
  b.queries = i32({3, 4});
  b.mass_pages = f32({9, 2, 16});
  b.first = i32({3});
  EXPECT_EQ(refusal(&Device::attn_paged, b), "attn_paged: entries of one row, but no work");
  b.work = i32({2, 3});
  EXPECT_EQ(refusal(&Device::attn_paged, b), "attn_paged: work is i32[2, 3], expected i32[2, 2]");
  b.work = i32({2, 2});
  EXPECT_EQ(refusal(&Device::attn_paged, b), "attn_paged: weights is absent, expected f32[9, 2, 3, 16]");
  b.weights = f32({9, 2, 3, 16});
  EXPECT_EQ(refusal(&Device::attn_paged, b), "");
  b.page_table = i32({6, 65});
  EXPECT_EQ(refusal(&Device::attn_paged, b), "attn_paged: results is absent, expected f32[0]");
  b.cuts = {f32({239}), i32({6})};
  EXPECT_EQ(refusal(&Device::attn_paged, b), "attn_paged: results has 239 elements, expected 240 at least");
  b.cuts = {f32({240}), i32({5})};
  EXPECT_EQ(refusal(&Device::attn_paged, b), "attn_paged: arrivals has 5 elements, expected 6 at least");
  b.cuts.arrivals = i32({6});
  EXPECT_EQ(refusal(&Device::attn_paged, b), "");
  a.v_pages = a.k_pages;
  EXPECT_EQ(refusal(&Device::attn_paged, a), "attn_paged: v_pages is f32[9, 2, 8, 16], expected f32[9, 2, 16, 8]");
}

TEST(Contract, OfCompressions) {
  const auto i32 = [](std::initializer_list<int64_t> shape) { return of(DType::i32, shape); };
  KvMerge a{};
  KvCompact& c = a.compact;
  c.k_pages = f32({9, 2, 8, 16});
  c.v_pages = f32({9, 2, 16, 8});
  c.pos_pages = i32({9, 2, 16});
  c.keep = i32({1, 2, 5});
  c.src_pages = c.dst_pages = i32({1, 3});
  c.compressions = i32({1, 5});
  a.kind = KvMergeKind::value;
  a.nearest = i32({1, 2, 48});
  a.cosines = f32({1, 2, 48});
  a.merged = f32({1, 2, 5, 17});
  EXPECT_EQ(refusal(&Device::kv_merge, a), "");
  a.kind = KvMergeKind::d2o;
  EXPECT_EQ(refusal(&Device::kv_merge, a), "kv_merge: threshold is absent, expected f32[0]");
  a.kind = KvMergeKind::value;
  a.keys = MergeKeys::unrotated;
  EXPECT_EQ(refusal(&Device::kv_merge, a), "kv_merge: this kind of merging leaves keys alone");
  const KvSelect select{.keep = c.keep,
                        .score = {},
                        .compressions = c.compressions,
                        .work = {.slots = 9, .candidates = 7, .kept = 5},
                        .shared_heads = false};
  EXPECT_EQ(refusal(&Device::kv_select, select),
            "kv_select: 5 slots stay, of which only 2 are recent, but there are no scores");
  KvWindowScores scores{};
  scores.score = f32({1, 2, 48});
  scores.windows = f32({3, 4, 8});
  scores.k_pages = c.k_pages;
  scores.src_pages = c.src_pages;
  scores.compressions = c.compressions;
  scores.window = 3;
  scores.kernel = 4;
  EXPECT_EQ(refusal(&Device::kv_window_scores, scores),
            "kv_window_scores: window and kernel are 3 and 4, expected 1 or more, the kernel odd");
}

}  // namespace
}  // namespace pare::test
