// Log-probs, losses and sampling, one row of logits at a time.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <vector>

#include "cpu/glue.h"

namespace pare::cpu {

namespace {

constexpr double kLogitNanoseconds = 1.5;

// Scratch of the kernels, of each thread.
float* scratch_of(int64_t vocabulary) {
  thread_local std::vector<float> scratch;
  const auto tiles = static_cast<size_t>((vocabulary + kVocabTile - 1) / kVocabTile);
  if (scratch.size() < 3 * tiles) scratch.resize(3 * tiles);
  return scratch.data();
}

// Turns a row of logits into logits / temperature, those outside the top_k and top_p sets into -infinity.
void restrict(float* row, int64_t vocabulary, const Sample& a) {
  thread_local std::vector<int32_t> ids;
  thread_local std::vector<float> z;
  ids.resize(static_cast<size_t>(vocabulary));
  std::iota(ids.begin(), ids.end(), 0);
  const auto before = [row](int32_t i, int32_t j) { return row[i] > row[j] || (row[i] == row[j] && i < j); };
  int64_t kept = vocabulary;
  if (a.top_k > 0 && a.top_k < vocabulary) {
    std::nth_element(ids.begin(), ids.begin() + a.top_k, ids.end(), before);
    kept = a.top_k;
  }
  z.assign(row, row + vocabulary);
  for (float& x : z) x /= a.temperature;
  if (a.top_p < 1) {
    float max = -INFINITY;
    for (int64_t i = 0; i < kept; i++) max = std::max(max, z[ids[i]]);
    std::vector<float> e(static_cast<size_t>(kept));  // exp(z - max) by place in `ids`
    const auto exponentials = [&] {
      for (int64_t i = 0; i < kept; i++) e[i] = z[ids[i]] - max;
      cpu_kernels().exp(e.data(), e.data(), kept);
    };
    exponentials();
    double total = 0, sum = 0;
    for (float x : e) total += x;
    // Sort ever longer heads of the list until one reaches top_p.
    int64_t n = 0;
    for (int64_t sorted = 0; n < kept && sum < a.top_p * total; n++) {
      if (n == sorted) {
        sorted = std::min(std::max<int64_t>(64, sorted * 8), kept);
        std::partial_sort(ids.begin() + n, ids.begin() + sorted, ids.begin() + kept, before);
        exponentials();
      }
      sum += e[n];
    }
    kept = n;
  }
  std::fill(row, row + vocabulary, -INFINITY);
  for (int64_t i = 0; i < kept; i++) row[ids[i]] = z[ids[i]];
}

}  // namespace

void logprob(const Logprob& a, Stream) {
  constexpr const char* op = "logprob";
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1];
  const float* const logits = a.logits.as<float>();
  float* const lp = a.logprob.as<float>();
  float* const entropy = a.entropy.as<float>();
  const int32_t* const target = index(op, "target", a.target, vocabulary);
  const Kernels& k = cpu_kernels();
  parallel(rows, kLogitNanoseconds * static_cast<double>(vocabulary), [&](Interval r) {
    k.logprob(lp, entropy, logits, target, vocabulary, a.temperature, r, scratch_of(vocabulary));
  });
}

// Ids among the top_k largest of both rows, ascending.
static const std::vector<int32_t>& common_ids(const float* p, const float* q, int64_t vocabulary, int64_t top_k) {
  thread_local std::vector<int32_t> of_p, of_q, common;
  for (const auto& [row, ids] : {std::pair{p, &of_p}, {q, &of_q}}) {
    ids->resize(static_cast<size_t>(vocabulary));
    std::iota(ids->begin(), ids->end(), 0);
    std::nth_element(ids->begin(), ids->begin() + top_k, ids->end(),
                     [row = row](int32_t i, int32_t j) { return row[i] > row[j] || (row[i] == row[j] && i < j); });
    std::sort(ids->begin(), ids->begin() + top_k);
  }
  common.clear();
  std::set_intersection(of_p.begin(), of_p.begin() + top_k, of_q.begin(), of_q.begin() + top_k,
                        std::back_inserter(common));
  return common;
}

void overlap_probs(const OverlapProbs& a, Stream) {
  const int64_t rows = a.p_logits.shape[0], vocabulary = a.p_logits.shape[1];
  const float* const p = a.p_logits.as<float>();
  const float* const q = a.q_logits.as<float>();
  float* const overlap = a.overlap.as<float>();
  float* const mass = a.mass.as<float>();
  const bool all = a.top_k == 0 || a.top_k >= vocabulary;
  const Kernels& k = cpu_kernels();
  parallel(rows, (all ? 4 : 12) * kLogitNanoseconds * static_cast<double>(vocabulary), [&](Interval r) {
    for (int64_t i = r.begin; i < r.end; i++) {
      const float *pi = p + i * vocabulary, *qi = q + i * vocabulary;
      const int32_t* ids = nullptr;
      int64_t n = -1;
      if (!all) {
        const std::vector<int32_t>& common = common_ids(pi, qi, vocabulary, a.top_k);
        ids = common.data(), n = static_cast<int64_t>(common.size());
      }
      k.overlap(overlap + i, mass + i, pi, qi, vocabulary, a.temperature, a.lambda, ids, n, scratch_of(vocabulary));
    }
  });
}

void logits_loss(const LogitsLoss& a, Stream) {
  constexpr const char* op = "logits_loss";
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1];
  const bool policy = a.spec.policy != PolicyLoss::nll, gspo = a.spec.policy == PolicyLoss::gspo;
  const bool exact = is_exact(a.spec.kl), sampled = a.spec.kl != KlLoss::none && !exact;
  const auto column = [](bool read, const Tensor& t) { return read ? t.as<float>() : nullptr; };
  const LogitsLossArgs args{.logprob = a.logprob.as<float>(),
                            .entropy = a.entropy.as<float>(),
                            .loss = a.loss.as<float>(),
                            .kl = a.kl.as<float>(),
                            .clipped = a.clipped.as<int32_t>(),
                            .logits = a.logits.as<float>(),
                            .target = index(op, "target", a.target, vocabulary),
                            .weight = a.weight.as<float>(),
                            .kl_weight = a.kl_weight.as<float>(),
                            .advantage = column(policy, a.advantage),
                            .old_logprob = column(policy && !gspo, a.old_logprob),
                            .log_ratio = column(gspo, a.log_ratio),
                            .ref_logprob = column(sampled, a.ref_logprob),
                            .ref_logits = exact ? a.ref_logits.as<float>() : nullptr,
                            .spec = a.spec,
                            .vocabulary = vocabulary};
  const Kernels& k = cpu_kernels();
  parallel(rows, 2 * kLogitNanoseconds * static_cast<double>(vocabulary),
           [&](Interval r) { k.logits_loss(args, r, scratch_of(vocabulary)); });
}

void sample(const Sample& a, Stream) {
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1];
  float* const logits = a.logits.as<float>();
  int32_t* const token = a.token.as<int32_t>();
  float* const lp = a.logprob.as<float>();
  const int32_t* const counter = a.counter.as<int32_t>();
  const bool restricted = a.temperature > 0 && ((a.top_k > 0 && a.top_k < vocabulary) || a.top_p < 1);
  const Kernels& k = cpu_kernels();
  parallel(rows, 4 * kLogitNanoseconds * static_cast<double>(vocabulary), [&](Interval r) {
    for (int64_t i = r.begin; i < r.end; i++) {
      float* const row = logits + i * vocabulary;
      if (restricted) restrict(row, vocabulary, a);
      token[i] = k.sample(row, vocabulary, restricted ? 1 : a.temperature, a.key, counter + 3 * i, lp + i,
                          scratch_of(vocabulary));
    }
  });
}

}  // namespace pare::cpu
