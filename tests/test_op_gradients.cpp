// Backward ops of `ref` against central differences of its forward ops, in double.
#include <functional>
#include <memory>
#include <numeric>
#include <sstream>

#include "base/arena.h"
#include "op_cases.h"
#include "ops/device.h"
#include "ops/logits.h"

namespace pare::test {

namespace {

using Values = std::vector<double>;

Tensor view(Values& v, std::initializer_list<int64_t> shape) { return make_tensor(v.data(), DType::f64, shape); }
Tensor view(std::vector<int32_t>& v, std::initializer_list<int64_t> shape) {
  return make_tensor(v.data(), DType::i32, shape);
}
// Of the numbers that the ops have written: rows of no segment stay NaN.
double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); i++)
    if (!std::isnan(a[i])) sum += a[i] * b[i];
  return sum;
}

// d f / d x by central differences equals `gradient`.  Cutting the series costs h^2 and rounding 1e-16 / h: with h =
// 1e-5 both stay near 1e-10 for functions of size and derivatives of order 1 to 10.
void expect_gradient(Values& x, const Values& gradient, const std::function<double()>& f) {
  ASSERT_EQ(x.size(), gradient.size());
  for (size_t i = 0; i < x.size(); i++) {
    const double at = x[i], h = 1e-5;
    x[i] = at + h;
    const double above = f();
    x[i] = at - h;
    const double below = f();
    x[i] = at;
    const double slope = (above - below) / (2 * h);
    ASSERT_NEAR(gradient[i], slope, 1e-7 * (1 + std::fabs(slope))) << i;
  }
}

// ---- every case of a backward op against that of its forward op

const std::map<std::string, std::string> kForwardOf = {
    {"scatter_add_rows", "copy_rows"},        {"embedding_bwd", "embedding_fwd"},  {"rmsnorm_bwd", "rmsnorm_fwd"},
    {"linear_bwd_input", "linear_fwd"},       {"linear_bwd_weight", "linear_fwd"}, {"rope_bwd", "rope_fwd"},
    {"qk_norm_rope_bwd", "qk_norm_rope_fwd"}, {"swiglu_bwd", "swiglu_fwd"},        {"attn_bwd", "attn_fwd"}};

using Run = std::unique_ptr<OpRun>;
Run run_ref(const cases::OpCase& c, const std::string& size, const std::function<void(OpRun&)>& before = {}) {
  Run r = std::make_unique<OpRun>(table_ref, DType::f64);
  const cases::Call call = c.make(*r, cases::Dims(c.op, c.dims, size));
  if (before) before(*r);
  run(*r, call);
  return r;
}
// The parts of `size` that `c` has too, not in place.
std::string common(const std::string& size, const cases::OpCase& c) {
  std::string text;
  std::stringstream parts(size);
  for (std::string part; std::getline(parts, part, ',');) {
    if (part.starts_with("R=") && std::string(c.op) == "copy_rows") part[0] = 'n';
    if (std::any_of(c.dims.begin(), c.dims.end(),
                    [&](const auto& d) { return part.starts_with(cat(d.name, "=")) && part != "in_place=1"; }))
      text += (text.empty() ? "" : ",") + part;
  }
  return text;
}

// With f(x) = sum over the outputs y of y . dy, the derivative of f along a random direction of each input x is that of
// its gradient dx: every number of every tensor takes part.
void check_gradients(const cases::OpCase& back, const std::string& size) {
  const cases::OpCase& forth = cases::op_case(kForwardOf.at(back.op));
  const std::string text = common(size, forth);
  const Run forward = run_ref(forth, text);
  const std::vector<std::string> outputs = forward->outputs();
  const auto is_output = [&](const std::string& name) { return std::count(outputs.begin(), outputs.end(), name) > 0; };
  const Run backward = run_ref(back, size, [&](OpRun& r) {  // what forward keeps for it is forward's
    for (const std::string& name : r.names({Use::in}))
      if (is_output(name)) r.set(name, forward->values(name));
  });
  std::map<std::string, std::string> dy;  // by output, where its gradient was; in place the name is that of the result
  for (const std::string& y : outputs)
    if (backward->has("d" + y)) dy[y] = "d" + y;
  if (dy.empty()) dy["y"] = "dx";
  std::map<std::string, Values> given;
  for (const auto& [y, name] : dy) given[y] = backward->buffer(name).values_before();

  int checked = 0;
  for (const std::string& x : forward->names({Use::in, Use::inout})) {
    const std::string dx = backward->has("d" + x) ? "d" + x : x;  // in place of dy, or of x
    const auto gradients = backward->outputs();
    if (!std::count(gradients.begin(), gradients.end(), dx)) continue;
    Values gradient = backward->buffer(dx).values();
    const Values before = backward->buffer(dx).values_before();
    const bool added =
        dx != x && std::none_of(dy.begin(), dy.end(), [&](const auto& from) { return from.second == dx; });
    for (size_t i = 0; i < gradient.size(); i++)
      if (added && !std::isnan(before[i])) gradient[i] -= before[i];
    const int64_t n = static_cast<int64_t>(gradient.size());
    const Values at = forward->is_weight(x) ? normal(x, n) : forward->buffer(x).values_before();
    const Values direction = normal("direction", n);
    const auto f = [&](double h) {
      const Run r = run_ref(forth, text, [&](OpRun& r) {
        Values moved = at;
        for (size_t i = 0; i < moved.size(); i++) moved[i] += h * direction[i];
        r.set(x, moved);
      });
      double sum = 0;
      for (const auto& [y, d] : given) sum += dot(r->values(y), d);
      return sum;
    };
    double magnitude = 1;
    for (size_t i = 0; i < gradient.size(); i++)
      magnitude += std::isnan(gradient[i]) ? 0 : std::fabs(gradient[i] * direction[i]);
    const double h = 1e-5;
    EXPECT_NEAR(dot(gradient, direction), (f(h) - f(-h)) / (2 * h), 1e-8 * magnitude) << x;
    checked++;
  }
  EXPECT_GT(checked, 0);
}

TEST(OpGradients, AreDerivativesOfTheForwardOps) {
  for (const cases::OpCase& c : cases::op_cases())
    for (const std::string& size : kForwardOf.count(c.op) ? c.odd : std::vector<std::string>{}) {
      SCOPED_TRACE(cat(c.op, " ", size));
      check_gradients(c, size);
    }
}

TEST(OpGradients, CoverEveryBackwardOp) {
  for (const cases::OpCase& c : cases::op_cases())
    EXPECT_TRUE(kForwardOf.count(c.op) || std::string(c.op).find("_bwd") == std::string::npos) << c.op;
}

// ---- the loss: every policy loss with every KL

class LossGradients : public testing::TestWithParam<std::tuple<PolicyLoss, KlLoss, double, bool>> {};

TEST_P(LossGradients, EqualDifferences) {
  const PolicyLoss policy = std::get<0>(GetParam());
  LossSpec spec{.policy = policy, .kl = std::get<1>(GetParam())};
  spec.clip_low = 0.2f;
  spec.clip_high = 0.28f;
  spec.clip_c = 1.6f;
  spec.kl_ratio = std::get<3>(GetParam());
  spec.kl_coef = 0.3f;
  spec.entropy_coef = 0.2f;
  spec.temperature = static_cast<float>(std::get<2>(GetParam()));
  const int64_t V = 6;
  // Log-ratios inside, below and above the clip range and beyond the dual clip, for both signs of the advantage.
  const Values ratios = {0.05, -0.1, -0.5, 0.4, 0.7, 0.05, -0.1, -0.5, 0.4, 0.7};
  Values A = {1.5, 0.5, 1, 2, 1, -1.5, -0.5, -1, -2, -1};
  const int64_t R = static_cast<int64_t>(ratios.size());
  Values z = normal("z", R * V), ref_z = normal("ref_z", R * V), old(R), seq = ratios, ref(R), lp(R), h(R), loss(R),
         kl(R);
  Values weight = normal("weight", R), kl_weight = normal("kl_weight", R);
  std::vector<int32_t> target = below("target", R, V), clipped(R);
  auto logprobs = [&] {
    table_ref.logprob({view(lp, {R}), view(h, {R}), view(z, {R, V}), view(target, {R}), spec.temperature}, {});
  };
  logprobs();
  const Values lp0 = lp;
  for (int64_t r = 0; r < R; r++) {
    old[r] = lp0[r] - ratios[r];
    ref[r] = lp0[r] + ratios[R - 1 - r];
  }
  auto run = [&](Values& logits) {
    LogitsLoss a{};
    a.logprob = view(lp, {R});
    a.entropy = view(h, {R});
    a.loss = view(loss, {R});
    a.kl = view(kl, {R});
    a.clipped = view(clipped, {R});
    a.logits = view(logits, {R, V});
    a.target = view(target, {R});
    a.weight = view(weight, {R});
    a.kl_weight = view(kl_weight, {R});
    a.advantage = view(A, {R});
    a.old_logprob = view(old, {R});
    a.log_ratio = view(seq, {R});
    a.ref_logprob = view(ref, {R});
    a.ref_logits = view(ref_z, {R, V});
    a.spec = spec;
    table_ref.logits_loss(a, {});
  };
  Values gradient = z;
  run(gradient);
  const Values lp1 = lp;
  EXPECT_EQ(lp1, lp0);
  std::vector<int32_t> expected = {0, 0, 0, 1, 1, 0, 0, 1, 0, 2};
  if (policy == PolicyLoss::nll) expected.assign(R, 0);
  if (policy == PolicyLoss::cispo) expected = {0, 0, 1, 1, 1, 0, 0, 1, 1, 1};
  EXPECT_EQ(clipped, expected);

  // What is held constant inside the loss moves with lp in its value: gspo's gradient is that of the ratio
  // exp(lp - sg(lp) + seq); cispo's ratio stays.
  const Values old0 = old;
  expect_gradient(z, gradient, [&] {
    logprobs();
    for (int64_t r = 0; r < R; r++) {
      seq[r] = ratios[r] + lp[r] - lp0[r];
      old[r] = old0[r] + (policy == PolicyLoss::cispo ? lp[r] - lp0[r] : 0);
    }
    Values logits = z;
    run(logits);
    double sum = 0;
    for (int64_t r = 0; r < R; r++)
      sum += weight[r] * loss[r] + kl_weight[r] * (double(spec.kl_coef) * kl[r] - double(spec.entropy_coef) * h[r]);
    return sum;
  });

  // Without an old log-prob the ratio is 1 and its gradient that of old = lp.
  if (policy != PolicyLoss::ppo && policy != PolicyLoss::cispo) return;
  old = lp0;
  Values same = z, none = z;
  run(same);
  old.assign(R, NAN);
  run(none);
  EXPECT_EQ(same, none);
}

INSTANTIATE_TEST_SUITE_P(All, LossGradients,
                         testing::Combine(testing::Values(PolicyLoss::nll, PolicyLoss::ppo, PolicyLoss::gspo,
                                                          PolicyLoss::cispo),
                                          testing::Values(KlLoss::none, KlLoss::k1, KlLoss::k2, KlLoss::k3,
                                                          KlLoss::exact, KlLoss::exact_forward),
                                          testing::Values(1.0, 0.7), testing::Values(false)));
INSTANTIATE_TEST_SUITE_P(KlRatio, LossGradients,
                         testing::Combine(testing::Values(PolicyLoss::ppo, PolicyLoss::gspo),
                                          testing::Values(KlLoss::k1, KlLoss::k2, KlLoss::k3),
                                          testing::Values(1.0, 0.7), testing::Values(true)));

// The exact KL is the mean of k1 over the policy's own tokens, and so is its gradient the mean of (k1 + its score
// term).
TEST(LossValues, ExactKlIsTheMeanOfK1) {
  const int64_t V = 7;
  Values z = normal("z", V), ref_z = normal("ref_z", V);
  auto at = [&](Values& logits, int32_t token, float temperature) {
    Values lp(1), h(1);
    std::vector<int32_t> target = {token};
    table_ref.logprob({view(lp, {1}), view(h, {1}), view(logits, {1, V}), view(target, {1}), temperature}, {});
    return lp[0];
  };
  const float temperature = 1.7f;
  double mean = 0;
  for (int32_t v = 0; v < V; v++) {
    const double lp = at(z, v, temperature);
    mean += std::exp(lp) * (lp - at(ref_z, v, temperature));
  }
  Values lp(1), h(1), loss(1), kl(1), weight = {1}, kl_weight = {1}, logits = z;
  std::vector<int32_t> target = {2}, clipped(1);
  LogitsLoss a{};
  a.logprob = view(lp, {1});
  a.entropy = view(h, {1});
  a.loss = view(loss, {1});
  a.kl = view(kl, {1});
  a.clipped = view(clipped, {1});
  a.logits = view(logits, {1, V});
  a.target = view(target, {1});
  a.weight = view(weight, {1});
  a.kl_weight = view(kl_weight, {1});
  a.ref_logits = view(ref_z, {1, V});
  a.spec.kl = KlLoss::exact;
  a.spec.temperature = temperature;
  table_ref.logits_loss(a, {});
  EXPECT_NEAR(kl[0], mean, 1e-14);
  EXPECT_GT(kl[0], 0.01);
}

// The mean over the student's own tokens of each estimator, and of its gradient, for three tokens.  k3 estimates
// KL(student || teacher), but its gradient is that of KL(teacher || student).
TEST(LossValues, KlEstimatorsByEnumeration) {
  Values z = {0.3, -0.2, 0.5}, teacher = {0.1, 0.4, -0.6};
  const auto expect = [&](KlLoss kl_loss, double value, const Values& gradient) {
    Values lp(3), ref_lp(3), h(3), loss(3), kl(3), none(3, 0.0), ones(3, 1.0), logits, ref_logits;
    for (int i = 0; i < 3; i++) logits.insert(logits.end(), z.begin(), z.end());
    for (int i = 0; i < 3; i++) ref_logits.insert(ref_logits.end(), teacher.begin(), teacher.end());
    std::vector<int32_t> target = {0, 1, 2}, clipped(3);
    table_ref.logprob({view(ref_lp, {3}), view(h, {3}), view(ref_logits, {3, 3}), view(target, {3}), 1}, {});
    LogitsLoss a{};
    a.logprob = view(lp, {3});
    a.entropy = view(h, {3});
    a.loss = view(loss, {3});
    a.kl = view(kl, {3});
    a.clipped = view(clipped, {3});
    a.logits = view(logits, {3, 3});
    a.target = view(target, {3});
    a.weight = view(none, {3});
    a.kl_weight = view(ones, {3});
    a.ref_logits = view(ref_logits, {3, 3});
    a.ref_logprob = view(ref_lp, {3});
    a.spec = {.kl = kl_loss, .kl_coef = 1};
    table_ref.logits_loss(a, {});
    double mean = 0;
    Values slope(3);
    for (int i = 0; i < 3; i++) {
      mean += std::exp(lp[i]) * kl[i];
      for (int v = 0; v < 3; v++) slope[v] += std::exp(lp[i]) * logits[3 * i + v];
    }
    EXPECT_NEAR(mean, value, 1e-6) << static_cast<int>(kl_loss);
    for (int v = 0; v < 3; v++) EXPECT_NEAR(slope[v], gradient[v], 1e-6) << static_cast<int>(kl_loss) << ' ' << v;
  };
  const Values reverse = {-.076782, -.218153, .294935}, forward = {.002300, -.259748, .257448};
  expect(KlLoss::k1, .223657, {0, 0, 0});
  expect(KlLoss::k2, .244993, reverse);
  expect(KlLoss::k3, .223657, forward);
  expect(KlLoss::exact, .223657, reverse);
  expect(KlLoss::exact_forward, .215844, forward);
}

// Over tokens of an older policy the KL estimates k1 and k3, times the ratio, have the mean and the gradient of
// KL(policy || reference); without the ratio neither has.
TEST(LossValues, KlTimesTheRatioByEnumeration) {
  constexpr int64_t V = 5;
  const Values z = normal("z", V), ref_z = normal("ref_z", V), old_z = normal("old_z", V);
  const auto rows = [](const Values& row) {
    Values all;
    for (int i = 0; i < V; i++) all.insert(all.end(), row.begin(), row.end());
    return all;
  };
  std::vector<int32_t> target(V), clipped(V);
  std::iota(target.begin(), target.end(), 0);
  const auto logprobs = [&](const Values& row) {
    Values logits = rows(row), lp(V), h(V);
    table_ref.logprob({view(lp, {V}), view(h, {V}), view(logits, {V, V}), view(target, {V}), 1}, {});
    return lp;
  };
  Values old = logprobs(old_z), ref = logprobs(ref_z), ref_logits = rows(ref_z);
  struct Mean {
    double kl = 0;
    Values slope = Values(V);
  };
  const auto mean = [&](KlLoss kl_loss, bool ratio) {
    Values logits = rows(z), lp(V), h(V), loss(V), kl(V), none(V, 0.0), ones(V, 1.0);
    LogitsLoss a{};
    a.logprob = view(lp, {V});
    a.entropy = view(h, {V});
    a.loss = view(loss, {V});
    a.kl = view(kl, {V});
    a.clipped = view(clipped, {V});
    a.logits = view(logits, {V, V});
    a.target = view(target, {V});
    a.weight = view(none, {V});
    a.kl_weight = view(ones, {V});
    a.advantage = view(none, {V});
    a.old_logprob = view(old, {V});
    a.ref_logprob = view(ref, {V});
    a.ref_logits = view(ref_logits, {V, V});
    a.spec = {.policy = PolicyLoss::ppo, .kl = kl_loss, .kl_coef = 1, .kl_ratio = ratio};
    table_ref.logits_loss(a, {});
    Mean m;
    for (int i = 0; i < V; i++) {
      m.kl += std::exp(old[i]) * kl[i];
      for (int v = 0; v < V; v++) m.slope[v] += std::exp(old[i]) * logits[V * i + v];
    }
    return m;
  };
  const Mean exact = mean(KlLoss::exact, false);
  for (const KlLoss kl_loss : {KlLoss::k1, KlLoss::k3}) {
    const Mean with = mean(kl_loss, true), without = mean(kl_loss, false);
    EXPECT_NEAR(with.kl, exact.kl, 1e-12);
    EXPECT_GT(std::abs(without.kl - exact.kl), 0.01);
    double apart = 0;
    for (int v = 0; v < V; v++) {
      EXPECT_NEAR(with.slope[v], exact.slope[v], 1e-12) << v;
      apart = std::max(apart, std::abs(without.slope[v] - exact.slope[v]));
    }
    EXPECT_GT(apart, 0.01);
  }
}

// Score centring: over the sampler's tokens the gradient of a constant advantage has the mean 0, whatever weights the
// tokens have; each token's gradient is that of -A (w_a log p_a - sum_v c_v log p_v), w and c being constants.
TEST(LossValues, CentredScoresByEnumeration) {
  constexpr int64_t V = 7;
  const float temperature = 0.8f;
  const Values z = normal("z", V, 1.5), q_z = normal("q_z", V, 1.5);
  const auto softmax = [&](const Values& row) {
    Values p;
    for (const double x : row) p.push_back(std::exp(x / temperature));
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= sum;
    return p;
  };
  const Values p = softmax(z), q = softmax(q_z);
  const Centring one{.on = true}, tis{.on = true, .by_ratio = true, .cap = 1.2f},
      icepop{.on = true, .by_ratio = true, .low = .5f, .high = 2}, masked{.on = true, .low = .5f, .high = 2};
  int outside = 0;
  for (int v = 0; v < V; v++) outside += p[v] < .5 * q[v] || p[v] > 2 * q[v];
  ASSERT_GT(outside, 0);
  ASSERT_LT(outside, V);
  for (const Centring& centring : {one, tis, icepop, masked}) {
    const auto f = [&](int v) {
      const double x = p[v] / q[v];
      if (x < centring.low || x > centring.high) return 0.0;
      return centring.by_ratio ? std::min(x, double(centring.cap)) : 1;
    };
    const auto gradients = [&](bool centred, std::vector<Values>& of) {
      Values logits, sampler, weight, ones(V, 1.0), A(V, 1.7), old(V, NAN), lp(V), h(V), loss(V), kl(V);
      std::vector<int32_t> target(V), clipped(V);
      std::iota(target.begin(), target.end(), 0);
      for (int i = 0; i < V; i++) {
        logits.insert(logits.end(), z.begin(), z.end());
        sampler.insert(sampler.end(), q_z.begin(), q_z.end());
        weight.push_back(f(i));
      }
      LogitsLoss a{};
      a.logprob = view(lp, {V});
      a.entropy = view(h, {V});
      a.loss = view(loss, {V});
      a.kl = view(kl, {V});
      a.clipped = view(clipped, {V});
      a.logits = view(logits, {V, V});
      a.target = view(target, {V});
      a.weight = view(weight, {V});
      a.kl_weight = view(ones, {V});
      a.advantage = view(A, {V});
      a.old_logprob = view(old, {V});
      a.sampler_logits = view(sampler, {V, V});
      a.spec = {.policy = PolicyLoss::ppo, .temperature = temperature};
      if (centred) a.spec.centring = centring;
      table_ref.logits_loss(a, {});
      Values mean(V);
      for (int i = 0; i < V; i++) {
        of.emplace_back(logits.begin() + V * i, logits.begin() + V * (i + 1));
        for (int v = 0; v < V; v++) mean[v] += q[i] * logits[V * i + v];
      }
      return mean;
    };
    std::vector<Values> each, plain;
    double most = 0;
    for (const double x : gradients(true, each)) EXPECT_NEAR(x, 0, 1e-12);
    for (const double x : gradients(false, plain)) most = std::max(most, std::abs(x));
    EXPECT_GT(most, 0.05);
    for (int a = 0; a < V; a++) {
      Values row = z;
      expect_gradient(row, each[a], [&] {
        const Values now = softmax(row);
        double value = f(a) * std::log(now[a]);
        for (int v = 0; v < V; v++) value -= q[v] * f(v) * std::log(now[v]);
        return -1.7 * value;
      });
    }
  }
}

// Where student and teacher are one, nothing is left of any KL.
TEST(LossValues, KlOfEqualLogitsIsZero) {
  for (const Table* table : {&table_ref, &table_cpu, &table_emu})
    for (const KlLoss kl_loss : {KlLoss::k1, KlLoss::k2, KlLoss::k3, KlLoss::exact, KlLoss::exact_forward}) {
      const bool wide = table == &table_ref;
      const DType dtype = wide ? DType::f64 : DType::f32;
      constexpr int64_t R = 2, V = 37;
      Arena arena("test", *table->memory, size_t{1} << 20);
      Device device(*table);
      const auto alloc = [&](const char* name, std::initializer_list<int64_t> shape, const Values& values) {
        const Tensor t = arena.alloc(name, dtype, shape);
        const std::vector<float> narrow(values.begin(), values.end());
        device.upload({t, wide ? static_cast<const void*>(values.data()) : narrow.data()});
        device.wait();
        return t;
      };
      const Values z = normal("z", R * V), zero(R), one(R, 1.0);
      LogitsLoss a{};
      const std::vector<int32_t> ids = {3, 36};
      a.target = arena.alloc("target", DType::i32, {R});
      a.clipped = arena.alloc("clipped", DType::i32, {R});
      device.upload({a.target, ids.data()});
      a.logits = alloc("logits", {R, V}, z);
      a.ref_logits = alloc("ref_logits", {R, V}, z);
      a.logprob = alloc("lp", {R}, zero);
      a.entropy = alloc("h", {R}, zero);
      a.loss = alloc("loss", {R}, zero);
      a.kl = alloc("kl", {R}, one);
      a.weight = alloc("weight", {R}, zero);
      a.kl_weight = alloc("klw", {R}, one);
      a.ref_logprob = alloc("ref_logprob", {R}, zero);
      a.spec = {.kl = kl_loss, .kl_coef = 1};
      device.logprob({a.ref_logprob, a.entropy, a.logits, a.target, 1});
      device.logits_loss(a);
      const auto values = [&](const Tensor& t) {
        std::vector<char> bytes(t.size() * dtype_size(dtype));
        device.download({bytes.data(), t});
        Values v(t.size());
        for (size_t i = 0; i < v.size(); i++)
          v[i] =
              wide ? reinterpret_cast<const double*>(bytes.data())[i] : reinterpret_cast<const float*>(bytes.data())[i];
        return v;
      };
      for (const double x : values(a.kl)) EXPECT_EQ(x, 0) << table->name << static_cast<int>(kl_loss);
      if (kl_loss == KlLoss::k1) continue;  // its gradient is that of the log-prob
      for (const double x : values(a.logits)) EXPECT_EQ(x, 0) << table->name << static_cast<int>(kl_loss);
    }
}

}  // namespace

}  // namespace pare::test
