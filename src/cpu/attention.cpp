// Attention of packed sequences.
#include "cpu/attention.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "cpu/paged.h"

namespace pare::cpu {

static bool same_parent(const SegmentRow& a, const SegmentRow& b) {
  return a.parent_row == b.parent_row && a.parent_len == b.parent_len;
}

std::vector<AttnPiece> attn_pieces(const SegmentRow* s, int64_t count, int64_t kv_heads) {
  constexpr int64_t kRowsAtOnce = 256;  // own rows of a piece of work
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

const SegmentRow* segment_rows(const char* op, const Tensor& t, int64_t rows, int64_t parent_rows) {
  static_assert(sizeof(SegmentRow) == 4 * sizeof(int32_t));
  const auto* const s = reinterpret_cast<const SegmentRow*>(t.as<int32_t>());
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

namespace {

// The slots of the longest segment, rounded up to 16.
int64_t longest(const SegmentRow* s, int64_t count) {
  int64_t slots = 0;
  for (int64_t i = 0; i < count; i++) slots = std::max<int64_t>(slots, s[i].parent_len + s[i].len);
  return round16(slots);
}

// First slots that two pieces have in common: those of one segment, or the parent of siblings.
int64_t shared_slots(const AttnPiece& a, const AttnPiece& b) {
  if (!a.segment || !b.segment || a.kv_head != b.kv_head) return 0;
  if (a.segment == b.segment) return a.segment->parent_len + std::min(a.rows.end, b.rows.end);
  return same_parent(*a.segment, *b.segment) ? a.segment->parent_len : 0;
}

// Turns the pieces of a thread into turns: calls f(turn) for each piece that was added, when the next one is known; an
// empty piece ends them.  Room and scratch are left to f.
class Turns {
 public:
  template <class F>
  void add(const AttnPiece& next, F f) {
    if (piece_.segment)
      f(AttnTurn{
          .piece = piece_, .next = next, .packed = shared_slots(before_, piece_), .room = 0, .scratch = nullptr});
    before_ = piece_;
    piece_ = next;
  }

 private:
  AttnPiece before_{}, piece_{};
};

// AttnFwd::lists, checked; null if absent.
const int32_t* parent_lists(const char* op, const Tensor& lists, int64_t kv_heads, int64_t rows, int64_t parent_rows) {
  if (!lists) return nullptr;
  const int32_t* const entries = lists.as<int32_t>();
  for (int64_t i = 0; i < lists.size(); i++)
    if (entries[i] >= rows || -1 - int64_t{entries[i]} >= parent_rows) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op, ": list entry ", i / kv_heads, " of key head ", i % kv_heads, " is ",
                                 entries[i], ", there are ", rows, " rows and ", parent_rows, " parent rows"));
  return entries;
}

// The operands that AttnFwd and AttnBwd share.
template <class Args>
AttnArgs attn_args(const char* op, const Args& a) {
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], kv_heads = a.k.shape[1];
  return {.o = a.o.template as<float>(),
          .lse = a.lse.template as<float>(),
          .q = a.q.template as<float>(),
          .k = a.k.template as<float>(),
          .v = a.v.template as<float>(),
          .pk = a.pk.template as<float>(),
          .pv = a.pv.template as<float>(),
          .lists = parent_lists(op, a.lists, kv_heads, rows, a.pk.shape[0]),
          .q_stride = a.q.stride[0],
          .k_stride = a.k.stride[0],
          .v_stride = a.v.stride[0],
          .pk_stride = a.pk.stride[0],
          .pv_stride = a.pv.stride[0],
          .heads = heads,
          .group = heads / kv_heads,
          .head_dim = a.q.shape[2],
          .scale = a.scale};
}

// The keys of slots [0, n) of a segment as pages without gaps, and the values.  Scratch: pages (2 n rows).
struct SegmentPages {
  float *keys, *values;
};
SegmentPages lay_out(const AttnArgs& a, const SegmentRow& s, int64_t kv_head, int64_t n, float* memory) {
  const int64_t head_dim = a.head_dim, column = kv_head * head_dim;
  float *const keys = memory, *const values = keys + round16(n) * head_dim;
  const size_t bytes = static_cast<size_t>(head_dim) * sizeof(float);
  const auto copy = [&](const float* parent, int64_t parent_stride, const float* own, int64_t own_stride) {
    for (int64_t slot = 0; slot < n; slot++)
      std::memcpy(values + slot * head_dim,
                  slot < s.parent_len ? parent + (s.parent_row + slot) * parent_stride + column
                                      : own + (s.row + slot - s.parent_len) * own_stride + column,
                  bytes);
  };
  copy(a.pk, a.pk_stride, a.k, a.k_stride);
  cpu_kernels().pack(keys, values, n, head_dim, {0, n});
  copy(a.pv, a.pv_stride, a.v, a.v_stride);
  return {keys, values};
}

// Of rows that have lists of blocks.
void forward_listed(const AttnFwd& a, const AttnArgs& args, const std::vector<AttnPiece>& pieces) {
  const int64_t n = std::ssize(pieces), head_dim = args.head_dim;
  const BlockLists lists("attn_fwd", a.blocks, a.budget, a.block);
  const double time = pair_nanoseconds(head_dim) * static_cast<double>(a.pairs * args.heads);
  parallel(n, time / static_cast<double>(n), [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const AttnPiece& p = pieces[static_cast<size_t>(i)];
      const SegmentRow& segment = *p.segment;
      const int64_t slots = segment.parent_len + p.rows.end, pages = 2 * round16(slots) * head_dim;
      float* const memory = scratch(pages + listed_scratch(slots, head_dim));
      const SegmentPages laid = lay_out(args, segment, p.kv_head, slots, memory);
      const PagedArgs paged{.o = args.o,
                            .lse = args.lse,
                            .q = args.q,
                            .k_pages = laid.keys,
                            .v_pages = laid.values,
                            .page_table = nullptr,
                            .head_step = 0,
                            .page_step = head_dim * kPageSlots,
                            .q_stride = args.q_stride,
                            .table_stride = 0,
                            .heads = args.heads,
                            .group = args.group,
                            .head_dim = head_dim,
                            .scale = args.scale};
      for (int32_t r = static_cast<int32_t>(p.rows.begin), end; r < p.rows.end; r = end) {
        // A row with a list, or the rows up to the next that has one.
        const auto listed = [&](int32_t j) { return lists.listed(segment.row + j, segment.parent_len + j + 1); };
        end = r + 1;
        while (!listed(r) && end < p.rows.end && !listed(end)) end++;
        const PagedRow row{segment.row + r, end - r, segment.parent_len + end, 0};
        if (listed(r))
          attend_listed(paged, row, p.kv_head, lists, row.row, memory + pages);
        else
          cpu_kernels().attn_paged(paged, row, p.kv_head, memory + pages);
      }
    }
  });
}

}  // namespace

void attn_fwd(const AttnFwd& a, Stream) {
  constexpr const char* op = "attn_fwd";
  const AttnArgs args = attn_args(op, a);
  const int64_t count = a.segments.shape[0], kv_heads = a.k.shape[1];
  const SegmentRow* const s = segment_rows(op, a.segments, a.q.shape[0], (a.lists ? a.lists : a.pk).shape[0]);
  const std::vector<AttnPiece> pieces = attn_pieces(s, count, kv_heads);
  if (pieces.empty()) return;
  if (a.blocks) return forward_listed(a, args, pieces);
  const Kernels& k = cpu_kernels();
  const int64_t n = std::ssize(pieces), room = longest(s, count), padded = round16(args.head_dim);
  const double time = pair_nanoseconds(args.head_dim) * static_cast<double>(a.pairs * args.heads);
  parallel(n, time / static_cast<double>(n), [&](Interval range) {
    float* const room_of_thread = scratch((2 * room + kAttnRows) * padded);
    const auto attend = [&](AttnTurn turn) {
      turn.room = room;
      turn.scratch = room_of_thread;
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
      add(own, own_stride, listed.own);
      add(parent, parent_stride, listed.parent);
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

AttnBwdArgs attn_bwd_args(const char* op, const AttnBwd& a) {
  AttnBwdArgs args{};
  args.fwd = attn_args(op, a);
  args.dq = a.dq.as<float>();
  args.dk = a.dk.as<float>();
  args.dv = a.dv.as<float>();
  args.dpk = a.dpk.as<float>();
  args.dpv = a.dpv.as<float>();
  args.d_o = a.d_o.as<float>();
  args.o_stride = a.o.stride[0];
  args.do_stride = a.d_o.stride[0];
  args.dq_stride = a.dq.stride[0];
  args.dk_stride = a.dk.stride[0];
  args.dv_stride = a.dv.stride[0];
  args.dpk_stride = a.dpk.stride[0];
  args.dpv_stride = a.dpv.stride[0];
  return args;
}

// Segments that add to common rows of dk and dv must follow one another; all others are independent.
struct SegmentChains {
  const SegmentRow* segments;
  std::vector<int64_t> order, starts;  // chain c: the segments order[starts[c] .. starts[c + 1]), all of some rows
};
SegmentChains segment_chains(const char* op, const AttnBwd& a, const AttnBwdArgs& args) {
  const int64_t count = a.segments.shape[0];
  SegmentChains c{segment_rows(op, a.segments, a.q.shape[0], (a.lists ? a.lists : a.pk).shape[0]), {}, {}};
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

// Calls f(turn) for every segment and key head, those of one chain in list order.  Nanoseconds: of all.
template <class F>
void for_chains(const SegmentChains& c, int64_t kv_heads, double nanoseconds, F f) {
  const int64_t n = (static_cast<int64_t>(c.starts.size()) - 1) * kv_heads;
  if (n == 0) return;
  parallel(n, nanoseconds / static_cast<double>(n), [&](Interval range) {
    Turns turns;
    for (int64_t i = range.begin; i < range.end; i++)
      for (int64_t j = c.starts[i / kv_heads]; j < c.starts[i / kv_heads + 1]; j++) {
        const SegmentRow* const s = c.segments + c.order[j];
        turns.add({s, i % kv_heads, {0, s->len}}, f);
      }
    turns.add({}, f);
  });
}

// Of rows that have lists of blocks.
void backward_listed(const AttnBwd& a, const AttnBwdArgs& args, const SegmentChains& c) {
  const int64_t head_dim = args.fwd.head_dim, kv_heads = a.k.shape[1];
  const BlockLists lists("attn_bwd", a.blocks, a.budget, a.block);
  for (const int64_t i : c.order)
    for (int64_t r = 0; r < c.segments[i].len; r++) {
      const int64_t row = c.segments[i].row + r, total = c.segments[i].parent_len + r + 1;
      for (int64_t h = 0; lists.listed(row, total) && h < kv_heads; h++) lists.list(row, h, total);
    }
  const Kernels& k = cpu_kernels();
  for_chains(c, kv_heads, 4 * pair_nanoseconds(head_dim) * static_cast<double>(a.pairs * args.fwd.heads),
             [&](const AttnTurn& turn) {
               const SegmentRow& s = *turn.piece.segment;
               const int64_t padded = round16(head_dim), slots = round16(s.parent_len + s.len);
               k.attn_bwd_listed(args, lists.args(), s, turn.piece.kv_head,
                                 scratch(slots * (5 * padded + 4) + 3 * padded));
             });
}

}  // namespace

void attn_bwd(const AttnBwd& a, Stream) {
  constexpr const char* op = "attn_bwd";
  const AttnBwdArgs args = attn_bwd_args(op, a);
  const SegmentChains c = segment_chains(op, a, args);
  if (a.blocks) return backward_listed(a, args, c);
  const int64_t room = longest(c.segments, a.segments.shape[0]), padded = round16(args.fwd.head_dim);
  for_chains(c, a.k.shape[1], 2.5 * pair_nanoseconds(args.fwd.head_dim) * static_cast<double>(a.pairs * args.fwd.heads),
             [&](AttnTurn turn) {
               turn.room = room;
               turn.scratch = scratch((3 * room + 3 * kAttnBwdRows + kAttnBwdSlots) * padded);
               cpu_kernels().attn_bwd(args, turn);
             });
}

}  // namespace pare::cpu
