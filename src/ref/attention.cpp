// Causal attention of packed segments and over paged keys and values.
#include "ref/attention.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <set>
#include <vector>

#include "ref/paged.h"

namespace pare::ref {

namespace {

// softmax(scale * q.k) over `slots`, for one query of one head; key is a function of (slot, d).  lse: the logarithm,
// base 2, of the sum of the exponentials.
template <class T, class Key>
std::vector<double> probabilities(const T* q, int64_t dim, const std::vector<int64_t>& slots, double scale, Key key,
                                  double* lse = nullptr) {
  std::vector<double> p;
  for (int64_t s : slots) {
    double dot = 0;
    for (int64_t d = 0; d < dim; d++) dot += double(q[d]) * key(s, d);
    p.push_back(scale * dot);
  }
  const double max = *std::max_element(p.begin(), p.end());
  double sum = 0;
  for (double& x : p) sum += x = std::exp(x - max);
  for (double& x : p) x /= sum;
  if (lse) *lse = max / std::numbers::ln2 + std::log2(sum);
  return p;
}

// o = the sum of their products with the values, value(slot, d).  Returns lse.
template <class T, class Key, class Value>
double attend(T* o, const T* q, int64_t dim, const std::vector<int64_t>& slots, double scale, Key key, Value value) {
  double lse;
  const std::vector<double> p = probabilities(q, dim, slots, scale, key, &lse);
  for (int64_t d = 0; d < dim; d++) {
    double weighted = 0;
    for (size_t i = 0; i < slots.size(); i++) weighted += p[i] * value(slots[i], d);
    o[d] = static_cast<T>(weighted);
  }
  return lse;
}

// q [N, H, D], k and v [N, K, D] with K a divisor of H.
void expect_heads(const char* op, const Tensor& q, const Tensor& k, const Tensor& v) {
  expect(q.rank == 3 && k.rank == 3, "ref: ", op, ": q ", q.str(), " and k ", k.str(), ", expected [N, H, D]");
  expect(k.shape[1] > 0 && q.shape[1] % k.shape[1] == 0, "ref: ", op, ": ", q.shape[1], " query heads over ",
         k.shape[1], " key heads");
  expect_shape(op, "k", k, {q.shape[0], k.shape[1], q.shape[2]});
  expect_shape(op, "v", v, {q.shape[0], k.shape[1], q.shape[2]});
}

}  // namespace

BlockLists::BlockLists(const char* op, const Tensor& blocks, const Tensor& budget, int32_t block, int64_t rows,
                       int64_t kv_heads)
    : op_(op), blocks_(blocks), budget_(budget), room_(blocks.shape[2]), block_(block) {
  expect(block == 4 || block == 16, "ref: ", op, ": blocks of ", block, " slots, expected 4 or 16");
  expect_dense(op, "blocks", blocks, {rows, kv_heads, room_});
  expect_dense(op, "budget", budget, {rows});
}

std::vector<int64_t> BlockLists::slots(int64_t row, int64_t kv_head, int64_t total) const {
  std::vector<int64_t> slots(total);
  std::iota(slots.begin(), slots.end(), 0);
  if (!listed(row, total)) return slots;
  slots.clear();
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
  expect_dense(op, "lists", lists, {lists.shape[0], kv_heads});
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
  expect_dense(op, "segments", segments, {segments.shape[0], 4});
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

template <class Args>
BlockLists block_lists(const char* op, const Args& a) {
  if (!a.blocks) return {};
  expect(!a.lists, "ref: ", op, ": a parent is listed by slots or by blocks, not both");
  return BlockLists(op, a.blocks, a.budget, a.block, a.q.shape[0], a.k.shape[1]);
}

}  // namespace

void attn_fwd(const AttnFwd& a, Stream) {
  constexpr const char* op = "attn_fwd";
  expect_heads(op, a.q, a.k, a.v);
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], dim = a.q.shape[2], group = heads / a.k.shape[1];
  expect_dense(op, "o", a.o, {rows, heads, dim});
  expect_dense(op, "lse", a.lse, {rows, heads});
  const auto segments = read_segments(op, a.segments, rows, (a.lists ? a.lists : a.pk).shape[0]);
  const auto parents = read_lists(op, a.lists, a.k.shape[1], rows, a.pk.shape[0], segments);
  const BlockLists lists = block_lists(op, a);
  expect_pairs(op, segments, lists, a.pairs);
  dispatch(op, a.q, [&]<class T>(T) {
    const View<T> o(a.o), lse(a.lse), q(a.q);
    for (const SegmentRow& s : segments) {
      const SlotView<T> k{View<T>(a.pk), View<T>(a.k), s, parents}, v{View<T>(a.pv), View<T>(a.v), s, parents};
      for (int64_t i = 0; i < s.len; i++)
        for (int64_t h = 0; h < heads; h++)
          lse(s.row + i, h) = static_cast<T>(attend(
              &o(s.row + i, h, 0), &q(s.row + i, h, 0), dim, lists.slots(s.row + i, h / group, s.parent_len + i + 1),
              a.scale, [&](int64_t slot, int64_t d) { return k(slot, h / group, d); },
              [&](int64_t slot, int64_t d) { return v(slot, h / group, d); }));
    }
  });
}

namespace {

// One segment and query head: p and ds of all its (own row, slot) pairs, then dq, then dk and dv.
template <class T>
void backward_head(const AttnBwd& a, const BlockLists& lists, const View<int32_t>& parents, const SegmentRow& s,
                   int64_t h) {
  const int64_t dim = a.q.shape[2], kv = h / (a.q.shape[1] / a.k.shape[1]), slots = s.parent_len + s.len;
  const View<T> dq(a.dq), d_o(a.d_o), o(a.o), q(a.q), lse(a.lse);
  const SlotView<T> k{View<T>(a.pk), View<T>(a.k), s, parents}, v{View<T>(a.pv), View<T>(a.v), s, parents};
  const SlotView<T> dk{View<T>(a.dpk), View<T>(a.dk), s, parents}, dv{View<T>(a.dpv), View<T>(a.dv), s, parents};
  std::vector<double> p(s.len * slots), ds(s.len * slots);  // 0 where a row does not see a slot
  for (int64_t i = 0; i < s.len; i++) {
    const int64_t n = s.row + i;
    double do_o = 0;
    for (int64_t d = 0; d < dim; d++) do_o += double(d_o(n, h, d)) * o(n, h, d);
    for (int64_t slot : lists.slots(n, kv, s.parent_len + i + 1)) {
      double q_k = 0, do_v = 0;
      for (int64_t d = 0; d < dim; d++) {
        q_k += double(q(n, h, d)) * k(slot, kv, d);
        do_v += double(d_o(n, h, d)) * v(slot, kv, d);
      }
      p[i * slots + slot] = std::exp2(a.scale / std::numbers::ln2 * q_k - lse(n, h));
      ds[i * slots + slot] = p[i * slots + slot] * (do_v - do_o);
    }
    for (int64_t d = 0; d < dim; d++) {
      double sum = 0;
      for (int64_t slot = 0; slot < slots; slot++) sum += ds[i * slots + slot] * k(slot, kv, d);
      dq(n, h, d) = static_cast<T>(a.scale * sum);
    }
  }
  for (int64_t slot = 0; slot < slots; slot++)
    for (int64_t d = 0; d < dim; d++) {
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
  expect_heads(op, a.q, a.k, a.v);
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], kv_heads = a.k.shape[1], dim = a.q.shape[2];
  for (const auto& [name, t] : {std::pair{"dq", &a.dq}, {"d_o", &a.d_o}, {"o", &a.o}})
    expect_shape(op, name, *t, {rows, heads, dim});
  for (const auto& [name, t] : {std::pair{"dk", &a.dk}, {"dv", &a.dv}})
    expect_shape(op, name, *t, {rows, kv_heads, dim});
  expect_dense(op, "lse", a.lse, {rows, heads});
  for (const auto& [name, t] : {std::pair{"dpk", &a.dpk}, {"dpv", &a.dpv}})
    if (a.pk) expect_shape(op, name, *t, {a.pk.shape[0], kv_heads, dim});
  const auto segments = read_segments(op, a.segments, rows, (a.lists ? a.lists : a.pk).shape[0]);
  const auto parents = read_lists(op, a.lists, kv_heads, rows, a.pk.shape[0], segments);
  const BlockLists lists = block_lists(op, a);
  expect_pairs(op, segments, lists, a.pairs);
  dispatch(op, a.q, [&]<class T>(T) {
    for (const SegmentRow& s : segments)
      for (int64_t h = 0; h < heads; h++) backward_head<T>(a, lists, parents, s, h);
  });
}

std::vector<PagedRow> read_queries(const char* op, const Tensor& queries, const Tensor& page_table, int64_t rows,
                                   int64_t pages) {
  expect_dense(op, "queries", queries, {queries.shape[0], 4});
  expect(page_table.rank == 2, "ref: ", op, ": page_table is ", page_table.str(), ", expected [sequences, max_pages]");
  const View<int32_t> view(queries), table(page_table);
  std::vector<PagedRow> list;
  std::vector<bool> taken(rows);
  for (int64_t i = 0; i < queries.shape[0]; i++) {
    const PagedRow s{view(i, 0), view(i, 1), view(i, 2), view(i, 3)};
    expect(s.row >= 0 && s.rows >= 0 && int64_t(s.row) + s.rows <= rows, "ref: ", op, ": entry ", i, " has rows [",
           s.row, ", ", int64_t(s.row) + s.rows, ") of ", rows);
    expect(s.table_row >= 0 && s.table_row < page_table.shape[0], "ref: ", op, ": entry ", i, " names row ",
           s.table_row, " of page_table ", page_table.str());
    expect(s.slots >= s.rows && s.slots <= page_table.shape[1] * kPageSlots, "ref: ", op, ": entry ", i, " has ",
           s.slots, " slots, ", s.rows, " of them new; page_table is ", page_table.str());
    for (int32_t slot = 0; slot < s.slots; slot++) {
      const int64_t page = SlotPages{table, s.table_row}.page(slot);
      expect(page >= 0 && page < pages, "ref: ", op, ": slot ", slot, " of entry ", i, " lies in page ", page, " of ",
             pages);
    }
    for (int32_t r = s.row; r < s.row + s.rows; r++) {
      expect(!taken[r], "ref: ", op, ": row ", r, " lies in two entries");
      taken[r] = true;
    }
    list.push_back(s);
  }
  return list;
}

void expect_paged_work(const char* op, const std::vector<PagedRow>& queries, int64_t pairs, int64_t slots) {
  int64_t all_pairs = 0, all_slots = 0;
  for (const PagedRow& s : queries) {
    all_pairs += int64_t(s.rows) * (s.slots - s.rows) + int64_t(s.rows) * (s.rows + 1) / 2;
    all_slots += s.slots;
  }
  expect(pairs == all_pairs && slots == all_slots, "ref: ", op, ": pairs ", pairs, " and slots ", slots,
         ", the entries hold ", all_pairs, " and ", all_slots);
}

namespace {

void expect_pages(const char* op, const Tensor& k_pages, const Tensor& v_pages) {
  expect(k_pages.rank == 4, "ref: ", op, ": k_pages is ", k_pages.str(), ", expected [pages, K, D, 16]");
  const int64_t pages = k_pages.shape[0], kv_heads = k_pages.shape[1], dim = k_pages.shape[2];
  expect_dense(op, "k_pages", k_pages, {pages, kv_heads, dim, kPageSlots});
  expect_dense(op, "v_pages", v_pages, {pages, kv_heads, kPageSlots, dim});
}

}  // namespace

void kv_write(const KvWrite& a, Stream) {
  expect_pages("kv_write", a.k_pages, a.v_pages);
  const int64_t rows = a.k.shape[0], kv_heads = a.k_pages.shape[1], dim = a.k_pages.shape[2];
  expect_shape("kv_write", "k", a.k, {rows, kv_heads, dim});
  expect_shape("kv_write", "v", a.v, {rows, kv_heads, dim});
  const auto queries = read_queries("kv_write", a.queries, a.page_table, rows, a.k_pages.shape[0]);
  if (a.pos_pages) {
    expect_dense("kv_write", "pos_pages", a.pos_pages, {a.k_pages.shape[0], kv_heads, kPageSlots});
    expect_dense("kv_write", "pos", a.pos, {rows});
  }
  dispatch("kv_write", a.k, [&]<class T>(T) {
    const View<T> k_pages(a.k_pages), v_pages(a.v_pages), k(a.k), v(a.v);
    for (const PagedRow& s : queries) {
      const SlotPages pages{View<int32_t>(a.page_table), s.table_row};
      for (int64_t i = 0; i < s.rows; i++)
        for (int64_t h = 0; h < kv_heads; h++) {
          const int64_t slot = s.slots - s.rows + i, page = pages.page(slot), at = slot % kPageSlots;
          for (int64_t d = 0; d < dim; d++) k_pages(page, h, d, at) = k(s.row + i, h, d);
          for (int64_t d = 0; d < dim; d++) v_pages(page, h, at, d) = v(s.row + i, h, d);
          if (a.pos_pages) View<int32_t>(a.pos_pages)(page, h, at) = View<int32_t>(a.pos)(s.row + i);
        }
    }
  });
}

namespace {

// What AttnPaged adds to mass_pages.
void add_mass(const char* op, const AttnPaged& a, const std::vector<PagedRow>& queries) {
  expect(!a.blocks, "ref: ", op, ": block lists of slots that have mass");
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1];
  const int64_t dim = a.q.shape[2], group = a.q.shape[1] / kv_heads;
  expect_dense(op, "mass_pages", a.mass_pages, {pages, kv_heads, kPageSlots});
  expect_dense(op, "first", a.first, {a.queries.shape[0]});
  dispatch(op, a.q, [&]<class T>(T) {
    const View<T> mass(a.mass_pages), q(a.q), k_pages(a.k_pages);
    for (size_t e = 0; e < queries.size(); e++) {
      const PagedRow& s = queries[e];
      const int64_t first = View<int32_t>(a.first)(e), old = s.slots - s.rows;
      expect(first >= 0, "ref: ", op, ": first[", e, "] is ", first);
      const SlotPages table{View<int32_t>(a.page_table), s.table_row};
      for (int64_t kv = 0; kv < kv_heads; kv++) {
        const auto at = [&](int64_t slot) -> T& { return mass(table.page(slot), kv, slot % kPageSlots); };
        std::vector<double> sum(s.slots);
        for (int64_t slot = first; slot < old; slot++) sum[slot] = at(slot);
        for (int64_t i = 0; i < s.rows; i++)
          for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
            const auto p = probabilities(
                &q(s.row + i, h, 0), dim, BlockLists().slots(e, kv, old + i + 1), a.scale,
                [&](int64_t slot, int64_t d) { return k_pages(table.page(slot), kv, d, slot % kPageSlots); });
            for (size_t slot = 0; slot < p.size(); slot++) sum[slot] += p[slot];
          }
        for (int64_t slot = first; slot < s.slots; slot++) at(slot) = static_cast<T>(sum[slot]);
      }
    }
  });
}

}  // namespace

void attn_paged(const AttnPaged& a, Stream) {
  expect_pages("attn_paged", a.k_pages, a.v_pages);
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], dim = a.q.shape[2], kv_heads = a.k_pages.shape[1];
  expect_shape("attn_paged", "q", a.q, {rows, heads, a.k_pages.shape[2]});
  expect_dense("attn_paged", "o", a.o, {rows, heads, dim});
  expect(heads % kv_heads == 0, "ref: attn_paged: ", heads, " query heads over ", kv_heads, " key heads");
  const auto queries = read_queries("attn_paged", a.queries, a.page_table, rows, a.k_pages.shape[0]);
  BlockLists lists;
  if (a.blocks) lists = BlockLists("attn_paged", a.blocks, a.budget, a.block, a.page_table.shape[0], kv_heads);
  // The slots that row i of entry e reads; only single rows have lists.
  const auto count = [&](const PagedRow& s, int64_t i) {
    const int64_t total = s.slots - s.rows + i + 1;
    return s.rows == 1 ? lists.count(s.table_row, total) : total;
  };
  int64_t pairs = 0, slots = 0;
  for (const PagedRow& s : queries) {
    for (int64_t i = 0; i < s.rows; i++) pairs += count(s, i);
    slots += s.rows == 1 ? count(s, 0) : s.slots;
  }
  expect(pairs == a.pairs && slots == a.slots, "ref: attn_paged: pairs ", a.pairs, " and slots ", a.slots,
         ", the entries hold ", pairs, " and ", slots);
  dispatch("attn_paged", a.q, [&]<class T>(T) {
    const View<T> o(a.o), q(a.q), k_pages(a.k_pages), v_pages(a.v_pages);
    for (size_t e = 0; e < queries.size(); e++) {
      const PagedRow& s = queries[e];
      const SlotPages pages{View<int32_t>(a.page_table), s.table_row};
      for (int64_t i = 0; i < s.rows; i++)
        for (int64_t h = 0; h < heads; h++) {
          const int64_t kv = h / (heads / kv_heads), total = s.slots - s.rows + i + 1;
          attend(
              &o(s.row + i, h, 0), &q(s.row + i, h, 0), dim,
              s.rows == 1 ? lists.slots(s.table_row, kv, total) : BlockLists().slots(0, kv, total), a.scale,
              [&](int64_t slot, int64_t d) { return k_pages(pages.page(slot), kv, d, slot % kPageSlots); },
              [&](int64_t slot, int64_t d) { return v_pages(pages.page(slot), kv, slot % kPageSlots, d); });
        }
    }
  });
  if (a.mass_pages) add_mass("attn_paged", a, queries);
}

void kv_copy_pages(const KvCopyPages& a, Stream) {
  expect_pages("kv_copy_pages", a.k_pages, a.v_pages);
  const int64_t pages = a.k_pages.shape[0], n = a.pairs.shape[0];
  expect_dense("kv_copy_pages", "pairs", a.pairs, {n, 2});
  const View<int32_t> pairs(a.pairs);
  std::vector<int> uses(pages);  // 1: source, 2: destination
  for (int64_t i = 0; i < n; i++) {
    const int32_t src = pairs(i, 0), dst = pairs(i, 1);
    expect(src >= 0 && src < pages && dst >= 0 && dst < pages, "ref: kv_copy_pages: pair ", i, " is (", src, ", ", dst,
           ") of ", pages, " pages");
    expect(uses[src] != 2 && uses[dst] == 0 && src != dst, "ref: kv_copy_pages: pair ", i, " (", src, ", ", dst,
           "): a destination is a source or occurs twice");
    uses[src] = 1, uses[dst] = 2;
  }
  const auto copy = [&]<class T>(T, const Tensor& t) {
    expect(t.contiguous() && t.shape[0] == pages, "ref: kv_copy_pages: an array of pages is ", t.str(), ", k_pages ",
           a.k_pages.str());
    for (int64_t i = 0; i < n; i++) {
      const T* from = t.as<T>() + pairs(i, 0) * t.stride[0];
      std::copy(from, from + t.stride[0], t.as<T>() + pairs(i, 1) * t.stride[0]);
    }
  };
  dispatch("kv_copy_pages", a.k_pages, [&]<class T>(T type) {
    for (const Tensor& t : {a.k_pages, a.v_pages, a.mass_pages})
      if (t) copy(type, t);
    if (a.pos_pages) copy(int32_t{}, a.pos_pages);
  });
}

}  // namespace pare::ref
