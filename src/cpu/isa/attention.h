// Pieces that both directions of attention share: packed operands.
#pragma once
#include "cpu/isa/math.h"
#include "cpu/isa/tile.h"
#include "cpu/kernels.h"

namespace pare::PARE_ISA {

constexpr int64_t kBlock = 64;  // slots of a block of the online softmax (ops.h)

namespace {

// Slots of a segment in the matrices of its parent and its own.
template <class T>
struct Slots {
  T *parent, *own;
  int64_t parent_stride, own_stride, parent_len;
  PARE_INLINE T* at(int64_t slot) const {
    return slot < parent_len ? parent + slot * parent_stride : own + (slot - parent_len) * own_stride;
  }
};
// The columns of key head `kv_head` in the rows of `s`.
template <class T>
PARE_INLINE Slots<T> segment_slots(const SegmentRow& s, T* parent, int64_t parent_stride, T* own, int64_t own_stride,
                                   int64_t column) {
  return {parent + s.parent_row * parent_stride + column, own + s.row * own_stride + column, parent_stride, own_stride,
          s.parent_len};
}
PARE_INLINE Slots<const float> key_slots(const AttnArgs& a, const SegmentRow& s, int64_t kv_head) {
  return segment_slots(s, a.pk, a.pk_stride, a.k, a.k_stride, kv_head * a.width);
}
PARE_INLINE Slots<const float> value_slots(const AttnArgs& a, const SegmentRow& s, int64_t kv_head) {
  return segment_slots(s, a.pv, a.pv_stride, a.v, a.v_stride, kv_head * a.width);
}

// Slots [0, n) across: panels [ceil(n / 16)][width][16]; absent slots hold copies of the last.
PARE_INLINE void pack_across(float* out, const Slots<const float>& slots, int64_t n, int64_t width) {
  for (int64_t s = 0; s < n; s += 16, out += 16 * width) {
    const float* row[16];
    for (int64_t i = 0; i < 16; i++) row[i] = slots.at(min64(s + i, n - 1));
    for_vectors(
        width, PARE_LANES_AT(d) {
          vf r[16];
          PARE_UNROLL
          for (int i = 0; i < 16; i++) r[i] = load(row[i] + d, lanes);
          transpose(r);
          PARE_UNROLL
          for (int i = 0; i < 16; i++)
            if (i < lanes) store(out + (d + i) * 16, r[i]);
        });
  }
}

// Slots [0, n) down: [n][padded width], columns past the width zero.
template <class T>
PARE_INLINE void pack_down(float* out, const Slots<T>& slots, int64_t n, int64_t width) {
  for (int64_t s = 0; s < n; s++) {
    const float* const row = slots.at(s);
    for_vectors(
        width, PARE_LANES_AT(d) { store(out, load(row + d, lanes)), out += 16; });
  }
}

PARE_INLINE int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

}  // namespace
}  // namespace pare::PARE_ISA
