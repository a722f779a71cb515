// The loss of one token: golden values, clamps, and derivatives by differences.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "ops/token_loss.h"

namespace pare {

namespace {

TokenLoss<double> loss(const LossSpec& spec, double lp, double old, double seq, double advantage, double ref) {
  return token_loss<double>(spec, lp, old, seq, advantage, ref, [](double x) { return std::exp(x); });
}

nlohmann::json golden() {
  std::ifstream file("tests/golden/losses.json");
  expect(file.good(), "tests/golden/losses.json: not found; run the tests from the root of the repository");
  return nlohmann::json::parse(file);
}

LossSpec ppo(float low, float high, float c = 0) {
  return {.policy = PolicyLoss::ppo, .clip_low = low, .clip_high = high, .clip_c = c};
}

// The specification holds the clip range in f32, the golden values in decimals.
constexpr double kDecimal = 1e-7;

TEST(TokenLoss, GoldenPolicyLosses) {
  const nlohmann::json cases = golden().at("token_loss");
  EXPECT_EQ(cases.size(), 20u);
  for (const auto& c : cases) {
    const double A = c.at("A"), lp = -2, old = lp - std::log(c.at("ratio").get<double>());
    const std::pair<const char*, LossSpec> specs[] = {
        {"ppo_02_02", ppo(0.2f, 0.2f)}, {"clip_higher_02_028", ppo(0.2f, 0.28f)}, {"dual_c3", ppo(0.2f, 0.28f, 3)}};
    for (const auto& [key, spec] : specs) {
      const double expected = c.at(key);
      EXPECT_NEAR(loss(spec, lp, old, 0, A, 0).policy, expected, kDecimal * (1 + std::fabs(expected))) << key << c;
      LossSpec gspo = spec;  // the same curve over the sequence's ratio
      gspo.policy = PolicyLoss::gspo;
      EXPECT_NEAR(loss(gspo, lp, NAN, lp - old, A, 0).policy, expected, kDecimal * (1 + std::fabs(expected)))
          << key << c;
    }
  }
}

TEST(TokenLoss, GoldenKlEstimates) {
  const nlohmann::json cases = golden().at("kl");
  EXPECT_EQ(cases.size(), 9u);
  int clamped = 0;
  for (const auto& c : cases) {
    double x = c.at("ref_minus_logp"), k1 = c.at("k1"), k2 = c.at("k2"), k3 = c.at("k3");
    if (std::fabs(x) > 20) {  // the input is clamped, and so is the output of k3
      x = std::copysign(20, x);
      k1 = -x;
      k2 = x * x / 2;
      k3 = std::exp(x) - x - 1;
      clamped++;
    }
    k3 = std::min(k3, 10.0);
    const double lp = -30, ref = lp + c.at("ref_minus_logp").get<double>();
    auto kl = [&](KlLoss kind) { return loss({.kl = kind}, lp, 0, 0, 0, ref).kl; };
    EXPECT_NEAR(kl(KlLoss::k1), k1, 1e-13) << c;
    EXPECT_NEAR(kl(KlLoss::k2), k2, 1e-13 * (1 + k2)) << c;
    EXPECT_NEAR(kl(KlLoss::k3), k3, 1e-12 * (1 + k3)) << c;
    EXPECT_EQ(kl(KlLoss::none), 0);
    EXPECT_EQ(kl(KlLoss::exact), 0) << "summed over the vocabulary by the op";
  }
  EXPECT_EQ(clamped, 2);
}

// verl: clamp(exp(x) - x - 1, -10, 10).
TEST(TokenLoss, K3IsAtMostTen) {
  const LossSpec k3{.kl = KlLoss::k3};
  EXPECT_EQ(loss(k3, -5, 0, 0, 0, 0).kl, 10);
  EXPECT_EQ(loss(k3, -5, 0, 0, 0, 0).d_kl, 0);
  EXPECT_LT(loss(k3, -2.6, 0, 0, 0, 0).kl, 10);  // exp(2.6) - 3.6 = 9.86
  EXPECT_NEAR(loss(k3, -2.6, 0, 0, 0, 0).d_kl, 1 - std::exp(2.6), 1e-12);
  EXPECT_NEAR(loss(k3, 0, 0, 0, 0, -9).kl, 8, 1e-3);  // the other side grows slowly
  EXPECT_EQ(loss({.kl = KlLoss::k3}, -30, 0, 0, 0, 0).kl, loss({.kl = KlLoss::k3}, -20, 0, 0, 0, 0).kl);
  EXPECT_EQ(loss({.kl = KlLoss::k2}, -30, 0, 0, 0, 0).d_kl, 0);
  EXPECT_EQ(loss({.kl = KlLoss::k1}, -30, 0, 0, 0, 0).d_kl, 0);
}

TEST(TokenLoss, RatioIsClamped) {
  const LossSpec open = ppo(1, 1e30f);  // nothing clipped
  EXPECT_EQ(loss(open, -1, -51, 0, 1, 0).policy, -std::exp(20.0));
  EXPECT_EQ(loss(open, -1, -51, 0, 1, 0).d_policy, 0);
  EXPECT_EQ(loss(open, -51, -1, 0, 1, 0).policy, -std::exp(-20.0));
}

TEST(TokenLoss, ClippedSaysWhichBranch) {
  const LossSpec spec = ppo(0.2f, 0.28f, 3);
  auto clipped = [&](double ratio, double A) { return loss(spec, 0, -std::log(ratio), 0, A, 0).clipped; };
  EXPECT_EQ(clipped(1.0, 1), 0);
  EXPECT_EQ(clipped(1.3, 1), 1);  // too much gained
  EXPECT_EQ(clipped(0.5, 1), 0);  // the plain loss is the larger
  EXPECT_EQ(clipped(0.5, -1), 1);
  EXPECT_EQ(clipped(1.3, -1), 0);
  EXPECT_EQ(clipped(5.0, -1), 2);  // dual clip
  EXPECT_EQ(clipped(5.0, 1), 1);   // no dual clip for positive advantages
  EXPECT_EQ(loss(spec, 0, -std::log(5.0), 0, -1, 0).d_policy, 0);
}

TEST(TokenLoss, WithoutAnOldLogprobTheRatioIsOne) {
  const auto a = loss(ppo(0.2f, 0.2f), -1.7, NAN, 0, 0.6, 0), b = loss(ppo(0.2f, 0.2f), -1.7, -1.7, 0, 0.6, 0);
  EXPECT_EQ(a.policy, -0.6);
  EXPECT_EQ(a.d_policy, -0.6);
  EXPECT_EQ(a.policy, b.policy);
  EXPECT_EQ(a.d_policy, b.d_policy);
}

TEST(TokenLoss, CispoKeepsItsGradientWhereItClips) {
  LossSpec spec = ppo(0.2f, 0.28f);
  spec.policy = PolicyLoss::cispo;
  const auto t = loss(spec, -1.5, -2.5, 0, 0.5, 0);  // ratio e
  EXPECT_NEAR(t.d_policy, -1.28 * 0.5, kDecimal);
  EXPECT_NEAR(t.policy, 1.28 * 0.5 * 1.5, kDecimal);
  EXPECT_EQ(t.clipped, 1);
}

// Derivatives with respect to lp, on both sides of every kink.  gspo is the derivative of the ratio exp(lp - sg(lp) +
// seq), cispo that of lp with the ratio held.
TEST(TokenLoss, DerivativesEqualDifferences) {
  const double h = 1e-6, lp = -1.3;
  for (PolicyLoss policy : {PolicyLoss::nll, PolicyLoss::ppo, PolicyLoss::gspo, PolicyLoss::cispo})
    for (KlLoss kl : {KlLoss::none, KlLoss::k1, KlLoss::k2, KlLoss::k3})
      for (double A : {1.4, -0.8})
        for (double gap : {-25.0, -0.6, -0.15, 0.1, 0.4, 0.9, 25.0}) {
          LossSpec spec = ppo(0.2f, 0.28f, 2);
          spec.policy = policy;
          spec.kl = kl;
          auto at = [&](double d) {
            const double old = lp - gap + (policy == PolicyLoss::cispo ? d : 0);
            return loss(spec, lp + d, old, gap + d, A, lp + gap);
          };
          const auto t = at(0), up = at(h), down = at(-h);
          const std::string what = cat("policy ", int(policy), ", kl ", int(kl), ", A ", A, ", log-ratio ", gap);
          EXPECT_NEAR(t.d_policy, (up.policy - down.policy) / (2 * h), 1e-8 * (1 + std::fabs(t.policy))) << what;
          EXPECT_NEAR(t.d_kl, (up.kl - down.kl) / (2 * h), 1e-8 * (1 + std::fabs(t.kl))) << what;
        }
}

}  // namespace

}  // namespace pare
