// Attention backward and attention with lists of blocks by the CUDA kernels in bf16: values against `ref` in double
// from the same inputs, bits against the promises of cuda/attention_bwd.cu and cuda/attention_fwd.cu.  What is written
// twice against one another, bit by bit.  (test_ops.cpp compares the same kernels in f32 with the `cpu` table, bit by
// bit.)
#include <numbers>
#include <numeric>

#include "kernel_call.h"
#include "kernels.h"
#include "ops/attention.h"
#include "ops/probe.h"

namespace pare::test {
namespace {

using namespace kernel;

struct Case {
  int64_t rows, heads, kv_heads, d, gap;
  std::vector<SegmentRow> segments;
  int64_t parent_rows = 0;          // 0: parents lie among the rows themselves
  std::vector<int32_t> lists = {};  // [G, kv_heads]
  int32_t block = 0, budget = 0;    // 0: no lists of blocks; some rows read everything
};

int64_t group(const Case& c) { return c.heads / c.kv_heads; }
// Blocks that a row reads which sees `total` slots (more than it has: all).
int32_t budget_of(const Case& c, int64_t total) { return total % 9 == 1 ? INT32_MAX : c.budget; }
// Its list: the last block, and others spread over the sequence, in another way for odd heads.
std::vector<int32_t> block_list(const Case& c, int64_t kv_head, int64_t total) {
  const auto all = static_cast<int32_t>(blocks_of(total, c.block)), n = c.budget;
  std::vector<int32_t> list;
  for (int32_t e = 0; e + 1 < n; e++)
    list.push_back(kv_head % 2 ? all - 2 - (n - 2 - e) * (all - 1) / (n - 1) : e * (all - 1) / (n - 1));
  list.push_back(all - 1);
  return list;
}
// The slots that row i of a segment sees.
std::vector<int64_t> visible(const Case& c, const SegmentRow& g, int64_t i, int64_t kv_head) {
  const int64_t total = g.parent_len + i + 1;
  std::vector<int64_t> slots(total);
  std::iota(slots.begin(), slots.end(), 0);
  if (!c.block || blocks_of(total, c.block) <= budget_of(c, total)) return slots;
  slots.clear();
  for (int64_t b : block_list(c, kv_head, total))
    for (int64_t s = b * c.block; s < std::min(total, (b + 1) * c.block); s++) slots.push_back(s);
  return slots;
}

cases::Layout layout(const Case& c) {
  cases::Layout l{.segments = c.segments, .rows = c.rows, .parent_rows = c.parent_rows, .lists = c.lists};
  if (!c.block) return l;
  l.budget.assign(c.rows, -1);
  l.blocks.assign(c.rows * c.kv_heads * c.budget, -1);
  for (const SegmentRow& g : c.segments)
    for (int64_t row = g.row; row < g.row + g.len; row++) {
      const int64_t total = g.parent_len + row - g.row + 1;
      l.budget[row] = budget_of(c, total);
      for (int64_t h = 0; blocks_of(total, c.block) > l.budget[row] && h < c.kv_heads; h++) {
        const std::vector<int32_t> list = block_list(c, h, total);
        std::copy(list.begin(), list.end(), l.blocks.begin() + (row * c.kv_heads + h) * c.budget);
      }
    }
  return l;
}
template <class Args>
Args arguments(Call& t, const char* op, const Case& c) {
  const std::string block = c.block ? cat(",block=", c.block) : "";
  return test::arguments<Args>(t, op, cat("H=", c.heads, ",K=", c.kv_heads, ",D=", c.d, ",gap=", c.gap, block),
                               layout(c));
}
AttnFwd forward_arguments(Call& t, const Case& c) { return arguments<AttnFwd>(t, "attn_fwd", c); }

// Rows of no segment become NaNs.
void set_unused(Call& t, const std::vector<SegmentRow>& segments, const std::vector<const char*>& names) {
  const int64_t rows = t[names[0]].tensor().shape[0];
  std::vector<bool> used(rows);
  for (const SegmentRow& g : segments) std::fill_n(used.begin() + g.row, g.len, true);
  for (const char* name : names)
    for (int64_t i = 0, width = t[name].size() / rows; i < t[name].size(); i++)
      if (!used[i / width]) t[name].set(i, NAN);
}

void forward(Call& t, const Case& c) { t.table.attn_fwd(forward_arguments(t, c), {}); }

// o and lse are those of the reference, rounded.  Rows of no segment hold NaNs in every input.
AttnBwd backward_arguments(Call& t, const Case& c) {
  Call before(table_ref, DType::f64);
  forward(before, c);
  const AttnBwd a = arguments<AttnBwd>(t, "attn_bwd", c);
  for (int64_t i = 0; i < t["o"].size(); i++) t["o"].set(i, from_bf16(to_bf16(before["o"].get(i))));
  for (int64_t i = 0; i < t["lse"].size(); i++) t["lse"].set(i, static_cast<float>(before["lse"].get(i)));
  set_unused(t, c.segments, {"q", "k", "v", "do", "o", "lse"});
  return a;
}
void backward(Call& t, const Case& c) { t.table.attn_bwd(backward_arguments(t, c), {}); }

// What roundings may cost each element of the outputs.  Products take p and ds rounded to bf16: 2^-9 of the magnitude
// of each of their terms.  Inner products are sums in f32 of D terms, of which none is above 16: D 2^-20 in p and in
// ds.
std::map<std::string, std::vector<double>> allowed_errors(Call& ref, const Case& c) {
  std::map<std::string, std::vector<double>> sums;
  for (const char* name : {"dq", "dk", "dv", "dpk", "dpv"})
    if (name[1] != 'p' || c.parent_rows) sums[name].resize(ref[name].size());
  const double scale = 1 / std::sqrt(static_cast<float>(c.d)), u = 0x1p-8, inner = static_cast<double>(c.d) * 0x1p-20;
  for (const SegmentRow& g : c.segments)
    for (int64_t i = 0; i < g.len; i++)
      for (int64_t h = 0; h < c.heads; h++)
        for (int64_t s : visible(c, g, i, h / group(c))) {
          bool other = s < g.parent_len && c.parent_rows;
          int64_t row = s < g.parent_len ? g.parent_row + s : g.row + s - g.parent_len;
          if (s < g.parent_len && !c.lists.empty()) {
            row = c.lists[row * c.kv_heads + h / group(c)];
            other = row < 0;
            if (other) row = -1 - row;
          }
          const std::string p_ = other ? "p" : "";
          const int64_t at_q = ((g.row + i) * c.heads + h) * c.d, at_k = (row * c.kv_heads + h / group(c)) * c.d;
          Buffer &q = ref["q"], &d_o = ref["do"], &o = ref["o"], &k = ref[p_ + "k"], &v = ref[p_ + "v"];
          double q_k = 0, do_v = 0, do_o = 0;
          for (int64_t d = 0; d < c.d; d++) {
            q_k += q.get(at_q + d) * k.get(at_k + d);
            do_v += d_o.get(at_q + d) * v.get(at_k + d);
            do_o += d_o.get(at_q + d) * o.get(at_q + d);
          }
          const double p = std::exp2(scale / std::numbers::ln2 * q_k - ref["lse"].get((g.row + i) * c.heads + h));
          const double of_p = p * (u + inner), of_ds = scale * p * (std::fabs(do_v - do_o) * (u + inner) + 2 * inner);
          for (int64_t d = 0; d < c.d; d++) {
            sums["dq"][at_q + d] += of_ds * std::fabs(k.get(at_k + d));
            sums["d" + p_ + "k"][at_k + d] += of_ds * std::fabs(q.get(at_q + d));
            sums["d" + p_ + "v"][at_k + d] += of_p * std::fabs(d_o.get(at_q + d));
          }
        }
  return sums;
}

void expect_gradients(const Case& c, bool orders = false) {
  Call ref(table_ref, DType::f64);
  backward(ref, c);
  const auto allowed = allowed_errors(ref, c);
  std::map<std::string, std::string> first;
  const auto once = [&] {
    Call emu(table_kernels, DType::bf16);
    backward(emu, c);
    for (const auto& [name, buffer] : emu.all()) {
      EXPECT_TRUE(buffer->zones_intact()) << name;
      EXPECT_EQ(first.emplace(name, buffer->bits()).first->second, buffer->bits()) << name << " depends on the order";
      if (!allowed.count(name)) continue;
      for (int64_t i = 0; i < buffer->size(); i++) {
        const double is = buffer->get(i), should = ref[name].get(i);
        if (std::isnan(is) && std::isnan(should)) continue;  // left alone
        ASSERT_LE(std::fabs(is - should), std::fabs(should) * 0x1p-8 + 1.1 * allowed.at(name)[i])
            << name << "[" << i << "] of " << buffer->tensor().str() << " is " << is << ", not " << should;
      }
    }
  };
  orders ? in_all_orders(once) : once();
}

// Entries for `n` rows from `first` on, for head h all but the h-th and the last but h.
std::vector<int32_t> some_rows(int32_t first, int32_t n, int32_t kv_heads, bool other_batch) {
  std::vector<int32_t> lists;
  for (int32_t i = 0; i < n; i++)
    for (int32_t h = 0; h < kv_heads; h++) {
      const int32_t row = first + i + (i >= h) + (i >= n - h);
      lists.push_back(other_batch ? -1 - row : row);
    }
  return lists;
}

const std::vector<SegmentRow> kTree = {{0, 65, 0, 0}, {66, 1, 0, 65}, {67, 20, 3, 62}, {90, 17, 0, 64}};

TEST(CudaAttention, Backward) {
  expect_gradients({110, 3, 1, 20, 8, kTree});
  expect_gradients({37, 2, 1, 64, 0, {{20, 17, 0, 20}, {0, 20, 0, 0}}}, true);
  expect_gradients({110, 2, 2, 64, 0, kTree});
  expect_gradients({43, 7, 1, 37, 3, {{9, 34, 3, 5}, {0, 9, 0, 0}}});
  expect_gradients({110, 2, 1, 128, 16, kTree});
  expect_gradients({70, 2, 1, 72, 8, {{2, 67, 0, 0}}});
  expect_gradients({43, 1, 1, 256, 0, {{0, 33, 0, 0}, {34, 9, 0, 30}}});
  expect_gradients({43, 2, 1, 200, 8, {{9, 34, 3, 5}, {0, 9, 0, 0}}});
  expect_gradients({9, 2, 1, 2, 0, {{0, 9, 0, 0}}});
  expect_gradients({31, 6, 2, 128, 8, {{0, 11, 3, 137}, {11, 20, 0, 5}}, 141});
  std::vector<SegmentRow> many;  // more segments than a warp looks at in one go
  for (int32_t i = 0; i < 35; i++) many.push_back({2 * i, 1 + i % 2, 0, i % 3});
  expect_gradients({70, 1, 1, 8, 0, many});
}

TEST(CudaAttention, BackwardOfListedParents) {
  // Epochs of a sequence that list rows of earlier ones.
  expect_gradients({100, 2, 2, 64, 0, {{90, 10, 0, 80}, {0, 90, 0, 0}}, 0, some_rows(2, 80, 2, false)});
  expect_gradients({23, 2, 2, 20, 3, {{0, 9, 0, 0}, {9, 4, 0, 6}, {13, 10, 1, 7}}, 0, some_rows(0, 9, 2, false)}, true);
  auto lists = some_rows(60, 66, 2, true);  // of another batch, then of this one
  const auto own = some_rows(0, 4, 2, false);
  lists.insert(lists.end(), own.begin(), own.end());
  expect_gradients({23, 6, 2, 128, 8, {{6, 17, 0, 70}, {0, 6, 20, 40}}, 140, lists});
}

TEST(CudaAttention, BackwardOfBlockLists) {
  expect_gradients({110, 3, 1, 20, 8, kTree, 0, {}, 4, 3});
  expect_gradients({37, 2, 1, 64, 0, {{20, 17, 0, 20}, {0, 20, 0, 0}}, 0, {}, 4, 3}, true);
  expect_gradients({110, 2, 2, 64, 0, kTree, 0, {}, 4, 7});
  expect_gradients({43, 7, 1, 37, 3, {{9, 34, 3, 5}, {0, 9, 0, 0}}, 0, {}, 16, 2});
  // Some tiles have no pair that is listed, and of some steps of 16 rows only the last sees a key of the tile.
  expect_gradients({141, 2, 2, 128, 0, {{1, 140, 0, 0}}, 0, {}, 16, 2});
  expect_gradients({43, 1, 1, 256, 0, {{1, 33, 0, 0}, {34, 9, 0, 40}}, 50, {}, 4, 4});
  expect_gradients({31, 6, 2, 128, 8, {{0, 11, 3, 137}, {11, 20, 0, 5}}, 141, {}, 16, 3});
}

// Weights are rounded to bf16 before the product with V, which costs 2^-8 of max |v|, below 5; and so is the result.
// They are within 1.02e-4, and so is their sum, of which lse is the logarithm.
TEST(CudaAttention, ForwardOfBlockLists) {
  for (const Case& c :
       {Case{110, 3, 1, 20, 8, kTree, 0, {}, 4, 3}, Case{110, 7, 1, 37, 3, kTree, 0, {}, 16, 2},
        Case{110, 2, 2, 64, 0, kTree, 0, {}, 4, 30}, Case{30, 34, 2, 128, 8, {{0, 30, 0, 0}}, 0, {}, 4, 5},
        Case{31, 2, 1, 256, 0, {{0, 11, 3, 137}, {11, 20, 0, 5}}, 141, {}, 16, 3}}) {
    Call ref(table_ref, DType::f64);
    forward(ref, c);
    std::map<std::string, std::string> first;
    const auto once = [&] {
      Call emu(table_kernels, DType::bf16);
      forward(emu, c);
      for (const char* name : {"o", "lse"}) {
        EXPECT_TRUE(emu[name].zones_intact()) << name;
        EXPECT_EQ(first.emplace(name, emu[name].bits()).first->second, emu[name].bits()) << name;
        for (int64_t i = 0; i < emu[name].size(); i++) {
          const double is = emu[name].get(i), should = ref[name].get(i);
          if (std::isnan(is) && std::isnan(should)) continue;  // left alone
          const bool o = name[0] == 'o';
          ASSERT_LE(std::fabs(is - should),
                    1e-5 * std::fmax(1, std::fabs(should)) + (o ? std::fabs(should) / 256 + 5. / 256 : 1.5e-4))
              << name << "[" << i << "] is " << is << ", not " << should;
        }
      }
    };
    c.d == 20 ? in_all_orders(once) : once();
  }
}

// A budget that leaves nothing out gives the bits of dense attention; in f32 a list gives those of dense attention over
// its slots.
TEST(CudaAttention, BlockListsAreDenseAttentionOverTheirSlots) {
  for (DType act : {DType::f32, DType::bf16})
    for (int64_t d : {20, 128}) {
      if (d == 128 && act == DType::f32) continue;
      const Case dense{110, 2, 2, d, 8, kTree};
      Case everything = dense, some = dense;
      everything.block = 16;
      everything.budget = 8;
      some.block = 4;
      some.budget = 17;
      Call x(table_kernels, act), y(table_kernels, act);
      forward(x, dense);
      forward(y, everything);
      for (const char* name : {"o", "lse"}) EXPECT_EQ(x[name].bits(), y[name].bits()) << name;
      Call dx(table_kernels, act), dy(table_kernels, act);
      backward(dx, dense);
      backward(dy, everything);
      for (const char* name : {"dq", "dk", "dv"}) EXPECT_EQ(dx[name].bits(), dy[name].bits()) << name;

      if (act != DType::f32) continue;
      Call z(table_kernels, act);
      forward(z, some);
      const SegmentRow& last = kTree[3];  // its last row, over a parent that lists what it reads
      const int64_t row = last.row + last.len - 1, total = last.parent_len + last.len;
      Case gathered = dense;
      for (size_t i = 0; i + 1 < visible(some, last, last.len - 1, 0).size(); i++)
        for (int64_t h = 0; h < dense.kv_heads; h++) {
          const int64_t slot = visible(some, last, last.len - 1, h)[i];
          gathered.lists.push_back(static_cast<int32_t>(slot < last.parent_len ? last.parent_row + slot
                                                                               : last.row + slot - last.parent_len));
        }
      gathered.segments = {{static_cast<int32_t>(row), 1, 0, static_cast<int32_t>(gathered.lists.size() / 2)}};
      ASSERT_LT(gathered.segments[0].parent_len + 1, total);
      Call g(table_kernels, act);
      forward(g, gathered);
      for (const char* name : {"o", "lse"}) {
        const int64_t width = g[name].size() / dense.rows;
        EXPECT_EQ(g[name].bits(row * width, (row + 1) * width), z[name].bits(row * width, (row + 1) * width)) << name;
      }
    }
}

// The bits of a row of dq depend on its sequence only; those of dk and dv on the segments that see the row, not on
// where they lie.
TEST(CudaAttention, GradientsAreIndependentOfPacking) {
  constexpr int32_t kOther = 21;
  struct Size {
    DType act;
    int32_t len, block, budget;
  };
  for (const auto& [act, len, block, budget] :
       {Size{DType::f32, 101, 0, 0}, Size{DType::bf16, 101, 0, 0}, Size{DType::bf16, 1040, 0, 0},
        Size{DType::f32, 101, 4, 5}, Size{DType::bf16, 213, 4, 5}, Size{DType::bf16, 1040, 16, 2}}) {
    const Case alone{len, len > 1024 ? 1 : 2, 1, 24, 0, {{0, len, 0, 0}}, 0, {}, block, budget};
    Call inputs(table_kernels, act), results(table_kernels, act);
    backward_arguments(inputs, alone);
    backward(results, alone);
    for (int32_t parent : {0, 1, 64}) {
      if (parent == 1 && len > 1024) continue;
      // Another segment, the rows from `parent` on, and those before, which are their parent.
      const int32_t own = len - parent, first = kOther + own;
      const std::vector<SegmentRow> segments = {{0, kOther, 0, 0}, {kOther, own, first, parent}, {first, parent, 0, 0}};
      const Case c{kOther + len, alone.heads, 1, 24, 0, segments, 0, {}, block, budget};
      Call packed(table_kernels, act);
      const AttnBwd a = backward_arguments(packed, c);
      const auto place = [&](int64_t row) { return row < parent ? first + row : kOther + row - parent; };
      for (const char* name : {"q", "k", "v", "do", "o", "lse", "dk", "dv"})
        for (int64_t i = 0, width = inputs[name].size() / len; i < inputs[name].size(); i++)
          packed[name].set(place(i / width) * width + i % width, inputs[name].get(i));
      table_kernels.attn_bwd(a, {});
      for (const char* name : {"dq", "dk", "dv"}) {
        if (name[1] != 'q' && parent) continue;  // two segments see the keys
        for (int64_t row = 0, width = results[name].size() / len; row < len; row++)
          ASSERT_EQ(packed[name].bits(place(row) * width, (place(row) + 1) * width),
                    results[name].bits(row * width, (row + 1) * width))
              << name << ", row " << row << ", parent of " << parent;
      }
    }
  }
}

// Parts of dk and dv of more than one run of rows are added in the same order with lists and without.
TEST(CudaAttention, RunsOfRowsWithBlockLists) {
  const Case dense{1100, 2, 1, 24, 0, {{0, 1100, 0, 0}}};
  Case everything = dense;
  everything.block = 16;
  everything.budget = 69;
  Call x(table_kernels, DType::bf16), y(table_kernels, DType::bf16);
  backward(x, dense);
  backward(y, everything);
  for (const char* name : {"dq", "dk", "dv"}) EXPECT_EQ(x[name].bits(), y[name].bits()) << name;
}

// dq of rows with lists has the same bits, however many rows of a tile there are.
TEST(CudaAttention, GradientsOfListsAreIndependentOfTiles) {
  for (const auto& [heads, kv_heads, d, block, budget] :
       {std::array{6, 1, 128, 16, 2}, std::array{7, 1, 64, 4, 5}, std::array{2, 2, 64, 16, 3},
        std::array{4, 2, 40, 4, 7}, std::array{2, 1, 200, 4, 3}}) {
    const int32_t rows = 97;
    std::string first;
    for (int32_t tile : {1, 5, 10, rows}) {
      Case c{rows, heads, kv_heads, d, 0, {}, 0, {}, block, budget};
      for (int32_t i = 0; i < rows; i += tile) c.segments.push_back({i, std::min(tile, rows - i), 0, i});
      Call t(table_kernels, DType::bf16);
      backward(t, c);
      if (first.empty()) first = t["dq"].bits();
      EXPECT_EQ(t["dq"].bits(), first) << "tiles of " << tile << ", group " << heads / kv_heads << ", D " << d;
    }
  }
}

// The results of a case, whose rows that no segment reads are NaNs, also those of parents of another batch.
void set_unused_parents(Call& t, const Case& c) {
  if (!c.lists.empty()) return;
  std::vector<SegmentRow> parents;
  for (const SegmentRow& g : c.segments) parents.push_back({g.parent_row, g.parent_len, 0, 0});
  if (c.parent_rows) set_unused(t, parents, {"pk", "pv"});
}
std::string bits_of(Call& t, const std::vector<const char*>& names) {
  std::string bits;
  for (const char* name : names) {
    EXPECT_TRUE(t[name].zones_intact()) << name;
    bits += t[name].bits();
  }
  return bits;
}
std::string forward_bits(Case c, int64_t gap) {
  c.gap = gap;
  Call t(table_kernels, DType::bf16);
  const AttnFwd a = forward_arguments(t, c);
  set_unused(t, c.segments, {"q", "k", "v"});
  set_unused_parents(t, c);
  table_kernels.attn_fwd(a, {});
  return bits_of(t, {"o", "lse"});
}
std::string backward_bits(Case c, int64_t gap) {
  c.gap = gap;
  Call t(table_kernels, DType::bf16);
  const AttnBwd a = backward_arguments(t, c);
  set_unused_parents(t, c);
  table_kernels.attn_bwd(a, {});
  return bits_of(t, {"dq", "dk", "dv"}) + (c.parent_rows ? bits_of(t, {"dpk", "dpv"}) : "");
}

// On compute capability 9.0 two kernels compute attention: mma.sync anywhere, wgmma where rows begin at multiples of 16
// bytes, those of o among them.  On a device each is asked for, whatever the device would choose.
// more: cases beside those of both directions.
void expect_the_same_bits(std::string (*bits_with)(Case, int64_t gap), const std::vector<Case>& more = {}) {
  const Probe* const probe = table_kernels.probe;
  const auto ask_for = [&](TensorKernel kernel) { return !probe || probe->tensor_kernel(kernel); };
  if (!ask_for(TensorKernel::wgmma)) GTEST_SKIP() << "this device has one kernel";
  const auto same_bits = [&](const Case& c, int64_t other_heads) {
    SCOPED_TRACE(cat(c.rows, " rows, ", c.heads, "/", c.kv_heads, " heads of ", c.d));
    ask_for(TensorKernel::mma);
    const std::string bits = bits_with(c, 3);
    ask_for(TensorKernel::wgmma);
    EXPECT_TRUE(bits_with(c, other_heads * c.d) == bits);
    EXPECT_TRUE(bits_with(c, 8) == bits);
  };
  same_bits({1, 1, 1, 64, 0, {{0, 1, 0, 0}}}, 0);
  same_bits({140, 2, 1, 64, 0, {{3, 63, 0, 0}, {67, 65, 3, 63}, {133, 1, 67, 65}}}, 1);
  same_bits({260, 3, 1, 128, 0, {{130, 129, 2, 127}, {2, 127, 0, 0}}}, 0);
  same_bits({330, 4, 1, 64, 0, {{1, 257, 0, 0}, {259, 70, 1, 129}}}, 3);
  same_bits({135, 5, 1, 128, 0, {{5, 129, 5, 193}}, 200}, 0);
  same_bits({150, 6, 1, 72, 0, {{2, 64, 0, 128}, {67, 80, 63, 64}}, 193}, 2);
  same_bits({70, 14, 2, 128, 0, {{0, 70, 1, 1}}, 3}, 1);
  same_bits({195, 7, 1, 64, 0, {{1, 193, 0, 0}}}, 0);
  // Cuts of 1024 slots.
  same_bits({42, 2, 1, 64, 0, {{1, 40, 2, 1000}}, 1003}, 0);
  same_bits({30, 1, 1, 128, 0, {{0, 28, 5, 2033}}, 2040}, 0);
  same_bits({220, 1, 1, 40, 0, {{3, 191, 0, 0}, {200, 20, 0, 0}}}, 0);
  same_bits({30, 2, 2, 8, 0, {{9, 20, 3, 650}}, 660}, 1);
  same_bits({310, 1, 1, 128, 0, {{1, 300, 2, 320}, {302, 3, 0, 63}}, 323}, 0);
  // Siblings, with the prefix in the same batch and in another.
  same_bits({320, 2, 1, 128, 0, {{0, 130, 0, 0}, {130, 65, 0, 130}, {197, 64, 0, 130}, {262, 58, 40, 90}}}, 0);
  same_bits({198, 4, 2, 96, 0, {{1, 65, 0, 130}, {66, 64, 0, 130}, {131, 63, 65, 65}}, 131}, 1);
  std::vector<SegmentRow> many;  // more segments than a warp looks at in one go
  for (int32_t i = 0; i < 35; i++) many.push_back({2 * i, 1 + i % 2, 0, i % 3});
  same_bits({70, 1, 1, 64, 0, many}, 0);
  for (const Case& c : more) same_bits(c, 0);
  in_all_orders([&] { same_bits({150, 2, 1, 128, 0, {{1, 66, 0, 0}, {67, 80, 1, 66}}}, 0); });
  ask_for(TensorKernel::choose);
}
TEST(CudaAttention, ForwardHasTheSameBitsFromEveryKernel) {
  auto mixed = some_rows(60, 66, 2, true);  // of another batch, then of this one
  const auto own = some_rows(0, 4, 2, false);
  mixed.insert(mixed.end(), own.begin(), own.end());
  const Case evicted{330, 4, 2, 128, 0, {{6, 320, 0, 70}, {0, 6, 20, 40}}, 140, mixed};
  expect_the_same_bits(forward_bits,
                       {evicted,
                        {20, 1, 1, 64, 0, {{0, 20, 0, 254}}, 254},  // the first row sees a block but for its last slot
                        {100, 2, 2, 64, 0, {{90, 10, 0, 80}, {0, 90, 0, 0}}, 0, some_rows(2, 80, 2, false)},
                        {150, 2, 2, 72, 0, {{3, 140, 0, 1100}}, 1110, some_rows(2, 1100, 2, true)}});
  in_all_orders([&] { EXPECT_TRUE(forward_bits(evicted, 0) == forward_bits(evicted, 3)); });  // by wgmma and mma.sync
}
// A row that ends before a cut has nothing of it, not even of values that are not finite.
TEST(CudaAttention, CutsBehindARowAreNotAdded) {
  for (const int64_t gap : {0, 3}) {  // by wgmma and mma.sync
    std::string bits[2];
    for (const bool finite : {true, false}) {
      Case c{60, 1, 1, 64, 0, {{0, 60, 0, 1000}}, 1000};
      c.gap = gap;
      Call t(table_kernels, DType::bf16);
      const AttnFwd a = forward_arguments(t, c);
      for (int64_t i = 24 * c.d; i < c.rows * c.d && !finite; i++) t["v"].set(i, INFINITY);  // slots from 1024 on
      table_kernels.attn_fwd(a, {});
      bits[finite] = t["o"].bits(0, 24 * c.d) + t["lse"].bits(0, 24);
    }
    EXPECT_TRUE(bits[0] == bits[1]);
  }
}
// o from an element on that is no multiple of 16 bytes, whatever the kernel is then.
TEST(CudaAttention, ForwardWritesToAnyElement) {
  const Case c{70, 2, 1, 64, 0, {{1, 66, 0, 0}}};
  const std::string at_first = forward_bits(c, 0);
  Call t(table_kernels, DType::bf16);
  AttnFwd a = forward_arguments(t, c);
  a.o = t.act_out("o", {c.rows + 1, c.heads, c.d});
  a.o.shape[0]--;
  a.o.data = static_cast<char*>(a.o.data) + 2;
  table_kernels.attn_fwd(a, {});
  EXPECT_TRUE(t["o"].bits(1, c.rows * c.heads * c.d + 1) + t["lse"].bits() == at_first);
}

// Epochs of sequences behind a prompt of another batch, whose caches kept what they list.
struct Evicted {
  Case c;
  // Appends a segment of `len` rows that lists `n` of the first `seen` rows, then `prompt` rows of the prompt, in
  // another order for each head.
  void add(int32_t len, int32_t n, int32_t seen, int32_t prompt) {
    const auto entries = static_cast<int32_t>(std::ssize(c.lists) / c.kv_heads);
    const auto row = static_cast<int32_t>(c.rows);
    c.segments.push_back({row, len, n + prompt ? entries : 0, n + prompt});
    c.rows += len;
    for (int32_t i = 0; i < n + prompt; i++)
      for (auto h = static_cast<int32_t>(c.kv_heads); h-- > 0;) {
        const int32_t all = i < n ? seen : static_cast<int32_t>(c.parent_rows), at = (i < n ? i : i - n) * 5 + h + row;
        c.lists.push_back(i < n ? at % all : -1 - at % all);
      }
  }
};
TEST(CudaAttention, BackwardHasTheSameBitsFromEveryKernel) {
  // Runs of 1024 rows, from rows that are no multiple of anything; a prompt that several read, in the same batch (a
  // tile has rows of it and of those who read it) and in another; heads by threes.
  std::vector<Case> runs;
  for (int32_t len : {1023, 1024, 1025})
    runs.push_back({len + 92, 1, 1, 8, 0, {{1, len, len + 20, 70}, {len + 3, 15, len + 20, 70}, {len + 20, 70, 0, 0}}});
  runs.push_back({1100, 3, 1, 8, 0, {{0, 30, 0, 20}, {30, 1027, 3, 150}, {1060, 40, 1, 140}}, 160});
  runs.push_back({1300, 1, 1, 8, 0, {{100, 1200, 0, 100}, {0, 100, 0, 0}}});
  // Lists around a tile of 128, of rows of both batches; no list between them; rows of several lists, or of none.
  Evicted tiles{{0, 4, 2, 128, 0, {}, 132}};
  tiles.add(65, 0, 0, 127);
  tiles.add(64, 61, 63, 67);
  tiles.add(1, 2, 127, 127);
  tiles.add(70, 0, 0, 0);
  tiles.add(20, 1, 3, 0);
  tiles.add(3, 0, 0, 1);
  tiles.add(131, 124, 199, 0);
  tiles.c.rows += 2;  // of no segment
  runs.push_back(tiles.c);
  // A list names rows of a segment that comes after it.
  runs.push_back({240, 2, 2, 64, 0, {{90, 150, 0, 80}, {0, 90, 0, 0}}, 0, some_rows(2, 80, 2, false)});
  Evicted many{{0, 2, 1, 64, 0, {}, 6}};  // more segments than a word has bits, some of which see a row
  for (int32_t i = 0; i < 70; i++) many.add(1 + i % 3, i % 31 ? 0 : i / 5, std::max(1, i), i % 9 ? 0 : 6);
  runs.push_back(many.c);
  Evicted late{{0, 3, 1, 72, 0, {}, 31}};  // runs of 1024 rows
  late.add(7, 0, 0, 30);
  late.add(1030, 7, 7, 22);
  late.add(5, 113, 1033, 9);
  runs.push_back(late.c);
  expect_the_same_bits(backward_bits, runs);
  for (const Case& c : {tiles.c, many.c})
    in_all_orders([&] { EXPECT_TRUE(backward_bits(c, 0) == backward_bits(c, 3)); });  // by wgmma and mma.sync
}

// Tiles may take in rows of neighbours: those count for nothing, not even if they are not finite, but in dk and dv of
// the keys that lie beside theirs.  Rows that begin anywhere are for mma.sync alone, in the emulation too, where no
// kernel can be asked for.
TEST(CudaAttention, NeighboursThatAreNotFiniteChangeNothing) {
  const Probe* const probe = table_kernels.probe;
  for (const TensorKernel kernel : {TensorKernel::mma, TensorKernel::wgmma}) {
    if (probe && !probe->tensor_kernel(kernel)) continue;
    for (int64_t d : {64, 128}) {
      Case c{300, 2, 1, d, 0, {{0, 140, 0, 0}, {140, 20, 0, 0}, {160, 60, 0, 140}, {220, 80, 0, 1}}};
      c.gap = kernel == TensorKernel::mma ? 3 : 0;
      std::string bits[2];
      for (const bool finite : {true, false}) {
        Call f(table_kernels, DType::bf16), b(table_kernels, DType::bf16);
        const AttnFwd forward = forward_arguments(f, c);
        const AttnBwd backward = backward_arguments(b, c);
        const auto each = [&](Call& t, const char* name,
                              auto use) {  // elements of the second segment, or of the others
          for (int64_t i = 0, width = t[name].size() / c.rows; i < t[name].size(); i++)
            use(i, i / width >= 140 && i / width < 160);
        };
        const auto spoil = [&](Call& t, std::initializer_list<const char*> names) {
          for (const char* name : names)
            each(t, name, [&](int64_t i, bool second) {
              if (second && !finite) t[name].set(i, i % 2 ? NAN : INFINITY);
            });
        };
        const auto take = [&](Call& t, std::initializer_list<const char*> names) {
          for (const char* name : names)
            each(t, name, [&](int64_t i, bool second) {
              const int64_t row = i * c.rows / t[name].size();
              if (second || (name[0] == 'd' && name[1] != 'q' && row / 128 == 1)) return;
              bits[finite] += t[name].bits(i, i + 1);
              ASSERT_TRUE(std::isfinite(t[name].get(i))) << name << "[" << i << "]";
            });
        };
        spoil(f, {"q", "k", "v"});
        spoil(b, {"q", "k", "v", "do", "o", "lse"});
        table_kernels.attn_fwd(forward, {});
        table_kernels.attn_bwd(backward, {});
        take(f, {"o", "lse"});
        take(b, {"dq", "dk", "dv"});
      }
      EXPECT_TRUE(bits[0] == bits[1]) << "head dim " << d;
    }
  }
  if (probe) probe->tensor_kernel(TensorKernel::choose);
}

TEST(CudaAttention, UnsupportedArgumentsAreNamed) {
  EXPECT_EQ(refusal(DType::bf16,
                    [](Call& t) {
                      backward(t, {3, 1, 1, 1, 0, {{0, 3, 0, 0}}});
                    }),
            "attn_bwd: head_dim 1 in bf16: a row of dq has no room for do.o");
  EXPECT_EQ(refusal(DType::bf16,
                    [](Call& t) {
                      AttnBwd a = backward_arguments(t, {3, 1, 1, 8, 0, {{0, 3, 0, 0}}});
                      a.pk = t.act("pk", {3, 1, 8});
                      t.table.attn_bwd(a, {});
                    }),
            "attn_bwd: dpk is dk, but dpv, pk, pv are not dv, k, v");
  EXPECT_EQ(refusal(DType::bf16,
                    [](Call& t) {
                      AttnBwd a = backward_arguments(t, {3, 1, 1, 8, 0, {{0, 3, 0, 0}}});
                      a.pk = a.k.rows(1, 2);
                      a.pv = a.v.rows(1, 2);
                      a.dpk = a.dk.rows(1, 2);
                      a.dpv = a.dv.rows(1, 2);
                      t.table.attn_bwd(a, {});
                    }),
            "attn_bwd: dpk and dpv overlap dk and dv, but are not the same");
}

}  // namespace
}  // namespace pare::test
