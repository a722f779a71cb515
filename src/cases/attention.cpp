// Attention of packed sequences.
#include "ops/attention.h"

#include "cases/layouts.h"

namespace pare::cases {

namespace {

// made: o and lse are inputs, what the op computes.
AttnFwd forward(Operands& o, const Dims& d, bool made) {
  choose_kernel(o, d);
  const Packed p(d);
  const int64_t N = p.rows, H = d["H"], K = d["K"], D = d["D"], gap = d["gap"];
  AttnFwd a{};
  a.o = made ? o.in("o", {N, H, D}, Fill(), gap) : o.out("o", {N, H, D});
  a.lse = made ? o.stat_in("lse", {N, H}, Fill()) : o.stat_out("lse", {N, H});
  a.q = o.in("q", {N, H, D}, gap);
  a.k = o.in("k", {N, K, D}, gap);
  a.v = o.in("v", {N, K, D}, gap);
  a.pk = p.parent_rows ? o.in("pk", {p.parent_rows, K, D}, gap ? gap + 8 : 0) : a.k;
  a.pv = p.parent_rows ? o.in("pv", {p.parent_rows, K, D}, gap ? gap + 8 : 0) : a.v;
  a.segments = p.put_segments(o);
  a.pairs = p.pairs;
  a.scale = scale(d);
  a.extent = attn_extent(p.segments, p.parent_rows > 0, p.dense_pairs);
  if (!p.lists.empty()) a.lists = o.index("lists", {std::ssize(p.lists) / K, K}, p.lists);
  if (p.budget.empty()) return a;
  a.blocks = o.index("blocks", {N, K, p.room},
                     d.own.blocks.empty() ? random_blocks(p.seen, p.budget, K, p.room, d["block"]) : d.own.blocks);
  a.budget = p.put_budget(o);
  a.block = d.i32("block");
  return a;
}

Call attn_fwd(Operands& o, const Dims& d) { return forward(o, d, false); }
Call attn_bwd(Operands& o, const Dims& d) {
  const AttnFwd f = forward(o, d, true);
  o.compute(f);
  const int64_t gap = d["gap"];
  const auto like = [](const Tensor& t) { return Shape{t.shape[0], t.shape[1], t.shape[2]}; };
  const bool apart = Packed(d).parent_rows > 0;
  AttnBwd a{};
  a.dq = o.out("dq", like(f.q), gap);
  a.dk = o.inout("dk", like(f.k), gap);
  a.dv = o.inout("dv", like(f.v), gap);
  a.dpk = apart ? o.inout("dpk", like(f.pk), gap ? gap + 8 : 0) : a.dk;
  a.dpv = apart ? o.inout("dpv", like(f.pv), gap ? gap + 8 : 0) : a.dv;
  a.d_o = o.in("do", like(f.o), gap);
  a.o = f.o;
  a.lse = f.lse;
  a.q = f.q;
  a.k = f.k;
  a.v = f.v;
  a.pk = f.pk;
  a.pv = f.pv;
  a.segments = f.segments;
  a.pairs = f.pairs;
  a.scale = f.scale;
  a.lists = f.lists;
  a.blocks = f.blocks;
  a.budget = f.budget;
  a.block = f.block;
  a.extent = f.extent;
  if (a.q.dtype == DType::bf16)
    a.work = o.stat_scratch("work", {attn_bwd_work(f.q.shape[0], apart ? f.pk.shape[0] : 0, f.k.shape[1], f.q.shape[2],
                                                   f.segments.shape[0])});
  return a;
}

}  // namespace

std::vector<OpCase> attention_cases() {
  const Dim budget{"budget", 0, "blocks that a row reads; 0: everything", 0};
  const std::vector<Dim> dims = packed_dims() + std::vector{budget, kBlock, kKernel, kFirstBlocks, kLastBlocks};
  const std::vector<std::string> sizes = packed_sizes(false) + packed_sizes(true);
  return {{"attn_fwd", dims, sizes, attn_fwd}, {"attn_bwd", dims, sizes, attn_bwd}};
}

}  // namespace pare::cases
