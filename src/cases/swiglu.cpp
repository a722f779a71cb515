
#include "ops/swiglu.h"

#include "cases/cases.h"

namespace pare::cases {

namespace {

Fill gate_up(const Dims& d) { return scaled(static_cast<double>(d["scale"])); }
Call swiglu_fwd(Operands& o, const Dims& d) {
  return SwigluFwd{o.out("y", {d["N"], d["F"]}), o.in("gate_up", {d["N"], 2 * d["F"]}, gate_up(d))};
}
Call swiglu_bwd(Operands& o, const Dims& d) {
  const Shape shape{d["N"], 2 * d["F"]};
  SwigluBwd a{};
  // In place the gradient takes the place of the values: only then it has the name of these.
  a.gate_up = d["in_place"] ? o.inout("gate_up", shape, gate_up(d)) : o.in("gate_up", shape, gate_up(d));
  a.dgate_up = d["in_place"] ? a.gate_up : o.out("dgate_up", shape);
  a.dy = o.in("dy", {d["N"], d["F"]});
  return a;
}

}  // namespace

std::vector<OpCase> swiglu_cases() {
  const Dim width{"F", 8960, "feed-forward width"}, scale = edge("scale", "of gate and up", 1);
  // Up to the ends of exp's range.
  const std::vector<std::string> sizes = {"N=1,F=1", "N=3,F=15", "N=2,F=16,scale=10", "N=5,F=17,scale=50",
                                          "N=7,F=65,scale=3"};
  return {{"swiglu_fwd", {kRows, width, scale}, sizes, swiglu_fwd},
          {"swiglu_bwd", {kRows, width, scale, kInPlace}, with(sizes, {"", "in_place=1"}), swiglu_bwd}};
}

}  // namespace pare::cases
