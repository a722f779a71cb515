// Keys and values in pages, and attention over them.
#include "ref/paged.h"

#include <algorithm>

#include "ref/attention.h"

namespace pare::ref {

std::vector<PagedRow> read_queries(const char* op, const Tensor& queries, const Tensor& page_table, int64_t rows,
                                   int64_t pages) {
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

namespace {

// What AttnPaged adds to mass_pages.
void add_mass(const char* op, const AttnPaged& a, const std::vector<PagedRow>& queries) {
  const int64_t kv_heads = a.k_pages.shape[1], head_dim = a.q.shape[2], group = a.q.shape[1] / kv_heads;
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
                &q(s.row + i, h, 0), head_dim, all_slots(old + i + 1), a.scale,
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
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], head_dim = a.q.shape[2], kv_heads = a.k_pages.shape[1];
  const auto queries = read_queries("attn_paged", a.queries, a.page_table, rows, a.k_pages.shape[0]);
  const BlockLists lists("attn_paged", a.blocks, a.budget, a.block);
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
              &o(s.row + i, h, 0), &q(s.row + i, h, 0), head_dim,
              s.rows == 1 ? lists.slots(s.table_row, kv, total) : all_slots(total), a.scale,
              [&](int64_t slot, int64_t d) { return k_pages(pages.page(slot), kv, d, slot % kPageSlots); },
              [&](int64_t slot, int64_t d) { return v_pages(pages.page(slot), kv, slot % kPageSlots, d); });
        }
    }
  });
  if (a.mass_pages) add_mass("attn_paged", a, queries);
}

void kv_copy_pages(const KvCopyPages& a, Stream) {
  const int64_t pages = a.k_pages.shape[0], n = a.pairs.shape[0];
  const View<int32_t> pairs(a.pairs);
  std::vector<int> uses(pages);  // 1: source, 2: destination
  for (int64_t i = 0; i < n; i++) {
    const int32_t src = pairs(i, 0), dst = pairs(i, 1);
    expect(src >= 0 && src < pages && dst >= 0 && dst < pages, "ref: kv_copy_pages: pair ", i, " is (", src, ", ", dst,
           ") of ", pages, " pages");
    expect(uses[src] != 2 && uses[dst] == 0 && src != dst, "ref: kv_copy_pages: pair ", i, " (", src, ", ", dst,
           "): a destination is a source or occurs twice");
    uses[src] = 1;
    uses[dst] = 2;
  }
  const auto copy = [&]<class T>(T, const Tensor& t) {
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
