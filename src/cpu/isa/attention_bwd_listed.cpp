// Backward of attention with lists of blocks, for one segment and one key head; AttnBwd states
// the order of the chains.  One query row at a time: its scores come 16 slots at a time, a page of the segment each,
// then its slots one after the other.
#include "cpu/isa/attention.h"
#include "cpu/kernels.h"

namespace pare::PARE_ISA {
namespace {

// Pages (of 16 slots of the segment) that a row reads, ascending, and which of their slots.
struct ReadPages {
  int32_t *page, *slots;  // slots: bit i for slot i of the page
  int64_t count = 0;
  PARE_INLINE void add(int64_t first, int64_t n) {  // slots [first, first + n) of one page
    const int32_t p = static_cast<int32_t>(first / 16), bits = ((1 << n) - 1) << first % 16;
    if (count && page[count - 1] == p)
      slots[count - 1] |= bits;
    else {
      page[count] = p;
      slots[count] = bits;
      count++;
    }
  }
};

ReadPages read_pages(const BlockListArgs& lists, int64_t row, int64_t kv_head, int64_t total, int32_t* memory,
                     int64_t most) {
  ReadPages r{memory, memory + most};
  const int64_t budget = lists.budget[row];
  if (blocks_of(total, lists.block) <= budget) {
    for (int64_t s = 0; s < total; s += 16) r.add(s, min64(16, total - s));
    return r;
  }
  const int32_t* const list = lists.blocks + (row * lists.kv_heads + kv_head) * lists.room;
  for (int64_t i = 0; i < budget; i++) {
    const int64_t s = list[i] * lists.block;
    r.add(s, min64(lists.block, total - s));
  }
  return r;
}

// out[16 j + i] = x . (slot i of page pages[j]) for kPages pages: chains over the channels, side by side.
template <int kPages>
PARE_INLINE void products(float* out, const float* x, const float* across, const int32_t* pages, int64_t head_dim) {
  vf acc[kPages];
  PARE_UNROLL
  for (int j = 0; j < kPages; j++) acc[j] = zero();
  for (int64_t d = 0; d < head_dim; d++) {
    const vf a = set1(x[d]);
    PARE_UNROLL
    for (int j = 0; j < kPages; j++) acc[j] = fma(a, load(across + (pages[j] * head_dim + d) * 16), acc[j]);
  }
  PARE_UNROLL
  for (int j = 0; j < kPages; j++) store(out + j * 16, acc[j]);
}
PARE_INLINE void all_products(float* out, const float* x, const float* across, const ReadPages& r, int64_t head_dim) {
  int64_t j = 0;
  for (; j + 4 <= r.count; j += 4) products<4>(out + j * 16, x, across, r.page + j, head_dim);
  for (; j < r.count; j++) products<1>(out + j * 16, x, across, r.page + j, head_dim);
}

// The operands of a segment: down [slots][padded], across [slots / 16][head_dim][16].
struct Operands {
  float *k_across, *v_across, *k, *dk, *dv;
  int64_t head_dim, padded;
};

// dv += p do, dk += ds q and dq += ds k in 16 kVectors channels from `column` on, slots ascending.
template <int kVectors>
PARE_INLINE void add_gradients(const Operands& x, const ReadPages& r, const float* p, const float* ds, const float* q,
                               const float* d_o, float* dq, int64_t column) {
  vf query[kVectors], above[kVectors], sum[kVectors];
  PARE_UNROLL
  for (int i = 0; i < kVectors; i++) {
    query[i] = load(q + column + i * 16);
    above[i] = load(d_o + column + i * 16);
    sum[i] = zero();
  }
  for (int64_t j = 0; j < r.count; j++)
    for (uint32_t bits = static_cast<uint32_t>(r.slots[j]); bits; bits &= bits - 1) {
      const int64_t lane = __builtin_ctz(bits), at = (r.page[j] * int64_t{16} + lane) * x.padded + column;
      const vf weight = set1(p[j * 16 + lane]), gradient = set1(ds[j * 16 + lane]);
      PARE_UNROLL
      for (int i = 0; i < kVectors; i++) {
        float *const dv = x.dv + at + i * 16, *const dk = x.dk + at + i * 16;
        store(dv, fma(weight, above[i], load(dv)));
        store(dk, fma(gradient, query[i], load(dk)));
        sum[i] = fma(gradient, load(x.k + at + i * 16), sum[i]);
      }
    }
  PARE_UNROLL
  for (int i = 0; i < kVectors; i++) store(dq + column + i * 16, sum[i]);
}

PARE_INLINE void copy_row(float* out, const float* in, int64_t head_dim) {
  for_vectors(
      head_dim, PARE_LANES_AT(d) { store(out + d, load(in + d, lanes)); });
}

}  // namespace

// Scratch, with slots rounded up to 16: 5 slots padded + 3 padded + 4 slots.
void attn_bwd_listed(const AttnBwdArgs& a, const BlockListArgs& lists, const SegmentRow& s, int64_t kv_head,
                     float* scratch) {
  const AttnArgs& f = a.fwd;
  const int64_t slots = s.parent_len + s.len, head_dim = f.head_dim, padded = round16(head_dim);
  Operands x{};
  x.head_dim = head_dim;
  x.padded = padded;
  float* next = scratch;
  const auto take = [&](int64_t n) { return std::exchange(next, next + n); };
  x.k_across = take(round16(slots) * head_dim);
  x.v_across = take(round16(slots) * head_dim);
  x.k = take(slots * padded);
  x.dk = take(slots * padded);
  x.dv = take(slots * padded);
  float *const q = take(padded), *const d_o = take(padded), *const dq = take(padded);
  float *const p = take(round16(slots)), *const ds = take(round16(slots));
  int32_t* const pages = reinterpret_cast<int32_t*>(take(round16(slots)));
  const Slots<float> dk = segment_slots(f, s, kv_head, a.dpk, a.dpk_stride, a.dk, a.dk_stride);
  const Slots<float> dv = segment_slots(f, s, kv_head, a.dpv, a.dpv_stride, a.dv, a.dv_stride);
  pack_across(x.k_across, key_slots(f, s, kv_head), 0, slots, head_dim);
  pack_across(x.v_across, value_slots(f, s, kv_head), 0, slots, head_dim);
  pack_down(x.k, key_slots(f, s, kv_head), 0, slots, head_dim);
  pack_down(x.dk, dk, 0, slots, head_dim);
  pack_down(x.dv, dv, 0, slots, head_dim);
  for (int64_t head = kv_head * f.group; head < (kv_head + 1) * f.group; head++)
    for (int64_t i = 0; i < s.len; i++) {
      const int64_t row = s.row + i, at = head * head_dim;
      const ReadPages r = read_pages(lists, row, kv_head, s.parent_len + i + 1, pages, round16(slots) / 16);
      copy_row(q, f.q + row * f.q_stride + at, head_dim);
      copy_row(d_o, a.d_o + row * a.do_stride + at, head_dim);
      const float* const o = f.o + row * a.o_stride + at;
      const vf delta = set1(sum(lane_products(d_o, o, head_dim)));
      all_products(p, q, x.k_across, r, head_dim);
      all_products(ds, d_o, x.v_across, r, head_dim);
      for (int64_t j = 0; j < r.count * 16; j += 16) {
        const vf weight = exp2_below_63(fma(load(p + j), set1(f.scale * kLog2E), set1(-f.lse[row * f.heads + head])));
        store(p + j, weight);
        store(ds + j, mul(mul(weight, sub(load(ds + j), delta)), set1(f.scale)));
      }
      int64_t d = 0;
      for (; d + 64 <= padded; d += 64) add_gradients<4>(x, r, p, ds, q, d_o, dq, d);
      for (; d < padded; d += 16) add_gradients<1>(x, r, p, ds, q, d_o, dq, d);
      float* const out = a.dq + row * a.dq_stride + at;
      for_vectors(
          head_dim, PARE_LANES_AT(c) { store(out + c, load(dq + c), lanes); });
    }
  unpack(dk, x.dk, 0, slots, head_dim);
  unpack(dv, x.dv, 0, slots, head_dim);
}

}  // namespace pare::PARE_ISA
