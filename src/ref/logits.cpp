// Log-probs, losses and sampling: everything that turns logits into numbers.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/rng.h"
#include "ops/token_loss.h"
#include "ref/ref.h"

namespace pare::ref {

namespace {

// log softmax(logits / temperature) of one row.
template <class T>
std::vector<double> log_softmax(const View<T>& logits, int64_t row, int64_t vocabulary, double temperature) {
  std::vector<double> z(vocabulary);
  for (int64_t v = 0; v < vocabulary; v++) z[v] = logits(row, v) / temperature;
  const double max = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (double x : z) sum += std::exp(x - max);
  for (double& x : z) x = x - max - std::log(sum);
  return z;
}

double entropy_of(const std::vector<double>& log_p) {
  double h = 0;
  for (double x : log_p) h -= x == -INFINITY ? 0 : std::exp(x) * x;
  return h;
}

// d row loss / d logits from the log-probs of the row and its token loss.
template <class T>
void loss_gradient(const LogitsLoss& a, int64_t row, const std::vector<double>& log_p, const std::vector<double>& log_q,
                   const std::vector<double>& centre, const TokenLoss<double>& token, double entropy, double kl) {
  const View<T> logits(a.logits);
  const double weight = View<T>(a.weight)(row), kl_weight = View<T>(a.kl_weight)(row);
  const int32_t target = View<int32_t>(a.target)(row);
  // d/dlp of everything that depends on the target's log-prob alone
  const double d_lp = weight * token.d_policy + kl_weight * a.spec.kl_coef * token.d_kl;
  const double centre_sum = std::accumulate(centre.begin(), centre.end(), 0.0);
  for (int64_t v = 0; v < a.logits.shape[1]; v++) {
    const double p = std::exp(log_p[v]);
    if (p == 0) {
      logits(row, v) = 0;
      continue;
    }
    double d = d_lp * ((v == target) - p);                                                             // dlp/dz
    d += kl_weight * a.spec.entropy_coef * p * (log_p[v] + entropy);                                   // -dH/dz
    if (a.spec.kl == KlLoss::exact) d += kl_weight * a.spec.kl_coef * p * (log_p[v] - log_q[v] - kl);  // dKL(p || q)/dz
    if (a.spec.kl == KlLoss::exact_forward)
      d += kl_weight * a.spec.kl_coef * (p - std::exp(log_q[v]));  // dKL(q || p)/dz
    if (a.spec.centring.on) d += kl_weight * View<T>(a.advantage)(row) * (centre[v] - p * centre_sum);
    logits(row, v) = static_cast<T>(d / a.spec.temperature);
  }
}

}  // namespace

void logprob(const Logprob& a, Stream) {
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1];
  expect_index("logprob", "target", a.target, vocabulary);
  dispatch("logprob", a.logits, [&]<class T>(T) {
    const View<T> lp(a.logprob), entropy(a.entropy), logits(a.logits);
    const View<int32_t> target(a.target);
    for (int64_t r = 0; r < rows; r++) {
      const std::vector<double> log_p = log_softmax(logits, r, vocabulary, a.temperature);
      lp(r) = static_cast<T>(log_p[target(r)]);
      entropy(r) = static_cast<T>(entropy_of(log_p));
    }
  });
}

// Ids of the `top_k` largest logits of a row, ascending.
template <class T>
static std::vector<int32_t> largest(const View<T>& logits, int64_t row, int64_t vocabulary, int64_t top_k) {
  std::vector<int32_t> ids(vocabulary);
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t i, int32_t j) { return logits(row, i) > logits(row, j); });
  ids.resize(top_k);
  std::sort(ids.begin(), ids.end());
  return ids;
}

void overlap_probs(const OverlapProbs& a, Stream) {
  const int64_t rows = a.p_logits.shape[0], vocabulary = a.p_logits.shape[1];
  dispatch("overlap_probs", a.p_logits, [&]<class T>(T) {
    const View<T> p_logits(a.p_logits), q_logits(a.q_logits), overlap(a.overlap), mass(a.mass);
    for (int64_t r = 0; r < rows; r++) {
      const std::vector<double> log_p = log_softmax(p_logits, r, vocabulary, a.temperature);
      const std::vector<double> log_q = log_softmax(q_logits, r, vocabulary, a.temperature);
      double common = 1, kept = 1;
      for (int64_t v = 0; v < vocabulary; v++) {
        const double p = std::exp(log_p[v]), q = std::exp(log_q[v]);
        common -= std::max(q - p, 0.0);
        kept -= std::max(q - p / a.lambda, 0.0);
      }
      if (a.top_k > 0 && a.top_k < vocabulary) {
        const std::vector<int32_t> of_p = largest(p_logits, r, vocabulary, a.top_k);
        const std::vector<int32_t> of_q = largest(q_logits, r, vocabulary, a.top_k);
        kept = 0;
        for (const int32_t v : of_p)
          if (std::binary_search(of_q.begin(), of_q.end(), v))
            kept += std::min(std::exp(log_q[v]), std::exp(log_p[v]) / a.lambda);
      }
      overlap(r) = static_cast<T>(common);
      mass(r) = static_cast<T>(kept);
    }
  });
}

void logits_loss(const LogitsLoss& a, Stream) {
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1];
  const LossSpec& spec = a.spec;
  const bool policy = spec.policy != PolicyLoss::nll, gspo = spec.policy == PolicyLoss::gspo;
  const bool exact = is_exact(spec.kl), sampled_kl = spec.kl != KlLoss::none && !exact;
  expect_index("logits_loss", "target", a.target, vocabulary);
  dispatch("logits_loss", a.logits, [&]<class T>(T) {
    const View<T> logits(a.logits), ref_logits(a.ref_logits), sampler_logits(a.sampler_logits);
    const View<T> lp(a.logprob), entropy(a.entropy), loss(a.loss), kl(a.kl);
    const View<T> advantage(a.advantage), old_lp(a.old_logprob), log_ratio(a.log_ratio), ref_lp(a.ref_logprob);
    const View<int32_t> target(a.target), clipped(a.clipped);
    for (int64_t r = 0; r < rows; r++) {
      const std::vector<double> log_p = log_softmax(logits, r, vocabulary, spec.temperature);
      const TokenLoss<double> token = token_loss<double>(
          spec, log_p[target(r)], policy && !gspo ? old_lp(r) : 0, gspo ? log_ratio(r) : 0, policy ? advantage(r) : 0,
          sampled_kl ? ref_lp(r) : 0, [](double x) { return std::exp(x); });
      const double h = entropy_of(log_p);
      double divergence = token.kl;
      std::vector<double> log_q;
      if (exact) {
        log_q = log_softmax(ref_logits, r, vocabulary, spec.temperature);
        const auto add = [&](const std::vector<double>& of, const std::vector<double>& to) {
          for (int64_t v = 0; v < vocabulary; v++)
            if (of[v] > -INFINITY) divergence += std::exp(of[v]) * (of[v] - to[v]);
        };
        spec.kl == KlLoss::exact ? add(log_p, log_q) : add(log_q, log_p);
      }
      std::vector<double> centre;  // c_v
      if (spec.centring.on) {
        centre = log_softmax(sampler_logits, r, vocabulary, spec.temperature);
        for (int64_t v = 0; v < vocabulary; v++)
          centre[v] = centring_mass(spec.centring, std::exp(log_p[v]), std::exp(centre[v]));
      }
      lp(r) = static_cast<T>(log_p[target(r)]);
      entropy(r) = static_cast<T>(h);
      loss(r) = static_cast<T>(token.policy);
      kl(r) = static_cast<T>(divergence);
      clipped(r) = token.clipped;
      loss_gradient<T>(a, r, log_p, log_q, centre, token, h, divergence);
    }
  });
}

void truncate(const Truncate& a, Stream) {
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1];
  dispatch("truncate", a.logits, [&]<class T>(T) {
    const View<T> logits(a.logits);
    for (int64_t r = 0; r < rows; r++) {
      std::vector<int32_t> ids(vocabulary);
      std::iota(ids.begin(), ids.end(), 0);
      std::stable_sort(ids.begin(), ids.end(), [&](int32_t i, int32_t j) { return logits(r, i) > logits(r, j); });
      if (a.keep.top_k > 0 && a.keep.top_k < vocabulary) ids.resize(a.keep.top_k);
      const double max = logits(r, ids[0]);
      const auto share = [&](int32_t id) { return std::exp((logits(r, id) - max) / a.temperature); };
      const auto units = [&](int32_t id) { return static_cast<uint64_t>(share(id) * 0x1p40); };
      uint64_t total = 0, sum = 0;
      for (int32_t id : ids) total += units(id);
      std::vector<bool> kept(vocabulary);
      for (int32_t id : ids) {
        if (a.keep.top_p < 1 && static_cast<double>(sum) >= double(a.keep.top_p) * static_cast<double>(total)) break;
        sum += units(id);
        kept[id] = share(id) >= a.keep.min_p;
      }
      for (int64_t v = 0; v < vocabulary; v++)
        if (!kept[v]) logits(r, v) = -INFINITY;
    }
  });
}

void list_kept(const ListKept& a, Stream) {
  const int64_t limit = a.ids.shape[1] - 1;
  dispatch("list_kept", a.logits, [&]<class T>(T) {
    const View<T> logits(a.logits);
    const View<int32_t> ids(a.ids);
    for (int64_t r = 0; r < a.logits.shape[0]; r++) {
      int32_t n = 0;
      for (int32_t v = 0; v < a.logits.shape[1]; v++)
        if (logits(r, v) > -INFINITY && n++ < limit) ids(r, n) = v;
      ids(r, 0) = n;
      for (int64_t i = n; i < limit; i++) ids(r, 1 + i) = -1;
    }
  });
}

void keep_listed(const KeepListed& a, Stream) {
  dispatch("keep_listed", a.logits, [&]<class T>(T) {
    const View<T> logits(a.logits);
    const View<int32_t> ids(a.ids);
    for (int64_t r = 0; r < a.logits.shape[0]; r++) {
      std::vector<bool> kept(a.logits.shape[1]);
      for (int32_t i = 0; i < ids(r, 0); i++) kept[ids(r, 1 + i)] = true;
      for (int64_t v = 0; v < a.logits.shape[1]; v++)
        if (!kept[v]) logits(r, v) = -INFINITY;
    }
  });
}

void sample(const Sample& a, Stream) {
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1];
  dispatch("sample", a.logits, [&]<class T>(T) {
    const View<T> logits(a.logits), lp(a.logprob);
    const View<int32_t> token(a.token), counter(a.counter);
    for (int64_t r = 0; r < rows; r++) {
      if (a.temperature == 0) {
        token(r) = static_cast<int32_t>(std::max_element(&logits(r, 0), &logits(r, 0) + vocabulary) - &logits(r, 0));
        lp(r) = 0;
        continue;
      }
      const uint64_t uid = uint64_t(uint32_t(counter(r, 1))) << 32 | uint32_t(counter(r, 0));
      const double max = *std::max_element(&logits(r, 0), &logits(r, 0) + vocabulary) / double(a.temperature);
      double best = -INFINITY, chosen = 0, sum = 0;
      token(r) = -1;
      for (int32_t id = 0; id < vocabulary; id++) {
        const double z = logits(r, id) / double(a.temperature);
        const double u = uniform_open(rng_word(a.key, uid, uint32_t(counter(r, 2)), uint32_t(id)));
        const double score = z - std::log(-std::log(u));
        if (score > best || (score == best && id < token(r))) {
          best = score;
          chosen = z;
          token(r) = id;
        }
        sum += std::exp(z - max);
      }
      lp(r) = static_cast<T>(chosen - max - std::log(sum));
    }
  });
}

}  // namespace pare::ref
