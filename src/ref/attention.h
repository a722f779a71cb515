// Attention of one query, over whatever slots; segments of packed sequences; lists of blocks that queries read.
#pragma once
#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "ops/attention.h"
#include "ref/ref.h"

namespace pare::ref {

// softmax(scale * q.k) over `slots`, for one query of one head; key is a function of (slot, d).  lse: the logarithm,
// base 2, of the sum of the exponentials.
template <class T, class Key>
std::vector<double> probabilities(const T* q, int64_t head_dim, const std::vector<int64_t>& slots, double scale,
                                  Key key, double* lse = nullptr) {
  std::vector<double> p;
  for (int64_t s : slots) {
    double dot = 0;
    for (int64_t d = 0; d < head_dim; d++) dot += double(q[d]) * key(s, d);
    p.push_back(scale * dot);
  }
  const double max = *std::max_element(p.begin(), p.end());
  double sum = 0;
  for (double& x : p) sum += x = std::exp(x - max);
  for (double& x : p) x /= sum;
  if (lse) *lse = max / std::numbers::ln2 + std::log2(sum);
  return p;
}

// o = the sum of their products with the values, value(slot, d).  Returns lse.
template <class T, class Key, class Value>
double attend(T* o, const T* q, int64_t head_dim, const std::vector<int64_t>& slots, double scale, Key key,
              Value value) {
  double lse;
  const std::vector<double> p = probabilities(q, head_dim, slots, scale, key, &lse);
  for (int64_t d = 0; d < head_dim; d++) {
    double weighted = 0;
    for (size_t i = 0; i < slots.size(); i++) weighted += p[i] * value(slots[i], d);
    o[d] = static_cast<T>(weighted);
  }
  return lse;
}

// The segments, checked against the rows of q and of the parents.
std::vector<SegmentRow> read_segments(const char* op, const Tensor& segments, int64_t rows, int64_t parent_rows);

// AttnFwd::lists, checked; absent if they are.
View<int32_t> read_lists(const char* op, const Tensor& lists, int64_t kv_heads, int64_t rows, int64_t parent_rows,
                         const std::vector<SegmentRow>& segments);

// The elements of one segment's slots: those of the parent's rows (listed or not), then its own.
template <class T>
struct SlotView {
  View<T> parent, own;
  SegmentRow segment;
  View<int32_t> lists{Tensor{}};
  T& operator()(int64_t slot, int64_t head, int64_t d) const {
    if (slot >= segment.parent_len) return own(segment.row + slot - segment.parent_len, head, d);
    if (!lists) return parent(segment.parent_row + slot, head, d);
    const int64_t row = lists(segment.parent_row + slot, head);
    return row >= 0 ? own(row, head, d) : parent(-1 - row, head, d);
  }
};

std::vector<int64_t> all_slots(int64_t total);  // 0, 1, ...

// Which slots a query reads of the `total` that it sees: those of its listed blocks, or, where there are no lists or
// the budget covers all blocks, every one.  A row of the lists belongs to one query row.
class BlockLists {
 public:
  BlockLists(const char* op, const Tensor& blocks, const Tensor& budget, int32_t block);

  bool listed(int64_t row, int64_t total) const { return blocks_ && blocks_of(total, block_) > budget_(row); }
  int64_t count(int64_t row, int64_t total) const {
    return listed(row, total) ? listed_slots(total, budget_(row), block_) : total;
  }
  std::vector<int64_t> slots(int64_t row, int64_t kv_head, int64_t total) const;

 private:
  const char* op_;
  View<int32_t> blocks_, budget_;
  int64_t room_;
  int32_t block_;
};

}  // namespace pare::ref
