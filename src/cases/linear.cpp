// Weights and linear layers.
#include "ops/linear.h"

#include "cases/cases.h"

namespace pare::cases {

namespace {

// Rows [first, first + count) of a weight, or all.
int64_t part(const Dims& d) { return d["rows"] ? d["rows"] : d["N"]; }
Call pack_weight(Operands& o, const Dims& d) {
  return PackWeight{o.weight("w", d["N"], d["K"], Use::inout), o.in("rows", {part(d), d["K"]}), d["first"]};
}
Call unpack_weight(Operands& o, const Dims& d) {
  return UnpackWeight{o.out("rows", {part(d), d["K"]}), o.weight("w", d["N"], d["K"]), d["first"]};
}

Call linear_fwd(Operands& o, const Dims& d) {
  choose_kernel(o, d);
  const int64_t M = d["M"], N = d["N"], K = d["K"], gap = d["gap"];
  LinearFwd a{};
  if (d["swiglu"]) {
    a.y = o.scratch("y", {M, N});
    a.swiglu = o.out("swiglu", {M, N / 2});
  } else {
    a.y = d["in_place"] ? o.inout("y", {M, N}, gap) : o.out("y", {M, N}, gap);
  }
  a.x = o.in("x", {M, K}, gap);
  a.w = o.weight("w", N, K);
  if (d["bias"]) a.bias = o.in("bias", {N});
  if (d["residual"]) a.residual = d["in_place"] ? a.y : o.in("residual", {M, N}, gap ? gap + 1 : 0);
  if (const int64_t n = linear_sums(M, N, K); n > 0 && o.act == DType::bf16 && d["apart"])
    a.parts = {o.stat_scratch("sums", {n}), o.index("arrivals", {kLinearTiles}, std::vector<int32_t>(kLinearTiles))};
  if (d["norm"]) {
    if (!a.parts.arrivals) a.parts.arrivals = o.index("arrivals", {kLinearTiles}, std::vector<int32_t>(kLinearTiles));
    a.norm = {.y = o.out("normed", {M, N}), .rstd = o.stat_out("rstd", {M}), .w = o.in("gain", {N}), .eps = 1e-6f};
  }
  if (d["sums"]) {
    a.parts = {};
    a.vocab_sums = {.tiles = o.stat_scratch("tiles", {M, vocab_tiles(N) + 1, 3}), .target = {}, .only = d["sums"] == 2};
  }
  return a;
}
Call linear_bwd_input(Operands& o, const Dims& d) {
  choose_kernel(o, d);
  const int64_t M = d["M"], N = d["N"], K = d["K"], gap = d["gap"];
  const bool accumulate = d["accumulate"];
  LinearBwdInput a{accumulate ? o.inout("dx", {M, K}, gap) : o.out("dx", {M, K}, gap), o.in("dy", {M, N}, gap),
                   o.weight("w", N, K), accumulate};
  if (const int64_t n = linear_turn_sums(M, K, N); n > 0 && o.act == DType::bf16 && d["in_turn"] && !accumulate)
    a.parts = {o.stat_scratch("sums", {n}), o.index("arrivals", {kLinearTiles}, std::vector<int32_t>(kLinearTiles))};
  return a;
}
Call linear_bwd_weight(Operands& o, const Dims& d) {
  choose_kernel(o, d);
  const int64_t M = d["M"], N = d["N"], K = d["K"], gap = d["gap"];
  LinearBwdWeight a{};
  a.dw = o.stat_inout("dw", {N, K});
  if (d["bias"]) a.dbias = o.stat_inout("dbias", {N});
  a.dy = o.in("dy", {M, N}, gap);
  a.x = o.in("x", {M, K}, gap);
  return a;
}

}  // namespace

std::vector<OpCase> linear_cases() {
  const std::vector<Dim> weight = {{"N", 17920, "outputs"},
                                   {"K", 1536, "inputs"},
                                   edge("first", "the first row that is moved"),
                                   edge("rows", "rows that are moved; 0: all")};
  // All rows, and some that begin and end within panels.
  const std::vector<std::string> parts = {"N=1,K=1",
                                          "N=3,K=17",
                                          "N=3,K=17,first=1,rows=2",
                                          "N=16,K=64",
                                          "N=16,K=64,first=5,rows=8",
                                          "N=17,K=65",
                                          "N=17,K=65,first=5,rows=9",
                                          "N=33,K=31",
                                          "N=33,K=31,first=11,rows=16",
                                          "N=15,K=63",
                                          "N=15,K=63,first=5,rows=7",
                                          "N=67,K=130",
                                          "N=67,K=130,first=22,rows=32",
                                          "N=48,K=40",
                                          "N=48,K=40,first=16,rows=23",
                                          "N=129,K=19",
                                          "N=129,K=19,first=43,rows=61"};
  const Dim m{"M", 256, "rows (tokens)"}, n{"N", 17920, "outputs"}, k{"K", 1536, "inputs"};
  const Dim bias{"bias", 0, "1: with a bias", 0};
  return {{"pack_weight", weight, parts, pack_weight},
          {"unpack_weight", weight, parts, unpack_weight},
          {"linear_fwd",
           {m,
            n,
            k,
            bias,
            {"residual", 0, "1: adds a residual", 0},
            kKernel,
            kGap,
            kInPlace,
            edge("apart", "1: memory for parts of k apart, as in decoding", 1),
            edge("sums", "1: y are logits, whose tiles are summed up; 2: and which are not wanted themselves"),
            edge("swiglu", "1: SwiGLU of y, which is not wanted itself"),
            edge("norm", "1: the norm of y, too")},
           {"M=1,N=1,K=1", "M=1,N=3,K=17,bias=1", "M=2,N=16,K=64,residual=1", "M=3,N=17,K=65,gap=5,bias=1,residual=1",
            "M=5,N=33,K=31,residual=1,in_place=1", "M=13,N=15,K=63,gap=3,bias=1,residual=1,in_place=1",
            "M=17,N=67,K=130,bias=1", "M=65,N=48,K=40,gap=16,residual=1,in_place=1", "M=130,N=129,K=19,gap=1,bias=1",
            "M=3,N=17,K=65,sums=1", "M=66,N=520,K=72,sums=1", "M=5,N=34,K=65,swiglu=1", "M=66,N=224,K=72,swiglu=1",
            "M=5,N=33,K=65,residual=1,norm=1", "M=16,N=72,K=2056,residual=1,in_place=1,norm=1"},
           linear_fwd},
          {"linear_bwd_input",
           {m,
            n,
            k,
            {"accumulate", 0, "1: adds to dx", 0},
            kKernel,
            kGap,
            edge("in_turn", "1: memory for parts of k that are added in turn, as for an LM head", 1)},
           {"M=1,N=1,K=1", "M=1,N=3,K=17", "M=2,N=16,K=64,accumulate=1", "M=3,N=17,K=65,gap=5,accumulate=1",
            "M=5,N=33,K=31,accumulate=1", "M=13,N=15,K=63,gap=3,accumulate=1", "M=17,N=67,K=130",
            "M=65,N=48,K=40,gap=16,accumulate=1", "M=130,N=129,K=19,gap=1"},
           linear_bwd_input},
          {"linear_bwd_weight",
           {m, n, k, bias, kKernel, kGap},
           {"M=1,N=1,K=1", "M=1,N=3,K=17,bias=1", "M=2,N=16,K=64", "M=3,N=17,K=65,gap=5,bias=1", "M=5,N=33,K=31",
            "M=13,N=15,K=63,gap=3,bias=1", "M=17,N=67,K=130,bias=1", "M=65,N=48,K=40,gap=16",
            "M=130,N=129,K=19,gap=1,bias=1"},
           linear_bwd_weight}};
}

}  // namespace pare::cases
