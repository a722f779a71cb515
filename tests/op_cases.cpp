// Cases of the library as rows of the op test: the error bounds of their outputs.
#include "op_cases.h"

#include "cases/call.h"
#include "kernel_call.h"
#include "ops/token_loss.h"

namespace pare::test {

namespace {

// Nothing stated: outputs are equal.
template <class Args>
void bounds(OpRun&, const Args&) {}

void bounds(OpRun& r, const Download& a) {
  if (!r.skipped && std::memcmp(a.dst, a.src.data, a.src.bytes()) != 0)
    r.problems.push_back("host: not the bytes of src");
}
std::vector<double> shares(const std::vector<double>& values, double share, double least = 0) {
  std::vector<double> b = values;
  for (double& x : b) x = std::fabs(x) * share + least;
  return b;
}
// One rounding of each sum.
void bounds(OpRun& r, const Accumulate& a) { r.bound(a.y, r.max_abs(a.y) * kRound); }

// A chain of n numbers of size `each`, onto one that is there: partial sums of n + 1 normals stay below 6 sqrt(n + 1).
double added(int64_t n, double each = 1) { return chain(double(n)) * 6 * std::sqrt(double(n + 1)) * each; }
void bounds(OpRun& r, const ScatterAddRows& a) { r.bound(a.y, added(a.x.shape[0])); }
void bounds(OpRun& r, const EmbeddingBwd& a) { r.bound(a.dtable, added(a.dy.shape[0])); }

// A chain of n products of two normals: its partial sums, and what is added, stay below 4 sqrt(n + 4).
double products(int64_t n) { return chain(double(n)) * 4 * std::sqrt(double(n + 4)); }
void bounds(OpRun& r, const LinearFwd& a) {
  const int64_t n = a.w.inputs();
  if (a.norm.y) {  // what y is off, times rstd, of which all elements have a share
    const double rstd = r.max_abs(a.norm.rstd), relative = 4 * products(n) * rstd + lanes(double(a.w.outputs()));
    r.bound(a.norm.rstd, shares(r.values(a.norm.rstd), relative));
    r.bound(a.norm.y, relative * (1 + r.max_abs(a.norm.y)));
  }
  const double most = 4 * std::sqrt(double(n + 4)), each = products(n) + (a.x.dtype == DType::bf16 ? most / 256 : 0);
  if (!a.swiglu) return r.bound(a.y, products(n));
  // silu's slope is below 1.1, and gates and ups are rounded.
  r.bound(a.swiglu, 2.1 * most * each + 16 * kRound * most * most);
}
void bounds(OpRun& r, const LinearBwdInput& a) { r.bound(a.dx, products(a.w.outputs())); }
void bounds(OpRun& r, const LinearBwdWeight& a) {
  r.bound(a.dw, products(a.x.shape[0]));
  if (a.dbias) r.bound(a.dbias, products(a.x.shape[0]));
}

// The squares have one sign, so rstd is relatively exact to the roundings of their sum.
void norm_bounds(OpRun& r, int64_t width, const Tensor& y, const Tensor& rstd) {
  const double relative = lanes(double(width));
  r.bound(rstd, shares(r.values(rstd), relative));
  r.bound(y, shares(r.values(y), relative + 4 * kRound));
}
void bounds(OpRun& r, const RmsnormFwd& a) { norm_bounds(r, a.x.shape[1], a.y, a.rstd); }
void bounds(OpRun& r, const EmbeddingFwd& a) {
  if (a.norm.y) norm_bounds(r, a.table.inputs(), a.norm.y, a.norm.rstd);
}
// dx: rstd times terms dy*w of size below 4*4 and xh*mean of size below (4 rstd)*(16 rstd).
double norm_error(double width, double rstd, double dy = 1) {
  return lanes(width) * rstd * dy * (16 + 64 * rstd * rstd);
}
void bounds(OpRun& r, const RmsnormBwd& a) {
  const double rstd = r.max_abs(a.rstd);
  r.bound(a.dx, norm_error(double(a.x.shape[1]), rstd));
  if (a.dw) r.bound(a.dw, added(a.x.shape[0], 4 * rstd));
}

// Two products of normals, each below 16.
void bounds(OpRun& r, const RopeFwd& a) { r.bound(a.x, 3 * kRound * 32); }
void bounds(OpRun& r, const RopeBwd& a) { r.bound(a.dx, 3 * kRound * 32); }
void bounds(OpRun& r, const KvWrite& a) {
  if (a.product.y) {
    const int64_t n = a.product.w.inputs();
    const double most = 4 * std::sqrt(double(n + 4)), each = products(n) + (a.k.dtype == DType::bf16 ? most / 256 : 0);
    r.bound(a.product.y, 8 * each + 3 * kRound * 8 * most);
    r.bound(a.k_pages, 8 * each + 3 * kRound * 8 * most);
    return r.bound(a.v_pages, each);
  }
  if (!a.rotation) return;
  bounds(r, a.rotation.rope);
  r.bound(a.k_pages, 3 * kRound * 32);
}
// Two products of a normed value below sqrt(D), a weight and a normal of the table below 4.
void bounds(OpRun& r, const QkNormRopeFwd& a) {
  const double D = double(a.x.shape[2]);
  r.bound(a.rstd, shares(r.values(a.rstd), lanes(D)));
  r.bound(a.y, (lanes(D) + 8 * kRound) * 2 * 16 * std::sqrt(D));
}
// As rmsnorm_bwd, with dy a sum of two products with normals: 8 times as large.
void bounds(OpRun& r, const QkNormRopeBwd& a) {
  const double rstd = r.max_abs(a.rstd);
  r.bound(a.dx, norm_error(double(a.x.shape[2]), rstd, 8));
  const double weight = added(a.x.shape[0] * a.x.shape[1], 32 * rstd);
  if (a.dq_norm) {
    r.bound(a.dq_norm, weight);
    r.bound(a.dk_norm, weight);
  }
}

// exp is good to a few roundings and 1 + exp(-g) loses nothing, so the products are relatively exact; below f32's
// smallest normal number they may be flushed.
void bounds(OpRun& r, const SwigluFwd& a) { r.bound(a.y, shares(r.values(a.y), 16 * kRound, 1e-36)); }
// 1 + g (1 - sigmoid(g)) cancels near its zero: errors relative to 1 + |g| there.
void bounds(OpRun& r, const SwigluBwd& a) {
  std::vector<double> b = shares(r.values(a.dgate_up), 16 * kRound, 1e-36);
  const std::vector<double> g = r.buffer(a.gate_up).values_before(), dy = r.values(a.dy);
  const int64_t F = a.dy.shape[1];
  for (int64_t i = 0; i < a.dy.size(); i++) {
    const int64_t at = i / F * 2 * F + i % F;
    const double sigmoid = 1 / (1 + std::exp(-g[at]));
    b[at] += 16 * kRound * std::fabs(dy[i] * g[at + F]) * sigmoid * (1 + std::fabs(g[at]) * (1 - sigmoid));
  }
  r.bound(a.dgate_up, b);
}

// z = logits / temperature, logits below 10, loses 2 roundings of |z|, the sum of exponentials has one sign, its
// logarithm is below 8.  The sum of a tile goes through 8 + 4 roundings, a factor has those of z and of an exponential.
double logprob_error(const Tensor& logits, double temperature, double largest = 10) {
  const auto V = static_cast<double>(logits.shape[1]);
  return std::min(lanes(V), chain(V / kVocabTile + 16)) + kRound * (4 * largest / temperature + 16);
}
void bounds(OpRun& r, const Logprob& a) {
  const double error = logprob_error(a.logits, a.temperature);
  r.bound(a.logprob, error);
  r.bound(a.entropy, 8 * error);  // sum of z exp(z) / sum: below log V plus the entropy
}
// Each term has the relative error of a probability; the terms add up to 1 or 1 / lambda at most.
void bounds(OpRun& r, const OverlapProbs& a) {
  const double error = 2 * logprob_error(a.p_logits, a.temperature, 16);
  r.bound(a.overlap, error);
  r.bound(a.mass, error * std::max(1.0, 1.0 / a.lambda));
}
// The log-prob's error passes to the losses by their slopes; log p - log q stays below 40.
void bounds(OpRun& r, const LogitsLoss& a) {
  const LossSpec& spec = a.spec;
  const int64_t R = a.logits.shape[0], V = a.logits.shape[1];
  const double error = logprob_error(a.logits, spec.temperature), exact = is_exact(spec.kl) ? 40 : 0;
  const auto given = [&](const Tensor& t) { return t ? r.values(t) : std::vector<double>(R); };
  const std::vector<double> lp = given(a.logprob), old = given(a.old_logprob), ratio = given(a.log_ratio),
                            A = given(a.advantage), ref = given(a.ref_logprob), weight = given(a.weight),
                            kl_weight = given(a.kl_weight);
  std::vector<double> loss(R), kl(R), logits(R * V);
  for (int64_t i = 0; i < R; i++) {
    const auto t =
        token_loss<double>(spec, lp[i], old[i], ratio[i], A[i], ref[i], [](double x) { return std::exp(x); });
    loss[i] = 4 * error * (1 + std::fabs(t.policy) + std::fabs(t.d_policy));
    kl[i] = 4 * error * (1 + std::fabs(t.kl) + std::fabs(t.d_kl) + exact);
    const double scale = weight[i] * std::fabs(t.d_policy) +
                         kl_weight[i] * (spec.kl_coef * (1 + std::fabs(t.d_kl) + exact) + spec.entropy_coef * 20 +
                                         (spec.centring.on ? std::fabs(A[i]) : 0));
    for (int64_t v = 0; v < V; v++) logits[i * V + v] = 4 * error * scale / spec.temperature;
  }
  r.bound(a.logprob, error);
  r.bound(a.entropy, 8 * error);
  r.bound(a.loss, loss);
  r.bound(a.kl, kl);
  r.bound(a.logits, logits);
}
void bounds(OpRun&, const ListKept&) {}
void bounds(OpRun&, const KeepListed&) {}
void bounds(OpRun&, const Truncate&) {}  // the same sets: at these seeds no sum lies within rounding of its goal
// Tokens are equal: at these seeds no two scores lie within rounding of each other.
void bounds(OpRun& r, const Sample& a) {
  r.bound(a.logprob, a.temperature == 0 ? 0 : logprob_error(a.logits, a.temperature));
}

// Squares: no cancellation.
void bounds(OpRun& r, const SquareSums& a) { r.bound(a.sums, r.max_abs(a.sums) * lanes(kNormBlock)); }
// A dozen roundings of sums of two terms of size m, v and lr * update (c1 <= 10, |update| < 100).  In bf16, where the
// last of them falls otherwise, the neighbour.
void bounds(OpRun& r, const AdamW& a) {
  const double last = a.m.dtype == DType::bf16 ? 0x1p-7 : 0;
  r.bound(a.m, shares(r.values(a.m), last, 12 * kRound * 4));
  r.bound(a.v, shares(r.values(a.v), last, 12 * kRound));
  r.bound(a.p, kRound * 4 + 16 * kRound * a.lr * 1000);
}

// A score is a chain of D products, of magnitude below 1.5 D / sqrt(D) for the normals here; its absolute error is the
// relative error of its exponential.  Sums over n slots add their own roundings.
double softmax_error(int64_t dim, int64_t slots) {
  return 2 * chain(double(dim)) * 1.5 * std::sqrt(double(dim)) + chain(double(slots)) + 8 * kRound;
}
template <class Args>
double packed_error(const Args& a) {
  return softmax_error(a.q.shape[2], a.q.shape[0] + (a.pk.data == a.k.data ? 0 : a.pk.shape[0]));
}
// o is a mean of v; lse is a score plus a logarithm.
void bounds(OpRun& r, const AttnFwd& a) {
  r.bound(a.o, packed_error(a) * r.max_abs(a.v));
  r.bound(a.lse, packed_error(a) + 4 * kRound * 16);
}
// p has the softmax's relative error (lse given: one rounding more).  do.v - do.o may cancel: its terms, times scale,
// k or q, are of size 1.
void bounds(OpRun& r, const AttnBwd& a) {
  for (const Tensor& t : {a.dq, a.dk, a.dv, a.dpk, a.dpv}) r.bound(t, 4 * packed_error(a) * (1 + r.max_abs(t)));
}
// A softmax of logits that are chains over dim of products of normals, scaled to variance 1: values below 6.
double probability_error(int64_t dim, int64_t slots) { return 12 * chain(double(dim)) + lanes(double(slots)); }
// |v| < 5.  The mass is at most one per row and head, on top of what was there.
void bounds(OpRun& r, const AttnPaged& a) {
  r.bound(a.o, softmax_error(a.q.shape[2], a.slots) * 5);
  if (!a.mass_pages) return;
  const double terms = double(a.q.shape[0] * a.q.shape[1] / a.k_pages.shape[1]);
  r.bound(a.mass_pages, terms * probability_error(a.q.shape[2], a.slots) + chain(terms) * (5 + terms));
}

// A mean of at most 16 keys.
void bounds(OpRun& r, const KvBlockSummary& a) {
  r.bound(a.summary, a.kind == BlockSummary::minmax ? 0 : chain(16) * 5);
}
void bounds(OpRun& r, const AttnBlockSelect& a) {
  r.bound(a.summary, a.kind == BlockSummary::minmax ? 0 : chain(16) * 5);
}
void bounds(OpRun& r, const KvBlockSelect& a) {
  const double D = double(a.q.shape[2]);
  r.bound(a.score, lanes(D) * 2 * D);
}

void bounds(OpRun& r, const KvWindowScores& a) {
  r.bound(a.score, probability_error(a.k_pages.shape[2], a.score.shape[2]) + chain(a.window + a.kernel));
}
// R is at most 1; its relative error is that of r, a mean of cosines, and of a softmax.
void bounds(OpRun& r, const KvRedundancy& a) {
  const double error = 4 * chain(double(a.k_pages.shape[2])) + chain(double(a.score.shape[2]));
  r.bound(a.score, error + 4 * kRound * r.max_abs(a.score));
}
// Averages, or sums of at most as many values of size 5 as there are slots; the weights are cosines.
void bounds(OpRun& r, const KvMerge& a) {
  const double D = double(a.compact.k_pages.shape[2]), slots = double(a.cosines.shape[2]);
  const double error = 20 * chain(D) + chain(slots) * 20;
  r.bound(a.compact.v_pages, error * (1 + r.max_abs(a.compact.v_pages)));
  if (a.keys != MergeKeys::none) r.bound(a.compact.k_pages, error * 60);
  if (a.threshold) r.bound(a.threshold, 4 * chain(D));
}

}  // namespace

void run(OpRun& r, const cases::Call& call) {
  cases::visit(call, [&](const auto& a, auto op) {
    r.call(op, a);
    bounds(r, a);
  });
}

void OpRun::compute(const cases::Call& call) {
  if (act == DType::bf16) return;
  cases::visit(call, [&](const auto& a, auto op) {
    (table_ref.*op)(a, {});
    for (const Tensor& t : a.outputs()) {
      Buffer& b = *entries_.at(name(t)).buffer;
      for (int64_t i = 0; i < b.size(); i++) b.set(i, static_cast<float>(b.get(i)));
    }
  });
}

std::string OpRow::shape() const {
  std::string s;
  for (char x : size)
    if (x != '=') s += x == ',' ? '_' : x;
  return s;
}
void OpRow::run(OpRun& r) const { test::run(r, op->make(r, cases::Dims(op->op, op->dims, size))); }

std::vector<OpRow> op_rows(const std::set<std::string>& ops) {
  std::vector<OpRow> rows;
  for (const cases::OpCase& c : cases::op_cases())
    for (const std::string& size : c.odd)
      if (ops.empty() || ops.count(c.op)) rows.push_back({&c, size});
  return rows;
}

namespace kernel {

Body body_of(const std::string& op, const std::string& size, const cases::Layout& layout) {
  const cases::OpCase& c = cases::op_case(op);
  return [&c, dims = cases::Dims(c.op, c.dims, size, layout)](Call& t) {
    cases::visit(c.make(t, dims), [&](const auto& a, auto op) { (t.table.*op)(a, {}); });
  };
}

void check(const Body& body, double inner, bool orders, const Table& table) {
  Call ref(table_ref, DType::f64);
  body(ref);
  for (DType act : {DType::f32, DType::bf16}) {
    std::map<std::string, std::string> first;
    const auto once = [&] {
      Call run(table, act);
      body(run);
      EXPECT_TRUE(run.zones_intact());
      for (const auto& [name, buffer] : run.all()) {
        EXPECT_EQ(first.emplace(name, buffer->bits()).first->second, buffer->bits()) << name << " depends on the order";
        const bool rounded = buffer->tensor().dtype == DType::bf16;
        const std::vector<double> values = run.values(name), wanted = ref.values(name);
        for (size_t i = 0; i < values.size(); i++) {
          const double is = values[i], should = wanted[i];
          if (std::isnan(is) && std::isnan(should)) continue;  // left alone
          if (is == should) continue;                          // infinite
          double bound = 1e-5 * std::fmax(1, std::fabs(should)) + (rounded ? std::fabs(should) / 256 + inner : 0);
          if (act == DType::bf16 && name == "lse") bound += 1.5e-4;  // a logarithm of weights within 1.02e-4
          ASSERT_LE(std::fabs(is - should), bound)
              << name << "[" << i << "] of " << buffer->tensor().str() << " is " << is << ", not " << should;
        }
      }
    };
    orders ? in_all_orders(once) : once();
  }
}

void check(const std::string& op, const std::vector<std::string>& sizes, double inner, bool orders,
           const Table& table) {
  for (const std::string& size : sizes) {
    SCOPED_TRACE(op + ", " + size);
    check(body_of(op, size), inner, orders, table);
  }
}

std::string refusal(DType act, const Body& body, const Table& table) {
  Call t(table, act);
  try {
    body(t);
  } catch (const std::logic_error& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace kernel

}  // namespace pare::test
