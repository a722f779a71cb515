// Pages of several sequences or compressions, as badly laid out as the contract allows.
#pragma once
#include "cases/layouts.h"
#include "op_harness.h"

namespace pare::test {

using cases::flat;

struct KvPages : cases::Pages {
  KvPages() = default;
  explicit KvPages(const std::vector<int32_t>& slots) : Pages(slots, true) {}

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
};

}  // namespace pare::test
