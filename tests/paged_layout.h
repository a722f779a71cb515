// Pages of keys and values of several sequences, for tests of the ops that read them.
#pragma once
#include <numeric>

#include "op_harness.h"

namespace pare::test {

struct Paged {
  std::string name;
  int64_t heads, kv_heads, dim;
  std::vector<std::pair<int32_t, int32_t>> sequences;  // (new rows, slots in use) of each
  int64_t gap;
};

// Shuffled, non-consecutive pages; unused entries of the table are -1.
struct Pages {
  int64_t count, per_sequence;
  std::vector<int32_t> table, queries;
  int64_t rows = 0, pairs = 0, slots = 0;
};
inline Pages lay_out(const Paged& s) {
  Pages p{3, 2, {}, {}};  // three spare pages that nobody owns
  for (auto [rows, slots] : s.sequences) {
    p.per_sequence = std::max<int64_t>(p.per_sequence, (slots + 15) / 16 + 1);
    p.count += (slots + 15) / 16;
  }
  std::vector<int32_t> order(p.count);
  std::iota(order.begin(), order.end(), 0);
  const std::vector<int32_t> swap = below("pages", p.count, p.count);
  for (int64_t i = 0; i < p.count; i++) std::swap(order[i], order[swap[i]]);
  p.table.assign(s.sequences.size() * p.per_sequence, -1);
  for (size_t i = 0, next = 0; i < s.sequences.size(); i++) {
    const auto [rows, slots] = s.sequences[i];
    const int32_t table_row = static_cast<int32_t>(s.sequences.size() - 1 - i);  // not the order of the entries
    for (int64_t j = 0; j < (slots + 15) / 16; j++) p.table[table_row * p.per_sequence + j] = order[next++];
    p.queries.insert(p.queries.end(), {static_cast<int32_t>(p.rows), rows, slots, table_row});
    p.rows += rows, p.slots += slots;
    p.pairs += int64_t(rows) * (slots - rows) + int64_t(rows) * (rows + 1) / 2;
  }
  return p;
}

// Random keys and values; slots that nobody may read hold NaN.
struct PageValues {
  std::vector<double> k, v;  // [count, K, D, 16], [count, K, 16, D]
};
inline PageValues fill_pages(const Paged& s, const Pages& p) {
  const size_t size = p.count * s.kv_heads * s.dim * kPageSlots;
  PageValues pages{std::vector<double>(size, NAN), std::vector<double>(size, NAN)};
  for (size_t i = 0; i < s.sequences.size(); i++)
    for (int32_t slot = 0; slot < p.queries[i * 4 + 2]; slot++) {
      const int64_t page = p.table[p.queries[i * 4 + 3] * p.per_sequence + slot / 16];
      const auto values = normal(cat("kv", i, "_", slot), 2 * s.kv_heads * s.dim);
      for (int64_t h = 0; h < s.kv_heads; h++)
        for (int64_t d = 0; d < s.dim; d++) {
          const int64_t at = (page * s.kv_heads + h) * s.dim * 16, from = 2 * (h * s.dim + d);
          pages.k[at + d * 16 + slot % 16] = values[from];
          pages.v[at + slot % 16 * s.dim + d] = values[from + 1];
        }
    }
  return pages;
}

// A score is a chain of D products, of magnitude below 1.5 D / sqrt(D) for the normals here; its absolute error is the
// relative error of its exponential.  Sums over n slots add their own roundings.
inline double softmax_error(int64_t dim, int64_t slots) {
  return 2 * chain(double(dim)) * 1.5 * std::sqrt(double(dim)) + chain(double(slots)) + 8 * kRound;
}

}  // namespace pare::test
