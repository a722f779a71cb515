// Rotary position embedding, alone, behind the norm of queries and keys, and in front of the write into the cache
// (roles of types and orders of sums: list.h).
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

#include "ops/linear.h"
#include "ops/paged.h"

namespace pare {

namespace detail {
// x [N, h, D] with rows `pos` of the table.
inline void check_angles(Contract& c, const char* name, const Tensor& x, const Tensor& table, const Tensor& pos) {
  const int64_t N = x.shape[0], D = x.shape[2];
  c.act(name, x, {N, x.shape[1], D}, c.strided);
  c.that(D % 2 == 0, name, " is ", x, ", expected an even head dim");
  c.stat("table", table, {table.shape[0], D});
  c.index("pos", pos, {N});
}
}  // namespace detail

// Rotate-half RoPE, in place: (a, b) = (x[c], x[c + D/2]) -> (a cos - b sin, b cos + a sin), each product rounded, then
// the sum.  Angles of position p are row p of `table`: cos [D/2], then sin [D/2].
struct RopeFwd {
  Tensor x;      // act [N, h, D] in place; rows may be strided, heads contiguous
  Tensor table;  // stat [positions, D]
  Tensor pos;    // i32 [N], each in [0, positions)
  void check(Contract& c) const { detail::check_angles(c, "x", x, table, pos); }
  Cost cost() const { return {3 * x.size(), detail::total_bytes(x, x, pos), detail::total_bytes(x)}; }
  auto outputs() const { return std::array{x}; }
};
// The transpose: rotates by the negative angle.
struct RopeBwd {
  Tensor dx;     // act [N, h, D] in place
  Tensor table;  // stat [positions, D]
  Tensor pos;    // i32 [N]
  void check(Contract& c) const { detail::check_angles(c, "dx", dx, table, pos); }
  Cost cost() const { return {3 * dx.size(), detail::total_bytes(dx, dx, pos), detail::total_bytes(dx)}; }
  auto outputs() const { return std::array{dx}; }
};
// QK-norm and RoPE of Qwen3 in one pass: each head of queries and keys is normed as by RmsnormFwd, with the weight of
// its kind, and then rotated as by RopeFwd, with no rounding to act in between.
struct QkNormRopeFwd {
  Tensor y;               // act [N, H+K, D] out: the H heads of the queries, then those of the keys; rows may be
                          // strided, heads contiguous
  Tensor rstd;            // stat [N, H+K] out
  Tensor x;               // act [N, H+K, D], strides as y
  Tensor q_norm, k_norm;  // act [D]
  Tensor table;           // stat [positions, D], as in RopeFwd
  Tensor pos;             // i32 [N], each in [0, positions)
  int64_t q_heads;        // H
  float eps;
  void check(Contract& c) const {
    const int64_t N = x.shape[0], heads = x.shape[1], D = x.shape[2];
    detail::check_angles(c, "x", x, table, pos);
    c.that(0 <= q_heads && q_heads <= heads, "q_heads is ", q_heads, ", expected 0 to ", heads);
    c.act("y", y, {N, heads, D}, c.strided);
    c.stat("rstd", rstd, {N, heads});
    c.act("q_norm", q_norm, {D});
    c.act("k_norm", k_norm, {D});
  }
  Cost cost() const {
    return {7 * x.size(), detail::total_bytes(x, q_norm, k_norm, pos), detail::total_bytes(y, rstd)};
  }
  auto outputs() const { return std::array{y, rstd}; }
};
// Most partial sums that the gradient of a norm's weight is made of: in all, and for so many heads.
constexpr int64_t kNormParts = 256;
constexpr int64_t norm_parts(int64_t heads) { return std::min(kNormParts, (heads + 7) / 8); }
// dy is rotated back, then goes through RmsnormBwd: dq_norm and dk_norm are sums over rows ascending (n, then head).
struct QkNormRopeBwd {
  Tensor dx;                // act [N, H+K, D] out, strides as in QkNormRopeFwd; may be dy (in place)
  Tensor dq_norm, dk_norm;  // stat [D] acc, or both absent
  Tensor parts;             // stat [norm_parts(N * (H+K)), 2, D] workspace, or absent as they are
  Tensor dy, x;             // act [N, H+K, D], strides as dx
  Tensor q_norm, k_norm;    // act [D]
  Tensor rstd;              // stat [N, H+K]
  Tensor table;             // stat [positions, D]
  Tensor pos;               // i32 [N]
  int64_t q_heads;          // H
  void check(Contract& c) const {
    const int64_t N = x.shape[0], heads = x.shape[1], D = x.shape[2];
    detail::check_angles(c, "x", x, table, pos);
    c.that(0 <= q_heads && q_heads <= heads, "q_heads is ", q_heads, ", expected 0 to ", heads);
    c.act("dx", dx, {N, heads, D}, c.strided);
    c.act("dy", dy, {N, heads, D}, c.strided);
    if (dq_norm || dk_norm) {
      c.stat("dq_norm", dq_norm, {D});
      c.stat("dk_norm", dk_norm, {D});
      c.stat("parts", parts, {norm_parts(N * heads), 2, D});
    }
    c.stat("rstd", rstd, {N, heads});
    c.act("q_norm", q_norm, {D});
    c.act("k_norm", k_norm, {D});
  }
  Cost cost() const {
    return {(dq_norm ? 13 : 11) * x.size(), detail::total_bytes(dy, x, q_norm, k_norm, rstd, pos, dq_norm, dk_norm),
            detail::total_bytes(dx, dq_norm, dk_norm)};
  }
  auto outputs() const { return std::array{dx, dq_norm, dk_norm}; }
};

// The step of queries and keys before attention: at most one of these.
struct Rotation {
  RopeFwd rope{};
  QkNormRopeFwd norm_rope{};
  explicit operator bool() const { return rope.x || norm_rope.y; }
  const Tensor& heads() const { return norm_rope.y ? norm_rope.x : rope.x; }   // act [N, H+K, D]
  const Tensor& result() const { return norm_rope.y ? norm_rope.y : rope.x; }  // the same
  Tensor last_heads(int64_t count) const {                                     // of the result
    Tensor t = result();
    const int64_t first = (t.shape[1] - count) * t.shape[2] * static_cast<int64_t>(dtype_size(t.dtype));
    t.shape[1] = count;
    if (t.data) t.data = static_cast<char*>(t.data) + first;
    return t;
  }
  void check(Contract& c) const {
    if (rope.x) rope.check(c);
    if (norm_rope.y) norm_rope.check(c);
    c.that(!rope.x || !norm_rope.y, "two rotations");
  }
  Cost cost() const { return norm_rope.y ? norm_rope.cost() : rope.x ? rope.cost() : Cost{}; }
};
// Up to so many rows of bf16, the kernel of a product also rotates its heads and writes them.
constexpr int64_t kRotatedRows = 512;
// Writes new keys and values into the cache.  First it computes `product`, then `rotation`, if given, with the bits of
// those ops.
struct KvWrite {
  Tensor k_pages;     // act [pages, K, D, 16] acc: only the new slots are written
  Tensor v_pages;     // act [pages, K, 16, D] acc
  Tensor k, v;        // act [N, K, D], D even; rows may be strided, heads contiguous
  Tensor page_table;  // i32 [sequences, max_pages]; rows may be strided
  Tensor queries;     // i32 [S, 4]: PagedRow
  // A cache that evicts also keeps, per slot and key head, the token's position.
  Tensor pos_pages{};   // i32 [pages, K, 16] acc: pos of the row, or absent
  Tensor pos{};         // i32 [N], absent if pos_pages is
  Rotation rotation{};  // of N rows, or nothing; its result ends with k
  LinearFwd product{};  // or absent; its y begins with the heads that are rotated, and ends with v
  void check(Contract& c) const {
    const int64_t N = k.shape[0], K = k_pages.shape[1], D = k_pages.shape[2];
    detail::check_pages(c, k_pages, v_pages);
    c.that(D % 2 == 0, "k is ", k, ", expected an even head dim");
    rotation.check(c);
    if (rotation) {
      const Tensor last = rotation.last_heads(K);
      c.act("the end of the rotation", last, {N, K, D}, c.strided);
      c.that(last.data == k.data && last.stride[0] == k.stride[0], "k is not the end of the rotation");
    }
    c.act("k", k, {N, K, D}, c.strided);
    c.act("v", v, {N, K, D}, c.strided);
    if (product.y) {
      product.check(c);
      c.that(!product.swiglu && !product.norm.y && !product.vocab_sums.tiles, "the product is more than a product");
      const Tensor &y = product.y, heads = rotation.heads();
      const int64_t first = heads.shape[1] * D;
      c.that(rotation && y.shape[1] == first + K * D && heads.data == y.data && heads.stride[0] == y.stride[0] &&
                 v.data == y.columns(first, K * D).data && v.stride[0] == y.stride[0],
             "the product is ", y, ", expected it to be the heads that are rotated and those of v");
    }
    detail::check_queries(c, page_table, queries);
    if (!pos_pages) return;
    c.index("pos_pages", pos_pages, {k_pages.shape[0], K, kPageSlots});
    c.index("pos", pos, {N});
  }
  Cost cost() const {
    Cost cost = rotation.cost();
    if (joins()) cost = {cost.flops, -detail::total_bytes(v), 0};  // of what the product holds
    if (product.y) cost += product.cost();
    cost += {0, detail::total_bytes(v, queries, pos), detail::total_bytes(k, v)};
    if (!rotation) cost.read += detail::total_bytes(k);
    if (pos_pages) cost.written += 4 * k.shape[0] * k.shape[1];
    return cost;
  }
  // Returns true if one kernel can do all of it.
  bool joins() const {
    const Tensor& x = rotation.rope.x;  // without norm; of each head, both halves are whole tiles
    return product.y && x && x.shape[0] <= kRotatedRows && x.shape[2] % 64 == 0 &&
           linear_parts(product.w.outputs(), product.w.inputs()) == 1;
  }
  Stretch stretch(int multiprocessors) const {
    if (!joins()) return product.y ? product.stretch(multiprocessors) : Stretch{};
    return {.flops = tile_stretch(kRotatedTiles, k.shape[0], product.w.outputs(), product.w.inputs(), multiprocessors)};
  }
  auto outputs() const { return std::array{product.y, k_pages, v_pages, rotation.result(), rotation.norm_rope.rstd}; }
};

}  // namespace pare
