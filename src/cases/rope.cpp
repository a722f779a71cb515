// Rotary position embedding, alone and behind QK-norm.

#include "ops/rope.h"

#include <numeric>

#include "cases/layouts.h"

namespace pare::cases {

namespace {

// The rows of a text, one after the other, or at random positions.
const Dim kPositions = edge("positions", "0: rows at positions 0, 1, ...; else at random ones below this");
struct Positions {
  Tensor table, pos;
};
Positions positions(Operands& o, const Dims& d) {
  const int64_t N = d["N"], random = d["positions"];
  std::vector<int32_t> pos(static_cast<size_t>(N));
  std::iota(pos.begin(), pos.end(), 0);
  return {o.stat_in("table", {random ? random : N, d["D"]}),
          o.index("pos", {N}, random ? below("pos", N, random) : pos)};
}

Call rope_fwd(Operands& o, const Dims& d) {
  const auto [table, pos] = positions(o, d);
  return RopeFwd{o.inout("x", {d["N"], d["H"], d["D"]}, d["gap"]), table, pos};
}
Call rope_bwd(Operands& o, const Dims& d) {
  const auto [table, pos] = positions(o, d);
  return RopeBwd{o.inout("dx", {d["N"], d["H"], d["D"]}, d["gap"]), table, pos};
}

Call qk_norm_rope_fwd(Operands& o, const Dims& d) {
  const int64_t N = d["N"], h = d["H"] + d["K"], D = d["D"], gap = d["gap"];
  const auto [table, pos] = positions(o, d);
  return QkNormRopeFwd{o.out("y", {N, h, D}, gap),
                       o.stat_out("rstd", {N, h}),
                       o.in("x", {N, h, D}, gap ? gap + 1 : 0),
                       o.in("q_norm", {D}),
                       o.in("k_norm", {D}),
                       table,
                       pos,
                       d["H"],
                       1e-6f};
}
Call qk_norm_rope_bwd(Operands& o, const Dims& d) {
  const int64_t N = d["N"], h = d["H"] + d["K"], D = d["D"], gap = d["gap"];
  const auto [table, pos] = positions(o, d);
  QkNormRopeBwd a{};
  a.dx = d["in_place"] ? o.inout("dx", {N, h, D}, gap) : o.out("dx", {N, h, D}, gap);
  a.dy = d["in_place"] ? a.dx : o.in("dy", {N, h, D}, gap ? gap + 2 : 0);
  if (!d["frozen"]) {
    a.dq_norm = o.stat_inout("dq_norm", {D});
    a.dk_norm = o.stat_inout("dk_norm", {D});
  }
  if (!d["frozen"]) a.parts = o.stat_scratch("parts", {norm_parts(N * h), 2, D});
  a.x = o.in("x", {N, h, D}, gap);
  a.rstd = o.stat_in("rstd", {N, h}, positive());
  a.q_norm = o.in("q_norm", {D});
  a.k_norm = o.in("k_norm", {D});
  a.table = table;
  a.pos = pos;
  a.q_heads = d["H"];
  return a;
}

Call kv_write(Operands& o, const Dims& d) {
  const Sequences s(d, d["T"]);
  KvWrite a{};
  a.k_pages = o.inout("k_pages", s.pages.k(d));
  a.v_pages = o.inout("v_pages", s.pages.v(d));
  const int64_t K = d["K"], heads = d["H"] + K, D = d["D"], inputs = d["inputs"];
  if (inputs) {
    LinearFwd& l = a.product;
    l = {o.out("y", {s.rows, (heads + K) * D}, d["gap"]),
         o.in("x", {s.rows, inputs}),
         o.weight("w", (heads + K) * D, inputs),
         o.in("bias", {(heads + K) * D}),
         {}};
    const Tensor table = o.stat_in("table", {11, D}), at = o.index("at", {s.rows}, below("at", s.rows, 11));
    a.rotation.rope = {l.y.columns(0, heads * D).heads(heads), table, at};
    a.k = a.rotation.last_heads(K);
    a.v = l.y.columns(heads * D, K * D).heads(K);
  } else if (d["rope"]) {
    const Tensor table = o.stat_in("table", {11, d["D"]}), at = o.index("at", {s.rows}, below("at", s.rows, 11));
    a.rotation.rope = {o.inout("x", {s.rows, d["H"] + d["K"], d["D"]}, d["gap"]), table, at};
    a.k = a.rotation.last_heads(d["K"]);
  } else {
    a.k = o.in("k", {s.rows, d["K"], d["D"]}, d["gap"]);
  }
  if (!inputs) a.v = o.in("v", {s.rows, d["K"], d["D"]}, d["gap"]);
  a.page_table = s.put_table(o, d);
  a.queries = s.put_queries(o);
  if (!d["pos"]) return a;
  a.pos_pages = o.index_inout("pos_pages", s.pages.beside(d), s.pages.positions(d["K"]));
  a.pos = o.index("pos", {s.rows}, below("pos", s.rows, 1000));
  return a;
}

}  // namespace

std::vector<OpCase> rope_cases() {
  const Dim dim{"D", 128, "head dim, even"};
  const std::vector<Dim> rope = {kRows, {"H", 14, "heads, of queries and keys"}, dim, kPositions, kGap};
  const std::vector<std::string> heads =
      with({"N=1,H=1,D=2", "N=3,H=2,D=8", "N=5,H=3,D=20,gap=7", "N=7,H=1,D=64,gap=16", "N=2,H=7,D=32,gap=1"},
           {"positions=11"});
  const std::vector<Dim> qk = {kRows, {"H", 12, "query heads", 0}, {"K", 2, "key heads"}, dim, kPositions, kGap};
  const std::vector<std::string> both =
      with({"N=1,H=1,K=1,D=2", "N=3,H=2,K=1,D=8", "N=5,H=3,K=1,D=20,gap=7", "N=7,H=4,K=2,D=64,gap=16",
            "N=3,H=5,K=3,D=34,gap=1", "N=2,H=0,K=3,D=256", "N=271,H=2,K=1,D=32,gap=32"},
           {"positions=11"});
  const std::vector<Dim> write =
      paged_dims() + std::vector{edge("pos", "1: with positions"), edge("rope", "1: behind RoPE"),
                                 Dim{"inputs", 1536, "of a product and RoPE in front; 0: none", 0}};
  return {{"kv_write", write, with(paged_sizes(), {"inputs=0", "inputs=0,pos=1", "inputs=0,rope=1", "inputs=40,pos=1"}),
           kv_write},
          {"rope_fwd", rope, heads, rope_fwd},
          {"rope_bwd", rope, heads, rope_bwd},
          {"qk_norm_rope_fwd", qk, both, qk_norm_rope_fwd},
          {"qk_norm_rope_bwd", qk + std::vector{kInPlace, kFrozen},
           with(both, {"", "in_place=1", "in_place=1,frozen=1"}), qk_norm_rope_bwd}};
}

}  // namespace pare::cases
