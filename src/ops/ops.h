// THE op list: every operation of the project, once.  An op is a struct of named arguments with their shapes, and its
// cost.  A table implements every op for one kind of device; `model`, `rollout` and `rl` know only this file.  The
// structs of attention lie in attention_ops.h, those of a cache that evicts in kv_ops.h.
//
// Letters: N rows (tokens), C model width, I and O inputs and outputs of a linear layer, F feed-forward width, H query
// heads, K key/value heads, D head dim, V vocabulary, S segments or sequences, R loss rows, P parent rows.
//
// Types have roles, and no other combination exists.  `act` (activations, weights): f32 in `cpu`, f64 or f32 in `ref`,
// bf16 or f32 in `cuda`.  `stat` (statistics, log-probs, gradients of parameters, optimizer state but for moments in
// bf16): f32, but f64 where act is f64.  Index tensors are i32.  All tensors of an op are on the table's device.
//
// "out" is overwritten and need not be initialised; "acc" is added to, in the order the op states; "in" is only read.
// Tensors may have strided rows where an op says so; otherwise they are contiguous.  Outputs never overlap inputs
// unless the op says "in place".
//
// Order of sums (the definition that makes decode, prefill and learner agree bit by bit; `cpu` and every other f32
// table of one architecture family follow it, `ref` sums in double):
//   linear      one chain of fused multiply-adds per output element, k ascending from +0; then + bias; then + residual
//   row sums    16 lanes, lane i takes elements i, i+16, ... ascending as one chain from +0 (fused multiply-adds for
//               sums of products); then the tree ((l0+l8)+(l4+l12)) ... : lanes i and i+8, then i+4, i+2, i+1
//   attention   keys in blocks of 64 slots aligned to slot 0 of the sequence (parent first), blocks ascending, online
//               softmax; inside a block: q.k is a chain over d, a weight is 2^fma(q.k, scale log2(e), b - max), the sum
//               of weights is the row-sum tree over 64 lanes (absent slots are exactly +0), the weighted V is one chain
//               over slots ascending; a new block scales what is there by alpha = 2^(old max - new max):
//               sum = fma(sum, alpha, tree), o = o * alpha; b is log2 of a slot's count, or +0, and max that of
//               fma(q.k, scale log2(e), b); backward, a weight is 2^fma(q.k, scale log2(e), -lse), do.o a row sum
//   parameter gradients   one chain over rows ascending, starting from the value stored in the accumulator
//
// Cost: flops counts multiply and add as two.  Matrix products and attention follow the closed forms 2*N*I*O and
// 4*H*D*pairs (10*H*D*pairs backward), where `pairs` is the number of visible (query, key) pairs of one head, which the
// caller knows; other ops state their multiply-adds per element.  Bytes are what must move when every tensor is read or
// written once.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/memory.h"
#include "ops/attention_ops.h"
#include "ops/contract.h"
#include "ops/cost.h"
#include "ops/kv_ops.h"

namespace pare {

// ---- data movement

// Host to device.  The source must stay valid until the stream has passed this point (Device sees to it), and should be
// of Table::staging.
struct Upload {
  Tensor dst;       // any, contiguous, out
  const void* src;  // host, dst.bytes() bytes
  void check(Contract& c) const { c.bytes("dst", dst); }
  Cost cost() const { return {0, detail::total_bytes(dst), detail::total_bytes(dst)}; }
  auto outputs() const { return std::array{dst}; }
};
// Device to host; the data are there when the call returns.  `null` writes zeros.
struct Download {
  void* dst;   // host, src.bytes() bytes
  Tensor src;  // any, contiguous
  void check(Contract& c) const { c.bytes("src", src); }
  Cost cost() const { return {0, detail::total_bytes(src), detail::total_bytes(src)}; }
  auto outputs() const { return std::array<Tensor, 0>{}; }
};
// Sets every byte to zero.
struct Zero {
  Tensor x;  // any, contiguous, out
  void check(Contract& c) const { c.bytes("x", x); }
  Cost cost() const { return {0, 0, detail::total_bytes(x)}; }
  auto outputs() const { return std::array{x}; }
};
// y += x
struct Accumulate {
  Tensor y;  // stat [n], acc
  Tensor x;  // stat [n]
  void check(Contract& c) const {
    c.stat("y", y, {y.shape[0]});
    c.stat("x", x, {y.shape[0]});
  }
  Cost cost() const { return {y.size(), detail::total_bytes(y, x), detail::total_bytes(y)}; }
  auto outputs() const { return std::array{y}; }
};
// y[r] = x[index[r]]
struct GatherRows {
  Tensor y;      // act [R, C] out
  Tensor x;      // act [N, C]
  Tensor index;  // i32 [R], each in [0, N)
  void check(Contract& c) const {
    const int64_t R = index.shape[0], C = x.shape[1];
    c.act("y", y, {R, C});
    c.act("x", x, {x.shape[0], C});
    c.index("index", index, {R});
  }
  Cost cost() const { return {0, detail::total_bytes(y, index), detail::total_bytes(y)}; }
  auto outputs() const { return std::array{y}; }
};
// y[index[r]] += x[r], r ascending
struct ScatterAddRows {
  Tensor y;      // act [N, C] acc
  Tensor x;      // act [R, C]
  Tensor index;  // i32 [R], each in [0, N); repeats allowed
  void check(Contract& c) const {
    const int64_t R = index.shape[0], C = y.shape[1];
    c.act("y", y, {y.shape[0], C});
    c.act("x", x, {R, C});
    c.index("index", index, {R});
  }
  Cost cost() const { return {x.size(), detail::total_bytes(x, x, index), detail::total_bytes(x)}; }
  auto outputs() const { return std::array{y}; }
};

// ---- weights

constexpr int64_t kPanel = 16;  // outputs of a weight that lie side by side
constexpr int64_t weight_panels(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

// A weight w [O, I], in the one layout that all ops of a table read: panels of 16 outputs,
// packed[o / 16][i][o % 16] = w[o][i], zeros past the last output (but see table_cuda_fast).
struct Weight {
  Tensor packed;      // act [ceil(O / 16), I, 16]
  int64_t count = 0;  // O
  int64_t outputs() const { return count; }
  int64_t inputs() const { return packed.shape[1]; }
  int64_t size() const { return outputs() * inputs(); }
  size_t bytes() const { return static_cast<size_t>(size()) * dtype_size(packed.dtype); }  // without the zeros
  void check(Contract& c, const char* name) const { c.act(name, packed, {weight_panels(outputs()), inputs(), kPanel}); }
  // `rows` are or become those of the weight from `first` on.
  void check_rows(Contract& c, const Tensor& rows, int64_t first) const {
    check(c, "w");
    c.act("rows", rows, {rows.shape[0], inputs()});
    c.that(first >= 0 && first + rows.shape[0] <= outputs(), "rows [", first, ", ", first + rows.shape[0], ") of ",
           outputs());
  }
};

// Rows [first, first + R) of w = rows; with the last row of w also the zeros behind it.
struct PackWeight {
  Weight w;     // acc: only those rows are written
  Tensor rows;  // act [R, I]
  int64_t first;
  void check(Contract& c) const { w.check_rows(c, rows, first); }
  Cost cost() const { return {0, detail::total_bytes(rows), detail::total_bytes(rows)}; }
  auto outputs() const { return std::array{w.packed}; }
};
// rows = rows [first, first + R) of w
struct UnpackWeight {
  Tensor rows;  // act [R, I] out
  Weight w;
  int64_t first;
  void check(Contract& c) const { w.check_rows(c, rows, first); }
  Cost cost() const { return {0, detail::total_bytes(rows), detail::total_bytes(rows)}; }
  auto outputs() const { return std::array{rows}; }
};

// ---- embedding

struct EmbeddingFwd {
  Tensor y;      // act [N, C] out
  Weight table;  // [V, C]
  Tensor ids;    // i32 [N], each in [0, V)
  void check(Contract& c) const {
    table.check(c, "table");
    c.act("y", y, {ids.shape[0], table.inputs()});
    c.index("ids", ids, {ids.shape[0]});
  }
  Cost cost() const { return {0, detail::total_bytes(y, ids), detail::total_bytes(y)}; }
  auto outputs() const { return std::array{y}; }
};
struct EmbeddingBwd {
  Tensor dtable;  // stat [V, C] acc, rows of dy ascending
  Tensor dy;      // act [N, C]
  Tensor ids;     // i32 [N]
  void check(Contract& c) const {
    c.stat("dtable", dtable, {dtable.shape[0], dtable.shape[1]});
    c.act("dy", dy, {ids.shape[0], dtable.shape[1]});
    c.index("ids", ids, {ids.shape[0]});
  }
  Cost cost() const { return {dy.size(), detail::total_bytes(dy, dy, ids), detail::total_bytes(dy)}; }
  auto outputs() const { return std::array{dtable}; }
};

// ---- RMSNorm

// rstd = 1 / sqrt(mean(x^2) + eps); y = (x * rstd) * w, row by row.
struct RmsnormFwd {
  Tensor y;     // act [N, C] out, rows may be strided; may be x (in place)
  Tensor rstd;  // stat [N] out
  Tensor x;     // act [N, C], rows may be strided
  Tensor w;     // act [C]
  float eps;
  void check(Contract& c) const {
    const int64_t N = x.shape[0], C = x.shape[1];
    c.act("x", x, {N, C}, c.strided);
    c.that(C > 0, "x is ", x, ", expected columns");
    c.act("y", y, {N, C}, c.strided);
    c.stat("rstd", rstd, {N});
    c.act("w", w, {C});
  }
  Cost cost() const { return {4 * x.size(), detail::total_bytes(x, w), detail::total_bytes(y, rstd)}; }
  auto outputs() const { return std::array{y, rstd}; }
};
// With xh = x * rstd: dx = rstd * (dy*w - xh * mean(dy*w*xh)); dw[c] += dy*xh over rows ascending.
struct RmsnormBwd {
  Tensor dx;    // act [N, C], acc if accumulate, else out; rows may be strided; may be dy (in place) if not accumulate
  Tensor dw;    // stat [C] acc
  Tensor dy;    // act [N, C], rows may be strided
  Tensor x;     // act [N, C], rows may be strided
  Tensor w;     // act [C]
  Tensor rstd;  // stat [N]
  bool accumulate;
  void check(Contract& c) const {
    const int64_t N = x.shape[0], C = x.shape[1];
    c.act("x", x, {N, C}, c.strided);
    c.that(C > 0, "x is ", x, ", expected columns");
    c.act("dx", dx, {N, C}, c.strided);
    c.stat("dw", dw, {C});
    c.act("dy", dy, {N, C}, c.strided);
    c.act("w", w, {C});
    c.stat("rstd", rstd, {N});
    c.that(!accumulate || !dx.data || dx.data != dy.data, "dx is dy although it accumulates");
  }
  Cost cost() const { return {10 * x.size(), detail::total_bytes(dy, x, w, rstd, dw), detail::total_bytes(dx, dw)}; }
  auto outputs() const { return std::array{dx, dw}; }
};

// ---- linear

// y = x wT (+ bias) (+ residual)
struct LinearFwd {
  Tensor y;         // act [N, O] out, rows may be strided; may be residual (in place)
  Tensor x;         // act [N, I], rows may be strided
  Weight w;         // [O, I]
  Tensor bias;      // act [O] or absent
  Tensor residual;  // act [N, O] or absent, rows may be strided
  void check(Contract& c) const {
    const int64_t N = x.shape[0], O = w.outputs();
    w.check(c, "w");
    c.act("y", y, {N, O}, c.strided);
    c.act("x", x, {N, w.inputs()}, c.strided);
    if (bias) c.act("bias", bias, {O});
    if (residual) c.act("residual", residual, {N, O}, c.strided);
  }
  Cost cost() const {
    return {2 * x.shape[0] * w.inputs() * w.outputs(), detail::total_bytes(x, w, bias, residual),
            detail::total_bytes(y)};
  }
  auto outputs() const { return std::array{y}; }
};
// dx = dy w: one chain over o ascending, from +0 or, if accumulate, added once to what dx holds
struct LinearBwdInput {
  Tensor dx;  // act [N, I] out, or acc if accumulate; rows may be strided
  Tensor dy;  // act [N, O], rows may be strided
  Weight w;   // [O, I]
  bool accumulate;
  void check(Contract& c) const {
    w.check(c, "w");
    c.act("dx", dx, {dy.shape[0], w.inputs()}, c.strided);
    c.act("dy", dy, {dy.shape[0], w.outputs()}, c.strided);
  }
  Cost cost() const {
    return {2 * dy.shape[0] * w.inputs() * w.outputs(),
            detail::total_bytes(dy, w) + (accumulate ? detail::total_bytes(dx) : 0), detail::total_bytes(dx)};
  }
  auto outputs() const { return std::array{dx}; }
};
// dw += dyT x; dbias += sum over rows of dy.  Chains over rows ascending, continued from what the accumulators hold.
struct LinearBwdWeight {
  Tensor dw;     // stat [O, I] acc
  Tensor dbias;  // stat [O] acc, or absent
  Tensor dy;     // act [N, O], rows may be strided
  Tensor x;      // act [N, I], rows may be strided
  void check(Contract& c) const {
    const int64_t N = dy.shape[0], O = dy.shape[1], I = x.shape[1];
    c.stat("dw", dw, {O, I});
    if (dbias) c.stat("dbias", dbias, {O});
    c.act("dy", dy, {N, O}, c.strided);
    c.act("x", x, {N, I}, c.strided);
  }
  Cost cost() const {
    return {2 * dy.shape[0] * dy.shape[1] * x.shape[1], detail::total_bytes(dy, x, dw, dbias),
            detail::total_bytes(dw, dbias)};
  }
  auto outputs() const { return std::array{dw, dbias}; }
};

// ---- rotary position embedding, QK-norm, SwiGLU

// Rotate-half RoPE, in place: (a, b) = (x[c], x[c + D/2]) -> (a cos - b sin, b cos + a sin), each product rounded, then
// the sum.  Angles of position p are row p of `table`: cos [D/2], then sin [D/2].
struct RopeFwd {
  Tensor x;      // act [N, h, D] in place; rows may be strided, heads contiguous
  Tensor table;  // stat [positions, D]
  Tensor pos;    // i32 [N], each in [0, positions)
  void check(Contract& c) const {
    const int64_t N = x.shape[0], D = x.shape[2];
    c.act("x", x, {N, x.shape[1], D}, c.strided);
    c.that(D % 2 == 0, "x is ", x, ", expected an even head dim");
    c.stat("table", table, {table.shape[0], D});
    c.index("pos", pos, {N});
  }
  Cost cost() const { return {3 * x.size(), detail::total_bytes(x, x, pos), detail::total_bytes(x)}; }
  auto outputs() const { return std::array{x}; }
};
// The transpose: rotates by the negative angle.
struct RopeBwd {
  Tensor dx;     // act [N, h, D] in place
  Tensor table;  // stat [positions, D]
  Tensor pos;    // i32 [N]
  void check(Contract& c) const {
    const int64_t N = dx.shape[0], D = dx.shape[2];
    c.act("dx", dx, {N, dx.shape[1], D}, c.strided);
    c.that(D % 2 == 0, "dx is ", dx, ", expected an even head dim");
    c.stat("table", table, {table.shape[0], D});
    c.index("pos", pos, {N});
  }
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
    c.act("x", x, {N, heads, D}, c.strided);
    c.that(D % 2 == 0, "x is ", x, ", expected an even head dim");
    c.that(0 <= q_heads && q_heads <= heads, q_heads, " of the heads of x, ", x, ", are of queries");
    c.act("y", y, {N, heads, D}, c.strided);
    c.stat("rstd", rstd, {N, heads});
    c.act("q_norm", q_norm, {D});
    c.act("k_norm", k_norm, {D});
    c.stat("table", table, {table.shape[0], D});
    c.index("pos", pos, {N});
  }
  Cost cost() const {
    return {7 * x.size(), detail::total_bytes(x, q_norm, k_norm, pos), detail::total_bytes(y, rstd)};
  }
  auto outputs() const { return std::array{y, rstd}; }
};
// dy is rotated back, then goes through RmsnormBwd: dq_norm and dk_norm are sums over rows ascending (n, then head).
struct QkNormRopeBwd {
  Tensor dx;                // act [N, H+K, D] out, strides as in QkNormRopeFwd; may be dy (in place)
  Tensor dq_norm, dk_norm;  // stat [D] acc
  Tensor dy, x;             // act [N, H+K, D], strides as dx
  Tensor q_norm, k_norm;    // act [D]
  Tensor rstd;              // stat [N, H+K]
  Tensor table;             // stat [positions, D]
  Tensor pos;               // i32 [N]
  int64_t q_heads;          // H
  void check(Contract& c) const {
    const int64_t N = x.shape[0], heads = x.shape[1], D = x.shape[2];
    c.act("x", x, {N, heads, D}, c.strided);
    c.that(D % 2 == 0, "x is ", x, ", expected an even head dim");
    c.that(0 <= q_heads && q_heads <= heads, q_heads, " of the heads of x, ", x, ", are of queries");
    c.act("dx", dx, {N, heads, D}, c.strided);
    c.act("dy", dy, {N, heads, D}, c.strided);
    c.stat("dq_norm", dq_norm, {D});
    c.stat("dk_norm", dk_norm, {D});
    c.stat("rstd", rstd, {N, heads});
    c.act("q_norm", q_norm, {D});
    c.act("k_norm", k_norm, {D});
    c.stat("table", table, {table.shape[0], D});
    c.index("pos", pos, {N});
  }
  Cost cost() const {
    return {13 * x.size(), detail::total_bytes(dy, x, q_norm, k_norm, rstd, pos, dq_norm, dk_norm),
            detail::total_bytes(dx, dq_norm, dk_norm)};
  }
  auto outputs() const { return std::array{dx, dq_norm, dk_norm}; }
};
// y = silu(gate) * up, silu(g) = g / (1 + exp(-g))
struct SwigluFwd {
  Tensor y;        // act [N, F] out
  Tensor gate_up;  // act [N, 2F]: gate in the first F columns, up in the rest
  void check(Contract& c) const {
    const int64_t N = y.shape[0], F = y.shape[1];
    c.act("y", y, {N, F});
    c.act("gate_up", gate_up, {N, 2 * F});
  }
  Cost cost() const { return {5 * y.size(), detail::total_bytes(gate_up), detail::total_bytes(y)}; }
  auto outputs() const { return std::array{y}; }
};
struct SwigluBwd {
  Tensor dgate_up;  // act [N, 2F] out; may be gate_up (in place)
  Tensor dy;        // act [N, F]
  Tensor gate_up;   // act [N, 2F]
  void check(Contract& c) const {
    const int64_t N = dy.shape[0], F = dy.shape[1];
    c.act("dgate_up", dgate_up, {N, 2 * F});
    c.act("dy", dy, {N, F});
    c.act("gate_up", gate_up, {N, 2 * F});
  }
  Cost cost() const { return {12 * dy.size(), detail::total_bytes(dy, gate_up), detail::total_bytes(dgate_up)}; }
  auto outputs() const { return std::array{dgate_up}; }
};

// ---- logits: log-probs, losses, sampling

// z = logits / temperature; lse = max z + log(sum exp(z - max)); logprob = z[target] - max - log(sum); the entropy of
// the distribution is log(sum) - sum((z - max) exp(z - max)) / sum.  One function computes these for sampler and
// learner.
struct Logprob {
  Tensor logprob;  // stat [R] out
  Tensor entropy;  // stat [R] out
  Tensor logits;   // act [R, V]
  Tensor target;   // i32 [R], each in [0, V)
  float temperature;
  void check(Contract& c) const {
    const int64_t R = logits.shape[0];
    c.act("logits", logits, {R, logits.shape[1]});
    c.stat("logprob", logprob, {R});
    c.stat("entropy", entropy, {R});
    c.index("target", target, {R});
    c.that(temperature > 0, "temperature is ", temperature, ", expected more than 0");
  }
  Cost cost() const {
    return {6 * logits.size(), detail::total_bytes(logits, target), detail::total_bytes(logprob, entropy)};
  }
  auto outputs() const { return std::array{logprob, entropy}; }
};

// How much two distributions over the vocabulary have in common: p and q are the softmax of logits / temperature,
//   overlap = sum_v min(p_v, q_v)                 the part of draws from q that speculative sampling would accept for p
//   mass    = sum_{v in S} min(q_v, p_v / lambda)  the same for rejection with a budget (OBRS, Jackpot); S: every id,
//   or
//                                                  with top_k those among the top_k largest logits of both (ties: lower
//                                                  id first), which bounds it from below
// The maxima and sums of exponentials are those of Logprob.  Over every id the sums are computed as 1 - the row sum of
// max(q - p, 0), so that equal logits give exactly 1; over top_k ids as one chain, ids ascending.
struct OverlapProbs {
  Tensor overlap, mass;       // stat [R] out
  Tensor p_logits, q_logits;  // act [R, V]
  float temperature, lambda;  // above 0
  int32_t top_k;              // 0: off
  void check(Contract& c) const {
    const int64_t R = p_logits.shape[0], V = p_logits.shape[1];
    c.act("p_logits", p_logits, {R, V});
    c.act("q_logits", q_logits, {R, V});
    c.stat("overlap", overlap, {R});
    c.stat("mass", mass, {R});
    c.that(temperature > 0 && lambda > 0 && top_k >= 0, "temperature, lambda and top_k are ", temperature, ", ", lambda,
           ", ", top_k, ", expected > 0, > 0, >= 0");
  }
  Cost cost() const {
    return {18 * p_logits.size(), detail::total_bytes(p_logits, q_logits), detail::total_bytes(overlap, mass)};
  }
  auto outputs() const { return std::array{overlap, mass}; }
};

// The loss of one token as a function of its log-prob lp (token_loss.h states the formulas and their sources).
enum class PolicyLoss : int32_t { nll, ppo, gspo, cispo };
enum class KlLoss : int32_t { none, k1, k2, k3, exact };
struct LossSpec {
  PolicyLoss policy = PolicyLoss::nll;
  KlLoss kl = KlLoss::none;
  float clip_low = 0.2f, clip_high = 0.2f;  // ratio kept in [1 - clip_low, 1 + clip_high]
  float clip_c = 0;                         // dual clip for negative advantages; 0: off
  float kl_coef = 0, entropy_coef = 0;
  float temperature = 1;
};
// Row r adds weight * policy loss + kl_weight * (kl_coef * kl - entropy_coef * entropy) to the loss.  Overwrites the
// logits by the gradient of that sum with respect to them.
struct LogitsLoss {
  Tensor logprob;      // stat [R] out, as Logprob
  Tensor entropy;      // stat [R] out, as Logprob
  Tensor loss;         // stat [R] out: policy loss before the weight
  Tensor kl;           // stat [R] out: the KL estimate before the coefficient; 0 without KL
  Tensor clipped;      // i32 [R] out: 1 ratio clipped (the clipped branch is the larger loss), 2 dual clip, else 0
  Tensor logits;       // act [R, V] in; out: d loss / d logits
  Tensor target;       // i32 [R]
  Tensor weight;       // stat [R]: every per-token factor but the advantage, denominator included
  Tensor kl_weight;    // stat [R]: the same for the KL and entropy terms
  Tensor advantage;    // stat [R]; read by all but nll
  Tensor old_logprob;  // stat [R]; NaN: this pass's own log-prob, a constant (ratio exactly 1)
  Tensor log_ratio;    // stat [R] or absent; gspo: the sequence's mean log-ratio, a constant
  Tensor ref_logprob;  // stat [R] or absent; k1, k2, k3
  Tensor ref_logits;   // act [R, V] or absent; exact
  LossSpec spec;
  void check(Contract& c) const {
    const int64_t R = logits.shape[0], V = logits.shape[1];
    const bool gspo = spec.policy == PolicyLoss::gspo;
    c.act("logits", logits, {R, V});
    for (const auto& [name, t] : {std::pair{"logprob", &logprob},
                                  {"entropy", &entropy},
                                  {"loss", &loss},
                                  {"kl", &kl},
                                  {"weight", &weight},
                                  {"kl_weight", &kl_weight}})
      c.stat(name, *t, {R});
    c.index("clipped", clipped, {R});
    c.index("target", target, {R});
    if (spec.policy != PolicyLoss::nll) {
      c.stat("advantage", advantage, {R});
      gspo ? c.stat("log_ratio", log_ratio, {R}) : c.stat("old_logprob", old_logprob, {R});
    }
    if (spec.kl == KlLoss::exact) c.act("ref_logits", ref_logits, {R, V});
    if (spec.kl != KlLoss::none && spec.kl != KlLoss::exact) c.stat("ref_logprob", ref_logprob, {R});
    c.that(spec.temperature > 0, "temperature is ", spec.temperature, ", expected more than 0");
  }
  Cost cost() const {
    return {10 * logits.size(),
            detail::total_bytes(logits, target, weight, kl_weight, advantage, old_logprob, log_ratio, ref_logprob,
                                ref_logits),
            detail::total_bytes(logits, logprob, entropy, loss, kl, clipped)};
  }
  auto outputs() const { return std::array{logprob, entropy, loss, kl, logits}; }
};

// Draws a token per row from softmax(logits / temperature), restricted to the top_k largest logits (ties: lower id
// first) and then to the smallest set of largest probabilities that reaches top_p.  Gumbel-max: argmax of z -
// log(-log(u)), lower id on ties, with u = uniform_open(rng_word(key, uid, position, id)).  temperature 0: argmax of
// the logits, log-prob and entropy 0.  The log-prob is that of the restricted, renormalised distribution; without
// restriction it is bitwise that of Logprob.
struct Sample {
  Tensor token;    // i32 [R] out
  Tensor logprob;  // stat [R] out
  Tensor logits;   // act [R, V]; scratch afterwards
  Tensor counter;  // i32 [R, 3]: uid low word, uid high word, position
  uint64_t key;    // rng_key
  float temperature;
  int32_t top_k;  // 0: off
  float top_p;    // 1: off
  void check(Contract& c) const {
    const int64_t R = logits.shape[0];
    c.act("logits", logits, {R, logits.shape[1]});
    c.index("token", token, {R});
    c.stat("logprob", logprob, {R});
    c.index("counter", counter, {R, 3});
    c.that(temperature >= 0 && top_k >= 0 && top_p > 0 && top_p <= 1, "temperature, top_k and top_p are ", temperature,
           ", ", top_k, ", ", top_p, ", expected >= 0, >= 0, (0, 1]");
  }
  Cost cost() const {
    return {8 * logits.size(), detail::total_bytes(logits, counter), detail::total_bytes(token, logprob)};
  }
  auto outputs() const { return std::array{token, logprob}; }
};

// ---- optimizer

// norm = sqrt(sum of squares).  Order: row sums (above) of blocks of 4096 elements in f32 chains, blocks added
// ascending in double.
inline int64_t norm_blocks(int64_t n) { return (n + 4095) / 4096; }
struct GlobalNorm {
  Tensor norm;  // stat [1] out
  Tensor sums;  // stat [norm_blocks(n)] out: of the blocks
  Tensor x;     // stat [n]
  void check(Contract& c) const {
    const int64_t n = x.shape[0];
    c.stat("norm", norm, {1});
    c.stat("sums", sums, {norm_blocks(n)});
    c.stat("x", x, {n});
  }
  Cost cost() const { return {2 * x.size(), detail::total_bytes(x, sums), detail::total_bytes(norm, sums)}; }
  auto outputs() const { return std::array{norm, sums}; }
};
// AdamW (Loshchilov & Hutter 2019), `master` in place of p where there is one, with g = grad * min(1, max_norm / norm):
//   m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
//   p -= lr (m c1 / (sqrt(v c2) + eps) + weight_decay p),  c1 = 1 / (1 - beta1^step), c2 = 1 / (1 - beta2^step)
//
// Moments in bf16 (beside act f32 or bf16) are computed in f32 and rounded up or down by chance, in proportion to the
// distance, so that their means are right: with beta2 = .999 a v that is rounded to nearest would never fall, since
// 1/1000 of it is less than half the distance to the next bf16.  Element e of the parameters (`first` is that of
// element 0) draws word = rng_word(key, 0, e >> 32, e mod 2^32): its low 16 bits are added to the bits of m, the high
// ones to those of v, and the low 16 bits of the sums dropped.  p moves by the moments before the rounding.
struct AdamW {
  Tensor p;        // act [n] acc; or Weight::packed, where grad, m, v and master are [O, I]; out where there is a
                   // master, whose rounding it then is
  Tensor m, v;     // stat or bf16, shape of grad, acc
  Tensor grad;     // stat [n] or [O, I]
  Tensor norm;     // stat [1]: of the whole gradient
  float max_norm;  // 0: no clipping
  float lr, beta1, beta2, eps, weight_decay;
  int64_t step;  // from 1
  uint64_t key = 0;
  int64_t first = 0;
  Tensor master{};  // stat, shape of grad, acc, or absent: the parameters that bf16 is too short for
  void check(Contract& c) const {
    const int64_t n = grad.shape[0], I = grad.shape[1];
    const bool of_weight = p.rank == 3;
    of_weight ? c.act("p", p, {weight_panels(n), I, kPanel}) : c.act("p", p, {n});
    const DType stat = p.dtype == DType::f64 ? DType::f64 : DType::f32;
    const DType moment = m.dtype == DType::bf16 ? DType::bf16 : stat;
    const auto like_grad = [&](const char* name, const Tensor& t, DType dtype) {
      of_weight ? c.tensor(name, t, dtype, {n, I}) : c.tensor(name, t, dtype, {n});
    };
    like_grad("grad", grad, stat);
    like_grad("m", m, moment);
    like_grad("v", v, moment);
    if (master) like_grad("master", master, stat);
    c.stat("norm", norm, {1});
    c.that(step >= 1, "step is ", step, ", expected 1 or more");
  }
  Cost cost() const {
    return {12 * grad.size(), detail::total_bytes(master ? master : p, m, v, grad),
            detail::total_bytes(p, m, v, master)};
  }
  auto outputs() const { return std::array{p, m, v}; }
};

// ---- the list

#define PARE_OPS(X)                     \
  X(upload, Upload)                     \
  X(download, Download)                 \
  X(zero, Zero)                         \
  X(accumulate, Accumulate)             \
  X(gather_rows, GatherRows)            \
  X(scatter_add_rows, ScatterAddRows)   \
  X(pack_weight, PackWeight)            \
  X(unpack_weight, UnpackWeight)        \
  X(embedding_fwd, EmbeddingFwd)        \
  X(embedding_bwd, EmbeddingBwd)        \
  X(rmsnorm_fwd, RmsnormFwd)            \
  X(rmsnorm_bwd, RmsnormBwd)            \
  X(linear_fwd, LinearFwd)              \
  X(linear_bwd_input, LinearBwdInput)   \
  X(linear_bwd_weight, LinearBwdWeight) \
  X(rope_fwd, RopeFwd)                  \
  X(rope_bwd, RopeBwd)                  \
  X(qk_norm_rope_fwd, QkNormRopeFwd)    \
  X(qk_norm_rope_bwd, QkNormRopeBwd)    \
  X(swiglu_fwd, SwigluFwd)              \
  X(swiglu_bwd, SwigluBwd)              \
  X(attn_fwd, AttnFwd)                  \
  X(attn_bwd, AttnBwd)                  \
  X(kv_write, KvWrite)                  \
  X(attn_paged, AttnPaged)              \
  X(attn_paged_mass, AttnPagedMass)     \
  X(kv_block_summary, KvBlockSummary)   \
  X(kv_block_select, KvBlockSelect)     \
  X(attn_block_select, AttnBlockSelect) \
  X(attn_blocks_fwd, AttnBlocksFwd)     \
  X(attn_blocks_bwd, AttnBlocksBwd)     \
  X(kv_copy_pages, KvCopyPages)         \
  X(copy_rows, CopyRows)                \
  X(kv_window_scores, KvWindowScores)   \
  X(kv_redundancy, KvRedundancy)        \
  X(kv_mass_scores, KvMassScores)       \
  X(kv_select, KvSelect)                \
  X(kv_compact, KvCompact)              \
  X(kv_merge, KvMerge)                  \
  X(logprob, Logprob)                   \
  X(overlap_probs, OverlapProbs)        \
  X(logits_loss, LogitsLoss)            \
  X(sample, Sample)                     \
  X(global_norm, GlobalNorm)            \
  X(adamw, AdamW)

struct Stream;

// Where kernels can be gathered and launched together, which costs the host one call in place of one for each.
class Graphs {
 public:
  virtual ~Graphs() = default;
  virtual void begin() = 0;  // of a piece of work: ops called with Stream::graphs are gathered
  // Its end: launches what was gathered.  False: some of it was launched before, one by one, as an op came in between
  // that must be in order with it and is no kernel.
  virtual bool launch(Stream) = 0;
  virtual void drop() = 0;  // in place of launch(): what was gathered and not launched is not wanted
};

struct Stream {
  void* handle = nullptr;  // cudaStream_t; unused on the CPU
  Graphs* graphs = nullptr;
};

struct Probe;  // ops/probe.h

struct Table {
  const char* name;
#define X(op, Args) void (*op)(const Args&, Stream);
  PARE_OPS(X)
#undef X
  const Memory* memory = &host_memory;  // of its tensors
  // Where calls return before the work is done, which is in order: page-locked memory of the host, from which an upload
  // is queued too (from other memory it may wait).  A download waits for all that was called.
  const Memory* staging = nullptr;
  std::unique_ptr<Graphs> (*graphs)() = nullptr;  // makes those of a Device; null: there are none
  std::string (*open)() = nullptr;  // says what the device is, or throws Error(Exit::usage): it cannot be used
  // Throws Error(Exit::usage): the opened device cannot compute attention with such heads.
  void (*expect_head_dim)(DType act, int64_t d) = nullptr;
  void (*range_begin)(const char* name) = nullptr;  // for a profiler: the name of all that is called up to range_end
  void (*range_end)() = nullptr;
  const Probe* probe = nullptr;  // what a benchmark asks of the device beside its ops
};

extern const Table table_ref;   // src/ref: naive loops, double accumulators; f64 and f32
extern const Table table_cpu;   // src/cpu: fast f32
extern const Table table_null;  // does nothing: planning, memory and FLOPs
extern const Table table_cuda;  // cuda/*.cu by nvcc: bf16 and f32
extern const Table table_emu;   // the same sources by the host compiler, on the CPU
// The same with linear layers by cuBLASLt, in an order of sums of its own that depends on the number of rows: whatever
// reads a weight takes it row by row, [16 ceil(O / 16)][I], zeros past the last output, in the memory of its panels.
extern const Table table_cuda_fast, table_emu_fast;

}  // namespace pare
