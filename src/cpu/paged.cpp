// Keys and values in pages, and attention over them.
#include "cpu/paged.h"

#include <cstring>
#include <vector>

namespace pare::cpu {

const PagedRow* paged_rows(const char* op, const Tensor& queries, int64_t rows, const Tensor& table, int64_t pages) {
  static_assert(sizeof(PagedRow) == 4 * sizeof(int32_t));
  const auto* const list = reinterpret_cast<const PagedRow*>(queries.as<int32_t>());
  const int32_t* const entries = table.as<int32_t>();
  for (int64_t i = 0; i < queries.shape[0]; i++) {
    const PagedRow& q = list[i];
    bool ok = q.row >= 0 && q.rows >= 0 && int64_t{q.row} + q.rows <= rows && q.rows <= q.slots && q.table_row >= 0 &&
              q.table_row < table.shape[0] && (int64_t{q.slots} + kPageSlots - 1) / kPageSlots <= table.shape[1];
    for (int64_t p = 0; ok && p * kPageSlots < q.slots; p++) {
      const int32_t page = entries[q.table_row * table.stride[0] + p];
      ok = page >= 0 && page < pages;
    }
    if (!ok) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op, ": entry ", i, " (row ", q.row, ", rows ", q.rows, ", slots ", q.slots,
                                 ", table row ", q.table_row, ") does not fit ", rows, " rows, page table ",
                                 table.str(), " and ", pages, " pages"));
  }
  return list;
}

BlockLists::BlockLists(const char* op, const Tensor& blocks, const Tensor& budget, int32_t block) : op_(op) {
  if (blocks)
    args_ = {.blocks = blocks.as<int32_t>(),
             .budget = budget.as<int32_t>(),
             .kv_heads = blocks.shape[1],
             .room = blocks.shape[2],
             .block = block};
}

const int32_t* BlockLists::list(int64_t row, int64_t kv_head, int64_t total) const {
  const int64_t n = args_.budget[row], last = blocks_of(total, args_.block) - 1;
  const int32_t* const list = args_.blocks + (row * args_.kv_heads + kv_head) * args_.room;
  bool ok = n >= 1 && n <= args_.room;
  for (int64_t i = 0; ok && i < n; i++)
    ok = list[i] > (i ? list[i - 1] : -1) && (i + 1 < n ? list[i] < last : list[i] == last);
  if (!ok) [[unlikely]]
    throw std::logic_error(cat("cpu: ", op_, ": the list of row ", row, ", key head ", kv_head, ", of ", n,
                               " blocks (room for ", args_.room, ") is not ascending up to block ", last));
  return list;
}

// Blocks that are whole pages make a page table; smaller ones are copied into new pages, without gaps.
void attend_listed(const PagedArgs& a, const PagedRow& q, int64_t kv_head, const BlockLists& lists, int64_t list_row,
                   float* scratch) {
  const int64_t block = lists.args().block, n = lists.args().budget[list_row], head_dim = a.head_dim;
  const int32_t* const list = lists.list(list_row, kv_head, q.slots);
  const int32_t* const table = a.page_table ? a.page_table + q.table_row * a.table_stride : nullptr;
  PagedArgs listed = a;
  PagedRow row = q;
  row.slots = static_cast<int32_t>(lists.count(list_row, q.slots));
  row.table_row = 0;
  float* const memory = scratch + paged_scratch(row.slots, head_dim);
  if (block == kPageSlots) {
    int32_t* const pages = reinterpret_cast<int32_t*>(memory);
    for (int64_t i = 0; i < n; i++) pages[i] = table ? table[list[i]] : list[i];
    listed.page_table = pages;
  } else {
    const int64_t page = head_dim * kPageSlots;
    float *const keys = memory, *const values = keys + blocks_of(row.slots, kPageSlots) * page;
    for (int64_t i = 0; i < n; i++) {
      const int64_t slot = list[i] * block, to = i * block;
      const int64_t from = (table ? table[slot / kPageSlots] : slot / kPageSlots) * a.page_step + kv_head * a.head_step;
      const float* const k = a.k_pages + from + slot % kPageSlots;
      float* const out = keys + to / kPageSlots * page + to % kPageSlots;
      for (int64_t d = 0; d < head_dim; d++) std::memcpy(out + d * kPageSlots, k + d * kPageSlots, 4 * sizeof(float));
      std::memcpy(values + to * head_dim, a.v_pages + from + slot % kPageSlots * head_dim,
                  static_cast<size_t>(4 * head_dim) * sizeof(float));
    }
    listed.k_pages = keys;
    listed.v_pages = values;
    listed.page_table = nullptr;
    listed.head_step = 0;
    listed.page_step = page;
  }
  cpu_kernels().attn_paged(listed, row, kv_head, scratch);
}

void attn_paged(const AttnPaged& a, Stream) {
  constexpr const char* op = "attn_paged";
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], head_dim = a.q.shape[2];
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1];
  const PagedArgs args{.o = a.o.as<float>(),
                       .lse = nullptr,
                       .q = a.q.as<float>(),
                       .k_pages = a.k_pages.as<float>(),
                       .v_pages = a.v_pages.as<float>(),
                       .page_table = a.page_table.as<int32_t>(),
                       .head_step = head_dim * kPageSlots,
                       .page_step = kv_heads * head_dim * kPageSlots,
                       .q_stride = a.q.stride[0],
                       .table_stride = a.page_table.stride[0],
                       .heads = heads,
                       .group = heads / kv_heads,
                       .head_dim = head_dim,
                       .scale = a.scale,
                       .mass_pages = a.mass_pages ? a.mass_pages.as<float>() : nullptr};
  const int32_t* const first = a.mass_pages ? a.first.as<int32_t>() : nullptr;
  const PagedRow* const list = paged_rows(op, a.queries, rows, a.page_table, pages);
  const BlockLists lists(op, a.blocks, a.budget, a.block);
  const int64_t n = a.queries.shape[0] * kv_heads;
  if (n == 0) return;
  const Kernels& k = cpu_kernels();
  const double time = pair_nanoseconds(head_dim) * static_cast<double>(a.pairs * heads);
  parallel(n, time / static_cast<double>(n) + 50, [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const int64_t e = i / kv_heads, h = i % kv_heads;
      const PagedRow& q = list[e];
      if (q.rows == 1 && lists.listed(q.table_row, q.slots))
        attend_listed(args, q, h, lists, q.table_row,
                      scratch(listed_scratch(lists.count(q.table_row, q.slots), head_dim)));
      else if (q.rows) {
        PagedArgs own = args;
        own.first_mass = first ? std::max(first[e], 0) : 0;
        k.attn_paged(own, q, h, scratch(paged_scratch(q.slots, head_dim) + (first ? mass_scratch(q.slots) : 0)));
      }
    }
  });
}

void kv_copy_pages(const KvCopyPages& a, Stream) {
  constexpr const char* op = "kv_copy_pages";
  const auto& s = a.k_pages.shape;
  const int64_t n = a.pairs.shape[0], page = s[1] * s[2] * s[3];
  const int32_t* const pairs = index(op, "pairs", a.pairs, s[0]);
  struct Array {
    char* data;
    size_t bytes;  // of a page
  };
  std::vector<Array> arrays;
  for (const Tensor& t : {a.k_pages, a.v_pages, a.pos_pages, a.mass_pages})
    if (t) arrays.push_back({static_cast<char*>(t.data), t.bytes() / static_cast<size_t>(s[0])});
  parallel(n, 0.4 * static_cast<double>(page) + 5, [&](Interval r) {
    for (int64_t i = r.begin; i < r.end; i++)
      for (const Array& x : arrays)
        std::memcpy(x.data + static_cast<size_t>(pairs[2 * i + 1]) * x.bytes,
                    x.data + static_cast<size_t>(pairs[2 * i]) * x.bytes, x.bytes);
  });
}

}  // namespace pare::cpu
