// RMSNorm.

#include "ops/norm.h"

#include "cases/cases.h"

namespace pare::cases {

namespace {

Call rmsnorm_fwd(Operands& o, const Dims& d) {
  const Shape shape{d["N"], d["C"]};
  RmsnormFwd a{};
  if (!d["in_place"]) a.y = o.out("y", shape, d["gap"]);
  a.x = d["in_place"] ? a.y = o.inout("x", shape, d["gap"]) : o.in("x", shape, d["gap"]);
  a.rstd = o.stat_out("rstd", {d["N"]});
  a.w = o.in("w", {d["C"]});
  a.eps = 1e-6f;
  return a;
}
Call rmsnorm_bwd(Operands& o, const Dims& d) {
  const Shape shape{d["N"], d["C"]};
  RmsnormBwd a{};
  a.accumulate = d["accumulate"];
  a.dx = d["in_place"] || a.accumulate ? o.inout("dx", shape, d["gap"]) : o.out("dx", shape, d["gap"]);
  a.dy = d["in_place"] ? a.dx : o.in("dy", shape, d["gap"]);
  if (!d["frozen"]) {
    a.dw = o.stat_inout("dw", {d["C"]});
    a.parts = o.stat_scratch("parts", {norm_strands(d["N"], o.act), d["C"]});
  }
  a.x = o.in("x", shape, d["gap"]);
  a.w = o.in("w", {d["C"]});
  a.rstd = o.stat_in("rstd", {d["N"]}, positive());
  return a;
}

}  // namespace

std::vector<OpCase> norm_cases() {
  const std::vector<std::string> apart = {"N=1,C=1", "N=3,C=17", "N=5,C=64,gap=3", "N=17,C=128"},
                                 shared = {"N=7,C=65", "N=2,C=130,gap=5", "N=259,C=20,gap=7"};
  const std::vector<std::string> sizes = apart + with(shared, {"in_place=1"});
  const std::vector<std::string> backward = sizes + with(apart, {"accumulate=1", "frozen=1"});
  return {{"rmsnorm_fwd", {kRows, kWidth, kGap, kInPlace}, sizes, rmsnorm_fwd},
          {"rmsnorm_bwd",
           {kRows, kWidth, kGap, kInPlace, edge("accumulate", "1: adds to dx"), kFrozen},
           backward,
           rmsnorm_bwd}};
}

}  // namespace pare::cases
