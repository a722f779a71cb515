// Pages of several sequences or events, laid out as badly as the contract allows: shuffled, with pages of nobody
// between them, absent slots NaN.
#pragma once
#include <algorithm>
#include <numeric>

#include "op_harness.h"

namespace pare::test {

struct KvPages {
  KvPages() = default;
  // One row of the table for each of `slots`.
  explicit KvPages(const std::vector<int32_t>& slots) : slots(slots) {
    for (int32_t n : slots) per_row = std::max<int64_t>(per_row, (n + 15) / 16 + 1), count += (n + 15) / 16;
    const int64_t used = count;
    count = 2 * used + 1;  // enough to make every page a fresh one
    std::vector<int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    const std::vector<int32_t> swap = below("pages", count, count);
    for (int64_t i = 0; i < count; i++) std::swap(order[i], order[swap[i]]);
    table.assign(slots.size() * per_row, -1);
    size_t next = 0;
    for (size_t i = 0; i < slots.size(); i++)
      for (int64_t j = 0; j < (slots[i] + 15) / 16; j++) table[i * per_row + j] = order[next++];
    spare.assign(order.begin() + used, order.end());
  }

  // The pages after an event: fresh 0: all in place; 1: new ones wherever allowed; 2: every other one new.
  std::vector<int32_t> destinations(const std::vector<KvEvent>& events, int fresh) const {
    std::vector<int32_t> dst(table.size(), -1);
    size_t next = 0;
    for (size_t i = 0; i < events.size(); i++)
      for (int64_t p = 0; p * 16 < events[i].first + events[i].keep; p++) {
        const bool change = p * 16 >= events[i].first && (fresh == 1 || (fresh == 2 && p % 2));
        dst[i * per_row + p] = change ? spare[next++] : table[i * per_row + p];
      }
    return dst;
  }

  // Normal keys [pages][kv_heads][dim][16] of the slots in use, functions of (row, slot); all else is NaN.
  std::vector<double> keys(const std::string& name, int64_t kv_heads, int64_t dim) const {
    std::vector<double> k(count * kv_heads * dim * 16, NAN);
    for (size_t i = 0; i < slots.size(); i++)
      for (int32_t s = 0; s < slots[i]; s++) {
        const auto v = normal(cat(name, i, "_", s), kv_heads * dim);
        for (int64_t j = 0; j < kv_heads * dim; j++) k[(page(i, s) * kv_heads * dim + j) * 16 + s % 16] = v[j];
      }
    return k;
  }
  // Positions [pages][kv_heads][16]: slot s of head h holds token 3 s + h % 3.
  std::vector<int32_t> positions(int64_t kv_heads) const {
    std::vector<int32_t> pos(count * kv_heads * 16, -1);
    for (size_t i = 0; i < slots.size(); i++)
      for (int32_t s = 0; s < slots[i]; s++)
        for (int64_t h = 0; h < kv_heads; h++)
          pos[(page(i, s) * kv_heads + h) * 16 + s % 16] = static_cast<int32_t>(3 * s + h % 3);
    return pos;
  }
  int64_t page(size_t row, int32_t slot) const { return table[row * per_row + slot / 16]; }

  std::vector<int32_t> slots, table, spare;
  int64_t per_row = 0, count = 0;
};

inline std::vector<int32_t> flat(const std::vector<KvEvent>& events) {
  std::vector<int32_t> v;
  for (const KvEvent& e : events) v.insert(v.end(), {e.slots, e.first, e.recent, e.keep, e.keep_row, e.window_row});
  return v;
}

}  // namespace pare::test
