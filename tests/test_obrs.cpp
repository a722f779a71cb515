// Rejection with a budget: probabilities, weights and normalisers by enumeration, and its coins.
#include <cmath>

#include "base/rng.h"
#include "ops/logits.h"
#include "rl/obrs.h"
#include "tests/rl_golden.h"

namespace pare::test {
namespace {

// Overlap and mass of two distributions, as the op computes them.
std::pair<double, double> overlap(const std::vector<double>& p, const std::vector<double>& q, double lambda,
                                  int32_t top_k = 0) {
  const auto v = static_cast<int64_t>(p.size());
  std::vector<double> zp, zq, out(2);
  for (const double x : p) zp.push_back(std::log(x));
  for (const double x : q) zq.push_back(std::log(x));
  const auto view = [](std::vector<double>& x, std::initializer_list<int64_t> shape) {
    return make_tensor(x.data(), DType::f64, shape);
  };
  std::vector<double> a(1), b(1);
  table_ref.overlap_probs({.overlap = view(a, {1}),
                           .mass = view(b, {1}),
                           .p_logits = view(zp, {1, v}),
                           .q_logits = view(zq, {1, v}),
                           .temperature = 1,
                           .lambda = static_cast<float>(lambda),
                           .top_k = top_k},
                          {});
  return {a[0], b[0]};
}

ObrsKeys keys(double lambda, StateWeight weight = StateWeight::none, double cap = 0) {
  ObrsKeys k;
  k.enable = true;
  k.lambda = lambda;
  k.state_weight = weight;
  k.cap = cap;
  return k;
}

double kl(const std::vector<double>& p, const std::vector<double>& q) {
  double sum = 0;
  for (size_t v = 0; v < p.size(); v++) sum += p[v] * std::log(p[v] / q[v]);
  return sum;
}

TEST(Obrs, GoldenAcceptanceNormaliserAndDivergence) {
  const std::vector<double> p = {0.5, 0.3, 0.2}, q = {0.2, 0.3, 0.5}, f = {1, -2, 5};
  EXPECT_NEAR(kl(p, q), 0.274887, 1e-6);
  struct Golden {
    double lambda;
    std::vector<double> accept;
    double z, divergence, with_z;
  };
  for (const Golden& g : {Golden{0.5, {1, 1, 0.8}, 0.9, 0.214155, 0.81},
                          {1, {1, 1, 0.4}, 0.7, 0.101470, 0.63},
                          {2, {1, 0.5, 0.2}, 0.45, 0.006211, 0.405},
                          {2.5, {1, 0.4, 0.16}, 0.4, 0, 0.36}}) {
    SCOPED_TRACE(g.lambda);
    const ObrsKeys plain = keys(g.lambda), weighted = keys(g.lambda, StateWeight::z);
    const double z = overlap(p, q, g.lambda).second;
    EXPECT_NEAR(z, g.z, 1e-9);
    double expected = 0, expected_z = 0, stays = 0;
    std::vector<double> after;
    for (size_t v = 0; v < 3; v++) {
      const double xi = p[v] / q[v], a = obrs_accept(plain, xi);
      EXPECT_NEAR(a, g.accept[v], 1e-12);
      stays += q[v] * a;
      after.push_back(q[v] * a / z);
      expected += q[v] * a * obrs_weight(plain, xi, z) * f[v];
      expected_z += q[v] * a * obrs_weight(weighted, xi, z) * f[v];
    }
    EXPECT_NEAR(stays, z, 1e-9);              // Z is the part that stays
    EXPECT_NEAR(expected, 0.9, 1e-9);         // E_p f, whatever lambda
    EXPECT_NEAR(expected_z, g.with_z, 1e-9);  // Z E_p f
    EXPECT_NEAR(kl(p, after), g.divergence, 1e-6);
    for (size_t v = 0; v < 3 && g.lambda >= 2.5; v++) EXPECT_NEAR(after[v], p[v], 1e-9);  // exact rejection sampling
  }
}

// At every state of a small tree: the estimate of E_p f is exact without a cap, for any lambda.
TEST(Obrs, UnbiasedAtEveryState) {
  Rng rng(rng_key(1, RngStream::test, 9));
  for (int state = 0; state < 50; state++) {
    const int v = 2 + static_cast<int>(rng.below(6));
    std::vector<double> p, q;
    double sp = 0, sq = 0;
    for (int i = 0; i < v; i++) {
      sp += p.emplace_back(rng.uniform() + 0.01);
      sq += q.emplace_back(rng.uniform() + 0.01);
    }
    for (int i = 0; i < v; i++) {
      p[i] /= sp;
      q[i] /= sq;
    }
    const double lambda = 0.2 + 3 * rng.uniform();
    double truth = 0, estimate = 0, capped = 0;
    for (int i = 0; i < v; i++) {
      const double f = std::sin(3.0 * i + state), xi = p[i] / q[i], a = obrs_accept(keys(lambda), xi);
      truth += p[i] * f;
      estimate += q[i] * a * obrs_weight(keys(lambda), xi, 1) * f;
      capped += q[i] * a * obrs_weight(keys(lambda, StateWeight::none, lambda), xi, 1);
    }
    EXPECT_NEAR(estimate, truth, 1e-12);
    EXPECT_LE(capped, 1 + 1e-12);  // a cap takes mass away
  }
}

TEST(Obrs, TopKBoundsTheNormaliserFromBelow) {
  const std::vector<double> p = {0.4, 0.3, 0.2, 0.1}, q = {0.1, 0.2, 0.3, 0.4};
  EXPECT_EQ(overlap(p, q, 1, 2).second, 0);  // the two sets of 2 have nothing in common
  EXPECT_NEAR(overlap(p, q, 1, 3).second, 0.4, 1e-12);
  EXPECT_NEAR(overlap(p, q, 1, 4).second, 0.6, 1e-12);
  EXPECT_NEAR(overlap(p, q, 1).second, 0.6, 1e-12);
  EXPECT_NEAR(overlap(p, q, 1, 2).first, 0.6, 1e-12);  // the overlap is always over all
}

std::vector<Trajectory> drawn(int count, float log_ratio) {
  std::vector<Trajectory> all;
  for (int i = 0; i < count; i++) {
    Trajectory t = trajectory(i / 4, 50);
    t.uid = sequence_uid(1, static_cast<uint64_t>(i), 0, 0);
    t.old_logprob.emplace(50, -1 + log_ratio);
    t.ruling = Ruling::accepted;
    all.push_back(std::move(t));
  }
  return all;
}

TEST(Obrs, CoinsBelongToTheTokenAndNotToTheBatch) {
  const uint64_t key = rng_key(7, RngStream::obrs, 3);
  std::vector<Trajectory> all = drawn(12, -0.7f), again = all;
  set_obrs(keys(1), key, all);
  for (size_t i = again.size(); i-- > 0;) set_obrs(keys(1), key, std::span(&again[i], 1));
  for (size_t i = 0; i < all.size(); i++) EXPECT_EQ(all[i].correction, again[i].correction);
  set_obrs(keys(1), rng_key(7, RngStream::obrs, 4), again);
  EXPECT_NE(all[0].correction, again[0].correction);
  EXPECT_NE(all[0].correction, all[1].correction);
}

// Tokens drawn from q stay at the rate Z.
TEST(Obrs, RateIsZWithinFourSigma) {
  const std::vector<double> p = {0.5, 0.3, 0.2}, q = {0.2, 0.3, 0.5};
  std::vector<Trajectory> all = drawn(400, 0);
  Rng rng(rng_key(5, RngStream::test, 2));
  for (Trajectory& t : all)
    for (float& x : *t.old_logprob) {
      const double u = rng.uniform();
      const size_t v = u < q[0] ? 0 : u < q[0] + q[1] ? 1 : 2;
      x = -1 + static_cast<float>(std::log(p[v] / q[v]));
    }
  set_obrs(keys(1), rng_key(7, RngStream::obrs, 1), all);
  double stay = 0;
  for (const Trajectory& t : all)
    for (const double w : *t.correction) stay += w != 0;
  EXPECT_NEAR(stay / 20000, 0.7, 4 * std::sqrt(0.7 * 0.3 / 20000));
}

// Equal policies: everything stays with weight 1; with lambda = 2 half of it with weight 2.
TEST(Obrs, EqualPolicies) {
  std::vector<Trajectory> all = drawn(40, 0);
  set_obrs(keys(1, StateWeight::z), 1, all);
  for (const Trajectory& t : all) EXPECT_EQ(t.correction, std::vector<double>(50, 1.0));
  set_obrs(keys(2), 1, all);
  double sum = 0;
  for (const Trajectory& t : all)
    for (const double w : *t.correction) {
      EXPECT_TRUE(w == 0 || w == 2);
      sum += w;
    }
  EXPECT_NEAR(sum / 2000, 1, 4 / std::sqrt(2000.0));
  set_obrs(keys(2, StateWeight::z, 1.5), 1, all);  // 2 Z = 1
  for (const Trajectory& t : all)
    for (const double w : *t.correction) EXPECT_TRUE(w == 0 || w == 1);
}

TEST(Obrs, LeavesWhatIsNotAcceptedAlone) {
  std::vector<Trajectory> all = drawn(2, 0);
  all[0].ruling = Ruling::rejected;
  all[1].ruling = Ruling::none;
  set_obrs(keys(1), 1, all);
  EXPECT_FALSE(all[0].correction);
  EXPECT_FALSE(all[1].correction);
}

}  // namespace
}  // namespace pare::test
