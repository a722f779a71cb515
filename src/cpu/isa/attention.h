// Pieces that both directions of attention share: packed operands.
#pragma once
#include "cpu/isa/math.h"
#include "cpu/isa/tile.h"
#include "cpu/kernels.h"
#include "ops/attention.h"

namespace pare::PARE_ISA {

namespace {

// Slots of a segment in the matrices of its parent and its own.  With a list the parent's are entries of it: rows from
// `listed_own` on, or (negative) from `parent` on.
template <class T>
struct Slots {
  T *parent, *own;
  int64_t parent_stride, own_stride, parent_len;
  const int32_t* list = nullptr;
  int64_t list_stride = 0;
  T* listed_own = nullptr;
  PARE_INLINE T* at(int64_t slot) const {
    if (slot >= parent_len) return own + (slot - parent_len) * own_stride;
    if (!list) return parent + slot * parent_stride;
    const int64_t row = list[slot * list_stride];
    return row >= 0 ? listed_own + row * own_stride : parent + (-1 - row) * parent_stride;
  }
  // Whether slots [slot, slot + n) lie at one stride, and that.
  PARE_INLINE bool even(int64_t slot, int64_t n) const {
    return slot >= parent_len || (!list && slot + n <= parent_len);
  }
  PARE_INLINE int64_t stride(int64_t slot) const { return slot >= parent_len ? own_stride : parent_stride; }
};
// The columns of key head `kv_head` in the rows of `s`, in matrices that lie like k and pk.
template <class T>
PARE_INLINE Slots<T> segment_slots(const AttnArgs& a, const SegmentRow& s, int64_t kv_head, T* parent,
                                   int64_t parent_stride, T* own, int64_t own_stride) {
  const int64_t column = kv_head * a.head_dim, kv_heads = a.heads / a.group;
  Slots<T> slots{parent + column, own + s.row * own_stride + column, parent_stride, own_stride, s.parent_len};
  if (a.lists) {
    slots.list = a.lists + s.parent_row * kv_heads + kv_head;
    slots.list_stride = kv_heads;
    slots.listed_own = own + column;
  } else
    slots.parent += s.parent_row * parent_stride;
  return slots;
}
PARE_INLINE Slots<const float> key_slots(const AttnArgs& a, const SegmentRow& s, int64_t kv_head) {
  return segment_slots(a, s, kv_head, a.pk, a.pk_stride, a.k, a.k_stride);
}
PARE_INLINE Slots<const float> value_slots(const AttnArgs& a, const SegmentRow& s, int64_t kv_head) {
  return segment_slots(a, s, kv_head, a.pv, a.pv_stride, a.v, a.v_stride);
}

// Slots [first, n) across, and those that share a panel with them: panels [ceil(n / 16)][head_dim][16]; absent slots
// hold copies of the last.
PARE_INLINE void pack_across(float* out, const Slots<const float>& slots, int64_t first, int64_t n, int64_t head_dim) {
  for (int64_t s = first / 16 * 16; s < n; s += 16) {
    const float* row[16];
    for (int64_t i = 0; i < 16; i++) row[i] = slots.at(min64(s + i, n - 1));
    for_vectors(
        head_dim, PARE_LANES_AT(d) {
          vf r[16];
          PARE_UNROLL
          for (int i = 0; i < 16; i++) r[i] = load(row[i] + d, lanes);
          transpose(r);
          PARE_UNROLL
          for (int i = 0; i < 16; i++)
            if (i < lanes) store(out + s * head_dim + (d + i) * 16, r[i]);
        });
  }
}

// a . b by lane; do . o is the sum of these (AttnBwd).
PARE_INLINE vf lane_products(const float* a, const float* b, int64_t head_dim) {
  vf acc = zero();
  for_vectors(
      head_dim, PARE_LANES_AT(d) { acc = fma(load(a + d, lanes), load(b + d, lanes), acc); });
  return acc;
}

PARE_INLINE int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

// Slots [first, end) down: [end - first][padded head_dim], columns at and past head_dim zero; and back.
template <class T>
PARE_INLINE void pack_down(float* out, const Slots<T>& slots, int64_t first, int64_t end, int64_t head_dim) {
  for (int64_t s = first; s < end; s++) {
    const float* const row = slots.at(s);
    for_vectors(
        head_dim, PARE_LANES_AT(d) {
          store(out, load(row + d, lanes));
          out += 16;
        });
  }
}
PARE_INLINE void unpack(const Slots<float>& slots, const float* from, int64_t first, int64_t end, int64_t head_dim) {
  for (int64_t s = first; s < end; s++) {
    float* const row = slots.at(s);
    for_vectors(
        head_dim, PARE_LANES_AT(d) {
          store(row + d, load(from), lanes);
          from += 16;
        });
  }
}

// Rows that will be needed soon, fetched a few at a time while products run: they lie too far apart for the machine to
// foresee them.
class Prefetcher {
 public:
  PARE_INLINE void add(const float* rows, int64_t stride, int64_t count, int64_t width) {
    if (count) parts_[added_++] = {rows, stride, count, width};
  }
  PARE_INLINE void fetch_rows(int64_t n) {
    for (; n > 0 && now_ < added_; n--) {
      Part& p = parts_[now_];
      for (int64_t i = 0; i < p.width; i += 16) __builtin_prefetch(p.row + i, 0, 2);  // to the L2 cache
      p.row += p.stride;
      if (--p.count == 0) now_++;
    }
  }

 private:
  struct Part {
    const float* row;
    int64_t stride, count, width;
  };
  Part parts_[8];
  int added_ = 0, now_ = 0;
};

}  // namespace
}  // namespace pare::PARE_ISA
