// Causal attention of packed segments.
#include "ref/attention.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <set>

namespace pare::ref {

BlockLists::BlockLists(const char* op, const Tensor& blocks, const Tensor& budget, int32_t block)
    : op_(op), blocks_(blocks), budget_(budget), room_(blocks.shape[2]), block_(block) {}

std::vector<int64_t> all_slots(int64_t total) {
  std::vector<int64_t> slots(total);
  std::iota(slots.begin(), slots.end(), 0);
  return slots;
}

std::vector<int64_t> BlockLists::slots(int64_t row, int64_t kv_head, int64_t total) const {
  if (!listed(row, total)) return all_slots(total);
  std::vector<int64_t> slots;
  const int64_t n = budget_(row), last = blocks_of(total, block_) - 1;
  expect(n >= 1 && n <= room_, "ref: ", op_, ": row ", row, " reads ", n, " blocks, its list has room for ", room_);
  for (int64_t i = 0; i < n; i++) {
    const int64_t b = blocks_(row, kv_head, i), before = i ? blocks_(row, kv_head, i - 1) : -1;
    expect(b > before && (i + 1 < n ? b < last : b == last), "ref: ", op_, ": row ", row, ", key head ", kv_head,
           " lists block ", b, " at ", i, ": expected ascending blocks, the last one ", last);
    for (int64_t slot = b * block_; slot < std::min(b * block_ + block_, total); slot++) slots.push_back(slot);
  }
  return slots;
}

View<int32_t> read_lists(const char* op, const Tensor& lists, int64_t kv_heads, int64_t rows, int64_t parent_rows,
                         const std::vector<SegmentRow>& segments) {
  if (!lists) return View<int32_t>(Tensor{});
  const View<int32_t> view(lists);
  for (const SegmentRow& s : segments)
    for (int64_t h = 0; h < kv_heads; h++) {
      std::set<int32_t> seen;
      for (int64_t i = s.parent_row; i < s.parent_row + s.parent_len; i++) {
        const int32_t row = view(i, h);
        expect(row < rows && -1 - int64_t(row) < parent_rows, "ref: ", op, ": list entry ", i, " of key head ", h,
               " is ", row, ", there are ", rows, " rows and ", parent_rows, " parent rows");
        expect((row < s.row || row >= s.row + s.len) && seen.insert(row).second, "ref: ", op, ": list entry ", i,
               " of key head ", h, " names row ", row, " a second time");
      }
    }
  return view;
}

std::vector<SegmentRow> read_segments(const char* op, const Tensor& segments, int64_t rows, int64_t parent_rows) {
  const View<int32_t> view(segments);
  std::vector<SegmentRow> list;
  std::vector<bool> taken(rows);
  for (int64_t i = 0; i < segments.shape[0]; i++) {
    const SegmentRow s{view(i, 0), view(i, 1), view(i, 2), view(i, 3)};
    expect(s.row >= 0 && s.len >= 0 && int64_t(s.row) + s.len <= rows, "ref: ", op, ": segment ", i, " has rows [",
           s.row, ", ", int64_t(s.row) + s.len, ") of ", rows);
    expect(s.parent_len >= 0 &&
               (s.parent_len == 0 || (s.parent_row >= 0 && int64_t(s.parent_row) + s.parent_len <= parent_rows)),
           "ref: ", op, ": segment ", i, " has parent rows [", s.parent_row, ", ", int64_t(s.parent_row) + s.parent_len,
           ") of ", parent_rows);
    for (int32_t r = s.row; r < s.row + s.len; r++) {
      expect(!taken[r], "ref: ", op, ": row ", r, " lies in two segments");
      taken[r] = true;
    }
    list.push_back(s);
  }
  return list;
}

namespace {

void expect_pairs(const char* op, const std::vector<SegmentRow>& segments, const BlockLists& lists, int64_t pairs) {
  int64_t counted = 0;
  for (const SegmentRow& s : segments)
    for (int64_t i = 0; i < s.len; i++) counted += lists.count(s.row + i, s.parent_len + i + 1);
  expect(counted == pairs, "ref: ", op, ": pairs is ", pairs, ", the segments hold ", counted);
}

}  // namespace

void attn_fwd(const AttnFwd& a, Stream) {
  constexpr const char* op = "attn_fwd";
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], head_dim = a.q.shape[2], group = heads / a.k.shape[1];
  const auto segments = read_segments(op, a.segments, rows, (a.lists ? a.lists : a.pk).shape[0]);
  const auto parents = read_lists(op, a.lists, a.k.shape[1], rows, a.pk.shape[0], segments);
  const BlockLists lists(op, a.blocks, a.budget, a.block);
  expect_pairs(op, segments, lists, a.pairs);
  dispatch(op, a.q, [&]<class T>(T) {
    const View<T> o(a.o), lse(a.lse), q(a.q);
    for (const SegmentRow& s : segments) {
      const SlotView<T> k{View<T>(a.pk), View<T>(a.k), s, parents}, v{View<T>(a.pv), View<T>(a.v), s, parents};
      for (int64_t i = 0; i < s.len; i++)
        for (int64_t h = 0; h < heads; h++)
          lse(s.row + i, h) = static_cast<T>(attend(
              &o(s.row + i, h, 0), &q(s.row + i, h, 0), head_dim,
              lists.slots(s.row + i, h / group, s.parent_len + i + 1), a.scale,
              [&](int64_t slot, int64_t d) { return k(slot, h / group, d); },
              [&](int64_t slot, int64_t d) { return v(slot, h / group, d); }));
    }
  });
}

namespace {

// One segment and query head: p and ds of all its (own row, slot) pairs, then dq, then dk and dv.
template <class T>
void backward_head(const AttnBwd& a, const BlockLists& lists, const View<int32_t>& parents, const SegmentRow& s,
                   int64_t h) {
  const int64_t head_dim = a.q.shape[2], kv = h / (a.q.shape[1] / a.k.shape[1]), slots = s.parent_len + s.len;
  const View<T> dq(a.dq), d_o(a.d_o), o(a.o), q(a.q), lse(a.lse);
  const SlotView<T> k{View<T>(a.pk), View<T>(a.k), s, parents}, v{View<T>(a.pv), View<T>(a.v), s, parents};
  const SlotView<T> dk{View<T>(a.dpk), View<T>(a.dk), s, parents}, dv{View<T>(a.dpv), View<T>(a.dv), s, parents};
  std::vector<double> p(s.len * slots), ds(s.len * slots);  // 0 where a row does not see a slot
  for (int64_t i = 0; i < s.len; i++) {
    const int64_t n = s.row + i;
    double do_o = 0;
    for (int64_t d = 0; d < head_dim; d++) do_o += double(d_o(n, h, d)) * o(n, h, d);
    for (int64_t slot : lists.slots(n, kv, s.parent_len + i + 1)) {
      double q_k = 0, do_v = 0;
      for (int64_t d = 0; d < head_dim; d++) {
        q_k += double(q(n, h, d)) * k(slot, kv, d);
        do_v += double(d_o(n, h, d)) * v(slot, kv, d);
      }
      p[i * slots + slot] = std::exp2(a.scale / std::numbers::ln2 * q_k - lse(n, h));
      ds[i * slots + slot] = p[i * slots + slot] * (do_v - do_o);
    }
    for (int64_t d = 0; d < head_dim; d++) {
      double sum = 0;
      for (int64_t slot = 0; slot < slots; slot++) sum += ds[i * slots + slot] * k(slot, kv, d);
      dq(n, h, d) = static_cast<T>(a.scale * sum);
    }
  }
  for (int64_t slot = 0; slot < slots; slot++)
    for (int64_t d = 0; d < head_dim; d++) {
      double sum_k = dk(slot, kv, d), sum_v = dv(slot, kv, d);
      for (int64_t i = 0; i < s.len; i++) {
        sum_k += a.scale * ds[i * slots + slot] * q(s.row + i, h, d);
        sum_v += p[i * slots + slot] * d_o(s.row + i, h, d);
      }
      dk(slot, kv, d) = static_cast<T>(sum_k);
      dv(slot, kv, d) = static_cast<T>(sum_v);
    }
}

}  // namespace

void attn_bwd(const AttnBwd& a, Stream) {
  constexpr const char* op = "attn_bwd";
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], kv_heads = a.k.shape[1];
  const auto segments = read_segments(op, a.segments, rows, (a.lists ? a.lists : a.pk).shape[0]);
  const auto parents = read_lists(op, a.lists, kv_heads, rows, a.pk.shape[0], segments);
  const BlockLists lists(op, a.blocks, a.budget, a.block);
  expect_pairs(op, segments, lists, a.pairs);
  dispatch(op, a.q, [&]<class T>(T) {
    for (const SegmentRow& s : segments)
      for (int64_t h = 0; h < heads; h++) backward_head<T>(a, lists, parents, s, h);
  });
}

}  // namespace pare::ref
