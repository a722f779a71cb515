// Rows of the op test: attention over packed segments and over pages.
#include "op_cases.h"
#include "paged_layout.h"

namespace pare::test {

namespace {

struct Packed {
  std::string name;
  int64_t rows, heads, kv_heads, dim;
  std::vector<SegmentRow> segments;
  int64_t parent_rows;              // 0: parents lie among the rows themselves
  int64_t gap;                      // elements between the rows of q, k, v and their gradients
  std::vector<int32_t> lists = {};  // [G, kv_heads]
  int64_t parent_gap() const { return gap ? gap + 2 : 0; }
};
// `n` entries a list: of rows [first, first + n + 3) of a head all but three, others for other heads; counted down from
// -1 if they lie in pk.
std::vector<int32_t> some_rows(int32_t first, int32_t n, int64_t kv_heads, bool other_batch = false) {
  std::vector<int32_t> lists;
  for (int32_t i = 0; i < n; i++)
    for (int32_t h = 0; h < kv_heads; h++) {
      const int32_t row = first + i + (i >= h) + (i >= 2) + (i >= n / 2 + h);
      lists.push_back(other_batch ? -1 - row : row);
    }
  return lists;
}
std::vector<int32_t> operator+(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
const std::vector<Packed> kPacked = {
    {"one", 1, 1, 1, 8, {{0, 1, 0, 0}}, 0, 0},
    {"two", 20, 2, 1, 32, {{0, 3, 0, 0}, {3, 17, 0, 0}}, 0, 0},
    {"gqa3", 16, 3, 1, 20, {{1, 15, 0, 0}}, 0, 7},
    {"gqa7", 17, 14, 2, 8, {{0, 17, 0, 0}}, 0, 5},
    {"block", 65, 2, 2, 64, {{0, 65, 0, 0}}, 0, 0},
    {"blocks", 130, 4, 2, 32, {{0, 63, 0, 0}, {63, 64, 0, 0}, {127, 3, 0, 0}}, 0, 16},
    {"group", 60, 4, 2, 8, {{17, 13, 0, 17}, {30, 1, 0, 17}, {31, 29, 0, 17}, {0, 17, 0, 0}}, 0, 0},
    {"group64", 90, 2, 1, 20, {{64, 5, 0, 64}, {69, 21, 0, 64}, {0, 64, 0, 0}}, 0, 3},
    {"families", 75, 4, 2, 32, {{20, 9, 0, 20}, {29, 7, 0, 20}, {36, 8, 3, 17}, {44, 5, 3, 17}, {49, 26, 0, 20}}, 0, 5},
    {"other_batch", 31, 6, 2, 8, {{0, 11, 3, 37}, {11, 20, 0, 5}}, 41, 0},
    {"far_parent", 7, 3, 3, 64, {{0, 4, 0, 65}, {4, 3, 1, 127}}, 130, 9},
    {"holes", 23, 2, 2, 32, {{2, 5, 0, 0}, {9, 13, 2, 5}}, 0, 0},
    // More rows of a segment than the CPU takes at once
    {"pieces", 267, 3, 1, 8, {{0, 5, 0, 0}, {5, 262, 0, 5}}, 0, 3},
    // Epochs of a sequence, which lists rows of earlier ones; another list of the same rows; a parent elsewhere.
    {"lists",
     23,
     4,
     2,
     20,
     {{0, 9, 0, 0}, {9, 4, 0, 6}, {13, 10, 6, 10}},
     0,
     3,
     some_rows(0, 6, 2) + some_rows(0, 10, 2)},
    {"lists64", 100, 6, 3, 8, {{90, 10, 0, 80}, {0, 90, 0, 0}}, 0, 0, some_rows(2, 80, 3)},
    {"lists_far",
     16,
     2,
     2,
     32,
     {{0, 5, 0, 9}, {5, 11, 9, 13}},
     40,
     0,
     some_rows(20, 9, 2, true) + some_rows(11, 11, 2, true) + some_rows(0, 2, 2)},
};

int64_t pairs_of(const Packed& s) {
  int64_t n = 0;
  for (const SegmentRow& g : s.segments) n += int64_t(g.len) * g.parent_len + int64_t(g.len) * (g.len + 1) / 2;
  return n;
}
std::vector<int32_t> flat(const std::vector<SegmentRow>& segments) {
  std::vector<int32_t> v;
  for (const SegmentRow& g : segments) v.insert(v.end(), {g.row, g.len, g.parent_row, g.parent_len});
  return v;
}
std::string name(const Packed& s) { return cat(s.name, "_N", s.rows, "_H", s.heads, "_K", s.kv_heads, "_D", s.dim); }

// The inputs that forward and backward share.
template <class Args>
void set_inputs(OpRun& r, const Packed& s, Args& a) {
  a.q = r.in("q", {s.rows, s.heads, s.dim}, s.gap);
  a.k = r.in("k", {s.rows, s.kv_heads, s.dim}, s.gap), a.v = r.in("v", {s.rows, s.kv_heads, s.dim}, s.gap);
  a.pk = s.parent_rows ? r.in("pk", {s.parent_rows, s.kv_heads, s.dim}, s.parent_gap()) : a.k;
  a.pv = s.parent_rows ? r.in("pv", {s.parent_rows, s.kv_heads, s.dim}, s.parent_gap()) : a.v;
  a.segments = r.index("segments", {int64_t(s.segments.size()), 4}, flat(s.segments));
  a.pairs = pairs_of(s), a.scale = static_cast<float>(1 / std::sqrt(double(s.dim)));
  if (!s.lists.empty()) a.lists = r.index("lists", {int64_t(s.lists.size()) / s.kv_heads, s.kv_heads}, s.lists);
}

void attn_fwd(OpRun& r, const Packed& s) {
  AttnFwd a{};
  set_inputs(r, s, a);
  a.o = r.out("o", {s.rows, s.heads, s.dim}), a.lse = r.out("lse", {s.rows, s.heads});
  r.call(&Table::attn_fwd, a);
  // o is a mean of v; lse is a score plus a logarithm.
  r.bound("o", softmax_error(s.dim, s.rows + s.parent_rows) * r.max_abs("v"));
  r.bound("lse", softmax_error(s.dim, s.rows + s.parent_rows) + 4 * kRound * 16);
}

void attn_bwd(OpRun& r, const Packed& s) {
  OpRun forward(table_ref, DType::f64);
  attn_fwd(forward, s);
  // Rows of no segment have no o and lse: they stay NaN, so reading them shows.
  AttnBwd a{};
  set_inputs(r, s, a);
  a.o = r.in("o", {s.rows, s.heads, s.dim}, rounded_to_f32(forward.values("o")));
  a.lse = r.in("lse", {s.rows, s.heads}, rounded_to_f32(forward.values("lse")));
  a.d_o = r.in("d_o", {s.rows, s.heads, s.dim}, s.gap);
  a.dq = r.out("dq", {s.rows, s.heads, s.dim}, s.gap);
  a.dk = r.inout("dk", {s.rows, s.kv_heads, s.dim}, s.gap), a.dv = r.inout("dv", {s.rows, s.kv_heads, s.dim}, s.gap);
  a.dpk = s.parent_rows ? r.inout("dpk", {s.parent_rows, s.kv_heads, s.dim}, s.parent_gap()) : a.dk;
  a.dpv = s.parent_rows ? r.inout("dpv", {s.parent_rows, s.kv_heads, s.dim}, s.parent_gap()) : a.dv;
  r.call(&Table::attn_bwd, a);
  // p has the softmax's relative error (lse given: one rounding more).  do.v - do.o may cancel: its terms, times scale,
  // k or q, are of size 1.
  for (const char* out : {"dq", "dk", "dv", "dpk", "dpv"})
    if (s.parent_rows || out[1] != 'p')
      r.bound(out, 4 * softmax_error(s.dim, s.rows + s.parent_rows) * (1 + r.max_abs(out)));
}

// ---- paged

const std::vector<Paged> kPaged = {
    {"first", 1, 1, 8, {{1, 1}}, 0},
    {"decode", 4, 2, 32, {{1, 15}, {1, 16}, {1, 17}, {1, 64}, {1, 65}}, 0},
    {"prefill", 2, 2, 64, {{17, 17}, {16, 16}}, 5},
    {"chunk", 6, 2, 20, {{5, 20}, {3, 67}, {33, 130}}, 7},
    {"gqa7", 14, 2, 8, {{1, 63}, {2, 33}, {15, 31}}, 0},
    {"long", 2, 1, 100, {{61, 130}}, 3},  // more rows, and wider ones, than are computed tile by tile
};

void add_paged(std::vector<OpCase>& cases, const Paged& s) {
  const Pages p = lay_out(s);
  const int64_t n = static_cast<int64_t>(s.sequences.size());
  const Shape k_shape{p.count, s.kv_heads, s.dim, kPageSlots}, v_shape{p.count, s.kv_heads, kPageSlots, s.dim};
  const std::string shape = cat(s.name, "_H", s.heads, "_K", s.kv_heads, "_D", s.dim);
  cases.push_back({"kv_write", shape, [=](OpRun& r) {
                     KvWrite a{};
                     a.k_pages = r.inout("k_pages", k_shape), a.v_pages = r.inout("v_pages", v_shape);
                     a.k = r.in("k", {p.rows, s.kv_heads, s.dim}, s.gap);
                     a.v = r.in("v", {p.rows, s.kv_heads, s.dim}, s.gap);
                     a.page_table = r.index("page_table", {n, p.per_sequence}, p.table, s.gap);
                     a.queries = r.index("queries", {n, 4}, p.queries);
                     if (s.gap) {  // with what lies beside K and V
                       std::vector<int32_t> pos = below("pos", p.rows, 1000), before(p.count * s.kv_heads * 16, -7);
                       a.pos_pages = r.index_inout("pos_pages", {p.count, s.kv_heads, 16}, before);
                       a.pos = r.index("pos", {p.rows}, pos);
                     }
                     r.call(&Table::kv_write, a);
                   }});
  cases.push_back({"attn_paged", shape, [=](OpRun& r) {
                     const auto [k, v] = fill_pages(s, p);
                     AttnPaged a{};
                     a.o = r.out("o", {p.rows, s.heads, s.dim}), a.q = r.in("q", {p.rows, s.heads, s.dim}, s.gap);
                     a.k_pages = r.in("k_pages", k_shape, k), a.v_pages = r.in("v_pages", v_shape, v);
                     a.page_table = r.index("page_table", {n, p.per_sequence}, p.table, s.gap);
                     a.queries = r.index("queries", {n, 4}, p.queries);
                     a.pairs = p.pairs, a.slots = p.slots;
                     a.scale = static_cast<float>(1 / std::sqrt(double(s.dim)));
                     r.call(&Table::attn_paged, a);
                     r.bound("o", softmax_error(s.dim, p.slots) * 5);  // |v| < 5
                   }});
}

void add_copy(std::vector<OpCase>& cases) {
  const std::vector<std::vector<int32_t>> lists = {{0, 1}, {4, 0, 2, 1, 4, 3}};
  for (const auto& pairs : lists) {
    const int64_t n = static_cast<int64_t>(pairs.size()) / 2;
    cases.push_back({"kv_copy_pages", cat("n", n), [=](OpRun& r) {
                       KvCopyPages a{};
                       a.k_pages = r.inout("k_pages", {5, 3, 20, 16}), a.v_pages = r.inout("v_pages", {5, 3, 16, 20});
                       a.pairs = r.index("pairs", {n, 2}, pairs);
                       if (n > 1) {
                         a.pos_pages = r.index_inout("pos_pages", {5, 3, 16}, below("pos", 5 * 3 * 16, 99));
                         a.mass_pages = r.inout("mass_pages", {5, 3, 16});
                       }
                       r.call(&Table::kv_copy_pages, a);
                     }});
  }
}

}  // namespace

void add_attention_cases(std::vector<OpCase>& cases) {
  for (const Packed& s : kPacked) {
    cases.push_back({"attn_fwd", name(s), [s](OpRun& r) { attn_fwd(r, s); }});
    cases.push_back({"attn_bwd", name(s), [s](OpRun& r) { attn_bwd(r, s); }});
  }
  for (const Paged& s : kPaged) add_paged(cases, s);
  add_copy(cases);
}

}  // namespace pare::test
