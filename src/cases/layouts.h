// Where rows and slots lie: packed segments, pages of sequences, compressions.  Each is either regular, of the
// sizes that a benchmark names, or one of the list that the op test runs, laid out as badly as the contract allows.
#pragma once
#include <algorithm>
#include <cmath>

#include "cases/cases.h"
#include "ops/rows.h"

namespace pare::cases {

// Rows of numbers, SegmentRow, PagedRow or KvCompression, as an index tensor holds them.
template <class Row>
std::vector<int32_t> flat(const std::vector<Row>& rows) {
  const auto* numbers = reinterpret_cast<const int32_t*>(rows.data());
  return {numbers, numbers + rows.size() * sizeof(Row) / sizeof(int32_t)};
}

// ---- packed sequences: groups of sequences that share a prefix, or segments

inline const Dim kHeads{"H", 12, "query heads"}, kKvHeads{"K", 2, "key/value heads"}, kDim{"D", 128, "head dim"};
inline float scale(const Dims& d) { return static_cast<float>(1 / std::sqrt(static_cast<double>(d["D"]))); }

struct Packed {
  explicit Packed(const Dims& d);
  int64_t rows = 0, parent_rows = 0;  // parent_rows 0: parents lie among the rows themselves
  std::vector<SegmentRow> segments;
  std::vector<int32_t> lists;                          // AttnFwd::lists, or none
  std::vector<int64_t> seen;                           // slots that each row sees; 0 for rows of no segment
  std::vector<int32_t> budget;                         // of each row, or none: INT32_MAX for those that read everything
  int64_t pairs = 0, slots = 0, room = 0, chosen = 0;  // chosen: blocks of the rows that choose
  int64_t choosers = 0, most_slots = 0, dense_pairs = 0;  // dense_pairs: without budgets

  Tensor put_segments(Operands& o) const { return o.index("segments", {std::ssize(segments), 4}, flat(segments)); }
  Tensor put_budget(Operands& o) const { return o.index("budget", {rows}, budget); }
};
std::vector<Dim> packed_dims();
std::vector<std::string> packed_sizes(bool blocks);  // of the segments with budgets, or of the others

// Blocks that rows read, [rows][kv_heads][room]: of more than budget[r] blocks of total[r] slots a random choice of as
// many, ascending, the last one among them; -1 for rows that read everything.
std::vector<int32_t> random_blocks(const std::vector<int64_t>& total, const std::vector<int32_t>& budget,
                                   int64_t kv_heads, int64_t room, int64_t block);

// ---- pages

// Pages of 16 slots, in random order: of each row of a table, with slots[row] of them in use.
struct Pages {
  Pages() = default;
  // apart: with as many pages of nobody and one more, and room in the rows of the table.
  Pages(std::vector<int32_t> slots, bool apart);
  std::vector<int32_t> slots, table, spare;  // table: -1 where there is no page
  int64_t per_row = 0, count = 0;

  int64_t page(size_t row, int32_t slot) const { return table[row * per_row + slot / kPageSlots]; }
  // Values of slots that nobody uses are NaN.  `inner`: elements between those of a slot and of the next.
  Fill present(int64_t inner = 1) const;
  // [pages][kv_heads][16]: slot s of head h holds token 3 s + h % 3.
  std::vector<int32_t> positions(int64_t kv_heads) const;
  // The pages after compressions: fresh 0: all in place; 1: new ones wherever allowed; 2: every other one new.
  std::vector<int32_t> destinations(const std::vector<KvCompression>& compressions, int64_t fresh) const;
  // All heads of one layer.
  Shape k(const Dims& d) const { return {count, d["K"], d["D"], kPageSlots}; }
  Shape v(const Dims& d) const { return {count, d["K"], kPageSlots, d["D"]}; }
  Shape beside(const Dims& d) const { return {count, d["K"], kPageSlots}; }
};

// Sequences of which some rows are new, each a row of a table, in the opposite order.
struct Sequences {
  Sequences(const Dims& d, int64_t new_rows);  // of each of the regular ones
  std::vector<PagedRow> list;
  std::vector<int32_t> first;   // protected slots
  std::vector<int32_t> budget;  // blocks that each reads; by row of the table
  Pages pages;
  int64_t rows = 0, pairs = 0, slots = 0;

  int64_t count() const { return std::ssize(list); }
  int64_t room(const std::vector<int32_t>& budgets, int64_t block) const;  // the most blocks that one reads
  Tensor put_queries(Operands& o) const { return o.index("queries", {count(), 4}, flat(list)); }
  Tensor put_table(Operands& o, const Dims& d) const {
    return o.index("page_table", {count(), pages.per_row}, pages.table, d["gap"]);
  }
};
// AttnPaged::work of entries that read so many slots each.
Tensor put_work(Operands& o, const std::string& name, const std::vector<PagedRow>& entries,
                const std::vector<int64_t>& reads);
std::vector<Dim> paged_dims();
std::vector<std::string> paged_sizes();
std::vector<std::string> listed_sizes();     // with budgets
std::vector<std::string> protected_sizes();  // with protected slots

// ---- compressions

struct Compressions {
  explicit Compressions(const Dims& d);
  std::vector<KvCompression> list;
  Pages pages;
  KvWork work;
  bool regular;
  int64_t most_slots = 0, most_kept = 0, window_rows = 0;  // sizes of what holds scores, choices, windows
  int32_t window = 0;                                      // not more than the recent slots of any compression

  int64_t count() const { return std::ssize(list); }
  Shape score(const Dims& d) const { return {count(), d["K"], most_slots}; }
  Tensor put_compressions(Operands& o) const { return o.index("compressions", {count(), 5}, flat(list)); }
  Tensor put_pages(Operands& o) const {
    return o.index("src_pages", {count(), pages.per_row}, pages.table, regular ? 0 : 3);
  }
  // Ascending slots of each compression, the recent ones among them: another random choice for each head.
  Tensor put_keep(Operands& o, const Dims& d) const;
};
std::vector<Dim> compression_dims();
std::vector<std::string> compression_sizes();

}  // namespace pare::cases
