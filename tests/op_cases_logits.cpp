// Rows of the op test: log-probs, losses, sampling.
#include "op_cases.h"
#include "ops/token_loss.h"

namespace pare::test {

namespace {

// z = logits / temperature loses 2 roundings of |z|, the sum of exponentials has one sign, its logarithm is below 8.
double logprob_error(int64_t vocabulary, double max_z) { return lanes(double(vocabulary)) + kRound * (4 * max_z + 16); }
constexpr double kLogitScale = 2;  // normals of this scale stay below 5 * kLogitScale

std::vector<double> logits_of(int64_t rows, int64_t vocabulary, const std::string& name = "logits") {
  return normal(name, rows * vocabulary, kLogitScale);
}

void add_logprob(std::vector<OpCase>& cases) {
  struct S {
    int64_t rows, vocabulary;
    float temperature;
  };
  for (const S& s : {S{1, 1, 1}, {3, 17, 1}, {5, 16, 0.5f}, {2, 129, 1.3f}, {7, 1021, 1}, {1, 63, 3}, {2, 2051, 1}}) {
    const int64_t R = s.rows, V = s.vocabulary;
    const float temperature = s.temperature;
    cases.push_back({"logprob", cat("R", R, "_V", V), [=](OpRun& r) {
                       Logprob a{};
                       a.logprob = r.out("logprob", {R}), a.entropy = r.out("entropy", {R});
                       a.logits = r.in("logits", {R, V}, logits_of(R, V));
                       a.target = r.index("target", {R}, below("target", R, V)), a.temperature = temperature;
                       r.call(&Table::logprob, a);
                       const double error = logprob_error(V, 5 * kLogitScale / temperature);
                       r.bound("logprob", error);
                       r.bound("entropy", 8 * error);  // sum of z exp(z) / sum: below log V plus the entropy
                     }});
  }
}

struct Loss {
  int64_t rows, vocabulary;
  LossSpec spec;
  bool own_logprob;  // old_logprob NaN
};

void logits_loss(OpRun& r, const Loss& s) {
  const int64_t R = s.rows, V = s.vocabulary;
  const LossSpec& spec = s.spec;
  const bool gspo = spec.policy == PolicyLoss::gspo, exact = spec.kl == KlLoss::exact;
  const bool sampled_kl = spec.kl != KlLoss::none && !exact;
  const std::vector<int32_t> target = below("target", R, V);
  // Old and reference log-probs near those of the logits, so that ratios fall on both sides of the clip range.
  OpRun now(table_ref, DType::f64);
  now.call(&Table::logprob,
           Logprob{now.out("logprob", {R}), now.out("entropy", {R}), now.in("logits", {R, V}, logits_of(R, V)),
                   now.index("target", {R}, target), spec.temperature});
  const std::vector<double> lp = now.values("logprob");
  std::vector<double> old = normal("old", R, 0.4), ref = normal("ref", R, 0.7), ratio = normal("ratio", R, 0.3);
  for (int64_t i = 0; i < R; i++) old[i] = s.own_logprob ? NAN : float(lp[i] + old[i]), ref[i] = float(lp[i] + ref[i]);
  std::vector<double> weight = normal("weight", R), kl_weight = normal("kl_weight", R), A = normal("advantage", R, 1.5);
  for (int64_t i = 0; i < R; i++) weight[i] = std::fabs(weight[i]), kl_weight[i] = std::fabs(kl_weight[i]);
  if (R > 2) weight[2] = 0;

  LogitsLoss a{};
  a.logprob = r.out("logprob", {R}), a.entropy = r.out("entropy", {R}), a.loss = r.out("loss", {R});
  a.kl = r.out("kl", {R}), a.clipped = r.index_out("clipped", {R});
  a.logits = r.inout("logits", {R, V}, logits_of(R, V));
  a.target = r.index("target", {R}, target);
  a.weight = r.in("weight", {R}, weight), a.kl_weight = r.in("kl_weight", {R}, kl_weight);
  a.advantage = r.in("advantage", {R}, A), a.old_logprob = r.in("old_logprob", {R}, old);
  if (gspo) a.log_ratio = r.in("log_ratio", {R}, ratio);
  if (sampled_kl) a.ref_logprob = r.in("ref_logprob", {R}, ref);
  if (exact) a.ref_logits = r.in("ref_logits", {R, V}, logits_of(R, V, "ref_logits"));
  a.spec = spec;
  r.call(&Table::logits_loss, a);

  // The log-prob's error passes to the losses by their slopes; log p - log q stays below 40.
  const double error = logprob_error(V, 5 * kLogitScale / spec.temperature);
  std::vector<double> loss(R), kl(R), logits(R * V);
  for (int64_t i = 0; i < R; i++) {
    const auto t =
        token_loss<double>(spec, lp[i], old[i], ratio[i], A[i], ref[i], [](double x) { return std::exp(x); });
    loss[i] = 4 * error * (1 + std::fabs(t.policy) + std::fabs(t.d_policy));
    kl[i] = 4 * error * (1 + std::fabs(t.kl) + std::fabs(t.d_kl) + (exact ? 40 : 0));
    const double scale =
        weight[i] * std::fabs(t.d_policy) +
        kl_weight[i] * (spec.kl_coef * (1 + std::fabs(t.d_kl) + (exact ? 40 : 0)) + spec.entropy_coef * 20);
    for (int64_t v = 0; v < V; v++) logits[i * V + v] = 4 * error * scale / spec.temperature;
  }
  r.bound("logprob", error), r.bound("entropy", 8 * error);
  r.bound("loss", loss), r.bound("kl", kl), r.bound("logits", logits);
}

void add_losses(std::vector<OpCase>& cases) {
  const std::pair<const char*, PolicyLoss> policies[] = {
      {"nll", PolicyLoss::nll}, {"ppo", PolicyLoss::ppo}, {"gspo", PolicyLoss::gspo}, {"cispo", PolicyLoss::cispo}};
  const std::pair<const char*, KlLoss> kls[] = {
      {"none", KlLoss::none}, {"k1", KlLoss::k1}, {"k2", KlLoss::k2}, {"k3", KlLoss::k3}, {"exact", KlLoss::exact}};
  for (const auto& [policy_name, policy] : policies)
    for (const auto& [kl_name, kl] : kls) {
      Loss s{.rows = 13, .vocabulary = 17, .spec = {.policy = policy, .kl = kl}, .own_logprob = false};
      s.spec.clip_high = 0.28f, s.spec.clip_c = 1.5f, s.spec.kl_coef = 0.3f, s.spec.entropy_coef = 0.1f;
      s.spec.temperature = 0.7f;
      const std::string name = cat(policy_name, "_", kl_name);
      cases.push_back({"logits_loss", cat(name, "_R13_V17"), [s](OpRun& r) { logits_loss(r, s); }});
      s.rows = 3, s.vocabulary = 257, s.spec.temperature = 1, s.spec.entropy_coef = 0, s.own_logprob = true;
      cases.push_back({"logits_loss", cat(name, "_own_R3_V257"), [s](OpRun& r) { logits_loss(r, s); }});
    }
  // More than the CUDA kernels take at a time.
  cases.push_back({"logits_loss", "exact_R2_V2051", [](OpRun& r) {
                     logits_loss(r, {2, 2051, {.kl = KlLoss::exact, .kl_coef = 0.3f, .entropy_coef = 0.1f}, false});
                   }});
  cases.push_back({"logits_loss", "R1_V1", [](OpRun& r) { logits_loss(r, {1, 1, {}, false}); }});
}

void add_overlap(std::vector<OpCase>& cases) {
  struct S {
    int64_t rows, vocabulary;
    float temperature, lambda;
    int32_t top_k;
  };
  for (const S& s : {S{1, 1, 1, 1, 0},
                     {5, 17, 1, 1, 0},
                     {3, 129, 0.7f, 2.5f, 0},
                     {7, 1021, 1.3f, 0.5f, 0},
                     {9, 33, 1, 1, 5},
                     {4, 257, 0.8f, 2, 20},
                     {2, 16, 1, 1, 16}})
    cases.push_back({"overlap_probs", cat("R", s.rows, "_V", s.vocabulary, "_k", s.top_k), [s](OpRun& r) {
                       const int64_t R = s.rows, V = s.vocabulary;
                       // q near p, with ties; the top sets have some ids in common.
                       std::vector<double> p = logits_of(R, V), q = logits_of(R, V, "noise");
                       for (size_t i = 0; i < p.size(); i++) {
                         p[i] = std::round(p[i] * 8) / 8;
                         q[i] = i % 3 == 0 ? p[i] : std::round((p[i] + 0.3 * q[i]) * 8) / 8;
                       }
                       OverlapProbs a{};
                       a.overlap = r.out("overlap", {R}), a.mass = r.out("mass", {R});
                       a.p_logits = r.in("p_logits", {R, V}, p), a.q_logits = r.in("q_logits", {R, V}, q);
                       a.temperature = s.temperature, a.lambda = s.lambda, a.top_k = s.top_k;
                       r.call(&Table::overlap_probs, a);
                       // Each term has the relative error of a probability; the terms add up to 1 or 1 / lambda at
                       // most.
                       const double error = 2 * logprob_error(V, 8 * kLogitScale / s.temperature);
                       r.bound("overlap", error), r.bound("mass", error * std::max(1.0, 1.0 / s.lambda));
                     }});
}

void add_sample(std::vector<OpCase>& cases) {
  struct S {
    int64_t rows, vocabulary;
    float temperature;
    int32_t top_k;
    float top_p;
  };
  int i = 0;
  for (const S& s : {S{1, 1, 1, 0, 1},
                     {5, 17, 1, 0, 1},
                     {33, 129, 0.7f, 0, 1},
                     {33, 129, 0, 0, 1},
                     {33, 129, 1, 1, 1},
                     {33, 129, 1.3f, 5, 1},
                     {33, 129, 1, 0, 0.6f},
                     {33, 65, 0.8f, 20, 0.9f},
                     {7, 1021, 1, 1000, 0.99f},
                     {3, 16, 2, 16, 0.01f}})
    cases.push_back({"sample", cat("case", i++, "_R", s.rows, "_V", s.vocabulary), [s](OpRun& r) {
                       const int64_t R = s.rows, V = s.vocabulary;
                       Sample a{};
                       a.token = r.index_out("token", {R}), a.logprob = r.out("logprob", {R});
                       // Rounded to eighths: many ties, as bf16 logits have.
                       std::vector<double> logits = logits_of(R, V);
                       for (double& x : logits) x = std::round(x * 8) / 8;
                       a.logits = r.scratch("logits", {R, V}, logits);
                       a.counter = r.index("counter", {R, 3}, below("counter", R * 3, INT32_MAX));
                       a.key = rng_key(7, RngStream::sample, 3);
                       a.temperature = s.temperature, a.top_k = s.top_k, a.top_p = s.top_p;
                       r.call(&Table::sample, a);
                       // Tokens are equal: at these seeds no two scores lie within rounding of each other.
                       r.bound("logprob", s.temperature == 0 ? 0 : logprob_error(V, 5 * kLogitScale / s.temperature));
                     }});
}

}  // namespace

void add_logits_cases(std::vector<OpCase>& cases) {
  add_logprob(cases);
  add_losses(cases);
  add_overlap(cases);
  add_sample(cases);
}

}  // namespace pare::test
