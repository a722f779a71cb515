
#include "ops/optimizer.h"

#include "cases/cases.h"

namespace pare::cases {

namespace {

Call square_sums(Operands& o, const Dims& d) {
  const int64_t n = d["n"], run = d["run"] ? d["run"] : n;
  return SquareSums{o.stat_out("sums", {norm_blocks(n, run)}), o.stat_in("x", {n}), run};
}

// Where act is bf16 there is an f32 master.
Call adamw(Operands& o, const Dims& d) {
  const int64_t outputs = d["outputs"], n = d["n"];
  const Shape shape = outputs ? Shape{outputs, n} : Shape{n};
  const auto moment = [&](const char* name, const Fill& fill) {
    return d["bf16_moments"] ? o.inout_bf16(name, shape, fill) : o.stat_inout(name, shape, fill);
  };
  AdamW a{};
  a.p = outputs ? o.weight("p", outputs, n, Use::inout).packed : o.inout("p", shape);
  a.m = moment("m", scaled(1));
  a.v = moment("v", positive(0.01));
  a.grad = o.stat_in("grad", shape);
  a.norm = o.stat_in("norm", {1}, Fill({d.share("norm")}, true));
  a.max_norm = d.share("max_norm");
  a.lr = 1e-2f;
  a.beta1 = 0.9f;
  a.beta2 = 0.999f;
  a.eps = 1e-8f;
  a.weight_decay = d.share("weight_decay");
  a.step = d["step"];
  a.key = 0x123456789abcdef;
  a.first = d["first"];
  if (o.act == DType::bf16) a.master = o.stat_inout("master", shape);
  return a;
}

}  // namespace

std::vector<OpCase> optimizer_cases() {
  return {{"square_sums",
           {{"n", 1 << 25, "parameters"}, edge("run", "elements after which blocks begin anew; 0: n")},
           {"n=1", "n=17", "n=4095", "n=4096", "n=4097", "n=9001", "n=270001", "n=100,run=7", "n=8193,run=4096",
            "n=30000,run=4097", "n=30000,run=10000", "n=5000,run=6000"},
           square_sums},
          {"adamw",
           {{"n", 1 << 25, "parameters"},
            {"bf16_moments", 0, "1: moments in bf16", 0},
            edge("outputs", "0: a vector of n; else a weight of n inputs"),
            edge("step", "from 1", 7),
            edge("norm", "of all gradients, in hundredths", 50),
            edge("max_norm", "in hundredths", 100),
            edge("weight_decay", "in hundredths", 1),
            edge("first", "the first element's number")},
           {"n=1,step=1,norm=200,max_norm=0,weight_decay=0", "n=17,step=1,norm=400", "n=67,step=3,weight_decay=10",
            "n=129,step=1000,norm=0,weight_decay=0", "outputs=1,n=1,step=1,norm=200,max_norm=0,weight_decay=0",
            "outputs=35,n=67,step=3,norm=400,weight_decay=10", "outputs=16,n=130,step=2,norm=400,weight_decay=10",
            "n=67,bf16_moments=1,step=3,norm=400,weight_decay=10",
            "n=200,bf16_moments=1,step=3,norm=400,weight_decay=10,first=4294967235",
            "outputs=35,n=67,bf16_moments=1,step=1,norm=400,weight_decay=10,first=5",
            "outputs=16,n=128,bf16_moments=1,step=9,norm=0,max_norm=0,weight_decay=0,first=64"},
           adamw}};
}

}  // namespace pare::cases
