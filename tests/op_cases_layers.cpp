// Rows of the op test: RMSNorm, linear layers, RoPE, QK-norm, SwiGLU.
#include "op_cases.h"

namespace pare::test {

namespace {

struct Norm {
  int64_t rows, width, gap;
  bool in_place;
};
const Norm kNorms[] = {{1, 1, 0, false},  {3, 17, 0, false},   {5, 64, 3, false}, {7, 65, 0, true},
                       {2, 130, 5, true}, {17, 128, 0, false}, {259, 20, 7, true}};

std::string name(const Norm& s) { return cat("N", s.rows, "_C", s.width, "_gap", s.gap, s.in_place ? "_inplace" : ""); }
Shape shape(const Norm& s) { return {s.rows, s.width}; }

void add_norm_fwd(std::vector<OpCase>& cases, const Norm& s) {
  cases.push_back({"rmsnorm_fwd", name(s), [s](OpRun& r) {
                     RmsnormFwd a{};
                     a.y = s.in_place ? r.inout("x", shape(s), s.gap) : r.out("y", shape(s), s.gap);
                     a.x = s.in_place ? a.y : r.in("x", shape(s), s.gap);
                     a.rstd = r.out("rstd", {s.rows}), a.w = r.in("w", {s.width}), a.eps = 1e-6f;
                     r.call(&Table::rmsnorm_fwd, a);
                     // The squares have one sign, so rstd is relatively exact to the roundings of their sum.
                     const double relative = lanes(double(s.width));
                     std::vector<double> rstd = r.values("rstd"), y = r.values(s.in_place ? "x" : "y");
                     for (double& x : rstd) x = std::fabs(x) * relative;
                     for (double& x : y) x = std::fabs(x) * (relative + 4 * kRound);
                     r.bound("rstd", rstd);
                     r.bound(s.in_place ? "x" : "y", y);
                   }});
}

void add_norm_bwd(std::vector<OpCase>& cases, const Norm& s, bool accumulate) {
  const bool in_place = s.in_place && !accumulate;
  cases.push_back({"rmsnorm_bwd", cat(name(s), accumulate ? "_acc" : ""), [s, in_place, accumulate](OpRun& r) {
                     std::vector<double> rstd = normal("rstd", s.rows, 0.1);
                     for (double& x : rstd) x = static_cast<float>(1 + std::fabs(x));
                     RmsnormBwd a{};
                     a.dx = in_place || accumulate ? r.inout("dx", shape(s), s.gap) : r.out("dx", shape(s), s.gap);
                     a.dw = r.inout("dw", {s.width});
                     a.dy = in_place ? a.dx : r.in("dy", shape(s), s.gap);
                     a.x = r.in("x", shape(s), s.gap), a.w = r.in("w", {s.width});
                     a.rstd = r.in("rstd", {s.rows}, rstd), a.accumulate = accumulate;
                     r.call(&Table::rmsnorm_bwd, a);
                     // dx: terms dy*w and xh*mean of size below 4*4 and 4*16, times rstd < 2.  dw: a chain of `rows`
                     // products below 4*4*2.
                     r.bound("dx", lanes(double(s.width)) * 2 * (16 + 64));
                     r.bound("dw", chain(double(s.rows)) * 6 * std::sqrt(double(s.rows + 1)) * 8);
                   }});
}

struct Linear {
  int64_t rows, inputs, outputs, gap;
  bool bias, residual, in_place;
};
const Linear kLinears[] = {
    {1, 1, 1, 0, false, false, false},    {1, 17, 3, 0, true, false, false},   {2, 64, 16, 0, false, true, false},
    {3, 65, 17, 5, true, true, false},    {5, 31, 33, 0, false, true, true},   {13, 63, 15, 3, true, true, true},
    {17, 130, 67, 0, true, false, false}, {65, 40, 48, 16, false, true, true}, {130, 19, 129, 1, true, false, false}};

void add_linear(std::vector<OpCase>& cases, const Linear& s) {
  const std::string shape = cat("N", s.rows, "_I", s.inputs, "_O", s.outputs, s.gap ? "_strided" : "",
                                s.bias ? "_bias" : "", s.residual ? "_res" : "", s.in_place ? "_inplace" : "");
  // A chain of n products of two normals: its partial sums, and what is added, stay below 4 sqrt(n + 4).
  auto bound = [](int64_t n) { return chain(double(n)) * 4 * std::sqrt(double(n + 4)); };
  cases.push_back(
      {"linear_fwd", shape, [s, bound](OpRun& r) {
         LinearFwd a{};
         a.y = s.in_place ? r.inout("y", {s.rows, s.outputs}, s.gap) : r.out("y", {s.rows, s.outputs}, s.gap);
         a.x = r.in("x", {s.rows, s.inputs}, s.gap);
         a.w = r.weight("w", s.outputs, s.inputs);
         if (s.bias) a.bias = r.in("bias", {s.outputs});
         if (s.residual) a.residual = s.in_place ? a.y : r.in("residual", {s.rows, s.outputs}, s.gap + 1);
         r.call(&Table::linear_fwd, a);
         r.bound("y", bound(s.inputs));
       }});
  cases.push_back(
      {"linear_bwd_input", cat(shape, s.residual ? "_acc" : ""), [s, bound](OpRun& r) {
         LinearBwdInput a{};
         a.dx = s.residual ? r.inout("dx", {s.rows, s.inputs}, s.gap) : r.out("dx", {s.rows, s.inputs}, s.gap);
         a.dy = r.in("dy", {s.rows, s.outputs}, s.gap);
         a.w = r.weight("w", s.outputs, s.inputs);
         a.accumulate = s.residual;
         r.call(&Table::linear_bwd_input, a);
         r.bound("dx", bound(s.outputs));
       }});
  cases.push_back({"linear_bwd_weight", shape, [s, bound](OpRun& r) {
                     LinearBwdWeight a{};
                     a.dw = r.inout("dw", {s.outputs, s.inputs});
                     if (s.bias) a.dbias = r.inout("dbias", {s.outputs});
                     a.dy = r.in("dy", {s.rows, s.outputs}, s.gap), a.x = r.in("x", {s.rows, s.inputs}, s.gap);
                     r.call(&Table::linear_bwd_weight, a);
                     r.bound("dw", bound(s.rows));
                     if (s.bias) r.bound("dbias", bound(s.rows));
                   }});
  // All rows, and some that begin and end within panels.
  for (const bool all : {true, false}) {
    const int64_t first = all ? 0 : s.outputs / 3, rows = all ? s.outputs : s.outputs - first - s.outputs / 5;
    if (!all && rows == s.outputs) continue;
    const std::string part = cat("O", s.outputs, "_I", s.inputs, "_first", first, "_rows", rows);
    cases.push_back({"pack_weight", part, [s, first, rows](OpRun& r) {
                       r.call(&Table::pack_weight, PackWeight{r.inout_weight("w", s.outputs, s.inputs),
                                                              r.in("rows", {rows, s.inputs}), first});
                     }});
    cases.push_back({"unpack_weight", part, [s, first, rows](OpRun& r) {
                       r.call(&Table::unpack_weight,
                              UnpackWeight{r.out("rows", {rows, s.inputs}), r.weight("w", s.outputs, s.inputs), first});
                     }});
  }
}

void add_rope(std::vector<OpCase>& cases) {
  struct Rope {
    int64_t rows, heads, dim, gap;
  };
  for (const Rope& s : {Rope{1, 1, 2, 0}, {3, 2, 8, 0}, {5, 3, 20, 7}, {7, 1, 64, 16}, {2, 7, 32, 1}}) {
    const int64_t N = s.rows, h = s.heads, D = s.dim, gap = s.gap;
    const std::string shape = cat("N", N, "_h", h, "_D", D, gap ? "_strided" : "");
    auto body = [=](OpRun& r, bool backward) {
      const int64_t positions = 11;
      const Tensor x = r.inout("x", {N, h, D}, gap), table = r.in("table", {positions, D});
      const Tensor pos = r.index("pos", {N}, below("pos", N, positions));
      if (backward)
        r.call(&Table::rope_bwd, RopeBwd{x, table, pos});
      else
        r.call(&Table::rope_fwd, RopeFwd{x, table, pos});
      r.bound("x", 3 * kRound * 32);  // two products of normals, each below 16
    };
    cases.push_back({"rope_fwd", shape, [=](OpRun& r) { body(r, false); }});
    cases.push_back({"rope_bwd", shape, [=](OpRun& r) { body(r, true); }});
  }
}

void add_qk_norm_rope(std::vector<OpCase>& cases) {
  struct QkNormRope {
    int64_t rows, q_heads, k_heads, dim, gap;
    bool in_place;
  };
  for (const QkNormRope& s : {QkNormRope{1, 1, 1, 2, 0, false},
                              {3, 2, 1, 8, 0, true},
                              {5, 3, 1, 20, 7, false},
                              {7, 4, 2, 64, 16, true},
                              {3, 5, 3, 34, 1, true},
                              {2, 0, 3, 256, 0, false},
                              {271, 2, 1, 32, 32, true}}) {
    const int64_t N = s.rows, h = s.q_heads + s.k_heads, D = s.dim, positions = 11;
    const std::string shape =
        cat("N", N, "_H", s.q_heads, "_K", s.k_heads, "_D", D, "_gap", s.gap, s.in_place ? "_inplace" : "");
    cases.push_back({"qk_norm_rope_fwd", shape, [=](OpRun& r) {
                       const Tensor y = r.out("y", {N, h, D}, s.gap), rstd = r.out("rstd", {N, h});
                       r.call(&Table::qk_norm_rope_fwd,
                              QkNormRopeFwd{y, rstd, r.in("x", {N, h, D}, s.gap + 1), r.in("q_norm", {D}),
                                            r.in("k_norm", {D}), r.in("table", {positions, D}),
                                            r.index("pos", {N}, below("pos", N, positions)), s.q_heads, 1e-6f});
                       const double relative = lanes(double(D));  // as of rmsnorm_fwd
                       std::vector<double> b = r.values("rstd");
                       for (double& x : b) x = std::fabs(x) * relative;
                       r.bound("rstd", b);
                       // two products of a normed value below sqrt(D), a weight and a normal of the table below 4
                       r.bound("y", (relative + 8 * kRound) * 2 * 16 * std::sqrt(double(D)));
                     }});
    cases.push_back({"qk_norm_rope_bwd", shape, [=](OpRun& r) {
                       std::vector<double> rstd = normal("rstd", N * h, 0.1);
                       for (double& x : rstd) x = static_cast<float>(1 + std::fabs(x));
                       QkNormRopeBwd a{};
                       a.dx = s.in_place ? r.inout("dx", {N, h, D}, s.gap) : r.out("dx", {N, h, D}, s.gap);
                       a.dq_norm = r.inout("dq_norm", {D}), a.dk_norm = r.inout("dk_norm", {D});
                       a.dy = s.in_place ? a.dx : r.in("dy", {N, h, D}, s.gap + 2);
                       a.x = r.in("x", {N, h, D}, s.gap), a.rstd = r.in("rstd", {N, h}, rstd);
                       a.q_norm = r.in("q_norm", {D}), a.k_norm = r.in("k_norm", {D});
                       a.table = r.in("table", {positions, D});
                       a.pos = r.index("pos", {N}, below("pos", N, positions)), a.q_heads = s.q_heads;
                       r.call(&Table::qk_norm_rope_bwd, a);
                       // As rmsnorm_bwd, with dy a sum of two products with normals: below 32.
                       r.bound("dx", lanes(double(D)) * 2 * 8 * (16 + 64));
                       const double weight = chain(double(N * h)) * 6 * std::sqrt(double(N * h + 1)) * 64;
                       r.bound("dq_norm", weight), r.bound("dk_norm", weight);
                     }});
  }
}

void add_swiglu(std::vector<OpCase>& cases) {
  struct Swiglu {
    int64_t rows, width;
    double scale;  // of the gate: up to the ends of exp's range
  };
  for (const Swiglu& s : {Swiglu{1, 1, 1}, {3, 15, 1}, {2, 16, 10}, {5, 17, 50}, {7, 65, 3}}) {
    const int64_t N = s.rows, F = s.width;
    const double scale = s.scale;
    const std::string shape = cat("N", N, "_F", F, "_scale", scale);
    auto gate_up = [=] { return normal("gate_up", N * 2 * F, scale); };
    // exp is good to a few roundings and 1 + exp(-g) loses nothing, so the products are relatively exact; below f32's
    // smallest normal number they may be flushed.
    auto bound = [=](const OpRun& r, const char* out) {
      std::vector<double> b = r.values(out);
      for (double& x : b) x = 16 * kRound * std::fabs(x) + 1e-36;
      return b;
    };
    cases.push_back({"swiglu_fwd", shape, [=](OpRun& r) {
                       const Tensor y = r.out("y", {N, F});
                       r.call(&Table::swiglu_fwd, SwigluFwd{y, r.in("gate_up", {N, 2 * F}, gate_up())});
                       r.bound("y", bound(r, "y"));
                     }});
    for (bool in_place : {false, true})
      cases.push_back(
          {"swiglu_bwd", cat(shape, in_place ? "_inplace" : ""), [=](OpRun& r) {
             SwigluBwd a{};
             a.gate_up = in_place ? r.inout("d", {N, 2 * F}, gate_up()) : r.in("gate_up", {N, 2 * F}, gate_up());
             a.dgate_up = in_place ? a.gate_up : r.out("d", {N, 2 * F});
             a.dy = r.in("dy", {N, F});
             r.call(&Table::swiglu_bwd, a);
             // 1 + g (1 - sigmoid(g)) cancels near its zero: errors relative to 1 + |g| there.
             std::vector<double> b = bound(r, "d");
             const std::vector<double> g = gate_up(), dy = r.values("dy");
             for (int64_t i = 0; i < N * F; i++) {
               const int64_t at = i / F * 2 * F + i % F;
               const double sigmoid = 1 / (1 + std::exp(-g[at]));
               b[at] += 16 * kRound * std::fabs(dy[i] * g[at + F]) * sigmoid * (1 + std::fabs(g[at]) * (1 - sigmoid));
             }
             r.bound("d", b);
           }});
  }
}

}  // namespace

void add_layer_cases(std::vector<OpCase>& cases) {
  for (const Norm& s : kNorms) {
    add_norm_fwd(cases, s);
    add_norm_bwd(cases, s, false);
    if (!s.in_place) add_norm_bwd(cases, s, true);
  }
  for (const Linear& s : kLinears) add_linear(cases, s);
  add_rope(cases);
  add_qk_norm_rope(cases);
  add_swiglu(cases);
}

}  // namespace pare::test
