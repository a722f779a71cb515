#include "cases/layouts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/rng.h"
#include "ops/attention.h"
#include "ops/decode_work.h"

namespace pare::cases {

namespace {

template <class T>
std::vector<const char*> names_of(const std::vector<T>& list) {
  std::vector<const char*> names = {"regular"};
  for (const T& x : list) names.push_back(x.name);
  return names;
}
template <class T>
Dim layout_of(const std::vector<T>& list) {
  Dim d = edge("layout", "of the op test");
  d.words = names_of(list);
  return d;
}
template <class T, class F>
std::vector<std::string> sizes_of(const std::vector<T>& list, F wanted) {
  std::vector<std::string> sizes;
  for (const T& x : list)
    if (wanted(x)) sizes.push_back(cat("layout=", x.name, ",", x.sizes));
  return sizes;
}

// `count` of the numbers [first, last), ascending, each choice as likely.
void choose(std::vector<int32_t>& to, Rng& rng, int64_t first, int64_t last, int64_t count) {
  for (int64_t i = first; i < last; i++)
    if (static_cast<int64_t>(rng.below(static_cast<uint32_t>(last - i))) < count) {
      to.push_back(static_cast<int32_t>(i));
      count--;
    }
}
Rng choice_of(uint64_t number) { return Rng(rng_key(4, RngStream::test, 0), number); }

}  // namespace

// ---- packed sequences

namespace {

struct PackedLayout {
  const char *name, *sizes;
  int64_t rows;
  std::vector<SegmentRow> segments;
  int64_t parent_rows = 0;
  std::vector<int32_t> (*lists)(int32_t kv_heads) = nullptr;
  std::vector<int32_t> budget = {};  // of the rows of each segment, whose first third reads everything
};
// `n` entries a list: of rows [first, first + n + 3) of a head all but three, others for other heads; counted down from
// -1 if they lie in pk.
std::vector<int32_t> some_rows(int32_t first, int32_t n, int32_t kv_heads, bool other_batch = false) {
  std::vector<int32_t> lists;
  for (int32_t i = 0; i < n; i++)
    for (int32_t h = 0; h < kv_heads; h++) {
      const int32_t row = first + i + (i >= h) + (i >= 2) + (i >= n / 2 + h);
      lists.push_back(other_batch ? -1 - row : row);
    }
  return lists;
}
const std::vector<PackedLayout>& packed_layouts() {
  static const std::vector<PackedLayout> all = {
      {"one", "H=1,K=1,D=8", 1, {{0, 1, 0, 0}}},
      {"two", "H=2,K=1,D=32", 20, {{0, 3, 0, 0}, {3, 17, 0, 0}}},
      {"gqa3", "H=3,K=1,D=20,gap=7", 16, {{1, 15, 0, 0}}},
      {"gqa7", "H=14,K=2,D=8,gap=5", 17, {{0, 17, 0, 0}}},
      {"block", "H=2,K=2,D=64", 65, {{0, 65, 0, 0}}},
      {"blocks", "H=4,K=2,D=32,gap=16", 130, {{0, 63, 0, 0}, {63, 64, 0, 0}, {127, 3, 0, 0}}},
      {"group", "H=4,K=2,D=8", 60, {{17, 13, 0, 17}, {30, 1, 0, 17}, {31, 29, 0, 17}, {0, 17, 0, 0}}},
      {"group64", "H=2,K=1,D=20,gap=3", 90, {{64, 5, 0, 64}, {69, 21, 0, 64}, {0, 64, 0, 0}}},
      {"families",
       "H=4,K=2,D=32,gap=5",
       75,
       {{20, 9, 0, 20}, {29, 7, 0, 20}, {36, 8, 3, 17}, {44, 5, 3, 17}, {49, 26, 0, 20}}},
      {"other_batch", "H=6,K=2,D=8", 31, {{0, 11, 3, 37}, {11, 20, 0, 5}}, 41},
      {"far_parent", "H=3,K=3,D=64,gap=9", 7, {{0, 4, 0, 65}, {4, 3, 1, 127}}, 130},
      {"holes", "H=2,K=2,D=32", 23, {{2, 5, 0, 0}, {9, 13, 2, 5}}},
      // More rows of a segment than the CPU takes at once
      {"pieces", "H=3,K=1,D=8,gap=3", 267, {{0, 5, 0, 0}, {5, 262, 0, 5}}},
      // Epochs of a sequence, which lists rows of earlier ones; another list of the same rows; a parent elsewhere.
      {"lists",
       "H=4,K=2,D=20,gap=3",
       23,
       {{0, 9, 0, 0}, {9, 4, 0, 6}, {13, 10, 6, 10}},
       0,
       [](int32_t K) { return some_rows(0, 6, K) + some_rows(0, 10, K); }},
      {"lists64",
       "H=6,K=3,D=8",
       100,
       {{90, 10, 0, 80}, {0, 90, 0, 0}},
       0,
       [](int32_t K) { return some_rows(2, 80, K); }},
      {"lists_far",
       "H=2,K=2,D=32",
       16,
       {{0, 5, 0, 9}, {5, 11, 9, 13}},
       40,
       [](int32_t K) { return some_rows(20, 9, K, true) + some_rows(11, 11, K, true) + some_rows(0, 2, K); }},
      // Blocks of slots.
      {"few", "H=2,K=1,D=8,block=4", 30, {{0, 30, 0, 0}}, 0, nullptr, {3}},
      {"group_of_blocks",
       "H=4,K=2,D=20,gap=3,block=4,first_blocks=0,last_blocks=2",
       62,
       {{19, 13, 0, 19}, {32, 1, 0, 19}, {33, 29, 0, 19}, {0, 19, 0, 0}},
       0,
       nullptr,
       {4, 2, 5, 99}},
      {"pages", "H=6,K=2,D=32", 150, {{70, 80, 0, 69}, {0, 70, 0, 0}}, 0, nullptr, {3, 2}},
      {"far_blocks", "H=7,K=1,D=64,gap=5,first_blocks=0", 31, {{0, 11, 3, 137}, {12, 19, 0, 65}}, 141, nullptr, {4, 2}},
      {"far_blocks4", "H=3,K=3,D=64,gap=9,block=4", 41, {{0, 11, 3, 37}, {12, 29, 0, 5}}, 41, nullptr, {7, 5}},
      {"long", "H=2,K=1,D=20,gap=3,block=4", 33, {{0, 17, 2, 765}, {17, 15, 0, 1020}}, 1024, nullptr, {9, 12}}};
  return all;
}

}  // namespace

Packed::Packed(const Dims& d) {
  std::vector<int32_t> budgets;  // of segments
  const int64_t layout = d["layout"];
  if (layout) {
    const PackedLayout& x = packed_layouts()[static_cast<size_t>(layout - 1)];
    rows = x.rows;
    parent_rows = x.parent_rows;
    segments = x.segments;
    budgets = x.budget;
    if (x.lists) lists = x.lists(d.i32("K"));
  } else if (!d.own.segments.empty()) {
    rows = d.own.rows;
    parent_rows = d.own.parent_rows;
    segments = d.own.segments;
    lists = d.own.lists;
    budget = d.own.budget;
  } else {
    const auto segment = [&](int64_t len, int64_t parent, int64_t parent_len, int32_t reads) {
      segments.push_back({static_cast<int32_t>(rows), static_cast<int32_t>(len), static_cast<int32_t>(parent),
                          static_cast<int32_t>(parent_len)});
      if (d["budget"]) budgets.push_back(reads);
      rows += len;
    };
    if (d["budget"] == 1) fail("lists are of 2 blocks at least");
    for (int64_t g = 0; g < d["G"]; g++) {
      const int64_t parent = rows, prefix = d["P"];
      if (prefix) segment(prefix, 0, 0, INT32_MAX);
      for (int64_t s = 0; s < d["S"]; s++) segment(d["L"], prefix ? parent : 0, prefix, d.i32("budget"));
    }
  }
  seen.resize(static_cast<size_t>(rows));
  if (!budgets.empty()) budget.resize(static_cast<size_t>(rows));
  for (size_t i = 0; i < segments.size(); i++) {
    const SegmentRow& g = segments[i];
    most_slots = std::max<int64_t>(most_slots, g.parent_len + g.len);
    slots += g.parent_len + g.len;
    for (int32_t j = 0; j < g.len; j++) {
      const int64_t all = seen[g.row + j] = g.parent_len + j + 1;
      pairs += all;
      dense_pairs += all;
      if (budget.empty()) continue;
      int32_t& reads = budget[g.row + j];
      if (!budgets.empty()) reads = layout && j < g.len / 3 ? INT32_MAX : budgets[i];
      if (reads < INT32_MAX) room = std::max<int64_t>(room, reads);
      pairs += listed_slots(all, reads, d["block"]) - all;
      if (const int64_t blocks = blocks_of(all, d["block"]); blocks > reads) {
        chosen += blocks;
        choosers++;
      }
    }
  }
}

std::vector<Dim> packed_dims() {
  return {{"G", 1, "groups"},
          {"S", 1, "sequences of a group"},
          {"L", 4096, "rows of a sequence"},
          {"P", 0, "rows of the prefix that a group shares", 0},
          kHeads,
          kKvHeads,
          kDim,
          layout_of(packed_layouts()),
          kGap};
}
std::vector<std::string> packed_sizes(bool blocks) {
  return sizes_of(packed_layouts(), [&](const PackedLayout& x) { return x.budget.empty() != blocks; });
}

std::vector<int32_t> random_blocks(const std::vector<int64_t>& total, const std::vector<int32_t>& budget,
                                   int64_t kv_heads, int64_t room, int64_t block) {
  // Runs of rows choose the same, so that ten rows read together 1.5 times the blocks of one, as in training
  // (kv/blocks/union); the block of its own slot every row.
  constexpr size_t kRun = 20;
  const auto all_of = [&](size_t r) { return blocks_of(total[r], block); };
  const auto like = [&](size_t r) {
    const size_t first = r - r % kRun;
    const bool one = total[r] - total[first] == static_cast<int64_t>(r - first);  // of one segment
    return one && all_of(first) > budget[r] ? first : r;
  };
  std::vector<int32_t> lists;
  for (size_t r = 0; r < total.size(); r++)
    for (int64_t h = 0; h < kv_heads; h++) {
      const int64_t all = all_of(r), before = all_of(like(r));
      if (Rng rng = choice_of(like(r) * kv_heads + h); all > budget[r]) {
        choose(lists, rng, 0, before - 1, budget[r] - 1);
        lists.push_back(static_cast<int32_t>(all - 1));
      }
      lists.resize((r * kv_heads + h + 1) * room, -1);
    }
  return lists;
}

// ---- pages

Pages::Pages(std::vector<int32_t> slots_of_rows, bool apart) : slots(std::move(slots_of_rows)) {
  for (int32_t n : slots) {
    per_row = std::max(per_row, blocks_of(n, kPageSlots) + apart);
    count += blocks_of(n, kPageSlots);
  }
  const int64_t used = count;
  if (apart) count = 2 * used + 1;  // enough to make every page a fresh one
  const std::vector<int32_t> order = shuffled(count);
  auto next = order.begin();
  for (size_t r = 0; r < slots.size(); r++) {
    const int64_t n = blocks_of(slots[r], kPageSlots);
    table.insert(table.end(), next, next + n);
    next += n;
    table.resize((r + 1) * per_row, -1);
  }
  spare.assign(next, order.end());
}

Fill Pages::present(int64_t inner) const {
  std::vector<bool> used(static_cast<size_t>(count * kPageSlots));
  for (size_t r = 0; r < slots.size(); r++)
    for (int32_t s = 0; s < slots[r]; s++) used[page(r, s) * kPageSlots + s % kPageSlots] = true;
  return Fill([used = std::move(used), inner, pages = count](const std::string& name, int64_t n) {
    std::vector<double> v = normal(name, n);
    const int64_t each = n / pages;
    for (int64_t i = 0; i < n; i++)
      if (!used[i / each * kPageSlots + i / inner % kPageSlots]) v[i] = NAN;
    return v;
  });
}

std::vector<int32_t> Pages::positions(int64_t kv_heads) const {
  std::vector<int32_t> pos(static_cast<size_t>(count * kv_heads * kPageSlots), -1);
  for (size_t r = 0; r < slots.size(); r++)
    for (int32_t s = 0; s < slots[r]; s++)
      for (int64_t h = 0; h < kv_heads; h++)
        pos[(page(r, s) * kv_heads + h) * kPageSlots + s % kPageSlots] = static_cast<int32_t>(3 * s + h % 3);
  return pos;
}

std::vector<int32_t> Pages::destinations(const std::vector<KvCompression>& compressions, int64_t fresh) const {
  std::vector<int32_t> dst(table.size(), -1);
  auto next = spare.begin();
  for (size_t i = 0; i < compressions.size(); i++)
    for (int64_t p = 0; p * kPageSlots < compressions[i].first + compressions[i].keep; p++) {
      const bool change = p * kPageSlots >= compressions[i].first && (fresh == 1 || (fresh == 2 && p % 2));
      dst[i * per_row + p] = change ? *next++ : table[i * per_row + p];
    }
  return dst;
}

namespace {

struct PagedLayout {
  const char *name, *sizes;
  std::vector<std::pair<int32_t, int32_t>> sequences;  // (new rows, slots in use) of each
  std::vector<int32_t> first = {}, budget = {};
};
const std::vector<PagedLayout>& paged_layouts() {
  static const std::vector<PagedLayout> all = {
      {"first", "H=1,K=1,D=8", {{1, 1}}},
      {"decode", "H=4,K=2,D=32", {{1, 15}, {1, 16}, {1, 17}, {1, 64}, {1, 65}}},
      {"prefill", "H=2,K=2,D=64,gap=5", {{17, 17}, {16, 16}}},
      {"chunk", "H=6,K=2,D=20,gap=7", {{5, 20}, {3, 67}, {33, 130}}},
      {"gqa7", "H=14,K=2,D=8", {{1, 63}, {2, 33}, {15, 31}}},
      // More rows, and wider ones, than are computed tile by tile.
      {"long", "H=2,K=1,D=100,gap=3", {{61, 130}}},
      {"protected", "H=1,K=1,D=8,gap=7", {{1, 1}}, {0}},
      {"protected_decode", "H=4,K=2,D=32,gap=7", {{1, 15}, {1, 17}, {1, 64}, {1, 65}}, {0, 5, 20, 64}},
      {"protected_prefill", "H=2,K=2,D=64,gap=7", {{33, 33}, {17, 17}}, {0, 16}},
      {"protected_chunk", "H=14,K=2,D=20,gap=7", {{5, 20}, {0, 8}, {33, 70}}, {3, 0, 40}},
      {"protected_long", "H=2,K=1,D=64,gap=7", {{19, 103}}, {40}},
      {"quest", "H=2,K=1,D=8,block=4,first_blocks=0", {{1, 5}, {1, 77}, {1, 64}}, {}, {2, 7, 3}},
      {"blocks",
       "H=6,K=2,D=20,gap=7,last_blocks=2",
       {{1, 130}, {1, 17}, {1, 33}, {1, 256}, {3, 90}},
       {},
       {4, 4, 3, 9, 3}},
      {"small_blocks", "H=4,K=4,D=32,gap=5,block=4", {{1, 66}, {1, 15}, {16, 16}, {1, 67}}, {}, {16, 2, 2, 9}},
      {"one_block", "H=14,K=2,D=64,first_blocks=0", {{1, 1}, {1, 161}}, {}, {1, 1}},
      {"many_blocks", "H=4,K=2,D=32,block=4,first_blocks=0", {{1, 1044}, {270, 1030}, {1, 513}}, {}, {20, 20, 7}}};
  return all;
}

}  // namespace

Sequences::Sequences(const Dims& d, int64_t new_rows) {
  std::vector<std::pair<int32_t, int32_t>> sequences = d.own.sequences;
  const bool apart = d["layout"] != 0 || !sequences.empty();
  if (!sequences.empty()) {
    first = d.own.first;
    budget.assign(d.own.budget.rbegin(), d.own.budget.rend());
  } else if (const int64_t layout = d["layout"]) {
    const PagedLayout& x = paged_layouts()[static_cast<size_t>(layout - 1)];
    sequences = x.sequences;
    first = x.first;
    budget.assign(x.budget.rbegin(), x.budget.rend());
  } else {
    if (new_rows > d["L"]) fail("T=", new_rows, " is more than the L=", d["L"], " slots of a sequence");
    sequences.assign(static_cast<size_t>(d["B"]), {static_cast<int32_t>(new_rows), d.i32("L")});
    first.assign(sequences.size(), 0);
  }
  std::vector<int32_t> by_row;
  const int32_t n = static_cast<int32_t>(sequences.size());
  for (const auto& [count, all] : sequences) {
    const int64_t r = count;
    list.push_back({static_cast<int32_t>(rows), count, all, n - 1 - static_cast<int32_t>(list.size())});
    by_row.insert(by_row.begin(), all);
    rows += r;
    slots += all;
    pairs += r * (all - r) + r * (r + 1) / 2;
  }
  pages = Pages(by_row, apart);
}

int64_t Sequences::room(const std::vector<int32_t>& budgets, int64_t block) const {
  int64_t most = 1;
  for (const PagedRow& e : list)
    most = std::max(most, std::min<int64_t>(budgets[e.table_row], blocks_of(e.slots, block)));
  return most;
}

Tensor put_work(Operands& o, const std::string& name, const std::vector<PagedRow>& entries,
                const std::vector<int64_t>& reads) {
  const std::vector<PagedPiece> work = paged_work(entries, reads);
  return work.empty() ? Tensor{} : o.index(name, {std::ssize(work), 2}, flat(work));
}
std::vector<Dim> paged_dims() {
  return {{"B", 64, "sequences"},
          {"L", 4096, "slots of a sequence, the new ones included"},
          {"T", 1, "new rows of a sequence, at most L"},
          kHeads,
          kKvHeads,
          kDim,
          layout_of(paged_layouts()),
          kGap};
}
std::vector<std::string> paged_sizes() {
  return sizes_of(paged_layouts(), [](const PagedLayout& x) { return x.budget.empty() && x.first.empty(); });
}
std::vector<std::string> listed_sizes() {
  return sizes_of(paged_layouts(), [](const PagedLayout& x) { return !x.budget.empty(); });
}
std::vector<std::string> protected_sizes() {
  return sizes_of(paged_layouts(), [](const PagedLayout& x) { return !x.first.empty(); });
}

// ---- compressions

namespace {

struct CompressionLayout {
  const char *name, *sizes;
  std::vector<KvCompression> compressions;  // window_row: set below
};
// Protected slots, candidates and recent ones end inside, at and beyond page borders; one page, many, all kept.
const std::vector<CompressionLayout>& compression_layouts() {
  static const std::vector<CompressionLayout> all = {
      {"one", "K=1,D=8", {{5, 0, 1, 3, 0}}},
      {"pages", "K=2,D=32", {{40, 0, 3, 17, 0}, {16, 0, 4, 15, 0}, {65, 17, 4, 30, 0}}},
      {"all_stay", "K=1,D=20", {{33, 3, 5, 30, 0}, {21, 16, 5, 5, 0}}},
      {"long", "K=2,D=20", {{163, 5, 8, 96, 0}, {17, 1, 4, 9, 0}}},
      {"wide", "K=2,D=64", {{80, 32, 8, 24, 0}, {47, 0, 16, 31, 0}}}};
  return all;
}

}  // namespace

Compressions::Compressions(const Dims& d)
    : list(d.own.compressions), regular(d["layout"] == 0 && list.empty()), window(d.i32("window")) {
  if (regular) {
    if (d["window"] > d["keep"] || d["keep"] > d["L"])
      fail("window=", d["window"], ",keep=", d["keep"], ",L=", d["L"], " must not fall");
    for (int64_t e = 0; e < d["E"]; e++) list.push_back({d.i32("L"), 0, window, d.i32("keep"), 0});
  } else if (list.empty()) {
    list = compression_layouts()[static_cast<size_t>(d["layout"] - 1)].compressions;
  }
  for (const KvCompression& e : list) window = std::min(window, e.recent);
  // Apart: rows of nobody before and behind windows, room behind slots and choices.
  std::vector<int32_t> slots;
  window_rows = regular ? 0 : 2;
  for (KvCompression& e : list) {
    e.window_row = static_cast<int32_t>(window_rows);
    window_rows += window + !regular;
    slots.push_back(e.slots);
    most_slots = std::max<int64_t>(most_slots, e.slots + (regular ? 0 : 3));
    most_kept = std::max<int64_t>(most_kept, e.keep + !regular);
  }
  pages = Pages(slots, !regular);
  work = kv_work(list.data(), count());
}

Tensor Compressions::put_keep(Operands& o, const Dims& d) const {
  const int64_t K = d["K"];
  std::vector<int32_t> all(static_cast<size_t>(count() * K * most_kept), -1);
  for (int64_t i = 0; i < count() * K; i++) {
    const KvCompression& e = list[static_cast<size_t>(i / K)];
    Rng rng = choice_of(i);
    std::vector<int32_t> kept;
    choose(kept, rng, e.first, e.slots - e.recent, e.keep - e.recent);
    for (int32_t s = e.slots - e.recent; s < e.slots; s++) kept.push_back(s);
    std::copy(kept.begin(), kept.end(), all.begin() + i * most_kept);
  }
  return o.index("keep", {count(), K, most_kept}, all);
}

std::vector<Dim> compression_dims() {
  return {{"E", 64, "compressions: sequences times layers"},
          {"L", 640, "slots before a compression"},
          {"keep", 512, "slots that stay, the recent ones included"},
          {"window", 8, "recent slots, and queries of the window"},
          kKvHeads,
          kDim,
          layout_of(compression_layouts())};
}
std::vector<std::string> compression_sizes() {
  return sizes_of(compression_layouts(), [](const CompressionLayout&) { return true; });
}

}  // namespace pare::cases
