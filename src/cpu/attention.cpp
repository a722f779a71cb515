// Attention of packed sequences and over pages, and the ops on pages.
#include <cstring>
#include <numeric>
#include <vector>

#include "cpu/paged.h"
#include "cpu/segments.h"

namespace pare::cpu {

namespace {

constexpr int64_t kRowsAtOnce = 256;  // own rows of a piece of work

bool same_parent(const SegmentRow& a, const SegmentRow& b) {
  return a.parent_row == b.parent_row && a.parent_len == b.parent_len;
}

// In an order in which neighbours share many slots: the siblings of a parent, one key head after another.
std::vector<AttnPiece> forward_pieces(const SegmentRow* s, int64_t count, int64_t kv_heads) {
  std::vector<AttnPiece> pieces;
  for (int64_t i = 0, end; i < count; i = end) {
    for (end = i + 1; end < count && same_parent(s[i], s[end]);) end++;
    for (int64_t h = 0; h < kv_heads; h++)
      for (int64_t j = i; j < end; j++)
        for (int64_t r = 0; r < s[j].len; r += kRowsAtOnce)
          pieces.push_back({s + j, h, {r, std::min<int64_t>(r + kRowsAtOnce, s[j].len)}});
  }
  return pieces;
}

}  // namespace

const SegmentRow* segment_rows(const char* op, const Tensor& t, int64_t rows, int64_t parent_rows) {
  static_assert(sizeof(SegmentRow) == 4 * sizeof(int32_t));
  const auto* const s = reinterpret_cast<const SegmentRow*>(index(op, "segments", t, {t.shape[0], 4}));
  for (int64_t i = 0; i < t.shape[0]; i++) {
    const bool own = s[i].row >= 0 && s[i].len >= 0 && int64_t{s[i].row} + s[i].len <= rows;
    const bool parent = s[i].parent_len == 0 || (s[i].parent_len > 0 && s[i].parent_row >= 0 &&
                                                 int64_t{s[i].parent_row} + s[i].parent_len <= parent_rows);
    if (!own || !parent) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op, ": segment ", i, " has rows ", s[i].row, " + ", s[i].len, " of ", rows,
                                 " and parent rows ", s[i].parent_row, " + ", s[i].parent_len, " of ", parent_rows));
  }
  return s;
}

int64_t shared_slots(const AttnPiece& a, const AttnPiece& b) {
  if (!a.segment || !b.segment || a.kv_head != b.kv_head) return 0;
  if (a.segment == b.segment) return a.segment->parent_len + std::min(a.rows.end, b.rows.end);
  return same_parent(*a.segment, *b.segment) ? a.segment->parent_len : 0;
}

int64_t longest(const SegmentRow* s, int64_t count) {
  int64_t slots = 0;
  for (int64_t i = 0; i < count; i++) slots = std::max<int64_t>(slots, s[i].parent_len + s[i].len);
  return round16(slots);
}

const int32_t* parent_lists(const char* op, const Tensor& lists, int64_t kv_heads, int64_t rows, int64_t parent_rows) {
  if (!lists) return nullptr;
  const int32_t* const entries = index(op, "lists", lists, {lists.shape[0], kv_heads});
  for (int64_t i = 0; i < lists.size(); i++)
    if (entries[i] >= rows || -1 - int64_t{entries[i]} >= parent_rows) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op, ": list entry ", i / kv_heads, " of key head ", i % kv_heads, " is ",
                                 entries[i], ", there are ", rows, " rows and ", parent_rows, " parent rows"));
  return entries;
}

void attn_fwd(const AttnFwd& a, Stream) {
  constexpr const char* op = "attn_fwd";
  if (a.blocks) return attn_fwd_listed(a);
  AttnArgs args = attn_args(op, a);
  args.o = dense(op, "o", a.o, {a.q.shape[0], args.heads, args.width});
  const int64_t count = a.segments.shape[0], kv_heads = a.k.shape[1];
  const Tensor& parents = a.lists ? a.lists : a.pk ? a.pk : a.k;
  const SegmentRow* const s = segment_rows(op, a.segments, a.q.shape[0], parents.shape[0]);
  const std::vector<AttnPiece> pieces = forward_pieces(s, count, kv_heads);
  if (pieces.empty()) return;
  const Kernels& k = cpu_kernels();
  const int64_t n = std::ssize(pieces), room = longest(s, count), padded = round16(args.width);
  const double time = pair_nanoseconds(args.width) * static_cast<double>(a.pairs * args.heads);
  parallel(n, time / static_cast<double>(n), [&](Interval range) {
    float* const room_of_thread = scratch((2 * room + kAttnRows) * padded);
    const auto attend = [&](AttnTurn turn) {
      turn.room = room, turn.scratch = room_of_thread;
      k.attn_fwd(args, turn);
    };
    Turns turns;
    for (int64_t i = range.begin; i < range.end; i++) turns.add(pieces[static_cast<size_t>(i)], attend);
    turns.add({}, attend);
  });
}

namespace {

// The runs of rows, of k and of pk, in which the rows that a segment lists lie.
struct ListedRows {
  Interval own{INT64_MAX, 0}, parent{INT64_MAX, 0};
  ListedRows(const int32_t* lists, int64_t kv_heads, const SegmentRow& s) {
    const auto add = [](Interval& r, int64_t row) { r = {std::min(r.begin, row), std::max(r.end, row + 1)}; };
    for (int64_t i = s.parent_row * kv_heads; i < (s.parent_row + s.parent_len) * kv_heads; i++)
      lists[i] >= 0 ? add(own, lists[i]) : add(parent, -1 - lists[i]);
  }
};

// For each segment the name of its chain, from 0.
std::vector<int64_t> chains(const SegmentRow* s, int64_t n, const int32_t* lists, int64_t kv_heads, const float* own,
                            int64_t own_stride, const float* parent, int64_t parent_stride) {
  struct Span {
    uintptr_t begin, end;
    int64_t segment;
  };
  std::vector<Span> spans;
  const auto address = [](const float* p, int64_t elements) {
    return reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(elements) * sizeof(float);
  };
  for (int64_t i = 0; i < n; i++) {
    const auto add = [&](const float* rows, int64_t stride, Interval r) {
      if (r.begin < r.end) spans.push_back({address(rows, r.begin * stride), address(rows, r.end * stride), i});
    };
    add(own, own_stride, {s[i].row, int64_t{s[i].row} + s[i].len});
    if (lists) {
      const ListedRows listed(lists, kv_heads, s[i]);
      add(own, own_stride, listed.own), add(parent, parent_stride, listed.parent);
    } else {
      add(parent, parent_stride, {s[i].parent_row, int64_t{s[i].parent_row} + s[i].parent_len});
    }
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<int64_t> root(static_cast<size_t>(n));
  std::iota(root.begin(), root.end(), 0);
  const auto find = [&](int64_t i) {
    while (root[i] != i) i = root[i] = root[root[i]];
    return i;
  };
  uintptr_t end = 0;
  for (size_t i = 0; i < spans.size(); i++) {
    if (i && spans[i].begin < end) root[find(spans[i].segment)] = find(spans[i - 1].segment);
    end = std::max(end, spans[i].end);
  }
  for (int64_t i = 0; i < n; i++) root[i] = find(i);
  return root;
}

}  // namespace

AttnBwdArgs attn_bwd_args(const char* op, const AttnBwd& a) {
  AttnBwdArgs args{};
  args.fwd = attn_args(op, a);
  const int64_t rows = a.q.shape[0], heads = args.fwd.heads, width = args.fwd.width, kv_heads = a.k.shape[1];
  const Tensor &dpk = a.dpk ? a.dpk : a.dk, &dpv = a.dpv ? a.dpv : a.dv;
  args.fwd.o = strided(op, "o", a.o, {rows, heads, width});
  args.d_o = strided(op, "d_o", a.d_o, {rows, heads, width});
  args.dq = strided(op, "dq", a.dq, {rows, heads, width});
  args.dk = strided(op, "dk", a.dk, {rows, kv_heads, width});
  args.dv = strided(op, "dv", a.dv, {rows, kv_heads, width});
  args.dpk = strided(op, "dpk", dpk, {dpk.shape[0], kv_heads, width});
  args.dpv = strided(op, "dpv", dpv, {dpk.shape[0], kv_heads, width});
  args.o_stride = a.o.stride[0], args.do_stride = a.d_o.stride[0], args.dq_stride = a.dq.stride[0];
  args.dk_stride = a.dk.stride[0], args.dv_stride = a.dv.stride[0];
  args.dpk_stride = dpk.stride[0], args.dpv_stride = dpv.stride[0];
  return args;
}

SegmentChains segment_chains(const char* op, const AttnBwd& a, const AttnBwdArgs& args) {
  const int64_t rows = a.q.shape[0], count = a.segments.shape[0];
  const int64_t parents = std::min(a.pk ? a.pk.shape[0] : rows, (a.dpk ? a.dpk : a.dk).shape[0]);
  SegmentChains c{segment_rows(op, a.segments, rows, a.lists ? a.lists.shape[0] : parents), {}, {}};
  const std::vector<int64_t> chain =
      chains(c.segments, count, args.fwd.lists, a.k.shape[1], args.dk, args.dk_stride, args.dpk, args.dpk_stride);
  for (int64_t i = 0; i < count; i++)
    if (c.segments[i].len) c.order.push_back(i);
  std::stable_sort(c.order.begin(), c.order.end(), [&](int64_t i, int64_t j) { return chain[i] < chain[j]; });
  for (int64_t i = 0; i < std::ssize(c.order); i++)
    if (i == 0 || chain[c.order[i]] != chain[c.order[i - 1]]) c.starts.push_back(i);
  c.starts.push_back(std::ssize(c.order));
  return c;
}

void attn_bwd(const AttnBwd& a, Stream) {
  constexpr const char* op = "attn_bwd";
  const AttnBwdArgs args = attn_bwd_args(op, a);
  const SegmentChains c = segment_chains(op, a, args);
  if (a.blocks) return attn_bwd_listed(a, args, c);
  const int64_t room = longest(c.segments, a.segments.shape[0]), padded = round16(args.fwd.width);
  for_chains(c, a.k.shape[1], 2.5 * pair_nanoseconds(args.fwd.width) * static_cast<double>(a.pairs * args.fwd.heads),
             [&](AttnTurn turn) {
               turn.room = room, turn.scratch = scratch((3 * room + 3 * kAttnBwdRows + kAttnBwdSlots) * padded);
               cpu_kernels().attn_bwd(args, turn);
             });
}

const PagedRow* paged_rows(const char* op, const Tensor& queries, int64_t rows, const Tensor& table, int64_t pages) {
  static_assert(sizeof(PagedRow) == 4 * sizeof(int32_t));
  const auto* const list = reinterpret_cast<const PagedRow*>(index(op, "queries", queries, {queries.shape[0], 4}));
  if (table.dtype != DType::i32 || table.rank != 2 || (table.shape[1] > 1 && table.stride[1] != 1))
    throw std::logic_error(cat("cpu: ", op, ": page_table is ", table.str(), "; expected i32[sequences, max_pages]"));
  const int32_t* const entries = static_cast<const int32_t*>(table.data);
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

void kv_write(const KvWrite& a, Stream) {
  constexpr const char* op = "kv_write";
  const int64_t rows = a.k.shape[0], kv_heads = a.k.shape[1], width = a.k.shape[2], pages = a.k_pages.shape[0];
  float* const k_pages = dense(op, "k_pages", a.k_pages, {pages, kv_heads, width, kPageSlots});
  float* const v_pages = dense(op, "v_pages", a.v_pages, {pages, kv_heads, kPageSlots, width});
  const float* const k = strided(op, "k", a.k, {rows, kv_heads, width});
  const float* const v = strided(op, "v", a.v, {rows, kv_heads, width});
  const PagedRow* const list = paged_rows(op, a.queries, rows, a.page_table, pages);
  const int32_t* const table = static_cast<const int32_t*>(a.page_table.data);
  int32_t* const pos_pages = a.pos_pages ? index(op, "pos_pages", a.pos_pages, {pages, kv_heads, kPageSlots}) : nullptr;
  const int32_t* const pos = pos_pages ? index(op, "pos", a.pos, {rows}) : nullptr;
  const int64_t n = a.queries.shape[0];
  parallel(n, static_cast<double>(rows * kv_heads * width) / static_cast<double>(std::max<int64_t>(n, 1)) + 5,
           [&](Interval range) {
             for (int64_t i = range.begin; i < range.end; i++)
               for (int64_t r = 0; r < list[i].rows; r++) {
                 const int64_t slot = list[i].slots - list[i].rows + r, row = list[i].row + r;
                 const int64_t page = table[list[i].table_row * a.page_table.stride[0] + slot / kPageSlots];
                 for (int64_t h = 0; h < kv_heads; h++) {
                   const int64_t at = (page * kv_heads + h) * width * kPageSlots, s = slot % kPageSlots;
                   const float* const key = k + row * a.k.stride[0] + h * width;
                   for (int64_t d = 0; d < width; d++) k_pages[at + d * kPageSlots + s] = key[d];
                   std::memcpy(v_pages + at + s * width, v + row * a.v.stride[0] + h * width,
                               static_cast<size_t>(width) * sizeof(float));
                   if (pos_pages) pos_pages[(page * kv_heads + h) * kPageSlots + s] = pos[row];
                 }
               }
           });
}

void attn_paged(const AttnPaged& a, Stream) {
  constexpr const char* op = "attn_paged";
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], width = a.q.shape[2];
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1];
  if (kv_heads <= 0 || heads % kv_heads)
    throw std::logic_error(cat("cpu: ", op, ": ", heads, " query heads over ", kv_heads, " key heads"));
  if (!(a.scale > 0)) throw std::logic_error(cat("cpu: ", op, ": scale ", a.scale, " is not positive"));
  const PagedArgs args{
      .o = dense(op, "o", a.o, {rows, heads, width}),
      .lse = nullptr,
      .q = strided(op, "q", a.q, {rows, heads, width}),
      .k_pages = dense(op, "k_pages", a.k_pages, {pages, kv_heads, width, kPageSlots}),
      .v_pages = dense(op, "v_pages", a.v_pages, {pages, kv_heads, kPageSlots, width}),
      .page_table = static_cast<const int32_t*>(a.page_table.data),
      .head_step = width * kPageSlots,
      .page_step = kv_heads * width * kPageSlots,
      .q_stride = a.q.stride[0],
      .table_stride = a.page_table.stride[0],
      .heads = heads,
      .group = heads / kv_heads,
      .width = width,
      .scale = a.scale,
      .mass_pages = a.mass_pages ? dense(op, "mass_pages", a.mass_pages, {pages, kv_heads, kPageSlots}) : nullptr};
  const int32_t* const first = a.mass_pages ? index(op, "first", a.first, {a.queries.shape[0]}) : nullptr;
  const PagedRow* const list = paged_rows(op, a.queries, rows, a.page_table, pages);
  if (a.blocks && a.mass_pages) throw std::logic_error(cat("cpu: ", op, ": block lists of slots that have mass"));
  BlockLists lists;
  if (a.blocks) lists = BlockLists(op, a.blocks, a.budget, a.block, a.page_table.shape[0], kv_heads);
  const int64_t n = a.queries.shape[0] * kv_heads;
  if (n == 0) return;
  const Kernels& k = cpu_kernels();
  const double time = pair_nanoseconds(width) * static_cast<double>(a.pairs * heads);
  parallel(n, time / static_cast<double>(n) + 50, [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const int64_t e = i / kv_heads, h = i % kv_heads;
      const PagedRow& q = list[e];
      if (q.rows == 1 && lists.listed(q.table_row, q.slots))
        attend_listed(args, q, h, lists, q.table_row,
                      scratch(listed_scratch(lists.count(q.table_row, q.slots), width)));
      else if (q.rows) {
        PagedArgs own = args;
        own.first_mass = first ? std::max(first[e], 0) : 0;
        k.attn_paged(own, q, h, scratch(paged_scratch(q.slots, width) + (first ? mass_scratch(q.slots) : 0)));
      }
    }
  });
}

void kv_copy_pages(const KvCopyPages& a, Stream) {
  constexpr const char* op = "kv_copy_pages";
  const auto& s = a.k_pages.shape;
  const int64_t n = a.pairs.shape[0], page = s[1] * s[2] * s[3], beside = s[1] * s[3];
  const int32_t* const pairs = index(op, "pairs", a.pairs, {n, 2}, s[0]);
  struct Array {
    char* data;
    size_t bytes;  // of a page
  };
  std::vector<Array> arrays;
  const auto add = [&](void* data, int64_t elements) {
    arrays.push_back({static_cast<char*>(data), static_cast<size_t>(elements) * 4});
  };
  add(dense(op, "k_pages", a.k_pages, {s[0], s[1], s[2], s[3]}), page);
  add(dense(op, "v_pages", a.v_pages, {s[0], s[1], s[3], s[2]}), page);
  if (a.pos_pages) add(index(op, "pos_pages", a.pos_pages, {s[0], s[1], s[3]}), beside);
  if (a.mass_pages) add(dense(op, "mass_pages", a.mass_pages, {s[0], s[1], s[3]}), beside);
  parallel(n, 0.4 * static_cast<double>(page) + 5, [&](Interval r) {
    for (int64_t i = r.begin; i < r.end; i++)
      for (const Array& x : arrays)
        std::memcpy(x.data + static_cast<size_t>(pairs[2 * i + 1]) * x.bytes,
                    x.data + static_cast<size_t>(pairs[2 * i]) * x.bytes, x.bytes);
  });
}

}  // namespace pare::cpu
