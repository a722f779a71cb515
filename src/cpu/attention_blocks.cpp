// Block-sparse attention of packed sequences.
#include <cstring>

#include "cpu/paged.h"
#include "cpu/segments.h"

namespace pare::cpu {

namespace {

constexpr int64_t kRowsAtOnce = 256;  // own rows of a piece of work

struct Piece {
  int64_t segment, kv_head;
  Interval rows;
};

std::vector<Piece> pieces_of(const SegmentRow* s, int64_t count, int64_t kv_heads) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count; i++)
    for (int64_t h = 0; h < kv_heads; h++)
      for (int64_t r = 0; r < s[i].len; r += kRowsAtOnce)
        pieces.push_back({i, h, {r, std::min<int64_t>(r + kRowsAtOnce, s[i].len)}});
  return pieces;
}

// The keys of slots [0, n) of a segment as pages without gaps, and the values.  Scratch: pages (2 n rows).
struct SegmentPages {
  float *keys, *values;
};
SegmentPages lay_out(const AttnArgs& a, const SegmentRow& s, int64_t kv_head, int64_t n, float* memory) {
  const int64_t width = a.width, column = kv_head * width;
  float *const keys = memory, *const values = keys + round16(n) * width;
  const size_t bytes = static_cast<size_t>(width) * sizeof(float);
  const auto copy = [&](const float* parent, int64_t parent_stride, const float* own, int64_t own_stride) {
    for (int64_t slot = 0; slot < n; slot++)
      std::memcpy(values + slot * width,
                  slot < s.parent_len ? parent + (s.parent_row + slot) * parent_stride + column
                                      : own + (s.row + slot - s.parent_len) * own_stride + column,
                  bytes);
  };
  copy(a.pk, a.pk_stride, a.k, a.k_stride);
  cpu_kernels().pack(keys, values, n, width, {0, n});
  copy(a.pv, a.pv_stride, a.v, a.v_stride);
  return {keys, values};
}

}  // namespace

void attn_block_select(const AttnBlockSelect& a, Stream) {
  constexpr const char* op = "attn_block_select";
  expect_block(op, a.block);
  const int64_t rows = a.q.shape[0], heads = a.q.shape[1], width = a.q.shape[2], kv_heads = a.k.shape[1];
  const int64_t count = a.segments.shape[0], room = a.blocks.shape[2], summary_room = a.summary.shape[2];
  const Tensor& pk = a.pk ? a.pk : a.k;
  if (kv_heads <= 0 || heads % kv_heads)
    throw std::logic_error(cat("cpu: ", op, ": ", heads, " query heads over ", kv_heads, " key heads"));
  AttnArgs keys{};
  keys.q = strided(op, "q", a.q, {rows, heads, width}), keys.q_stride = a.q.stride[0];
  keys.k = strided(op, "k", a.k, {rows, kv_heads, width}), keys.k_stride = a.k.stride[0];
  keys.pk = strided(op, "pk", pk, {pk.shape[0], kv_heads, width}), keys.pk_stride = pk.stride[0];
  const int64_t group = heads / kv_heads;
  keys.heads = heads, keys.group = group, keys.width = width;
  float* const summary = dense(op, "summary", a.summary, {count, kv_heads, summary_room, width});
  int32_t* const blocks = index(op, "blocks", a.blocks, {rows, kv_heads, room});
  const int32_t* const budget = index(op, "budget", a.budget, {rows});
  const SegmentRow* const s = segment_rows(op, a.segments, rows, pk.shape[0]);
  // Of own row r of segment i.
  const auto choice = [&](int64_t i, int64_t r, int64_t h) {
    const int64_t row = s[i].row + r, at = i * kv_heads + h;
    return BlockChoice{.blocks = {.q = keys.q + row * keys.q_stride + h * group * width,
                                  .summary = summary + at * summary_room * width,
                                  .pages = nullptr,
                                  .page_step = 0,
                                  .group = group,
                                  .width = width,
                                  .block = a.block,
                                  .kind = a.kind},
                       .all = blocks_of(s[i].parent_len + r + 1, a.block),
                       .budget = budget[row],
                       .first = a.first_blocks,
                       .last = a.last_blocks};
  };
  int64_t longest = 0, scores = 0;
  for (int64_t i = 0; i < count; i++) {
    longest = std::max<int64_t>(longest, s[i].parent_len + s[i].len);
    for (int64_t r = 0; r < s[i].len; r++) {
      const BlockChoice c = choice(i, r, 0);
      if (c.all <= c.budget) continue;
      c.expect_possible(op, s[i].row + r, room, INT64_MAX);
      scores = std::max(scores, c.scored());
    }
  }
  if (longest / a.block * summary_rows(a.kind) > summary_room)
    throw std::logic_error(cat("cpu: ", op, ": a segment of ", longest, " slots; summary is ", a.summary.str()));
  const Kernels& k = cpu_kernels();
  parallel(count * kv_heads, 0.3 * static_cast<double>(a.slots * width) / static_cast<double>(count + 1) + 50,
           [&](Interval range) {
             for (int64_t i = range.begin; i < range.end; i++) {
               const SegmentRow& segment = s[i / kv_heads];
               const int64_t slots = segment.parent_len + segment.len;
               k.segment_summary(summary + i * summary_room * width, keys, segment, i % kv_heads, {0, slots / a.block},
                                 a.block, a.kind);
             }
           });
  const std::vector<Piece> pieces = pieces_of(s, count, kv_heads);
  const int64_t n = static_cast<int64_t>(pieces.size());
  if (n == 0) return;
  const double time = 0.2 * static_cast<double>(a.scored * heads * width) / static_cast<double>(n);
  parallel(n, time + 50, [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const Piece& p = pieces[static_cast<size_t>(i)];
      float* const memory = scratch(width + 16 + scores + 16);
      for (int64_t r = p.rows.begin; r < p.rows.end; r++) {
        const BlockChoice c = choice(p.segment, r, p.kv_head);
        if (c.all <= c.budget) continue;
        choose_blocks(blocks + ((s[p.segment].row + r) * kv_heads + p.kv_head) * room, memory + width + 16, c, memory);
      }
    }
  });
}

static void expect_one_kind_of_lists(const char* op, const Tensor& lists) {
  if (lists) throw std::logic_error(cat("cpu: ", op, ": a parent is listed by slots or by blocks, not both"));
}

void attn_fwd_listed(const AttnFwd& a) {
  constexpr const char* op = "attn_fwd";
  expect_one_kind_of_lists(op, a.lists);
  AttnArgs args = attn_args(op, a);
  const int64_t rows = a.q.shape[0], width = args.width, kv_heads = a.k.shape[1];
  args.o = dense(op, "o", a.o, {rows, args.heads, width});
  const BlockLists lists(op, a.blocks, a.budget, a.block, rows, kv_heads);
  const SegmentRow* const s = segment_rows(op, a.segments, rows, a.pk ? a.pk.shape[0] : a.k.shape[0]);
  const std::vector<Piece> pieces = pieces_of(s, a.segments.shape[0], kv_heads);
  const int64_t n = static_cast<int64_t>(pieces.size());
  if (n == 0) return;
  const double time = pair_nanoseconds(width) * static_cast<double>(a.pairs * args.heads);
  parallel(n, time / static_cast<double>(n), [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const Piece& p = pieces[static_cast<size_t>(i)];
      const SegmentRow& segment = s[p.segment];
      const int64_t slots = segment.parent_len + p.rows.end, pages = 2 * round16(slots) * width;
      float* const memory = scratch(pages + listed_scratch(slots, width));
      const SegmentPages laid = lay_out(args, segment, p.kv_head, slots, memory);
      const PagedArgs paged{.o = args.o,
                            .lse = args.lse,
                            .q = args.q,
                            .k_pages = laid.keys,
                            .v_pages = laid.values,
                            .page_table = nullptr,
                            .head_step = 0,
                            .page_step = width * kPageSlots,
                            .q_stride = args.q_stride,
                            .table_stride = 0,
                            .heads = args.heads,
                            .group = args.group,
                            .width = width,
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

void attn_bwd_listed(const AttnBwd& a, const AttnBwdArgs& args, const SegmentChains& c) {
  constexpr const char* op = "attn_bwd";
  expect_one_kind_of_lists(op, a.lists);
  const int64_t width = args.fwd.width, kv_heads = a.k.shape[1];
  const BlockLists lists(op, a.blocks, a.budget, a.block, a.q.shape[0], kv_heads);
  for (const int64_t i : c.order)
    for (int64_t r = 0; r < c.segments[i].len; r++) {
      const int64_t row = c.segments[i].row + r, total = c.segments[i].parent_len + r + 1;
      for (int64_t h = 0; lists.listed(row, total) && h < kv_heads; h++) lists.list(row, h, total);
    }
  const Kernels& k = cpu_kernels();
  for_chains(c, kv_heads, 4 * pair_nanoseconds(width) * static_cast<double>(a.pairs * args.fwd.heads),
             [&](const AttnTurn& turn) {
               const SegmentRow& s = *turn.piece.segment;
               const int64_t padded = round16(width), slots = round16(s.parent_len + s.len);
               k.attn_blocks_bwd(args, lists.args(), s, turn.piece.kv_head,
                                 scratch(slots * (5 * padded + 4) + 3 * padded));
             });
}

}  // namespace pare::cpu
